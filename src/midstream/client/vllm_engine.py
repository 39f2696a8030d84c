"""A running vLLM engine: its workers, the channel on which they send results, and requests that run to their end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from midstream.capture.sinks import Sinks
from midstream.client.requests import InvokeResult
from midstream.client.vectors_and_runs import Runs, VectorChanges, Vectors
from midstream.client.vllm_captures import RESULT_SECONDS, RowReceiver, RowThread
from midstream.client.vllm_requests import (
    EngineRequests,
    counts_of,
    graded,
    merge_stages,
    put_captures,
    results_lost,
    traced_result,
)
from midstream.engine import launch
from midstream.errors import ChannelClosedError, EngineClosedError, MidstreamError, TraceError
from midstream.ranks.merge import merged_description
from midstream.transport.receiver import Mailbox, Receiver

_CLOSED = "This engine is closed; make a new VLLM(...)."


class EngineConnection:
    """A running engine, as the client uses it.

    Args:
        engine: a `vllm.LLM`, or an `AsyncLLM` if `is_async`.
        sinks: closed with the engine.

    Attributes:
        config: the engine's VllmConfig.
        stages: the number of pipeline stages.
        vectors, runs: what the workers hold for plans.
        receiver: receives results; None once the engine is closed.
        has_died: a call to the workers of a dead engine may never return.
        interrupted: ids of traces whose requests were aborted.
        lock: a `vllm.LLM` may be used by one thread at a time.
        streams: the async streams that are being iterated over.
    """

    def __init__(self, engine: Any, sinks: Sinks, is_async: bool) -> None:
        self._engine: Any = engine
        self.is_async = is_async
        self.config = launch.config_of(engine)
        self.stages: int = self.config.parallel_config.pipeline_parallel_size
        self.has_died = False
        self.interrupted: list[str] = []
        self.lock = threading.RLock()
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.receiver: Receiver | None = Receiver(launch.address_for_workers(self.config))
        self._end = weakref.finalize(self, _end, engine, self.receiver, sinks)  # at the latest when Python ends
        self._description: dict[str, Any] | None = None
        self._senders: list[str] = []
        self.vectors = Vectors((lambda: None) if is_async else self._send_vectors_now)
        self.runs = Runs(lambda what, *args: self.ask(f"midstream_{what}_runs", *args), is_async)
        self._sending = asyncio.Lock()
        self._loop = _running_loop() if is_async else None
        self._starting: asyncio.Task[None] | None = None
        if not is_async:
            if not launch.is_in_process(engine):
                self.receiver.when_gone = partial(launch.wake_waiting_callers, engine)
            self._senders = _senders(self.ask("midstream_connect", self.receiver.address))

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM`. Raises EngineClosedError if the engine is closed or dead."""
        if self._engine is None:
            raise EngineClosedError(_CLOSED)
        if self.has_died:
            raise EngineClosedError(launch.DIED)
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    @property
    def is_open(self) -> bool:
        """Whether the engine is neither closed nor known to be dead."""
        return self._engine is not None and not self.has_died

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of every worker; returns a list of their answers, awaitable on an async engine."""
        return launch.ask(self.engine, method, *args)

    async def start(self) -> None:
        """Connect the workers of an async engine. Called before its first request."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise MidstreamError(
                "An async engine belongs to the event loop that it was first used in; use it in one asyncio.run() only."
            )
        self._loop = loop
        if self.is_async:
            if self._starting is None:
                self._starting = loop.create_task(self._connect())
            await asyncio.shield(self._starting)

    async def _connect(self) -> None:
        assert self.receiver is not None
        self._senders = _senders(await self.ask("midstream_connect", self.receiver.address))
        self._description = merged_description(await self.ask("midstream_describe"))

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        for stream in list(self.streams):
            stream.fail(EngineClosedError("The engine was closed while the trace ran."))
        self._engine = self.receiver = None
        self._end()

    @property
    def is_described(self) -> bool:
        """Whether `description` is there without asking the workers."""
        return self._description is not None

    @property
    def description(self) -> dict[str, Any]:
        """The model's module tree, shapes and sites, from the workers."""
        if self._description is None:
            if self.is_async:
                raise TraceError("With mode='async' call `await model.start()` first.")
            self._description = merged_description(self.ask("midstream_describe"))
        return self._description

    def drop_interrupted(self) -> None:
        """Have the workers forget interrupted traces. This happens at the next call, because such a trace may still block a worker."""
        if self.interrupted:
            traces, self.interrupted = self.interrupted, []
            self.ask("midstream_drop", traces)

    def mailboxes(
        self, requests: EngineRequests, share: bool = False
    ) -> tuple[list[Mailbox | None], list[Mailbox | None]]:
        """A mailbox for the trace's results of each request, and one for the captured rows of each; None where nothing will come.

        `share`: requests without sinks have one mailbox for their rows, which appears for each of them.
        """
        receiver = self.receiver
        if receiver is None:
            raise EngineClosedError(_CLOSED)
        traces = [
            receiver.expect((trace.trace, trace.index), self._senders) if trace is not None else None
            for trace in requests.traces
        ]
        late = [rows.key for rows in requests.receivers if rows is not None and not rows.has_sinks] if share else []
        shared = receiver.expect_all(late, self._senders) if late else None

        def box_for(rows: RowReceiver) -> Mailbox:
            if shared is not None and not rows.has_sinks:
                return shared
            return receiver.expect(rows.key, self._senders, paced=rows.has_sinks)

        return traces, [box_for(rows) if rows is not None else None for rows in requests.receivers]

    # Vectors and runs in the workers.

    def release_runs(self, ids: list[str]) -> None:
        """Release the leases of requests that have ended."""
        with contextlib.suppress(Exception):  # a dead engine holds no leases
            self.runs.lease(ids, -1)

    async def release_runs_later(self, ids: list[str], lease: Awaitable[Any]) -> None:
        """Release leases on an async engine, once `lease` is done: the task that waited for it may have been cancelled."""
        with contextlib.suppress(Exception):  # a lease that failed has nothing to release
            await lease
            await self.runs.lease(ids, -1)

    def _send_vectors_now(self) -> None:
        changes = self.vectors.take_changes()
        try:
            for method, argument in _vector_calls(changes):
                self.ask(method, argument)
        except BaseException:
            self.vectors.put_back(changes)
            raise

    async def send_vectors(self) -> None:
        """Send changed vectors to the workers of an async engine."""
        async with self._sending:
            changes = self.vectors.take_changes()
            try:
                for method, argument in _vector_calls(changes):
                    await self.ask(method, argument)
            except BaseException:
                self.vectors.put_back(changes)
                raise


