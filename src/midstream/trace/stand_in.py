"""Tensors without numbers, on which a trace's code runs while it is recorded, and the modes that note the operations on them.

An operation on a `StandIn` adds a value to the graph (`trace.graph`). Operations on the code's own tensors run for real. PyTorch computes
the shapes on its meta device. An operation that needs a number of the forward raises `Ended`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.trace.graph import Chain, StepGraph, Value, same_tensor
from midstream.trace.parallel import BINARY, COMPARISONS, UNARY
from midstream.tree import lazy_copy, leaves, map_objects, map_tensors, objects_in, unwritten

aten = torch.ops.aten
_MOST_VALUES = 20_000
_LARGE = 1 << 20  # bytes; copies of larger tensors are made only at the first write


class Ended(BaseException):
    """The code cannot be recorded. Not an Exception, so that a user's `except Exception` does not catch it."""


@dataclass(eq=False, slots=True)
class StandInMemory:
    """The numbers that one or several stand-ins share.

    Attributes:
        value: the present value.
        version: how often it has changed.
        line: of the last change.
        views: the values of its views, until the next change.
    """

    value: Value
    version: int = 0
    line: int = 0
    views: dict[Any, Value] = field(default_factory=dict)


class StandIn(torch.Tensor):
    """Stands for a tensor of the forward: it has a shape and no numbers."""

    memory: StandInMemory
    chain: Chain
    meta: torch.Tensor

    @staticmethod
    def of(meta: torch.Tensor, memory: StandInMemory, chain: Chain = ()) -> StandIn:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            StandIn, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=torch.device("cpu")
        )
        made.meta, made.memory, made.chain = meta, memory, chain
        return made  # type: ignore[no-any-return]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise Ended("a tensor of the trace is used on another thread")


StandIn.__name__ = StandIn.__qualname__ = "Tensor"
StandIn.__module__ = "torch"


class _Kinds(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not kind_of or len(args) != 1 or kwargs:
            return type(*args, **kwargs) if cls is kind_of else super().__call__(*args, **kwargs)
        found = type(args[0])
        if found is UnknownNumber:
            return args[0].__class__
        return torch.Tensor if found is StandIn else kind_of if found is type else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is kind_of else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is kind_of else super().__subclasscheck__(kind)


class kind_of(type, metaclass=_Kinds):
    """Python's `type`, for recorded code: to that code, a stand-in is a tensor."""


class UnknownNumber:
    """Stands for a number of the forward, such as `h.norm().item()`. Code can store it and compute with it, but not look at it."""

    __slots__ = ("_end", "_kind")

    def __init__(self, kind: type, end: Callable[[str], NoReturn]) -> None:
        self._kind, self._end = kind, end

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def _computed(self, *others: Any) -> Any:
        is_large = any(type(each) is int and each.bit_length() > 64 for each in others)
        if is_large or not all(type(each) in (int, float, bool, UnknownNumber) for each in others):
            self._end("a number of the forward is used in something else than a number")
        return UnknownNumber(
            float if self._kind is float or any(type(each) is float for each in others) else int, self._end
        )

    def _looked_at(self, *_: Any) -> NoReturn:
        self._end("it needs a number that only the forward has")

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(self._kind, name):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self._looked_at()


_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype)


class UnknownRowCount(int):
    """The number of rows of a stand-in that stands for any number of rows. It may only be a size of another tensor, as in
    `h.view(h.shape[0], 8, -1)`. Every other use of it ends the recording.
    """

    end: Callable[[str], NoReturn]
    times: int  # the size as a multiple of the number of rows

    def _used(self, *_: Any) -> NoReturn:
        self.end("it depends on the number of tokens")


