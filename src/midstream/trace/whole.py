"""Whole values under tensor parallelism: a part is gathered where a trace or a plan reads it, and cut where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from midstream.arch.layouts import Layout
from midstream.arch.shards import Layouts
from midstream.sites import Ref
from midstream.trace.agreement import Agreement
from midstream.trace.tree import map_tensors
from midstream.trace.visit import Key

Gather = Callable[[torch.Tensor], torch.Tensor]


class Whole:
    """The parts of this rank, and the way to the others'.

    Args:
        layouts: of the leaves that are parts.
        rank: this one, of those that share a layer.
        gather: collective; `[...]` of every rank to `[ranks, ...]`, in their order.
        agreement: that traces come to the same gather.
    """

    def __init__(self, layouts: Layouts, rank: int, gather: Gather, agreement: Agreement) -> None:
        self._layouts: dict[Key, Mapping[Ref, Layout]] = {(path, kind): each for (path, kind), each in layouts.items()}
        self._rank = rank
        self._gather = gather
        self.agreement = agreement

    def of(self, key: Key) -> Mapping[Ref, Layout]:
        """The layouts of the leaves that are parts at a point."""
        return self._layouts.get(key, {})

    def join(self, layout: Layout, part: torch.Tensor, lead: int) -> torch.Tensor:
        """The whole of a part; its first `lead` axes are those of tokens. Every rank has to ask for it."""
        return layout.join(self._gather(part.contiguous()), lead)

    def cut(self, layout: Layout, whole: torch.Tensor, lead: int) -> torch.Tensor:
        """This rank's part."""
        return layout.cut(whole, self._rank, lead)

    def called(self, path: str, module: Callable[..., Any]) -> Callable[..., Any]:
        """`module` as a function of whole values: collective wherever it has a part of something."""
        taken, given = self.of((path, "input")), self.of((path, "output"))

        def cut(ref: Ref, leaf: torch.Tensor) -> torch.Tensor:
            layout = taken.get(ref)
            return leaf if layout is None else self.cut(layout, leaf, _lead(leaf, layout.width))

        def join(ref: Ref, leaf: torch.Tensor) -> torch.Tensor:
            layout = given.get(ref)
            return leaf if layout is None else self.join(layout, leaf, _lead(leaf, layout.part))

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors((args, kwargs), cut)
            return map_tensors(module(*args, **kwargs), join)

        return call


def _lead(leaf: torch.Tensor, width: int | None) -> int:
    """How many axes come before those that hold `width` elements."""
    axis, size = leaf.ndim, 1
    while axis and size != width:
        axis -= 1
        size *= leaf.shape[axis]
    return axis
