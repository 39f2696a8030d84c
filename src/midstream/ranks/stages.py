"""The pipeline stages of a model: which modules each stage has built, and how stages send each other values."""

from __future__ import annotations

import functools
import pkgutil
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from midstream.arch import Architecture
from midstream.arch.blocks import is_a
from midstream.errors import MidstreamError, NeverReachedError, SourceUnavailableError, StageFailedError, text_of
from midstream.ranks.link import Fetch, Link
from midstream.sites import Key
from midstream.trace.forward import LAST_POINTS
from midstream.trace.parallel import CALL, Claim, Origin, Stage
from midstream.tree import Opaque, map_tensors

_STAGE_MOMENTS = 1 << 40  # larger than the number of inputs and outputs in one stage's forward


@dataclass(frozen=True)
class StageParts:
    """A stage's description, for the other stages.

    Attributes:
        arch: the stage's part of the architecture.
        built: path -> class, as `package.module:Class`, of each module that the stage built. Placeholders are left out.
    """

    arch: Architecture
    built: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module, arch: Architecture) -> StageParts:
        modules = dict(model.named_modules())
        # A plain Identity is a module of the model.
        kinds = {path: type(module) for path, module in modules.items() if not is_a(module, "PPMissingLayer")}
        built = {path: f"{kind.__module__}:{kind.__qualname__}" for path, kind in kinds.items()}
        # vLLM's Transformers backend also calls the placeholders of other stages' layers.
        order = {(path, kind): moments for (path, kind), moments in arch.order.items() if path in built}
        shapes = {path: shape for path, shape in arch.shapes.items() if path in built}
        shards = {(path, kind): leaves for (path, kind), leaves in arch.shards.items() if path in built}
        return cls(replace(arch, order=order, shapes=shapes, shards=shards), built)


