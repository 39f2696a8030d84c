"""Attention on transformers computes all parts of the model (row N1), whichever implementation transformers would choose.

The oracle is plain transformers with eager attention and eager experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import registry_models
import tiny_models
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from midstream import Knockout, LanguageModel
from midstream.commands.compare import compare
from midstream.errors import ArchitectureError, ParameterError

PROMPT = [int(token) for token in torch.randint(1, 384, (40,), generator=torch.Generator().manual_seed(1))]
LOW_CAP = 5.0  # scores of the tiny models stay far below the usual 50
# The final norm of qwen4_exp is as wide as several streams, so it cannot be loaded.
NAMES = [name for name in registry_models.ALL if not name.endswith("_transformers") and name != "qwen4_exp"]
# Models that midstream refuses, for other reasons than their attention.
REFUSED = {"deepseek_v4", "gemma3n", "hrm_text", "hy_v4", "zaya"}
SOFT_CAPPED = ["gemma2", "vaultgemma"]


def architecture(name: str) -> tiny_models.Architecture:
    found = registry_models.ALL[name]
    if not hasattr(found.config(), "attn_logit_softcapping"):
        return found
    return dataclasses.replace(found, options={**found.options, "attn_logit_softcapping": LOW_CAP})


def built(name: str, folder: Path) -> str:
    return str(tiny_models.build(name, folder, architecture(name)))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built("gemma2", tmp_path_factory.mktemp("parts"))


def eager_logits(path: str) -> torch.Tensor:
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if plain._can_set_experts_implementation():
        plain.set_experts_implementation("eager")
    with torch.no_grad():
        return plain(torch.tensor([PROMPT]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_default_computes_all_parts_of_every_decoder(name: str, tmp_path: Path) -> None:
    """Soft caps, sinks, windows, biases and position biases. Seen failing for Gemma 2 and VaultGemma with transformers' own default."""
    path = built(name, tmp_path)
    try:
        model = LanguageModel(path, dtype=torch.float32)
    except ArchitectureError:
        assert name in REFUSED
        return
    assert name not in REFUSED
    found = model.run(lambda m: m.output.logits, PROMPT)
    expected = eager_logits(path)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    assert (model.module.config._attn_implementation == "eager") >= (name in SOFT_CAPPED)


@pytest.mark.parametrize("name", SOFT_CAPPED)
def test_a_chosen_implementation_that_leaves_out_soft_caps_is_refused(name: str, tmp_path: Path) -> None:
    path = built(name, tmp_path)
    said = r"attention 'sdpa' leaves out the soft caps of attention scores of \w+ForCausalLM.*set_attn_implementation\('eager'\)"
    with pytest.raises(ParameterError, match=said):
        LanguageModel(path, attn_implementation="sdpa")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ParameterError, match=said):
        LanguageModel(loaded, tiny_models.tokenizer())
    loaded.set_attn_implementation("eager")
    assert LanguageModel(loaded, tiny_models.tokenizer()).num_layers == tiny_models.LAYERS
    uncapped = AutoModelForCausalLM.from_pretrained(path, attn_logit_softcapping=None, attn_implementation="sdpa")
    assert LanguageModel(uncapped, tiny_models.tokenizer()).module.config._attn_implementation == "sdpa"


def test_a_users_own_attention_function_is_asked(gemma: str) -> None:
    """Not its signature decides: one that takes the cap from its keyword arguments computes it; flash attention may take it and drop it."""
    eager = AutoModelForCausalLM.from_pretrained(gemma, attn_implementation="eager")
    module = __import__(type(eager).__module__, fromlist=["eager_attention_forward"])

    def capped(*args: Any, **kwargs: Any) -> Any:
        return module.eager_attention_forward(*args, **kwargs)

    def flash_uncapped(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return module.eager_attention_forward(*args, **kwargs)

    AttentionInterface.register("capped", capped)
    AttentionInterface.register("uncapped", flash_uncapped)
    LanguageModel(gemma, attn_implementation="capped")
    with pytest.raises(ParameterError, match="'uncapped' leaves out the soft caps"):
        LanguageModel(gemma, attn_implementation="uncapped")
    assert AttentionInterface()["capped"] is capped


def test_compare_takes_the_model_as_a_user_loads_it(monkeypatch: pytest.MonkeyPatch, gemma: str) -> None:
    """Seen: `midstream compare` asked for eager attention itself, and showed no difference."""
    loaded: list[dict[str, Any]] = []

    def load(name: str, **arguments: Any) -> LanguageModel:
        loaded.append(arguments)
        raise InterruptedError

    monkeypatch.setattr("midstream.transformers.language_model.LanguageModel", load)
    with pytest.raises(InterruptedError):
        compare(gemma)
    assert [sorted(each) for each in loaded] == [["device", "dtype", "rename"]]


def test_probabilities_and_knockouts_say_which_bias_they_lack(tmp_path: Path) -> None:
    """Inkling adds position biases to its scores. Seen: probabilities off by 0.65, without an error."""
    model = LanguageModel(built("inkling", tmp_path))
    with pytest.raises(ArchitectureError, match="attention_probabilities does not support position_bias"):
        model.run(lambda m: m.attention_probabilities[1], PROMPT)
    with pytest.raises(ArchitectureError, match="Knockout does not support position_bias"):
        model.generate(PROMPT, plan=Knockout(layers=1, keys=[2]), max_tokens=1)
