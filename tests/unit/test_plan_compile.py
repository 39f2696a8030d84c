"""What each row gets of a plan (issue 3, D1, D4, E1, E9), against what the plan's fields say about each position."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples
from plan_strategies import NAMES, RUNS, SITES, WIDTH, meaning, plans

from midstream import Capture, Clamp, Patch, Plan, Probe, RecordedRun, Span, Steer, When
from midstream.errors import PlanError
from midstream.memory import without_collections
from midstream.plan.compile import CompiledPlan, compile_plan
from midstream.plan.ops.edit import point_of
from midstream.plan.strangers import check_strangers

LAYERS, LENGTH = 4, 7


def row(run, site, layer, position):
    """A recorded row that no other has."""
    return torch.tensor([SITES.index(site), layer, position, RUNS.index(run) if run in RUNS else 9.0])


def compiled(
    plan, length=LENGTH, layers=LAYERS, width=lambda site, layer: WIDTH, vector=lambda named: NAMES[named.name], **more
):
    return compile_plan(Plan.of(plan), length, layers, width=width, vector=vector, run=row, dtype="float32", **more)


def unit(vector):
    vector = np.asarray(vector, np.float64)
    return vector / np.linalg.norm(vector)


# What the compiled plan does and what the plan means, both as things that can be compared: numbers rounded.


def rounded(vector):
    return None if vector is None else tuple(np.round(np.asarray(vector, np.float64), 5) + 0.0)


def done(plan: CompiledPlan, number: int):
    """(site, layer) -> (patches, steers, clamps, captures), as a profile has them."""
    found = {}
    for point, ops in plan.profiles[number].ops.items():
        kinds = [op.kind for op in ops]
        ranks = {"patch": 1, "steer": 2, "clamp": 3}
        inner = [op for op in ops if op.kind != "capture"]
        assert [ranks[op.kind] for op in inner] == sorted(ranks[op.kind] for op in inner), "order at a site"
        before = kinds[: next((i for i, kind in enumerate(kinds) if kind != "capture"), len(kinds))]
        values = [
            (op, rounded(plan.bank[op.vector]), rounded(plan.bank[op.mask]) if op.mask >= 0 else None) for op in inner
        ]
        found[point] = (
            tuple((vector, op.a, mask) for op, vector, mask in values if op.kind == "patch"),
            tuple(sorted((vector, op.a, op.b) for op, vector, _ in values if op.kind == "steer")),
            tuple((vector, op.a, op.b, op.c) for op, vector, _ in values if op.kind == "clamp"),
            (len(before), kinds.count("capture") - len(before)) if inner else kinds.count("capture"),
        )
    return found


def wanted(plan: Plan, position: int):
    """The same, from what the plan means at a position."""

    def value(source):
        match source:
            case ("vector", data):
                return np.frombuffer(data, np.float32)
            case ("name", name):
                return NAMES[name]
            case ("zeros",):
                return np.zeros(WIDTH)
            case ("run", run_id, site, layer, at):
                return row(next(run for run in RUNS if run.id == run_id), site, layer, at)

    found = {}
    for point, (patched, steered, clamped, when) in meaning(plan, position, LENGTH, LAYERS).items():
        inner = patched or steered or clamped
        found[point] = (
            tuple(
                (rounded(value(s)), alpha, None if mask is None else rounded(value(mask))) for s, alpha, mask in patched
            ),
            tuple(
                sorted(
                    (rounded(unit(value(v)) if norm else value(v)), scale, float(norm)) for v, scale, norm in steered
                )
            ),
            tuple((rounded(unit(value(d))), low, high, strength) for d, low, high, strength in clamped),
            (int("before" in when), int("after" in when)) if inner else len(when),
        )
    return found


@given(plans(LAYERS, LENGTH, named=True))
@settings(max_examples=examples(250), deadline=None)
def test_each_position_gets_what_the_plan_says(plan):
    found = compiled(plan)
    named = [edit.positions for edit in plan.edits if edit.phase == "decode" and edit.positions is not None]
    end = LENGTH + max([place + 1 for places in named for place in places], default=0)
    assert found.prompt.dtype == np.int32 and len(found.prompt) <= end  # an edit that changes nothing names none
    for position in range(len(found.prompt)):
        assert done(found, found.prompt[position]) == wanted(plan, position), position
    for position in (len(found.prompt), end, LENGTH + 9):
        assert done(found, found.generated) == wanted(plan, position)
    listed = range(len(found.prompt))
    assert found.acts.tolist() == [bool(wanted(plan, position)) for position in listed]
    in_prompt, generated = ({point_of(item) for item in items} for items in found.acting)
    assert generated == wanted(plan, LENGTH + 9).keys()
    points = {point for position in listed for point in wanted(plan, position)}
    assert points <= in_prompt <= points | generated
    assert in_prompt == points or len(found.prompt) > LENGTH


@given(plans(LAYERS, LENGTH, named=True))
@settings(max_examples=examples(100), deadline=None)
def test_profiles_are_few_and_the_first_is_empty(plan):
    found = compiled(plan)
    assert found.profiles[0].ops == {} and found.profiles[0].row_width == 0
    used = {*found.prompt.tolist(), found.generated, 0}
    assert used == set(range(len(found.profiles))), "every profile has a row"
    of_prompt = [
        found.profiles[number] for number in {0, *found.prompt.tolist()}
    ]  # that of later positions may equal one
    assert all(a != b for i, a in enumerate(of_prompt) for b in of_prompt[:i])
    assert all(vector.dtype == torch.float32 and vector.shape == (WIDTH,) for vector in found.bank)
    texts = [vector.numpy().tobytes() for vector in found.bank]
    assert len(set(texts)) >= len(texts) - len(NAMES) * 2, "a vector lies in the bank once; names apart"


@given(plans(LAYERS, LENGTH))
@settings(max_examples=examples(100), deadline=None)
def test_captured_rows_are_laid_out_without_gaps(plan):
    """D4: what a profile captures lies side by side in its row, each plane where its op says."""
    found = compiled(plan, width=lambda site, layer: WIDTH if layer != 99 else 0)
    for position in range(LENGTH + 1):
        profile = found.profiles[found.prompt[position] if position < len(found.prompt) else found.generated]
        ends = [0]
        for plane in profile.planes:
            assert plane.offset == ends[-1] and plane.width == WIDTH
            ends.append(plane.offset + plane.width)
        assert profile.row_width == ends[-1]
        here = {
            (site, layer, when)
            for (site, layer), (*_, whens) in meaning(plan, position, LENGTH, LAYERS).items()
            for when in whens
        }
        assert {plane[:3] for plane in profile.planes} == here and len(profile.planes) == len(here)
        offsets = {}
        for point, ops in profile.ops.items():
            places = [op.offset for op in ops if op.kind == "capture"]
            planes = sorted((plane.when == "after", plane.offset) for plane in profile.planes if plane[:2] == point)
            assert places == [offset for _, offset in planes]
            offsets |= dict.fromkeys(places, point)
        assert len(offsets) == len(profile.planes)


@given(plans(LAYERS, LENGTH), st.randoms())
@settings(max_examples=examples(100), deadline=None)
def test_steers_come_in_one_order_however_they_were_written(plan, random):
    """Sums of float32 depend on their order: plans that share KV have to take them in the same one."""
    steers = [item for item in plan.interventions if isinstance(item, Steer)]
    others = [item for item in plan.interventions if not isinstance(item, Steer)]
    random.shuffle(steers)
    shuffled = Plan((*steers, *others))

    def sums(found, number):
        return {
            point: [(found.bank[op.vector].tolist(), op.a, op.kind) for op in ops if "steer" in op.kind]
            for point, ops in found.profiles[number].ops.items()
        }

    first, second = compiled(plan), compiled(shuffled)
    for position in range(LENGTH):
        assert sums(first, first.prompt[position]) == sums(second, second.prompt[position])
    assert sums(first, first.generated) == sums(second, second.generated)


def test_all_kinds_at_one_site_in_their_order():
    """design.md section 5: capture(before), patch, steer, clamp, capture(after), however the plan lists them."""
    at = {"site": "resid_post", "layers": 2}
    plan = [
        Capture(**at, when="after", positions=3),
        Clamp(**at, direction=[0, 1, 0, 0], low=-1, high=1, strength=0.5),
        Steer(**at, vector=[1, 0, 0, 0], scale=3),
        Steer(**at, vector=[0, 0, 0, 2], scale=0.5, norm_match=True),
        Capture(**at, positions=-4),
        Patch("resid_post", layer=2, position=3, source=[5, 5, 5, 5], alpha=0.25, mask=[1, 0, 1, 0]),
    ]
    found = compiled(plan)
    ops = found.profiles[found.prompt[3]].ops["resid_post", 2]
    assert [op.kind for op in ops] == ["capture", "patch", "steer", "steer", "clamp", "capture"]
    patch, clamp = ops[1], ops[4]
    assert (patch.a, found.bank[patch.vector].tolist(), found.bank[patch.mask].tolist()) == (
        0.25,
        [5] * 4,
        [1, 0, 1, 0],
    )
    assert (clamp.a, clamp.b, clamp.c, found.bank[clamp.vector].tolist()) == (-1, 1, 0.5, [0, 1, 0, 0])
    norm = next(op for op in ops if op.kind == "steer" and op.b)
    assert (norm.a, found.bank[norm.vector].tolist()) == (0.5, [0, 0, 0, 1])


def test_a_site_has_its_own_width():
    widths = {"resid_post": 4, "mlp_act": 6}
    plan = [
        Capture("mlp_act", layers=[0, 1]),
        Capture("resid_post", layers=0),
        Patch("mlp_act", layer=0, position=-1, source="zeros"),
    ]
    found = compiled(plan, width=lambda site, layer: widths[site])
    profile = found.profiles[found.prompt[-1]]
    assert profile.row_width == 6 + 6 + 4
    assert {(plane.site, plane.layer): plane.width for plane in profile.planes} == {
        ("mlp_act", 0): 6, ("mlp_act", 1): 6, ("resid_post", 0): 4
    }  # fmt: skip
    offsets = {(plane.site, plane.layer): plane.offset for plane in profile.planes}
    assert sorted(offsets.values()) == sorted({0, 4, 10} if offsets["resid_post", 0] == 0 else {0, 6, 12})
    assert [vector.tolist() for vector in found.bank] == [[0.0] * 6]


def test_a_run_gives_the_row_that_was_asked_for():
    """E9: by run, site, layer and position, and each once."""
    places = [
        (RUNS[0], "resid_post", 2, 3),
        (RUNS[0], "resid_post", 1, 3),
        (RUNS[0], "attn_out", 2, 3),
        (RUNS[1], "resid_post", 2, 3),
    ]
    plan = [
        Patch("resid_post", layer=0, position=i, source=run, source_site=site, source_layer=layer, source_position=at)
        for i, (run, site, layer, at) in enumerate([*places, places[0]])
    ]
    found = compiled(plan)
    rows = [found.bank[found.profiles[found.prompt[i]].ops["resid_post", 0][0].vector] for i in range(5)]
    assert [vector.tolist() for vector in rows] == [row(*place).tolist() for place in [*places, places[0]]]
    assert rows[4] is rows[0] and len(found.bank) == 4


def test_a_stage_compiles_its_own_layers():
    """D7, E10: nothing is asked of layers that lie elsewhere."""
    own = {(site, layer) for site in SITES for layer in (2, 3)}

    def width(site, layer):
        assert (site, layer) in own
        return WIDTH

    plan = [
        Steer("resid_post", vector=[1, 0, 0, 0]),
        Capture("resid_pre"),
        Patch("attn_out", layer=0, position=1, source=RUNS[0]),
    ]
    found = compiled(plan, width=width, points=own)
    assert {point for profile in found.profiles for point in profile.ops} <= own
    assert [plane[:2] for plane in found.profiles[found.prompt[-1]].planes] == [("resid_pre", 2), ("resid_pre", 3)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Steer("resid_post", vector=[1, 2]),
            r"Steer\.vector is of shape \[2\]; allowed: \[4\], the width of resid_post at layer 0",
        ),
        (Steer("resid_post", vector="short"), r"Steer\.vector is of shape \[3\]"),
        (
            Clamp("resid_post", direction="nothing"),
            r"Clamp\.direction .*nothing.* is zero; allowed: a vector with a direction",
        ),
        (Steer("resid_post", vector="nothing", norm_match=True), r"Steer\.vector .*nothing.* is zero"),
        (
            Patch("resid_post", layer=0, position=0, source="zeros", mask="high"),
            r"Patch\.mask .*high.* is from 1 to 3; allowed: .*0 to 1",
        ),
        (Patch("resid_post", layer=9, position=0, source="zeros"), r"Patch\.layer is 9; allowed: 0 to 3"),
        (Capture("resid_post", layers=[1, 4]), r"Capture\.layers is 4; allowed: 0 to 3"),
        (Capture("resid_post", positions=[1, 7]), r"Capture\.positions is 7; allowed: from -7 to 6"),
        (Patch("resid_post", layer=0, position=-8, source="zeros"), r"Patch\.position is -8; allowed: from -7 to 6"),
        (
            Patch("resid_post", layer=0, position=6, source=RUNS[0]),
            r"Patch\.source_position is 6; allowed: from -6 to 5.*'clean'",
        ),
        (Capture("resid_post", positions=Span("x")), r"Capture\.positions is Span.*needs the prompt's text"),
    ],
)
def test_what_cannot_be_compiled_says_why(plan, message):
    named = {
        "short": np.ones(3, np.float32),
        "nothing": np.zeros(4, np.float32),
        "high": np.array([1, 2, 3, 1], np.float32),
    }
    with pytest.raises(PlanError, match=message):
        compiled(plan, vector=lambda name: named[name.name])


def test_named_vectors_are_put_into_shape_without_the_device():
    """The forward would wait for what is read back from there: nothing is, as this device has nothing to read."""
    plan = [
        Clamp("resid_post", layers=0, direction="calm"),
        Steer("resid_post", layers=1, vector="calm", norm_match=True),
        Patch("resid_post", layer=1, position=0, source="zeros", mask="half"),
    ]
    there = {"calm": np.array([3.0, 0.0, 4.0, 0.0], np.float32), "half": np.full(4, 0.5, np.float32)}
    found = compiled(plan, vector=lambda _: torch.empty(WIDTH, device="meta"), on_host=lambda named: there[named.name])
    values = sorted(vector.tolist() for vector in found.bank)
    assert values == [[0.0] * 4, [0.5] * 4, pytest.approx([0.6, 0.0, 0.8, 0.0])]


def test_half_precision_sources_are_taken_as_float32():
    plan = [Patch("resid_post", layer=0, position=0, source=RUNS[0]), Steer("resid_post", layers=0, vector="calm")]
    found = compile_plan(
        Plan.of(plan),
        LENGTH,
        LAYERS,
        width=lambda site, layer: WIDTH,
        vector=lambda named: torch.tensor([1.0, 2.0, 3.0, 4.0]),
        run=lambda *place: torch.full((WIDTH,), 0.1, dtype=torch.bfloat16),
        dtype="float32",
    )
    assert [vector.dtype for vector in found.bank] == [torch.float32] * 2
    assert found.bank[0].tolist() == [0.10009765625] * 4, "the bfloat16 next to 0.1, exactly"


def test_long_prompts_are_cheap():
    """8192 tokens with everything at all of 32 layers, and a run patched in at every position."""
    length = 8192
    run = RecordedRun("long", "long", tuple(range(length)), ("resid_post",), (3,), tuple(range(length)))
    plans = [
        [
            Steer("resid_post", vector=[1] * 4),
            Capture("resid_post", positions="all"),
            Capture("attn_out", positions=range(0, length, 2)),
        ],
        [Patch("resid_post", layer=3, position=range(length), source="zeros")],
        [Patch("resid_post", layer=3, position=range(length), source=run)],
    ]
    seconds = []
    with without_collections():  # which would walk over all that earlier tests have left
        for plan in plans:
            start = time.thread_time()
            found = compiled(plan, length, 32)
            seconds.append(time.thread_time() - start)
            assert found.prompt.shape == (length,)
    assert [len(compiled(plan, length, 32).profiles) for plan in plans] == [3, 2, length + 1]
    assert seconds[0] < 1 and seconds[1] < 1 and seconds[2] < 5, seconds


# ------------------------------------------------------------------------------------------------ heads (N4)

HEAD_DIMS = {("attn_z", layer): 2 for layer in range(LAYERS)}  # a row of 6 numbers has three heads


def of_heads(plan, names=NAMES, **more):
    given = {"width": lambda site, layer: 6, "head_dims": HEAD_DIMS, **more}
    return compiled(plan, vector=lambda named: names[named.name], **given)


HEADED = {
    "a vector for each": (
        Steer("attn_z", layers=1, head=[0, 2], vector=[1.0, 2.0]),
        [(1, 2, 0, 0, 1, 2)],
    ),
    "of a vector of all heads": (
        Steer("attn_z", layers=1, head=1, vector=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        [(0, 0, 3, 4, 0, 0)],
    ),
    "a name": (Steer("attn_z", layers=1, head=1, vector="short"), [(0, 0, 7, 8, 0, 0)]),
    "a patch has a mask": (
        Patch("attn_z", layer=1, position=2, head=2, source=[3.0, 4.0]),
        [(0, 0, 0, 0, 3, 4), (0, 0, 0, 0, 1, 1)],
    ),
    "a patch with a mask": (
        Patch("attn_z", layer=1, position=2, head=[1, 2], source="zeros", mask=[0.5, 1.0]),
        [(0, 0, 0, 0, 0, 0), (0, 0, 0.5, 1, 0.5, 1)],
    ),
    "a clamp is one for each head": (
        Clamp("attn_z", layers=1, head=[0, 1], direction=[0.0, 3.0]),
        [(0, 1, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0)],
    ),
    "a clamp along a part": (
        Clamp("attn_z", layers=1, head=0, direction=[3.0, 4.0, 9.0, 9.0, 9.0, 9.0]),
        [(0.6, 0.8, 0, 0, 0, 0)],
    ),
}


@pytest.mark.parametrize(("edit", "bank"), HEADED.values(), ids=HEADED)
def test_an_edit_of_heads_is_zero_at_the_others(edit, bank):
    found = of_heads(edit, {"short": np.array([7.0, 8.0], np.float32)})
    assert [rounded(each) for each in found.bank] == [rounded(each) for each in bank]


def test_an_edit_of_heads_at_many_positions_has_one_vector():
    found = of_heads(Patch("attn_z", layer=1, position=range(LENGTH), head=1, source=[1.0, 2.0]))
    assert len(found.bank) == 2 and len(found.profiles) == 2


@pytest.mark.parametrize("points", [None, [("attn_z", 3)]])
def test_a_name_of_another_width_than_a_heads_is_refused_on_every_stage(points):
    """The vector may have been replaced since the client checked the plan."""
    plan = Steer("attn_z", layers=1, head=1, vector="calm")
    message = r"^Steer\.vector is of shape \[4\]; allowed: 2, the width of a head, or 6"
    with pytest.raises(PlanError, match=message):
        of_heads(plan, points=points)
    with pytest.raises(PlanError, match=message):
        of_heads(When(Probe("attn_z", layer=0, weight=[1.0] * 6, name="p"), above=0, then=plan), points=points)


def test_a_model_without_heads_there_is_refused():
    with pytest.raises(PlanError, match=r"^Steer\.head is \(1,\); allowed: None at attn_z in this model\.$"):
        of_heads(Steer("attn_z", layers=1, head=1, vector=[1.0, 2.0]), head_dims={})


def test_clamps_of_heads_are_counted_for_each_head():
    """So that a stranger's plan cannot have more of them than one without heads."""
    clamps = [Clamp("attn_z", layers=0, head=range(128), direction=[1.0] * 64)] * 9
    with pytest.raises(PlanError, match=r"^the plan is 1152 edits and captures"):
        check_strangers(Plan.of(clamps), LAYERS)
    check_strangers(Plan.of(clamps[:8]), LAYERS)
