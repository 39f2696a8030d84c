"""What a worker sends the client of its traces."""

from __future__ import annotations

import logging

from midstream.errors import ChannelClosedError
from midstream.runtime.trace_request import TraceRequest
from midstream.trace.program import Outcome
from midstream.transport.sender import Sender

_log = logging.getLogger(__name__)


class Reports:
    """The reports of one worker.

    Args:
        stage: the pipeline stage that the worker is of.
        speaks: whether it is the one of its stage that reports; what the others have is the same.

    Attributes:
        sender: the way to the client, once that has connected.
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
        """What a request's bodies gave; not `final`: what they have saved so far."""
        if not self.speaks:
            return
        if self.sender is None:
            _log.error("A trace's results have nowhere to go: the client has not connected to this worker.")
            return
        header = {"key": (trace.trace, trace.index), "request": name, "final": final, "stage": self._stage}
        try:
            self.sender.send(header, outcomes, name if trace.stream else None, exact=final)
            if final:
                self.sender.end(name)
        except ChannelClosedError as error:  # the client is closing; the engine is about to be told
            if not self._client_gone:
                _log.warning("A trace's results have nowhere to go: %s", error)
            self._client_gone = True

    def end(self, name: str) -> None:
        """Nothing more is sent of the request."""
        if self.sender is not None:
            self.sender.end(name)
