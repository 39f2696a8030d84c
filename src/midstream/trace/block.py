"""A with-block compiled to a function of its free variables, which can be sent to a worker.

    class Trace:
        def __enter__(self):
            frame = sys._getframe(1)
            self.block = capture(frame)
            skip(frame, self.block.target, self)    # last: this keeps the body from running in place
            return self

        def __exit__(self, kind, exc, traceback):
            if skipped(exc):
                run = cloudpickle.loads(cloudpickle.dumps(self.block)).function()
                push(sys._getframe(1), run({"__save__": save, self.block.target: self}))
            return exc is None or isinstance(exc, SkipBlock)

`rewrite.py` finds the source and compiles it. `link` lets the blocks of one trace read each other's names.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import dis
import functools
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from midstream.errors import SourceUnavailableError, TraceError
from midstream.trace.body import save
from midstream.trace.containers import Callers
from midstream.trace.rewrite import (
    GLOBAL_OPS,
    Compiled,
    codes_in,
    compile_body,
    compile_function,
    made_again,
    source_of,
)
from midstream.trace.saves import Unsaved, closure_of, is_installed, is_written_by_caller

_UNBOUND = object()
_NESTED = ".<locals>."  # in the qualified name of a function that is defined in another one
# `x += y` changes objects of these classes, and the name keeps its object.
_IN_PLACE = (torch.Tensor, np.ndarray, list, dict, set, deque)
Shared = MutableMapping[str, Any]  # "index.name" of the block that binds a name -> the name's cell
# Line, and column in UTF-8 bytes. The column is None under `python -X no_debug_ranges`.
Position = tuple[int, int | None]


@dataclass(eq=False)
class Block:
    """A with-block compiled to a function of its free variables.

    Pickled by value with cloudpickle. Blocks pickled together share the code of a statement.

    Attributes:
        captured: the values at entry of the names that the body may read before it binds them.
        module: `__name__` and `__package__`, for classes and imports in the body.
        callers: the caller's objects that the captured values lead to.
        index: its number among the siblings given to `link`.
        borrows: name -> index of the sibling that binds it.
        lends: names that siblings borrow.
    """

    compiled: Compiled
    captured: dict[str, Any]
    module: dict[str, Any] = field(default_factory=dict)
    callers: Callers = field(default_factory=lambda: Callers({}))
    index: int = 0
    borrows: dict[str, int] = field(default_factory=dict)
    lends: frozenset[str] = frozenset()

    @property
    def code(self) -> CodeType:
        return self.compiled.code

    @property
    def target(self) -> str | tuple[str, ...] | None:
        """The name after `as`, or the names of a tuple. They are never captured: `function` gets their values as an argument."""
        return self.compiled.target

    @property
    def assigned(self) -> frozenset[str]:
        """The names that the block binds outside of nested functions and classes."""
        return frozenset(name for name in self.code.co_freevars if not name.startswith("__"))

    @property
    def outside(self) -> dict[str, Any]:
        """The caller's values by name: the captured ones, and objects that these lead to."""
        return {**self.callers.named, **self.captured}

    def function(self) -> Callable[..., dict[str, Any]]:
        """f(extra, shared=None, wait=None), which runs the body and returns its names with their last values.

        Args of f:
            extra: values to inject: `__save__`, `__backward__`, the target, and any replacements of captured values.
            shared: an empty dict at first, the same one for linked siblings.
            wait: called while no sibling has bound a needed name. Returns False if no sibling can continue before this block does.
        """

        def run(
            extra: Mapping[str, Any], shared: Shared | None = None, wait: Callable[[], bool] = bool
        ) -> dict[str, Any]:
            values = {**self.captured, **extra}
            names = self.code.co_freevars
            cells = {name: CellType(values[name]) if name in values else CellType() for name in names}
            shared = {} if shared is None else shared
            shared.update({f"{self.index}.{name}": cells[name] for name in self.lends})
            known = _Borrowing(self.borrows, shared, wait) if self.borrows else vars(builtins)
            namespace = {**self.module, **values, "__builtins__": known}
            FunctionType(self.code, namespace, self.code.co_name, None, tuple(cells.values()))()
            return {name: value for name in self.assigned if (value := _content(cells[name])) is not _UNBOUND}

        return run


