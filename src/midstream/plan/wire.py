"""A plan as data that any transport can hold: for msgpack (`to_wire`) and as JSON (`to_json`). No pickle, and no code in it.

    {"version": 1,
     "interventions": [{"kind": "steer", "site": "resid_post", "layers": [14], "vector": {"vector": DIGEST}, "scale": 4.0}, ...],
     "vectors": {DIGEST: little-endian float32, bytes or in JSON base64},
     "runs": {ID: {"name": ..., "prompt_token_ids": [...], "sites": [...], "layers": [...], "positions": [...]}}}

Fields that are left out have their defaults. Where a vector is asked for there may also stand a list of numbers, or a name. What comes in
may be anybody's: every key, type and size is checked, by the constructors of `values` too, and a digest is computed, not believed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NamedTuple, TypeVar

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.captures import Capture, Consumer, Intervention
from midstream.plan.fields import Span
from midstream.plan.ops.edit import Edit, fields_of, kind_of, kinds
from midstream.plan.vectors import Named, RecordedRun, Vector, Zeros

VERSION = 1
MAX_INTERVENTIONS = 1 << 16
MAX_ITEMS = 1 << 20  # layers, positions, tokens or numbers in one list
MAX_VECTOR_BYTES = 1 << 30  # of all vectors of a plan
MAX_STRANGERS_EDITS = 1 << 10  # a plan with so many keeps the engine from its other requests for less than 100 ms
MAX_STRANGERS_BYTES = 4 << 20  # of a plan that came over HTTP
_ITEM_BYTES = 8  # that a number, a list or a dict counts for
_MAX_DEPTH = 16

RUN_LISTS = ("prompt_token_ids", "sites", "layers", "positions")

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------ writing


def to_wire(interventions: Sequence[Intervention]) -> dict[str, Any]:
    """A plan as str, int, float, bool, None, bytes, and lists and dicts of them; each vector and run once.

    Raises PlanError for a `Capture.to` that is a callable.
    """
    tables: dict[str, dict[str, Any]] = {"vectors": {}, "runs": {}}
    written = [_written(item, tables) for item in interventions]
    return {"version": VERSION, "interventions": written} | {name: table for name, table in tables.items() if table}


def to_json(interventions: Sequence[Intervention]) -> str:
    """The same as JSON, vectors in base64."""
    wire = to_wire(interventions)
    if "vectors" in wire:
        wire["vectors"] = {key: base64.b64encode(data).decode() for key, data in wire["vectors"].items()}
    return json.dumps(wire, allow_nan=False)


def _written(item: Intervention, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    written: dict[str, Any] = {"kind": item.kind}
    for field in fields_of(item):
        value = getattr(item, field.name)
        if field.default is MISSING or value != field.default:
            written[field.name] = _written_value(value, tables)
    return written


def _written_value(value: Any, tables: dict[str, dict[str, Any]]) -> Any:
    match value:
        case Vector():
            tables["vectors"][value.digest] = value.data.tobytes()
            return {"vector": value.digest}
        case Named():
            return {"named": value.name} | ({"digest": value.digest} if value.digest is not None else {})
        case Zeros():
            return {"zeros": True}
        case RecordedRun():
            tables["runs"][value.id] = _written_run(value)
            return {"run": value.id}
        case Span():
            return {"span": value.text} | ({"occurrence": value.occurrence} if value.occurrence else {})
        case Consumer():
            return {"consumer": value.name} | ({"options": value.options} if value.options else {})
        case tuple():
            return [_written_value(item, tables) for item in value]
    if callable(value):
        given = f"the callable {fields.shown(value)}, which cannot be sent"
        raise fields.refuse("Capture.to", given, "None, a directory or a Consumer in a plan that is sent")
    return None if isinstance(value, float) and np.isinf(value) else value  # bounds of a clamp


def _written_run(run: RecordedRun) -> dict[str, Any]:
    return {"name": run.name} | {name: list(getattr(run, name)) for name in RUN_LISTS}


# ------------------------------------------------------------------------------------------------------------ reading


def from_json(text: str, *, trusted: bool = True) -> tuple[Intervention, ...]:
    """The plan that `to_json` wrote, or somebody by hand. `trusted` as for `from_wire`. Raises PlanError for anything else."""
    if not isinstance(text, str):
        raise fields.refuse("the plan", fields.shown(text), "JSON as a string")
    if not trusted:
        _check_size(text)
    try:
        wire = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The plan is not JSON: {error}.") from error
    return from_wire(wire, trusted=trusted)


def from_wire(wire: Mapping[str, Any], *, trusted: bool = True) -> tuple[Intervention, ...]:
    """The plan that `to_wire` wrote.

    Args:
        trusted: False for the plan of a stranger, which may be `MAX_STRANGERS_BYTES` long at most, name no directories and consumers of
            the machine that reads it, and not vouch for the content of named vectors.

    Raises:
        PlanError: it is no such thing, in any way whatever. The message names the place, what stands there and what is allowed.
    """
    if not trusted:
        _check_size(wire)
    wire = _dict("the plan", wire, ("interventions",), ("version", "vectors", "runs"))
    if type(version := wire.get("version", VERSION)) is not int or version != VERSION:
        raise fields.refuse(
            "the plan's version", fields.shown(version), f"{VERSION}, which is all that this midstream reads"
        )
    tables = _Tables(_vectors(_dict("vectors", wire.get("vectors", {}))), _runs(_dict("runs", wire.get("runs", {}))))
    longest = MAX_INTERVENTIONS if trusted else MAX_STRANGERS_EDITS
    items = _list("interventions", wire["interventions"], longest)
    return tuple(_intervention(f"interventions[{i}]", item, tables, trusted) for i, item in enumerate(items))


def _check_size(given: Any) -> None:
    """Raise PlanError for more than a stranger may send, having looked at no more than that."""
    size, depth, level = 0, 0, [given]
    while level:
        below: list[Any] = []
        for value in level:
            size += len(value) if isinstance(value, (str, bytes)) else _ITEM_BYTES
            if isinstance(value, Mapping):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                below += value
            if size + _ITEM_BYTES * len(below) > MAX_STRANGERS_BYTES:
                given = f"over {MAX_STRANGERS_BYTES >> 20} MiB"
                allowed = f"up to {MAX_STRANGERS_BYTES >> 20} MiB; vectors are shortest in base64, or as names"
                raise fields.refuse("the plan", given, allowed)
        depth += 1
        if depth > _MAX_DEPTH:
            raise fields.refuse("the plan", f"nested more than {_MAX_DEPTH} deep", f"up to {_MAX_DEPTH}")
        level = below


class _Tables(NamedTuple):
    vectors: dict[str, Vector]
    runs: dict[str, RecordedRun]


def _intervention(place: str, item: Any, tables: _Tables, trusted: bool) -> Intervention:
    if not isinstance(item, dict):
        raise fields.refuse(place, fields.shown(item), "a dict")
    cls = _class_of(f"{place}.kind", item.get("kind"))
    known = {field.name: field.default is MISSING for field in fields_of(cls)}
    required = [name for name, needed in known.items() if needed]
    item = _dict(f"{place} ({cls.kind})", item, ("kind", *required), tuple(known))
    read = {name: _value(f"{place}.{name}", name, value, tables, cls) for name, value in item.items() if name != "kind"}
    if not trusted:
        _refuse_rights(place, read)
    make: Callable[..., Intervention] = cls
    return _made(place, make, **read)


def _refuse_rights(place: str, read: dict[str, Any]) -> None:
    """Raise PlanError for a field that only the engine's own side may set."""
    if read.get("to") is not None:
        allowed = "None; who sends this plan may not name where the engine writes"
        raise fields.refuse(f"{place}.to", fields.shown(read["to"]), allowed)
    for name, value in read.items():
        if isinstance(value, Named) and value.digest is not None:
            allowed = "None; who sends this plan may not say what the engine has under a name"
            raise fields.refuse(f"{place}.{name}.digest", fields.shown(value.digest), allowed)


