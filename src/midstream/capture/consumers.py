"""Consumers of captured rows: their protocol, the consumers that come with midstream, and those of installed packages.

`Consumer("name", **options)` in a plan is made by a factory among the installed packages' entry points:

    [project.entry-points."midstream.consumers"]
    mine = "my_package.probes:MyConsumer"        # MyConsumer(**options) returns an object with the methods of RowConsumer

Each consumer has a `ConsumerThread` with a queue, which calls begin, rows and end of the requests one after the other. A slow or failing
consumer does not delay the others.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import torch

from midstream.capture.rows import Rows, Selected
from midstream.errors import CaptureError
from midstream.plan.captures import PlaneKey
from midstream.plan.fields import nearest
from midstream.queues import BoundedQueue

_log = logging.getLogger(__name__)

GROUP = "midstream.consumers"


@dataclass(frozen=True)
class Collected:
    """Identifies a request of `model.collect` in the index of its directory.

    Attributes:
        id: the prompt's id; a prompt whose id is listed is not run again.
        model: the model's name and dtype.
        plan: a digest of the plan, and of the sampling parameters if generated rows are captured.
    """

    id: str
    model: str
    plan: str


@dataclass(frozen=True)
class CaptureInfo:
    """Describes a request to a consumer, before its rows come.

    Attributes:
        request_id: the engine's id of the request. It may have been used before.
        prompt_token_ids: the prompt.
        prompt_length: the position of the first generated token. By default the length of `prompt_token_ids`; prompts of
            embeddings have no ids.
        engine: identifies the engine if several write to one directory. All ranks of an engine have the same.
        stage: the pipeline stage whose layers these are, and the number of stages; (0, 1) if all layers come together.
        planes: (site, layer, when) of all rows that will come.
        collected: for a request of `model.collect`.
        run: tells this request from earlier ones of the same id. All stages have the same. Set if a worker feeds the
            consumer, otherwise empty.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    prompt_length: int = -1
    engine: str = ""
    stage: tuple[int, int] = (0, 1)
    planes: tuple[PlaneKey, ...] = ()
    collected: Collected | None = None
    run: str = ""

    def __post_init__(self) -> None:
        if self.prompt_length < 0:
            object.__setattr__(self, "prompt_length", len(self.prompt_token_ids))


class RowConsumer(Protocol):
    """Takes captured rows. Deriving from this class is optional; its methods do nothing.

    An exception from begin, rows or end fails that request's capture only: the request's result is a CaptureError, no more of
    its rows come, and `end` is called with that error (unless begin raised it).
    """

    def begin(self, info: CaptureInfo) -> None:
        """A request starts; its rows follow, between those of other requests."""

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        """Rows `[n, width]` of one site at these positions, or `[n, heads, head_dim]`. A site's rows come in one call or in several.

        The tensor is on the CPU, in the model's dtype, and belongs to the consumer. A site without rows gets one call with an
        empty tensor. A consumer whose method has another parameter `when` ("before" or "after" the site's edits) can take both.
        """

    def end(self, request_id: str, error: Exception | None) -> None:
        """All rows of the request have come; with an error, no more will come."""

    def close(self) -> None:
        """The engine closes. Called after the last request."""


class LogConsumer(RowConsumer):
    """Logs one line per request: `Capture(..., to=(directory, Consumer("log", level="info")))`.

    Options: `level` (default "info"), `logger` (default "midstream.capture").
    """

    def __init__(self, level: str = "info", logger: str = "midstream.capture") -> None:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise CaptureError(
                f"Consumer('log', level={level!r}): the levels are debug, info, warning, error, critical"
            )
        self._level, self._log = number, logging.getLogger(logger)
        self._seen: dict[str, dict[str, tuple[int, int]]] = {}

    def begin(self, info: CaptureInfo) -> None:
        self._seen[info.request_id] = {}

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        seen = self._seen[request_id]
        rows, size = seen.get(site, (0, 0))
        seen[site] = rows + len(positions), size + tensor.nbytes

    def end(self, request_id: str, error: Exception | None) -> None:
        seen = self._seen.pop(request_id, {})
        text = ", ".join(f"{rows} rows of {site} ({size / 1e6:.1f} MB)" for site, (rows, size) in seen.items())
        if error is not None:
            self._log.log(max(self._level, logging.WARNING), "request %s: capture failed: %s", request_id, error)
        else:
            self._log.log(self._level, "request %s: captured %s", request_id, text or "nothing")


