"""The arguments of a call, as users write them: prompts, plans, sampling parameters, answers and adapters.

A prompt is a text, token ids, a tokenizer's output, or a chat: a list of messages, `[{"role": "user", "content": "..."}]`. The tokenizer's
chat template makes its text.
"""

from __future__ import annotations

import contextlib
import logging
import math
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Number
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from midstream.errors import ParameterError, PlanError, PromptError
from midstream.plan.ops.edit import changed
from midstream.plan.values import Intervention, Plan, Steer

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Prompts.

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


def prompts_of(given: Any, *, checked: bool = True) -> tuple[list[Any], bool]:
    """The given prompts, and whether a single prompt was given, rather than a list of prompts or an encoding of several rows.

    Raises PromptError for anything else; with `checked`, also if one prompt of a list is not a prompt.
    """
    if isinstance(given, str) or is_chat(given):
        return [given], True
    if not isinstance(given, Mapping) and not _is_array(given):
        if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
            raise _no_prompt(given)
        each = list(given)
        if _are_numbers(each):
            return [each], True
        for number, prompt in enumerate(each if checked else ()):
            with numbered(number):
                check_form(prompt)
        return each, False
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


def one_prompt(given: Any, call: str) -> Any:
    """The only prompt of a call that takes one. Raises PromptError for several, or none."""
    prompts, _ = prompts_of(given)
    if len(prompts) != 1:
        raise PromptError(f"{call} runs one prompt; {len(prompts)} were given. Call it once for each.")
    return prompts[0]


@contextlib.contextmanager
def numbered(number: int | None, name: str | None = None) -> Iterator[None]:
    """Let errors in the block say which prompt they are about, by its number and its id, if it has one."""
    try:
        yield
    except PromptError as error:
        if error.number is None:
            error.number, error.name = number, name
        raise


def in_turn(convert: Callable[[Any], T], prompts: Sequence[Any]) -> list[T]:
    """The prompts, each converted by `convert`. If there are several, its PromptErrors have the number of the prompt."""
    found = []
    for number, prompt in enumerate(prompts):
        with numbered(number if len(prompts) > 1 else None):
            found.append(convert(prompt))
    return found


def check_form(prompt: Any) -> None:
    """Raise PromptError for one of several prompts that is no text, token ids, encoding or chat."""
    if isinstance(prompt, (str, Mapping)) or hasattr(prompt, "dtype") or is_chat(prompt):
        return
    rows = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) else [None]
    row = rows[0] if len(rows) == 1 and isinstance(rows[0], (list, tuple)) else rows
    if not _are_numbers(row):
        raise _no_prompt(prompt)


