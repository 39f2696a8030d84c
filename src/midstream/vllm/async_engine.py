"""Requests on an async vLLM engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any

from midstream.engine import launch
from midstream.errors import ChannelClosedError
from midstream.requests.invokes import InvokeResult, runs_of, sample_saves
from midstream.requests.streams import Item, OutputStream
from midstream.requests.vectors_and_runs import Runs
from midstream.trace.program import Outcome
from midstream.transport.receiver import Mailbox
from midstream.transport.wire import Header
from midstream.vllm.captures import RESULT_SECONDS, rows_missing, sample_index
from midstream.vllm.engine import (
    EngineConnection,
    EngineRequest,
    graded,
    merge_stages,
    put_captures,
    results_lost,
    trace_ids,
    traced_result,
    weights_of,
)

_SINK_THREADS = 1024  # how many requests can wait for their sinks at a time
_LONG_SECONDS = 0.002  # a reading that takes longer is done on another thread the next time
_DROP_SECONDS = 10.0  # a trace that is being abandoned may block a worker
# The number of a request, its output, and its result if it has finished; or an error.
_Queued = Item | BaseException
_StageMessage = tuple[Header, list[Outcome]]


class EngineStream(OutputStream):
    """The outputs of requests on an `AsyncLLM`.

    Args:
        prepare: returns the requests; called when the engine has started.
        ended: called with 1 as each request ends.
    """

    def __init__(
        self,
        connection: EngineConnection,
        prepare: Callable[[], list[EngineRequest]],
        ended: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(ended)
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
            each = await stack.enter_async_context(submitted(connection, requests))
            connection.streams.add(self)
            stack.callback(connection.streams.discard, self)
            if self.wants_last:
                for request in each:
                    request.skip_to_the_last()
            stack.push_async_callback(self._drop, requests, each)
            items = self._single(each[0]) if len(each) == 1 else self._merged(each)
            yield await stack.enter_async_context(contextlib.aclosing(items))

    async def _drop(self, requests: Sequence[EngineRequest], each: Sequence[AsyncRequest]) -> None:
        """Have the workers forget the traces of requests that did not come to their end."""
        unfinished = not all(request.is_finished for request in each)
        if unfinished and (traces := trace_ids(requests)) and self._connection.is_open:
            drop = self._connection.ask("midstream_drop", traces)
            with contextlib.suppress(Exception):  # a dead engine has dropped them
                await asyncio.wait_for(drop, _DROP_SECONDS)

    async def _single(self, request: AsyncRequest) -> AsyncGenerator[Item]:
        """The outputs of one request, without a task and a queue, which cost each token something too."""
        try:
            async with request.on(self._connection.engine) as stream:
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
            self._connection.failed(error)
            raise
        raise self._error

    async def _merged(self, each: Sequence[AsyncRequest]) -> AsyncGenerator[Item]:
        """The outputs of several requests as they come."""
        tasks = [asyncio.create_task(self._follow(index, request)) for index, request in enumerate(each)]
        left = len(tasks)
        try:
            while left:
                item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item[2] is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()  # vLLM aborts a request whose consumer is cancelled
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, request: AsyncRequest) -> None:
        """Run one request, and queue its outputs or its error."""
        try:
            async with request.on(self._connection.engine) as stream:
                async for output in stream:
                    result = None if request.passes(output) else await request.take(output)
                    self._queue.put_nowait((index, output, result))
        except Exception as error:
            self._connection.failed(error)
            self._queue.put_nowait(error)


@contextlib.asynccontextmanager
async def submitted(
    connection: EngineConnection, requests: Sequence[EngineRequest]
) -> AsyncIterator[list[AsyncRequest]]:
    """Requests that may run in the block: the workers have the vectors and keep the runs that they need, and mailboxes are open.

    Raises PlanError if a run that they need is gone.
    """
    async with AsyncExitStack() as stack:
        async with connection.sending:
            await connection.send_vectors()
        if runs := runs_of([request.plan for request in requests]):
            lease = asyncio.ensure_future(connection.runs.lease(runs))
            stack.push_async_callback(_released, connection.runs, runs, lease)
            await asyncio.shield(lease)
        await stack.enter_async_context(connection.weights.used(weights_of(requests)))
        boxes = connection.mailboxes(requests, stack)
        yield [AsyncRequest(request, *both, connection.stages) for request, both in zip(requests, boxes, strict=True)]


_releasing: set[asyncio.Task[None]] = set()


async def _released(runs: Runs, ids: list[str], lease: Awaitable[Any]) -> None:
    """Release leases in a task of its own: a server cancels a request's task again at each of its awaits."""
    task = asyncio.create_task(_release(runs, ids, lease))
    _releasing.add(task)  # asyncio holds its tasks weakly
    task.add_done_callback(_releasing.discard)
    await asyncio.shield(task)


async def _release(runs: Runs, ids: list[str], lease: Awaitable[Any]) -> None:
    """Release leases once `lease` is done: the task that waited for it may have been cancelled."""
    with contextlib.suppress(Exception):  # a lease that failed has nothing to release, and a dead engine holds none
        await lease
        await runs.release(ids)


