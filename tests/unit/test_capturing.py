"""Captured rows from the channel to what is on the output, without an engine: rows D4, D7, F3 and F7."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_tools import capture_threads, wait_until

from midstream.capture.directory import open_captures
from midstream.capture.rows import Captured, routes
from midstream.capture.sinks import Sinks
from midstream.errors import CaptureError, EngineClosedError
from midstream.plan.captures import Planes
from midstream.plan.values import Capture, ModelFacts, Plan
from midstream.requests.invokes import PreparedPlan
from midstream.trace.program import Outcome
from midstream.transport.receiver import Mailbox, Receiver
from midstream.transport.sender import Sender
from midstream.vllm import captures as vllm_captures
from midstream.vllm.captures import RowReceiver, RowThread

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
        self.box: Mailbox = self.receiver.expect_all([each.key for each in self.receivers], names)
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
            header = {
                "key": self.receivers[number].key,
                "request": f"r{number}",
                "final": final,
                "stage": stage,
                "confirmed": 0,
            }
            messages.append((header, {"rows": each, "error": None}))
        self.senders[stage].send_together(messages)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.box.close()
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


def check(channel: Channel, number: int, positions: list[int], generated: int) -> None:
    captured = channel.receivers[number].result([generated])
    for layer in range(LAYERS):
        expected = torch.tensor([100.0 * number + 10 * p + layer for p in positions])[:, None].expand(-1, WIDTH)
        assert torch.equal(captured["resid_post", layer], expected)
        assert captured.positions["resid_post", layer] == positions


@pytest.mark.parametrize("stages", [1, 2])
def test_d4_rows_are_taken_and_put_together_while_the_engine_runs(channel: Any, stages: int) -> None:
    """Rows of prompts are ready for `result` before the number of generated tokens is known."""
    here = channel("all_prompt", requests=3, stages=stages)
    with closing(RowThread(here.receivers, here.box)) as thread:
        for stage in range(stages):
            here.send({0: [0, 1], 2: [0]}, final=False, stage=stage)
            here.send({2: [1, 2, 3, 4], 0: [2, 3, 4], 1: list(range(5))}, stage=stage)
        thread.wait()
        assert all(each._samples[0].capture._captured is not None for each in here.receivers)
    assert not channel.threads()
    for number in range(3):
        check(here, number, list(range(5)), generated=1 + number)


def test_d4_generated_rows_wait_for_the_end(channel: Any) -> None:
    """Rows that asynchronous scheduling computed past the end are left out."""
    here = channel("all", requests=2)
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: list(range(8)), 1: list(range(8))})
        thread.wait()
    check(here, 0, list(range(7)), generated=3)
    check(here, 1, list(range(5)), generated=1)


def test_i1_code_that_keeps_rows_runs_as_its_request_ends_while_others_run(channel: Any) -> None:
    here = channel("all", requests=3)
    ran: list[tuple[int, int, bool]] = []

    def code(captures: Captured, tokens: int) -> Outcome:
        rows = captures["resid_post", 1]
        ran.append((int(rows[0, 0]) // 100, tokens, len(rows) == LENGTH + tokens - 1))
        return Outcome({"return": len(ran)})

    for each in here.receivers:
        each.here = code
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: list(range(8))})
        thread.end("r1", [3])  # its rows come after its end
        here.send({1: list(range(7))})
        thread.end("r0", [2])
        wait_until(lambda: sorted(ran) == [(0, 2, True), (1, 3, True)])
        here.send({2: [0, 1, 3, 4]})
        thread.end("r2", [1])
        thread.wait()  # the error of one is no other's
    with pytest.raises(CaptureError, match="1 row did not come"):
        here.receivers[2].outcome(1)
    assert sorted(
        each.outcome(count).values["return"] for each, count in zip(here.receivers, [2, 3], strict=False)
    ) == [1, 2]
    assert len(ran) == 2


@pytest.mark.parametrize("dies", [False, True])
def test_f3_a_call_that_ends_early_waits_for_no_code(channel: Any, dies: bool) -> None:
    """All rows of one request have come, and it has not ended. Seen hanging."""
    here = channel("all_prompt", requests=2)
    for each in here.receivers:
        each.here = lambda captures, tokens: Outcome()
    thread = RowThread(here.receivers, here.box)
    here.send({0: list(range(5))})
    wait_until(lambda: here.receivers[0].is_complete)
    if dies:
        here.senders[0].close()
        wait_until(lambda: thread._tasks[0].done())
    closing_thread = threading.Thread(target=thread.close, daemon=True)
    closing_thread.start()
    closing_thread.join(10)
    assert not closing_thread.is_alive() and not channel.threads()


def test_f3_code_that_takes_long_is_no_lack_of_rows(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: rows that had come were missed while code ran."""
    monkeypatch.setattr(vllm_captures, "RESULT_SECONDS", 0.2)
    here = channel("all")
    here.receivers[0].here = lambda captures, tokens: (time.sleep(0.7), Outcome())[1]
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: list(range(6))})
        thread.end("r0", [2])
        thread.wait()


