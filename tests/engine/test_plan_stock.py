"""Plans on stock engines: `vllm.LLM` and `AsyncLLM` started with midstream's engine arguments, and an engine without them (D1, D5, D6, D8).

No wrapper: requests carry plans in `SamplingParams(extra_args={"midstream": plan})`, captured rows go to consumers in the worker. What is
expected comes from plain transformers with torch hooks, and to the bit from the same batch without the plan. Rows D3, D4, E11.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plan_cases
import pytest
import torch
from here import settle, start_stock, submit, values
from limits import until
from oracle import Plain, close
from plan_cases import tokens

from midstream import (
    Capture,
    Clamp,
    Consumer,
    Patch,
    Plan,
    Probe,
    RecordedRun,
    Span,
    Steer,
    demo_model,
    open_captures,
)
from midstream.capture.directory import Store, StoredCapture
from midstream.engine import admission
from midstream.errors import CaptureError, PlanError
from midstream.settings import Settings

pytestmark = pytest.mark.engine

FRANCE = "The capital of France is"  # 5 tokens
ITALY = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"  # 8 tokens
LAYERS, HIDDEN = 8, 256


vector = functools.partial(plan_cases.vector, norm=150.0)


@pytest.fixture(scope="module")
def stock() -> Iterator[Any]:
    with start_stock(enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A compiled engine with a plan for every request, and where that writes."""
    directory = tmp_path_factory.mktemp("captures")
    plan = [Capture("resid_post", layers=[2, 6], positions="all", to=directory)]
    with start_stock(plan=plan) as llm:
        yield llm, directory


