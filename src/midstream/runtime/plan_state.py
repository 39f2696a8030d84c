"""What a worker remembers of the requests with a plan: each request, and the batches that repeat from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.runtime.captures import Piece
from midstream.runtime.loaded_plans import LoadedPlan
from midstream.runtime.pipeline import Sources
from midstream.runtime.request import PlanRequest
from midstream.runtime.tables import Rows


@dataclass
class PlannedRequest:
    """One running request with a plan.

    Attributes:
        sources: recorded rows for its patches.
        captured: positions below this have been captured.
        computed: positions below this have been computed, or will be in the coming step.
        complete: all its captured rows are sent, if there are any.
        stops_at_text: whether a stop string may end it.
        pieces: captured rows that are not sent.
        size: their bytes.
    """

    payload: PlanRequest
    loaded: LoadedPlan
    sources: Sources
    captured: int = 0
    computed: int = 0
    complete: bool = False
    stops_at_text: bool = False
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0

    @property
    def has_all(self) -> bool:
        """Whether no further row is to be captured."""
        return self.loaded.last is not None and self.captured >= self.loaded.last

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.size += piece.size

    def take_pieces(self) -> list[Piece]:
        pieces, self.pieces, self.size = self.pieces, [], 0
        return pieces


@dataclass
class RepeatedBatch:
    """A batch in which every request generates one token: the next step usually has the same requests.

    Attributes:
        requests: in the scheduler's order.
        active: whether a plan acts in it.
        hooked: whether hooks may have to act.
        laid_out: the requests in the runner's order, once it has laid them out.
        rows: the batch's rows, from then on.
    """

    requests: list[str]
    active: bool
    hooked: bool
    laid_out: list[str] = field(default_factory=list)
    rows: Rows | None = None

    def is_laid_out(self, request_ids: Sequence[str], total: int) -> bool:
        """Whether `rows` are of a batch with these requests, in this order, and as much padding."""
        return self.rows is not None and self.laid_out == request_ids and len(self.rows.profile_T) == total


class RepeatedBatches:
    """The batches that may repeat. A pipeline has several on their way, one for each stage, which take turns."""

    def __init__(self) -> None:
        self._by_first: dict[str, RepeatedBatch] = {}  # by the first request; ended requests stay until `forget`

    def find(self, scheduler_output: Any) -> RepeatedBatch | None:
        """The earlier batch that the coming step repeats, one token further, if it repeats one."""
        cached = scheduler_output.scheduled_cached_reqs
        batch = self._by_first.get(cached.req_ids[0]) if cached.req_ids else None
        if (
            batch is None
            or scheduler_output.scheduled_new_reqs
            or scheduler_output.finished_req_ids
            or scheduler_output.total_num_scheduled_tokens != len(batch.requests)
            or cached.req_ids != batch.requests
            or cached.resumed_req_ids  # after a reset of the prefix cache, requests begin anew from one step to the next
        ):
            return None
        return batch

    def remember(self, requests: Sequence[str], active: bool, hooked: bool) -> RepeatedBatch:
        """A batch that may repeat. `requests` is not empty."""
        batch = self._by_first[requests[0]] = RepeatedBatch(list(requests), active, hooked)
        return batch

    def forget(self) -> None:
        """No earlier batch may repeat as it was."""
        self._by_first.clear()
