"""Plans as values (issue 3: the plan, errors on every carrier; F3): what may be written, what it becomes, when two plans are the same."""

import copy
import dataclasses
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples
from plan_strategies import VECTORS, edits, meaning, plans

import midstream
from midstream import Capture, Clamp, Consumer, Patch, Plan, RecordedRun, Span, Steer
from midstream.errors import CaptureError, MidstreamError, PlanError
from midstream.plan.values import Named, Vector, Zeros, has_spans, resolve_spans
from midstream.plan.vectors import load_vectors, save_vectors

V = [1.0, 2.0, 2.0]
RUN = RecordedRun("clean", "a1", tuple(range(6)), ("resid_post",), (0, 1, 2), tuple(range(6)))


def steer(**fields):
    return Steer(**{"site": "resid_post", "vector": V, **fields})


def patch(**fields):
    return Patch(**{"site": "resid_post", "layer": 1, "position": 0, "source": "zeros", **fields})


def clamp(**fields):
    return Clamp(**{"site": "resid_post", "direction": V, **fields})


def capture(**fields):
    return Capture(**{"site": "resid_post", **fields})


# ------------------------------------------------------------------------------------------------ what is refused

SITES = r"resid_pre, attn_in, attn_q, attn_k, attn_v, attn_z, attn_out, resid_mid, mlp_in, router, mlp_act, mlp_out, resid_post"
REFUSED = [
    # what, its fields, and the message: the field, what was given, what is allowed
    (steer, {"site": "resid"}, rf"^Steer\.site is 'resid'; allowed: {SITES}\.$"),
    (steer, {"site": 3}, rf"^Steer\.site is 3; allowed: {SITES}\.$"),
    (steer, {"site": ["resid_post"]}, r"^Steer\.site is \['resid_post'\]; allowed: resid_pre"),
    (capture, {"site": "logits"}, r"^Capture\.site is 'logits', which a trace can reach but a plan cannot; allowed: resid_pre"),
    (patch, {"source": RUN, "source_site": "embed"}, r"^Patch\.source_site is 'embed', .*; allowed: resid_pre"),
    (steer, {"layers": "each"}, r"^Steer\.layers is 'each'; allowed: 'all', a layer or a sequence of layers, counted from 0\.$"),
    (steer, {"site": "blocks.3.hook_resid_post"}, r"^Steer\.site is .*; did you mean 'resid_post', with layer 3\?$"),
    (steer, {"site": "hook_mlp_out"}, r"; did you mean 'mlp_out'\?$"),
    (steer, {"site": "blocks.3.attn.hook_z"}, r"; did you mean 'attn_z', with layer 3\?$"),
    (steer, {"layers": [0, 2.5]}, r"^Steer\.layers\[1\] is 2\.5; allowed: a whole number\.$"),
    (steer, {"layers": True}, r"^Steer\.layers is True; allowed: a whole number"),
    (steer, {"layers": []}, r"^Steer\.layers is empty; allowed: 'all', a layer or a sequence"),
    (steer, {"layers": [4, 1, 4]}, r"^Steer\.layers is \[4, 1, 4\], which has 4 twice; allowed: each once\.$"),
    (steer, {"layers": 2**31}, r"^Steer\.layers is 2147483648; allowed: a whole number"),
    (steer, {"layers": None}, r"^Steer\.layers is None; allowed: 'all'"),
    (steer, {"scale": float("nan")}, r"^Steer\.scale is nan; allowed: a finite number that float32 can hold\.$"),
    (steer, {"scale": float("inf")}, r"^Steer\.scale is inf; allowed: a finite number"),
    (steer, {"scale": 1e39}, r"^Steer\.scale is 1e\+39; allowed: a finite number that float32 can hold\.$"),
    (steer, {"scale": 10**400}, r"^Steer\.scale is too large; allowed: a finite number"),
    (steer, {"scale": "2"}, r"^Steer\.scale is '2'; allowed: a finite number"),
    (steer, {"scale": True}, r"^Steer\.scale is True; allowed: a finite number"),
    (steer, {"phase": "prompt"}, r"^Steer\.phase is 'prompt'; allowed: 'both' or 'prefill' or 'decode'\.$"),
    (steer, {"norm_match": 1}, r"^Steer\.norm_match is 1; allowed: True or False\.$"),
    (steer, {"vector": [0, 0], "norm_match": True}, r"^Steer\.vector is zero; allowed: a vector with a direction, since norm_match is set"),
    (steer, {"vector": [1.0, float("nan")]}, r"^Steer\.vector is NaN at index 1; allowed: finite numbers\.$"),
    (steer, {"vector": torch.tensor([1.0, -float("inf")])}, r"^Steer\.vector is infinity at index 1; allowed: finite numbers\.$"),
    (steer, {"vector": np.array([1e300])}, r"^Steer\.vector is 1e\+300 at index 0; allowed: numbers that float32 can hold\.$"),
    (steer, {"vector": torch.ones(2, 3)}, r"^Steer\.vector is of shape \[2, 3\]; allowed: shape \[hidden\], such as x\[0\] or x.*\.$"),
    (steer, {"vector": np.float32(1)}, r"^Steer\.vector is a float32 of shape \[\] and dtype float32; allowed: numbers of"),
    (steer, {"vector": []}, r"^Steer\.vector is \[\]; allowed: numbers of shape \[hidden\]\.$"),
    (steer, {"vector": torch.ones(0)}, r"^Steer\.vector is of shape \[0\]; allowed: shape \[hidden\]\.$"),
    (steer, {"vector": [[1.0], [1.0, 2.0]]}, r"^Steer\.vector is \[\[1\.0\], \[1\.0, 2\.0\]\]; allowed: numbers of shape \[hidden\]"),
    (steer, {"vector": ["1", "2"]}, r"^Steer\.vector is \['1', '2'\]; allowed: numbers"),
    (steer, {"vector": np.array([1j])}, r"^Steer\.vector is a ndarray of shape \[1\] and dtype complex128; allowed: numbers"),
    (steer, {"vector": torch.tensor([True])}, r"^Steer\.vector is a Tensor of shape \[1\] and dtype torch\.bool; allowed: numbers"),
    (steer, {"vector": torch.empty(3, device="meta")}, r"^Steer\.vector is a Tensor of shape \[3\]"),
    (steer, {"vector": None}, r"^Steer\.vector is None; allowed: numbers of shape \[hidden\], or a name"),
    (steer, {"vector": ""}, r"^Steer\.vector is ''; allowed: numbers of shape \[hidden\], or a name"),
    (steer, {"vector": "zeros"}, r"^A vector cannot be named 'zeros'"),
    (clamp, {"direction": [0.0, 0.0]}, r"^Clamp\.direction is zero; allowed: a vector with a direction\.$"),
    (clamp, {"low": 1, "high": 0}, r"^Clamp\.low is 1 and Clamp\.high is 0; allowed: low <= high"),
    (clamp, {"low": float("inf"), "high": float("inf")}, r"^Clamp\.low is inf and Clamp\.high is inf; allowed"),
    (clamp, {"high": float("nan")}, r"^Clamp\.high is nan; allowed: a number, or infinity for no bound\.$"),
    (clamp, {"strength": 1.5}, r"^Clamp\.strength is 1\.5; allowed: a number from 0 to 1\.$"),
    (clamp, {"phase": None}, r"^Clamp\.phase is None; allowed: 'both'"),
    (patch, {"alpha": -0.1}, r"^Patch\.alpha is -0\.1; allowed: a number from 0 to 1\.$"),
    (patch, {"layer": "all"}, r"^Patch\.layer is 'all'; allowed: a whole number\.$"),
    (patch, {"layer": [1]}, r"^Patch\.layer is \[1\]; allowed: a whole number\.$"),
    (patch, {"position": "last_prompt"}, r"^Patch\.position is 'last_prompt'; allowed: a position, a sequence of .*Span\(text\)\.$"),
    (patch, {"position": []}, r"^Patch\.position is empty; allowed: a position"),
    (patch, {"position": [1, 1]}, r"^Patch\.position is \[1, 1\], which has 1 twice; allowed: each once\.$"),
    (patch, {"position": 1.0}, r"^Patch\.position is 1\.0; allowed: a position"),
    (patch, {"source": [1, 2], "source_position": 1}, r"^Patch\.source_position is 1; allowed: None, .* no recorded run\.$"),
    (patch, {"source": "calm", "source_layer": 1}, r"^Patch\.source_layer is 1; allowed: None, since"),
    (patch, {"source": RUN, "position": [1, 2, 3], "source_position": [1, 2]}, r"^Patch\.source_position is 2 positions for 3; allowed: "),
    (patch, {"source": RUN, "source_position": "1"}, r"^Patch\.source_position is '1'; allowed: a position of the run or one for each"),
    (patch, {"source": RUN, "source_position": Span("x")}, r"^Patch\.source_position is Span.*; allowed: a position of the run"),
    (patch, {"mask": [0.5, 1.5]}, r"^Patch\.mask is from 0\.5 to 1\.5; allowed: numbers from 0 to 1\.$"),
    (patch, {"mask": [[1], [1]]}, r"^Patch\.mask is of shape \[2, 1\]; allowed: shape \[hidden\], such as x\[0\] or x.*\.$"),
    (steer, {"positions": "last_prompt"}, r"^Steer\.positions is 'last_prompt'; allowed: a position, a sequence of positions, or Span"),
    (steer, {"positions": []}, r"^Steer\.positions is empty; allowed: a position"),
    (clamp, {"positions": 1, "phase": "prefill"}, r"^Clamp\.positions is 1 with phase='prefill'; allowed: positions of the prompt alone"),
    (clamp, {"positions": -1, "phase": "decode"}, r"^Clamp\.positions is -1; allowed: with phase=\"decode\" numbers of generated tokens"),
    (clamp, {"positions": Span("a"), "phase": "decode"}, r"^Clamp\.positions is Span.*numbers of generated tokens, from 0 to 65535"),
    (capture, {"positions": "last"}, r"^Capture\.positions is 'last'; allowed: 'last_prompt', 'all_prompt', 'all_gen.*', a position"),
    (capture, {"positions": [0, None]}, r"^Capture\.positions\[1\] is None; allowed: a whole number"),
    (capture, {"positions": {1: 2}}, r"^Capture\.positions is \{1: 2\}; allowed: 'last_prompt'"),
    (capture, {"when": "between"}, r"^Capture\.when is 'between'; allowed: 'before' or 'after'\.$"),
    (capture, {"to": 3}, r"^Capture\.to is 3; allowed: None for the output, a directory, a callable, a Consumer, or a tuple of these\.$"),
    (capture, {"to": ()}, r"^Capture\.to is empty; allowed: None for the output"),
    (capture, {"to": ("a", b"b")}, r"^Capture\.to is b'b'; allowed: None for the output"),
    (capture, {"to": ""}, r"^Capture\.to is ''; allowed: a string that is not empty\.$"),
    (Span, {"text": ""}, r"^Span\.text is ''; allowed: a string that is not empty\.$"),
    (Span, {"text": "a\ud800"}, r"^Span\.text is 'a\\ud800'; allowed: a string that UTF-8 can hold\.$"),
    (Span, {"text": "a", "occurrence": -1}, r"^Span\.occurrence is -1; allowed: a whole number, 0 or more\.$"),
    (Named, {"name": "a", "digest": "xyz"}, r"^Named\.digest is 'xyz'; allowed: 32 hexadecimal digits or None\.$"),
    (lambda name: Consumer(name), {"name": 1}, r"^Consumer\.name is 1; allowed: a string that is not empty\.$"),
    (lambda: Consumer("a", f=max), {}, r"^Consumer options\['f'\] is <built-in function max>; allowed: strings, finite numbers"),
    (lambda: Consumer("a", x=[1, {"y": float("nan")}]), {}, r"^Consumer options\['x'\]\[1\]\['y'\] is nan; allowed: strings, finite"),
    (lambda: Consumer("a", x={1: 2}), {}, r"^a key of Consumer options\['x'\] is 1; allowed: a string"),
    (lambda: Consumer("a", x=2**63), {}, r"^Consumer options\['x'\] is 9223372036854775808; allowed: strings, finite numbers"),
    (lambda: Plan.of(3), {}, r"^the plan is 3; allowed: a Plan, interventions, a wire form, JSON, or None\.$"),
    (lambda: Plan.of(torch.tensor(1.0)), {}, r"^the plan is a Tensor of shape \[\] and dtype torch\.float32; allowed: a Plan"),
    (lambda: Plan.of([steer(), V]), {}, r"^plan\[1\] is \[1\.0, 2\.0, 2\.0\]; allowed: Steer, Patch, Clamp, Apply, When, Knockout"),
    (lambda: Plan.of("steer it"), {}, r"^The plan is not JSON: "),
    (steer, {"layer": 3}, r"^Steer has no layer: did you mean 'layers'\?$"),
    (patch, {"layers": 3}, r"^Patch has no layers: did you mean 'layer' or 'source_layer'\?$"),
    (lambda: Clamp(), {}, r"^Clamp needs site, direction\.$"),
    (lambda: Patch("mlp_out", layer=3), {}, r"^Patch needs position, source\.$"),
    (lambda: Capture("mlp_out", 3), {}, r"^Capture takes site by position, and by name: layers, positions, when, to, .*, head\.$"),
    (lambda: Capture("mlp_out", site="mlp_in"), {}, r"^Capture\.site was given twice, by position and by name\.$"),
    (lambda: RecordedRun("a", "b", (1,), ("logits",), (0,), (0,)), {}, r"^RecordedRun\.sites is \('logits',\); allowed: resid_pre"),
    (lambda: RecordedRun("a", "", (1,), (), (0,), (0,)), {}, r"^RecordedRun\.id is ''; allowed: a string that is not empty"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "fields", "message"), REFUSED)
