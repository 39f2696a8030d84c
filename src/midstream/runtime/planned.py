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
        return self.loaded.last is not None and self.captured >= self.loaded.last

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.size += piece.size

    def take_pieces(self) -> list[Piece]:
        pieces, self.pieces, self.size = self.pieces, [], 0
        return [each if isinstance(each, Piece) else each.take(self) for each in pieces]

    def drop_pieces(self) -> None:
        """Forget the rows that are not sent."""
        for run in self.pieces:
            if isinstance(run, CapturedRun):
                run.leave(self)
        self.pieces = []


class CapturedRun:
    """The rows that a batch captures for one profile while its steps have the same requests: one row of each request in each step.

    Args:
        number: of the profile.
        rows: the row of each request in the batch.
        requests: in the order of `rows`. All are captured up to the step in which the run begins.
        layout: of each captured row.
    """

    def __init__(self, number: int, rows: np.ndarray, requests: Sequence[PlannedRequest], layout: Layout) -> None:
        self.number, self.rows, self._requests = number, rows, requests
        self._layout = layout
        self._first = np.array([request.captured for request in requests])  # positions
        self._blocks: list[torch.Tensor] = []  # of each step, `[requests, width]`
        self._joined: torch.Tensor | None = None  # `[requests, steps, width]`, once rows were taken
        self._staying = set(requests)  # those that have neither taken nor dropped their rows

    def goes_on(self, computed: np.ndarray) -> bool:
        """Whether the coming step has the next row of each request. False once a request has taken its rows.

        `computed`: as of the step's `StepView`, whose requests have one row each.
        """
        return bool(np.array_equal(computed[self.rows], self._first + len(self._blocks)))

    @property
    def most(self) -> int:
        """The largest number of unsent bytes that one request has."""
        return max(request.size for request in self._requests)

    def add(self, block: torch.Tensor) -> None:
        """The rows of one more step."""
        size = block.shape[1] * block.element_size()
        if not self._blocks:
            for request in self._requests:
                request.pieces.append(self)
        self._blocks.append(block)
        for request in self._requests:
            request.captured += 1
            request.size += size

    def take(self, request: PlannedRequest) -> Piece:
        """Take one request's rows out of the run."""
        if self._joined is None:
            self._joined = torch.stack(self._blocks, dim=1)
            self._blocks.clear()
        index = self._requests.index(request)
        rows = self._joined[index]
        self.leave(request)
        return Piece(int(self._first[index]), self._layout, rows, 0, len(rows))

    def leave(self, request: PlannedRequest) -> None:
        """The request no longer needs rows of this run. When the last request leaves, the run frees its memory."""
        self._staying.discard(request)
        if not self._staying:
            self._blocks.clear()
            self._joined = None