class _Borrowing(dict[str, Any]):
    """The builtins of a linked block. Python looks names up here last, so it finds siblings' names in any nested code."""

    def __init__(self, borrows: Mapping[str, int], shared: Shared, wait: Callable[[], bool]) -> None:
        super().__init__({name: value for name, value in vars(builtins).items() if name not in borrows})
        self.borrows, self.shared, self.wait = borrows, shared, wait

    def __missing__(self, name: str) -> Any:
        if name not in self.borrows:
            raise KeyError(name)
        value = self._lent(name)
        while value is _UNBOUND and self.wait():
            value = self._lent(name)
        if value is _UNBOUND:
            raise NameError(
                f"name {name!r} is bound by another invoke of this trace, which has not reached that line. Make the "
                "two meet: `barrier = tracer.barrier(2)` before them, then `barrier()` in one after it binds the name "
                "and in the other before it reads it.",
                name=name,
            )
        return value

    def _lent(self, name: str) -> Any:
        cell = self.shared.get(f"{self.borrows[name]}.{name}")
        return _UNBOUND if cell is None else _content(cell)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND


def link(blocks: Sequence[Block]) -> bool:
    """Let sibling blocks read each other's names. Returns whether they share any.

    A block borrows each name that it reads without having a value for it. The lender is the nearest earlier sibling that binds the name,
    else the nearest later one.
    """
    lent: dict[int, set[str]] = {}
    for index, block in enumerate(blocks):
        block.index, block.borrows = index, {}
        others = [*range(index - 1, -1, -1), *range(index + 1, len(blocks))]
        for name in block.compiled.reads:
            if not isinstance(block.captured.get(name, Unsaved(name)), Unsaved):
                continue
            source = next((other for other in others if name in blocks[other].assigned), None)
            if source is not None:
                block.captured.pop(name, None)
                block.borrows[name] = source
                lent.setdefault(source, set()).add(name)
    for index, block in enumerate(blocks):
        block.lends = frozenset(lent.get(index, ()))
    return bool(lent)


