"""What a trace has of the caller's beside the variables that it names: what its functions use, and its objects hold.

    class Probe:
        def look(self, prompt):
            with self.model.trace(prompt):
                self.found.append(self.model.layers_output[3].save())
                keep(self.model.logits)         # which has a list of its own

The engine has copies of `self` and `keep`, and so of their lists, which come back as `self.found` and `keep.kept`.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

CONTAINERS = (list, dict, deque)
_MOST = 1000  # functions and objects that are looked into
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def reached(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, and the lists, dicts and objects of the caller's that functions and objects among them have, as `owner.name`."""
    found = dict(values)
    seen = {id(value) for value in values.values()}
    rest = deque(values.items())
    for _ in range(_MOST):
        if not rest:
            break
        owner, value = rest.popleft()
        for name, used in _has(value):
            if id(used) in seen:
                continue
            seen.add(id(used))
            rest.append((f"{owner}.{name}", used))
            if isinstance(used, CONTAINERS) or is_callers_object(used):
                found[f"{owner}.{name}"] = used
    return found


def attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of objects of the caller's among `values`, as `owner.name`."""
    objects = {owner: value for owner, value in values.items() if is_callers_object(value)}
    return {f"{owner}.{name}": held for owner, value in objects.items() for name, held in vars(value).items()}


def is_callers_object(value: Any) -> bool:
    """Whether it is an instance of a class of the caller's own, and no library's."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if not hasattr(value, "__dict__") or isinstance(value, type) or kind.__module__.startswith("midstream."):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not file.startswith(_INSTALLED))


def _has(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield from () if _is_imported(value) else _variables(value)
    elif is_callers_object(value):
        yield from list(vars(value).items())


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
