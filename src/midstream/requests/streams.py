"""The outputs of requests that run elsewhere, as they arrive.

async for output in tracer.backend:      # the outputs of all invokes
    output.saves                         # the values saved so far; all of them once output.finished
outputs = await tracer.backend           # or only the final outputs, in the order of the invokes; one output for one invoke
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any

from midstream.errors import TraceError
from midstream.requests.invokes import InvokeResult, raise_failures

# The number of a request, its output, and its result if it has finished.
Item = tuple[int, Any, InvokeResult | None]


class OutputStream(Awaitable[Any]):
    """The outputs of requests: iterate over them, or await the final ones. This submits the requests.

    A request that fails has no final output; its error is raised when all requests have finished, several errors as a group. Leaving the
    loop early, or cancelling its task, aborts the unfinished requests.

    Attributes:
        outputs: the final outputs in the order of the invokes, once all have finished.
        results: the results of all requests, once all have finished.
        ended: called with the number of requests that have ended since the last call.
        when_done: called with the results.
        gives_one: whether awaiting returns the only output, and not a list.
        wants_last: whether only the last output of each request is needed.
        bar: a context in which awaited requests run.
    """

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.results: list[InvokeResult] = []
        self.ended: Callable[[int], object] = lambda _: None
        self.when_done: Callable[[list[InvokeResult]], None] = lambda _: None
        self.bar: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._is_used = self.gives_one = self.wants_last = False

    def running(self) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Run the requests in the block. Yields the outputs of all of them, including failed ones. Call it once.

        Each generator between vLLM's and the user's costs time for every token, so there should be few.
        """
        raise NotImplementedError

    async def items(self) -> AsyncGenerator[Item]:
        """The items of `running`."""
        async with self.running() as items:
            async for item in items:
                yield item

    def __await__(self) -> Generator[Any, None, Any]:
        return self._to_the_end().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        self._use()
        return self._iterate()

    def _use(self) -> None:
        if self._is_used:
            raise TraceError("The outputs of a trace can be iterated over once; the final ones are in `outputs`.")
        self._is_used = True

    async def gathered(self) -> list[InvokeResult]:
        """The results of all requests, once they have finished. Errors of single requests are in their results."""
        self.wants_last = True
        done: dict[int, InvokeResult] = {}
        with self.bar:
            async for index, _, result in self.items():
                if result is not None:
                    done[index] = result
                    self.ended(1)
        return [done[index] for index in sorted(done)]

    async def _to_the_end(self) -> Any:
        self._use()
        self._keep(await self.gathered())
        return self.outputs[0] if self.gives_one else self.outputs

    async def _iterate(self) -> AsyncIterator[Any]:
        done: dict[int, InvokeResult] = {}
        async with self.running() as items:
            async for index, output, result in items:
                if result is not None:
                    done[index] = result
                    self.ended(1)
                    if result.error is not None or any(outcome.failure is not None for outcome in result.outcomes):
                        continue
                yield output
        self._keep([done[index] for index in sorted(done)])

    def _keep(self, results: list[InvokeResult]) -> None:
        self.results = results
        self.outputs[:] = [result.output for result in self.results]
        raise_failures(self.results)
        self.when_done(self.results)


class Called(OutputStream):
    """The outputs of requests that a blocking function runs to their end.

    Args:
        run: runs them, calls its argument with the number of requests that have ended, and returns their results.
    """

    def __init__(self, run: Callable[[Callable[[int], object]], list[InvokeResult]]) -> None:
        super().__init__()
        self._run = run

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncIterator[Item]]:
        results, self.ended = self._run(self.ended), lambda _: None

        async def items() -> AsyncGenerator[Item]:
            for index, result in enumerate(results):
                yield index, result.output, result

        yield items()
