"""The hooks by which a model's forward pass says where it is: put where somebody waits, taken off when nobody does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from midstream.trace.visit import Key

Fire = Callable[[Key, Any], Any]


class Hooks:
    """Those on one model.

    Args:
        modules: by their paths.
        fire: called with the point and its value; what it returns is what the forward goes on with.
    """

    def __init__(self, modules: Mapping[str, nn.Module], fire: Fire) -> None:
        self._modules = modules
        self._fire = fire
        self._handles: dict[Key, Any] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def put(self, key: Key) -> None:
        """See to it that `fire` is called when the forward comes to a module's input or output."""
        if key not in self._handles:
            self._handles[key] = self._hook(self._modules[key[0]], key)

    def _hook(self, module: nn.Module, key: Key) -> Any:
        if key[1] == "input":

            def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
                return self._fire(key, (args, kwargs))

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return self._fire(key, output)

        return module.register_forward_hook(after)

    def watch_containers(self) -> None:
        """A module looks for hooks when it is called: one without any would not see a hook that is added while it runs."""
        for path, module in self._modules.items():
            if type(module).__call__ is not nn.Module.__call__:
                hook = _ForwardHook(module, path, self._fire)
                self._handles[(path, "input")] = self._handles[(path, "output")] = hook
            elif next(module.children(), None) is not None:
                self._handles[(path, "called")] = module.register_forward_pre_hook(lambda *_: None)

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class _ForwardHook:
    """For a class whose `__call__` goes straight to `forward` (vLLM's compiled models): wraps the instance's `forward`."""

    def __init__(self, module: nn.Module, path: str, fire: Fire) -> None:
        self._module = module
        self._before = module.__dict__.get("forward")  # somebody else's wrapper
        forward = module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = fire((path, "input"), (args, kwargs))
            return fire((path, "output"), forward(*args, **kwargs))

        module.__dict__["forward"] = wrapped

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)
        if self._before is not None:
            self._module.__dict__["forward"] = self._before
