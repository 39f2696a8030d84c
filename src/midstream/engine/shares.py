"""Shares out a step among requests whose plans cost time, so that no step takes much longer because of plans.

`plan.strangers` says what a plan costs. All plans from HTTP in one step cost at most `STEP_SECONDS` together: further requests wait for a
later step, and those that have waited longest come first. A prompt whose plan would take longer is computed in parts, only in every
second step while other requests have prompts to compute. Plans take time once when they begin: all that begin within three steps take at
most `STEP_SECONDS` together, since a first token waits for three steps: the running one, the next one, which vLLM has scheduled already,
and its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from midstream.plan.work import STEP_SECONDS, StepWork

FEW = 16  # tokens: a running request with at most so many also runs in steps in which a prompt is cut


@dataclass(frozen=True)
class Costly:
    """A request whose plan costs time.

    Attributes:
        plan: a key that equal plans share. Requests with one plan run together.
        tokens: how many it has to compute; at first its whole prompt.
        begins: whether the coming step is its first.
        may_be_cut: whether its prompt may be computed in parts.
    """

    name: str
    work: StepWork
    plan: Hashable
    tokens: int
    begins: bool
    may_be_cut: bool = True


class Share(NamedTuple):
    """Which requests may be in a step.

    Attributes:
        hidden: the requests that have to wait.
        cut: the request that may have no more than `most` tokens; None if there is none. No other request with more than `FEW` tokens, and
            none that has not begun, may be in the step.
    """

    hidden: frozenset[str] = frozenset()
    cut: str | None = None
    most: int = 0


_MOST_LOADED = 16


class StepShares:
    """Shares out one step after another."""

    def __init__(self) -> None:
        self._queue: list[str] = []  # the requests that have waited longest come first
        self._has_cut = False  # in the last step
        self._loaded: dict[Hashable, None] = {}  # the plans that began last, which need not be compiled again
        self._begun: deque[float] = deque(maxlen=2)  # seconds that plans took to begin, in each of the last steps

    def next(self, requests: Iterable[Costly], others_have_prompts: bool) -> Share:
        """The coming step's share. `others_have_prompts`: whether other requests would have to wait while a prompt is cut."""
        step, hidden, cut, most = _Step(self._loaded, sum(self._begun)), set[str](), None, 0
        known = {each.name: each for each in requests}
        queue = [name for name in self._queue if name in known]
        in_order = [known[name] for name in dict.fromkeys([*queue, *known])]
        others = others_have_prompts or sum(each.tokens > FEW for each in in_order) > 1
        for each in in_order:
            room = step.room(each)
            if not step.may_begin(each):  # no later request may begin a plan either: it would take this one's time
                hidden.add(each.name)
                step.close()
            elif cut is None and (each.tokens <= room or (not each.may_be_cut and step.is_empty)):
                step.take(each)
            elif cut is None and each.may_be_cut and room > 0 and not (self._has_cut and others):
                cut, most = each.name, room
                step.begin(each)
            else:
                hidden.add(each.name)
        if cut is not None:
            hidden |= {each.name for each in in_order if each.name != cut and (each.tokens > FEW or each.begins)}
        names = [each.name for each in in_order]
        self._queue = [n for n in names if n in hidden] + [n for n in names if n not in hidden]
        self._has_cut = cut is not None
        self._begun.append(step.begun)
        for plan in list(self._loaded)[:-_MOST_LOADED]:
            del self._loaded[plan]
        return Share(frozenset(hidden), cut, most)


class _Step:
    """What is left of a step.

    Args:
        loaded: the plans that need not be compiled; `begin` adds to them.
        begun_before: the seconds that plans took to begin in the last steps.

    Attributes:
        begun: the seconds that plans take to begin in this step.
    """

    def __init__(self, loaded: dict[Hashable, None], begun_before: float) -> None:
        self._left, self._loaded = STEP_SECONDS, loaded
        self._begun_before, self.begun, self._is_closed = begun_before, 0.0, False
        self._free: dict[Hashable, int] = {}  # plan -> how many further rows cost nothing in the step

    @property
    def is_empty(self) -> bool:
        return not self._free

    def _begin(self, request: Costly) -> float:
        """The seconds that the request's plan takes to begin in this step."""
        return request.work.begin if request.begins and request.plan not in self._loaded else 0.0

    def may_begin(self, request: Costly) -> bool:
        begin, before = self._begin(request), self._begun_before + self.begun
        return not begin or (not self._is_closed and (not before or before + begin <= STEP_SECONDS))

    def close(self) -> None:
        """From now on no plan may begin."""
        self._is_closed = True

    def begin(self, request: Costly) -> None:
        """Count the time that the request's plan takes to begin."""
        self.begun += self._begin(request)
        self._loaded[request.plan] = None

    def _fixed(self, request: Costly) -> float:
        """The seconds that the request takes whatever the number of its tokens."""
        return self._begin(request) + (0.0 if request.plan in self._free else request.work.step)

    def room(self, request: Costly) -> int:
        """How many tokens of a request fit in; in an empty step at least one."""
        left = self._left - self._fixed(request)
        if left < 0:
            return int(self.is_empty)
        free, row = self._free.get(request.plan, request.work.free), request.work.row
        return max(min(request.tokens, free + int(left / row)) if row else request.tokens, int(self.is_empty))

    def take(self, request: Costly) -> None:
        """Put the request into the step, with all its tokens."""
        free = self._free.get(request.plan, request.work.free)
        self._left -= self._fixed(request) + max(request.tokens - free, 0) * request.work.row
        self._free[request.plan] = max(free - request.tokens, 0)
        self.begin(request)
