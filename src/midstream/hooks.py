"""The only code that registers hooks on modules or replaces a module's `forward`.

    handle = before(module, lambda args, kwargs: ...)   # returns new (args, kwargs), or None to keep them
    handle = after(module, lambda output: ...)          # returns a new output, or None to keep it
    handle.remove()

`torch.compile` traces hooks of `before` and `after` into the compiled forward, provided that it can trace the given function. A trace's
code may also call modules, on values of its own. Hooks for the forward's values ask `is_in_body`, and ignore these calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

Before = Callable[[Any, Any], Any]
After = Callable[[Any], Any]
CURRENT: ContextVar[Any] = ContextVar("midstream_body")  # the `trace.body.Body` whose code is running


class Handle(Protocol):
    """An installed hook."""

    def remove(self) -> None:
        """Take the hook off."""
        ...


def before(module: nn.Module, see: Before, *, first: bool = False) -> Handle:
    """Call `see(args, kwargs)` before every call of `module`; with `first`, before all existing hooks."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return see(args, kwargs)

    return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)


def after(module: nn.Module, see: After, *, first: bool = False) -> Handle:
    """Call `see(output)` after every call of `module`; with `first`, before all existing hooks."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return see(output)

    return module.register_forward_hook(hook, prepend=first)


def after_call(module: nn.Module, see: Callable[[Any, Any, Any], Any]) -> Handle:
    """Call `see(args, kwargs, output)` after every call of `module`, with its `forward`'s arguments. A result replaces the output."""

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return see(args, kwargs, output)

    return module.register_forward_hook(hook, with_kwargs=True)


def is_in_body() -> bool:
    """Whether a trace's code is running, and not the forward's."""
    return CURRENT.get(None) is not None


def skips_hooks(module: nn.Module) -> bool:
    """Whether the module's class has its own `__call__`, which may call `forward` directly (as vLLM's compiled models do)."""
    return type(module).__call__ is not nn.Module.__call__


def around(module: nn.Module, see_input: Before | None, see_output: After) -> Handle:
    """Like `before` and `after`, but wraps the instance's `forward`: for modules that skip hooks."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if see_input is not None:
            args, kwargs = see_input(args, kwargs) or (args, kwargs)
        output = wrapped.__dict__["forward"](*args, **kwargs)
        seen = see_output(output)
        return output if seen is None else seen

    wrapped.__dict__["forward"] = module.forward
    return _Replaced(module.__dict__, wrapped)


class _Inside:
    """The module's forward, run in a context. In a deep copy of the module, it runs the copy's forward."""

    def __init__(self, module: nn.Module, context: Callable[[Any], AbstractContextManager[Any]]) -> None:
        self.module, self.context, self.forward = module, context, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context(self.module):
            return self.forward(*args, **kwargs)


def inside(module: nn.Module, context: Callable[[Any], AbstractContextManager[Any]]) -> Handle:
    """Run every forward of the module in `context(module)`; its hooks run outside of the context."""
    return _Replaced(module.__dict__, _Inside(module, context))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Handle:
    """Replace the module's own forward by `forward`. Wrappers from `around` and `inside` stay around it."""
    owner = module.__dict__
    while "forward" in getattr(owner.get("forward"), "__dict__", {}):
        owner = owner["forward"].__dict__
    return _Replaced(owner, forward)


class _Replaced:
    """A replaced `forward`, of a module or inside a wrapper. Remove a module's replacements in the reverse order of their creation."""

    def __init__(self, owner: dict[str, Any], forward: Callable[..., Any]) -> None:
        self._owner = owner
        self._former = owner.get("forward")
        owner["forward"] = forward

    def remove(self) -> None:
        self._owner.pop("forward", None)
        if self._former is not None:
            self._owner["forward"] = self._former
