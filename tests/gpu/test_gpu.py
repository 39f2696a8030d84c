"""Traces and plans on GPUs, on both model runners. On a machine without one, `check_traces.py --cpu` runs the same checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


MODES = [[], ["--float32"], ["--eager"]]


def run(checks: str, *arguments: str) -> None:
    script = Path(__file__).with_name(f"check_{checks}.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-20000:]


@pytest.mark.parametrize("mode", MODES, ids=["graphs", "float32", "eager"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("checks", ["traces", "plans", "programs", "probes", "graphs", "not_finite", "apart", "modes"])
def test_on_gpu(checks: str, runner: str, mode: list[str]) -> None:
    run(checks, "--runner", runner, *mode)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_transformers"])
def test_attention_on_gpu(name: str, runner: str) -> None:
    run("attention", "--runner", runner, "--model", name)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_random_bodies_on_gpu(runner: str) -> None:
    run("bodies", "--runner", runner, "--float32")


def test_hostile_programs_on_gpu() -> None:
    run("hostile_programs", "--seed", "0", "--seconds", "120")


def test_plans_cost_what_they_are_charged_on_gpu() -> None:
    run("work", "--seed", "0", "--seconds", "300")


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_attackers_delay_no_neighbour_on_gpu(runner: str) -> None:
    run("neighbours", "--runner", runner, "--seed", "0", "--seconds", "300")


@pytest.mark.parametrize("mode", MODES, ids=["graphs", "float32", "eager"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (1, 2), (2, 2)], ids=["pp2", "tp2", "pp2tp2"])
def test_ranks_on_gpus(stages: int, ranks: int, runner: str, mode: list[str]) -> None:
    if torch.cuda.device_count() < stages * ranks:
        pytest.skip(f"needs {stages * ranks} GPUs")
    for checks in ("ranks", "programs"):
        run(checks, "--runner", runner, "--pp", str(stages), "--tp", str(ranks), *mode)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "falcon_two_norms", "cohere", "llama_transformers"])
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (1, 2)], ids=["pp2", "tp2"])
def test_architectures_on_gpus(stages: int, ranks: int, name: str, runner: str) -> None:
    if torch.cuda.device_count() < stages * ranks:
        pytest.skip(f"needs {stages * ranks} GPUs")
    run("architectures", "--runner", runner, "--pp", str(stages), "--tp", str(ranks), "--eager", name)