def test_i1_code_runs_while_messages_wait(channel: Any) -> None:
    here, order = channel("all", requests=20), []

    def code(captures: Captured, tokens: int) -> Outcome:
        order.append("code")
        return Outcome()

    for each in here.receivers:
        each.here = code
        each.take = lambda header, value, take=each.take: (time.sleep(0.02), order.append("rows"), take(header, value))
    for number in range(20):
        here.send({number: list(range(6))})
    with closing(RowThread(here.receivers, here.box)) as thread:
        for number in range(20):
            thread.end(f"r{number}", [2])
        thread.wait()
    assert order.index("code") < 10


@pytest.mark.parametrize(
    ("sent", "message"),
    [([0, 1, 2, 2, 3, 4], "position 2 came more than once"), ([0, 1, 3, 4], r"1 row did not come \(position 2\)")],
)
def test_d4_a_row_that_is_there_twice_or_not_at_all_is_that_requests_error(
    channel: Any, sent: list[int], message: str
) -> None:
    here = channel("all_prompt", requests=2)
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: sent, 1: list(range(5))})
        thread.wait()
    with pytest.raises(CaptureError, match=message):
        here.receivers[0].result([4])
    check(here, 1, list(range(5)), generated=4)


def test_f3_an_engine_that_dies_is_told_of(channel: Any) -> None:
    here = channel("all_prompt", requests=2)
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: list(range(5))})
        here.senders[0].close()
        with pytest.raises(EngineClosedError, match="before the captured rows came"):
            thread.wait()
    assert not channel.threads()


def test_f3_rows_that_do_not_come_are_not_waited_for_forever(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_captures, "RESULT_SECONDS", 0.1)
    here = channel("all_prompt", requests=2)
    with closing(RowThread(here.receivers, here.box)) as thread:
        here.send({0: list(range(5))})
        with pytest.raises(CaptureError, match="have not come"):
            thread.wait()
    assert not channel.threads()


def test_f7_a_request_is_listed_once_it_has_ended_while_others_run(tmp_path: Path) -> None:
    """Seen lost: all of them, where the process was killed before the last had ended."""
    plan = Plan((Capture("resid_post", positions="all", to=str(tmp_path)),))
    found, sinks = routes(plan.captures, LENGTH, range(LAYERS)), Sinks()
    both = [RowReceiver(PreparedPlan(plan, [7] * LENGTH, found, FACTS), 1, sinks) for _ in range(2)]
    receiver = Receiver()
    sender = Sender(receiver.address, "0")
    thread = RowThread([], None, [(each, receiver.expect(each.key, ["0"])) for each in both])
    try:
        layout = Planes.of(((("resid_post", layer, "before")) for layer in range(LAYERS)), lambda _: WIDTH)
        for each, name, final in ((both[0], "first", True), (both[1], "second", False)):
            rows = (np.arange(LENGTH + 3), layout, torch.ones(LENGTH + 3, LAYERS * WIDTH))
            header = {"key": each.key, "request": name, "final": final, "stage": 0, "confirmed": 0}
            sender.send(header, {"rows": [rows], "error": None})
        thread.end("first", [2])
        wait_until(lambda: any(tmp_path.glob("index-*.jsonl")) and "first" in open_captures(tmp_path))
        store = open_captures(tmp_path)
        assert list(store) == ["first"]
        assert store["first"].positions["resid_post", 2] == list(range(LENGTH + 1))  # not what was run past the end
    finally:
        thread.close()
        sender.close()
        receiver.close()
        sinks.close()
