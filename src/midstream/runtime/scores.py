"""The scores that the probes of a step's requests compute: their memory, their way to the host, and the requests that they end.

Legend: T rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from midstream.plan.compile import Profile
from midstream.plan.probes import STOPPED_BY_PROBE, Aggregate, ScoreChunk, ScorePlace
from midstream.plan.selections import Selection
from midstream.plan.values import Plan


class Found(NamedTuple):
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
    def of(cls, positions: np.ndarray, scores_RC: np.ndarray) -> Found:
        return cls(positions.tobytes(), scores_RC.tobytes(), scores_RC[:, 0].tolist())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions, and the scores as float32 `[rows, words]`."""
        positions = np.frombuffer(self.positions, np.int64)
        return positions, np.frombuffer(self.scores, np.float32).reshape(len(positions), -1)

    def among(self, mask: Callable[[np.ndarray], np.ndarray]) -> Found:
        """Those at the positions that `mask` selects."""
        positions, scores_RC = self.arrays()
        keep = mask(positions)
        return Found.of(positions[keep], scores_RC[keep])

    def __or__(self, other: Found) -> Found:
        each = self.arrays(), other.arrays()
        positions, scores_RC = (np.concatenate(both) for both in zip(*each, strict=True))
        order = np.argsort(positions)
        return Found.of(positions[order], scores_RC[order])


class RequestScores:
    """The probes of one request, and what they have found so far.

    Attributes:
        scored: positions below this have had places for their scores.
        end: the position of the token at which a probe has ended the request; None if none has.
    """

    def __init__(self, plan: Plan, prompt_length: int) -> None:
        self.scored = 0
        self.end: int | None = None
        self._aggregates = {probe.name: Aggregate(probe) for probe in plan.probes if probe.stops}
        # All generated tokens have one profile, so the choice of a selector among them is made here.
        self._chosen = {
            probe.name: Selection.of(probe.positions, prompt_length)
            for probe in plan.probes
            if probe.selects_generated and not isinstance(probe.positions, str)
        }

    def take(self, found: dict[str, Found]) -> tuple[list[ScoreChunk], str | None]:
        """Take the scores of the next rows, by their probes' names.

        Returns:
            the scores up to the token that ends the request, or all; and the `stop_reason` if one does.
        """
        if self.end is not None:  # the step was under way
            return [], None
        for name, selection in self._chosen.items():
            if name in found:
                found[name] = found[name].among(selection.mask)
        ends: list[tuple[int, str]] = []
        for name, aggregate in self._aggregates.items():
            if name in found and (number := aggregate.first_stop(found[name].firsts)) is not None:
                ends.append((int(found[name].arrays()[0][number]), name))
        reason = None
        if ends:
            self.end, reason = end, _ = min(ends)
            found = {name: each.among(lambda positions: positions <= end) for name, each in found.items()}
        chunks = [(name, each.positions, each.scores) for name, each in found.items() if each.positions]
        return chunks, STOPPED_BY_PROBE + reason if reason is not None else None


class _Group:
    """Rows of a step whose scores have the same places.

    Attributes:
        width: elements of each row.
        first: where the rows begin, in elements.
        rows, positions: of each row, its number in the batch and its position in its request.
        runs: `(request, start, stop)`: which of the rows are a request's.
    """

    def __init__(self, places: Sequence[ScorePlace], width: int) -> None:
        self.places, self.width, self.first = places, width, 0
        self.rows: list[int] = []
        self.positions: list[int] = []
        self.runs: list[tuple[str, int, int]] = []


class StepScores:
    """The rows of scores of one step: memory that the forward writes, and its copy on the host.

    Args:
        dtype: the model's.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._groups: dict[tuple[ScorePlace, ...], _Group] = {}

    def add(self, request: str, rows: Sequence[int], positions: Sequence[int], profile: Profile) -> None:
        """Make room for rows of a request that have one profile. `rows`: their numbers in the batch."""
        group = self._groups.get(profile.scores)
        if group is None:
            group = self._groups[profile.scores] = _Group(profile.scores, profile.score_width)
        start = len(group.rows)
        group.rows += rows
        group.positions += positions
        group.runs.append((request, start, start + len(rows)))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def place(self, count: int) -> np.ndarray:
        """int64 `[count]`, the address of each row's scores, once all rows are added; 0 for rows without."""
        size = 0
        for group in self._groups.values():
            group.first, size = size, size + len(group.rows) * group.width
        self._memory = torch.full((size,), float("nan"), dtype=self._dtype, device=self._device)
        start, item = self._memory.data_ptr(), self._memory.element_size()
        places_T = np.zeros(count, np.int64)
        for group in self._groups.values():
            places_T[group.rows] = start + item * (group.first + np.arange(len(group.rows)) * group.width)
        return places_T

    @torch.inference_mode()
    def copy(self) -> None:
        """Begin to copy the scores to the host. The forward has been queued."""
        self._copied: torch.cuda.Event | None = None
        if self._memory.is_cuda:
            host = torch.empty(self._memory.shape, dtype=self._dtype, pin_memory=True)
            host.copy_(self._memory, non_blocking=True)
            self._memory, self._copied = host, torch.cuda.Event()
            self._copied.record()

    def read(self) -> dict[str, dict[str, Found]]:
        """The scores of each request, by their probes' names. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        words = self._memory.view(torch.int16).numpy().view(np.float32)
        item = self._memory.element_size()  # a row is a multiple of 16 bytes
        found: dict[str, dict[str, Found]] = {}
        for group in self._groups.values():
            count = len(group.rows)
            rows = words[item * group.first // 4 : item * (group.first + count * group.width) // 4].reshape(count, -1)
            positions = np.array(group.positions, np.int64).tobytes()
            for name, offset, words_each in group.places:
                scores_RC = rows[:, item * offset // 4 : item * offset // 4 + words_each]
                scores, firsts = scores_RC.tobytes(), scores_RC[:, 0].tolist()
                for request, start, stop in group.runs:
                    of_request = found.setdefault(request, {})
                    new = Found(
                        positions[8 * start : 8 * stop],
                        scores[4 * words_each * start : 4 * words_each * stop],
                        firsts[start:stop],
                    )
                    of_request[name] = of_request[name] | new if name in of_request else new
        return found
