"""Programs with hostile numbers: nothing that the check accepts raises, no index lies outside, a bank computes what each of its programs
computes, and a program that raises all the same ends its own request alone. Rows F5 and L4.

`tests/gpu/check_hostile_programs.py` draws the same programs for longer, also on a GPU.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from drawn_programs import FLOATING, attack, compare_bank, drawn_alone, same
from test_plan_kernel import DEVICE, POINTS, compiled, make_tables
from test_plan_kernel import interpreted as interpreted
from written_programs import W, program

from midstream.errors import PlanError
from midstream.plan import rowwise, running
from midstream.plan.ops.edit import Op
from midstream.plan.program import Program
from midstream.plan.rowwise import RULES
from midstream.plan.running import ProgramBank
from midstream.plan.running import run as run_program
from midstream.plan.steps import INPUT, Const, DType, Ref, RowCount
from midstream.runtime.scores import StepScores
from midstream.runtime.tables import DeviceTables, RowProfiles
from midstream.runtime.torch_tables import TorchTables

CPU = torch.device("cpu")
SECONDS = 15


def test_random_programs_raise_nothing_and_keep_rows_apart() -> None:
    """Each operation of the table in turn. Seen failing with each rule of scatters as it is for gather, and with indices as they come."""
    ends, number, ran = time.monotonic() + SECONDS, 0, 0
    names = sorted(RULES)
    while time.monotonic() < ends or number < 100:
        ran += attack(random.Random(f"0 {number}"), CPU, names[number % len(names)]) is not None
        number += 1
    assert ran > number // 3


INDICES = ("argsort.default", (INPUT, 1))
WHOLE = ("_to_copy.default", (INPUT,), {"dtype": DType("int64")})


@pytest.mark.parametrize(
    "scatter",
    [
        ("scatter_add.default", (Ref(0), 1, Ref(0), Ref(1))),
        ("scatter.src", (Ref(0), 1, Ref(0), Ref(1))),
        ("scatter.value", (Ref(0), 1, Ref(0), 99)),
        ("scatter.value", (Ref(0), 1, Ref(0), -1)),
    ],
    ids=lambda step: f"{step[0]} {step[1][-1]}",
)
def test_scattered_numbers_are_no_indices(scatter: Any) -> None:
    """A program that ended the engine: `i = h.argsort(1); i.scatter_add(1, i, (h * 1e6).long()); h.gather(1, i)`."""
    with pytest.raises(PlanError, match="its indices may lie outside"):
        program(INDICES, WHOLE, scatter, ("gather.default", (INPUT, 1, Ref(2))))


def test_an_empty_axis_has_no_indices() -> None:
    empty = ("slice.Tensor", (INPUT, 1, 0, 0))
    with pytest.raises(PlanError, match="its indices may lie outside"):
        program(empty, ("index.Tensor", (Ref(0), (None, Const(0)))), constants=[torch.tensor([0])])


OUTSIDE = torch.tensor([0, 7, -9, 1 << 62, 5, 6])
INDEXED: dict[str, tuple[Any, Any]] = {
    "gather.default": ((INPUT, 1, Ref(0)), lambda h, i: h.gather(1, i)),
    "scatter.src": ((INPUT, 1, Ref(0), INPUT), None),
    "scatter.value": ((INPUT, 1, Ref(0), 2.0), lambda h, i: h.scatter(1, i, 2.0)),
    "scatter_add.default": ((INPUT, 1, Ref(0), INPUT), lambda h, i: h.scatter_add(1, i, h)),
    "index.Tensor": ((INPUT, (None, Const(0))), lambda h, i: h[:, i[0]]),
    "index_put.default": ((INPUT, (None, Const(0)), Const(1)), None),
    "index_select.default": ((INPUT, 1, Const(0)), lambda h, i: h.index_select(1, i[0])),
    "embedding.default": ((Const(2), Ref(0)), lambda h, i: torch.nn.functional.embedding(i, torch.ones(W, 1))[..., 0]),
}


@pytest.mark.parametrize("op", sorted(running.INDEXING))
def test_indices_that_a_rule_wrongly_believes_in_are_moved_inside(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule refuses any index here, as if all were wrong."""
    args, expected = INDEXED[op]
    monkeypatch.setattr(rowwise, "_within", lambda index, size: None)
    last = ("reshape.default", (Ref(2), (RowCount(1), W)))
    constants = [OUTSIDE, torch.ones(W), torch.ones(W, 1)]
    made = program(WHOLE, ("neg.default", (INPUT,)), (op, args), last, constants=constants)
    x = OUTSIDE.double().expand(3, W).float().contiguous()
    found = run_program(made, x)
    assert found.shape == (3, W)
    if expected is not None:  # the last of equal places wins in a scatter, or another one
        assert same(found, expected(x, x.long().clamp(0, W - 1)))


