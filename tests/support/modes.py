"""The table of vLLM's modes: whether traces and plans work in each, and which test or check has seen that.

`tests/engine/test_modes.py` and `tests/gpu/check_modes.py` run the modes that have `checks`, and `tests/unit/test_unsupported.py` the modes
that are `refused`. `scripts/write_modes.py` writes the table into docs/supported.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# Tolerances, relative to the largest value. A difference in the last bit of a float16 can move the rounding to 8 bits to the next number.
# With INT8, random differences of half that size at every module of the oracle changed its own values by up to 0.068 (160 runs, CPU).
# Neighbouring FP8 numbers differ by 1/16 to 1/8 of their size.
EXACT, ROUNDED, INT8, EIGHT_BITS = 1e-3, 0.05, 0.1, 0.2


def nothing(model: Any) -> None:
    pass


def sleep_lightly(model: Any) -> None:
    """The weights wait in the host's memory; the KV cache is lost."""
    model.engine.sleep(level=1)
    model.engine.wake_up()


def sleep_deeply(model: Any) -> None:
    """The weights are lost as well, and are read from the disk again."""
    model.engine.sleep(level=2)
    model.engine.wake_up(tags=["weights"])
    model.engine.collective_rpc("reload_weights")
    model.engine.wake_up(tags=["kv_cache"])


@dataclass(frozen=True)
class Mode:
    """A mode of vLLM.

    Attributes:
        name: as in the table.
        argument: how a user turns it on, as in the table.
        options: the engine's arguments in which its checks run.
        weights: the checkpoint, by its name in `quantised`; None for the model as it is.
        tolerance: of the checks, relative to the largest value.
        dtype: of the engine.
        checks: the class of `mode_checks` that has its checks. None if other tests cover the mode, or if it is refused.
        cpu: when its checks run on vLLM's CPU build: in continuous integration, in `./test all`, or never, since the build cannot.
        disturb: what happens to the engine between two checks.
        positions, tokens: which rows the checks capture, and how many tokens they generate.
        on_cpu: other values of these attributes on the CPU.
        plans, traces: what the table says.
        refused: of a mode in which no engine starts: the config that `tests/unit/test_unsupported.py` makes, and a part of the error.
        tests: other tests that see what the table says, as arguments of pytest.
    """

    name: str
    argument: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    tolerance: float = EXACT
    dtype: str = "float32"
    checks: str | None = "Checks"
    cpu: Literal["ci", "all", "no"] = "no"
    disturb: Callable[[Any], None] = nothing
    positions: str = "all"
    tokens: int = 6
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    plans: str = "yes"
    traces: str = "yes"
    refused: tuple[Mapping[str, Any], str] | None = None
    tests: tuple[str, ...] = ()

    def here(self, cpu: bool) -> Mode:
        """The mode as it is checked on the CPU, or on a GPU."""
        return replace(self, **self.on_cpu) if cpu else self


_DRAFTED = {
    "tokens": 24,
    "positions": "all_prompt",
    "checks": "SpeculativeChecks",
    "plans": "edits anywhere; captures and probes of the prompt. Those of generated tokens raise `PlanError`",
    "traces": "`TraceError`",
}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
_EAGLE = {"method": "eagle", "num_speculative_tokens": 3}
_NO_DRAFTS = (
    "tests/unit/test_plan_stages.py::test_an_engine_that_hands_kv_on_or_drafts_ahead_takes_neither_plans_nor_traces"
)
_COUNTED = {"disable_log_stats": False}
_EXACT: Mapping[str, Any] = {"dtype": "float32", "tolerance": EXACT}


def _refused(name: str, argument: str, config: Mapping[str, Any], says: str) -> Mode:
    return Mode(name, argument, checks=None, plans="refused at the start", traces="the same", refused=(config, says))


def _elsewhere(name: str, argument: str, plans: str, traces: str, *tests: str) -> Mode:
    return Mode(name, argument, checks=None, plans=plans, traces=traces, tests=tests)


