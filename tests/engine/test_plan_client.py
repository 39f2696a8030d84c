"""Plans at the client of a vLLM engine: carriers, checks before anything runs, runs, sinks, async (rows D1, D4, D5, D6, D8, E5, E11).

What plans do to the model is in `test_plans.py`. Expected values come from plain transformers with torch hooks. Row P5.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import alive, start
from oracle import Plain, close
from plan_cases import (
    EIFFEL,
    FRANCE,
    GREEDY,
    HIDDEN,
    ITALY,
    LAYERS,
    P,
    after_rows,
    everything,
    generated_with,
    tokens,
    toward_rome,
    vector,
)
from test_async import left

from midstream import Capture, Patch, Plan, Probe, Span, Steer, open_captures
from midstream.capture.consumers import LINGER
from midstream.errors import (
    CaptureError,
    EngineClosedError,
    PlanError,
    RequestErrorGroup,
)

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine
Drive = Callable[[Coroutine[Any, Any, Any]], Any]
TWO_RUNS = 2 * 5 * LAYERS * HIDDEN * 4  # the residual streams of five float32 tokens, twice


# ------------------------------------------------------------------------------------------------------------- carriers


def test_extra_args_carry_a_plan_as_well(engine: VLLM, plain: Plain) -> None:
    """As they do on a plain `vllm.LLM`; here what is captured comes back on the output."""

    v = toward_rome(plain)
    plan = Plan((Steer("resid_post", layers=5, vector=v), Capture("resid_post", layers=6, positions="all")))
    expected = generated_with(plain, {("resid_post", 5): lambda h: h + v}, 4)
    for carried in (plan, list(plan.interventions), plan.to_json(), {"plan": plan}):
        (output,) = engine.generate(FRANCE, max_tokens=4, extra_args={"midstream": carried}, **GREEDY)
        assert tokens(output) == expected[0]
        close(output.captures["resid_post", 6], expected[1].sites["resid_post", 6])
    with pytest.raises(PlanError, match="twice"):
        engine.generate(FRANCE, plan=plan, extra_args={"midstream": plan})


# ----------------------------------------------------------------------------------------- checked before anything runs


def steps(engine: VLLM) -> int:
    return sum(worker["planned_steps"] for worker in engine.gauges())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Steer("resid_post", layers=[8], vector=vector()), "Steer.layers is 8; allowed: 0 to 7"),
        (Steer("mlp_act", vector=vector()), "Steer.vector is of width 256; allowed: "),
        (Steer("resid_post", vector="thruth"), "'thruth'"),
        (Patch("resid_post", layer=2, position=6, source="zeros"), "Patch.position is 6; allowed: from -5 to 4"),
        (Capture("resid_post", positions=Span("Tower")), "Tower"),
        ([[Steer("resid_post", vector=vector())]] * 3, "3 plans were given for 2 prompts"),
    ],
)
def test_one_prompt_that_cannot_have_the_plan_keeps_all_from_being_sent(engine: VLLM, plan: Any, message: str) -> None:
    before = steps(engine)
    with pytest.raises(PlanError, match=message):
        engine.generate([EIFFEL, FRANCE], plan=plan, max_tokens=2)
    assert steps(engine) == before


def test_what_only_the_workers_find_is_raised_and_the_others_are_kept(engine: VLLM, plain: Plain) -> None:
    """Somebody has taken the vector away behind the client's back."""
    engine.vectors["gone"] = vector()
    engine.generate(FRANCE, max_tokens=1)  # the workers get the vector
    engine.engine.collective_rpc("midstream_vectors", args=("delete", ["gone"]))
    try:
        plans = [
            None,
            [Steer("resid_post", vector="gone"), everything()],
            [everything()],
            [Steer("resid_post", vector="gone")],
        ]
        with pytest.raises(RequestErrorGroup) as caught:
            engine.generate([FRANCE] * 4, plan=plans, max_tokens=4, **GREEDY)
    finally:
        del engine.vectors["gone"]
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert [(number, type(error)) for number, error in failures.items()] == [(1, PlanError), (3, PlanError)]
    assert all("'gone'" in str(error) for error in failures.values()) and len(caught.value.exceptions) == 1
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert [tokens(outputs[index]) for index in (0, 2)] == [plain.generate(FRANCE, 4)] * 2
    ran = plain.run(plain.ids(FRANCE) + plain.generate(FRANCE, 3))
    close(outputs[2].captures["resid_post", 7], ran.sites["resid_post", 7])


