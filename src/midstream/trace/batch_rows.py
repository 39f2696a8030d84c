"""The values of a batch at one point of the forward, and which rows of them belong to a request.

Legend of shape suffixes in this folder: T tokens of the whole batch, t tokens of this request, B batch, S padded sequence,
H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from midstream.sites import Binding, Key, point_name
from midstream.trace.parallel import ALONE, Peers
from midstream.tree import Ref, follow, replaced

RowSpan = tuple[int, int]  # rows [first, last) of the flat batch
# Called with the point, the site, the first position and the value.
Written = Callable[[Key, Binding, int, torch.Tensor], None]


@dataclass(frozen=True)
class BatchLayout:
    """Which rows of an engine's flat batch `[T, ...]` belong to which request. Each request's rows are contiguous.

    Attributes:
        request_ids: the scheduled requests in the batch's order.
        counts: `[requests]`, how many rows each has in this step.
        computed: `[requests]`, how many of their tokens were computed in earlier steps.
        total: the number of rows in the batch, padding included.
    """

    request_ids: list[str]
    counts: np.ndarray
    computed: np.ndarray
    total: int

    @cached_property
    def each(self) -> list[tuple[str, FlatRows]]:
        """The requests and their rows."""
        counts, total = self.counts.tolist(), self.total
        rows = zip(self.request_ids, np.cumsum(self.counts).tolist(), counts, self.computed.tolist(), strict=True)
        return [(name, FlatRows(stop - count, stop, total, before)) for name, stop, count, before in rows]


@dataclass(slots=True)  # a frozen one takes four times as long to make
class FlatRows:
    """One request's rows `[start, stop)` in a flat batch `[T, ...]`, or `[1, T, ...]` on vLLM's Transformers backend.

    `take` returns a copy that is a normal tensor: the engine's later kernels overwrite its buffers, and an inference-mode tensor has no
    version counter that would show an edit.
    """

    start: int
    stop: int
    total: int
    first_position: int = 0
    aliases = False  # whether `take` returns views

    @property
    def count(self) -> int:
        """Tokens of this request in this step."""
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first_position + self.count

    def at(self, first: int, end: int) -> FlatRows:
        """The rows of the positions from `first` to `end`."""
        start = self.start - self.first_position
        return FlatRows(start + first, start + end, self.total, first)

    def axis(self, full: torch.Tensor) -> int | None:
        """The token axis of `full`, or None if it has none."""
        if full.ndim >= 1 and full.shape[0] == self.total:
            return 0
        return 1 if full.ndim >= 2 and full.shape[0] == 1 and full.shape[1] == self.total else None

    def view(self, full: torch.Tensor, tokens: bool) -> torch.Tensor:
        """This request's rows of `full`: `[t, ...]` if `tokens`, else in the layout of `full`. Returns `full` itself if it has no token
        axis.
        """
        if tokens:
            return (full[0] if full.ndim == 3 else full)[self.start : self.stop]
        axis = self.axis(full)
        return full if axis is None else full.narrow(axis, self.start, self.count)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """A copy of this request's rows of a tensor that a module takes or returns, in that tensor's layout."""
        return private(self.view(full, False))

    def put(self, full: torch.Tensor, value: torch.Tensor, tokens: bool) -> torch.Tensor:
        """`full` with this request's rows replaced by `value`, which has the layout that `view` returns."""
        self.view(full, tokens).copy_(value)
        return full


@dataclass(frozen=True)
class BatchRows:
    """Row `index` of a left-padded batch `[B, S, ...]` of transformers, without its first `pad` columns. The methods are those of
    `FlatRows`.

    With a `size`, it is `size` rows from `index` on, and their values keep the batch axis. `take` returns views that stay in the autograd
    graph.
    """

    index: int
    pad: int
    batch: int
    length: int  # S of this step
    size: int | None = None
    aliases = True

    @property
    def count(self) -> int:
        return self.length - self.pad

    def view(self, full: torch.Tensor, tokens: bool) -> torch.Tensor:
        size = self.size or 1
        if tokens:  # some modules flatten their tokens
            grid = full if full.ndim >= 3 else full.unflatten(0, (self.batch, self.length))
            return grid[self.index if self.size is None else slice(self.index, self.index + size), self.pad :]
        if full.ndim == 0 or full.shape[0] != self.batch:
            return full
        part = full[self.index : self.index + size] if self.batch > size else full
        return part[:, self.pad :] if self.pad and part.ndim >= 2 and part.shape[1] == self.length else part

    def take(self, full: torch.Tensor) -> torch.Tensor:
        return self.view(full, False)

    def put(self, full: torch.Tensor, value: torch.Tensor, tokens: bool) -> torch.Tensor:
        if self.batch == (self.size or 1) and not self.pad:  # the request is the whole batch
            value = value.to(full.dtype)
            return value.reshape(full.shape) if tokens else value
        full = full.clone()
        self.view(full, tokens).copy_(value)
        return full


