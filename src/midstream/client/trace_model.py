"""The interface that `VLLM` and `LanguageModel` share: `trace`, `run`, `generate`, `collect`, `record`, `edit`, and plans."""

from __future__ import annotations

import dis
import sys
import uuid
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, overload

from midstream.arch.detect import Sizes
from midstream.capture.directory import Store
from midstream.capture.listing import Listing
from midstream.capture.loading import Activations, Asked
from midstream.client.collecting import Collection, Estimate, PromptCheck
from midstream.client.tracing import EditContext, Session, Tracer, warn_of_functions
from midstream.errors import ParameterError, PlanError, PromptError, TraceError, UnsendableError
from midstream.hooks import is_in_body
from midstream.lowering.functions import with_programs
from midstream.plan import fields
from midstream.plan.values import Capture, ModelFacts, Plan, RecordedRun
from midstream.progress import Bar
from midstream.requests.arguments import (
    AdapterArgument,
    Answers,
    Prompt,
    adapter_alone,
    adapter_in,
    adapters_of,
    answers_of,
    in_turn,
    one_prompt,
    plans_of,
    prompt_in,
    prompts_of,
    sampling,
    spaces_warning,
)
from midstream.requests.invokes import Invoke, InvokeResult, OutputStream, Planner, RecordAs, raise_failures
from midstream.requests.vectors_and_runs import RunRequest, Runs, Vectors, run_now
from midstream.sweeps.cells import Metric, SweepRequest, paths_of
from midstream.sweeps.edges import EdgeScores, attribute_edges
from midstream.sweeps.paths import PathRun
from midstream.sweeps.sweep_run import SweepRun, SweepStream
from midstream.trace.code import RETURNED, FunctionProgram, StandingEdit, TraceProgram
from midstream.trace.envoy import inside


def _result(model: Any, tracer: Any) -> Any:
    return tracer.result


