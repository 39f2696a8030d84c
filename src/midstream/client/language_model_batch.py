"""One batch of requests on a transformers model: its steps, and the traces and plans that run on it.

Shape suffixes: B requests, S positions of the padded batch, V the vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from midstream import hooks
from midstream.capture.rows import Captured
from midstream.client.language_model_plans import PlanHooks
from midstream.client.requests import Answers, Invoke, InvokeResult, encode
from midstream.errors import ParameterError, TraceError
from midstream.trace.interleaver import Interleaver
from midstream.trace.program import Outcome, Program, make_body, outcome
from midstream.trace.rows import BatchRows
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects

_SAMPLING = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "stop",
    "stop_token_ids",
}
_CONTEXT = 6  # tokens of the prompt to decode generated tokens with: a token's text may depend on those before it


@dataclass
class Generated:
    """The output of `LanguageModel` for one prompt.

    Attributes:
        request_id: the request's id in a directory of captures.
        prompt_token_ids, token_ids: the prompt's tokens and the generated ones.
        text: the generated tokens as text, without special tokens, up to the first of the strings in `stop`.
        finish_reason: "stop" at such a string or an end-of-text token, else "length", also if the trace ended the request.
        saves: the trace's saved values, by name.
        captures: the rows that the plan captured.
        answers: the log-probability of each answer, in nats.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    saves: dict[str, Any]
    captures: Captured | None
    answers: dict[str | int, float] | None

    @property
    def outputs(self) -> list[Generated]:
        """The only sample, as in vLLM's outputs: `output.outputs[0].text`."""
        return [self]


def _strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()


