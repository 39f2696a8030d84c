"""A planned request on its way through a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.runtime.images import Image
from midstream.runtime.outlet import Piece
from midstream.runtime.plan_request import PlanRequest
from midstream.runtime.sources import Sources


@dataclass
class Planned:
    """One planned request on its way.

    Attributes:
        sources: of its patches.
        captured: positions below this have been captured.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        stops_at_text: whether it ends where a string comes up.
        pieces: captured rows that are not sent.
        size: their bytes.
    """

    carried: PlanRequest
    image: Image
    sources: Sources
    captured: int = 0
    computed: int = 0
    complete: bool = False
    stops_at_text: bool = False
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        return self.image.last is not None and self.captured >= self.image.last

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.size += piece.size

    def take_pieces(self) -> list[Piece]:
        pieces, self.pieces, self.size = self.pieces, [], 0
        return pieces
