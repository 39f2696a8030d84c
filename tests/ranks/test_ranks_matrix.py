"""The suites of traces and plans, written for one rank, pass unchanged on several (rows C1, C12, D7, E10, E12)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


# Generations, saves, errors, plans and tensor-parallel ranks have tests of their own, in test_pipeline.py, test_tensor_parallel.py
# and test_plans_ranks.py.
CASES = [(sizes, suite) for sizes in ranks.SIZES for suite in ranks.SUITES]
ALWAYS = [("pp2", "traces")]


@pytest.mark.parametrize(
    ("sizes", "suite"), [pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.matrix) for case in CASES]
)
def test_suites_of_one_rank_pass_on_several(sizes: str, suite: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--ranks") is not None:
        pytest.skip("it is what --ranks does")
    options = ["-q", "-x", "--ranks", sizes, "-k", "not hf", "-p", "no:cacheprovider", "--timeout=300"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *ranks.SUITES[suite]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
