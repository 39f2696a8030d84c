"""A running vLLM engine: its workers, the channel on which they send results, and requests that run to their end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from midstream.capture.rows import Captured
from midstream.capture.sinks import Sinks
from midstream.engine import launch
from midstream.errors import (
    NOT_FINITE,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NotFiniteError,
    PlanError,
    TraceError,
    UnsendableError,
)
from midstream.lowering.kept import Ending
from midstream.ranks.merge import merged_description, merged_outcomes
from midstream.requests.invokes import Answers, InvokeResult, PreparedPlan, runs_of, sample_saves
from midstream.requests.vectors_and_runs import HeldWeights, Runs, Vectors, run_now
from midstream.runtime.request import TraceRequest
from midstream.settings import Settings
from midstream.sweeps.running import Turns
from midstream.trace.program import STOPPED, Outcome, put_results
from midstream.trace.weights import Weight
from midstream.transport.receiver import Mailbox, Receiver
from midstream.vllm.captures import RESULT_SECONDS, RowReceiver, RowThread, sample_index

_FIRST_REQUESTS = 32  # submitted before the first step, so that the first results come soon
_BATCH = 256  # requests added at a time; with larger steps, the GPU idles while the engine prepares the next step
_BATCHES = 3  # two may run, and one waits
_CLOSED = "This engine is closed; make a new VLLM(...)."


@dataclass(frozen=True)
class EngineRequest:
    """A request to submit.

    Attributes:
        prompt: as vLLM takes it.
        params: its SamplingParams, which carry the plan and the trace.
        trace: what a traced request carries.
        plan: its plan.
        rows: receives captured rows.
        answers: the answers to grade.
        ending: makes the outcome of its trace, if its code never runs.
        weights: what its trace needs the workers to hold, by digest.
    """

    prompt: dict[str, Any]
    params: Any
    trace: TraceRequest | None
    plan: PreparedPlan | None
    rows: RowReceiver | None
    answers: Answers
    ending: Ending | None = None
    weights: Mapping[str, Weight] = field(default_factory=dict)


def trace_ids(requests: Sequence[EngineRequest]) -> list[str]:
    return sorted({request.trace.trace for request in requests if request.trace is not None})


def weights_of(requests: Sequence[EngineRequest]) -> dict[str, Weight]:
    return {digest: weight for request in requests for digest, weight in request.weights.items()}


class EngineConnection:
    """A running engine, as the client uses it.

    Args:
        engine: a `vllm.LLM`, or an `AsyncLLM` if `is_async`.
        sinks: closed with the engine.
        is_ours: whether `close` ends the engine, too.

    Attributes:
        config: the engine's VllmConfig.
        stages: the number of pipeline stages.
        vectors, runs: what the workers hold for plans.
        weights: what they hold for traces.
        receiver: receives results; None once the engine is closed.
        has_died: a call to the workers of a dead engine may never return.
        interrupted: ids of traces whose requests were aborted.
        lock: a `vllm.LLM` may be used by one thread at a time.
        sending: held on an async engine while changed vectors are sent.
        sweep_turns: of the sweeps on an async engine.
        streams: the async streams that are being iterated over.
        followed: the requests of `run_continuously` that run, by their ids, with what to call with the final output.
    """

    def __init__(self, engine: Any, sinks: Sinks, is_async: bool, is_ours: bool = True) -> None:
        self._engine: Any = engine
        self.is_async = is_async
        self.config = launch.config_of(engine)
        self.stages: int = self.config.parallel_config.pipeline_parallel_size
        self.has_died = False
        self.interrupted: list[str] = []
        self.lock = threading.RLock()
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.followed: dict[str, Callable[[Any], None]] = {}
        self.receiver: Receiver | None = Receiver(launch.address_for_workers(self.config))
        self._end = weakref.finalize(
            self, _end, engine if is_ours else None, self.receiver, sinks
        )  # at the latest when Python ends
        self._description: dict[str, Any] | None = None
        self._senders: list[str] = []
        self.vectors = Vectors((lambda: None) if is_async else (lambda: run_now(self.send_vectors())))
        self.runs = Runs(lambda what, *args: self.answers(f"midstream_{what}_runs", *args), is_async)
        self.weights = HeldWeights(
            Settings.of(self.config).weight_bytes, partial(self.answers, "midstream_set_weights")
        )
        self.sending = asyncio.Lock()
        self.sweep_turns = Turns(self.config.scheduler_config.max_num_batched_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        if is_async:
            with contextlib.suppress(RuntimeError):  # made outside of an event loop
                self._loop = asyncio.get_running_loop()
        else:
            if not launch.is_in_process(engine):
                self.receiver.when_gone = lambda _: launch.wake_waiting_callers(engine)
            run_now(self._connect())

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM`. Raises EngineClosedError if the engine is closed or dead."""
        if self._engine is None:
            raise EngineClosedError(_CLOSED)
        if self.has_died:
            raise launch.died(self._engine)
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    @property
    def is_open(self) -> bool:
        """Whether the engine is neither closed nor known to be dead."""
        return self._engine is not None and not self.has_died

    def failed(self, error: BaseException) -> None:
        """Note that the engine is dead, if `error` says so, which then names the engine's log; or that the user has interrupted it."""
        if isinstance(error, KeyboardInterrupt):
            launch.hurry(self._engine)
        if isinstance(error, EngineClosedError):
            self.has_died = True
            launch.keep_log(self._engine, error)

    def step(self) -> None:
        """One step of a `vllm.LLM`, on which only `followed` requests run."""
        for output in launch.step(self.engine):
            if (ended := self.followed.pop(output.request_id, None)) is not None:
                ended(output)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of every worker; returns a list of their answers, awaitable on an async engine."""
        return launch.ask(self.engine, method, *args)

    async def answers(self, method: str, *args: Any) -> list[Any]:
        """The answers of every worker to a call, on either kind of engine."""
        answers = self.ask(method, *args)
        return await answers if self.is_async else answers

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
        names = await self.answers("midstream_connect", self.receiver.address)
        self._senders = [name for name in names if name is not None]  # one worker of each stage sends results
        self._description = merged_description(await self.answers("midstream_describe"))

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        for stream in list(self.streams):
            stream.fail(EngineClosedError("The engine was closed while the trace ran."))
        self._engine = self.receiver = None
        self._end()

    @property
    def is_described(self) -> bool:
        """Whether the workers have described the model: from the start on a sync engine, after `start` on an async one."""
        return self._description is not None

    @property
    def description(self) -> dict[str, Any]:
        """The model's module tree, shapes and sites, from the workers."""
        if self._description is None:
            raise TraceError("With mode='async' call `await model.start()` first.")
        return self._description

    def drop_interrupted(self) -> None:
        """Have the workers forget interrupted traces. This happens at the next call, because such a trace may still block a worker."""
        if self.interrupted:
            traces, self.interrupted = self.interrupted, []
            self.ask("midstream_drop", traces)

    def mailboxes(
        self, requests: Sequence[EngineRequest], stack: ExitStack | AsyncExitStack, share: bool = False
    ) -> list[tuple[Mailbox | None, Mailbox | None]]:
        """A mailbox for the results of each request's trace, and one for its captured rows; None where nothing will come.

        At the end of `stack` the mailboxes are closed, and rows that have not been asked for are dropped.

        `share`: requests without sinks have one mailbox for their rows, which appears for each of them.
        """
        if (receiver := self.receiver) is None:
            raise EngineClosedError(_CLOSED)

        def opened(box: Mailbox) -> Mailbox:
            stack.callback(box.close)
            return box

        late = [each.rows.key for each in requests if share and each.rows is not None and not each.rows.has_sinks]
        shared = opened(receiver.expect_all(late, self._senders)) if late else None
        boxes = []
        for request in requests:
            trace, rows, row_box = request.trace, request.rows, None
            key = (trace.trace, trace.index) if trace is not None else None
            trace_box = opened(receiver.expect(key, self._senders)) if key is not None else None
            if rows is not None:
                late_rows = None if rows.has_sinks else shared
                row_box = late_rows or opened(receiver.expect(rows.key, self._senders, paced=rows.has_sinks))
                stack.callback(rows.discard)
            boxes.append((trace_box, row_box))
        return boxes

    async def send_vectors(self) -> None:
        """Send changed vectors to the workers."""
        put, gone = changes = self.vectors.take_changes()
        try:
            if gone:
                await self.answers("midstream_delete_vectors", gone)
            if put:
                data = {name: (vector.data.tobytes(), vector.digest) for name, vector in put.items()}
                await self.answers("midstream_set_vectors", data)
        except BaseException:
            self.vectors.put_back(changes)
            raise


