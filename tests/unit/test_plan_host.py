"""The plan host of a worker without an engine (issue 3, E1, E11; design.md section 4): what it does from step to step, on the CPU's tables.

The scheduler's outputs are written by hand; the oracle is what each request's plan says about each of its positions.
Rows D4, D5, D7, D8, E4, E5, E10, I1, K6, L3, L5.
"""

import itertools
import time
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from toy_selector import Around, Every, LastTwo

from midstream import Capture, Consumer, Knockout, Patch, Plan, Probe, RecordedRun, Steer
from midstream.capture.rows import Rows
from midstream.plan.captures import Plane, Planes
from midstream.plan.compile import compile_plan
from midstream.plan.selections import Selector
from midstream.plan.values import ModelFacts
from midstream.runtime import plan_host as host
from midstream.runtime import planned, tables
from midstream.runtime.knockouts import AttentionCuts
from midstream.runtime.plan_host import PlanHost
from midstream.runtime.points import Pipeline, PointHooks, points_of
from midstream.runtime.request import PlanRequest, RequestEnd, packed
from midstream.runtime.sending import CaptureSender, LocalSinks, Reports
from midstream.runtime.store import make_run
from midstream.runtime.tables import DeviceTables, RowProfiles
from midstream.runtime.torch_tables import TorchTables
from midstream.sites import Binding
from midstream.trace.batch_rows import BatchLayout

LAYERS, WIDTH, PROMPT = 2, 4, [1, 2, 3]
POINTS = [(site, layer) for site in ("resid_post", "mlp_out") for layer in range(LAYERS)]
BUILT_IN = POINTS[:LAYERS]


class Model(nn.Module):
    """A module for each point."""

    def __init__(self) -> None:
        super().__init__()
        for site, layer in POINTS:
            self.add_module(f"{site}_{layer}", nn.Identity())


class Steps:
    """A plan host, and the engine's steps as the worker and the runner's adapter pass them on."""

    def __init__(self, compiles: bool = True, speculative: bool = False) -> None:
        self.model, self.sent = Model(), []
        bindings = {(site, layer): Binding(f"{site}_{layer}", "output", ()) for site, layer in POINTS}
        arch = SimpleNamespace(layers=range(LAYERS), bindings=bindings, shard_of=lambda binding: None)
        widths = dict.fromkeys(points_of(arch), WIDTH)
        self.tables = TorchTables(points_of(arch), torch.device("cpu"), torch.float32)
        reports = Reports()
        reports.sender = SimpleNamespace(send_together=self.sent.extend)
        self.host = PlanHost(
            self.tables,
            PointHooks(self.model, arch, BUILT_IN, self.tables, torch.float32),
            ModelFacts(LAYERS, widths, "float32"),
            Pipeline(0, (widths,), frozenset(BUILT_IN)),
            link=None,
            compiles=compiles,
            device=torch.device("cpu"),
            dtype=torch.float32,
            record_bytes=1 << 20,
            captures=CaptureSender(reports, None),
            cuts=AttentionCuts(self.model, arch, 0),
            speculative=speculative,
        )
        self.computed: dict[str, int] = {}
        self.laid_out = self.begun = 0
        self.scale = 0.0  # the value of a row before a module, for each position before it
        lay_out, begin_step = self.host._lay_out, self.tables.begin_step

        def begun(rows, *places):
            self.begun += 1
            begin_step(rows, *places)

        def counted(*args, **options):
            self.laid_out += 1
            return lay_out(*args, **options)

        self.host._lay_out, self.tables.begin_step = counted, begun

    def step(self, plans=None, finished=(), order=None, resumed=(), counts=None, only=None):
        """One step of all requests, or of those named `only`; `plans` begin with it.

        What each row is after each module, `{point: [T, WIDTH]}`.
        """
        new = {name: (_sampling(plan), PROMPT) for name, plan in (plans or {}).items()}
        for name in finished:
            del self.computed[name]
        cached = list(self.computed if only is None else only)
        self.computed |= dict.fromkeys(new, 0)
        self.computed |= dict.fromkeys(resumed, 0)
        counts = {name: len(PROMPT) if name in new else 1 for name in [*cached, *new]} | (counts or {})
        output = SimpleNamespace(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[self.computed[n] for n in cached], resumed_req_ids=set(resumed)
            ),
            finished_req_ids=set(finished),
            total_num_scheduled_tokens=sum(counts.values()),
        )
        if not self.host.repeat(output):
            before = {name: self.computed[name] for name in cached} | dict.fromkeys(new, 0)
            off_graph = self.host.schedule(new, counts, dict.fromkeys(finished), before)
            self.host.remember_step(output, may_repeat=not off_graph)
        order = order or [*cached, *new]
        rows, first = np.array([counts[n] for n in order]), np.array([self.computed[n] for n in order])
        total = int(rows.sum())
        if self.host.step_is_planned and not self.host.is_prepared(order, total):  # as the runner's adapter asks
            self.host.begin_step(BatchLayout(order, rows, first, total))
        self.taken = {name: self.host.take_rows(name) for name in order}
        positions = [position for n in order for position in range(self.computed[n], self.computed[n] + counts[n])]
        seen = self.forward(positions) if self.host.step_is_planned else None
        self.host.end_step()
        for name in order:
            self.computed[name] += counts[name]
        return seen

    def forward(self, positions):
        seen = {}
        for site, layer in POINTS:
            rows = self.scale * torch.tensor(positions, dtype=torch.float32)[:, None].expand(-1, WIDTH)
            h = self.model.get_submodule(f"{site}_{layer}")(rows.clone())
            if (site, layer) in BUILT_IN:
                self.tables.edit(self.tables.index[site, layer], h, None)
            seen[site, layer] = h
        return seen


def _sampling(plan):
    if plan is None or isinstance(plan, PlanRequest):
        carried = plan
    else:
        carried = PlanRequest(packed(Plan.of(plan)), LAYERS, capture=("c", 0))
    return SimpleNamespace(extra_args=carried.to_extra_args() if carried is not None else None)


