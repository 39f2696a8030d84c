"""Refuses a block that shares a variable with a function from outside, when one of the two binds it and the other uses it.

A block has variables of its own, which begin with the caller's values. So neither sees what the other one binds:

    def scaled(h): return h * scale     # reads the caller's `scale`

    with model.trace(prompt):
        scale = 2                       # binds the block's
        h = scaled(model.layers_output[3]).save()
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from midstream.errors import TraceError
from midstream.trace.rewrite import codes_in
from midstream.trace.saves import closure_of, is_written_by_caller

_UNBOUND = object()
_NESTED = ".<locals>."  # in the qualified name of a function that is defined in another one


def check_variables(
    frame: FrameType, own: frozenset[str], objects: Iterable[Any], read: frozenset[str], bound: frozenset[str]
) -> None:
    """Raise TraceError if a function binds a variable of the frame that a block uses, or reads one that the block binds.

    Args:
        own: the names that are local to the frame.
        objects: the caller's, which the block can reach.
        read, bound: the names that the block reads, and binds.
    """
    for function in _functions(objects):
        reads, binds = _used_from_outside(function.__code__)
        for name in sorted((reads & bound) | (binds & (read | bound))):
            if not _is_of_frame(name, function, frame, own):
                continue
            what, its = f"{function.__qualname__}, which the trace can call,", function.__name__
            if name in binds:
                raise TraceError(
                    f"{what} binds {name!r}, and the trace uses {name!r}, too. A trace has variables of its own, and does not see what "
                    f"other code binds: let {its} return the value, or keep it in a list, a dict or an attribute."
                )
            raise TraceError(
                f"{what} reads {name!r}, and the trace binds {name!r}. A trace has variables of its own, so {its} would see the value "
                f"from before the trace: give {its} the value as an argument, or take another name in the trace."
            )


def _functions(objects: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among the objects, and those in classes among them or in classes of theirs."""
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
def _used_from_outside(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of globals and of outer functions' variables that the code and the functions in it read, and those that they bind."""
    read, bound = set[str](), set[str]()
    for part in codes_in(code):
        for each in dis.get_instructions(part):
            is_outer = "GLOBAL" in each.opname or each.opname == "LOAD_NAME"
            if is_outer or ("DEREF" in each.opname and each.argval in code.co_freevars):
                (read if each.opname.startswith("LOAD_") else bound).add(each.argval)
    return frozenset(read), frozenset(bound)


def _is_of_frame(name: str, function: FunctionType, frame: FrameType, own: frozenset[str]) -> bool:
    """Whether a function's variable from outside is the frame's variable of that name. Modules do not count."""
    code = function.__code__
    if name in code.co_freevars:
        here, there = frame.f_locals.get(name, _UNBOUND), closure_of(function).get(name, _UNBOUND)
        return name in own and here is there and type(here) is not ModuleType and _is_beside(name, code, frame.f_code)
    is_module = function.__globals__.get("__name__") == frame.f_globals.get("__name__")
    return is_module and name not in own and type(frame.f_globals.get(name)) is not ModuleType


def _is_beside(name: str, code: CodeType, of_frame: CodeType) -> bool:
    """Whether the variable of a function around `code` can be one of the frame, or of a function around both."""
    for around in codes_in(of_frame):
        inner = [each for each in around.co_consts if isinstance(each, CodeType)]
        if any(each.co_qualname == code.co_qualname and each.co_firstlineno == code.co_firstlineno for each in inner):
            return around is of_frame or name in around.co_freevars
    outermost = of_frame.co_qualname.split(_NESTED)[0]
    is_near = code.co_filename == of_frame.co_filename and code.co_qualname.startswith(outermost + _NESTED)
    return is_near and name in of_frame.co_freevars
