"""Runs the programs of a step's plans at a site. Programs of one form run together, for the rows of all their requests.

Programs of edits run after the other edits. Programs of captures compute the captured results from the value before or after all edits. A
program may have values of earlier sites as further inputs; the step keeps these values for it: see `Kept` and `GraphValues`.

Outside of CUDA graphs, the rows of programs with one form are gathered first. A graph is replayed with other rows than it was recorded
with. So in a graph, the programs of a form run on all rows. Each row finds its own program by the number of its profile, and rows without
a program stay unchanged.

Legend: T rows of the batch, R the rows with a program, H the site's width.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import Op, with_programs
from midstream.plan.program import Program
from midstream.plan.running import ProgramBank
from midstream.sites import Point

MOST_PROFILES = 1 << 14  # a profile with programs has a lower number: graphs read arrays with an entry for each
_FIRST_PLACES = 4
_REMEMBERED = 4096  # forms whose number of places is remembered


class ProgramAt(NamedTuple):
    """Where programs of one form run.

    Attributes:
        what: "edit"; or "capture" or "probe", with "before" or "after".
        turn: for an edit, how many program edits run before it at the point; else how many programs with its form and `what` do.
        form: `Form.key`.
        inputs: the points whose values are the programs' further inputs.
    """

    point: Point
    what: str
    turn: int
    form: str
    inputs: tuple[Point, ...] = ()


class ProgramGroup(NamedTuple):
    """Rows of a step with programs of one form.

    Attributes:
        rows: int64 `[R]`, on the device.
        which: int64 `[R]`, on the device, the place of each row's program in `bank`; None if all rows have the same program.
        offsets: int64 `[R]`, on the device, where each row's result lies in its captured row (see `Slot`); None for edits.
        inputs: the further inputs, each with the places of the group's rows among the kept rows; None if both are the same rows.
    """

    rows: torch.Tensor
    bank: ProgramBank
    which: torch.Tensor | None
    offsets: torch.Tensor | None
    inputs: Sequence[tuple[Kept, torch.Tensor | None]] = ()

    def run(self, x_RH: torch.Tensor, some: torch.Tensor | None = None) -> torch.Tensor:
        """The results of the programs for the rows' values. `some`: run only on the rows at these places in `rows`."""
        which, inputs = self.which, [kept.of(places) for kept, places in self.inputs]
        if some is not None:
            x_RH, which = x_RH[some], which[some] if which is not None else None
            inputs = [each[some] for each in inputs]
        return self.bank.run(x_RH, which, *inputs)


@dataclass(eq=False)
class Kept:
    """The value at a point that programs need later in the step.

    Attributes:
        rows: int64 `[R]`, on the device: the rows whose value is needed.
        value: `[R, width]`; None until the step reaches the point.
    """

    point: Point
    rows: torch.Tensor
    value: torch.Tensor | None = None

    def of(self, places: torch.Tensor | None) -> torch.Tensor:
        """The value of the rows at these places in `rows`; of all rows if `places` is None."""
        assert self.value is not None, "a program runs before its inputs are known"
        return self.value if places is None else self.value[places]


class StepPrograms(NamedTuple):
    """The programs of a step.

    Attributes:
        groups: (index of a point, `ProgramAt.what`) -> the groups, in the order in which they run.
        kept: index of a point -> the value that is kept there.
    """

    groups: dict[tuple[int, str], list[ProgramGroup]]
    kept: dict[int, Kept]


@dataclass(eq=False)
class Slot:
    """Programs of one form at one place of the forward.

    Attributes:
        place: int32 `[2, MOST_PROFILES + 1]` on the device: for each profile number, the place of its program in the bank, and the
            offset of the program's result in the captured row, in elements. -1 for none; the last entry stands for all higher numbers.
        on_host: the same on the host, int64; `HeldPrograms.flush` copies it.
    """

    place: torch.Tensor
    on_host: np.ndarray


@dataclass(eq=False)
class _Form:
    """The programs of one form that plans have.

    Attributes:
        bank: holds them all.
        places: program -> its place in the bank, and how many profiles have it.
    """

    bank: ProgramBank
    places: dict[Program, list[int]] = field(default_factory=dict)


def all_programs(compiled: CompiledPlan) -> set[Program]:
    """The programs of a plan."""
    each = (op for profile in compiled.profiles for ops in profile.ops.values() for op in ops)
    return {op.program for op in each if op.program is not None}


def around(ops: Sequence[Op]) -> tuple[Sequence[Op], Sequence[Op]]:
    """The ops without a program before the first edit by a program, and those after the last one. Without such an edit: all, and none."""
    places = [i for i, op in enumerate(ops) if op.program is not None and op.is_edit]
    parts = (ops[: places[0]], ops[places[-1] + 1 :]) if places else (ops, ())
    before, behind = ([op for op in part if op.program is None] for part in parts)
    return before, behind


