"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from midstream.capture.rows import Rows
from midstream.plan.captures import Planes
from midstream.runtime.loaded_plans import LoadedPlan
from midstream.runtime.request import PlanRequest
from midstream.runtime.scores import RequestScores
from midstream.runtime.store import Sources

_PAGE_BYTES = 256 << 10
_PAGE_ROWS = 4, 64  # the fewest and the most rows of a page; between them, `_PAGE_BYTES` decides


class Page:
    """Memory for the captured rows of one request's generated tokens. A step adds a row, and only a full page costs an allocation.

    Args:
        block: `[rows, width]`, not filled yet.
        planes: of each row.

    Attributes:
        positions: of the rows that have their places.
        address: where the next row is written.
        left: how many rows still fit.
    """

    __slots__ = ("_first", "address", "block", "left", "planes", "positions", "row_bytes")

    def __init__(self, block: torch.Tensor, planes: Planes) -> None:
        self.block, self.planes = block, planes
        self.row_bytes = block.shape[1] * block.element_size()
        self.address, self.left = block.data_ptr(), len(block)
        self.positions: list[int] = []
        self._first = 0  # index of the first row that has not been taken

    @staticmethod
    def rows(row_bytes: int) -> int:
        """How many rows a page has."""
        least, most = _PAGE_ROWS
        return max(min(_PAGE_BYTES // row_bytes, most), least)

    def take(self) -> list[Rows]:
        """The rows since the last call, in one piece, if there are any."""
        first, self._first = self._first, len(self.positions)
        return [Rows(np.array(fresh), self.planes, self.block, first)] if (fresh := self.positions[first:]) else []


@dataclass(eq=False)
class PlannedRequest:
    """One running request with a plan.

    Attributes:
        sources: recorded rows for its patches.
        length: of its prompt.
        captured: positions below this have been captured.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        ends_early: whether it may end before tokens that were computed long ago: at a stop string, which the client looks for, or at a
            token of the prompt.
        scores: its probes; None without any.
        rows: captured ones that are not sent yet, except those in `page`.
        page: holds the last captured rows of generated tokens.
        size: bytes of the rows that are not sent.
    """

    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    captured: int = 0
    computed: int = 0
    complete: bool = False
    ends_early: bool = False
    scores: RequestScores | None = None
    rows: list[Rows] = field(default_factory=list)
    page: Page | None = None
    size: int = 0

    @property
    def end(self) -> int:
        """The first position from which on all have the same profile."""
        return self.length + self.loaded.named

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        loaded = self.loaded
        return loaded.captures_generated is None and self.captured >= self.end - loaded.uncaptured

    def add(self, rows: Rows) -> None:
        self.close_page()
        self.rows.append(rows)
        self.size += rows.nbytes

    def close_page(self) -> None:
        """Move the page's rows to `rows`. The next row begins a new page."""
        if self.page is not None:
            self.rows += self.page.take()
            self.page = None

    def take_rows(self) -> list[Rows]:
        """The rows that are not sent."""
        rows = [*self.rows, *(self.page.take() if self.page is not None else ())]
        self.rows, self.size = [], 0
        return rows
