"""One batch of requests on a transformers model: its steps, and the traces and plans that run on it.

Plans run in the same hooks and tables as on a CPU engine. Tests compare the kernels of GPU engines with these tables.

Shape suffixes: B requests, S positions of the padded batch, V the vocabulary, t the tokens of one request in this step, H the site's width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from midstream import hooks
from midstream.arch import Architecture
from midstream.arch.heads import AttentionSettings, Heads, caches_known, set_cut
from midstream.capture.rows import Captured, Rows
from midstream.capture.sinks import Sinks
from midstream.errors import NotFiniteError, ParameterError, TraceError
from midstream.plan.compile import compile_plan
from midstream.plan.probes import ScoreChunk, Scores
from midstream.plan.values import not_finite
from midstream.requests.arguments import FORWARD_ARGUMENTS, MissingSpace
from midstream.requests.invokes import Invoke, InvokeResult, PreparedPlan, put_results, saves_of
from midstream.runtime.knockouts import attend_again
from midstream.runtime.points import PointHooks, points_of
from midstream.runtime.scores import RequestScores, StepScores
from midstream.runtime.store import RunStore
from midstream.runtime.tables import RowProfiles
from midstream.runtime.torch_tables import TorchTables
from midstream.sites import NotFinite, Point
from midstream.trace.batch_rows import BatchRows
from midstream.trace.body import Body, StopTrace
from midstream.trace.code import STOPPED, Outcome, TraceProgram, outcome
from midstream.trace.gradients import asks_for_gradients
from midstream.trace.interleaver import Interleaver

_SAMPLING = set(
    "max_tokens temperature top_p top_k min_p repetition_penalty seed ignore_eos stop stop_token_ids".split()
)
_FOR_GENERATE = ("min_p", "output_hidden_states", "output_attentions")
_CONTEXT = 6  # how many of the prompt's last tokens are decoded with the generated ones: a token's text may depend on earlier tokens


class _Output(torch.Tensor):
    """An output is the tensor of its token ids, as transformers' `generate` returns it, with attributes. Slices of it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    saves: dict[str, Any]
    forward_output: Mapping[str, Any] = MappingProxyType({})  # what the model returned, by name

    @property
    def logits(self) -> torch.Tensor:
        """The model's logits, `[prompts, tokens, vocab]`."""
        return self._forward("logits", "")  # type: ignore[no-any-return]

    @property
    def hidden_states(self) -> tuple[torch.Tensor, ...]:
        """With `output_hidden_states=True`: the embeddings and what each layer returned, `[prompts, tokens, hidden]`."""
        return self._forward("hidden_states", " and have output_hidden_states=True")  # type: ignore[no-any-return]

    @property
    def attentions(self) -> tuple[torch.Tensor, ...]:
        """With `output_attentions=True`: the attention weights of each layer, `[prompts, heads, tokens, tokens]`."""
        return self._forward("attentions", " and have output_attentions=True")  # type: ignore[no-any-return]

    def _forward(self, name: str, condition: str) -> Any:
        if name not in self.forward_output:
            raise TraceError(
                f"The {name} of all positions are kept for traces of one step that use tracer.result{condition}. Otherwise save "
                f"model.output.{name} in the trace."
            )
        return self.forward_output[name]

    @property
    def sequences(self) -> torch.Tensor:
        """The prompts' tokens and the generated ones, `[prompts, tokens]`."""
        return self.as_subclass(torch.Tensor)


class Generated(_Output):
    """The output of `LanguageModel` for one prompt: the tensor of its token ids, `[1, tokens]`, the prompt's and the generated ones.

    Attributes:
        request_id: the request's id in a directory of captures.
        prompt_token_ids, token_ids: the prompt's tokens and the generated ones.
        text: the generated tokens as text, without special tokens, up to the first of the strings in `stop`.
        finish_reason: "stop" if a string in `stop`, a token in `stop_token_ids`, an end-of-text token, the trace or a probe ended the
            request; else "length".
        stop_reason: the string, the token if it is one of `stop_token_ids`, "trace:stop" for a trace, or "probe:NAME" for a probe; None
            otherwise.
        saves: the trace's saved values, by name.
        captures: the rows that the plan captured.
        scores: what the plan's probes found.
        answers: the log-probability of each answer, in nats.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    captures: Captured | None
    scores: Scores
    answers: dict[str | int, float] | None

    @staticmethod
    def of(prompt_token_ids: list[int], token_ids: list[int], **attributes: Any) -> Generated:
        output = torch.tensor([[*prompt_token_ids, *token_ids]]).as_subclass(Generated)
        vars(output).update(attributes, prompt_token_ids=prompt_token_ids, token_ids=token_ids)
        return output

    @property
    def outputs(self) -> list[Generated]:
        """The only sample, as in vLLM's outputs: `output.outputs[0].text`."""
        return [self]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Generated(text={self.text!r}, ids={self.tolist()})"


