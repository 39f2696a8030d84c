"""The model as a trace's body sees it: the module tree with each module's values, and the standard accessors.

h = model.model.layers[3].mlp.output          # any module, as this model has it
h = model.layers_output[3]                    # the same on every architecture and both backends: [tokens, hidden]
model.layers_output[3] += v                   # edits change the running forward pass
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from midstream.arch import Architecture
from midstream.arch.detect import Sizes, text_config
from midstream.arch.heads import is_cut, settings_of
from midstream.errors import ShapeError, TraceError, UnknownModuleError, UnknownSiteError
from midstream.hooks import is_in_body
from midstream.sites import ACCESSORS, LAYER_SITES, Binding, Key, hook_hint, module_name, point_name, site_of
from midstream.trace.batch_rows import FlatRows
from midstream.trace.body import current_body
from midstream.trace.forward import Forward, ForwardSource, forward_source
from midstream.trace.parallel import StageValue, real
from midstream.trace.tracer import BodyTracer
from midstream.trace.visit import Visit


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?` with the known names most similar to `name`; `.` if there are none."""
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(close)}?" if close else "."


def where_layers_are(paths: Iterable[str]) -> str:
    """` The layers are at model.model.layers[0] to [11].` for the outermost numbered modules; empty if there are none."""
    numbered = [path.rpartition(".") for path in paths if path.rpartition(".")[2].isdigit()]
    if not numbered:
        return ""
    container = min((parent for parent, _, _ in numbered), key=lambda parent: parent.count("."))
    last = max(int(name) for parent, _, name in numbered if parent == container)
    return f" The layers are at model.{container}[0] to [{last}]."


def read_point(key: Key, written: str) -> Any:
    """This request's rows of the value at a point of the forward. `written`: as the user writes it."""
    body = current_body()
    return body.read(key, written, lambda visit: visit.raw(), body.forward.stage.width_of(key))


def write_point(key: Key, written: str, value: Any) -> None:
    """Replace the value at a point."""
    current_body().write(key, written, lambda visit: visit.set_raw(real(value)))


