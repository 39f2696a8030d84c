"""The workers' holdings: vectors and runs, which plans refer to by name (`model.vectors` and `model.runs`), the weights of traces, and
adapters.

    model.vectors["truth"] = tensor                         # [hidden]
    model.vectors.load("directions.safetensors")
    model.generate(prompts, plan=Steer("resid_post", layers=14, vector="truth", scale=2.0))

    run = model.record("The capital of France is", sites=["resid_post"], name="clean")
    model.runs                                              # <runs: clean 3.2 MB>
    model.runs["clean"]                                     # the handle again
    del model.runs["clean"]

Recorded runs share a byte budget: a run that no request uses may be dropped to make room for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple

from midstream.errors import MidstreamError, ParameterError, PlanError
from midstream.plan.fields import nearest
from midstream.plan.selections import Selector
from midstream.plan.values import RecordedRun
from midstream.plan.vectors import Named, Vector, as_vector, load_vectors
from midstream.requests.arguments import Prompt
from midstream.trace.weights import Weight

# Sends a request to every worker and returns their answers: ("list" | "delete" | "lease", arguments).
AskWorkers = Callable[..., Awaitable[Any]]
VectorChanges = tuple[dict[str, Vector], list[str]]  # set, deleted


def run_now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, as on a sync engine, where every answer is there at once. Returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


class Vectors(MutableMapping[str, Vector]):
    """Vectors by name. A plan uses the vector that has the name when the request is submitted."""

    def __init__(self) -> None:
        self._vectors: dict[str, Vector] = {}
        self._set: dict[str, Vector] = {}
        self._deleted: list[str] = []

    def __getitem__(self, name: str) -> Vector:
        if name not in self._vectors:
            raise KeyError(f"no vector {name!r}: {nearest(str(name), self._vectors)}")
        return self._vectors[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._put({name: as_vector(f"vectors[{name!r}]", value)})

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._vectors[name]
        self._set.pop(name, None)
        self._deleted.append(name)

    def __contains__(self, name: object) -> bool:
        return name in self._vectors  # not by `__getitem__`, whose error looks for similar names, which is slow

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __repr__(self) -> str:
        return f"<vectors: {', '.join(f'{name} [{width}]' for name, width in self.widths.items()) or 'none'}>"

    def load(self, path: str | os.PathLike[str]) -> list[str]:
        """Register every vector of a safetensors file under its name in the file. Returns the names.

        Raises PlanError if it is not a safetensors file, or contains anything but vectors `[hidden]` of finite numbers.
        """
        loaded = load_vectors(path)
        self._put(loaded)
        return list(loaded)

    @property
    def widths(self) -> dict[str, int]:
        # Other threads may change them meanwhile.
        return {name: vector.width for name, vector in list(self._vectors.items())}

    @property
    def digests(self) -> dict[str, str]:
        return {name: vector.digest for name, vector in list(self._vectors.items())}

    def take_changes(self) -> VectorChanges:
        """The vectors set and deleted since the last call. Apply deletions first."""
        changes = self._set, self._deleted
        self._set, self._deleted = {}, []
        return changes

    def put_back(self, changes: VectorChanges) -> None:
        """Return changes that could not be sent."""
        self._set = {**changes[0], **self._set}
        self._deleted = changes[1] + self._deleted

    def _put(self, vectors: dict[str, Vector]) -> None:
        for name in vectors:
            Named(name)  # raises for an invalid name
        self._vectors |= vectors
        self._set |= vectors


class RunRequest(NamedTuple):
    """The arguments of `record`.

    Attributes:
        owner: to whom the run's bytes are charged: see `runtime.store.RunStore`.
    """

    prompt: Prompt
    sites: str | Sequence[str]
    layers: Any = "all"
    positions: Any = "all_prompt"
    name: str | None = None
    adapter: Any = None
    owner: str = ""

    def checked_sites(self) -> list[str]:
        """The sites as a list. Raises PlanError for none, and for positions that are not all in the prompt."""
        given = self.positions
        is_word = isinstance(given, str) and given not in ("all_prompt", "last_prompt")
        if is_word or (isinstance(given, Selector) and given.selects_generated):
            allowed = "'all_prompt', 'last_prompt', positions of the prompt, a Span, or a Selector of these"
            raise PlanError(f"record: positions is {given!r}. Allowed: {allowed}.", field="positions")
        sites = [self.sites] if isinstance(self.sites, str) else list(self.sites)
        if not any(sites):
            raise PlanError("record: sites is empty. Allowed: one site or several.", field="sites")
        return sites


class RunInfo(NamedTuple):
    """A recorded run that the workers hold.

    Attributes:
        bytes: of all pipeline stages together; with tensor parallelism each rank of a stage holds a copy of the stage's.
        leases: how many requests use the run or are about to; a run with leases is not dropped.
    """

    name: str
    id: str
    bytes: int
    leases: int
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...]


class Runs(Mapping[str, RecordedRun]):
    """The recorded runs by name. On an async engine, `await runs.listing()` and `await runs.delete(name)`.

    Args:
        finish: runs a coroutine to its end; None on an async engine, whose user awaits it.
    """

    def __init__(self, ask: AskWorkers, finish: Callable[[Coroutine[Any, Any, Any]], Any] | None) -> None:
        self._ask = ask
        self._is_async = finish is None
        self._finish = finish or (lambda coroutine: coroutine)
        self._handles: dict[str, RecordedRun] = {}  # by name; the workers may have dropped some
        self._leases: Counter[str] = Counter()  # by id
        self._asking = asyncio.Lock()

    def __getitem__(self, name: str) -> RecordedRun:
        there = self._there()
        if name not in there:
            raise KeyError(f"no recorded run {name!r}: {nearest(str(name), there)}")
        return there[name]

    def __delitem__(self, name: str) -> None:
        if self._is_async:
            raise MidstreamError(f"On an async engine: await model.runs.delete({name!r}).")
        self.delete(name)

    def __contains__(self, name: object) -> bool:
        return name in self._there()

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def __repr__(self) -> str:
        if self._is_async:
            return f"<runs: {', '.join(self._handles) or 'none'}>"
        shown = [f"{run.name} {run.bytes / 1e6:.1f} MB" + " (in use)" * bool(run.leases) for run in self.listing()]
        return f"<runs: {', '.join(shown) or 'none'}>"

    def listing(self) -> Any:
        """A RunInfo for each run, the least recently used first. Awaitable on an async engine."""
        return self._finish(self._list())

    def delete(self, name: str) -> Any:
        """Delete a run. Running requests that use it continue. Awaitable on an async engine. Raises KeyError for an unknown name."""
        if not self._is_async:
            self[name]  # raises if the workers have dropped it
        return self._finish(self._forget(self._handles.pop(name)))

    async def drop(self, name: str) -> None:
        """Delete a run as `delete` does, for callers that are coroutines."""
        await self._forget(self._handles.pop(name))

    async def add(self, run: RecordedRun) -> RecordedRun:
        """Add a recorded run, replacing an older one of its name."""
        older, self._handles[run.name] = self._handles.get(run.name), run
        if older is not None:
            await self._forget(older)
        return run

    def new_name(self) -> str:
        """The first free name among `run-1`, `run-2`, ..."""
        return next(name for i in range(1, 1 << 30) if (name := f"run-{i}") not in self._handles)

    @property
    def handles(self) -> list[RecordedRun]:
        """The runs that were recorded by this model and not deleted."""
        return list(self._handles.values())

    async def lease(self, ids: list[str]) -> None:
        """Lease runs for a request. If a worker lacks one of them, none is leased, and PlanError is raised.

        Workers are asked for a run's first lease, and told when its last one ends.
        """
        async with self._asking:
            new = [run_id for run_id in ids if not self._leases[run_id]]
            missing = {run_id for answer in await self._ask("lease", new, 1) for run_id in answer} if new else set()
            if not missing:
                self._leases.update(ids)
                return
            await self._ask("lease", new, -1)
        names = [name for name, run in self._handles.items() if run.id in missing]
        self._handles = {name: run for name, run in self._handles.items() if run.id not in missing}
        raise PlanError(
            f"Patch.source: the recorded run {', '.join(map(repr, names)) or sorted(missing)} is not there any more: it was deleted, "
            "or dropped to make room for others. Record it again, with a larger record_bytes if need be.",
            field="Patch.source",
        )

    async def release(self, ids: list[str]) -> None:
        """Return leases."""
        async with self._asking:
            self._leases -= Counter(ids)
            if ended := [run_id for run_id in ids if not self._leases[run_id]]:
                await self._ask("lease", ended, -1)

    async def _forget(self, run: RecordedRun) -> None:
        self._leases.pop(run.id, None)  # the next request that needs it gets an error
        await self._delete(run)

    async def _delete(self, run: RecordedRun) -> None:
        """Delete a run where it is stored. `Remote` overrides this."""
        await self._ask("delete", [run.id])

    def _there(self) -> dict[str, RecordedRun]:
        if not self._is_async:
            self.listing()
        return self._handles

    async def _list(self) -> list[RunInfo]:
        """The runs that every worker has. The handles of other runs are dropped."""
        known = {run.id for run in self._handles.values()}  # others may be recorded while the workers answer
        there = [{run["id"]: run for run in answer} for answer in await self._ask("list")]
        infos = [
            _info(parts, self._leases[run_id])
            for run_id in there[0]
            if len(parts := [runs[run_id] for runs in there if run_id in runs]) == len(there)
        ]
        ids = {info.id for info in infos}
        gone = known - ids
        self._handles = {name: run for name, run in self._handles.items() if run.id not in gone}
        return infos


def _info(parts: list[dict[str, Any]], leases: int) -> RunInfo:
    """One run from all workers' answers, which differ only in leases: a request reaches them at different times.

    `leases`: how many this process holds. The workers count them as one.
    """
    run = parts[0]
    there = max(part["leases"] for part in parts) + max(leases - 1, 0)
    places = (tuple(run[field]) for field in ("sites", "layers", "positions"))
    return RunInfo(run["name"], run["id"], run["bytes"], there, *places)


class HeldWeights:
    """The weights that the workers hold: those in use, and others within a budget, of which the least recently used are dropped first.

    Args:
        budget: bytes.
        tell: tells every worker the digests of the weights to keep, and new weights by their digests. The worker drops all others.

    Attributes:
        sent_bytes: since the start, to each worker.
    """

    def __init__(self, budget: int, tell: Callable[[Sequence[str], Mapping[str, bytes]], Awaitable[Any]]) -> None:
        self.budget, self._tell = budget, tell
        self._held: OrderedDict[str, Weight] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self._unwanted: set[str] = set()
        self._changing = asyncio.Lock()
        self.sent_bytes = 0

    @property
    def in_use(self) -> int:
        """The number of uses of weights that have not ended."""
        return self._uses.total()

    @contextlib.asynccontextmanager
    async def used(self, weights: Mapping[str, Weight]) -> AsyncIterator[None]:
        """The workers hold these weights during the block."""
        if not weights:
            yield
            return
        self._uses.update(weights.keys())
        try:
            await self._hold(weights)
            yield
        finally:
            self._uses -= Counter(weights.keys())
        await self._hold({})  # not after an error: a trace that was interrupted may still block a worker

    async def forget(self, digests: Collection[str]) -> None:
        """Drop weights as soon as no request uses them, and not only when the budget is exceeded."""
        self._unwanted.update(digests)
        await self._hold({})

    async def _hold(self, weights: Mapping[str, Weight]) -> None:
        """Send missing weights. Of the unused ones, drop those to forget, and the least recently used until the rest fits the budget.

        If the workers cannot be told, this record may be wrong until the next call, which tells them of all weights.
        """
        async with self._changing:
            held = self._held
            self._unwanted = (self._unwanted & held.keys()) - weights.keys()
            new = {digest: weight.data for digest, weight in weights.items() if digest not in held}
            for digest in weights.keys() & held.keys():
                held.move_to_end(digest)
            excess = sum(len(weight.data) for weight in held.values()) + sum(map(len, new.values())) - self.budget
            dropped = []
            for digest in [digest for digest in held if not self._uses[digest]]:
                if excess > 0 or digest in self._unwanted:
                    excess -= len(held.pop(digest).data)
                    dropped.append(digest)
            if not (new or dropped):
                return
            await self._tell(list(held), new)
            held.update((digest, weights[digest]) for digest in new)
            self.sent_bytes += sum(map(len, new.values()))


_cleanups: set[asyncio.Task[None]] = set()


async def finish_cleanup(cleanup: Coroutine[Any, Any, None]) -> None:
    """Run a clean-up to its end in a task of its own: a server cancels a request's task again at each of its awaits."""
    task = asyncio.create_task(cleanup)
    _cleanups.add(task)  # asyncio holds its tasks weakly
    task.add_done_callback(_cleanups.discard)
    await asyncio.shield(task)


