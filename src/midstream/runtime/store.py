"""Keeps the named vectors and recorded runs of a worker, to which plans refer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from midstream.errors import PlanError
from midstream.plan.selections import Selection
from midstream.plan.values import Named, Plan, RecordedRun
from midstream.sites import Point


class VectorStore:
    """Named vectors, float32. Each lies on the device and on the host: reading it back would wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._vectors: dict[str, tuple[torch.Tensor, np.ndarray, str]] = {}

    def set(self, vectors: Mapping[str, tuple[bytes, str]]) -> None:
        """Keep vectors: name -> (little-endian float32, digest)."""
        for name, (data, digest) in vectors.items():
            host = np.frombuffer(data, "<f4").copy()
            self._vectors[name] = (torch.from_numpy(host).to(self._device), host, digest)

    def delete(self, names: Collection[str]) -> None:
        """Forget vectors; unknown names are ignored."""
        for name in names:
            self._vectors.pop(name, None)

    def list(self) -> dict[str, tuple[int, str]]:
        """name -> (width, digest)."""
        return {name: (len(host), digest) for name, (_, host, digest) in self._vectors.items()}

    def get(self, named: Named) -> torch.Tensor:
        """The vector on the device. Raises PlanError if none has that name, or if it is not the one that the plan was made with."""
        return self._known(named)[0]

    def on_host(self, named: Named) -> np.ndarray:
        """The vector on the host. Raises PlanError as `get` does."""
        return self._known(named)[1]

    def _known(self, named: Named) -> tuple[torch.Tensor, np.ndarray]:
        if named.name not in self._vectors:
            there = ", ".join(sorted(self._vectors)) or "none"
            raise PlanError(f"The engine has no vector {named.name!r}; it has: {there}.")
        vector, host, digest = self._vectors[named.name]
        if named.digest not in (None, digest):
            raise PlanError(
                f"The vector {named.name!r} was replaced by another since this request was made; send it again."
            )
        return vector, host


@dataclass
class Run:
    """The activations of one recorded run.

    Attributes:
        rows: (site, layer) -> `[positions, width]` of this stage, on the device, in the model's dtype.
        at: position -> row.
        points: the sites that were recorded, on all stages.
        sizes: bytes on each stage.
        leases: how many requests use it, queued ones included; a leased run is not evicted.
        owner: who has recorded it, on a server.
    """

    id: str
    name: str
    rows: Mapping[Point, torch.Tensor]
    at: dict[int, int]
    points: frozenset[Point]
    sizes: tuple[int, ...]
    leases: int = 0
    owner: str = ""
    _float32: dict[Point, torch.Tensor] = field(
        default_factory=dict
    )  # of planes that were read, while the run is leased

    def row(self, site: str, layer: int, position: int) -> torch.Tensor:
        """float32 `[width]`, at a point that this stage has."""
        if (site, layer) not in self._float32:
            self._float32[site, layer] = self.rows[site, layer].float()
        return self._float32[site, layer][self.at[position]]

    def lease(self, by: int) -> None:
        self.leases += by
        if not self.leases:
            self._float32.clear()