def locals_at(error: BaseException, code: CodeType | None) -> dict[str, Any]:
    """The names that `code` had bound when it raised `error`; empty if other code raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return {name: value for name, value in traceback.tb_frame.f_locals.items() if not name.startswith("__")}
        traceback = traceback.tb_next
    return {}


# Taking the block of a frame.


def capture(frame: FrameType) -> Block:
    """The block of the with statement that the frame is entering. Call this in its `__enter__`."""
    filename = frame.f_code.co_filename
    linecache.lazycache(filename, frame.f_globals)
    compiled = _compiled(filename, frame.f_code, frame.f_lasti)
    local, own = frame.f_locals, _own_names(frame)
    captured = {}
    for name in sorted(compiled.reads | compiled.read_first):
        if name in local:
            captured[name] = local[name]
        elif name not in own and name in frame.f_globals:
            captured[name] = frame.f_globals[name]
        if name in compiled.read_first and isinstance(captured.get(name), Unsaved):
            del captured[name]  # as if the name had never been set
        elif type(captured.get(name)) is FunctionType:
            captured[name] = with_saves(captured[name])
    module: dict[str, Any] = {
        name: frame.f_globals[name] for name in ("__name__", "__package__") if name in frame.f_globals
    }
    block = Block(compiled, captured, module, Callers(captured))
    _check_variables(frame, own, block.callers.objects, compiled.reads | compiled.read_first, block.assigned)
    return block


def with_saves(function: FunctionType) -> FunctionType:
    """The function, changed so that `x.save()` in it means `save(x)`, as in a block. Unchanged if it has no such call, or no source."""
    if "save" not in function.__code__.co_names or is_installed(function.__code__.co_filename):
        return function
    code = compile_function(function.__code__)
    return function if code is None else made_again(function, code, {"__save__": save})


@functools.lru_cache(maxsize=4096)  # a file may be edited after its statements were found
def _compiled(filename: str, code: CodeType, lasti: int) -> Compiled:
    """The body of the with statement that the instruction at `lasti` enters.

    The statement is found by the exact position of the instruction that computed the context manager. This works for several statements
    on one line, nested ones, and multi-line headers.
    """
    linecache.checkcache(filename)
    tree = source_of(code)
    if dis.opname[code.co_code[lasti]] != "BEFORE_WITH":
        raise TraceError(f"{filename}: a trace is entered by a `with` statement, not by a call of `__enter__`")
    before = reversed([*code.co_positions()][: lasti // 2])
    position = next((line, column) for line, _, column, _ in before if line is not None)
    found = [
        (node, index, class_name)
        for node, class_name in _withs(tree)
        for index, item in enumerate(node.items)
        if _covers(item.context_expr, position)
    ]
    if len(found) != 1:
        reason = "the file was edited after it was loaded; load it again" if not found else "write one `with` per line"
        raise SourceUnavailableError(f"{filename}:{position[0]}: the with statement is not found there: {reason}.")
    return compile_body(*found[0], code)


def _covers(node: ast.expr, position: Position) -> bool:
    line, column = position
    if column is None:
        return node.lineno <= line <= (node.end_lineno or line)
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno or line, node.end_col_offset or column)


def _withs(tree: ast.AST, class_name: str | None = None) -> Iterator[tuple[ast.With, str | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.With):
            yield node, class_name
        yield from _withs(node, node.name if isinstance(node, ast.ClassDef) else class_name)


# Variables that a block shares with functions from outside. A block has variables of its own, which begin with the caller's values. So the
# function does not see what the block binds, and the block does not see what the function binds:
#
#     def scaled(h): return h * scale     # reads the caller's `scale`
#
#     with model.trace(prompt):
#         scale = 2                       # binds the block's
#         h = scaled(model.layers_output[3]).save()


def _check_variables(
    frame: FrameType, own: frozenset[str], objects: Iterable[Any], read: frozenset[str], bound: frozenset[str]
) -> None:
    """Raise TraceError if a function binds a variable of the frame that a block uses, or reads one that the block binds.

    Args:
        own: the names that are local to the frame.
        objects: the caller's, which the block can reach.
        read, bound: the names that the block reads, and binds.
    """
    for function in _functions(objects):
        reads, binds, changes = _used_from_outside(function.__code__)
        for name in sorted((reads & bound) | ((binds | changes) & (read | bound))):
            if not _is_of_frame(name, function, frame, own):
                continue
            if name not in bound | binds and isinstance(_value_of(name, frame), _IN_PLACE):
                continue
            what, its = f"{function.__qualname__}, which the trace can call,", function.__name__
            if name in binds | changes:
                raise TraceError(
                    f"{what} binds {name!r}, and the trace uses {name!r}, too. A trace has variables of its own, and does not see what "
                    f"other code binds: let {its} return the value, or keep it in a list, a dict or an attribute."
                )
            raise TraceError(
                f"{what} reads {name!r}, and the trace binds {name!r}. A trace has variables of its own, so {its} would see the value "
                f"from before the trace: give {its} the value as an argument, or take another name in the trace."
            )


def _functions(objects: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among the objects, and the methods of the caller's classes: those among the objects, and those of the objects."""
    seen = set[type]()
    for value in objects:
        if type(value) is FunctionType:
            yield value
        for kind in value.__mro__ if issubclass(type(value), type) else type(value).__mro__:
            if kind in seen:
                continue
            seen.add(kind)
            for member in vars(kind).values() if is_written_by_caller(kind) else ():
                parts = (member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "func")))
                yield from (each for each in parts if type(each) is FunctionType)


