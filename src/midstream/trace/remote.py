"""What a body has of a value that another pipeline stage computes.

A read of such a value returns at once. Passing it around, saving it and writing to it do nothing here: the stage that has the value
runs the same code, and there they are real. Only real use fetches it: arithmetic, comparison, indexing, `len`, iteration, a method.

    h = model.layers_output[20]              # on the stage of layer 3: a RemoteValue
    h.save()                                 # the stage of layer 20 brings it back
    model.layers_output[25] += h.mean(0)     # `mean` fetches it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.errors import TraceError
from midstream.sites import Ref
from midstream.trace.tree import Opaque, map_objects, map_tensors

if TYPE_CHECKING:
    from midstream.trace.body import Body


@dataclass(frozen=True)
class Absent:
    """In the place of a value that lives on another stage. Left in a saved container only if no stage brought the value back."""

    point: str

    def __repr__(self) -> str:
        return f"<{self.point}: not brought back>"


class Claim:
    """Lives as long as a value may be asked for here: `waive` is called when its last RemoteValue is gone, on whichever thread."""

    __slots__ = ("_waive",)

    def __init__(self, waive: Callable[[], None]) -> None:
        self._waive = waive

    def __del__(self) -> None:
        self._waive()


class Place(NamedTuple):
    """Where a value comes from.

    Attributes:
        body: the trace that read it.
        number: of the read, counted in that trace; the same on every stage.
        stage: the one that has it.
        step: that it was read in.
        called: whether it is what a module gave for a value of the body's own.
        name: as a user would write it.
        width: of the tuple that it is; None if it is no tuple, or that is not known.
        ref: the part of it that is meant.
        claim: while one of its parts has it, the value may be asked for.
    """

    body: Body
    number: int
    stage: int
    step: int
    called: bool
    name: str
    width: int | None = None
    ref: Ref = ()
    claim: Claim | None = None


class RemoteValue(Opaque):
    """A value of another pipeline stage, fetched at its first real use."""

    __slots__ = ("_changes", "_place", "_real")

    _place: Place
    _changes: list[Callable[[Any], Any]]

    def __init__(self, place: Place) -> None:
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_changes", [])

    # Without a fetch.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """As `isinstance` sees it: traces ask a module's output whether it is a tuple."""
        return RemoteValue if self._place.width is None else tuple

    def __repr__(self) -> str:
        return f"<{self._place.name} of step {self._place.step}, on pipeline stage {self._place.stage}>"

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> RemoteValue:
        return self

    def __reduce__(self) -> Any:
        return Absent, (self._place.name,)

    def __setitem__(self, index: Any, value: Any) -> None:
        index, value = _kept(index), _kept(value)

        def change(whole: Any) -> Any:
            whole[real(index)] = real(value)
            return whole

        self._change(change)

    def _change(self, change: Callable[[Any], Any]) -> RemoteValue:
        """An edit in place: the value's own stage makes it as well. Made here when the value comes to be used here."""
        if hasattr(self, "_real"):
            object.__setattr__(self, "_real", change(self._real))
        else:
            self._changes.append(change)
        return self

    # By a fetch.

    def _use(self) -> Any:
        if not hasattr(self, "_real"):
            value = self._place.body.fetch(self._place)
            for change in self._changes:
                value = change(value)
            object.__setattr__(self, "_real", value)
        return self._real

    def __getattr__(self, name: str) -> Any:
        if name in (*RemoteValue.__slots__, "_fields", "_make") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if self._place.width is not None and hasattr(torch.Tensor, name) and not hasattr(tuple, name):
            raise TraceError(
                f"{self._place.name} is a tuple of {self._place.width}, which has no {name}: index first, as in "
                f"`{self._place.name}[0].{name}`."
            )
        if name.endswith("_") and not name.startswith("_") and callable(getattr(torch.Tensor, name, None)):
            return lambda *args, **kwargs: self._change(_method(name, _kept(args), _kept(kwargs)))
        return getattr(self._use(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._use(), name, real(value))

    def __getitem__(self, index: Any) -> Any:
        width = self._place.width
        if width is None or not isinstance(index, int) or hasattr(self, "_real") or self._changes:
            return self._use()[real(index)]
        if not -width <= index < width:
            raise IndexError(f"{self._place.name} is a tuple of {width}; [{index}] was asked for.")
        place, at = self._place, index % width
        return RemoteValue(place._replace(ref=(*place.ref, at), name=f"{place.name}[{at}]", width=None))

    def __iter__(self) -> Iterator[Any]:
        if self._place.width is not None:
            return iter([self[i] for i in range(self._place.width)])
        return iter(self._use())

    def __len__(self) -> int:
        return self._place.width if self._place.width is not None else len(self._use())

    def __bool__(self) -> bool:
        return bool(self._use())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use()(*real(args), **real(kwargs))

    def __contains__(self, item: Any) -> bool:
        return real(item) in self._use()

    def __int__(self) -> int:
        return int(self._use())

    def __float__(self) -> float:
        return float(self._use())

    def __complex__(self) -> complex:
        return complex(self._use())

    def __index__(self) -> int:
        return operator.index(self._use())

    def __round__(self, digits: int = 0) -> Any:
        return round(self._use(), digits)

    def __format__(self, spec: str) -> str:
        return format(self._use(), spec) if spec else repr(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._use().__array__(dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        return copy.deepcopy(self._use(), memo)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*real(args), **real(kwargs or {}))


def real(tree: Any) -> Any:
    """`tree` with every RemoteValue in its containers fetched."""
    return map_objects(tree, RemoteValue, RemoteValue._use)


def _kept(tree: Any) -> Any:
    """`tree` as it is now, for a later use: its tensors may be edited until then."""
    return map_tensors(tree, lambda _, tensor: tensor.clone()) if not isinstance(tree, RemoteValue) else tree


def _method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda value: getattr(value, name)(*real(args), **real(kwargs))


# Python's operators, without their underscores.
BINARY = tuple("add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split())
UNARY = ("neg", "pos", "abs", "invert")
COMPARISONS = ("lt", "le", "gt", "ge", "ne", "eq")


def _define_operators() -> None:
    """Arithmetic and comparison use the value; the forms in place are edits of it."""

    def plain(name: str) -> Callable[..., Any]:
        function = getattr(operator, name)
        return lambda self, *others: function(self._use(), *(real(other) for other in others))

    def reflected(name: str) -> Callable[..., Any]:
        function = getattr(operator, name)
        return lambda self, other: function(real(other), self._use())

    def in_place(name: str) -> Callable[..., Any]:
        function = getattr(operator, name)

        def change(self: RemoteValue, other: Any) -> RemoteValue:
            other = _kept(other)
            return self._change(lambda value: function(value, real(other)))

        return change

    for name in BINARY:
        setattr(RemoteValue, f"__{name}__", plain(f"__{name}__"))
        setattr(RemoteValue, f"__r{name}__", reflected(f"__{name}__"))
        setattr(RemoteValue, f"__i{name}__", in_place(f"__i{name}__"))
    for name in (*UNARY, *COMPARISONS):
        setattr(RemoteValue, f"__{name}__", plain(f"__{name}__"))


_define_operators()
