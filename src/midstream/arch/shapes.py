"""The shapes that a forward pass showed, written for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from midstream.arch.probe import Leaf, Probe
from midstream.sites import Binding


def shapes_of(probe: Probe, stream: Leaf) -> dict[str, str]:
    """Path to the shape of what its first call returned: T for the token axis, B for a batch axis before it.

    Engines pass a flat batch: where the ids that enter the model have no batch axis, a leading axis of 1 is just that.
    """
    tokens = stream.shape[-2]
    flat = any(len(leaf.shape) == 1 for call in probe.calls[:1] for leaf in call.inputs if not leaf.floating)
    found: dict[str, str] = {}
    for call in probe.calls:
        if call.path not in found:
            found[call.path] = _written(call.result, tokens, flat)
    return found


def widths_of(probe: Probe, bindings: Mapping[tuple[str, int | None], Binding]) -> dict[tuple[str, int | None], int]:
    """How many elements one token of each binding's value has."""
    calls = {call.path: call for call in reversed(probe.calls)}
    found: dict[tuple[str, int | None], int] = {}
    for point, binding in bindings.items():
        call = calls[binding.path]
        leaves = call.inputs if binding.kind == "input" else call.returned
        found[point] = next(leaf for leaf in leaves if leaf.ref == binding.hidden).shape[-1]
    return found


def _written(tree: Any, tokens: int, flat: bool) -> str:
    if isinstance(tree, torch.Tensor):
        return _shape(tuple(tree.shape), tokens, flat)
    if isinstance(tree, (tuple, list)):
        inner = [_written(item, tokens, flat) for item in tree]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {_written(value, tokens, flat)}' for key, value in tree.items())}}}"
    return "None" if tree is None else type(tree).__name__


def _shape(shape: tuple[int, ...], tokens: int, flat: bool) -> str:
    axes = [str(size) for size in shape]
    # [batch, heads, tokens, dim] is the one layout with tokens this far in.
    order = [2, 1, 0] if len(shape) == 4 else [0] if len(shape) <= 2 else [1, 0]
    axis = next((axis for axis in order if axis < len(shape) and shape[axis] == tokens), None)
    if axis is not None:
        axes[axis] = "T"
        if axis > 0 and not flat:
            axes[0] = "B"
    return f"[{', '.join(axes)}]"
