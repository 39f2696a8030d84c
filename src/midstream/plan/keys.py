"""Who may share KV blocks with whom: keys of a planned request's prefix-cache blocks.

The KV of a position depends on the tokens up to it and on every edit, up to it, of what a later attention reads. Two requests may share
the block of positions `[begin, end)` if and only if they have the same tokens and the same such edits at all positions below `end`; engines
take care of the tokens, `PlanKeys.at(end)` of the edits.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from midstream.plan.captures import captured_positions
from midstream.plan.ops.edit import Edit, changed, point_of, position_of
from midstream.plan.values import SITE_ORDER, Plan, encoded
from midstream.plan.vectors import Named, digest

FOREVER = 2**62
_STRETCH_BYTES = 320  # two numbers and two hashes, in lists


def changes_kv(site: str, layer: int, num_layers: int) -> bool:
    """Whether the value at a site is part of any key or value of attention: at the last layer, only what goes into its attention."""
    return layer < num_layers - 1 or site in ("resid_pre", "attn_in")


class _Stretch(NamedTuple):
    """Positions with the same edits."""

    start: int
    stop: int
    edits: tuple[str, ...]


class PlanKeys:
    """The keys of one request's blocks.

    Args:
        plan: all of the request's, the engine-wide one included.
        prompt_length: in tokens.
        num_layers: the model's.

    Raises:
        PlanError: a layer lies outside the model, a position outside the prompt, or a span is not resolved yet.
    """

    def __init__(self, plan: Plan, prompt_length: int, num_layers: int) -> None:
        nonces: dict[str, str] = {}
        texts: dict[Any, str] = {}
        edits = [
            (*_range(edit, prompt_length), _order(edit), _text(edit, nonces, texts))
            for edit in plan.normal(num_layers, prompt_length).edits
            if changes_kv(*point_of(edit), num_layers)
        ]
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._within: list[str] = []  # the key inside of each stretch, up to its end
        self._behind: list[str] = []  # and behind it
        below = ""
        for start, stop, active in _stretches(edits):
            self._starts.append(start)
            self._stops.append(stop)
            self._within.append(digest("\n".join([below, str(start), *active]).encode()))
            below = digest(f"{self._within[-1]} {stop}".encode())
            self._behind.append(below)

    @property
    def size(self) -> int:
        """About the bytes that it takes."""
        return _STRETCH_BYTES * len(self._starts)

    @property
    def floor(self) -> int | None:
        """The lowest position whose KV the plan changes; None if it changes none."""
        return self._starts[0] if self._starts else None

    def at(self, end: int) -> str | None:
        """The key of a block that ends before position `end`: 32 hexadecimal digits; None if it may be shared with plain requests."""
        last = bisect_left(self._starts, end) - 1
        if last < 0:
            return None
        return self._within[last] if end <= self._stops[last] else self._behind[last]


def lowest_captured(plan: Plan, prompt_length: int) -> int | None:
    """The lowest position of the prompt that is captured, which cache hits must not pass; None if none is."""
    prompts = [
        captured_positions(selector, prompt_length).prompt
        for selector in {capture.positions for capture in plan.captures}
    ]
    return min((int(prompt[0]) for prompt in prompts if prompt.size), default=None)


def _range(edit: Edit, prompt_length: int) -> tuple[int, int]:
    """The positions `[start, stop)` that an edit in normal form acts at."""
    if (position := position_of(edit)) is not None:
        return position, position + 1
    return {"both": (0, FOREVER), "prefill": (0, prompt_length), "decode": (prompt_length, FOREVER)}[edit.phase]


def _order(edit: Edit) -> tuple[int, int, int, str]:
    """Edits of different points, or of different kinds at one point, are in no order of their own."""
    site, layer = point_of(edit)
    return SITE_ORDER[site], layer, edit.order, edit.kind


def _text(edit: Edit, nonces: dict[str, str], texts: dict[Any, str]) -> str:
    """What an edit does to a row, in short; `texts` remembers, for a plan may have the same edit at many positions."""
    key = edit.what()
    if key not in texts:
        texts[key] = digest(_written(edit, nonces).encode())
    return f"{texts[key]} {edit.run_row()[2]}" if edit.reads_run else texts[key]


def _written(edit: Edit, nonces: dict[str, str]) -> str:
    """What the edit does to a row, as text without where; names whose vector nobody knows are like no other."""
    attributes: dict[str, Any] = {field: None for field in edit.place_fields & vars(edit).keys()}
    for field, value in vars(edit).items():
        if isinstance(value, Named) and value.digest is None:
            attributes[field] = Named(nonces.setdefault(value.name, secrets.token_hex(16)))
    return encoded(changed(edit, **attributes))


def _stretches(edits: list[tuple[int, int, tuple[int, int, int, str], str]]) -> Iterator[_Stretch]:
    """The positions that have edits, cut wherever these change and nowhere else."""
    edits = sorted(edits, key=itemgetter(2))  # a stable sort: edits of one kind at one point keep their order
    events = sorted((border, index) for index, edit in enumerate(edits) for border in edit[:2])
    active: list[int] = []
    last: _Stretch | None = None
    for (border, now), (following, _) in pairwise([*_grouped(events), (FOREVER, [])]):
        for index in now:
            _toggle(active, index)
        here = _Stretch(border, following, tuple(edits[index][3] for index in active))
        if last is not None and last.stop == here.start and last.edits == here.edits:
            last = last._replace(stop=here.stop)
            continue
        if last is not None and last.edits:
            yield last
        last = here
    if last is not None and last.edits:
        yield last


def _grouped(events: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Border -> the edits that start or stop there."""
    for border, here in groupby(events, itemgetter(0)):
        yield border, [index for _, index in here]


def _toggle(active: list[int], index: int) -> None:
    """Put `index` into a sorted list, or take it out."""
    place = bisect_left(active, index)
    if place < len(active) and active[place] == index:
        del active[place]
    else:
        active.insert(place, index)
