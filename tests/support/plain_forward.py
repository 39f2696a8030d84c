"""A trace's body on a plain transformers model with torch hooks: what the tests of recorded bodies compare midstream with.

    plain = PlainForward(path)
    ran = plain.run(body, "The capital of France is", max_tokens=3)
    ran.value, ran.error, ran.tokens, ran.logits

Nothing of midstream is imported. The body runs in a thread of its own. A hook that reaches the point which the body waits for stops the
forward until the body asks for another point, so exactly one of the two threads runs. The body gets a copy of the value. When it goes on,
the forward continues with what that copy, or its replacement, holds then.

Shape suffixes: T tokens of this step, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from plain_model import ORDER, PARTS, Model, Tracer
from plain_run import Point, Ran, Run
from torch import nn


class PlainForward:
    """A transformers model that runs bodies in its forward.

    Args:
        noise: the relative size of random changes to the weights. Runs with and without it show how far rounding may move a result.
    """

    def __init__(self, path: str, noise: float = 0.0) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._run: Run | None = None
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.net.parameters() if noise else ():
                weight *= 1 + noise * torch.randn(weight.shape, generator=generator)
        for i, layer in enumerate(self.net.model.layers):
            for site, (part, kind) in PARTS.items():
                self._hook(layer.get_submodule(part), kind, (i, ORDER.index(site)))
            layer.post_attention_layernorm.register_forward_pre_hook(self._keep_residual)

    def _keep_residual(self, _: object, args: tuple) -> None:
        self._residual_TH = args[0][0]

    def _hook(self, module: nn.Module, kind: str, point: Point) -> None:
        def see(value_1TH: torch.Tensor) -> torch.Tensor:
            residual_TH = self._residual_TH if point[1] == ORDER.index("layers_output") else None
            return self._run.reach(point, value_1TH[0], residual_TH)[None]

        def by_body() -> bool:
            return self._run is None or threading.current_thread() is self._run.thread

        def before(_: object, args: tuple, kwargs: dict) -> Any:
            if by_body():
                return None
            return (
                ((see(args[0]), *args[1:]), kwargs)
                if args
                else (args, {**kwargs, "hidden_states": see(kwargs["hidden_states"])})
            )

        def after(_: object, __: tuple, output: Any) -> Any:
            if by_body():
                return None
            return (see(output[0]), *output[1:]) if isinstance(output, tuple) else see(output)

        if kind == "input":
            module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            module.register_forward_hook(after)

    def save(self, value: Any) -> Any:
        """`midstream.save`, for bodies that call it."""
        visit = self._run.visit if self._run is not None else None
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if visit is None else visit.save(value)

    def ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    @torch.no_grad()
    def run(self, fn: Callable[..., Any], prompt: str | list[int], max_tokens: int = 1, as_vllm: bool = True) -> Ran:
        """Run `fn(model)` or `fn(model, tracer)` in a greedy generation.

        Args:
            as_vllm: whether the modules' own values have the form of vLLM's or that of transformers'.
        """
        takes_tracer = len([p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]) == 2

        def call(run: Run) -> Any:
            return fn(Model(run, self.net, as_vllm), *([Tracer(run)] if takes_tracer else []))

        run = self._run = Run(call)
        after, ids, cache = len(self.net.model.layers), torch.tensor([self.ids(prompt)]), None
        try:
            for step in range(max_tokens):
                run.begin_step(step)
                out = self.net(ids, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits_1V = run.reach((after, 0), out.logits[0, -1:].clone())
                token = run.reach((after, 1), logits_1V.argmax(-1))
                run.ran.logits.append(logits_1V[0])
                run.ran.tokens.append(int(token[0]))
                ids = token.long()[None]
                if run.stopped or run.ran.error is not None:
                    break
            return run.end()
        finally:
            self._run = None
