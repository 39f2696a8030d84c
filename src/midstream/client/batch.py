"""One batch of requests on a transformers model: its steps, and the traces and plans on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from midstream import hooks
from midstream.capture.segment import Captured
from midstream.client.answers import Answer, graded_logits
from midstream.client.capturing import nothing_captured
from midstream.client.prompts import encode
from midstream.client.reference import PlanHooks
from midstream.client.tracer import Invoke, Ran
from midstream.errors import ParameterError, TraceError
from midstream.trace.body import Body
from midstream.trace.program import Outcome, Program, make_body, outcome
from midstream.trace.rows import BatchRows
from midstream.trace.tracer import Result
from midstream.trace.tree import map_objects

if TYPE_CHECKING:
    from midstream.client.language_model import LanguageModel

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


_CONTEXT = 6  # tokens of the prompt: what a token's text is may hang on those before it


@dataclass
class Generated:
    """What `LanguageModel` gives for one prompt.

    Attributes:
        request_id: by which a directory of captures has it.
        prompt_token_ids, token_ids: the prompt's tokens and the generated ones.
        text: the generated tokens as text, without special ones and the one that ended it, up to the first of the strings in `stop`.
        finish_reason: "stop", at such a string or a token that ends a text, or "length", also where the trace ended it.
        saves: the trace's saved values, by name.
        captures: what the plan captured.
        answers: the log-probability of each answer that was asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    saves: dict[str, Any]
    captures: Captured | None
    answers: dict[Answer, float] | None

    @property
    def outputs(self) -> list[Generated]:
        """This generation where vLLM's outputs have it: `output.outputs[0].text`."""
        return [self]


def _strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()


