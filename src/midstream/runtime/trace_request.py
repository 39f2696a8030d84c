"""What a traced request carries in `SamplingParams.extra_args`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from midstream.settings import NAME

# Below this, every request of a trace carries the trace's code, so that the order in which they arrive does not matter.
SMALL = 1 << 20
_SUFFIX = re.compile("-[0-9a-f]{8}$")


class Envelope(dict[str, Any]):
    """What midstream's own clients put into `extra_args`. Its type is what it is known by: JSON becomes plain dicts."""


def users_id(engine_id: str) -> str:
    """A request's id as its user knows it: vLLM puts a dash and eight random digits to its end. Samples are `0_ID`, `1_ID`, ..."""
    return _SUFFIX.sub("", engine_id)


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        trace: the trace's id; with `index` the address of the results.
        index: which of the trace's lists of programs is this request's.
        size: how many requests the trace has, each sample of `n > 1` counted.
        bodies: how many of its programs are this request's: standing edits, then its own.
        together: whether all of them must be in the same steps.
        graph_sites: whether its code keeps to sites that are built into the compiled forward.
        programs: the pickled programs; None if another request of the trace carries them.
        stream: whether the worker sends after each step what has been saved so far.
    """

    trace: str
    index: int
    size: int
    bodies: int
    together: bool
    graph_sites: bool
    programs: bytes | None
    stream: bool = False

    def to_extra_args(self) -> dict[str, Any]:
        return {NAME: Envelope(trace=asdict(self))}

    @classmethod
    def of(cls, sampling_params: Any) -> TraceRequest | None:
        """The trace that a request carries. None also for what is none: `admission` refuses such."""
        carried = (getattr(sampling_params, "extra_args", None) or {}).get(NAME)
        if not isinstance(carried, Mapping) or "trace" not in carried:
            return None
        try:
            return msgspec.convert(carried["trace"], cls, builtin_types=(bytes,))
        except msgspec.ValidationError:
            return None


def requests_of(
    programs: bytes,
    bodies: list[int],
    graph_sites: list[bool],
    samples: list[int],
    together: bool,
    stream: bool = False,
) -> list[TraceRequest]:
    """The requests of one trace; `samples` has the `n` of each."""
    trace, size = secrets.token_hex(8), sum(samples)
    small = len(programs) * size <= SMALL
    return [
        TraceRequest(trace, i, size, count, together, keeps, programs if small or i == 0 else None, stream)
        for i, (count, keeps) in enumerate(zip(bodies, graph_sites, strict=True))
    ]
