"""Where plans act in the running model: sites that are built into the compiled forward, and hooks for the others.

A built-in site calls the site op, which is part of the graphs. Any other site gets a forward hook while a plan that names it is alive, and
the steps in which such a plan is active run uncompiled.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from midstream import hooks
from midstream.arch import Architecture
from midstream.runtime.tables import Tables
from midstream.sites import LAYER_SITES, Binding, Key, Kind, Point
from midstream.trace.parallel import ALONE, Peers
from midstream.tree import Ref, follow, replaced

_log = logging.getLogger(__name__)


def points_of(arch: Architecture) -> list[Point]:
    """Every (site, layer) that plans may name on this worker, in the order of the forward pass."""
    return [(site, layer) for layer in arch.layers for site in LAYER_SITES if (site, layer) in arch.bindings]


def trace_keys(arch: Architecture, points: Sequence[Point]) -> dict[Point, Key]:
    """The points at which traces can read and write the `resid_post` of a compiled forward."""
    residual = {point: arch.bindings[point] for point in points if point[0] == "resid_post"}
    return {point: (b.path, b.kind) for point, b in residual.items() if b.kind == "output"}


def tree_at(arch: Architecture, point: Point, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """The part of a layer's output that holds its `resid_post`."""
    binding = arch.bindings[point]
    second = {binding.residual: residual} if binding.residual is not None else {}
    return _tree(binding.kind, {binding.hidden: hidden, **second})


def tree_of(arch: Architecture, values: Mapping[Point, torch.Tensor]) -> Any:
    """The part of a module's input or output that holds its sites. `values`: `[rows, width]`, of sites that all lie in it."""
    leaves: dict[Ref, torch.Tensor | None] = {}
    for point, value in values.items():
        binding = arch.bindings[point]
        leaves[binding.hidden] = value
        if binding.residual is not None:
            leaves[binding.residual] = torch.zeros_like(value)
    return _tree(arch.bindings[next(iter(values))].kind, leaves)


def _tree(kind: Kind, leaves: Mapping[Ref, torch.Tensor | None]) -> Any:
    """A module's output, or its `(args, kwargs)`, with these leaves and None for all others."""
    if kind == "output":
        return leaves[()] if () in leaves else _sequence({int(ref[0]): value for ref, value in leaves.items()})
    named = {str(ref[1]): value for ref, value in leaves.items() if ref[0] == 1}
    return _sequence({int(ref[1]): value for ref, value in leaves.items() if ref[0] == 0}), named


