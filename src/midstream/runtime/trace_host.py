"""Runs the traces of one worker: requests of a step become bodies in the forward pass, whose results go to the client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from midstream.arch import Architecture
from midstream.capture.rows import Rows, join_in_order
from midstream.errors import (
    NOT_FINITE,
    MidstreamError,
    NeverReachedError,
    NotFiniteError,
    ShapeError,
    StageFailedError,
    TraceError,
    TracesNotAllowedError,
)
from midstream.hooks import is_in_body
from midstream.plan.running import hold
from midstream.ranks.link import Fetch
from midstream.ranks.stages import Stages
from midstream.runtime.points import points_of, trace_keys, tree_at, tree_of
from midstream.runtime.request import StepEnds, TraceRequest
from midstream.runtime.sending import Reports
from midstream.sites import Key, NotFinite, Point
from midstream.trace.batch_rows import BatchLayout, FlatRows
from midstream.trace.body import Body, Randomness
from midstream.trace.code import Failure, Outcome, TraceProgram, outcome
from midstream.trace.envoy import Envoy, ModelEnvoy
from midstream.trace.forward import LAST_POINTS, Calling
from midstream.trace.interleaver import BehindStep, Interleaver
from midstream.trace.shipping import unship
from midstream.trace.tracer import BodyTracer
from midstream.trace.visit import Journal
from midstream.trace.weights import on_device

# Waits for a step's rows. Returns request id -> where its rows became infinite or NaN.
FindNotFinite = Callable[[], dict[str, NotFinite]]


@dataclass
class TracedGroup:
    """One trace: the programs of its requests, and what its invokes share.

    Attributes:
        programs: for each request, the programs of its bodies; or the error, if they could not be loaded.
        shared: values shared by invokes, by name.
        running: the engine's ids of the requests that run.
        ended: how many have ended.
    """

    programs: list[list[TraceProgram]] | MidstreamError
    shared: dict[str, Any] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    ended: int = 0

    def programs_of(self, trace: TraceRequest) -> list[TraceProgram]:
        """The programs of one request. Raises MidstreamError if there are none."""
        if isinstance(self.programs, MidstreamError):
            raise self.programs.with_traceback(None)
        there = len(self.programs)
        programs = self.programs[trace.index] if 0 <= trace.index < there else []
        if len(programs) != trace.bodies:
            raise TraceError(
                f"Request {trace.index} of a trace came with code for {there}; send its requests with the code made for them."
            )
        return programs


@dataclass
class TracedRequest:
    """One running request with a trace.

    Attributes:
        programs: by the name of the body.
        main: name of the trace's own body; the others are standing edits.
        seen: positions that the bodies have processed.
        generated: tokens generated so far.
        outcomes: those of the bodies that have ended.
        journals: those of its bodies, in their order.
        goes_on: fetches from the last pipeline stage whether the bodies have another step.
        forward: what runs its bodies.
        is_done: whether its bodies have ended before the request. A preemption repeats their edits.
        ends_text: for each generated token, whether one of the request's stop strings ends the text there; None if it has none.
    """

    trace: TraceRequest
    programs: dict[str, TraceProgram]
    main: str
    prompt_length: int
    sampling: Any
    forward: Interleaver
    seen: int = 0
    generated: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    journals: list[Journal] = field(default_factory=list)
    goes_on: Fetch | None = None
    is_done: bool = False
    ends_text: EndsText | None = None

    @property
    def bodies(self) -> list[str]:
        """The names of its bodies in the order in which they run: standing edits first, then the trace's own."""
        return [*(f"{self.main}#{number}" for number in range(self.trace.bodies - 1)), self.main]

    @property
    def steps(self) -> str:
        """The name under which the last pipeline stage publishes that the bodies have another step."""
        return f"{self.main} steps"

    @property
    def open_bodies(self) -> list[str]:
        """The bodies that have not ended."""
        return [name for name in self.programs if name not in self.outcomes]

    @property
    def has_failed(self) -> bool:
        return any(outcome.failure is not None for outcome in self.outcomes.values())

    @property
    def may_stop(self) -> bool:
        """Whether a token can end the request."""
        sampling = self.sampling
        return sampling.eos_token_id is not None or bool(sampling.stop_token_ids) or self.ends_text is not None

    def is_over(self, token: int | None, max_model_len: int) -> bool:
        """Whether the request ends with this token.

        There may be one more step, which the trace must not see: the async scheduler runs ahead, and the front end finds stop strings.
        """
        sampling = self.sampling
        if token is not None and self.ends_text is not None and self.ends_text(token):
            return True
        if sampling.max_tokens is not None and self.generated >= sampling.max_tokens:
            return True
        if self.prompt_length + self.generated >= max_model_len:
            return True
        stops = token is not None and (token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()))
        return stops and self.generated >= sampling.min_tokens


