"""Gated edits on both backends against plain hooks (M3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Plain, close
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, P, everything, generated_with, tokens, vector

from midstream import Clamp, Patch, Plan, Probe, Span, Steer, When
from midstream.errors import PlanError
from midstream.plan.ops import Apply
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Step

WEIGHT, V = vector(1, 1.0), vector(7, 60.0)
AT = ("resid_post", 2)


def probe(site: str = "resid_post", layer: int = 2, **options: Any) -> Probe:
    return Probe(site, **{"layer": layer, "weight": WEIGHT, "name": "p", **options})


class Gated:
    """The same edits by hooks of the oracle: of the rows whose score at `at` a condition holds for."""

    def __init__(self, condition: Any, edits: dict[Any, Any], at: Any = AT, weight: torch.Tensor = WEIGHT) -> None:
        self.edits: dict[Any, Any] = {point: self._edit(change, point == at) for point, change in edits.items()}
        self._condition, self._weight = condition, weight
        if at not in edits:
            self.edits[at] = self._read

    def _read(self, h: torch.Tensor) -> torch.Tensor:
        self.scores = h @ self._weight
        return h

    def _edit(self, change: Any, reads: bool) -> Any:
        def edit(h: torch.Tensor) -> torch.Tensor:
            if reads:
                self._read(h)
            return torch.where(self._condition(self.scores)[:, None], change(h), h)

        return edit


def middle(plain: Plain, count: int = 6, site: Any = AT, prompt: str = FRANCE) -> float:
    """A bound between the scores of the tokens, so that some have a higher score and some a lower."""
    scores = (generated_with(plain, None, count, prompt)[1].sites[site] @ WEIGHT).sort().values
    gaps = scores[1:] - scores[:-1]
    at = int(gaps[1:-1].argmax()) + 1
    return float(scores[at] + scores[at + 1]) / 2


@pytest.mark.parametrize("bounds", ["above", "below", "between"])
def test_edits_act_where_the_score_lies_within_bounds(model: Any, plain: Plain, bounds: str) -> None:
    at = middle(plain)
    given, condition = {
        "above": ({"above": at}, lambda s: s > at),
        "below": ({"below": at}, lambda s: s < at),
        "between": ({"above": at - 5, "below": at + 5}, lambda s: (s > at - 5) & (s < at + 5)),
    }[bounds]
    gate = When(
        probe(), **given, then=[Steer("resid_post", layers=[3, 5], vector=V), Steer("mlp_out", layers=3, vector=V)]
    )
    wanted = Gated(condition, dict.fromkeys([("resid_post", 3), ("resid_post", 5), ("mlp_out", 3)], lambda h: h + V))
    (output,) = model.generate(FRANCE, plan=[gate, everything(when="after")], max_tokens=6, **GREEDY)
    ids, ran = generated_with(plain, wanted.edits, 6)
    assert tokens(output) == ids
    for layer in range(8):
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer])
    acted = wanted._condition(wanted.scores)
    assert bounds == "between" or 0 < int(acted.sum()) < len(acted)


CASES = {
    "steer": (Steer("resid_post", layers=4, vector=V, scale=0.5), lambda h: h + 0.5 * V),
    "norm": (
        Steer("resid_post", layers=4, vector=V, scale=0.3, norm_match=True),
        lambda h: h + 0.3 * h.norm(dim=-1, keepdim=True) * V / V.norm(),
    ),
    "clamp": (
        Clamp("resid_post", layers=4, direction=V, low=-1.0, high=None, strength=0.5),
        lambda h: h + 0.5 * ((h @ V / V.norm()).clamp(min=-1.0) - h @ V / V.norm())[:, None] * V / V.norm(),
    ),
}


@pytest.mark.parametrize("case", [case for case in CASES if case != "apply"])
@pytest.mark.parametrize("site", [("resid_post", 4), ("resid_post", 2), ("mlp_out", 1)])
def test_every_kind_at_the_probes_site_and_behind_it(model: Any, plain: Plain, case: str, site: Any) -> None:
    """At the probe's own site the score is that of the value before the edits there."""
    edit, change = CASES[case]
    at = middle(plain, site=site)
    gate = When(probe(*site), above=at, then=edit)
    wanted = Gated(lambda s: s > at, {("resid_post", 4): change}, site)
    (output,) = model.generate(FRANCE, plan=[gate, everything(when="after")], max_tokens=6, **GREEDY)
    ids, ran = generated_with(plain, wanted.edits, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 4], ran.sites["resid_post", 4])


