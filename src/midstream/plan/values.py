"""Plans: edits and captures of a request, as data.

    plan = [
        Steer("resid_post", layers=[14], vector=v, scale=4.0, phase="decode"),
        Probe("resid_post", layer=20, weight=w, name="anger", stop_above=2.5),
        Capture("resid_post", layers="all", positions="last_prompt"),
    ]
    model.generate(prompts, plan=plan)

Interventions are immutable. They are checked when they are made (PlanError), and again once model and prompt are known (`check`). The order
at a site is: captures and probes before, patches, steers, clamps, programs, gated edits, final edits (in the same order), captures and
probes after. `ops` has one file for each kind of edit.

A vector is a tensor on any device, a numpy array or a list, of shape `[hidden]`, which is copied; or the name of a vector that the engine
holds.

Plans with the same effect on the same rows, bit for bit, have the same normal form and hash. In the normal form each edit has one layer,
and one position or none. Edits that change nothing are omitted. Edits whose order does not matter are sorted, so that their float32 sum is
always taken in the same order; the others keep their order at each site.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any

import msgspec
import numpy as np

from midstream.errors import NOT_FINITE, PlanError
from midstream.plan import fields, wire
from midstream.plan.captures import Capture, Consumer, Reading, Sink
from midstream.plan.fields import Span, span_positions
from midstream.plan.ops import Apply, Clamp, Edit, Knockout, Patch, Steer, When
from midstream.plan.ops.edit import Intervention, changed, field_names
from midstream.plan.ops.final import Final, check_final, checked_final, made_final
from midstream.plan.probes import Probe, check_names
from midstream.plan.program import Program
from midstream.plan.selections import Selector
from midstream.plan.vectors import Named, RecordedRun, Vector, Zeros, digest, head_widths
from midstream.sites import LAYER_SITES, NotFinite, Point, comes_before

__all__ = [
    "Apply",
    "Capture",
    "Clamp",
    "Consumer",
    "Edit",
    "Intervention",
    "Knockout",
    "ModelFacts",
    "Named",
    "Patch",
    "Plan",
    "Probe",
    "Program",
    "RecordedRun",
    "Sink",
    "Span",
    "Steer",
    "Vector",
    "When",
    "Zeros",
    "check",
    "count_of",
    "counted_from_0",
    "has_spans",
    "not_finite",
    "resolve_spans",
    "with_digests",
]

SITE_ORDER = {site: i for i, site in enumerate(LAYER_SITES)}
MAX_EDITS = 1 << 14
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_PLAIN = frozenset({type(None), bool, int, float, str})
MAX_PLACED_EDITS = 1 << 16


@dataclass(frozen=True)
class Plan:
    """Interventions in order. In `a + b`, the interventions of `a` come first. A `When` with several edits becomes several `When`s with one
    edit each.

    Args:
        interventions: edits, captures and probes.
        final: makes its edits final. If this plan is added to another one, its final edits act after all other edits at their sites. With
            "later", the other plan may have no edits that could undo them; with "all", it may have no edits. It is meant for engine-wide
            plans.

    Raises PlanError for anything else, for more than 64 probes, and for two probes of one name.
    """

    interventions: tuple[Intervention, ...] = ()
    final: InitVar[Final | None] = None

    def __post_init__(self, final: Final | None) -> None:
        fields.settle(self, interventions=tuple(self.interventions))
        for i, item in enumerate(self.interventions):
            if not isinstance(item, (Edit, Reading)):
                raise fields.refuse(
                    f"plan[{i}]", fields.shown(item), "Steer, Patch, Clamp, Apply, When, Knockout, Probe or Capture"
                )
        if any(len(item.parts) > 2 for item in self.interventions):
            fields.settle(self, interventions=tuple(one for item in self.interventions for one in item.alone))
        if final is not None:
            final = checked_final("Plan.final", final)
            items = (made_final(item, final) if isinstance(item, Edit) else item for item in self.interventions)
            fields.settle(self, interventions=tuple(items))
        if self.probes:
            check_names(self.probes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # plans are often keys, and have many fields
        return hash(self.interventions)

    def __reduce__(self) -> Any:
        return Plan, (self.interventions,)  # without the hash, since strings hash differently in each process

    @classmethod
    def of(cls, given: Any) -> Plan:
        """A plan from a Plan, an intervention, an iterable of these, None for an empty plan, or a wire form (dict or JSON).

        Raises PlanError for anything else.
        """
        match given:
            case Plan():
                return given
            case None:
                return cls()
            case Edit() | Reading():
                return cls((given,))
            case str():
                return cls.from_json(given)
            case Mapping():
                return cls.from_wire(given)
        try:
            items = iter(given)
        except TypeError as error:
            allowed = "a Plan, interventions, a wire form, JSON, or None"
            raise fields.refuse("the plan", fields.shown(given), allowed) from error
        return cls(tuple(one for item in items for one in (item.interventions if isinstance(item, Plan) else (item,))))

    def to_wire(self) -> dict[str, Any]:
        """The plan as data for msgpack: see `wire.to_wire`. Raises PlanError for a `Capture.to` that is a callable."""
        return wire.to_wire(self.interventions)

    def to_json(self) -> str:
        """The same as JSON, with vectors in base64."""
        return wire.to_json(self.interventions)

    @classmethod
    def from_wire(
        cls,
        given: Any,
        *,
        trusted: bool = True,
        named_runs: Mapping[str, RecordedRun] | None = None,
        saes: Mapping[str, Any] | None = None,
        may_be_final: bool | None = None,
    ) -> Plan:
        """The plan that `to_wire` wrote: see `wire.from_wire`. Raises PlanError for anything else. Trusted plans may be final."""
        may_be_final = trusted if may_be_final is None else may_be_final
        found = wire.from_wire(given, trusted=trusted, named_runs=named_runs, saes=saes, may_be_final=may_be_final)
        return cls(found)

    @classmethod
    def from_packed(cls, given: Mapping[str, Any]) -> Plan:
        """The plan that `to_wire` wrote in another process of midstream: see `wire.from_packed`."""
        return cls(wire.from_packed(given))

    @classmethod
    def from_json(cls, text: str, *, trusted: bool = True) -> Plan:
        """The plan in JSON from `to_json` or written by hand. Raises PlanError for anything else."""
        return cls(wire.from_json(text, trusted=trusted))

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Edit))

    @cached_property
    def has_final(self) -> bool:
        """Whether it has final edits."""
        return any(edit.final is not None for edit in self.edits)

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Capture))

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Probe))

    @cached_property
    def readings(self) -> tuple[Reading, ...]:
        """Its captures and probes."""
        return self.captures + self.probes

    @cached_property
    def stops_in_prompt(self) -> bool:
        """Whether a probe may end a request at a token of its prompt."""
        return any(probe.stops and probe.positions != "all_generated" for probe in self.probes)

    @cached_property
    def has_functions(self) -> bool:
        """Whether an `Apply` has a function that a model has yet to record as a program."""
        each = (part for item in self.interventions for part in (item, *item.parts))
        return any(isinstance(part, Apply) and part.is_function for part in each)

    def values(self) -> Iterator[Vector | Named | RecordedRun | Zeros]:
        """The operands of all its interventions."""
        return (value for item in self.interventions for part in (item, *item.parts) for _, value in part.values())

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The recorded runs that its edits read, each once."""
        return tuple({value.id: value for value in self.values() if isinstance(value, RecordedRun)}.values())

    def normal(self, num_layers: int | None = None, prompt_length: int | None = None) -> Plan:
        """The normal form: edits in the order in which they act at a site, then captures, then probes by their names.

        Args:
            num_layers: the model's number of layers, for which `layers="all"` stands; None keeps "all".
            prompt_length: in tokens, for positions that count from the end; None keeps them.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
        """
        key, known = (num_layers, prompt_length), self.__dict__.get("_normal")
        if known is None or known[0] != key:  # kept: KV keys and tables need the same one
            known = self.__dict__["_normal"] = key, self._made_normal(*key)
        return known[1]  # type: ignore[no-any-return]

    def _made_normal(self, num_layers: int | None, prompt_length: int | None) -> Plan:
        if num_layers and any(item.at_layers[0] < 0 for item in self.interventions if item.at_layers != "all"):
            return counted_from_0(self, num_layers).normal(num_layers, prompt_length)
        probes = [probe.placed(prompt_length) for probe in sorted(self.probes, key=lambda probe: probe.name)]
        for probe in probes:
            probe.layers_in(num_layers or 0)
        edits = _normal_edits(self.edits, num_layers, prompt_length)
        return Plan((*edits, *self._normal_captures(num_layers, prompt_length), *probes))

    def _normal_captures(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Capture]:
        found: dict[Any, Capture] = {}
        for capture in self.captures:
            capture = capture.placed(prompt_length)
            key = encoded(changed(capture, layers=()))
            found |= {(_point(one), key): one for one in capture.per_layer(num_layers)}
        return (found[key] for key in sorted(found))

    @cached_property
    def hash(self) -> str:
        """The hash of the normal form, 32 hexadecimal digits. In `plan.normal(num_layers).hash`, "all" equals the layers listed."""
        return digest("\n".join(map(encoded, self.normal().interventions)).encode())

    @cached_property
    def held(self) -> tuple[Plan, dict[str, bytes]]:
        """The plan for an engine that holds large constants of its programs, and these constants' data: see `Program.held`."""
        items, data = list[Intervention](), dict[str, bytes]()
        for item in self.interventions:
            items.append(_held(item, data))
        return (Plan(tuple(items)), data) if data else (self, {})

    def __add__(self, other: Any) -> Plan:
        return Plan(self.interventions + Plan.of(other).interventions)

    def __radd__(self, other: Any) -> Plan:
        return Plan.of(other) + self

    def __bool__(self) -> bool:
        return bool(self.interventions)


