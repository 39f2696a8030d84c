"""Plans in live engines, eager and compiled: every site, neighbours to the bit, what is left when plans go, prompts in chunks (D1 to D4).

What is expected comes from plain transformers with torch hooks, and to the bit from the same batch without the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import plan_cases
import pytest
import torch
from here import start_here, values
from oracle import Plain, close
from plan_cases import tokens
from toy_selector import Around, Every

from midstream import VLLM, Capture, Clamp, Patch, Span, Steer
from midstream.runtime.plan_host import PlanHost
from midstream.settings import BUILDABLE

pytestmark = pytest.mark.engine

FRANCE = "The capital of France is"  # 5 tokens
ITALY = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"  # 8 tokens
HIDDEN, LAYERS, CHUNK = 256, 8, 64
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5}
# What `Plain` is to change where a site is none of its own: attention's output is what moves the stream before the MLP.
ORACLE_SITE = {"resid_mid": "attn_out"}
SITES = ["resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "attn_z", "mlp_in", "mlp_act", "mlp_out"]


@pytest.fixture(params=["engine", "compiled"])
def either(request: pytest.FixtureRequest) -> VLLM:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def chunked() -> Iterator[VLLM]:
    """An engine whose steps take 64 tokens: longer prompts come in chunks."""
    with start_here(enforce_eager=True, max_num_batched_tokens=CHUNK, enable_prefix_caching=False) as model:
        yield model


vector = functools.partial(plan_cases.vector, norm=40.0)


def on_rows(rows: Any, change: Any) -> Any:
    """An edit of the whole sequence for the oracle that touches some rows."""

    def edit(h: torch.Tensor) -> torch.Tensor:
        h[rows] = change(h[rows])
        return h

    return edit


def all_values(outputs: list[Any]) -> list[Any]:
    return [values(output) for output in outputs]


def counted(model: VLLM, name: str) -> int:
    return sum(worker[name] for worker in model.gauges())


# ------------------------------------------------------------------------------------------------- row D1, and D3's sites


@pytest.mark.parametrize("site", SITES)
def test_every_site_on_a_compiled_engine_and_its_neighbours(compiled: VLLM, plain: Plain, site: str) -> None:
    """In the graphs or off them; the neighbour's greedy tokens are its own all the same."""
    width = plain.run(FRANCE).sites[site, 3].flatten(1).shape[1]
    v = vector(1, norm=6.0, width=width)
    off_graph = counted(compiled, "off_graph_steps")
    steered, neighbour = compiled.generate(
        [FRANCE, EIFFEL],
        plan=[[Steer(site, layers=3, vector=v), Capture(site, layers=3, positions="all", when="after")], None],
        max_tokens=5, **GREEDY,
    )  # fmt: skip
    edits = {(ORACLE_SITE.get(site, site), 3): lambda h: h + v}
    ids = plain.generate(FRANCE, 5, edits)
    assert tokens(steered) == ids
    sites = plain.run(plain.ids(FRANCE) + ids[:-1], edits).sites
    close(steered.captures[site, 3], sites[site, 3].flatten(1))
    assert tokens(neighbour) == plain.generate(EIFFEL, 5)
    assert counted(compiled, "off_graph_steps") - off_graph == (0 if site in BUILDABLE else 5)


