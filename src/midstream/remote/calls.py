"""The messages between `Remote` and a server: the client sends one call, and the server sends the outputs as they come.

The call is msgpack. Code in it is pickled; the server loads it only if its operator allows traces. The outputs are data
(`transport.data`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import msgspec

from midstream.capture.rows import Captured
from midstream.errors import ChannelError, MidstreamError, RemoteError
from midstream.lowering.client_traces import Ending
from midstream.plan.probes import Probe, ScoreChunk, Scores, chunks_of
from midstream.requests.arguments import MissingSpace
from midstream.requests.invokes import InvokeResult, sample_saves
from midstream.runtime.request import Tier
from midstream.trace.code import Failure, Outcome
from midstream.trace.tracer import Result
from midstream.transport.data import NO_MESSAGE, register_data_kind
from midstream.tree import map_objects

MAX_PROMPTS, MAX_TOKENS = 1024, 1 << 20  # limits of one call; a character of a text prompt counts as a token
_FOR_PROMPTS = msgspec.Meta(max_length=MAX_PROMPTS)


class CallEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt of a call: text or token ids. `plan` is the number of its plan in the call, and `model` the name of its adapter.

    The server reads the Raw fields later: one by one on another thread, and only if they are not too large.
    """

    prompt: msgspec.Raw  # str | list[int]
    params: msgspec.Raw  # dict[str, Any]
    plan: int | None = None
    answers: msgspec.Raw = msgspec.Raw(b"\x90")  # list[str | int]
    model: str | None = None


class RemoteCall(msgspec.Struct, forbid_unknown_fields=True):
    """Requests that a client sends together.

    Attributes:
        version: the client's version of midstream.
        asked: the prompts.
        plans: as `Plan.to_wire` writes them.
        stream: whether the server sends outputs with each token, and not only at the end.
        together: whether all requests must be in the same steps.
        programs, bodies: as in `ShippedCode`; empty if the server runs no code.
        tier: where the code of the traces runs.
        own: for each request, the number of the plan that makes the writes and captures of its trace, if the tier has plans.
        keeps_to_graphs: for each request, as in `TraceRequest`.
        lengths: the prompt lengths, in tokens, for which the plans of `own` were made.
    """

    version: str
    asked: Annotated[list[CallEntry], _FOR_PROMPTS]
    plans: Annotated[list[msgspec.Raw], _FOR_PROMPTS] = []
    stream: bool = False
    together: bool = False
    programs: bytes = b""
    bodies: Annotated[list[int], _FOR_PROMPTS] = []
    tier: Tier = Tier.FORWARD
    own: Annotated[list[int], _FOR_PROMPTS] = []
    keeps_to_graphs: Annotated[list[bool], _FOR_PROMPTS] = []
    lengths: Annotated[list[int], _FOR_PROMPTS] = []


def as_msgpack(value: Any) -> msgspec.Raw:
    """A value as msgpack."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


class Logprob(NamedTuple):
    """A token's log-probability in nats, its rank from 1 on, and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass
class RemoteSample:
    """One generated sequence, with the names that vLLM uses.

    Attributes:
        logprobs: for each token, a `Logprob` by token id; None unless asked for.
        scores: the scores of the plan's probes.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: list[ScoreChunk] = field(default_factory=list)


@dataclass
class RemoteOutput:
    """The output of one prompt, with the names that vLLM uses.

    Attributes:
        outputs: one for each sample.
        finished: whether this is the last output.
        saves: the trace's saved values by name; until the end, the values saved so far. A list of dicts for n > 1.
        captures: the rows that the plan captured; a list for n > 1. None until the end.
        answers: the log-probability of each answer, in nats.
        scores: the scores of the plan's probes; a list for n > 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[RemoteSample]
    prompt: str | None = None
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    saves: Any = field(default_factory=dict)
    captures: Captured | list[Captured] | None = None
    answers: dict[str | int, float] | None = None
    scores: Scores | list[Scores] = field(default_factory=Scores)


