"""The edits of a request, kept so that positions that are computed again after a preemption carry them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from midstream.sites import Ref
from midstream.trace.rows import FlatRows
from midstream.trace.visit import Event, Key, Visit


@dataclass
class Written:
    """One edit: what was written at the positions from `first_position` on."""

    ref: Ref
    tokens: bool  # whether `value` is [tokens, ...], or shaped as the module has it with the tokens on `axis`
    axis: int
    in_place: bool
    first_position: int
    value: torch.Tensor


class Journal:
    """One request's edits by point. A later edit of the same positions takes the place of the earlier one."""

    def __init__(self) -> None:
        self._written: defaultdict[Key, dict[tuple[Ref, bool, int], Written]] = defaultdict(dict)
        self.fresh: list[Written] = []  # still where the forward computes

    def keys(self) -> Iterable[Key]:
        return self._written.keys()

    def write_down(self, visit: Visit, ref: Ref, tokens: bool, in_place: bool, value: torch.Tensor) -> None:
        """Note an edit; the value may be changed by the trace afterwards."""
        assert isinstance(visit.rows, FlatRows)
        axis = 0 if tokens else visit.rows.axis(visit.event.leaf(ref))
        if axis is None:
            return
        first = visit.rows.first_position
        one_number = value.numel() > 1 and not any(value.stride())  # the zeros of a second stream
        written = Written(ref, tokens, axis, in_place, first, value if one_number else value.detach().clone())
        self._written[visit.key][ref, tokens, first] = written
        if value.is_cuda and not one_number:
            self.fresh.append(written)

    def replay(self, event: Event, rows: FlatRows) -> None:
        """Put the edits of `rows`' positions back."""
        for written in self._written.get(event.key, {}).values():
            count = written.value.shape[written.axis]
            begin = max(written.first_position, rows.first_position)
            end = min(written.first_position + count, rows.first_position + rows.count)
            if begin < end:
                part = written.value.narrow(written.axis, begin - written.first_position, end - begin)
                start = rows.start + begin - rows.first_position
                target = FlatRows(start, start + end - begin, rows.total)
                part = part.to(event.leaf(written.ref).device)
                event.write(written.ref, part, target, written.tokens, written.in_place)


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
