"""Runs coroutines on a `vllm.LLM`. Makes a step when all coroutines wait, when the engine has sent outputs, and after some time."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from midstream.engine import launch

_PATIENCE = 0.05  # seconds that coroutines may work without a step. vLLM's process begins no step while requests come without a pause


@dataclass(eq=False)
class _Submission:
    """A submitted request. `output` gets its last output."""

    prompt: dict[str, Any]
    params: Any
    adapter: Any
    output: asyncio.Future[Any]
    name: str = ""  # vLLM's id, after it was submitted


class Stepper:
    """Runs coroutines for callers without an event loop, on the caller's thread, and their requests on a `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._lock = threading.RLock()
        self._loop = asyncio.SelectorEventLoop(_Selector(self._step))
        self._rows = asyncio.new_event_loop()  # on a thread of its own
        self._thread = threading.Thread(target=self._rows.run_forever, name="midstream-rows", daemon=True)
        self._thread.start()
        self._new: list[_Submission] = []
        self._running: dict[str, _Submission] = {}  # by name
        self._is_interrupted = False
        self._stepped = 0.0  # when the last step ended, or when the first of the running requests was submitted

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result. Calls from several threads run one after the other."""
        with self._lock, _no_running_loop():
            task = self._loop.create_task(coroutine)
            try:
                return self._loop.run_until_complete(task)
            except BaseException:
                if not task.done():  # the user has interrupted it, perhaps because a trace does not end
                    task.cancel()
                    self._is_interrupted = True
                    with contextlib.suppress(asyncio.CancelledError):
                        self._loop.run_until_complete(task)
                raise
            finally:
                self._is_interrupted = False

    def follow(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Run a coroutine on another thread, so that it continues during steps. The engine may wait for it in a step."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._rows), loop=self._loop)

    async def generate(self, prompt: dict[str, Any], params: Any, adapter: Any = None) -> AsyncGenerator[Any]:
        """The last output of a request. Closing the generator aborts it. `adapter`: its LoRARequest."""
        request = _Submission(prompt, params, adapter, self._loop.create_future())
        if not self._new:  # requests that are made together are submitted together
            self._loop.call_soon(self._submit)
        self._new.append(request)
        try:
            yield await request.output
        finally:
            if self._running.pop(request.name, None) is not None:
                launch.abort(self._llm, [request.name])

    def _submit(self) -> None:
        requests, self._new = [each for each in self._new if not each.output.done()], []
        try:
            parts = zip(*((each.prompt, each.params, each.adapter) for each in requests), strict=True)
            names = launch.submit(self._llm, *map(list, parts)) if requests else []
        except Exception as error:
            _fail(requests, error)
        else:
            if not self._running:
                self._stepped = time.monotonic()
            for name, request in zip(names, requests, strict=True):
                request.name = name
                self._running[name] = request

    def _step(self, waits: bool) -> bool:
        """Make a step if it is time for one. Returns whether it did. `waits`: whether all coroutines wait."""
        if not self._running or self._is_interrupted:
            return False
        is_late = time.monotonic() - self._stepped > _PATIENCE
        if not (waits or is_late or launch.has_outputs(self._llm)):
            return False
        try:
            outputs = launch.step(self._llm)
        except Exception as error:
            requests, self._running = list(self._running.values()), {}
            _fail(requests, error)
        else:
            for output in outputs:
                request = self._running.pop(output.request_id, None)
                if request is not None and not request.output.done():
                    request.output.set_result(output)
        self._stepped = time.monotonic()
        return True

    def close(self) -> None:
        """End the threads."""
        self._rows.call_soon_threadsafe(self._rows.stop)
        self._thread.join()
        self._rows.close()
        self._loop.close()


class _Selector(selectors.DefaultSelector):
    """A selector that may make a step whenever the event loop asks it for events.

    Args:
        step: called with whether the loop asks it to wait, as it does when all coroutines wait. Returns whether it made a step.
    """

    def __init__(self, step: Callable[[bool], bool]) -> None:
        super().__init__()
        self._step = step

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in `selectors`, with a step of the engine in place of waiting."""
        if self._step(timeout is None or timeout > 0):
            timeout = 0
        return super().select(timeout)


@contextlib.contextmanager
def _no_running_loop() -> Iterator[None]:
    """A block in which this thread has no running event loop, so that another loop can run. A notebook, for example, runs one."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if loop is not None and task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None and task is not None:
            asyncio.tasks._enter_task(loop, task)


def _fail(requests: list[_Submission], error: Exception) -> None:
    for request in requests:
        if not request.output.done():
            request.output.set_exception(error)
