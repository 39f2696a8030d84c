"""One request as the user asks for it: its plan, checked against the model, and its result.

`TraceModel` makes an `Invoke` for each prompt; `Planner` checks its plan; the model runs the invokes and returns an `OutputStream`, which
ends with an `InvokeResult` for each.

async for output in tracer.backend:      # the outputs of all invokes, as they arrive
    output.saves                         # the values saved so far; all of them once output.finished
outputs = await tracer.backend           # or only the final outputs, in the order of the invokes; one output for one invoke
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.rows import Routes, Rows, destination_key, routes
from midstream.capture.sinks import RequestCapture, Sinks, destination
from midstream.errors import (
    InterventionErrorGroup,
    MidstreamError,
    PlanError,
    PromptError,
    RequestErrorGroup,
    TraceError,
)
from midstream.memory import Memory
from midstream.plan.captures import Planes
from midstream.plan.compile import plane_width, reads_of
from midstream.plan.selections import NO_POSITIONS
from midstream.plan.values import (
    Capture,
    ModelFacts,
    Plan,
    RecordedRun,
    check,
    counted_from_0,
    has_spans,
    resolve_spans,
    with_digests,
)
from midstream.requests.arguments import Answers, MissingSpace, Prompt, encode, is_multimodal, offsets_of
from midstream.requests.vectors_and_runs import Runs, Vectors
from midstream.runtime.request import plan_bytes
from midstream.trace.block import Block
from midstream.trace.code import BlockProgram, Outcome, TraceProgram, without_left
from midstream.trace.tracer import Result
from midstream.tree import put_objects

RecordAs = tuple[str, str, str]  # id, name and owner of a recorded run
_PLANE_BYTES = 256


@dataclass
class Invoke:
    """One prompt, and the code and the plan that run on it.

    On `LanguageModel`, code may also run on several prompts at once, or on its whole batch, for which the prompt is None.

    Attributes:
        answers: the answers to grade.
        is_elsewhere: whether its block is in another function than the trace, so that its names are not the caller's.
        collected: for a request of `model.collect`.
        record: for a request of `model.record`, the run in which its captured rows are stored.
        edits: the programs of the edits that run before its own; None for all edits of the model.
        is_streamed: whether the caller can read saved values while the request runs. Only async engines use this.
        adapter: vLLM's LoRARequest; on `Remote`, the adapter's name. None for the model without an adapter.
    """

    prompt: Any
    program: TraceProgram | None
    params: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    answers: Answers = field(default_factory=Answers)
    is_elsewhere: bool = False
    collected: Collected | None = None
    record: RecordAs | None = None
    edits: Sequence[TraceProgram] | None = None
    is_streamed: bool = True
    adapter: Any = None

    @property
    def block(self) -> Block | None:
        return self.program.block if isinstance(self.program, BlockProgram) else None


@dataclass
class InvokeResult:
    """The result of one invoke.

    Attributes:
        outcomes: of its bodies, the invoke's own first; one for each sample if n > 1.
        output: the request's final output.
        plan: the plan that it ran with.
        error: why its plan or its captures failed.
        missing: the answers that most likely lack the space before them.
    """

    outcomes: list[Outcome]
    output: Any
    plan: PreparedPlan | None = None
    error: MidstreamError | None = None
    missing: Sequence[MissingSpace] = ()

    def errors(self) -> Iterator[MidstreamError]:
        for outcome in self.outcomes:
            if outcome.failure is not None:
                error = outcome.failure.exception()
                error.saves = without_left(outcome.values)  # type: ignore[attr-defined]
                yield error
        if self.error is not None:
            yield self.error


def saves_of(own: Outcome | None, edits: Sequence[Outcome]) -> dict[str, Any]:
    """The values that a request saved: those of its edits, overridden by its own."""
    every = [*edits, own] if own is not None else edits
    return {name: value for outcome in every for name, value in without_left(outcome.values).items()}


def sample_saves(samples: Sequence[list[Outcome]]) -> Any:
    """The values that the request saved: a dict, or a list of dicts for n > 1."""
    each = [saves_of(own, edits) for own, *edits in samples]
    return each[0] if len(each) == 1 else each or {}


def put_results(outcomes: Iterable[Outcome], output: Any) -> MidstreamError | None:
    """Replace `tracer.result` in saved values by the request's output. Returns the error for a part that the output lacks."""
    failed: list[MidstreamError] = []

    def found(result: Result) -> Any:
        try:
            return result.of(output)
        except MidstreamError as error:
            failed.append(error)
            return None

    for each in outcomes:
        put_objects(each.values, Result, found)
    return failed[0] if failed else None


