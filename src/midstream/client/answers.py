"""Answers, graded exactly: the log-probability of each one's token right behind the prompt, however unlikely it is.

    outputs = model.generate(prompts, plan=plans, answers=[" Paris", " Rome"], max_tokens=1, temperature=0.0)
    outputs[0].answers                      # {" Paris": -0.02, " Rome": -9.71}

The token is looked up by its id, not among the likeliest ones, so an answer never drops out of a grid of patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from midstream.errors import PromptError

Answer = str | int
Answers = Mapping[Answer, int]  # -> its token


def answers_of(given: Any, prompts: int, tokenizer: Callable[[], Any], vocab_size: int) -> list[Answers]:
    """The answers of each of several prompts.

    Args:
        given: an answer (a text of one token, or a token id) or a list of them for all prompts; or a list with a list for each prompt.

    Raises:
        PromptError: an answer is not one token of the model, or there is not one list for each prompt.
    """
    if not isinstance(given, (list, tuple)) or not any(isinstance(each, (list, tuple)) for each in given):
        return [_tokens(given, tokenizer, vocab_size)] * prompts
    if len(given) != prompts:
        raise PromptError(f"answers is a list with a list for each prompt: {len(given)} were given for {prompts}.")
    return [_tokens(each, tokenizer, vocab_size) for each in given]


def _tokens(given: Any, tokenizer: Callable[[], Any], vocab_size: int) -> dict[Answer, int]:
    each = list(given) if isinstance(given, (list, tuple)) else [given]
    return {answer: _token(answer, tokenizer, vocab_size) for answer in each}


def _token(answer: Any, tokenizer: Callable[[], Any], vocab_size: int) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < vocab_size:
            raise PromptError(f"answers has the token id {answer}; this model's are 0 to {vocab_size - 1}.")
        return answer
    if not isinstance(answer, str):
        raise PromptError(f"answers has {answer!r}. Allowed: texts of one token, token ids, and lists of these.")
    ids = tokenizer()(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        parts = ", ".join(f"{tokenizer().decode([token])!r} ({token})" for token in ids)
        raise PromptError(
            f"The answer {answer!r} is {len(ids)} tokens: {parts or 'none'}. Answers are graded by one token: give the id of the "
            "one that tells them apart, or a text of one token (most words are one with the space before them)."
        )
    return int(ids[0])


def asked(params: Mapping[str, Any], answers: Answers) -> Mapping[str, Any]:
    """vLLM's sampling parameters for a request with these answers."""
    return {**params, "logprob_token_ids": list(answers.values())} if answers else params


def graded(output: Any, answers: Answers) -> dict[Answer, float] | None:
    """The answers' log-probabilities, in nats, from vLLM's output; None if it has no first token."""
    if not answers:
        return {}
    if not (logprobs := output.outputs[0].logprobs):
        return None
    return {answer: logprobs[0][token].logprob for answer, token in answers.items()}


def graded_logits(logits_V: torch.Tensor, answers: Answers) -> dict[Answer, float]:
    """The same from the logits of the first token, `[vocabulary]`."""
    logprobs_V = logits_V.detach().float().log_softmax(-1)
    return {answer: float(logprobs_V[token]) for answer, token in answers.items()}