def test_what_is_refused_and_why(make, fields, message):
    with pytest.raises(PlanError, match=message) as raised:
        make(**fields)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, MidstreamError)
    assert len(str(raised.value)) < 300


def test_errors_have_their_place():
    assert issubclass(CaptureError, MidstreamError) and not issubclass(CaptureError, ValueError)


# ------------------------------------------------------------------------------------------------ what is taken, and what it becomes


@pytest.mark.parametrize(
    "given",
    [
        V,
        tuple(V),
        [1, 2, 2],
        np.array(V),
        np.array(V, np.float16),
        np.array([1, 2, 2], np.uint8),
        np.array(V, ">f8"),
        np.array([1.0, 9, 2, 9, 2])[::2],
        torch.tensor(V),
        torch.tensor(V, dtype=torch.bfloat16),
        torch.tensor(V, dtype=torch.float64, requires_grad=True),
        torch.tensor([1, 2, 2]),
        torch.tensor(V).to(torch.float8_e4m3fn),
        Vector(V),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_a_vector_is_its_float32_values_wherever_it_came_from(given):
    held = steer(vector=given).vector
    assert held.data.dtype == np.dtype("<f4") and held.data.tolist() == V
    assert held.digest == hashlib.blake2b(np.array(V, "<f4").tobytes(), digest_size=16).hexdigest()
    assert held == Vector(V) and hash(held) == hash(Vector(V)) and held != Vector([1.0, 2.0, 2.5])


@pytest.mark.parametrize(
    "given", [np.array(V, np.float32), torch.tensor(V), list(V)], ids=lambda given: type(given).__name__
)
def test_later_changes_do_not_reach_a_plan(given):
    held = steer(vector=given).vector
    given[0] = 7.0
    assert held.data.tolist() == V
    with pytest.raises(ValueError, match="read-only"):
        held.data[0] = 7.0


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("all", "all"),
        (3, (3,)),
        ([5, 0, 2], (0, 2, 5)),
        (range(2, 5), (2, 3, 4)),
        (np.int64(4), (4,)),
        (np.array([2, 1]), (1, 2)),
        (torch.tensor([2, 1]), (1, 2)),
    ],
)
def test_layers(given, held):
    assert {steer(layers=given).layers, clamp(layers=given).layers, capture(layers=given).layers} == {held}


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (3, (3,)),
        (-1, (-1,)),
        ([5, 0], (5, 0)),
        (range(2), (0, 1)),
        (np.array([2, -1]), (2, -1)),
        (Span("x"), Span("x")),
    ],
)
def test_positions(given, held):
    assert patch(position=given).position == capture(positions=given).positions == held
    assert all(type(p) is int for p in held) if isinstance(held, tuple) else True


