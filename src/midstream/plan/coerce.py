"""What users write in the fields of interventions, as what interventions hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from midstream.plan import fields
from midstream.plan.spans import Span
from midstream.plan.vectors import Named, Vector, as_vector
from midstream.sites import LAYER_SITES, MODEL_SITES


def site(field: str, value: Any) -> str:
    if not isinstance(value, str) or value not in LAYER_SITES:
        of_model = isinstance(value, str) and value in MODEL_SITES
        given = f"{value!r}, which a trace can reach but a plan cannot" if of_model else fields.shown(value)
        raise fields.refuse(field, given, ", ".join(LAYER_SITES))
    return value


def vector(field: str, value: Any) -> Vector | Named:
    if isinstance(value, (Vector, Named)):
        return value
    if isinstance(value, str) and value:
        return Named(value)
    if value is None or isinstance(value, str):
        raise fields.refuse(field, fields.shown(value), "numbers of shape [hidden], or a name")
    return as_vector(field, value)


def direction(value: Any) -> Vector | Named:
    found = vector("Clamp.direction", value)
    if isinstance(found, Named):
        return found
    unit = fields.unit(found.data)
    if unit is None:
        raise fields.refuse("Clamp.direction", "zero", "a vector with a direction")
    return found if unit is found.data else Vector(unit, "Clamp.direction")


def mask(value: Any) -> Vector | Named:
    if isinstance(value, Named) or (isinstance(value, str) and value):
        return vector("Patch.mask", value)
    data = value.data if isinstance(value, Vector) else fields.finite_float32("Patch.mask", value, booleans=True)
    if data.min() < 0 or data.max() > 1:
        raise fields.refuse("Patch.mask", f"from {data.min():g} to {data.max():g}", "numbers from 0 to 1")
    return value if isinstance(value, Vector) else Vector(data, "Patch.mask")


def positions(field: str, value: Any, names: tuple[str, ...]) -> str | tuple[int, ...] | Span:
    if isinstance(value, Span) or (isinstance(value, str) and value in names):
        return value
    named = f"{', '.join(map(repr, names))}, " if names else ""
    return fields.integers(field, value, f"{named}a position, a sequence of positions, or Span(text)")


def repeatable(field: str, value: Any, allowed: str) -> Iterable[int]:
    """Positions that need not differ."""
    many = not isinstance(value, str) and (isinstance(value, (list, tuple, range)) or getattr(value, "ndim", 0) > 0)
    if not many:
        return fields.integers(field, value, allowed)
    return [fields.integer(f"{field}[{i}]", item) for i, item in enumerate(value)]
