"""vLLM's worker, with hosts for traces and plans. vLLM's argument `worker_cls` names it."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cached_property, partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm.envs as envs
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.network_utils import get_ip
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import AsyncModelRunnerOutput

from midstream.arch import Architecture, detect, split_heads, unknown_logits
from midstream.arch.aliases import Aliases
from midstream.arch.heads import why_not_again
from midstream.engine.adapters import Adapters
from midstream.engine.graphs import NOTHING, Acting, EagerKernels, Kernel, SiteOp, StepMode, build_in, buildable_points
from midstream.engine.log import print_to_client
from midstream.engine.plugin import apply_replacements, follow_parent, raise_if_ending
from midstream.engine.runners import Host, Watch, adapt_runner
from midstream.engine.seams import Role
from midstream.errors import MidstreamError
from midstream.plan.values import ModelFacts
from midstream.ranks.link import Link, exchange_in
from midstream.ranks.stages import StageParts, Stages
from midstream.ranks.tensor import Finder, TensorParallel
from midstream.runtime.knockouts import AttentionCuts
from midstream.runtime.plan_host import PlanHost, StepResults
from midstream.runtime.points import Pipeline, PointHooks, points_of
from midstream.runtime.programs import InGraph, RecordedPrograms
from midstream.runtime.request import StepEnds
from midstream.runtime.sending import CaptureSender, LocalSinks, Reports
from midstream.runtime.tables import DeviceTables, Tables, flat
from midstream.runtime.torch_tables import TorchTables
from midstream.runtime.trace_host import FindNotFinite, TraceHost
from midstream.settings import Settings, is_ours
from midstream.sites import NotFinite, Point
from midstream.trace.envoy import ModelEnvoy
from midstream.trace.interleaver import Interleaver
from midstream.trace.parallel import ALONE
from midstream.transport.sender import Sender

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    PlatformWorker = resolve_obj_by_qualname(
        "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
    )

_PROBE_TOKENS = 3


@AsyncModelRunnerOutput.register
class _ReportingOutput:
    """An output on its way from the device, and a function that finds the requests that end with it."""

    def __init__(self, output: AsyncModelRunnerOutput, find_endings: Callable[[], StepEnds | None]) -> None:
        self._output = output
        self._find_endings = find_endings

    def get_output(self) -> Any:
        return _with_endings(self._output.get_output(), self._find_endings())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)  # an output has other methods in other versions of vLLM


def _with_endings(output: Any, endings: StepEnds | None) -> Any:
    if endings is not None:
        output.midstream = endings
    return output


def _computed_before(scheduler_output: Any) -> dict[str, int]:
    """request id -> tokens computed before the step, of its requests."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}


def refuse_unsupported(config: Any) -> None:
    """Raise MidstreamError for a vLLM config under which plans and traces would do nothing, or see only part of a batch."""
    parallel, passes = config.parallel_config, config.compilation_config.pass_config
    refused = {
        "Dual batch overlap splits a step's batch, and midstream needs all of it. Start the engine without dual batch overlap.": (
            parallel.use_ubatching
        ),
        "Prefill context parallelism splits prompts over ranks, and midstream needs each prompt on one rank. Start the engine with "
        "prefill_context_parallel_size=1.": parallel.prefill_context_parallel_size > 1,
        "Decode context parallelism splits the KV cache of a request over ranks, which midstream was not tested with. Start the engine "
        "with decode_context_parallel_size=1.": parallel.decode_context_parallel_size > 1,
        "Expert parallelism moves tokens between ranks, which midstream was not tested with. Start the engine with "
        "enable_expert_parallel=False; tensor parallelism then splits each expert.": (
            parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1
        ),
        "midstream supports only models that generate tokens, and a pooling model generates none. Start the engine without "
        "runner='pooling', or use vLLM without midstream.": config.model_config.runner_type == "pooling",
        # The size is 1 in the data parallel engines of a dense model, which are independent.
        "Data parallel engines of a mixture of experts compute each step together, and a step with plans or traces may differ from "
        "those of the other engines. Start the engine with data_parallel_size=1, and several engines: midstream.ray.collect, "
        "`midstream collect --shard I/N`, or several servers behind a load balancer.": parallel.data_parallel_size > 1,
        "With sequence parallelism each rank has only some of the residual stream's rows, and midstream needs all of them. Start the "
        "engine with compilation_config={'pass_config': {'enable_sp': False, 'fuse_gemm_comms': False}}.": (
            getattr(passes, "enable_sp", None)
        ),
        "vLLM's older Ray executor runs the model without calling midstream's worker, so plans and traces would do nothing. Set "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1.": (  # 0.33 has no older executor
            parallel.use_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
        ),
        "Breakable CUDA graphs have no sites in them, so plans and traces would do nothing. Set VLLM_USE_BREAKABLE_CUDAGRAPH=0, or "
        "start the engine with enforce_eager=True.": has_graphs(config) and is_breakable_cudagraph_enabled(),
    }
    for text, is_so in refused.items():
        if is_so:
            raise MidstreamError(text)


