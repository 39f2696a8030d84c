"""`print(model)`: the module tree with the shapes of what its modules return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from midstream.arch.probe import Leaf, Probe


def shapes_of(probe: Probe, stream: Leaf) -> dict[str, str]:
    """path -> the shape of what the module's first call returned. T stands for the token axis, B for a batch axis before it.

    Engines pass a flat batch: if the ids that enter the model have no batch axis, a leading axis of 1 is shown as 1.
    """
    tokens = stream.shape[-2]
    flat = any(len(leaf.shape) == 1 for call in probe.calls[:1] for leaf in call.inputs if not leaf.floating)
    found: dict[str, str] = {}
    for call in probe.calls:
        if call.path not in found:
            found[call.path] = _written(call.result, tokens, flat)
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
    # With four axes tokens come third: [batch, heads, tokens, dim].
    order = [2, 1, 0] if len(shape) == 4 else [0] if len(shape) <= 2 else [1, 0]
    axis = next((axis for axis in order if axis < len(shape) and shape[axis] == tokens), None)
    if axis is not None:
        axes[axis] = "T"
        if axis > 0 and not flat:
            axes[0] = "B"
    return f"[{', '.join(axes)}]"


def show_tree(modules: Mapping[str, Any], shapes: Mapping[str, str], sites: Iterable[str]) -> str:
    """Indented lines `name: Class -> shape`, with equal neighbouring layers on one line.

    Args:
        modules: path -> module, or the name of its class.
        shapes: path -> shape of what it returned (`shapes_of`).
    """
    children: dict[str, list[str]] = {}
    for path in modules:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    lines = [_class_name(modules.get("", "model"))]
    _show("", 1, modules, shapes, children, lines)
    return "\n".join([*lines, f"sites: {', '.join(sites)}, logits, samples"])


def _class_name(module: Any) -> str:
    return module if isinstance(module, str) else type(module).__name__


def _show(
    parent: str,
    depth: int,
    modules: Mapping[str, Any],
    shapes: Mapping[str, str],
    children: Mapping[str, list[str]],
    lines: list[str],
) -> None:
    folded: tuple[str, ...] = ()
    first = 0
    for path in children.get(parent, ()):
        name = path.rpartition(".")[2]
        own: list[str] = []
        _show(path, depth + 1, modules, shapes, children, own)
        head = f"{_class_name(modules[path])}{f' -> {shapes[path]}' if path in shapes else ''}"
        look = (head, *own)
        if name.isdigit() and look == folded:
            lines[first] = f"{'  ' * depth}{_range(lines[first], name)}: {head}"
            continue
        folded, first = look, len(lines)
        lines += [f"{'  ' * depth}{name}: {head}", *own]


def _range(line: str, last: str) -> str:
    start = line.strip().partition(":")[0].partition("-")[0]
    return f"{start}-{last}"