class Batch:
    """One left-padded batch, and the bodies and plans that run on it."""

    def __init__(self, model: LanguageModel, invokes: list[Invoke], plans: PlanHooks, names: Sequence[str]) -> None:
        self.model = model
        self.names = names
        self.interleaver = model._interleaver
        self.prompts = [encode(invoke.prompt, lambda: model.tokenizer) for invoke in invokes]
        self.plans = plans
        self.params = self._common_params(invokes)
        self.length = max(map(len, self.prompts))
        self.programs: dict[str, Program] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.rows_of: dict[str, int] = {}
        self.generated: list[list[int]] = [[] for _ in invokes]
        self.ended: list[str | None] = [None] * len(invokes)  # why, in vLLM's words
        self.answers = [invoke.answers for invoke in invokes]
        self.graded: list[dict[Answer, float] | None] = [None if each else {} for each in self.answers]
        shared: dict[str, Any] = {}
        for row, invoke in enumerate(invokes):
            own = {f"{row}": invoke.program} if invoke.program is not None else {}
            for name, program in {**{f"{row}#{n}": e for n, e in model.edits.items()}, **own}.items():
                self.programs[name], self.rows_of[name] = program, row
                self._add(make_body(name, program, model, shared, snapshots=False, journals=False))

    def _add(self, body: Body) -> None:
        self.interleaver.add(body)

    @staticmethod
    def _common_params(invokes: list[Invoke]) -> dict[str, Any]:
        params = invokes[0].params
        if any(invoke.params != params for invoke in invokes):
            raise TraceError("On transformers all invokes of a trace have the same sampling parameters.")
        if unknown := set(params) - _SAMPLING:
            raise ParameterError(
                f"LanguageModel has no sampling parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(_SAMPLING))}."
            )
        stop = params.get("stop")
        if not isinstance(stop, (str, list, tuple, type(None))) or not all(
            s and isinstance(s, str) for s in _strings(stop)
        ):
            raise ParameterError(f"stop is {stop!r}; allowed: a string that is not empty, or a list of such.")
        return params

    def run(self) -> list[Ran]:
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
        return [self._ran(row) for row in range(len(self.prompts))]

    def _ran(self, row: int) -> Ran:
        own = self.outcomes.get(str(row))
        failed = [
            o
            for name, o in self.outcomes.items()
            if self.rows_of[name] == row and o.failure is not None and o is not own
        ]
        outcomes = ([own] if own is not None else []) + failed
        tokens = self.generated[row]
        name, (text, _) = self.names[row], self._text(row)
        reason = self.ended[row] or "length"
        output = Generated(name, self.prompts[row], tokens, text, reason, {}, nothing_captured(name), self.graded[row])
        for each in outcomes:
            each.values = map_objects(each.values, Result, lambda _: output)
        output.saves = own.values if own is not None else {}
        return Ran(outcomes, output)

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

        handle = hooks.before(self.model.module, begin, first=True)
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
            if self.ended[row] is None:
                self.generated[row].append(token)
                self.ended[row] = self._reason(row, token)
        for name, body in list(self.interleaver.bodies.items()):
            if body.done and self._ends_request(body):
                self.ended[self.rows_of[name]] = self.ended[self.rows_of[name]] or "length"
            if self.ended[self.rows_of[name]] is not None:
                self._finish(name)
        for row, planned in self.plans.rows.items():
            planned.is_over = self.ended[row] is not None

    @staticmethod
    def _ends_request(body: Body) -> bool:
        return body.failure is not None

    def _reason(self, row: int, token: int) -> str | None:
        """Why the request ends with this token; None if it goes on."""
        if token in self._stop_tokens() or (self.params.get("stop") and self._text(row)[1]):
            return "stop"
        return "length" if len(self.generated[row]) >= self.params["max_tokens"] else None

    def _text(self, row: int) -> tuple[str, bool]:
        """What was generated, up to the string in `stop` that is complete first; whether there is one."""
        decode = functools.partial(self.model.tokenizer.decode, skip_special_tokens=True)
        tokens, before = self.generated[row], self.prompts[row][-_CONTEXT:]
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_tokens() else tokens
        text = decode(before + shown)[len(decode(before)) :]
        ends = [(at + len(stop), at) for stop in _strings(self.params.get("stop")) if (at := text.find(stop)) >= 0]
        return (text[: min(ends, key=itemgetter(0))[1]], True) if ends else (text, False)

    def _stop_tokens(self) -> set[int]:
        eos = self.model.module.generation_config.eos_token_id
        eos = [] if eos is None or self.params.get("ignore_eos") else eos if isinstance(eos, list) else [eos]
        return {*eos, *(self.params.get("stop_token_ids") or ())}

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.model.module.device
        pad = self.model.tokenizer.pad_token_id or 0
        ids_BS = torch.tensor([[pad] * (self.length - len(p)) + p for p in self.prompts], device=device)
        mask_BS = torch.tensor([[0] * (self.length - len(p)) + [1] * len(p) for p in self.prompts], device=device)
        return ids_BS, mask_BS

    def _forward_once(self) -> None:
        """One forward in torch's own gradient mode; transformers' generate would turn gradients off."""
        ids_BS, mask_BS = self._inputs()
        kwargs: dict[str, Any] = {}
        if any(len(p) < self.length for p in self.prompts):
            kwargs = {"attention_mask": mask_BS, **self._positions(mask_BS)}
        logits_BV = self.model.module(input_ids=ids_BS, use_cache=False, **kwargs).logits[:, -1]
        logits_BV = self.interleaver.fire(("", "logits"), logits_BV)
        self._grade(logits_BV)
        samples_B = self.interleaver.fire(("", "samples"), self._sample(logits_BV.detach()))
        self._end_step(samples_B)

    def _grade(self, logits_BV: torch.Tensor) -> None:
        """Grade the answers to prompts whose first token comes from these logits."""
        for row, answers in enumerate(self.answers):
            if self.graded[row] is None:
                self.graded[row] = graded_logits(logits_BV[row], answers)

    def _positions(self, mask_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        import inspect

        if "position_ids" not in inspect.signature(self.model.module.forward).parameters:
            return {}
        return {"position_ids": (mask_BS.cumsum(-1) - 1).clamp(min=0)}

    def _sample(self, logits_BV: torch.Tensor) -> torch.Tensor:
        from transformers import LogitsProcessorList

        settings = self._generation_settings()
        if not settings["do_sample"]:
            return logits_BV.argmax(-1)
        config = self.model.module.generation_config
        prepared = type(config)(**{**config.to_dict(), **settings})
        processors: LogitsProcessorList = self.model.module._get_logits_processor(
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
        """Generation by transformers itself; logits and samples are seen through its processor and its stopping hook."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        ids_BS, mask_BS = self._inputs()

        def see_logits(_: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
            scores_BV = self.interleaver.fire(("", "logits"), scores_BV)
            self._grade(scores_BV)
            return scores_BV

        def see_samples(so_far_BS: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            sampled_B = so_far_BS[:, -1]
            so_far_BS[:, -1] = self.interleaver.fire(("", "samples"), sampled_B)
            self._end_step(so_far_BS[:, -1])
            return torch.tensor([reason is not None for reason in self.ended], device=so_far_BS.device)

        eos = self.model.module.generation_config.eos_token_id
        self.model.module.generate(
            ids_BS,
            attention_mask=mask_BS,
            logits_processor=LogitsProcessorList([see_logits]),
            stopping_criteria=StoppingCriteriaList([see_samples]),
            pad_token_id=self.model.tokenizer.pad_token_id or 0,
            eos_token_id=None if self.params.get("ignore_eos") else eos,
            **self._generation_settings(),
        )
