"""Plans on their way to a backend: which prompt gets which, spans and names resolved, everything checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from midstream.capture.consumers import destination
from midstream.capture.segment import Segment, without_rows
from midstream.capture.selection import Routes, identity, routes
from midstream.client.prompts import Prompt, is_multimodal, offsets_of
from midstream.client.runs import Runs
from midstream.client.vectors import Vectors
from midstream.errors import PlanError
from midstream.plan.checks import ModelFacts, check
from midstream.plan.memory import Memory, plan_bytes
from midstream.plan.ops.edit import changed
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Capture, Edit, Plan, has_spans, resolve_spans, with_digests

_PLANE_BYTES = 256
_INTERVENTIONS = (Edit, Capture)


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
    if plan and is_multimodal(prompt):
        check(plan, ModelFacts(), None, None, vectors=None, runs=None, multimodal=True)


@dataclass(frozen=True)
class Planned:
    """One request's plan, checked and ready to be run.

    Attributes:
        plan: with positions in the place of spans, and the digests of named vectors.
        prompt: token ids.
        routes: which captured rows go where.
        facts: of the model that it was checked against.
    """

    plan: Plan
    prompt: list[int]
    routes: Routes
    facts: ModelFacts

    def empty_segment(self, request_id: str) -> Segment:
        """Tells sinks and outputs what is captured, though no row of it may come."""
        wanted = (self.routes.output, *(sink.wanted for sink in self.routes.sinks))
        keys = dict.fromkeys(key for rows in wanted for key in rows)
        dtype = getattr(torch, self.facts.dtype)
        return without_rows(request_id, keys, lambda site, layer: self.facts.widths[site, layer], dtype)

    @property
    def bare(self) -> Plan:
        """The plan as the engine gets it: it hands all captured rows to the client, which knows where they go."""
        return _bare(self.plan)


def _bare(plan: Plan) -> Plan:
    if all(capture.to is None for capture in plan.captures):
        return plan
    return Plan(tuple(replace(item, to=None) if isinstance(item, Capture) else item for item in plan.interventions))


class Planner:
    """Makes plans ready for a model, of which `facts` tells the sites, layers and widths."""

    def __init__(self, facts: ModelFacts, tokenizer: Callable[[], Any], vectors: Vectors, runs: Runs) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._vectors = vectors
        self._runs = {run.name: run.id for run in runs.handles}
        self._known: Memory[Planned] = Memory()
        self._with_functions: Memory[Planned] = Memory()
        self._there: dict[str, tuple[int, ...]] = {}
        for site, layer in sorted(facts.widths):
            self._there[site] = (*self._there.get(site, ()), layer)

    def prepare(self, plan: Plan, prompt: Prompt, ids: list[int], params: Mapping[str, Any]) -> Planned:
        """Raises PlanError if the plan cannot be done to this prompt on this model, CaptureError if it has an unknown consumer."""
        max_tokens = params.get("max_tokens")
        if has_spans(plan):
            return self._prepare(resolve_spans(plan, *offsets_of(prompt, ids, self._tokenizer())), ids, max_tokens)
        # Functions may be equal and not the same.
        ways = tuple(tuple(map(identity, capture.sinks)) for capture in plan.captures)
        known = (self._with_functions if _has_functions(plan) else self._known).get(
            (_bare(plan), ways, len(ids), max_tokens),
            lambda: replace(self._prepare(plan, ids, max_tokens), prompt=[]),  # many prompts may have one plan
            lambda planned: plan_bytes(plan) + _bytes(planned),
        )
        return Planned(known.plan, ids, known.routes, known.facts)

    def forget_functions(self) -> None:
        """To be called when the prompts of a call are prepared: what its captures' functions hold on to is the user's."""
        self._with_functions = Memory()

    def _prepare(self, plan: Plan, ids: list[int], max_tokens: int | None) -> Planned:
        if max_tokens is not None and max_tokens < 1:
            raise PlanError(
                f"max_tokens is {max_tokens}; a request with a plan needs at least 1, as every request does on vLLM."
            )
        plan = self._where_there(plan)
        check(plan, self._facts, len(ids), max_tokens, vectors=self._vectors.widths, runs=self._runs)
        plan = with_digests(plan, self._vectors.digests)
        found = routes(plan.captures, len(ids), range(self._facts.num_layers))
        for sink in found.sinks:
            destination(sink.to)  # raises CaptureError for a consumer that is not installed
        return Planned(plan, ids, found, self._facts)

    def _where_there(self, plan: Plan) -> Plan:
        """The plan with `layers="all"` meaning the layers that have the site, where not all have it."""
        there = self._there
        partial = {site for site, layers in there.items() if len(layers) < self._facts.num_layers}
        if not any(item.site in partial for item in plan.interventions):
            return plan
        return Plan(
            tuple(
                changed(item, layers=there[item.site]) if item.at_layers == "all" and item.site in partial else item
                for item in plan.interventions
            )
        )


def _has_functions(plan: Plan) -> bool:
    """Whether captured rows go to functions of the user's."""
    return any(callable(to) for capture in plan.captures for to in capture.sinks)


def _bytes(planned: Planned) -> int:
    """About what it takes beside its plan, with which it shares the vectors."""
    ways = (planned.routes.output, *(sink.wanted for sink in planned.routes.sinks))
    rows = {id(wanted): wanted.listed.nbytes for way in ways for wanted in way.values()}
    return sum(rows.values()) + _PLANE_BYTES * sum(map(len, ways))


def runs_of(planned: Sequence[Planned | None]) -> list[str]:
    """The ids of the recorded runs that any of the plans needs."""
    return sorted({run.id for each in planned if each is not None for run in each.plan.runs})


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
