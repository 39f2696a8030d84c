"""The memory of the caller's tensors and numpy arrays that a trace's code uses. It is sent apart from the code, large content only once.

    weights = Weights()                       # client: the pickle of the code has numbers in place of tensors and arrays
    number = weights.take(sae.W_enc)
    head, needed = weights.table()            # the head goes with the code, and the needed weights to workers that lack them

    values = values_of(head, held, device)    # worker: `held` has the weights by their digests

Tensors and arrays that overlap in memory overlap in the copy, too. Arrays stay on the CPU. A body has its own copy of each tensor, so
writing to it does not change the weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from midstream.errors import TraceError
from midstream.tree import is_raw, lazy_copy

LEAST_BYTES = 1 << 18  # of memory that is sent apart from the code
_ALIGNMENT = 16  # bytes of the largest element of a tensor
_PIECE = 1 << 24  # bytes that one thread compares
_MANY = 300  # if more tensors and arrays lie in one part of memory, they are not compared pairwise
_CPU = torch.device("cpu")
_differ = ctypes.CDLL(None).memcmp
_differ.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class Weight:
    """The caller's memory at the time when a trace was made."""

    def __init__(self, data: bytes, digest: str) -> None:
        self.data, self.digest = data, digest


# The weights that a trace uses or workers hold. Unchanged memory is recognized by its address: comparing is faster than a digest.
_by_place: WeakValueDictionary[tuple[int, int, int], Weight] = WeakValueDictionary()
_by_digest: WeakValueDictionary[str, Weight] = WeakValueDictionary()


def _weight_of(address: int, size: int, lead: int) -> Weight:
    """The weight with this content, after `lead` zeros.

    The content is always compared, because a tensor's version misses changes such as `weight.data *= 2`.
    """
    weight = _by_place.get((address, size, lead))
    if weight is None or not _same_bytes(address, _address_of(weight.data) + lead, size):
        data = bytes(lead) + _bytes_at(address, size)
        digest = hashlib.blake2b(data, digest_size=32).hexdigest()  # the same digest as `plan.steps.Constant.held`
        weight = _by_digest.setdefault(digest, Weight(data, digest))
        _by_place[address, size, lead] = weight
    return weight


def _same_bytes(one: int, other: int, size: int) -> bool:
    """Whether both places hold the same bytes. Several threads compare large ones."""
    starts = range(0, size, _PIECE)
    pieces = [(one + start, other + start, min(_PIECE, size - start)) for start in starts]
    if len(pieces) < 2:
        return not _differ(one, other, size)
    # The pool is made anew each time: threads do not survive in a forked process.
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
        return not any(pool.map(_differ, *zip(*pieces, strict=True)))


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


