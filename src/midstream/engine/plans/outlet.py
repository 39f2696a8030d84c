"""Captured rows on their way out of the worker: to the client's mailbox, or to consumers in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.engine.plans.local import LocalSinks
from midstream.engine.plans.request import PlanRequest
from midstream.engine.sender import Sender
from midstream.engine.wire import ChannelClosedError
from midstream.plan.values import Plan

_log = logging.getLogger(__name__)
# Rows of one request are sent in pieces of this size: they hold device memory until then.
DUE_BYTES = 16 << 20


class Piece(NamedTuple):
    """Rows of one request from one step, `[rows, row_width]`, at `position` and those after it."""

    position: int
    layout: tuple[Any, ...]
    rows: torch.Tensor


class Outlet:
    """Sends a worker's captured rows: to the client that waits for them, else to the consumers that the plan names.

    Args:
        sender: gives the channel to the client, if there is one.
        local: makes what feeds consumers in this process, when the first request needs it.
    """

    def __init__(self, sender: Callable[[], Sender | None], local: Callable[[], LocalSinks]) -> None:
        self._sender = sender
        self._make_local = local
        self.local: LocalSinks | None = None
        self._begun: set[str] = set()  # requests whose rows stay in this process

    def is_due(self, pieces: Sequence[Piece]) -> bool:
        """Whether so much has come together that it should go out before the request's end."""
        return sum(piece.rows.nbytes for piece in pieces) >= DUE_BYTES

    def begin(self, name: str, carried: PlanRequest, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        """A request with captures begins."""
        if carried.capture is None and carried.record is None:
            self.local = self.local or self._make_local()
            self._begun.add(name)
            self.local.begin(name, plan, prompt_token_ids)

    def send(self, name: str, carried: PlanRequest, pieces: Sequence[Piece], complete: bool) -> None:
        """Rows of a request; `complete` if they are its last."""
        if carried.capture is not None:
            self._post(name, carried.capture, {"segments": _segments(pieces), "error": None}, complete)
        elif name in self._begun:
            assert self.local is not None
            self.local.rows(name, _segments(pieces))

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
            self._post(name, carried.capture, {"segments": [], "error": message}, True)
        elif name in self._begun:
            assert self.local is not None
            self._begun.remove(name)
            self.local.end(name, None, message)

    def close(self) -> None:
        """Let consumers in this process take what is theirs."""
        if self.local is not None:
            self.local.close()

    def _post(self, name: str, key: tuple[str, int], value: dict[str, Any], final: bool) -> None:
        sender = self._sender()
        if sender is None:
            _log.error("Captured rows have nowhere to go: the client has not connected to this worker.")
            return
        try:
            sender.send({"key": key, "request": name, "final": final}, value)
        except ChannelClosedError as error:
            _log.warning("Captured rows have nowhere to go: %s", error)


def _segments(pieces: Sequence[Piece]) -> list[tuple[np.ndarray, tuple[Any, ...], torch.Tensor]]:
    """(positions, layout, rows) of pieces, those with the same layout together."""
    grouped: dict[int, list[Piece]] = {}
    for piece in pieces:
        grouped.setdefault(id(piece.layout), []).append(piece)
    return [
        (
            np.concatenate([np.arange(p.position, p.position + len(p.rows)) for p in group]),
            group[0].layout,
            group[0].rows if len(group) == 1 else torch.cat([p.rows for p in group]),
        )
        for group in grouped.values()
    ]