class GeneratedBatch(_Output):
    """The output of `LanguageModel` for the prompts of one invoke: the tensor of their token ids, `[prompts, tokens]`.

    Shorter prompts are padded on the left, and shorter answers on the right.

    Attributes:
        rows: the output of each prompt.
        saves: the trace's saved values, by name.
    """

    rows: list[Generated]

    @staticmethod
    def of(rows: list[Generated], pad: int) -> GeneratedBatch:
        prompts, answers = (
            [torch.tensor(ids, dtype=torch.int64) for ids in each]
            for each in ([row.prompt_token_ids for row in rows], [row.token_ids for row in rows])
        )
        before_BS = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")
        after_BS = pad_sequence(answers, batch_first=True, padding_value=pad)
        output = torch.cat([before_BS, after_BS], 1).as_subclass(GeneratedBatch)
        output.rows = rows
        return output


@dataclass(eq=False)
class BatchRequest:
    """One prompt of a batch.

    Attributes:
        prompt: token ids.
        running: its plan in the tables of the batch; None without a plan.
        generated: the tokens generated so far.
        finish_reason, stop_reason: None while it runs.
        graded: the log-probabilities of its answers.
        missing: as in `InvokeResult`.
        rows: its rows of the current step.
        output: set when the batch has ended.
    """

    name: str
    invoke: Invoke
    prompt: list[int]
    plan: PreparedPlan | None
    running: RunningPlan | None = None
    generated: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    graded: dict[str | int, float] | None = None
    missing: Sequence[MissingSpace] = ()
    rows: BatchRows = field(init=False)
    output: Generated = field(init=False)

    @property
    def computed(self) -> int:
        """How many of its tokens were computed before the running step."""
        return len(self.prompt) + len(self.generated) - 1 if self.generated else 0


@dataclass
class BatchInvoke:
    """One invoke of a batch.

    Attributes:
        requests: one for each of its prompts; all requests of the batch, if the invoke has no prompt.
        is_batch: whether its values have a batch axis.
        result: set when the batch has ended.
    """

    invoke: Invoke
    requests: list[BatchRequest]
    is_batch: bool
    result: InvokeResult = field(init=False)


