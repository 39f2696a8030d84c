"""One step of the engine as midstream sees it: who is in the batch, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scheduled:
    """One request in the flat batch of a step.

    Attributes:
        request_id: the engine's id.
        start, stop: its rows in the batch.
        computed: how many of its tokens had been computed before.
        index: its row among the logits and samples.
    """

    request_id: str
    start: int
    stop: int
    computed: int
    index: int


@dataclass(frozen=True)
class StepView:
    """A step's batch: the scheduled requests in the batch's order, and how many rows it has with padding."""

    requests: tuple[Scheduled, ...]
    total: int


def lay_out(request_ids: Sequence[str], counts: Sequence[int], computed: Sequence[int], total: int) -> StepView:
    """The view of a batch in which the requests' tokens lie one after another."""
    scheduled, start = [], 0
    for index, (name, count, before) in enumerate(zip(request_ids, counts, computed, strict=True)):
        scheduled.append(Scheduled(name, start, start + int(count), int(before), index))
        start += int(count)
    return StepView(tuple(scheduled), total)
