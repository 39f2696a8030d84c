"""Frames on a socket, and the handshake before them.

    length of the head | head (msgspec: a `MessageFrame`) | body | payload

is one message: `codec` makes body and payload. On one host a large payload is not part of the frame: it lies in a memfd whose
descriptor travels beside the head. A memfd has no name, so nothing is left behind however the processes end.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time

import msgspec
import torch

from midstream.errors import ChannelError
from midstream.transport.codec import Entry

INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper in the frame than in a memfd of its own
_GREETING = b"midstream-results-2"
_NONCE_BYTES = 32
_DIGEST_BYTES = 32


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
    if sock.family != socket.AF_UNIX:
        return _decode(read(sock, *_LENGTH.unpack(read(sock, _LENGTH.size)))), None
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
