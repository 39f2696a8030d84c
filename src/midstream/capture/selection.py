"""Which rows a plan captures, and where they go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midstream.plan.layout import Key
from midstream.plan.positions import captured_positions
from midstream.plan.values import Capture, Consumer


class Wanted(NamedTuple):
    """Rows of one plane: `listed` (int64, ascending), and all from position `tail` on."""

    listed: np.ndarray
    tail: int | None = None

    def mask(self, positions: np.ndarray) -> np.ndarray:
        """Which of the positions are wanted."""
        keep = np.zeros(positions.size, bool) if self.tail is None else positions >= self.tail
        if self.listed.size:
            place = np.searchsorted(self.listed, positions)
            keep |= self.listed[np.minimum(place, self.listed.size - 1)] == positions
        return keep

    def below(self, stop: int | None) -> np.ndarray:
        """All wanted positions below `stop`; without a stop, only the listed ones are known."""
        if stop is None:
            return self.listed
        generated = np.arange(stop if self.tail is None else self.tail, stop, dtype=np.int64)
        return np.union1d(self.listed[self.listed < stop], generated)

    def __or__(self, other: Wanted) -> Wanted:
        tail = other.tail if self.tail is None else self.tail  # of one request, so both are its prompt's length
        return Wanted(np.union1d(self.listed, other.listed), tail)


@dataclass
class Route:
    """One place that rows go to, and which."""

    to: Any  # a directory, a callable or a plan's Consumer; None for the output
    wanted: dict[Key, Wanted] = field(default_factory=dict)


class Routes(NamedTuple):
    """Where the rows of one request go."""

    output: dict[Key, Wanted]  # what the user finds on the output
    sinks: tuple[Route, ...]


def identity(to: Any) -> tuple[Any, ...]:
    """What is equal for two ways to write one place, and for no others."""
    if isinstance(to, (str, Path)):
        return ("directory", str(Path(to).expanduser().absolute()))
    if isinstance(to, Consumer):
        return ("consumer", to.name, json.dumps(to.options, sort_keys=True))
    owner = getattr(to, "__self__", None)  # each look at a bound method is another object
    return ("callable", id(to)) if owner is None else ("method", id(owner), getattr(to, "__qualname__", ""))


def routes(captures: Iterable[Capture], prompt_length: int, layers: Iterable[int]) -> Routes:
    """What goes where. `layers` are the model's, or those of one pipeline stage where that stage does the routing.

    Raises PlanError for a span that was not made into positions yet.
    """
    there = list(layers)
    output, sinks = Route(None), dict[tuple[Any, ...], Route]()
    for capture in captures:
        prompt, goes_on = captured_positions(capture.positions, prompt_length)
        rows = Wanted(prompt, prompt_length if goes_on else None)
        given: Any = capture.layers
        chosen = there if given == "all" else [layer for layer in there if layer in given]
        for to in capture.sinks:
            route = output if to is None else sinks.setdefault(identity(to), Route(to))
            for layer in chosen:
                _add(route.wanted, (capture.site, layer, capture.when), rows)
    return Routes(output.wanted, tuple(route for route in sinks.values() if route.wanted))


def _add(wanted: dict[Key, Wanted], key: Key, rows: Wanted) -> None:
    known: Mapping[Key, Wanted] = wanted
    wanted[key] = known[key] | rows if key in known else rows
