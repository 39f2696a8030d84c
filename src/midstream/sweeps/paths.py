"""Path patching: a sweep over heads that measures only the effect of each head along the direct path to the receivers.

Goldowsky-Dill et al. 2023 (arXiv:2304.05969); the algorithm is that of Wang et al. 2022 (arXiv:2211.00593). A cell patches a head as in a
sweep. More patches freeze all heads in later layers: these keep the values that they have in the patched prompt's own run. If the receivers
are heads, this request records the values that they would take. A second request, in which nothing is frozen, patches the receivers with
these values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from midstream.errors import MidstreamError, ParameterError, PlanError, about
from midstream.plan.values import Capture, Patch, Plan, RecordedRun
from midstream.requests.arguments import Answers
from midstream.requests.invokes import InvokeResult
from midstream.settings import RECORD_BYTES
from midstream.sweeps.cells import HEADS, MLPS, SweepRequest
from midstream.sweeps.events import Cell, Event, Grid, Outline, Paths
from midstream.sweeps.results import SweepResult
from midstream.sweeps.sweep_run import ENGINE_GROUPS, Job, SweepRun, new_name

# The limit for the runs of one group. All groups together fill half of the engine's room; the runs of the prompts have the other half.
GROUP_BYTES = RECORD_BYTES // (2 * ENGINE_GROUPS)


def end_of(paths: Paths, num_layers: int) -> int:
    """The layer before which all senders lie."""
    return num_layers if paths.receivers is None else max(layer for layer, _ in paths.receivers)


def frozen_points(paths: Paths, sender: int, num_layers: int) -> list[tuple[str, int]]:
    """The site and layer of each value that is frozen if a head of the layer `sender` is patched.

    Receivers in these layers are frozen, too. The value that each of them would take is captured before the patch that freezes it. So no
    receiver changes the value that another one takes.
    """
    end = end_of(paths, num_layers)
    points = [(HEADS, layer) for layer in range(sender + 1, end)]
    if MLPS in paths.frozen:
        points += [(MLPS, layer) for layer in range(sender, end)]
    return points


class PathRun(SweepRun):
    """One call of `path_patching`. See `TraceModel.path_patching` for the arguments and errors."""

    def __init__(self, model: Any, asked: SweepRequest) -> None:
        super().__init__(model, asked)
        assert asked.paths is not None
        self._paths = asked.paths
        self._frozen: dict[tuple[str, int], Plan] = {}  # by the patched prompt's run and the sender's layer

    def outline(self) -> Outline:
        facts = self._model.facts
        if self._paths.receivers is not None:
            receivers = [self._receiver(*each) for each in self._paths.receivers]
            self._paths = msgspec.structs.replace(self._paths, receivers=sorted({*receivers}))
        end = end_of(self._paths, facts.num_layers)
        if isinstance(self.asked.layers, str) and self.asked.layers == "all":
            before = [layer for layer in range(end) if (HEADS, layer) in facts.widths]
            if not before:
                text = "receivers: no head lies before them. Give heads of later layers."
                raise ParameterError(text, field="receivers")
            self.asked.layers = before
        outline = super().outline()
        for (layer,) in outline.grid.layers:
            if layer >= end:
                text = f"layers has {layer}. Only heads of layers before {end} have a path to the receivers."
                raise PlanError(text, field="layers")
        self._check_frozen(outline)
        outline = msgspec.structs.replace(outline, paths=self._paths)
        self.result = SweepResult(outline, self.asked.metric)
        return outline

    def _receiver(self, layer: int, head: int) -> tuple[int, int]:
        """A receiver with its layer counted from 0. Raises ParameterError if the model does not have it."""
        facts = self._model.facts
        at = layer + facts.num_layers if -facts.num_layers <= layer < 0 else layer
        head_dim = facts.head_dims.get((HEADS, at))
        if head_dim is None:
            text = (
                f"receivers has layer {layer}, and this model has no heads there. Give a layer with the site {HEADS}."
            )
            raise ParameterError(text, field="receivers")
        count = facts.widths[HEADS, at] // head_dim
        if not 0 <= head < count:
            text = f"receivers has head {head} of layer {layer}. Allowed: 0 to {count - 1}."
            raise ParameterError(text, field="receivers")
        return at, head

    def _frozen_points(self, sender: int) -> list[tuple[str, int]]:
        return frozen_points(self._paths, sender, self._model.facts.num_layers)

    def _check_frozen(self, outline: Outline) -> None:
        """Raise PlanError if a value that has to be frozen is no site of this model or engine."""
        for site, layer in self._frozen_points(min(layer for row in outline.grid.layers for layer in row)):
            if (site, layer) not in self._model.facts.widths:
                text = (
                    f"layers: other paths of a sender lead through layer {layer}, which has no {site}, so they cannot be frozen. Only "
                    f"senders after layer {layer} can be patched."
                )
                raise PlanError(text, field="layers")
            with about("layers"):
                self._model.planner.check(Plan((Patch(site, layer=layer, position=0, source="zeros"),)))

    def _planes(self, grid: Grid) -> tuple[list[str], list[int]]:
        first = min(layer for row in grid.layers for layer in row)
        return self._paths.frozen, sorted({layer for _, layer in self._frozen_points(first)} | {first})

    def _plan(self, cell: Cell, grid: Grid, source: Any, own: RecordedRun) -> Plan:
        return super()._plan(cell, grid, source, own) + self._freezing(cell.layers[0], own)

    def _freezing(self, sender: int, own: RecordedRun) -> Plan:
        """The patches that freeze all values between a sender of this layer and the receivers."""
        if (own.id, sender) not in self._frozen:
            positions, points = range(len(own.prompt_token_ids)), self._frozen_points(sender)
            patches = tuple(Patch(site, layer=layer, position=positions, source=own) for site, layer in points)
            self._frozen[own.id, sender] = Plan(patches)
        return self._frozen[own.id, sender]

    # Receivers that are heads.

    async def _run_group(self, ids: list[int], answers: Answers, group: list[Job]) -> AsyncGenerator[Event | None]:
        if self._paths.receivers is None:
            async with contextlib.aclosing(super()._run_group(ids, answers, group)) as events:
                async for event in events:
                    yield event
            return
        size = self._jobs_at_a_time(len(ids))
        for first in range(0, len(group), size):
            part, runs = group[first : first + size], list[RecordedRun]()
            async with self._deleted(self._received(ids, part, runs), runs) as found:
                for job, error in zip(part, found, strict=True):
                    if isinstance(error, MidstreamError):
                        yield self._ended(job, [InvokeResult([], None, error=error)], answers)
                jobs = [Job(job.event, plan) for job, plan in zip(part, found, strict=True) if isinstance(plan, Plan)]
                async with contextlib.aclosing(super()._run_group(ids, answers, jobs)) as events:
                    async for event in events:
                        yield event

    def _jobs_at_a_time(self, tokens: int) -> int:
        """How many jobs of a group record their receivers at a time, so that the runs of all groups have room in the engine."""
        layers = {layer for layer, _ in self._paths.receivers or ()}
        width = sum(self._model.facts.widths[HEADS, layer] for layer in layers)
        return max(1, GROUP_BYTES // (4 * tokens * width))  # at most 4 bytes for a number

    async def _received(
        self, ids: list[int], group: Sequence[Job], runs: list[RecordedRun]
    ) -> list[Plan | MidstreamError]:
        """For each job, the patches that give the receivers the values that they take along the direct paths; or an error.

        Adds the runs that hold these values to `runs`.
        """
        assert self._paths.receivers is not None
        layers = sorted({layer for layer, _ in self._paths.receivers})
        capture = Capture(HEADS, layers=layers, positions="all_prompt", when="before")
        found: list[Plan | MidstreamError] = [job.plan for job in group]
        numbers = [i for i, job in enumerate(group) if job.plan]  # the others are runs without a patch
        records = [(uuid.uuid4().hex, new_name(), "") for _ in numbers]
        invokes = [
            dataclasses.replace(self._invoke(ids, group[i].plan + Plan((capture,)), Answers()), record=record)
            for i, record in zip(numbers, records, strict=True)
        ]
        results = await self._model._run(invokes).gathered() if invokes else []
        for i, record, result in zip(numbers, records, results, strict=True):
            if result.error is not None:
                found[i] = result.error
                continue
            run = await self._model.runs.add(result.plan.recorded_run(*record[:2]))
            try:
                await self._model.runs.lease([run.id])
            except PlanError as error:  # it was dropped to make room for others
                found[i] = error
                continue
            runs.append(run)
            positions = range(len(ids))
            found[i] = Plan(
                tuple(
                    Patch(HEADS, layer=layer, position=positions, head=head, source=run)
                    for layer, head in self._paths.receivers
                )
            )
        return found
