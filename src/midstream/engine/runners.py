"""Adapters to vLLM's two model runners. All differences between V1 and V2 are in this file.

An adapter calls the host when a batch has been laid out, hands it logits and samples, and runs a dummy forward to probe the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from vllm.compilation import monitor
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from midstream import hooks
from midstream.arch.probe import planted_embedding
from midstream.engine.graphs import (
    ENTRIES,
    NOTHING,
    Acting,
    ActingGraphs,
    Kernel,
    PiecewiseGraphs,
    StepMode,
    remembering_streams,
)
from midstream.engine.plugin import Replacement, apply_replacements
from midstream.engine.seams import Role
from midstream.errors import ArchitectureError
from midstream.runtime.plan_host import PlanHost
from midstream.runtime.trace_host import TraceHost
from midstream.trace.batch_rows import BatchLayout

_COMPUTE_LOGITS = "vllm.model_executor.models.interfaces_base.VllmModelForTextGeneration.compute_logits"


class Watch(IntEnum):
    """When the adapter calls the host in a step."""

    NOTHING = 0  # never: the step runs only vLLM's code
    ROWS = 1  # when a batch has been laid out
    ALL = 2  # for logits and samples as well


class Host:
    """The traces and plans of a worker, as the adapters call them."""

    def __init__(self, traces: TraceHost, plans: PlanHost) -> None:
        self._traces, self._plans = traces, plans
        self.is_prepared = plans.is_prepared
        self.see_logits, self.see_samples = traces.see_logits, traces.see_samples

    @property
    def step_is_traced(self) -> bool:
        return self._traces.step_is_traced

    def begin_step(self, layout: BatchLayout) -> None:
        if self._plans.step_is_planned:
            self._plans.begin_step(layout)
        if self._traces.step_is_traced:
            self._traces.begin_step(layout, self._plans.take_rows)


class Runner:
    """One of vLLM's model runners."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model: nn.Module = runner.get_model()
        self.piecewise = PiecewiseGraphs()
        self.graphs: ActingGraphs | None = None  # set by `hold_graphs`
        self._watching: list[tuple[Watch, Replacement]] = []
        self.watched = Watch.NOTHING

    def connect(self, host: Host) -> None:
        """Call the host in watched steps; for logits and samples only if it says that the step is traced."""
        raise NotImplementedError

    def prepare(self, watched: Watch, acting: Acting = NOTHING, has_strangers: bool = False) -> None:
        """Prepare the coming step. `acting` and `has_strangers` are those of `ActingGraphs.begin_step`."""
        if self.graphs is not None and self.graphs.begin_step(acting, has_strangers):
            self.watch(Watch.NOTHING)  # vLLM records by steps of its own
            self.graphs.record_due()
        self.watch(watched)

    def end_step(self) -> None:
        """To be called when the forward is queued."""
        if self.graphs is not None:
            self.graphs.end_step()

    def watch(self, what: Watch) -> None:
        """Choose when the host is called from now on."""
        if what is self.watched:
            return
        for level, replacement in self._watching:
            if (level <= what) is not (level <= self.watched):
                replacement.switch(level <= what)
        self.watched = what

    def _replace_while(self, level: Watch, target: str, owner: Any, ours: Callable[..., Any]) -> None:
        """Replace a method of `owner` while `level` or more is watched."""
        self._watching.append((level, Replacement(target, owner, ours)))

    def hold_graphs(
        self,
        limit: int,
        kernel: Callable[[Acting], Kernel | None],
        acts: Callable[[int], bool],
        at_start: Acting = NOTHING,
    ) -> None:
        """Keep graphs in which plans act. To be called before vLLM records its own.

        Args:
            limit, kernel, acts: as for `ActingGraphs`.
            at_start: the sites of the only set of graphs, which is recorded together with vLLM's own. If empty, graphs are recorded later.
        """
        full = self._full_graphs()
        self.graphs = ActingGraphs(limit, kernel, acts, self._record, full, self.piecewise, fixed=at_start or None)
        self._watch_recording(self.graphs)

    def gauges(self) -> dict[str, int]:
        """The gauges of `ActingGraphs`; zeros for an engine without graphs."""
        none = dict.fromkeys(("graphs", "graph_bytes", "graph_recordings", "recording_failures"), 0)
        return self.graphs.gauges() if self.graphs is not None else none

    def _full_graphs(self) -> tuple[str, Any] | None:
        """The attribute, and the object, in which vLLM looks for full graphs."""
        raise NotImplementedError

    def _watch_recording(self, graphs: ActingGraphs) -> None:
        """While vLLM records its graphs: measure their size, and record `graphs` too if they are recorded at the start."""
        raise NotImplementedError

    def _record(self, kind: str, descriptor: Any) -> None:
        """Have vLLM record one full graph, or the piecewise graphs of one batch, while requests are alive.

        vLLM runs the forward once or twice on dummy tokens, which write to no slot of the KV cache. The buffers that it fills are filled
        again for each step.
        """
        raise NotImplementedError

    def _measured(self, target: str, graphs: ActingGraphs, count: Callable[[], int]) -> None:
        """Have `graphs` measure the size of a graph when the runner records its `count` graphs."""
        capture = self.runner.capture_model

        def capture_model(*args: Any, **kwargs: Any) -> int:
            with remembering_streams():
                taken: int = capture(*args, **kwargs)
            graphs.measure(taken, count() * (2 if graphs.fixed is not None else 1))
            return taken

        Replacement(target, self.runner, capture_model).switch(True)

    def has_recurrent_layers(self) -> bool:
        """Whether layers have state other than KV of attention. A forward on dummy tokens would change such state."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        each = [s for spec in specs for s in getattr(spec, "kv_cache_specs", {"": spec}).values()]
        return not all(isinstance(spec, AttentionSpec) for spec in each)

    def batch(self) -> tuple[Sequence[str], torch.Tensor | None]:
        """The requests of the step that has just been queued, in the order of their rows, and the rows at the forward's end, `[T, H]`.

        The rows are None where the forward ends on another rank.
        """
        raise NotImplementedError

    def prepare_clearing(self) -> None:
        """Make the runner clear the scheduler's list of KV blocks in all layers.

        vLLM prepares this only for models with Mamba layers, and leaves out layers with sliding windows: on GPUs up to 0.26 at least, and
        on the CPU in 0.32 as well.
        """
        config, context = self.runner.kv_cache_config, self.runner.compilation_config.static_forward_context
        try:
            clear, cleared = self._vllms_clearing(), FullAttentionSpec
        except AssertionError:  # for example, pages of several sizes
            clear, cleared = lambda block_ids: None, ()
        left_out = {
            name: context[name].kv_cache
            for group in config.kv_cache_groups
            if not isinstance(group.kv_cache_spec, cleared)
            for name in group.layer_names
        }
        blocks = [
            _blocks_of(name, kv, config.num_blocks) for name, kv in left_out.items() if isinstance(kv, torch.Tensor)
        ]

        def clear_all(block_ids: list[int]) -> None:
            clear(block_ids)
            for kv, axis in blocks:
                kv.index_fill_(axis, torch.tensor(block_ids, device=kv.device), 0)

        if blocks:
            self._clear_by(clear_all)

    def _vllms_clearing(self) -> Callable[[list[int]], None]:
        """vLLM's function that clears blocks, ready to be called. Raises AssertionError for a cache that it cannot clear."""
        raise NotImplementedError

    def _clear_by(self, clear: Callable[[list[int]], None]) -> None:
        """Make the runner call `clear` instead of its own function."""
        raise NotImplementedError

    def probe(self, tokens: int) -> None:
        """Run one forward over `tokens` dummy tokens, uncompiled and without attention."""
        planted: list[torch.Tensor] = []

        def plant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Fill a later pipeline stage's input. vLLM's dummy input is zero, so all values of the forward would be zero, too."""
            handed = kwargs.get("intermediate_tensors")
            planted.extend(tensor for _, tensor in (handed.items() if handed is not None else ()))
            for number, tensor in enumerate(planted, start=1):
                tensor.copy_(planted_embedding(tensor) * number)

        hook = hooks.before(self.model, plant)
        StepMode.set(no_full_graph=True, no_graphs=True, uncompiled=True)
        try:
            self._dummy_run(tokens)
        finally:
            StepMode.set()
            hook.remove()
            for tensor in planted:
                tensor.zero_()

    def _dummy_run(self, tokens: int) -> None:
        raise NotImplementedError

    def _watch_logits(self, host: Host) -> None:
        compute: Any = self.model.compute_logits

        def compute_logits(hidden_RH: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # A request whose values are not finite ends after this step. But some samplers return an invalid token id for NaN logits, and
            # the next step, which is already scheduled, would look it up.
            hidden_RH = torch.nan_to_num(hidden_RH, 0.0, 0.0, 0.0)
            logits = compute(hidden_RH, *args, **kwargs)
            watches = self.watched is Watch.ALL and host.step_is_traced
            return host.see_logits(logits) if watches and logits is not None else logits

        self._replace_while(Watch.ROWS, _COMPUTE_LOGITS, self.model, compute_logits)

    def _watch_samples(self, host: Host, target: str) -> None:
        sample = getattr(self.runner, target.rpartition(".")[2])

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if host.step_is_traced:
                samples_R = (output[0] if isinstance(output, tuple) else output).sampled_token_ids[:, 0]
                changed_R = host.see_samples(samples_R)
                if changed_R is not samples_R:
                    samples_R.copy_(changed_R)
            return output

        self._replace_while(Watch.ALL, target, self.runner, sample_tokens)


class V1Runner(Runner):
    """`vllm.v1.worker.gpu_model_runner`, which the CPU uses as well."""

    _RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"

    def _dummy_run(self, tokens: int) -> None:
        self.runner._dummy_run(tokens, is_profile=True)

    def batch(self) -> tuple[Sequence[str], torch.Tensor | None]:
        state = self.runner.execute_model_state
        return list(self.runner.input_batch.req_ids), state.hidden_states if state is not None else None

    def _vllms_clearing(self) -> Callable[[list[int]], None]:
        if self.runner.device.type != "cpu" and not hasattr(self.runner, "_kv_block_zeroer"):
            self.runner._init_kv_zero_meta()
        return self.runner._zero_block_ids  # type: ignore[no-any-return]

    def _clear_by(self, clear: Callable[[list[int]], None]) -> None:
        Replacement(f"{self._RUNNER}._zero_block_ids", self.runner, clear).switch(True)

    def connect(self, host: Host) -> None:
        runner, dispatcher = self.runner, self.runner.cudagraph_dispatcher
        determine, dispatch = runner._determine_batch_execution_and_padding, dispatcher.dispatch

        def determine_batch(*args: Any, **kwargs: Any) -> Any:
            if StepMode.no_graphs:
                kwargs["force_eager"] = True
            determined = determine(*args, **kwargs)
            batch, total = runner.input_batch, determined[1].num_tokens
            if not host.is_prepared(batch.req_ids, total):
                counts = kwargs["num_scheduled_tokens_np"]
                computed = batch.num_computed_tokens_cpu[: len(counts)]
                host.begin_step(BatchLayout(batch.req_ids, counts, computed, total))
            return determined

        def dispatch_cudagraph(*args: Any, **kwargs: Any) -> Any:
            if not StepMode.no_full_graph:
                mode, descriptor = dispatch(*args, **kwargs)
                if self._may_replay(mode, descriptor) or mode != CUDAGraphMode.FULL:
                    return mode, descriptor
            kwargs["invalid_modes"] = {CUDAGraphMode.FULL, *(kwargs.get("invalid_modes") or ())}
            mode, descriptor = dispatch(*args, **kwargs)
            self._may_replay(mode, descriptor)
            return mode, descriptor

        target = f"{self._RUNNER}._determine_batch_execution_and_padding"
        self._replace_while(Watch.ROWS, target, runner, determine_batch)
        target = "vllm.v1.cudagraph_dispatcher.CudagraphDispatcher.dispatch"
        self._replace_while(Watch.ROWS, target, dispatcher, dispatch_cudagraph)
        self._watch_samples(host, f"{self._RUNNER}._sample")
        self._watch_logits(host)
        self._keep_top_logprobs()

    def _keep_top_logprobs(self) -> None:
        """Give requests their likeliest tokens in a step in which another request grades answers.

        In such a step, vLLM's V1 runner gathers the answers' log-probabilities for all requests. The V2 runner serves each request its own.
        """
        runner, sampler = self.runner, self.runner.sampler
        original = sampler.gather_specific_token_logprobs

        def gather_specific_token_logprobs(
            logprobs: torch.Tensor, logprob_token_ids: Mapping[int, Sequence[int]], sampled: torch.Tensor
        ) -> Any:
            found, count = original(logprobs, logprob_token_ids, sampled), runner.input_batch.max_num_logprobs
            if not count or count < 0 or len(logprob_token_ids) == len(sampled):
                return found
            top = sampler.gather_logprobs(logprobs, count, token_ids=sampled)
            graded_B1 = torch.zeros(len(sampled), 1, dtype=torch.bool)
            graded_B1[list(logprob_token_ids)] = True
            graded_B1 = graded_B1.to(sampled.device, non_blocking=True)
            width = max(found.logprobs.shape[1], top.logprobs.shape[1])

            def merged(graded: torch.Tensor, others: torch.Tensor, filling: float) -> torch.Tensor:
                wide = [pad(each, (0, width - each.shape[1]), value=filling) for each in (graded, others)]
                return torch.where(graded_B1, wide[0], wide[1])

            return found._replace(
                logprob_token_ids=merged(found.logprob_token_ids, top.logprob_token_ids, 0),
                logprobs=merged(found.logprobs, top.logprobs, float("-inf")),
            )

        target = "vllm.v1.sample.sampler.Sampler.gather_specific_token_logprobs"
        Replacement(target, sampler, gather_specific_token_logprobs).switch(True)

    def _may_replay(self, mode: Any, descriptor: Any) -> bool:
        return self.graphs is None or self.graphs.choose(mode.name, descriptor)

    def _full_graphs(self) -> tuple[str, Any] | None:
        model = self.runner.model
        return (ENTRIES, model) if isinstance(model, CUDAGraphWrapper) else None

    def _watch_recording(self, graphs: ActingGraphs) -> None:
        runner = self.runner
        self._measured(f"{self._RUNNER}.capture_model", graphs, self._count_graphs)
        if (fixed := graphs.fixed) is None:
            return
        capture = runner._capture_cudagraphs

        def capture_twice(*args: Any, **kwargs: Any) -> None:
            capture(*args, **kwargs)
            with graphs.recording(fixed):
                capture(*args, **kwargs)

        Replacement(f"{self._RUNNER}._capture_cudagraphs", runner, capture_twice).switch(True)

    def _count_graphs(self) -> int:
        return sum(len(descriptors) for _, descriptors in self.runner.cudagraph_dispatcher.get_capture_descs())

    def _record(self, kind: str, descriptor: Any) -> None:
        runner = self.runner
        requests = Replacement(f"{self._RUNNER}.input_batch", runner, _NoRequests(runner.input_batch))
        allowed = Replacement("vllm.compilation.monitor.cudagraph_capturing_enabled", monitor, True)
        with graph_capture(device=runner.device), requests, allowed:
            runner._warmup_and_capture(descriptor, CUDAGraphMode[kind])


class V2Runner(Runner):
    """`vllm.v1.worker.gpu.model_runner`."""

    _RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    _GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        apply_replacements(Role.V2_WORKER)

    def _dummy_run(self, tokens: int) -> None:
        self.runner._dummy_run(tokens, skip_attn=True, is_profile=True)

    def batch(self) -> tuple[Sequence[str], torch.Tensor | None]:
        state = self.runner.execute_model_state
        return (state.input_batch.req_ids, state.hidden_states) if state is not None else ((), None)

    def _vllms_clearing(self) -> Callable[[list[int]], None]:
        if self.runner.kv_block_zeroer is None:
            self.runner._init_kv_zero_meta()
        return self.runner.kv_block_zeroer.zero_block_ids  # type: ignore[no-any-return]

    def _clear_by(self, clear: Callable[[list[int]], None]) -> None:
        # From 0.33 on, vLLM calls `warmup` at the start to compile its kernel. This function has nothing to compile.
        zeroer = SimpleNamespace(zero_block_ids=clear, warmup=lambda num_kv_blocks: None)
        Replacement(f"{self._RUNNER}.kv_block_zeroer", self.runner, zeroer).switch(True)

    def prepare(self, watched: Watch, acting: Acting = NOTHING, has_strangers: bool = False) -> None:
        super().prepare(watched, acting, has_strangers)
        StepMode.may_replay = self._may_replay if acting and self.graphs is not None else None

    def _may_replay(self, manager: Any, kind: str, descriptor: Any) -> bool:
        """As `ActingGraphs.choose`. A speculator's graphs have no sites, so they may always be replayed."""
        assert self.graphs is not None
        return manager is not self.runner.cudagraph_manager or self.graphs.choose(kind, descriptor)

    def _full_graphs(self) -> tuple[str, Any] | None:
        return f"{self._GRAPHS}.CudaGraphManager.graphs", self.runner.cudagraph_manager

    def _watch_recording(self, graphs: ActingGraphs) -> None:
        manager = self.runner.cudagraph_manager
        capture = manager.capture

        def capture_and_remember(*args: Any, **kwargs: Any) -> None:
            self._capture = partial(capture, *args, **kwargs)
            self._capture()
            if graphs.fixed is not None:
                with graphs.recording(graphs.fixed):
                    self._capture()

        Replacement(f"{self._GRAPHS}.ModelCudaGraphManager.capture", manager, capture_and_remember).switch(True)
        count = lambda: sum(map(len, manager._capture_descs.values()))  # noqa: E731
        self._measured(f"{self._RUNNER}.capture_model", graphs, count)

    def _record(self, kind: str, descriptor: Any) -> None:
        manager, module = self.runner.cudagraph_manager, importlib.import_module(self._GRAPHS)
        wanted = {CUDAGraphMode[kind]: [descriptor]}
        one = Replacement(f"{self._GRAPHS}.CudaGraphManager._capture_descs", manager, wanted)
        quiet = Replacement(f"{self._GRAPHS}.is_global_first_rank", module, lambda: False)  # shows no progress
        with one, quiet:
            self._capture()

    def connect(self, host: Host) -> None:
        runner = self.runner
        prepare = runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if not host.is_prepared(batch.req_ids, batch.num_tokens_after_padding):
                counts = batch.num_scheduled_tokens[: batch.num_reqs]
                computed = batch.num_computed_tokens_np[: batch.num_reqs]
                host.begin_step(BatchLayout(batch.req_ids, counts, computed, batch.num_tokens_after_padding))
            return batch

        self._replace_while(Watch.ROWS, f"{self._RUNNER}.prepare_inputs", runner, prepare_inputs)
        self._watch_samples(host, f"{self._RUNNER}.sample")
        self._watch_logits(host)


