"""The source of running code, as a syntax tree.

linecache has the source of files, notebook cells and doctests. It has none of what an IPython magic runs, such as a cell with `%%time`.
That source is found in the magic's own calls, or in the cells that ran before. A source counts only if it compiles to the very code.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import sys
import zlib
from collections.abc import Iterator
from types import CodeType
from typing import Any

from midstream.errors import SourceUnavailableError
from midstream.progress import ipython_shell

_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


@functools.lru_cache(maxsize=64)
def parse(filename: str, text: str) -> ast.Module:
    """The syntax tree of a file, which nobody may change. Raises SourceUnavailableError."""
    try:
        return ast.parse(text, filename)
    except SyntaxError as error:
        raise SourceUnavailableError(f"The source of {filename!r} cannot be parsed: {error}") from error


def source_of(code: CodeType) -> tuple[str, ast.Module]:
    """The file that `code` is from, or a name for it that linecache knows, and its syntax tree, which nobody may change.

    Raises SourceUnavailableError. A file may have been edited since it was loaded: the caller has to compare.
    """
    if lines := linecache.getlines(code.co_filename):
        return code.co_filename, parse(code.co_filename, "".join(lines))
    shell = ipython_shell()
    if shell is None:
        raise SourceUnavailableError(
            f"No source for {code.co_filename!r}, and a with-block is run from its source. Put the code in a file or a "
            "notebook cell, or use `model.run(fn, prompt)`, which takes a function and needs no source."
        )
    for text, tree in (*_in_running_magics(code), *_in_earlier_magics(shell)):
        if _compiles_to(tree, code):
            name = f"<{code.co_filename.strip('<>')} {zlib.crc32(text.encode()):08x}>"
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
            return name, tree
    raise SourceUnavailableError(
        f"IPython keeps no source for {code.co_filename!r}, and a with-block is run from its source. Move the trace "
        "into a function in a cell of its own, without a magic such as `%%time`, and call the function here."
    )


def _in_running_magics(code: CodeType) -> Iterator[tuple[str, ast.Module]]:
    """What the functions of the magic that runs `code` hold: the text that it was given, and syntax trees."""
    frame, held = sys._getframe(1), list[dict[str, Any]]()
    while frame.f_code.co_name not in ("run_cell_magic", "run_line_magic"):
        held.append(frame.f_locals)
        if frame.f_code.co_filename == code.co_filename:
            held.clear()  # these were the code's own callees
        if frame.f_back is None:
            return
        frame = frame.f_back
    given = frame.f_locals.get("cell") or frame.f_locals["line"]
    for value in (value for names in held for value in names.values()):
        if isinstance(value, ast.Module):
            yield given, value
        elif isinstance(value, str):
            yield from _as_run(value)


def _in_earlier_magics(shell: Any) -> Iterator[tuple[str, ast.Module]]:
    """What earlier cells gave to magics, the latest first: a function may be called in another cell than that which defines it."""
    for cell in reversed(shell.history_manager.input_hist_parsed):
        yield from _given_to_magics(shell, cell)


def _given_to_magics(shell: Any, cell: str) -> Iterator[tuple[str, ast.Module]]:
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_cell_magic" | "run_line_magic"), args=[*_, ast.Constant(value=str(text))]
            ):
                text = shell.transform_cell(text)
                yield from _as_run(text)
                yield from _given_to_magics(shell, text)


def _as_run(text: str) -> Iterator[tuple[str, ast.Module]]:
    """The tree of `text`, and the tree without its last expression, which `%%time` runs by itself."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield text, tree
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        yield text, ast.Module(tree.body[:-1], [])


def _compiles_to(tree: ast.Module, code: CodeType) -> bool:
    """Whether the code is in what the tree compiles to: the same instructions with the same names, constants and positions."""
    try:
        made = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return any(each == code and [*each.co_positions()] == [*code.co_positions()] for each in codes_in(made))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code, and the code of every function and class in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
