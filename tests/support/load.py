"""Load on `midstream serve` with the bundled model: clients of many kinds at once. What the idle server answered is the oracle.

    python tests/support/load.py --clients 64 --seconds 600

Each client picks one kind of request after another, at random (`--seed`): plain and planned ones, captures that it downloads, bad ones
(`load_clients.py` has them). Meanwhile a probe asks for /health and reads the memory of the server's processes. Afterwards the server has
to be as it was before: no request, no lease, no capture, no file too many, and the plain answers the same. The last clients stream while
the server gets a SIGTERM.

It prints every check that fails, and a summary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_clients import CAPTURE_SECONDS, KINDS, PROMPTS, SMALL, Clients, Oracle, request
from servers import Server, memory, processes, serving

ENVIRONMENT = {
    "MIDSTREAM_CAPTURE_SECONDS": str(CAPTURE_SECONDS),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",  # else every number of tokens in a batch adds to it for the first ten minutes
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # else the server closes a connection just as a client sends its next request
}
# Few and small KV blocks: all have soon been used, and memory is flat from then on.
FLAGS = ("--block-size", "32", "--num-gpu-blocks-override", "64", "--shutdown-timeout", "60")
WINDOWS = 6  # in which memory is compared, the first of them to warm up
MEGABYTES = 4  # that a process may grow in every window. A leak grows in all of them; an allocator takes a step in some
LONG_SECONDS = 120.0  # a run in which every process is warm after the first window
SLOWEST_HEALTH = (
    15.0  # seconds, on a machine that is busy with other things; a median of a tenth of this is too much too
)
MORE_FILES = 4  # that may be open afterwards
_MOST_FAILURES = 20


@dataclass
class Report:
    """What came of a load."""

    planned: float  # seconds in which clients began requests
    seconds: float = 0.0  # until the last one had its answer
    done: Counter[str] = field(default_factory=Counter)  # requests by kind
    failures: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)  # seconds of each answer
    memory: list[tuple[float, dict[str, float]]] = field(
        default_factory=list
    )  # (seconds since the start, MB by process)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"failed: {what}", flush=True)

    def windows(self) -> dict[str, list[float]]:
        """The median memory of each window, in MB, by process. While the last clients end, nothing is added."""
        length = self.planned / WINDOWS
        by_window: list[list[dict[str, float]]] = [[] for _ in range(WINDOWS)]
        for at, found in self.memory:
            if at < self.planned:
                by_window[int(at / length)].append(found)
        names = self.memory[0][1]
        return {
            name: [statistics.median(each[name] for each in window) for window in by_window if window] for name in names
        }

    def check_limits(self) -> None:
        most = MEGABYTES * max(1.0, LONG_SECONDS / self.planned)  # a short run ends before the processes are warm
        for name, (_, *windows) in self.windows().items():
            growths = [after - before for before, after in itertools.pairwise(windows)]
            if len(growths) < 2 or min(growths) > most:
                self.fail(f"the memory of {name} grows in every window: {windows} MB")
        middle, slowest = statistics.median(self.health), max(self.health)
        if slowest > SLOWEST_HEALTH or middle > SLOWEST_HEALTH / 10:
            self.fail(f"/health took up to {slowest:.1f} s, and {middle:.1f} s in the median")

    def __str__(self) -> str:
        total = self.done.total()
        lines = [f"{total} requests in {self.seconds:.0f} s: {total / self.seconds:.1f} a second"]
        lines += [f"  {count:6}  {kind}" for kind, count in sorted(self.done.items())]
        middle = statistics.median(self.health)
        lines.append(
            f"/health: {len(self.health)} answers, median {middle * 1e3:.0f} ms, slowest {max(self.health):.2f} s"
        )
        for name, windows in self.windows().items():
            lines.append(f"memory of {name} by window: {', '.join(f'{each:.0f}' for each in windows)} MB")
        lines.append(f"{len(self.failures)} checks failed")
        return "\n".join(lines)


class Probe(threading.Thread):
    """Asks for /health and looks at memory until `stop`. A thread: the clients' event loop is busy."""

    def __init__(self, server: Server, report: Report) -> None:
        super().__init__(daemon=True)
        self._server, self._report = server, report
        self._over = threading.Event()

    def run(self) -> None:
        start, names = time.monotonic(), processes(self._server)
        while not self._over.wait(0.1):
            begun = time.monotonic()
            if not self._server.is_healthy(60):
                self._report.fail("/health failed")
            self._report.health.append(time.monotonic() - begun)
            found = {f"{name} {pid}": memory(pid) / 1e6 for pid, name in names.items()}
            self._report.memory.append((time.monotonic() - start, found))

    def stop(self) -> None:
        self._over.set()
        self.join(120)