def _end(engine: Any, receiver: Receiver, sinks: Sinks) -> None:
    receiver.close()
    if engine is not None:
        launch.shut_down(engine)
    sinks.close()


# Requests on a sync engine.


def run_requests(
    connection: EngineConnection, requests: Sequence[EngineRequest], done: Callable[[int], object]
) -> list[InvokeResult]:
    """Run requests on a `vllm.LLM` to their end. Calls from several threads run one after the other.

    `done`: called with 1 as each request ends.
    """
    with ExitStack() as stack:
        stack.enter_context(connection.lock)
        connection.drop_interrupted()
        while connection.followed:
            connection.step()
        if runs := runs_of([request.plan for request in requests]):
            run_now(connection.runs.lease(runs))
            stack.callback(_release, connection, runs)
        engine = connection.engine
        held = connection.weights.used(weights_of(requests))
        run_now(held.__aenter__())
        stack.push(lambda *error: run_now(held.__aexit__(*error)))
        boxes = connection.mailboxes(requests, stack, share=True)
        thread = _row_thread(requests, [rows for _, rows in boxes])
        if thread is not None:
            stack.callback(thread.close)

        def ended(output: Any) -> None:
            if thread is not None:
                thread.end(output.request_id, counts_of(output))

        def finished(output: Any) -> None:
            ended(output)
            done(1)

        prompts, params = [request.prompt for request in requests], [request.params for request in requests]
        try:
            outputs = launch.generate(engine, prompts, params, finished)
            for output in outputs:
                ended(output)
            if thread is not None:
                thread.wait()
            each = zip(boxes, outputs, strict=True)
            results = [collect(box, output, connection.stages) for (box, _), output in each]
        except BaseException as error:
            connection.interrupted += trace_ids(requests)
            connection.failed(error)
            raise
        for request, output in zip(requests, outputs, strict=True):
            if request.rows is not None:  # all sinks begin to take their rows before the first is waited for
                request.rows.end(counts_of(output))
        for request, result in zip(requests, results, strict=True):
            put_captures(result, request, counts_of(result.output))
            result.output.answers = graded(result.output, request.answers)
        return results