def steer(value, site="resid_post", layer=0, phase="both"):
    return Steer(site, layers=layer, vector=[float(value)] * WIDTH, phase=phase)


@pytest.fixture
def steps():
    return Steps()


def test_a_step_says_at_which_sites_in_the_graphs_plans_act(steps):
    """Those of the requests in the step, by phase, and of a step that repeats another: a graph without a site's kernel misses its edits."""
    steps.host._loaded._pipeline = replace(steps.host._pipeline, built_in=frozenset(POINTS))
    both = [steer(1, "mlp_out", phase="prefill"), steer(1, "resid_post", phase="decode")]

    def acting(**step):
        steps.step(**step)
        return steps.host.acting

    assert acting(plans={"a": both, "b": None}) == {"mlp_out"}
    assert [acting() for _ in range(3)] == [{"resid_post"}] * 3
    assert acting(plans={"c": Capture("mlp_out", layers=0, positions="all")}) == {"mlp_out", "resid_post"}
    assert [acting() for _ in range(2)] == [{"mlp_out", "resid_post"}] * 2
    assert acting(only=["b"]) == frozenset()
    assert acting(finished=["a"]) == {"mlp_out"}


def test_a_site_outside_of_the_graphs_is_in_none(steps):
    steps.step({"a": [steer(1, "mlp_out"), steer(1, "resid_post")]})
    assert steps.host.step_is_planned is False and steps.host.acting == {"resid_post"}


def test_a_decode_step_like_the_last_one_is_not_laid_out_again(steps):
    steps.step({"a": steer(1), "b": steer(2), "c": None})
    for number in range(4):
        seen = steps.step()
        assert seen["resid_post", 0][:, 0].tolist() == [1, 2, 0], number
    assert steps.laid_out == steps.begun == 2


def test_some_generated_tokens_have_edits_of_their_own(steps):
    """Beside another request, in steps that repeat behind them, and when they are computed again after a preemption."""
    some = Steer("resid_post", layers=0, vector=[1.0] * WIDTH, phase="decode", positions=[1, 2])
    steps.step({"a": some, "b": steer(2)})
    for number in range(6):
        assert steps.step()["resid_post", 0][:, 0].tolist() == [number in (1, 2), 2], number
    assert steps.laid_out < 6, "the last steps repeat"
    steps.computed["a"] = 0
    rows = steps.step(resumed=["a"], only=["a"], counts={"a": len(PROMPT) + 6})["resid_post", 0][:, 0].tolist()
    assert rows == [0.0] * len(PROMPT) + [0, 1, 1, 0, 0, 0]
    assert steps.step()["resid_post", 0][:, 0].tolist() == [0, 2]


def test_rows_that_are_captured_have_each_step_begun(steps):
    """Each step's go elsewhere, and the step behind the last of them has to take the address back."""
    steps.step({"a": [steer(1), Capture("resid_post", layers=0, positions="all_generated")], "b": steer(2)})
    for number in range(4):
        begun = steps.begun
        assert steps.step()["resid_post", 0][:, 0].tolist() == [1, 2], number
        assert steps.begun == begun + 1
    begun = steps.begun
    steps.step(finished=["a"])
    for _ in range(3):
        assert steps.step()["resid_post", 0][:, 0].tolist() == [2]
    assert steps.begun == begun + 1


def test_batches_that_take_turns_with_a_plain_one_stand_in_their_order_alone(steps):
    steps.step({"a": steer(1), "b": steer(2)})
    steps.step({"c": None}, only=[])
    for _ in range(2):
        assert steps.step(only=["a", "b"])["resid_post", 0][:, 0].tolist() == [1, 2]
        assert steps.step(only=["c"]) is None
    begun = steps.begun
    assert steps.step(only=["a", "b"])["resid_post", 0][:, 0].tolist() == [1, 2] and steps.begun == begun
    assert steps.step(only=["c"]) is None
    seen = steps.step(only=["a", "b"], order=["b", "a"])
    assert seen["resid_post", 0][:, 0].tolist() == [2, 1] and steps.begun == begun + 1


def test_a_step_in_which_no_plan_acts_is_a_plain_one(steps):
    """A chunk before the plan's position, and the tokens behind it. Seen failing where a chunk had no end."""
    plan = Patch("resid_post", layer=0, position=1, source=[5.0] * WIDTH)
    assert steps.step({"a": plan}, counts={"a": 1}) is None
    assert steps.step()["resid_post", 0][:, 0].tolist() == [5]
    assert steps.step() is None and steps.step() is None and steps.host.planned_steps == 1


def test_batches_that_take_turns_are_not_laid_out_again(steps):
    """The stages of a pipeline have several on their way. One is laid out anew when one of its requests has ended."""
    steps.step({"a": steer(1), "b": steer(2)})
    steps.step({"c": steer(3), "d": None}, only=[])
    laid_out = steps.laid_out
    for number in range(4):
        assert steps.step(only=["a", "b"])["resid_post", 0][:, 0].tolist() == [1, 2], number
        assert steps.step(only=["c", "d"])["resid_post", 0][:, 0].tolist() == [3, 0], number
    assert steps.laid_out == laid_out + 2
    steps.step(finished=["a"], only=["b"])
    assert steps.step(only=["c", "d"])["resid_post", 0][:, 0].tolist() == [3, 0]
    assert steps.laid_out == laid_out + 3


def test_an_empty_step_between_batches_changes_nothing(steps):
    """Stages of a pipeline that have no batch for a while are sent such."""
    steps.step({"a": steer(1), "b": steer(2)})
    laid_out = steps.laid_out
    for number in range(4):
        assert steps.step()["resid_post", 0][:, 0].tolist() == [1, 2], number
        steps.step(only=[])
    assert steps.laid_out == laid_out + 1


