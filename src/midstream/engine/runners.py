"""The thin adapters to vLLM's two model runners: what differs between V1 and V2 is said here and nowhere else.

Each tells the host when a batch has been laid out, passes logits and samples by it, and runs a dummy forward for the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec

from midstream import hooks
from midstream.arch.streams import planted_embedding
from midstream.engine.graph_sites import Fire
from midstream.engine.patches import StepMode
from midstream.engine.pieces import Pieces, TwoSets
from midstream.errors import ArchitectureError
from midstream.runtime.step import StepView


class Watch(IntEnum):
    """What the host is called for."""

    NOTHING = 0  # a step then is vLLM's own code and nothing else
    ROWS = 1  # that a batch has been laid out
    ALL = 2  # logits and samples, too


class Host(Protocol):
    """What the adapters call."""

    @property
    def step_is_traced(self) -> bool: ...

    def stands(self, request_ids: list[str], total: int) -> bool: ...

    def begin_step(self, view: StepView) -> None: ...

    def see_logits(self, logits: torch.Tensor) -> torch.Tensor: ...

    def see_samples(self, samples: torch.Tensor) -> torch.Tensor: ...


class Runner:
    """One of vLLM's model runners."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model: nn.Module = runner.get_model()
        self.pieces = Pieces()
        self._full_graphs: TwoSets | None = None  # from `record_second_graphs` on
        self._second = False
        self._seams: list[tuple[Watch, Any, str, Any, Any]] = []
        self.watched = Watch.NOTHING

    def connect(self, host: Host) -> None:
        """Have the host called while the runner is watched; for logits and samples if it says that the step is traced."""
        raise NotImplementedError

    def prepare(self, watched: Watch, second_graphs: bool) -> None:
        """What the coming steps need: `watch` and `use_second_graphs`."""
        if watched is not self.watched:
            self.watch(watched)
        if second_graphs is not self._second:
            self.use_second_graphs(second_graphs)

    def watch(self, what: Watch) -> None:
        """What the host is called for from now on."""
        if what is self.watched:
            return
        for level, owner, name, ours, before in self._seams:
            if self.watched < level <= what:
                vars(owner)[name] = ours
            elif what < level <= self.watched:
                if before is None:
                    del vars(owner)[name]  # and the class's shows again
                else:
                    vars(owner)[name] = before
        self.watched = what

    def _see(self, owner: Any, name: str, ours: Any, level: Watch = Watch.ALL) -> None:
        """Have `ours` stand in the place of a method while so much is watched."""
        self._seams.append((level, owner, name, ours, vars(owner).get(name)))

    def record_second_graphs(self, edit: Fire) -> None:
        """Have CUDA graphs recorded twice: as vLLM does, and once more with `edit` at the sites, for `use_second_graphs`."""
        raise NotImplementedError

    def use_second_graphs(self, second: bool) -> None:
        """Which of the two sets of graphs the coming steps replay from."""
        if second is not self._second:
            self._second = second
            self.pieces.use_second_graphs(second)
            if self._full_graphs is not None:
                self._full_graphs.use(second)

    def _recorded_twice(self, record: Any, edit: Fire) -> Any:
        """vLLM's `record`, and then once more for the second graphs."""

        def record_twice(*args: Any, **kwargs: Any) -> None:
            record(*args, **kwargs)
            self.use_second_graphs(True)
            try:
                with self.pieces.recording(edit):
                    record(*args, **kwargs)
            finally:
                self.use_second_graphs(False)

        return record_twice

    def batch(self) -> tuple[Sequence[str], torch.Tensor | None]:
        """The requests of the step that has just been queued, in the order of their rows, and the rows at the forward's end, `[T, H]`.

        The rows are None where the forward ends on another rank.
        """
        raise NotImplementedError

    def prepare_clearing(self) -> None:
        """Have KV blocks cleared that the scheduler asks for; vLLM prepares that for models with Mamba layers alone.

        And in all layers: vLLM leaves those with sliding windows out, on GPUs up to 0.26 at least, on the CPU in 0.32 as well.
        """
        config, context = self.runner.kv_cache_config, self.runner.compilation_config.static_forward_context
        try:
            clear, cleared = self._vllms_clearing(), FullAttentionSpec
        except AssertionError:  # pages of several sizes, for one
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
        """vLLM's own function that clears blocks, ready to be called. Raises AssertionError for a cache that it cannot clear."""
        raise NotImplementedError

    def _clear_by(self, clear: Callable[[list[int]], None]) -> None:
        """Have the runner call another function in its place."""
        raise NotImplementedError

    def probe(self, tokens: int) -> None:
        """One forward over `tokens` dummy tokens, uncompiled and without attention."""
        planted: list[torch.Tensor] = []

        def plant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """A later pipeline stage is handed zeros, of which its layers make zeros: on them, nothing can be told apart."""
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
            # A request that has left the finite range ends after this step. Some samplers return an invalid token id for NaN logits,
            # and the next step would look it up.
            hidden_RH = torch.nan_to_num(hidden_RH, 0.0, 0.0, 0.0)
            logits = compute(hidden_RH, *args, **kwargs)
            watches = self.watched is Watch.ALL and host.step_is_traced
            return host.see_logits(logits) if watches and logits is not None else logits

        self._see(self.model, "compute_logits", compute_logits, Watch.ROWS)

    @staticmethod
    def _with_samples(host: Host, sampler_output: Any) -> None:
        samples_R = sampler_output.sampled_token_ids[:, 0]
        changed_R = host.see_samples(samples_R)
        if changed_R is not samples_R:
            samples_R.copy_(changed_R)


