"""Who shares KV blocks with whom (issue 3, E3, D4; design.md section 5, prefix cache), against a brute-force model.

The model: two requests with the same tokens may share the block that ends at `end` if and only if, at every position below `end`, the
same is done to everything that keys and values are computed from. `plan_strategies.meaning` says what is done; which sites count is found
by running a small transformer.
"""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from limits import examples
from plan_strategies import RUNS, VECTORS, edits, meaning, plans

from midstream import Capture, Clamp, GeneratedTokens, Knockout, Patch, Plan, RecordedRun, Span, Steer
from midstream.errors import PlanError
from midstream.plan.compile import ScheduledPlan, changes_kv
from midstream.plan.values import Named, with_digests
from midstream.sites import LAYER_SITES

LAYERS, LONGEST = 2, 6
ENDS = range(LONGEST + 5)

# ------------------------------------------------------------------------------------------------ which sites change KV


def transformer_kv(layers, edited=None, tokens=5, width=4):
    """Keys and values `[layers, 2, tokens, width]` of a causal transformer, with 1 added at `edited`, a (site, layer, position)."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(layers, 8, width, width)) / 2
    h = generator.normal(size=(tokens, width))
    kv = []

    def at(site, layer, value):
        if edited is None or edited[:2] != (site, layer):
            return value
        value = value.copy()
        value[edited[2], 0] += 1  # one element: a norm would take out what is added to all
        return value

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True))

    for i in range(layers):
        h = at("resid_pre", i, h)
        x = at("attn_in", i, norm(h))
        q, k, v = (at(site, i, x @ weight[i, j]) for j, site in enumerate(("attn_q", "attn_k", "attn_v")))
        kv.append([k, v])
        scores = np.where(np.tri(tokens, dtype=bool), q @ k.T, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        z = at("attn_z", i, shares / shares.sum(-1, keepdims=True) @ v)
        h = at("resid_mid", i, h + at("attn_out", i, z @ weight[i, 3]))
        x = at("mlp_in", i, norm(h))
        shares = np.exp(at("router", i, x @ weight[i, 6]))
        act = at("mlp_act", i, np.maximum(x @ weight[i, 4], 0))
        mixture = shares / shares.sum(-1, keepdims=True) @ weight[i, 7]
        h = at("resid_post", i, h + at("mlp_out", i, act @ weight[i, 5] + mixture))
    return np.array(kv)


@pytest.mark.parametrize("site", LAYER_SITES)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_which_sites_change_kv(site, layers):
    plain = transformer_kv(layers)
    for layer in range(layers):
        for position in range(site == "attn_q", 5):  # whatever its query, the first token attends to itself alone
            changed = np.abs(transformer_kv(layers, (site, layer, position)) - plain).max((0, 1, 3)) > 0
            assert not changed[:position].any(), "nothing before the edit"
            assert changes_kv(site, layer, layers) == changed.any()
            if changed.any():
                assert changed[position], "the floor is the edit's own position"


# ------------------------------------------------------------------------------------------------ sharing


def kv_meaning(plan, length, end):
    """What is done below `end` that keys and values can tell."""
    free = {(site, LAYERS - 1) for site in LAYER_SITES if site not in ("resid_pre", "attn_in", "attn_k", "attn_v")}
    return [
        {
            point: done[:3]
            for point, done in meaning(plan, position, length, LAYERS).items()
            if point not in free and any(done[:3])
        }
        for position in range(end)
    ]


def check_pair(first, second):
    """Both requests' keys against the model, at every end."""
    (one, length), (other, other_length) = first, second
    keys, other_keys = ScheduledPlan.of(one, length, LAYERS), ScheduledPlan.of(other, other_length, LAYERS)
    for end in ENDS:
        mine, theirs = kv_meaning(one, length, end), kv_meaning(other, other_length, end)
        assert (keys.at(end) == other_keys.at(end)) == (mine == theirs), end
        assert (keys.at(end) is None) == (not any(mine)), end
    lowest = next((position for position, done in enumerate(kv_meaning(one, length, 40)) if done), None)
    assert keys.floor == lowest


lengths = st.integers(3, LONGEST)


def _has_phase(item):
    return isinstance(item, Steer | Clamp) and item.positions is None


