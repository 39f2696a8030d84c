"""Pipeline stages as plans see them: which stage has which sites, and how a patch gets recorded rows that another stage has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from midstream.errors import NeverReachedError, PlanError
from midstream.plan.ops.edit import point_of
from midstream.plan.values import Plan, RecordedRun
from midstream.ranks.link import Link
from midstream.runtime.store import RunStore
from midstream.sites import Point


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
        """From what each stage knows of itself. `exchange` is collective: it returns what every stage passed, in their order."""
        told = exchange((dict(widths), sorted(built_in)))
        return cls(rank, tuple(each for each, _ in told), frozenset(point for _, points in told for point in points))

    @property
    def size(self) -> int:
        return len(self.each)

    @cached_property
    def widths(self) -> dict[Point, int]:
        """(site, layer) -> width, of the whole model."""
        return {point: width for widths in self.each for point, width in widths.items()}

    @cached_property
    def owners(self) -> dict[Point, int]:
        """Point -> its stage."""
        return {point: stage for stage, widths in enumerate(self.each) for point in widths}

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers of this stage."""
        return frozenset(layer for _, layer in self.each[self.rank])


class _Plane(NamedTuple):
    """Rows of a recorded run at one site and layer."""

    run: RecordedRun
    site: str
    layer: int


# (stage that has the rows, stage that needs them) -> positions of each plane, in the order of the patches.
_Crossing = dict[tuple[int, int], dict[_Plane, list[int]]]


class Sources:
    """The recorded rows that one request's patches need, and its leases on the runs, until `close`.

    Every stage sees every plan. So the stage that has a row knows which other stage needs it, and publishes it when the request begins
    there; the other stage fetches it if it has to compile the plan.

    Args:
        name: of the request.
        length: of its prompt.
        link: to the other stages; None if there are none.

    Raises:
        PlanError: a run is gone, or no stage has a row that the plan needs. Every stage raises it.
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
        self._fetched: dict[int, dict[tuple[_Plane, int], torch.Tensor]] = {}  # by owning stage
        names = {run.id: run.name for run in plan.runs}
        self._leased = list(names)
        if not names:
            return
        self._body = f"sources of {name}, {length}"
        try:
            if missing := runs.lease(self._leased, 1):  # leases the others
                gone = ", ".join(repr(names[each]) for each in missing)
                raise PlanError(f"The recorded runs {gone} are not there any more; record them again.")
            if pipeline.size > 1:
                self._crossing = _crossing(plan, length, num_layers, runs, pipeline)
        except PlanError:
            self.close()
            raise
        self._publish()

    def _publish(self) -> None:
        """Publish the rows that other stages need."""
        pipeline, link, runs = self._pipeline, self._link, self._runs
        for (owner, reader), planes in sorted(
            self._crossing.items(), key=itemgetter(0)
        ):  # a body's numbers have to grow
            if owner == pipeline.rank:
                assert link is not None
                rows = tuple(_rows(runs, plane, positions) for plane, positions in planes.items())
                link.publish(self._body, reader, rows, readers=1)

    def row(self, run: RecordedRun, site: str, layer: int, position: int) -> torch.Tensor:
        """`[width]`. Waits for the stage that has the row. Raises PlanError."""
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
    """Which rows each stage needs from which other stage. All stages compute the same."""
    reading = [edit for edit in plan.edits if edit.reads_run]
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
