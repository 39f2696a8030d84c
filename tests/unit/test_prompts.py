"""Prompts as users give them (row F1), without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.client.requests import encode
from midstream.errors import PromptError


def no_tokenizer() -> Any:
    raise AssertionError("token ids need no tokenizer, and an engine may have none")


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        [[5, 6]],
        {"input_ids": [5, 6]},
        {"prompt_token_ids": [5, 6]},
    ],
    ids=str,
)
def test_token_ids_need_no_tokenizer(prompt: Any) -> None:
    ids = encode(prompt, no_tokenizer)
    assert ids == [5, 6] and type(ids) is list and all(type(token) is int for token in ids)


def test_the_ids_are_a_copy() -> None:
    prompt = [5, 6]
    ids = encode(prompt, no_tokenizer)
    prompt.append(7)
    assert ids == [5, 6]


def test_text_is_for_the_tokenizer() -> None:
    for prompt in ("ab", {"prompt": "ab"}):
        assert encode(prompt, lambda: lambda text: {"input_ids": [ord(each) for each in text]}) == [97, 98]


@pytest.mark.parametrize(
    "prompt",
    [[], (), {}, [[5], [6]], [[5], [6, 7]], ["a", "b"], pytest.param(object(), id="object"), torch.empty(0)],
    ids=repr,
)
def test_no_prompt(prompt: Any) -> None:
    with pytest.raises(PromptError, match="Give several prompts as a list"):
        encode(prompt, no_tokenizer)


def test_a_negative_token_id_is_refused() -> None:
    """vLLM 0.27 fails at one after it has taken the request."""
    with pytest.raises(PromptError, match="0 or more; the prompt has -5"):
        encode([3, -5], no_tokenizer)
