"""The worker's end of the results channel; `receiver` has the client's end and an example.

The forward's thread pickles the value without its tensors and queues the message. The queue holds a snapshot of the containers but
not of the tensors, so a tensor must not be changed after it was sent. The sender's thread writes the frames, with the tensors in chunks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import torch

from midstream.errors import ChannelClosedError, ChannelError
from midstream.queues import BoundedQueue
from midstream.transport import messages
from midstream.transport.messages import Packed, SentTensors, pack
from midstream.tree import as_bytes

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 10.0
_AHEAD = 4  # chunks that a device copies while earlier ones are sent

_PackedValues = tuple[list[msgspec.Raw], Packed]  # a value with its headers


class _OutgoingFrame(NamedTuple):
    """A frame to write; without `parts` if it ends `stream`."""

    parts: Sequence[_PackedValues]
    stream: str | None
    ready: Mapping[torch.device, torch.cuda.Event]

    def write(self, sock: socket.socket, slots: SenderSlots) -> None:
        tensors, offsets, size = list[torch.Tensor](), list[int](), 0
        for _, packed in self.parts:
            tensors += packed.tensors
            offsets += [size + offset for offset in packed.offsets]
            size += packed.size
        frame = messages.Frame([messages.message_part(*part) for part in self.parts], self.stream)
        messages.send_frame(sock, frame, b"".join([packed.body for _, packed in self.parts]))
        if size:
            slots.send(tensors, offsets, size, self.ready)


class Sender:
    """Sends values to the client with this `Receiver.address`, from a thread of its own.

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
            ready: for each device, an event after which its tensors are complete. The CPU has one if a device still writes tensors in host
                memory. By default, the events are recorded now, on the caller's current streams.

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
        size = sum(len(packed.body) + packed.size for _, packed in parts)
        with self._queue.changed:
            if not self._queue.put(_OutgoingFrame(parts, stream, ready), size):
                error = self._queue.error
                raise ChannelClosedError(f"results channel of {self.name}: {error or 'closed'}") from error
            self._bytes += size
            self._messages += bool(parts)

    def _run(self) -> None:
        slots = SenderSlots(self._sock)
        try:
            with torch.no_grad():
                while (frame := self._queue.get()) is not None:
                    frame.write(self._sock, slots)
                    del frame  # and its tensors with it
                    self._queue.task_done()
            messages.send_frame(self._sock, messages.Frame())
        except BaseException as error:
            if not self._queue.closed:
                level = logging.INFO if isinstance(error, ConnectionError) else logging.ERROR  # the client has gone
                _log.log(level, "results channel of %s failed: %r", self.name, error)
            raise
        finally:
            slots.close()
            self._sock.close()


