"""vLLM's modes, each with plans and traces on a small model, against transformers with the dequantised weights (rows N6, N7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mode_checks
import pytest
import torch
from engines import alive, start, timed
from forked import forked
from modes import MODES, Mode
from oracle import Plain, close

from midstream import VLLM, Capture, Steer
from midstream.errors import MidstreamError

pytestmark = pytest.mark.engine
ON_CPU = [mode.here(cpu=True) for mode in MODES if mode.checks and mode.cpu != "no"]


@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=[pytest.mark.matrix] if mode.cpu == "all" else []) for mode in ON_CPU],
    ids=lambda mode: mode.name.replace(" ", "-"),
)
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    mode: Mode = request.param
    if mode.weights == "compressed-tensors int8" and "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's products of INT8 were 0.16 of the largest value off on a CPU without AVX-512 (2026-11-30)")
    options, oracle = mode_checks.build(mode, tmp_path_factory.mktemp("modes"))
    engine = {"max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.1, "enforce_eager": True}
    with timed(mode.name), forked():
        model = VLLM(**{**engine, "dtype": mode.dtype, **options})
    with model:
        yield getattr(mode_checks, mode.checks or "")(mode, model, oracle, rounds=1)


def test_plans_and_traces_equal_transformers_or_are_refused(checks: Any) -> None:
    """Each check of the mode. Afterwards the workers hold nothing."""
    for name in sorted(name for name in dir(checks) if name.startswith("check_")):
        getattr(checks, name)()
        checks.after_each()
    assert not alive(checks.model)


@pytest.mark.matrix
def test_a_steer_that_reaches_no_row_is_seen(checks: Any) -> None:
    """The checks can fail: the same outputs beside an oracle without the edit."""
    plans = [[checks.late, *checks.capture]] * mode_checks.COUNT
    with pytest.raises(AssertionError):
        checks.checked(plans, lambda number, prompt: None)


def test_plans_with_structured_outputs(engine: VLLM, plain: Plain) -> None:
    """The choices limit the tokens and not the rows: those of transformers with the edit, on the tokens that came out."""
    from vllm.sampling_params import StructuredOutputsParams

    vector = torch.randn(engine.hidden_size, generator=torch.Generator().manual_seed(0)) * 4
    steer = Steer("resid_post", layers=3, vector=vector)
    choices = [" Rome was", " Madrid was"]
    plan = [steer, Capture("resid_post", layers=5, positions="all")]
    prompts = [mode_checks.PROMPTS[1]] * 2
    greedy = {"max_tokens": 4, "temperature": 0.0}
    limits = StructuredOutputsParams(choice=choices)
    outputs = engine.generate(prompts, plan=[plan, plan[1:]], structured_outputs=limits, **greedy)
    for output, edits in zip(outputs, ({("resid_post", 3): lambda h: h + vector}, None), strict=True):
        assert output.outputs[0].text in choices
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        rows = output.captures["resid_post", 5]
        close(rows, plain.run(ids, edits).sites["resid_post", 5][: len(rows)])
        assert len(rows) >= len(ids) - 1


@pytest.mark.matrix
def test_an_engine_in_a_refused_mode_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/unit/test_unsupported.py` has all of these modes; here an engine asks."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(MidstreamError, match="without runner='pooling'"):
        start(enforce_eager=True, runner="pooling")
