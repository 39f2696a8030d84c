"""The worker's end of the results channel; `receiver` has the client's end and an example.

The forward's thread pickles the value without its tensors and queues the message. The queue holds a snapshot of the containers but
not of the tensors, so a tensor must not be changed after it was sent. The sender's thread writes one frame while a `Copier` copies the
tensors of the next frame into one flat block of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from operator import itemgetter
from typing import Any

import msgspec
import torch

from midstream.errors import ChannelClosedError, ChannelError, UnsendableError
from midstream.queues import BoundedQueue
from midstream.transport import wire
from midstream.transport.codec import Packed, SentTensors, pack
from midstream.tree import as_bits, as_bytes

_log = logging.getLogger(__name__)
_CONNECT_SECONDS = 10.0
SLOT_BYTES = 8 << 20  # one pinned slot, and the most that one thread copies at a time
SLOTS = 16  # 128 MiB pinned in all, from the first CUDA tensor on
_ALONE_BYTES = 4 << 20  # a smaller copy takes less time than waking a thread


_PackedValues = tuple[list[msgspec.Raw], Packed]  # a value with its headers


class _OutgoingFrame:
    """A frame to write. Its tensors are copied first: into a memfd if they are large and the client can take one.

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
        self._descriptor: int | None = None
        self._payload: torch.Tensor | None = None
        self._memory = contextlib.ExitStack()  # the memfd and its mapping
        self._copies: list[Future[None]] = []

    def begin(self, copier: Copier, takes_descriptors: bool) -> None:
        """Begin to copy the tensors."""
        tensors, offsets, size = list[torch.Tensor](), list[int](), 0
        for _, packed in self._parts:
            tensors += packed.tensors
            offsets += [size + offset for offset in packed.offsets]
            size += packed.size
        try:
            if takes_descriptors and size > wire.INLINE_LIMIT:
                self._payload = self._map(size)
            else:
                self._payload = torch.empty(size, dtype=torch.uint8)
            self._copies = copier.begin(self._payload, tensors, offsets, self._ready)
        except Exception as error:
            self._lose(error)

    def _map(self, size: int) -> torch.Tensor:
        self._descriptor = os.memfd_create("midstream-results")
        self._memory.callback(os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)
        mapping = mmap.mmap(self._descriptor, size)
        self._memory.callback(mapping.close)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # helps where the system has shmem_enabled=advise
        return torch.frombuffer(mapping, dtype=torch.uint8)

    @property
    def is_copied(self) -> bool:
        """Whether all tensors are copied, so that `write` does not wait."""
        return all(copy.done() for copy in self._copies)

    def write(self, sock: socket.socket) -> None:
        """Wait for the copy, and send the frame."""
        try:
            wait_for_copies(self._copies)
        except Exception as error:
            self._lose(error)
        frame = wire.Frame([wire.message_part(*part) for part in self._parts], self._stream)
        body = b"".join([packed.body for _, packed in self._parts])
        wire.send_frame(sock, frame, body, self._payload, self._descriptor)

    def _lose(self, error: Exception) -> None:
        """Send an error in place of each value."""
        _log.error("results channel: a result could not be copied", exc_info=error)
        self.close()
        lost = pack(UnsendableError("result", f"copying it failed: {error!r}"))
        self._parts = [(headers, lost) for headers, _ in self._parts]

    def close(self) -> None:
        """Wait for the copy, and free its memory and descriptor. Idempotent."""
        wait(self._copies)
        self._copies = []
        self._payload = self._descriptor = None
        self._memory.close()


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
        self._copier = Copier()
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
        frames: deque[_OutgoingFrame] = deque()  # at most two: one is written while the other's tensors are copied
        takes_descriptors = self._sock.family == socket.AF_UNIX
        try:
            with torch.no_grad():
                while (frame := self._queue.get(0 if frames else None)) is not None or frames:
                    if frames and frames[0].is_copied:
                        self._write(frames.popleft())
                    if frame is not None:
                        frames.append(frame)
                        frame.begin(self._copier, takes_descriptors)
                    if frames and (frame is None or len(frames) > 1):
                        self._write(frames.popleft())
            wire.send_frame(self._sock, wire.Frame())
        except BaseException as error:
            if not self._queue.closed:
                level = logging.INFO if isinstance(error, ConnectionError) else logging.ERROR  # the client has gone
                _log.log(level, "results channel of %s failed: %r", self.name, error)
            raise
        finally:
            for frame in frames:
                frame.close()
            frames.clear()
            self._sock.close()
            self._copier.close()

    def _write(self, frame: _OutgoingFrame) -> None:
        try:
            frame.write(self._sock)
        finally:
            frame.close()
            self._queue.task_done()


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


# ------------------------------------------------------------------------------------------------------------ copying


