"""The worker's end of the results channel; `results` is the client's and has the example.

The forward's thread only pickles the skeleton and queues the message. What it queues is a snapshot of the containers,
but not of the tensors: whoever sends a tensor does not write to it afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from midstream.errors import ChannelError
from midstream.transport import codec as wire
from midstream.transport import staging
from midstream.transport.codec import ChannelClosedError, Kind, UnsendableError

_log = logging.getLogger(__name__)


class _Job(NamedTuple):
    """One frame to be written. Without `packed` it is the end of `stream`."""

    header: bytes
    stream: str | None
    packed: wire.Packed | None
    ready: Mapping[torch.device, torch.cuda.Event]
    size: int  # bytes that it counts in the queue


class Sender:
    """Sends values to the client whose `Receiver.address` this is, from a thread of its own.

    `name` tells this worker from the engine's others, in the client's `lost` and `expect`. `queue_bytes` bounds what is
    queued and not yet written; beyond it `send` blocks, except that any single message fits an empty queue.

    Raises ChannelError if there is no way to the client, or either side does not have the key.
    """

    def __init__(
        self, address: Mapping[str, Any], name: str | None = None, *, queue_bytes: int = 1 << 30, timeout: float = 10.0
    ) -> None:
        self.name = name or f"pid {os.getpid()}"
        self._queue_bytes = queue_bytes
        self._queue: deque[_Job] = deque()
        self._queued_bytes = self._messages = self._bytes = 0
        self._blocked_seconds = 0.0
        self._streams: dict[str, wire.Stream] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._sock = _connect(address, self.name, timeout)
        self._copier = staging.Copier()
        self._thread = threading.Thread(target=self._run, name="midstream-send", daemon=True)
        self._thread.start()

    def send(
        self,
        header: Mapping[str, Any],
        value: Any,
        stream: str | None = None,
        *,
        exact: bool = False,
        ready: Mapping[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        """Queue `value` for the mailbox of `header["key"]` (hashable; the whole header has to be picklable).

        Tensors may lie anywhere in `value`, on any device; one that occurs twice is sent once. What cannot be pickled
        arrives as an `UnsendableError` in its place. With `stream`, a tensor that an earlier message of that stream
        carried (the same object, unchanged) is not sent again; a stream belongs to one thread, and ends with `end`.
        A change in place is seen by the tensor's version; tensors made in inference mode have none, so do not change
        those, or send them again with `exact`. With `ready`, the tensors on a device, or in host memory that one is
        writing to, are complete with these events; without, with what the caller's current streams have been given.

        Returns at once unless the queue is full (see `stats`). Raises ChannelClosedError if the channel is closed.
        """
        hash(header["key"])
        known = self._streams.setdefault(stream, wire.Stream()) if stream is not None else None
        pickled_header = pickle.dumps(dict(header))
        packed = wire.pack(value, known, exact)
        size = len(packed.body) + packed.size
        events = staging.mark_ready(packed.tensors) if ready is None else ready
        self._put(_Job(pickled_header, stream, packed, events, size))

    def send_together(self, messages: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
        """As `send` for each (header, value), in one frame: what they share, tensors too, is sent once."""
        if not messages:
            return
        header = pickle.dumps({"keys": [header["key"] for header, _ in messages]})
        packed = wire.pack([(dict(header), value) for header, value in messages])
        size = len(packed.body) + packed.size
        self._put(_Job(header, None, packed, staging.mark_ready(packed.tensors), size))

    def end(self, stream: str) -> None:
        """Forget a stream, here and on the client. Every stream has to be ended, also one whose request was aborted."""
        if self._streams.pop(stream, None) is not None:
            self._put(_Job(b"", stream, None, {}, 0))

    def close(self, flush: bool = True, timeout: float = 30.0) -> None:
        """Send what is queued (`flush`) or drop it, and disconnect; cut off after `timeout` seconds. Idempotent."""
        with self._changed:
            self._closed = True
            if not flush:
                self._drop_queue()
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():  # the client has stopped reading
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    @property
    def queued_bytes(self) -> int:
        """Bytes queued or being written."""
        return self._queued_bytes

    @property
    def stats(self) -> dict[str, float]:
        """Since the start: `messages` and `bytes` queued, `blocked_seconds` in `send`; and `queued_bytes` now."""
        return {
            "messages": self._messages,
            "bytes": self._bytes,
            "blocked_seconds": self._blocked_seconds,
            "queued_bytes": self._queued_bytes,
        }

    def _put(self, job: _Job) -> None:
        with self._changed:
            if not self._has_room(job):
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._has_room(job))
                self._blocked_seconds += time.perf_counter() - start
            if self._closed or self._error:
                raise ChannelClosedError(f"results channel of {self.name}: {self._error or 'closed'}") from self._error
            self._queue.append(job)
            self._queued_bytes += job.size
            self._bytes += job.size
            self._messages += job.packed is not None
            self._changed.notify_all()

    def _has_room(self, job: _Job) -> bool:
        fits = self._queued_bytes + job.size <= self._queue_bytes or not self._queued_bytes
        return fits or self._closed or self._error is not None

    def _drop_queue(self) -> None:
        self._queued_bytes -= sum(job.size for job in self._queue)
        self._queue.clear()

    def _run(self) -> None:
        # Two at most: while the older one is written, the other one's tensors are copied.
        frames: deque[_Frame] = deque()
        try:
            with torch.no_grad():
                while (job := self._next(wait=not frames)) is not None or frames:
                    if frames and frames[0].is_copied:
                        self._write(frames.popleft())
                    if job is not None:
                        frames.append(_Frame(job, self._copier, self._sock.family == socket.AF_UNIX, self.name))
                    if frames and (job is None or len(frames) > 1):
                        self._write(frames.popleft())
            wire.write(self._sock, Kind.BYE, b"")
        except BaseException as error:
            with self._changed:
                self._error = error.with_traceback(None)  # whose frames hold tensors
                self._queue.clear()
                self._queued_bytes = 0
                self._changed.notify_all()
            if not self._closed:
                _log.error("results channel of %s failed: %r", self.name, error)
        finally:
            for frame in frames:
                frame.close()
            frames.clear()
            self._sock.close()
            self._copier.close()

    def _next(self, wait: bool) -> _Job | None:
        """The next job; None if there is none, or, with `wait`, once closed and empty."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

    def _write(self, frame: _Frame) -> None:
        try:
            frame.write(self._sock)
        finally:
            frame.close()
            with self._changed:
                self._queued_bytes -= frame.job.size
                self._changed.notify_all()


