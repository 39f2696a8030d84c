"""One model's forward pass, as its traces see it: the current position in the pass, and the hooks that report it.

Hooks are on the model only while a trace is alive, and only at the points that a trace has asked for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from midstream import hooks
from midstream.arch.aliases import Aliases
from midstream.errors import SourceUnavailableError, TraceError
from midstream.memory import without_collections
from midstream.sites import Key, point_name
from midstream.trace.parallel import ALONE, Peers, Stage
from midstream.trace.rewrite import compiled, made_again
from midstream.trace.saves import closure_of
from midstream.trace.visit import Visit
from midstream.tree import memory_of

Order = Mapping[tuple[str, str], tuple[int, int]]
Watcher = Callable[[Visit], None]
Calling = Callable[[str, Any], contextlib.AbstractContextManager[None]]
STEP_START: Key = ("", "step")
LAST_POINTS: dict[Key, int] = {("", "logits"): 1 << 60, ("", "samples"): (1 << 60) + 1}  # -> moment
_NEVER_PASSED = 1 << 61


class Forward:
    """The position of a model's forward pass.

    Args:
        root: the model whose modules are traced.
        order: from `Architecture.order`: the moments of the forward at which each module is called and returns.
        stage: this process's stage of the pipeline.
        peers: the tensor-parallel ranks that hold the other shards of each layer.
        aliases: the user's other names of modules.

    Attributes:
        modules: path -> module.
        muted: whether modules run outside of the step, for a trace.
        reachable: the points that the step's forward passes; None for all.
        watchers: callbacks at points, with the names of their bodies.
        overrides: values to write at points in this step, with the names of their bodies.
        at_barrier: the names of the bodies that wait at each barrier.
        freed: the names of the bodies that a barrier has released.
        attached: path -> names of the caller's modules there.
        calling: returns the context manager around a body's call of a layer; gets the body's name and the arguments of the call.
        live_storages: the memory of the tensors that traces on transformers have read in this step.
    """

    def __init__(
        self,
        root: nn.Module,
        order: Order,
        stage: Stage | None = None,
        peers: Peers = ALONE,
        aliases: Aliases | None = None,
    ) -> None:
        self.order = order
        self.stage = Stage(root) if stage is None else stage
        self.peers = peers
        self.modules = dict(root.named_modules())
        self.source = SourceHooks(self.modules, self.fire)
        self.muted = False
        self.reachable: frozenset[Key] | None = None
        self.watchers: dict[Key, list[tuple[str, Watcher]]] = {}
        self.overrides: dict[Key, list[tuple[str, Any]]] = {}
        self.at_barrier: dict[Any, list[str]] = {}
        self.freed: list[str] = []
        self.aliases = aliases or Aliases()
        self.attached: dict[str, set[str]] = {}
        self.calling: Calling = lambda body, args: contextlib.nullcontext()
        self.live_storages: set[int | None] = set()
        self._position = -1
        self._point: Key = STEP_START
        self._firing: Key | None = None
        self._stepping = False
        self._handles: dict[Key, hooks.Handle] = {}

    def fire(self, key: Key, tree: Any, direct: bool = False) -> Any:
        """The forward is at `key` with value `tree`. Returns the value to continue with."""
        raise NotImplementedError

    # Position.

    def ordinal(self, key: Key) -> tuple[int, int]:
        """The first and the last moment at which the forward is at `key`."""
        if key in LAST_POINTS:
            return LAST_POINTS[key], LAST_POINTS[key]
        return self.order.get(key[:2] if len(key) == 2 else (key[0], "input"), (-1, _NEVER_PASSED))

    def has_passed(self, key: Key) -> bool:
        """Whether the forward can no longer reach `key` in this step."""
        if not self._stepping:
            return True
        return key != self._firing and len(key) != 4 and self.ordinal(key)[1] <= self._position

    @property
    def reached(self) -> Key:
        """The point where traces last ran, or STEP_START."""
        return self._point

    def is_live(self, value: torch.Tensor) -> bool:
        """Whether `value` shares memory with an activation of this step."""
        return memory_of(value) in self.live_storages

    @property
    def stepping(self) -> bool:
        """Whether a forward with traces is under way."""
        return self._stepping

    # Called by bodies.

    def watch(self, body: str, key: Key, watcher: Watcher) -> None:
        """Call `watcher` at every later visit of the body's request to `key`, after all edits there."""
        self.peers.note(body, f"a cache of {point_name(key)}")
        self.prepare(key)
        self.watchers.setdefault(key, []).append((body, watcher))

    def override(self, body: str, key: Key, value: Any) -> None:
        """Replace the request's part of `key` by `value` when the forward reaches it in this step."""
        self.peers.note(body, f"a skip to {point_name(key)}")
        self.prepare(key)
        self.overrides.setdefault(key, []).append((body, value))

    def apart(self, body: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on a value of a body. The points that the call passes are not reported."""
        self.muted = True
        try:
            with self.calling(body, (args, kwargs)):
                return function(*args, **kwargs)
        finally:
            self.muted = False

    def arrive(self, barrier: Any, body: str) -> None:
        """The body is at a barrier. The last of `barrier.parties` bodies releases the others, and closes the barrier again."""
        waiting = self.at_barrier.setdefault(barrier, [])
        if len(waiting) + 1 < barrier.parties:
            waiting.append(body)
        else:
            self.freed += self.at_barrier.pop(barrier)

    def is_held(self, barrier: object, body: str) -> bool:
        """Whether the body has to keep waiting at a barrier."""
        return body in self.at_barrier.get(barrier, ())

    def attribute(self, path: str, module: Any, name: str) -> Any:
        """An attribute of the module at `path`. Raises AttributeError."""
        return getattr(module, name)

    def attach(self, path: str, name: str, module: nn.Module) -> None:
        """Add a module of the caller's to the module at `path`. Raises TraceError in a trace, or if the name is taken."""
        parent = self.modules[path]
        if self.stepping:
            raise TraceError(
                f"{name}: attach modules before the trace. On vLLM use the module as a variable of the trace."
            )
        if hasattr(parent, name) and name not in self.attached.get(path, ()):
            raise TraceError(f"{path} has a {name} already; attach the module under another name.")
        parent.add_module(name, module)
        self.attached.setdefault(path, set()).add(name)
        self.modules = dict(self.modules[""].named_modules())
        self.source = SourceHooks(self.modules, self.fire)
        self.stage = Stage(self.modules[""])

    # Hooks.

    @property
    def hook_count(self) -> int:
        """How many hooks are on the model."""
        return len(self._handles)

    def prepare(self, key: Key) -> None:
        """Make the forward report when it reaches `key`."""
        if not key[0] and key[1] not in ("input", "output"):
            return
        if self.reachable is not None and key not in self.reachable:
            raise TraceError(
                f"{point_name(key)} is not built into the compiled forward, and this trace was taken for one that needs no other "
                "sites. This is a fault in midstream; please report the trace."
            )
        if len(key) == 4:
            self.source.install(key[0])
        elif key not in self._handles:
            module = self.modules[key[0]]
            if key[1] == "input":
                self._handles[key] = hooks.before(module, lambda args, kwargs: self.fire(key, (args, kwargs)))
            else:
                self._handles[key] = hooks.after(module, lambda output: self.fire(key, output))

    def _watch_containers(self) -> None:
        """Hook all modules that have children. PyTorch looks for hooks when it calls a module, so a module without any would miss a hook
        that is added while it runs.
        """
        for path, module in self.modules.items():
            if hooks.skips_hooks(module):
                self._handles[(path, "input")] = self._handles[(path, "output")] = self._wrap(path, module)
            elif next(module.children(), None) is not None:
                self._handles[(path, "called")] = hooks.before(module, lambda *_: None)

    def _wrap(self, path: str, module: nn.Module) -> hooks.Handle:
        return hooks.around(
            module,
            lambda args, kwargs: self.fire((path, "input"), (args, kwargs)),
            lambda output: self.fire((path, "output"), output),
        )

    def _remove_hooks(self) -> None:
        self.source.remove()
        for handle in dict.fromkeys(self._handles.values()):
            handle.remove()
        self._handles.clear()


# `.source`

_DISPATCH, _ASSIGNED = "__midstream_call__", "__midstream_assigned__"
# Builtins that read the caller's frame, so that the forward itself has to call them.
_READ_THE_FRAME = ("locals", "globals", "vars", "dir", "eval", "exec")


@dataclass(frozen=True)
class ForwardSource:
    """A forward's text, and the code that reports its calls and assignments.

    Attributes:
        names: of the calls and assignments, as in nnsight 0.8.1, in the order in which they run.
        lines: of the calls and assignments, counted from the first line of `text`.
        called: name of a call -> the expression that it calls.
        scope: the variables from outside of the forward that its code may use.
    """

    text: str
    names: tuple[str, ...]
    lines: tuple[int, ...]
    code: CodeType
    called: Mapping[str, str]
    scope: Mapping[str, Any]

    def attribute(self, name: str) -> str:
        """The module's attribute that a call calls: `mlp.down_proj` for `self.mlp.down_proj(x)`; empty for other calls."""
        owner, _, attribute = self.called.get(name, "").partition(".")
        return attribute if owner == "self" and attribute.replace(".", "").isidentifier() else ""

    def is_assignment(self, name: str) -> bool:
        """Whether the name is an assignment's."""
        return name in self.names and name not in self.called

    def calls_of(self, name: str) -> list[str]:
        """The calls whose names differ only in the number."""
        stem = name.rpartition("_")[0]
        return [each for each in self.called if each.rpartition("_")[0] == stem]

    def within(self, name: str) -> ForwardSource | None:
        """The source of the function that a call calls, if it is a global; else None: it is known only during a forward."""
        called: Any = self.scope.get((parts := self.called.get(name, "").split("."))[0])
        for attribute in parts[1:]:
            called = getattr(called, attribute, None)
        try:
            return forward_source(called)
        except (SourceUnavailableError, AttributeError, TypeError):
            return None

    def __str__(self) -> str:
        marks: dict[int, list[str]] = {}
        for name, number in zip(self.names, self.lines, strict=True):
            marks.setdefault(number, []).append(name)
        notes = {number: ", ".join(names) for number, names in marks.items()}
        width = max(map(len, notes.values()), default=0)
        lines = enumerate(self.text.splitlines(), start=1)
        return "\n".join(f"{notes.get(number, ''):>{width}} | {text}" for number, text in lines)


class _Dispatch(ast.NodeTransformer):
    """Rewrites a forward so that it reports its calls and assignments.

    `f(x)` becomes `__midstream_call__("f_0", f, x)`, and `h = x` becomes `h = __midstream_call__("h_0", __midstream_assigned__, x)`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.found: list[tuple[str, int]] = []
        self.called: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
                return node
            case ast.Call(func=ast.Name(id=name)) if name in _READ_THE_FRAME:
                return self.generic_visit(node)
        called = ast.unparse(node.func)
        self.generic_visit(node)
        name = self._name("_".join(filter(None, _parts(node.func))) or "call", node.lineno)
        self.called[name] = called
        return _dispatched(name, node.func, node.args, node.keywords, node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)  # the value is computed before the targets
        node.targets = [self.visit(target) for target in node.targets]
        if len(node.targets) == 1:
            node.value = self._assigned(node.targets[0], node.value, node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self._assigned(node.target, self.visit(node.value), node)
        return node

    def _assigned(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> ast.expr:
        """The value, reported under the target's name. `a, b = x, y` is two assignments; `a, b = f(x)` has no name."""
        match target, value:
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))):
                if len(targets) == len(values) and not any(isinstance(each, ast.Starred) for each in targets + values):
                    value.elts = [self._assigned(*pair, statement) for pair in zip(targets, values, strict=True)]
                return value
        parts = _parts(target)
        if not parts[0]:
            return value
        name = self._name("_".join(parts), statement.lineno)
        return _dispatched(name, ast.Name(_ASSIGNED, ast.Load()), [value], [], statement)

    def _name(self, stem: str, line: int) -> str:
        name = f"{stem}_{self.counts[stem]}"
        self.counts[stem] += 1
        self.found.append((name, line))
        return name


