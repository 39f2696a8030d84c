"""Stock `vllm serve` with midstream in it, and strangers at its door (F5, F6, G3, G8, L7).

`MIDSTREAM_FUZZ=5000` has more plans mutated than a run of all tests does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import least
from mutations import mutated
from servers import SCALE_OUT, Server, serving
from written_programs import program

from midstream import Capture, Clamp, Consumer, Patch, Plan, Probe, RecordedRun, Steer, When
from midstream.errors import PlanError
from midstream.plan.program import MAX_STEPS, Program
from midstream.plan.steps import INPUT, Const, Ref
from midstream.plan.strangers import check_strangers
from midstream.plan.values import Apply
from midstream.plan.vectors import Named, digest
from midstream.plan.wire import MAX_STRANGERS_EDITS

pytestmark = pytest.mark.engine

FUZZED = int(os.environ.get("MIDSTREAM_FUZZ", "300"))
FRANCE = "The capital of France is"
IDS = [20, 30, 40]
HIDDEN = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), *SCALE_OUT) as server:
        yield server


def plain(server: Server) -> Any:
    """What anybody's plain request gets, with its log-probabilities."""
    status, body = server.complete([FRANCE, "The Eiffel Tower is in the city of", "The"], logprobs=3, max_tokens=6)
    assert status == 200, body
    return [(choice["text"], choice["logprobs"]) for choice in body["choices"]]


def in_every_form(plan: Any) -> list[Any]:
    """A plan as JSON in a string, as an object, and both in an envelope."""
    text = plan if isinstance(plan, str) else Plan.of(plan).to_json()
    return [text, json.loads(text), {"plan": text}, {"plan": json.loads(text)}]


def attempts(server: Server, given: Any) -> Iterator[tuple[int, Any]]:
    """Both routes: `vllm_xargs` takes strings, numbers and lists of them, `extra_args` anything."""
    if isinstance(given, (str, int, list)):
        yield server.complete(FRANCE, vllm_xargs={"midstream": given})
    yield server.generate(IDS, extra_args={"midstream": given})


def test_a_strangers_plan_acts_on_every_route(server: Server) -> None:
    """Else the refusals below would prove nothing."""
    plan = Steer("resid_post", layers=3, vector=np.random.default_rng(0).normal(size=HIDDEN) * 20)
    before = server.complete(FRANCE)[1]["choices"][0]["text"], server.generate(IDS)[1]["choices"][0]["token_ids"]
    for form in in_every_form(plan):
        for status, body in attempts(server, form):
            assert status == 200, body
            choice = body["choices"][0]
            assert choice.get("text", before[0]) != before[0] or choice.get("token_ids", before[1]) != before[1]


def test_what_only_the_engines_own_side_may_say_is_refused_on_every_route(server: Server, tmp_path: Path) -> None:
    """Paths, consumers, digests. Nothing appears on the disk, whichever form they come in."""
    target = tmp_path / "written-by-a-stranger"
    forbidden = [
        Capture("resid_post", to=str(target)),
        Capture("resid_post", to=(str(target), Consumer("log"))),
        Capture("resid_post", to=Consumer("log")),
        Steer("resid_post", vector=Named("calm", digest(b"")), layers=3),
    ]
    for plan in forbidden:
        for form in in_every_form(plan):
            for status, body in attempts(server, form):
                assert status == 400 and "who sends this plan may not" in json.dumps(body), (form, body)
    assert not target.exists()


# -------------------------------------------------------------------------------------------------------------- size


def too_large() -> dict[str, Any]:
    one = {"kind": "patch", "site": "resid_post", "layer": 0, "position": 0, "source": {"zeros": True}}
    vector = [0.5] * HIDDEN
    return {
        "patches": {"interventions": [{**one, "position": [i % 4], "alpha": 0.5} for i in range(60_000)]},
        "positions": {"interventions": [{**one, "position": list(range(1_000_000))}]},
        "steers": {"interventions": [{"kind": "steer", "site": "resid_post", "vector": vector}] * 2000},
        "captures": {
            "interventions": [{"kind": "capture", "site": "mlp_out", "layers": [i % 8]} for i in range(60_000)]
        },
        "numbers": {"interventions": [{"kind": "steer", "site": "resid_post", "vector": [0.1] * 5_000_000}]},
        "one long string": "x" * 24_000_000,
        "deep": None,
    }


