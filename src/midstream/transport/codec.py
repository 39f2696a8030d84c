"""What goes over the results channel: how a value becomes bytes, and bytes a value again.

A value is cut in two. Its tensors are taken out and travel as raw bytes (the payload, every tensor at a 64-byte
aligned offset); the rest, the skeleton, is pickled with a number where each tensor was. Frames are

    PREFIX | meta (pickled header, stream name, tensor table) | body (pickled skeleton) | payload

and the payload is either part of the frame or, on one host, a memfd whose descriptor travels beside it. A memfd has
no name, so nothing is left behind however the processes end. `results` moves the frames; this file knows no threads.
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
from enum import IntEnum
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from midstream.errors import ChannelError
from midstream.trace.tree import is_raw, movable

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper in the frame than in a memfd of its own
PREFIX = struct.Struct("<BIQQ")  # kind, then the bytes of meta, body and payload
_GREETING = b"midstream-results-1"
_NONCE_BYTES = 32
_DIGEST_BYTES = 32


class ChannelClosedError(ChannelError):
    """Nothing more will come, or can be sent: this end or the other one was closed, or died."""


class UnsendableError(ChannelError):
    """Stands in a result where a value could not be sent, or not be rebuilt; found there, not raised by the channel."""

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(type_name, reason)
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        return f"a value of type {self.type_name} could not be sent to the client ({self.reason}); save data instead"


class Kind(IntEnum):
    """The first byte of a frame."""

    INLINE = 1  # a message whose payload follows in the frame
    MEMFD = 2  # a message whose payload lies in the descriptor that came with the prefix
    END = 3  # a stream is over; meta is its pickled name
    BYE = 4  # the sender closes in good order


# ---------------------------------------------------------------------------------------------- tensors as bytes


class Entry(NamedTuple):
    """One row of a frame's tensor table. A tensor sent earlier on the same stream has no dtype: it is looked up."""

    number: int | None  # its place on the stream, if the message belongs to one
    dtype: str | None = None  # "bfloat16"
    shape: tuple[int, ...] = ()
    offset: int = 0  # bytes from the payload's start


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
    """The tensors of `table`: new ones on the memory of `payload` (uint8, flat), others from `known`, None if lost.

    New tensors of a stream are added to `known`. Each has a storage of its own that ends where it ends, else
    `torch.save` of one would write the whole payload. All of them keep the payload alive.
    """
    memory = payload.numpy()
    tensors: list[torch.Tensor | None] = []
    for entry in table:
        if entry.dtype is None:
            tensors.append(known.get(entry.number) if entry.number is not None else None)
            continue
        tensor = _on(memory, entry.dtype, entry.shape, entry.offset)
        tensors.append(tensor)
        if entry.number is not None:
            known[entry.number] = tensor
    return tensors


def _on(memory: np.ndarray, dtype_name: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).reshape(shape)


# ----------------------------------------------------------------------------------------------------- the skeleton


