"""Functions in plans on both backends against plain hooks (M5)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, close
from plan_cases import FRANCE, GREEDY, HIDDEN, ITALY, P, everything, generated_with, tokens, vector

from midstream import Apply, Plan, Probe, Steer, When
from midstream.errors import PlanError

V, W = vector(7, 30.0), vector(8, 1.0)
MATRIX = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / 16


def in_place(h: torch.Tensor) -> None:
    h *= 0.5
    h[:, 3] = 1.0
    h[..., 10:20] += V[10:20]


def helper(h: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return h + torch.nn.functional.gelu(h @ by).clamp(max=2.0)


def branching(h: torch.Tensor) -> torch.Tensor:
    kept = [s := 2.0, *(s := s * 0.5 for _ in range(3))]
    return helper(h, MATRIX) * kept[-1] + V if len(kept) == 4 else h


FUNCTIONS: dict[str, Any] = {
    "ablation": lambda h: h - (h @ W)[:, None] * W,
    "norms": lambda h: h / h.norm(dim=-1, keepdim=True) * 20,
    "where": lambda h: torch.where(h.mean(-1, keepdim=True) > 0, h + V, h.tanh()),
    "in place": in_place,
    "helpers and comprehensions": branching,
    "softmax of heads": lambda h: (h.view(h.shape[0], 8, -1).softmax(-1) * h.view(-1, 8, HIDDEN // 8)).flatten(1),
    "nothing": lambda h: h,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_replaces_the_value(model: Any, plain: Plain, name: str) -> None:
    function = FUNCTIONS[name]

    def edit(h: torch.Tensor) -> torch.Tensor:
        found = function(h)
        return h if found is None else found

    plan = [Apply("resid_post", layers=[3, -3], program=function), everything(when="after")]
    for prompt in (FRANCE, ITALY):
        (output,) = model.generate(prompt, plan=plan, max_tokens=5, **GREEDY)
        ids, ran = generated_with(plain, {("resid_post", 3): edit, ("resid_post", 5): edit}, 5, prompt)
        assert tokens(output) == ids
        for layer in (3, 5):
            close(output.captures["resid_post", layer], ran.sites["resid_post", layer])


def test_a_function_of_two_values_behind_a_gate(model: Any, plain: Plain) -> None:
    kept: dict[str, torch.Tensor] = {}

    def keep(h: torch.Tensor) -> torch.Tensor:
        kept["h"] = h
        return h

    probe = Probe("resid_post", layer=2, weight=W, name="p")
    edit = Apply(
        "mlp_out", layers=4, program=lambda h, early: h + 0.5 * early, inputs=[("resid_post", 2)], phase="decode"
    )
    median = float((generated_with(plain, None, 5)[1].sites["resid_post", 2] @ W)[P:].median()) + 1e-3

    def gated(h: torch.Tensor) -> torch.Tensor:
        acts = (kept["h"] @ W > median)[:, None] & (torch.arange(len(h)) >= P)[:, None]
        return torch.where(acts, h + 0.5 * kept["h"], h)

    plan = [When(probe, above=median, then=[edit]), everything("mlp_out", when="after")]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=5, **GREEDY)
    ids, ran = generated_with(plain, {("resid_post", 2): keep, ("mlp_out", 4): gated}, 5)
    assert tokens(output) == ids
    close(output.captures["mlp_out", 4], ran.sites["mlp_out", 4])


def test_what_a_function_uses_is_what_it_is_at_the_call(model: Any, plain: Plain) -> None:
    """A plan that is used again is recorded again; a request under way keeps what it had."""
    v = V.clone()
    plan = Plan.of([Apply("resid_post", layers=3, program=lambda h: h + v), everything(when="after")])
    for _ in range(2):
        (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
        close(output.captures["resid_post", 3], plain.run(FRANCE).sites["resid_post", 3] + v)
        v *= -2


def test_the_models_own_plan_has_functions_and_all_layers(model: Any, plain: Plain) -> None:
    model.plan = Apply("attn_out", program=lambda h: 0.5 * h)
    try:
        (output,) = model.generate(FRANCE, plan=Steer("resid_post", layers=5, vector=V), max_tokens=3, **GREEDY)
    finally:
        model.plan = None
    edits: dict[Any, Any] = {("attn_out", layer): lambda h: 0.5 * h for layer in range(8)}
    assert tokens(output) == plain.generate(FRANCE, 3, {**edits, ("resid_post", 5): lambda h: h + V})


REFUSED: dict[str, tuple[Any, str]] = {
    "mixes tokens": (lambda h: h - h.mean(0), r"line \d+ of the function cannot be a program"),
    "looks at a number": (lambda h: h if h.sum() > 0 else -h, "cannot be a program"),
    "other widths": (lambda h: h[:, :3], "cannot be a program"),
    "some tokens": (lambda h: torch.cat([h[:1] * 2, h[1:]]), "cannot be a program"),
    "number of tokens": (lambda h: h * h.shape[0], "cannot be a program"),
    "their remainder": (lambda h: h * (h.shape[0] % 4), "depends on the number of tokens"),
    "more than a number": (lambda h: h * 2 if h.shape[0] > 5 else h, "depends on the number of tokens"),
    "a certain number": (lambda h: h * 2 if h.size(0) == 5 else h, "depends on the number of tokens"),
    "their length": (lambda h: h * 2 if len(h) == 1 else h, "depends on the number of tokens"),
    "at most": (lambda h: h * min(h.shape[0], 5), "depends on the number of tokens"),
    "a loop over tokens": (lambda h: [h := h * 0.9 for _ in range(h.shape[0])][-1], "cannot be a program"),
    "a slice of a list": (lambda h: h * sum([1, 2, 3, 4][: h.shape[0]]), "something else each time"),
    "a table": (lambda h: h * {5: 2.0}.get(h.shape[0], 1.0), "depends on the number of tokens"),
    "numbers in all": (lambda h: h * (h.numel() // 256), "depends on the number of tokens"),
    "a single row": (lambda h: V, "it returns a tensor of shape"),
    "random": (lambda h: h + torch.randn(HIDDEN), "cannot be a program"),
    "random numbers": (lambda h: h * random.random(), "cannot be a program"),
    "prints": (lambda h: print(h.shape) or h, "cannot be a program"),
    "reads a file": (lambda h: h * len(Path(__file__).read_text()), "cannot be a program"),
    "an error": (lambda h: h @ torch.ones(3, 4), "cannot be a program: RuntimeError: a and b"),
    "no tensor": (lambda h: 3, "it returns no tensor"),
    "numpy": (lambda h: torch.tensor(h.numpy()), "cannot be a program"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_program_is_refused(model: Any, name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        model.generate(FRANCE, plan=Apply("resid_post", layers=3, program=function), max_tokens=1)


def test_state_and_wrong_places_are_refused(model: Any) -> None:
    calls: list[int] = []

    def counts(h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return h * len(calls)

    count = [0]

    def every_second(h: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return h * ((count[0] + 1) // 2)

    for edit, message in (
        (Apply("resid_post", layers=3, program=counts), "something else each time"),
        (Apply("resid_post", layers=3, program=every_second), "something else each time"),
        (Apply("resid_post", layers=99, program=lambda h: h), "Apply.layers is 99"),
        (
            Apply("resid_post", layers=3, program=lambda h, x: h, inputs=[("mlp_out", 99)]),
            "has no 'mlp_out' at layer 99",
        ),
        (Apply("resid_post", layers=3, program=lambda h, x: h + x, inputs=[("resid_post", 5)]), r"Apply.inputs\[0\]"),
        (Apply("resid_post", layers=3, program=lambda h, x: h), "cannot be a program: it raises TypeError"),
    ):
        with pytest.raises(PlanError, match=message):
            model.generate(FRANCE, plan=edit, max_tokens=1)
    with pytest.raises(PlanError, match=r"Apply\.program is the function"):
        Plan.of(Apply("resid_post", program=counts)).to_json()
    with pytest.raises(PlanError, match=r"Apply\.program is 3"):
        Apply("resid_post", program=3)
