"""Traces and plans on a GPU, on both model runners. On a machine without one, `check_traces.py --cpu` runs the same checks."""

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


@pytest.mark.parametrize("mode", [[], ["--eager"]], ids=["graphs", "eager"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("checks", ["traces", "plans"])
def test_on_gpu(checks: str, runner: str, mode: list[str]) -> None:
    script = Path(__file__).with_name(f"check_{checks}.py")
    done = subprocess.run(
        [sys.executable, str(script), "--runner", runner, *mode], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