def programs_at(profile: Profile) -> Iterator[tuple[ProgramAt, Program, int]]:
    """Each program of a profile, where it runs, and the offset of a capture's or probe's result in its row; -1 for an edit."""
    for point, ops in profile.ops.items():
        for turn, op in enumerate(with_programs(ops)):
            assert op.program is not None
            yield ProgramAt(point, "edit", turn, op.program.form.key, op.inputs), op.program, -1
        turns = Counter[tuple[str, str]]()
        for op in ops:
            if op.program is not None and not op.is_edit:
                key = f"{op.kind} {'after' if op.after else 'before'}", op.program.form.key
                yield ProgramAt(point, key[0], turns[key], key[1]), op.program, op.offset
                turns[key] += 1


def value_of(first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """The value: one stream, or the sum of two, in the dtype of the first."""
    return first if second is None else (first + second).to(first.dtype)


class HeldPrograms:
    """The programs of all plans in the tables.

    Args:
        upload: copies int64 rows to the device.
    """

    def __init__(self, device: torch.device, upload: Callable[[np.ndarray], torch.Tensor]) -> None:
        self._device, self._upload = device, upload
        self._forms: dict[str, _Form] = {}
        self._slots: dict[ProgramAt, Slot] = {}
        # Slots whose entries on the device are old. A graph may still read a slot that no plan has.
        self._stale = set[Slot]()
        self._profiles: dict[int, list[tuple[ProgramAt, Program, int]]] = {}
        self._capacities: OrderedDict[str, int] = OrderedDict()
        # Banks, slots and values that a graph still reads are used again.
        self._known_banks: WeakValueDictionary[tuple[str, int], ProgramBank] = WeakValueDictionary()
        self._known_slots: WeakValueDictionary[ProgramAt, Slot] = WeakValueDictionary()
        self._in_graphs: WeakValueDictionary[tuple[Point, int], torch.Tensor] = WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._profiles)

    def hold(self, number: int, profile: Profile) -> None:
        """Hold the programs of a profile until `release`. Its number is below `MOST_PROFILES`."""
        for at, program, offset in programs_at(profile):
            place = self._place(program)
            slot = self._slots.get(at) or self._new_slot(at)
            slot.on_host[:, number] = place, offset
            self._stale.add(slot)
            self._profiles.setdefault(number, []).append((at, program, offset))

    def release(self, number: int) -> None:
        """Forget the programs of a profile, if it has any."""
        for at, program, _ in self._profiles.pop(number, ()):
            slot, form = self._slots[at], self._forms[at.form]
            slot.on_host[:, number] = -1
            self._stale.add(slot)
            if (slot.on_host[0] < 0).all():
                del self._slots[at]
            form.places[program][1] -= 1
            if not form.places[program][1]:
                del form.places[program]
                if not form.places:
                    del self._forms[at.form]

    def _new_slot(self, at: ProgramAt) -> Slot:
        slot = self._known_slots.get(at)
        if slot is None:
            shape = 2, MOST_PROFILES + 1
            place = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            slot = self._known_slots[at] = Slot(place, np.full(shape, -1, np.int64))
        self._slots[at] = slot
        return slot

    def _place(self, program: Program) -> int:
        """The place of a program in its form's bank, for one more profile."""
        key = program.form.key
        form = self._forms.get(key)
        if form is None:
            form = _Form(self._bank(program, self._capacities.get(key, _FIRST_PLACES if program.form.slots else 1)))
        if program not in form.places:
            if len(form.places) == form.bank.capacity:
                larger = self._bank(program, 2 * form.bank.capacity)
                for other, (place, _) in form.places.items():
                    larger.put(place, other)
                form.bank = larger
            taken = {place for place, _ in form.places.values()}
            free = next(place for place in range(form.bank.capacity) if place not in taken)
            form.bank.put(free, program)
            form.places[program] = [free, 0]
        form.places[program][1] += 1
        self._forms[key] = form
        return form.places[program][0]

    def _bank(self, program: Program, capacity: int) -> ProgramBank:
        """A form's bank with so many places. Later banks of the form are never smaller, so graphs with this bank can be used again."""
        key = program.form.key
        self._capacities[key] = capacity
        self._capacities.move_to_end(key)
        if len(self._capacities) > _REMEMBERED:
            self._capacities.popitem(last=False)
        bank = self._known_banks.get((key, capacity))
        if bank is None:
            bank = self._known_banks[key, capacity] = ProgramBank(program, capacity, self._device)
        return bank

    def flush(self) -> None:
        """Copy to the device what has changed. To be called before a step."""
        for slot in self._stale:
            slot.place.copy_(self._upload(slot.on_host.reshape(-1)).view(slot.place.shape))
        self._stale.clear()

    # Outside of graphs.

    def of_step(self, profile_T: np.ndarray, index: Mapping[Any, int]) -> StepPrograms:
        """The programs of a step.

        Args:
            profile_T: the number of each row's profile.
            index: point -> its index.
        """
        numbers = [number for number in np.unique(profile_T).tolist() if number in self._profiles]
        members: dict[ProgramAt, set[Program]] = {}
        for number in numbers:
            for at, program, _ in self._profiles[number]:
                if at.point in index:
                    members.setdefault(at, set()).add(program)
        uploaded: dict[bytes, torch.Tensor] = {}  # the points of a plan often have the same rows

        def upload(rows: np.ndarray) -> torch.Tensor:
            key = rows.tobytes()
            if key not in uploaded:
                uploaded[key] = self._upload(rows)
            return uploaded[key]

        of_slot = {at: self._slots[at].on_host[:, np.minimum(profile_T, MOST_PROFILES)] for at in members}
        rows_of = {at: np.flatnonzero(place_T >= 0) for at, (place_T, _) in of_slot.items()}
        needed: dict[Point, list[np.ndarray]] = {}
        for at, rows in rows_of.items():
            for point in at.inputs:
                needed.setdefault(point, []).append(rows)
        unions = {point: functools.reduce(np.union1d, each) for point, each in needed.items()}
        kept = {point: Kept(point, upload(rows)) for point, rows in unions.items()}
        found: dict[tuple[int, str], list[ProgramGroup]] = {}
        for at in sorted(members, key=lambda at: at.turn):
            form, rows, (place_T, offset_T) = self._forms[at.form], rows_of[at], of_slot[at]
            inputs = []
            for point in at.inputs:
                among = None if len(unions[point]) == len(rows) else upload(np.searchsorted(unions[point], rows))
                inputs.append((kept[point], among))
            bank, which = form.bank, None
            if len(members[at]) == 1:
                (program,) = members[at]
                bank = bank.alone(form.places[program][0], program)
            else:
                which = upload(place_T[rows])
            offsets = upload(offset_T[rows]) if at.what != "edit" else None
            found.setdefault((index[at.point], at.what), []).append(
                ProgramGroup(upload(rows), bank, which, offsets, inputs)
            )
        return StepPrograms(found, {index[point]: each for point, each in kept.items()})

    def from_graph(self, kept: Kept, rows: int) -> torch.Tensor:
        """The value for code outside of graphs that a replayed graph of so many rows has kept in this step."""
        return self._in_graphs[kept.point, rows][kept.rows]

    def keep_for_graphs(self, point: Point, first_TH: torch.Tensor, second_TH: torch.Tensor | None) -> None:
        """Copy a value that was computed outside of graphs to where graphs with as many rows read it."""
        there = self._in_graphs.get((point, len(first_TH)))
        if there is not None:
            there.copy_(value_of(first_TH, second_TH))

    # In graphs.

    def recordable(self, at: ProgramAt) -> InGraph:
        """The entry for the programs at `at` in the keys of graphs, while the present plans are loaded."""
        form = self._forms.get(at.form)
        return InGraph(at, form.bank.capacity if form is not None else 0)

    def recorded(self, at: ProgramAt, kept: GraphValues) -> RecordedPrograms:
        """The programs that a graph records at `at`. `kept`: the values that the same graph keeps."""
        return RecordedPrograms(self._forms[at.form].bank, self._slots[at], at.inputs, kept)

    def graph_values(self, points: Iterable[Point]) -> GraphValues:
        """Kept values for a new graph that keeps the values at these points."""
        return GraphValues(frozenset(points), self._in_graphs)


