"""Requests on a vLLM engine: their outputs, with saved values, captures and answers on them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any

from midstream.capture.rows import Captured
from midstream.engine import launch
from midstream.errors import (
    NOT_FINITE,
    CaptureError,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NotFiniteError,
    PlanError,
    TraceError,
    UnsendableError,
)
from midstream.plan.probes import Scores, chunks_of, rows_end, stopping
from midstream.ranks.merge import merged_outcomes
from midstream.requests.arguments import Answers, MissingSpace
from midstream.requests.invokes import InvokeResult, Item, OutputStream, put_results, sample_saves
from midstream.runtime.request import sample_index
from midstream.trace.code import STOPPED, Outcome
from midstream.transport.messages import ResultHeader
from midstream.transport.receiver import Mailbox
from midstream.vllm.engine import EngineConnection, EngineRequest

_SINK_THREADS = 1024  # the number of requests that can wait for their sinks at a time
_LONG_SECONDS = 0.002  # if reading saved values takes longer, the next reading runs on another thread
_NO_SCORES = Scores()
# The number of a request, its output, and its result if it has finished; or an error.
_Queued = Item | BaseException
RESULT_SECONDS = 120.0  # how long to wait for the next result of requests that have ended
_StageMessage = tuple[ResultHeader, list[Outcome]]  # the outcomes have the number of the step


class EngineStream(OutputStream):
    """The outputs of requests on a vLLM engine.

    Args:
        prepare: returns the requests. It is called when the engine has started.
    """

    def __init__(self, connection: EngineConnection, prepare: Callable[[], list[EngineRequest]]) -> None:
        super().__init__()
        self._connection = connection
        self._prepare = prepare
        self._queue: asyncio.Queue[_Queued] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._waiting: asyncio.Task[Any] | None = None  # the task that waits for the output of a single request

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the task that iterates over the outputs. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._queue.put_nowait(error)
        if self._waiting is not None:
            self._waiting.cancel()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncIterator[Item]]:
        connection = self._connection
        await connection.start()
        self._loop = asyncio.get_running_loop()
        requests = self._prepare()
        async with AsyncExitStack() as stack:
            boxes = await stack.enter_async_context(connection.ready(requests))
            each = [RunningRequest(request, *both, connection) for request, both in zip(requests, boxes, strict=True)]
            connection.streams.add(self)
            stack.callback(connection.streams.discard, self)
            if self.wants_last:
                for request in each:
                    request.skip_to_the_last()
            stack.push_async_callback(self._drop, requests, each)
            items = self._single(each[0]) if len(each) == 1 else self._merged(each)
            yield await stack.enter_async_context(contextlib.aclosing(items))

    async def _drop(self, requests: Sequence[EngineRequest], each: Sequence[RunningRequest]) -> None:
        if not all(request.is_finished for request in each):
            await self._connection.drop(requests)

    async def _single(self, request: RunningRequest) -> AsyncGenerator[Item]:
        """The outputs of one request, without a task and a queue: these would cost time at each token."""
        try:
            async with request.submitted() as stream:
                while self._error is None:
                    self._waiting = asyncio.current_task()
                    output = await anext(stream, None)
                    self._waiting = None
                    if output is None:
                        return
                    yield 0, output, None if request.passes(output) else await request.take(output)
        except asyncio.CancelledError:
            if self._error is None:
                raise
            typing.cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
        except Exception as error:
            self._connection.note_failure(error)
            raise
        raise self._error

    async def _merged(self, each: Sequence[RunningRequest]) -> AsyncGenerator[Item]:
        """The outputs of several requests as they come."""
        tasks = [asyncio.create_task(self._follow(index, request)) for index, request in enumerate(each)]
        running = len(tasks)
        try:
            while running:
                item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                running -= item[2] is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()  # vLLM aborts a request whose consumer is cancelled
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, request: RunningRequest) -> None:
        """Run one request, and queue its outputs or its error."""
        try:
            async with request.submitted() as stream:
                async for output in stream:
                    result = None if request.passes(output) else await request.take(output)
                    self._queue.put_nowait((index, output, result))
        except Exception as error:
            self._connection.note_failure(error)
            self._queue.put_nowait(error)


class RunningRequest:
    """One running request.

    Attributes:
        is_finished: whether its last output has been taken.
    """

    def __init__(
        self, request: EngineRequest, saves: Mailbox | None, rows: Mailbox | None, connection: EngineConnection
    ) -> None:
        self._request, self._row_box, self._connection = request, rows, connection
        self._samples: int = request.params.n
        self._has_saves, self._saves = saves is not None, _StageSaves(saves, self._samples, connection.stages)
        self._generated = [0] * self._samples
        self._seen: dict[int, Any] = {}  # the last output of each sample
        self._answers: dict[str | int, float] | None = None
        self._missing: Sequence[MissingSpace] = ()
        self._following: asyncio.Future[None] | None = None  # takes captured rows as they arrive
        self.is_finished = False
        self._probes = request.plan.plan.probes if request.plan is not None else ()
        watched = {probe.name for probe in connection.watched}
        self._own_probes = [probe for probe in self._probes if probe.name not in watched]
        self._watched = watched if len(self._own_probes) < len(self._probes) else set()
        self._noted = [0] * self._samples  # of each sample's chunks of scores
        is_cumulative = request.params.output_kind.name != "DELTA"
        self._is_plain = (
            is_cumulative
            and saves is None
            and request.rows is None
            and not (request.answers or self._probes)
            and self._samples == 1
        )

    def skip_to_the_last(self) -> None:
        """Have vLLM return only the last output, unless earlier outputs come with captured rows or saved values."""
        params = self._request.params
        if self._request.rows is None and not self._has_saves and params.output_kind.name == "CUMULATIVE":
            params.output_kind = type(params.output_kind).FINAL_ONLY

    @contextlib.asynccontextmanager
    async def submitted(self) -> AsyncIterator[AsyncGenerator[Any]]:
        """A block in which the request runs on the engine. Yields vLLM's outputs. Leaving the block early aborts the request."""
        with launch.translated_errors(self._connection.engine):
            stream = self._connection.generate(self._request)
            async with self.followed(stream):
                yield stream

    async def outputs(self, stream: AsyncGenerator[Any]) -> AsyncGenerator[tuple[Any, InvokeResult | None]]:
        """The outputs of vLLM's stream, with saves, captures and answers on them. The last one comes with the result."""
        async with self.followed(stream):
            async for output in stream:
                yield output, None if self.passes(output) else await self.take(output)

    @contextlib.asynccontextmanager
    async def followed(self, stream: AsyncGenerator[Any]) -> AsyncIterator[None]:
        """A block in which the caller iterates over vLLM's stream while captured rows are received. Closes the stream at its end."""
        async with contextlib.aclosing(stream):
            if self._request.rows is None or self._row_box is None:
                yield
                return
            self._following = self._connection.follow(self._request.rows, self._row_box, _pool())
            try:
                yield
            finally:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)

    def passes(self, output: Any) -> bool:
        """Whether `output` needs no `take`: it is not the last, and the request has no saves, captures and answers."""
        if output.finished or not self._is_plain:
            return False
        output.saves, output.captures, output.answers, output.scores = {}, None, {}, _NO_SCORES
        return True

    async def take(self, output: Any) -> InvokeResult | None:
        """Put saves, captures and answers on an output. Returns the result with the last output, else None."""
        self._seen.update((sample.index, sample) for sample in output.outputs)
        self._count(output)
        if self._watched:
            self._note_scores(output)
        if output.finished and len(self._seen) == self._samples > 1:  # vLLM streams samples one by one
            output.outputs = [self._seen[i] for i in range(self._samples)]
        if self._answers is None:  # from the first output with a token: vLLM may stream each token once
            self._answers, self._missing = graded(output, self._request.answers)
        output.answers = self._answers
        output.scores = self._scores()
        if not output.finished:
            output.saves, output.captures = await self._saves.latest(), None
            return None
        result = traced_result(await self._saves.final(), output)
        result.missing = self._missing
        await self._put_captures(result)
        self.is_finished = True
        return result

    def _scores(self) -> Scores | list[Scores]:
        """The scores that have come; those of each sample, if there are several."""
        if not self._own_probes:
            return _NO_SCORES
        seen = [self._seen.get(i) for i in range(self._samples)]
        each = [Scores(self._own_probes, chunks_of(sample) if sample is not None else ()) for sample in seen]
        return each[0] if self._samples == 1 else each

    def _note_scores(self, output: Any) -> None:
        """Hand the new scores of the operator's probes to `note_scores`, with the name of the probe that has ended a sample, if any."""
        for sample in output.outputs:
            chunks, first = chunks_of(sample), self._noted[sample.index]
            self._noted[sample.index] = len(chunks)
            new = [chunk for chunk in chunks[first:] if chunk[0] in self._watched]
            by = stopping([probe for probe in self._probes if probe.name in self._watched], sample.stop_reason)
            self._connection.note_scores(new, by if sample.finish_reason is not None else None)

    def _count(self, output: Any) -> None:
        """Count the tokens of each sample. Their rows are final."""
        is_delta = self._request.params.output_kind.name == "DELTA"
        for sample in output.outputs:
            before = self._generated[sample.index] if is_delta else 0
            self._generated[sample.index] = before + len(sample.token_ids)
        if self._request.rows is not None and self._samples == 1 and self._generated[0]:
            self._request.rows.stop = len(self._request.prompt["prompt_token_ids"]) + self._generated[0] - 1

    def _row_counts(self) -> list[int]:
        """How many tokens of each sample count for the end of its rows. The last counted token has no row.

        In a sample that a probe has ended, the last counted token is the one after the last token that the probe scored.
        """
        if not self._probes:
            return self._generated
        before = len(self._request.prompt["prompt_token_ids"]) - 1  # the last token has no row
        return [
            rows_end(self._probes, self._seen[i], chunks_of(self._seen[i]), before + count) - before
            for i, count in enumerate(self._generated)
        ]

    async def _put_captures(self, result: InvokeResult) -> None:
        rows, following = self._request.rows, self._following
        if rows is None or following is None:
            return put_captures(result, self._request, self._row_counts())
        while not following.done():
            done, _ = await asyncio.wait([following], timeout=RESULT_SECONDS)
            if not done and not rows.has_progressed():
                raise CaptureError(f"the rows of a request that has ended have not come for {RESULT_SECONDS:g} s")
        following.result()
        counts = self._row_counts()
        put = partial(put_captures, result, self._request, counts)
        loop = asyncio.get_running_loop()
        # Sinks and a trace's code may take long, and the event loop serves other requests.
        if rows.has_sinks:
            await loop.run_in_executor(_pool(), rows.end, counts)
            await rows.delivered()
        if self._connection.is_async and rows.trace_ending is not None:
            await loop.run_in_executor(_pool(), put)
        else:
            put()


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for sinks in place of the event loop: one for each request, so that requests do not wait for each other."""
    return ThreadPoolExecutor(_SINK_THREADS, "midstream-waits")


class _StageSaves:
    """The saved values of one request. Each pipeline stage sends snapshots of each sample, and then the final values."""

    def __init__(self, box: Mailbox | None, samples: int, stages: int) -> None:
        self._box = box
        self._samples, self._stages = samples, stages
        self._took = 0.0  # seconds of the last reading
        # By sample and stage, in the order of the steps. Messages from before the last complete step are dropped.
        self._received: dict[int, dict[int, list[_StageMessage]]] = {}

    async def latest(self) -> Any:
        """The saved values after the last step for which all stages' snapshots have arrived."""
        began = time.monotonic()
        if self._took < _LONG_SECONDS:
            found = self._read_latest()
        else:  # a trace that saves at every step has thousands of tensors after a while, and each snapshot lists them all
            found = await asyncio.get_running_loop().run_in_executor(None, self._read_latest)
        self._took = time.monotonic() - began
        return found

    def _read_latest(self) -> Any:
        with contextlib.suppress(ChannelClosedError):  # the engine's own error is more precise
            while self._box is not None and (message := self._box.get_nowait()) is not None:
                self._keep(message)
        return sample_saves(merge_stages(self._at_one_step(), self._samples))

    async def final(self) -> list[list[Outcome]]:
        if self._box is None:
            return []
        while sum(each[-1][0].final for each in self._each()) < self._samples * self._stages:
            try:
                self._keep(await asyncio.wait_for(self._box.aget(), RESULT_SECONDS))
            except ChannelClosedError as error:
                raise EngineClosedError(f"The engine has gone before a trace's results came: {error}") from error
        return merge_stages([each[-1] for each in self._each()], self._samples)

    def _each(self) -> list[list[_StageMessage]]:
        return [each for stages in self._received.values() for each in stages.values()]

    def _at_one_step(self) -> list[_StageMessage]:
        """For each sample, the messages of the last step that all stages have reported. Leaves out samples without such a step."""
        found = []
        for stages in self._received.values():
            if len(stages) == self._stages:
                step = min((each[-1][1][0].steps for each in stages.values() if not each[-1][0].final), default=None)
                for each in stages.values():
                    while step is not None and len(each) > 1 and each[1][1][0].steps <= step:
                        del each[0]
                    found.append(each[0] if step is not None else each[-1])
        return found

    def _keep(self, message: _StageMessage) -> None:
        header = message[0]
        stages = self._received.setdefault(sample_index(header.request, self._samples), {})
        stages.setdefault(header.stage, []).append(message)