# As an InitVar with a default, `final` would always read as None. With several kinds of final edits, "all" counts.
Plan.final = property(lambda plan: min((edit.final for edit in plan.edits if edit.final), default=None))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------ the normal form


def _normal_edits(edits: Sequence[Edit], num_layers: int | None, prompt_length: int | None) -> Iterator[Edit]:
    in_order = sorted((edit for edit in edits if not edit.changes_nothing()), key=lambda edit: (edit.order, edit.kind))
    for _, of_kind in groupby(in_order, key=lambda edit: (edit.order, edit.kind)):
        each = [one for edit in of_kind for one in edit.spread(num_layers, prompt_length)]
        yield from sorted(each, key=_order_of(each)) if each else ()


def _order_of(edits: Sequence[Edit]) -> Callable[[Edit], Any]:
    """The sort key for edits of one kind. It sorts edits that commute; the others keep their order."""
    if edits[0].adds or edits[0].at_attention:
        return lambda edit: (_point(edit), encoded(edit))
    if any(edit.at_layers == "all" for edit in edits):  # "all" may include the other edits' layers
        return lambda edit: SITE_ORDER[edit.site]
    places = [edit.place for edit in edits]
    if all(isinstance(place, tuple) for place in places) and len({place[0] < 0 for place in places}) == 1:
        return lambda edit: (_point(edit), edit.is_of_generated, edit.place)  # different places are different positions
    return _point