def test_a_request_computed_anew_in_one_batch_is_seen_to_its_end_in_turns_with_another(steps):
    """One token a step, so that each step looks like those before. Seen failing where earlier batches are not forgotten then."""
    steps.step({"a": steer(1, phase="decode")})
    steps.step({"b": steer(2)}, only=[])
    for _ in range(2):
        assert steps.step(only=["a"])["resid_post", 0][:, 0].tolist() == [1]
        steps.step(only=["b"])
    rows = []
    for number in range(len(PROMPT) + 1):
        seen = steps.step(only=["a"], resumed=["a"] if number == 0 else [])
        rows.append(0.0 if seen is None else float(seen["resid_post", 0][0, 0]))
        steps.step(only=["b"])
    assert rows == [0.0] * len(PROMPT) + [1.0]


def test_rows_in_another_order_are_laid_out_anew(steps):
    steps.step({"a": steer(1), "b": steer(2)})
    for _ in range(3):
        steps.step()
    laid_out = steps.laid_out
    seen = steps.step(order=["b", "a"])
    assert seen["resid_post", 0][:, 0].tolist() == [2, 1] and steps.laid_out == laid_out + 1
    assert steps.step()["resid_post", 0][:, 0].tolist() == [1, 2]


def test_a_request_that_begins_anew_between_two_like_steps_gets_its_prompts_profiles(steps):
    """Seen failing where only the names of the step's requests were compared."""
    steps.step({"a": steer(1, phase="decode"), "b": steer(2)})
    for _ in range(3):
        assert steps.step()["resid_post", 0][:, 0].tolist() == [1, 2]
    seen = steps.step(resumed=["a"])
    assert seen["resid_post", 0][:, 0].tolist() == [0, 2]


@pytest.mark.parametrize("compiles", [True, False])
def test_hooks_are_off_between_steps_and_on_again_in_steps_that_repeat(compiles):
    """A dummy batch of vLLM's, which no plan is about, may come between. Seen failing without the reset in `end_step`."""
    steps = Steps(compiles)
    steps.step({"a": [steer(3, "mlp_out"), steer(1)]})
    for number in range(4):
        dummy = steps.model.get_submodule("mlp_out_0")(torch.zeros(2, WIDTH))
        assert not dummy.any(), number
        seen = steps.step()
        assert seen["mlp_out", 0][:, 0].tolist() == [3] and seen["resid_post", 0][:, 0].tolist() == [1]


def test_images_at_rest_are_taken_again_and_are_bounded(steps, monkeypatch):
    """Beyond the bound the one that has rested longest goes."""
    monkeypatch.setattr(planned, "_IDLE", 3)
    made = []
    make = steps.host._loaded._make
    monkeypatch.setattr(
        steps.host._loaded, "_make", lambda payload, *rest: (made.append(payload.plan), make(payload, *rest))[1]
    )

    def run(*values):
        names = {f"r{value}": steer(value) for value in values}
        steps.step(names)
        steps.step(finished=list(names))
        taken = [int(plan.edits[0].vector.data[0]) for plan in made]
        made.clear()
        return taken

    assert run(1, 2, 3) == [1, 2, 3]
    assert run(2) == [] and run(1) == []
    assert run(4) == [4]  # 3 goes, which was used before 2 and 1
    assert run(2, 1, 4) == []
    assert run(3) == [3]
    assert len(steps.tables.profiles) == 3 and len(steps.host._loaded._idle) == 3


def test_a_plan_without_positions_is_loaded_once_for_prompts_of_all_lengths(steps):
    plan = Plan.of([Steer("resid_post", layers=0, vector=[1.0] * WIDTH, phase="prefill")])
    short, long = (steps.host._loaded.take(PlanRequest(packed(plan), LAYERS), length, None) for length in (2, 5))
    assert short is long and len(steps.tables.profiles) == 1
    acting = set(steps.tables.profiles)
    for length in (2, 5):
        profiles = [np.broadcast_to(long.profiles(at, at + 1, length), 1)[0] in acting for at in range(7)]
        assert profiles == [at < length for at in range(7)]
        assert [long.acting_in(at, at + 1, length) for at in range(7)] == [
            [long.acting[0]] * (at < length) for at in range(7)
        ]
    placed = Plan.of([Patch("resid_post", layer=0, position=-1, source=[1.0] * WIDTH)])
    short, long = (steps.host._loaded.take(PlanRequest(packed(placed), LAYERS), length, None) for length in (2, 5))
    assert short is not long and list(np.flatnonzero(long.profiles(0, 5, 5))) == [4]


def test_images_at_rest_are_bounded_by_the_profiles_that_they_have(steps, monkeypatch):
    """A plan may patch each position of its prompt otherwise: few numbers, and many entries in the tables."""
    steps.step({"a": [Patch("resid_post", layer=0, position=p, source=[float(p)] * WIDTH) for p in range(3)]})
    (loaded,) = steps.host._loaded._loaded.values()
    assert loaded.profile_count == 3 and loaded.size >= 3 * len(steps.tables.points) * tables.ENTRY_WORDS * 8
    monkeypatch.setattr(planned, "_IDLE_BYTES", loaded.size - 1)
    steps.step(finished=["a"])
    assert not steps.host._loaded._idle and not steps.tables.profiles


def test_images_at_rest_are_bounded_by_their_plans(steps):
    """A plan may list many positions, and change few rows: 128 such plans took gigabytes."""
    plan = Plan.of([Patch("resid_post", layer=0, position=p, source="zeros", alpha=0.5) for p in range(100)])
    data = packed(plan)
    loaded = steps.host._loaded.take(PlanRequest(data, LAYERS), 100, None)
    on_device = sum(each.nbytes for each in loaded.slots.kept) + loaded.profile_count * loaded.slots.profile_bytes
    assert loaded.size - on_device >= len(data) + 100 * 500