def _are_numbers(tokens: Collection[Any]) -> bool:
    """Whether each token is a number, or a tensor of one number. Checks the set of their types: prompts may have millions of tokens."""
    kinds = set(map(type, tokens))
    tensors = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
    are_single = not tensors or not any(token.ndim for token in tokens if type(token) in tensors)
    return are_single and all(issubclass(kind, Number) for kind in kinds - tensors)


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

    Raises PromptError for a prompt without tokens or with images, for a mask with holes, and for unusual positions and token types.
    """
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return _not_negative(prompt.copy())
    if is_multimodal(prompt):
        raise PromptError(
            "A prompt here is text. Send a prompt with images, sound or video to `model.engine.generate(prompt, "
            'SamplingParams(...))`, which takes a plan without positions as extra_args={"midstream": plan}.'
        )
    ids: Any = prompt
    if is_chat(prompt):
        for part in _texts_in(prompt):
            _check_text(part)
        ids = _chat_ids(prompt, tokenizer())
    elif (text := _text_of(prompt)) is not None:
        _check_text(text)
        ids = tokenizer()(text)["input_ids"]
        if not len(ids):
            raise PromptError(f"The text {text!r} has no tokens. A prompt has at least one.", reason="empty")
        warn_of_second_bos(ids, tokenizer())
    elif isinstance(prompt, Mapping):
        ids = next((prompt[key] for key in ("input_ids", "prompt_token_ids") if prompt.get(key) is not None), None)
        if ids is None:
            raise _no_prompt(prompt)
        _check_keys(prompt)
    ids = _as_ids(ids, prompt)
    if isinstance(prompt, Mapping):
        ids = _unmasked(prompt, ids)
    if not ids.numel():
        raise _no_prompt(prompt, "empty")
    return _not_negative(ids.long().tolist())


def check_ids(ids: Sequence[int], vocab_size: int, longest: int | None) -> None:
    """Raise PromptError for token ids that a model lacks, or for more than `longest`; None for any number."""
    if wrong := [token for token in ids if token >= vocab_size]:
        raise PromptError(
            f"The prompt has the token id {wrong[0]}; this model's are 0 to {vocab_size - 1}.",
            reason="out of the vocabulary",
        )
    if longest is not None and len(ids) > longest:
        raise PromptError(
            f"The prompt has {len(ids)} tokens; this model takes prompts of up to {longest} tokens. Shorten it.",
            reason="too long",
        )


def _not_negative(ids: list[int]) -> list[int]:
    if (least := min(ids)) < 0:  # older vLLMs fail on them
        raise PromptError(f"Token ids are 0 or more; the prompt has {least}.", reason="out of the vocabulary")
    return ids


def _as_ids(ids: Any, prompt: Any) -> torch.Tensor:
    """Token ids as a tensor `[tokens]`. Raises PromptError for other numbers than integers, and other shapes than `[tokens]`."""
    given = ids
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_prompt(prompt) from error
    ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
    if ids.ndim != 1:
        raise _no_prompt(prompt)
    row = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    tokens = row if isinstance(row, (list, tuple)) else ids
    wrong = next((token for token in tokens if isinstance(token, (bool, float, np.bool_, np.floating))), None)
    if wrong is None and ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        wrong = ids[0].item()
    if wrong is not None:
        wrong = wrong.item() if isinstance(wrong, np.generic) else wrong
        raise PromptError(f"Token ids are whole numbers; the prompt has {wrong!r}, of the type {type(wrong).__name__}.")
    return ids


def _check_text(text: str) -> None:
    """Raise PromptError for text that cannot be encoded in UTF-8, which tokenizers need."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text has half of a surrogate pair, {text[error.start]!r}, at character {error.start}. It stands for no character; "
            "text.encode(errors='replace').decode() puts a question mark there."
        ) from None


def _texts_in(given: Any) -> Iterator[str]:
    """The texts of a chat's messages, at any depth."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, (Mapping, list, tuple)):
        for part in given.values() if isinstance(given, Mapping) else given:
            yield from _texts_in(part)


def warn_of_second_bos(ids: Any, tokenizer: Any) -> None:
    """Warn if a text begins with the beginning-of-sequence token and the tokenizer has added another one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and list(ids[:2]) == [bos, bos]:
        warnings.warn(
            f"A prompt begins with {tokenizer.bos_token!r}, as chat templates write it, and the tokenizer has put another one before it. "
            "The model computes both. Give the chat's messages as the prompt, or token ids: "
            'tokenizer(text, add_special_tokens=False)["input_ids"].',
            stacklevel=2,
        )