# ------------------------------------------------------------------------------------------------- recorded runs (E5)


def test_runs_are_listed_and_held_while_requests_use_them(engine: VLLM, plain: Plain) -> None:
    run = engine.record(ITALY, sites=["resid_post", "attn_z"], layers=[3, 4], name="italy")
    (info,) = engine.runs.listing()
    width = plain.run(ITALY).sites["attn_z", 3].flatten(1).shape[1]
    assert (info.name, info.leases, info.bytes) == ("italy", 0, 5 * 2 * (HIDDEN + width) * 4)
    assert repr(engine.runs) == "<runs: italy 0.0 MB>" and engine.runs["italy"] == run
    held: list[int] = []

    def see(*_: Any) -> None:
        held.append(1)

    plan = [Patch("resid_post", layer=3, position=3, source=run), Capture("resid_post", layers=3, to=see)]
    (output,) = engine.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
    assert tokens(output) == [plain.token(" Rome")] and held
    assert engine.runs.listing()[0].leases == 0
    del engine.runs["italy"]
    assert not engine.runs and not engine.runs.listing()
    before = steps(engine)
    with pytest.raises(PlanError, match="'italy'"):
        engine.generate([FRANCE, FRANCE], plan=[[everything()], plan], max_tokens=1)
    assert steps(engine) == before


def test_a_run_that_the_workers_dropped_is_an_error_before_the_run(engine: VLLM) -> None:
    """It was dropped for another one, and the client does not know yet."""
    run, other = engine.record(ITALY, sites="resid_post"), engine.record(FRANCE, sites="resid_post")
    engine.engine.collective_rpc("midstream_runs", args=("delete", [run.id]))
    before = steps(engine)
    plan = [Patch("resid_post", layer=3, position=3, source=source) for source in (other, run)]
    with pytest.raises(PlanError, match=f"{run.name!r} is not there any more"):
        engine.generate(FRANCE, plan=plan, max_tokens=1)
    assert steps(engine) == before
    assert [(info.name, info.leases) for info in engine.runs.listing()] == [(other.name, 0)]
    engine.runs.delete(other.name)


def test_a_run_of_another_model_is_refused(engine: VLLM, hf: Any) -> None:
    run = hf.record(ITALY, sites="resid_post", name="theirs")
    with pytest.raises(PlanError, match="'theirs'"):
        engine.generate(FRANCE, plan=Patch("resid_post", layer=3, position=3, source=run), max_tokens=1)
    hf.runs.delete("theirs")


# ---------------------------------------------------------------------------------------------------------- sinks (D5)


def test_rows_reach_a_sink_while_the_engine_runs(engine: VLLM) -> None:
    """Those of the first prompts, long before the call returns with the last."""
    times: list[float] = []
    plan = Capture("resid_post", layers=2, positions="all_prompt", to=lambda *_: times.append(time.monotonic()))
    prompts = [[20 + i] * 200 for i in range(60)]
    engine.generate(prompts, plan=plan, max_tokens=24, **GREEDY)
    end = time.monotonic()
    assert len(times) == 60
    assert end - times[0] > 2 * (end - times[-1])


