"""Whether a model can do what a plan says, to a given prompt: all that shows only once these are known.

Whoever admits a request checks it, with what it knows; the workers know all of it. The first thing wrong raises a PlanError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from midstream.errors import NOT_FINITE, PlanError
from midstream.plan import fields
from midstream.plan.captures import Capture, Intervention
from midstream.plan.fields import check_resolved, resolved_list
from midstream.plan.ops.edit import Edit
from midstream.plan.values import Plan
from midstream.plan.vectors import Named, RecordedRun, Vector
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
        if edit.place is None:
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
    layers = edit.at_layers
    if layers == "all":
        return f"{edit.site} of all layers"
    return f"{edit.site} of layer{'s' if len(layers) > 1 else ''} {fields.ranges(layers)}"


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
    positions = len(item.place) if isinstance(item.place, tuple) else 1
    layers = num_layers if item.at_layers == "all" else len(item.at_layers)
    return layers * positions


def _check_text(item: Intervention) -> None:
    if item.place is not None and not isinstance(item.place, str):
        given = f"{fields.shown(item.place)} in a multimodal prompt, whose positions are not those of its text"
        raise fields.refuse(_position_field(item), given, "such positions in prompts of text only")


def _position_field(item: Intervention) -> str:
    return f"{type(item).__name__}.{item.position_field}"


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
        self._check_place(_position_field(item), item.place)
        name = type(item).__name__
        listed = range(self._facts.num_layers) if item.at_layers == "all" else item.at_layers
        self._check_layers(f"{name}.{item.layer_field}", item.site, listed)
        if isinstance(item, Edit):
            for field, value in item.values():
                self._check_operand(item, f"{name}.{field}", value, listed)

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
                f"The model has no site {site!r} at layer {layer} ({field}); it has it at {fields.ranges(have)}."
            )
        sites = [other for other in LAYER_SITES if any(other == site for site, _ in widths)]
        return PlanError(f"The model has no site {site!r} ({field.split('.')[0]}.site); it has {', '.join(sites)}.")

    def _check_place(self, field: str, place: object) -> None:
        if self._length is None or place is None or isinstance(place, str):
            return
        check_resolved(field, place, self._length)
        assert isinstance(place, tuple)
        positions = resolved_list(field, place, self._length)
        if len(set(positions)) < len(positions):
            raise fields.refuse(
                field, f"{fields.shown(place)}, which has one twice in a prompt of {self._length} tokens", "each once"
            )

    def _check_operand(self, edit: Edit, field: str, value: object, layers: Iterable[int]) -> None:
        if isinstance(value, RecordedRun):
            self._check_is_there(field, value)
            edit.check_run(field, value, self._facts.widths)
        if isinstance(value, Named):
            if self._vectors is None:
                return
            if value.name not in self._vectors:
                hint = fields.nearest(value.name, self._vectors)
                if self._runs and value.name in self._runs and field.split(".")[1] in edit.run_operands:
                    hint = f"a recorded run is given itself: source=model.runs[{value.name!r}], or what model.record returned"
                raise PlanError(f"{field}: the engine has no vector {value.name!r}; {hint}")
            width = self._vectors[value.name]
        elif isinstance(value, Vector):
            width = value.width
        else:
            return
        for layer in layers:
            expected = self._facts.widths.get((edit.site, layer), width)
            if width != expected:
                given = f"{value.name!r}, of width {width}" if isinstance(value, Named) else f"of width {width}"
                raise fields.refuse(field, given, f"{expected}, the width of {edit.site} at layer {layer}")

    def _check_is_there(self, field: str, run: RecordedRun) -> None:
        if self._runs is None or run.id in self._runs.values():
            return
        if run.name in self._runs:
            raise PlanError(
                f"{field}: the recorded run {run.name!r} is not there any more, but another of that name, recorded later: "
                "take the handle that `record` gave for that."
            )
        hint = fields.nearest(run.name, self._runs)
        raise PlanError(f"{field}: the engine has no recorded run {run.name!r} any more; {hint}")
