"""A program that should not run, or that raises while it runs, ends its own request: not the step, its neighbours or the engine. Row F5.

The oracle of every neighbour is the same batch on the same engine, without the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from here import values
from written_programs import program, trusting_program

from midstream import Capture, Probe
from midstream.errors import MidstreamError, PlanError
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Const, Ref
from midstream.plan.values import Apply

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
LONG = "The Eiffel Tower is in the city of" * 3
GREEDY: dict[str, Any] = {"max_tokens": 6, "logprobs": 5, "temperature": 0.0, "ignore_eos": True}
HIDDEN = 256


def made(*steps: Any, **more: Any) -> Program:
    return program(*steps, width=HIDDEN, **more)


SINE = made(("sin.default", (INPUT,)))
COSINE = made(("cos.default", (INPUT,)))
KEPT = made(("sin.default", (INPUT,)), result=(Ref(0),))
SCORE = made(
    ("sin.default", (INPUT,)), ("mul.Tensor", (Ref(0), Const(0))), ("sum.dim_IntList", (Ref(1), (1,), True)),
    constants=[torch.ones(HIDDEN)], result=(Ref(2),),
)  # fmt: skip
PLANS: dict[str, Callable[[], Any]] = {
    "edit": lambda: [Apply("resid_post", layers=3, program=SINE)],
    "edit, and a capture behind it": lambda: [
        Apply("resid_post", layers=3, program=SINE),
        Capture("resid_post", layers=3, when="after", positions="all"),
    ],
    "capture": lambda: [Capture("resid_post", layers=3, positions="all", program=KEPT)],
    "probe": lambda: [Probe("resid_post", layer=3, program=SCORE, name="sines", positions="all")],
}


@contextmanager
def failing_sines(engine: VLLM, rows: int) -> Iterator[None]:
    """Sines of more than so many rows raise in the engine's programs."""
    engine.engine.collective_rpc("sines_raise", args=(rows,))
    try:
        yield
    finally:
        engine.engine.collective_rpc("sines_raise", args=(1 << 30,))


def outcome(engine: VLLM, prompts: list[str], plans: list[Any]) -> tuple[list[Any], list[MidstreamError]]:
    """The outputs, and the errors."""
    try:
        return list(engine.generate(prompts, plan=plans, **GREEDY)), []
    except MidstreamError as error:
        return error.outputs, list(getattr(error, "exceptions", [error]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", PLANS)
def test_a_program_that_raises_ends_its_request_alone(engine: VLLM, kind: str) -> None:
    """Another request has the same plan and a prompt with which the program does not raise."""
    prompts, plans = (
        [FRANCE, LONG, ITALY, FRANCE],
        [PLANS[kind](), PLANS[kind](), None, [Apply("resid_post", layers=3, program=COSINE)]],
    )
    expected = engine.generate(prompts, plan=plans, **GREEDY)
    with failing_sines(engine, rows=8):
        outputs, errors = outcome(engine, prompts, plans)
    assert len(errors) == 1 and isinstance(errors[0], PlanError)
    assert "A program of the plan failed at resid_post of layer 3: ValueError: too many sines." in str(errors[0])
    for i in (0, 2, 3):
        assert values(outputs[i]) == values(expected[i])
    again = engine.generate(prompts, plan=plans, **GREEDY)
    assert [values(o) for o in again] == [values(o) for o in expected], "nothing of the failure is in the prefix cache"


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compute as fast with such numbers")
def test_numbers_too_small_to_be_normal_are_zero_on_a_cpu(engine: VLLM) -> None:
    """Seen before: an edit that multiplies by 1e-41 slowed all later products with weights by up to 200 times, for all in the step."""
    tiny = Apply("resid_pre", layers=0, program=made(("mul.Tensor", (INPUT, 1e-41))))
    plan = [tiny, Capture("resid_pre", layers=[0, 5], positions="all_prompt", when="after")]
    (output,) = engine.generate([LONG * 9], plan=plan, max_tokens=1)
    for layer in (0, 5):
        assert not output.captures["resid_pre", layer].any()


def test_indices_that_nothing_bounds_are_refused_by_the_engine(engine: VLLM) -> None:
    """A client that believes in them sends them."""
    broken = [Apply("resid_post", layers=3, program=trusting_program(HIDDEN))]
    expected = engine.generate([FRANCE, ITALY], plan=[None, None], **GREEDY)
    outputs, errors = outcome(engine, [LONG, FRANCE, ITALY], [broken, None, None])
    assert len(errors) == 1 and "gather.default: its indices may lie outside" in str(errors[0])
    assert [values(o) for o in outputs[1:]] == [values(o) for o in expected]
