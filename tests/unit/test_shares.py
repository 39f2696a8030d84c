"""What plans take of each step (row F6): the shares of a step, and vLLM's own scheduler with them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import vllm
from test_plan_refused import BLOCK, BUDGET, PROMPT, finish
from test_plan_refused import scheduler as scheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request
from written_programs import program

from midstream import Plan
from midstream.engine.shares import FEW, Costly, StepShares
from midstream.plan.steps import INPUT, Ref
from midstream.plan.strangers import step_work
from midstream.plan.values import Apply
from midstream.plan.work import STEP_SECONDS, StepWork
from midstream.runtime.request import PlanRequest, packed


def costly(name: str, step: float, row: float = 0.0, tokens: int = 1, begin: float = 0.0, plan: str = "") -> Costly:
    """Shares of a step in hundredths."""
    unit = STEP_SECONDS / 100
    return Costly(name, StepWork(begin * unit, step * unit, row * unit), plan or name, tokens, begin > 0)


def taken(share, requests) -> float:
    """What the step takes, in hundredths."""
    total = 0.0
    for each in requests:
        if each.name in share.hidden or (share.cut not in (None, each.name) and (each.tokens > FEW or each.begins)):
            continue
        total += (
            each.begins * each.work.begin
            + each.work.step
            + (share.most if each.name == share.cut else each.tokens) * each.work.row
        )
    return 100 * total / STEP_SECONDS


def test_plans_that_fit_into_a_step_share_it_as_they_are() -> None:
    share = StepShares().next([costly("a", 40, 0.1, 300), costly("b", 20), costly("c", 0, 0.0, 5000)], True)
    assert share == (frozenset(), None, 0)


def test_requests_beyond_a_step_wait_their_turn() -> None:
    shares, seen = StepShares(), Counter[str]()
    requests = [costly(name, 40) for name in "abcde"]
    for _ in range(50):
        share = shares.next(requests, False)
        assert taken(share, requests) < 100.001
        seen.update(each.name for each in requests if each.name not in share.hidden)
    assert set(seen.values()) == {20}, "two at a time, each as often"


def test_a_long_prompt_is_cut_and_others_get_every_second_step() -> None:
    shares = StepShares()
    long, short = costly("long", 10, 1, 300), costly("short", 5, 0.5)
    seen = [shares.next([long, short], True) for _ in range(4)]
    assert [share.cut for share in seen] == ["long", None, "long", None]
    assert all(taken(share, [long, short]) < 100.001 for share in seen)
    assert seen[0].most in (89, 90) and seen[1].hidden == {"long"}
    alone = StepShares()
    assert [alone.next([long, short], False).cut for _ in range(3)] == ["long"] * 3


def test_requests_with_one_plan_run_together_and_pay_once() -> None:
    requests = [costly(f"r{i}", 60, 0.01, 10, begin=30, plan="p") for i in range(20)]
    assert not StepShares().next(requests, False).hidden
    assert len(StepShares().next([costly(f"r{i}", 60, 0.01, 10, begin=30) for i in range(20)], False).hidden) == 19


def test_rows_that_cost_nothing_are_shared_by_requests_with_one_plan() -> None:
    work = StepWork(0.0, STEP_SECONDS / 2, STEP_SECONDS / 1000, 512)
    requests = [Costly(f"r{i}", work, "p", 300, False) for i in range(6)]
    share = StepShares().next(requests, False)
    taken = sum(each.tokens for each in requests if each.name not in share.hidden and each.name != share.cut)
    assert share.cut is not None and taken + share.most <= 512 + 500


def test_what_fits_into_no_step_runs_alone_token_by_token() -> None:
    share = StepShares().next([costly("a", 99, 50, 300)], False)
    assert (share.cut, share.most) == ("a", 1)


def test_plans_that_begin_leave_time_for_others_first_tokens() -> None:
    shares, seen, waiting = StepShares(), list[int](), {f"r{i}": costly(f"r{i}", 1, begin=40) for i in range(8)}
    for _ in range(12):
        share = shares.next(waiting.values(), True)
        begun = waiting.keys() - share.hidden
        seen.append(len(begun))
        for name in begun:
            del waiting[name]
    assert seen == [2, 0, 0] * 4, "of three steps together, no more than a step's time"


def test_small_plans_that_begin_in_every_step_do_not_keep_a_large_one_waiting() -> None:
    shares, large, small = StepShares(), costly("large", 1, begin=95), itertools.count()
    hidden = [shares.next([costly(f"s{next(small)}", 1, begin=10), large], True).hidden for _ in range(4)]
    assert ["large" in each for each in hidden] == [True, True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_no_step_takes_more_and_every_request_ends(seed: int) -> None:
    """Requests of strangers that come and go, each of which fits into a step with one token."""
    rng, shares = random.Random(seed), StepShares()
    alive: dict[str, list[float]] = {}  # step, row, begin, tokens to compute, steps without any
    for number in range(400):
        if rng.random() < 0.4 and number < 300:
            step, begin = rng.random() ** 3 * 50, rng.choice([0.01, rng.random() * 45])
            alive[f"r{number}"] = [step, rng.choice([0.0, rng.random() * 4]), begin, rng.randint(1, 400), 0]
        requests = [
            costly(name, step, row, int(tokens), begin) for name, (step, row, begin, tokens, _) in alive.items()
        ]
        share = shares.next(requests, rng.random() < 0.5)
        assert taken(share, requests) < 100.001
        for each in requests:
            cut_out = share.cut not in (None, each.name) and (each.tokens > FEW or each.begins)
            if each.name in share.hidden or cut_out:
                alive[each.name][4] += 1
                assert alive[each.name][4] < 200, "it waits without end"
                continue
            alive[each.name][2:] = [0, each.tokens - (share.most if each.name == share.cut else each.tokens), 0]
            if alive[each.name][3] <= 0:
                del alive[each.name]
    assert len(alive) < 40


# ------------------------------------------------------------------------------------------------------ vLLM's scheduler


def dear() -> Plan:
    """About 10 ms for each token."""
    steps = [("cat.default", ((INPUT,) * 256, 1)), *[("sin.default", (Ref(0),))] * 5]
    return Plan.of(Apply("resid_post", layers=[3], program=program(*steps, result=INPUT, width=256)))


def asked(name: str, plan: Plan | None = None, shares: bool = True, first: int = 10) -> Request:
    extra = None
    if plan is not None:
        carried = PlanRequest(packed(plan), 8, checked=True, shares=shares)
        extra = carried.for_scheduler(PROMPT, 8, "cpu").to_extra_args()
    sampling = vllm.SamplingParams(max_tokens=4, extra_args=extra)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(range(first, first + PROMPT)), sampling, None, block_hasher=hasher)


def steps_of(scheduler: Any, count: int) -> list[dict[str, int]]:
    """How many tokens of each request are in the coming steps."""
    found = []
    for _ in range(count):
        step = scheduler.schedule()
        found.append(dict(step.num_scheduled_tokens))
        finish(scheduler, step)
    return found


def test_a_long_prompt_with_a_dear_plan_is_cut_to_what_a_step_allows(scheduler: Any) -> None:
    work = step_work(dear(), 8, "cpu")
    most = work.free + int((STEP_SECONDS - work.step) / work.row)
    assert 2 < most < 10
    scheduler.add_request(asked("a", dear()))
    steps = steps_of(scheduler, 10)
    assert all(0 < step["a"] <= most + 1 for step in steps) and scheduler.max_num_scheduled_tokens == BUDGET


def test_the_protection_matters_a_plan_that_does_not_share_takes_the_whole_step(scheduler: Any) -> None:
    scheduler.add_request(asked("a", dear(), shares=False))
    assert steps_of(scheduler, 1) == [{"a": BUDGET}]


def test_a_neighbour_has_its_steps_beside_dear_plans(scheduler: Any) -> None:
    """Strangers with dear plans come first, and then somebody with a plain prompt."""
    for number in range(3):
        scheduler.add_request(asked(f"dear {number}", dear(), first=10 + 200 * number))
    steps_of(scheduler, 3)
    scheduler.add_request(asked("plain", first=900))
    steps = steps_of(scheduler, 7)
    for step in steps:
        assert sum(tokens for name, tokens in step.items() if name.startswith("dear")) < 10
    assert sum(step.get("plain", 0) for step in steps) > 90, steps
    assert all(sum(each.get("plain", 0) for each in pair) >= 24 for pair in list(itertools.pairwise(steps))[:3])


def test_dear_plans_take_turns(scheduler: Any) -> None:
    for number in range(3):
        scheduler.add_request(asked(f"dear {number}", dear(), first=10 + 200 * number))
    seen = Counter(name for step in steps_of(scheduler, 12) for name in step)
    assert set(seen) == {"dear 0", "dear 1", "dear 2"} and max(seen.values()) - min(seen.values()) <= 1
