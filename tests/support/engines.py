"""Engines on the bundled model, and what is left alive on their workers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other take the cores from other processes
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if TYPE_CHECKING:
    from midstream import VLLM, Remote

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.2}
RANKS: dict[str, int] = {}  # what `--ranks` makes of every engine
STARTS: list[tuple[float, str]] = []  # seconds, the test that caused the start, and the engine's arguments


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Add the start within the block to the list that ends the tests' output."""
    began, test = time.monotonic(), os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    yield
    STARTS.append((time.monotonic() - began, f"{test}: {what}"))


def start(**arguments: Any) -> VLLM:
    """An engine on the bundled model, whose processes are forked from a server that has imported vLLM: it is there in seconds."""
    from forked import forked

    with forked():
        return start_spawned(**arguments)


def start_spawned(**arguments: Any) -> VLLM:
    """The same with processes as users have them, for tests of how engines begin and end. In a `forked.Program` they are forked."""
    from midstream import VLLM, demo_model

    arguments = {**RANKS, **arguments}
    with timed(" ".join(f"{name}={value}" for name, value in arguments.items())):
        return VLLM(demo_model(), **{**ENGINE, **arguments})


def ask_workers(model: VLLM | Remote, method: str, *args: Any) -> list[Any]:
    """What a method of each worker returns, also of a server's."""
    from midstream import Remote

    if not isinstance(model, Remote):
        return model.engine.collective_rpc(method, args=args)
    asked = httpx.post(f"{model.url}/collective_rpc", json={"method": method, "args": args}, timeout=60)
    return asked.raise_for_status().json()["results"]


def left(gauges: dict[str, int]) -> dict[str, int]:
    """Those of a worker's gauges that are not zero and should be once its requests are over: no counts of steps, growths or failures, and
    no weights, which stay."""
    stays = ("_steps", "_growths", "_failures", "weight_bytes")
    return {name: count for name, count in gauges.items() if count and not name.endswith(stays)}


def alive(model: VLLM, seconds: float = 30.0) -> list[dict[str, int]]:
    """What is left on the workers.

    The client has its results a moment before the sender counts them as gone, and outputs a step before the workers hear of the end of
    requests that nobody waits for rows of; a step that is run after a trace's end may have left rows of these. Of several ranks, the last
    to hear of an end may be behind the client. Weights that traces have used stay, but none is in use.
    """
    connection = model.__dict__.get("_connection")
    in_use = getattr(getattr(connection, "weights", None), "in_use", 0)
    assert not in_use, in_use
    passing = {
        "queued_bytes",
        "plans",
        "profiles",
        "plan_hooks",
        "leases",
        "consumer_bytes",
        "capture_bytes",
        "knockouts",
    }
    deadline = time.monotonic() + seconds
    while True:
        gauges = [left(worker) for worker in model.gauges()]
        if not any(gauges) or (len(gauges) == 1 and set(gauges[0]) - passing) or time.monotonic() > deadline:
            return [g for g in gauges if g]
        time.sleep(0.01)
