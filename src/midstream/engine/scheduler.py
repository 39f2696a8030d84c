"""vLLM's scheduler with six more rules:

- a traced prompt is computed in one step;
- requests with a trace in the forward get steps of their own;
- plans of a server's clients take a limited time of each step;
- the scores of probes leave with a request's next tokens, and a probe may end its request before these tokens;
- blocks of planned requests stay out of the prefix cache until the workers have accepted the plan;
- KV blocks that a plan or a trace has changed are cleared before another request gets them.

If a traced request's prompt does not fit into the coming step, the request waits. All later requests in the queue also wait, so no request
starves.
Chunked prefill, prefix caching and async scheduling stay on.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from midstream.engine.plugin import Replacement, apply_replacements, follow_parent
from midstream.engine.prefix_cache import AcceptedPlans, EditedBlocks, holding_back, rekey, remember
from midstream.engine.seams import Role
from midstream.engine.shares import FEW, Costly, Share, StepShares
from midstream.plan.probes import ScoreChunk
from midstream.plan.work import StepWork
from midstream.runtime.request import RequestEnd, StepEnds, TraceRequest
from midstream.settings import NAME, Settings, is_ours

_RETRY_SECONDS = 0.02  # until traced requests that could not begin try again


class StepTurns:
    """Decides which kind of step comes next, by the duration of earlier steps.

        traced = turns.next()            # while there are requests of both kinds
        turns.begin(output, traced)      # when the step is scheduled
        turns.end(output)                # when its results have come

    Traces that run in the forward make a step slow, so they get steps of their own and a bounded share of the time.
    After a traced step, the other requests get `(1 - share) / share` times its duration. Async scheduling and pipelines schedule steps
    before earlier steps have ended, so a step lasts from the end of the step before it.

    Args:
        share: the share of the time that traced steps get while there are other requests; above 0 and below 1.
        clock: returns seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._factor = (1 - share) / share
        self._clock = clock
        self._owed = 0.0  # seconds, to the other requests
        # By the output's id: whether the step is traced, its start, and the output.
        self._running: dict[int, tuple[bool, float, Any]] = {}
        self._ended = -math.inf

    def next(self) -> bool | None:
        """Whether the coming step is traced. None if no step may start: wait until the running steps have ended.

        A traced step starts alone. In one process with the worker, the scheduler gets the results of earlier steps only after the host's
        part of a step, and would count the traced step's time as theirs.
        """
        running = [traced for traced, *_ in self._running.values()]
        if self._owed > 0 or any(running):  # the duration of a traced step is not known before its end
            return False
        return None if running else True

    def begin(self, output: Any, traced: bool) -> None:
        """A step was scheduled while there are traced requests."""
        if output.total_num_scheduled_tokens:
            self._running[id(output)] = traced, self._clock(), output
        elif traced:
            self._owed = _RETRY_SECONDS  # no traced request could start
        else:
            self._owed = 0.0

    def end(self, output: Any) -> None:
        """The step's results have come."""
        if (step := self._running.pop(id(output), None)) is None:
            return
        (traced, began, _), now = step, self._clock()
        took, self._ended = now - max(began, self._ended), now
        self._owed = took * self._factor if traced else self._owed - took

    def forget(self) -> None:
        """Start again, for later requests. `end` will not be called for the running steps."""
        self._running.clear()
        self._owed, self._ended = 0.0, -math.inf


@dataclass(frozen=True)
class RequestState:
    """The state of a request with a trace or a plan, until it ends.

    Attributes:
        changes_kv: whether it may write KV that differs from the model's own.
        held_from: see `AcceptedPlans.held_from`; None once the workers have accepted its plan.
        in_forward: whether it has a trace in the forward.
        is_apart: whether it gets steps apart from requests without such a trace. False after its trace's code has ended, and if
            traces share steps.
        is_unstarted: whether it has a trace and had not begun when this was last checked.
        work: for a plan from HTTP, its cost for each step, and the packed plan; else None.
    """

    changes_kv: bool
    held_from: int | None
    in_forward: bool
    is_apart: bool
    is_unstarted: bool
    work: tuple[StepWork, Hashable] | None = None

    @property
    def is_costly(self) -> bool:
        return self.work is not None

    @property
    def is_held(self) -> bool:
        return self.held_from is not None