class _MemoryLayout(NamedTuple):
    """The layout of a tensor or an array in memory. Strides are in bytes.

    Attributes:
        is_conj, is_neg: whether it is a tensor that is a lazy conjugate, or a lazy negative.
        is_writable: whether an array is writable.
        owns: whether it is an array with memory of its own, which can be resized.
    """

    dtype: torch.dtype | np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool = False
    is_neg: bool = False
    is_writable: bool = True
    owns: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def range(self, address: int) -> tuple[int, int]:
        """The `[begin, end)` of its bytes, if its first element is at `address`."""
        if not self.nbytes:
            return address, address
        begin, end = address, address + self.dtype.itemsize
        for count, step in zip(self.shape, self.strides, strict=True):
            if step < 0:
                begin += (count - 1) * step
            else:
                end += (count - 1) * step
        return begin, end

    def over(self, memory: torch.Tensor, offset: int) -> torch.Tensor | np.ndarray[Any, Any]:
        """The tensor or array whose first element is at `offset` in flat uint8 memory."""
        if isinstance(self.dtype, np.dtype):
            array: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, memory.numpy(), offset, self.strides)
            array = array.copy(order="K") if self.owns else array
            array.flags.writeable = self.is_writable
            return array
        size = self.dtype.itemsize
        elements = memory[: memory.numel() // size * size].view(self.dtype)
        tensor = elements.as_strided(self.shape, [step // size for step in self.strides], offset // size)
        tensor = torch._neg_view(tensor) if self.is_neg else tensor
        return tensor.conj() if self.is_conj else tensor


@dataclass
class _CallersTensor:
    """A tensor or an array that a trace uses.

    Attributes:
        given: the caller's object.
        value: the content in memory, such as a tensor without its lazy conjugate.
        range: the `[begin, end)` of its bytes.
    """

    number: int
    given: Any
    value: torch.Tensor | np.ndarray[Any, Any]
    layout: _MemoryLayout
    device: torch.device
    address: int
    range: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.range = self.layout.range(self.address)

    @classmethod
    def of(cls, number: int, given: torch.Tensor | np.ndarray[Any, Any]) -> _CallersTensor:
        if isinstance(given, np.ndarray):
            writable, owns = bool(given.flags.writeable), bool(given.flags.owndata)
            layout = _MemoryLayout(given.dtype, given.shape, given.strides, is_writable=writable, owns=owns)
            return cls(number, given, given, layout, _CPU, given.__array_interface__["data"][0])
        value, is_conj, is_neg = given.detach(), given.is_conj(), given.is_neg()
        value = value.conj() if is_conj else value
        value = torch._neg_view(value) if is_neg else value
        strides = tuple(step * value.element_size() for step in value.stride())
        layout = _MemoryLayout(value.dtype, tuple(value.shape), strides, is_conj, is_neg)
        return cls(number, given, value, layout, value.device, value.data_ptr())

    @property
    def is_array(self) -> bool:
        return isinstance(self.value, np.ndarray)

    def alone(self) -> _CallersTensor:
        """A dense copy if its elements fill less than half of its range in memory; else itself."""
        begin, end = self.range
        if end - begin <= 2 * self.layout.nbytes:
            return self
        dense = self.value.copy() if isinstance(self.value, np.ndarray) else self.value.contiguous()
        new = _CallersTensor.of(self.number, dense)
        flags = self.layout
        new.layout = new.layout._replace(
            is_conj=flags.is_conj, is_neg=flags.is_neg, is_writable=flags.is_writable, owns=flags.owns
        )
        return new


class _Location(NamedTuple):
    """The place of a tensor or array: its block, and the offset in bytes from the block's beginning."""

    block: int
    offset: int
    layout: _MemoryLayout


_Block = str | bytes  # a weight's digest, or the bytes themselves if they are few


class Head(NamedTuple):
    """The places of the tensors and arrays of some code.

    Attributes:
        places: by number.
        mixed: an error's text for each block that has both tensors and arrays.
    """

    blocks: list[_Block]
    places: dict[int, _Location]
    mixed: list[str]


class Weights:
    """Collects the tensors and arrays of some code.

    Args:
        apart: whether large ones may be sent apart from the code.
    """

    def __init__(self, apart: bool = True) -> None:
        self._least = LEAST_BYTES if apart else None
        self._taken: list[_CallersTensor] = []

    @staticmethod
    def takes(value: Any) -> bool:
        """Whether it is a tensor or an array whose bytes can be taken out of the code."""
        if type(value) is np.ndarray:
            return not value.dtype.hasobject
        return issubclass(type(value), torch.Tensor) and is_raw(value)

    def take(self, value: torch.Tensor | np.ndarray[Any, Any]) -> int:
        """Take a tensor or an array. Returns its number."""
        self._taken.append(_CallersTensor.of(len(self._taken), value))
        return len(self._taken) - 1

    def table(self, name_of: Callable[[Any], str | None] = lambda _: None) -> tuple[Head, dict[str, Weight]]:
        """The place of each of them, and the needed weights by digest. `name_of`: the caller's name of an object, for errors.

        Raises TraceError for tensors that share memory in a way that a copy cannot.
        """
        head, needed = Head([], {}, []), dict[str, Weight]()
        for part in _parts(self._taken):
            lead, begin, size = _extent(part)
            here, address = _readable(part, begin, size)
            if self._least is not None and size >= self._least:
                weight = _weight_of(address, size, lead)
                needed[weight.digest] = weight
                head.blocks.append(weight.digest)
            else:
                head.blocks.append(bytes(lead) + _bytes_at(address, size))
            del here
            for each in part:
                layout = each.layout._replace(owns=each.layout.owns and len(part) == 1)
                head.places[each.number] = _Location(len(head.blocks) - 1, each.address - begin + lead, layout)
            if len({each.is_array for each in part}) > 1:
                head.mixed.append(_mixed(part, name_of))
        return head, needed

    def contents(self) -> Any:
        """Equal for tensors and arrays with equal numbers that share memory in the same way, wherever it is. Raises TraceError as
        `table`.
        """
        head, _ = self.table()
        numbered: dict[int, int] = {}  # the index of a block -> its number, in the order of the tensors
        places = []
        for number, place in sorted(head.places.items()):
            block = numbered.setdefault(place.block, len(numbered))
            places.append((number, place._replace(block=block)))
        return places, [head.blocks[block] for block in numbered]

    def copies(self) -> dict[int, Any]:
        """Copies by number, for this process: on their own devices, and with gradients that reach the caller's tensors.

        Tensors that require gradients and were not computed, such as parameters, are not copied, and neither are tensors that share their
        memory.
        """
        found: dict[int, Any] = {}
        for part in _parts(self._taken):
            computed = _computed_again(part)
            if computed is not None:
                found |= computed
                continue
            lead, begin, size = _extent(part)
            memory = torch.empty(lead + size, dtype=torch.uint8, device=part[0].device)
            if part[0].device.type == "cpu":
                ctypes.memmove(memory.data_ptr() + lead, begin, size)
            else:
                memory[lead:] = _stored(part, begin, size)
            for each in part:
                layout = each.layout._replace(owns=each.layout.owns and len(part) == 1)
                found[each.number] = layout.over(memory, each.address - begin + lead)
        return found


def _parts(taken: Sequence[_CallersTensor]) -> Iterator[list[_CallersTensor]]:
    """The tensors and arrays, grouped by overlaps in memory."""
    group: list[_CallersTensor] = []
    end = 0
    yield from ([each] for each in taken if not each.layout.nbytes)
    for each in sorted(taken, key=lambda each: (str(each.device), each.range)):
        if not each.layout.nbytes:
            continue
        first, last = each.range
        if group and (each.device != group[0].device or first >= end):
            yield from _split(group)
            group = []
        group.append(each)
        end = max(end, last) if len(group) > 1 else last
    if group:
        yield from _split(group)


def _split(group: list[_CallersTensor]) -> list[list[_CallersTensor]]:
    """Split a group whose ranges in memory overlap. If the group fills less than half of its range, tensors that only lie between the
    elements of others are separated from these.
    """
    if len(group) == 1:
        return [[group[0].alone()]]
    begin, end = min(each.range[0] for each in group), max(each.range[1] for each in group)
    if end - begin <= 2 * sum(each.layout.nbytes for each in group) or len(group) > _MANY:
        return [group]
    parts: list[list[_CallersTensor]] = []
    for each in group:
        shared = [part for part in parts if any(_overlap(each, other) for other in part)]
        parts = [part for part in parts if part not in shared] + [[each, *(one for part in shared for one in part)]]
    return [[part[0].alone()] if len(part) == 1 else part for part in parts]


def _overlap(one: _CallersTensor, other: _CallersTensor) -> bool:
    """Whether they have a byte in common; true if that takes too long to find out."""
    try:
        return np.shares_memory(_bounded(one), _bounded(other), max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def _bounded(taken: _CallersTensor) -> np.ndarray[Any, Any]:
    """An array at the same place in memory. Its content is not read."""
    layout, (begin, end) = taken.layout, taken.range
    there: Any = (ctypes.c_char * (end - begin)).from_address(begin)
    return np.ndarray(layout.shape, f"V{layout.dtype.itemsize}", there, taken.address - begin, layout.strides)


def _extent(part: Sequence[_CallersTensor]) -> tuple[int, int, int]:
    """The number of padding bytes that align a part's tensors, the address where its memory begins, and its size."""
    begin, end = min(each.range[0] for each in part), max(each.range[1] for each in part)
    tensors = [each for each in part if not each.is_array]
    anchor = max(tensors, key=lambda each: each.layout.dtype.itemsize, default=None)
    lead = (begin if anchor is None else begin - anchor.address) % _ALIGNMENT
    if any((each.address - begin + lead) % each.layout.dtype.itemsize for each in tensors):
        raise TraceError(
            "Two tensors of the trace share memory, and one of them begins within an element of the other. Give the trace a copy of one of "
            "them: `tensor.clone()`."
        )
    return lead, begin, end - begin


def _readable(part: Sequence[_CallersTensor], begin: int, size: int) -> tuple[Any, int]:
    """An object that keeps the part's memory readable in this process, and its address."""
    if part[0].device.type == "cpu":
        return part, begin
    flat = _stored(part, begin, size).cpu()
    return flat, flat.data_ptr()


def _stored(part: Sequence[_CallersTensor], begin: int, size: int) -> torch.Tensor:
    """The memory of tensors on another device, as flat uint8."""
    for each in part:
        storage = each.value.untyped_storage()  # type: ignore[union-attr]
        if storage.data_ptr() <= begin and begin + size <= storage.data_ptr() + storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=each.device)
            return flat.set_(storage, begin - storage.data_ptr(), (size,), (1,))  # type: ignore[call-overload,no-any-return]
    raise TraceError(
        "Tensors of the trace share memory that belongs to none of them. Give the trace copies: `tensor.clone()`."
    )


def _mixed(part: Sequence[_CallersTensor], name_of: Callable[[Any], str | None]) -> str:
    def named(each: _CallersTensor) -> str:
        kind = "numpy array" if each.is_array else "tensor"
        name = name_of(each.given)
        shape = list(each.layout.shape)
        return f"a {kind} {shape}" if name is None else f"{name} (a {kind} {shape})"

    array = next(each for each in part if each.is_array)
    tensor = next(each for each in part if not each.is_array)
    return (
        f"{named(tensor)} and {named(array)} share memory. A trace's tensors are on the model's device, and its arrays on the CPU, so a "
        "change of one would not change the other. Give the trace a copy of one of them, `array.copy()` or `tensor.clone()`."
    )


def _computed_again(part: Sequence[_CallersTensor]) -> dict[int, Any] | None:
    """The values of a part that needs gradients, by number; None for other parts.

    If all of them lie in one computed tensor, `clone` computes that tensor again. Otherwise they are the caller's own.
    """
    recorded = [each for each in part if not each.is_array and each.given.requires_grad]
    if not recorded:
        return None
    views = (each.given for each in recorded)
    root, *others = {id(base): base for base in (each if each._base is None else each._base for each in views)}.values()
    own = {each.number: each.given for each in part}
    is_given = root.is_leaf or any(each.given.is_leaf for each in recorded)
    if is_given or others or any(each.given.dtype != root.dtype for each in recorded):
        return own
    place, copy = _CallersTensor.of(-1, root), root.clone()
    begin, end = place.range
    inside = all(begin <= each.range[0] and each.range[1] <= end for each in part)
    plain = not any(flag for each in recorded for flag in (each.layout.is_conj, each.layout.is_neg))
    if copy.stride() != root.stride() or not inside or not plain:
        return own
    memory = torch.empty(0, dtype=torch.uint8, device=copy.device).set_(copy.untyped_storage())  # type: ignore[call-overload]
    for each in part:
        offset = each.address - place.address + int(copy.storage_offset()) * copy.element_size()
        if each.given is root:
            own[each.number] = copy
        elif each in recorded:
            own[each.number] = copy.as_strided(each.given.shape, each.given.stride(), offset // copy.element_size())
        else:
            own[each.number] = each.layout._replace(owns=False).over(memory, offset)
    return own


# In the worker.


def on_device(data: bytes, device: torch.device | None) -> torch.Tensor:
    """The bytes as flat uint8, in memory of their own."""
    with torch.inference_mode(False):
        flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        ctypes.memmove(flat.data_ptr(), data, len(data))
        return flat.to(device)


def values_of(head: Head, held: Mapping[str, torch.Tensor], device: torch.device | None) -> dict[int, Any]:
    """The tensors and arrays by number, for one body, or for several that share objects.

    Raises TraceError if a weight is missing, or if a tensor on a device other than the CPU shares memory with an array.
    """
    if head.mixed and device is not None and device.type != "cpu":
        raise TraceError(head.mixed[0])
    of_arrays = {place.block for place in head.places.values() if isinstance(place.layout.dtype, np.dtype)}
    memory = []
    for number, block in enumerate(head.blocks):
        there = _CPU if number in of_arrays else device
        memory.append(_private(held, block, there) if isinstance(block, str) else on_device(block, there))
    return {n: place.layout.over(memory[place.block], place.offset) for n, place in head.places.items()}


def _private(held: Mapping[str, torch.Tensor], digest: str, device: torch.device | None) -> torch.Tensor:
    """A held weight's content on the device, for a body to write to."""
    if digest not in held:
        raise TraceError("The engine no longer has a tensor that the trace uses. Run the trace again.")
    weight = held[digest]
    if device is not None and weight.device != device:
        return weight.to(device)
    if weight.is_cpu:
        return lazy_copy(weight)  # type: ignore[no-any-return]
    return weight.clone()  # CUDA's lazy copies run on another stream than the forward
