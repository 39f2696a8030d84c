"""Limits on time and memory that a busy machine does not break."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence


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


def least_growth(sizes: Sequence[float]) -> float:
    """The least growth from one size to the next: a leak grows in every window, an allocator takes a step in some."""
    return min(after - before for before, after in itertools.pairwise(sizes))