def mark_ready(tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """An event on the caller's current stream of each CUDA device in `tensors`, after which they are complete."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


def wait_for_copies(copies: Sequence[Future[None]]) -> None:
    """Wait until all copies have ended, even if one failed. Raises the error of a copy that failed."""
    wait(copies)
    for copy in copies:
        copy.result()


class Copier:
    """Copies tensors into one flat block of memory. Owns the threads, the streams and the pinned slots.

    Fresh memory costs a page fault and a cleared page for every 4 KiB, several times the copy itself, so a few threads share the work;
    `memmove` runs without the GIL. CUDA tensors come through a ring of pinned slots: while the threads empty some, the device fills the
    others on its own stream, which waits only for work from before `send`. Used from one thread; `close` when done.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "midstream-copy")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ring: deque[tuple[torch.Tensor, Future[None]]] = deque()  # a slot, and the task that empties it

    def begin(
        self,
        payload: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        ready: Mapping[torch.device, torch.cuda.Event],
    ) -> list[Future[None]]:
        """Begin to write each of `tensors` row-major into `payload` (uint8, flat, CPU) at its offset (bytes).

        Returns the copies. The payload is complete after `wait_for_copies`. `offsets` come from `codec.payload_offsets`, `ready` from
        `mark_ready`. An event for host memory in `ready` means that a device is still copying to these tensors; the method waits for it.
        """
        placed = sorted(zip(offsets, tensors, strict=True), key=itemgetter(0))
        placed = [(offset, tensor) for offset, tensor in placed if tensor.numel()]
        tasks: list[Future[None]] = []
        try:
            for device, group in groupby(placed, key=lambda item: item[1].device):
                if device.type == "cuda":
                    self._from_device(payload, list(group), device, ready[device], tasks)
                else:
                    if device in ready:
                        ready[device].synchronize()
                    self._from_host(payload, group, tasks)
        except BaseException:
            wait(tasks)  # the caller unmaps the payload
            raise
        return tasks

    def close(self) -> None:
        """End the threads and free the pinned memory."""
        self._pool.shutdown()
        self._ring.clear()
        self._streams.clear()

    def _from_host(
        self, payload: torch.Tensor, placed: Iterator[tuple[int, torch.Tensor]], tasks: list[Future[None]]
    ) -> None:
        for offset, tensor in placed:
            size = tensor.numel() * tensor.element_size()
            bits = as_bits(tensor)
            if bits.device.type != "cpu" or not bits.is_contiguous():
                payload[offset : offset + size].view(bits.dtype).view(bits.shape).copy_(bits)
            elif size <= _ALONE_BYTES:
                _move(payload, offset, as_bytes(bits))
            else:
                pieces = enumerate(as_bytes(bits).split(SLOT_BYTES))
                tasks += [self._pool.submit(_move, payload, offset + i * SLOT_BYTES, piece) for i, piece in pieces]

    def _from_device(
        self,
        payload: torch.Tensor,
        placed: list[tuple[int, torch.Tensor]],
        device: torch.device,
        ready: torch.cuda.Event,
        tasks: list[Future[None]],
    ) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream, start = self._streams[device], placed[0][0]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            for _, tensor in placed:
                tensor.record_stream(stream)
            for window, pieces in groupby(_windows(placed, start), key=itemgetter(0)):
                slot = self._free_slot()
                for _, at, piece in pieces:
                    slot[at : at + piece.numel()].copy_(piece, non_blocking=True)
                    end = at + piece.numel()
                place = start + window * SLOT_BYTES
                task = self._pool.submit(_move, payload, place, slot[:end], stream.record_event())
                self._ring.append((slot, task))
                tasks.append(task)

    def _free_slot(self) -> torch.Tensor:
        """A free slot, taken out of the ring. Waits for the oldest slot if all are in use.

        A new slot is pinned only if none is free: pinning takes milliseconds, in which the forward's calls to the device wait.
        """
        in_use = not self._ring or not self._ring[0][1].done()
        if in_use and len(self._ring) < SLOTS:
            return torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        slot, task = self._ring.popleft()
        wait([task])
        return slot


def _windows(placed: list[tuple[int, torch.Tensor]], start: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut the tensors where the payload, counted from `start`, crosses a slot's size: (window, place in it, bytes).

    A slot is then a window of the payload, gaps included, and leaves in one copy.
    """
    for offset, tensor in placed:
        source, done = as_bytes(tensor), 0
        while done < source.numel():
            window, at = divmod(offset - start + done, SLOT_BYTES)
            piece = source[done : done + SLOT_BYTES - at]
            yield window, at, piece
            done += piece.numel()


def _move(payload: torch.Tensor, offset: int, source: torch.Tensor, ready: torch.cuda.Event | None = None) -> None:
    """Copy `source` (uint8, flat, CPU) into `payload` from `offset` (bytes) on, once `ready`."""
    if ready is not None:
        ready.synchronize()
    ctypes.memmove(payload.data_ptr() + offset, source.data_ptr(), source.numel())
