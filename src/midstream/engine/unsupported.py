"""Engines whose steps would pass traces and plans by without a word, or show them parts of a batch: they do not start."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode

from midstream.errors import MidstreamError


def refuse_unsupported(config: Any) -> None:
    """Raise MidstreamError for a vLLM config under which midstream cannot keep its word."""
    parallel, compilation = config.parallel_config, config.compilation_config
    if parallel.use_ubatching:
        raise MidstreamError("midstream needs a step's batch whole; start the engine without dual batch overlap.")
    if parallel.prefill_context_parallel_size > 1:
        raise MidstreamError(
            "midstream needs each prompt whole on a rank; start the engine with prefill_context_parallel_size=1."
        )
    if getattr(compilation.pass_config, "enable_sp", None):
        raise MidstreamError(
            "With sequence parallelism each rank has a part of the residual stream's rows, and midstream needs them all; start the "
            "engine with compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}."
        )
    if parallel.use_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):  # vLLM 0.33 has no older one
        raise MidstreamError(
            "vLLM's older Ray executor runs the model past its worker, so plans and traces would do nothing. Set "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1."
        )
    if has_graphs(config) and is_breakable_cudagraph_enabled():
        raise MidstreamError(
            "Breakable CUDA graphs hold no sites, so plans and traces would do nothing. Set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or "
            "start the engine with enforce_eager=True."
        )


def has_graphs(config: Any) -> bool:
    """Whether the engine replays CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