def test_a_refused_request_holds_no_lease(steps):
    """Of two runs one is gone: the other one is not held for ever."""
    here, gone = (RecordedRun(name, name, tuple(PROMPT), ("resid_post",), (0,), (0,)) for name in ("here", "gone"))
    steps.host.runs.add(make_run("here", "here", {("resid_post", 0): torch.ones(1, WIDTH)}, [0]))
    plan = [
        Patch("resid_post", layer=0, position=p, source=run, source_position=0) for p, run in enumerate((here, gone))
    ]
    steps.step({"a": plan})
    assert "'gone' are not there any more" in steps.host.take_errors()["a"]
    assert steps.host.gauges()["leases"] == 0 and steps.host.is_idle
    steps.step({"b": plan[:1]}, finished=["a"])
    assert steps.host.gauges()["leases"] == 1 and not steps.host.errors
    steps.step(finished=["b"])
    assert steps.host.gauges()["leases"] == 0


def test_a_session_keeps_its_plan_over_longer_prompts(steps):
    """Streaming input: the scheduler sends the request anew, with a longer prompt. Another plan would have keys of its own there."""
    steps.step({"a": steer(1, phase="prefill")})
    longer = {"a": (_sampling(steer(1, phase="prefill")), [*PROMPT, 4, 5])}
    steps.host.schedule(longer, {"a": 2}, {}, {"a": 3})
    assert steps.host.step_is_planned and not steps.host.errors  # positions 3 and 4 are the prompt's now
    steps.host.end_step()
    for other in (steer(2, phase="prefill"), None):
        steps.host.schedule({"a": (_sampling(other), [*PROMPT, 4, 5, 6])}, {"a": 1}, {}, {"a": 5})
        assert "the same one" in steps.host.take_errors()["a"]


def test_generated_rows_are_not_captured_where_tokens_are_drafted():
    steps = Steps(speculative=True)
    steps.step(
        {"a": Capture("resid_post", positions="all_generated"), "b": Capture("resid_post", positions="all_prompt")}
    )
    assert list(steps.host.errors) == ["a"] and "speculative decoding" in steps.host.errors["a"]


@pytest.mark.parametrize("positions", ["all", "all_generated"])
def test_captured_rows_come_once_over_preemptions(steps, positions):
    """E4, E5: rows captured before a preemption are not captured again afterwards, and the later rows are.

    Seen failing when the prompt's rows were not captured and a batch still counted from the last captured row.
    """
    steps.step({"a": [Capture("resid_post", layers=0, positions=positions)]})
    for _ in range(2):
        steps.step()
    steps.computed["a"] = 0
    steps.step(resumed=["a"], counts={"a": 5})
    steps.step()
    steps.step(finished=["a"])
    found = [p for _, value in steps.sent for positions, *_ in value["rows"] for p in positions.tolist()]
    assert sorted(found) == list(range(0 if positions == "all" else len(PROMPT), 6))


def captured(steps, name):
    """`{position: the first element of its row}` of all that was sent for a request."""
    found = {}
    for header, value in steps.sent:
        for rows in itertools.starmap(Rows, value["rows"] if header.request == name else ()):
            for position, row in zip(rows.positions.tolist(), rows.values, strict=True):
                assert position not in found
                found[position] = row[0].item()
    return found


def keep(value, positions="all_generated"):
    return [steer(value), Capture("resid_post", layers=0, positions=positions, when="after")]


@pytest.mark.parametrize("order", [["a", "b", "c", "d"], ["d", "b", "c", "a"]])
def test_a_batch_that_repeats_captures_the_rows_of_each_request(steps, order, monkeypatch):
    """A row is a hundredth of its position, and a steer. Seen failing with the rows of another request of the batch."""
    monkeypatch.setattr(planned, "_PAGE_ROWS", (2, 2))
    steps.scale = 0.01
    steps.step({"a": keep(1)})
    for _ in range(2):
        steps.step()
    steps.step({"b": keep(1), "c": None, "d": keep(2, "all")})
    for _ in range(4):
        steps.step(order=order)
    steps.step(finished=["b"], order=[name for name in order if name != "b"])
    steps.step(order=[name for name in order if name != "b"])
    steps.step(finished=["a", "d"], order=["c"])
    assert captured(steps, "a") == pytest.approx({position: 1 + position / 100 for position in range(3, 12)})
    assert captured(steps, "b") == pytest.approx({position: 1 + position / 100 for position in range(3, 7)})
    assert captured(steps, "d") == pytest.approx({position: 2 + position / 100 for position in range(9)})


@pytest.mark.parametrize("positions", ["all", "all_generated"])
@pytest.mark.parametrize("begin", [True, False])
def test_a_batch_that_never_repeats_captures_the_rows_of_each_request(steps, begin, positions):
    """A request ends in each step, and another may begin. Seen failing with the rows of the batch's first request."""
    steps.scale = 0.01
    names = "abcdef"
    steps.step({name: keep(number % 2, positions) for number, name in enumerate(names)})
    for name in names:
        steps.step()
        steps.step({name.upper(): keep(7, positions)} if begin else None, finished=[name])
        steps.step()
    steps.step(finished=list(steps.computed))
    first = 0 if positions == "all" else len(PROMPT)
    for number, name in enumerate(names):
        expected = {at: number % 2 + at / 100 for at in range(first, len(PROMPT) + 3 * number + 1)}
        assert captured(steps, name) == pytest.approx(expected)
        if begin:
            last = len(PROMPT) + 3 * (len(names) - number) - 2
            assert captured(steps, name.upper()) == pytest.approx({at: 7 + at / 100 for at in range(first, last)})


@pytest.mark.parametrize("is_found", [True, False])
def test_rows_that_are_computed_again_one_by_one_are_captured_once(steps, is_found):
    """Beside a request that goes on. Seen failing where it was captured a second time.

    `is_found`: whether the batch comes back as it was before the preemption.
    """
    steps.scale = 0.01
    steps.step({"a": keep(1), "b": keep(1)})
    for _ in range(3):
        steps.step()
    steps.computed["a"] = 4  # after a preemption
    if not is_found:
        steps.host._batches.clear()
    for _ in range(5):
        steps.step()
    steps.step(finished=["a", "b"])
    assert captured(steps, "a") == pytest.approx({position: 1 + position / 100 for position in range(3, 9)})
    assert captured(steps, "b") == pytest.approx({position: 1 + position / 100 for position in range(3, 11)})


