"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from midstream.capture.rows import Piece
from midstream.plan.captures import Layout
from midstream.runtime.loaded_plans import LoadedPlan
from midstream.runtime.request import PlanRequest
from midstream.runtime.store import Sources

_PAGE_BYTES = 256 << 10
_PAGE_ROWS = 4, 64  # the fewest and the most rows of a page; between them, `_PAGE_BYTES` decides


class Page:
    """Memory for captured rows of one request at consecutive positions, one row for each step.

    Args:
        make: allocates `[rows, width]` for a number of rows.
        position: of the first row.

    Attributes:
        address: where the next row is written.
        left: how many rows still fit.
        row_bytes: the size of a row.
    """

    __slots__ = ("_block", "_first", "_layout", "_position", "address", "left", "row_bytes")

    def __init__(self, make: Callable[[int], torch.Tensor], row_bytes: int, layout: Layout, position: int) -> None:
        least, most = _PAGE_ROWS
        self.left = max(min(_PAGE_BYTES // row_bytes, most), least)
        self._block = make(self.left)
        self.row_bytes, self.address = row_bytes, self._block.data_ptr()
        self._layout, self._position = layout, position
        self._first = 0  # index of the first row that has not been taken

    def take(self) -> list[Piece]:
        """The rows since the last call, in one piece, if there are any."""
        first, self._first = self._first, len(self._block) - self.left
        number, position = self._first - first, self._position
        self._position += number
        return [Piece(position, self._layout, self._block, first, number)] if number else []


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
        pieces: captured rows that are not sent yet, except those in `page`.
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
    stops_at_text: bool = False
    pieces: list[Piece] = field(default_factory=list)
    page: Page | None = None
    size: int = 0

    @property
    def end(self) -> int:
        """The first position from which on all have the same profile."""
        return self.length + self.loaded.named

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        last = self.loaded.last(self.length)
        return last is not None and self.captured >= last

    def add(self, piece: Piece) -> None:
        self.close_page()
        self.pieces.append(piece)
        self.size += piece.size

    def close_page(self) -> None:
        """Move the page's rows to `pieces`. The next row begins a new page."""
        if self.page is not None:
            self.pieces += self.page.take()
            self.page = None

    def take_pieces(self) -> list[Piece]:
        """The rows that are not sent."""
        pieces = [*self.pieces, *(self.page.take() if self.page is not None else ())]
        self.pieces, self.size = [], 0
        return pieces
