"""The site `router` on mixtures of experts (row N3), against plain transformers and vLLM's own report of the chosen experts.

The oracle of an edit is transformers with a hook on each router that chooses again from the changed logits, in a closed form.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from engines import ENGINE, alive
from forked import forked
from transformers import AutoModelForCausalLM

from midstream import VLLM, Capture, LanguageModel, Patch, Probe, Steer
from midstream.errors import NotFiniteError, PlanError

pytestmark = pytest.mark.engine

PROMPTS = ["The river runs from the mountains to the sea", "The capital of France is"]
CLEAN, CORRUPT = "from the mountains to the sea", "from the sea to the mountains"
LAYERS, EXPERTS, CHOSEN = tiny_models.LAYERS, 4, 2
GREEDY = {"max_tokens": 1, "temperature": 0.0}
OFF = -1e4  # a plan takes no infinity


class Plain:
    """transformers and torch's hooks."""

    def __init__(self, path: Any) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.normed = getattr(self.model.config, "norm_topk_prob", True)
        self.layers = self.model.model.layers

    @torch.no_grad()
    def __call__(self, prompt: str, edits: Any = None) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """The last token's logits, each router's logits `[tokens, experts]` and the last layer's output; `edits`: layer -> function."""
        ids = tiny_models.tokenizer()(prompt, return_tensors="pt")["input_ids"]
        routers: list[torch.Tensor] = []
        left: list[torch.Tensor] = []

        def route(layer: int, output: Any) -> Any:
            logits = output[0].clone()
            routers.append(logits.clone())
            if edits is None or layer not in edits:
                return None
            logits = edits[layer](logits)
            weights, experts = logits.softmax(-1).topk(CHOSEN, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True) if self.normed else weights
            return logits, weights, experts

        with contextlib.ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                hook = layer.mlp.gate.register_forward_hook(lambda module, args, output, i=i: route(i, output))
                stack.callback(hook.remove)
            hook = self.layers[-1].register_forward_hook(lambda module, args, output: left.append(output))
            stack.callback(hook.remove)
            logits = self.model(ids, use_cache=False).logits[0, -1]
        return logits, routers, (left[0][0] if isinstance(left[0], tuple) else left[0])[0]


@pytest.fixture(
    scope="module",
    params=[
        ("mixtral", "eager"),
        pytest.param(("qwen3_moe", "eager"), marks=pytest.mark.matrix),
        pytest.param(("olmoe", "eager"), marks=pytest.mark.matrix),
        pytest.param(("mixtral", "compiled"), marks=pytest.mark.matrix),
        pytest.param(("qwen3_moe", "compiled"), marks=pytest.mark.matrix),
    ],
    ids="-".join,
)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLM, LanguageModel, Plain]]:
    name, mode = request.param
    path = tiny_models.build(name, tmp_path_factory.mktemp("models"))
    engine = {
        **ENGINE,
        "max_model_len": 256,
        "gpu_memory_utilization": 0.1,
        "worker_extension_cls": "routing_worker.RoutingWorker",
    }
    with forked(), VLLM(str(path), **engine, enforce_eager=mode == "eager") as model:
        yield model, LanguageModel(str(path), dtype=torch.float32, attn_implementation="eager"), Plain(path)


@pytest.fixture(params=["vllm", "transformers"])
def model(models: tuple[VLLM, LanguageModel, Plain], request: pytest.FixtureRequest) -> Any:
    return models[request.param == "transformers"]


@pytest.fixture
def plain(models: tuple[VLLM, LanguageModel, Plain]) -> Plain:
    return models[2]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max()
    torch.testing.assert_close(actual.float() / scale, expected / scale, atol=1e-4, rtol=0)


def changed(actual: torch.Tensor, clean: torch.Tensor) -> bool:
    return bool((actual - clean).abs().max() > 1e-2 * clean.abs().max())


