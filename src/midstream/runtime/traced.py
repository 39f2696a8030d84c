"""The traced requests that a worker knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from midstream.errors import MidstreamError, TraceError
from midstream.ranks.fetch import Fetch
from midstream.runtime.trace_request import TraceRequest
from midstream.trace.program import Outcome, Program
from midstream.trace.visit import Journal


@dataclass
class TracedGroup:
    """The programs of one trace, and what its invokes share.

    Attributes:
        failure: why they could not be loaded: one of its requests may have brought them for all.
    """

    programs: list[list[Program]]
    failure: MidstreamError | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    ended: int = 0

    def programs_of(self, index: int) -> list[Program]:
        """Those of one of its requests. Raises MidstreamError if there are none."""
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
    """One traced request on its way."""

    trace: TraceRequest
    programs: dict[str, Program]  # by the name of the body
    main: str
    prompt_length: int
    sampling: Any
    seen: int = 0  # positions that its bodies have been through
    generated: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    journals: list[Journal] = field(default_factory=list)  # of its bodies, in their order
    goes_on: Fetch | None = None  # from the last pipeline stage: whether the bodies have another step

    @property
    def bodies(self) -> list[str]:
        """Their names, in the order in which they run: those of standing edits, then the trace's own."""
        return [*(f"{self.main}#{number}" for number in range(self.trace.bodies - 1)), self.main]

    @property
    def steps(self) -> str:
        """Under which the last pipeline stage says that the bodies have another step."""
        return f"{self.main} steps"

    @property
    def open_bodies(self) -> list[str]:
        """Those whose outcome is not there."""
        return [name for name in self.programs if name not in self.outcomes]

    @property
    def has_failed(self) -> bool:
        return any(outcome.failure is not None for outcome in self.outcomes.values())

    @property
    def may_stop(self) -> bool:
        """Whether a token can end it."""
        return self.sampling.eos_token_id is not None or bool(self.sampling.stop_token_ids)

    def is_over(self, token: int | None, max_model_len: int) -> bool:
        """Whether the engine ends the request with this token: its async scheduler may run a step more, which nobody may see."""
        sampling = self.sampling
        if sampling.max_tokens is not None and self.generated >= sampling.max_tokens:
            return True
        if self.prompt_length + self.generated >= max_model_len:
            return True
        stops = token is not None and (token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()))
        return stops and self.generated >= sampling.min_tokens
