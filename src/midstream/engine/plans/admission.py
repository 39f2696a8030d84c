"""Plans at the front end of any vLLM engine: read, checked and put into their wire form before the request is sent.

What only the workers know (which sites this model has, named vectors, recorded runs) is checked there, and ends the request with
`finish_reason="error"` and the message as its `stop_reason`. `midstream.VLLM` checks all of it before it sends anything.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from midstream.engine.plans.request import PlanRequest
from midstream.engine.request import NAME
from midstream.engine.settings import Settings
from midstream.errors import PlanError
from midstream.plan.checks import ModelFacts, check
from midstream.plan.values import Plan
from midstream.plan.wire import to_wire

_RESIDUAL = ("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out")


def check_requests() -> None:
    """Have vLLM's input processor check plans. Once a process; seen on vLLM 0.26 and 0.32."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if hasattr(original, "midstream"):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params, everyone = request.sampling_params, Settings.of(self.vllm_config).plan
        if params is not None and (everyone is not None or (params.extra_args or {}).get(NAME) is not None):
            params.extra_args = {**(params.extra_args or {}), NAME: admitted(self.vllm_config, request, everyone)}
        return request

    process_inputs.midstream = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def admitted(config: Any, request: Any, everyone: str | None) -> dict[str, Any]:
    """The request's plan (and trace) as it goes to the engine, behind the plan for every request. Raises PlanError."""
    from midstream.engine.launch import WORKER

    if config.parallel_config.worker_cls != WORKER:
        raise PlanError(
            "This engine was not started with midstream, so it would silently ignore the plan. Start it by midstream.VLLM(...), "
            "or with vllm.LLM(model, **midstream.engine_arguments())."
        )
    params = request.sampling_params
    given = (params.extra_args or {}).get(NAME)
    carried = PlanRequest.of(params)
    if carried is None and everyone is None:
        return given
    plan = Plan.of(everyone) + (carried.plan if carried is not None else Plan.of(None))
    layers = config.model_config.hf_text_config.num_hidden_layers
    prompt, text_only = len(request.prompt_token_ids or ()), not request.mm_features
    for part, facts in _parts(plan, config.model_config, layers):
        check(part, facts, prompt, params.max_tokens, vectors=None, runs=None, multimodal=not text_only)
    carried = PlanRequest(
        to_wire(plan), layers, carried.capture if carried else None, carried.record if carried else None
    )
    if carried.capture is None and carried.record is None and any(None in capture.sinks for capture in plan.captures):
        raise PlanError(
            "Capture.to is None, and this request goes past midstream.VLLM, so nobody waits for its rows: name a directory or a "
            "Consumer that the engine gives them to."
        )
    trace = {"trace": given["trace"]} if isinstance(given, Mapping) and "trace" in given else {}
    return {**trace, **carried.to_extra_args()[NAME]}


def _parts(plan: Plan, model: Any, layers: int) -> list[tuple[Plan, ModelFacts]]:
    """The plan's parts, with what is known here of the sites they name: how wide the residual stream is, and nothing of the others."""
    residual = Plan(tuple(item for item in plan.interventions if item.site in _RESIDUAL))
    others = Plan(tuple(item for item in plan.interventions if item.site not in _RESIDUAL))
    dtype, hidden = str(model.dtype).removeprefix("torch."), model.get_hidden_size()
    widths = {(site, layer): hidden for site in _RESIDUAL for layer in range(layers)}
    return [(residual, ModelFacts(layers, widths, dtype)), (others, ModelFacts(layers, {}, dtype))]
