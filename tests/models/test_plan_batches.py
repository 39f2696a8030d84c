"""Plans in batches on transformers (row F2): prompts of equal length run together, each with its own plan.

Expected values come from plain transformers with torch hooks, one prompt at a time. Rows D4, H4.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import EIFFEL, FRANCE, GREEDY, ITALY, after_rows, everything, generated_with, toward_rome, vector

from midstream import Capture, Clamp, LanguageModel, Patch, Plan, Steer
from midstream.errors import NotFiniteError
from midstream.requests.invokes import Invoke
from midstream.transformers import language_model as language_model

SPAIN, POLAND = "The capital of Spain is", "The capital of Poland is"  # 5 tokens each, as of FRANCE and ITALY


@contextmanager
def batches(model: LanguageModel) -> Iterator[list[tuple[int, int]]]:
    """The prompts and tokens of each forward over whole prompts."""
    seen: list[tuple[int, int]] = []

    def see(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            seen.append(tuple(kwargs["input_ids"].shape))

    handle = model.module.register_forward_pre_hook(see, with_kwargs=True)
    yield seen
    handle.remove()


def test_every_prompt_of_a_batch_has_its_own_plan(hf: LanguageModel, plain: Plain) -> None:
    """Steering, patches from a run and from a vector, a clamp, no plan; two lengths, in the order of the outputs."""
    v, d, rome = vector(1), vector(3), toward_rome(plain)
    unit = d / d.norm()
    run = hf.record(ITALY, ["resid_post"], name="italy")
    italy = plain.run(ITALY).sites
    cases: list[tuple[str, Any, Any]] = [
        (FRANCE, Steer("resid_post", layers=5, vector=rome, scale=1.5), {("resid_post", 5): lambda h: h + 1.5 * rome}),
        (EIFFEL, Steer("mlp_out", layers=2, vector=v), {("mlp_out", 2): lambda h: h + v}),
        (
            FRANCE,
            Patch("resid_post", layer=3, position=[3, -1], source=run),
            {("resid_post", 3): after_rows([3, 4], lambda _: italy["resid_post", 3][[3, 4]])},
        ),
        (SPAIN, Patch("attn_out", layer=4, position=1, source=v), {("attn_out", 4): after_rows([1], lambda _: v)}),
        (EIFFEL, None, None),
        (
            POLAND,
            Clamp("resid_post", layers=6, direction=d),
            {("resid_post", 6): lambda h: h - torch.outer(h @ unit, unit)},
        ),
        (SPAIN, None, None),
        (
            FRANCE,
            Steer("resid_post", layers=[2, 5], vector=v, phase="decode"),
            {("resid_post", layer): lambda h: torch.cat([h[:5], h[5:] + v]) for layer in (2, 5)},
        ),
    ]
    kept = [everything(when="after"), Capture("attn_in", layers=4, positions=[0, 2, -1], when="before")]
    plans = [[*([] if edit is None else [edit]), *kept] for _, edit, _ in cases]
    with batches(hf) as seen:
        outputs = hf.generate([prompt for prompt, _, _ in cases], plan=plans, max_tokens=4, **GREEDY)
    assert seen == [(6, 5), (2, 8)]
    for (prompt, _, edits), output in zip(cases, outputs, strict=True):
        ids, ran = generated_with(plain, edits, 4, prompt)
        assert output.prompt_token_ids == plain.ids(prompt)
        assert output.token_ids == ids
        for layer in range(8):
            close(output.captures["resid_post", layer, "after"], ran.sites["resid_post", layer])
        first = len(output.prompt_token_ids)
        close(output.captures["attn_in", 4], ran.sites["attn_in", 4][[0, 2, first - 1]])
        if edits is not None and "decode" not in str(edits):
            differs(
                output.captures["resid_post", 7, "after"],
                plain.run(plain.ids(prompt) + ids[:-1]).sites["resid_post", 7],
            )
    hf.runs.delete("italy")


def test_a_batch_changes_a_captured_value_by_no_more_than_documented(hf: LanguageModel) -> None:
    prompts = [FRANCE, ITALY, SPAIN, POLAND] * 3
    plan = [everything(), everything("mlp_out"), Steer("resid_post", layers=1, vector=vector(1))]
    for prompt, output in zip(prompts, hf.generate(prompts, plan=plan, max_tokens=6, **GREEDY), strict=True):
        (alone,) = hf.generate(prompt, plan=plan, max_tokens=6, **GREEDY)
        assert output.token_ids == alone.token_ids
        for key in alone.captures:
            close(output.captures[key], alone.captures[key], 1e-5)


def test_a_request_that_stops_early_has_its_own_rows(hf: LanguageModel, plain: Plain) -> None:
    """The others of its batch go on, with their plans."""
    v = vector(3)
    edits = {("resid_post", 3): lambda h: h + v}
    alone = {prompt: generated_with(plain, edits, 6, prompt) for prompt in (FRANCE, SPAIN, ITALY)}
    stop = alone[ITALY][0][2]
    assert [stop in ids for ids, _ in alone.values()] == [False, False, True]
    plan = [Steer("resid_post", layers=3, vector=v), everything(when="after")]
    with batches(hf) as seen:
        outputs = hf.generate([*alone], plan=plan, max_tokens=6, stop_token_ids=[stop], **GREEDY)
    assert seen == [(3, 5)]
    for (ids, ran), output, count in zip(alone.values(), outputs, (6, 6, 3), strict=True):
        assert (output.token_ids, output.finish_reason) == (ids[:count], "stop" if count == 3 else "length")
        rows = 5 + count - 1
        assert output.captures.positions["resid_post", 7, "after"] == list(range(rows))
        close(output.captures["resid_post", 7, "after"], ran.sites["resid_post", 7][:rows])


def test_a_batch_of_plans_ends_at_eos(hf: LanguageModel, plain: Plain) -> None:
    """transformers pads a request behind its end-of-text token, and no row of the padding is captured."""
    eos = hf.module.generation_config.eos_token_id
    head = plain.model.get_output_embeddings().weight
    push = (head[eos] - head.mean(0)).detach()
    outputs = hf.generate(
        [FRANCE, ITALY],
        plan=[[Steer("resid_post", layers=7, vector=push, scale=500.0), everything()], [everything()]],
        max_tokens=3,
        temperature=0.0,
    )
    assert (outputs[0].token_ids, outputs[0].finish_reason) == ([eos], "stop")
    assert len(outputs[0].captures["resid_post", 3]) == 5
    assert outputs[1].token_ids == plain.generate(ITALY, 3)
    assert len(outputs[1].captures["resid_post", 3]) == 7


def test_a_plan_that_makes_infinities_fails_its_own_request(hf: LanguageModel, plain: Plain) -> None:
    plans = [[everything()], [Steer("resid_post", layers=2, vector=vector(1), scale=3e38)], [everything()]]
    with pytest.raises(NotFiniteError) as caught:
        hf.generate([FRANCE, SPAIN, ITALY], plan=plans, max_tokens=3, **GREEDY)
    for prompt, output in zip((FRANCE, ITALY), caught.value.outputs[::2], strict=True):
        ids, ran = generated_with(plain, None, 3, prompt)
        assert output.token_ids == ids
        close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_a_batch_has_a_bounded_number_of_tokens(hf: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts, and of what they generate. A prompt with more runs alone."""
    monkeypatch.setattr(language_model, "BATCH_TOKENS", 18)
    for most, expected in ((1, [(3, 5), (2, 5)]), (4, [(2, 5), (2, 5), (1, 5)]), (20, [(1, 5)] * 5)):
        with batches(hf) as seen:
            hf.generate([FRANCE, ITALY, SPAIN, POLAND, FRANCE], plan=everything(), max_tokens=most, **GREEDY)
        assert seen == expected


