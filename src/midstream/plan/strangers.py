"""What untrusted plans may cost the requests that share their steps.

A plan costs time once, when its request begins. It also costs time in each step: a fixed part for its operations, and a part for each
token. `check_strangers` refuses a plan that would take too much of a step even with one token. The scheduler gives the requests of a step
no more tokens than fit into `STEP_SECONDS` (`engine.shares`), so the limit holds for long prompts and for many requests.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from midstream.plan import fields, wire
from midstream.plan.captures import Reading
from midstream.plan.ops import Steer
from midstream.plan.ops.edit import Intervention
from midstream.plan.probes import Probe
from midstream.plan.selections import Selector
from midstream.plan.values import Plan, count_of
from midstream.plan.vectors import Vector
from midstream.plan.work import (
    BEGIN_SECONDS,
    CHECK_SECONDS,
    DEFAULT_WIDTH,
    GRAPH_ROWS,
    KEPT_ROW,
    PLACE_SECONDS,
    STEP_SECONDS,
    WRITE_SECONDS,
    StepWork,
    Work,
    around,
)
from midstream.sites import Point

_MOST_SELECTORS = 10  # at one point; more of them make no more kinds of rows than a plan may have


def check_strangers(plan: Plan, num_layers: int, device: str = "cuda") -> None:
    """Raise PlanError for an untrusted plan that would make other requests wait too long.

    Args:
        device: the engine's type of device, as in "cpu".
    """
    count = sum(count_of(item, num_layers) for item in plan.interventions)
    if count > wire.MAX_STRANGERS_EDITS:
        counted = "counted once for each layer and listed position"
        allowed = f"up to {wire.MAX_STRANGERS_EDITS} edits and captures over HTTP, {counted}"
        raise fields.refuse("the plan", f"{count} edits and captures", allowed)
    if len(inputs := {point for item in plan.interventions for point in item.further}) > wire.MAX_STRANGERS_INPUTS:
        allowed = f"up to {wire.MAX_STRANGERS_INPUTS} over HTTP"
        raise fields.refuse("the plan", f"programs with {len(inputs)} different further inputs", allowed)
    work = step_work(plan, num_layers, device)
    if (total := work.begin + work.step) > STEP_SECONDS:
        given = f"{total * 1e3:.0f} ms of work in the step of one token on this {device} engine"
        rows = f"the numbers of {work.free} row{'s' if work.free > 1 else ''}"
        of_rows = work.free * work.row
        charged = (
            f"{work.begin * 1e3:.0f} to begin {count} edits and captures, {(work.step - of_rows) * 1e3:.0f} for operations and shared "
            f"matrices, {of_rows * 1e3:.0f} for {rows}"
        )
        what = "use fewer edits, layers and listed positions, shorter programs, or smaller tensors in them"
        raise fields.refuse("the plan", f"{given} ({charged})", f"up to {STEP_SECONDS * 1e3:.0f} ms over HTTP: {what}")


def step_work(plan: Plan, num_layers: int, device: str) -> StepWork:
    """What a plan costs the steps of its request. `device`: the engine's type of device."""
    begin, is_grouped = 0.0, device == "cpu"  # on a CPU, the rows of each kind are computed apart
    everywhere, listed = defaultdict[Point, list[Work]](list), defaultdict[Point, list[tuple[Work, Any]]](list)
    selectors: Counter[Point] = Counter()
    for item in plan.interventions:
        work, place = _work(item, not is_grouped and not item.parts), item.place
        begin += count_of(item, num_layers) * BEGIN_SECONDS
        begin += count_of(item, num_layers) * PLACE_SECONDS if item.runs_program and not is_grouped else 0.0
        begin += WRITE_SECONDS if item.runs_program and item.its_program is None else 0.0
        for layer in range(num_layers) if item.at_layers == "all" else item.at_layers:
            point = item.site, layer
            if isinstance(place, tuple):
                listed[point].append((work, place))
            else:
                everywhere[point].append(work)
                selectors[point] += isinstance(place, Selector)
    parts = (part for item in plan.interventions for part in (item, *item.parts))
    for program in {part.its_program for part in parts}:
        if program is not None:  # the engine checks it again, and tries it out
            begin += len(program.steps) * CHECK_SECONDS + program.work.fixed_seconds(device)
    step = row = 0.0
    for point in everywhere.keys() | listed.keys():
        here = everywhere[point]
        row += sum(work.row_seconds(device) for work in here)
        step += sum(work.row_seconds(device) * len(place) for work, place in listed[point])
        kinds = _kinds(listed[point]) if is_grouped else [[work for work, _ in listed[point]]]
        of_all = sum(work.fixed_seconds(device) for work in here)
        runs = 1 << min(selectors[point], _MOST_SELECTORS) if is_grouped else 1
        step += runs * (
            of_all + sum(of_all * is_grouped + sum(w.fixed_seconds(device) for w in kind) for kind in kinds)
        )
    free = GRAPH_ROWS if not is_grouped and any(item.runs_program for item in plan.interventions) else 1
    return StepWork(begin, step + free * row, row, free)


def _kinds(listed: Sequence[tuple[Work, Sequence[int]]]) -> list[list[Work]]:
    """The work for each kind of rows. Positions with the same interventions are of one kind."""
    at = defaultdict[int, list[int]](list)
    for number, (_, place) in enumerate(listed):
        for position in place:
            at[position].append(number)
    return [[listed[number][0] for number in kind] for kind in set(map(tuple, at.values()))]


def _work(item: Intervention, is_fused: bool) -> Work:
    """The work of an intervention in a step, at one layer. `is_fused`: one kernel makes all edits of a site that are not programs."""
    if item.at_attention:
        return Work()
    work = functools.reduce(Work.plus, (_arithmetic(part, is_fused) for part in (item, *item.parts)))
    if not item.runs_program:
        return work
    operands = (value for part in (item, *item.parts) for _, value in part.values())
    width = max((value.width for value in operands if isinstance(value, Vector)), default=0)
    if (program := item.its_program) is not None:
        width = sum((program.width, *program.inputs))
    return work.plus(around(width or DEFAULT_WIDTH))


def _arithmetic(item: Intervention, is_fused: bool) -> Work:
    """The work of a single intervention, without the work around its program (`around`)."""
    if item.parts:  # a gate: the comparison of a score, and the choice of a value
        return Work(8)
    if item.its_program is not None:
        return item.its_program.work
    width = max((value.width for _, value in item.values() if isinstance(value, Vector)), default=DEFAULT_WIDTH)
    if isinstance(item, Probe):
        return Work(4, row=4 * width + 8 * item.classes, products=width * item.classes)
    if isinstance(item, Steer) and not item.norm_match:  # the vectors are summed before they are added to the rows
        return Work(0 if is_fused else 0.5, row=width / 8)
    return Work(0 if is_fused else 10, row=8 * width + (KEPT_ROW if isinstance(item, Reading) else 0))
