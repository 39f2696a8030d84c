"""Hands the rows of running requests on to consumers as they arrive.

    sinks = Sinks()
    sinks.begin(CaptureInfo(request_id, prompt_token_ids), routes(plan.captures, len(prompt_token_ids), range(num_layers)).sinks)
    sinks.put(chunk)                     # blocks while a consumer's queue is full
    sinks.end(request_id, stop)          # the request has ended: stop = prompt length + generated tokens - 1
    sinks.result(request_id)             # waits until all rows are taken; raises the consumers' errors

`RequestCapture` does these calls for one request, and keeps the rows for its output.

A consumer never sees rows of tokens that are dropped later: rows of generated positions are held until `confirm` or `end`.
Failures are contained: one consumer's failure leaves its other requests, and the request's other consumers, alone.

- A consumer that raises fails the request that it raised for.
- A consumer that spends more than `timeout` seconds in a call fails all requests that it has open, and those that begin
  before the call returns. Until then the producer may wait for its full queue, which delays rows of others and loses none.
- A slow consumer slows the producer down (`stats["blocked_seconds"]`, and one warning): nothing is dropped.
- A row that arrives twice, or is missing at the end, fails its request at all of its consumers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream.capture.consumers import (
    CallableSink,
    CaptureInfo,
    ConsumerThread,
    Delivery,
    Destination,
    Piece,
    find_consumer,
)
from midstream.capture.directory import DirectorySink
from midstream.capture.rows import (
    Captured,
    ChunkRows,
    Route,
    Routes,
    RowChunk,
    RowSelection,
    check,
    find_rows,
    gather,
    identity,
    plane_of,
    select_rows,
)
from midstream.errors import CaptureError
from midstream.plan.captures import Key
from midstream.plan.values import Consumer

JOINED_BYTES = 16 << 20  # rows that were held are handed on in pieces up to this size
DIRECTORY_IDLE, CALLABLE_IDLE = 60.0, 1.0  # seconds without requests


def destination(to: Any) -> Destination:
    """The destination that `Capture(to=...)` names. Raises CaptureError for a consumer that no installed package has."""
    key = identity(to)
    if isinstance(to, (str, Path)):
        path = Path(key[1])
        return Destination(key, f"directory {path}", lambda: DirectorySink(path), DIRECTORY_IDLE, may_write=False)
    if isinstance(to, Consumer):
        factory, options = find_consumer(to.name), dict(to.options)
        return Destination(key, f"consumer {to.name!r}", lambda: factory(**options))
    name = getattr(to, "__qualname__", None) or type(to).__qualname__
    return Destination(key, f"callable {name}", lambda: CallableSink(to), CALLABLE_IDLE)


@dataclass
class _Way:
    """A request's way to one consumer."""

    thread: ConsumerThread
    delivery: Delivery
    selected: dict[Key, RowSelection]
    seen: set[Key] = field(default_factory=set)  # planes of which rows have come
    empty: dict[Key, torch.Tensor] = field(default_factory=dict)  # `[0, width]` for planes of which none have come


@dataclass
class _OpenRequest:
    ways: list[_Way]
    confirmed: int  # rows below this position are the user's for good
    held: list[RowChunk] = field(default_factory=list)
    arrived: list[ChunkRows] = field(default_factory=list)  # to find rows that came twice or not at all
    error: CaptureError | None = None
    ended: bool = False


