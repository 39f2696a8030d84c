"""Sends a worker's results: captured rows, and the saved values of traces.

`Reports` sends them to the client. `CaptureSender` decides where a request's rows go. A request of `midstream.VLLM` names a mailbox of the
client. For any other request the plan's consumers run in the worker: `LocalSinks` copies the rows from the device and hands them to the
consumers, on a separate thread with a bounded queue. A consumer that cannot keep up slows the engine down, and the gauge
`consumer_blocked_ms` shows this. No row is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from midstream.capture.consumers import CaptureInfo, find_consumer
from midstream.capture.rows import NO_ROUTES, Rows, routes
from midstream.capture.sinks import RequestCapture, Sinks
from midstream.errors import CaptureError, ChannelClosedError, PlanError
from midstream.plan.values import Consumer, Plan
from midstream.queues import BoundedQueue
from midstream.runtime.request import PlanRequest, TraceRequest, users_id
from midstream.sites import Point
from midstream.trace.code import Outcome
from midstream.transport.messages import Packed, ResultHeader, pack
from midstream.transport.sender import Sender, mark_ready
from midstream.tree import as_bits

_log = logging.getLogger(__name__)
DUE_BYTES = 16 << 20  # rows of one request are sent in pieces of this size: they hold device memory until then
MESSAGE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20  # results of traces that are smaller than this are sent together
_TOGETHER_BYTES = 4 << 20  # of results in one message; a client that keeps one of them keeps the memory of all
_FEW_PIECES = 4
_QUEUE_BYTES = 256 << 20


_Queued = tuple[ResultHeader, list[Rows], str | None]  # (header, rows, error)


class Reports:
    """Sends results to the client, those of one step in few messages.

    Args:
        stage: pipeline stage of this worker.
        sends: whether this worker reports. All tensor-parallel ranks of a stage have the same results, and one of them reports.

    Attributes:
        sender: the channel to the client, once it has connected.
    """

    def __init__(self, stage: int = 0, sends: bool = True) -> None:
        self.sends = sends
        self.sender: Sender | None = None
        self._stage = stage
        self._client_gone = False
        self._rows: list[_Queued] = []
        self._small: list[tuple[ResultHeader, Packed]] = []  # outcomes to be sent together
        self._small_bytes = 0

    @property
    def queued_bytes(self) -> int:
        return self.sender.queued_bytes if self.sender is not None else 0

    def send_rows(
        self, key: tuple[str, int], name: str, rows: list[Rows], final: bool, confirmed: int, error: str | None
    ) -> None:
        """Captured rows of a request for the mailbox of this key. They wait for `flush`."""
        if self.sends:
            self._rows.append((ResultHeader(key, name, final, self._stage, confirmed), rows, error))

    def send(self, name: str, trace: TraceRequest, outcomes: list[Outcome], final: bool = True) -> None:
        """Send the outcomes of a request's bodies; if not `final`, what they have saved so far. Small final outcomes wait for `flush`."""
        if not self.sends:
            return
        header = ResultHeader((trace.trace, trace.index), name, final, self._stage)
        if final and not (trace.stream or trace.together or any(outcome.failure for outcome in outcomes)):
            packed = pack(outcomes)  # now: code that runs before the flush may change the containers
            if (size := packed.size + len(packed.body)) > _SMALL_BYTES:
                return self._with_sender(lambda sender: sender.send_packed([(header, packed)]))
            self._small.append((header, packed))
            self._small_bytes += size
            return self.flush() if self._small_bytes >= _TOGETHER_BYTES else None

        def send(sender: Sender) -> None:
            sender.send(header, outcomes, name if trace.stream else None, exact=final)
            if final:
                sender.end(name)

        return self._with_sender(send)

    def flush(self) -> None:
        """Send what waits. Rows go in messages of about MESSAGE_BYTES, in which one request's rows are not split; outcomes in one."""
        if not (self._rows or self._small):
            return
        rows, self._rows = self._rows, []
        small, self._small, self._small_bytes = self._small, [], 0

        def send(sender: Sender) -> None:
            while rows:
                size = 0
                together: list[_Queued] = []
                while rows and (not together or size < MESSAGE_BYTES):
                    together.append(rows.pop(0))
                    size += sum(each.nbytes for each in together[-1][1])
                sender.send_together(_messages(together))
            if small:
                sender.send_packed(small)

        self._with_sender(send)

    def _with_sender(self, send: Callable[[Sender], None]) -> None:
        if self.sender is None:
            _log.error("Results are lost: the client has not connected to this worker.")
            return
        try:
            send(self.sender)
        except ChannelClosedError as error:  # the client is closing and has yet to tell the engine
            if not self._client_gone:
                _log.warning("Results are lost: %s", error)
            self._client_gone = True

    def end(self, name: str) -> None:
        """Nothing more is sent for the request."""
        if self.sender is not None:
            self.sender.end(name)


