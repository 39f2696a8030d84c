"""Captured rows on their way from the workers to the user: to sinks as they come, and onto the output at the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.segment import Captured, Segment, gather
from midstream.capture.sinks import Sinks
from midstream.client.planned import Planned
from midstream.errors import (
    CaptureError,
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    PlanError,
    UnsendableError,
)
from midstream.runtime.trace_request import users_id
from midstream.transport.mailbox import Mailbox

RESULT_SECONDS = 120.0
Message = tuple[dict[str, Any], dict[str, Any]]


def nothing_captured(request_id: str) -> Captured:
    """What is on the output of a request that captures nothing."""
    return Captured(request_id, (), {})


def sample_index(request_id: str, samples: int) -> int:
    """vLLM names the n samples of a request `0_ID`, `1_ID`, ..."""
    return int(request_id.partition("_")[0]) if samples > 1 else 0


@dataclass
class _Sample:
    """What has come of one sample of a request."""

    name: str = ""
    segments: list[Segment] = field(default_factory=list)
    finals: int = 0
    error: MidstreamError | None = None
    begun: bool = False  # at the sinks
    captured: Captured | None = None  # what goes on the output, if that is known before the end


class Capturing:
    """The captured rows of one request.

    Args:
        planned: its plan.
        samples: vLLM's `n`.
        senders: how many workers send the rows of a sample, each what it has.
        collected: what the request is of a collection.
    """

    def __init__(
        self, planned: Planned, samples: int, sinks: Sinks, senders: int = 1, collected: Collected | None = None
    ) -> None:
        self.key = (secrets.token_hex(8), 0)
        self.stop: int | None = None  # positions below this are known to be the user's
        self._planned = planned
        self._sinks = sinks
        self._senders = senders
        self.collected = collected
        self._samples = [_Sample() for _ in range(samples)]
        self._taken, self._seen, self._taking = 0, -1, False
        self._discarded = self._ended = False

    @property
    def request_id(self) -> str:
        """As its output has it; empty if none of its rows could be read."""
        name = self._samples[0].name
        return name.partition("_")[2] if len(self._samples) > 1 else name

    @property
    def has_sinks(self) -> bool:
        return bool(self._planned.routes.sinks)

    @property
    def is_complete(self) -> bool:
        return all(sample.finals >= self._senders for sample in self._samples)

    async def follow(self, box: Mailbox, elsewhere: Executor | None = None) -> None:
        """Take rows as they come, until all are here. A sink that is full is waited for `elsewhere`, or here."""
        while not self.is_complete:
            try:
                message = await box.aget()
            except ChannelClosedError as error:
                raise _gone(error) from error
            if self.has_sinks and elsewhere is not None:
                self._taking = True  # also while it waits for a thread
                await asyncio.get_running_loop().run_in_executor(elsewhere, self.take, message)
            else:
                self.take(message)
        box.close()  # what it holds counts as waiting until then

    def raise_if_stuck(self) -> None:
        """Raise CaptureError if nothing has come, and no sink was waited for, since the last call."""
        seen, self._seen = self._seen, self._taken
        if seen == self._taken and not self._taking:
            raise _missing()

    def take(self, message: Message) -> None:
        self._taking = True
        try:
            self._take(*message)
        finally:
            self._taken, self._taking = self._taken + 1, False

    def _take(self, header: dict[str, Any], value: Any) -> None:
        if isinstance(value, UnsendableError):  # of which sample the rows were is lost with them
            for sample in self._samples:
                sample.error, sample.finals = (
                    CaptureError(f"captured rows were lost on their way: {value}"),
                    self._senders,
                )
            return
        sample = self._samples[sample_index(header["request"], len(self._samples))]
        sample.name = sample.name or users_id(header["request"])
        sample.finals += header["final"]
        if value["error"] is not None:
            sample.error = sample.error or PlanError(value["error"])
        segments = [
            Segment(sample.name, np.arange(position, position + number), layout, rows[first : first + number])
            for position, layout, rows, first, number in value["segments"]
        ]
        if self._planned.routes.output:
            sample.segments += segments
        if self.has_sinks and sample.error is None:
            self._pass_on(sample, segments, header.get("sure", 0))

    def _pass_on(self, sample: _Sample, segments: list[Segment], sure: int) -> None:
        if self._discarded:
            return
        try:
            if not sample.begun:
                info = CaptureInfo(sample.name, tuple(self._planned.prompt), collected=self.collected)
                self._sinks.begin(info, self._planned.routes.sinks)
                sample.begun = True
                self._sinks.put(self._planned.empty_segment(sample.name))
            for segment in segments:
                self._sinks.put(segment)
            self._sinks.confirm(sample.name, max(self.stop or 0, sure))
        except CaptureError as error:
            self._give_up(sample, error)

    def _give_up(self, sample: _Sample, error: MidstreamError) -> None:
        sample.error = error
        if sample.begun:
            self._sinks.discard(sample.name, error)
            sample.begun = False

    def end(self, generated: Sequence[int]) -> None:
        """The request is over, with so many tokens in each sample; all rows are here. Again, it does nothing."""
        if self._ended:
            return
        self._ended = self._taking = True
        try:
            for sample, stop in zip(self._samples, self._stops(generated), strict=True):
                if sample.error is not None:
                    self._give_up(sample, sample.error)
                elif sample.begun:
                    self._sinks.end(sample.name, stop)
        finally:
            self._taking = False

    def _stops(self, generated: Sequence[int]) -> list[int]:
        return [len(self._planned.prompt) + count - 1 for count in generated]

    def result(self, generated: Sequence[int], patient: bool = False) -> Captured | list[Captured]:
        """What goes on the output, once the sinks have taken theirs; `patient` is as of `Sinks.result`.

        Raises CaptureError, or PlanError if the engine refused the plan.
        """
        captured = []
        for sample, stop in zip(self._samples, self._stops(generated), strict=True):
            if sample.error is not None:
                raise sample.error
            if sample.begun:
                sample.begun = False
                self._sinks.result(sample.name, patient)
            captured.append(self._gathered(sample, stop) if sample.captured is None else sample.captured)
        return captured[0] if len(captured) == 1 else captured

    def gather_early(self) -> None:
        """Put together what does not hang on how many tokens are generated, with all rows here: those of the prompt."""
        if any(wanted.tail is not None for wanted in self._planned.routes.output.values()):
            return
        for sample in self._samples:
            with contextlib.suppress(CaptureError):  # `result` raises it
                sample.captured = self._gathered(sample, len(self._planned.prompt))

    def _gathered(self, sample: _Sample, stop: int) -> Captured:
        wanted = self._planned.routes.output
        if not wanted:
            return nothing_captured(sample.name)
        segments = list(sample.segments)
        layouts = [segment.layout for segment in segments]
        if not any(layout.has_just(wanted) or layout.by_key.keys() >= wanted.keys() for layout in layouts):
            segments.append(self._planned.empty_segment(sample.name))
        captured = gather(segments, stop, wanted)
        sample.segments.clear()
        return captured

    def discard(self) -> None:
        """Nobody asks for the result any more."""
        self._discarded = True
        for sample in self._samples:
            if sample.begun:
                sample.begun = False
                self._sinks.discard(sample.name)


class Taking:
    """A thread that takes the rows of requests from the mailbox that they share, while the caller's own thread runs the engine."""

    def __init__(self, capturing: Sequence[Capturing], box: Mailbox) -> None:
        self._waiting = {each.key: each for each in capturing}
        self._box = box
        self._error: Exception | None = None
        self._taken = 0
        self._thread = threading.Thread(target=self._take, name="midstream-captures", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all rows are here, after the engine is through with the requests."""
        while self._thread.is_alive():
            taken = self._taken
            self._thread.join(RESULT_SECONDS)
            if self._thread.is_alive() and taken == self._taken:
                raise _missing()
        if self._error is not None:
            raise self._error

    def _take(self) -> None:
        try:
            while self._waiting:
                message = self._box.get()
                self._taken += 1
                if (each := self._waiting.get(message[0]["key"])) is not None:
                    each.take(message)
                    if each.is_complete:
                        del self._waiting[each.key]
                        each.gather_early()
        except Exception as error:
            self._error = _gone(error) if isinstance(error, ChannelClosedError) else error


def _missing() -> CaptureError:
    return CaptureError(f"the rows of a request that has ended have not come for {RESULT_SECONDS:g} s")


def _gone(error: ChannelClosedError) -> MidstreamError:
    return EngineClosedError(f"The engine has gone before the captured rows came: {error}")


class Following:
    """A thread that hands rows to sinks, request by request to its end, while the caller's own thread runs the engine."""

    def __init__(self, followed: Sequence[tuple[Capturing, Mailbox]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="midstream-captures", daemon=True)
        self._thread.start()
        self._generated: defaultdict[str, asyncio.Future[Sequence[int]]] = defaultdict(self._loop.create_future)
        self._futures = [(c, asyncio.run_coroutine_threadsafe(self._follow(c, box), self._loop)) for c, box in followed]

    def end(self, request_id: str, generated: Sequence[int]) -> None:
        """A request has ended for the user, with so many tokens in each sample. Its last rows may come later."""

        def tell() -> None:
            if not (future := self._generated[request_id]).done():
                future.set_result(generated)

        self._loop.call_soon_threadsafe(tell)

    async def _follow(self, capturing: Capturing, box: Mailbox) -> None:
        await capturing.follow(box)
        if capturing.request_id:
            capturing.end(await self._generated[capturing.request_id])

    def wait(self) -> None:
        """Until all rows are here, after the engine is through with the requests."""
        for capturing, future in self._futures:
            while not futures.wait([future], RESULT_SECONDS).done:
                capturing.raise_if_stuck()
            future.result()

    def close(self) -> None:
        """Leave what has not come."""
        for _, future in self._futures:
            future.cancel()
        asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _settle() -> None:
    """Wait for the other tasks of this loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*rest, return_exceptions=True)
