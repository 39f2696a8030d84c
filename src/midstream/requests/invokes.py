"""One request as the user asks for it: its plan, checked against the model, its answers, and its result.

`TraceModel` makes an `Invoke` for each prompt; `Planner` checks its plan; the model runs it and returns an `InvokeResult`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.rows import Routes, Rows, destination_key, routes
from midstream.capture.sinks import RequestCapture, Sinks, destination
from midstream.errors import (
    InterventionErrorGroup,
    MidstreamError,
    ParameterError,
    PlanError,
    PromptError,
    RequestErrorGroup,
)
from midstream.plan.captures import Planes
from midstream.plan.compile import plane_width, reads_of
from midstream.plan.ops.edit import changed
from midstream.plan.selections import NO_POSITIONS
from midstream.plan.values import (
    Capture,
    Intervention,
    ModelFacts,
    Plan,
    RecordedRun,
    Steer,
    check,
    counted_from_0,
    has_spans,
    resolve_spans,
    with_digests,
)
from midstream.requests.prompts import Prompt, encode, is_multimodal, offsets_of
from midstream.requests.vectors_and_runs import Runs, Vectors
from midstream.runtime.request import Memory, plan_bytes
from midstream.trace.block import Block
from midstream.trace.code import BlockProgram, TraceProgram
from midstream.trace.outcome import Outcome

Answers = Mapping[str | int, int]  # an answer, as a text or a token id -> its token id
RecordAs = tuple[str, str, str]  # id, name and owner of a recorded run
_log = logging.getLogger(__name__)
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
    answers: Answers = field(default_factory=dict)
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
    """

    outcomes: list[Outcome]
    output: Any
    plan: PreparedPlan | None = None
    error: MidstreamError | None = None

    def errors(self) -> Iterator[MidstreamError]:
        for outcome in self.outcomes:
            if outcome.failure is not None:
                error = outcome.failure.exception()
                error.saves = outcome.values  # type: ignore[attr-defined]
                yield error
        if self.error is not None:
            yield self.error


def saves_of(own: Outcome | None, edits: Sequence[Outcome]) -> dict[str, Any]:
    """The values that a request saved: those of its edits, overridden by its own."""
    every = [*edits, own] if own is not None else edits
    return {name: value for outcome in every for name, value in outcome.values.items()}


def sample_saves(samples: Sequence[list[Outcome]]) -> Any:
    """The values that the request saved: a dict, or a list of dicts for n > 1."""
    each = [saves_of(own, edits) for own, *edits in samples]
    return each[0] if len(each) == 1 else each or {}


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


# Sampling parameters.

_ASK_FOR_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Parameters of other libraries, which have no effect on values.
_HARMLESS = ("scan", "validate", "return_dict", "pad_token_id")
_TRANSFORMERS_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "num_return_sequences": "n"}
# Parameters of transformers' generate -> how to write them here.
_SPELLED = {
    "generation_config": "give its values by name, as in temperature=0.6, top_k=20. The model's own are in use already.",
    "max_length": "give the number of generated tokens, max_tokens=.",
    "min_new_tokens": "on vLLM write min_tokens=.",
    "min_length": "on vLLM write min_tokens=, which counts generated tokens.",
    "eos_token_id": "write stop_token_ids=[...], and ignore_eos=True to continue after the model's own end.",
    "num_beams": "midstream has no beam search.",
}

_USUAL = {"num_beams": 1, "min_length": 0, "min_new_tokens": 0}  # values without effect

# Arguments of a transformers model's forward -> the replacement on vLLM, which has no such argument.
FORWARD_ARGUMENTS = {
    "output_hidden_states": "Read model.layers_output[i] in a trace, or capture resid_post with a plan.",
    "output_attentions": "Its attention kernels return no weights. Use LanguageModel(name, attn_implementation='eager').",
    "use_cache": None,  # it always has one
}


def engine_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters for vLLM. Raises ParameterError for an argument of a transformers model's forward."""
    for name, instead in FORWARD_ARGUMENTS.items():
        if name in params and instead is not None:
            raise ParameterError(
                f"{name}= is an argument of transformers' forward, which vLLM does not have. {instead}"
            )
    return {name: value for name, value in params.items() if name not in FORWARD_ARGUMENTS}


