"""Plans on vLLM and on transformers: what they do, row by row (rows D1, D2, D4, D5, E1, E2, E9).

Every test runs on both backends; what is expected comes from plain transformers with torch hooks (`oracle.py`) on the same
weights, and from the formulas written out here. Row L3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import (
    EDITABLE,
    EIFFEL,
    FRANCE,
    GREEDY,
    HIDDEN,
    ITALY,
    LAYERS,
    SHORT,
    P,
    after_rows,
    everything,
    generated_with,
    tokens,
    toward_rome,
    vector,
)

from midstream import Capture, Clamp, Patch, Plan, Span, Steer, open_captures
from midstream.errors import CaptureError, PlanError, PromptError
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Ref, Step
from midstream.plan.values import Apply

# ---------------------------------------------------------------------------------------------------------------- Steer


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
def test_a_steer_acts_in_its_phase(model: Any, plain: Plain, phase: str) -> None:
    v = vector()
    (output,) = model.generate(
        FRANCE, plan=[Steer("resid_post", layers=[2, 5], vector=v, phase=phase), everything()], max_tokens=6, **GREEDY
    )
    rows = {"both": slice(0, None), "prefill": slice(0, P), "decode": slice(P, None)}[phase]
    edits = {("resid_post", layer): after_rows(rows, lambda h: h + v) for layer in (2, 5)}
    ids, ran = generated_with(plain, edits, 6)
    assert tokens(output) == ids
    baseline = plain.run(plain.ids(FRANCE) + ids[:-1])
    for layer in range(LAYERS):
        expected = ran.sites["resid_post", layer]
        expected = expected - after_rows(rows, lambda h: h + v)(torch.zeros_like(expected)) * (layer in (2, 5))
        close(output.captures["resid_post", layer], expected)
        if layer > 2:
            differs(output.captures["resid_post", layer], baseline.sites["resid_post", layer])
    assert output.captures.positions["resid_post", 0] == list(range(P + 5))  # the last token is never fed back


def test_edits_at_some_of_the_generated_tokens(model: Any, plain: Plain) -> None:
    """Several requests at once, one with a capture of these tokens, and beside plain ones."""
    v, w = vector(), vector(1)
    first = Steer("resid_post", layers=2, vector=v, phase="decode", positions=[0, 2])
    other = Steer("resid_post", layers=2, vector=w, phase="decode", positions=[1])
    everywhere = Steer("mlp_out", layers=4, vector=w, phase="decode")
    plans: list[Any] = [[first, everything()], [first, other, everywhere, everything()], [first], []]
    outputs = model.generate([FRANCE] * 4, plan=plans, max_tokens=6, **GREEDY)

    def at(*steps: tuple[int, torch.Tensor]) -> Any:
        def change(h: torch.Tensor) -> torch.Tensor:
            h = h.clone()
            for step, added in steps:
                h[P + step : P + step + 1] += added  # an empty slice if there is no such row yet
            return h

        return change

    some, more = at((0, v), (2, v)), at((0, v), (1, w), (2, v))
    all_decoded = after_rows(slice(P, None), lambda h: h + w)
    edits: list[Any] = [
        {("resid_post", 2): some},
        {("resid_post", 2): more, ("mlp_out", 4): all_decoded},
        {("resid_post", 2): some},
        {},
    ]
    for output, edit, has_rows in zip(outputs, edits, (True, True, False, False), strict=True):
        ids, ran = generated_with(plain, edit, 6)
        assert tokens(output) == ids
        if has_rows:
            assert output.captures.positions["resid_post", 7] == list(range(P + 5))
            close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def with_earlier(scale: float, count: int = 1) -> Program:
    """`h + scale * early` for each of so many further inputs."""
    steps: list[Step] = []
    for i in range(count):
        so_far = Ref(len(steps) - 1) if steps else INPUT
        steps += [Step("mul.Tensor", (Ref(-2 - i), scale)), Step("add.Tensor", (so_far, Ref(len(steps))))]
    return Program(HIDDEN, "float32", tuple(steps), Ref(len(steps) - 1), (), (HIDDEN,) * count)


@pytest.mark.parametrize("where", ["everywhere", "decode", "positions"])
def test_programs_with_earlier_values(model: Any, plain: Plain, where: str) -> None:
    """The values before the plan's own edits there; of one site or two, beside plain requests and others of the kind."""
    place: dict[str, Any] = {"everywhere": {}, "decode": {"phase": "decode"}, "positions": {"positions": [1, -1]}}[
        where
    ]
    rows: Any = {"everywhere": slice(None), "decode": slice(P, None), "positions": [1, P - 1]}[where]
    v = vector()
    one = Apply("resid_post", layers=[3, 5], program=with_earlier(0.5), inputs=[("resid_post", 1)], **place)
    inputs = [("resid_post", -6), ("mlp_out", 4)]
    two = Apply("resid_post", layers=5, program=with_earlier(-1.0, 2), inputs=inputs, **place)
    plans: list[Any] = [[Steer("resid_post", layers=1, vector=v), one, everything()], [two, everything()], [], [one]]
    outputs = model.generate([FRANCE] * 4, plan=plans, max_tokens=5, **GREEDY)
    seen: dict[Any, torch.Tensor] = {}

    def keep(at: Any, change: Any = lambda h: h) -> Any:
        def edit(h: torch.Tensor) -> torch.Tensor:
            seen[at] = h.clone()
            return change(h)

        return edit

    def adds(scale: float, *at: Any) -> Any:
        def edit(h: torch.Tensor) -> torch.Tensor:
            h = h.clone()
            h[rows] += scale * sum(seen[each] for each in at)[rows]
            return h

        return edit

    late = {("resid_post", layer): adds(0.5, 1) for layer in (3, 5)}
    edits: list[Any] = [
        {("resid_post", 1): keep(1, lambda h: h + v), **late},
        {("resid_post", 2): keep(2), ("mlp_out", 4): keep(4), ("resid_post", 5): adds(-1.0, 2, 4)},
        {},
        {("resid_post", 1): keep(1), **late},
    ]
    for output, edit, has_rows in zip(outputs, edits, (True, True, False, False), strict=True):
        ids, ran = generated_with(plain, edit, 5)
        assert tokens(output) == ids
        if has_rows:
            close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


