"""Who may share KV blocks with whom: the prefix-cache keys of a planned request's blocks.

The KV of a position depends on the tokens up to it, and on every edit up to it that a later attention reads. Two requests may share
the block of positions `[begin, end)` if and only if they have the same tokens and the same such edits at all positions below `end`. The
engine compares the tokens; `PlanKeys.at(end)` stands for the edits.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

from midstream.plan.captures import RowSelection
from midstream.plan.ops.edit import Edit, changed, point_of, position_of
from midstream.plan.values import SITE_ORDER, Plan, encoded
from midstream.plan.vectors import Named, digest

FOREVER = 2**62
_STRETCH_BYTES = 320  # two numbers and two hashes, in lists


def changes_kv(site: str, layer: int, num_layers: int) -> bool:
    """Whether the value at a site is part of any key or value of attention: at the last layer, only what goes into its attention."""
    return layer < num_layers - 1 or site in ("resid_pre", "attn_in")


class _Active(NamedTuple):
    """An edit and the positions `[start, stop)` at which it acts. Sorting gives the order in which edits act."""

    order: tuple[int, int, int, str]
    place: int  # in the normal form: edits of one kind at one point keep their order
    start: int
    stop: int
    text: str


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
        texts = _Texts()
        active = []
        for place, edit in enumerate(plan.normal(num_layers, prompt_length).edits):
            site, layer = point_of(edit)
            if changes_kv(site, layer, num_layers):
                order = SITE_ORDER[site], layer, edit.order, edit.kind
                active.append(_Active(order, place, *_range(edit, prompt_length), texts.of(edit)))
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._within: list[str] = []  # the key inside of each stretch, up to its end
        self._behind: list[str] = []  # and behind it
        below = ""
        for start, stop, edits in _stretches(sorted(active)):
            self._starts.append(start)
            self._stops.append(stop)
            self._within.append(digest("\n".join([below, str(start), *edits]).encode()))
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
    """The lowest captured position of the prompt, which cache hits must not pass; None if none is captured."""
    prompts = [
        RowSelection.of(selector, prompt_length).listed for selector in {capture.positions for capture in plan.captures}
    ]
    return min((int(prompt[0]) for prompt in prompts if prompt.size), default=None)


def _range(edit: Edit, prompt_length: int) -> tuple[int, int]:
    """The positions `[start, stop)` that an edit in normal form acts at."""
    if (position := position_of(edit)) is not None:
        return position, position + 1
    return {"both": (0, FOREVER), "prefill": (0, prompt_length), "decode": (prompt_length, FOREVER)}[edit.phase]


class _Texts:
    """What edits do to a row, in short, without where. Cached, since a plan may have the same edit at many positions."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}
        self._nonces: dict[str, str] = defaultdict(lambda: secrets.token_hex(16))

    def of(self, edit: Edit) -> str:
        key = edit.what()
        if key not in self._known:
            attributes: dict[str, Any] = {field: None for field in edit.place_fields & vars(edit).keys()}
            for field, value in vars(edit).items():
                if (
                    isinstance(value, Named) and value.digest is None
                ):  # nobody knows its vector: equal to no other plan's
                    attributes[field] = Named(self._nonces[value.name])
            self._known[key] = digest(encoded(changed(edit, **attributes)).encode())
        return f"{self._known[key]} {edit.run_row()[2]}" if edit.reads_run else self._known[key]


def _stretches(edits: list[_Active]) -> list[_Stretch]:
    """The positions that have edits, cut wherever these change and nowhere else."""
    changes: dict[int, set[int]] = defaultdict(set)  # position -> places in `edits` of those that start or stop there
    for i, edit in enumerate(edits):
        changes[edit.start] ^= {i}
        changes[edit.stop] ^= {i}
    active: set[int] = set()
    found: list[_Stretch] = []
    for start, stop in pairwise(sorted(changes)):
        active ^= changes[start]
        here = tuple(edits[i].text for i in sorted(active))
        if found and found[-1].stop == start and found[-1].edits == here:
            found[-1] = found[-1]._replace(stop=stop)
        elif here:
            found.append(_Stretch(start, stop, here))
    return found
