"""`model.activations` (row O3): batches from running prompts, without a disk. What is expected comes from plain transformers with hooks."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from oracle import Plain, close
from plan_cases import EIFFEL, FRANCE, HIDDEN, ITALY

from midstream import Capture, Steer
from midstream.errors import CaptureError, MidstreamError, ParameterError, PlanError

PROMPTS = [FRANCE, EIFFEL, ITALY, "The capital of Spain is"]


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[torch.Tensor]:
    """The rows of each prompt."""
    return [plain.run(prompt).sites["resid_post", 5] for prompt in PROMPTS]


def sorted_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_of_every_prompt_comes_once(model: Any, expected: list[torch.Tensor], shuffle: bool) -> None:
    batches = list(model.activations(PROMPTS, "resid_post", 5, batch_size=8, shuffle=shuffle))
    assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
    rows, each = torch.cat(batches), torch.cat(expected)
    close(sorted_rows(rows), sorted_rows(each))
    assert torch.allclose(rows, each, atol=1e-3) == (not shuffle)


def test_epochs_of_several_sites_with_their_tokens(model: Any, plain: Plain) -> None:
    batches = list(
        model.activations(
            PROMPTS, ["resid_post", "mlp_out"], [2, 5], batch_size=16, epochs=3, with_context=True, buffer_rows=20
        )
    )
    sites = [plain.run(prompt).sites for prompt in PROMPTS]
    ids = [plain.ids(prompt) for prompt in PROMPTS]
    seen = []
    for batch in batches:
        for i, (number, position) in enumerate(zip(batch.requests.tolist(), batch.positions.tolist(), strict=True)):
            seen.append((number, position))
            which = prompt_of(batch, i, sites)
            assert int(batch.token_ids[i]) == ids[which][position]
            for key, rows in batch.rows.items():
                close(rows[i], sites[which][key][position])
    assert set(batches[0].rows) == set(itertools.product(["resid_post", "mlp_out"], [2, 5]))
    assert Counter(seen) == Counter(3 * [(i, p) for i, each in enumerate(ids) for p in range(len(each))])


def prompt_of(batch: Any, i: int, sites: list[Any]) -> int:
    """Which prompt a row is of, by its value."""
    position, row = int(batch.positions[i]), batch.rows["resid_post", 5][i]
    near = [
        float((each["resid_post", 5][position] - row).abs().max()) if position < len(each["resid_post", 5]) else 1e9
        for each in sites
    ]
    return min(range(len(sites)), key=near.__getitem__)


def test_a_plan_and_generated_rows(model: Any, plain: Plain) -> None:
    v = torch.zeros(HIDDEN)
    v[0] = 50.0
    (batch,) = model.activations([FRANCE], "resid_post", 5, plan=Steer("resid_post", layers=5, vector=v), when="after", positions="all",
                                 max_tokens=4, temperature=0.0, shuffle=False, with_context=True)  # fmt: skip
    (output,) = model.generate([FRANCE], plan=Steer("resid_post", layers=5, vector=v), max_tokens=4, temperature=0.0)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    assert batch.token_ids.tolist() == ids[:-1] and batch.positions.tolist() == list(range(len(ids) - 1))
    close(batch.rows, plain.run(ids[:-1], {("resid_post", 5): lambda h: h + v}).sites["resid_post", 5])


def test_prompts_are_read_as_they_are_needed(model: Any) -> None:
    """The iterator is endless. Seen failing where the thread does not wait: it reads on while no batch is taken."""
    taken = 0

    def endless() -> Any:
        nonlocal taken
        for prompt in itertools.cycle(PROMPTS):
            taken += 1
            yield prompt

    with model.activations(endless(), "resid_post", 5, batch_size=8, buffer_rows=64) as activations:
        next(activations)
        deadline = time.monotonic() + 30
        before = -1
        while before != taken:  # until the next buffer is full
            assert time.monotonic() < deadline
            before = taken
            time.sleep(0.5)
        assert taken < 32 + 3 * 64
        for _ in range(40):
            assert next(activations).shape == (8, HIDDEN)
        assert taken > before
    with pytest.raises(StopIteration):
        next(activations)
    assert not [each for each in threading.enumerate() if "midstream-activations" in each.name]


def test_requests_are_the_numbers_of_prompts(model: Any, plain: Plain) -> None:
    """Seen failing where the shuffled prompts are numbered."""
    ids = [plain.ids(prompt) for prompt in PROMPTS]
    for batch in model.activations(PROMPTS, "resid_post", 5, epochs=2, batch_size=16, with_context=True):
        for token, position, number in zip(*(each.tolist() for each in batch[1:]), strict=True):
            assert ids[number][position] == token


def test_after_an_error_no_batches_come_in_silence(model: Any) -> None:
    activations = model.activations([FRANCE, "", ITALY], "resid_post", 5, batch_size=2, shuffle=False)
    with pytest.raises(MidstreamError):
        list(activations)
    with pytest.raises(CaptureError, match="have ended before"):
        next(activations)


@pytest.mark.parametrize("epochs", [1, None])
def test_prompts_without_such_rows_are_an_error(model: Any, epochs: int | None) -> None:
    """Seen failing: endless epochs never ended."""
    with pytest.raises(CaptureError, match="no rows at these positions"):
        next(model.activations(PROMPTS, "resid_post", 5, positions="all_generated", epochs=epochs))


def test_one_prompt_is_one_prompt(model: Any, expected: list[torch.Tensor]) -> None:
    (batch,) = model.activations(FRANCE, "resid_post", 5, shuffle=False)
    close(batch, expected[0])


def test_what_is_wrong_is_said(model: Any) -> None:
    with pytest.raises(ParameterError, match="an iterator has one epoch"):
        model.activations(iter(PROMPTS), "resid_post", 5, epochs=None)
    with pytest.raises(ParameterError, match="has a Capture of resid_post"):
        model.activations(PROMPTS, "resid_post", 5, plan=Capture("resid_post", positions="all"))
    for epochs in (0, -1, 2.5):
        with pytest.raises(PlanError, match="epochs is"):
            model.activations(PROMPTS, "resid_post", 5, epochs=epochs)
    with pytest.raises(PlanError, match="layers is 99"):
        next(model.activations(PROMPTS, "resid_post", 99))
    with pytest.raises(PlanError, match="site is 'nothing'"):
        model.activations(PROMPTS, "nothing", 5)
