"""How fast `store.loader` reads a directory from the page cache: GB/s, by the number of its threads.

    python benchmarks/loader.py [--gigabytes 4] [--width 4096] [--rows 512] [--json FILE]

Beside it the same rows read one request after the other, without mixing. The ratio of both has an interval over the rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from midstream.capture.consumers import CaptureInfo
from midstream.capture.directory import DirectorySink, Store, open_captures

BATCH = 4096


def write(directory: Path, gigabytes: float, width: int, rows: int) -> Store:
    """Requests of `rows` rows of bfloat16."""
    sink = DirectorySink(directory)
    values = torch.randn(rows, width).bfloat16()
    for i in range(max(1, round(gigabytes * 1e9 / values.nbytes))):
        sink.begin(CaptureInfo(str(i), tuple(range(rows))))
        sink.rows(str(i), "resid_post", 0, list(range(rows)), values.clone())
        sink.end(str(i), None)
    sink.close()
    return open_captures(directory)


def in_order(store: Store) -> Iterator[torch.Tensor]:
    for name in store:
        yield store[name]["resid_post", 0].clone()


def gigabytes_a_second(batches: Iterator[torch.Tensor]) -> float:
    begun, size = time.perf_counter(), 0
    for batch in batches:
        size += batch.nbytes
    return size / (time.perf_counter() - begun) / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=512, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        store = write(Path(folder), given.gigabytes, given.width, given.rows)
        for _ in in_order(store):  # into the page cache
            pass
        print(
            f"{os.cpu_count()} cores, torch {torch.__version__}, {given.gigabytes:g} GB, rows of {given.width} bfloat16"
        )
        for workers in (0, 1, 2, 4, 8):
            found, ratios = [], []
            for _ in range(given.rounds):
                plain = gigabytes_a_second(in_order(store))
                loader = store.loader("resid_post", 0, batch_size=BATCH, epochs=1, workers=workers)
                found.append(gigabytes_a_second(iter(loader)))
                ratios.append(found[-1] / plain)
            middle, spread = sorted(found)[len(found) // 2], f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"workers {workers}: {middle:.2f} GB/s, {spread} of reading in order")


if __name__ == "__main__":
    main()
