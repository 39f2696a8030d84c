"""The requests of one trace, or of one `generate`, on their way through a sync engine; and what comes back of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.backends.tracer import Ran
from midstream.engine import launch
from midstream.engine.request import TraceRequest
from midstream.engine.results import Mailbox
from midstream.trace.program import Outcome
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects

if TYPE_CHECKING:
    from midstream.backends.vllm import VLLM

RESULT_SECONDS = 120.0
Message = tuple[dict[str, Any], list[Outcome]]


@dataclass
class Requests:
    """What is to be submitted: a prompt, sampling parameters and perhaps a trace for each request."""

    prompts: list[dict[str, Any]]
    params: list[Any]
    traces: Sequence[TraceRequest | None]

    @property
    def trace_ids(self) -> list[str]:
        return sorted({trace.trace for trace in self.traces if trace is not None})


class Submission:
    """Requests for a `vllm.LLM`."""

    def __init__(self, model: VLLM, requests: Requests) -> None:
        self._model = model
        self._requests = requests

    def wait(self) -> list[Ran]:
        """Run them to their end."""
        engine, requests = self._model.engine, self._requests
        self._model.drop_interrupted()
        boxes = self._model.expect(requests.traces)
        try:
            progress = self._model.progress and len(requests.prompts) > 1
            outputs = launch.generate(engine, requests.prompts, requests.params, progress)
            if launch.is_in_process(engine) and any(boxes):
                engine.collective_rpc("midstream_finish")
            return [_collect(box, output) for box, output in zip(boxes, outputs, strict=True)]
        except BaseException:
            self._model.interrupted += requests.trace_ids
            raise
        finally:
            for box in boxes:
                if box is not None:
                    box.close()


def _collect(box: Mailbox | None, output: Any) -> Ran:
    return ran([] if box is None else [box.get(RESULT_SECONDS) for _ in output.outputs], output)


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


def sample_index(request_id: str, samples: int) -> int:
    """vLLM names the n samples of a request `0_ID`, `1_ID`, ..."""
    return int(request_id.partition("_")[0]) if samples > 1 else 0
