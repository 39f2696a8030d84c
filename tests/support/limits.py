"""Limits on time and memory that a busy machine does not break, and on the examples of a property."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence


def runs_all() -> bool:
    """Whether `./test all` runs."""
    return os.environ.get("MIDSTREAM_EXAMPLES") == "all"


def examples(count: int) -> int:
    """How many examples Hypothesis tries of a property: all of them with `./test all`, else a quarter."""
    return count if runs_all() else max(20, count // 4)


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
    """Run `window` three times and check what it returns of each process of an engine: `memory` in MiB, and how many `threads` it has.

    A leak grows in every window, and an allocator takes a step in some: the least growth of a process has to be below the limit. If it
    is not, more windows are run, up to `attempts`: an allocator may take a step in each of the first.
    """
    windows = [window() for _ in range(3)]
    while max(map(_least_growth, zip(*windows, strict=True))) >= megabytes and len(windows) < attempts:
        windows.append(window())
    for process in zip(*windows, strict=True):
        assert _least_growth(process) < megabytes, windows
        assert process[0]["threads"] == process[-1]["threads"], windows


def _least_growth(process: Sequence[Mapping[str, int]]) -> int:
    """Of a process's memory from one window to the next."""
    return min(after["memory"] - before["memory"] for before, after in itertools.pairwise(process))


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