def keeping_from_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `dispatch_cg_and_sync_dp` of the V2 runner that leaves out graphs that `StepMode` excludes, or that are not recorded."""

    def dispatch_cg_and_sync_dp(
        cudagraph_manager: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs["need_eager"] = kwargs.get("need_eager", False) or StepMode.no_graphs

        def may_replay(dispatched: Any) -> bool:
            chosen, asked = dispatched[0], StepMode.may_replay
            return asked is None or asked(cudagraph_manager, chosen.cg_mode.name, chosen)

        if not StepMode.no_full_graph:
            dispatched = original(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
            if may_replay(dispatched) or dispatched[0].cg_mode.name != "FULL":
                return dispatched
        # vLLM uses full graphs only for batches of decoding requests. It recognises them by these two arguments, of which 0.26 and 0.27
        # have only the first.
        if "max_query_len" in kwargs:
            kwargs["max_query_len"] = None
        dispatched = original(cudagraph_manager, num_reqs, num_tokens, None, *args, **kwargs)
        if dispatched[0].cg_mode.name == "FULL":
            kwargs["need_eager"] = True
            dispatched = original(cudagraph_manager, num_reqs, num_tokens, None, *args, **kwargs)
        may_replay(dispatched)
        return dispatched

    return dispatch_cg_and_sync_dp


class _NoRequests:
    """Hides the requests of the V1 runner's batch from the forwards on dummy tokens in which a graph is recorded.

    Such a forward builds the metadata of attention from the batch, and reads the KV blocks of the batch's first rows.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.req_ids: list[str] = []
        self.num_computed_tokens_cpu_tensor = torch.zeros_like(batch.num_computed_tokens_cpu_tensor)
        self.num_prompt_tokens_cpu_tensor = torch.zeros_like(batch.num_prompt_tokens_cpu_tensor)
        self.block_table = _NullBlocks(batch.block_table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


class _NullBlocks:
    """Block tables with block 0 everywhere, which belongs to no request. The next step uploads the requests' own tables."""

    def __init__(self, tables: Any) -> None:
        self._tables = tables

    def commit_block_table(self, num_reqs: int) -> None:
        for table in self._tables.block_tables:
            table.get_device_tensor(num_reqs).zero_()

    def __getitem__(self, group: int) -> Any:
        return self._tables[group]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)


