"""The scores that the probes of a step's requests compute: their memory, their way to the host, and the requests that they end.

Legend: T rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from midstream.errors import NeverReachedError
from midstream.plan.compile import Profile
from midstream.plan.probes import STOPPED_BY_PROBE, Aggregate, ProbeStop, ScoreChunk, ScorePlace
from midstream.plan.selections import Selection
from midstream.plan.values import Plan
from midstream.ranks.link import Link


class ProbeScores(NamedTuple):
    """A probe's scores of some rows of one request, by ascending positions.

    Attributes:
        positions: int64 `[rows]`, as bytes.
        scores: as of `ScoreChunk`.
        firsts: the first score of each row.
    """

    positions: bytes
    scores: bytes
    firsts: list[float]

    @classmethod
    def of(cls, positions: np.ndarray, scores_RC: np.ndarray) -> ProbeScores:
        return cls(positions.tobytes(), scores_RC.tobytes(), scores_RC[:, 0].tolist())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions, and the scores as float32 `[rows, words]`."""
        positions = np.frombuffer(self.positions, np.int64)
        return positions, np.frombuffer(self.scores, np.float32).reshape(len(positions), -1)

    def among(self, mask: Callable[[np.ndarray], np.ndarray]) -> ProbeScores:
        """The scores at the positions that `mask` selects."""
        positions, scores_RC = self.arrays()
        keep = mask(positions)
        return ProbeScores.of(positions[keep], scores_RC[keep])

    def __or__(self, other: ProbeScores) -> ProbeScores:
        each = self.arrays(), other.arrays()
        positions, scores_RC = (np.concatenate(both) for both in zip(*each, strict=True))
        order = np.argsort(positions)
        return ProbeScores.of(positions[order], scores_RC[order])


class RequestScores:
    """The probes of one request, and what they have found so far.

    Attributes:
        scored: positions below this have been given places for their scores.
        stages: the pipeline stages that compute scores.
        end: the position of the token at which a probe has ended the request; None if none has.
    """

    def __init__(self, plan: Plan, prompt_length: int, stages: Collection[int] = (0,)) -> None:
        self.scored, self.stages = 0, stages
        self.end: int | None = None
        self._aggregates = {probe.name: Aggregate(probe) for probe in plan.probes if probe.stops}
        # All generated tokens have one profile, so the choice of a selector among them is made here.
        self._chosen = {
            probe.name: Selection.of(probe.positions, prompt_length)
            for probe in plan.probes
            if probe.selects_generated and not isinstance(probe.positions, str)
        }

    def take(self, found: dict[str, ProbeScores]) -> tuple[list[ScoreChunk], ProbeStop | None]:
        """Take the scores of the next rows, by their probes' names.

        Returns:
            the scores up to the token that ends the request, or all; and the end, if a probe ends the request.
        """
        if self.end is not None:  # the step was queued before a probe ended the request
            return [], None
        for name, selection in self._chosen.items():
            if name in found:
                found[name] = found[name].among(selection.mask)
        stops: list[ProbeStop] = []
        for name, aggregate in self._aggregates.items():
            if name in found and (number := aggregate.first_stop(found[name].firsts)) is not None:
                stops.append(ProbeStop(int(found[name].arrays()[0][number]), STOPPED_BY_PROBE + name))
        stop = min(stops, default=None)
        if stop is not None:
            self.end = end = stop.position
            found = {name: each.among(lambda positions: positions <= end) for name, each in found.items()}
        chunks = [(name, each.positions, each.scores) for name, each in found.items() if each.positions]
        return chunks, stop


