"""One step of the engine as midstream sees it: who is in the batch, and where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Scheduled(NamedTuple):
    """One request in the flat batch of a step.

    Attributes:
        request_id: the engine's id.
        start, stop: its rows in the batch.
        computed: how many of its tokens had been computed before.
        place: its row among the logits and samples.
    """

    request_id: str
    start: int
    stop: int
    computed: int
    place: int


@dataclass(frozen=True)
class StepView:
    """A step's batch, in which the requests' tokens lie one after another.

    Attributes:
        request_ids: the scheduled requests in the batch's order.
        counts: `[requests]`, their rows in this step.
        computed: `[requests]`, how many of their tokens had been computed before.
        total: the rows of the batch, with padding.
    """

    request_ids: list[str]
    counts: np.ndarray
    computed: np.ndarray
    total: int

    @cached_property
    def starts(self) -> np.ndarray:
        """`[requests]`, the first row of each."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def requests(self) -> tuple[Scheduled, ...]:
        """The same, request by request."""
        rows = zip(self.request_ids, self.starts.tolist(), self.counts.tolist(), self.computed.tolist(), strict=True)
        return tuple(Scheduled(name, at, at + n, before, i) for i, (name, at, n, before) in enumerate(rows))
