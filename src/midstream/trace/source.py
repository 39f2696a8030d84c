"""`.source`: the calls inside a module's Python forward as points of their own.

The forward's source is rewritten so that each call `f(x)` goes through a dispatcher, which reports the call's arguments and result. The
rewritten forward replaces the module's own only while a trace is alive. A call's name is that of the called function with a running
number: `self_c_proj_0`, `attention_interface_0`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from midstream import hooks
from midstream.errors import SourceUnavailableError
from midstream.sites import Key

_DISPATCH = "__midstream_call__"


@dataclass(frozen=True)
class ForwardSource:
    """A forward's text and the code that reports its calls.

    Attributes:
        names: of the calls.
        lines: of the calls, counted from the first line of `text`.
        attributes: name of a call -> the attribute of the module that it calls: `mlp.down_proj` for `self.mlp.down_proj(x)`.
    """

    text: str
    names: tuple[str, ...]
    lines: tuple[int, ...]
    code: CodeType
    attributes: Mapping[str, str]

    def __str__(self) -> str:
        marks: dict[int, list[str]] = {}
        for name, number in zip(self.names, self.lines, strict=True):
            marks.setdefault(number, []).append(name)
        rows = []
        for number, text in enumerate(self.text.splitlines(), start=1):
            here = ", ".join(marks.get(number, ()))
            rows.append(f"{here:>40} | {text}")
        return "\n".join(rows)


class _Dispatch(ast.NodeTransformer):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: list[tuple[str, int]] = []
        self.attributes: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "isinstance", "getattr", "hasattr"):
            return self.generic_visit(node)
        called = ast.unparse(node.func)
        words = "".join(c if c.isalnum() else " " for c in called).split()
        stem = "_".join(words) or "call"
        name = f"{stem}_{self.counts[stem]}"
        self.counts[stem] += 1
        self.calls.append((name, node.lineno))
        owner, _, attribute = called.partition(".")
        if owner == "self" and attribute.replace(".", "").isidentifier():
            self.attributes[name] = attribute
        self.generic_visit(node)
        dispatched = ast.Call(
            ast.Name(_DISPATCH, ast.Load()), [ast.Constant(name), node.func, *node.args], node.keywords
        )
        return ast.copy_location(dispatched, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.body = [self.visit(statement) for statement in node.body]
        return node


@functools.cache
def forward_source(forward: FunctionType) -> ForwardSource:
    """Read and rewrite a forward. Raises SourceUnavailableError if it has no Python source, or calls `super()`."""
    forward = inspect.unwrap(forward)
    try:
        text = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):
        raise SourceUnavailableError(
            f"{forward!r} has no Python source; use the module's .input and .output."
        ) from None
    if "__class__" in forward.__code__.co_freevars:
        raise SourceUnavailableError(
            f"{forward.__qualname__} calls super(), which .source cannot follow; use .input and .output."
        )
    tree = ast.parse(text)
    dispatch = _Dispatch()
    function = dispatch.visit(tree.body[0])
    tree.body = [ast.fix_missing_locations(_in_factory(function, forward.__code__.co_freevars))]
    module = compile(ast.fix_missing_locations(tree), forward.__code__.co_filename, "exec")
    names, lines = zip(*dispatch.calls, strict=True) if dispatch.calls else ((), ())
    return ForwardSource(text, names, lines, module, dispatch.attributes)


def _in_factory(function: ast.FunctionDef, free: tuple[str, ...]) -> ast.FunctionDef:
    """`def factory(free...): def forward(...): ...; return forward`, so that closures keep working."""
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    returned = ast.Return(ast.Name(function.name, ast.Load()))
    return ast.FunctionDef("__factory__", arguments, [function, returned], [], None, None, type_params=[])  # type: ignore[call-arg]


class SourceHooks:
    """Replaces forwards by rewritten ones while a trace is alive. `fire` gets each call's point and value."""

    def __init__(self, modules: Mapping[str, nn.Module], fire: Callable[[Any, Any], Any]) -> None:
        self._modules = modules
        self._paths = {module: path for path, module in modules.items()}
        self._fire = fire
        self._handles: dict[str, hooks.Handle] = {}

    def of(self, path: str) -> ForwardSource:
        return forward_source(type(self._modules[path]).forward)  # type: ignore[arg-type]

    def module_point(self, key: Key) -> Key:
        """If `key` is the call of a module, the module's own point, which has the same value; else `key`."""
        if len(key) != 4:
            return key
        path, _, name, kind = key
        called: Any = self._modules[path]
        for attribute in self.of(path).attributes.get(name, "").split("."):
            called = getattr(called, attribute, None)
        return (self._paths[called], kind) if isinstance(called, nn.Module) and called in self._paths else key

    def install(self, path: str) -> None:
        """Replace the forward of the module at `path`."""
        if path in self._handles:
            return
        module = self._modules[path]
        plain = inspect.unwrap(type(module).forward)
        cells = [cell.cell_contents for cell in plain.__closure__ or ()]

        def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._fire((path, "source", name, "input"), (args, kwargs))
            return self._fire((path, "source", name, "output"), function(*args, **kwargs))

        names = {**plain.__globals__, _DISPATCH: call}
        exec(self.of(path).code, names)
        self._handles[path] = hooks.replace_forward(module, names["__factory__"](*cells).__get__(module))

    def remove(self) -> None:
        """Put the modules' own forwards back."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