@dataclass
class ScoreGroup:
    """Rows of a step whose scores have the same places.

    Attributes:
        width: elements of each row.
        first: where the rows begin, in elements.
        rows, positions: of each row, its number in the batch and its position in its request.
        runs: `(request, start, stop)`: which of the rows are a request's.
    """

    places: Sequence[ScorePlace]
    width: int
    first: int = 0
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    runs: list[tuple[str, int, int]] = field(default_factory=list)

    def found(self, memory: torch.Tensor) -> Iterator[tuple[str, str, ProbeScores]]:
        """The scores in a step's memory, which is on the host, with the names of their request and their probe."""
        words, item = memory.view(torch.int16).numpy().view(np.float32), memory.element_size()
        start, count = item * self.first // 4, len(self.rows)  # a row is a multiple of 16 bytes
        rows = words[start : start + item * count * self.width // 4].reshape(count, -1)
        positions = np.array(self.positions, np.int64).tobytes()
        for name, offset, each in self.places:
            scores_RC = rows[:, item * offset // 4 : item * offset // 4 + each]
            scores, firsts = scores_RC.tobytes(), scores_RC[:, 0].tolist()
            for request, first, stop in self.runs:
                of_run = scores[4 * each * first : 4 * each * stop]
                yield request, name, ProbeScores(positions[8 * first : 8 * stop], of_run, firsts[first:stop])


# One pipeline stage's scores of a step: their memory, the groups in it, and `StepScores.errors`. The link between stages can send it.
StageScores = tuple[torch.Tensor, list[ScoreGroup], dict[str, str]]


class StepScores:
    """The rows of scores of one step: memory that the forward writes, and its copy on the host.

    Args:
        dtype: the model's.

    Attributes:
        errors: requests whose programs have failed in the step -> why; once `read` is called, those of all stages.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.errors: dict[str, str] = {}
        self._device, self._dtype = device, dtype
        self._groups: dict[tuple[ScorePlace, ...], ScoreGroup] = {}
        self._memory = torch.empty(0, dtype=dtype)
        self._copied: torch.cuda.Event | None = None

    def add(self, request: str, rows: Sequence[int], positions: Sequence[int], profile: Profile) -> None:
        """Make room for rows of a request that have one profile. `rows`: their numbers in the batch."""
        group = self._groups.get(profile.scores)
        if group is None:
            group = self._groups[profile.scores] = ScoreGroup(profile.scores, profile.score_width)
        start = len(group.rows)
        group.rows += rows
        group.positions += positions
        group.runs.append((request, start, start + len(rows)))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def place(self, count: int) -> np.ndarray:
        """Allocate memory once all rows are added. Returns int64 `[count]`, the address of each row's scores; 0 for a row without."""
        size = 0
        for group in self._groups.values():
            group.first, size = size, size + len(group.rows) * group.width
        self._memory = torch.full((size,), float("nan"), dtype=self._dtype, device=self._device)
        start, item = self._memory.data_ptr(), self._memory.element_size()
        places_T = np.zeros(count, np.int64)
        for group in self._groups.values():
            places_T[group.rows] = start + item * (group.first + np.arange(len(group.rows)) * group.width)
        return places_T

    @property
    def queued(self) -> StageScores:
        """The scores, complete once the forward has run."""
        return self._memory, list(self._groups.values()), self.errors

    @torch.inference_mode()
    def copy(self) -> None:
        """Begin to copy the scores to the host. The forward has been queued."""
        if self._memory.is_cuda:
            host = torch.empty(self._memory.shape, dtype=self._dtype, pin_memory=True)
            host.copy_(self._memory, non_blocking=True)
            self._memory, self._copied = host, torch.cuda.Event()
            self._copied.record()

    def read(self, others: Iterable[StageScores] = ()) -> dict[str, dict[str, ProbeScores]]:
        """The scores of each request, by their probes' names. Waits for the copy. `others`: of other stages, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        found: dict[str, dict[str, ProbeScores]] = {}
        for memory, groups, errors in (self.queued, *others):
            self.errors |= errors
            for request, name, new in chain.from_iterable(group.found(memory) for group in groups):
                of_request = found.setdefault(request, {})
                of_request[name] = of_request[name] | new if name in of_request else new
        return found


class ScoreLink:
    """Brings the scores of all pipeline stages to the last one, whose output the scheduler gets.

    All stages run the same steps with the same requests, so they agree on which stages have scores in a step, and count these steps alike.

    Args:
        link: to the other stages; None if there are none.
    """

    def __init__(self, rank: int, size: int, link: Link | None) -> None:
        self._rank, self._last, self._link = rank, size - 1, link
        self._step = self._period = 0

    @property
    def _body(self) -> str:
        return f"scores {self._period}"

    def bring(
        self, step: StepScores, stages: Collection[int]
    ) -> Callable[[], dict[str, dict[str, ProbeScores]]] | None:
        """Bring the scores of a step whose forward is queued. On the last stage, returns a function that finds the scores of all stages.

        Args:
            step: this stage's scores.
            stages: the stages that have scores in the step.
        """
        if self._link is None:
            step.copy()
            return step.read
        self._step += 1
        if self._rank != self._last:
            if self._rank in stages:
                self._link.publish(self._body, self._step, step.queued, readers=[self._last])
            return None
        step.copy()
        others = sorted(stage for stage in stages if stage != self._last)
        fetches = [self._link.fetch(stage, self._body, self._step) for stage in others]

        def find() -> dict[str, dict[str, ProbeScores]]:
            with suppress(NeverReachedError):  # all requests with probes have ended while the step was under way
                return step.read([fetch.wait() for fetch in fetches])
            return {}

        return find

    def end(self) -> None:
        """All requests with probes are over."""
        if self._link is not None:
            self._link.end(self._body, NeverReachedError("the requests with probes are over"))
            self._period += 1
