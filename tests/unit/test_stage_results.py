"""The client waits for the results of each pipeline stage for each sample (C1, C9), over the real channel and without engines.

Rows C3, C12, C14, D4, D5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from midstream.capture.directory import open_captures
from midstream.capture.rows import Rows
from midstream.errors import EngineClosedError, InterventionError, StageFailedError
from midstream.plan.captures import Plane, Planes
from midstream.plan.values import Capture, Plan
from midstream.ranks.merge import Absent
from midstream.requests.invokes import InvokeResult, raise_failures
from midstream.runtime.request import users_id
from midstream.runtime.sending import LocalSinks
from midstream.trace.code import Failure, Outcome
from midstream.trace.tracer import Result
from midstream.transport.messages import ResultHeader
from midstream.transport.receiver import Mailbox, Receiver
from midstream.transport.sender import Sender
from midstream.vllm.stream import _StageSaves, traced_result

KEY = ("trace", 0)


def collect(box: Mailbox, output: Any, stages: int) -> InvokeResult:
    return traced_result(asyncio.run(_StageSaves(box, len(output.outputs), stages).final()), output)


class Stages:
    """Two stages that send, and the client's mailbox."""

    def __init__(self, receiver: Receiver) -> None:
        self.senders = [Sender(receiver.address, f"rank {stage}") for stage in (0, 1)]
        self.box: Mailbox = receiver.expect(KEY, senders=[sender.name for sender in self.senders])

    def send(
        self, stage: int, values: dict[str, Any], steps: int, final: bool, sample: str = "r", error: Any = None
    ) -> None:
        failure = Failure.of(error) if error is not None else None
        header = ResultHeader(KEY, sample, final, stage)
        self.senders[stage].send(header, [Outcome(values, failure=failure, name=f"{sample}/0", steps=steps)])

    def flush(self, stage: int) -> None:
        """Wait until everything that this stage sent has arrived."""
        self.senders[stage].close()


@pytest.fixture
def stages() -> Iterator[Stages]:
    with Receiver() as receiver:
        made = Stages(receiver)
        yield made
        for sender in made.senders:
            sender.close()


def absent() -> Absent:
    return Absent("model.layers.0.output")


def output_of(samples: int) -> Any:
    return SimpleNamespace(outputs=[object()] * samples, saves=None)


def test_every_stage_is_waited_for(stages: Stages) -> None:
    """C1: a sync trace is over when each stage has sent its part of each sample, in any order."""
    for stage in (1, 0):
        for sample in (1, 0):
            values = {"h": [torch.full((2,), float(sample)), absent()], "all": absent() if stage else Result()}
            values["h"] = values["h"] if stage == 0 else [absent(), torch.full((2,), 10.0 + sample)]
            stages.send(stage, values, 1, True, f"{sample}_r-01234567")
    output = output_of(2)
    ran = collect(stages.box, output, 2)
    assert [[h[0].item() for h in saves["h"]] for saves in output.saves] == [[0.0, 10.0], [1.0, 11.0]]
    assert output.saves[0]["all"] is output and len(ran.outcomes) == 2


def test_one_error_for_all_stages(stages: Stages) -> None:
    """C14: the user's own error, not a group, with the saved values."""
    stages.send(0, {"h": 1}, 1, True, error=StageFailedError("stage 1 failed"))
    stages.send(1, {"h": absent()}, 1, True, error=ValueError("mine"))
    with pytest.raises(ValueError, match="mine") as caught:
        raise_failures([collect(stages.box, output_of(1), 2)])
    assert isinstance(caught.value, InterventionError) and caught.value.saves == {"h": 1}  # type: ignore[attr-defined]


def test_a_lost_stage_is_an_error(stages: Stages) -> None:
    """E10: the worker goes before it has sent its part."""
    stages.send(0, {}, 1, True)
    stages.flush(1)
    with pytest.raises(EngineClosedError):
        collect(stages.box, output_of(1), 2)


async def test_snapshots_are_of_one_step(stages: Stages) -> None:
    """C3: stage 0 is ahead, so that its newest snapshot is of a later step than the last stage's."""
    saves = _StageSaves(stages.box, 1, 2)
    for step in (1, 2, 3):
        stages.send(0, {"first": step, "last": absent(), "hs": list(range(step))}, step, False)
    stages.send(0, {"first": 3, "last": absent(), "hs": [0, 1, 2]}, 3, True)
    await until(lambda: saves._read_latest() or len(saves._received.get(0, {}).get(0, ())) == 4)
    assert saves._read_latest() == {}
    for step in (1, 2):
        stages.send(1, {"first": absent(), "last": step, "hs": [absent()] * step}, step, False)
        await until(lambda step=step: saves._read_latest().get("last") == step)
        assert saves._read_latest() == {"first": step, "last": step, "hs": list(range(step))}
    assert [len(each) for each in saves._each()] == [3, 1]  # what is older is not kept
    stages.send(1, {"first": absent(), "last": 3, "hs": [absent()] * 3}, 3, True)
    ((outcome,),) = await saves.final()
    assert outcome.values == {"first": 3, "last": 3, "hs": [0, 1, 2]} and saves._read_latest() == outcome.values


async def test_a_stage_whose_body_is_over_delays_no_snapshot(stages: Stages) -> None:
    """C3: its values are final, whatever step the others are in."""
    saves = _StageSaves(stages.box, 1, 2)
    stages.send(0, {"a": 1, "b": absent()}, 1, True)
    stages.send(1, {"a": absent(), "b": 5}, 4, False)
    await until(lambda: "b" in saves._read_latest())
    assert saves._read_latest() == {"a": 1, "b": 5}


async def until(ready: Any) -> None:
    for _ in range(1000):
        if ready():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing came")


# Names of requests.


@pytest.mark.parametrize(
    ("engine_id", "mine"),
    [
        ("0-0a1b2c3d", "0"),
        ("my-own-request-0a1b2c3d", "my-own-request"),
        ("chatcmpl-8f2e-0a1b2c3d", "chatcmpl-8f2e"),
        ("1_chatcmpl-8f2e-0a1b2c3d", "1_chatcmpl-8f2e"),
        ("no-end", "no-end"),
    ],
)
def test_requests_are_known_by_their_users_ids(engine_id: str, mine: str) -> None:
    """D4: dashes in an id are its user's; only vLLM's own random end goes."""
    assert users_id(engine_id) == mine


def test_consumers_in_the_engine_know_a_request_by_its_users_id(tmp_path: Any) -> None:
    """D5: also one that uses an id again; of two at a time the second keeps the engine's."""
    plan = Plan.of([Capture("resid_post", layers=0, positions="all_prompt", to=tmp_path)])
    sinks = LocalSinks("engine", 1, [0])
    layout = Planes([Plane("resid_post", 0, "before", 0, 2)])

    def feed(engine_id: str, value: float) -> None:
        sinks.rows(engine_id, [Rows(np.arange(2), layout, torch.full((2, 2), value))])

    for number, engine_id in enumerate(["a-b-00000000", "a-b-11111111", "a-b-22222222"]):
        sinks.begin(engine_id, plan, [7, 8])
        if number != 1:
            feed(engine_id, float(number))
            sinks.end(engine_id, 2)
        if number == 2:
            feed("a-b-11111111", 1.0)
            sinks.end("a-b-11111111", 2)
    sinks.close()
    assert sinks.failures == 0
    found = {name: capture["resid_post", 0][0, 0].item() for name, capture in open_captures(tmp_path).items()}
    assert found == {"a-b": 0.0, "a-b#2": 1.0, "a-b-22222222": 2.0}
