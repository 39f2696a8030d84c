"""The user's frame: which with statement it is entering, how to skip the body, and how to bind names in the frame.

The source comes from linecache, which has files, IPython cells and doctests. The with statement is found by the exact position of the
instruction that computed the context manager. This works for several statements on one line, nested ones, and multi-line headers.
"""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

from midstream.errors import SourceUnavailableError, TraceError

Position = tuple[
    int, int | None
]  # line, and column in UTF-8 bytes; the column is None under `python -X no_debug_ranges`


@dataclass(frozen=True, eq=False)
class Site:
    """A with statement that a frame is entering.

    Attributes:
        target: what follows `as`.
        body: of the entered item. Later items of the same statement are a nested with statement in it.
        class_name: of the class around the statement, in which a name like `__x` means `_Class__x`.
        lines: of the statement.
    """

    filename: str
    node: ast.With
    target: ast.expr | None
    body: list[ast.stmt]
    class_name: str | None
    lines: tuple[str, ...]


_SITES: dict[tuple[str, CodeType, int], Site] = {}  # so that a file may be edited after its statements were found


def locate(frame: FrameType) -> Site:
    """The with statement whose `__enter__` the frame is calling."""
    key = (frame.f_code.co_filename, frame.f_code, frame.f_lasti)
    if key not in _SITES:
        if len(_SITES) > 4096:
            _SITES.clear()
        _SITES[key] = _find(frame)
    return _SITES[key]


def _find(frame: FrameType) -> Site:
    filename = frame.f_code.co_filename
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, frame.f_globals)
    if not lines:
        raise SourceUnavailableError(
            f"No source for {filename!r}, and a with-block is run from its source. Put the code in a file or a "
            "notebook cell, or use `model.run(fn, prompt)`, which takes a function and needs no source."
        )
    line, _ = position = _entered(frame.f_code, frame.f_lasti, filename)
    found = [
        (node, index, class_name)
        for node, class_name in _withs(_parse(filename, "".join(lines)))
        for index, item in enumerate(node.items)
        if _covers(item.context_expr, position)
    ]
    if len(found) != 1:
        reason = "the file was edited after it was loaded; load it again" if not found else "write one `with` per line"
        raise SourceUnavailableError(f"{filename}:{line}: the with statement is not found there: {reason}.")
    ((node, index, class_name),) = found
    body, rest = node.body, node.items[index + 1 :]
    if rest:
        body = [ast.copy_location(ast.With(items=rest, body=body), node)]
    return Site(
        filename,
        node,
        node.items[index].optional_vars,
        body,
        class_name,
        tuple(lines[node.lineno - 1 : node.end_lineno]),
    )


@functools.lru_cache(maxsize=64)
def _parse(filename: str, text: str) -> ast.Module:
    try:
        return ast.parse(text, filename)
    except SyntaxError as error:
        raise SourceUnavailableError(f"The source of {filename!r} cannot be parsed: {error}") from error


def _entered(code: CodeType, lasti: int, filename: str) -> Position:
    """The position of the context expression that is being entered: that of the instruction before BEFORE_WITH."""
    before: Position | None = None
    for instruction in dis.get_instructions(code):
        if instruction.offset == lasti and instruction.opname == "BEFORE_WITH" and before is not None:
            return before
        if instruction.positions is not None and instruction.positions.lineno is not None:
            before = (instruction.positions.lineno, instruction.positions.col_offset)
    raise TraceError(f"{filename}: a trace is entered by a `with` statement, not by a call of `__enter__`")


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


# Skipping the body.


class SkipBlock(BaseException):
    """Raised at the start of a body that must not run in place. `skipped(exc)` recognises it in `__exit__`."""

    def __init__(self, skip: _Skip) -> None:
        super().__init__("the body of a trace runs in the engine")
        self.skip = skip


def skip(frame: FrameType) -> None:
    """Leave the with statement that the frame is entering before its body begins.

    To be called last in `__enter__`. `__exit__` has to call `skipped(exc)` first, which binds the target of `as` and restores the former
    tracing function (of coverage or a debugger): Python drops a tracing function that raises.
    """
    _Skip(frame, getattr(locate(frame).target, "id", None)).begin()


def skipped(exc: BaseException | None) -> bool:
    """Whether the block ended because it was skipped; if so, clean up after `skip`."""
    if not isinstance(exc, SkipBlock):
        return False
    exc.skip.end()
    return True


class _Skip:
    """A tracing function for the few instructions between `__enter__` and the body.

    It raises at the instruction that takes the value of `__enter__` off the stack. The body's first instruction would be too late: it may
    belong to a `try`.
    """

    def __init__(self, frame: FrameType, target: str | None) -> None:
        self.frame, self.target, self.names = frame, target, dict[str, Any]()
        self.previous: Any = sys.gettrace()
        self.local = (frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes)
        # Coverage's C tracer counts calls and returns. It has to be told of calls whose returns it will see.
        self.counts = type(self.previous).__name__ == "CTracer"

    def begin(self) -> None:
        for callee in self._callees():
            if callee.f_trace is None:
                callee.f_trace_lines = False
            callee.f_trace = functools.partial(self._returning, callee.f_trace)
        self.at = _taken_off(self.frame.f_code, self.frame.f_lasti)
        self.frame.f_trace_opcodes = True
        self.frame.f_trace = self._watch
        sys.settrace(self._calls)

    def end(self) -> None:
        push(self.frame, self.names)
        self.frame.f_trace, self.frame.f_trace_lines, self.frame.f_trace_opcodes = self.local
        if not self.counts:
            sys.settrace(self.previous)
        for callee in reversed(self._callees()) if self.counts else ():
            self.previous(callee, "call", None)  # it then installs itself again

    def _callees(self) -> list[FrameType]:
        """The frames between this method and the user's frame."""
        found, callee = list[FrameType](), sys._getframe(1)
        while callee is not self.frame and callee.f_back is not None:
            found.append(callee)
            callee = callee.f_back
        return found

    def _calls(self, frame: FrameType, event: str, arg: Any) -> None:
        """Do not trace what is called in between."""

    def _returning(self, local: Any, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return" and frame.f_back is self.frame and self.target:
            self.names[self.target] = arg
        following = local(frame, event, arg) if local is not None else None
        return functools.partial(self._returning, following)

    def _watch(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti == self.at:
            raise SkipBlock(self)
        return self._watch


@functools.lru_cache(maxsize=1024)
def _taken_off(code: CodeType, lasti: int) -> int:
    """The offset of the instruction that binds or drops what `__enter__` returned."""
    return next(
        i.offset
        for i in dis.get_instructions(code)
        if i.offset > lasti and (i.opname == "POP_TOP" or i.opname.startswith("STORE_"))
    )


# Binding names.


def own_names(frame: FrameType) -> frozenset[str]:
    """The names that can only be local to the frame, so that they are not looked up among its globals."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        return frozenset()
    return frozenset(code.co_varnames + code.co_cellvars + code.co_freevars)


def push(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Bind names in the frame, after its block."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:  # a module or a class body
        frame.f_locals.update(values)
        return
    own = own_names(frame)
    local = frame.f_locals
    local.update({name: value for name, value in values.items() if name in own})
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    frame.f_globals.update({name: value for name, value in values.items() if name not in own})  # `global` in the caller
