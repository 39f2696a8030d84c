"""Engine settings, which travel in vLLM's `additional_config`.

They are part of vLLM's config hash, and therefore of the key of its compile cache. So their values must be the same at every start.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from midstream.errors import UnknownSiteError

NAME = "midstream"
WORKER = "midstream.engine.worker.Worker"
SCHEDULER = "midstream.engine.scheduler.make_scheduler"
RECORD_BYTES = 1 << 30
WEIGHT_BYTES = 1 << 30
TRACE_SHARE = 0.2
GRAPH_BYTES = 1 << 30
# At these sites a write in place changes all of the later forward pass and nothing else.
BUILDABLE = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
# vLLM fuses the sum over the ranks with the norm after it, unless a site lies between them.
_WITH_SEVERAL_RANKS = ("resid_post",)


@dataclass(frozen=True)
class Settings:
    """Engine settings.

    Attributes:
        allow_traces: whether requests may carry code.
        rename: other names of the model's modules.
        graph_sites: sites built into the compiled forward of an engine with tensor parallelism; other engines build in all possible ones.
        record_bytes: how much of the workers' memory recorded runs may take.
        weight_bytes: how much of the workers' memory the weights that traces have used may take.
        trace_share: the share of the engine's time for requests with a trace in the forward, while there are other requests; with 1, all
            requests share steps.
        graph_bytes: how much of the memory CUDA graphs with plans may take.
        plan: a plan for every request, as JSON.
        saes: of a server: name -> the directory of a sparse autoencoder.
        vector_files: of a server: safetensors files of named vectors.
        plan_file: of a server: the JSON file of the engine-wide plan with which it starts.

    Raises:
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
        ValueError: `trace_share` is not above 0 and at most 1.
    """

    allow_traces: bool = False
    rename: dict[str, Any] = field(default_factory=dict)
    graph_sites: tuple[str, ...] = _WITH_SEVERAL_RANKS
    record_bytes: int = RECORD_BYTES
    weight_bytes: int = WEIGHT_BYTES
    trace_share: float = TRACE_SHARE
    graph_bytes: int = GRAPH_BYTES
    plan: str | None = None
    saes: dict[str, str] = field(default_factory=dict)
    vector_files: tuple[str, ...] = ()
    plan_file: str | None = None

    def __post_init__(self) -> None:
        for site in self.graph_sites:
            if site not in BUILDABLE:
                raise UnknownSiteError(f"graph_sites has {site!r}; allowed: {', '.join(BUILDABLE)}.")

        if not 0 < self.trace_share <= 1:
            raise ValueError(f"trace_share is {self.trace_share!r}; it is above 0 and at most 1.")

    def sites_in_graphs(self, tensor_ranks: int) -> tuple[str, ...]:
        """The sites to build into the compiled forward."""
        return self.graph_sites if tensor_ranks > 1 else BUILDABLE

    def to_config(self, additional: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {**(additional or {}), NAME: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        additional = vllm_config.additional_config
        return cls(**additional.get(NAME, {})) if isinstance(additional, Mapping) else cls()


def chosen_graph_sites(given: Sequence[str] | None, tensor_ranks: int | None = None) -> tuple[str, ...]:
    """The setting `graph_sites` for a caller's argument. Warns where it has no effect.

    Args:
        given: None for the default.
        tensor_ranks: the engine's number of ranks; None if it is unknown here.

    Raises:
        UnknownSiteError: a site that cannot be built in.
    """
    if given is None:
        return _WITH_SEVERAL_RANKS
    Settings(graph_sites=tuple(given))  # raises for an unknown site
    if tensor_ranks is None or tensor_ranks == 1:
        warnings.warn(
            "graph_sites has no effect without tensor parallelism: all sites that can be in the compiled forward and its CUDA graphs are "
            "there. Leave it out.",
            DeprecationWarning,
            stacklevel=3,
        )
    return _WITH_SEVERAL_RANKS if tensor_ranks == 1 else tuple(given)


def is_ours(request: Any) -> bool:
    """Whether a request, in the scheduler's or a worker's form, carries a trace or a plan."""
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(NAME) is not None