class CallableSink(RowConsumer):
    """A function as a consumer: `fn(request_id, site, layer, positions, tensor)`, with `when=` if it has that parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.rows = function  # type: ignore[method-assign]


def takes_when(rows: Callable[..., Any]) -> bool:
    """Whether a consumer's `rows` has the parameter `when`."""
    try:
        parameters = inspect.signature(rows).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return any(parameter.name == "when" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


class Destination(NamedTuple):
    """A consumer that may not have been made yet. Equal keys mean the same consumer."""

    key: tuple[Any, ...]  # see `rows.destination_key`
    name: str
    make: Callable[[], RowConsumer]
    idle: float | None = None  # seconds without requests after which it is closed; None: it closes with the engine
    may_write: bool = True  # to the tensors that it is given


def find_consumer(name: str) -> Callable[..., RowConsumer]:
    """The factory that an installed package offers under this name, in the entry point group `midstream.consumers`.

    Raises CaptureError if there is none, or several.
    """
    offered = metadata.entry_points(group=GROUP)
    found = {entry.value: entry for entry in offered if entry.name == name}
    if len(found) == 1:
        try:
            return next(iter(found.values())).load()
        except Exception as error:
            raise CaptureError(f"consumer {name!r} ({next(iter(found))}) cannot be loaded: {error!r}") from error
    if found:
        raise CaptureError(f"consumer {name!r} is offered by several packages: {sorted(found)}")
    hint = nearest(name, (entry.name for entry in offered))
    raise CaptureError(f"no installed package offers the consumer {name!r} (entry points {GROUP!r}): {hint}")


# Seconds for which ended requests wait for others, so that files are written for many requests together: `COLLECT_LINGER` if all of them
# are of `collect`, else `LINGER`.
LINGER, COLLECT_LINGER = 0.2, 10.0


@dataclass(eq=False)
class Delivery:
    """The delivery of one request's rows to one consumer.

    Attributes:
        selected: the planes and rows that the consumer gets.
        report: called with the error.
        seen: the planes of which rows have come.
        empty: `Rows` without rows, for planes of which none have come.
        error: why the consumer did not get all rows.
        begun: the consumer's `begin` has returned.
        finished: done once the consumer has all rows, or gets no more; `wait` returns.
    """

    thread: ConsumerThread
    info: CaptureInfo
    selected: Selected
    report: Callable[[CaptureError], None] | None
    seen: set[PlaneKey] = field(default_factory=set)
    empty: dict[PlaneKey, Rows] = field(default_factory=dict)
    error: CaptureError | None = None
    begun: bool = False
    finished: Future[None] = field(default_factory=Future)


_QueuedCall = tuple[Delivery, Callable[[], None]]


class ConsumerThread:
    """One consumer, its queue and its thread.

    If a call of the consumer takes longer than `timeout` seconds, the consumer has stalled: all its open requests fail, and so do requests
    that begin before the call returns. `open` and all waiting methods check for stalls.

    Args:
        queue_bytes: the limit for rows that are queued or being taken. Any one entry fits into an empty queue.

    Attributes:
        queue: the calls that the consumer has yet to get. It is closed when the engine ends, or after it was idle for too long; then it
            refuses new requests, and the consumer still takes what is queued.
    """

    def __init__(self, destination: Destination, queue_bytes: int, timeout: float) -> None:
        self.name = destination.name
        self._make, self._idle, self._may_write = destination.make, destination.idle, destination.may_write
        self._timeout = timeout
        self._consumer: RowConsumer | None = None
        self._takes_when = False
        self.queue: BoundedQueue[_QueuedCall] = BoundedQueue(queue_bytes)
        self._changed = self.queue.changed  # also guards the attributes below
        self._open: set[Delivery] = set()
        self._unflushed: list[Delivery] = []  # of ended requests, until the consumer has flushed them
        self._unflushed_since = self._used = time.monotonic()
        self._call_now: tuple[str, float] | None = None  # the consumer's method that is running, and its start
        self._hurries = False  # ended requests do not wait for others
        self._flush_error: BaseException | None = None  # of the last flush
        self._finished = self._warned = False
        self._close_error: BaseException | None = None
        self.queue.start(f"midstream-capture {self.name}", self._run)

    # Called by producers.

    def open(
        self, info: CaptureInfo, selected: Selected, report: Callable[[CaptureError], None] | None = None
    ) -> Delivery | None:
        """A request begins. None if the thread is closed."""
        delivery = Delivery(self, replace(info, planes=tuple(selected)), selected, report)
        with self._changed:
            if self.queue.closed:
                return None
            self._open.add(delivery)
            self.check()
            if not delivery.finished.done():
                self._put(delivery, partial(self._begin, delivery))
        return delivery

    def give(self, delivery: Delivery, rows: list[Rows]) -> None:
        """Queue rows of one plane each. Blocks while the queue is full. Drops rows of a failed request."""
        size = sum(each.nbytes for each in rows)
        with self._changed:
            if delivery.error is None and not self.queue.has_room(size):
                if not self._warned:
                    self._warned = True
                    _log.warning(
                        "%s takes captured rows more slowly than they come: %.0f MB are queued, so the engine's results wait for it "
                        "(this is logged once; the gauge `blocked_seconds` shows how long)",
                        self.name,
                        self.queue.used / 1e6,
                    )
                self.queue.wait_for_room(
                    size, lambda has_room: self._wait_until(lambda: has_room() or delivery.error is not None)
                )
            if delivery.error is None:
                self._put(delivery, partial(self._rows, delivery, rows), size)

    def end(self, delivery: Delivery, error: Exception | None) -> None:
        """The request has ended; with an error, its rows are not complete."""
        self._put(delivery, partial(self._end, delivery, error))

    def wait(self, delivery: Delivery) -> CaptureError | None:
        """Wait until the consumer has taken all rows of an ended request and flushed them. Returns the error, if there is one."""
        with self._changed:
            self._wait_until(delivery.finished.done)
        return delivery.error

    def flush(self) -> str | None:
        """Have the consumer write the ended requests now, and wait until it has. Returns the reason if it has not written all of them."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            try:
                self._wait_until(lambda: self._is_written or self._stalls_in() == 0)
            finally:
                self._hurries = False
            if not self._is_written:
                return f"{self.name} has not returned from {self._call_now[0] if self._call_now else 'a call'} for {self._timeout:g} s"
            return None if self._flush_error is None else f"{type(self._flush_error).__name__}: {self._flush_error}"

    @property
    def _is_written(self) -> bool:
        return not self._unflushed and self.queue.is_idle

    def check(self) -> None:
        """Fail the open requests if the consumer has stalled. Whoever waits for `Delivery.finished` calls it now and then."""
        with self._changed:
            if self._call_now is None or self._stalls_in() != 0:
                return
            what, since = self._call_now
            for delivery in list(self._open):
                delivery.error = delivery.error or CaptureError(
                    f"{self.name}: the capture of request {delivery.info.request_id!r} was not taken: "
                    f"the consumer has not returned from {what} for {time.monotonic() - since:.1f} s (allowed: {self._timeout:g} s)"
                )
                self._finish(delivery)

    def join(self) -> BaseException | None:
        """Wait until the consumer is closed, or has stalled. Returns the error of its `close`, if it raised one."""
        with self._changed:
            self._wait_until(lambda: self._finished or self._stalls_in() == 0)
            return self._close_error

    def _put(self, delivery: Delivery, run: Callable[[], None], size: int = 0) -> None:
        if not self.queue.put((delivery, run), size):
            request = delivery.info.request_id
            delivery.error = CaptureError(f"{self.name} was closed before the capture of request {request!r} ended")
            self._finish(delivery)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for an action of the thread, and check for stalls."""
        while not reached():
            self.check()
            if not reached():
                self._changed.wait(self._stalls_in())

    def _stalls_in(self) -> float | None:
        """Seconds until the call that is running counts as a stall; None if none is running."""
        return max(self._call_now[1] + self._timeout - time.monotonic(), 0) if self._call_now else None

    def _finish(self, delivery: Delivery) -> None:
        with self._changed:
            if first := not delivery.finished.done():
                delivery.finished.set_result(None)
            self._open.discard(delivery)
            self._changed.notify_all()
        if first and delivery.error is not None and delivery.report is not None:
            delivery.report(delivery.error)

    # On the thread.

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
        """Wait for the next call and make it. Holds no rows afterwards. False if the thread ends: it was closed, or idle for too long."""
        now, timeout = time.monotonic(), None
        if self._unflushed:
            timeout = self._unflushed_since + self._linger() - now
            if timeout <= 0:
                return self._flush()
        elif self._idle is not None and not self._open:
            timeout = max(self._used + self._idle - now, 0)
        queued = self.queue.get(timeout, unless=lambda: self._hurries and len(self._unflushed) > 0)
        if queued is None:
            if self._unflushed:
                return self._flush()
            with self._changed:
                if self._open and not self.queue.closed:
                    return True  # a request has just begun
                self.queue.close()
                return len(self.queue) > 0
        delivery, run = queued
        try:
            run()
        except BaseException as error:  # the thread must live: callers wait for it
            self._fail(delivery, "handling its capture", error)
            self._finish(delivery)
        self._used = time.monotonic()
        self.queue.task_done()
        return True

    def _linger(self) -> float:
        """Seconds for which ended requests wait. If no others are open, there is nothing to wait for."""
        with self._changed:
            if len(self._open) == len(self._unflushed):
                return 0.0
        of_collect = all(delivery.info.collected is not None for delivery in self._unflushed)
        return COLLECT_LINGER if of_collect else LINGER

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> BaseException | None:
        """Call the consumer. Returns the error that it raised."""
        with self._changed:
            self._call_now = (what, time.monotonic())
            self._changed.notify_all()
        try:
            function(*arguments, **named)
        except BaseException as error:  # even a SystemExit ends only the request's capture
            return error
        finally:
            with self._changed:
                self._call_now = None
                self._changed.notify_all()
        return None

    def _try(self, delivery: Delivery, what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
        """Call the consumer for a request. If the call raises, the request's capture fails. Returns whether the call succeeded."""
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

    def _rows(self, delivery: Delivery, rows: list[Rows]) -> None:
        for each in rows:
            ((site, layer, when, *_),) = each.planes
            if delivery.error is not None or self._consumer is None:
                return
            named = {"when": when} if self._takes_when else {}
            tensor = each.values.clone() if self._may_write else each.values  # other consumers have the same tensor
            arguments = (delivery.info.request_id, site, layer, each.positions.tolist(), tensor)
            self._try(delivery, f"rows() at {site}[{layer}]", self._consumer.rows, *arguments, **named)

    def _end(self, delivery: Delivery, error: Exception | None) -> None:
        if delivery.begun and self._consumer is not None:  # else the consumer does not know the request
            self._try(delivery, "end()", self._consumer.end, delivery.info.request_id, delivery.error or error)
        if delivery.error is None and hasattr(self._consumer, "flush"):
            self._unflushed_since = self._unflushed_since if self._unflushed else time.monotonic()
            self._unflushed.append(delivery)
        else:
            self._finish(delivery)

    def _flush(self) -> bool:
        """Have the consumer write the ended requests, which finishes them."""
        batch = self._unflushed
        self._flush_error = error = self._call(f"flush() of {len(batch)} requests", self._consumer.flush)  # type: ignore[union-attr]
        for delivery in batch:
            if error is not None:
                self._fail(delivery, f"flush() of request {delivery.info.request_id!r}", error)
            self._finish(delivery)
        with self._changed:
            self._unflushed, self._used = [], time.monotonic()
            self._changed.notify_all()
        return True
