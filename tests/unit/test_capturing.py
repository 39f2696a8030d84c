"""Captured rows from the channel to what is on the output, without an engine: rows D4, D7, F3 and F7. Row I1."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from capture_tools import capture_threads, wait_until

from midstream.capture.rows import Captured, routes
from midstream.capture.sinks import Sinks
from midstream.errors import CaptureError, EngineClosedError
from midstream.plan.captures import Planes
from midstream.plan.values import Capture, ModelFacts, Plan
from midstream.requests.invokes import InvokeResult, PreparedPlan
from midstream.trace.code import Outcome
from midstream.transport.messages import ResultHeader
from midstream.transport.receiver import Mailbox, Receiver
from midstream.transport.sender import Sender
from midstream.vllm import stream
from midstream.vllm.engine import EngineRequest
from midstream.vllm.row_receiver import RowReceiver
from midstream.vllm.stream import RunningRequest

LAYERS, WIDTH, LENGTH = 4, 3, 5
FACTS = ModelFacts(LAYERS, {("resid_post", layer): WIDTH for layer in range(LAYERS)}, "float32")


class Channel:
    """The client's end of some requests with one plan, and workers that send what they capture of them."""

    def __init__(self, positions: Any, requests: int = 1, stages: int = 1) -> None:
        plan = Plan((Capture("resid_post", positions=positions),))
        found = routes(plan.captures, LENGTH, range(LAYERS))
        self.receivers = [
            RowReceiver(PreparedPlan(plan, [7] * LENGTH, found, FACTS), 1, Sinks(), stages) for _ in range(requests)
        ]
        self.receiver = Receiver()
        names = [str(stage) for stage in range(stages)]
        self.boxes = [self.receiver.expect(each.key, senders=names) for each in self.receivers]
        self.stages = stages
        self.senders = [Sender(self.receiver.address, name) for name in names]
        each = LAYERS // stages
        self.layouts = [
            Planes.of([("resid_post", layer, "before") for layer in range(s * each, s * each + each)], lambda _: WIDTH)
            for s in range(stages)
        ]

    def send(self, parts: dict[int, list[int]], final: bool = True, stage: int = 0) -> None:
        """Rows of requests, by number, in one frame; the value of each is its request's, its position's and its layer's number."""
        layout, messages = self.layouts[stage], []
        for number, positions in parts.items():
            layers = torch.tensor([float(plane.layer) for plane in layout]).repeat_interleave(WIDTH)
            rows = torch.stack([100 * number + 10 * position + layers for position in positions])
            each = [(np.array([position]), layout, rows, i) for i, position in enumerate(positions)]
            header = ResultHeader(self.receivers[number].key, f"r{number}", final, stage)
            messages.append((header, {"rows": each, "error": None}))
        self.senders[stage].send_together(messages)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for box in self.boxes:
            box.close()
        self.receiver.close()


@pytest.fixture
def channel() -> Iterator[Any]:
    channels: list[Channel] = []
    others = capture_threads()  # of earlier tests' directories, which close after a minute without requests

    def make(*args: Any, **kwargs: Any) -> Channel:
        channels.append(Channel(*args, **kwargs))
        return channels[-1]

    make.threads = lambda: capture_threads() - others  # type: ignore[attr-defined]
    yield make
    for each in channels:
        each.close()
    wait_until(lambda: not capture_threads() - others)


def check(channel: Channel, number: int, positions: list[int], captured: Any) -> None:
    for layer in range(LAYERS):
        expected = torch.tensor([100.0 * number + 10 * p + layer for p in positions])[:, None].expand(-1, WIDTH)
        assert torch.equal(captured["resid_post", layer], expected)
        assert captured.positions["resid_post", layer] == positions


class Running:
    """A request of a channel that runs on a model engine. `end` ends it, with so many tokens."""

    def __init__(self, here: Channel, number: int, is_async: bool = False) -> None:
        rows, params = here.receivers[number], SamplingParams(n=1, output_kind=Kind("FINAL_ONLY"))
        connection: Any = Connection(is_async, here.stages)
        prompt = {"prompt_token_ids": [7] * LENGTH}
        request: Any = EngineRequest(prompt, params, None, rows._plan, rows, {})
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = RunningRequest(request, None, here.boxes[number], connection)
        self.result: asyncio.Task[InvokeResult] = asyncio.create_task(self._run(running))

    def end(self, tokens: int) -> None:
        self._ended.set_result(tokens)

    async def _run(self, running: RunningRequest) -> InvokeResult:
        (result,) = [result async for _, result in running.outputs(self._outputs())]
        assert result is not None
        return result

    async def _outputs(self) -> AsyncGenerator[Any]:
        sample = SimpleNamespace(index=0, token_ids=[1] * await self._ended, finish_reason="length", stop_reason=None)
        yield SimpleNamespace(finished=True, outputs=[sample], request_id="r")


class Kind(NamedTuple):
    name: str


class SamplingParams(NamedTuple):
    n: int
    output_kind: Kind


