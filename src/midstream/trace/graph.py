"""A recorded trace as data: the values that its code computes, step by step, and its writes to sites.

`trace.record` makes it; `lowering` reads it. A value never changes: where the code changes a tensor in place,
the recorder notes a new value for the tensor's memory.

Legend: T tokens of a step, H the site's width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from midstream.sites import Point
from midstream.tree import as_bits, is_raw, objects_in, unwritten

Kind = Literal["read", "const", "call", "put", "module"]
# One step from a tensor to a view of it: the operation, its further arguments, and which of its results.
ViewOp = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...], int | None]
Chain = tuple[ViewOp, ...]


@dataclass(eq=False, slots=True)
class Value:
    """A tensor in a graph.

    Attributes:
        kind: "read" is a site's value, "const" a tensor from outside of the recording, "call" the result of a PyTorch operation, "put" a
            tensor after a write to a view of it, and "module" the output of a module of the model.
        target: a read's point, a const's tensor, a call's operation, a put's view, or a module's path.
        args, kwargs: of a call or module; a put has the tensor and the new numbers as its arguments.
        out: the index of the result, if a call has several; or the argument that the call changes in place, by place or name.
        step: the step in which it is computed.
        shape, dtype: of the tensor, as recorded.
        line: of the code, 0 if unknown.
        part: of a read, the index in a tuple of two streams; None for the site's value.
    """

    kind: Kind
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: int | str | None = None
    step: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    line: int = 0
    part: int | None = None

    @property
    def inputs(self) -> Iterator[Value]:
        """The values that it is computed from."""
        return objects_in((self.args, self.kwargs), Value)


@dataclass(eq=False, slots=True)
class Write:
    """A write to a site, noted when the code moves on to another point.

    Attributes:
        was: the value that the code has read there.
        now: the value that replaces it. If it has fewer axes, it is the same for each token.
    """

    point: Point
    was: Value
    now: Value
    line: int


@dataclass(eq=False, slots=True)
class StepGraph:
    """The code's actions in one step.

    Attributes:
        tokens: T, as recorded.
        values: in the order in which they are computed, without consts.
        reads: each point that the code reads or writes, with the line.
        writes: in the order of the forward.
        last: names of values after the forward that it writes: "logits", "samples".
    """

    tokens: int
    values: list[Value] = field(default_factory=list)
    reads: dict[Point, int] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    last: list[str] = field(default_factory=list)


def ancestors(values: Sequence[Value]) -> Iterator[Value]:
    """The values and all values that they are computed from, each once."""
    seen: set[int] = set()
    rest = list(values)
    while rest:
        value = rest.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            rest.extend(value.inputs)


def repeats(one: StepGraph, before: StepGraph) -> bool:
    """Whether a step does the same as another one, on its own values."""
    return one.tokens == before.tokens and _same_step(one, before, {})


def varied_steps(steps: Sequence[StepGraph]) -> int:
    """The number of steps after which every step repeats the step before it; at least 2."""
    return next((i + 1 for i in range(len(steps) - 1, 1, -1) if not repeats(steps[i], steps[i - 1])), 2)


def same_steps(one: Sequence[StepGraph], other: Sequence[StepGraph]) -> bool:
    """Whether two recordings did the same. The prompts may have different lengths."""
    if len(one) != len(other):
        return False
    pairs: dict[int, Value] = {}  # id of a value in `one` -> the same value in `other`
    return all(_same_step(a, b, pairs) for a, b in zip(one, other, strict=True))


def _same_step(a: StepGraph, b: StepGraph, pairs: dict[int, Value]) -> bool:
    if len(a.values) != len(b.values) or a.reads != b.reads or a.last != b.last or len(a.writes) != len(b.writes):
        return False
    lengths = a.tokens, b.tokens
    for mine, theirs in zip(a.values, b.values, strict=True):
        if not _same_value(mine, theirs, pairs, lengths):
            return False
        pairs[id(mine)] = theirs
    return all(
        w.point == o.point and _same((w.was, w.now), (o.was, o.now), pairs, lengths)
        for w, o in zip(a.writes, b.writes, strict=True)
    )


def _same_value(a: Value, b: Value, pairs: dict[int, Value], lengths: tuple[int, int]) -> bool:
    if (a.kind, a.out, a.dtype, a.part) != (b.kind, b.out, b.dtype, b.part):
        return False
    if len(a.shape) != len(b.shape) or not _same(a.target, b.target, pairs, lengths):
        return False
    return _same((a.args, a.kwargs), (b.args, b.kwargs), pairs, lengths)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if (place := unwritten(a)) is not None and place == unwritten(b):  # lazy copies of one tensor
        return True
    return same_numbers(a, b)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of one shape and dtype have the same numbers: NaN equals NaN, and 0 differs from -0."""
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if is_raw(a) and is_raw(b) and torch.equal(as_bits(a), as_bits(b)):  # the usual case, and quick
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((((a == b) & (torch.signbit(a) == torch.signbit(b))) | ((a != a) & (b != b))).all())


def _same(a: Any, b: Any, pairs: dict[int, Value], lengths: tuple[int, int]) -> bool:
    """Whether nested arguments are the same. Integers may be proportional to the prompt's length, as sizes are."""
    if isinstance(a, Value):
        return pairs.get(id(a)) is b or (
            isinstance(b, Value) and a.kind == b.kind == "const" and (a is b or same_tensor(a.target, b.target))
        )
    if isinstance(a, (tuple, list)):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(_same(x, y, pairs, lengths) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name], pairs, lengths) for name in a)
    if type(a) is int and type(b) is int and a != b:
        return a > 0 and a % lengths[0] == 0 and a * lengths[1] == b * lengths[0]
    if type(a) is float and type(b) is float and a == b:
        return math.copysign(1.0, a) == math.copysign(1.0, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))