# ----------------------------------------------------------------------------------------------------------------- banks


def test_every_operation_of_the_table_computes_the_same_in_a_bank() -> None:
    """For each dtype of its first argument. The bits are those of PyTorch's operations, called one by one with numbers as numbers.

    Seen failing with numbers in float32 for all dtypes, and with a third argument behind the number."""
    compared, in_banks = 0, set[str]()
    for op in sorted(RULES):
        for dtype in (*FLOATING, "int64", "bool"):
            rng = random.Random(f"{op} {dtype}")
            made = drawn_alone(rng, op, dtype)
            if made is not None and compare_bank(rng, made, CPU):
                compared += 1
                in_banks |= {op} if made.form.slots else set()
    assert compared > 900 and len(in_banks) > 30, (compared, sorted(in_banks))


POSITIONAL_ALPHA = [program(("add.Scalar", (INPUT, number, 2))) for number in (0.1, 0.2)]
FLOAT64 = ("_to_copy.default", (INPUT,), {"dtype": DType("float64")})
LOGARITHMS = [
    program(
        FLOAT64, ("add.Tensor", (Ref(0), 400)), ("exp.default", (Ref(1),)), ("div.Tensor", (Ref(2), number)), ("log.default", (Ref(3),)),
        ("_to_copy.default", (Ref(4),), {"dtype": DType("float32")}),
    )
    for number in (2, 3.0)
]  # fmt: skip
REMAINDERS = [
    program(
        FLOAT64, ("mul.Tensor", (Ref(0), 0)), ("add.Tensor", (Ref(1), number)), ("fmod.Scalar", (Ref(2), 1024)),
        ("_to_copy.default", (Ref(3),), {"dtype": DType("float32")}),
    )
    for number in ((1 << 24) + 1, (1 << 53) - 1)
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "expected"),
    [(POSITIONAL_ALPHA, [0.2, 0.4]), (LOGARITHMS, [399.30685, 398.90139]), (REMAINDERS, [1.0, 1023.0])],
    ids=["a third argument", "beyond float32's range", "beyond float32's integers"],
)
def test_numbers_keep_their_dtype_in_a_bank(form: list[Program], expected: list[float]) -> None:
    x = torch.zeros(4, W)
    for each, number in zip(form, expected, strict=True):
        torch.testing.assert_close(run_program(each, x), torch.full((4, W), number))
    if form[0].form.key == form[1].form.key:
        bank, which = ProgramBank(form[0], 4, CPU), torch.tensor([0, 1, 1, 0])
        for place, each in enumerate(form):
            bank.put(place, each)
        torch.testing.assert_close(bank.run(x, which), torch.tensor(expected)[which, None].expand(4, W))


def test_a_device_that_computes_another_dtype_than_the_meta_device() -> None:
    """PyTorch's layer norm returns a mean in float32 by its meta function, and in float16 on a CPU."""
    half = ("_to_copy.default", (INPUT,), {"dtype": DType("float16")})
    made = program(half, ("native_layer_norm.default", (Ref(0), (W,), None, None, 1e-5)), result=(Ref(1, 1), INPUT))
    x = torch.arange(3.0 * W).view(3, W)
    mean, kept = running.unpacked(made, run_program(made, x))
    assert torch.equal(mean, x.mean(1, keepdim=True)) and torch.equal(kept, x)


# ------------------------------------------------------------------------------------------------- programs that raise