def test_directions_are_made_unit_once():
    assert clamp().direction.data.tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3], abs=1e-7)
    # Where all large elements are rounded the same way, dividing by the length once more would move the small ones.
    count = next(n for n in range(2, 9999) if np.float32(1 / np.sqrt(n)) * np.sqrt(np.float64(n)) - 1 > 4.5e-8)
    skewed = np.concatenate([np.ones(count), np.random.default_rng(0).random(64) * 1e-6])
    for direction in (V, [1e-30, 2e-30], skewed, np.random.default_rng(0).normal(size=4096)):
        made = clamp(direction=direction)
        assert np.linalg.norm(made.direction.data.astype(np.float64)) == pytest.approx(1, abs=1e-6)
        assert clamp(direction=made.direction).direction.digest == made.direction.digest, (
            "unit stays as it is, to the bit"
        )
        assert dataclasses.replace(made, low=-1) == clamp(direction=direction, low=-1)


def test_sources_and_masks():
    assert (
        patch().source == Zeros() and patch(source="calm").source == Named("calm") and patch(source=RUN).source is RUN
    )
    assert patch(source=V).source == Vector(V)
    assert patch(mask=torch.tensor([True, False])).mask.data.tolist() == [1, 0]
    assert patch(mask=[0, 0.5]).mask.data.tolist() == [0, 0.5] and patch(mask="half").mask == Named("half")
    assert patch(source=RUN, position=[1, 2], source_position=-1).source_position == (-1,)
    assert patch(source=RUN, position=[1, 2], source_position=[3, 3]).source_position == (3, 3)
    assert patch(source=RUN, position=Span("x"), source_position=[3, 4]).source_position == (3, 4)


