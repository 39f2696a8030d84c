"""Adapters (LoRA) in a worker: whether one fits the model, layers that a trace calls, and rows without an adapter on the CPU.

vLLM adds an adapter's part to a layer's output by tables that say for each row of the step's batch which adapter it has. A trace calls
layers on rows of its own: `model.model.layers[3].mlp(h)`, `model.project_on_vocab(h)`. `Adapters.calling` makes tables for such a call, in
which all rows have the adapter of the trace's request.

vLLM leaves out the parts of an adapter whose modules the model does not have, and says nothing: an adapter with other names runs as the
base model, and one with smaller matrices changes some of the columns. `checking_fit` refuses both, and warns if an adapter fits in part.

vLLM's kernels in PyTorch, which it uses on the CPU, take -1, which marks a row without an adapter, as the number of the last adapter (0.32;
vllm-project/vllm#48421). `skipping_rows` keeps such rows as they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from midstream.errors import ParameterError
from midstream.tree import leaves

_SHOWN = 8  # names in a message
_log = logging.getLogger(__name__)


class Adapters:
    """The adapters of the traced requests.

    Args:
        manager: vLLM's LoRAModelManager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers: dict[str, int] = {}  # request id -> the number of its adapter

    def warning_of(self, number: int) -> str | None:
        """What the worker does not apply of an adapter; None if it applies all of it."""
        return getattr(self._manager.get_adapter(number), "midstream_warning", None)

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


def checking_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WorkerLoRAManager._load_adapter` that raises ParameterError for an adapter that fits no module or has matrices of other sizes, and
    warns if it fits in part.
    """

    def _load_adapter(self: Any, lora_request: Any) -> Any:
        lora = original(self, lora_request)
        _check_sizes(self._adapter_manager, lora_request.lora_name, lora.loras)
        if (warning := _check_fit(self._adapter_manager, lora_request.lora_name, sorted(lora.loras))) is not None:
            _log.warning(warning)
            lora.midstream_warning = warning
        return lora

    return _load_adapter


def _check_fit(manager: Any, adapter: str, names: Sequence[str]) -> str | None:
    """A warning that lists the modules of an adapter that are not applied; None if all are. Each pipeline stage checks its own layers.

    Args:
        manager: vLLM's LoRAModelManager, which knows the modules that take adapters.
        names: of the adapter's modules, as in the model.

    Raises:
        ParameterError: none is applied.
    """
    from vllm.lora.utils import is_in_target_modules
    from vllm.model_executor.models.utils import PPMissingLayer

    takes = {name for own in manager.modules for name in (own, *manager.packed_modules.get(own, ()))}
    experts = tuple(f"{name}." for name in manager.modules if name.endswith(".experts"))
    layers = manager.model.named_modules()
    elsewhere = tuple(f"{name}." for name, each in layers if isinstance(each, PPMissingLayer))  # on other stages
    allowed: Any = getattr(manager.lora_config, "target_modules", None)
    left_out = [name for name in names if not is_in_target_modules(name, allowed, manager.packed_modules_mapping)]
    unknown = [
        name
        for name in names
        if name not in takes and name not in left_out and not f"{name}.".startswith((*experts, *elsewhere))
    ]
    if not (left_out or unknown) and names:
        return None
    reasons = []
    if unknown:
        example = f"; it has {min(takes)!r}, for example" if takes else ""
        reasons.append(
            f"The model has no {_listed(unknown)}{example}. Use the adapter with its own model, or rename its tensors."
        )
    if left_out:
        reasons.append(f"The engine's lora_target_modules={list(allowed)} leaves out {_listed(left_out)}.")
    fitting = len(names) - len(unknown) - len(left_out)
    if not fitting:
        raise ParameterError(
            f"The adapter {adapter!r} fits none of the model's modules, so the model would run without it. {' '.join(reasons)}",
            field="lora_request",
        )
    return f"Of the adapter {adapter!r}, {len(names) - fitting} of {len(names)} modules are not applied. {' '.join(reasons)}"


def _check_sizes(manager: Any, adapter: str, loras: Mapping[str, Any]) -> None:
    """Raise ParameterError if a matrix of the adapter has another size than that of its linear layer."""
    for name, module in manager.modules.items():
        layer: Any = getattr(module, "base_layer", None)
        parts, sizes = manager.packed_modules.get(name, [name]), _output_sizes(layer)
        for part, size in zip(parts, sizes, strict=True) if len(parts) == len(sizes) else ():
            if (lora := loras.get(part)) is None:
                continue
            inputs = lora.lora_a.shape[-1], getattr(layer, "input_size", None)
            outputs = lora.lora_b.shape[0], size
            for what, (found, own) in (("inputs", inputs), ("outputs", outputs)):
                if own is not None and found != own:
                    raise ParameterError(
                        f"The adapter {adapter!r} is for a model of another size: its {part!r} has {found} {what}, and the model's has "
                        f"{own}. Use it with the model that it is for.",
                        field="lora_request",
                    )


def _output_sizes(layer: Any) -> list[int | None]:
    """How many outputs a linear layer has, or each of the layers that are merged into it; None where that is unknown."""
    if hasattr(layer, "total_num_kv_heads"):  # `output_sizes` counts keys and values once for each rank that has them
        heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, heads * layer.head_size, heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", None) or [getattr(layer, "output_size", None)])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


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
