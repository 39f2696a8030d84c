"""The site op: sites that are built into the compiled forward.

A forward hook at each of them calls one opaque custom op, which Dynamo traces into the compiled graph. In a plain step the op
returns at once; under CUDA graphs nothing of it is even recorded. Graphs are recorded a second time with the plans' kernel in them, for
the steps in which a plan acts. In a step with traces that keep to these sites the op hands the residual stream to the interleaver, from
compiled code (see `pieces`). Such a step gives up the full graph, not the compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._library.opaque_object import get_opaque_type_name
from vllm.utils.torch_utils import LayerName

from midstream import hooks
from midstream.arch import Architecture
from midstream.sites import Binding, Point, follow
from midstream.trace.body import is_in_body

Fire = Callable[[int, torch.Tensor, torch.Tensor | None], None]
_library: torch.library.Library | None = None


class SiteOp:
    """What the op calls with a point's index.

    Attributes:
        edit: applies plans; None unless one acts in the step.
        fire: wakes traces; None unless the step has some that keep to graph sites.
    """

    edit: Fire | None = None
    fire: Fire | None = None

    @classmethod
    @contextlib.contextmanager
    def editing(cls, edit: Fire) -> Iterator[None]:
        """Call `edit` in the block."""
        cls.edit = edit
        try:
            yield
        finally:
            cls.edit = None


def _site(hidden: torch.Tensor, residual: torch.Tensor | None, point: LayerName) -> None:
    if is_in_body():  # a trace's code calls a layer on a value of its own
        return
    if SiteOp.edit is not None:
        SiteOp.edit(int(point.value), hidden, residual)
    if SiteOp.fire is not None:
        SiteOp.fire(int(point.value), hidden, residual)


def _register() -> None:
    """Define `midstream::site`, once a process.

    The point is vLLM's own type for what differs from layer to layer: compiled graphs get it as an input. With a number in it, each
    layer's piece would be compiled by itself, where vLLM compiles one for all.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("midstream", "FRAGMENT")
        kind = get_opaque_type_name(LayerName)
        _library.define(f"site(Tensor(a!) hidden, Tensor(b!)? residual, {kind} point) -> ()")
        for backend in ("CPU", "CUDA"):
            _library.impl("site", _site, backend)
        _library._register_fake("site", lambda hidden, residual, point: None)


def buildable_points(arch: Architecture, sites: Sequence[str]) -> list[Point]:
    """The (site, layer) of `sites` that can be built in."""
    found = [(site, layer) for site in sites for layer in arch.layers if (site, layer) in arch.bindings]
    full = [point for point in found if arch.shard_of(arch.bindings[point]) is None]
    return [point for point in full if _is_plain(arch.bindings[point], point[0])]


def _is_plain(binding: Binding, site: str) -> bool:
    """Whether the value is a tensor of the forward, or the sum of two streams."""
    beside_a_bias = site in ("attn_out", "mlp_out") and binding.residual is not None
    return binding.scale == 1.0 and not beside_a_bias


def build_in(model: nn.Module, arch: Architecture, points: Sequence[Point], index: Callable[[Point], int]) -> None:
    """Put the op at each of `points`, called with its index. To be called before the model is compiled."""
    _register()
    for point in points:
        binding = arch.bindings[point]
        module = model.get_submodule(binding.path)
        if binding.kind == "input":
            hooks.before(module, _on_input(point, arch, index(point)))
        else:
            hooks.after(module, _on_output(point, arch, index(point)))


def _call(tree: Any, point: Point, arch: Architecture, index: int) -> None:
    binding = arch.bindings[point]
    second = follow(tree, binding.residual) if binding.residual is not None else None
    torch.ops.midstream.site(follow(tree, binding.hidden), second, LayerName(str(index)))


def _on_output(point: Point, arch: Architecture, index: int) -> Callable[[Any], None]:
    return lambda output: _call(output, point, arch, index)


def _on_input(point: Point, arch: Architecture, index: int) -> Callable[[Any, Any], None]:
    return lambda args, kwargs: _call((args, kwargs), point, arch, index)
