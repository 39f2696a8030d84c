"""Captured rows that are kept as a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from midstream.errors import PlanError
from midstream.plan.positions import captured_positions
from midstream.plan.values import Plan
from midstream.runtime.outlet import Piece
from midstream.runtime.pipeline import Pipeline
from midstream.runtime.store import Run
from midstream.sites import Point


def check_recorded(plan: Plan) -> None:
    """Raise PlanError for captures that make no run."""
    if len({capture.positions for capture in plan.captures}) != 1:
        raise PlanError("A recorded run has the same positions of all its sites.")


def recorded(
    identity: tuple[str, str],
    plan: Plan,
    length: int,
    num_layers: int,
    pieces: Sequence[Piece],
    pipeline: Pipeline,
    size: int,
) -> Run:
    """The run of a prompt that was computed to its end: this stage's rows, and which ones the others have.

    Args:
        identity: its id and name.
        pieces: all rows that were captured here.
        size: bytes of an element.
    """
    captures = plan.normal(num_layers, length).captures
    positions = captured_positions(captures[0].positions, length).prompt.tolist()
    points = frozenset((capture.site, capture.layers[0]) for capture in captures)
    sizes = (len(positions) * size * sum(widths.get(point, 0) for point in points) for widths in pipeline.each)
    at = {position: row for row, position in enumerate(positions)}
    return Run(*identity, _planes(pieces), at, points, tuple(sizes))


def _planes(pieces: Sequence[Piece]) -> Mapping[Point, torch.Tensor]:
    return {
        (plane.site, plane.layer): torch.cat([p.rows[:, plane.offset : plane.offset + plane.width] for p in pieces])
        for plane in (pieces[0].layout if pieces else ())
    }
