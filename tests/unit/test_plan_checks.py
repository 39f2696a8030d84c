"""What only shows once model and prompt are known (issue 3, errors on every carrier; D8, E5, E11): one row each, and what is left alone."""

import pytest

from midstream import Capture, Clamp, Patch, Plan, RecordedRun, Span, Steer
from midstream.errors import PlanError
from midstream.plan.values import ModelFacts, Named, check

WIDTHS = {(site, layer): 4 for site in ("resid_pre", "resid_post", "attn_out") for layer in range(3)}
WIDTHS |= {("mlp_act", 0): 8, ("mlp_act", 2): 8}  # the layer between is a mixture of experts
FACTS = ModelFacts(3, WIDTHS, "float32")
RUN = RecordedRun("clean", "a1", tuple(range(50, 56)), ("resid_post", "mlp_act"), (0, 2), (1, 2, 3, 5))
ALL_GENERATED = Capture("resid_post", positions="all_generated")
FOUR, EIGHT = [1.0] * 4, [1.0] * 8


def patch(**fields):
    return Patch(**{"site": "resid_post", "layer": 0, "position": 1, "source": "zeros", **fields})


def checked(plan, facts=FACTS, length=5, max_tokens=4, vectors=None, runs=None, multimodal=False):
    vectors = {"calm": 4, "wide": 8} if vectors is None else vectors
    runs = {"clean": "a1", "mean": "b2"} if runs is None else runs
    check(Plan.of(plan), facts, length, max_tokens, vectors=vectors, runs=runs, multimodal=multimodal)


GOOD = [
    Steer("resid_post", vector=FOUR),
    Steer("mlp_act", layers=[0, 2], vector=EIGHT),
    Steer("resid_pre", layers=2, vector="calm"),
    Clamp("mlp_act", layers=2, direction="wide"),
    patch(position=[0, -1]),
    patch(source="calm", mask=FOUR),
    patch(source=RUN, position=[1, 2]),
    patch(source=RUN, position=[0, 1], source_position=[-1, -3]),
    patch(source=RUN, source_layer=2, position=-4, source_position=5),
    patch(site="attn_out", source=RUN, source_site="resid_post"),
    patch(site="mlp_act", layer=2, source=RUN),
    Capture("resid_post", positions=[0, -1]),
    Capture("mlp_act", layers=2, positions="all"),
    Capture("attn_out", positions="all_generated"),
]

