"""What is known of the values in a trace's code before it runs, and which functions are known to change nothing.

Of a value that is not known it matters whether it may share memory with an activation: such a value must not be changed in place.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from midstream.arch.aliases import Aliases
from midstream.plan.values import ModelFacts
from midstream.sites import LAYER_SITES, Point
from midstream.trace.program import REACHING, harmless, is_model, module_path, reaches_no_model
from midstream.trace.tracer import save


class Stays(Exception):
    """The program has to run in the forward."""

    def __init__(self, node: ast.AST | None, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = getattr(node, "lineno", 0), reason


@dataclass(frozen=True)
class Model:
    """What is known of the model.

    Attributes:
        sites: those at which a plan costs nothing.
        modules: the paths of all modules.
        values: `model.layers.3.mlp.output` -> the site whose value it is, for modules' inputs and outputs that are a site's value.
        aliases: other names of modules.
        points: `("resid_post", 3)` -> `model.layers.3.output`, the name of a site in error messages.
    """

    facts: ModelFacts
    sites: Collection[str] = LAYER_SITES
    modules: Collection[str] = ()
    values: Mapping[str, Point] = field(default_factory=dict)
    aliases: Aliases = field(default_factory=Aliases)
    points: Mapping[Point, str] = field(default_factory=dict)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in filter(None, self.modules):
            found.setdefault(path.rpartition(".")[0], []).append(path)
        return found

    def children(self, path: str) -> list[str]:
        """The paths of the modules in the one at `path`."""
        return self._children.get(path, [])

    def child(self, path: str, name: str) -> str | None:
        """The path of the module that is called `name` in the one at `path`."""
        inside = f"{path}.{name}" if path else name
        return inside if inside in self.modules else self.aliases.resolve(path, name, self.modules)


class Unsized(Exception):
    """Which rows a write is about depends on the prompt's length, which is not known."""


# What is known of a value.


class Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


MODEL, TRACER = Marker("model"), Marker("tracer")
NEW = Marker("new")  # made by the trace; shares no memory with an activation
FUNCTION = Marker("function")  # a function that the trace defines, or a new value that may hold one
SHARED = Marker("shared")  # may share memory with an activation
FILLED = Marker("filled")  # made by the trace; no activation, but may hold some, as a list of them does


@dataclass(frozen=True, eq=False)
class Known:
    """A value known before the step."""

    value: Any


@dataclass(frozen=True)
class Accessor:
    """`model.layers_output`."""

    site: str


@dataclass(frozen=True)
class Site:
    """`model.layers_output[3]`.

    Attributes:
        writes: how many writes there had been to the point.
    """

    point: Point
    writes: int


@dataclass(frozen=True)
class Module:
    """`model.model.layers[3].mlp`."""

    path: str


@dataclass(frozen=True)
class Items:
    """A list or tuple of what is known of its items, among which are modules."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """A change of all rows, or of some, by a value known before the step: `"add"` it `scale` times, `"set"` it, or `"project"` it out."""

    kind: str
    value: Any
    scale: float = 1.0
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Draft:
    """A tensor of the trace's own that is a site's value with changes: `model.layers_output[3] + v`, or a clone that was written to."""

    of: Site
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Method:
    """`owner.name`."""

    owner: Any
    name: str


def is_the_model(value: Any) -> bool:
    """Whether it is the model or the tracer, or a module or method of theirs, or holds one."""
    if isinstance(value, Items):
        return any(map(is_the_model, value.items))
    owner = value.owner if isinstance(value, Method) else value
    return owner is MODEL or owner is TRACER or isinstance(owner, Module)


def abstract(value: Any) -> Any:
    if is_model(value):
        return MODEL
    if (path := module_path(value)) is not None:
        return Module(path)
    if type(value) in (list, tuple) and value and all(module_path(each) is not None for each in value):
        return Items(tuple(map(abstract, value)))
    return Known(value)


def may_share(value: Any) -> bool:
    return value in (SHARED, FILLED) or isinstance(value, (Site, Accessor))


def may_hold(value: Any) -> bool:
    """Whether it may share memory with an activation or with a value of the caller's that can be changed."""
    return may_share(value) or (isinstance(value, Known) and not is_fixed(value.value))


