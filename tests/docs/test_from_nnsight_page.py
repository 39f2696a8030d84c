"""J9: every line of the tables of docs/from-nnsight.md is run on both models, and does what the page says of it."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream
from midstream.errors import MidstreamError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-nnsight.md"
HEAD = "| nnsight | `LanguageModel` | `VLLM` |"
CODE = re.compile(r"`([^`]+)`")
EIFFEL, PARIS = "The Eiffel Tower is in the city of", "The capital of France is"


def lines() -> list[tuple[int, list[str]]]:
    """The lines of the tables, with their numbers and cells."""
    found, inside = [], False
    for number, line in enumerate(PAGE.read_text().splitlines(), start=1):
        inside = line == HEAD or (inside and line.startswith("|"))
        if inside and line != HEAD and not line.startswith("|---"):
            found.append((number, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return found


def code_of(cell: str) -> str:
    """The code in a cell: one statement for each span. What follows a span that ends with a colon is indented below it."""
    code, indent = [], 0
    for span in CODE.findall(cell):
        code.append(" " * indent + span)
        indent += 4 if span.endswith(":") else 0
    return "\n".join(code) + "\n"


def codes_of(cell: str) -> list[str]:
    """The code to run behind what a cell says: spans that are statements."""
    spans = [span for span in CODE.findall(cell) if " = " in span or span.startswith("with ")]
    return [code_of("".join(f"`{span}`" for span in spans))] if spans else []


def padded(tokenizer: Any, *texts: str) -> dict[str, torch.Tensor]:
    rows = [tokenizer(text)["input_ids"] for text in texts]
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
    }


def save_last(value: Any) -> Any:
    return value[-1].save()


def run(model: Any, code: str, where: str) -> None:
    names = {
        "model": model,
        "torch": torch,
        "nnsight": midstream,
        "prompt": PARIS,
        "a": PARIS,
        "b": EIFFEL,
        "encoding": padded(model.tokenizer, PARIS),
        "padded": padded(model.tokenizer, PARIS, EIFFEL),
        "v": torch.ones(256),
        "sae": torch.nn.Linear(256, 256),
        "save_last": save_last,
    }
    filename = f"<{where}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    exec(compile(code, filename, "exec"), names)


@pytest.fixture(scope="module")
def own() -> Any:
    """A `LanguageModel` that no other test has: the page attaches modules to it."""
    return midstream.LanguageModel(midstream.demo_model(), dtype=torch.float32)


@pytest.mark.engine
@pytest.mark.parametrize(("number", "cells"), lines(), ids=lambda value: str(value) if isinstance(value, int) else "")
def test_j9_every_line_of_the_page_does_what_the_page_says(
    request: pytest.FixtureRequest, number: int, cells: list[str]
) -> None:
    theirs, *said = cells
    assert len(said) == 2, cells
    for fixture, cell in zip(("own", "engine"), said, strict=True):
        model = request.getfixturevalue(fixture)
        where = f"docs/from-nnsight.md:{number} on {fixture}"
        try:
            if cell.startswith("an error"):
                with pytest.raises(MidstreamError):
                    run(model, code_of(theirs), where)
                for code in codes_of(cell):
                    run(model, code, f"{where}, instead")
            else:
                assert cell.startswith(("the same", "differs: ")), cell
                run(model, code_of(theirs), where)
                for code in codes_of(cell):
                    run(model, code, f"{where}, instead")
        finally:
            model.clear_edits()


def test_j9_the_page_has_its_lines() -> None:
    assert len(lines()) > 40


def test_a_span_that_ends_with_a_colon_holds_what_follows() -> None:
    assert code_of("`with a:` `b()` `for c in d:` `e()`") == "with a:\n    b()\n    for c in d:\n        e()\n"
    assert codes_of("differs: `x` is a list. `with a: y = 1` does it") == ["with a: y = 1\n"]
