"""Makes the plan host of a worker: points, widths, tables, hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from midstream.arch import Architecture
from midstream.engine.plans.host import PlanHost
from midstream.engine.plans.local import LocalSinks
from midstream.engine.plans.outlet import Outlet
from midstream.engine.plans.points import PointHooks, points_of
from midstream.engine.plans.tables import DeviceTables, Tables, TwinTables
from midstream.engine.sender import Sender
from midstream.engine.settings import Settings
from midstream.plan.checks import ModelFacts
from midstream.sites import Point


def make_plan_host(
    worker: Any,
    arch: Architecture,
    settings: Settings,
    built_in: Collection[Point],
    sender: Callable[[], Sender | None],
) -> PlanHost:
    """The plan host of a vLLM worker whose model is loaded."""
    config = worker.vllm_config
    points = points_of(arch)
    dtype = config.model_config.dtype
    facts = ModelFacts(
        arch.num_layers, {point: arch.widths[point] for point in points}, str(dtype).removeprefix("torch.")
    )
    rows = _most_rows(config)
    on_gpu = worker.device.type == "cuda"
    tables: Tables = (DeviceTables if on_gpu else TwinTables)(points, rows, worker.device)
    model: nn.Module = worker.model_runner.get_model()
    return PlanHost(
        tables,
        PointHooks(model, arch, built_in, tables.edit),
        built_in,
        facts,
        device=worker.device,
        dtype=dtype,
        rows=rows,
        record_bytes=settings.record_bytes,
        outlet=Outlet(sender, lambda: LocalSinks(config.instance_id, arch.num_layers)),
        speculative=config.speculative_config is not None,
    )


def _most_rows(config: Any) -> int:
    """The most rows that a batch has, with padding to a graph's size."""
    largest_graph = config.compilation_config.max_cudagraph_capture_size or 0
    return max(config.scheduler_config.max_num_batched_tokens, largest_graph, config.scheduler_config.max_num_seqs) + 8