@st.composite
def variants(draw):
    """Two requests that are alike: the second's plan is the first's with something changed, or nothing."""
    length = draw(lengths)
    plan = draw(plans(LAYERS, length))
    items = list(plan.interventions)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(items)))
        match draw(st.sampled_from(["drop", "add", "phase", "split", "swap"])):
            case "drop" if items:
                del items[place % len(items)]
            case "add":
                items.insert(place, draw(edits(LAYERS, length)))
            case "phase" if items and _has_phase(item := items[place % len(items)]):
                items[place % len(items)] = dataclasses.replace(
                    item, phase=draw(st.sampled_from(["both", "prefill", "decode"]))
                )
            case "split" if items and _has_phase(item := items[place % len(items)]) and item.phase == "both":
                halves = [dataclasses.replace(item, phase=phase) for phase in ("prefill", "decode")]
                items[place % len(items) : place % len(items) + 1] = halves
            case "swap" if len(items) > 1:
                items[place % len(items)], items[0] = items[0], items[place % len(items)]
    return (plan, length), (Plan.of(items), draw(st.one_of(st.just(length), st.integers(length, LONGEST))))


@pytest.mark.slow
@given(variants())
@settings(max_examples=examples(800), deadline=None)
def test_requests_share_a_block_if_and_only_if_they_agree_below_its_end(pair):
    check_pair(*pair)


@given(st.tuples(plans(LAYERS, 3, most=2), lengths), st.tuples(plans(LAYERS, 3, most=2), lengths))
@settings(max_examples=examples(300), deadline=None)
def test_the_same_for_requests_that_have_nothing_to_do_with_each_other(first, second):
    check_pair(first, second)


@given(plans(LAYERS, 4), lengths, st.randoms())
@settings(max_examples=examples(200), deadline=None)
def test_keys_do_not_depend_on_how_a_plan_is_written(plan, length, random):
    length = max(length, 4)
    taken_apart = []
    for item in plan.interventions:
        many = isinstance(item, Steer | Clamp) and item.layers == "all"
        taken_apart += [dataclasses.replace(item, layers=layer) for layer in range(LAYERS)] if many else [item]
    steers = [item for item in taken_apart if isinstance(item, Steer)]
    random.shuffle(steers)
    rewritten = Plan((*(item for item in taken_apart if not isinstance(item, Steer)), *steers))
    first, second = ScheduledPlan.of(plan, length, LAYERS), ScheduledPlan.of(rewritten, length, LAYERS)
    assert [first.at(end) for end in ENDS] == [second.at(end) for end in ENDS]


def steer(**fields):
    return Steer("resid_post", **{"layers": 0, "vector": VECTORS[0], **fields})


def patch_at(position, source="zeros"):
    return Patch("resid_pre", layer=1, position=position, source=source)


def of_head(head):
    return Steer("attn_z", layers=0, vector=VECTORS[0], head=head)


def z_patch(**fields):
    return Patch("attn_z", layer=0, position=2, source=RUNS[0], **fields)


def z_clamp(**fields):
    return Clamp("attn_z", layers=0, direction=VECTORS[0], **fields)


# One row for each protection: (plan, its length), (other plan, its length), the first end at which they part; None for never.
def cut(**options):
    return Knockout(**{"layers": 0, "keys": 1, "queries": 2} | options)


