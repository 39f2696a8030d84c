"""Plans on a transformers model in this process, by forward hooks. Tests compare the engine's kernels with this implementation.

Shape suffixes: t the tokens of one request in this step, H the site's width.
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
from midstream.capture.rows import Captured, RowChunk
from midstream.capture.sinks import RequestCapture
from midstream.client.requests import PreparedPlan
from midstream.errors import NotFiniteError
from midstream.plan.captures import Layout, Plane
from midstream.plan.checks import not_finite
from midstream.plan.compile import compile_plan
from midstream.plan.ops.edit import Op, apply
from midstream.runtime.store import RunStore
from midstream.sites import LAYER_SITES, Binding, NotFinite, Point
from midstream.trace.rows import BatchRows, Event


class RunningPlan:
    """One request's plan: edits the values of its sites in each step, and captures their rows.

    Args:
        name: the request's id.
        vectors: the model's named vectors.
        runs: the model's recorded runs.
        capture: makes the object that takes the captured rows; called if the plan can run.

    Raises:
        PlanError: a recorded run is gone.
    """

    def __init__(
        self,
        plan: PreparedPlan,
        name: str,
        arch: Architecture,
        vectors: Mapping[str, Any],
        runs: RunStore,
        capture: Callable[[], RequestCapture],
    ) -> None:
        self._plan, self._name = plan, name
        self._compiled = compile_plan(
            plan.plan,
            len(plan.prompt),
            arch.num_layers,
            width=lambda site, layer: arch.widths[site, layer],
            vector=lambda named: vectors[named.name].data,
            run=runs.row,
        )
        self._capture = capture()
        self.points = {point for profile in self._compiled.profiles for point in profile.ops}
        self.has_ended = False
        self._first = 0
        self._groups: list[tuple[int, torch.Tensor]] = []  # profile, rows of this step that have it
        self._not_finite: NotFinite | None = None

    def begin_step(self, first: int, count: int) -> None:
        """The next forward computes `count` positions from `first` on."""
        length = len(self._plan.prompt)
        positions = np.arange(first, first + count)
        profiles = np.where(
            positions < length, self._compiled.prompt[np.minimum(positions, length - 1)], self._compiled.generated
        )
        self._first = first
        self._groups = [
            (int(n), torch.from_numpy(np.flatnonzero(profiles == n)))
            for n in np.unique(profiles)
            if n and not self.has_ended
        ]

    def edit(self, point: Point, x_tH: torch.Tensor) -> torch.Tensor:
        """The value of a site after the plan: the same tensor if nothing is edited."""
        new_tH = x_tH
        for number, rows in self._groups:
            ops = self._compiled.profiles[number].ops.get(point)
            if ops is None:
                continue
            old = x_tH[rows.to(x_tH.device)]
            edited = apply(old, ops, self._compiled.bank)
            if edited is not old:
                self._check_finite(point, rows, edited)
                new_tH = new_tH.index_put((rows.to(x_tH.device),), edited)
            for op, value in _captured(ops, old, edited):
                self._keep(point, number, op, rows, value)
        return new_tH

    def _check_finite(self, point: Point, rows: torch.Tensor, edited_tH: torch.Tensor) -> None:
        if self._not_finite is None and not torch.isfinite(edited_tH).all():
            row = int((~torch.isfinite(edited_tH)).any(-1).nonzero()[0])
            self._not_finite = NotFinite(self._first + int(rows[row]), point)

    def _keep(self, point: Point, number: int, op: Op, rows: torch.Tensor, value: torch.Tensor) -> None:
        layout = self._compiled.profiles[number].layout
        when = next(plane.when for plane in layout if plane[:2] == point and plane.offset == op.offset)
        plane = Plane(*point, when, 0, value.shape[-1])
        positions = rows.numpy() + self._first
        self._capture.add([RowChunk(self._name, positions, Layout((plane,)), value.detach().cpu().clone())])

    def end(self, generated: int) -> None:
        """The request has ended with so many tokens."""
        self.has_ended = True
        self._capture.end(self._stop(generated))

    def _stop(self, generated: int) -> int:
        return len(self._plan.prompt) + generated - 1

    def result(self, generated: int) -> Captured:
        """The output's captures. Raises CaptureError, or NotFiniteError if an edit made activations infinite or NaN."""
        if self._not_finite is not None:
            self.discard()
            raise NotFiniteError(not_finite(self._not_finite, self._plan.plan, self._plan.facts.dtype))
        return self._capture.result(self._stop(generated))

    def discard(self) -> None:
        """Drop the captured rows: nobody will ask for the result."""
        self._capture.discard()


def _captured(ops: Sequence[Op], old: torch.Tensor, edited: torch.Tensor) -> Iterator[tuple[Op, torch.Tensor]]:
    """The captures among `ops`, with their rows. A capture that comes first takes the value before the edits."""
    for i, op in enumerate(ops):
        if op.kind == "capture":
            yield op, old if i == 0 else edited


class PlanHooks:
    """The plans of a batch, as hooks on the model.

    Args:
        rows: the plans, by index in the batch.
        is_muted: whether the modules run for another reason than the step.
    """

    def __init__(
        self, model: nn.Module, arch: Architecture, rows: Mapping[int, RunningPlan], is_muted: Callable[[], bool]
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
        """Register the hooks. They run before those of traces that begin later, and have to be removed after them."""
        handles = [self._hook(*key) for key in self._points]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_step(self, in_step: Sequence[BatchRows], first: Sequence[int]) -> None:
        """A forward begins. `in_step` tells where each request's tokens are, `first` the position of each request's first token."""
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

    def _edit(self, event: Event, point: Point, binding: Binding, row: RunningPlan, rows: BatchRows) -> None:
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
