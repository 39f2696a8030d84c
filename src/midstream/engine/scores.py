"""Takes the scores of probes off the outputs of vLLM's engine, and puts them on the samples that vLLM's front end makes of these.

An output of the engine has no field for them, so they travel under a key of its `kv_transfer_params`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream.plan.probes import ScoreChunk
from midstream.settings import NAME


def taking_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `OutputProcessor.process_outputs` that keeps the scores of each request."""

    def process_outputs(self: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.kv_transfer_params and NAME in output.kv_transfer_params:
                chunks = output.kv_transfer_params.pop(NAME)
                output.kv_transfer_params = output.kv_transfer_params or None
                if (state := self.request_states.get(output.request_id)) is not None:
                    _of(state).extend(map(tuple, chunks))
        return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def putting_scores(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `RequestState._new_completion_output` whose sample has the scores that have come.

    vLLM merges outputs that nobody has read in time, and keeps the attributes of one of them: so all have one list, which grows.
    """

    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        sample = original(self, *args, **kwargs)
        sample.midstream = _of(self)
        return sample

    return new_completion_output


def _of(state: Any) -> list[ScoreChunk]:
    """The scores that have come for a request in vLLM's front end."""
    if not hasattr(state, "midstream"):
        state.midstream = []
    return state.midstream  # type: ignore[no-any-return]
