"""Plans on several ranks, without an engine: sources on other stages, runs and leases alike on all ranks, what is remembered (E10, D5, D8).

Stages are threads with real links between them; what is expected is a closed form of (site, layer, position). Rows E5, E12, P2.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_link import linked

from midstream import Capture, Clamp, Patch, Plan, Steer, open_captures
from midstream.capture.rows import Rows
from midstream.errors import CaptureError, NeverReachedError, PlanError
from midstream.memory import Memory
from midstream.plan.captures import Planes
from midstream.plan.compile import CompiledPlan, ScheduledPlan, compile_plan
from midstream.plan.ops.edit import point_of
from midstream.plan.program import Program
from midstream.plan.steps import INPUT, Ref, Step
from midstream.plan.values import Apply, Named, RecordedRun
from midstream.requests.vectors_and_runs import Runs, run_now
from midstream.runtime.planned import Sources
from midstream.runtime.points import Pipeline
from midstream.runtime.request import packed, plan_bytes, unpacked
from midstream.runtime.sending import LocalSinks
from midstream.runtime.store import Run, RunStore

WIDTH, LAYERS, LENGTH = 4, 6, 5
POINTS = [(site, layer) for site in ("resid_post", "mlp_out") for layer in range(LAYERS)]
HANDLE = RecordedRun("clean", "run", tuple(range(LENGTH)), ("resid_post", "mlp_out"), tuple(range(LAYERS)), (0, 1, 3))


def value(site: str, layer: int, position: int) -> torch.Tensor:
    """What the run has there."""
    return torch.full((WIDTH,), 100.0 * (site == "mlp_out") + 10 * layer + position)


class Stage:
    """One of `size` stages, which have equal shares of the layers, and the run."""

    def __init__(self, rank: int, size: int, link: Any = None) -> None:
        each = [{point: WIDTH for point in POINTS if point[1] * size // LAYERS == s} for s in range(size)]
        self.pipeline, self.link = Pipeline(rank, tuple(each), frozenset()), link
        self.runs = RunStore(1 << 20)
        rows = {p: torch.stack([value(*p, position) for position in HANDLE.positions]) for p in each[rank]}
        sizes = tuple(4 * WIDTH * len(HANDLE.positions) * len(points) for points in each)
        self.runs.add(Run(HANDLE.id, HANDLE.name, rows, {0: 0, 1: 1, 3: 2}, frozenset(POINTS), sizes))

    def sources(self, name: str, plan: Plan) -> Sources:
        return Sources(name, plan, LENGTH, LAYERS, runs=self.runs, pipeline=self.pipeline, link=self.link)

    def compiled(self, plan: Plan, sources: Sources) -> CompiledPlan:
        return compile_plan(
            plan,
            LENGTH,
            LAYERS,
            width=lambda site, layer: WIDTH,
            dtype="float32",
            vector=lambda named: np.zeros(WIDTH),
            run=sources.row,
            points=self.pipeline.each[self.pipeline.rank].keys(),
        )


CROSSING = Plan.of([
    Patch("resid_post", layer=0, position=[0, 2], source=HANDLE, source_layer=5, source_position=[3, 1]),
    Patch("resid_post", layer=0, position=4, source=HANDLE, source_layer=2, source_position=0),
    Patch("resid_post", layer=3, position=1, source=HANDLE),
    Patch("resid_post", layer=4, position=[0, 3], source=HANDLE, source_layer=1, source_site="mlp_out"),
    Patch("resid_post", layer=5, position=-1, source=HANDLE, source_layer=0, source_position=3),
])  # fmt: skip
EXPECTED = {
    ("resid_post", 0, 0): value("resid_post", 5, 3), ("resid_post", 0, 2): value("resid_post", 5, 1),
    ("resid_post", 0, 4): value("resid_post", 2, 0), ("resid_post", 3, 1): value("resid_post", 3, 1),
    ("resid_post", 4, 0): value("mlp_out", 1, 0), ("resid_post", 4, 3): value("mlp_out", 1, 3),
    ("resid_post", 5, 4): value("resid_post", 0, 3),
}  # fmt: skip


def patched(compiled: CompiledPlan) -> dict[Any, torch.Tensor]:
    """(site, layer, position) -> what is written there."""
    return {
        (*point, position): compiled.bank[op.vector]
        for position, number in enumerate(compiled.prompt.tolist())
        for point, ops in compiled.profiles[number].ops.items()
        for op in ops
        if op.kind == "patch"
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("later_first", [False, True])
def test_a_patch_has_its_source_from_the_stage_that_recorded_it(size: int, later_first: bool) -> None:
    """Upstream and downstream, whichever stage comes to the request first."""
    from concurrent.futures import ThreadPoolExecutor

    with linked(size) as links, ThreadPoolExecutor(size) as pool:
        stages = [Stage(rank, size, link) for rank, link in enumerate(links)]

        def work(stage: Stage) -> dict[Any, torch.Tensor]:
            if (stage.pipeline.rank == 0) == later_first:
                time.sleep(0.1)
            sources = stage.sources("a", CROSSING)
            found = patched(stage.compiled(CROSSING, sources))
            sources.close()
            return found

        found = list(pool.map(work, stages))
        merged = {key: row for each in found for key, row in each.items()}
        assert sum(map(len, found)) == len(merged)  # each stage patches what it has
        assert merged.keys() == EXPECTED.keys()
        for key, row in EXPECTED.items():
            assert torch.equal(merged[key], row), key
        settle(lambda: [any(link.gauges().values()) for link in links] == [False] * size)


def settle(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stage_that_has_compiled_the_plan_before_leaves_nothing_behind() -> None:
    """It does not fetch what the others offer."""
    with linked(2) as links:
        stages = [Stage(rank, 2, link) for rank, link in enumerate(links)]
        offered = [stage.sources("a", CROSSING) for stage in stages]
        assert sum(link.gauges()["published"] for link in links) == 2
        for sources in offered:
            sources.close()
        settle(lambda: not any(sum(link.gauges().values()) for link in links))


def test_a_stage_that_never_gives_its_rows_is_a_plan_error_and_no_wait() -> None:
    with linked(2) as links:
        stages = [Stage(rank, 2, link) for rank, link in enumerate(links)]
        sources = stages[0].sources("a", CROSSING)
        links[1].end("sources of a, 5", NeverReachedError("it was refused there"))
        with pytest.raises(PlanError, match=r"Patch\.source: .*it was refused there"):
            stages[0].compiled(CROSSING, sources)
        sources.close()


def test_without_crossing_sources_the_link_is_not_touched() -> None:
    stages = [Stage(rank, 2, link=None) for rank in range(2)]
    plan = Plan.of([Patch("resid_post", layer=l, position=1, source=HANDLE) for l in range(LAYERS)])  # noqa: E741
    merged = {k: v for s in stages for k, v in patched(s.compiled(plan, s.sources("a", plan))).items()}
    assert {key: row.tolist() for key, row in merged.items()} == {
        ("resid_post", layer, 1): value("resid_post", layer, 1).tolist() for layer in range(LAYERS)
    }


@pytest.mark.parametrize("layer", [0, 5])
def test_a_row_that_nobody_has_is_refused_on_every_stage_alike(layer: int) -> None:
    """A handle may claim what the run has not; only the last stage's word ends a request."""
    claims = RecordedRun("clean", "run", tuple(range(LENGTH)), ("resid_post",), tuple(range(LAYERS)), (0, 1, 2, 3))
    plan = Plan.of(Patch("resid_post", layer=layer, position=2, source=claims))
    for rank in range(2):
        with pytest.raises(PlanError, match=f"'clean' has no row of resid_post at layer {layer}, position 2"):
            Stage(rank, 2).sources("a", plan)


# ----------------------------------------------------------------------------------------------- decided alike everywhere


def test_where_a_plan_acts_is_the_same_on_all_stages() -> None:
    """Whether a step runs uncompiled is decided by it, and stages that decided differently would not fit together."""
    plan = Plan.of([
        Patch("mlp_out", layer=5, position=1, source=[1.0] * WIDTH),
        Capture("resid_post", layers=0, positions=[3]),
        Steer("resid_post", layers=[2, 4], vector=[1.0] * WIDTH, phase="decode"),
    ])  # fmt: skip
    stages = [Stage(rank, size) for size in (1, 2, 3) for rank in range(size)]
    for compiled in [stage.compiled(plan, stage.sources("a", plan)) for stage in stages]:
        assert compiled.acts.tolist() == [False, True, False, True, False]
        in_prompt, generated = ({point_of(item) for item in items} for items in compiled.acting)
        assert in_prompt == {("mlp_out", 5), ("resid_post", 0)}
        assert generated == {("resid_post", 2), ("resid_post", 4)}


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda layer: Steer("resid_post", layers=layer, vector="v"), "replaced"),
        (lambda layer: Patch("resid_post", layer=layer, position=0, source="v"), "replaced"),
        (lambda layer: Clamp("resid_post", layers=layer, direction="zero"), "zero"),
        (lambda layer: Patch("resid_post", layer=layer, position=0, source="zeros", mask="two"), "from 0 to 1"),
        (lambda layer: Patch("resid_post", layer=layer, position=0, source=HANDLE, mask="two"), "from 0 to 1"),
    ],
)
def test_a_named_vector_that_will_not_do_is_refused_on_every_stage_alike(
    edit: Callable[[int], Any], message: str, layer: int
) -> None:
    """Else the request would go on without the edit: the word of the last stage counts."""

    def vector(named: Named) -> Any:
        if named.name == "v":
            raise PlanError("The vector 'v' was replaced by another")
        return np.full(WIDTH, {"zero": 0.0, "two": 2.0}[named.name], np.float32)

    stages = [Stage(rank, 2) for rank in range(2)]
    for stage in stages:
        with pytest.raises(PlanError, match=message):
            compile_plan(
                Plan.of(edit(layer)),
                LENGTH,
                LAYERS,
                width=lambda site, layer: WIDTH,
                dtype="float32",
                vector=vector,
                run=lambda *place: torch.zeros(WIDTH),
                points=stage.pipeline.each[stage.pipeline.rank].keys(),
            )


def make(name: str, sizes: tuple[int, ...], owner: str = "") -> Run:
    return Run(name, name, {}, {0: 0}, frozenset({("resid_post", 0)}), sizes, owner=owner)


def test_who_holds_the_most_loses_the_run_that_it_has_not_used_for_the_longest() -> None:
    """So no key drives out the runs of keys that hold less; leased runs stay, also those of whoever holds the most."""
    store = RunStore(100)
    for name, owner in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("a2", "a")):
        store.add(make(name, (20,), owner))
    store.lease(["a0"], 1)
    for i in range(3):
        store.add(make(f"b{i + 1}", (20,), "b"))
    assert [run["id"] for run in store.list()] == ["a2", "a0", "b1", "b2", "b3"]
    store.add(make("c", (10,), "c"))
    assert [run["id"] for run in store.list()] == ["a2", "a0", "b2", "b3", "c"]


def test_runs_are_dropped_alike_on_all_stages() -> None:
    """The one whose stage is full has the others drop the run too, though they have room."""
    stores = [RunStore(100) for _ in range(2)]
    for sizes in ((60, 0), (0, 90), (50, 50), (1, 99)):
        for store in stores:
            store.add(make(str(sizes), sizes))
    for store in stores:
        assert [run["id"] for run in store.list()] == ["(1, 99)"]
        assert store.list()[0]["bytes"] == 100
        with pytest.raises(PlanError, match="has 101 bytes; the budget for recorded runs is 100, of which 0 are"):
            store.add(make("large", (0, 101)))
        assert store.lease(["(1, 99)"], 1) == []
        with pytest.raises(PlanError, match=r"has 2 bytes; .* is 100, of which 99 are"):
            store.add(make("small", (2, 2)))
        store.add(make("empty there", (99, 1)))


@pytest.fixture
def ranks() -> Iterator[tuple[Runs, list[RunStore]]]:
    """A client's runs on two workers, one of which has lost the second run."""
    stores = [RunStore(1000), RunStore(1000)]

    async def ask(what: str, *args: Any) -> list[Any]:
        return [getattr(store, what)(*args) for store in stores]

    runs = Runs(ask, run_now)
    for name in ("one", "two"):
        for store in stores:
            store.add(make(name, (10, 20)))
        run_now(runs.add(RecordedRun(name, name, (1,), ("resid_post",), (0,), (0,))))
    stores[1].delete(["two"])
    yield runs, stores


def test_a_lease_that_one_worker_refuses_is_held_on_none(ranks: tuple[Runs, list[RunStore]]) -> None:
    """Also where that request's other runs are in use by somebody else."""
    runs, stores = ranks
    run_now(runs.lease(["one"]))
    with pytest.raises(PlanError, match="'two' is not there any more"):
        run_now(runs.lease(["one", "two"]))
    assert [store.leases for store in stores] == [1, 1]
    run_now(runs.release(["one"]))
    assert [store.leases for store in stores] == [0, 0]


def test_the_workers_hear_of_the_first_lease_and_of_the_last_ones_end(ranks: tuple[Runs, list[RunStore]]) -> None:
    runs, stores = ranks
    for _ in range(3):
        run_now(runs.lease(["one"]))
    assert [store.leases for store in stores] == [1, 1] and runs.listing()[0].leases == 3
    for _ in range(2):
        run_now(runs.release(["one"]))
    assert [store.leases for store in stores] == [1, 1]
    run_now(runs.release(["one"]))
    assert [store.leases for store in stores] == [0, 0] and runs.listing()[0].leases == 0


def test_a_run_that_is_deleted_while_it_is_leased_is_leased_to_nobody_else(
    ranks: tuple[Runs, list[RunStore]],
) -> None:
    runs, stores = ranks
    run_now(runs.lease(["one"]))
    del runs["one"]
    with pytest.raises(PlanError, match="not there any more"):
        run_now(runs.lease(["one"]))
    run_now(runs.release(["one"]))
    assert [store.leases for store in stores] == [0, 0]


async def test_the_same_on_an_async_engine(ranks: tuple[Runs, list[RunStore]]) -> None:
    _, stores = ranks

    async def ask(what: str, *args: Any) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(store, what)(*args) for store in stores]

    with pytest.raises(PlanError, match="not there any more"):
        await Runs(ask, None).lease(["one", "two"])
    assert [store.leases for store in stores] == [0, 0]


def test_runs_are_listed_once_and_only_if_all_workers_have_them(ranks: tuple[Runs, list[RunStore]]) -> None:
    runs, _ = ranks
    (info,) = runs.listing()
    assert (info.name, info.bytes, info.layers, info.leases) == ("one", 30, (0,), 0)
    assert list(runs) == ["one"]
    del runs["one"]
    assert list(runs) == []


# ---------------------------------------------------------------------------------------------------------- captures


def test_sinks_of_several_stages_make_one_capture(tmp_path: Path) -> None:
    """Also of a stage that has none of the rows; a request is complete when all have written."""
    plan = Plan.of([
        Capture("resid_post", layers=[1, 4], positions="all_prompt", to=tmp_path / "both"),
        Capture("resid_post", layers=[0, 2], positions="last_prompt", to=tmp_path / "first"),
    ])  # fmt: skip
    stages = [LocalSinks("engine", LAYERS, [0, 1, 2], (0, 2)), LocalSinks("engine", LAYERS, [3, 4, 5], (1, 2))]
    here = [[1, 0, 2], [4]]

    def feed(sinks: LocalSinks, layers: list[int]) -> None:
        sinks.begin("a-0123abcd", plan, [7, 8, 9])
        layout = Planes.of((("resid_post", layer, "before") for layer in layers), lambda _: WIDTH)
        rows = torch.stack([torch.cat([value("resid_post", layer, p) for layer in layers]) for p in range(3)])
        sinks.rows("a-0123abcd", [Rows(np.arange(3), layout, rows)])
        sinks.end("a-0123abcd", 3)
        sinks.close()

    feed(stages[0], here[0])
    halfway = open_captures(tmp_path / "both")
    assert len(halfway) == 0
    with pytest.raises(CaptureError, match=r"of 2 pipeline stages, \[1\] have not written it"):
        halfway["a"]
    feed(stages[1], here[1])
    both, first = (open_captures(tmp_path / name)["a"] for name in ("both", "first"))
    assert list(both) == [("resid_post", 1), ("resid_post", 4)]
    assert list(first) == [("resid_post", 0), ("resid_post", 2)]
    for capture, positions in ((both, [0, 1, 2]), (first, [2])):
        for site, layer in capture:
            assert capture.positions[site, layer] == positions
            assert torch.equal(capture[site, layer], torch.stack([value(site, layer, p) for p in positions]))
    assert both.prompt_token_ids == [7, 8, 9]
    lines = [json.loads(path.read_text().splitlines()[-1]) for path in (tmp_path / "both").glob("index-*.jsonl")]
    assert [line["run"] for line in lines] == ["a-0123abcd"] * 2  # the engine's own id, which no other request has


# -------------------------------------------------------------------------------------------------- what is remembered


