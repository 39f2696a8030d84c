"""The fused site kernel against closed forms and against its PyTorch counterpart (D1, E1, E9, D3: one table for every plan).

On a machine without a GPU the kernel runs in Triton's interpreter, which executes the same source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import examples

from midstream.plan.captures import Plane, Planes
from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import Op
from midstream.runtime.tables import DeviceTables, RowProfiles, Tables
from midstream.runtime.torch_tables import TorchTables

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """The kernel's module is imported by the first test that uses it."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    yield
    os.environ.pop("TRITON_INTERPRET", None)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POINTS = [("resid_post", 0), ("resid_post", 1), ("mlp_out", 1)]
# Triton's interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
KINDS = ["patch", "steer", "norm_steer", "clamp"]
ORDER = {kind: i for i, kind in enumerate(["patch", "steer", "norm_steer", "clamp"])}


def compiled(ops_of_profiles: list[dict[Any, list[Op]]], bank: list[torch.Tensor], width: int) -> CompiledPlan:
    """A plan with these ops; capture ops get a place in the row."""
    profiles = [Profile({})]
    for points in ops_of_profiles:
        planes, at = [], 0
        for (site, layer), ops in points.items():
            for i, op in enumerate(ops):
                if op.kind == "capture":
                    planes.append(Plane(site, layer, "before" if i == 0 else "after", at, width))
                    ops[i] = op._replace(offset=at, after=i > 0)
                    at += width
        profiles.append(Profile({point: tuple(ops) for point, ops in points.items()}, Planes(planes)))
    return CompiledPlan(bank, profiles, np.zeros(0, np.int32), 0, np.zeros(0, bool))


