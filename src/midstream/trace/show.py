"""`print(model)`: the module tree with the shapes that its modules return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def show_tree(modules: Mapping[str, Any], shapes: Mapping[str, str], sites: Iterable[str]) -> str:
    """Lines `name: Class -> shape`, indented; runs of layers that look the same are folded into one.

    Args:
        modules: path -> module, or the name of its class.
        shapes: path -> what it returned in the probe, T for the tokens.
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
