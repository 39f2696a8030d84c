"""Runs the code of traces that only keep rows of activations, in the caller's process, after their requests have ended.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]

A plan has captured the rows. The code reads them step by step, in the order of the forward, as in the engine.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch

from midstream.sites import Point, site_of
from midstream.trace.body import CURRENT, Body, current_body, never_reached, out_of_order, step_is_over
from midstream.trace.program import Outcome, Program, copies, outcome
from midstream.trace.tracer import BodyTracer


@dataclass(frozen=True)
class CapturedSteps:
    """The rows that one request has captured for its trace.

    Attributes:
        planes: `[rows, width]` for each point, in the order of the positions.
        prompt: how many rows of each plane belong to the prompt: 1 if only its last row was captured.
        count: how many steps the request had.
        names: the name of each point in error messages.
    """

    planes: Mapping[Point, torch.Tensor]
    prompt: int
    count: int
    names: Mapping[Point, str]

    def of(self, point: Point) -> tuple[torch.Tensor, ...]:
        """Copies of the point's rows for each step, `[tokens, width]`."""
        plane = self.planes[point].clone(memory_format=torch.contiguous_format)
        return plane[: self.prompt], *(plane[self.prompt :].split(1) if len(plane) > self.prompt else ())


def programs_here(programs: Sequence[Program], num_layers: int) -> list[Program]:
    """Copies of the programs, for `run_kept`. Like an engine's, they do not see later changes of variables."""
    model = _Model(num_layers)
    return copies(programs, lambda reference: {"model": model, "tracer": BodyTracer()}.get(reference[0]))


def run_kept(program: Program, captured: CapturedSteps, num_layers: int) -> Outcome:
    """Run a program of `programs_here` that only keeps rows, and return its outcome."""
    body = KeptBody(captured)
    token = CURRENT.set(body)
    try:
        body.result = program.run(_Model(num_layers), {})
    except Exception as error:
        body.failure = error
    finally:
        CURRENT.reset(token)
    found = outcome(body, program)
    found.order = found.steps  # of requests that begin together, it tells which body has ended last
    return found


class KeptBody(Body):
    """A body that runs after all its steps have ended. It never waits."""

    def __init__(self, captured: CapturedSteps) -> None:
        super().__init__("kept", lambda: None, in_engine=True)
        self.now, self.ended = 0, captured.count == 0
        self._captured = captured
        self._steps: dict[Point, tuple[torch.Tensor, ...]] = {}
        self._layer = -1  # the layer that it read last in this step

    def wait_for_step(self, step: int) -> bool:
        if step < self.now:
            raise step_is_over(step, self.now)
        self.step = step
        if step == self.now:
            return True
        last = self._captured.count - 1
        self.ended = step > last
        self.now, self._layer = min(step, last), -1
        return not self.ended

    def rows(self, site: str, layer: int) -> torch.Tensor:
        """`[tokens, width]`, the site's value in its step."""
        if self.ended or layer < self._layer:
            self._refuse(site, layer)
        if (point := (site, layer)) not in self._steps:
            self._steps[point] = self._captured.of(point)
        rows = self._steps[point][self.step]
        if layer == self._layer:  # what is read again has memory of its own
            return rows.clone()
        self._layer = layer
        return rows

    def _refuse(self, site: str, layer: int) -> NoReturn:
        names, step = self._captured.names, self.step
        if self.ended:
            raise never_reached(names[site, layer], step)
        raise out_of_order(names[site, layer], step, f"{names[site, self._layer]} of step {step}")

    def save(self, value: Any) -> Any:
        kept = value.clone() if isinstance(value, torch.Tensor) else value
        self.saves.put(value, kept)
        self.saves.put(kept, kept)
        return kept


class _Model:
    """What such code uses of the model: accessors of sites, and the number of layers."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def __getattr__(self, name: str) -> _Layers:
        found = _Layers(site_of(name), self.num_layers)
        self.__dict__[name] = found
        return found


class _Layers:
    def __init__(self, site: str, num_layers: int) -> None:
        self._site, self._layers = site, range(num_layers)

    def __getitem__(self, layer: int) -> torch.Tensor:
        return cast(KeptBody, current_body()).rows(self._site, self._layers[operator.index(layer)])