def _held(item: Intervention, data: dict[str, bytes]) -> Intervention:
    """The intervention without its large constants, which are added to `data`."""
    if item.parts:
        return item.with_parts(lambda part: _held(part, data))
    if item.its_program is None or item.function is None:
        return item
    program, mine = item.its_program.held
    data |= mine
    return changed(item, **{item.function: program}) if mine else item


def _point(item: Intervention) -> tuple[int, int]:
    layers = item.at_layers
    return SITE_ORDER[item.site], -1 if layers == "all" else layers[0]


def encoded(item: Intervention) -> str:
    """All fields of an intervention as text, for comparing and hashing."""
    values = [item.kind]
    for name in field_names(type(item)):  # type: ignore[arg-type]
        value = getattr(item, name)
        values.append(value if type(value) in _PLAIN else _encoded(name, value))
    if item.final is not None:
        values.append(item.final)
    return _ENCODER.encode(values).decode("latin-1")


def _encoded(field: str, value: Any) -> Any:
    match value:
        case bool() | int() | float() | str() | None:
            return value
        case Vector():
            return ["vector", value.digest]
        case Named():  # equals the vector, once its digest is known
            return ["vector", value.digest] if value.digest is not None else ["named", value.name]
        case RecordedRun():
            return ["run", value.id]
        case Zeros():
            return ["zeros"]
        case Program():
            return ["program", value.digest]
        case Intervention():
            return encoded(value)
        case (Intervention(), *_):
            return list(map(encoded, value))
        case Span():
            return [value.text, value.occurrence]
        case Selector():
            return ["selector", value.kind, value.options]
        case Consumer():
            return ["consumer", value.name, value.options]
        case tuple() if field == "to":
            return [_encoded(field, sink) for sink in value]
        case (Vector() | Named(), *_):
            return ["vectors", *(_encoded(field, vector) for vector in value)]
        case (int(), *_) if len(value) > 16:
            return [len(value), digest(np.array(value, "<i8").tobytes())]
        case tuple():
            return value
    if callable(value):
        return ["callable", id(value)]
    raise TypeError(f"{field} holds {value!r}, which no normal form can have.")


