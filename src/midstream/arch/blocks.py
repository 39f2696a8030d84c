"""The place of each site's value: the residual stream that enters and leaves the blocks, and the sites inside a block.

The stream is one tensor, or the sum of two; the next block decides which. A block may return several tensors of the stream's shape; the
stream consists of those that the next block takes and uses together. StableLM returns a second tensor that no block takes, and Command-R
one that the next block takes and ignores: adding those would count them twice.

A module's name only makes it a candidate: the probe (`probe.py`) shows its role in the forward pass. The user's names come before the
standard ones: `rename={"my_blocks": "layers", "mixer": "attn"}`, where a key is a name or the end of a dotted path.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from midstream.arch.aliases import Aliases, ends_with
from midstream.arch.probe import Leaf, ModuleCall, ProbeForward, planted_embedding
from midstream.errors import ArchitectureError
from midstream.sites import Binding
from midstream.tree import Ref, follow

STANDARD: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "h", "blocks", "block", "layer", "decoder_layers", "transformer_blocks"),
    "attn": ("self_attn", "attn", "attention", "self_attention", "self_attn_block", "attn_block"),
    "mlp": ("mlp", "feed_forward", "feedforward", "ffn", "ff", "block_sparse_moe", "sparse_moe", "moe", "mlp_block"),
    "router": ("gate", "router", "wg"),
    "embed": ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embedding", "embeddings"),
    "final_norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f", "ln_out"),
    "attn_proj": ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "out"),
    "mlp_proj": ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "proj"),
}
ROLES = tuple(STANDARD)

# Blocks that have the two linear layers of the MLP as direct children, with no MLP module around them (OPT, XGLM).
BARE_MLP = (("fc1", "fc2"), ("fc_in", "fc_out"), ("linear1", "linear2"))

ROUTER_LOGITS = "midstream_logits"  # the module that `routers` puts into a router
HEADS = "midstream_heads"  # the module that `heads` puts into an attention

PREFERRED = ("hidden_states", "hidden_state", "x", "inputs")


class RoleNames:
    """The user's names for each role, followed by the standard ones."""

    def __init__(self, aliases: Aliases) -> None:
        self._own: dict[str, list[str]] = {}
        for name, roles in aliases.by_path().items():
            for role in roles:
                self._own.setdefault(role, []).append(name)

    def own(self, role: str) -> list[str]:
        """The user's names for this role."""
        return self._own.get(role, [])

    def rank(self, path: str, role: str) -> int | None:
        """How well the name of `path` fits `role`: 0 is best, and None means no match."""
        candidates = [*self.own(role), *STANDARD[role]]
        for rank, name in enumerate(candidates):
            if ends_with(path, name):
                return rank
        return None

    def child(self, module: nn.Module, path: str, role: str) -> str | None:
        """The path of the direct child of `module` whose name fits `role` best."""
        ranked = [(self.rank(f"{path}.{name}", role), f"{path}.{name}") for name, _ in module.named_children()]
        named = [(rank, child) for rank, child in ranked if rank is not None]
        return min(named)[1] if named else None


@dataclass(frozen=True)
class StreamLayout:
    """The leaves of a block's call that hold the residual stream. `*_second` is None if the stream is one tensor."""

    entering: Ref
    entering_second: Ref | None
    leaving: Ref
    leaving_second: Ref | None


def stream_leaves(found: list[Leaf], like: Leaf) -> list[Leaf]:
    """The leaves with the stream's width and number of tokens; those named like hidden states come first."""
    wide = [
        leaf
        for leaf in found
        if leaf.floating and leaf.shape[-1:] == like.shape[-1:] and leaf.tensor.numel() == like.tensor.numel()
    ]
    return sorted(wide, key=lambda leaf: leaf.name not in PREFERRED)