# what, how the check differs from the good ones, and the message
REFUSED = [
    (Steer("resid_mid", vector=FOUR), {}, r"^The model has no site 'resid_mid' \(Steer\.site\); it has resid_pre, .*, resid_post\.$"),
    (Capture("mlp_act"), {}, r"^The model has no site 'mlp_act' at layer 1 \(Capture\.layers\); it has it at 0, 2\.$"),
    (Steer("resid_post", layers=[1, 3], vector=FOUR), {}, r"^Steer\.layers is 3; allowed: 0 to 2, or from the end -1 to -3\.$"),
    (patch(layer=3), {}, r"^Patch\.layer is 3; allowed: 0 to 2"),
    (Steer("resid_post", vector=EIGHT), {}, r"^Steer\.vector is of width 8; allowed: 4, the width of resid_post at layer 0\.$"),
    (Clamp("mlp_act", layers=2, direction=FOUR), {}, r"^Clamp\.direction is of width 4; allowed: 8, the width of mlp_act at layer 2\.$"),
    (Steer("resid_post", vector="wide"), {}, r"^Steer\.vector is 'wide', of width 8; allowed: 4, the width of resid_post"),
    (patch(source=EIGHT), {}, r"^Patch\.source is of width 8; allowed: 4"),
    (patch(mask=EIGHT), {}, r"^Patch\.mask is of width 8; allowed: 4"),
    (Steer("resid_post", vector="clam"), {}, r"^Steer\.vector: the engine has no vector 'clam'; did you mean 'calm'\?$"),
    (patch(mask="x"), {}, r"^Patch\.mask: the engine has no vector 'x'; there are 'calm', 'wide'$"),
    (patch(source="mean"), {}, r"^Patch\.source: the engine has no vector 'mean'; a recorded run is pass the recorded run itself: source="),
    (patch(source=Named("y")), {"vectors": {}}, r"^Patch\.source: the engine has no vector 'y'; there are none$"),
    (patch(position=5), {}, r"^Patch\.position is 5; allowed: from -5 to 4, since the prompt has 5 tokens\.$"),
    (patch(position=[0, -6]), {}, r"^Patch\.position is -6; allowed: from -5 to 4"),
    (patch(position=[1, -4]), {}, r"^Patch\.position is \(1, -4\), which has one twice in a prompt of 5 tokens; allowed: each once\.$"),
    (Capture("resid_post", positions=[4, 7]), {}, r"^Capture\.positions is 7; allowed: from -5 to 4, since the prompt has 5 tokens\.$"),
    (Capture("resid_post", positions=Span("x")), {}, r"^Capture\.positions is Span\(text='x', .*\), which needs the prompt's text"),
    (ALL_GENERATED, {"max_tokens": 0}, r"^Capture\.positions is 'all_generated' with max_tokens=0; allowed"),
    (patch(source=RUN), {"runs": {"lean": "b2"}}, r"^Patch\.source: .* no recorded run 'clean' any more; did you mean 'lean'\?$"),
    (patch(source=RUN), {"runs": {"clean": "b2"}}, r"^Patch\.source: the recorded run 'clean' is not there any more, but another"),
    (patch(source=RUN), {"runs": {}}, r"no recorded run 'clean' any more; there are none"),
    (patch(source=RUN, source_site="attn_out"), {}, r"^Patch\.source is 'attn_out', which .* 'clean' lacks; allowed: resid_post, mlp"),
    (patch(source=RUN, layer=1), {}, r"^Patch\.source asks for layer 1, which the run 'clean' lacks; allowed: 0, 2\.$"),
    (patch(source=RUN, position=4), {}, r"^Patch\.position .*is 4, which the run 'clean' did not record; allowed: 1 to 3, 5\.$"),
    (patch(source=RUN, source_position=-6), {}, r"^Patch\.source_position is 0, which the run 'clean' did not record; allowed: 1 to 3, 5"),
    (patch(source=RUN, source_position=6), {}, r"^Patch\.source_position is 6; allowed: from -6 to 5, since the run 'clean' has 6 tokens"),
    (patch(source=RUN, source_site="mlp_act"), {}, r"^Patch\.source is a run's mlp_act at layer 0, of width 8; allowed: 4"),
    (patch(), {"multimodal": True}, r"^Patch\.position is \(1,\) in a multimodal prompt, .*; allowed: such positions in"),
    (Capture("resid_post", positions=0), {"multimodal": True}, r"^Capture\.positions is \(0,\) in a multimodal prompt"),
    (Capture("resid_post", positions=Span("x")), {"multimodal": True, "length": None}, r"is Span.* in a multimodal prompt"),
    (Steer("resid_post", vector=FOUR, positions=5), {}, r"^Steer\.positions is 5; allowed: from -5 to 4"),
    (Clamp("resid_post", direction=FOUR, positions=[0, -5]), {}, r"^Clamp\.positions is \(0, -5\), which has one twice in a prompt of 5"),
    (Steer("resid_post", vector=FOUR, positions=Span("x")), {}, r"^Steer\.positions is Span\(text='x', .*\), which needs the prompt"),
    (Clamp("resid_post", direction=FOUR, positions=1), {"multimodal": True}, r"^Clamp\.positions is \(1,\) in a multimodal prompt"),
    (Steer("resid_post", layers=[0], vector=FOUR, positions=range(65537)), {"length": None},
     r"^the plan is 65537 edits at positions; allowed: up to 65536 of them"),
    (Plan((Steer("resid_post", vector=FOUR),) * 5462), {}, r"^the plan is 16386 steers and clamps; allowed: up to 16384 of them"),
]  # fmt: skip


def test_what_the_model_can_do_passes():
    checked(GOOD)
    checked(None)


@pytest.mark.parametrize(("item", "differing", "message"), REFUSED)
def test_what_it_cannot_do_says_what_it_can(item, differing, message):
    with pytest.raises(PlanError, match=message) as caught:
        checked(item if isinstance(item, Plan) else [*([] if differing else GOOD), item], **differing)
    assert (caught.value.field or "no field") in str(caught.value)


def test_plans_without_positions_are_fine_with_multimodal_prompts():
    """E11: phases and the words for positions mean the same there."""
    words = [Capture("resid_post", positions=word) for word in ("last_prompt", "all_prompt", "all_generated", "all")]
    checked(
        [Steer("resid_post", vector=FOUR, phase="decode"), Clamp("resid_post", direction=FOUR), *words], multimodal=True
    )


def test_only_all_generated_needs_tokens():
    checked(Capture("resid_post", positions="all"), max_tokens=0)
    checked(Capture("resid_post", positions="all_generated"), max_tokens=1)
    checked(Capture("resid_post", positions="all_generated"), max_tokens=None)


UNKNOWN_TO = {
    "a front end before its workers have answered": (ModelFacts(), [Steer("resid_mid", layers=99, vector=EIGHT)]),
    "an engine that tells its layers only": (ModelFacts(3), [Steer("resid_mid", vector=EIGHT), patch(source=EIGHT)]),
}


@pytest.mark.parametrize(("facts", "plan"), UNKNOWN_TO.values(), ids=UNKNOWN_TO)
def test_what_is_not_known_is_not_checked(facts, plan):
    checked(plan, facts)


def test_names_runs_and_lengths_that_are_not_known_are_not_checked():
    plan = Plan.of(
        [
            Steer("resid_post", vector="nobody"),
            patch(source=RUN, position=3),
            patch(position=99),
            Capture("resid_post", positions=Span("x")),
        ]
    )
    check(plan, FACTS, None, None, vectors=None, runs=None)
    with pytest.raises(PlanError, match=r"Steer\.layers is 3"):
        check(Plan.of(Steer("attn_z", layers=3, vector=FOUR)), ModelFacts(3), None, None, vectors=None, runs=None)
