"""Compiles a plan for one prompt length: a few profiles, and the number of each position's profile.

A profile lists the ops of a row at every site and layer. Positions with the same ops share a profile, and profile 0 is empty, so an engine
looks up one number for each row. The vectors that ops refer to are in a bank. `ScheduledPlan` is the part for the scheduler: which KV
blocks of the prompt other requests may share, and what the plan costs a step.

Legend: P positions of the prompt.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from midstream.plan import fields
from midstream.plan.building import StepWriter
from midstream.plan.captures import NO_PLANES, Capture, PlaneKey, Planes, Reading
from midstream.plan.ops.edit import Edit, Intervention, Op, Shape, changed, point_of, position_of
from midstream.plan.ops.knockout import Knockout, Knockouts
from midstream.plan.probes import Probe, ScorePlace
from midstream.plan.program import Program
from midstream.plan.selections import Selection
from midstream.plan.steps import SIZES
from midstream.plan.strangers import step_work
from midstream.plan.values import SITE_ORDER, Plan, encoded
from midstream.plan.vectors import Named, RecordedRun, Vector, Zeros, digest
from midstream.plan.work import StepWork
from midstream.sites import Point

_Ranked: TypeAlias = dict[Point, list[tuple[int, Op]]]  # ops with their places in the normal form
_Read: TypeAlias = PlaneKey | Probe  # a plane to capture, or a probe
_STRETCH_BYTES = 320  # two numbers and two hashes, in tuples


@dataclass(frozen=True)
class Profile:
    """The ops of a row.

    Attributes:
        ops: (site, layer) -> capture and probes before, edits in the order of their kinds, capture and probes after; without the sites
            that have none.
        planes: of the captured row.
        scores: where each probe's scores lie in the row of scores.
        score_width: elements of the row of scores, in the model's dtype; 0 if there are no probes.
    """

    ops: dict[Point, tuple[Op, ...]]
    planes: Planes = NO_PLANES
    scores: tuple[ScorePlace, ...] = ()
    score_width: int = 0

    @property
    def row_width(self) -> int:
        """Elements of a captured row; 0 if nothing is captured."""
        return self.planes.width

    @cached_property
    def further(self) -> frozenset[Point]:
        """The (site, layer) of values that programs at other sites read."""
        return frozenset(point for ops in self.ops.values() for op in ops for point in op.inputs)

    @property
    def points(self) -> frozenset[Point]:
        """The (site, layer) with ops, or with values that programs read."""
        return self.further.union(self.ops)


@dataclass(frozen=True)
class CompiledPlan:
    """A plan for one prompt length, ready for the rows.

    Attributes:
        bank: the vectors that ops refer to, float32 `[width]` each, on the CPU or on the device where the engine holds them.
        profiles: the first is empty.
        prompt: int32, the profile of each position of the prompt, and of generated ones up to the last that an edit names.
        generated: the profile of every later position.
        acts: bool, whether the plan acts at each of the positions of `prompt`, on any stage.
        acting: the interventions in normal form, of all pipeline stages: those that act at positions of `prompt`, and those that act later.
        knockouts: the attention edges that it cuts; None for none. The other attributes leave these out.
    """

    bank: list[torch.Tensor]
    profiles: list[Profile]
    prompt: np.ndarray
    generated: int
    acts: np.ndarray
    acting: tuple[Sequence[Intervention], Sequence[Intervention]] = ((), ())
    knockouts: Knockouts | None = None


def compile_plan(
    plan: Plan,
    prompt_length: int,
    num_layers: int,
    *,
    width: Callable[[str, int], int],
    dtype: str,
    vector: Callable[[Named], Any],
    run: Callable[[RecordedRun, str, int, int], torch.Tensor],
    points: Collection[Point] | None = None,
    on_host: Callable[[Named], np.ndarray] | None = None,
    head_dims: Mapping[Point, int] = MappingProxyType({}),
) -> CompiledPlan:
    """Compile `plan` for prompts of one length.

    Args:
        prompt_length: in tokens; later positions are generated.
        num_layers: the model's, all stages together.
        width: of a site at a layer.
        dtype: the model's, as in "bfloat16".
        vector: returns a named vector, float32 `[width]`, numpy or torch.
        run: returns a recorded run's row at a site, layer and position, `[width]`, on any device.
        points: the (site, layer) to compile for, those of one pipeline stage; None for all.
        on_host: returns a named vector in host memory, for `Edit.shape`, for `head` and for probes. None to use `vector` for them, too.
        head_dims: as in `ModelFacts`.

    Raises:
        PlanError: raised by `Plan.normal`, `vector` or `run`, or for a vector of another width.
    """
    heads = _Heads(width, head_dims, on_host or vector)
    bank, others = (_VectorBank(width, vector, run, on_host or vector, dtype) for _ in range(2))
    edits: dict[str, _Ranked] = {"prefill": {}, "decode": {}}
    placed: dict[int, _Ranked] = {}
    normal = plan.normal(num_layers, prompt_length)
    cuts = [edit for edit in normal.edits if isinstance(edit, Knockout)]
    if cuts:
        normal = Plan(tuple(item for item in normal.interventions if not item.at_attention))
    listed = _listed(normal, prompt_length)
    for rank, edit in enumerate(map(heads.whole, normal.edits)):
        point = point_of(edit)
        if points is not None and point not in points:
            others.check_names(edit)
            continue
        op = rank, bank.op(edit)
        if (position := position_of(edit, prompt_length)) is not None:
            placed.setdefault(position, {}).setdefault(point, []).append(op)
            continue
        for phase in edits if edit.phase == "both" else (edit.phase,):
            edits[phase].setdefault(point, []).append(op)
    readings = [item for item in normal.readings if points is None or point_of(item) in points]
    scorers = {probe: probe.program_for(dtype, width, on_host or vector) for probe in normal.probes}
    profiles = _Profiles(edits, width, reads_of(normal.captures), scorers, dtype, bank)
    selections = {each: Selection.of(each, prompt_length) for each in {item.positions for item in normal.readings}}
    codes_P, reads, generated_reads = _read(readings, selections, prompt_length)
    generated = profiles.number(generated_reads, "decode")
    prompt_P = np.full(listed, generated, np.int32)
    rest_P = np.ones(prompt_length, bool)
    for position, here in placed.items():
        if position < prompt_length:
            rest_P[position] = False
            prompt_P[position] = profiles.number(reads[codes_P[position]], "prefill", here)
        else:
            prompt_P[position] = profiles.number(generated_reads, "decode", here)
    for code in np.unique(codes_P[rest_P]).tolist():
        prompt_P[:prompt_length][rest_P & (codes_P == code)] = profiles.number(reads[code], "prefill")
    return CompiledPlan(
        bank.tensors,
        profiles.list,
        prompt_P,
        generated,
        *_acting(normal, selections, prompt_length, listed),
        Knockouts(cuts, prompt_length) if cuts else None,
    )


def _acting(
    normal: Plan, selections: Mapping[Any, Selection], prompt_length: int, listed: int
) -> tuple[np.ndarray, tuple[Sequence[Intervention], Sequence[Intervention]]]:
    """`CompiledPlan.acts` and `CompiledPlan.acting`. `listed`: how many positions have profiles of their own."""
    acts = np.zeros(listed, bool)
    in_prompt, generated = list[Intervention](), list[Intervention]()
    everywhere = False  # whether an edit acts at all positions of the prompt
    for item in normal.interventions:
        if isinstance(item, Reading):
            rows = selections[item.positions]
            here, there = bool(rows.prompt.size), bool(rows.generated)
        else:
            assert isinstance(item, Edit)
            if (position := position_of(item, prompt_length)) is not None:
                acts[position], here, there = True, True, False
            else:
                here, there = item.phase != "decode", item.phase != "prefill"
                everywhere |= here
        if here or (there and listed > prompt_length):  # generated positions are among the listed ones
            in_prompt.append(item)
        if there:
            generated.append(item)
    for rows in selections.values():
        acts[rows.prompt] = True
    acts[:prompt_length] |= everywhere
    acts[prompt_length:] |= bool(generated)
    return acts, (in_prompt, generated)


def _listed(normal: Plan, prompt_length: int) -> int:
    """The number of positions with a profile of their own: all positions up to the last one that an edit names."""
    places = (position_of(edit, prompt_length) for edit in normal.edits)
    return max([prompt_length, *(place + 1 for place in places if place is not None)])


def reads_of(captures: Sequence[Capture]) -> dict[PlaneKey, Program]:
    """The programs that captures in normal form run, by the value that they read.

    Raises PlanError if two captures run different programs on one value.
    """
    found: dict[PlaneKey, Program | None] = {}
    for capture in captures:
        key = (*point_of(capture), capture.when)
        if found.setdefault(key, capture.program) != capture.program:
            raise fields.refuse("Capture.program", f"two that differ at {key[0]}[{key[1]}]", "one for each value")
    return {key: program for key, program in found.items() if program is not None}


def plane_width(key: PlaneKey, width: Callable[[str, int], int], reads: Mapping[PlaneKey, Program]) -> int:
    """The width of a plane, in elements of the model's dtype. `reads`: from `reads_of`."""
    program = reads.get(key)
    return width(*key[:2]) if program is None else program.packed_width(SIZES[program.dtype])


