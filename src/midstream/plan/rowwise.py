"""The operations that programs may have, and the rules that keep each of them row-wise.

`plan.checking` runs a program without numbers. Each result is either the same for all rows, or its first axis has a group of entries for
each row. Each operation has a rule, which derives this from its arguments and refuses arguments that would combine different groups. Rules
also track the range of indices: an index out of range would end the engine's process. A result has a range only if its inputs prove it.
As a second protection, `plan.running` clamps all indices when a program runs.

Legend: R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from midstream.plan.steps import RowCount
from midstream.tree import objects_in

_aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Shaped:
    """What is known about a result while a program is checked.

    Attributes:
        meta: its shape and dtype.
        rows: how many entries of the first axis belong to each row; 0 if the result is the same for all rows.
        bound: its integers are at least 0 and below this; None if no bound is known.
    """

    meta: torch.Tensor
    rows: int = 0
    bound: int | None = None


class Mixes(Exception):
    """The arguments make an operation mix rows, or may make it fail. The message says why."""


class RuleResult(NamedTuple):
    """What a rule infers about an operation's results: `rows` and `bound` as in `Shaped`. `bound` applies to the result `which`."""

    rows: int
    bound: int | None = None
    which: int = 0


@dataclass(eq=False, slots=True)
class OpCall:
    """One operation: its arguments by their names in PyTorch's schema."""

    named: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    @property
    def tensors(self) -> list[Shaped]:
        return list(objects_in(self.named, Shaped))

    def dims(self, name: str, of: Shaped, more: int = 0) -> list[int]:
        """The axes that an argument names, counted from 0. Refuses the axis of the rows, also if no axis is named and all are meant."""
        given, rank = self[name], of.meta.ndim + more
        listed = list(given) if isinstance(given, (tuple, list)) else [given]
        if of.rows and (not listed or given is None):
            raise Mixes("without an axis it is about all rows at once")
        found = [dim % rank if isinstance(dim, int) and rank else -1 for dim in listed]
        if of.rows and not all(dim > 0 for dim in found):
            raise Mixes("it is about the axis of the rows")
        return found


Rule = Callable[[OpCall], RuleResult]


# ----------------------------------------------------------------------------------------------------------------- rules


def _rows_of(tensors: Sequence[Shaped]) -> int:
    """The rows of a result that is computed entry by entry from these tensors, by broadcasting."""
    blocks = [each for each in tensors if each.rows]
    if not blocks:
        return 0
    rank, rows = max(each.meta.ndim for each in tensors), blocks[0].rows
    for each in tensors:
        if each.rows and (each.meta.ndim != rank or each.rows != rows):
            raise Mixes("its arguments have the rows on different axes")
        if not each.rows and each.meta.ndim == rank and each.meta.shape[0] != 1:
            raise Mixes("one of its arguments has numbers of its own for each row")
    return rows


def _elementwise(call: OpCall) -> RuleResult:
    return RuleResult(_rows_of(call.tensors))


def _floating(call: OpCall) -> RuleResult:
    """Computes entry by entry, and may fail for integers."""
    if not any(each.meta.dtype.is_floating_point for each in call.tensors):
        raise Mixes("it takes floating numbers here")
    return _elementwise(call)


def _along(places: int | None = None) -> Rule:
    """Computes along some axes. `places`: the index of the result that has positions along the axis."""

    def rule(call: OpCall) -> RuleResult:
        x = call["self"]
        dims = call.dims("dim", x)
        if places is None or not x.meta.ndim or dims[0] < 0:
            return RuleResult(x.rows)
        return RuleResult(x.rows, x.meta.shape[dims[0]], places)

    return rule


def _view(name: str = "dim", more: int = 0) -> Rule:
    """A view or a copy that leaves the first axis alone. `more`: how many more axes the result has than the argument."""

    def rule(call: OpCall) -> RuleResult:
        x = call["self"]
        call.dims(name, x, more)
        return RuleResult(x.rows, x.bound)

    return rule


def _permute(call: OpCall) -> RuleResult:
    x, dims = call["self"], call["dims"]
    if x.rows and (not dims or dims[0] % x.meta.ndim):
        raise Mixes("it moves the axis of the rows")
    return RuleResult(x.rows, x.bound)


def _transpose(call: OpCall) -> RuleResult:
    x = call["self"]
    if x.rows and not (call["dim0"] % x.meta.ndim and call["dim1"] % x.meta.ndim):
        raise Mixes("it moves the axis of the rows")
    return RuleResult(x.rows, x.bound)


def _t(call: OpCall) -> RuleResult:
    if call["self"].rows:
        raise Mixes("it moves the axis of the rows")
    return RuleResult(0, call["self"].bound)


def _times(sizes: Sequence[Any]) -> int:
    return sizes[0].times if sizes and isinstance(sizes[0], RowCount) else 0


def _reshape(call: OpCall) -> RuleResult:
    x, sizes = call["self"], call["shape"]
    if x.rows and not _times(sizes):
        raise Mixes("its first size is not a number of rows")
    if not x.rows and _times(sizes):
        raise Mixes("its argument has no rows")
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise Mixes("its sizes have to be given")
    return RuleResult(_times(sizes), x.bound)


