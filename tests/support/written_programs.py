"""Programs that tests write by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

from midstream.errors import PlanError
from midstream.memory import Memory
from midstream.plan import wire
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Constant, DType, Ref, Step

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


def trusting_program(width: int) -> Program:
    """A program whose indices lie outside of the value. Its check here takes them for bounded, as no engine does."""
    from midstream.plan import checking, rowwise

    steps: list[Any] = [
        ("argsort.default", (INPUT, 1)),
        ("mul.Tensor", (INPUT, 1e6)),
        ("_to_copy.default", (Ref(1),), {"dtype": DType("int64")}),
        ("scatter_add.default", (Ref(0), 1, Ref(0), Ref(2))),
        ("gather.default", (INPUT, 1, Ref(3))),
    ]
    with mock.patch.object(rowwise, "_within", lambda *_: None), mock.patch.object(checking, "_known", Memory()):
        return program(*steps, width=width)


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
