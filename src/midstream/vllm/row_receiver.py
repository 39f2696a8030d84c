"""Receives captured rows from the workers: hands them to sinks as they arrive, and puts them on the output at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from midstream.capture.consumers import Collected
from midstream.capture.rows import Captured, Rows
from midstream.capture.sinks import RequestCapture, Sinks
from midstream.errors import (
    CaptureError,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    PlanError,
    UnsendableError,
)
from midstream.lowering.client_traces import Ending
from midstream.requests.invokes import PreparedPlan
from midstream.runtime.request import sample_index, users_id
from midstream.trace.code import Outcome
from midstream.transport.messages import ResultHeader
from midstream.transport.receiver import Mailbox


@dataclass
class _Sample:
    """The rows that have come for one sample of a request."""

    name: str = ""
    capture: RequestCapture | None = None  # from the first message on
    finals: int = 0
    error: MidstreamError | None = None

    def fail(self, error: MidstreamError) -> None:
        self.error = self.error or error
        if self.capture is not None:
            self.capture.discard(self.error)


class RowReceiver:
    """Receives the captured rows of one request.

    Args:
        plan: the request's plan.
        samples: vLLM's `n`.
        senders: how many workers send rows of a sample. Each sends the rows of its layers.
        collected: the index entry of a request of `model.collect`; None for other requests.
        trace_ending: makes the outcome of the request's trace from the captured rows, if the trace's code does not run on the engine. The
            rows do not go to the output then.

    Attributes:
        key: the address that the workers send the rows to.
        stop: rows at positions below this are final.
    """

    def __init__(
        self,
        plan: PreparedPlan,
        samples: int,
        sinks: Sinks,
        senders: int = 1,
        collected: Collected | None = None,
        trace_ending: Ending | None = None,
    ) -> None:
        self.key = (secrets.token_hex(8), 0)
        self.stop: int | None = None
        self.collected = collected
        self.trace_ending = trace_ending
        self._outcome: Outcome | None = None
        self._plan = plan
        self._sinks = sinks
        self._senders = senders
        self._samples = [_Sample() for _ in range(samples)]
        self._taken, self._seen, self._is_taking = 0, -1, False
        self._is_discarded = False

    @property
    def request_id(self) -> str:
        """The id on the request's output; empty if no message could be read."""
        name = self._samples[0].name
        return name.partition("_")[2] if len(self._samples) > 1 else name

    @property
    def has_sinks(self) -> bool:
        return len(self._plan.routes) > 1

    @property
    def is_complete(self) -> bool:
        return all(sample.finals >= self._senders for sample in self._samples)

    def has_progressed(self) -> bool:
        """Whether the receiver has done work since the last call, or is doing some now. A sink may take long."""
        seen, self._seen = self._seen, self._taken
        return seen != self._taken or self._is_taking

    async def follow(self, box: Mailbox, executor: Executor | None = None) -> None:
        """Take rows as they arrive, until all have come. Waits for full sinks in the executor, if there is one."""
        while not self.is_complete:
            try:
                message = await box.aget()
            except ChannelClosedError as error:
                raise EngineClosedError(f"The engine has gone before the captured rows came: {error}") from error
            if self.has_sinks and executor is not None:
                self._is_taking = True  # also while it waits for a thread
                await asyncio.get_running_loop().run_in_executor(executor, self.take, *message)
            else:
                self.take(*message)
        box.close()  # the last message counts as waiting until now

    @contextlib.contextmanager
    def _taking(self) -> Iterator[None]:
        """A block that counts as progress."""
        self._is_taking = True
        try:
            yield
        finally:
            self._taken, self._is_taking = self._taken + 1, False

    def take(self, header: ResultHeader, value: Any) -> None:
        with self._taking():
            self._take(header, value)

    def _take(self, header: ResultHeader, value: Any) -> None:
        if isinstance(value, UnsendableError):  # the rows' sample is unknown
            for sample in self._samples:
                sample.fail(CaptureError(f"captured rows were lost on their way: {value}"))
                sample.finals = self._senders
            return
        sample = self._samples[sample_index(header.request, len(self._samples))]
        sample.name = sample.name or users_id(header.request)
        sample.finals += header.final
        if value["error"] is not None:
            sample.fail(PlanError(value["error"]))
        if sample.error is not None or self._is_discarded:
            return
        try:
            if sample.capture is None:
                sample.capture = self._plan.capture(sample.name, self._sinks, self.collected)
            sample.capture.add(itertools.starmap(Rows, value["rows"]), max(self.stop or 0, header.confirmed))
        except CaptureError as error:
            sample.fail(error)

    def end(self, generated: Sequence[int]) -> None:
        """The request has ended and all rows have come. `generated`: the number of tokens of each sample."""
        with self._taking():
            for sample, stop in zip(self._samples, self._stops(generated), strict=True):
                if sample.error is None and sample.capture is not None:
                    sample.capture.end(stop)

    async def delivered(self) -> None:
        """Wait until the sinks have taken the rows of the ended request."""
        for sample in self._samples:
            if sample.error is None and sample.capture is not None:
                await sample.capture.delivered()

    def _stops(self, generated: Sequence[int]) -> list[int]:
        return [len(self._plan.prompt) + count - 1 for count in generated]

    def result(self, generated: Sequence[int]) -> Captured | list[Captured]:
        """The output's captures, after the sinks have taken their rows.

        Raises CaptureError, or PlanError if the engine refused the plan.
        """
        captured = []
        for sample, stop in zip(self._samples, self._stops(generated), strict=True):
            if sample.error is not None:
                raise sample.error
            assert sample.capture is not None
            captured.append(sample.capture.result(stop))
        return captured[0] if len(captured) == 1 else captured

    def outcome(self, generated: int) -> Outcome:
        """The trace's outcome, for a request with one sample. The first call makes it from the rows. Raises as `result` does."""
        if self._outcome is None:
            with self._taking():
                found = self.result([generated])
                assert self.trace_ending is not None and isinstance(found, Captured)
                self._outcome = self.trace_ending(found, generated)
        return self._outcome

    def discard(self) -> None:
        """Drop the rows. `result` will not be called."""
        self._is_discarded = True
        for sample in self._samples:
            if sample.capture is not None:
                sample.capture.discard()