@functools.lru_cache(maxsize=4096)
def _used_from_outside(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names of globals and of outer functions' variables that the code and the functions in it read, those that they bind, and those
    that they change by `+=` and its kind.
    """
    read, bound, changed = set[str](), set[str](), set[str]()
    for part in codes_in(code):
        before = ""
        for each in dis.get_instructions(part):
            if each.opname in GLOBAL_OPS or ("DEREF" in each.opname and each.argval in code.co_freevars):
                is_changed = before.endswith("=") and each.opname.startswith("STORE_")
                (read if each.opname.startswith("LOAD_") else changed if is_changed else bound).add(each.argval)
            before = each.argrepr if each.opname == "BINARY_OP" else ""
    return frozenset(read), frozenset(bound), frozenset(changed)


def _is_of_frame(name: str, function: FunctionType, frame: FrameType, own: frozenset[str]) -> bool:
    """Whether a function's variable from outside is the frame's variable of that name. Modules do not count."""
    code = function.__code__
    here = _value_of(name, frame)
    if type(here) is ModuleType:
        return False
    if name in code.co_freevars:
        is_same = here is closure_of(function).get(name, _UNBOUND)
        return name in own and is_same and _is_beside(name, code, frame.f_code)
    return name not in own and function.__globals__.get("__name__") == frame.f_globals.get("__name__")


def _value_of(name: str, frame: FrameType) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name, _UNBOUND))


def _is_beside(name: str, code: CodeType, of_frame: CodeType) -> bool:
    """Whether the variable that `code` takes from a function around it belongs to the frame, or to a function around both of them."""
    for around in codes_in(of_frame):
        inner = [each for each in around.co_consts if isinstance(each, CodeType)]
        if any(each.co_qualname == code.co_qualname and each.co_firstlineno == code.co_firstlineno for each in inner):
            return around is of_frame or name in around.co_freevars
    outermost = of_frame.co_qualname.split(_NESTED)[0]
    is_near = code.co_filename == of_frame.co_filename and code.co_qualname.startswith(outermost + _NESTED)
    return is_near and name in of_frame.co_freevars


# Skipping the body.


class SkipBlock(BaseException):
    """Raised at the start of a body that must not run in place. `skipped(exc)` recognises it in `__exit__`."""

    def __init__(self, restore: Callable[[], None]) -> None:
        super().__init__("the body of a trace runs in the engine")
        self.restore = restore


def skip(frame: FrameType, target: str | tuple[str, ...] | None, value: Any) -> None:
    """Leave the with statement that the frame is entering before its body begins, with `value` bound to its target.

    `value` is a tuple if the target is one.

    Call this last in `__enter__`. `__exit__` has to call `skipped(exc)` first, which restores the former tracing function (of coverage or a
    debugger): Python drops a tracing function that raises.
    """
    if target is not None:
        push(frame, {target: value} if isinstance(target, str) else dict(zip(target, value, strict=True)))
    # Raise at the next instruction, which takes the value of `__enter__` off the stack. The body's first instruction would be too late: it
    # may belong to a `try`.
    previous: Any = sys.gettrace()
    own = (frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes)

    def watch(at: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            raise SkipBlock(restore)
        return watch

    def restore() -> None:
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = own
        if type(previous).__name__ != "CTracer":
            sys.settrace(previous)
            return
        # Coverage's C tracer counts calls and returns. Report the calls whose returns it will see; it then installs itself again.
        callee, entered = sys._getframe(0), list[FrameType]()
        while callee is not frame and callee.f_back is not None:
            entered.append(callee)
            callee = callee.f_back
        for callee in reversed(entered):
            previous(callee, "call", None)

    frame.f_trace_opcodes = True
    frame.f_trace = watch
    sys.settrace(lambda *_: None)  # functions called in between are not traced


def skipped(exc: BaseException | None) -> bool:
    """Whether the block ended because it was skipped; if so, clean up after `skip`."""
    if not isinstance(exc, SkipBlock):
        return False
    exc.restore()
    return True


# Binding names in the frame.


def _own_names(frame: FrameType) -> frozenset[str]:
    """The names that are always local to the frame, and so never looked up among its globals."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:  # a module or a class body
        return frozenset()
    return frozenset(code.co_varnames + code.co_cellvars + code.co_freevars)


def push(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Bind names in the frame."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.update(values)
        return
    own = _own_names(frame)
    local = frame.f_locals
    local.update({name: value for name, value in values.items() if name in own})
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    frame.f_globals.update({name: value for name, value in values.items() if name not in own})  # `global` in the caller


# Tensors that traces have bound, by id.
_brought: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def in_place_of(names: Iterable[str], values: Mapping[str, Any], frame: FrameType) -> dict[str, Unsaved]:
    """Placeholders for the `names` that a trace has set and `values` lacks, to bind in the caller's frame.

    A name that has a value of the caller's keeps it.
    """
    new = [name for name in names if name not in values and _is_free(name, frame)]
    _brought.update({id(value): value for value in values.values() if isinstance(value, torch.Tensor)})
    return {name: Unsaved(name) for name in new}


def _is_free(name: str, frame: FrameType) -> bool:
    """Whether a name has no value in the frame, or only one that an earlier trace bound."""
    if name in frame.f_locals:
        value = frame.f_locals[name]
    elif name in _own_names(frame):
        return True
    elif name in frame.f_globals:
        value = frame.f_globals[name]
    else:
        return not hasattr(builtins, name)
    return isinstance(value, Unsaved) or (isinstance(value, torch.Tensor) and _brought.get(id(value)) is value)