@pytest.mark.parametrize("name", list(too_large()))
def test_a_plan_that_is_too_large_is_refused_before_it_costs_anybody_anything(server: Server, name: str) -> None:
    """Seen before: 91 s for its neighbours, and 14 s in which `/health` did not answer."""
    plan = too_large()[name]
    text = "[" * 200_000 if name == "deep" else plan if isinstance(plan, str) else json.dumps(plan)

    def longest_wait() -> float:
        with watching(server) as waits:
            status, body = server.complete(FRANCE, vllm_xargs={"midstream": text})
        assert status == 400, body
        return max(waits)

    assert least(longest_wait, 2.0) < 2.0  # of which 24 MB of JSON are vLLM's own to parse


def test_a_plan_at_the_bound_hardly_delays_a_neighbour(server: Server) -> None:
    """Edits of their own at as many places as a stranger's plan may have on a CPU; the engine's own Python has no such limit."""
    length, layers = 300, 8
    ids = [1 + i % 300 for i in range(length)]

    def plan(seed: int, count: int) -> str:
        items = [
            {"kind": "patch", "site": "resid_post", "layer": i % layers, "position": i // layers, "alpha": 0.5 + seed / 100,
             "source": {"zeros": True}}
            for i in range(count)
        ]  # fmt: skip
        return json.dumps({"interventions": items})

    def is_accepted(count: int) -> bool:
        try:
            check_strangers(Plan.from_json(plan(0, count), trusted=False), layers, "cpu")
        except PlanError:
            return False
        return True

    most = max(filter(is_accepted, range(32, MAX_STRANGERS_EDITS + 1, 32)))
    assert 256 < most < MAX_STRANGERS_EDITS
    status, body = server.complete(ids, vllm_xargs={"midstream": plan(0, MAX_STRANGERS_EDITS)})
    assert status == 400 and "ms of work in the step" in json.dumps(body), body

    def longest_wait(seed: int, count: int) -> float:
        """A neighbour's, while a request with so many edits runs."""
        more = {"vllm_xargs": {"midstream": plan(seed, count)}, "max_tokens": 1}
        attack = threading.Thread(target=lambda: server.complete([20 + seed, *ids[1:]], **more))
        attack.start()
        waits = [timed(server)]
        while attack.is_alive():
            waits.append(timed(server))
        return max(waits)

    seeds = itertools.count()

    def extra_wait() -> float:
        """Beside a plan at the bound, longer than beside one edit."""
        pairs = [(longest_wait(next(seeds), most), longest_wait(next(seeds), 1)) for _ in range(4)]
        return statistics.median(at_bound - with_one for at_bound, with_one in pairs)

    assert least(extra_wait, 0.3) < 0.3  # 0.1 on an idle machine: docs/benchmarks.md has the measurement


def timed(server: Server) -> float:
    started = time.monotonic()
    assert server.complete("The", max_tokens=1)[0] == 200
    return time.monotonic() - started


class watching:
    """How long `/health` takes while the block runs, in seconds."""

    def __init__(self, server: Server) -> None:
        self._server, self._over, self.waits = server, threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self.waits

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set() or not self.waits:
            started = time.monotonic()
            assert self._server.is_healthy(60)
            self.waits.append(time.monotonic() - started)
            time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------- programs


def gate(width: int = HIDDEN, is_read: bool = False) -> Program:
    """An SAE's gate of 64 features, or these for a capture to keep."""
    made = torch.Generator().manual_seed(0)
    encoder, decoder = (torch.randn(*shape, generator=made) / 8 for shape in ((width, 64), (64, width)))
    steps = [("mm.default", (INPUT, Const(0))), ("relu.default", (Ref(0),)), ("mm.default", (Ref(1), Const(1)))]
    return program(*steps, constants=[encoder, decoder], width=width, result=(Ref(1),) if is_read else None)


def sum_with(width: int) -> Program:
    """`h + early`"""
    return program(("add.Tensor", (INPUT, Ref(-2))), width=width, inputs=(width,))


def test_a_program_at_the_bound_hardly_delays_a_neighbour(server: Server) -> None:
    """The longest program at every layer, for a prompt of 300 tokens, which takes several steps."""
    ids = [1 + i % 300 for i in range(300)]
    dear = program(*[("neg.default", (Ref(i - 1) if i else INPUT,)) for i in range(MAX_STEPS)], width=HIDDEN)
    plans = {
        True: Plan.of(Apply("resid_post", program=dear)),
        False: Plan.of(Steer("resid_post", layers=3, vector=np.ones(HIDDEN))),
    }
    seeds = itertools.count()

    def longest_wait(at_bound: bool) -> float:
        more = {"vllm_xargs": {"midstream": plans[at_bound].to_json()}, "max_tokens": 1}
        attack = threading.Thread(target=lambda: server.complete([20 + next(seeds), *ids[1:]], **more))
        attack.start()
        waits = [timed(server)]
        while attack.is_alive():
            waits.append(timed(server))
        return max(waits)

    def extra_wait() -> float:
        return statistics.median(longest_wait(True) - longest_wait(False) for _ in range(4))

    assert least(extra_wait, 0.1) < 0.3  # under 0.1 on a machine that has nothing else to do


