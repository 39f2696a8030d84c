"""Lazy copies of tensors: they share memory until somebody writes to one of them. `data_ptr` and `numpy` make real copies of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_torch: Any = torch


def lazy_copy(tensor: torch.Tensor) -> Any:
    """A copy of a tensor on the CPU that takes no memory until somebody writes to it or to the tensor."""
    return _torch._lazy_clone(tensor)


def unwritten(tensor: torch.Tensor) -> Hashable | None:
    """Where the numbers of a lazy copy lie, and how they are read there; None if it has memory of its own.

    Two with equal answers have equal content. The answer holds as long as a lazy copy of the tensor lives to which nobody writes.
    """
    if not (tensor.is_cpu and tensor.layout is torch.strided and _torch._C._is_cow_tensor(tensor)):
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return _torch._C._data_address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits
