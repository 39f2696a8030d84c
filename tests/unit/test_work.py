"""What plans are charged, and how long it takes to refuse them (row F6)."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import costly_plans
import numpy as np
import pytest
import torch
from limits import least
from mutations import mutated
from written_programs import program

from midstream import Capture, Patch, Plan, Probe, Steer, When
from midstream.engine.admission import Readers
from midstream.errors import PlanError
from midstream.memory import Memory, without_collections
from midstream.plan.compile import ScheduledPlan, compile_plan
from midstream.plan.program import Program, written_constant, written_program
from midstream.plan.steps import INPUT, Const, Constant, Ref, RowCount, Step
from midstream.plan.strangers import check_strangers, step_work
from midstream.plan.values import Apply
from midstream.plan.work import STEP_SECONDS
from midstream.runtime.tables import RowProfiles
from midstream.runtime.torch_tables import TorchTables

LAYERS, HIDDEN = 8, 256
V = np.linspace(-1, 1, HIDDEN)


def chain(count: int, op: str = "mul.Tensor", width: int = HIDDEN, seed: float = 1.0) -> Program:
    """One operation after another on the input."""
    return program(*[(op, (Ref(i - 1) if i else INPUT, seed + i)) for i in range(count)], width=width)


def written(program_data: dict[str, Any], edits: int = 1, result: str = "d") -> dict[str, Any]:
    """A plan in JSON with a program that need not be allowed, under a digest that need not be right."""
    one = {"kind": "apply", "site": "resid_post", "layers": [0], "program": {"program": result}}
    return {"interventions": [one] * edits, "programs": {result: program_data}}


def unbinds() -> dict[str, Any]:
    steps: list[Any] = [["full.default", [[{"rows": 1}, 1024, 0], 0.0]]]
    steps += [["unbind.int", [{"step": 0}, 1]]] * 250
    return {"width": HIDDEN, "dtype": "float32", "result": {"input": True}, "constants": [], "steps": steps}


def medians() -> Program:
    start = [("slice.Tensor", (INPUT, 1, 0, 1)), ("expand.default", (Ref(0), (RowCount(1), 1 << 18)))]
    return program(*start, *[("median.dim", (Ref(1), 1))] * 240, result=INPUT, width=HIDDEN)


def hostile() -> dict[str, Callable[[], Any]]:
    """Plans in JSON, by name."""
    tiny = chain(252, width=1)
    edits = [Apply("resid_post", layers=[i % LAYERS], program=tiny) for i in range(1024)]
    wide = program(
        ("expand.default", (INPUT, (RowCount(1), HIDDEN))),
        ("cat.default", ((INPUT,) * 1024, 1)),
        *[("mul.Tensor", (Ref(i + 1), 1.5)) for i in range(250)],
        result=INPUT,
        width=HIDDEN,
    )
    shared = program(
        ("full.default", ((1024, 1024), 0.5)), *[("mm.default", (Ref(0), Ref(0)))] * 250, result=INPUT, width=HIDDEN
    )
    many = [Apply("resid_post", layers=[i % LAYERS], program=chain(60, seed=i)) for i in range(200)]
    gate = Probe("resid_post", layer=0, weight=V, name="p")
    inside = [When(gate, above=0, then=Apply("resid_post", layers=1, program=medians()))]
    lists = {"width": 1, "dtype": "float32", "result": {"input": True}, "constants": []}
    lists["steps"] = [["reshape.default", [{"input": True}, [1] * 4000]]] * 100
    return {
        "252 operations in 1,024 edits": lambda: Plan.of(edits).to_json(),
        "240 medians": lambda: Plan.of(Apply("resid_post", layers=[0], program=medians())).to_json(),
        "250 unbinds": lambda: json.dumps(written(unbinds())),
        "250 products of 2^18 numbers": lambda: Plan.of(Apply("resid_post", program=wide)).to_json(),
        "250 products of matrices that all rows share": lambda: Plan.of(Apply("resid_post", program=shared)).to_json(),
        "200 programs of 60 operations": lambda: Plan.of(many).to_json(),
        "a gated program": lambda: Plan.of(inside).to_json(),
        "long lists": lambda: json.dumps(written(lists)),
    }


def refused(text: str, device: str) -> str:
    """The message with which a server refuses a plan."""
    with pytest.raises(PlanError) as caught:
        check_strangers(Plan.from_json(text, trusted=False), LAYERS, device)
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", list(hostile()))
def test_a_plan_that_would_hold_up_a_step_is_refused_at_once(name: str, device: str) -> None:
    """Seen before: up to 56 s for the thread that reads plans, and 25 s for a neighbour."""
    torch.empty(1, 1, device="meta").neg()  # PyTorch loads its code for shapes
    text = hostile()[name]()

    def cost() -> float:
        began = time.thread_time()
        message = refused(text, device)
        assert "allowed: up to" in message, message
        return time.thread_time() - began

    assert least(cost, 0.2) < 0.4  # below 0.1 on a machine that does nothing else


def test_the_message_says_what_was_charged_and_what_to_do() -> None:
    message = refused(hostile()["240 medians"](), "cpu")
    assert "the plan is" in message and "ms of work in the step of one token on this cpu engine" in message
    assert "to begin 1 edits" in message and "allowed: up to 80 ms over HTTP: use fewer edits" in message


def gate_of(features: int, hidden: int) -> Program:
    """An SAE's gate whose matrices the engine holds."""
    encoder, decoder = (
        Constant("float32", shape, None, "0" * 32, "0" * 64) for shape in ((hidden, features), (features, hidden))
    )
    steps = (
        Step("mm.default", (INPUT, Const(0))),
        Step("relu.default", (Ref(0),)),
        Step("mm.default", (Ref(1), Const(1))),
    )
    return Program(hidden, "float32", steps, Ref(2), (encoder, decoder))  # fmt: skip