def _read(
    readings: Sequence[Reading], selections: Mapping[Any, Selection], prompt_length: int
) -> tuple[np.ndarray, list[frozenset[_Read]], frozenset[_Read]]:
    """The planes and probes that read each position: `(codes, sets, generated)`.

    At a position of the prompt they are `sets[codes[position]]`, at generated positions `generated`.
    """
    groups: dict[Any, set[_Read]] = {}
    for item in readings:
        read = item if isinstance(item, Probe) else (*point_of(item), item.when)
        groups.setdefault(item.positions, set()).add(read)
    generated: set[_Read] = set()
    codes, sets = np.zeros(prompt_length, np.int64), [frozenset[_Read]()]
    for positions, keys in groups.items():
        rows = selections[positions]
        generated |= keys if rows.generated else set()
        before, place = np.unique(codes[rows.prompt], return_inverse=True)
        codes[rows.prompt] = len(sets) + place
        sets += [sets[code] | keys for code in before.tolist()]
    return codes, sets, frozenset(generated)


class _Heads:
    """Makes edits of the site's whole width out of edits that are limited to heads: their operands are 0 at the other heads."""

    def __init__(
        self, width: Callable[[str, int], int], head_dims: Mapping[Point, int], vector: Callable[[Named], Any]
    ) -> None:
        self._width, self._head_dims, self._vector = width, head_dims, vector
        self._operands: dict[Any, dict[str, Vector]] = {}

    def whole(self, edit: Any) -> Any:
        """The edit, in normal form, without `head`. Cached, since a plan may have the same one at many positions."""
        if any(part.head is not None for part in edit.parts):
            return edit.with_parts(self.whole)
        if edit.head is None:
            return edit
        point, key = point_of(edit), edit.effect()
        if key not in self._operands:
            self._operands[key] = edit.over_heads(self._head_dims.get(point), self._width(*point), self._vector)
        return changed(edit, head=None, **self._operands[key])


