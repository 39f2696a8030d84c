"""Interventions as data: `Steer`, `Patch`, `Clamp`, `Capture`, and the `Plan` that holds them.

    plan = [
        Steer("resid_post", layers=[14], vector=v, scale=4.0, phase="decode"),
        Capture("resid_post", layers="all", positions="last_prompt"),
    ]
    model.generate(prompts, plan=plan)

All are immutable and checked when they are made (PlanError), and once more when model and prompt are known (`checks`). At one site the
order is: capture before, patches, steers, clamps, capture after. `arithmetic` has what they compute, in plain PyTorch.

Wherever a vector is asked for: a tensor on any device, a numpy array or a list, of shape `[hidden]`, which is copied; or the name of
a vector that the engine holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from midstream.errors import PlanError
from midstream.plan import coerce, fields
from midstream.plan.runs import RecordedRun
from midstream.plan.spans import Span, resolve_spans
from midstream.plan.vectors import Named, Vector, Zeros

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
    "Span",
    "Steer",
    "Vector",
    "Zeros",
    "resolve_spans",
    "with_digests",
]

PHASES = ("both", "prefill", "decode")
POSITIONS = ("last_prompt", "all_prompt", "all_generated", "all")


@fields.explained
@dataclass(frozen=True)
class Steer:
    """Add a vector: `h += scale * vector`. Several at one site add up.

    Activation addition: Turner et al. 2023 (arXiv:2308.10248); the mean difference of contrastive prompts makes a good vector:
    Rimsky et al. 2023 (arXiv:2312.06681).

    Args:
        site: one of `midstream.sites.LAYER_SITES`, such as `"resid_post"`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        vector: `[hidden]`, or the name of a vector that the engine holds.
        scale: the factor; 0 changes nothing.
        phase: at which tokens: `"prefill"` is the prompt's, `"decode"` every generated one, by position, however the engine batches.
        positions: at these of the prompt alone, one or several (negatives count from its end) or a `Span`; None for all of `phase`.
        norm_match: make the added vector `scale` times as long as h is at that token, after the patches of the site:
            `h += scale * ||h|| * vector / ||vector||`.

    Raises:
        PlanError: a field is not as above; the vector has NaN or infinity; it is zero and norm_match is set; both phase and positions.
    """

    site: str
    _: KW_ONLY
    layers: Any = "all"
    vector: Any
    scale: float = 1.0
    phase: str = "both"
    positions: Any = None
    norm_match: bool = False

    def __post_init__(self) -> None:
        vector = coerce.vector("Steer.vector", self.vector)
        norm_match = fields.flag("Steer.norm_match", self.norm_match)
        if norm_match and isinstance(vector, Vector) and not vector.data.any():
            raise fields.refuse("Steer.vector", "zero", "a vector with a direction, since norm_match is set")
        _settle(
            self,
            site=coerce.site("Steer.site", self.site),
            layers=fields.layers("Steer.layers", self.layers),
            vector=vector,
            scale=fields.number("Steer.scale", self.scale),
            phase=fields.one_of("Steer.phase", self.phase, PHASES),
            positions=_positions("Steer", self.positions, self.phase),
            norm_match=norm_match,
        )


@fields.explained
@dataclass(frozen=True)
class Patch:
    """Put another value in the place of one at chosen positions of the prompt: `h = (1 - a) * h + a * source`, exactly `source` at a = 1.

    Activation patching (causal tracing): Meng et al. 2022 (arXiv:2202.05262), Wang et al. 2022 (arXiv:2211.00593). Several at one
    position are applied in their order.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layer: counted from 0.
        position: of the prompt, one or several or a `Span`; negatives count from its end.
        source: a `RecordedRun`, a vector `[hidden]`, `"zeros"`, or the name of a vector that the engine holds.
        source_position: of a run: one position for all, or one for each; negatives count from the end of the run's prompt. None: the
            same as `position`, as written there.
        source_layer, source_site: of a run; None: the same.
        alpha: a, from 0 (nothing) to 1 (replace).
        mask: `[hidden]`, from 0 to 1, multiplied with alpha in each dimension; True and False count as 1 and 0. Or a name.

    Raises:
        PlanError: a field is not as above, or a source_... is given for a source that is no run.
    """

    site: str
    _: KW_ONLY
    layer: int
    position: Any
    source: Any
    source_position: Any = None
    source_layer: int | None = None
    source_site: str | None = None
    alpha: float = 1.0
    mask: Any = None

    def __post_init__(self) -> None:
        source = self.source
        if not isinstance(source, (RecordedRun, Zeros)):
            source = Zeros() if isinstance(source, str) and source == "zeros" else coerce.vector("Patch.source", source)
        _settle(
            self,
            site=coerce.site("Patch.site", self.site),
            layer=fields.integer("Patch.layer", self.layer, 0),
            position=coerce.positions("Patch.position", self.position, ()),
            source=source,
            alpha=fields.number("Patch.alpha", self.alpha, 0.0, 1.0),
            mask=None if self.mask is None else coerce.mask(self.mask),
        )
        self._settle_source(isinstance(source, RecordedRun))

    def _settle_source(self, is_run: bool) -> None:
        for name in ("source_position", "source_layer", "source_site"):
            if getattr(self, name) is not None and not is_run:
                raise fields.refuse(
                    f"Patch.{name}", fields.shown(getattr(self, name)), "None, since the source is no recorded run"
                )
        if self.source_layer is not None:
            _settle(self, source_layer=fields.integer("Patch.source_layer", self.source_layer, 0))
        if self.source_site is not None:
            _settle(self, source_site=coerce.site("Patch.source_site", self.source_site))
        if self.source_position is not None:
            allowed = "a position of the run or one for each of Patch.position"
            given = tuple(coerce.repeatable("Patch.source_position", self.source_position, allowed))
            if not isinstance(self.position, Span) and len(given) not in (1, len(self.position)):
                raise fields.refuse(
                    "Patch.source_position", f"{len(given)} positions for {len(self.position)}", allowed
                )
            _settle(self, source_position=given)


@fields.explained
@dataclass(frozen=True)
class Clamp:
    """Keep the part of h along a direction within bounds, and leave the rest.

    With `s = h . d`: `h += strength * (clip(s, low, high) - s) * d`.
    `low = high = 0` ablates the direction: Arditi et al. 2024 (arXiv:2406.11717). Several at one site are applied in their order.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        direction: `[hidden]`, made a unit vector; or the name of a vector that the engine holds.
        low, high: bounds of s, in the units of the activation; infinite for none.
        strength: from 0 (nothing) to 1 (all the way).
        phase, positions: as for `Steer`.

    Raises:
        PlanError: a field is not as above; the direction is zero; low is above high; both phase and positions.
    """

    site: str
    _: KW_ONLY
    layers: Any = "all"
    direction: Any
    low: float = 0.0
    high: float = 0.0
    strength: float = 1.0
    phase: str = "both"
    positions: Any = None

    def __post_init__(self) -> None:
        low = fields.number("Clamp.low", self.low, unbounded=True)
        high = fields.number("Clamp.high", self.high, unbounded=True)
        if low > high or low == np.inf or high == -np.inf:
            raise PlanError(
                f"Clamp.low is {low:g} and Clamp.high is {high:g}; allowed: low <= high, not both beyond all numbers."
            )
        _settle(
            self,
            site=coerce.site("Clamp.site", self.site),
            layers=fields.layers("Clamp.layers", self.layers),
            direction=coerce.direction(self.direction),
            low=low,
            high=high,
            strength=fields.number("Clamp.strength", self.strength, 0.0, 1.0),
            phase=fields.one_of("Clamp.phase", self.phase, PHASES),
            positions=_positions("Clamp", self.positions, self.phase),
        )


@dataclass(frozen=True, init=False)
class Consumer:
    """Somebody's code that takes captured rows, by the name of its entry point in the group `midstream.consumers`.

    `options` are handed to it when it is made: strings, numbers, booleans, None, and lists and dicts of them.
    """

    name: str
    options: Mapping[str, Any]

    def __init__(self, name: str, /, **options: Any) -> None:
        _settle(self, name=fields.text("Consumer.name", name), options=fields.plain("Consumer options", options))

    def __hash__(self) -> int:
        return hash((self.name, json.dumps(self.options, sort_keys=True)))

    def __repr__(self) -> str:
        return f"Consumer({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"

    def __reduce__(self) -> Any:
        return _consumer, (self.name, dict(self.options))


def _consumer(name: str, options: dict[str, Any]) -> Consumer:
    return Consumer(name, **options)


Sink: TypeAlias = str | Callable[..., Any] | Consumer | None


@fields.explained
@dataclass(frozen=True)
class Capture:
    """Keep rows of a site.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        positions: `"last_prompt"`, `"all_prompt"`, `"all_generated"`, `"all"`, positions of the prompt (one or several; negatives
            count from its end) or a `Span`. The last generated token is never fed back into the model, so it has no row.
        when: `"before"` or `"after"` the edits of the same site.
        to: None puts them on the request's output; a directory (str or Path) writes safetensors files there; a callable is called with
            them; `Consumer(name, ...)` is an installed consumer; or a tuple of these.

    Raises:
        PlanError: a field is not as above.
    """

    site: str
    _: KW_ONLY
    layers: Any = "all"
    positions: Any = "last_prompt"
    when: str = "before"
    to: Any = None

    def __post_init__(self) -> None:
        many = isinstance(self.to, (tuple, list))
        sinks = tuple(_sink(sink) for sink in (self.to if many else (self.to,)))
        if not sinks:
            raise fields.refuse(
                "Capture.to", "empty", "None for the output, a directory, a callable, a Consumer, or a tuple of these"
            )
        _settle(
            self,
            site=coerce.site("Capture.site", self.site),
            layers=fields.layers("Capture.layers", self.layers),
            positions=coerce.positions("Capture.positions", self.positions, POSITIONS),
            when=fields.one_of("Capture.when", self.when, ("before", "after")),
            to=sinks if many else sinks[0],
        )

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Where the rows go, one by one: a directory, a callable, a Consumer, or None for the output."""
        return self.to if isinstance(self.to, tuple) else (self.to,)


