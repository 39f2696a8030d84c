"""Final edits without an engine (T7): which edits they allow, against what a small model computes; their wire form, keys and copies."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from applied import POINT
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples

from midstream import Capture, Clamp, Knockout, Patch, Plan, Probe, Steer, When
from midstream.errors import PlanError
from midstream.plan.compile import ScheduledPlan, compile_plan
from midstream.plan.ops.edit import edited
from midstream.plan.ops.final import check_final, made_final, not_final
from midstream.runtime.request import packed
from midstream.sites import LAYER_SITES

LAYERS, WIDTH = 3, 4
V = [1.0, 2.0, 3.0, 4.0]
STEER = Steer("resid_post", layers=0, vector=V)
EDITS: list[Any] = [
    STEER,
    Steer("attn_z", layers=1, vector=V, head=[0, 1]),
    Patch("resid_post", layer=1, position=[0, 2], source="zeros"),
    Clamp("mlp_out", direction=V, low=0.0, high=1.0),
    Knockout(layers=1, keys=[0], queries=[2]),
    When(Probe("resid_pre", layer=0, weight=V, name="p"), above=0.0, then=Steer("resid_post", layers=1, vector=V)),
]


def sent(plan: Plan) -> Plan:
    """The plan as another process reads it."""
    return Plan.from_wire(msgspec.msgpack.decode(packed(plan)))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.kind)
@pytest.mark.parametrize("final", ["later", "all"])
def test_a_final_edit_is_of_its_kind_and_equal_to_none_that_is_not(edit: Any, final: Any) -> None:
    made = made_final(edit, final)
    assert isinstance(made, type(edit)) and made.kind == edit.kind and made.label("x") == edit.label("x")
    assert made != edit and made == made_final(edit, final) and not_final(made) == edit and not_final(edit) is edit
    assert made.effect() != edit.effect() and made.order > 1 << 16
    assert made_final(made, "later" if final == "all" else "all") != made
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same == made and type(same) is type(made)
    plan = Plan((edit,), final=final)
    assert plan == Plan((made,)) and plan.final == final and plan.hash != Plan((edit,)).hash
    for again in (Plan.from_json(plan.to_json()), sent(plan), pickle.loads(pickle.dumps(plan))):
        assert again == plan and again.edits[0].final == final
    at_once = {**json.loads(Plan((edit,)).to_json()), "final": final}
    assert Plan.from_wire(at_once) == plan
    mixed = plan + edit
    assert sent(mixed) == mixed and [each.final for each in mixed.edits] == [final, None]


def test_only_an_administrator_makes_edits_final() -> None:
    wire = json.loads(Plan((STEER,), final="later").to_json())
    for data in (wire, {**json.loads(Plan((STEER,)).to_json()), "final": "all"}):
        with pytest.raises(PlanError, match="the edits of an engine-wide plan alone are final"):
            Plan.from_wire(data, trusted=False)
        assert Plan.from_wire(data, trusted=False, may_be_final=True).final is not None
    for wrong in ("later ", True, 1, ["later"]):
        with pytest.raises(PlanError, match="final"):
            Plan((STEER,), final=wrong)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="final"):
            Plan.from_wire({**wire, "final": wrong})
    captured = json.loads(Plan((Capture("resid_post"),)).to_json())
    captured["interventions"][0]["final"] = "later"
    with pytest.raises(PlanError, match="change nothing"):
        Plan.from_wire(captured)
    assert Plan((Capture("resid_post"),), final="later").final is None


# ------------------------------------------------------------------------------------------------ which edits are allowed

_VALUES = [site for site in LAYER_SITES if site != "router"]


def forward(changes: dict[tuple[str, int], float], final: dict[tuple[str, int], float]) -> list[tuple[Any, bool]]:
    """A model that only says which values carry a client's change since the last final edit.

    Sets of what a value carries flow through blocks of which attention and MLP may run one after the other or side by side. A final edit
    takes away what clients have put in before; whatever a client puts in later stays.
    """
    seen = []
    for parallel in (False, True):
        stream, is_after = False, False
        for layer in range(LAYERS):
            values: dict[str, bool] = {}

            def at(site: str, value: bool, layer: int = layer, values: dict[str, bool] = values) -> bool:
                nonlocal is_after
                value = value or ((site, layer) in changes and is_after)
                if (site, layer) in final:
                    is_after = True
                values[site] = value
                return value

            stream = at("resid_pre", stream)
            read = at("attn_in", stream)
            heads = [at(site, read) for site in ("attn_q", "attn_k", "attn_v")]
            out = at("attn_out", at("attn_z", any(heads)))
            middle = stream if parallel else at("resid_mid", stream or out)
            act = at("mlp_act", at("mlp_in", middle))
            stream = at("resid_post", middle or out or at("mlp_out", act))
            seen.append((layer, stream))
    return seen


points = st.tuples(st.sampled_from(_VALUES), st.integers(0, LAYERS - 1))


@settings(max_examples=examples(300), deadline=None)
@given(points, st.sets(points, min_size=1, max_size=4))
def test_what_is_allowed_reaches_nothing_behind_the_final_edits(client: Any, final: set[Any]) -> None:
    """An allowed edit lies at a final site that repeats all earlier ones, or changes nothing behind a final edit; and the other way round
    where every site is the residual stream's, whose order is sure."""
    site, layer = client
    plan = [made_final(Steer(each, layers=at, vector=V), "later") for each, at in final]
    edit = Steer(site, layers=layer, vector=[5.0] * WIDTH)
    try:
        check_final([*plan, edit], LAYERS)
        is_allowed = True
    except PlanError as error:
        is_allowed = False
        assert error.field == "Steer.site" and f"{site} of layer {layer}" in str(error)
    behind = any(reached for _, reached in forward({client: 1.0}, dict.fromkeys(final, 1.0)))
    earlier = {each for each, at in final if (at, _VALUES.index(each)) < (layer, _VALUES.index(site))}
    if is_allowed:
        assert not behind or (client in final and earlier == {site})
    if {site, *(each for each, _ in final)} == {"resid_post"}:
        assert is_allowed == (client in final or layer <= min(at for _, at in final))


