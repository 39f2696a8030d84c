"""Torch's modes, which belong to the thread: a body that parks inside `with torch.autocast(...)` must not leave the forward in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

# Whether this machine has CUDA must not be asked here: a process that has asked cannot be forked any more, and vLLM's engine is.
_KINDS = ("cpu", "cuda")


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)


_NO_AUTOCAST = _autocast()  # as it is when this is imported


class Modes(NamedTuple):
    """What is in force: gradients, inference mode, autocast of each kind of device, and how many modes of Python's are stacked."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    functions: int
    dispatches: int

    @classmethod
    def now(cls) -> Modes:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _autocast() if torch._C._is_any_autocast_enabled() else _NO_AUTOCAST,
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    def put(self) -> None:
        """Have gradients and autocast as they were."""
        torch.set_grad_enabled(self.grad)
        for kind, (on, dtype) in zip(_KINDS, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)

    def put_back(self) -> None:
        """The same after control has been away, and may have changed either."""
        if self.autocast is _NO_AUTOCAST and not torch._C._is_any_autocast_enabled():  # as nearly always
            torch.set_grad_enabled(self.grad)
        else:
            self.put()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Gradients, inference mode and autocast as they were; afterwards as they are now."""
        before = Modes.now()
        with torch.inference_mode(self.inference):
            self.put()
            try:
                yield
            finally:
                before.put()


class Away:
    """Takes off what is in force beyond `base`, until `back`.

    Args:
        base: as it was when this code was given control, inside of which it has entered what it has.
    """

    def __init__(self, base: Modes) -> None:
        self._own = own = Modes.now()
        self._guard: Any = None
        self._functions: list[Any] = []
        self._dispatches: list[Any] = []
        self._differs = own != base
        if not self._differs:  # as nearly always, and at every read
            return
        self._functions = [pop_function_mode() for _ in range(own.functions - base.functions)]
        self._dispatches = [pop_dispatch_mode() for _ in range(own.dispatches - base.dispatches)]
        if own.inference != base.inference:
            self._guard = torch._C._InferenceMode(base.inference)
        base.put()

    def back(self) -> None:
        """As before. To be called where the base is in force again."""
        if not self._differs:
            torch.set_grad_enabled(self._own.grad)
            return
        self._guard = None  # which puts inference mode back
        self._own.put()
        for mode in reversed(self._dispatches):
            push_dispatch_mode(mode)
        for mode in reversed(self._functions):
            push_function_mode(mode)
