"""Values as messages, and messages on a socket.

A value is cut in two. Its tensors travel as raw bytes, the payload, each at a 64-byte aligned offset. The rest, the body, is pickled
with a number in place of each tensor.

    length of the head | head (msgspec: a `MessageFrame`) | body | payload

is one message. On one host a large payload is not part of the frame: it lies in a memfd whose descriptor travels beside the head. A
memfd has no name, so nothing is left behind however the processes end.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import hmac
import io
import math
import os
import pickle
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import numpy as np
import torch
from cloudpickle.cloudpickle import _class_setstate

from midstream.errors import ChannelError, UnsendableError
from midstream.trace.program import is_sent
from midstream.tree import is_raw, movable

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper in the frame than in a memfd of its own
_GREETING = b"midstream-results-2"
_NONCE_BYTES = 32
_DIGEST_BYTES = 32


class Entry(NamedTuple):
    """One tensor of a message. A tensor that was sent earlier on the same stream has no dtype: the receiver looks it up."""

    number: int | None  # its number on the stream; None if the message belongs to no stream
    dtype: str | None = None  # "bfloat16"
    shape: tuple[int, ...] = ()
    offset: int = 0  # bytes from the start of the payload


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Aligned offsets for `tensors` in a payload, and the payload's size in bytes.

    The tensors of one device lie next to each other, so that they can be staged as one range.
    """
    offsets, end = [0] * len(tensors), 0
    for i in sorted(range(len(tensors)), key=lambda i: str(tensors[i].device)):
        offsets[i] = end
        size = tensors[i].numel() * tensors[i].element_size()
        end += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return offsets, end


