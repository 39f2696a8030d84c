"""Messages of values between an engine's processes.

A value becomes a body and a payload. The body is a pickle; the payload has the value's tensors, each raw and at a 64-byte aligned
offset. This is one message:

    length of the head | head (msgspec: a `Frame`) | bodies | payloads

Between a worker and its client, the payloads of a message come as chunks:

    slot, size, place | slot, size, place | ... | END

On one host, a chunk lies in memory that both map: the worker fills a slot and names it on the socket, and the client copies it out and
gives the slot back. So the worker touches its pages once. Fresh memory costs a page fault for every 4 KiB, which takes several times as
long as the copy, and holds up other threads of its process: on an H200 host (2026-11-28) a kernel launch took 23 µs beside threads that
fault, and 10 µs alone. The engine's loop runs in the worker's process, so the faults are left to the client's. The bytes of small
payloads, and of those for other hosts, follow on the socket.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from typing import Annotated, Any, NamedTuple

import cloudpickle
import msgspec
import torch
from cloudpickle.cloudpickle import _class_setstate

from midstream.errors import UnsendableError
from midstream.trace.shipping import OUT_OF_BAND, is_sent, itself
from midstream.tree import is_raw, movable

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
Size = Annotated[int, msgspec.Meta(ge=0)]

SLOT_BYTES = 8 << 20
SLOTS = 16  # 128 MiB in all; memory is taken when a slot is first used
INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper on the socket
CHUNK = struct.Struct("<iIQ")  # the slot, or one of the numbers below; bytes; place in the payload
INLINE, END, LOST = -1, -2, -3  # the bytes follow; the payload is complete; it is lost, and the reason follows
LENGTH = struct.Struct("<I")  # bytes of the head


# Values.


class TensorEntry(NamedTuple):
    """One tensor of a message. A tensor that was sent earlier on the same stream has no dtype: the receiver looks it up."""

    number: int | None  # its number on the stream; None if the message belongs to no stream
    dtype: str | None = None  # "bfloat16"
    shape: tuple[int, ...] = ()
    offset: int = 0  # bytes from the start of the payload


class SentTensors:
    """The tensors that were sent on a stream. Holds them weakly."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # id -> (tensor, version, number)
        self._count = 0

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number under which this tensor was sent; None if it was not sent, or has changed since."""
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


class Packed(NamedTuple):
    """A value as a body and tensors."""

    body: bytes
    table: list[TensorEntry]
    tensors: list[torch.Tensor]  # the new ones only, without grad, in the table's order
    offsets: list[int]  # bytes, one for each of `tensors`
    size: int  # bytes of the payload


def pack(value: Any, stream: SentTensors | None = None, *, exact: bool = False) -> Packed:
    """Divide `value` into a body, a pickle, and tensors. Each part that cannot be pickled becomes an `UnsendableError`; nothing raises.

    Args:
        stream: tensors that were sent on it are not sent again unless they have changed.
        exact: send tensors made in inference mode even if `stream` has carried them: their changes cannot be seen.
    """
    body, found, _ = pickled(value)
    return with_tensors(body, found, stream, exact)


def with_tensors(body: bytes, found: Sequence[torch.Tensor], stream: SentTensors | None, exact: bool = False) -> Packed:
    """A body with the tensors that were found in its value. Arguments as for `pack`."""
    known = [stream.find(tensor) if stream and not (exact and tensor.is_inference()) else None for tensor in found]
    new = [tensor for tensor, number in zip(found, known, strict=True) if number is None]
    offsets, size = payload_offsets(new)
    entries = (
        TensorEntry(stream.add(tensor) if stream else None, str(tensor.dtype)[6:], tuple(tensor.shape), offset)
        for tensor, offset in zip(new, offsets, strict=True)
    )
    table = [TensorEntry(number) if number is not None else next(entries) for number in known]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter class may wrap what detach returns
        return Packed(body, table, [tensor.detach() for tensor in new], offsets, size)


def payload_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Aligned offsets for `tensors` in a payload, and the payload's size in bytes.

    The tensors of one device lie next to each other, so that they can be staged as one range.
    """
    offsets, end = [0] * len(tensors), 0
    for i in sorted(range(len(tensors)), key=lambda i: str(tensors[i].device)):
        offsets[i] = end
        size = tensors[i].numel() * tensors[i].element_size()
        end += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return offsets, end