def test_what_is_remembered_is_bounded_by_bytes() -> None:
    """Many large plans, of which few are kept; small ones all."""
    memory: Memory[int] = Memory(100_000)
    made: list[int] = []

    def get(key: int, size: int) -> int:
        return memory.get(key, lambda: made.append(key) or key, lambda _: size)

    for key in range(50):
        assert get(key, 20_000) == key
        get(0, 20_000)
    assert memory.size <= 100_000 and len(memory) == 4
    assert made == list(range(50))  # the one that is used is kept
    get(100, 200_000)
    assert len(memory) == 4  # what is larger than all is not
    with pytest.raises(ZeroDivisionError):
        memory.get(200, lambda: 1 // 0, lambda _: 1)


def test_the_sizes_of_plans_and_keys_are_about_what_they_take() -> None:
    large = Plan.of([Steer("resid_post", layers=i, vector=torch.randn(4096)) for i in range(8)])
    assert 8 * 4096 * 4 < plan_bytes(large) < 2 * 8 * 4096 * 4
    many = Plan.of(Patch("resid_post", layer=0, position=range(0, 4000, 2), source="zeros"))
    assert 2000 * 30 < plan_bytes(many) < 2000 * 200
    keys = ScheduledPlan.of(many, 4000, LAYERS)
    held = [*keys.starts, *keys.stops, *keys.within, *keys.after]
    real = sum(map(sys.getsizeof, held))
    assert 0.5 * real < keys.size < 2 * real


def adding(number: int) -> Apply:
    """A program of 100 operations that no other number has, without constants."""
    steps = [Step("add.Tensor", (Ref(i - 1), INPUT), (("alpha", 1000 * number + i),)) for i in range(100)]
    return Apply("resid_post", layers=0, program=Program(WIDTH, "float32", tuple(steps), Ref(99)))


def test_plans_with_long_programs_take_the_memory_that_they_are_counted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation takes ten times its bytes on the wire, and any API key may send one plan after the other."""
    budget, given = 200_000, [packed(Plan.of(adding(number))) for number in range(21)]
    monkeypatch.setattr("midstream.runtime.request._read", Memory(budget))
    unpacked(given[0])
    tracemalloc.start()
    try:
        for data in given[1:]:
            unpacked(data)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < budget
    finally:
        tracemalloc.stop()


def test_the_facts_about_programs_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on their number would be none: a client may send a program with arguments of 600 KB."""
    known, found = Memory[Any](300_000), Memory[Any](300_000)
    monkeypatch.setattr("midstream.plan.checking._known", known)
    monkeypatch.setattr("midstream.plan.checking._found", found)
    for number in range(20):
        adding(number)
    assert 1 <= len(known) <= 3
    assert 100 <= len(found) <= 300 and found.size <= 300_000


# ------------------------------------------------------------------------------------------------------------ admission


CONNECTED = {"kv_transfer_config": SimpleNamespace(kv_connector="SharedStorageConnector"), "speculative_config": None}
DRAFTING = {
    "kv_transfer_config": None,
    "speculative_config": SimpleNamespace(method="eagle"),
    "scheduler_config": SimpleNamespace(async_scheduling=True),
}
GUESSING = {**DRAFTING, "speculative_config": SimpleNamespace(method="medusa")}


@pytest.mark.parametrize("carried", [{"plan": Plan.of(Steer("resid_post", vector=[1.0]))}, {"trace": {}}])
@pytest.mark.parametrize(
    ("kind", "why"), [(CONNECTED, "KV connector"), (DRAFTING, "async_scheduling=False"), (GUESSING, "medusa")]
)
def test_an_engine_that_hands_kv_on_or_drafts_ahead_takes_neither_plans_nor_traces(
    carried: dict[str, Any], kind: dict[str, Any], why: str
) -> None:
    pytest.importorskip("vllm")
    from midstream.engine.admission import admitted
    from midstream.engine.launch import WORKER
    from midstream.settings import Settings

    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=WORKER), **kind)
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"midstream": carried}, max_tokens=1))
    with pytest.raises(PlanError, match=why) as refused:
        admitted(config, Settings(), request)

    # An engine's front end raises it as one of vLLM's errors, too. Callers get it as it is.
    from midstream.engine.admission import as_client_error
    from midstream.engine.launch import translated_errors

    error = as_client_error(refused.value)
    with pytest.raises(PlanError, match=why) as raised, translated_errors():
        raise error
    assert raised.value is error
