"""The requests with plans: their plans in the tables, the recorded rows that they need, and the rows that they capture.

Requests share one `LoadedPlan` if they have the same plan and its effect is the same at the ends of their prompts. A plan stays loaded for
a while after its last request, so that the next request with it costs nothing.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.rows import Rows
from midstream.errors import CaptureError, NeverReachedError, PlanError
from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import Intervention, point_of
from midstream.plan.ops.knockout import Knockouts
from midstream.plan.selections import NO_POSITIONS, MaskAhead, Selection
from midstream.plan.values import Plan, RecordedRun
from midstream.ranks.link import Link
from midstream.runtime.points import Pipeline, PointHooks
from midstream.runtime.programs import ProgramAt, all_programs, programs_at
from midstream.runtime.request import PlanRequest, has_open_names, plan_bytes
from midstream.runtime.scores import RequestScores
from midstream.runtime.store import RunStore
from midstream.runtime.tables import ProfileSlots, Tables
from midstream.sites import Point

RunRow = Callable[[RecordedRun, str, int, int], torch.Tensor]  # (run, site, layer, position) -> [width]
_IDLE = 128  # how many plans without a request stay loaded
_IDLE_BYTES = 64 << 20  # how many bytes they may hold, on the device and as plans
_PAGE_BYTES = 256 << 10
_PAGE_ROWS = 4, 64  # the fewest and the most rows of a page; between them, `_PAGE_BYTES` decides
_FIRST_SLOTS = 64


class Acting(NamedTuple):
    """What acts at some positions of a request, the same on all ranks.

    Attributes:
        sites: sites in the graphs.
        off_graph: sites outside of the graphs.
        programs: programs in the graphs.
    """

    sites: frozenset[str]
    off_graph: frozenset[str]
    programs: frozenset[ProgramAt]


@dataclass(eq=False)
class LoadedPlan:
    """A plan in the tables, for the prompts of one `_shape`.

    Attributes:
        prompt: int32, the numbers of the profiles of the prompt's last positions, and of generated positions that edits name. Earlier
            positions have the first of these profiles.
        generated: the number of the profile of all other generated positions.
        acts: bool, whether it does anything, on any rank, at each of the positions of `prompt`.
        acting: what acts at those positions, and what at all other generated ones.
        capturing: the profiles that keep rows.
        scoring: the profiles that have probes.
        hooked: the points of this rank, outside of the graphs, at which hooks act.
        named: how many generated positions have profiles among `prompt`.
        knockouts: the attention edges that it cuts; None for none.
        users: requests that have it.
    """

    plan: Plan
    slots: ProfileSlots
    prompt: np.ndarray
    generated: int
    acts: np.ndarray
    acting: tuple[Acting, Acting]
    capturing: frozenset[int]
    scoring: frozenset[int]
    hooked: list[Point]
    named: int
    knockouts: Knockouts | None
    users: int = 0
    key: Any = None

    def profiles(self, start: int, stop: int, length: int) -> np.ndarray | int:
        """int32, the profiles of the positions `start` to `stop`; one number if all of these come after those in `prompt`.

        Args:
            length: of the request's prompt, in tokens.
        """
        length += self.named
        if start >= length:
            return self.generated
        before = length - len(self.prompt)
        found = self.prompt[np.maximum(np.arange(start, min(stop, length)) - before, 0)]
        if stop <= length:
            return found
        return np.concatenate([found, np.full(stop - length, self.generated, np.int32)])

    def acting_in(self, start: int, stop: int, length: int) -> list[Acting]:
        """What acts at the positions `start` to `stop` of a request whose prompt has `length` tokens."""
        length += self.named
        before = length - len(self.prompt)
        first, end = max(start - before, 0), max(min(stop, length) - before, 1)
        in_prompt = start < length and bool(self.acts[first:end].any())
        return [*self.acting[:1] * in_prompt, *(self.acting_later if stop > length else ())]

    @cached_property
    def acting_later(self) -> tuple[Acting, ...]:
        """What acts at generated positions that have no profiles among `prompt`."""
        return self.acting[1:] * any(self.acting[1])

    @cached_property
    def chosen(self) -> Selection | None:
        """Which generated positions are captured, counted as after an empty prompt; None if all are captured, or none."""
        asked = {capture.positions for capture in self.plan.captures if capture.selects_generated}
        if not asked or any(isinstance(positions, str) for positions in asked):
            return None
        return Selection(NO_POSITIONS, 0, tuple(asked))

    def selects(self, number: int) -> bool:
        """Whether `chosen` has the generated token of this number. True if a selector fails: then the client raises the error."""
        try:
            return bool(self._ahead.below(number + 1)[number])
        except CaptureError:
            return True

    @cached_property
    def _ahead(self) -> MaskAhead:
        assert self.chosen is not None
        return MaskAhead(self.chosen)

    @cached_property
    def captures_generated(self) -> int | None:
        """The number of the profile that keeps the rows of generated positions; None if they are not captured."""
        return self.generated if self.generated in self.capturing else None

    @cached_property
    def uncaptured(self) -> int:
        """How many of the positions of `prompt` come after the last captured one; a huge number if none is captured."""
        captured = np.flatnonzero(np.isin(self.prompt, list(self.capturing)))
        return len(self.prompt) - 1 - int(captured[-1]) if len(captured) else 1 << 62

    @cached_property
    def profile_count(self) -> int:
        """How many profiles of the tables are its own."""
        return int((self.slots.ids > 0).sum())

    @cached_property
    def held(self) -> frozenset[str]:
        """The digests of the constants of its programs that the worker holds as weights: see `plan.steps.Constant.held`."""
        constants = (constant for program in all_programs(self.slots.compiled) for constant in program.constants)
        return frozenset(constant.held for constant in constants if constant.held)

    @cached_property
    def size(self) -> int:
        """Bytes that it holds: on the device, with an entry of each of its profiles for every point, and of its plan."""
        on_device = sum(tensor.nbytes for tensor in self.slots.kept) + self.profile_count * self.slots.profile_bytes
        return on_device + plan_bytes(self.plan) + (len(self.key[0]) if self.key is not None else 0)


class LoadedPlans:
    """The plans of one worker.

    Args:
        hooks: at the sites that plans need, and that are not in the graphs.
        pipeline: which stage has which sites, and which of them are in the graphs.
        compiles: see `PlanHost`.
        compiled: compiles a plan for a prompt length. Raises PlanError.
    """

    def __init__(
        self,
        tables: Tables,
        hooks: PointHooks,
        pipeline: Pipeline,
        compiles: bool,
        compiled: Callable[[PlanRequest, int, RunRow], CompiledPlan],
    ) -> None:
        self._tables, self._hooks, self._compiled = tables, hooks, compiled
        self._pipeline, self._compiles = pipeline, compiles
        self._loaded: dict[Any, LoadedPlan] = {}
        self._idle: OrderedDict[Any, LoadedPlan] = OrderedDict()  # those without a request
        self._idle_bytes = 0
        self._kept: Set[str] = frozenset()  # the digests of constants that the worker holds

    def take(self, payload: PlanRequest, length: int, row: RunRow) -> LoadedPlan:
        """The plan for one more request; `row` gives rows of recorded runs. Raises PlanError, as the compiler does."""
        key = (payload.wire, _shape(payload.plan, length))
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._make(payload, length, row)
            if not has_open_names(loaded.plan):  # the name may stand for another vector the next time
                loaded.key = key
                self._loaded[key] = loaded
        elif not loaded.users:
            del self._idle[key]
            self._idle_bytes -= loaded.size
        loaded.users += 1
        if loaded.users == 1:
            self._hooks.need(loaded.hooked)
        return loaded

    def give_back(self, loaded: LoadedPlan) -> None:
        """Note that one request fewer uses the plan, and unload plans that are not kept."""
        loaded.users -= 1
        if loaded.users:
            return
        self._hooks.release(loaded.hooked)
        # A plan that holds memory of a run, or constants that the worker has dropped, is unloaded after its last request.
        if loaded.key is None or loaded.plan.runs or not loaded.held <= self._kept:
            return self._drop(loaded)
        self._idle[loaded.key] = loaded
        self._idle_bytes += loaded.size
        while len(self._idle) > _IDLE or self._idle_bytes > _IDLE_BYTES:
            _, oldest = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.size
            self._drop(oldest)

    def forget(self, kept: Set[str]) -> None:
        """Drop plans without a request that need other held constants than those in `kept`: they would keep these in memory."""
        self._kept = kept
        for key, loaded in list(self._idle.items()):
            if not loaded.held <= kept:
                del self._idle[key]
                self._idle_bytes -= loaded.size
                self._drop(loaded)

    def _drop(self, loaded: LoadedPlan) -> None:
        self._loaded.pop(loaded.key, None)
        self._tables.unload(loaded.slots)

    def _make(self, payload: PlanRequest, length: int, row: RunRow) -> LoadedPlan:
        plan, compiled = payload.plan, self._compiled(payload, length, row)
        slots = self._tables.load(compiled)
        first = min(_first(compiled.prompt, compiled.acts), length - 1)
        in_prompt, generated = compiled.acting
        numbers = slots.ids.tolist()
        return LoadedPlan(
            plan,
            slots,
            slots.ids[compiled.prompt[first:]],
            numbers[compiled.generated],
            compiled.acts[first:],
            (
                self._acting(compiled, set(compiled.prompt.tolist()), in_prompt),
                self._acting(compiled, {compiled.generated}, generated),
            ),
            frozenset(n for n, profile in zip(numbers, compiled.profiles, strict=True) if profile.row_width),
            frozenset(n for n, profile in zip(numbers, compiled.profiles, strict=True) if profile.score_width),
            self._hooks.among(_points(compiled.profiles)),
            len(compiled.prompt) - length,
            compiled.knockouts,
        )

    def _acting(self, compiled: CompiledPlan, numbers: Collection[int], items: Collection[Intervention]) -> Acting:
        """What acts at positions with these profiles. The form of a program on another stage is not known here."""
        points = {point for item in items for point in (point_of(item), *item.further)}
        # On any stage: a step runs uncompiled on all of them or on none.
        off_graph = frozenset(site for site, _ in points - self._pipeline.built_in if self._compiles)
        mine = {at for number in numbers for at, *_ in programs_at(compiled.profiles[number])}
        others = {point_of(item) for item in items if item.runs_program} - self._tables.index.keys()
        everywhere = mine | {ProgramAt(point, "edit", 0, "") for point in others}
        return Acting(
            frozenset(site for site, _ in points) - off_graph,
            off_graph,
            frozenset(at for at in everywhere if at.point in self._pipeline.built_in),
        )


def _shape(plan: Plan, length: int) -> Any:
    """A key that is equal for two prompt lengths if one loaded plan serves both.

    The plan then does the same at the last positions of both prompts, and at all earlier positions the same as at the first of these.
    """
    items = plan.interventions
    if any(item.at_attention or (isinstance(item.place, tuple) and not item.is_of_generated) for item in items):
        return length
    return tuple(_end_of(each, length) for each in dict.fromkeys(item.positions for item in plan.readings))


@functools.lru_cache(256)
def _end_of(positions: Any, length: int) -> bytes:
    """The mask of a prompt's positions that a capture selects. Of the equal values at its beginning, only the last is kept."""
    mask = Selection.of(positions, length).mask(np.arange(length))
    return mask[_first(mask) :].tobytes()


