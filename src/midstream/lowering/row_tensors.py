"""Rebuilds the tensor operations of a recorded write as the steps of a program (see `lowering.row_programs`).

A `RowTensor` has one group of entries for each row of the site's value. In the recording, the axis of the rows may lie anywhere or be
missing; in the program it comes first. Sizes that mean the number of rows become `RowCount`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from midstream.plan.building import Builder, StepResult
from midstream.plan.rowwise import ELEMENTWISE, RULES, overload
from midstream.plan.steps import DType, Ref, RowCount
from midstream.tree import objects_in

SAME = frozenset("clone alias detach contiguous lift_fresh lift_fresh_copy".split())
_VIEWS = frozenset("view reshape _unsafe_view _reshape_alias".split())
_NEW = {"new_zeros": 0, "new_empty": 0, "new_ones": 1, "new_full": None}
_WITHOUT_AXES = frozenset(
    "native_layer_norm.default zeros_like.default ones_like.default full_like.default _to_copy.default".split()
)
_ALL_AXES = {  # reductions over all axes of a single token -> the same over listed axes
    "sum.default": "sum.dim_IntList", "mean.default": "mean.dim", "max.default": "amax.default", "min.default": "amin.default",
}  # fmt: skip
_BESIDE = frozenset("gather.default scatter.src scatter.value scatter_add.default cat.default stack.default".split())
# Operations with a tensor of one number -> the same with the number itself.
_WITH_NUMBER = {
    "masked_fill.Tensor": "masked_fill.Scalar", "clamp_min.Tensor": "clamp_min.default", "clamp_max.Tensor": "clamp_max.default",
    **{f"{name}.Tensor": f"{name}.Tensor" for name in "add sub mul div".split()},
    **{f"{name}.Tensor": f"{name}.Scalar" for name in "eq ne lt le gt ge".split()},
}  # fmt: skip


_PRODUCT = "it multiplies tokens with each other"
TWICE = "it names a token twice"
OWN_ROWS = "a tensor has numbers of its own for each token"

# Which rows: indices that are applied to the list of all rows, one after the other. Empty for all rows.
RowChoice = tuple[int | slice | tuple[int, ...], ...]


def rows_of(rows: RowChoice, tokens: int) -> list[int]:
    """The rows among `tokens`. Raises IndexError for a row outside."""
    found: Any = list(range(tokens))
    for each in rows:
        found = [found] if isinstance(found, int) else found  # a single row whose axis has been put back
        found = [found[i] for i in each] if isinstance(each, tuple) else found[each]
    return [found] if isinstance(found, int) else found


# Answers a question about the row that is read: -1 if it is not among these rows of the site, else 0. The question may be about a tensor of
# the code's own with a row for each of these rows. The answer is 0 if all rows of the tensor are equal. If they differ, it is the number of
# the tensor's first row that equals the tensor's row for the row that is read.
Ask = Callable[[RowChoice, torch.Tensor | None], int]


class NoProgram(Exception):
    """Why a value is not row-wise."""


@dataclass(frozen=True, eq=False)
class RowTensor:
    """A tensor that has entries for each of some rows of the site.

    Attributes:
        result: in the program, with the rows on the first axis.
        rows: which of the site's rows it has.
        lead: how many axes of size 1 the recorded tensor has before the rows; -1 if it is a single row without that axis.
    """

    result: StepResult
    rows: RowChoice = ()
    lead: int = 0


class RowOperations:
    """Makes a program of operations on row tensors.

    Args:
        builder: gets the steps of the program.
        tokens: T, as recorded.
        ask: answers questions about the row that is read.

    Attributes:
        line: the line of the code to note for the next operations.
    """

    def __init__(self, builder: Builder, tokens: int, ask: Ask) -> None:
        self.builder = builder
        self.line = 0
        self._tokens, self._ask = tokens, ask
        self._shaped_before: dict[Ref, StepResult] = {}  # result of a reshape -> its argument

    def result_of(
        self, packet: str, which: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: int | None
    ) -> Any:
        """The result of an operation."""
        if packet in SAME:
            return args[0]
        if packet in _VIEWS:
            return self.view(args[0], args[1])
        if packet in _NEW:
            return self._new(packet, args, kwargs)
        rule = getattr(self, f"op_{packet.strip('_')}", None)
        if rule is not None:
            return rule(*args, **kwargs)
        return self.plain(f"{packet}.{which}", args, kwargs, out)

    # Steps.

    def made(
        self,
        like: RowTensor,
        op: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        out: int | None = None,
    ) -> RowTensor:
        """A step's result, for the same rows as `like`."""
        named = {name: _results(each) for name, each in (kwargs or {}).items()}
        return RowTensor(self.builder.add(op, _results(tuple(args)), named, self.line, out), like.rows, like.lead)

    def cast(self, tensor: RowTensor, dtype: torch.dtype) -> RowTensor:
        if tensor.result.dtype == dtype:
            return tensor
        return self.made(tensor, "_to_copy.default", (tensor,), {"dtype": DType(str(dtype).removeprefix("torch."))})

    def reshaped(self, tensor: RowTensor, shape: Sequence[int], times: int = 1) -> RowTensor:
        """The tensor with other axes after the first, which has `times` entries for each row."""
        result = self.unshaped(tensor.result)  # reshape the original tensor, not a reshaped one
        if (times, *shape) == (result.shaped.rows, *result.shape):
            return replace(tensor, result=result)
        made = self.made(tensor, "reshape.default", (replace(tensor, result=result), (RowCount(times), *shape)))
        self._shaped_before[made.result.ref] = result
        return made

    def unshaped(self, result: StepResult) -> StepResult:
        """The result that was reshaped into this one."""
        return self._shaped_before.get(result.ref, result)

    def expanded(self, tensor: RowTensor, shape: Sequence[int]) -> RowTensor:
        if tuple(shape) == tensor.result.shape:
            return tensor
        return self.made(tensor, "expand.default", (tensor, (RowCount(tensor.result.shaped.rows), *shape)))

    def as_row_tensor(self, own: Any, like: RowTensor) -> RowTensor:
        """One of the code's own tensors, or a number, with the shape and dtype of `like`."""
        sizes, dtype = (RowCount(like.result.shaped.rows), *like.result.shape), like.result.dtype
        if isinstance(own, torch.Tensor) and own.numel() == 1:
            own = own.item()
        if not isinstance(own, torch.Tensor):
            return self.made(like, "full.default", (sizes, own), {"dtype": DType(str(dtype).removeprefix("torch."))})
        return self.made(like, "expand.default", (self.aligned(own, like).to(dtype), sizes))

    def aligned(self, own: torch.Tensor, like: RowTensor) -> torch.Tensor:
        """A tensor of the code's own that broadcasts with `like`: without the axes before the rows, and with the numbers of the row that is
        read, if each has its own.
        """
        rank = like.result.rank
        while own.ndim > max(rank, rank + like.lead) or (like.lead > 0 and own.ndim > rank):
            if own.shape[0] != 1:
                raise NoProgram("a tensor adds an axis in front of the tokens")
            own = own[0]
        if like.lead < 0 and own.ndim == rank:
            if own.shape[0] != 1:
                raise NoProgram("a tensor adds an axis in front of the token's numbers")
            own = own[0]
        if own.ndim == rank and own.shape[0] != 1:
            if own.shape[0] == self.count(like) and like.result.shaped.rows == 1:
                place = max(self._ask(like.rows, own), 0)  # any row will do if `like` lacks it: it is not used
            elif bool((own == own[:1]).all()):
                place = 0
            else:
                raise NoProgram(OWN_ROWS)
            own = own[place : place + 1]
        return own

    def count(self, tensor: RowTensor) -> int:
        """How many rows it has in the recording."""
        return len(rows_of(tensor.rows, self._tokens))

    def plain(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: int | None = None) -> RowTensor:
        """The result of an operation of `plan.rowwise`, with its arguments in the program's layout."""
        tensors = list(objects_in((args, tuple(kwargs.values())), RowTensor))
        like = max(tensors, key=lambda each: each.result.rank)
        if any((each.rows, each.lead) != (like.rows, like.lead) for each in tensors):
            raise NoProgram("it uses different tokens together")
        if op in ELEMENTWISE:
            op, args = self._with_number(op, args)
            like, args = self._of_one_rank(like, args)
            args = tuple(self.aligned(each, like) if isinstance(each, torch.Tensor) else each for each in args)
        elif op in _BESIDE:
            args = self._all_blocks(args, like)
        if like.lead and op not in ELEMENTWISE and op not in _WITHOUT_AXES:
            op, args, kwargs = _moved(op, like, args, kwargs)
        return self.made(like, op, args, kwargs, out)

    def _of_one_rank(self, like: RowTensor, args: tuple[Any, ...]) -> tuple[RowTensor, tuple[Any, ...]]:
        """The arguments reshaped to the same number of axes, where the recorded tensors lack the axis of the rows."""
        if like.lead >= 0:
            return like, args
        rank = max(like.result.rank, *(each.ndim + 1 for each in args if isinstance(each, torch.Tensor)), 0)

        def fitted(each: Any) -> Any:
            if not isinstance(each, RowTensor):
                return each
            ones = [1] * (rank - each.result.rank)
            return self.reshaped(each, (*ones, *each.result.shape), each.result.shaped.rows)

        return fitted(like), tuple(map(fitted, args))

    def _with_number(self, op: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The operation with a number in place of a tensor of one element without axes. PyTorch computes the same with both for floats."""
        own = args[-1]
        is_number = (
            isinstance(own, torch.Tensor)
            and own.ndim == 0
            and isinstance(args[0], RowTensor)
            and bool(torch.isfinite(own))
        )
        if not is_number or op not in _WITH_NUMBER or not args[0].result.dtype.is_floating_point:
            return op, args
        return _WITH_NUMBER[op], (*args[:-1], own.item())

    def _all_blocks(self, args: tuple[Any, ...], like: RowTensor) -> tuple[Any, ...]:
        def as_row_tensor(each: Any) -> Any:
            if isinstance(each, tuple):
                return tuple(map(as_row_tensor, each))
            if not isinstance(each, torch.Tensor):
                return each
            own = self.aligned(each, like)
            own = own if own.ndim == like.result.rank else own[None]
            return self.made(like, "expand.default", (own, (RowCount(like.result.shaped.rows), *own.shape[1:])))

        return tuple(map(as_row_tensor, args))

    # Views.

    def view(self, tensor: RowTensor, sizes: Sequence[int]) -> RowTensor:
        """The tensor reshaped to the recorded sizes."""
        each = math.prod(tensor.result.shape) * tensor.result.shaped.rows  # of a row
        count = self.count(tensor) if tensor.lead >= 0 else 1
        if not count:
            raise NoProgram("it is about no token")
        known = math.prod(size for size in sizes if size >= 0)
        sizes = [each * count // max(known, 1) if size < 0 else size for size in sizes]
        if tensor.lead < 0:
            is_back = len(sizes) == tensor.result.rank and sizes[0] == 1
            return replace(self.reshaped(tensor, sizes[1:]), lead=0) if is_back else self.reshaped(tensor, sizes)
        if (
            count == 1
            and tensor.result.shaped.rows == 1
            and len(sizes) < tensor.result.rank + tensor.lead
            and 1 not in sizes[:1]
        ):
            return replace(self.reshaped(tensor, sizes), lead=-1)
        for lead, size in enumerate(sizes):
            if size % count == 0 and size:
                return replace(self.reshaped(tensor, sizes[lead + 1 :], size // count), lead=lead)
            if size != 1:
                break
        raise NoProgram("it moves tokens into another axis")

    def _dim(self, tensor: RowTensor, dim: int, more: int = 0) -> int:
        """An axis of the recorded tensor as one of the program's: 0 is the rows' axis, and lower ones come before it."""
        return dim % (tensor.result.rank + tensor.lead + more) - tensor.lead

    def op_unsqueeze(self, tensor: RowTensor, dim: int) -> RowTensor:
        axis = self._dim(tensor, dim, 1)
        if axis > 0 and not (tensor.lead < 0 and axis == 1):
            return self.made(tensor, "unsqueeze.default", (tensor, axis))
        return replace(tensor, lead=tensor.lead + 1)

    def op_squeeze(self, tensor: RowTensor, dim: Any = None) -> RowTensor:
        rank = tensor.result.rank + tensor.lead
        axes = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
        lead, shape = tensor.lead, list(tensor.result.shape)
        for axis in sorted({self._dim(tensor, each) for each in axes}, reverse=True):
            if axis > 0 and shape[axis - 1] == 1:
                del shape[axis - 1]
            elif axis < 0 or (axis == 0 and self.count(tensor) * tensor.result.shaped.rows == 1):
                lead -= 1
        return replace(self.reshaped(tensor, shape, tensor.result.shaped.rows), lead=lead)

    def op_expand(self, tensor: RowTensor, sizes: Sequence[int]) -> RowTensor:
        front = len(sizes) - tensor.result.rank - tensor.lead
        here = sizes[front + max(tensor.lead, 0) + (tensor.lead >= 0) :]
        if any(size != 1 for size in sizes[: front + max(tensor.lead, 0)]):
            raise NoProgram("it adds an axis in front of the tokens")
        shape = [old if new == -1 else new for old, new in zip(tensor.result.shape, here, strict=True)]
        return replace(self.expanded(tensor, shape), lead=tensor.lead + front)

    def op_permute(self, tensor: RowTensor, dims: Sequence[int]) -> RowTensor:
        axes = [self._dim(tensor, dim) for dim in dims]
        shape = [*[1] * tensor.lead, self.count(tensor) * tensor.result.shaped.rows, *tensor.result.shape]
        if tensor.lead >= 0 and shape[tensor.lead] == 1:  # moving axes of size 1 only changes the shape
            wide = [dim for dim in dims if shape[dim] != 1]
            if wide == sorted(wide):
                return self.view(tensor, [shape[dim] for dim in dims])
        if tensor.lead < 0:
            axes = [0, *axes]
        elif axes[: tensor.lead + 1] != list(range(-tensor.lead, 1)):
            raise NoProgram("it moves the axis of the tokens")
        return self.made(tensor, "permute.default", (tensor, tuple(axis for axis in axes if axis >= 0)))

    def op_transpose(self, tensor: RowTensor, one: int, other: int) -> RowTensor:
        dims = list(range(tensor.result.rank + tensor.lead))
        dims[one], dims[other] = dims[other], dims[one]
        return self.op_permute(tensor, dims)

    def op_select(self, tensor: RowTensor, dim: int, index: int) -> RowTensor:
        axis = self._dim(tensor, dim)
        if axis > 0:
            return self.made(tensor, "select.int", (tensor, axis, index))
        if axis < 0:
            return replace(tensor, lead=tensor.lead - 1)
        return self._chosen(tensor, index)

    def op_slice(
        self, tensor: RowTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> RowTensor:
        axis, chosen = self._dim(tensor, dim), slice(start, end, step)
        if axis == 0:
            is_all = start in (0, None) and step == 1 and (end is None or end >= 1 << 62)  # for any number of rows
            return tensor if is_all else self._chosen(tensor, chosen)
        size = tensor.result.shape[axis - 1] if axis > 0 else 1
        if chosen.indices(size) == (0, size, 1):
            return tensor
        if axis < 0:
            raise NoProgram("it takes nothing of an axis in front of the tokens")
        first, last, step = chosen.indices(size)
        return self.made(tensor, "slice.Tensor", (tensor, axis, first, last, step))

    def _chosen(self, tensor: RowTensor, chosen: Any) -> RowTensor:
        if tensor.lead or tensor.result.shaped.rows != 1:
            raise NoProgram("it takes some tokens after another axis")
        return replace(tensor, rows=(*tensor.rows, chosen), lead=-1 if isinstance(chosen, int) else 0)

    # Indices.

    def _places(self, tensor: RowTensor, indices: Sequence[Any]) -> tuple[Any, ...]:
        """The indices in the program's layout, with None for the rows' axis."""
        if any(isinstance(each, RowTensor) for each in indices):
            raise NoProgram("it uses indices that only the forward has")
        if tensor.lead > 0 and any(each is not None for each in indices[: tensor.lead]):
            raise NoProgram("it takes nothing of an axis in front of the tokens")
        indices = (None, *indices) if tensor.lead < 0 else indices[tensor.lead :]
        sizes = (0, *tensor.result.shape)
        return tuple(each if each is None or not i else each.long() % sizes[i] for i, each in enumerate(indices))

    def op_index(self, tensor: Any, indices: Sequence[Any]) -> RowTensor:
        if isinstance(tensor, torch.Tensor):  # looks up rows of the code's own matrix, such as an SAE's decoder
            if tensor.ndim != 2 or len(indices) != 1:
                raise NoProgram("it uses indices that only the forward has")
            return self.made(indices[0], "embedding.default", (tensor, indices[0]))
        if (rows := self._rows_in(tensor, indices)) is not None:
            return self._chosen(tensor, rows)
        return self.made(tensor, "index.Tensor", (tensor, self._places(tensor, indices)))

    def _rows_in(self, tensor: RowTensor, indices: Sequence[Any]) -> tuple[int, ...] | None:
        """The rows that indices select; None if they select along other axes."""
        first, *others = indices
        if first is None or tensor.lead:
            return None
        if not isinstance(first, torch.Tensor) or first.ndim != 1 or any(each is not None for each in others):
            raise NoProgram("its indices are about tokens and numbers together")
        places = tuple(first.tolist())
        count = max(self.count(tensor), 1)
        if len({place % count for place in places}) < len(places):
            raise NoProgram(TWICE)
        return places

    def op_index_put(
        self, tensor: RowTensor, indices: Sequence[Any], values: Any, accumulate: bool = False
    ) -> RowTensor:
        if (rows := self._rows_in(tensor, indices)) is not None:
            there = self._chosen(tensor, rows)
            new = self.plain("add.Tensor", (there, values), {}) if accumulate else self.op_copy(there, values)
            return self.put(tensor, replace(new, rows=there.rows))
        places = self._places(tensor, indices)
        there = self.made(tensor, "index.Tensor", (tensor, places))
        if isinstance(values, RowTensor):
            values = self.cast(values, tensor.result.dtype)
        elif isinstance(values, torch.Tensor):
            values = self.aligned(values, there).to(tensor.result.dtype)
        return self.made(tensor, "index_put.default", (tensor, places, values, accumulate))

    def has(self, tensor: RowTensor) -> bool:
        """Whether the row that is read is one of the tensor's."""
        return not tensor.rows or self._ask(tensor.rows, None) >= 0

    def put(self, tensor: RowTensor, new: RowTensor) -> RowTensor:
        """The tensor with `new` in place of the rows that `new` has."""
        return replace(new, rows=tensor.rows, lead=tensor.lead) if self.has(new) else tensor

    # New numbers.

    def op_copy(self, tensor: RowTensor, new: Any, non_blocking: bool = False) -> RowTensor:
        if not isinstance(new, RowTensor):
            return self.as_row_tensor(new, tensor)
        if new.rows != tensor.rows or new.result.shaped.rows != tensor.result.shaped.rows or new.lead > tensor.lead:
            raise NoProgram("it writes numbers of other tokens")
        is_narrower = new.lead < tensor.lead and new.lead < 0 and self.count(tensor) != 1
        if new.result.rank > tensor.result.rank or is_narrower:
            raise NoProgram("it writes numbers of other tokens")
        new = self.cast(new, tensor.result.dtype)
        missing = tensor.result.rank - new.result.rank
        if missing:
            if new.lead >= 0:
                raise NoProgram("it writes numbers of other tokens")
            new = self.reshaped(new, (*[1] * missing, *new.result.shape))
        return replace(self.expanded(new, tensor.result.shape), lead=tensor.lead)

    op_fill = op_copy

    def op_zero(self, tensor: RowTensor) -> RowTensor:
        return self.as_row_tensor(0, tensor)

    def op_to_copy(self, tensor: RowTensor, dtype: DType | None = None) -> RowTensor:
        return tensor if dtype is None else self.cast(tensor, getattr(torch, dtype.name))

    def _new(self, packet: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RowTensor:
        tensor, sizes = args[0], args[1]
        number = _NEW[packet] if _NEW[packet] is not None else args[2]
        dtype = kwargs.get("dtype") or DType(str(tensor.result.dtype).removeprefix("torch."))
        if tensor.lead > 0 or (tensor.lead == 0 and (not sizes or sizes[0] != self.count(tensor))):
            raise NoProgram("it makes a tensor without an axis of tokens")
        shape = sizes if tensor.lead < 0 else sizes[1:]
        return self.made(tensor, "full.default", ((RowCount(1), *shape), number), {"dtype": dtype})

    def back(self, op: str, args: Sequence[Any], view: RowTensor, new: RowTensor) -> RowTensor:
        """`view` after a write of `new` to the view that the operation `op` makes of it."""
        packet = op.removeprefix("aten.").partition(".")[0]
        if packet in SAME:
            return new
        if packet in _VIEWS or packet in ("unsqueeze", "squeeze"):
            return replace(self.reshaped(new, view.result.shape, view.result.shaped.rows), lead=view.lead)
        if packet in ("permute", "transpose"):
            dims = list(args[0]) if packet == "permute" else list(range(view.result.rank + view.lead))
            if packet == "transpose":
                dims[args[0]], dims[args[1]] = dims[args[1]], dims[args[0]]
            return self.op_permute(new, [dims.index(axis) for axis in range(len(dims))])
        if packet not in ("select", "slice"):
            raise NoProgram(f"it writes to the result of {packet}")
        axis = self._dim(view, args[0] if args else 0)
        if axis <= 0 or (packet == "slice" and new.result.shape == view.result.shape):
            return replace(new, lead=view.lead)
        if packet == "select":
            return self.made(view, "select_scatter.default", (view, new, axis, args[1]))
        start, end, step = slice(*args[1:]).indices(view.result.shape[axis - 1]) if len(args) > 1 else (0, None, 1)
        return self.made(view, "slice_scatter.default", (view, new, axis, start, end, step))

    # Products.

    def op_dot(self, one: Any, other: Any) -> RowTensor:
        tensor, own = (one, other) if isinstance(one, RowTensor) else (other, one)
        if not isinstance(own, RowTensor):
            return self.made(tensor, "mv.default", (tensor, own))
        product = self.plain("mul.Tensor", (tensor, own), {})
        return self.made(product, "sum.dim_IntList", (product, (1,)))

    def op_mv(self, one: Any, other: Any) -> RowTensor:
        if isinstance(one, RowTensor) and not one.lead and not isinstance(other, RowTensor):
            return self.made(one, "mv.default", (one, other))
        if isinstance(one, torch.Tensor) and isinstance(other, RowTensor) and other.lead < 0:
            return self.made(other, "mm.default", (other, one.t()))
        raise NoProgram(_PRODUCT)

    def op_mm(self, one: Any, other: Any) -> RowTensor:
        if not isinstance(one, RowTensor) or isinstance(other, RowTensor) or one.lead > 0:
            raise NoProgram(_PRODUCT)
        return self._times(one, other) if one.lead < 0 else self.made(one, "mm.default", (one, other))

    def op_bmm(self, one: Any, other: Any) -> RowTensor:
        if isinstance(one, RowTensor) and isinstance(other, RowTensor) and not one.lead:
            return self.plain("bmm.default", (one, other), {})
        if not isinstance(one, RowTensor) or isinstance(other, RowTensor) or one.lead not in (0, 1):
            raise NoProgram(_PRODUCT)
        if one.lead == 1:
            return self.made(one, "mm.default", (one, other[0]))
        return self._times(one, self.aligned(other, one)[0])

    def _times(self, tensor: RowTensor, matrix: torch.Tensor) -> RowTensor:
        """Each row's matrix times the same matrix."""
        times, (each, size) = tensor.result.shaped.rows, tensor.result.shape
        product = self.made(tensor, "mm.default", (self.reshaped(tensor, (size,), times * each), matrix))
        return self.reshaped(product, (each, matrix.shape[1]), times)


def _results(tree: Any) -> Any:
    if isinstance(tree, RowTensor):
        return tree.result
    return tuple(map(_results, tree)) if isinstance(tree, (tuple, list)) else tree


def _moved(
    op: str, like: RowTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """An operation along axes, with the axes renumbered for a tensor whose rows were not on the first axis in the recording."""
    if op in _ALL_AXES and like.lead < 0:
        op = _ALL_AXES[op]
    if op not in RULES:
        raise NoProgram(f"{op} is not an operation that programs may have")
    schema = overload(op)._schema.arguments
    names = [each.name for each in schema]
    axis = next((name for name in ("dim", "dims") if name in names), None)
    if axis is None:
        raise NoProgram(f"{op} of a single token, or of tokens after another axis, is not known")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rank, default = like.result.rank, schema[names.index(axis)]
    dims = given.get(axis, default.default_value if default.has_default_value() else None)
    more = int(op == "stack.default")
    every = list(range(rank + like.lead))
    listed = every if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else list(dims)
    moved = [dim % (rank + like.lead + more) - like.lead for dim in listed]
    if any(dim <= 0 for dim in moved):
        raise NoProgram("it is about the axis of the tokens")
    takes_list = "List" in str(default.type)
    if not takes_list and len(moved) > 1:
        raise NoProgram(f"{op} of a single token, or of tokens after another axis, is not known")
    given[axis] = tuple(moved) if takes_list else moved[0]
    return op, (), given
