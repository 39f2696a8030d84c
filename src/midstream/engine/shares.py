"""Shares out a step among requests whose plans cost time, so that no step takes much longer because of plans.

`plan.strangers` says what a plan costs. All plans from HTTP in one step cost at most `STEP_SECONDS` together: other such requests wait for
a later step, those first that have waited longest. A prompt whose plan would take longer is computed in parts, in every second step
while other requests have prompts to compute, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from midstream.errors import PlanError
from midstream.plan.strangers import step_work
from midstream.plan.work import STEP_SECONDS, StepWork
from midstream.runtime.request import Memory, PlanRequest

FEW = 16  # tokens: a request with no more of them is in each step in which a prompt has to be cut


@dataclass(frozen=True)
class Costly:
    """A request whose plan costs time.

    Attributes:
        tokens: that it has to compute, all its prompt at first.
        begins: whether the coming step is its first.
        may_be_cut: whether its prompt may be computed in parts.
    """

    name: str
    work: StepWork
    tokens: int
    begins: bool
    may_be_cut: bool = True

    @property
    def begin(self) -> float:
        """Seconds that only its first step takes."""
        return self.work.begin if self.begins else 0.0

    @property
    def seconds(self) -> float:
        """Of a step with all its tokens."""
        return self.begin + self.work.step + max(self.tokens - self.work.free, 0) * self.work.row


class Share(NamedTuple):
    """What a step may have.

    Attributes:
        hidden: the requests that have to wait.
        cut: the request that may have no more than `most` tokens; None if there is none. No other request with more than `FEW` tokens, and
            none that has not begun, may be in the step.
    """

    hidden: frozenset[str] = frozenset()
    cut: str | None = None
    most: int = 0


_works: Memory[StepWork] = Memory()


def work_of(config: Any, sampling_params: Any) -> StepWork | None:
    """What a request's plan costs a step; None without a plan."""
    try:
        planned = PlanRequest.of(sampling_params)
        if planned is None:
            return None
        case = planned.wire, planned.num_layers, config.device_config.device_type
        return _works.get(case, lambda: step_work(planned.plan, *case[1:]), lambda _: len(planned.wire))
    except PlanError:  # the worker will refuse the plan
        return None


class StepShares:
    """Shares out one step after another."""

    def __init__(self) -> None:
        self._queue: list[str] = []  # those first that have waited longest
        self._has_cut = False  # in the last step

    def next(self, requests: Iterable[Costly], others_have_prompts: bool) -> Share:
        """The coming step's share. `others_have_prompts`: whether other requests would have to wait while a prompt is cut."""
        left, hidden, cut, most = STEP_SECONDS, set[str](), None, 0
        known = {each.name: each for each in requests}
        queue = [name for name in self._queue if name in known]
        in_order = [known[name] for name in dict.fromkeys([*queue, *known])]
        others = others_have_prompts or sum(each.tokens > FEW for each in in_order) > 1
        for each in in_order:
            room = self._room(each, left)
            if each.tokens <= room or (not each.may_be_cut and left == STEP_SECONDS):
                left -= each.seconds
            elif cut is None and each.may_be_cut and room > 0 and not (self._has_cut and others):
                cut, most, left = each.name, room, 0.0
            else:
                hidden.add(each.name)
        if cut is not None:
            hidden |= {each.name for each in in_order if each.name != cut and (each.tokens > FEW or each.begins)}
        names = [each.name for each in in_order]
        self._queue = [n for n in names if n in hidden] + [n for n in names if n not in hidden]
        self._has_cut = cut is not None
        return Share(frozenset(hidden), cut, most)

    @staticmethod
    def _room(request: Costly, left: float) -> int:
        """How many tokens of a request fit into the rest of a step; in a whole step at least one."""
        found = min(request.tokens, request.work.rows(left - request.begin))
        return max(int(found), int(left == STEP_SECONDS))