def _blocks_of(name: str, kv: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, int]:
    """One layer's cache and its axis that counts the scheduler's blocks. Each of them may be several of the kernel's blocks.

    Raises:
        ArchitectureError: there is no such axis.
    """
    for axis, size in enumerate(kv.shape):
        if size and size % num_blocks == 0:
            return kv.unflatten(axis, (num_blocks, -1)), axis
    raise ArchitectureError(
        f"The KV cache of {name} has the shape {list(kv.shape)}, in which midstream does not find its {num_blocks} blocks; it has to clear "
        "those that plans and traces wrote to. Please report the model and the attention backend."
    )


def sparing_generators(original: Callable[..., Any]) -> Callable[..., Any]:
    """`CPUModelRunner.sample_tokens` that leaves the generators of requests with a `seed` alone while their prompts are computed.

    vLLM samples a token after each part of a prompt, drops it, and turns the generator back by an offset. A generator on the CPU has no
    offset, and the error ends the engine (0.32).
    """

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, kept = self.input_batch.generators, {}
        if generators:
            is_dropped = self.discard_request_mask.np
            kept = {row: generators.pop(row) for row in list(generators) if is_dropped[row]}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(kept)

    return sample_tokens


def adapt_runner(runner: Any) -> Runner:
    """The adapter for `runner`."""
    return V2Runner(runner) if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else V1Runner(runner)
