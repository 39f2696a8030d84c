"""The one way to write a plan. Plans that do the same to the same rows, bit for bit, have the same normal form and hash.

In a normal form each edit has one layer, and one position or none; edits that change nothing are gone; steers, which add up, are sorted,
so that their float32 sum is always taken in the same order; patches and clamps at one site keep their order, for there it matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.runs import RecordedRun
from midstream.plan.values import (
    Capture,
    Clamp,
    Consumer,
    Edit,
    Intervention,
    Named,
    Patch,
    Plan,
    Sink,
    Span,
    Steer,
    Vector,
)
from midstream.plan.vectors import digest
from midstream.sites import LAYER_SITES

T = TypeVar("T", bound=Intervention)
S = TypeVar("S", Steer, Clamp)
SITE_ORDER = {site: i for i, site in enumerate(LAYER_SITES)}


def normal(plan: Plan, num_layers: int | None = None, prompt_length: int | None = None) -> Plan:
    """The normal form of a plan.

    Args:
        num_layers: the model's, for what is written with `layers="all"`; None leaves that as it is.
        prompt_length: in tokens, for positions that count from the end; None leaves them as they are.

    Raises:
        PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
    """
    edits = [edit for edit in plan.edits if not changes_nothing(edit)]
    patches = [one for edit in edits if isinstance(edit, Patch) for one in _patches(edit, num_layers, prompt_length)]
    steers = [one for e in edits if isinstance(e, Steer) for one in _spread(e, num_layers, prompt_length)]
    clamps = [one for e in edits if isinstance(e, Clamp) for one in _spread(e, num_layers, prompt_length)]
    captures = {
        (_point(one), key): one
        for capture in (_placed(capture, prompt_length) for capture in plan.captures)
        for key in [encoded(changed(capture, layers=()))]
        for one in _per_layer(capture, num_layers)
    }
    ordered: list[Intervention] = [
        *sorted(patches, key=_patch_order(patches)),
        *sorted(steers, key=lambda steer: (_point(steer), encoded(steer))),
        *sorted(clamps, key=_clamp_order(clamps)),
        *(captures[key] for key in sorted(captures)),
    ]
    return Plan(tuple(ordered))


def changes_nothing(edit: Edit) -> bool:
    """Whether an edit leaves every value as it is, whatever it is."""
    if isinstance(edit, Steer):
        return edit.scale == 0 or _is_zero(edit.vector)
    if isinstance(edit, Patch):
        return edit.alpha == 0 or _is_zero(edit.mask)
    return edit.strength == 0 or (edit.low == -np.inf and edit.high == np.inf)


def identity(source: Any) -> list[Any]:
    """What tells a vector or a source apart; the same for a vector and for its name, once the name's digest is known."""
    match source:
        case Vector():
            return ["vector", source.digest]
        case Named():
            return ["vector", source.digest] if source.digest is not None else ["named", source.name]
        case RecordedRun():
            return ["run", source.id]
        case None:
            return []
    return ["zeros"]


def encoded(item: Intervention) -> str:
    """All fields of an intervention as text: for comparing and hashing."""
    match item:
        case Steer():
            rest = [identity(item.vector), item.scale, item.norm_match, item.phase, _place(item.positions)]
        case Patch():
            source = [item.source_position, item.source_layer, item.source_site]
            rest = [_place(item.position), identity(item.source), source, item.alpha, identity(item.mask)]
        case Clamp():
            rest = [identity(item.direction), item.low, item.high, item.strength, item.phase, _place(item.positions)]
        case Capture():
            rest = [_place(item.positions), item.when, [_sink(sink) for sink in item.sinks]]
    layers = item.layer if isinstance(item, Patch) else item.layers
    return json.dumps([type(item).__name__, item.site, layers, *rest], sort_keys=True)


def plan_hash(plan: Plan) -> str:
    return digest("\n".join(encoded(item) for item in normal(plan).interventions).encode())


def changed(item: T, **attributes: Any) -> T:
    """The intervention with other attributes, which are known to be good: thousands are made of a patch at many positions."""
    made = object.__new__(type(item))
    made.__dict__.update(item.__dict__, **attributes)
    return made


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


def position_of(edit: Edit) -> int | None:
    """Of an edit in normal form, which has at most one; None if it acts wherever its phase says."""
    places = edit.position if isinstance(edit, Patch) else edit.positions
    return places[0] if places is not None else None