def _vector_calls(changes: VectorChanges) -> Iterator[tuple[str, Any]]:
    """The workers' methods to call, and the argument of each."""
    put, gone = changes
    if gone:
        yield "midstream_delete_vectors", gone
    if put:
        yield "midstream_set_vectors", {name: (vector.data.tobytes(), vector.digest) for name, vector in put.items()}


def _senders(names: Sequence[str | None]) -> list[str]:
    """The workers that send results: one for each pipeline stage."""
    return [name for name in names if name is not None]


def _end(engine: Any, receiver: Receiver, sinks: Sinks) -> None:
    receiver.close()
    launch.shut_down(engine)
    sinks.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


# Requests on a sync engine.


def run_requests(connection: EngineConnection, requests: EngineRequests, progress: bool = False) -> list[InvokeResult]:
    """Run requests on a `vllm.LLM` to their end. Calls from several threads run one after the other.

    `progress`: whether to show vLLM's progress bar if there are several requests.
    """
    with ExitStack() as stack:
        stack.enter_context(connection.lock)
        connection.drop_interrupted()
        if requests.runs:
            connection.runs.lease(requests.runs, 1)
            stack.callback(connection.release_runs, requests.runs)
        return _run(connection, requests, progress and len(requests.prompts) > 1, stack)


def _run(
    connection: EngineConnection, requests: EngineRequests, progress: bool, stack: ExitStack
) -> list[InvokeResult]:
    engine = connection.engine
    trace_boxes, row_boxes = connection.mailboxes(requests, share=True)
    for box in dict.fromkeys(filter(None, [*trace_boxes, *row_boxes])):
        stack.callback(box.close)
    for receiver in filter(None, requests.receivers):
        stack.callback(receiver.discard)
    thread = _row_thread(requests, row_boxes)
    if thread is not None:
        stack.callback(thread.close)

    def ended(output: Any) -> None:
        if thread is not None:
            thread.end(output.request_id, counts_of(output))

    try:
        outputs = launch.generate(engine, requests.prompts, requests.params, progress, ended)
        if launch.is_in_process(engine) and (any(trace_boxes) or any(requests.plans)):
            connection.ask("midstream_finish")
        for output in outputs:
            ended(output)
        if thread is not None:
            thread.wait()
        results = [collect(box, output, connection.stages) for box, output in zip(trace_boxes, outputs, strict=True)]
    except BaseException as error:
        connection.interrupted += requests.trace_ids
        connection.has_died |= isinstance(error, EngineClosedError)
        raise
    counts = [counts_of(output) for output in outputs]
    for rows, count in zip(requests.receivers, counts, strict=True):
        if rows is not None:
            rows.end(count)
    for i, result in enumerate(results):
        put_captures(result, requests.receivers[i], counts[i])
        result.output.answers = graded(result.output, requests.answers[i])
    return results


def _row_thread(requests: EngineRequests, boxes: Sequence[Mailbox | None]) -> RowThread | None:
    pairs = [(rows, box) for rows, box in zip(requests.receivers, boxes, strict=True) if rows and box is not None]
    if not pairs:
        return None
    sharing = [(rows, box) for rows, box in pairs if not rows.has_sinks]
    followed = [(rows, box) for rows, box in pairs if rows.has_sinks]
    return RowThread([rows for rows, _ in sharing], sharing[0][1] if sharing else None, followed)


def collect(box: Mailbox | None, output: Any, stages: int) -> InvokeResult:
    """The result of a request, once every pipeline stage has sent its part of every sample."""
    if box is None:
        output.saves = {}
        return InvokeResult([], output)
    samples = len(output.outputs)
    try:
        messages = [box.get(RESULT_SECONDS) for _ in range(stages * samples)]
    except ChannelClosedError as error:
        raise results_lost(error) from error
    return traced_result(merge_stages(messages, samples), output)
