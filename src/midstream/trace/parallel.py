"""The other processes that run the same model: tensor-parallel ranks (`Peers`) and pipeline stages (`Stage`).

The classes here are for a model in a single process; `ranks/` has the others. The same body runs in every process. Reading a value of
another stage returns a `StageValue` at once. Passing it on, saving it and writing to it have no effect on this stage, because the stage
that owns the value does the same with the value itself. Only a real use fetches it: arithmetic, comparison, indexing, `len`, iteration, a
method.

    h = model.layers_output[20]              # on the stage of layer 3: a StageValue
    h.save()                                 # the stage of layer 20 brings it back
    model.layers_output[25] += h.mean(0)     # `mean` fetches it
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from midstream.errors import MidstreamError, TraceError
from midstream.sites import Key
from midstream.tree import Opaque, Ref, map_objects, map_tensors

CALL = "call"  # the last part of the key of a value that a module computes for the trace, outside of the forward


class Sharding(NamedTuple):
    """How to get from this rank's part of a tensor to the full tensor and back. `lead` is the number of axes before the sharded ones.

    Attributes:
        join: `join(part, lead)` gives the full tensor. It is collective.
        cut: `cut(full, lead)` gives this rank's part.
    """

    join: Callable[[torch.Tensor, int], torch.Tensor]
    cut: Callable[[torch.Tensor, int], torch.Tensor]


class Peers:
    """The tensor-parallel ranks, which run the same bodies. This class is for a model on one rank (see `ranks.tensor`)."""

    several = False

    def shards(self, key: Key) -> Mapping[Ref, Sharding]:
        """The sharded leaves at a point."""
        return {}

    def applied(self, path: str, module: Callable[..., Any]) -> Callable[..., Any]:
        """`module` as a function of full tensors. Calling it may be collective."""
        return module

    def begin_step(self) -> None:
        """A step with traces begins."""

    def rest(self) -> None:
        """The last trace has ended."""

    def note(self, body: str, *what: Any) -> None:
        """The body does something that it has to do on all ranks."""

    def show(self) -> None:
        """The forward continues: send the notes to the other ranks."""

    def agree(self, body: str, *what: Any) -> None:
        """Call this before a collective operation. Raises DivergedError if the body does something else on another rank."""

    def decide(self, choose: Callable[[], list[str]]) -> list[str]:
        """The names that `choose` returns on the first rank. The other ranks do not call it."""
        return choose()

    def end_step(self, bodies: Iterable[str]) -> Mapping[str, MidstreamError]:
        """The forward is over: the errors of the bodies that behaved differently on different ranks."""
        return {}


ALONE = Peers()


class Stage:
    """This process's stage of the pipeline. This class is for a model with one stage (see `ranks.stages`).

    Attributes:
        index: of this stage.
        size: how many stages there are.
        modules: path -> class name of the modules of all stages.
    """

    index = 0
    size = 1
    modules: Mapping[str, str]

    def __init__(self, root: nn.Module) -> None:
        self.modules = {path: type(module).__name__ for path, module in root.named_modules()}
        self._children = {
            path: [name for name, child in module._modules.items() if child is not None]
            for path, module in root.named_modules(remove_duplicate=False)
        }

    def has(self, key: Key) -> bool:
        """Whether this stage owns the point."""
        return True

    def children_of(self, path: str) -> list[str]:
        """The names of the modules below `path`, on all stages."""
        return self._children.get(path, [])

    def class_of(self, path: str) -> type[nn.Module]:
        """The class of a module of another stage."""
        raise NotImplementedError

    def width_of(self, key: Key) -> int | None:
        """The length of the tuple at `key`; None if the value is not known to be a tuple."""
        return None

    def silence(self, body: str, failure: BaseException | None) -> None:
        """The body's code has ended on this stage, by `failure` if given."""

    # Called if there are several stages.

    def of(self, key: Key) -> int:
        """The stage that owns a point."""
        raise NotImplementedError

    def begin_of(self, stage: int) -> int:
        """The moment of the forward at which a stage begins."""
        raise NotImplementedError

    def publish(self, body: str, number: int, key: Key, value: Callable[[], Any]) -> Any:
        """Compute a value of this stage and let the other stages fetch it. If the computation raises, they get an error."""
        raise NotImplementedError

    def claim(self, stage: int, body: str, number: int) -> Claim:
        """Claim a value of another stage: this stage may fetch it while the claim lives."""
        raise NotImplementedError

    def fetch(self, origin: Origin) -> Any:
        """Ask for another stage's value. Returns at once; the returned fetch is `done` when the answer has arrived."""
        raise NotImplementedError

    def received(self, fetch: Any) -> Any:
        """The fetched value, on the forward's device. Raises the error that came instead."""
        raise NotImplementedError

    def wait_any(self, fetches: Iterable[Any]) -> None:
        """Wait until one of them is answered."""
        raise NotImplementedError


class AbsentStage(Stage):
    """All modules of a model that is in another process, as one stage.

    Args:
        modules: path -> class name.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules
        self._children = {}
        for path in filter(None, modules):
            parent, _, name = path.rpartition(".")
            self._children.setdefault(parent, []).append(name)


@dataclass(frozen=True)
class Absent:
    """Stands for another stage's value in a saved container. It stays there only if no stage brought the value back."""

    point: str

    def __repr__(self) -> str:
        return f"<{self.point}: not brought back>"


class Claim:
    """Lives as long as a value may be fetched. `waive` is called when its last StageValue is gone, on any thread."""

    __slots__ = ("_waive",)

    def __init__(self, waive: Callable[[], None]) -> None:
        self._waive = waive

    def __del__(self) -> None:
        self._waive()


