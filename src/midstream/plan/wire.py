"""The wire form of a plan: plain data for msgpack (`to_wire`) or as JSON (`to_json`), without pickle and without code.

    {"version": 1,
     "interventions": [{"kind": "steer", "site": "resid_post", "layers": [14], "vector": {"vector": DIGEST}, "scale": 4.0}, ...],
     "vectors": {DIGEST: little-endian float32, bytes or in JSON base64},
     "programs": {DIGEST: ...}, "constants": {DIGEST: {"dtype": ..., "shape": [...], "data": bytes or base64}},
     "runs": {ID: {"name": ..., "prompt_token_ids": [...], "sites": [...], "layers": [...], "positions": [...]}}}

Missing fields have their defaults. A vector may also be written as a list of numbers, as a name, or packed as `{"data": base64, "dtype":
"float32" | "float16" | "bfloat16", "shape": [hidden]}`, little-endian. The input is not trusted: this module and the constructors check
every key, type and size, and compute the digests.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields, work
from midstream.plan.captures import Capture, Consumer, Reading
from midstream.plan.fields import Span
from midstream.plan.ops.edit import Edit, Intervention, changed, kind_of, kinds
from midstream.plan.ops.final import Final, checked_final, made_final
from midstream.plan.probes import Probe
from midstream.plan.program import Program, read_constants, read_programs, written_constant, written_program
from midstream.plan.selections import Selector, made
from midstream.plan.vectors import Named, RecordedRun, Vector, Zeros

VERSION = 1
SAE_KIND = "sae"  # the kind of an intervention that a named SAE makes
_READINGS: dict[str, type[Reading]] = {Capture.kind: Capture, Probe.kind: Probe}
MAX_INTERVENTIONS = 1 << 16
MAX_ITEMS = 1 << 20  # layers, positions, tokens or numbers in one list
MAX_VECTOR_BYTES = 1 << 30  # of all vectors of a plan, and of all its programs' constants
MAX_PROGRAMS = 1 << 10
MAX_STRANGERS_EDITS = 1 << 10
MAX_STRANGERS_BYTES = 4 << 20  # of a plan that came over HTTP
MAX_STRANGERS_INPUTS = 8  # different values of other sites that a plan's programs read
_TABLES = ("vectors", "runs", "programs", "constants")
_ITEM_BYTES = 8  # counted for each number, list and dict
_MAX_DEPTH = 16
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bfloat16
_RUN_LISTS = ("prompt_token_ids", "sites", "layers", "positions")


# ------------------------------------------------------------------------------------------------------------ writing


def to_wire(interventions: Sequence[Intervention]) -> dict[str, Any]:
    """A plan as str, int, float, bool, None, bytes, and lists and dicts of them; each vector, run, program and constant once.

    Raises PlanError for a `Capture.to` that is a callable.
    """
    tables: dict[str, dict[str, Any]] = {"vectors": {}, "runs": {}, "programs": {}, "constants": {}}
    written = [_written(item, tables) for item in interventions]
    return {"version": VERSION, "interventions": written} | {name: table for name, table in tables.items() if table}


def to_json(interventions: Sequence[Intervention]) -> str:
    """The wire form as JSON, with vectors in base64."""
    return json.dumps(to_wire(interventions), allow_nan=False, default=lambda data: base64.b64encode(data).decode())


def _written(item: Intervention, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    given = ((field, getattr(item, field.name)) for field in _fields_of(item))
    return (
        {"kind": item.kind}
        | {
            field.name: _written_value(value, tables, field.name)
            for field, value in given
            if field.default is dataclasses.MISSING or value != field.default
        }
        | ({"final": item.final} if item.final is not None else {})
    )


def _written_value(value: Any, tables: dict[str, dict[str, Any]], field: str = "") -> Any:
    match value:
        case Vector():
            tables["vectors"][value.digest] = value.data.tobytes()
            return {"vector": value.digest}
        case Named():
            return {"named": value.name} | ({"digest": value.digest} if value.digest is not None else {})
        case Zeros():
            return {"zeros": True}
        case Program():
            tables["programs"][value.digest] = written_program(value)
            tables["constants"] |= {constant.digest: written_constant(constant) for constant in value.constants}
            return {"program": value.digest}
        case RecordedRun():
            tables["runs"][value.id] = {"name": value.name} | {name: list(getattr(value, name)) for name in _RUN_LISTS}
            return {"run": value.id}
        case Span():
            return {"span": value.text} | ({"occurrence": value.occurrence} if value.occurrence else {})
        case Selector():
            return {"selector": value.kind} | ({"options": options} if (options := value.options) else {})
        case Consumer():
            return {"consumer": value.name} | ({"options": value.options} if value.options else {})
        case Intervention():
            return _written(value, tables)
        case tuple():
            return [_written_value(item, tables) for item in value]
    if callable(value) and field == "program":
        given = f"the function {fields.shown(value)}"
        raise fields.refuse(
            "Apply.program", given, "a Program; a model of midstream's records functions when it gets the plan"
        )
    if callable(value):
        given = f"the callable {fields.shown(value)}, which cannot be sent"
        raise fields.refuse("Capture.to", given, "None, a directory or a Consumer in a plan that is sent")
    return None if isinstance(value, float) and np.isinf(value) else value  # bounds of a clamp


@functools.cache
def _names_of(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys that an intervention of this class needs, and those that it may have."""
    needed = [field.name for field in _fields_of(cls) if field.default is dataclasses.MISSING]
    return ("kind", *needed), tuple(field.name for field in _fields_of(cls))


