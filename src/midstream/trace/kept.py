"""Runs a trace that only keeps rows of activations, in the caller's process, when its request has ended.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]

A plan has captured the rows. The code finds them step by step, in the order of the forward, as it would in the engine.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from midstream.sites import Point, site_of
from midstream.trace.body import CURRENT, Body, is_over, never_reached, out_of_order
from midstream.trace.program import BlockProgram, Outcome, Program, is_model, outcome


@dataclass(frozen=True)
class CapturedSteps:
    """The rows that one request has captured for its trace.

    Attributes:
        planes: `[rows, width]` for each point, in the order of the positions. Saved values are views of them.
        prompt: how many rows of each are of the prompt.
        count: how many steps the request had.
        names: of the points, for messages.
    """

    planes: Mapping[Point, torch.Tensor]
    prompt: int
    count: int
    names: Mapping[Point, str]

    def of(self, point: Point) -> tuple[torch.Tensor, ...]:
        """`[tokens, width]` for each step."""
        plane = self.planes[point]
        return plane[: self.prompt], *plane[self.prompt :].split(1)


def run_kept(program: Program, captured: CapturedSteps, num_layers: int) -> Outcome:
    """The outcome of a trace's code, which is one for which `keeps_rows` has said so."""
    body = KeptBody(captured)
    model = _Model(body, num_layers)
    if isinstance(program, BlockProgram):
        names = [name for name, value in program.block.captured.items() if is_model(value)]
        program = replace(program, injected={**program.injected, **dict.fromkeys(names, model)})
    token = CURRENT.set(body)
    try:
        body.result = program.run(model, {})
    except Exception as error:
        body.failure = error
    finally:
        CURRENT.reset(token)
    return outcome(body, program)


class KeptBody(Body):
    """A body whose steps are over, so that it never waits."""

    def __init__(self, captured: CapturedSteps) -> None:
        super().__init__("kept", lambda: None, in_engine=True)
        self.now = 0
        self._captured = captured
        self._steps: dict[Point, tuple[torch.Tensor, ...]] = {}
        self._layer = -1  # that it has read last in this step
        self._saved: set[int] = set()  # the addresses of saved tensors

    def wait_for_step(self, step: int) -> bool:
        if step < self.now:
            raise is_over(step, self.now)
        self.step, self.ended = step, step >= self._captured.count
        if step > self.now:
            self.now, self._layer = min(step, self._captured.count - 1), -1
        return not self.ended

    def rows(self, site: str, layer: int) -> torch.Tensor:
        """`[tokens, width]`, the site's value in its step."""
        if self.ended or layer < self._layer:
            self._refuse(site, layer)
        self._layer = layer
        if (point := (site, layer)) not in self._steps:
            self._steps[point] = self._captured.of(point)
        return self._steps[point][self.step]

    def _refuse(self, site: str, layer: int) -> NoReturn:
        names, step = self._captured.names, self.step
        if self.ended:
            raise never_reached(names[site, layer], step)
        raise out_of_order(names[site, layer], step, f"{names[site, self._layer]} of step {step}")

    def save(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.data_ptr() in self._saved:  # each saved tensor has memory of its own
                value = value.clone()
            self._saved.add(value.data_ptr())
        self.saves.put(value, value)
        return value


class _Model:
    """The model as such code uses it: accessors of sites, and its number of layers."""

    def __init__(self, body: KeptBody, num_layers: int) -> None:
        self._body, self.num_layers = body, num_layers

    def __getattr__(self, name: str) -> _Layers:
        found = _Layers(self._body, site_of(name), self.num_layers)
        self.__dict__[name] = found
        return found


class _Layers:
    def __init__(self, body: KeptBody, site: str, num_layers: int) -> None:
        self._body, self._site, self._layers = body, site, range(num_layers)

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._body.rows(self._site, self._layers[operator.index(layer)])