def sampling(
    params: Mapping[str, Any], max_tokens: int, defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Sampling parameters under vLLM's names, greedy unless one of them asks for sampling.

    `temperature`, `top_p`, `top_k`, `min_p`, `n > 1` and `do_sample=True` ask for it; `do_sample=False` means greedy and overrides them.
    `max_new_tokens`, `stop_strings` and `num_return_sequences` are transformers' names of `max_tokens`, `stop` and `n`.

    Args:
        max_tokens: the default.
        defaults: of the model's generation configuration. A repetition penalty always counts, the others if tokens are sampled.

    Raises:
        ParameterError: a parameter of transformers' that has another name here.
    """
    # transformers treats None as unset.
    unset = {name for name in _ASK_FOR_SAMPLING if name in params and params[name] is None}
    unset |= {name for name in FORWARD_ARGUMENTS if not params.get(name)}
    given = {name: value for name, value in params.items() if name not in _HARMLESS and name not in unset}
    if given.pop("remote", None):
        raise ParameterError("remote= is not a parameter here: use midstream.Remote(url) in place of this model.")
    if "sampling_params" in given:
        raise ParameterError(
            "sampling_params= is not a parameter here: give each one by name, as in max_tokens=3, temperature=0.5."
        )
    for name, instead in _SPELLED.items():
        if given.get(name, _USUAL.get(name)) not in (None, _USUAL.get(name)):
            raise ParameterError(f"{name}= is not a parameter here: {instead}")
        given.pop(name, None)
    for name, ours in _TRANSFORMERS_NAMES.items():
        if name in given and ((value := given.pop(name)) != 1 or ours != "n"):
            given[ours] = value
    asked = given.pop("do_sample", None)
    if asked is not None and not isinstance(asked, bool):
        raise ParameterError(f"do_sample is {asked!r}; allowed: True or False.")
    if asked is None:
        asked = any(name in given for name in _ASK_FOR_SAMPLING) or (given.get("n") or 1) > 1
    if not asked:
        given["temperature"] = 0.0
    used = (*_ASK_FOR_SAMPLING, "repetition_penalty") if asked else ("repetition_penalty",)
    return {
        "max_tokens": max_tokens,
        **{name: defaults[name] for name in used if defaults.get(name) is not None},
        **given,
    }


def _adds_token_types(architectures: Sequence[str]) -> bool:
    """Whether the forward of one of these has token types in transformers."""
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


# Answers: tokens to grade as the first token after the prompt. They are looked up by id, so unlikely ones have a value, too.


def answers_of(given: Any, prompts: int, tokenizer: Callable[[], Any], vocab_size: int) -> list[Answers]:
    """The answers of each of several prompts.

    Args:
        given: an answer (a text of one token, or a token id) or a list of answers for all prompts; or a list with a list for each prompt.

    Raises:
        PromptError: an answer is not one token of the model, or the number of lists differs from the number of prompts.
    """

    each = answers_by_prompt(given, prompts)
    tokens = {
        id(answers): {answer: _answer_token(answer, tokenizer, vocab_size) for answer in answers} for answers in each
    }
    return [tokens[id(answers)] for answers in each]


def answers_by_prompt(given: Any, prompts: int) -> list[list[Any]]:
    """The list of answers of each prompt; the same list object for prompts that share it. Raises PromptError."""
    if not isinstance(given, (list, tuple)) or not any(isinstance(each, (list, tuple)) for each in given):
        return [_checked_answers(given)] * prompts
    if len(given) != prompts:
        text = f"answers is a list with a list for each prompt: {len(given)} were given for {prompts}."
        raise PromptError(text, field="answers")
    return [_checked_answers(each) for each in given]


def _checked_answers(given: Any) -> list[str | int]:
    answers = list(given) if isinstance(given, (list, tuple)) else [given]
    for answer in answers:
        if not isinstance(answer, (str, int)) or isinstance(answer, bool):
            text = f"answers has {answer!r}. Allowed: texts of one token, token ids, and lists of these."
            raise PromptError(text, field="answers")
    return answers


def _answer_token(answer: str | int, tokenizer: Callable[[], Any], vocab_size: int) -> int:
    if isinstance(answer, int):
        if not 0 <= answer < vocab_size:
            text = f"answers has the token id {answer}; this model's are 0 to {vocab_size - 1}."
            raise PromptError(text, field="answers")
        return answer
    ids = tokenizer()(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        parts = ", ".join(f"{tokenizer().decode([token])!r} ({token})" for token in ids)
        raise PromptError(
            f"The answer {answer!r} is {len(ids)} tokens: {parts or 'none'}. Answers are graded by one token: give the id of the "
            "one that tells them apart, or a text of one token (most words are one with the space before them).",
            field="answers",
        )
    return int(ids[0])


# Adapters (LoRA): `lora_request=` on `VLLM`, `model=` on `Remote`.

AdapterArgument = Literal["lora_request", "model"]
_ADAPTERS_ELSEWHERE: dict[AdapterArgument | None, dict[str, str]] = {
    "lora_request": {"model": "on VLLM give vLLM's LoRARequest, lora_request=LoRARequest(name, number, path)"},
    "model": {"lora_request": "on Remote give the name that the server has for the adapter, model=NAME"},
    None: dict.fromkeys(
        ("lora_request", "model"),
        "a LanguageModel has no adapters. Merge the adapter into the weights, for example by PEFT's merge_and_unload, and make a "
        "LanguageModel of the result",
    ),
}


def adapter_in(
    params: Mapping[str, Any], argument: AdapterArgument | None, default: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The value of a call's argument for the adapter, and the call's other parameters.

    Args:
        argument: the name that the model has for it; None if the model has no adapters.
        default: the value if the call has none.

    Raises:
        ParameterError: the call has the argument of another kind of model.
    """
    rest = dict(params)
    found = rest.pop(argument, default) if argument is not None else default
    for name, instead in _ADAPTERS_ELSEWHERE[argument].items():
        if rest.pop(name, None) is not None:
            raise ParameterError(f"{name}= is not a parameter here: {instead}.", field=name)
    return found, rest


def adapters_of(given: Any, argument: AdapterArgument | None, prompts: int) -> Sequence[Any]:
    """The adapter of each prompt; None for a prompt that runs without one.

    Args:
        given: one adapter for all prompts, or a list with one or None for each prompt.

    Raises:
        ParameterError: the list has another length.
    """
    if not isinstance(given, (list, tuple)):
        return [given] * prompts
    if len(given) != prompts:
        raise ParameterError(
            f"{argument} is a list with an adapter or None for each prompt: {len(given)} were given for {prompts}.",
            field=argument,
        )
    return given


def adapter_alone(given: Any, argument: AdapterArgument | None, what: str) -> Any:
    """The adapter of a call that has the same one for all of its prompts. Raises ParameterError for a list."""
    if isinstance(given, (list, tuple)):
        raise ParameterError(
            f"{argument} is a list, and {what} runs all prompts with one adapter. Give one, and call it once for each adapter.",
            field=argument,
        )
    return given


# Plans.


def plans_of(given: Any, prompts: int, single: bool = False) -> list[Plan]:
    """The plan of each prompt.

    Args:
        given: one plan for all prompts, or a list with a plan, a list of interventions or None for each prompt.
        single: whether there is one prompt, not a list of prompts.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(given, (list, tuple)) or all(isinstance(item, Intervention) for item in given):
        if prompts > 1 and isinstance(given, (list, tuple)) and len(given) == prompts and _are_scales(given):
            _log.warning(
                "plan is a flat list, so each of the %s prompts gets the sum of all %s Steers. To give each prompt one of them, write "
                "plan=[[each] for each in plan]",
                prompts,
                prompts,
            )
        return [Plan.of(given)] * prompts
    if any(isinstance(item, Intervention) for item in given):
        raise PlanError(
            "plan mixes interventions with plans. Allowed: one list of interventions for all prompts, or a list that has for "
            "each prompt a plan, a list of interventions, or None."
        )
    if len(given) != prompts:
        there = "one prompt" if single or prompts == 1 else f"{prompts} prompts"
        raise PlanError(f"plan is a list with a plan for each prompt: {len(given)} plans were given for {there}.")
    return [Plan.of(item) for item in given]


def _are_scales(given: Sequence[Any]) -> bool:
    """Whether they are `Steer`s that differ only in their scales."""
    same = {changed(each, scale=1.0) for each in given if isinstance(each, Steer)}
    return len(same) == 1 and all(isinstance(each, Steer) for each in given)


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
        """Takes the captured rows of a request, or of one of its samples, of this name. Raises CaptureError as `RequestCapture` does."""
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
        """Raise PlanError for errors in a plan on this model that do not depend on the prompt."""
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
        )  # equal functions may differ
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
