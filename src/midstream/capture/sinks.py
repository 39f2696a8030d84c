"""Hands the rows of running requests on to consumers as they arrive, and keeps the rows for the output.

    sinks = Sinks()
    capture = RequestCapture(CaptureInfo(request_id, prompt_token_ids), routes(plan.captures, prompt_length, range(num_layers)), sinks)
    capture.add(rows)                    # blocks while a consumer's queue is full
    capture.end(stop)                    # the request has ended: stop = prompt length + generated tokens - 1
    capture.result(stop)                 # the output's captures, after all consumers have taken their rows; raises their errors

A consumer never sees rows of tokens that are dropped later: rows of generated positions are held until they are confirmed or the
request ends. A consumer's failure affects neither its other requests nor the request's other consumers.

- A consumer that raises fails the request that it raised for.
- A consumer that spends more than `timeout` seconds in a call fails all its open requests, and those that begin before the call
  returns. Until then the producer may wait for its full queue, which delays the rows of others.
- A slow consumer slows the producer down (`stats["blocked_seconds"]`, and one warning). Rows are never dropped.
- A row that arrives twice, or is missing at the end, fails its request at all of its consumers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from midstream.capture.consumers import (
    CallableSink,
    CaptureInfo,
    ConsumerThread,
    Delivery,
    Destination,
    find_consumer,
)
from midstream.capture.directory import DirectorySink
from midstream.capture.rows import (
    Captured,
    Routes,
    Rows,
    concatenate_rows,
    destination_key,
    find_rows,
    gather_captures,
    plane_name,
    rows_as_asked,
    rows_where,
)
from midstream.errors import CaptureError
from midstream.plan.captures import Planes
from midstream.plan.values import Consumer

JOINED_BYTES = 16 << 20  # rows that were held are handed on in chunks up to this size
_CHECK_SECONDS = 1.0  # between checks for consumers that have stalled
DIRECTORY_IDLE, CALLABLE_IDLE = 60.0, 1.0  # seconds without requests


def destination(to: Any) -> Destination:
    """The destination that `Capture(to=...)` names. Raises CaptureError for a consumer that no installed package has."""
    key = destination_key(to)
    if isinstance(to, (str, Path)):
        path = Path(key[1])
        return Destination(key, f"directory {path}", lambda: DirectorySink(path), DIRECTORY_IDLE, may_write=False)
    if isinstance(to, Consumer):
        factory, options = find_consumer(to.name), dict(to.options)
        is_own = factory is DirectorySink
        idle = DIRECTORY_IDLE if is_own else None
        return Destination(key, f"consumer {to.name!r}", lambda: factory(**options), idle, may_write=not is_own)
    name = getattr(to, "__qualname__", None) or type(to).__qualname__
    return Destination(key, f"callable {name}", lambda: CallableSink(to), CALLABLE_IDLE)  # type: ignore[abstract]


class Sinks:
    """The consumers of an engine, each made when its first request begins. Any thread may call.

    Args:
        queue_bytes: bound of the rows queued for each consumer; a single larger chunk still passes.
        timeout: how many seconds one call of a consumer may take.
    """

    def __init__(self, *, queue_bytes: int = 256 << 20, timeout: float = 30.0) -> None:
        self._queue_bytes, self._timeout = queue_bytes, timeout
        self._threads: dict[tuple[object, ...], ConsumerThread] = {}
        self._open: set[RequestCapture] = set()
        self._lock = threading.Lock()
        self._blocked_before = 0.0  # seconds, by consumers that were closed
        self._closed = False

    def begin(self, capture: RequestCapture, info: CaptureInfo, routes: Routes) -> list[Delivery]:
        """Open a delivery to each consumer of a request. Raises CaptureError, and opens none, if a consumer is unknown."""
        targets = [(destination(to), selected) for to, selected in routes]
        with self._lock:
            if self._closed:
                raise CaptureError(f"the capture of request {info.request_id!r} cannot begin: the engine is closed")
            deliveries = []
            for target, selected in targets:
                while (delivery := self._thread(target).open(info, selected, capture.report)) is None:
                    pass  # its idle thread has just ended
                deliveries.append(delivery)
            self._open.add(capture)
            return deliveries

    def flush(self, to: Any) -> str | None:
        """Have the consumer that `Capture(to=...)` names write the requests that have ended, and wait until it has.

        Returns the reason if it has not written all of them.
        """
        with self._lock:
            thread = self._threads.get(destination_key(to))
        return None if thread is None else thread.flush()

    def forget(self, capture: RequestCapture) -> None:
        """Forget a request that is over."""
        with self._lock:
            self._open.discard(capture)

    def close(self) -> None:
        """End open requests with an error, let the consumers take what is queued, and close them. Idempotent.

        Waits for slow consumers, not for stalled ones. Raises CaptureError if a consumer's own close raises.
        """
        with self._lock:
            self._closed = True
            captures, threads, self._threads = list(self._open), list(self._threads.values()), {}
        for capture in captures:
            capture.end(error=CaptureError(f"the engine was closed before request {capture.request_id!r} ended"))
        for thread in threads:
            thread.queue.close()
        raised = [(thread.name, error) for thread in threads if (error := thread.join()) is not None]
        self._blocked_before += sum(thread.queue.blocked_seconds for thread in threads)
        if raised:
            text = "; ".join(f"{name} raised {error!r} in close()" for name, error in raised)
            raise CaptureError(text) from raised[0][1]

    @property
    def stats(self) -> dict[str, float]:
        """Now: `queued_bytes`, `held_bytes` (rows not confirmed), `requests`, `consumers`. Since the start: `blocked_seconds`."""
        with self._lock:
            threads, captures = list(self._threads.values()), list(self._open)
        return {
            "queued_bytes": sum(thread.queue.used for thread in threads),
            "held_bytes": sum(capture.held_bytes for capture in captures),
            "blocked_seconds": self._blocked_before + sum(thread.queue.blocked_seconds for thread in threads),
            "requests": len(captures),
            "consumers": sum(not thread.queue.closed for thread in threads),
        }

    def _thread(self, target: Destination) -> ConsumerThread:
        for key in [key for key, thread in self._threads.items() if thread.queue.closed]:
            self._blocked_before += self._threads.pop(key).queue.blocked_seconds
        if target.key not in self._threads:
            self._threads[target.key] = ConsumerThread(target, self._queue_bytes, self._timeout)
        return self._threads[target.key]


class RequestCapture:
    """The captured rows of one request, for its output and its consumers. One thread at a time may call.

    Args:
        info: tells the consumers about the request.
        routes: where the request's rows go.
        empty: makes `Rows` without rows that have all selected planes. Without it, planes are known from their rows.
        report: called with each error, for requests whose `result` is never called.
        stops_in_prompt: whether the request may end at a token of its prompt. Then rows of the prompt are not final before its end.

    Raises:
        CaptureError: a consumer is unknown, or the engine is closed.
    """

    def __init__(
        self,
        info: CaptureInfo,
        routes: Routes,
        sinks: Sinks,
        empty: Callable[[], Rows] | None = None,
        report: Callable[[CaptureError], None] | None = None,
        stops_in_prompt: bool = False,
    ) -> None:
        self.request_id, self.report = info.request_id, report
        (_, self._output), *others = routes
        self._sinks, self._empty = sinks, empty
        self._rows: list[Rows] = []  # for the output
        self._confirmed = 0 if stops_in_prompt else info.prompt_length  # rows below this position are final
        self._held: list[Rows] = []  # rows that are not confirmed
        self._arrived: list[tuple[np.ndarray, Planes]] = []  # to find rows that came twice or not at all
        self._error: Exception | None = None
        self._ended = not others
        self._deliveries = sinks.begin(self, info, tuple(others)) if others else []
        if self._deliveries and empty is not None:
            self._take(empty())

    @property
    def held_bytes(self) -> int:
        return sum(rows.nbytes for rows in list(self._held))

    def add(self, chunks: Iterable[Rows], confirmed: int = 0) -> None:
        """Take rows, in any order. Rows below position `confirmed` are final. Blocks while a consumer's queue is full."""
        for rows in chunks:
            if self._output:
                self._rows.append(rows)
            if not self._ended:
                self._take(rows)
        if confirmed > self._confirmed and not self._ended:
            self._confirmed = confirmed
            self._release()

    def end(self, stop: int | None = None, error: Exception | None = None) -> None:
        """All rows have come. Those below `stop` are valid; if it is None, all are; with an error, none are. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if error is None:
            self._confirmed = np.iinfo(np.int64).max if stop is None else stop
            self._release()
            try:
                for delivery in self._deliveries:  # a row that came twice, or did not come
                    find_rows(self.request_id, self._arrived, stop, delivery.selected)
            except CaptureError as raised:
                error = raised
                if self.report is not None:
                    self.report(error)
        self._error = error
        self._held, self._arrived = [], []
        for delivery in self._deliveries:
            if error is None and (empty := delivery.empty.keys() - delivery.seen):
                delivery.thread.give(delivery, [delivery.empty[key] for key in delivery.selected if key in empty])
            delivery.thread.end(delivery, error)
        if self.report is not None:
            self._sinks.forget(self)

    async def delivered(self) -> None:
        """Wait until the consumers have taken all rows of the ended request, files included. Holds up no thread."""
        while waiting := [delivery for delivery in self._deliveries if not delivery.finished.done()]:
            finished = [asyncio.wrap_future(delivery.finished) for delivery in waiting]
            await asyncio.wait(finished, timeout=_CHECK_SECONDS)
            for delivery in waiting:
                delivery.thread.check()

    def result(self, stop: int) -> Captured:
        """The output's captures, once the consumers have taken all rows, files included.

        Raises CaptureError if rows are missing, or if a consumer failed the request; its cause is the consumer's exception.
        """
        self.end(stop)
        waited = [delivery.thread.wait(delivery) for delivery in self._deliveries]
        self._sinks.forget(self)
        errors = [error for error in (self._error, *waited) if error is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {other}")
            raise errors[0]
        return self._gather(stop)

    def discard(self, error: Exception | None = None) -> None:
        """Drop the rows: `result` will not be called. Consumers that do not know of the end yet get the error."""
        self._rows = []
        self.end(error=error or CaptureError(f"request {self.request_id!r} was given up"))
        self._sinks.forget(self)

    def _gather(self, stop: int) -> Captured:
        known = (rows.planes.by_key.keys() for rows in self._rows)
        if self._output and self._empty is not None and not any(self._output.keys() <= keys for keys in known):
            self._rows.append(self._empty())
        captured = gather_captures(self.request_id, self._rows, stop, self._output)
        self._rows = []
        return captured

    def _take(self, rows: Rows) -> None:
        self._arrived.append(rows[:2])
        self._hand_on(rows)

    def _release(self) -> None:
        """Hand on the held rows that are confirmed now."""
        held, self._held = self._held, []
        for rows in _joined(held):
            self._hand_on(rows)

    def _hand_on(self, rows: Rows) -> None:
        """Deliver the confirmed rows and hold the others."""
        confirmed = rows.positions < self._confirmed
        if not confirmed.all():
            self._held.append(rows.take(rows_where(~confirmed)))
            rows = rows.take(rows_where(confirmed))
        for delivery in sorted(
            self._deliveries, key=lambda delivery: not delivery.thread.queue.has_room(1)
        ):  # full queues last
            if delivery.error is not None:
                continue
            try:
                planes = _by_plane(rows, delivery)
            except CaptureError as error:  # a number that the capture's dtype cannot hold
                return self.end(error=error)
            if planes:
                delivery.thread.give(delivery, planes)


def _joined(chunks: list[Rows]) -> Iterator[Rows]:
    """The same rows in fewer chunks: generated rows come one by one, and each chunk costs one call per plane."""
    for _, alike in groupby(chunks, key=lambda rows: (rows.planes, rows.block.dtype, rows.block.shape[1])):
        batch: list[Rows] = []
        size = 0
        for rows in alike:
            if batch and size + rows.nbytes > JOINED_BYTES:
                yield Rows.joined(batch, concatenate_rows)
                batch, size = [], 0
            batch.append(rows)
            size += rows.nbytes
        yield batch[0] if len(batch) == 1 else Rows.joined(batch, concatenate_rows)


def _by_plane(rows: Rows, delivery: Delivery) -> list[Rows]:
    """The rows of a delivery, of one plane each. A small part of the rows is copied, so that it does not keep the rest in memory."""
    chosen: dict[int, Rows] = {}
    found: list[Rows] = []
    for key in rows.planes.by_key:
        selected = delivery.selected.get(key)
        if selected is None:
            continue
        if id(selected) not in chosen:
            chosen[id(selected)] = rows.take(rows_where(selected.mask(rows.positions)))
        part = chosen[id(selected)]
        plane = Rows.of_plane(key, part.positions, rows_as_asked(part.plane(key), selected, plane_name(key)))
        if part.positions.size:
            found.append(plane)
            delivery.seen.add(key)
        elif key not in delivery.seen:
            delivery.empty[key] = plane._replace(block=plane.block.clone())
    if sum(plane.nbytes for plane in found) * 2 < rows.nbytes:
        return [plane._replace(block=plane.block.clone()) for plane in found]
    return found