@dataclass
class Update:
    """The new part of a request's output.

    Attributes:
        index: of the request in its call.
        samples: with their new text, tokens and scores only.
        outcomes: None until the request ends; only then are the following attributes set. The failure of an outcome is the error to raise.
        captures: one for each sample.
        error, missing: as in `InvokeResult`.
    """

    index: int
    id: str
    prompt: list[int]
    text: str | None
    samples: list[RemoteSample]
    answers: dict[str | int, float] | None
    saves: Any
    outcomes: list[Outcome] | None = None
    captures: list[Captured | None] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: MidstreamError | None = None
    missing: list[MissingSpace] = field(default_factory=list)


for _kind in (Update, RemoteSample, Logprob, MissingSpace, Outcome):
    register_data_kind(_kind)
register_data_kind(Captured, lambda captured: captured.__reduce__()[1], Captured.of)


class UpdateWriter:
    """The server's side: turns the outputs of one request into messages.

    Args:
        hidden: names of probes whose scores the client does not get.
    """

    def __init__(self, index: int, hidden: Collection[str] = ()) -> None:
        self._index, self._hidden = index, hidden
        self._sent: dict[int, tuple[int, int, int]] = {}  # characters, tokens and scores, by sample

    def message(self, output: Any, result: InvokeResult | None) -> Update:
        """The new part of an output of vLLM. `result` belongs to the last output."""
        samples = [self._sample(sample) for sample in output.outputs]
        prompt = list(output.prompt_token_ids or ())
        fields = (self._index, output.request_id, prompt, output.prompt, samples, output.answers)
        if result is None:
            return Update(*fields, output.saves)

        def sent(values: Any) -> Any:  # `tracer.result` stands for the request's own output
            return map_objects(values, type(output), lambda _: Result())

        outcomes = [
            replace(each, values=sent(each.values), failure=each.failure and each.failure.exception())  # type: ignore[arg-type]
            for each in result.outcomes
        ]
        captures = output.captures if isinstance(output.captures, list) else [output.captures]
        rest = outcomes, captures, _logprobs(output.prompt_logprobs), result.error, [*result.missing]
        return Update(*fields, sent(output.saves), *rest)

    def _sample(self, sample: Any) -> RemoteSample:
        characters, tokens, scores = self._sent.get(sample.index, (0, 0, 0))
        chunks = list(chunks_of(sample))
        self._sent[sample.index] = len(sample.text), len(sample.token_ids), len(chunks)
        return RemoteSample(
            sample.index,
            sample.text[characters:],
            list(sample.token_ids[tokens:]),
            sample.cumulative_logprob,
            _logprobs(sample.logprobs[tokens:] if sample.logprobs is not None else None),
            sample.finish_reason,
            sample.stop_reason,
            [chunk for chunk in chunks[scores:] if chunk[0] not in self._hidden],
        )


def _logprobs(given: Sequence[Mapping[int, Any] | None] | None) -> Any:
    if given is None:
        return None
    return [
        each and {token: Logprob(found.logprob, found.rank, found.decoded_token) for token, found in each.items()}
        for each in given
    ]


@dataclass
class _ReceivedFailure(Failure):
    received: MidstreamError | None = None

    def exception(self) -> MidstreamError:
        assert self.received is not None
        return self.received