class PaddedBatch:
    """One left-padded batch, and the bodies and plans that run on it.

    Args:
        model: what the bodies know as the model.
        module: the transformers model.
        interleaver: runs the bodies.
        edits: the model's standing edits, by name.
        plans: the requests' plans.
        names: the requests' ids.
    """

    def __init__(
        self,
        model: Any,
        module: Any,
        tokenizer: Any,
        interleaver: Interleaver,
        edits: Mapping[str, Program],
        invokes: list[Invoke],
        plans: PlanHooks,
        names: Sequence[str],
    ) -> None:
        self.module, self.tokenizer, self.interleaver = module, tokenizer, interleaver
        self.names = names
        self.prompts = [encode(invoke.prompt, lambda: tokenizer) for invoke in invokes]
        self.plans = plans
        self.params = self._common_params(invokes)
        self.length = max(map(len, self.prompts))
        self.programs: dict[str, Program] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.rows_of: dict[str, int] = {}
        self.generated: list[list[int]] = [[] for _ in invokes]
        self.finish_reasons: list[str | None] = [None] * len(invokes)
        self.answers = [invoke.answers for invoke in invokes]
        self.graded: list[dict[str | int, float] | None] = [None if each else {} for each in self.answers]
        shared: dict[str, Any] = {}
        for row, invoke in enumerate(invokes):
            own = {f"{row}": invoke.program} if invoke.program is not None else {}
            for name, program in {**{f"{row}#{n}": e for n, e in edits.items()}, **own}.items():
                self.programs[name], self.rows_of[name] = program, row
                interleaver.add(make_body(name, program, model, shared, snapshots=False, journals=False))

    @staticmethod
    def _common_params(invokes: list[Invoke]) -> dict[str, Any]:
        params = invokes[0].params
        if any(invoke.params != params for invoke in invokes):
            raise TraceError("On transformers all invokes of a trace need the same sampling parameters.")
        if unknown := set(params) - _SAMPLING:
            raise ParameterError(
                f"LanguageModel has no sampling parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(_SAMPLING))}."
            )
        stop = params.get("stop")
        if not isinstance(stop, (str, list, tuple, type(None))) or not all(
            s and isinstance(s, str) for s in _strings(stop)
        ):
            raise ParameterError(f"stop is {stop!r}; allowed: a non-empty string, or a list of them.")
        return params

    def run(self) -> list[InvokeResult]:
        try:
            with self._step_hook():
                if self.params["max_tokens"] == 1:
                    self._forward_once()
                else:
                    self._generate()
            for name in list(self.interleaver.bodies):
                self._finish(name)
        finally:
            for name in list(self.interleaver.bodies):
                self.interleaver.discard(name)
        return [self._result(row) for row in range(len(self.prompts))]

    def _result(self, row: int) -> InvokeResult:
        own = self.outcomes.get(str(row))
        failed = [
            o
            for name, o in self.outcomes.items()
            if self.rows_of[name] == row and o.failure is not None and o is not own
        ]
        outcomes = ([own] if own is not None else []) + failed
        tokens = self.generated[row]
        name, (text, _) = self.names[row], self._text(row)
        reason = self.finish_reasons[row] or "length"
        output = Generated(name, self.prompts[row], tokens, text, reason, {}, Captured.nothing(name), self.graded[row])
        for each in outcomes:
            each.values = map_objects(each.values, Result, lambda _: output)
        output.saves = own.values if own is not None else {}
        return InvokeResult(outcomes, output)

    def _finish(self, name: str) -> None:
        body = self.interleaver.finish(name)
        assert body is not None
        self.outcomes[name] = outcome(body, self.programs[name])
        self.outcomes[name].order = len(self.outcomes)

    # Steps.

    @contextmanager
    def _step_hook(self) -> Iterator[None]:
        def begin(_: Any, kwargs: dict[str, Any]) -> None:
            if not self.interleaver.muted:
                self._begin_step(kwargs["input_ids"].shape[1])

        handle = hooks.before(self.module, begin, first=True)
        try:
            yield
        finally:
            handle.remove()

    def _begin_step(self, length: int) -> None:
        rows: list[BatchRows] = []
        first: list[int] = []
        for prompt, generated in zip(self.prompts, self.generated, strict=True):
            is_prompt = length == self.length and not generated
            rows.append(BatchRows(len(rows), self.length - len(prompt) if is_prompt else 0, len(self.prompts), length))
            first.append(0 if is_prompt else len(prompt) + len(generated) - 1)
        self.plans.begin_step(rows, first)
        self.interleaver.begin_step({name: rows[self.rows_of[name]] for name in self.interleaver.bodies})

    def _end_step(self, samples: torch.Tensor) -> None:
        self.interleaver.end_step()
        for row, token in enumerate(samples.tolist()):
            if self.finish_reasons[row] is None:
                self.generated[row].append(token)
                self.finish_reasons[row] = self._reason(row, token)
        for name, body in list(self.interleaver.bodies.items()):
            if body.done and body.failure is not None:
                self.finish_reasons[self.rows_of[name]] = self.finish_reasons[self.rows_of[name]] or "length"
            if self.finish_reasons[self.rows_of[name]] is not None:
                self._finish(name)
        for row, planned in self.plans.rows.items():
            planned.has_ended = self.finish_reasons[row] is not None

    def _reason(self, row: int, token: int) -> str | None:
        """Why the request ends with this token; None if it continues."""
        if token in self._stop_tokens() or (self.params.get("stop") and self._text(row)[1]):
            return "stop"
        return "length" if len(self.generated[row]) >= self.params["max_tokens"] else None

    def _text(self, row: int) -> tuple[str, bool]:
        """The generated text up to the first complete string of `stop`, and whether there is one."""
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        tokens, before = self.generated[row], self.prompts[row][-_CONTEXT:]
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_tokens() else tokens
        text = decode(before + shown)[len(decode(before)) :]
        ends = [(at + len(stop), at) for stop in _strings(self.params.get("stop")) if (at := text.find(stop)) >= 0]
        return (text[: min(ends, key=itemgetter(0))[1]], True) if ends else (text, False)

    def _stop_tokens(self) -> set[int]:
        eos = self.module.generation_config.eos_token_id
        eos = [] if eos is None or self.params.get("ignore_eos") else eos if isinstance(eos, list) else [eos]
        return {*eos, *(self.params.get("stop_token_ids") or ())}

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.module.device
        pad = self.tokenizer.pad_token_id or 0
        ids_BS = torch.tensor([[pad] * (self.length - len(p)) + p for p in self.prompts], device=device)
        mask_BS = torch.tensor([[0] * (self.length - len(p)) + [1] * len(p) for p in self.prompts], device=device)
        return ids_BS, mask_BS

    def _forward_once(self) -> None:
        """One forward in the caller's gradient mode; transformers' generate would turn gradients off."""
        ids_BS, mask_BS = self._inputs()
        kwargs: dict[str, Any] = {}
        if any(len(p) < self.length for p in self.prompts):
            kwargs = {"attention_mask": mask_BS, **self._positions(mask_BS)}
        logits_BV = self.module(input_ids=ids_BS, use_cache=False, **kwargs).logits[:, -1]
        logits_BV = self.interleaver.fire(("", "logits"), logits_BV)
        self._grade(logits_BV)
        samples_B = self.interleaver.fire(("", "samples"), self._sample(logits_BV.detach()))
        self._end_step(samples_B)

    def _grade(self, logits_BV: torch.Tensor) -> None:
        """Grade the answers by the logits of the first generated tokens."""
        for row, answers in enumerate(self.answers):
            if self.graded[row] is None:
                self.graded[row] = _log_probabilities(logits_BV[row], answers)

    def _positions(self, mask_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        if "position_ids" not in inspect.signature(self.module.forward).parameters:
            return {}
        return {"position_ids": (mask_BS.cumsum(-1) - 1).clamp(min=0)}

    def _sample(self, logits_BV: torch.Tensor) -> torch.Tensor:
        from transformers import LogitsProcessorList

        settings = self._generation_settings()
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

    def _generation_settings(self) -> dict[str, Any]:
        params = self.params
        temperature = params.get("temperature", 1.0)
        if params.get("seed") is not None:
            torch.manual_seed(params["seed"])
        settings: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": params["max_tokens"]}
        if temperature > 0:
            settings |= {
                "temperature": temperature,
                "top_p": params.get("top_p", 1.0),
                "top_k": max(params.get("top_k", 0), 0),
            }
        settings |= {k: params[k] for k in ("min_p", "repetition_penalty") if k in params}
        return settings

    def _generate(self) -> None:
        """Generate with transformers; a logits processor and a stopping criterion give bodies the logits and samples."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        ids_BS, mask_BS = self._inputs()

        def on_logits(_: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
            scores_BV = self.interleaver.fire(("", "logits"), scores_BV)
            self._grade(scores_BV)
            return scores_BV

        def on_samples(so_far_BS: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            sampled_B = so_far_BS[:, -1]
            so_far_BS[:, -1] = self.interleaver.fire(("", "samples"), sampled_B)
            self._end_step(so_far_BS[:, -1])
            return torch.tensor([reason is not None for reason in self.finish_reasons], device=so_far_BS.device)

        eos = self.module.generation_config.eos_token_id
        self.module.generate(
            ids_BS,
            attention_mask=mask_BS,
            logits_processor=LogitsProcessorList([on_logits]),
            stopping_criteria=StoppingCriteriaList([on_samples]),
            pad_token_id=self.tokenizer.pad_token_id or 0,
            eos_token_id=None if self.params.get("ignore_eos") else eos,
            **self._generation_settings(),
        )


def _log_probabilities(logits_V: torch.Tensor, answers: Answers) -> dict[str | int, float]:
    logprobs_V = logits_V.detach().float().log_softmax(-1)
    return {answer: float(logprobs_V[token]) for answer, token in answers.items()}
