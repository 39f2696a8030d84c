"""Sweeps on engines: lost sources, cells on disk, cancelling, memory, neighbours, async engines, the route (rows H5, H7, H10, H12)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from engines import alive, start
from servers import Server, memory, serving

from midstream.client import sweeping
from midstream.client.requests import Invoke
from midstream.errors import ParameterError

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
PAIR = (CLEAN, CORRUPT, " Paris", " Rome")
ASKED = {"clean": CLEAN, "corrupt": CORRUPT, "answer": " Paris", "foil": " Rome"}
GREEDY = {"max_tokens": 1, "temperature": 0.0}


def source_of(model: Any) -> str:
    """The name of the run that is patched from: the second that a sweep records."""
    return [run.name for run in model.runs.handles if run.name.startswith("sweep-")][1]


def test_h5_cells_whose_source_has_gone_are_void_and_never_the_baseline(
    engine: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing where errors of the cells' requests are not looked at."""
    monkeypatch.setattr(sweeping, "GROUPS", (8,))
    stream = engine.sweep(*PAIR, stream=True)
    running = iter(stream)
    cells = [next(running) for _ in range(3)]
    engine.runs.delete(source_of(engine))
    cells += list(running)
    void = [cell for cell in cells if cell.void is not None]
    assert len(cells) == 40 and 24 <= len(void) <= 36 and stream.result.void == void
    assert all("sweep-" in cell.void and cell.value is None for cell in void)
    assert stream.result.summary.void == len(void)
    values = stream.result.values["resid_post"]
    assert int(np.isnan(values).sum()) == len(void)
    frame = stream.result.to_dataframe()
    assert frame.void.notna().sum() == len(void)
    assert not any(alive(engine))


def test_h5_sources_are_leased_so_that_other_runs_do_not_drop_them(engine: VLLM) -> None:
    stream = engine.sweep(*PAIR, stream=True)
    running = iter(stream)
    next(running)
    leased = {run.name: run.leases for run in engine.runs.listing() if run.name.startswith("sweep-")}
    assert len(leased) == 2 and all(leases == 1 for leases in leased.values())
    running.close()
    assert not engine.runs.listing() and not any(alive(engine))