class PaddedBatch:
    """One left-padded batch of `requests`, and the bodies that run on it."""

    def __init__(
        self,
        model: Any,
        interleaver: Interleaver,
        plans: BatchPlans,
        requests: Sequence[BatchRequest],
        invokes: Sequence[BatchInvoke],
    ) -> None:
        self.module: Any = model.module
        self.tokenizer: Any = model.tokenizer
        self.interleaver, self.plans = interleaver, plans
        self.requests, self.invokes = requests, invokes
        self.params = self._common_params([each.invoke for each in invokes])
        self.length = max(len(request.prompt) for request in requests)
        self.programs: dict[str, TraceProgram] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.requests_of: dict[str, BatchInvoke] = {}  # by the name of a body
        self.bodies: dict[str, Body] = {}
        self.pad: int = self.tokenizer.pad_token_id or 0
        self._forward_output: Mapping[str, Any] = {}  # of the whole batch
        shared: dict[str, Any] = {}
        for number, each in enumerate(invokes):
            edits = list(model.edits.values()) if each.invoke.edits is None else each.invoke.edits
            for row, request in enumerate(each.requests if each.invoke.prompt is not None else ()):
                for place, edit in enumerate(edits):
                    self._add(
                        f"{number}#{row}.{place}", edit, BatchInvoke(request.invoke, [request], False), model, shared
                    )
            if each.invoke.program is not None:
                self._add(f"{number}", each.invoke.program, each, model, shared)

    def _add(self, name: str, program: TraceProgram, of: BatchInvoke, model: Any, shared: dict[str, Any]) -> None:
        self.programs[name], self.requests_of[name] = program, of
        self.bodies[name] = Body(name, partial(program.run, model, shared), in_engine=False)
        self.interleaver.add(self.bodies[name])

    @staticmethod
    def _common_params(invokes: Sequence[Invoke]) -> dict[str, Any]:
        params = invokes[0].params
        if any(invoke.params != params for invoke in invokes):
            raise TraceError("On transformers all invokes of a trace need the same sampling parameters.")
        if unknown := set(params) - _SAMPLING - set(FORWARD_ARGUMENTS):
            raise ParameterError(
                f"LanguageModel has no sampling parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(_SAMPLING))}."
            )
        penalty = params.get("repetition_penalty", 1.0)
        if not isinstance(penalty, (int, float)) or not penalty > 0:
            raise ParameterError(f"repetition_penalty is {penalty!r}; allowed: a number above 0.")
        stop = params.get("stop")
        if not isinstance(stop, (str, list, tuple, type(None))) or not all(
            s and isinstance(s, str) for s in _strings(stop)
        ):
            raise ParameterError(f"stop is {stop!r}; allowed: a non-empty string, or a list of them.")
        return params

    def run(self) -> None:
        """Run the requests to their end, and set their results."""
        hook = hooks.before(self.module, self._before_forward, first=True)
        try:
            records = torch.is_grad_enabled() and self._asks_for_gradients()
            with torch.set_grad_enabled(records), _parameters_as_before(self.module, records):
                if self.params["max_tokens"] == 1:
                    self._forward_once()
                else:
                    self._generate()
            for name in list(self.interleaver.bodies):
                self._finish(name)
        finally:
            hook.remove()
            for name in list(self.interleaver.bodies):
                self.interleaver.discard(name)
        for request in self.requests:
            request.output = self._output(request)
        for number, each in enumerate(self.invokes):
            each.result = self._result(str(number), each)

    def _asks_for_gradients(self) -> bool:
        own = {id(parameter) for parameter in self.module.parameters()} if self.programs else ()
        each = {id(program): program for program in self.programs.values()}
        return any(asks_for_gradients(program, own) for program in each.values())

    def _output(self, request: BatchRequest) -> Generated:
        return Generated.of(
            request_id=request.name,
            prompt_token_ids=request.prompt,
            token_ids=request.generated,
            text=self._text(request)[0],
            finish_reason=request.finish_reason or "length",
            stop_reason=request.stop_reason,
            saves={},
            captures=Captured(request.name),
            scores=request.running.scores if request.running is not None else Scores(),
            answers=request.graded if request.invoke.answers else {},
        )

    def _result(self, name: str, each: BatchInvoke) -> InvokeResult:
        own = self.outcomes.get(name)
        edits = [other for edit, other in self.outcomes.items() if edit.startswith(f"{name}#")]
        outcomes = [] if own is None else [own]
        outcomes += [other for other in edits if other.failure is not None]
        output: Any = GeneratedBatch.of([request.output for request in each.requests], self.pad)
        if not each.is_batch:
            (output,) = output.rows
        if name in self.bodies and self.bodies[name].wants_result:
            rows = self._rows(each, self.length, is_prompt=True)
            output.forward_output = {part: _taken(rows, part, value) for part, value in self._forward_output.items()}
        error = put_results([own, *edits] if own is not None else edits, output)
        output.saves = saves_of(own, edits)
        for request in each.requests if each.is_batch and each.invoke.prompt is not None else ():
            request.output.saves = output.saves
        return InvokeResult(outcomes, output, each.requests[0].plan, error, each.requests[0].missing)

    def _finish(self, name: str) -> None:
        body = self.interleaver.finish(name)
        assert body is not None
        self.outcomes[name] = outcome(body, self.programs[name])

    # Steps.

    def _before_forward(self, _: Any, kwargs: dict[str, Any]) -> None:
        if self.interleaver.muted:
            return
        length = kwargs["input_ids"].shape[1]
        is_prompt = length == self.length and not self.requests[0].generated
        for row, request in enumerate(self.requests):
            pad = self.length - len(request.prompt) if is_prompt else 0
            request.rows = BatchRows(row, pad, len(self.requests), length)
        self.plans.begin_step(length)
        rows = {name: self._rows(self.requests_of[name], length, is_prompt) for name in self.interleaver.bodies}
        self.interleaver.begin_step(rows)

    def _rows(self, each: BatchInvoke, length: int, is_prompt: bool) -> BatchRows:
        """The rows of an invoke in a step, without the padding that all of them have."""
        pad = self.length - max(len(request.prompt) for request in each.requests) if is_prompt else 0
        size = len(each.requests) if each.is_batch else None
        return BatchRows(self.requests.index(each.requests[0]), pad, len(self.requests), length, size)

    def _end_step(self, samples: torch.Tensor) -> None:
        self.interleaver.end_step()
        self.plans.end_step()
        for request, token in zip(self.requests, samples.tolist(), strict=True):
            if request.finish_reason is None:
                request.generated.append(token)
                request.finish_reason, request.stop_reason = self._reason(request, token)
        for name, body in list(self.interleaver.bodies.items()):
            each = self.requests_of[name]
            if body.done and body.failure is not None and each.invoke.prompt is not None:
                stopped = isinstance(body.failure, StopTrace)
                for request in each.requests:
                    if request.finish_reason in (None, "length"):
                        request.finish_reason = "stop" if stopped else "length"
                        request.stop_reason = STOPPED if stopped else None
            if all(request.finish_reason is not None for request in each.requests):
                self._finish(name)

    def _reason(self, request: BatchRequest, token: int) -> tuple[str | None, int | str | None]:
        """The finish reason and the stop reason if the request ends with this token; None if it continues."""
        stop = self._text(request)[1] if self.params.get("stop") else None
        if token in self._stop_tokens():
            return "stop", token if token in (self.params.get("stop_token_ids") or ()) else None
        if stop is not None:
            return "stop", stop
        return ("length" if len(request.generated) >= self.params["max_tokens"] else None), None

    def _text(self, request: BatchRequest) -> tuple[str, str | None]:
        """The generated text up to the first complete string of `stop`, and that string, if there is one."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        tokens, before = request.generated, request.prompt[-_CONTEXT:]
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_tokens() else tokens
        text = decode(before + shown)[len(decode(before)) :]
        ends = [(at + len(stop), stop) for stop in _strings(self.params.get("stop")) if (at := text.find(stop)) >= 0]
        if not ends:
            return text, None
        end, stop = min(ends, key=itemgetter(0))
        return text[: end - len(stop)], stop

    def _stop_tokens(self) -> set[int]:
        eos = self.module.generation_config.eos_token_id
        eos = [] if eos is None or self.params.get("ignore_eos") else eos if isinstance(eos, list) else [eos]
        return {*eos, *(self.params.get("stop_token_ids") or ())}

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.module.device
        padded = [(self.length - len(request.prompt), request.prompt) for request in self.requests]
        ids_BS = torch.tensor([[self.pad] * count + prompt for count, prompt in padded], device=device)
        mask_BS = torch.tensor([[0] * count + [1] * len(prompt) for count, prompt in padded], device=device)
        return ids_BS, mask_BS

    def _forward_once(self) -> None:
        """One forward in the caller's gradient mode; transformers' generate would turn gradients off."""
        ids_BS, mask_BS = self._inputs()
        kwargs: dict[str, Any] = {"use_cache": False}
        accepted = inspect.signature(self.module.forward).parameters
        if not mask_BS.all():
            kwargs["attention_mask"] = mask_BS
            if "position_ids" in accepted:
                kwargs["position_ids"] = (mask_BS.cumsum(-1) - 1).clamp(min=0)
        if not self.bodies and "logits_to_keep" in accepted:
            kwargs["logits_to_keep"] = 1  # nothing reads the logits of other tokens
        kwargs |= {name: self.params[name] for name in FORWARD_ARGUMENTS if name in self.params}
        output = self.module(input_ids=ids_BS, **kwargs)
        names = ("logits", "hidden_states", "attentions")
        self._forward_output = {name: part for name in names if (part := getattr(output, name, None)) is not None}
        logits_BV = output.logits[:, -1]
        logits_BV = self.interleaver.fire(("", "logits"), logits_BV)
        self._grade(logits_BV)
        samples_B = self.interleaver.fire(("", "samples"), self._sample(logits_BV.detach()))
        self._end_step(samples_B)

    def _grade(self, logits_BV: torch.Tensor) -> None:
        """Grade the answers by the logits of the first generated tokens."""
        for request, logits_V in zip(self.requests, logits_BV, strict=True):
            if request.graded is None and request.invoke.answers:
                logprobs_V = logits_V.detach().float().log_softmax(-1)
                request.graded, request.missing = request.invoke.answers.graded(logprobs_V.__getitem__)

    def _sample(self, logits_BV: torch.Tensor) -> torch.Tensor:
        from transformers import LogitsProcessorList

        settings = self._generation_settings()
        logits_BV = self._penalized(logits_BV)
        if not settings["do_sample"]:
            return logits_BV.argmax(-1)
        config = self.module.generation_config
        prepared = type(config)(**{**config.to_dict(), **settings})
        processors: LogitsProcessorList = self.module._get_logits_processor(
            prepared, input_ids_seq_length=self.length, encoder_input_ids=None, prefix_allowed_tokens_fn=None,
            logits_processor=LogitsProcessorList(), device=logits_BV.device,
        )  # fmt: skip
        scores = processors(self._inputs()[0], logits_BV.float())
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]

    def _penalized(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Lower the logits of each request's own tokens, as `repetition_penalty` says. As on vLLM, traces see the logits before this."""
        penalty = self.params.get("repetition_penalty")
        if penalty is None or penalty == 1.0:
            return logits_BV
        scores_BV = logits_BV.float().clone()
        for request, scores_V in zip(self.requests, scores_BV, strict=True):
            tokens = torch.tensor([*{*request.prompt, *request.generated}], device=scores_BV.device)
            there = scores_V[tokens]
            scores_V[tokens] = torch.where(there < 0, there * penalty, there / penalty)
        return scores_BV

    def _generation_settings(self) -> dict[str, Any]:
        params = self.params
        temperature = params.get("temperature", 1.0)
        if params.get("seed") is not None:
            torch.manual_seed(params["seed"])
        settings: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": params["max_tokens"]}
        settings["repetition_penalty"] = 1.0  # see `_penalized`
        if temperature > 0:
            top_p, top_k = params.get("top_p", 1.0), max(params.get("top_k", 0), 0)
            settings |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        settings |= {k: params[k] for k in _FOR_GENERATE if k in params}
        return settings

    def _generate(self) -> None:
        """Generate with transformers; a logits processor and a stopping criterion give bodies the logits and samples."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        ids_BS, mask_BS = self._inputs()

        def on_logits(_: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
            scores_BV = self.interleaver.fire(("", "logits"), scores_BV)
            self._grade(scores_BV)
            return self._penalized(scores_BV)

        def on_samples(so_far_BS: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            sampled_B = so_far_BS[:, -1]
            so_far_BS[:, -1] = self.interleaver.fire(("", "samples"), sampled_B)
            self._end_step(so_far_BS[:, -1])
            ended = [request.finish_reason is not None for request in self.requests]
            return torch.tensor(ended, device=so_far_BS.device)

        eos = self.module.generation_config.eos_token_id
        with caches_known(self.module):
            self.module.generate(
                ids_BS,
                attention_mask=mask_BS,
                logits_processor=LogitsProcessorList([on_logits]),
                stopping_criteria=StoppingCriteriaList([on_samples]),
                pad_token_id=self.pad,
                eos_token_id=None if self.params.get("ignore_eos") else eos,
                **self._generation_settings(),
            )


def _taken(rows: BatchRows, name: str, value: Any) -> Any:
    """An invoke's part of `value`, which the model returned under `name` for the whole batch."""
    if isinstance(value, tuple):
        return tuple(_taken(rows, name, each) for each in value)
    if name != "attentions":
        return rows.take(value)
    return replace(rows, pad=0).take(value)[..., rows.pad :, rows.pad :]