Edit: TypeAlias = Steer | Patch | Clamp
Intervention: TypeAlias = Edit | Capture


@dataclass(frozen=True)
class Plan:
    """What is to be done to a request: interventions, in their order. `a + b` does a's first."""

    interventions: tuple[Intervention, ...] = ()

    def __post_init__(self) -> None:
        _settle(self, interventions=tuple(self.interventions))
        for i, item in enumerate(self.interventions):
            if not isinstance(item, (Steer, Patch, Clamp, Capture)):
                raise fields.refuse(f"plan[{i}]", fields.shown(item), "Steer, Patch, Clamp or Capture")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # plans are looked up often, and have many fields
        return hash(self.interventions)

    def __reduce__(self) -> Any:
        return Plan, (self.interventions,)  # without the hash: a string's is another in each process

    @classmethod
    def of(cls, given: Any) -> Plan:
        """The plan that was meant: a Plan, an intervention, an iterable of these, None for nothing, or a wire form (dict or JSON).

        Raises PlanError if it is none of them.
        """
        if isinstance(given, Plan):
            return given
        if given is None:
            return cls()
        if isinstance(given, (Steer, Patch, Clamp, Capture)):
            return cls((given,))
        if isinstance(given, (Mapping, str)):
            from midstream.plan.wire import from_json, from_wire

            return from_json(given) if isinstance(given, str) else from_wire(given)
        try:
            items = iter(given)
        except TypeError as error:
            raise fields.refuse(
                "the plan", fields.shown(given), "a Plan, interventions, a wire form, JSON, or None"
            ) from error
        return cls(tuple(_flattened(items)))

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(item for item in self.interventions if not isinstance(item, Capture))

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        return tuple(item for item in self.interventions if isinstance(item, Capture))

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The recorded runs that its patches read, each once."""
        sources = [edit.source for edit in self.edits if isinstance(edit, Patch)]
        return tuple({source.id: source for source in sources if isinstance(source, RecordedRun)}.values())

    def normal(self, num_layers: int | None = None) -> Plan:
        """The same plan, written in the one way that all plans with its effect are written in (see `canonical`).

        Args:
            num_layers: the model's, for what is written with `layers="all"`; None leaves that as it is.

        Raises:
            PlanError: a layer lies outside the model.
        """
        from midstream.plan.canonical import normal

        return normal(self, num_layers)

    @cached_property
    def hash(self) -> str:
        """Of the normal form; 32 hexadecimal digits. Take `plan.normal(num_layers).hash` to have "all" equal the layers listed."""
        from midstream.plan.canonical import plan_hash

        return plan_hash(self)

    def __add__(self, other: Any) -> Plan:
        return Plan(self.interventions + Plan.of(other).interventions)

    def __radd__(self, other: Any) -> Plan:
        return Plan.of(other) + self

    def __bool__(self) -> bool:
        return bool(self.interventions)


def _flattened(given: Iterable[Any]) -> Iterator[Any]:
    for item in given:
        yield from item.interventions if isinstance(item, Plan) else (item,)


def _positions(of: str, given: Any, phase: str) -> tuple[int, ...] | Span | None:
    """Where a steer or a clamp acts, if it is not everywhere in its phase."""
    if given is None:
        return None
    if phase != "both":
        allowed = "one of them: positions are of the prompt"
        raise fields.refuse(f"{of}.positions", f"{fields.shown(given)} beside phase={phase!r}", allowed)
    found = coerce.positions(f"{of}.positions", given, ())
    assert not isinstance(found, str)
    return found


def _settle(value: Any, **attributes: Any) -> None:
    """Put checked values into a frozen dataclass."""
    for name, attribute in attributes.items():
        object.__setattr__(value, name, attribute)


def with_digests(plan: Plan, digests: Mapping[str, str]) -> Plan:
    """The plan with each named vector's digest as the engine knows it, and none for names that it does not know.

    Digests key the prefix cache: whoever keeps the vectors sets them, whatever the request claims.
    """
    return Plan(tuple(_with_digests(item, digests) for item in plan.interventions))


def _with_digests(item: Intervention, digests: Mapping[str, str]) -> Intervention:
    named = {field: value.name for field, value in vars(item).items() if isinstance(value, Named)}
    found: dict[str, Any] = {field: Named(name, digests.get(name)) for field, name in named.items()}
    return replace(item, **found) if found else item


def _sink(to: Any) -> Sink:
    if isinstance(to, (str, os.PathLike)):
        return fields.text("Capture.to", os.fspath(to))
    if to is None or isinstance(to, Consumer) or callable(to):
        return to
    raise fields.refuse(
        "Capture.to", fields.shown(to), "None for the output, a directory, a callable, a Consumer, or a tuple of these"
    )