# -------------------------------------------------------------------------------------------------------------- fuzz


def good_plans() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    vector = rng.normal(size=HIDDEN)
    run = RecordedRun("clean", "f" * 32, (1, 2, 3), ("resid_post",), (0, 1), (0, 1, 2))
    plans = [
        Plan.of(Steer("resid_post", layers=[1, 2], vector=vector, scale=2.0, phase="decode")),
        Plan.of([Steer("mlp_out", vector=vector, norm_match=True), Capture("resid_post", positions="all")]),
        Plan.of(Patch("attn_out", layer=2, position=[0, -1], source=vector, alpha=0.5, mask=np.ones(HIDDEN))),
        Plan.of(Patch("resid_post", layer=1, position=1, source=run)),
        Plan.of([Steer("resid_post", layers=3, vector="calm"), Capture("mlp_in", layers=[0], positions=[0, 1])]),
        Plan.of(Steer("resid_post", layers=2, vector=np.full(HIDDEN, 1e38), scale=1e38)),
    ]
    plans += [
        Plan.of(Apply("mlp_out", layers=[1, 2], program=gate())),
        Plan.of(Apply("mlp_out", layers=[1, 2], program=sum_with(HIDDEN), inputs=[("resid_post", 0)])),
        Plan.of(
            [
                Capture("resid_post", layers=3, positions="all", program=gate(is_read=True)),
                Steer("mlp_out", vector=vector),
            ]
        ),
    ]
    probe = Probe("resid_post", layer=1, weight=vector, name="p", stop_above=40.0, positions="all")
    several = Probe(
        "mlp_out", layer=2, weight=rng.normal(size=HIDDEN), bias=1.0, name="q", stop_below=-30.0, aggregate="ema"
    )
    condition = Probe("mlp_out", layer=2, weight=rng.normal(size=HIDDEN), bias=1.0, name="r")
    edits = [Steer("resid_post", layers=[2, 3], vector=vector), Clamp("mlp_out", layers=4, direction=vector, high=1.0)]
    edits.append(Apply("mlp_out", layers=[3], program=gate()))
    plans += [
        Plan.of([probe, several]),
        Plan.of([When(probe, above=0.5, then=edits), When(condition, above=-9.0, below=9.0, then=edits[0])]),
    ]
    written = [json.loads(plan.to_json()) for plan in plans]
    clamp = {
        "kind": "clamp",
        "site": "attn_in",
        "layers": [0, 7],
        "direction": vector.tolist(),
        "low": None,
        "high": 0.5,
    }
    return [*written, {"version": 1, "interventions": [clamp]}]


def send(server: Server, seed: int) -> int:
    rng = random.Random(seed)
    plan = mutated(rng, rng.choice(good_plans()))
    text = json.dumps(plan)
    if rng.random() < 0.1:  # and not even JSON
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice('{}[]",:\\x0') + text[at + rng.randint(0, 3) :]
    if rng.random() < 0.5:
        return server.complete(rng.choice([FRANCE, "The"]), vllm_xargs={"midstream": text})[0]
    return server.generate(IDS, extra_args={"midstream": rng.choice([plan, {"plan": plan}, text])})[0]


def test_mutated_plans_leave_nothing_behind(server: Server) -> None:
    """After each batch of them every plain answer is the one before; at the end the gauges are at zero and memory is flat."""
    before, statuses, memory = plain(server), [], 0
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, FUZZED, 50):
            statuses += pool.map(lambda seed: send(server, seed), range(start, min(start + 50, FUZZED)))
            assert plain(server) == before, f"seeds {start} to {start + 49}"
            if memory == 0 and start >= FUZZED // 3:
                memory = server.memory()
    assert {200, 400} <= set(statuses) and statuses.count(200) > len(statuses) // 20
    deadline = time.monotonic() + 60
    while any(left := alive(server)) and time.monotonic() < deadline:
        plain(server)
    assert not left, left
    assert server.memory() - memory < 96 << 20, (memory, server.memory())
    print(
        {status: statuses.count(status) for status in set(statuses)},
        f"{(server.memory() - memory) / 2**20:.0f} MiB grown",
    )


def alive(server: Server) -> dict[str, int]:
    (gauges,) = server.rpc("midstream_gauges")
    return {name: n for name, n in gauges.items() if n and not name.endswith(("_steps", "_growths", "_failures"))}
