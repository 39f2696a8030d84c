"""The requests with plans, and the rows that they capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from midstream.capture.rows import Rows
from midstream.runtime.loaded_plans import LoadedPlan
from midstream.runtime.request import PlanRequest
from midstream.runtime.scores import RequestScores
from midstream.runtime.store import Sources

_PAGE_BYTES = 256 << 10
_PAGE_ROWS = 4, 64  # the fewest and the most rows of a page; between them, `_PAGE_BYTES` decides
_FIRST_SLOTS = 64


def rows_of_page(row_bytes: int) -> int:
    """How many rows of generated tokens get memory at once. A step adds a row, and only a full page costs an allocation."""
    least, most = _PAGE_ROWS
    return max(min(_PAGE_BYTES // row_bytes, most), least)


class RequestTable:
    """The planned requests in arrays, so that a step with many of them costs a few array operations.

    Each request has a slot; slot 0 stands for requests without a plan.

    Attributes:
        end: `[slots]`, the first position from which on all rows have the same profile.
        profile: `[slots]`, int32, that profile.
        captures: `[slots]`, bool, whether these rows are captured.
        selects: `[slots]`, bool, whether selectors choose which of them are.
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

    def add(self, request: PlannedRequest) -> int:
        """Give the request a slot."""
        if not self._free:
            size = len(self._requests)
            self._requests += [None] * size
            for column, each in vars(self).items():
                if isinstance(each, np.ndarray):
                    setattr(self, column, np.concatenate([each, np.zeros_like(each)]))
            self._free += range(2 * size - 1, size - 1, -1)
        self._slots[request.name] = slot = self._free.pop()
        self._requests[slot] = request
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
        table: has the rest of it.
        slot: its place in the table.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        ends_early: whether it may end before tokens that were computed long ago: at a stop string, which the client looks for, or at a
            token of the prompt.
        scores: its probes; None without any.
        rows: captured ones that are not sent yet, except those in `page`.
        page: the last captured rows of generated tokens, with room for later ones: the table says how much is left. Positions of rows
            that are still to come may change.
        taken: how many rows of the page are among `rows`, or were sent.
    """

    name: str
    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    table: RequestTable
    computed: int = 0
    complete: bool = False
    ends_early: bool = False
    scores: RequestScores | None = None
    rows: list[Rows] = field(default_factory=list)
    page: Rows | None = None
    taken: int = 0
    slot: int = field(init=False)

    def __post_init__(self) -> None:
        self.slot = self.table.add(self)
        self.tabulate()

    def tabulate(self) -> None:
        """Write to the table which profile the rows of generated tokens have, and which of them are captured."""
        table, slot, loaded = self.table, self.slot, self.loaded
        captures = loaded.captures_generated is not None
        table.end[slot], table.profile[slot] = self.end, loaded.generated
        table.captures[slot] = captures
        table.selects[slot] = captures and loaded.chosen is not None

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

    def begin_page(self, page: Rows) -> None:
        """Write the next rows to a new page."""
        self.close_page()
        self.page, self.taken, block = page, 0, page.block
        self.table.address[self.slot], self.table.left[self.slot] = block.data_ptr(), len(block)
        self.table.row_bytes[self.slot] = block.shape[1] * block.element_size()

    def close_page(self) -> None:
        """Move the page's rows to `rows`. The next row begins a new page."""
        self.rows += self._of_page()
        self.page = None
        self.table.left[self.slot] = 0

    def _of_page(self) -> list[Rows]:
        """The new rows of the page in one piece, if there are any."""
        if self.page is None:
            return []
        first, self.taken = self.taken, len(self.page.positions) - int(self.table.left[self.slot])
        return [self.page.take(slice(first, self.taken))] if first < self.taken else []

    def take_rows(self) -> list[Rows]:
        """The rows that are not sent."""
        rows = [*self.rows, *self._of_page()]
        self.rows, self.table.size[self.slot] = [], 0
        return rows
