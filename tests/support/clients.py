"""Clients of an engine in processes of their own, which tests interrupt and kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from engines import left
from forked import Program, run_script

SCRIPT = Path(__file__).with_name("lifecycle_script.py")


class Client:
    """`lifecycle_script.py` in a session of its own, and all processes that it starts.

    `more`: further arguments of the script. `is_forked`: the client is forked from a process that has imported vLLM, and starts in a fourth
    of the time.
    """

    def __init__(self, mode: str, directory: Path, *more: str, is_forked: bool = True) -> None:
        self.directory = directory
        self.output, errors = directory / "output", directory / "errors"
        argv, own = [str(SCRIPT), mode, str(directory), *more], {"VLLM_RPC_BASE_PATH": str(directory)}
        self.process: Program | subprocess.Popen[bytes]
        if is_forked:
            self.process = Program(partial(run_script, SCRIPT), argv, self.output, own, errors)
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **own}
        with self.output.open("w") as out, errors.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *argv], start_new_session=True, stdout=out, stderr=err, env=environment
            )

    def wait_for(self, mark: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.directory / mark).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.directory / "errors").read_text()
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Of the client's session, those that run."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = status.read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has just ended
                continue
            if int(session) == self.process.pid and state != "Z":
                found.append(int(status.parent.name))
        return found

    def shared_memory(self) -> set[str]:
        """The segments that the client's processes have mapped."""
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.processes())
        return set(re.findall(r"/dev/shm/(psm_\w+|midstream\S+)", maps))

    def lets_go_of(self, segments: set[str], seconds: float = 30.0) -> bool:
        """Whether the segments are removed in time: the resource tracker of a killed process removes them a moment later."""
        return _none_left(lambda: segments & set(os.listdir("/dev/shm")), seconds)

    def sockets(self) -> list[str]:
        """The abstract sockets of the results channel, and vLLM's on the filesystem."""
        names = re.findall(rf"@midstream-{self.process.pid}-\w+", Path("/proc/net/unix").read_text())
        return names + [str(path) for path in self.directory.rglob("*") if path.is_socket()]

    def all_ended(self, seconds: float = 30.0) -> bool:
        return self._end_but([], seconds)

    def all_but_the_client_ended(self, seconds: float = 30.0) -> bool:
        """Its resource tracker lives as long as it does, too."""
        return self._end_but([self.process.pid, *self._trackers()], seconds)

    def _end_but(self, stay: list[int], seconds: float) -> bool:
        return _none_left(lambda: set(self.processes()) - set(stay), seconds)

    def _trackers(self) -> list[int]:
        return [pid for pid, command in self.describe().items() if "resource_tracker" in command]

    def describe(self) -> dict[int, str]:
        """Command lines, by process."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        return found

    def clear_away(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _none_left(left: Callable[[], set[int] | set[str]], seconds: float) -> bool:
    """Whether `left` returns nothing in time."""
    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not found


@contextlib.contextmanager
def clients() -> Iterator[Callable[..., Client]]:
    """Starts clients, and clears away what they leave."""
    started: list[Client] = []

    def begin(mode: str, *more: str, is_forked: bool = True) -> Client:
        directory = Path(tempfile.mkdtemp(prefix="m"))  # short: a socket's path has a limit
        started.append(Client(mode, directory, *more, is_forked=is_forked))
        return started[-1]

    try:
        yield begin
    finally:
        for one in started:
            one.clear_away()
            shutil.rmtree(one.directory)


def check_preempted(script: Client, *kinds: str) -> None:
    """What `lifecycle_script.py preempt` found: together, with preemptions, all is as it is alone."""
    assert script.process.wait(400) == 0, (script.directory / "errors").read_text()
    result = json.loads(script.output.read_text().splitlines()[-1])
    for gauges in result.pop("gauges"):
        assert not left(gauges), gauges
    assert set(result) == set(kinds)
    for name, found in result.items():
        assert found["preempted alone"] == 0 < found["preempted together"], (name, found)
        assert all(found["same tokens"]) and all(found["ids are the tokens"]), (name, found)
        assert found["largest difference"] < 1e-3 and found["logprobs"] < 1e-3, (name, found)
