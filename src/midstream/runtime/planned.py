"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

import weakref
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
        firsts: `firsts[i] + place` is the row of `memory` for each of them, ascending. The first `before` are not of this request.
        is_shared: whether other requests have the same `firsts`.
    """

    position: int
    layout: Layout
    memory: torch.Tensor
    firsts: list[int]
    place: int = 0
    before: int = 0
    is_shared: bool = False

    def goes_on(self, position: int, layout: Layout, memory: torch.Tensor) -> bool:
        """Whether a row at that position, in that memory, may be added to these."""
        is_next = self.position + len(self.firsts) == position
        return is_next and self.memory is memory and self.layout is layout and not self.is_shared

    def gathered(self) -> Piece:
        rows = [first + self.place for first in self.firsts[self.before :]]
        if rows[-1] - rows[0] == len(rows) - 1:
            return Piece(self.position, self.layout, self.memory, rows[0], len(rows))
        index = torch.tensor(rows, pin_memory=self.memory.is_cuda).to(self.memory.device, non_blocking=True)
        return Piece(self.position, self.layout, self.memory.index_select(0, index), 0, len(rows))


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

    def add(self, position: int, layout: Layout, memory: torch.Tensor, places: Sequence[int], size: int) -> None:
        """Rows at positions from `position` on, of so many bytes."""
        self.size += size
        last = self.unsent[-1] if self.unsent else None
        if last is not None and last.goes_on(position, layout, memory):
            last.firsts += places
        else:
            self.unsent.append(Stretch(position, layout, memory, list(places)))

    def take_pieces(self) -> list[Piece]:
        unsent, self.unsent, self.size, self.is_due = self.unsent, [], 0, False
        return [each.gathered() for each in unsent]


class RepeatedCapture:
    """A batch that repeats captures one row of each of these requests in every step.

    Args:
        number: of the profile.
        rows: the row of each request in the batch.
        positions: the next position of each request.
    """

    def __init__(
        self, number: int, rows: np.ndarray, requests: Sequence[PlannedRequest], layout: Layout, positions: np.ndarray
    ) -> None:
        self.number, self.rows = number, rows
        self._requests, self._layout, self._positions = requests, layout, positions
        self._memory: weakref.ref[torch.Tensor] | None = None
        self._firsts: list[int] = []  # where the rows of each step begin in it

    def goes_on(self, computed: np.ndarray) -> bool:
        """Whether the coming step has the next row of each request. `computed`: as of the step's `StepView`."""
        return np.array_equal(computed[self.rows], self._positions)

    def add(self, memory: torch.Tensor, first: int) -> int:
        """The rows of the coming step lie in `memory` from `first` on. Returns the largest number of unsent bytes of a request."""
        if self._memory is None or self._memory() is not memory:
            self._memory, self._firsts = weakref.ref(memory), []
        firsts, size, most = self._firsts, memory.stride(0) * memory.itemsize, 0
        for place, request in enumerate(self._requests):
            unsent = request.unsent
            if not unsent or unsent[-1].firsts is not firsts:
                position = int(self._positions[place])
                unsent.append(Stretch(position, self._layout, memory, firsts, place, len(firsts), is_shared=True))
            request.captured += 1
            request.size += size
            most = max(most, request.size)
        firsts.append(first)
        self._positions += 1
        return most