def _sequence(leaves: Mapping[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple(leaves.get(i) for i in range(1 + max(leaves, default=-1)))


class PointHooks:
    """Hooks at sites that are not in the graphs. Each exists while a request needs it.

    A module's input, or its output, has one hook for all of its sites. It edits them in the order of the forward pass, so that plans at a
    later one see the edits at an earlier one of the same tensor.

    Args:
        built_in: the points that the site op serves.
        tables: make the edits.
        dtype: the model's.
        peers: the tensor-parallel ranks. Plans are about full tensors, so a hook gathers tensors that are split over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        arch: Architecture,
        built_in: Collection[Point],
        tables: Tables,
        dtype: torch.dtype,
        peers: Peers = ALONE,
    ) -> None:
        self._model = model
        self._peers = peers
        self._arch = arch
        self._tables = tables
        self._dtype = dtype
        self._index = tables.index
        self._built_in = frozenset(built_in)
        self._needed: Counter[Point] = Counter()
        self._handles: dict[Key, Any] = {}
        self.on = False  # whether a plan acts at them in the coming forward
        self._warned: set[str] = set()

    def among(self, points: Collection[Point]) -> list[Point]:
        """The points of this rank that need a hook."""
        return [point for point in points if point in self._index and point not in self._built_in]

    def need(self, points: Collection[Point]) -> None:
        """Add the hooks for a plan with ops at `points`, all of which need hooks."""
        for point in points:
            self._needed[point] += 1
            if (key := self._key(point)) not in self._handles:
                self._handles[key] = self._hook(key)

    def release(self, points: Collection[Point]) -> None:
        """Remove the hooks that no plan needs, once no request has the plan with ops at `points`."""
        self._needed.subtract(points)
        self._needed = +self._needed  # those above 0
        for key in self._handles.keys() - set(map(self._key, self._needed)):
            self._handles.pop(key).remove()

    def warn_once(self, site: str) -> None:
        """Warn that plans at this site run their steps uncompiled."""
        if site not in self._warned:
            self._warned.add(site)
            advice = "" if self._peers is ALONE else " Engines with tensor parallelism have those of graph_sites there."
            _log.warning(
                "Plans at %s run their steps uncompiled: that site is not in this engine's compiled forward.%s",
                site,
                advice,
            )

    def __len__(self) -> int:
        return len(self._handles)

    def _key(self, point: Point) -> Key:
        binding = self._arch.bindings[point]
        return binding.path, binding.kind

    def _hook(self, key: Key) -> Any:
        path, kind = key
        module = self._model.get_submodule(path)
        sites = []
        for point, i in self._index.items():
            if self._key(point) == key:
                binding = self._arch.bindings[point]
                is_whole = self._arch.shard_of(binding) is None
                sites.append((point, i, binding, self._edited if is_whole else self._edited_in_parts))

        def edited(tree: Any) -> Any:
            if not self.on or hooks.is_in_body():  # a trace's code also calls modules, on values of its own
                return None
            for point, i, binding, edit in sites:
                if point in self._needed:
                    tree = edit(i, binding, tree)
            return tree

        if kind == "input":
            return hooks.before(module, lambda args, kwargs: edited((args, kwargs)), first=True)
        if hooks.skips_hooks(module):
            return hooks.around(module, None, edited)
        return hooks.after(module, edited, first=True)

    def _edited(self, index: int, binding: Binding, tree: Any) -> Any:
        """`tree` with the plans' edits. The engine's own tensors are changed only if the site is edited in place."""
        hidden = follow(tree, binding.hidden)
        residual = follow(tree, binding.residual) if binding.residual is not None else None
        # Some routers compute float32 logits in a model of bfloat16; captured rows and the edits of a plan are in the model's dtype.
        has_other_dtype = hidden.dtype != self._dtype
        if has_other_dtype or binding.scale != 1.0 or (residual is not None and residual.ndim == 1):
            return self._edited_as_value(index, binding, tree)
        if binding.in_place and all(part is None or part.is_contiguous() for part in (hidden, residual)):
            self._tables.edit(index, hidden, residual)
            return tree
        edited = self._tables.edited(index, hidden, residual)
        for ref, before, after in zip((binding.hidden, binding.residual), (hidden, residual), edited, strict=True):
            if after is not None and ref is not None and after is not before:
                tree = _written(tree, binding, ref, after)
        return tree

    def _edited_in_parts(self, index: int, binding: Binding, tree: Any) -> Any:
        """The same for a value that is split over the ranks. All ranks have this plan, and so this hook."""
        shard = self._peers.shards((binding.path, binding.kind))[binding.hidden]
        part = follow(tree, binding.hidden)
        value = shard.join(part, part.ndim - 1)
        edited = follow(self._edited(index, binding, replaced(tree, binding.hidden, value)), binding.hidden)
        return replaced(tree, binding.hidden, shard.cut(edited, part.ndim - 1))

    def _edited_as_value(self, index: int, binding: Binding, tree: Any) -> Any:
        """The same for a value that is computed from leaves. Elements that do not change keep their leaf's bits."""
        old = binding.read(functools.partial(follow, tree)).to(self._dtype)
        shape = old.shape
        old = old.flatten(-2) if binding.heads is not None else old
        new, _ = self._tables.edited(index, old, None)
        changed = new != old
        for ref, leaf in binding.leaves(new.view(shape), functools.partial(follow, tree)):
            kept = follow(tree, ref)
            tree = _written(tree, binding, ref, torch.where(changed, leaf.to(kept.dtype), kept))
        return tree


def _written(tree: Any, binding: Binding, ref: Ref, value: torch.Tensor) -> Any:
    """`tree` with a new value for this leaf of a site. If the site is edited in place, the value is copied into the engine's tensor."""
    if not binding.in_place:
        return replaced(tree, ref, value)
    follow(tree, ref).copy_(value)
    return tree


@dataclass(frozen=True)
class Pipeline:
    """Which sites each pipeline stage has. An engine without a pipeline is a single stage.

    Attributes:
        rank: which stage this is.
        each: for each stage, (site, layer) -> width.
        built_in: the points that are in the graphs, of all stages.
    """

    rank: int
    each: tuple[Mapping[Point, int], ...]
    built_in: frozenset[Point]

    @classmethod
    def gathered(
        cls, rank: int, widths: Mapping[Point, int], built_in: Collection[Point], exchange: Callable[[Any], list[Any]]
    ) -> Pipeline:
        """Each stage passes what it knows about itself. `exchange` is collective: it returns what all stages passed, in their order."""
        stages = exchange((dict(widths), sorted(built_in)))
        return cls(
            rank, tuple(each for each, _ in stages), frozenset(point for _, points in stages for point in points)
        )

    @property
    def size(self) -> int:
        return len(self.each)

    @cached_property
    def widths(self) -> dict[Point, int]:
        """(site, layer) -> width, of the whole model."""
        return {point: width for widths in self.each for point, width in widths.items()}

    @property
    def first_layers(self) -> list[int]:
        """The first layer of each stage that has layers."""
        return sorted(min(layer for _, layer in widths) for widths in self.each if widths)

    @cached_property
    def owners(self) -> dict[Point, int]:
        """Point -> its stage."""
        return {point: stage for stage, widths in enumerate(self.each) for point in widths}

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers of this stage."""
        return frozenset(layer for _, layer in self.each[self.rank])
