"""A model in other processes, as its client sees it outside of traces: by the description that its workers give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from midstream.arch.detect import show_tree
from midstream.client.model import TraceModel
from midstream.client.requests import Invoke
from midstream.errors import TraceError, UnknownModuleError
from midstream.plan.values import ModelFacts
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.envoy import nearest
from midstream.trace.program import ShippedCode, ship

_IN_TRACES = ("logits", "samples", "next_token_probs", "project_on_vocab", "steer", "skip_layers")
_HELD = ("weight", "bias", "parameters", "state_dict", "forward")


class ModuleHandle:
    """Refers to a module of the model outside of a trace. Inside a trace it is the module."""

    def __init__(self, path: str, paths: frozenset[str]) -> None:
        self._path = path
        self._paths = paths

    def __midstream_reference__(self) -> Any:
        return ("module", self._path)

    def _child(self, name: str) -> ModuleHandle:
        path = f"{self._path}.{name}" if self._path else name
        if path not in self._paths:
            if name in ("output", "input", "inputs", "source"):
                raise TraceError(
                    f"{self._path}.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
                )
            if name in _HELD:
                raise TraceError(
                    f"Read the contents of modules in a trace: `model.run(lambda m: m.{self._path}.{name}, prompt)`. Outside of one the "
                    "model is only the tree of its modules."
                )
            siblings = [p.rpartition(".")[2] for p in self._paths if p.rpartition(".")[0] == self._path]
            siblings += [] if self._path else [*ACCESSORS, *LAYER_SITES, *_IN_TRACES]
            raise UnknownModuleError(f"{self._path or 'the model'} has no module {name}{nearest(name, siblings)}")
        return ModuleHandle(path, self._paths)

    def __getattr__(self, name: str) -> ModuleHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._child(name)

    def __getitem__(self, index: int) -> ModuleHandle:
        return self._child(str(index))

    def __repr__(self) -> str:
        return f"<{self._path}>"


class DescribedModel(TraceModel):
    """A model whose traces run in other processes, on copies of what they use."""

    _ships = True
    _is_elsewhere = False  # whether on another machine

    def __midstream_reference__(self) -> Any:
        return ("model",)

    async def start(self) -> Self:
        """Make the model ready, for `async with`."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _code(self, invokes: Sequence[Invoke]) -> ShippedCode | None:
        """The code that runs in the invokes' forward passes, the model's edits first. Raises TraceError for what cannot be sent."""
        edits = list(self.edits.values())
        programs = [
            [
                *(edits if invoke.edits is None else invoke.edits),
                *([invoke.program] if invoke.program is not None else []),
            ]
            for invoke in invokes
        ]
        return ship(programs, self._is_elsewhere) if any(programs) else None

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites."""
        raise NotImplementedError

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        described = self.description
        points = ((*point.split("/"), width) for point, width in described["widths"].items())
        return ModelFacts(
            described["num_layers"], {(site, int(layer)): width for site, layer, width in points}, described["dtype"]
        )

    @property
    def num_layers(self) -> int:
        """Of all pipeline stages together."""
        return self.description["num_layers"]

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.description["hidden_size"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_connection" not in self.__dict__:
            raise AttributeError(name)
        if name in ACCESSORS or name in _IN_TRACES:
            raise TraceError(
                f"model.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
            )
        return getattr(ModuleHandle("", frozenset(self.description["modules"])), name)

    def __repr__(self) -> str:
        described = self.description
        return show_tree(described["modules"], described["shapes"], described["sites"])
