"""One consumer behind its queue and its thread: what it does, or fails to do, holds up nobody else.

Jobs wait in a queue that is bounded in bytes; the thread takes them in turn. A single call that takes longer than `timeout`
means that the consumer has stalled: every request that it has open fails, its queue is dropped, and what is new fails at
once, until the call returns. Only callers watch the clock: those that wait for room, a request's end or the lane's end, or ask after one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from midstream.capture.consumers import CaptureInfo, Destination, RowConsumer, takes_when
from midstream.errors import CaptureError
from midstream.plan.layout import Key

_log = logging.getLogger(__name__)
LINGER = 1.0  # seconds for which ended requests wait for others before a consumer that writes in batches writes them

Piece = tuple[Key, list[int], torch.Tensor]


class Delivery:
    """One request's way into one consumer."""

    def __init__(self, info: CaptureInfo) -> None:
        self.info = info
        self.error: CaptureError | None = None
        self.begun = self.ended = self.done = False


class _Job(NamedTuple):
    delivery: Delivery
    run: Callable[[], None]
    size: int = 0


class Lane:
    """See the module. `queue_bytes` bounds what is queued or being taken, except that any one job fits an empty queue."""

    def __init__(self, destination: Destination, queue_bytes: int, timeout: float) -> None:
        self.name = destination.name
        self._make, self._idle, self._may_write = destination.make, destination.idle, destination.may_write
        self._queue_bytes, self._timeout = queue_bytes, timeout
        self._consumer: RowConsumer | None = None
        self._takes_when = False
        self._queue: deque[_Job] = deque()
        self._open: set[Delivery] = set()
        self._unflushed: list[Delivery] = []
        self._unflushed_since = self._used = time.monotonic()
        self._changed = threading.Condition()
        self._waiters = 0
        self._busy: tuple[str, float] | None = None  # the call that the thread is in, and since when
        self._stalled = self._closing = self._finished = False
        self.retired = False  # takes no more requests
        self._close_error: BaseException | None = None
        self._warned = False
        self.queued_bytes = 0
        self.blocked_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"midstream-capture {self.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ the producer's

    @property
    def full(self) -> bool:
        return self.queued_bytes >= self._queue_bytes

    def open(self, info: CaptureInfo) -> Delivery | None:
        """A request begins. None if the lane has ended meanwhile, for want of requests."""
        delivery = Delivery(info)
        with self._changed:
            if self.retired or self._closing:
                return None
            self._find_stall()
            if self._stalled and self._busy:
                delivery.error, delivery.done = self._stall_error(delivery, *self._busy), True
                return delivery
            self._open.add(delivery)
            self._put(_Job(delivery, partial(self._begin, delivery)))
        return delivery

    def give(self, delivery: Delivery, pieces: list[Piece], size: int) -> None:
        """Queue rows; blocks while the queue is full. Rows of a request that has failed here are dropped."""
        with self._changed:
            if delivery.error is None and self.queued_bytes and self.queued_bytes + size > self._queue_bytes:
                self._wait_for_room(delivery, size)
            if delivery.error is None:
                self._put(_Job(delivery, partial(self._rows, delivery, pieces), size))

    def end(self, delivery: Delivery, error: Exception | None) -> None:
        with self._changed:
            if not delivery.done:
                self._put(_Job(delivery, partial(self._end, delivery, error)))

    def wait(self, delivery: Delivery, patient: bool = False) -> CaptureError | None:
        """Wait until the consumer has taken all of an ended request, for good. What went wrong, if anything did.

        `patient`: let it linger for others.
        """
        with self._changed:
            self._waiters += not patient
            self._changed.notify_all()
            try:
                self._wait_until(lambda: delivery.done)
            finally:
                self._waiters -= not patient
        return delivery.error

    def is_done(self, delivery: Delivery) -> bool:
        """Whether `wait` would return at once."""
        with self._changed:
            self._find_stall()
            return delivery.done

    def close(self) -> None:
        """Let the consumer take what is queued, and end it; call `join` then."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self) -> BaseException | None:
        """Wait for the end, but for no stalled consumer. The error of the consumer's own `close`, if it raised."""
        with self._changed:
            self._wait_until(lambda: self._finished or self._stalled)
            return self._close_error

    def _put(self, job: _Job) -> None:
        if self.retired:  # closed between the caller's look and now
            request = job.delivery.info.request_id
            job.delivery.error = CaptureError(f"{self.name} was closed before the capture of request {request!r} ended")
            return self._finish(job.delivery)
        self._queue.append(job)
        self.queued_bytes += job.size
        self._changed.notify_all()

    def _wait_for_room(self, delivery: Delivery, size: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s takes captured rows more slowly than they come: %.0f MB are queued, so the engine's results wait for it "
                "(from here on only the gauge `blocked_seconds` tells)",
                self.name,
                self.queued_bytes / 1e6,
            )
        start = time.monotonic()
        self._wait_until(
            lambda: delivery.error is not None or not self.queued_bytes or self.queued_bytes + size <= self._queue_bytes
        )
        self.blocked_seconds += time.monotonic() - start

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that the thread does; a stall comes to light here."""
        while not reached():
            self._find_stall()
            if reached():
                return
            since = self._busy[1] if self._busy and not self._stalled else time.monotonic()
            self._changed.wait(max(since + self._timeout - time.monotonic(), 0.001))

    # ------------------------------------------------------------------------------------------------------- stalls

    def _find_stall(self) -> None:
        if self._stalled or not self._busy or time.monotonic() - self._busy[1] < self._timeout:
            return
        self._stalled = True
        what, since = self._busy
        _log.error(
            "%s has not come back from %s for %.1f s: the captures it has open fail", self.name, what, self._timeout
        )
        dropped, self._queue = self._queue, deque()
        self.queued_bytes -= sum(job.size for job in dropped)
        for delivery in list(self._open):
            error = delivery.error = delivery.error or self._stall_error(delivery, what, since)
            if not delivery.ended:  # should it come back after all, it learns that these requests are over
                self._queue.append(_Job(delivery, partial(self._end, delivery, error)))
            self._finish(delivery)
        self._unflushed.clear()
        self._changed.notify_all()

    def _stall_error(self, delivery: Delivery, what: str, since: float) -> CaptureError:
        return CaptureError(
            f"{self.name}: the capture of request {delivery.info.request_id!r} was not taken: "
            f"the consumer has not come back from {what} for {time.monotonic() - since:.1f} s (allowed: {self._timeout:g} s)"
        )

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        with torch.no_grad():
            while self._step():
                pass
            if self._consumer is not None:
                self._close_error = self._call("close()", self._consumer.close)
        if self._close_error is not None:
            _log.error("%s raised %r in close()", self.name, self._close_error)
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _step(self) -> bool:
        """Do the next job, waiting for it; the rows are let go with it. False once the lane has ended."""
        job = self._next()
        if job is None:
            return False
        try:
            job.run()
        except BaseException as error:  # nobody may wait for a thread that is no more
            self._fail(job.delivery, "handling its capture", error)
            self._finish(job.delivery)
        with self._changed:
            self.queued_bytes -= job.size
            self._used = time.monotonic()
            self._changed.notify_all()
        return True

    def _next(self) -> _Job | None:
        """The next thing to do, waiting for it. None: the lane has ended."""
        with self._changed:
            while True:
                now, idle = time.monotonic(), not self._queue
                lingered = self._unflushed_since + LINGER - now
                if self._unflushed and (lingered <= 0 or (idle and (self._waiters or self._closing))):
                    return _Job(self._unflushed[0], self._flush)
                if self._queue:
                    return self._queue.popleft()
                left = self._used + self._idle - now if self._idle is not None and not self._open else None
                if self._closing or (left is not None and left <= 0):
                    self.retired = True  # no request can be opened here any more
                    return None
                self._changed.wait(lingered if self._unflushed else left)

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> BaseException | None:
        """Call the consumer; returns what it raised."""
        with self._changed:
            self._busy = (what, time.monotonic())
            self._changed.notify_all()
        try:
            function(*arguments, **named)
        except BaseException as error:  # even a SystemExit of the user's ends a request's capture and nothing more
            return error
        finally:
            with self._changed:
                if self._stalled:
                    _log.warning("%s came back from %s after %.1f s", self.name, what, time.monotonic() - self._busy[1])
                self._busy, self._stalled = None, False
                self._changed.notify_all()
        return None

    def _try(self, delivery: Delivery, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
        """Call the consumer for a request, which fails if that raises. Whether it did not."""
        what = f"{what} of request {delivery.info.request_id!r}"
        error = self._call(what, function, *arguments, **named)
        if error is not None:
            self._fail(delivery, what, error)
        return error is None

    def _fail(self, delivery: Delivery, what: str, error: BaseException) -> None:
        if delivery.error is not None:
            _log.error("%s raised %r in %s, which had failed already", self.name, error, what)
            return
        failed = CaptureError(f"{self.name} raised in {what}: {type(error).__name__}: {error}")
        failed.__cause__ = error
        delivery.error = failed

    def _begin(self, delivery: Delivery) -> None:
        if self._consumer is None and not self._try(delivery, "its construction, for the capture", self._construct):
            return
        planes = delivery.info.planes
        if not self._takes_when and len({key[:2] for key in planes}) < len(planes):
            missing = TypeError(
                "rows() has no parameter `when` to tell a site before its edits from the same after them"
            )
            return self._fail(delivery, "begin()", missing)
        delivery.begun = self._try(delivery, "begin()", self._consumer.begin, delivery.info)  # type: ignore[union-attr]

    def _construct(self) -> None:
        consumer = self._make()
        self._takes_when = takes_when(consumer.rows)
        self._consumer = consumer

    def _rows(self, delivery: Delivery, pieces: list[Piece]) -> None:
        for (site, layer, when), positions, tensor in pieces:
            if delivery.error is not None or self._consumer is None:
                return
            named = {"when": when} if self._takes_when else {}
            arguments = (delivery.info.request_id, site, layer, positions, tensor)
            self._try(delivery, f"rows() at {site}[{layer}]", self._hand_over, *arguments, **named)

    def _hand_over(
        self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor, **named: str
    ) -> None:
        own = tensor.clone() if self._may_write else tensor  # others have it, too: the output, for one
        self._consumer.rows(request_id, site, layer, positions, own, **named)  # type: ignore[union-attr]

    def _end(self, delivery: Delivery, error: Exception | None) -> None:
        delivery.ended = True
        if delivery.begun and self._consumer is not None:  # or it knows nothing of the request
            self._try(delivery, "end()", self._consumer.end, delivery.info.request_id, delivery.error or error)
        with self._changed:
            if delivery.done:
                return
            if delivery.error is None and hasattr(self._consumer, "flush"):
                if not self._unflushed:
                    self._unflushed_since = time.monotonic()
                self._unflushed.append(delivery)
            else:
                self._finish(delivery)

    def _flush(self) -> None:
        """What has ended becomes lasting; only then is it done."""
        with self._changed:
            batch, self._unflushed = self._unflushed, []
        error = self._call(f"flush() of {len(batch)} requests", self._consumer.flush)  # type: ignore[union-attr]
        with self._changed:
            for delivery in batch:
                if error is not None:
                    self._fail(delivery, f"flush() of request {delivery.info.request_id!r}", error)
                self._finish(delivery)

    def _finish(self, delivery: Delivery) -> None:
        delivery.done = True
        self._open.discard(delivery)
