"""Makes programs of the functions in a plan's `Apply`s."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from midstream.errors import PlanError
from midstream.lowering.row_programs import Made, NotRowwise
from midstream.lowering.taping import program_of
from midstream.plan.ops import Apply
from midstream.plan.ops.edit import Intervention, changed
from midstream.plan.values import ModelFacts, Plan


def with_programs(plan: Plan, facts: ModelFacts) -> Plan:
    """The plan with programs in place of functions.

    Raises:
        PlanError: a function is not row-wise, depends on more than the value, or uses an operation that programs do not have. The message
            has its line and the reason.
    """
    return Plan(tuple(one for item in plan.interventions for one in _with_recorded(item, facts)))


def _with_recorded(item: Intervention, facts: ModelFacts) -> Sequence[Intervention]:
    if item.parts:
        edit, *_ = item.parts
        return [item.with_parts(partial(_in_place_of, edit, one)) for one in _with_recorded(edit, facts)]
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
        made = _program_at(item, width, layers[0], facts)
        program, inputs = made.program, made.inputs
        found.append(changed(item, layers=tuple(layers), program=program, inputs=inputs))
    return found


def _in_place_of(old: Intervention, new: Intervention, part: Intervention) -> Intervention:
    return new if part is old else part


def _program_at(item: Apply, width: int, layer: int, facts: ModelFacts) -> Made:
    """The program of the function at the site of one layer."""
    if missing := [point for point in item.inputs if point not in facts.widths]:
        raise PlanError(
            f"Apply.inputs: the model has no {missing[0][0]!r} at layer {missing[0][1]}.", field="Apply.inputs"
        )
    function: Any = item.program
    sizes = [width, *(facts.widths[point] for point in item.inputs)]
    try:
        return program_of(function, [(item.site, layer), *item.inputs], sizes, facts.dtype)
    except NotRowwise as error:
        where, reason = f"line {error.line} of " if error.line else "", error.reason.rstrip(".")
        raise PlanError(
            f"Apply.program: {where}the function cannot be a program: {reason}. Write a function of each token's value alone, with tensor "
            "operations, such as torch.where in place of if; or a trace, which may do anything.",
            field="Apply.program",
        ) from None
