"""The parts of a program (`plan.program`): its operations, their arguments, and constants."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from midstream.plan import fields
from midstream.plan.vectors import DIGEST_BYTES, ByDigest, digest

if TYPE_CHECKING:
    import torch

SIZES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16", "float64")
_NUMPY = {name: "<u2" if name == "bfloat16" else np.dtype(name).newbyteorder("<") for name in SIZES}
_MOST_AXES = 6


# ------------------------------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of a step, or one of its results; step -1 is the input, and -2 and below are further inputs."""

    step: int
    out: int | None = None


@dataclass(frozen=True, slots=True)
class Const:
    """A constant, by its index among the program's."""

    place: int


@dataclass(frozen=True, slots=True)
class RowCount:
    """A size: a multiple of the number of rows."""

    times: int = 1


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype, as in "float32"."""

    name: str


INPUT = Ref(-1)
T = TypeVar("T")


class Step(NamedTuple):
    """One operation.

    Attributes:
        op: the name of an overload of PyTorch's aten operations: "mul.Tensor".
        args, kwargs: None, booleans, numbers, strings, the classes above, and tuples of these.
        line: the line of the code that it was made from; 0 if unknown. Programs that differ only in lines are equal.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    line: int = 0

    @property
    def place(self) -> str:
        """Its name in messages."""
        return f"{fields.shown(self.op)[1:-1]}{f' (line {self.line})' if self.line else ''}"

    def mapped(self, change: Callable[[Any], Any]) -> Step:
        """The same with other references and constants."""
        kwargs = tuple((name, mapped(arg, change)) for name, arg in self.kwargs)
        return self._replace(args=mapped(self.args, change), kwargs=kwargs)


def mapped(arg: Any, change: Callable[[Any], Any]) -> Any:
    """An argument of a step with other references (`Ref`) and constants (`Const`)."""
    if isinstance(arg, tuple):
        return tuple(mapped(each, change) for each in arg)
    return change(arg) if isinstance(arg, (Ref, Const)) else arg


@dataclass(frozen=True, eq=False, repr=False)
class Constant(ByDigest):
    """A tensor of a program. Constants are equal if dtype, shape and all bits are.

    Attributes:
        dtype: as in "float32".
        shape: its sizes.
        data: little-endian bytes; None if the engine holds them.
        digest: of dtype, shape and data.
        held: the digest of the data alone, under which the engine holds it, like the weights of traces (`trace.weights`); empty if it does
            not.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None
    digest: str = ""
    held: str = ""

    def __post_init__(self) -> None:
        fields.one_of("a constant's dtype", self.dtype, list(SIZES))
        shape = tuple(fields.integer("a constant's shape", size, 0) for size in self.shape)
        if len(shape) > _MOST_AXES:
            raise fields.refuse("a constant's shape", fields.shown(shape), f"up to {_MOST_AXES} axes")
        fields.settle(self, shape=shape)
        if self.data is None:
            known = re.fullmatch(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}", self.digest) and re.fullmatch(
                "[0-9a-f]{64}", self.held
            )
            if self.dtype not in FLOATS or not known:
                given = fields.shown((self.digest, self.held))
                raise fields.refuse("a constant without data", given, "the digests of a floating tensor")
            return
        if len(self.data) != self.nbytes:
            raise fields.refuse(
                "a constant's data", f"{len(self.data)} bytes", f"{self.nbytes} for {self.dtype} {list(shape)}"
            )
        self._check_finite()
        fields.settle(self, digest=digest(json.dumps([self.dtype, shape]).encode(), self.data))

    def _check_finite(self) -> None:
        if self.dtype == "bfloat16":
            is_finite = bool(((self.numbers & 0x7F80) != 0x7F80).all())
        elif self.dtype == "bool":
            is_finite = bool((np.frombuffer(self.data or b"", np.uint8) <= 1).all())
        else:
            is_finite = bool(np.isfinite(self.numbers).all())
        if not is_finite:
            raise fields.refuse("a constant", "not finite", "finite numbers, and in booleans 0 and 1")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        """A constant with a tensor's content. Raises PlanError for an unsupported dtype, NaN and infinity.

        The content of lazy copies is read only once while its constant is in use.
        """
        from midstream.tree import lazy_copy, unwritten

        place = unwritten(tensor)
        if place is None:
            return cls._read(tensor)
        known = _of_lazy.get(place)
        if known is None:
            known = _of_lazy[place] = cls._read(lazy_copy(tensor))
            object.__setattr__(known, "_copy", lazy_copy(tensor))  # keeps the content at its address
        return known

    @classmethod
    def _read(cls, tensor: torch.Tensor) -> Constant:
        import torch

        own = tensor.detach().cpu().contiguous()
        raw = own.reshape(-1).view(torch.uint8) if own.numel() else torch.empty(0, dtype=torch.uint8)
        return cls(str(own.dtype).removeprefix("torch."), tuple(own.shape), raw.numpy().tobytes())

    @property
    def numbers(self) -> np.ndarray:
        """All its numbers in one axis; for bfloat16, their bits. The constant must have data."""
        return np.frombuffer(self.data or b"", _NUMPY[self.dtype])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    @cached_property
    def without_data(self) -> Constant:
        """The same constant for an engine that holds its data."""
        held = hashlib.blake2b(self.data or b"", digest_size=32).hexdigest()
        return Constant(self.dtype, self.shape, None, self.digest, held)

    def __repr__(self) -> str:
        return f"Constant({self.dtype}, {list(self.shape)}, {self.digest[:8]})"


_of_lazy: WeakValueDictionary[Any, Constant] = WeakValueDictionary()  # by the content's address and layout


def written(arg: Any) -> Any:
    """An argument as plain data."""
    match arg:
        case Ref(step=-1, out=None):
            return {"input": True}
        case Ref(step=step, out=None) if step < 0:
            return {"input": -1 - step}
        case Ref():
            return {"step": arg.step} | ({} if arg.out is None else {"out": arg.out})
        case Const():
            return {"constant": arg.place}
        case RowCount():
            return {"rows": arg.times}
        case DType():
            return {"dtype": arg.name}
        case tuple():
            return [written(each) for each in arg]
        case float() if math.isinf(arg):
            return {"inf": 1 if arg > 0 else -1}
    return arg
