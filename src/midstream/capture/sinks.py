"""The rows of running requests, handed on to consumers while they come.

    sinks = Sinks()
    sinks.begin(CaptureInfo(request_id, prompt_token_ids), routes(plan.captures, len(prompt_token_ids), range(num_layers)).sinks)
    sinks.put(segment)                   # blocks while a consumer's queue is full
    sinks.end(request_id, stop)          # the request is over: stop = prompt length + generated tokens - 1
    sinks.result(request_id)             # waits until all of it was taken; raises what went wrong

A consumer never sees a row that is not the user's: generated positions are held until `confirm` or `end` says that they
stand. What fails is one request's way into one consumer; its other consumers, and other requests, go on:

- A consumer that raises fails the request that it raised for.
- One that does not come back from a call for `timeout` seconds fails all requests it has open, and those that begin before
  it is back. Until then the producer may wait for its full queue, so others may come late, but lose nothing.
- A slow one slows the producer down (`stats["blocked_seconds"]`, and one warning): nothing is dropped.
- A row that comes twice or is missing at the end fails its request at all of its consumers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from midstream.capture.consumer_thread import ConsumerThread, Delivery, Piece
from midstream.capture.consumers import CaptureInfo, Destination, destination
from midstream.capture.segment import Part, Segment, check, column, find_rows, selection
from midstream.capture.selection import Route, Wanted
from midstream.errors import CaptureError
from midstream.plan.layout import Key

JOINED_BYTES = 16 << 20  # rows that were held go on in pieces up to this size


@dataclass
class _Way:
    """A request's way to one consumer."""

    thread: ConsumerThread
    delivery: Delivery
    wanted: dict[Key, Wanted]
    seen: set[Key] = field(default_factory=set)  # planes of which rows have come
    empty: dict[Key, torch.Tensor] = field(default_factory=dict)  # no rows, but the width of a plane that none came of


@dataclass
class _Request:
    ways: list[_Way]
    confirmed: int  # rows below this position are the user's for good
    held: list[Segment] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)  # positions of all that came, to find what came twice or not at all
    error: CaptureError | None = None
    ended: bool = False


