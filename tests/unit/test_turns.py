"""Whose step comes next (row I3)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.engine.turns import Turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(tokens: int = 1) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_traced_steps_get_their_share_of_the_time(share: float, depth: int) -> None:
    """With `depth` steps scheduled ahead, as async scheduling and pipelines do, which run one after another."""
    clock, taken, ahead = Clock(), {True: 0.0, False: 0.0}, []
    turns, rng = Turns(share, clock), random.Random(0)
    for _ in range(20_000):
        traced, output = turns.traced_is_next, step()
        turns.begin(output, traced)
        ahead.append((traced, output))
        if len(ahead) == depth:
            traced, output = ahead.pop(0)
            seconds = rng.uniform(0.02, 0.05) if traced else rng.uniform(0.005, 0.01)
            clock.now += seconds
            taken[traced] += seconds
            turns.end(output)
    part = taken[True] / clock.now
    assert part <= share * 1.02
    assert part >= (
        share * 0.85 if share <= 0.2 else 0.3
    )  # one traced step at a time is under way, so large shares are not reached


def test_time_without_steps_counts_for_nobody() -> None:
    clock = Clock()
    turns = Turns(0.2, clock)
    output = step()
    turns.begin(output, True)
    clock.now += 1
    turns.end(output)
    clock.now += 100  # no request at all
    assert not turns.traced_is_next
    for _ in range(4):
        assert not turns.traced_is_next
        turns.begin(output := step(), False)
        clock.now += 1
        turns.end(output)
    assert turns.traced_is_next


def test_a_step_in_which_nobody_was_ready_leaves_the_turn_to_the_other_kind() -> None:
    clock = Clock()
    turns = Turns(0.2, clock)
    turns.begin(step(0), True)
    assert not turns.traced_is_next
    turns.begin(step(0), False)
    assert turns.traced_is_next
    turns.begin(step(0), True)
    turns.begin(output := step(), False)
    assert not turns.traced_is_next
    clock.now += 0.001
    turns.end(output)
    assert turns.traced_is_next


def test_the_time_in_which_the_scheduler_could_not_hear_counts_for_its_step() -> None:
    """In one process with the worker: the host's part of a traced step delays the news of the step before it."""
    clock = Clock()
    turns = Turns(0.2, clock)
    other, traced = step(), step()
    turns.begin(other, False)
    turns.begin(traced, True)
    clock.now = 1.001  # other's results have been there since 0.001
    turns.end(other, at=0.001)
    turns.end(traced, at=1.001)
    for i in range(4):
        assert not turns.traced_is_next
        turns.begin(other := step(), False)
        clock.now += 1
        turns.end(other, at=clock.now if i else -5.0)  # the clock of another host
    assert turns.traced_is_next


def test_an_unknown_step_ends_without_effect() -> None:
    """One that was scheduled when there was only one kind of requests."""
    turns = Turns(0.2, Clock())
    turns.end(step())
    assert turns.traced_is_next
