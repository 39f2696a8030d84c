"""Prompts as users give them (row F1), without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from midstream.errors import PromptError
from midstream.requests.arguments import encode, prompts_of


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


CHAT = [{"role": "user", "content": "Hi"}]
ENCODING = {"input_ids": [5, 6], "attention_mask": [1, 1]}
PADDED = {"input_ids": [[0, 5], [6, 7]], "attention_mask": [[0, 1], [1, 1]]}
ROWS = [{"input_ids": [0, 5], "attention_mask": [0, 1]}, {"input_ids": [6, 7], "attention_mask": [1, 1]}]
IMAGES = {"input_ids": [[5], [6]], "pixel_values": [1]}


@pytest.mark.parametrize(
    "prompt",
    ["ab", [5, 6], (5, 6), [np.int64(5), 6], [], CHAT, ENCODING, {"input_ids": [[5, 6]]}, {"prompt": "ab"}, IMAGES],
    ids=str,
)
def test_one_prompt(prompt: Any) -> None:
    each, single = prompts_of(prompt)
    assert single and len(each) == 1
    assert each == [list(prompt) if isinstance(prompt, tuple) else prompt]


@pytest.mark.parametrize("prompt", [torch.tensor([5, 6]), torch.tensor([[5, 6]]), np.array([5, 6])], ids=str)
def test_one_prompt_as_a_tensor(prompt: Any) -> None:
    each, single = prompts_of(prompt)
    assert single and encode(each[0], no_tokenizer) == [5, 6]
    assert prompts_of(iter([5, 6])) == ([[5, 6]], True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        (["a"], ["a"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [5], CHAT, ENCODING], ["a", [5], CHAT, ENCODING]),
        ([CHAT], [CHAT]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        ([ENCODING], [ENCODING]),
        ([CHAT[0], ENCODING], [CHAT[0], ENCODING]),
        (iter("ab"), ["a", "b"]),
        ({"a": 1, "b": 2}.keys(), ["a", "b"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array(["a", "b"], object), ["a", "b"]),
        (PADDED, ROWS),
    ],
)
def test_several_prompts(given: Any, expected: Any) -> None:
    assert prompts_of(given) == (expected, False)


def test_several_prompts_as_tensors() -> None:
    for given in (torch.tensor([[5, 6], [7, 8]]), np.array([[5, 6], [7, 8]]), [torch.tensor([5, 6]), np.array([7, 8])]):
        each, single = prompts_of(given)
        assert not single
        assert [encode(prompt, no_tokenizer) for prompt in each] == [[5, 6], [7, 8]]
    each, _ = prompts_of({name: torch.tensor(rows) for name, rows in PADDED.items()})
    assert [encode(prompt, no_tokenizer) for prompt in each] == [[5], [6, 7]]


def test_what_is_neither() -> None:
    with pytest.raises(PromptError, match="or a list of chat messages; 3 was given"):
        prompts_of(3)
