"""Arguments of transformers' forward pass that ask for hidden states, attention weights and a cache of keys and values (row J10)."""

from __future__ import annotations

import pytest
import torch
from oracle import close

import midstream as nnsight
from midstream import LanguageModel
from midstream.errors import ParameterError, TraceError

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"


@pytest.fixture(scope="module")
def model(hf) -> LanguageModel:
    return hf


@pytest.fixture(scope="module")
def eager() -> LanguageModel:
    """Attention that returns its weights."""
    return LanguageModel(nnsight.demo_model(), dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def forward(model, prompt, **arguments):
    """Plain transformers on one prompt."""
    return model(torch.tensor([prompt]), **arguments)


def test_hidden_states_and_attention_weights_of_the_output(eager, plain):
    asked = {"output_hidden_states": True, "output_attentions": True}
    with eager.trace(FRANCE, **asked) as tracer:
        hidden = eager.output.hidden_states.save()
        weights = eager.output.attentions[3].save()
        result = tracer.result.save()
    expected = forward(eager.module, plain.ids(FRANCE), **asked)
    assert len(hidden) == len(result.hidden_states) == 9 and len(result.attentions) == 8
    for given, other, wanted in zip(hidden, result.hidden_states, expected.hidden_states, strict=True):
        close(given, wanted)
        close(other, wanted)
    close(weights, expected.attentions[3])
    close(result.attentions[3], expected.attentions[3])
    assert eager(FRANCE, **asked).hidden_states[3].shape == (1, 5, 256)
    assert eager.trace(FRANCE, trace=False, output_attentions=True).attentions[0].shape == (1, 4, 5, 5)


def test_each_invoke_has_its_own_part(eager, plain):
    """Without the padding of the shorter prompt."""
    prompts = ["Paris", FRANCE, "The Eiffel Tower is in the city of"]
    with eager.trace(output_hidden_states=True, output_attentions=True) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                result = tracer.result.save()
    for prompt, each in zip(prompts, result, strict=True):
        wanted = forward(eager.module, plain.ids(prompt), output_hidden_states=True, output_attentions=True)
        close(each.hidden_states[4], wanted.hidden_states[4])
        close(each.attentions[4], wanted.attentions[4])


def test_in_each_step_of_a_generation(model, plain):
    with model.generate(FRANCE, max_new_tokens=3, output_hidden_states=True) as tracer:
        last = list().save()
        for _ in tracer.iter[:]:
            last.append(model.output.hidden_states[4][0, -1])
    ids = plain.ids(FRANCE) + plain.generate(FRANCE, 2)
    close(torch.stack(last), plain.run(ids).sites["resid_post", 3][4:])


def test_a_cache_of_keys_and_values(model, plain):
    with model.trace(FRANCE, use_cache=True):
        keys = model.output.past_key_values.layers[2].keys.save()
    close(keys, forward(plain.model, plain.ids(FRANCE), use_cache=True).past_key_values.layers[2].keys)
    with model.trace(FRANCE, use_cache=False):
        nothing = (model.output.past_key_values is None).save()
    assert nothing


def test_hidden_states_that_nobody_asked_for(model):
    with pytest.raises(TraceError, match=r"hidden_states of all positions .* and have output_hidden_states=True"):
        _ = model(FRANCE).hidden_states


@pytest.mark.engine
def test_vllm_says_what_to_do_instead(engine):
    with pytest.raises(
        ParameterError, match=r"output_hidden_states= .* which vLLM does not have\. Read model\.layers_output"
    ):
        engine.generate(FRANCE, max_tokens=1, output_hidden_states=True)
    with (
        pytest.raises(ParameterError, match=r"output_attentions= .* attn_implementation='eager'"),
        engine.trace(FRANCE, output_attentions=True),
    ):
        engine.logits.save()
    arguments = {"use_cache": True, "output_hidden_states": False, "output_attentions": False}
    assert len(engine.generate(FRANCE, max_tokens=1, **arguments)) == 1
