"""Random bodies of traces on a GPU and on one model runner: prints a line for each fifty and exits 1 if one of them is wrong (row L8).

python tests/gpu/check_bodies.py --runner v2 --float32 --first 0 --count 500

The oracle is `plain_forward.py`: plain transformers with hooks, on the CPU. A body's number is its seed. The bodies are written for the
CPU. On a GPU, PyTorch refuses some of what they do with arrays and with tensors on two devices. Such an error does not count as wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

CHUNK = 50
OF_DEVICES = "on the same device|convert cuda|share memory"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first body's seed")
    parser.add_argument("--count", type=int, default=500)
    arguments = parsed(parser)
    if not arguments.exact:
        parser.error("add --float32: rounding to bfloat16 decides what some bodies do")

    import torch
    from body_checks import Oracle, check_random

    from midstream import VLLM, demo_model

    torch.set_num_threads(1)
    engine = VLLM(demo_model(), **engine_arguments(arguments))
    oracle, end = Oracle(), arguments.first + arguments.count

    def check(seeds: range, directory: Path) -> Any:
        return lambda: check_random(oracle, engine, seeds, directory, OF_DEVICES)

    with engine, tempfile.TemporaryDirectory() as directory, torch.no_grad():
        each = [range(start, min(start + CHUNK, end)) for start in range(arguments.first, end, CHUNK)]
        checks = {f"check_{seeds.start:06}_to_{seeds.stop - 1}": check(seeds, Path(directory)) for seeds in each}
        failed = run_checks(SimpleNamespace(**checks), arguments.runner)
        print(engine.gauges()[0], flush=True)
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
