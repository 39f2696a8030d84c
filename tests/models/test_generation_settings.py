"""Generation settings as transformers has them: taken, or refused with the way to write them (row P4)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ENGINE, RANKS
from forked import forked
from oracle import close

from midstream import VLLM, LanguageModel, demo_model
from midstream.errors import ParameterError
from midstream.requests.arguments import sampling

PARIS = "The capital of France is"
OWN = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3}


def test_the_models_own_settings_count_as_in_transformers() -> None:
    """Those of sampling where tokens are sampled, and none in place of one that the caller gives."""
    assert sampling({}, 5, OWN) == {"max_tokens": 5, "temperature": 0.0, "repetition_penalty": 1.3}
    assert sampling({"do_sample": True}, 5, OWN) == {"max_tokens": 5, **OWN}
    given = {"do_sample": True, "temperature": 1.0, "repetition_penalty": 1.0, "max_new_tokens": 3}
    assert sampling(given, 5, OWN) == {"max_tokens": 3, **OWN, "temperature": 1.0, "repetition_penalty": 1.0}
    assert sampling({"do_sample": False, "temperature": 0.3}, 5, OWN)["temperature"] == 0.0
    spelled = sampling({"stop_strings": ["."], "num_return_sequences": 2, "do_sample": True}, 5)
    assert spelled == {"max_tokens": 5, "stop": ["."], "n": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config", "give its values by name"),
        ("max_length", "max_tokens="),
        ("eos_token_id", "stop_token_ids="),
        ("min_new_tokens", "min_tokens="),
        ("num_beams", "no beam search"),
    ],
)
def test_other_settings_are_refused_with_the_way_to_write_them(model: Any, name: str, text: str) -> None:
    with pytest.raises(ParameterError, match=f"{name}= is not a parameter here: .*{text}"):
        model.generate(PARIS, **{name: 3})
    with pytest.raises(ParameterError, match=f"{name}= is not a parameter here"):
        model.trace(PARIS, **{name: 3})


def test_strings_to_stop_at_by_transformers_name(model: Any, plain: Any) -> None:
    word = plain.tokenizer.decode(plain.generate(PARIS, 1)).strip()
    (output,) = model.generate(PARIS, max_new_tokens=4, stop_strings=[word])
    assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].token_ids) == 1


@pytest.fixture(scope="module")
def penalizing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with a generation configuration of its own."""
    path = tmp_path_factory.mktemp("penalizing") / "model"
    shutil.copytree(demo_model(), path)
    file = path / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, "repetition_penalty": 1.5, "top_k": 1, "do_sample": False}))
    return path


@pytest.fixture(scope="module", params=["hf", "engine"])
def own(request: pytest.FixtureRequest, penalizing: Path) -> Iterator[Any]:
    if request.param == "hf":
        yield LanguageModel(str(penalizing), dtype=torch.float32)
        return
    with forked():
        engine = VLLM(str(penalizing), **ENGINE, **RANKS, enforce_eager=True)
    with engine:
        yield engine


@pytest.mark.engine
def test_a_repetition_penalty_of_the_models_own_counts(own: Any, penalizing: Path) -> None:
    """The oracle is transformers' generate with the same files. What a trace reads are the logits before the penalty."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = AutoModelForCausalLM.from_pretrained(penalizing, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(penalizing)(PARIS, return_tensors="pt")["input_ids"]
    expected = net.generate(ids, max_new_tokens=8, eos_token_id=None)[0, ids.shape[1] :].tolist()
    unpenalized = net.generate(ids, max_new_tokens=8, repetition_penalty=1.0, eos_token_id=None)
    assert unpenalized[0, ids.shape[1] :].tolist() != expected

    def read(model: Any, tracer: Any) -> Any:
        return [model.logits.clone() for _ in tracer.iter[:]]

    with own.trace(PARIS, max_tokens=8, ignore_eos=True) as tracer:
        seen = read(own, tracer)
        kept = list(seen).save()
    (output,) = tracer.outputs
    tokens = output.outputs[0].token_ids if hasattr(output, "outputs") else output.token_ids
    assert list(tokens) == expected
    with torch.no_grad():
        raw = net(torch.cat([ids, torch.tensor([expected])], 1)).logits[0, ids.shape[1] - 1 : -1]
    close(torch.cat([each.reshape(1, -1) for each in kept]), raw)
    with own.trace(PARIS) as tracer:
        one = own.samples.save()
    assert int(one) == expected[0]
    sampled = own.generate(PARIS, max_tokens=8, do_sample=True, ignore_eos=True)[0].outputs[0].token_ids
    assert list(sampled) == expected, "top_k is 1"


def test_the_padding_of_a_batch_is_not_penalized(penalizing: Path) -> None:
    """The short prompt is padded with the token that it makes likeliest."""
    model = LanguageModel(str(penalizing), dtype=torch.float32)
    long = "The Eiffel Tower is in the city of Paris, and the capital of France is"

    def generated(prompts: list[str]) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in model.generate(prompts, max_tokens=4, ignore_eos=True)]

    (alone,) = generated([PARIS])
    model.tokenizer.pad_token_id = alone[0]
    assert generated([long, PARIS]) == [*generated([long]), alone]
