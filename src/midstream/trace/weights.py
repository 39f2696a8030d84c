"""The caller's weights: large tensors that a trace's code uses, such as an SAE's. They travel apart from the code, once for equal content.

    weights = Weights()                        # client: the pickle of the code has numbers in place of large tensors
    number = weights.take(sae.W_enc)
    head, needed = weights.table()             # the head goes with the code, and what is needed to workers that do not have it

    tensors = tensors_of(head, held, device)   # worker: `held` has the weights by their digests

Tensors with one storage share their memory in the worker, too, unless most of it belongs to none of them. A body's tensors are its own:
writing to them changes no weight.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from midstream.errors import TraceError
from midstream.trace.tree import is_raw

LEAST_BYTES = 1 << 18  # of a storage whose tensors are taken out of the code, and of what is sent apart from it
_ALIGNMENT = 16  # bytes of the largest element
_differ = ctypes.CDLL(None).memcmp
_differ.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Weight:
    """Memory of the caller's as it was when a trace was made."""

    def __init__(self, data: bytes, digest: str) -> None:
        self.data, self.digest = data, digest


# The weights that a trace uses or workers hold. Memory that has not changed is known by its address: comparing is faster than a digest.
_by_place: WeakValueDictionary[tuple[int, int], Weight] = WeakValueDictionary()
_by_digest: WeakValueDictionary[str, Weight] = WeakValueDictionary()


def _weight_of(flat: torch.Tensor) -> Weight:
    """The weight with this content (uint8, on the CPU).

    The content is always compared. A tensor's version does not tell: `weight.data *= 2` leaves it as it was.
    """
    address, size = flat.data_ptr(), flat.numel()
    weight = _by_place.get((address, size))
    if weight is None or _differ(address, weight.data, size):
        data = flat.numpy().tobytes()
        digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        weight = _by_digest.setdefault(digest, Weight(data, digest))
        _by_place[address, size] = weight
    return weight


class _View(NamedTuple):
    """A tensor in a block of memory. Shape, stride and offset count elements."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_Block = str | bytes  # a weight's digest, or the bytes themselves if they are few
Head = tuple[list[_Block], dict[int, _View]]


class Weights:
    """Collects the large tensors of some code."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    @staticmethod
    def takes(value: Any) -> bool:
        """Whether it is a tensor to take out of the code. Small tensors in a large storage are: they may share it with others."""
        return is_raw(value) and value.numel() > 0 and value.untyped_storage().nbytes() >= LEAST_BYTES

    def take(self, tensor: torch.Tensor) -> int:
        """Take a tensor. Returns its number."""
        self._tensors.append(tensor.detach().resolve_conj().resolve_neg())
        return len(self._tensors) - 1

    def table(self) -> tuple[Head, dict[str, Weight]]:
        """Where each tensor is, and the weights that are needed, by digest."""
        groups: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        for number, tensor in enumerate(self._tensors):
            groups[tensor.device, tensor.untyped_storage().data_ptr()][number] = tensor
        blocks: list[_Block] = []
        views: dict[int, _View] = {}
        needed: dict[str, Weight] = {}
        for group in groups.values():
            for together in _parts(group):
                begin, flat = _memory([*together.values()])
                for number, tensor in together.items():
                    offset = int(tensor.storage_offset()) - begin // tensor.element_size()
                    views[number] = _View(
                        len(blocks), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset
                    )
                if flat.numel() < LEAST_BYTES:
                    blocks.append(flat.numpy().tobytes())
                else:
                    weight = _weight_of(flat)
                    needed[weight.digest] = weight
                    blocks.append(weight.digest)
        return (blocks, views), needed


def _range(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The `[begin, end)` of the bytes of a storage in which tensors lie."""
    begins, ends = [], []
    for tensor in tensors:
        elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begins.append(int(tensor.storage_offset()) * tensor.element_size())
        ends.append(begins[-1] + elements * tensor.element_size())
    return min(begins) // _ALIGNMENT * _ALIGNMENT, max(ends)


def _parts(group: dict[int, torch.Tensor]) -> list[dict[int, torch.Tensor]]:
    """The tensors of one storage, in one part; each in its own if most of the memory between them would be sent for nothing."""
    begin, end = _range([*group.values()])
    if end - begin <= 2 * sum(tensor.nbytes for tensor in group.values()):
        return [group]
    return [{number: tensor.contiguous()} for number, tensor in group.items()]


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """The memory in which tensors of one storage lie (flat uint8, on the CPU), and where it begins in the storage."""
    begin, end = _range(tensors)
    flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return begin, flat.set_(tensors[0].untyped_storage(), begin, (end - begin,), (1,)).cpu()  # type: ignore[call-overload]


# In the worker.


def on_device(data: bytes, device: torch.device | None) -> torch.Tensor:
    """The bytes as flat uint8, in memory of their own."""
    with torch.inference_mode(False):
        flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        ctypes.memmove(flat.data_ptr(), data, len(data))
        return flat.to(device)


def tensors_of(head: Head, held: Mapping[str, torch.Tensor], device: torch.device | None) -> dict[int, torch.Tensor]:
    """The tensors by number, for one body or several that share their objects. Raises TraceError if a weight is missing."""
    blocks, views = head
    memory = [_private(held, block, device) if isinstance(block, str) else on_device(block, device) for block in blocks]
    return {
        number: _elements(memory[view.block], view.dtype).as_strided(view.shape, view.stride, view.offset)
        for number, view in views.items()
    }


def _private(held: Mapping[str, torch.Tensor], digest: str, device: torch.device | None) -> torch.Tensor:
    """A held weight's content on the device, for a body to write to."""
    if digest not in held:
        raise TraceError("The engine no longer has a tensor that the trace uses. Run the trace again.")
    weight = held[digest]
    if device is not None and weight.device != device:
        return weight.to(device)
    if weight.is_cpu:
        return torch._lazy_clone(weight)  # type: ignore[attr-defined,no-any-return]  # copies at the first write
    return weight.clone()  # CUDA's lazy copies run on another stream than the forward


def _elements(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
