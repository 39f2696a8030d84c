"""Places in the prompt given as text, and how they become positions once somebody has the tokenizer's offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.errors import PlanError
from midstream.plan import fields

if TYPE_CHECKING:
    from midstream.plan.values import Intervention, Plan


@dataclass(frozen=True)
class Span:
    """The tokens of the prompt that overlap `text`: `Span("Paris")`, or `Span("Paris", 1)` for the second place where it stands.

    Whoever has the tokenizer turns it into positions, with `resolve_spans`.
    """

    text: str
    occurrence: int = 0

    def __post_init__(self) -> None:
        fields.text("Span.text", self.text)
        object.__setattr__(self, "occurrence", fields.integer("Span.occurrence", self.occurrence, 0))


def has_spans(plan: Plan) -> bool:
    """Whether `resolve_spans` has something to do."""
    return any(isinstance(_place(item), Span) for item in plan.interventions)


def resolve_spans(plan: Plan, text: str, offsets: Sequence[tuple[int, int]]) -> Plan:
    """The plan with positions in the place of spans.

    Args:
        text: the prompt.
        offsets: for each token the characters `[begin, end)` that it stands for, as tokenizers give them with
            `return_offsets_mapping`; begin = end for tokens of no text, such as the begin of the sequence.

    Raises:
        PlanError: the text does not stand there so often, or no token overlaps it.
    """
    return type(plan)(tuple(_resolved(item, text, offsets) for item in plan.interventions))


def _place(item: Intervention) -> object:
    return getattr(item, "position", getattr(item, "positions", None))


def _resolved(item: Intervention, text: str, offsets: Sequence[tuple[int, int]]) -> Intervention:
    span = _place(item)
    if not isinstance(span, Span):
        return item
    field = "position" if hasattr(item, "position") else "positions"
    found: dict[str, Any] = {field: span_positions(span, text, offsets, f"{type(item).__name__}.{field}")}
    return dataclasses.replace(item, **found)


def span_positions(
    span: Span, text: str, offsets: Sequence[tuple[int, int]], field: str = "the span"
) -> tuple[int, ...]:
    """The positions of the tokens that overlap the span's text. Raises PlanError as `resolve_spans`."""
    begin = _find(span, text)
    if begin is None:
        found = text.count(span.text)
        there = f"which stands there {found} time{'s' if found != 1 else ''}" if found else "which does not stand there"
        raise fields.refuse(
            field,
            f"{span} in the prompt {fields.shown(text)}, {there}",
            "a text that the prompt has; occurrence from 0",
        )
    end = begin + len(span.text)
    positions = tuple(i for i, (first, last) in enumerate(offsets) if first < end and begin < last and first < last)
    if not positions:
        raise PlanError(f"{field} is {span}, at characters {begin} to {end} of the prompt, which no token stands for.")
    return positions


def _find(span: Span, text: str) -> int | None:
    """Where the span begins; occurrences are counted as `str.count` does, without overlaps."""
    begin = -len(span.text)
    for _ in range(span.occurrence + 1):
        begin = text.find(span.text, begin + len(span.text))
        if begin < 0:
            return None
    return begin