@pytest.mark.parametrize("start", [0, 2, 3, 4], ids=lambda start: f"from {start}")
@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_step_that_computes_several_generated_rows_captures_the_new_ones(steps, start, more):
    """After a preemption. Seen failing where the rows behind them had the positions of those before."""
    steps.scale = 0.01
    steps.step({"a": keep(1, "all"), "b": keep(2)})
    for _ in range(3):
        steps.step()
    steps.computed["a"] = start
    steps.step(counts={"a": 6 - start + more})
    for _ in range(3):
        steps.step()
    steps.step(finished=["a", "b"])
    assert captured(steps, "a") == pytest.approx({position: 1 + position / 100 for position in range(9 + more)})
    assert captured(steps, "b") == pytest.approx({position: 2 + position / 100 for position in range(3, 10)})


def test_a_batch_that_is_laid_out_anew_captures_each_requests_rows(steps):
    """Seen failing with the places of the old layout."""
    steps.step(
        {"a": keep(1), "b": [steer(2), Capture("resid_post", layers=0, positions="all_generated", when="after")]}
    )
    for order in (["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]):
        steps.step(order=order)
    steps.step(finished=["a", "b"])
    assert set(captured(steps, "a").values()) == {1} and set(captured(steps, "b").values()) == {2}
    assert len(captured(steps, "a")) == len(captured(steps, "b")) == 5


@pytest.mark.parametrize("error", [None, "it was refused"])
def test_captured_rows_hold_memory_until_their_requests_end(steps, error):
    """Seen failing where a batch, which may come back, goes on to hold the rows of requests that are over."""
    steps.step({"a": keep(1), "b": keep(2)})
    for _ in range(4):
        steps.step()
    pages = [weakref.ref(steps.host._requests[name].page.block) for name in "ab"]
    steps.host.schedule({}, {}, {"a": RequestEnd(8, error)}, {})
    steps.sent.clear()
    assert [page() is None for page in pages] == [True, False]
    steps.host.schedule({}, {}, {"b": RequestEnd(8, error)}, {})
    steps.sent.clear()
    assert pages[1]() is None and not steps.host.gauges()["capture_bytes"]


def test_requests_of_one_batch_may_be_in_others_between(steps):
    """Seen failing where a batch that comes back goes on with the rows of its last step."""
    steps.scale = 0.01
    steps.step({"a": keep(1), "b": keep(2)})
    for only in (["a", "b"], ["a", "b"], ["b"], ["b"], ["a", "b"], ["a", "b"]):
        steps.step(only=only)
    steps.step(finished=["a", "b"])
    assert captured(steps, "a") == pytest.approx({position: 1 + position / 100 for position in range(3, 7)})
    assert captured(steps, "b") == pytest.approx({position: 2 + position / 100 for position in range(3, 9)})


def test_rows_that_are_due_are_sent_while_a_batch_repeats(steps, monkeypatch):
    """Seen failing where a batch goes on with rows of which some were sent."""
    monkeypatch.setattr(host, "DUE_BYTES", 3 * 4 * WIDTH)
    steps.step({"a": keep(1)})
    steps.step()
    steps.step({"b": keep(1)})
    for _ in range(7):
        steps.step()
    assert list(captured(steps, "a")) == list(range(3, 12)) and list(captured(steps, "b")) == list(range(3, 9))
    steps.step(finished=["a", "b"])
    assert list(captured(steps, "a")) == list(range(3, 12)) and list(captured(steps, "b")) == list(range(3, 10))


@pytest.mark.parametrize("positions", ["last_prompt", "all_generated"])
def test_v2_has_a_preempted_request_begin_anew(steps, positions):
    """Its runner is sent resumed requests as new ones. Seen failing: they were taken for a longer prompt of a session, and refused."""
    plan = {"a": [steer(1), Capture("resid_post", layers=0, positions=positions)]}
    steps.step(plan)
    steps.step()
    del steps.computed["a"]
    assert steps.step(plan, counts={"a": 4})["resid_post", 0][:, 0].tolist() == [1] * 4
    assert steps.step()["resid_post", 0][:, 0].tolist() == [1] and not steps.host.errors
    steps.step(finished=["a"])
    rows = [p for _, value in steps.sent for positions, *_ in value["rows"] for p in positions.tolist()]
    assert sorted(rows) == ([2] if positions == "last_prompt" else [3, 4])


def test_a_token_that_is_computed_again_is_scored_once(steps):
    """After a preemption. Seen failing without `RequestScores.scored`."""
    steps.scale, found = 1.0, {"p": [], "q": []}

    def step(*given, **options):
        steps.step(*given, **options)
        find = steps.host.take_scores()
        chunks, stops, errors = find() if find is not None else ({}, {}, {})
        assert not (stops or errors)
        for name, positions, scores in chunks.get("a", []):
            found[name] += zip(np.frombuffer(positions, np.int64), np.frombuffer(scores, np.float32), strict=True)

    weight = [0.5] * WIDTH
    plan = {
        "a": [
            Probe("resid_post", layer=0, weight=weight, name="p", positions="all"),
            Probe("resid_post", layer=0, weight=weight, name="q", positions=[1, 2]),
        ],
        "b": None,
    }
    step(plan)
    step()
    step()
    del steps.computed["a"]
    step({"a": plan["a"]}, counts={"a": 2}, only=[])
    step(counts={"a": 3}, only=["a"])
    step(only=["a", "b"])
    assert found["p"] == [(position, 0.5 * WIDTH * position) for position in range(6)]
    assert found["q"] == [(1, 0.5 * WIDTH), (2, WIDTH)]


@dataclass(frozen=True)
class _FailsLater(Selector):
    kind = "fails_later"

    def of_generated(self, numbers):
        return numbers >= 0 if numbers.max() == 0 else numbers


def test_a_selector_that_fails_ends_its_request_alone(steps):
    """Seen failing: the error left the thread that reads the step's output, and with it the engine."""
    probe = Probe("resid_post", layer=0, weight=[0.5] * WIDTH, name="p", positions=_FailsLater())
    steps.step({"a": probe, "b": replace(probe, positions="all_generated")})
    found = []
    for _ in range(2):
        steps.step()
        found.append(steps.host.take_scores()())
    assert [set(chunks) for chunks, _, _ in found] == [{"a", "b"}, {"b"}]
    assert found[0][2] == {} and "of_generated returned" in found[1][2]["a"]


def test_what_is_known_to_be_the_users_is_said_with_the_rows(steps, monkeypatch):
    """Consumers get it while the request goes on. A stop string may take back any of it, so there nothing is confirmed before the end."""
    monkeypatch.setattr(host, "DUE_BYTES", 1)
    steps.step({"a": Capture("resid_post", layers=0, positions="all")})
    for _ in range(4):
        steps.step()
    assert [header.confirmed for header, _ in steps.sent] == [computed - 3 for computed in (3, 4, 5, 6, 7)]
    steps.sent.clear()
    sampling = _sampling(Capture("resid_post", layers=0, positions="all"))
    sampling.stop = ["."]
    steps.host.schedule({"b": (sampling, PROMPT)}, {"b": 3}, {"a": RequestEnd(8)}, {"b": 0})
    steps.host.begin_step(BatchLayout(["b"], np.array([3]), np.array([0]), 3))
    steps.forward(range(3))
    steps.host.end_step()
    assert [header.confirmed for header, _ in steps.sent if header.request == "b"] == [0]


def test_consumers_get_rows_while_the_request_goes_on():
    """A request may go on for long: rows that wait for its end would wait in memory."""
    taken = []
    sinks = LocalSinks("e", 1, [0])
    plan = Plan.of(Capture("resid_post", layers=0, positions="all_generated", to=lambda *row: taken.extend(row[3])))
    sinks.begin("r", plan, PROMPT)
    layout = Planes([Plane("resid_post", 0, "before", 0, WIDTH)])
    for first in range(3, 15, 4):
        sinks.rows("r", [Rows(np.arange(first, first + 4), layout, torch.zeros(4, WIDTH))], first + 2)
    deadline = time.monotonic() + 10
    while taken != list(range(3, 13)):
        assert time.monotonic() < deadline, taken
        time.sleep(0.01)
    sinks.end("r", 14)
    sinks.close()
    assert taken == list(range(3, 14))


def test_a_session_captures_all_positions_or_none():
    """What other selectors mean is settled by a prompt's length, which changes."""
    for positions, refused in (("all", False), ("all_prompt", True), ("all_generated", True), ([0, -1], True)):
        steps = Steps()
        plan = Capture("resid_post", layers=0, positions=positions)
        steps.step({"a": plan})
        steps.host.schedule({"a": (_sampling(plan), [*PROMPT, 4])}, {"a": 1}, {}, {"a": 3})
        assert ("positions='all'" in steps.host.take_errors().get("a", "")) == refused, positions


def test_device_tables_upload_what_changed():
    """Every profile that a row may have is on the device as it is here, in whatever order plans came, went and made the table grow."""
    from midstream.plan.compile import compile_plan

    tables = DeviceTables(POINTS, 64, torch.device("cpu"))
    random, held = np.random.default_rng(0), []
    for number in range(300):
        if held and random.random() < 0.4:
            tables.unload(held.pop(random.integers(len(held))))
        else:
            plan = Plan.of([steer(number, layer=0, phase="prefill"), steer(number + 1, layer=1)])
            held.append(
                tables.load(
                    compile_plan(
                        plan, 3, LAYERS, width=lambda site, layer: WIDTH, vector=None, run=None, dtype="float32"
                    )
                )
            )
        if random.random() < 0.5:
            tables.begin_step(RowProfiles(np.zeros(4, np.int32)), None)
            live = sorted(tables.profiles)
            assert (tables._table.numpy()[live] == tables._host[live]).all()
            assert int(tables._address[0]) == tables._table.data_ptr()
    assert tables.growths > 0


def test_a_request_that_a_consumer_cannot_begin_is_said_to_fail_once(caplog):
    """D4: its later rows are dropped without a word, its neighbour's are taken. Seen failing with an error for each batch of rows."""
    taken = []

    def take(request_id, site, layer, positions, tensor):
        taken.append((request_id, positions))

    sinks = LocalSinks("engine", LAYERS, range(LAYERS))
    captures = CaptureSender(Reports(), lambda: sinks)
    plans = {"bad": Consumer("nobody-has-this"), "good": take}
    plans = {
        name: Plan.of(Capture("resid_post", layers=0, positions="all_prompt", to=to)) for name, to in plans.items()
    }
    layout = Planes([Plane("resid_post", 0, "before", 0, WIDTH)])
    carried = PlanRequest(b"")
    for name, plan in plans.items():
        captures.begin(name, carried, plan, PROMPT)
    for position in range(len(PROMPT)):
        for name in plans:
            captures.send(name, carried, [Rows(np.array([position]), layout, torch.zeros(1, WIDTH))], False)
    for name in plans:
        captures.end(name, carried, 4, None)
    captures.close()
    assert captures.gauges() == {"capture_failures": 1, "consumer_bytes": 0, "consumer_blocked_ms": 0}
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "nobody-has-this" in caplog.text
    assert taken == [("good", [0]), ("good", [1]), ("good", [2])]


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("mailbox", [("key", 0), None], ids=["client", "consumers here"])
def test_one_tensor_parallel_rank_of_a_stage_sends_the_rows(sends, mailbox):
    """The other ranks have the same rows and send none, to nobody."""
    taken, sent = [], []
    sinks = LocalSinks("engine", LAYERS, range(LAYERS))
    reports = Reports(sends=sends)
    reports.sender = SimpleNamespace(send_together=sent.extend)
    captures = CaptureSender(reports, lambda: sinks)
    plan = Plan.of(Capture("resid_post", layers=0, positions="all_prompt", to=lambda *row: taken.append(row[3])))
    layout = Planes([Plane("resid_post", 0, "before", 0, WIDTH)])
    carried = PlanRequest(b"", capture=mailbox)
    pieces = [Rows(np.arange(len(PROMPT)), layout, torch.zeros(len(PROMPT), WIDTH))]
    for name in ("ends", "fails"):
        captures.begin(name, carried, plan, PROMPT)
    captures.end("ends", carried, 4, pieces)
    captures.fail("fails", carried, "no more")
    captures.flush()
    captures.close()
    sinks.close()
    assert taken == ([[0, 1, 2]] if sends and mailbox is None else [])
    told = [(header.request, header.final, value["error"]) for header, value in sent]
    assert told == ([("ends", True, None), ("fails", True, "no more")] if sends and mailbox is not None else [])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_trace_behind_the_step_takes_its_rows_before_they_are_computed(steps, position):
    """Two requests with a row that another profile edits, and then steps that repeat. Seen failing with copies of the rows."""
    steps.scale = 1.0
    plan = Plan.of([Patch("resid_post", layer=0, position=position, source=[100.0] * WIDTH)])
    plan += Capture("resid_post", layers=0, positions="all", when="after")
    request = PlanRequest(packed(plan), LAYERS, behind=True)
    expected = [100.0 if at == position else float(at) for at in range(3)]
    steps.step({"a": request, "b": request})
    for name in ("a", "b"):
        rows = dict(taken(steps, name))
        assert [rows[at] for at in range(3)] == expected
    for at in (3, 4, 5):
        steps.step()
        assert [taken(steps, name) for name in "ab"] == [[(at, at)]] * 2


def test_rows_of_a_trace_behind_the_step_that_is_over_are_dropped(steps, monkeypatch):
    """Seen failing when they were held until the request ended."""
    monkeypatch.setattr(host, "DUE_BYTES", due := 5 * WIDTH * 4)
    plan = Plan.of(Capture("resid_post", layers=0, positions="all"))
    request = PlanRequest(packed(plan), LAYERS, behind=True)
    steps.step({"a": request, "b": request})
    steps.host.take_rows = lambda name: []  # no step is traced any more
    for _ in range(22):
        steps.step()
        assert steps.host.gauges()["capture_bytes"] < 2 * due
    steps.step(finished=["a", "b"])
    assert not steps.sent


def taken(steps, name):
    """Each row's position, and its first element."""
    return [
        pair
        for rows in steps.taken[name]
        for pair in zip(rows.positions.tolist(), rows.values[:, 0].tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("leaving", "is_whole"), [([(0, 4), (4, 4)], True), ([(0, 2), (4, 2)], False), ([(0, 11)], False)]
)
def test_a_block_is_sent_whole_only_if_most_of_it_leaves(steps, leaving, is_whole):
    """Whole, it is sent once for several requests. Seen failing where other rows are sent, too."""
    block, layout = torch.arange(12.0)[:, None], Planes((Plane("resid_post", 0, "before", 0, 1),))
    for number, (first, count) in enumerate(leaving):
        request = PlanRequest(b"", capture=("c", number))
        steps.host.captures.send(f"{number}", request, [Rows(np.arange(10, 10 + count), layout, block, first)], True)
    steps.host.captures.flush()
    sent = [Rows(*value["rows"][0]) for _, value in steps.sent]
    assert [rows.values[:, 0].tolist() for rows in sent] == [
        list(range(first, first + count)) for first, count in leaving
    ]
    assert [rows.block is block for rows in sent] == [is_whole] * len(leaving)
    assert is_whole or [len(rows.block) for rows in sent] == [count for _, count in leaving]


SELECTED = [
    "last_prompt",
    "all_prompt",
    "all_generated",
    "all",
    ("last_prompt", "all_generated"),
    ("last_prompt", "all_prompt"),
    LastTwo(),
    Every(3),
    (Every(3), "last_prompt"),
    (LastTwo(), "all_generated"),
]


@pytest.mark.parametrize("positions", SELECTED, ids=str)
@pytest.mark.parametrize("phase", ["prefill", "decode", "both", "some generated tokens"])
def test_prompts_of_any_length_share_a_plan_that_lists_no_positions(steps, positions, phase):
    """Each position is treated as by the plan compiled for that length alone."""
    named = {"phase": "decode", "positions": [0, 2]} if phase == "some generated tokens" else {"phase": phase}
    several = positions if isinstance(positions, tuple) else (positions,)
    plan = Plan.of(
        [Steer("resid_post", layers=0, vector=[1.0] * WIDTH, **named)]
        + [Capture("resid_post", layers=layer, positions=each) for layer, each in enumerate(several)]
    )
    payload = PlanRequest(packed(plan), LAYERS)
    taken = {length: steps.host._loaded.take(payload, length, None) for length in (4, 1, 2, 3)}
    assert len({id(taken[length]) for length in (3, 4)}) == 1
    for length, shared in taken.items():
        profile_of = dict(zip(shared.slots.ids.tolist(), shared.slots.compiled.profiles, strict=True))
        alone = compile_plan(plan, length, LAYERS, width=lambda *_: WIDTH, vector=None, run=None, dtype="float32")
        expected = [alone.profiles[number] for number in [*alone.prompt.tolist(), *[alone.generated] * 2]]
        kept = [i for i, profile in enumerate(expected) if profile.row_width]
        assert (shared.captures_generated is not None) == bool(expected[-1].row_width)
        if not expected[-1].row_width:
            assert max(length + shared.named - shared.uncaptured, 0) == max(kept, default=-1) + 1
        for start in range(length + 2):
            for stop in range(start + 1, length + 3):
                numbers = np.broadcast_to(shared.profiles(start, stop, length), stop - start).tolist()
                assert [profile_of[number] for number in numbers] == expected[start:stop]
                captured = [start + i for i, number in enumerate(numbers) if number in shared.capturing]
                assert captured == [i for i in kept if start <= i < stop]
                in_prompt, in_generated = (
                    any(alone.acts[start:stop]),
                    stop > len(alone.prompt) and alone.acting[1],
                )
                acting = [*shared.acting[:1] * in_prompt, *shared.acting[1:] * bool(in_generated)]
                assert shared.acting_in(start, stop, length) == acting


def test_prompts_share_a_plan_only_if_its_selectors_choose_alike(steps):
    plan = Plan.of(
        [Capture("resid_post", layers=0, positions=Around((0,))), Capture("mlp_out", layers=0, positions="all")]
    )
    for length in range(1, 12):
        loaded = steps.host._loaded.take(PlanRequest(packed(plan), LAYERS), length, None)
        profile_of = dict(zip(loaded.slots.ids.tolist(), loaded.slots.compiled.profiles, strict=True))
        numbers = np.broadcast_to(loaded.profiles(0, length, length), length).tolist()
        widths = [profile_of[number].row_width // WIDTH for number in numbers]
        assert widths == [1 + (position % 3 == 0 or position >= length - 2) for position in range(length)]


def test_only_the_generated_rows_that_a_selector_chooses_are_sent(steps):
    """Also where a batch repeats, after a preemption, and beside a request that captures all of them."""
    steps.scale = 1.0
    several = [Capture("resid_post", layers=0, positions=each) for each in (Every(3), Around((), (1,)))]
    steps.step({"a": several, "b": Capture("resid_post", layers=0, positions="all_generated")})
    for _ in range(5):
        steps.step()
    steps.computed["a"] = 0
    steps.step(resumed=["a"], counts={"a": 8})
    for _ in range(3):
        steps.step()
    steps.step(finished=["a", "b"])
    n, rows = len(PROMPT), {name: captured(steps, name) for name in "ab"}
    assert sorted(rows["a"]) == [n - 2, n - 1, n, n + 1, n + 3, n + 6] and sorted(rows["b"]) == list(range(n, n + 9))
    assert all(value == position for found in rows.values() for position, value in found.items())


def test_rows_keep_their_positions_where_some_are_skipped(steps):
    """A page's rows have positions one after another. Seen failing where the page before a gap goes on."""
    steps.scale = 1.0
    steps.step({"a": Capture("resid_post", layers=0, positions="all_generated")})
    steps.step()
    steps.computed["a"] += 2
    for _ in range(2):
        steps.step()
    steps.step(finished=["a"])
    n = len(PROMPT)
    assert captured(steps, "a") == {n: n, n + 3: n + 3, n + 4: n + 4}


def test_a_plan_that_lists_positions_has_its_own_last_one(steps):
    """Seen failing where capturing goes on to the prompt's end."""
    plan = Plan.of([Capture("resid_post", layers=0, positions=(0, 2)), Capture("mlp_out", layers=0, positions=1)])
    for length in (3, 5):
        loaded = steps.host._loaded.take(PlanRequest(packed(plan), LAYERS), length, None)
        assert length - loaded.uncaptured == 3


def test_a_recorded_run_has_its_rows_in_the_order_of_their_positions(steps):
    """Where a plan edits a row between others, which so has a profile of its own. Seen failing."""
    steps.scale = 1.0
    plan = Plan.of(
        [
            Steer("resid_post", layers=0, vector=[1.0] * WIDTH, positions=1),
            Capture("resid_post", layers=0, positions="all_prompt"),
        ]
    )
    steps.step({"a": PlanRequest(packed(plan), LAYERS, record=("id", "run", ""))})
    steps.step(finished=["a"])
    run = RecordedRun("run", "id", tuple(PROMPT), ("resid_post",), (0,), tuple(range(len(PROMPT))))
    rows = [steps.host.runs.row(run, "resid_post", 0, position)[0].item() for position in range(len(PROMPT))]
    assert rows == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ knockouts (N2)


def knocked(**options):
    return PlanRequest(packed(Plan.of(Knockout(layers=0, **{"keys": 0} | options))), LAYERS, checked=True)


def test_steps_run_uncompiled_from_the_first_token_to_the_last_query(steps):
    """And do not repeat, since each has another query."""
    uncompiled = []
    for plans in (
        {"a": knocked(queries=-1)},
        None,
        {"b": knocked(queries=[0, 2], phase="decode")},
        None,
        None,
        None,
        None,
    ):
        before = steps.host.off_graph_steps
        steps.step(plans)
        uncompiled.append(steps.host.off_graph_steps - before)
    assert uncompiled == [1, 0, 1, 1, 1, 1, 0]
    assert steps.host.gauges()["knockouts"] == 2
    steps.step(finished=["a", "b"])
    assert steps.host.gauges()["knockouts"] == 0


def test_generated_queries_are_refused_where_tokens_are_drafted():
    steps = Steps(speculative=True)
    steps.step(
        {
            "a": knocked(),
            "b": knocked(queries=-1),
            "c": knocked(phase="prefill"),
            "d": knocked(keys="all_generated"),
            "e": knocked(keys="all", queries=-1),
        }
    )
    assert list(steps.host.errors) == ["a", "d"]
    assert all("A Knockout of generated queries" in error for error in steps.host.errors.values())
    assert steps.host.gauges()["knockouts"] == 3 and steps.host.gauges()["plans"] == 3


def test_a_selector_of_keys_that_fails_ends_its_request_alone(steps):
    """Before the forward, which would end with the error."""
    steps.step({"a": knocked(keys=_FailsLater()), "b": knocked(keys="all_generated")})
    steps.step()
    assert not steps.host.errors, "it has answers so far"
    steps.step()
    assert list(steps.host.errors) == ["a"] and "of_generated returned" in steps.host.errors["a"]
    assert steps.host.gauges()["knockouts"] == 1
    steps.step()
    steps.step(finished=["a", "b"])
    assert steps.host.gauges()["knockouts"] == steps.host.gauges()["plans"] == 0


def test_a_session_takes_no_knockouts(steps):
    plan = knocked(phase="prefill")
    steps.step({"a": plan})
    steps.host.schedule({"a": (_sampling(plan), PROMPT * 2)}, {"a": 3}, {}, {"a": 3})
    assert "A Knockout does not work in a session of streaming input" in steps.host.errors["a"]
