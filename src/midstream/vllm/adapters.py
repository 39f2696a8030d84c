"""The adapters (LoRA) that requests of this client have named.

vLLM knows an adapter by its number alone, and loads it in the step that first needs it. With two adapters under one number it runs the
first for both, and an adapter that cannot be loaded ends the engine. So the numbers are compared here, and adapters are loaded before their
first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from midstream.errors import ParameterError


class LoadedAdapters:
    """The adapters that the engine has loaded for this client.

    Args:
        load: loads an adapter in the workers, and raises ParameterError if that fails. None on a server, where vLLM's front end numbers and
            loads adapters.
    """

    def __init__(self, load: Callable[[Any], Awaitable[None]] | None) -> None:
        self._load = load
        self._loaded: dict[int, tuple[str, str]] = {}  # number -> name and path

    def check(self, adapters: Iterable[Any]) -> None:
        """Raise ParameterError if vLLM would take one of the adapters for another of them, or for one that is loaded."""
        if self._load is None:
            return
        known = dict(self._loaded)
        for adapter in adapters:
            if adapter is None:
                continue
            if adapter.load_inplace:
                raise ParameterError(
                    "lora_request has load_inplace=True. vLLM's prefix cache would still have the keys and values of the old weights: give "
                    "the new weights a name and a number of their own.",
                    field="lora_request",
                )
            number, own = adapter.lora_int_id, (adapter.lora_name, adapter.lora_path)
            if (other := known.setdefault(number, own)) != own:
                raise ParameterError(
                    f"lora_request: the adapter {own[0]!r} ({own[1]}) has the number {number}, which is that of {other[0]!r} ({other[1]}). "
                    "vLLM knows adapters by their numbers: give each adapter a lora_int_id of its own.",
                    field="lora_request",
                )
            if name := next((n for n, each in known.items() if each[0] == own[0] and n != number), None):
                raise ParameterError(
                    f"lora_request: the adapter {own[0]!r} has the number {number}, and another one of that name has {name}. vLLM's prefix "
                    "cache knows adapters by their names: give each adapter a lora_name of its own.",
                    field="lora_request",
                )

    async def load(self, adapters: Iterable[Any]) -> None:
        """Load the adapters that the engine has not loaded yet. Raises ParameterError for one that it cannot load."""
        if self._load is None:
            return
        for adapter in adapters:
            if adapter is not None and adapter.lora_int_id not in self._loaded:
                await self._load(adapter)
                self._loaded[adapter.lora_int_id] = adapter.lora_name, adapter.lora_path
