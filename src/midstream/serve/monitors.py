"""The probes of the engine-wide plan: they score every request's tokens, may end a request, and show in the server's metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from midstream.plan import fields
from midstream.plan.probes import Probe, ScoreChunk
from midstream.settings import NAME

# Upper bounds of the histogram: fine between 0 and 1, for probabilities, and coarse beyond, for distances.
BOUNDS = (
    -100.0, -30.0, -10.0, -3.0, -1.0, 0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"),
)  # fmt: skip


class Monitors:
    """Counts the scores and stops of the engine-wide plan's probes, by their names. The counts stay when the plan is removed."""

    def __init__(self) -> None:
        # How many scores are at most each bound and above the one before. NaN is not counted.
        self._counts = defaultdict[str, np.ndarray](lambda: np.zeros(len(BOUNDS), np.int64))
        self._stops = Counter[str]()

    @staticmethod
    def check(probes: Sequence[Probe]) -> None:
        """Raise PlanError for probes that a histogram cannot show."""
        for probe in probes:
            if probe.classes > 1:
                raise fields.refuse(
                    "Probe.weight", f"of {probe.classes} scores a token", "one for a probe of the engine-wide plan"
                )

    def note(self, chunks: Sequence[ScoreChunk], ended_by: str | None) -> None:
        """Count scores that have come for a request. `ended_by`: the name of the probe that has ended the request."""
        if ended_by is not None:
            self._stops[ended_by] += 1
        for name, _, scores in chunks:
            values = np.frombuffer(scores, np.float32)
            values = values[~np.isnan(values)]
            self._counts[name] += np.bincount(np.searchsorted(BOUNDS, values), minlength=len(BOUNDS))

    def metrics(self) -> Iterator[Metric]:
        """The counts in Prometheus form."""
        names = list({**self._counts, **self._stops})
        scores = HistogramMetricFamily(
            f"{NAME}_probe_score", "Scores of tokens by a probe of the engine-wide plan", labels=["probe"]
        )
        stops = CounterMetricFamily(
            f"{NAME}_probe_stops", "Requests that a probe of the engine-wide plan has ended", labels=["probe"]
        )
        for name in names:
            below = self._counts[name].cumsum().tolist()
            bounds = [str(bound) if bound != float("inf") else "+Inf" for bound in BOUNDS]
            scores.add_metric([name], list(zip(bounds, below, strict=True)), None)
            stops.add_metric([name], self._stops[name])
        if names:
            yield from (scores, stops)