# Python looks special methods up in the class.
_ARITHMETIC = [*BINARY, *(f"r{name}" for name in BINARY), "divmod", "rdivmod", *UNARY]
_LOOKS = [*COMPARISONS, *"hash bool int float str repr format round trunc".split()]
_COMPUTED = "add radd sub rsub mul rmul neg abs".split()
for _name in (*_ARITHMETIC, *_LOOKS, "floor", "ceil"):
    setattr(UnknownRowCount, f"__{_name}__", UnknownRowCount._used)
for _name in (*_ARITHMETIC, *_LOOKS, *"index reduce_ex complex array".split()):
    setattr(UnknownNumber, f"__{_name}__", UnknownNumber._computed if _name in _COMPUTED else UnknownNumber._looked_at)


def is_plain(tree: Any, depth: int = 8) -> bool:
    """Whether it is a plain value, or a list, dict, tuple or set of plain values, not nested too deep."""
    if type(tree) in (dict, list, tuple, set, frozenset):
        inner = (*tree, *tree.values()) if type(tree) is dict else tree
        return depth > 0 and all(is_plain(each, depth - 1) for each in inner)
    return type(tree) in _PLAIN


@dataclass(frozen=True)
class _Facts:
    """The facts in an operation's schema.

    Attributes:
        changes: the arguments that it changes, by place or by name.
        is_view: whether its results are views of its first argument.
        refused: why it ends the recording.
        may_raise: whether it may raise an error that depends on numbers.
        squeezes: whether it removes the axes of one element.
    """

    changes: tuple[int | str, ...]
    is_view: bool
    refused: str | None
    may_raise: bool
    squeezes: bool


_INDEXING = frozenset(
    "index index_put index_put_ index_select gather scatter scatter_ take embedding index_copy_ index_add_".split()
)
# `_PLACES`: operations that return places along an axis -> the index of that result; None if it is the only one. `_KEEPS`: operations whose
# results have the numbers of their argument.
_PLACES = {
    "topk": 1,
    "sort": 1,
    "max": 1,
    "min": 1,
    "kthvalue": 1,
    "median": 1,
    "argsort": None,
    "argmax": None,
    "argmin": None,
}
_KEEPS = frozenset(
    "view reshape _unsafe_view _reshape_alias unsqueeze squeeze expand permute transpose t select slice flip clone alias detach".split()
)
_NUMBERS = frozenset("_local_scalar_dense equal is_nonzero item".split())
_DRAWS = "it draws random numbers"
_RANDOM = frozenset("random_ normal_ uniform_ bernoulli_ multinomial rand randn randint randperm".split())


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments by their names, with its defaults."""
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return given | dict(zip((each.name for each in arguments), args, strict=False)) | kwargs


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can draw random numbers does so: attention draws none without dropout."""
    return _named(func, args, kwargs).get("dropout_p") != 0


def _places_of(value: Value) -> int | None:
    """A bound on the indices in a value: they are at least 0 and below it. None if no bound is known."""
    while value.kind == "call" and (name := value.target._schema.name.removeprefix("aten::")) in _KEEPS:
        value = value.args[0]
    if value.kind != "call" or name not in _PLACES or value.out != _PLACES[name]:
        return None
    of, dim = value.args[0].shape, _named(value.target, value.args, value.kwargs).get("dim")
    return math.prod(of) if dim is None else of[dim] if of else None


def _shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.meta.shape if isinstance(tensor, StandIn) else tensor.shape)