@functools.cache
def _differing(cls: Any) -> tuple[str, ...]:
    """The fields in which many interventions of a plan differ: operands, layers and positions."""
    if cls.part_fields or issubclass(cls, Reading):
        return ()
    return (*cls.operands, cls.layer_field, cls.position_field)


def _fields_of(intervention: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(intervention)


# ------------------------------------------------------------------------------------------------------------ reading


def from_json(text: str, *, trusted: bool = True) -> tuple[Intervention, ...]:
    """The plan in JSON from `to_json` or written by hand. `trusted` as in `from_wire`. Raises PlanError for anything else."""
    if not isinstance(text, str):
        raise fields.refuse("the plan", fields.shown(text), "JSON as a string")
    if not trusted:
        _check_size(text)
    try:
        wire = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The plan is not JSON: {error}.") from error
    return from_wire(wire, trusted=trusted, may_be_final=trusted)


def from_wire(
    wire: Mapping[str, Any],
    *,
    trusted: bool = True,
    named_runs: Mapping[str, RecordedRun] | None = None,
    saes: Mapping[str, Any] | None = None,
    may_be_final: bool = True,
) -> tuple[Intervention, ...]:
    """The plan that `to_wire` wrote.

    Args:
        trusted: False for a plan from an untrusted client. It may have `MAX_STRANGERS_BYTES` at most, may not name directories or consumers
            of the machine that reads it, and may not claim digests of named vectors.
        named_runs: runs that it may refer to by these names and ids; they override the plan's own data about runs.
        saes: the SAEs, by name. The plan may refer to them, and may have their large matrices without data.
        may_be_final: whether its edits may be final. The key `final` of an edit makes it final; the key `final` of the plan, all edits.

    Raises:
        PlanError: anything is wrong. The message names the place, the given value and the allowed ones.
    """
    if not trusted:
        _check_size(wire)
    wire = fields.mapping("the plan", wire, ("interventions",), ("version", "final", *_TABLES))
    if type(version := wire.get("version", VERSION)) is not int or version != VERSION:
        allowed = f"{VERSION}, which is all that this midstream reads"
        raise fields.refuse("the plan's version", fields.shown(version), allowed)
    vectors, runs = _vectors(wire.get("vectors", {})), {**_runs(wire.get("runs", {})), **(named_runs or {})}
    items = _list("interventions", wire["interventions"], MAX_INTERVENTIONS if trusted else MAX_STRANGERS_EDITS)
    reader = _PlanReader(trusted, may_be_final, vectors, runs, _programs(wire, trusted, saes or {}), saes or {})
    final = reader.final("final", wire.get("final"))
    read = (reader.intervention(f"interventions[{i}]", item) for i, item in enumerate(items))
    return tuple(made_final(item, final) if final is not None and isinstance(item, Edit) else item for item in read)


def from_packed(wire: Mapping[str, Any]) -> tuple[Intervention, ...]:
    """The plan that `to_wire` wrote in another process of midstream, which has checked its values. This takes a sixth of the time of
    `from_wire`: an engine reads plans between two steps, while all requests wait.
    """
    vectors = {key: Vector.known(np.frombuffer(data, "<f4"), key) for key, data in wire.get("vectors", {}).items()}
    runs, programs = _runs(wire.get("runs", {})), _programs(wire, True, {})
    reader = _PlanReader(True, True, vectors, runs, programs, {})
    return tuple(map(reader.packed, wire["interventions"]))


def _check_size(given: Any) -> None:
    """Raise PlanError for a plan that is larger than an untrusted client may send. Stops looking at the limit."""
    size, depth, level = 0, 0, [given]
    while level:
        if depth > _MAX_DEPTH:
            raise fields.refuse("the plan", f"nested more than {_MAX_DEPTH} deep", f"up to {_MAX_DEPTH}")
        below: list[Any] = []
        for value in level:
            size += len(value) if isinstance(value, (str, bytes)) else _ITEM_BYTES
            if isinstance(value, Mapping):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                below += value
            if size + _ITEM_BYTES * len(below) > MAX_STRANGERS_BYTES:
                allowed = f"up to {MAX_STRANGERS_BYTES >> 20} MiB; vectors are shortest in base64, or as names"
                raise fields.refuse("the plan", f"over {MAX_STRANGERS_BYTES >> 20} MiB", allowed)
        depth, level = depth + 1, below


def _vectors(table: Any) -> dict[str, Vector]:
    size, read = 0, {}
    for key, data in fields.mapping("vectors", table).items():
        place = f"vectors[{fields.shown(key)}]"
        if isinstance(data, str):
            try:
                data = base64.b64decode(data, validate=True)
            except ValueError as error:
                raise fields.refuse(place, fields.shown(data), "float32 in base64") from error
        if not isinstance(data, bytes) or not data or len(data) % 4:
            given = f"{len(data)} bytes" if isinstance(data, bytes) else fields.shown(data)
            raise fields.refuse(place, given, "float32 as bytes or in base64, 4 bytes for each dimension")
        size += len(data)
        if size > MAX_VECTOR_BYTES:
            raise fields.refuse("the plan's vectors", f"over {MAX_VECTOR_BYTES} bytes", f"up to {MAX_VECTOR_BYTES}")
        read[key] = Vector(np.frombuffer(data, "<f4"), place)
        if read[key].digest != key:  # the digest keys the prefix cache: a wrong one would share KV that differs
            raise fields.refuse(place, "not the digest of its bytes", f"{read[key].digest!r}")
    return read


def _programs(wire: Mapping[str, Any], trusted: bool, saes: Mapping[str, Any]) -> dict[str, Program]:
    if not wire.keys() & {"programs", "constants"}:
        return {}
    table = wire.get("constants", {})
    known = {held: constant for sae in saes.values() for held, constant in sae.held.items()} if table else {}
    constants = read_constants("constants", table, trusted, MAX_VECTOR_BYTES, known)
    table = fields.mapping("programs", wire.get("programs", {}))
    if len(table) > MAX_PROGRAMS:
        raise fields.refuse("the plan's programs", f"{len(table)} of them", f"up to {MAX_PROGRAMS}")
    if not trusted:
        work.check_size(table)
    return read_programs("programs", table, constants)


def _runs(table: Any) -> dict[str, RecordedRun]:
    read = {}
    for key, run in fields.mapping("runs", table).items():
        place = f"runs[{fields.shown(key)}]"
        fields.mapping(place, run, ("name", *_RUN_LISTS))
        lists = [tuple(_list(f"{place}.{name}", run[name])) for name in _RUN_LISTS]
        with fields.errors_at(place):
            try:
                read[key] = _made_run(run["name"], key, *lists)
            except TypeError:  # not hashable, and so not a run's data; the constructor says why
                read[key] = RecordedRun(run["name"], key, *lists)
    return read


_made_run = functools.lru_cache(16)(RecordedRun)  # a sweep's thousands of plans name the same runs


@dataclasses.dataclass
class _PlanReader:
    """Reads interventions. Their constructors check the values; this class checks the form."""

    trusted: bool
    may_be_final: bool
    vectors: dict[str, Vector]
    runs: dict[str, RecordedRun]
    programs: dict[str, Program]
    saes: Mapping[str, Any]
    _alike: dict[Any, Intervention] = dataclasses.field(default_factory=dict)

    def packed(self, item: dict[str, Any]) -> Intervention:
        """An intervention with checked values. Of those that differ only in numbers, places and vectors, the first is checked again."""
        cls: Any = _READINGS.get(item["kind"]) or kind_of(item["kind"])
        differs = _differing(cls)
        own, rest = dict[str, Any](), list[Any]()
        for name, value in item.items():
            is_list = type(value) is list
            if type(value) in (int, float):
                own[name] = value
            elif name not in differs:
                rest.append((name, tuple(value) if is_list else value))
            elif type(value) is dict and "vector" in value:
                own[name] = self.vectors[value["vector"]]
            elif type(value) is dict:
                rest.append((name, *value.items()))
            else:
                own[name] = tuple(value) if is_list else value
        try:
            alike = self._alike.get(key := (*rest, *own))
        except TypeError:  # something in it is nested
            return self.intervention("the plan", item)
        if alike is None:
            self._alike[key] = alike = self.intervention("the plan", item)
        return changed(alike, **own)

    def intervention(self, place: str, item: Any) -> Intervention:
        if not isinstance(item, dict):
            raise fields.refuse(place, fields.shown(item), "a dict")
        kind = fields.one_of(f"{place}.kind", item.get("kind"), [*kinds(), *_READINGS, SAE_KIND])
        if "final" in item:
            return self._final(place, item)
        if kind == SAE_KIND:
            return self._of_sae(place, item)
        cls: Any = _READINGS.get(kind) or kind_of(kind)
        fields.mapping(place, item, *_names_of(cls), kind)
        values = {
            name: self._value(f"{place}.{name}", name, value, cls) for name, value in item.items() if name != "kind"
        }
        with fields.errors_at(place):
            return cls(**values)  # type: ignore[no-any-return]

    def final(self, place: str, given: Any) -> Final | None:
        if given is None:
            return None
        final = checked_final(place, given)
        if not self.may_be_final:
            raise fields.refuse(place, fields.shown(final), "None; the edits of an engine-wide plan alone are final")
        return final

    def _final(self, place: str, item: dict[str, Any]) -> Intervention:
        final = self.final(f"{place}.final", item["final"])
        edit = self.intervention(place, {name: value for name, value in item.items() if name != "final"})
        if final is not None and not isinstance(edit, Edit):
            raise fields.refuse(f"{place}.final", fields.shown(final), "None, since captures and probes change nothing")
        return made_final(edit, final) if final is not None and isinstance(edit, Edit) else edit

    def _of_sae(self, place: str, item: dict[str, Any]) -> Intervention:
        """`{"kind": "sae", "sae": NAME, "do": METHOD, ...}`, with the method's arguments."""
        name = fields.text(f"{place}.sae", item.get("sae"))
        sae, given = _looked_up(f"{place}.sae", "saes", name, self.saes), {}
        for key, value in item.items():
            if key not in ("kind", "sae", "do"):
                given[key] = self._value(f"{place}.{key}", key, value, Capture if key == "positions" else Intervention)
        with fields.errors_at(place):
            return sae.made(item.get("do"), given)  # type: ignore[no-any-return]

    def _value(self, place: str, name: str, value: Any, cls: type[Intervention]) -> Any:
        if name == "to":
            return self._to(place, value)
        if name in cls.part_fields:
            if isinstance(value, list):
                return tuple(self._part(f"{place}[{i}]", each) for i, each in enumerate(_list(place, value)))
            return self._part(place, value)
        if name in cls.operands:
            may_be_run = name in cls.run_operands
            if isinstance(value, dict):
                return self._operand(place, value, may_be_run)
            items = _list(place, value) if isinstance(value, list) else []
            if issubclass(cls, Reading) and items and all(isinstance(item, dict) for item in items):
                return tuple(self._operand(f"{place}[{i}]", item, may_be_run) for i, item in enumerate(items))
            if issubclass(cls, Reading) and items and all(isinstance(item, str) for item in items):
                return tuple(items)  # names
            for i, item in enumerate(items):
                numbers = (
                    _list(f"{place}[{i}]", item) if issubclass(cls, Reading) and isinstance(item, list) else [item]
                )
                if not all(type(number) in (int, float) for number in numbers):
                    raise fields.refuse(f"{place}[{i}]", fields.shown(item), "a number")
            return value
        if name == cls.function and value is not None:
            fields.mapping(place, value, ("program",))
            return _looked_up(place, "programs", fields.text(f"{place}.program", value["program"]), self.programs)
        if name in cls.selector_fields and isinstance(value, dict) and "selector" in value:
            fields.mapping(place, value, ("selector",), ("options",))
            return made(place, value["selector"], fields.mapping(f"{place}.options", value.get("options", {})))
        if (name == cls.position_field or name in cls.selector_fields) and isinstance(value, dict):
            fields.mapping(place, value, ("span",), ("occurrence",))
            with fields.errors_at(place):
                return Span(value["span"], value.get("occurrence", 0))
        return _list(place, value) if isinstance(value, list) else value

    def _part(self, place: str, value: Any) -> Intervention:
        found = self.intervention(place, value)
        if found.parts:
            raise fields.refuse(place, f"an edit of the kind {found.kind!r}", "one that has no edits in it")
        return found

    def _operand(self, place: str, value: dict[str, Any], may_be_run: bool) -> Any:
        match value:
            case {"vector": str(key), **rest} if not rest:
                return _looked_up(place, "vectors", key, self.vectors)
            case {"run": str(key), **rest} if not rest and may_be_run:
                return _looked_up(place, "runs", key, self.runs)
            case {"zeros": True, **rest} if not rest and may_be_run:
                return Zeros()
            case {"data": str(data), "dtype": dtype, "shape": shape, **rest} if not rest:
                return _packed_vector(place, data, dtype, shape)
            case {"named": str(name), **rest} if rest.keys() <= {"digest"}:
                digest = rest.get("digest")
                with fields.errors_at(place):
                    named = Named(name, digest)
                if digest is not None and not self.trusted:
                    allowed = "None; who sends this plan may not say what the engine has under a name"
                    raise fields.refuse(f"{place}.digest", fields.shown(digest), allowed)
                return named
        forms = [
            "{'vector': digest}",
            "{'named': name}",
            "{'data': base64, 'dtype': ..., 'shape': [...]}",
            *(["{'run': id}", "{'zeros': True}"] if may_be_run else []),
        ]
        raise fields.refuse(place, fields.shown(value), " or ".join(forms))

    def _to(self, place: str, value: Any) -> Any:
        if value is not None and not self.trusted:
            allowed = "None; who sends this plan may not name where the engine writes"
            raise fields.refuse(place, fields.shown(value), allowed)
        return (
            tuple(_sink(place, sink) for sink in _list(place, value))
            if isinstance(value, list)
            else _sink(place, value)
        )


def _packed_vector(place: str, text: str, dtype: Any, shape: Any) -> Vector:
    fields.one_of(f"{place}.dtype", dtype, list(_DTYPES))
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), _DTYPES[dtype])
    except ValueError as error:
        raise fields.refuse(f"{place}.data", fields.shown(text), f"{dtype} in base64") from error
    if shape != [data.size]:
        raise fields.refuse(f"{place}.shape", fields.shown(shape), f"[{data.size}], the numbers in the data")
    if dtype == "bfloat16":  # the upper half of a float32
        data = (data.astype("<u4") << 16).view("<f4")
    return Vector(data.astype("<f4"), place)


def _sink(place: str, value: Any) -> Any:
    if isinstance(value, dict):
        fields.mapping(place, value, ("consumer",), ("options",))
        options = fields.mapping(f"{place}.options", value.get("options", {}))
        with fields.errors_at(place):
            return Consumer(value["consumer"], **options)
    if value is None or isinstance(value, str):
        return value
    allowed = "None, a directory, {'consumer': name, 'options': {...}}, or a list of these"
    raise fields.refuse(place, fields.shown(value), allowed)


def _looked_up(place: str, table: str, key: str, there: Mapping[str, Any]) -> Any:
    if key not in there:
        named = {"runs": "the name or id of a recorded run", "saes": "the name of an SAE that the server has"}
        allowed = named.get(table) or f"a key of the plan's {table!r}"
        raise fields.refuse(place, fields.shown(key), f"{allowed}: {fields.nearest(key, there)}")
    return there[key]


def _list(place: str, value: Any, longest: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise fields.refuse(place, fields.shown(value), "a list")
    longest = MAX_ITEMS if longest is None else longest
    if len(value) > longest:
        raise fields.refuse(place, f"a list of {len(value)} items", f"up to {longest}")
    return value
