"""Requests of a vLLM engine: what traces and plans put into sampling parameters, and what comes back on the outputs."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.capture.rows import Captured, Routes
from midstream.capture.sinks import Sinks
from midstream.client.requests import Answers, Invoke, InvokeResult, Planner, PreparedPlan, runs_of
from midstream.client.vllm_captures import RowReceiver, sample_index
from midstream.engine import launch
from midstream.errors import (
    NOT_FINITE,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NotFiniteError,
    ParameterError,
    PlanError,
    TraceError,
    UnsendableError,
)
from midstream.plan.values import Plan
from midstream.ranks.merge import merged_outcomes
from midstream.runtime.request import Envelope, PlanRequest, TraceRequest, packed, requests_of
from midstream.settings import NAME
from midstream.trace.analysis import keeps_to_graph_sites
from midstream.trace.program import Outcome, Program, ship
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects

RecordAs = tuple[str, str]  # id and name of the run that the workers keep captured rows as


@dataclass
class EngineRequests:
    """Requests to submit. Each field but `runs` has one item for each request.

    Attributes:
        traces: what traced requests carry.
        receivers: receive captured rows.
        runs: ids of the recorded runs that any of the plans uses.
    """

    prompts: list[dict[str, Any]]
    params: list[Any]
    traces: Sequence[TraceRequest | None]
    receivers: Sequence[RowReceiver | None]
    plans: Sequence[PreparedPlan | None]
    answers: Sequence[Answers]
    runs: list[str]

    @property
    def trace_ids(self) -> list[str]:
        return sorted({trace.trace for trace in self.traces if trace is not None})


# From invokes to requests.


def take_plan(invoke: Invoke) -> Invoke:
    """The invoke with the plan of its `extra_args`, if they have one, as its plan.

    Raises PlanError if it has another plan, ParameterError if `extra_args` is no dict.
    """
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
    invokes: Sequence[Invoke],
    prompts: list[list[int]],
    together: bool,
    config: Any,
    *,
    edits: Sequence[Program] = (),
    planner: Callable[[], Planner],
    sinks: Sinks,
    stream: bool = False,
    record: RecordAs | None = None,
) -> EngineRequests:
    """The requests of `invokes`.

    Args:
        prompts: their token ids.
        together: whether all of them must be in the same steps.
        config: the engine's VllmConfig.
        edits: the model's standing edits, which run on every request.
        planner: called if there are plans.
        sinks: take captured rows.
        stream: whether to send a trace's saved values after each step.
        record: the run that captured rows are kept as, in the workers.

    Raises:
        PromptError: a prompt that cannot be traced in one step.
        PlanError: a plan that cannot be done on this model, or to its prompt.
    """
    traces: Sequence[TraceRequest | None] = [None] * len(invokes)
    if edits or any(invoke.program is not None for invoke in invokes):
        traces = _traces(invokes, prompts, together, config, edits, stream)
    plans: Sequence[PreparedPlan | None] = [None] * len(invokes)
    if any(invoke.plan for invoke in invokes):
        plans = _plans(invokes, prompts, planner())
    stages = config.parallel_config.pipeline_parallel_size
    receivers = [
        RowReceiver(
            plan if record is None else replace(plan, routes=Routes({}, ())),
            invoke.params.get("n", 1),
            sinks,
            stages,
            invoke.collected,
        )
        if plan is not None and plan.plan.captures
        else None
        for plan, invoke in zip(plans, invokes, strict=True)
    ]
    return EngineRequests(
        [launch.engine_prompt(ids, secrets.token_hex(8) if traces[0] is not None else None) for ids in prompts],
        _params(invokes, traces, plans, receivers, record),
        traces,
        receivers,
        plans,
        [invoke.answers for invoke in invokes],
        runs_of(plans),
    )


def _traces(
    invokes: Sequence[Invoke],
    prompts: list[list[int]],
    together: bool,
    config: Any,
    edits: Sequence[Program],
    stream: bool,
) -> list[TraceRequest]:
    if config.speculative_config is not None:
        raise TraceError(
            "Traces are not supported with speculative decoding: they would see draft tokens as the request's own. Start the engine "
            "without speculative_config, or send a plan."
        )
    programs = [[*edits, *([invoke.program] if invoke.program is not None else [])] for invoke in invokes]
    samples = [invoke.params.get("n", 1) for invoke in invokes]
    launch.check_prompts(config, [p for p, n in zip(prompts, samples, strict=True) for _ in range(n)], together)
    keep = [all(map(keeps_to_graph_sites, each)) for each in programs]
    return requests_of(ship(programs), [len(each) for each in programs], keep, samples, together, stream)


def _plans(invokes: Sequence[Invoke], prompts: list[list[int]], planner: Planner) -> list[PreparedPlan | None]:
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
    plans: Sequence[PreparedPlan | None],
    receivers: Sequence[RowReceiver | None],
    record: RecordAs | None,
) -> list[Any]:
    """The sampling parameters of each request. Requests with equal parameters and plans share one object."""
    bases: dict[Any, Any] = {}
    shared: dict[Any, Any] = {}
    found = []
    for invoke, trace, plan, receiver in zip(invokes, traces, plans, receivers, strict=True):
        if trace is not None:
            found.append(_with_plan(_sampling_params(invoke, trace), plan, receiver, record))
            continue
        same = (id(invoke.params), id(invoke.answers))
        if same not in bases:
            bases[same] = _sampling_params(invoke, None)
        if plan is None:
            found.append(bases[same])
        elif receiver is not None:  # its rows have an address of their own
            found.append(_with_plan(copy.copy(bases[same]), plan, receiver, record))
        else:
            key = (same, plan.plan)
            if key not in shared:
                shared[key] = _with_plan(copy.copy(bases[same]), plan, None, record)
            found.append(shared[key])
    return found


def _sampling_params(invoke: Invoke, trace: TraceRequest | None) -> Any:
    answers = {"logprob_token_ids": list(invoke.answers.values())} if invoke.answers else {}
    return launch.sampling_params({**invoke.params, **answers}, trace)


def _with_plan(params: Any, plan: PreparedPlan | None, receiver: RowReceiver | None, record: RecordAs | None) -> Any:
    """`params`, changed in place to carry the plan, and the address of its rows."""
    if plan is not None:
        key = receiver.key if receiver is not None else None
        request = PlanRequest(packed(plan.bare), plan.facts.num_layers, capture=key, record=record, checked=True)
        extra = params.extra_args or {}
        params.extra_args = {**extra, NAME: Envelope({**extra.get(NAME, {}), **request.to_extra_args()[NAME]})}
    return params


# From what comes back to outputs.


def graded(output: Any, answers: Answers) -> dict[str | int, float] | None:
    """The answers' log-probabilities, in nats; None if the output has no first token."""
    if not answers:
        return {}
    if not (logprobs := output.outputs[0].logprobs):
        return None
    return {answer: logprobs[0][token].logprob for answer, token in answers.items()}


