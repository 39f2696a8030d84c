"""Trees of tuples, lists, named tuples, dicts and transformers' ModelOutput, as modules take and return them; and the memory of tensors."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch

Ref = tuple[int | str, ...]  # where a tensor lies in a tree
T = TypeVar("T")


class Opaque:
    """A value that these functions treat as a leaf, because looking into it would count as using it."""


def leaves(tree: Any, at: Ref = ()) -> Iterator[tuple[Ref, torch.Tensor]]:
    """Each tensor in `tree`, with its place."""
    if isinstance(tree, Opaque):
        return
    if isinstance(tree, torch.Tensor):
        yield at, tree
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from leaves(item, (*at, i))
    elif hasattr(tree, "keys") and hasattr(tree, "__getitem__"):
        for name in tree.keys():  # noqa: SIM118 (ModelOutput iterates over its keys, mappings of other kinds need not)
            yield from leaves(tree[name], (*at, name))


def map_tensors(tree: Any, change: Callable[[Ref, Any], Any], at: Ref = ()) -> Any:
    """`tree` with every tensor replaced by `change(ref, tensor)`."""
    if isinstance(tree, Opaque):
        return tree
    if isinstance(tree, torch.Tensor):
        return change(at, tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, change, (*at, i)) for i, item in enumerate(tree)]
        return _with_items(tree, items)
    if hasattr(tree, "keys") and hasattr(tree, "__getitem__"):
        changed = {name: map_tensors(tree[name], change, (*at, name)) for name in tree.keys()}  # noqa: SIM118
        if isinstance(tree, dict) and not is_dataclass(tree):
            return _with_items(tree, changed)
        try:
            return type(tree)(**changed)  # transformers' ModelOutput, for one
        except TypeError as error:
            raise TypeError(
                f"A {type(tree).__name__} cannot be made again with other tensors in it; take a dict instead."
            ) from error
    return tree


def _with_items(tree: Any, items: Any) -> Any:
    """A container of the class of `tree`, with its attributes and other items. None of the class's own code runs."""
    kind = type(tree)
    if kind in (list, tuple, dict):
        return kind(items)
    if isinstance(tree, tuple):
        try:
            new = tuple.__new__(kind, items)
        except TypeError:  # a class in C, as those of `torch.max` and of shapes
            return kind(items)
    elif isinstance(tree, list):
        new = list.__new__(kind)
        list.extend(new, items)
    else:
        base: Any = next(each for each in (OrderedDict, defaultdict, dict) if isinstance(tree, each))
        new = base.__new__(kind)
        for name, item in items.items():
            base.__setitem__(new, name, item)
        if base is defaultdict:
            new.default_factory = tree.default_factory
    state = object.__getstate__(tree)  # type: ignore[attr-defined]
    for own in state if isinstance(state, tuple) else (state,):
        for name, value in (own or {}).items():
            object.__setattr__(new, name, value)
    return new


def follow(tree: Any, ref: Ref) -> Any:
    """The leaf of `tree` at `ref`."""
    for key in ref:
        tree = tree[key]
    return tree


def replaced(tree: Any, ref: Ref, leaf: Any) -> Any:
    """A copy of `tree` with another leaf at `ref`. The other leaves are shared."""
    if not ref:
        return leaf
    key, rest = ref[0], ref[1:]
    if isinstance(tree, dict) or hasattr(tree, "keys"):
        changed = type(tree)(**tree) if not isinstance(tree, dict) else type(tree)(tree)
        changed[key] = replaced(tree[key], rest, leaf)
        return changed
    items = list(tree)
    items[int(key)] = replaced(tree[key], rest, leaf)
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def shape_text(tree: Any, shape: Callable[[torch.Tensor], str] = lambda tensor: str(list(tensor.shape))) -> str:
    """A value's structure and shapes, as text: `[7, 64]`, `([7, 64], [7, 64])`, `{mask: [7]}`, `None`, `int`."""
    if isinstance(tree, torch.Tensor):
        return shape(tree)
    if isinstance(tree, (tuple, list)):
        inner = ", ".join(shape_text(item, shape) for item in tree)
        return f"({inner}{',' * (len(tree) == 1)})" if isinstance(tree, tuple) else f"[{inner}]"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key}: {shape_text(value, shape)}' for key, value in tree.items())}}}"
    return "None" if tree is None else type(tree).__name__


