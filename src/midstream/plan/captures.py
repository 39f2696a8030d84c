"""Captures: which rows of a site to keep, their destination, and the layout of a captured row."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

from midstream.plan import fields
from midstream.plan.ops.edit import Intervention, changed
from midstream.plan.program import Program
from midstream.plan.selections import checked, selector_of
from midstream.plan.steps import FLOATS

_SINKS = "None for the output, a directory, a callable, a Consumer, or a tuple of these"


@dataclass(frozen=True, init=False)
class Consumer:
    """An installed consumer of captured rows, by the name of its entry point in the group `midstream.consumers`.

    Its constructor receives `options`: strings, numbers, booleans, None, and lists and dicts of them.
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
        return functools.partial(Consumer, self.name, **self.options), ()


Sink: TypeAlias = str | Callable[..., Any] | Consumer | None


class Reading(Intervention):
    """Base of `Capture` and `Probe`, which read the rows of selected positions and change nothing.

    Attributes:
        when: "before" or "after" the edits of the same site.
    """

    selector_fields: ClassVar[tuple[str, ...]] = ("positions",)

    when: str

    def settle(self, **attributes: Any) -> None:
        super().settle(
            positions=checked(self.label("positions"), self.positions),
            when=fields.one_of(self.label("when"), self.when, ("before", "after")),
            **attributes,
        )

    @property
    def selects_generated(self) -> bool:
        """Whether it may read rows of generated tokens."""
        return selector_of(self.positions).selects_generated

    def placed(self, prompt_length: int | None) -> Self:
        """The same with listed positions in ascending order, counted from the start if `prompt_length` is given."""
        place = self.place_in(prompt_length)
        return changed(self, positions=tuple(sorted(set(place)))) if isinstance(place, (tuple, list)) else self


@fields.explained
@dataclass(frozen=True)
class Capture(Reading):
    """Keep rows of a site.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        positions: `"last_prompt"`, `"all_prompt"`, `"all_generated"`, `"all"`, positions of the prompt (one or several; negatives count
            from its end), a `Span` or a `midstream.plan.selections.Selector`. The last generated token is never fed back into the model, so
            it has no row.
        when: `"before"` or `"after"` the edits of the same site.
        to: None puts the rows on the request's output; a directory (str or Path) writes safetensors files there; a callable is called with
            them; `Consumer(name, ...)` is an installed consumer; or a tuple of these.
        dtype: None gives rows in the model's dtype. `"float32"`, `"float16"`, `"bfloat16"` or `"float64"`, also as a `torch.dtype`,
            converts them, for every destination. Captures of the same rows with the same destination need the same dtype and head.
        program: computes on the engine, from each row, the values to keep in place of the row: a `midstream.plan.program.Program` of the
            site's width whose result is a tuple. `plan.running.unpacked` separates the results. Only for `to=None`.
        head: at sites of heads (`attn_z`), keep only this head, counted from 0: `[positions, head_dim]`; or these heads, in this
            order: `[positions, heads, head_dim]`. None keeps all heads side by side: `[positions, heads * head_dim]`.

    Raises:
        PlanError: the value of a field is not allowed.
    """

    kind: ClassVar[str] = "capture"
    function: ClassVar[str | None] = "program"

    site: str
    _: KW_ONLY
    layers: Any = "all"
    positions: Any = "last_prompt"
    when: str = "before"
    to: Any = None
    dtype: Any = None
    program: Program | None = None
    head: Any = None

    def __post_init__(self) -> None:
        many = isinstance(self.to, (tuple, list))
        sinks = tuple(_sink(sink) for sink in (self.to if many else (self.to,)))
        if not sinks:
            raise fields.refuse("Capture.to", "empty", _SINKS)
        if self.program is not None:
            if not (isinstance(self.program, Program) and self.program.is_read) or self.program.inputs:
                raise fields.refuse(
                    "Capture.program", fields.shown(self.program), "a Program of one input, with a tuple of results"
                )
            if sinks != (None,):
                raise fields.refuse("Capture.to", fields.shown(self.to), "None with a program")
            if self.dtype is not None:
                raise fields.refuse("Capture.dtype", fields.shown(self.dtype), "None with a program")
            if self.head is not None:
                raise fields.refuse("Capture.head", fields.shown(self.head), "None with a program")
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype is not None else None
        self.settle(
            dtype=fields.one_of("Capture.dtype", dtype, FLOATS) if dtype is not None else None,
            to=sinks if many else sinks[0],
        )
        if self.head is not None:
            fields.settle(self, head=fields.heads("Capture.head", self.head, self.site))

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The destinations of the rows: each a directory, a callable, a Consumer, or None for the output."""
        return self.to if isinstance(self.to, tuple) else (self.to,)


def _sink(to: Any) -> Sink:
    if isinstance(to, (str, os.PathLike)):
        return fields.text("Capture.to", os.fspath(to))
    if to is None or isinstance(to, Consumer) or callable(to):
        return to
    raise fields.refuse("Capture.to", fields.shown(to), _SINKS)


PlaneKey = tuple[str, int, str]  # site, layer, when


class Plane(NamedTuple):
    """One site's value in a captured row, or the results that a program computes from it: `row[offset : offset + width]`."""

    site: str
    layer: int
    when: str
    offset: int
    width: int


class Planes(tuple[Plane, ...]):
    """The planes of a captured row. Many requests share one object, which caches the properties below."""

    @classmethod
    def of(cls, keys: Iterable[PlaneKey], width: Callable[[PlaneKey], int]) -> Self:
        """These planes one after another. `width`: returns the width of each."""
        planes, offset = [], 0
        for key in keys:
            planes.append(Plane(*key, offset, width(key)))
            offset += planes[-1].width
        return cls(planes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def by_key(self) -> dict[PlaneKey, Plane]:
        return {(plane.site, plane.layer, plane.when): plane for plane in self}

    @cached_property
    def width(self) -> int:
        """The end of the last plane, in elements."""
        return max((plane.offset + plane.width for plane in self), default=0)

    def __reduce__(self) -> Any:
        return Planes, (tuple(self),)


NO_PLANES = Planes()
