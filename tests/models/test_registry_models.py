"""Models of vLLM's registry whose structure was once read wrongly (rows N1, N3, B2): tiny, on transformers, against plain hooks.

`scripts/supported_models.py` compares all decoders of the registry with vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import registry_models
import tiny_models
import torch
from attended import Attended

from midstream import LanguageModel
from midstream.arch import detect
from midstream.errors import ArchitectureError, ParameterError

PROMPT = "The river runs from the mountains to the sea"
IDS = torch.tensor([[5, 17, 33, 60, 91, 120, 44]])


def built(name: str, folder: Path) -> Path:
    return tiny_models.build(name, folder, registry_models.ALL[name])


def loaded(name: str, folder: Path) -> LanguageModel:
    return LanguageModel(str(built(name, folder)), dtype=torch.float32, attn_implementation="eager")


def test_several_streams_are_refused(tmp_path: Path) -> None:
    """Gemma 3n carries four streams side by side. Seen failing without `check_rows`: the sites have four rows for each token."""
    with pytest.raises(
        ArchitectureError, match=r"layers\.0 .*\[4, 1, 3, 64\] for 3 tokens; expected one residual stream"
    ):
        loaded("gemma3n", tmp_path)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("gemma4", [(4, 32), (4, 512), (4, 32), (4, 512)]),  # its config has no width of a head for all layers
        ("deepseek_v2", [(4, 128)] * 4),  # whose `head_dim` is that of the rotated part
    ],
)
def test_heads_are_those_of_the_attention(name: str, heads: list[tuple[int, int]], tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    with torch.no_grad():
        values = model.run(lambda m: [m.attn_z[i] for i in range(4)], PROMPT)
    assert [tuple(value.shape[1:]) for value in values] == heads


def test_edges_of_a_model_whose_layers_end_with_a_factor_are_refused(tmp_path: Path) -> None:
    """Gemma 4 multiplies the stream by `layer_scalar`, so `resid_post` is not the sum of what attention and MLP add."""
    model = loaded("gemma4", tmp_path)
    factors = [float(layer.layer_scalar) for layer in model.module.model.layers]
    assert all(abs(factor - 1) > 0.01 for factor in factors)
    with pytest.raises(ParameterError, match="before it adds it to the residual stream"):
        model.edge_attribution(IDS[0].tolist(), IDS[0].flip(0).tolist(), 5, 6)


def test_an_attention_function_that_gets_its_mask_by_keyword(tmp_path: Path) -> None:
    """AFMoE passes `attention_mask=` where others pass the mask by position."""
    model, oracle = loaded("afmoe", tmp_path), Attended(built("afmoe", tmp_path))
    prompts = [PROMPT, "The river runs"]  # the second one is padded
    with torch.no_grad():
        found = model.run(lambda m: m.attention_probabilities[1], prompts)
        for prompt, value in zip(prompts, found, strict=True):
            ids = torch.tensor([tiny_models.tokenizer()(prompt)["input_ids"]])
            reported = oracle.module(ids, output_attentions=True).attentions[1][0]
            torch.testing.assert_close(value, reported, atol=1e-5, rtol=1e-4)


def test_unknown_logits_are_refused(tmp_path: Path) -> None:
    """Inkling divides what it projects; Llama does not."""
    with torch.no_grad():
        inkling = loaded("inkling", tmp_path)
        with pytest.raises(ArchitectureError, match="project_on_vocab: InklingForCausalLM changes"):
            inkling.run(lambda m: m.project_on_vocab(m.layers_output[-1]), PROMPT)
        llama = loaded("llama", tmp_path)
        lens, logits = llama.run(lambda m: (m.project_on_vocab(m.layers_output[3][-1:]), m.logits), PROMPT)
    torch.testing.assert_close(lens, logits)


@pytest.mark.parametrize("name", ["granitemoeshared", "granitemoehybrid"])
def test_the_middle_of_a_block_with_shared_experts(name: str, tmp_path: Path) -> None:
    """B3: the stream after attention, though the experts read copies of the norm's output."""
    model: Any = tiny_models._model(registry_models.ALL[name])
    architecture = detect(model, lambda: model(IDS, use_cache=False))
    layers = [i for i in range(4) if ("resid_mid", i) in architecture.bindings]
    assert layers == ([0, 1, 2, 3] if name == "granitemoeshared" else [1, 3])
    wrapped = LanguageModel(model, tiny_models.tokenizer())
    with torch.no_grad():
        before, added, middle = wrapped.run(
            lambda m: (m.layers_input[1], m.attentions_output[1], m.resid_mid[1]), PROMPT
        )
    torch.testing.assert_close(middle, before + added * model.config.residual_multiplier)
