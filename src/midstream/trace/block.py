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

`frames.py` finds the statement and skips its body, `rewrite.py` compiles the body. The function returns the names that the body has bound.
`link` lets the blocks of one trace read each other's names.
"""

from __future__ import annotations

import builtins
import functools
import linecache
import marshal
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from midstream.errors import TraceError
from midstream.trace.frames import Site, SkipBlock, locate, own_names, push, skip, skipped
from midstream.trace.rewrite import compile_site
from midstream.trace.saves import Unsaved, reached

__all__ = ["Block", "SkipBlock", "capture", "link", "locals_at", "push", "skip", "skipped"]

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