class Sinks:
    """See the module's docstring. Only one thread at a time may call for a request; several may call for different ones.

    Args:
        queue_bytes: bound of the rows queued for each consumer; a single larger chunk still passes.
        timeout: how many seconds one call of a consumer may take.
    """

    def __init__(self, *, queue_bytes: int = 256 << 20, timeout: float = 30.0) -> None:
        self._queue_bytes, self._timeout = queue_bytes, timeout
        self._threads: dict[tuple[object, ...], ConsumerThread] = {}
        self._requests: dict[str, _OpenRequest] = {}
        self._lock = threading.Lock()
        self._blocked_before = 0.0  # seconds, by consumers that were closed
        self._closed = False

    def begin(self, info: CaptureInfo, routes: Iterable[Route]) -> None:
        """A request begins. Raises CaptureError, and begins nothing, if a consumer is unknown or the request is open."""
        targets = [(destination(route.to), route.selected) for route in routes]
        with self._lock:
            if self._closed:
                raise CaptureError(f"the capture of request {info.request_id!r} cannot begin: the engine is closed")
            if info.request_id in self._requests:
                raise CaptureError(f"the capture of request {info.request_id!r} is open already")
            ways = []
            for target, selected in targets:
                told = replace(info, planes=tuple(selected))
                while (delivery := self._thread(target).open(told)) is None:
                    pass  # its thread has just ended, being idle
                ways.append(_Way(self._threads[target.key], delivery, selected))
            self._requests[info.request_id] = _OpenRequest(ways, info.prompt_length)

    def put(self, chunk: RowChunk) -> None:
        """Take rows of an open request, in any order and in any chunks."""
        request = self._running(chunk.request)
        chunk = check(chunk)
        request.arrived.append((chunk.positions, chunk.layout))
        stands = select_rows(chunk.positions, request.confirmed, None)
        if isinstance(stands, slice) and stands == slice(None):
            return self._deliver(request, chunk)
        self._deliver(request, _rows(chunk, stands))
        request.held.append(_rows(chunk, np.flatnonzero(chunk.positions >= request.confirmed)))

    def confirm(self, request_id: str, stop: int) -> None:
        """Rows below `stop` are known to be the user's while the request goes on: they are no longer held."""
        request = self._running(request_id)
        if stop > request.confirmed:
            request.confirmed = stop
            self._release(request, stop)

    def end(self, request_id: str, stop: int | None = None, error: Exception | None = None) -> None:
        """No more rows come. Those below `stop` are the user's (None: all of them); with an error, none are."""
        request = self._running(request_id)
        request.ended = True
        if error is None:
            self._release(request, stop)
            error = request.error = _row_error(request_id, request, stop)
        request.held.clear()
        request.arrived.clear()
        for way in request.ways:
            if error is None and (empty := way.empty.keys() - way.seen):
                way.thread.give(way.delivery, [(key, [], way.empty[key]) for key in way.selected if key in empty], 0)
            way.thread.end(way.delivery, error)

    def is_taken(self, request_id: str) -> bool:
        """Whether `result` of an ended request needs no waiting."""
        return all(way.thread.is_done(way.delivery) for way in self._requests[request_id].ways)

    def result(self, request_id: str, patient: bool = False) -> None:
        """Wait until all consumers have taken all rows of an ended request, files included, and forget the request.

        `patient`: let a file wait for requests that end soon, to share it with them.

        Raises CaptureError if a consumer failed the request; its cause is the consumer's exception.
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
        """Forget a request whose result nobody will ask for. If it has not ended, it ends with an error."""
        request = self._requests.get(request_id)
        if request is not None and not request.ended:
            self.end(request_id, error=error or CaptureError(f"request {request_id!r} was given up"))
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """End open requests with an error, let the consumers take what is queued, and close them. Idempotent.

        Waits for slow consumers, not for stalled ones. Raises CaptureError if a consumer's own close raises.
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
            "held_bytes": sum(chunk.rows.nbytes for request in requests for chunk in list(request.held)),
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

    def _running(self, request_id: str) -> _OpenRequest:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            state = "has ended" if request else "has not begun"
            raise CaptureError(f"the capture of request {request_id!r} {state}")
        return request

    def _release(self, request: _OpenRequest, stop: int | None) -> None:
        """Deliver the held rows below `stop` and keep the others."""
        held, request.held = request.held, []
        standing = []
        for chunk in held:
            standing.append(_rows(chunk, select_rows(chunk.positions, stop, None)))
            if stop is not None and (beyond := np.flatnonzero(chunk.positions >= stop)).size:
                request.held.append(_rows(chunk, beyond))
        for chunk in _joined(standing):
            self._deliver(request, chunk)

    def _deliver(self, request: _OpenRequest, chunk: RowChunk) -> None:
        for way in sorted(request.ways, key=lambda way: way.thread.full):  # full queues last
            if way.delivery.error is None:
                pieces = _pieces(chunk, way)
                if pieces:
                    way.thread.give(way.delivery, pieces, sum(tensor.nbytes for _, _, tensor in pieces))