# The queue may be long. So the scheduler counts the states with each of these flags, and looks through them only if there are any.
_TALLIED = ("changes_kv", "in_forward", "is_apart", "is_unstarted", "is_held", "is_costly")


class _Rules:
    """The rules, as a base class before vLLM's scheduler.

    `schedule` and `update_from_output` are overridden on the object, and only while there are requests with a trace or a plan. Other steps
    run vLLM's own methods: on a small model, the two methods took 0.3 % of a step.
    """

    kv_cache_manager: Any
    waiting: Any
    running: list[Any]
    requests: dict[str, Any]
    vllm_config: Any
    scheduler_config: Any
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    finish_requests: Any
    _turns: StepTurns | None = None
    _share = Share()  # of the coming step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ends: dict[str, RequestEnd] = {}  # of requests, until the workers have been told
        settings = Settings.of(self.vllm_config)
        self._takes_traces = settings.allow_traces
        # With an external launcher, each rank has a scheduler. All must make the same decisions, but their clocks differ.
        is_one = self.vllm_config.parallel_config.distributed_executor_backend != "external_launcher"
        self._turns = StepTurns(settings.trace_share) if settings.trace_share < 1 and is_one else None
        self._states: dict[str, RequestState] = {}
        self._counts = Counter[str]()  # the number of states with each flag of `_TALLIED`
        self._shares, self._share = StepShares(), Share()
        self._apart_is_stuck = False  # whether requests waited for the last traced step, and none began in it
        self._scores: dict[str, list[ScoreChunk]] = {}  # scores that have not left yet, by request
        self._accepted = AcceptedPlans()
        self._edited = self.kv_cache_manager.block_pool.midstream = EditedBlocks()

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if (
            not is_ours(request) or request.request_id not in self.requests
        ):  # vLLM drops a request that only ends a session
            return
        trace = TraceRequest.of(request.sampling_params) if self._takes_traces else None
        in_forward, sharing = trace is not None and not trace.is_behind, remember(request)
        work = sharing.plan.work if trace is None and sharing.plan is not None else None
        self._states[request.request_id] = state = RequestState(
            sharing.changes_kv,
            self._accepted.held_from(request),
            in_forward,
            in_forward and self._turns is not None,
            trace is not None,
            (work, sharing.wire) if work is not None else None,
        )
        self._tally(state, 1)
        self.schedule, self.update_from_output = self._schedule, self._update

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        states, counts = self._states, self._counts

        def held_from(name: str) -> int | None:
            return states[name].held_from if name in states else None

        with holding_back(self.kv_cache_manager, held_from) if counts["is_held"] else contextlib.nullcontext():
            turns, are_alone = self._turns if counts["is_apart"] else None, counts["in_forward"] == len(self.requests)
            traced = False if turns is None else are_alone or turns.next()
            shares = counts["is_costly"] and traced is False
            self._share = self._shares.next(*self._costly()) if shares else Share()
            is_whole = are_alone if turns is not None else self._share == Share()
            schedule = self._schedule_together if is_whole else partial(self._schedule_apart, traced)
            output = schedule(*args, **kwargs)
            if turns is not None and traced is not None:
                turns.begin(output, traced)
        if counts["changes_kv"]:
            self._note_written(output)
        if self._ends:
            output.midstream_finished = {n: self._ends.pop(n) for n in output.finished_req_ids if n in self._ends}
        if not (states or self._ends):
            del self.schedule, self.update_from_output
            if self._turns is not None:
                self._turns.forget()  # `_update` is not called for the running steps
        return output

    def _tally(self, state: RequestState, by: int) -> None:
        for name in _TALLIED:
            self._counts[name] += by * getattr(state, name)

    def _change(self, name: str, **to: Any) -> None:
        """Change the state of a request, if it is alive."""
        if (state := self._states.get(name)) is not None:
            self._tally(state, -1)
            self._states[name] = state = replace(state, **to)
            self._tally(state, 1)

    def _costly(self) -> tuple[list[Costly], bool]:
        """The requests whose plans cost time, and whether others have prompts to compute."""
        # Some models take their prompts in pieces of a fixed size only.
        can_cut = self.scheduler_config.enable_chunked_prefill and not getattr(
            self, "need_mamba_block_aligned_split", False
        )
        found, others = list[Costly](), False
        waiting = (request for request in self.waiting if not _is_paused(request))
        for request in (*self.running, *islice(waiting, self.max_num_running_reqs)):  # no others can be in the step
            state, tokens = self._states.get(request.request_id), max(_to_compute(request), 1)
            if state is None or state.work is None:
                others = others or tokens > FEW or _is_unstarted(request)
                continue
            tokens, may_be_cut = min(tokens, self.max_num_scheduled_tokens), can_cut and not request.mm_features
            found.append(Costly(request.request_id, *state.work, tokens, _is_unstarted(request), may_be_cut))
        return found, others

    def _schedule_together(self, *args: Any, **kwargs: Any) -> Any:
        if self._share.cut is not None:
            return self._schedule_cut(*args, **kwargs)
        if self._counts["is_unstarted"] and self._may_begin_traces():
            return self._schedule_in_one_step(*args, **kwargs)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _is_hidden(self, request: Any) -> bool:
        """Whether the request waits because plans take the time of the coming step."""
        share = self._share
        if share.cut is None or request.request_id == share.cut:
            return request.request_id in share.hidden
        return request.request_id in share.hidden or _is_unstarted(request) or _to_compute(request) > FEW

    def _schedule_apart(self, traced: bool | None, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step of the requests with `is_apart` (True), of all others (False), or of none (None). Requests that wait because of
        `_share` are left out. vLLM sees only the others.
        """
        apart = {name for name, state in self._states.items() if state.is_apart}
        running, waiting = self.running, self.waiting
        able = [request for request in waiting if not _is_paused(request)]
        near = able if self._share == Share() else able[: self.max_num_running_reqs]  # as in `_costly`
        waits = [
            request for request in near if (request.request_id in apart) is traced and not self._is_hidden(request)
        ]
        if self._apart_is_stuck and traced is False:  # room that gets free is for the request that waits longest
            free = set(takewhile(lambda request: request.request_id not in apart, able))
            waits = [request for request in waits if request in free]
        shown = [
            request for request in running if (request.request_id in apart) is traced and not self._is_hidden(request)
        ]
        before, hidden = set(running), len(running) - len(shown)
        given: list[Any] = []
        # Requests that vLLM does not see keep their slots, and paused sessions theirs.
        slots = self.max_num_running_reqs - len(running) - (len(waiting) - len(able))
        for group in self._groups(waits):
            if len(given) + len(group) > slots:
                break
            given += group
        self.running, self.waiting = shown, type(waiting)()
        for request in given:
            self.waiting.add_request(request)
        self.max_num_running_reqs -= hidden
        output = self._schedule_together(*args, **kwargs)
        self.max_num_running_reqs += hidden
        unserved, known = set(self.waiting), set(given)  # the unserved ones include preempted requests
        new = [request for request in self.running if request not in before]
        waiting.remove_requests([request for request in given if request not in unserved])
        for request in reversed(list(self.waiting)):
            if request not in known:
                waiting.prepend_request(request)
        self.running, self.waiting = [request for request in running if request not in unserved] + new, waiting
        if traced:
            self._apart_is_stuck = bool(waits) and not new
        return output

    def _schedule_cut(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step in which one request gets at most the tokens of its share. The other requests come first."""
        name, most = self._share.cut, self.max_num_scheduled_tokens
        self.running.sort(key=lambda request: request.request_id == name)  # the list is this step's own
        others = sum(_to_compute(request) for request in self.running if request.request_id != name)
        self.max_num_scheduled_tokens = min(most, max(others, 0) + self._share.most)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = most

    def _note_written(self, output: Any) -> None:
        """Note the blocks that the step writes for requests with edits or traces."""
        cached = output.scheduled_cached_reqs
        for begun in output.scheduled_new_reqs:
            if self._changes_kv(begun.req_id):
                self._edited.write(begun.block_ids)
        for name, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and self._changes_kv(name):
                self._edited.write(block_ids)

    def _changes_kv(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and state.changes_kv

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        """vLLM's list of blocks to clear before the step, and the blocks that hold edits. vLLM calls this for every step."""
        before = super()._get_new_block_ids_to_zero()  # type: ignore[misc]
        edited = self._edited.take()
        return sorted({*edited, *(before or ())}) if edited else before

    def _may_begin_traces(self) -> bool:
        """Whether a traced request may begin in the coming step."""
        if len(self.running) >= self.max_num_running_reqs:
            return False
        for name in [name for name, state in self._states.items() if state.is_unstarted]:
            self._change(name, is_unstarted=_is_unstarted(self.requests[name]))
        return self._counts["is_unstarted"] > 0

    @property
    def has_ends_to_tell(self) -> bool:
        """Whether a request with a trace or a plan has ended and the workers do not know it yet."""
        return bool(self._ends)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(request):
            self._ends[request.request_id] = RequestEnd(request.num_tokens)
        if (state := self._states.pop(request.request_id, None)) is not None:
            self._tally(state, -1)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        rekey(request)
        if (state := self._states.get(request.request_id)) is not None and state.in_forward:
            # Its edits are made again, also if its trace has ended.
            self._change(request.request_id, is_apart=self._turns is not None)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        remember(session)
        session.sampling_params = update.sampling_params  # vLLM hashes the new blocks before it sets the parameters
        super()._update_request_as_session(session, update)  # type: ignore[misc]

    def _schedule_in_one_step(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule each traced prompt that waits in one step, or leave it for a later step."""
        held = self._take_held_back()
        threshold = "vllm.config.SchedulerConfig.long_prefill_token_threshold"
        try:
            with Replacement(threshold, self.scheduler_config, 0):
                return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in held:  # in order, since all requests after the first one were held back, too
                self.waiting.add_request(request)

    def _take_held_back(self) -> list[Any]:
        """Take the requests that have to wait off the queue: the first trace that does not fit, and all later requests."""
        budget = self.max_num_scheduled_tokens - sum(map(_to_compute, self.running))
        slots = self.max_num_running_reqs - len(self.running)
        groups = self._groups(self.waiting)
        grouped = list(chain.from_iterable(groups))
        if grouped != list(self.waiting):  # vLLM takes them in the order of the queue
            self.waiting.remove_requests(grouped)
            for request in grouped:
                self.waiting.add_request(request)
        for position, group in enumerate(groups):
            need, trace = sum(map(_to_compute, group)), _unstarted_trace(group[0])
            if trace is not None:
                all_fit = not trace.together or len(group) == trace.size <= slots
                if need > budget or not all_fit:
                    held = list(chain.from_iterable(groups[position:]))
                    self.waiting.remove_requests(held)
                    return held
            budget, slots = budget - need, slots - len(group)
        return []

    def _groups(self, waiting: Iterable[Any]) -> list[list[Any]]:
        """Group the requests: those that must begin together form a group. The groups have the order of their first requests.

        Requests of several clients may come interleaved.
        """
        groups: dict[str, list[Any]] = {}
        for request in waiting:
            state = self._states.get(request.request_id)
            trace = _unstarted_trace(request) if state is not None and state.is_unstarted else None
            name = f"trace {trace.trace}" if trace is not None and trace.together else request.request_id
            groups.setdefault(name, []).append(request)
        return list(groups.values())

    def _update(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step_ends: StepEnds = getattr(model_runner_output, "midstream", None) or StepEnds()
        if self._turns is not None:
            self._turns.end(scheduler_output)
        for begun in scheduler_output.scheduled_new_reqs:
            if begun.req_id in self._states and begun.req_id not in step_ends.errors:
                self._accept_plan(begun.req_id, begun.sampling_params)
        for name in step_ends.done:
            self._change(name, is_apart=False)
        for name in step_ends.stops:
            if (request := self.requests.get(name)) is not None:
                request.max_tokens = request.num_output_tokens + 1  # the token of this step is its last
                request.sampling_params.min_tokens = 0  # vLLM ends no request that has fewer tokens
        refused = self._end_refused(step_ends.errors) if step_ends.errors else []
        ended = step_ends.probe_stops
        stopped = self.finish_requests(ended, RequestStatus.FINISHED_STOPPED) if ended else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for request in refused:
            if request.request_id in self._ends:
                self._ends[request.request_id] = RequestEnd(request.num_tokens, step_ends.errors[request.request_id])
            self._put_end(outputs, request, FinishReason.ERROR, step_ends.errors[request.request_id])
        for request in stopped:
            stop = ended[request.request_id]
            if request.request_id in self._ends:
                self._ends[request.request_id] = RequestEnd(stop.position + 2)  # the token at the position was read
            self._put_end(outputs, request, FinishReason.STOP, stop.reason)
        self._put_scores(outputs, step_ends.scores)
        return outputs

    def _put_end(self, outputs: dict[int, Any], request: Any, finish_reason: Any, stop_reason: str) -> None:
        """Add the last output, without tokens, of a request that the workers have ended."""
        reasons = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        output = EngineCoreOutput(request.request_id, [], **reasons, events=request.take_events())
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def _put_scores(self, outputs: dict[int, Any], new: dict[str, list[ScoreChunk]]) -> None:
        """Put scores on the outputs of their requests. A part of a prompt has no output, so its scores wait for the next one."""
        for name, chunks in new.items():
            self._scores.setdefault(name, []).extend(chunks)
        for output in chain.from_iterable(each.outputs for each in outputs.values()) if self._scores else ():
            if chunks := self._scores.pop(output.request_id, []):
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), NAME: chunks}
        for name in [name for name in self._scores if name not in self.requests]:
            del self._scores[name]  # its client has gone

    def _accept_plan(self, name: str, sampling_params: Any) -> None:
        """Note that the workers have accepted a request's plan, and cache its blocks, since their KV now matches their keys."""
        self._accepted.add(sampling_params)
        if self._states[name].is_held:
            self._change(name, held_from=None)
            request = self.requests[name]
            self.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))

    def _end_refused(self, names: Iterable[str]) -> list[Any]:
        """End refused requests, also in the middle of their prompt."""
        manager = self.kv_cache_manager
        for name in names:
            state = self._states.get(name)
            # Blocks that were not held back are in the cache with the plan's key, but without its edits.
            if state is None or not state.is_held:
                manager.evict_blocks({i for ids in manager.get_block_ids(name) for i in ids})
        return self.finish_requests(names, RequestStatus.FINISHED_ERROR)


def _to_compute(request: Any) -> int:
    tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return max(tokens, 0)


def _is_paused(request: Any) -> bool:
    """Whether it is a session of streaming input that waits for its next part."""
    return str(request.status.name) == "WAITING_FOR_STREAMING_REQ"


def _is_unstarted(request: Any) -> bool:
    """Whether none of its prompt is computed. A preempted request counts as started: its prompt may be split, and its trace's edits are
    replayed."""
    return not (request.status == RequestStatus.PREEMPTED or request.num_computed_tokens)


def _unstarted_trace(request: Any) -> TraceRequest | None:
    return TraceRequest.of(request.sampling_params) if _is_unstarted(request) else None


class MidstreamScheduler(_Rules, Scheduler):
    """For engines without async scheduling."""


class AsyncMidstreamScheduler(_Rules, AsyncScheduler):
    """For engines with async scheduling."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler that fits the engine. vLLM's argument `scheduler_cls` names this function."""
    follow_parent()  # vLLM makes the scheduler in the engine's process
    apply_replacements(Role.SCHEDULER)
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncMidstreamScheduler if asynchronous else MidstreamScheduler)(vllm_config, *args, **kwargs)
