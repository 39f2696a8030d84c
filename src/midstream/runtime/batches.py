"""Batches that come again: while all requests generate, the same ones with a token each, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.runtime.tables import Rows


@dataclass
class Batch:
    """Generated tokens alone, one of each request.

    Attributes:
        requests: as the scheduler lists them.
        active: whether a plan acts in it.
        hooked: whether hooks may have to act.
        laid_out: the requests as the runner orders them, once it has.
        rows: the batch's, from then on.
    """

    requests: list[str]
    active: bool
    hooked: bool
    laid_out: list[str] = field(default_factory=list)
    rows: Rows | None = None

    def is_laid_out(self, request_ids: Sequence[str], total: int) -> bool:
        """Whether `rows` are of a batch with these requests, in this order, and as much padding."""
        return self.rows is not None and self.laid_out == request_ids and len(self.rows.profile_T) == total


class Batches:
    """The ones that may come again: several, for the stages of a pipeline have as many on their way, which take turns."""

    def __init__(self) -> None:
        self._by_first: dict[str, Batch] = {}  # by the first request; those with one that has ended stay until `forget`

    def again(self, scheduler_output: Any) -> Batch | None:
        """The batch that the coming step is, a token further."""
        cached = scheduler_output.scheduled_cached_reqs
        batch = self._by_first.get(cached.req_ids[0]) if cached.req_ids else None
        if (
            batch is None
            or scheduler_output.scheduled_new_reqs
            or scheduler_output.finished_req_ids
            or scheduler_output.total_num_scheduled_tokens != len(batch.requests)
            or cached.req_ids != batch.requests
            or cached.resumed_req_ids  # a reset of the prefix cache has requests begin anew from one step to the next
        ):
            return None
        return batch

    def remember(self, requests: Sequence[str], active: bool, hooked: bool) -> Batch:
        """A batch that may come again. `requests` is not empty."""
        batch = self._by_first[requests[0]] = Batch(list(requests), active, hooked)
        return batch

    def forget(self) -> None:
        """None may come again as it was."""
        self._by_first.clear()
