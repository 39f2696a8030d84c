"""The site kernel and its tables in plain PyTorch: what the CPU runs, and what the kernel is tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from midstream.plan.ops.edit import Op, edited
from midstream.runtime.tables import ProfileSlots, Rows, Tables, flat
from midstream.sites import Point


class CpuTables(Tables):
    """Without buffers or a kernel: rows of one profile are edited together."""

    def __init__(self, points: Sequence[Point], device: torch.device) -> None:
        super().__init__(points)
        self._device = device
        self._banks: dict[int, list[torch.Tensor]] = {}
        self._groups: list[tuple[int, torch.Tensor | slice]] = []
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._overflow: dict[int, int] = {}  # row -> the first point whose edit left the finite range

    def _place(self, slots: ProfileSlots) -> None:
        bank = [vector.to(self._device) for vector in slots.compiled.bank]
        slots.kept += bank
        for number in slots.ids[slots.ids > 0].tolist():
            self._banks[number] = bank

    def unload(self, slots: ProfileSlots) -> None:
        for number in slots.ids[slots.ids > 0].tolist():
            del self._banks[number]
        super().unload(slots)

    def _set_rows(self, rows: Rows) -> None:
        if rows.prepared is None:
            numbers = np.unique(rows.profile_T)
            rows.prepared = [
                (int(n), _index_of(np.nonzero(rows.profile_T == n)[0], self._device)) for n in numbers if n
            ]
        self._groups = rows.prepared

    def begin_step(self, rows: Rows, blocks: Mapping[int, tuple[np.ndarray, torch.Tensor]]) -> None:
        super().begin_step(rows, blocks)
        self._overflow.clear()  # of an earlier step, on a stage that does not end the forward

    def _set_blocks(self, blocks: Mapping[int, tuple[np.ndarray, torch.Tensor]], count: int) -> None:
        self._blocks = {
            n: (torch.from_numpy(rows.astype(np.int64)).to(self._device), block) for n, (rows, block) in blocks.items()
        }

    def edit(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        first, second = flat(hidden), flat(residual) if residual is not None else None
        for number, rows, ops in self._groups_at(point):
            self._capture([op for op in ops if op.kind == "capture" and op is ops[0]], number, first, second)
            if any(op.kind != "capture" for op in ops):
                self._apply(point, ops, number, rows, first, second)
            self._capture([op for op in ops[1:] if op.kind == "capture"], number, first, second)

    def edited(
        self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        here = self._groups_at(point)
        if not here:
            return hidden, residual
        number, rows, ops = here[0]
        alike = hidden.ndim == 2 and rows == slice(0, len(hidden))
        if not alike or any(op.kind == "capture" for op in ops):
            return super().edited(point, hidden, residual)
        return self._new(point, ops, number, rows, hidden, residual)

    def take_overflow(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        codes_T = -_not_finite(hidden_TH).to(torch.int32).cpu()
        for row, point in self._overflow.items():
            codes_T[row] = 1 + point
        self._overflow.clear()
        return codes_T, lambda: None

    def _groups_at(self, point: int) -> list[tuple[int, torch.Tensor | slice, tuple[Op, ...]]]:
        """The profiles that have ops there, with their rows and these ops."""
        where = self.points[point]
        groups = ((number, rows, self.profiles[number].ops.get(where)) for number, rows in self._groups)
        return [(number, rows, ops) for number, rows, ops in groups if ops is not None]

    def _new(
        self,
        point: int,
        ops: Sequence[Op],
        number: int,
        rows: torch.Tensor | slice,
        first: torch.Tensor,
        second: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both streams of rows that all have `number`, edited. Elements that come out as they were are bit-identical in both."""
        old = first if second is None else (first + second).to(first.dtype)
        new = edited(old, ops, self._banks[number])
        if not math.isfinite(new.sum(dtype=torch.float32)):  # one pass; the sum of finite numbers may overflow as well
            numbers = torch.arange(rows.stop)[rows] if isinstance(rows, slice) else rows.cpu()
            for row in numbers[_not_finite(new).cpu()].tolist():
                self._overflow.setdefault(row, point)
        differs = torch.ne(new, old, out=torch.empty_like(new))  # into bools it takes several times as long
        if int(torch.count_nonzero(differs)) == differs.numel():  # as a dense vector does it
            return new, torch.zeros_like(second) if second is not None else None
        changed = differs.bool()
        return torch.where(changed, new, first), second.masked_fill(changed, 0) if second is not None else None

    def _apply(
        self,
        point: int,
        ops: Sequence[Op],
        number: int,
        rows: torch.Tensor | slice,
        first: torch.Tensor,
        second: torch.Tensor | None,
    ) -> None:
        new, left = self._new(point, ops, number, rows, first[rows], second[rows] if second is not None else None)
        first[rows] = new
        if second is not None and left is not None:
            second[rows] = left

    def _capture(self, ops: Sequence[Op], number: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        if not ops or number not in self._blocks:
            return
        rows, block = self._blocks[number]
        value = first[rows] if second is None else first[rows] + second[rows]
        for op in ops:
            block[:, op.offset : op.offset + value.shape[-1]] = value


def _not_finite(x_TH: torch.Tensor) -> torch.Tensor:
    """`[T]`, whether a row has an infinity or a NaN."""
    return ~torch.isfinite(x_TH).all(-1)


def _index_of(rows: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """The rows as an index; a slice where they lie together, for that needs no gather."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