def run_continuously(
    connection: EngineConnection, requests: Iterable[EngineRequest | PlanError]
) -> Generator[tuple[int, InvokeResult]]:
    """The number and the result of each request on a `vllm.LLM`, as they end. Closing the generator aborts those that run.

    Other calls may come between two results: what runs by then ends first.

    Args:
        requests: without traces and captures, taken as there is room for them; or why there is no request, which is its result.
            The caller holds leases on the recorded runs that they read.
    """
    running: dict[str, tuple[int, EngineRequest]] = {}
    done: deque[tuple[int, InvokeResult]] = deque()
    most = _BATCHES * min(_BATCH, connection.config.scheduler_config.max_num_seqs)
    waiting, room = enumerate(requests), min(_FIRST_REQUESTS, most)

    def ended(output: Any) -> None:
        number, request = running.pop(output.request_id)
        result = InvokeResult([], output)
        put_captures(result, request, counts_of(output))
        output.answers = graded(output, request.answers)
        done.append((number, result))

    def submit(count: int) -> None:
        given = list(itertools.islice(waiting, count))
        done.extend(
            (number, InvokeResult([], None, error=each)) for number, each in given if isinstance(each, PlanError)
        )
        group = [(number, each) for number, each in given if isinstance(each, EngineRequest)]
        names = launch.submit(connection.engine, [each.prompt for _, each in group], [each.params for _, each in group])
        running.update(zip(names, group, strict=True))
        connection.followed.update(dict.fromkeys(names, ended))

    connection.drop_interrupted()
    try:
        while True:
            with connection.lock:
                submit(max(room - len(running), 0))
                room = min(room + _BATCH, most)
                if running:
                    connection.step()
            if not (running or done):
                return
            while done:
                yield done.popleft()
    except EngineClosedError as error:
        connection.failed(error)
        raise
    finally:
        with connection.lock:
            for name in running:
                connection.followed.pop(name, None)
            if running and connection.is_open:
                launch.abort(connection.engine, list(running))


def _release(connection: EngineConnection, runs: list[str]) -> None:
    with contextlib.suppress(Exception):  # a dead engine holds no leases
        run_now(connection.runs.release(runs))


