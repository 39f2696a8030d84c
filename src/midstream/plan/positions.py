"""Which positions an intervention is about, in one prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from midstream.plan.canonical import resolved_positions, unresolved
from midstream.plan.spans import Span


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
