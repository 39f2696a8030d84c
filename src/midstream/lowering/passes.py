"""Finds the change that a recorded write makes to each row, if this change is linear.

    for rows, change in changes(write): ...     # `Steer.saying(change, ...)` and the other kinds make edits of it

Legend: T tokens of the step, H the site's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from midstream.plan.ops.edit import RowChange
from midstream.trace.graph import Value, Write

# Which rows: indices that are applied to the list of all rows, one after the other. Empty for all rows.
RowChoice = tuple[int | slice | tuple[int, ...], ...]


def rows_of(rows: RowChoice, tokens: int) -> list[int]:
    """The rows among `tokens`. Raises IndexError for a row outside."""
    found: Any = list(range(tokens))
    for each in rows:
        found = [found[i] for i in each] if isinstance(each, tuple) else found[each]
    return [found] if isinstance(found, int) else found


@dataclass(frozen=True)
class _Linear:
    """`scale * h + sum of (h . w) u + constant` for each row h, over the rows `rows` of the value that was read.

    Attributes:
        parts: later replacements of some rows.
    """

    change: RowChange
    rows: RowChoice = ()
    parts: tuple[tuple[RowChoice, RowChange], ...] = ()


@dataclass(frozen=True)
class _Along:
    """`h . w + b`, one number for each row; of shape `[T]`, or `[T, 1]` if `is_column`."""

    w_H: torch.Tensor
    b: float
    rows: RowChoice
    is_column: bool
    eps: float


@dataclass(frozen=True)
class _Weighted:
    """`h * w`, which becomes an `_Along` once it is summed over H."""

    change: RowChange
    w_H: torch.Tensor
    rows: RowChoice


class _Unknown(Exception):
    """The value has none of these forms."""


def changes(write: Write) -> list[tuple[RowChoice, RowChange]] | None:
    """The changes that a write makes, each with its rows. Later entries override earlier ones. None if the write is not linear."""
    if len(write.was.shape) != 2:
        return None
    try:
        found = _LinearReader(write.was).of(write.now)
        if isinstance(found, torch.Tensor):
            found = _Linear(_constant(found, write.was.shape[-1], write.was.shape[0]))
    except (_Unknown, IndexError, RecursionError):
        return None
    if not isinstance(found, _Linear) or found.rows:
        return None
    return [((), found.change), *found.parts]


def _eps(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else 0.0


def _constant(tensor: torch.Tensor, width: int, rows: int) -> RowChange:
    """The change to known numbers: `[H]`, or `[rows, H]` if each row has its own."""
    numbers = tensor.double()
    if numbers.ndim > 2 or (numbers.ndim and numbers.shape[-1] not in (1, width)):
        raise _Unknown
    if numbers.ndim == 2 and numbers.shape[0] == 1:
        numbers = numbers[0]
    if numbers.ndim == 2 and numbers.shape[0] != rows:
        raise _Unknown
    return RowChange(
        0.0, (), numbers.expand(*numbers.shape[:-1], width) if numbers.ndim else numbers.expand(width), _eps(tensor)
    )


class _LinearReader:
    """Reads values as functions of the value that was read, for one write."""

    def __init__(self, was: Value) -> None:
        self._was, self._known = was, dict[int, Any]()
        self._width = was.shape[-1]

    def of(self, given: Any) -> Any:
        """A `_Linear`, an `_Along`, a `_Weighted`, or known numbers as a tensor. Raises _Unknown."""
        if isinstance(given, (int, float)):
            return torch.tensor(given, dtype=torch.float64)
        if not isinstance(given, Value):
            raise _Unknown
        if id(given) not in self._known:
            self._known[id(given)] = self._read(given)
        return self._known[id(given)]

    def _read(self, value: Value) -> Any:
        if value is self._was:
            return _Linear(RowChange(1.0, (), None, 0.0))
        if value.kind == "const":
            return value.target
        if value.kind == "put":
            return self._put(value)
        if value.kind != "call":
            raise _Unknown
        name = value.target._schema.name.removeprefix("aten::").strip("_")
        rule = getattr(self, f"_{name}", None)
        if (
            rule is None
            or (isinstance(value.out, int) and value.out)
            or value.kwargs.keys() - {"alpha", "dtype", "memory_format", "implicit", "layout", "non_blocking"}
        ):
            raise _Unknown
        return rule(value, *value.args, **({"alpha": value.kwargs["alpha"]} if "alpha" in value.kwargs else {}))

    # The same numbers.

    def _clone(self, value: Value, x: Any, *_: Any) -> Any:
        return self.of(x)

    def _to_copy(self, value: Value, x: Any) -> Any:
        if not value.dtype.is_floating_point or not isinstance(x, Value):
            raise _Unknown
        loses = torch.finfo(value.dtype).eps > torch.finfo(x.dtype).eps if x.dtype.is_floating_point else True
        if loses and value.dtype != self._was.dtype:  # a plan rounds only to the site's own dtype
            raise _Unknown
        return self.of(x)

    _detach = _alias = _lift_fresh = _clone

    def _view(self, value: Value, x: Any, *_: Any) -> Any:
        found = self.of(x)
        if isinstance(found, torch.Tensor) or not isinstance(x, Value):
            raise _Unknown
        if value.shape == x.shape:
            return found
        if isinstance(found, _Along) and value.shape in ((x.shape[0],), (x.shape[0], 1)):
            return replace(found, is_column=len(value.shape) == 2)
        raise _Unknown

    _reshape = _unsafe_view = _expand = _view

    def _unsqueeze(self, value: Value, x: Any, dim: int) -> Any:
        found = self.of(x)
        if isinstance(found, _Along) and not found.is_column and dim in (1, -1):
            return replace(found, is_column=True)
        raise _Unknown

    def _squeeze(self, value: Value, x: Any, dim: int | None = None) -> Any:
        found = self.of(x)
        if isinstance(found, _Along) and found.is_column and dim in (1, -1):
            return replace(found, is_column=False)
        raise _Unknown

    def _copy(self, value: Value, target: Any, x: Any, *_: Any) -> Any:
        found = self.of(x)
        if not isinstance(found, torch.Tensor):
            return found
        there = self.of(target)
        if not isinstance(there, _Linear):
            raise _Unknown
        return _Linear(_constant(found, self._width, value.shape[0] if len(value.shape) == 2 else 1), there.rows)

    def _fill(self, value: Value, target: Any, x: Any) -> Any:
        return self._copy(value, target, x)

    def _zero(self, value: Value, target: Any) -> Any:
        return self._copy(value, target, 0.0)

    # Some rows.

    def _select(self, value: Value, x: Any, dim: int, index: int) -> Any:
        return self._some(x, dim, index)

    def _slice(
        self, value: Value, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> Any:
        chosen = slice(start, end, step)
        if dim % 2 == 1 and isinstance(x, Value) and len(x.shape) == 2:
            if chosen.indices(x.shape[1]) != (0, x.shape[1], 1):
                raise _Unknown
            return self.of(x)
        return (
            self.of(x)
            if (start or 0, step) == (0, 1) and (end is None or end >= 1 << 62)
            else self._some(x, dim, chosen)
        )

    def _some(self, x: Any, dim: int, chosen: int | slice) -> _Linear:
        found = self.of(x)
        if not isinstance(found, _Linear) or not isinstance(x, Value) or len(x.shape) != 2 or dim % 2:
            raise _Unknown
        if _has_rows_of_its_own(found.change):
            raise _Unknown
        if found.parts:  # only the rows that were replaced last
            last = next((part for part in reversed(found.parts) if part[0] == (*found.rows, chosen)), None)
            if last is None or last is not found.parts[-1]:
                raise _Unknown
            return _Linear(last[1], (*found.rows, chosen))
        return _Linear(found.change, (*found.rows, chosen))

    def _put(self, value: Value) -> _Linear:
        whole, new = self.of(value.args[0]), self.of(value.args[1])
        rows: RowChoice = ()
        shape = value.args[0].shape
        for func, args, kwargs, _ in value.target:
            name = func._schema.name.removeprefix("aten::")
            if name in ("alias", "detach"):
                continue
            if kwargs or name not in ("select", "slice") or len(shape) != 2:
                raise _Unknown
            dim, *rest = args if args else (0,)
            if dim % 2 == 1:
                if name != "slice" or slice(*rest).indices(shape[1]) != (0, shape[1], 1):
                    raise _Unknown
                continue
            start, end, step = (*rest, *(None, None, 1)[len(rest) :]) if name == "slice" else (0, 0, 0)
            rows = (*rows, rest[0] if name == "select" else slice(start, end, step))
            shape = shape[1:] if name == "select" else shape
        if not isinstance(whole, _Linear) or whole.rows or not isinstance(new, _Linear) or new.parts:
            raise _Unknown
        if not rows or all(isinstance(each, slice) and _is_all(each) for each in rows):
            return _Linear(new.change)
        if _has_rows_of_its_own(whole.change):
            raise _Unknown
        # The rows that it reads differ from those that it writes.
        if new.rows != rows and (new.change.scale or new.change.outers):
            raise _Unknown
        return replace(whole, parts=(*whole.parts, (rows, new.change)))

    def _places(self, indices: Sequence[Any], count: int) -> tuple[int, ...]:
        """The known rows that `x[indices]` selects."""
        chosen = self.of(indices[0])
        if any(each is not None for each in indices[1:]) or not isinstance(chosen, torch.Tensor) or chosen.ndim != 1:
            raise _Unknown
        places = tuple(chosen.tolist())
        if len({place % count for place in places}) < len(places):
            raise _Unknown
        return places

    def _index(self, value: Value, x: Any, indices: Sequence[Any]) -> _Linear:
        found = self.of(x)
        if not isinstance(found, _Linear) or found.parts or not isinstance(x, Value) or len(x.shape) != 2:
            raise _Unknown
        if _has_rows_of_its_own(found.change):
            raise _Unknown
        return _Linear(found.change, (*found.rows, self._places(indices, max(x.shape[0], 1))))

    def _index_put(
        self, value: Value, x: Any, indices: Sequence[Any], numbers: Any, accumulate: bool = False
    ) -> _Linear:
        if not isinstance(x, Value) or len(x.shape) != 2:
            raise _Unknown
        found, new, places = self.of(x), self.of(numbers), self._places(indices, max(x.shape[0], 1))
        if not isinstance(found, _Linear) or found.rows or accumulate or _has_rows_of_its_own(found.change):
            raise _Unknown
        if isinstance(new, torch.Tensor):
            new = _Linear(_constant(new, self._width, len(places)), (places,))
        if not isinstance(new, _Linear) or new.parts or new.rows != (places,):
            raise _Unknown
        return replace(found, parts=(*found.parts, ((places,), new.change)))

    # Arithmetic.

    def _each(self, x: _Linear, change: Callable[[RowChange], RowChange]) -> _Linear:
        return replace(x, change=change(x.change), parts=tuple((rows, change(part)) for rows, part in x.parts))

    def _add(self, value: Value, x: Any, y: Any, alpha: float = 1.0) -> Any:
        return self._added(value, self.of(x), self.of(y), alpha)

    def _sub(self, value: Value, x: Any, y: Any, alpha: float = 1.0) -> Any:
        return self._added(value, self.of(x), self.of(y), -alpha)

    def _rsub(self, value: Value, x: Any, y: Any, alpha: float = 1.0) -> Any:
        return self._sub(value, y, x, alpha)

    def _added(self, value: Value, a: Any, b: Any, alpha: float) -> Any:
        """`a + alpha * b`"""
        if isinstance(a, torch.Tensor):
            a, b, alpha = self._times(b, alpha), a, 1.0
        if isinstance(a, _Along):
            if not isinstance(b, torch.Tensor) or b.numel() != 1:
                raise _Unknown
            return replace(a, b=a.b + alpha * float(b))
        if not isinstance(a, _Linear):
            raise _Unknown
        if isinstance(b, torch.Tensor):
            rows = value.shape[0] if len(value.shape) == 2 else 1
            added = _constant(b, self._width, rows)
            if a.parts and _has_rows_of_its_own(added):
                raise _Unknown
            return self._each(a, lambda change: _sum(change, added, alpha))
        if not isinstance(b, _Linear) or a.rows != b.rows or (a.parts and b.parts):
            raise _Unknown
        if a.parts or b.parts:
            raise _Unknown
        return _Linear(_sum(a.change, b.change, alpha), a.rows)

    def _neg(self, value: Value, x: Any) -> Any:
        return self._times(self.of(x), -1.0)

    def _times(self, x: Any, factor: float) -> Any:
        if isinstance(x, _Along):
            return replace(x, w_H=x.w_H * factor, b=x.b * factor)
        if isinstance(x, _Linear):
            return self._each(x, lambda change: _scaled(change, factor))
        raise _Unknown

    def _mul(self, value: Value, x: Any, y: Any) -> Any:
        a, b = self.of(x), self.of(y)
        if isinstance(a, torch.Tensor):
            a, b = b, a
        if not isinstance(b, torch.Tensor) or isinstance(a, _Weighted):
            raise _Unknown
        if b.numel() == 1:
            return self._times(a, float(b))
        if b.shape[-1] != self._width or b.numel() != self._width:
            raise _Unknown
        vector = b.reshape(-1).double()
        if isinstance(a, _Linear) and not a.parts:
            return _Weighted(a.change, vector, a.rows)
        is_single = isinstance(a, _Along) and a.rows and isinstance(a.rows[-1], int)
        if isinstance(a, _Along) and (a.is_column or is_single):
            return _Linear(
                RowChange(0.0, ((vector, a.w_H),), vector * a.b if a.b else None, max(a.eps, _eps(b))), a.rows
            )
        raise _Unknown

    def _div(self, value: Value, x: Any, y: Any) -> Any:
        by = self.of(y)
        if not isinstance(by, torch.Tensor) or by.numel() != 1 or float(by) == 0:
            raise _Unknown
        return self._times(self.of(x), 1.0 / float(by))

    def _along(self, x: _Linear | _Weighted, vector: torch.Tensor, is_column: bool, eps: float) -> _Along:
        change = x.change
        w, b = change.scale * vector, 0.0
        for u, other in change.outers:
            w = w + float(u @ vector) * other
        if change.constant is not None:
            if change.constant.ndim != 1:
                raise _Unknown
            b = float(change.constant @ vector)
        return _Along(w, b, x.rows, is_column, max(eps, change.eps))

    def _mv(self, value: Value, x: Any, y: Any) -> Any:
        a, b = self.of(x), self.of(y)
        if not isinstance(a, _Linear) or a.parts or not isinstance(b, torch.Tensor):
            raise _Unknown
        return self._along(a, b.reshape(-1).double(), False, _eps(b))

    _dot = _mv

    def _mm(self, value: Value, x: Any, y: Any) -> Any:
        a, b = self.of(x), self.of(y)
        if isinstance(a, _Along) and a.is_column and isinstance(b, torch.Tensor) and b.shape[0] == 1:
            return self._mul(value, x, y)
        if not isinstance(b, torch.Tensor) or b.shape[1] != 1:
            raise _Unknown
        return replace(self._mv(value, x, y), is_column=True)

    def _sum(self, value: Value, x: Any, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
        found = self.of(x)
        axes = len(x.shape) if isinstance(x, Value) else 0
        over_width = dim is not None and [each % axes for each in dim] == [axes - 1] if axes else False
        is_row = axes == 1 and dim is None
        if not isinstance(found, _Weighted) or not (over_width or is_row):
            raise _Unknown
        return self._along(found, found.w_H, keepdim, 0.0)


def _has_rows_of_its_own(change: RowChange) -> bool:
    """Whether each row gets different numbers."""
    return change.constant is not None and change.constant.ndim == 2


def _is_all(chosen: slice) -> bool:
    return (chosen.start or 0, chosen.step or 1) == (0, 1) and (chosen.stop is None or chosen.stop >= 1 << 62)


def _scaled(change: RowChange, factor: float) -> RowChange:
    constant = None if change.constant is None else change.constant * factor
    return RowChange(change.scale * factor, tuple((u * factor, w) for u, w in change.outers), constant, change.eps)


def _sum(a: RowChange, b: RowChange, factor: float) -> RowChange:
    """`a + factor * b`"""
    b = _scaled(b, factor)
    constants = [each for each in (a.constant, b.constant) if each is not None]
    constant = None if not constants else constants[0] if len(constants) == 1 else constants[0] + constants[1]
    return RowChange(a.scale + b.scale, (*a.outers, *b.outers), constant, max(a.eps, b.eps))
