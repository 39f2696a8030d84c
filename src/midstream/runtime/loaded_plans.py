"""Plans in the tables. Requests share one `LoadedPlan` if they have the same plan, and it does the same at the ends of their prompts.

A plan stays loaded for a while after its last request, so that the next request with it costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from midstream.errors import CaptureError
from midstream.plan.compile import CompiledPlan, Profile, Reach
from midstream.plan.selections import NO_POSITIONS, Selection, Selector
from midstream.plan.values import Plan, RecordedRun
from midstream.runtime.programs import ProgramAt, programs_at
from midstream.runtime.request import PlanRequest, has_open_names
from midstream.runtime.tables import ProfileSlots, Tables
from midstream.sites import Point

RunRow = Callable[[RecordedRun, str, int, int], torch.Tensor]  # (run, site, layer, position) -> [width]
_IDLE = 128  # plans without a request that stay loaded
_IDLE_BYTES = 64 << 20  # of the device's memory that they may hold


@dataclass(eq=False)
class LoadedPlan:
    """A plan in the tables, for the prompts of one `_shape`.

    Attributes:
        prompt: int32, the numbers of the profiles of the prompt's last positions, and of generated positions that edits name. Earlier
            positions have the first of these profiles.
        generated: the number of the profile of all other generated positions.
        hooked: the points of this rank, outside of the graphs, at which hooks act.
        off_graph: sites outside of the graphs with ops at its prompt's and at its generated positions.
        programs: those in the graphs of any rank that run in its prompt and at generated positions.
        acting: the other sites with ops there; on all ranks the same, as `off_graph` is.
        runs: the recorded runs that it reads.
        reach: where it acts in the whole model, the same on all ranks.
        selectors: choose the rows of generated positions to capture; empty if all are captured or none.
        named: how many generated positions have profiles among `prompt`.
        users: requests that have it.
    """

    plan: Plan
    slots: ProfileSlots
    prompt: np.ndarray
    generated: int
    hooked: list[Point]
    off_graph: tuple[frozenset[str], frozenset[str]]
    programs: tuple[frozenset[ProgramAt], frozenset[ProgramAt]]
    acting: tuple[frozenset[str], frozenset[str]]
    runs: list[str]
    reach: Reach
    named: int
    selectors: tuple[Selector, ...] = ()
    users: int = 0
    key: Any = None
    _selected: np.ndarray = field(
        default_factory=lambda: np.zeros(0, bool)
    )  # what `selects` returns for the first numbers

    def profiles(self, start: int, stop: int, length: int) -> np.ndarray | int:
        """int32, of the positions `start` to `stop` of a request whose prompt has `length`; one number if all have the same."""
        length += self.named
        if start >= length:
            return self.generated
        before = length - len(self.prompt)
        found = self.prompt[np.maximum(np.arange(start, min(stop, length)) - before, 0)]
        if stop <= length:
            return found
        return np.concatenate([found, np.full(stop - length, self.generated, np.int32)])

    def kept(self, start: int, stop: int, length: int) -> list[tuple[int, int, int]]:
        """(profile, first position, number) of the stretches of positions from `start` to `stop` that are captured."""
        if not self._capturing:
            return []
        if start >= length + self.named:
            return [(self.generated, start, stop - start)] if self.captures_generated is not None else []
        profiles = self.profiles(start, stop, length)
        assert not isinstance(profiles, int)
        edges = [0, *(np.flatnonzero(np.diff(profiles)) + 1).tolist(), len(profiles)]
        found = [(int(profiles[at]), start + at, end - at) for at, end in pairwise(edges)]
        return [stretch for stretch in found if stretch[0] in self._capturing]

    @cached_property
    def _capturing(self) -> set[int]:
        """The profiles that keep rows."""
        pairs = zip(self.slots.ids.tolist(), self.slots.compiled.profiles, strict=True)
        return {number for number, profile in pairs if profile.row_width}

    @cached_property
    def captures_generated(self) -> int | None:
        """The number of the profile that keeps the rows of generated positions; None if they are not captured."""
        return self.generated if self.generated in self._capturing else None

    def selects(self, number: int) -> bool:
        """Whether one of `selectors` selects the generated token of this number. A selector that fails does: then the client raises."""
        if number >= len(self._selected):
            numbers = np.arange(max(2 * number, 256))
            try:
                self._selected = Selection(NO_POSITIONS, 0, self.selectors).mask(numbers)
            except CaptureError:
                self._selected = np.ones(numbers.size, bool)
        return bool(self._selected[number])

    def last(self, length: int) -> int | None:
        """The position behind the last one that is captured: 0 if none is, None if generated ones are."""
        if self.captures_generated is not None:
            return None
        return length + self.named - self._uncaptured if self._uncaptured is not None else 0

    @cached_property
    def _uncaptured(self) -> int | None:
        """How many of the positions with profiles of their own come after the last captured one; None if none is captured."""
        captured = np.flatnonzero(np.isin(self.prompt, list(self._capturing)))
        return len(self.prompt) - 1 - int(captured[-1]) if len(captured) else None

    @cached_property
    def _acting(self) -> np.ndarray:
        """`[len(prompt) + 1]`: entry i tells at how many of the first i entries of `prompt` the plan acts."""
        return np.concatenate([[0], np.cumsum(self.reach.prompt)])

    def acts(self, start: int, stop: int, length: int) -> tuple[bool, bool]:
        """Whether it does anything at those among `start` to `stop` that have profiles of their own, and whether at the others."""
        length += self.named
        in_prompt = start < length
        if in_prompt:
            before = length - len(self.prompt)
            first, end = max(start - before, 0), max(min(stop, length) - before, 1)
            in_prompt = bool(self._acting[first] < self._acting[end])
        return in_prompt, stop > length and self.reach.generated

    @cached_property
    def profile_count(self) -> int:
        """How many profiles of the tables are its own."""
        return int((self.slots.ids > 0).sum())

    @cached_property
    def size(self) -> int:
        """Bytes that it holds on the device, with an entry of each of its profiles for every point."""
        return sum(tensor.nbytes for tensor in self.slots.kept) + self.profile_count * self.slots.profile_bytes


class LoadedPlans:
    """The plans of one worker.

    Args:
        compiled: compiles a plan for a prompt length. Raises PlanError.
        hooked: which of these points need a hook on this rank.
        off_graph: the sites of these points that are not in the graphs of some rank.
        built_in: the points that are in the graphs of some rank.
    """

    def __init__(
        self,
        tables: Tables,
        compiled: Callable[[PlanRequest, int, RunRow], CompiledPlan],
        hooked: Callable[[Collection[Point]], list[Point]],
        off_graph: Callable[[Collection[Point]], frozenset[str]],
        built_in: frozenset[Point] = frozenset(),
    ) -> None:
        self._tables = tables
        self._compiled = compiled
        self._hooked = hooked
        self._off_graph = off_graph
        self._built_in = built_in
        self._loaded: dict[Any, LoadedPlan] = {}
        self._idle: OrderedDict[Any, LoadedPlan] = OrderedDict()  # those without a request
        self._idle_bytes = 0

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
        return loaded

    def give_back(self, loaded: LoadedPlan) -> None:
        """One request less."""
        loaded.users -= 1
        if loaded.users:
            return
        if loaded.key is None or loaded.runs:  # a run's memory goes when nobody uses it
            return self._drop(loaded)
        self._idle[loaded.key] = loaded
        self._idle_bytes += loaded.size
        while len(self._idle) > _IDLE or self._idle_bytes > _IDLE_BYTES:
            _, oldest = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.size
            self._drop(oldest)

    def _drop(self, loaded: LoadedPlan) -> None:
        self._loaded.pop(loaded.key, None)
        self._tables.unload(loaded.slots)

    def _make(self, payload: PlanRequest, length: int, row: RunRow) -> LoadedPlan:
        plan, compiled = payload.plan, self._compiled(payload, length, row)
        slots = self._tables.load(compiled)
        reach = compiled.reach
        first = min(_first(compiled.prompt, reach.prompt), length - 1)
        points = reach.prompt_points, reach.generated_points
        off_graph = self._off_graph(points[0]), self._off_graph(points[1])
        return LoadedPlan(
            plan,
            slots,
            slots.ids[compiled.prompt[first:]],
            int(slots.ids[compiled.generated]),
            self._hooked(_points(compiled.profiles)),
            off_graph,
            (
                self._programs(compiled, set(compiled.prompt.tolist()), reach.prompt_programs),
                self._programs(compiled, {compiled.generated}, reach.generated_programs),
            ),
            (_sites(points[0]) - off_graph[0], _sites(points[1]) - off_graph[1]),
            [run.id for run in plan.runs],
            reach._replace(prompt=reach.prompt[first:]),
            len(compiled.prompt) - length,
            _choosing(plan),
        )

    def _programs(
        self, compiled: CompiledPlan, numbers: Collection[int], points: Collection[Point]
    ) -> frozenset[ProgramAt]:
        """The programs of some profiles in the graphs, and those at `points` on other stages, whose forms are not known here."""
        mine = {at for number in numbers for at, *_ in programs_at(compiled.profiles[number])}
        others = {ProgramAt(point, "edit", 0, "") for point in points if point not in self._tables.index}
        return frozenset(at for at in mine | others if at.point in self._built_in)


def _shape(plan: Plan, length: int) -> Any:
    """Equal for prompts of two lengths if the plan does the same at their last positions, and at all earlier ones what it does at the
    first of these. So one loaded plan is enough for both.
    """
    if any(isinstance(item.place, tuple) and not item.is_of_generated for item in plan.interventions):
        return length
    masks = []
    for positions in dict.fromkeys(capture.positions for capture in plan.captures):
        mask = np.zeros(length, bool)
        mask[Selection.of(positions, length).prompt] = True
        masks.append(mask[_first(mask) :].tobytes())
    return tuple(masks)


def _choosing(plan: Plan) -> tuple[Selector, ...]:
    """As `LoadedPlan.selectors`."""
    asked = {capture.positions for capture in plan.captures if capture.selects_generated}
    return () if any(isinstance(positions, str) for positions in asked) else tuple(asked)


def _first(*each: np.ndarray) -> int:
    """The last of the positions at which the arrays have the values that they begin with."""
    differ = np.logical_or.reduce([array[1:] != array[:-1] for array in each])
    return int(differ.argmax()) if differ.any() else max(len(each[0]) - 1, 0)


def _sites(points: Collection[Point]) -> frozenset[str]:
    return frozenset(site for site, _ in points)


def _points(profiles: Collection[Profile]) -> list[Point]:
    return sorted({point for profile in profiles for point in profile.points})
