"""What plans take of each step (row F6): the shares of a step, and vLLM's own scheduler with them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from midstream.engine.shares import FEW, Costly, StepShares
from midstream.plan.work import STEP_SECONDS, StepWork


def costly(name: str, step: float, row: float = 0.0, tokens: int = 1, begin: float = 0.0) -> Costly:
    """Shares of a step in hundredths."""
    unit = STEP_SECONDS / 100
    return Costly(name, StepWork(begin * unit, step * unit, row * unit), tokens, begin > 0)


def taken(share, requests) -> float:
    """What the step takes, in hundredths."""
    total = 0.0
    for each in requests:
        if each.name in share.hidden or (share.cut not in (None, each.name) and (each.tokens > FEW or each.begins)):
            continue
        total += each.fixed + (share.most if each.name == share.cut else each.tokens) * each.work.row
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
    assert seen[0].most == 90 and "long" in seen[1].hidden and "short" not in seen[1].hidden | seen[2].hidden
    alone = StepShares()
    assert [alone.next([long, short], False).cut for _ in range(3)] == ["long"] * 3


def test_what_fits_into_no_step_runs_alone_token_by_token() -> None:
    share = StepShares().next([costly("a", 99, 50, 300)], False)
    assert (share.cut, share.most) == ("a", 1)


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
