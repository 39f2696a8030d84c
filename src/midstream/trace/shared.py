"""A site's value for all the traced requests of an event at once.

Sixty-four requests that each add a vector at one layer should not cost sixty-four reads and writes of the engine's tensors:
the value is computed once over the rows they span, each trace edits its own rows of it in place, and the edited rows go back
in one write for each run of neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from midstream.sites import Binding, Ref
from midstream.trace.rows import FlatRows, private

if TYPE_CHECKING:
    from midstream.trace.journal import Journal
    from midstream.trace.visit import Event

Span = tuple[int, int]  # rows of the flat batch, [first, last)


class SharedSite:
    """The value of `binding` at an event over the rows of `span`, `[rows, hidden]`, in memory of its own."""

    def __init__(self, event: Event, binding: Binding, span: Span, total: int, body: str) -> None:
        self._event = event
        self._binding = binding
        self._first = span[0]
        self._total = total
        self._edited: dict[Span, tuple[FlatRows, Journal | None]] = {}
        self._replaced: dict[Span, torch.Tensor] = {}
        rows = FlatRows(*span, total)

        def leaf(ref: Ref) -> torch.Tensor | None:
            full = event.leaf(ref)
            return full if full is None or full.ndim == 1 else event.take_tokens(ref, rows, body)

        with torch.inference_mode(False):
            value = binding.read(leaf)
            aliased = value.untyped_storage().data_ptr() == event.leaf(binding.hidden).untyped_storage().data_ptr()
            self._value = value.clone() if aliased else value

    def part(self, rows: FlatRows) -> torch.Tensor:
        """One request's rows, as a view; what was put in their place, if something was."""
        if (rows.start, rows.stop) in self._replaced:
            return self._replaced[rows.start, rows.stop]
        return self._value[rows.start - self._first : rows.stop - self._first]

    def edit(self, rows: FlatRows, value: torch.Tensor, journal: Journal | None) -> None:
        """Note that a request's rows are to be `value`, which may be the very view that `part` gave."""
        if value.data_ptr() != self.part(rows).data_ptr():
            self._replaced[rows.start, rows.stop] = private(
                value
            )  # not into the view: a trace holds it as what it read
        self._edited[rows.start, rows.stop] = (rows, journal)

    def write_back(self) -> None:
        """Put the edited rows into the engine's tensors."""
        for run in _runs(self._edited):
            rows = FlatRows(run[0][0], run[-1][1], self._total)
            value = torch.cat([self.part(self._edited[span][0]) for span in run]) if self._replaced else self.part(rows)
            for ref, part in self._binding.leaves(value, self._event.leaf):
                self._event.write(ref, part, rows, tokens=True, in_place=self._binding.in_place)
            kept = value.clone() if any(self._edited[span][1] is not None for span in run) else value
            for span in run:
                own, journal = self._edited[span]
                if journal is not None:
                    journal.add(
                        self._event.key,
                        self._binding,
                        own.first_position,
                        kept[own.start - rows.start : own.stop - rows.start],
                    )
        self._edited.clear()
        self._replaced.clear()


def _runs(spans: dict[Span, tuple[FlatRows, Journal | None]]) -> list[list[Span]]:
    """Spans grouped into runs of neighbours without a gap."""
    runs: list[list[Span]] = []
    for span in sorted(spans):
        if runs and runs[-1][-1][1] == span[0]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
