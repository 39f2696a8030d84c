"""`LanguageModel`: traces and plans on a transformers model in this process."""

from __future__ import annotations

import itertools
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from midstream.arch import detect
from midstream.arch.describe import show_tree
from midstream.capture.sinks import Sinks
from midstream.client.batch import Batch, Generated
from midstream.client.model import TraceModel
from midstream.client.planned import Planned, Planner, recorded_run, refuse_multimodal, runs_of
from midstream.client.prompts import Prompt, encode
from midstream.client.reference import PlanHooks, PlannedRow, planned_row
from midstream.client.runs import Runs
from midstream.client.tracer import Invoke, Ran, raise_failures
from midstream.client.vectors import Vectors
from midstream.errors import MidstreamError, ParameterError, PromptError
from midstream.plan.checks import ModelFacts
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Plan
from midstream.runtime.store import RunStore, make_run
from midstream.settings import RECORD_BYTES
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.envoy import ModelEnvoy
from midstream.trace.interleaver import Interleaver

_Row = tuple[Ran, PlannedRow | None]


@dataclass
class _Done:
    ran: list[Ran]

    def wait(self) -> list[Ran]:
        return self.ran


class LanguageModel(TraceModel):
    """A transformers causal language model with traces and plans, in this process.

        model = LanguageModel("gpt2")
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=6, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in"):
            h = model.layers_output[8].save()         # [tokens, hidden]

    Several invokes are one left-padded batch; each sees its own tokens alone. Gradients are recorded as torch is set at
    the call, so `with loss.backward():` works, and `torch.no_grad()` around a trace makes it cheaper. Prompts that are
    generated from with a plan run one after the other, so that padding changes no bit.

    Args:
        model: a path or name for `AutoModelForCausalLM`, or a model.
        tokenizer: a tokenizer, or a path or name; that of `model` if None.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        device: where to run.
        record_bytes: how much memory recorded runs may take.
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
        self._numbers = itertools.count()  # of planned requests: their ids at sinks
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

    @property
    def _text_config(self) -> Any:
        return self.module.config.get_text_config()

    def close(self) -> None:
        """Let consumers and directories take what is theirs. As `VLLM.close`, so that a script runs on both."""
        self.sinks.close()

    @property
    def facts(self) -> ModelFacts:
        """What plans are checked against."""
        widths = {
            (site, layer): self.arch.widths[site, layer] for site, layer in self.arch.bindings if layer is not None
        }
        return ModelFacts(self.arch.num_layers, widths, str(self.module.dtype).removeprefix("torch."))

    @property
    def planner(self) -> Planner:
        return Planner(self.facts, lambda: self.tokenizer, self.vectors, self.runs)

    def _start(self, invokes: list[Invoke], together: bool) -> _Done:
        invokes = self._with_plan(invokes)
        with ExitStack() as stack:
            return _Done(self._put_captures(self._run(invokes, self._planned(invokes), stack)))

    def _planned(self, invokes: Sequence[Invoke]) -> list[Planned | None]:
        """The plan of each invoke, checked."""
        planner = self.planner
        planned: list[Planned | None] = []
        for invoke in invokes:
            refuse_multimodal(invoke.plan, invoke.prompt)
            ids = encode(invoke.prompt, lambda: self.tokenizer)
            self._check(ids)
            planned.append(planner.prepare(invoke.plan, invoke.prompt, ids, invoke.params) if invoke.plan else None)
            if (most := invoke.params.get("max_tokens")) is not None and most < 1:
                raise ParameterError(f"max_tokens is {most}; allowed: at least 1.")
        return planned

    def _check(self, ids: list[int]) -> None:
        rows = len(self.module.get_input_embeddings().weight)
        if wrong := [token for token in ids if not 0 <= token < rows]:
            raise PromptError(f"The prompt has the token id {wrong[0]}; this model's are 0 to {rows - 1}.")

    def _run(self, invokes: list[Invoke], planned: Sequence[Planned | None], until: ExitStack) -> list[_Row]:
        """One batch, with its plans, to the end of its requests; those of several threads one after the other.

        What the sinks then have of them is given up at the end of `until`, unless `_put_captures` was called before.
        """
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if runs := runs_of(planned):
                self.runs.lease(runs, 1)
                stack.callback(self.runs.lease, runs, -1)
            rows: dict[int, PlannedRow] = {}
            names = [str(next(self._numbers)) for _ in invokes]
            for index, each in enumerate(planned):
                if each is not None:
                    rows[index] = planned_row(
                        each,
                        self.arch,
                        names[index],
                        vectors=self.vectors,
                        runs=self._run_store,
                        sinks=self.sinks,
                        collected=invokes[index].collected,
                    )
                    until.callback(rows[index].discard)
            hooks = PlanHooks(self.module, self.arch, rows, lambda: self._interleaver.muted)
            with hooks.on():
                done = Batch(self, invokes, hooks, names).run()
            for index, row in rows.items():
                row.end(len(done[index].output.token_ids))
        return [(ran, rows.get(index)) for index, ran in enumerate(done)]

    @staticmethod
    def _put_captures(rows: Sequence[_Row]) -> list[Ran]:
        """Put captures on the outputs, once the sinks have taken theirs. A request that failed has its error in its place."""
        for ran, row in rows:
            if row is not None:
                ran.output.captures = None
                try:
                    ran.output.captures = row.captured(len(ran.output.token_ids))
                except MidstreamError as error:
                    ran.error = error
        return [ran for ran, _ in rows]

    def _outputs(self, invokes: list[Invoke]) -> list[Generated]:
        invokes = self._with_plan(invokes)
        planned = self._planned(invokes)
        with ExitStack() as stack:
            if any(planned):
                rows = [row for i, plan in zip(invokes, planned, strict=True) for row in self._run([i], [plan], stack)]
            else:
                rows = self._run(invokes, planned, stack)
            done = self._put_captures(rows)
        raise_failures(done)
        return [ran.output for ran in done]

    # What plans refer to.

    def _record(self, prompt: Prompt, plan: Plan, name: str) -> RecordedRun:
        invoke = Invoke(prompt, None, {"max_tokens": 1, "temperature": 0.0}, plan)
        (planned,) = self._planned([invoke])
        with ExitStack() as stack:
            (ran,) = self._put_captures(self._run([invoke], [planned], stack))
        raise_failures([ran])
        run = recorded_run(planned, name, uuid.uuid4().hex)
        device = self.module.device
        planes = {(site, layer): rows.to(device) for (site, layer), rows in ran.output.captures.items()}
        self._run_store.add(make_run(run.id, name, planes, run.positions))
        return self.runs.add(run)

    def _ask_runs(self, what: str, *args: Any) -> Any:
        return [getattr(self._run_store, what)(*args)]
