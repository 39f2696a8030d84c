"""Figures of benchmarks: the lines of results.jsonl, and the pages that scripts/write_benchmarks.py makes of them."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {
    "date",
    "subject",
    "command",
    "hardware",
    "versions",
    "runner",
    "shape",
    "load",
    "row",
    "measure",
    "unit",
    "value",
}
SOMETIMES = {"commit", "system", "low", "high", "rounds"}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "write_benchmarks.py"))


@pytest.fixture
def use(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has the script read these figures."""
    file, names = tmp_path / "results.jsonl", script["newest"].__globals__
    monkeypatch.setitem(names, "FILE", file)

    def write(*figures: dict[str, Any]) -> None:
        script["figures"].cache_clear()
        file.write_text("".join(json.dumps(figure) + "\n" for figure in figures))

    yield write
    script["figures"].cache_clear()


def test_pages_have_the_figures_of_the_file(script: dict[str, Any]) -> None:
    for page in script["PAGES"]:
        assert script["written"](page) == page.read_text(encoding="utf-8"), f"{page}: run scripts/write_benchmarks.py"


def test_every_table_and_subject_is_on_a_page(script: dict[str, Any]) -> None:
    shown = {name for page in script["PAGES"] for name in script["BLOCK"].findall(page.read_text(encoding="utf-8"))}
    assert shown == {*script["TABLES"], *script["SINGLE"], *(f"all {subject}" for subject in script["SUBJECTS"])}


def test_every_picked_figure_exists(script: dict[str, Any]) -> None:
    assert all(map(script["newest"], script["SINGLE"].values()))
    for name, table in script["TABLES"].items():
        titles, _, *rows = [line.strip("| ").split(" | ") for line in script["picked"](table).splitlines()]
        assert rows, name
        assert all(any(len(row) > k and row[k].strip() for row in rows) for k in range(1, len(titles))), name


def test_every_line_says_what_was_measured(script: dict[str, Any]) -> None:
    for number, line in enumerate((ROOT / "benchmarks/results/results.jsonl").read_text().splitlines(), start=1):
        figure = json.loads(line)
        assert figure.keys() >= ALWAYS and figure.keys() <= ALWAYS | SOMETIMES, number
        assert figure["subject"] in script["SUBJECTS"], number
        assert ("low" in figure) == ("high" in figure), number
        if "low" in figure:
            assert figure["low"] <= figure["value"] <= figure["high"] and figure["rounds"] > 1, number


def figure(value: float, **fields: Any) -> dict[str, Any]:
    common = {"date": "2026-01-01", "subject": "plans", "hardware": "a GPU", "versions": "vLLM 1", "command": "x.py"}
    return {
        **common,
        "runner": "v1",
        "shape": "tiny",
        "load": "",
        "row": "r",
        "measure": "m",
        "unit": "u",
        "value": value,
        **fields,
    }


def test_the_last_line_that_fits_is_the_newest(script: dict[str, Any], use: Any) -> None:
    use(figure(1.0), figure(2.5, low=2.0, high=3.0), figure(4.0, row="other"), figure(5.0, system="another system"))
    assert script["newest"]({"row": "r"}) == "2.5 (2.0 to 3.0)"
    assert script["newest"]({"row": "r", "system": "another system"}) == "5.0"
    assert script["newest"]({"row": "none"}) == ""


def test_a_traced_row_is_found_by_its_share(script: dict[str, Any], use: Any) -> None:
    use(
        figure(1.0, row="4 of 64 traced: halves"),
        figure(2.0, row="64 of 64 traced: halves"),
        figure(3.0, row="no trace"),
    )
    assert script["newest"]({"row": "halves", "share": "4 of 64"}) == "1.0"
    assert script["newest"]({"row": "no trace", "share": "4 of 64"}) == ""
    assert script["newest"]({"row": "no trace", "share": ("64 of 64", "")}) == "3.0"


def test_a_subject_has_only_the_newest_of_equal_runs(script: dict[str, Any], use: Any) -> None:
    use(figure(1.0), figure(2.0, date="2026-01-02"), figure(3.0, runner="v2"))
    shown = script["all_of"]("plans")
    assert "| r | 2.0 |" in shown and "| r | 3.0 |" in shown and "| r | 1.0 |" not in shown


def test_results_are_printed_and_appended(script: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from figures import Results  # the script has put its folder on the path

    file = tmp_path / "results.jsonl"
    arguments = argparse.Namespace(json=file, pp=2, tp=1, cpu=True, runner="v1", shape="tiny")
    results = Results(arguments, "plans", "equal, sync, 4 requests")
    assert results.add("no plan", "throughput", "of stock", [0.9, 1.0, 1.1]) == "1.0 (0.9 to 1.1)"
    assert results.add("stock vLLM", "throughput", "tok/s", [1234.4]) == "1,234"
    several, single = map(json.loads, file.read_text().splitlines())
    assert several.keys() - {"commit"} == ALWAYS | {"low", "high", "rounds"}
    assert (several["value"], several["low"], several["high"], several["rounds"]) == (1.0, 0.9, 1.1, 3)
    assert several["load"] == "equal, sync, 4 requests, PP=2" and several["shape"] == "bundled"
    assert (single["value"], single["rounds"], "low" in single) == (1234, 1, False)


def test_results_without_a_file_are_only_printed(script: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    from figures import Results

    arguments = argparse.Namespace(json=None, pp=1, tp=1, cpu=False, runner="v2", shape="tiny")
    assert Results(arguments, "captures", "").add("by a plan", "time", "s", [0.123, 0.123]) == "0.12 (0.12 to 0.12)"
