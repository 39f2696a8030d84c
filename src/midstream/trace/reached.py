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

from torch import nn

CONTAINERS = (list, dict, deque)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_LOOKED_AT = 10_000  # values in a container
_MOST = 1000  # functions and objects that are looked into
_INSTALLED = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "purelib", "platlib"))


def reached(values: Mapping[str, Any]) -> dict[str, Any]:
    """The lists, dicts and objects of the caller's that functions and objects among `values` have, as `owner.name`."""
    found: dict[str, Any] = {}
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
            if is_container(used) or attributes_of(used) is not None:
                found[f"{owner}.{name}"] = used
    return found


def is_container(value: Any) -> bool:
    return issubclass(type(value), CONTAINERS)  # what isinstance asks is the object's own code


def _backwards(container: Any) -> Iterator[Any]:
    """The values in a container or a tuple, the last first."""
    kind = type(container)
    if issubclass(kind, dict):
        return reversed(list(dict.values(container)))
    if issubclass(kind, deque):
        return deque.__reversed__(container)
    return list.__reversed__(container) if issubclass(kind, list) else reversed(list(tuple.__iter__(container)))


def contents(container: Any) -> Iterator[Any]:
    """What is in a container, at any depth, the last first; up to 10,000 values."""
    if not is_container(container):
        return
    seen, rest, left = {id(container)}, [container], _LOOKED_AT
    while rest:
        for each in _backwards(rest.pop()):
            yield each
            if (left := left - 1) == 0:
                return
            if (is_container(each) or issubclass(type(each), tuple)) and id(each) not in seen:
                seen.add(id(each))
                rest.append(each)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an instance of a class of the caller's own, and no library's, with none of its code run; None for all else."""
    kind = type(value)
    return _dict_of(value) if kind is SimpleNamespace or _is_callers(kind) else None


def _is_callers(kind: type) -> bool:
    module = kind.__module__
    if not isinstance(module, str) or issubclass(kind, (type, nn.Module)) or module.startswith("midstream."):
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in _PICKLING):  # what travels is for it to say
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = not isinstance(file, str) or file.startswith(_INSTALLED) or "/dist-packages/" in file
    return module == "__main__" or not installed


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict else None


def _has(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is FunctionType:
        yield from () if _is_imported(value) else _variables(value)
    elif (own := attributes_of(value)) is not None:
        yield from list(own.items())


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