class CallPoints:
    """`.output`, `.input`, `.inputs` and `.skip` of a module, or of a call inside a forward.

    `_written` is the module or the call as the user writes it.
    """

    _key: Key
    _written: str
    _forward: Forward

    def skip(self, value: Any) -> None:
        """Make the call return `value`. Reading a value inside the call then raises NeverReachedError.

        Use it before the call is made in this step.
        """
        body, key = current_body(), (*self._key, "output")
        body.write(
            (*self._key, "input"), f"{self._written}.skip", lambda _: body.forward.override(body.name, key, real(value))
        )

    @property
    def output(self) -> Any:
        """The call's return value, with this request's rows only."""
        return read_point((*self._key, "output"), f"{self._written}.output")

    @output.setter
    def output(self, value: Any) -> None:
        write_point((*self._key, "output"), f"{self._written}.output", value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, `(args, kwargs)`."""
        return read_point((*self._key, "input"), f"{self._written}.inputs")

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        write_point((*self._key, "input"), f"{self._written}.inputs", value)

    @property
    def input(self) -> Any:
        """The call's first argument."""
        return current_body().read((*self._key, "input"), f"{self._written}.input", lambda visit: visit.first())

    @input.setter
    def input(self, value: Any) -> None:
        key, written = (*self._key, "input"), f"{self._written}.input"
        current_body().write(key, written, lambda visit: visit.set_first(real(value)))


def lines_of(name: str, source: str) -> str:
    """The lines of a printed source that have this call."""
    return "\n".join(line for line in source.splitlines() if name in line.partition("|")[0].replace(",", " ").split())


class SourceCall(CallPoints):
    """One call inside a module's forward; or one assignment, whose `output` is the assigned value."""

    def __init__(self, forward: Forward, path: str, name: str) -> None:
        self._forward = forward
        self._key = (path, "source", name)
        self._written = point_name(self._key)

    @property
    def source(self) -> InnerSource:
        """The calls inside the called function. Raises TraceError for an assignment, and for the call of a module, which has its own
        source.
        """
        inside, (path, _, name) = self.inside(), self._key
        if is_in_body() and self._forward.stage.has((path, "output")):
            self._forward.source.open(path, name)
        return inside

    def inside(self) -> InnerSource:
        """The same as `source`, but the forward does not start to report the calls."""
        path, _, name = self._key
        source = Source(self._forward, path)._source
        if source.is_assignment(name):
            calls = source.calls_of(name)
            hint = f" The calls of that name: {', '.join(calls)}." if calls else ""
            raise TraceError(
                f"{path}.source.{name} is an assignment and calls nothing; its value is its .output.{hint}"
            )
        if self._forward.stage.has((path, "output")):
            own = self._forward.source.module_point((path, "source", name, "output"))
            if len(own) == 2:
                raise TraceError(f"{path}.source.{name} calls the module {own[0]}: read model.{own[0]}.source.")
        return InnerSource(self._forward, path, name)

    def __repr__(self) -> str:
        path, _, name = self._key
        return lines_of(name, str(Source(self._forward, path)))


class InnerSource:
    """`module.source.call.source`: the calls in a function that a forward calls. They are known once the forward has called it."""

    def __init__(self, forward: Forward, path: str, name: str) -> None:
        self._forward, self._path, self._name = forward, path, name

    def __getattr__(self, name: str) -> SourceCall:
        if name.startswith("__"):
            raise AttributeError(name)
        return SourceCall(self._forward, self._path, f"{self._name}.{name}")

    @property
    def _found(self) -> ForwardSource | None:
        return Source(self._forward, self._path)._source.within(self._name)

    def __dir__(self) -> list[str]:
        return list(found.names) if (found := self._found) is not None else []

    def __repr__(self) -> str:
        if (found := self._found) is not None:
            return str(found)
        return (
            f"<The calls in {self._path}.source.{self._name} are known once the forward has called it. Use one in a trace; an unknown "
            "name lists them.>"
        )


class Source:
    """`module.source`: the calls and assignments in the module's forward by name. `print(module.source)` shows them next to the code."""

    def __init__(self, forward: Forward, path: str) -> None:
        self._path, self._forward = path, forward
        if forward.stage.has((path, "output")):
            self._source = forward.source.of(path)
            if is_in_body():
                forward.source.install(path)
        else:
            self._source = forward_source(forward.stage.class_of(path).forward)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> SourceCall:
        if name not in self._source.names:
            there = list(self._source.names)
            raise UnknownModuleError(
                f"{self._path}.source has no call {name}{nearest(name, there)} It has {', '.join(there) or 'none'}."
            )
        return SourceCall(self._forward, self._path, name)

    def __dir__(self) -> list[str]:
        return list(self._source.names)

    def __repr__(self) -> str:
        return str(self._source)


def by_path(module: Any, path: str) -> Any:
    """The module at a path from `module`, as in `"layers.3.mlp"`."""
    for name in path.split("."):
        module = module[int(name)] if name.isdecimal() else getattr(module, name)
    return module


def _steps(envoy: Any) -> Any:
    raise UnknownModuleError(
        "nnsight's model.iter is the tracer's here: `with model.generate(prompt, max_tokens=8) as tracer:` and `for _ in tracer.iter[:]:`."
    )


# Names that nnsight gives to facts about a module, in a trace and outside.
OF_NNSIGHT: dict[str, Callable[[Any], Any]] = {
    "path": lambda envoy: envoy._path,
    "get": lambda envoy: functools.partial(by_path, envoy),
    "dispatched": lambda envoy: True,
    "iter": _steps,
}


class ModuleTree:
    """A module's children as items."""

    _path: str

    @property
    def _children(self) -> list[str]:
        raise NotImplementedError

    def _child(self, name: str) -> Self:
        raise NotImplementedError

    def __getitem__(self, index: int | slice | str) -> Any:
        children = self._children
        if isinstance(index, slice):
            return [self._child(name) for name in children[index]]
        if isinstance(index, str) or not -len(children) <= index < len(children):
            raise UnknownModuleError(f"{self._path}[{index!r}]: {self._path} has {len(children)} modules.")
        return self._child(children[index])

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Self]:
        return map(self._child, self._children)