def test_h7_a_killed_sweep_continues_where_it_stopped(engine: VLLM, tmp_path: Path) -> None:
    """A process that sweeps on transformers is killed by SIGKILL. Called again, it runs only the cells that are not on disk."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys

        import torch

        from midstream import LanguageModel, demo_model

        model = LanguageModel(demo_model(), dtype=torch.float32)
        run, count = model._run, 0

        def counted(invokes, *rest):
            global count
            count += len(invokes)
            if len(sys.argv) > 1 and count > 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(invokes, *rest)

        model._run = counted
        result = model.sweep(*{PAIR!r}, to={str(tmp_path / "sweep")!r})
        print(count, result.summary.cells)
        """)
    )
    killed = subprocess.run([sys.executable, script, "kill"], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    lines = (tmp_path / "sweep" / sweeping.CELLS).read_bytes().splitlines(keepends=True)
    done = sum(b'"cell"' in line for line in lines)
    assert 0 < done < 40
    (tmp_path / "sweep" / sweeping.CELLS).write_bytes(
        b"".join(lines) + lines[-1][:20]
    )  # as if cut in the middle of a line
    again = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    requests, cells = map(int, again.stdout.split())
    assert cells == 40 and requests == 2 + 2 + (40 - done) + min(8, 40 - done)
    from midstream.sweeps.results import SweepResult

    whole = SweepResult.load(tmp_path / "sweep" / sweeping.RESULT)
    np.testing.assert_allclose(
        whole.values["resid_post"], engine.sweep(*PAIR).values["resid_post"], rtol=1e-3, atol=2e-3
    )
    with pytest.raises(ParameterError, match="holds another sweep"):
        engine.sweep(*PAIR, layers=[1], to=tmp_path / "sweep")


def test_h12_what_follows_a_sweep_does_not_read_its_patched_kv(engine: VLLM) -> None:
    """On a prompt of several KV blocks, whose first ones are shared."""
    prompt = [token for token in engine.tokenizer(CORRUPT)["input_ids"] for _ in range(9)]
    clean = [token + 1 for token in prompt[:20]] + prompt[20:]
    before = engine.generate(prompt, answers=[" Paris", " Rome"], **GREEDY)[0].answers
    result = engine.sweep(clean, prompt, " Paris", " Rome", layers=[0, 3], positions=[18, 30])
    assert (np.abs(result.values["resid_post"] - result.baseline) > 1e-6).any()
    after = engine.generate(prompt, answers=[" Paris", " Rome"], **GREEDY)[0].answers
    assert after == pytest.approx(before, abs=1e-5)


def test_answers_leave_the_likeliest_tokens_of_other_requests_alone(engine: VLLM) -> None:
    """vLLM's V1 runner gives every request of a step the tokens that one of them has asked for. Seen failing without midstream's part."""
    asked = {"logprobs": 5, **GREEDY}
    (alone,) = engine.generate(CLEAN, **asked)
    (answers,) = engine._answer_tokens([[" Rome"]], 1)
    invokes = [Invoke(CLEAN, None, asked), Invoke(CORRUPT, None, GREEDY, answers=answers), Invoke(CLEAN, None, asked)]
    results = [result.output for result in engine._run(invokes)]
    expected = {token: each.logprob for token, each in alone.outputs[0].logprobs[0].items()}
    assert len(expected) == 5
    for output in (results[0], results[2]):
        found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        assert found == pytest.approx(expected, abs=1e-4)
    assert results[1].answers[" Rome"] > -1


def test_h11_each_cell_has_its_likeliest_tokens(engine: VLLM) -> None:
    result = engine.sweep(*PAIR, layers=[2], positions=[3], top=3, stream=True)
    (cell,) = list(result)
    assert (
        cell.top[0][0] == " Paris"
        and len(cell.top) == 3
        and cell.top[0][1] == pytest.approx(cell.logprobs[0], abs=1e-4)
    )
    assert [logprob for _, logprob in cell.top] == sorted((logprob for _, logprob in cell.top), reverse=True)
    (baseline,) = [noise for noise in result.result.noise if noise.kind == "baseline"]
    assert baseline.top[0][0] == " Rome"


@pytest.mark.slow
def test_h12_a_sweep_of_5000_cells_leaves_memory_flat(engine: VLLM) -> None:
    prompt = engine.tokenizer(CORRUPT)["input_ids"] * 5
    clean = engine.tokenizer(CLEAN)["input_ids"] * 5
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    def swept(count: int) -> list[int]:
        result = engine.sweep([clean] * count, [prompt] * count, " Paris", " Rome", layers=range(8))
        assert result.summary.cells == count * 8 * 25 and result.summary.void == 0
        return [memory(pid) for pid in pids]

    before, after = swept(2), swept(25)
    assert all(b - a < 40e6 for a, b in zip(before, after, strict=True)), (before, after)
    assert not any(alive(engine))


# Async engines.


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(runner: asyncio.Runner) -> Iterator[VLLM]:
    model = start(mode="async", enforce_eager=True)
    yield model
    model.close()


def test_h1_an_async_engine_gives_the_same_cells(engine: VLLM, model: VLLM, runner: asyncio.Runner) -> None:
    async def swept() -> Any:
        result = await model.sweep(*PAIR, sites=["resid_post", "mlp_out"])
        cells = [cell async for cell in model.sweep(*PAIR, stream=True)]
        return result, cells

    result, cells = runner.run(swept())
    expected = engine.sweep(*PAIR, sites=["resid_post", "mlp_out"])
    for site, values in expected.values.items():
        np.testing.assert_allclose(result.values[site], values, rtol=1e-3, atol=2e-3)
    assert len(cells) == 40 and not runner.run(_left(model))


def test_h7_a_cancelled_sweep_lets_go_of_its_sources(model: VLLM, runner: asyncio.Runner) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(model.sweep(*[[each] * 20 for each in (CLEAN, CORRUPT)], " Paris", " Rome"))
        while not model.runs.handles:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runner.run(cancelled())
    assert not runner.run(_left(model))


async def _left(model: VLLM) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        gauges = await model.gauges()
        left = {name: n for name, n in gauges[0].items() if n and not name.endswith("_steps")}
        left |= {run.name: 1 for run in await model.runs.listing()}
        if not left:
            return None
        await asyncio.sleep(0.05)
    return left


# The server.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("sweeps"), "--api-key", "k", stock=False) as server:
        yield server


def events_of(server: Server, asked: dict[str, Any], most: int = 1 << 30) -> list[tuple[str, Any]]:
    """The events of a sweep; the connection is closed after `most`."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    request = urllib.request.Request(f"{server.url}/v1/midstream/sweeps", json.dumps(asked).encode(), headers)
    found: list[tuple[str, Any]] = []
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.headers["content-type"] == "text/event-stream"
        name = ""
        for line in response:
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text.startswith("data: "):
                found.append((name, json.loads(text.removeprefix("data: "))))
                if len(found) == most:
                    break
    return found


def gauges(server: Server) -> dict[str, int]:
    found = server.ask("GET", "/v1/midstream/gauges", key="k")[1]
    return {**found["server"], "leases": sum(worker["leases"] for worker in found["workers"])}


def let_go(server: Server) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = gauges(server)
        if not any(now[name] for name in ("sweeps", "running_prompts", "runs", "leases")):
            return True
        time.sleep(0.05)
    return False


def test_h10_a_sweep_streams_its_start_cells_and_summary(server: Server, engine: VLLM) -> None:
    found = events_of(server, ASKED)
    names = [name for name, _ in found]
    assert names[:2] == ["start", "baselines"] and names[-1] == "summary" and names.count("cell") == 40
    assert {name == event["event"] for name, event in found} == {True}
    values = np.full((8, 5), np.nan)
    for name, event in found:
        if name == "cell":
            values[tuple(event["index"])] = event["value"]
    np.testing.assert_allclose(values, engine.sweep(*PAIR).values["resid_post"], rtol=1e-3, atol=2e-3)
    assert let_go(server)


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"answer": " Paris Rome"}, "answer", "2 tokens"),
        ({"foil": None}, "foil", "needs a foil"),
        ({"sites": ["resid"]}, "sites", "resid_p"),
        ({"layers": [99]}, "layers", "layers has 99"),
        ({"positions": ["Norway"]}, "positions", "Norway"),
        ({"metric": "x"}, "metric", "logit_diff"),
        ({"to": "/tmp/x"}, "to", "not permitted"),
        ({"clean": 3}, "clean", "clean"),
        ({"clean": [CLEAN] * 65, "corrupt": [CORRUPT] * 65}, "clean", "allowed: 64"),
        ({"clean": "a " * 600, "corrupt": "b " * 600}, "prompt", "takes 511"),
    ],
)
def test_h10_errors_before_the_first_event_are_plain_400s(server: Server, changed: Any, field: str, text: str) -> None:
    status, body = server.ask("POST", "/v1/midstream/sweeps", json.dumps({**ASKED, **changed}).encode(), key="k")
    assert status == 400 and text in body["error"]["message"]
    assert body["error"]["param"] == field or field == "prompt"
    assert gauges(server)["sweeps"] == 0


def test_h10_only_so_many_sweeps_run_at_a_time_and_a_closed_connection_ends_one(server: Server) -> None:
    """Seen failing without the lines that close the events when the client has gone."""
    long = {**ASKED, "clean": [CLEAN] * 60, "corrupt": [CORRUPT] * 60}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    opened = []
    for _ in range(4):
        request = urllib.request.Request(f"{server.url}/v1/midstream/sweeps", json.dumps(long).encode(), headers)
        opened.append(urllib.request.urlopen(request, timeout=60))
        opened[-1].readline()
    status, body = server.ask("POST", "/v1/midstream/sweeps", json.dumps(ASKED).encode(), key="k")
    assert status == 503 and "4 sweeps already" in body["error"]["message"]
    assert gauges(server)["sweeps"] == 4
    for response in opened:
        response.close()
    assert let_go(server)
    assert events_of(server, ASKED)[-1][0] == "summary"


def test_h10_the_route_wants_the_api_key(server: Server) -> None:
    assert server.ask("POST", "/v1/midstream/sweeps", json.dumps(ASKED).encode())[0] == 401
    assert server.ask("POST", "/v1/midstream/sweeps", b'"' * 100, key="k")[0] == 400
    assert server.ask("POST", "/v1/midstream/sweeps", b" " * (5 << 20), key="k")[0] == 413