class RequestCapture:
    """The captured rows of one request, for its output and its sinks.

    Args:
        info: tells the sinks about the request.
        selected: where the request's rows go.
        empty: makes a chunk without rows that has all selected planes.
    """

    def __init__(self, info: CaptureInfo, selected: Routes, sinks: Sinks, empty: Callable[[], RowChunk]) -> None:
        self._request, self._selected, self._sinks, self._empty = info.request_id, selected, sinks, empty
        self._chunks: list[RowChunk] = []
        self._captured: Captured | None = None
        self._is_open = bool(selected.sinks)  # at the sinks
        if self._is_open:
            sinks.begin(info, selected.sinks)
            sinks.put(empty())

    def add(self, chunks: Iterable[RowChunk], confirmed: int = 0) -> None:
        """Take rows; those below position `confirmed` are the user's for good. Blocks while a consumer's queue is full."""
        for chunk in chunks:
            if self._selected.output:
                self._chunks.append(chunk)
            if self._is_open:
                self._sinks.put(chunk)
        if self._is_open and confirmed:
            self._sinks.confirm(self._request, confirmed)

    def end(self, stop: int) -> None:
        """All rows have come, and those below `stop` are the user's."""
        if self._is_open:
            self._sinks.end(self._request, stop)

    def result(self, stop: int, patient: bool = False) -> Captured:
        """The output's captures, once the sinks have taken theirs; `patient` is as of `Sinks.result`. Raises CaptureError."""
        if self._is_open:
            self._is_open = False
            self._sinks.result(self._request, patient)
        return self._captured if self._captured is not None else self._gather(stop)

    def gather_early(self, prompt_length: int) -> None:
        """Gather the output's rows before the request's end is known, if they are all of the prompt."""
        if all(rows.tail is None for rows in self._selected.output.values()):
            self._captured = self._gather(prompt_length)

    def _gather(self, stop: int) -> Captured:
        selected = self._selected.output
        if not selected:
            return Captured.nothing(self._request)
        layouts = [chunk.layout for chunk in self._chunks]
        has_all = any(layout.has_just(selected) or layout.by_key.keys() >= selected.keys() for layout in layouts)
        captured = gather([*self._chunks, *([] if has_all else [self._empty()])], stop, selected)
        self._chunks = []
        return captured

    def discard(self, error: Exception | None = None) -> None:
        """Drop the rows. Sinks are told of the error, if they have not been told of the request's end."""
        self._chunks = []
        if self._is_open:
            self._is_open = False
            self._sinks.discard(self._request, error)


def _rows(chunk: RowChunk, chosen: slice | np.ndarray) -> RowChunk:
    return chunk._replace(positions=chunk.positions[chosen], rows=chunk.rows[chosen])


def _joined(chunks: list[RowChunk]) -> Iterator[RowChunk]:
    """The same rows in fewer chunks: generated rows come one by one, and each chunk costs one call per plane."""
    for _, alike in groupby(chunks, key=lambda chunk: (chunk.layout, chunk.rows.dtype, chunk.rows.shape[1])):
        batch: list[RowChunk] = []
        size = 0
        for chunk in alike:
            if batch and size + chunk.rows.nbytes > JOINED_BYTES:
                yield _concatenated(batch)
                batch, size = [], 0
            batch.append(chunk)
            size += chunk.rows.nbytes
        yield _concatenated(batch)


def _concatenated(batch: list[RowChunk]) -> RowChunk:
    if len(batch) == 1:
        return batch[0]
    positions = np.concatenate([chunk.positions for chunk in batch])
    return batch[0]._replace(positions=positions, rows=torch.cat([chunk.rows for chunk in batch]))


def _pieces(chunk: RowChunk, way: _Way) -> list[Piece]:
    """The rows of a chunk that go this way. A small part of a chunk is copied, so that it does not keep the rest in memory."""
    chosen: dict[int, tuple[RowChunk, slice | np.ndarray, list[int]]] = {}
    pieces: list[Piece] = []
    for key in chunk.layout.by_key:
        rows = way.selected.get(key)
        if rows is None:
            continue
        if id(rows) not in chosen:
            selected = select_rows(chunk.positions, None, rows)
            positions = chunk.positions[selected].tolist()
            together = isinstance(selected, slice)  # a view for all planes at once
            chosen[id(rows)] = (
                (_rows(chunk, selected), slice(None), positions) if together else (chunk, selected, positions)
            )
        part, selected, positions = chosen[id(rows)]
        if positions:
            tensor = plane_of(part, key)
            pieces.append((key, positions, tensor if isinstance(selected, slice) else tensor[selected]))
            way.seen.add(key)
        elif key not in way.seen:
            way.empty[key] = plane_of(chunk, key)[:0].clone()
    if sum(tensor.nbytes for _, _, tensor in pieces) * 2 < chunk.rows.nbytes:
        return [(key, positions, tensor.clone()) for key, positions, tensor in pieces]
    return pieces


def _row_error(request_id: str, request: _OpenRequest, stop: int | None) -> CaptureError | None:
    """The error of a request of which a row came twice, or was selected and did not come."""
    try:
        for way in request.ways:
            find_rows(request_id, request.arrived, stop, way.selected)
    except CaptureError as error:
        return error
    return None
