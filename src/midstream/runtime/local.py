"""Consumers in the worker, for plans that came past `midstream.VLLM`: nobody waits for their rows at the client.

The forward's thread only queues; a thread of its own copies rows from the device and feeds `midstream.capture.Sinks`. The queue is
bounded: a consumer that cannot keep up slows the engine down, which `blocked_seconds` shows, and nothing is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from midstream.capture.consumers import CaptureInfo
from midstream.capture.rows import Route, RowChunk, routes
from midstream.capture.sinks import Sinks
from midstream.errors import CaptureError
from midstream.plan.layout import Layout
from midstream.plan.values import Plan
from midstream.runtime.trace_request import users_id
from midstream.transport import staging

_log = logging.getLogger(__name__)
QUEUE_BYTES = 256 << 20
_MOST_ENDED = 256
_LOOK_SECONDS = 0.1
Rows = Sequence[tuple[np.ndarray, Layout, torch.Tensor]]  # (positions, layout, [rows, row_width])


class LocalSinks:
    """Feeds consumers in this process.

    Args:
        engine: tells this engine from others that write to the same place; the same on all its ranks.
        num_layers: of the model.
        layers: those of this stage.
        stage: which stage this is, and how many there are.
    """

    def __init__(self, engine: str, num_layers: int, layers: Collection[int], stage: tuple[int, int] = (0, 1)) -> None:
        self._engine, self._num_layers = engine, num_layers
        self._layers, self._stage = layers, stage
        self._sinks = Sinks()
        self._copier = staging.Copier()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._queued = 0
        self._names: dict[str, str] = {}  # of the requests that run: the engine's and the user's
        self._lost: set[str] = set()  # requests that run and whose rows nobody takes any more
        self._ended: list[str] = []  # requests whose consumers have not been asked yet whether they took all
        self._closed = False
        self._blocked = 0.0
        self.failures = 0  # requests whose rows were not taken, all of them or in part
        self._thread = threading.Thread(target=self._run, name="midstream-consumers", daemon=True)
        self._thread.start()

    def begin(self, engine_id: str, plan: Plan, prompt_token_ids: Sequence[int]) -> None:
        """A request begins. Consumers know it by the id that its user gave, unless one of that id is running."""
        name = users_id(engine_id)
        if name in self._names.values():
            name = engine_id
        self._names[engine_id] = name
        info = CaptureInfo(name, tuple(prompt_token_ids), engine=self._engine, stage=self._stage)
        everywhere = routes(plan.captures, len(prompt_token_ids), range(self._num_layers)).sinks
        # A stage that has none of the rows says so as well: a reader of the directory waits for each stage's word.
        ways = [
            Route(way.to, {key: rows for key, rows in way.selected.items() if key[1] in self._layers})
            for way in everywhere
        ]

        def job() -> None:
            if name in self._ended:  # one before it
                self._ended.remove(name)
                self._try(lambda: self._sinks.result(name))
            self._sinks.begin(info, ways)

        self._put(job, 0, name)

    def rows(self, engine_id: str, rows: Rows, sure: int = 0) -> None:
        """Positions below `sure` are known to be the user's: consumers get them now, the others when the request ends."""
        name = self._names[engine_id]
        tensors = [each for _, _, each in rows]
        ready = staging.mark_ready(tensors)
        self._put(lambda: self._deliver(name, rows, ready, sure), sum(each.nbytes for each in tensors), name)

    def end(self, engine_id: str, stop: int | None, error: str | None = None) -> None:
        """`stop`: rows below this position are the user's."""
        name = self._names.pop(engine_id)

        def job() -> None:
            if name in self._lost:
                self._lost.remove(name)
                return self._sinks.discard(name)
            self._sinks.end(name, stop, CaptureError(error) if error is not None else None)
            self._ended.append(name)

        self._put(job, 0)

    @property
    def stats(self) -> dict[str, float]:
        """As of `Sinks.stats`, with what is queued here."""
        stats = self._sinks.stats
        stats["queued_bytes"] += self._queued
        stats["blocked_seconds"] += self._blocked
        return stats

    def close(self) -> None:
        """Let the consumers take what is queued, and close them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._sinks.close()
        self._copier.close()

    def _deliver(self, name: str, rows: Rows, ready: Any, sure: int) -> None:
        for positions, layout, device_rows in rows:
            host = torch.empty(device_rows.shape, dtype=device_rows.dtype)
            flat = host.view(-1).view(torch.uint8)
            self._copier.begin(flat, [device_rows], [0], ready).wait()
            self._sinks.put(RowChunk(name, positions, layout, host))
        self._sinks.confirm(name, sure)

    def _put(self, job: Callable[[], None], size: int, name: str | None = None) -> None:
        """Queue a job; one that is about a request is not done once an earlier one of it has failed."""

        def guarded() -> None:
            if name not in self._lost and not self._try(job) and name is not None:
                self._lost.add(name)

        with self._changed:
            if self._queued and self._queued + size > QUEUE_BYTES:
                start = time.perf_counter()
                self._changed.wait_for(lambda: not self._queued or self._queued + size <= QUEUE_BYTES)
                self._blocked += time.perf_counter() - start
            self._jobs.append((guarded, size))
            self._queued += size
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            if self._ended and (len(self._ended) >= _MOST_ENDED or self._sinks.is_taken(self._ended[0])):
                self._try(lambda: self._sinks.result(self._ended.pop(0)))
                continue
            with self._changed:
                # Nobody waits for what has ended: it lingers, so that requests that end one by one share a file.
                self._changed.wait_for(lambda: self._jobs or self._closed, _LOOK_SECONDS if self._ended else None)
                if not self._jobs:
                    if self._closed:
                        break
                    continue
                job, size = self._jobs.popleft()
            job()
            with self._changed:
                self._queued -= size
                self._changed.notify_all()
        while self._ended:
            self._try(lambda: self._sinks.result(self._ended.pop(0)))

    def _try(self, job: Callable[[], None]) -> bool:
        try:
            job()
        except CaptureError as error:
            _log.error("%s", error)
        except Exception:
            _log.exception("Captured rows were lost.")
        else:
            return True
        self.failures += 1
        return False