def test_a_stalled_sink_fails_its_request_and_the_engine_goes_on(engine: VLLM, plain: Plain, monkeypatch: Any) -> None:
    from midstream.capture.sinks import Sinks

    free = threading.Event()
    monkeypatch.setattr(engine, "sinks", Sinks(timeout=1.0))
    rows: list[int] = []

    def stall(*_: Any) -> None:
        free.wait(30)

    plans = [
        [Capture("resid_post", layers=2, to=(None, stall))],
        [Capture("resid_post", layers=2, to=(None, lambda *a: rows.append(1)))],
    ]
    with pytest.raises(CaptureError, match="has not returned") as caught:
        engine.generate([FRANCE, EIFFEL], plan=plans, max_tokens=2, **GREEDY)
    free.set()
    assert rows == [1]
    close(caught.value.outputs[1].captures["resid_post", 2], plain.run(EIFFEL).sites["resid_post", 2][-1:])  # type: ignore[attr-defined]
    engine.sinks.close()


def test_a_slow_sink_slows_the_engine_down_and_memory_stays_bounded(engine: VLLM, monkeypatch: Any) -> None:
    """Seen failing with `paced=False` in `EngineConnection.mailboxes`: 56 of the 98 MB wait in the client."""
    from midstream.capture.sinks import Sinks

    monkeypatch.setattr(engine, "sinks", Sinks(queue_bytes=1 << 20))
    monkeypatch.setattr(engine._connection.receiver._paced, "limit", 1 << 20)
    waiting, rows = [], []

    def slow(_: str, __: str, ___: int, positions: list[int], ____: torch.Tensor) -> None:
        time.sleep(0.02)
        rows.append(len(positions))
        boxes = list(engine._connection.receiver._mailboxes.values())
        waiting.append(sum(message.size for box in boxes for message in list(box._messages)))

    plan = Capture("resid_post", layers="all", positions="all_prompt", to=slow)
    engine.generate([[20 + i] * 200 for i in range(60)], plan=plan, max_tokens=1, **GREEDY)
    assert sum(rows) == 60 * 200 * 8
    assert max(waiting) < 40e6
    assert engine.sinks.stats["blocked_seconds"] > 1 and engine._connection.receiver._paced.used == 0
    engine.sinks.close()


def test_requests_that_end_together_share_a_file(engine: VLLM, tmp_path: Path) -> None:
    """Seen failing (a file and 0.2 s for each of them) where a request waits for its file before the next one is taken."""
    begun = time.monotonic()
    plan = Capture("resid_post", positions="all_prompt", to=tmp_path)
    outputs = engine.generate([FRANCE] * 100, plan=plan, max_tokens=1)
    seconds = time.monotonic() - begun
    assert seconds < 10
    assert len(open_captures(tmp_path)) == len(outputs) == 100
    assert len(list(tmp_path.glob("*.safetensors"))) <= 5 + seconds / LINGER


