"""Prompts: text, token ids, a tokenizer's output, or chat messages. Counts them, and finds their token ids.

A chat is a list of messages, `[{"role": "user", "content": "..."}]`. The tokenizer's chat template makes its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from midstream.errors import PlanError, PromptError

Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]
_NOT_TEXT = ("multi_modal", "pixel_values", "image", "video", "audio", "input_features")
# The parts of a tokenizer's output, with a row for each prompt.
_ENCODING = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# Other keys of a dict: vLLM's, and a tokenizer's facts about the text, which have no effect on values.
_OTHERS = (
    "prompt",
    "prompt_token_ids",
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
)


def prompts_of(given: Any) -> tuple[list[Any], bool]:
    """The given prompts, and whether it was a single prompt: neither a list of prompts nor an encoding of several rows.

    Raises PromptError if it is neither.
    """
    if isinstance(given, str) or is_chat(given):
        return [given], True
    if not isinstance(given, Mapping) and not _is_array(given):
        if not isinstance(given, Iterable):
            raise _no_prompt(given)
        each = list(given)
        return ([each], True) if all(isinstance(token, Integral) for token in each) else (each, False)
    ids: Any = given.get("input_ids") if isinstance(given, Mapping) else given
    is_nested = isinstance(ids, (list, tuple)) and not all(isinstance(each, Integral) for each in ids)
    rows = len(ids) if is_nested or getattr(ids, "ndim", 1) == 2 else 1
    if rows < 2 or is_multimodal(given):
        return [given], True
    if not isinstance(given, Mapping):
        return [*given], False
    _check_keys(given)
    parts = {name: given[name] for name in _ENCODING if given.get(name) is not None}
    for name, part in parts.items():
        shape = torch.as_tensor(part).shape
        if len(shape) != 2 or shape[0] not in (1, rows):
            raise PromptError(f"The {name} has the shape {list(shape)}; it needs a row for each of the {rows} prompts.")
    if "attention_mask" in parts and not all(bool(mask[-1]) for mask in parts["attention_mask"]):
        raise PromptError(
            "The attention_mask pads on the right. midstream pads prompts of different lengths on the left, and a trace would find other "
            "tokens where it looks for these: set tokenizer.padding_side = 'left' before you tokenize, or give the texts as a list."
        )
    wide = {name: part if len(part) == rows else [part[0]] * rows for name, part in parts.items()}
    return [{name: part[row] for name, part in wide.items()} for row in range(rows)], False


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise PromptError for keys that would have no effect."""
    known = (*_ENCODING, *_OTHERS)
    if unknown := [key for key, value in prompt.items() if value is not None and key not in known]:
        raise PromptError(
            f"The prompt has {', '.join(map(repr, unknown))}, which midstream does not use; allowed: {', '.join(known)}. On transformers "
            "call the module itself in a trace, with these inputs: `model.module(**inputs)`."
        )


def _is_array(given: Any) -> bool:
    return hasattr(given, "dtype") and getattr(given.dtype, "kind", "i") in "iu"


def is_chat(prompt: Any) -> bool:
    """Whether the prompt is a list of chat messages."""
    return (
        isinstance(prompt, (list, tuple))
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def is_multimodal(prompt: Any) -> bool:
    """Whether the prompt has images, sound or video."""
    if is_chat(prompt):
        parts = [part for message in prompt for part in _parts(message.get("content"))]
        return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)
    return isinstance(prompt, Mapping) and any(
        str(key).startswith(_NOT_TEXT) and value is not None for key, value in prompt.items()
    )


def _parts(content: Any) -> Sequence[Any]:
    return content if isinstance(content, (list, tuple)) else ()


