"""The site op: a site that is built into the compiled forward.

A forward hook on each decoder layer calls one opaque custom op, which Dynamo traces into the compiled graph. In a plain step
the op returns at once; under CUDA graphs nothing of it is even recorded. In a step with traces that keep to these sites the
op hands the residual stream to the interleaver, between the CUDA graphs of the compiled pieces (the op splits the graph as
attention does). Such a step gives up the full graph, not the compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from midstream.arch import Architecture
from midstream.sites import follow
from midstream.trace.visit import Key

SITE_OP = "midstream::site"
Fire = Callable[[int, torch.Tensor, torch.Tensor | None], None]
_library: torch.library.Library | None = None


class SiteOp:
    """What the op calls: None unless the step that runs has traces on graph sites."""

    fire: Fire | None = None


def _site(hidden: torch.Tensor, residual: torch.Tensor | None, layer: int) -> None:
    if SiteOp.fire is not None:
        SiteOp.fire(layer, hidden, residual)


def _register() -> None:
    """Define `midstream::site`, once a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("midstream", "FRAGMENT")
        _library.define("site(Tensor(a!) hidden, Tensor(b!)? residual, int layer) -> ()")
        for backend in ("CPU", "CUDA"):
            _library.impl("site", _site, backend)
        _library._register_fake("site", lambda hidden, residual, layer: None)


def graph_keys(arch: Architecture) -> dict[int, Key]:
    """Layer -> the point at which its `resid_post` goes by."""
    found = {layer: arch.bindings.get(("resid_post", layer)) for layer in arch.layers}
    return {
        layer: (b.path, b.kind) for layer, b in found.items() if b is not None and b.kind == "output" and b.scale == 1.0
    }


def build_in(model: nn.Module, arch: Architecture) -> None:
    """Put the op behind every layer. To be called before the model is compiled."""
    _register()
    for layer, key in graph_keys(arch).items():
        model.get_submodule(key[0]).register_forward_hook(_hook(layer, arch))


def _hook(layer: int, arch: Architecture) -> Callable[..., None]:
    binding = arch.bindings["resid_post", layer]
    hidden, residual = binding.hidden, binding.residual

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        second = follow(output, residual) if residual is not None else None
        torch.ops.midstream.site(follow(output, hidden), second, layer)

    return hook


def tree_at(arch: Architecture, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """What the layer returned, as far as its `resid_post` is concerned."""
    binding = arch.bindings["resid_post", layer]
    if not binding.hidden:
        return hidden
    leaves: list[torch.Tensor | None] = [None, None]
    leaves[int(binding.hidden[0])] = hidden
    if binding.residual is not None:
        leaves[int(binding.residual[0])] = residual
    return tuple(leaves)
