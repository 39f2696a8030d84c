"""How long a rank waits for another one's value: [32, 4096] in bfloat16, between two processes of one machine.

    python benchmarks/link_latency.py              # values in host memory
    python benchmarks/link_latency.py --cuda       # on a GPU, if there is one

Prints median and 95th percentile of a fetch, from the request to the tensor, for a value that is there already: asked for, and sent ahead
(of which only what the fetch itself takes is left). `--busy`: the owner's own thread calls small operations meanwhile, as a forward does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from midstream.errors import NeverReachedError
from midstream.ranks.link import Link


def connect(rank: int, pipe: Connection) -> Link:
    def exchange(item: Any) -> list[Any]:
        pipe.send(item)
        other = pipe.recv()
        return [item, other] if rank == 0 else [other, item]

    return Link(rank, exchange, "benchmark", "127.0.0.1")


def finish(link: Link, pipe: Connection) -> None:
    link.end("body", NeverReachedError("over"))
    while any(link.gauges().values()):
        time.sleep(0.001)
    pipe.send(None)
    pipe.recv()
    link.close()


def own(pipe: Connection, arguments: argparse.Namespace, place: str | None) -> None:
    """The owner: publishes a value for each step when told to, as the engine does. Values without a place are not sent ahead."""
    torch.set_num_threads(1)
    link = connect(0, pipe)
    device = "cuda" if arguments.cuda and torch.cuda.is_available() else "cpu"
    small = torch.ones(64, device=device)
    while (number := pipe.recv()) is not None:
        link.publish(
            "body", number, torch.full((32, 4096), number % 7, dtype=torch.bfloat16, device=device), place=place
        )
        link.end_step()
        pipe.send(None)
        until = time.perf_counter() + (0.02 if arguments.busy else 0.0)
        while time.perf_counter() < until:
            torch.relu(small)
    finish(link, pipe)


def measure(arguments: argparse.Namespace, place: str | None) -> list[float]:
    """Seconds from each request to its value."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, arguments, place), daemon=True)
    owner.start()
    link = connect(1, pipe)
    seconds = []
    for number in range(arguments.steps + 20):
        pipe.send(number)
        pipe.recv()
        time.sleep(0.005)  # the rest of a step
        start = time.perf_counter()
        value = link.fetch(0, "body", number).wait()
        seconds.append(time.perf_counter() - start)
        link.end_step()
        assert value[31, 4095] == number % 7
    pipe.send(None)
    finish(link, pipe)
    owner.join()
    return seconds[20:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="values lie on a GPU")
    parser.add_argument("--busy", action="store_true", help="the owner's thread calls small operations meanwhile")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, place in (("asked for", None), ("sent ahead", "p")):
        milliseconds = [1e3 * one for one in measure(arguments, place)]
        p95 = statistics.quantiles(milliseconds, n=20)[-1]
        print(f"{name:12s} median {statistics.median(milliseconds):7.3f} ms   95% {p95:7.3f} ms", flush=True)
    assert threading.active_count() == 1, threading.enumerate()


if __name__ == "__main__":
    main()
