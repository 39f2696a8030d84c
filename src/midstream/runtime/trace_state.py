"""What a worker remembers of traced requests, and how it reports on them to the client."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import ChannelClosedError, MidstreamError, TraceError
from midstream.ranks.link import Fetch
from midstream.runtime.request import TraceRequest
from midstream.trace.program import Outcome, Program
from midstream.trace.visit import Journal
from midstream.transport.sender import Sender

_log = logging.getLogger(__name__)


@dataclass
class TracedGroup:
    """One trace: the programs of its requests, and what its invokes share.

    Attributes:
        programs: for each request, the programs of its bodies.
        failure: why the programs could not be loaded. One of the requests may carry them for all.
        shared: values shared by invokes, by name.
        running: the engine's ids of the requests that run.
        ended: how many have ended.
    """

    programs: list[list[Program]]
    failure: MidstreamError | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    ended: int = 0

    def programs_of(self, index: int) -> list[Program]:
        """The programs of one request. Raises MidstreamError if there are none."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if not 0 <= index < len(self.programs):
            there = len(self.programs)
            raise TraceError(
                f"Request {index} of a trace came with code for {there}; send its requests with the code made for them."
            )
        return self.programs[index]


@dataclass
class TracedRequest:
    """One running request with a trace.

    Attributes:
        programs: by the name of the body.
        main: name of the trace's own body; the others are standing edits.
        seen: positions that the bodies have processed.
        generated: tokens generated so far.
        outcomes: of the bodies that have ended.
        journals: of its bodies, in their order.
        goes_on: fetches from the last pipeline stage whether the bodies have another step.
    """

    trace: TraceRequest
    programs: dict[str, Program]
    main: str
    prompt_length: int
    sampling: Any
    seen: int = 0
    generated: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    journals: list[Journal] = field(default_factory=list)
    goes_on: Fetch | None = None

    @property
    def bodies(self) -> list[str]:
        """The names of its bodies in the order in which they run: standing edits first, then the trace's own."""
        return [*(f"{self.main}#{number}" for number in range(self.trace.bodies - 1)), self.main]

    @property
    def steps(self) -> str:
        """The name under which the last pipeline stage publishes that the bodies have another step."""
        return f"{self.main} steps"

    @property
    def open_bodies(self) -> list[str]:
        """The bodies that have not ended."""
        return [name for name in self.programs if name not in self.outcomes]

    @property
    def has_failed(self) -> bool:
        return any(outcome.failure is not None for outcome in self.outcomes.values())

    @property
    def may_stop(self) -> bool:
        """Whether a token can end the request."""
        return self.sampling.eos_token_id is not None or bool(self.sampling.stop_token_ids)

    def is_over(self, token: int | None, max_model_len: int) -> bool:
        """Whether the engine ends the request with this token. The async scheduler may run one more step, which the trace must not see."""
        sampling = self.sampling
        if sampling.max_tokens is not None and self.generated >= sampling.max_tokens:
            return True
        if self.prompt_length + self.generated >= max_model_len:
            return True
        stops = token is not None and (token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()))
        return stops and self.generated >= sampling.min_tokens


class Reports:
    """Sends what traces gave to the client.

    Args:
        stage: pipeline stage of this worker.
        speaks: whether this worker reports. Of the tensor-parallel ranks of a stage, which all have the same, only one does.

    Attributes:
        sender: the channel to the client, once it has connected.
    """

    def __init__(self, stage: int = 0, speaks: bool = True) -> None:
        self.speaks = speaks
        self.sender: Sender | None = None
        self._stage = stage
        self._client_gone = False

    @property
    def queued_bytes(self) -> int:
        return self.sender.queued_bytes if self.sender is not None else 0

    def send(self, name: str, trace: TraceRequest, outcomes: list[Outcome], final: bool = True) -> None:
        """What a request's bodies gave; if not `final`, what they have saved so far."""
        if not self.speaks:
            return
        if self.sender is None:
            _log.error("A trace's results are lost: the client has not connected to this worker.")
            return
        header = {"key": (trace.trace, trace.index), "request": name, "final": final, "stage": self._stage}
        try:
            self.sender.send(header, outcomes, name if trace.stream else None, exact=final)
            if final:
                self.sender.end(name)
        except ChannelClosedError as error:  # the client is closing and has yet to tell the engine
            if not self._client_gone:
                _log.warning("A trace's results are lost: %s", error)
            self._client_gone = True

    def end(self, name: str) -> None:
        """Nothing more is sent for the request."""
        if self.sender is not None:
            self.sender.end(name)
