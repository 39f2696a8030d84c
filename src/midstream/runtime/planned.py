"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

from collections.abc import Sequence
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
_FIRST_SLOTS = 64


class Page:
    """Memory for the captured rows of one request's generated tokens. A step adds a row, and only a full page costs an allocation.

    Args:
        block: `[rows, width]`, not filled yet.
        planes: of each row.
        first_position: of the first row, if the rows have all positions from there on.

    Attributes:
        positions: of the rows that have their places; None if they have all from `first_position` on.
    """

    __slots__ = ("_first_position", "_taken", "block", "planes", "positions")

    def __init__(self, block: torch.Tensor, planes: Planes, first_position: int | None = None) -> None:
        self.block, self.planes = block, planes
        self._first_position = first_position
        self.positions: list[int] | None = [] if first_position is None else None
        self._taken = 0  # rows

    @staticmethod
    def rows(row_bytes: int) -> int:
        """How many rows a page has."""
        least, most = _PAGE_ROWS
        return max(min(_PAGE_BYTES // row_bytes, most), least)

    def take(self, used: int) -> list[Rows]:
        """The rows since the last call, of the first `used` ones, in one piece, if there are any."""
        first, self._taken = self._taken, used
        if first == used:
            return []
        if self.positions is not None:
            positions = np.array(self.positions[first:used])
        else:
            assert self._first_position is not None
            positions = np.arange(self._first_position + first, self._first_position + used)
        return [Rows(positions, self.planes, self.block, first)]


class RequestTable:
    """The planned requests in arrays, so that a step with many of them costs a few array operations.

    Each request has a slot; slot 0 stands for requests without a plan.

    Attributes:
        end: `[slots]`, the first position from which on all rows have the same profile.
        profile: `[slots]`, int32, that profile.
        captures: `[slots]`, bool, whether all of these rows are captured.
        selects: `[slots]`, bool, whether selectors choose which of these rows are captured.
        captured: `[slots]`, positions below this have been captured.
        address: `[slots]`, where the next of these rows is written.
        row_bytes: `[slots]`, of such a row.
        left: `[slots]`, how many rows still fit there.
        size: `[slots]`, bytes of the rows that are not sent.
    """

    def __init__(self) -> None:
        self._requests: list[PlannedRequest | None] = [None] * _FIRST_SLOTS  # by slot
        self.profile = np.zeros(_FIRST_SLOTS, np.int32)
        self.captures, self.selects = (np.zeros(_FIRST_SLOTS, bool) for _ in range(2))
        self.end, self.captured, self.address, self.row_bytes, self.left, self.size = (
            np.zeros(_FIRST_SLOTS, np.int64) for _ in range(6)
        )
        self._slots: dict[str, int] = {}
        self._free = list(range(1, _FIRST_SLOTS))[::-1]

    def slots_of(self, names: Sequence[str]) -> np.ndarray:
        """int64 `[requests]`."""
        known = self._slots
        return np.array([known.get(name, 0) for name in names], np.int64)

    def request(self, slot: int) -> PlannedRequest:
        """The request that has the slot."""
        found = self._requests[slot]
        assert found is not None
        return found

    def put(self, request: PlannedRequest) -> None:
        """The request takes the slot that `add` gave it."""
        self._requests[request.slot] = request

    def add(self, name: str) -> int:
        """A slot for a request."""
        if not self._free:
            size = len(self._requests)
            self._requests += [None] * size
            for column, each in vars(self).items():
                if isinstance(each, np.ndarray):
                    setattr(self, column, np.concatenate([each, np.zeros_like(each)]))
            self._free += range(2 * size - 1, size - 1, -1)
        self._slots[name] = slot = self._free.pop()
        return slot

    def remove(self, name: str) -> None:
        slot = self._slots.pop(name)
        self._requests[slot] = None
        for each in vars(self).values():
            if isinstance(each, np.ndarray):
                each[slot] = 0
        self._free.append(slot)


@dataclass(eq=False)
class PlannedRequest:
    """One running request with a plan.

    Attributes:
        name: the engine's id of it.
        sources: recorded rows for its patches.
        length: of its prompt.
        table: has the rest of it, at `slot`.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        ends_early: whether it may end before tokens that were computed long ago: at a stop string, which the client looks for, or at a
            token of the prompt.
        scores: its probes; None without any.
        rows: captured ones that are not sent yet, except those in `page`.
        page: holds the last captured rows of generated tokens.
    """

    name: str
    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    table: RequestTable
    slot: int
    computed: int = 0
    complete: bool = False
    ends_early: bool = False
    scores: RequestScores | None = None
    rows: list[Rows] = field(default_factory=list)
    page: Page | None = None

    def __post_init__(self) -> None:
        self.table.put(self)
        self.tabulate()

    def tabulate(self) -> None:
        """Write to the table which profile the rows of generated tokens have, and which of them are captured."""
        table, slot, loaded = self.table, self.slot, self.loaded
        captures = loaded.captures_generated is not None
        table.end[slot], table.profile[slot] = self.end, loaded.generated
        table.captures[slot] = captures and not loaded.selectors
        table.selects[slot] = captures and bool(loaded.selectors)

    @property
    def end(self) -> int:
        """The first position from which on all have the same profile."""
        return self.length + self.loaded.named

    @property
    def captured(self) -> int:
        """Positions below this have been captured."""
        return int(self.table.captured[self.slot])

    @captured.setter
    def captured(self, end: int) -> None:
        self.table.captured[self.slot] = end

    @property
    def size(self) -> int:
        """Bytes of the rows that are not sent."""
        return int(self.table.size[self.slot])

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        loaded = self.loaded
        return loaded.captures_generated is None and self.captured >= self.end - loaded.uncaptured

    def add(self, rows: Rows) -> None:
        self.close_page()
        self.rows.append(rows)
        self.table.size[self.slot] += rows.nbytes

    def begin_page(self, page: Page) -> None:
        """Write the next rows to a new page."""
        self.close_page()
        self.page, block = page, page.block
        self.table.address[self.slot], self.table.left[self.slot] = block.data_ptr(), len(block)
        self.table.row_bytes[self.slot] = block.shape[1] * block.element_size()

    def close_page(self) -> None:
        """Move the page's rows to `rows`. The next row begins a new page."""
        self.rows += self._of_page()
        self.page = None
        self.table.left[self.slot] = 0

    def _of_page(self) -> list[Rows]:
        return self.page.take(len(self.page.block) - int(self.table.left[self.slot])) if self.page is not None else []

    def take_rows(self) -> list[Rows]:
        """The rows that are not sent."""
        rows = [*self.rows, *self._of_page()]
        self.rows, self.table.size[self.slot] = [], 0
        return rows