MODES = [
    _elsewhere("LoRA", "enable_lora=True", "yes", "yes", "tests/engine/test_adapters.py"),
    _elsewhere("mixtures of experts", "", "yes", "yes", "tests/engine/test_router.py"),
    _elsewhere(
        "structured outputs",
        "structured_outputs=StructuredOutputsParams(...)",
        "yes",
        "untested",
        "tests/engine/test_modes.py::test_plans_with_structured_outputs",
    ),
    Mode(
        "compressed-tensors, INT8",
        "a W8A8 checkpoint",
        weights="compressed-tensors int8",
        tolerance=INT8,
        dtype="float16",
        on_cpu={"dtype": "float32", "tolerance": 0.02},
        cpu="ci",
    ),
    Mode(
        "compressed-tensors, FP8",
        "a W8A8 checkpoint",
        weights="compressed-tensors fp8",
        tolerance=EIGHT_BITS,
        dtype="float16",
        on_cpu=_EXACT,
        cpu="all",
    ),
    Mode(
        "FP8 made at the start",
        'quantization="fp8"',
        {"quantization": "fp8"},
        "fp8",
        EIGHT_BITS,
        "float16",
    ),
    Mode("AWQ, 4 bits", "a checkpoint", weights="awq", tolerance=ROUNDED, dtype="float16", cpu="all"),
    Mode("GPTQ, 4 bits", "a checkpoint", weights="gptq", tolerance=ROUNDED, dtype="float16", cpu="all"),
    Mode(
        "FP8 KV cache",
        'kv_cache_dtype="fp8"',
        {"kv_cache_dtype": "fp8"},
        "kv fp8",
        EIGHT_BITS,
        "float16",
        on_cpu={"dtype": "float32", "tolerance": ROUNDED},
        cpu="all",
    ),
    Mode(
        "speculative decoding, n-grams",
        'speculative_config={"method": "ngram", ...}, async_scheduling=False',
        {"speculative_config": _NGRAM, "async_scheduling": False, **_COUNTED},
        cpu="ci",
        **_DRAFTED,
    ),
    Mode(
        "speculative decoding, EAGLE, without async scheduling",
        'speculative_config={"method": "eagle", ...}, async_scheduling=False',
        {"speculative_config": _EAGLE, "async_scheduling": False, **_COUNTED},
        cpu="all",
        **_DRAFTED,
    ),
    Mode(
        "speculative decoding, EAGLE, with async scheduling",
        'speculative_config={"method": "eagle", ...}',
        {"speculative_config": _EAGLE, "async_scheduling": True, **_COUNTED},
        tests=(_NO_DRAFTS,),
        **{**_DRAFTED, "checks": "AsynchronousSpeculativeChecks", "plans": "`PlanError`"},
    ),
    Mode("sleep mode, level 1", "enable_sleep_mode=True", {"enable_sleep_mode": True}, disturb=sleep_lightly),
    Mode("sleep mode, level 2", "enable_sleep_mode=True", {"enable_sleep_mode": True}, disturb=sleep_deeply),
    Mode("weights in the host's memory", "cpu_offload_gb=...", {"cpu_offload_gb": 0.0005}),
    _elsewhere(
        "multimodal models, text",
        "",
        "yes, without `embed`, which vLLM computes outside the forward",
        "yes, without `embed`",
        "tests/engine/test_multimodal.py",
    ),
    _elsewhere(
        "multimodal models, pictures, sound and video",
        "prompts to `model.engine` with the plan in their sampling parameters",
        "without positions; else `PlanError`",
        "no: a prompt is text or token ids",
        "tests/engine/test_multimodal.py",
    ),
    _elsewhere(
        "prompts as embeddings",
        "enable_prompt_embeds=True",
        "`PlanError`: a plan refers to the positions of tokens",
        "no: a prompt is text or token ids",
        "tests/engine/test_plan_stock.py::test_a_prompt_without_tokens_is_refused",
    ),
    _elsewhere(
        "KV connectors: disaggregated prefill, KV cache in the host's memory",
        "kv_transfer_config=..., kv_offloading_size=...",
        "`PlanError`; other requests run",
        "`PlanError`",
        _NO_DRAFTS,
    ),
    _refused("dual batch overlap", "enable_dbo=True", {"use_ubatching": True}, "without dual batch overlap"),
    _refused(
        "prefill context parallelism",
        "prefill_context_parallel_size=2",
        {"prefill_context_parallel_size": 2},
        "prefill_context_parallel_size=1",
    ),
    _refused(
        "decode context parallelism",
        "decode_context_parallel_size=2",
        {"decode_context_parallel_size": 2},
        "decode_context_parallel_size=1",
    ),
    _refused(
        "sequence parallelism",
        'compilation_config={"pass_config": {"enable_sp": True}}',
        {"enable_sp": True},
        "'enable_sp': False",
    ),
    _refused(
        "expert parallelism",
        "enable_expert_parallel=True, tensor_parallel_size=2",
        {"enable_expert_parallel": True, "tensor_parallel_size": 2},
        "enable_expert_parallel=False",
    ),
    _refused(
        "data parallelism of a mixture of experts, elastic expert parallelism",
        "data_parallel_size=2",
        {"data_parallel_size": 2},
        "data_parallel_size=1, and several engines: midstream.ray",
    ),
    _refused(
        "Ray with vLLM's older executor",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        {"use_ray": True, "older": "0"},
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1",
    ),
    _refused(
        "breakable CUDA graphs",
        "VLLM_USE_BREAKABLE_CUDAGRAPH=1",
        {"mode": "FULL", "breakable": "1"},
        "VLLM_USE_BREAKABLE_CUDAGRAPH=0",
    ),
    _refused("embedding and pooling models", 'runner="pooling"', {"runner_type": "pooling"}, "runner='pooling'"),
]