def test_where_captures_go(tmp_path):
    def sink(*row):
        pass

    assert capture().sinks == (None,) and capture(to=sink).sinks == (sink,)
    assert capture(to=tmp_path).sinks == (str(tmp_path),)
    consumer = Consumer("probe", name="x", threshold=0.5, tags=("a", "b"))
    assert consumer.options == {"name": "x", "threshold": 0.5, "tags": ["a", "b"]}
    assert capture(to=[None, Path("a"), sink, consumer]).to == (None, "a", sink, consumer)
    assert hash(consumer) == hash(Consumer("probe", tags=["a", "b"], threshold=0.5, name="x"))


@given(plans(3, 7, named=True))
@settings(max_examples=examples(100), deadline=None)
def test_values_are_values(plan):
    for same in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), Plan(plan.interventions)):
        assert same == plan and hash(same) == hash(plan) and same.hash == plan.hash
    for item in plan.interventions:
        assert dataclasses.replace(item) == item
        with pytest.raises(dataclasses.FrozenInstanceError):
            item.site = "resid_mid"


def test_what_a_plan_is_made_of():
    items = (steer(), capture(), patch(), clamp())
    plan = Plan.of(items)
    assert plan.interventions == items and plan.edits == (items[0], items[2], items[3]) and plan.captures == (items[1],)
    assert Plan.of(plan) is plan and Plan.of(items[0]).interventions == items[:1]
    assert Plan.of(iter(items)) == plan == Plan.of([Plan.of(items[:2]), *items[2:]]) == Plan(list(items))
    assert not Plan.of(None) and not Plan.of([]) and plan


