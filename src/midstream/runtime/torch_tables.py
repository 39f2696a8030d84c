"""Plans on a batch in plain PyTorch: for engines on a CPU, and for transformers models on any device, also under autograd.

At each point, rows of one plan with the same ops are edited together. Nothing else is shared between rows. Tests compare the kernel with
this code.

Legend: T rows of the batch, R the rows of one profile, H the site's width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from midstream.plan.ops.edit import Op, edited
from midstream.plan.running import run
from midstream.runtime.programs import value_of
from midstream.runtime.tables import ProfileSlots, RowProfiles, Tables, not_finite_at, streams
from midstream.sites import Point

Index = torch.Tensor | slice
_Together = tuple[int, Sequence[Op], Index]  # one of the profiles, its ops at a point, and the rows


class TorchTables(Tables):
    """Applies the ops without buffers or a kernel.

    Args:
        dtype: of captured rows.

    Attributes:
        overflow: row of the step -> the index of the first point whose edit made it infinite or NaN.
    """

    def __init__(self, points: Sequence[Point], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(points, device)
        self.overflow: dict[int, int] = {}
        self._dtype = dtype
        self._banks: dict[int, list[torch.Tensor]] = {}
        self._groups: list[tuple[int, Index]] = []  # profile -> its rows of the step
        self._together: dict[Point, list[_Together]] = {}  # the same rows, by their ops at a point
        self._needed: set[Point] = set()  # the points whose values programs need later in the step
        self._values: dict[Point, torch.Tensor] = {}  # the values at these points, `[T, width]`
        self._places: np.ndarray | None = None
        self._score_places: np.ndarray | None = None

    def _place(self, slots: ProfileSlots) -> None:
        bank = list(slots.compiled.bank)
        slots.kept += bank
        self._banks.update(dict.fromkeys(slots.ids.tolist(), bank))

    def unload(self, slots: ProfileSlots) -> None:
        for number in slots.ids.tolist():
            self._banks.pop(number, None)
        super().unload(slots)

    def begin_step(self, rows: RowProfiles, places: np.ndarray | None, score_places: np.ndarray | None = None) -> None:
        super().begin_step(rows, places, score_places)
        self._places, self._score_places = places, score_places
        self._values.clear()
        self.overflow.clear()  # entries of an earlier step, on a stage that does not end the forward

    def _set_rows(self, rows: RowProfiles) -> None:
        if rows.prepared is None:
            numbers = np.unique(rows.profile_T)
            rows.prepared = [(int(n), _index_of(np.flatnonzero(rows.profile_T == n))) for n in numbers if n], {}
        self._groups, self._together = rows.prepared
        self._needed = set().union(*(self.profiles[number].further for number, _ in self._groups))

    def edit(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        first, second = streams(hidden, residual)
        for rows, new_first, new_second in self._changes(point, first, second):
            first[rows] = new_first
            if second is not None and new_second is not None:
                second[rows] = new_second

    def edited(
        self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        new_first, new_second = first, second = streams(
            hidden.contiguous(), residual.contiguous() if residual is not None else None
        )
        for rows, one, two in self._changes(point, first, second):
            if isinstance(rows, slice) and rows.stop - rows.start == len(first):
                new_first, new_second = one, two
                continue
            if new_first is first:
                new_first, new_second = first.clone(), second.clone() if second is not None else None
            new_first[rows] = one
            if new_second is not None and two is not None:
                new_second[rows] = two
        if new_first is first:
            return hidden, residual
        return new_first.view(hidden.shape), new_second.view(hidden.shape) if new_second is not None else None

    def _changes(
        self, point: int, first: torch.Tensor, second: torch.Tensor | None
    ) -> Iterator[tuple[Index, torch.Tensor, torch.Tensor | None]]:
        """Yield rows and their two streams after the edits, for each group of rows with edits at the point. Also makes its captures."""
        where = self.points[point]
        if where in self._needed:
            self._values[where] = value_of(first, second).clone()
        if where not in self._together:
            self._together[where] = self._groups_at(where)
        for number, ops, rows in self._together[where]:
            one, two = first[rows], second[rows] if second is not None else None
            if one.requires_grad and isinstance(rows, slice):
                one = one.clone()  # autograd does not allow that a view of it is written to
            old = value_of(one, two)
            edits = any(op.is_edit for op in ops)
            new_one, new_two = self._new(point, ops, number, rows, old, one, two) if edits else (one, two)
            for op in ops:
                if not op.is_edit:
                    self._keep(point, op, rows, value_of(new_one, new_two) if op.after else old)
            if edits:
                yield rows, new_one, new_two

    def _groups_at(self, where: Point) -> list[_Together]:
        """The rows with ops at a point. Rows of one plan with the same ops form one group: their profiles differ only at other points."""
        found: dict[tuple[int, int], list[Any]] = {}
        for number, rows in self._groups:
            ops = self.profiles[number].ops.get(where)
            if ops is not None:
                found.setdefault((id(self._banks[number]), id(ops)), [number, ops]).append(rows)
        return [(number, ops, _joined(rows)) for number, ops, *rows in found.values()]

    def _new(
        self,
        point: int,
        ops: Sequence[Op],
        number: int,
        rows: Index,
        old: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both streams of these rows after the edits; `old` is their value before. Unchanged elements keep their bits in both streams."""
        values = {at: self._values[at][rows] for op in ops for at in op.inputs}

        def run(some: torch.Tensor | None) -> torch.Tensor:
            if some is None:
                return edited(old, ops, self._banks[number], values)
            return edited(old[some], ops, self._banks[number], {at: value[some] for at, value in values.items()})

        new = self._apart(point, run, lambda _: torch.full_like(old, math.nan), lambda: _numbers(rows))
        self._note_overflow(point, rows, new.detach())
        differs = torch.empty_like(new, requires_grad=False)
        torch.ne(new.detach(), old.detach(), out=differs)  # writing bools takes several times as long
        if int(torch.count_nonzero(differs)) == differs.numel():  # a dense vector changes all elements
            return new, torch.zeros_like(second) if second is not None else None
        changed = differs.bool()
        return torch.where(changed, new, first), second.masked_fill(changed, 0) if second is not None else None

    def _note_overflow(self, point: int, rows: Index, new_RH: torch.Tensor) -> None:
        if not math.isfinite(
            new_RH.sum(dtype=torch.float32)
        ):  # one pass; the sum of finite numbers may overflow as well
            for row in _numbers(rows)[not_finite_at(self.points[point], new_RH).cpu().numpy()].tolist():
                self.overflow.setdefault(row, point)

    def take_overflow(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        codes_T = -(~torch.isfinite(hidden_TH).all(-1)).to(torch.int32)
        for row, point in self.overflow.items():
            codes_T[row] = 1 + point
        self.overflow.clear()
        return codes_T, lambda: None

    def _keep(self, point: int, op: Op, rows: Index, value_RH: torch.Tensor) -> None:
        """Copy the results of a capture or a probe for these rows to their places."""
        all_places = self._places if op.kind == "capture" else self._score_places
        if all_places is None:
            return
        value_RH = value_RH.detach()
        if (program := op.program) is not None:
            width = program.packed_width(value_RH.element_size())
            value_RH = self._apart(
                point,
                lambda some: run(program, value_RH if some is None else value_RH[some]),
                lambda count: value_RH.new_full((count, width), math.nan),
                lambda: _numbers(rows),
            )
        value_RH = (value_RH if program is not None else value_RH.to(self._dtype)).cpu().contiguous()
        start, size = value_RH.data_ptr(), value_RH.shape[-1] * value_RH.element_size()
        places = all_places[rows if isinstance(rows, slice) else rows.numpy()].tolist()
        for i, place in enumerate(places):
            if place:
                ctypes.memmove(place + op.offset * value_RH.element_size(), start + i * size, size)


def _joined(parts: list[Index]) -> Index:
    """The rows of all parts, in order."""
    return parts[0] if len(parts) == 1 else _index_of(np.sort(np.concatenate([_numbers(part) for part in parts])))


def _numbers(rows: Index) -> np.ndarray:
    """The numbers of the rows of an index."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()


def _index_of(rows: np.ndarray) -> Index:
    """The rows as an index: a slice if they are contiguous, because a slice needs no gather."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
