"""The tensor-parallel ranks that share each layer: full tensors from the ranks' parts, and agreement on what traces do.

`Finder` uses the probe to find out which tensors are one rank's part of a larger one. The classes of vLLM's parallel layers determine the
layout of their own inputs and outputs. A leaf of any other module has the layout of the known leaf whose memory contains it (queries, keys
and values are columns of the fused projection's output). If a module without children returns a tensor shaped like one of its inputs
(activations, norms over heads, rotary embeddings), the output has the layout of that input. All other leaves count as full tensors, for
example the values that a model computes between its modules.

`TensorParallel` makes full tensors from the parts. Each rank runs the same bodies, and some operations of bodies are collective: a rank
that reached a gather alone would wait forever. So each rank notes its bodies' operations (reads, writes, ends), and publishes the notes
before its forward goes on. Before a collective operation, the ranks compare the body's notes of this step. A peer either has the next note
already, or reaches it without waiting for this rank. At the end of every step all ranks compare the notes of all bodies, so that all of
them fail the same bodies.

Legend of shape suffixes: R ranks, t tokens, w the width on one rank, W the full width, in elements of one token. A width may span several
axes, such as heads and head_dim; then the ranks divide the first of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from midstream.arch.blocks import is_a, is_linear, unwrapped
from midstream.arch.detect import ShardFinder
from midstream.arch.probe import Leaf, ModuleCall, Plant, ProbeForward
from midstream.errors import DivergedError, MidstreamError, NeverReachedError
from midstream.ranks.link import Link
from midstream.sites import Key, Kind
from midstream.trace.parallel import Peers, Sharding
from midstream.tree import Ref, map_tensors


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
        """The full tensor from all ranks' parts. `lead` axes come between R and the axes of the width."""
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
        starts = [0, *accumulate(segment.width for segment in self.segments)]
        placed = zip(starts, self.segments, strict=False)
        inside = tuple(segment for at, segment in placed if first <= at and at + segment.width <= first + width)
        complete = inside and first in starts and sum(segment.width for segment in inside) == width
        return Shards(inside, self.ranks) if complete else None


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


ShardLayout = Shards | Summands
ShardLayouts = dict[tuple[str, Kind], dict[Ref, ShardLayout]]
_OVER = NeverReachedError("The step is over.")
_EXPERTS = ("FusedMoE", "MoERunner")  # vLLM's classes for a mixture of experts


