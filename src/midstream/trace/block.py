"""A with-block compiled to a function of its free variables, which can be sent to a worker.

    class Trace:
        def __enter__(self):
            frame = sys._getframe(1)
            self.block = capture(frame)
            skip(frame)                     # last: the body does not run in place
            return self

        def __exit__(self, kind, exc, traceback):
            if skipped(exc):
                run = cloudpickle.loads(cloudpickle.dumps(self.block)).function()
                push(sys._getframe(1), run({"__save__": save, self.block.target: self}))
            return exc is None or isinstance(exc, SkipBlock)

`rewrite.py` compiles the body. The function returns the names that the body has bound.
`link` lets the blocks of one trace read each other's names.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import dis
import functools
import linecache
import marshal
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from midstream.errors import SourceUnavailableError, TraceError
from midstream.trace.rewrite import Site, compile_site
from midstream.trace.saves import Unsaved, reached

Position = tuple[
    int, int | None
]  # line, and column in UTF-8 bytes; the column is None under `python -X no_debug_ranges`


_UNBOUND = object()
Shared = MutableMapping[str, Any]  # "index.name" of the block that binds a name -> the name's cell


@dataclass(frozen=True, eq=False)
class Compiled:
    """The code of a with statement's body. One object a statement, however often it is entered.

    Pickled by marshal, whose format depends on the minor version of Python.

    Attributes:
        target: the name after `as`.
        reads: names that the body reads and never binds.
        read_first: names that the body binds, but may read before that.
        lines: of the statement.
    """

    code: CodeType
    target: str | None
    reads: frozenset[str]
    read_first: frozenset[str]
    lines: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        version = tuple(sys.version_info[:2])
        return _load, (version, marshal.dumps(self.code), self.target, self.reads, self.read_first, self.lines)


def _load(version: tuple[int, int], code: bytes, *rest: Any) -> Compiled:
    here = sys.version_info[:2]
    if version != here:
        raise TraceError(
            f"The trace was compiled by Python {version[0]}.{version[1]} and this process runs {here[0]}.{here[1]}. "
            "Code travels as bytecode: run the client and the engine on the same minor version of Python."
        )
    return Compiled(marshal.loads(code), *rest)


@functools.lru_cache(maxsize=1024)
def _compiled(site: Site, frame_code: CodeType) -> Compiled:
    code, reads, fresh = compile_site(site, frame_code)
    target = _target(site)
    read_first = frozenset(code.co_freevars) - fresh
    return Compiled(code, target, reads - {target}, read_first - {target}, site.lines)


def _target(site: Site) -> str | None:
    name = getattr(site.target, "id", None)
    if site.target is not None and name is None:
        raise TraceError(f"{site.filename}:{site.node.lineno}: the target of a trace's `as` has to be a plain name")
    return name


@dataclass(eq=False)
class Block:
    """A with-block compiled to a function of its free variables.

    Pickled by value with cloudpickle. Blocks pickled together share the code of a statement. Unpickling raises TraceError under another
    minor version of Python.

    Attributes:
        captured: the values at entry of the names that the body may read before it binds them.
        module: `__name__` and `__package__`, for classes and imports in the body.
        reached: containers and objects that functions and objects among the captured values use.
        index: among the siblings given to `link`.
        borrows: name -> index of the sibling that binds it.
        lends: names that siblings borrow.
    """

    compiled: Compiled
    captured: dict[str, Any]
    module: dict[str, Any] = field(default_factory=dict)
    reached: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    borrows: dict[str, int] = field(default_factory=dict)
    lends: frozenset[str] = frozenset()

    @property
    def code(self) -> CodeType:
        return self.compiled.code

    @property
    def filename(self) -> str:
        return self.code.co_filename

    @property
    def firstlineno(self) -> int:
        return self.code.co_firstlineno

    @property
    def source_lines(self) -> tuple[str, ...]:
        """The lines of the with statement, from `firstlineno` on."""
        return self.compiled.lines

    @property
    def target(self) -> str | None:
        """The name after `as`. It is never captured: `function` gets its value as an argument."""
        return self.compiled.target

    @property
    def assigned(self) -> frozenset[str]:
        """The names that the block binds, other than in nested functions and classes."""
        return frozenset(name for name in self.code.co_freevars if not name.startswith("__"))

    @property
    def outside(self) -> dict[str, Any]:
        """The caller's values in it, by name: those captured, and those that captured functions and objects use."""
        return {**self.captured, **self.reached}

    def set_of(self, names: Mapping[str, Any], but: Collection[str]) -> list[str]:
        """Those of `names` that the block bound without capturing a former value, except those in `but`."""
        return [name for name in names if name not in but and name not in self.captured]

    def function(self) -> Callable[..., dict[str, Any]]:
        """f(extra, shared=None, wait=None), which runs the body and returns its names with their last values.

        Args of f:
            extra: values to inject: `__save__`, `__backward__`, the target, and anything that replaces a captured value.
            shared: an empty dict at first, the same one for linked siblings.
            wait: is called when a sibling has not bound a name yet. It returns False if no sibling can get further before this block.
        """
        _offer_source(self)

        def run(
            extra: Mapping[str, Any], shared: Shared | None = None, wait: Callable[[], bool] | None = None
        ) -> dict[str, Any]:
            values = {**self.captured, **extra}
            names = self.code.co_freevars
            cells = {name: CellType(values[name]) if name in values else CellType() for name in names}
            if shared is not None:
                shared.update({f"{self.index}.{name}": cells[name] for name in self.lends})
            namespace = {**self.module, **values, "__builtins__": self._builtins(shared, wait)}
            body = FunctionType(self.code, namespace, self.code.co_name, None, tuple(cells.values()))
            body()
            return {name: value for name in self.assigned if (value := _content(cells[name])) is not _UNBOUND}

        return run

    def _builtins(self, shared: Shared | None, wait: Callable[[], bool] | None) -> dict[str, Any]:
        if not self.borrows:
            return vars(builtins)
        return _Borrowing(self.borrows, {} if shared is None else shared, wait)