def test_a_gated_program(model: Any, plain: Plain) -> None:
    """Of the site's value and of another, earlier one."""
    from midstream.plan.steps import Ref

    at = middle(plain)
    steps = (Step("mul.Tensor", (Ref(-2), 0.25)), Step("add.Tensor", (INPUT, Ref(0))))
    program = Program(HIDDEN, "float32", steps, Ref(1), inputs=(HIDDEN,))
    gate = When(probe(), below=at, then=Apply("resid_post", layers=4, program=program, inputs=[("resid_post", 1)]))
    wanted = Gated(lambda s: s < at, {("resid_post", 4): lambda h: h + 0.25 * kept[0]})
    kept: list[torch.Tensor] = []

    def keep(h: torch.Tensor) -> torch.Tensor:
        kept[:] = [h]
        return h

    (output,) = model.generate(FRANCE, plan=[gate, everything(when="after")], max_tokens=5, **GREEDY)
    ids, ran = generated_with(plain, {("resid_post", 1): keep, **wanted.edits}, 5)
    assert tokens(output) == ids
    close(output.captures["resid_post", 4], ran.sites["resid_post", 4])


def test_phases_positions_and_spans_of_gated_edits(model: Any, plain: Plain) -> None:
    at = -1e6  # always
    edits = [
        Steer("resid_post", layers=3, vector=V, phase="decode"),
        Patch("resid_post", layer=4, position=Span(" capital"), source=V),
        Patch("resid_post", layer=4, position=-1, source="zeros", alpha=0.5),
    ]
    (output,) = model.generate(
        FRANCE, plan=[When(probe(), above=at, then=edits), everything(when="after")], max_tokens=5, **GREEDY
    )

    def later(h: torch.Tensor) -> torch.Tensor:
        h[P:] += V
        return h

    def patched(h: torch.Tensor) -> torch.Tensor:
        h[1], h[P - 1] = V, h[P - 1] / 2
        return h

    ids, ran = generated_with(plain, {("resid_post", 3): later, ("resid_post", 4): patched}, 5)
    assert tokens(output) == ids
    for layer in (3, 4, 7):
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer])


