"""`midstream serve` under load: tests/support/load.py for 30 seconds, vLLM's own `bench serve`, and clients that do not read (G1, G12)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import load
import pytest
from limits import least, until
from load_clients import KEYS, KINDS, LARGE, PATH, RUN, patch, request
from safetensors.torch import load as tensors
from servers import Server, serving

from midstream import demo_model

pytestmark = pytest.mark.engine

CLIENTS, SECONDS = 64, 20.0
DOWNLOADS = 100
UNREAD = 24  # more than requests in a batch, and than threads of the server's event loop


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("load"), *load.FLAGS, stock=False, **load.ENVIRONMENT) as server:
        yield server


async def test_every_answer_under_load_is_the_one_of_the_idle_server(server: Server) -> None:
    report = await load.run(server, CLIENTS, SECONDS)
    print(report)
    assert not report.failures
    assert set(report.done) == set(KINDS)


# ------------------------------------------------------------------------------------------------------ vllm bench serve

PLAN = [
    {"kind": "steer", "site": "resid_post", "layers": [3], "vector": [1.0] * 256},
    {"kind": "capture", "site": "resid_post", "layers": [5]},
]
# vLLM's program does not start with its CPU build, which has a distribution of another name. One process runs both: it starts slowly.
BENCH = """
import json, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
for more in json.loads(sys.argv.pop(1)):
    serve.main(parser.parse_args([*sys.argv[1:], *more]))
"""


def test_vllm_bench_serve(server: Server, tmp_path: Path) -> None:
    model = str(demo_model())
    plans = {"plain": {}, "planned": {"midstream": {"plan": PLAN}}}
    runs = [["--extra-body", json.dumps(body), "--result-filename", name] for name, body in plans.items()]
    command = [
        *(sys.executable, "-c", BENCH, json.dumps(runs), "--base-url", server.url, "--model", model),
        *("--served-model-name", "demo", "--backend", "openai", "--dataset-name", "random", "--num-prompts", "80"),
        *("--random-input-len", "32", "--random-output-len", "8", "--ignore-eos", "--temperature", "0"),
        *("--max-concurrency", "32", "--save-result", "--result-dir", str(tmp_path)),
    ]
    before = server.ask("GET", f"{PATH}/gauges")[1]["server"]["planned_prompts"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    planned = server.ask("GET", f"{PATH}/gauges")[1]["server"]["planned_prompts"] - before
    assert 80 <= planned < 160  # those of one run, and what it sends to warm up
    for name in plans:
        found = json.loads((tmp_path / name).read_text())
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (80, 0, 640), found


# ------------------------------------------------------------------------------------------------ clients that do not read


def ask(server: Server, stack: ExitStack, *what: Any) -> socket.socket:
    """A connection on which a request has been sent. The system holds few bytes of the response for the client."""
    plug = stack.enter_context(closing(socket.socket()))
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plug.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    plug.sendall(request(*what))
    return plug


def seconds_of_a_request(server: Server) -> float:
    start = time.monotonic()
    assert server.complete("The capital of France is")[0] == 200 and server.is_healthy()
    return time.monotonic() - start


def test_slow_downloads_hold_nobody_up_and_are_complete(server: Server) -> None:
    body = {"model": "demo", "prompt": LARGE.prompt, "max_tokens": 1, "midstream": {"plan": LARGE.plan}}
    (entry,) = server.post("/v1/completions", body, key=KEYS[0])[1]["midstream"]["captures"]
    path = f"{PATH}/captures/{entry['handle']}"
    want = tensors(server.ask("GET", path, key=KEYS[0])[1])["rows"]
    alone = seconds_of_a_request(server)
    with ExitStack() as stack:
        plugs = [ask(server, stack, "GET", path) for _ in range(DOWNLOADS)]
        assert all(plug.recv(100) for plug in plugs)  # all have begun
        assert least(lambda: seconds_of_a_request(server), 1.0 + alone) < 1.0 + alone
        assert server.ask("DELETE", path, key=KEYS[0])[0] in (200, 404)  # it may have expired
        for plug in plugs:
            data = bytearray()
            while part := plug.recv(1 << 16):
                data += part
            assert data.endswith(want.numpy().tobytes())


def test_streams_that_nobody_reads_hold_nobody_up_and_end_with_their_clients(server: Server) -> None:
    assert server.post(f"{PATH}/runs", {**RUN, "name": "unread"}, key=KEYS[0])[0] == 200
    capture = {"kind": "capture", "site": "resid_post", "layers": [1], "positions": "all"}
    body = {"model": "demo", "prompt": "The capital of Spain is", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 20, "midstream": {"plan": [patch("unread"), capture]}}  # 800 kB of events

    def leases() -> int:
        return int(server.ask("GET", f"{PATH}/runs")[1]["runs"]["unread"]["leases"])

    with ExitStack() as stack:
        plugs = [ask(server, stack, "POST", "/v1/completions", body) for _ in range(UNREAD)]
        starts = [plug.recv(100) for plug in plugs]
        assert all(start.startswith(b"HTTP/1.1 200") for start in starts), starts
        # All have begun and none ends: the server waits for its clients. The engine leases for those that run, too.
        until(lambda: leases() >= UNREAD)
        limit = 1.0 + seconds_of_a_request(server)
        assert least(lambda: seconds_of_a_request(server), limit, 20) < limit
    deadline = time.monotonic() + 30
    while leases():
        assert time.monotonic() < deadline, leases()
        time.sleep(0.2)
    assert server.ask("DELETE", f"{PATH}/runs/unread", key=KEYS[0])[0] == 200
