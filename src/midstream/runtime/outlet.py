"""Captured rows on their way out of the worker: to the client's mailbox, or to consumers in this process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.consumers import find_consumer
from midstream.errors import CaptureError, ChannelClosedError, PlanError
from midstream.plan.layout import Layout
from midstream.plan.values import Consumer, Plan
from midstream.runtime.local import LocalSinks
from midstream.runtime.plan_request import PlanRequest
from midstream.transport.sender import Sender

_log = logging.getLogger(__name__)
# Rows of one request are sent in pieces of this size: they hold device memory until then.
DUE_BYTES = 16 << 20
MESSAGE_BYTES = 64 << 20
_FEW_PIECES = 4


class Piece(NamedTuple):
    """Rows of one request from one step: `number` rows of `block` `[rows, row_width]` from `first` on, of `position` and those after it."""

    position: int
    layout: Layout
    block: torch.Tensor
    first: int
    number: int

    @property
    def rows(self) -> torch.Tensor:
        """`[number, row_width]`, a view."""
        return self.block[self.first : self.first + self.number]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.number * self.block.shape[1] * self.block.element_size()

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.position, self.position + self.number)


_Queued = tuple[dict[str, Any], list[Piece], str | None]  # (header, pieces, error)


class Outlet:
    """Sends a worker's captured rows: to the client that waits for them, else to the consumers that the plan names.

    Args:
        sender: gives the channel to the client, if there is one.
        local: makes what feeds consumers in this process, when the first request needs it.
        stage: of the pipeline, which the rows are of.
    """

    def __init__(self, sender: Callable[[], Sender | None], local: Callable[[], LocalSinks], stage: int = 0) -> None:
        self._sender = sender
        self._stage = stage
        self._make_local = local
        self.local: LocalSinks | None = None
        self._found: set[str] = set()  # consumers that are there
        self._begun: set[str] = set()  # requests whose rows stay in this process
        self._queue: list[_Queued] = []  # for the client

    def check(self, carried: PlanRequest, plan: Plan) -> None:
        """Raise PlanError for a consumer that nobody has installed where its rows would go to it."""
        if carried.capture is not None or carried.record is not None:
            return
        named = {to.name for capture in plan.captures for to in capture.sinks if isinstance(to, Consumer)}
        for name in named - self._found:
            try:
                find_consumer(name)
            except CaptureError as error:
                raise PlanError(str(error)) from error
            self._found.add(name)

    def begin(self, name: str, carried: PlanRequest, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        """A request with captures begins."""
        if carried.capture is None and carried.record is None:
            self.local = self.local or self._make_local()
            self._begun.add(name)
            self.local.begin(name, plan, prompt_token_ids)

    def send(self, name: str, carried: PlanRequest, pieces: Sequence[Piece], complete: bool, sure: int = 0) -> None:
        """Rows of a request; `complete` if they are its last. Positions below `sure` are known to be the user's."""
        if carried.capture is not None:
            self._queue.append((self._header(name, carried, complete, sure), list(pieces), None))
        elif name in self._begun:
            assert self.local is not None
            self.local.rows(name, [(p.positions, p.layout, p.rows) for p in _joined(pieces)], sure)

    def end(self, name: str, carried: PlanRequest, pieces: Sequence[Piece], tokens: int | None) -> None:
        """The request is over, with its last rows. `tokens`: how many it had, if that is known; the last of them has no row."""
        self.send(name, carried, pieces, True)
        self.settle(name, tokens)

    def settle(self, name: str, tokens: int | None) -> None:
        """The request is over, and all its rows were sent before."""
        if name in self._begun:
            assert self.local is not None
            self._begun.remove(name)
            self.local.end(name, tokens - 1 if tokens is not None else None)

    def fail(self, name: str, carried: PlanRequest, message: str) -> None:
        """There will be no more rows, for a reason."""
        if carried.capture is not None:
            self._queue.append((self._header(name, carried, True), [], message))
        elif name in self._begun:
            assert self.local is not None
            self._begun.remove(name)
            self.local.end(name, None, message)

    def _header(self, name: str, carried: PlanRequest, final: bool, sure: int = 0) -> dict[str, Any]:
        return {"key": carried.capture, "request": name, "final": final, "stage": self._stage, "sure": sure}

    def close(self) -> None:
        """Let consumers in this process take what is theirs."""
        if self.local is not None:
            self.local.close()

    def gauges(self) -> dict[str, int]:
        """Requests, since the start, whose consumers in this process failed them; bytes that wait for such consumers; how long, since the
        start, they have held the forward up."""
        if self.local is None:
            return {"capture_failures": 0, "consumer_bytes": 0, "consumer_blocked_ms": 0}
        stats = self.local.stats
        waiting, blocked = int(stats["queued_bytes"] + stats["held_bytes"]), int(1000 * stats["blocked_seconds"])
        return {"capture_failures": self.local.failures, "consumer_bytes": waiting, "consumer_blocked_ms": blocked}

    def flush(self) -> None:
        """Send what is for the client: few messages for many requests, none much larger than a request's rows have to be."""
        queue, self._queue = self._queue, []
        sender = self._sender()
        if queue and sender is None:
            _log.error("Captured rows have nowhere to go: the client has not connected to this worker.")
            return
        try:
            while queue:
                size = 0
                together: list[_Queued] = []
                while queue and (not together or size < MESSAGE_BYTES):
                    together.append(queue.pop(0))
                    size += sum(piece.size for piece in together[-1][1])
                assert sender is not None
                sender.send_together(_messages(together))
        except ChannelClosedError as error:
            _log.warning("Captured rows have nowhere to go: %s", error)


class SilentOutlet(Outlet):
    """Of a tensor-parallel rank that is not the first of its stage: that one has the same rows, and sends them."""

    def begin(self, name: str, carried: PlanRequest, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        pass

    def send(self, name: str, carried: PlanRequest, pieces: Sequence[Piece], complete: bool, sure: int = 0) -> None:
        pass

    def settle(self, name: str, tokens: int | None) -> None:
        pass

    def fail(self, name: str, carried: PlanRequest, message: str) -> None:
        pass

    def flush(self) -> None:
        pass


def _messages(queue: Sequence[_Queued]) -> list[tuple[dict[str, Any], Any]]:
    joined = [(header, _joined(pieces), error) for header, pieces, error in queue]
    leaving: Counter[int] = Counter()
    for _, pieces, _ in joined:
        for piece in pieces:
            leaving[id(piece.block)] += piece.number

    def segment(piece: Piece) -> tuple[int, Layout, torch.Tensor, int, int]:
        """(first position, layout, tensor, its first row, rows)."""
        if 2 * leaving[id(piece.block)] > len(piece.block):  # most of it goes now: as it is, and once
            return piece.position, piece.layout, piece.block, piece.first, piece.number
        return piece.position, piece.layout, piece.rows, 0, piece.number

    return [(header, {"segments": list(map(segment, pieces)), "error": error}) for header, pieces, error in joined]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces, those of consecutive steps in one if they are many."""
    if len(pieces) <= _FEW_PIECES:
        return list(pieces)
    joined: list[Piece] = []
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and last.layout is piece.layout and last.position + last.number == piece.position:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for run in runs:
        block = torch.cat([piece.rows for piece in run])
        joined.append(Piece(run[0].position, run[0].layout, block, 0, len(block)))
    return joined
