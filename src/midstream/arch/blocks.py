"""The sites inside a block: what attention and MLP read and write, and the residual stream between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.arch.names import BARE_MLP, Names, is_linear, is_moe, is_norm
from midstream.arch.probe import Call, Leaf, Probe
from midstream.arch.streams import Layout, entering_leaf, stream_leaves, stream_of
from midstream.sites import Binding

Sites = dict[tuple[str, int | None], Binding]


@dataclass(frozen=True)
class Part:
    """Attention or MLP of one block: one module, or two linear layers that are direct children of the block."""

    first: Call
    last: Call
    projection: Call | None  # of the output projection
    source: Leaf  # its input
    raw: Leaf  # its output

    @property
    def started(self) -> int:
        return self.first.started

    @property
    def ended(self) -> int:
        return self.last.ended


class Block:
    """One block's call, its attention and MLP, and the bindings of its sites."""

    def __init__(self, probe: Probe, call: Call, layout: Layout, names: Names) -> None:
        self.probe, self.call, self.layout, self.names = probe, call, layout, names
        self.like = stream_of(call)
        self.children = probe.within(call, direct=True)
        self.attn = self._part("attn", "attn_proj")
        self.mlp = self._part("mlp", "mlp_proj") or self._bare_mlp()

    def bind(self, index: int, config: Any, num_heads: int | None, head_dim: int | None) -> Sites:
        """The bindings of this block, except `resid_pre` and `resid_post` (see `streams`)."""
        sites: dict[str, Binding | None] = {}
        if self.attn is not None:
            sites["attn_in"] = Binding(self.attn.first.path, "input", self.attn.source.ref)
            sites["attn_out"] = self._added(self.attn)
            sites["attn_z"] = self._heads(self.attn, config, num_heads, head_dim)
        if self.mlp is not None:
            sites["mlp_in"] = Binding(self.mlp.first.path, "input", self.mlp.source.ref)
            sites["mlp_out"] = self._added(self.mlp)
            sites["mlp_act"] = self._neurons(self.mlp)
        if self.attn is not None and self.mlp is not None:
            sites["resid_mid"] = self._middle(self.attn, self.mlp)
        return {(name, index): binding for name, binding in sites.items() if binding is not None}

    def _part(self, role: str, projection_role: str) -> Part | None:
        path = self.names.child(self.call.module, self.call.path, role)
        call = next((child for child in self.children if child.path == path), None)
        if call is None:
            return None
        source, raw = stream_leaves(call.inputs, self.like), stream_leaves(call.returned, self.like)
        if not source or not raw:
            return None
        return Part(call, call, self._projection(call, raw[0], projection_role), source[0], raw[0])

    def _bare_mlp(self) -> Part | None:
        byname = {child.path.rpartition(".")[2]: child for child in self.children}
        for up, down in BARE_MLP:
            if up in byname and down in byname:
                source = stream_leaves(byname[up].inputs, self.like)
                raw = stream_leaves(byname[down].returned, self.like)
                if source and raw:
                    return Part(byname[up], byname[down], byname[down], source[0], raw[0])
        return None

    def _projection(self, call: Call, raw: Leaf, role: str) -> Call | None:
        """The linear layer whose output the module returns, or else the last one that is named like an output projection."""
        linears = [inner for inner in self.probe.within(call) if is_linear(inner.module)]
        for inner in reversed(linears):
            if any(leaf.same(raw) for leaf in inner.returned):
                return inner
        wide = [inner for inner in linears if stream_leaves(inner.returned, self.like)]
        named = [inner for inner in wide if self.names.rank(inner.path, role) is not None]
        return named[-1] if named else None

    def _added(self, part: Part) -> Binding | None:
        """What a part adds to the stream: its output, after the norm of that output if the block has one."""
        if self._takes_residual(part):  # BLOOM, MPT: its output includes the residual
            if part.projection is None:
                return None
            out = stream_leaves(part.projection.returned, self.like)[0]
            return Binding(part.projection.path, "output", out.ref)
        out = stream_leaves(part.last.outputs, self.like)[0]
        norm = self._norm_of(out, after=part.ended)
        if norm is not None:
            return Binding(norm.path, "output", stream_leaves(norm.outputs, self.like)[0].ref)
        width = self.like.shape[-1]
        bias = [leaf for leaf in part.last.outputs if leaf.floating and leaf.shape == (width,) and leaf.ref == (1,)]
        return Binding(part.last.path, "output", out.ref, bias[0].ref if bias else None)

    def _takes_residual(self, part: Part) -> bool:
        return any(not leaf.same(part.source) for leaf in stream_leaves(part.first.inputs, self.like))

    def _norm_of(self, out: Leaf, after: int) -> Call | None:
        """The norm that takes only this tensor. A fused add and norm takes two."""
        for child in self.children:
            if child.started < after or not is_norm(child.module, child.path):
                continue
            taken = stream_leaves(child.inputs, self.like)
            if len(taken) == 1 and taken[0].same(out):
                return child
        return None

    def _middle(self, attn: Part, mlp: Part) -> Binding | None:
        """The stream between attention and MLP, as the input of the norm before the MLP, or of the MLP itself.

        None for a parallel block: its norm runs before attention ends, or reads what entered the block. What attention returned is not
        the stream either, unless attention adds the residual itself.
        """
        reader, taken = mlp.first, [mlp.source]
        norm = self._producer(mlp)
        if norm is not None:
            reader, taken = norm, stream_leaves(norm.inputs, self.like)
        if not taken or reader.started < attn.ended:
            return None
        if len(taken) > 1 and not taken[0].same(taken[1]):
            return Binding(reader.path, "input", taken[0].ref, taken[1].ref)
        unread = [entering_leaf(self.call, self.layout)]
        if not self._takes_residual(attn):
            unread += stream_leaves(attn.last.outputs, self.like)
        if any(taken[0].same(leaf) for leaf in unread):
            return None
        return Binding(reader.path, "input", taken[0].ref, in_place=True)

    def _producer(self, mlp: Part) -> Call | None:
        """The norm whose output the MLP reads. Modules in between that return their input, such as dropout, are skipped."""
        before = [child for child in self.children if child.ended < mlp.started]
        for child in reversed(before):
            given = any(leaf.same(mlp.source) for leaf in child.returned)
            unchanged = any(leaf.same(mlp.source) for leaf in child.inputs)
            if given and not unchanged and is_norm(child.module, child.path):
                return child
        return None

    def _neurons(self, mlp: Part) -> Binding | None:
        """The input of the down projection. A mixture of experts has no single one."""
        if mlp.projection is None or is_moe(mlp.first.module):
            return None
        taken = [leaf for leaf in mlp.projection.inputs if leaf.floating]
        return Binding(mlp.projection.path, "input", taken[0].ref) if taken else None

    def _heads(self, attn: Part, config: Any, num_heads: int | None, head_dim: int | None) -> Binding | None:
        taken = [leaf for leaf in attn.projection.inputs if leaf.floating] if attn.projection is not None else []
        if not taken or attn.projection is None:
            return None
        width = taken[0].shape[-1]
        size = head_dim or _head_dim(attn.first.module, config) or (num_heads and width // num_heads)
        if not size or width % size:
            return None
        return Binding(attn.projection.path, "input", taken[0].ref, heads=(width // size, size))


def _head_dim(module: Any, config: Any) -> int | None:
    """The width of one head's value, which is the same on every tensor-parallel rank."""
    for owner, names in ((module, ("v_head_dim", "head_dim", "head_size")), (config, ("v_head_dim", "head_dim"))):
        for name in names:
            size = getattr(owner, name, None)
            if isinstance(size, int) and size > 0:
                return size
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