PARTING = {
    "a plan and none": ((steer(), 4), (None, 4), 1),
    "decode edits leave the prompt shared": ((steer(phase="decode"), 4), (None, 4), 5),
    "prefill edits of unequal prompts": ((steer(phase="prefill"), 3), (steer(phase="prefill"), 6), 4),
    "prefill and both": ((steer(phase="prefill"), 4), (steer(phase="both"), 4), 5),
    "both, in two halves": (([steer(phase="prefill"), steer(phase="decode")], 4), (steer(), 4), None),
    "both, at any length": ((steer(), 3), (steer(), 6), None),
    "patches at different positions": (
        (Patch("resid_pre", layer=1, position=2, source="zeros"), 5),
        (Patch("resid_pre", layer=1, position=4, source="zeros"), 5),
        3,
    ),
    "a patch counted from the end": (
        (Patch("resid_pre", layer=1, position=-2, source="zeros"), 5),
        (Patch("resid_pre", layer=1, position=3, source="zeros"), 5),
        None,
    ),
    "the same position of another run": (
        (Patch("resid_pre", layer=1, position=2, source=RUNS[0]), 5),
        (Patch("resid_pre", layer=1, position=2, source=RUNS[1]), 5),
        3,
    ),
    "another position of the same run": (
        (Patch("resid_pre", layer=1, position=2, source=RUNS[0]), 5),
        (Patch("resid_pre", layer=1, position=2, source=RUNS[0], source_position=1), 5),
        3,
    ),
    "what lies behind several other edits": (
        ([patch_at(0, VECTORS[0]), patch_at(2), patch_at(4)], 6),
        ([patch_at(0, VECTORS[1]), patch_at(2), patch_at(4)], 6),
        1,
    ),
    "another scale": ((steer(scale=2), 4), (steer(scale=3), 4), 1),
    "another vector": ((steer(), 4), (steer(vector=VECTORS[1]), 4), 1),
    "matched to the norm": ((steer(norm_match=True), 4), (steer(), 4), 1),
    "another head": ((of_head(1), 4), (of_head(2), 4), 1),
    "a head and all of them": ((of_head(1), 4), (of_head(None), 4), 1),
    "another head of a patch": ((z_patch(head=1), 4), (z_patch(head=[0, 1]), 4), 3),
    "another head of a clamp": ((z_clamp(head=1), 4), (z_clamp(head=3), 4), 1),
    "heads in another order": ((of_head([2, 1]), 4), (of_head([1, 2]), 4), None),
    "the last layer's output": ((steer(layers=1), 4), (None, 4), None),
    "the last layer's input": ((Steer("resid_pre", layers=1, vector=VECTORS[0]), 4), (None, 4), 1),
    "a knockout": ((cut(), 5), (None, 5), 3),
    "a knockout of the last layer": ((cut(layers=1), 5), (None, 5), None),
    "a knockout of all queries, from its first key on": ((cut(queries=None), 5), (None, 5), 2),
    "a knockout of generated queries": ((cut(queries=None, phase="decode"), 5), (None, 5), 6),
    "another key of a knockout": ((cut(), 5), (cut(keys=0), 5), 3),
    "another head of a knockout": ((cut(head=1), 5), (cut(head=2), 5), 3),
    "a key counted from the end": ((cut(), 5), (cut(keys=-4), 5), None),
    "a key counted from another end": ((cut(keys=-4), 6), (cut(keys=-4), 5), 3),
    "keys by a word": ((cut(keys="last_prompt", queries=4), 5), (cut(keys=[-1], queries=4), 5), None),
    "keys by another word": ((cut(keys="all_prompt", queries=4), 5), (cut(keys=range(5), queries=4), 5), None),
    "generated keys": ((cut(keys="all_generated", queries=None), 5), (None, 5), 6),
    "generated keys of a prompt's query": ((cut(keys="all_generated"), 5), (None, 5), None),
    "generated keys after a longer prompt": (
        (cut(keys="all_generated", queries=None), 5),
        (cut(keys="all_generated", queries=None), 6),
        6,
    ),
    "generated keys of one query after a longer prompt": (
        (cut(keys=GeneratedTokens(1), queries=3, phase="decode"), 4),
        (cut(keys=GeneratedTokens(1), queries=2, phase="decode"), 5),
        8,
    ),
    "another generated key": (
        (cut(keys=GeneratedTokens([0, 2]), queries=None), 4),
        (cut(keys=GeneratedTokens([0, 1]), queries=None), 4),
        5,
    ),
    "a query that attends to itself": ((cut(keep_self=True), 5), (cut(), 5), 3),
    "knockouts in another order": (([cut(), cut(keys=0)], 5), ([cut(keys=0), cut()], 5), None),
    "scale 0": ((steer(scale=0), 4), (None, 4), None),
    "captures": ((Capture("resid_post"), 4), (None, 4), None),
    "clamps in another order": (
        ([Clamp("resid_post", layers=0, direction=v) for v in VECTORS[:2]], 4),
        ([Clamp("resid_post", layers=0, direction=v) for v in VECTORS[1::-1]], 4),
        1,
    ),
    "steers in another order": (([steer(), steer(scale=2)], 4), ([steer(scale=2), steer()], 4), None),
}


@pytest.mark.parametrize(("first", "second", "parting"), PARTING.values(), ids=PARTING)
def test_where_requests_part(first, second, parting):
    keys = [ScheduledPlan.of(Plan.of(plan), length, LAYERS) for plan, length in (first, second)]
    found = [end for end in range(12) if keys[0].at(end) != keys[1].at(end)]
    assert found == ([] if parting is None else list(range(parting, 12)))


