"""From a plan to what each row gets: a few profiles, and for each position the number of its profile.

A profile says what to do to a row at every site and layer. Positions that get the same share one, and 0 is the profile that does nothing,
so an engine has one number per row to look up. Everything that several ops refer to lies in a bank of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from midstream.plan import fields
from midstream.plan.captures import EMPTY, Capture, Intervention, Key, Layout, captured_positions
from midstream.plan.ops.edit import Edit, Op, Shape, point_of, position_of
from midstream.plan.values import SITE_ORDER, Plan
from midstream.plan.vectors import Named, RecordedRun, Vector
from midstream.sites import Point

_Ranked: TypeAlias = dict[Point, list[tuple[int, Op]]]  # ops with their places in the normal form


@dataclass(frozen=True)
class Profile:
    """What a row gets.

    Attributes:
        ops: (site, layer) -> capture before, edits in the order of their kinds, capture after; sites with none are not there.
        layout: what a captured row holds.
    """

    ops: dict[Point, tuple[Op, ...]]
    layout: Layout = EMPTY

    @property
    def row_width(self) -> int:
        """Elements of a captured row; 0 if nothing is captured."""
        return self.layout.width


class Reach(NamedTuple):
    """Where a plan acts in the whole model, whichever part of it was compiled for: the stages of a pipeline decide alike by it.

    Attributes:
        prompt: bool `[prompt_length]`, the positions of the prompt at which it does anything.
        generated: whether it does at later ones.
        prompt_points, generated_points: the (site, layer) at which it does.
    """

    prompt: np.ndarray
    generated: bool
    prompt_points: frozenset[Point]
    generated_points: frozenset[Point]


NOWHERE = Reach(np.zeros(0, bool), False, frozenset(), frozenset())


@dataclass(frozen=True)
class CompiledPlan:
    """A plan for one prompt length, ready for the rows.

    Attributes:
        bank: float32 `[width]` each, on the CPU or where the engine had them.
        profiles: what rows get; the first does nothing.
        prompt: int32 `[prompt_length]`, the profile of each position of the prompt.
        generated: the profile of every later position.
    """

    bank: list[torch.Tensor]
    profiles: list[Profile]
    prompt: np.ndarray
    generated: int
    reach: Reach = NOWHERE


def compile_plan(
    plan: Plan,
    prompt_length: int,
    num_layers: int,
    *,
    width: Callable[[str, int], int],
    vector: Callable[[Named], Any],
    run: Callable[[RecordedRun, str, int, int], torch.Tensor],
    points: Collection[Point] | None = None,
    on_host: Callable[[Named], np.ndarray] | None = None,
) -> CompiledPlan:
    """What each row gets of `plan`.

    Args:
        prompt_length: in tokens; later positions are generated.
        num_layers: the model's, all stages together.
        width: of a site at a layer.
        vector: gives a named vector, float32 `[width]`, numpy or torch.
        run: gives a recorded run's row at a site, layer and position, `[width]`, on any device.
        points: the (site, layer) to compile for, those of one pipeline stage; None for all.
        on_host: gives a named vector that has to be put into shape, where `vector` gives one that the host would have to wait for.

    Raises:
        PlanError: what `Plan.normal` finds, a vector of another width, or what `vector` and `run` raise.
    """
    bank, others = (_Bank(width, vector, run, on_host or vector) for _ in range(2))
    edits: dict[str, _Ranked] = {"prefill": {}, "decode": {}}
    placed: dict[int, _Ranked] = {}
    captures: list[Capture] = []
    items = plan.normal(num_layers, prompt_length).interventions
    for rank, item in enumerate(items):
        point = point_of(item)
        if points is not None and point not in points:
            others.look_at(item)
            continue
        if isinstance(item, Capture):
            captures.append(item)
            continue
        op = rank, bank.op(item)
        if (position := position_of(item)) is not None:
            placed.setdefault(position, {}).setdefault(point, []).append(op)
            continue
        for phase in edits if item.phase == "both" else (item.phase,):
            edits[phase].setdefault(point, []).append(op)
    profiles = _Profiles(edits, width)
    planes_P, generated_planes = _captured(captures, prompt_length)
    generated = profiles.number(generated_planes, "decode")
    prompt = np.zeros(prompt_length, np.int32)
    rest = np.ones(prompt_length, bool)
    for position, here in placed.items():
        rest[position] = False
        prompt[position] = profiles.number(planes_P.sets[planes_P.codes[position]], "prefill", here)
    for code in np.unique(planes_P.codes[rest]).tolist():
        prompt[rest & (planes_P.codes == code)] = profiles.number(planes_P.sets[code], "prefill")
    return CompiledPlan(bank.tensors, profiles.list, prompt, generated, _reach(items, prompt_length))


def _reach(items: Collection[Intervention], prompt_length: int) -> Reach:
    """Of interventions in normal form."""
    prompt, generated = np.zeros(prompt_length, bool), False
    first, later = set[Point](), set[Point]()
    captured: dict[Any, set[Point]] = {}
    for item in items:
        if isinstance(item, Capture):
            captured.setdefault(item.positions, set()).add(point_of(item))
        elif (position := position_of(item)) is not None:
            prompt[position] = True
            first.add(point_of(item))
        else:
            if item.phase != "decode":
                prompt[:] = True
                first.add(point_of(item))
            if item.phase != "prefill":
                generated = True
                later.add(point_of(item))
    for selector, points in captured.items():
        positions, goes_on = captured_positions(selector, prompt_length)
        prompt[positions] = True
        generated |= goes_on
        first |= points if positions.size else set()
        later |= points if goes_on else set()
    return Reach(prompt, generated, frozenset(first), frozenset(later))


class _Planes(NamedTuple):
    """What is captured at each position of the prompt: `sets[codes[position]]`."""

    codes: np.ndarray
    sets: list[frozenset[Key]]


def _captured(captures: list[Capture], prompt_length: int) -> tuple[_Planes, frozenset[Key]]:
    """What is captured of the prompt, and at generated positions."""
    groups: dict[Any, set[Key]] = {}
    for capture in captures:
        groups.setdefault(capture.positions, set()).add((*point_of(capture), capture.when))
    generated: set[Key] = set()
    codes, sets = np.zeros(prompt_length, np.int64), [frozenset[Key]()]
    for selector, keys in groups.items():
        positions, goes_on = captured_positions(selector, prompt_length)
        generated |= keys if goes_on else set()
        before, place = np.unique(codes[positions], return_inverse=True)
        codes[positions] = len(sets) + place
        sets += [sets[code] | keys for code in before.tolist()]
    return _Planes(codes, sets), frozenset(generated)


class _Bank:
    """The vectors that ops refer to, each once."""

    def __init__(
        self,
        width: Callable[[str, int], int],
        vector: Callable[[Named], Any],
        run: Callable[[RecordedRun, str, int, int], torch.Tensor],
        on_host: Callable[[Named], Any],
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self._width, self._vector, self._run, self._on_host = width, vector, run, on_host
        self._index: dict[Any, int] = {}
        self._ops: dict[Any, Op] = {}

    def look_at(self, item: Intervention) -> None:
        """Raise PlanError for a named vector that another stage, whose edit this is, refuses: the request ends on all or on none."""
        if isinstance(item, Edit):
            for field, value in item.values():
                if isinstance(value, Named):
                    self._operand(item, field, value)

    def op(self, edit: Edit) -> Op:
        """The op of an edit in normal form; a plan may have the same one at many positions."""
        key = (*edit.what(), edit.run_row()) if edit.reads_run else edit.what()
        if key not in self._ops:
            given = dict(edit.values())
            first, second = (
                self._operand(edit, field, given[field]) if field in given else -1
                for field in (*edit.operands, None, None)[:2]
            )
            self._ops[key] = Op(edit.kind, first, second, *edit.numbers())
        return self._ops[key]

    def _operand(self, edit: Edit, field: str, value: Any) -> int:
        """The index of what an operand holds."""
        point, name = point_of(edit), f"{type(edit).__name__}.{field}"
        if isinstance(value, RecordedRun):
            row = edit.run_row()
            return self._held((value.id, *row), point, name, lambda: self._run(value, *row))
        if isinstance(value, (Vector, Named)):
            return self._value(value, point, name, edit.shape(field))
        zeros = self._width(*point)
        return self._held(("zeros", zeros), point, name, lambda: torch.zeros(zeros))

    def _value(
        self,
        source: Vector | Named,
        point: Point,
        field: str,
        shape: Shape | None = None,
    ) -> int:
        """The index of a given or a named vector, put into shape."""

        def make() -> torch.Tensor:
            given = self._vector if shape is None else self._on_host
            data = source.data if isinstance(source, Vector) else given(source)
            data = data if shape is None else shape(np.asarray(data), f"{field} ({source!r})")
            return data if isinstance(data, torch.Tensor) else torch.tensor(data)

        return self._held((source, shape), point, field, make)

    def _held(self, key: Any, point: Point, field: str, make: Callable[[], torch.Tensor]) -> int:
        if key not in self._index:
            self.tensors.append(make().detach().to(torch.float32).contiguous())
            self._index[key] = len(self.tensors) - 1
        index = self._index[key]
        shape, (site, layer) = list(self.tensors[index].shape), point
        if shape != [self._width(site, layer)]:
            raise fields.refuse(
                field, f"of shape {shape}", f"[{self._width(site, layer)}], the width of {site} at layer {layer}"
            )
        return index


class _Profiles:
    """Profiles by what makes them up, each once."""

    def __init__(self, edits: dict[str, _Ranked], width: Callable[[str, int], int]) -> None:
        self.list = [Profile({})]
        self._edits = edits
        self._same = edits["prefill"] == edits["decode"]
        self._everywhere = {phase: {point: _in_order(ops) for point, ops in at.items()} for phase, at in edits.items()}
        self._width = width
        self._numbers: dict[Any, int] = {}
        self._bases: dict[Any, Profile] = {}

    def number(self, planes: frozenset[Key], phase: str, placed: _Ranked | None = None) -> int:
        """The number of the profile that captures `planes` and makes the edits of `phase` and those that are placed here."""
        phase = "prefill" if self._same else phase
        if not planes and not placed and not self._edits[phase]:
            return 0
        here = {point: _in_order([*ops, *self._edits[phase].get(point, ())]) for point, ops in (placed or {}).items()}
        key = (planes, phase, tuple(here.items()))
        if key not in self._numbers:
            self._numbers[key] = len(self.list)
            self.list.append(self._make(planes, phase, here))
        return self._numbers[key]

    def _make(self, planes: frozenset[Key], phase: str, here: dict[Point, tuple[Op, ...]]) -> Profile:
        if (planes, phase) not in self._bases:
            layout = Layout.of(sorted(planes, key=lambda key: (*_order(key[:2]), key[2] == "after")), self._width)
            points = {*self._edits[phase], *((site, layer) for site, layer, _ in planes)}
            offsets = {plane[:3]: plane.offset for plane in layout}
            edits = self._everywhere[phase]
            ops = {point: _with_captures(point, edits.get(point, ()), offsets) for point in sorted(points, key=_order)}
            self._bases[planes, phase] = Profile(ops, layout)
        base = self._bases[planes, phase]
        if not here:
            return base
        offsets = {plane[:3]: plane.offset for plane in base.layout}
        return Profile(
            base.ops | {point: _with_captures(point, edits, offsets) for point, edits in here.items()}, base.layout
        )


def _in_order(ops: Collection[tuple[int, Op]]) -> tuple[Op, ...]:
    """By their places in the normal form."""
    if len(ops) == 1:
        return tuple(op for _, op in ops)
    return tuple(op for _, op in sorted(ops, key=itemgetter(0)))


def _with_captures(point: Point, edits: tuple[Op, ...], offsets: dict[Key, int]) -> tuple[Op, ...]:
    before, after = (
        [Op("capture", offset=offsets[*point, when])] if (*point, when) in offsets else []
        for when in ("before", "after")
    )
    return (*before, *edits, *after)


def _order(point: Point) -> tuple[int, int]:
    return SITE_ORDER[point[0]], point[1]