WRONG_INPUTS = [
    ([("resid_post", 4)], "allowed: resid_post of layer 3 itself, or a value that every model computes before it"),
    ([("mlp_act", 1)], "one of width"),
    ([("resid_post", 80)], "no such site"),
    ([], "a list of 1"),
    ([("logits", 1)], "resid_post"),
]


@pytest.mark.parametrize(("inputs", "said"), WRONG_INPUTS)
def test_inputs_that_are_not_there_in_time_are_refused(model: Any, inputs: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan = [Apply("resid_post", layers=3, program=with_earlier(0.5), inputs=inputs)]
        model.generate(FRANCE, plan=plan, **SHORT)


def test_a_site_is_an_input_of_its_own_program(model: Any, plain: Plain) -> None:
    """Its value before the plan's edits, beside the one after them."""
    v = vector(1, 3.0)
    apply = Apply("resid_post", layers=3, program=with_earlier(0.5), inputs=[("resid_post", 3)])
    (output,) = model.generate(FRANCE, plan=[apply, Steer("resid_post", layers=3, vector=v), everything()], **SHORT)
    ids, ran = generated_with(plain, {("resid_post", 3): lambda h: (h + v) + 0.5 * h}, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


@pytest.mark.parametrize("site", EDITABLE)
def test_every_site_is_steered(model: Any, plain: Plain, site: str) -> None:
    width = plain.run(FRANCE).sites[site, 3].flatten(1).shape[1]
    v = vector(1, 3.0, width)
    (output,) = model.generate(FRANCE, plan=[Steer(site, layers=3, vector=v, scale=2.0), everything()], **SHORT)
    edits = {(site, 3): lambda h: h + 2.0 * v}
    ids, ran = generated_with(plain, edits, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])
    differs(output.captures["resid_post", 7], plain.run(plain.ids(FRANCE) + ids[:-1]).sites["resid_post", 7])


def test_resid_mid_is_steered(model: Any, plain: Plain) -> None:
    """No module outputs it; what moves it is the same as moving attention's output."""
    v = vector(1)
    (output,) = model.generate(FRANCE, plan=[Steer("resid_mid", layers=3, vector=v), everything()], **SHORT)
    ids, ran = generated_with(plain, {("attn_out", 3): lambda h: h + v}, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 3], ran.sites["resid_post", 3])
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_several_steers_add_up_and_norm_match_goes_by_each_tokens_own_norm(model: Any, plain: Plain) -> None:
    a, b = vector(1), vector(2)
    steers = [
        Steer("resid_post", layers=4, vector=a),
        Steer("resid_post", layers=4, vector=b, scale=0.3, norm_match=True),
    ]
    (output,) = model.generate(FRANCE, plan=[*steers, everything(when="after")], **SHORT)

    def both(h: torch.Tensor) -> torch.Tensor:
        return h + a + 0.3 * h.norm(dim=-1, keepdim=True) * b / b.norm()  # the norm before any steer

    ids, ran = generated_with(plain, {("resid_post", 4): both}, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 4], ran.sites["resid_post", 4])