class Envoy(CallPoints, ModuleTree):
    """One module of the running model. Its children are attributes or items, as on the module itself."""

    def __init__(self, module: nn.Module | None, path: str, forward: Forward, written: str | None = None) -> None:
        self._module: Any = module
        self._path = path
        self._key = (path,)
        self._written = written or module_name(path)
        self._forward = forward

    @property
    def source(self) -> Source:
        """The calls and assignments inside this module's Python forward."""
        return Source(self._forward, self._path)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Apply the module to values of the trace. The running forward is not affected."""
        if hook:
            raise self._cannot_hook()
        call = self._forward.peers.applied(self._path, self._module)
        return self._computed(self._path, f"{self._written}(...)", lambda: self._apart(call, real(args), real(kwargs)))

    def _cannot_hook(self) -> TraceError:
        name, parts = self._path.rpartition(".")[2] or "model", [each for each in self._children if each.isidentifier()]
        part = f", and call its parts where you need their values: `{name}.{parts[0]}(x)`" if parts else ""
        return TraceError(
            f"{name}(x, hook=True): the trace's code makes this call. Only the modules that the model's own forward pass calls have an "
            f".output and .input here. Write `y = {name}(x)`, without hook=True{part}."
        )

    def _apart(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        peers, body = self._forward.peers, current_body().name
        if peers.several:
            peers.agree(body, "a call apart from the forward")
        return self._forward.apart(body, call, args, kwargs)

    def _computed(self, path: str, written: str, value: Callable[[], Any]) -> Any:
        """`value()`, which uses the module at `path`, computed on the pipeline stage that owns the module."""
        return value() if self._forward.stage.size == 1 else current_body().compute(path, written, value)

    def _child(self, name: str) -> Envoy:
        path = f"{self._path}.{name}" if self._path else name
        here = self._module._modules.get(name) if self._module is not None else None
        return Envoy(
            here, path, self._forward, f"{self._written}[{name}]" if name.isdecimal() else f"{self._written}.{name}"
        )

    @property
    def _children(self) -> list[str]:
        """The names of this module's children, on all pipeline stages."""
        return self._forward.stage.children_of(self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        children = self._children
        if name in children:
            return self._child(name)
        if (path := self._forward.aliases.resolve(self._path, name, self._forward.stage.modules)) is not None:
            return Envoy(self._forward.modules.get(path), path, self._forward, f"{self._written}.{name}")
        try:
            return self._computed(self._path, f"{self._written}.{name}", lambda: self._held(name))
        except AttributeError:
            if name in OF_NNSIGHT:
                return OF_NNSIGHT[name](self)
            where, known = self._path or "the model", children + self._public()
            hint = where_layers_are(self._forward.stage.modules) if self._path.count(".") < 2 else ""
            near = nearest(name, known)
            if meant := hook_hint(name):
                near = f"; {meant} A trace has one value for each layer: model.resid_post[3]."
            raise UnknownModuleError(f"{where} ({self._class_name}) has no {name}{near}{hint}") from None

    def _public(self) -> list[str]:
        return [name for each in type(self).__mro__[:-1] for name in vars(each) if not name.startswith("_")]

    def _held(self, name: str) -> Any:
        found = self._forward.attribute(self._path, self._module, name)
        if isinstance(found, nn.Parameter) and not found.numel():
            raise TraceError(
                f"{self._path}.{name} is empty here: the engine keeps these weights in a form of its own. Apply the module to a value: "
                f"{self._path}(x)."
            )
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and not name.startswith("_"):
            return self._forward.attach(self._path, name, value)
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            raise UnknownModuleError(
                f"{self._path or 'the model'}.{name} cannot be written; write to its .output or .input."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        shown = repr(self._module) if self._module is not None else self._class_name
        return f"{self._path}: {shown}" if self._path else shown

    @property
    def _class_name(self) -> str:
        return self._forward.stage.modules.get(self._path) or type(self._module).__name__


class SitePerLayer:
    """A standard accessor: `accessor[i]` is the site's value at layer i, `[tokens, hidden]`; a slice gives a list in the order of the
    layers.
    """

    def __init__(self, arch: Architecture, site: str, name: str) -> None:
        self._arch = arch
        self._site = site
        self._name = name

    def _at(self, layer: int) -> tuple[Binding, str]:
        """Where the value is, and the value as the user wrote it."""
        if isinstance(layer, slice):
            raise TraceError(f"{self._name} is written at one layer at a time: {self._name}[3] = ..., not at a slice.")
        given = self._index(layer)
        layer = range(self._arch.num_layers)[given] if -self._arch.num_layers <= given < 0 else given
        return self._arch.binding(self._site, layer), f"{self._name}[{given}]"

    def _index(self, layer: Any) -> int:
        try:
            return operator.index(layer)
        except TypeError:
            name = self._name
            raise UnknownSiteError(
                f"{name}[{layer!r}]: a layer is one number, {name}[3], or a slice. Index the value itself after that: {name}[3][-1]."
            ) from None

    def __getitem__(self, layer: int | slice) -> Any:
        if isinstance(layer, slice):
            return [self[each] for each in range(len(self))[layer]]
        binding, written = self._at(layer)
        return current_body().read(binding.key, written, lambda visit: visit.site(binding))

    def __setitem__(self, layer: int, value: torch.Tensor) -> None:
        binding, written = self._at(layer)
        current_body().write(binding.key, written, lambda visit: visit.set_site(binding, real(value), written))

    def __len__(self) -> int:
        return self._arch.num_layers

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))


class AttentionProbabilities(SitePerLayer):
    """`attention_probabilities[i]`: the attention of layer i between the tokens of the prompt, computed again from `attn_q` and `attn_k`,
    `[heads, queries, keys]`. A slice of layers gives a list.
    """

    def __init__(self, arch: Architecture, forward: Forward) -> None:
        super().__init__(arch, "attn_q", "model.attention_probabilities")
        self._forward = forward

    def __getitem__(self, layer: int | slice) -> Any:
        if isinstance(layer, slice):
            return [self[each] for each in range(len(self))[layer]]
        binding, written = self._at(layer)
        keys = self._arch.binding("attn_k", range(len(self))[self._index(layer)])
        return current_body().read(binding.key, written, lambda visit: self._computed(visit, binding, keys))

    def __setitem__(self, layer: Any, value: Any) -> None:
        raise TraceError(
            "attention_probabilities cannot be written: they are computed again from attn_q and attn_k, beside the forward. Write "
            "to those, or to attn_z."
        )

    def _computed(self, visit: Visit, queries: Binding, keys: Binding) -> torch.Tensor:
        module, rows = self._forward.modules[queries.path], visit.rows
        settings = settings_of(module)
        if is_cut(module, rows):
            raise TraceError(
                "attention_probabilities cannot be read at a layer where the plan has a Knockout: they would be those before it. Leave "
                "this layer out of the Knockout and read them there. Then set the cut edges to 0, and divide each row by 1 minus the "
                "probability that you removed."
            )
        if visit.step > 0 or (isinstance(rows, FlatRows) and rows.first_position > 0):
            raise TraceError(
                f"attention_probabilities are those of the prompt, in step 0; this is step {visit.step}, whose keys of earlier "
                "tokens are in the cache. Read them in step 0, or give the generated tokens as part of a prompt."
            )
        if settings.sinks_N is not None and self._forward.peers.several:
            raise TraceError(
                "attention_probabilities of a model with sinks need an engine without tensor parallelism: each rank has its own sinks. "
                "Read attn_q and attn_k."
            )
        q, k = visit.site(queries), visit.site(keys)
        if q.ndim == 3:
            return settings.probabilities(q, k, _mask_of(settings.mask, rows, 0))
        several = [
            settings.probabilities(*each, _mask_of(settings.mask, rows, i))
            for i, each in enumerate(zip(q, k, strict=True))
        ]
        return torch.stack(several)


