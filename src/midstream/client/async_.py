"""The requests of one trace, or of one `generate`, on an async engine:

async for output in tracer.backend:      # vLLM's outputs of all invokes, as they come
    output.saves                         # what has been saved so far; all of it once output.finished
outputs = await tracer.backend           # or only the final ones, in the order of the invokes
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from midstream.client.answers import Answer, graded
from midstream.client.capturing import RESULT_SECONDS, Capturing, sample_index
from midstream.client.submission import Message, Requests, merged, put_capture, ran, results_lost, saves_of
from midstream.client.tracer import Ran, raise_failures
from midstream.engine import launch
from midstream.errors import ChannelClosedError, EngineClosedError, TraceError
from midstream.trace.program import Outcome
from midstream.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from midstream.client.vllm import VLLM

_MOST_WAITING = 1024  # requests that wait for their sinks at a time; a thread each

_DROP_SECONDS = 10.0  # a worker may be held up by the trace that is being left
_Item = tuple[int, Any, Ran | None] | BaseException


class Stream(Awaitable[list[Any]]):
    """Requests for an `AsyncLLM`: iterate over the outputs, or await the final ones. Nothing is submitted before that.

    A body's error, or a plan's, is raised when all requests have finished, instead of that request's final output; several as
    a group. Leaving the loop early, or cancelling its task, aborts what has not finished.

    Args:
        prepare: gives the requests; called when the engine has started.

    Attributes:
        outputs: the final outputs in the order of the invokes, once all have finished.
        when_over: called then with all that they gave.
    """

    def __init__(self, model: VLLM, prepare: Callable[[], Requests]) -> None:
        self.outputs: list[Any] = []
        self.ran: list[Ran] = []
        self.when_over: Callable[[list[Ran]], None] = lambda _: None
        self._model = model
        self._prepare = prepare
        self.requests: Requests | None = None
        self._items: asyncio.Queue[_Item] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._to_the_end().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._items is not None:
            raise TraceError("The outputs of a trace come by once; the final ones are in `outputs`.")
        self._items = asyncio.Queue()
        return self._iterate(self._items)

    def fail(self, error: BaseException) -> None:
        """Raise `error` where the outputs are waited for. From any thread."""
        if self._items is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, error)

    async def _to_the_end(self) -> list[Any]:
        async for _ in self:
            pass
        return self.outputs

    async def _iterate(self, items: asyncio.Queue[_Item]) -> AsyncIterator[Any]:
        await self._model.start()
        self._loop = asyncio.get_running_loop()
        requests = self.requests = self._prepare()
        done: dict[int, Ran] = {}
        async with AsyncExitStack() as stack:
            await self._model.send_vectors()
            if requests.runs:
                lease = asyncio.ensure_future(self._model.runs.lease(requests.runs, 1))
                stack.push_async_callback(self._model.release_runs_later, requests.runs, lease)
                await asyncio.shield(lease)
            tasks = self._submit(requests, items, stack)
            stack.push_async_callback(self._leave, requests, tasks, done)
            while len(done) < len(tasks):
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                index, output, result = item
                if result is not None:
                    done[index] = result
                    if result.error is not None or any(outcome.failure is not None for outcome in result.outcomes):
                        continue
                yield output
        self.ran = [done[index] for index in range(len(tasks))]
        self.outputs[:] = [result.output for result in self.ran]
        raise_failures(self.ran)
        self.when_over(self.ran)

    def _submit(
        self, requests: Requests, items: asyncio.Queue[_Item], stack: AsyncExitStack
    ) -> list[asyncio.Task[None]]:
        boxes = self._model.expect(requests)
        for closed in [*filter(None, boxes)]:
            stack.callback(closed.close)
        for capturing in filter(None, requests.capturing):
            stack.callback(capturing.discard)
        self._model.streams.add(self)
        stack.callback(self._model.streams.discard, self)
        count = len(requests.prompts)
        request = [_Request(requests, i, boxes[i], boxes[count + i], self._model.stages) for i in range(count)]
        return [asyncio.create_task(self._follow(each, items)) for each in request]

    async def _leave(self, requests: Requests, tasks: list[asyncio.Task[None]], done: dict[int, Ran]) -> None:
        for task in tasks:
            task.cancel()  # vLLM aborts a request whose consumer is cancelled
        await asyncio.gather(*tasks, return_exceptions=True)
        if len(done) < len(tasks) and requests.trace_ids and self._model.is_open:
            drop = launch.ask(self._model.engine, "midstream_drop", requests.trace_ids)
            with contextlib.suppress(Exception):  # a dead engine has dropped them as well
                await asyncio.wait_for(drop, _DROP_SECONDS)

    async def _follow(self, request: _Request, items: asyncio.Queue[_Item]) -> None:
        """Hand on one request's outputs, with the saves and the captures on them."""
        try:
            async with request.rows_followed():
                async for output in request.outputs(self._model.engine):
                    output.answers = request.graded(output)
                    if not output.finished:
                        output.saves, output.captures = request.saves.latest(), None
                        items.put_nowait((request.index, output, None))
                        continue
                    done = ran(await request.saves.final(), output)
                    await request.put_capture(done)
                    items.put_nowait((request.index, output, done))
        except Exception as error:
            self._model.has_died |= isinstance(error, EngineClosedError)
            items.put_nowait(error)