def stream_of(call: ModuleCall) -> Leaf:
    """The first floating tensor with a token axis that a block returns. It has the stream's shape."""
    leaf = next((leaf for leaf in call.outputs if leaf.floating and len(leaf.shape) > 1), None)
    if leaf is None:
        raise ArchitectureError(
            f"{call.path} ({type(call.module).__name__}) returned {describe(call.outputs)}; expected the hidden "
            f"states, a floating tensor [tokens, hidden], as the output or its first element"
        )
    if not any(other.shape == leaf.shape for other in call.inputs if other.floating):
        raise ArchitectureError(
            f"{call.path} ({type(call.module).__name__}) was called with {describe(call.inputs)} and returned "
            f"{describe(call.outputs)}; expected a floating argument of the same shape as the hidden states that it "
            f"returns, {list(leaf.shape)}"
        )
    return leaf


def find_layout(probe: ProbeForward, blocks: list[ModuleCall]) -> StreamLayout:
    """The layout that the blocks share, found by comparing the tensors that each block returns with those that the next one takes.

    The majority decides, since a model may change one of the two tensors between some of its blocks.
    """
    for block in blocks:
        stream_of(block)
    check_rows(probe, blocks[0])
    seen = Counter(layout for pair in pairwise(blocks) if (layout := _handover(probe, *pair)) is not None)
    return seen.most_common(1)[0][0] if seen else _alone(probe, blocks[0])


def check_rows(probe: ProbeForward, block: ModuleCall) -> None:
    """Raise ArchitectureError unless the stream has one row for each token. Several streams side by side have more (Gemma 3n)."""
    like = stream_of(block)
    rows = like.tensor.numel() // like.shape[-1]
    ids = [leaf for call in probe.calls[:1] for leaf in call.inputs if not leaf.floating and leaf.shape]
    counts = {count for leaf in ids for count in (leaf.tensor.numel(), leaf.shape[-1])}
    if counts and rows not in counts:
        raise ArchitectureError(
            f"{block.path} ({type(block.module).__name__}) returned {describe(block.outputs)} for {ids[0].tensor.numel()} tokens; expected "
            "one residual stream, with one row of hidden states for each token. midstream does not support models with several streams"
        )


def _handover(probe: ProbeForward, block: ModuleCall, following: ModuleCall) -> StreamLayout | None:
    like = stream_of(block)
    check_shapes(block, following)
    alike = [out for out in block.outputs if out.floating and out.shape == like.shape]
    taken = [(out, next((leaf for leaf in following.inputs if leaf.same(out)), None)) for out in alike]
    streams = [(out, into) for out, into in taken if into is not None]
    if not streams:
        return None
    (first, into_first), *rest = streams
    if rest and _used_together(probe, following, into_first, rest[0][1]):
        second, into_second = rest[0]
        return StreamLayout(into_first.ref, into_second.ref, first.ref, second.ref)
    return StreamLayout(into_first.ref, None, first.ref, None)


def check_shapes(block: ModuleCall, following: ModuleCall) -> None:
    """Raise ArchitectureError if a block passes two floating tensors of different shapes to the next."""
    passed = [out for out in block.outputs if out.floating and any(leaf.same(out) for leaf in following.inputs)]
    if len(block.outputs) == 2 and len({out.shape for out in passed}) > 1:
        raise ArchitectureError(
            f"{block.path} hands two streams of different shapes to {following.path}: {describe(block.outputs)}; "
            f"expected hidden states and residual of one shape"
        )


def _used_together(probe: ProbeForward, block: ModuleCall, hidden: Leaf, residual: Leaf) -> bool:
    """Whether the first module in a block that takes the hidden states takes the residual as well.

    If no module takes the hidden states, the block itself adds the two.
    """
    for call in probe.within(block):
        if any(leaf.same(hidden) for leaf in call.inputs):
            return any(leaf.same(residual) for leaf in call.inputs)
    return True


