"""Whether memory stays flat: that of client, engine and workers while a million rows are collected, streamed and loaded.

    python benchmarks/memory.py --cpu                                       # the bundled model
    python benchmarks/memory.py --runner v2 --shape llama-3.1-8b            # writes 8 GB
    python benchmarks/memory.py --cpu --rows 10000000 --only stream

`collect` writes rows to a directory, in a call for each step of rows. `load` reads them by `store.loader`, one epoch. `stream` takes
batches of `model.activations`. After each step (a tenth of the rows) the script prints the memory of each process in MB: anonymous and
shared memory, without the pages of files that the system may drop. The growth is that from the third step, when all buffers are full, to
the last one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Results
from side_by_side import add_arguments, settle, start_engine

STEPS = 10
WARM = 3  # steps until caches and both buffers are filled
LAYERS = 4
WAYS = ("collect", "load", "stream")
BATCH = 4096


def memory_of(process: psutil.Process) -> float:
    """MB, without the pages of files."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(size) for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)) / 1024


def memory(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: memory_of(process) for name, process in processes.items()}


def processes_of_engine() -> dict[str, psutil.Process]:
    """This process, and each of the engine's by its title."""
    found = {"client": psutil.Process()}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        if "resource_tracker" not in title and "forkserver" not in title:
            kind = "engine" if "EngineCore" in title else "worker"
            count = sum(name.startswith(kind) for name in found)
            found[kind if not count else f"{kind} {count + 1}"] = process
    return found


def prompts(length: int, seed: int) -> Iterator[list[int]]:
    """Endlessly, each another one."""
    random = np.random.default_rng(seed)
    while True:
        yield random.integers(1, 1000, length).tolist()


class Steps:
    """Prints a line for each step, and keeps its figures."""

    def __init__(self, name: str, rows: int, processes: dict[str, psutil.Process]) -> None:
        self._name, self._step, self._processes = name, rows // STEPS, processes
        self._seen, self._found = 0, list[dict[str, float]]()
        print(f"\n| {name}: rows | {' | '.join(f'{each}, MB' for each in processes)} |")
        print("|---" * (len(processes) + 1) + "|")

    def add(self, rows: int) -> None:
        self._seen += rows
        while len(self._found) < STEPS and self._seen >= self._step * (len(self._found) + 1):
            self._found.append(memory(self._processes))
            cells = [f"{each:,.0f}" for each in self._found[-1].values()]
            print(f"| {self._step * len(self._found):,} | {' | '.join(cells)} |", flush=True)

    def record(self, results: Results) -> None:
        for name in self._processes:
            found = [each[name] for each in self._found]
            results.add(f"{self._name}: {name}", "memory at the end", "MB", [found[-1]])
            results.add(f"{self._name}: {name}", "growth of memory", "MB", [found[-1] - found[WARM - 1]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS, help="load needs collect")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    settle(arguments)
    if "load" in arguments.only and "collect" not in arguments.only:
        parser.error("--only load needs collect too")
    directory = Path(tempfile.mkdtemp(prefix="collected-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        run(arguments, directory, start_engine(arguments, stack))


def run(arguments: argparse.Namespace, directory: Path, model: Any) -> None:
    from midstream import Capture, open_captures

    length = 16 if arguments.cpu else 512
    layers = [model.num_layers * k // LAYERS for k in range(LAYERS)]
    each_step = -(-arguments.rows // STEPS // (length * LAYERS))  # prompts
    processes = processes_of_engine()

    def collect(steps: Steps) -> None:
        of_step = prompts(length, 0)
        plan = Capture("resid_post", layers=layers, positions="all_prompt")
        for _ in range(STEPS):
            store = model.collect(list(islice(of_step, each_step)), plan=plan, to=directory, progress=False)
            steps.add(len(store) * length * LAYERS)

    def load(steps: Steps) -> None:
        for batch in open_captures(directory).loader("resid_post", layers, batch_size=BATCH, epochs=1):
            steps.add(sum(map(len, batch.values())))

    def stream(steps: Steps) -> None:
        given = islice(prompts(length, 1), each_step * STEPS)
        with model.activations(given, "resid_post", layers, batch_size=BATCH) as batches:
            for batch in batches:
                steps.add(sum(map(len, batch.values())))

    ways: dict[str, Callable[[Steps], None]] = {"collect": collect, "load": load, "stream": stream}
    results = Results(arguments, "captures", f"{arguments.rows:,} rows of prompts of {length} tokens, {LAYERS} layers")
    print(f"\n{results.machine}")
    for name in arguments.only:
        steps = Steps(name, arguments.rows, processes)
        ways[name](steps)
        steps.record(results)


if __name__ == "__main__":
    main()
