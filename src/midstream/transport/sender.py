"""The worker's end of the results channel; `receiver` has the client's end and an example.

The forward's thread pickles the value without its tensors and queues the message. The queue holds a snapshot of the containers but
not of the tensors, so a tensor must not be changed after it was sent. The sender's thread writes the frames, with the tensors by `slots`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

import msgspec
import torch

from midstream.errors import ChannelClosedError, ChannelError
from midstream.queues import BoundedQueue
from midstream.transport import wire
from midstream.transport.codec import Packed, SentTensors, pack
from midstream.transport.slots import SenderSlots

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 10.0

_PackedValues = tuple[list[msgspec.Raw], Packed]  # a value with its headers


class _OutgoingFrame:
    """A frame to write.

    Args:
        parts: none if the frame ends `stream`.

    Attributes:
        size: in bytes, for the limit of the queue.
    """

    def __init__(
        self, parts: Sequence[_PackedValues], stream: str | None, ready: Mapping[torch.device, torch.cuda.Event]
    ) -> None:
        self.size = sum(len(packed.body) + packed.size for _, packed in parts)
        self._parts, self._stream, self._ready = parts, stream, ready

    def write(self, sock: socket.socket, slots: SenderSlots) -> None:
        tensors, offsets, size = list[torch.Tensor](), list[int](), 0
        for _, packed in self._parts:
            tensors += packed.tensors
            offsets += [size + offset for offset in packed.offsets]
            size += packed.size
        frame = wire.Frame([wire.message_part(*part) for part in self._parts], self._stream)
        wire.send_frame(sock, frame, b"".join([packed.body for _, packed in self._parts]))
        if size:
            slots.send(tensors, offsets, size, self._ready)


class Sender:
    """Sends values to the client whose `Receiver.address` this is, from a thread of its own.

    Args:
        name: identifies this worker in the client's `lost` and `expect`.
        queue_bytes: the limit of the bytes that are queued and not yet written. Above it `send` blocks. Any message fits into an empty
            queue.

    Raises:
        ChannelError: the client cannot be reached, or one side does not have the key.
    """

    def __init__(self, address: Mapping[str, Any], name: str | None = None, *, queue_bytes: int = 1 << 30) -> None:
        self.name = name or f"pid {os.getpid()}"
        self._queue: BoundedQueue[_OutgoingFrame] = BoundedQueue(queue_bytes)
        self._messages = self._bytes = 0
        self._streams: dict[str, SentTensors] = {}
        self._sock = _connect(address, self.name)
        self._queue.start("midstream-send", self._run)

    def send(
        self,
        header: msgspec.Struct,
        value: Any,
        stream: str | None = None,
        *,
        exact: bool = False,
        ready: Mapping[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        """Queue `value` for the mailbox of the header's `key`. Returns at once unless the queue is full.

        Tensors may lie anywhere in `value`, on any device; one that occurs twice is sent once. A part that cannot be pickled arrives as
        an `UnsendableError` in its place.

        Args:
            header: of the type that the receiver takes.
            stream: a tensor that an earlier message of this stream contained (the same object, unchanged) is not sent again. A stream
                belongs to one thread and ends with `end`. The tensor's version shows changes in place. Tensors made in inference mode
                have no version: do not change them, or send them again with `exact`.
            ready: for each device, an event after which its tensors are complete, also tensors in host memory that a device writes.
                By default, the end of the work that the caller's current streams have now.

        Raises:
            ChannelClosedError: the channel is closed.
        """
        known = self._streams.setdefault(stream, SentTensors()) if stream is not None else None
        self._put([([_raw(header)], pack(value, known, exact=exact))], stream, ready)

    def send_together(self, messages: Sequence[tuple[msgspec.Struct, Any]]) -> None:
        """As `send` for each (header, value), in one frame. Objects and tensors that the values share are sent once."""
        if len(messages) == 1:
            self.send(*messages[0])
        elif messages:
            headers = [_raw(header) for header, _ in messages]
            self._put([(headers, pack([value for _, value in messages]))])

    def send_packed(self, messages: Sequence[tuple[msgspec.Struct, Packed]]) -> None:
        """As `send` for each (header, value), in one frame. Each value can be read alone."""
        if messages:
            self._put([([_raw(header)], packed) for header, packed in messages])

    def end(self, stream: str) -> None:
        """Forget a stream, here and on the client. Every stream must be ended, also if its request was aborted."""
        if self._streams.pop(stream, None) is not None:
            self._put([], stream)

    def close(self, flush: bool = True, timeout: float = 30.0) -> None:
        """Send what is queued (`flush`) or drop it, and disconnect; cut off after `timeout` seconds. Idempotent."""
        self._queue.close()
        if not flush:
            self._queue.drop()
        if not self._queue.join(timeout):  # the client has stopped reading
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._queue.join()

    @property
    def queued_bytes(self) -> int:
        """Bytes queued or being written."""
        return self._queue.used

    @property
    def stats(self) -> dict[str, float]:
        """Since the start: `messages` and `bytes` queued, and `blocked_seconds` in `send`."""
        return {"messages": self._messages, "bytes": self._bytes, "blocked_seconds": self._queue.blocked_seconds}

    def _put(
        self,
        parts: Sequence[_PackedValues],
        stream: str | None = None,
        ready: Mapping[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        if ready is None:
            ready = mark_ready([tensor for _, packed in parts for tensor in packed.tensors])
        frame = _OutgoingFrame(parts, stream, ready)
        with self._queue.changed:
            if not self._queue.put(frame, frame.size):
                error = self._queue.error
                raise ChannelClosedError(f"results channel of {self.name}: {error or 'closed'}") from error
            self._bytes += frame.size
            self._messages += bool(parts)

    def _run(self) -> None:
        slots = SenderSlots(self._sock)
        try:
            with torch.no_grad():
                while (frame := self._queue.get()) is not None:
                    frame.write(self._sock, slots)
                    del frame  # and its tensors with it
                    self._queue.task_done()
            wire.send_frame(self._sock, wire.Frame())
        except BaseException as error:
            if not self._queue.closed:
                level = logging.INFO if isinstance(error, ConnectionError) else logging.ERROR  # the client has gone
                _log.log(level, "results channel of %s failed: %r", self.name, error)
            raise
        finally:
            slots.close()
            self._sock.close()


def _raw(header: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(wire.encode(header))


def _connect(address: Mapping[str, Any], name: str) -> socket.socket:
    """A connection to the client after the handshake: by Unix socket on its own host, by TCP from another."""
    place: str | tuple[str, int]
    if address["host"] == wire.machine_name():
        family, place = socket.AF_UNIX, f"\0{address['unix']}"
    elif address["tcp"] is not None:
        family, place = socket.AF_INET6 if ":" in address["tcp"][0] else socket.AF_INET, tuple(address["tcp"])
    else:
        raise ChannelError("this worker runs on another host than the client: the receiver has to be given a `host`")
    with contextlib.ExitStack() as on_error:
        sock = on_error.enter_context(socket.socket(family))
        try:
            sock.settimeout(_CONNECT_SECONDS)
            sock.connect(place)
            peer: Any = wire.Peer(sock)
            answer_challenge(peer, key := bytes.fromhex(address["key"]))
            peer.send_bytes(name.encode()[:255])
            deliver_challenge(peer, key)
            sock.settimeout(None)
        except (AuthenticationError, AssertionError) as error:
            raise ChannelError(
                f"what listens at {place!r} is not this engine's client, or this worker does not have its key: {error}"
            ) from error
        except OSError as error:
            raise ChannelError(f"the client cannot be reached at {place!r}: {error}") from error
        on_error.pop_all()
    return sock


def mark_ready(tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """An event on the caller's current stream of each CUDA device in `tensors`, after which they are complete."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}
