"""Edits and captures of single heads on both backends, against plain hooks on the input of `o_proj` (N4)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, P, everything, generated_with, tokens, vector

from midstream import Apply, Capture, Clamp, Patch, Plan, Probe, Steer, When, open_captures
from midstream.errors import PlanError

HEADS, D = 4, 64
V, W = vector(1, 8.0, D), vector(2, 8.0, D)
UNIT = V / V.norm()
WIDE = vector(3, 16.0, HEADS * D)
Z = [Capture("attn_z", positions="all", when="after"), everything(when="after")]


def at_heads(heads: list[int], change: Callable[[torch.Tensor], torch.Tensor], rows: Any = slice(None)) -> Any:
    """An edit of the whole sequence for the oracle: `change` gets `[rows, head_dim]` of each head by itself."""

    def edit(h: torch.Tensor) -> torch.Tensor:
        z = h.unflatten(-1, (HEADS, D)).clone()
        for head in heads:
            z[rows, head] = change(z[rows, head])
        return z.flatten(-2)

    return edit


def check(output: Any, plain: Plain, edits: Any, prompt: str = FRANCE, count: int = 4) -> None:
    """The tokens, `attn_z` and the residual stream of all layers, as the oracle has them."""
    ids, ran = generated_with(plain, edits, count, prompt)
    assert tokens(output) == ids
    baseline = plain.run(plain.ids(prompt) + ids[:-1])
    for layer in range(8):
        close(output.captures["attn_z", layer], ran.sites["attn_z", layer].flatten(1))
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer])
    for site in edits:
        differs(ran.sites[site], baseline.sites[site])


def clamped(low: float, high: float, strength: float) -> Any:
    return lambda z: z + strength * ((z @ UNIT).clamp(low, high) - z @ UNIT)[:, None] * UNIT


CASES: dict[str, tuple[Any, list[int], Any]] = {
    "steer": (Steer("attn_z", layers=[2, 5], head=3, vector=V, scale=1.5), [3], lambda z: z + 1.5 * V),
    "steer, several": (Steer("attn_z", layers=[2, 5], head=[3, 0], vector=V), [0, 3], lambda z: z + V),
    "clamp": (Clamp("attn_z", layers=[2, 5], head=1, direction=V), [1], clamped(0, 0, 1)),
    "clamp, several": (
        Clamp("attn_z", layers=[2, 5], head=[2, 0], direction=V, low=0.1, high=0.2, strength=0.5),
        [0, 2],
        clamped(0.1, 0.2, 0.5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_edit_of_heads_leaves_the_others(model: Any, plain: Plain, case: str) -> None:
    edit, heads, change = CASES[case]
    (output,) = model.generate(FRANCE, plan=[edit, *Z], max_tokens=4, **GREEDY)
    check(output, plain, dict.fromkeys([("attn_z", 2), ("attn_z", 5)], at_heads(heads, change)))


def test_the_other_heads_keep_their_bits(model: Any) -> None:
    """Of the first edited layer, with every kind of edit at the head."""
    run = model.record(ITALY, sites=["attn_z"], name="heads-bits")
    edits = [
        Steer("attn_z", layers=2, head=3, vector=V),
        Clamp("attn_z", layers=2, head=3, direction=W),
        Patch("attn_z", layer=2, position=[1, -1], head=3, source=run, alpha=0.5),
    ]
    both = [Capture("attn_z", layers=2, positions="all_prompt", when=when) for when in ("before", "after")]
    (output,) = model.generate(FRANCE, plan=[*edits, *both], max_tokens=1, **GREEDY)
    before, after = (output.captures["attn_z", 2, when].unflatten(1, (HEADS, D)) for when in ("before", "after"))
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3], after[:, 3])
    del model.runs["heads-bits"]


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["run", "head_dim", "width", "zeros", "name", "mask", "wide mask"])
def test_a_patch_of_heads(model: Any, plain: Plain, kind: str, alpha: float) -> None:
    """From a run, a vector of one head for each, a vector of all heads, zeros and a named vector; and where a mask says."""
    italy = plain.run(ITALY).sites["attn_z", 4]
    model.vectors["of a head"] = V
    run = model.record(ITALY, sites=["attn_z"], layers=[4], name="italy-heads")
    some = torch.arange(D) % 2
    source, new, options = {
        "run": (run, lambda head: italy[[1, 4], head], {"source_position": [1, -1]}),
        "head_dim": (V, lambda head: V, {}),
        "width": (WIDE, lambda head: WIDE.view(HEADS, D)[head], {}),
        "zeros": ("zeros", lambda head: torch.zeros(D), {}),
        "name": ("of a head", lambda head: V, {}),
        "mask": (run, lambda head: italy[[1, 4], head], {"source_position": [1, -1], "mask": some}),
        "wide mask": (V, lambda head: V, {"mask": (torch.arange(HEADS)[:, None] % 2 * some).flatten()}),
    }[kind]
    plan = [Patch("attn_z", layer=4, position=[2, -1], head=[1, 3], source=source, alpha=alpha, **options), *Z]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=4, **GREEDY)
    weight = alpha * some if "mask" in options else alpha

    def edit(h: torch.Tensor) -> torch.Tensor:
        z = h.unflatten(-1, (HEADS, D)).clone()
        for head in (1, 3):
            z[[2, 4], head] = (1 - weight) * z[[2, 4], head] + weight * new(head)
        return z.flatten(-2)

    check(output, plain, {("attn_z", 4): edit})
    del model.runs["italy-heads"], model.vectors["of a head"]


def test_named_vectors_of_a_head_at_phases_and_positions(model: Any, plain: Plain) -> None:
    """Steered and clamped by name, beside plain requests and others of the kind."""
    model.vectors["v"] = V
    plans: list[Any] = [
        [Steer("attn_z", layers=3, head=2, vector="v", phase="decode"), *Z],
        [Clamp("attn_z", layers=3, head=[2, 1], direction="v", positions=[0, -1]), *Z],
        [],
        [Steer("attn_z", layers=3, head=0, vector=WIDE, phase="prefill"), *Z],
    ]
    outputs = model.generate([FRANCE] * 4, plan=plans, max_tokens=4, **GREEDY)
    check(outputs[0], plain, {("attn_z", 3): at_heads([2], lambda z: z + V, slice(P, None))})
    check(outputs[1], plain, {("attn_z", 3): at_heads([1, 2], clamped(0, 0, 1), [0, P - 1])})
    assert tokens(outputs[2]) == plain.generate(FRANCE, 4)
    check(outputs[3], plain, {("attn_z", 3): at_heads([0], lambda z: z + WIDE[:D], slice(0, P))})
    del model.vectors["v"]


def test_edits_of_several_heads_and_of_all_at_one_site(model: Any, plain: Plain) -> None:
    """In the order of plans: patches, steers, clamps."""
    plan = [
        Clamp("attn_z", layers=4, head=0, direction=V),
        Steer("attn_z", layers=4, head=0, vector=V),
        Steer("attn_z", layers=4, vector=WIDE),
        Steer("attn_z", layers=4, head=[0, 2], vector=W),
        Patch("attn_z", layer=4, position=range(P), head=2, source="zeros"),
        *Z,
    ]

    def edit(h: torch.Tensor) -> torch.Tensor:
        z = h.unflatten(-1, (HEADS, D)).clone()
        z[:P, 2] = 0
        z = z + WIDE.view(HEADS, D)
        z[:, 0] += V + W
        z[:, 2] += W
        z[:, 0] -= (z[:, 0] @ UNIT)[:, None] * UNIT
        return z.flatten(-2)

    (output,) = model.generate(FRANCE, plan=plan, max_tokens=3, **GREEDY)
    check(output, plain, {("attn_z", 4): edit}, count=3)


GATED: dict[str, tuple[Any, list[int], Any]] = {
    "steer": (Steer("attn_z", layers=3, head=3, vector=V), [3], lambda z: z + V),
    "clamp": (Clamp("attn_z", layers=3, head=[0, 3], direction=V), [0, 3], clamped(0, 0, 1)),
    "patch": (
        Patch("attn_z", layer=3, position=range(P), head=3, source=V, alpha=0.5),
        [3],
        lambda z: torch.cat([(z[:P] + V) / 2, z[P:]]),
    ),
    "named": (Steer("attn_z", layers=3, head=[1, 3], vector="g"), [1, 3], lambda z: z + V),
}


@pytest.mark.parametrize("case", GATED)
def test_a_gated_edit_of_heads(model: Any, plain: Plain, case: str) -> None:
    edit, heads, change = GATED[case]
    weight = vector(5, 1.0)
    scores = (generated_with(plain, None, 4)[1].sites["resid_post", 2] @ weight).sort().values
    gap = scores[2:-1] - scores[1:-2]  # between two tokens, so that the gate opens at some of them
    at = float(scores[1:-2][gap.argmax()] + gap.max() / 2)
    gate = When(Probe("resid_post", layer=2, weight=weight, name="p"), above=at, then=[edit])
    seen: dict[str, torch.Tensor] = {}

    def read(h: torch.Tensor) -> torch.Tensor:
        seen["scores"] = h @ weight
        return h

    def gated(h: torch.Tensor) -> torch.Tensor:
        return torch.where((seen["scores"] > at)[:, None], at_heads(heads, change)(h), h)

    model.vectors["g"] = V
    (output,) = model.generate(FRANCE, plan=[gate, *Z], max_tokens=4, **GREEDY)
    ids, ran = generated_with(plain, {("resid_post", 2): read, ("attn_z", 3): gated}, 4)
    assert tokens(output) == ids and 0 < int((seen["scores"] > at).sum()) < len(seen["scores"])
    close(output.captures["attn_z", 3], ran.sites["attn_z", 3].flatten(1))
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])
    del model.vectors["g"]


# -------------------------------------------------------------------------------------------------------------- captures


def test_a_capture_of_heads(model: Any, plain: Plain, tmp_path: Path) -> None:
    """A head alone, several in their order, and all side by side; on the output, in a directory and in a function."""
    seen: list[torch.Tensor] = []
    plan = [
        Capture("attn_z", layers=[1, 4], positions="all", head=3),
        Capture("attn_z", layers=[2], positions="all", head=[3, 0], dtype="float64"),
        Capture("attn_z", layers=[3], positions="all", head=[2]),
        Capture("attn_z", layers=[5], positions="all"),
        Capture("attn_z", layers=[1], positions="all", head=[2, 1], to=tmp_path),
        Capture("attn_z", layers=[1], positions=[0, -1], head=1, to=lambda *given: seen.append(given[-1])),
    ]
    one, other = model.generate([FRANCE, EIFFEL], plan=plan, max_tokens=3, **GREEDY)
    stored = open_captures(tmp_path)
    for output, prompt in ((one, FRANCE), (other, EIFFEL)):
        sites = plain.run(plain.ids(prompt) + plain.generate(prompt, 3)[:-1]).sites
        captures = output.captures
        close(captures["attn_z", 1], sites["attn_z", 1][:, 3])
        close(captures["attn_z", 4], sites["attn_z", 4][:, 3])
        close(captures["attn_z", 2], sites["attn_z", 2][:, [3, 0]])
        close(captures["attn_z", 3], sites["attn_z", 3][:, [2]])
        close(captures["attn_z", 5], sites["attn_z", 5].flatten(1))
        assert captures["attn_z", 2].dtype == torch.float64 and captures["attn_z", 1].is_contiguous()
        close(stored[output.request_id]["attn_z", 1], sites["attn_z", 1][:, [2, 1]])
    rows = torch.cat([rows for rows in seen if len(rows)])
    assert rows.shape == (4, D)
    expected = [plain.run(prompt).sites["attn_z", 1][[0, -1], 1] for prompt in (FRANCE, EIFFEL)]
    assert any(torch.allclose(rows, torch.cat(each), atol=1e-4) for each in (expected, expected[::-1]))


def test_a_loader_has_the_heads_side_by_side(model: Any, plain: Plain, tmp_path: Path) -> None:
    plan = Capture("attn_z", layers=2, positions="all_prompt", head=[3, 1])
    estimate = model.estimate([FRANCE, EIFFEL], plan=plan)
    store = model.collect([FRANCE, EIFFEL], plan=plan, to=tmp_path)
    assert (estimate.rows, estimate.nbytes) == (13, 13 * 2 * D * 4)
    loader = store.loader("attn_z", 2, batch_size=13, shuffle=False, epochs=1)
    (batch,) = loader
    assert loader.width == 2 * D
    expected = [plain.run(prompt).sites["attn_z", 2][:, [3, 1]].flatten(1) for prompt in (FRANCE, EIFFEL)]
    close(batch, torch.cat(expected))


def test_a_captured_head_is_the_source_of_a_patch(model: Any, plain: Plain) -> None:
    capture = Capture("attn_z", layers=5, head=3)
    (output,) = model.generate(ITALY, plan=capture, max_tokens=1, **GREEDY)
    (row,) = output.captures["attn_z", 5]
    patch = Patch("attn_z", layer=5, position=-1, head=3, source=row)
    (output,) = model.generate(FRANCE, plan=[patch, *Z], max_tokens=4, **GREEDY)
    new = plain.run(ITALY).sites["attn_z", 5][-1, 3]
    check(output, plain, {("attn_z", 5): at_heads([3], lambda z: new.expand_as(z), [P - 1])})


def test_a_trace_beside_a_capture_of_heads_sees_all_heads(model: Any, plain: Plain) -> None:
    with model.trace(FRANCE, plan=Capture("attn_z", layers=4, positions="all_prompt", head=2), **GREEDY) as tracer:
        z = model.attn_z[4].save()
    expected = plain.run(FRANCE).sites["attn_z", 4]
    close(z, expected)
    close(tracer.outputs[0].captures["attn_z", 4], expected[:, 2])


# ---------------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "a site without heads": (lambda: Steer("resid_post", head=1, vector=V), r"^Steer\.head is 1 at resid_post; .*attn_z"),
    "captured there": (lambda: Capture("mlp_act", head=[1]), r"^Capture\.head is \[1\] at mlp_act; allowed: None"),
    "a negative head": (lambda: Clamp("attn_z", head=-1, direction=V), r"^Clamp\.head is -1; allowed: a whole number, 0"),
    "no head": (lambda: Capture("attn_z", head=[]), r"^Capture\.head is empty; allowed: a head or a sequence of heads"),
    "a head twice": (lambda: Steer("attn_z", head=[1, 1], vector=V), r"^Steer\.head is \[1, 1\], which has 1 twice"),
    "a word": (lambda: Steer("attn_z", head="all", vector=V), r"^Steer\.head is 'all'; allowed: a head"),
    "a boolean": (lambda: Steer("attn_z", head=True, vector=V), r"^Steer\.head is True; allowed: a whole number"),
    "the norm": (lambda: Steer("attn_z", head=1, vector=V, norm_match=True), r"^Steer\.head is 1 with norm_match; allowed: None"),
    "too high": (lambda: Steer("attn_z", head=[0, 4], vector=V), r"^Steer\.head is 4; allowed: 0 to 3, the heads of attn_z at layer 0"),
    "captured too high": (lambda: Capture("attn_z", layers=2, head=4), r"^Capture\.head is 4; allowed: 0 to 3, .*at layer 2"),
    "patched too high": (lambda: Patch("attn_z", layer=2, position=0, head=9, source="zeros"), r"^Patch\.head is 9; allowed: 0"),
    "another width": (
        lambda: Steer("attn_z", head=1, vector=[1.0] * 32),
        r"^Steer\.vector is of width 32; allowed: 64, the width of a head, or 256, .*, of attn_z at layer 0",
    ),
    "a mask's width": (
        lambda: Patch("attn_z", layer=2, position=0, head=0, source="zeros", mask=[1.0] * 8),
        r"^Patch\.mask is of width 8; allowed: 64",
    ),
    "a head's width for all": (lambda: Steer("attn_z", vector=V), r"^Steer\.vector is of width 64; allowed: 256, the width of attn_z"),
    "two captures": (
        lambda: Plan.of([Capture("attn_z", layers=2, head=1), Capture("attn_z", layers=2, head=2)]),
        r"have the heads 1 and 2 \(Capture\.head\)",
    ),
    "two, one of all": (
        lambda: Plan.of([Capture("attn_z", layers=2, head=1), Capture("attn_z", layers=2)]),
        r"have the heads 1 and None \(Capture\.head\)",
    ),
    "an Apply": (lambda: Apply("attn_z", head=1, program=lambda h: h), r"^Apply has no head"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_such_head_says_so_by_name(model: Any, case: str) -> None:
    """Before anything runs."""
    make, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        model.generate(FRANCE, plan=make(), max_tokens=1)


def test_a_plan_of_heads_is_data() -> None:
    """As JSON there and back; heads of edits are sorted, those of captures keep their order."""
    plan = Plan.of(
        [
            Steer("attn_z", layers=1, head=3, vector=V),
            Clamp("attn_z", layers=1, head=[3, 1], direction=V),
            Patch("attn_z", layer=1, position=0, head=[2, 0], source="zeros", mask=V.abs() / V.abs().max()),
            Capture("attn_z", head=[3, 0]),
            Capture("attn_z", layers=1, head=2, when="after"),
            When(Probe("attn_z", layer=1, weight=WIDE, name="p"), above=1, then=[Clamp("attn_z", layers=2, head=[0, 1], direction=V)]),
        ]
    )  # fmt: skip
    again = Plan.from_json(plan.to_json(), trusted=False)
    assert again == plan and again.hash == plan.hash
    heads = [item["head"] for item in json.loads(plan.to_json())["interventions"] if "head" in item]
    assert heads == [[3], [1, 3], [0, 2], [3, 0], 2]
    one = Steer("attn_z", layers=1, head=3, vector=V)
    assert Plan.of(one).hash == Plan.of(Steer("attn_z", layers=1, head=[3], vector=V)).hash
    assert Plan.of(one).hash != Plan.of(Steer("attn_z", layers=1, head=2, vector=V)).hash


def test_vectors_of_the_residual_stream_have_no_heads() -> None:
    with pytest.raises(PlanError, match=r"^Patch\.head is 0 at attn_out"):
        Patch("attn_out", layer=0, position=0, head=0, source=[0.0] * HIDDEN)