EndsText = Callable[[int], bool]


def request_of(body: str) -> str:
    """The id of the request that has a body of this name: see `TracedRequest`."""
    return body.rpartition("/")[0]


class CapturedRows(NamedTuple):
    """The rows that a step captures for one request, whose bodies run when the forward is over.

    Attributes:
        fresh: where the request's new rows lie in the batch.
        last_row: where the request's logits and its sample are.
        rows: the captured rows; empty if the bodies read no site.
    """

    bodies: list[str]
    fresh: FlatRows
    last_row: FlatRows
    rows: list[Rows]


class TraceHost:
    """Runs the traces of a worker's requests.

    Args:
        envoy: the model as bodies see it.
        allow_traces: whether requests may carry code at all.
        max_model_len: the length at which the engine ends every request.
        vocab_size: all token ids are smaller.
        reports: sends the results.
        stages: the pipeline stages, if there are several.
        ends_text: makes `TracedRequest.ends_text` from sampling parameters with stop strings and the prompt's token ids.
        calling: called with a request's id and the arguments of a layer that its trace calls; see `Forward.calling`.

    Attributes:
        step_is_traced: whether a trace shares the step that is being prepared or run.
        acts_in_forward: whether one of these traces runs in the forward, and not behind the step.
        step_is_uncompiled: whether that step has to run uncompiled, since its traces use more than the sites in the compiled forward.
    """

    def __init__(
        self,
        envoy: ModelEnvoy,
        interleaver: Interleaver,
        arch: Architecture,
        allow_traces: bool,
        max_model_len: int,
        vocab_size: int,
        reports: Reports,
        stages: Stages | None = None,
        ends_text: Callable[[Any, Sequence[int]], EndsText] = lambda sampling, prompt: lambda token: False,
        calling: Calling | None = None,
    ) -> None:
        self._ends_text = ends_text
        self.envoy = envoy
        self.arch = arch
        self.interleaver = interleaver
        self._behind = BehindStep(envoy._module, interleaver.order, stages, interleaver.peers, interleaver.aliases)
        if calling is not None:
            interleaver.calling = self._behind.calling = lambda body, args: calling(request_of(body), args)
        self._behind_envoy = envoy.on(self._behind)
        self._captured: list[CapturedRows] = []  # of each request that runs behind the step
        self._stages = stages
        self.reports = reports
        self._device = next(envoy._module.parameters()).device
        self._ends = StepEnds()  # of the step that is under way
        self.traced_steps = self.forward_traced_steps = self.uncompiled_steps = 0
        self._allow_traces = allow_traces
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._requests: dict[str, TracedRequest] = {}
        self._groups: dict[str, TracedGroup] = {}
        self._weights: dict[str, torch.Tensor] = {}  # the client's weights, by digest, for later traces
        self.step_is_traced = self.acts_in_forward = self.step_is_uncompiled = False
        self._graph_keys: dict[Point, Key] = {}
        self._in_step: dict[int, tuple[str, TracedRequest]] = {}  # by the request's row in the logits and the samples
        self._running: list[Interleaver] = []  # those with bodies in this step
        self._behind_points: dict[Key, list[Point]] = {}  # what was captured in this step, in the order of the forward
        self._order = {point: i for i, point in enumerate(points_of(arch))}
        self._expects_logits = False
        self.find_not_finite: FindNotFinite | None = None  # of the step that is being sampled

    # From the worker.

    def watch_graph_sites(self, points: Sequence[Point]) -> None:
        """Tell the host which points are built into the compiled forward."""
        self._graph_keys = trace_keys(self.arch, points)

    def schedule(
        self,
        new: Mapping[str, tuple[Any, Sequence[int]]],
        scheduled: Collection[str],
        finished: set[str],
        computed: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare for the coming step, as the scheduler has sent it.

        Args:
            new: request id -> (sampling parameters, the prompt's token ids) of requests that begin.
            scheduled: the requests in this step.
            finished: requests that have ended, also by an abort.
            computed: request id -> tokens computed before, where that is known; fewer than last time after a preemption.
        """
        for name in [name for name in self._requests if name in finished]:  # in the same order on all ranks
            self._end(name)
        self.reports.flush()  # what follows may wait for other stages, and import packages
        self._end_what_is_over(scheduled)
        self.reports.flush()
        for name, (sampling, prompt) in new.items():
            trace = TraceRequest.of(sampling)
            if trace is not None and name not in self._requests:
                self._begin(name, trace, sampling, prompt)
        known = computed or {}
        traced = [
            request
            for name, request in self._requests.items()
            if (known.get(name, request.seen) < request.seen if request.is_done else name in scheduled)
        ]
        in_forward = [request for request in traced if not request.trace.is_behind]
        in_graphs = bool(self._graph_keys) and all(request.trace.keeps_to_graphs for request in in_forward)
        self.step_is_traced, self.acts_in_forward = bool(traced), bool(in_forward)
        self.step_is_uncompiled = self.acts_in_forward and not in_graphs
        self.traced_steps += self.step_is_traced
        self.forward_traced_steps += self.acts_in_forward
        self.uncompiled_steps += self.step_is_uncompiled

    def set_weights(self, kept: Collection[str], new: Mapping[str, bytes]) -> None:
        """Hold the weights whose digests are in `kept`, and the new ones by their digests. Drops all others."""
        self._weights = {digest: weight for digest, weight in self._weights.items() if digest in kept}
        for digest, data in new.items():
            try:
                self._weights[digest] = on_device(data, self._device)
            except torch.OutOfMemoryError:  # each trace copies it to the device
                self._weights[digest] = on_device(data, None)
            hold(digest, self._weights[digest])  # for programs

    @property
    def is_idle(self) -> bool:
        """Whether no living request is or was traced, so that steps need no work of this host."""
        return not self._requests

    @property
    def may_have_written(self) -> bool:
        """Whether the trace of a living request runs or ran in the forward, and so may have written to it."""
        return not all(request.trace.is_behind for request in self._requests.values())

    @property
    def requests(self) -> list[str]:
        """The traced requests that are alive."""
        return list(self._requests)

    def take_ends(self) -> StepEnds:
        """The requests that end with this step, and those whose trace does."""
        ends, self._ends = self._ends, StepEnds()
        return ends

    # Requests.

    def _begin(self, name: str, trace: TraceRequest, sampling: Any, prompt: Sequence[int]) -> None:
        forward, envoy = (self._behind, self._behind_envoy) if trace.is_behind else (self.interleaver, self.envoy)
        length = len(prompt)
        request = TracedRequest(trace, {}, f"{name}/{trace.index}", length, sampling, forward)
        if sampling.stop:
            request.ends_text = self._ends_text(sampling, prompt)
        try:
            programs = self._programs(name, trace)
        except MidstreamError as error:
            self._fail(name, request, error)
            return
        group = self._groups[trace.trace]
        self._requests[name] = request
        for body_name, program in zip(request.bodies, programs, strict=True):
            request.programs[body_name] = program
            body = Body(body_name, partial(program.run, envoy, group.shared), in_engine=True)
            body.linked = group if trace.together else None
            body.random = Randomness(body_name, self._device)
            assert body.journal is not None
            if trace.is_behind:
                body.journal = None  # a plan makes its writes, also where positions are computed again
            else:
                request.journals.append(body.journal)
            forward.add(body)

    def _programs(self, name: str, trace: TraceRequest) -> list[TraceProgram]:
        if not self._allow_traces:
            raise TracesNotAllowedError(
                "This engine takes no traces: they are code. Start it with traces allowed (midstream.VLLM does)."
            )
        group = self._groups.get(trace.trace)
        if group is None:
            if trace.programs is None:
                raise TraceError(
                    "The trace's code came with a request that the engine has not begun; send its requests in order."
                )
            group = self._groups[trace.trace] = self._load(
                trace.programs, self._behind_envoy if trace.is_behind else self.envoy
            )
        group.running.add(name)
        try:
            return group.programs_of(trace)
        except MidstreamError:
            self._leave(name, trace)
            raise

    def _load(self, programs: bytes, envoy: ModelEnvoy) -> TracedGroup:
        try:
            return TracedGroup(unship(programs, partial(self._resolve, envoy), self._device, self._weights))
        except MidstreamError as error:
            return TracedGroup(error)
        except ModuleNotFoundError as error:
            return TracedGroup(
                TraceError(f"The trace uses the package {error.name!r}, which is not installed where the engine runs.")
            )
        except Exception as error:
            return TracedGroup(TraceError(f"The trace cannot be loaded in the engine: {type(error).__name__}: {error}"))

    def _leave(self, name: str, trace: TraceRequest) -> None:
        """The request is over. If it was the last one of its trace, forget the trace."""
        group = self._groups[trace.trace]
        group.running.discard(name)
        group.ended += 1
        if not group.running and group.ended == trace.size:
            del self._groups[trace.trace]

    def _resolve(self, envoy: ModelEnvoy, reference: tuple[Any, ...]) -> Any:
        """The object of this process for a reference in a shipped trace."""
        kind, *rest = reference
        if kind == "model":
            return envoy
        if kind == "tracer":
            return BodyTracer()
        (path,) = rest
        modules = self.interleaver.modules
        if path not in (modules if self._stages is None else self._stages.modules):
            raise TraceError(f"The model has no module {path!r}.")
        return Envoy(modules.get(path), path, envoy._forward)

    # Pipeline stages.

    @property
    def _is_last(self) -> bool:
        """Whether tokens are sampled on this stage."""
        stages = self._stages
        return stages is None or stages.index == stages.size - 1

    def end_stage(self) -> None:
        """This stage has sent its output to the next one: end the step here. Only the last stage sees the tokens."""
        if not self.step_is_traced or self._is_last:
            return
        stages = self._stages
        assert stages is not None
        self._run_behind()
        self._end_interleavers()
        for name, request in self._in_step.values():
            request.generated += 1
            self._gather_done(request)
            if request.has_failed or not request.open_bodies:
                self._end(name, goes_on=True)
                continue
            if request.trace.stream:
                self._send_snapshot(name, request)
            request.goes_on = stages.link.fetch(stages.size - 1, request.steps, request.generated)
        self._close_step()

    def _end_what_is_over(self, scheduled: Collection[str]) -> None:
        """End the requests that the last stage has ended: async scheduling may run a step too many."""
        for name in scheduled:
            request = self._requests.get(name)
            if request is None or request.is_done or request.goes_on is None:
                continue
            try:
                request.goes_on.wait()
            except NeverReachedError:
                self._end(name, goes_on=True)

    def _failed_elsewhere(self, body_name: str) -> StageFailedError | None:
        stages = self._stages
        return stages.link.failure_of(body_name) if stages is not None else None

    def _fail(self, name: str, request: TracedRequest, error: MidstreamError) -> None:
        """The request cannot begin: tell the other stages and the client, and stop it."""
        if (stages := self._stages) is not None:
            failure = StageFailedError(f"The trace cannot begin on pipeline stage {stages.index}: {error}")
            for published in (*request.bodies, request.steps):
                stages.link.end(published, failure)
        self.reports.send(name, request.trace, [Outcome(failure=Failure.of(error), name=request.main)])
        self._ends.stops.append(name)

    def _end(self, name: str, goes_on: bool = False) -> None:
        """End the request's bodies, if they have not ended, and send their outcomes. `goes_on`: the engine goes on with the request."""
        request = self._requests[name]
        was_done, request.is_done = request.is_done, True
        if not goes_on:
            del self._requests[name]
        if was_done:
            return
        stages = self._stages
        if stages is not None:
            stages.link.end(request.steps, NeverReachedError("the trace has no further step"))
        for body_name in request.open_bodies:
            self._gather(request, body_name)
        own, edits = request.outcomes[request.main], [request.outcomes[each] for each in request.bodies[:-1]]
        self.reports.send(name, request.trace, [own, *(o for o in edits if o.failure is not None or o.values)])
        self._leave(name, request.trace)

    def drop(self, traces: Collection[str]) -> None:
        """Forget traces whose requests the client has aborted; nobody waits for their results."""
        for name, request in list(self._requests.items()):
            if request.trace.trace in traces:
                del self._requests[name]
                if request.is_done:
                    continue
                for body_name in request.programs:
                    request.forward.discard(body_name)
                if (stages := self._stages) is not None:
                    stages.link.drop([*request.programs, request.steps])
                self.reports.end(name)
        for trace in traces:
            self._groups.pop(trace, None)

    def _gather(self, request: TracedRequest, body_name: str) -> None:
        body = request.forward.finish(body_name, self._failed_elsewhere(body_name))
        assert body is not None
        if (stages := self._stages) is not None:
            stages.end(body_name, body.error)
        request.outcomes[body_name] = outcome(body, request.programs[body_name])

    def _send_snapshot(self, name: str, request: TracedRequest) -> None:
        """Send what the request has saved so far."""
        if (done := request.outcomes.get(request.main)) is not None:
            values, steps = done.values, done.steps
        else:
            body = request.forward.bodies[request.main]
            values, steps = request.programs[request.main].snapshot(body), body.now + 1
        self.reports.send(name, request.trace, [Outcome(values, name=request.main, steps=steps)], final=False)

    # Steps, called by the runner's adapter.

    def begin_step(self, layout: BatchLayout, take_rows: Callable[[str], list[Rows]] = lambda name: []) -> None:
        """The batch is laid out; the forward comes next.

        `take_rows` gives the rows of a request that the forward will capture for its trace.
        """
        rows: dict[str, FlatRows] = {}
        replays: list[tuple[Journal, FlatRows]] = []
        last: dict[str, FlatRows] = {}
        self._in_step, self._captured = {}, []
        self._expects_logits = True
        self.interleaver.reachable = (
            None if self.step_is_uncompiled else frozenset((*self._graph_keys.values(), *LAST_POINTS))
        )
        for place, (name, scheduled) in enumerate(layout.each):
            if (request := self._requests.get(name)) is None:
                continue
            first, end = scheduled.first_position, scheduled.end
            if first < request.seen:
                again = scheduled.at(first, min(request.seen, end))
                replays += [(journal, again) for journal in request.journals]
            taken = take_rows(name) if request.trace.is_behind else []
            if end <= request.seen or request.is_done:
                continue
            fresh = scheduled.at(max(request.seen, first), end)
            last_row = FlatRows(place, place + 1, len(layout.request_ids))
            if request.trace.is_behind:
                self._captured.append(CapturedRows(request.open_bodies, fresh, last_row, taken))
            for body_name in request.open_bodies if not request.trace.is_behind else ():
                rows[body_name], last[body_name] = fresh, last_row
            request.seen = end
            self._in_step[place] = name, request
        self._running = []
        if rows or replays:
            self._running.append(self.interleaver)
            self.interleaver.begin_step(rows, replays, last)
        if self._captured:
            self._begin_behind()

    def _begin_behind(self) -> None:
        total, start = sum(each.fresh.count for each in self._captured), 0
        rows: dict[str, FlatRows] = {}
        last: dict[str, FlatRows] = {}
        for each in self._captured:
            for body_name in each.bodies:
                rows[body_name] = FlatRows(start, start + each.fresh.count, total, each.fresh.first_position)
                last[body_name] = each.last_row
            start += each.fresh.count
        distinct = {id(rows.planes): rows.planes for each in self._captured for rows in each.rows}
        captured = {plane[:2] for planes in distinct.values() for plane in planes}
        self._behind_points = {}
        for point in sorted(captured, key=lambda point: self._order[point]):
            binding = self.arch.bindings[point]
            self._behind_points.setdefault((binding.path, binding.kind), []).append(point)
        self._behind.captured = self._behind_points
        self._running.append(self._behind)
        self._behind.begin_step(rows, (), last)

    @torch.inference_mode()  # as in the forward, which is over
    def _run_behind(self) -> None:
        """The forward is over: run the bodies that run behind it, on what it has captured."""
        captured, self._captured = self._captured, []
        if self._behind not in self._running:
            return
        for key, points in self._behind_points.items():
            if self._behind.expects(key):
                values = {point: _rows_at(captured, (*point, "before")) for point in points}
                self._behind.fire(key, tree_of(self.arch, values), direct=True)

    def _end_interleavers(self) -> None:
        for interleaver in self._running:
            interleaver.end_step()
        self._running = []

    @property
    def _bodies(self) -> dict[str, Body]:
        return {**self.interleaver.bodies, **self._behind.bodies}

    def expects(self, point: Point) -> bool:
        """Whether a body waits for `point`, so that compiled code has to call `see_site` there."""
        key = self._graph_keys.get(point)
        return key is not None and self.interleaver.expects(key)

    def see_site(self, point: Point, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Compiled code is at `point`. Edits are written to its tensors."""
        if (key := self._graph_keys.get(point)) is not None:
            self.interleaver.fire(key, tree_at(self.arch, point, hidden, residual), direct=True)

    def see_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Let bodies read and write the logits, `[requests, vocab]`. A step's later calls, for prompt logprobs, return theirs unchanged."""
        if not self._expects_logits or is_in_body():
            return logits
        self._expects_logits = False
        self._run_behind()
        for interleaver in self._running:
            logits = interleaver.fire(("", "logits"), logits)
        return logits

    def see_samples(self, samples: torch.Tensor) -> torch.Tensor:
        """Let bodies read and write the sampled token ids, `[requests]`. Ends the step."""
        before = samples
        for interleaver in self._running:
            samples = interleaver.fire(("", "samples"), samples)
        self._end_interleavers()
        if samples is not before:
            samples = self._with_tokens(samples, before)
        tokens = samples.tolist() if any(request.may_stop for _, request in self._in_step.values()) else None
        self._fail_not_finite()
        for place, (name, request) in self._in_step.items():
            self._after_step(name, request, tokens[place] if tokens is not None else None)
        self._close_step()
        return samples

    def _close_step(self) -> None:
        """End the step: this stage has no more values for its bodies."""
        self._in_step = {}
        self.step_is_traced = False
        self.reports.flush()
        if self._stages is not None:
            self._stages.end_step(self._bodies)

    def _fail_not_finite(self) -> None:
        """Fail the traces of requests whose activations became infinite or NaN in this step."""
        wrote_here = any(journal for _, request in self._in_step.values() for journal in request.journals)
        may_have_written = wrote_here or self._stages is not None  # an earlier stage has the journals of its own writes
        if self.find_not_finite is None or not may_have_written:
            return  # traces that write nothing need not wait for the device
        for name, at in self.find_not_finite().items():
            if (request := self._requests.get(name)) is not None:
                for body_name in request.open_bodies:
                    body = request.forward.bodies[body_name]
                    body.fail(NotFiniteError(f"{NOT_FINITE}{self._first_written(body) or at}. Write smaller values."))

    def _first_written(self, body: Body) -> str | None:
        """Which write of a body was the first that is not finite, if one was."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # wait for the copies of the step's writes to host memory
        found = body.journal.first_not_finite() if body.journal is not None else None
        if found is None:
            return None
        key, where, position = found
        point = next((point for point, binding in self.arch.bindings.items() if binding == where), None)
        place = f"{point[0]} of layer {point[1]} ({body.written(key)})" if point is not None else body.written(key)
        return f"the trace wrote infinity or NaN to {place}, position {position}"

    def refusal(self, name: str, at: NotFinite) -> str | None:
        """Why a request that is not finite ends after its trace is done; None for other requests. Any thread may call."""
        request = self._requests.get(name)
        # A plan makes the writes of a trace that runs behind the step, and `PlanHost.refusal` gives the reason.
        if request is None or not request.is_done or request.trace.is_behind:
            return None
        return f"{NOT_FINITE}{at}: a trace, or an edit left on the model, has written to it. Write smaller values."

    def _with_tokens(self, samples: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The tokens that traces have written. A number that is no token would end the engine in its next step; here it fails its trace."""
        bad = (samples < 0) | (samples >= self._vocab_size)
        for place in bad.nonzero().flatten().tolist():
            text = f"model.samples was set to {int(samples[place])}; token ids are 0 to {self._vocab_size - 1}."
            for name in self._in_step[place][1].open_bodies if place in self._in_step else ():
                self._bodies[name].fail(ShapeError(text))
        return torch.where(bad, before, samples)

    def _after_step(self, name: str, request: TracedRequest, token: int | None) -> None:
        request.generated += 1
        failed = any(self._failed_elsewhere(body_name) is not None for body_name in request.programs)
        self._gather_done(request)
        asked = failed or request.has_failed or any(o.stopped for o in request.outcomes.values())
        if asked:
            self._ends.stops.append(name)
        over = asked or request.is_over(token, self._max_model_len)
        if over or not request.open_bodies:
            self._end(name, goes_on=not over)
            if not over:
                self._ends.done.append(name)
            return
        if request.trace.stream:
            self._send_snapshot(name, request)
        if (stages := self._stages) is not None:
            stages.link.publish(request.steps, request.generated, None, readers=range(stages.size - 1))

    def _gather_done(self, request: TracedRequest) -> None:
        for body_name in request.open_bodies:
            body = request.forward.bodies[body_name]
            over = body.done and not request.forward.is_watched_by(body)
            if over or self._failed_elsewhere(body_name) is not None:
                self._gather(request, body_name)

    # For tests and health.

    def gauges(self) -> dict[str, int]:
        """Objects that are alive. All but `weight_bytes` are zero when there is no traced request."""
        return {
            "requests": len(self._requests),
            "groups": len(self._groups),
            "bodies": len(self._bodies),
            "hooks": self.interleaver.hook_count,
            "queued_bytes": self.reports.queued_bytes,
            "weight_bytes": sum(weight.nbytes for weight in self._weights.values()),
        }


def _rows_at(captured: Sequence[CapturedRows], key: tuple[str, int, str]) -> torch.Tensor:
    """`[rows, width]`, what was captured at a site of all these requests; zeros for a request without it."""
    parts: list[torch.Tensor | int] = []
    for each in captured:
        has_site = any(key in rows.planes.by_key for rows in each.rows)
        parts += [join_in_order([rows.plane(key) for rows in each.rows], each.rows) if has_site else each.fresh.count]
    like = next(part for part in parts if isinstance(part, torch.Tensor))
    if len(parts) == 1:
        return like
    return torch.cat([like.new_zeros(part, like.shape[1]) if isinstance(part, int) else part for part in parts])
