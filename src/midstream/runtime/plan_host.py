"""Runs the plans of one worker: applies them to the rows of each step's requests, and sends captured rows to their destinations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from midstream.capture.rows import Rows, join_in_order
from midstream.errors import CaptureError, PlanError
from midstream.plan.compile import CompiledPlan, compile_plan
from midstream.plan.ops.knockout import Knockouts
from midstream.plan.probes import ProbeStop, ScoreChunk
from midstream.plan.values import ModelFacts, Plan, check, not_finite
from midstream.ranks.link import Link
from midstream.runtime.knockouts import AttentionCuts
from midstream.runtime.planned import (
    Acting,
    LoadedPlan,
    LoadedPlans,
    PlannedRequest,
    RequestTable,
    RunRow,
    Sources,
    rows_of_page,
)
from midstream.runtime.points import Pipeline, PointHooks
from midstream.runtime.programs import InGraph, ProgramAt
from midstream.runtime.request import PlanRequest, RequestEnd
from midstream.runtime.scores import RequestScores, ScoreLink, StepScores
from midstream.runtime.sending import DUE_BYTES, CaptureSender
from midstream.runtime.store import RunStore, VectorStore, recorded_run
from midstream.runtime.tables import RowProfiles, Tables
from midstream.sites import NotFinite
from midstream.trace.batch_rows import BatchLayout

_log = logging.getLogger(__name__)
# Three maps by request: new scores, ends by probes, and errors of failed selectors and programs.
StepResults = tuple[dict[str, list[ScoreChunk]], dict[str, ProbeStop], dict[str, str]]
# The requests of a step that have one row, at or after their `RequestTable.end`: their slots in the table, rows and positions, each
# `[requests]`.
_Generated = tuple[np.ndarray, np.ndarray, np.ndarray]
# The other planned requests of a step, each with its first row, its first position, and the position after its last one.
_Others = list[tuple[PlannedRequest, int, int, int]]


@dataclass
class RepeatedBatch:
    """A batch in which every request generates one token: the next step usually has the same requests.

    Attributes:
        requests: in the scheduler's order.
        acting: the sites in the graphs at which plans act in it, and the programs there.
        active: whether a plan acts in it.
        hooked: whether hooks may have to act.
        laid_out: the requests in the runner's order, once it has laid them out.
        rows: the batch's rows, from then on.
    """

    requests: list[str]
    acting: frozenset[Any]
    active: bool
    hooked: bool
    laid_out: list[str] = field(default_factory=list)
    rows: RowProfiles | None = None

    def repeats(self, scheduler_output: Any) -> bool:
        """Whether the coming step is this batch again, one token further."""
        cached = scheduler_output.scheduled_cached_reqs
        return (
            cached.req_ids == self.requests
            and scheduler_output.total_num_scheduled_tokens == len(self.requests)
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.finished_req_ids
            and not cached.resumed_req_ids  # after a reset of the prefix cache, requests begin again between two steps
        )

    def is_laid_out(self, request_ids: Sequence[str], total: int) -> bool:
        """Whether `rows` are those of a batch with these requests, in this order, padded to `total` rows."""
        return self.rows is not None and self.laid_out == request_ids and len(self.rows.profile_T) == total


class PlanHost:
    """Runs the plans of a worker's requests.

    Args:
        tables: what the site op reads.
        facts: about the whole model, for checks that only the engine can do.
        pipeline: which stage has which sites.
        link: to the other stages, if there are any.
        compiles: whether the forward is compiled or in graphs. Steps with plans at sites that are not built in then run uncompiled.
        dtype: the model's.
        speculative: whether the engine drafts tokens, whose rows may be rejected.
        cuts: carries out knockouts.
    """

    def __init__(
        self,
        tables: Tables,
        hooks: PointHooks,
        facts: ModelFacts,
        pipeline: Pipeline,
        *,
        link: Link | None,
        compiles: bool,
        device: torch.device,
        dtype: torch.dtype,
        record_bytes: int,
        captures: CaptureSender,
        cuts: AttentionCuts,
        speculative: bool = False,
    ) -> None:
        self.tables = tables
        self.hooks = hooks
        self.captures = captures
        self.facts = facts
        self.vectors = VectorStore(device)
        self.runs = RunStore(record_bytes)
        self.planned_steps = self.off_graph_steps = 0
        self.errors: dict[str, str] = {}
        self._laid_out: list[str] = []  # the requests of the running step, in the batch's order
        # Requests whose programs have failed on this worker -> why. Only the last stage's `errors` end requests. A failed edit on
        # another stage makes its rows NaN, so the last stage ends the request. After a failed capture, the client gets the error at the
        # request's end.
        self._failed: dict[str, str] = {}
        self._device, self._dtype = device, dtype
        self._pipeline, self._link, self._compiles = pipeline, link, compiles
        self._speculative, self._cuts = speculative, cuts
        self._requests: dict[str, PlannedRequest] = {}
        self._table = RequestTable()
        self._loaded = LoadedPlans(tables, hooks, pipeline, compiles, self._compile)
        # The batches that may repeat, by their first request. A pipeline runs several batches in turns, one for each stage.
        self._batches: dict[str, RepeatedBatch] = {}
        self._batch: RepeatedBatch | None = None  # of the coming step, if it may repeat
        self._prepared: RepeatedBatch | None = None  # the batch that the tables hold
        self._capturing = 0  # requests with rows still to be captured
        self._due: list[PlannedRequest] = []  # their rows may be due to be sent after the step
        self._editing = 0  # requests whose plan has edits
        self._probed = 0  # requests with probes
        self._strangers = 0  # requests with plans from HTTP
        self._scores: StepScores | None = None  # of the running step, if any stage has scores in it
        self._scoring = set[int]()  # the stages that have scores in the running step
        self._score_link = ScoreLink(pipeline.rank, pipeline.size, link)
        self._cutting = False  # whether a request may have knockouts in the step that is being prepared or run
        self.step_is_planned = False  # whether a plan acts in the step that is being prepared or run
        # The sites in the graphs at which plans act in that step, and the programs there.
        self.acting: frozenset[str | InGraph] = frozenset()

    # From the worker.

    @property
    def is_idle(self) -> bool:
        """Whether no request that this worker knows has a plan."""
        return not self._requests

    @property
    def has_strangers(self) -> bool:
        """Whether a request is alive whose plan came from HTTP."""
        return self._strangers > 0

    @property
    def edits(self) -> bool:
        """Whether a request is alive whose activations a plan changes, in this step or an earlier one."""
        return self._editing > 0

    def forget(self, kept: Set[str]) -> None:
        """Drop plans of earlier requests that need held constants whose digests are not in `kept`."""
        self._loaded.forget(kept)

    def refusal(self, name: str, broken: NotFinite) -> str | None:
        """Why a request whose activations are not finite has to end; None if it is over, or has no edits. Any thread may call."""
        request = self._requests.get(name)
        if request is None or not request.loaded.plan.edits:
            return None
        plan = request.loaded.plan
        why = not_finite(broken, plan, self.facts.dtype)
        if self._pipeline.size > 1 and any(edit.runs_program for edit in plan.edits):
            why += " A program that fails on another pipeline stage also ends its request so; the engine's log has its error."
        return why

    @property
    def requests(self) -> list[str]:
        """The planned requests that are alive."""
        return list(self._requests)

    def repeat(self, scheduler_output: Any) -> bool:
        """If the coming step repeats an earlier one, a token further, make the same decisions. Returns whether it does."""
        cached = scheduler_output.scheduled_cached_reqs
        batch = self._batches.get(cached.req_ids[0]) if cached.req_ids else None
        if batch is None or not batch.repeats(scheduler_output):
            return False
        self._batch, self.step_is_planned, self.acting = batch, batch.active, batch.acting
        if batch.active:
            self.hooks.on = batch.hooked
            self.planned_steps += 1
        return True

    def remember_step(self, scheduler_output: Any, may_repeat: bool) -> None:
        """The step is decided: remember its batch if it may repeat.

        Args:
            may_repeat: whether only plans in the graphs act in it, so that `repeat` can decide the next step.

        A step with knockouts never repeats: the next one has another query.
        """
        cached = scheduler_output.scheduled_cached_reqs
        total = scheduler_output.total_num_scheduled_tokens
        self._batch = self._prepared = None
        if not total:  # an empty step between the batches of a pipeline
            return
        alone = not scheduler_output.scheduled_new_reqs and total == len(cached.req_ids)
        if alone and may_repeat and not self._cutting and self._all_generated(cached):
            ids = list(cached.req_ids)
            self._batch = RepeatedBatch(ids, self.acting, self.step_is_planned, self.hooks.on)
            self._batches[ids[0]] = self._batch
        else:  # prompts begin, or are computed again: every step is decided until they are done
            self._batches.clear()

    def _all_generated(self, cached: Any) -> bool:
        known = (self._requests.get(name) for name in cached.req_ids)
        return all(
            request is None or before >= request.end
            for request, before in zip(known, cached.num_computed_tokens, strict=True)
        )

    @torch.inference_mode()
    def schedule(
        self,
        new: Mapping[str, tuple[Any, Sequence[int]]],
        scheduled: Mapping[str, int],
        finished: Mapping[str, RequestEnd | None],
        computed: Mapping[str, int],
    ) -> bool:
        """Take what the scheduler has sent for the coming step. Returns whether the step has to run uncompiled.

        Args:
            new: request id -> (sampling parameters, prompt) of requests that begin, or go on with a longer prompt.
            scheduled: request id -> its tokens in this step.
            finished: request id -> its end, where that is known.
            computed: request id -> tokens computed before.
        """
        for name, end in finished.items():
            if name in self._requests:
                self._end(name, *(end or ()))
        for name, (sampling, prompt) in new.items():
            self._begin_or_extend(name, sampling, prompt)
        self.captures.flush()
        off_graph, acting = set[str](), set[str]()
        programs = set[ProgramAt]()
        acts = dict[LoadedPlan, None]()  # plans of requests at generated tokens: many requests have one plan
        parts = list[Acting]()
        for name, request in self._requests.items():
            count = scheduled.get(name)
            if count is None:
                continue
            loaded, start = request.loaded, computed[name]
            stop = start + count
            request.computed = max(request.computed, stop)
            if loaded.knockouts is not None and start < loaded.knockouts.end:
                self._cutting = True
                self._select_keys(name, loaded.knockouts, stop)
            if start >= request.end:
                acts[loaded] = None
            else:
                parts += loaded.acting_in(start, stop, request.length)
        for part in chain(parts, *(loaded.acting_later for loaded in acts)):
            self.step_is_planned = True
            off_graph |= part.off_graph
            acting |= part.sites
            programs |= part.programs
        self.acting = frozenset(acting).union(self.tables.recordable(programs) if programs else ())
        for site in off_graph:
            self.hooks.warn_once(site)
        self.step_is_planned |= self._cutting
        uncompiled = bool(off_graph) or (self._cutting and self._compiles)
        self.hooks.on = bool(off_graph) or (self.step_is_planned and len(self.hooks) > 0)
        self.planned_steps += self.step_is_planned
        self.off_graph_steps += uncompiled
        return uncompiled

    def _select_keys(self, name: str, knockouts: Knockouts, stop: int) -> None:
        """Find the keys below `stop` that knockouts select. If a selector fails, the request ends; until then its attention is not cut."""
        try:
            knockouts.select(stop)
        except CaptureError as error:
            self.errors[name] = str(error)
            self._cuts.end(name)

    def is_prepared(self, request_ids: Sequence[str], total: int) -> bool:
        """Whether the tables already hold the coming step, laid out in these `total` rows, so that it needs no `begin_step`."""
        batch = self._prepared
        return batch is not None and batch.is_laid_out(request_ids, total)

    def begin_step(self, layout: BatchLayout) -> None:
        """The batch is laid out; the forward comes next."""
        if self._cutting:
            self._cuts.begin_step(layout)
        batch, table = self._batch, self._table
        slots, starts = table.slots_of(layout.request_ids), np.cumsum(layout.counts) - layout.counts
        self._laid_out, self.tables.first_rows = list(layout.request_ids), starts
        one = (layout.counts == 1) & (layout.computed >= table.end[slots])
        generated = slots[one], starts[one], layout.computed[one]
        ends = layout.computed + layout.counts
        others = [
            (table.request(slots[i]), int(starts[i]), int(layout.computed[i]), int(ends[i]))
            for i in np.flatnonzero(~one & (slots > 0)).tolist()
        ]
        if batch is not None and not batch.is_laid_out(layout.request_ids, layout.total):
            batch.laid_out = list(layout.request_ids)
            batch.rows = RowProfiles(self._lay_out(layout.total, generated, others), again=True)
        rows = batch.rows if batch is not None else RowProfiles(self._lay_out(layout.total, generated, others))
        assert rows is not None
        places = self._places(generated, others, rows.profile_T) if self._capturing else None
        self._scores = self._find_scored(layout, rows.profile_T) if self._probed and self.step_is_planned else None
        self.tables.begin_step(rows, places, self._scores.place(len(rows.profile_T)) if self._scores else None)
        # With captures or probes, each step needs new addresses for its rows.
        self._prepared = batch if not (self._capturing or self._probed) else None

    def _lay_out(self, total: int, generated: _Generated, others: _Others) -> np.ndarray:
        """int32 `[T]`, the profile of each row of a batch, padding included."""
        profile_T = np.zeros(total, np.int32)
        slots, rows, _ = generated
        profile_T[rows] = self._table.profile[slots]
        for request, first, start, stop in others:
            profile_T[first : first + stop - start] = request.loaded.profiles(start, stop, request.length)
        return profile_T

    def _places(self, generated: _Generated, others: _Others, profile_T: np.ndarray) -> np.ndarray | None:
        """int64 `[T]`, the address to write each row's captured row to; 0 for a row that is not captured. None if no row is."""
        table, (slots, batch_rows, computed) = self._table, generated
        places_T = np.zeros(len(profile_T), np.int64)
        takes = table.captures[slots] & (table.captured[slots] <= computed)  # not those captured before a preemption
        asked, until = slots[takes], computed[takes] + 1
        chosen: list[tuple[int, int]] = []  # (slot, position) of the rows that selectors choose
        for i in np.flatnonzero(takes & table.selects[slots]).tolist():
            request, position = table.request(slots[i]), int(computed[i])
            if request.loaded.selects(position - request.length):
                chosen.append((request.slot, position))
            else:
                takes[i] = False
        taking, positions = slots[takes], computed[takes]
        full = (table.left[taking] == 0) | (table.captured[taking] != positions)
        for slot, position in zip(taking[full].tolist(), positions[full].tolist(), strict=True):
            self._begin_page(table.request(slot), position)
        for slot, position in chosen:
            page = table.request(slot).page
            assert page is not None
            page.positions[-table.left[slot]] = position
        places_T[batch_rows[takes]] = table.address[taking]
        table.address[taking] += table.row_bytes[taking]
        table.size[taking] += table.row_bytes[taking]
        table.left[taking] -= 1
        table.captured[asked] = until
        self._due = list(map(table.request, taking[table.size[taking] >= DUE_BYTES].tolist()))
        # profile -> (request, rows, position of row 0)
        found: dict[int, list[tuple[PlannedRequest, np.ndarray, int]]] = {}
        for request, first, start, stop in others:
            self._due.append(request)
            if request.has_all:
                continue
            begin, end = first + max(request.captured - start, 0), first + stop - start
            request.captured = max(stop, request.captured)
            for number, rows in _rows_of(request.loaded.capturing, profile_T, begin, end):
                found.setdefault(number, []).append((request, rows, start - first))
        for number, parts in found.items():
            planes, first = self.tables.profiles[number].planes, 0
            all_rows = np.concatenate([rows for _, rows, _ in parts])
            block = self._block(number, len(all_rows))
            places_T[all_rows] = block.data_ptr() + np.arange(len(all_rows)) * (block.shape[1] * block.element_size())
            for request, rows, before in parts:
                request.add(Rows(rows + before, planes, block, first))
                first += len(rows)
        return places_T if places_T.any() else None

    def _find_scored(self, layout: BatchLayout, profile_T: np.ndarray) -> StepScores | None:
        """The rows of the step that have scores here; None if no stage has any."""
        step, profiles, row = StepScores(self._device, self._dtype), self.tables.profiles, 0
        self._scoring = set()
        each = zip(layout.request_ids, layout.counts.tolist(), layout.computed.tolist(), strict=True)
        for name, count, start in each:
            first, row = row, row + count
            request = self._requests.get(name)
            if request is None or (scores := request.scores) is None or scores.scored >= start + count:
                continue
            fresh = max(scores.scored - start, 0)  # the rows before were scored before a preemption
            scores.scored = start + count
            self._scoring.update(scores.stages)
            if start >= request.end:
                if (number := request.loaded.generated) in request.loaded.scoring:
                    step.add(name, range(first + fresh, row), range(start + fresh, start + count), profiles[number])
                continue
            for number, rows in _rows_of(request.loaded.scoring, profile_T, first + fresh, row):
                step.add(name, rows.tolist(), (rows + (start - first)).tolist(), profiles[number])
        return step if self._scoring else None

    def _begin_page(self, request: PlannedRequest, first_position: int) -> None:
        """Begin a page for captured rows of generated tokens. Without selectors it holds the rows of all positions from this one on."""
        number = request.loaded.generated
        profile = self.tables.profiles[number]
        rows = rows_of_page(profile.row_width * self._dtype.itemsize)
        positions = np.arange(first_position, first_position + rows)
        request.begin_page(Rows(positions, profile.planes, self._block(number, rows)))

    def _block(self, number: int, rows: int) -> torch.Tensor:
        """New memory for `rows` captured rows of a profile."""
        return torch.empty(rows, self.tables.profiles[number].row_width, dtype=self._dtype, device=self._device)

    def take_rows(self, name: str) -> list[Rows]:
        """The rows of a request that the coming forward captures for its trace. To be called once they have their places."""
        request = self._requests.get(name)
        return request.take_rows() if request is not None and request.payload.behind else []

    def end_step(self) -> None:
        """The forward is queued: note which requests end because a program failed, and send what is complete."""
        self.step_is_planned = self.hooks.on = False
        for number, why in self.tables.failures.items():
            name = self._laid_out[number]
            _log.warning("Request %s ends: %s", name, why)
            self._failed[name] = self.errors[name] = why
            if self._scores is not None:
                self._scores.errors[name] = why
        self.tables.failures.clear()
        if self._cutting:
            self._cuts.end_step()
            self._cutting = False
        if self._due:
            self._send_due()

    def take_scores(self) -> Callable[[], StepResults] | None:
        """A function that finds the queued step's scores and the requests that they end. None without scores, and on all stages but the
        last. Any thread may call the function, for one step after another.
        """
        step, self._scores = self._scores, None
        read_scores = self._score_link.bring(step, self._scoring) if step is not None else None
        if read_scores is None:
            return None
        failed = step.errors if step is not None else {}
        probed = {name: request.scores for name, request in self._requests.items() if request.scores is not None}

        def find() -> StepResults:
            chunks: dict[str, list[ScoreChunk]] = {}
            stops: dict[str, ProbeStop] = {}
            errors: dict[str, str] = {}
            for name, found in read_scores().items():
                try:
                    chunks[name], stop = probed[name].take(found)
                except CaptureError as error:  # its selector has failed; other requests go on
                    errors[name] = str(error)
                else:
                    stops |= {name: stop} if stop is not None else {}
            return chunks, stops, errors | failed

        return find

    @torch.inference_mode()
    def _send_due(self) -> None:
        """Send the rows of requests that have captured all, or many."""
        due, self._due = self._due, []
        for request in due:
            if request.complete or request.payload.record is not None or request.name in self._failed:
                continue
            request.complete = request.has_all
            self._capturing -= request.complete
            if request.payload.behind:
                request.take_rows()  # drop them: the trace that would have taken them is over
            elif request.complete or request.size >= DUE_BYTES:
                # After the token that ends it, a request runs for at most so many steps.
                confirmed = 0 if request.ends_early else request.captured - (self._pipeline.size + 2)
                self.captures.send(request.name, request.payload, request.take_rows(), request.complete, confirmed)
        self.captures.flush()

    def take_errors(self) -> dict[str, str]:
        """request id -> what was wrong with its plan, of requests that have to end."""
        errors, self.errors = self.errors, {}
        return errors

    # Requests.

    def _begin_or_extend(self, name: str, sampling: Any, prompt: Sequence[int]) -> None:
        known = self._requests.get(name)
        payload = known.payload if known is not None else None
        try:
            given = PlanRequest.of(sampling)
            if known is not None:
                if given is None or given.wire != known.payload.wire:
                    raise PlanError(
                        "A session of streaming input keeps its plan; send each of its parts with the same one."
                    )
                return self._extend(name, known, len(prompt))
            payload = given
            if payload is not None and (plan := payload.plan):
                self._begin(name, payload, plan, prompt, bool(getattr(sampling, "stop", None)))
        except PlanError as error:
            self.errors[name] = str(error)
            if payload is not None:
                self.captures.fail(name, payload, str(error))

    def _begin(self, name: str, payload: PlanRequest, plan: Plan, prompt: Sequence[int], stops_at_text: bool) -> None:
        if self._speculative and any(item.selects_generated for item in plan.readings):
            raise PlanError("A capture or a probe of generated positions is not supported with speculative decoding.")
        self.captures.check(payload, plan)
        sources, loaded = self._take(name, payload, plan, len(prompt))
        if (knockouts := loaded.knockouts) is not None:
            if self._speculative and knockouts.end > len(prompt):
                sources.close()
                self._loaded.give_back(loaded)
                raise PlanError(
                    "A Knockout of generated queries is not supported with speculative decoding: name queries of the prompt, or "
                    'set phase="prefill".'
                )
            self._cuts.begin(name, knockouts)
        done = not plan.captures
        scores = RequestScores(plan, len(prompt), self._stages_of(plan)) if plan.probes else None
        self._requests[name] = PlannedRequest(
            name,
            payload,
            loaded,
            sources,
            len(prompt),
            self._table,
            complete=done,
            ends_early=stops_at_text or plan.stops_in_prompt,
            scores=scores,
        )
        self._editing += bool(plan.edits)
        self._probed += scores is not None
        self._strangers += payload.shares
        if plan.captures:
            self._capturing += 1
            self.captures.begin(name, payload, plan, prompt)

    def _stages_of(self, plan: Plan) -> set[int]:
        """The stages that have the sites of its probes."""
        points = ((probe.site, layer) for probe in plan.probes for layer in probe.layers_in(self.facts.num_layers))
        return {self._pipeline.owners[point] for point in points}

    def _take(self, name: str, payload: PlanRequest, plan: Plan, length: int) -> tuple[Sources, LoadedPlan]:
        """The loaded plan for one more request, with the sources and the hooks that it needs."""
        layers = self.facts.num_layers
        sources = Sources(name, plan, length, layers, runs=self.runs, pipeline=self._pipeline, link=self._link)
        try:
            loaded = self._loaded.take(payload, length, sources.row)
        except BaseException:
            sources.close()
            raise
        return sources, loaded

    def _compile(self, payload: PlanRequest, length: int, row: RunRow) -> CompiledPlan:
        if not payload.checked:
            vectors = {name: width for name, (width, _) in self.vectors.list().items()}
            check(payload.plan, self.facts, length, None, vectors=vectors, runs=self.runs.ids)
        return compile_plan(
            payload.plan,
            length,
            self.facts.num_layers,
            width=lambda site, layer: self.facts.widths[site, layer],
            vector=self.vectors.get,
            on_host=self.vectors.on_host,
            run=row,
            dtype=self.facts.dtype,
            points=self.tables.index.keys(),
            head_dims=self.facts.head_dims,
        )

    def _extend(self, name: str, request: PlannedRequest, length: int) -> None:
        """Streaming input has made the prompt longer, or V2 begins the request again after a preemption."""
        old = request.loaded
        if length == request.length:
            return
        if any(item.positions != "all" for item in old.plan.readings):
            raise PlanError(
                "A session of streaming input can only capture and score positions='all': other selections depend on the length of one "
                "prompt."
            )
        if old.knockouts is not None:
            raise PlanError(
                "A Knockout does not work in a session of streaming input, because its positions refer to a single prompt. Leave it out."
            )
        sources, loaded = self._take(name, request.payload, old.plan, length)
        request.sources.close()
        request.sources, request.loaded, request.length = sources, loaded, length
        request.close_page()
        request.tabulate()
        self._loaded.give_back(old)
        if request.complete and not request.has_all:
            request.complete = False
            self._capturing += 1

    def _end(self, name: str, tokens: int | None = None, error: str | None = None) -> None:
        request, error = self._requests.pop(name), self._failed.pop(name, error)
        self._editing -= bool(request.loaded.plan.edits)
        self._strangers -= request.payload.shares
        if request.loaded.knockouts is not None:
            self._cuts.end(name)
        if request.scores is not None:
            self._probed -= 1
            if not self._probed:
                self._score_link.end()
        try:
            unsent = not request.complete
            self._capturing -= unsent
            if error is not None:
                return self.captures.fail(name, request.payload, error)
            if request.payload.record is not None:
                self._keep(request)
            is_sent = unsent and not request.payload.behind
            self.captures.end(name, request.payload, tokens, request.take_rows() if is_sent else None)
        except PlanError as error:
            self.captures.fail(name, request.payload, str(error))
        finally:
            request.sources.close()
            self._loaded.give_back(request.loaded)
            self._table.remove(name)

    def _keep(self, request: PlannedRequest) -> None:
        """Keep a recorded run's rows here, unless its prompt was not computed to the end."""
        assert request.payload.record is not None
        captured = request.take_rows()
        plan, length = request.loaded.plan, request.length
        if request.computed >= length:
            layers, widths, size = self.facts.num_layers, self._pipeline.each, self._dtype.itemsize
            keys = captured[0].planes.by_key if captured else ()  # all rows of a recorded run have the same planes
            planes = {key[:2]: join_in_order([rows.plane(key) for rows in captured], captured) for key in keys}
            self.runs.add(recorded_run(request.payload.record, plan, length, layers, planes, widths, size))

    def gauges(self) -> dict[str, int]:
        """Counts of what is alive. All but `leases` are zero when no planned request is alive."""
        return {
            "plans": len(self._requests),
            "profiles": sum(loaded.profile_count for loaded in {r.loaded for r in self._requests.values()}),
            "plan_hooks": len(self.hooks),
            "leases": self.runs.leases,
            "knockouts": len(self._cuts),
            "capture_bytes": sum(request.size for request in self._requests.values()),
        }


def _rows_of(wanted: frozenset[int], profile_T: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
    """The numbers of the wanted profiles among the rows `[begin, end)` of a batch, and the rows that have each."""
    numbers = profile_T[begin:end]
    for number in wanted.intersection(np.unique(numbers).tolist()):
        yield number, begin + np.flatnonzero(numbers == number)
