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

from midstream import Capture, Patch, Plan
from midstream.errors import CaptureError, PlanError
from midstream.plan.selections import Selector

# Of a prompt of 5 tokens and 9 generated ones, whose last one has no row.
EXPECTED: list[tuple[Selector, list[int]]] = [
    (Every(3), [5, 8, 11]),
    (Every(1, skipped=1), [6, 7, 8, 9, 10, 11, 12]),
    (Every(4, skipped=99), []),
    (LastTwo(), [3, 4]),
    (Around((0,), (0, 6)), [0, 3, 4, 5, 11]),
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
        *(Capture("resid_post", layers=layer, positions=each) for layer, (each, _) in enumerate(EXPECTED)),
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
            assert [found.positions["resid_post", layer] for layer in range(5)] == [rows for _, rows in EXPECTED]
        assert found.positions["mlp_out", 2] == [n - 2, n - 1, n, n + 3, n + 6]
        assert found.positions["attn_out", 2] == [n - 1, n, n + 4]
        for key in found:
            rows = found.positions[key]
            if rows:
                close(found[key], ran.sites[key][rows])


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
    hashes = {Plan.of(Capture("mlp_out", positions=each)).hash for each in (Every(2), Every(3), LastTwo(), "all")}
    assert len(hashes) == 4


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
    ],
    ids=["kind", "list", "empty", "option", "late", "loose", "nameless", "tensor", "unhashable"],
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
