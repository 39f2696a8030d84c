"""The site `router` (row N3) on transformers' models of the DeepSeek family and PhiMoE, against the routers' own modules.

`tests/engine/test_router.py` has the models that vLLM runs on a CPU as transformers does.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from tiny_models import Architecture
from torch import nn
from transformers import AutoModelForCausalLM

from midstream import Capture, LanguageModel, Steer
from midstream.errors import PlanError, UnknownSiteError
from midstream.runtime.torch_tables import TorchTables

PROMPT = "The river runs from the mountains to the sea"
LAYERS, EXPERTS = tiny_models.LAYERS, 8
DEEPSEEK = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,
}
MODELS = {
    "deepseek_v2": Architecture("deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Architecture("deepseek_v3", DEEPSEEK),
    "phimoe": Architecture(
        "phimoe",
        {
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
}
GREEDY = {"max_tokens": 1, "temperature": 0.0}


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The module, whose weights are large enough that the choice of experts matters."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(MODELS[name].config(), dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return LanguageModel(made(request.param), tiny_models.tokenizer())


def with_experts(model: LanguageModel) -> list[int]:
    return list(range(model.module.config.to_dict().get("first_k_dense_replace", 0), LAYERS))


def shifted(model: LanguageModel, layers: list[int], shift: torch.Tensor) -> torch.Tensor:
    """The oracle: the model's last logits if its routers' matrix products have a bias."""
    linear, weights = nn.functional.linear, set()
    for i in layers:
        mlp = model.module.model.layers[i].mlp
        weights.add(getattr(mlp, "gate", getattr(mlp, "router", None)).weight.data_ptr())

    def biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear(x, weight, bias)
        return out + shift if weight.data_ptr() in weights else out

    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    fresh = type(model.module)(model.module.config).eval()  # without midstream's modules, but with the same weights
    fresh.load_state_dict(model.module.state_dict(), assign=True)
    with mock.patch.object(nn.functional, "linear", biased), torch.no_grad():
        return fresh(ids, use_cache=False).logits[:, -1]


def test_reads_are_what_transformers_reports(model: LanguageModel) -> None:
    layers = with_experts(model)
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        reported = model.module(ids, use_cache=False, output_router_logits=True).router_logits
        values = model.run(lambda m: [m.router[i].clone() for i in layers], PROMPT)
    (output,) = model.generate(PROMPT, plan=Capture("router", layers=layers, positions="all_prompt"), **GREEDY)
    for i, value, expected in zip(layers, values, reported, strict=True):
        torch.testing.assert_close(value, expected.view(value.shape), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.captures["router", i], value, rtol=1e-4, atol=1e-4)


def test_a_change_of_the_logits_changes_the_choice(model: LanguageModel) -> None:
    """A bias after the logits and a choice among groups come after the site."""
    layers, shift = with_experts(model), torch.tensor([0.0, 3.0, -3.0, 0.0, 1.0, 0.0, -1.0, 2.0])
    expected, clean = shifted(model, layers, shift), shifted(model, layers, shift * 0)
    assert (expected - clean).abs().max() > 1e-2 * clean.abs().max()
    plan = [Steer("router", layers=layers, vector=shift)]
    with torch.no_grad():
        planned = model.run(lambda m: m.logits, PROMPT, plan=plan)

        def write(m: Any) -> Any:
            for i in layers:
                m.router[i] += shift
            return m.logits

        traced = model.run(write, PROMPT)
    scale = expected.abs().max()
    for value in (planned, traced):
        torch.testing.assert_close(value / scale, expected / scale, rtol=0, atol=1e-5)


def test_gradients_reach_the_logits(model: LanguageModel) -> None:
    with model.trace(PROMPT):
        logits = model.router[2]
        with model.logits.sum().backward():
            gradient = logits.grad.save()
    assert gradient.shape[-1] == EXPERTS and gradient.abs().max() > 0


def test_a_layer_without_experts_is_named() -> None:
    model = LanguageModel(made("deepseek_v3"), tiny_models.tokenizer())
    with pytest.raises(UnknownSiteError, match=r"layer 0 has no site 'router'; these have it: \[1, 2, 3\]"):
        model.run(lambda m: m.router[0], PROMPT)
    with pytest.raises(PlanError, match=r"no site 'router' at layer 0 \(Steer\.layers\); it has it at 1 to 3"):
        model.generate(PROMPT, plan=Steer("router", layers=[0, 1], vector=[0.0] * EXPERTS), **GREEDY)


def test_a_dense_model_has_no_router(hf: LanguageModel) -> None:
    with pytest.raises(UnknownSiteError, match="this model has no site 'router': it has resid_pre"):
        hf.run(lambda m: m.router[0], PROMPT)
    with pytest.raises(PlanError, match="no site 'router'"):
        hf.generate(PROMPT, plan=Capture("router"), **GREEDY)


def test_float32_logits_of_a_bfloat16_model() -> None:
    """A plan's tables hold rows of the model's dtype. Logits that a plan does not change keep their bits."""
    model = LanguageModel(made("deepseek_v3", torch.bfloat16), tiny_models.tokenizer())
    seen: list[torch.dtype] = []
    edited = TorchTables.edited

    def noted(self: Any, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        seen.append(hidden.dtype)
        return edited(self, point, hidden, residual)

    vector = torch.zeros(EXPERTS)
    vector[3] = -5.0
    plan = [Steer("router", layers=2, vector=vector), Capture("router", layers=2, positions="all_prompt")]
    with torch.no_grad(), mock.patch.object(TorchTables, "edited", noted):
        clean = model.run(lambda m: m.router[2].clone(), PROMPT)
        steered = model.run(lambda m: m.router[2].clone(), PROMPT, plan=plan[:1])
        (output,) = model.generate(PROMPT, plan=plan, **GREEDY)
    assert clean.dtype == steered.dtype == torch.float32
    assert set(seen) == {torch.bfloat16}
    others = [i for i in range(EXPERTS) if i != 3]
    assert torch.equal(steered[:, others], clean[:, others])
    assert not torch.equal(clean, clean.bfloat16().float())
    torch.testing.assert_close(steered[:, 3], (clean[:, 3].bfloat16().float() - 5).bfloat16().float())
    assert output.captures["router", 2].dtype == torch.bfloat16
    torch.testing.assert_close(output.captures["router", 2], clean.bfloat16())