def _dispatched(
    name: str, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword], place: ast.AST
) -> ast.Call:
    call = ast.Call(ast.Name(_DISPATCH, ast.Load()), [ast.Constant(name), function, *args], keywords)
    return ast.copy_location(call, place)


def _parts(expression: ast.expr) -> list[str]:
    """The names in an expression: `self`, `up` for `self.up` and `self.up[0]`. The first is empty if the expression does not begin with a
    variable: "", `split` for `self.up(x).split`.
    """
    match expression:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_parts(value), name]
        case ast.Subscript(value=value):
            return _parts(value)
    return [""]


@functools.cache
def forward_source(forward: FunctionType) -> ForwardSource:
    """Read and rewrite a forward, without its decorators. Raises SourceUnavailableError if it has no Python source."""
    while (variable := _decorated(forward)) is not None:
        forward = closure_of(forward)[variable]
    text, function = _definition(forward)
    function.decorator_list = []
    dispatch = _Dispatch()
    function.body = [dispatch.visit(statement) for statement in function.body]
    free = [*forward.__code__.co_freevars, _DISPATCH, _ASSIGNED]
    code = compiled(ast.fix_missing_locations(function), free, forward.__code__)
    names, lines = zip(*dispatch.found, strict=True) if dispatch.found else ((), ())
    return ForwardSource(text, names, lines, code, dispatch.called, ChainMap(closure_of(forward), forward.__globals__))


