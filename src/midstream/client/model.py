"""What both backends have in common: `trace`, `run`, `generate`, `edit`, and plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from midstream.arch.names import Sizes
from midstream.client.answers import Answers, answers_of
from midstream.client.collecting import Collection
from midstream.client.planned import Planner, plans_of
from midstream.client.prompts import Prompt
from midstream.client.runs import Runs
from midstream.client.tracer import Invoke, Ran, Tracer, _Context, in_with_header, raise_failures
from midstream.client.vectors import Vectors
from midstream.errors import PlanError, PromptError, TraceError, UnsendableError
from midstream.plan.checks import ModelFacts
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Capture, Plan
from midstream.trace.block import Block
from midstream.trace.body import current_body, is_in_body
from midstream.trace.envoy import inside
from midstream.trace.program import RETURNED, BlockProgram, Found, FunctionProgram, Program
from midstream.trace.tracer import BodyTracer, steps


class Running(Protocol):
    """A trace on its way."""

    def wait(self) -> list[Ran]: ...


class Edit(Program):
    """A program that runs again in every step of every request."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        for _ in steps(current_body(), slice(None)):
            self.program.run(model, {})
        return Found()

    def recover(self, error: BaseException, body: Any) -> Found:
        return Found()


class EditContext(_Context):
    """`with model.edit("name"):`, a block left on the model for every request."""

    def __init__(self, model: TraceModel, name: str) -> None:
        super().__init__()
        self._model = model
        self._name = name

    def _taken(self, block: Block, frame: FrameType) -> None:
        injected = {block.target: BodyTracer()} if block.target else {}
        self._model.edits[self._name] = Edit(BlockProgram(block, injected))