def objects_in(tree: Any, kind: type[T]) -> Iterator[T]:
    """The objects of class `kind` in nested tuples, lists and dicts."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from objects_in(each, kind)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from objects_in(each, kind)


def map_objects(tree: Any, kind: type, change: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Any:
    """`tree` with every object of class `kind` in its lists, dicts and tuples replaced. An object that occurs twice is replaced by one
    object.

    Args:
        known: the results so far, by the ids of the originals.
    """
    known = {} if known is None else known
    if (new := known.get(id(tree))) is not None:
        return new
    if isinstance(tree, kind):
        new = change(tree)
    elif type(tree) is list:
        new = known[id(tree)] = []  # it may contain itself
        new += [map_objects(item, kind, change, known) for item in tree]
    elif type(tree) is dict:
        new = known[id(tree)] = {}
        new |= {name: map_objects(item, kind, change, known) for name, item in tree.items()}
    elif type(tree) is tuple:
        new = tuple([map_objects(item, kind, change, known) for item in tree])
    else:
        return tree
    known[id(tree)] = new
    return new


def put_objects(tree: Any, kind: type, change: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Any:
    """As `map_objects`, but lists and dicts stay the same objects."""
    known = {} if known is None else known
    if isinstance(tree, kind):
        return known.setdefault(id(tree), change(tree))
    if id(tree) in known or type(tree) not in (list, dict, tuple):
        return known.get(id(tree), tree)
    known[id(tree)] = tree
    if type(tree) is tuple:
        new = tuple([put_objects(item, kind, change, known) for item in tree])
        known[id(tree)] = tree if all(map(operator.is_, new, tree)) else new
        return known[id(tree)]
    for place, item in list(enumerate(tree) if type(tree) is list else tree.items()):
        if (new := put_objects(item, kind, change, known)) is not item:
            tree[place] = new
    return tree


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by size in bytes


def is_raw(value: object) -> bool:
    """Whether a tensor is sent as bytes. Sparse, quantized, nested, meta and wrapper tensors are pickled instead."""
    if type(value) is not torch.Tensor and not isinstance(value, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A raw tensor's elements as integers of their size, which torch can always copy. A view, unless the tensor is a lazy conjugate or
    negative."""
    return tensor.detach().resolve_conj().resolve_neg().view(_BITS[tensor.element_size()])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A raw tensor's elements as flat uint8, row-major. A copy only if they are not contiguous."""
    bits = as_bits(tensor).contiguous()
    # Reshape would keep the odd stride of a single element.
    return bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not raw, in a form that can be pickled: on the CPU, in a layout that pickle supports."""
    if tensor.is_mkldnn:
        return tensor.to_dense()
    return tensor if tensor.is_cpu or tensor.is_meta else tensor.cpu()


def memory_of(tensor: torch.Tensor) -> int | None:
    """The address of the tensor's storage; None for sparse tensors and wrappers, which have none of their own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


# Lazy copies share memory until the first write to one of them. `data_ptr` and `numpy` make real copies of them.

_C: Any = torch._C


def lazy_copy(tensor: torch.Tensor) -> Any:
    """A copy of a tensor on the CPU that takes no memory until the first write to it or to the tensor."""
    return torch._lazy_clone(tensor)  # type: ignore[attr-defined]


def unwritten(tensor: torch.Tensor) -> Hashable | None:
    """The address and layout of the numbers of a lazy copy; None if it has memory of its own.

    Two tensors with equal results have equal content. The result stays valid while an unchanged lazy copy of the tensor lives.
    """
    if not (tensor.is_cpu and tensor.layout is torch.strided and _C._is_cow_tensor(tensor)):
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return _C._data_address(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits
