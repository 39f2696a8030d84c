"""The client's view, outside of traces, of a model in other processes. It is made from a description that the workers send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from midstream.arch import Architecture
from midstream.arch.aliases import Aliases
from midstream.arch.detect import show_tree
from midstream.client.trace_model import TraceModel
from midstream.client.tracing import BlockContext
from midstream.errors import TraceError, UnknownModuleError
from midstream.lowering.taping import explained, lower_trace
from midstream.lowering.tiers import Lowering
from midstream.plan.values import ModelFacts, Plan
from midstream.requests.arguments import check_ids, encode
from midstream.requests.invokes import Invoke, token_ids
from midstream.sites import ACCESSORS, LAYER_SITES, Binding
from midstream.trace.block import Block
from midstream.trace.code import BlockProgram, FunctionProgram, TraceProgram
from midstream.trace.envoy import OF_NNSIGHT, ModuleTree, by_path, lines_of, nearest, where_layers_are
from midstream.trace.record import Model
from midstream.trace.shipping import ShippedCode, ship
from midstream.trace.tracer import BodyTracer

_IN_TRACES = (
    "logits",
    "samples",
    "next_token_probs",
    "attention_probabilities",
    "project_on_vocab",
    "steer",
    "skip_layers",
)
_VALUES = ("output", "input", "inputs")
_CONTENTS = ("parameters", "named_parameters", "state_dict", "weight", "bias")


class ModuleHandle(ModuleTree):
    """Stands for a module outside of a trace: gives its children, its text and its weights. In a trace, the module takes its place.

    A request of one token reads the weights. It runs without the model's edits and plan.
    """

    def __init__(self, path: str, model: DescribedModel) -> None:
        self._path = path
        self._model = model

    def __midstream_reference__(self) -> Any:
        return ("module", self._path)

    @property
    def _below(self) -> list[str]:
        """The paths of all modules in this one, relative to it."""
        start = f"{self._path}." if self._path else ""
        names = [path[len(start) :] for path in self._model.description["modules"] if path.startswith(start)]
        return [name for name in names if name]

    @property
    def _children(self) -> list[str]:
        return [name for name in self._below if "." not in name]

    def _child(self, name: str) -> ModuleHandle:
        return ModuleHandle(f"{self._path}.{name}" if self._path else name, self._model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        children = self._children
        if name in children:
            return self._child(name)
        described = self._model.description
        path = self._model.aliases.resolve(self._path, name, described["modules"])
        if path is not None:
            return ModuleHandle(path, self._model)
        if name in _VALUES:
            raise TraceError(
                f"{self._path}.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
            )
        if name in _CONTENTS and self._path:
            return self._contents(name)
        if name in _TREE:
            return _TREE[name](self)
        known = [*children, *((*_CONTENTS, "source") if self._path else (*ACCESSORS, *LAYER_SITES, *_IN_TRACES))]
        hint = where_layers_are(self._model.description["modules"]) if self._path.count(".") < 2 else ""
        raise UnknownModuleError(f"{self._path or 'the model'} has no module {name}{nearest(name, known)}{hint}")

    def _named_modules(self) -> Iterator[tuple[str, ModuleHandle]]:
        """This module and all in it, with their paths relative to it."""
        yield "", self
        yield from ((name, self._child(name)) for name in self._below)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise TraceError(
                f"{self._path}.{name} cannot be set: the model is in another process. Use the object as a variable of the trace, "
                f"`{name}(model.layers_output[3])`, which is sent with it; values are written in a trace."
            )
        super().__setattr__(name, value)

    def _contents(self, name: str) -> Any:
        if name in ("weight", "bias"):
            return self._read(name, partial(_copies, self._path, name))
        state: dict[str, Any] = {}

        def read() -> dict[str, Any]:
            return state or self._read(name, partial(_copies, self._path, None))

        if name == "state_dict":
            return read
        return (lambda: iter(read().items())) if name == "named_parameters" else (lambda: iter(read().values()))

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        """Call `read` in a trace, and return its result. `name`: what it reads, for errors."""
        if self._model._is_async:
            raise TraceError(
                f"With mode='async', read {self._path}.{name} in a trace: `await model.run(lambda m: m.{self._path}.{name}, prompt)`."
            )
        if self._model.is_sharded:
            raise TraceError(
                f"{self._path}.{name}: each tensor-parallel rank has a part of it. Load the checkpoint to read weights."
            )
        return self._model.without_edits().run(read, [0])

    @property
    def source(self) -> SourceText:
        """The module's forward, with the calls that a trace can read and write: `print(model.model.layers[0].source)`."""
        return SourceText(f"{self._path}.source", *self._read("source", partial(_source, self._path)))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        described, size = self._model.description, len(self._path) + 1
        inside = {path for path in described["modules"] if f"{path}.".startswith(f"{self._path}.")}
        modules, shapes = (
            {path[size:]: each for path, each in described[what].items() if path in inside}
            for what in ("modules", "shapes")
        )
        aliases = self._model.aliases.table(described["modules"])
        own = {(owner[size:], name): path[size:] for (owner, name), path in aliases.items() if owner in inside}
        return show_tree(modules, shapes, aliases=own)


class SourceText:
    """The text of a forward or of a function that it calls, with the names of the calls at their lines.

    Args:
        path: how a trace addresses the source, such as `model.layers.3.mlp.source`.
        inside: name of a call -> the text of the called function and the names of the calls in it, or the reason why it has no source.
    """

    def __init__(self, path: str, text: str, names: Sequence[str], inside: Mapping[str, Any]) -> None:
        self._path, self._text, self._names, self._inside = path, text, names, inside

    def __getattr__(self, name: str) -> CallText:
        if name in self.__dict__.get("_names", ()):
            return CallText(f"{self._path}.{name}", lines_of(name, self._text), self._inside.get(name))
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownModuleError(
            f"{self._path} has no call {name}{nearest(name, list(self._names))} It has {', '.join(self._names) or 'none'}."
        )

    def __dir__(self) -> Sequence[str]:
        return self._names

    def __repr__(self) -> str:
        return self._text


class CallText:
    """A call in a forward outside of a trace: it has a source to print and no values."""

    def __init__(self, path: str, lines: str, inside: Any) -> None:
        self._path, self._lines, self._inside = path, lines, inside

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name != "source" or self._inside is None:
            raise TraceError(f"{self._path}.{name} exists only in a trace: `with model.trace(prompt):`.")
        if isinstance(self._inside, str):
            raise TraceError(self._inside)
        text, names = self._inside
        return SourceText(f"{self._path}.source", text, names, {})

    def __dir__(self) -> Sequence[str]:
        return ["source", *_VALUES, "skip"]

    def __repr__(self) -> str:
        return self._lines


def _copies(path: str, name: str | None, model: Any) -> Any:
    """A parameter of a module, or its state dict."""
    module = by_path(model, path)
    if name is not None:
        return getattr(module, name).detach().clone()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _source(path: str, model: Any) -> Any:
    source = by_path(model, path).source
    return str(source), dir(source), {name: _source_inside(getattr(source, name)) for name in dir(source)}


def _source_inside(call: Any) -> Any:
    try:
        inside = call.inside()
    except TraceError as error:
        return str(error)
    return str(inside), dir(inside)


class DescribedModel(TraceModel):
    """A model whose traces run in other processes, on copies of their variables."""

    def __midstream_reference__(self) -> Any:
        return ("model",)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _code(self, invokes: Sequence[Invoke]) -> ShippedCode | None:
        """The code that runs in the invokes' forward passes, the model's edits first. Raises TraceError for a value that cannot be sent."""
        programs = self._programs(invokes)
        return ship(programs, self._is_elsewhere) if any(programs) else None

    def _programs(self, invokes: Sequence[Invoke]) -> list[list[TraceProgram]]:
        edits = list(self.edits.values())
        return [
            [
                *(edits if invoke.edits is None else invoke.edits),
                *([invoke.program] if invoke.program is not None else []),
            ]
            for invoke in invokes
        ]

    def _token_ids(self, invoke: Invoke) -> list[int]:
        ids = token_ids(invoke, lambda: self.tokenizer, self._architectures)
        check_ids(ids, self.vocab_size, self.longest_prompt)
        return ids

    def _lower(self, invokes: Sequence[Invoke], prompts: Sequence[list[int]], code: ShippedCode) -> Lowering:
        """Find out how the traces of `invokes` can run. `prompts`: each invoke's token ids; `code`: the code of the traces."""
        assert self.longest_prompt is not None
        rooms = [self.longest_prompt + 1 - len(ids) for ids in prompts]
        asked = [invoke.params.get("max_tokens") for invoke in invokes]
        steps = [max(1, room if most is None else min(room, most)) for room, most in zip(rooms, asked, strict=True)]
        return lower_trace(self._programs(invokes), code, self._known, list(map(len, prompts)), steps)

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites."""
        raise NotImplementedError

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        described = self.description
        points = ((*point.split("/"), width) for point, width in described["widths"].items())
        widths = {(site, int(layer)): width for site, layer, width in points}
        heads = {_point(text): binding[4] for text, binding in described.get("bindings", {}).items()}
        head_dims: Any = {point: given[1] for point, given in heads.items() if given is not None}
        unsupported = {int(layer): reason for layer, reason in described.get("unsupported_attention", {}).items()}
        stages = described.get("stages", ())
        return ModelFacts(described["num_layers"], widths, described["dtype"], stages, head_dims, unsupported)

    def explain(self, fn: Callable[..., Any] | None = None, prompt: Any = None) -> Any:
        """Explain a trace's code line by line: what a plan does, what is captured, and what stays in the forward.

            print(model.explain(fn))        # fn(model) or fn(model, tracer), as for `run`
            with model.explain():           # prints it; the block is not run
                model.layers_output[10] += v

        Nothing is computed. The text ignores `n`, the plan of a trace, and edits of the model.

        Args:
            prompt: as for `run`. Give it if the code fits prompts of one length only, for example by a factor for each token. None assumes
                512 tokens.

        Returns:
            The text, for a function. A notebook shows it without `print`.
        """
        length = None if prompt is None else len(encode(prompt, lambda: self.tokenizer))
        if fn is None:
            return ExplainContext(self, length)
        return Explanation(explained(FunctionProgram(fn), self._known, length))

    @cached_property
    def _known(self) -> Model:
        """The facts about the model that are known before a trace runs."""
        described = self.description
        bindings = {
            _point(text): Binding(path, kind, tuple(hidden), _tuple(residual), _tuple(heads), scale, in_place)
            for text, (path, kind, hidden, residual, heads, scale, in_place) in described["bindings"].items()
        }
        order = {(path, kind): (first, last) for path, kind, first, last in described["order"]}
        widths: Any = {_point(text): width for text, width in described["widths"].items()}
        layers = tuple(range(described["num_layers"]))
        arch = Architecture(len(layers), layers, described["hidden_size"], bindings, order, described["shapes"], widths)
        return Model(
            arch,
            described["modules"],
            described["free_sites"],
            getattr(torch, described["dtype"]),
            torch.device(described["device"]),
            self.vocab_size,
            self.aliases,
            lambda: self.tokenizer,
            lambda: self._text_config,
            not self._is_elsewhere,
            self.facts.are_together,
        )

    @property
    def _architectures(self) -> list[str] | None:
        return getattr(self._text_config, "architectures", None)

    @property
    def num_layers(self) -> int:
        """The number of layers, in all pipeline stages together."""
        return self.description["num_layers"]

    @property
    def device_type(self) -> str:
        """The type of the engine's devices, as in "cuda"."""
        return self.description["device"].partition(":")[0]

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.description["hidden_size"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_connection" not in self.__dict__:
            raise AttributeError(name)
        if name in (*ACCESSORS, *LAYER_SITES, *_IN_TRACES):
            raise TraceError(
                f"model.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
            )
        return getattr(ModuleHandle("", self), name)

    @cached_property
    def aliases(self) -> Aliases:
        """The additional names of modules, from the engine's setting `rename`."""
        found = Aliases(self.description.get("rename"))
        found.warn(self.description["modules"])
        return found

    def without_edits(self) -> Self:
        """A view of the model without edits and without a plan."""
        view = self._view()
        view.edits, view._plan = {}, Plan()
        return view

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded over several tensor-parallel ranks."""
        return False

    def __repr__(self) -> str:
        described = self.description
        aliases = self.aliases.table(described["modules"])
        return show_tree(described["modules"], described["shapes"], described["sites"], aliases)


class Explanation(str):
    """A text that a notebook shows unquoted."""

    def __repr__(self) -> str:
        return str(self)


class ExplainContext(BlockContext):
    """`with model.explain():`"""

    def __init__(self, model: DescribedModel, length: int | None) -> None:
        super().__init__()
        self._model, self._length = model, length

    def _captured(self, block: Block, frame: FrameType) -> None:
        injected = {block.target: BodyTracer()} if isinstance(block.target, str) else {}
        program, known = BlockProgram(block, injected), self._model._known
        print(explained(program, known, self._length, is_streamed=self._model._is_async))


# Methods of PyTorch's and nnsight's modules that describe the tree.
_TREE: dict[str, Callable[[ModuleHandle], Any]] = {
    "named_modules": lambda handle: handle._named_modules,
    "modules": lambda handle: lambda: (module for _, module in handle._named_modules()),
    "named_children": lambda handle: lambda: ((name, handle._child(name)) for name in handle._children),
    "children": lambda handle: lambda: iter(handle),
    **OF_NNSIGHT,
}


def _point(text: str) -> tuple[str, int | None]:
    """`resid_post/3` as a point, and `embed/` as a site that the model has once."""
    site, layer = text.split("/")
    return site, int(layer) if layer else None


def _tuple(given: Any) -> Any:
    return None if given is None else tuple(given)
