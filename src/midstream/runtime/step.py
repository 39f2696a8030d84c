"""One step of the engine: its batch, whether the activations stayed finite, and which requests end with it. Also finds repeated batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.plan.probes import ScoreChunk
from midstream.runtime.scores import ProbeStop
from midstream.runtime.tables import RowProfiles
from midstream.sites import NotFinite, Point


class FiniteCheck:
    """Finds the requests of a step whose activations became infinite or NaN, so that they end with an error that says where.

    Other requests never compute with such numbers even without this check: see `engine.prefix_cache`.

    Args:
        codes_T: int32 on the host: 0 for a finite row, `1 + i` for a row that `points[i]` made infinite or NaN, -1 for a row that became
            so elsewhere. Complete once `ready` returns.
        names: the requests in the order of their rows.
        scheduled: the scheduler's output for the step.
    """

    def __init__(
        self,
        codes_T: torch.Tensor,
        ready: Callable[[], object],
        points: Sequence[Point],
        names: Sequence[str],
        scheduled: Any,
    ) -> None:
        self._codes_T, self._ready, self._points = codes_T, ready, points
        self._names, self._scheduled = names, scheduled

    def not_finite(self) -> dict[str, NotFinite]:
        """The requests that have such rows. Waits for the device."""
        self._ready()
        codes = self._codes_T.numpy()
        if not codes.any():
            return {}
        counts = [self._scheduled.num_scheduled_tokens[name] for name in self._names]
        starts = np.cumsum([0, *counts])
        cached = self._scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {begun.req_id: begun.num_computed_tokens for begun in self._scheduled.scheduled_new_reqs}
        found: dict[str, NotFinite] = {}
        for name, start, count in zip(self._names, starts.tolist(), counts, strict=False):
            rows = codes[start : start + count].tolist()
            if any(rows):
                first = min((code for code in rows if code > 0), default=-1)
                point = self._points[first - 1] if first > 0 else None
                found[name] = NotFinite(computed[name] + rows.index(first), point)
        return found


@dataclass
class StepEnds:
    """The requests that end with a step, and the traces. A worker sends it to the scheduler with the step's output.

    Attributes:
        stops: requests whose trace stopped them; the token of this step is their last.
        done: requests that go on without their trace, which is over.
        scores: request -> new scores of its probes.
        probe_stops: the requests that a probe has ended; the token of this step is not theirs any more.
        errors: request -> why the worker ends it: its plan cannot be carried out, or its activations are not finite.
    """

    stops: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    scores: dict[str, list[ScoreChunk]] = field(default_factory=dict)
    probe_stops: dict[str, ProbeStop] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class RequestEnd(NamedTuple):
    """The end of a request. The scheduler sends it to the workers with the next step.

    Attributes:
        tokens: how many it had, prompt included.
        error: why the engine ended it, if it did.
    """

    tokens: int
    error: str | None = None


@dataclass
class RepeatedBatch:
    """A batch in which every request generates one token: the next step usually has the same requests.

    Attributes:
        requests: in the scheduler's order.
        acting: the sites in the graphs at which plans act in it, and the programs there.
        active: whether a plan acts in it.
        hooked: whether hooks may have to act.
        laid_out: the requests in the runner's order, once it has laid them out.
        rows: the batch's rows, from then on.
    """

    requests: list[str]
    acting: frozenset[Any]
    active: bool
    hooked: bool
    laid_out: list[str] = field(default_factory=list)
    rows: RowProfiles | None = None

    def repeats(self, scheduler_output: Any) -> bool:
        """Whether the coming step is this batch again, one token further."""
        cached = scheduler_output.scheduled_cached_reqs
        return (
            cached.req_ids == self.requests
            and scheduler_output.total_num_scheduled_tokens == len(self.requests)
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.finished_req_ids
            and not cached.resumed_req_ids  # after a reset of the prefix cache, requests begin again between two steps
        )

    def is_laid_out(self, request_ids: Sequence[str], total: int) -> bool:
        """Whether `rows` are of a batch with these requests, in this order, and as much padding."""
        return self.rows is not None and self.laid_out == request_ids and len(self.rows.profile_T) == total
