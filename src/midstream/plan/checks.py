"""Checks of a plan against the model and the prompt.

Whoever admits a request checks it with what it knows; the workers know everything. The first problem raises PlanError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from midstream.errors import NOT_FINITE, PlanError
from midstream.plan import fields
from midstream.plan.captures import Capture
from midstream.plan.ops.edit import Edit, Intervention
from midstream.plan.values import Plan
from midstream.plan.vectors import Named, RecordedRun, Vector
from midstream.plan.wire import MAX_STRANGERS_EDITS
from midstream.sites import LAYER_SITES, NotFinite

MAX_EDITS = 1 << 14
MAX_PLACED_EDITS = 1 << 16


@dataclass(frozen=True)
class ModelFacts:
    """What checks need to know of a model. Unknown facts are empty, and are not checked.

    Attributes:
        num_layers: of all pipeline stages together; 0 if not known.
        widths: (site, layer) -> the site's width, for every site that the model has.
        dtype: of the activations, as in "bfloat16".
    """

    num_layers: int = 0
    widths: Mapping[tuple[str, int], int] = field(default_factory=dict)
    dtype: str = ""


def check(
    plan: Plan,
    facts: ModelFacts,
    prompt_length: int | None,
    max_tokens: int | None,
    *,
    vectors: Mapping[str, int] | None,
    runs: Mapping[str, str] | None,
    multimodal: bool = False,
) -> None:
    """Raise PlanError for the first intervention in `plan` that the model cannot carry out.

    Args:
        facts: of the model.
        prompt_length: in tokens.
        max_tokens: that the request may generate.
        vectors: name -> width of the engine's named vectors.
        runs: name -> id of the engine's recorded runs.
        multimodal: whether the prompt has parts other than text, which move positions.

    An argument that is None is not known, and not checked.
    """
    _check_size(plan, facts.num_layers)
    for item in plan.interventions:
        _check_positions(item, prompt_length, multimodal)
        if isinstance(item, Capture) and item.positions == "all_generated" and max_tokens == 0:
            allowed = "positions of the prompt, or more max_tokens"
            raise fields.refuse("Capture.positions", "'all_generated' with max_tokens=0", allowed)
        layers = item.layers_in(facts.num_layers)
        _check_site(item, layers, facts.widths)
        if isinstance(item, Edit):
            for name, value in item.values():
                if isinstance(value, RecordedRun):
                    _check_run_exists(item.label(name), value, runs)
                    item.check_run(item.label(name), value, facts.widths)
                elif isinstance(value, Vector):
                    _check_width(item, name, f"of width {value.width}", value.width, layers, facts.widths)
                elif isinstance(value, Named) and vectors is not None:
                    _check_name_exists(item, name, value.name, vectors, runs or {})
                    width = vectors[value.name]
                    _check_width(item, name, f"{value.name!r}, of width {width}", width, layers, facts.widths)


def check_strangers(plan: Plan, num_layers: int) -> None:
    """Raise PlanError for a plan that would make other requests wait too long."""
    count = sum(_count(item, num_layers) for item in plan.interventions)
    if count > MAX_STRANGERS_EDITS:
        counted = "counted once for each layer and listed position"
        allowed = f"up to {MAX_STRANGERS_EDITS} edits and captures over HTTP, {counted}"
        raise fields.refuse("the plan", f"{count} edits and captures", allowed)


def not_finite(broken: NotFinite, plan: Plan, dtype: str) -> str:
    """The message of a `NotFiniteError` for a request whose plan made its activations infinite or NaN."""
    if broken.point is not None:
        cause = "its plan's edit there makes them so"
    else:
        places = dict.fromkeys(map(_shown_place, plan.edits))
        cause = f"its plan edits {', '.join(islice(places, 8))}{', ...' if len(places) > 8 else ''}"
    return f"{NOT_FINITE}{broken}: {cause}. Use smaller vectors or scales, or a dtype with a wider range than {dtype}."


def _shown_place(edit: Edit) -> str:
    layers = edit.at_layers
    if layers == "all":
        return f"{edit.site} of all layers"
    return f"{edit.site} of layer{'s' if len(layers) > 1 else ''} {fields.ranges(layers)}"


def _check_size(plan: Plan, num_layers: int) -> None:
    everywhere = sum(_count(edit, num_layers) for edit in plan.edits if edit.place is None)
    placed = sum(_count(edit, num_layers) for edit in plan.edits if edit.place is not None)
    if everywhere > MAX_EDITS:  # each acts at every row
        allowed = f"up to {MAX_EDITS} of them, counted once for each layer"
        raise fields.refuse("the plan", f"{everywhere} steers and clamps", allowed)
    if placed > MAX_PLACED_EDITS:
        allowed = f"up to {MAX_PLACED_EDITS} of them, counted once for each layer and position"
        raise fields.refuse("the plan", f"{placed} edits at positions", allowed)


def _count(item: Intervention, num_layers: int) -> int:
    """An intervention, counted once for each layer and listed position."""
    positions = len(item.place) if isinstance(item.place, tuple) else 1
    return positions * (num_layers if item.at_layers == "all" else len(item.at_layers))


def _check_positions(item: Intervention, prompt_length: int | None, multimodal: bool) -> None:
    field, place = item.label(item.position_field), item.place
    if place is None or isinstance(place, str):
        return
    if multimodal:
        given = f"{fields.shown(place)} in a multimodal prompt, whose positions are not those of its text"
        raise fields.refuse(field, given, "such positions in prompts of text only")
    if prompt_length is not None and len(set(item.place_in(prompt_length))) < len(place):
        given = f"{fields.shown(place)}, which has one twice in a prompt of {prompt_length} tokens"
        raise fields.refuse(field, given, "each once")


def _check_site(item: Intervention, layers: Iterable[int], widths: Mapping[tuple[str, int], int]) -> None:
    for layer in layers if widths else ():
        if (item.site, layer) in widths:
            continue
        if have := [at for site, at in widths if site == item.site]:
            given = f"site {item.site!r} at layer {layer} ({item.label(item.layer_field)})"
            raise PlanError(f"The model has no {given}; it has it at {fields.ranges(have)}.")
        there = {site for site, _ in widths}
        sites = ", ".join(site for site in LAYER_SITES if site in there)
        raise PlanError(f"The model has no site {item.site!r} ({item.label('site')}); it has {sites}.")


def _check_width(
    edit: Edit, field: str, given: str, width: int, layers: Iterable[int], widths: Mapping[tuple[str, int], int]
) -> None:
    for layer in layers:
        expected = widths.get((edit.site, layer), width)
        if width != expected:
            raise fields.refuse(edit.label(field), given, f"{expected}, the width of {edit.site} at layer {layer}")


def _check_name_exists(edit: Edit, field: str, name: str, vectors: Mapping[str, int], runs: Mapping[str, str]) -> None:
    if name in vectors:
        return
    hint = fields.nearest(name, vectors)
    if name in runs and field in edit.run_operands:
        hint = f"a recorded run is given itself: source=model.runs[{name!r}], or what model.record returned"
    raise PlanError(f"{edit.label(field)}: the engine has no vector {name!r}; {hint}")


def _check_run_exists(field: str, run: RecordedRun, runs: Mapping[str, str] | None) -> None:
    if runs is None or run.id in runs.values():
        return
    if run.name in runs:
        raise PlanError(
            f"{field}: the recorded run {run.name!r} is not there any more, but another of that name, recorded later: "
            "take the handle that `record` gave for that."
        )
    raise PlanError(f"{field}: the engine has no recorded run {run.name!r} any more; {fields.nearest(run.name, runs)}")
