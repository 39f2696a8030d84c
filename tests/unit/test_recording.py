"""PiecewiseGraphs of a forward that are replayed from CUDA graphs: graphs with the plans' edits, and stops where traces wait and plans act.

The stand-in for vLLM's wrapper has what matters of a CUDA graph: a replay reads where the recorded run read and writes where that wrote.
On a GPU, tests/gpu runs plans and traces through the real ones. Row L5.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import LayerName

from midstream.engine import graphs as module
from midstream.engine.graphs import ActingGraphs, Kernel, PiecewiseGraphs, SiteOp, _site

CONTEXT = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor="batch", capturing=False)


class Entry(SimpleNamespace):
    """A recorded graph: where it reads and writes, and what the site op added while it was recorded."""


class Wrapper:
    runtime_mode = CUDAGraphMode.PIECEWISE

    def __init__(self, point: int) -> None:
        self.point = point
        self.concrete_cudagraph_entries: dict[str, Any] = {}

    def runnable(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        hidden = 2 * x
        _site(hidden, None, LayerName(str(self.point)))
        return hidden + 1, 7

    def __call__(self, x: torch.Tensor) -> Any:
        if CONTEXT.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(x)
        entry = self.concrete_cudagraph_entries.get(CONTEXT.batch_descriptor)
        if entry is None:
            output = self.runnable(x)
            entry = Entry(read=x, added=output[0] - (2 * x + 1), output=output)
            self.concrete_cudagraph_entries[CONTEXT.batch_descriptor] = entry
            return output
        entry.output[0].copy_(2 * entry.read + entry.added + 1)
        return entry.output


class Model:
    """Three pieces. A value of x is 8 x + 7 behind them; 10 more at a point are 10, 20 or 40 more behind the last one."""

    def __init__(self) -> None:
        self.pieces = [Wrapper(point) for point in (0, 1, 2)]
        self.input = torch.zeros(1)
        self.fired: list[tuple[int, float]] = []

    def run(self, x: float = 0.0) -> float:
        self.fired.clear()
        value = self.input.fill_(x)
        for piece in self.pieces:
            value, seven = piece(value)
            assert seven == 7
        return value.item()

    def fire(self, point: int, hidden: torch.Tensor, residual: Any) -> None:
        self.fired.append((point, hidden.item()))
        hidden += 10


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(module, "CUDAGraphWrapper", Wrapper)
    monkeypatch.setattr(module, "get_forward_context", lambda: CONTEXT)
    yield Model()
    SiteOp.edit = SiteOp.fire = None


@pytest.fixture
def pieces(model: Model) -> PiecewiseGraphs:
    model.run()
    return PiecewiseGraphs()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("stops", [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()])
def test_a_trace_is_called_at_its_points_and_what_it_writes_goes_on(
    model: Model, pieces: PiecewiseGraphs, stops: tuple[int, ...], times: int
) -> None:
    """Seen failing where the output of a piece that was run was not put where the graph of the next one reads.

    The first time, all pieces run from their code, since it is not known yet where the points are: `fire` sees all of them.
    """
    before = Wrapper.__call__
    SiteOp.fire = lambda point, hidden, residual: model.fire(point, hidden, residual) if point in stops else None
    for _ in range(times):
        with pieces.stopping_at(lambda point: point in stops):
            found = model.run(3)
    at = {0: 6.0, 1: 14.0 + 20 * (0 in stops)}
    at[2] = 2 * (at[1] + 10 * (1 in stops)) + 2
    assert model.fired == [(point, at[point]) for point in stops]
    assert found == 31 + sum({0: 40, 1: 20, 2: 10}[point] for point in stops)
    SiteOp.fire = None
    assert model.run(3) == 31 and Wrapper.__call__ is before and SiteOp.seen is None  # and nothing of it stays


def test_a_piece_without_a_stop_is_replayed_once_its_points_are_known(model: Model, pieces: PiecewiseGraphs) -> None:
    seen: list[int] = []
    SiteOp.fire = lambda point, hidden, residual: seen.append(point)
    for expected in ([0, 1, 2], [1]):
        with pieces.stopping_at(lambda point: point == 1):
            model.run(1)
        assert seen == expected
        seen.clear()


def test_a_plan_and_a_trace_stop_the_same_step(model: Model, pieces: PiecewiseGraphs) -> None:
    """The step that a plan stops ends before the block in which a trace does."""
    before = Wrapper.__call__
    with pieces.stopping_at(lambda point: False):
        model.run()
    SiteOp.fire = model.fire
    for acts, expects, fired in ((1, 2, [1, 2]), (0, 0, [0]), (None, 1, [1])):
        with pieces.stopping_at(lambda point, at=expects: point == at):  # type: ignore[misc]
            if acts is not None:
                pieces.stop_where(lambda point, at=acts: point == at)  # type: ignore[misc]
            model.run()
            assert [point for point, _ in model.fired] == fired
            pieces.end_step()
    pieces.stop_where(lambda point: point == 2)
    model.run()
    assert [point for point, _ in model.fired] == [2]
    pieces.end_step()
    model.run()
    assert model.fired == [] and Wrapper.__call__ is before


def test_a_batch_without_graphs_runs_as_it_is(
    model: Model, pieces: PiecewiseGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONTEXT, "cudagraph_runtime_mode", CUDAGraphMode.NONE)
    SiteOp.fire = model.fire
    with pieces.stopping_at(lambda point: point == 1):
        assert model.run(0) == 7 + 40 + 20 + 10  # every piece calls the op, and the host would find nobody there
    assert [point for point, _ in model.fired] == [0, 1, 2]


class Manager:
    """What holds the full graphs."""

    def __init__(self) -> None:
        self.graphs: dict[str, Any] = {}


class Host:
    """A model with graphs of pieces, and plans that add 100 at the points of their sites."""

    sites = ("a", "b", "a")

    def __init__(self, model: Model, limit: int = 10, **options: Any) -> None:
        self.model, self.calls = model, list[tuple[str, Any]]()
        self.operations = 0.0  # of programs
        self.fails: Any = False  # or the error of recordings
        self.full = Manager()
        target = "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.graphs"
        place = (target, self.full)
        self.pieces = PiecewiseGraphs()
        self.graphs = ActingGraphs(
            limit << 20, self.kernel, lambda point: self.sites[point] in self.graphs.acting, self.record, place,
            self.pieces, **options,
        )  # fmt: skip

    def kernel(self, acting: Any) -> Any:
        def edit(point: int, hidden: torch.Tensor, residual: Any) -> None:
            hidden += 100 * (self.sites[point] in acting)

        return Kernel(edit, operations=self.operations)

    def record(self, kind: str, descriptor: Any) -> None:
        """What vLLM does: it runs the forward to warm up, and then records it."""
        self.calls.append((kind, descriptor))
        with at(descriptor, CUDAGraphMode.NONE):
            assert self.model.run() == 7  # the kernel does not run
        if kind == "FULL":
            self.full.graphs[descriptor] = sorted(self.graphs.acting)
        else:
            with at(descriptor):
                CONTEXT.capturing = True
                self.model.run()
                CONTEXT.capturing = False
        if self.fails:
            raise self.fails

    def step(
        self,
        acting: str = "",
        kind: str = "PIECEWISE",
        descriptor: Any = "batch",
        x: float = 0.0,
        strangers: bool = False,
    ) -> Any:
        """What the runner's adapter does in a step: what it computes, or the full graph that it replays."""
        graphs = self.graphs
        if graphs.begin_step(frozenset(acting), strangers):
            graphs.record_due()
        SiteOp.edit = self.kernel(frozenset(acting)).fire if acting else None
        try:
            if kind == "FULL":
                if graphs.choose(kind, descriptor):
                    return self.full.graphs.get(descriptor)
                kind = "PIECEWISE"
            graphs.choose(kind, descriptor)
            with at(descriptor, CUDAGraphMode[kind]):
                return self.model.run(x)
        finally:
            graphs.end_step()
            SiteOp.edit = None

    @property
    def held(self) -> int:
        return self.graphs.gauges()["graphs"]