# ------------------------------------------------------------------------------------------------------------ spans and names


def has_spans(plan: Plan) -> bool:
    """Whether the plan has spans to resolve."""
    return any(isinstance(place, Span) for item in plan.interventions for place in item.places.values())


def resolve_spans(plan: Plan, text: str, offsets: Sequence[tuple[int, int]]) -> Plan:
    """The plan with positions instead of spans.

    Args:
        text: the prompt.
        offsets: for each token its characters `[begin, end)`, as tokenizers return them with `return_offsets_mapping`; begin = end for
            tokens without text, such as the one that begins the sequence.

    Raises:
        PlanError: the prompt has fewer occurrences of the text, or no token overlaps it; or a `Patch` has another number of source
            positions than the text has tokens.
    """
    return Plan(tuple(_resolved(item, text, offsets) for item in plan.interventions))


def _resolved(item: Intervention, text: str, offsets: Sequence[tuple[int, int]]) -> Intervention:
    spans = {field: place for field, place in item.places.items() if isinstance(place, Span)}
    if not spans:
        return item
    if item.parts:
        return item.with_parts(lambda part: _resolved(part, text, offsets))
    return item.with_places(
        **{field: span_positions(span, text, offsets, item.label(field)) for field, span in spans.items()}
    )


def counted_from_0(plan: Plan, num_layers: int) -> Plan:
    """The plan with all layers counted from 0 instead of from the model's end. Raises PlanError for a layer that occurs twice."""
    items = tuple(item.counted_from_0(num_layers) for item in plan.interventions)
    return Plan(items) if any(a is not b for a, b in zip(items, plan.interventions, strict=True)) else plan


def with_digests(plan: Plan, digests: Mapping[str, str]) -> Plan:
    """The plan with each named vector's digest from `digests`, and None for names that are missing there.

    Digests key the prefix cache, so the owner of the vectors sets them, and overrides digests in the request.
    """
    return Plan(tuple(item.named(lambda each: Named(each.name, digests.get(each.name))) for item in plan.interventions))


