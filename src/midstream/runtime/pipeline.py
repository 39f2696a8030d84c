"""What the stages of a pipeline have of the model, as each of them knows it: a plan is checked and decided on against the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from midstream.sites import Point


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline; an engine without one is a single stage.

    Attributes:
        rank: which of them this is.
        each: the widths of each stage's sites, by (site, layer).
        built_in: the points that are in the graphs, on all stages.
    """

    rank: int
    each: tuple[Mapping[Point, int], ...]
    built_in: frozenset[Point]

    @classmethod
    def gathered(
        cls, rank: int, widths: Mapping[Point, int], built_in: Collection[Point], exchange: Callable[[Any], list[Any]]
    ) -> Pipeline:
        """`exchange` is collective: it gives what every stage passed, in their order."""
        told = exchange((dict(widths), sorted(built_in)))
        return cls(rank, tuple(each for each, _ in told), frozenset(point for _, points in told for point in points))

    @property
    def size(self) -> int:
        return len(self.each)

    @cached_property
    def widths(self) -> dict[Point, int]:
        """Of the whole model."""
        return {point: width for widths in self.each for point, width in widths.items()}

    @cached_property
    def owners(self) -> dict[Point, int]:
        """Point -> its stage."""
        return {point: stage for stage, widths in enumerate(self.each) for point in widths}

    @cached_property
    def layers(self) -> frozenset[int]:
        """Those of this stage."""
        return frozenset(layer for _, layer in self.each[self.rank])
