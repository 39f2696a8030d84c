"""Engine settings, which travel in vLLM's `additional_config`.

They are part of vLLM's config hash, and so of the compile cache's key: nothing that differs from start to start belongs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from midstream.errors import UnknownSiteError

NAME = "midstream"
WORKER = "midstream.engine.worker.Worker"
SCHEDULER = "midstream.engine.scheduler.make_scheduler"
RECORD_BYTES = 1 << 30
WEIGHT_BYTES = 1 << 30
TRACE_SHARE = 0.2
# At these sites a write in place changes all of the later forward pass and nothing else.
BUILDABLE = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


@dataclass(frozen=True)
class Settings:
    """Engine settings.

    Attributes:
        allow_traces: whether requests may carry code.
        rename: other names of the model's modules.
        graph_sites: sites built into the compiled forward; traces and plans that keep to them need no uncompiled step.
        record_bytes: how much of the workers' memory recorded runs may take.
        weight_bytes: how much of it the weights that traces have used may take.
        trace_share: of the engine's time, what requests with a trace in the forward get while there are others; 1: they share steps.
        plan: a plan for every request, as JSON.

    Raises:
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
        ValueError: `trace_share` is not above 0 and at most 1.
    """

    allow_traces: bool = False
    rename: dict[str, Any] = field(default_factory=dict)
    graph_sites: tuple[str, ...] = ("resid_post",)
    record_bytes: int = RECORD_BYTES
    weight_bytes: int = WEIGHT_BYTES
    trace_share: float = TRACE_SHARE
    plan: str | None = None

    def __post_init__(self) -> None:
        for site in self.graph_sites:
            if site not in BUILDABLE:
                raise UnknownSiteError(f"graph_sites has {site!r}; what can be built in is: {', '.join(BUILDABLE)}.")

        if not 0 < self.trace_share <= 1:
            raise ValueError(f"trace_share is {self.trace_share!r}; it is above 0 and at most 1.")

    def to_config(self, additional: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {**(additional or {}), NAME: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        additional = vllm_config.additional_config
        return cls(**additional.get(NAME, {})) if isinstance(additional, Mapping) else cls()


def is_ours(request: Any) -> bool:
    """Whether a request, as the scheduler or a worker has it, carries a trace or a plan."""
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(NAME) is not None
