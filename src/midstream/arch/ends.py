"""What lies before the first block and after the last: the token embedding and the final norm."""

from __future__ import annotations

import torch

from midstream.arch.names import Names, is_linear, is_norm
from midstream.arch.probe import Call, Leaf, Probe
from midstream.arch.streams import Layout, entering_leaf, stream_leaves, stream_of
from midstream.sites import Binding


def planted_embedding(output: torch.Tensor) -> torch.Tensor:
    """Ones and twos in turn: a product keeps their ratio and a sum does not, whatever the weights are."""
    return (torch.arange(output.shape[-1], device=output.device) % 2 + 1).to(output.dtype).expand_as(output).clone()


def bind_embed(probe: Probe, first: Call, layout: Layout, names: Names) -> Binding | None:
    """The token embedding's output, times what the model multiplies it with on its way to the first block."""
    before = [call for call in probe.calls if 0 <= call.ended < first.started and _embeds(call)]
    named = [call for call in before if names.rank(call.path, "embed") is not None]
    largest = sorted(before, key=lambda call: -len(getattr(call.module, "weight", ())))
    call = min(named, key=lambda call: names.rank(call.path, "embed") or 0) if named else next(iter(largest), None)
    if call is None:
        return None
    out = next(leaf for leaf in call.outputs if leaf.floating)
    return Binding(call.path, "output", out.ref, scale=_scale(probe, first, call, out, entering_leaf(first, layout)))


def _embeds(call: Call) -> bool:
    """Whether this looked integers up."""
    takes_ids = any(not leaf.floating for leaf in call.inputs) and not any(leaf.floating for leaf in call.inputs)
    weight = getattr(call.module, "weight", None)
    return takes_ids and getattr(weight, "ndim", 0) == 2 and any(leaf.floating for leaf in call.outputs)


def _scale(probe: Probe, first: Call, embed: Call, out: Leaf, entering: Leaf) -> float:
    """What the planted embedding was multiplied with, read off what reached the first block.

    Doubling is exact in every float dtype, so the ratio to the planted values is the same everywhere, or it is no
    product. A norm in between is no scale either.
    """
    if out.shape[-1] != entering.shape[-1] or entering.snapshot is None:
        return 1.0
    between = [call for call in probe.calls if embed.ended < call.started and call.ended < first.started]
    for call in between:
        if _takes(call, out) and not any(leaf.same(out) for leaf in call.returned):
            return 1.0
    arrived = entering.snapshot.view(entering.tensor.dtype).view(-1, entering.shape[-1])
    factors = arrived / planted_embedding(arrived)
    factor = float(factors[0, 0])
    uniform = bool((factors == factor).all())
    return factor if uniform and factor not in (0.0, float("inf")) else 1.0


def _takes(call: Call, leaf: Leaf) -> bool:
    return any(taken.same(leaf) for taken in call.inputs)


def bind_final_norm(probe: Probe, last: Call, layout: Layout, names: Names) -> Binding | None:
    """The norm that reads what leaves the last block. A fused one returns a pair, of which the first is the value."""
    left = next(leaf for leaf in last.outputs if leaf.ref == layout.leaving)
    after = [call for call in probe.calls if call.started > last.ended]
    reads = [call for call in after if any(leaf.same(left) for leaf in call.inputs)]
    named = [call for call in after if names.rank(call.path, "final_norm") is not None]
    for call in [*reads, *named]:
        out = stream_leaves(call.outputs, stream_of(last))
        if out and not is_linear(call.module) and is_norm(call.module, call.path):
            return Binding(call.path, "output", out[0].ref)
    return None
