"""`LanguageModel`: traces and plans on a transformers model in this process."""

from __future__ import annotations

import itertools
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from midstream.arch import detect
from midstream.arch.detect import show_tree
from midstream.capture.consumers import CaptureInfo
from midstream.capture.sinks import RequestCapture, Sinks
from midstream.client.language_model_batch import PaddedBatch
from midstream.client.language_model_plans import PlanHooks, RunningPlan
from midstream.client.model import TraceModel
from midstream.client.requests import (
    Invoke,
    InvokeResult,
    Planner,
    PreparedPlan,
    Prompt,
    encode,
    raise_failures,
    refuse_multimodal,
    runs_of,
)
from midstream.client.vectors_and_runs import Runs, Vectors
from midstream.errors import MidstreamError, ParameterError, PromptError
from midstream.plan.checks import ModelFacts
from midstream.plan.values import Plan, RecordedRun
from midstream.runtime.store import RunStore, make_run
from midstream.settings import RECORD_BYTES
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.envoy import ModelEnvoy
from midstream.trace.interleaver import Interleaver

_Row = tuple[InvokeResult, RunningPlan | None]


class LanguageModel(TraceModel):
    """A transformers causal language model with traces and plans, in this process.

        model = LanguageModel("gpt2")
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=6, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in"):
            h = model.layers_output[8].save()         # [tokens, hidden]

    Several invokes run as one left-padded batch; each sees only its own tokens. Traces record gradients as torch is set at
    the call: `with loss.backward():` works, and `torch.no_grad()` around a trace makes it cheaper. Prompts of a `generate` with a
    plan run one after the other, so that padding changes no bit.

    Args:
        model: a path or name for `AutoModelForCausalLM`, or a model.
        tokenizer: a tokenizer, or a path or name; that of `model` if None.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        device: where to run.
        record_bytes: how many bytes recorded runs may take.
        kwargs: for `from_pretrained`, `dtype` for example.
    """

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: Any = None,
        *,
        rename: Mapping[str, str] | None = None,
        device: str | torch.device | None = None,
        record_bytes: int = RECORD_BYTES,
        **kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        module: Any = AutoModelForCausalLM.from_pretrained(model, **kwargs) if isinstance(model, str) else model
        module = (module.to(device) if device is not None else module).eval()
        self.model_name: str = model if isinstance(model, str) else module.config.name_or_path
        name = tokenizer if isinstance(tokenizer, str) else model if isinstance(model, str) else None
        self.module: Any = module
        self.tokenizer = (
            AutoTokenizer.from_pretrained(name) if tokenizer is None or isinstance(tokenizer, str) else tokenizer
        )
        self.edits = {}
        self.vectors = Vectors()
        self._run_store = RunStore(record_bytes)
        self.runs = Runs(self._ask_runs, False)
        self.sinks = Sinks()
        weakref.finalize(self, self.sinks.close)
        self._lock = threading.RLock()
        self._numbers = itertools.count()  # request ids
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

    # The model's tree and accessors; in a trace they refer to the running forward.

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

    @property
    def _text_config(self) -> Any:
        return self.module.config.get_text_config()

    def close(self) -> None:
        """Let consumers and directories take their rows, and close them."""
        self.sinks.close()

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        widths = {
            (site, layer): self.arch.widths[site, layer] for site, layer in self.arch.bindings if layer is not None
        }
        return ModelFacts(self.arch.num_layers, widths, str(self.module.dtype).removeprefix("torch."))

    @property
    def planner(self) -> Planner:
        return Planner(self.facts, lambda: self.tokenizer, self.vectors, self.runs)

    def _run(self, invokes: list[Invoke], together: bool = False) -> list[InvokeResult]:
        """Run traces as one batch; without traces, run prompts that have plans one after the other."""
        invokes = self._with_plan(invokes)
        plans = self._plans(invokes)
        alone = any(plans) and all(invoke.program is None for invoke in invokes)
        size = 1 if alone else len(invokes)
        with ExitStack() as stack:
            rows: list[_Row] = []
            for i in range(0, len(invokes), size):
                rows += self._run_batch(invokes[i : i + size], plans[i : i + size], stack)
            return _put_captures(rows)

    def _plans(self, invokes: Sequence[Invoke]) -> list[PreparedPlan | None]:
        """The plan of each invoke, checked."""
        planner = self.planner
        plans: list[PreparedPlan | None] = []
        for invoke in invokes:
            refuse_multimodal(invoke.plan, invoke.prompt)
            ids = encode(invoke.prompt, lambda: self.tokenizer)
            self._check_ids(ids)
            plans.append(planner.prepare(invoke.plan, invoke.prompt, ids, invoke.params) if invoke.plan else None)
            if (most := invoke.params.get("max_tokens")) is not None and most < 1:
                raise ParameterError(f"max_tokens is {most}; allowed: at least 1.")
        return plans

    def _check_ids(self, ids: list[int]) -> None:
        rows = len(self.module.get_input_embeddings().weight)
        if wrong := [token for token in ids if not 0 <= token < rows]:
            raise PromptError(f"The prompt has the token id {wrong[0]}; this model's are 0 to {rows - 1}.")

    def _run_batch(self, invokes: list[Invoke], plans: Sequence[PreparedPlan | None], until: ExitStack) -> list[_Row]:
        """Run one batch to the end of its requests. Calls from several threads run one after the other.

        At the end of `until`, captured rows are dropped unless `_put_captures` has taken them.
        """
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if runs := runs_of(plans):
                self.runs.lease(runs, 1)
                stack.callback(self.runs.lease, runs, -1)
            names = [str(next(self._numbers)) for _ in invokes]
            running: dict[int, RunningPlan] = {}
            for index, plan in enumerate(plans):
                if plan is not None:
                    running[index] = self._running(plan, names[index], invokes[index])
                    until.callback(running[index].discard)
            hooks = PlanHooks(self.module, self.arch, running, lambda: self._interleaver.muted)
            with hooks.on():
                results = PaddedBatch(
                    self, self.module, self.tokenizer, self._interleaver, self.edits, invokes, hooks, names
                ).run()
            for index, each in running.items():
                each.end(len(results[index].output.token_ids))
        return [(result, running.get(index)) for index, result in enumerate(results)]

    def _running(self, plan: PreparedPlan, name: str, invoke: Invoke) -> RunningPlan:
        info = CaptureInfo(name, tuple(plan.prompt), collected=invoke.collected)

        def capture() -> RequestCapture:
            return RequestCapture(info, plan.routes, self.sinks, lambda: plan.empty_chunk(name))

        return RunningPlan(plan, name, self.arch, self.vectors, self._run_store, capture)

    # Recorded runs.

    def _record(self, prompt: Prompt, plan: Plan, name: str) -> RecordedRun:
        invoke = Invoke(prompt, None, {"max_tokens": 1, "temperature": 0.0}, plan)
        (prepared,) = self._plans([invoke])
        assert prepared is not None
        with ExitStack() as stack:
            (result,) = _put_captures(self._run_batch([invoke], [prepared], stack))
        raise_failures([result])
        run = prepared.recorded_run(name, uuid.uuid4().hex)
        device = self.module.device
        planes = {(site, layer): rows.to(device) for (site, layer), rows in result.output.captures.items()}
        self._run_store.add(make_run(run.id, name, planes, run.positions))
        return self.runs.add(run)

    def _ask_runs(self, what: str, *args: Any) -> Any:
        return [getattr(self._run_store, what)(*args)]


def _put_captures(rows: Sequence[_Row]) -> list[InvokeResult]:
    """Put captures on the outputs, once the sinks have taken theirs. A failed request gets an error on its result."""
    for result, plan in rows:
        if plan is not None:
            result.output.captures = None
            try:
                result.output.captures = plan.result(len(result.output.token_ids))
            except MidstreamError as error:
                result.error = error
    return [result for result, _ in rows]
