"""Runs sweeps. Each cell is one request: the patched prompt with a `Patch` from the recorded run of the other prompt.

For each pair of prompts, a sweep records both, runs both without a patch, runs the cells with noise runs among them, and deletes the
recorded runs. So it holds the recorded runs of one pair at a time. Cells are independent requests, which share the KV blocks before their
first patched position.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import secrets
import time
import warnings
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from midstream.errors import EngineClosedError, MidstreamError, ParameterError, PlanError, about
from midstream.plan.values import Capture, Patch, Plan, RecordedRun
from midstream.progress import Bar
from midstream.requests.arguments import Answers, Prompt, offsets_of
from midstream.requests.invokes import Invoke, InvokeResult
from midstream.requests.vectors_and_runs import RunRequest, finish_cleanup
from midstream.sweeps.cells import (
    SweepRequest,
    Tokens,
    align,
    cells_in_order,
    columns_of,
    graded,
    heads_of,
    rows_of,
    spaces_missing,
    windows_of,
)
from midstream.sweeps.events import (
    LOWEST,
    Baselines,
    Cell,
    Event,
    Grid,
    Noise,
    Outline,
    Pair,
    Summary,
    decode_event,
    encode_event,
)
from midstream.sweeps.results import SweepResult

# Jobs in a group, and groups that a sweep runs at a time. Both are small, because the event loop of a server serves other clients, too.
ENGINE_GROUP, ENGINE_GROUPS = 32, 16
PROCESS_GROUP = 128  # jobs on a model in this process
# The groups of all sweeps together fill at most this many of the engine's batches, since later requests wait for them.
_BATCHES = 4
_BASELINES, _IDENTITIES = 2, 6  # noise runs among the cells of each pair
OUTLINE, CELLS, RESULT = "outline.json", "cells.jsonl", "result.npz"  # in the directory of `to`


@dataclass(frozen=True)
class Job:
    """One request of a sweep: an event without its log-probabilities, and the plan."""

    event: Cell | Noise
    plan: Plan


class SweepRun:
    """One call of `sweep`."""

    def __init__(self, model: Any, asked: SweepRequest, to: Any = None) -> None:
        self._model, self.asked = model, asked
        if asked.top and not model.has_engine:
            raise ParameterError("top needs a VLLM or a Remote: a LanguageModel has no logprobs.", field="top")
        self._directory = None if to is None else Path(to).expanduser()
        self.result: SweepResult | None = None

    def outline(self) -> Outline:
        """The outline of the sweep. Makes all checks that need no request."""
        model, asked = self._model, self.asked
        with about("clean"):
            clean = [*map(self._tokens, asked.clean, model.ids_of(asked.clean))]
        corrupt: list[Any] = [None] * len(clean)
        if asked.corrupt is not None:
            with about("corrupt"):
                corrupt = [*map(self._tokens, asked.corrupt, model.ids_of(asked.corrupt))]
        self._bases: list[Any] = clean
        self._others: list[Any] = corrupt
        if asked.direction == "denoising":
            self._bases, self._others = corrupt, clean
        if asked.source != "run":
            self._others = [None] * len(clean)  # an ablation reads no position of another prompt
        self._answers = [graded(model, *pair) for pair in zip(asked.answer, asked.foil, strict=True)]
        rows = rows_of(asked.layers, asked.sites, model.facts)
        grid = Grid(
            list(asked.sites),
            rows,
            heads_of(asked.heads, self._head_count(rows)),
            columns_of(asked.positions, self._bases, self._others),
        )
        pairs = [
            Pair(a.texts, None if b is None else b.texts, answer, foil, _skipped(*both))
            for a, b, answer, foil, *both in zip(
                clean, corrupt, asked.answer, asked.foil, self._bases, self._others, strict=True
            )
        ]
        coarse, cells = None, _count(grid, len(pairs))
        if asked.coarse is not None:
            coarse = windows_of(grid, asked.coarse, self._bases)
            fine = asked.best * asked.coarse[0] * asked.coarse[1] * len(pairs) * len(grid.sites)
            cells = _count(coarse, len(pairs)) + min(fine, cells)
        name = model.model_name
        if asked.adapter is not None:
            name = f"{name} with the adapter {model.name_of_adapter(asked.adapter)}"
        outline = Outline(name, asked.metric_name, asked.direction, asked.source, pairs, grid, coarse, cells)
        self.result = SweepResult(outline, asked.metric)
        self._check(outline)
        return outline

    def _check(self, outline: Outline) -> None:
        """Raise PlanError if this model or engine cannot patch one of the sites or layers, or if no cell is left."""
        if not outline.cells:
            raise PlanError(
                "positions: none of them can be patched, because these tokens have no counterpart in the other prompt.",
                field="positions",
            )
        for site, layers in itertools.product(outline.grid.sites, outline.grid.layers):
            for layer in layers:
                with about("sites"):
                    patch = Patch(site, layer=layer, position=0, source="zeros")
                    self._model.planner.check(Plan(self._model.plan.edits) + patch)

    def _tokens(self, prompt: Prompt, ids: list[int]) -> Tokens:
        texts = [self._model.tokenizer.decode([token]) for token in ids]
        return Tokens(ids, texts, functools.cache(lambda: offsets_of(prompt, ids, self._model.tokenizer)))

    def _head_count(self, rows: Sequence[Sequence[int]]) -> int:
        """How many heads each of these layers has; 0 if they lack `attn_z`. Raises ParameterError in a sweep over heads if they differ."""
        facts, layers = self._model.facts, set(itertools.chain.from_iterable(rows))
        each = {at: facts.widths[at] // size for at, size in facts.head_dims.items() if at[0] == "attn_z"}
        counts = sorted({count for (_, layer), count in each.items() if layer in layers})
        if self.asked.heads is not None and len(counts) > 1:
            text = f"heads: the layers have different numbers of heads, {counts}. Sweep layers of one kind at a time: layers=[...]."
            raise ParameterError(text, field="heads")
        return counts[0] if counts else 0

    # Running. On a model in this process no await ever waits.

    async def events(self) -> AsyncGenerator[Event]:
        """The sweep's events. Closing the generator ends the running requests and deletes the recorded runs."""
        began, model = time.monotonic(), self._model
        await model.start()
        # A thread reads the prompts on an async engine: the event loop serves others as well.
        outline = await asyncio.to_thread(self.outline) if model._is_async else self.outline()
        result = self.result
        assert result is not None
        log = _Log(self._directory, outline) if self._directory is not None else None
        yield outline
        done = set[Any]()
        for event in log.before if log is not None else ():
            if isinstance(event, Cell) and event.void is not None:
                continue  # a void cell runs again
            if isinstance(event, Cell):
                done.add(event.key)
            yield result.take(event)
        try:
            stages: list[Literal["coarse", "fine"]] = ["fine"] if outline.coarse is None else ["coarse", "fine"]
            for stage in stages:
                make = self._cells(outline, stage, result, done)
                for number in range(len(outline.pairs)):
                    cells = await asyncio.to_thread(make, number) if model._is_async else make(number)
                    async with contextlib.aclosing(self._pair(number, cells)) as running:
                        async for event in running:
                            if log is not None:
                                log.write(event)
                            yield result.take(event)
        finally:
            if log is not None:
                log.close()
        void = len(result.void) + (len(result.coarse.void) if result.coarse is not None else 0)
        floor = result.noise_floor
        summary = Summary(None if math.isnan(floor) else floor, result.count, void, time.monotonic() - began)
        result.take(summary)
        if self._directory is not None:
            result.save(self._directory / RESULT)
        yield summary

    def _cells(
        self, outline: Outline, stage: Literal["coarse", "fine"], result: SweepResult, done: Container[Any]
    ) -> Callable[[int], list[Cell]]:
        """A function that returns a pair's cells of a stage, without results. It leaves out the cells in `done`."""
        grid = outline.grid_of(stage)
        chosen: set[Any] | None = None
        if stage == "fine" and outline.coarse is not None:
            assert result.coarse is not None
            chosen = {
                (site, layer, column)
                for site in grid.sites
                for layer, column in _within(result.coarse, outline, site, self.asked)
            }

        def cells(pair: int) -> list[Cell]:
            found = []
            for site, index in cells_in_order(grid):
                column, layers = grid.columns[index[-1]], grid.layers[index[0]]
                positions = column.positions[pair]
                if positions is None or (chosen is not None and (site, layers[0], index[-1]) not in chosen):
                    continue
                head = None if grid.heads is None else grid.heads[index[1]]
                text = "".join(self._bases[pair].texts[i] for i in positions)
                cell = Cell(pair, stage, site, list(index), layers, head, positions, text)
                if cell.key not in done:
                    found.append(cell)
            return found

        return cells

    async def _pair(self, number: int, cells: list[Cell]) -> AsyncGenerator[Event]:
        if not cells:
            return
        base, stage = self._bases[number], cells[0].stage
        assert self.result is not None
        grid = self.result.outline.grid_of(stage)
        runs: list[RecordedRun] = []
        async with self._deleted(self._recorded(number, grid, runs), runs) as (source, own):
            jobs = self._jobs(number, cells, grid, source, own)
            yield await self._baselines(number)
            given = (base.ids, self._answers[number], jobs)
            count = len(cells) + _noise_runs(len(cells))
            running = self._run_on_engine(*given, count) if self._model.has_engine else self._run(*given)
            async with contextlib.aclosing(running) as done:
                async for event in done:
                    yield event

    @contextlib.asynccontextmanager
    async def _deleted(self, recording: Any, runs: list[RecordedRun]) -> AsyncIterator[Any]:
        """A block with the result of `recording`, a coroutine that adds each run that it records to `runs`. Deletes the runs at its end."""
        if not self._model.has_engine:
            try:
                yield await recording
            finally:
                await self._delete_runs(runs)
            return
        recording = asyncio.ensure_future(recording)
        try:
            yield await asyncio.shield(recording)
        finally:
            await finish_cleanup(self._delete_runs(runs, recording))

    async def _recorded(self, number: int, grid: Grid, runs: list[RecordedRun]) -> tuple[Any, RecordedRun]:
        """The source of the patches, and the patched prompt's own run. Recorded runs are leased, and added to `runs` at once."""
        sites, layers = self._planes(grid)

        async def record(ids: list[int]) -> RecordedRun:
            asked = RunRequest(ids, sites, layers, name=new_name(), adapter=self.asked.adapter)
            run: RecordedRun = await self._model._recording(asked)
            runs.append(run)
            await self._model.runs.lease([run.id])
            return run

        own = await record(self._bases[number].ids)
        if self.asked.source == "run":
            return await record(self._others[number].ids), own
        return (await self._mean(sites, layers) if self.asked.source == "mean" else "zeros"), own

    def _planes(self, grid: Grid) -> tuple[list[str], list[int]]:
        """The sites and layers of the recorded runs."""
        return grid.sites, sorted({layer for row in grid.layers for layer in row})

    async def _delete_runs(self, runs: list[RecordedRun], recording: Awaitable[Any] | None = None) -> None:
        """Release and delete `runs` after `recording` has ended."""
        if recording is not None:
            await asyncio.gather(recording, return_exceptions=True)
        for run in runs:
            with contextlib.suppress(MidstreamError, KeyError):  # a dead engine has no runs to delete
                await self._model.runs.release([run.id])
                await self._model.runs.drop(run.name)

    async def _mean(self, sites: list[str], layers: list[int]) -> dict[Any, np.ndarray]:
        """The mean of each site and layer over all tokens of the patched prompts: float32 `[width]`."""
        if (known := getattr(self, "_means", None)) is not None:
            return known  # type: ignore[no-any-return]
        plan = Plan(tuple(Capture(site, layers=layers, positions="all_prompt") for site in sites))
        sums: dict[Any, Any] = {}
        for base in self._bases:
            result = await self._one(base.ids, plan, Answers())
            for key, rows in result.output.captures.items():
                sums[key] = sums.get(key, 0) + rows.double().sum(0)
        count = sum(len(base.ids) for base in self._bases)
        self._means = {key: (total / count).float().numpy() for key, total in sums.items()}
        return self._means

    async def _baselines(self, number: int) -> Baselines:
        """Run both prompts without a patch, each alone."""
        answers, pair = self._answers[number], number if len(self._answers) > 1 else None
        prompts = [asked[number] for asked in (self.asked.clean, self.asked.corrupt) if asked is not None]
        results = [await self._one(prompt, Plan(), answers) for prompt in prompts]
        each = [_logprobs(result.output, answers) for result in results]
        warned = spaces_missing(answers, [result.missing for result in results], pair)
        return Baselines(number, each[0], each[1] if len(each) > 1 else None, warned)

    async def _one(self, prompt: Prompt, plan: Plan, answers: Answers) -> InvokeResult:
        (result,) = await self._model._results(self._model._run([self._invoke(prompt, plan, answers)]))
        return result

    def _invoke(self, prompt: Prompt, plan: Plan, answers: Answers, **params: Any) -> Invoke:
        params = {"max_tokens": 1, "temperature": 0.0, **params}
        return Invoke(prompt, None, params, plan, answers, adapter=self.asked.adapter)

    # Cells as requests.

    def _jobs(self, number: int, cells: list[Cell], grid: Grid, source: Any, own: RecordedRun) -> Iterator[Job]:
        """The pair's requests: its cells, with the noise runs spread among them."""
        noise = _noise_runs(len(cells))
        step = len(cells) // noise
        for k, cell in enumerate(cells):
            yield Job(cell, self._plan(cell, grid, source, own))
            if k % step == 0 and k // step < noise:
                if (k // step) % 4 == 0:
                    yield Job(Noise(number, "baseline", []), Plan())
                else:
                    yield Job(Noise(number, "identity", []), self._plan(cell, grid, own, own))

    def _plan(self, cell: Cell, grid: Grid, source: Any, own: RecordedRun) -> Plan:
        """The patches of a cell: the same positions at each of its layers. `own` is the patched prompt's own run."""
        sources = cell.positions if source is own else grid.columns[cell.index[-1]].sources[cell.pair]
        reads_run = isinstance(source, RecordedRun)
        return Plan(
            tuple(
                Patch(
                    cell.site,
                    layer=layer,
                    position=cell.positions,
                    source=source[cell.site, layer] if isinstance(source, dict) else source,
                    source_position=sources if reads_run else None,
                    head=cell.head,
                )
                for layer in cell.layers
            )
        )

    async def _run(self, ids: list[int], answers: Answers, jobs: Iterator[Job]) -> AsyncGenerator[Event]:
        """The events of jobs as they end, one group after the other."""
        for group in _groups(jobs, PROCESS_GROUP):
            async with contextlib.aclosing(self._run_group(ids, answers, group)) as events:
                async for event in events:
                    if event is not None:
                        yield event

    async def _run_on_engine(
        self, ids: list[int], answers: Answers, jobs: Iterator[Job], count: int
    ) -> AsyncGenerator[Event]:
        """The events of jobs as they end. Several groups run at a time, and take turns with the groups of other sweeps."""
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        turns: SweepTurns = self._model.connection.sweep_turns
        groups, tasks = _groups(jobs, turns.jobs(len(ids) * self._parts)), set[asyncio.Task[None]]()

        async def run(group: list[Job]) -> None:
            try:
                async with (
                    turns.taken(self, len(group) * self._parts * len(ids)),
                    contextlib.aclosing(self._run_group(ids, answers, group)) as events,
                ):
                    async for event in events:
                        queue.put_nowait(event)
            except Exception as error:
                queue.put_nowait(error)

        def start(_: Any = None) -> None:
            if (group := next(groups, None)) is not None:
                task = asyncio.create_task(run(group))
                task.add_done_callback(start)
                tasks.add(task)

        for _ in range(ENGINE_GROUPS):
            start()
        try:
            for _ in range(count):
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is not None:
                    yield found
        finally:
            groups = iter(())  # so that no other group starts
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_group(self, ids: list[int], answers: Answers, group: list[Job]) -> AsyncGenerator[Event | None]:
        """The event of each job of a group as it ends; None for a job without an event."""
        results: dict[int, InvokeResult] = {}
        waiting = set(range(len(group)))

        def parts(job: int) -> range:
            return range(job * self._parts, (job + 1) * self._parts)

        try:
            invokes = [invoke for job in group for invoke in self._invokes(ids, answers, job)]
            async with contextlib.aclosing(self._model._run(invokes).items()) as items:
                async for index, _, result in items:
                    if result is None:
                        continue
                    results[index], job = result, index // self._parts
                    if all(part in results for part in parts(job)):
                        waiting.discard(job)
                        yield self._ended(group[job], [results[part] for part in parts(job)], answers)
        except PlanError as error:  # a recorded run is gone
            for job in waiting:
                yield self._ended(group[job], [InvokeResult([], None, error=error)], answers)

    @property
    def _parts(self) -> int:
        """The number of requests of a job: one grades the answers; with `top`, another returns the likeliest tokens."""
        return 2 if self.asked.top else 1

    def _invokes(self, ids: list[int], answers: Answers, job: Job) -> list[Invoke]:
        graded = self._invoke(ids, job.plan, answers)
        return [graded, self._invoke(ids, job.plan, Answers(), logprobs=self.asked.top)] if self.asked.top else [graded]

    def _ended(self, job: Job, results: Sequence[InvokeResult], answers: Answers) -> Event | None:
        """The job's event with its log-probabilities, or with the reason why it is void. None for a failed noise run."""
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None:
            if isinstance(job.event, Noise):
                return None
            return msgspec.structs.replace(job.event, void=str(error))
        graded, *top = [result.output for result in results]
        likeliest = [_likeliest(output, self.asked.top, self._model.tokenizer) for output in top]
        return msgspec.structs.replace(
            job.event, logprobs=_logprobs(graded, answers), top=likeliest[0] if likeliest else None
        )


def _warn(event: Event) -> None:
    """Give the user the warnings of an event. A server does not call this: it sends the event, and its client warns."""
    for text in event.warnings if isinstance(event, Baselines) else ():
        warnings.warn(text, stacklevel=2)


def new_name() -> str:
    """The name of a recorded run of a sweep."""
    return f"sweep-{secrets.token_hex(6)}"


def _noise_runs(cells: int) -> int:
    return min(_BASELINES + _IDENTITIES, cells)


def _logprobs(output: Any, answers: Answers) -> list[float]:
    if not output.answers:
        raise MidstreamError("The engine returned no log-probabilities for the answers.")
    return [max(output.answers[answer], LOWEST) for answer in answers]


def _likeliest(output: Any, count: int, tokenizer: Any) -> list[tuple[str, float]]:
    found = sorted(((each.logprob, token) for token, each in output.outputs[0].logprobs[0].items()), reverse=True)
    return [(tokenizer.decode([token]), max(logprob, LOWEST)) for logprob, token in found[:count]]


def _groups(jobs: Iterable[Job], size: int) -> Iterator[list[Job]]:
    remaining = iter(jobs)
    while group := list(itertools.islice(remaining, size)):
        yield group


def _within(coarse: SweepResult, outline: Outline, site: str, asked: SweepRequest) -> Iterator[tuple[int, int]]:
    """The layer and the column of each cell in the best windows of a site."""
    assert asked.coarse is not None
    effects = np.abs(coarse.effects[site])
    effects = effects.max(1) if effects.ndim == 3 else effects
    order = np.argsort(-np.nan_to_num(effects, nan=-1.0), axis=None)[: asked.best]
    grid, (rows, step) = outline.grid, asked.coarse
    for row, column in zip(*np.unravel_index(order, effects.shape), strict=True):
        layers = grid.layers[row * rows : (row + 1) * rows]
        for place in range(column * step, min((column + 1) * step, len(grid.columns))):
            yield from ((layer[0], place) for layer in layers)


def _count(grid: Grid, pairs: int) -> int:
    columns = sum(column.positions[pair] is not None for column in grid.columns for pair in range(pairs))
    return len(grid.sites) * len(grid.layers) * len(grid.heads or [0]) * columns


def _skipped(base: Tokens, other: Tokens | None) -> list[int]:
    way = align(base.ids, base.ids if other is None else other.ids)
    return [position for position, source in enumerate(way) if source is None]


class _Log:
    """A sweep on disk: its outline, and a line for each event. Events are written as they come, so a killed sweep can continue.

    Attributes:
        before: the events of earlier calls.

    Raises:
        ParameterError: the directory holds another sweep.
    """

    def __init__(self, directory: Path, outline: Outline) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        file, data = directory / OUTLINE, encode_event(outline)
        if file.exists() and file.read_bytes() != data:
            raise ParameterError(
                f"{directory} holds another sweep, with other prompts, cells or options. Use an empty directory.",
                field="to",
            )
        file.write_bytes(data)
        path = directory / CELLS
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        self.before = [decode_event(line) for line in lines[:-1]]
        self._file = path.open("ab", buffering=0)
        # A killed sweep may have written half of its last line.
        self._file.truncate(sum(len(line) + 1 for line in lines[:-1]))

    def write(self, event: Event) -> None:
        self._file.write(encode_event(event) + b"\n")

    def close(self) -> None:
        self._file.close()


class SweepTurns:
    """Lets the sweeps on one engine start groups of requests in turns. Limits the tokens of the prompts that run at a time.

    Args:
        batch: the most tokens that the engine computes in a step.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._used = 0  # tokens
        self._giving: asyncio.AbstractEventLoop | None = None  # will give the next turn
        # By sweep, in the order of their next turns: the waiting groups, each with its tokens.
        self._waiting: dict[object, deque[tuple[asyncio.Future[None], int]]] = {}

    def jobs(self, tokens: int) -> int:
        """How many jobs of `tokens` tokens form a group: no more than fit into one step of the engine, so that turns stay short."""
        return max(1, min(ENGINE_GROUP, self._batch // tokens))

    @contextlib.asynccontextmanager
    async def taken(self, sweep: object, tokens: int) -> AsyncIterator[None]:
        """A block that runs in the turn of a group of `sweep`. A group that is larger than the limit runs alone."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sweep, deque()).append((turn, tokens))
        self._give_soon()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._used -= tokens
            else:
                turn.cancel()
            self._give_soon()

    def _give_soon(self) -> None:
        """Give one turn in each of the next iterations of the event loop, as long as there is room.

        A group's requests are then sent while the groups after it are prepared. If all turns were given at once, all groups would be
        prepared first.
        """
        loop = asyncio.get_running_loop()
        if self._waiting and self._giving is not loop:
            self._giving = loop
            loop.call_soon(self._give)

    def _give(self) -> None:
        self._giving = None
        sweep, groups = next(iter(self._waiting.items()))
        turn, tokens = groups[0]
        if not turn.cancelled() and self._used and self._used + tokens > _BATCHES * self._batch:
            return
        groups.popleft()
        del self._waiting[sweep]
        if groups:
            self._waiting[sweep] = groups  # after the others
        if not turn.cancelled():
            self._used += tokens
            turn.set_result(None)
        self._give_soon()


class SweepStream:
    """A running sweep. Iterate over it to get each cell as it comes.

    On an async engine use `async for`, or await the result. Leaving the loop, or `close()`, ends the sweep.

    Args:
        finish: runs a coroutine to its end; None on an async engine, where the user awaits the sweep.

    Attributes:
        result: the cells that have come so far.
    """

    def __init__(
        self, sweeping: Any, finish: Callable[[Coroutine[Any, Any, Any]], Any] | None, bar: Callable[[int], Bar]
    ) -> None:
        self._sweeping, self._finish, self._bar = sweeping, finish, bar
        self._events: AsyncGenerator[Event] = sweeping.events()
        if finish is not None:
            finish(self._next())  # raises errors in the arguments

    async def _next(self) -> Event | None:
        return await anext(self._events, None)

    @property
    def result(self) -> SweepResult:
        if self._sweeping.result is None:
            raise MidstreamError("The sweep has not begun. Iterate over it, or await it.")
        return self._sweeping.result  # type: ignore[no-any-return]

    @property
    def events(self) -> AsyncGenerator[Event]:
        """All events of the sweep. The server sends them on."""
        return self._events

    def __iter__(self) -> Generator[Cell]:
        if self._finish is None:
            raise MidstreamError("This sweep is on an async engine. Write `async for cell in model.sweep(...)`.")
        try:
            while (event := self._finish(self._next())) is not None:
                _warn(event)
                if isinstance(event, Cell):
                    yield event
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[Cell]:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                _warn(event)
                if isinstance(event, Cell):
                    yield event

    def __await__(self) -> Generator[Any, None, SweepResult]:
        return self._to_the_end().__await__()

    async def _to_the_end(self) -> SweepResult:
        async with contextlib.aclosing(self._events) as events:
            if self._finish is None:
                await anext(events, None)  # the outline
            with self._bar(self.result.outline.cells) as bar:
                async for event in events:
                    _warn(event)
                    bar.update(isinstance(event, Cell))
        return self.result

    def run(self) -> SweepResult:
        """Run the sweep to its end. Only for sync engines."""
        assert self._finish is not None
        return self._finish(self._to_the_end())  # type: ignore[no-any-return]

    def draw(
        self,
        site: str | None = None,
        *,
        head: int | None = None,
        position: int | str | None = None,
        seconds: float = 0.5,
    ) -> SweepResult:
        """Run the sweep to its end in a notebook, with a figure that fills while the cells come. Needs IPython and matplotlib.

        Args:
            site, head, position: as in `SweepResult.plot`.
            seconds: between two drawings.

        Raises:
            ParameterError: as `SweepResult.plot`. No cell has been run, and the sweep is closed.
        """
        from IPython.display import display  # type: ignore[import-not-found]
        from matplotlib import pyplot

        drawn: Any = {"site": site, "head": head, "position": position}
        try:
            figure = self.result.plot(**drawn).figure
        except ParameterError:
            self.close()
            raise
        pyplot.close(figure)  # or the notebook shows it once more at the end of the cell
        shown, last = display(figure, display_id=True), time.monotonic()

        def again() -> None:
            figure.clear()
            self.result.plot(**drawn, ax=figure.subplots())
            shown.update(figure)

        for _ in self:
            if time.monotonic() > last + seconds:
                again()
                last = time.monotonic()
        again()
        return self.result

    def close(self) -> None:
        """End the sweep, and delete its recorded runs. Only for sync engines."""
        assert self._finish is not None

        async def end() -> None:
            await self._events.aclose()

        with contextlib.suppress(EngineClosedError):  # a closed engine has no runs
            self._finish(end())
