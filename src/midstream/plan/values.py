"""Plans: `Steer`, `Patch`, `Clamp` and `Capture` as data, and the `Plan` that holds them.

    plan = [
        Steer("resid_post", layers=[14], vector=v, scale=4.0, phase="decode"),
        Capture("resid_post", layers="all", positions="last_prompt"),
    ]
    model.generate(prompts, plan=plan)

All are immutable and checked when they are made (PlanError), and once more when model and prompt are known (`checks`). At one site the
order is: capture before, patches, steers, clamps, capture after. `ops` has a file for each kind of edit, with what it computes.

A vector is a tensor on any device, a numpy array or a list, of shape `[hidden]`, which is copied; or the name of a vector that the
engine holds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from midstream.plan import fields, wire
from midstream.plan.captures import Capture, Consumer, Intervention, Sink
from midstream.plan.fields import Span, check_resolved, resolved_list, span_positions
from midstream.plan.ops import Clamp, Edit, Patch, Steer
from midstream.plan.ops.edit import changed, fields_of, per_layer
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


@dataclass(frozen=True)
class Plan:
    """What is to be done to a request: interventions, in their order. `a + b` does a's first."""

    interventions: tuple[Intervention, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "interventions", tuple(self.interventions))
        for i, item in enumerate(self.interventions):
            if not isinstance(item, (Edit, Capture)):
                raise fields.refuse(f"plan[{i}]", fields.shown(item), "Steer, Patch, Clamp or Capture")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # plans are looked up often, and have many fields
        return hash(self.interventions)

    def __reduce__(self) -> Any:
        return Plan, (self.interventions,)  # without the hash, since strings hash differently in each process

    @classmethod
    def of(cls, given: Any) -> Plan:
        """The plan that was meant: a Plan, an intervention, an iterable of these, None for nothing, or a wire form (dict or JSON).

        Raises PlanError if it is none of them.
        """
        if isinstance(given, Plan):
            return given
        if given is None:
            return cls()
        if isinstance(given, (Edit, Capture)):
            return cls((given,))
        if isinstance(given, str):
            return cls.from_json(given)
        if isinstance(given, Mapping):
            return cls.from_wire(given)
        try:
            items = iter(given)
        except TypeError as error:
            raise fields.refuse(
                "the plan", fields.shown(given), "a Plan, interventions, a wire form, JSON, or None"
            ) from error
        return cls(tuple(_flattened(items)))

    def to_wire(self) -> dict[str, Any]:
        """The plan as data for msgpack: see `wire.to_wire`. Raises PlanError for a `Capture.to` that is a callable."""
        return wire.to_wire(self.interventions)

    def to_json(self) -> str:
        """The same as JSON, vectors in base64."""
        return wire.to_json(self.interventions)

    @classmethod
    def from_wire(cls, given: Any, *, trusted: bool = True) -> Plan:
        """The plan that `to_wire` wrote: see `wire.from_wire`. Raises PlanError for anything else."""
        return cls(wire.from_wire(given, trusted=trusted))

    @classmethod
    def from_json(cls, text: str, *, trusted: bool = True) -> Plan:
        """The plan that `to_json` wrote, or somebody by hand. Raises PlanError for anything else."""
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
        """The plan in the one way that all plans with its effect are written in: see `normal.normal_form`.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt.
        """
        return Plan(normal_form(self.interventions, num_layers, prompt_length))

    @cached_property
    def hash(self) -> str:
        """Of the normal form; 32 hexadecimal digits. Take `plan.normal(num_layers).hash` to have "all" equal the layers listed."""
        return plan_hash(self.interventions)

    def __add__(self, other: Any) -> Plan:
        return Plan(self.interventions + Plan.of(other).interventions)

    def __radd__(self, other: Any) -> Plan:
        return Plan.of(other) + self

    def __bool__(self) -> bool:
        return bool(self.interventions)


def _flattened(given: Iterable[Any]) -> Iterator[Any]:
    for item in given:
        yield from item.interventions if isinstance(item, Plan) else (item,)


def has_spans(plan: Plan) -> bool:
    """Whether `resolve_spans` has something to do."""
    return any(isinstance(item.place, Span) for item in plan.interventions)


def resolve_spans(plan: Plan, text: str, offsets: Sequence[tuple[int, int]]) -> Plan:
    """The plan with positions in the place of spans.

    Args:
        text: the prompt.
        offsets: for each token the characters `[begin, end)` that it stands for, as tokenizers give them with
            `return_offsets_mapping`; begin = end for tokens of no text, such as the begin of the sequence.

    Raises:
        PlanError: the text does not stand there so often, or no token overlaps it.
    """
    return Plan(tuple(_resolved(item, text, offsets) for item in plan.interventions))


def _resolved(item: Intervention, text: str, offsets: Sequence[tuple[int, int]]) -> Intervention:
    span, field = item.place, item.position_field
    if not isinstance(span, Span):
        return item
    found: dict[str, Any] = {field: span_positions(span, text, offsets, f"{type(item).__name__}.{field}")}
    return dataclasses.replace(item, **found)  # type: ignore[type-var]


def with_digests(plan: Plan, digests: Mapping[str, str]) -> Plan:
    """The plan with each named vector's digest as the engine knows it, and none for names that it does not know.

    Digests key the prefix cache: whoever keeps the vectors sets them, whatever the request claims.
    """
    return Plan(tuple(_with_digests(item, digests) for item in plan.interventions))


def _with_digests(item: Intervention, digests: Mapping[str, str]) -> Intervention:
    named = {field: value.name for field, value in vars(item).items() if isinstance(value, Named)}
    found: dict[str, Any] = {field: Named(name, digests.get(name)) for field, name in named.items()}
    return dataclasses.replace(item, **found) if found else item  # type: ignore[type-var]


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
