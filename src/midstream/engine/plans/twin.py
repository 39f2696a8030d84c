"""The plain PyTorch twin of the site kernel and its tables: what the CPU runs, and what the kernel is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from midstream.engine.plans.tables import Loaded, Rows, Tables, flat
from midstream.plan import arithmetic
from midstream.plan.compile import Op
from midstream.sites import Point


class TwinTables(Tables):
    """Without buffers or a kernel: rows of one profile are edited together."""

    def __init__(self, points: Sequence[Point], device: torch.device) -> None:
        super().__init__(points)
        self._device = device
        self._banks: dict[int, list[torch.Tensor]] = {}
        self._groups: list[tuple[int, torch.Tensor | slice]] = []
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _place(self, loaded: Loaded) -> None:
        bank = [vector.to(self._device) for vector in loaded.compiled.bank]
        loaded.kept += bank
        for number in loaded.ids[loaded.ids > 0].tolist():
            self._banks[number] = bank

    def unload(self, loaded: Loaded) -> None:
        for number in loaded.ids[loaded.ids > 0].tolist():
            del self._banks[number]
        super().unload(loaded)

    def _set_rows(self, rows: Rows) -> None:
        if rows.prepared is None:
            numbers = np.unique(rows.profile_T)
            rows.prepared = [
                (int(n), _index_of(np.nonzero(rows.profile_T == n)[0], self._device)) for n in numbers if n
            ]
        self._groups = rows.prepared

    def _set_blocks(self, blocks: Mapping[int, tuple[np.ndarray, torch.Tensor]], count: int) -> None:
        self._blocks = {
            n: (torch.from_numpy(rows.astype(np.int64)).to(self._device), block) for n, (rows, block) in blocks.items()
        }

    def edit(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        first, second = flat(hidden), flat(residual) if residual is not None else None
        for number, rows, ops in self._groups_at(point):
            self._capture([op for op in ops if op.kind == "capture" and op is ops[0]], number, first, second)
            if any(op.kind != "capture" for op in ops):
                self._apply(ops, number, rows, first, second)
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
        changed, new = self._change(ops, number, hidden, residual)
        if changed is None:
            return new, torch.zeros_like(residual) if residual is not None else None
        left = residual.masked_fill(changed, 0) if residual is not None else None
        return torch.where(changed, new, hidden), left

    def _groups_at(self, point: int) -> list[tuple[int, torch.Tensor | slice, tuple[Op, ...]]]:
        """The profiles that have ops there, with their rows and these ops."""
        where = self.points[point]
        groups = ((number, rows, self.profiles[number].ops.get(where)) for number, rows in self._groups)
        return [(number, rows, ops) for number, rows, ops in groups if ops is not None]

    def _change(
        self, ops: Sequence[Op], number: int, first: torch.Tensor, second: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Where rows that all have `number` change, None for everywhere; and what the values are then."""
        old = first if second is None else (first + second).to(first.dtype)
        new = arithmetic.edited(old, ops, self._banks[number])
        changed = torch.ne(new, old, out=torch.empty_like(new))  # into bools it takes several times as long
        everywhere = int(torch.count_nonzero(changed)) == changed.numel()  # as a dense vector does it
        return None if everywhere else changed.bool(), new

    def _apply(
        self,
        ops: Sequence[Op],
        number: int,
        rows: torch.Tensor | slice,
        first: torch.Tensor,
        second: torch.Tensor | None,
    ) -> None:
        streams = [first] if second is None else [first, second]
        parts = [stream[rows] for stream in streams]  # of a slice of rows views, else copies
        changed, new = self._change(ops, number, parts[0], parts[1] if second is not None else None)
        if changed is None:
            parts[0].copy_(new)
            for part in parts[1:]:
                part.zero_()
        else:
            torch.where(changed, new, parts[0], out=parts[0])  # unchanged elements are bit-identical
            for part in parts[1:]:
                part.masked_fill_(changed, 0)
        if not isinstance(rows, slice):
            for stream, part in zip(streams, parts, strict=True):
                stream[rows] = part

    def _capture(self, ops: Sequence[Op], number: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        if not ops or number not in self._blocks:
            return
        rows, block = self._blocks[number]
        value = first[rows] if second is None else first[rows] + second[rows]
        for op in ops:
            block[:, op.offset : op.offset + value.shape[-1]] = value


def _index_of(rows: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """The rows as an index; a slice where they lie together, for that needs no gather."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