PLACES = [
    {"phase": "both"},
    {"phase": "prefill"},
    {"phase": "decode"},
    {"positions": [1, -2]},
    {"positions": Span("France")},
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("norm_match", [False, True])
def test_steers_by_place_and_norm_in_the_compiled_forward(
    compiled: VLLM, plain: Plain, place: dict[str, Any], norm_match: bool
) -> None:
    a, b = vector(1), vector(2)
    steers = [
        Steer("resid_post", layers=[2, 5], vector=a, **place),
        Steer("resid_post", layers=[2, 5], vector=b, scale=0.5, norm_match=norm_match),
    ]
    (output,) = compiled.generate(
        FRANCE, plan=[*steers, Capture("resid_post", positions="all")], max_tokens=5, **GREEDY
    )
    rows: Any = [slice(0, None), slice(0, 5), slice(5, None), [1, 3], [3]][PLACES.index(place)]

    def edit(h: torch.Tensor) -> torch.Tensor:
        both = 0.5 * (b * h.norm(dim=-1, keepdim=True) / b.norm() if norm_match else b) + torch.zeros_like(h)
        both[rows] += a
        return h + both

    edits = {("resid_post", 2): edit, ("resid_post", 5): edit}
    ids = plain.generate(FRANCE, 5, edits)
    assert tokens(output) == ids
    sites = plain.run(plain.ids(FRANCE) + ids[:-1], edits).sites
    close(output.captures["resid_post", 7], sites["resid_post", 7])


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
    plans = [[Steer("resid_post", layers=3, vector=vector(i, norm=400.0))] if i % 3 == 1 else None for i in range(24)]
    params = {"temperature": 0.0, "max_tokens": 15, "stop": ["Museum", "capital"]}  # so that they end one by one
    before = [tokens(output) for output in either.generate(prompts, **params)]
    planned = [tokens(output) for output in either.generate(prompts, plan=plans, **params)]
    assert len({len(each) for each in planned}) > 1
    assert [planned[i] for i in range(24) if i % 3 != 1] == [before[i] for i in range(24) if i % 3 != 1]
    assert sum(planned[i] != before[i] for i in range(1, 24, 3)) >= 4


def test_a_plan_for_all_and_named_vectors_leave_nothing(either: VLLM) -> None:
    prompts = [FRANCE, EIFFEL]
    before = all_values(either.generate(prompts, max_tokens=6, **GREEDY))
    either.vectors["v"] = vector(4)
    either.plan = [Steer("resid_post", layers=3, vector="v"), Clamp("resid_post", layers=5, direction="v")]
    try:
        during = all_values(either.generate(prompts, max_tokens=6, **GREEDY))
    finally:
        either.plan = None
        del either.vectors["v"]
    assert during[0] != before[0] and during[1] != before[1]
    assert all_values(either.generate(prompts, max_tokens=6, **GREEDY)) == before


# ---------------------------------------------------------------------------------------------- chunked prefill (D1, D4)


def long_prompt(plain: Plain, count: int = 150) -> list[int]:
    text = "The capital of France is Paris. The capital of Italy is Rome. The Eiffel Tower is in the city of"
    return (plain.ids(text) * 8)[:count]


PLACES_IN_CHUNKS = [*PLACES[:3], {"positions": range(20, 120)}]


@pytest.mark.parametrize("place", PLACES_IN_CHUNKS, ids=str)
def test_steers_reach_every_chunk_of_a_prompt(chunked: VLLM, plain: Plain, place: dict[str, Any]) -> None:
    v, prompt = vector(1), long_prompt(plain)
    plan = [
        Steer("resid_post", layers=[1, 4], vector=v, **place),
        Capture("resid_post", layers=[4, 7], positions="all"),
    ]
    steered, other = chunked.generate([prompt, prompt], plan=[plan, None], max_tokens=4, **GREEDY)
    rows = [slice(0, None), slice(0, 150), slice(150, None), slice(20, 120)][PLACES_IN_CHUNKS.index(place)]
    edit = on_rows(rows, lambda h: h + v)
    edits = {("resid_post", 1): edit, ("resid_post", 4): edit}
    ids = plain.generate(prompt, 4, edits)
    assert tokens(steered) == ids
    assert tokens(other) == plain.generate(prompt, 4)
    sites = plain.run(prompt + ids[:-1], edits).sites
    assert steered.captures.positions["resid_post", 7] == list(range(153))
    close(steered.captures["resid_post", 7], sites["resid_post", 7])
    close(steered.captures["resid_post", 4], sites["resid_post", 4] - edit(torch.zeros(153, HIDDEN)))


def test_patches_on_both_sides_of_the_borders_of_chunks(chunked: VLLM, plain: Plain) -> None:
    """Two prompts of a batch: the second one's chunks begin wherever the first one leaves off."""
    prompt, v = long_prompt(plain), vector(2)
    positions = [0, 63, 64, 127, 128, 149]
    plan = [
        Patch("resid_post", layer=1, position=positions, source=v, alpha=0.5),
        Capture("resid_post", layers=[1, 6], positions=[*positions, 1, 148], when="after"),
    ]
    edits = {("resid_post", 1): on_rows(positions, lambda h: 0.5 * h + 0.5 * v)}
    for output in chunked.generate([prompt, prompt], plan=[plan, plan], max_tokens=3, **GREEDY):
        ids = plain.generate(prompt, 3, edits)
        assert tokens(output) == ids
        sites = plain.run(prompt, edits).sites
        for layer in (1, 6):
            rows = output.captures.positions["resid_post", layer]
            assert rows == sorted([*positions, 1, 148])
            close(output.captures["resid_post", layer], sites["resid_post", layer][rows])


@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        ("last_prompt", [149]),
        ("all_prompt", list(range(150))),
        ("all_generated", [150, 151, 152]),
        ("all", list(range(153))),
        ([-1, 63, 64, 0], [0, 63, 64, 149]),
        (Around((1,), (0, 2)), [*range(1, 148, 3), 148, 149, 150, 152]),
        (Every(2), [150, 152]),
    ],
)
def test_every_selector_over_chunks(chunked: VLLM, plain: Plain, positions: Any, rows: list[int]) -> None:
    prompt = long_prompt(plain)
    outputs = chunked.generate(
        [prompt[:70], prompt, prompt[:10]],
        plan=[None, [Capture("mlp_out", layers=[0, 6], positions=positions)], None],
        max_tokens=4, **GREEDY,
    )  # fmt: skip
    sites = plain.run(prompt + plain.generate(prompt, 4)[:-1]).sites
    for layer in (0, 6):
        assert outputs[1].captures.positions["mlp_out", layer] == rows
        close(outputs[1].captures["mlp_out", layer], sites["mlp_out", layer][rows])


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
