"""Plans on their way to a backend: which prompt gets which, spans and names resolved, everything checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from midstream.backends.prompts import Prompt, is_multimodal, offsets_of
from midstream.backends.runs import Runs
from midstream.backends.vectors import Vectors
from midstream.captures.segment import Segment
from midstream.captures.wanted import Routes, routes
from midstream.errors import PlanError
from midstream.plan.checks import ModelFacts, check
from midstream.plan.compile import Plane
from midstream.plan.runs import RecordedRun
from midstream.plan.spans import has_spans, resolve_spans
from midstream.plan.values import Capture, Clamp, Patch, Plan, Steer, with_digests

_INTERVENTIONS = (Steer, Patch, Clamp, Capture)


def plans_of(given: Any, prompts: int, single: bool = False) -> list[Plan]:
    """The plan of each prompt.

    Args:
        given: one plan for all of them, or a list with one for each: of plans, lists of interventions, or None.
        single: whether there is one prompt, not a list of them.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(given, (list, tuple)) or all(isinstance(item, _INTERVENTIONS) for item in given):
        return [Plan.of(given)] * prompts
    if any(isinstance(item, _INTERVENTIONS) for item in given):
        raise PlanError(
            "plan mixes interventions with plans. Allowed: one list of interventions for all prompts, or a list that has for "
            "each prompt a plan, a list of interventions, or None."
        )
    if len(given) != prompts:
        there = "one prompt" if single or prompts == 1 else f"{prompts} prompts"
        raise PlanError(f"plan is a list with a plan for each prompt: {len(given)} plans were given for {there}.")
    return [Plan.of(item) for item in given]


def refuse_multimodal(plan: Plan, prompt: Prompt) -> None:
    """Raise PlanError for a plan with positions in a prompt that is not all text."""
    check(plan, ModelFacts(), None, None, vectors=None, runs=None, multimodal=is_multimodal(prompt))


@dataclass(frozen=True)
class Planned:
    """One request's plan, checked and ready to be run.

    Attributes:
        plan: with positions in the place of spans, and the digests of named vectors.
        prompt: token ids.
        routes: which captured rows go where.
        layout: all that is captured, in no captured row's order.
        dtype: of captured rows.
    """

    plan: Plan
    prompt: list[int]
    routes: Routes
    layout: tuple[Plane, ...] = ()
    dtype: torch.dtype = torch.float32

    def empty_segment(self, request_id: str) -> Segment:
        """Rows of which there are none: it tells what is captured, and how wide it is, though nothing may come."""
        width = sum(plane.width for plane in self.layout)
        return Segment(request_id, np.empty(0, np.int64), self.layout, torch.empty(0, width, dtype=self.dtype))

    @property
    def bare(self) -> Plan:
        """The plan as the engine gets it: it hands all captured rows to the client, which knows where they go."""
        return Plan(
            tuple(replace(item, to=None) if isinstance(item, Capture) else item for item in self.plan.interventions)
        )

    @property
    def runs(self) -> list[RecordedRun]:
        """The recorded runs that it needs."""
        return list(
            {
                edit.source.id: edit.source for edit in _patches(self.plan) if isinstance(edit.source, RecordedRun)
            }.values()
        )


@dataclass(frozen=True)
class Planner:
    """Makes plans ready for a model, of which `facts` tells the sites, layers and widths."""

    facts: ModelFacts
    tokenizer: Callable[[], Any]
    vectors: Vectors
    runs: Runs

    def prepare(self, plan: Plan, prompt: Prompt, ids: list[int], params: Mapping[str, Any]) -> Planned:
        """Raises PlanError if the plan cannot be done to this prompt on this model."""
        max_tokens = params.get("max_tokens")
        if max_tokens is not None and max_tokens < 1:
            raise PlanError(
                f"max_tokens is {max_tokens}; a request with a plan needs at least 1, as every request does on vLLM."
            )
        if has_spans(plan):
            plan = resolve_spans(plan, *offsets_of(prompt, ids, self.tokenizer()))
        plan = self._where_there(plan)
        check(
            plan,
            self.facts,
            len(ids),
            max_tokens,
            vectors=self.vectors.widths,
            runs={run.name: run.id for run in self.runs.handles},
        )
        plan = with_digests(plan, self.vectors.digests)
        return self._planned(plan, ids)

    def _planned(self, plan: Plan, ids: list[int]) -> Planned:
        found = routes(plan.captures, len(ids), range(self.facts.num_layers))
        keys = dict.fromkeys(key for wanted in (found.output, *(sink.wanted for sink in found.sinks)) for key in wanted)
        layout, offset = [], 0
        for site, layer, when in keys:
            layout.append(Plane(site, layer, when, offset, self.facts.widths.get((site, layer), 0)))
            offset += layout[-1].width
        return Planned(plan, ids, found, tuple(layout), getattr(torch, self.facts.dtype))

    def _where_there(self, plan: Plan) -> Plan:
        """The plan with `layers="all"` meaning the layers that have the site, where not all have it."""
        there: dict[str, list[int]] = {}
        for site, layer in sorted(self.facts.widths):
            there.setdefault(site, []).append(layer)
        partial = {site for site, layers in there.items() if len(layers) < self.facts.num_layers}
        return Plan(
            tuple(
                replace(item, layers=tuple(there[item.site]))
                if not isinstance(item, Patch) and item.layers == "all" and item.site in partial
                else item
                for item in plan.interventions
            )
        )


def _patches(plan: Plan) -> Sequence[Patch]:
    return [edit for edit in plan.edits if isinstance(edit, Patch)]


def recorded_run(planned: Planned | None, name: str, run_id: str) -> RecordedRun:
    """The handle of the run whose rows `planned` captures."""
    assert planned is not None
    wanted = planned.routes.output
    return RecordedRun(
        name,
        run_id,
        tuple(planned.prompt),
        tuple(dict.fromkeys(site for site, _, _ in wanted)),
        tuple(sorted({layer for _, layer, _ in wanted})),
        tuple(next(iter(wanted.values())).listed.tolist()),
    )