# ------------------------------------------------------------------------------------------------------------ checks


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that checks use. Unknown facts are empty, and are not checked.

    Attributes:
        num_layers: of all pipeline stages together; 0 if unknown.
        widths: (site, layer) -> the site's width, for every site that the model has.
        dtype: of the activations, as in "bfloat16".
        stages: the first layer of each pipeline stage.
        head_dims: (site, layer) -> the width of a head, for every site that has heads.
        unsupported_attention: layer -> why midstream cannot compute its attention again, for layers where it cannot.
    """

    num_layers: int = 0
    widths: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    dtype: str = ""
    stages: Sequence[int] = ()
    head_dims: Mapping[Point, int] = dataclasses.field(default_factory=dict)
    unsupported_attention: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def are_together(self, one: Point, other: Point) -> bool:
        """Whether one pipeline stage owns both points."""
        return bisect_right(self.stages, one[1]) == bisect_right(self.stages, other[1])


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
        max_tokens: the most tokens that the request may generate.
        vectors: name -> width of the engine's named vectors.
        runs: name -> id of the engine's recorded runs.
        multimodal: whether the prompt has parts other than text, which shift positions.

    An argument that is None is unknown, and is not checked.
    """
    _check_size(plan, facts.num_layers)
    if plan.has_final:
        check_final(plan.edits, facts.num_layers)
    for item in chain.from_iterable((*item.parts, item) for item in plan.interventions):
        _check_positions(item, prompt_length, multimodal)
        if isinstance(item, Reading) and item.positions == "all_generated" and max_tokens == 0:
            allowed = "positions of the prompt, or more max_tokens"
            raise fields.refuse(item.label("positions"), "'all_generated' with max_tokens=0", allowed)
        layers = item.layers_in(facts.num_layers)
        _check_site(item, layers, facts.widths)
        _check_heads(item, layers, facts)
        _check_attention(item, layers, facts)
        for name, value in item.values():
            if isinstance(value, RecordedRun) and isinstance(item, Edit):
                _check_run_exists(item.label(name), value, runs)
                item.check_run(item.label(name), value, facts.widths)
            elif isinstance(value, Vector):
                _check_width(item, name, f"of width {value.width}", value.width, layers, facts)
            elif isinstance(value, Named) and vectors is not None:
                _check_name_exists(item, name, value.name, vectors, runs or {})
                width = vectors[value.name]
                _check_width(item, name, f"{value.name!r}, of width {width}", width, layers, facts)
        if (program := item.its_program) is not None:
            _check_width(item, item.function or "", f"of width {program.width}", program.width, layers, facts)
            if isinstance(item, Capture) and facts.dtype and program.dtype != facts.dtype:
                raise fields.refuse(
                    "Capture.program", f"for {program.dtype}", f"one for {facts.dtype}, the model's dtype"
                )
        _check_further(item, layers, facts)


def not_finite(broken: NotFinite, plan: Plan, dtype: str) -> str:
    """The message of a `NotFiniteError` for a request whose activations became infinite or NaN through its plan or its trace."""
    if broken.point is not None:
        cause = "the request's edit there makes them so"
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
    everywhere = sum(count_of(edit, num_layers) for edit in plan.edits if edit.place is None)
    placed = sum(count_of(edit, num_layers) for edit in plan.edits if edit.place is not None)
    if everywhere > MAX_EDITS:  # each acts at every row
        allowed = f"up to {MAX_EDITS} of them, counted once for each layer"
        raise fields.refuse("the plan", f"{everywhere} steers and clamps", allowed)
    if placed > MAX_PLACED_EDITS:
        allowed = f"up to {MAX_PLACED_EDITS} of them, counted once for each layer and position"
        raise fields.refuse("the plan", f"{placed} edits at positions", allowed)


def count_of(item: Intervention, num_layers: int) -> int:
    """How many edits or captures an intervention is, counted once for each layer and listed position."""
    positions = len(item.place) if isinstance(item.place, tuple) else 1
    return item.copies * positions * (num_layers if item.at_layers == "all" else len(item.at_layers))


def _check_positions(item: Intervention, prompt_length: int | None, multimodal: bool) -> None:
    for name, place in item.places.items():
        if (
            place is None
            or isinstance(place, (str, Selector))
            or (name == item.position_field and item.is_of_generated)
        ):
            continue
        field = item.label(name)
        if multimodal:
            given = f"{fields.shown(place)} in a multimodal prompt, whose positions are not those of its text"
            raise fields.refuse(field, given, "such positions in prompts of text only")
        if prompt_length is not None and len(set(fields.resolved(field, place, prompt_length))) < len(place):
            given = f"{fields.shown(place)}, which has one twice in a prompt of {prompt_length} tokens"
            raise fields.refuse(field, given, "each once")


def _check_site(item: Intervention, layers: Iterable[int], widths: Mapping[tuple[str, int], int]) -> None:
    for layer in layers if widths else ():
        if (item.site, layer) in widths:
            continue
        if have := [at for site, at in widths if site == item.site]:
            given = f"site {item.site!r} at layer {layer} ({item.label(item.layer_field)})"
            text = f"The model has no {given}; it has it at {fields.ranges(have)}."
            raise PlanError(text, field=item.label(item.layer_field))
        there = {site for site, _ in widths}
        sites = ", ".join(site for site in LAYER_SITES if site in there)
        text = f"The model has no site {item.site!r} ({item.label('site')}); it has {sites}."
        raise PlanError(text, field=item.label("site"))


