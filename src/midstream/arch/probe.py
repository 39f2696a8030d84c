"""Records one forward pass: which module was called when, with which tensors, and what came out.

`arch` asks where a tensor came from and where it went. Values cannot tell (a dummy run may have attention outputs of
zeros), so tensors are told apart by their memory: every tensor seen is kept alive, so that no address is used twice.
Engines also overwrite a buffer in place, so the modules that matter are watched: their tensors are snapshotted, and two
leaves are the same value only if the snapshots agree too. For that to mean something, known values are planted: where
`plant` names a module, its output is replaced for the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from midstream.sites import Kind, Ref, replaced

Plant = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor that went into a module or came out of it."""

    ref: Ref
    tensor: torch.Tensor
    shape: tuple[int, ...]
    snapshot: torch.Tensor | None = None

    @property
    def floating(self) -> bool:
        return self.tensor.is_floating_point()

    @property
    def name(self) -> str:
        return str(self.ref[-1]) if self.ref else ""

    def same(self, other: Leaf) -> bool:
        """Whether both are one value. A view of another shape is the same value; a buffer written in between is not."""
        a, b = self.tensor, other.tensor
        if (a.data_ptr(), a.numel(), a.dtype) != (b.data_ptr(), b.numel(), b.dtype):
            return False
        if self.snapshot is None or other.snapshot is None:
            return True
        return torch.equal(self.snapshot, other.snapshot)


@dataclass(eq=False)
class Call:
    """One call of one module. `returned` is what it computed, `outputs` what its caller got instead if planted."""

    path: str
    module: nn.Module
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    started: int
    inputs: list[Leaf]
    ended: int = -1
    returned: list[Leaf] = field(default_factory=list)
    outputs: list[Leaf] = field(default_factory=list)
    result: Any = None  # the tree that `returned` was found in


@dataclass
class Probe:
    """One recorded forward pass, calls in the order in which they began."""

    calls: list[Call] = field(default_factory=list)
    order: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    ticks: int = 0

    def tick(self, path: str, kind: Kind) -> int:
        first, _ = self.order.get((path, kind), (self.ticks, self.ticks))
        self.order[path, kind] = (first, self.ticks)
        self.ticks += 1
        return self.ticks - 1

    def first(self, path: str) -> Call | None:
        """The first finished call of this module."""
        return next((call for call in self.calls if call.path == path), None)

    def within(self, outer: Call, *, direct: bool = False) -> list[Call]:
        """The calls made by `outer`, of its direct children or of all modules below it."""
        prefix = f"{outer.path}." if outer.path else ""
        inside = [c for c in self.calls if c.path.startswith(prefix) and outer.started < c.started < outer.ended]
        return [c for c in inside if "." not in c.path[len(prefix) :]] if direct else inside


def record(
    root: nn.Module, run: Callable[[], Any], *, watch: set[str], plant: Mapping[str, Plant], probe: Probe
) -> Probe:
    """Runs `run` once and records every call in the tree of `root`; no trace of it is left on the modules.

    Args:
        probe: what to fill. If `run` raises, it holds the calls up to there, unfinished ones included.
        watch: paths of the modules whose tensors are snapshotted.
        plant: for some paths, what the first floating output with a token axis is replaced by.
    """
    recorder = _Recorder(probe, watch, plant)
    with ExitStack() as stack:
        for path, module in root.named_modules():
            stack.enter_context(recorder.attached(path, module))
        with torch.no_grad():
            run()
    probe.calls = [call for call in probe.calls if call.ended >= 0]
    return probe


class _Recorder:
    def __init__(self, probe: Probe, watch: set[str], plant: Mapping[str, Plant]) -> None:
        self.probe, self.watch, self.plant = probe, watch, plant
        self.active: list[Call] = []

    @contextmanager
    def attached(self, path: str, module: nn.Module) -> Iterator[None]:
        """Hooks on `module` while it lasts, and a wrapped `forward` where a class has its own `__call__`.

        vLLM's compiled models call `self.forward` from theirs, past all hooks; transformers' layers go on to
        `nn.Module.__call__`, where the hooks have then seen the call already.
        """

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.begin(path, module, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return self.end(path, output)

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        own_call = type(module).__call__ is not nn.Module.__call__
        kept = module.__dict__.get("forward")
        if own_call:
            module.__dict__["forward"] = self.wrapped(path, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if own_call:
                del module.__dict__["forward"]
                if kept is not None:
                    module.__dict__["forward"] = kept

    def wrapped(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.active and self.active[-1].module is module:
                return forward(*args, **kwargs)
            self.begin(path, module, args, kwargs)
            return self.end(path, forward(*args, **kwargs))

        return recorded

    def begin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = leaves((args, kwargs), snapshot=path in self.watch)
        call = Call(path, module, (args, kwargs), self.probe.tick(path, "input"), inputs)
        self.probe.calls.append(call)
        self.active.append(call)

    def end(self, path: str, output: Any) -> Any:
        call = self.active.pop()
        while call.path != path:  # a call that raised, and whose caller went on
            call = self.active.pop()
        watched = call.path in self.watch
        call.returned = call.outputs = leaves(output, snapshot=watched)
        plant = self.plant.get(call.path)
        target = next((leaf for leaf in call.returned if leaf.floating and len(leaf.shape) > 1), None)
        if plant is not None and target is not None:
            output = replaced(output, target.ref, plant(target.tensor))
            call.outputs = leaves(output, snapshot=watched)
        call.result = output
        call.ended = self.probe.tick(call.path, "output")
        return output


def leaves(tree: Any, ref: Ref = (), *, snapshot: bool = False) -> list[Leaf]:
    """The tensors of a tree of tuples, lists and mappings, with where they lie."""
    if isinstance(tree, torch.Tensor):
        if tree.numel() == 0:
            return []
        return [Leaf(ref, tree, tuple(tree.shape), _bits(tree) if snapshot else None)]
    if isinstance(tree, (tuple, list)):
        items: Any = enumerate(tree)
    elif isinstance(tree, Mapping) or hasattr(tree, "to_tuple"):
        items = tree.items()
    else:
        return []
    return [leaf for key, value in items for leaf in leaves(value, (*ref, key), snapshot=snapshot)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to compare by: as bytes, since a NaN equals nothing, and flat, since a view is the same value."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