def has_graphs(config: Any) -> bool:
    """Whether the engine replays CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def compiles(config: Any) -> bool:
    """Whether steps run compiled code or CUDA graphs. Hooks that are added later are not part of these."""
    return has_graphs(config) or config.compilation_config.mode != CompilationMode.NONE


_log = logging.getLogger(__name__)


class Worker(PlatformWorker):
    """A worker that runs traces and plans."""

    _stages: Stages | None = None  # the pipeline of which this worker is a stage, if there is one
    _tensor_ranks: TensorParallel | None = None  # the ranks that share each layer with this worker, if there are any
    _adapters: Adapters | None = None  # of the traced requests, if the engine takes adapters
    _is_awake = False  # whether a request with a trace or a plan is alive
    _find_not_finite: FindNotFinite | None = None  # of the current step, if a request in it has edits or a trace
    _scores: Callable[[], StepResults] | None = None  # of the current step, if a request in it has probes

    def init_device(self) -> None:
        if current_platform.is_cpu() and multiprocessing.parent_process() is not None:  # a process of the engine's own
            # Numbers below 1e-38 become zero. Without this, a plan that makes such small values slows each product with the model's weights
            # two-hundredfold, for all requests in the step. Threads inherit the setting, so it is made before vLLM starts them.
            torch.set_flush_denormal(True)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        refuse_unsupported(self.vllm_config)
        apply_replacements(Role.WORKER)
        if current_platform.is_cpu():
            apply_replacements(Role.CPU_WORKER)
        if self.vllm_config.lora_config is not None:
            apply_replacements(Role.ADAPTERS)
            if current_platform.is_cpu():
                apply_replacements(Role.CPU_ADAPTERS)
        follow_parent()
        super().load_model(*args, **kwargs)
        self._attach()

    @torch.inference_mode()
    def _attach(self) -> None:
        config = self.vllm_config
        settings = Settings.of(config)
        runner = self._runner = adapt_runner(self.model_runner)
        model, tensor, pipeline = runner.model, get_tp_group(), get_pp_group()
        self._eager_kernels = EagerKernels(model, config)
        split_heads(model, on_vllm=True)
        arch = detect(
            model,
            self._probe,
            head_dim=config.model_config.get_head_size(),
            rename=settings.rename,
            shards=Finder(tensor.world_size, exchange_in(tensor)) if tensor.world_size > 1 else None,
        )
        if tensor.world_size > 1:
            layouts: Any = arch.shards
            link = Link(tensor.rank_in_group, exchange_in(tensor), "tensor", get_ip())
            self._tensor_ranks = TensorParallel(layouts, lambda part: tensor.all_gather(part.unsqueeze(0), 0), link)
        if pipeline.world_size > 1:
            exchange = exchange_in(pipeline)
            link = Link(pipeline.rank_in_group, exchange, "pipeline", get_ip())
            self._stages = Stages(exchange(StageParts.of(model, arch)), link, self.device)
        self._model_arch = self._stages.arch if self._stages is not None else arch
        sites = settings.sites_in_graphs(tensor.world_size)
        built_in = buildable_points(arch, sites) if compiles(config) else []
        points = built_in if compiles(config) else points_of(arch)
        self._free_sites = sorted({point[0] for point in points if arch.shard_of(arch.bindings[point]) is None})
        if config.lora_config is not None:
            self._adapters = Adapters(self.model_runner.lora_manager._adapter_manager)
        self.midstream = self._make_trace_host(arch, settings)
        self.plans = self._make_plan_host(arch, settings, built_in)
        forms = {(arch.widths[p], arch.bindings[p].residual is not None) for p in buildable_points(arch, sites)}
        for width, dual in forms:
            self.plans.tables.warm_up(width, dual, config.model_config.dtype)
        # vLLM's all-reduce exchanges data by different buffers inside and outside a graph. So all ranks must replay a graph, or none.
        self._stops_alone = self._tensor_ranks is None and config.parallel_config.data_parallel_size == 1
        self.midstream.watch_graph_sites(built_in)
        build_in(model, arch, built_in, self.plans.tables.index.__getitem__)
        runner.connect(Host(self.midstream, self.plans))

    def _probe(self) -> None:
        with self._eager_kernels.on():
            self._runner.probe(_PROBE_TOKENS)

    def _make_trace_host(self, arch: Architecture, settings: Settings) -> TraceHost:
        model, config = self._runner.model, self.vllm_config
        stages, model_arch = self._stages, self._model_arch
        peers, aliases = self._tensor_ranks or ALONE, Aliases(settings.rename)
        interleaver = Interleaver(model, model_arch.order, stages, peers, aliases)
        compute_logits: Any = model.compute_logits

        def unembed(hidden: torch.Tensor) -> torch.Tensor:
            if not arch.returns_norm:
                raise unknown_logits(type(model).__name__)
            norm = model.get_submodule(arch.binding("final_norm").path)
            normed = norm(hidden.to(config.model_config.dtype))
            return compute_logits(normed[0] if isinstance(normed, tuple) else normed)  # Command-R's norm returns a pair

        envoy = ModelEnvoy(model, model_arch, interleaver, unembed, lambda: self._tokenizer)
        reports = Reports(get_pp_group().rank_in_group, sends=get_tp_group().rank_in_group == 0)
        limits = config.model_config.max_model_len, config.model_config.get_vocab_size()
        calling = self._adapters.calling if self._adapters is not None else None
        return TraceHost(
            envoy, interleaver, arch, settings.allow_traces, *limits, reports, stages, self._ends_text, calling
        )

    def _ends_text(self, sampling: Any, prompt: Sequence[int]) -> Callable[[int], bool]:
        """A function that tells for each generated token whether a stop string will end the text there in vLLM's front end."""
        request: Any = SimpleNamespace(
            request_id="", sampling_params=sampling, prompt_token_ids=list(prompt), prompt_embeds=None
        )
        try:
            detokenizer = IncrementalDetokenizer.from_new_request(self._front_ends_tokenizer, request)
        except Exception:  # the step has other requests, too
            _log.warning("Traces may see a step beyond a stop string: the worker has no tokenizer.", exc_info=True)
            return lambda token: False
        return lambda token: detokenizer.update([token], stop_terminated=False) is not None

    @cached_property
    def _front_ends_tokenizer(self) -> Any:
        """The tokenizer with which vLLM's front end finds stop strings; None if the engine has none."""
        from vllm.tokenizers import cached_tokenizer_from_config

        config = self.vllm_config.model_config
        return None if config.skip_tokenizer_init else cached_tokenizer_from_config(config)

    def _make_plan_host(self, arch: Architecture, settings: Settings, built_in: Sequence[Point]) -> PlanHost:
        """Collective in the pipeline. `built_in`: the points that are built into the compiled forward."""
        config = self.vllm_config
        stage = get_pp_group().rank_in_group
        points = points_of(arch)
        widths = {point: arch.widths[point] for point in points}
        exchange = exchange_in(get_pp_group())
        pipeline = Pipeline.gathered(stage, widths, built_in, exchange)
        self._has_built_in = bool(pipeline.built_in)  # the same on all stages, which agree on the size of a graph
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        head_dims = self._model_arch.head_dims
        reasons = {
            layer: reason
            for (site, layer), binding in arch.bindings.items()
            if site == "attn_q"
            and (reason := why_not_again(self._runner.model.get_submodule(binding.path))) is not None
        }
        unsupported = {layer: reason for of_stage in exchange(reasons) for layer, reason in of_stage.items()}
        facts = ModelFacts(arch.num_layers, pipeline.widths, dtype, pipeline.first_layers, head_dims, unsupported)
        tables: Tables
        if self.device.type == "cuda":
            scheduler, largest = config.scheduler_config, config.compilation_config.max_cudagraph_capture_size or 0
            most_rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, largest) + 8  # padded to a graph
            tables = DeviceTables(points, most_rows, self.device, early_launch=self._tensor_ranks is None)
        else:
            tables = TorchTables(points, self.device, config.model_config.dtype)
        here = stage, pipeline.size
        local = partial(LocalSinks, config.instance_id, arch.num_layers, pipeline.layers, here, head_dims)
        return PlanHost(
            tables,
            PointHooks(
                self._runner.model, arch, built_in, tables, config.model_config.dtype, self._tensor_ranks or ALONE
            ),
            facts,
            pipeline,
            link=self._stages.link if self._stages is not None else None,
            compiles=compiles(config),
            device=self.device,
            dtype=config.model_config.dtype,
            record_bytes=settings.record_bytes,
            captures=CaptureSender(self.midstream.reports, local),
            cuts=AttentionCuts(self._runner.model, arch, get_tp_group().rank_in_group),
            speculative=config.speculative_config is not None,
        )

    def compile_or_warm_up_model(self) -> Any:
        config, tables = self.vllm_config, self.plans.tables
        if has_graphs(config) and self._has_built_in and isinstance(tables, DeviceTables):
            built_in = NOTHING if self._records_later() else frozenset(site for site, _ in tables.points)
            limit = Settings.of(config).graph_bytes
            self._runner.hold_graphs(limit, self._kernel_at, tables.acts_at, at_start=built_in)
        self._runner.prepare_clearing()
        times = super().compile_or_warm_up_model()
        if self._runner.graphs is not None:  # so that all ranks drop the same graphs
            self._runner.graphs.agree(exchange_in(get_tp_group()))
            self._runner.graphs.agree(exchange_in(get_pp_group()))
        return times

    def _records_later(self) -> bool:
        """Whether graphs can be recorded while requests are alive: vLLM's forward on dummy tokens must not affect them.

        It would change the states of recurrent layers, remove the requests' adapters, call a KV connector, and wait for other engines.
        """
        config = self.vllm_config
        parallel = config.parallel_config
        several = parallel.data_parallel_size > 1
        others = (config.lora_config, config.kv_transfer_config, config.speculative_config)
        shares = config.cache_config.kv_sharing_fast_prefill
        return not (several or shares or any(others) or self._runner.has_recurrent_layers())

    def _kernel_at(self, acting: Acting) -> Kernel | None:
        """The kernel for a graph of steps in which these sites and programs act; None if there can be no such graph.

        Each pipeline stage knows only its own programs, so one stage may have a graph for a step and another may not. All stages need the
        same number of rows, including padding. A step without a full graph falls back to piecewise graphs, which have as many rows.
        """
        tables = self.plans.tables
        assert isinstance(tables, DeviceTables)  # there are graphs
        points = {i for i, (site, _) in enumerate(tables.points) if site in acting}
        programs: dict[int, dict[str, list[RecordedPrograms]]] = {}
        each = [one.at for one in acting if isinstance(one, InGraph)]
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if each and self._stages is not None and not mode.has_piecewise_cudagraphs():
            return None
        values = tables.programs.graph_values(point for at in each for point in at.inputs)
        for at in sorted((at for at in each if at.point in tables.index), key=lambda at: at.turn):
            of_point = programs.setdefault(tables.index[at.point], {})
            of_point.setdefault(at.what, []).append(tables.programs.recorded(at, values))

        def edit(point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            if point in points:
                tables.edit_recorded(point, hidden, residual, programs.get(point, {}), values)

        def warm_up(point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            if tables.points[point] in values.points:
                values.make_room(tables.points[point], flat(hidden))
            for one in chain.from_iterable(programs.get(point, {}).values()):
                one.warm_up(flat(hidden))

        return Kernel(
            edit, warm_up, sum(one.bank.launches for of_point in programs.values() for one in chain(*of_point.values()))
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.vllm_config.model_config.tokenizer)

    def execute_model(self, scheduler_output: Any) -> Any:
        new = scheduler_output.scheduled_new_reqs
        begins = bool(new) and any(map(is_ours, new))
        if not (begins or self._is_awake):  # a plain step adds only these lines to vLLM's
            return super().execute_model(scheduler_output)
        traces, plans = self.midstream, self.plans
        if not begins and plans.repeat(scheduler_output):  # a step like the last one adds only these lines
            watches = plans.step_is_planned or plans.edits or traces.may_have_written
            self._runner.prepare(Watch.ROWS if watches else Watch.NOTHING, plans.acting, plans.has_strangers)
            return self._execute_planned(scheduler_output)
        self._is_awake = begins or not (traces.is_idle and plans.is_idle)
        if not self._is_awake:
            raise_if_ending()  # a body may have swallowed the SystemExit in a step without tokens
            if self._adapters is not None:
                self._adapters.end()
            self._runner.prepare(Watch.NOTHING)
            return super().execute_model(scheduler_output)
        off_graph = self._schedule(scheduler_output)
        self._runner.prepare(Watch.ALL, plans.acting, plans.has_strangers)
        if traces.is_idle and not off_graph:
            return self._execute_planned(scheduler_output)
        traced = traces.acts_in_forward
        if not (traced or off_graph):
            output = self._execute_planned(scheduler_output)
            traces.end_stage()
            return output
        uncompiled = off_graph or (traced and traces.step_is_uncompiled)
        StepMode.set(traced or off_graph, uncompiled or (traced and not self._stops_alone), uncompiled)
        points = plans.tables.points
        if traced and not uncompiled:
            SiteOp.fire = lambda point, hidden, residual: traces.see_site(points[point], hidden, residual)
        pieces = self._runner.piecewise.stopping_at(lambda point: traces.expects(points[point]))
        try:
            with self._eager_kernels.on() if uncompiled else pieces:
                output = self._execute_planned(scheduler_output)
            traces.end_stage()
            return output
        finally:
            StepMode.set()
            SiteOp.fire = None

    def _execute_planned(self, scheduler_output: Any) -> Any:
        """Run a step in which plans may act. The runner has been prepared for it."""
        plans = self.plans
        if plans.step_is_planned:
            SiteOp.edit = plans.tables.edit
        try:
            output = super().execute_model(scheduler_output)
        finally:
            self._runner.end_step()
            if plans.step_is_planned:
                SiteOp.edit = None
                plans.end_step()
        if plans.edits or self.midstream.may_have_written:
            self._find_not_finite = self._check_of(scheduler_output)
        self._scores = plans.take_scores()
        return output

    @torch.inference_mode()
    def _check_of(self, scheduler_output: Any) -> FindNotFinite | None:
        """A function that finds the requests whose rows the queued step made infinite or NaN. None if the forward ends on another rank.

        Such requests end with an error that says where. Other requests never compute with these numbers even without this check: see
        `engine.prefix_cache`.
        """
        names, hidden_TH = self._runner.batch()
        if not isinstance(hidden_TH, torch.Tensor):
            return None
        tables, scheduled = self.plans.tables, scheduler_output.num_scheduled_tokens
        codes_T, ready = tables.take_overflow(hidden_TH[: scheduler_output.total_num_scheduled_tokens])

        def find() -> dict[str, NotFinite]:
            ready()
            codes, found, start = codes_T.numpy(), dict[str, NotFinite](), 0
            if not codes.any():
                return found
            computed = _computed_before(scheduler_output)
            for name in names:
                rows = codes[start : start + scheduled[name]].tolist()
                start += scheduled[name]
                if any(rows):
                    first = min((code for code in rows if code > 0), default=-1)
                    point = tables.points[first - 1] if first > 0 else None
                    found[name] = NotFinite(computed[name] + rows.index(first), point)
            return found

        return find

    def execute_dummy_batch(self) -> None:
        self._runner.prepare(Watch.NOTHING)
        super().execute_dummy_batch()

    def _schedule(self, scheduler_output: Any) -> bool:
        """Tell traces and plans which requests the step has. Returns whether a plan makes the step run uncompiled."""
        new, computed = scheduler_output.scheduled_new_reqs, _computed_before(scheduler_output)
        begun = {r.req_id: (r.sampling_params, r.prompt_token_ids or ()) for r in new}
        scheduled = scheduler_output.num_scheduled_tokens
        finished = set(scheduler_output.finished_req_ids)
        if self._adapters is not None:
            self._adapters.begin({r.req_id: r.lora_request.lora_int_id for r in new if r.lora_request and is_ours(r)})
        self.midstream.schedule(begun, scheduled.keys(), finished, computed)
        if self._adapters is not None:
            self._adapters.end(finished)
        ends = getattr(scheduler_output, "midstream_finished", {})
        off_graph = self.plans.schedule(begun, scheduled, {name: ends.get(name) for name in finished}, computed)
        self.plans.remember_step(scheduler_output, may_repeat=not (self.midstream.step_is_traced or off_graph))
        return off_graph

    def sample_tokens(self, grammar_output: Any) -> Any:
        finds = self._find_not_finite is not None or self._scores is not None or bool(self.plans.errors)
        if not finds and self._runner.watched is not Watch.ALL:
            return super().sample_tokens(grammar_output)
        find_not_finite, self._find_not_finite = self._find_not_finite, None
        find_scores, self._scores = self._scores, None
        self.midstream.find_not_finite = find_not_finite
        output = super().sample_tokens(grammar_output)
        if self._runner.watched is Watch.ALL:
            raise_if_ending()
        ends, errors = self.midstream.take_ends(), self.plans.take_errors()
        if output is None or not (ends.stops or ends.done or errors or find_not_finite or find_scores):
            return output

        def find_endings() -> StepEnds | None:
            ended = {**self._refusals(find_not_finite()), **errors} if find_not_finite is not None else errors
            scores, probe_stops, failed = find_scores() if find_scores is not None else ({}, {}, {})
            ended = {**ended, **failed}
            if not (ends.stops or ends.done or ended or scores):
                return None
            return replace(ends, errors=ended, scores=scores, probe_stops=probe_stops)

        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, find_endings)
        return _with_endings(output, find_endings())

    def _refusals(self, broken: Mapping[str, NotFinite]) -> dict[str, str]:
        """The requests whose values are not finite: request id -> why it ends."""
        reasons = {
            name: self.plans.refusal(name, at) or self.midstream.refusal(name, at) for name, at in broken.items()
        }
        return {name: text for name, text in reasons.items() if text is not None}

    # Called by the client through `collective_rpc`.

    def midstream_connect(self, address: Mapping[str, Any]) -> str | None:
        """Connect to the client's results channel. Returns this worker's name there, or None if it does not send."""
        print_to_client()
        self.midstream.set_weights((), {})
        reports = self.midstream.reports
        if not reports.sends:
            return None
        if reports.sender is not None:
            reports.sender.close()
        reports.sender = Sender(address, f"rank {self.rank}")
        return reports.sender.name

    def midstream_describe(self) -> dict[str, Any]:
        """The whole model's modules and sites, for the client. All ranks return the same, except for `free_sites` and `device`."""
        arch, facts, interleaver = self._model_arch, self.plans.facts, self.midstream.interleaver
        places = {(binding.path, binding.kind) for binding in arch.bindings.values()}
        return {
            "modules": dict(interleaver.stage.modules),
            "shapes": dict(arch.shapes),
            "sites": list(arch.sites),
            "rename": interleaver.aliases.rename,
            "stages": list(facts.stages),
            "num_layers": arch.num_layers,
            "hidden_size": arch.hidden_size,
            "widths": {f"{site}/{layer}": width for (site, layer), width in facts.widths.items()},
            "dtype": facts.dtype,
            "unsupported_attention": {str(n): why for n, why in facts.unsupported_attention.items()},
            "device": str(self.device),
            "bindings": {
                f"{site}/{'' if layer is None else layer}": astuple(b) for (site, layer), b in arch.bindings.items()
            },
            "order": [(*key, *moments) for key, moments in arch.order.items() if key in places],
            "free_sites": self._free_sites,  # plans at these leave compiled code and graphs as they are
        }

    def midstream_gauges(self) -> dict[str, int]:
        """Counts of the objects that are alive on this worker, and of steps by kind."""
        return {
            **self.midstream.gauges(),
            **self.plans.gauges(),
            **self.plans.captures.gauges(),
            **self._runner.gauges(),
            "planned_steps": self.plans.planned_steps,
            "off_graph_steps": self.plans.off_graph_steps,
            "table_growths": self.plans.tables.growths,
            "traced_steps": self.midstream.traced_steps,
            "forward_traced_steps": self.midstream.forward_traced_steps,
            "uncompiled_steps": self.midstream.uncompiled_steps,
            **(self._stages.link.gauges() if self._stages is not None else {}),
            **(self._tensor_ranks.gauges() if self._tensor_ranks is not None else {}),
        }

    def midstream_drop(self, traces: list[str]) -> None:
        """Forget traces whose requests the client has aborted."""
        self.midstream.drop(traces)

    def midstream_set_weights(self, kept: Sequence[str], new: Mapping[str, bytes]) -> None:
        """Hold these weights for traces, and drop all others: the digests in `kept`, and new weights by their digests."""
        self.midstream.set_weights(kept, new)
        self.plans.forget({*kept, *new})

    def midstream_vectors(self, what: str, *args: Any) -> Any:
        """Call a method of the named vectors: `set` or `delete`."""
        return getattr(self.plans.vectors, what)(*args)

    def midstream_runs(self, what: str, *args: Any) -> Any:
        """Call a method of the recorded runs: `list`, `delete` or `lease`."""
        return getattr(self.plans.runs, what)(*args)

    def midstream_load_adapter(self, adapter: bytes) -> tuple[str | None, str | None]:
        """Load an adapter, a LoRARequest in msgpack. Returns the reason if that fails, and a warning if the adapter fits in part.

        It does not raise: after errors of several workers, vLLM takes the answers of one call for those of the next (0.32).
        """
        from vllm.lora.request import LoRARequest

        request = msgspec.msgpack.decode(adapter, type=LoRARequest)
        try:
            self.add_lora(request)
        except Exception as error:
            return f"{error}", None
        return None, self._adapters.warning_of(request.lora_int_id) if self._adapters is not None else None

    def shutdown(self) -> None:
        if (host := getattr(self, "midstream", None)) is not None and host.reports.sender is not None:
            host.reports.sender.close(flush=False)
        if self._stages is not None:
            self._stages.link.close()
        if self._tensor_ranks is not None:
            self._tensor_ranks.close()
        try:
            if (plans := getattr(self, "plans", None)) is not None:
                plans.captures.close()  # raises a consumer's error
        finally:
            super().shutdown()
