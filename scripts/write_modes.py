"""Writes the table of vLLM's modes into docs/supported.md, from tests/support/modes.py and the results of the checks on GPUs.

python tests/gpu/check_modes.py --runner v2 --json benchmarks/results/modes.jsonl     # on a GPU
python scripts/write_modes.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from modes import MODES, Mode  # noqa: E402

PAGE = ROOT / "docs" / "supported.md"
RESULTS = ROOT / "benchmarks" / "results" / "modes.jsonl"
BEGIN, END = "<!-- modes -->\n", "<!-- end -->"
RUNNERS = ("v1", "v2")


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def on_gpu(mode: Mode, found: list[dict[str, Any]]) -> str:
    """The newest result of each runner."""
    newest = {r["runner"]: r for r in found if r["mode"] == mode.name and r["device"] != "CPU"}
    if not newest:
        return "-" if mode.refused else "not run"
    same = {(r["result"], r["device"], r["vllm"], r["date"]) for r in newest.values()}
    if len(same) == 1 and len(newest) == len(RUNNERS):
        return f"V1, V2: {shown(newest['v1'])}"
    return "; ".join(
        f"{runner.upper()}: {shown(newest[runner]) if runner in newest else 'not run'}" for runner in RUNNERS
    )


def shown(result: dict[str, Any]) -> str:
    how = "" if result["graphs"] else ", eager"
    return f"{result['result']} ({result['device'].removeprefix('NVIDIA ')}, {result['vllm']}, {result['date']}{how})"


def on_cpu(mode: Mode) -> str:
    """The test that sees the mode on the CPU."""
    if mode.refused:
        return "`tests/unit/test_unsupported.py`"
    if mode.checks is None or (mode.cpu == "no" and mode.tests):
        return ", ".join(f"`{test.partition('::')[0]}`" for test in mode.tests)
    return {
        "ci": "`tests/engine/test_modes.py`",
        "all": "`tests/engine/test_modes.py`, by `./test all`",
        "no": "vLLM's CPU build lacks it",
    }[mode.cpu]


def is_seen(mode: Mode, found: list[dict[str, Any]]) -> bool:
    """Whether a test sees the mode, or a check on a GPU has passed."""
    passed = any(result["mode"] == mode.name and result["result"] == "passed" for result in found)
    return bool(mode.refused or mode.tests) or mode.cpu != "no" or passed


def table() -> str:
    found = results()
    lines = ["| mode | engine arguments | plans | traces | on the CPU | on a GPU |", "|---|---|---|---|---|---|"]
    for mode in MODES:
        argument = f"`{mode.argument}`" if "=" in mode.argument else mode.argument
        plans, traces = (mode.plans, mode.traces) if is_seen(mode, found) else ("untested", "untested")
        lines.append(f"| {mode.name} | {argument} | {plans} | {traces} | {on_cpu(mode)} | {on_gpu(mode, found)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table in it."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