def _mask_of(mask: torch.Tensor | None, rows: Any, place: int) -> torch.Tensor | None:
    """The part of a batch's attention mask that a request sees, without its padding."""
    if mask is None or mask.ndim != 4:
        return None
    return mask[min(rows.index + place, len(mask) - 1), :, rows.pad :, rows.pad :]


def _site_property(site: str, name: str) -> property:
    def get(self: ModelEnvoy) -> torch.Tensor:
        binding = self._arch.binding(site)
        return current_body().read(binding.key, f"model.{name}", lambda visit: visit.site(binding))

    def put(self: ModelEnvoy, value: torch.Tensor) -> None:
        binding, written = self._arch.binding(site), f"model.{name}"
        current_body().write(binding.key, written, lambda visit: visit.set_site(binding, real(value), written))

    return property(get, put, doc=f"The site `{site}`, `[tokens, hidden]`.")


def _last_property(name: str, doc: str) -> property:
    """The property of a value that is computed after the forward."""
    key, written = ("", name), f"model.{name}"
    return property(lambda _: read_point(key, written), lambda _, value: write_point(key, written, value), doc=doc)


def inside(name: str) -> TraceError:
    """The error for calling a method of the model inside a trace."""
    return TraceError(
        f"model.{name} cannot be called inside of a trace. To trace several prompts, write invokes: `tracer.invoke(prompt)`."
    )


class Generator:
    """`model.generator`: transformers' generation. `output` stands for the final output, and `streamer.output` is the step's token."""

    @property
    def output(self) -> Any:
        return BodyTracer().result

    @property
    def streamer(self) -> Generator:
        return _Streamer()


class _Streamer(Generator):
    @property
    def output(self) -> Any:
        return read_point(("", "samples"), "model.generator.streamer.output")


