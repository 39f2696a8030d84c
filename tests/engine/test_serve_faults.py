"""What clients of `midstream serve` see when the server ends, and when a process of it is killed (G12)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import until
from load_clients import request
from servers import Server, processes, serving

pytestmark = pytest.mark.engine

PLAN = [
    {"kind": "steer", "site": "resid_post", "layers": [3], "vector": [1.0] * 256},
    {"kind": "capture", "site": "resid_post", "layers": [2], "positions": "all"},
]


class Stream(threading.Thread):
    """A streamed request, by default with captures; `lines` are those that have come."""

    def __init__(self, server: Server, tokens: int = 200, path: str = "/v1/completions", given: Any = None) -> None:
        super().__init__(daemon=True)
        body = {
            "model": "demo",
            "prompt": "The",
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        data = json.dumps(given or {**body, "midstream": {"plan": PLAN}}).encode()
        self._request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self.start()
        until(lambda: len(self.lines) > 5)

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=120) as response:
                self.lines += (line.decode().strip() for line in response if line.strip())
        except Exception as error:
            self.error = error


# More cells than the tests wait for.
SWEEP = {
    "clean": ["The capital of France is"] * 64,
    "corrupt": ["The capital of Italy is"] * 64,
    "answer": [" Paris"] * 64,
}
SWEEP |= {"foil": [" Rome"] * 64, "sites": ["resid_post", "mlp_out", "attn_out"]}


def sweep(server: Server) -> Stream:
    return Stream(server, path="/v1/midstream/sweeps", given=SWEEP)


@contextlib.contextmanager
def half_sent(server: Server) -> Iterator[None]:
    """Uploads that do not go on: to a route of midstream's, and to one of vLLM's."""
    with contextlib.ExitStack() as stack:
        for path in ("/v1/midstream/vectors", "/v1/completions"):
            plug = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))))
            plug.sendall(request("POST", path, b'{"prompt": "', length=1000))
        yield


def test_sigterm_lets_running_requests_end(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, "--shutdown-timeout", "120", stock=False))
        streams = [Stream(server, tokens=400) for _ in range(4)]  # they run for longer than the refusals take
        stack.enter_context(half_sent(server))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.complete("The")[0] == 503)
        status, refusal = server.complete("The", midstream={"plan": PLAN})
        assert status == 503 and refusal["error"]["type"] == "ServiceUnavailableError"
        assert server.last_headers["Retry-After"]
        os.kill(
            server.process.pid, signal.SIGSTOP
        )  # the engine has ended them long before the front end sends their last tokens
        time.sleep(6)
        os.kill(server.process.pid, signal.SIGCONT)
        for stream in streams:
            stream.join(120)
            assert stream.error is None and not stream.is_alive() and stream.lines[-1] == "data: [DONE]"
            handles = json.loads(stream.lines[-2].removeprefix("data: "))["midstream"]["captures"]
            assert len(handles) == 1 and len(handles[0]["positions"]) == 400
        server.process.wait(60)
        assert server.process.returncode == 0
        until(lambda: not processes(server))


def test_sigterm_ends_a_server_that_is_starting(tmp_path: Path) -> None:
    """While its engine starts: vLLM ignores the interrupt there, and waits for an engine that it has given up."""
    with serving(tmp_path, stock=False, is_up=False) as server:
        until(lambda: server.log.exists() and "Loading safetensors" in server.log.read_text())  # by the engine
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 130
        until(lambda: not processes(server))
        assert "the server was ended before it was up" in server.log.read_text()


TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("killed", "flags"),
    [
        pytest.param("EngineCore", (), id="engine"),
        pytest.param("Worker", (), id="worker", marks=pytest.mark.matrix),
        pytest.param("Worker_TP1", TWO_RANKS, id="one worker of two", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_process_ends_the_server_and_its_clients_hear_of_it(
    tmp_path: Path, killed: str, flags: tuple[str, ...]
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, *flags, stock=False, is_forked=False))
        if killed == "EngineCore":
            stack.enter_context(half_sent(server))
        (process,) = [pid for pid in processes(server) if title(pid).endswith(killed)]
        stream, swept = Stream(server, tokens=500), sweep(server)
        os.kill(process, signal.SIGKILL)
        stream.join(60)
        assert stream.error is None and any('"error"' in line for line in stream.lines[-2:]), stream.lines[-2:]
        swept.join(60)
        assert swept.error is None and swept.lines[-2] == "event: error", swept.lines[-4:]
        assert json.loads(swept.lines[-1].removeprefix("data: "))["error"]["type"] == "EngineClosedError"
        assert not server.is_healthy()
        with contextlib.suppress(urllib.error.URLError, ConnectionError):  # it has gone already
            assert server.complete("The", midstream={"plan": PLAN})[0] >= 500
        until(lambda: server.process.poll() is not None)
        assert not server.is_healthy()
        until(lambda: not processes(server))


def title(pid: int) -> str:
    """What a process of vLLM calls itself, such as VLLM::EngineCore."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")
    except OSError:
        return ""