def op(kind: str, vector: int = -1, mask: int = -1, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> Op:
    if kind == "norm_steer":
        kind, b = "steer", 1.0
    return Op(kind, vector, mask, a, b, c, 0)


def exact(x: torch.Tensor, ops: list[Op], bank: list[torch.Tensor]) -> torch.Tensor:
    """One row in float64, written out."""
    h = x.double()
    for o in ops:
        if o.kind == "patch":
            weight = o.a * (bank[o.mask].double() if o.mask >= 0 else torch.ones_like(h))
            h = (1 - weight) * h + weight * bank[o.vector].double()
    base = h.clone()
    for o in ops:
        if o.kind == "steer" and not o.b:
            h = h + o.a * bank[o.vector].double()
        if o.kind == "steer" and o.b:
            h = h + o.a * base.norm() * bank[o.vector].double()
    for o in ops:
        if o.kind == "clamp":
            along = h @ bank[o.vector].double()
            h = h + o.c * (along.clamp(o.a, o.b) - along) * bank[o.vector].double()
    return h


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    hidden = draw(st.sampled_from([1, 3, 16, 40, 128, 257]))
    rows = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    bank = [torch.randn(hidden, generator=generator) for _ in range(4)]
    bank += [v / v.norm() for v in bank[:2]]  # 4, 5: unit
    bank.append(torch.randint(0, 2, (hidden,), generator=generator).float())  # 6: mask
    profiles = []
    for _ in range(draw(st.integers(1, 3))):
        points = {}
        for point in draw(st.lists(st.sampled_from(POINTS), unique=True, min_size=1)):
            kinds = sorted(
                draw(st.lists(st.sampled_from(KINDS), max_size=4)), key=lambda k: (ORDER[k] > 0) + (k == "clamp")
            )
            ops = [make(draw, kind) for kind in kinds]
            if draw(st.booleans()):
                ops = [op("capture"), *ops]
            if draw(st.booleans()):
                ops = [*ops, op("capture")]
            if ops:
                points[point] = ops
        profiles.append(points)
    return {
        "bank": bank,
        "profiles": profiles,
        "rows": [draw(st.integers(0, len(profiles))) for _ in range(rows)],
        "x": torch.randn(rows, hidden, generator=generator),
        "residual": torch.randn(rows, hidden, generator=generator) if draw(st.booleans()) else None,
        "dtype": draw(st.sampled_from(DTYPES)),
        "batch_axis": draw(st.booleans()),
    }


def make(draw: Any, kind: str) -> Op:
    scalar = st.floats(-2, 2, width=32)
    if kind == "patch":
        return op(
            kind, draw(st.integers(0, 3)), draw(st.sampled_from([-1, 6])), draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
        )
    if kind == "steer":
        return op(kind, draw(st.integers(0, 3)), a=draw(scalar))
    if kind == "norm_steer":
        return op(kind, draw(st.integers(4, 5)), a=draw(scalar))
    low, high = sorted([draw(scalar), draw(scalar)])
    return op(kind, draw(st.integers(4, 5)), a=low, b=high, c=draw(st.sampled_from([0.5, 1.0])))


def make_tables(kind: type[Tables], rows: int, dtype: torch.dtype = torch.float32) -> Tables:
    return (
        DeviceTables(POINTS, rows, DEVICE) if kind is DeviceTables else TorchTables(POINTS, torch.device("cpu"), dtype)
    )


def device_of(tables: Tables) -> torch.device:
    return DEVICE if isinstance(tables, DeviceTables) else torch.device("cpu")


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    words = torch.int32 if first.dtype == torch.float32 else torch.int16
    return first.dtype == second.dtype and torch.equal(first.view(words), second.view(words))


def run(tables: Tables, plan: CompiledPlan, case: dict[str, Any]) -> tuple[dict[Any, Any], dict[int, torch.Tensor]]:
    """(hidden, residual) behind each point, starting from the same values at each; and what was captured, by profile."""
    slots = tables.load(plan)
    profile = slots.ids[np.array(case["rows"])]
    device, blocks, places = device_of(tables), {}, np.zeros(len(profile), np.int64)
    for number in np.unique(profile).tolist():
        if number and (width := tables.profiles[number].row_width):
            rows = np.flatnonzero(profile == number)[::2]  # some rows are kept, some are not
            block = blocks[number] = torch.full((len(rows), width), 7.0, dtype=case["dtype"], device=device)
            places[rows] = [row.data_ptr() for row in block]
    tables.begin_step(RowProfiles(profile), places)
    results = {}
    for i, point in enumerate(POINTS):
        hidden = case["x"].to(device, case["dtype"], copy=True)
        residual = case["residual"].to(device, case["dtype"], copy=True) if case["residual"] is not None else None
        given = [t[None] if t is not None and case["batch_axis"] else t for t in (hidden, residual)]
        before = [t.clone() if t is not None else None for t in given]
        copies = [t.clone() if t is not None else None for t in tables.edited(i, *given)]
        assert all(map(same_bits, given, before))
        tables.edit(i, *given)
        assert all(map(same_bits, given, copies))
        results[point] = (hidden, residual)
    kept = {int(np.flatnonzero(slots.ids == number)[0]): block for number, block in blocks.items()}
    tables.unload(slots)
    return results, kept


def test_an_edit_from_outside_the_package_runs_in_the_kernel() -> None:
    """K1: `toy_op.Scale` after a steer and before a capture: `h = factor * (h + v)`, in both streams' sum."""
    generator = torch.Generator().manual_seed(3)
    x, residual, v = (torch.randn(4, 40, generator=generator) for _ in range(3))
    mask = (torch.arange(40) % 3 == 0).float()
    ops = [op("steer", 0, a=1.0), op("scale", a=-1.5), op("scale", 1, a=3.0, b=1.0), op("capture")]
    plan = compiled([{POINTS[0]: ops}], [v[0], mask], 40)
    case = {
        "profiles": [1],
        "rows": [0, 1, 1, 0],
        "x": x,
        "residual": residual,
        "dtype": torch.float32,
        "batch_axis": False,
    }
    wanted = -1.5 * (x + residual + v[0]) * (1 + 2 * mask)
    for tables in (make_tables(DeviceTables, 64), make_tables(TorchTables, 64)):
        results, _ = run(tables, plan, case)
        hidden, second = (t.cpu() for t in results[POINTS[0]])
        assert torch.equal(hidden[0], x[0]) and torch.equal(second[3], residual[3])
        assert torch.allclose((hidden + second)[1:3], wanted[1:3], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(batches())
def test_kernel_pytorch_and_closed_form_agree(case: dict[str, Any]) -> None:
    plan = compiled(case["profiles"], case["bank"], case["x"].shape[1])
    kernel, kept = run(DeviceTables(POINTS, 64, DEVICE), plan, case)
    plain, plain_kept = run(TorchTables(POINTS, torch.device("cpu"), case["dtype"]), plan, case)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[case["dtype"]]
    x = case["x"].to(case["dtype"])
    residual = case["residual"].to(case["dtype"]) if case["residual"] is not None else None
    value = x if residual is None else x + residual
    for point in POINTS:
        for row, number in enumerate(case["rows"]):
            ops = list(plan.profiles[number].ops.get(point, ()))
            edits = [o for o in ops if o.kind != "capture"]
            for hidden, second in (kernel[point], plain[point]):
                got = (hidden[row] if second is None else hidden[row] + second[row]).cpu()
                if not edits:  # untouched, bit for bit, in both streams
                    assert torch.equal(hidden[row].cpu(), x[row])
                    assert second is None or torch.equal(second[row].cpu(), residual[row])
                else:
                    wanted = exact(value[row], edits, case["bank"])
                    scale = 1 + wanted.abs().max()
                    assert ((got.double() - wanted).abs().max() / scale).item() <= tolerance
    assert kept.keys() == plain_kept.keys()
    for number, block in kept.items():
        rows = np.flatnonzero(np.array(case["rows"]) == number)[::2]
        for plane in plan.profiles[number].planes:
            part = block[:, plane.offset : plane.offset + plane.width].cpu()
            point = (plane.site, plane.layer)
            if plane.when == "before":
                assert torch.equal(part, value[rows])
            else:
                hidden, second = kernel[point]
                after = hidden if second is None else hidden + second
                assert torch.equal(part, after[torch.from_numpy(rows).to(DEVICE)].cpu())
            torch.testing.assert_close(
                part,
                plain_kept[number][:, plane.offset : plane.offset + plane.width].cpu(),
                atol=tolerance,
                rtol=tolerance,
            )


@pytest.mark.parametrize("second", [False, True], ids=["one stream", "two"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_all_get_the_same_are_edited_in_copies_as_in_place(dtype: torch.dtype, second: bool) -> None:
    """`run` compares them; a mask leaves some elements alone."""
    x = torch.arange(80.0).reshape(5, 16) + 1  # no sum below comes out at one of these
    more = x / 4 if second else None
    case = {"rows": [1] * 5, "x": x, "residual": more, "dtype": dtype, "batch_axis": False}
    bank = [torch.full((16,), -500.0), torch.arange(16) % 2.0]
    plan = compiled([{POINTS[0]: [op("patch", 0, 1, a=0.5)]}], bank, 16)
    results, _ = run(TorchTables(POINTS, torch.device("cpu"), case["dtype"]), plan, case)
    hidden, residual = results[POINTS[0]]
    changed = hidden.cpu() != x.to(dtype)
    assert changed[:, 1::2].all() and not changed[:, ::2].any()
    assert residual is None or not residual.cpu()[changed].any()


@pytest.mark.parametrize("rows", [[1, 1, 1], [1, 0, 1]], ids=["all rows", "some"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_that_come_out_as_they_were_keep_both_streams(dtype: torch.dtype, rows: list[int]) -> None:
    """All elements change, or all but one of them: where nothing changes, not even the split into two streams does."""
    for kept in (None, 5):
        vector = torch.full((8,), 4.0)
        if kept is not None:
            vector[kept] = 0.0
        x, residual = torch.full((3, 8), 1.0), torch.full((3, 8), 2.0)
        case = {"rows": rows, "x": x, "residual": residual, "dtype": dtype, "batch_axis": False}
        results, _ = run(
            TorchTables(POINTS, torch.device("cpu"), dtype),
            compiled([{POINTS[0]: [op("steer", 0, a=1.0)]}], [vector], 8),
            case,
        )
        changes = (torch.tensor(rows)[:, None] > 0) & (vector != 0)
        hidden, second = (stream.cpu().float() for stream in results[POINTS[0]])
        assert torch.equal(hidden, torch.where(changes, 7.0, 1.0)) and torch.equal(
            second, torch.where(changes, 0.0, 2.0)
        )


@pytest.mark.parametrize("tables", [DeviceTables, TorchTables])
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_patch_is_exact_and_a_self_patch_changes_no_bit(tables: Any, dual: bool, dtype: torch.dtype) -> None:
    """E1: at alpha 1 the source itself; patched with itself not even a stream of the pair changes."""
    x, residual = torch.randn(3, 48).to(dtype), (torch.randn(3, 48).to(dtype) if dual else None)
    value = x if residual is None else x + residual
    source = torch.randn(48).to(dtype)
    plan = compiled(
        [{POINTS[0]: [op("patch", 0, a=1.0)]}, {POINTS[0]: [op("patch", 1, a=1.0)]}],
        [source.float(), value[1].float()],
        48,
    )
    case = {"rows": [1, 2, 0], "x": x, "residual": residual, "dtype": dtype, "batch_axis": False}
    hidden, second = run(make_tables(tables, 64, dtype), plan, case)[0][POINTS[0]]
    got = hidden if second is None else hidden + second
    assert torch.equal(got[0].cpu(), source)
    for row in (1, 2):
        assert torch.equal(hidden[row].cpu(), x[row])
        assert second is None or torch.equal(second[row].cpu(), residual[row])


@pytest.mark.slow
@pytest.mark.parametrize("tables", [DeviceTables, TorchTables])
def test_tables_grow_and_profiles_are_used_again(tables: Any) -> None:
    """No limit on how many different plans a batch has: 500 at once, then none, then others."""
    table = make_tables(tables, 1024)
    for turn in range(2):
        bank = [torch.full((4,), float(i + 1 + turn)) for i in range(500)]
        slots = [table.load(compiled([{POINTS[1]: [op("steer", 0, a=1.0)]}], [vector], 4)) for vector in bank]
        profile = np.array([each.ids[1] for each in slots], np.int32)
        assert len(set(profile.tolist())) == 500
        table.begin_step(RowProfiles(profile), None)
        hidden = torch.zeros(500, 4, device=device_of(table))
        table.edit(1, hidden, None)
        assert torch.equal(hidden.cpu(), torch.stack(bank))
        for each in slots:
            table.unload(each)
        assert not table.profiles
    assert table.growths == 3  # 64 -> 512


@pytest.mark.parametrize("tables", [DeviceTables, TorchTables])
def test_batches_that_take_turns(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2, D7: as those of a pipeline do, each row has its own batch's ops, and what a batch needs is uploaded, or made, once."""
    table, uploads = make_tables(tables, 8), []
    slots = [
        table.load(compiled([{POINTS[1]: [op("steer", 0, a=float(1 + i))]}], [torch.ones(4)], 4)) for i in range(2)
    ]
    first, second = (each.ids[1] for each in slots)
    if tables is DeviceTables:
        upload = table._upload
        monkeypatch.setattr(table, "_upload", lambda values, to: (uploads.append(values), upload(values, to)))
    profiles = [[first, 0, second], [second, first], [0, first, first, 0, second]]
    batches = [RowProfiles(np.array(profile, np.int32), again=True) for profile in profiles]
    for turn in range(3):
        for rows in batches:
            table.begin_step(rows, None)
            hidden = torch.zeros(len(rows.profile_T), 4, device=device_of(table))
            table.edit(1, hidden, None)
            expected = {0: 0.0, first: 1.0, second: 2.0}
            assert hidden[:, 0].tolist() == [expected[number] for number in rows.profile_T]
        if turn == 0:
            prepared = [rows.prepared for rows in batches]
            uploads.clear()
    assert not uploads and all(rows.prepared is before for rows, before in zip(batches, prepared, strict=True))


def test_strided_rows() -> None:
    """A site's tensor may be a slice of a wider one."""
    wide = torch.randn(4, 96, device=DEVICE)
    before, plan = wide.clone(), compiled([{POINTS[0]: [op("steer", 0, a=1.0)]}], [torch.ones(32)], 32)
    table = DeviceTables(POINTS, 8, DEVICE)
    slots = table.load(plan)
    table.begin_step(RowProfiles(slots.ids[np.array([1, 0, 1, 0])]), None)
    table.edit(0, wide[:, 32:64], None)
    before[[0, 2], 32:64] += 1
    assert torch.equal(wide, before)


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "rows"), [(4096, 3), (5120, 2), (16384, 1), (8, 1100)])
def test_wide_rows_and_many_of_them(hidden: int, rows: int) -> None:
    """As many programs' warps as there are, and rows that are slots only where they are needed. Every other row has no op."""
    vector = torch.randn(hidden)
    table = DeviceTables(POINTS, rows, DEVICE)
    slots = table.load(compiled([{POINTS[1]: [op("steer", 0, a=2.0)]}], [vector], hidden))
    has_op = np.arange(rows) % 2 == 0
    table.begin_step(RowProfiles(np.where(has_op, slots.ids[1], 0).astype(np.int32)), None)
    first, second = torch.randn(rows, hidden, device=DEVICE), torch.randn(rows, hidden, device=DEVICE)
    expected = [first.clone(), second.clone()]
    here = torch.from_numpy(has_op)
    expected[0][here] = first[here] + second[here] + 2 * vector.to(DEVICE)
    expected[1][here] = 0
    table.edit(1, first, second)
    torch.testing.assert_close([first, second], expected, rtol=1e-6, atol=1e-5)


def test_an_early_launch_is_asked_for_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from midstream.runtime import kernel

    asked: list[bool] = []
    launch = {(2,): lambda *arguments, **options: asked.append("launch_pdl" in options)}
    monkeypatch.setattr(kernel, "_edit_rows", launch)
    monkeypatch.setattr(kernel, "_compiled", {})
    monkeypatch.setattr(kernel, "_launches_dependent", lambda device: True)
    rows, word = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    for early in (True, False):
        kernel.edit_rows(torch.zeros(2, 16), None, rows, word, rows, word, 0, 3, early=early)
    assert asked == [True, False]


def test_a_compiled_kernel_serves_what_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles anew for another dtype of either stream, and for addresses that are no multiples of 16. Seen failing without them."""
    from midstream.runtime import kernel

    ran: list[str] = []

    class Jit:
        made = 0

        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> Any:
                self.made += 1
                ran.append(f"new {self.made}")
                number = self.made
                return type("Compiled", (), {"__getitem__": lambda _, grid: lambda *a: ran.append(f"again {number}")})()

            return launch

    monkeypatch.setattr(kernel, "_edit_rows", Jit())
    monkeypatch.setattr(kernel, "_compiled", {})
    memory = torch.zeros(4096, dtype=torch.uint8)
    rows, word = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)

    def at(byte: int, dtype: torch.dtype) -> torch.Tensor:
        return memory[byte : byte + 2 * 16 * dtype.itemsize].view(dtype).view(2, 16)

    half, single = torch.bfloat16, torch.float32
    aligned = -memory.data_ptr() % 16
    for first, second in (
        (at(aligned, half), at(aligned + 512, half)),
        (at(aligned, half), at(aligned + 512, half)),
        (at(aligned, half), at(aligned + 512, single)),
        (at(aligned + 1024, half), at(aligned + 512, half)),
        (at(aligned + 8, half), at(aligned + 512, half)),
        (at(aligned + 8, half), at(aligned + 512, half)),
        (at(aligned, half), None),
    ):
        kernel.edit_rows(first, second, rows, word, rows, word, 0, 3)
    assert ran == ["new 1", "again 1", "new 2", "again 1", "new 3", "new 4", "new 5"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_in_a_graph_behind_the_kernel_that_writes_its_rows() -> None:
    """A matrix product writes the rows right in front of each launch; plans change between replays of one graph."""
    hidden, rows, layers = 1024, 32, 24
    points = [("resid_post", i) for i in range(layers)]
    table = DeviceTables(points, rows, DEVICE)
    weight = torch.randn(hidden, hidden, device=DEVICE, dtype=torch.bfloat16) / 32
    start = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    vectors = torch.randn(8, hidden)

    def forward(edit: Any) -> torch.Tensor:
        x = start
        for i in range(layers):
            x = torch.tanh(x @ weight)
            edit(i, x)
        return x

    forward(lambda i, x: table.edit_recorded(i, x, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = forward(lambda i, x: table.edit_recorded(i, x, None))
    for round_number, vector in enumerate(vectors):
        slots = table.load(compiled([{point: [op("steer", 0, a=1.0)] for point in points}], [vector], hidden))
        has_op = (np.arange(rows) + round_number) % 3 == 0
        table.begin_step(RowProfiles(np.where(has_op, slots.ids[1], 0).astype(np.int32)), None)
        graph.replay()
        here = torch.from_numpy(has_op).to(DEVICE)[:, None]
        added = vector.to(DEVICE)

        def steer(_: int, x: torch.Tensor, here: torch.Tensor = here, added: torch.Tensor = added) -> None:
            x.copy_(torch.where(here, (x.float() + added).to(x.dtype), x))

        assert torch.equal(replayed, forward(steer))
        table.unload(slots)
