"""A `LanguageModel` whose blocks run on copies, as on an engine, and whose results are sent as an engine sends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import midstream
from midstream.requests.invokes import Invoke, InvokeResult
from midstream.trace.shipping import ship, unship
from midstream.trace.tracer import BodyTracer
from midstream.trace.weights import on_device
from midstream.transport.messages import pack, unpack


class CopiedModel(midstream.LanguageModel):
    """As `LanguageModel`, with copies."""

    def __midstream_reference__(self) -> Any:
        return ("model",)

    def _on_copies(self, invokes: list[Invoke]) -> list[Invoke]:
        code = ship([[] if each.program is None else [each.program] for each in invokes])
        held = {digest: on_device(weight.data, None) for digest, weight in code.weights.items()}
        programs = unship(code.programs, lambda to: self if to == ("model",) else BodyTracer(), None, held)
        return [replace(each, program=own[0] if own else None) for each, own in zip(invokes, programs, strict=True)]

    def _result(self, each: Any) -> InvokeResult:
        result = super()._result(each)
        packed = pack(result.outcomes)
        return replace(result, outcomes=unpack(packed.body, [tensor.clone() for tensor in packed.tensors]))
