"""Finds the programs that edits of kinds other than `Apply` can replace: linear functions of a site's row.

    change = change_of(program)                # None if the program is another function
    Steer.saying(change, ...)                  # Steer and the other kinds turn the change into edits

A program may add to the row only once: `(h + a) - a` rounds twice, and no edit does.

Legend: H the site's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from midstream.plan.ops.edit import RowChange
from midstream.plan.program import Program
from midstream.plan.rowwise import Shaped, overload
from midstream.plan.running import tensor_of
from midstream.plan.steps import INPUT, Const, Ref, Step

_MOST_FACTOR = 1e6  # products of larger factors, or of their inverses, could overflow or underflow in float32


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
    """The code's own numbers: float64, `[1]` or `[H]`."""

    numbers: torch.Tensor
    eps: float

    @property
    def is_single(self) -> bool:
        return self.numbers.numel() == 1


Form = RowChange | Along | Weighted
_ROW = RowChange(1.0, (), None, 0.0)  # h itself


def change_of(program: Program) -> RowChange | None:
    """The change of a row that the program makes; None if no edit makes it."""
    forms: list[Form] = []
    for step, result in zip(program.steps, program.checked.results, strict=True):
        form = _form_of(step, result, forms, program)
        if form is None:
            return None
        forms.append(form)
    found = _ROW if program.result == INPUT else forms[program.result.step]  # type: ignore[union-attr]
    return found if isinstance(found, RowChange) else None


def _form_of(step: Step, result: Shaped, forms: list[Form], program: Program) -> Form | None:
    """The form of a step's result; None if it has none of the forms."""
    if step.op not in _RULES:
        return None
    named = dict(step.kwargs)
    args = step.args or [named[each.name] for each in overload(step.op)._schema.arguments if each.name in named]
    alpha = {"alpha": named["alpha"]} if "alpha" in named else {}
    form = _RULES[step.op](*(_operand(each, forms, program) for each in args), **alpha)
    own, after = getattr(torch, program.dtype), result.meta.dtype
    if step.op == "_to_copy.default" and after != own:  # may round only to the site's own dtype
        before = own if args[0] == INPUT else program.checked.results[args[0].step].meta.dtype
        if not (before.is_floating_point and after.is_floating_point and torch.promote_types(before, after) == after):
            return None
    if isinstance(form, _Known):
        form = RowChange(0.0, (), form.numbers, form.eps)
    if isinstance(form, RowChange) and form.constant is not None:
        form = form._replace(constant=form.constant.expand(program.width))
    row = result.meta.shape[1:]
    is_number, is_row = math.prod(row) == 1, math.prod(row) == program.width and row[-1:] == (program.width,)
    return form if result.rows == 1 and (is_number if isinstance(form, Along) else is_row) else None


def _operand(given: Any, forms: list[Form], program: Program) -> Any:
    if isinstance(given, Ref):
        return _ROW if given == INPUT else forms[given.step] if given.step >= 0 and given.out is None else None
    if isinstance(given, Const):
        given = tensor_of(program.constants[given.place], torch.device("cpu"))
    if not isinstance(given, (torch.Tensor, int, float)):
        return given
    numbers = given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.float64)
    eps = torch.finfo(numbers.dtype).eps if numbers.dtype.is_floating_point else 0.0
    return _Known(numbers.reshape(-1).double(), eps) if numbers.numel() in (1, program.width) else None


# The rules. A form that does not fit the result's shape is dropped.


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
    """`factor * x`; None if it could overflow or underflow, or if it multiplies the row itself, which no edit does."""
    if abs(factor) != 1 and not 1 / _MOST_FACTOR < abs(factor) < _MOST_FACTOR:
        return None
    if isinstance(x, Along):
        return Along(x.w_H * factor, x.b * factor, x.eps)
    if not isinstance(x, RowChange) or x.scale:
        return None
    constant = None if x.constant is None else x.constant * factor
    return RowChange(0.0, tuple((u * factor, w) for u, w in x.outers), constant, x.eps)


def _product(x: Any, y: Any) -> Form | None:
    """A matrix product: of the row and a column, which gives one number for each row, or of these numbers and a row vector."""
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