def _check_heads(item: Intervention, layers: Iterable[int], facts: ModelFacts) -> None:
    if item.head is None or not facts.widths:
        return
    highest = max(item.head) if isinstance(item.head, tuple) else item.head
    for layer in layers:
        head_dim = facts.head_dims.get((item.site, layer))
        if head_dim is None:
            raise fields.refuse(item.label("head"), fields.shown(item.head), f"None at {item.site} in this model")
        count = facts.widths[item.site, layer] // head_dim
        if highest >= count:
            allowed = f"0 to {count - 1}, the heads of {item.site} at layer {layer}"
            raise fields.refuse(item.label("head"), str(highest), allowed)


def _check_attention(item: Intervention, layers: Iterable[int], facts: ModelFacts) -> None:
    for layer in layers if item.at_attention and facts.widths else ():
        missing = [site for site in ("attn_q", "attn_k", "attn_v") if (site, layer) not in facts.widths]
        reason = f"the model has no site {missing[0]} there" if missing else facts.unsupported_attention.get(layer)
        if reason is not None:
            field, name = item.label(item.layer_field), type(item).__name__
            raise PlanError(f"{name} cannot act at layer {layer} ({field}): {reason}.", field=field)


def _check_width(
    item: Intervention, field: str, given: str, width: int, layers: Iterable[int], facts: ModelFacts
) -> None:
    for layer in layers:
        expected = facts.widths.get((item.site, layer), width)
        head_dim = facts.head_dims.get((item.site, layer)) if item.head is not None else None
        if width not in (expected, head_dim):
            allowed = f"{expected}, the width of {item.site} at layer {layer}"
            if head_dim is not None:
                allowed = f"{head_widths(head_dim, expected)}, of {item.site} at layer {layer}"
            raise fields.refuse(item.label(field), given, allowed)


def _check_further(item: Intervention, layers: Iterable[int], facts: ModelFacts) -> None:
    """Raise PlanError for further inputs that the model lacks, or that it does not compute early enough or on the same stage."""
    widths = item.its_program.inputs if item.its_program is not None else ()
    for i, point in enumerate(item.further):
        place, given = item.label("probe" if item.parts else f"inputs[{i}]"), fields.shown(point)
        width = widths[i] if i < len(widths) else None
        if facts.widths and width is not None and facts.widths.get(point) != width:
            have = facts.widths.get(point)
            allowed = (
                f"one of width {width}, as the program has it; it has {'no such site' if have is None else have} there"
            )
            raise fields.refuse(place, given, allowed)
        for layer in layers:
            own = item.site, layer
            if point != own and not comes_before(point, own):
                raise fields.refuse(
                    place, given, f"{own[0]} of layer {own[1]} itself, or a value that every model computes before it"
                )
            if not facts.are_together(point, own):
                raise fields.refuse(place, given, f"a value on the pipeline stage of layer {layer}")


def _check_name_exists(
    edit: Intervention, field: str, name: str, vectors: Mapping[str, int], runs: Mapping[str, str]
) -> None:
    if name in vectors:
        return
    hint = fields.nearest(name, vectors)
    if name in runs and field in edit.run_operands:
        hint = f"pass the recorded run itself: source=model.runs[{name!r}], or the handle from model.record"
    raise PlanError(f"{edit.label(field)}: the engine has no vector {name!r}; {hint}", field=edit.label(field))


def _check_run_exists(field: str, run: RecordedRun, runs: Mapping[str, str] | None) -> None:
    if runs is None or run.id in runs.values():
        return
    if run.name in runs:
        raise PlanError(
            f"{field}: the recorded run {run.name!r} is not there any more, but another of that name, recorded later: "
            "take the handle that `record` gave for that.",
            field=field,
        )
    there = fields.nearest(run.name, runs)
    raise PlanError(f"{field}: the engine has no recorded run {run.name!r} any more; {there}", field=field)