def raise_failures(results: list[InvokeResult]) -> None:
    """Raise the results' error, or a group of their errors; its `outputs` are the outputs of all invokes."""
    failures = {number: errors for number, result in enumerate(results) if (errors := list(result.errors()))}
    if not failures:
        return
    errors = [error for each in failures.values() for error in each]
    group = RequestErrorGroup if any(result.error is not None for result in results) else InterventionErrorGroup
    error = errors[0] if len(errors) == 1 else _grouped(group, errors)
    error.failures = {number: each[0] for number, each in failures.items()}  # type: ignore[attr-defined]
    error.outputs = [result.output for result in results]  # type: ignore[attr-defined]
    raise error from error.__cause__


def _grouped(group: Any, errors: list[MidstreamError]) -> MidstreamError:
    """A group that is also an instance of the errors' common class, so that one `except` catches one error or several.

    The group contains only the first of equal errors, so that each traceback is printed once.
    """
    alike: dict[tuple[str, str], list[MidstreamError]] = {}
    for error in errors:
        alike.setdefault((type(error).__name__, str(error)), []).append(error)
    for first, *others in alike.values() if len(alike) > 1 else ():
        if others:
            first.add_note(f"{1 + len(others)} requests failed so.")
    text = f"{len(errors)} requests failed{' alike' if len(alike) == 1 else ''}, the first: {str(errors[0]).splitlines()[0]}"
    errors = [first for first, *_ in alike.values()]
    nothing_new = (*group.__mro__, Exception)
    for shared in type(errors[0]).__mro__:
        if shared not in nothing_new and all(isinstance(error, shared) for error in errors):
            try:
                own = {"__module__": group.__module__, "__str__": ExceptionGroup.__str__}
                mixed: Any = type(f"{shared.__name__}Group", (group, shared), own)
                return mixed(text, errors)  # type: ignore[no-any-return]
            except TypeError:  # a builtin whose memory layout excludes other bases
                continue
    return group(text, errors)  # type: ignore[no-any-return]


def _adds_token_types(architectures: Sequence[str]) -> bool:
    """Whether the forward of one of these transformers classes takes `token_type_ids`."""
    import transformers

    models = [getattr(transformers, name, None) for name in architectures]
    return any("token_type_ids" in inspect.signature(model.forward).parameters for model in models if model is not None)


def token_ids(invoke: Invoke, tokenizer: Callable[[], Any], architectures: Sequence[str] | None) -> list[int]:
    """The token ids of its prompt. `architectures`: the names of the model's classes in transformers.

    Raises PromptError, or PlanError for a plan with positions in a prompt that has images.
    """
    has_types = isinstance(invoke.prompt, Mapping) and invoke.prompt.get("token_type_ids") is not None
    if has_types and _adds_token_types(architectures or ()):
        raise PromptError(
            "The prompt has token_type_ids, which this model adds to its embeddings; midstream does not pass them on."
        )
    if invoke.plan and is_multimodal(invoke.prompt):
        check(invoke.plan, ModelFacts(), None, None, vectors=None, runs=None, multimodal=True)
    return encode(invoke.prompt, tokenizer)


@dataclass(frozen=True)
class PreparedPlan:
    """One request's plan, checked and ready to run.

    Attributes:
        plan: with spans resolved to positions, and with the digests of named vectors.
        prompt: token ids.
        routes: the destinations of captured rows.
        facts: of the model that the plan was checked against.
    """

    plan: Plan
    prompt: list[int]
    routes: Routes
    facts: ModelFacts

    def capture(self, name: str, sinks: Sinks, collected: Collected | None) -> RequestCapture:
        """An object that takes the captured rows of a request, or of one of its samples. Raises CaptureError as `RequestCapture` does."""
        info = CaptureInfo(name, tuple(self.prompt), collected=collected)
        return RequestCapture(info, self.routes, sinks, self.no_rows, stops_in_prompt=self.plan.stops_in_prompt)

    def no_rows(self) -> Rows:
        """An empty set of rows with all planes. It tells sinks and outputs which sites are captured, even if no row is computed."""
        keys = dict.fromkeys(key for _, selected in self.routes for key in selected)
        dtype = getattr(torch, self.facts.dtype)
        has_programs = any(capture.program is not None for capture in self.plan.captures)
        plan = self.plan.normal(self.facts.num_layers, len(self.prompt)) if has_programs else Plan()
        reads = reads_of(plan.captures)
        planes = Planes.of(keys, lambda key: plane_width(key, lambda *at: self.facts.widths[at], reads))
        return Rows(NO_POSITIONS, planes, torch.empty(0, planes.width, dtype=dtype))

    def recorded_run(self, run_id: str, name: str) -> RecordedRun:
        """The handle of the run in which this plan's captured rows are stored."""
        (_, selected), *_ = self.routes
        return RecordedRun(
            name,
            run_id,
            tuple(self.prompt),
            tuple(dict.fromkeys(site for site, _, _ in selected)),
            tuple(sorted({layer for _, layer, _ in selected})),
            tuple(next(iter(selected.values())).prompt.tolist()),
        )