class OutputReader:
    """The client's side: puts the messages about one request together.

    Args:
        probes: of the request's plan.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = probes
        self.output = RemoteOutput("", [], [])
        self._samples: dict[int, RemoteSample] = {}

    def read(self, new: Update) -> tuple[RemoteOutput, InvokeResult | None]:
        """The output so far, and the result if the request is over."""
        for sample in new.samples:
            if (before := self._samples.get(sample.index)) is not None:
                sample.text, sample.token_ids = before.text + sample.text, before.token_ids + sample.token_ids
                sample.scores = before.scores + sample.scores
                if sample.logprobs is not None:
                    sample.logprobs = (before.logprobs or []) + sample.logprobs
            self._samples[sample.index] = sample
        samples = [self._samples[index] for index in sorted(self._samples)]
        self.output = output = RemoteOutput(new.id, new.prompt, samples, new.text, saves=new.saves, answers=new.answers)
        scores = [Scores(self._probes, sample.scores) for sample in samples]
        output.scores = scores[0] if len(scores) == 1 else scores
        if new.outcomes is None or new.captures is None:
            return output, None

        def received(values: Any) -> Any:
            return map_objects(values, Result, lambda result: result.of(output))

        output.finished, output.prompt_logprobs, output.saves = True, new.prompt_logprobs, received(new.saves)
        output.captures = new.captures[0] if len(new.captures) == 1 else new.captures  # type: ignore[assignment]
        for outcome in new.outcomes:
            outcome.values = received(outcome.values)
            if (error := outcome.failure) is not None:
                outcome.failure = _ReceivedFailure(None, type(error).__name__, [], str(error), [], received=error)  # type: ignore[arg-type]
        return output, InvokeResult(new.outcomes, output, error=new.error, missing=new.missing)


def _end_trace(ending: Ending, output: RemoteOutput, result: InvokeResult) -> None:
    """Make the outcomes of a trace's samples from the captures of its plan, and remove these captures from the output."""
    samples = output.captures if isinstance(output.captures, list) else [output.captures]
    nothing = output.captures = Captured(output.request_id)
    try:
        each = zip(output.outputs, samples, strict=True)
        result.outcomes = [ending(captured or nothing, len(sample.token_ids)) for sample, captured in each]
    except MidstreamError as error:
        result.error = error
    else:
        output.saves = sample_saves([[outcome] for outcome in result.outcomes])


class Progress:
    """The results of a call so far.

    Args:
        endings: for each prompt, the function that makes its trace's outcome, if the server runs no code of the trace.
        probes: for each prompt, the probes of its plan.

    Attributes:
        results: the results of the ended requests, by the requests' numbers.
    """

    def __init__(self, endings: Sequence[Ending | None], probes: Sequence[Sequence[Probe]]) -> None:
        self._endings = endings
        self._readers = [OutputReader(own) for own in probes]
        self.results: dict[int, InvokeResult] = {}

    def read(self, message: Any) -> tuple[int, RemoteOutput, InvokeResult | None] | None:
        """The request's number, its output, and its result if it has ended. None for a sign of life. Raises a message that is an error."""
        if message is None:
            return None
        if isinstance(message, MidstreamError):
            raise message
        if not isinstance(message, Update):
            raise ChannelError(f"{NO_MESSAGE}: {type(message).__name__}")
        index = message.index
        output, result = self._readers[index].read(message)
        if result is not None:
            if (ending := self._endings[index]) is not None and result.error is None:
                _end_trace(ending, output, result)
            self.results[index] = result
        return index, output, result

    def check_over(self) -> None:
        """Raise ChannelError unless all requests are over."""
        if len(self.results) < len(self._readers):
            raise ChannelError("the server ended its answer early")

    def lost_error(self, url: str, reason: object) -> RemoteError:
        """The error for a lost connection. For each request, its `outputs` has the output, or None if the request has not ended, and its
        `saves` the values saved so far.
        """
        saves = [reader.output.saves for reader in self._readers]
        dicts = (part for each in saves for part in (each if isinstance(each, list) else [each]))
        names = sorted({name for part in dicts for name in part})
        done, all_ = len(self.results), len(self._readers)
        saved = (
            f"What had been saved until then is in this error's `saves`: {', '.join(names)}"
            if names
            else "Nothing had been saved"
        )
        error = RemoteError(
            f"The connection to {url} was lost when {done} of {all_} requests were done ({reason}). {saved}."
        )
        error.outputs = [reader.output if i in self.results else None for i, reader in enumerate(self._readers)]
        error.saves = saves
        return error