def prompt_in(prompt: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt, and the sampling parameters without the parts of a tokenizer's output, as in `trace(**encoding)`.

    Raises PromptError if there is also another prompt.
    """
    if params.get("inputs_embeds") is not None:
        raise PromptError(
            "inputs_embeds= is not a prompt here. Give as many token ids, and write the embeddings in a trace: "
            "`model.token_embeddings[:] = embeds`."
        )
    encoding = {name: params[name] for name in _ENCODING if name in params}
    if "input_ids" not in encoding:
        return prompt, params
    if prompt is not None:
        raise PromptError("The prompt was given twice: by position, and as input_ids=.")
    return encoding, {name: value for name, value in params.items() if name not in encoding}


def encode(prompt: Prompt, tokenizer: Callable[[], Any]) -> list[int]:
    """The prompt's token ids, without those that its `attention_mask` masks; `tokenizer` returns the tokenizer for text.

    Raises PromptError if there are none, or images; for a mask with holes, and for unusual positions and token types.
    """
    if type(prompt) is list and prompt and all(type(token) is int for token in prompt):
        if (least := min(prompt)) < 0:  # older vLLMs fail on them
            raise PromptError(f"Token ids are 0 or more; the prompt has {least}.")
        return prompt.copy()
    if is_multimodal(prompt):
        raise PromptError(
            "A prompt here is text. Send a prompt with images, sound or video to `model.engine.generate(prompt, "
            'SamplingParams(...))`, which takes a plan without positions as extra_args={"midstream": plan}.'
        )
    ids: Any = prompt
    if is_chat(prompt):
        ids = _chat_ids(prompt, tokenizer())
    elif (text := _text_of(prompt)) is not None:
        ids = tokenizer()(text)["input_ids"]
    elif isinstance(prompt, Mapping):
        ids = next((prompt[key] for key in ("input_ids", "prompt_token_ids") if prompt.get(key) is not None), None)
        if ids is None:
            raise _no_prompt(prompt)
        _check_keys(prompt)
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_prompt(prompt) from error
    ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
    if ids.ndim != 1:
        raise _no_prompt(prompt)
    if isinstance(prompt, Mapping):
        ids = _unmasked(prompt, ids)
    if not ids.numel():
        raise _no_prompt(prompt)
    return ids.long().tolist()


def _unmasked(prompt: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """The tokens that are not masked. Raises PromptError for parts of an encoding with any other information."""
    parts = {name: torch.as_tensor(part).flatten() for name in _ENCODING[1:] if (part := prompt.get(name)) is not None}
    for name, part in parts.items():
        if len(part) != len(ids):
            raise PromptError(f"The {name} has {len(part)} entries; the prompt has {len(ids)} tokens.")
    mask = parts.get("attention_mask", torch.ones(len(ids))).bool()
    places = mask.nonzero().flatten()
    if len(places) and int(places[-1] - places[0]) >= len(places):
        raise PromptError(
            "The attention_mask has holes. midstream computes the tokens between the first and the last without gaps."
        )
    if "position_ids" in parts and parts["position_ids"][mask].tolist() != list(range(len(places))):
        raise PromptError(
            "The position_ids are not 0, 1, 2, ... for the tokens that attention_mask leaves; others are not supported."
        )
    if "token_type_ids" in parts and parts["token_type_ids"].any():
        raise PromptError("The token_type_ids are not all 0; other token types are not supported.")
    return ids[mask.to(ids.device)]


def _chat_ids(messages: Any, tokenizer: Any) -> list[int]:
    """The token ids of a chat: the assistant's turn begins after it; if its last message is the assistant's, that message continues."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "The prompt is a chat, and the model's tokenizer has no chat template. Set one, model.tokenizer.chat_template = ..., or give "
            "the prompt as text."
        )
    goes_on = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            list(messages), add_generation_prompt=not goes_on, continue_final_message=goes_on, return_dict=False
        )
    except Exception as error:  # templates are code
        raise PromptError(f"The tokenizer's chat template does not take these messages: {error}") from error


def _text_of(prompt: Any) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _no_prompt(given: Any) -> PromptError:
    return PromptError(
        f"A prompt is a text, a list of at least one token id, a tokenizer's output, or a list of chat messages; {given!r} was given. Give "
        "several prompts as a list of them."
    )


def offsets_of(prompt: Prompt, ids: Sequence[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The prompt's text, and the `[begin, end)` of each token in it. Raises PlanError if the tokenizer does not return offsets."""
    for special in (True, False):  # the tokenizer adds special tokens to a text; a chat has its own
        text = _text_of(prompt)
        if text is None:
            text = tokenizer.decode(ids, skip_special_tokens=special)
        try:
            encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except NotImplementedError as error:
            raise PlanError(
                "Span needs a tokenizer that returns offsets (a fast one); give positions as numbers."
            ) from error
        if list(encoded["input_ids"]) == list(ids):
            return text, [(int(begin), int(end)) for begin, end in encoded["offset_mapping"]]
    raise PlanError(
        "Span needs the prompt's text, and the tokenizer turns the text of these token ids into other ids; "
        "give the prompt as text, or positions as numbers."
    )
