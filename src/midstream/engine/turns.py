"""Steps apart: requests whose traces run in the forward make a step slow, so they get steps of their own and a bounded share of the time.

turns = Turns(share=0.2)
traced = turns.next()            # scheduler, where requests of both kinds are there
turns.begin(output, traced)      # the step is scheduled
turns.end(output)                # its results are there
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

_RETRY_SECONDS = 0.02  # until traced requests that could not begin try again


class Turns:
    """Whose step comes next, by the time that steps have taken.

    After a traced step the other requests are owed `(1 - share) / share` times as long. Async scheduling and pipelines schedule steps
    before earlier ones are over; a step lasts from the end of the one before it.

    Args:
        share: of the time, what traced steps get while there are other requests; above 0 and below 1.
        clock: seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._factor = (1 - share) / share
        self._clock = clock
        self._owed = 0.0
        self._under_way: dict[
            int, tuple[bool, float, Any]
        ] = {}  # by the output's id: traced, when scheduled, the output
        self._ended = -math.inf

    def next(self) -> bool | None:
        """Whether traced requests have the coming step. None: nobody has, so that the steps under way end first.

        A traced step begins alone: in one process with the worker, the scheduler hears of earlier steps only when the host's part of a
        step is over, and would take the traced step's time for theirs.
        """
        under_way = [traced for traced, *_ in self._under_way.values()]
        if self._owed > 0 or any(under_way):  # what a traced step takes is not known before its end
            return False
        return None if under_way else True

    def begin(self, output: Any, traced: bool) -> None:
        """A step of one kind is scheduled, while there are traced requests."""
        if output.total_num_scheduled_tokens:
            self._under_way[id(output)] = traced, self._clock(), output
        elif traced:
            self._owed = _RETRY_SECONDS  # nobody was ready
        else:
            self._owed = 0.0

    def end(self, output: Any) -> None:
        """The step's results are there."""
        if (step := self._under_way.pop(id(output), None)) is None:
            return
        (traced, began, _), now = step, self._clock()
        took, self._ended = now - max(began, self._ended), now
        self._owed = took * self._factor if traced else self._owed - took

    def forget(self) -> None:
        """Begin anew, for requests that are to come: the ends of the steps under way will not be told."""
        self._under_way.clear()
        self._owed, self._ended = 0.0, -math.inf
