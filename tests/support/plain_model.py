"""The `model` and the `tracer` of a body that `PlainForward` runs: accessors and modules, with the names of midstream's.

Shape suffixes: T tokens of this step, H hidden.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from plain_run import NeverReachedError, Run, ShapeError, Stopped, UnknownSiteError, Visit
from torch import nn

# The order of a layer's points in the forward.
ORDER = ("layers_input", "attentions_output", "mlps_input", "mlps_output", "layers_output")
# The submodule of the layer that each is a value of, and whether it is its input or output.
PARTS = {
    "layers_input": ("", "input"),
    "attentions_output": ("self_attn", "output"),
    "mlps_input": ("mlp", "input"),
    "mlps_output": ("mlp", "output"),
    "layers_output": ("", "output"),
}


class Module:
    """A module of the tree with `.output` and `.input` in the form of vLLM's modules, or of transformers' own.

    vLLM's modules take and return `[T, H]`, and its layers return `(hidden, residual)`.
    """

    def __init__(self, run: Run, module: nn.Module, path: str, as_vllm: bool) -> None:
        vars(self).update(_run=run, _module=module, _path=path, _as_vllm=as_vllm)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return self._child(found, name) if isinstance(found, nn.Module) else found

    def _child(self, module: nn.Module, name: str) -> Module:
        return Module(self._run, module, f"{self._path}.{name}", self._as_vllm)

    def __getitem__(self, index: int | slice) -> Any:
        children = [self._child(each, str(i)) for i, each in enumerate(self._module)]
        return children[index]

    def __len__(self) -> int:
        return len(self._module)

    def __iter__(self) -> Iterator[Module]:
        return iter(self[:])

    def __call__(self, *args: Any) -> Any:
        """Apply the module. The hooks see that the body's thread does it, and pass the call on."""
        return self._module(*args)

    def _visit(self, kind: str) -> Visit:
        layer, part = re.fullmatch(r"\.model\.layers\.(\d+)\.?(\w*)", self._path).groups()
        (site,) = (name for name, place in PARTS.items() if place == (part, kind))
        return self._run.visit_to((int(layer), ORDER.index(site)))

    @property
    def _is_layer(self) -> bool:
        return self._path.rpartition(".")[2].isdigit()

    @property
    def output(self) -> Any:
        visit = self._visit("output")
        if self._as_vllm:
            return visit.pair() if self._is_layer else visit.value()
        value = visit.value()[None]
        return (value, None) if self._path.endswith(".self_attn") else value

    @output.setter
    def output(self, value: Any) -> None:
        visit = self._visit("output")
        if self._as_vllm and self._is_layer:
            return visit.replace_pair(value)
        if not self._as_vllm:
            value = value[0][0] if self._path.endswith(".self_attn") else value[0]
        visit.replace(value, broadcasts=False)

    @property
    def input(self) -> torch.Tensor:
        value = self._visit("input").value()
        return value if self._as_vllm else value[None]

    @input.setter
    def input(self, value: torch.Tensor) -> None:
        self._visit("input").replace(value if self._as_vllm else value[0], broadcasts=False)


def layer_of(index: Any, layers: int) -> int:
    """The layer that an index stands for, from the front or from the end."""
    try:
        return range(layers)[operator.index(index)]
    except (TypeError, IndexError) as error:
        raise UnknownSiteError(f"{index!r} of {layers} layers") from error


class PerLayer:
    """`model.layers_output` and the like: `[T, H]` of each layer."""

    def __init__(self, run: Run, site: str, layers: int) -> None:
        self._run, self._site, self._layers = run, site, layers

    def _at(self, layer: int) -> Visit:
        return self._run.visit_to((layer_of(layer, self._layers), ORDER.index(self._site)))

    def __getitem__(self, layer: int | slice) -> Any:
        if isinstance(layer, slice):
            return [self[each] for each in range(self._layers)[layer]]
        return self._at(layer).value()

    def __setitem__(self, layer: int, value: torch.Tensor) -> None:
        self._at(layer).replace(value)

    def __len__(self) -> int:
        return self._layers

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[layer] for layer in range(self._layers))


def _after_the_layers(place: int) -> property:
    def get(self: Model) -> torch.Tensor:
        return self._run.visit_to((self.num_layers, place)).value()

    def put(self: Model, value: torch.Tensor) -> None:
        self._run.visit_to((self.num_layers, place)).replace(value, broadcasts=False)

    return property(get, put)


class Model:
    """The `model` of a body."""

    logits, samples = _after_the_layers(0), _after_the_layers(1)

    def __init__(self, run: Run, net: Any, as_vllm: bool) -> None:
        self._run, self._net = run, net
        self.num_layers, self.hidden_size = net.config.num_hidden_layers, net.config.hidden_size
        self.model = Module(run, net.model, ".model", as_vllm)

    def __getattr__(self, name: str) -> PerLayer:
        if name not in ORDER:
            raise AttributeError(name)
        return PerLayer(self._run, name, self.num_layers)

    @property
    def next_token_probs(self) -> torch.Tensor:
        return self.logits.float().softmax(-1)

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-1] != self.hidden_size:
            raise ShapeError(str(hidden.shape))
        return self._net.lm_head(self._net.model.norm(hidden))

    def steer(self, layers: Any, vector: torch.Tensor, factor: float = 1.0, positions: Any = None) -> None:
        chosen = [layers] if isinstance(layers, int) else layers
        for layer in sorted(layer_of(each, self.num_layers) for each in chosen):
            self.layers_output[layer][slice(None) if positions is None else positions] += factor * vector


class Tracer:
    """The `tracer` of a body."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.iter = self

    def __getitem__(self, chosen: slice | int | list[int]) -> Iterator[int]:
        if isinstance(chosen, slice):
            step = chosen.start or 0
            while (chosen.stop is None or step < chosen.stop) and self._run.go_to_step(step):
                yield step
                step += chosen.step or 1
            return
        for step in [chosen] if isinstance(chosen, int) else chosen:
            if not self._run.go_to_step(step):
                raise NeverReachedError(f"step {step}")
            yield step

    def all(self) -> Iterator[int]:
        return self[:]

    def next(self, count: int = 1) -> int:
        return next(self[self._run.step + count])

    def stop(self) -> None:
        self._run.stopped = True
        raise Stopped
