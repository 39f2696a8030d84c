"""The normal form of a plan. Plans that do the same to the same rows, bit for bit, have the same normal form and hash.

In a normal form each edit has one layer, and one position or none. Edits that change nothing are left out. Edits whose order does not
matter are sorted, so that their float32 sum is always taken in the same order; the others keep their order at each site.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from midstream.plan.captures import Capture, Consumer
from midstream.plan.ops.edit import Edit, changed, fields_of, per_layer
from midstream.plan.positions import Span, check_resolved, resolved_list
from midstream.plan.runs import RecordedRun
from midstream.plan.vectors import Named, Vector, Zeros, digest
from midstream.sites import LAYER_SITES

Intervention: TypeAlias = Edit | Capture
SITE_ORDER = {site: i for i, site in enumerate(LAYER_SITES)}


def normal_form(
    interventions: Sequence[Intervention], num_layers: int | None = None, prompt_length: int | None = None
) -> tuple[Intervention, ...]:
    """The normal form: edits in the order in which they act at a site, then captures.

    Args:
        num_layers: the model's, for what is written with `layers="all"`; None leaves that as it is.
        prompt_length: in tokens, for positions that count from the end; None leaves them as they are.

    Raises:
        PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
    """
    edits = [item for item in interventions if isinstance(item, Edit) and not item.changes_nothing()]
    edits.sort(key=lambda edit: (edit.order, edit.kind))
    ordered: list[Intervention] = []
    for _, of_kind in groupby(edits, key=lambda edit: edit.kind):
        each = [one for edit in of_kind for one in edit.spread(num_layers, prompt_length)]
        ordered += sorted(each, key=_order_of(each))
    captures = {
        (_point(one), key): one
        for capture in (_placed(item, prompt_length) for item in interventions if isinstance(item, Capture))
        for key in [encoded(changed(capture, layers=()))]
        for one in per_layer(capture, num_layers)
    }
    return (*ordered, *(captures[key] for key in sorted(captures)))


def plan_hash(interventions: Sequence[Intervention]) -> str:
    """Of the normal form; 32 hexadecimal digits."""
    return digest("\n".join(encoded(item) for item in normal_form(interventions)).encode())


def encoded(item: Intervention) -> str:
    """All fields of an intervention as text, for comparing and hashing."""
    values = [_encoded(name, getattr(item, name)) for name in _names(type(item))]  # type: ignore[arg-type]
    return json.dumps([item.kind, *values], sort_keys=True)


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields_of(cls))


def _encoded(field: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):  # thousands of these come at once
        return value
    match value:
        case Vector():
            return ["vector", value.digest]
        case Named():  # a vector and its name are the same, once the name's digest is known
            return ["vector", value.digest] if value.digest is not None else ["named", value.name]
        case RecordedRun():
            return ["run", value.id]
        case Zeros():
            return ["zeros"]
        case Span():
            return [value.text, value.occurrence]
        case Consumer():
            return ["consumer", value.name, value.options]
        case tuple() if field == "to":
            return [_encoded(field, sink) for sink in value]
        case tuple() if len(value) > 16:
            return [len(value), digest(np.array(value, "<i8").tobytes())]
        case tuple():
            return value
    if callable(value):
        return ["callable", id(value)]
    raise TypeError(f"{field} holds {value!r}, which no normal form can have.")


def _placed(capture: Capture, prompt_length: int | None) -> Capture:
    """The capture with listed positions in ascending order."""
    positions = capture.positions
    check_resolved("Capture.positions", positions, prompt_length)
    if isinstance(positions, (str, Span)):
        return capture
    if prompt_length is not None:
        positions = resolved_list("Capture.positions", positions, prompt_length)
    return changed(capture, positions=tuple(sorted(set(positions))))


def _point(item: Intervention) -> tuple[int, int]:
    layers = item.at_layers
    return SITE_ORDER[item.site], -1 if layers == "all" else layers[0]


def _order_of(edits: list[Edit]) -> Callable[[Any], Any]:
    """How edits of one kind are sorted: what may trade places does, and the rest keeps its order."""
    if edits and edits[0].adds:
        return lambda edit: (_point(edit), encoded(edit))
    if any(edit.at_layers == "all" for edit in edits):  # it may be any layer's
        return lambda edit: SITE_ORDER[edit.site]
    if not _are_apart(edit.place for edit in edits):
        return _point
    return lambda edit: (_point(edit), edit.place)


def _are_apart(places: Iterable[Any]) -> bool:
    """Whether edits at different places act at different positions, and so may trade places."""
    each = list(places)
    return all(isinstance(place, tuple) for place in each) and len({place[0] < 0 for place in each}) <= 1
