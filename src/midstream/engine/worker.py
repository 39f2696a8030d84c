"""vLLM's worker with midstream's host beside the model runner. Named as `worker_cls`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.outputs import AsyncModelRunnerOutput

from midstream.arch import detect
from midstream.engine.eager_kernels import EagerKernels
from midstream.engine.graph_sites import SITE_OP, SiteOp
from midstream.engine.host import TraceHost
from midstream.engine.lifeline import raise_if_ending, tie_to_parent
from midstream.engine.patches import StepMode
from midstream.engine.plugin import register
from midstream.engine.request import TraceRequest
from midstream.engine.runners import adapt
from midstream.engine.sender import Sender
from midstream.engine.settings import Settings
from midstream.trace.envoy import ModelEnvoy
from midstream.trace.interleaver import Interleaver

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    PlatformWorker = resolve_obj_by_qualname(
        "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
    )

_PROBE_TOKENS = 3


class _Stopped(AsyncModelRunnerOutput):
    """An output on its way from the device, with the requests that end with it."""

    def __init__(self, output: AsyncModelRunnerOutput, stops: list[str]) -> None:
        self._output = output
        self._stops = stops

    def get_output(self) -> Any:
        return _with_stops(self._output.get_output(), self._stops)


def _with_stops(output: Any, stops: list[str]) -> Any:
    output.midstream_stops = stops
    return output


def _is_traced(new_request: Any) -> bool:
    return TraceRequest.of(new_request.sampling_params) is not None


class Worker(PlatformWorker):
    """A worker that runs traces."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        register()
        tie_to_parent()
        self._split_at_sites = self._split_graph()
        super().load_model(*args, **kwargs)
        self.midstream = self._attach()
        self._eager_kernels = EagerKernels(self.midstream.envoy._module, self.vllm_config)

    def _split_graph(self) -> bool:
        """Where the pieces between splitting ops have CUDA graphs of their own, a split at the site op keeps those for traced steps."""
        compilation = self.vllm_config.compilation_config
        if not Settings.of(self.vllm_config).graph_sites or not compilation.splitting_ops:
            return False
        compilation.splitting_ops = [*compilation.splitting_ops, SITE_OP]
        return True

    @torch.inference_mode()
    def _attach(self) -> TraceHost:
        config = self.vllm_config
        settings = Settings.of(config)
        runner = adapt(self.model_runner)
        model = runner.model
        arch = detect(
            model,
            lambda: runner.probe(_PROBE_TOKENS),
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            head_dim=config.model_config.get_head_size(),
            rename=settings.rename,
        )
        interleaver = Interleaver(model, arch.order)
        compute_logits: Any = model.compute_logits
        norm = model.get_submodule(arch.parts["final_norm"]) if "final_norm" in arch.parts else None

        def unembed(hidden: torch.Tensor) -> torch.Tensor:
            assert norm is not None
            hidden = hidden.to(config.model_config.dtype)
            normed = norm(hidden)
            return compute_logits(normed[0] if isinstance(normed, tuple) else normed)  # Command-R's norm returns a pair

        envoy = ModelEnvoy(model, arch, interleaver, unembed, self._tokenizer)
        host = TraceHost(envoy, interleaver, arch, settings.allow_traces, config.model_config.max_model_len)
        runner.connect(host)
        if settings.graph_sites and config.compilation_config.mode != CompilationMode.NONE:
            host.build_in(model)
        return host

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.vllm_config.model_config.tokenizer)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.midstream.is_idle and not any(map(_is_traced, scheduler_output.scheduled_new_reqs)):
            return super().execute_model(scheduler_output)
        new = {
            r.req_id: (r.sampling_params, len(r.prompt_token_ids or ())) for r in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        finished = set(scheduler_output.finished_req_ids)
        self.midstream.schedule(new, scheduler_output.num_scheduled_tokens.keys(), finished, computed)
        traced, uncompiled = self.midstream.step_is_traced, self.midstream.step_is_uncompiled
        StepMode.set(traced, traced and (uncompiled or not self._split_at_sites), uncompiled)
        SiteOp.fire = self.midstream.see_site if traced and not uncompiled else None
        try:
            with self._eager_kernels.on() if uncompiled else contextlib.nullcontext():
                return super().execute_model(scheduler_output)
        finally:
            StepMode.set()
            SiteOp.fire = None

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        raise_if_ending()
        stops = self.midstream.take_stops()
        if not stops or output is None:
            return output
        return _Stopped(output, stops) if isinstance(output, AsyncModelRunnerOutput) else _with_stops(output, stops)

    # Called by the client through `collective_rpc`.

    def midstream_connect(self, address: Mapping[str, Any]) -> str:
        """Connect to the client's results channel; the name under which this worker sends."""
        if self.midstream.sender is not None:
            self.midstream.sender.close()
        self.midstream.sender = Sender(address, f"rank {self.rank}")
        return self.midstream.sender.name

    def midstream_describe(self) -> dict[str, Any]:
        """The module tree of this worker, for the client."""
        arch, modules = self.midstream.arch, self.midstream.interleaver.modules
        return {
            "modules": {path: type(module).__name__ for path, module in modules.items()},
            "shapes": dict(arch.shapes),
            "sites": list(arch.sites),
            "num_layers": arch.num_layers,
            "hidden_size": arch.hidden_size,
        }

    def midstream_gauges(self) -> dict[str, int]:
        """What is alive on this worker."""
        return {
            **self.midstream.gauges(),
            "traced_steps": self.midstream.traced_steps,
            "uncompiled_steps": self.midstream.uncompiled_steps,
        }

    def midstream_finish(self) -> None:
        """End the traces of requests whose end this worker has not been told: an in-process engine rests between calls."""
        self.midstream.schedule({}, (), set(self.midstream.requests))

    def midstream_drop(self, traces: list[str]) -> None:
        """Forget these traces: the client has aborted their requests."""
        self.midstream.drop(traces)

    def shutdown(self) -> None:
        if (host := getattr(self, "midstream", None)) is not None and host.sender is not None:
            host.sender.close(flush=False)
        super().shutdown()
