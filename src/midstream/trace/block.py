"""A with-block compiled to a function of its free variables: how a trace's body gets from the user's file to a worker.

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

`frames.py` finds the statement and skips it, `rewrite.py` makes the code. A body that binds names hands them back as a
dict; `link` lets the blocks of one trace read each other's names.
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
Shared = MutableMapping[str, Any]  # "index.name" of a binding block -> the cell of its name


@dataclass(frozen=True, eq=False)
class Compiled:
    """The code of a block and where it came from. One object per with statement, however often it is entered.

    Pickled by marshal, whose format belongs to a minor version of Python: client and worker need the same one.
    """

    code: CodeType
    target: str | None
    reads: frozenset[str]  # names that it reads and never binds
    carried: frozenset[str]  # names that it binds but may read before
    lines: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        version = tuple(sys.version_info[:2])
        return _load, (version, marshal.dumps(self.code), self.target, self.reads, self.carried, self.lines)


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
    carried = frozenset(code.co_freevars) - fresh
    return Compiled(code, target, reads - {target}, carried - {target}, site.lines)


def _target(site: Site) -> str | None:
    name = getattr(site.target, "id", None)
    if site.target is not None and name is None:
        raise TraceError(f"{site.filename}:{site.node.lineno}: the target of a trace's `as` has to be a plain name")
    return name


@dataclass(eq=False)
class Block:
    """A with-block compiled to a function of its free variables.

    Pickles by value with cloudpickle. Blocks pickled together share the code of one statement. The code travels as
    bytecode, so the client and the worker need the same minor version of Python; a mismatch raises TraceError.
    """

    compiled: Compiled
    captured: dict[str, Any]  # values at entry of the names that the body may read before it binds them
    module: dict[str, Any] = field(
        default_factory=dict
    )  # __name__ and __package__, for classes and imports in the body
    reached: dict[str, Any] = field(default_factory=dict)  # what functions and objects among the captured have
    index: int = 0  # among the siblings given to `link`
    borrows: dict[str, int] = field(default_factory=dict)  # name -> index of the sibling that binds it
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
        """The text lines of the with statement, from `firstlineno` on."""
        return self.compiled.lines

    @property
    def target(self) -> str | None:
        """The name after `as`. It is never captured; the caller passes it in."""
        return self.compiled.target

    @property
    def assigned(self) -> frozenset[str]:
        """The names that the block binds at its own level."""
        return frozenset(name for name in self.code.co_freevars if not name.startswith("__"))

    @property
    def outside(self) -> dict[str, Any]:
        """What it has of the caller's, by name: what it captured, and what functions and objects among that have."""
        return {**self.captured, **self.reached}

    def set_of(self, names: Mapping[str, Any], but: Collection[str]) -> list[str]:
        """Of the `names` that `function` gave, those that the block bound with no look at what they were before; not those of `but`."""
        return [name for name in names if name not in but and name not in self.captured]

    def function(self) -> Callable[..., dict[str, Any]]:
        """f(extra, shared=None, wait=None) runs the body and returns its names as it ends.

        `extra` holds what is injected at run time: `__save__`, `__backward__`, the target, anything that replaces a
        captured value. Linked siblings need the same `shared`: an empty dict per trace and process. `wait()` is called
        when a sibling's name is not bound: False if none of them can get further before this block does.
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
    """The builtins of a linked block: Python looks here last, so a sibling's name is found wherever it is used."""

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
    """Lets tracebacks print the block's lines in a process that cannot read the file."""
    known = linecache.getlines(block.filename)
    first, lines = block.firstlineno - 1, list(block.source_lines)
    entry = linecache.cache.get(block.filename)
    if known and not getattr(entry, "midstream", False):
        return
    text = known + ["\n"] * (first + len(lines) - len(known))
    text[first : first + len(lines)] = lines
    linecache.cache[block.filename] = _Lines((sum(map(len, text)), None, text, block.filename))


class _Lines(tuple[int, None, list[str], str]):
    """A linecache entry made of blocks, to which further blocks of the file may be added."""

    midstream = True


def capture(frame: FrameType) -> Block:
    """The block of the with statement that the frame is entering: to be called while its `__enter__` runs."""
    compiled = _compiled(locate(frame), frame.f_code)
    local, own = frame.f_locals, own_names(frame)
    captured = {}
    for name in sorted(compiled.reads | compiled.carried):
        if name in local:
            captured[name] = local[name]
        elif name not in own and name in frame.f_globals:
            captured[name] = frame.f_globals[name]
        if name in compiled.carried and isinstance(captured.get(name), Unsaved):
            del captured[name]  # the block begins as it did when the name had never been set
    module: dict[str, Any] = {
        name: frame.f_globals[name] for name in ("__name__", "__package__") if name in frame.f_globals
    }
    return Block(compiled, captured, module, reached(captured))


def link(blocks: Sequence[Block]) -> bool:
    """Lets sibling blocks read each other's names; whether there is anything to share.

    A name that a block reads, and neither binds nor captured with a value, is taken from the nearest sibling before it
    that binds it, else from the nearest after it.
    """
    wanted: dict[int, set[str]] = {}
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
                wanted.setdefault(source, set()).add(name)
    for index, block in enumerate(blocks):
        block.lends = frozenset(wanted.get(index, ()))
    return bool(wanted)


def locals_at(exc: BaseException, block: Block) -> dict[str, Any]:
    """The names that the body had bound when it raised `exc`; empty if it was not the body."""
    traceback = exc.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is block.code:
            values = traceback.tb_frame.f_locals
            return {name: values[name] for name in block.assigned if name in values}
        traceback = traceback.tb_next
    return {}