def has_destinations(plan: Plan) -> bool:
    """Whether captured rows go elsewhere than to the output."""
    return any(capture.to is not None for capture in plan.captures)


def without_destinations(plan: Plan) -> Plan:
    """The plan as it is sent: the engine returns all captured rows to the client, which has the routes."""
    if not has_destinations(plan):
        return plan
    return Plan(tuple(replace(item, to=None) if isinstance(item, Capture) else item for item in plan.interventions))


def with_whole_rows(plan: Plan) -> Plan:
    """The plan as a server gets it if the client delivers its rows: the server returns whole rows, in the model's dtype."""
    items = plan.interventions
    return Plan(
        tuple(replace(item, to=None, head=None, dtype=None) if isinstance(item, Capture) else item for item in items)
    )


def runs_of(plans: Sequence[PreparedPlan | None]) -> list[str]:
    """The ids of the recorded runs that the plans use."""
    return sorted({run.id for each in plans if each is not None for run in each.plan.runs})


class Planner:
    """Prepares plans for a model, with the vectors and runs that exist now.

    Attributes:
        facts: the model's sites, layers and widths.
        tokenizer: returns the model's tokenizer.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Callable[[], Any], vectors: Vectors, runs: Runs) -> None:
        self.facts, self.tokenizer = facts, tokenizer
        self._vectors = vectors
        self._runs = {run.name: run.id for run in runs.handles}
        self._known: Memory[PreparedPlan] = Memory()
        self._with_functions: Memory[PreparedPlan] = Memory()
        self._layers_of: dict[str, tuple[int, ...]] = {}  # the layers that have each site
        for site, layer in sorted(facts.widths):
            self._layers_of[site] = (*self._layers_of.get(site, ()), layer)

    def check(self, plan: Plan) -> None:
        """Raise PlanError if this model cannot carry out a plan, whatever the prompt."""
        plan = self._without_missing_layers(counted_from_0(plan, self.facts.num_layers))
        check(plan, self.facts, None, None, vectors=self._vectors.widths, runs=self._runs)

    def prepare_all(self, invokes: Sequence[Invoke], prompts: Sequence[list[int]]) -> list[PreparedPlan | None]:
        """The plan of each invoke; None for an invoke without a plan. `prompts` has their token ids."""
        try:
            return [
                self.prepare(invoke.plan, invoke.prompt, ids, invoke.params) if invoke.plan else None
                for invoke, ids in zip(invokes, prompts, strict=True)
            ]
        finally:  # release the user's functions and the objects that they refer to
            self._with_functions = Memory()

    def prepare(self, plan: Plan, prompt: Prompt, ids: list[int], params: Mapping[str, Any]) -> PreparedPlan:
        """The plan for one prompt. Raises PlanError if this model cannot carry it out on this prompt, CaptureError for an unknown
        consumer.
        """
        max_tokens = params.get("max_tokens")
        if has_spans(plan):
            return self._prepare(resolve_spans(plan, *offsets_of(prompt, ids, self.tokenizer())), ids, max_tokens)
        sinks = tuple(
            tuple(map(destination_key, capture.sinks)) for capture in plan.captures
        )  # by identity: functions that compare equal may differ
        has_functions = any(callable(to) for capture in plan.captures for to in capture.sinks)
        parts = (part for item in plan.interventions for part in (item, *item.parts))
        programs = filter(None, (part.its_program for part in parts))
        # Equal programs may differ in whether they carry their constants.
        carried = sum(program.nbytes for program in programs)
        known = (self._with_functions if has_functions else self._known).get(
            (without_destinations(plan), sinks, carried, len(ids), max_tokens),
            lambda: replace(self._prepare(plan, ids, max_tokens), prompt=[]),  # shared by prompts of this length
            lambda prepared: plan_bytes(plan) + _bytes(prepared),
        )
        return PreparedPlan(known.plan, ids, known.routes, known.facts)

    def _prepare(self, plan: Plan, ids: list[int], max_tokens: int | None) -> PreparedPlan:
        if max_tokens is not None and max_tokens < 1:
            raise PlanError(
                f"max_tokens is {max_tokens}; a request with a plan needs at least 1, as every request does on vLLM."
            )
        plan = self._without_missing_layers(counted_from_0(plan, self.facts.num_layers))
        check(plan, self.facts, len(ids), max_tokens, vectors=self._vectors.widths, runs=self._runs)
        plan = with_digests(plan, self._vectors.digests)
        found = routes(plan.captures, len(ids), range(self.facts.num_layers), self.facts.head_dims)
        for to, _ in found[1:]:
            destination(to)  # raises CaptureError for a consumer that is not installed
        return PreparedPlan(plan, ids, found, self.facts)

    def _without_missing_layers(self, plan: Plan) -> Plan:
        """The plan with `layers="all"` replaced by the layers that have the site, where some layers lack it."""
        layers_of = self._layers_of
        partial = {site for site, layers in layers_of.items() if len(layers) < self.facts.num_layers}
        if not any(item.site in partial for item in plan.interventions):
            return plan
        return Plan(
            tuple(
                item.at(layers_of[item.site]) if item.at_layers == "all" and item.site in partial else item
                for item in plan.interventions
            )
        )


def _bytes(prepared: PreparedPlan) -> int:
    ways = [selected for _, selected in prepared.routes]
    rows = {id(selection): selection.prompt.nbytes for way in ways for selection in way.values()}
    return sum(rows.values()) + _PLANE_BYTES * sum(map(len, ways))


# Outputs.

# The number of a request, its output, and its result if it has finished.
Item = tuple[int, Any, InvokeResult | None]


class OutputStream(Awaitable[Any]):
    """The outputs of requests: iterate over them, or await the final ones. Either submits the requests.

    A request that fails has no final output; its error is raised when all requests have finished, several errors as a group. Leaving the
    loop early, or cancelling its task, aborts the unfinished requests.

    Attributes:
        outputs: the final outputs in the order of the invokes, once all have finished.
        results: the results of all requests, once all have finished.
        ended: called with the number of requests that have ended since the last call.
        when_done: called with the results.
        gives_one: whether awaiting returns the only output, and not a list.
        wants_last: whether only the last output of each request is needed.
        bar: a context in which awaited requests run.
    """

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.results: list[InvokeResult] = []
        self.ended: Callable[[int], object] = lambda _: None
        self.when_done: Callable[[list[InvokeResult]], None] = lambda _: None
        self.bar: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._is_used = self.gives_one = self.wants_last = False

    def running(self) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Run the requests in the block. Yields the outputs of all of them, including failed ones. Call it once.

        Each generator between vLLM's and the user's costs time for every token, so there should be few.
        """
        raise NotImplementedError

    async def items(self) -> AsyncGenerator[Item]:
        """The items of `running`."""
        async with self.running() as items:
            async for item in items:
                yield item

    def __await__(self) -> Generator[Any, None, Any]:
        return self._to_the_end().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        self._use()
        return self._iterate()

    def _use(self) -> None:
        if self._is_used:
            raise TraceError("The outputs of a trace can be iterated over once; the final ones are in `outputs`.")
        self._is_used = True

    async def gathered(self) -> list[InvokeResult]:
        """The results of all requests, once they have finished. Errors of single requests are in their results."""
        self.wants_last = True
        done: dict[int, InvokeResult] = {}
        with self.bar:
            async for index, _, result in self.items():
                if result is not None:
                    done[index] = result
                    self.ended(1)
        return [done[index] for index in sorted(done)]

    async def _to_the_end(self) -> Any:
        self._use()
        self._keep(await self.gathered())
        return self.outputs[0] if self.gives_one else self.outputs

    async def _iterate(self) -> AsyncIterator[Any]:
        done: dict[int, InvokeResult] = {}
        async with self.running() as items:
            async for index, output, result in items:
                if result is not None:
                    done[index] = result
                    self.ended(1)
                    if result.error is not None or any(outcome.failure is not None for outcome in result.outcomes):
                        continue
                yield output
        self._keep([done[index] for index in sorted(done)])

    def _keep(self, results: list[InvokeResult]) -> None:
        self.results = results
        self.outputs[:] = [result.output for result in self.results]
        raise_failures(self.results)
        self.when_done(self.results)


class Called(OutputStream):
    """The outputs of requests that a blocking function runs to their end.

    Args:
        run: runs them, calls its argument with the number of requests that have ended, and returns their results.
    """

    def __init__(self, run: Callable[[Callable[[int], object]], list[InvokeResult]]) -> None:
        super().__init__()
        self._run = run

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncIterator[Item]]:
        results, self.ended = self._run(self.ended), lambda _: None

        async def items() -> AsyncGenerator[Item]:
            for index, result in enumerate(results):
                yield index, result.output, result

        yield items()