class Origin(NamedTuple):
    """The origin of another stage's value.

    Attributes:
        body: the name of the trace that read it.
        number: counts the reads of that trace; the same on every stage.
        stage: the stage that owns the value.
        step: the step in which it was read.
        key: the point of the forward, or `(path, CALL)` if a module computed it for the trace, outside of the forward.
        name: as the user wrote it.
        fetch: fetches the value for the body that is running.
        width: length of the tuple that it is; None if it is not known to be a tuple.
        ref: the part of the value that is meant.
        claim: the value may be fetched as long as one of its parts holds this.
    """

    body: str
    number: int
    stage: int
    step: int
    key: Key
    name: str
    fetch: Callable[[Origin], Any]
    width: int | None = None
    ref: Ref = ()
    claim: Claim | None = None


class StageValue(Opaque):
    """A value of another pipeline stage, fetched at its first real use."""

    __slots__ = ("_changes", "_origin", "_real")

    _origin: Origin
    _changes: list[Callable[[Any], Any]]

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "_origin", origin)
        object.__setattr__(self, "_changes", [])

    # Without fetching.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Makes `isinstance(x, tuple)` true for tuples, since traces test a module's output in this way."""
        return StageValue if self._origin.width is None else tuple

    def __repr__(self) -> str:
        return f"<{self._origin.name} of step {self._origin.step}, on pipeline stage {self._origin.stage}>"

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> StageValue:
        return self

    def __reduce__(self) -> Any:
        return Absent, (self._origin.name,)

    def __setitem__(self, index: Any, value: Any) -> None:
        index, value = _snapshot(index), _snapshot(value)

        def change(fetched: Any) -> Any:
            fetched[real(index)] = real(value)
            return fetched

        self._change(change)

    def _change(self, change: Callable[[Any], Any]) -> StageValue:
        """Edit the value in place. Its own stage makes the edit, too; this stage makes it once it uses the value."""
        if hasattr(self, "_real"):
            object.__setattr__(self, "_real", change(self._real))
        else:
            self._changes.append(change)
        return self

    def _edit(self, method: str, args: Any, kwargs: Any) -> StageValue:
        return self._change(lambda value: getattr(value, method)(*real(args), **real(kwargs)))

    # By fetching.

    def _use(self) -> Any:
        if not hasattr(self, "_real"):
            value = self._origin.fetch(self._origin)
            for change in self._changes:
                value = change(value)
            object.__setattr__(self, "_real", value)
        return self._real

    def __getattr__(self, name: str) -> Any:
        if name in (*StageValue.__slots__, "_fields", "_make") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if self._origin.width is not None and hasattr(torch.Tensor, name) and not hasattr(tuple, name):
            raise TraceError(
                f"{self._origin.name} is a tuple of {self._origin.width}, which has no {name}: index first, as in "
                f"`{self._origin.name}[0].{name}`."
            )
        if name.endswith("_") and not name.startswith("_") and callable(getattr(torch.Tensor, name, None)):
            return lambda *args, **kwargs: self._edit(name, _snapshot(args), _snapshot(kwargs))
        return getattr(self._use(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._use(), name, real(value))

    def __getitem__(self, index: Any) -> Any:
        width = self._origin.width
        if width is None or not isinstance(index, int) or hasattr(self, "_real") or self._changes:
            return self._use()[real(index)]
        if not -width <= index < width:
            raise IndexError(f"{self._origin.name} is a tuple of {width}; [{index}] was asked for.")
        origin, at = self._origin, index % width
        return StageValue(origin._replace(ref=(*origin.ref, at), name=f"{origin.name}[{at}]", width=None))

    def __iter__(self) -> Iterator[Any]:
        if self._origin.width is not None:
            return iter([self[i] for i in range(self._origin.width)])
        return iter(self._use())

    def __len__(self) -> int:
        return self._origin.width if self._origin.width is not None else len(self._use())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use()(*real(args), **real(kwargs))

    def __format__(self, spec: str) -> str:
        return format(self._use(), spec) if spec else repr(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._use().__array__(dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._use(), memo)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*real(args), **real(kwargs or {}))


def real(tree: Any) -> Any:
    """`tree` with every StageValue in its containers fetched."""
    return map_objects(tree, StageValue, StageValue._use)


def _snapshot(tree: Any) -> Any:
    """A copy of `tree`, whose tensors may be edited before the copy is used."""
    return map_tensors(tree, lambda _, tensor: tensor.clone()) if not isinstance(tree, StageValue) else tree


# Operators: names of special methods, without underscores.
BINARY = tuple("add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split())
UNARY = ("neg", "pos", "abs", "invert")
COMPARISONS = ("lt", "le", "gt", "ge", "ne", "eq")


def _by_use(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self._use(), *map(real, others))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(real(other), self._use())


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: StageValue, other: Any) -> StageValue:
        other = _snapshot(other)
        return self._change(lambda value: function(value, real(other)))

    return change


for _name in BINARY:
    setattr(StageValue, f"__{_name}__", _by_use(getattr(operator, f"__{_name}__")))
    setattr(StageValue, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
    setattr(StageValue, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))
for _name in (*UNARY, *COMPARISONS, "index", "contains"):
    setattr(StageValue, f"__{_name}__", _by_use(getattr(operator, f"__{_name}__")))
for _function in (bool, int, float, complex, round):
    setattr(StageValue, f"__{_function.__name__}__", _by_use(_function))
