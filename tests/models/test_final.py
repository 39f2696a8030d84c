"""An engine-wide plan that clients cannot undo (T7), on both backends against plain hooks: first the client's edit, then the final one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, SHORT, generated_with, tokens, toward_rome, vector

from midstream import Capture, Clamp, Knockout, Patch, Plan, Probe, Steer, When
from midstream.errors import PlanError
from midstream.plan.ops import Apply

AT, LATER = ("resid_post", 3), ("resid_post", 6)
D = vector(5, 1.0)
W = vector(2, 40.0)
SEEN = Capture("resid_post", layers=[2, 3, 6], positions="all", when="after")


def ablated(h: torch.Tensor) -> torch.Tensor:
    return h - (h @ D)[:, None] * D


def matched(h: torch.Tensor) -> torch.Tensor:
    return h + 0.5 * h.norm(dim=-1, keepdim=True) * W / W.norm()


def ablation(*layers: int, site: str = "resid_post", **options: Any) -> Clamp:
    return Clamp(site, layers=layers or "all", direction=D, low=0.0, high=0.0, **options)


@contextlib.contextmanager
def engine_wide(model: Any, *plan: Any, final: str | None = "later") -> Iterator[None]:
    model.plan = Plan(plan, final=final)  # type: ignore[arg-type]
    try:
        yield
    finally:
        model.plan = None


CLIENTS: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "nothing": (lambda: [], lambda h: h),
    "steer": (lambda: Steer("resid_post", layers=3, vector=30 * D + W), lambda h: h + 30 * D + W),
    "patch": (
        lambda: Patch("resid_post", layer=3, position=range(5), source=50 * D + W),
        lambda h: (50 * D + W).expand_as(h),
    ),
    "clamp": (
        lambda: Clamp("resid_post", layers=3, direction=D + W / W.norm(), low=90.0, high=math.inf),
        lambda h: h + (90 - h @ (u := (D + W / W.norm()) / (D + W / W.norm()).norm())).clamp(min=0)[:, None] * u,
    ),
    "apply": (lambda: Apply("resid_post", layers=3, program=lambda h: 1.5 * h + 20 * D), lambda h: 1.5 * h + 20 * D),
    "when": (
        lambda: When(
            Probe("resid_post", layer=3, weight=W, name="p"),
            above=-1e9,
            then=Steer("resid_post", layers=3, vector=9 * D + W),
        ),
        lambda h: h + 9 * D + W,
    ),
    "steer and apply": (
        lambda: [
            Apply("resid_post", layers=3, program=lambda h: h + 20 * D),
            Steer("resid_post", layers=3, vector=W),
        ],
        lambda h: h + W + 20 * D,
    ),
}
FINALS: dict[str, tuple[Callable[[], list[Any]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "ablation": (lambda: [ablation(3)], ablated),
    "steer of the norm": (lambda: [Steer("resid_post", layers=3, vector=W, scale=0.5, norm_match=True)], matched),
    "two steers and a clamp": (
        lambda: [
            ablation(3),
            Steer("resid_post", layers=3, vector=W),
            Steer("resid_post", layers=3, vector=W, scale=0.5, norm_match=True),
        ],
        lambda h: ablated(matched(h) + W),
    ),
    "a clamp and a function": (
        lambda: [Apply("resid_post", layers=3, program=lambda h: h * 0.9), ablation(3)],
        lambda h: 0.9 * ablated(h),
    ),
}


PAIRS = [(c, f) for c in CLIENTS for f in FINALS if f == "two steers and a clamp" or c in ("steer", "apply")]


@pytest.mark.parametrize(("client", "final"), PAIRS)
def test_final_edits_act_after_all_edits_of_clients(model: Any, plain: Plain, client: str, final: str) -> None:
    """Seen failing with the order of kinds alone: a steer of the norm was measured before the client's, and functions acted last."""
    (make, change), (make_final, finally_) = CLIENTS[client], FINALS[final]
    wanted, ran = generated_with(plain, {AT: lambda h: finally_(change(h))}, 1)
    with engine_wide(model, *make_final()):
        (output,) = model.generate(FRANCE, plan=Plan.of(make()) + SEEN, max_tokens=1, **GREEDY)
    assert tokens(output) == wanted
    for layer in (2, 3, 6):
        close(output.captures["resid_post", layer], ran.sites["resid_post", layer], 2e-4)


