"""Rows of recorded runs for patches, wherever they are.

Every stage of a pipeline sees every plan, so the stage that has a row knows which others need it: it publishes the rows when the request
begins there, without being asked, and the stage of the patch fetches them if it has to compile the plan. Both forget them with the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from midstream.errors import NeverReachedError, PlanError
from midstream.plan.ops.edit import point_of
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Plan
from midstream.runtime.pipeline import Pipeline
from midstream.runtime.store import RunStore

if TYPE_CHECKING:
    from midstream.ranks.link import Link


class _Plane(NamedTuple):
    """Rows that one stage has and another needs."""

    run: RecordedRun
    site: str
    layer: int


# (the stage that has them, the one that needs them) -> the positions of each plane, in the order of the patches.
_Crossing = dict[tuple[int, int], dict[_Plane, list[int]]]


class Sources:
    """The sources of one request's patches, and its leases on their runs, from its begin on one rank to `close`.

    Args:
        name: of the request.
        length: of its prompt.
        link: to the other stages; None if there are none.

    Raises:
        PlanError: a run is gone, or no stage has a row that the plan needs. All of them say so, with the one whose word counts.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        length: int,
        num_layers: int,
        *,
        runs: RunStore,
        pipeline: Pipeline,
        link: Link | None,
    ) -> None:
        self._runs, self._pipeline, self._link = runs, pipeline, link
        self._crossing: _Crossing = {}
        self._fetched: dict[int, dict[tuple[_Plane, int], torch.Tensor]] = {}  # by the stage that has them
        names = {run.id: run.name for run in plan.runs}
        self._leased = list(names)
        if not names:
            return
        self._body = f"sources of {name}, {length}"
        try:
            if missing := runs.lease(self._leased, 1):  # those that are there are leased
                gone = ", ".join(repr(names[each]) for each in missing)
                raise PlanError(f"The recorded runs {gone} are not there any more; record them again.")
            if pipeline.size > 1:
                self._crossing = _crossing(plan, length, num_layers, runs, pipeline)
        except PlanError:
            self.close()
            raise
        self._publish()

    def _publish(self) -> None:
        """Offer the other stages the rows that they need."""
        pipeline, link, runs = self._pipeline, self._link, self._runs
        for (owner, reader), planes in sorted(self._crossing.items(), key=itemgetter(0)):  # numbers of a body grow
            if owner == pipeline.rank:
                assert link is not None
                rows = tuple(_rows(runs, plane, positions) for plane, positions in planes.items())
                link.publish(self._body, reader, rows, readers=1)

    def row(self, run: RecordedRun, site: str, layer: int, position: int) -> torch.Tensor:
        """`[width]`. Waits for the stage that has it. Raises PlanError."""
        owner = self._pipeline.owners.get((site, layer), self._pipeline.rank)
        if owner == self._pipeline.rank:
            return self._runs.row(run, site, layer, position)
        if owner not in self._fetched:
            self._fetched[owner] = self._fetch(owner)
        return self._fetched[owner][_Plane(run, site, layer), position]

    def _fetch(self, owner: int) -> dict[tuple[_Plane, int], torch.Tensor]:
        assert self._link is not None
        try:
            values: Sequence[torch.Tensor] = self._link.fetch(owner, self._body, self._pipeline.rank).wait()
        except NeverReachedError as error:
            raise PlanError(
                f"Patch.source: the stage that has the recorded run's rows cannot give them: {error}"
            ) from error
        planes = self._crossing[owner, self._pipeline.rank].items()
        return {
            (plane, position): row
            for (plane, positions), rows in zip(planes, values, strict=True)
            for position, row in zip(positions, rows, strict=True)
        }

    def close(self) -> None:
        """The request is over, or was refused."""
        if not self._leased:
            return
        self._runs.lease(self._leased, -1)
        self._fetched.clear()
        if self._crossing and self._link is not None:
            self._link.end(self._body, "the request is over on the stage that has the rows")


def _crossing(plan: Plan, length: int, num_layers: int, runs: RunStore, pipeline: Pipeline) -> _Crossing:
    """Which rows have to go from where to where; the same on all stages."""
    reading = [edit for edit in plan.edits if any(isinstance(value, RecordedRun) for _, value in edit.values())]
    owners, found = pipeline.owners, _Crossing()
    for edit in Plan(tuple(reading)).normal(num_layers, length).edits:
        (run,) = (value for _, value in edit.values() if isinstance(value, RecordedRun))
        site, layer, position = edit.run_row()
        plane = _Plane(run, site, layer)
        runs.check(*plane, position)
        owner, reader = owners.get((site, layer)), owners.get(point_of(edit))
        if owner is not None and reader is not None and owner != reader:
            positions = found.setdefault((owner, reader), {}).setdefault(plane, [])
            if position not in positions:
                positions.append(position)
    return found


def _rows(runs: RunStore, plane: _Plane, positions: list[int]) -> torch.Tensor:
    """`[positions, width]`, a copy."""
    run = runs.check(*plane, positions[0])
    return run.rows[plane.site, plane.layer][[run.at[position] for position in positions]]
