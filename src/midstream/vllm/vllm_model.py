"""`VLLM`: traces and plans on a stock vLLM engine."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from midstream.arch.aliases import Rename, names_alone
from midstream.capture.rows import NO_ROUTES
from midstream.capture.sinks import Sinks
from midstream.client.described import DescribedModel
from midstream.client.trace_model import loading_arguments
from midstream.engine import launch
from midstream.errors import MidstreamError, ParameterError, PlanError, TraceError
from midstream.lowering import taping
from midstream.lowering.client_traces import Ending
from midstream.lowering.tiers import Lowering
from midstream.plan.fields import refuse
from midstream.plan.values import Plan
from midstream.requests.arguments import engine_params
from midstream.requests.invokes import Invoke, PreparedPlan, without_destinations
from midstream.runtime.request import Envelope, PlanRequest, Tier, TraceRequest, packed, requests_of
from midstream.settings import GRAPH_BYTES, NAME, RECORD_BYTES, TRACE_SHARE, WEIGHT_BYTES, Settings, chosen_graph_sites
from midstream.trace.shipping import ShippedCode
from midstream.trace.weights import Weight
from midstream.vllm.engine import EngineConnection, EngineRequest
from midstream.vllm.row_receiver import RowReceiver
from midstream.vllm.stream import EngineStream


class _Work(NamedTuple):
    """The traces and plans of a call's requests. Each list has an entry for each request.

    Attributes:
        tier: where the code of their traces runs.
        plans: None for requests without one.
        weights: the large constants of each plan that does a trace's work, by digest. The workers hold them apart from the plan.
        endings: make the outcomes of traces whose code the engine does not run.
    """

    tier: Tier
    plans: Sequence[PreparedPlan | None]
    weights: Sequence[Mapping[str, Weight]]
    endings: Sequence[Ending | None]


class VLLM(DescribedModel):
    """A vLLM engine with traces and plans.

        model = VLLM("meta-llama/Llama-3.1-8B", tensor_parallel_size=1)
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=14, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in", temperature=0.0):
            h = model.layers_output[8].save()         # [tokens, hidden], on the CPU
            model.layers_output[10] += v

    Steps without traces run as in stock vLLM, compiled and with CUDA graphs. vLLM's log goes to a file, and errors give its path. If an
    environment variable such as VLLM_LOGGING_LEVEL is set, vLLM logs to its usual place.

    Args:
        model: as for `vllm.LLM`.
        mode: `"sync"`: calls and traces run to their end. `"async"`: await a call; for a trace, `async for output in tracer.backend` gives
            the outputs as they come.
        rename: new names of modules, such as `{"blocks": "layers"}` or `{"transformer.h": "layers"}`. A key is a path; the new name is an
            attribute of the module to which the path's first name belongs. `*` matches any single name: with `{"layers.*.mlp": "ffn"}` each
            layer has a `ffn`. midstream looks for the sites at the modules that you give a standard name (`layers`, `attn`, `mlp`,
            `router`, `embed`, `final_norm`, `attn_proj`, `mlp_proj`). A list gives several names.
        graph_sites: only for `tensor_parallel_size` above 1: sites that are built into the compiled forward and its CUDA graphs, by
            default `resid_post`; a plan at another site runs its steps uncompiled. Other engines have all possible sites built in.
        graph_bytes: the limit in bytes, on each worker, for CUDA graphs in which plans act. They are recorded when they are needed;
            until then, the steps that need them are slower.
        record_bytes: the limit in bytes, on each worker, for recorded runs.
        weight_bytes: the limit in bytes, on each worker, for large tensors that traces and the programs of plans have used. They
            stay for later requests.
        trace_share: for traces whose code runs in the forward (see `explain`). They make their steps slow, so they get separate steps.
            While other requests run, they get at most this share of the engine's time, above 0. With 1, all requests share all steps.
        progress: the default of `progress` for the model's calls, such as `generate`.
        tokenizer_kwargs: arguments of `from_pretrained` for `model.tokenizer`, which turns prompts into token ids.
        engine: any argument of `vllm.LLM`, or of `AsyncEngineArgs` with `mode="async"`. `torch_dtype` is another name for `dtype`.

    Raises:
        ParameterError: an argument that vLLM does not have.
        UnsupportedVersionError: the vLLM version is not supported.
        ArchitectureError: the model's sites could not be found.
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
    """

    adapter_argument = "lora_request"

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        rename: Rename | None = None,
        graph_sites: Sequence[str] | None = None,
        graph_bytes: int = GRAPH_BYTES,
        record_bytes: int = RECORD_BYTES,
        weight_bytes: int = WEIGHT_BYTES,
        trace_share: float = TRACE_SHARE,
        progress: bool | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise MidstreamError(f'mode is "sync" or "async"; {mode!r} was given.')
        settings = Settings(
            allow_traces=True,
            rename=names_alone(rename),
            graph_sites=chosen_graph_sites(graph_sites, engine.get("tensor_parallel_size") or 1),
            graph_bytes=graph_bytes,
            record_bytes=record_bytes,
            weight_bytes=weight_bytes,
            trace_share=trace_share,
        )
        engine = loading_arguments(engine)
        if (given := engine.pop("device_map", None)) not in (None, "auto", "cuda"):
            raise ParameterError(
                f"device_map is {given!r}. vLLM puts a model on several GPUs by tensor_parallel_size= and pipeline_parallel_size=; "
                "the environment variable CUDA_VISIBLE_DEVICES chooses them."
            )
        arguments = launch.llm_arguments(model, settings, engine)
        self.progress, self._tokenizer_kwargs = progress, dict(tokenizer_kwargs or {})
        taping.start()
        self._use(launch.start_engine(arguments, is_async=mode == "async"), model, mode)
        if self._connection.is_described:
            taping.prepare(self._known)

    @classmethod
    def attached(cls, engine: Any) -> Self:
        """A `VLLM` on a running `AsyncLLM` that has midstream's plugin. The caller closes the engine."""
        model = cls.__new__(cls)
        model._tokenizer_kwargs = {}
        model._use(engine, launch.config_of(engine).model_config.model, "async", is_ours=False)
        return model

    def _use(self, engine: Any, name: str, mode: str, is_ours: bool = True) -> None:
        self.edits = {}
        self.mode, self.model_name = mode, name
        self._is_async = mode == "async"
        self.sinks = Sinks()
        self._connection = EngineConnection(engine, self.sinks, self._is_async, is_ours)
        self.vllm_config = self._connection.config
        self.vectors, self.runs = self._connection.vectors, self._connection.runs

    # The engine.

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM` underneath. Raises EngineClosedError if the engine is closed or dead."""
        return self._connection.engine

    @property
    def is_open(self) -> bool:
        """Whether the engine is neither closed nor known to be dead."""
        return self._connection.is_open

    @property
    def config(self) -> Any:
        """The model's transformers configuration; `vllm_config` is the engine's."""
        return self.vllm_config.model_config.hf_config

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.vllm_config.model_config.tokenizer, **self._tokenizer_kwargs)

    async def start(self) -> Self:
        """Connect the workers of an async engine. The first trace calls this. Call it yourself to use the module tree before that."""
        await self._connection.start()
        taping.prepare(self._known)
        return self

    @property
    def connection(self) -> EngineConnection:
        """The connection that runs requests on the engine."""
        return self._connection

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        self._connection.close()

    def gauges(self) -> Any:
        """Counts of the objects that each worker holds: zeros when no traced request runs, except for `traced_steps`, which counts from
        the start, and `weight_bytes`, which are kept for later traces.

        A list with a dict for each worker; awaitable with `mode="async"`.
        """
        return self._connection.finish(self._connection.gauges())

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites, from the workers."""
        return self._connection.description

    @property
    def longest_prompt(self) -> int:
        return self.vllm_config.model_config.max_model_len - 1

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        return self.vllm_config.model_config.get_diff_sampling_param()  # type: ignore[no-any-return]

    @property
    def _text_config(self) -> Any:
        return self.vllm_config.model_config.hf_text_config

    def _check_adapter(self, adapter: Any) -> None:
        launch.check_adapter(self.vllm_config, adapter)

    def name_of_adapter(self, adapter: Any) -> str:
        """The name and path of an adapter, as collections and sweeps record it."""
        return f"{adapter.lora_name} ({adapter.lora_path})"

    @property
    def is_sharded(self) -> bool:
        return self.vllm_config.parallel_config.tensor_parallel_size > 1

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._connection.finish(coroutine)

    def __repr__(self) -> str:
        return "<VLLM, closed>" if self._connection.is_closed else super().__repr__()

    # Running.

    def _run(self, invokes: list[Invoke], together: bool = False) -> EngineStream:
        invokes = self._with_plan([_with_carried_plan(invoke) for invoke in invokes])
        prompts = self._all_token_ids(invokes)
        code = self._code(invokes)
        lowering = None
        if code is not None and self._connection.is_described:
            lowering = self._lower(invokes, prompts, code)

        def requests() -> list[EngineRequest]:
            return self._requests(invokes, prompts, code, together, lowering)

        if self._connection.is_described or not any(invoke.plan for invoke in invokes):
            made = requests()  # checked at once
            return EngineStream(self._connection, lambda: made)
        return EngineStream(self._connection, requests)  # plans are checked after the engine has started

    def stream(
        self,
        invokes: Sequence[Invoke],
        prompts: Sequence[list[int]],
        code: ShippedCode | None,
        together: bool,
        lowering: Lowering | None,
    ) -> EngineStream:
        """The outputs of a server's requests. Arguments and errors are those of `_requests`."""
        requests = self._requests(self._with_plan(list(invokes)), prompts, code, together, lowering)
        return EngineStream(self._connection, lambda: requests)

    def _requests(
        self,
        invokes: Sequence[Invoke],
        prompts: Sequence[list[int]],
        code: ShippedCode | None,
        together: bool = False,
        lowering: Lowering | None = None,
    ) -> list[EngineRequest]:
        """The requests of `invokes`.

        Args:
            prompts: their token ids.
            code: the code of their traces.
            together: whether all of them must be in the same steps.
            lowering: how the traces can run; None for the forward.

        Raises:
            PromptError: a prompt that cannot be traced in one step.
            PlanError: a plan that cannot be carried out on this model or prompt.
            ParameterError: adapters that the engine would take for each other, or too many for one step.
        """
        invokes, constants = self._with_held_constants(self._with_programs(invokes))
        chosen = [invoke.adapter for invoke in invokes]
        self._connection.adapters.check(chosen)
        if together:
            launch.check_adapters_fit_one_step(self.vllm_config, chosen)
        streamed = self._is_async and any(invoke.is_streamed for invoke in invokes)
        traces: Sequence[TraceRequest | None] = [None] * len(invokes)
        if code is not None:
            traces = self._traces(invokes, prompts, code, together, streamed)
        work = None
        if lowering is not None:
            keeps = zip(traces, lowering.keeps_to_graphs, strict=True)
            traces = [trace and replace(trace, keeps_to_graphs=keeps_to_graphs) for trace, keeps_to_graphs in keeps]
            work = self._lowered(invokes, prompts, lowering, together or streamed)
        if work is None:
            if code is not None:
                self._check_forward(invokes)
            plans: Sequence[PreparedPlan | None] = [None] * len(invokes)
            if any(invoke.plan for invoke in invokes):
                plans = self.planner.prepare_all(invokes, prompts)
            work = _Work(Tier.FORWARD, plans, [{}] * len(invokes), [None] * len(invokes))
        elif work.tier is Tier.BEHIND:
            traces = [trace and replace(trace, tier=Tier.BEHIND) for trace in traces]
        else:  # no code runs in the engine
            traces = [None] * len(invokes)
        shared: dict[Any, Any] = {}
        requests = []
        each = zip(invokes, prompts, traces, work.plans, constants, work.weights, work.endings, strict=True)
        for invoke, ids, trace, plan, held, of_trace, ending in each:
            rows = None
            if plan is not None and plan.plan.captures and work.tier is not Tier.BEHIND:
                rows = self._receiver(
                    plan, invoke.params.get("n", 1), invoke, ending if work.tier is Tier.CLIENT else None
                )
            salt = secrets.token_hex(8) if trace is not None else None
            prompt = launch.engine_prompt(ids, invoke.prompt if isinstance(invoke.prompt, str) else None, salt)
            params = _params(invoke, trace, plan, rows, shared)
            weights = {**held, **of_trace, **(code.weights if code is not None and trace is not None else {})}
            answers, adapter = invoke.answers, invoke.adapter
            requests.append(EngineRequest(prompt, params, trace, plan, rows, answers, ending, weights, adapter))
        return requests

    def _with_held_constants(self, invokes: Sequence[Invoke]) -> tuple[list[Invoke], list[dict[str, Weight]]]:
        """Take the large constants of programs out of the invokes' plans, since the workers hold them.

        Returns the invokes, and the constants of each invoke's plan by digest. Raises PlanError if the constants of one plan exceed
        `weight_bytes`.
        """
        found, weights = list[Invoke](), list[dict[str, Weight]]()
        for invoke in invokes:
            plan, data = invoke.plan.held if invoke.plan else (invoke.plan, {})
            budget = self._connection.weights.budget
            if (size := sum(map(len, data.values()))) > budget:
                given = f"programs with {size:,} bytes of constants"
                raise refuse("the plan", given, f"up to {budget:,}, the engine's weight_bytes")
            found.append(replace(invoke, plan=plan) if data else invoke)
            weights.append({digest: Weight(each, digest) for digest, each in data.items()})
        return found, weights

    def _lowered(
        self, invokes: Sequence[Invoke], prompts: Sequence[list[int]], lowering: Lowering, in_the_engine: bool
    ) -> _Work | None:
        """The plans that do the work of a call's traces. None if the traces have to run in the forward.

        Args:
            in_the_engine: whether the engine has to run code of `Tier.CLIENT`: see `Lowering.in_the_engine`.
        """
        own = [invoke.plan or Plan() for invoke in invokes]
        if lowering.tier is Tier.FORWARD or (any(own) and not lowering.stands_beside(own, self.num_layers)):
            return None
        if in_the_engine or any(invoke.params.get("n", 1) > 1 for invoke in invokes):
            lowering = lowering.in_the_engine()
        held = [plan.held for plan in lowering.plans]
        planned = [replace(invoke, plan=mine + its) for invoke, mine, (its, _) in zip(invokes, own, held, strict=True)]
        try:
            plans = self.planner.prepare_all(planned, prompts)
        except PlanError:
            if not any(own) or any(plan.has_final for plan in own):
                raise
            return None  # too much for one plan, or the caller's own plan is wrong
        weights = [{digest: Weight(data, digest) for digest, data in numbers.items()} for _, numbers in held]
        endings: list[Ending | None] = [None] * len(invokes)
        for i, found in enumerate(lowering.each):
            if invokes[i].program is not None:
                endings[i] = found.ending(lowering.tier)
        return _Work(lowering.tier, plans, weights, endings)

    def _traces(
        self, invokes: Sequence[Invoke], prompts: Sequence[list[int]], code: ShippedCode, together: bool, streamed: bool
    ) -> Sequence[TraceRequest | None]:
        if self.vllm_config.speculative_config is not None:
            raise TraceError(
                "Traces are not supported with speculative decoding: they would see draft tokens as the request's own. Start the engine "
                "without speculative_config, or send a plan."
            )
        samples = [invoke.params.get("n", 1) for invoke in invokes]
        launch.check_prompts(
            self.vllm_config, [p for p, n in zip(prompts, samples, strict=True) for _ in range(n)], together
        )
        return requests_of(code, samples, together, streamed)

    def _receiver(
        self, plan: PreparedPlan, samples: int, invoke: Invoke, trace_ending: Ending | None = None
    ) -> RowReceiver:
        """Receives the request's captured rows. Rows of a recorded run stay in the workers."""
        plan = plan if invoke.record is None else replace(plan, routes=NO_ROUTES)
        return RowReceiver(plan, samples, self.sinks, self._connection.stages, invoke.collected, trace_ending)

    def planned(self, invoke: Invoke, prompt: dict[str, Any], params: Any) -> EngineRequest:
        """A request of a server. vLLM's server has made `prompt`, with token ids, and the SamplingParams `params`; both stay unchanged.

        Raises PlanError for a plan that cannot be carried out on this model or prompt.
        """
        (invoke,), (weights,) = self._with_held_constants(self._with_plan([invoke]))
        plan = self.planner.prepare(
            invoke.plan, invoke.prompt, prompt["prompt_token_ids"], {"max_tokens": params.max_tokens}
        )
        rows = self._receiver(plan, params.n, invoke) if plan.plan.captures else None
        params = copy.copy(params)
        params.extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != NAME}
        if invoke.answers:
            params.logprob_token_ids = invoke.answers.token_ids
        params = _with_plan(params, plan, rows, invoke)
        return EngineRequest(prompt, params, None, plan, rows, invoke.answers, weights=weights)


def _with_carried_plan(invoke: Invoke) -> Invoke:
    """The invoke, with the plan of its `extra_args` as its own plan.

    Raises PlanError if it has another plan, ParameterError if `extra_args` is no dict.
    """
    extra = invoke.params.get("extra_args") or {}
    if not isinstance(extra, Mapping):
        raise ParameterError(f"extra_args is {extra!r}; allowed: a dict.")
    if NAME not in extra:
        return invoke
    if invoke.plan:
        raise PlanError(f"The plan was given twice: as plan=, and as extra_args[{NAME!r}].")
    given = extra[NAME]
    given = given["plan"] if isinstance(given, Mapping) and "plan" in given else given
    rest = {name: value for name, value in extra.items() if name != NAME}
    return replace(invoke, plan=Plan.of(given), params={**invoke.params, "extra_args": rest})


def _params(
    invoke: Invoke,
    trace: TraceRequest | None,
    plan: PreparedPlan | None,
    rows: RowReceiver | None,
    shared: dict[Any, Any],
) -> Any:
    """The request's SamplingParams. Requests with equal parameters and plans share one object; `shared` has the objects made so far."""
    if trace is not None:
        return _with_plan(_sampling_params(invoke, trace), plan, rows, invoke, trace.is_behind)
    same = (id(invoke.params), id(invoke.answers))
    if same not in shared:
        shared[same] = _sampling_params(invoke, None)
    if plan is None:
        return shared[same]
    if rows is not None:  # the rows have their own address
        return _with_plan(copy.copy(shared[same]), plan, rows, invoke)
    if (same, plan.plan) not in shared:
        shared[same, plan.plan] = _with_plan(copy.copy(shared[same]), plan, None, invoke)
    return shared[same, plan.plan]


def _sampling_params(invoke: Invoke, trace: TraceRequest | None) -> Any:
    answers = {"logprob_token_ids": invoke.answers.token_ids} if invoke.answers else {}
    return launch.sampling_params({**engine_params(invoke.params), **answers}, trace)


def _with_plan(
    params: Any, plan: PreparedPlan | None, rows: RowReceiver | None, invoke: Invoke, behind: bool = False
) -> Any:
    """`params`, changed in place to carry the plan, and the address of its rows."""
    if plan is not None:
        wire = packed(without_destinations(plan.plan))
        key = rows.key if rows is not None else None
        request = PlanRequest(
            wire, plan.facts.num_layers, capture=key, record=invoke.record, checked=True, behind=behind
        )
        extra = params.extra_args or {}
        params.extra_args = {**extra, NAME: Envelope({**extra.get(NAME, {}), **request.to_extra_args()[NAME]})}
    return params
