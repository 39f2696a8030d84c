"""The requests of one trace, or of one `generate`, on an async engine:

async for output in tracer.backend:      # vLLM's outputs of all invokes, as they come
    output.saves                         # what has been saved so far; all of it once output.finished
outputs = await tracer.backend           # or only the final ones, in the order of the invokes
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import TYPE_CHECKING, Any

from midstream.backends.submission import RESULT_SECONDS, Message, Requests, ran, sample_index, saves_of
from midstream.backends.tracer import Ran, raise_failures
from midstream.engine import launch
from midstream.engine.results import ChannelClosedError, Mailbox
from midstream.errors import EngineClosedError, TraceError

if TYPE_CHECKING:
    from midstream.backends.vllm import VLLM

_DROP_SECONDS = 10.0  # a worker may be held up by the trace that is being left
_Item = tuple[int, Any, Ran | None] | BaseException


class Stream(Awaitable[list[Any]]):
    """Requests for an `AsyncLLM`: iterate over the outputs, or await the final ones. Nothing is submitted before that.

    A body's error is raised when all requests have finished, instead of that request's final output; several as an
    InterventionErrorGroup. Leaving the loop early, or cancelling its task, aborts what has not finished.

    Attributes:
        outputs: the final outputs in the order of the invokes, once all have finished.
    """

    def __init__(self, model: VLLM, requests: Requests) -> None:
        self.outputs: list[Any] = []
        self.ran: list[Ran] = []
        self._model = model
        self._requests = requests
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
        requests = self._requests
        boxes = self._model.expect(requests.traces)
        done: dict[int, Ran] = {}
        tasks = [asyncio.create_task(self._follow(i, box, items)) for i, box in enumerate(boxes)]
        self._model.streams.add(self)
        try:
            while len(done) < len(tasks):
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                index, output, result = item
                if result is not None:
                    done[index] = result
                    if any(outcome.failure is not None for outcome in result.outcomes):
                        continue
                yield output
        finally:
            self._model.streams.discard(self)
            await self._leave(tasks, boxes, len(done) < len(tasks))
        self.ran = [done[index] for index in range(len(tasks))]
        self.outputs[:] = [result.output for result in self.ran]
        raise_failures([outcome for result in self.ran for outcome in result.outcomes])

    async def _leave(self, tasks: list[asyncio.Task[None]], boxes: list[Mailbox | None], early: bool) -> None:
        for task in tasks:
            task.cancel()  # vLLM aborts a request whose consumer is cancelled
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            if early and self._requests.trace_ids and self._model.is_open:
                drop = self._model.engine.collective_rpc("midstream_drop", args=(self._requests.trace_ids,))
                with contextlib.suppress(Exception):  # a dead engine has dropped them as well
                    await asyncio.wait_for(drop, _DROP_SECONDS)
        finally:
            for box in boxes:
                if box is not None:
                    box.close()

    async def _follow(self, index: int, box: Mailbox | None, items: asyncio.Queue[_Item]) -> None:
        """Hand on one request's outputs, with the saves on them."""
        try:
            await self._hand_on(index, _Saves(box, self._requests.params[index].n), items)
        except Exception as error:
            items.put_nowait(error)

    async def _hand_on(self, index: int, saves: _Saves, items: asyncio.Queue[_Item]) -> None:
        params = self._requests.params[index]
        samples: dict[int, Any] = {}
        outputs = launch.stream(self._model.engine, self._requests.prompts[index], params, secrets.token_hex(8))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                samples.update((sample.index, sample) for sample in output.outputs)
                if not output.finished:
                    output.saves = saves.latest()
                    items.put_nowait((index, output, None))
                    continue
                if params.n > 1 and len(samples) == params.n:  # vLLM streams them one by one
                    output.outputs = [samples[number] for number in range(params.n)]
                items.put_nowait((index, output, ran(await saves.final(), output)))


class _Saves:
    """What the worker sends of one request: snapshots, and then the final values, for each of its samples."""

    def __init__(self, box: Mailbox | None, samples: int) -> None:
        self._box = box
        self._samples = samples
        self._last: dict[int, Message] = {}

    def latest(self) -> Any:
        """The saves as of the last snapshot that has arrived."""
        with contextlib.suppress(ChannelClosedError):  # the engine's own error says more
            while self._box is not None and (message := self._box.get_nowait()) is not None:
                self._keep(message)
        return saves_of([self._last[number] for number in sorted(self._last)])

    async def final(self) -> list[Message]:
        if self._box is None:
            return []
        while sum(header["final"] for header, _ in self._last.values()) < self._samples:
            try:
                self._keep(await asyncio.wait_for(self._box.aget(), RESULT_SECONDS))
            except ChannelClosedError as error:
                raise EngineClosedError(f"The engine has gone before a trace's results came: {error}") from error
        return list(self._last.values())

    def _keep(self, message: Message) -> None:
        self._last[sample_index(message[0]["request"], self._samples)] = message