def _spread(edit: S, num_layers: int | None, prompt_length: int | None) -> Iterator[S]:
    """One edit for each layer and position."""
    places, field = edit.positions, f"{type(edit).__name__}.positions"
    if isinstance(places, Span) and prompt_length is not None:
        raise unresolved(field, places)
    if places is None or isinstance(places, Span):
        yield from _per_layer(edit, num_layers)
        return
    if prompt_length is not None:
        places = resolved_list(field, places, prompt_length)
    for one in _per_layer(edit, num_layers):
        for position in places:
            yield changed(one, positions=(position,))


def _per_layer(item: T, num_layers: int | None) -> Iterator[T]:
    if isinstance(item, Patch) or (item.layers == "all" and num_layers is None):
        yield item
        return
    layers = range(num_layers or 0) if item.layers == "all" else item.layers
    for layer in layers:
        _check_layer(f"{type(item).__name__}.layers", layer, num_layers)
        yield changed(item, layers=(layer,))


def _check_layer(field: str, layer: int, num_layers: int | None) -> None:
    if num_layers is not None and layer >= num_layers:
        raise fields.refuse(field, str(layer), f"0 to {num_layers - 1}, since the model has {num_layers} layers")


def _patches(patch: Patch, num_layers: int | None, prompt_length: int | None) -> Iterator[Patch]:
    """One patch for each position, with all that its source needs written out."""
    _check_layer("Patch.layer", patch.layer, num_layers)
    run = patch.source if isinstance(patch.source, RecordedRun) else None
    if run is not None:
        layer = patch.layer if patch.source_layer is None else patch.source_layer
        patch = changed(patch, source_layer=layer, source_site=patch.source_site or patch.site)
    if isinstance(patch.position, Span):
        if prompt_length is not None:
            raise unresolved("Patch.position", patch.position)
        yield patch
        return
    positions, sources = patch.position, patch.source_position or patch.position
    if prompt_length is not None:
        positions = resolved_list("Patch.position", positions, prompt_length)
        if run is not None:
            length, of = len(run.prompt_token_ids), f"the run {run.name!r}"
            sources = resolved_list("Patch.source_position", sources, length, of)
    for i, position in enumerate(positions):
        source = sources[i] if len(sources) > 1 else sources[0]
        yield changed(patch, position=(position,), source_position=None if run is None else (source,))


def unresolved(field: str, span: Span) -> PlanError:
    return fields.refuse(
        field,
        f"{span}, which needs the prompt's text",
        "positions where the prompt was given as token ids or embeddings",
    )


def _placed(capture: Capture, prompt_length: int | None) -> Capture:
    """The capture with listed positions in their order."""
    if isinstance(capture.positions, Span) and prompt_length is not None:
        raise unresolved("Capture.positions", capture.positions)
    if isinstance(capture.positions, (str, Span)):
        return capture
    positions = capture.positions
    if prompt_length is not None:
        positions = resolved_list("Capture.positions", positions, prompt_length)
    return changed(capture, positions=tuple(sorted(set(positions))))


def _point(item: Intervention) -> tuple[int, int]:
    if isinstance(item, Patch):
        return SITE_ORDER[item.site], item.layer
    return SITE_ORDER[item.site], -1 if item.layers == "all" else item.layers[0]


def _patch_order(patches: list[Patch]) -> Callable[[Patch], Any]:
    if not _are_apart(patch.position for patch in patches):
        return _point
    return lambda patch: (_point(patch), patch.position)


def _clamp_order(clamps: list[Clamp]) -> Callable[[Clamp], Any]:
    if any(clamp.layers == "all" for clamp in clamps):  # likewise for layers
        return lambda clamp: SITE_ORDER[clamp.site]
    if not _are_apart(clamp.positions for clamp in clamps):
        return _point
    return lambda clamp: (_point(clamp), clamp.positions)


def _are_apart(places: Iterable[Any]) -> bool:
    """Whether edits at different places act at different positions, and so may trade places; while that is open, they may not."""
    each = list(places)
    return all(isinstance(place, tuple) for place in each) and len({place[0] < 0 for place in each}) <= 1


def _place(position: Any) -> Any:
    if isinstance(position, Span):
        return [position.text, position.occurrence]
    many = isinstance(position, tuple) and len(position) > 16
    return [len(position), digest(np.array(position, "<i8").tobytes())] if many else position


def _sink(sink: Sink) -> Any:
    if isinstance(sink, Consumer):
        return ["consumer", sink.name, sink.options]
    return ["callable", id(sink)] if callable(sink) else sink


def _is_zero(vector: Any) -> bool:
    return isinstance(vector, Vector) and not vector.data.any()