@pytest.mark.parametrize("where", ["sink", "output"])
def test_an_interrupted_call_leaves_nothing_behind(engine: VLLM, plain: Plain, monkeypatch: Any, where: str) -> None:
    """Ctrl-C while requests run, after the first rows have come."""
    from midstream.engine import launch

    run = engine.record(ITALY, sites="resid_post", layers=3)
    enqueue = type(engine.engine).enqueue

    def interrupted(llm: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        threading.Timer(0.3, lambda: _interrupt()).start()
        return enqueue(llm, *args, **kwargs)

    monkeypatch.setattr(type(engine.engine), "enqueue", interrupted)
    to = (lambda *_: None) if where == "sink" else None
    plan = [Patch("resid_post", layer=3, position=0, source=run), Capture("resid_post", positions="all", to=to)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([FRANCE] * 8, plan=plan, max_tokens=480, **GREEDY)
    assert launch.is_in_process(engine.engine) or not alive(engine)
    assert engine.generate(FRANCE, max_tokens=2, **GREEDY)[0].outputs[0].token_ids == plain.generate(FRANCE, 2)
    assert engine.runs.listing()[0].leases == 0 and engine._connection.receiver.open_mailboxes == 0
    assert not engine.sinks.stats["requests"]
    assert not asyncio.all_tasks(engine._connection._stepper._rows)
    engine.runs.delete(run.name)


def _interrupt() -> None:
    import signal

    signal.raise_signal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else _main_interrupt()


def _main_interrupt() -> None:
    import _thread

    _thread.interrupt_main()


# ------------------------------------------------------------------------------------------------------------- async


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(runner: asyncio.Runner) -> Iterator[VLLM]:
    """With room for two recorded runs of five tokens."""
    model = start(mode="async", enforce_eager=True, record_bytes=TWO_RUNS)
    yield model
    model.close()


@pytest.fixture
def drive(model: VLLM, runner: asyncio.Runner) -> Iterator[Drive]:
    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return runner.run(asyncio.wait_for(coroutine, 120))

    yield run
    if model.is_open:
        assert not run(left(model))


def test_async_before_the_engine_has_started_a_plan_is_checked_with_the_first_output(model: VLLM, drive: Drive) -> None:
    """The model is not known before. This test has to be the first on its engine."""

    async def main() -> None:
        assert not model._connection.is_described
        stream = model.generate(FRANCE, plan=Steer("resid_post", layers=9, vector=vector()), max_tokens=2)
        with pytest.raises(PlanError, match="0 to 7"):
            await stream
        with pytest.raises(PlanError, match="0 to 7"):  # and from here on at once
            model.generate(FRANCE, plan=Steer("resid_post", layers=9, vector=vector()), max_tokens=2)

    drive(main())


def test_async_captures_come_with_the_final_outputs(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        v = toward_rome(plain)
        plans = [[Steer("resid_post", layers=5, vector=v), everything(when="after")], None, [everything()]]
        stream = model.generate([FRANCE, FRANCE, EIFFEL], plan=plans, max_tokens=6, **GREEDY)
        outputs = [output async for output in stream]
        assert any(not output.finished for output in outputs)
        assert all(output.captures is None for output in outputs if not output.finished)
        first, second, third = stream.outputs
        ids, ran = generated_with(plain, {("resid_post", 5): lambda h: h + v}, 6)
        assert tokens(first) == ids and tokens(second) == plain.generate(FRANCE, 6)
        close(first.captures["resid_post", 7], ran.sites["resid_post", 7])
        close(
            third.captures["resid_post", 7],
            plain.run(plain.ids(EIFFEL) + plain.generate(EIFFEL, 5)).sites["resid_post", 7],
        )
        assert len(second.captures) == 0

    drive(main())


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
@pytest.mark.parametrize("n", [1, 2])
def test_async_scores_come_once_with_every_way_of_streaming(model: VLLM, drive: Drive, kind: str, n: int) -> None:
    """The consumer sleeps, so that vLLM merges outputs. Each output has all scores up to its tokens."""
    from vllm.sampling_params import RequestOutputKind

    async def main() -> None:
        params = {"output_kind": RequestOutputKind[kind], "n": n, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        weight = vector(1, 1.0)
        plan = [Probe("resid_post", layer=5, weight=weight, name="p", positions="all"), everything()]
        stream = model.generate(FRANCE, plan=plan, max_tokens=9, **params)
        tokens_of: dict[int, int] = {}
        async for output in stream:
            for sample in output.outputs if not output.finished else ():
                before = tokens_of.get(sample.index, 0) if kind == "DELTA" else 0
                tokens_of[sample.index] = before + len(sample.token_ids)
            for index, scores in enumerate([output.scores] if n == 1 else output.scores):
                if tokens_of.get(index):
                    assert len(scores["p"]) >= P + tokens_of[index] - 1
            await asyncio.sleep(0.03)
        (last,) = stream.outputs
        each = [(last.scores, last.captures)] if n == 1 else list(zip(last.scores, last.captures, strict=True))
        for scores, captures in each:
            assert scores.positions["p"] == list(range(P + 8))
            close(scores["p"][:, 0], captures["resid_post", 5] @ weight)

    drive(main())


def test_async_a_probe_ends_a_request_and_delays_no_other(model: VLLM, drive: Drive, plain: Plain) -> None:
    """Of 24 requests that come and go every third is ended by its probe, at a token of its own."""

    async def main() -> None:
        ids = plain.generate(FRANCE, 12)
        rows = plain.run(plain.ids(FRANCE) + ids[:-1]).sites["resid_post", 5] @ vector(1, 1.0)
        scores = rows[P:].tolist()

        async def one(i: int) -> None:
            await asyncio.sleep(0.01 * (i % 7))
            bound = scores[i % 11] - 1e-3 if i % 3 == 0 else 1e9
            probe = Probe("resid_post", layer=5, weight=vector(1, 1.0), name=f"p{i}", stop_above=bound)
            output = await model.generate(FRANCE, plan=probe, max_tokens=12, **GREEDY)
            output = output[0] if isinstance(output, list) else output
            at = next((n for n, score in enumerate(scores) if score > bound), None)
            sample = output.outputs[0]
            assert tokens(output) == (ids if at is None else ids[: at + 1])
            assert sample.stop_reason == (None if at is None else f"probe:p{i}")
            assert len(output.scores[f"p{i}"]) == (11 if at is None else at + 1)

        await asyncio.gather(*(one(i) for i in range(24)))

    drive(main())


async def runs_of(model: VLLM) -> dict[str, int]:
    """name -> leases, the least recently used first."""
    return {info.name: info.leases for info in await model.runs.listing()}


async def leased(model: VLLM, count: int) -> None:
    """Until requests hold the runs that often: once from the submission on, and once more from the first step on."""
    while sum((await runs_of(model)).values()) != count:
        await asyncio.sleep(0.005)


def in_rome(plain: Plain, count: int) -> list[int]:
    """The tokens after FRANCE with ITALY's residual stream patched into it."""
    source = plain.run(ITALY).sites["resid_post", 3][3]
    return plain.generate(FRANCE, count, {("resid_post", 3): after_rows([3], lambda h: source)})


def test_a_run_in_use_outlives_what_is_recorded_meanwhile(model: VLLM, drive: Drive, plain: Plain) -> None:
    """Seen failing where `RunStore.add` evicts the least recently used run whatever its leases."""

    async def main() -> None:
        used = await model.record(ITALY, sites="resid_post", name="used")
        patch = Patch("resid_post", layer=3, position=3, source=used)
        running = asyncio.ensure_future(model.generate(FRANCE, plan=patch, max_tokens=200, **GREEDY))
        await leased(model, 2)
        for name in ("a", "b", "c"):
            await model.record(FRANCE, sites="resid_post", name=name)
            assert await runs_of(model) == {"used": 2, name: 0}
        with pytest.raises(PlanError, match=rf"'long'.*{TWO_RUNS // 2:,} are in use.*record_bytes"):
            await model.record(EIFFEL, sites="resid_post", name="long")
        assert await runs_of(model) == {"used": 2, "c": 0} and not running.done()
        (output,) = await running
        assert tokens(output)[:8] == in_rome(plain, 8)

        await model.record(EIFFEL, sites="resid_post", name="long")
        assert await runs_of(model) == {"long": 0}
        (before,) = await model.gauges()
        with pytest.raises(PlanError, match="'used'"):
            await model.generate([EIFFEL, FRANCE], plan=[[everything()], [patch]], max_tokens=1)
        assert (await model.gauges())[0]["planned_steps"] == before["planned_steps"]
        await model.runs.delete("long")

    drive(main())


def test_the_run_of_a_request_that_waits_is_not_evicted(model: VLLM, drive: Drive, plain: Plain) -> None:
    """The engine is full; what it takes up first ends as runs of their own, before the request begins.

    Seen failing without the lease at the submission, and where `RunStore.add` passes leases over.
    """

    async def main() -> None:
        used = await model.record(ITALY, sites="resid_post", name="used")
        await model.record(FRANCE, sites="resid_post", name="spare")
        patch = Patch("resid_post", layer=3, position=3, source=used)
        long = asyncio.ensure_future(model.generate([FRANCE] * 15, max_tokens=200, **GREEDY))
        short = model.generate(FRANCE, max_tokens=100, **GREEDY)
        recorded: list[asyncio.Future[Any]] = []
        async for output in short:
            if not recorded and len(output.outputs[0].token_ids) > 2:
                for name in ("new", "newer"):
                    recorded.append(asyncio.ensure_future(model.record(FRANCE, sites="resid_post", name=name)))
                await asyncio.sleep(0)
                waiting = asyncio.ensure_future(model.generate(FRANCE, plan=patch, max_tokens=4, **GREEDY))
                await leased(model, 1)
        (output,) = await waiting
        assert all(each.done() for each in recorded)
        assert tokens(output) == in_rome(plain, 4)
        assert set(await runs_of(model)) == {"used", "newer"}
        await long
        for name in ("used", "newer"):
            await model.runs.delete(name)

    drive(main())


def test_a_deleted_run_fails_the_requests_that_have_not_begun_and_no_other(
    model: VLLM, drive: Drive, plain: Plain
) -> None:
    """Seen failing where `raise_if_refused` raises nothing: the request has no tokens, and nobody hears why."""

    async def main() -> None:
        run = await model.record(ITALY, sites="resid_post", name="italy")
        patch = Patch("resid_post", layer=3, position=3, source=run)
        begun = asyncio.ensure_future(
            model.generate([FRANCE] * 16, plan=[[patch], *[None] * 15], max_tokens=300, **GREEDY)
        )
        await leased(model, 2)
        waiting = model.generate([EIFFEL, FRANCE, FRANCE], plan=[None, [patch], None], max_tokens=4, **GREEDY)
        ended = asyncio.ensure_future(waiting)
        await leased(model, 3)
        await model.runs.delete("italy")
        assert not begun.done()
        with pytest.raises(PlanError, match="'italy' are not there any more"):
            await ended
        patched, *others = await begun
        assert tokens(patched)[:8] == in_rome(plain, 8)
        assert [tokens(output)[:8] for output in others] == [plain.generate(FRANCE, 8)] * 15
        assert [tokens(waiting.outputs[index]) for index in (0, 2)] == [plain.generate(p, 4) for p in (EIFFEL, FRANCE)]
        assert not await model.runs.listing()

    drive(main())


def test_async_rows_stream_to_a_sink_before_the_end(model: VLLM, drive: Drive) -> None:
    """Also generated ones, as the outputs say that they stand."""
    seen: list[int] = []
    finished: list[int] = []

    async def main() -> None:
        to = lambda _, __, ___, positions, ____: seen.extend(positions)  # noqa: E731
        stream = model.generate(
            FRANCE, plan=Capture("resid_post", layers=1, positions="all_prompt", to=to), max_tokens=300, **GREEDY
        )
        async for output in stream:
            if output.finished:
                finished.append(len(seen))
            elif len(output.outputs[0].token_ids) == 150:
                assert sorted(seen) == [0, 1, 2, 3, 4]
        assert finished == [5]

    drive(main())


@pytest.mark.parametrize("to", [None, "directory"])
def test_async_leaving_early_leaves_nothing_behind(
    model: VLLM, drive: Drive, tmp_path: Path, monkeypatch: Any, to: str | None
) -> None:
    async def main() -> None:
        run = await model.record(ITALY, sites="resid_post", layers=3)
        sink = str(tmp_path) if to else None
        plan = [Patch("resid_post", layer=3, position=0, source=run), Capture("resid_post", positions="all", to=sink)]
        ask, leases = model.runs._ask, []
        monkeypatch.setattr(
            model.runs, "_ask", lambda what, *args: (what == "lease" and leases.append(args)) or ask(what, *args)
        )
        stream = model.generate([FRANCE] * 3, plan=plan, max_tokens=400, **GREEDY)
        async for output in stream:
            if len(output.outputs[0].token_ids) > 5:
                assert leases == [([run.id], 1)]
                break
        await stream_closed(stream)
        assert leases == [([run.id], 1), ([run.id], -1)]
        assert not await left(model)
        assert [info.leases for info in await model.runs.listing()] == [0]
        assert model._connection.receiver.open_mailboxes == 0 and not model.sinks.stats["requests"]  # type: ignore[union-attr]
        await model.runs.delete(run.name)

    async def stream_closed(stream: Any) -> None:
        import gc

        gc.collect()
        for _ in range(50):
            await asyncio.sleep(0.02)

    drive(main())


def test_async_a_trace_with_a_plan(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        v = vector(1)
        with model.trace(
            FRANCE, plan=[Steer("resid_post", layers=3, vector=v), everything()], temperature=0.0
        ) as tracer:
            hidden = model.layers_output[3].save()  # noqa: F841
        output = await tracer.backend
        expected = plain.run(FRANCE)
        close(output.saves["hidden"], expected.sites["resid_post", 3] + v)
        close(output.captures["resid_post", 3], expected.sites["resid_post", 3])

    drive(main())


def test_async_a_closed_engine_fails_what_waits(model: VLLM, drive: Drive) -> None:
    """The last test on this engine."""

    async def main() -> None:
        stream = model.generate(FRANCE, plan=everything(), max_tokens=400, **GREEDY)
        with pytest.raises(EngineClosedError):
            async for output in stream:
                if len(output.outputs[0].token_ids) == 3:
                    model.close()

    drive(main())
    assert not model.is_open


def test_requests_that_differ_in_the_head_share_no_blocks(engine: VLLM, plain: Plain) -> None:
    """N4. Seen failing with `head` left out of the keys: the second request takes the blocks of the first from the cache."""
    block = engine.engine.llm_engine.vllm_config.cache_config.block_size
    prompt = (plain.ids(EIFFEL) * (block // 2))[: 2 * block + 9]
    v = vector(3, 20.0, 64)
    engine.engine.reset_prefix_cache()

    def run(head: int | None) -> Any:
        edits = [] if head is None else [Steer("attn_z", layers=[1, 4], head=head, vector=v)]
        plan = [*edits, Capture("resid_post", layers=7)]
        (output,) = engine.generate(prompt, plan=plan, max_tokens=1, **GREEDY)

        def steered(h: torch.Tensor) -> torch.Tensor:
            return torch.cat([h[:, : 64 * head], h[:, 64 * head : 64 * head + 64] + v, h[:, 64 * head + 64 :]], 1)

        sites: Any = {} if head is None else {("attn_z", 1): steered, ("attn_z", 4): steered}
        close(output.captures["resid_post", 7], plain.run(prompt, sites).sites["resid_post", 7][-1:])
        return output.num_cached_tokens

    assert [run(head) for head in (3, 0, None)] == [0, 0, 0]
    assert all(run(head) == 2 * block for head in (3, 0, None))  # each its own


def test_an_output_has_its_prompts_text(engine: VLLM) -> None:
    """As vLLM's own; of token ids there is none."""
    steer = [Steer("resid_post", layers=2, vector=torch.ones(256), scale=0.1)]
    ids = engine.tokenizer(FRANCE)["input_ids"]
    for plan in (None, steer):
        text, tokens = engine.generate([FRANCE, ids], plan=plan, max_tokens=1, **GREEDY)
        assert (text.prompt, tokens.prompt) == (FRANCE, None)
        assert list(text.prompt_token_ids) == list(tokens.prompt_token_ids) == ids