def _made(place: str, make: Callable[..., T], *args: Any, **attributes: Any) -> T:
    """What `make` makes; its errors say where in the plan it was to be."""
    try:
        return make(*args, **attributes)
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from error


def _class_of(place: str, kind: Any) -> type[Edit] | type[Capture]:
    if kind == Capture.kind:
        return Capture
    fields.one_of(place, kind, [*kinds(), Capture.kind])
    return kind_of(kind)


def _value(place: str, name: str, value: Any, tables: _Tables, cls: type[Edit] | type[Capture]) -> Any:
    """A field's value for its constructor, which checks what lies beyond its form."""
    operands = cls.operands if issubclass(cls, Edit) else ()
    if name in operands and isinstance(value, dict):
        return _source(place, value, tables, issubclass(cls, Edit) and name in cls.run_operands)
    if name in operands and isinstance(value, list):
        return _numbers(place, value)
    if name == cls.position_field and isinstance(value, dict):
        _dict(place, value, ("span",), ("occurrence",))
        return _made(place, Span, value["span"], value.get("occurrence", 0))
    if name == "to":
        return (
            tuple(_sink(place, sink) for sink in _list(place, value))
            if isinstance(value, list)
            else _sink(place, value)
        )
    return _list(place, value) if isinstance(value, list) else value


