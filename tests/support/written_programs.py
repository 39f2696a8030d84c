"""Programs that tests write by hand."""

from __future__ import annotations

from typing import Any

from midstream.errors import PlanError
from midstream.plan import wire
from midstream.plan.program import Program
from midstream.plan.steps import Constant, Ref, Step

W = 6


def program(
    *steps: tuple[Any, ...],
    constants: Any = (),
    result: Any = None,
    width: int = W,
    dtype: str = "float32",
    inputs: tuple[int, ...] = (),
) -> Program:
    """Each step: operation, arguments, and named ones."""
    made = tuple(Step(name, args, tuple(sorted(kwargs[0].items())) if kwargs else ()) for name, args, *kwargs in steps)
    last = Ref(len(steps) - 1) if result is None else result
    return Program(width, dtype, made, last, tuple(Constant.of(each) for each in constants), inputs)


def redigested(programs: dict[str, Any], constants: Any) -> dict[str, Any]:
    """Programs of a plan on the wire that somebody has changed, under the digests of their new contents, if they are programs at all."""
    found = {}
    for key, given in programs.items():
        try:
            wire.read_programs(
                "programs", {key: given}, wire.read_constants("constants", constants, False, 1 << 20, {})
            )
        except PlanError as error:
            if "not the digest of its content" in str(error):
                key = str(error).split("'")[-2]
        found[key] = given
    return found
