"""Makes the plan host of a worker: points, widths, tables, hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn
from vllm.config import CompilationMode
from vllm.distributed import get_pp_group, get_tp_group

from midstream.arch import Architecture
from midstream.engine.unsupported import has_graphs
from midstream.plan.checks import ModelFacts
from midstream.ranks.link import Link, exchange_in
from midstream.ranks.tensor import TensorParallel
from midstream.runtime.captures import CaptureSender, LocalSinks
from midstream.runtime.cpu_tables import TwinTables
from midstream.runtime.pipeline import Pipeline
from midstream.runtime.plan_host import PlanHost
from midstream.runtime.points import PointHooks, points_of
from midstream.runtime.tables import DeviceTables, Tables
from midstream.settings import Settings
from midstream.sites import Point
from midstream.trace.remote import ALONE
from midstream.transport.sender import Sender


def make_plan_host(
    worker: Any,
    arch: Architecture,
    settings: Settings,
    built_in: Collection[Point],
    sender: Callable[[], Sender | None],
    link: Link | None = None,
    tensor: TensorParallel | None = None,
) -> PlanHost:
    """The plan host of a vLLM worker whose model is loaded. All ranks of a pipeline make theirs together.

    Args:
        arch: of this rank's part of the model.
        link: to the other stages, if there are any.
        tensor: the tensor-parallel ranks, if there are several.
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
        behind_all_reduce = tensor is not None
        tables = DeviceTables(points, _most_rows(config), worker.device, early_launch=not behind_all_reduce)
    else:
        tables = TwinTables(points, worker.device)
    place = (stage, pipeline.size)
    local = partial(LocalSinks, config.instance_id, arch.num_layers, pipeline.layers, place)
    return PlanHost(
        tables,
        PointHooks(model, arch, built_in, tables, tensor or ALONE),
        facts,
        pipeline,
        link=link,
        compiles=_compiles(config),
        device=worker.device,
        dtype=config.model_config.dtype,
        record_bytes=settings.record_bytes,
        captures=CaptureSender(sender, local, stage, speaks=first_of_stage),
        speculative=config.speculative_config is not None,
    )


def _compiles(config: Any) -> bool:
    """Whether steps run compiled code or graphs, which hooks outside of them are not part of."""
    return has_graphs(config) or config.compilation_config.mode != CompilationMode.NONE


def _most_rows(config: Any) -> int:
    """The most rows that a batch has, with padding to a graph's size."""
    largest_graph = config.compilation_config.max_cudagraph_capture_size or 0
    return max(config.scheduler_config.max_num_batched_tokens, largest_graph, config.scheduler_config.max_num_seqs) + 8