def _row_thread(requests: Sequence[EngineRequest], boxes: Sequence[Mailbox | None]) -> RowThread | None:
    pairs = [(each.rows, box) for each, box in zip(requests, boxes, strict=True) if each.rows and box is not None]
    if not pairs:
        return None
    sharing = [(rows, box) for rows, box in pairs if not rows.has_sinks]
    followed = [(rows, box) for rows, box in pairs if rows.has_sinks]
    return RowThread([rows for rows, _ in sharing], sharing[0][1] if sharing else None, followed)


def collect(box: Mailbox | None, output: Any, stages: int) -> InvokeResult:
    """The result of a request, once every pipeline stage has sent its part of every sample."""
    samples = len(output.outputs)
    try:
        messages = [box.get(RESULT_SECONDS) for _ in range(stages * samples)] if box is not None else []
    except ChannelClosedError as error:
        raise results_lost(error) from error
    return traced_result(merge_stages(messages, samples), output)


# Results, on either kind of engine.


def graded(output: Any, answers: Answers) -> dict[str | int, float] | None:
    """The answers' log-probabilities, in nats; None if the output has no first token."""
    if not answers:
        return {}
    if not (logprobs := output.outputs[0].logprobs):
        return None
    return {answer: logprobs[0][token].logprob for answer, token in answers.items()}


def counts_of(output: Any) -> list[int]:
    """The number of tokens of each sample."""
    return [len(sample.token_ids) for sample in output.outputs]


def put_captures(result: InvokeResult, request: EngineRequest, counts: Sequence[int]) -> None:
    """Put the captures of a request that has ended on its output, or the error on its result. All its rows have come.

    Args:
        counts: the number of tokens of each sample.
    """
    output, rows, result.plan = result.output, request.rows, request.plan
    output.captures = None
    if rows is not None:
        rows.end(counts)
    outcomes: list[Outcome] = []  # of a trace without code in the engine; none of them has `tracer.result`
    try:
        _raise_if_refused(output)
        captures: Any = Captured(output.request_id)
        if rows is not None and rows.here is not None:
            outcomes = [rows.outcome(*counts)]
        elif rows is not None:
            captures = rows.result(counts)
        elif request.ending is not None:
            outcomes = [request.ending(captures, count) for count in counts]
    except MidstreamError as error:
        result.error = error
        return
    output.captures = captures
    if outcomes:
        result.outcomes = outcomes
        output.saves = sample_saves([[outcome] for outcome in outcomes])


def _raise_if_refused(output: Any) -> None:
    """Raise PlanError or NotFiniteError if the engine ended the request because of its plan or trace."""
    for sample in output.outputs:
        if sample.finish_reason == "error" and isinstance(sample.stop_reason, str):
            raise (NotFiniteError if sample.stop_reason.startswith(NOT_FINITE) else PlanError)(sample.stop_reason)


def results_lost(error: ChannelClosedError) -> MidstreamError:
    return EngineClosedError(f"The engine has gone before a trace's results came: {error}")


def merge_stages(messages: Iterable[tuple[dict[str, Any], list[Outcome]]], samples: int) -> list[list[Outcome]]:
    """The outcomes of each of a request's samples, merged from the messages of the pipeline stages."""
    each: dict[int, dict[int, list[Outcome]]] = {}
    for header, outcomes in messages:
        if isinstance(outcomes, UnsendableError):
            raise TraceError(f"The saved values of the trace could not be sent: {outcomes}.")
        each.setdefault(sample_index(header["request"], samples), {})[header["stage"]] = outcomes
    return [merged_outcomes([of_stage for _, of_stage in sorted(each[sample].items())]) for sample in sorted(each)]


def traced_result(samples: Sequence[list[Outcome]], output: Any) -> InvokeResult:
    """The result of a traced request, with the saved values on its output."""
    error = put_results((outcome for sample in samples for outcome in sample), output)
    output.saves = sample_saves(samples)
    for outcomes_of_sample, sample in zip(samples, output.outputs, strict=False):
        if any(outcome.stopped for outcome in outcomes_of_sample) and sample.finish_reason == "length":
            sample.finish_reason, sample.stop_reason = "stop", STOPPED  # the engine has ended it by max_tokens
    # Of the edits' outcomes only errors are needed from here on.
    outcomes = [o for own, *edits in samples for o in (own, *(edit for edit in edits if edit.failure is not None))]
    return InvokeResult(outcomes, output, error=error)