def _alone(probe: ProbeForward, block: ModuleCall) -> StreamLayout:
    """The layout if no block passes a tensor to the next: there is only one block, or the model changes the stream between blocks."""
    like = stream_of(block)
    leaving = [leaf for leaf in block.outputs if leaf.floating and leaf.shape == like.shape]
    entering = stream_leaves(block.inputs, like)
    second = _residual_argument(block)
    taken = [stream_leaves(call.inputs, like) for call in probe.within(block, direct=True)]
    fused = any(len(found) > 1 and not found[0].same(found[1]) for found in taken)
    if len(leaving) == 2 and second is not None and fused:
        first = next(leaf for leaf in entering if leaf.ref != second)
        return StreamLayout(first.ref, second, leaving[0].ref, leaving[1].ref)
    return StreamLayout(entering[0].ref, None, like.ref, None)


def _residual_argument(block: ModuleCall) -> Ref | None:
    """The place of the argument named residual. The first block of a model gets None for this argument."""
    args, kwargs = block.tree
    names = list(inspect.signature(type(block.module).forward).parameters)[1:]
    for position, name in enumerate(names):
        if "residual" in name:
            return (0, position) if position < len(args) else (1, name) if name in kwargs else None
    return None


def bind_streams(block: ModuleCall, index: int, layout: StreamLayout) -> dict[tuple[str, int | None], Binding]:
    """`resid_pre` and `resid_post` of one block. Raises ArchitectureError if its call does not fit the layout."""
    like = stream_of(block)
    first = next((leaf for leaf in block.inputs if leaf.ref == layout.entering), None)
    if first is None or first.shape != like.shape:
        raise ArchitectureError(
            f"{block.path} was called with {describe(block.inputs)}; expected hidden states of shape "
            f"{list(like.shape)} at {'' if layout.entering[0] == 1 else 'positional '}argument {layout.entering[1]!r}, as in the other "
            "layers"
        )
    leaving = {leaf.ref: leaf for leaf in block.outputs if leaf.floating}
    for ref in filter(lambda ref: ref is not None, (layout.leaving, layout.leaving_second)):
        if ref not in leaving or leaving[ref].shape != like.shape:
            raise ArchitectureError(
                f"{block.path} returned {describe(block.outputs)}; expected a floating tensor of shape "
                f"{list(like.shape)} at {ref}, as in the other layers"
            )
    second = layout.entering_second if _present(block, layout.entering_second) else None
    return {
        ("resid_pre", index): Binding(block.path, "input", layout.entering, second),
        ("resid_post", index): Binding(block.path, "output", layout.leaving, layout.leaving_second),
    }


def _present(block: ModuleCall, ref: Ref | None) -> bool:
    """Whether the call has this argument, even if it is None."""
    if ref is None:
        return False
    try:
        follow(block.tree, ref)
    except (LookupError, TypeError):
        return False
    return True


def entering_leaf(block: ModuleCall, layout: StreamLayout) -> Leaf:
    return next(leaf for leaf in block.inputs if leaf.ref == layout.entering)


def describe(found: list[Leaf]) -> str:
    """Tensors in words, for messages."""
    if not found:
        return "no tensor"
    return ", ".join(f"{leaf.name or 'tensor'}: {str(leaf.tensor.dtype)[6:]}{list(leaf.shape)}" for leaf in found)


def bind_embed(probe: ProbeForward, first: ModuleCall, layout: StreamLayout, names: RoleNames) -> Binding | None:
    """The token embedding's output, times the factor that the model applies before the first block."""
    before = [call for call in probe.calls if 0 <= call.ended < first.started and _embeds(call)]
    named = [call for call in before if names.rank(call.path, "embed") is not None]
    largest = sorted(before, key=lambda call: -len(getattr(call.module, "weight", ())))
    call = min(named, key=lambda call: names.rank(call.path, "embed") or 0) if named else next(iter(largest), None)
    if call is None:
        return None
    out = next(leaf for leaf in call.outputs if leaf.floating)
    return Binding(call.path, "output", out.ref, scale=_scale(probe, first, call, out, entering_leaf(first, layout)))