class InGraph(NamedTuple):
    """Programs that act in a step, as an entry in the keys of graphs.

    Attributes:
        capacity: how many different programs the form's bank has room for; 0 if the programs are on another pipeline stage.
    """

    at: ProgramAt
    capacity: int


class GraphValues:
    """The values that a graph keeps for its programs, for all rows. Their addresses do not change while the graph is held.

    Args:
        points: the points whose values are kept.
        shared: (point, rows) -> the memory that all graphs with as many rows share.
    """

    def __init__(self, points: frozenset[Point], shared: MutableMapping[tuple[Point, int], torch.Tensor]) -> None:
        self.points, self._shared = points, shared
        self._mine: dict[tuple[Point, int], torch.Tensor] = {}

    def put(self, point: Point, first_TH: torch.Tensor, second_TH: torch.Tensor | None) -> None:
        """Keep the value at a point, of one stream or two, if the point is among `points`."""
        if point in self.points:
            self.make_room(point, first_TH).copy_(value_of(first_TH, second_TH))

    def make_room(self, point: Point, like_TH: torch.Tensor) -> torch.Tensor:
        """The memory for the value at a point, for as many rows as `like_TH` has."""
        key = point, len(like_TH)
        if key not in self._mine:
            there = self._shared.get(key)
            if there is None:
                there = self._shared[key] = torch.empty_like(like_TH, memory_format=torch.contiguous_format)
            self._mine[key] = there
        return self._mine[key]

    def of(self, point: Point, rows: int) -> torch.Tensor:
        """The kept value at a point, for all of so many rows."""
        return self._mine[point, rows]


