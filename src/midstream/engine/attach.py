"""What follows from an engine's configuration: whether midstream can run on it, and the plan host of its workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import vllm.envs as envs
from torch import nn
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed import get_pp_group, get_tp_group

from midstream.arch import Architecture
from midstream.errors import MidstreamError
from midstream.plan.checks import ModelFacts
from midstream.ranks.link import Link, exchange_in
from midstream.ranks.tensor import TensorParallel
from midstream.runtime.captures import CaptureSender, LocalSinks
from midstream.runtime.cpu_tables import CpuTables
from midstream.runtime.pipeline import Pipeline
from midstream.runtime.plan_host import PlanHost
from midstream.runtime.points import PointHooks, points_of
from midstream.runtime.tables import DeviceTables, Tables
from midstream.settings import Settings
from midstream.sites import Point
from midstream.trace.remote import ALONE
from midstream.transport.sender import Sender


def refuse_unsupported(config: Any) -> None:
    """Raise MidstreamError for a vLLM config under which plans and traces would do nothing, or see only part of a batch."""
    parallel, compilation = config.parallel_config, config.compilation_config
    if parallel.use_ubatching:
        raise MidstreamError(
            "Dual batch overlap splits a step's batch, and midstream needs all of it. Start the engine without dual batch overlap."
        )
    if parallel.prefill_context_parallel_size > 1:
        raise MidstreamError(
            "Prefill context parallelism splits prompts over ranks, and midstream needs each prompt on one rank. Start the engine with "
            "prefill_context_parallel_size=1."
        )
    if getattr(compilation.pass_config, "enable_sp", None):
        raise MidstreamError(
            "With sequence parallelism each rank has only some of the residual stream's rows, and midstream needs all of them. Start the "
            "engine with compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}."
        )
    if parallel.use_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):  # 0.33 has no older executor
        raise MidstreamError(
            "vLLM's older Ray executor runs the model without calling midstream's worker, so plans and traces would do nothing. Set "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1."
        )
    if has_graphs(config) and is_breakable_cudagraph_enabled():
        raise MidstreamError(
            "Breakable CUDA graphs have no sites in them, so plans and traces would do nothing. Set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or "
            "start the engine with enforce_eager=True."
        )


def has_graphs(config: Any) -> bool:
    """Whether the engine replays CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def compiles(config: Any) -> bool:
    """Whether steps run compiled code or CUDA graphs, which hooks that are added later are not part of."""
    return has_graphs(config) or config.compilation_config.mode != CompilationMode.NONE


def make_plan_host(
    worker: Any,
    arch: Architecture,
    settings: Settings,
    built_in: Collection[Point],
    sender: Callable[[], Sender | None],
    link: Link | None = None,
    tensor_ranks: TensorParallel | None = None,
) -> PlanHost:
    """The plan host of a vLLM worker whose model is loaded. All ranks of a pipeline have to call this together.

    Args:
        arch: the sites of this rank's part of the model.
        built_in: the points that are built into the compiled forward.
        sender: returns the connection to the client, or None while there is none.
        link: the connection to the other stages, if there are any.
        tensor_ranks: the tensor-parallel ranks, if there are several.
    """
    config = worker.vllm_config
    model: nn.Module = worker.model_runner.get_model()
    stage, first_of_stage = get_pp_group().rank_in_group, get_tp_group().rank_in_group == 0
    points = points_of(arch)
    widths = {point: arch.widths[point] for point in points}
    pipeline = Pipeline.gathered(stage, widths, built_in, exchange_in(get_pp_group()))
    facts = ModelFacts(arch.num_layers, pipeline.widths, str(config.model_config.dtype).removeprefix("torch."))
    tables: Tables
    if worker.device.type == "cuda":
        behind_all_reduce = tensor_ranks is not None
        tables = DeviceTables(points, _most_rows(config), worker.device, early_launch=not behind_all_reduce)
    else:
        tables = CpuTables(points, worker.device)
    place = (stage, pipeline.size)
    local = partial(LocalSinks, config.instance_id, arch.num_layers, pipeline.layers, place)
    return PlanHost(
        tables,
        PointHooks(model, arch, built_in, tables, tensor_ranks or ALONE),
        facts,
        pipeline,
        link=link,
        compiles=compiles(config),
        device=worker.device,
        dtype=config.model_config.dtype,
        record_bytes=settings.record_bytes,
        captures=CaptureSender(sender, local, stage, speaks=first_of_stage),
        speculative=config.speculative_config is not None,
    )


def _most_rows(config: Any) -> int:
    """The largest number of rows of a batch, with padding to a graph's size."""
    largest_graph = config.compilation_config.max_cudagraph_capture_size or 0
    return max(config.scheduler_config.max_num_batched_tokens, largest_graph, config.scheduler_config.max_num_seqs) + 8