class Stream:
    """The worker's memory of the tensors that a stream has carried. It holds them weakly."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # id -> (tensor, version, index)
        self._count = 0

    def find(self, tensor: torch.Tensor) -> int | None:
        """The index under which this very tensor, unchanged since, was sent; None if it was not."""
        reference, version, index = self._sent.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or version != _version(tensor):
            return None
        return index

    def add(self, tensor: torch.Tensor) -> int:
        index, self._count = self._count, self._count + 1
        key = id(tensor)
        self._sent[key] = (weakref.ref(tensor), _version(tensor), index)
        return index


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their changes


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:  # unlike persistent_id not asked about each number and string
        if not is_raw(obj):
            if isinstance(obj, torch.Tensor) and (there := movable(obj)) is not obj:
                return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)
        self.tensors.append(obj)  # each comes here once: pickle remembers what it has seen
        return _tensor, (len(self.tensors) - 1,)


def _tensor(number: int) -> torch.Tensor:
    """Stands in a skeleton for the message's tensor of that number."""
    raise RuntimeError("A skeleton is loaded with its tensors.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


class Packed(NamedTuple):
    """A value cut in two: the skeleton, and the tensors that have to travel with it."""

    body: bytes
    table: list[Entry]
    tensors: list[torch.Tensor]  # the new ones only, without grad, in the table's order
    offsets: list[int]  # bytes, one for each of `tensors`
    size: int  # bytes of the payload


def pack(value: Any, stream: Stream | None = None, exact: bool = False) -> Packed:
    """Cut `value`. What cannot be pickled is replaced by an `UnsendableError` in its place; never raises for it.

    With `exact`, tensors whose changes cannot be told are cut out again though `stream` has carried them.
    """
    try:
        body, found = _skeleton(value)
    except Exception as error:
        body, found = _salvaged_skeleton(value, error)
    known = [stream.find(tensor) if stream and not (exact and tensor.is_inference()) else None for tensor in found]
    new = [tensor for tensor, index in zip(found, known, strict=True) if index is None]
    offsets, size = lay_out(new)
    places = iter(offsets)
    table = [
        Entry(index)
        if index is not None
        else Entry(stream.add(tensor) if stream else None, str(tensor.dtype)[6:], tuple(tensor.shape), next(places))
        for tensor, index in zip(found, known, strict=True)
    ]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter class may wrap what detach returns
        return Packed(body, table, [tensor.detach() for tensor in new], offsets, size)


def unpack(body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> Any:
    """The value again; an `UnsendableError` if it cannot be rebuilt here (a class that this process lacks, say)."""
    try:
        return _Unpickler(body, tensors).load()
    except Exception as error:
        return UnsendableError("(unknown here)", f"rebuilding it failed: {error!r}")


def _skeleton(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def _salvaged_skeleton(value: Any, error: Exception) -> tuple[bytes, list[torch.Tensor]]:
    try:
        return _skeleton(_salvage(value))
    except Exception:  # a cycle, or a container whose own class is the trouble
        return _skeleton(UnsendableError(type(value).__qualname__, repr(error)))


def _salvage(value: Any) -> Any:
    """`value` with each leaf that cannot be pickled replaced; containers are rebuilt, so that the rest arrives."""
    if isinstance(value, dict):
        return {_salvage(key): _salvage(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_salvage, value))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_salvage, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(rebuilt, field.name, _salvage(getattr(value, field.name)))
        return rebuilt
    try:
        _skeleton(value)
    except Exception as error:
        return UnsendableError(type(value).__qualname__, repr(error))
    return value


# -------------------------------------------------------------------------------------------------------- sockets


def machine() -> str:
    """Equal in two processes exactly if an abstract Unix socket of one can be reached by the other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        return f"{host} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def welcome(sock: socket.socket, key: bytes) -> tuple[str, bytes]:
    """The listening side of the handshake. Returns the other's name, and our own proof for the caller to send.

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


class Prefix(NamedTuple):
    """The start of a frame: sizes in bytes, and the payload's memfd where it has one (the reader owns it)."""

    kind: Kind
    meta: int
    body: int
    payload: int
    descriptor: int | None


def read(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises ConnectionError at the end of the stream."""
    data = bytearray(size)
    read_into(sock, memoryview(data))
    return data


def read_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory`. Raises ConnectionError at the end of the stream."""
    while memory:
        count = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side of the results channel is gone")
        memory = memory[count:]


def read_prefix(sock: socket.socket) -> Prefix:
    """The next frame's prefix and the descriptor that came with it. Raises ConnectionError at the end of the stream."""
    if sock.family != socket.AF_UNIX:
        return _prefix(read(sock, PREFIX.size), None)
    data, descriptors, _, _ = socket.recv_fds(sock, PREFIX.size, 1, socket.MSG_CMSG_CLOEXEC)
    descriptor = descriptors[0] if descriptors else None
    try:
        if not data:
            raise ConnectionError("the other side of the results channel is gone")
        return _prefix(data + read(sock, PREFIX.size - len(data)), descriptor)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


def read_payload(sock: socket.socket, prefix: Prefix) -> torch.Tensor:
    """The payload that follows in the frame: uint8, flat."""
    payload = torch.empty(prefix.payload, dtype=torch.uint8)
    read_into(sock, payload.numpy().data)
    return payload


def map_memfd(prefix: Prefix) -> torch.Tensor:
    """The payload in the prefix's memfd: uint8, flat, unmapped when its last user dies. Raises RuntimeError.

    Python's own `mmap` would keep a descriptor open for every message that the user still holds; this keeps none.
    """
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{prefix.descriptor}", True, prefix.payload)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _prefix(data: bytes | bytearray, descriptor: int | None) -> Prefix:
    kind, meta, body, payload = PREFIX.unpack(data)
    return Prefix(Kind(kind), meta, body, payload, descriptor)


def write(sock: socket.socket, kind: Kind, meta: bytes, body: bytes = b"", payload: torch.Tensor | None = None) -> None:
    """Send a frame whose payload (uint8, flat) goes inside it."""
    size = payload.numel() if payload is not None else 0
    sock.sendall(b"".join([PREFIX.pack(kind, len(meta), len(body), size), meta, body]))
    if payload is not None and size:
        sock.sendall(payload.numpy().data)


def write_memfd(sock: socket.socket, meta: bytes, body: bytes, descriptor: int, size: int) -> None:
    """Send a message whose payload of `size` bytes lies in a memfd, which stays the caller's to close."""
    data = b"".join([PREFIX.pack(Kind.MEMFD, len(meta), len(body), size), meta, body])
    sent = 0
    while not sent:
        try:
            sent = socket.send_fds(sock, [data], [descriptor])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # the client has yet to take the descriptors already sent
                raise
            time.sleep(0.001)
    sock.sendall(memoryview(data)[sent:])