def _raw(header: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(messages.encode(header))


def _connect(address: Mapping[str, Any], name: str) -> socket.socket:
    """A connection to the client after the handshake: by Unix socket on its own host, by TCP from another."""
    place: str | tuple[str, int]
    if address["host"] == messages.machine_name():
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
            peer: Any = messages.Peer(sock)
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


class _Filled(NamedTuple):
    """A chunk in a slot.

    Attributes:
        copied: the event after which the slot is filled; None if it is filled already.
    """

    slot: int
    size: int
    place: int
    copied: torch.cuda.Event | None


class SenderSlots:
    """The worker's end of the memory that it shares with its client: see `messages`. Used from one thread; `close` when done.

    CUDA tensors are copied straight into slots, which are pinned at their first use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_shared = sock.family == socket.AF_UNIX
        self._memory: torch.Tensor | None = None  # uint8, of all slots
        self._descriptor: int | None = None  # of the memory, until the client has it
        self._free = list(range(messages.SLOTS))[::-1]  # the last one is used next, so that few slots are touched
        self._pinned: list[int] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        size: int,
        ready: Mapping[torch.device, torch.cuda.Event],
    ) -> None:
        """Send a payload of `size` bytes that has each of `tensors` row-major at its offset (bytes).

        `ready` comes from `sender.mark_ready`. An event for host memory in it means that a device is still copying to these tensors.
        If a copy fails, the client is told that the payload is lost. Raises OSError if the client has gone.
        """
        self._take_back()
        filled: deque[_Filled] = deque()
        is_inline = not self._is_shared or size <= messages.INLINE_LIMIT

        def send_oldest() -> None:
            chunk = filled[0]
            if chunk.copied is not None:
                chunk.copied.synchronize()
            self._send(chunk, is_inline)
            filled.popleft()

        try:
            for place, device, pieces in self._chunks(tensors, offsets, ready):
                while not self._free:
                    if filled:
                        send_oldest()
                    else:
                        self._take_back(wait=True)
                filled.append(self._fill(self._free.pop(), place, device, pieces))
                if len(filled) > _AHEAD:
                    send_oldest()
            while filled:
                send_oldest()
        except OSError:
            raise
        except Exception as error:
            _log.error("results channel: a result could not be copied", exc_info=error)
            self._wait_for_devices()
            self._free += [chunk.slot for chunk in filled]
            reason = f"copying it failed: {error!r}".encode()
            self._sock.sendall(messages.CHUNK.pack(messages.LOST, len(reason), 0) + reason)
        else:
            self._sock.sendall(messages.CHUNK.pack(messages.END, 0, 0))

    def close(self) -> None:
        """Free the memory, once no device writes to it any more. Idempotent."""
        self._wait_for_devices()
        if self._memory is not None:
            for slot in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(self._slot(slot).data_ptr())
        self._memory = None
        self._pinned.clear()
        self._streams.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _wait_for_devices(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _chunks(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        ready: Mapping[torch.device, torch.cuda.Event],
    ) -> Iterator[tuple[int, torch.device, list[tuple[int, torch.Tensor]]]]:
        """Cut the payload into chunks of a slot's size, of one device each: (place, device, [(place in the slot, bytes)])."""
        placed = sorted(zip(offsets, tensors, strict=True), key=itemgetter(0))
        placed = [(offset, tensor) for offset, tensor in placed if tensor.numel()]
        for device, group in groupby(placed, key=lambda item: item[1].device):
            of_device = list(group)
            start = of_device[0][0]
            with self._copying(device, ready):
                for window, pieces in groupby(_windows(of_device, start), key=itemgetter(0)):
                    yield start + window * messages.SLOT_BYTES, device, [(at, piece) for _, at, piece in pieces]

    @contextlib.contextmanager
    def _copying(self, device: torch.device, ready: Mapping[torch.device, torch.cuda.Event]) -> Iterator[None]:
        """A block in which to copy a device's tensors, once they are complete; on a GPU, on a stream of this sender's."""
        if device.type != "cuda":
            if device in ready:
                ready[device].synchronize()
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            self._streams[device].wait_event(ready[device])
            yield

    def _fill(self, slot: int, place: int, device: torch.device, pieces: list[tuple[int, torch.Tensor]]) -> _Filled:
        end, copied = 0, None
        try:
            memory = self._pinned_slot(slot) if device.type == "cuda" else self._slot(slot)
            for at, piece in pieces:
                end = at + piece.numel()
                if device.type == "cpu":
                    ctypes.memmove(memory.data_ptr() + at, piece.data_ptr(), piece.numel())
                else:
                    memory[at:end].copy_(piece, non_blocking=device.type == "cuda")
            if device.type == "cuda":
                # A thread that polled would take a core, and the driver's lock from time to time.
                copied = torch.cuda.Event(blocking=True)
                copied.record(self._streams[device])
        except BaseException:
            self._free.append(slot)
            raise
        return _Filled(slot, end, place, copied)

    def _slot(self, slot: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._map()
        return self._memory[slot * messages.SLOT_BYTES : (slot + 1) * messages.SLOT_BYTES]

    def _map(self) -> torch.Tensor:
        size = messages.SLOTS * messages.SLOT_BYTES
        try:
            if self._is_shared:
                self._descriptor = os.memfd_create("midstream-results")
                os.ftruncate(self._descriptor, size)
            mapped = mmap.mmap(-1 if self._descriptor is None else self._descriptor, size)
        except OSError as error:  # so that `send` does not take it for an error of the socket
            raise MemoryError(str(error)) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _pinned_slot(self, slot: int) -> torch.Tensor:
        memory = self._slot(slot)
        if slot not in self._pinned:
            is_portable = 1  # cudaHostRegisterPortable: pinned for every device
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), messages.SLOT_BYTES, is_portable)
            if int(code):  # copies to it are right, and slower
                _log.warning("results channel: host memory could not be pinned: %s", code)
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device="cuda")  # the first kernel after it raises the error again
            self._pinned.append(slot)
        return memory

    def _send(self, chunk: _Filled, is_inline: bool) -> None:
        slot = self._slot(chunk.slot)
        if is_inline:
            self._sock.sendall(messages.CHUNK.pack(messages.INLINE, chunk.size, chunk.place))
            self._sock.sendall(slot[: chunk.size].numpy().data)
            self._free.append(chunk.slot)
            return
        header = messages.CHUNK.pack(chunk.slot, chunk.size, chunk.place)
        if self._descriptor is None:
            return self._sock.sendall(header)
        _send_with(self._sock, header, self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None

    def _take_back(self, wait: bool = False) -> None:
        """Note the slots that the client has given back; `wait` for at least one."""
        if not self._is_shared:
            return
        try:
            given = self._sock.recv(messages.SLOTS, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not given:
            raise ConnectionError("the other side of the results channel is gone")
        self._free += given


def _windows(placed: list[tuple[int, torch.Tensor]], start: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut the tensors where the payload, counted from `start`, crosses a slot's size: (window, place in it, bytes).

    A slot is then a window of the payload, gaps included, and leaves in one copy.
    """
    for offset, tensor in placed:
        source, done = as_bytes(tensor), 0
        while done < source.numel():
            window, at = divmod(offset - start + done, messages.SLOT_BYTES)
            piece = source[done : done + messages.SLOT_BYTES - at]
            yield window, at, piece
            done += piece.numel()


def _send_with(sock: socket.socket, data: bytes, descriptor: int) -> None:
    """Send the data, and the descriptor with it."""
    while True:
        try:
            sent = socket.send_fds(sock, [data], [descriptor])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # the receiver has yet to take the descriptors already sent
                raise
            time.sleep(0.001)
        else:
            return sock.sendall(data[sent:])