def _embeds(call: ModuleCall) -> bool:
    """Whether this call looked up integers in a table."""
    takes_ids = any(not leaf.floating for leaf in call.inputs) and not any(leaf.floating for leaf in call.inputs)
    weight = getattr(call.module, "weight", None)
    return takes_ids and getattr(weight, "ndim", 0) == 2 and any(leaf.floating for leaf in call.outputs)


def _scale(probe: ProbeForward, first: ModuleCall, embed: ModuleCall, out: Leaf, entering: Leaf) -> float:
    """The factor between the planted embedding and the tensor that reached the first block; 1.0 if they are not proportional.

    Doubling is exact in every float dtype, so a product has the same ratio to the planted values everywhere. A norm in between is not a
    factor.
    """
    if out.shape[-1] != entering.shape[-1] or entering.snapshot is None:
        return 1.0
    between = [call for call in probe.calls if embed.ended < call.started and call.ended < first.started]
    for call in between:
        if any(leaf.same(out) for leaf in call.inputs) and not any(leaf.same(out) for leaf in call.returned):
            return 1.0
    arrived = entering.snapshot.view(entering.tensor.dtype).view(-1, entering.shape[-1])
    factors = arrived / planted_embedding(arrived)
    factor = float(factors[0, 0])
    uniform = bool((factors == factor).all())
    return factor if uniform and factor not in (0.0, float("inf")) else 1.0


def bind_final_norm(probe: ProbeForward, last: ModuleCall, layout: StreamLayout, names: RoleNames) -> Binding | None:
    """The norm that reads the last block's output. A fused norm returns a pair, whose first element is the value."""
    left = next(leaf for leaf in last.outputs if leaf.ref == layout.leaving)
    after = [call for call in probe.calls if call.started > last.ended]
    reads = [call for call in after if any(leaf.same(left) for leaf in call.inputs)]
    named = [call for call in after if names.rank(call.path, "final_norm") is not None]
    for call in [*reads, *named]:
        out = stream_leaves(call.outputs, stream_of(last))
        if out and not is_linear(call.module) and is_norm(call.module, call.path):
            return Binding(call.path, "output", out[0].ref)
    return None


def returns_norm(probe: ProbeForward, norm: Binding, like: Leaf) -> bool:
    """False if the model changes the final norm's value, such as by a factor, before returning it. True if it returns no hidden states."""
    root, call = probe.calls[0], next(call for call in probe.calls if call.path == norm.path)
    returned = stream_leaves(root.returned, like) if not root.path else []
    value = next(leaf for leaf in call.outputs if leaf.ref == norm.hidden)
    return not returned or returned[0].same(value)


Sites = dict[tuple[str, int | None], Binding]


@dataclass(frozen=True)
class SubLayer:
    """Attention or MLP of one block: one module, or two linear layers that are direct children of the block."""

    first: ModuleCall
    last: ModuleCall
    projection: ModuleCall | None  # the call of the output projection
    source: Leaf  # the input of `first`


