"""One model's forward pass as its traces see it: where it is, and the hooks by which it reports that.

Hooks are on the model only while a trace is alive, and only at the points that a trace has asked for.
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

import torch
from torch import nn

from midstream import hooks
from midstream.arch.aliases import Aliases
from midstream.errors import SourceUnavailableError, TraceError
from midstream.sites import Key, point_name
from midstream.trace.remote import ALONE, Peers, Stage
from midstream.trace.tree import memory_of
from midstream.trace.visit import Visit

Order = Mapping[tuple[str, str], tuple[int, int]]
Watcher = Callable[[Visit], None]
STEP_START: Key = ("", "step")
LAST_POINTS: dict[Key, int] = {("", "logits"): 1 << 60, ("", "samples"): (1 << 60) + 1}  # -> moment
_NEVER_PASSED = 1 << 61


class Forward:
    """Where a model's forward pass is.

    Args:
        root: the model whose modules are traced.
        order: from `Architecture.order`: the moments of the forward at which each module is called and returns.
        stage: this process's stage of the pipeline.
        peers: the tensor-parallel ranks that share each layer with this one.
        aliases: the user's other names of modules.

    Attributes:
        modules: path -> module.
        muted: whether modules run for something else than the step.
        reachable: the points that the step's forward passes; None for all.
        watchers: callbacks at points, with the names of their bodies.
        overrides: values to put at points in this step, with the names of their bodies.
        at_barrier: the names of the bodies that wait at each barrier.
        freed: the names of those that a barrier has let go on.
        attached: path -> names of the caller's modules there.
        live_storages: the memory of the tensors that traces on transformers have got in this step.
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
        self.live_storages: set[int | None] = set()
        self._position = -1
        self._point: Key = STEP_START
        self._firing: Key | None = None
        self._stepping = False
        self._handles: dict[Key, hooks.Handle] = {}

    def fire(self, key: Key, tree: Any, direct: bool = False) -> Any:
        """The forward is at `key` with value `tree`. Returns the value to go on with."""
        raise NotImplementedError

    # Where it is.

    def ordinal(self, key: Key) -> tuple[int, int]:
        """The first and the last moment of the forward at which it is at `key`."""
        if key in LAST_POINTS:
            return LAST_POINTS[key], LAST_POINTS[key]
        return self.order.get(key[:2] if len(key) == 2 else (key[0], "input"), (-1, _NEVER_PASSED))

    def has_passed(self, key: Key) -> bool:
        """Whether the forward can no longer get to `key` in this step."""
        if not self._stepping:
            return True
        return key != self._firing and len(key) != 4 and self.ordinal(key)[1] <= self._position

    def where(self, step: int) -> str:
        """Where the forward is, for messages."""
        return f"{point_name(self._point)} of step {step}" if self._point != STEP_START else f"the start of step {step}"

    def is_live(self, value: torch.Tensor) -> bool:
        """Whether `value` shares memory with an activation of this step."""
        return memory_of(value) in self.live_storages

    @property
    def stepping(self) -> bool:
        """Whether a forward with traces is under way."""
        return self._stepping

    # Called by bodies.

    def watch(self, body: str, key: Key, watcher: Watcher) -> None:
        """Call `watcher` with every later visit of the body's request to `key`, after all edits there."""
        self.peers.note(body, f"a cache of {point_name(key)}")
        self.prepare(key)
        self.watchers.setdefault(key, []).append((body, watcher))

    def override(self, body: str, key: Key, value: Any) -> None:
        """Replace the request's part of `key` by `value` when the forward gets there in this step."""
        self.peers.note(body, f"a skip to {point_name(key)}")
        self.prepare(key)
        self.overrides.setdefault(key, []).append((body, value))

    def apart(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on a value that is not the forward's. The points that it passes do not count."""
        self.muted = True
        try:
            return function(*args, **kwargs)
        finally:
            self.muted = False

    def arrive(self, barrier: Any, body: str) -> None:
        """The body is at a barrier. The last of `barrier.parties` frees the others; after that the barrier is closed again."""
        waiting = self.at_barrier.setdefault(barrier, [])
        if len(waiting) + 1 < barrier.parties:
            waiting.append(body)
        else:
            self.freed += self.at_barrier.pop(barrier)

    def is_held(self, barrier: object, body: str) -> bool:
        """Whether the body has to go on waiting at a barrier."""
        return body in self.at_barrier.get(barrier, ())

    def attribute(self, path: str, module: Any, name: str) -> Any:
        """An attribute of the module at `path`. Raises AttributeError."""
        return getattr(module, name)

    def attach(self, path: str, name: str, module: nn.Module) -> None:
        """Make a module of the caller's a child of the module at `path`. Raises TraceError in a trace, or for a name that is taken."""
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
        """Have the forward report when it gets to `key`."""
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
        """Hook all modules that have children. A module looks for hooks when it is called, so one without any would not see a hook that
        is added while it runs.
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

_DISPATCH = "__midstream_call__"


@dataclass(frozen=True)
class ForwardSource:
    """A forward's text and the code that reports its calls.

    Attributes:
        names: of the calls.
        lines: of the calls, counted from the first line of `text`.
        called: name of a call -> what it calls, as the code says it.
        scope: the globals that the code uses.
    """

    text: str
    names: tuple[str, ...]
    lines: tuple[int, ...]
    code: CodeType
    called: Mapping[str, str]
    scope: Mapping[str, Any]

    def attribute(self, name: str) -> str:
        """The attribute of the module that a call calls: `mlp.down_proj` for `self.mlp.down_proj(x)`; "" if it calls none."""
        owner, _, attribute = self.called.get(name, "").partition(".")
        return attribute if owner == "self" and attribute.replace(".", "").isidentifier() else ""

    def within(self, name: str) -> ForwardSource | None:
        """The source of the function that a call calls, if that can be told without a forward: it is a global."""
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
        rows = []
        for number, text in enumerate(self.text.splitlines(), start=1):
            here = ", ".join(marks.get(number, ()))
            rows.append(f"{here:>40} | {text}")
        return "\n".join(rows)


class _Dispatch(ast.NodeTransformer):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.calls: list[tuple[str, int]] = []
        self.called: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "isinstance", "getattr", "hasattr"):
            return self.generic_visit(node)
        called = ast.unparse(node.func)
        self.generic_visit(node)
        stem = _stem(node.func)
        name = f"{stem}_{self.counts[stem]}"
        self.counts[stem] += 1
        self.calls.append((name, node.lineno))
        self.called[name] = called
        dispatched = ast.Call(
            ast.Name(_DISPATCH, ast.Load()), [ast.Constant(name), node.func, *node.args], node.keywords
        )
        return ast.copy_location(dispatched, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _stem(called: ast.expr) -> str:
    """The name of a call without its number: `self_c_attn_0_split` for `self.c_attn(x).split(...)`. Calls in it have names already."""
    match called:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_stem(value)}_{name}"
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(inner)), *_]) if name == _DISPATCH:
            return inner
    words = "".join(c if c.isalnum() else " " for c in ast.unparse(called)).split()
    return "_".join(words) or "call"


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
    return ForwardSource(text, names, lines, module, dispatch.called, forward.__globals__)


def _in_factory(function: ast.FunctionDef, free: tuple[str, ...]) -> ast.FunctionDef:
    """`def factory(free...): def forward(...): ...; return forward`, so that closures keep working."""
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    returned = ast.Return(ast.Name(function.name, ast.Load()))
    return ast.FunctionDef("__factory__", arguments, [function, returned], [], None, None, type_params=[])  # type: ignore[call-arg]


def _rewritten(plain: Any, source: ForwardSource, caller: Callable[..., Any]) -> Any:
    """The function whose source this is, with its calls made by `caller`."""
    names = {**plain.__globals__, _DISPATCH: caller}
    exec(source.code, names)
    return names["__factory__"](*[cell.cell_contents for cell in plain.__closure__ or ()])


class SourceHooks:
    """Replaces forwards by rewritten ones while a trace is alive. `fire` gets each call's point and value."""

    def __init__(self, modules: Mapping[str, nn.Module], fire: Callable[[Any, Any], Any]) -> None:
        self._modules = modules
        self._paths = {module: path for path, module in modules.items()}
        self._fire = fire
        self._handles: dict[str, hooks.Handle] = {}
        self._opened: dict[
            tuple[str, str], ForwardSource | None
        ] = {}  # calls of functions whose own calls are reported

    def of(self, path: str) -> ForwardSource:
        return forward_source(type(self._modules[path]).forward)  # type: ignore[arg-type]

    def module_point(self, key: Key) -> Key:
        """If `key` is the call of a module, the module's own point, which has the same value; else `key`."""
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
        plain = inspect.unwrap(type(module).forward)
        made = _rewritten(plain, self.of(path), self._caller(path))
        self._handles[path] = hooks.replace_forward(module, made.__get__(module))

    def _caller(self, path: str, within: str = "") -> Callable[..., Any]:
        """What rewritten code calls in place of a function; `within` is the start of the calls' names."""

        def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = within + name
            args, kwargs = self._fire((path, "source", name, "input"), (args, kwargs))
            if (path, name) in self._opened:
                function = self._reporting(path, name, function)
            return self._fire((path, "source", name, "output"), function(*args, **kwargs))

        return call

    def open(self, path: str, name: str) -> None:
        """Report the calls within the function that this call calls, too, as `name.inner`."""
        self._opened.setdefault((path, name), None)

    def calls_in(self, path: str, name: str) -> tuple[str, ...]:
        """The names of the calls in a function that was opened and called."""
        source = self._opened.get((path, name))
        return source.names if source is not None else ()

    def _reporting(self, path: str, name: str, function: Any) -> Any:
        """The function, rewritten to report its calls; itself if it is not a Python function with source."""
        plain = inspect.unwrap(getattr(function, "__func__", function))
        try:
            source = forward_source(plain)
        except (SourceUnavailableError, AttributeError, TypeError):
            return function
        self._opened[path, name] = source
        made = _rewritten(plain, source, self._caller(path, f"{name}."))
        made.__defaults__, made.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
        return made.__get__(function.__self__) if hasattr(function, "__func__") else made

    def remove(self) -> None:
        """Put the modules' own forwards back."""
        self._opened.clear()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
