"""Engines on vLLM's stock Ray executors (C12, D7), with Ray started by the tests: one node, and two with addresses of their own. Row D8."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cpu_on_ray
import pytest
import torch
from oracle import Plain, close

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

PROMPT = "The capital of France is"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "ray_script.py"


@contextmanager
def node(directory: Path, address: str, gpus: int, env: dict[str, str], head: str | None = None) -> Iterator[str]:
    """A Ray node at an address of this machine, joined to the one at `head`; the address of its cluster."""
    port = _free_port(address)
    place = [f"--port={port}", f"--temp-dir={directory}"] if head is None else [f"--address={head}"]
    sizes = ["--num-cpus=2", f"--num-gpus={gpus}", "--object-store-memory=100000000"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={address}"]
    more = ["--head", "--include-dashboard=false"] if head is None else []
    log = (directory / f"{address}.log").open("w")
    with (
        log,
        subprocess.Popen(
            [*command, *more, *place, *sizes, "--disable-usage-stats"], env=env, stdout=log, stderr=log
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 180
            while "Ray runtime started" not in (said := (directory / f"{address}.log").read_text()):
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.2)
            yield head or f"{address}:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


@contextmanager
def client(
    nodes: dict[str, int], environment: dict[str, str], arguments: dict[str, Any]
) -> Iterator[tuple[Path, subprocess.CompletedProcess[str]]]:
    """`ray_script.py`, run to its end on nodes with so many GPUs each."""
    with tempfile.TemporaryDirectory(prefix="r") as name, ExitStack() as stack:  # short: a socket's path has a limit
        directory = Path(name)
        cpu_on_ray.install(directory / "site")
        path = [str(directory / "site"), *filter(None, sys.path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "VLLM_HOST_IP": "127.0.0.1", **environment}
        env["RAY_AUTH_MODE"] = "disabled"  # clusters that start at once would take each other's token
        env["RAY_memory_monitor_refresh_ms"] = "0"  # it kills workers for the memory that other tests' engines take
        head = None
        for address, gpus in nodes.items():
            head = stack.enter_context(node(directory, address, gpus, env, head))
        yield (
            directory,
            subprocess.run(
                [sys.executable, str(SCRIPT), name, json.dumps(arguments)],
                env={**env, "RAY_ADDRESS": str(head)},
                capture_output=True,
                text=True,
                timeout=800,
            ),
        )


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What an engine gave: `request.param` has the arguments of `client`."""
    with client(*request.param) as (directory, done):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-20000:]
        yield torch.load(directory / "came.pt", weights_only=False)


ONE, TWO, TWO_OF_TWO = {"127.0.0.1": 2}, {"127.0.0.1": 1, "127.0.0.2": 1}, {"127.0.0.1": 2, "127.0.0.2": 2}
APART = {cpu_on_ray.OTHER_HOSTS: "1"}
PP, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}

engines = pytest.mark.parametrize(
    "run",
    [
        pytest.param((ONE, {}, TP), id="tp2", marks=pytest.mark.matrix),
        pytest.param((TWO, APART, PP), id="pp2-two-nodes", marks=pytest.mark.matrix),
        # It has what the others have.
        pytest.param((TWO_OF_TWO, APART, {**PP, **TP}), id="pp2tp2-two-nodes"),
    ],
    indirect=True,
)


@engines
def test_plans_and_traces_on_ray_are_as_in_transformers(
    run: dict[str, Any], plain: Plain, request: pytest.FixtureRequest
) -> None:
    nodes = request.node.callspec.params["run"][0]
    assert run["workers"] == sum(nodes.values()) and not run["alive"]
    assert run["plain"] == plain.generate(PROMPT, 5)
    steers: dict[Any, Any] = {("resid_post", layer): lambda h: h + 1.0 for layer in (1, 6)}
    assert run["planned"] == plain.generate(PROMPT, 5, steers)
    rows = plain.run(PROMPT, steers).sites
    assert len(run["captures"]) == len(plain.model.model.layers)
    for (site, layer), captured in run["captures"].items():
        close(captured, rows[site, layer])
    trace, ids, seen = run["trace"], plain.ids(PROMPT), {}
    assert trace["ids"] == trace["tokens"] and len(trace["hidden"]) == 3

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        seen["early"] = hidden
        return hidden

    edits: dict[Any, Any] = {("resid_post", 1): keep, ("resid_post", 6): lambda h: h + 0.5 * seen["early"]}
    for step, hidden in enumerate(trace["hidden"]):
        ran = plain.run([*ids, *trace["ids"][:step]], edits)
        close(hidden, ran.sites["resid_post", 6][-1])
        assert trace["ids"][step] == int(ran.logits[-1].argmax())


@pytest.mark.matrix  # tests/unit/test_unsupported.py has the refusal without Ray
def test_the_older_ray_executor_is_refused() -> None:
    """It calls the model runner itself: plans and traces would do nothing."""
    import ray

    # It wants a worker at the client's address, and Ray has called a head node at 127.0.0.1 by another one.
    older = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0", "VLLM_HOST_IP": ray.util.get_node_ip_address()}
    with client(ONE, older, PP) as (_, done):
        assert done.returncode != 0 and "Set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1" in done.stdout + done.stderr
