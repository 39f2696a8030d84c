"""vLLM's scheduler with three more rules: a traced prompt is computed in one piece, plans have their say in the prefix cache, and KV blocks
that held what a plan or a trace changed are cleared before another request gets them.

A traced request that would not fit whole into the coming step waits, with all that queue behind it, so it starves nobody
and is starved by nobody. All else is vLLM's: chunked prefill, prefix caching and async scheduling stay on.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from midstream.engine.lifeline import tie_to_parent
from midstream.engine.plugin import register
from midstream.engine.prefix_cache import EditedBlocks, Taken, holding_back, rekey, remember
from midstream.runtime.plan_request import changes_kv
from midstream.runtime.step import RequestEnd, StepEnds
from midstream.runtime.trace_request import TraceRequest
from midstream.settings import Settings, is_ours


class _Rules:
    """Mixed into vLLM's schedulers, before them.

    Their `schedule` and `update_from_output` have other methods in their place, on the object, while there are requests with a trace or a
    plan. A step of other requests is vLLM's own: on a small model the two were measured to take 0.3 % of it.
    """

    kv_cache_manager: Any
    waiting: Any
    running: list[Any]
    requests: dict[str, Any]
    vllm_config: Any
    scheduler_config: Any
    max_num_scheduled_tokens: int
    finish_requests: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ends: dict[str, RequestEnd] = {}  # of the requests that the workers are to be told the end of
        self._takes_traces = Settings.of(self.vllm_config).allow_traces
        self._ours: set[str] = set()  # requests with a trace or a plan, from their coming to their end
        self._unstarted: set[str] = set()  # requests with a trace, until they are seen to have begun
        self._taken = Taken()
        self._held: dict[str, int] = {}  # request whose plan the workers may yet refuse -> `Taken.held_from`
        self._changing: set[str] = set()  # requests that may write to KV what plain ones never would
        self._edited = self.kv_cache_manager.block_pool.midstream = EditedBlocks()

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if not is_ours(request) or request.request_id not in self.requests:  # a session ends by a request of its name
            return
        self._ours.add(request.request_id)
        if changes_kv(request.sampling_params):
            self._changing.add(request.request_id)
        if (position := self._taken.held_from(request)) is not None:
            self._held[request.request_id] = position
        self.schedule, self.update_from_output = self._schedule, self._update
        if self._takes_traces and TraceRequest.of(request.sampling_params) is not None:
            self._unstarted.add(request.request_id)

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        with holding_back(self.kv_cache_manager, self._held) if self._held else contextlib.nullcontext():
            if self._unstarted and self._may_begin_traces():
                output = self._schedule_whole(*args, **kwargs)
            else:
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._changing:
            self._note_written(output)
        if self._ends:
            output.midstream_finished = {n: self._ends.pop(n) for n in output.finished_req_ids if n in self._ends}
        if not (self._ours or self._ends):
            del self.schedule, self.update_from_output
        return output

    def _note_written(self, output: Any) -> None:
        """The step writes to these blocks on behalf of requests with edits or traces."""
        cached = output.scheduled_cached_reqs
        for begun in output.scheduled_new_reqs:
            if begun.req_id in self._changing:
                self._edited.write(begun.block_ids)
        for name, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and name in self._changing:
                self._edited.write(block_ids)

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        """vLLM's list of blocks to clear before the step, for every step."""
        before = super()._get_new_block_ids_to_zero()  # type: ignore[misc]
        edited = self._edited.take()
        return sorted({*edited, *(before or ())}) if edited else before

    def _may_begin_traces(self) -> bool:
        """Quick to tell, with queues of any length."""
        if len(self.running) >= self.scheduler_config.max_num_seqs:
            return False
        known = self.requests
        self._unstarted = {name for name in self._unstarted if name in known and _is_unstarted(known[name])}
        return bool(self._unstarted)

    @property
    def has_ends_to_tell(self) -> bool:
        """Whether a request with a trace or a plan has ended that the workers have not been told of."""
        return bool(self._ends)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(request):
            self._ends[request.request_id] = RequestEnd(request.num_tokens)
        self._ours.discard(request.request_id)
        self._changing.discard(request.request_id)
        self._held.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        rekey(request)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        remember(session)
        session.sampling_params = update.sampling_params  # vLLM sets them last, and hashes the new blocks before that
        super()._update_request_as_session(session, update)  # type: ignore[misc]

    def _schedule_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the traced prompts that are waiting in one piece each, or not yet."""
        held = self._take_held_back()
        threshold = self.scheduler_config.long_prefill_token_threshold
        self.scheduler_config.long_prefill_token_threshold = 0
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.scheduler_config.long_prefill_token_threshold = threshold
            for request in held:  # in their order, behind what is left: nothing behind them was let through
                self.waiting.add_request(request)

    def _take_held_back(self) -> list[Any]:
        """Take from the queue what has to wait, from the first trace that does not fit on."""
        waiting = list(self.waiting)
        budget = self.max_num_scheduled_tokens - sum(_to_compute(request) for request in self.running)
        slots = self.scheduler_config.max_num_seqs - len(self.running)
        together = Counter(t.trace for r in waiting if (t := _unstarted_trace(r)) is not None and t.together)
        sizes: Counter[str] = Counter()
        for request in waiting:
            if (trace := _unstarted_trace(request)) is not None and trace.together:
                sizes[trace.trace] += _to_compute(request)
        admitted: set[str] = set()
        for position, request in enumerate(waiting):
            trace = _unstarted_trace(request)
            need, requests = _to_compute(request), 1
            if trace is not None and trace.together and trace.trace not in admitted:
                need, requests = sizes[trace.trace], trace.size
                here = together[trace.trace] == trace.size
                admitted.add(trace.trace)
                if not here or need > budget or requests > slots:
                    return self._hold(waiting[position:])
            elif trace is not None and trace.trace not in admitted and need > budget:
                return self._hold(waiting[position:])
            elif trace is not None and trace.together:
                continue  # counted with the first of its trace
            budget, slots = budget - need, slots - requests
        return []

    def _hold(self, requests: list[Any]) -> list[Any]:
        self.waiting.remove_requests(requests)
        return requests

    def _update(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step_ends: StepEnds | None = getattr(model_runner_output, "midstream", None)
        for begun in scheduler_output.scheduled_new_reqs:
            if begun.req_id in self._ours and (step_ends is None or begun.req_id not in step_ends.errors):
                self._take_plan(begun.req_id, begun.sampling_params)
        if step_ends is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for name in step_ends.stops:
            if (request := self.requests.get(name)) is not None:
                request.max_tokens = request.num_output_tokens + 1  # the token of this step is its last
                request.sampling_params.min_tokens = 0  # below which vLLM ends nothing
        refused = self._take_refused(step_ends.errors) if step_ends.errors else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for request in refused:
            if request.request_id in self._ends:
                self._ends[request.request_id] = RequestEnd(request.num_tokens, step_ends.errors[request.request_id])
            reason = {"finish_reason": FinishReason.ERROR, "stop_reason": step_ends.errors[request.request_id]}
            output = EngineCoreOutput(request.request_id, [], **reason, events=request.take_events())
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _take_plan(self, name: str, sampling_params: Any) -> None:
        """The workers have nothing against a request's plan: its blocks are what their keys say."""
        self._taken.add(sampling_params)
        if self._held.pop(name, None) is not None:
            request = self.requests[name]
            self.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))

    def _take_refused(self, names: Iterable[str]) -> list[Any]:
        """Take requests off the engine, wherever they are in their prompt."""
        manager = self.kv_cache_manager
        for name in names:
            if (
                name not in self._held
            ):  # its plan was sure to be taken, so its blocks are in the cache, without the plan's edits
                manager.evict_blocks({i for ids in manager.get_block_ids(name) for i in ids})
        return self.finish_requests(names, RequestStatus.FINISHED_ERROR)


def _to_compute(request: Any) -> int:
    tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return max(tokens, 0)


def _is_unstarted(request: Any) -> bool:
    """Whether its prompt is still to be computed. After a preemption it may be split: a trace's edits are replayed."""
    return not (request.status == RequestStatus.PREEMPTED or request.num_computed_tokens)


def _unstarted_trace(request: Any) -> TraceRequest | None:
    """The trace of a request whose prompt is still to be computed."""
    return TraceRequest.of(request.sampling_params) if _is_unstarted(request) else None


class MidstreamScheduler(_Rules, Scheduler):
    """For engines without async scheduling."""


class AsyncMidstreamScheduler(_Rules, AsyncScheduler):
    """For engines with async scheduling."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler that fits the engine; given to vLLM as `scheduler_cls`."""
    tie_to_parent()  # a scheduler is made in the engine's process
    register()  # block hashes are made here, and vLLM may not have loaded its plugins (VLLM_PLUGINS)
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncMidstreamScheduler if asynchronous else MidstreamScheduler)(vllm_config, *args, **kwargs)