def _expand(call: OpCall) -> RuleResult:
    x, sizes = call["self"], call["size"]
    if x.rows and (len(sizes) != x.meta.ndim or _times(sizes) != x.rows):
        raise Mixes("its first size is not the number of rows")
    return RuleResult(_times(sizes), x.bound)


def _full(call: OpCall) -> RuleResult:
    return RuleResult(_times(call["size"]))


def _like(call: OpCall) -> RuleResult:
    return RuleResult(call["self"].rows)


def _same(call: OpCall) -> RuleResult:
    return RuleResult(call["self"].rows, call["self"].bound if not call["dtype"] else None)


def _matrix(x: str, y: str, added: str | None = None) -> Rule:
    """`x @ y (+ added)`, where x has the rows."""

    def rule(call: OpCall) -> RuleResult:
        left, right, more = call[x], call[y], call[added] if added else None
        if right.rows:
            raise Mixes("its second matrix has rows")
        if more is not None and (more.rows or more.meta.ndim == 2):
            product = Shaped(torch.empty(left.meta.shape[0], right.meta.shape[-1], device="meta"), left.rows)
            _rows_of([product, more])
            if more.rows != left.rows and more.rows:
                raise Mixes("its arguments have the rows on different axes")
        return RuleResult(left.rows)

    return rule


def _bmm(call: OpCall) -> RuleResult:
    if call["self"].rows != call["mat2"].rows:
        raise Mixes("its arguments have the rows on different axes")
    return RuleResult(call["self"].rows)


def _layer_norm(call: OpCall) -> RuleResult:
    x = call["input"]
    if x.rows and len(call["normalized_shape"]) >= x.meta.ndim:
        raise Mixes("it is about all rows at once")
    if any(each.rows for each in call.tensors if each is not x):
        raise Mixes("its weight or bias has rows")
    return RuleResult(x.rows)


def _joined(more: int) -> Rule:
    def rule(call: OpCall) -> RuleResult:
        parts = call["tensors"]
        if not parts or len({(each.rows, each.meta.ndim) for each in parts}) > 1:
            raise Mixes("its parts have the rows on different axes")
        call.dims("dim", parts[0], more)
        bounds = [each.bound for each in parts]
        return RuleResult(parts[0].rows, None if None in bounds else max(bounds))

    return rule


def _within(index: Shaped, size: int) -> None:
    if index.bound is None or index.bound > size or (size == 0 and index.meta.numel()):
        raise Mixes(
            "its indices may lie outside: they have to be constants, or to come from topk, sort, argmax or the like"
        )


def _gather(call: OpCall) -> RuleResult:
    x, index = call["self"], call["index"]
    (dim,) = call.dims("dim", x)
    blocks = [each for each in call.tensors]
    if len({each.rows for each in blocks}) > 1 or any(
        each.meta.ndim != x.meta.ndim for each in blocks if each.meta.ndim
    ):
        raise Mixes("its arguments have the rows on different axes")
    _within(index, x.meta.shape[dim])
    return RuleResult(x.rows, x.bound)


def _scatter(call: OpCall) -> RuleResult:
    """A copy of x with other numbers at some places."""
    return RuleResult(_gather(call).rows)


def _indexed(call: OpCall) -> RuleResult:
    """`x[:, places]`, or a copy of x with other numbers there."""
    x, values = call["self"], call["values"]
    indices = call["indices"]
    used = [i for i, each in enumerate(indices) if each is not None]
    if not used or used[-1] - used[0] + 1 != len(used) or (x.rows and used[0] == 0):
        raise Mixes("its indices are about the axis of the rows, or have a gap between them")
    for i in used:
        if not isinstance(indices[i], Shaped) or indices[i].rows or indices[i].meta.dtype != torch.int64:
            raise Mixes("its indices have to be whole numbers, the same for all rows")
        _within(indices[i], x.meta.shape[i])
    if values is None:
        return RuleResult(x.rows, x.bound)
    there = _aten.index.Tensor(x.meta, [None if each is None else each.meta for each in indices])
    if values.rows and not x.rows:
        raise Mixes("its arguments have the rows on different axes")
    _rows_of([Shaped(there, x.rows), values])
    return RuleResult(x.rows)


def _index_select(call: OpCall) -> RuleResult:
    x, index = call["self"], call["index"]
    (dim,) = call.dims("dim", x)
    if index.rows:
        raise Mixes("its indices have rows")
    _within(index, x.meta.shape[dim])
    return RuleResult(x.rows, x.bound)


def _embedding(call: OpCall) -> RuleResult:
    if call["weight"].rows:
        raise Mixes("its weight has rows")
    _within(call["indices"], call["weight"].meta.shape[0])
    return RuleResult(call["indices"].rows)


def _scattered(call: OpCall) -> RuleResult:
    """A copy with other numbers in a view."""
    x, src = call["self"], call["src"]
    call.dims("dim", x)
    if x.rows != src.rows:
        raise Mixes("its arguments have the rows on different axes")
    return RuleResult(x.rows)


