"""The requests of one trace, or of one `generate`, on their way through a sync engine; and what comes back of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.backends.capturing import RESULT_SECONDS, Capturing, Following, nothing_captured, sample_index
from midstream.backends.planned import Planned
from midstream.backends.tracer import Ran
from midstream.engine import launch
from midstream.engine.request import TraceRequest
from midstream.engine.results import ChannelClosedError, Mailbox
from midstream.errors import EngineClosedError, MidstreamError, PlanError
from midstream.trace.program import Outcome
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects

if TYPE_CHECKING:
    from midstream.backends.vllm import VLLM

Message = tuple[dict[str, Any], list[Outcome]]


@dataclass
class Requests:
    """What is to be submitted, in the order of the requests.

    Attributes:
        traces: what traced requests carry.
        capturing: where the captured rows of requests go.
        planned: the plans of those that have one.
        runs: ids of the recorded runs that any of them uses.
    """

    prompts: list[dict[str, Any]]
    params: list[Any]
    traces: Sequence[TraceRequest | None]
    capturing: Sequence[Capturing | None]
    planned: Sequence[Planned | None]
    runs: list[str]

    @property
    def trace_ids(self) -> list[str]:
        return sorted({trace.trace for trace in self.traces if trace is not None})


class Submission:
    """Requests for a `vllm.LLM`."""

    def __init__(self, model: VLLM, requests: Requests) -> None:
        self._model = model
        self.requests = requests

    def wait(self) -> list[Ran]:
        """Run them to their end."""
        self._model.drop_interrupted()
        with ExitStack() as stack:
            if self.requests.runs:
                self._model.runs.lease(self.requests.runs, 1)
                stack.callback(self._model.release_runs, self.requests.runs)
            return self._run(stack)

    def _run(self, stack: ExitStack) -> list[Ran]:
        engine, requests = self._model.engine, self.requests
        boxes = self._model.expect(requests)
        traced, captured = boxes[: len(requests.traces)], boxes[len(requests.traces) :]
        for box in filter(None, boxes):
            stack.callback(box.close)
        for capturing in filter(None, requests.capturing):
            stack.callback(capturing.discard)
        rows = _Rows(requests.capturing, captured, stack)
        try:
            progress = self._model.progress and len(requests.prompts) > 1
            outputs = launch.generate(engine, requests.prompts, requests.params, progress)
            if launch.is_in_process(engine) and (any(traced) or any(requests.planned)):
                engine.collective_rpc("midstream_finish")
            done = [_collect(box, output) for box, output in zip(traced, outputs, strict=True)]
            rows.wait()
        except BaseException:
            self._model.interrupted += requests.trace_ids
            raise
        put_captures(done, requests)
        return done


class _Rows:
    """The captured rows of a submission: those that go to sinks are handed on while the engine runs."""

    def __init__(
        self, capturing: Sequence[Capturing | None], boxes: Sequence[Mailbox | None], stack: ExitStack
    ) -> None:
        pairs = [(c, box) for c, box in zip(capturing, boxes, strict=True) if c is not None and box is not None]
        self._at_the_end = [(c, box) for c, box in pairs if not c.has_sinks]
        self._following: Following | None = None
        if len(self._at_the_end) < len(pairs):
            self._following = Following([(c, box) for c, box in pairs if c.has_sinks])
            stack.callback(self._following.close)

    def wait(self) -> None:
        for capturing, box in self._at_the_end:
            capturing.wait(box)
        if self._following is not None:
            self._following.wait()


def put_captures(done: Sequence[Ran], requests: Requests) -> None:
    """Put captures on the outputs. A request that failed has its error in its place."""
    counts = [[len(sample.token_ids) for sample in ran.output.outputs] for ran in done]
    for capturing, count in zip(requests.capturing, counts, strict=True):
        if capturing is not None:
            capturing.end(count)
    for ran, capturing, planned, count in zip(done, requests.capturing, requests.planned, counts, strict=True):
        put_capture(ran, capturing, planned, count)


def put_capture(ran: Ran, capturing: Capturing | None, planned: Planned | None, generated: Sequence[int]) -> None:
    """Likewise of one request, whose samples have `generated` tokens."""
    ran.output.captures = None
    try:
        if planned is not None:
            raise_if_refused(ran.output)
        ran.output.captures = (
            capturing.result(generated) if capturing is not None else nothing_captured(ran.output.request_id)
        )
    except MidstreamError as error:
        ran.error = error


def raise_if_refused(output: Any) -> None:
    """Raise PlanError if the engine ended the request for its plan."""
    for sample in output.outputs:
        if sample.finish_reason == "error" and isinstance(sample.stop_reason, str):
            raise PlanError(sample.stop_reason)


def _collect(box: Mailbox | None, output: Any) -> Ran:
    try:
        return ran([] if box is None else [box.get(RESULT_SECONDS) for _ in output.outputs], output)
    except ChannelClosedError as error:
        raise results_lost(error) from error


def results_lost(error: ChannelClosedError) -> MidstreamError:
    """A worker has gone, and the engine goes with it."""
    return EngineClosedError(f"The engine has gone before a trace's results came: {error}")


def ran(messages: list[Message], output: Any) -> Ran:
    """A request's outcomes, in the order of its completions, and its output with the saves on it."""
    messages = sorted(messages, key=lambda message: sample_index(message[0]["request"], len(messages)))
    outcomes = [outcome for _, value in messages for outcome in value]
    for outcome in outcomes:
        outcome.values = map_objects(outcome.values, Result, lambda _: output)
    output.saves = saves_of(messages)
    return Ran(outcomes, output)


def saves_of(messages: Sequence[Message]) -> Any:
    """What the request's own bodies saved: a dict, or a list of them for n > 1."""
    own = [value[0].values for _, value in messages]
    return own[0] if len(own) == 1 else own or {}
