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

_FOLDED = 16  # steps whose rows a run puts together


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
        pieces: captured rows that are not sent yet, and runs that hold rows of this request.
        size: their bytes.
    """

    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    captured: int = 0
    computed: int = 0
    complete: bool = False
    stops_at_text: bool = False
    pieces: list[Piece | CapturedRun] = field(default_factory=list)
    size: int = 0

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        last = self.loaded.last(self.length)
        return last is not None and self.captured >= last

    def add(self, piece: Piece, size: int) -> None:
        """`size`: of the piece, in bytes."""
        self.pieces.append(piece)
        self.size += size

    def take_pieces(self) -> list[Piece]:
        pieces, self.pieces, self.size = self.pieces, [], 0
        return [each if isinstance(each, Piece) else each.take(self) for each in pieces]

    def drop_pieces(self) -> None:
        """Forget the rows that are not sent."""
        for run in self.pieces:
            if isinstance(run, CapturedRun):
                run.leave(self)
        self.pieces, self.size = [], 0


class CapturedRun:
    """The rows that a batch captures for one profile while its steps have the same requests: one row of each request in each step.

    Args:
        number: of the profile.
        rows: the row of each request in the batch.
        requests: in the order of `rows`.
        first: the position of each request's first row.
        layout: of each captured row.

    Attributes:
        steps: the number of steps so far.
    """

    def __init__(
        self, number: int, rows: np.ndarray, requests: Sequence[PlannedRequest], first: np.ndarray, layout: Layout
    ) -> None:
        self.number, self.rows, self.steps = number, rows, 0
        self._layout, self._first = layout, first
        self._places = {request: place for place, request in enumerate(requests)}
        self._folded: list[torch.Tensor] = []  # of several steps, `[requests, steps, width]`
        self._blocks: list[torch.Tensor] = []  # of each later step, `[requests, width]`
        self._is_over = False

    def goes_on(self, computed: np.ndarray) -> bool:
        """Whether the coming step has the next row of each request. False once a request has left.

        `computed`: as of the step's `StepView`, whose requests have one row each.
        """
        return not self._is_over and np.array_equal(computed[self.rows], self._first + self.steps)

    def add(self, block: torch.Tensor) -> int:
        """The memory for the rows of the coming step. Returns the largest number of unsent bytes that one request has."""
        size, most = block.shape[1] * block.element_size(), 0
        for request in self._places:
            if not self.steps:
                request.pieces.append(self)
            request.captured += 1
            request.size += size
            most = max(most, request.size)
        if len(self._blocks) == _FOLDED:  # all of them are filled, but not the new one
            self._folded.append(torch.stack(self._blocks, dim=1))
            self._blocks.clear()
        self.steps += 1
        self._blocks.append(block)
        return most

    def take(self, request: PlannedRequest) -> Piece:
        """Take one request's rows out of the run."""
        place = self._places[request]
        if self.steps == 1:
            piece = Piece(int(self._first[place]), self._layout, self._blocks[0], place, 1)
        else:
            parts = [each[place] for each in self._folded] + [block[place : place + 1] for block in self._blocks]
            piece = Piece(int(self._first[place]), self._layout, torch.cat(parts), 0, self.steps)
        self.leave(request)
        return piece

    def leave(self, request: PlannedRequest) -> None:
        """The request no longer needs rows of this run. When the last request leaves, the run frees its memory."""
        self._is_over = True
        self._places.pop(request, None)
        if not self._places:
            self._folded.clear()
            self._blocks.clear()
