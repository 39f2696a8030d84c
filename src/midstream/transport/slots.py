"""Carries the payloads of messages, `[bytes]`, from a worker to its client, in chunks.

    worker: slots = SenderSlots(sock);  slots.send(tensors, offsets, size, ready)
    client: reader = SlotReader(sock, pool);  reader.read(memory)

On one host, the chunks go through memory that both map: the worker fills a slot and names it on the socket, and the client copies it out
and gives the slot back. So the worker touches its pages once. Fresh memory costs a page fault for every 4 KiB, which takes several times as
long as the copy, and holds up other threads of its process: on an H200 host (2026-11-28) a kernel launch took 23 µs beside threads that
fault, and 10 µs alone. The engine's loop runs in the worker's process, so the faults are left to the client's.

CUDA tensors are copied straight into slots, which are pinned at their first use. Small payloads, and those for other hosts, follow on the
socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from midstream.transport import wire
from midstream.tree import as_bytes

_log = logging.getLogger(__name__)
SLOT_BYTES = 8 << 20
SLOTS = 16  # 128 MiB in all; memory is taken when a slot is first used
INLINE_LIMIT = 64 * 1024  # bytes; a smaller payload is cheaper on the socket
_AHEAD = 4  # chunks that a device copies while earlier ones are sent
_PIECE_BYTES = 1 << 20  # what one thread of the client copies at a time
_CHUNK = struct.Struct("<iIQ")  # slot, or one of the numbers below; bytes; place in the payload
_INLINE, _END, _LOST = -1, -2, -3  # the bytes follow; the payload is complete; it is lost, and the reason follows


class _Filled(NamedTuple):
    """A chunk in a slot.

    Attributes:
        copied: after it, the slot is filled; None if it is now.
    """

    slot: int
    size: int
    place: int
    copied: torch.cuda.Event | None


class SenderSlots:
    """The worker's end. Used from one thread; `close` when done."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_shared = sock.family == socket.AF_UNIX
        self._memory: torch.Tensor | None = None  # uint8, of all slots
        self._descriptor: int | None = None  # of the memory, until the client has it
        self._free = list(range(SLOTS))[::-1]  # the last one is used next, so that few slots are touched
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
        is_inline = not self._is_shared or size <= INLINE_LIMIT

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
            for stream in self._streams.values():
                stream.synchronize()
            self._free += [chunk.slot for chunk in filled]
            reason = f"copying it failed: {error!r}".encode()
            self._sock.sendall(_CHUNK.pack(_LOST, len(reason), 0) + reason)
        else:
            self._sock.sendall(_CHUNK.pack(_END, 0, 0))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._memory is not None:
            for slot in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(self._slot(slot).data_ptr())
        self._memory = None
        self._pinned.clear()
        self._streams.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

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
                    yield start + window * SLOT_BYTES, device, [(at, piece) for _, at, piece in pieces]

    @contextlib.contextmanager
    def _copying(self, device: torch.device, ready: Mapping[torch.device, torch.cuda.Event]) -> Iterator[None]:
        """A block that copies tensors of the device, on a stream of its own if it has streams."""
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
        return self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def _map(self) -> torch.Tensor:
        size = SLOTS * SLOT_BYTES
        try:
            if self._is_shared:
                self._descriptor = os.memfd_create("midstream-results")
                os.ftruncate(self._descriptor, size)
            mapped = mmap.mmap(-1 if self._descriptor is None else self._descriptor, size)
        except OSError as error:  # not the socket's
            raise MemoryError(str(error)) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _pinned_slot(self, slot: int) -> torch.Tensor:
        memory = self._slot(slot)
        if slot not in self._pinned:
            is_portable = 1  # cudaHostRegisterPortable: pinned for every device
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), SLOT_BYTES, is_portable)
            if int(code):  # copies to it are right, and slower
                _log.warning("results channel: host memory could not be pinned: %s", code)
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device="cuda")  # the first kernel after it raises the error again
            self._pinned.append(slot)
        return memory

    def _send(self, chunk: _Filled, is_inline: bool) -> None:
        slot = self._slot(chunk.slot)
        if is_inline:
            self._sock.sendall(_CHUNK.pack(_INLINE, chunk.size, chunk.place))
            self._sock.sendall(slot[: chunk.size].numpy().data)
            self._free.append(chunk.slot)
            return
        header = _CHUNK.pack(chunk.slot, chunk.size, chunk.place)
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
            given = self._sock.recv(SLOTS, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not given:
            raise ConnectionError("the other side of the results channel is gone")
        self._free += given


class SlotReader:
    """The client's end, for one worker. Used from one thread.

    Args:
        pool: its threads share the copies of large payloads.
    """

    def __init__(self, sock: socket.socket, pool: ThreadPoolExecutor) -> None:
        self._sock, self._pool = sock, pool
        self._slots: np.ndarray | None = None  # uint8, of all slots

    def read(self, memory: np.ndarray | None) -> str | None:
        """Read the next payload into `memory`, uint8, or drop it. Returns why the worker could not send it, if it could not.

        Raises OSError at the end of the connection.
        """
        copies: list[Future[None]] = []
        try:
            while True:
                slot, size, place = self._header()
                if slot == _END:
                    return None
                if slot == _LOST:
                    return wire.receive(self._sock, size).decode()
                target = memory[place : place + size] if memory is not None else None
                if slot == _INLINE:
                    wire.receive_into(self._sock, (np.empty(size, np.uint8) if target is None else target).data)
                elif target is None:
                    self._give_back(slot)
                else:
                    self._copy_out(slot, target, copies)
        finally:
            wait(copies)

    def _header(self) -> tuple[int, int, int]:
        data, descriptors, _, _ = socket.recv_fds(self._sock, _CHUNK.size, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            try:
                mapped = mmap.mmap(descriptor, SLOTS * SLOT_BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            self._slots = np.frombuffer(mapped, np.uint8)
        if not data:
            raise ConnectionError("the other side of the results channel is gone")
        data += wire.receive(self._sock, _CHUNK.size - len(data))
        return _CHUNK.unpack(data)  # type: ignore[return-value]

    def _copy_out(self, slot: int, target: np.ndarray, copies: list[Future[None]]) -> None:
        """Copy a slot's bytes and give the slot back: now if they are few, else the thread that copies the last piece does."""
        assert self._slots is not None
        source = self._slots[slot * SLOT_BYTES :][: len(target)]
        if len(target) <= 2 * _PIECE_BYTES:
            np.copyto(target, source)
            return self._give_back(slot)
        starts, done = range(0, len(target), _PIECE_BYTES), itertools.count(1)
        for start in starts:
            piece = slice(start, start + _PIECE_BYTES)
            copy = self._pool.submit(np.copyto, target[piece], source[piece])
            copies.append(copy)
            copy.add_done_callback(partial(self._note_copied, slot, done, len(starts)))

    def _note_copied(self, slot: int, done: Iterator[int], pieces: int, _: Future[None]) -> None:
        if next(done) == pieces:
            with contextlib.suppress(OSError):  # the worker has gone
                self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._sock.sendall(bytes([slot]))


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
