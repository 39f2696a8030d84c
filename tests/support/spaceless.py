"""Answers without the space before them, and the warnings about them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle import Plain


def spaceless(plain: Plain, prompt: str, low: float, high: float) -> tuple[str, float]:
    """A text of one token whose spaced form is one token, too, and between `low` and `high` times as likely after the prompt: how many."""
    logprobs = plain.run(prompt).logits[-1].float().log_softmax(-1)
    for token in range(len(logprobs)):
        text = plain.tokenizer.decode([token])
        if text.isalpha() and plain.tokenizer(text)["input_ids"] == [token]:
            spaced = plain.tokenizer(f" {text}")["input_ids"]
            if len(spaced) == 1 and low < math.exp(logprobs[spaced[0]] - logprobs[token]) < high:
                return text, math.exp(logprobs[spaced[0]] - logprobs[token])
    raise AssertionError("no such token")


def warned(call: Callable[[], object]) -> list[str]:
    """The warnings to the user of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found if each.category is UserWarning]
