"""Finds the requests of a step whose activations have left the finite range, so that they end with an error that says where.

That other requests never compute with such numbers does not depend on this check: see `plans.cache.EditedBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from midstream.sites import NotFinite, Point


class StepRows:
    """The rows of a step, on their way from the device.

    Args:
        codes_T: int32 on the host: 0 for a finite row, `1 + i` for one that `points[i]` made infinite or NaN, -1 for one that became so
            elsewhere. Complete once `ready` returns.
        names: the requests in the order of their rows.
        scheduled: the scheduler's word on the step.
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
