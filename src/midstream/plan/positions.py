"""Positions of a prompt: as users write them, as text whose tokens are meant, and as numbers once the prompt is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields


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


def as_positions(field: str, value: object, names: tuple[str, ...] = ()) -> str | tuple[int, ...] | Span:
    """What a user gives as positions: one or several, a `Span`, or one of `names`. Raises PlanError."""
    if isinstance(value, Span) or (isinstance(value, str) and value in names):
        return value
    named = f"{', '.join(map(repr, names))}, " if names else ""
    return fields.integers(field, value, f"{named}a position, a sequence of positions, or Span(text)")


def check_resolved(field: str, place: object, prompt_length: int | None) -> None:
    """Raise PlanError for a `Span` where the prompt's length is known, since by then somebody had to resolve it."""
    if isinstance(place, Span) and prompt_length is not None:
        raise unresolved(field, place)


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


def unresolved(field: str, span: Span) -> PlanError:
    return fields.refuse(
        field,
        f"{span}, which needs the prompt's text",
        "positions where the prompt was given as token ids or embeddings",
    )


def resolved_positions(field: str, positions: Iterable[int], length: int, of: str = "the prompt") -> np.ndarray:
    """int64 positions counted from the begin, in the order given. Raises PlanError if one lies outside."""
    given = np.fromiter(positions, np.int64)
    outside = (given < -length) | (given >= length)
    if outside.any():
        raise fields.refuse(
            field, str(given[outside][0]), f"from {-length} to {length - 1}, since {of} has {length} tokens"
        )
    return np.where(given < 0, given + length, given)


def resolved_list(field: str, positions: tuple[int, ...], length: int, of: str = "the prompt") -> list[int]:
    """The same as a list; quick for a single position, of which a plan may have thousands."""
    if len(positions) == 1 and -length <= positions[0] < length:
        return [positions[0] % length]
    return resolved_positions(field, positions, length, of).tolist()


class Positions(NamedTuple):
    """Captured positions.

    Attributes:
        prompt: int64, ascending, each below the prompt's length.
        generated: whether all from the prompt's length on are captured too.
    """

    prompt: np.ndarray
    generated: bool


def captured_positions(selector: str | Span | tuple[int, ...], prompt_length: int) -> Positions:
    """What `Capture.positions` selects of a prompt of that length. Raises PlanError for a position outside, or a span not resolved yet."""
    nothing, prompt = np.empty(0, np.int64), np.arange(prompt_length, dtype=np.int64)
    match selector:
        case "last_prompt":
            return Positions(prompt[-1:], False)
        case "all_prompt":
            return Positions(prompt, False)
        case "all_generated":
            return Positions(nothing, True)
        case "all":
            return Positions(prompt, True)
        case Span():
            raise unresolved("Capture.positions", selector)
    assert not isinstance(selector, str)
    return Positions(np.unique(resolved_positions("Capture.positions", selector, prompt_length)), False)
