"""Records one forward pass: when each module was called, with which tensors, and the tensors that it returned.

`arch` asks where a tensor came from and where it went. Equal values do not show that (attention may return zeros in a dummy run), so
tensors are identified by their memory. The probe keeps every tensor alive, so that no address is used twice. Engines also overwrite buffers
in place. So the probe takes snapshots of the tensors of the modules in `watch`, and two leaves are the same value only if their snapshots
agree as well. `plant` replaces the outputs of some modules by known values, so that snapshots differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from midstream import hooks
from midstream.sites import Kind
from midstream.tree import Ref, replaced, shape_text
from midstream.tree import leaves as tree_leaves

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
        """Whether both hold the same value. A view of another shape does; a buffer that was overwritten in between does not."""
        a, b = self.tensor, other.tensor
        if (a.data_ptr(), a.numel(), a.dtype) != (b.data_ptr(), b.numel(), b.dtype):
            return False
        if self.snapshot is None or other.snapshot is None:
            return True
        return torch.equal(self.snapshot, other.snapshot)


@dataclass(eq=False)
class ModuleCall:
    """One call of one module. `returned` has the tensors that the module returned; `outputs` those that its caller got, planted or not."""

    path: str
    module: nn.Module
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    started: int
    inputs: list[Leaf]
    ended: int = -1
    returned: list[Leaf] = field(default_factory=list)
    outputs: list[Leaf] = field(default_factory=list)
    result: Any = None  # the output that the caller got, as a tree


@dataclass
class ProbeForward:
    """One recorded forward pass, with its calls in the order in which they began."""

    calls: list[ModuleCall] = field(default_factory=list)
    order: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    ticks: int = 0

    def tick(self, path: str, kind: Kind) -> int:
        first, _ = self.order.get((path, kind), (self.ticks, self.ticks))
        self.order[path, kind] = (first, self.ticks)
        self.ticks += 1
        return self.ticks - 1

    def first(self, path: str) -> ModuleCall | None:
        """The first finished call of this module."""
        return next((call for call in self.calls if call.path == path), None)

    def within(self, outer: ModuleCall, *, direct: bool = False) -> list[ModuleCall]:
        """The calls that ran inside `outer`: of all modules below it, or only of its direct children."""
        prefix = f"{outer.path}." if outer.path else ""
        inside = [c for c in self.calls if c.path.startswith(prefix) and outer.started < c.started < outer.ended]
        return [c for c in inside if "." not in c.path[len(prefix) :]] if direct else inside


def record(
    root: nn.Module, run: Callable[[], Any], *, watch: set[str], plant: Mapping[str, Plant], probe: ProbeForward
) -> ProbeForward:
    """Run `run` once and record every call in the tree of `root`. All hooks are removed afterwards.

    Args:
        probe: is filled. If `run` raises, it holds the calls so far, including unfinished ones.
        watch: paths of the modules whose tensors get snapshots.
        plant: path -> a function that makes the replacement of the module's first floating output with a token axis.
    """
    active: list[ModuleCall] = []

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = leaves((args, kwargs), snapshot=path in watch)
        call = ModuleCall(path, module, (args, kwargs), probe.tick(path, "input"), inputs)
        probe.calls.append(call)
        active.append(call)

    def end(path: str, output: Any) -> Any:
        call = active.pop()
        while call.path != path:  # that call raised, and its caller continued
            call = active.pop()
        call.returned = call.outputs = leaves(output, snapshot=path in watch)
        target = next((leaf for leaf in call.returned if leaf.floating and len(leaf.shape) > 1), None)
        if path in plant and target is not None:
            output = replaced(output, target.ref, plant[path](target.tensor))
            call.outputs = leaves(output, snapshot=path in watch)
        call.result = output
        call.ended = probe.tick(path, "output")
        return output

    with ExitStack() as stack:
        for path, module in root.named_modules():
            see_input, see_output = partial(begin, path, module), partial(end, path)
            if hooks.skips_hooks(module):
                stack.callback(hooks.around(module, see_input, see_output).remove)
            else:
                stack.callback(hooks.before(module, see_input).remove)
                stack.callback(hooks.after(module, see_output).remove)
        with torch.no_grad():
            run()
    probe.calls = [call for call in probe.calls if call.ended >= 0]
    return probe


def leaves(tree: Any, *, snapshot: bool = False) -> list[Leaf]:
    """The tensors in a tree, with their places in it."""
    found = [(ref, tensor) for ref, tensor in tree_leaves(tree) if tensor.numel()]
    return [Leaf(ref, tensor, tuple(tensor.shape), _bits(tensor) if snapshot else None) for ref, tensor in found]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to compare: bytes, since a NaN equals nothing, and flat, since a view of another shape is the same value."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def planted_embedding(output: torch.Tensor) -> torch.Tensor:
    """Alternating ones and twos: a product keeps their ratio and a sum does not, whatever the weights are."""
    return (torch.arange(output.shape[-1], device=output.device) % 2 + 1).to(output.dtype).expand_as(output).clone()


def shapes_of(probe: ProbeForward, stream: Leaf) -> dict[str, str]:
    """path -> the shape of the output of the module's first call. T stands for the token axis, B for a batch axis before it.

    Engines pass a flat batch: if the ids that enter the model have no batch axis, a leading axis of 1 is shown as 1.
    """
    tokens = stream.shape[-2]
    flat = any(len(leaf.shape) == 1 for call in probe.calls[:1] for leaf in call.inputs if not leaf.floating)
    found: dict[str, str] = {}
    for call in probe.calls:
        if call.path not in found:
            found[call.path] = shape_text(call.result, lambda tensor: _shape(tuple(tensor.shape), tokens, flat))
    return found


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
