"""Whether a model can do what a plan says, to a given prompt: all that shows only once these are known.

Whoever admits a request checks it, with what it knows; the workers know all of it. The first thing wrong raises a PlanError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from midstream.errors import NOT_FINITE, PlanError
from midstream.plan import fields
from midstream.plan.canonical import resolved_list, unresolved
from midstream.plan.runs import RecordedRun
from midstream.plan.spans import Span
from midstream.plan.values import Capture, Clamp, Edit, Intervention, Named, Patch, Plan, Steer, Vector
from midstream.plan.wire import MAX_STRANGERS_EDITS
from midstream.sites import LAYER_SITES, NotFinite

MAX_EDITS = 1 << 14
MAX_PLACED_EDITS = 1 << 16


@dataclass(frozen=True)
class ModelFacts:
    """What plans need to know of a model. What is not known is left empty, and not checked.

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
    """Raise PlanError for the first thing in `plan` that cannot be done.

    Args:
        facts: of the model.
        prompt_length: in tokens.
        max_tokens: that the request may generate.
        vectors: name -> width of the engine's named vectors.
        runs: name -> id of the engine's recorded runs.
        multimodal: whether the prompt has parts that are no text, which moves positions.

    Each may be None where it is not known, and is not checked then.
    """
    _check_size(plan, facts.num_layers)
    checker = _Checker(facts, prompt_length, vectors, runs)
    for item in plan.interventions:
        if multimodal:
            _check_text(item)
        checker.check(item)
        if isinstance(item, Capture) and item.positions == "all_generated" and max_tokens == 0:
            allowed = "positions of the prompt, or more max_tokens"
            raise fields.refuse("Capture.positions", "'all_generated' with max_tokens=0", allowed)


def _check_size(plan: Plan, num_layers: int) -> None:
    everywhere = placed = 0
    for edit in plan.edits:
        if _place_of(edit)[1] is None:
            everywhere += _count(edit, num_layers)
        else:
            placed += _count(edit, num_layers)
    if everywhere > MAX_EDITS:  # each is one for every row
        allowed = f"up to {MAX_EDITS} of them, counted once for each layer"
        raise fields.refuse("the plan", f"{everywhere} steers and clamps", allowed)
    if placed > MAX_PLACED_EDITS:
        allowed = f"up to {MAX_PLACED_EDITS} of them, counted once for each layer and position"
        raise fields.refuse("the plan", f"{placed} edits at positions", allowed)


def not_finite(broken: NotFinite, plan: Plan, dtype: str) -> str:
    """The message of a `NotFiniteError` for a request whose plan made its activations infinite or NaN."""
    if broken.point is not None:
        cause = "its plan's edit there makes them so"
    else:
        places = dict.fromkeys(map(_shown_place, plan.edits))
        cause = f"its plan edits {', '.join(islice(places, 8))}{', ...' if len(places) > 8 else ''}"
    return f"{NOT_FINITE}{broken}: {cause}. Use smaller vectors or scales, or a dtype with a wider range than {dtype}."


def _shown_place(edit: Edit) -> str:
    layers = (edit.layer,) if isinstance(edit, Patch) else edit.layers
    if layers == "all":
        return f"{edit.site} of all layers"
    return f"{edit.site} of layer{'s' if len(layers) > 1 else ''} {_listed(layers)}"


def check_strangers(plan: Plan, num_layers: int) -> None:
    """Raise PlanError for a plan that costs the engine more than others should have to wait for."""
    count = sum(_count(item, num_layers) for item in plan.interventions)
    if count > MAX_STRANGERS_EDITS:
        allowed = (
            f"up to {MAX_STRANGERS_EDITS} edits and captures over HTTP, counted once for each layer and listed position"
        )
        raise fields.refuse("the plan", f"{count} edits and captures", allowed)


def _count(item: Intervention, num_layers: int) -> int:
    """An intervention, counted once for each layer and listed position."""
    place = _place_of(item)[1]
    positions = len(place) if isinstance(place, tuple) else 1
    layers = 1 if isinstance(item, Patch) else num_layers if item.layers == "all" else len(item.layers)
    return layers * positions


def _place_of(item: Intervention) -> tuple[str, Any]:
    """The field that says where an intervention acts, and what it says."""
    field = "position" if isinstance(item, Patch) else "positions"
    return f"{type(item).__name__}.{field}", getattr(item, field)


def _check_text(item: Intervention) -> None:
    field, place = _place_of(item)
    if place is not None and not isinstance(place, str):
        given = f"{fields.shown(place)} in a multimodal prompt, whose positions are not those of its text"
        raise fields.refuse(field, given, "such positions in prompts of text only")


