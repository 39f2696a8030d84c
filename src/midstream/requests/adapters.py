"""Adapters (LoRA) that calls choose for their prompts: `lora_request=` on `VLLM`, `model=` on `Remote`.

`TraceModel` takes the argument out of a call's parameters (`taken`) and gives each prompt's invoke its adapter (`of_each`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from midstream.errors import ParameterError

Argument = Literal["lora_request", "model"]
_INSTEAD: dict[Argument | None, dict[str, str]] = {
    "lora_request": {"model": "on VLLM give vLLM's LoRARequest, lora_request=LoRARequest(name, number, path)"},
    "model": {"lora_request": "on Remote give the name that the server has for the adapter, model=NAME"},
    None: dict.fromkeys(
        ("lora_request", "model"),
        "a LanguageModel has no adapters. Merge the adapter into the weights, for example by PEFT's merge_and_unload, and make a "
        "LanguageModel of the result",
    ),
}


def taken(params: Mapping[str, Any], argument: Argument | None, default: Any = None) -> tuple[Any, dict[str, Any]]:
    """The value of a call's argument for the adapter, and the call's other parameters.

    Args:
        argument: the name that the model has for it; None if the model has no adapters.
        default: the value if the call has none.

    Raises:
        ParameterError: the call has the argument of another kind of model.
    """
    rest = dict(params)
    found = rest.pop(argument, default) if argument is not None else default
    for name, instead in _INSTEAD[argument].items():
        if rest.pop(name, None) is not None:
            raise ParameterError(f"{name}= is not a parameter here: {instead}.", field=name)
    return found, rest


def of_each(given: Any, argument: Argument | None, prompts: int) -> Sequence[Any]:
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


def only_one(given: Any, argument: Argument | None, what: str) -> Any:
    """The adapter of a call that has the same one for all of its prompts. Raises ParameterError for a list."""
    if isinstance(given, (list, tuple)):
        raise ParameterError(
            f"{argument} is a list, and {what} runs all prompts with one adapter. Give one, and call it once for each adapter.",
            field=argument,
        )
    return given