class V1Runner(Runner):
    """`vllm.v1.worker.gpu_model_runner`, also on CPU."""

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
        self.runner._zero_block_ids = clear

    def connect(self, host: Host) -> None:
        runner = self.runner
        self._keep_from_full_graphs(runner.cudagraph_dispatcher)
        determine, sample = runner._determine_batch_execution_and_padding, runner._sample

        def determine_batch(*args: Any, **kwargs: Any) -> Any:
            if StepMode.no_graphs:
                kwargs["force_eager"] = True
            determined = determine(*args, **kwargs)
            batch, total = runner.input_batch, determined[1].num_tokens
            if not host.stands(batch.req_ids, total):
                counts = kwargs["num_scheduled_tokens_np"]
                computed = batch.num_computed_tokens_cpu[: len(counts)]
                host.begin_step(StepView(batch.req_ids, counts, computed, total))
            return determined

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if host.step_is_traced:
                self._with_samples(host, output)
            return output

        self._see(runner, "_determine_batch_execution_and_padding", determine_batch, Watch.ROWS)
        self._see(runner, "_sample", sample_tokens)
        self._watch_logits(host)

    def record_second_graphs(self, edit: Fire) -> None:
        runner = self.runner
        if isinstance(runner.model, CUDAGraphWrapper):
            self._full_graphs = TwoSets(runner.model, "concrete_cudagraph_entries")
        runner._capture_cudagraphs = self._recorded_twice(runner._capture_cudagraphs, edit)

    def _keep_from_full_graphs(self, dispatcher: Any) -> None:
        dispatch = dispatcher.dispatch

        def dispatch_cudagraph(*args: Any, **kwargs: Any) -> Any:
            if StepMode.no_full_graph:
                kwargs["invalid_modes"] = {CUDAGraphMode.FULL, *(kwargs.get("invalid_modes") or ())}
            return dispatch(*args, **kwargs)

        self._see(dispatcher, "dispatch", dispatch_cudagraph)


class V2Runner(Runner):
    """`vllm.v1.worker.gpu.model_runner`."""

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
        self.runner.kv_block_zeroer = SimpleNamespace(zero_block_ids=clear)

    def record_second_graphs(self, edit: Fire) -> None:
        manager = self.runner.cudagraph_manager
        self._full_graphs = TwoSets(manager, "graphs")
        manager.capture = self._recorded_twice(manager.capture, edit)

    def connect(self, host: Host) -> None:
        runner = self.runner
        prepare, sample = runner.prepare_inputs, runner.sample

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if not host.stands(batch.req_ids, batch.num_tokens_after_padding):
                counts = batch.num_scheduled_tokens[: batch.num_reqs]
                computed = batch.num_computed_tokens_np[: batch.num_reqs]
                host.begin_step(StepView(batch.req_ids, counts, computed, batch.num_tokens_after_padding))
            return batch

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            if host.step_is_traced:
                self._with_samples(host, output[0])
            return output

        self._see(runner, "prepare_inputs", prepare_inputs, Watch.ROWS)
        self._see(runner, "sample", sample_tokens)
        self._watch_logits(host)


def _blocks_of(name: str, kv: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, int]:
    """One layer's cache, with the axis that counts the scheduler's blocks, each of which may be several of the kernel's.

    Raises ArchitectureError if there is none.
    """
    for axis, size in enumerate(kv.shape):
        if size and size % num_blocks == 0:
            return kv.unflatten(axis, (num_blocks, -1)), axis
    raise ArchitectureError(
        f"The KV cache of {name} has the shape {list(kv.shape)}, in which midstream does not find its {num_blocks} blocks; it has to clear "
        "those that plans and traces wrote to. Please report the model and the attention backend."
    )


def adapt(runner: Any) -> Runner:
    """The adapter for `runner`."""
    return V2Runner(runner) if type(runner).__module__.startswith("vllm.v1.worker.gpu.") else V1Runner(runner)
