"""Plans in live engines, eager and compiled: every site, neighbours to the bit, what is left when plans go, prompts in chunks (D1 to D4).

What is expected comes from plain transformers with torch hooks, and to the bit from the same batch without the plan. Row E1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import plan_cases
import pytest
from here import start_here, values
from plan_cases import tokens

from midstream import VLLM, Capture, Clamp, Patch, Steer
from midstream.runtime.plan_host import PlanHost

pytestmark = pytest.mark.engine

FRANCE = "The capital of France is"  # 5 tokens
ITALY = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"  # 8 tokens
HIDDEN, LAYERS, CHUNK = 256, 8, 64
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5}


@pytest.fixture(params=["engine", "compiled"])
def either(request: pytest.FixtureRequest) -> VLLM:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def chunked() -> Iterator[VLLM]:
    """An engine whose steps take 64 tokens: longer prompts come in chunks."""
    with start_here(enforce_eager=True, max_num_batched_tokens=CHUNK, enable_prefix_caching=False) as model:
        yield model


vector = functools.partial(plan_cases.vector, norm=40.0)


def all_values(outputs: list[Any]) -> list[Any]:
    return [values(output) for output in outputs]


def counted(model: VLLM, name: str) -> int:
    return sum(worker[name] for worker in model.gauges())


# ------------------------------------------------------------------------------------------------------- rows D2 and D3

PLANS = {
    "steer": lambda: [Steer("resid_post", vector=vector(1), scale=0.5)],
    "steer the prompt": lambda: [Steer("resid_post", layers=[0, 4], vector=vector(1), phase="prefill")],
    "steer what is generated": lambda: [Steer("resid_post", layers=[0, 4], vector=vector(1), phase="decode", norm_match=True)],
    "patch": lambda: [Patch("resid_post", layer=1, position=[0, 2], source=vector(2), alpha=0.5)],
    "clamp": lambda: [Clamp("resid_post", layers=[1, 2, 3], direction=vector(3), high=1.0)],
    "capture": lambda: [Capture("resid_post", positions="all")],
    "all": lambda: [
        Steer("resid_post", vector=vector(1), scale=0.5),
        Patch("resid_post", layer=1, position=[0, 2], source=vector(2)),
        Clamp("resid_post", layers=[1, 2, 3], direction=vector(3)),
        Capture("resid_post", positions="all"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_neighbours_are_byte_identical_and_nothing_stays(either: VLLM, kind: str) -> None:
    """Tokens and log-probabilities of the unplanned requests of a batch, and of the whole batch once the plan is gone."""
    prompts = [FRANCE, ITALY, EIFFEL, FRANCE]
    before = all_values(either.generate(prompts, max_tokens=6, **GREEDY))
    off_graph = counted(either, "off_graph_steps")
    planned = all_values(
        either.generate(prompts, plan=[PLANS[kind](), None, PLANS[kind](), None], max_tokens=6, **GREEDY)
    )
    assert counted(either, "off_graph_steps") == off_graph
    assert [planned[1], planned[3]] == [before[1], before[3]]
    assert (planned[0] == before[0]) == (planned[2] == before[2]) == (kind == "capture")
    assert all_values(either.generate(prompts, max_tokens=6, **GREEDY)) == before


def test_requests_that_come_and_go_beside_a_steered_one(either: VLLM) -> None:
    """The rows of a batch move as its requests end; more requests than the engine takes at once."""
    prompts = [EIFFEL, FRANCE, ITALY] * 8
    plans = [[Steer("resid_post", layers=3, vector=vector(i, 400.0))] if i % 3 == 1 else None for i in range(24)]
    params = {"temperature": 0.0, "max_tokens": 15, "stop": ["Museum", "capital"]}  # so that they end one by one
    before = [tokens(output) for output in either.generate(prompts, **params)]
    planned = [tokens(output) for output in either.generate(prompts, plan=plans, **params)]
    assert len({len(each) for each in planned}) > 1
    assert [planned[i] for i in range(24) if i % 3 != 1] == [before[i] for i in range(24) if i % 3 != 1]
    assert sum(planned[i] != before[i] for i in range(1, 24, 3)) >= 4


# ----------------------------------------------------------------------------------------- what the protections are for


def test_the_protection_matters_profiles_on_the_wrong_rows_move_the_neighbours(
    chunked: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are gated by the profiles that are laid out for each step; laid out for all rows alike, D2 fails."""
    prompts, plan = [FRANCE, ITALY, EIFFEL], [Steer("resid_post", layers=3, vector=vector(1))]
    before = all_values(chunked.generate(prompts, max_tokens=4, **GREEDY))
    lay_out = PlanHost._lay_out

    def everywhere(*args: Any, **options: Any) -> Any:
        profile = lay_out(*args, **options)
        return np.full_like(profile, profile.max())

    def shifted(*args: Any, **options: Any) -> Any:
        return np.roll(lay_out(*args, **options), 1)

    for wrong in (everywhere, shifted):
        with monkeypatch.context() as patch:
            patch.setattr(PlanHost, "_lay_out", wrong)
            planned = all_values(chunked.generate(prompts, plan=[plan, None, None], max_tokens=4, **GREEDY))
        assert planned[1] != before[1], wrong.__name__
    planned = all_values(chunked.generate(prompts, plan=[plan, None, None], max_tokens=4, **GREEDY))
    assert planned[1:] == before[1:] and planned[0] != before[0]
