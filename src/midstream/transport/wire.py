"""Messages on a socket and in an HTTP response.

    length of the head | head (msgspec: a `Frame`) | bodies | payloads

This is one message; `codec` describes bodies and payloads. Between a worker and its client, the payloads of a message come as chunks:

    slot, size, place | slot, size, place | ... | END

On one host, a chunk lies in memory that both map: the worker fills a slot and names it on the socket, and the client copies it out and
gives the slot back. So the worker touches its pages once. Fresh memory costs a page fault for every 4 KiB, which takes several times as
long as the copy, and holds up other threads of its process: on an H200 host (2026-11-28) a kernel launch took 23 µs beside threads that
fault, and 10 µs alone. The engine's loop runs in the worker's process, so the faults are left to the client's. The bytes of small
payloads, and of those for other hosts, follow on the socket.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Generator, Iterator
from multiprocessing import AuthenticationError
from typing import Any

import msgspec
import torch

from midstream.errors import ChannelError
from midstream.transport.codec import NO_MESSAGE, Packed, Size, TensorEntry, unpack_data
from midstream.tree import as_bytes

SLOT_BYTES = 8 << 20
SLOTS = 16  # 128 MiB in all; memory is taken when a slot is first used
INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper on the socket
CHUNK = struct.Struct("<iIQ")  # the slot, or one of the numbers below; bytes; place in the payload
INLINE, END, LOST = -1, -2, -3  # the bytes follow; the payload is complete; it is lost, and the reason follows
_MAX_HEAD_BYTES = 64 << 20
_CHUNK_BYTES, _LEAST_BYTES = 1 << 20, 1 << 16
_LENGTH = struct.Struct("<I")  # bytes of the head


class ResultHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of captured rows, or of a trace's results.

    Attributes:
        key: of the mailbox that they go to.
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
_decode = msgspec.msgpack.Decoder(Frame).decode


def send_frame(sock: socket.socket, frame: Frame, body: bytes = b"") -> None:
    """Send the head and the bodies of a frame."""
    sock.sendall(_head_and_body(frame, body))


def _head_and_body(frame: Frame, body: bytes) -> bytes:
    head = encode(frame)
    return b"".join([_LENGTH.pack(len(head)), head, body])


def receive_frame(sock: socket.socket) -> Frame:
    """The next frame's head.

    Raises ConnectionError at the end of the connection, and msgspec's errors for anything but a frame.
    """
    return _decode(receive(sock, *_LENGTH.unpack(receive(sock, _LENGTH.size))))


def receive(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises ConnectionError at the end of the connection."""
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """As `read`, as many bytes as the memory has."""
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
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def recv_bytes(self, longest: int) -> bytes:
        (size,) = _LENGTH.unpack(receive(self._sock, _LENGTH.size))
        if size > longest:
            raise AuthenticationError("the other side does not speak midstream")
        return bytes(receive(self._sock, size))


# ----------------------------------------------------------------------------------------- values as data in a response


def message_chunks(packed: Packed) -> Iterator[bytes]:
    """The message of a value that was packed as data, in chunks of 64 KiB to about 1 MiB. The last one may be shorter."""
    parts = [_head_and_body(Frame([message_part([], packed)]), packed.body)]
    held = at = 0
    for tensor, offset in zip(packed.tensors, packed.offsets, strict=True):
        parts.append(bytes(offset - at))
        data = as_bytes(tensor.cpu()).numpy().data
        at = offset + len(data)
        for begin in range(0, len(data), _CHUNK_BYTES):
            parts.append(bytes(data[begin : begin + _CHUNK_BYTES]))
            held += len(parts[-1])
            if held >= _LEAST_BYTES:
                yield b"".join(parts)
                parts, held = [], 0
    yield b"".join([*parts, bytes(packed.size - at)])


class MessageReader:
    """Reads the messages of one stream of values as data."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self._parts: deque[memoryview] = deque()
        self._held = 0  # bytes in the parts
        self._reading = self._message()
        self._needed = next(self._reading)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take more bytes, and return the values that they complete. Raises ChannelError for anything but messages."""
        self._parts.append(memoryview(data))
        self._held += len(data)
        while self._held >= self._needed:
            try:
                self._needed = self._reading.send(self._take(self._needed))
            except StopIteration as done:
                yield done.value
                self._reading = self._message()
                self._needed = next(self._reading)
            except (RecursionError, ValueError) as error:
                raise ChannelError(f"{NO_MESSAGE}: {error}") from error

    def _message(self) -> Generator[int, bytearray, Any]:
        """Reads one message: yields how many bytes it needs next, and is sent them."""
        (size,) = _LENGTH.unpack((yield _LENGTH.size))
        if size > _MAX_HEAD_BYTES:
            raise ChannelError(NO_MESSAGE)
        (head,) = _decode((yield size)).parts
        body, payload = (yield head.body), (yield head.payload)
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        return unpack_data(body, flat, head.table, self._known)

    def _take(self, size: int) -> bytearray:
        self._held -= size
        taken = bytearray()
        while len(taken) < size:
            part, missing = self._parts.popleft(), size - len(taken)
            taken += part[:missing]
            if len(part) > missing:
                self._parts.appendleft(part[missing:])
        return taken
