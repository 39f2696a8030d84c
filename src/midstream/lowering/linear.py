"""Linear functions of a site's row that one operation of the registry computes: what the steps of a program compute, as far as it is one.

`LinearBuilder` takes the place of a `Builder`: it follows the function of each result instead of keeping steps. `Steer.saying(change, ...)`
and the other kinds make edits of the last one. The row may be added to once: `(h + a) - a` rounds twice, and no edit does.

Legend: H the site's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import PlanError
from midstream.plan.building import Builder, StepResult
from midstream.plan.checking import plain
from midstream.plan.ops.edit import RowChange
from midstream.plan.rowwise import Shaped, overload
from midstream.plan.steps import Ref

_ROWS = 2  # any number
_NOT_LINEAR = "it is not linear"
_MOST_FACTOR = 1e6  # of a number that is multiplied with others of them: float32 does not overflow


@dataclass(frozen=True, eq=False)
class Along:
    """`h . w + b`, one number for each row."""

    w_H: torch.Tensor
    b: float
    eps: float


@dataclass(frozen=True, eq=False)
class Weighted:
    """`h * w`, which becomes an `Along` once it is summed over H."""

    w_H: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Known:
    """Numbers of the code's own: float64, `[1]` or `[H]`."""

    numbers: torch.Tensor
    eps: float

    @property
    def is_single(self) -> bool:
        return self.numbers.numel() == 1


Form = RowChange | Along | Weighted
_ROW = RowChange(1.0, (), None, 0.0)  # h itself


@dataclass(frozen=True, eq=False)
class LinearResult(StepResult):
    """A result, and the function that it is."""

    form: Form


class LinearBuilder(Builder):
    """Follows the functions of results in place of steps. Arguments as of `Builder`."""

    def __init__(self, width: int, dtype: str) -> None:
        super().__init__(width, dtype)
        self._made = 0
        zeros = torch.zeros(_ROWS, width, dtype=getattr(torch, dtype))
        self._inputs = [self._result(zeros, _ROW)]

    def add(
        self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], line: int, out: int | None = None
    ) -> LinearResult:
        """As of `Builder`. Raises PlanError also for a result that has none of the forms."""
        if op not in _RULES:
            raise PlanError(_NOT_LINEAR)
        like = [plain(each, _zeros, _ROWS) for each in args]
        zeros = overload(op)(*like, **{name: plain(each, _zeros, _ROWS) for name, each in kwargs.items()})
        given = [self._operand(each) for each in args or kwargs.values()]
        form = _RULES[op](*given, **{name: kwargs[name] for name in ("alpha",) if name in kwargs})
        if op == "_to_copy.default" and not self._keeps_all(like[0].dtype, zeros.dtype):
            raise PlanError(_NOT_LINEAR)
        if isinstance(form, _Known):
            form = RowChange(0.0, (), form.numbers, form.eps)
        if isinstance(form, RowChange) and form.constant is not None:
            form = form._replace(constant=form.constant.expand(self.width))
        row = zeros.shape[1:]
        is_number, is_row = math.prod(row) == 1, math.prod(row) == self.width and row[-1:] == (self.width,)
        if form is None or zeros.shape[0] != _ROWS or not (is_number if isinstance(form, Along) else is_row):
            raise PlanError(_NOT_LINEAR)
        return self._result(zeros, form)

    def _result(self, zeros: torch.Tensor, form: Form) -> LinearResult:
        self._made += 1
        return LinearResult(Ref(self._made), Shaped(zeros, 1), form)

    def _operand(self, given: Any) -> Any:
        if isinstance(given, LinearResult):
            return given.form
        if not isinstance(given, (torch.Tensor, int, float)):
            return given
        numbers = given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.float64)
        fits = numbers.numel() in (1, self.width) and not numbers.is_complex()
        return _Known(numbers.reshape(-1).double(), _eps(numbers.dtype)) if fits else None

    def _keeps_all(self, before: torch.dtype, after: torch.dtype) -> bool:
        """Whether a conversion loses nothing but what the site's own dtype loses, too."""
        if after == getattr(torch, self.dtype):
            return True
        return before.is_floating_point and after.is_floating_point and torch.promote_types(before, after) == after