def resolve_tensors(
    payload: torch.Tensor, table: Sequence[TensorEntry], known: dict[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """The tensors of a message: new ones as views of `payload` (uint8, flat), the others from `known`, None if lost.

    New tensors of a stream are added to `known`. Each tensor has a storage that ends where the tensor ends, because
    `torch.save` writes the whole storage. All of them keep the payload alive.
    """
    memory, tensors = payload.numpy(), list[torch.Tensor | None]()
    for number, dtype_name, shape, offset in table:
        found = known.get(number) if number is not None else None
        if dtype_name is not None:
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = math.prod(shape) * dtype.itemsize
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0)
            found = flat.view(dtype).reshape(shape)
            if number is not None:
                known[number] = found
        tensors.append(found)
    return tensors


def unpack(body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> Any:
    """The value. An `UnsendableError` if a tensor was lost, or if this process cannot rebuild the value, for example without a class."""
    if any(tensor is None for tensor in tensors):
        return UnsendableError("(unknown here)", "a tensor sent earlier on its stream was dropped")
    try:
        return _Unpickler(io.BytesIO(body), buffers=tensors).load()
    except Exception as error:
        return UnsendableError("(unknown here)", f"rebuilding it failed: {error!r}")


class _Pickler(cloudpickle.Pickler):
    """Pickles a value, with its tensors as out-of-band buffers. `stands_in`: whether an object that is not a tensor stands for one."""

    def __init__(self, file: io.BytesIO, stands_in: Callable[[Any], bool]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: buffer is not OUT_OF_BAND)
        self.tensors: list[torch.Tensor] = []
        self._stands_in = stands_in

    def reducer_override(self, obj: Any) -> Any:  # unlike persistent_id, not called for every number and string
        if not is_raw(obj) and not self._stands_in(obj):
            if isinstance(obj, torch.Tensor) and (there := movable(obj)) is not obj:
                return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)
        self.tensors.append(obj)  # called once for each tensor: pickle remembers what it has seen
        return itself, (OUT_OF_BAND,)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _fill_copies if found is _class_setstate else found


def _fill_copies(kind: type, state: Any) -> Any:
    """Set the attributes of a class that came by value. A class that this process sent, and that a trace has returned, stays as it is."""
    return kind if is_sent(kind) else _class_setstate(kind, state)


class _ForgivingPickler(_Pickler):
    """Pickles an `UnsendableError` in place of each object that cannot be pickled. Containers and dataclasses stay."""

    def reducer_override(self, obj: Any) -> Any:
        is_container = isinstance(obj, dict) or hasattr(obj, "_make") or dataclasses.is_dataclass(obj)
        if not is_container and not is_raw(obj):
            try:
                _pickle(obj, _Pickler, self._stands_in)
            except Exception as error:
                return UnsendableError, (type(obj).__qualname__, repr(error))
        return super().reducer_override(obj)


def pickled(value: Any, stands_in: Callable[[Any], bool] = lambda _: False) -> tuple[bytes, list[torch.Tensor], bool]:
    """A value's pickle, its tensors, and whether a part of it could not be pickled. `stands_in`: as of `_Pickler`."""
    for pickler in (_Pickler, _ForgivingPickler):
        try:
            return *_pickle(value, pickler, stands_in), pickler is _ForgivingPickler
        except Exception as error:  # the second pickler raises for a container whose own class cannot be pickled
            failure = UnsendableError(type(value).__qualname__, repr(error))
    return *_pickle(failure, _Pickler, stands_in), True


def _pickle(value: Any, kind: type[_Pickler], stands_in: Callable[[Any], bool]) -> tuple[bytes, list[torch.Tensor]]:
    pickler = kind(file := io.BytesIO(), stands_in)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


# Frames.


class ResultHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of captured rows, or of a trace's results.

    Attributes:
        key: the key of the mailbox that takes the message.
        request: the engine's name of the request.
        final: whether this is the worker's last message for the request.
        stage: the worker's pipeline stage.
        confirmed: rows at positions below this are final.
    """

    key: tuple[str, int]
    request: str
    final: bool
    stage: int
    confirmed: int = 0


class MessagePart(msgspec.Struct, array_like=True):
    """One packed value of a message.

    Attributes:
        headers: read first, to find the mailbox. If there are several, the value is a list with a value for each.
        table: the value's tensors.
        body, payload: their sizes in bytes.
    """

    headers: list[msgspec.Raw]
    table: list[TensorEntry]
    body: Size
    payload: Size


def message_part(headers: list[msgspec.Raw], packed: Packed) -> MessagePart:
    return MessagePart(headers, packed.table, len(packed.body), packed.size)


class Frame(msgspec.Struct, array_like=True):
    """The head of a message. A frame without parts ends its stream; without a stream too, it ends the connection.

    Attributes:
        parts: their bodies follow one another, and so do their payloads.
        stream: the stream that the message belongs to, if any.
    """

    parts: list[MessagePart] = []
    stream: str | None = None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode


def send_frame(sock: socket.socket, frame: Frame, body: bytes = b"") -> None:
    """Send the head and the bodies of a frame."""
    sock.sendall(head_and_body(frame, body))


def head_and_body(frame: Frame, body: bytes) -> bytes:
    head = encode(frame)
    return b"".join([LENGTH.pack(len(head)), head, body])


def receive_frame(sock: socket.socket) -> Frame:
    """The next frame's head.

    Raises ConnectionError at the end of the connection, and msgspec's errors for anything but a frame.
    """
    return decode(receive(sock, *LENGTH.unpack(receive(sock, LENGTH.size))))


def receive(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises ConnectionError at the end of the connection."""
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill the memory from the socket. Raises ConnectionError at the end of the connection."""
    while memory:
        count = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other side of the results channel is gone")
        memory = memory[count:]


def machine_name() -> str:
    """A name that two processes share if and only if one can reach the other's abstract Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read().strip()
        return f"{host} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


class Peer:
    """Adapts a socket for the challenges of `multiprocessing.connection`, by which both ends prove that they have the engine's key."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send_bytes(self, data: bytes) -> None:
        self._sock.sendall(LENGTH.pack(len(data)) + data)

    def recv_bytes(self, longest: int) -> bytes:
        (size,) = LENGTH.unpack(receive(self._sock, LENGTH.size))
        if size > longest:
            raise AuthenticationError("the other side does not speak midstream")
        return bytes(receive(self._sock, size))