@pytest.mark.parametrize(
    "nothing",
    [
        Steer("resid_post", vector=vector(3), scale=0.0),
        Patch("resid_post", layer=3, position=2, source=vector(3), alpha=0.0),
        Patch("resid_post", layer=3, position=2, source=vector(3), mask=[0.0] * HIDDEN),
        Clamp("resid_post", direction=vector(3), strength=0.0),
        Clamp("resid_post", direction=vector(3), low=-1e6, high=1e6),
    ],
)
def test_what_changes_nothing_changes_no_bit(model: Any, nothing: Any) -> None:
    (plainly,) = model.generate(FRANCE, plan=everything(), max_tokens=4, **GREEDY)
    (output,) = model.generate(FRANCE, plan=[nothing, everything(when="after")], max_tokens=4, **GREEDY)
    assert tokens(output) == tokens(plainly)
    for key, rows in plainly.captures.items():
        assert torch.equal(output.captures[key], rows), key


# ---------------------------------------------------------------------------------------------------- Patch and Clamp


def test_patches_from_tensors_and_zeros(model: Any, plain: Plain) -> None:
    v = vector(4, 30.0)
    mask = torch.arange(HIDDEN) % 2 == 0
    plan = [
        Patch("resid_post", layer=1, position=[1, -1], source=v, alpha=0.25),
        Patch("mlp_out", layer=4, position=2, source="zeros"),
        Patch("resid_pre", layer=6, position=3, source=v, mask=mask),
        everything(when="after"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=4, **GREEDY)
    edits = {
        ("resid_post", 1): after_rows([1, 4], lambda h: 0.75 * h + 0.25 * v),
        ("mlp_out", 4): after_rows([2], torch.zeros_like),
        ("resid_pre", 6): after_rows([3], lambda h: torch.where(mask, v, h)),
    }
    ids, ran = generated_with(plain, edits)
    assert tokens(output) == ids
    for layer in range(LAYERS):
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer])


