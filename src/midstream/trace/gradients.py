"""Whether the code of a trace asks for gradients. `LanguageModel` records them only then: a graph keeps every activation of the model in
memory, and so does each saved value that is part of it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from midstream.trace.code import BlockProgram, FunctionProgram, StandingEdit, TraceProgram, code_of, plain_function
from midstream.trace.containers import contents
from midstream.trace.saves import closure_of

# Names in code that asks for gradients; `__backward__` stands for `with loss.backward():`.
_NAMES = frozenset(
    "backward __backward__ grad retain_grad requires_grad requires_grad_ register_hook autograd enable_grad set_grad_enabled".split()
)
_NEVER = ("torch", "transformers", "numpy", "midstream", "builtins")  # packages whose functions are not read
_MOST = 2000  # functions and objects that are looked at


def asks_for_gradients(program: TraceProgram, own: Collection[int]) -> bool:
    """Whether the code of a trace, or a function that it calls, names a gradient; or it uses a tensor that the caller wants to train.

    Args:
        own: the ids of the model's parameters. A tensor that was computed from these alone, such as a direction in the vocabulary, is not
            one to train.
    """
    if isinstance(program, StandingEdit):
        program = program.program
    if isinstance(program, FunctionProgram):
        code, values = code_of(program.fn), program.outside
        known = getattr(plain_function(program.fn), "__globals__", {})
    else:
        assert isinstance(program, BlockProgram)
        code, values, known = program.block.code, program.block.outside, program.block.module
    held = [*values.values(), *contents(list(values.values()))]
    if any(isinstance(value, torch.Tensor) and _is_trained(value, own) for value in held):
        return True
    return code is not None and any(
        _names_gradients(each)
        for each in _codes(
            code, [program.fn if isinstance(program, FunctionProgram) else None, *values.values()], known
        )
    )


def _is_trained(value: torch.Tensor, own: Collection[int]) -> bool:
    """Whether it needs gradients for another tensor than the model's parameters."""
    if not value.requires_grad or value.is_leaf:
        return value.requires_grad and id(value) not in own
    seen, rest = set[Any](), [value.grad_fn]
    while rest:
        node: Any = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            return True
        rest += [before for before, _ in node.next_functions]
    return False


def _names_gradients(code: types.CodeType) -> bool:
    keywords = {name for const in code.co_consts if isinstance(const, tuple) for name in const}
    return not _NAMES.isdisjoint(code.co_names) or "detach" in keywords  # tracer.cache(detach=False)


def _codes(code: types.CodeType, values: list[Any], known: Mapping[str, Any]) -> Iterator[types.CodeType]:
    """The code itself, the code of its nested functions, and the code of the functions and methods that it uses by name.

    Args:
        values: the values that the code uses.
        known: the global variables where it runs.
    """
    rest = [(code, values, known)]
    seen: set[tuple[int, int]] = set()  # objects, each with the code that uses it
    while rest and len(seen) < _MOST:
        code, values, known = rest.pop()
        yield code
        rest += [(const, values, known) for const in code.co_consts if isinstance(const, types.CodeType)]
        objects: list[tuple[Any, Any]] = [(each, None) for each in values]  # with the object whose method it is
        objects += [(known[name], None) for name in code.co_names if name in known]
        while objects and len(seen) < _MOST:
            value, owner = objects.pop()
            while isinstance(value, functools.partial):
                value = value.func
            function = getattr(value, "__func__", None) if isinstance(value, types.MethodType) else None
            if function is not None:
                value, owner = function, getattr(value, "__self__", None)
            is_function = isinstance(value, types.FunctionType)
            key = id(value), id(owner) if is_function else id(code)
            if key in seen or isinstance(value, torch.Tensor):
                continue
            seen.add(key)
            if not is_function:
                objects += [(each, value) for each in _parts(value, code.co_names)]
            elif _is_read(value.__module__):
                rest.append((value.__code__, [owner, *closure_of(value).values()], value.__globals__))


def _is_read(module: str | None) -> bool:
    return (module or "").split(".")[0] not in _NEVER


def _parts(owner: Any, names: Collection[str]) -> Iterator[Any]:
    """The attributes and methods with these names of a module, class or object, and the methods that a call of it runs."""
    if isinstance(owner, types.ModuleType):
        homes: list[Any] = [owner] if _is_read(owner.__name__) else []
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        homes = [each for each in kind.__mro__ if _is_read(each.__module__)]
        homes += [owner] if homes else []
    for home in homes:
        held: Mapping[str, Any] = {}
        with contextlib.suppress(AttributeError):  # it has none; this runs none of the object's code
            held = object.__getattribute__(home, "__dict__")
        for name in (*names, "__call__", "__init__", "forward"):
            if name in held:
                part = held[name]
                part = part.fget if isinstance(part, property) else part
                yield part.__func__ if isinstance(part, (staticmethod, classmethod)) else part