def loading_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a model's constructor, without nnsight's arguments that ask for midstream's usual behaviour.

    Raises ParameterError for those that ask for something else.
    """
    given = dict(given)
    given.pop("dispatch", None)  # models are loaded when they are made
    if (task := given.pop("task", None)) not in (None, "text-generation", "generate"):
        raise ParameterError(f"task is {task!r}; midstream runs models that generate text: leave it out.")
    if "torch_dtype" in given:
        if "dtype" in given:
            raise ParameterError("torch_dtype is another name of dtype; give one of them.")
        given["dtype"] = given.pop("torch_dtype")
    return given


def _warn_of_spaces(results: Sequence[InvokeResult]) -> None:
    """Warn the caller of `generate` about answers that most likely lack the space before them."""
    if (text := spaces_warning([result.missing for result in results])) is not None:
        warnings.warn(text, stacklevel=3)


def _refuse_in_trace(name: str) -> None:
    if is_in_body():
        raise inside(name)


class TraceModel(Sizes):
    """A model that traces and plans run on.

    Attributes:
        model_name: the model's name or path.
        vectors: the named vectors that plans may use: `model.vectors["truth"] = tensor`.
        runs: the recorded runs.
        progress: the default of the `progress` argument of calls, as in `generate`.
    """

    edits: dict[str, StandingEdit]
    _original: TraceModel | None = None  # the model that an edited view was made from; the view keeps it alive
    model_name: str
    tokenizer: Any
    vectors: Vectors
    runs: Runs
    progress: bool | None = None
    _plan: Plan = Plan()
    _planner: tuple[Any, Planner] | None = None  # after the facts, vectors and runs that it was made from
    _is_async = False
    has_engine = True  # whether its requests run in an engine's processes, where traces have copies of their variables
    _is_elsewhere = False  # whether it runs on another machine
    adapter_argument: AdapterArgument | None = None  # the argument of calls that chooses adapters

    async def start(self) -> Self:
        """Prepare the model for requests; an engine has to be running."""
        return self

    def close(self) -> None:
        """Close the model. Called at the end of `with model:`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Each model provides these.

    def _run(self, invokes: list[Invoke], together: bool = False) -> OutputStream:
        """Make requests of `invokes`. They run once the stream is awaited or iterated over. `together`: all in the same steps."""
        raise NotImplementedError

    @property
    def _generation(self) -> Mapping[str, Any]:
        """The values of the model's generation configuration that differ from the defaults."""
        raise NotImplementedError

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        raise NotImplementedError

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens that a prompt may have; None if there is no limit."""
        return None

    @property
    def trained_length(self) -> int | None:
        """The most tokens of a prompt that the model was made for; None if it is unknown."""
        return self.longest_prompt

    def _token_ids(self, invoke: Invoke) -> list[int]:
        """The token ids of the invoke's prompt. Raises PromptError for a prompt that this model cannot take."""
        raise NotImplementedError

    def ids_of(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt. Raises PromptError, with the number of the prompt if there are several."""
        return self._all_token_ids([Invoke(prompt, None) for prompt in prompts])

    def _all_token_ids(self, invokes: Sequence[Invoke]) -> list[list[int]]:
        """The token ids of each invoke's prompt. Raises PromptError, with the number of the prompt if there are several."""
        return in_turn(self._token_ids, invokes)

    # Shared by the models.

    def _bar(self, progress: bool | None, total: int, unit: str = "request") -> Bar:
        return Bar(self.progress if progress is None else progress, total, unit)

    def _run_with_bar(self, invokes: list[Invoke], together: bool = False, *, progress: bool | None) -> OutputStream:
        stream, bar = self._run(invokes, together), self._bar(progress, len(invokes))
        stream.bar, stream.ended = bar, bar.update
        return stream

    @property
    def planner(self) -> Planner:
        """Prepares plans for this model, with the vectors and runs that exist now."""
        facts = self.facts
        known = (facts, self.vectors.digests, [run.id for run in self.runs.handles])
        if self._planner is None or self._planner[0] != known:
            self._planner = known, Planner(facts, lambda: self.tokenizer, self.vectors, self.runs)
        return self._planner[1]

    def _with_plan(self, invokes: list[Invoke]) -> list[Invoke]:
        """The invokes, with the model's own plan before theirs. A run to record gets only the plan's edits."""
        if not self.plan:
            return invokes
        edits = Plan(self.plan.edits)
        composed = {id(each.plan): (edits if each.record else self.plan) + each.plan for each in invokes}
        return [replace(invoke, plan=composed[id(invoke.plan)]) for invoke in invokes]

    def _check_forward(self, invokes: Sequence[Invoke]) -> None:
        """Raise PlanError if a plan has final edits: code of traces that runs in the forward could write after them."""
        if any(invoke.plan.has_final for invoke in invokes):
            raise PlanError(
                "The engine-wide plan is final, and this trace's code has to run in the forward, where it could write after the plan. "
                "`model.explain(fn)` says which line needs that. Send a plan, or a trace that a plan and captures can do."
            )

    def _with_programs(self, invokes: Sequence[Invoke]) -> list[Invoke]:
        """Record the functions in the invokes' plans as programs, once for each plan. Raises PlanError if one cannot be recorded."""
        plans = {id(invoke.plan): invoke.plan for invoke in invokes if invoke.plan and invoke.plan.has_functions}
        recorded = {key: with_programs(plan, self.facts) for key, plan in plans.items()}
        return [replace(invoke, plan=recorded.get(id(invoke.plan), invoke.plan)) for invoke in invokes]

    def adapter_in(self, params: Mapping[str, Any], default: Any = None) -> tuple[Any, dict[str, Any]]:
        """The adapter or the list of adapters among a call's parameters, checked, and the other parameters. Raises ParameterError."""
        found, rest = adapter_in(params, self.adapter_argument, default)
        for each in found if isinstance(found, (list, tuple)) else [found]:
            if each is not None:
                self._check_adapter(each)
        return found, rest

    def adapters_of(self, given: Any, prompts: int) -> Sequence[Any]:
        """The adapter of each prompt. `given`: the value that `adapter_in` returns. Raises ParameterError."""
        return adapters_of(given, self.adapter_argument, prompts)

    def _check_adapter(self, adapter: Any) -> None:
        """Raise ParameterError for a value that is no adapter, or that this model cannot run."""

    def _adapter_alone(self, given: Mapping[str, Any], call: str) -> Any:
        """The adapter of a call that runs all prompts with the same one and takes no other parameters. Raises ParameterError, TypeError."""
        adapter, rest = self.adapter_in(given)
        if rest:
            raise TypeError(f"{call}() got an unexpected keyword argument {next(iter(rest))!r}")
        return adapter_alone(adapter, self.adapter_argument, call)

    async def _results(self, running: OutputStream) -> list[InvokeResult]:
        """The results of requests. Raises their errors."""
        results = await running.gathered()
        raise_failures(results)
        return results

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result; the coroutine itself on an async engine, for the user to await."""
        return coroutine if self._is_async else run_now(coroutine)

    # The interface for users.

    @property
    def plan(self) -> Plan:
        """The plan of every request, applied before its own: `model.plan = [...]`; None removes it."""
        return self._plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        self._plan = Plan.of(plan)

    @overload
    def trace(
        self, prompt: Prompt | Sequence[Prompt] | None = None, *, trace: Literal[False], **params: Any
    ) -> Any: ...

    @overload
    def trace(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        plan: Any = None,
        edits: Sequence[Any] | None = None,
        progress: bool | None = None,
        **params: Any,
    ) -> Tracer: ...

    def trace(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        plan: Any = None,
        edits: Sequence[Any] | None = None,
        trace: bool = True,
        progress: bool | None = None,
        **params: Any,
    ) -> Any:
        """`with model.trace(prompt) as tracer:` runs the block inside the model's forward pass on `prompt`.

        Args:
            prompt: text; token ids; chat messages, for the tokenizer's chat template; or a tokenizer's output, also as `trace(**encoding)`,
                without the tokens that `attention_mask` masks. None if the block has invokes with their own prompts. Or a list of prompts:
                `LanguageModel` runs the block once on their batch, so that values have a batch axis; the other models run it for each
                prompt, and a saved name has the list of its values.
            plan: interventions that run together with the block; at a site, the plan's edits come before the block's.
            edits: the edits to run: names of the model's edits, or edited views. None runs all of the model's edits. Edits without a name
                always run.
            trace: False returns the output, without a with-statement; for a list of prompts, a list of outputs.
            progress: as in `generate`.
            params: the adapter, as in `generate`; and sampling parameters: `max_tokens` (default 1), `temperature` and so on. Decoding is
                greedy unless `temperature`, `top_p`, `top_k`, `min_p`, `do_sample=True` or `n > 1` asks for sampling. On `LanguageModel`
                also `output_hidden_states=True` and `output_attentions=True`, for the forward, and `use_cache=True` for a single forward.

        Raises:
            PromptError: an empty prompt, one that does not fit into one step, or a chat without a chat template.
            InterventionError: the block raised; the error is also an instance of the builtin class that was raised.
            OutOfOrderError, NeverReachedError, ShapeError, UnknownModuleError, UnknownSiteError: the block asked for an unavailable value.
            PlanError: the model cannot carry out the plan on this prompt.
        """
        _refuse_in_trace("trace")
        prompt, params = prompt_in(prompt, params)
        if not trace:
            prompts, _ = prompts_of(prompt)
            given = prompts if len(prompts) > 1 else prompts[0]
            return self.run(_result, given, plan=plan, edits=edits, progress=progress, **params)
        return Tracer(self, prompt, params, 1, plans_of(plan, 1, True)[0], self.chosen_edits(edits), progress)

    def __call__(self, prompt: Prompt | Sequence[Prompt] | None = None, **params: Any) -> Any:
        """Run a prompt, also as `model(**encoding)`, and return the output: `model.trace(prompt, trace=False)`."""
        return self.trace(prompt, trace=False, **params)

    def run(
        self,
        fn: Callable[..., Any],
        prompt: Prompt | Sequence[Prompt],
        *,
        plan: Any = None,
        edits: Sequence[Any] | None = None,
        progress: bool | None = None,
        **params: Any,
    ) -> Any:
        """Run `fn(model)` or `fn(model, tracer)` inside the forward pass on `prompt`: a trace without a with-block.

        Args:
            fn: returns the values to bring back: tensors, or containers of them.
            prompt: one prompt, or a list of prompts, which run as one batch; `fn` is called for each.
            plan: as in `trace`, for all prompts; or a list with one for each.
            edits, params: as in `trace`.
            progress: as in `generate`.

        Returns:
            The return value of `fn`, with tensors on the CPU; a list for a list of prompts. Awaitable with `mode="async"`.
        """
        _refuse_in_trace("run")
        prompts, single = prompts_of(prompt)
        program, plans = FunctionProgram(fn), plans_of(plan, len(prompts), single)
        adapter, params = self.adapter_in(params)
        if any(None in capture.sinks for each in plans for capture in each.captures):
            raise PlanError(
                "run returns what its function returns, without captures. Allowed: Capture.to as a directory, a callable or a Consumer; "
                "or `with model.trace(prompt, plan=...) as tracer:`, whose tracer.outputs have captures."
            )
        chosen = self.chosen_edits(edits)
        invokes = [
            Invoke(p, program, sampling(params, 1, self._generation), q, edits=chosen, is_streamed=False, adapter=own)
            for p, q, own in zip(prompts, plans, self.adapters_of(adapter, len(prompts)), strict=True)
        ]
        return self._finish(self._returned(invokes, self._run_with_bar(invokes, progress=progress), single))

    async def _returned(self, invokes: Sequence[Invoke], running: Any, single: bool) -> Any:
        """A list of the function's return values in the invokes; if `single`, the value in the only invoke."""
        values = []
        results = await self._results(running)
        warn_of_functions(invokes, results)
        for result in results:
            samples = [outcome.values.get(RETURNED) for outcome in result.outcomes]
            for value in samples:
                if isinstance(value, UnsendableError):
                    raise TraceError(f"The function's return value could not be sent: {value}.")
            values.append(samples[0] if len(samples) == 1 else samples)
        return values[0] if single else values

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        plan: Any = None,
        answers: Any = None,
        edits: Sequence[Any] | None = None,
        progress: bool | None = None,
        **params: Any,
    ) -> Any:
        """Generate from prompts with a plan, and with the model's edits; in a with-statement, trace a generation.

        Args:
            prompts: one prompt or several, each as in `trace`.
            plan: `Steer`, `Patch`, `Clamp`, `Probe` and `Capture`, or a list of them, which all act on every prompt; or a list with one
                plan, list or None for each prompt, such as `[[Steer(...)], [Steer(...)]]`. Captured rows are on the outputs as
                `captures`, and probes' scores as `scores`.
            answers: tokens, by text or id, to grade as the first token after the prompt: one or a list, for all prompts; or a list with a
                list for each prompt. Their log-probabilities (nats, before temperature) are on the outputs as `answers`, `{answer:
                log-probability}`, even for unlikely tokens.
            edits: as in `trace`.
            progress: whether to show a progress bar of the requests, if there are several. None uses the model's own `progress`; if that is
                None, too, a terminal or a notebook shows the bar after two seconds.
            params: sampling parameters; `max_tokens` defaults to 16. On `VLLM`, `lora_request=` has vLLM's `LoRARequest`; on `Remote`,
                `model=` has the server's name of an adapter. Either may be a list with one for each prompt, and None for a prompt that runs
                without an adapter.

        Returns:
            A list of outputs, one for each prompt. With `mode="async"`, a stream: await it for the list, or iterate over the outputs as
            they arrive. `with model.generate(prompt, max_tokens=8) as tracer:` is `model.trace`.

        Raises:
            PlanError: the model cannot carry out a plan on its prompt. Nothing has been run.
            PromptError: an answer is not one token. Nothing has been run.
            ParameterError: a parameter is invalid, or the engine cannot load an adapter. Nothing has been run.
            CaptureError: some captured rows did not arrive at their destination. `outputs` has the outputs of all prompts.
        """
        _refuse_in_trace("generate")
        prompts, params = prompt_in(prompts, params)
        if _in_with_header(sys._getframe(1)):
            if answers is not None:
                raise TraceError("A trace has no answers=; read model.logits or model.next_token_probs in it.")
            return Tracer(self, prompts, params, 16, plan, self.chosen_edits(edits), progress)  # type: ignore[arg-type]
        each, single = prompts_of(prompts)
        adapter, params = self.adapter_in(params)
        plans, params = plans_of(plan, len(each), single), sampling(params, 16, self._generation)
        asked = self._answers(answers, len(each), params)
        chosen = self.chosen_edits(edits)
        own = zip(each, plans, asked, self.adapters_of(adapter, len(each)), strict=True)
        invokes = [Invoke(p, None, params, q, a, edits=chosen, adapter=b) for p, q, a, b in own]
        running = self._run_with_bar(invokes, progress=progress)
        running.when_done = _warn_of_spaces
        if self._is_async:
            return running
        results = self._finish(self._results(running))
        _warn_of_spaces(results)
        return [result.output for result in results]

    def collect(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        plan: Any,
        to: str | Path,
        ids: Iterable[Any] | None = None,
        shard_bytes: int | None = None,
        limit_bytes: int | None = None,
        skip_special_tokens: bool = False,
        on_bad: Literal["raise", "skip", "truncate"] = "raise",
        progress: bool | None = None,
        **params: Any,
    ) -> Any:
        """Run the prompts whose captures a directory lacks, and write their captures to the directory.

        The directory's index lists a request within about ten seconds of its end, or at once if no other request runs. Repeat a call that
        was killed: it continues where it stopped, and logs how many prompts the directory has already.

        Args:
            prompts: one prompt or several.
            plan: interventions for all prompts, with at least one `Capture`, without `to`.
            to: a directory for this model and this plan only. If the plan captures generated rows, also for these parameters only.
            ids: an id for each prompt, text or a number: `store[id]` has the prompt's captures, and later calls recognize the prompt by it.
                None makes ids from the tokens; each of several equal prompts gets its own id.
            shard_bytes: the approximate limit of each file's size. 256 MiB if None.
            limit_bytes: how many bytes of rows this call may write. It runs the prompts that fit, in their order, and logs how many are
                left for another call. Rows of generated tokens count as if each prompt generated `max_tokens`.
            skip_special_tokens: leave out the rows of the prompt's special tokens, such as `<s>`: the tokens that
                `tokenizer.decode(skip_special_tokens=True)` leaves out. Rows of generated tokens are kept.
            on_bad: what to do with prompts that the model cannot take: empty ones, longer ones than it takes (on `LanguageModel`, than its
                `max_position_embeddings`), token ids out of its vocabulary, and values that are no prompts. "raise": raise PromptError
                before anything runs. "skip": leave them out. "truncate": keep the first tokens of those that are too long, and leave out
                the others. `bad` of the returned store has the number of each such prompt, and why; their counts are logged.
            progress: as in `generate`. The bar counts the prompts that the directory lacks, and shows rows and bytes per second. Rows of
                generated tokens count as for `limit_bytes`.
            params: sampling parameters; `max_tokens` defaults to 1. The adapter as in `generate`, one for all prompts: a directory contains
                captures of one adapter.

        Returns:
            The captures of these prompts by id, in the order of the prompts. `open_captures(to)` has those of all calls. Awaitable with
            `mode="async"`.

        Raises:
            CaptureError: the directory contains captures of another model or plan, or another prompt under one of these ids; an earlier
                call has collected one of these prompts with `ids`, and this call has none, or the reverse; or the file system has less free
                space than the rows need. Nothing has been run. Also raised if some captured rows were not written.
            PlanError, PromptError, ParameterError: the plan, a prompt, the ids or a parameter is invalid. Nothing has been run.
        """
        _refuse_in_trace("collect")
        collection = self._collection(
            "collect", prompts_of(prompts, checked=on_bad == "raise")[0], params, plan=plan, to=to, ids=ids, shard_bytes=shard_bytes,
            limit_bytes=limit_bytes, skip_special_tokens=skip_special_tokens, on_bad=on_bad,
        )  # fmt: skip
        try:
            return self._finish(self._collect(collection, progress))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(collection.how_to_go_on()) from None

    def collect_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        plan: Any,
        to: str | Path,
        ids: Iterable[Any],
        shard_bytes: int | None = None,
        skip_special_tokens: bool = False,
        on_bad: Literal["raise", "skip", "truncate"] = "raise",
        **params: Any,
    ) -> dict[str, tuple[int, int]]:
        """`collect` for one of several engines that share a job, such as an actor of `midstream.ray`: it shows no progress, and leaves the
        check of the free space to the job.

        Args:
            prompts: they all run at once, and not in parts.
            plan, to, ids, shard_bytes, skip_special_tokens, on_bad, params: as in `collect`.

        Returns:
            The rows and bytes of each prompt that has run, by its id. Prompts that were left out, or that the directory had already, are
            not in it.

        Raises the errors of `collect`.
        """
        _refuse_in_trace("collect_batch")
        options = {"plan": plan, "to": to, "ids": ids, "shard_bytes": shard_bytes}
        options |= {"skip_special_tokens": skip_special_tokens, "on_bad": on_bad}
        collection = self._collection("collect_batch", prompts, params, **options)
        invokes, sizes = collection.missing()
        collection.check.tell()
        if invokes:
            self._finish(self._results(self._run(invokes)))
        names = [invoke.collected.id for invoke in invokes if invoke.collected]
        return dict(zip(names, map(tuple, sizes.tolist()), strict=True))

    def _collection(
        self, call: str, prompts: Sequence[Prompt], params: Mapping[str, Any], **options: Any
    ) -> Collection:
        """The `Collection` of a call. `call`: the method's name, for errors. `options`: arguments of `Collection`."""
        adapter, params = self.adapter_in(params)
        adapter = adapter_alone(adapter, self.adapter_argument, call)
        options["params"] = sampling(params, 1, self._generation)
        if (to := options["to"]) is not None:
            path = Path(to).expanduser().absolute()
            options["listing"] = self._listings.setdefault(path, Listing(path))
        return Collection(self, prompts, adapter=adapter, **options)

    @cached_property
    def _listings(self) -> dict[Path, Listing]:
        """The listing of each directory that a call has named. It is kept, so the next call reads only what is new in the index."""
        return {}

    async def _collect(self, collection: Collection, progress: bool | None) -> Store:
        await self.start()
        parts = collection.parts()
        with self._bar(progress, sum(len(part.invokes) for part in parts), "prompt") as bar:
            for part in parts:
                running = self._run(part.invokes)
                running.ended = partial(collection.ended, bar, part)
                await self._results(running)
        return collection.store()

    def estimate(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        plan: Any,
        to: str | Path | None = None,
        ids: Iterable[Any] | None = None,
        skip_special_tokens: bool = False,
        **params: Any,
    ) -> Any:
        """How many rows and bytes `collect` would write, without running anything.

            model.estimate(prompts, plan=Capture("resid_post", layers=14, positions="all_prompt"))

        Args:
            prompts, plan, ids, skip_special_tokens, params: as in `collect`.
            to: a directory, whose prompts do not count; None counts all prompts.

        Returns:
            An estimate with `prompts`, `rows` and `nbytes`. Rows of generated tokens count as if each prompt generated `max_tokens`.
            Awaitable with `mode="async"`.

        Raises:
            CaptureError, PlanError, PromptError, ParameterError: as `collect` does before it runs anything.
        """
        _refuse_in_trace("estimate")
        prompts = prompts_of(prompts)[0]
        options = {"plan": plan, "to": to, "ids": ids, "skip_special_tokens": skip_special_tokens}
        return self._finish(self._estimate(self._collection("estimate", prompts, params, **options)))

    async def _estimate(self, collection: Collection) -> Estimate:
        await self.start()
        return collection.estimate()

    def activations(
        self,
        prompts: Iterable[Prompt],
        site: str | Sequence[str],
        layer: int | Sequence[int] | None = None,
        *,
        positions: Any = "all_prompt",
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = 1,
        plan: Any = None,
        with_context: bool = False,
        when: str = "before",
        dtype: Any = None,
        buffer_rows: int | None = None,
        on_bad: Literal["raise", "skip", "truncate"] = "raise",
        **params: Any,
    ) -> Activations:
        """Batches of rows for training, without a disk: the model runs the prompts while you train.

            for batch in model.activations(prompts, "resid_post", 14): ...

        While you take the batches of one buffer, a thread runs the prompts of the next one. It waits when that buffer is full.

        Args:
            prompts: a list, or an iterator, which is read as prompts are needed.
            site, layer, batch_size, with_context, when: as in `Store.loader`. `Batch.requests` has the prompts' numbers.
            positions: which rows, as in `Capture`.
            shuffle: whether prompts of a list come in random order, and the rows of a buffer are mixed.
            seed: another seed gives another order.
            epochs: how many times to run the prompts; None: endlessly. An iterator has one epoch.
            plan: interventions for all prompts, in addition to the captures.
            dtype: the dtype of the batches; None for the model's.
            buffer_rows: how many rows are mixed with each other; None for 16 batches. Twice as many rows are in memory.
            on_bad: as in `collect`. `bad` of the activations has the number of each prompt that was left out or cut so far, and why.
            params: sampling parameters; `max_tokens` defaults to 1. The adapter as in `generate`, one for all prompts.

        Raises:
            PlanError, ParameterError: an argument is not allowed. Errors of prompts are raised while you take batches.
        """
        if self._is_async:
            raise ParameterError(
                "activations is for models with mode='sync': its batches are waited for without an event loop."
            )
        asked = Asked.of(site, layer, when, batch_size, buffer_rows, shuffle, seed, with_context)
        adapter, params = self.adapter_in(params)
        sampled = sampling(params, 1, self._generation)
        if adapter_alone(adapter, self.adapter_argument, "activations") is not None:
            sampled[str(self.adapter_argument)] = adapter
        for capture in (Plan.of(plan) + self.plan).captures:
            if any(
                capture.site == name and number in capture.layers_in(self.facts.num_layers)
                for name, number, _ in asked.planes
            ):
                raise ParameterError(
                    f"plan, or model.plan, has a Capture of {capture.site}, whose rows would be among those of the batches. Leave it out.",
                    field="plan",
                )
        check = PromptCheck(self, on_bad)
        prompts = prompts if isinstance(prompts, Iterator) else prompts_of(prompts, checked=on_bad == "raise")[0]
        options = {"positions": positions, "dtype": dtype}
        captures = [Capture(name, layers=number, when=when, **options) for name, number, when in asked.planes]
        return Activations(self.generate, prompts, asked, Plan.of(captures) + plan, epochs, sampled, check)

    def _answers(self, given: Any, prompts: int, params: dict[str, Any]) -> list[Answers]:
        if given is None:
            return [Answers()] * prompts
        if clash := {"logprobs", "logprob_token_ids"} & params.keys():
            raise PromptError(f"answers= takes the place of {' and '.join(sorted(clash))}; give one of them.")
        return self._answer_tokens(given, prompts)

    def _answer_tokens(self, given: Any, prompts: int) -> list[Answers]:
        """The answers of each prompt, with their token ids."""
        return answers_of(given, prompts, lambda: self.tokenizer, self.vocab_size)

    def session(self, **params: Any) -> Session:
        """`with model.session():` groups traces, as nnsight does. They run one after the other, with or without it.

        Save a value in one trace to use it in the next.
        """
        sampling(params, 1)  # refuses remote=True
        return Session()

    def scan(self, prompt: Prompt | Sequence[Prompt] | None = None, **params: Any) -> Tracer:
        """`with model.scan(prompt):` is `model.trace(prompt)`. Values have the shapes that nnsight's scan shows, but the model runs."""
        return self.trace(prompt, **params)

    def record(
        self,
        prompt: Prompt,
        sites: str | Sequence[str],
        layers: Any = "all",
        positions: Any = "all_prompt",
        name: str | None = None,
        **adapter: Any,
    ) -> RecordedRun:
        """Run a prompt and keep its activations where the model runs, as sources of `Patch`.

        The model's own plan and edits apply. A run that no request uses may be dropped to make room for others.

        Args:
            sites: one site or a list, such as `["resid_post"]`.
            layers, positions: as in `Capture`; the positions are in the prompt.
            name: the run's name. The run replaces an older run of that name. None for "run-1" and so on.
            adapter: `lora_request=` on `VLLM`, `model=` on `Remote`, as in `generate`. Any request may use the run, also one with another
                adapter or without one.

        Returns:
            A handle. Awaitable with `mode="async"`.

        Raises:
            PromptError: `prompt` is not a single prompt, or this model cannot take it.
            PlanError: there is no such site, layer or position, or no room for the run.
            ParameterError: the adapter is not valid, or cannot be loaded.
        """
        own = self._adapter_alone(adapter, "record")
        asked = RunRequest(one_prompt(prompt, "record"), sites, layers, positions, name, own)
        return self._finish(self._recording(asked))  # type: ignore[no-any-return]

    def _recording(self, asked: RunRequest) -> Coroutine[Any, Any, RecordedRun]:
        layers, positions, name = asked.layers, asked.positions, asked.name
        sites = asked.checked_sites()
        plan = Plan(tuple(Capture(site, layers=layers, positions=positions, when="after") for site in sites))
        name = self.runs.new_name() if name is None else fields.name("name", name)
        record, params = (uuid.uuid4().hex, name, asked.owner), {"max_tokens": 1, "temperature": 0.0}
        invoke = Invoke(asked.prompt, None, params, plan, record=record, adapter=asked.adapter)
        return self._recorded(self._run([invoke]), record)

    async def _recorded(self, running: OutputStream, record: RecordAs) -> RecordedRun:
        (result,) = await self._results(running)
        assert result.plan is not None
        return await self.runs.add(result.plan.recorded_run(*record[:2]))

    def sweep(
        self,
        clean: Prompt | Sequence[Prompt],
        corrupt: Prompt | Sequence[Prompt] | None,
        answer: Any,
        foil: Any = None,
        *,
        sites: str | Sequence[str] = "resid_post",
        layers: Any = "all",
        positions: Any = "all",
        heads: Any = None,
        metric: Metric = "logit_diff",
        direction: str | None = None,
        source: str = "run",
        coarse: tuple[int, int] | None = None,
        best: int = 3,
        top: int = 0,
        stream: bool = False,
        to: str | Path | None = None,
        progress: bool | None = None,
        **adapter: Any,
    ) -> Any:
        """Patch one prompt from the run of another, at each layer and position in turn, and grade the answer each time.

        This is activation patching, also called causal tracing: Meng et al. 2022 (arXiv:2202.05262), Heimersheim and Nanda 2024
        (arXiv:2404.15255).

            result = model.sweep("The capital of France is", "The capital of Italy is", " Paris", " Rome")
            result.plot()

        Prompts of different lengths are aligned by their common beginning and end. The tokens between are skipped, and
        `result.outline.pairs` lists them. A cell that cannot be patched is void, and `result.void` lists it with the reason.

        Args:
            clean, corrupt: one prompt each, or for several pairs one list each. `corrupt` may be None for ablations.
            answer, foil: the answer of the clean prompt and that of the corrupt prompt: text of one token, or a token id; or a list with
                one for each pair. Both are graded by token id, even if they are unlikely.
            sites: one site or a list, the sites of `Patch`. On vLLM, sites outside of the engine's `graph_sites` run uncompiled.
            layers: "all", a layer, or a list.
            positions: positions of the patched prompt. "all": one cell for each. "together": one cell for all. A list: one cell for each
                entry, which is a position, or text whose tokens are patched together. A dict: the same, with the cells' names as keys; a
                value may be a list with an entry for each pair.
            heads: "all", or the heads to patch one by one. Needs sites="attn_z".
            metric: "logit_diff": the answer's log-probability minus the foil's, in nats, which equals the difference of their logits.
                "logprob": the answer's log-probability. "recovered": "logit_diff", or "logprob" without a foil, scaled so that 0 is the
                corrupt prompt's value and 1 the clean one's. Or a function of the log-probability of the answer and, if given, the foil.
            direction: "denoising" patches the clean run into the corrupt prompt, "noising" the corrupt run into the clean prompt. None
                means "denoising", and for ablations "noising".
            source: what replaces the activations. "run": those of the other prompt's run. For ablations: "zeros", or "mean", the mean over
                all tokens of the patched prompts.
            coarse: (layers, positions), the size of windows to patch first. Then only the cells in the `best` windows of each site run.
            top: how many of the likeliest next tokens to return with each cell. Needs a `VLLM` or a `Remote`.
            stream: return the running sweep, and iterate over its cells as they arrive.
            to: a directory to write the cells to as they arrive. The same call continues an interrupted sweep.
            progress: whether to show a progress bar of the cells, as in `generate`.
            adapter: `lora_request=` on `VLLM`, `model=` on `Remote`: one adapter, with which all requests of the sweep run.

        Returns:
            A `SweepResult`. With `mode="async"` await it. With `stream=True`, a `SweepStream`.

        Raises:
            PromptError: an answer is not one token, or the prompts do not make pairs. Nothing has been run.
            PlanError: this model has no such site, layer or position. Nothing has been run.
            ParameterError: another argument is invalid, or `to` contains another sweep. Nothing has been run.
        """
        _refuse_in_trace("sweep")
        asked = SweepRequest(
            clean, corrupt, answer, foil, sites=sites, layers=layers, positions=positions, heads=heads, metric=metric,
            direction=direction, source=source, coarse=coarse, best=best, top=top,
            adapter=self._adapter_alone(adapter, "sweep"),
        )  # fmt: skip
        running = self._swept(self._sweeping(asked, to), progress)
        return running if stream or self._is_async else running.run()

    def _sweeping(self, asked: SweepRequest, to: Any) -> Any:
        """The object that runs a sweep, or the path patching of `asked.paths`."""
        return SweepRun(self, asked, to) if asked.paths is None else PathRun(self, asked)

    def _swept(self, sweeping: Any, progress: bool | None) -> SweepStream:
        finish = None if self._is_async else self._finish
        return SweepStream(sweeping, finish, partial(self._bar, progress, unit="cell"))

    def path_patching(
        self,
        clean: Prompt | Sequence[Prompt],
        corrupt: Prompt | Sequence[Prompt],
        answer: Any,
        foil: Any = None,
        *,
        receivers: Any = "logits",
        layers: Any = "all",
        heads: Any = "all",
        positions: Any = "together",
        freeze_mlps: bool = False,
        metric: Metric = "logit_diff",
        direction: str | None = "noising",
        stream: bool = False,
        progress: bool | None = None,
        **adapter: Any,
    ) -> Any:
        """Patch each head from the run of the other prompt, and measure only what reaches the receivers directly.

        This is path patching: Wang et al. 2022 (arXiv:2211.00593), Goldowsky-Dill et al. 2023 (arXiv:2304.05969).

            result = model.path_patching("The capital of France is", "The capital of Italy is", " Paris", " Rome")
            result.effects["attn_z"]                  # [layers, heads, 1]: the direct effect of each head on the logits

        The sender is the patched head. All heads of later layers keep the values that they have without the patch. So the sender reaches
        the receivers through the residual stream and the MLPs between, or with `freeze_mlps=True` through the residual stream alone. Norms
        are computed anew. If the receivers are heads, a cell takes two requests. The first one patches the sender, freezes the other
        values, and records the receivers. The second one only patches the receivers with the recorded values.

        Args:
            clean, corrupt, answer, foil, metric, direction, stream, progress, adapter: as in `sweep`. "noising" patches the corrupt run
                into the clean prompt, as in both papers.
            receivers: "logits"; or heads as `(layer, head)`, one or a list of them, which receive together. A head receives by its
                queries, keys and values together.
            layers, heads: where the senders are, as in `sweep`. layers="all" means all layers before the last receiver.
            positions: where the sender is patched, as in `sweep`. "together" patches all positions at once.
            freeze_mlps: whether the MLPs from the sender's layer on keep their values, too.

        Returns:
            A `SweepResult` of the site `attn_z`. With `mode="async"` await it. With `stream=True`, a `SweepStream`.

        Raises:
            PromptError, PlanError: as `sweep`. PlanError also if the model lacks the site of a value that must be frozen.
            ParameterError: another argument is invalid. Nothing has been run.
            RemoteError: on a `Remote`, a cell would freeze more values than the server allows. Nothing has been run.
        """
        _refuse_in_trace("path_patching")
        asked = SweepRequest(
            clean, corrupt, answer, foil, sites="attn_z", layers=layers, positions=positions,
            heads="all" if heads is None else heads, metric=metric, direction=direction,
            adapter=self._adapter_alone(adapter, "path_patching"), paths=paths_of(receivers, freeze_mlps),
        )  # fmt: skip
        running = self._swept(self._sweeping(asked, None), progress)
        return running if stream or self._is_async else running.run()

    def edge_attribution(
        self,
        clean: Prompt | Sequence[Prompt],
        corrupt: Prompt | Sequence[Prompt],
        answer: Any,
        foil: Any = None,
        *,
        metric: str = "logit_diff",
    ) -> EdgeScores:
        """Estimate from gradients how much each edge between heads, MLPs and logits matters. Needs a `LanguageModel`.

        This is edge attribution patching: Syed et al. 2023 (arXiv:2310.10348).

            result = hf.edge_attribution("The capital of France is", "The capital of Italy is", " Paris", " Rome")
            result.best(5)                            # the edges with the largest scores
            result.plot()

        The score of an edge is a dot product of two arrays `[tokens, hidden]`: the change of the sender's contribution to the residual
        stream from the clean to the corrupt prompt, and the gradient of the metric at the receiver's input in the clean run. The score is
        the first-order effect of patching this edge alone. Senders are the input (the embeddings), the heads and the MLPs; receivers are
        the heads, by their queries, keys and values together, the MLPs and the logits.

        A pair takes two runs without gradients and one with them. Two arrays of `nodes * tokens * hidden_size` numbers are in memory.

        Args:
            clean, corrupt: one prompt each, or for several pairs one list each. The prompts of a pair have the same number of tokens.
            answer, foil: as in `sweep`.
            metric: "logit_diff" or "logprob", as in `sweep`.

        Raises:
            PromptError: an answer is not one token, or the prompts do not make pairs. Nothing has been run.
            ParameterError: the model computes no gradients; or its layers are not attention followed by an MLP, each of which adds its
                unchanged output to the residual stream.
        """
        _refuse_in_trace("edge_attribution")
        return attribute_edges(self, clean, corrupt, answer, foil, metric)

    def edit(self, name: str | None = None, *, inplace: bool = False) -> EditContext:
        """`with model.edit() as edited:` makes a view of the model. The block runs in each step of the view's requests.

            with model.edit() as edited:
                edited.layers_output[5] += direction
            with edited.trace(prompt): ...          # with the edit
            with model.trace(prompt): ...           # without

        The view has the same weights, engine, vectors and runs. Values that the block saves are in `saves` of each request's output. If the
        block saves a name in several steps, its value there is a list. Edits run in the order in which they were made.

        With two names, `with model.edit() as (tracer, edited):`, the block has a tracer; `edited.clear()` removes the edit. As in nnsight,
        this form edits the model itself on `VLLM` and `Remote`, as with `inplace=True`.

        Args:
            name: the edit's name, for `clear_edits` and for the argument `edits` of requests. The edit replaces an older one of that name,
                with a warning.
            inplace: edit the model itself, `with model.edit(inplace=True):`. With `as tracer`, the block has a tracer.
        """
        return EditContext(self, name, inplace)

    def _view(self) -> Self:
        """A copy with edits of its own on the same weights."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.edits, view._original = dict(self.edits), self
        return view

    def _edited_view(self, name: str) -> TraceModel:
        """A view whose method `clear` removes the edit called `name` from the view and from this model."""
        view = self._view()

        def clear() -> None:
            for model in (view, self):
                model.edits.pop(name, None)

        view.__dict__["clear"] = clear
        return view

    def chosen_edits(self, edits: Any) -> Sequence[TraceProgram] | None:
        """The programs of the edits that a request chooses by `edits=`: those without a name, and those listed. None for all.

        Raises TraceError for an unknown edit.
        """
        if edits is None:
            return None
        if isinstance(edits, str) or not isinstance(edits, Iterable):
            raise TraceError(f"edits is a list of names of edits, or of edited views; {edits!r} was given.")
        chosen = {name: edit for name, edit in self.edits.items() if not edit.has_name}
        for each in edits:
            if isinstance(each, TraceModel):
                chosen |= each.edits
            elif each in self.edits:
                chosen[each] = self.edits[each]
            else:
                raise TraceError(f"There is no edit {each!r}; there are: {', '.join(self.edits) or 'none'}.")
        return [*chosen.values()]

    def clear_edits(self, name: str | None = None) -> None:
        """Remove an edit, or all of them."""
        if name is not None and name not in self.edits:
            raise TraceError(f"There is no edit {name!r}; there are: {', '.join(self.edits) or 'none'}.")
        for gone in [name] if name is not None else list(self.edits):
            del self.edits[gone]


def _in_with_header(frame: FrameType) -> bool:
    """Whether a with-statement enters the result of the call that `frame` is making."""
    opcodes = frame.f_code.co_code[frame.f_lasti + 2 :: 2]
    after = list(islice((dis.opname[opcode] for opcode in opcodes if opcode != dis.opmap["CACHE"]), 2))
    return after[:1] in (["BEFORE_WITH"], ["LOAD_SPECIAL"]) or after == ["COPY", "LOAD_SPECIAL"]
