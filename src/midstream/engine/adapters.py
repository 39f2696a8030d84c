"""Adapters (LoRA) in a worker: layers that a trace calls, and rows without an adapter on the CPU.

vLLM adds an adapter's part to a layer's output by tables that say for each row of the step's batch which adapter it has. A trace calls
layers on rows of its own: `model.model.layers[3].mlp(h)`, `model.project_on_vocab(h)`. `Adapters.calling` makes tables for such a call, in
which all rows have the adapter of the trace's request.

vLLM's kernels in PyTorch, which it uses on the CPU, take -1, which marks a row without an adapter, as the number of the last adapter (0.32;
vllm-project/vllm#48421). `skipping_rows` keeps such rows as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from midstream.tree import leaves


class Adapters:
    """The adapters of the traced requests.

    Args:
        manager: vLLM's LoRAModelManager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers: dict[str, int] = {}  # of the adapters, by the id of the request

    def begin(self, numbers: Mapping[str, int]) -> None:
        """Note new requests, with their adapters' numbers."""
        self._numbers |= numbers

    def end(self, requests: set[str] | None = None) -> None:
        """Forget requests that have ended; None for all."""
        for name in list(self._numbers) if requests is None else requests & self._numbers.keys():
            del self._numbers[name]

    @contextlib.contextmanager
    def calling(self, request: str, args: Any) -> Iterator[None]:
        """A block that calls a layer with `args` for a request: the layer and those inside it add the part of the request's adapter.

        On a call without tensors nothing is changed.
        """
        from vllm.lora.layers.utils import LoRAMapping

        tensors = (each for _, each in leaves(args) if each.ndim)
        rows = next((each.numel() // (each.shape[-1] if each.is_floating_point() else 1) for each in tensors), 0)
        before = self._manager._last_mapping
        if not rows or before is None:
            yield
            return
        numbers = (self._numbers.get(request, 0),) * rows
        self._manager.set_adapter_mapping(LoRAMapping(numbers, numbers, is_prefill=True))
        try:
            yield
        finally:
            self._manager.set_adapter_mapping(before)


def skipping_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `PunicaWrapperCPU` that adds nothing to rows without an adapter."""
    of_logits = original.__name__ == "add_lora_logits"

    def add(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        indices_T = self.sampler_indices if of_logits else self.token_lora_indices
        has_adapter_T1 = (indices_T >= 0).unsqueeze(-1)
        # Zeros in place of the other rows: a product with zeros adds nothing.
        adapted = torch.where(has_adapter_T1, x.view(-1, x.shape[-1]), 0).view_as(x)
        return original(self, y, adapted, *args, **kwargs)

    return add