class _Request:
    """One of the requests, on its way."""

    def __init__(
        self, requests: Requests, index: int, saves: Mailbox | None, rows: Mailbox | None, stages: int
    ) -> None:
        self.index = index
        self.saves = _Saves(saves, requests.params[index].n, stages)
        self._prompt, self._params = requests.prompts[index], requests.params[index]
        self._capturing: Capturing | None = requests.capturing[index]
        self._planned = requests.planned[index]
        self._answers = requests.answers[index]
        self._graded: dict[Answer, float] | None = None
        self._rows = rows
        self._following: asyncio.Task[None] | None = None
        self._generated = [0] * self._params.n

    def graded(self, output: Any) -> dict[Answer, float] | None:
        """The answers' log-probabilities, from the first output with a token on: vLLM may hand on each token once."""
        if self._graded is None:
            self._graded = graded(output, self._answers)
        return self._graded

    async def outputs(self, engine: Any) -> AsyncIterator[Any]:
        """vLLM's outputs; the last one has all samples."""
        samples: dict[int, Any] = {}
        outputs = launch.stream(engine, self._prompt, self._params, secrets.token_hex(8))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                samples.update((sample.index, sample) for sample in output.outputs)
                self._count(output)
                if output.finished and self._params.n > 1 and len(samples) == self._params.n:
                    output.outputs = [samples[i] for i in range(self._params.n)]  # vLLM streams them one by one
                yield output

    def _count(self, output: Any) -> None:
        """How many tokens each sample has by now; rows below them are the user's."""
        is_delta = self._params.output_kind.name == "DELTA"
        for sample in output.outputs:
            before = self._generated[sample.index] if is_delta else 0
            self._generated[sample.index] = before + len(sample.token_ids)
        if self._capturing is not None and len(self._generated) == 1:
            self._capturing.stop = len(self._prompt["prompt_token_ids"]) + self._generated[0] - 1

    @contextlib.asynccontextmanager
    async def rows_followed(self) -> AsyncIterator[None]:
        """Captured rows are taken as they come."""
        if self._capturing is None or self._rows is None:
            yield
            return
        self._following = asyncio.create_task(self._capturing.follow(self._rows, _pool()))
        try:
            yield
        finally:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def put_capture(self, done: Ran) -> None:
        capturing, following = self._capturing, self._following
        if capturing is None or following is None:
            return put_capture(done, None, self._planned, self._generated)
        while not (await asyncio.wait([following], timeout=RESULT_SECONDS))[0]:
            capturing.raise_if_stuck()
        following.result()

        def end() -> None:
            capturing.end(self._generated)
            put_capture(done, capturing, self._planned, self._generated, patient=capturing.collected is not None)

        if capturing.has_sinks:
            await asyncio.get_running_loop().run_in_executor(_pool(), end)
        else:
            end()


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for sinks, so that nobody's event loop has to. Made as needed: a request never waits for another's sink."""
    return ThreadPoolExecutor(_MOST_WAITING, "midstream-waits")


class _Saves:
    """What the pipeline stages send of one request: snapshots, and then the final values, of each of its samples."""

    def __init__(self, box: Mailbox | None, samples: int, stages: int) -> None:
        self._box = box
        self._samples, self._stages = samples, stages
        # By sample and stage, in the order of the steps; what comes before the latest that all stages have sent is dropped.
        self._came: dict[int, dict[int, list[Message]]] = {}

    def latest(self) -> Any:
        """The saves as of the last step of which all stages' snapshots have arrived."""
        with contextlib.suppress(ChannelClosedError):  # the engine's own error says more
            while self._box is not None and (message := self._box.get_nowait()) is not None:
                self._keep(message)
        return saves_of(merged(self._at_one_step(), self._samples))

    async def final(self) -> list[list[Outcome]]:
        if self._box is None:
            return []
        while sum(each[-1][0]["final"] for each in self._each()) < self._samples * self._stages:
            try:
                self._keep(await asyncio.wait_for(self._box.aget(), RESULT_SECONDS))
            except ChannelClosedError as error:
                raise results_lost(error) from error
        return merged([each[-1] for each in self._each()], self._samples)

    def _each(self) -> list[list[Message]]:
        return [each for stages in self._came.values() for each in stages.values()]

    def _at_one_step(self) -> list[Message]:
        """The stages' latest messages about one step, of the samples that all stages have sent something of."""
        found = []
        for stages in self._came.values():
            if len(stages) == self._stages:
                step = min((_step(each[-1]) for each in stages.values() if not each[-1][0]["final"]), default=None)
                for each in stages.values():
                    while step is not None and len(each) > 1 and _step(each[1]) <= step:
                        del each[0]
                    found.append(each[0] if step is not None else each[-1])
        return found

    def _keep(self, message: Message) -> None:
        header = message[0]
        stages = self._came.setdefault(sample_index(header["request"], self._samples), {})
        stages.setdefault(header["stage"], []).append(message)


def _step(message: Message) -> int:
    return message[1][0].steps
