"""C10, C14: an engine of several ranks ends as a whole, whichever of its processes is killed, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from clients import Client, check_preempted

pytestmark = pytest.mark.engine

SECONDS = 20.0  # on a machine that does much else; alone it takes two or three


def kill_worker(script: Client, title: str) -> None:
    """SIGKILL to the process of the engine that calls itself this; vLLM names workers by their ranks."""
    titled = r"EngineCore\b" if title == "core" else rf"Worker\w*_{title}\b"
    (worker,) = [pid for pid, name in script.describe().items() if re.search(titled, name)]
    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    ("sizes", "mode", "when", "killed"),
    [
        ("pp2", "async", "waiting", "PP1"),
        ("pp2", "sync", "running", "core"),  # vLLM does not wake the caller by itself
        pytest.param("tp2", "sync", "waiting", "TP0", marks=pytest.mark.matrix),
        pytest.param("tp2", "async", "running", "TP1", marks=pytest.mark.matrix),
        pytest.param("pp2", "sync", "running", "PP0", marks=pytest.mark.matrix),
        pytest.param("pp2", "async", "running", "core", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_worker_ends_the_engine_with_a_clear_error(
    client: Callable[..., Client], sizes: str, mode: str, when: str, killed: str
) -> None:
    script = client("lose", sizes, mode, when, is_forked=False)  # a forked client's processes have no titles
    script.wait_for("first")
    segments = script.shared_memory()
    assert segments and script.sockets() and len(script.processes()) > 3  # what is looked for below is seen here
    kill_worker(script, killed)
    begun = time.monotonic()
    script.wait_for("told", 2 * SECONDS)
    assert time.monotonic() - begun < SECONDS
    told = script.output.read_text()  # among vLLM's own messages
    assert re.search("^closed: The engine (died|has gone)", told, re.M)
    assert mode == "async" or len(re.findall("^again closed: The engine died", told, re.M)) == 3
    script.wait_for("closed", SECONDS)
    assert script.all_but_the_client_ended(), script.describe()
    assert script.lets_go_of(segments)
    assert not script.sockets()


@pytest.mark.matrix  # tests/engine/test_lifecycle.py has the same on one rank
@pytest.mark.parametrize("sizes", ["pp2", "tp2"])
def test_a_killed_client_takes_all_ranks_with_it(client: Callable[..., Client], sizes: str) -> None:
    script = client("kill", sizes)
    script.wait_for("first")
    segments = script.shared_memory()
    assert segments and len(script.processes()) > 3
    script.process.send_signal(signal.SIGKILL)
    script.process.wait()
    assert script.all_ended(), script.describe()
    assert script.lets_go_of(segments)


@pytest.mark.matrix
@pytest.mark.parametrize("sizes", ["pp2", "tp2"])
def test_preempted_requests_are_as_if_they_had_run_alone(client: Callable[..., Client], sizes: str) -> None:
    """A trace and a plan that captures, on a KV cache too small for them: each rank computes again what was dropped, with its edits."""
    check_preempted(client("preempt", sizes), "steer_the_prompt", "planned")