class RunStore:
    """Recorded runs within a byte budget for each stage. To make room, the owner with the most bytes loses its least recently used
    run first. Leased runs are never evicted.

    All ranks get the same calls in the same order and decide by all stages' sizes, so all of them hold the same runs.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._runs: OrderedDict[str, Run] = OrderedDict()

    @property
    def leases(self) -> int:
        """The leases of all runs together."""
        return sum(run.leases for run in self._runs.values())

    def add(self, run: Run) -> None:
        """Keep `run`, evicting others as needed. Raises PlanError if it does not fit beside those in use."""
        leased = _together([other for other in self._runs.values() if other.leases], run)
        size, beside = max(zip(run.sizes, leased, strict=True), key=sum)
        if size + beside > self.budget:
            raise PlanError(
                f"The run {run.name!r} has {size:,} bytes; the budget for recorded runs is {self.budget:,}, of which {beside:,} are "
                "in use. Record fewer sites, layers or positions, or start the engine with a larger record_bytes."
            )
        held, free = Counter({run.owner: sum(run.sizes)}), dict[str, list[Run]]()
        for other in self._runs.values():
            held[other.owner] += sum(other.sizes)
            if not other.leases:
                free.setdefault(other.owner, []).append(other)
        while any(sum(both) > self.budget for both in zip(run.sizes, _together(self._runs.values(), run), strict=True)):
            owner = max(
                filter(free.get, free), key=lambda each: (bool(each), held[each])
            )  # the runs of sweeps have no owner, and go last
            gone = self._runs.pop(free[owner].pop(0).id)
            held[owner] -= sum(gone.sizes)
        self._runs[run.id] = run

    def delete(self, ids: Collection[str]) -> None:
        """Forget runs, leased ones too; unknown ids are ignored."""
        for run_id in ids:
            self._runs.pop(run_id, None)

    def lease(self, ids: Collection[str], by: int) -> list[str]:
        """Add to the leases of runs, or take from them with `by=-1`. Returns the ids that are not there.

        The others are leased all the same. A caller that gets any id back has to return all its leases, on every rank alike.
        """
        for run_id in ids:
            if (run := self._runs.get(run_id)) is not None:
                run.lease(by)
                self._runs.move_to_end(run_id)
        return [run_id for run_id in ids if run_id not in self._runs]

    def check(self, handle: RecordedRun, site: str, layer: int, position: int) -> Run:
        """The run. Raises PlanError, on every stage alike, if it is gone or no stage has that row of it."""
        run = self._runs.get(handle.id)
        if run is None:
            raise PlanError(f"The recorded run {handle.name!r} is not there any more; record it again.")
        if (site, layer) not in run.points or position not in run.at:
            raise PlanError(
                f"The recorded run {handle.name!r} has no row of {site} at layer {layer}, position {position}."
            )
        return run

    def row(self, handle: RecordedRun, site: str, layer: int, position: int) -> torch.Tensor:
        """float32 `[width]`, at a point that this stage has. Raises PlanError as `check` does."""
        return self.check(handle, site, layer, position).row(site, layer, position)

    @property
    def ids(self) -> dict[str, str]:
        """name -> id."""
        return {run.name: run.id for run in self._runs.values()}

    def list(self) -> list[dict[str, Any]]:
        """One dict for each run, with the sites, layers and bytes of all stages."""
        return [
            {
                "id": run.id,
                "name": run.name,
                "bytes": sum(run.sizes),
                "leases": run.leases,
                "sites": sorted({site for site, _ in run.points}),
                "layers": sorted({layer for _, layer in run.points}),
                "positions": sorted(run.at),
            }
            for run in self._runs.values()
        ]


def _together(runs: Collection[Run], like: Run) -> list[int]:
    """The bytes of `runs` on each stage."""
    return [sum(run.sizes[stage] for run in runs) for stage in range(len(like.sizes))]


def make_run(run_id: str, name: str, planes: Mapping[Point, torch.Tensor], positions: Sequence[int]) -> Run:
    """A run on a single stage, from its planes, each `[positions, width]`."""
    rows = {point: each.contiguous() for point, each in planes.items()}
    size = sum(each.numel() * each.element_size() for each in rows.values())
    return Run(run_id, name, rows, {p: i for i, p in enumerate(positions)}, frozenset(rows), (size,))


def recorded_run(
    identity: tuple[str, str, str],
    plan: Plan,
    length: int,
    num_layers: int,
    rows: Mapping[Point, torch.Tensor],
    stage_widths: Sequence[Mapping[Point, int]],
    element_size: int,
) -> Run:
    """The run that a plan's captures recorded, of a prompt that was computed to its end. All captures have the same positions.

    Args:
        identity: its id, name and owner.
        length: of the prompt.
        rows: (site, layer) -> `[positions, width]`, all that was captured on this stage.
        stage_widths: for each stage, (site, layer) -> width.
        element_size: bytes.
    """
    captures = plan.normal(num_layers, length).captures
    positions = Selection.of(captures[0].positions, length).prompt.tolist()
    points = frozenset((capture.site, capture.layers[0]) for capture in captures)
    sizes = [len(positions) * element_size * sum(widths.get(point, 0) for point in points) for widths in stage_widths]
    run_id, name, owner = identity
    at = {position: row for row, position in enumerate(positions)}
    return Run(run_id, name, rows, at, points, tuple(sizes), owner=owner)
