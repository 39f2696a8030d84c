"""Plans with programs on both backends against plain hooks (issue 36: 4; L3, L4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Plain, close
from plan_cases import FRANCE, GREEDY, HIDDEN, ITALY, P, after_rows, everything, generated_with, tokens, vector

from midstream import Steer
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Const, Constant, Ref, RowCount, Step
from midstream.plan.values import Apply

UP = torch.randn(HIDDEN, 512, generator=torch.Generator().manual_seed(1)) / 16
DOWN = torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(2)) / 22


def gate(scale: float, bias: torch.Tensor) -> Program:
    """`h + scale * relu(h @ UP) @ DOWN + bias`"""
    steps = (
        Step("mm.default", (INPUT, Const(0))),
        Step("relu.default", (Ref(0),)),
        Step("mm.default", (Ref(1), Const(1))),
        Step("mul.Tensor", (Ref(2), scale)),
        Step("add.Tensor", (INPUT, Ref(3))),
        Step("add.Tensor", (Ref(4), Const(2))),
    )
    return Program(HIDDEN, "float32", steps, Ref(5), (Constant.of(UP), Constant.of(DOWN), Constant.of(bias)))


def gated(scale: float, bias: torch.Tensor) -> Any:
    return lambda h: h + scale * torch.relu(h @ UP) @ DOWN + bias


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
def test_a_program_acts_in_its_phase(model: Any, plain: Plain, phase: str) -> None:
    bias = vector(3, 5.0)
    plan = [Apply("resid_post", layers=[2, 4], program=gate(0.5, bias), phase=phase), everything()]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=6, **GREEDY)
    rows = {"both": slice(0, None), "prefill": slice(0, P), "decode": slice(P, None)}[phase]
    edits = {("resid_post", n): after_rows(rows, gated(0.5, bias)) for n in (2, 4)}
    ids, ran = generated_with(plain, edits, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_programs_of_many_requests_beside_plain_ones(model: Any, plain: Plain) -> None:
    """Equal but for numbers and a vector, after a steer, at one position, and none at all."""
    biases = [vector(seed, 10.0) for seed in range(3)]
    plans: list[Any] = [
        [Apply("mlp_out", layers=3, program=gate(0.1 * (i + 1), bias)), everything()] for i, bias in enumerate(biases)
    ]
    placed = Apply("resid_post", layers=3, program=gate(0.3, biases[0]), positions=-2)
    plans += [[everything()], [placed, Steer("resid_post", layers=3, vector=vector(9)), everything()]]
    outputs = model.generate([FRANCE, ITALY, FRANCE, ITALY, FRANCE], plan=plans, max_tokens=4, **GREEDY)

    def steered(h: torch.Tensor) -> torch.Tensor:
        h = h + vector(9)
        h[P - 2] = gated(0.3, biases[0])(h[P - 2 : P - 1])[0]
        return h

    edits: list[Any] = [{("mlp_out", 3): gated(0.1 * (i + 1), bias)} for i, bias in enumerate(biases)]
    edits += [{}, {("resid_post", 3): steered}]
    for output, prompt, edit in zip(outputs, [FRANCE, ITALY, FRANCE, ITALY, FRANCE], edits, strict=True):
        ids, ran = generated_with(plain, edit, 4, prompt)
        assert tokens(output) == ids
        close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_heads_of_attention(model: Any, plain: Plain) -> None:
    """A program takes all heads side by side, and may see them as an axis."""
    heads = 4
    steps = (
        Step("reshape.default", (INPUT, (RowCount(1), heads, HIDDEN // heads))),
        Step("mul.Tensor", (Ref(0), Const(0))),
        Step("reshape.default", (Ref(1), (RowCount(1), HIDDEN))),
    )
    each = torch.tensor([1.0, 0.0, 2.0, 1.0])[:, None]
    plan = [
        Apply("attn_z", layers=2, program=Program(HIDDEN, "float32", steps, Ref(2), (Constant.of(each),))),
        everything(),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)

    def edit(z: torch.Tensor) -> torch.Tensor:
        return (z.reshape(-1, heads, HIDDEN // heads) * each).reshape(z.shape)

    close(output.captures["resid_post", 7], plain.run(FRANCE, {("attn_z", 2): edit}).sites["resid_post", 7])


def test_a_program_keeps_its_kv_to_itself(engine: Any, plain: Plain) -> None:
    prompt = list(range(10, 90))
    for scale in (0.0, 0.5, 0.0, 0.25, 0.5):
        plan: list[Any] = [everything()]
        bias = vector(3, 5.0)
        if scale:
            plan.append(Apply("resid_post", layers=1, program=gate(scale, bias), phase="prefill"))
        (output,) = engine.generate([prompt], plan=plan, max_tokens=1, **GREEDY)
        ran = plain.run(prompt, {("resid_post", 1): gated(scale, bias)} if scale else {})
        close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_a_program_in_a_compiled_forward(compiled: Any, plain: Plain) -> None:
    """At a site that the compiled forward has and at one that it lacks, beside a plain request."""
    bias = vector(3, 5.0)
    for site in ("resid_post", "attn_z"):
        program = gate(0.5, bias)
        plans = [[Apply(site, layers=3, program=program), everything()], [everything()]]
        outputs = compiled.generate([FRANCE, ITALY], plan=plans, max_tokens=4, **GREEDY)
        for output, prompt, edits in zip(outputs, (FRANCE, ITALY), ({(site, 3): gated(0.5, bias)}, {}), strict=True):
            ids, ran = generated_with(plain, edits, 4, prompt)
            assert tokens(output) == ids
            close(output.captures["resid_post", 7], ran.sites["resid_post", 7])