def joined(values: Iterable[Any]) -> Any:
    """What is known of a value that is one of these."""
    values = list(values)
    if values and all(same(value, values[0]) for value in values[1:]):
        return values[0]
    if any(map(is_the_model, values)):
        raise Stays(None, "a name may stand for the model or for something else")
    if any(value is FUNCTION for value in values) and not any(map(may_hold, values)):
        return FUNCTION
    if all(value in (NEW, FILLED) or type(getattr(value, "value", None)) in (list, dict, set) for value in values):
        return FILLED if any(map(may_hold, values)) else NEW
    return SHARED if any(map(may_hold, values)) else NEW


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Known) and isinstance(b, Known):
        return a.value is b.value or (type(a.value) is type(b.value) and is_fixed(a.value) and a.value == b.value)
    return a is b or (type(a) is type(b) and not isinstance(a, (Marker, Known)) and a == b)


def is_fixed(value: Any) -> bool:
    """Whether nothing can change the value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_fixed, value))
    plain = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, ModuleType)
    return isinstance(value, (*plain, FunctionType, BuiltinFunctionType, MethodDescriptorType, type, type(Ellipsis)))


# Functions and methods that are known to change nothing.

COMPUTED = frozenset({
    range, len, min, max, sum, abs, int, float, list, tuple, zip, enumerate, sorted, reversed, bool, round, slice,
    torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full, torch.arange, torch.stack, torch.cat, torch.zeros_like,
    torch.ones_like, torch.nn.functional.normalize, torch.norm,
})  # fmt: skip
COMPUTED_METHODS = frozenset(
    "to float half bfloat16 double clone norm mean sum detach cpu view reshape unsqueeze squeeze flatten item tolist numel "
    "index keys values items get copy".split()
)
NEW_METHODS = frozenset(
    "clone norm mean sum std var argmax argmin max min softmax log_softmax sigmoid tanh relu exp log sqrt abs square pow item tolist "
    "matmul mm bmm dot topk sort argsort add sub mul div neg numel size dim cumsum eq ne gt lt ge le any all logsumexp nelement".split()
)
CONTAINER_METHODS = frozenset("append extend insert discard pop popleft remove setdefault update clear".split())
PLAIN_ATTRIBUTES = frozenset("shape dtype device ndim requires_grad is_cuda layout".split())
REFUSED = REACHING | {"setattr", "delattr", "getattr", "__import__", "open"}
_CHANGING = frozenset("copyto put place putmask fill_diagonal shuffle setitem delitem seterr".split()) | {
    name
    for name in dir(operator)
    if name.startswith("i") and name not in ("index", "indexOf", "inv", "invert", "is_", "is_not", "itemgetter")
}
IN_PLACE = "changes an activation in place; write it back with model.SITE[layer] = ..."
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
COMPUTABLE = (torch.Tensor, int, float, complex, str, list, tuple, dict, range, type(None))


def changes_nothing(function: Any) -> bool:
    """Whether it is a function of a package that reaches no model and changes none of its arguments."""
    home, name = getattr(function, "__module__", None) or "builtins", getattr(function, "__name__", "")
    return reaches_no_model(home) and not name.endswith("_") and name not in _CHANGING and name not in REFUSED


def may_change(value: Any) -> bool:
    """Whether it is a function, or holds one, that may change its arguments."""
    return value is FUNCTION or (
        isinstance(value, Known) and callable(value.value) and not changes_nothing(value.value)
    )


def is_asked_in_place(function: Any, given: Sequence[Any], named: Mapping[Any, Any]) -> bool:
    """Whether a call gives an argument `inplace` that is not False."""
    try:
        bound = (
            inspect.signature(function)
            .bind_partial(*given, **{str(name): each for name, each in named.items() if name})
            .arguments
        )
    except (TypeError, ValueError):
        return "inplace" in named
    asked = bound.get("inplace")
    return asked is not None and not (isinstance(asked, Known) and asked.value is False)


def is_followed(value: Any) -> bool:
    """Whether a captured value cannot reach the model, other than by code that is followed."""
    return isinstance(value, FunctionType) or harmless(value) or is_plain_module(value) or value is save


def is_plain_module(value: Any) -> bool:
    """Whether it is a module of PyTorch's own classes, which changes none of its arguments."""
    return isinstance(value, nn.Module) and all(
        type(each).__module__.startswith("torch.nn.") and not getattr(each, "inplace", False)
        and not (each._forward_hooks or each._forward_pre_hooks)
        for each in value.modules()
    )  # fmt: skip
