"""Sweeps on engines: lost sources, cells on disk, cancelling, memory, neighbours (rows H5, H7, H11, H12)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from engines import alive
from servers import memory

from midstream.errors import ParameterError
from midstream.requests.invokes import Invoke
from midstream.sweeps import sweep_run as sweeping

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
PAIR = (CLEAN, CORRUPT, " Paris", " Rome")
GREEDY = {"max_tokens": 1, "temperature": 0.0}


def source_of(model: Any) -> str:
    """The name of the run that is patched from: the second that a sweep records."""
    return [run.name for run in model.runs.handles if run.name.startswith("sweep-")][1]


def test_cells_whose_source_has_gone_are_void_and_never_the_baseline(
    engine: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing where errors of the cells' requests are not looked at."""
    for limit in ("ENGINE_GROUP", "ENGINE_GROUPS"):  # few cells have begun when the source goes
        monkeypatch.setattr(f"midstream.sweeps.sweep_run.{limit}", 4)
    stream = engine.sweep(*PAIR, stream=True)
    running = iter(stream)
    cells = [next(running) for _ in range(3)]
    engine.runs.delete(source_of(engine))
    cells += list(running)
    void = [cell for cell in cells if cell.void is not None]
    assert len(cells) == 40 and stream.result.void == void
    assert not any(cell.void for cell in cells[:3])
    assert (
        40 - 4 * 4 <= len(void) <= 40 - 3
    )  # the source went with three cells here and at most four groups of four begun
    assert all("sweep-" in cell.void and cell.value is None for cell in void)
    assert stream.result.summary.void == len(void)
    values = stream.result.values["resid_post"]
    assert int(np.isnan(values).sum()) == len(void)
    frame = stream.result.to_dataframe()
    assert frame.void.notna().sum() == len(void)
    assert not any(alive(engine))


def test_other_calls_may_come_between_two_cells(engine: VLLM) -> None:
    """Seen failing where a call does not wait for the cells that run: vLLM returns their outputs as the call's."""
    alone = engine.generate([CLEAN, CORRUPT], **GREEDY)
    whole, stream = engine.sweep(*PAIR), engine.sweep(*PAIR, stream=True)
    for number, _ in enumerate(stream):
        if number % 8 == 0:
            between = engine.generate([CLEAN, CORRUPT], **GREEDY)
            assert [each.outputs[0].token_ids for each in between] == [each.outputs[0].token_ids for each in alone]
    assert not stream.result.void
    np.testing.assert_allclose(stream.result.values["resid_post"], whole.values["resid_post"], atol=1e-4)
    assert not any(alive(engine))


def test_sources_are_leased_so_that_other_runs_do_not_drop_them(engine: VLLM) -> None:
    stream = engine.sweep(*PAIR, stream=True)
    running = iter(stream)
    next(running)
    leased = {run.name: run.leases for run in engine.runs.listing() if run.name.startswith("sweep-")}
    assert len(leased) == 2 and all(leases >= 1 for leases in leased.values())  # running cells lease them, too
    running.close()
    assert not engine.runs.listing() and not any(alive(engine))


def test_a_killed_sweep_continues_where_it_stopped(engine: VLLM, tmp_path: Path) -> None:
    """A process that sweeps on transformers is killed by SIGKILL. Called again, it runs only the cells that are not on disk."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys

        import torch

        from midstream import LanguageModel, demo_model
        from midstream.sweeps import sweep_run

        sweep_run.PROCESS_GROUP = 4
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


def test_what_follows_a_sweep_does_not_read_its_patched_kv(engine: VLLM) -> None:
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
    results = [result.output for result in engine._finish(engine._run(invokes).gathered())]
    expected = {token: each.logprob for token, each in alone.outputs[0].logprobs[0].items()}
    assert len(expected) == 5
    for output in (results[0], results[2]):
        found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        assert found == pytest.approx(expected, abs=1e-4)
    assert results[1].answers[" Rome"] > -1


def test_each_cell_has_its_likeliest_tokens(engine: VLLM) -> None:
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
def test_a_sweep_of_5000_cells_leaves_memory_flat(engine: VLLM) -> None:
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