class _Checker:
    def __init__(
        self,
        facts: ModelFacts,
        prompt_length: int | None,
        vectors: Mapping[str, int] | None,
        runs: Mapping[str, str] | None,
    ) -> None:
        self._facts, self._length, self._vectors, self._runs = facts, prompt_length, vectors, runs

    def check(self, item: Intervention) -> None:
        self._check_place(*_place_of(item))
        if isinstance(item, Patch):
            self._check_layers("Patch.layer", item.site, (item.layer,))
            self._check_source("Patch.source", item.source, item.site, (item.layer,))
            self._check_source("Patch.mask", item.mask, item.site, (item.layer,))
            if isinstance(item.source, RecordedRun):
                self._check_run(item, item.source)
            return
        name = type(item).__name__
        listed = range(self._facts.num_layers) if item.layers == "all" else item.layers
        self._check_layers(f"{name}.layers", item.site, listed)
        if isinstance(item, Steer):
            self._check_source("Steer.vector", item.vector, item.site, listed)
        elif isinstance(item, Clamp):
            self._check_source("Clamp.direction", item.direction, item.site, listed)

    def _check_layers(self, field: str, site: str, layers: Iterable[int]) -> None:
        count, widths = self._facts.num_layers, self._facts.widths
        for layer in layers:
            if count and layer >= count:
                raise fields.refuse(field, str(layer), f"0 to {count - 1}, since the model has {count} layers")
            if widths and (site, layer) not in widths:
                raise self._lacking(field, site, layer)

    def _lacking(self, field: str, site: str, layer: int) -> PlanError:
        widths = self._facts.widths
        have = [layer for other, layer in widths if other == site]
        if have:
            return PlanError(
                f"The model has no site {site!r} at layer {layer} ({field}); it has it at {_listed(have)}."
            )
        sites = [other for other in LAYER_SITES if any(other == site for site, _ in widths)]
        return PlanError(f"The model has no site {site!r} ({field.split('.')[0]}.site); it has {', '.join(sites)}.")

    def _check_place(self, field: str, place: object) -> None:
        if self._length is None or place is None or isinstance(place, str):
            return
        if isinstance(place, Span):
            raise unresolved(field, place)
        assert isinstance(place, tuple)
        positions = resolved_list(field, place, self._length)
        if len(set(positions)) < len(positions):
            raise fields.refuse(
                field, f"{fields.shown(place)}, which has one twice in a prompt of {self._length} tokens", "each once"
            )

    def _check_source(self, field: str, source: object, site: str, layers: Iterable[int]) -> None:
        if isinstance(source, Named):
            if self._vectors is None:
                return
            if source.name not in self._vectors:
                hint = fields.nearest(source.name, self._vectors)
                if self._runs and source.name in self._runs and field == "Patch.source":
                    hint = f"a recorded run is given itself: source=model.runs[{source.name!r}], or what model.record returned"
                raise PlanError(f"{field}: the engine has no vector {source.name!r}; {hint}")
            width = self._vectors[source.name]
        elif isinstance(source, Vector):
            width = source.width
        else:
            return
        for layer in layers:
            expected = self._facts.widths.get((site, layer), width)
            if width != expected:
                given = f"{source.name!r}, of width {width}" if isinstance(source, Named) else f"of width {width}"
                raise fields.refuse(field, given, f"{expected}, the width of {site} at layer {layer}")

    def _check_run(self, patch: Patch, run: RecordedRun) -> None:
        if self._runs is not None and run.id not in self._runs.values():
            if run.name in self._runs:
                raise PlanError(
                    f"Patch.source: the recorded run {run.name!r} is not there any more, but another of that name, recorded later: "
                    "take the handle that `record` gave for that."
                )
            hint = fields.nearest(run.name, self._runs)
            raise PlanError(f"Patch.source: the engine has no recorded run {run.name!r} any more; {hint}")
        site = patch.source_site or patch.site
        layer = patch.layer if patch.source_layer is None else patch.source_layer
        run.check_point("Patch.source", site, layer)
        width, expected = (self._facts.widths.get(point) for point in ((site, layer), (patch.site, patch.layer)))
        if width is not None and expected is not None and width != expected:
            given = f"a run's {site} at layer {layer}, of width {width}"
            raise fields.refuse("Patch.source", given, f"{expected}, the width of {patch.site} at layer {patch.layer}")
        self._check_run_positions(patch, run)

    def _check_run_positions(self, patch: Patch, run: RecordedRun) -> None:
        written = patch.source_position or patch.position
        if isinstance(written, Span):
            return
        field = "Patch.source_position" if patch.source_position else "Patch.position (and so Patch.source_position)"
        length = len(run.prompt_token_ids)
        recorded = set(run.positions)
        for position in resolved_list(field, written, length, f"the run {run.name!r}"):
            if position not in recorded:
                given = f"{position}, which the run {run.name!r} did not record"
                raise fields.refuse(field, given, _listed(run.positions))


def _listed(numbers: Iterable[int]) -> str:
    """As ranges: "0 to 3, 7"."""
    ordered = sorted(set(numbers))
    starts = [n for i, n in enumerate(ordered) if i == 0 or ordered[i - 1] != n - 1]
    stops = [n for i, n in enumerate(ordered) if i == len(ordered) - 1 or ordered[i + 1] != n + 1]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, stops, strict=True)]
    return ", ".join(ranges[:20]) + (", ..." if len(ranges) > 20 else "") if ranges else "none"
