"""Lists and dicts of the caller's that a trace fills through a function that it calls.

    found = []
    def keep(h):
        found.append(midstream.save(h))
    with model.trace(prompt):
        keep(model.layers_output[3])

The engine has a copy of `keep`, and so of `found`, which the trace itself never names: here it is `keep.found`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any


def through_functions(values: Mapping[str, Any]) -> dict[str, Any]:
    """The lists and dicts that functions among `values` use and that are not among these, as `function.variable`."""
    found: dict[str, Any] = {}
    seen = {id(value) for value in values.values()}
    rest = list(values.items())
    while rest:
        function, value = rest.pop()
        if not isinstance(value, FunctionType) or _is_imported(value):
            continue
        for variable, used in _variables(value):
            if id(used) in seen:
                continue
            seen.add(id(used))
            name = f"{function}.{variable}"
            rest.append((name, used))
            if isinstance(used, (list, dict)):
                found[name] = used
    return found


def _is_imported(function: FunctionType) -> bool:
    """Whether the engine imports it, with its module's variables, and has no copy of the caller's."""
    here: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        here = getattr(here, name, None)
    return here is function and function.__module__ != "__main__"


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names from outside that it uses, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
