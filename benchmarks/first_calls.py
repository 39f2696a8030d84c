"""How long the first call of a trace's code takes, and later calls of the same code.

    python benchmarks/first_calls.py --cpu                # the bundled model; no other program should run
    python benchmarks/first_calls.py --runner v2 --shape llama-3.1-8b

Each round has new code for each row. After a pause, in which the next fork of the process that records code gets ready, the code is
called on one prompt, and then again. `generate` is called three times before, without a plan. The table has the medians of the first and
of the second call, in milliseconds more than the median of these.

Below it stands the memory of the process that records code, with its forks: their proportional set size (PSS), which counts shared pages
once.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Results
from side_by_side import add_arguments, settle, start_engine

PROMPT, TOKENS = "The Eiffel Tower is in the city of", 4
PAUSE = 1.0  # seconds

# A number that no other code has takes the place of `NUMBER`.
BODIES = {
    "adds a vector": """
        def body(model, tracer):
            for _ in tracer.iter[:]:
                model.layers_output[2] += NUMBER * V
        """,
    "keeps each step's last row": """
        def body(model, tracer):
            return NUMBER, [model.layers_output[2][-1] for _ in tracer.iter[:]]
        """,
    "gates by a probe": """
        def body(model, tracer):
            for _ in tracer.iter[:]:
                h = model.layers_output[2]
                model.layers_output[2] = torch.where((h @ V > NUMBER)[:, None], h + V, h)
        """,
    "clamps an SAE's feature": """
        def body(model, tracer):
            for _ in tracer.iter[:]:
                h = model.layers_output[2]
                features = torch.relu((h - BIAS) @ ENCODER)
                model.layers_output[2] = h + (NUMBER - features[:, :1]) * DECODER[0]
        """,
    "keeps scores of all layers": """
        def body(model):
            scores = {}
            for i in range(model.num_layers):
                scores[i] = (model.layers_output[i] @ V).amax(0) * NUMBER
            return scores
        """,
    "decides by a number": """
        def body(model):
            h = model.layers_output[2]
            if h.norm() > NUMBER:
                model.layers_output[2] = h * 0.5
        """,
}
HEAD = """
    import torch

    torch.manual_seed(0)
    V, BIAS = torch.randn(2, WIDTH)
    ENCODER, DECODER = torch.randn(WIDTH, 64), torch.randn(64, WIDTH)
"""


def bodies(text: str, directory: Path, width: int) -> Iterator[Callable[..., Any]]:
    """Functions with this text, each from a module of its own."""
    for number in count(1):
        name = f"body_{abs(hash(text)) % 10**8}_{number}"
        path = directory / f"{name}.py"
        head = textwrap.dedent(HEAD).replace("WIDTH", str(width))
        path.write_text(head + textwrap.dedent(text).replace("NUMBER", f"{number}.5"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.body


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def recording_processes() -> list[psutil.Process]:
    """The process that records code, and its forks."""
    return [each for each in psutil.Process().children(recursive=True) if "lowering.taper" in " ".join(each.cmdline())]


def shared_memory_of(process: psutil.Process) -> float:
    """Its PSS in MB."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) / 1024


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    settle(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = start_engine(arguments, stack)
        run(arguments, directory, model)


def run(arguments: argparse.Namespace, directory: Path, model: Any) -> None:
    results = Results(arguments, "first calls", f"one prompt of 9 tokens, {TOKENS} generated")
    made = {name: bodies(text, directory, model.hidden_size) for name, text in BODIES.items()}
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}

    def plain() -> float:
        return seconds(lambda: model.generate(PROMPT, progress=False, **sampling))

    def call(body: Callable[..., Any]) -> float:
        return seconds(lambda: model.run(body, PROMPT, progress=False, **sampling))

    for each in made.values():  # warms up
        call(next(each))
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in BODIES}
    for _ in range(arguments.rounds):
        for name, each in made.items():
            body = next(each)
            time.sleep(PAUSE)
            usual = statistics.median(plain() for _ in range(3))
            first, later = call(body), call(body)
            figures[name].append((1e3 * (first - usual), 1e3 * (later - usual)))
    print(f"\n{results.machine}\n\n| code | first call, ms | later calls, ms |\n|---|---|---|")
    for name, own in figures.items():
        first, later = np.array(own).T
        texts = results.add(name, "first call", "ms", first), results.add(name, "later calls", "ms", later)
        print(f"| {name} | {' | '.join(texts)} |")
    if processes := recording_processes():
        memory = sum(map(shared_memory_of, processes))
        print(f"\nThe process that records code, with {len(processes) - 1} forks: {memory:.0f} MB (PSS)")


if __name__ == "__main__":
    main()