class Finder(ShardFinder):
    """Finds the layouts on one rank of `size`. `exchange(x)` is collective and returns the values that all ranks passed."""

    def __init__(self, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.size = size
        self._exchange = exchange

    def watch(self, modules: Mapping[str, nn.Module]) -> set[str]:
        """All modules, if some of them may return summands: an all-reduce or a norm may overwrite summands in place later."""
        partial = any(_returns_summands(module) or is_a(module, *_EXPERTS) for module in modules.values())
        return set(modules) if partial else set()

    def plants(self, modules: Mapping[str, nn.Module]) -> dict[str, Plant]:
        """Replace attention's output, which is zero in a dummy run: a sum of zeros over the ranks would look like its summands."""
        return {path: _ramp for path, module in modules.items() if is_a(module, "Attention", "MLAAttention")}

    def find(self, probe: ProbeForward) -> ShardLayouts:
        """The layouts on which all ranks agree."""
        found = _Search(probe, self.size).run()
        ranks = self._exchange((found.layouts, found.digests))
        agreed: ShardLayouts = {}
        for place, leaves in found.layouts.items():
            for ref, layout in leaves.items():
                everywhere = all(layouts.get(place, {}).get(ref) == layout for layouts, _ in ranks)
                digests = {digests.get((*place, ref)) for _, digests in ranks}
                is_sum = None not in digests and len(digests) == 1  # experts' output that is equal on all ranks
                if everywhere and not is_sum:
                    agreed.setdefault(place, {})[ref] = layout
        return agreed


def _ramp(value: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, value.numel()).view_as(value).to(value)


def _returns_summands(module: nn.Module) -> bool:
    module = unwrapped(module)
    parallel = is_a(module, "RowParallelLinear", "VocabParallelEmbedding") and getattr(module, "tp_size", 1) > 1
    return parallel and not getattr(module, "reduce_results", True)


class _Search:
    def __init__(self, probe: ProbeForward, size: int) -> None:
        self.probe, self.size = probe, size
        self.layouts: ShardLayouts = {}
        self.digests: dict[tuple[str, Kind, Ref], bytes] = {}
        self._known: list[tuple[Leaf, ShardLayout]] = []
        self._from_experts: set[bytes] = set()  # digests of experts' output
        self._modules = {call.path: unwrapped(call.module) for call in probe.calls}
        linear = next((c for c in probe.calls if is_a(c.module, "LinearBase") and _floating(c.inputs)), probe.calls[0])
        self._tokens = next((leaf.shape[-2] for leaf in _floating(linear.inputs) if len(leaf.shape) > 1), 0)

    def run(self) -> _Search:
        moments: list[tuple[int, Kind, ModuleCall]] = [(call.started, "input", call) for call in self.probe.calls]
        moments += [(call.ended, "output", call) for call in self.probe.calls]
        for _, kind, call in sorted(moments, key=lambda moment: moment[0]):
            if (call.path, kind) not in self.layouts:
                self._look(kind, call)
                if unwrapped(call.module) is not call.module:  # a trace may call the layer inside; the forward does not
                    self.layouts[f"{call.path}.base_layer", kind] = self.layouts[call.path, kind]
        self.layouts = {place: leaves for place, leaves in self.layouts.items() if leaves}
        return self

    def _look(self, kind: Kind, call: ModuleCall) -> None:
        leaves = call.inputs if kind == "input" else call.returned
        by_class = self._by_class(kind, call)
        found = self.layouts[call.path, kind] = {}
        for leaf in leaves:
            layout = by_class[leaf.ref] if leaf.ref in by_class else self._by_memory(leaf)
            if layout is None and leaf.ref not in by_class and kind == "output":
                layout = self._by_shape(call, leaf, found)
            if layout is not None and (isinstance(layout, Summands) or layout.part == self._width(leaf)):
                found[leaf.ref] = layout
                self._known.append((leaf, layout))
                if kind == "output" and call.outputs is not call.returned:
                    self._known += [(planted, layout) for planted in call.outputs if planted.ref == leaf.ref]
                if isinstance(layout, Summands) and leaf.snapshot is not None:
                    self._note_digest(kind, call, leaf)

    def _note_digest(self, kind: Kind, call: ModuleCall, leaf: Leaf) -> None:
        """Note the digest of experts' output, and of leaves equal to it. If all ranks have the same digest, the output counts as reduced.

        Summands of experts that have equal weights on all ranks therefore count as reduced, too.
        """
        assert leaf.snapshot is not None
        digest = hashlib.blake2b(leaf.snapshot.cpu().numpy().tobytes()).digest()
        if kind == "output" and is_a(call.module, *_EXPERTS):
            self._from_experts.add(digest)
        if digest in self._from_experts:
            self.digests[call.path, kind, leaf.ref] = digest

    def _width(self, leaf: Leaf) -> int:
        """Elements of one token."""
        return leaf.tensor.numel() if len(leaf.shape) == 1 else leaf.tensor.numel() // max(self._tokens, 1)

    def _by_class(self, kind: Kind, call: ModuleCall) -> dict[Ref, ShardLayout | None]:
        """The layouts that follow from the module's class; None for a full tensor. Other leaves are missing."""
        module, leaves = unwrapped(call.module), _floating(call.inputs if kind == "input" else call.returned)
        if is_a(module, "Attention", "Heads"):
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
        """Segments of these widths. All ranks divide the first one; `replicas` ranks share each part of the others (keys, values)."""
        later = [Segment(int(width), replicas) for width in widths[1:]]
        return Shards((Segment(int(widths[0])), *later), self.size)

    def _of_output(self, module: Any) -> ShardLayout | None:
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

    def _attention(self, kind: Kind, call: ModuleCall, leaves: list[Leaf]) -> dict[Ref, ShardLayout | None]:
        """The layouts of queries, keys and values."""
        module: Any = call.module
        siblings = [m for path, m in self._modules.items() if path.rpartition(".")[0] == call.path.rpartition(".")[0]]
        linears = [m for m in siblings if is_a(m, "ColumnParallelLinear", "RowParallelLinear")]
        if not any(self._is_split(m) for m in linears):
            return {}
        replicas = max([1, *(getattr(m, "num_kv_head_replicas", 1) for m in linears)])
        if is_a(module, "Heads"):  # it returns its inputs
            copies = zip(leaves, (1, replicas, replicas), strict=True)
            return {leaf.ref: Shards((Segment(self._width(leaf), each),), self.size) for leaf, each in copies}
        value_size = getattr(module, "head_size_v", module.head_size)
        if kind == "output":
            return {leaves[0].ref: self._shards(module.num_heads * value_size)}
        widths = (
            (module.num_heads * module.head_size, 1),
            (module.num_kv_heads * module.head_size, replicas),
            (module.num_kv_heads * value_size, replicas),
        )
        return {
            leaf.ref: Shards((Segment(width, copies),), self.size)
            for leaf, (width, copies) in zip(leaves, widths, strict=False)
        }

    def _by_memory(self, leaf: Leaf) -> ShardLayout | None:
        """The layout of the known leaf that this leaf equals, or whose columns contain it."""
        for known, layout in reversed(self._known):
            if isinstance(layout, Shards):
                found: ShardLayout | None = self._columns(leaf, known, layout)
            else:
                found = layout if leaf.same(known) else None
            if found is not None:
                return found
        return None

    def _columns(self, leaf: Leaf, known: Leaf, layout: Shards) -> ShardLayout | None:
        if known.tensor.untyped_storage().data_ptr() != leaf.tensor.untyped_storage().data_ptr():
            return None
        first = int(leaf.tensor.storage_offset() - known.tensor.storage_offset())
        if leaf.tensor.dtype != known.tensor.dtype or self._row_stride(leaf) != self._row_stride(known):
            return None
        return layout.columns(first, self._width(leaf))

    def _row_stride(self, leaf: Leaf) -> int:
        axis = 1 if leaf.shape[0] == 1 and len(leaf.shape) > 1 and leaf.shape[1] == self._tokens else 0
        return leaf.tensor.stride(axis)

    def _by_shape(self, call: ModuleCall, leaf: Leaf, found: Mapping[Ref, ShardLayout]) -> ShardLayout | None:
        """The layout of an input, if a module without children returns a tensor of the input's shape, or of half its width as gated
        activations do.

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


class TensorParallel(Peers):
    """This rank's part in a group of tensor-parallel ranks.

    All methods are called for the same bodies in the same order on all ranks, as long as the bodies agree.

    Args:
        layouts: the layouts of the tensors that are divided among the ranks.
        gather: collective; from `[...]` on every rank to `[ranks, ...]`, in the order of the ranks.
        link: the link to the other ranks.
    """

    several = True

    def __init__(self, layouts: ShardLayouts, gather: Callable[[torch.Tensor], torch.Tensor], link: Link) -> None:
        self._layouts = layouts
        self._gather = gather
        self._link = link
        self._peers = [peer for peer in range(link.size) if peer != link.rank]
        self._shards: dict[Key, dict[Ref, Sharding]] = {
            key: {ref: self._shard(layout) for ref, layout in each.items()} for key, each in layouts.items()
        }
        self._steps = 0
        self._diverged: dict[str, str] = {}
        self._begin()

    # Full tensors.

    def _shard(self, layout: ShardLayout) -> Sharding:
        def join(part: torch.Tensor, lead: int) -> torch.Tensor:
            return layout.join(self._gather(part.contiguous()), lead)

        return Sharding(join, lambda full, lead: layout.cut(full, self._link.rank, lead))

    def shards(self, key: Key) -> Mapping[Ref, Sharding]:
        return self._shards.get(key, {})

    def applied(self, path: str, module: Callable[..., Any]) -> Callable[..., Any]:
        def convert(kind: Kind, ref: Ref, leaf: torch.Tensor) -> torch.Tensor:
            layout = self._layouts.get((path, kind), {}).get(ref)
            if layout is None:
                return leaf
            shard = self.shards((path, kind))[ref]
            if kind == "input":
                return shard.cut(leaf, _lead(leaf, layout.width))
            return shard.join(leaf, _lead(leaf, layout.part))

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors((args, kwargs), functools.partial(convert, "input"))
            return map_tensors(module(*args, **kwargs), functools.partial(convert, "output"))

        return call

    # Agreement.

    def _begin(self) -> None:
        self._open = False
        self._decisions = 0
        self._notes: defaultdict[str, list[str]] = defaultdict(list)
        self._compared: defaultdict[str, int] = defaultdict(int)
        self._unpublished: list[tuple[str, str]] = []
        self._published = 0
        self._received = dict.fromkeys(self._peers, 0)
        self._theirs: dict[int, defaultdict[str, deque[str]]] = {peer: defaultdict(deque) for peer in self._peers}

    def begin_step(self) -> None:
        self.rest()
        self._steps += 1
        self._notes_name, self._decisions_name = f"step {self._steps}", f"turns of step {self._steps}"
        self._open = True

    def rest(self) -> None:
        if self._open:
            self._link.end(self._notes_name, _OVER)
            self._link.end(self._decisions_name, _OVER)
        self._begin()

    def note(self, body: str, *what: Any) -> None:
        text = " ".join(map(str, what))
        self._notes[body].append(text)
        self._unpublished.append((body, text))

    def show(self) -> None:
        if self._unpublished and self._open:
            self._link.publish(self._notes_name, self._published, self._unpublished)
            self._published += 1
            self._unpublished = []

    def agree(self, body: str, *what: Any) -> None:
        if body in self._diverged:
            raise self._error(body)
        self.note(body, *what)
        self.show()
        mine = self._notes[body]
        while self._compared[body] < len(mine):
            expected = mine[self._compared[body]]
            self._compared[body] += 1
            for peer in self._peers:
                did = self._next(peer, body)
                if did != expected:
                    self._blame(body, expected, peer, did)
                    raise self._error(body)

    def _next(self, peer: int, body: str) -> str | None:
        """The body's next note on `peer`. Waits for it; None if the step ends there without another one."""
        notes = self._theirs[peer]
        while not notes[body]:
            missing = range(self._received[peer], max(self._published, self._received[peer] + 1))
            for fetch in [self._link.fetch(peer, self._notes_name, number) for number in missing]:
                try:
                    shown = fetch.wait()
                except MidstreamError:
                    return None
                self._received[peer] += 1
                for name, text in shown:
                    notes[name].append(text)
                if notes[body]:
                    break
        return notes[body].popleft()

    def decide(self, choose: Callable[[], list[str]]) -> list[str]:
        number, self._decisions = self._decisions, self._decisions + 1
        if self._link.rank != 0:
            return list(self._link.fetch(0, self._decisions_name, number).wait())
        names = choose()
        self._link.publish(self._decisions_name, number, names)
        return names

    def end_step(self, bodies: Iterable[str]) -> Mapping[str, MidstreamError]:
        self.show()
        names = list(bodies)
        digests = {name: hashlib.blake2b("\n".join(self._notes[name]).encode()).digest() for name in names}
        self._link.publish(self._decisions_name, self._decisions, digests)
        for peer, fetch in [
            (peer, self._link.fetch(peer, self._decisions_name, self._decisions)) for peer in self._peers
        ]:
            theirs = fetch.wait()
            for name in names:
                if theirs.get(name) != digests[name] and name not in self._diverged:
                    last = self._notes[name][-1] if self._notes[name] else None
                    self._blame(name, last, peer, None)
        errors = {name: self._error(name) for name in names if name in self._diverged}
        for name in errors:
            del self._diverged[name]
        return errors

    def _blame(self, body: str, own: str | None, peer: int, other: str | None) -> None:
        on_this_rank = f"on tensor-parallel rank {self._link.rank} it came to {own or 'nothing'}"
        self._diverged[body] = f"{on_this_rank}, on rank {peer} to {other or 'something else'}"

    def _error(self, body: str) -> DivergedError:
        return DivergedError(
            f"The trace did not do the same on all tensor-parallel ranks: {self._diverged[body]}. Each rank runs the trace's code, so what "
            "it reads and writes must not depend on the process: on its id, the time, the order of a set, or unseeded numbers of "
            "`random` and NumPy. (torch's own random numbers are the same on all ranks.)"
        )

    def gauges(self) -> dict[str, int]:
        """Counts of the objects that are held: zeros when no trace runs."""
        return {f"tensor_{name}": count for name, count in self._link.gauges().items()}

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._link.close()


def _lead(leaf: torch.Tensor, width: int | None) -> int:
    """The number of axes before the axes that hold `width` elements."""
    axis, size = leaf.ndim, 1
    while axis and size != width:
        axis -= 1
        size *= leaf.shape[axis]
    return axis