def resolve(payload: torch.Tensor, table: Sequence[Entry], known: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
    """The tensors of a message: new ones as views of `payload` (uint8, flat), the others from `known`, None if lost.

    New tensors of a stream are added to `known`. Each tensor has a storage that ends where the tensor ends, because
    `torch.save` writes the whole storage. All of them keep the payload alive.
    """
    memory = payload.numpy()
    tensors: list[torch.Tensor | None] = []
    for entry in table:
        if entry.dtype is None:
            tensors.append(known.get(entry.number) if entry.number is not None else None)
            continue
        tensor = _view(memory, entry.dtype, entry.shape, entry.offset)
        tensors.append(tensor)
        if entry.number is not None:
            known[entry.number] = tensor
    return tensors


def _view(memory: np.ndarray, dtype_name: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).reshape(shape)


class Stream:
    """The tensors that a stream has carried, as the sender remembers them: weakly."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # id -> (tensor, version, number)
        self._count = 0

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number under which this tensor was sent, if it was and has not changed since."""
        reference, version, number = self._sent.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or version != _version(tensor):
            return None
        return number

    def add(self, tensor: torch.Tensor) -> int:
        number, self._count = self._count, self._count + 1
        self._sent[id(tensor)] = (weakref.ref(tensor), _version(tensor), number)
        return number


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their changes


class _Pickler(cloudpickle.Pickler):
    """Pickles a value and collects its tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:  # unlike persistent_id, not called for every number and string
        if not is_raw(obj):
            if isinstance(obj, torch.Tensor) and (there := movable(obj)) is not obj:
                return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)
        self.tensors.append(obj)  # called once for each tensor: pickle remembers what it has seen
        return _tensor, (len(self.tensors) - 1,)


def _tensor(number: int) -> torch.Tensor:
    """Stands in a body for the message's tensor of that number; `_Unpickler` replaces it."""
    raise RuntimeError("A body can only be loaded together with its tensors.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        found = super().find_class(module, name)
        return _fill_copies if found is _class_setstate else found


def _fill_copies(kind: type, state: Any) -> Any:
    """Give a class that came by value its attributes, unless it is a class of this process itself, which a trace has returned."""
    return kind if is_sent(kind) else _class_setstate(kind, state)


class Packed(NamedTuple):
    """A value cut in two: the pickled body, and the tensors that have to travel with it."""

    body: bytes
    table: list[Entry]
    tensors: list[torch.Tensor]  # the new ones only, without grad, in the table's order
    offsets: list[int]  # bytes, one for each of `tensors`
    size: int  # bytes of the payload


def pack(value: Any, stream: Stream | None = None, exact: bool = False) -> Packed:
    """Cut `value` in two. Parts that cannot be pickled are replaced by an `UnsendableError`; this never raises for them.

    With `exact`, tensors made in inference mode are sent again even if `stream` has carried them: their changes cannot be seen.
    """
    try:
        body, found = _pickle(value)
    except Exception as error:
        body, found = _pickle_what_can_be(value, error)
    known = [stream.find(tensor) if stream and not (exact and tensor.is_inference()) else None for tensor in found]
    new = [tensor for tensor, number in zip(found, known, strict=True) if number is None]
    offsets, size = lay_out(new)
    places = iter(offsets)
    table = [
        Entry(number)
        if number is not None
        else Entry(stream.add(tensor) if stream else None, str(tensor.dtype)[6:], tuple(tensor.shape), next(places))
        for tensor, number in zip(found, known, strict=True)
    ]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter class may wrap what detach returns
        return Packed(body, table, [tensor.detach() for tensor in new], offsets, size)


def unpack(body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> Any:
    """The value; an `UnsendableError` if a tensor was lost, or if this process cannot rebuild the value, for example because it lacks a
    class."""
    if any(tensor is None for tensor in tensors):
        return UnsendableError("(unknown here)", "a tensor sent earlier on its stream was dropped")
    try:
        return _Unpickler(body, tensors).load()
    except Exception as error:
        return UnsendableError("(unknown here)", f"rebuilding it failed: {error!r}")


def _pickle(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def _pickle_what_can_be(value: Any, error: Exception) -> tuple[bytes, list[torch.Tensor]]:
    try:
        return _pickle(_without_unpicklables(value))
    except Exception:  # a cycle, or a container whose own class cannot be pickled
        return _pickle(UnsendableError(type(value).__qualname__, repr(error)))


def _without_unpicklables(value: Any) -> Any:
    """`value` with an `UnsendableError` for each leaf that cannot be pickled; containers are rebuilt."""
    if isinstance(value, dict):
        return {_without_unpicklables(key): _without_unpicklables(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_without_unpicklables, value))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_without_unpicklables, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, _without_unpicklables(getattr(value, field.name)))
        return rebuilt
    try:
        _pickle(value)
    except Exception as error:
        return UnsendableError(type(value).__qualname__, repr(error))
    return value


class MessageFrame(msgspec.Struct, tag="message", array_like=True):
    """The head of a message.

    Attributes:
        header: the pickled header, read before anything else to find the mailbox.
        stream: the stream that the message belongs to, if any.
        table: the message's tensors.
        body, payload: their sizes in bytes.
    """

    header: bytes
    stream: str | None
    table: list[Entry]
    body: int
    payload: int


class StreamEnd(msgspec.Struct, tag="end", array_like=True):
    """No more messages of this stream come: its tensors can be forgotten."""

    stream: str


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True):
    """The sender closes in good order."""


Frame = MessageFrame | StreamEnd | Goodbye
_LENGTH = struct.Struct("<I")  # bytes of the head
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def write(
    sock: socket.socket,
    frame: Frame,
    body: bytes = b"",
    payload: torch.Tensor | None = None,
    descriptor: int | None = None,
) -> None:
    """Send a frame. The payload (uint8, flat) goes inside it, or lies in the memfd `descriptor`, which the caller closes."""
    head = _encode(frame)
    data = b"".join([_LENGTH.pack(len(head)), head, body])
    sent = _send_with(sock, data, descriptor) if descriptor is not None else 0
    sock.sendall(memoryview(data)[sent:])
    if descriptor is None and payload is not None and payload.numel():
        sock.sendall(payload.numpy().data)


def _send_with(sock: socket.socket, data: bytes, descriptor: int) -> int:
    """Send the descriptor and the beginning of `data`; returns how many bytes of it went along."""
    while True:
        try:
            if sent := socket.send_fds(sock, [data], [descriptor]):
                return sent
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # the receiver has yet to take the descriptors already sent
                raise
            time.sleep(0.001)


def read_frame(sock: socket.socket) -> tuple[Frame, int | None]:
    """The next frame and the descriptor that came with it, which the caller closes.

    Raises ConnectionError at the end of the connection, and msgspec's errors for anything but a frame.
    """
    data, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    descriptor = descriptors[0] if descriptors else None
    try:
        if not data:
            raise ConnectionError("the other side of the results channel is gone")
        data += read(sock, _LENGTH.size - len(data))
        return _decode(read(sock, *_LENGTH.unpack(data))), descriptor
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


def read_payload(sock: socket.socket, size: int) -> torch.Tensor:
    """A payload of `size` bytes from the socket: uint8, flat."""
    payload = torch.empty(size, dtype=torch.uint8)
    _read_into(sock, payload.numpy().data)
    return payload


def map_payload(descriptor: int, size: int) -> torch.Tensor:
    """The payload in a memfd: uint8, flat, unmapped when its last user dies. Raises RuntimeError.

    Python's own `mmap` would keep a descriptor open for every message that the user still holds; this keeps none.
    """
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def read(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises ConnectionError at the end of the connection."""
    data = bytearray(size)
    _read_into(sock, memoryview(data))
    return data


def _read_into(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        count = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side of the results channel is gone")
        memory = memory[count:]


def machine() -> str:
    """A name that two processes share if and only if one can reach the other's abstract Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        return f"{host} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def welcome(sock: socket.socket, key: bytes) -> tuple[str, bytes]:
    """The listening side of the handshake. Returns the worker's name, and the proof of the key that the caller has to send.

    Raises ChannelError if the other side does not have the key, OSError if it goes away or says nothing.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(ours)
    theirs, length = bytes(read(sock, _NONCE_BYTES)), read(sock, 1)[0]
    name, proof = bytes(read(sock, length)), bytes(read(sock, _DIGEST_BYTES))
    if not hmac.compare_digest(proof, _digest(key, b"worker", ours, theirs, name)):
        raise ChannelError("a connection to the results channel was refused: it does not have this engine's key")
    return name.decode(errors="replace"), _digest(key, b"client", theirs, ours, name)


def introduce(sock: socket.socket, key: bytes, name: str) -> None:
    """The connecting side: prove the key, give a name (at most 255 bytes), and have the other side prove the key.

    Raises ChannelError if either proof fails, OSError (TimeoutError) if there is no answer.
    """
    theirs, ours, called = bytes(read(sock, _NONCE_BYTES)), secrets.token_bytes(_NONCE_BYTES), name.encode()[:255]
    sock.sendall(ours + bytes([len(called)]) + called + _digest(key, b"worker", theirs, ours, called))
    try:
        proof = bytes(read(sock, _DIGEST_BYTES))
    except ConnectionError as error:
        raise ChannelError("the client refused this worker: the key in `address` is not that of its engine") from error
    if not hmac.compare_digest(proof, _digest(key, b"client", ours, theirs, called)):
        raise ChannelError("what listens at `address` is not this engine's client: it does not have the key")


def _digest(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join([_GREETING, role, *parts]), "sha256")