class AsyncRequest:
    """One running request.

    Attributes:
        is_finished: whether its last output has been taken.
    """

    def __init__(self, request: EngineRequest, saves: Mailbox | None, rows: Mailbox | None, stages: int) -> None:
        self._request, self._row_box = request, rows
        self._samples: int = request.params.n
        self._has_saves, self._saves = saves is not None, _Saves(saves, self._samples, stages)
        self._generated = [0] * self._samples
        self._seen: dict[int, Any] = {}  # the last output of each sample
        self._answers: dict[str | int, float] | None = None
        self._following: asyncio.Task[None] | None = None  # takes captured rows as they arrive
        self.is_finished = False
        is_cumulative = request.params.output_kind.name != "DELTA"
        self._is_plain = (
            is_cumulative and saves is None and request.rows is None and not request.answers and self._samples == 1
        )

    def skip_to_the_last(self) -> None:
        """Have vLLM give the last output alone, if nothing else comes with those before: rows, or values that are saved so far."""
        params = self._request.params
        if self._request.rows is None and not self._has_saves and params.output_kind.name == "CUMULATIVE":
            params.output_kind = type(params.output_kind).FINAL_ONLY

    @contextlib.asynccontextmanager
    async def on(self, engine: Any) -> AsyncIterator[AsyncGenerator[Any]]:
        """Run on an `AsyncLLM` in the block, which gets vLLM's outputs. Leaving it early aborts the request."""
        with launch.own_errors(engine):
            stream = engine.generate(self._request.prompt, self._request.params, secrets.token_hex(8))
            async with self.followed(stream):
                yield stream

    async def outputs(self, stream: AsyncGenerator[Any]) -> AsyncGenerator[tuple[Any, InvokeResult | None]]:
        """The outputs of a stream of vLLM's, with saves, captures and answers on them, and with the last one the result."""
        async with self.followed(stream):
            async for output in stream:
                yield output, None if self.passes(output) else await self.take(output)

    @contextlib.asynccontextmanager
    async def followed(self, stream: AsyncGenerator[Any]) -> AsyncIterator[None]:
        """A block that iterates over a stream of vLLM's, whose captured rows are taken meanwhile. Closes the stream."""
        async with contextlib.aclosing(stream):
            if self._request.rows is None or self._row_box is None:
                yield
                return
            self._following = asyncio.create_task(self._request.rows.follow(self._row_box, _pool()))
            try:
                yield
            finally:
                self._following.cancel()
                await asyncio.gather(self._following, return_exceptions=True)

    def passes(self, output: Any) -> bool:
        """Whether an output before the last has nothing of midstream's. It gets the attributes all the same."""
        if output.finished or not self._is_plain:
            return False
        output.saves, output.captures, output.answers = {}, None, {}
        return True

    async def take(self, output: Any) -> InvokeResult | None:
        """Put what belongs to an output on it. Returns the result with the last one."""
        self._seen.update((sample.index, sample) for sample in output.outputs)
        self._count(output)
        if output.finished and len(self._seen) == self._samples > 1:  # vLLM streams samples one by one
            output.outputs = [self._seen[i] for i in range(self._samples)]
        if self._answers is None:  # from the first output with a token: vLLM may stream each token once
            self._answers = graded(output, self._request.answers)
        output.answers = self._answers
        if not output.finished:
            output.saves, output.captures = await self._saves.latest(), None
            return None
        result = traced_result(await self._saves.final(), output)
        await self._put_captures(result)
        self.is_finished = True
        return result

    def _count(self, output: Any) -> None:
        """Count the tokens of each sample: their rows are the user's."""
        is_delta = self._request.params.output_kind.name == "DELTA"
        for sample in output.outputs:
            before = self._generated[sample.index] if is_delta else 0
            self._generated[sample.index] = before + len(sample.token_ids)
        if self._request.rows is not None and self._samples == 1:
            self._request.rows.stop = len(self._request.prompt["prompt_token_ids"]) + self._generated[0] - 1

    async def _put_captures(self, result: InvokeResult) -> None:
        rows, following = self._request.rows, self._following
        if rows is None or following is None:
            return put_captures(result, self._request, self._generated)
        while not (await asyncio.wait([following], timeout=RESULT_SECONDS))[0]:
            if not rows.has_progressed():
                raise rows_missing()
        following.result()
        put = partial(put_captures, result, self._request, self._generated)
        if rows.has_sinks or rows.here is not None:  # sinks and a trace's code may take long
            await asyncio.get_running_loop().run_in_executor(_pool(), put)
        else:
            put()


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for sinks in place of the event loop: one for each request, so that none waits for another's sink."""
    return ThreadPoolExecutor(_SINK_THREADS, "midstream-waits")


class _Saves:
    """The saved values of one request, as its pipeline stages send them: snapshots of each sample, then the final values."""

    def __init__(self, box: Mailbox | None, samples: int, stages: int) -> None:
        self._box = box
        self._samples, self._stages = samples, stages
        self._took = 0.0  # the last reading, in seconds
        # By sample and stage, in the order of the steps. Messages about steps before the last complete one are dropped.
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
                raise results_lost(error) from error
        return merge_stages([each[-1] for each in self._each()], self._samples)

    def _each(self) -> list[list[_StageMessage]]:
        return [each for stages in self._received.values() for each in stages.values()]

    def _at_one_step(self) -> list[_StageMessage]:
        """The latest messages of all stages about one step, for the samples for which every stage has sent a message."""
        found = []
        for stages in self._received.values():
            if len(stages) == self._stages:
                step = min((_step(each[-1]) for each in stages.values() if not each[-1][0].final), default=None)
                for each in stages.values():
                    while step is not None and len(each) > 1 and _step(each[1]) <= step:
                        del each[0]
                    found.append(each[0] if step is not None else each[-1])
        return found

    def _keep(self, message: _StageMessage) -> None:
        header = message[0]
        stages = self._received.setdefault(sample_index(header.request, self._samples), {})
        stages.setdefault(header.stage, []).append(message)


def _step(message: _StageMessage) -> int:
    return message[1][0].steps