class DecoderBlock:
    """One block's call, its attention and MLP, and the bindings of its sites."""

    def __init__(self, probe: ProbeForward, call: ModuleCall, layout: StreamLayout, names: RoleNames) -> None:
        self.probe, self.call, self.layout, self.names = probe, call, layout, names
        self.like = stream_of(call)
        self.children = probe.within(call, direct=True)
        self.attn = self._part("attn", "attn_proj")
        self.mlp = self._part("mlp", "mlp_proj") or self._bare_mlp()

    def bind(self, index: int, config: Any, head_dim: int | None) -> Sites:
        """The bindings of this block, except `resid_pre` and `resid_post` (see `bind_streams`)."""
        sites: dict[str, Binding | None] = {}
        if self.attn is not None:
            sites["attn_in"] = Binding(self.attn.first.path, "input", self.attn.source.ref)
            sites["attn_out"] = self._added(self.attn)
            sites |= self._attended(self.attn)
            sites["attn_z"] = self._heads(self.attn, config, head_dim)
        if self.mlp is not None:
            sites["mlp_in"] = Binding(self.mlp.first.path, "input", self.mlp.source.ref)
            sites["router"] = self._router(self.mlp)
            sites["mlp_out"] = self._added(self.mlp)
            sites["mlp_act"] = self._neurons(self.mlp)
        if self.attn is not None and self.mlp is not None:
            sites["resid_mid"] = self._middle(self.attn, self.mlp)
        return {(name, index): binding for name, binding in sites.items() if binding is not None}

    def _part(self, role: str, projection_role: str) -> SubLayer | None:
        path = self.names.child(self.call.module, self.call.path, role)
        call = next((child for child in self.children if child.path == path), None)
        if call is None:
            return None
        source, raw = stream_leaves(call.inputs, self.like), stream_leaves(call.returned, self.like)
        if not source or not raw:
            return None
        return SubLayer(call, call, self._projection(call, raw[0], projection_role), source[0])

    def _bare_mlp(self) -> SubLayer | None:
        byname = {child.path.rpartition(".")[2]: child for child in self.children}
        for up, down in BARE_MLP:
            if up in byname and down in byname:
                source = stream_leaves(byname[up].inputs, self.like)
                if source and stream_leaves(byname[down].returned, self.like):
                    return SubLayer(byname[up], byname[down], byname[down], source[0])
        return None

    def _projection(self, call: ModuleCall, raw: Leaf, role: str) -> ModuleCall | None:
        """The linear layer whose output the module returns, else the last one named like an output projection."""
        linears = [inner for inner in self.probe.within(call) if is_linear(inner.module)]
        for inner in reversed(linears):
            if any(leaf.same(raw) for leaf in inner.returned):
                return inner
        wide = [inner for inner in linears if stream_leaves(inner.returned, self.like)]
        named = [inner for inner in wide if self.names.rank(inner.path, role) is not None]
        return named[-1] if named else None

    def _added(self, part: SubLayer) -> Binding | None:
        """The value that attention or the MLP adds to the stream: its output, after the norm of that output if the block has one."""
        if self._takes_residual(part):  # BLOOM, MPT: its output includes the residual
            if part.projection is None:
                return None
            out = stream_leaves(part.projection.returned, self.like)[0]
            return Binding(part.projection.path, "output", out.ref)
        out = stream_leaves(part.last.outputs, self.like)[0]
        norm = self._norm_of(out, after=part.last.ended)
        if norm is not None:
            return Binding(norm.path, "output", stream_leaves(norm.outputs, self.like)[0].ref)
        width = self.like.shape[-1]
        bias = [leaf for leaf in part.last.outputs if leaf.floating and leaf.shape == (width,) and leaf.ref == (1,)]
        return Binding(part.last.path, "output", out.ref, bias[0].ref if bias else None)

    def _takes_residual(self, part: SubLayer) -> bool:
        return any(not leaf.same(part.source) for leaf in stream_leaves(part.first.inputs, self.like))

    def _norm_of(self, out: Leaf, after: int) -> ModuleCall | None:
        """The norm that takes only this tensor. A fused add and norm takes two."""
        for norm in self._norms(after, self.call.ended):
            taken = stream_leaves(norm.inputs, self.like)
            if len(taken) == 1 and taken[0].same(out):
                return norm
        return None

    def _norms(self, after: int, before: int) -> list[ModuleCall]:
        """The block's own norms that run between two moments."""
        between = [child for child in self.children if after < child.started and child.ended < before]
        return [child for child in between if is_norm(child.module, child.path)]

    def _middle(self, attn: SubLayer, mlp: SubLayer) -> Binding | None:
        """The stream between attention and MLP: the input of the norm before the MLP, or of the MLP itself.

        None for a parallel block, whose norm runs before attention ends or reads the block's input. Also None if the norm or the MLP reads
        attention's output, unless attention adds the residual itself.
        """
        reader, taken = mlp.first, [mlp.source]
        norm = self._producer(mlp) or self._norm_between(attn, mlp)
        if norm is not None:
            reader, taken = norm, stream_leaves(norm.inputs, self.like)
        if not taken or reader.started < attn.last.ended:
            return None
        if len(taken) > 1 and not taken[0].same(taken[1]):
            return Binding(reader.path, "input", taken[0].ref, taken[1].ref)
        unread = [entering_leaf(self.call, self.layout)]
        if not self._takes_residual(attn):
            unread += stream_leaves(attn.last.outputs, self.like)
        if any(taken[0].same(leaf) for leaf in unread):
            return None
        return Binding(reader.path, "input", taken[0].ref, in_place=True)

    def _producer(self, mlp: SubLayer) -> ModuleCall | None:
        """The norm whose output the MLP reads. Modules in between that return their input, such as dropout, are skipped."""
        for norm in reversed(self._norms(self.call.started, mlp.first.started)):
            given = any(leaf.same(mlp.source) for leaf in norm.returned)
            unchanged = any(leaf.same(mlp.source) for leaf in norm.inputs)
            if given and not unchanged:
                return norm
        return None

    def _norm_between(self, attn: SubLayer, mlp: SubLayer) -> ModuleCall | None:
        """The norm between attention and MLP that reads the stream, if the MLP gets a copy of the norm's output (GraniteMoeShared)."""
        added = stream_leaves(attn.last.outputs, self.like)
        for norm in reversed(self._norms(attn.last.ended, mlp.first.started)):
            taken = stream_leaves(norm.inputs, self.like)
            if taken and not any(taken[0].same(leaf) for leaf in added):
                return norm
        return None

    def _neurons(self, mlp: SubLayer) -> Binding | None:
        """The input of the down projection. None for a mixture of experts, which has no single down projection."""
        if mlp.projection is None or is_moe(mlp.first.module):
            return None
        taken = [leaf for leaf in mlp.projection.inputs if leaf.floating]
        return Binding(mlp.projection.path, "input", taken[0].ref) if taken else None

    def _router(self, mlp: SubLayer) -> Binding | None:
        """The logits by which a mixture chooses its experts: the output of its router.

        A router that chooses by itself returns logits and choice, and the mixture uses the choice alone. For such a router, the site is the
        output of the linear layer inside it, or of the module that `split_routers` has put behind its matrix product.
        """
        if not is_moe(mlp.first.module):
            return None
        within = self.probe.within(mlp.first)
        named = [call for call in within if self.names.rank(call.path, "router") is not None]
        for router in sorted(named, key=lambda call: (call.path.count("."), self.names.rank(call.path, "router"))):
            inner = [
                c for c in self.probe.within(router) if c.path.endswith(f".{ROUTER_LOGITS}") or is_linear(c.module)
            ]
            sources = [router] if len(router.returned) == 1 else inner if len(inner) == 1 else []
            for source in sources:
                out = source.returned[0]
                experts = out.shape[-1]
                rows = self.like.tensor.numel() // self.like.shape[-1]
                if out.floating and len(source.returned) == 1 and out.tensor.numel() == rows * experts and experts > 1:
                    return Binding(source.path, "output", out.ref)
        return None

    def _attended(self, attn: SubLayer) -> dict[str, Binding]:
        """Queries, keys and values: the inputs of vLLM's attention, or of the module that `split_heads` has put before a function.

        None of them if there are several such modules, or if they take tensors of another shape (MLA). An attention that uses the keys and
        values of another layer has only queries of its own. If vLLM pads the values to the width
        of the keys, `attn_v` is missing.
        """
        calls = [call for call in self.probe.within(attn.first) if (own := head_dims_of(call.module)) is not None]
        if len(calls) != 1:
            return {}
        (call,) = calls
        module, own = call.module, head_dims_of(call.module) or (0, 0, 0)
        rows = self.like.tensor.numel() // self.like.shape[-1]
        taken = [leaf for leaf in call.inputs if leaf.floating][: len(own)]
        found = {}
        for site, leaf, size in zip(("attn_q", "attn_k", "attn_v"), taken, own, strict=False):
            width = leaf.shape[-1]
            is_own = site == "attn_q" or not takes_other_kv(module)
            if is_own and size and width % size == 0 and leaf.tensor.numel() == rows * width and leaf.ref[0] in (0, 1):
                found[site] = Binding(call.path, "input", leaf.ref, heads=(width // size, size))
        if len(taken) != 3 or "attn_q" not in found:
            return {}
        left = [leaf for leaf in attn.projection.inputs if leaf.floating] if attn.projection is not None else []
        if (
            left and left[0].shape[-1] < taken[0].shape[-1] // own[0] * own[2]
        ):  # padded values (multi-head latent attention)
            found.pop("attn_v", None)
        return found

    def _heads(self, attn: SubLayer, config: Any, head_dim: int | None) -> Binding | None:
        taken = [leaf for leaf in attn.projection.inputs if leaf.floating] if attn.projection is not None else []
        if not taken or attn.projection is None:
            return None
        width = taken[0].shape[-1]
        size = _head_dim(attn.first.module) or head_dim or _head_dim_in(config)
        if not size or width % size:
            return None
        return Binding(attn.projection.path, "input", taken[0].ref, heads=(width // size, size))


def _head_dim(owner: Any, names: tuple[str, ...] = ("v_head_dim", "head_dim", "head_size")) -> int | None:
    """The width of one head's value that a module or config states. It is the same on every tensor-parallel rank."""
    sizes = [getattr(owner, name, None) for name in names]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _head_dim_in(config: Any) -> int | None:
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    derived = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    return _head_dim(config, ("v_head_dim", "head_dim")) or derived


# The kinds of modules, by their classes.


def unwrapped(module: nn.Module) -> nn.Module:
    """The layer inside a layer with adapters (vLLM's LoRA classes); other modules themselves."""
    inner = module._modules.get("base_layer") if type(module).__name__.endswith("LoRA") else None
    return module if inner is None else inner


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether the module's class or a base class has one of these names. A layer with adapters counts as the layer inside it."""
    return any(cls.__name__ in names for cls in type(unwrapped(module)).__mro__)


def head_dims_of(module: Any) -> tuple[int, int, int] | None:
    """The widths of a head of queries, keys and values, if the module takes the three."""
    if type(module).__name__ == "Heads":
        return module.head_dims  # type: ignore[no-any-return]
    if not is_a(module, "Attention") or not hasattr(module, "impl"):
        return None
    return module.head_size, module.head_size, getattr(module, "head_size_v", module.head_size)


def takes_other_kv(module: Any) -> bool:
    """Whether this attention uses the keys and values of another layer, so that its inputs do not matter."""
    return (
        bool(getattr(module, "shares_kv", False)) or getattr(module, "kv_sharing_target_layer_name", None) is not None
    )


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer, possibly quantised."""
    name = type(module).__name__
    if "Linear" in name or name == "Conv1D" or hasattr(module, "qweight"):
        return True
    weight = getattr(module, "weight", None)
    return getattr(weight, "ndim", 0) == 2 and "Embedding" not in name and not any(module.children())


def is_norm(module: nn.Module, path: str) -> bool:
    """Whether this is a norm, by its class or by its name."""
    leaf = path.rpartition(".")[2].lower()
    return "norm" in type(module).__name__.lower() or "norm" in leaf or leaf.startswith("ln")


def is_moe(module: nn.Module) -> bool:
    """Whether this MLP is a mixture of experts, which has no single down projection."""
    return any("experts" in name or "MoE" in type(child).__name__ for name, child in module.named_children())
