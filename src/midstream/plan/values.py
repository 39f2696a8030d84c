"""Plans: what to do to a request, as data.

    plan = [
        Steer("resid_post", layers=[14], vector=v, scale=4.0, phase="decode"),
        Capture("resid_post", layers="all", positions="last_prompt"),
    ]
    model.generate(prompts, plan=plan)

Interventions are immutable. They are checked when they are made (PlanError), and again once model and prompt are known (`checks`). At one
site the order is: capture before, patches, steers, clamps, capture after. `ops` has one file for each kind of edit.

A vector is a tensor on any device, a numpy array or a list, of shape `[hidden]`, which is copied; or the name of a vector that the
engine holds.

Plans that do the same to the same rows, bit for bit, have the same normal form and hash. In the normal form each edit has one layer, and
one position or none. Edits that change nothing are left out. Edits whose order does not matter are sorted, so that their float32 sum is
always taken in the same order; the others keep their order at each site.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from midstream.plan import fields, wire
from midstream.plan.captures import Capture, Consumer, Sink
from midstream.plan.fields import Span, span_positions
from midstream.plan.ops import Clamp, Edit, Patch, Steer
from midstream.plan.ops.edit import Intervention, changed, field_names
from midstream.plan.vectors import Named, RecordedRun, Vector, Zeros, digest
from midstream.sites import LAYER_SITES

__all__ = [
    "Capture",
    "Clamp",
    "Consumer",
    "Edit",
    "Intervention",
    "Named",
    "Patch",
    "Plan",
    "RecordedRun",
    "Sink",
    "Span",
    "Steer",
    "Vector",
    "Zeros",
    "has_spans",
    "resolve_spans",
    "with_digests",
]

SITE_ORDER = {site: i for i, site in enumerate(LAYER_SITES)}


@dataclass(frozen=True)
class Plan:
    """Interventions, in their order. In `a + b`, those of `a` come first."""

    interventions: tuple[Intervention, ...] = ()

    def __post_init__(self) -> None:
        fields.settle(self, interventions=tuple(self.interventions))
        for i, item in enumerate(self.interventions):
            if not isinstance(item, (Edit, Capture)):
                raise fields.refuse(f"plan[{i}]", fields.shown(item), "Steer, Patch, Clamp or Capture")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # plans are often keys, and have many fields
        return hash(self.interventions)

    def __reduce__(self) -> Any:
        return Plan, (self.interventions,)  # without the hash, since strings hash differently in each process

    @classmethod
    def of(cls, given: Any) -> Plan:
        """A plan from a Plan, an intervention, an iterable of these, None for nothing, or a wire form (dict or JSON).

        Raises PlanError for anything else.
        """
        match given:
            case Plan():
                return given
            case None:
                return cls()
            case Edit() | Capture():
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
        cls, given: Any, *, trusted: bool = True, named_runs: Mapping[str, RecordedRun] | None = None
    ) -> Plan:
        """The plan that `to_wire` wrote: see `wire.from_wire`. Raises PlanError for anything else."""
        return cls(wire.from_wire(given, trusted=trusted, named_runs=named_runs))

    @classmethod
    def from_json(cls, text: str, *, trusted: bool = True) -> Plan:
        """The plan that `to_json` or a person wrote. Raises PlanError for anything else."""
        return cls(wire.from_json(text, trusted=trusted))

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Edit))

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Capture))

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The recorded runs that its edits read, each once."""
        sources = [value for edit in self.edits for _, value in edit.values()]
        return tuple({source.id: source for source in sources if isinstance(source, RecordedRun)}.values())

    def normal(self, num_layers: int | None = None, prompt_length: int | None = None) -> Plan:
        """The normal form: edits in the order in which they act at a site, then captures.

        Args:
            num_layers: the model's, which `layers="all"` stands for; None leaves "all" as it is.
            prompt_length: in tokens, for positions that count from the end; None leaves them as they are.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
        """
        return Plan(
            (*_normal_edits(self.edits, num_layers, prompt_length), *self._normal_captures(num_layers, prompt_length))
        )

    def _normal_captures(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Capture]:
        found: dict[Any, Capture] = {}
        for capture in self.captures:
            capture = capture.placed(prompt_length)
            key = encoded(changed(capture, layers=()))
            found |= {(_point(one), key): one for one in capture.per_layer(num_layers)}
        return (found[key] for key in sorted(found))

    @cached_property
    def hash(self) -> str:
        """Of the normal form; 32 hexadecimal digits. In `plan.normal(num_layers).hash`, "all" equals the layers listed."""
        return digest("\n".join(map(encoded, self.normal().interventions)).encode())

    def __add__(self, other: Any) -> Plan:
        return Plan(self.interventions + Plan.of(other).interventions)

    def __radd__(self, other: Any) -> Plan:
        return Plan.of(other) + self

    def __bool__(self) -> bool:
        return bool(self.interventions)