def state(server: Server) -> dict[str, Any]:
    """What has to be the same before and after a load."""
    found = server.ask("GET", "/v1/midstream/gauges")[1]
    counts = ("planned_prompts", "_steps", "table_growths")  # since the start
    held = [found["server"], *found["workers"]]
    kept = [{name: value for name, value in each.items() if not name.endswith(counts)} for each in held]
    metrics = [line.rsplit(" ", 1) for line in server.ask("GET", "/metrics")[1].splitlines() if line[0] != "#"]
    requests = {
        name: value
        for name, value in metrics
        if name.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    }
    return {"gauges": kept, "requests": requests}


def files(server: Server) -> int:
    """How many files and sockets the server's processes have open."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes(server))


async def run(server: Server, clients: int, seconds: float, seed: int = 0) -> Report:
    """The load, and the checks that need the server up."""
    report, oracle = Report(seconds), Oracle()
    async with Clients(server) as alone:
        await oracle.ask(alone)
    before, open_before = await asyncio.to_thread(state, server), files(server)
    probe = Probe(server, report)
    probe.start()
    start = time.monotonic()

    async def client(number: int) -> None:
        choose = random.Random(f"{seed}/{number}")
        while time.monotonic() - start < seconds and len(report.failures) < _MOST_FAILURES:
            kind = choose.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
            try:
                await asyncio.wait_for(KINDS[kind].ask(everyone, choose), 120)
                report.done[kind] += 1
            except Exception as error:
                what = f"{type(error).__name__}: {str(error)[:500]}"
                report.fail(f"{time.monotonic() - start:.0f} s, {kind}: {what}")

    async with Clients(server, oracle) as everyone:
        await asyncio.gather(*(client(number) for number in range(clients)))
        report.seconds = time.monotonic() - start
        probe.stop()
        report.check_limits()
        for question, text in oracle.texts.items() if server.process.poll() is None else ():
            if (now := await everyone.text(question, everyone.plan(question))) != text:
                report.fail(f"after the load: {question}: {now!r}, not {text!r}")
    if server.process.poll() is not None:
        report.fail(f"the server ended with {server.process.returncode}")
    else:
        await _check_idle(server, report, before, open_before)
    lines = server.log.read_text().splitlines()
    errors = [each for each in lines if "500 Internal" in each or ("Traceback" in each and "validation.py" not in each)]
    if errors:
        report.fail(f"{len(errors)} errors in the server's log, such as {errors[0]!r}")
    return report


async def _check_idle(server: Server, report: Report, before: Any, open_before: int) -> None:
    """Wait until the server is as it was."""
    deadline = time.monotonic() + CAPTURE_SECONDS + 30
    while (after := await asyncio.to_thread(state, server)) != before and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    if after != before:
        report.fail(f"afterwards {after}, before {before}")
    if (more := files(server) - open_before) > MORE_FILES:
        report.fail(f"{more} files more than before are open")


async def drain(server: Server, clients: int, report: Report) -> None:
    """SIGTERM while every client streams, most of them from the queue: all streams come to their end, and then the server."""
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> None:
        body = {"model": "demo", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 50, "ignore_eos": True}
        body |= {"stream": True, "midstream": {"plan": SMALL[0].plan if number % 2 else []}}
        reader, writer = await everyone.connect(request("POST", "/v1/completions", body))
        lines = [await reader.readline()]
        begun.release()
        with suppress(TimeoutError):
            async with asyncio.timeout(90):
                async for line in reader:
                    lines.append(line)
        writer.close()
        if b"data: [DONE]\n" not in lines:
            report.fail(f"after SIGTERM a stream of {len(lines)} lines ended in {lines[-3:]!r}")

    async with Clients(server) as everyone, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(stream(number))
        for _ in range(clients):
            await begun.acquire()
        server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 90
    while (server.process.poll() is None or processes(server)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    if server.process.returncode != 0 or processes(server):
        report.fail(f"the server ended with {server.process.returncode}; left: {processes(server)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="for the server's log")
    arguments = parser.parse_args()
    with serving(arguments.directory, *FLAGS, stock=False, **ENVIRONMENT) as server:
        report = asyncio.run(run(server, arguments.clients, arguments.seconds, arguments.seed))
        print(report, flush=True)
        if server.process.poll() is None:
            asyncio.run(drain(server, arguments.clients, report))
        if report.failures:
            print(f"the server's log: {server.log}")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
