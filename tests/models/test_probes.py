"""Probes on both backends against plain hooks (M1, M2, M5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Plain, close
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, P, everything, generated_with, tokens, vector

from midstream import Capture, Probe, Span, Steer
from midstream.errors import PlanError
from midstream.plan.vectors import Vector

WEIGHT = vector(1, 1.0)
CLASSES = torch.stack([vector(seed, 1.0) for seed in range(2, 5)], 1)


def rows_of(plain: Plain, count: int, prompt: str = FRANCE, site: tuple[str, int] = ("resid_post", 5)) -> torch.Tensor:
    """The site's rows of the prompt and of all generated tokens but the last, by the oracle."""
    return generated_with(plain, None, count, prompt)[1].sites[site]


def mean_stop(scores: torch.Tensor, bound: float) -> int:
    """The first of the scores up to which their mean is above a bound."""
    means = scores.cumsum(0) / torch.arange(1, len(scores) + 1)
    return int((means > bound).nonzero()[0])


def stopped(output: Any) -> tuple[str, Any]:
    sample = output.outputs[0]
    return sample.finish_reason, sample.stop_reason


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_act"])
def test_scores_are_those_of_the_rows(model: Any, plain: Plain, site: str) -> None:
    rows = rows_of(plain, 5, site=(site, 3))
    weight = vector(1, 1.0, rows.shape[1])
    probe = Probe(site, layer=3, weight=weight, bias=0.25, name="p", positions="all")
    (output,) = model.generate(FRANCE, plan=probe, max_tokens=5, **GREEDY)
    assert tokens(output) == plain.generate(FRANCE, 5)
    assert output.scores["p"].dtype == torch.float32 and output.scores.positions == {"p": list(range(P + 4))}
    close(output.scores["p"], (rows @ weight + 0.25)[:, None])


@pytest.mark.parametrize("activation", [None, "sigmoid", "softmax", "tanh", "relu"])
def test_several_scores_a_token(model: Any, plain: Plain, activation: str | None) -> None:
    bias = [0.5, -0.25, 0.0]
    weight = CLASSES / 8
    probe = Probe("resid_post", layer=-3, weight=weight, bias=bias, activation=activation, name="p", positions="all")
    (output,) = model.generate(FRANCE, plan=[probe], max_tokens=4, **GREEDY)
    logits = rows_of(plain, 4) @ weight + torch.tensor(bias)
    functions: dict[str | None, Any] = {None: lambda x: x, "softmax": lambda x: torch.softmax(x, -1)}
    close(output.scores["p"], functions.get(activation, getattr(torch, str(activation), None))(logits))


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [
        ("all_generated", range(P, P + 4)),
        ("all_prompt", range(P)),
        ("last_prompt", [P - 1]),
        ([1, -1], [1, P - 1]),
        (Span(" capital"), [1]),
    ],
)
def test_the_tokens_to_score(model: Any, plain: Plain, positions: Any, wanted: Any) -> None:
    probe = Probe("resid_post", layer=5, weight=WEIGHT, name="p", positions=positions)
    for _ in range(2):  # the second time, the prompt is in the prefix cache
        (output,) = model.generate(FRANCE, plan=probe, max_tokens=5, **GREEDY)
        assert output.scores.positions["p"] == list(wanted)
        close(output.scores["p"][:, 0], (rows_of(plain, 5) @ WEIGHT)[list(wanted)])


def test_probes_of_one_site_beside_edits_and_captures(model: Any, plain: Plain) -> None:
    """Two of one form, one of another, before and after a steer; a capture of the same rows; and requests without."""
    v = vector(7, 40.0)
    plan = [
        Probe("resid_post", layer=5, weight=WEIGHT, name="before", positions="all"),
        Probe("resid_post", layer=5, weight=CLASSES[:, 0], name="other", positions=[0, 3]),
        Probe("resid_post", layer=5, weight=WEIGHT, name="after", positions="all", when="after"),
        Probe("resid_post", layer=6, weight=CLASSES, name="many", positions="all_generated"),
        Steer("resid_post", layers=5, vector=v),
        everything(when="after"),
    ]
    outputs = model.generate([FRANCE, ITALY, EIFFEL], plan=[plan, None, plan[:1]], max_tokens=5, **GREEDY)
    ids, ran = generated_with(plain, {("resid_post", 5): lambda h: h + v}, 5)
    output = outputs[0]
    assert tokens(output) == ids
    rows = ran.sites["resid_post", 5]
    close(output.captures["resid_post", 5], rows)
    close(output.scores["after"][:, 0], rows @ WEIGHT)
    close(output.scores["before"][:, 0], (rows - v) @ WEIGHT)
    close(output.scores["other"][:, 0], ((rows - v) @ CLASSES[:, 0])[[0, 3]])
    close(output.scores["many"], (ran.sites["resid_post", 6] @ CLASSES)[P:])
    assert len(outputs[1].scores) == 0 and tokens(outputs[1]) == plain.generate(ITALY, 5)
    close(outputs[2].scores["before"][:, 0], rows_of(plain, 5, EIFFEL) @ WEIGHT)


