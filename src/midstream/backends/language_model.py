"""`LanguageModel`: traces on a transformers model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from midstream.arch import detect
from midstream.backends.model import TraceModel
from midstream.backends.tracer import Invoke, Prompt, Ran
from midstream.errors import PromptError, TraceError
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.body import Body
from midstream.trace.envoy import ModelEnvoy
from midstream.trace.interleaver import Interleaver
from midstream.trace.program import Outcome, Program, make_body, outcome
from midstream.trace.rows import BatchRows
from midstream.trace.show import show_tree
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
    "stop_token_ids",
}


@dataclass
class Generated:
    """What `LanguageModel` gives for one prompt.

    Attributes:
        prompt_token_ids, token_ids: the prompt's tokens and the generated ones.
        text: the generated tokens as text.
        saves: the trace's saved values, by name.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    saves: dict[str, Any]


@dataclass
class _Done:
    ran: list[Ran]

    def wait(self) -> list[Ran]:
        return self.ran


class LanguageModel(TraceModel):
    """A transformers causal language model with traces, in this process.

        model = LanguageModel("gpt2")
        with model.trace("The Eiffel Tower is in"):
            h = model.layers_output[8].save()         # [tokens, hidden]

    Several invokes are one left-padded batch; each sees its own tokens alone. Gradients are recorded as torch is set at
    the call, so `with loss.backward():` works, and `torch.no_grad()` around a trace makes it cheaper.

    Args:
        model: a path or name for `AutoModelForCausalLM`, or a model.
        tokenizer: a tokenizer, or a path or name; that of `model` if None.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        device: where to run.
        kwargs: for `from_pretrained`, `dtype` for example.
    """

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: Any = None,
        *,
        rename: Mapping[str, str] | None = None,
        device: str | torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        module: Any = AutoModelForCausalLM.from_pretrained(model, **kwargs) if isinstance(model, str) else model
        module = (module.to(device) if device is not None else module).eval()
        name = tokenizer if isinstance(tokenizer, str) else model if isinstance(model, str) else None
        self.module: Any = module
        self.tokenizer = (
            AutoTokenizer.from_pretrained(name) if tokenizer is None or isinstance(tokenizer, str) else tokenizer
        )
        self.edits = {}
        config = module.config.get_text_config()
        self.arch = detect(
            module,
            self._probe,
            num_heads=getattr(config, "num_attention_heads", None),
            head_dim=getattr(config, "head_dim", None),
            rename=rename,
        )
        self._interleaver = Interleaver(module, self.arch.order)
        self._envoy = ModelEnvoy(module, self.arch, self._interleaver, self._unembed, lambda: self.tokenizer)

    def _probe(self) -> None:
        with torch.no_grad():
            self.module(input_ids=torch.tensor([[0, 1, 2]], device=self.module.device), use_cache=False)

    def _unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        norm = self.module.get_submodule(self.arch.parts["final_norm"])
        head = self.module.get_output_embeddings()
        config = self.module.config.get_text_config()
        logits = head(norm(hidden.to(head.weight.dtype)))
        logits = (
            logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        )
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    # The model's tree and accessors: in a trace they are the running forward's.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_envoy" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._envoy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        settable = name in ACCESSORS or name in LAYER_SITES or isinstance(getattr(ModelEnvoy, name, None), property)
        if settable and name != "tokenizer" and "_envoy" in self.__dict__:
            setattr(self._envoy, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return show_tree(self._interleaver.modules, self.arch.shapes, self.arch.sites)

    # Running.

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, Mapping):
            ids = prompt["input_ids"] if "input_ids" in prompt else prompt["prompt_token_ids"]
        else:
            ids = prompt
        ids = torch.as_tensor(ids)
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or not ids.numel():
            raise PromptError(f"A prompt is a text or one sequence of at least one token id; {prompt!r} was given.")
        return ids.long().tolist()

    def _start(self, invokes: list[Invoke], together: bool) -> _Done:
        batch = _Batch(self, invokes)
        return _Done(batch.run())

    def _outputs(self, prompts: list[Prompt], params: dict[str, Any] | list[dict[str, Any]]) -> list[Generated]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        done = self._start([Invoke(p, None, q) for p, q in zip(prompts, each, strict=True)], False)
        return [ran.output for ran in done.ran]


class _Batch:
    """One left-padded batch and the bodies that run on it."""

    def __init__(self, model: LanguageModel, invokes: list[Invoke]) -> None:
        self.model = model
        self.interleaver = model._interleaver
        self.prompts = [model._encode(invoke.prompt) for invoke in invokes]
        self.params = self._common_params(invokes)
        self.length = max(map(len, self.prompts))
        self.programs: dict[str, Program] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.rows_of: dict[str, int] = {}
        self.generated: list[list[int]] = [[] for _ in invokes]
        self.over = [False] * len(invokes)
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
            raise TraceError(
                f"LanguageModel has no sampling parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(_SAMPLING))}."
            )
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
        output = Generated(self.prompts[row], tokens, self.model.tokenizer.decode(tokens), {})
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
        def begin(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
            if not self.interleaver.muted:
                self._begin_step(kwargs["input_ids"].shape[1])

        handle = self.model.module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _begin_step(self, length: int) -> None:
        rows = {}
        for name in self.interleaver.bodies:
            row = self.rows_of[name]
            pad = self.length - len(self.prompts[row]) if length == self.length and not self.generated[row] else 0
            rows[name] = BatchRows(row, pad, len(self.prompts), length)
        self.interleaver.begin_step(rows)

    def _end_step(self, samples: torch.Tensor) -> None:
        self.interleaver.end_step()
        for row, token in enumerate(samples.tolist()):
            if not self.over[row]:
                self.generated[row].append(token)
                self.over[row] = self._is_over(row, token)
        for name, body in list(self.interleaver.bodies.items()):
            if body.done and self._ends_request(body):
                self.over[self.rows_of[name]] = True
            if self.over[self.rows_of[name]]:
                self._finish(name)

    @staticmethod
    def _ends_request(body: Body) -> bool:
        return body.failure is not None

    def _is_over(self, row: int, token: int) -> bool:
        if len(self.generated[row]) >= self.params["max_tokens"]:
            return True
        return token in self._stop_tokens()

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
        samples_B = self.interleaver.fire(("", "samples"), self._sample(logits_BV.detach()))
        self._end_step(samples_B)

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
            return self.interleaver.fire(("", "logits"), scores_BV)

        def see_samples(so_far_BS: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            sampled_B = so_far_BS[:, -1]
            so_far_BS[:, -1] = self.interleaver.fire(("", "samples"), sampled_B)
            self._end_step(so_far_BS[:, -1])
            return torch.tensor(self.over, device=so_far_BS.device)

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