def test_what_a_final_edit_reads_is_not_edited_behind_its_back() -> None:
    """A gate reads its probe's site before clients' edits there: these would slip past the gate."""
    gate = made_final(
        When(Probe("resid_post", layer=1, weight=V, name="p"), above=0.0, then=Steer("resid_post", layers=1, vector=V)),
        "later",
    )
    check_final([gate, Steer("mlp_out", layers=1, vector=V)], LAYERS)
    for edit in (Steer("resid_post", layers=1, vector=V), Steer("resid_post", layers=2, vector=V)):
        with pytest.raises(PlanError, match="could undo"):
            check_final([gate, edit], LAYERS)


def test_attention_that_is_cut_stays_cut() -> None:
    cut = made_final(Knockout(layers="all", keys=[0]), "later")
    check_final([cut, Knockout(layers=[0, 1], keys=[1])], LAYERS)
    check_final([cut, Steer("attn_v", layers=0, vector=V)], LAYERS)
    for edit in (Steer("attn_z", layers=0, vector=V), Steer("attn_q", layers=1, vector=V)):
        with pytest.raises(PlanError, match="could undo"):
            check_final([cut, edit], LAYERS)


def test_all_edits_are_refused_by_name_and_readings_are_not() -> None:
    final = made_final(STEER, "all")
    check_final([final], LAYERS)
    with pytest.raises(PlanError, match="allows no edits of requests"):
        check_final([final, Steer("resid_pre", layers=0, vector=V)], LAYERS)


# ------------------------------------------------------------------------------------------------ arithmetic and keys


def ops_of(plan: Plan, dtype: str = "float32") -> tuple[Any, list[torch.Tensor]]:
    compiled = compile_plan(
        plan,
        2,
        1,
        width=lambda *_: WIDTH,
        dtype=dtype,
        vector=lambda named: np.array(V, np.float32),
        run=None,  # type: ignore[arg-type]
    )
    return compiled.profiles[compiled.prompt[0]].ops[POINT], compiled.bank


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_arithmetic_of_final_edits_is_the_same_with_and_without_others(dtype: str) -> None:
    """A client's edit that changes nothing that can be measured leaves the bits as they are without it."""
    x = torch.randn(64, WIDTH).to(getattr(torch, dtype))
    wide = [
        Steer("resid_post", layers=0, vector="named", scale=0.3),
        Steer("resid_post", layers=0, vector=V, scale=0.7, norm_match=True),
        Clamp("resid_post", layers=0, direction=V, low=-0.5, high=0.5),
        Patch("resid_post", layer=0, position=[0, 1], source=V, alpha=0.25),
    ]
    alone, bank = ops_of(Plan(tuple(wide), final="later"), dtype)
    assert not any(op.program is not None for op in alone)  # in one launch of the kernel
    plain, plain_bank = ops_of(Plan(tuple(wide)), dtype)
    expected = edited(x, plain, plain_bank)
    assert torch.equal(edited(x, alone, bank), expected) and not torch.equal(expected, x)
    nothing = Clamp("resid_post", layers=0, direction=V, low=-1e30, high=1e30)
    both, bank = ops_of(Plan(tuple(wide), final="later") + nothing, dtype)
    assert [op.is_final for op in both] == [False, True] and both[1].program is not None
    torch.testing.assert_close(edited(x, both, bank), expected, rtol=1e-6, atol=1e-6)


def test_keys_of_kv_blocks_tell_final_edits_from_others() -> None:
    client = Clamp("resid_post", layers=0, direction=V, low=0.0, high=1.0)
    final = Plan((STEER,), final="later")
    keys = [
        ScheduledPlan.of(plan, 4, LAYERS).at(4)
        for plan in (final, Plan((STEER,)), final + client, STEER + Plan((client,)))
    ]
    assert len(set(keys)) == 4 and None not in keys
    assert ScheduledPlan.of(client + final, 4, LAYERS).at(4) == keys[2]