def counts_of(output: Any) -> list[int]:
    """The number of tokens of each sample."""
    return [len(sample.token_ids) for sample in output.outputs]


def put_captures(
    result: InvokeResult, receiver: RowReceiver | None, counts: Sequence[int], patient: bool = False
) -> None:
    """Put captures on a request's output, or the error on its result.

    Args:
        counts: the number of tokens of each sample.
        patient: as of `Sinks.result`.
    """
    output = result.output
    output.captures = None
    try:
        _raise_if_refused(output)
        output.captures = (
            receiver.result(counts, patient) if receiver is not None else Captured.nothing(output.request_id)
        )
    except MidstreamError as error:
        result.error = error


def _raise_if_refused(output: Any) -> None:
    """Raise PlanError or NotFiniteError if the engine ended the request because of its plan or trace."""
    for sample in output.outputs:
        if sample.finish_reason == "error" and isinstance(sample.stop_reason, str):
            raise (NotFiniteError if sample.stop_reason.startswith(NOT_FINITE) else PlanError)(sample.stop_reason)


def results_lost(error: ChannelClosedError) -> MidstreamError:
    return EngineClosedError(f"The engine has gone before a trace's results came: {error}")


def merge_stages(messages: Iterable[tuple[dict[str, Any], list[Outcome]]], samples: int) -> list[list[Outcome]]:
    """The outcomes of each of a request's samples, merged from the messages of the pipeline stages."""
    each: dict[int, dict[int, list[Outcome]]] = {}
    for header, outcomes in messages:
        if isinstance(outcomes, UnsendableError):
            raise TraceError(f"The saved values of the trace could not be sent: {outcomes}.")
        each.setdefault(sample_index(header["request"], samples), {})[header["stage"]] = outcomes
    return [merged_outcomes([of_stage for _, of_stage in sorted(each[sample].items())]) for sample in sorted(each)]


def traced_result(samples: Sequence[list[Outcome]], output: Any) -> InvokeResult:
    """The result of a traced request, with the saved values on its output."""
    outcomes = [outcome for sample in samples for outcome in sample]
    for outcome in outcomes:
        outcome.values = map_objects(outcome.values, Result, lambda _: output)
    output.saves = saves_of(samples)
    return InvokeResult(outcomes, output)


def saves_of(samples: Sequence[list[Outcome]]) -> Any:
    """The values that the request's own body saved: a dict, or a list of dicts for n > 1."""
    own = [outcomes[0].values for outcomes in samples]
    return own[0] if len(own) == 1 else own or {}