def test_the_left_plan_comes_first():
    """A plan for every request and the request's own compose: the engine's first."""
    everyone, own = Plan.of(patch()), Plan.of(patch(source=V))
    assert (everyone + own).interventions == (patch(), patch(source=V))
    assert everyone + own.interventions[0] == everyone + own == everyone + [*own.interventions]
    assert [steer()] + everyone == Plan.of([steer(), patch()]) and None + everyone == everyone == everyone + None


def test_the_names_in_the_package():
    for name in "Steer Patch Clamp Capture Span Consumer Plan RecordedRun".split():
        assert getattr(midstream, name) is globals()[name] and name in midstream.__all__
    assert "open_captures" in midstream.__all__


# ------------------------------------------------------------------------------------------------ when two plans are the same


def effect(plan, layers, length):
    """What the plan does at every position, by the model that `plan_strategies` writes down."""
    return [
        meaning(plan, position, length, layers) for position in range(length + 5)
    ]  # generated tokens are named up to the fourth


@st.composite
def rewritten(draw, layers=3, length=6):
    """A plan, and one that is written another way or has one thing changed."""
    plan = draw(plans(layers, length))
    items = list(plan.interventions)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(len(items) - 1, 0)))
        match draw(st.sampled_from(["split", "swap", "noop", "add", "drop", "list"])):
            case "split" if items and getattr(items[place], "layers", None) == "all":
                items[place : place + 1] = [dataclasses.replace(items[place], layers=i) for i in range(layers)]
            case "split" if items and isinstance(item := items[place], Patch) and item.source_position is None:
                items[place : place + 1] = [dataclasses.replace(item, position=p) for p in item.position]
            case "split" if items and isinstance(getattr(item := items[place], "positions", None), tuple):
                if isinstance(item, Steer | Clamp):
                    items[place : place + 1] = [dataclasses.replace(item, positions=p) for p in item.positions]
            case "swap" if items:
                items[0], items[place] = items[place], items[0]
            case "noop":
                items.insert(place, draw(st.sampled_from([steer(scale=0), patch(alpha=0), clamp(strength=0)])))
            case "add":
                items.insert(place, draw(edits(layers, length)))
            case "drop" if items:
                del items[place]
            case "list" if items and getattr(items[place], "layers", None) == "all":
                items[place] = dataclasses.replace(items[place], layers=[2, 1, 0])
    return plan, Plan.of(items)