def sampling(params: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Sampling parameters under vLLM's names; `max_new_tokens` is taken for `max_tokens`."""
    params = dict(params)
    if "max_new_tokens" in params:
        params["max_tokens"] = params.pop("max_new_tokens")
    return {"max_tokens": max_tokens, **params}


def _outside(name: str) -> None:
    """Raise TraceError inside of a trace."""
    if is_in_body():
        raise inside(name)


def _each(prompts: Any, what: str) -> tuple[list[Any], bool]:
    """The prompts that `what` was called with, one by one; whether it was a single one."""
    if not isinstance(prompts, Iterable):
        raise PromptError(f"{what} needs a prompt, or several; {prompts!r} was given.")
    given: Any = prompts if isinstance(prompts, (str, Sized)) else list(prompts)
    single = isinstance(given, str) or hasattr(given, "keys") or all(isinstance(token, int) for token in given)
    return ([given] if single else list(given)), single


class TraceModel(Sizes):
    """A model that traces and plans run on.

    Attributes:
        model_name: as it was given.
        vectors: the named vectors that plans may use: `model.vectors["truth"] = tensor`.
        runs: the recorded runs that there are.
    """

    edits: dict[str, Edit]
    model_name: str
    vectors: Vectors
    runs: Runs
    _plan: Plan = Plan()
    _deferred = False
    _ships = False  # whether traces run in another process, on copies of what they use

    def close(self) -> None:
        """Be done with the model; also at the end of `with model:`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, invokes: list[Invoke], together: bool) -> Any:
        """Begin to run `invokes`, `together` if they must be in the same steps: a Running, or a Stream if `_deferred`."""
        raise NotImplementedError

    def _outputs(self, invokes: list[Invoke]) -> Any:
        raise NotImplementedError

    def _record(self, prompt: Prompt, plan: Plan, name: str) -> Any:
        """Run `plan`, which captures, and keep its rows as the run `name`."""
        raise NotImplementedError

    @property
    def planner(self) -> Planner:
        """Makes plans ready for this model, with the vectors and runs that there are now."""
        raise NotImplementedError

    @property
    def facts(self) -> ModelFacts:
        """What plans are checked against."""
        raise NotImplementedError

    @property
    def longest_prompt(self) -> int | None:
        """In tokens; None if nothing bounds it."""
        return None

    @property
    def plan(self) -> Plan:
        """The plan of every request, before its own: `model.plan = [...]`; None takes it away."""
        return self._plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        self._plan = Plan.of(plan)

    def _with_plan(self, invokes: list[Invoke]) -> list[Invoke]:
        """The invokes with the model's own plan before theirs."""
        if not self.plan:
            return invokes
        composed = {id(invoke.plan): self.plan + invoke.plan for invoke in invokes}
        return [replace(invoke, plan=composed[id(invoke.plan)]) for invoke in invokes]

    def trace(self, prompt: Prompt | None = None, *, plan: Any = None, **params: Any) -> Tracer:
        """`with model.trace(prompt) as tracer:` runs the block inside the model's forward pass on `prompt`.

        Args:
            prompt: text, token ids, or a tokenizer's output; None if the block has invokes with prompts of their own.
            plan: interventions that run beside the block; at a site, the plan's edits come before it.
            params: sampling parameters, `max_tokens` (1 if not given), `temperature` and so on.

        Raises:
            PromptError: an empty prompt, or one longer than a step may be.
            InterventionError: the block raised; also an instance of the builtin class that was raised.
            OutOfOrderError, NeverReachedError, ShapeError, UnknownModuleError, UnknownSiteError: what the block asked for
                cannot be had.
            PlanError: the plan cannot be done on this model, or to this prompt.
        """
        _outside("trace")
        return Tracer(self, prompt, sampling(params, 1), plans_of(plan, 1, True)[0])

    def run(
        self, fn: Callable[..., Any], prompt: Prompt | list[str] | list[list[int]], *, plan: Any = None, **params: Any
    ) -> Any:
        """Run `fn(model)` or `fn(model, tracer)` inside the forward pass on `prompt`; the primitive under the with-block.

        Args:
            fn: returns what to bring back: tensors, or containers of them.
            prompt: one prompt, or a list of them, each with a run of `fn` of its own in one batch.
            plan: as of `trace`, for all prompts; or a list with one for each.
            params: as of `trace`.

        Returns:
            What `fn` returned, tensors on the CPU; a list for a list of prompts. To be awaited with `mode="async"`.
        """
        _outside("run")
        many = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        prompts: list[Any] = prompt if many else [prompt]  # type: ignore[assignment]
        if many and not prompts:
            raise PromptError("run needs at least one prompt.")
        program, plans = FunctionProgram(fn), plans_of(plan, len(prompts), not many)
        if any(None in capture.sinks for each in plans for capture in each.captures):
            raise PlanError(
                "run gives back what its function returns, and no captures. Allowed: Capture.to as a directory, a callable or a Consumer; "
                "or `with model.trace(prompt, plan=...) as tracer:`, whose tracer.outputs have captures."
            )
        ran = self._start(
            [Invoke(p, program, sampling(params, 1), q) for p, q in zip(prompts, plans, strict=True)], False
        )
        if self._deferred:
            return _returned_later(ran, many)
        done = ran.wait()
        raise_failures(done)
        return _values(done, many)

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, *, plan: Any = None, answers: Any = None, **params: Any
    ) -> Any:
        """Generate from prompts with a plan, and with the model's edits; or, entered by `with`, a trace over a generation.

        Args:
            prompts: one prompt or several.
            plan: `Steer`, `Patch`, `Clamp` and `Capture`, or a list of them, for all prompts; or a list with one plan, list or None
                for each prompt. What it captures is on the outputs, as `captures`.
            answers: tokens, by text or id, whose log-probabilities (nats, natural logarithm, before temperature) as the first token
                behind the prompt are wanted, however unlikely: one or a list, for all prompts; or a list with a list for each prompt.
                On the outputs as `answers`, `{answer: log-probability}`.
            params: sampling parameters; `max_tokens` is 16 if not given.

        Returns:
            A list of outputs, one a prompt; with `mode="async"` what to await for it, or to iterate over the outputs as they
            come. As `with model.generate(prompt, max_tokens=8) as tracer:` it is `model.trace`.

        Raises:
            PlanError: a plan cannot be done on this model, or to its prompt. Nothing has been run then.
            PromptError: an answer is not one token. Nothing has been run then either.
            CaptureError: captured rows did not all arrive where they should. `outputs` has the outputs of all prompts.
        """
        _outside("generate")
        if in_with_header(sys._getframe(1)):
            if answers is not None:
                raise TraceError("A trace has no answers=; read model.logits or model.next_token_probs in it.")
            return Tracer(self, prompts, sampling(params, 16), plan)  # type: ignore[arg-type]
        each, single = _each(prompts, "generate")
        plans, params = plans_of(plan, len(each), single), sampling(params, 16)
        asked = self._answers(answers, len(each), params)
        return self._outputs([Invoke(p, None, params, q, a) for p, q, a in zip(each, plans, asked, strict=True)])

    def collect(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        plan: Any,
        to: str | Path,
        ids: Iterable[Any] | None = None,
        **params: Any,
    ) -> Any:
        """Run the prompts whose captures a directory lacks, and keep what the plan captures of them there.

        Each request is listed there within about a second of its end, while others run. Killed and called again, it goes on where it
        stopped, and logs how many prompts are there already.

        Args:
            prompts: one prompt or several.
            plan: interventions for all prompts, at least one `Capture` among them, without `to`.
            to: a directory, for this model, this plan and nothing else. With captures of generated rows, also for these parameters.
            ids: a name for each prompt, text or a number, by which `store[id]` has it and a later call knows it. None makes them of
                the tokens: equal prompts count one by one.
            params: sampling parameters; `max_tokens` is 1 if not given.

        Returns:
            What `open_captures(to)` gives. To be awaited with `mode="async"`.

        Raises:
            CaptureError: the directory holds captures of another model, plan or prompt, and nothing has been run; or captured rows
                did not all arrive there.
            PlanError, PromptError, ParameterError: the plan, a prompt, the ids or a parameter cannot be taken. Nothing has been run.
        """
        _outside("collect")
        collection = Collection(self, _each(prompts, "collect")[0], plan, to, ids, sampling(params, 1))
        return collection.run_later() if self._deferred else collection.run()

    def _answers(self, given: Any, prompts: int, params: dict[str, Any]) -> list[Answers]:
        if given is None:
            return [{}] * prompts
        if clash := {"logprobs", "logprob_token_ids"} & params.keys():
            raise PromptError(f"answers= takes the place of {' and '.join(sorted(clash))}; give one of them.")
        model: Any = self
        return answers_of(given, prompts, lambda: model.tokenizer, self.vocab_size)

    def record(
        self,
        prompt: Prompt,
        sites: str | Sequence[str],
        layers: Any = "all",
        positions: Any = "all_prompt",
        name: str | None = None,
    ) -> RecordedRun:
        """Run a prompt and keep its activations where the model is, as sources of `Patch`.

        The model's own plan and edits are on. A run is dropped when others need its room and no request uses it.

        Args:
            sites: such as `["resid_post"]`; `layers` and `positions` are as of `Capture`, positions of the prompt.
            name: of the run, in the place of an older one that has it; "run-1" and so on if None.

        Returns:
            A handle. To be awaited with `mode="async"`.

        Raises:
            PlanError: there is no such site, layer or position, or no room for the run.
        """
        if isinstance(positions, str) and positions not in ("all_prompt", "last_prompt"):
            raise PlanError(
                f"record: positions is {positions!r}. Allowed: 'all_prompt', 'last_prompt', positions of the prompt, or a Span."
            )
        each = [sites] if isinstance(sites, str) else list(sites)
        if not each:
            raise PlanError("record: sites is empty. Allowed: one site or several.")
        plan = Plan(tuple(Capture(site, layers=layers, positions=positions, when="after") for site in each))
        return self._record(prompt, Plan(self.plan.edits) + plan, self.runs.new_name() if name is None else name)

    def edit(self, name: str = "default") -> EditContext:
        """`with model.edit("name"):` leaves the block on the model: it runs in every step of every later request."""
        return EditContext(self, name)

    def clear_edits(self, name: str | None = None) -> None:
        """Take an edit away, or all of them."""
        if name is not None and name not in self.edits:
            raise TraceError(f"There is no edit {name!r}; there are: {', '.join(self.edits) or 'none'}.")
        for gone in [name] if name is not None else list(self.edits):
            del self.edits[gone]


async def _returned_later(stream: Any, many: bool) -> Any:
    await stream
    return _values(stream.ran, many)


def _values(done: list[Ran], many: bool) -> Any:
    values = [_returned(request) for request in done]
    return values if many else values[0]


def _returned(request: Ran) -> Any:
    values = [outcome.values.get(RETURNED) for outcome in request.outcomes]
    for value in values:
        if isinstance(value, UnsendableError):
            raise TraceError(f"What the function returned has not come back: {value}.")
    return values[0] if len(values) == 1 else values
