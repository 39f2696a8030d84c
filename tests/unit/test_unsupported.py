"""Engines on which traces and plans would do nothing, or see parts of a batch, do not start (D8)."""

from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.config import CUDAGraphMode

from midstream.engine.worker import refuse_unsupported
from midstream.errors import MidstreamError


def config(mode=CUDAGraphMode.NONE, enable_sp=False, **parallel):
    given = {"use_ubatching": False, "use_ray": False, "prefill_context_parallel_size": 1, "data_parallel_size": 1}
    given |= parallel
    compilation = SimpleNamespace(cudagraph_mode=mode, pass_config=SimpleNamespace(enable_sp=enable_sp))
    return SimpleNamespace(parallel_config=SimpleNamespace(**given), compilation_config=compilation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_ubatching": True}, "without dual batch overlap"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=1"),
        ({"data_parallel_size": 2}, r"data_parallel_size=1, and several engines: midstream\.ray"),
        ({"enable_sp": True}, "'enable_sp': False"),
        ({"use_ray": True, "older": "0"}, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"),
        ({"mode": CUDAGraphMode.FULL, "breakable": "1"}, "VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
    ],
)
def test_steps_that_would_pass_plans_by_are_refused(given, message, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", given.pop("older", "1"))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", given.pop("breakable", "0"))
    with pytest.raises(MidstreamError, match=message):
        refuse_unsupported(config(**given))


def test_others_are_not(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    refuse_unsupported(config(use_ray=True))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    refuse_unsupported(config(CUDAGraphMode.FULL_AND_PIECEWISE, use_ray=True))


def test_a_vllm_without_the_older_ray_executor_is_not(monkeypatch):
    """0.33 has neither it nor the variable that chose it."""
    monkeypatch.delitem(envs.environment_variables, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    refuse_unsupported(config(use_ray=True))