@pytest.mark.slow
@given(rewritten())
@settings(max_examples=examples(500), deadline=None)
def test_plans_of_one_effect_have_one_hash_and_others_do_not(pair):
    first, second = (plan.normal(3).hash for plan in pair)
    same = effect(pair[0], 3, 6) == effect(pair[1], 3, 6) and effect(pair[0], 3, 9) == effect(pair[1], 3, 9)
    if first == second:
        assert same
    # Positions written from the begin and from the end are the same in one prompt, and not in another: these hashes may differ.
    places = [p for plan in pair for item in plan.interventions for p in _listed(item)]
    phases = [
        (a.phase, b.phase)
        for plan in pair
        for a in plan.edits
        for b in plan.edits
        if "phase" in vars(a) and "phase" in vars(b)
    ]
    if (
        same
        and (not places or min(places) >= 0)
        and all(a == b for a, b in phases)
        and not any(map(_has_clamps_of_both_kinds, pair))
        and not any(plan.captures for plan in pair)
    ):
        assert first == second


def _has_clamps_of_both_kinds(plan):
    """Everywhere and at positions: these keep the order in which they were written."""
    return len({clamp.positions is None for clamp in plan.edits if isinstance(clamp, Clamp)}) > 1


def _listed(item):
    place = getattr(item, "position", getattr(item, "positions", ()))
    return () if place is None or isinstance(place, str) else place


@given(plans(3, 6, named=True))
@settings(max_examples=examples(200), deadline=None)
def test_the_normal_form_does_the_same_and_is_its_own(plan):
    normal = plan.normal(3)
    assert effect(normal, 3, 6) == effect(plan, 3, 6) and effect(normal, 3, 8) == effect(plan, 3, 8)
    assert normal.normal(3) == normal and normal.hash == plan.normal(3).hash
    assert all(len(item.layers) == 1 for item in normal.interventions if not isinstance(item, Patch))


CHANGES = [
    (steer, {"site": "resid_mid"}), (steer, {"layers": 1}), (steer, {"vector": [1.0, 2.0, 2.5]}), (steer, {"vector": "calm"}),
    (steer, {"scale": 1.5}), (steer, {"phase": "decode"}), (steer, {"norm_match": True}),
    (steer, {"positions": 1}), (steer, {"positions": -1}), (steer, {"positions": Span("a")}), (clamp, {"positions": [0, 1]}),
    (patch, {"site": "mlp_out"}), (patch, {"layer": 0}), (patch, {"position": 1}), (patch, {"position": -1}),
    (patch, {"position": Span("a")}),
    (patch, {"source": V}), (patch, {"source": RUN}), (patch, {"alpha": 0.5}), (patch, {"mask": [1, 1, 0]}),
    (patch, {"source": RUN, "source_position": 1}), (patch, {"source": RUN, "source_layer": 2}),
    (patch, {"source": RUN, "source_site": "mlp_out"}),
    (clamp, {"direction": [1.0, 0, 0]}), (clamp, {"low": -1}), (clamp, {"high": 1}), (clamp, {"high": np.inf}), (clamp, {"strength": 0.5}),
    (clamp, {"phase": "prefill"}), (clamp, {"layers": 2}),
    (capture, {"positions": "all"}), (capture, {"positions": 1}), (capture, {"positions": range(40)}), (capture, {"positions": range(41)}),
    (capture, {"when": "after"}), (capture, {"to": "a"}), (capture, {"to": (None, "a")}), (capture, {"to": Consumer("a")}),
    (capture, {"to": Consumer("a", x=1)}), (capture, {"to": print}), (capture, {"layers": 0}), (capture, {"positions": Span("a", 1)}),
]  # fmt: skip