def accepted() -> dict[str, tuple[Plan, set[str]]]:
    """Plans that researchers send, and the devices on which a server takes them."""
    both, gpu = {"cpu", "cuda"}, {"cuda"}
    mlp = program(
        ("mm.default", (INPUT, Const(0))),
        ("gelu.default", (Ref(0),)),
        ("mm.default", (Ref(1), Const(1))),
        constants=[torch.ones(HIDDEN, 1024), torch.ones(1024, HIDDEN)],
        width=HIDDEN,
    )
    probes = [Probe("resid_post", layer=i % LAYERS, weight=V + i, name=f"p{i}") for i in range(64)]
    return {
        "1,024 steers": (Plan.of([Steer("resid_post", layers=i % LAYERS, vector=V + i) for i in range(1024)]), both),
        "1,024 patches": (Plan.of([Patch("resid_post", layer=i % 8, position=i // 8, source="zeros") for i in range(1024)]), gpu),
        "a patch of a whole prompt": (Plan.of(Patch("resid_post", layer=3, position=range(300), source=V)), both),
        "SAE, 16,384 features, all layers": (Plan.of(Apply("resid_post", program=gate_of(16_384, HIDDEN))), both),
        "SAE, 65,536 features, four layers": (
            Plan.of(Apply("resid_post", layers=[1, 2, 3, 4], program=gate_of(65_536, HIDDEN))), both),
        "SAE of a large model, 65,536 features": (Plan.of(Apply("resid_post", layers=range(4), program=gate_of(65_536, 4096))), gpu),
        "SAE of a large model, 16,384 features": (Plan.of(Apply("resid_post", layers=range(8), program=gate_of(16_384, 4096))), gpu),
        "64 probes": (Plan.of(probes), both),
        "48 gates": (Plan.of([When(probes[0], above=i / 9, then=Steer("resid_post", layers=7, vector=V + i)) for i in range(48)]), both),
        "an MLP at all layers": (Plan.of(Apply("resid_post", program=mlp)), both),
        "captures of everything": (Plan.of([Capture(s, positions="all") for s in ("resid_post", "mlp_out", "attn_out")]), both),
        "190 operations at all layers": (Plan.of(Apply("resid_post", program=chain(190))), both),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(accepted()))
def test_what_researchers_send_is_accepted(name: str) -> None:
    plan, devices = accepted()[name]
    for device in devices:
        check_strangers(plan, LAYERS, device)


def seconds_of(plan: Plan, rows: int) -> float:
    """What the plan takes of an engine's time on the CPU: when it begins, and in a step with so many rows."""
    began = time.thread_time()
    plan = Plan.from_wire(plan.to_wire())
    points = [(site, layer) for site in ("resid_pre", "resid_post") for layer in range(LAYERS)]
    ScheduledPlan.of(plan, rows, LAYERS)
    compiled = compile_plan(
        plan, rows, LAYERS, width=lambda *_: HIDDEN, dtype="float32", vector=lambda _: None, run=lambda *_: torch.empty(0)
    )  # fmt: skip
    tables = TorchTables(points, torch.device("cpu"), torch.float32)
    slots = tables.load(compiled)
    profiles = RowProfiles(slots.ids[compiled.prompt[:rows]])
    tables.begin_step(profiles, None, None)
    x = torch.randn(rows, HIDDEN)
    for point in range(len(points)):
        tables.edit(point, x, None)
    return time.thread_time() - began


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for others count as working
    yield
    torch.set_num_threads(before)


AT_THE_BOUND = ["1,024 steers", "a patch of a whole prompt", "an MLP at all layers", "190 operations at all layers"]


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_the_promise_holds_for_plans_at_the_bound(name: str, one_thread: None) -> None:
    """On one core; 1,024 steers took 0.26 to 3.1 s before. A busy machine makes a thread slower, by up to twice."""
    plan, _ = accepted()[name]
    work = step_work(plan, LAYERS, "cpu")
    rows = min(300, work.free + int((STEP_SECONDS - work.begin - work.step) / work.row)) if work.row else 300
    assert least(lambda: seconds_of(plan, rows), 0.1) < 0.2


def test_a_search_finds_no_operation_that_costs_more_than_its_charge(one_thread: None) -> None:
    """A short form of `tests/gpu/check_work.py --cpu`. The rest of a step's 100 ms, and a busy machine, make up the margin."""
    found = costly_plans.search(0, 10.0, torch.device("cpu"))
    assert len(found) > 5
    long = [each for each in found.values() if each.seconds > 2e-4]
    assert not [each for each in long if each.ratio > 4], max(long, key=lambda each: each.ratio)


def test_a_weight_of_one_for_all_operations_would_be_found(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protection removed: sorting costs as much as adding."""
    candidate = costly_plans.Candidate("sort.default", (4096,), times=16, rows=4, seed=1)
    kept = costly_plans.measured(candidate, torch.device("cpu"), 1.0)
    monkeypatch.setattr("midstream.plan.work._WEIGHT_OF", {})
    monkeypatch.setattr("midstream.plan.checking._known", Memory())
    removed = costly_plans.measured(candidate, torch.device("cpu"), 1.0)
    assert kept is not None and removed is not None and removed.ratio > 8 * kept.ratio and kept.ratio < 2


@pytest.mark.parametrize(
    "candidate",
    [
        costly_plans.Candidate("logit.default", (512,), "float64", 16, 2, seed=244),
        costly_plans.Candidate("gelu.default", (512,), "float64", 200, 16, "mixed", seed=532),
        costly_plans.Candidate("mm.default", (512,), "float32", 16, 2, "denormal", seed=154),
    ],
    ids=lambda candidate: candidate.op,
)
def test_what_a_search_found_takes_no_longer_than_charged(one_thread: None, candidate: costly_plans.Candidate) -> None:
    """Seen before: 1.5 times its charge, 2.6 times, and 11 times."""

    def ratio() -> float:
        found = costly_plans.measured(candidate, torch.device("cpu"), 1.0)
        assert found is not None
        return found.ratio

    assert least(ratio, 0.8) < 0.95


def test_views_count_at_their_whole_size_and_empty_results_count() -> None:
    view = [("slice.Tensor", (INPUT, 1, 0, 1)), ("expand.default", (Ref(0), (RowCount(1), 1000)))]
    expanded = program(*view, ("neg.default", (Ref(1),)), result=INPUT)
    assert expanded.work.row > 3 * 1000
    empty = program(("full.default", ((RowCount(1), 800, 0), 0.0)), ("unbind.int", (Ref(0), 1)), result=INPUT)
    assert empty.work.launches > 100


def test_edits_that_split_the_rows_multiply_the_work_on_a_cpu() -> None:
    """Rows with other edits at a point are groups of their own there, and each runs the program."""
    apply = Apply("resid_post", layers=2, program=chain(20))
    apart = [Patch("resid_post", layer=2, position=i, source="zeros", alpha=0.5 + i / 100) for i in range(40)]
    elsewhere = [Patch("resid_pre", layer=2, position=i, source="zeros", alpha=0.5 + i / 100) for i in range(40)]
    alone, split, others = (
        step_work(Plan.of(each), 8, "cpu").step for each in ([apply], [apply, *apart], [apply, *elsewhere])
    )
    assert split > 30 * alone > 5 * (others - step_work(Plan.of(elsewhere), 8, "cpu").step)  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_mutated_plans_are_read_in_bounded_time(seed: int) -> None:
    rng = random.Random(seed)
    texts = [make() for make in hostile().values()]
    for _ in range(20):
        given = mutated(rng, json.loads(rng.choice(texts)))
        with without_collections():  # which would walk over all that earlier tests have left
            began = time.thread_time()
            with contextlib.suppress(PlanError):
                check_strangers(Plan.from_json(json.dumps(given), trusted=False), LAYERS, "cpu")
            assert time.thread_time() - began < 2.0


def test_equal_programs_are_checked_once() -> None:
    one, other = chain(200), chain(200)
    assert one.checked is other.checked and one is not other
    assert Program(HIDDEN, "float32", one.steps, one.result).checked is one.checked
    assert written_program(one) and not one.constants and written_constant(Constant.of(torch.ones(1)))


# ------------------------------------------------------------------------------------------------------------- readers


def test_a_key_waits_for_one_plan_of_another_key_at_most() -> None:
    """On the only thread the keys take turns, and the key that was served last is behind a key that came meanwhile."""
    readers, release, order = Readers(1), threading.Event(), list[str]()

    def slow(name: str) -> None:
        order.append(name)
        release.wait(60)

    calls = [(b"first", f"first {i}") for i in range(50)] + [(b"other", f"other {i}") for i in range(3)]
    futures = [readers.submit(owner, functools.partial(slow, name)) for owner, name in calls]
    release.set()
    for future in futures:
        future.result(60)
    turns = ["first 0", "other 0", "first 1", "other 1", "first 2", "other 2"]
    assert order == turns + [f"first {i}" for i in range(3, 50)]


def test_a_key_with_many_plans_holds_one_of_the_threads() -> None:
    readers, release = Readers(2), threading.Event()
    futures = [readers.submit(b"first", lambda: release.wait(60)) for _ in range(50)]
    for owner in (b"second", b"third", b"third"):
        assert readers.submit(owner, lambda: "read").result(60) == "read", "while the first key's plan holds a thread"
    assert not any(future.done() for future in futures)
    release.set()
    assert all(future.result(60) for future in futures)


def test_readers_give_back_their_threads_after_errors_and_cancelled_calls() -> None:
    readers = Readers(1)
    with pytest.raises(ZeroDivisionError):
        readers.submit(b"a", lambda: 1 // 0).result(10)
    held = threading.Event()
    blocking = readers.submit(b"a", lambda: held.wait(30))
    cancelled = readers.submit(b"b", lambda: "never")
    assert cancelled.cancel()
    held.set()
    assert blocking.result(10) and readers.submit(b"b", lambda: 7).result(10) == 7


@pytest.mark.parametrize("seed", range(5))
def test_no_owner_has_two_threads(seed: int) -> None:
    rng, readers, running, most = random.Random(seed), Readers(3), Counter[bytes](), Counter[bytes]()
    lock = threading.Lock()

    def read(owner: bytes) -> None:
        with lock:
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
        time.sleep(rng.random() / 500)
        with lock:
            running[owner] -= 1

    owners = [b"a", b"b", b"c", b"d"]
    calls = [readers.submit(owner, lambda owner=owner: read(owner)) for owner in rng.choices(owners, k=100)]
    for call in calls:
        call.result(30)
    assert set(most.values()) == {1}