class _Borrowing(dict[str, Any]):
    """The builtins of a linked block. Python looks names up here last, so it finds siblings' names wherever they are used."""

    def __init__(self, borrows: Mapping[str, int], shared: Shared, wait: Callable[[], bool] | None) -> None:
        super().__init__({name: value for name, value in vars(builtins).items() if name not in borrows})
        self.borrows, self.shared, self.wait = borrows, shared, wait or bool

    def __missing__(self, name: str) -> Any:
        if name not in self.borrows:
            raise KeyError(name)
        value = self._lent(name)
        while value is _UNBOUND and self.wait():
            value = self._lent(name)
        if value is _UNBOUND:
            raise NameError(
                f"name {name!r} is bound by another invoke of this trace, which has not come to that line. Make the "
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


def _offer_source(block: Block) -> None:
    """Let tracebacks show the block's lines in a process that cannot read the file."""
    known = linecache.getlines(block.filename)
    first, lines = block.firstlineno - 1, list(block.source_lines)
    entry = linecache.cache.get(block.filename)
    if known and not getattr(entry, "midstream", False):
        return
    text = known + ["\n"] * (first + len(lines) - len(known))
    text[first : first + len(lines)] = lines
    linecache.cache[block.filename] = _Lines((sum(map(len, text)), None, text, block.filename))


class _Lines(tuple[int, None, list[str], str]):
    """A linecache entry that holds only blocks. Further blocks of the file may be added."""

    midstream = True


def capture(frame: FrameType) -> Block:
    """The block of the with statement that the frame is entering. To be called in its `__enter__`."""
    compiled = _compiled(locate(frame), frame.f_code)
    local, own = frame.f_locals, own_names(frame)
    captured = {}
    for name in sorted(compiled.reads | compiled.read_first):
        if name in local:
            captured[name] = local[name]
        elif name not in own and name in frame.f_globals:
            captured[name] = frame.f_globals[name]
        if name in compiled.read_first and isinstance(captured.get(name), Unsaved):
            del captured[name]  # as if the name had never been set
    module: dict[str, Any] = {
        name: frame.f_globals[name] for name in ("__name__", "__package__") if name in frame.f_globals
    }
    return Block(compiled, captured, module, reached(captured))


def link(blocks: Sequence[Block]) -> bool:
    """Let sibling blocks read each other's names. Returns whether there are any to share.

    A name that a block reads without having a value for it is borrowed from the nearest sibling before it that binds the name, else from
    the nearest after it.
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


def locals_at(exc: BaseException, block: Block) -> dict[str, Any]:
    """The names that the body had bound when it raised `exc`; empty if other code raised it."""
    traceback = exc.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is block.code:
            values = traceback.tb_frame.f_locals
            return {name: values[name] for name in block.assigned if name in values}
        traceback = traceback.tb_next
    return {}


# Finding the statement.

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


_brought: weakref.WeakValueDictionary[int, torch.Tensor] = (
    weakref.WeakValueDictionary()
)  # tensors that traces bound, by id


def in_place_of(names: Iterable[str], values: Mapping[str, Any], frame: FrameType) -> dict[str, Unsaved]:
    """The placeholders to bind in the caller's frame for those `names`, set by a trace, that `values` does not have.

    A name that has a value of the caller's keeps it.
    """
    new = [name for name in names if name not in values and _is_free(name, frame)]
    _brought.update({id(value): value for value in values.values() if isinstance(value, torch.Tensor)})
    return {name: Unsaved(name) for name in new}


def _is_free(name: str, frame: FrameType) -> bool:
    """Whether a name has no value in the frame, or only one that an earlier trace bound."""
    if name in frame.f_locals:
        value = frame.f_locals[name]
    elif name in own_names(frame):
        return True
    elif name in frame.f_globals:
        value = frame.f_globals[name]
    else:
        return not hasattr(builtins, name)
    return isinstance(value, Unsaved) or (isinstance(value, torch.Tensor) and _brought.get(id(value)) is value)
