"""What plans refer to by name and the worker keeps: named vectors and recorded runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from midstream.errors import PlanError
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Named

Point = tuple[str, int]


class VectorStore:
    """Named vectors, float32, on the worker's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._vectors: dict[str, tuple[torch.Tensor, str]] = {}

    def set(self, vectors: Mapping[str, tuple[bytes, str]]) -> None:
        """name -> (little-endian float32, digest)."""
        for name, (data, digest) in vectors.items():
            host = torch.from_numpy(np.frombuffer(data, "<f4").copy())
            self._vectors[name] = (host.to(self._device), digest)

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            self._vectors.pop(name, None)

    def list(self) -> dict[str, tuple[int, str]]:
        """name -> (width, digest)."""
        return {name: (vector.numel(), digest) for name, (vector, digest) in self._vectors.items()}

    def get(self, named: Named) -> torch.Tensor:
        """Raises PlanError if there is none of that name, or another than the plan was made with."""
        if named.name not in self._vectors:
            there = ", ".join(sorted(self._vectors)) or "none"
            raise PlanError(f"The engine has no vector {named.name!r}; it has: {there}.")
        vector, digest = self._vectors[named.name]
        if named.digest not in (None, digest):
            raise PlanError(
                f"The vector {named.name!r} was replaced by another since this request was made; send it again."
            )
        return vector


@dataclass
class Run:
    """The activations of one recorded run.

    Attributes:
        rows: (site, layer) -> `[positions, width]`, on the device, in the model's dtype.
        at: position -> row.
        leases: how many requests use it, here or on their way; a leased run is not evicted.
    """

    id: str
    name: str
    rows: dict[Point, torch.Tensor]
    at: dict[int, int]
    leases: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(rows.numel() * rows.element_size() for rows in self.rows.values())


class RunStore:
    """Recorded runs within a byte budget; the least recently used goes first, one that is in use never."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._runs: OrderedDict[str, Run] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(run.size for run in self._runs.values())

    @property
    def leases(self) -> int:
        return sum(run.leases for run in self._runs.values())

    def add(self, run: Run) -> None:
        """Keep `run`, evicting others as needed. Raises PlanError if it does not fit beside those in use."""
        leased = sum(other.size for other in self._runs.values() if other.leases)
        if run.size + leased > self.budget:
            raise PlanError(
                f"The run {run.name!r} has {run.size:,} bytes; the budget for recorded runs is {self.budget:,}, of which {leased:,} are "
                "in use. Record fewer sites, layers or positions, or start the engine with a larger record_bytes."
            )
        free = [other for other in self._runs.values() if not other.leases]
        while self.size + run.size > self.budget:
            del self._runs[free.pop(0).id]
        self._runs[run.id] = run

    def delete(self, ids: Collection[str]) -> None:
        for run_id in ids:
            self._runs.pop(run_id, None)

    def lease(self, ids: Collection[str], by: int) -> list[str]:
        """Add to the leases of runs (or take from them, `by=-1`); the ids that are not there, in which case nothing is changed."""
        missing = [run_id for run_id in ids if run_id not in self._runs]
        if missing and by > 0:
            return missing
        for run_id in ids:
            if (run := self._runs.get(run_id)) is not None:
                run.leases += by
                self._runs.move_to_end(run_id)
        return missing

    def row(self, handle: RecordedRun, site: str, layer: int, position: int) -> torch.Tensor:
        """`[width]`. Raises PlanError if the run is gone or lacks that row."""
        run = self._runs.get(handle.id)
        if run is None:
            raise PlanError(f"The recorded run {handle.name!r} is not there any more; record it again.")
        if (site, layer) not in run.rows or position not in run.at:
            raise PlanError(
                f"The recorded run {handle.name!r} has no row of {site} at layer {layer}, position {position}."
            )
        return run.rows[site, layer][run.at[position]]

    def list(self) -> list[dict[str, Any]]:
        """One dict a run."""
        return [
            {
                "id": run.id,
                "name": run.name,
                "bytes": run.size,
                "leases": run.leases,
                "sites": sorted({site for site, _ in run.rows}),
                "layers": sorted({layer for _, layer in run.rows}),
                "positions": sorted(run.at),
            }
            for run in self._runs.values()
        ]


def make_run(run_id: str, name: str, planes: Mapping[Point, torch.Tensor], positions: Sequence[int]) -> Run:
    """A run of `planes`, each `[positions, width]`."""
    return Run(
        run_id,
        name,
        {point: rows.contiguous() for point, rows in planes.items()},
        {p: i for i, p in enumerate(positions)},
    )