def _prelu(call: OpCall) -> RuleResult:
    if call["weight"].rows:
        raise Mixes("its weight has rows")
    return _elementwise(call)


# ----------------------------------------------------------------------------------------------------------------- table

_EACH = """
    abs neg positive exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh cosh tanh asinh acosh
    atanh sigmoid silu gelu relu leaky_relu elu celu softplus mish hardtanh hardsigmoid hardswish threshold log_sigmoid_forward erf erfc
    erfinv sign sgn floor ceil round round.decimals trunc frac logit sinc nan_to_num isnan isinf isfinite logical_not bitwise_not
    softshrink hardshrink relu6 selu lgamma digamma signbit isposinf isneginf deg2rad rad2deg maximum minimum fmax fmin
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar
    clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor where.self where.ScalarSelf where.ScalarOther where.Scalar
    lerp.Scalar lerp.Tensor addcmul addcdiv atan2 hypot copysign.Tensor copysign.Scalar xlogy.Tensor logaddexp logaddexp2 heaviside
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
    logical_and logical_or logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
    bitwise_xor.Scalar masked_fill.Scalar masked_fill.Tensor
"""
_EACH_FLOATING = """
    div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
"""
_ALONG = """
    sum.dim_IntList mean.dim amax amin var.correction std.correction linalg_vector_norm norm.ScalarOpt_dim any.dim any.dims all.dim all.dims
    logsumexp prod.dim_int cumsum cumprod logcumsumexp _softmax _log_softmax softmax.int log_softmax.int nansum count_nonzero.dim_IntList
    glu var.dim std.dim aminmax
"""
_ALONG_WITH_PLACES = "max.dim min.dim topk sort sort.stable kthvalue median.dim cummax cummin"


def _key(name: str) -> str:
    return name if "." in name else f"{name}.default"


RULES: dict[str, Rule] = {
    **{_key(name): _elementwise for name in _EACH.split()},
    **{_key(name): _floating for name in _EACH_FLOATING.split()},
    **{_key(name): _along() for name in _ALONG.split()},
    **{_key(name): _along(1) for name in _ALONG_WITH_PLACES.split()},
    **{_key(name): _along(0) for name in ("argmax", "argmin", "argsort")},
    "unsqueeze.default": _view(more=1),
    "squeeze.dim": _view(),
    "squeeze.dims": _view(),
    "select.int": _view(),
    "slice.Tensor": _view(),
    "unbind.int": _view(),
    "split.Tensor": _view(),
    "split_with_sizes.default": _view(),
    "flip.default": _view("dims"),
    "roll.default": _view("dims"),
    "permute.default": _permute,
    "transpose.int": _transpose,
    "t.default": _t,
    "reshape.default": _reshape,
    "expand.default": _expand,
    "full.default": _full,
    "zeros_like.default": _like,
    "ones_like.default": _like,
    "full_like.default": _like,
    "_to_copy.default": _same,
    "clone.default": _same,
    "mm.default": _matrix("self", "mat2"),
    "mv.default": _matrix("self", "vec"),
    "addmm.default": _matrix("mat1", "mat2", "self"),
    "bmm.default": _bmm,
    "native_layer_norm.default": _layer_norm,
    "cat.default": _joined(0),
    "stack.default": _joined(1),
    "gather.default": _gather,
    "scatter.src": _scatter,
    "scatter.value": _scatter,
    "scatter_add.default": _scatter,
    "index.Tensor": _indexed,
    "index_put.default": _indexed,
    "index_select.default": _index_select,
    "embedding.default": _embedding,
    "select_scatter.default": _scattered,
    "slice_scatter.default": _scattered,
    "prelu.default": _prelu,
}
ELEMENTWISE = frozenset(name for name, rule in RULES.items() if rule in (_elementwise, _floating))
# The names of the operations without their overloads; and the names of those that may fail for integers.
PACKETS = frozenset(name.partition(".")[0] for name in RULES)
FLOATING = frozenset(name.partition(".")[0] for name, rule in RULES.items() if rule is _floating)
# PyTorch's CPU kernels compute these by other code at the end of an axis, so results depend on how the tensors lie in memory.
BY_LAYOUT = frozenset(
    _key(name)
    for name in "pow.Tensor_Tensor fmod.Tensor remainder.Tensor xlogy.Tensor atan2 hypot logaddexp logaddexp2".split()
)
SIZED = {"reshape.default": "shape", "expand.default": "size", "full.default": "size"}


@functools.cache
def overload(name: str) -> Any:
    """PyTorch's operation of this name. Raises LookupError if the table does not have it."""
    packet, _, which = name.partition(".")
    found = getattr(getattr(_aten, packet, None), which, None) if name in RULES else None
    if found is None:
        raise LookupError(name)
    return found


def on_device(name: str, device: torch.device | str) -> dict[str, Any]:
    """The device argument of an operation whose other arguments do not determine the device."""
    return {"device": device} if name == "full.default" else {}