def _zeros(argument: Any) -> Any:
    return argument.shaped.meta if isinstance(argument, LinearResult) else argument


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


# The rules. `LinearBuilder` drops a form that does not fit the result's shape.


def _same(x: Any, *_: Any) -> Any:
    return x


def _number(sizes: Any, number: Any) -> Any:
    return number


def _add(x: Any, y: Any, alpha: float = 1.0) -> Form | None:
    """`x + alpha * y`"""
    if isinstance(x, _Known):
        x, y, alpha = _times(y, alpha), x, 1.0
    if isinstance(x, Along) and not x.b and isinstance(y, _Known) and y.is_single:
        return Along(x.w_H, alpha * float(y.numbers), x.eps)
    if isinstance(y, _Known):
        y = RowChange(0.0, (), y.numbers, y.eps)
    if y is _ROW and alpha == 1:
        x, y = y, x
    added = _times(y, alpha)
    return added._replace(scale=1.0) if x is _ROW and isinstance(added, RowChange) else None


def _sub(x: Any, y: Any, alpha: float = 1.0) -> Form | None:
    return _add(x, y, -alpha)


def _rsub(x: Any, y: Any, alpha: float = 1.0) -> Form | None:
    return _add(y, x, -alpha)


def _neg(x: Any) -> Form | None:
    return _times(x, -1.0)


def _mul(x: Any, y: Any) -> Form | None:
    if isinstance(x, _Known):
        x, y = y, x
    if not isinstance(y, _Known):
        return None
    if isinstance(x, Along) and not y.is_single:
        along = y.numbers * x.b if x.b else None
        return RowChange(0.0, ((y.numbers, x.w_H),), along, max(x.eps, y.eps))
    if y.is_single:
        return _times(x, float(y.numbers))
    return Weighted(y.numbers) if x is _ROW else None


def _div(x: Any, y: Any) -> Form | None:
    is_number = isinstance(y, _Known) and y.is_single and float(y.numbers) != 0
    return _times(x, 1.0 / float(y.numbers)) if is_number else None


def _times(x: Any, factor: float) -> Form | None:
    """`factor * x`, if that neither overflows nor underflows. No edit multiplies the row itself."""
    if abs(factor) != 1 and not 1 / _MOST_FACTOR < abs(factor) < _MOST_FACTOR:
        return None
    if isinstance(x, Along):
        return Along(x.w_H * factor, x.b * factor, x.eps)
    if not isinstance(x, RowChange) or x.scale:
        return None
    constant = None if x.constant is None else x.constant * factor
    return RowChange(0.0, tuple((u * factor, w) for u, w in x.outers), constant, x.eps)


def _product(x: Any, y: Any) -> Form | None:
    """A product of matrices: with a column, which gives one number for each row, or of such numbers with a row."""
    if x is _ROW and isinstance(y, _Known):
        return Along(y.numbers, 0.0, y.eps)
    return _mul(x, y) if isinstance(x, Along) else None


def _summed(x: Any, *_: Any) -> Form | None:
    return Along(x.w_H, 0.0, 0.0) if isinstance(x, Weighted) else None


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("_to_copy.default", "reshape.default", "unsqueeze.default", "select.int", "expand.default"), _same
    ),
    "full.default": _number,
    **dict.fromkeys(("add.Tensor", "add.Scalar"), _add),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), _sub),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _rsub),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _mul),
    **dict.fromkeys(("div.Tensor", "div.Scalar"), _div),
    "neg.default": _neg,
    **dict.fromkeys(("mv.default", "mm.default"), _product),
    "sum.dim_IntList": _summed,
}
