"""What a trace's body sees of the model: each module of the tree with its values, and the standard accessors.

h = model.model.layers[3].mlp.output          # any module, as this model has it
h = model.layers_output[3]                    # the same on every architecture and both backends: [tokens, hidden]
model.layers_output[3] += v                   # edits land in the running forward pass
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from midstream.arch import Architecture
from midstream.errors import ShapeError, UnknownModuleError, UnknownSiteError
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.body import current_body
from midstream.trace.interleaver import Interleaver
from midstream.trace.visit import Key, Visit


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?` for a name that is not there."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(close)}?" if close else "."


class Point:
    """One value that goes by in the forward pass, as the body reads and writes it."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def get(self) -> Any:
        return current_body().at(self.key).raw()

    def set(self, value: Any) -> None:
        current_body().at(self.key).set_raw(value)


def first_tensor_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `.input` means: the first argument, as nnsight has it."""
    return args[0] if args else next(iter(kwargs.values()))


class CallPoints:
    """`.output`, `.input` and `.inputs` of something that is called: a module, or a call inside a forward."""

    _key: Key

    @property
    def output(self) -> Any:
        """What the call returns, this request's rows of it."""
        return Point((*self._key, "output")).get()

    @output.setter
    def output(self, value: Any) -> None:
        Point((*self._key, "output")).set(value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the call is given: `(args, kwargs)`."""
        return Point((*self._key, "input")).get()

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        Point((*self._key, "input")).set(value)

    @property
    def input(self) -> Any:
        """The call's first argument."""
        return first_tensor_argument(*self.inputs)

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self.inputs
        if args:
            self.inputs = ((value, *args[1:]), kwargs)
        else:
            self.inputs = (args, {**kwargs, next(iter(kwargs)): value})


class SourceCall(CallPoints):
    """One call inside a module's forward."""

    def __init__(self, path: str, name: str) -> None:
        self._key = (path, "source", name)


class Source:
    """`module.source`: the calls of the module's forward by name. `print(module.source)` shows them beside the code."""

    def __init__(self, interleaver: Interleaver, path: str) -> None:
        self._path = path
        self._source = interleaver.source.of(path)
        interleaver.source.install(path)

    def __getattr__(self, name: str) -> SourceCall:
        if name not in self._source.names:
            raise UnknownModuleError(f"{self._path}.source has no call {name}{nearest(name, list(self._source.names))}")
        return SourceCall(self._path, name)

    def __str__(self) -> str:
        return str(self._source)


class Envoy(CallPoints):
    """One module of the running model. Children are reached by attribute or index, as on the module itself."""

    _own = ("output", "input", "inputs")

    def __init__(self, module: nn.Module, path: str, interleaver: Interleaver) -> None:
        self._module = module
        self._path = path
        self._key = (path,)
        self._interleaver = interleaver

    @property
    def source(self) -> Source:
        """The calls inside this module's Python forward."""
        return Source(self._interleaver, self._path)

    def skip(self, value: Any) -> None:
        """Have the module return `value` instead of what it computes. Its submodules' values are then meaningless.

        Must be asked for before the module runs in this step.
        """
        body = current_body()
        body.at((self._path, "input"))
        body.interleaver.override(body, (self._path, "output"), value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to a value of the trace's own; no point of the running forward is touched."""
        self._interleaver.muted = True
        try:
            return self._module(*args, **kwargs)
        finally:
            self._interleaver.muted = False

    def _child(self, module: nn.Module, name: str) -> Envoy:
        return Envoy(module, f"{self._path}.{name}" if self._path else name, self._interleaver)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        children = self._module._modules
        if (child := children.get(name)) is not None:
            return self._child(child, name)
        try:
            return getattr(self._module, name)
        except AttributeError:
            known = list(children) + [n for n in type(self).__dict__ if not n.startswith("_")]
            where = self._path or "the model"
            raise UnknownModuleError(
                f"{where} ({type(self._module).__name__}) has no {name}{nearest(name, known)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            raise UnknownModuleError(
                f"{self._path or 'the model'}.{name} cannot be written; write to its .output or .input."
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: int | slice) -> Any:
        children = list(self._module._modules.items())
        if isinstance(index, slice):
            return [self._child(module, name) for name, module in children[index] if module is not None]
        try:
            name, module = children[index]
        except IndexError:
            raise UnknownModuleError(f"{self._path}[{index}]: {self._path} has {len(children)} modules.") from None
        assert module is not None
        return self._child(module, name)

    def __len__(self) -> int:
        return len(self._module._modules)

    def __iter__(self) -> Iterator[Envoy]:
        return iter(self[:])

    def __repr__(self) -> str:
        return f"<{self._path or 'model'}: {type(self._module).__name__}>"


class SitePerLayer:
    """A standard accessor: `accessor[i]` is the site's value at layer i, `[tokens, hidden]`."""

    def __init__(self, arch: Architecture, site: str) -> None:
        self._arch = arch
        self._site = site

    def _at(self, layer: int) -> tuple[Visit, Any, str]:
        layer = range(self._arch.num_layers)[layer] if -self._arch.num_layers <= layer < 0 else layer
        binding = self._arch.binding(self._site, layer)
        return current_body().at((binding.path, binding.kind)), binding, f"{self._site}[{layer}]"

    def __getitem__(self, layer: int) -> torch.Tensor:
        visit, binding, _ = self._at(layer)
        return visit.site(binding)

    def __setitem__(self, layer: int, value: torch.Tensor) -> None:
        visit, binding, name = self._at(layer)
        visit.set_site(binding, value, name)

    def __len__(self) -> int:
        return self._arch.num_layers


def _site_property(site: str) -> property:
    def get(self: ModelEnvoy) -> torch.Tensor:
        binding = self._arch.binding(site)
        return current_body().at((binding.path, binding.kind)).site(binding)

    def put(self: ModelEnvoy, value: torch.Tensor) -> None:
        binding = self._arch.binding(site)
        current_body().at((binding.path, binding.kind)).set_site(binding, value, site)

    return property(get, put, doc=f"The site `{site}`, `[tokens, hidden]`.")


class ModelEnvoy(Envoy):
    """The model in a trace's body: the module tree, and the accessors that mean the same on every model and backend.

    Args:
        arch: where the sites are.
        unembed: applies the final norm and the unembedding to `[n, hidden]`, giving `[n, vocab]`.
        tokenizer: gives the model's tokenizer when it is asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        arch: Architecture,
        interleaver: Interleaver,
        unembed: Callable[[torch.Tensor], torch.Tensor],
        tokenizer: Callable[[], Any],
    ) -> None:
        super().__init__(module, "", interleaver)
        self._arch = arch
        self._unembed = unembed
        self._tokenizer = tokenizer

    token_embeddings = _site_property("embed")
    embed = _site_property("embed")
    final_norm = _site_property("final_norm")

    def __getattr__(self, name: str) -> Any:
        site = ACCESSORS.get(name, name)
        if site in LAYER_SITES:
            return SitePerLayer(self._arch, site)
        return super().__getattr__(name)

    @property
    def num_layers(self) -> int:
        return self._arch.num_layers

    @property
    def hidden_size(self) -> int:
        return self._arch.hidden_size

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer()

    @property
    def logits(self) -> torch.Tensor:
        """The next token's logits, `[1, vocab]`."""
        return Point(("", "logits")).get()

    @logits.setter
    def logits(self, value: torch.Tensor) -> None:
        Point(("", "logits")).set(value)

    @property
    def samples(self) -> torch.Tensor:
        """The token sampled in this step, `[1]`, integer. Writing it changes the token that the request goes on with."""
        return Point(("", "samples")).get()

    @samples.setter
    def samples(self, value: torch.Tensor) -> None:
        Point(("", "samples")).set(value)

    @property
    def next_token_probs(self) -> torch.Tensor:
        """`softmax(logits)`, `[1, vocab]`, float32."""
        return self.logits.float().softmax(-1)

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logit lens (nostalgebraist, 2020): final norm and unembedding of `hidden`, `[n, hidden]` to `[n, vocab]`."""
        if hidden.shape[-1] != self.hidden_size:
            raise ShapeError(f"project_on_vocab takes [n, {self.hidden_size}]; {list(hidden.shape)} was given.")
        self._arch.binding("final_norm")  # or a clear error
        self._interleaver.muted = True
        try:
            return self._unembed(hidden)
        finally:
            self._interleaver.muted = False

    def steer(
        self,
        layers: int | list[int],
        vector: torch.Tensor,
        factor: float = 1.0,
        positions: int | slice | list[int] | None = None,
    ) -> None:
        """Add `factor * vector` to the residual stream leaving each of `layers`, at `positions` of this step (all if None).

        Args:
            vector: `[hidden]`, or `[tokens, hidden]`.
        """
        wanted = [layers] if isinstance(layers, int) else list(layers)
        if out := [i for i in wanted if not -self.num_layers <= i < self.num_layers]:
            raise UnknownSiteError(f"steer: layers {out} are out of range; the model has {self.num_layers}.")
        for layer in sorted(i % self.num_layers for i in wanted):
            hidden = self.layers_output[layer]
            added = factor * vector.to(hidden)
            if positions is None:
                hidden += added
            else:
                hidden[positions] += added
            self.layers_output[layer] = hidden

    def skip_layers(self, start: int, end: int | None = None) -> None:
        """Make layers `start` to `end` (included; `start` alone if None) leave the residual stream as it was before them."""
        end = start if end is None else end
        if not 0 <= start <= end < self.num_layers:
            raise UnknownSiteError(f"skip_layers({start}, {end}): layers run from 0 to {self.num_layers - 1}.")
        before = self.layers_input[start].clone()
        self.layers_output[end] = before

    def __repr__(self) -> str:
        return f"<model: {type(self._module).__name__}, {self.num_layers} layers>"
