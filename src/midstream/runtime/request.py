"""The content of `SamplingParams.extra_args["midstream"]`: a plan, a trace or both, and the senders that may send each of them.

At the end: how the scheduler and the workers tell each other which requests have ended.

Trust depends on the origin. Only Python code in the front end's own process, midstream's or the user's, can make an `Envelope`, a `Plan`
or an intervention, so these are trusted. An HTTP request can only make strings and dicts. So strings and dicts are untrusted, wherever they
come from: they may contain a plan as data, and nothing else. `engine.admission` reads and checks them, and packs every plan. The engine
takes no other form.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from midstream.errors import PlanError
from midstream.memory import ENTRY_BYTES, ITEM_BYTES, Memory, items_in
from midstream.plan import fields
from midstream.plan.captures import Reading
from midstream.plan.compile import ScheduledPlan
from midstream.plan.probes import ProbeStop, ScoreChunk
from midstream.plan.values import Edit, Named, Plan, Vector
from midstream.settings import NAME
from midstream.trace.shipping import ShippedCode

# Below this many bytes in all, each request of a trace carries the trace's code, so that the order in which they arrive does not matter.
SMALL = 1 << 20
_RESERVED = {
    "trace",
    "scheduled",
    "num_layers",
    "capture",
    "record",
    "checked",
    "behind",
    "shares",
}  # the keys that an Envelope may have besides the plan
_SUFFIX = re.compile("-[0-9a-f]{8}$")


class Envelope(dict[str, Any]):
    """What midstream's own clients put into `extra_args`. Its type shows its origin: JSON becomes plain dicts."""


def users_id(engine_id: str) -> str:
    """A request's id as its user knows it: vLLM appends a dash and eight random digits. Samples are `0_ID`, `1_ID`, ..."""
    return _SUFFIX.sub("", engine_id)


def sample_index(request_id: str, samples: int) -> int:
    """The number of a sample: vLLM names the n samples of a request `0_ID`, `1_ID`, ..."""
    return int(request_id.partition("_")[0]) if samples > 1 else 0


def _carried(sampling_params: Any) -> Any:
    return (getattr(sampling_params, "extra_args", None) or {}).get(NAME)


# ------------------------------------------------------------------------------------------------------------ caching


def plan_bytes(plan: Plan) -> int:
    """About how many bytes a plan takes in memory."""
    total = 0
    for item in plan.interventions:
        listed = [each for each in (item.place, item.at_layers) if isinstance(each, tuple)]
        total += ENTRY_BYTES + ITEM_BYTES * sum(map(len, listed))
        for part in (item, *item.parts):
            if isinstance(part, Edit) and (program := part.its_program) is not None:
                total += program.nbytes + ITEM_BYTES * items_in(program.steps)
    return total + sum(value.data.nbytes for value in plan.values() if isinstance(value, Vector))


# ---------------------------------------------------------------------------------------------------------------- plans

_written: Memory[bytes] = Memory()
_read: Memory[Plan] = Memory()
_scheduled: Memory[bytes] = Memory()


def packed(plan: Plan) -> bytes:
    """The plan as one msgpack value, which vLLM copies and sends at no cost. Raises PlanError for what cannot be sent."""

    def size(data: bytes) -> int:
        return len(data) + plan_bytes(plan)

    def written() -> bytes:
        data = msgspec.msgpack.encode(plan.to_wire())
        _read.get(data, lambda: plan, lambda _: size(data))  # so that this process need not parse it
        return data

    return _written.get(plan, written, size)


def unpacked(data: bytes) -> Plan:
    """The plan that was packed. Raises PlanError."""
    return _read.get(data, lambda: _unpacked(data), lambda plan: len(data) + plan_bytes(plan))


def _unpacked(data: bytes) -> Plan:
    try:
        return Plan.from_packed(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"{NAME}.plan is not msgpack: {error}") from error


def given_plan(given: Any) -> tuple[Plan, bool]:
    """The plan that somebody put into `extra_args` without midstream's client, and whether it is a stranger's. Raises PlanError."""
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
    """Whether it consists of plans and interventions, which only Python code can make."""
    made = (Plan, Edit, Reading)
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(item, made) for item in given)
    return isinstance(given, made)