class LoadedAdapters:
    """The adapters (LoRA) that the engine has loaded for this client.

    vLLM knows an adapter by its number alone, and loads it in the step that first needs it. With two adapters under one number it runs the
    first for both, and an adapter that cannot be loaded ends the engine. So the numbers are compared here, and adapters are loaded before
    their first request.

    Args:
        load: loads an adapter in the workers, and raises ParameterError if that fails. None on a server, where vLLM's front end numbers and
            loads adapters.
    """

    def __init__(self, load: Callable[[Any], Awaitable[None]] | None) -> None:
        self._load = load
        self._loaded: dict[int, tuple[str, str]] = {}  # number -> name and path
        self._loading = asyncio.Lock()

    def check(self, adapters: Iterable[Any]) -> None:
        """Raise ParameterError if vLLM would take one of the adapters for another of them, or for one that is loaded."""
        if self._load is None:
            return
        known = dict(self._loaded)
        for adapter in adapters:
            if adapter is None:
                continue
            if adapter.load_inplace:
                raise ParameterError(
                    "lora_request has load_inplace=True. vLLM's prefix cache would still have the keys and values of the old weights: give "
                    "the new weights a name and a number of their own.",
                    field="lora_request",
                )
            number, own = adapter.lora_int_id, (adapter.lora_name, adapter.lora_path)
            if (other := known.setdefault(number, own)) != own:
                raise ParameterError(
                    f"lora_request: the adapter {own[0]!r} ({own[1]}) has the number {number}, which is that of {other[0]!r} ({other[1]}). "
                    "vLLM knows adapters by their numbers: give each adapter a lora_int_id of its own.",
                    field="lora_request",
                )
            if name := next((n for n, each in known.items() if each[0] == own[0] and n != number), None):
                raise ParameterError(
                    f"lora_request: the adapter {own[0]!r} has the number {number}, and another one of that name has {name}. vLLM's prefix "
                    "cache knows adapters by their names: give each adapter a lora_name of its own.",
                    field="lora_request",
                )

    async def load(self, adapters: Iterable[Any]) -> None:
        """Load the adapters that the engine has not loaded yet. Raises ParameterError for one that it cannot load, and as `check` does."""
        chosen = [adapter for adapter in adapters if adapter is not None]
        if self._load is None or not chosen:
            return
        async with self._loading:
            self.check(chosen)  # another call may have loaded one meanwhile
            for adapter in chosen:
                if adapter.lora_int_id not in self._loaded:
                    await self._load(adapter)
                    self._loaded[adapter.lora_int_id] = adapter.lora_name, adapter.lora_path
