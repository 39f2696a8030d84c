"""A new selector of captured rows is one class, from outside the package too (row K6): `toy_selector` has some.

Everything else follows: the wire, the checks, the engine's steps, sinks, records and collections. Rows are compared with plain
transformers; the expected positions are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from oracle import Plain, close
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, generated_with, tokens
from toy_selector import Around, Every, LastTwo

from midstream import Capture, GeneratedTokens, Patch, Plan, Probe, Span, Subsample
from midstream.errors import CaptureError, PlanError
from midstream.plan.selections import Selector, Without

# Of a prompt of 5 tokens and 9 generated ones, whose last one has no row.
EXPECTED: list[tuple[Selector, list[int]]] = [
    (Every(3), [5, 8, 11]),
    (Every(1, skipped=1), [6, 7, 8, 9, 10, 11, 12]),
    (Every(4, skipped=99), []),
    (LastTwo(), [3, 4]),
    (Around((0,), (0, 6)), [0, 3, 4, 5, 11]),
    (Subsample(0.5, of="all", seed=7), [1, 2, 5, 7, 8, 11]),
    (Subsample(0.5, skip=2, of="all", seed=7), [2, 5, 7, 8, 11]),
    (Subsample(0.5, seed=7), [1, 2]),
    (Subsample(0.5, of="all_generated", seed=7), [5, 7, 8, 11]),
    (Subsample(1.0, skip=1), [1, 2, 3, 4]),
    (GeneratedTokens(2), [7]),
    (GeneratedTokens([6, 0, 99]), [5, 11]),
    (Without(Around((0,), (0, 6)), (0, 4)), [3, 5, 11]),
    (Without("all", (1, 3)), [0, 2, 4, *range(5, 13)]),
    (Without((0, -1), (0,)), [4]),
]


@pytest.mark.parametrize(("selector", "rows"), EXPECTED, ids=str)
def test_a_selector_from_outside_chooses_rows(model: Any, plain: Plain, selector: Selector, rows: list[int]) -> None:
    (output,) = model.generate(
        FRANCE, plan=Capture("resid_post", layers=[3], positions=selector), max_tokens=9, **GREEDY
    )
    ids, ran = generated_with(plain, {}, 9)
    assert tokens(output) == ids and output.captures.positions["resid_post", 3] == rows
    found = output.captures["resid_post", 3]
    assert found.shape == (len(rows), HIDDEN)
    if rows:
        close(found, ran.sites["resid_post", 3][rows])


def test_selectors_side_by_side_and_together(model: Any, plain: Plain) -> None:
    """Different ones at different sites, two at one site, and one beside a word, for prompts of two lengths at once."""
    plan = [
        *(Capture("resid_post", layers=layer, positions=each) for layer, (each, _) in enumerate(EXPECTED[:8])),
        Capture("mlp_out", layers=2, positions=Every(3)),
        Capture("mlp_out", layers=2, positions=LastTwo()),
        Capture("attn_out", layers=2, positions=Every(4)),
        Capture("attn_out", layers=2, positions="last_prompt"),
    ]
    for output, prompt in zip(
        model.generate([FRANCE, EIFFEL], plan=plan, max_tokens=9, **GREEDY), (FRANCE, EIFFEL), strict=True
    ):
        ids, ran = generated_with(plain, {}, 9, prompt)
        assert tokens(output) == ids
        found, n = output.captures, len(plain.ids(prompt))
        if prompt == FRANCE:
            assert [found.positions["resid_post", layer] for layer in range(8)] == [rows for _, rows in EXPECTED[:8]]
        assert found.positions["mlp_out", 2] == [n - 2, n - 1, n, n + 3, n + 6]
        assert found.positions["attn_out", 2] == [n - 1, n, n + 4]
        for key in found:
            rows = found.positions[key]
            if rows:
                close(found[key], ran.sites[key][rows])


def splitmix64(number: int) -> int:
    """The output of this number, from 1, of the generator of Steele et al. 2014 that begins with 0."""
    mixed = number * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@pytest.mark.parametrize("length", [1, 7, 200])
def test_a_subsample_is_a_hash_of_seed_length_and_position(length: int) -> None:
    def chosen(number: int, length: int) -> bool:
        return splitmix64(splitmix64(splitmix64(3 + 1) + length + 1) + number + 1) / 2**64 < 0.3

    sample = Subsample(0.3, of="all", seed=3)
    found = sample.of_prompt(np.arange(length), length)
    assert found.tolist() == [chosen(position, length) for position in range(length)]
    assert sample.of_generated(np.arange(50)).tolist() == [chosen(number, 0) for number in range(50)]
    chunks = [sample.of_prompt(np.arange(length)[first : first + 3], length) for first in range(0, length, 3)]
    assert np.array_equal(np.concatenate(chunks), found)  # as an engine asks, step by step


def test_a_subsample_has_about_the_fraction_asked_for_and_is_another_with_another_seed() -> None:
    positions, length = np.arange(100_000), 100_000
    for fraction in (0.0, 0.01, 0.5, 1.0):
        shares = [Subsample(fraction, seed=seed).of_prompt(positions, length).mean() for seed in range(5)]
        np.testing.assert_allclose(shares, fraction, atol=4 * (fraction * (1 - fraction) / length) ** 0.5)
    one = Subsample(0.5).of_prompt(positions, length)
    for other in (Subsample(0.5, seed=1).of_prompt(positions, length), Subsample(0.5).of_prompt(positions, length + 1)):
        assert abs((one == other).mean() - 0.5) < 0.01
    assert not Subsample(1.0, skip=4).of_prompt(np.arange(4), 4).any()  # a prompt shorter than what is skipped


def test_a_probe_scores_a_subsample(model: Any) -> None:
    probe = Probe("resid_post", layer=3, weight=[1.0] * HIDDEN, name="p", positions=Subsample(0.5, of="all", seed=7))
    capture = Capture("resid_post", layers=3, positions="all")
    (output,) = model.generate(FRANCE, plan=[probe, capture], max_tokens=9, **GREEDY)
    rows = [1, 2, 5, 7, 8, 11]
    assert output.scores.positions["p"] == rows
    close(output.scores["p"][:, 0], output.captures["resid_post", 3][rows].float().sum(-1))


@pytest.mark.engine
def test_cached_prompts_are_computed_from_the_first_selected_row_on(engine: Any, plain: Plain) -> None:
    prompt = list(range(10, 210))
    sites = plain.run(prompt + plain.generate(prompt, 5)[:-1]).sites
    cached = {}
    for selector, rows in (
        (Every(3), [200, 203]),
        (LastTwo(), [198, 199]),
        (Around((1,)), sorted({*range(1, 200, 3), 198})),
        (Every(1), [200, 201, 202, 203]),
    ):
        plan = [Capture("mlp_out", layers=6, positions=selector)]
        (output,) = engine.generate([prompt], plan=plan, max_tokens=5, **GREEDY)
        assert output.captures.positions["mlp_out", 6] == rows
        close(output.captures["mlp_out", 6], sites["mlp_out", 6][rows])
        cached[selector] = getattr(output, "num_cached_tokens", None)
    if cached[LastTwo()] is not None:  # the server does not tell
        assert cached[LastTwo()] == cached[Every(1)] > 0 == cached[Around((1,))]


def test_sinks_get_the_selected_rows_and_no_others(model: Any, plain: Plain, tmp_path: Path) -> None:
    taken: dict[int, torch.Tensor] = {}

    def take(request: str, site: str, layer: int, positions: list[int], rows: torch.Tensor) -> None:
        assert not taken.keys() & set(positions)
        taken.update(zip(positions, rows.clone(), strict=True))

    plan = [
        Capture("resid_post", layers=3, positions=Every(3), to=take),
        Capture("resid_post", layers=3, positions=Around((1,), (7,)), to=None),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=9, **GREEDY)
    _, ran = generated_with(plain, {}, 9)
    assert output.captures.positions["resid_post", 3] == [1, 3, 4, 12]
    assert sorted(taken) == [5, 8, 11]
    close(torch.stack([taken[position] for position in (5, 8, 11)]), ran.sites["resid_post", 3][[5, 8, 11]])
    store = model.collect(
        [FRANCE], plan=Capture("resid_post", layers=3, positions=Every(3)), to=tmp_path, max_tokens=9, **GREEDY
    )
    (stored,) = store.values()
    assert stored.positions["resid_post", 3] == [5, 8, 11]
    close(stored["resid_post", 3], ran.sites["resid_post", 3][[5, 8, 11]])
    with pytest.raises(CaptureError, match="another plan"):
        model.collect(
            [FRANCE], plan=Capture("resid_post", layers=3, positions=Every(2)), to=tmp_path, max_tokens=9, **GREEDY
        )


def test_a_run_recorded_with_a_selector_has_its_positions(model: Any, plain: Plain) -> None:
    run = model.record(FRANCE, "resid_post", layers=3, positions=LastTwo(), name="two")
    assert run.positions == (3, 4)
    plan = [
        Patch("resid_post", layer=3, position=0, source=run, source_position=4),
        Capture("resid_post", layers=3, positions=0, when="after"),
    ]
    (output,) = model.generate(EIFFEL, plan=plan, max_tokens=1, **GREEDY)
    close(output.captures["resid_post", 3], plain.run(FRANCE).sites["resid_post", 3][4:5])
    with pytest.raises(PlanError, match=r"record: positions is Every\(n=2, skipped=0\)"):
        model.record(FRANCE, "resid_post", positions=Every(2))
    model.runs.delete("two")


def test_a_selector_goes_over_the_wire() -> None:
    plan = Plan.of(
        [Capture("mlp_out", positions=Around((0, 2), (1,))), Capture("mlp_out", layers=1, positions=LastTwo())]
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_wire())), trusted=False) == plan
    assert plan.to_wire()["interventions"][1]["positions"] == {"selector": "last_two"}
    own = [Subsample(0.5), Subsample(0.5, seed=1), Without("all", (0,)), Without(Without((2, -1), (2,)), (0,))]
    plan = Plan.of([Capture("mlp_out", layers=layer, positions=each) for layer, each in enumerate(own)])
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).hash == plan.hash
    each = (*own, Without(own[0], (0,)), Without(own[1], (0,)), Every(2), Every(3), LastTwo(), "all")
    assert len({Plan.of(Capture("mlp_out", positions=positions)).hash for positions in each}) == 10


def read(kind: Any, **options: Any) -> Callable[[], Any]:
    capture = {"kind": "capture", "site": "mlp_out", "positions": {"selector": kind, "options": options}}
    return lambda: Plan.from_wire({"interventions": [capture]})


@dataclass
class Loose(Selector):  # not frozen, so it has no hash
    kind = "loose"
    n: int = 1


@dataclass(frozen=True)
class Nameless(Selector):
    n: int = 1


@dataclass(frozen=True)
class Holding(Selector):
    kind = "holding"
    what: Any


@dataclass(frozen=True)
class Broken(Selector):
    """Selects rows of the prompt and of generated tokens by what it is given, which may be wrong."""

    kind = "broken"
    where: str
    what: str

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self._chosen(positions) if self.where == "prompt" else positions >= 0

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return self._chosen(numbers) if self.where == "generated" else numbers >= 0

    def _chosen(self, given: np.ndarray) -> Any:
        if self.what == "raises":
            raise ValueError("no such token")
        return {"numbers": given, "short": given[1:] >= 0, "none": None}[self.what]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (read("evry"), r"positions is 'evry'; allowed: the kind of a selector: did you mean 'every'"),
        (read(["x"]), "allowed: the kind of a selector"),
        (read(""), "allowed: the kind of a selector"),
        (read("every", m=1), r"positions: every with \{'m': 1\}: .*unexpected keyword"),
        (read("every", n="x"), None),
        (lambda: Capture("mlp_out", positions=Loose()), "allowed: a frozen dataclass of plain data"),
        (lambda: Capture("mlp_out", positions=Nameless()), r"is Nameless\(n=1\); allowed: .* with a kind"),
        (lambda: Capture("mlp_out", positions=Holding(torch.ones(1))), "Holding"),
        (lambda: Capture("mlp_out", positions=Holding([1])), "allowed: a frozen dataclass of plain data"),
        (lambda: Subsample(1.5), r"Subsample.fraction is 1.5; allowed: a number from 0 to 1"),
        (lambda: Subsample(0.5, skip=-1), r"Subsample.skip is -1; allowed: a whole number, 0 or more"),
        (lambda: Subsample(0.5, of="prompt"), r"Subsample.of is 'prompt'; allowed: 'all_prompt' or"),
        (read("subsample", fraction="x"), r"Subsample.fraction is 'x'"),
        (read("without", positions={"selector": "evry"}, left_out=[0]), "did you mean 'every'"),
        (read("without", positions="some", left_out=[0]), r"Without.positions is 'some'"),
        (lambda: Capture("mlp_out", positions=Without(Span("a"), (0,))), "Span"),
    ],
    ids=[
        *("kind", "list", "empty", "option", "late", "loose", "nameless", "tensor", "unhashable"),
        *("fraction", "skip", "of", "fraction read", "nested", "word", "span"),
    ],
)
def test_what_is_no_selector_is_refused(make: Callable[[], Any], message: str | None, hf: Any) -> None:
    if message is None:  # its class does not check, so asking it fails
        plan = make()
        with pytest.raises(PlanError, match=r"Every\(n='x', skipped=0\): of_generated raised"):
            hf.generate(FRANCE, plan=plan, max_tokens=2)
        return
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize("where", ["prompt", "generated"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raises", "raised ValueError: no such token"),
        ("numbers", "allowed: bool"),
        ("short", "allowed: bool"),
        ("none", "allowed: bool"),
    ],
)
def test_a_selector_that_fails_ends_its_request(hf: Any, where: str, what: str, message: str) -> None:
    with pytest.raises(PlanError, match=rf"of_{where} .*{message}"):
        hf.generate(FRANCE, plan=Capture("resid_post", layers=3, positions=Broken(where, what)), max_tokens=3)


def test_a_kind_belongs_to_one_class() -> None:
    with pytest.raises(ValueError, match="'every' is taken by Every"):
        type("Other", (Selector,), {"kind": "every"})
