"""What a tokenizer returns, and transformers takes, is honoured or refused by name (row P4); on both backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import close
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

from midstream import LanguageModel
from midstream.errors import PromptError

PARIS, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
IDS = [5, 6, 7, 8]


def given(**parts: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([IDS]), **{name: torch.tensor([part]) for name, part in parts.items()}}


REFUSED = [
    (given(position_ids=[1, 2, 3, 4]), "position_ids are not 0, 1, 2"),
    (given(position_ids=[0, 1, 2, 3], attention_mask=[0, 1, 1, 1]), "position_ids are not 0, 1, 2"),
    (given(position_ids=[0, 1]), "position_ids has 2 entries; the prompt has 4"),
    (given(token_type_ids=[0, 0, 1, 1]), "token_type_ids are not all 0"),
    (given(attention_mask=[1, 0, 1, 1]), "attention_mask has holes"),
    (given(labels=IDS), "'labels', which midstream does not use"),
    (given(past_key_values=IDS, inputs_embeds=IDS), "'past_key_values', 'inputs_embeds'"),
    ({**given(), "cache_salt": "x"}, "'cache_salt'"),
    ({"input_ids": [IDS, IDS], "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]}, "pads on the right"),
    ({"input_ids": [IDS, IDS], "labels": [IDS, IDS]}, "'labels'"),
    ({"input_ids": [IDS, IDS], "position_ids": [[3, 2, 1, 0]]}, "position_ids are not 0, 1, 2"),
    ({"input_ids": [IDS, IDS], "attention_mask": [[1, 0, 1, 1], [1, 1, 1, 1]]}, "attention_mask has holes"),
]


@pytest.mark.parametrize(("prompt", "text"), REFUSED)
def test_what_would_have_no_effect_is_refused_by_name(model: Any, prompt: Any, text: str) -> None:
    for encoding in (prompt, BatchEncoding(prompt)):
        with pytest.raises(PromptError, match=text):
            model.generate(encoding, max_tokens=1)
        with pytest.raises(PromptError, match=text):
            with model.trace(encoding):
                model.logits.save()


SAME = [
    given(position_ids=[0, 1, 2, 3]),
    given(token_type_ids=[0, 0, 0, 0]),
    given(attention_mask=[1, 1, 1, 1], special_tokens_mask=[0, 0, 0, 0]),
    {"input_ids": [[0, *IDS]], "attention_mask": [[0, 1, 1, 1, 1]], "position_ids": [[0, 0, 1, 2, 3]]},
    {"input_ids": [[*IDS, 0]], "attention_mask": [[1, 1, 1, 1, 0]]},  # no other row is beside it, so nothing is padded
]


@pytest.mark.parametrize("prompt", SAME)
def test_what_says_the_usual_is_taken(model: Any, plain: Any, prompt: Any) -> None:
    with model.trace(prompt, temperature=0.0, max_tokens=1):
        logits = model.logits.save()
    close(logits, plain.run(IDS).logits[-1:])


def test_a_batch_that_is_padded_on_the_left_is_as_in_transformers(model: Any, plain: Any) -> None:
    tokenizer = model.tokenizer
    pads, side = tokenizer.pad_token, tokenizer.padding_side
    try:
        tokenizer.pad_token, tokenizer.padding_side = pads or tokenizer.eos_token, "left"
        encoding = tokenizer([PARIS, EIFFEL], padding=True, return_tensors="pt")
        outputs = model.generate(encoding, max_tokens=3, temperature=0.0)
        tokenizer.padding_side = "right"
        with pytest.raises(PromptError, match="padding_side = 'left'"):
            model.generate(tokenizer([PARIS, EIFFEL], padding=True, return_tensors="pt"), max_tokens=3)
    finally:
        tokenizer.pad_token, tokenizer.padding_side = pads, side
    found = [list(o.outputs[0].token_ids) for o in outputs]
    assert found == [plain.generate(prompt, 3) for prompt in (PARIS, EIFFEL)]


def test_token_types_of_a_model_that_adds_them_are_refused(plain: Any) -> None:
    """GPT-2 adds an embedding for type 0, too."""
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=300, n_positions=64)).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        assert not torch.allclose(net(ids).logits, net(ids, token_type_ids=torch.zeros_like(ids)).logits)
    model = LanguageModel(net, tokenizer=plain.tokenizer)
    with pytest.raises(PromptError, match="token_type_ids, which this model adds"):
        model.generate(given(token_type_ids=[0, 0, 0, 0]), max_tokens=1)