RequestRows = FlatRows | BatchRows  # one request's rows of a step's batch


def private(part: torch.Tensor) -> torch.Tensor:
    """A copy of `part` that is not an inference-mode tensor, so that its version counter shows edits in place."""
    with torch.inference_mode(False):
        return part.clone()


class Event:
    """The forward pass at the point `key`. Traces may replace the value.

    Under tensor parallelism some leaves are sharded. Traces read and write the full tensors.

    Args:
        tree: the value of the whole batch: `(args, kwargs)`, or a module's return value.
        direct: whether writes must go to the tree's own tensors, the only ones that compiled code reads.
        peers: the tensor-parallel ranks.
        laid_out_as: the point whose value is sharded like this one.
    """

    def __init__(
        self, key: Key, tree: Any, direct: bool = False, peers: Peers = ALONE, laid_out_as: Key | None = None
    ) -> None:
        self.key = key
        self.tree = tree
        self.direct = direct
        self._peers = peers
        self._shards = peers.shards(laid_out_as or key)
        self._joined: dict[tuple[Ref, RowSpan], torch.Tensor] = {}
        self._owned: set[Ref] = set()  # leaves that earlier writes have copied
        self._shared: dict[tuple[Binding, RowSpan], SharedSite] = {}

    def shared(self, binding: Binding, span: RowSpan, total: int, body: str) -> SharedSite:
        """The site's value for all traced requests of this event. `body` is the trace that asks for it."""
        if (binding, span) not in self._shared:
            self._shared[binding, span] = SharedSite(self, binding, span, total, body)
        return self._shared[binding, span]

    def take_tokens(self, ref: Ref, rows: RequestRows, body: str) -> torch.Tensor:
        """These tokens of the full leaf, `[t, ...]`: a view of the engine's tensor, or a new tensor if the leaf is sharded."""
        part = rows.view(self.leaf(ref), True)
        return self._join(ref, part, 1, body) if ref in self._shards else part

    def take(self, ref: Ref, rows: RequestRows, span: RowSpan | None, body: str) -> torch.Tensor:
        """One request's rows of the full leaf, for a trace to hold. A sharded leaf is joined once for all rows of `span`."""
        full = self.leaf(ref)
        if ref not in self._shards or not isinstance(rows, FlatRows):
            return rows.take(full)
        first, last = span or (rows.start, rows.stop)
        axis = rows.axis(full)
        if axis is None:
            return private(self._join(ref, full, 0, body))
        if (ref, (first, last)) not in self._joined:
            part = full.narrow(axis, first, last - first)
            self._joined[ref, (first, last)] = self._join(ref, part, axis + 1, body)
        return private(self._joined[ref, (first, last)].narrow(axis, rows.start - first, rows.count))

    def _join(self, ref: Ref, part: torch.Tensor, lead: int, body: str) -> torch.Tensor:
        self._peers.agree(body, point_name(self.key), *ref, tuple(part.shape))
        return self._shards[ref].join(part, lead)

    def note_write(self, body: str, where: Ref) -> None:
        """Tell the other ranks that `body` writes here: it has to write here on every rank."""
        self._peers.note(body, "a write to", point_name(self.key), where)

    def write_back(self) -> None:
        """Put all edits of shared sites into the tree."""
        shared, self._shared = self._shared, {}
        for site in shared.values():
            site.write_back()

    def leaf(self, ref: Ref) -> Any:
        """The batch's tensor at `ref`, or None."""
        return follow(self.tree, ref)

    def write(self, ref: Ref, value: torch.Tensor, rows: RequestRows, tokens: bool, in_place: bool = False) -> None:
        """Replace this request's rows of the leaf by `value`, which is `[t, ...]` if `tokens`.

        The engine's own tensor stays unchanged, since other modules may read it, unless `in_place` asks for a write to it.
        """
        full = self.leaf(ref)
        if ref in self._shards:
            value = self._cut(ref, full, value, rows, tokens)
        if in_place or self.direct:
            rows.view(full, True).copy_(value)
            return
        if ref not in self._owned and not rows.aliases:
            full = full.clone()
        full = rows.put(full, value, tokens)
        self.tree = replaced(self.tree, ref, full)
        self._owned.add(ref)

    def _cut(self, ref: Ref, full: torch.Tensor, value: torch.Tensor, rows: RequestRows, tokens: bool) -> torch.Tensor:
        """This rank's part of `value`. Also updates the joined tensors that have these rows."""
        assert isinstance(rows, FlatRows)
        for key in [key for key in self._joined if key[0] == ref]:
            first, last = key[1]
            if first <= rows.start and rows.stop <= last:
                own = FlatRows(rows.start - first, rows.stop - first, last - first)
                own.put(self._joined[key], value, tokens)
            else:
                del self._joined[key]
        axis = rows.axis(full)
        return self._shards[ref].cut(value, 1 if tokens else 0 if axis is None else axis + 1)


