"""Prompts as users give them: text, token ids, or a tokenizer's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from midstream.errors import PlanError, PromptError

Prompt = str | Sequence[int] | Mapping[str, Any]
_NOT_TEXT = ("multi_modal", "pixel_values", "image", "video", "audio", "input_features")


def is_multimodal(prompt: Any) -> bool:
    """Whether there is more to the prompt than tokens."""
    return isinstance(prompt, Mapping) and any(
        str(key).startswith(_NOT_TEXT) and value is not None for key, value in prompt.items()
    )


def text_of(prompt: Any) -> str | None:
    """The prompt's text, if it was given as that."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def encode(prompt: Prompt, tokenizer: Callable[[], Any]) -> list[int]:
    """The prompt's token ids; `tokenizer` gives what text needs. Raises PromptError if it has none, or is more than text."""
    if type(prompt) is list and prompt and all(type(token) is int for token in prompt):
        return prompt.copy()
    if is_multimodal(prompt):
        raise PromptError(
            "A prompt here is text. One with images, sound or video goes to `model.engine.generate(prompt, SamplingParams(...))`, "
            'which takes a plan without positions as extra_args={"midstream": plan}.'
        )
    ids: Any = prompt
    if (text := text_of(prompt)) is not None:
        ids = tokenizer()(text)["input_ids"]
    elif isinstance(prompt, Mapping):
        ids = next((prompt[key] for key in ("input_ids", "prompt_token_ids") if prompt.get(key) is not None), ())
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_prompt(prompt) from error
    ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
    if ids.ndim != 1 or not ids.numel():
        raise _no_prompt(prompt)
    return ids.long().tolist()


def _no_prompt(given: Any) -> PromptError:
    return PromptError(
        f"A prompt is a text or one sequence of at least one token id; {given!r} was given. Several are for `generate` and `run`; a "
        "trace has one `tracer.invoke(prompt)` for each."
    )


def offsets_of(prompt: Prompt, ids: Sequence[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The prompt's text, and which of its characters each token stands for. Raises PlanError if that cannot be told."""
    text = text_of(prompt)
    if text is None:
        text = tokenizer.decode(ids, skip_special_tokens=True)
    try:
        encoded = tokenizer(text, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise PlanError("Span needs a tokenizer that tells offsets (a fast one); give positions as numbers.") from error
    if list(encoded["input_ids"]) != list(ids):
        raise PlanError(
            "Span needs the prompt's text, and these token ids are not what the tokenizer makes of theirs; "
            "give the prompt as text, or positions as numbers."
        )
    return text, [(int(begin), int(end)) for begin, end in encoded["offset_mapping"]]