class Connection(NamedTuple):
    is_async: bool
    stages: int
    watched: tuple[()] = ()

    def follow(self, rows: RowReceiver, box: Mailbox, pool: Any) -> asyncio.Future[None]:
        return asyncio.ensure_future(rows.follow(box, pool if self.is_async else None))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_are_taken_while_the_engine_runs(channel: Any, stages: int, is_async: bool) -> None:
    here = channel("all_prompt", requests=3, stages=stages)

    async def run() -> None:
        running = [Running(here, number, is_async) for number in range(3)]
        for stage in range(stages):
            here.send({0: [0, 1], 2: [0]}, final=False, stage=stage)
            here.send({2: [1, 2, 3, 4], 0: [2, 3, 4], 1: list(range(5))}, stage=stage)
        await until(lambda: all(each.is_complete for each in here.receivers))
        for number, each in enumerate(running):
            each.end(1 + number)
            check(here, number, list(range(5)), (await each.result).output.captures)

    asyncio.run(run())
    assert not channel.threads()


def test_generated_rows_wait_for_the_end(channel: Any) -> None:
    """Rows that asynchronous scheduling computed past the end are left out."""
    here = channel("all", requests=2)

    async def run() -> None:
        running = [Running(here, number) for number in range(2)]
        here.send({0: list(range(8)), 1: list(range(8))})
        for number, each in enumerate(running):
            each.end(3 - 2 * number)
        check(here, 0, list(range(7)), (await running[0].result).output.captures)
        check(here, 1, list(range(5)), (await running[1].result).output.captures)

    asyncio.run(run())


@pytest.mark.parametrize("is_async", [False, True])
def test_code_that_keeps_rows_runs_as_its_request_ends_while_others_run(channel: Any, is_async: bool) -> None:
    here = channel("all", requests=3)
    ran: list[tuple[int, int, bool]] = []

    def code(captures: Captured, tokens: int) -> Outcome:
        rows = captures["resid_post", 1]
        ran.append((int(rows[0, 0]) // 100, tokens, len(rows) == LENGTH + tokens - 1))
        return Outcome({"return": len(ran)})

    for each in here.receivers:
        each.trace_ending = code

    async def run() -> None:
        first, second, third = (Running(here, number, is_async) for number in range(3))
        here.send({0: list(range(8))})
        second.end(3)  # its rows come after its end
        await asyncio.sleep(0.1)
        assert ran == []
        here.send({1: list(range(7))})
        await second.result
        first.end(2)
        await first.result
        assert ran == [(1, 3, True), (0, 2, True)] and not third.result.done()
        here.send({2: [0, 1, 3, 4]})
        third.end(1)
        assert "1 row did not come" in str((await third.result).error)  # the error of one is no other's
        values = [(await each.result).output.saves["return"] for each in (second, first)]
        assert values == [1, 2]

    asyncio.run(run())
    assert len(ran) == 2


def test_a_call_that_ends_early_waits_for_no_rows(channel: Any) -> None:
    """Some rows of one request have come, and it has not ended."""
    here = channel("all_prompt", requests=2)

    async def run() -> None:
        running = [Running(here, number) for number in range(2)]
        here.send({0: list(range(5)), 1: [0]}, final=False)
        await asyncio.sleep(0.1)
        for each in running:
            each.result.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*(each.result for each in running), return_exceptions=True)

    asyncio.run(run())
    assert not channel.threads()


def test_a_sink_that_takes_long_is_no_lack_of_rows(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing where only whole messages count as progress."""
    monkeypatch.setattr(stream, "RESULT_SECONDS", 0.2)
    here = channel("all")
    take = here.receivers[0]._take
    monkeypatch.setattr(here.receivers[0], "_take", lambda *message: (time.sleep(0.7), take(*message)))

    async def run() -> None:
        running = Running(here, 0)
        monkeypatch.setattr(RowReceiver, "has_sinks", property(lambda _: True))
        box, rows = here.boxes[0], here.receivers[0]
        monkeypatch.setattr(Connection, "follow", lambda *_: asyncio.ensure_future(rows.follow(box, stream._pool())))
        here.send({0: list(range(6))})
        running.end(2)
        assert (await running.result).error is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "message"),
    [([0, 1, 2, 2, 3, 4], "position 2 came more than once"), ([0, 1, 3, 4], r"1 row did not come (position 2)")],
)
def test_a_row_that_is_there_twice_or_not_at_all_is_that_requests_error(
    channel: Any, sent: list[int], message: str
) -> None:
    here = channel("all_prompt", requests=2)

    async def run() -> None:
        running = [Running(here, number) for number in range(2)]
        here.send({0: sent, 1: list(range(5))})
        for each in running:
            each.end(4)
        error = (await running[0].result).error
        assert isinstance(error, CaptureError) and message in str(error)
        check(here, 1, list(range(5)), (await running[1].result).output.captures)

    asyncio.run(run())


def test_an_engine_that_dies_is_told_of(channel: Any) -> None:
    here = channel("all_prompt", requests=2)

    async def run() -> None:
        running = [Running(here, number) for number in range(2)]
        here.send({0: list(range(5))})
        here.senders[0].close()
        running[1].end(1)
        with pytest.raises(EngineClosedError, match="before the captured rows came"):
            await running[1].result
        running[0].end(1)
        check(here, 0, list(range(5)), (await running[0].result).output.captures)

    asyncio.run(run())


def test_rows_that_do_not_come_are_not_waited_for_forever(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RESULT_SECONDS", 0.1)
    here = channel("all_prompt", requests=2)

    async def run() -> None:
        running = Running(here, 1)
        here.send({0: list(range(5))})
        running.end(1)
        with pytest.raises(CaptureError, match="have not come"):
            await running.result

    asyncio.run(run())