@functools.cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    name = schema.name.partition("::")[2]
    changes = tuple(
        place if not argument.kwarg_only else argument.name
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]
    refused = None
    if torch.Tag.nondeterministic_seeded in func.tags or name in _RANDOM:
        refused = _DRAWS
    elif name in ("index", "index_put", "index_put_"):  # `_with_places` refuses unknown masks
        refused = None
    elif name in _NUMBERS or {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        refused = "it needs a number that only the forward has"
    elif "batch_norm" in name:
        refused = "its running mean may change without a note"
    elif not schema.name.startswith("aten::"):
        refused = f"{schema.name} is not one of PyTorch's own operations"
    return _Facts(
        changes,
        bool(aliases) and not changes,
        refused,
        name in _INDEXING or "linalg" in name,
        name in ("squeeze", "squeeze_"),
    )


class Notes:
    """The graph of the recorded code: called by the modes below and by the model's stand-in.

    Args:
        file: of the code, whose lines are noted.
        has_arrays: whether the code has numpy arrays, which may share memory with tensors.

    Attributes:
        steps: the graphs of the steps so far.
        reason: why the recording ended, with `line`; None if it has not.
        sizes: every size that the code has looked at.
        rows: the number of rows of the stand-ins if the code has to do the same for any number, else None. It is a prime, so that no other
            size is a multiple of it.
        makes_numbers: whether the code has taken a number of the forward.
        may_raise: the line of an operation whose errors depend on numbers; None if there is none.
    """

    def __init__(self, file: str, has_arrays: bool) -> None:
        self.file, self.has_arrays = file, has_arrays
        self.steps: list[StepGraph] = []
        self.reason: str | None = None
        self.line = 0
        self.sizes: list[Any] = []
        self.rows: int | None = None
        self.makes_numbers = False
        self.may_raise: int | None = None
        self._count = 0
        self._results: dict[Any, Any] = {}  # an operation with its arguments' shapes -> its results on the meta device
        self._consts: dict[Any, tuple[torch.Tensor, Value]] = {}
        self._filled: dict[int | None, tuple[StandInMemory, torch.Tensor, torch.Tensor]] = {}

    # What the code does.

    def end(self, reason: str) -> NoReturn:
        """End the recording. The first reason counts."""
        if self.reason is None:
            self.reason, self.line = reason, self.at()
        raise Ended(reason)

    def at(self) -> int:
        """The line of the running code; 0 if it is in another file."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return 0

    def add(self, value: Value) -> Value:
        """Note a value of the present step."""
        self._count += 1
        if self._count > _MOST_VALUES:
            self.end("it computes too much to be recorded")
        step = self.steps[-1]
        value.step = len(self.steps) - 1
        step.values.append(value)
        return value

    def new(self, value: Value) -> StandIn:
        """A stand-in for a new tensor with this value."""
        meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return StandIn.of(meta, StandInMemory(self.add(value)))

    def const(self, tensor: torch.Tensor) -> Value:
        """The present value of one of the code's own tensors."""
        own = tensor.detach()
        key = (_storage_of(own), own.storage_offset(), tuple(own.shape), own.stride(), own.dtype)
        known = self._consts.get(key)
        is_lazy = own.nbytes >= _LARGE and not self.has_arrays  # an array's writes are not seen
        if known is not None and same_tensor(known[1].target, own):
            return known[1]
        value = Value("const", lazy_copy(own) if is_lazy else own.clone(), shape=tuple(own.shape), dtype=own.dtype)
        self._consts[key] = own, value
        return value

    def is_unknown(self, value: object) -> bool:
        """Whether it is a tensor that stands for one of the forward, or that has been filled with such values."""
        return isinstance(value, StandIn) or (
            bool(self._filled) and isinstance(value, torch.Tensor) and _storage_of(value) in self._filled
        )

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The present value of a tensor."""
        if not isinstance(tensor, StandIn):
            if not self.is_unknown(tensor):
                return self.const(tensor)
            tensor = self._as_stand_in(tensor)
        memory, chain = tensor.memory, tensor.chain
        if not chain:
            return memory.value
        if chain not in memory.views:
            value = memory.value
            for place, (func, args, kwargs, out) in enumerate(chain, start=1):
                if (there := memory.views.get(chain[:place])) is None:
                    shape = tuple(tensor.shape) if place == len(chain) else ()
                    made = Value("call", func, (value, *args), dict(kwargs), out, 0, shape, tensor.dtype, self.at())
                    there = memory.views[chain[:place]] = self.add(made)
                value = there
        return memory.views[chain]

    def assign(self, tensor: StandIn, value: Value) -> None:
        """Set the tensor's value, and update its memory."""
        memory = tensor.memory
        if tensor.chain:
            whole = memory.value
            value = self.add(
                Value("put", tensor.chain, (whole, value), shape=whole.shape, dtype=whole.dtype, line=self.at())
            )
        memory.value, memory.line = value, self.at()
        memory.version += 1
        memory.views = {}

    def _as_stand_in(self, tensor: torch.Tensor) -> StandIn:
        """A stand-in for one of the code's own tensors that has been filled with values of the forward."""
        memory, flat, own = self._filled[_storage_of(tensor)]
        if tensor.dtype != own.dtype:
            self.end("a tensor that it has filled is viewed as another dtype")
        place = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
        meta = flat.as_strided(*place)
        return StandIn.of(meta, memory, ((aten.as_strided.default, place, (), None),))

    def _fill(self, tensor: torch.Tensor) -> StandIn:
        """Make one of the code's own tensors stand for values of the forward, since it is filled with such values."""
        if self.has_arrays:
            self.end("a tensor is filled with values of the forward, and an array may share its memory")
        if _storage_of(tensor) not in self._filled:
            whole = torch.empty(0, dtype=tensor.dtype)
            whole.set_(tensor.untyped_storage())  # type: ignore[call-overload]
            flat = whole.to("meta")
            self._filled[_storage_of(tensor)] = (
                StandInMemory(Value("const", whole.clone(), shape=tuple(flat.shape), dtype=flat.dtype)),
                flat,
                tensor,
            )
        return self._as_stand_in(tensor)

    def seen(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, noted if it involves values of the forward."""
        if self.reason is not None:
            raise Ended(self.reason)
        facts = _facts(func)
        tensors = [tensor for _, tensor in leaves((args, kwargs))]
        if not any(map(self.is_unknown, tensors)):
            if facts.refused == _DRAWS and _draws(func, args, kwargs):
                self.end(facts.refused)
            return _converted(*args, **kwargs) if func is aten._to_copy.default else func(*args, **kwargs)
        if facts.refused is not None and (facts.refused != _DRAWS or _draws(func, args, kwargs)):
            self.end(facts.refused)
        if len(facts.changes) > 1:
            self.end(f"{func} changes several tensors at once")
        args = _with_places(func, args, self)
        kwargs = {name: each for name, each in kwargs.items() if name not in ("device", "pin_memory")}
        has_unknown = any(isinstance(t, StandIn) and not t.dtype.is_floating_point for t in tensors)
        if facts.may_raise and has_unknown and not self._fit(func, args, kwargs):
            self.may_raise = self.may_raise or self.at()
        if facts.squeezes:  # the result depends on which sizes are 1; the number of tokens is known not to be 1
            axes = _named(func, args, kwargs).get("dim", range(args[0].ndim))
            sizes = [_shape_of(args[0])[axis] for axis in ([axes] if isinstance(axes, int) else axes)]
            self.sizes.append([None if size == self.steps[-1].tokens else size for size in sizes])
        result = self._shaped(func, facts, args, kwargs, tensors)
        if facts.changes:
            return self._changed(func, facts.changes[0], args, kwargs)
        if facts.is_view:
            return self._viewed(func, args, kwargs, result)
        given = self._valued(args, kwargs)
        line = self.at()

        def stand_in(meta: Any, out: int | None) -> Any:
            if not isinstance(meta, torch.Tensor):  # such as `is_same_size`
                self.sizes.append(list(map(_shape_of, tensors)))
                return meta
            value = Value("call", func, *given, out, 0, tuple(meta.shape), meta.dtype, line)
            self._note_ones(meta)
            return StandIn.of(meta, StandInMemory(self.add(value)))

        if isinstance(result, (tuple, list)):
            return type(result)([stand_in(each, place) for place, each in enumerate(result)])
        return stand_in(result, None)

    def _fit(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the indices that an operation takes are known to be places of the tensor that it indexes."""
        named = _named(func, args, kwargs)
        if "dim" in named:
            of, indices, dims = named["self"], [named.get("index")], [named["dim"]]
        elif "weight" in named:
            of, indices, dims = named["weight"], [named["indices"]], [0]
        else:
            of, indices = named.get("self"), named.get("indices") or [None]
            dims = list(range(len(indices)))
        for index, dim in zip(indices, dims, strict=True):
            if isinstance(index, StandIn):
                places = _places_of(self.value_of(index))
                if places is None or not _shape_of(of) or places > _shape_of(of)[dim]:
                    return False
        return any(isinstance(index, StandIn) for index in indices)

    def _valued(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with values in place of tensors."""
        values: Any = map_tensors((tuple(args), kwargs), lambda _, tensor: self.value_of(tensor))
        return values  # type: ignore[no-any-return]

    def _shaped(self, func: Any, facts: _Facts, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The results on the meta device, with their shapes. Steps repeat, so most results are known."""
        key: Any = None
        try:
            # Run with the real numbers of known indices, and zeros for unknown tensors: PyTorch checks that the indices lie in the tensor.
            if any(not (isinstance(t, StandIn) or t.dtype.is_floating_point) and t.ndim for t in tensors):
                args, kwargs = map_tensors((tuple(args), kwargs), lambda _, tensor: self._zeros(tensor))
                return map_tensors(func(*args, **kwargs), lambda _, tensor: tensor.to("meta"))
            # Do not cache a view, which shares the memory of these very tensors, or a change in place, which may change their shapes.
            if not (facts.is_view or facts.changes):
                key = func, self._described(args), self._described(sorted(kwargs.items())), torch.get_default_dtype()
            if key is None or key not in self._results:
                args, kwargs = map_tensors((tuple(args), kwargs), lambda _, tensor: self._meta(tensor))
                found = func(*args, **kwargs)
                if key is None:
                    return found
                self._results[key] = found
        except Exception as error:
            self.end(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return map_tensors(self._results[key], lambda _, meta: _empty(meta))

    def _meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_unknown(tensor):
            return tensor.meta if type(tensor) is StandIn else self._as_stand_in(tensor).meta
        return _empty(tensor)

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(self._meta(tensor), device="cpu") if self.is_unknown(tensor) else tensor.clone()

    def _described(self, tree: Any) -> Any:
        """Arguments without numbers, as a key. 1, 1.0 and True are equal, but PyTorch distinguishes them."""
        if isinstance(tree, torch.Tensor):
            meta = self._meta(tree)
            return tuple(meta.shape), meta.stride(), meta.dtype
        return tuple(map(self._described, tree)) if isinstance(tree, (tuple, list)) else (type(tree), tree)

    def _changed(self, func: Any, which: int | str, args: Any, kwargs: Any) -> Any:
        """The tensor that an operation changes in place."""
        target = kwargs[which] if isinstance(which, str) else args[which]
        own = target if isinstance(target, StandIn) else self._fill(target)
        given = self._valued(args, kwargs)
        if func is aten.copy_.default and given[0][0] is given[0][1]:  # `h[-1] += v` ends in writing a view to itself
            return target
        if torch.Tag.inplace_view in func.tags and type(target) is StandIn:
            with no_dispatch():  # of the stand-in itself: `row @ matrix` ends in such an operation
                func(*args, **kwargs)
        self.assign(own, self.add(Value("call", func, *given, which, 0, tuple(own.shape), own.dtype, self.at())))
        return target

    def _note_ones(self, meta: torch.Tensor) -> None:
        """Note which axes have no element, one, or more: PyTorch broadcasts, views and squeezes a single element differently."""
        self.sizes.append(tuple(min(size, 2) for size in meta.shape))

    def _viewed(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        source = args[0] if isinstance(args[0], StandIn) else self._as_stand_in(args[0])
        rest, named = _frozen(args[1:]), tuple((name, _frozen(each)) for name, each in kwargs.items())

        def view(meta: torch.Tensor, out: int | None) -> StandIn:
            self._note_ones(meta)
            return StandIn.of(meta, source.memory, (*source.chain, (func, rest, named, out)))

        if isinstance(result, (tuple, list)):
            self.sizes.append(len(result))
            return type(result)(view(meta, place) for place, meta in enumerate(result))
        return view(result, None)


# Large tensors that were converted, each with its result. The process records one code.
_CONVERTED: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


def _converted(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A conversion of the code's own tensor. A large tensor that has never been written to is converted once for all recordings."""
    place = unwritten(tensor)
    if place is None or tensor.nbytes < _LARGE:
        return aten._to_copy.default(tensor, **kwargs)  # type: ignore[no-any-return]
    key = place, tuple(sorted((name, str(value)) for name, value in kwargs.items()))
    if key not in _CONVERTED:
        # The copy in the table keeps the tensor's address from being used for other content.
        _CONVERTED[key] = lazy_copy(tensor), aten._to_copy.default(tensor, **kwargs)
    return lazy_copy(_CONVERTED[key][1])


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage_of(tensor: torch.Tensor) -> int | None:
    """The tensor's storage; None if it has none. Asking for its address would turn lazy copies into real ones."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    except (RuntimeError, NotImplementedError):
        return None


def _frozen(tree: Any) -> Any:
    return tuple(map(_frozen, tree)) if isinstance(tree, (tuple, list)) else tree


def _with_places(func: Any, args: Sequence[Any], notes: Notes) -> tuple[Any, ...]:
    """The arguments, with the places of true elements in place of known masks, so that the result's shape is known."""
    if func._schema.name.partition("::")[2] not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return tuple(args)
    places: list[Any] = []
    for each in args[1]:
        is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        if is_mask and notes.is_unknown(each):
            notes.end("it needs a number that only the forward has: which elements a mask has")
        axes = _shape_of(args[0])[len(places) : len(places) + each.ndim] if is_mask else ()
        if is_mask and tuple(each.shape) != axes:
            notes.end(f"IndexError: a mask of shape {list(each.shape)} for axes of shape {list(axes)}")
        places += each.nonzero().unbind(1) if is_mask else [each]
    return (args[0], places, *args[2:])


# The modes that see every operation, and every use of PyTorch's functions, while the code runs.


class SeeingOperations(TorchDispatchMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid PyTorch's wrapper against compilation, which takes longer than most operations here. This code is never compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._notes.seen(func, args, kwargs or {})


class SeeingFunctions(TorchFunctionMode):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        notes = self._notes
        if notes.makes_numbers and any(objects_in((args, kwargs), UnknownNumber)):
            notes.end("a number of the forward is used in a tensor")
        if (rows := notes.rows) is not None and next(objects_in((args, kwargs), UnknownRowCount), None) is not None:
            if func not in _OF_SIZES:
                notes.end("it depends on the number of tokens")
            args, kwargs = map_objects((args, kwargs or {}), UnknownRowCount, lambda count: rows * count.times)
        special = _SPECIAL.get(func)
        if special is not None and args and notes.is_unknown(args[0]):
            return special(notes, func, *args, **(kwargs or {}))
        if special is _refused and func in _ARRAYS:
            notes.has_arrays = True
        return func(*args, **(kwargs or {}))


def _size(notes: Notes, func: Any, *args: Any, **kwargs: Any) -> Any:
    found = func(*args, **kwargs)
    notes.sizes.append(found)
    return found if notes.rows is None else _counted(notes, found)


def _counted(notes: Notes, found: Any) -> Any:
    """A size, with `UnknownRowCount` where it depends on the number of rows."""
    if isinstance(found, tuple):
        return type(found)([_counted(notes, size) for size in found])
    if not found or found % notes.rows:
        return found
    count = UnknownRowCount(found)
    count.end, count.times = notes.end, found // notes.rows
    return count


def _length(notes: Notes, func: Any, tensor: torch.Tensor) -> int:
    if notes.rows is not None and tensor.ndim and func(tensor) % notes.rows == 0:
        notes.end("it depends on the number of tokens")
    return int(_size(notes, func, tensor))


def _refused(notes: Notes, func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    notes.end(f"{getattr(func, '__name__', func)} needs the numbers of the forward")


def _unsupported(notes: Notes, func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    notes.end(f"{getattr(func, '__name__', func)} of a value of the forward is not recorded")


def _number(notes: Notes, func: Any, tensor: torch.Tensor) -> Any:
    if tensor.numel() != 1:
        notes.end("item() of several numbers")
    notes.makes_numbers = True
    kind = float if tensor.dtype.is_floating_point else int
    if tensor.dtype in (torch.bool, torch.complex64, torch.complex128):
        notes.end("it needs a number that only the forward has")
    return UnknownNumber(kind, notes.end)


def _numbers(notes: Notes, func: Any, tensor: torch.Tensor) -> Any:
    notes.sizes.append(tuple(tensor.shape))
    if tensor.ndim:
        return [_numbers(notes, func, row) for row in tensor.unbind(0)]
    return _number(notes, func, tensor)


def _clone(notes: Notes, func: Any, tensor: torch.Tensor, *_: Any) -> Any:
    return tensor.clone()


def _version(notes: Notes, func: Any, tensor: torch.Tensor) -> int:
    return tensor.memory.version if type(tensor) is StandIn else int(tensor._version)


def _data(notes: Notes, func: Any, tensor: torch.Tensor) -> Any:
    return tensor.detach()


def _one_hot(notes: Notes, func: Any, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """Note whether the call may raise. PyTorch checks the numbers of ordinary tensors, but not those of stand-ins."""
    places = _places_of(notes.value_of(tensor))
    if places is None or places > num_classes:
        notes.may_raise = notes.may_raise or notes.at()
    return func(tensor, num_classes)


_T: Any = torch.Tensor
_ARRAYS = {_T.numpy, _T.__array__, _T.data_ptr, torch.from_numpy, torch.as_tensor, torch.frombuffer, _T.untyped_storage}
# Where an `UnknownRowCount` may be a size.
_OF_SIZES = {
    _T.view,
    _T.reshape,
    _T.expand,
    _T.unflatten,
    _T.new_zeros,
    _T.new_ones,
    _T.new_empty,
    torch.reshape,
    torch.unflatten,
}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (_T.shape.__get__, _T.size, _T.numel, _T.nelement, _T.stride, _T.storage_offset, _T.nbytes.__get__, torch.numel), _size
    ),
    **dict.fromkeys(
        (_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.storage, _T.__repr__, _T.__format__, _T.__reduce_ex__, _T.__bool__,
         _T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.__contains__, _T.__dlpack__, _T.is_nonzero, torch.save),
        _refused,
    ),
    **dict.fromkeys(
        (_T.data.__set__, _T.as_subclass, _T.requires_grad_, _T.requires_grad.__set__, _T.backward, _T.register_hook, _T.share_memory_,
         _T.pin_memory, _T.set_, _T.resize_, _T.grad.__set__, _T.retain_grad),
        _unsupported,
    ),
    torch.nn.functional.one_hot: _one_hot,
    _T.__len__: _length,
    _T.item: _number,
    _T.tolist: _numbers,
    _T.__deepcopy__: _clone,
    _T._version.__get__: _version,
    _T.is_inference: lambda notes, func, tensor: False,
    _T.data.__get__: _data,
}  # fmt: skip