def test_a_selector_from_outside_chooses_the_tokens(model: Any, plain: Plain) -> None:
    from toy_selector import Every

    probe = Probe("resid_post", layer=5, weight=WEIGHT, name="p", positions=Every(2))
    (output,) = model.generate(FRANCE, plan=probe, max_tokens=7, **GREEDY)
    assert output.scores.positions["p"] == [P, P + 2, P + 4]
    close(output.scores["p"][:, 0], (rows_of(plain, 7) @ WEIGHT)[[P, P + 2, P + 4]])


def test_a_stop_ends_the_request_at_its_token(model: Any, plain: Plain) -> None:
    """And no other request: the probe of one is that of all, but its bound."""
    ids, scores = plain.generate(FRANCE, 9), rows_of(plain, 9) @ WEIGHT
    generated = scores[P:].tolist()
    at = max(range(8), key=generated.__getitem__)
    bound = sorted(generated)[-2] / 2 + generated[at] / 2
    probes = [Probe("resid_post", layer=5, weight=WEIGHT, name="p", stop_above=b) for b in (bound, 1e6)]
    outputs = model.generate([FRANCE, FRANCE, ITALY], plan=[[probes[0]], [probes[1]], None], max_tokens=9, **GREEDY)
    assert stopped(outputs[0]) == ("stop", "probe:p")
    assert tokens(outputs[0]) == ids[: at + 1], "the token that was scored is the last"
    assert outputs[0].scores.positions["p"] == list(range(P, P + at + 1))
    close(outputs[0].scores["p"][:, 0], scores[P : P + at + 1])
    assert tokens(outputs[1]) == ids and stopped(outputs[1])[0] == "length"
    assert tokens(outputs[2]) == plain.generate(ITALY, 9)


@pytest.mark.parametrize("place", [1, P - 1])
def test_a_stop_at_the_prompt(model: Any, plain: Plain, place: int) -> None:
    scores = (rows_of(plain, 1) @ WEIGHT).tolist()
    probe = Probe("resid_post", layer=5, weight=WEIGHT, name="p", positions=place, stop_below=scores[place] + 0.01)
    (output,) = model.generate(FRANCE, plan=[probe, everything()], max_tokens=4, **GREEDY)
    close(output.captures["resid_post", 5], rows_of(plain, 1)[: place + 1])
    assert stopped(output) == ("stop", "probe:p") and tokens(output) == []
    assert output.scores.positions["p"] == [place]


@pytest.mark.parametrize("aggregate", ["max", "mean", "ema"])
def test_a_stop_by_an_aggregate(model: Any, plain: Plain, aggregate: str) -> None:
    scores = (rows_of(plain, 9) @ WEIGHT)[: P + 8]
    values = [scores[0].item()]
    for number, score in enumerate(scores[1:].tolist(), 2):
        before = values[-1]
        values.append(
            {"max": max(before, score), "mean": before + (score - before) / number, "ema": 0.7 * before + 0.3 * score}[
                aggregate
            ]
        )
    if aggregate == "mean":
        close(torch.tensor(values), scores.cumsum(0) / torch.arange(1, len(scores) + 1))
    bound = max(values[:P]) + 1e-3  # first passed by a generated token, if at all
    at = next((i for i, value in enumerate(values) if value > bound), None)
    probe = Probe(
        "resid_post",
        layer=5,
        weight=WEIGHT,
        name="p",
        positions="all",
        aggregate=aggregate,
        decay=0.7,
        stop_above=bound,
    )
    (output,) = model.generate(FRANCE, plan=probe, max_tokens=9, **GREEDY)
    count = len(values) if at is None else at + 1
    assert stopped(output)[0] == ("length" if at is None else "stop")
    assert len(output.scores["p"]) == count
    assert abs(output.scores.aggregated("p") - values[count - 1]) < 1e-3 * max(abs(values[count - 1]), 1)


def test_the_first_of_several_stops_counts(model: Any, plain: Plain) -> None:
    plan = [
        Probe("resid_post", layer=6, weight=WEIGHT, name="later", positions=[2], stop_above=-1e6),
        Probe("resid_post", layer=2, weight=WEIGHT, name="first", positions=[1], stop_above=-1e6),
        Probe("resid_post", layer=2, weight=WEIGHT, name="all", positions="all"),
        Capture("resid_post", layers=5, positions="all", to=(lambda *row: taken.extend(row[3]), None)),
    ]
    taken: list[int] = []
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=3, **GREEDY)
    assert stopped(output)[1] == "probe:first"
    assert sorted(taken) == [0, 1] and len(output.captures["resid_post", 5]) == 2
    assert output.scores.positions == {"later": [], "first": [1], "all": [0, 1]}
    assert output.scores["later"].shape == (0, 1)