def test_gated_edits_act_after_the_others_in_their_order(model: Any, plain: Plain) -> None:
    plan = [
        When(
            probe(),
            above=-1e6,
            then=[Clamp("resid_post", layers=3, direction=V), Steer("resid_post", layers=3, vector=V)],
        ),
        Steer("resid_post", layers=3, vector=2 * V),
        everything(when="after"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=3, **GREEDY)

    def edited(h: torch.Tensor) -> torch.Tensor:
        h = h + 2 * V
        return h - (h @ V / V.norm() ** 2)[:, None] * V + V

    ids, ran = generated_with(plain, {("resid_post", 3): edited}, 3)
    assert tokens(output) == ids
    close(output.captures["resid_post", 3], ran.sites["resid_post", 3])


def test_gates_of_many_requests_beside_others(model: Any, plain: Plain) -> None:
    """Each has its own probe, bound and vector. The last two share nothing with a gate."""
    prompts = [FRANCE, ITALY, EIFFEL, FRANCE, ITALY, FRANCE]
    plans: list[Any] = []
    wanted: list[Any] = []
    for i, prompt in enumerate(prompts[:4]):
        w, v, at = vector(20 + i, 1.0), vector(30 + i, 40.0 + i), ("resid_post", 1 + i % 2)
        bound = float((plain.run(prompt).sites[at] @ w).median()) + 0.01
        edit = Steer("resid_post", layers=[3, 4], vector=v, scale=1.0 + i)
        plans.append([When(Probe(at[0], layer=at[1], weight=w, name="p"), above=bound, then=edit)])
        change = lambda h, v=v, i=i: h + (1.0 + i) * v  # noqa: E731
        edits = dict.fromkeys([("resid_post", 3), ("resid_post", 4)], change)
        wanted.append(Gated(lambda s, bound=bound: s > bound, edits, at, w).edits)
    plans += [None, [Steer("resid_post", layers=3, vector=V)]]
    wanted += [None, {("resid_post", 3): lambda h: h + V}]
    for _ in range(2):  # the second time, the prompts are in the prefix cache
        outputs = model.generate(prompts, plan=plans, max_tokens=5, **GREEDY)
        for prompt, output, edits in zip(prompts, outputs, wanted, strict=True):
            assert tokens(output) == generated_with(plain, edits, 5, prompt)[0]


def test_names_and_the_probe_in_the_plan_too(model: Any, plain: Plain) -> None:
    at = middle(plain)
    model.vectors["mood"], model.vectors["push"] = WEIGHT, V
    own = probe(weight="mood", positions="all")
    plan = Plan.of([own, When(own, above=at, then=Steer("resid_post", layers=4, vector="push"))])
    assert Plan.from_json(plan.to_json()) == plan
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=5, **GREEDY)
    del model.vectors["mood"], model.vectors["push"]
    wanted = Gated(lambda s: s > at, {("resid_post", 4): lambda h: h + V})
    ids, ran = generated_with(plain, wanted.edits, 5)
    assert tokens(output) == ids
    close(output.scores["p"][:, 0], ran.sites[AT] @ WEIGHT)


REFUSED = [
    ({"above": None}, "When.above is None, as When.below"),
    ({"above": float("nan")}, "When.above"),
    ({"above": 2.0, "below": 1.0}, "When.above is 2; allowed: a number under When.below"),
    ({"then": []}, "When.then is empty"),
    ({"then": "steer"}, r"When.then\[0\] is 'steer'"),
    ({"then": probe()}, r"When.then\[0\]"),
    ({"probe": V}, "When.probe"),
    ({"probe": probe(weight=torch.ones(HIDDEN, 2))}, "When.probe is one with 2 scores"),
    ({"probe": probe(when="after")}, "When.probe is one with when='after'"),
    ({"probe": probe(aggregate="mean")}, "When.probe is one with aggregate='mean'"),
    ({"probe": probe(weight=torch.ones(3))}, "Probe.weight is of width 3"),
    ({"probe": probe(weight="none")}, "no vector 'none'"),
    ({"probe": probe(layer=5)}, r"When.probe is \('resid_post', 5\)"),
    ({"probe": probe(layer=99)}, "Probe.layer is 99"),
    ({"then": Steer("resid_post", layers=4, vector=torch.ones(3))}, "Steer.vector is of width 3"),
    ({"then": Steer("resid_post", layers=99, vector=V)}, "Steer.layers is 99"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    fields = {"probe": probe(), "above": 1.0, "then": Steer("resid_post", layers=4, vector=V), **given}
    with pytest.raises(PlanError, match=message):
        model.generate(FRANCE, plan=When(fields.pop("probe"), **fields), max_tokens=1, **GREEDY)


def test_an_outside_kind_is_gated_by_its_arithmetic() -> None:
    """And one whose arithmetic programs cannot have is refused by name."""
    from toy_op import Scale

    gate = When(probe(), above=0.0, then=Scale("resid_post", layers=4, factor=3.0))
    program = gate.program_for("float32", lambda site, layer: HIDDEN, lambda named: None)
    from midstream.plan.running import run

    h, early = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(0))
    close(run(program, h, early), torch.where(((early @ WEIGHT) > 0)[:, None], 3.0 * h, h))
