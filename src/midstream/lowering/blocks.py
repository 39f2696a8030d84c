"""Operations on the tensors of a recorded write, as steps of a program: see `lowering.rowwise`.

A `Block` is a tensor with rows: the recorded one has them on some axis or lacks the axis, and the program's on the first. Sizes that mean
the number of rows become `Rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from midstream.lowering.passes import Rows as Choice
from midstream.lowering.passes import rows_of
from midstream.plan.building import Builder, Result
from midstream.plan.rowwise import ELEMENTWISE, RULES, overload
from midstream.plan.steps import DType, Ref, Rows
from midstream.tree import objects_in

SAME = frozenset("clone alias detach contiguous lift_fresh lift_fresh_copy".split())
_VIEWS = frozenset("view reshape _unsafe_view _reshape_alias".split())
_NEW = {"new_zeros": 0, "new_empty": 0, "new_ones": 1, "new_full": None}
_WITHOUT_AXES = frozenset(
    "native_layer_norm.default zeros_like.default ones_like.default full_like.default _to_copy.default".split()
)
_ALL_AXES = {  # of a single token
    "sum.default": "sum.dim_IntList", "mean.default": "mean.dim", "max.default": "amax.default", "min.default": "amin.default",
}  # fmt: skip
_BESIDE = frozenset("gather.default scatter.src scatter.value scatter_add.default cat.default stack.default".split())
# With a tensor of one number, and with the number itself.
_WITH_NUMBER = {
    "masked_fill.Tensor": "masked_fill.Scalar", "clamp_min.Tensor": "clamp_min.default", "clamp_max.Tensor": "clamp_max.default",
    **{f"{name}.Tensor": f"{name}.Tensor" for name in "add sub mul div".split()},
    **{f"{name}.Tensor": f"{name}.Scalar" for name in "eq ne lt le gt ge".split()},
}  # fmt: skip


_PRODUCT = "it multiplies tokens with each other"


class No(Exception):
    """Why a value is not row-wise."""


@dataclass(frozen=True, eq=False)
class Block:
    """A tensor with rows.

    Attributes:
        result: in the program, with the rows on the first axis.
        rows: which of the value's rows it is about.
        lead: how many axes of size 1 the recorded tensor has in front of the rows; -1 if it is a single row without that axis.
        parts: later replacements of some rows of it.
    """

    result: Result
    rows: Choice = ()
    lead: int = 0
    parts: tuple[tuple[Choice, Block], ...] = ()


class Blocks:
    """Makes a program of operations on blocks.

    Args:
        builder: of the site's program; has the steps.
        tokens: T, as recorded.

    Attributes:
        line: of the code, for the next ones.
    """

    def __init__(self, builder: Builder, tokens: int) -> None:
        self.builder = builder
        self.line = 0
        self._tokens = tokens
        self._shaped_before: dict[Ref, Result] = {}  # result of a reshape -> what it is a shape of

    def said(self, packet: str, which: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: int | None) -> Any:
        """The result of an operation."""
        if packet in SAME:
            return args[0]
        if packet in _VIEWS:
            return self.view(args[0], args[1])
        if packet in _NEW:
            return self._new(packet, args, kwargs)
        rule = getattr(self, f"say_{packet.strip('_')}", None)
        if rule is not None:
            return rule(*args, **kwargs)
        return self.plain(f"{packet}.{which}", args, kwargs, out)

    # Steps.

    def made(
        self, like: Block, op: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, out: int | None = None
    ) -> Block:
        """A step's result, about the same rows as `like`."""
        named = {name: _results(each) for name, each in (kwargs or {}).items()}
        return Block(self.builder.add(op, _results(tuple(args)), named, self.line, out), like.rows, like.lead)

    def cast(self, block: Block, dtype: torch.dtype) -> Block:
        if block.result.dtype == dtype:
            return block
        return self.made(block, "_to_copy.default", (block,), {"dtype": DType(str(dtype).removeprefix("torch."))})

    def reshaped(self, block: Block, shape: Sequence[int], times: int = 1) -> Block:
        """The block with other axes behind the first, which has `times` entries for each row."""
        result = self.unshaped(block.result)  # of a shape of a shape, the first is enough
        if (times, *shape) == (result.shaped.rows, *result.shape):
            return replace(block, result=result)
        made = self.made(block, "reshape.default", (replace(block, result=result), (Rows(times), *shape)))
        self._shaped_before[made.result.ref] = result
        return made

    def unshaped(self, result: Result) -> Result:
        """What a result of `reshaped` is a shape of."""
        return self._shaped_before.get(result.ref, result)

    def expanded(self, block: Block, shape: Sequence[int]) -> Block:
        if tuple(shape) == block.result.shape:
            return block
        return self.made(block, "expand.default", (block, (Rows(block.result.shaped.rows), *shape)))

    def as_block(self, own: Any, like: Block) -> Block:
        """A tensor of the code's own, or a number, as a block of the shape and dtype of another one."""
        sizes, dtype = (Rows(like.result.shaped.rows), *like.result.shape), like.result.dtype
        if isinstance(own, torch.Tensor) and own.numel() == 1:
            own = own.item()
        if not isinstance(own, torch.Tensor):
            return self.made(like, "full.default", (sizes, own), {"dtype": DType(str(dtype).removeprefix("torch."))})
        return self.made(like, "expand.default", (self.aligned(own, like).to(dtype), sizes))

    def aligned(self, own: torch.Tensor, like: Block) -> torch.Tensor:
        """A tensor that is broadcast with a block, without numbers for each row and without the axes in front of the rows."""
        rank = like.result.rank
        while own.ndim > max(rank, rank + like.lead) or (like.lead > 0 and own.ndim > rank):
            if own.shape[0] != 1:
                raise No("a tensor adds an axis in front of the tokens")
            own = own[0]
        if like.lead < 0 and own.ndim == rank:
            if own.shape[0] != 1:
                raise No("a tensor adds an axis in front of the token's numbers")
            own = own[0]
        if own.ndim == rank and own.shape[0] != 1:
            if not bool((own == own[:1]).all()):
                raise No("a tensor has numbers of its own for each token")
            own = own[:1]
        return own

    def count(self, block: Block) -> int:
        """How many rows the recording has of it."""
        return len(rows_of(block.rows, self._tokens))

    def plain(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: int | None = None) -> Block:
        """An operation of the table."""
        blocks = list(objects_in((args, tuple(kwargs.values())), Block))
        like = max(blocks, key=lambda each: each.result.rank)
        if any((each.rows, each.lead) != (like.rows, like.lead) for each in blocks):
            raise No("it uses different tokens together")
        if op in ELEMENTWISE:
            op, args = self._with_number(op, args)
            like, args = self._of_one_rank(like, args)
            args = tuple(self.aligned(each, like) if isinstance(each, torch.Tensor) else each for each in args)
        elif op in _BESIDE:
            args = self._all_blocks(args, like)
        if like.lead and op not in ELEMENTWISE and op not in _WITHOUT_AXES:
            op, args, kwargs = _moved(op, like, args, kwargs)
        return self.made(like, op, args, kwargs, out)

    def _of_one_rank(self, like: Block, args: tuple[Any, ...]) -> tuple[Block, tuple[Any, ...]]:
        """The arguments with as many axes as they have together, where the recorded tensors lack the axis of the rows."""
        if like.lead >= 0:
            return like, args
        rank = max(like.result.rank, *(each.ndim + 1 for each in args if isinstance(each, torch.Tensor)), 0)

        def fitted(each: Any) -> Any:
            if not isinstance(each, Block):
                return each
            ones = [1] * (rank - each.result.rank)
            return self.reshaped(each, (*ones, *each.result.shape), each.result.shaped.rows)

        return fitted(like), tuple(map(fitted, args))

    def _with_number(self, op: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The operation with a number in place of a tensor of one without axes, which PyTorch treats alike beside floating ones."""
        own = args[-1]
        is_number = (
            isinstance(own, torch.Tensor) and own.ndim == 0 and isinstance(args[0], Block) and bool(torch.isfinite(own))
        )
        if not is_number or op not in _WITH_NUMBER or not args[0].result.dtype.is_floating_point:
            return op, args
        return _WITH_NUMBER[op], (*args[:-1], own.item())

    def _all_blocks(self, args: tuple[Any, ...], like: Block) -> tuple[Any, ...]:
        def as_block(each: Any) -> Any:
            if isinstance(each, tuple):
                return tuple(map(as_block, each))
            if not isinstance(each, torch.Tensor):
                return each
            own = self.aligned(each, like)
            own = own if own.ndim == like.result.rank else own[None]
            return self.made(like, "expand.default", (own, (Rows(like.result.shaped.rows), *own.shape[1:])))

        return tuple(map(as_block, args))

    # Views.

    def view(self, block: Block, sizes: Sequence[int]) -> Block:
        """The numbers of a block in another shape, as recorded."""
        each = math.prod(block.result.shape) * block.result.shaped.rows  # of a row
        count = self.count(block) if block.lead >= 0 else 1
        if not count:
            raise No("it is about no token")
        known = math.prod(size for size in sizes if size >= 0)
        sizes = [each * count // max(known, 1) if size < 0 else size for size in sizes]
        if block.lead < 0:
            is_back = len(sizes) == block.result.rank and sizes[0] == 1
            return replace(self.reshaped(block, sizes[1:]), lead=0) if is_back else self.reshaped(block, sizes)
        if (
            count == 1
            and block.result.shaped.rows == 1
            and len(sizes) < block.result.rank + block.lead
            and 1 not in sizes[:1]
        ):
            return replace(self.reshaped(block, sizes), lead=-1)
        for lead, size in enumerate(sizes):
            if size % count == 0 and size:
                return replace(self.reshaped(block, sizes[lead + 1 :], size // count), lead=lead)
            if size != 1:
                break
        raise No("it moves tokens into another axis")

    def _dim(self, block: Block, dim: int, more: int = 0) -> int:
        """An axis of the recorded tensor as one of the program's: 0 is that of the rows, and lower ones are in front of it."""
        return dim % (block.result.rank + block.lead + more) - block.lead

    def say_unsqueeze(self, block: Block, dim: int) -> Block:
        axis = self._dim(block, dim, 1)
        if axis > 0 and not (block.lead < 0 and axis == 1):
            return self.made(block, "unsqueeze.default", (block, axis))
        return replace(block, lead=block.lead + 1)

    def say_squeeze(self, block: Block, dim: Any = None) -> Block:
        rank = block.result.rank + block.lead
        axes = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
        lead, shape = block.lead, list(block.result.shape)
        for axis in sorted({self._dim(block, each) for each in axes}, reverse=True):
            if axis > 0 and shape[axis - 1] == 1:
                del shape[axis - 1]
            elif axis < 0 or (axis == 0 and self.count(block) * block.result.shaped.rows == 1):
                lead -= 1
        return replace(self.reshaped(block, shape, block.result.shaped.rows), lead=lead)

    def say_expand(self, block: Block, sizes: Sequence[int]) -> Block:
        front = len(sizes) - block.result.rank - block.lead
        here = sizes[front + max(block.lead, 0) + (block.lead >= 0) :]
        if any(size != 1 for size in sizes[: front + max(block.lead, 0)]):
            raise No("it adds an axis in front of the tokens")
        shape = [old if new == -1 else new for old, new in zip(block.result.shape, here, strict=True)]
        return replace(self.expanded(block, shape), lead=block.lead + front)

    def say_permute(self, block: Block, dims: Sequence[int]) -> Block:
        axes = [self._dim(block, dim) for dim in dims]
        shape = [*[1] * block.lead, self.count(block) * block.result.shaped.rows, *block.result.shape]
        if block.lead >= 0 and shape[block.lead] == 1:  # moving axes of size 1 is no more than another shape
            wide = [dim for dim in dims if shape[dim] != 1]
            if wide == sorted(wide):
                return self.view(block, [shape[dim] for dim in dims])
        if block.lead < 0:
            axes = [0, *axes]
        elif axes[: block.lead + 1] != list(range(-block.lead, 1)):
            raise No("it moves the axis of the tokens")
        return self.made(block, "permute.default", (block, tuple(axis for axis in axes if axis >= 0)))

    def say_transpose(self, block: Block, one: int, other: int) -> Block:
        dims = list(range(block.result.rank + block.lead))
        dims[one], dims[other] = dims[other], dims[one]
        return self.say_permute(block, dims)

    def say_select(self, block: Block, dim: int, index: int) -> Block:
        axis = self._dim(block, dim)
        if axis > 0:
            return self.made(block, "select.int", (block, axis, index))
        if axis < 0:
            return replace(block, lead=block.lead - 1)
        return self._chosen(block, index)

    def say_slice(
        self, block: Block, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> Block:
        axis = self._dim(block, dim)
        size = (
            self.count(block) * block.result.shaped.rows
            if axis == 0
            else block.result.shape[axis - 1]
            if axis > 0
            else 1
        )
        chosen = slice(start, end, step)
        if (
            chosen.indices(size) == (0, size, 1)
            and (axis != 0 or start in (0, None))
            and (axis != 0 or end is None or end >= 1 << 62)
        ):
            return block
        if axis < 0:
            raise No("it takes nothing of an axis in front of the tokens")
        if axis > 0:
            first, last, step = chosen.indices(size)
            return self.made(block, "slice.Tensor", (block, axis, first, last, step))
        return self._chosen(block, chosen)

    def _chosen(self, block: Block, chosen: Any) -> Block:
        """Some rows of a block."""
        if block.lead or block.result.shaped.rows != 1:
            raise No("it takes some tokens behind another axis")
        return replace(block, rows=(*block.rows, chosen), lead=-1 if isinstance(chosen, int) else 0)

    # Indices.

    def _places(self, block: Block, indices: Sequence[Any]) -> tuple[Any, ...]:
        """Indices as the program has them, none at the rows."""
        if any(isinstance(each, Block) for each in indices):
            raise No("it uses indices that only the forward has")
        if block.lead > 0 and any(each is not None for each in indices[: block.lead]):
            raise No("it takes nothing of an axis in front of the tokens")
        indices = (None, *indices) if block.lead < 0 else indices[block.lead :]
        sizes = (0, *block.result.shape)
        return tuple(each if each is None or not i else each.long() % sizes[i] for i, each in enumerate(indices))

    def say_index(self, block: Block, indices: Sequence[Any]) -> Block:
        if (rows := self._rows_in(block, indices)) is not None:
            return self._chosen(block, rows)
        return self.made(block, "index.Tensor", (block, self._places(block, indices)))

    def _rows_in(self, block: Block, indices: Sequence[Any]) -> tuple[int, ...] | None:
        """The rows that indices are about; None if they are about other axes."""
        first, *others = indices
        if first is None or block.lead:
            return None
        if not isinstance(first, torch.Tensor) or first.ndim != 1 or any(each is not None for each in others):
            raise No("its indices are about tokens and numbers together")
        places = tuple(first.tolist())
        if len({place % max(self.count(block), 1) for place in places}) < len(places):
            raise No("it names a token twice")
        return places

    def say_index_put(self, block: Block, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Block:
        if (rows := self._rows_in(block, indices)) is not None:
            if accumulate:
                raise No("it accumulates at some tokens")
            there = self._chosen(block, rows)
            return replace(block, parts=(*block.parts, (there.rows, self.say_copy(there, values))))
        places = self._places(block, indices)
        there = self.made(block, "index.Tensor", (block, places))
        if isinstance(values, Block):
            values = self.cast(values, block.result.dtype)
        elif isinstance(values, torch.Tensor):
            values = self.aligned(values, there).to(block.result.dtype)
        return self.made(block, "index_put.default", (block, places, values, accumulate))

    # New numbers.

    def say_copy(self, block: Block, new: Any, non_blocking: bool = False) -> Block:
        if not isinstance(new, Block):
            return self.as_block(new, block)
        if new.rows != block.rows or new.result.shaped.rows != block.result.shaped.rows or new.lead > block.lead:
            raise No("it writes numbers of other tokens")
        if new.result.rank > block.result.rank or (new.lead < block.lead and new.lead < 0):
            raise No("it writes numbers of other tokens")
        new = self.cast(new, block.result.dtype)
        missing = block.result.rank - new.result.rank
        if missing:
            if new.lead >= 0:
                raise No("it writes numbers of other tokens")
            new = self.reshaped(new, (*[1] * missing, *new.result.shape))
        return replace(self.expanded(new, block.result.shape), lead=block.lead)

    say_fill = say_copy

    def say_zero(self, block: Block) -> Block:
        return self.as_block(0, block)

    def say_to_copy(self, block: Block, dtype: DType | None = None) -> Block:
        return block if dtype is None else self.cast(block, getattr(torch, dtype.name))

    def _new(self, packet: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Block:
        block, sizes = args[0], args[1]
        number = _NEW[packet] if _NEW[packet] is not None else args[2]
        dtype = kwargs.get("dtype") or DType(str(block.result.dtype).removeprefix("torch."))
        if block.lead > 0 or (block.lead == 0 and (not sizes or sizes[0] != self.count(block))):
            raise No("it makes a tensor without an axis of tokens")
        shape = sizes if block.lead < 0 else sizes[1:]
        return self.made(block, "full.default", ((Rows(1), *shape), number), {"dtype": dtype})

    def back(self, what: str, args: Sequence[Any], view: Block, new: Block) -> Block:
        """`view` with `new` in a view of it, which is one operation away."""
        packet = what.removeprefix("aten.").partition(".")[0]
        if packet in SAME:
            return new
        if packet in _VIEWS or packet in ("unsqueeze", "squeeze"):
            return replace(self.reshaped(new, view.result.shape, view.result.shaped.rows), lead=view.lead)
        if packet in ("permute", "transpose"):
            dims = list(args[0]) if packet == "permute" else list(range(view.result.rank + view.lead))
            if packet == "transpose":
                dims[args[0]], dims[args[1]] = dims[args[1]], dims[args[0]]
            return self.say_permute(new, [dims.index(axis) for axis in range(len(dims))])
        if packet not in ("select", "slice"):
            raise No(f"it writes to the result of {packet}")
        axis = self._dim(view, args[0] if args else 0)
        if axis <= 0 or (packet == "slice" and new.result.shape == view.result.shape):
            return replace(new, lead=view.lead)
        if packet == "select":
            return self.made(view, "select_scatter.default", (view, new, axis, args[1]))
        start, end, step = slice(*args[1:]).indices(view.result.shape[axis - 1]) if len(args) > 1 else (0, None, 1)
        return self.made(view, "slice_scatter.default", (view, new, axis, start, end, step))

    # Products.

    def say_dot(self, one: Any, other: Any) -> Block:
        block, own = (one, other) if isinstance(one, Block) else (other, one)
        if not isinstance(own, Block):
            return self.made(block, "mv.default", (block, own))
        product = self.plain("mul.Tensor", (block, own), {})
        return self.made(product, "sum.dim_IntList", (product, (1,)))

    def say_mv(self, one: Any, other: Any) -> Block:
        if isinstance(one, Block) and not one.lead and not isinstance(other, Block):
            return self.made(one, "mv.default", (one, other))
        if isinstance(one, torch.Tensor) and isinstance(other, Block) and other.lead < 0:
            return self.made(other, "mm.default", (other, one.t()))
        raise No(_PRODUCT)

    def say_mm(self, one: Any, other: Any) -> Block:
        if not isinstance(one, Block) or isinstance(other, Block) or one.lead > 0:
            raise No(_PRODUCT)
        return self._times(one, other) if one.lead < 0 else self.made(one, "mm.default", (one, other))

    def say_bmm(self, one: Any, other: Any) -> Block:
        if isinstance(one, Block) and isinstance(other, Block) and not one.lead:
            return self.plain("bmm.default", (one, other), {})
        if not isinstance(one, Block) or isinstance(other, Block) or one.lead not in (0, 1):
            raise No(_PRODUCT)
        if one.lead == 1:
            return self.made(one, "mm.default", (one, other[0]))
        return self._times(one, self.aligned(other, one)[0])

    def _times(self, block: Block, matrix: torch.Tensor) -> Block:
        """The matrices of a block, one for each row, times the same matrix."""
        times, (each, size) = block.result.shaped.rows, block.result.shape
        product = self.made(block, "mm.default", (self.reshaped(block, (size,), times * each), matrix))
        return self.reshaped(product, (each, matrix.shape[1]), times)


def _results(tree: Any) -> Any:
    """Arguments with results in place of blocks."""
    if isinstance(tree, Block):
        return tree.result
    return tuple(map(_results, tree)) if isinstance(tree, (tuple, list)) else tree


def _moved(
    op: str, like: Block, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """An operation along axes, for a block whose rows are not on the recorded tensor's first axis."""
    if op in _ALL_AXES and like.lead < 0:
        op = _ALL_AXES[op]
    if op not in RULES:
        raise No(f"{op} is not an operation that programs may have")
    schema = overload(op)._schema.arguments
    names = [each.name for each in schema]
    axis = next((name for name in ("dim", "dims") if name in names), None)
    if axis is None:
        raise No(f"{op} of a single token, or of tokens behind another axis, is not known")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rank, default = like.result.rank, schema[names.index(axis)]
    dims = given.get(axis, default.default_value if default.has_default_value() else None)
    more = int(op == "stack.default")
    every = list(range(rank + like.lead))
    listed = every if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else list(dims)
    moved = [dim % (rank + like.lead + more) - like.lead for dim in listed]
    if any(dim <= 0 for dim in moved):
        raise No("it is about the axis of the tokens")
    takes_list = "List" in str(default.type)
    if not takes_list and len(moved) > 1:
        raise No(f"{op} of a single token, or of tokens behind another axis, is not known")
    given[axis] = tuple(moved) if takes_list else moved[0]
    return op, (), given