def test_requests_with_other_parameters_samples_or_edits_run_apart(hf: LanguageModel) -> None:
    plan = Steer("resid_post", layers=2, vector=vector(1))
    with batches(hf) as seen:
        hf.generate([FRANCE, ITALY], plan=plan, max_tokens=2, temperature=1.0, seed=1)
    assert seen == [(1, 5)] * 2
    with hf.edit() as edited:
        edited.layers_output[1] += 0
    with batches(hf) as seen:
        edited.generate([FRANCE, ITALY], plan=plan, max_tokens=2, **GREEDY)
    assert seen == [(1, 5)] * 2
    invokes = [
        Invoke(prompt, None, {"max_tokens": most, **GREEDY}, Plan.of(plan))
        for prompt, most in ((FRANCE, 2), (ITALY, 3), (SPAIN, 2))
    ]
    with batches(hf) as seen:
        results = hf._finish(hf._run(invokes).gathered())
    assert seen == [(2, 5), (1, 5)]
    assert [len(result.output.token_ids) for result in results] == [2, 3, 2]


def test_cells_of_a_sweep_run_together(hf: LanguageModel, plain: Plain) -> None:
    """The noise runs are among them, so that the noise floor has what a batch does to the last bits."""
    with batches(hf) as seen:
        result = hf.sweep(FRANCE, ITALY, " Paris", " Rome", layers=[1, 3, 5], positions=[3, 4], progress=False)
    assert seen == [(1, 5)] * 4 + [(12, 5)]  # two recorded runs, two baselines; six cells with a noise run for each
    assert result.noise_floor < 1e-3
    france = plain.run(FRANCE).sites
    for i, layer in enumerate((1, 3, 5)):
        for j, position in enumerate((3, 4)):
            patched = {
                ("resid_post", layer): after_rows([position], lambda _, r=france["resid_post", layer][position]: r)
            }
            logits = plain.run(ITALY, patched).logits[-1]
            expected = float(logits[plain.token(" Paris")] - logits[plain.token(" Rome")])
            assert result.values["resid_post"][i, j] == pytest.approx(expected, abs=2e-3)


def test_plans_keep_no_graph_and_compute_the_logits_of_the_last_token_alone(hf: LanguageModel) -> None:
    seen: list[tuple[tuple[int, ...], bool]] = []
    head = hf.module.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, out: seen.append((tuple(out.shape), out.requires_grad)))
    hf.generate([FRANCE, ITALY], plan=everything(), max_tokens=1)
    handle.remove()
    assert seen == [((2, 1, head.weight.shape[0]), False)]