# ------------------------------------------------------------------------------------------------------------ the normal form


def _normal_edits(edits: Sequence[Edit], num_layers: int | None, prompt_length: int | None) -> Iterator[Edit]:
    in_order = sorted((edit for edit in edits if not edit.changes_nothing()), key=lambda edit: (edit.order, edit.kind))
    for _, of_kind in groupby(in_order, key=lambda edit: edit.kind):
        each = [one for edit in of_kind for one in edit.spread(num_layers, prompt_length)]
        yield from sorted(each, key=_order_of(each)) if each else ()


def _order_of(edits: Sequence[Edit]) -> Callable[[Edit], Any]:
    """The sort key for edits of one kind. Edits that may trade places are sorted; the others keep their order."""
    if edits[0].adds:
        return lambda edit: (_point(edit), encoded(edit))
    if any(edit.at_layers == "all" for edit in edits):  # "all" may include the other edits' layers
        return lambda edit: SITE_ORDER[edit.site]
    places = [edit.place for edit in edits]
    if all(isinstance(place, tuple) for place in places) and len({place[0] < 0 for place in places}) == 1:
        return lambda edit: (_point(edit), edit.place)  # different places are different positions
    return _point


def _point(item: Intervention) -> tuple[int, int]:
    layers = item.at_layers
    return SITE_ORDER[item.site], -1 if layers == "all" else layers[0]


def encoded(item: Intervention) -> str:
    """All fields of an intervention as text, for comparing and hashing."""
    values = [_encoded(name, getattr(item, name)) for name in field_names(type(item))]  # type: ignore[arg-type]
    return json.dumps([item.kind, *values], sort_keys=True)


def _encoded(field: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):  # the quick case: a plan may have thousands of fields
        return value
    match value:
        case Vector():
            return ["vector", value.digest]
        case Named():  # equals the vector, once its digest is known
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


# ------------------------------------------------------------------------------------------------------------ spans and names


def has_spans(plan: Plan) -> bool:
    """Whether `resolve_spans` has something to do."""
    return any(isinstance(item.place, Span) for item in plan.interventions)


def resolve_spans(plan: Plan, text: str, offsets: Sequence[tuple[int, int]]) -> Plan:
    """The plan with positions instead of spans.

    Args:
        text: the prompt.
        offsets: for each token the characters `[begin, end)` that it stands for, as tokenizers give them with
            `return_offsets_mapping`; begin = end for tokens without text, such as the one that begins the sequence.

    Raises:
        PlanError: the text does not stand there so often, or no token overlaps it.
    """
    return Plan(tuple(_resolved(item, text, offsets) for item in plan.interventions))


def _resolved(item: Intervention, text: str, offsets: Sequence[tuple[int, int]]) -> Intervention:
    span, field = item.place, item.position_field
    if not isinstance(span, Span):
        return item
    found: dict[str, Any] = {field: span_positions(span, text, offsets, item.label(field))}
    return dataclasses.replace(item, **found)  # type: ignore[type-var]


def with_digests(plan: Plan, digests: Mapping[str, str]) -> Plan:
    """The plan with each named vector's digest from `digests`, and None for names that are not there.

    Digests key the prefix cache, so the owner of the vectors sets them, whatever the request claims.
    """
    return Plan(tuple(_with_digests(item, digests) for item in plan.interventions))


def _with_digests(item: Intervention, digests: Mapping[str, str]) -> Intervention:
    named = {field: value.name for field, value in vars(item).items() if isinstance(value, Named)}
    found: dict[str, Any] = {field: Named(name, digests.get(name)) for field, name in named.items()}
    return dataclasses.replace(item, **found) if found else item  # type: ignore[type-var]