class CaptureSender:
    """Sends a worker's captured rows to the client, or to the consumers that the plan names.

    Args:
        reports: to the client. The consumers of this worker get rows only if it sends.
        local: makes the `LocalSinks` when the first request needs it.
    """

    def __init__(self, reports: Reports, local: Callable[[], LocalSinks]) -> None:
        self._reports, self._make_local = reports, local
        self.local: LocalSinks | None = None
        self._found: set[str] = set()  # names of consumers that are installed

    def check(self, request: PlanRequest, plan: Plan) -> None:
        """Raise PlanError if the plan names a consumer that its rows would go to here and that is not installed."""
        if request.capture is not None or request.keeps_rows:
            return
        named = {to.name for capture in plan.captures for to in capture.sinks if isinstance(to, Consumer)}
        for name in named - self._found:
            try:
                find_consumer(name)
            except CaptureError as error:
                raise PlanError(str(error)) from error
            self._found.add(name)

    def begin(self, name: str, request: PlanRequest, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        """A request with captures begins."""
        if self._reports.sends and request.capture is None and not request.keeps_rows:
            self.local = self.local or self._make_local()
            self.local.begin(name, plan, prompt_token_ids)

    def send(self, name: str, request: PlanRequest, rows: Sequence[Rows], complete: bool, confirmed: int = 0) -> None:
        """Rows of a request; `complete` if they are its last. Rows at positions below `confirmed` are the user's for good."""
        if (local := self._local_of(name)) is not None:
            local.rows(name, _joined(rows), confirmed)
        elif request.capture is not None:
            self._reports.send_rows(request.capture, name, _joined(rows), complete, confirmed, None)

    def end(self, name: str, request: PlanRequest, tokens: int | None, rows: Sequence[Rows] | None) -> None:
        """The request is over.

        Args:
            tokens: how many it had, if that is known; the last of them has no row.
            rows: its last ones; None if all were sent before.
        """
        if rows is not None:
            self.send(name, request, rows, True)
        if (local := self._local_of(name)) is not None:
            local.end(name, tokens - 1 if tokens is not None else None)

    def fail(self, name: str, request: PlanRequest, message: str) -> None:
        """No more rows come, for this reason."""
        if (local := self._local_of(name)) is not None:
            local.end(name, None, message)
        elif request.capture is not None:
            self._reports.send_rows(request.capture, name, [], True, 0, message)

    def flush(self) -> None:
        """Send what waits for the client."""
        self._reports.flush()

    def close(self) -> None:
        """Let the consumers in this process take their rows."""
        if self.local is not None:
            self.local.close()

    def gauges(self) -> dict[str, int]:
        """Of consumers in this process: requests that failed, bytes that wait, and how long the forward was held up, since the start."""
        if self.local is None:
            return {"capture_failures": 0, "consumer_bytes": 0, "consumer_blocked_ms": 0}
        stats = self.local.stats
        waiting, blocked = int(stats["queued_bytes"] + stats["held_bytes"]), int(1000 * stats["blocked_seconds"])
        return {"capture_failures": self.local.failures, "consumer_bytes": waiting, "consumer_blocked_ms": blocked}

    def _local_of(self, name: str) -> LocalSinks | None:
        """The `LocalSinks`, if they take this request's rows."""
        return self.local if self.local is not None and name in self.local.names else None


def _messages(queue: Sequence[_Queued]) -> list[tuple[ResultHeader, Any]]:
    leaving: Counter[int] = Counter()
    for _, each, _ in queue:
        for rows in each:
            leaving[id(rows.block)] += len(rows.positions)

    def sent(rows: Rows) -> tuple[Any, ...]:
        together, whole = leaving[id(rows.block)], len(rows.block)
        if together > len(rows.positions) and 2 * together > whole:  # most of the block goes now: send it whole, once
            return tuple(rows)
        return rows.positions, rows.planes, rows.values

    return [(header, {"rows": list(map(sent, each)), "error": error}) for header, each, error in queue]


def _joined(pieces: Sequence[Rows]) -> list[Rows]:
    """The same rows. If there are many pieces, consecutive pieces with the same planes are joined."""
    if len(pieces) <= _FEW_PIECES:
        return list(pieces)
    runs = [list(run) for _, run in groupby(pieces, key=lambda rows: id(rows.planes))]
    return [Rows.joined(run, torch.cat) for run in runs]


class LocalSinks:
    """Feeds consumers in this process.

    Args:
        engine: tells this engine from others that write to the same place; the same on all its ranks.
        num_layers: of the model.
        layers: those of this stage.
        stage: which stage this is, and how many there are.
        head_dims: as in `ModelFacts`.
    """

    def __init__(
        self,
        engine: str,
        num_layers: int,
        layers: Collection[int],
        stage: tuple[int, int] = (0, 1),
        head_dims: Mapping[Point, int] = MappingProxyType({}),
    ) -> None:
        self._engine, self._num_layers, self._head_dims = engine, num_layers, head_dims
        self._layers, self._stage = layers, stage
        self._sinks = Sinks()
        self.names: dict[str, str] = {}  # of running requests: the engine's id -> the user's
        self._captures: dict[str, RequestCapture] = {}  # by the engine's id; requests that have failed are not there
        self.failures = 0  # requests whose rows were not taken, all of them or in part
        self._queue: BoundedQueue[Callable[[], None]] = BoundedQueue(_QUEUE_BYTES)
        self._queue.start("midstream-consumers", self._run)

    def begin(self, engine_id: str, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        """A request begins. Consumers get the id that its user gave, unless a request with that id is running."""
        name = users_id(engine_id)
        if name in self.names.values():
            name = engine_id
        self.names[engine_id] = name
        info = CaptureInfo(name, tuple(prompt_token_ids), engine=self._engine, stage=self._stage, run=engine_id)
        everywhere = routes(plan.captures, len(prompt_token_ids), range(self._num_layers), self._head_dims)[1:]
        # A stage without any of the rows begins the request too: a reader of the directory waits for every stage's part.
        here = tuple(
            (to, {key: rows for key, rows in selected.items() if key[1] in self._layers}) for to, selected in everywhere
        )

        def job() -> None:
            self._captures[engine_id] = RequestCapture(
                info, (*NO_ROUTES, *here), self._sinks, report=self._failed, stops_in_prompt=plan.stops_in_prompt
            )

        self._put(engine_id, job)

    def rows(self, engine_id: str, each: Sequence[Rows], confirmed: int = 0) -> None:
        """Rows of a request, on the device. Consumers get those below position `confirmed` now, the others when the request ends."""
        tensors = [rows.values for rows in each]
        ready = mark_ready(tensors)

        def job() -> None:
            if (capture := self._captures.get(engine_id)) is not None:
                capture.add((self._on_host(rows, ready) for rows in each), confirmed)

        self._put(engine_id, job, sum(tensor.nbytes for tensor in tensors))

    def end(self, engine_id: str, stop: int | None, error: str | None = None) -> None:
        """The request is over: rows below position `stop` are the user's (None: all)."""
        self.names.pop(engine_id)

        def job() -> None:
            if (capture := self._captures.pop(engine_id, None)) is not None:
                capture.end(stop, CaptureError(error) if error is not None else None)

        self._put(engine_id, job)

    @property
    def stats(self) -> dict[str, float]:
        """`Sinks.stats`, with what is queued here."""
        stats = self._sinks.stats
        stats["queued_bytes"] += self._queue.used
        stats["blocked_seconds"] += self._queue.blocked_seconds
        return stats

    def close(self) -> None:
        """Let the consumers take what is queued, and close them."""
        self._queue.close()
        self._queue.join()
        self._sinks.close()

    def _on_host(self, rows: Rows, ready: Mapping[torch.device, torch.cuda.Event]) -> Rows:
        values = rows.values
        # PyTorch hands out pinned memory again. Fresh memory would be faulted in, which slows the forward's thread down.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        if values.is_cuda:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready[values.device])
                host.copy_(values, non_blocking=True)
                copied = torch.cuda.Event(blocking=True)
                copied.record()
            copied.synchronize()
        else:
            np.copyto(as_bits(host).numpy(), as_bits(values).numpy())  # in this thread alone
        return rows._replace(block=host, first=0)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _put(self, engine_id: str, job: Callable[[], None], size: int = 0) -> None:
        """Queue a job. If it fails, no more rows of that request are taken."""

        def guarded() -> None:
            try:
                job()
            except Exception as error:
                self._failed(error)
                if (capture := self._captures.pop(engine_id, None)) is not None:
                    capture.discard(error)

        self._queue.put(guarded, size)

    def _failed(self, error: Exception) -> None:
        _log.error("%s", error, exc_info=None if isinstance(error, CaptureError) else error)
        self.failures += 1

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # and the rows with it
            self._queue.task_done()
