"""How the tensor-parallel ranks' parts of a tensor make up the whole one, as the module has it on a single rank.

Legend of shape suffixes: R ranks, t tokens, w one rank's width, W the whole width, in elements of one token. A width may lie in
several axes, heads before their dimensions; the ranks divide the first of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Layout(Protocol):
    """The relation between a rank's part of a leaf and the whole."""

    @property
    def width(self) -> int | None:
        """The whole width, or None if it is a rank's own."""
        ...

    @property
    def part(self) -> int | None:
        """The width on one rank, or None."""
        ...

    def join(self, parts_Rtw: torch.Tensor, lead: int) -> torch.Tensor:
        """The whole from all ranks' parts, whose first `lead` axes behind R are those of tokens."""
        ...

    def cut(self, whole_tW: torch.Tensor, rank: int, lead: int) -> torch.Tensor:
        """What `rank` has of the whole."""
        ...


@dataclass(frozen=True)
class Segment:
    """One of the values that lie side by side in a leaf: queries, keys, values, gate, up.

    Attributes:
        width: on one rank.
        replicas: how many neighbouring ranks have the same, as key-value heads that are fewer than the ranks.
    """

    width: int
    replicas: int = 1


@dataclass(frozen=True)
class Shards:
    """Each rank has a part of every segment; the whole has the segments side by side, each of them whole."""

    segments: tuple[Segment, ...]
    ranks: int

    @property
    def width(self) -> int:
        return sum(self._widths)

    @property
    def part(self) -> int:
        """The width on one rank."""
        return sum(segment.width for segment in self.segments)

    @property
    def _widths(self) -> list[int]:
        return [segment.width * (self.ranks // segment.replicas) for segment in self.segments]

    def join(self, parts_Rtw: torch.Tensor, lead: int) -> torch.Tensor:
        flat_Rtw = parts_Rtw.flatten(1 + lead)
        whole = []
        for segment, part_Rtw in zip(
            self.segments, flat_Rtw.split([s.width for s in self.segments], dim=-1), strict=True
        ):
            whole += part_Rtw[:: segment.replicas].unbind()
        return torch.cat(whole, dim=-1).unflatten(-1, (-1, *parts_Rtw.shape[2 + lead :]))

    def cut(self, whole_tW: torch.Tensor, rank: int, lead: int) -> torch.Tensor:
        wholes = whole_tW.flatten(lead).split(self._widths, dim=-1)
        parts = [
            one.narrow(-1, rank // segment.replicas * segment.width, segment.width)
            for segment, one in zip(self.segments, wholes, strict=True)
        ]
        return torch.cat(parts, dim=-1).unflatten(-1, (-1, *whole_tW.shape[1 + lead :]))

    def columns(self, first: int, width: int) -> Shards | None:
        """The layout of a rank's columns from `first` on, if they are whole segments."""
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
    """The whole is the sum of what the ranks have. Written, it is the first rank's and nothing the others'."""

    ranks: int

    width = None
    part = None

    def join(self, parts_Rtw: torch.Tensor, lead: int) -> torch.Tensor:
        return parts_Rtw.sum(0)

    def cut(self, whole_tW: torch.Tensor, rank: int, lead: int) -> torch.Tensor:
        return whole_tW if rank == 0 else torch.zeros_like(whole_tW)
