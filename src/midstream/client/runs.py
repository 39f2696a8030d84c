"""`model.runs`: the recorded runs that a model holds.

    run = model.record("The capital of France is", sites=["resid_post"], name="clean")
    model.runs                                  # <runs: clean 3.2 MB>
    model.runs["clean"]                         # the handle again
    del model.runs["clean"]

A run that no request uses may be dropped for another one: they live within a byte budget.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from midstream.errors import MidstreamError, PlanError
from midstream.plan.fields import nearest
from midstream.plan.runs import RecordedRun

# ("list" | "delete" | "lease", its arguments) -> what each worker answers; to be awaited on an async engine.
Ask = Callable[..., Any]


class RunInfo(NamedTuple):
    """One recorded run, as the workers hold it.

    Attributes:
        bytes: of all stages together; with tensor parallelism each rank of a stage holds its stage's.
        leases: requests that use it, now or soon; it is not dropped meanwhile.
    """

    name: str
    id: str
    bytes: int
    leases: int
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...]


class Runs(Mapping[str, RecordedRun]):
    """The recorded runs by name. On an async engine, `await runs.listing()` and `await runs.delete(name)`."""

    def __init__(self, ask: Ask, deferred: bool) -> None:
        self._ask = ask
        self._deferred = deferred
        self._handles: dict[str, RecordedRun] = {}  # by name; some may be gone from the workers

    def __getitem__(self, name: str) -> RecordedRun:
        there = self._there()
        if name not in there:
            raise KeyError(f"no recorded run {name!r}: {nearest(str(name), there)}")
        return there[name]

    def __delitem__(self, name: str) -> None:
        if self._deferred:
            raise MidstreamError(f"On an async engine: await model.runs.delete({name!r}).")
        self.delete(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def __repr__(self) -> str:
        if self._deferred:
            return f"<runs: {', '.join(self._handles) or 'none'}>"
        shown = [f"{run.name} {run.bytes / 1e6:.1f} MB" + " (in use)" * bool(run.leases) for run in self.listing()]
        return f"<runs: {', '.join(shown) or 'none'}>"

    def listing(self) -> Any:
        """A RunInfo for each run, the least recently used first. To be awaited on an async engine."""
        return _then(self._ask("list"), self._listed)

    def delete(self, name: str) -> Any:
        """Forget a run. Requests that have begun with it go on. To be awaited on an async engine. Raises KeyError if there is none."""
        handle = self._handles[name] if self._deferred else self[name]
        del self._handles[name]
        return _then(self._ask("delete", [handle.id]), _nothing)

    def add(self, run: RecordedRun) -> Any:
        """A run has been recorded; an older one of its name is forgotten. To be awaited on an async engine."""
        older, self._handles[run.name] = self._handles.get(run.name), run
        return _then(self._ask("delete", [older.id] if older is not None else []), lambda _: run)

    def new_name(self) -> str:
        """`run-1` or the first after it that no run has."""
        return next(name for i in range(1, 1 << 30) if (name := f"run-{i}") not in self._handles)

    @property
    def handles(self) -> list[RecordedRun]:
        """Those recorded here and not deleted."""
        return list(self._handles.values())

    def lease(self, ids: list[str], by: int) -> Any:
        """Add to the leases of runs, or take from them. Raises PlanError if one is gone. To be awaited on an async engine."""
        return _then(self._ask("lease", ids, by), (lambda answers: self._leased(ids, answers)) if by > 0 else _nothing)

    def _leased(self, ids: list[str], answers: list[list[str]]) -> Any:
        """A lease is had on all workers or, where a run is missing, given back to all."""
        if missing := {run_id for answer in answers for run_id in answer}:
            return _then(self._ask("lease", ids, -1), lambda _: self._refuse(missing))
        return None

    def _refuse(self, missing: set[str]) -> None:
        names = [name for name, run in self._handles.items() if run.id in missing]
        self._handles = {name: run for name, run in self._handles.items() if run.id not in missing}
        raise PlanError(
            f"Patch.source: the recorded run {', '.join(map(repr, names)) or sorted(missing)} is not there any more, "
            "deleted or dropped to make room for others; record it again, with a larger record_bytes if need be."
        )

    def _there(self) -> dict[str, RecordedRun]:
        if not self._deferred:
            self.listing()
        return self._handles

    def _listed(self, answers: list[list[dict[str, Any]]]) -> list[RunInfo]:
        there = [{run["id"]: run for run in answer} for answer in answers]
        everywhere = [
            each for run_id in there[0] if len(each := [runs[run_id] for runs in there if run_id in runs]) == len(there)
        ]
        infos = [_info(parts) for parts in everywhere]
        ids = {info.id for info in infos}
        self._handles = {name: run for name, run in self._handles.items() if run.id in ids}
        return infos


def _nothing(_: Any) -> None:
    pass


def _info(parts: list[dict[str, Any]]) -> RunInfo:
    """One run, of which every worker says the same but for leases: a request comes to them one after the other."""
    run = parts[0]
    places = (tuple(run[field]) for field in ("sites", "layers", "positions"))
    return RunInfo(run["name"], run["id"], run["bytes"], max(part["leases"] for part in parts), *places)


def _then(answer: Any, do: Callable[[Any], Any]) -> Any:
    """`do(answer)`, later if the answer has to be awaited."""
    if not inspect.isawaitable(answer):
        return do(answer)

    async def later(pending: Awaitable[Any]) -> Any:
        done = do(await pending)
        return await done if inspect.isawaitable(done) else done

    return later(answer)