# Results.


def graded(output: Any, answers: Answers) -> tuple[dict[str | int, float] | None, Sequence[MissingSpace]]:
    """The log-probability of each answer, and the answers that most likely lack the space before them (`Answers.graded`).

    None in place of the log-probabilities if the output has no first token.
    """
    if not answers:
        return {}, ()
    if not (logprobs := output.outputs[0].logprobs):
        return None, ()
    return answers.graded(lambda token: logprobs[0][token].logprob)


def put_captures(result: InvokeResult, request: EngineRequest, counts: Sequence[int]) -> None:
    """Put the captures of an ended request on its output, or the error on its result. Call it when all its rows have come.

    Args:
        counts: the number of tokens of each sample.
    """
    output, rows, result.plan = result.output, request.rows, request.plan
    output.captures = None
    if rows is not None:
        rows.end(counts)
    outcomes: list[Outcome] = []  # of a trace whose code did not run on the engine; they never hold `tracer.result`
    try:
        for sample in output.outputs:
            if sample.finish_reason == "error" and isinstance(sample.stop_reason, str):  # a plan or trace was refused
                raise (NotFiniteError if sample.stop_reason.startswith(NOT_FINITE) else PlanError)(sample.stop_reason)
        captures: Any = Captured(output.request_id)
        if rows is not None and rows.trace_ending is not None:
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


def merge_stages(messages: Iterable[_StageMessage], samples: int) -> list[list[Outcome]]:
    """The outcomes of each of a request's samples, merged from the messages of the pipeline stages."""
    each: dict[int, dict[int, list[Outcome]]] = {}
    for header, outcomes in messages:
        if isinstance(outcomes, UnsendableError):
            raise TraceError(f"The saved values of the trace could not be sent: {outcomes}.")
        each.setdefault(sample_index(header.request, samples), {})[header.stage] = outcomes
    samples_of_stages = [[of_stage for _, of_stage in sorted(each[sample].items())] for sample in sorted(each)]
    return [stages[0] if len(stages) == 1 else merged_outcomes(stages) for stages in samples_of_stages]


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
