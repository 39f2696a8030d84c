"""Limits on time and memory that a busy machine does not break."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence


def least(measure: Callable[[], float], limit: float, attempts: int = 5) -> float:
    """The first measurement below the limit, or the least of all attempts: other work on the machine only adds to them."""
    found = float("inf")
    for _ in range(attempts):
        found = min(found, measure())
        if found < limit:
            break
    return found


def cpu_seconds_of_children() -> float:
    """Of the processes that this one has started and waited for."""
    times = os.times()
    return times.children_user + times.children_system


def assert_flat(window: Callable[[], Sequence[Mapping[str, int]]], megabytes: float, attempts: int = 12) -> None:
    """Run `window`, which returns what each process of an engine has after it, `memory` in MiB and `threads`, until memory stays.

    A leak grows in every window. An allocator grows in the first ones, in some by as much: no process may grow by `megabytes` in the
    same window, once in all attempts.
    """
    before = window()  # the first allocations
    for _ in range(attempts):
        after = window()
        assert [process["threads"] for process in after] == [process["threads"] for process in before]
        growth = [new["memory"] - old["memory"] for new, old in zip(after, before, strict=True)]
        if max(growth) < megabytes:
            return
        before = after
    raise AssertionError(f"memory grew in each of {attempts} windows, in the last by {growth} MiB")
