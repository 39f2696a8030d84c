"""Random plans for hypothesis, and what they mean, told from their fields alone.

`meaning` is the oracle of the plan tests: for one position of one request, what happens at each (site, layer). It is written down from the
documentation, and shares no code with midstream.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import strategies as st

from midstream import Capture, Clamp, Patch, Plan, RecordedRun, Steer
from midstream.plan.values import Named, Vector, Zeros

WIDTH = 4
SITES = ("resid_pre", "attn_out", "resid_post")
VECTORS = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, -1.0, 0.0], [0.5, 0.25, 0.0, 1e-3]]
MASKS = [[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 1.0, 0.25]]
RUNS = [
    RecordedRun(
        name,
        f"id of {name}",
        tuple(range(100, 106)),
        ("resid_pre", "attn_out", "resid_post"),
        (0, 1, 2, 3),
        tuple(range(6)),
    )
    for name in ("clean", "other")
]
NAMES = {name: np.array(vector, np.float32) for name, vector in zip(("calm", "loud"), VECTORS, strict=False)}


def layers(count: int) -> st.SearchStrategy[Any]:
    some = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)
    return st.one_of(st.just("all"), st.integers(0, count - 1), some)


def vectors(named: bool) -> st.SearchStrategy[Any]:
    return st.sampled_from(VECTORS + (list(NAMES) if named else []))


def positions(length: int) -> st.SearchStrategy[Any]:
    """One or several, some counted from the end, none twice."""
    some = st.lists(st.integers(0, length - 1), min_size=1, max_size=3, unique=True)
    return st.one_of(
        st.integers(-length, length - 1),
        st.tuples(some, st.booleans()).map(lambda drawn: [p - length for p in drawn[0]] if drawn[1] else drawn[0]),
    )


@st.composite
def places(draw: Any, length: int) -> dict[str, Any]:
    """Where a steer or a clamp acts: by phase, at positions of the prompt, or at generated tokens."""
    match draw(st.sampled_from(["phase", "positions", "generated"])):
        case "positions":
            return {"positions": draw(positions(length))}
        case "generated":
            numbers = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
            return {"phase": "decode", "positions": draw(numbers)}
    return {"phase": draw(st.sampled_from(["both", "prefill", "decode"]))}


@st.composite
def steers(draw: Any, count: int, length: int, named: bool = False) -> Steer:
    return Steer(
        draw(st.sampled_from(SITES)),
        layers=draw(layers(count)),
        vector=draw(vectors(named)),
        scale=draw(st.sampled_from([0.0, 1.0, -2.0])),
        norm_match=draw(st.booleans()),
        **draw(places(length)),
    )


@st.composite
def clamps(draw: Any, count: int, length: int, named: bool = False) -> Clamp:
    low, high = sorted(draw(st.tuples(st.sampled_from([-1.0, 0.0, -np.inf]), st.sampled_from([0.0, 2.0, np.inf]))))
    return Clamp(
        draw(st.sampled_from(SITES)),
        layers=draw(layers(count)),
        direction=draw(vectors(named)),
        low=low,
        high=high,
        strength=draw(st.sampled_from([0.0, 0.5, 1.0])),
        **draw(places(length)),
    )


@st.composite
def patches(draw: Any, count: int, length: int, named: bool = False) -> Patch:
    position = draw(positions(length))
    source = draw(st.one_of(vectors(named), st.just("zeros"), st.sampled_from(RUNS)))
    many = len(position) if isinstance(position, list) else 1
    of_run: dict[str, Any] = {}
    if isinstance(source, RecordedRun):
        at = st.integers(-6, 5)
        given = st.one_of(at, st.lists(at, min_size=many, max_size=many))
        of_run = {
            "source_position": draw(given if length > 6 else st.one_of(st.none(), given)),  # a run has no more than 6
            "source_layer": draw(st.one_of(st.none(), st.integers(0, 3))),
            "source_site": draw(st.one_of(st.none(), st.sampled_from(SITES))),
        }
    return Patch(
        draw(st.sampled_from(SITES)),
        layer=draw(st.integers(0, count - 1)),
        position=position,
        source=source,
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0])),
        mask=draw(st.one_of(st.none(), st.sampled_from(MASKS))),
        **of_run,
    )


@st.composite
def captures(draw: Any, count: int, length: int) -> Capture:
    words = st.sampled_from(["last_prompt", "all_prompt", "all_generated", "all"])
    return Capture(
        draw(st.sampled_from(SITES)),
        layers=draw(layers(count)),
        positions=draw(st.one_of(words, positions(length))),
        when=draw(st.sampled_from(["before", "after"])),
    )


def edits(count: int, length: int, named: bool = False) -> st.SearchStrategy[Any]:
    return st.one_of(steers(count, length, named), patches(count, length, named), clamps(count, length, named))


def plans(count: int, length: int, named: bool = False, most: int = 4) -> st.SearchStrategy[Plan]:
    return st.lists(st.one_of(edits(count, length, named), captures(count, length)), max_size=most).map(Plan.of)


def same_vector(value: Any) -> Any:
    """Something that tells a source apart."""
    if isinstance(value, Vector):
        return ("vector", value.data.tobytes())
    if isinstance(value, Named):
        return ("name", value.name)
    return ("zeros",) if isinstance(value, Zeros) else None


def meaning(plan: Plan, position: int, length: int, count: int) -> dict[tuple[str, int], Any]:
    """(site, layer) -> (patches in order, the steers in any order, clamps in order, captures) of one position of one request."""
    found: dict[tuple[str, int], Any] = defaultdict(lambda: ([], [], [], set()))
    for item in plan.interventions:
        if isinstance(item, Patch):
            _add_patch(found, item, position, length)
            continue
        for layer in range(count) if item.layers == "all" else item.layers:
            here = found[item.site, layer]
            if isinstance(item, Capture):
                if _captures(item.positions, position, length):
                    here[3].add(item.when)
            elif _acts(item, position, length):
                if isinstance(item, Steer) and item.scale != 0:
                    here[1].append((same_vector(item.vector), item.scale, item.norm_match))
                if isinstance(item, Clamp) and item.strength != 0 and not (item.low == -np.inf and item.high == np.inf):
                    here[2].append((same_vector(item.direction), item.low, item.high, item.strength))
    return {
        point: (tuple(patched), tuple(sorted(steered, key=repr)), tuple(clamped), frozenset(when))
        for point, (patched, steered, clamped, when) in found.items()
        if patched or steered or clamped or when
    }


def _add_patch(found: Any, patch: Patch, position: int, length: int) -> None:
    for i, written in enumerate(patch.position):
        if (written + length if written < 0 else written) != position or patch.alpha == 0:
            continue
        source = same_vector(patch.source)
        if isinstance(patch.source, RecordedRun):
            at = (
                written
                if patch.source_position is None
                else patch.source_position[i if len(patch.source_position) > 1 else 0]
            )
            at = at + len(patch.source.prompt_token_ids) if at < 0 else at
            layer = patch.layer if patch.source_layer is None else patch.source_layer
            source = ("run", patch.source.id, patch.source_site or patch.site, layer, at)
        found[patch.site, patch.layer][0].append((source, patch.alpha, same_vector(patch.mask)))


def _acts(edit: Steer | Clamp, position: int, length: int) -> bool:
    if edit.positions is not None and edit.phase == "decode":
        return position - length in edit.positions
    if edit.positions is not None:
        return position < length and any(written in (position, position - length) for written in edit.positions)
    return edit.phase == "both" or (edit.phase == "prefill") == (position < length)


def _captures(selector: Any, position: int, length: int) -> bool:
    if isinstance(selector, str):
        return {
            "last_prompt": position == length - 1,
            "all_prompt": position < length,
            "all_generated": position >= length,
            "all": True,
        }[selector]
    return position < length and (position in selector or position - length in selector)
