"""The scores that the probes of a step's requests compute: their memory, their way to the host, and the requests that they end.

Legend: T rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from midstream.plan.compile import Profile
from midstream.plan.probes import STOPPED_BY_PROBE, Aggregate, ScoreChunk, ScorePlace
from midstream.plan.selections import Selection
from midstream.plan.values import Plan

# By the probe's name: positions, int64 `[rows]`, ascending; and their scores, float32 `[rows, C]`.
Found = Mapping[str, tuple[np.ndarray, np.ndarray]]


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

    def take(self, found: Found) -> tuple[list[ScoreChunk], str | None]:
        """Take the scores of the next rows.

        Returns:
            the scores up to the token that ends the request, or all; and the `stop_reason` if one does.
        """
        if self.end is not None:  # the step was under way
            return [], None
        kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        ends: list[tuple[int, str]] = []
        for name, (positions, scores) in found.items():
            if name in self._chosen:
                mask = self._chosen[name].mask(positions)
                positions, scores = positions[mask], scores[mask]
            kept[name] = positions, scores
            if name in self._aggregates:
                number = self._aggregates[name].first_stop(scores[:, 0].tolist())
                if number is not None:
                    ends.append((int(positions[number]), name))
        if ends:
            self.end, reason = min(ends)
            kept = {name: (at[at <= self.end], scores[at <= self.end]) for name, (at, scores) in kept.items()}
        chunks = [(name, at.tobytes(), scores.tobytes()) for name, (at, scores) in kept.items() if len(at)]
        return chunks, STOPPED_BY_PROBE + reason if ends else None


class _Part(NamedTuple):
    """Rows of one request with one profile, in the memory of a step.

    Attributes:
        first: where they begin, in elements.
        width: elements of each.
    """

    request: str
    rows: np.ndarray
    positions: np.ndarray
    places: Sequence[ScorePlace]
    first: int
    width: int


class StepScores:
    """The rows of scores of one step: memory that the forward writes, and its copy on the host.

    Args:
        dtype: the model's.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._parts: list[_Part] = []
        self._size = 0

    def add(self, request: str, rows: np.ndarray, positions: np.ndarray, profile: Profile) -> None:
        """Make room for rows of a request that have one profile. `rows`: their numbers in the batch."""
        self._parts.append(_Part(request, rows, positions, profile.scores, self._size, profile.score_width))
        self._size += len(rows) * profile.score_width

    def __bool__(self) -> bool:
        return bool(self._parts)

    def place(self, count: int) -> np.ndarray:
        """int64 `[count]`, the address of each row's scores, once all rows are added; 0 for rows without."""
        self._memory = torch.full((self._size,), float("nan"), dtype=self._dtype, device=self._device)
        start, size = self._memory.data_ptr(), self._memory.element_size()
        places_T = np.zeros(count, np.int64)
        for part in self._parts:
            places_T[part.rows] = start + size * (part.first + np.arange(len(part.rows)) * part.width)
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

    def read(self) -> dict[str, Found]:
        """The scores of each request. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        words = self._memory.view(torch.int16).numpy().view(np.float32)
        size = self._memory.element_size()  # a row is a multiple of 16 bytes
        found: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for request, _, positions, places, first, width in self._parts:
            rows = words[size * first // 4 : size * (first + len(positions) * width) // 4].reshape(len(positions), -1)
            of_request = found.setdefault(request, {})
            for name, offset, classes in places:
                scores = rows[:, size * offset // 4 : size * offset // 4 + classes]
                before = of_request.get(name)
                of_request[name] = (positions, scores) if before is None else _merged(before, (positions, scores))
        return found  # type: ignore[return-value]


def _merged(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of both, by ascending positions."""
    positions, scores = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
    order = np.argsort(positions)
    return positions[order], scores[order]