class PlanRequest(msgspec.Struct, frozen=True, omit_defaults=True, rename={"wire": "plan"}):
    """One planned request.

    Attributes:
        wire: the plan, packed.
        scheduled: the `ScheduledPlan`, in msgpack; set at admission, where the prompt's tokens are first known.
        num_layers: of the model, if the client knows it.
        capture: `(id, index)` of the mailbox where the client waits for captured rows. None if the rows stay in the engine, or if
            nothing is captured.
        record: `(id, name, owner)` of the recorded run that its captured rows become in the workers; None if they become none.
        checked: the client knows the model and has checked the plan.
        behind: its captured rows are for the request's trace, which runs when the step is over.
        shares: its plan comes from HTTP, so the scheduler limits its time in each step: see `engine.shares`.
    """

    wire: bytes
    num_layers: int = 0
    scheduled: bytes = b""
    capture: tuple[str, int] | None = None
    record: tuple[str, str, str] | None = None
    checked: bool = False
    behind: bool = False
    shares: bool = False

    @property
    def keeps_rows(self) -> bool:
        """Whether its captured rows stay in the worker."""
        return self.record is not None or self.behind

    def to_extra_args(self) -> dict[str, Any]:
        return {NAME: Envelope(msgspec.to_builtins(self, builtin_types=(bytes,)))}

    @property
    def plan(self) -> Plan:
        """The plan. Raises PlanError."""
        return unpacked(self.wire)

    def for_scheduler(self, prompt_length: int, num_layers: int, device: str) -> PlanRequest:
        """The request with its `scheduled`, for a prompt of this length, in tokens. Raises PlanError as `ScheduledPlan.of` does.

        Args:
            num_layers: the model's.
            device: the engine's type of device, as in "cpu".
        """
        plan, case = self.plan, (self.wire, prompt_length, num_layers, device if self.shares else None)

        def size(data: bytes) -> int:  # a name without a digest may stand for another vector the next time
            return sys.maxsize if has_open_names(plan) else len(self.wire) + len(data)

        made = _scheduled.get(case, lambda: msgspec.msgpack.encode(ScheduledPlan.of(plan, *case[1:])), size)
        return msgspec.structs.replace(self, scheduled=made)

    @classmethod
    def of(cls, sampling_params: Any) -> PlanRequest | None:
        """The plan that a request carries after admission, or in an `Envelope` before it. Raises PlanError for any other form."""
        carried = _carried(sampling_params)
        if carried is None:
            return None
        wire = carried.get("plan") if isinstance(carried, dict) else None
        if type(wire) is bytes:
            try:
                return msgspec.convert(carried, cls, builtin_types=(bytes,))
            except msgspec.ValidationError as error:
                raise PlanError(f"{NAME} is not what midstream's client sends: {error}.") from error
        if wire is None and TraceRequest.of(sampling_params) is not None:
            return None
        raise PlanError(
            f"extra_args[{NAME!r}] reached the engine without midstream's part of the front end, which reads and checks it. Load the "
            "plugin there: VLLM_PLUGINS, if it is set, has to name midstream, and the front end has to be vLLM's Python one."
        )


def share(sampling_params: Any, wire: bytes, scheduled: bytes) -> None:
    """Replace parts of a request by these equal objects: an object that many requests share is pickled for the workers only once."""
    sampling_params.extra_args[NAME].update(plan=wire, scheduled=scheduled)


def has_open_names(plan: Plan) -> bool:
    """Whether the plan names vectors without their digests."""
    return any(isinstance(value, Named) and value.digest is None for value in plan.values())


# --------------------------------------------------------------------------------------------------------------- traces


class Tier(StrEnum):
    """Where the code of a trace runs.

    Attributes:
        PLAN: nowhere: a plan does all its work.
        CLIENT: nowhere in the engine: a plan makes its writes and captures its values, and the caller's process puts the result together.
        BEHIND: in the engine, when a step is over, on captured rows; a plan makes its writes.
        FORWARD: in the forward.
    """

    PLAN = "plan"
    CLIENT = "client"
    BEHIND = "behind"
    FORWARD = "forward"


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        trace: the trace's id; with `index` the address of the results.
        index: which of the trace's lists of programs is this request's.
        size: how many requests the trace has, each sample of `n > 1` counted.
        bodies: how many of its programs are this request's: standing edits, then its own.
        together: whether all requests of the trace must be in the same steps.
        programs: the pickled programs; None if another request of the trace carries them.
        stream: whether the worker sends after each step what has been saved so far.
        tier: where its bodies run.
        keeps_to_graphs: whether its bodies are known to use only sites in the compiled forward.
    """

    trace: str
    index: int
    size: int
    bodies: int
    together: bool
    programs: bytes | None
    stream: bool = False
    tier: Tier = Tier.FORWARD
    keeps_to_graphs: bool = False

    @property
    def is_behind(self) -> bool:
        return self.tier is Tier.BEHIND

    def to_extra_args(self) -> dict[str, Any]:
        return {NAME: Envelope(trace=asdict(self))}

    @classmethod
    def of(cls, sampling_params: Any) -> TraceRequest | None:
        """The trace that a request carries, or None. Malformed ones count as none, since admission refuses them."""
        carried = _carried(sampling_params)
        if not isinstance(carried, Mapping) or "trace" not in carried:
            return None
        try:
            return msgspec.convert(carried["trace"], cls, builtin_types=(bytes,))
        except msgspec.ValidationError:
            return None


def requests_of(code: ShippedCode, samples: list[int], together: bool, stream: bool = False) -> list[TraceRequest]:
    """The requests of one trace; `samples` has the `n` of each."""
    trace, size = secrets.token_hex(8), sum(samples)
    small = len(code.programs) * size <= SMALL
    return [
        TraceRequest(trace, i, size, count, together, code.programs if small or i == 0 else None, stream)
        for i, count in enumerate(code.bodies)
    ]


# ------------------------------------------------------------------------------------------------------------------ ends


@dataclass
class StepEnds:
    """The requests and traces that end with a step. A worker sends it to the scheduler with the step's output.

    Attributes:
        stops: requests whose trace stopped them; the token of this step is their last.
        done: requests that go on without their trace, which is over.
        scores: request -> new scores of its probes.
        probe_stops: the requests that a probe has ended; the token of this step is not theirs any more.
        errors: request -> why the worker ends it: its plan cannot be carried out, or its activations are not finite.
    """

    stops: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    scores: dict[str, list[ScoreChunk]] = field(default_factory=dict)
    probe_stops: dict[str, ProbeStop] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class RequestEnd(NamedTuple):
    """The end of a request. The scheduler sends it to the workers with the next step.

    Attributes:
        tokens: how many it had, prompt included.
        error: why the engine ended it, if it did.
    """

    tokens: int
    error: str | None = None
