"""A new kind of edit is one class, from outside the package too (row K1): `toy_op.Scale` has fields and arithmetic, and no more.

Everything else follows: the wire, the checks, the normal form, the keys of the prefix cache, the tables, both backends.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import FRANCE, GREEDY, HIDDEN, P, after_rows, everything, generated_with, tokens, vector
from toy_op import Scale

from midstream import Patch, Plan, Steer
from midstream.errors import PlanError
from midstream.plan.compile import ScheduledPlan
from midstream.plan.ops import Edit, register
from midstream.plan.ops.edit import kinds
from midstream.plan.values import ModelFacts, Named, check


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
def test_a_toy_op_computes_its_own_arithmetic_in_its_phase(model: Any, plain: Plain, phase: str) -> None:
    plan = [Scale("resid_post", layers=[2, 4], factor=1.5, phase=phase), everything()]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=6, **GREEDY)
    rows = {"both": slice(0, None), "prefill": slice(0, P), "decode": slice(P, None)}[phase]
    ids, ran = generated_with(plain, {("resid_post", n): after_rows(rows, lambda h: 1.5 * h) for n in (2, 4)}, 6)
    assert tokens(output) == ids
    close(output.captures["resid_post", 7], ran.sites["resid_post", 7])
    differs(output.captures["resid_post", 7], plain.run(plain.ids(FRANCE) + ids[:-1]).sites["resid_post", 7])


def test_a_toy_op_acts_at_its_place_among_the_others(model: Any, plain: Plain) -> None:
    """Patch, then Steer, then Scale, however the plan lists them."""
    v, source = vector(1), vector(2)
    mask = torch.arange(HIDDEN) % 2 == 0
    plan = [
        Scale("resid_post", layers=3, factor=0.5, mask=mask.float(), positions=-1),
        Steer("resid_post", layers=3, vector=v),
        Patch("resid_post", layer=3, position=-1, source=source),
        everything(),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)

    def edit(h: torch.Tensor) -> torch.Tensor:
        h[P - 1] = source
        h = h + v
        h[P - 1] = torch.where(mask, 0.5 * h[P - 1], h[P - 1])
        return h

    close(output.captures["resid_post", 7], plain.run(FRANCE, {("resid_post", 3): edit}).sites["resid_post", 7])


def test_a_toy_op_keeps_its_kv_to_itself(engine: Any, plain: Plain) -> None:
    """A long prompt, so that whole blocks of it are kept: plain requests do not read scaled ones, nor does another factor."""
    prompt = list(range(10, 90))
    for factor in (1.0, 2.0, 1.0, 0.5, 2.0):
        plan = [Scale("resid_post", layers=1, factor=factor, phase="prefill"), everything()]
        (output,) = engine.generate([prompt], plan=plan, max_tokens=1, **GREEDY)
        ran = plain.run(prompt, {("resid_post", 1): lambda h, factor=factor: factor * h})
        close(output.captures["resid_post", 7], ran.sites["resid_post", 7])


def test_what_follows_from_the_fields_of_a_toy_op() -> None:
    scale = Scale("mlp_out", layers=[3, 1], factor=2.0, mask="gate", positions=[0, -1])
    plan = Plan.of(scale)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_wire()))) == plan
    assert plan.to_wire()["interventions"][0]["kind"] == "scale"
    assert Plan.of(Scale("mlp_out", factor=1.0)).normal() == Plan()
    each = plan.normal(8, 5).edits
    assert [(edit.at_layers, edit.place) for edit in each] == [((n,), (p,)) for n in (1, 3) for p in (0, 4)]
    keys = {ScheduledPlan.of(Plan.of(Scale("mlp_out", layers=1, factor=f)), 8, 4).at(8) for f in (1.0, 2.0, 3.0)}
    assert len(keys) == 3 and None in keys
    with pytest.raises(PlanError, match=r"^Scale\.mask: the engine has no vector 'gate'; did you mean 'gates'\?"):
        check(plan, ModelFacts(8), 5, None, vectors={"gates": 4}, runs={})
    with pytest.raises(PlanError, match=r"^Scale\.layers is 3; allowed: 0 to 1, or from the end -1 to -2"):
        check(plan, ModelFacts(2), 5, None, vectors={"gate": 4}, runs={})
    with pytest.raises(PlanError, match=r"^interventions\[0\].* Scale\.factor is nan"):
        Plan.from_wire({"interventions": [{"kind": "scale", "site": "mlp_out", "factor": float("nan")}]})
    with pytest.raises(PlanError, match=r"digest"):  # trust goes by fields that hold vectors, whatever the kind
        named = Plan.of(Scale("mlp_out", factor=2.0, mask=Named("gate", "0" * 32)))
        Plan.from_wire(named.to_wire(), trusted=False)


def test_what_register_refuses() -> None:
    assert list(kinds()) == ["knockout", "patch", "steer", "scale", "clamp", "apply", "when"], (
        "in the order in which they act"
    )

    @dataclass(frozen=True)
    class Steer(Edit):  # another class of that kind
        kind, order = "steer", 5
        site: str

    @dataclass(frozen=True)
    class Headed(Edit):  # whose effect on other heads nobody knows
        kind, order = "headed", 5
        site: str
        head: Any = None

    for wrong in (Steer, Headed, type("Loose", (Edit,), {"kind": "loose", "order": 1}), int):
        with pytest.raises(
            ValueError, match=r"taken by Steer|must be a frozen dataclass|has a field head, so limited_by"
        ):
            register(wrong)  # type: ignore[type-var]
    assert kinds()["steer"].__module__ == "midstream.plan.ops.steer"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from midstream.runtime import kernel

function, constants = kernel._edit_rows, {"DUAL": True, "FEW": True, "DEPENDENT": True, "BLOCK": 4096}
pointers = {"hidden_TH": "*bf16", "residual_TH": "*bf16", "profile_T": "*i32", "capture_T": "*i64", "overflow_T": "*i32"}
pointers["table_address"] = "*i64"
signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in function.arg_names}
constexprs = {(function.arg_names.index(name),): value for name, value in constants.items()}
compiled = triton.compile(ASTSource(function, signature, constexprs), target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
assert compiled.asm["cubin"]
"""


@pytest.mark.slow
def test_the_kernel_with_a_toy_op_compiles_for_a_gpu() -> None:
    """Without a GPU: Triton brings the assembler. What it computes is run by `test_plan_kernel.py` and on a GPU."""
    pytest.importorskip("triton")
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{COMPILE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
