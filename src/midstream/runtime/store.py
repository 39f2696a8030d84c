"""What plans refer to by name and the worker keeps: named vectors and recorded runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from midstream.errors import PlanError
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Named
from midstream.sites import Point


class VectorStore:
    """Named vectors, float32, on the worker's device and on the host, which would have to wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._vectors: dict[str, tuple[torch.Tensor, np.ndarray, str]] = {}

    def set(self, vectors: Mapping[str, tuple[bytes, str]]) -> None:
        """name -> (little-endian float32, digest)."""
        for name, (data, digest) in vectors.items():
            host = np.frombuffer(data, "<f4").copy()
            self._vectors[name] = (torch.from_numpy(host).to(self._device), host, digest)

    def delete(self, names: Collection[str]) -> None:
        """Forget vectors; a name that is not there is passed over."""
        for name in names:
            self._vectors.pop(name, None)

    def list(self) -> dict[str, tuple[int, str]]:
        """name -> (width, digest)."""
        return {name: (len(host), digest) for name, (_, host, digest) in self._vectors.items()}

    def get(self, named: Named) -> torch.Tensor:
        """On the device. Raises PlanError if there is none of that name, or another than the plan was made with."""
        return self._known(named)[0]

    def on_host(self, named: Named) -> np.ndarray:
        """On the host. Raises as `get` does."""
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
        points: what all stages together have of it.
        sizes: bytes on each stage.
        leases: how many requests use it, here or on their way; a leased run is not evicted.
    """

    id: str
    name: str
    rows: Mapping[Point, torch.Tensor]
    at: dict[int, int]
    points: frozenset[Point]
    sizes: tuple[int, ...]
    leases: int = 0


class RunStore:
    """Recorded runs within a byte budget of each stage; the least recently used goes first, one that is in use never.

    What is kept, leased and dropped follows from what all ranks are told in the same order, so all of them hold the same runs.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._runs: OrderedDict[str, Run] = OrderedDict()

    @property
    def leases(self) -> int:
        """Of all runs together."""
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
        free = [other for other in self._runs.values() if not other.leases]
        while any(map(self._is_over, run.sizes, _together(self._runs.values(), run))):
            del self._runs[free.pop(0).id]
        self._runs[run.id] = run

    def _is_over(self, size: int, held: int) -> bool:
        return size + held > self.budget

    def delete(self, ids: Collection[str]) -> None:
        """Forget runs, leased ones too; an id that is not there is passed over."""
        for run_id in ids:
            self._runs.pop(run_id, None)

    def lease(self, ids: Collection[str], by: int) -> list[str]:
        """Add to the leases of runs (or take from them, `by=-1`); the ids that are not there.

        Those that are there are leased all the same: whoever was told of others gives all of them back, on every rank alike.
        """
        for run_id in ids:
            if (run := self._runs.get(run_id)) is not None:
                run.leases += by
                self._runs.move_to_end(run_id)
        return [run_id for run_id in ids if run_id not in self._runs]

    def check(self, handle: RecordedRun, site: str, layer: int, position: int) -> Run:
        """The run. Raises PlanError, on all stages alike, if it is gone or no stage has that row of it."""
        run = self._runs.get(handle.id)
        if run is None:
            raise PlanError(f"The recorded run {handle.name!r} is not there any more; record it again.")
        if (site, layer) not in run.points or position not in run.at:
            raise PlanError(
                f"The recorded run {handle.name!r} has no row of {site} at layer {layer}, position {position}."
            )
        return run

    def row(self, handle: RecordedRun, site: str, layer: int, position: int) -> torch.Tensor:
        """`[width]`, of a point that this stage has. Raises PlanError as `check` does."""
        run = self.check(handle, site, layer, position)
        return run.rows[site, layer][run.at[position]]

    def list(self) -> list[dict[str, Any]]:
        """One dict a run, of all stages together."""
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
    """Bytes on each stage."""
    return [sum(run.sizes[stage] for run in runs) for stage in range(len(like.sizes))]


def make_run(run_id: str, name: str, planes: Mapping[Point, torch.Tensor], positions: Sequence[int]) -> Run:
    """A run of `planes`, each `[positions, width]`, which are all there is of it."""
    rows = {point: each.contiguous() for point, each in planes.items()}
    size = sum(each.numel() * each.element_size() for each in rows.values())
    return Run(run_id, name, rows, {p: i for i, p in enumerate(positions)}, frozenset(rows), (size,))
