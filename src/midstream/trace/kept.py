"""Runs the code of traces that only keep rows of activations, in the caller's process, after their requests have ended.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]

A plan has captured the rows. Such code never looks at values, so it runs on `KeptRows`, which only know the places of rows. It runs
step by step, in the order of the forward. Then captured rows replace these stand-ins in what it has kept. Requests that follow each other
and have the same program and number of steps share one run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
import torch

from midstream.sites import Point, site_of
from midstream.trace.body import CURRENT, Body, current_body, never_reached, out_of_order, step_is_over
from midstream.trace.program import Outcome, Program, copies, outcome
from midstream.trace.tracer import BodyTracer
from midstream.trace.tree import StandIn, as_bits, map_objects


@dataclass(frozen=True)
class CapturedSteps:
    """The rows that one request has captured for its trace.

    Attributes:
        planes: the captured rows of each point, `[rows, width]`, in the order of their positions. They are contiguous, and nothing
            else refers to their memory, so the returned values may be views of it.
        prompt: how many rows of each plane belong to the prompt: 1 if only its last row was captured.
        count: how many steps the request had.
    """

    planes: Mapping[Point, torch.Tensor]
    prompt: int
    count: int


class KeptRows(StandIn):
    """Stands for a tensor of rows that lie together in a plane. It has the methods of a tensor that code which only keeps rows may use.

    Attributes:
        point: of the plane.
        first: the index of the first row.
        shape: of the tensor, without the width: `(count,)`, or `()` for a single row.
    """

    __slots__ = ("first", "point", "shape")

    def __init__(self, point: Point, first: int, shape: tuple[int, ...]) -> None:
        self.point, self.first, self.shape = point, first, shape

    def __getitem__(self, index: Any) -> KeptRows:
        last = self.first + self.shape[0] - 1
        return KeptRows(self.point, last, () if index == -1 else (1,))  # the only other index is `-1:`

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self)  # as in the engine

    def clone(self) -> KeptRows:
        return KeptRows(self.point, self.first, self.shape)

    cpu = clone


class _Kept:
    """The values that code has kept, with `KeptRows` that count only the kept rows of their plane.

    Args:
        values: with `KeptRows` in place of rows.
        captured: of the request that the code ran for.
    """

    def __init__(self, values: Any, captured: CapturedSteps) -> None:
        used: dict[Point, list[int]] = {}  # rows of each plane

        def noted(rows: KeptRows) -> KeptRows:
            there = used.setdefault(rows.point, [])
            found = KeptRows(rows.point, len(there), rows.shape)
            there.extend(range(rows.first, rows.first + math.prod(rows.shape)))
            return found

        self._values = map_objects(values, KeptRows, noted)
        # A plane whose rows are all used once and in order is not copied.
        self._used = {
            point: None if rows == list(range(len(captured.planes[point]))) else np.array(rows)
            for point, rows in used.items()
        }

    def filled(self, captured: CapturedSteps) -> Any:
        """The values with a request's rows. Those of one plane lie in one block of memory, and none overlap."""
        blocks = {}
        for point, rows in self._used.items():
            plane = captured.planes[point]
            block = as_bits(plane).numpy()
            if rows is not None:
                block = block[rows]  # numpy copies in one thread: see `capture.rows.concatenated`
            blocks[point] = block, plane.dtype, plane.shape[1], block.strides[0]

        def tensor(rows: KeptRows) -> torch.Tensor:
            block, dtype, width, size = blocks[rows.point]
            # Each tensor gets its own storage, as in `transport.wire`, because `torch.save` writes the whole storage.
            count = math.prod(rows.shape) * width
            found = torch.frombuffer(block, dtype=dtype, count=count, offset=rows.first * size)
            return found.view(*rows.shape, width) if rows.shape else found

        return map_objects(self._values, KeptRows, tensor)


class KeptPrograms:
    """Programs that only keep rows, one for each request of a call.

    They are copies of the caller's programs. As in an engine, later changes of the caller's variables have no effect.

    Args:
        names: the name of each point in error messages.
    """

    def __init__(self, programs: Sequence[Program], num_layers: int, names: Mapping[Point, str]) -> None:
        self._model, self._names = _Model(num_layers), names
        given = {"model": self._model, "tracer": BodyTracer()}
        self._programs = copies(programs, lambda reference: given.get(reference[0]))
        self._last: tuple[Any, Outcome, _Kept] | None = None

    def outcome(self, number: int, captured: CapturedSteps) -> Outcome:
        """The outcome of a request that has ended. `number`: the index of its program."""
        program, last = self._programs[number], self._last
        run = (id(program), captured.prompt, captured.count)
        if last is None or last[0] != run or last[1].failure is not None:  # requests do not share an exception
            found = self._run(program, captured)
            last = self._last = run, found, _Kept(found.values, captured)
        return replace(last[1], values=last[2].filled(captured))

    def _run(self, program: Program, captured: CapturedSteps) -> Outcome:
        """The outcome, with `KeptRows` in place of rows."""
        body = KeptBody(captured, self._names)
        token = CURRENT.set(body)
        try:
            body.result = program.run(self._model, {})
        except Exception as error:
            body.failure = error
        finally:
            CURRENT.reset(token)
        found = outcome(body, program)
        found.order = found.steps  # tells which of several requests that began together ended last
        return found


class KeptBody(Body):
    """A body that runs after all its steps have ended. It never waits."""

    def __init__(self, captured: CapturedSteps, names: Mapping[Point, str]) -> None:
        super().__init__("kept", lambda: None, in_engine=True)
        self.now, self.ended = 0, captured.count == 0
        self._captured, self._names = captured, names
        self._counts = {point: len(plane) for point, plane in captured.planes.items()}
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

    def rows(self, site: str, layer: int) -> KeptRows:
        """The rows of this site and layer in the current step."""
        if self.ended or layer < self._layer:
            self._refuse(site, layer)
        self._layer = layer
        point, prompt = (site, layer), self._captured.prompt
        first, count = (prompt + self.step - 1, 1) if self.step else (0, prompt)
        if first + count > self._counts[point]:
            raise IndexError(f"the plan has not captured {self._names[point]} of step {self.step}")
        return KeptRows(point, first, (count,))

    def _refuse(self, site: str, layer: int) -> NoReturn:
        names, step = self._names, self.step
        if self.ended:
            raise never_reached(names[site, layer], step)
        raise out_of_order(names[site, layer], step, f"{names[site, self._layer]} of step {step}")

    def save(self, value: Any) -> Any:
        # Two calls with one tensor give two tensors.
        kept = value.clone() if isinstance(value, KeptRows) else value
        self.saves.put(value, kept)
        self.saves.put(kept, kept)
        return kept


class _Model:
    """The part of the model that such code uses: accessors of sites, and the number of layers."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def __getattr__(self, name: str) -> _Layers:
        found = _Layers(site_of(name), self.num_layers)
        self.__dict__[name] = found
        return found


class _Layers:
    def __init__(self, site: str, num_layers: int) -> None:
        self._site, self._layers = site, range(num_layers)

    def __getitem__(self, layer: int) -> KeptRows:
        return cast(KeptBody, current_body()).rows(self._site, self._layers[operator.index(layer)])