def _unmasked(prompt: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """The tokens that are not masked. Raises PromptError if the encoding says more, such as unusual positions."""
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
    """The token ids of a chat. They end with the beginning of the assistant's turn, or within it if the last message is the assistant's."""
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


def _no_prompt(given: Any, reason: str | None = None) -> PromptError:
    if reason is None and isinstance(given, (list, tuple, Mapping)) and not given:
        reason = "empty"
    return PromptError(
        f"A prompt is a text, a list of at least one token id, a tokenizer's output, or a list of chat messages; {reprlib.repr(given)} "
        "was given. Give several prompts as a list of them.",
        reason=reason,
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


# Plans.


def plans_of(given: Any, prompts: int, single: bool = False) -> list[Plan]:
    """The plan of each prompt.

    Args:
        given: one plan for all prompts, or a list with a plan, a list of interventions or None for each prompt.
        single: whether there is one prompt, not a list of prompts.

    Raises:
        PlanError: `given` has another form.
    """
    if not isinstance(given, (list, tuple)) or all(isinstance(item, Intervention) for item in given):
        if prompts > 1 and isinstance(given, (list, tuple)) and len(given) == prompts and _are_scales(given):
            _log.warning(
                "plan is a flat list, so each of the %s prompts gets the sum of all %s Steers. To give each prompt one of them, write "
                "plan=[[each] for each in plan]",
                prompts,
                prompts,
            )
        return [Plan.of(given)] * prompts
    if any(isinstance(item, Intervention) for item in given):
        raise PlanError(
            "plan mixes interventions with plans. Allowed: one list of interventions for all prompts, or a list that has for "
            "each prompt a plan, a list of interventions, or None."
        )
    if len(given) != prompts:
        there = "one prompt" if single or prompts == 1 else f"{prompts} prompts"
        raise PlanError(f"plan is a list with a plan for each prompt: {len(given)} plans were given for {there}.")
    return [Plan.of(item) for item in given]


def _are_scales(given: Sequence[Any]) -> bool:
    """Whether they are `Steer`s that differ only in their scales."""
    same = {changed(each, scale=1.0) for each in given if isinstance(each, Steer)}
    return len(same) == 1 and all(isinstance(each, Steer) for each in given)


# Sampling parameters.

_ASK_FOR_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Parameters of other libraries, which have no effect on values.
_HARMLESS = ("scan", "validate", "return_dict", "pad_token_id")
_TRANSFORMERS_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "num_return_sequences": "n"}
# Parameters of transformers' generate -> how to write them here.
_SPELLED = {
    "generation_config": "give its values by name, as in temperature=0.6, top_k=20. The model's own are in use already.",
    "max_length": "give the number of generated tokens, max_tokens=.",
    "min_new_tokens": "on vLLM write min_tokens=.",
    "min_length": "on vLLM write min_tokens=, which counts generated tokens.",
    "eos_token_id": "write stop_token_ids=[...], and ignore_eos=True to continue after the model's own end.",
    "num_beams": "midstream has no beam search.",
}

_USUAL = {"num_beams": 1, "min_length": 0, "min_new_tokens": 0}  # values without effect

# Arguments of a transformers model's forward -> the replacement on vLLM, which has no such argument.
FORWARD_ARGUMENTS = {
    "output_hidden_states": "Read model.layers_output[i] in a trace, or capture resid_post with a plan.",
    "output_attentions": "Its attention kernels return no weights. Use LanguageModel(name, attn_implementation='eager').",
    "use_cache": None,  # vLLM always has a cache
}


def engine_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters for vLLM. Raises ParameterError for an argument of a transformers model's forward."""
    for name, instead in FORWARD_ARGUMENTS.items():
        if name in params and instead is not None:
            raise ParameterError(
                f"{name}= is an argument of transformers' forward, which vLLM does not have. {instead}"
            )
    return {name: value for name, value in params.items() if name not in FORWARD_ARGUMENTS}


def sampling(
    params: Mapping[str, Any], max_tokens: int, defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Sampling parameters under vLLM's names, greedy unless one of them asks for sampling.

    `temperature`, `top_p`, `top_k`, `min_p`, `n > 1` and `do_sample=True` ask for it; `do_sample=False` means greedy and overrides them.
    `max_new_tokens`, `stop_strings` and `num_return_sequences` are transformers' names of `max_tokens`, `stop` and `n`.

    Args:
        max_tokens: the default.
        defaults: the model's generation configuration. Its repetition penalty always counts, its other values only if tokens are sampled.

    Raises:
        ParameterError: a parameter of transformers' that has another name here.
    """
    # transformers treats None as unset.
    unset = {name for name in _ASK_FOR_SAMPLING if name in params and params[name] is None}
    unset |= {name for name in FORWARD_ARGUMENTS if not params.get(name)}
    given = {name: value for name, value in params.items() if name not in _HARMLESS and name not in unset}
    if given.pop("remote", None):
        raise ParameterError("remote= is not a parameter here: use midstream.Remote(url) in place of this model.")
    if "sampling_params" in given:
        raise ParameterError(
            "sampling_params= is not a parameter here: give each one by name, as in max_tokens=3, temperature=0.5."
        )
    for name, instead in _SPELLED.items():
        if given.get(name, _USUAL.get(name)) not in (None, _USUAL.get(name)):
            raise ParameterError(f"{name}= is not a parameter here: {instead}")
        given.pop(name, None)
    for name, ours in _TRANSFORMERS_NAMES.items():
        if name in given and ((value := given.pop(name)) != 1 or ours != "n"):
            given[ours] = value
    asked = given.pop("do_sample", None)
    if asked is not None and not isinstance(asked, bool):
        raise ParameterError(f"do_sample is {asked!r}; allowed: True or False.")
    if asked is None:
        asked = any(name in given for name in _ASK_FOR_SAMPLING) or (given.get("n") or 1) > 1
    if not asked:
        given["temperature"] = 0.0
    used = (*_ASK_FOR_SAMPLING, "repetition_penalty") if asked else ("repetition_penalty",)
    return {
        "max_tokens": max_tokens,
        **{name: defaults[name] for name in used if defaults.get(name) is not None},
        **given,
    }


# Answers: tokens to grade as the first token after the prompt. They are looked up by id, so unlikely ones have a value, too.

MAX_ANSWERS = 128  # of one prompt, as vLLM has it
FAR_LIKELIER = math.log(100)  # nats


class MissingSpace(NamedTuple):
    """An answer that most likely lacks the space before it: the token of its text with a space is far likelier.

    Attributes:
        spaced: the text with a space.
        nats: the log-probability of that token, minus the answer's.
    """

    answer: str | int
    spaced: str
    nats: float

    def warning(self, name: str, after: str) -> str:
        """A text for the user. `name`: the argument and a verb, as in "answers has"; `after`: the prompt, in words."""
        times = f"{math.exp(self.nats):,.0f}" if self.nats < math.log(1e6) else "more than 1,000,000"
        return (
            f"{name} {self.answer!r}. After {after} the token {self.spaced!r} is {times} times as likely: most words are one token with "
            f"the space before them. If you mean that word, give {self.spaced!r}."
        )


class Answers(dict[str | int, int]):
    """The answers of a prompt, as texts or token ids, with their token ids.

    Args:
        tokens: the token id of each answer.
        spaced: for answers without a space before them, their text with a space and its token id, as `with_space` returns them. These are
            graded, too, if there is room for them, and not shown.
    """

    def __init__(
        self,
        tokens: Mapping[str | int, int] = MappingProxyType({}),
        spaced: Mapping[str | int, tuple[str, int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(tokens)
        own, room = set(self.values()), max(MAX_ANSWERS - len(self), 0)
        others = [(answer, each) for answer, each in spaced.items() if each[1] not in own]
        self._spaced = dict(others[:room])

    @property
    def token_ids(self) -> list[int]:
        """The tokens that `graded` needs the log-probabilities of."""
        return [*self.values(), *(token for _, token in self._spaced.values())]

    def graded(self, logprob: Callable[[int], Any]) -> tuple[dict[str | int, float], list[MissingSpace]]:
        """The log-probability of each answer, and the answers that most likely lack the space before them.

        Args:
            logprob: the log-probability of a token in nats.
        """
        grades = {answer: float(logprob(token)) for answer, token in self.items()}
        each = [
            MissingSpace(answer, text, float(logprob(token)) - grades[answer])
            for answer, (text, token) in self._spaced.items()
        ]
        return grades, [one for one in each if one.nats > FAR_LIKELIER]


def answers_of(given: Any, prompts: int, tokenizer: Callable[[], Any], vocab_size: int) -> list[Answers]:
    """The answers of each of several prompts.

    Args:
        given: an answer (a text of one token, or a token id) or a list of answers for all prompts; or a list with a list for each prompt.

    Raises:
        PromptError: an answer is not one token of the model, or the number of lists differs from the number of prompts.
    """
    each = answers_by_prompt(given, prompts)
    lists = {id(own): own for own in each}
    tokens, spaced = dict[str | int, int](), dict[str | int, tuple[str, int]]()
    for answer in dict.fromkeys(answer for own in lists.values() for answer in own):
        tokens[answer] = _answer_token(answer, tokenizer, vocab_size)
        if isinstance(answer, str) and (found := with_space(answer, tokens[answer], tokenizer())) is not None:
            spaced[answer] = found  # a token id says which token is meant
    made = {
        key: Answers(
            {answer: tokens[answer] for answer in own}, {answer: spaced[answer] for answer in own if answer in spaced}
        )
        for key, own in lists.items()
    }
    return [made[id(own)] for own in each]


def answers_by_prompt(given: Any, prompts: int) -> list[list[Any]]:
    """The list of answers of each prompt; the same list object for prompts that share it. Raises PromptError."""
    if not isinstance(given, (list, tuple)) or not any(isinstance(each, (list, tuple)) for each in given):
        return [_checked_answers(given)] * prompts
    if len(given) != prompts:
        text = f"answers is a list with a list for each prompt: {len(given)} were given for {prompts}."
        raise PromptError(text, field="answers")
    return [_checked_answers(each) for each in given]


def _checked_answers(given: Any) -> list[str | int]:
    answers = list(given) if isinstance(given, (list, tuple)) else [given]
    for answer in answers:
        if not isinstance(answer, (str, int)) or isinstance(answer, bool):
            text = f"answers has {answer!r}. Allowed: texts of one token, token ids, and lists of these."
            raise PromptError(text, field="answers")
    return answers


def _answer_token(answer: str | int, tokenizer: Callable[[], Any], vocab_size: int) -> int:
    if isinstance(answer, int):
        if not 0 <= answer < vocab_size:
            text = f"answers has the token id {answer}; this model's are 0 to {vocab_size - 1}."
            raise PromptError(text, field="answers")
        return answer
    ids = tokenizer()(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        parts = ", ".join(f"{tokenizer().decode([token])!r} ({token})" for token in ids)
        raise PromptError(
            f"The answer {answer!r} is {len(ids)} tokens: {parts or 'none'}. Answers are graded by one token: give the id of the "
            "one that tells them apart, or a text of one token (most words are one with the space before them).",
            field="answers",
        )
    return int(ids[0])


def with_space(answer: str | int, token: int, tokenizer: Any) -> tuple[str, int] | None:
    """The text of an answer with a space before it, and its token id; None if it has a space, or if that text is not one other token."""
    text = answer if isinstance(answer, str) else tokenizer.decode([token])
    if not text or text[0].isspace():
        return None
    ids = tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
    return (f" {text}", int(ids[0])) if len(ids) == 1 and ids[0] != token else None


def spaces_warning(each: Sequence[Sequence[MissingSpace]]) -> str | None:
    """A warning about answers that most likely lack the space before them, by prompt; None if there are none."""
    found = [(number, one) for number, own in enumerate(each) for one in own]
    if not found:
        return None
    number, first = found[0]
    text = first.warning("answers has", "the prompt" if len(each) == 1 else f"prompt {number}")
    others = [*dict.fromkeys(one.answer for _, one in found if one.answer != first.answer)]
    return f"{text} The same holds for {reprlib.repr(others)}." if others else text


# Adapters (LoRA): `lora_request=` on `VLLM`, `model=` on `Remote`.

AdapterArgument = Literal["lora_request", "model"]
_ADAPTERS_ELSEWHERE: dict[AdapterArgument | None, dict[str, str]] = {
    "lora_request": {"model": "on VLLM give vLLM's LoRARequest, lora_request=LoRARequest(name, number, path)"},
    "model": {"lora_request": "on Remote give the name that the server has for the adapter, model=NAME"},
    None: dict.fromkeys(
        ("lora_request", "model"),
        "a LanguageModel has no adapters. Merge the adapter into the weights, for example by PEFT's merge_and_unload, and make a "
        "LanguageModel of the result",
    ),
}


def adapter_in(
    params: Mapping[str, Any], argument: AdapterArgument | None, default: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The value of a call's argument for the adapter, and the call's other parameters.

    Args:
        argument: the name that the model has for it; None if the model has no adapters.
        default: the value if the call has none.

    Raises:
        ParameterError: the call has the argument of another kind of model.
    """
    rest = dict(params)
    found = rest.pop(argument, default) if argument is not None else default
    for name, instead in _ADAPTERS_ELSEWHERE[argument].items():
        if rest.pop(name, None) is not None:
            raise ParameterError(f"{name}= is not a parameter here: {instead}.", field=name)
    return found, rest


def adapters_of(given: Any, argument: AdapterArgument | None, prompts: int) -> Sequence[Any]:
    """The adapter of each prompt; None for a prompt that runs without one.

    Args:
        given: one adapter for all prompts, or a list with one or None for each prompt.

    Raises:
        ParameterError: the list has another length.
    """
    if not isinstance(given, (list, tuple)):
        return [given] * prompts
    if len(given) != prompts:
        raise ParameterError(
            f"{argument} is a list with an adapter or None for each prompt: {len(given)} were given for {prompts}.",
            field=argument,
        )
    return given


def adapter_alone(given: Any, argument: AdapterArgument | None, what: str) -> Any:
    """The adapter of a call that has the same one for all of its prompts. Raises ParameterError for a list."""
    if isinstance(given, (list, tuple)):
        raise ParameterError(
            f"{argument} is a list, and {what} runs all prompts with one adapter. Give one, and call it once for each adapter.",
            field=argument,
        )
    return given