class SharedSite:
    """The value of a site at an event over the rows of `span`, `[rows, hidden]`, in memory of its own.

    If 64 requests each add a vector at one layer, this saves 64 reads and writes of the engine's tensors: the value is computed once, each
    trace edits its own rows in place, and each run of neighbouring edited rows is written back at once.
    """

    def __init__(self, event: Event, binding: Binding, span: RowSpan, total: int, body: str) -> None:
        self._event = event
        self._binding = binding
        self._first = span[0]
        self._total = total
        self._edited: dict[RowSpan, tuple[FlatRows, Written | None]] = {}
        self._replaced: dict[RowSpan, torch.Tensor] = {}
        rows = FlatRows(*span, total)

        def leaf(ref: Ref) -> torch.Tensor | None:
            full = event.leaf(ref)
            return full if full is None or full.ndim == 1 else event.take_tokens(ref, rows, body)

        with torch.inference_mode(False):
            value = binding.read(leaf)
            aliased = value.untyped_storage().data_ptr() == event.leaf(binding.hidden).untyped_storage().data_ptr()
            self._value = value.clone() if aliased else value

    def part(self, rows: FlatRows) -> torch.Tensor:
        """One request's rows as a view, or the tensor that replaces them."""
        if (rows.start, rows.stop) in self._replaced:
            return self._replaced[rows.start, rows.stop]
        return self._value[rows.start - self._first : rows.stop - self._first]

    def edit(self, rows: FlatRows, value: torch.Tensor, written: Written | None) -> None:
        """Set a request's rows to `value`, which may be the view that `part` returned. `written` is called when they are written back."""
        part = self.part(rows)
        if (value.data_ptr(), value.shape, value.stride()) != (part.data_ptr(), part.shape, part.stride()):
            self._replaced[rows.start, rows.stop] = private(value)  # the view keeps its content
        self._edited[rows.start, rows.stop] = (rows, written)

    def write_back(self) -> None:
        """Put the edited rows into the engine's tensors."""
        for run in _runs(self._edited):
            rows = FlatRows(run[0][0], run[-1][1], self._total)
            value = torch.cat([self.part(self._edited[span][0]) for span in run]) if self._replaced else self.part(rows)
            for ref, part in self._binding.leaves(value, self._event.leaf):
                self._event.write(ref, part, rows, tokens=True, in_place=self._binding.in_place)
            written_rows = value.clone() if any(self._edited[span][1] is not None for span in run) else value
            for span in run:
                own, written = self._edited[span]
                if written is not None:
                    part = written_rows[own.start - rows.start : own.stop - rows.start]
                    written(self._event.key, self._binding, own.first_position, part)
        self._edited.clear()
        self._replaced.clear()


def _runs(spans: dict[RowSpan, Any]) -> list[list[RowSpan]]:
    runs: list[list[RowSpan]] = []
    for span in sorted(spans):
        if runs and runs[-1][-1][1] == span[0]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
