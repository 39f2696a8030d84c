"""`LanguageModel`: traces and plans on a transformers model in this process."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from midstream import hooks
from midstream.arch import detect, parts_left_out, split_heads, split_routers, unknown_logits
from midstream.arch.aliases import Aliases, Rename
from midstream.arch.detect import show_tree
from midstream.capture.sinks import Sinks
from midstream.client.trace_model import TraceModel, loading_arguments
from midstream.errors import MidstreamError, ParameterError
from midstream.plan.values import ModelFacts
from midstream.requests.arguments import check_ids, prompts_of
from midstream.requests.invokes import Called, Invoke, InvokeResult, OutputStream, runs_of, token_ids
from midstream.requests.vectors_and_runs import Runs, Vectors, run_now
from midstream.runtime.store import RunStore, make_run
from midstream.settings import RECORD_BYTES
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.code import FunctionProgram
from midstream.trace.envoy import CallPoints, ModelEnvoy, SitePerLayer
from midstream.trace.envoy import Generator as Generation
from midstream.trace.interleaver import Interleaver
from midstream.trace.shipping import copies
from midstream.transformers.batch import BatchInvoke, BatchPlans, BatchRequest, PaddedBatch, RunningPlan


def _device(device: Any, device_map: Any) -> Any:
    """The device that `device=` or `device_map=` asks for; None to leave the model where it is. Raises ParameterError."""
    if device_map is None:
        return device
    if device is not None or not isinstance(device_map, (str, int, torch.device)) or device_map in _SPREAD:
        raise ParameterError(
            f"device_map is {device_map!r}. A LanguageModel is on one device, such as device_map='cuda:1'; VLLM with "
            "tensor_parallel_size= puts a model on several."
        )
    return ("cuda" if torch.cuda.is_available() else "cpu") if device_map == "auto" else device_map


_SPREAD = ("balanced", "balanced_low_0", "sequential")  # values of device_map for several devices


# Argument of transformers' attention functions -> the part of a model that it stands for.
_PARTS = {
    "softcap": "the soft caps of attention scores",
    "s_aux": "the sinks of attention",
    "position_bias": "the position biases of attention",
}

BATCH_TOKENS = 2048  # the most tokens in a batch of several prompts with plans: the prompts, and `max_tokens` each


def batch_size(tokens: int, max_tokens: int) -> int:
    """How many prompts of `tokens` tokens each run together."""
    return max(BATCH_TOKENS // (tokens + max_tokens), 1)


def _loaded(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, **arguments)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ParameterError(f"transformers does not load {name!r} with these arguments: {error}") from error


def _tokenizer(name: str, arguments: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """The tokenizer `name`, loaded with `more` and with the model's revision, access token, cache directory and trust in remote code."""
    from transformers import AutoTokenizer

    if not name:
        raise ParameterError("This model has no name that its tokenizer could be found by: give tokenizer=.")
    shared = {
        key: arguments[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in arguments
    }
    return AutoTokenizer.from_pretrained(name, **{**shared, **more})


class LanguageModel(TraceModel):
    """A transformers causal language model with traces and plans, in this process.

        model = LanguageModel("gpt2")
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=6, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in"):
            h = model.layers_output[8].save()         # [tokens, hidden]

    Several invokes run as one left-padded batch; each sees only its own tokens. A trace records gradients only if its code, or a function
    that it calls by name, asks for one (`with loss.backward():`, `.grad`, `requires_grad_()`, `torch.autograd`, `torch.enable_grad()`), or
    if it uses a tensor of the caller's that requires gradients. Other values that leave a trace are detached. Prompts with plans and
    without traces run without padding. If they have equal lengths and decode greedily with the same parameters, they run together in
    batches. A batch may change the last bits of a value, by about 1e-5 of the value in float32.

    Args:
        model: a path or name for `AutoModelForCausalLM`, or a model. If transformers' default attention leaves out a part of the model,
            as it does the soft caps of Gemma 2, a model that is given by its name gets `attn_implementation="eager"`.
        tokenizer: a tokenizer, or a path or name; that of `model` if None.
        rename: as in `VLLM`; a key may also be a class of modules.
        device: where to run.
        record_bytes: how many bytes recorded runs may take.
        progress: the default of `progress` for the model's calls, such as `generate`.
        tokenizer_kwargs: for `from_pretrained` of the tokenizer.
        kwargs: for `from_pretrained`, `dtype` for example. `torch_dtype` is another name for `dtype`, and `device_map` for `device`.

    Raises:
        ParameterError: transformers does not take an argument; an argument asks for something that midstream does not support; or the
            attention implementation of the given model, or the one that `attn_implementation` asks for, leaves out a part of the model.
    """

    has_engine = False
    _can_unembed = True

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: Any = None,
        *,
        rename: Rename | None = None,
        device: str | torch.device | None = None,
        record_bytes: int = RECORD_BYTES,
        progress: bool | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = loading_arguments(kwargs)
        is_free = isinstance(model, str) and kwargs.get("attn_implementation") is None
        device = _device(device, kwargs.pop("device_map", None))
        module: Any = _loaded(model, kwargs) if isinstance(model, str) else model
        if kwargs and module is model:
            raise ParameterError(f"{', '.join(kwargs)}: only for a model that is given by its name.")
        module = (module.to(device) if device is not None else module).eval()
        self.model_name: str = model if isinstance(model, str) else module.config.name_or_path
        self.module: Any = module
        self.tokenizer = tokenizer
        if tokenizer is None or isinstance(tokenizer, str):
            self.tokenizer = _tokenizer(tokenizer or self.model_name, kwargs, tokenizer_kwargs or {})
        self.edits, self.progress = {}, progress
        self.vectors = Vectors()
        self._run_store = RunStore(record_bytes)
        self.runs = Runs(self._ask_runs, run_now)
        self.sinks = Sinks()
        weakref.finalize(self, self.sinks.close)
        self._lock = threading.RLock()
        self._numbers = itertools.count()  # request ids
        split_routers(module, rename)
        split_heads(module)
        self._compute_all_of_attention(is_free)
        self.arch = detect(module, self._probe, rename=rename)
        modules = dict(module.named_modules())
        aliases = Aliases(rename, modules)
        aliases.warn(modules)
        self._interleaver = Interleaver(module, self.arch.order, aliases=aliases)
        self._envoy = ModelEnvoy(module, self.arch, self._interleaver, self._unembed, lambda: self.tokenizer)
        self._envoy._generator = Generation()
        self._can_unembed = self._unembeds_as_the_model()

    def _probe(self) -> Any:
        with torch.no_grad():
            return self.module(input_ids=torch.tensor([[0, 1, 2]], device=self.module.device), use_cache=False)

    def _compute_all_of_attention(self, is_free: bool) -> None:
        """Take transformers' eager attention if the default one leaves out a part of the model.

        Raises ParameterError if the caller chose the implementation, so that `is_free` is False.
        """
        if not (left_out := parts_left_out(self.module, self._probe)):
            return
        if not is_free:
            parts = " and ".join(_PARTS.get(name, name) for name in left_out)
            chosen = self.module.config.get_text_config()._attn_implementation
            raise ParameterError(
                f"transformers' attention {chosen!r} leaves out {parts} of {type(self.module).__name__}, so its values are not the "
                "model's. Load the model by LanguageModel(name), which chooses an implementation that computes all of it; or with "
                "attn_implementation='eager'. For a model that is loaded: model.set_attn_implementation('eager').",
                field="attn_implementation",
            )
        self.module.set_attn_implementation("eager")

    @torch.no_grad()
    def _unembeds_as_the_model(self) -> bool:
        """Whether `_unembed` gives the model's logits. A model may scale what it projects, or the logits, in a way of its own."""
        if ("final_norm", None) not in self.arch.bindings or self.module.get_output_embeddings() is None:
            return True
        seen: list[torch.Tensor] = []
        norm = self.module.get_submodule(self.arch.binding("final_norm").path)
        handle = hooks.before(norm, lambda args, kwargs: seen.append((*args, *kwargs.values())[0]))
        try:
            logits = getattr(self._probe(), "logits", None)
        finally:
            handle.remove()
        if logits is None:
            return True
        difference = (self._unembed(seen[-1]).to(logits) - logits).abs().max()
        return bool(difference <= logits.abs().max() * torch.finfo(logits.dtype).eps ** 0.5)

    def _unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._can_unembed:
            raise unknown_logits(type(self.module).__name__)
        norm = self.module.get_submodule(self.arch.binding("final_norm").path)
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
        forward = self._interleaver
        return show_tree(
            forward.modules, self.arch.shapes, self.arch.sites, forward.aliases.table(forward.stage.modules)
        )

    # Running.

    @property
    def _generation(self) -> Mapping[str, Any]:
        return self.module.generation_config.to_diff_dict()  # type: ignore[no-any-return]

    @property
    def _text_config(self) -> Any:
        return self.module.config.get_text_config()

    def close(self) -> None:
        """Wait until consumers and directories have taken their rows, and close them."""
        self.sinks.close()

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        widths = {
            (site, layer): self.arch.widths[site, layer] for site, layer in self.arch.bindings if layer is not None
        }
        dtype = str(self.module.dtype).removeprefix("torch.")
        return ModelFacts(self.arch.num_layers, widths, dtype, head_dims=self.arch.head_dims)

    def _run(self, invokes: list[Invoke], together: bool = False) -> OutputStream:
        return Called(partial(self._run_now, invokes))

    def _run_now(self, invokes: list[Invoke], ended: Callable[[int], object]) -> list[InvokeResult]:
        """Run traces as one batch, and requests without traces in the batches of `_batches`."""
        invokes = self._on_copies(invokes)
        prompts = [[] if each.prompt is None else prompts_of(each.prompt)[0] for each in invokes]
        single = self._with_plan(
            [replace(each, prompt=prompt) for each, own in zip(invokes, prompts, strict=True) for prompt in own]
        )
        single = self._with_programs(single)
        if any(each.program is not None or (self.edits if each.edits is None else each.edits) for each in invokes):
            self._check_forward(single)
        ids = self._all_token_ids(single)
        self._warn_of_length(ids)
        plans = self.planner.prepare_all(single, ids)
        for invoke in invokes:
            if (most := invoke.params.get("max_tokens")) is not None and most < 1:
                raise ParameterError(f"max_tokens is {most}; allowed: at least 1.")
        requests = [BatchRequest(str(next(self._numbers)), *each) for each in zip(single, ids, plans, strict=True)]
        rest = iter(requests)
        batch = [
            BatchInvoke(each, [next(rest) for _ in own] or requests, len(own) != 1)
            for each, own in zip(invokes, prompts, strict=True)
        ]
        has_trace = any(invoke.program is not None for invoke in invokes)
        with ExitStack() as stack:
            for part in [batch] if has_trace or not any(plans) else self._batches(batch):
                self._run_batch(part, stack)
                ended(len(part))
            results = [self._result(each) for each in batch]
        return results

    def _on_copies(self, invokes: list[Invoke]) -> list[Invoke]:
        """The invokes. Functions get copies of the caller's variables, as on an engine; with-blocks use the variables themselves."""
        functions = [each.program for each in invokes if isinstance(each.program, FunctionProgram)]
        if not functions:
            return invokes
        copied = iter(copies(functions, keeps=self._keeps()))
        return [
            replace(each, program=next(copied)) if isinstance(each.program, FunctionProgram) else each
            for each in invokes
        ]

    def _keeps(self) -> Callable[[Any], bool]:
        """A function that says which objects are not copied: models, and the parts of this model."""
        own: set[int] = set()

        def keeps(value: Any) -> bool:
            kind = type(value)
            if issubclass(kind, (TraceModel, CallPoints, SitePerLayer)) or value is self.tokenizer:
                return True
            if not issubclass(kind, (nn.Module, torch.Tensor)):
                return False
            if not own:
                parts = (self.module.modules(), self.module.parameters(), self.module.buffers())
                own.update(id(part) for part in itertools.chain(*parts))
            return id(value) in own

        return keeps

    def _batches(self, invokes: Sequence[BatchInvoke]) -> Iterator[list[BatchInvoke]]:
        """The batches of invokes with plans. Greedy ones of equal length and parameters share batches without padding; others run alone."""
        alike: dict[Any, list[BatchInvoke]] = {}
        for each in invokes:
            params = each.invoke.params
            has_edits = bool(self.edits if each.invoke.edits is None else each.invoke.edits)
            is_alone = has_edits or each.is_batch or params.get("temperature", 1.0) > 0
            key = id(each) if is_alone else (len(each.requests[0].prompt), repr(sorted(params.items())))
            alike.setdefault(key, []).append(each)
        for group in alike.values():
            size = batch_size(len(group[0].requests[0].prompt), group[0].invoke.params["max_tokens"])
            yield from (group[first : first + size] for first in range(0, len(group), size))

    def _token_ids(self, invoke: Invoke) -> list[int]:
        ids = token_ids(invoke, lambda: self.tokenizer, [type(self.module).__name__])
        check_ids(ids, len(self.module.get_input_embeddings().weight), None)
        return ids

    @property
    def trained_length(self) -> int | None:
        return getattr(self._text_config, "max_position_embeddings", None)

    def _warn_of_length(self, prompts: Sequence[Sequence[int]]) -> None:
        """Warn of prompts with more tokens than the model was made for."""
        most = self.trained_length
        long = [number for number, ids in enumerate(prompts) if most is not None and len(ids) > most]
        if long:
            which = "The prompt" if len(prompts) == 1 else f"prompts[{long[0]}]"
            others = f" So have {len(long) - 1} others." if len(long) > 1 else ""
            warnings.warn(
                f"{which} has {len(prompts[long[0]])} tokens, and this model was made for {most} (max_position_embeddings): what it "
                f"computes for later tokens may mean nothing.{others}",
                stacklevel=2,
            )

    def _run_batch(self, invokes: Sequence[BatchInvoke], until: ExitStack) -> None:
        """Run one batch to the end of its requests. Calls from several threads run one after the other.

        At the end of `until`, captured rows are dropped unless `_result` has taken them.
        """
        requests = [request for each in invokes if each.invoke.prompt is not None for request in each.requests]
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if runs := runs_of([request.plan for request in requests]):
                run_now(self.runs.lease(runs))
                stack.callback(lambda: run_now(self.runs.release(runs)))
            for request in requests:
                if request.plan is not None:
                    request.running = RunningPlan(
                        request, self.arch, self.vectors, self._run_store, self.sinks, self.module.dtype
                    )
                    until.callback(request.running.discard)
            with BatchPlans(self.module, self.arch, requests) as plans:
                PaddedBatch(self, self._interleaver, plans, requests, invokes).run()
            for request in requests:
                if request.running is not None:
                    request.running.end(len(request.generated))

    def _result(self, each: BatchInvoke) -> InvokeResult:
        """The result, with captures on its outputs or with an error. Waits until the sinks have taken their rows."""
        result = each.result
        for request in each.requests if each.invoke.prompt is not None else ():
            if request.running is None:
                continue
            request.output.captures = None
            try:
                request.output.captures = request.running.result(len(request.generated))
                if request.invoke.record is not None:
                    self._keep(result, *request.invoke.record)
            except MidstreamError as error:
                result.error = error
        return result

    # Recorded runs.

    def _keep(self, result: InvokeResult, run_id: str, name: str, _: str) -> None:
        """Keep the captured rows of a result as a recorded run."""
        assert result.plan is not None
        device = self.module.device
        planes = {(site, layer): rows.to(device) for (site, layer), rows in result.output.captures.items()}
        self._run_store.add(make_run(run_id, name, planes, result.plan.recorded_run(run_id, name).positions))

    async def _ask_runs(self, what: str, *args: Any) -> list[Any]:
        return [getattr(self._run_store, what)(*args)]