def _definition(function: FunctionType) -> tuple[str, ast.FunctionDef]:
    """The text of a function, and its syntax tree. Raises SourceUnavailableError."""
    try:
        text = textwrap.dedent(inspect.getsource(function.__code__))
        with without_collections():
            (definition,) = ast.parse(text).body
        if isinstance(definition, ast.FunctionDef):
            return text, definition
    except (OSError, TypeError, AttributeError, SyntaxError, ValueError):
        pass
    raise SourceUnavailableError(f"{function!r} has no Python source; use the module's .input and .output.")


def _decorated(wrapper: Any) -> str | None:
    """The closure variable that holds the function which a decorator's wrapper calls.

    None if the wrapper calls no closure variable, or several. The wrapper itself is then rewritten, and its own calls are reported.
    """
    if not isinstance(wrapper, FunctionType) or not wrapper.__closure__:
        return None
    try:
        _, definition = _definition(wrapper)
    except SourceUnavailableError:
        return None
    called = {
        node.func.id for node in ast.walk(definition) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    held = [name for name, value in closure_of(wrapper).items() if name in called and isinstance(value, FunctionType)]
    return held[0] if len(held) == 1 and closure_of(wrapper)[held[0]] is not wrapper else None


def _rewritten(function: FunctionType, source: ForwardSource, caller: Callable[..., Any]) -> FunctionType:
    """The function with its decorators, and with `caller` making the calls in its source."""
    if (name := _decorated(function)) is not None:
        return made_again(function, function.__code__, {name: _rewritten(closure_of(function)[name], source, caller)})
    return made_again(function, source.code, {_DISPATCH: caller, _ASSIGNED: _assigned})


def _assigned(value: Any) -> Any:
    return value


class SourceHooks:
    """Replaces forwards by rewritten ones while a trace is alive. `fire` receives each call's point and value."""

    def __init__(self, modules: Mapping[str, nn.Module], fire: Callable[[Any, Any], Any]) -> None:
        self._modules = modules
        self._paths = {module: path for path, module in modules.items()}
        self._fire = fire
        self._handles: dict[str, hooks.Handle] = {}
        # Calls of functions whose own calls are reported.
        self._opened: dict[tuple[str, str], ForwardSource | None] = {}

    def of(self, path: str) -> ForwardSource:
        return forward_source(type(self._modules[path]).forward)  # type: ignore[arg-type]

    def module_point(self, key: Key) -> Key:
        """The module's own point if `key` is the call of a module, since both have the same value; else `key`."""
        if len(key) != 4:
            return key
        path, _, name, kind = key
        called: Any = self._modules[path]
        for attribute in self.of(path).attribute(name).split("."):
            called = getattr(called, attribute, None)
        return (self._paths[called], kind) if isinstance(called, nn.Module) and called in self._paths else key

    def install(self, path: str) -> None:
        """Replace the forward of the module at `path`."""
        if path in self._handles:
            return
        module = self._modules[path]
        made = _rewritten(type(module).forward, self.of(path), self._caller(path))  # type: ignore[arg-type]
        self._handles[path] = hooks.replace_forward(module, made.__get__(module))

    def _caller(self, path: str, within: str = "") -> Callable[..., Any]:
        """The function that rewritten code calls in place of others. `within` is the prefix of the calls' names."""

        def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = within + name
            args, kwargs = self._fire((path, "source", name, "input"), (args, kwargs))
            if (path, name) in self._opened:
                function = self._reporting(path, name, function)
            return self._fire((path, "source", name, "output"), function(*args, **kwargs))

        return call

    def open(self, path: str, name: str) -> None:
        """Also report the calls in the function that this call calls, as `name.inner`."""
        self._opened.setdefault((path, name), None)

    def calls_in(self, path: str, name: str) -> tuple[str, ...]:
        """The names of the calls in a function that was opened and has been called."""
        source = self._opened.get((path, name))
        return source.names if source is not None else ()

    def _reporting(self, path: str, name: str, function: Any) -> Any:
        """The function, rewritten to report its calls; unchanged if it is not a Python function with source."""
        plain = getattr(function, "__func__", function)
        try:
            source = forward_source(plain)
        except (SourceUnavailableError, AttributeError, TypeError):
            return function
        self._opened[path, name] = source
        made = _rewritten(plain, source, self._caller(path, f"{name}."))
        return made.__get__(function.__self__) if hasattr(function, "__func__") else made

    def remove(self) -> None:
        """Restore the modules' own forwards."""
        self._opened.clear()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
