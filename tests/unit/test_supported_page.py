"""Row N9: the page of supported models has a line for every decoder of vLLM's registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm
from vllm.model_executor.models import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")


def table(part: str) -> list[list[str]]:
    lines = PAGE.partition(f"<!-- {part} -->")[2].partition("<!-- end -->")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_every_decoder_of_the_registry_has_a_line() -> None:
    results = map(
        json.loads, (ROOT / "benchmarks" / "results" / "models.jsonl").read_text(encoding="utf-8").splitlines()
    )
    if vllm.__version__.partition("+")[0] not in {line["vllm"] for line in results}:
        pytest.skip("the table is of another version of vLLM")
    further = registry._TRANSFORMERS_SUPPORTED_MODELS.items()
    decoders = {*registry._TEXT_GENERATION_MODELS, *(name for name, (_, cls) in further if "MultiModal" not in cls)}
    named = {row[1].strip("`") for row in table("summary")} | {row[0].strip("`") for row in table("unsupported")}
    assert decoders - named == set()


def test_every_line_has_numbers_or_a_reason() -> None:
    for row in table("summary"):
        assert all(float(number.split()[0]) >= 0 for number in row[4:6])
    assert all(len(row) == 2 and row[1] for row in table("unsupported"))
