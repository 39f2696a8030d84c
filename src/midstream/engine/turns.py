"""Separate steps: traces that run in the forward make a step slow, so they get steps of their own and a bounded share of the time.

turns = StepTurns(share=0.2)
traced = turns.next()            # in the scheduler, while there are requests of both kinds
turns.begin(output, traced)      # when the step is scheduled
turns.end(output)                # when its results have come
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

_RETRY_SECONDS = 0.02  # until traced requests that could not begin try again


class StepTurns:
    """Decides which kind of step comes next, by the duration of earlier steps.

    After a traced step, the other requests get `(1 - share) / share` times its duration. Async scheduling and pipelines schedule steps
    before earlier steps have ended, so a step lasts from the end of the step before it.

    Args:
        share: the share of the time that traced steps get while there are other requests; above 0 and below 1.
        clock: returns seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._factor = (1 - share) / share
        self._clock = clock
        self._owed = 0.0  # seconds, to the other requests
        # By the output's id: whether the step is traced, its start, and the output.
        self._running: dict[int, tuple[bool, float, Any]] = {}
        self._ended = -math.inf

    def next(self) -> bool | None:
        """Whether the coming step is traced. None if no step may start: wait until the running steps have ended.

        A traced step starts alone. In one process with the worker, the scheduler gets the results of earlier steps only after the host's
        part of a step, and would count the traced step's time as theirs.
        """
        running = [traced for traced, *_ in self._running.values()]
        if self._owed > 0 or any(running):  # the duration of a traced step is not known before its end
            return False
        return None if running else True

    def begin(self, output: Any, traced: bool) -> None:
        """A step was scheduled while there are traced requests."""
        if output.total_num_scheduled_tokens:
            self._running[id(output)] = traced, self._clock(), output
        elif traced:
            self._owed = _RETRY_SECONDS  # no traced request could start
        else:
            self._owed = 0.0

    def end(self, output: Any) -> None:
        """The step's results have come."""
        if (step := self._running.pop(id(output), None)) is None:
            return
        (traced, began, _), now = step, self._clock()
        took, self._ended = now - max(began, self._ended), now
        self._owed = took * self._factor if traced else self._owed - took

    def forget(self) -> None:
        """Start again, for later requests. `end` will not be called for the running steps."""
        self._running.clear()
        self._owed, self._ended = 0.0, -math.inf