def _source(place: str, value: dict[str, Any], tables: _Tables, is_source: bool) -> Any:
    match value:
        case {"vector": str(key), **rest} if not rest:
            return _looked_up(place, "vectors", key, tables.vectors)
        case {"run": str(key), **rest} if not rest and is_source:
            return _looked_up(place, "runs", key, tables.runs)
        case {"zeros": True, **rest} if not rest and is_source:
            return Zeros()
        case {"named": str(name), **rest} if rest.keys() <= {"digest"}:
            return _made(place, Named, name, rest.get("digest"))
    allowed = ["{'vector': digest}", "{'named': name}", *(["{'run': id}", "{'zeros': True}"] if is_source else [])]
    raise fields.refuse(place, fields.shown(value), " or ".join(allowed))


def _looked_up(place: str, table: str, key: str, there: Mapping[str, T]) -> T:
    if key not in there:
        raise fields.refuse(place, fields.shown(key), f"a key of the plan's {table!r}: {fields.nearest(key, there)}")
    return there[key]


def _sink(place: str, value: Any) -> Any:
    if isinstance(value, dict):
        _dict(place, value, ("consumer",), ("options",))
        return _made(place, Consumer, value["consumer"], **_dict(f"{place}.options", value.get("options", {})))
    if value is None or isinstance(value, str):
        return value
    raise fields.refuse(
        place, fields.shown(value), "None, a directory, {'consumer': name, 'options': {...}}, or a list of these"
    )


def _vectors(table: dict[str, Any]) -> dict[str, Vector]:
    size, read = 0, {}
    for key, data in table.items():
        place = f"vectors[{fields.shown(key)}]"
        data = _decoded(key, data) if isinstance(data, str) else data
        if not isinstance(data, bytes) or not data or len(data) % 4:
            given = f"{len(data)} bytes" if isinstance(data, bytes) else fields.shown(data)
            raise fields.refuse(place, given, "float32 as bytes or in base64, 4 bytes for each dimension")
        size += len(data)
        if size > MAX_VECTOR_BYTES:
            raise fields.refuse("the plan's vectors", f"over {MAX_VECTOR_BYTES} bytes", f"up to {MAX_VECTOR_BYTES}")
        read[key] = Vector(np.frombuffer(data, "<f4"), place)
        if read[key].digest != key:  # it keys the prefix cache: a wrong one would share KV that differs
            raise fields.refuse(place, "not the digest of its bytes", f"{read[key].digest!r}")
    return read


def _runs(table: dict[str, Any]) -> dict[str, RecordedRun]:
    read = {}
    for key, run in table.items():
        place = f"runs[{fields.shown(key)}]"
        _dict(place, run, ("name", *RUN_LISTS))
        lists = {name: tuple(_list(f"{place}.{name}", run[name])) for name in RUN_LISTS}
        read[key] = _made(place, RecordedRun, name=run["name"], id=key, **lists)
    return read


def _decoded(key: str, data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError) as error:
        raise fields.refuse(f"vectors[{fields.shown(key)}]", fields.shown(data), "float32 in base64") from error


def _dict(
    place: str, value: Any, required: Sequence[str] = (), optional: Sequence[str] | None = None
) -> dict[str, Any]:
    """A dict with string keys: all of `required`, and beyond these only `optional` ones, if any are named at all."""
    if not isinstance(value, dict):
        raise fields.refuse(place, fields.shown(value), "a dict")
    for key in required:
        if key not in value:
            raise PlanError(f"{place} has no {key!r}; it has {fields.shown(list(value))}.")
    for key in value:
        if not isinstance(key, str):
            raise fields.refuse(f"a key of {place}", fields.shown(key), "a string")
        if (required or optional is not None) and key not in (*required, *(optional or ())):
            raise PlanError(
                f"{place} has an unknown key {fields.shown(key)}: {fields.nearest(key, [*required, *(optional or ())])}"
            )
    return value


def _list(place: str, value: Any, longest: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise fields.refuse(place, fields.shown(value), "a list")
    longest = MAX_ITEMS if longest is None else longest
    if len(value) > longest:
        raise fields.refuse(place, f"a list of {len(value)} items", f"up to {longest}")
    return value


def _numbers(place: str, value: list[Any]) -> list[float]:
    for i, item in enumerate(_list(place, value)):
        if type(item) not in (int, float):
            raise fields.refuse(f"{place}[{i}]", fields.shown(item), "a number")
    return value
