"""Coroutines on a `vllm.LLM` (`Stepper` in `vllm/engine.py`), with an engine that only counts steps."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.vllm.engine import Stepper


class Engine:
    """Ends each request after as many steps as its parameters say. `at_step` is called in each step."""

    def __init__(self) -> None:
        self.submitted: list[list[Any]] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.at_step: Callable[[], None] = lambda: None
        self._left: dict[str, int] = {}
        self.has_sent = False  # whether outputs have come from the engine's process
        self.llm_engine = self
        self.engine_core = SimpleNamespace(outputs_queue=SimpleNamespace(empty=lambda: not self.has_sent))

    def enqueue(self, prompts: list[Any], params: list[int], use_tqdm: bool) -> list[str]:
        if "wrong" in prompts:
            raise KeyError("wrong")
        names = [f"{len(self.submitted)}.{number}-00000000" for number in range(len(prompts))]
        self.submitted.append(prompts)
        self._left.update(zip(names, params, strict=True))
        return names

    def step(self) -> list[Any]:
        self.steps += 1
        assert self.steps < 50
        self.at_step()
        self._left = {name: left - 1 for name, left in self._left.items()}
        ended = [name for name, left in self._left.items() if not left]
        for name in ended:
            del self._left[name]
        return [SimpleNamespace(request_id=name.rpartition("-")[0], finished=True) for name in ended]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self._left[f"{name}-00000000"]


@pytest.fixture
def llm() -> Engine:
    return Engine()


@pytest.fixture
def stepper(llm: Engine) -> Iterator[Stepper]:
    made = Stepper(llm)
    yield made
    made.close()


async def last(stepper: Stepper, prompt: Any, steps: int) -> str:
    (output,) = [output async for output in stepper.generate(prompt, steps)]
    return str(output.request_id)


async def every(stepper: Stepper, *requests: tuple[Any, int]) -> list[Any]:
    return await asyncio.gather(*(last(stepper, *each) for each in requests), return_exceptions=True)


def test_requests_that_are_made_together_are_submitted_together(llm: Engine, stepper: Stepper) -> None:
    assert stepper.finish(every(stepper, ("a", 3), ("b", 1))) == ["0.0", "0.1"]
    assert llm.submitted == [["a", "b"]] and llm.steps == 3
    assert stepper.finish(last(stepper, "c", 2)) == "1.0"
    assert llm.steps == 5 and not llm.aborted


@pytest.mark.parametrize(("has_sent", "pause", "takes"), [(True, 0, True), (False, 0, False), (False, 0.01, True)])
def test_a_coroutine_that_works_does_not_keep_the_outputs_of_others(
    llm: Engine, stepper: Stepper, has_sent: bool, pause: float, takes: bool
) -> None:
    """A sweep would otherwise have no cell before all of its requests are prepared. A step that has to wait is made after 50 ms."""
    llm.has_sent = has_sent

    async def work() -> bool:
        request = asyncio.ensure_future(last(stepper, "a", 1))
        for _ in range(20):
            time.sleep(pause)
            await asyncio.sleep(0)
        came = request.done()
        await request
        return came

    assert stepper.finish(work()) is takes
    assert llm.steps == 1


def test_a_request_that_is_made_while_others_run_joins_them(llm: Engine, stepper: Stepper) -> None:
    async def then() -> list[str]:
        return [await last(stepper, "b", 1), await last(stepper, "c", 1)]

    async def both() -> Any:
        return await asyncio.gather(last(stepper, "a", 5), then())

    assert stepper.finish(both()) == ["0.0", ["0.1", "1.0"]]
    assert llm.steps == 5


def test_rows_are_taken_during_a_step_that_waits_for_them(llm: Engine, stepper: Stepper) -> None:
    """Seen hanging where they are taken on the caller's thread."""
    begun, taken = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert taken.wait(5)

    llm.at_step = wait

    async def take() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.001)
        taken.set()

    async def run() -> str:
        following = stepper.follow(take())
        found = await last(stepper, "a", 1)
        await following
        return found

    assert stepper.finish(run()) == "0.0"


def test_a_caller_may_have_an_event_loop(stepper: Stepper) -> None:
    """As in a notebook's cell."""

    async def cell() -> str:
        before = asyncio.get_running_loop(), asyncio.current_task()
        found = stepper.finish(last(stepper, "a", 2))
        assert (asyncio.get_running_loop(), asyncio.current_task()) == before
        await asyncio.sleep(0)
        return str(found)

    assert asyncio.run(cell()) == "0.0"


def test_an_interrupted_call_aborts_its_requests_and_makes_no_step(llm: Engine, stepper: Stepper) -> None:
    def interrupt() -> None:
        if llm.steps == 2:
            raise KeyboardInterrupt

    llm.at_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        stepper.finish(every(stepper, ("a", 9), ("b", 1), ("c", 9)))
    assert llm.steps == 2 and sorted(llm.aborted) == ["0.0", "0.2"]
    llm.at_step = lambda: None
    assert stepper.finish(last(stepper, "d", 1)) == "1.0"
    assert llm.steps == 3


def test_no_step_is_made_while_an_interrupted_call_ends(llm: Engine, stepper: Stepper) -> None:
    """The trace that was interrupted may block the engine, so a step might not return."""

    def interrupt() -> None:
        if llm.steps == 2:
            raise KeyboardInterrupt

    async def run() -> None:
        other = asyncio.ensure_future(last(stepper, "a", 9))
        try:
            await last(stepper, "b", 9)
        finally:
            await asyncio.sleep(0.01)
            other.cancel()

    llm.at_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        stepper.finish(run())
    assert llm.steps == 2


def test_an_error_is_that_of_the_requests_that_it_ends(llm: Engine, stepper: Stepper) -> None:
    async def run() -> list[Any]:
        first = asyncio.ensure_future(last(stepper, "a", 2))
        await asyncio.sleep(0.01)
        wrong = await every(stepper, ("wrong", 1))
        return [*wrong, await first]

    refused, found = stepper.finish(run())
    assert isinstance(refused, KeyError) and found == "0.0"

    def die() -> None:
        raise RuntimeError("dead")

    llm.at_step = die
    errors = stepper.finish(every(stepper, ("a", 1), ("b", 1)))
    assert [str(error) for error in errors] == ["dead", "dead"]


@pytest.mark.parametrize("own", [700, 0, 10**6])
def test_python_collects_rarely_while_requests_run_and_then_as_before(stepper: Stepper, own: int) -> None:
    """0 is "never". Seen failing without the block: full collections took a fifth of the time of sweeps."""

    async def objects(fails: bool) -> tuple[int, ...]:
        if fails:
            raise KeyError("wrong")
        return gc.get_threshold()

    given = gc.get_threshold()
    gc.set_threshold(own, 11, 12)
    try:
        assert stepper.finish(objects(False)) == (50_000 if own == 700 else own, 11, 12)
        assert gc.get_threshold() == (own, 11, 12)
        with pytest.raises(KeyError):
            stepper.finish(objects(True))
        assert gc.get_threshold() == (own, 11, 12)
    finally:
        gc.set_threshold(*given)