@pytest.fixture(scope="module")
def bare() -> Iterator[Any]:
    """An engine without midstream in it."""
    with start_stock(plugin=False, enforce_eager=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_on_stock_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stock" in request.fixturenames:
        llm = request.getfixturevalue("stock")
        settle(llm)
        (gauges,) = llm.collective_rpc("midstream_gauges")
        assert not {
            name: n for name, n in gauges.items() if n and not name.endswith(("_steps", "_growths", "_failures"))
        }


def stored(directory: Path, count: int, seconds: float = 60.0) -> Store:
    """The captures, once so many requests are there: consumers work beside the engine."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = open_captures(directory)
        except CaptureError:
            found = None
        if found is not None and len(found) + len(found.failed) >= count:
            return found
        assert time.monotonic() < deadline, f"{len(found) if found is not None else 'no'} requests of {count}"
        time.sleep(0.05)


def of_prompt(found: Store, ids: list[int]) -> StoredCapture:
    (capture,) = [each for each in found.values() if each.prompt_token_ids == ids]
    return capture


# ----------------------------------------------------------------------------------------------------------- carriers


@pytest.mark.parametrize(
    "carried",
    [
        lambda plan: Plan(tuple(plan)),
        lambda plan: plan,
        lambda plan: tuple(plan),
        lambda plan: Plan.of(plan).to_wire(),
        lambda plan: Plan.of(plan).to_json(),
        lambda plan: {"plan": Plan.of(plan).to_json()},
    ],
    ids=["plan", "list", "tuple", "wire", "json", "enveloped"],
)
def test_a_plan_in_extra_args_however_it_is_written(stock: Any, plain: Plain, carried: Callable[[Any], Any]) -> None:
    v = vector(2)
    plan = [
        Steer("resid_post", layers=[2, 5], vector=v),
        Patch("mlp_out", layer=3, position=1, source="zeros"),
    ]
    planned, plainly = submit(stock, [FRANCE, EIFFEL], [carried(plan), None])

    def zero(h: torch.Tensor) -> torch.Tensor:
        h[1] = 0
        return h

    edits = {("resid_post", layer): lambda h: h + v for layer in (2, 5)} | {("mlp_out", 3): zero}
    assert tokens(planned) == plain.generate(FRANCE, 6, edits) != plain.generate(FRANCE, 6)
    assert tokens(plainly) == plain.generate(EIFFEL, 6)


def test_one_sampling_params_for_many_prompts(stock: Any, plain: Plain) -> None:
    """It stays as the user made it."""
    from vllm import SamplingParams

    v = vector(2)
    steer = Steer("resid_post", layers=3, vector=v)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, extra_args={"midstream": steer, "mine": 1})
    for _ in range(2):
        outputs = stock.generate([FRANCE, EIFFEL], params, use_tqdm=False)
        for prompt, output in zip([FRANCE, EIFFEL], outputs, strict=True):
            assert tokens(output) == plain.generate(prompt, 4, {("resid_post", 3): lambda h: h + v})
        assert tokens(outputs[0]) != plain.generate(FRANCE, 4)
    assert params.extra_args == {"midstream": steer, "mine": 1}


# ---------------------------------------------------------------------------------------------- consumers (rows D5, D4)


def test_rows_go_to_a_directory(stock: Any, plain: Plain, tmp_path: Path) -> None:
    """With nothing to follow: seen failing in this process, where the engine made no step in which its worker heard of the end."""
    plans = [
        [Capture("resid_post", layers=[1, 6], positions="all", to=tmp_path), Steer("resid_post", layers=3, vector=vector())],
        None,
        Capture("attn_z", layers=4, positions=[0, -1], to=str(tmp_path)),
    ]  # fmt: skip
    outputs = submit(stock, [FRANCE, FRANCE, EIFFEL], plans)
    found = stored(tmp_path, 2)
    assert sorted(found) == sorted(outputs[i].request_id for i in (0, 2)) and not found.failed
    edits = {("resid_post", 3): lambda h: h + vector()}
    ids = plain.generate(FRANCE, 6, edits)
    assert tokens(outputs[0]) == ids and tokens(outputs[1]) == plain.generate(FRANCE, 6)
    sites = plain.run(plain.ids(FRANCE) + ids[:-1], edits).sites
    mine = of_prompt(found, plain.ids(FRANCE))
    for layer in (1, 6):
        assert mine.positions["resid_post", layer] == list(range(10))  # the last token is never fed back
        close(mine["resid_post", layer], sites["resid_post", layer])
    other = of_prompt(found, plain.ids(EIFFEL))
    assert list(other) == [("attn_z", 4)]
    close(other["attn_z", 4], plain.run(EIFFEL).sites["attn_z", 4].flatten(1)[[0, 7]])


class Entry:
    """An entry point of a package that is not installed."""

    def __init__(self, name: str, factory: Any) -> None:
        self.name, self.value, self._factory = name, f"nowhere:{name}", factory

    def load(self) -> Any:
        return self._factory


class Collecting:
    """A consumer that keeps all it gets."""

    made: list[Collecting] = []

    def __init__(self, fail_at: int | None = None) -> None:
        self.rows_of: dict[str, list[tuple[int, ...]]] = {}
        self.ended: dict[str, Exception | None] = {}
        self.fail_at = fail_at
        self.thread = ""
        Collecting.made.append(self)

    def begin(self, info: Any) -> None:
        self.rows_of[info.request_id] = []
        self.length = {**getattr(self, "length", {}), info.request_id: len(info.prompt_token_ids)}
        self.thread = threading.current_thread().name

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        if self.fail_at == self.length[request_id]:
            raise RuntimeError("disk full")
        assert tensor.shape == (len(positions), HIDDEN)
        self.rows_of[request_id] += [(layer, position) for position in positions]

    def end(self, request_id: str, error: Exception | None) -> None:
        self.ended[request_id] = error

    def close(self) -> None:
        pass


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Collecting]]:
    """Installed packages with consumers named `collecting` and `failing`."""
    real = metadata.entry_points

    def entry_points(**chosen: Any) -> Any:
        own = [Entry("collecting", Collecting), Entry("failing", Collecting)]
        return [*real(**chosen), *own] if chosen.get("group") == "midstream.consumers" else real(**chosen)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    Collecting.made.clear()
    yield Collecting.made


def test_a_consumer_found_by_its_entry_point_works_beside_the_engine(stock: Any, consumers: list[Collecting]) -> None:
    plan = Capture("resid_post", layers=[0, 7], positions="all", to=Consumer("collecting"))
    submit(stock, [FRANCE, EIFFEL], [plan, plan], max_tokens=3)
    settle(stock)
    until(lambda: bool(consumers) and len(consumers[0].ended) == 2)
    (mine,) = consumers
    assert set(mine.ended.values()) == {None}
    assert mine.thread != threading.main_thread().name
    for name, length in mine.length.items():
        assert sorted(mine.rows_of[name]) == [(layer, p) for layer in (0, 7) for p in range(length + 2)]


def test_the_log_consumer(stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan = Capture("resid_post", layers=[0, 7], positions="all_prompt", to=Consumer("log", level="warning"))
    with caplog.at_level(logging.WARNING, "midstream.capture"):
        submit(stock, [EIFFEL], [plan], max_tokens=2)
        settle(stock)
        until(lambda: "captured" in caplog.text)
    assert "captured 16 rows of resid_post" in caplog.text


def test_a_consumer_that_raises_is_loud_and_harms_no_other(
    stock: Any, consumers: list[Collecting], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises for one of three requests, which also goes to a directory."""
    prompts = [FRANCE, EIFFEL, ITALY]
    before = submit(stock, prompts, [None] * 3)
    to = (Consumer("failing", fail_at=8), tmp_path)
    with caplog.at_level(logging.ERROR):
        outputs = submit(stock, prompts, [Capture("resid_post", layers=2, positions="all", to=to)] * 3)
        settle(stock)
        until(lambda: bool(consumers) and len(consumers[0].ended) == 3)
        found = stored(tmp_path, 3)
        until(lambda: "disk full" in caplog.text)
    assert [values(output) for output in outputs] == [values(output) for output in before]
    (mine,) = consumers
    failed = [name for name, error in mine.ended.items() if error is not None]
    assert [mine.length[name] for name in failed] == [8] and "disk full" in str(mine.ended[failed[0]])
    (line,) = [record.getMessage() for record in caplog.records if "disk full" in record.getMessage()]
    assert "failing" in line and failed[0] in line  # says whose capture it was, and what failed
    assert len(found) == 3 and not found.failed
    (output,) = submit(stock, [EIFFEL], [None])  # and the engine goes on
    assert output.outputs[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------------ whole engine (row D6)


def test_every_request_of_an_engine_is_captured_without_leaving_the_graphs(
    everywhere: tuple[Any, Path], plain: Plain
) -> None:
    llm, directory = everywhere
    (before,) = llm.collective_rpc("midstream_gauges")
    v = vector()
    outputs = submit(llm, [FRANCE, EIFFEL], [None, Steer("resid_post", layers=2, vector=v)])
    settle(llm)
    (after,) = llm.collective_rpc("midstream_gauges")
    assert after["off_graph_steps"] == before["off_graph_steps"]
    assert after["planned_steps"] - before["planned_steps"] >= 6
    found = stored(directory, 2)
    edits = {FRANCE: None, EIFFEL: {("resid_post", 2): lambda h: h + v}}
    for prompt, output in zip([FRANCE, EIFFEL], outputs, strict=True):
        ids = plain.generate(prompt, 6, edits[prompt])
        assert tokens(output) == ids
        sites = plain.run(plain.ids(prompt) + ids[:-1], edits[prompt]).sites
        mine = of_prompt(found, plain.ids(prompt))
        expected = sites["resid_post", 2] - (v if edits[prompt] else 0)  # the capture is of the value before the steer
        close(mine["resid_post", 2], expected)
        close(mine["resid_post", 6], sites["resid_post", 6])


def test_new_plans_compile_nothing_and_cleared_ones_leave_nothing(
    everywhere: tuple[Any, Path], plain: Plain, tmp_path: Path
) -> None:
    """By vLLM's counters and torch's: whatever plans come, on sites in the graphs and off them."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    llm, _ = everywhere
    before = [values(output) for output in submit(llm, [FRANCE, EIFFEL, ITALY], [None] * 3)]
    assert compilation_counter.num_models_seen > 0  # the engine is compiled at all
    graphs = compilation_counter.clone(), dict(counters["stats"]), dict(counters["frames"])
    for seed in range(4):
        v = vector(seed)
        plans = [
            [Steer("resid_post", layers=list(range(seed + 1)), vector=v, scale=0.25 * seed, norm_match=seed % 2 == 1)],
            [Patch("resid_post", layer=seed, position=seed, source=v), Clamp("resid_post", direction=v)],
            [Steer("attn_out", layers=seed, vector=v), Capture("attn_out", layers=seed, positions="all", to=tmp_path)],
        ]
        outputs = submit(llm, [FRANCE, EIFFEL, ITALY][: 3 - seed % 2], plans[: 3 - seed % 2], max_tokens=3 + seed)
        submit(llm, [FRANCE], [Steer("attn_out", layers=seed, vector=v)])  # uncompiled steps of one row
        expected = {("resid_post", i): lambda h, s=seed, v=v: h + 0.25 * s * v for i in range(seed + 1)}
        if seed % 2 == 0:
            assert tokens(outputs[0]) == plain.generate(FRANCE, 3 + seed, expected)
    assert (compilation_counter, dict(counters["stats"]), dict(counters["frames"])) == graphs
    assert [values(output) for output in submit(llm, [FRANCE, EIFFEL, ITALY], [None] * 3)] == before


def test_a_site_outside_the_graphs_is_counted_and_told_once(
    everywhere: tuple[Any, Path], plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    llm, _ = everywhere
    steers = {
        "resid_post": Steer("resid_post", layers=3, vector=vector()),
        "mlp_in": Steer("mlp_in", layers=3, vector=vector(), phase="decode"),
    }
    with caplog.at_level(logging.WARNING, "midstream"):  # what a process without handlers shows
        for site, steps in (("resid_post", 0), ("mlp_in", 5), ("mlp_in", 5)):
            (before,) = llm.collective_rpc("midstream_gauges")
            (output,) = submit(llm, [FRANCE], [steers[site]])
            (after,) = llm.collective_rpc("midstream_gauges")
            assert after["off_graph_steps"] - before["off_graph_steps"] == steps, site  # its prefill is unplanned

    def decode(h: torch.Tensor) -> torch.Tensor:
        h[5:] += vector()
        return h

    assert tokens(output) == plain.generate(FRANCE, 6, {("mlp_in", 3): decode})
    told = [record.getMessage() for record in caplog.records if "uncompiled" in record.getMessage()]
    assert len(told) == 1 and "mlp_in" in told[0]


# ------------------------------------------------------------------------------------- errors (row D8, issue 3 point 9)

RUN = RecordedRun("gone", "0" * 32, (1, 2, 3), ("resid_post",), (3,), (0, 1, 2))
AT_THE_FRONT = {
    "no plan": ({"steer": 1}, "interventions"),
    "not JSON": ("{", "JSON"),
    "a number": (3, "3"),
    "a span, without a tokenizer": (Patch("resid_post", layer=3, position=Span("France"), source="zeros"), "Span|span"),
    "rows for nobody": (Capture("resid_post"), r"Capture\.to is None.*directory or a Consumer"),
    "a callable": (Capture("resid_post", to=print), "callable.*cannot be sent"),
    "scores for nobody": (Probe("resid_post", layer=3, weight=vector(), name="p"), "stop_above or stop_below"),
}  # fmt: skip
IN_THE_WORKER = {
    "unknown name": (Steer("resid_post", layers=3, vector="nope"), "no vector 'nope'"),
    "unknown run": (Patch("resid_post", layer=3, position=0, source=RUN), "gone"),
    "wrong width of another site": (Steer("mlp_act", layers=3, vector=vector(width=3)), r"width 3; allowed: \d+"),
    "unknown consumer": (Capture("resid_post", layers=3, to=Consumer("nobody-has-it")), "nobody-has-it"),
}


def test_a_probe_ends_a_request_of_a_stock_engine(stock: Any, plain: Plain) -> None:
    probe = Probe("resid_post", layer=3, weight=vector(), name="p", stop_above=-1e9)
    ended, other = submit(stock, [FRANCE, FRANCE], [probe, None])
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", "probe:p")
    assert tokens(ended) == plain.generate(FRANCE, 1) and len(tokens(other)) > 1


@pytest.mark.parametrize("case", AT_THE_FRONT)
def test_what_cannot_be_is_refused_before_the_engine_sees_it(stock: Any, case: str) -> None:
    plan, message = AT_THE_FRONT[case]
    before = [values(output) for output in submit(stock, [ITALY, FRANCE, EIFFEL], [None] * 3)]
    with pytest.raises(PlanError, match=message):
        submit(stock, [ITALY, FRANCE, EIFFEL], [None, plan, None])
    assert not stock.llm_engine.has_unfinished_requests()
    assert [values(output) for output in submit(stock, [ITALY, FRANCE, EIFFEL], [None] * 3)] == before


@pytest.mark.parametrize("case", IN_THE_WORKER)
def test_what_only_the_workers_know_ends_the_request_with_the_message(stock: Any, case: str) -> None:
    """Its neighbours, one of them planned itself, are byte-identical to a batch without it; the next request is clean."""
    plan, message = IN_THE_WORKER[case]
    prompts, steer = [ITALY, FRANCE, EIFFEL], Steer("resid_post", layers=3, vector=vector())
    before = submit(stock, prompts, [steer, None, None])
    outputs = submit(stock, prompts, [steer, plan, None])
    completion = outputs[1].outputs[0]
    assert completion.finish_reason == "error" and completion.text == "" and not completion.token_ids
    assert re.search(message, completion.stop_reason), completion.stop_reason
    assert values(outputs[0]) == values(before[0]) and values(outputs[2]) == values(before[2])
    again = submit(stock, prompts, [steer, None, None])
    assert [values(output) for output in again] == [values(output) for output in before]


@pytest.mark.parametrize("plan", [Steer("resid_post", layers=3, vector=vector()), {"steer": 1}, [], "{}"])
def test_an_engine_without_midstream_refuses_plans_and_serves_others(bare: Any, plain: Plain, plan: Any) -> None:
    with pytest.raises(PlanError, match=r"not started with midstream.*silently ignore"):
        submit(bare, [FRANCE, EIFFEL], [None, plan])
    outputs = submit(bare, [FRANCE, EIFFEL], [None, None])
    assert [tokens(output) for output in outputs] == [plain.generate(prompt, 6) for prompt in (FRANCE, EIFFEL)]


def test_the_way_out_that_the_message_names_is_there() -> None:
    import midstream

    assert "worker_cls" in midstream.engine_arguments()


def test_plain_requests_are_those_of_an_engine_without_midstream(stock: Any, bare: Any) -> None:
    """To the bit, also right after planned ones, and beside them."""
    prompts = [FRANCE, EIFFEL, ITALY]
    expected = [values(output) for output in submit(bare, prompts, [None] * 3)]
    assert [values(output) for output in submit(stock, prompts, [None] * 3)] == expected
    mixed = submit(stock, prompts, [None, Steer("resid_post", vector=vector()), None])
    assert [values(mixed[0]), values(mixed[2])] == [expected[0], expected[2]] and values(mixed[1]) != expected[1]


def test_a_prompt_without_tokens_is_refused(stock: Any) -> None:
    """vLLM takes a prompt as embeddings, too; a plan for its tokens, of which there are none, would do nothing."""
    params = SimpleNamespace(extra_args={"midstream": [Steer("resid_post", vector=vector())]}, max_tokens=1)
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=None, prompt_embeds=torch.zeros(3, 256))
    config = stock.llm_engine.vllm_config
    with pytest.raises(PlanError, match="was given as prompt_embeds"):
        admission.admitted(config, Settings.of(config), request)


# ------------------------------------------------------------------------------------------------------------ AsyncLLM


async def finished(engine: Any, prompt: str, plan: Any, request_id: str, count: int = 6, **params: Any) -> Any:
    """The last output of a request."""
    from vllm import SamplingParams

    extra = {"extra_args": {"midstream": plan}} if plan is not None else {}
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count, **params, **extra}
    last = None
    async for output in engine.generate(prompt, SamplingParams(**given), request_id):
        last = output
    return last


async def abandoned(engine: Any, prompt: str, plan: Any, request_id: str, after: int) -> None:
    """A request that its user leaves after so many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400, extra_args={"midstream": plan})
    stream = engine.generate(prompt, params, request_id)
    async for output in stream:
        if len(output.outputs[0].token_ids) >= after:
            break
    await stream.aclose()


def test_an_async_engine_with_plans_aborts_and_errors(plain: Plain, tmp_path: Path) -> None:
    """In processes of its own, as a server has it: plans of many kinds at once, one refused, one wrong, one abandoned on its way."""
    from engines import ENGINE
    from forked import forked
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from midstream.engine.launch import engine_arguments

    v = vector()
    capture = Capture("resid_post", layers=4, positions="all", to=tmp_path)

    async def scenario() -> list[Any]:
        arguments = AsyncEngineArgs(model=demo_model(), enforce_eager=True, **ENGINE, **engine_arguments())
        with forked():
            engine = AsyncLLM.from_engine_args(arguments)
        try:
            outputs = await asyncio.gather(
                finished(engine, FRANCE, [Steer("resid_post", layers=3, vector=v), capture], "steered"),
                finished(engine, FRANCE, None, "plain"),
                finished(engine, EIFFEL, Steer("resid_post", layers=3, vector="nope"), "unknown"),
                finished(engine, EIFFEL, Steer("resid_post", layers=33, vector=v), "refused"),
                abandoned(engine, ITALY, capture, "abandoned", 10),
                finished(engine, EIFFEL, capture, "captured", 40),
                return_exceptions=True,
            )
            outputs.append(await finished(engine, ITALY, None, "after"))
            for _ in range(100):
                (gauges,) = await engine.collective_rpc("midstream_gauges")
                left = {
                    name: n
                    for name, n in gauges.items()
                    if n and not name.endswith(("_steps", "_growths", "_failures"))
                }
                if not left:
                    break
                await asyncio.sleep(0.05)
            assert not left
            return outputs
        finally:
            engine.shutdown()

    steered, plainly, unknown, refused, left, captured, after = asyncio.run(scenario())
    edits = {("resid_post", 3): lambda h: h + v}
    assert tokens(steered) == plain.generate(FRANCE, 6, edits) != plain.generate(FRANCE, 6)
    assert tokens(plainly) == plain.generate(FRANCE, 6)
    assert unknown.outputs[0].finish_reason == "error" and "nope" in unknown.outputs[0].stop_reason
    assert isinstance(refused, PlanError) and "33" in str(refused)
    assert left is None
    assert tokens(after) == plain.generate(ITALY, 6)
    found = open_captures(tmp_path)  # the engine has ended: all is there
    mine = of_prompt(found, plain.ids(FRANCE))
    close(mine["resid_post", 4], plain.run(plain.ids(FRANCE) + tokens(steered)[:-1], edits).sites["resid_post", 4])
    mine = of_prompt(found, plain.ids(EIFFEL))
    close(mine["resid_post", 4], plain.run(plain.ids(EIFFEL) + tokens(captured)[:-1]).sites["resid_post", 4])
    assert len(tokens(captured)) == 40 and mine.positions["resid_post", 4] == list(range(47))
    partial = of_prompt(found, plain.ids(ITALY))  # what was computed until it was left
    positions = partial.positions["resid_post", 4]
    assert positions == list(range(len(positions))) and 5 + 9 <= len(positions) < 5 + 399
    whole = plain.ids(ITALY) + plain.generate(ITALY, 12)
    close(partial["resid_post", 4][:14], plain.run(whole[:14]).sites["resid_post", 4])
