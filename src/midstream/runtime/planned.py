"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from midstream.capture.rows import Piece
from midstream.plan.captures import Layout
from midstream.runtime.loaded_plans import LoadedPlan
from midstream.runtime.request import PlanRequest
from midstream.runtime.store import Sources

_MEMORY_BYTES = 32 << 20


class RowMemory:
    """Device memory for captured rows of one width, filled step by step. No row of it is used again.

    Attributes:
        rows: `[capacity, width]`.
        used: how many of them are taken.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, at_least: int) -> None:
        capacity = max(_MEMORY_BYTES // (width * dtype.itemsize), at_least)
        self.rows = torch.empty(capacity, width, dtype=dtype, device=device)
        self.used = 0

    def take(self, count: int) -> int:
        """The first of `count` new rows, which have to fit."""
        self.used += count
        return self.used - count


@dataclass(eq=False)
class Stretch:
    """Captured rows of one request, at positions one after another from `position` on.

    Attributes:
        memory: holds them.
        places: the row of `memory` for each of them, ascending.
    """

    position: int
    layout: Layout
    memory: torch.Tensor
    places: list[int]

    def gathered(self) -> Piece:
        first, number = self.places[0], len(self.places)
        if self.places[-1] - first == number - 1:
            return Piece(self.position, self.layout, self.memory, first, number)
        places = torch.tensor(self.places, pin_memory=self.memory.is_cuda).to(self.memory.device, non_blocking=True)
        return Piece(self.position, self.layout, self.memory.index_select(0, places), 0, number)


@dataclass(eq=False)
class PlannedRequest:
    """One running request with a plan.

    Attributes:
        sources: recorded rows for its patches.
        length: of its prompt.
        captured: positions below this have been captured.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        stops_at_text: whether a stop string may end it.
        unsent: captured rows that are not sent yet.
        size: their bytes.
        is_due: whether they are to be sent, so that the memory around them becomes free.
    """

    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    captured: int = 0
    computed: int = 0
    complete: bool = False
    stops_at_text: bool = False
    unsent: list[Stretch] = field(default_factory=list)
    size: int = 0
    is_due: bool = False

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        last = self.loaded.last(self.length)
        return last is not None and self.captured >= last

    def add(self, position: int, layout: Layout, memory: torch.Tensor, places: Sequence[int]) -> None:
        """Rows at positions from `position` on."""
        self.size += len(places) * memory.stride(0) * memory.itemsize
        last = self.unsent[-1] if self.unsent else None
        if (
            last is not None
            and last.memory is memory
            and last.layout is layout
            and last.position + len(last.places) == position
        ):
            last.places.extend(places)
        else:
            self.unsent.append(Stretch(position, layout, memory, list(places)))

    def take_pieces(self) -> list[Piece]:
        unsent, self.unsent, self.size, self.is_due = self.unsent, [], 0, False
        return [each.gathered() for each in unsent]


@dataclass(eq=False)
class RepeatedCapture:
    """A batch that repeats captures one row of each of these requests in every step.

    Attributes:
        number: of the profile.
        rows: the row of each request in the batch.
        positions: the next position of each request.
    """

    number: int
    rows: np.ndarray
    requests: Sequence[PlannedRequest]
    layout: Layout
    positions: np.ndarray

    def goes_on(self, computed: np.ndarray) -> bool:
        """Whether the coming step has the next row of each request. `computed`: as of the step's `StepView`."""
        return np.array_equal(computed[self.rows], self.positions)

    def add(self, memory: torch.Tensor, first: int) -> int:
        """The rows of the coming step lie in `memory` from `first` on. Returns the largest number of unsent bytes of a request."""
        for place, (request, position) in enumerate(zip(self.requests, self.positions.tolist(), strict=True), first):
            request.add(position, self.layout, memory, (place,))
            request.captured = position + 1
        self.positions += 1
        return max(request.size for request in self.requests)
