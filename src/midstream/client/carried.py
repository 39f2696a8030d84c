"""From invokes to the requests of a vLLM engine: what their traces and plans put into the sampling parameters."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from midstream.capture.selection import Routes
from midstream.client.answers import asked
from midstream.client.capturing import Capturing
from midstream.client.planned import Planned, runs_of
from midstream.client.submission import Requests
from midstream.client.tracer import Invoke
from midstream.engine import launch
from midstream.errors import ParameterError, PlanError, TraceError
from midstream.plan.values import Plan
from midstream.runtime.plan_request import PlanRequest, packed
from midstream.runtime.trace_request import Envelope, TraceRequest, requests_of
from midstream.settings import NAME
from midstream.trace.analysis import keeps_to_graph_sites
from midstream.trace.program import Program, ship

if TYPE_CHECKING:
    from midstream.client.vllm import VLLM


def take_plan(invoke: Invoke) -> Invoke:
    """The invoke with the plan that its `extra_args` carry, if they do, as its plan. Raises PlanError if it has another; ParameterError."""
    extra = invoke.params.get("extra_args") or {}
    if not isinstance(extra, Mapping):
        raise ParameterError(f"extra_args is {extra!r}; allowed: a dict.")
    if NAME not in extra:
        return invoke
    if invoke.plan:
        raise PlanError(f"The plan was given twice: as plan=, and as extra_args[{NAME!r}].")
    given = extra[NAME]
    given = given["plan"] if isinstance(given, Mapping) and "plan" in given else given
    rest = {name: value for name, value in extra.items() if name != NAME}
    return replace(invoke, plan=Plan.of(given), params={**invoke.params, "extra_args": rest})


def make_requests(
    model: VLLM,
    invokes: Sequence[Invoke],
    prompts: list[list[int]],
    together: bool,
    record: tuple[str, str] | None = None,
) -> Requests:
    """What is to be submitted for `invokes`.

    Args:
        prompts: their token ids.
        together: whether all of them must be in the same steps.
        record: `(id, name)` of the run that captured rows are kept as in the workers.

    Raises:
        PromptError: a prompt that cannot be traced in one piece.
        PlanError: a plan that cannot be done on this model, or to its prompt.
    """
    traces = _traces(model, invokes, prompts, together)
    planned = _planned(model, invokes, prompts)
    stages = model.config.parallel_config.pipeline_parallel_size
    capturing = [
        Capturing(
            p if record is None else replace(p, routes=Routes({}, ())),
            invoke.params.get("n", 1),
            model.sinks,
            stages,
            invoke.collected,
        )
        if p is not None and p.plan.captures
        else None
        for p, invoke in zip(planned, invokes, strict=True)
    ]
    return Requests(
        [launch.engine_prompt(ids, secrets.token_hex(8) if traces[0] is not None else None) for ids in prompts],
        _params(invokes, traces, planned, capturing, record),
        traces,
        capturing,
        planned,
        runs_of(planned),
        [invoke.answers for invoke in invokes],
    )


def _traces(
    model: VLLM, invokes: Sequence[Invoke], prompts: list[list[int]], together: bool
) -> Sequence[TraceRequest | None]:
    """What each request carries of the trace, or None for all if there is none."""
    if not model.edits and all(invoke.program is None for invoke in invokes):
        return [None] * len(invokes)
    if model.config.speculative_config is not None:
        raise TraceError(
            "Traces are not supported with speculative decoding, whose drafts they would see as the request's own tokens. Start the engine "
            "without speculative_config, or send a plan."
        )
    programs = [_with_edits(model, invoke.program) for invoke in invokes]
    samples = [invoke.params.get("n", 1) for invoke in invokes]
    launch.check_prompts(model.config, [p for p, n in zip(prompts, samples, strict=True) for _ in range(n)], together)
    keep = [all(map(keeps_to_graph_sites, each)) for each in programs]
    return requests_of(ship(programs), [len(each) for each in programs], keep, samples, together, model._deferred)


def _with_edits(model: VLLM, program: Program | None) -> list[Program]:
    return [*model.edits.values(), *([program] if program is not None else [])]


def _planned(model: VLLM, invokes: Sequence[Invoke], prompts: list[list[int]]) -> list[Planned | None]:
    """The plan of each invoke, checked. Raises PlanError."""
    if not any(invoke.plan for invoke in invokes):
        return [None] * len(invokes)
    planner = model.planner
    try:
        return [
            planner.prepare(invoke.plan, invoke.prompt, ids, invoke.params) if invoke.plan else None
            for invoke, ids in zip(invokes, prompts, strict=True)
        ]
    finally:
        planner.forget_functions()


def _params(
    invokes: Sequence[Invoke],
    traces: Sequence[TraceRequest | None],
    planned: Sequence[Planned | None],
    capturing: Sequence[Capturing | None],
    record: tuple[str, str] | None,
) -> list[Any]:
    """The sampling parameters of each request. Those that carry nothing are shared, as they were given."""
    bases: dict[Any, Any] = {}
    shared: dict[Any, Any] = {}
    found = []
    for invoke, trace, plan, rows in zip(invokes, traces, planned, capturing, strict=True):
        if trace is not None:
            found.append(
                _with_plan(launch.sampling_params(asked(invoke.params, invoke.answers), trace), plan, rows, record)
            )
            continue
        same = (id(invoke.params), id(invoke.answers))
        if same not in bases:
            bases[same] = launch.sampling_params(asked(invoke.params, invoke.answers), None)
        base = bases[same]
        if plan is None:
            found.append(base)
        elif rows is not None:  # they come to an address of its own
            found.append(_with_plan(copy.copy(base), plan, rows, record))
        else:
            key = (same, plan.plan)
            if key not in shared:
                shared[key] = _with_plan(copy.copy(base), plan, None, record)
            found.append(shared[key])
    return found


def _with_plan(params: Any, planned: Planned | None, rows: Capturing | None, record: tuple[str, str] | None) -> Any:
    """`params`, changed, carrying the plan, and the address of its rows."""
    if planned is not None:
        key = rows.key if rows is not None else None
        carried = PlanRequest(packed(planned.bare), planned.facts.num_layers, capture=key, record=record, checked=True)
        extra = params.extra_args or {}
        params.extra_args = {**extra, NAME: Envelope({**extra.get(NAME, {}), **carried.to_extra_args()[NAME]})}
    return params
