"""Which tensors of a model are one tensor-parallel rank's part of a larger one, and how the parts make up the full tensor.

`Finder` reads it off the probe. The classes of vLLM's parallel layers determine the layout of their own inputs and outputs. A leaf of any
other module has the layout of the known leaf in whose memory it lies (queries, keys and values are columns of the fused projection's
output). If a module without children returns a tensor shaped like one of its inputs (activations, norms over heads, rotary embeddings), the
output has the layout of that input. All other leaves count as full tensors, for example what a model computes between its modules.

Legend of shape suffixes: R ranks, t tokens, w the width on one rank, W the full width, in elements of one token. A width may span several
axes, such as heads and head_dim; then the ranks divide the first of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from midstream.arch.detect import ShardFinder
from midstream.arch.names import is_a, is_linear
from midstream.arch.probe import Call, Leaf, Plant, Probe
from midstream.sites import Kind, Ref


@dataclass(frozen=True)
class Segment:
    """One of the values that lie side by side in a tensor: queries, keys, values, gate, up.

    Attributes:
        width: on one rank.
        replicas: how many neighbouring ranks have the same part, for example if there are fewer key-value heads than ranks.
    """

    width: int
    replicas: int = 1


@dataclass(frozen=True)
class Shards:
    """Each rank has a part of every segment. The full tensor has the full segments side by side."""

    segments: tuple[Segment, ...]
    ranks: int

    @property
    def width(self) -> int:
        """The full width."""
        return sum(self._widths)

    @property
    def part(self) -> int:
        """The width on one rank."""
        return sum(segment.width for segment in self.segments)

    @property
    def _widths(self) -> list[int]:
        return [segment.width * (self.ranks // segment.replicas) for segment in self.segments]

    def join(self, parts_Rtw: torch.Tensor, lead: int) -> torch.Tensor:
        """The full tensor from all ranks' parts. `lead` axes after R come before those of the width."""
        flat_Rtw = parts_Rtw.flatten(1 + lead)
        full = []
        for segment, part_Rtw in zip(
            self.segments, flat_Rtw.split([s.width for s in self.segments], dim=-1), strict=True
        ):
            full += part_Rtw[:: segment.replicas].unbind()
        return torch.cat(full, dim=-1).unflatten(-1, (-1, *parts_Rtw.shape[2 + lead :]))

    def cut(self, full_tW: torch.Tensor, rank: int, lead: int) -> torch.Tensor:
        """The part that `rank` has."""
        values = full_tW.flatten(lead).split(self._widths, dim=-1)
        parts = [
            one.narrow(-1, rank // segment.replicas * segment.width, segment.width)
            for segment, one in zip(self.segments, values, strict=True)
        ]
        return torch.cat(parts, dim=-1).unflatten(-1, (-1, *full_tW.shape[1 + lead :]))

    def columns(self, first: int, width: int) -> Shards | None:
        """The layout of `width` columns from `first` on; None unless they are complete segments."""
        at, inside = 0, []
        for segment in self.segments:
            if first <= at and at + segment.width <= first + width:
                inside.append(segment)
            at += segment.width
        found = Shards(tuple(inside), self.ranks)
        return found if inside and found.part == width and self._starts_at(first) else None

    def _starts_at(self, first: int) -> bool:
        starts, at = set(), 0
        for segment in self.segments:
            starts.add(at)
            at += segment.width
        return first in starts


@dataclass(frozen=True)
class Summands:
    """The full tensor is the sum of the ranks' parts. A write goes to the first rank, and the others get zeros."""

    ranks: int

    width = None
    part = None

    def join(self, parts_Rtw: torch.Tensor, lead: int) -> torch.Tensor:
        return parts_Rtw.sum(0)

    def cut(self, full_tW: torch.Tensor, rank: int, lead: int) -> torch.Tensor:
        return full_tW if rank == 0 else torch.zeros_like(full_tW)


Layout = Shards | Summands
Layouts = dict[tuple[str, Kind], dict[Ref, Layout]]
_EXPERTS = ("FusedMoE", "MoERunner")  # vLLM's classes for a mixture of experts


class Finder(ShardFinder):
    """Finds the layouts on one rank of `size`. `exchange(x)` is collective and returns what every rank passed."""

    def __init__(self, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.size = size
        self._exchange = exchange

    def watch(self, modules: Mapping[str, nn.Module]) -> set[str]:
        """All modules if some of them may return summands, since an all-reduce or a norm may overwrite summands in place."""
        partial = any(_returns_summands(module) or is_a(module, *_EXPERTS) for module in modules.values())
        return set(modules) if partial else set()

    def plants(self, modules: Mapping[str, nn.Module]) -> dict[str, Plant]:
        """Give attention an output that is not zero, as it is in a dummy run: a sum of zeros over ranks looks like its summands."""
        return {path: _ramp for path, module in modules.items() if is_a(module, "Attention", "MLAAttention")}

    def find(self, probe: Probe) -> Layouts:
        """The layouts on which all ranks agree."""
        found = _Search(probe, self.size).run()
        ranks = self._exchange((found.layouts, found.digests))
        agreed: Layouts = {}
        for place, leaves in found.layouts.items():
            for ref, layout in leaves.items():
                everywhere = all(layouts.get(place, {}).get(ref) == layout for layouts, _ in ranks)
                if everywhere and not _is_reduced([digests.get((*place, ref)) for _, digests in ranks]):
                    agreed.setdefault(place, {})[ref] = layout
        return agreed


def _ramp(value: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, value.numel()).view_as(value).to(value)


def _is_reduced(digests: list[bytes | None]) -> bool:
    """Whether a possible summand is the same on every rank: then it is the sum already."""
    return None not in digests and len(set(digests)) == 1


def _returns_summands(module: nn.Module) -> bool:
    parallel = is_a(module, "RowParallelLinear", "VocabParallelEmbedding") and getattr(module, "tp_size", 1) > 1
    return parallel and not getattr(module, "reduce_results", True)


class _Search:
    def __init__(self, probe: Probe, size: int) -> None:
        self.probe, self.size = probe, size
        self.layouts: Layouts = {}
        self.digests: dict[tuple[str, Kind, Ref], bytes] = {}
        self._known: list[tuple[Leaf, Layout]] = []
        self._doubtful: set[bytes] = set()  # digests of what experts returned
        self._modules = {call.path: call.module for call in probe.calls}
        linear = next((c for c in probe.calls if is_a(c.module, "LinearBase") and _floating(c.inputs)), probe.calls[0])
        self._tokens = next((leaf.shape[-2] for leaf in _floating(linear.inputs) if len(leaf.shape) > 1), 0)

    def run(self) -> _Search:
        moments: list[tuple[int, Kind, Call]] = [(call.started, "input", call) for call in self.probe.calls]
        moments += [(call.ended, "output", call) for call in self.probe.calls]
        for _, kind, call in sorted(moments, key=lambda moment: moment[0]):
            if (call.path, kind) not in self.layouts:
                self._look(kind, call)
        self.layouts = {place: leaves for place, leaves in self.layouts.items() if leaves}
        return self

    def _look(self, kind: Kind, call: Call) -> None:
        leaves = call.inputs if kind == "input" else call.returned
        told = self._by_class(kind, call)
        found = self.layouts[call.path, kind] = {}
        for leaf in leaves:
            layout = told[leaf.ref] if leaf.ref in told else self._by_memory(leaf)
            if layout is None and leaf.ref not in told and kind == "output":
                layout = self._by_shape(call, leaf, found)
            if layout is not None and self._fits(leaf, layout):
                found[leaf.ref] = layout
                self._known.append((leaf, layout))
                if kind == "output" and call.outputs is not call.returned:
                    self._known += [(planted, layout) for planted in call.outputs if planted.ref == leaf.ref]
                if isinstance(layout, Summands):
                    self._note_doubt(
                        leaf, (call.path, kind, leaf.ref), kind == "output" and is_a(call.module, *_EXPERTS)
                    )

    def _note_doubt(self, leaf: Leaf, where: tuple[str, Kind, Ref], from_experts: bool) -> None:
        """Note the digest of experts' output and its copies: experts may have reduced it already. (Equal weights on all ranks hide it.)"""
        if leaf.snapshot is None:
            return
        digest = hashlib.blake2b(leaf.snapshot.cpu().numpy().tobytes()).digest()
        if from_experts:
            self._doubtful.add(digest)
        if digest in self._doubtful:
            self.digests[where] = digest

    def _width(self, leaf: Leaf) -> int:
        """Elements of one token."""
        return leaf.tensor.numel() if len(leaf.shape) == 1 else leaf.tensor.numel() // max(self._tokens, 1)

    def _fits(self, leaf: Leaf, layout: Layout) -> bool:
        return not isinstance(layout, Shards) or layout.part == self._width(leaf)

    def _by_class(self, kind: Kind, call: Call) -> dict[Ref, Layout | None]:
        """The layouts that follow from the module's class; None for a full tensor."""
        module, leaves = call.module, _floating(call.inputs if kind == "input" else call.returned)
        if is_a(module, "Attention"):
            return self._attention(kind, call, leaves)
        if is_a(module, *_EXPERTS) and kind == "output":
            return {leaf.ref: Summands(self.size) for leaf in leaves}
        if not is_a(module, "LinearBase", "VocabParallelEmbedding"):
            return {}
        if kind == "output":
            layout = self._of_output(module)
            return {leaf.ref: layout if isinstance(layout, Shards) or leaf is leaves[0] else None for leaf in leaves}
        if is_a(module, "RowParallelLinear") and self._is_split(module) and module.input_is_parallel:
            return {leaves[0].ref: self._shards(module.input_size_per_partition)}
        return {}

    def _is_split(self, module: nn.Module) -> bool:
        return int(getattr(module, "tp_size", 1)) == self.size

    def _shards(self, *widths: Any, replicas: int = 1) -> Shards:
        """The first segment is divided by all ranks; `replicas` ranks share a part of each other one (keys, values)."""
        later = [Segment(int(width), replicas) for width in widths[1:]]
        return Shards((Segment(int(widths[0])), *later), self.size)

    def _of_output(self, module: Any) -> Layout | None:
        if not self._is_split(module):
            return None
        if _returns_summands(module):
            return Summands(self.size)
        if not is_a(module, "ColumnParallelLinear") or module.gather_output:
            return None
        widths = module.output_partition_sizes
        if is_a(module, "QKVParallelLinear") and len(widths) != 3:
            return None
        return self._shards(*widths, replicas=getattr(module, "num_kv_head_replicas", 1))

    def _attention(self, kind: Kind, call: Call, leaves: list[Leaf]) -> dict[Ref, Layout | None]:
        """The layouts of queries, keys and values."""
        module: Any = call.module
        beside = [m for path, m in self._modules.items() if path.rpartition(".")[0] == call.path.rpartition(".")[0]]
        linears = [m for m in beside if is_a(m, "ColumnParallelLinear", "RowParallelLinear")]
        if not any(self._is_split(m) for m in linears):
            return {}
        value_size = getattr(module, "head_size_v", module.head_size)
        if kind == "output":
            return {leaves[0].ref: self._shards(module.num_heads * value_size)}
        replicas = max([1, *(getattr(m, "num_kv_head_replicas", 1) for m in linears)])
        widths = (
            (module.num_heads * module.head_size, 1),
            (module.num_kv_heads * module.head_size, replicas),
            (module.num_kv_heads * value_size, replicas),
        )
        return {
            leaf.ref: Shards((Segment(width, copies),), self.size)
            for leaf, (width, copies) in zip(leaves, widths, strict=False)
        }

    def _by_memory(self, leaf: Leaf) -> Layout | None:
        """The layout of the known leaf that this one equals or is a part of the columns of."""
        for known, layout in reversed(self._known):
            if isinstance(layout, Summands):
                found: Layout | None = layout if leaf.same(known) else None
            else:
                found = self._columns(leaf, known, layout)
            if found is not None:
                return found
        return None

    def _columns(self, leaf: Leaf, known: Leaf, layout: Layout) -> Layout | None:
        assert isinstance(layout, Shards)
        if known.tensor.untyped_storage().data_ptr() != leaf.tensor.untyped_storage().data_ptr():
            return None
        first = int(leaf.tensor.storage_offset() - known.tensor.storage_offset())
        if leaf.tensor.dtype != known.tensor.dtype or self._row_stride(leaf) != self._row_stride(known):
            return None
        return layout.columns(first, self._width(leaf))

    def _row_stride(self, leaf: Leaf) -> int:
        axis = 1 if leaf.shape[0] == 1 and len(leaf.shape) > 1 and leaf.shape[1] == self._tokens else 0
        return leaf.tensor.stride(axis)

    def _by_shape(self, call: Call, leaf: Leaf, found: Mapping[Ref, Layout]) -> Layout | None:
        """The layout of an input, for a module without children that returns its shape, or half of it as gated activations do.

        Only for shards: the function may be nonlinear, so summands cannot be passed through it.
        """
        if is_linear(call.module) or next(call.module.children(), None) is not None or not leaf.floating:
            return None
        inputs = self.layouts.get((call.path, "input"), {})
        given = [(taken, layout) for taken in call.inputs if isinstance(layout := inputs.get(taken.ref), Shards)]
        alike = [layout for taken, layout in given if taken.shape == leaf.shape]
        if alike:
            return alike[min(len(found), len(alike) - 1)]  # rotary embeddings: queries, then keys
        for _, layout in given:
            if len(set(layout.segments)) == 1 and len(layout.segments) == 2:
                return Shards(layout.segments[:1], self.size)
        return None


def _floating(leaves: Iterable[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.floating]
