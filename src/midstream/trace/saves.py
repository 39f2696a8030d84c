"""The values that a trace has saved. In the caller's process, placeholders stand for the values that it set and did not save."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from midstream.errors import UnsavedError
from midstream.trace.parallel import BINARY, COMPARISONS, UNARY
from midstream.tree import Opaque

_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_INSTALLED = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "purelib", "platlib"))


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python's own library."""
    return file.startswith((*_INSTALLED, *_package_folders(tuple(sys.path)))) or "/dist-packages/" in file


@functools.cache
def _package_folders(path: Sequence[str]) -> Sequence[str]:
    """The folders of Python's path that contain packages' metadata, as `pip install --target` leaves it."""
    return [f"{folder}/" for folder in path if any(Path(folder or ".").glob("*.dist-info"))]


class Saves:
    """The values that one body has saved, by identity."""

    def __init__(self) -> None:
        # The value, the value that comes back for it, its version.
        self._by_id: dict[int, tuple[Any, Any, int | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def put(self, value: Any, saved: Any) -> None:
        """Bring `saved` back for `value`."""
        self._by_id[id(value)] = (value, saved, None)

    def put_with_gradient(self, value: torch.Tensor, saved: torch.Tensor) -> bool:
        """Bring back the tensor itself as long as it does not change, else `saved`. Returns whether it is unchanged since its
        first save.
        """
        _, _, version = self._by_id.setdefault(id(value), (value, saved, value._version))
        return version == value._version

    def saved_for(self, value: Any) -> Any:
        """The value to bring back for a saved one."""
        value, saved, version = self._by_id[id(value)]
        return value if version is not None and value._version == version else saved

    def pick(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The values to bring back for those of `names` that were saved."""
        return {name: self.saved_for(value) for name, value in names.items() if id(value) in self._by_id}

    def has(self, value: Any) -> bool:
        """Whether this very value was saved."""
        return id(value) in self._by_id


# The caller's classes and functions.

# A copy of a class that `shipping` has made -> the class.
ORIGINALS: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def is_callers(kind: type) -> bool:
    """Whether the caller wrote a class, and Python's default way pickles its instances."""
    return is_written_by_caller(kind) and pickles_by_default(kind)


def is_written_by_caller(kind: type) -> bool:
    """Whether the caller wrote a class."""
    module = kind.__module__
    if not isinstance(module, str) or issubclass(kind, type) or module.startswith("midstream."):
        return False
    if module == "__main__" or module not in sys.modules:  # sent by value by a process that has the module
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return isinstance(file, str) and not is_installed(file)


def pickles_by_default(kind: type) -> bool:
    """Whether a class leaves it to Python, or to PyTorch, how its instances are pickled."""
    base = nn.Module if issubclass(kind, nn.Module) else object
    return all(getattr(kind, name) is getattr(base, name) for name in _PICKLING)


def is_imported(function: Any) -> bool:
    """Whether the engine imports the function by name, with its module's variables, instead of copying it."""
    here: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        here = getattr(here, name, None)
    return here is function and function.__module__ != "__main__"


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of the enclosing functions that a function uses, with their values."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names from outside that a function uses, with their values."""
    yield from closure_of(function).items()
    names = function.__globals__
    yield from ((name, names[name]) for name in function.__code__.co_names if name in names)


# Placeholders.


class Unsaved(Opaque):
    """Is bound to a name that a trace set and did not save. Every use raises UnsavedError.

    Without it, Python would raise NameError, or silently use the value of an earlier trace, for example in a notebook cell that lost its
    `.save()`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name} was set in a trace and not saved>"

    def __reduce__(self) -> Any:
        return Unsaved, (self._name,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # IPython and others look for special methods
            raise AttributeError(name)
        self._raise()

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsavedError(
            f"{self._name} was set in a trace and not saved, so it has no value outside: write `{self._name} = (...).save()` there, or "
            f"`{self._name}.save()`."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_name":
            self._raise()
        super().__setattr__(name, value)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Unsaved):
                value._raise()
        raise UnsavedError(f"{function} was given a value that was set in a trace and not saved.")


_OTHERS = "round trunc bool int float complex index len iter next contains getitem setitem delitem call enter exit array fspath".split()
for _use in (*(r + name for name in (*BINARY, "divmod") for r in ("", "r")), *UNARY, *COMPARISONS, *_OTHERS):
    setattr(Unsaved, f"__{_use}__", Unsaved._raise)


def refuse(value: Any) -> None:
    """Raise UnsavedError if `value` is an `Unsaved` placeholder."""
    if isinstance(value, Unsaved):
        value._raise()