class Sinks:
    """See the module. The calls for one request come from one thread at a time; different requests may come from several.

    Args:
        queue_bytes: bound of what waits for each consumer; a single larger segment still passes.
        timeout: seconds that one call of a consumer may take.
    """

    def __init__(self, *, queue_bytes: int = 256 << 20, timeout: float = 30.0) -> None:
        self._queue_bytes, self._timeout = queue_bytes, timeout
        self._threads: dict[tuple[object, ...], ConsumerThread] = {}
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        self._blocked_before = 0.0  # seconds, by consumers that are no more
        self._closed = False

    def begin(self, info: CaptureInfo, routes: Iterable[Route]) -> None:
        """A request begins. Raises CaptureError, and begins nothing, if a consumer is unknown or the request is open."""
        targets = [(destination(route.to), route.wanted) for route in routes]
        with self._lock:
            if self._closed:
                raise CaptureError(f"the capture of request {info.request_id!r} cannot begin: the engine is closed")
            if info.request_id in self._requests:
                raise CaptureError(f"the capture of request {info.request_id!r} is open already")
            ways = []
            for target, wanted in targets:
                told = replace(info, planes=tuple(wanted))
                while (delivery := self._thread(target).open(told)) is None:
                    pass  # it ended just now, for want of requests
                ways.append(_Way(self._threads[target.key], delivery, wanted))
            self._requests[info.request_id] = _Request(ways, info.prompt_length)

    def put(self, segment: Segment) -> None:
        """Rows of a request that has begun and not ended, in any order and any pieces."""
        request = self._running(segment.request)
        segment = check(segment)
        request.parts.append((segment.positions, segment.layout))
        stands = selection(segment.positions, request.confirmed, None)
        if isinstance(stands, slice) and stands == slice(None):
            return self._deliver(request, segment)
        self._deliver(request, _rows(segment, stands))
        request.held.append(_rows(segment, np.flatnonzero(segment.positions >= request.confirmed)))

    def confirm(self, request_id: str, stop: int) -> None:
        """Rows below `stop` are known to be the user's, while the request goes on: no need to hold them any longer."""
        request = self._running(request_id)
        if stop > request.confirmed:
            request.confirmed = stop
            self._release(request, stop)

    def end(self, request_id: str, stop: int | None = None, error: Exception | None = None) -> None:
        """No more rows come. Without an error the rows below `stop` are the user's (None: all), with one nothing is."""
        request = self._running(request_id)
        request.ended = True
        if error is None:
            self._release(request, stop)
            error = request.error = _found_wrong(request_id, request, stop)
        request.held.clear()
        request.parts.clear()
        for way in request.ways:
            if error is None and (empty := way.empty.keys() - way.seen):
                way.thread.give(way.delivery, [(key, [], way.empty[key]) for key in way.wanted if key in empty], 0)
            way.thread.end(way.delivery, error)

    def is_taken(self, request_id: str) -> bool:
        """Whether `result` of an ended request needs no waiting."""
        return all(way.thread.is_done(way.delivery) for way in self._requests[request_id].ways)

    def result(self, request_id: str, patient: bool = False) -> None:
        """Wait until all consumers have taken all of an ended request, files included, and forget it.

        `patient`: others will end soon, which files are to be shared with.

        Raises CaptureError, with what the consumer raised as its cause, if one of them failed it.
        """
        request = self._requests.get(request_id)
        if request is None or not request.ended:
            raise CaptureError(f"request {request_id!r} has no capture that has ended")
        waited = [way.thread.wait(way.delivery, patient) for way in request.ways]
        self._requests.pop(request_id, None)
        errors = [error for error in (request.error, *waited) if error is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also: {other}")
            raise errors[0]

    def discard(self, request_id: str, error: Exception | None = None) -> None:
        """Forget a request whose result nobody will ask for; what has not ended ends with an error."""
        request = self._requests.get(request_id)
        if request is not None and not request.ended:
            self.end(request_id, error=error or CaptureError(f"request {request_id!r} was given up"))
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """End what is open with an error, let the consumers take what is queued, and close them. Idempotent.

        Waits for slow consumers, and for no stalled one. Raises CaptureError if a consumer's own close raises.
        """
        with self._lock:
            self._closed = True
            open_requests = [name for name, request in self._requests.items() if not request.ended]
            threads, self._threads = list(self._threads.values()), {}
        for name in open_requests:
            self.end(name, error=CaptureError(f"the engine was closed before request {name!r} ended"))
        for thread in threads:
            thread.close()
        raised = [(thread.name, error) for thread in threads if (error := thread.join()) is not None]
        self._blocked_before += sum(thread.blocked_seconds for thread in threads)
        if raised:
            text = "; ".join(f"{name} raised {error!r} in close()" for name, error in raised)
            raise CaptureError(text) from raised[0][1]

    @property
    def stats(self) -> dict[str, float]:
        """Now: `queued_bytes`, `held_bytes` (rows not confirmed), `requests`, `consumers`. Since the start: `blocked_seconds`."""
        with self._lock:
            threads, requests = list(self._threads.values()), list(self._requests.values())
        return {
            "queued_bytes": sum(thread.queued_bytes for thread in threads),
            "held_bytes": sum(segment.rows.nbytes for request in requests for segment in list(request.held)),
            "blocked_seconds": self._blocked_before + sum(thread.blocked_seconds for thread in threads),
            "requests": len(requests),
            "consumers": sum(not thread.closed for thread in threads),
        }

    def _thread(self, target: Destination) -> ConsumerThread:
        for key in [key for key, thread in self._threads.items() if thread.closed]:
            self._blocked_before += self._threads.pop(key).blocked_seconds
        if target.key not in self._threads:
            self._threads[target.key] = ConsumerThread(target, self._queue_bytes, self._timeout)
        return self._threads[target.key]

    def _running(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            state = "has ended" if request else "has not begun"
            raise CaptureError(f"the capture of request {request_id!r} {state}")
        return request

    def _release(self, request: _Request, stop: int | None) -> None:
        """Deliver the held rows below `stop`, keep the others."""
        held, request.held = request.held, []
        standing = []
        for segment in held:
            standing.append(_rows(segment, selection(segment.positions, stop, None)))
            if stop is not None and (beyond := np.flatnonzero(segment.positions >= stop)).size:
                request.held.append(_rows(segment, beyond))
        for segment in _joined(standing):
            self._deliver(request, segment)

    def _deliver(self, request: _Request, segment: Segment) -> None:
        for way in sorted(request.ways, key=lambda way: way.thread.full):  # those that need no waiting first
            if way.delivery.error is None:
                pieces = _pieces(segment, way)
                if pieces:
                    way.thread.give(way.delivery, pieces, sum(tensor.nbytes for _, _, tensor in pieces))


def _rows(segment: Segment, chosen: slice | np.ndarray) -> Segment:
    return segment._replace(positions=segment.positions[chosen], rows=segment.rows[chosen])


def _joined(segments: list[Segment]) -> Iterator[Segment]:
    """The same rows in fewer pieces: generated ones come one by one, and each piece costs a call for each of its planes."""
    for _, alike in groupby(segments, key=lambda segment: (segment.layout, segment.rows.dtype, segment.rows.shape[1])):
        batch: list[Segment] = []
        size = 0
        for segment in alike:
            if batch and size + segment.rows.nbytes > JOINED_BYTES:
                yield _concatenated(batch)
                batch, size = [], 0
            batch.append(segment)
            size += segment.rows.nbytes
        yield _concatenated(batch)


def _concatenated(batch: list[Segment]) -> Segment:
    if len(batch) == 1:
        return batch[0]
    positions = np.concatenate([segment.positions for segment in batch])
    return batch[0]._replace(positions=positions, rows=torch.cat([segment.rows for segment in batch]))


def _pieces(segment: Segment, way: _Way) -> list[Piece]:
    """What of a segment goes this way. Little out of much is copied, so that it does not keep the rest in memory."""
    chosen: dict[int, tuple[Segment, slice | np.ndarray, list[int]]] = {}
    pieces: list[Piece] = []
    for key in segment.layout.by_key:
        rows = way.wanted.get(key)
        if rows is None:
            continue
        if id(rows) not in chosen:
            selected = selection(segment.positions, None, rows)
            positions = segment.positions[selected].tolist()
            together = isinstance(selected, slice)  # a view for all planes at once
            chosen[id(rows)] = (
                (_rows(segment, selected), slice(None), positions) if together else (segment, selected, positions)
            )
        part, selected, positions = chosen[id(rows)]
        if positions:
            tensor = column(part, key)
            pieces.append((key, positions, tensor if isinstance(selected, slice) else tensor[selected]))
            way.seen.add(key)
        elif key not in way.seen:
            way.empty[key] = column(segment, key)[:0].clone()
    if sum(tensor.nbytes for _, _, tensor in pieces) * 2 < segment.rows.nbytes:
        return [(key, positions, tensor.clone()) for key, positions, tensor in pieces]
    return pieces


def _found_wrong(request_id: str, request: _Request, stop: int | None) -> CaptureError | None:
    """A row that came twice to somebody, or was wanted and did not come."""
    try:
        for way in request.ways:
            find_rows(request_id, request.parts, stop, way.wanted)
    except CaptureError as error:
        return error
    return None