def test_a_patch_at_alpha_one_is_the_source_to_the_bit(model: Any) -> None:
    v = vector(5)
    plan = [
        Patch("resid_post", layer=2, position=1, source=v),
        Capture("resid_post", layers=2, positions=1, when="after"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
    assert torch.equal(output.captures["resid_post", 2][0], v)


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
def test_the_blocks_true_output_is_patched(model: Any, plain: Plain, layer: int) -> None:
    """vLLM's blocks return it in two parts, neither of which it is; behind the last one the final norm adds them."""
    source = plain.run(ITALY).sites["resid_post", layer]
    plan = [Patch("resid_post", layer=layer, position=p, source=source[p]) for p in (1, 3, 4)]
    with model.trace(FRANCE, plan=plan, temperature=0.0):
        stream = model.layers_output[layer].save()
        raw = model.model.layers[layer].output.save()
        logits = model.logits.save()
    expected = plain.run(FRANCE, {("resid_post", layer): after_rows([1, 3, 4], lambda _: source[[1, 3, 4]])})
    close(stream, expected.sites["resid_post", layer])
    close(logits, expected.logits[-1:])
    differs(logits, plain.run(FRANCE).logits[-1:])
    if isinstance(raw, tuple) and len(raw) == 2:
        close(raw[0] + raw[1], stream)
        differs(raw[0], stream)
        differs(raw[1], stream)


def test_patches_at_one_place_are_made_in_their_order(model: Any) -> None:
    a, b = vector(1), vector(2)
    plan = [
        Patch("resid_post", layer=2, position=1, source=a),
        Patch("resid_post", layer=2, position=1, source=b, alpha=0.25),
        Capture("resid_post", layers=2, positions=1, when="after"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
    close(output.captures["resid_post", 2][0], 0.75 * a + 0.25 * b)


def test_a_recorded_run_moves_the_answer(model: Any, plain: Plain) -> None:
    """The fact sits at the subject through layer 3; patched there, France's capital is Rome."""
    run = model.record(ITALY, sites=["resid_post", "mlp_out"], name="italy")
    assert run.prompt_token_ids == tuple(plain.ids(ITALY)) and run.positions == (0, 1, 2, 3, 4)
    assert run.sites == ("resid_post", "mlp_out") and run.layers == tuple(range(LAYERS))
    source = plain.run(ITALY).sites
    patch = Patch("resid_post", layer=3, position=Span("France"), source=run)
    (output,) = model.generate(FRANCE, plan=[patch, everything(when="after")], max_tokens=1, **GREEDY)
    assert tokens(output) == [plain.token(" Rome")]
    expected = plain.run(FRANCE, {("resid_post", 3): after_rows([3], lambda h: source["resid_post", 3][3])})
    close(output.captures["resid_post", 7], expected.sites["resid_post", 7])
    # From another site, layer and position.
    patch = Patch(
        "resid_post", layer=5, position=[1, 2], source=run, source_site="mlp_out", source_layer=2, source_position=-1, alpha=0.5
    )  # fmt: skip
    (output,) = model.generate(FRANCE, plan=[patch, everything(when="after")], max_tokens=1, **GREEDY)
    mixed = after_rows([1, 2], lambda h: 0.5 * h + 0.5 * source["mlp_out", 2][4])
    close(output.captures["resid_post", 7], plain.run(FRANCE, {("resid_post", 5): mixed}).sites["resid_post", 7])
    # A span of several tokens takes one source position for each of them.
    patch = Patch("resid_post", layer=3, position=Span("capital of"), source=run, source_position=[2, -1])
    (output,) = model.generate(FRANCE, plan=[patch, everything(when="after")], max_tokens=1, **GREEDY)
    both = after_rows([1, 2], lambda h: source["resid_post", 3][[2, 4]])
    close(output.captures["resid_post", 7], plain.run(FRANCE, {("resid_post", 3): both}).sites["resid_post", 7])
    with pytest.raises(PlanError, match=r"source_position is one position, and Span.* is 2 tokens, at \[1, 2\]"):
        model.generate(FRANCE, plan=replace(patch, source_position=-1), **GREEDY)
    with pytest.raises(PromptError, match=r"record runs one prompt; 2 were given\. Call it once for each\."):
        model.record([ITALY, FRANCE], sites=["resid_post"])
    model.runs.delete("italy")


def test_a_run_patched_into_itself_changes_no_bit(model: Any) -> None:
    run = model.record(FRANCE, sites=["resid_mid", "resid_post"])
    (plainly,) = model.generate(FRANCE, plan=everything(), max_tokens=4, **GREEDY)
    patches = [Patch(site, layer=3, position=[0, 1, 2, 3, 4], source=run) for site in ("resid_mid", "resid_post")]
    (output,) = model.generate(FRANCE, plan=[*patches, everything(when="after")], max_tokens=4, **GREEDY)
    assert tokens(output) == tokens(plainly)
    for key, rows in plainly.captures.items():
        assert torch.equal(output.captures[key], rows), key
    model.runs.delete(run.name)


def test_alpha_moves_the_answer_from_one_end_to_the_other(model: Any) -> None:
    run = model.record(ITALY, sites="resid_post", layers=3)
    alphas = [0.0, 0.25, 0.5, 0.75, 1.0]
    plans = [
        [Patch("resid_post", layer=3, position=3, source=run, alpha=a), Capture("resid_post", layers=3, positions=3, when="after")]
        for a in alphas
    ]  # fmt: skip
    outputs = model.generate([FRANCE] * 5, plan=plans, answers=[" Paris", " Rome"], max_tokens=1, **GREEDY)
    rows = torch.stack([output.captures["resid_post", 3][0] for output in outputs])
    for alpha, row in zip(alphas, rows, strict=True):
        close(row, (1 - alpha) * rows[0] + alpha * rows[-1])
    lead = [output.answers[" Paris"] - output.answers[" Rome"] for output in outputs]
    assert lead == sorted(lead, reverse=True) and len(set(lead)) == 5 and lead[0] > 10 and lead[-1] < -10
    assert tokens(outputs[0]) != tokens(outputs[-1])
    model.runs.delete(run.name)


@pytest.mark.parametrize(("low", "high", "strength"), [(0.0, 0.0, 1.0), (-1.0, 2.0, 1.0), (5.0, float("inf"), 0.5)])
def test_a_clamp_moves_only_what_lies_along_its_direction(
    model: Any, plain: Plain, low: float, high: float, strength: float
) -> None:
    direction = vector(6)
    clamp = Clamp("resid_post", layers=[1, 4], direction=direction, low=low, high=high, strength=strength)
    (output,) = model.generate(FRANCE, plan=[clamp, everything(when="after")], max_tokens=4, **GREEDY)
    d = direction / direction.norm()

    def clamped(h: torch.Tensor) -> torch.Tensor:
        s = h @ d
        return h + strength * torch.outer(s.clamp(low, high) - s, d)

    ids, ran = generated_with(plain, {("resid_post", 1): clamped, ("resid_post", 4): clamped})
    assert tokens(output) == ids
    for layer in range(LAYERS):
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer])


def test_order_at_one_site_is_capture_patch_steer_clamp_capture(model: Any, plain: Plain) -> None:
    """However they are written."""
    a, b, d = vector(1), vector(2), vector(3)
    plan = [
        Capture("resid_post", layers=3, positions="all_prompt", when="after"),
        Clamp("resid_post", layers=3, direction=d, low=1.0, high=1.0),
        Steer("resid_post", layers=3, vector=b),
        Patch("resid_post", layer=3, position=2, source=a, alpha=0.5),
        Capture("resid_post", layers=3, positions="all_prompt"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
    before = plain.run(FRANCE).sites["resid_post", 3]
    close(output.captures["resid_post", 3], before)
    h = before.clone()
    h[2] = 0.5 * h[2] + 0.5 * a
    h = h + b
    unit = d / d.norm()
    close(output.captures["resid_post", 3, "after"], h + torch.outer(1.0 - h @ unit, unit))


# -------------------------------------------------------------------------------------------------------------- Capture


@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        ("last_prompt", [7]),
        ("all_prompt", list(range(8))),
        ("all_generated", [8, 9, 10]),
        ("all", list(range(11))),
        (3, [3]),
        ([-1, 0, 4], [0, 4, 7]),
        (Span("Tower is"), [2, 3]),
        (Span("the"), None),
    ],
)
def test_every_position_selector(model: Any, plain: Plain, positions: Any, rows: list[int] | None) -> None:
    (output,) = model.generate(
        EIFFEL, plan=Capture("mlp_in", layers=[0, 6], positions=positions), max_tokens=4, **GREEDY
    )
    ids = plain.generate(EIFFEL, 4)
    sites = plain.run(plain.ids(EIFFEL) + ids[:-1]).sites
    if rows is None:
        rows = [i for i, token in enumerate(plain.ids(EIFFEL)) if plain.decode([token]) == " the"]
        assert len(rows) == 1
    assert list(output.captures) == [("mlp_in", 0), ("mlp_in", 6)]
    for layer in (0, 6):
        assert output.captures.positions["mlp_in", layer] == rows
        close(output.captures["mlp_in", layer], sites["mlp_in", layer][rows])
        assert output.captures["mlp_in", layer].dtype == torch.float32


def test_spans_are_the_tokens_that_overlap_the_text(plain: Plain) -> None:
    """What the test above takes for granted of the tokenizer."""
    assert [plain.decode([token]) for token in plain.ids(EIFFEL)][2:4] == [" Tower", " is"]


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_in", "attn_out", "attn_z", "mlp_act", "mlp_out"])
def test_every_site_is_captured(model: Any, plain: Plain, site: str) -> None:
    (output,) = model.generate(EIFFEL, plan=Capture(site, positions="all_prompt"), max_tokens=1, **GREEDY)
    sites = plain.run(EIFFEL).sites
    assert len(output.captures) == LAYERS
    for layer in range(LAYERS):
        close(output.captures[site, layer], sites[site, layer].flatten(1))


def test_captures_of_different_rows_share_a_request(model: Any, plain: Plain) -> None:
    plan = [
        Capture("resid_post", layers=[1, 3], positions="last_prompt"),
        Capture("resid_post", layers=3, positions=[0, 1]),
        Capture("attn_out", layers=2, positions="all_generated"),
    ]
    (output,) = model.generate(EIFFEL, plan=plan, max_tokens=3, **GREEDY)
    sites = plain.run(plain.ids(EIFFEL) + plain.generate(EIFFEL, 3)[:-1]).sites
    assert output.captures.positions["resid_post", 3] == [0, 1, 7]
    close(output.captures["resid_post", 3], sites["resid_post", 3][[0, 1, 7]])
    close(output.captures["resid_post", 1], sites["resid_post", 1][[7]])
    close(output.captures["attn_out", 2], sites["attn_out", 2][[8, 9]])


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16, "float64"])
def test_rows_come_in_the_dtype_that_a_capture_asks_for(model: Any, plain: Plain, dtype: Any, tmp_path: Path) -> None:
    """On the output, in a directory and in a function; other captures of the request keep the model's."""
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    seen: list[torch.Tensor] = []
    chosen = Capture(
        "resid_post",
        layers=3,
        positions="all",
        dtype=dtype,
        to=(None, tmp_path, lambda *given: seen.append(next(each for each in given if torch.is_tensor(each)))),
    )
    output = model.generate(FRANCE, plan=[chosen, Capture("resid_post", layers=4)], max_tokens=3, **GREEDY)[0]
    (stored,) = open_captures(tmp_path).values()
    rows = output.captures["resid_post", 3]
    assert rows.dtype == stored["resid_post", 3].dtype == wanted and {each.dtype for each in seen} == {wanted}
    assert output.captures["resid_post", 4].dtype == torch.float32
    ids = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)[:-1]
    expected = plain.run(ids).sites["resid_post", 3]
    torch.testing.assert_close(rows.double(), expected.double(), atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(rows, stored["resid_post", 3], atol=0, rtol=0)


def test_a_number_that_the_captures_dtype_cannot_hold_is_an_error(model: Any, tmp_path: Path) -> None:
    huge = Steer("resid_post", layers=3, vector=torch.full((model.hidden_size,), 1e6))
    capture = Capture("resid_post", layers=3, when="after", dtype="float16")
    for to in (None, tmp_path):
        with pytest.raises(CaptureError, match="too large for float16"):
            model.generate(FRANCE, plan=[huge, replace(capture, to=to)], max_tokens=1, **GREEDY)
    with pytest.raises(PlanError, match="the dtypes float16 and None"):
        model.generate(FRANCE, plan=[capture, Capture("resid_post", layers=3, when="after")], max_tokens=1, **GREEDY)
    with pytest.raises(PlanError, match=r"Capture\.dtype"):
        Capture("resid_post", dtype="int8")


def test_nothing_generated_to_capture_is_an_empty_tensor(model: Any) -> None:
    (output,) = model.generate(
        FRANCE, plan=Capture("resid_post", layers=2, positions="all_generated"), max_tokens=1, **GREEDY
    )
    assert output.captures["resid_post", 2].shape == (0, HIDDEN)


def test_without_a_capture_there_is_nothing_in_captures(model: Any) -> None:
    planned, plainly = model.generate(
        [FRANCE, ITALY], plan=[[Steer("resid_post", vector=vector())], None], max_tokens=1, **GREEDY
    )
    assert len(planned.captures) == len(plainly.captures) == 0
    with pytest.raises(CaptureError, match="resid_post"):
        planned.captures["resid_post", 3]


# -------------------------------------------------------------------------------------------- one batch, many carriers


def test_each_prompt_has_its_own_plan_and_no_other_sees_it(model: Any, plain: Plain) -> None:
    prompts, v = [FRANCE, EIFFEL, FRANCE, ITALY], toward_rome(plain)
    baseline = model.generate(prompts, plan=everything(), max_tokens=6, **GREEDY)
    plans = [
        [Steer("resid_post", layers=5, vector=v), everything()],
        Plan((everything(),)),
        [everything()],
        None,
    ]
    outputs = model.generate(prompts, plan=plans, max_tokens=6, **GREEDY)
    ids, ran = generated_with(plain, {("resid_post", 5): lambda h: h + v}, 6)
    assert tokens(outputs[0]) == ids != tokens(baseline[0])
    close(outputs[0].captures["resid_post", 7], ran.sites["resid_post", 7])
    for output, before in list(zip(outputs, baseline, strict=True))[1:]:
        assert tokens(output) == tokens(before)
    for index in (1, 2):
        close(outputs[index].captures["resid_post", 7], baseline[index].captures["resid_post", 7], 1e-5)


def test_the_models_own_plan_comes_before_a_requests_and_is_taken_away(model: Any, plain: Plain) -> None:
    a, b = toward_rome(plain), vector(2)
    model.plan = Steer("resid_post", layers=5, vector=a)
    try:
        capture = Capture("resid_post", layers=5, positions="all_prompt", when="after")
        both, only = model.generate(
            [FRANCE, FRANCE], plan=[[Steer("resid_post", layers=5, vector=b), capture], [capture]], **SHORT
        )
        unplanned = model.generate(FRANCE, **SHORT)[0]
    finally:
        model.plan = None
    ids, ran = generated_with(plain, {("resid_post", 5): lambda h: h + a + b}, 6)
    assert tokens(both) == ids
    close(both.captures["resid_post", 5], ran.sites["resid_post", 5][:P])
    ids, ran = generated_with(plain, {("resid_post", 5): lambda h: h + a}, 6)
    assert tokens(only) == tokens(unplanned) == ids
    close(only.captures["resid_post", 5], ran.sites["resid_post", 5][:P])
    assert tokens(model.generate(FRANCE, **SHORT)[0]) == plain.generate(FRANCE, 6) != ids


def test_named_vectors_with_a_scale_of_each_requests_own(model: Any, plain: Plain) -> None:
    v = toward_rome(plain)
    model.vectors["truth"] = v
    try:
        plans = [[Steer("resid_post", layers=5, vector="truth", scale=scale)] for scale in (0.0, 1.0, -0.5)]
        outputs = model.generate([FRANCE] * 3, plan=plans, max_tokens=6, **GREEDY)
        for output, scale in zip(outputs, (0.0, 1.0, -0.5), strict=True):
            edits = {("resid_post", 5): lambda h, s=scale: h + s * v}
            assert tokens(output) == plain.generate(FRANCE, 6, edits)
        assert tokens(outputs[0]) == plain.generate(FRANCE, 6) and tokens(outputs[1])[0] == plain.token(" Rome")
        plan = [
            Patch("resid_post", layer=3, position=1, source="truth"),
            Clamp("resid_post", layers=6, direction="truth"),
        ]
        (output,) = model.generate(FRANCE, plan=[*plan, everything(when="after")], max_tokens=1, **GREEDY)
        assert torch.equal(output.captures["resid_post", 3][1], v)
        assert (output.captures["resid_post", 6] @ (v / v.norm())).abs().max() < 1e-3
    finally:
        del model.vectors["truth"]


def test_a_name_means_what_it_stands_for_when_the_request_is_made(model: Any, plain: Plain) -> None:
    """Also for what the prefix cache has of the prompt, which fills a block of it."""
    prompt = 20 * EIFFEL
    for turn, seed in enumerate((1, 2, 1)):
        model.vectors["it"] = vector(seed, 80.0)
        plan = [Steer("resid_post", layers=2, vector="it"), Capture("resid_post", layers=7, positions="all_generated")]
        (output,) = model.generate(prompt, plan=plan, max_tokens=4, **GREEDY)
        ids, ran = generated_with(plain, {("resid_post", 2): lambda h, s=seed: h + vector(s, 80.0)}, 4, prompt)
        assert tokens(output) == ids, turn
        close(output.captures["resid_post", 7], ran.sites["resid_post", 7][-3:])
    del model.vectors["it"]


def test_vectors_come_from_safetensors_files(model: Any, plain: Plain, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    save_file({"a": vector(1, 40.0), "b": vector(2, 40.0).bfloat16()}, tmp_path / "v.safetensors")
    assert sorted(model.vectors.load(tmp_path / "v.safetensors")) == ["a", "b"]
    assert "a" in model.vectors and "c" not in model.vectors and sorted(model.vectors) == ["a", "b"]
    (output,) = model.generate(FRANCE, plan=Steer("resid_post", layers=3, vector="b"), max_tokens=6, **GREEDY)
    assert tokens(output) == plain.generate(
        FRANCE, 6, {("resid_post", 3): lambda h: h + vector(2, 40.0).bfloat16().float()}
    )
    del model.vectors["a"], model.vectors["b"]
    assert not model.vectors


# ---------------------------------------------------------------------------------------------------- sinks (row D5)


def test_rows_go_to_the_output_a_directory_and_a_callable_at_once(model: Any, plain: Plain, tmp_path: Any) -> None:
    seen: dict[tuple[str, str, int], dict[int, torch.Tensor]] = {}

    def see(request: str, site: str, layer: int, positions: list[int], rows: torch.Tensor) -> None:
        seen.setdefault((request, site, layer), {}).update(zip(positions, rows.clone(), strict=True))

    plan = Capture("resid_post", layers=[2, 6], positions="all", to=(None, str(tmp_path / "rows"), see))
    outputs = model.generate([FRANCE, EIFFEL], plan=plan, max_tokens=4, **GREEDY)
    stored = open_captures(tmp_path / "rows")
    assert len(stored) == 2
    for prompt, output in zip([FRANCE, EIFFEL], outputs, strict=True):
        name, ids = output.request_id, plain.ids(prompt)
        assert list(stored[name].prompt_token_ids) == ids
        sites = plain.run(ids + plain.generate(prompt, 4)[:-1]).sites
        for layer in (2, 6):
            close(output.captures["resid_post", layer], sites["resid_post", layer])
            assert torch.equal(stored[name]["resid_post", layer], output.captures["resid_post", layer])
            called = seen[name, "resid_post", layer]
            assert torch.equal(torch.stack([called[p] for p in sorted(called)]), output.captures["resid_post", layer])


def test_rows_that_go_elsewhere_are_not_on_the_output(model: Any, tmp_path: Any) -> None:
    (output,) = model.generate(
        FRANCE, plan=Capture("resid_post", layers=2, to=str(tmp_path / "rows")), max_tokens=1, **GREEDY
    )
    assert len(output.captures) == 0
    assert open_captures(tmp_path / "rows")[next(iter(open_captures(tmp_path / "rows")))]["resid_post", 2].shape == (
        1,
        HIDDEN,
    )


def test_a_consumer_that_raises_fails_its_own_request_and_no_other(model: Any, plain: Plain) -> None:
    def see(request: str, site: str, layer: int, positions: list[int], rows: torch.Tensor) -> None:
        if len(positions) == 8:
            raise RuntimeError("disk full")

    plan = Capture("resid_post", layers=2, positions="all_prompt", to=(None, see))
    with pytest.raises(CaptureError, match="disk full") as caught:
        model.generate([FRANCE, EIFFEL, ITALY], plan=plan, max_tokens=4, **GREEDY)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert [tokens(output) for output in outputs] == [plain.generate(p, 4) for p in (FRANCE, EIFFEL, ITALY)]
    assert outputs[1].captures is None
    for index, prompt in ((0, FRANCE), (2, ITALY)):
        close(outputs[index].captures["resid_post", 2], plain.run(prompt).sites["resid_post", 2])


# ------------------------------------------------------------------------------------------------- plans beside traces


def test_a_trace_sees_a_site_after_the_plans_edits(model: Any, plain: Plain) -> None:
    v = vector(1)
    plan = [Steer(site, layers=3, vector=v) for site in ("resid_post", "attn_out", "mlp_in")]
    with model.trace(FRANCE, plan=[*plan, everything(when="after")], temperature=0.0) as tracer:
        attention = model.attentions_output[3].clone().save()
        normed = model.mlps_input[3].clone().save()
        hidden = model.layers_output[3].clone().save()
        model.layers_output[3][1] *= 2.0
        last = model.layers_output[7].clone().save()
        logits = model.logits.save()
    edits = {(site, 3): lambda h: h + v for site in ("attn_out", "mlp_in")}
    seen = plain.run(FRANCE, {**edits, ("resid_post", 3): lambda h: h + v}).sites
    close(attention, seen["attn_out", 3])
    close(normed, seen["mlp_in", 3])
    close(hidden, seen["resid_post", 3])

    def both(h: torch.Tensor) -> torch.Tensor:
        h = h + v
        h[1] *= 2.0
        return h

    expected = plain.run(FRANCE, {**edits, ("resid_post", 3): both})
    close(last, expected.sites["resid_post", 7])
    close(logits, expected.logits[-1:])
    close(tracer.result.captures["resid_post", 3], seen["resid_post", 3])  # the plan's own edits, not the trace's
    close(tracer.result.captures["resid_post", 7], expected.sites["resid_post", 7])


def test_invokes_have_plans_of_their_own(model: Any, plain: Plain) -> None:
    v = vector(1)
    capture = Capture("resid_post", layers=3, positions="all", when="after")
    with model.trace(plan=[Steer("resid_post", layers=3, vector=v), capture], max_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(FRANCE):
            pass
        with tracer.invoke(EIFFEL, plan=capture):
            first = model.layers_output[5].clone().save()
    ids, ran = generated_with(plain, {("resid_post", 3): lambda h: h + v}, 3)
    assert tokens(tracer.outputs[0]) == ids
    close(tracer.outputs[0].captures["resid_post", 3], ran.sites["resid_post", 3])
    unedited = plain.run(plain.ids(EIFFEL) + plain.generate(EIFFEL, 3)[:-1])
    close(tracer.outputs[1].captures["resid_post", 3], unedited.sites["resid_post", 3])
    close(first, plain.run(EIFFEL).sites["resid_post", 5])


def test_run_takes_a_plan_for_each_prompt(model: Any, plain: Plain) -> None:
    v = vector(1)
    prompts, plans = [FRANCE, EIFFEL], [[Steer("resid_post", layers=3, vector=v)], None]
    steered, unsteered = model.run(lambda m: m.layers_output[3], prompts, plan=plans, temperature=0.0)
    close(steered, plain.run(FRANCE).sites["resid_post", 3] + v)
    close(unsteered, plain.run(EIFFEL).sites["resid_post", 3])