class RecordedPrograms(NamedTuple):
    """The programs of one form in a graph, for any rows. The graph reads their memory as long as it is held."""

    bank: ProgramBank
    slot: Slot
    inputs: Sequence[Point]
    kept: GraphValues

    def warm_up(self, hidden_TH: torch.Tensor) -> None:
        """Run the programs once on as many rows, unrecorded, so that CUDA loads now what it loads at first use."""
        self._run(torch.zeros_like(hidden_TH), torch.zeros(len(hidden_TH), dtype=torch.int32, device=hidden_TH.device))

    def _run(self, x_TH: torch.Tensor, which_T: torch.Tensor) -> torch.Tensor:
        return self.bank.run(x_TH, which_T, *(self.kept.of(point, len(x_TH)) for point in self.inputs))

    def run(
        self,
        number_T: torch.Tensor,
        first_TH: torch.Tensor,
        second_TH: torch.Tensor | None,
        note: Callable[[slice, torch.Tensor], None],
    ) -> None:
        """As `run_groups`, for all rows. `number_T`: the numbers of their profiles, at most `MOST_PROFILES`."""
        place_T = self.slot.place[0].index_select(0, number_T)
        absent_T1 = (place_T < 0)[:, None]
        old = value_of(first_TH, second_TH)
        new = self._run(old.masked_fill(absent_T1, 0), place_T.clamp(min=0))
        changed = (new != old) & ~absent_T1
        note(slice(0, len(old)), new.masked_fill(absent_T1, 0))
        first_TH.copy_(torch.where(changed, new, first_TH))
        if second_TH is not None:
            second_TH.masked_fill_(changed, 0)

    def read(self, number_T: torch.Tensor, value_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The packed results of captures or probes for all rows, and their offsets in the captured rows; -1 for rows without a program."""
        place_T, offset_T = self.slot.place.index_select(1, number_T)
        return self.bank.run(value_TH, place_T.clamp(min=0)), offset_T


def run_apart(
    run: Callable[[torch.Tensor | None], torch.Tensor],
    failed_RW: Callable[[int], torch.Tensor],
    owners: Callable[[], np.ndarray],
    note: Callable[[int, Exception], None],
) -> torch.Tensor:
    """The result of `run` for rows of several requests, `[R, W]`.

    If it raises, each request's rows run alone, so that a request fails only if its own rows raise.

    Args:
        run: runs all rows; or those at the given places, int64.
        failed_RW: makes NaN for so many rows, in the result's dtype and width.
        owners: `[R]`, the number of each row's request.
        note: called with the number of a request that fails, and its exception. The result has NaN in its rows.
    """
    try:
        return run(None)
    except Exception:  # any operation of the table may have raised
        owner_R = owners()
    result_RW = failed_RW(len(owner_R))
    for owner in np.unique(owner_R).tolist():
        some = torch.from_numpy(np.flatnonzero(owner_R == owner)).to(result_RW.device)
        try:
            result_RW[some] = run(some)
        except Exception as error:
            note(owner, error)
    return result_RW


def run_groups(
    groups: Sequence[ProgramGroup],
    first_TH: torch.Tensor,
    second_TH: torch.Tensor | None,
    run: Callable[[ProgramGroup, torch.Tensor], torch.Tensor],
    note: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Replace the rows' values in place. Unchanged elements keep their bits in both streams.

    Args:
        second_TH: the second stream, if the value is a sum of two.
        run: runs a group on its rows' values.
        note: called with the rows and their new values.
    """
    for group in groups:
        rows = group.rows
        one = first_TH[rows]
        two = second_TH[rows] if second_TH is not None else None
        old = value_of(one, two)
        new = run(group, old)
        changed = new != old
        first_TH[rows] = torch.where(changed, new, one)
        if second_TH is not None and two is not None:
            second_TH[rows] = two.masked_fill(changed, 0)
        note(rows, new)
