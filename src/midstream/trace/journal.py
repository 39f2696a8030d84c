"""The edits of a request, kept so that positions that are computed again after a preemption carry them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from midstream.sites import Binding, Ref
from midstream.trace.rows import FlatRows
from midstream.trace.visit import Event, Key


@dataclass
class Written:
    """One edit: the value of a site, or of a leaf, at the positions from `first_position` on along `axis`."""

    where: Binding | Ref
    axis: int
    first_position: int
    value: torch.Tensor


class Journal:
    """One request's edits by point. A later edit of the same positions takes the place of the earlier one."""

    def __init__(self) -> None:
        self._written: defaultdict[Key, dict[tuple[Binding | Ref, int], Written]] = defaultdict(dict)
        self.fresh: list[Written] = []  # still where the forward computes

    def __iter__(self) -> Iterator[Key]:
        """The points that were written to."""
        return iter(self._written)

    def __bool__(self) -> bool:
        return bool(self._written)

    def add(self, key: Key, where: Binding | Ref, first_position: int, value: torch.Tensor, axis: int = 0) -> None:
        """Note an edit; `value` is the journal's own from now on."""
        written = Written(where, axis, first_position, value)
        self._written[key][where, first_position] = written
        if value.is_cuda:
            self.fresh.append(written)

    def first_not_finite(self) -> tuple[Key, Binding | Ref, int] | None:
        """The point, the place there and the position of the first write of an infinity or a NaN."""
        for key, writes in self._written.items():
            for written in writes.values():
                rows = torch.isfinite(written.value).movedim(written.axis, 0)
                bad = ~rows.reshape(len(rows), -1).all(-1)
                if bad.any():
                    return key, written.where, written.first_position + int(bad.nonzero()[0])
        return None

    def replay(self, event: Event, rows: FlatRows) -> None:
        """Put the edits of `rows`' positions back."""
        for written in self._written.get(event.key, {}).values():
            begin = max(written.first_position, rows.first_position)
            end = min(written.first_position + written.value.shape[written.axis], rows.first_position + rows.count)
            if begin < end:
                part = written.value.narrow(written.axis, begin - written.first_position, end - begin)
                start = rows.start + begin - rows.first_position
                _put(event, written.where, part, FlatRows(start, start + end - begin, rows.total))


def _put(event: Event, where: Binding | Ref, value: torch.Tensor, rows: FlatRows) -> None:
    if isinstance(where, Binding):
        full = event.leaf(where.hidden)
        for ref, part in where.leaves(value.to(full.device), event.leaf):
            event.write(ref, part, rows, tokens=True, in_place=where.in_place)
    else:
        event.write(where, value.to(event.leaf(where).device), rows, tokens=False)


def spill(journals: Iterable[Journal]) -> None:
    """Move a step's edits to host memory, in one copy that nothing waits for: they must not fill the GPU over a long generation."""
    by_dtype: defaultdict[torch.dtype, list[Written]] = defaultdict(list)
    for journal in journals:
        for written in journal.fresh:
            by_dtype[written.value.dtype].append(written)
        journal.fresh = []
    for dtype, all_written in by_dtype.items():
        flat = torch.cat([written.value.reshape(-1) for written in all_written])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat, non_blocking=True)
        for written, part in zip(all_written, host.split([w.value.numel() for w in all_written]), strict=True):
            written.value = part.view(written.value.shape)
