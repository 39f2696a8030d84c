"""Shows code an engine's device in a process that may lack it.

    with showing(torch.device("cuda:0")):
        torch.ones(3).cuda().device     # cuda:0

All tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from midstream.tree import map_objects


def showing(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Show the code in the block this device for the tensors that an engine would have on it."""
    return contextlib.nullcontext() if device.type == "cpu" else _Devices(device)


class _Devices(TorchFunctionMode):
    """Shows the code the engine's device, which this process may lack. All tensors are on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._on_cpu: dict[int, Any] = {}  # tensors that would be on the CPU next to the engine, by id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_DEVICE:
            is_on_cpu = id(args[0]) in self._on_cpu
            return _ASKS_DEVICE[func](torch.device("cpu") if is_on_cpu else self._device)
        asked = [str(each) for each in (*args, *kwargs.values()) if isinstance(each, (torch.device, str))]
        to_cuda = func is torch.Tensor.cuda or any(each.startswith("cuda") for each in asked)
        to_cpu = func is torch.Tensor.cpu or any(each.startswith("cpu") for each in asked)
        tensors: list[torch.Tensor] = []
        map_objects((tuple(args), kwargs), torch.Tensor, lambda each: tensors.append(each) or each)  # type: ignore[func-returns-value]
        was_on_cpu = all(id(each) in self._on_cpu for each in tensors)  # also true for a function that takes no tensors
        if func is torch.Tensor.cuda:
            found = args[0]
        else:
            found = func(*map(_on_cpu, args), **{name: _on_cpu(each) for name, each in kwargs.items()})
        is_on_cpu = to_cpu or (was_on_cpu and not to_cuda)
        if any(found is each for each in tensors):
            if func not in _MOVES or is_on_cpu == (id(found) in self._on_cpu):
                return found  # a change in place, or it is there already
            found = found.clone()
        if is_on_cpu:
            map_objects(found, torch.Tensor, self._note)
        return found

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        self._on_cpu[id(tensor)] = tensor  # kept, so that its id stays its own
        return tensor


_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
_ASKS_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}


def _on_cpu(value: Any) -> Any:
    is_cuda = str(value).startswith("cuda") if isinstance(value, (torch.device, str)) else False
    return torch.device("cpu") if is_cuda else value