FRAGILE = [program(("sin.default", (INPUT,)), ("add.Tensor", (Ref(0), number))) for number in (1.0, 2.0)]
READ = program(("sin.default", (INPUT,)), result=(Ref(0),))


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sine of a number above 1000 raises, as if it had no kernel for it."""

    def overload(name: str) -> Any:
        if name != "sin.default":
            return rowwise.overload(name)

        def sin(x: torch.Tensor) -> torch.Tensor:
            if bool((x > 1000).any()):
                raise ValueError("a sine that is too far away")
            return x.sin()

        return sin

    monkeypatch.setattr(running, "overload", overload)


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("second", [False, True], ids=["one stream", "two"])
@pytest.mark.parametrize("kind", [pytest.param(TorchTables, id="cpu"), pytest.param(DeviceTables, id="device")])
def test_a_program_that_raises_fails_its_request_alone(kind: Any, second: bool) -> None:
    """Requests with the same program, with another one of its form, with a capture, and without a plan share the step."""
    tables = make_tables(kind, 16)
    edits = [compiled([{POINTS[0]: [Op("apply", program=each)]}], [], W) for each in FRAGILE]
    capture = compiled([{POINTS[0]: [Op("capture", program=READ)]}], [], W)
    one, other, reads = (int(tables.load(each).ids[1]) for each in (*edits, capture))
    requests = [one, 0, one, other, reads, reads]  # two rows each
    fails = {2: one, 5: reads}
    x = torch.randn(12, W)
    x[[4, 11]] = 2000.0
    device = DEVICE if kind is DeviceTables else CPU
    rows = torch.zeros(12, W if W % 4 == 0 else 8, device=device)
    places = np.array([row.data_ptr() if requests[i // 2] == reads else 0 for i, row in enumerate(rows)], np.int64)
    tables.first_rows = np.arange(0, 12, 2)
    tables.begin_step(RowProfiles(np.repeat(requests, 2).astype(np.int32)), places)
    first = x.clone().to(device)
    residual = torch.zeros_like(first) if second else None
    tables.edit(0, first, residual)
    found = (first if residual is None else first + residual).cpu()
    assert tables.failures.keys() == fails.keys()
    site, layer = POINTS[0]
    for why in tables.failures.values():
        assert why.startswith(
            f"A program of the plan failed at {site} of layer {layer}: ValueError: a sine that is too far away."
        )
    for number, profile in enumerate(requests):
        at = slice(2 * number, 2 * number + 2)
        wanted = x[at] if profile in (0, reads) else x[at].sin() + FRAGILE[0 if profile == one else 1].steps[1].args[1]
        if number == 2:
            assert found[at].isnan().all(), "no later layer takes the unedited rows for edited ones"
        else:
            torch.testing.assert_close(found[at], wanted)
    torch.testing.assert_close(rows[8:10, :W].cpu(), x[8:10].sin())
    assert rows[10:].isnan().all()
    tables.first_rows = None
    if kind is TorchTables:  # no requests are known: the caller gets the exception
        with pytest.raises(ValueError, match="too far away"):
            tables.edit(0, x.clone(), None)


def test_a_plan_that_cannot_be_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while the tables take a plan, none of it stays, and plans that they hold are as before."""
    tables = make_tables(DeviceTables, 8)
    plans = [compiled([{POINTS[0]: [Op("apply", program=each)]}], [], W) for each in FRAGILE]
    kept = tables.load(plans[0])

    def put(self: Any, place: int, program: Program) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ProgramBank, "put", put)
        with pytest.raises(PlanError, match="The engine cannot hold the plan: OutOfMemoryError: no memory"):
            tables.load(plans[1])
    assert list(tables.profiles) == [int(kept.ids[1])]
    tables.unload(tables.load(plans[1]))
    tables.begin_step(RowProfiles(np.full(2, kept.ids[1], np.int32)), None)
    x = torch.randn(2, W).to(DEVICE)
    edited = x.clone()
    tables.edit(0, edited, None)
    torch.testing.assert_close(edited, x.sin() + 1.0)
    tables.unload(kept)
    assert not tables.profiles and not tables.programs


def test_the_last_stage_hears_whose_programs_failed_on_others() -> None:
    """Scores that a failed program leaves are NaN. Its request ends where the scores are read."""
    first, last = StepScores(CPU, torch.float32), StepScores(CPU, torch.float32)
    for each in (first, last):
        each.place(0)
    first.errors["a"], last.errors["b"] = "on the first stage", "on the last one"
    assert last.read([first.queued]) == {}
    assert last.errors == {"a": "on the first stage", "b": "on the last one"}