def test_the_administrators_example(model: Any, plain: Plain) -> None:
    """A direction that is clamped at three layers, and a steer behind them that would bring it back."""
    rome = toward_rome(plain, 5)
    unit = rome / rome.norm()
    clamps = Clamp("resid_post", layers=[3, 4, 5], direction=unit, low=0.0, high=0.0)
    back = Steer("resid_post", layers=6, vector=3 * rome)

    def clamped(h: torch.Tensor) -> torch.Tensor:
        return h - (h @ unit)[:, None] * unit

    edits = {("resid_post", layer): clamped for layer in (3, 4, 5)}
    undone, _ = generated_with(plain, edits | {LATER: lambda h: h + 3 * rome}, 4)
    kept, _ = generated_with(plain, edits, 4)
    assert undone != kept
    with engine_wide(model, clamps, final=None):
        (output,) = model.generate(FRANCE, plan=back, max_tokens=4, **GREEDY)
        assert tokens(output) == undone
    with engine_wide(model, clamps):
        with pytest.raises(PlanError, match="Steer at resid_post of layer 6 could undo the final edits"):
            model.generate(FRANCE, plan=back, max_tokens=4, **GREEDY)
        at_them = Steer("resid_post", layers=[4, 5], vector=3 * rome)
        outputs = model.generate([FRANCE, FRANCE], plan=[[at_them], None], max_tokens=4, **GREEDY)
        wanted = edits | {("resid_post", layer): lambda h: clamped(h + 3 * rome) for layer in (4, 5)}
        assert [tokens(each) for each in outputs] == [generated_with(plain, wanted, 4)[0], kept]


def test_requests_with_and_without_edits_share_no_keys_and_values_that_differ(model: Any, plain: Plain) -> None:
    """Prompts that the prefix cache knows: with the client's edit, without it, without the final plan, and again."""
    client, change = Steer("resid_post", layers=3, vector=W), lambda h: h + W
    prompt = EIFFEL * 3
    for _ in range(2):
        for final in (True, False):
            with engine_wide(model, ablation(3)) if final else contextlib.nullcontext():
                for edited in (True, False):
                    edit = {AT: lambda h, a=final, b=edited: (ablated if a else (lambda x: x))(change(h) if b else h)}
                    (output,) = model.generate(prompt, plan=client if edited else None, **SHORT)
                    assert tokens(output) == plain.generate(prompt, SHORT["max_tokens"], edit)


