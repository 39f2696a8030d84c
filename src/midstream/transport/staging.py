"""Copies tensors into one flat block of memory, fast, off the forward's thread.

Fresh memory costs a page fault and a cleared page for every 4 KiB, several times the copy itself, so a few threads share the work;
`memmove` runs without the GIL. CUDA tensors come through a ring of pinned slots: while the threads empty some, the device fills the
others on a stream of its own, which waits only for what was computed before `send`.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import groupby
from operator import itemgetter

import torch

from midstream.trace.tree import as_bits, as_bytes

SLOT_BYTES = 8 << 20  # one pinned slot, and the most that one thread copies at a time
SLOTS = 16  # 128 MiB pinned in all, from the first CUDA tensor on
_ALONE_BYTES = 4 << 20  # a smaller copy takes less time than waking a thread


def mark_ready(tensors: Sequence[torch.Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """An event on the caller's current stream of each CUDA device in `tensors`, after which they are complete."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class Copying:
    """Copies that have begun."""

    def __init__(self, tasks: Sequence[Future[None]] = ()) -> None:
        self._tasks = tasks

    @property
    def is_done(self) -> bool:
        return all(task.done() for task in self._tasks)

    def wait(self) -> None:
        """Return when all copies have ended, even if one failed. Raises what one of them raised."""
        wait(self._tasks)
        for task in self._tasks:
            task.result()


class Copier:
    """Owns the threads, the streams and the pinned slots. Used from one thread; `close` when done."""

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
    ) -> Copying:
        """Begin to write each of `tensors` row-major into `payload` (uint8, flat, CPU) at its offset (bytes).

        The caller has to wait for the result: until then the payload is written to. `offsets` come from `wire.lay_out`, `ready` from
        `mark_ready`. If `ready` has an event for host memory, it is waited for: a device is still copying to the tensors there.
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
        return Copying(tasks)

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
        """A slot that no thread reads, taken out of the ring; waits for the oldest one if all are in use.

        A new slot is pinned only if there is no free one: pinning takes milliseconds, in which the forward's calls to the device wait.
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
