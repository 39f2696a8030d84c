"""What a planned request carries in `SamplingParams.extra_args`, and who may put what there.

Trust goes by origin. What Python made in the front end's own process, midstream's or the user's, is trusted: an `Envelope`, a `Plan`,
interventions. Strings and dicts are what an HTTP request becomes, so they are a stranger's wherever they come from: a plan as data, and
nothing else. `admission` reads them, and from there on every plan travels packed; the engine takes no other form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.memory import Memory, plan_bytes
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Capture, Edit, Named, Plan
from midstream.runtime.trace_request import Envelope, TraceRequest
from midstream.settings import NAME

_RESERVED = {"trace", "num_layers", "capture", "record", "checked"}  # what an Envelope has beside the plan
_written: Memory[bytes] = Memory()
_read: Memory[Plan] = Memory()


def packed(plan: Plan) -> bytes:
    """The plan as one msgpack value, which vLLM copies and sends at no cost. Raises PlanError for what cannot be sent."""
    return _written.get(plan, lambda: msgspec.msgpack.encode(plan.to_wire()), lambda data: len(data) + plan_bytes(plan))


def unpacked(data: bytes) -> Plan:
    """The plan that was packed. Raises PlanError."""
    return _read.get(data, lambda: _unpacked(data), lambda plan: len(data) + plan_bytes(plan))


def _unpacked(data: bytes) -> Plan:
    try:
        return Plan.from_wire(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"{NAME}.plan is not msgpack: {error}") from error


def given_plan(given: Any) -> tuple[Plan, bool]:
    """The plan that somebody has put into `extra_args` without midstream's client, and whether it is a stranger's. Raises PlanError."""
    if isinstance(given, Mapping) and (reserved := _RESERVED & given.keys()):
        raise PlanError(
            f"{NAME}.{min(reserved)} is not for plans that come as data: midstream's own clients set it. Send the plan alone."
        )
    if isinstance(given, Mapping) and "plan" in given:
        if unknown := [key for key in given if key != "plan"]:
            raise PlanError(f"{NAME} has an unknown key {fields.shown(unknown[0])}; allowed: 'plan'.")
        given = given["plan"]
    if _is_python(given):
        return Plan.of(given), False
    if isinstance(given, str):
        return Plan.from_json(given, trusted=False), True
    if isinstance(given, Mapping):
        return Plan.from_wire(given, trusted=False), True
    raise fields.refuse(NAME, fields.shown(given), "a Plan, interventions, or a plan as JSON or a dict")


def _is_python(given: Any) -> bool:
    """Whether it consists of plans and interventions, which nothing but Python makes."""
    made = (Plan, Edit, Capture)
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(item, made) for item in given)
    return isinstance(given, made)


class PlanRequest(NamedTuple):
    """One planned request.

    Attributes:
        wire: the plan, packed.
        num_layers: of the model; said at admission.
        capture: `(id, index)`, where the client waits for captured rows; None if they stay in the engine or nothing is captured.
        record: `(id, name)` of the run that its captured rows are kept as, in the workers.
        checked: the client knows the model and has nothing against the plan.
    """

    wire: bytes
    num_layers: int = 0
    capture: tuple[str, int] | None = None
    record: tuple[str, str] | None = None
    checked: bool = False

    def to_extra_args(self) -> dict[str, Any]:
        carried = Envelope(plan=self.wire, num_layers=self.num_layers)
        carried |= {"capture": list(self.capture)} if self.capture is not None else {}
        carried |= {"record": list(self.record)} if self.record is not None else {}
        carried |= {"checked": True} if self.checked else {}
        return {NAME: carried}

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError."""
        return unpacked(self.wire)

    @classmethod
    def of(cls, sampling_params: Any) -> PlanRequest | None:
        """The plan that a request carries behind admission, or in an `Envelope` before it. Raises PlanError for any other form."""
        carried = (getattr(sampling_params, "extra_args", None) or {}).get(NAME)
        if carried is None:
            return None
        wire = carried.get("plan") if isinstance(carried, dict) else None
        if type(wire) is bytes:
            return cls(
                wire,
                carried.get("num_layers", 0),
                _pair(carried, "capture", str, int) if "capture" in carried else None,
                _pair(carried, "record", str, str) if "record" in carried else None,
                carried.get("checked") is True,
            )
        if wire is None and TraceRequest.of(sampling_params) is not None:
            return None
        raise PlanError(
            f"extra_args[{NAME!r}] has come to the engine past midstream's part of the front end, which reads and checks it. Load the "
            "plugin there: VLLM_PLUGINS, if it is set, has to name midstream, and the front end has to be vLLM's Python one."
        )


def changes_kv(sampling_params: Any) -> bool:
    """Whether a request may write KV that the model alone would not: with a trace, edits, or what cannot be read."""
    carried = (getattr(sampling_params, "extra_args", None) or {}).get(NAME)
    if carried is None:
        return False
    try:
        request = PlanRequest.of(sampling_params)
        return request is None or "trace" in carried or bool(request.plan.edits)
    except PlanError:
        return True


def share(sampling_params: Any, wire: bytes) -> None:
    """Have a request carry this object for its plan, an equal one: what all requests of a batch have is pickled for the workers once."""
    sampling_params.extra_args[NAME]["plan"] = wire


def _pair(carried: Mapping[str, Any], name: str, first: type, second: type) -> Any:
    value = carried.get(name)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise PlanError(f"{NAME}.{name} is a pair; {value!r} was given.")
    if not isinstance(value[0], first) or not isinstance(value[1], second):
        raise PlanError(f"{NAME}.{name} is [{first.__name__}, {second.__name__}]; {value!r} was given.")
    return tuple(value)


def has_open_names(plan: Plan) -> bool:
    """Whether it names vectors without saying which content was meant."""
    return any(isinstance(value, Named) and value.digest is None for value in _values(plan))


def may_be_gone(plan: Plan) -> bool:
    """Whether it needs what can be deleted until its request begins: named vectors, recorded runs."""
    return any(isinstance(value, (Named, RecordedRun)) for value in _values(plan))


def _values(plan: Plan) -> Iterator[Any]:
    """The vectors, runs and masks of its edits."""
    return (value for edit in plan.edits for _, value in edit.values())