def test_every_field_is_in_the_hash():
    plain = [(make, {}) for make in (steer, patch, clamp, capture)]
    hashes = [Plan.of(make(**fields)).normal(3).hash for make, fields in plain + CHANGES]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([steer(layers=[2, 0, 1])], [steer()]),
        ([steer(), steer(scale=2)], [steer(scale=2), steer()]),
        ([steer(layers=1), steer(layers=0), clamp()], [clamp(), steer(layers=[0, 1])]),
        ([patch(), steer(scale=0), patch(alpha=0), clamp(strength=0)], [patch()]),
        ([clamp(low=-np.inf, high=np.inf), steer(vector=[0, 0, 0]), patch(mask=[0, 0, 0])], []),
        ([patch(position=[3, 1])], [patch(position=1), patch(position=3)]),
        ([patch(layer=2), patch(layer=0)], [patch(layer=0), patch(layer=2)]),
        ([patch(source=RUN)], [patch(source=RUN, source_position=0, source_layer=1, source_site="resid_post")]),
        ([patch(source=RUN, position=[1, 2], source_position=4)], [patch(source=RUN, position=[1, 2], source_position=[4, 4])]),
        ([steer(vector="calm")], [steer(vector=Named("calm"))]),
        ([steer(vector=Named("calm", Vector(V).digest))], [steer(vector=torch.tensor(V))]),
        ([capture(), capture()], [capture(layers=[0, 1, 2])]),
        ([capture(positions=[3, 1])], [capture(positions=[1, 3])]),
        ([steer(), clamp(), patch(), capture()], [capture(), patch(), clamp(), steer()]),
        ([clamp(layers=0), clamp(layers=1, low=-1)], [clamp(layers=1, low=-1), clamp(layers=0)]),
    ],
)  # fmt: skip
def test_one_plan_written_in_two_ways(one, other):
    assert Plan.of(one).normal(3).hash == Plan.of(other).normal(3).hash


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([patch(), patch(source=V)], [patch(source=V), patch()]),
        ([clamp(low=-1), clamp(low=-2)], [clamp(low=-2), clamp(low=-1)]),
        ([steer()], [steer(), steer()]),
        # these may meet in one prompt, and then their order counts
        ([patch(position=-1), patch(position=4, source=V)], [patch(position=4, source=V), patch(position=-1)]),
        (
            [patch(position=Span("a")), patch(position=4, source=V)],
            [patch(position=4, source=V), patch(position=Span("a"))],
        ),
    ],
)
def test_order_counts_where_it_makes_a_difference(one, other):
    assert Plan.of(one).normal(3).hash != Plan.of(other).normal(3).hash


def test_order_counts_before_the_layers_are_known():
    one, other = [clamp(low=-1), clamp(low=-2, layers=1)], [clamp(low=-2, layers=1), clamp(low=-1)]
    assert Plan.of(one).hash != Plan.of(other).hash


# ------------------------------------------------------------------------------------------------ spans

TEXT = "The cat saw the cat. Über-cat!"
#         0: no text   1   2      3      4      5      6    7      8 and 9: two tokens of one character
OFFSETS = [(0, 0), (0, 3), (3, 7), (7, 11), (11, 15), (15, 19), (19, 20),
           (20, 21), (21, 22), (21, 22), (22, 25), (25, 29), (29, 30)]  # fmt: skip


@pytest.mark.parametrize(
    ("span", "positions"),
    [
        (Span("cat"), (2,)),
        (Span("cat", 1), (5,)),
        (Span("cat", 2), (11,)),
        (Span("at saw t"), (2, 3, 4)),
        (Span("The"), (1,)),
        (Span("Ü"), (8, 9)),
        (Span(TEXT), tuple(range(1, 13))),
    ],
)
def test_spans_are_the_tokens_that_overlap_them(span, positions):
    plan = Plan.of([steer(), patch(position=span), capture(positions=span, when="after")])
    found = resolve_spans(plan, TEXT, OFFSETS)
    assert found == Plan.of([steer(), patch(position=positions), capture(positions=positions, when="after")])
    assert has_spans(plan) and not has_spans(found)


def test_tokens_of_no_text_are_in_no_span():
    """As the begin of a sequence is, wherever it stands."""
    found = resolve_spans(Plan.of(capture(positions=Span("abc"))), "xabcx", [(0, 2), (2, 2), (2, 4), (4, 5)])
    assert found.captures[0].positions == (0, 2)


