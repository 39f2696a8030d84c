"""The table of modes in docs/supported.md (row N7): it is what the list of modes and the results of GPUs say, and each row has a test."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from modes import MODES, Mode

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "write_modes.py"))


def test_the_table_is_what_the_tests_and_results_say(script: dict[str, Any]) -> None:
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page.count(script["BEGIN"]) == 1
    assert script["page"]() == page, "run scripts/write_modes.py"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_each_mode_has_a_test_that_exists(mode: Mode) -> None:
    """Its own checks, a refusal, or tests elsewhere."""
    assert bool(mode.refused) != bool(mode.checks or mode.tests)
    for test in mode.tests:
        path, _, name = test.partition("::")
        functions = [f.name for f in ast.parse((ROOT / path).read_text()).body if isinstance(f, ast.FunctionDef)]
        assert name in functions if name else any(each.startswith("test_") for each in functions)


def test_modes_have_names_of_their_own_and_results_are_of_modes(script: dict[str, Any]) -> None:
    names = [mode.name for mode in MODES]
    assert len({*names}) == len(names)
    assert {result["mode"] for result in script["results"]()} <= {*names}


def test_a_mode_counts_as_working_once_a_test_or_a_gpu_has_seen_it(script: dict[str, Any]) -> None:
    mode = Mode("sleep", "")
    made = {"mode": "sleep", "runner": "v2", "graphs": True, "device": "NVIDIA H200", "vllm": "0.32.0"}
    failed, passed = ({**made, "date": "2026-11-28", "result": each} for each in ("2 checks failed", "passed"))
    assert not script["is_seen"](mode, []) and not script["is_seen"](mode, [failed])
    assert script["is_seen"](mode, [passed])
    assert script["on_gpu"](mode, []) == "not run"
    assert script["on_gpu"](mode, [passed, failed]) == "V1: not run; V2: 2 checks failed (H200, 0.32.0, 2026-11-28)"
    assert script["on_gpu"](mode, [passed, {**passed, "runner": "v1"}]) == "V1, V2: passed (H200, 0.32.0, 2026-11-28)"