class ModelEnvoy(Envoy, Sizes):
    """The model in a trace's body: the module tree, and accessors that mean the same on every model and backend.

    Args:
        arch: where the sites are.
        unembed: applies the final norm and the unembedding, `[n, hidden]` -> `[n, vocab]`.
        tokenizer: returns the model's tokenizer.
    """

    def __init__(
        self,
        module: nn.Module,
        arch: Architecture,
        forward: Forward,
        unembed: Callable[[torch.Tensor], torch.Tensor],
        tokenizer: Callable[[], Any],
    ) -> None:
        super().__init__(module, "", forward)
        self._arch = arch
        self._unembed = unembed
        self._tokenizer = tokenizer
        self._generator: Generator | None = None  # LanguageModel has one

    def on(self, forward: Forward) -> ModelEnvoy:
        """The same model, for bodies that `forward` runs."""
        return ModelEnvoy(self._module, self._arch, forward, self._unembed, self._tokenizer)

    @property
    def attention_probabilities(self) -> AttentionProbabilities:
        """`attention_probabilities[i]`: the attention of layer i between the prompt's tokens, `[heads, queries, keys]`. The row of a query
        sums to 1, less the share of a sink. They can be read in step 0, and not written.
        """
        return AttentionProbabilities(self._arch, self._forward)

    logits = _last_property("logits", "The next token's logits, `[1, vocab]`.")
    samples = _last_property(
        "samples",
        "The token sampled in this step, `[1]`, integer. Write another token here to continue the request with it.",
    )
    token_embeddings = _site_property("embed", "token_embeddings")
    embed = _site_property("embed", "embed")
    final_norm = _site_property("final_norm", "final_norm")

    def __getattr__(self, name: str) -> Any:
        site = site_of(name)
        if site in LAYER_SITES:
            return SitePerLayer(self._arch, site, f"model.{name}")
        if name in ("trace", "run", "generate", "record", "edit"):
            raise inside(name)
        return super().__getattr__(name)

    def _public(self) -> list[str]:
        return [*ACCESSORS, *LAYER_SITES, *super()._public()]

    @property
    def _text_config(self) -> Any:
        return text_config(self._module)

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
    def generator(self) -> Generator:
        """On `LanguageModel`: `generator.output` is `tracer.result`, `generator.streamer.output` is `samples`."""
        if self._generator is None:
            raise TraceError(
                "model.generator is transformers'. On vLLM read tracer.result, the request's output, and model.samples, the token of each "
                "step."
            )
        return self._generator

    @property
    def next_token_probs(self) -> torch.Tensor:
        """`softmax(logits)`, `[1, vocab]`, float32."""
        return self.logits.float().softmax(-1)

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logit lens (nostalgebraist, 2020): final norm and unembedding of `hidden`, `[n, hidden]` -> `[n, vocab]`."""
        if not isinstance(hidden, StageValue) and hidden.shape[-1] != self.hidden_size:
            raise ShapeError(f"project_on_vocab takes [n, {self.hidden_size}]; {list(hidden.shape)} was given.")
        norm = self._arch.binding("final_norm")  # raises a clear error if there is none
        return self._computed(
            norm.path, "model.project_on_vocab(...)", lambda: self._apart(self._unembed, (real(hidden),), {})
        )

    def steer(
        self,
        layers: int | list[int],
        vector: torch.Tensor,
        factor: float = 1.0,
        positions: int | slice | list[int] | None = None,
    ) -> None:
        """Add `factor * vector` to the residual stream after each of `layers`.

        Args:
            vector: `[hidden]`, or `[tokens, hidden]`.
            positions: of this step; None for all.
        """
        chosen = [layers] if isinstance(layers, int) else list(layers)
        if out := [i for i in chosen if not -self.num_layers <= i < self.num_layers]:
            raise UnknownSiteError(f"steer: layers {out} are out of range; the model has {self.num_layers}.")
        for layer in sorted(i % self.num_layers for i in chosen):
            hidden = self.layers_output[layer]
            if isinstance(hidden, StageValue):
                continue
            added = factor * real(vector).to(hidden)
            if positions is None:
                hidden += added
            else:
                hidden[..., positions, :] += added  # on LanguageModel there may be a batch axis before the tokens
            self.layers_output[layer] = hidden

    def skip_layers(self, start: int, end: int | None = None) -> None:
        """Skip layers `start` to `end`, inclusive: the residual stream passes them unchanged. `end=None` skips `start` only."""
        end = start if end is None else end
        first, last = (layer + self.num_layers if layer < 0 else layer for layer in (start, end))
        if not 0 <= first <= last < self.num_layers:
            raise UnknownSiteError(f"skip_layers({start}, {end}): layers run from 0 to {self.num_layers - 1}.")
        start, end = first, last
        before = self.layers_input[start]
        self.layers_output[end] = before if isinstance(before, StageValue) else before.clone()

    def __repr__(self) -> str:
        return f"<model: {type(self._module).__name__}, {self.num_layers} layers>"


class AbsentModel(ModelEnvoy):
    """A model whose modules are in another process: here are only the facts about it.

    Args:
        text_config: returns the model's transformers configuration.
        refuse: raises an error with the given reason. It is called where the code needs the modules.
    """

    def __init__(
        self,
        arch: Architecture,
        forward: Forward,
        unembed: Callable[[torch.Tensor], torch.Tensor],
        tokenizer: Callable[[], Any],
        text_config: Callable[[], Any],
        refuse: Callable[[str], NoReturn],
    ) -> None:
        absent: Any = None
        super().__init__(absent, arch, forward, unembed, tokenizer)
        self._config, self._refuse = text_config, refuse

    @property
    def attention_probabilities(self) -> NoReturn:
        self._refuse("it reads attention_probabilities, which need the settings of the model's attention")

    @property
    def _text_config(self) -> Any:
        return self._config()

    def resolve(self, reference: tuple[Any, ...]) -> Any:
        """The object for a reference in a shipped trace."""
        kind, *rest = reference
        if kind == "model":
            return self
        return BodyTracer() if kind == "tracer" else Envoy(None, rest[0], self._forward)
