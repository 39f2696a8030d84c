"""Several engines for one collection: actors of `midstream.ray`, some of which are lost, and vLLM's data parallel engines. Rows F7, O5."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_data_script
import torch
from engines import ENGINE, start
from oracle import Plain, close
from ray_data_script import COUNT, GENERATED, prompts

from midstream import Capture, Patch, Steer, open_captures
from midstream.errors import PlanError

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SLOW = {**ENGINE, "enforce_eager": True, "max_num_seqs": 2, "gpu_memory_utilization": 0.1}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What `ray_data_script.py` says, and its directory."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    directory = tmp_path_factory.mktemp("ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["RAY_AUTH_MODE"] = "disabled"  # clusters that start at once would take each other's token
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in its actor's process starts sooner
    environment["RAY_worker_niceness"] = "0"  # Ray's 15 would starve the engines while other tests run
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # it kills workers for the memory that other tests' engines take
    done = subprocess.run(
        [sys.executable, ray_data_script.__file__, str(directory), json.dumps(SLOW)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-20000:]
    yield directory, json.loads((directory / "came.json").read_text())


@pytest.mark.parametrize("what", ["killed", "removed"])
def test_a_job_that_loses_an_actor_or_its_node_has_each_prompt_once(
    what: str, job: tuple[Path, dict[str, Any]], plain: Plain
) -> None:
    """The other actor goes on; the node's actor has no place where it could start again."""
    directory, came = job[0] / {"killed": "killed", "removed": "rows"}[what], job[1]
    lines = {index: index.read_text().splitlines()[1:] for index in directory.glob("index-*.jsonl")}
    ids = [json.loads(line)["collected"]["id"] for each in lines.values() for line in each]
    assert Counter(ids) == Counter(map(str, range(COUNT)))
    pid, there = came[what]
    (of_lost,) = (each for index, each in lines.items() if f"-{pid}-" in index.name)
    assert there <= len(of_lost) < 40  # in the middle of a batch, which another actor has ended
    assert sorted(row["id"] for row in came[{"killed": "of killed", "removed": "first"}[what]]) == sorted(ids)
    store = open_captures(directory)
    assert {name: capture.prompt_token_ids for name, capture in store.items()} == {
        str(i): prompt for i, prompt in enumerate(prompts())
    }
    some = [ids[0], ids[-1], *(json.loads(line)["collected"]["id"] for line in of_lost[:1] + of_lost[-1:])]
    for name in some:
        prompt = prompts()[int(name)]
        sites = plain.run([*prompt, *plain.generate(prompt, GENERATED)][:-1]).sites
        for layer in (2, 5):
            close(store[name]["resid_post", layer], sites["resid_post", layer])


def test_the_driver_gets_counts_and_no_rows(job: tuple[Path, dict[str, Any]]) -> None:
    came = job[1]
    counts = {row.pop("id"): row for row in came["first"]}
    assert len(counts) == len(came["first"]) == COUNT
    retried = [name for name, row in counts.items() if row == {"rows": 0, "bytes": 0}]
    assert 5 <= came["removed"][1] <= len(retried) < 40  # the lost actor has written these
    for name in counts.keys() - {*retried}:
        rows = 2 * (len(prompts()[int(name)]) + GENERATED - 1)
        assert counts[name] == {"rows": rows, "bytes": rows * 256 * 4}


def test_a_job_leaves_out_bad_prompts(job: tuple[Path, dict[str, Any]]) -> None:
    rows = {row["id"]: row["rows"] > 0 for row in job[1]["left"]}
    assert rows == {"0": True, "1": False, "2": False, "3": True}
    assert {*open_captures(job[0] / "left")} == {"0", "3"}


def test_a_finished_job_starts_no_engine(job: tuple[Path, dict[str, Any]]) -> None:
    assert job[1]["again"] == {"list": 0, "dataset": 0}


def test_messages_have_no_keys_of_other_messages(job: tuple[Path, dict[str, Any]]) -> None:
    """Arrow gives them all keys. A prompt that is there is left out."""
    chat, asked = job[1]["chat"], job[1]["asked"]
    assert {row["id"]: json.loads(row["prompt"]) for row in asked} == {"x": chat, "y": chat[1:]}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("another plan", "CaptureError: .*was begun with .*Give collect what the directory was begun with"),
        ("another adapter", 'CaptureError: .*was begun with .*, and this is {"adapter": "red \\(red\\)"'),
        ("no ids", "ParameterError: id_column is None; allowed: a column of the Dataset"),
        ("no column", "ParameterError: id_column is 'name'; allowed: text, key."),
        ("an id twice", "PromptError: key has '1' more than once"),
        ("no capture", "PlanError: plan has no Capture"),
        ("an adapter", "ParameterError: lora_request= is not a parameter here: a LanguageModel has no adapters"),
        ("in an actor", "CaptureError: Batches with 1 of 1 prompts failed, the first: PlanError: .*99"),
    ],
)
def test_jobs_are_refused_with_midstreams_errors(what: str, message: str, job: tuple[Path, dict[str, Any]]) -> None:
    said = job[1]["errors"][what]
    assert re.match(message, said, re.DOTALL), said


def test_data_parallel_engines_run_plans_and_collect(tmp_path: Path, plain: Plain) -> None:
    """vLLM distributes the requests over two engines of a dense model. A recorded run is in one of them."""
    plan = [Steer("resid_post", layers=2, vector="ones"), Capture("resid_post", layers=3, when="after")]
    given = prompts()[:12]

    async def run() -> None:
        model = start(mode="async", data_parallel_size=2, enforce_eager=True, gpu_memory_utilization=0.1)
        await model.start()
        model.vectors["ones"] = torch.ones(model.hidden_size)
        outputs = await model.generate(given, plan=plan, max_tokens=2)
        for prompt, output in zip(given, outputs, strict=True):
            steered = plain.run(prompt, {("resid_post", 2): lambda h: h + 1.0}).sites["resid_post", 3]
            close(output.captures["resid_post", 3, "after"], steered[-1:])
        store = await model.collect(given, plan=Capture("resid_post", layers=3), to=tmp_path)
        for capture, prompt in zip(store.values(), given, strict=True):
            close(capture["resid_post", 3], plain.run(prompt).sites["resid_post", 3][-1:])
        recorded = await model.record(given[0], sites="resid_post")
        patched = [Patch("resid_post", layer=3, position=-1, source=recorded)]
        with pytest.raises(PlanError, match="not there any more"):
            await model.generate(given, plan=patched, max_tokens=1)
        model.close()

    asyncio.run(run())