def merged_architecture(parts: Sequence[Architecture]) -> Architecture:
    """The model's architecture, merged from the parts of its stages, in order. Moments are numbered through the whole model's forward.

    A module that lies in several stages, like one that contains all layers, begins in the first of them and ends in the last.
    """
    order: dict[tuple[str, str], tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for key, (first, last) in part.order.items():
            if key in order and key[1] == "input":
                continue
            order[key] = (first + number * _STAGE_MOMENTS, last + number * _STAGE_MOMENTS)
    return replace(
        parts[-1],
        layers=tuple(sorted({layer for part in parts for layer in part.layers})),
        bindings={point: binding for part in parts for point, binding in part.bindings.items()},
        order=order,
        shapes={path: shape for part in parts for path, shape in part.shapes.items()},
        widths={point: width for part in parts for point, width in part.widths.items()},
        shards={place: leaves for part in parts for place, leaves in part.shards.items()},
    )


class Reference(Opaque):
    """A parameter that another stage may fetch. It is not copied before it is sent; it arrives as a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        return torch.Tensor.detach, (self._tensor.detach(),)


class Stages(Stage):
    """This stage, with the descriptions of all stages and the link to the others.

    Args:
        parts: the description of every stage, in order.
        link: to the ranks of the other stages that have the same tensor-parallel rank.
        device: where the forward computes.

    Attributes:
        index: number of this stage.
        size: how many stages there are.
        arch: architecture of the whole model.
        modules: path -> class name of every module that some stage built.
    """

    def __init__(self, parts: Sequence[StageParts], link: Link, device: torch.device) -> None:
        self.index, self.size = link.rank, len(parts)
        self.link = link
        self.arch = merged_architecture([part.arch for part in parts])
        self._built = {path: name for part in parts for path, name in part.built.items()}
        self.modules = {path: name.rpartition(":")[2] for path, name in self._built.items()}
        self._device = device
        self._waived: deque[tuple[int, str, int]] = deque()
        self._owner = {key: moments[0] // _STAGE_MOMENTS for key, moments in self.arch.order.items()}
        self._builder = {path: number for number, part in enumerate(parts) for path in part.built}
        self._children: dict[str, list[str]] = {}
        for path in filter(None, self.modules):
            parent, _, name = path.rpartition(".")
            self._children.setdefault(parent, []).append(name)

    def of(self, key: Key) -> int:
        """The stage that owns a point; for a module that the forward does not call, the last stage that built it."""
        if key in LAST_POINTS:
            return self.size - 1
        if key[-1] == CALL:
            return self._builder.get(key[0], self.index)
        kind = key[1] if len(key) == 2 else "output"
        return self._owner.get((key[0], kind), self._builder.get(key[0], self.index))

    def begin_of(self, stage: int) -> int:
        return stage * _STAGE_MOMENTS

    def has(self, key: Key) -> bool:
        return self.of(key) == self.index

    def children_of(self, path: str) -> list[str]:
        return self._children.get(path, [])

    def class_of(self, path: str) -> type[nn.Module]:
        """The class of a module, on any stage. Raises SourceUnavailableError if it cannot be imported here."""
        try:
            return pkgutil.resolve_name(self._built[path])
        except (ImportError, AttributeError, ValueError):
            raise SourceUnavailableError(
                f"{path} is on another pipeline stage, and its class {self._built[path]} cannot be imported on this one."
            ) from None

    def width_of(self, key: Key) -> int | None:
        if len(key) != 2 or key[1] != "output":
            return None
        shape = self.arch.shapes.get(key[0], "")
        return _parts_in(shape) if shape.startswith("(") else None

    # Values.

    def publish(self, body: str, number: int, key: Key, value: Callable[[], Any]) -> Any:
        """Compute a value of this stage and publish a copy of it. If that raises, the other stages get an error."""
        try:
            found = value()
        except Exception as error:
            text = f"The value cannot be read on pipeline stage {self.index}: {type(error).__name__}: {text_of(error)}"
            self.link.refuse(body, number, StageFailedError(text))
            raise
        with torch.inference_mode(False):
            copies = map_tensors(found, lambda _, t: Reference(t) if isinstance(t, nn.Parameter) else t.clone())
        self.link.publish(body, number, copies, place=key)
        return found

    def silence(self, body: str, failure: BaseException | None) -> None:
        """The body's code has ended. Tell the other stages at once: one of them may wait for a value of the body while this stage, in
        another body, waits for that stage.
        """
        self.link.silence(body, self._why_over(failure))

    def end(self, body: str, failure: BaseException | None) -> None:
        """The body is over. The values that it published are forgotten."""
        self.link.end(body, self._why_over(failure))

    def _why_over(self, failure: BaseException | None) -> MidstreamError:
        """The error that later fetches of the body's values raise. `failure`: the error of the body's code, if it failed."""
        if failure is None:
            return NeverReachedError("The value was never reached: the trace ended without it.")
        text = f"The trace failed on pipeline stage {self.index}: {type(failure).__name__}: {text_of(failure)}"
        return StageFailedError(text)

    def claim(self, stage: int, body: str, number: int) -> Claim:
        """While the claim lives, this stage may fetch the value. When the claim has died, the next `end_step` tells the owner."""
        return Claim(functools.partial(self._waived.append, (stage, body, number)))

    def end_step(self, bodies: Collection[str]) -> None:
        """Tell the other stages which values `bodies` will not fetch, and move published values off the device."""
        waived: defaultdict[int, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        while self._waived:
            stage, body, number = self._waived.popleft()
            if body in bodies:  # else the body is over
                waived[stage][body].append(number)
        for stage, numbers in waived.items():
            self.link.waive(stage, numbers)
        self.link.end_step()

    def fetch(self, place: Origin) -> Fetch:
        return self.link.fetch(place.stage, place.body, place.number, place.ref)

    def received(self, fetch: Fetch) -> Any:
        with torch.inference_mode(False):
            return map_tensors(fetch.wait(), lambda _, tensor: tensor.to(self._device, copy=True))

    def wait_any(self, fetches: Iterable[Fetch]) -> None:
        self.link.wait_any(list(fetches))


def _parts_in(shape: str) -> int:
    """How many values a written shape such as `([T, 64], [T, 64])` has."""
    depth, count = 0, 0
    for sign in shape[1:-1].rstrip(","):
        depth += (sign in "([{") - (sign in ")]}")
        count += sign == "," and not depth
    return count + 1 if shape.strip("()") else 0
