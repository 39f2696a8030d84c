"""What the caller has, once a trace is over, under the names that it set and did not save.

Python would have no value there, or the one of an earlier trace, as when a cell of a notebook has lost its `.save()`.
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch

from midstream.errors import UnsavedError
from midstream.trace.frames import own_names
from midstream.trace.remote import BINARY, COMPARISONS, UNARY
from midstream.trace.tree import Opaque

_brought: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


class Unsaved(Opaque):
    """In the place of a value that has stayed in a trace. Every use of it raises UnsavedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name} was set in a trace and not saved>"

    def __reduce__(self) -> Any:
        return Unsaved, (self._name,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # somebody asks what it can do, such as IPython
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
    """Raise UnsavedError for what an earlier trace has not saved."""
    if isinstance(value, Unsaved):
        value._raise()


def in_place_of(names: Iterable[str], values: Mapping[str, Any], frame: FrameType) -> dict[str, Unsaved]:
    """What to bind in the caller's frame for names that a trace has set, other than those of its `values`.

    A name that has something of the caller's own keeps it.
    """
    new = [name for name in names if name not in values and _is_free(name, frame)]
    _brought.update({id(value): value for value in values.values() if isinstance(value, torch.Tensor)})
    return {name: Unsaved(name) for name in new}


def _is_free(name: str, frame: FrameType) -> bool:
    """Whether it has no value in the frame, or what an earlier trace has left there."""
    if name in frame.f_locals:
        value = frame.f_locals[name]
    elif name in own_names(frame):
        return True
    elif name in frame.f_globals:
        value = frame.f_globals[name]
    else:
        return not hasattr(builtins, name)
    return isinstance(value, Unsaved) or (isinstance(value, torch.Tensor) and _brought.get(id(value)) is value)