@pytest.mark.parametrize(
    ("item", "text", "message"),
    [
        (
            patch(position=Span("dog")),
            TEXT,
            r"^Patch\.position is Span\(text='dog'.*'The cat.*does not stand there; allowed: a text that",
        ),
        (
            capture(positions=Span("cat", 3)),
            TEXT,
            r"^Capture\.positions is Span\(text='cat', occurrence=3\).* there 3 times; allowed",
        ),
        (
            capture(positions=Span("tail")),
            TEXT + "tail",
            r"^Capture\.positions is Span.*characters 30 to 34 .* no token stands for",
        ),
        (
            patch(source=RUN, position=Span("cat saw"), source_position=[1, 2, 3]),
            TEXT,
            r"^Patch\.source_position is 3 positions for 2",
        ),
        (
            patch(source=RUN, position=Span("cat saw"), source_position=-1),
            TEXT,
            r"^Patch\.source_position is one position, and Span\(text='cat saw'.* is 2 tokens, at \[(\d), (\d)\]\. .*position=\[\1, \2\]",
        ),
        (
            Plan.from_wire(Plan.of(patch(source=RUN, position=Span("cat saw"), source_position=[0])).to_wire()),
            TEXT,
            r"^Patch\.source_position is one position",
        ),
    ],
)
def test_spans_that_are_not_there(item, text, message):
    with pytest.raises(PlanError, match=message):
        resolve_spans(Plan.of(item), text, OFFSETS)


# ------------------------------------------------------------------------------------------------ files of vectors


def test_vectors_come_from_safetensors_files(tmp_path):
    tensors = {"calm": torch.tensor(V, dtype=torch.bfloat16), "loud": torch.tensor([1e-3, 2.0], dtype=torch.float64)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    found = load_vectors(tmp_path / "a.safetensors")
    assert {name: vector.data.tolist() for name, vector in found.items()} == {
        "calm": V,
        "loud": [np.float32(1e-3), 2.0],
    }
    assert load_vectors(str(tmp_path / "a.safetensors")) == found
    assert steer(vector=found["calm"]) == steer(vector=V)


def test_vectors_are_saved_as_others_read_them(tmp_path):
    save_vectors({"a": V, "b": torch.ones(2).half(), "c": Vector([7.0])}, tmp_path / "b.safetensors")
    found = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "a": (torch.float32, V), "b": (torch.float32, [1, 1]), "c": (torch.float32, [7]),
    }  # fmt: skip
    with pytest.raises(PlanError, match=r"vectors\['a'\] is NaN at index 0"):
        save_vectors({"a": [float("nan")]}, tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"], "nothing half written beside it"
    assert len(load_vectors(tmp_path / "b.safetensors")) == 3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2, 2)}, r"'a' is of shape \[2, 2\]; allowed: shape \[hidden\]"),
        (
            {"a": torch.ones(2, dtype=torch.int32)},
            r"'a' is a Tensor of shape \[2\] and dtype torch\.int32; allowed: a floating dtype",
        ),
        ({"a": torch.tensor([float("inf")])}, r"'a' is infinity at index 0; allowed: finite numbers"),
        ({"zeros": torch.ones(2)}, r"cannot be named 'zeros'"),
    ],
)
def test_files_that_hold_something_else(tmp_path, tensors, message):
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(PlanError, match=message):
        load_vectors(tmp_path / "a.safetensors")


def test_files_that_are_no_safetensors(tmp_path):
    ran = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return (Path.touch, (ran,))

    (tmp_path / "a.safetensors").write_bytes(pickle.dumps(Attack()))
    torch.save({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    for name in ("a", "b", "missing"):
        with pytest.raises(PlanError, match=rf"{name}\.safetensors' cannot be read as a safetensors file: "):
            load_vectors(tmp_path / f"{name}.safetensors")
    assert not ran.exists()


def test_vectors_of_the_strategies_differ():
    assert len({Vector(vector).digest for vector in VECTORS}) == len(VECTORS)


def test_a_plans_hash_is_looked_up_once_and_never_sent():
    """Plans are keys of what is remembered of them; the hash of a string is another one in each process."""
    plan = Plan.of(Steer("resid_post", layers=1, vector=[1.0, 2.0]))
    same = Plan.of([Steer("resid_post", layers=[1], vector=[1.0, 2.0])])
    assert hash(plan) == hash(same) and {plan: 1}[same] == 1
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan and "_hash" in vars(plan) and "_hash" not in vars(sent)
