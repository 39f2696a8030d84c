"""Captures: which rows of a site to keep, where they go, and how a captured row is laid out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np

from midstream.plan import fields
from midstream.plan.fields import as_positions
from midstream.plan.ops.edit import Edit

POSITIONS = ("last_prompt", "all_prompt", "all_generated", "all")
_SINKS = "None for the output, a directory, a callable, a Consumer, or a tuple of these"


@dataclass(frozen=True, init=False)
class Consumer:
    """Somebody's code that takes captured rows, by the name of its entry point in the group `midstream.consumers`.

    `options` are handed to it when it is made: strings, numbers, booleans, None, and lists and dicts of them.
    """

    name: str
    options: Mapping[str, Any]

    def __init__(self, name: str, /, **options: Any) -> None:
        fields.settle(self, name=fields.text("Consumer.name", name), options=fields.plain("Consumer options", options))

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

    kind: ClassVar[str] = "capture"
    layer_field: ClassVar[str] = "layers"
    position_field: ClassVar[str] = "positions"

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
            raise fields.refuse("Capture.to", "empty", _SINKS)
        fields.settle(
            self,
            site=fields.site("Capture.site", self.site),
            layers=fields.layers("Capture.layers", self.layers),
            positions=as_positions("Capture.positions", self.positions, POSITIONS),
            when=fields.one_of("Capture.when", self.when, ("before", "after")),
            to=sinks if many else sinks[0],
        )

    @property
    def at_layers(self) -> Any:
        """`"all"` or a tuple of layers, as of an `Edit`."""
        return self.layers

    @property
    def place(self) -> Any:
        """As of an `Edit`: a name, a tuple of positions or a `Span`."""
        return self.positions

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Where the rows go, one by one: a directory, a callable, a Consumer, or None for the output."""
        return self.to if isinstance(self.to, tuple) else (self.to,)


Intervention: TypeAlias = Edit | Capture


def _sink(to: Any) -> Sink:
    if isinstance(to, (str, os.PathLike)):
        return fields.text("Capture.to", os.fspath(to))
    if to is None or isinstance(to, Consumer) or callable(to):
        return to
    raise fields.refuse("Capture.to", fields.shown(to), _SINKS)


class Positions(NamedTuple):
    """Captured positions.

    Attributes:
        prompt: int64, ascending, each below the prompt's length.
        generated: whether all from the prompt's length on are captured too.
    """

    prompt: np.ndarray
    generated: bool


def captured_positions(selector: str | fields.Span | tuple[int, ...], prompt_length: int) -> Positions:
    """What `Capture.positions` selects of a prompt of that length. Raises PlanError for a position outside, or a span not resolved yet."""
    nothing, prompt = np.empty(0, np.int64), np.arange(prompt_length, dtype=np.int64)
    match selector:
        case "last_prompt":
            return Positions(prompt[-1:], False)
        case "all_prompt":
            return Positions(prompt, False)
        case "all_generated":
            return Positions(nothing, True)
        case "all":
            return Positions(prompt, True)
        case fields.Span():
            raise fields.unresolved("Capture.positions", selector)
    assert not isinstance(selector, str)
    return Positions(np.unique(fields.resolved_positions("Capture.positions", selector, prompt_length)), False)


Key = tuple[str, int, str]  # site, layer, when


class Plane(NamedTuple):
    """One site's value in a captured row: `row[offset : offset + width]`."""

    site: str
    layer: int
    when: str
    offset: int
    width: int


class Layout(tuple[Plane, ...]):
    """The planes of a row. The rows of many requests have the same one, which therefore keeps what can be told of it."""

    _keys: Mapping[Key, Any] | None = None  # what `has_just` last said yes to

    @classmethod
    def of(cls, keys: Iterable[Key], width: Callable[[str, int], int]) -> Self:
        """These planes one after another, each as wide as its site at its layer."""
        planes, offset = [], 0
        for site, layer, when in keys:
            planes.append(Plane(site, layer, when, offset, width(site, layer)))
            offset += planes[-1].width
        return cls(planes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def by_key(self) -> dict[Key, Plane]:
        return {(plane.site, plane.layer, plane.when): plane for plane in self}

    def has_just(self, keys: Mapping[Key, Any]) -> bool:
        """Whether it has a plane for each of the keys and no other.

        Quick where the last yes was for the same mapping, which must not change.
        """
        if self._keys is not keys:
            if self.by_key.keys() != keys.keys():
                return False
            self._keys = keys
        return True

    @cached_property
    def width(self) -> int:
        """Up to the end of the last plane, in elements."""
        return max((plane.offset + plane.width for plane in self), default=0)

    def __reduce__(self) -> Any:
        return Layout, (tuple(self),)


EMPTY = Layout()