def chosen(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(CHOSEN, dim=-1).indices.sort(-1).values


def reported(vllm: VLLM) -> torch.Tensor:
    """vLLM's report since the last call: the experts of each computed token and layer, `[tokens, layers, chosen]`."""
    (report,) = vllm.engine.collective_rpc("chosen_experts")
    return torch.tensor(report).transpose(0, 1) if report else torch.empty(0)


def expert(index: int, value: float) -> list[float]:
    return [value if i == index else 0.0 for i in range(EXPERTS)]


def test_reads_are_the_logits_of_transformers(model: Any, plain: Plain) -> None:
    values = model.run(lambda m: [m.router[i] for i in range(LAYERS)], PROMPTS)
    outputs = model.generate(PROMPTS, plan=Capture("router", positions="all_prompt"), **GREEDY)
    for prompt, read, output in zip(PROMPTS, values, outputs, strict=True):
        expected = plain(prompt)[1]
        for i in range(LAYERS):
            assert read[i].shape == expected[i].shape
            close(read[i], expected[i])
            close(output.captures["router", i], expected[i])


def test_choices_are_those_that_vllm_reports(models: tuple[VLLM, LanguageModel, Plain]) -> None:
    """At every token of prompt and answer, and at every layer."""
    vllm, _, _ = models
    plan = Capture("router", positions="all")
    reported(vllm)
    for prompt in PROMPTS:
        (output,) = vllm.generate(prompt, plan=plan, max_tokens=6, temperature=0.0, ignore_eos=True)
        report = reported(vllm)
        assert report.shape == (len(output.prompt_token_ids) + 5, LAYERS, CHOSEN)
        for i in range(LAYERS):
            assert torch.equal(chosen(output.captures["router", i].float()), report[:, i])


@pytest.mark.parametrize("value", [OFF, -OFF], ids=["ablated", "forced"])
def test_a_plan_takes_an_expert_away_or_forces_it(models: Any, model: Any, plain: Plain, value: float) -> None:
    vllm, _, _ = models
    plan = [
        Steer("router", vector=expert(1, value)),
        Capture("resid_post", layers=[LAYERS - 1], positions="all_prompt"),
    ]
    plan.append(Capture("router", positions="all_prompt", when="after"))
    reported(vllm)
    outputs = model.generate(PROMPTS[0], plan=plan, **GREEDY)
    edits = dict.fromkeys(range(LAYERS), lambda logits: logits + torch.tensor(expert(1, value)))
    for prompt, output in zip(PROMPTS[:1], outputs, strict=True):
        expected = plain(prompt, edits)[2]
        assert changed(expected, plain(prompt)[2])
        close(output.captures["resid_post", LAYERS - 1], expected)
        runs = torch.stack([(chosen(output.captures["router", i].float()) == 1).any(-1) for i in range(LAYERS)], 1)
        assert bool((runs == (value > 0)).all())
        if model is vllm:
            assert torch.equal((reported(vllm) == 1).any(-1), runs)


def test_a_plan_as_data_in_a_stock_request(models: Any, plain: Plain) -> None:
    """The form in which a client sends it over HTTP."""
    from vllm import SamplingParams

    vllm, _, _ = models
    steer = {"kind": "steer", "site": "router", "layers": [1, 2], "vector": expert(2, OFF)}
    plan = json.dumps({"version": 1, "interventions": [steer]})
    params = SamplingParams(**GREEDY, logprobs=5, extra_args={"midstream": plan})
    edits = dict.fromkeys([1, 2], lambda logits: logits + torch.tensor(expert(2, OFF)))
    output, neighbour = vllm.engine.generate(PROMPTS[:1] * 2, [params, SamplingParams(**GREEDY, logprobs=5)])
    for each, expected in ((output, plain(PROMPTS[0], edits)[0]), (neighbour, plain(PROMPTS[0])[0])):
        for token, found in each.outputs[0].logprobs[0].items():
            assert abs(found.logprob - float(expected.log_softmax(-1)[token])) < 1e-3
    reported(vllm)
    vllm.engine.generate(PROMPTS[0], params)
    report = reported(vllm)
    other = torch.stack([chosen(logits) for logits in plain(PROMPTS[0])[1]], 1)
    assert not (report[:, [1, 2]] == 2).any() and (other[:, [1, 2]] == 2).any()
    assert torch.equal(report[:, 0], other[:, 0])


def test_a_trace_writes_infinity_and_ablates(model: Any, plain: Plain) -> None:
    def ablate(m: Any) -> Any:
        for i in range(LAYERS):
            m.router[i][:, 3] = float("-inf")
        return m.logits

    def off(logits: torch.Tensor) -> torch.Tensor:
        logits[:, 3] = float("-inf")
        return logits

    values = model.run(ablate, PROMPTS)
    for prompt, logits in zip(PROMPTS, values, strict=True):
        close(logits[0], plain(prompt, dict.fromkeys(range(LAYERS), off))[0])


@pytest.mark.parametrize("value", ["-inf", "inf", "nan"])
def test_a_row_of_infinities_is_refused(models: Any, value: str) -> None:
    """Without a finite logit there is no choice."""

    def write(m: Any) -> Any:
        m.router[1][:] = float(value)
        return m.logits

    with pytest.raises(NotFiniteError):
        models[0].run(write, PROMPTS[0])


def test_a_patch_from_a_run_makes_the_choice_of_the_other_prompt(models: Any, model: Any, plain: Plain) -> None:
    vllm, _, _ = models
    run = model.record(CLEAN, sites=["router"])
    layer, position = next(
        (layer, position)
        for layer, (clean, corrupt) in enumerate(zip(plain(CLEAN)[1], plain(CORRUPT)[1], strict=True))
        for position in range(1, len(clean))
        if not torch.equal(chosen(clean[position]), chosen(corrupt[position]))
    )
    there = plain(CLEAN)[1][layer][position]

    def patched(logits: torch.Tensor) -> torch.Tensor:
        logits[position] = there
        return logits

    plan = [Patch("router", layer=layer, position=position, source=run)]
    reported(vllm)
    output = model.generate(
        CORRUPT, plan=[*plan, Capture("resid_post", layers=[LAYERS - 1], positions="all_prompt")], **GREEDY
    )[0]
    expected = plain(CORRUPT, {layer: patched})[2]
    assert changed(expected, plain(CORRUPT)[2])
    close(output.captures["resid_post", LAYERS - 1], expected)
    if model is vllm:
        assert torch.equal(reported(vllm)[position, layer], chosen(there))


def test_every_cell_of_a_sweep(model: Any, plain: Plain) -> None:
    answer, foil = 11, 12
    result = model.sweep(CLEAN, CORRUPT, answer, foil, sites="router", layers=[0, 2])
    sources = plain(CLEAN)[1]
    for row, layer in enumerate([0, 2]):
        for position in range(len(sources[0])):

            def patched(logits: torch.Tensor, layer: int = layer, position: int = position) -> torch.Tensor:
                logits[position] = sources[layer][position]
                return logits

            logits = plain(CORRUPT, {layer: patched})[0]
            assert abs(float(result.values["router"][row, position]) - float(logits[answer] - logits[foil])) < 2e-3
    assert result.values["router"].std() > 0


def test_a_probe_reads_the_logits(model: Any, plain: Plain) -> None:
    probe = Probe("router", layer=2, weight=expert(1, 1.0), name="expert", positions="all_prompt")
    for prompt, output in zip(PROMPTS, model.generate(PROMPTS, plan=probe, **GREEDY), strict=True):
        close(torch.as_tensor(output.scores["expert"]), plain(prompt)[1][2][:, 1:2])


def test_a_bad_vector_is_refused(model: Any) -> None:
    with pytest.raises(PlanError, match=r"Steer\.vector is of width 3; allowed: 4, the width of router"):
        model.generate(PROMPTS[0], plan=Steer("router", vector=[1.0, 2.0, 3.0]), **GREEDY)
    with pytest.raises(PlanError, match=r"finite"):
        model.generate(PROMPTS[0], plan=Steer("router", vector=expert(0, float("-inf"))), **GREEDY)


def test_nothing_is_left(models: Any) -> None:
    assert not alive(models[0])
