"""The requests of one trace, or of one `generate`, on their way through a sync engine; and what comes back of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.client.answers import Answers, graded
from midstream.client.capturing import RESULT_SECONDS, Capturing, Following, Taking, nothing_captured, sample_index
from midstream.client.planned import Planned
from midstream.client.tracer import Ran
from midstream.engine import launch
from midstream.errors import (
    NOT_FINITE,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NotFiniteError,
    PlanError,
    TraceError,
    UnsendableError,
)
from midstream.ranks.merge import merged_outcomes
from midstream.runtime.trace_request import TraceRequest
from midstream.trace.program import Outcome
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects
from midstream.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from midstream.client.vllm import VLLM

Message = tuple[dict[str, Any], list[Outcome]]


@dataclass
class Requests:
    """What is to be submitted, in the order of the requests.

    Attributes:
        traces: what traced requests carry.
        capturing: where the captured rows of requests go.
        planned: the plans of those that have one.
        runs: ids of the recorded runs that any of them uses.
        answers: what is graded of each.
    """

    prompts: list[dict[str, Any]]
    params: list[Any]
    traces: Sequence[TraceRequest | None]
    capturing: Sequence[Capturing | None]
    planned: Sequence[Planned | None]
    runs: list[str]
    answers: Sequence[Answers]

    @property
    def trace_ids(self) -> list[str]:
        return sorted({trace.trace for trace in self.traces if trace is not None})


class Submission:
    """Requests for a `vllm.LLM`."""

    def __init__(self, model: VLLM, requests: Requests) -> None:
        self._model = model
        self.requests = requests

    def wait(self) -> list[Ran]:
        """Run them to their end; those of several threads one after the other."""
        with ExitStack() as stack:
            stack.enter_context(self._model.lock)
            self._model.drop_interrupted()
            if self.requests.runs:
                self._model.runs.lease(self.requests.runs, 1)
                stack.callback(self._model.release_runs, self.requests.runs)
            return self._run(stack)

    def _run(self, stack: ExitStack) -> list[Ran]:
        engine, requests = self._model.engine, self.requests
        boxes = self._model.expect(requests, together=True)
        traced, captured = boxes[: len(requests.traces)], boxes[len(requests.traces) :]
        for box in dict.fromkeys(filter(None, boxes)):
            stack.callback(box.close)
        for capturing in filter(None, requests.capturing):
            stack.callback(capturing.discard)
        rows = _Rows(requests.capturing, captured, stack)
        try:
            progress = self._model.progress and len(requests.prompts) > 1
            outputs = launch.generate(engine, requests.prompts, requests.params, progress, rows.end)
            if launch.is_in_process(engine) and (any(traced) or any(requests.planned)):
                launch.ask(engine, "midstream_finish")
            for output in outputs:
                rows.end(output)
            rows.wait()
            done = [_collect(box, output, self._model.stages) for box, output in zip(traced, outputs, strict=True)]
        except BaseException as error:
            self._model.interrupted += requests.trace_ids
            self._model.has_died |= isinstance(error, EngineClosedError)
            raise
        put_captures(done, requests)
        for each, answers in zip(done, requests.answers, strict=True):
            each.output.answers = graded(each.output, answers)
        return done


class _Rows:
    """The captured rows of a submission, which are taken while the engine runs; those that go to sinks are handed on."""

    def __init__(
        self, capturing: Sequence[Capturing | None], boxes: Sequence[Mailbox | None], stack: ExitStack
    ) -> None:
        pairs = [(c, box) for c, box in zip(capturing, boxes, strict=True) if c is not None and box is not None]
        taken = [(c, box) for c, box in pairs if not c.has_sinks]
        self._taking = Taking([c for c, _ in taken], taken[0][1]) if taken else None  # one box for all of them
        followed = [(c, box) for c, box in pairs if c.has_sinks]
        self._following = Following(followed) if followed else None
        if self._following is not None:
            stack.callback(self._following.close)

    def end(self, output: Any) -> None:
        """A request has ended, with this output."""
        if self._following is not None:
            self._following.end(output.request_id, counts_of(output))

    def wait(self) -> None:
        if self._following is not None:
            self._following.wait()  # first: what a slow sink holds up, it holds up for all that come by the same connection
        if self._taking is not None:
            self._taking.wait()


def counts_of(output: Any) -> list[int]:
    """How many tokens each sample of a request has."""
    return [len(sample.token_ids) for sample in output.outputs]


def put_captures(done: Sequence[Ran], requests: Requests) -> None:
    """Put captures on the outputs. A request that failed has its error in its place."""
    counts = [
        counts_of(ran.output) if capturing is not None else []
        for ran, capturing in zip(done, requests.capturing, strict=True)
    ]
    for capturing, count in zip(requests.capturing, counts, strict=True):
        if capturing is not None:
            capturing.end(count)
    for ran, capturing, planned, count in zip(done, requests.capturing, requests.planned, counts, strict=True):
        put_capture(ran, capturing, planned, count)


def put_capture(
    ran: Ran, capturing: Capturing | None, planned: Planned | None, generated: Sequence[int], patient: bool = False
) -> None:
    """Likewise of one request, whose samples have `generated` tokens; `patient` is as of `Sinks.result`."""
    ran.output.captures = None
    try:
        raise_if_refused(ran.output)
        ran.output.captures = (
            capturing.result(generated, patient) if capturing is not None else nothing_captured(ran.output.request_id)
        )
    except MidstreamError as error:
        ran.error = error


def raise_if_refused(output: Any) -> None:
    """Raise PlanError or NotFiniteError if the engine ended the request for what its plan or trace asks for."""
    for sample in output.outputs:
        if sample.finish_reason == "error" and isinstance(sample.stop_reason, str):
            raise (NotFiniteError if sample.stop_reason.startswith(NOT_FINITE) else PlanError)(sample.stop_reason)


def _collect(box: Mailbox | None, output: Any, stages: int) -> Ran:
    """What every pipeline stage sends of every sample."""
    if box is None:
        output.saves = {}
        return Ran([], output)
    samples = len(output.outputs)
    try:
        messages = [box.get(RESULT_SECONDS) for _ in range(stages * samples)]
    except ChannelClosedError as error:
        raise results_lost(error) from error
    return ran(merged(messages, samples), output)


def results_lost(error: ChannelClosedError) -> MidstreamError:
    """A worker has gone, and the engine goes with it."""
    return EngineClosedError(f"The engine has gone before a trace's results came: {error}")


def merged(messages: Iterable[Message], samples: int) -> list[list[Outcome]]:
    """The outcomes of each of a request's samples, in their order, from what the pipeline stages have sent."""
    each: dict[int, dict[int, list[Outcome]]] = {}
    for header, outcomes in messages:
        if isinstance(outcomes, UnsendableError):
            raise TraceError(f"What the trace saved has not come back: {outcomes}.")
        each.setdefault(sample_index(header["request"], samples), {})[header["stage"]] = outcomes
    return [merged_outcomes([of_stage for _, of_stage in sorted(each[sample].items())]) for sample in sorted(each)]


def ran(samples: Sequence[list[Outcome]], output: Any) -> Ran:
    """A request's outcomes, in the order of its completions, and its output with the saves on it."""
    outcomes = [outcome for sample in samples for outcome in sample]
    for outcome in outcomes:
        outcome.values = map_objects(outcome.values, Result, lambda _: output)
    output.saves = saves_of(samples)
    return Ran(outcomes, output)


def saves_of(samples: Sequence[list[Outcome]]) -> Any:
    """What the request's own bodies saved: a dict, or a list of them for n > 1."""
    own = [outcomes[0].values for outcomes in samples]
    return own[0] if len(own) == 1 else own or {}