def _first(*each: np.ndarray) -> int:
    """The last position up to which all arrays still have their first values."""
    differ = np.logical_or.reduce([array[1:] != array[:-1] for array in each])
    return int(differ.argmax()) if differ.any() else max(len(each[0]) - 1, 0)


def _points(profiles: Collection[Profile]) -> list[Point]:
    return sorted({point for profile in profiles for point in profile.points})


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
        ):  # the numbers of a body's values have to increase
            if owner == pipeline.rank:
                assert link is not None
                rows = tuple(_rows(runs, plane, positions) for plane, positions in planes.items())
                link.publish(self._body, reader, rows, readers=[reader])

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
            self._link.end(self._body, NeverReachedError("the request is over on the stage that has the rows"))


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


def rows_of_page(row_bytes: int) -> int:
    """How many rows of generated tokens get memory at once. A step adds a row, and only a full page costs an allocation."""
    least, most = _PAGE_ROWS
    return max(min(_PAGE_BYTES // row_bytes, most), least)


class RequestTable:
    """The planned requests in arrays, so that a step with many of them costs a few array operations.

    Each request has a slot; slot 0 stands for requests without a plan.

    Attributes:
        end: `[slots]`, the first position from which on all rows have the same profile.
        profile: `[slots]`, int32, that profile.
        captures: `[slots]`, bool, whether the rows from `end` on are captured.
        selects: `[slots]`, bool, whether selectors choose which of these rows are captured.
        captured: `[slots]`, positions below this have been captured.
        address: `[slots]`, the address in the request's page where its next captured row is written.
        row_bytes: `[slots]`, bytes of one captured row.
        left: `[slots]`, how many rows still fit into the page.
        size: `[slots]`, bytes of the captured rows that are not sent.
    """

    def __init__(self) -> None:
        self._requests: list[PlannedRequest | None] = [None] * _FIRST_SLOTS  # by slot
        self.profile = np.zeros(_FIRST_SLOTS, np.int32)
        self.captures, self.selects = (np.zeros(_FIRST_SLOTS, bool) for _ in range(2))
        self.end, self.captured, self.address, self.row_bytes, self.left, self.size = (
            np.zeros(_FIRST_SLOTS, np.int64) for _ in range(6)
        )
        self._slots: dict[str, int] = {}
        self._free = list(range(1, _FIRST_SLOTS))[::-1]

    def slots_of(self, names: Sequence[str]) -> np.ndarray:
        """The slots of these requests, int64 `[requests]`."""
        known = self._slots
        return np.array([known.get(name, 0) for name in names], np.int64)

    def request(self, slot: int) -> PlannedRequest:
        """The request that has the slot."""
        found = self._requests[slot]
        assert found is not None
        return found

    def add(self, request: PlannedRequest) -> int:
        """Give the request a slot."""
        if not self._free:
            size = len(self._requests)
            self._requests += [None] * size
            for column, each in vars(self).items():
                if isinstance(each, np.ndarray):
                    setattr(self, column, np.concatenate([each, np.zeros_like(each)]))
            self._free += range(2 * size - 1, size - 1, -1)
        self._slots[request.name] = slot = self._free.pop()
        self._requests[slot] = request
        return slot

    def remove(self, name: str) -> None:
        slot = self._slots.pop(name)
        self._requests[slot] = None
        for each in vars(self).values():
            if isinstance(each, np.ndarray):
                each[slot] = 0
        self._free.append(slot)


@dataclass(eq=False)
class PlannedRequest:
    """One running request with a plan.

    Attributes:
        name: the engine's id of the request.
        sources: recorded rows for its patches.
        length: of its prompt.
        table: holds the rest of the request's state.
        slot: its place in the table.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        ends_early: whether it may end before tokens that were computed long ago: at a stop string, which the client looks for, or at a
            token of the prompt.
        scores: its probes; None without any.
        rows: captured ones that are not sent yet, except those in `page`.
        page: the last captured rows of generated tokens, with room for later ones: the table says how much is left. Positions of rows
            that are still to come may change.
        taken: how many rows of the page are among `rows`, or were sent.
    """

    name: str
    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    length: int
    table: RequestTable
    computed: int = 0
    complete: bool = False
    ends_early: bool = False
    scores: RequestScores | None = None
    rows: list[Rows] = field(default_factory=list)
    page: Rows | None = None
    taken: int = 0
    slot: int = field(init=False)

    def __post_init__(self) -> None:
        self.slot = self.table.add(self)
        self.tabulate()

    def tabulate(self) -> None:
        """Write to the table which profile the rows of generated tokens have, and which of them are captured."""
        table, slot, loaded = self.table, self.slot, self.loaded
        captures = loaded.captures_generated is not None
        table.end[slot], table.profile[slot] = self.end, loaded.generated
        table.captures[slot] = captures
        table.selects[slot] = captures and loaded.chosen is not None

    @property
    def end(self) -> int:
        """The first position from which on all have the same profile."""
        return self.length + self.loaded.named

    @property
    def captured(self) -> int:
        """Positions below this have been captured."""
        return int(self.table.captured[self.slot])

    @captured.setter
    def captured(self, end: int) -> None:
        self.table.captured[self.slot] = end

    @property
    def size(self) -> int:
        """Bytes of the rows that are not sent."""
        return int(self.table.size[self.slot])

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        loaded = self.loaded
        return loaded.captures_generated is None and self.captured >= self.end - loaded.uncaptured

    def add(self, rows: Rows) -> None:
        self.close_page()
        self.rows.append(rows)
        self.table.size[self.slot] += rows.nbytes

    def begin_page(self, page: Rows) -> None:
        """Write the next rows to a new page."""
        self.close_page()
        self.page, self.taken, block = page, 0, page.block
        self.table.address[self.slot], self.table.left[self.slot] = block.data_ptr(), len(block)
        self.table.row_bytes[self.slot] = block.shape[1] * block.element_size()

    def close_page(self) -> None:
        """Move the page's rows to `rows`. The next row begins a new page."""
        self.rows += self._of_page()
        self.page = None
        self.table.left[self.slot] = 0

    def _of_page(self) -> list[Rows]:
        """The new rows of the page in one piece, if there are any."""
        if self.page is None:
            return []
        first, self.taken = self.taken, len(self.page.positions) - int(self.table.left[self.slot])
        return [self.page.take(slice(first, self.taken))] if first < self.taken else []

    def take_rows(self) -> list[Rows]:
        """The rows that are not sent."""
        rows = [*self.rows, *self._of_page()]
        self.rows, self.table.size[self.slot] = [], 0
        return rows