@contextmanager
def at(descriptor: Any, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE) -> Iterator[None]:
    """A forward of this batch."""
    before = CONTEXT.cudagraph_runtime_mode, CONTEXT.batch_descriptor
    CONTEXT.cudagraph_runtime_mode, CONTEXT.batch_descriptor = mode, descriptor
    try:
        yield
    finally:
        CONTEXT.cudagraph_runtime_mode, CONTEXT.batch_descriptor = before


ADDED = {"a": 400 + 100, "b": 200, "ab": 700}  # what the plans' 100 more are behind the last piece


@pytest.fixture
def host(model: Model, monkeypatch: pytest.MonkeyPatch) -> Host:
    return make_host(model, monkeypatch)


def make_host(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Host:
    monkeypatch.setattr(CONTEXT, "capturing", False, raising=False)
    monkeypatch.setattr(module, "is_capturing", lambda: CONTEXT.capturing)
    monkeypatch.setattr(module, "alone_on_this_thread", nullcontext)
    made = Host(model, **options)
    for descriptor in ("batch", "other"):  # what vLLM records when it starts
        with at(descriptor):
            model.run()
        made.full.graphs[descriptor] = "vLLM's"
    return made


@pytest.mark.parametrize("acting", ["a", "b", "ab"])
def test_a_batch_that_comes_again_is_recorded_with_what_acts_alone(host: Host, acting: str) -> None:
    """All steps are right: without graphs, with them, and plain ones between."""
    for number in range(5):
        assert host.step(acting, x=number) == 8 * number + 7 + ADDED[acting]
        assert host.calls == ([("PIECEWISE", "batch")] if number >= 2 else [])
        assert host.step(x=number) == 8 * number + 7
    assert host.graphs.gauges() == {"graphs": 1, "graph_bytes": 1 << 20, "graph_recordings": 1, "recording_failures": 0}
    entry = host.model.pieces[0].concrete_cudagraph_entries["batch"]
    assert not entry.added  # vLLM's own graphs have nothing of it


def test_plans_from_http_get_a_graph_once_in_many_steps(host: Host) -> None:
    """Others wait for each recording. Seen before: strangers' plans had graphs recorded before nearly every step."""
    steps, batches = 400, [(acting, name) for acting in ("a", "b", "ab") for name in ("batch", "other")]
    for number in range(steps):
        acting, descriptor = batches[number % len(batches)]
        before = len(host.calls)
        assert host.step(acting, descriptor=descriptor, x=number, strangers=True) == 8 * number + 7 + ADDED[acting]
        assert len(host.calls) - before <= 1
    assert 3 <= len(host.calls) <= 1 + steps // module._STRANGERS_PAUSE


def test_long_programs_from_http_get_no_graph(host: Host) -> None:
    host.operations = module._STRANGERS_OPERATIONS + 1.0
    for _ in range(200):
        host.step("a", strangers=True)
    assert not host.calls
    for _ in range(3):
        host.step("a")  # the engine's own
    assert len(host.calls) == 1


def test_graphs_that_are_due_and_never_needed_again_are_forgotten(host: Host) -> None:
    for number in range(3 * module._MOST_DUE):
        for _ in range(2):  # due with the second one, and not asked for again
            host.graphs.begin_step(frozenset([number]), has_strangers=True)
            host.graphs.choose("FULL", "batch")
            host.graphs.end_step()
    assert len(host.graphs._due) <= module._MOST_DUE


def test_once_recorded_a_step_replays_and_calls_nothing(host: Host) -> None:
    for _ in range(3):
        host.step("a")
    before = Wrapper.__call__
    host.graphs.begin_step(frozenset("a"))
    assert host.graphs.choose("PIECEWISE", "batch") and Wrapper.__call__ is before
    assert host.model.run() == 7 + ADDED["a"]
    host.graphs.end_step()
    host.graphs.begin_step(frozenset())
    assert host.model.run() == 7


def test_a_step_without_its_full_graph_has_the_pieces(host: Host) -> None:
    """And only the full graph is recorded for it, which it will use."""
    assert [host.step("a", "FULL") for _ in range(3)] == [7 + ADDED["a"], 7 + ADDED["a"], ["a"]]
    assert host.calls == [("FULL", "batch")]
    assert host.step(kind="FULL") == "vLLM's" and host.step("b", "FULL") == 7 + ADDED["b"]
    assert host.step("a", "FULL") == ["a"]


def test_a_graph_is_recorded_for_each_set_and_batch(host: Host) -> None:
    for _ in range(3):
        for acting in ("a", "b", "ab"):
            for descriptor in ("batch", "other"):
                assert host.step(acting, descriptor=descriptor) == 7 + ADDED[acting]
    assert sorted(host.calls) == [("PIECEWISE", each) for each in ("batch", "other") for _ in range(3)]
    assert host.held == 6


def test_a_batch_without_graphs_asks_for_none(host: Host) -> None:
    for _ in range(4):
        assert host.step("a", kind="NONE") == 7 + ADDED["a"]
    assert not host.calls and not host.held


def test_the_graphs_keep_within_their_bytes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used is dropped, its entries in all pieces, and asked for twice as often until it is recorded again."""
    host = make_host(model, monkeypatch, limit=2)

    def run(acting: str, times: int = 3) -> None:
        for _ in range(times):
            assert host.step(acting) == 7 + ADDED[acting]

    for acting, times in (("a", 3), ("b", 3), ("a", 1)):
        run(acting, times)
    kept = weakref.ref(host.graphs._sets[frozenset("b")]._graphs[model.pieces[0]]["batch"])
    assert kept() is not None
    run("ab")
    assert host.held == 2 and set(host.graphs._sets) == {frozenset("a"), frozenset("ab")} and kept() is None
    calls = len(host.calls)
    run("b", 4)
    assert len(host.calls) == calls
    run("b", 1)
    assert len(host.calls) == calls + 1 and host.held == 2
    for acting in ("a", "b", "ab"):
        run(acting, 1)


@pytest.mark.parametrize("limit", [0, 10])
def test_without_room_or_without_success_steps_are_right_and_nothing_is_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    host = make_host(model, monkeypatch, limit=limit)
    host.fails = RuntimeError("out of memory")
    for _ in range(6):
        for kind in ("PIECEWISE", "FULL"):
            assert host.step("a", kind) == 7 + ADDED["a"]
            assert host.step(kind=kind) == (7 if kind == "PIECEWISE" else "vLLM's")
    assert sorted(host.calls) == ([("FULL", "batch"), ("PIECEWISE", "batch")] if limit else [])
    assert not host.held and SiteOp.edit is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(host.calls)
    host.fails = False
    for _ in range(3):
        assert host.step("b") == 7 + ADDED["b"]
    assert host.held == bool(limit)


def test_graphs_of_the_start_serve_every_set(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph can be recorded later. The kernel finds no ops at other points; here it adds at all of them."""
    host = make_host(model, monkeypatch, fixed=frozenset("ab"))
    with host.graphs.recording(frozenset("ab")):
        for descriptor in ("batch", "other"):
            host.record("PIECEWISE", descriptor)
            host.record("FULL", descriptor)
    calls = len(host.calls)
    for acting in ("a", "b", "ab"):
        assert host.step(acting) == 7 + ADDED["ab"] and host.step(acting, "FULL") == []
    assert host.step() == 7 and host.step(kind="FULL") == "vLLM's"
    assert len(host.calls) == calls and host.held == 2


def test_ranks_count_with_the_same_size(host: Host) -> None:
    host.graphs.measure(12 << 20, 4)
    assert host.graphs.bytes_each == 3 << 20
    host.graphs.agree(lambda mine: [mine, 5 << 20])
    assert host.graphs.bytes_each == 5 << 20
    host.graphs.measure(-1, 0)
    assert host.graphs.bytes_each == 1 << 20


def test_an_engine_whose_graphs_count_for_too_much_says_so(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """As where another process takes memory of the device while vLLM records."""
    host.graphs.measure(12 << 20, 4)
    assert not caplog.records
    host.graphs.measure(1 << 50, 4)
    assert "Raise graph_bytes" in caplog.text
    assert [host.step("a", "FULL") for _ in range(4)] and host.held == 0


def test_a_set_that_is_new_while_another_is_in_use_leaves_vllms_graphs_theirs(host: Host) -> None:
    """Seen failing: it took the full graphs of the other set for vLLM's, and plain steps had those from then on."""
    own = host.full.graphs
    for _ in range(3):
        host.step("a", "FULL")
    for _ in range(2):
        host.step("b", "FULL", "other")
    assert host.step("a", "FULL") == ["a"]
    assert host.step("b", "FULL", "other") == ["b"] and len(host.calls) == 2
    assert host.step(kind="FULL", descriptor="other") == "vLLM's" and host.full.graphs is own
    assert own == {"batch": "vLLM's", "other": "vLLM's"}


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_any_order_are_right(model: Model, monkeypatch: pytest.MonkeyPatch, seed: int, limit: int) -> None:
    """Also where recordings fail, or are interrupted. Plain steps have vLLM's own graphs."""
    host, choose = make_host(model, monkeypatch, limit=limit), random.Random(seed).choice
    holders = [(host.full, "graphs"), *((piece, "concrete_cudagraph_entries") for piece in model.pieces)]
    own, call = [getattr(*each) for each in holders], Wrapper.__call__
    for number in range(400):
        acting, kind = choose(["", "", "a", "b", "ab"]), choose(["FULL", "FULL", "PIECEWISE"])
        descriptor = choose(["batch", "batch", "other"])
        host.fails = KeyboardInterrupt() if number % 50 == 30 else RuntimeError() if number == 200 else False
        try:
            found = host.step(acting, kind, descriptor)
        except KeyboardInterrupt:
            continue
        full = sorted(acting) if acting else "vLLM's"
        assert found == full if isinstance(found, (str, list)) else found == 7 + ADDED.get(acting, 0)
        assert Wrapper.__call__ is call and SiteOp.edit is None and host.held <= limit
        if not acting:
            assert [getattr(*each) for each in holders] == own
            assert all(now is before for now, before in zip((getattr(*e) for e in holders), own, strict=True))
        graphs = host.graphs  # whatever is held is known, and so will be dropped
        assert {acts for acts, _, _ in graphs._recorded} == set(graphs._sets)
        for acts, each in graphs._sets.items():
            assert each.held() == {e for key, held in graphs._recorded.items() if key[0] == acts for e in held}
    assert graphs.recordings > 3


def test_a_recording_that_records_nothing_has_failed(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the step would look for its graph in vain."""
    monkeypatch.setattr(host.graphs, "_record", lambda kind, descriptor: None)
    assert [host.step("a", "FULL") for _ in range(4)] == [7 + ADDED["a"]] * 4
    assert not host.held and len(caplog.records) == 1


def test_a_block_in_a_block_stops_for_both(model: Model, pieces: PiecewiseGraphs) -> None:
    before = Wrapper.__call__
    with pieces.stopping_at(lambda point: False):
        model.run()
    SiteOp.fire = model.fire
    with pieces.stopping_at(lambda point: point == 0):
        with pieces.stopping_at(lambda point: point == 2):
            model.run()
        assert [point for point, _ in model.fired] == [0, 2]
        model.run()
        assert [point for point, _ in model.fired] == [0]
    model.run()
    assert model.fired == [] and Wrapper.__call__ is before


def test_where_a_piece_stops_is_not_known_from_a_run_that_failed(model: Model, pieces: PiecewiseGraphs) -> None:
    """Seen failing: the points behind the error were taken for absent, and a trace that waited there was not called."""

    def runnable(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a trace's code")

    with pytest.MonkeyPatch.context() as patch, pieces.stopping_at(lambda point: True), pytest.raises(RuntimeError):
        patch.setattr(model.pieces[1], "runnable", runnable)
        model.run()
    SiteOp.fire = lambda point, hidden, residual: model.fire(point, hidden, residual) if point == 1 else None
    with pieces.stopping_at(lambda point: point == 1):
        model.run()
    assert [point for point, _ in model.fired] == [1]
