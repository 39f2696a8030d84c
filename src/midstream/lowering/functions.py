"""Records the functions in a plan's edits as programs: `Apply("resid_post", layers=5, program=lambda h: h.tanh())`.

The function runs on stand-ins (`trace.record`), and what it has done becomes a program (`lowering.rowwise`), as a trace's write does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from midstream.errors import PlanError
from midstream.lowering.rowwise import Made, NotRowwise, RowwiseReader
from midstream.plan.ops import Apply
from midstream.plan.ops.edit import Intervention, changed
from midstream.plan.values import ModelFacts, Plan
from midstream.sites import Point
from midstream.trace.code import FunctionProgram
from midstream.trace.graph import Value
from midstream.trace.record import fingerprint, record_function

# The function is recorded for each of these numbers of tokens, and has to do the same. The first is a prime: see `Notes.rows`.
_ROWS = (1009, 2)


def with_programs(plan: Plan, facts: ModelFacts) -> Plan:
    """The plan with programs in place of functions.

    Raises:
        PlanError: a function is not row-wise, depends on more than the value, or uses an operation that programs do not have. The message
            has its line and the reason.
    """
    return Plan(tuple(one for item in plan.interventions for one in _recorded(item, facts)))


def _recorded(item: Intervention, facts: ModelFacts) -> Sequence[Intervention]:
    if item.parts:
        edit, *_ = item.parts
        return [item.with_parts(partial(_in_place_of, edit, one)) for one in _recorded(edit, facts)]
    if not isinstance(item, Apply) or not item.is_function:
        return [item]
    item = item.counted_from_0(facts.num_layers)
    by_width: dict[int, list[int]] = {}
    for layer in item.layers_in(facts.num_layers):
        if (width := facts.widths.get((item.site, layer))) is not None:
            by_width.setdefault(width, []).append(layer)
    if not by_width:
        there = ", ".join(dict.fromkeys(site for site, _ in facts.widths))
        raise PlanError(f"The model has no site {item.site!r} (Apply.site); it has {there}.", field="Apply.site")
    found = []
    for width, layers in by_width.items():
        made = _made(item, width, layers[0], facts)
        program, inputs = made.program, made.inputs
        found.append(changed(item, layers=tuple(layers), program=program, inputs=inputs))
    return found


def _in_place_of(old: Intervention, new: Intervention, part: Intervention) -> Intervention:
    return new if part is old else part


def _made(item: Apply, width: int, layer: int, facts: ModelFacts) -> Made:
    """The program of the function at the site of one layer."""
    points = [(item.site, layer), *item.inputs]
    if missing := [point for point in item.inputs if point not in facts.widths]:
        raise PlanError(
            f"Apply.inputs: the model has no {missing[0][0]!r} at layer {missing[0][1]}.", field="Apply.inputs"
        )
    sizes = [width, *(facts.widths[point] for point in item.inputs)]
    function: Any = item.program
    before = fingerprint([[FunctionProgram(function)]])
    first, second = (_of_rows(function, points, sizes, facts.dtype, rows) for rows in _ROWS)
    same_variables = fingerprint([[FunctionProgram(function)]]) == before
    if first.program != second.program or first.inputs != second.inputs or not same_variables:
        raise _refused("it does something else each time it is called, or for another number of tokens", 0)
    return first


def _of_rows(
    function: Callable[..., Any], points: Sequence[Point], sizes: Sequence[int], dtype: str, rows: int
) -> Made:
    kind = getattr(torch, dtype)
    values = [Value("read", point, shape=(rows, size), dtype=kind) for point, size in zip(points, sizes, strict=True)]
    found, reason, line = record_function(function, values, torch.device("cpu"), rows if rows == _ROWS[0] else None)
    if reason is not None or found is None:
        raise _refused(reason or "it returns no tensor", line)
    if found.shape != values[0].shape:
        raise _refused(f"it returns a tensor of shape {list(found.shape)} for {list(values[0].shape)}", line)
    reader = RowwiseReader(values[0], line)
    reader.may_use = lambda point: point in points[1:]
    try:
        made = reader.programs(found)
    except NotRowwise as error:
        raise _refused(error.reason, error.line) from None
    if len(made) > 1 or made[0].rows:
        raise _refused("it changes some tokens alone, which is what Apply.positions is for", line)
    return made[0]


def _refused(reason: str, line: int) -> PlanError:
    where, reason = f"line {line} of " if line else "", reason.rstrip(".")
    return PlanError(
        f"Apply.program: {where}the function cannot be a program: {reason}. Write a function of each token's value alone, with tensor "
        "operations, such as torch.where in place of if; or a trace, which may do anything.",
        field="Apply.program",
    )