class _Frame:
    """A job whose tensors are being copied, into a memfd if there is much of them and the client can take one."""

    def __init__(self, job: _Job, copier: staging.Copier, takes_descriptors: bool, name: str) -> None:
        self.job = job
        self._name = name
        self._packed = job.packed
        self._descriptor: int | None = None
        self._mapping: mmap.mmap | None = None
        self._payload: torch.Tensor | None = None
        self._copying = staging.Copying()
        if job.packed is None:
            return
        try:
            size = job.packed.size
            if takes_descriptors and size > wire.INLINE_LIMIT:
                self._payload = self._map(size)
            else:
                self._payload = torch.empty(size, dtype=torch.uint8)
            self._copying = copier.begin(self._payload, job.packed.tensors, job.packed.offsets, job.ready)
        except Exception as error:
            self._lose(error)

    def _map(self, size: int) -> torch.Tensor:
        self._descriptor = os.memfd_create("midstream-results")
        os.ftruncate(self._descriptor, size)
        self._mapping = mmap.mmap(self._descriptor, size)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)  # of use where the system has shmem_enabled=advise
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _lose(self, error: Exception) -> None:
        """What comes instead of the value says so."""
        _log.error("results channel of %s: a result could not be copied", self._name, exc_info=error)
        self.close()
        self._packed, self._payload = wire.pack(UnsendableError("result", f"copying it failed: {error!r}")), None

    @property
    def is_copied(self) -> bool:
        """Whether `write` would not have to wait for its tensors."""
        return self._copying.is_done

    def write(self, sock: socket.socket) -> None:
        """Wait until all is copied, and send it."""
        if self._packed is None:
            return wire.write(sock, Kind.END, pickle.dumps(self.job.stream))
        try:
            self._copying.wait()
        except Exception as error:
            self._lose(error)
        meta = pickle.dumps((self.job.header, self.job.stream, self._packed.table))
        if self._descriptor is None:
            return wire.write(sock, Kind.INLINE, meta, self._packed.body, self._payload)
        wire.write_memfd(sock, meta, self._packed.body, self._descriptor, self._packed.size)

    def close(self) -> None:
        """Free what the copy took here, once nothing is being written to it. Idempotent."""
        with contextlib.suppress(Exception):  # `write` has told of it
            self._copying.wait()
        self._payload = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _connect(address: Mapping[str, Any], name: str, timeout: float) -> socket.socket:
    """A connection to the client that has proved the key: by Unix socket on its own host, by TCP from elsewhere."""
    place: str | tuple[str, int]
    if address["host"] == wire.machine():
        family, place = socket.AF_UNIX, f"\0{address['unix']}"
    elif address["tcp"] is not None:
        family, place = socket.AF_INET6 if ":" in address["tcp"][0] else socket.AF_INET, tuple(address["tcp"])
    else:
        raise ChannelError("this worker runs on another host than the client: the receiver has to be given a `host`")
    sock = socket.socket(family)
    try:
        sock.settimeout(timeout)
        sock.connect(place)
        wire.introduce(sock, bytes.fromhex(address["key"]), name)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise ChannelError(f"the client cannot be reached at {place!r}: {error}") from error
    except ChannelError:
        sock.close()
        raise
    return sock