def test_names_share_only_when_their_vectors_are_known_to_be_equal():
    """A name may mean another vector tomorrow."""
    plan, digest = Plan.of(steer(vector="calm")), steer().vector.digest

    def key(given):
        return ScheduledPlan.of(given, 4, LAYERS).at(4)

    assert key(plan) != key(plan), "unknown: like no other, not even itself"
    once = ScheduledPlan.of(plan, 4, LAYERS)
    assert once.at(4) == once.at(4)
    known = with_digests(plan, {"calm": digest})
    assert key(known) == key(Plan.of(steer())) != key(with_digests(plan, {"calm": "0" * 32}))
    forged = Plan.of(steer(vector=Named("calm", digest)))
    assert with_digests(forged, {"calm": "1" * 32}).edits[0].vector.digest == "1" * 32
    assert with_digests(forged, {}).edits[0].vector.digest is None
    masked = Plan.of(Patch("resid_post", layer=0, position=1, source="zeros", mask="calm"))
    assert with_digests(masked, {"calm": digest}).edits[0].mask.digest == digest


def test_two_names_in_one_plan_are_told_apart():
    keys = ScheduledPlan.of(Plan.of([steer(vector="a", phase="prefill"), steer(vector="b", phase="decode")]), 2, LAYERS)
    same = ScheduledPlan.of(Plan.of([steer(vector="a", phase="prefill"), steer(vector="a", phase="decode")]), 2, LAYERS)
    assert keys.floor == same.floor == 0
    assert len(keys.starts) == 2 and len(same.starts) == 1


# ------------------------------------------------------------------------------------------------ captures


@given(plans(LAYERS, 5), st.integers(5, 8))
@settings(max_examples=examples(300), deadline=None)
def test_the_lowest_captured_position(plan, length):
    """D4: cache hits end there."""
    captured = [p for p in range(length) if any(done[3] for done in meaning(plan, p, length, LAYERS).values())]
    assert ScheduledPlan.of(plan, length, LAYERS).longest_hit == min(captured, default=None)


def test_generated_positions_are_no_reason_to_recompute():
    assert ScheduledPlan.of(Plan.of(Capture("resid_post", positions="all_generated")), 7, LAYERS).longest_hit is None
    assert ScheduledPlan.of(Plan.of(Capture("resid_post")), 7, LAYERS).longest_hit == 6


def test_a_knockout_needs_all_positions():
    """N2: their keys and values."""
    assert ScheduledPlan.of(Plan.of([Capture("resid_post"), cut()]), 7, LAYERS).longest_hit == 0
    assert ScheduledPlan.of(Plan.of(steer()), 7, LAYERS).longest_hit is None


# ------------------------------------------------------------------------------------------------ misuse, size


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (steer(layers=5), r"Steer\.layers is 5; allowed: 0 to 1"),
        (Patch("resid_post", layer=0, position=9, source="zeros"), r"Patch\.position is 9; allowed: from -4 to 3"),
        (Patch("resid_post", layer=0, position=Span("x"), source="zeros"), "needs the prompt's text"),
    ],
)
def test_what_has_no_key_says_why(plan, message):
    with pytest.raises(PlanError, match=message):
        ScheduledPlan.of(Plan.of(plan), 4, LAYERS)


def test_keys_of_a_long_prompt_are_cheap():
    """8192 positions patched, each from its own row, under a steer at all of 32 layers; a key for each of 512 blocks."""
    length = 8192
    run = RecordedRun("long", "long", tuple(range(length)), ("resid_post",), (3,), tuple(range(length)))
    plan = Plan.of(
        [Steer("resid_post", vector=[1.0]), Patch("resid_post", layer=3, position=range(length), source=run)]
    )
    start = time.thread_time()
    keys = ScheduledPlan.of(plan, length, 32)
    found = [keys.at(end) for end in range(16, length + 1, 16)]
    assert time.thread_time() - start < 3
    assert len(set(found)) == 512


@given(plans(LAYERS, 4), lengths)
@settings(max_examples=examples(100), deadline=None)
def test_a_block_past_all_edits_has_the_key_of_all(plan, length):
    """Once an edit lies behind, every later block knows of it."""
    keys = ScheduledPlan.of(plan, max(length, 4), LAYERS)
    assume(keys.floor is not None)
    assert all(keys.at(end) is not None for end in range(keys.floor + 1, 20))
    assert all(keys.at(end) is None for end in range(keys.floor + 1))
