"""Which programs can run together: those that differ only in numbers and small vectors that a bank can hold.

These numbers and vectors are arguments of elementwise operations, or of products with a vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.plan.fields import FLOAT32_MAX
from midstream.plan.rowwise import ELEMENTWISE, Shaped
from midstream.plan.steps import Const, Ref, Step, written
from midstream.plan.vectors import digest
from midstream.tree import objects_in

# Operations whose second argument may be a number of its own for each row. From integers they may compute floats.
_WITH_NUMBER = frozenset(
    f"{name}.{kind}" for name in "add sub mul div eq ne lt le gt ge".split() for kind in ("Tensor", "Scalar")
)


@dataclass(frozen=True)
class Form:
    """The common part of programs that can run together.

    Attributes:
        key: equal for such programs.
        slots: (step, argument) -> a number or a constant of the program that may differ between them.
    """

    key: str
    slots: dict[tuple[int, int], Any]


def form_of(program: Any, results: Sequence[Shaped]) -> Form:
    """The form of a `Program`, whose module imports this one. `results`: of its steps."""
    single = [bool(result.rows == 1) for result in results]
    uses: dict[int, list[tuple[int, int] | None]] = {}
    slots: dict[tuple[int, int], Any] = {}
    for number, step in enumerate(program.steps):
        for place, arg in enumerate((*step.args, *(value for _, value in step.kwargs))):
            is_direct = place < len(step.args) and single[number]
            if isinstance(arg, Const):
                may_differ = is_direct and (
                    step.op in ELEMENTWISE or (step.op in ("mv.default", "mm.default") and place == 1)
                )
                uses.setdefault(arg.place, []).append((number, place) if may_differ else None)
            elif is_direct and place == 1 and _takes_number(step, arg, results):
                slots[number, place] = float(arg)
            for other in objects_in(arg, Const) if isinstance(arg, tuple) else ():
                uses.setdefault(other.place, []).append(None)
    for place, where in uses.items():
        constant = program.constants[place]
        is_small = (
            constant.shape
            and 0 < math.prod(constant.shape) <= program.width
            and constant.dtype in ("float32", "float16", "bfloat16")
        )
        if is_small and None not in where:
            slots |= {each: Const(place) for each in where if each is not None}
    return Form(_key(program, slots), slots)


def _takes_number(step: Step, arg: Any, results: Sequence[Shaped]) -> bool:
    """Whether each row may have its own number `arg`, in a bank of float32, as a step's second argument. The first argument is floating
    then.
    """
    first, is_number = step.args[0], type(arg) in (int, float) and (math.isinf(arg) or abs(arg) <= FLOAT32_MAX)
    if (
        not is_number
        or step.op not in _WITH_NUMBER
        or step.kwargs
        or not isinstance(first, Ref)
        or first.out is not None
    ):
        return False
    return first.step < 0 or (results[first.step].meta.dtype.is_floating_point and results[first.step].rows == 1)


def _key(program: Any, slots: dict[tuple[int, int], Any]) -> str:
    def said(number: int, place: int, arg: Any) -> Any:
        slot = slots.get((number, place))
        if isinstance(slot, Const):
            constant = program.constants[slot.place]
            return ["slot", constant.dtype, constant.shape, slot.place]
        return ["slot"] if slot is not None else told(arg)

    def told(arg: Any) -> Any:
        if isinstance(arg, Const):
            return ["constant", program.constants[arg.place].digest]
        return [told(each) for each in arg] if isinstance(arg, tuple) else written(arg)

    steps = [
        [
            step.op,
            [said(number, place, arg) for place, arg in enumerate(step.args)],
            [[name, told(arg)] for name, arg in step.kwargs],
        ]
        for number, step in enumerate(program.steps)
    ]
    return digest(
        json.dumps([[program.width, *program.inputs], program.dtype, steps, written(program.result)]).encode()
    )