def test_a_stop_string_that_looks_like_a_probes_reason_is_none(model: Any, plain: Plain) -> None:
    """Seen failing: rows behind the probe's last token were left out, or it raised ValueError."""
    from midstream.plan.probes import rows_end

    probe = Probe("resid_post", layer=5, weight=WEIGHT, name="p", positions="last_prompt")
    (output,) = model.generate(FRANCE, plan=[probe, everything()], max_tokens=4, **GREEDY)
    assert len(output.captures["resid_post", 5]) == P + 3
    sample = SimpleNamespace(stop_reason="probe:p")
    chunks = [("p", np.array([P - 1]).tobytes(), b"")]
    assert rows_end([probe], sample, chunks, 99) == 99 and rows_end([], sample, (), 99) == 99
    stops = Probe("resid_post", layer=5, weight=WEIGHT, name="p", stop_above=0.0)
    assert rows_end([stops], sample, chunks, 99) == P and rows_end([stops], sample, (), 99) == 99


def test_named_vectors_are_probes(model: Any, plain: Plain) -> None:
    model.vectors["mood"] = WEIGHT
    probe = Probe("resid_post", layer=5, weight="mood", name="p")
    (output,) = model.generate(FRANCE, plan=probe, max_tokens=4, **GREEDY)
    close(output.scores["p"][:, 0], (rows_of(plain, 4) @ WEIGHT)[P:])
    model.vectors["other"] = CLASSES[:, 1]
    names = ["mood", "other", "mood"]
    probes = [
        Probe("resid_post", layer=5, weight=given, name=kind, positions="all", activation="softmax")
        for kind, given in (("named", names), ("mixed", [Vector(WEIGHT), "other", Vector(WEIGHT)]))
    ]
    (output,) = model.generate(FRANCE, plan=probes, max_tokens=4, **GREEDY)
    del model.vectors["mood"], model.vectors["other"]
    expected = (rows_of(plain, 4) @ torch.stack([WEIGHT, CLASSES[:, 1], WEIGHT], 1)).softmax(1)
    close(output.scores["named"], expected)
    assert torch.equal(output.scores["named"], output.scores["mixed"])
    with pytest.raises(PlanError, match="engine has no vector 'mood'"):
        model.generate(FRANCE, plan=Probe("resid_post", layer=5, weight=["mood"], name="p"), max_tokens=1)


def test_a_trace_and_a_probe_in_one_request(model: Any, plain: Plain) -> None:
    probe = Probe("resid_post", layer=5, weight=WEIGHT, name="p", positions="all_prompt")
    with model.trace(FRANCE, plan=probe, temperature=0.0) as tracer:
        rows = model.layers_output[5].save()
    close(tracer.outputs[0].scores["p"][:, 0], rows.reshape(P, HIDDEN) @ WEIGHT)


REFUSED = [
    ({"weight": torch.ones(3)}, "Probe.weight is of width 3; allowed: 256"),
    ({"weight": torch.full((HIDDEN,), float("nan"))}, "Probe.weight"),
    ({"weight": "none"}, "no vector 'none'"),
    ({"layer": 99}, "Probe.layer is 99; allowed: 0 to 7"),
    ({"site": "resid"}, "Probe.site is 'resid'"),
    ({"stop_above": float("nan")}, "Probe.stop_above"),
    ({"stop_above": "high"}, "Probe.stop_above"),
    ({"weight": CLASSES, "stop_above": 1.0}, "Probe.stop_above is a bound of 3 scores"),
    ({"positions": [99]}, "Probe.positions is 99"),
    ({"activation": "softmax"}, "Probe.activation"),
    ({"aggregate": "sum"}, "Probe.aggregate"),
    ({"weight": torch.ones(HIDDEN, 65)}, "Probe.weight"),
    ({"bias": [1.0, 2.0]}, "Probe.bias"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    fields = {"site": "resid_post", "layer": 5, "weight": WEIGHT, "name": "p", **given}
    with pytest.raises(PlanError, match=message):
        model.generate(FRANCE, plan=Probe(fields.pop("site"), **fields), max_tokens=1, **GREEDY)


def test_too_many_probes_and_equal_names_are_refused(model: Any) -> None:
    each = [Probe("resid_post", layer=5, weight=WEIGHT, name=f"p{i}") for i in range(65)]
    with pytest.raises(PlanError, match="65 probes; allowed: up to 64"):
        model.generate(FRANCE, plan=each, max_tokens=1)
    with pytest.raises(PlanError, match="'p1' of two probes"):
        model.generate(FRANCE, plan=[each[1], each[1], Capture("resid_post")], max_tokens=1)
    (output,) = model.generate(FRANCE, plan=each[:64], max_tokens=2, **GREEDY)
    assert len({tuple(map(tuple, output.scores[name].tolist())) for name in output.scores}) == 1