@contextlib.contextmanager
def _parameters_as_before(module: Any, records: bool) -> Iterator[None]:
    """Leave no new gradients on the model's parameters, unless the model is being trained: it is in training mode, only some of
    its parameters require gradients, or a parameter had a gradient before.
    """
    parameters = list(module.parameters()) if records else []
    is_trained = module.training or len({each.requires_grad for each in parameters}) > 1
    new = [] if is_trained else [each for each in parameters if each.grad is None]
    try:
        yield
    finally:
        for each in new:
            each.grad = None


def _strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()


# Plans.


class RunningPlan:
    """One request's plan in the tables of its batch, and the rows that it captures.

    Attributes:
        not_finite: the first position and site that an edit made infinite or NaN.
        knockouts: the attention edges that the plan cuts; None for none.

    Raises:
        PlanError: a recorded run is gone.
    """

    def __init__(
        self,
        request: BatchRequest,
        arch: Architecture,
        vectors: Mapping[str, Any],
        runs: RunStore,
        sinks: Sinks,
        dtype: torch.dtype,
    ) -> None:
        assert request.plan is not None
        plan = self._plan = request.plan
        self._compiled = compile_plan(
            plan.plan,
            len(plan.prompt),
            arch.num_layers,
            width=lambda site, layer: arch.widths[site, layer],
            vector=lambda named: vectors[named.name].data,
            run=runs.row,
            dtype=plan.facts.dtype,
            head_dims=plan.facts.head_dims,
        )
        self.knockouts = self._compiled.knockouts
        self._scores = RequestScores(plan.plan, len(plan.prompt)) if plan.plan.probes else None
        self._chunks: list[ScoreChunk] = []
        self._capture = plan.capture(request.name, sinks, request.invoke.collected)
        self._captured: list[Rows] = []  # in the running step
        self._dtype = dtype
        self.not_finite: NotFinite | None = None

    def load(self, tables: TorchTables) -> frozenset[Point]:
        """Load the plan into the tables of the batch. Returns the points at which it acts. Raises PlanError as `TorchTables.load` does."""
        self._numbers = tables.load(self._compiled).ids
        return frozenset[Point]().union(*(profile.points for profile in self._compiled.profiles))

    def begin_step(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next forward computes `count` positions from `first` on.

        Returns:
            For each position: int32 `[count]`, its profile's number in the tables; int64 `[count]`, the address to write its captured row
            to; and int64 `[count]`, the address to write its scores to. 0 stands for no address.
        """
        compiled, length = self._compiled, len(self._compiled.prompt)
        positions = np.arange(first, first + count)
        profiles = np.where(positions < length, compiled.prompt[np.minimum(positions, length - 1)], compiled.generated)
        places = np.zeros(count, np.int64)
        self._step = StepScores(torch.device("cpu"), self._dtype)
        for number in np.unique(profiles):
            profile, rows = compiled.profiles[number], np.flatnonzero(profiles == number)
            if profile.row_width:
                block = torch.empty(len(rows), profile.row_width, dtype=self._dtype)
                places[rows] = block.data_ptr() + np.arange(len(rows)) * block.stride(0) * block.element_size()
                self._captured.append(Rows(rows + first, profile.planes, block))
            if profile.score_width:
                self._step.add("", rows.tolist(), (rows + first).tolist(), profile)
        return self._numbers[profiles], places, self._step.place(count) if self._step else np.zeros(count, np.int64)

    def end_step(self) -> str | None:
        """The forward has written the rows of its step. Returns the `stop_reason` if a probe ends the request before the next token."""
        self._capture.add(self._captured)
        self._captured = []
        if self._scores is None or not self._step:
            return None
        self._step.copy()
        chunks, stop = self._scores.take(self._step.read()[""])
        self._chunks += chunks
        return stop.reason if stop is not None else None

    @property
    def scores(self) -> Scores:
        """What the probes have found."""
        return Scores(self._plan.plan.probes, self._chunks)

    def end(self, generated: int) -> None:
        """The request has ended, with `generated` generated tokens."""
        self._capture.end(self._stop(generated))

    def _stop(self, generated: int) -> int:
        end = self._scores.end if self._scores is not None else None
        return len(self._plan.prompt) + generated - 1 if end is None else end + 1

    def result(self, generated: int) -> Captured:
        """The output's captures. Raises CaptureError, or NotFiniteError if an edit made activations infinite or NaN."""
        if self.not_finite is not None:
            self.discard()
            raise NotFiniteError(not_finite(self.not_finite, self._plan.plan, self._plan.facts.dtype))
        return self._capture.result(self._stop(generated))

    def discard(self) -> None:
        """Drop the captured rows, unless `result` has returned them."""
        self._capture.discard()


class BatchPlans:
    """The plans of a batch. In the block of a with-statement, their hooks are on the model, ahead of the hooks of traces that begin later.

    Args:
        requests: all of the batch, with their plans in `running`.
    """

    def __init__(self, model: Any, arch: Architecture, requests: Sequence[BatchRequest]) -> None:
        self._requests = requests
        self._tables = TorchTables(points_of(arch), model.device, model.dtype)
        self._hooks = PointHooks(model, arch, (), self._tables, model.dtype)
        self._model, self._arch = model, arch
        self._length = 0  # of the running step
        self._is_running = False  # whether a step is running

    def _attention(self, layer: int) -> Heads:
        """The child of a layer's attention that its queries, keys and values pass through."""
        found = self._model.get_submodule(self._arch.bindings["attn_q", layer].path)
        assert isinstance(found, Heads)
        return found

    def __enter__(self) -> BatchPlans:
        running = [request.running for request in self._requests if request.running is not None]
        self._points = frozenset[Point]().union(*(plan.load(self._tables) for plan in running))
        self._hooks.need(self._points)
        cuts = [plan.knockouts for plan in running if plan.knockouts is not None]
        self._cut_layers = {layer for knockouts in cuts for layer in knockouts.layers}
        for layer in self._cut_layers:
            self._attention(layer).cut = partial(self._cut, layer)
            set_cut(self._attention(layer), partial(self._is_cut, layer))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.release(self._points)
        for layer in self._cut_layers:
            self._attention(layer).cut = None
            set_cut(self._attention(layer), None)

    def _is_cut(self, layer: int, rows: BatchRows) -> bool:
        running = (request.running for request in self._requests[rows.index : rows.index + (rows.size or 1)])
        cuts = (each.knockouts for each in running if each is not None)
        return any(knockouts is not None and layer in knockouts.layers for knockouts in cuts)

    def _cut(
        self,
        layer: int,
        settings: AttentionSettings,
        q_BNTD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSE: torch.Tensor,
        z_BTNE: torch.Tensor,
    ) -> torch.Tensor:
        """The outputs of a layer's attention without the edges that plans cut."""
        if not self._is_running or hooks.is_in_body():
            return z_BTNE
        keys = k_BKSD.shape[2]
        for row, request in enumerate(self._requests):
            knockouts = request.running.knockouts if request.running is not None else None
            if knockouts is None or request.finish_reason is not None:
                continue
            pad, first = request.rows.pad, request.computed
            count = self._length - pad  # tokens of this step
            # A sliding cache has only the last keys. Others begin with padding.
            seen = min(first + count, keys)
            mask = settings.mask
            if mask is not None and mask.ndim == 4:
                mask = mask[min(row, len(mask) - 1), :, pad:, keys - seen : keys]
            again = attend_again(
                settings,
                knockouts,
                layer,
                q_BNTD[row, :, pad:].transpose(0, 1),
                k_BKSD[row, :, keys - seen :].transpose(0, 1),
                v_BKSE[row, :, keys - seen :].transpose(0, 1),
                z_BTNE[row, pad:],
                first=first,
                first_key=first + count - seen,
                mask=mask if mask is not None and mask.ndim == 3 else None,
            )
            if again is not None:
                z_BTNE = z_BTNE.clone()
                z_BTNE[row, pad + again[0]] = again[1]
        return z_BTNE

    def begin_step(self, length: int) -> None:
        """The next forward computes `length` columns of the padded batch."""
        count = len(self._requests) * length
        profile_T, place_T, score_T = (np.zeros(count, dtype) for dtype in (np.int32, np.int64, np.int64))
        self._length = length
        for row, request in enumerate(self._requests):
            if request.running is None or request.finish_reason is not None:
                continue
            start, stop = row * length + request.rows.pad, (row + 1) * length
            step = request.running.begin_step(request.computed, stop - start)
            profile_T[start:stop], place_T[start:stop], score_T[start:stop] = step
        self._tables.begin_step(RowProfiles(profile_T), place_T, score_T)
        self._hooks.on = bool(profile_T.any())
        self._is_running = True

    def end_step(self) -> None:
        """The forward has ended."""
        self._hooks.on = self._is_running = False
        for row, point in self._tables.overflow.items():
            number, column = divmod(row, self._length)
            request = self._requests[number]
            if request.running is not None and request.running.not_finite is None:
                position = request.computed + column - request.rows.pad
                request.running.not_finite = NotFinite(position, self._tables.points[point])
        for request in self._requests:
            if request.running is not None and request.finish_reason is None:
                reason = request.running.end_step()
                if reason is not None:
                    request.finish_reason, request.stop_reason = "stop", reason
