"""Engines on which traces and plans would do nothing, or see parts of a batch, do not start (D8)."""

import re
from types import SimpleNamespace

import pytest
from modes import MODES
from vllm import envs
from vllm.config import CUDAGraphMode

from midstream.engine.worker import refuse_unsupported
from midstream.errors import MidstreamError


def config(mode="NONE", enable_sp=False, runner_type="generate", **parallel):
    kinds = ("data", "tensor", "prefill_context", "decode_context")
    given = {**dict.fromkeys(["use_ubatching", "use_ray", "enable_expert_parallel"], False), **parallel}
    given = {**{f"{kind}_parallel_size": 1 for kind in kinds}, **given}
    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], pass_config=SimpleNamespace(enable_sp=enable_sp))
    model = SimpleNamespace(runner_type=runner_type)
    return SimpleNamespace(parallel_config=SimpleNamespace(**given), compilation_config=compilation, model_config=model)


@pytest.mark.parametrize(
    ("given", "message"),
    [mode.refused for mode in MODES if mode.refused],
    ids=[mode.name for mode in MODES if mode.refused],
)
def test_steps_that_would_pass_plans_by_are_refused(given, message, monkeypatch):
    given = dict(given)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", given.pop("older", "1"))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", given.pop("breakable", "0"))
    with pytest.raises(MidstreamError, match=re.escape(message)):
        refuse_unsupported(config(**given))


def test_others_are_not(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    refuse_unsupported(config(use_ray=True))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    refuse_unsupported(config("FULL_AND_PIECEWISE", use_ray=True))
    refuse_unsupported(config(tensor_parallel_size=2))
    refuse_unsupported(config(enable_expert_parallel=True))  # of one rank


def test_a_vllm_without_the_older_ray_executor_is_not(monkeypatch):
    """0.33 has neither it nor the variable that chose it."""
    monkeypatch.delitem(envs.environment_variables, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    refuse_unsupported(config(use_ray=True))
