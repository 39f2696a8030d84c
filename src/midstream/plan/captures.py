"""Capture: keep rows of a site, and where they go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias

from midstream.plan import fields
from midstream.plan.positions import as_positions

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


def _sink(to: Any) -> Sink:
    if isinstance(to, (str, os.PathLike)):
        return fields.text("Capture.to", os.fspath(to))
    if to is None or isinstance(to, Consumer) or callable(to):
        return to
    raise fields.refuse("Capture.to", fields.shown(to), _SINKS)