ALLOWED = {
    "before the first": Steer("resid_post", layers=2, vector=W),
    "in its layer, before it": Steer("mlp_out", layers=3, vector=W),
    "at the plan's sites": Steer("resid_post", layers=[3, 5], vector=W),
    "attention before it": Knockout(layers=[0, 1], keys=[0], queries=[3]),
    "captures and probes": [
        Capture("resid_post", layers="all", positions="all"),
        Probe("resid_post", layer=7, weight=W, name="p", positions="all"),
    ],
}
REFUSED = {
    "steer": Steer("resid_post", layers=6, vector=W),
    "steer between": Steer("resid_post", layers=4, vector=W),
    "of some layers": Steer("resid_post", layers=[1, 6], vector=W),
    "everywhere": Steer("mlp_out", vector=W),
    "patch": Patch("resid_post", layer=6, position=0, source="zeros"),
    "clamp": Clamp("attn_out", layers=4, direction=W, low=0.0, high=9.0),
    "apply": Apply("resid_post", layers=-1, program=lambda h: h + 1),
    "when": When(Probe("resid_post", layer=0, weight=W, name="p"), above=0, then=Steer("mlp_out", layers=6, vector=W)),
    "attention behind it": Knockout(layers=7, keys=[0]),
    "in the prompt alone": Steer("resid_post", layers=6, vector=W, phase="prefill"),
    "of a generated token": Steer("resid_post", layers=6, vector=W, phase="decode", positions=[3]),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_edits_that_final_edits_follow_are_allowed(model: Any, case: str) -> None:
    with engine_wide(model, ablation(3, 5)):
        model.generate(FRANCE, plan=ALLOWED[case], max_tokens=2, **GREEDY)


@pytest.mark.parametrize("case", REFUSED)
def test_edits_that_could_undo_final_edits_are_refused(model: Any, case: str) -> None:
    with engine_wide(model, ablation(3, 5)), pytest.raises(PlanError, match="could undo the final edits"):
        model.generate(FRANCE, plan=REFUSED[case], max_tokens=2, **GREEDY)


def test_all_edits_may_be_refused(model: Any, plain: Plain) -> None:
    with engine_wide(model, ablation(3), final="all"):
        for case in (ALLOWED["before the first"], ALLOWED["at the plan's sites"], REFUSED["steer"]):
            with pytest.raises(PlanError, match="allows no edits of requests"):
                model.generate(FRANCE, plan=case, max_tokens=2, **GREEDY)
        (output,) = model.generate(FRANCE, plan=ALLOWED["captures and probes"], max_tokens=2, **GREEDY)
        wanted, _ = generated_with(plain, {AT: ablated}, 2)
        assert tokens(output) == wanted


def test_runs_and_sweeps_stand_before_the_final_plan(model: Any) -> None:
    """A recorded run has what the final plan makes of the values. A sweep says so before it runs anything."""
    with engine_wide(model, ablation(3)):
        run = model.record(FRANCE, "resid_post", layers=[1, 3])
        (output,) = model.generate(
            FRANCE, plan=[Patch("resid_post", layer=1, position=2, source=run), SEEN], max_tokens=1, **GREEDY
        )
        assert float((output.captures["resid_post", 3] @ D).abs().max()) < 1e-2
        del model.runs[run.name]
        with pytest.raises(PlanError, match="could undo the final edits"):
            model.sweep(FRANCE, ITALY, " Paris", " Rome", layers=[1, 6], positions=[1])
        with pytest.raises(PlanError, match="could undo the final edits"):
            model.path_patching(FRANCE, ITALY, " Paris", " Rome", layers=[4])


def test_traces_that_may_write_after_the_final_plan_are_refused(model: Any) -> None:
    """A write that a plan can make is an edit; code in the forward could write anywhere."""
    with engine_wide(model, ablation(3)):
        with pytest.raises(PlanError, match=r"could undo|has to run in the forward"), model.trace(FRANCE):
            model.resid_post[6][:] += W
        with pytest.raises(PlanError, match="has to run in the forward"), model.trace(FRANCE):
            if float(model.resid_post[6][0, 0]) > -1e9:
                model.resid_post[6][:] += W


def test_an_overflowing_client_ends_its_own_request_alone(model: Any) -> None:
    from midstream.errors import NotFiniteError

    with engine_wide(model, ablation(3)):
        with pytest.raises(NotFiniteError):
            model.generate(
                FRANCE, plan=Steer("resid_post", layers=3, vector=torch.full((HIDDEN,), 3e38), scale=4), **SHORT
            )
        (output,) = model.generate(FRANCE, **SHORT)
        assert len(tokens(output)) == SHORT["max_tokens"]


def test_the_cases_have_an_effect(plain: Plain) -> None:
    """Else they would show nothing: clients' edits change what the final ones leave, and the final ones change it again."""
    for make, change in list(CLIENTS.values())[1:]:
        assert make()
        for _, finally_ in FINALS.values():
            h = plain.run(FRANCE).sites[AT]
            differs(finally_(change(h)), finally_(h))
            differs(finally_(change(h)), change(h))
