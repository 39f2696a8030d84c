"""Plans on a transformers model in this process, by forward hooks: what the engine's kernels are compared with.

Legend of shape suffixes: t the tokens of one request in this step, H the site's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from midstream import hooks
from midstream.arch import Architecture
from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.segment import Captured, Segment, gather
from midstream.capture.sinks import Sinks
from midstream.client.planned import Planned
from midstream.errors import CaptureError, NotFiniteError
from midstream.plan.arithmetic import apply
from midstream.plan.checks import not_finite
from midstream.plan.compile import CompiledPlan, compile_plan
from midstream.plan.layout import Layout, Plane
from midstream.plan.ops.edit import Op
from midstream.runtime.store import RunStore
from midstream.sites import LAYER_SITES, Binding, NotFinite, Point
from midstream.trace.rows import BatchRows, Event


class PlannedRow:
    """One request's plan on its way through the model: what it does to each step's tokens, and the rows that it captures.

    Args:
        name: the request's id, for the sinks.
        collected: what the request is of a collection.
    """

    def __init__(
        self, planned: Planned, compiled: CompiledPlan, name: str, sinks: Sinks, collected: Collected | None = None
    ) -> None:
        self.planned = planned
        self.points = {point for profile in compiled.profiles for point in profile.ops}
        self.is_over = False
        self._compiled = compiled
        self._name = name
        self._sinks = sinks
        self._segments: list[Segment] = []
        self._first = 0
        self._groups: list[tuple[int, torch.Tensor]] = []
        self._broken: NotFinite | None = None
        if planned.routes.sinks:
            sinks.begin(CaptureInfo(name, tuple(planned.prompt), collected=collected), planned.routes.sinks)
            sinks.put(planned.empty_segment(name))

    def begin_step(self, first: int, count: int) -> None:
        """The coming forward computes positions `first` and those after it."""
        length = len(self.planned.prompt)
        positions = np.arange(first, first + count)
        profiles = np.where(
            positions < length, self._compiled.prompt[np.minimum(positions, length - 1)], self._compiled.generated
        )
        self._first = first
        self._groups = [
            (int(n), torch.from_numpy(np.flatnonzero(profiles == n)))
            for n in np.unique(profiles)
            if n and not self.is_over
        ]

    def edit(self, point: Point, x_tH: torch.Tensor) -> torch.Tensor:
        """The value of a site after the plan; the very tensor that was given if nothing is edited."""
        new_tH = x_tH
        for number, rows in self._groups:
            ops = self._compiled.profiles[number].ops.get(point)
            if ops is None:
                continue
            old = x_tH[rows.to(x_tH.device)]
            edited = apply(old, ops, self._compiled.bank)
            if edited is not old:
                self._look_at(point, rows, edited)
                new_tH = new_tH.index_put((rows.to(x_tH.device),), edited)
            for op, value in _captured(ops, old, edited):
                self._keep(point, number, op, rows, value)
        return new_tH

    def _look_at(self, point: Point, rows: torch.Tensor, edited_tH: torch.Tensor) -> None:
        if self._broken is None and not torch.isfinite(edited_tH).all():
            row = int((~torch.isfinite(edited_tH)).any(-1).nonzero()[0])
            self._broken = NotFinite(self._first + int(rows[row]), point)

    def _keep(self, point: Point, number: int, op: Op, rows: torch.Tensor, value: torch.Tensor) -> None:
        layout = self._compiled.profiles[number].layout
        when = next(plane.when for plane in layout if plane[:2] == point and plane.offset == op.offset)
        plane = Plane(*point, when, 0, value.shape[-1])
        segment = Segment(self._name, rows.numpy() + self._first, Layout((plane,)), value.detach().cpu().clone())
        if self.planned.routes.output:
            self._segments.append(segment)
        if self.planned.routes.sinks:
            self._sinks.put(segment)

    def end(self, generated: int) -> None:
        """The request is over, with so many tokens."""
        self.is_over = True
        if self.planned.routes.sinks:
            self._sinks.end(self._name, self._stop(generated))

    def _stop(self, generated: int) -> int:
        return len(self.planned.prompt) + generated - 1

    def captured(self, generated: int) -> Captured:
        """What goes on the output. Raises CaptureError; NotFiniteError if an edit has made activations infinite or NaN."""
        if self._broken is not None:
            self.discard()
            raise NotFiniteError(not_finite(self._broken, self.planned.plan, self.planned.facts.dtype))
        if self.planned.routes.sinks:
            self._sinks.result(self._name)
        segments = [*self._segments, self.planned.empty_segment(self._name)]
        return gather(segments, self._stop(generated), self.planned.routes.output)

    def discard(self) -> None:
        """Nobody asks for the result any more."""
        if self.planned.routes.sinks:
            self._sinks.discard(self._name, CaptureError(f"request {self._name!r} was given up"))


def _captured(ops: Sequence[Op], old: torch.Tensor, edited: torch.Tensor) -> Iterator[tuple[Op, torch.Tensor]]:
    """The captures among `ops`: one that comes first is of the value before the edits."""
    for i, op in enumerate(ops):
        if op.kind == "capture":
            yield op, old if i == 0 else edited


def planned_row(
    planned: Planned,
    arch: Architecture,
    name: str,
    *,
    vectors: Mapping[str, Any],
    runs: RunStore,
    sinks: Sinks,
    collected: Collected | None = None,
) -> PlannedRow:
    """The plan of one request, ready to run. Raises PlanError if a recorded run is gone."""
    compiled = compile_plan(
        planned.plan,
        len(planned.prompt),
        arch.num_layers,
        width=lambda site, layer: arch.widths[site, layer],
        vector=lambda named: vectors[named.name].data,
        run=runs.row,
    )
    return PlannedRow(planned, compiled, name, sinks, collected)


class PlanHooks:
    """The plans of a batch, as hooks on the model.

    Args:
        rows: index in the batch -> its plan.
        is_muted: whether the modules run for something else than the step.
    """

    def __init__(
        self, model: nn.Module, arch: Architecture, rows: Mapping[int, PlannedRow], is_muted: Callable[[], bool]
    ) -> None:
        self._model = model
        self.rows = rows
        self._is_muted = is_muted
        self._in_step: Sequence[BatchRows] = ()
        order = {site: i for i, site in enumerate(LAYER_SITES)}
        points = sorted({point for row in rows.values() for point in row.points}, key=lambda p: (p[1], order[p[0]]))
        self._points: dict[tuple[str, str], list[tuple[Point, Binding]]] = {}
        for point in points:
            binding = arch.binding(*point)
            self._points.setdefault((binding.path, binding.kind), []).append((point, binding))

    @contextmanager
    def on(self) -> Iterator[None]:
        """The hooks are there. They come before those of traces that begin later, and have to outlast them."""
        handles = [self._hook(*key) for key in self._points]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_step(self, in_step: Sequence[BatchRows], first: Sequence[int]) -> None:
        """A forward begins: where each request's tokens are, and the first one's position."""
        self._in_step = in_step
        for index, row in self.rows.items():
            row.begin_step(first[index], in_step[index].count)

    def _hook(self, path: str, kind: str) -> Any:
        module = self._model.get_submodule(path)
        if kind == "input":
            return hooks.before(module, lambda args, kwargs: self._edited((path, kind), (args, kwargs)))

        def after(output: Any) -> Any:
            return self._edited((path, kind), output)

        if hooks.skips_hooks(module):  # a trace wraps its `forward`, and would read the output before a hook edits it
            return hooks.around(module, None, after)
        return hooks.after(module, after)

    def _edited(self, key: tuple[str, str], tree: Any) -> Any:
        if self._is_muted():
            return tree
        event = Event(key, tree)
        for point, binding in self._points[key]:
            for index, row in self.rows.items():
                if point in row.points:
                    self._edit(event, point, binding, row, self._in_step[index])
        return event.tree

    def _edit(self, event: Event, point: Point, binding: Binding, row: PlannedRow, rows: BatchRows) -> None:
        def leaf(ref: Any) -> Any:
            full = event.leaf(ref)
            return full if full is None or full.ndim == 1 else rows.take_tokens(full)

        value = binding.read(leaf)
        old_tH = value.flatten(-2) if binding.heads is not None else value
        new_tH = row.edit(point, old_tH)
        if new_tH is old_tH:
            return
        for ref, part in binding.leaves(new_tH.view(value.shape), leaf):
            event.write(ref, part, rows, tokens=True, in_place=binding.in_place)