class _VectorBank:
    """The vectors that ops refer to, each once."""

    def __init__(
        self,
        width: Callable[[str, int], int],
        vector: Callable[[Named], Any],
        run: Callable[[RecordedRun, str, int, int], torch.Tensor],
        on_host: Callable[[Named], Any],
        dtype: str,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self._width, self._vector, self._run, self._on_host, self._dtype = width, vector, run, on_host, dtype
        self._index: dict[Any, int] = {}
        self._named: dict[int, Named] = {}  # the vectors that may lie on the device
        self._ops: dict[Any, Op] = {}

    def check_names(self, edit: Edit) -> None:
        """Raise PlanError if the stage where this edit acts would refuse one of its named vectors: so the request fails on all stages or on
        none.
        """
        for field, value in edit.values():
            if isinstance(value, Named):
                self._operand(edit, field, value)
        for part in edit.parts:
            for _, value in part.values():
                if isinstance(value, Named):
                    self._on_host(value)

    def op(self, edit: Edit) -> Op:
        """The op of an edit in normal form. Cached, since a plan may have the same one at many positions."""
        key = (*edit.effect(), edit.run_row()) if edit.reads_run else edit.effect()
        if key not in self._ops:
            given = {field: self._operand(edit, field, value) for field, value in edit.values()}
            first, second = (given.get(field, -1) for field in (*edit.operands, "", "")[:2])
            program = edit.program_for(self._dtype, self._width, self._on_host)
            numbers, is_final = edit.numbers(), edit.final is not None
            self._ops[key] = Op(
                edit.kind, first, second, *numbers, program=program, inputs=edit.further, is_final=is_final
            )
        return self._ops[key]

    def on_host(self, index: int) -> torch.Tensor | None:
        """An operand's tensor in host memory; None if there is no operand."""
        if index < 0:
            return None
        named = self._named.get(index)
        return self.tensors[index].cpu() if named is None else torch.tensor(np.asarray(self._on_host(named)))

    def _operand(self, edit: Edit, field: str, value: Vector | Named | RecordedRun | Zeros) -> int:
        """The index of an operand's tensor. Operands with equal keys share one."""
        site, layer = point_of(edit)
        width, shape, label = self._width(site, layer), edit.shape(field), edit.label(field)
        key: Any
        make: Callable[[], torch.Tensor]
        match value:
            case RecordedRun():
                key, make = (value.id, *edit.run_row()), lambda: self._run(value, *edit.run_row())
            case Zeros():
                key, make = ("zeros", width), lambda: torch.zeros(width)
            case _:
                key, make = (value, shape), lambda: self._shaped(value, shape, label)
        if key not in self._index:
            self.tensors.append(make().detach().to(torch.float32).contiguous())
            self._index[key] = len(self.tensors) - 1
            if isinstance(value, Named) and shape is None:
                self._named[self._index[key]] = value
        index = self._index[key]
        found = list(self.tensors[index].shape)
        if found != [width]:
            raise fields.refuse(label, f"of shape {found}", f"[{width}], the width of {site} at layer {layer}")
        return index

    def _shaped(self, value: Vector | Named, shape: Shape | None, label: str) -> torch.Tensor:
        if isinstance(value, Vector):
            return torch.tensor(value.data if shape is None else shape(value.data, label))
        data: Any = self._vector(value) if shape is None else self._on_host(value)
        if shape is not None:
            data = shape(np.asarray(data), f"{label} ({value!r})")
        return data if isinstance(data, torch.Tensor) else torch.tensor(data)


class _Profiles:
    def __init__(
        self,
        edits: dict[str, _Ranked],
        width: Callable[[str, int], int],
        programs: Mapping[PlaneKey, Program],
        scorers: Mapping[Probe, Program],
        dtype: str,
        bank: _VectorBank,
    ) -> None:
        self.list = [Profile({})]
        self._edits, self._width, self._programs, self._scorers = edits, width, programs, scorers
        self._dtype, self._itemsize, self._bank = dtype, SIZES[dtype], bank
        self._finals: dict[Any, Op] = {}
        self._same = edits["prefill"] == edits["decode"]
        self._numbers: dict[Any, int] = {}
        self._without_placed: dict[Any, Profile] = {}

    def number(self, reads: frozenset[_Read], phase: str, placed: _Ranked | None = None) -> int:
        """The number of the profile that makes these `reads` and the edits of `phase`, and those `placed` at one position."""
        phase = "prefill" if self._same else phase
        everywhere = self._edits[phase]
        if not reads and not placed and not everywhere:
            return 0
        here = {
            point: self._in_order([*ops, *everywhere.get(point, ())], point) for point, ops in (placed or {}).items()
        }
        key = reads, phase, tuple(here.items())
        if key not in self._numbers:
            if (reads, phase) not in self._without_placed:
                self._without_placed[reads, phase] = self._make(reads, everywhere)
            profile = self._without_placed[reads, phase]
            if here:
                ops = {point: self._with_reads(point, edits, profile) for point, edits in here.items()}
                profile = replace(profile, ops=profile.ops | ops)
            self._numbers[key] = len(self.list)
            self.list.append(profile)
        return self._numbers[key]

    def _make(self, reads: frozenset[_Read], edits: _Ranked) -> Profile:
        planes = [read for read in reads if not isinstance(read, Probe)]
        in_order = sorted(planes, key=lambda key: (*_order(key[:2]), key[2] == "after"))
        row = Planes.of(in_order, lambda key: plane_width(key, self._width, self._programs))
        places, width = [], 0
        for probe in self._scorers:
            if probe in reads:
                program = self._scorers[probe]
                places.append(ScorePlace(probe.name, width, probe.words))
                width += program.packed_width(self._itemsize)
        at = {point_of(probe) for probe in reads if isinstance(probe, Probe)}
        points = sorted({*edits, *at, *((site, layer) for site, layer, _ in planes)}, key=_order)
        profile = Profile({}, row, tuple(places), width)
        ops = {point: self._with_reads(point, self._in_order(edits.get(point, ()), point), profile) for point in points}
        return replace(profile, ops=ops)

    def _with_reads(self, point: Point, edits: tuple[Op, ...], profile: Profile) -> tuple[Op, ...]:
        offsets = {place.name: place.offset for place in profile.scores}
        reads: list[list[Op]] = []
        for when in ("before", "after"):
            after, plane = when == "after", profile.planes.by_key.get((*point, when))
            program = self._programs.get((*point, when))
            here = [Op("capture", offset=plane.offset, after=after, program=program)] if plane else []
            here += [
                Op("probe", offset=offsets[probe.name], after=after, program=program)
                for probe, program in self._scorers.items()
                if probe.name in offsets and probe.when == when and point_of(probe) == point
            ]
            reads.append(here)
        return (*reads[0], *edits, *reads[1])

    def _in_order(self, ranked: Collection[tuple[int, Op]], point: Point) -> tuple[Op, ...]:
        """The ops of a row at a point.

        If the row has other edits at the point, the arithmetic of its final edits becomes a program. Programs run after arithmetic, so the
        final edits act last, and their sums do not mix with those of the other edits.
        """
        ops = tuple(op for _, op in sorted(ranked, key=itemgetter(0)))
        others = tuple(op for op in ops if not op.is_final)
        arithmetic = tuple(op for op in ops if op.is_final and op.program is None)
        if not (others and arithmetic):
            return ops
        key = point, arithmetic
        if key not in self._finals:
            operands = [tuple(map(self._bank.on_host, (op.vector, op.mask))) for op in arithmetic]
            program = StepWriter(self._width(*point), self._dtype).edited(arithmetic, operands)
            self._finals[key] = Op(arithmetic[0].kind, program=program, is_final=True)
        programs = tuple(op for op in ops if op.is_final and op.program is not None)
        return (*others, self._finals[key], *programs)


def _order(point: Point) -> tuple[int, int]:
    return SITE_ORDER[point[0]], point[1]


# ------------------------------------------------------------------------------------------------------- for the scheduler


def changes_kv(site: str, layer: int, num_layers: int) -> bool:
    """Whether the value at a site affects any key or value of attention. At the last layer, only the inputs of its block and of its
    attention, and the keys and values themselves, do.
    """
    return layer < num_layers - 1 or site in ("resid_pre", "attn_in", "attn_k", "attn_v")


class _Active(NamedTuple):
    """An edit and the positions `[start, stop)` at which it acts. Sorting gives the order in which edits act."""

    order: tuple[int, int, int, str]
    place: int  # in the normal form: edits of one kind at one point keep their order
    start: int
    stop: int
    text: str


class _Stretch(NamedTuple):
    """Positions with the same edits."""

    start: int
    stop: int
    edits: tuple[str, ...]


class ScheduledPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan for one prompt length, as the scheduler sees it: which KV blocks the request may share, and what its steps cost.

    The KV of a position depends on the tokens up to it, and on every edit up to it that a later attention reads. Two requests may share the
    block of positions `[begin, end)` if and only if they have the same tokens and the same such edits at all positions below `end`. The
    engine compares the tokens; `at(end)` stands for the edits.

    Attributes:
        length: of the prompt, in tokens.
        starts, stops: the bounds of each stretch of positions with the same edits. Only edits that change KV count.
        within: the key of blocks that end in each stretch.
        after: the key of blocks that end after each stretch.
        longest_hit: how many tokens may come from the prefix cache; None for no limit.
        has_edits: whether the plan changes activations.
        may_be_gone: whether it needs a vector or a run that may be deleted before the request begins.
        work: what it costs a step, for plans whose tokens in a step `engine.shares` limits; None for others.
    """

    length: int
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    within: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    longest_hit: int | None = None
    has_edits: bool = False
    may_be_gone: bool = False
    work: StepWork | None = None

    @classmethod
    def of(cls, plan: Plan, prompt_length: int, num_layers: int, device: str | None = None) -> ScheduledPlan:
        """The plan, for the scheduler.

        Args:
            plan: all of the request's, the engine-wide one included.
            prompt_length: in tokens.
            num_layers: the model's.
            device: the engine's type of device, as in "cpu", for `work`; None to leave it out.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt, or a span is not resolved yet.
        """
        texts = _Texts(prompt_length)
        active = []
        for place, edit in enumerate(plan.normal(num_layers, prompt_length).edits):
            point = point_of(edit)
            if changes_kv(*point, num_layers):
                order = *_order(point), edit.order, edit.kind
                active.append(_Active(order, place, *edit.range_in(prompt_length), texts.of(edit)))
        stretches = _stretches(sorted(active))
        within, after, below = list[str](), list[str](), ""
        for start, stop, edits in stretches:
            within.append(digest("\n".join([below, str(start), *edits]).encode()))
            below = digest(f"{within[-1]} {stop}".encode())
            after.append(below)
        return cls(
            prompt_length,
            tuple(stretch.start for stretch in stretches),
            tuple(stretch.stop for stretch in stretches),
            tuple(within),
            tuple(after),
            _lowest_read(plan, prompt_length),
            bool(plan.edits),
            any(isinstance(value, (Named, RecordedRun)) for value in plan.values()),
            step_work(plan, num_layers, device) if device is not None else None,
        )

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return _STRETCH_BYTES * len(self.starts)

    @property
    def floor(self) -> int | None:
        """The lowest position whose KV the plan changes; None if it changes none."""
        return self.starts[0] if self.starts else None

    def at(self, end: int) -> str | None:
        """The key of a block that ends before position `end`: 32 hexadecimal digits; None if plain requests may share the block."""
        last = bisect_left(self.starts, end) - 1
        if last < 0:
            return None
        return self.within[last] if end <= self.stops[last] else self.after[last]


def _lowest_read(plan: Plan, prompt_length: int) -> int | None:
    """The lowest position of the prompt that is captured or scored, at which cache hits must end; None if there is none. It is 0 for a plan
    with knockouts, which need the keys and values of all positions.
    """
    if any(edit.at_attention for edit in plan.edits):
        return 0
    prompts = [Selection.of(each, prompt_length).prompt for each in {item.positions for item in plan.readings}]
    return min((int(prompt[0]) for prompt in prompts if prompt.size), default=None)


class _Texts:
    """What edits do to a row, as short texts without positions. Cached, since a plan may have the same edit at many positions."""

    def __init__(self, prompt_length: int) -> None:
        self._length = prompt_length
        self._known: dict[Any, str] = {}
        self._nonces: dict[str, str] = defaultdict(lambda: secrets.token_hex(16))

    def of(self, edit: Edit) -> str:
        key = edit.effect()
        if key not in self._known:
            self._known[key] = digest(encoded(edit.placeless().named(self._known_vector)).encode())
        text = f"{self._known[key]} {edit.run_row()[2]}" if edit.reads_run else self._known[key]
        return f"{text} after {self._length}" if edit.counts_generated else text

    def _known_vector(self, named: Named) -> Named:
        """A vector without a digest gets a random name, so that this plan's keys equal those of no other plan."""
        return named if named.digest is not None else Named(self._nonces[named.name])


def _stretches(edits: list[_Active]) -> list[_Stretch]:
    """The positions that have edits, split where the edits change."""
    changes: dict[int, set[int]] = defaultdict(set)  # position -> indices of the edits that start or stop at it
    for i, edit in enumerate(edits):
        changes[edit.start] ^= {i}
        changes[edit.stop] ^= {i}
    active: set[int] = set()
    found: list[_Stretch] = []
    for start, stop in pairwise(sorted(changes)):
        active ^= changes[start]
        here = tuple(edits[i].text for i in sorted(active))
        if found and found[-1].stop == start and found[-1].edits == here:
            found[-1] = found[-1]._replace(stop=stop)
        elif here:
            found.append(_Stretch(start, stop, here))
    return found
