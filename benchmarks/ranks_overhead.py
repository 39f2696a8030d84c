"""What plans and traces cost on an engine of several ranks: engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/ranks_overhead.py --cpu --compiled --pp 2                       # the bundled model
    python benchmarks/ranks_overhead.py --pp 2 --runner v2 --shape llama-3.1-8b       # 2 GPUs: dummy weights
    python benchmarks/ranks_overhead.py --tp 2

Tables: stock vLLM at these sizes (= 1.00), the engine without a plan, and every request steered at all layers (`--engines 2` tells what
two engines of the same code differ by); with `--pp`, a trace that reads and saves every layer, against the same on an eager engine of
one rank; and how long a stage waits for each value of another one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from side_by_side import (
    Runs,
    add_arguments,
    choose_runner,
    engine_arguments,
    in_turns,
    load_of,
    on_the_same_cores,
    print_table,
    prompts_of,
    start_engines,
    stock_runs,
)

FETCHED_TOKENS = 32


def sizes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp}


@contextlib.contextmanager
def engine_of(arguments: argparse.Namespace, *, stock: bool = False, **changed: Any) -> Iterator[Any]:
    from vllm import LLM

    from midstream import VLLM

    path, engine = engine_arguments(arguments)
    given = {**engine, **sizes_of(arguments), **changed}
    made: Any = LLM(path, **given) if stock else VLLM(path, **given)
    if not stock:
        with made:
            yield made
        return
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def plain_and_steered(arguments: argparse.Namespace) -> None:
    import torch

    from midstream import Steer

    prompts, params = load_of(arguments)
    with contextlib.ExitStack() as engines:
        stock, models = start_engines(arguments, lambda plain: engines.enter_context(engine_of(arguments, stock=plain)))
        plan = [Steer("resid_post", vector=torch.full((models[0].hidden_size,), 0.01))]
        runs: Runs = {
            **stock_runs(stock, prompts, params),
            "midstream, no plan": [functools.partial(m.generate, prompts, **params) for m in models],
            "every request steered, all layers": [
                functools.partial(m.generate, prompts, plan=plan, **params) for m in models
            ],
        }
        print_table(in_turns(runs, arguments), len(prompts) * params["max_tokens"], arguments)


def every_layer(model: Any) -> Any:
    return [model.layers_output[i] for i in range(model.num_layers)]


def traced(arguments: argparse.Namespace) -> None:
    """Times of a trace of every layer, and of its fetches; both engines are eager."""
    prompts = prompts_of(8, FETCHED_TOKENS)
    one_rank: dict[str, Any] = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1}
    with contextlib.ExitStack() as engines:
        with on_the_same_cores(arguments):
            alone = engines.enter_context(engine_of(arguments, enforce_eager=True, **one_rank))
        with on_the_same_cores(arguments):
            model = engines.enter_context(engine_of(arguments, enforce_eager=True))
        params = {"temperature": 0.0, "detokenize": False}
        found = in_turns(
            {
                "one rank": [lambda: alone.run(every_layer, prompts, **params)],
                "several": [lambda: model.run(every_layer, prompts, **params)],
            },
            arguments,
        )
        one_rank_seconds, seconds = found.runs["one rank"][0], found.runs["several"][0]
        ratios = [after / before for before, after in zip(one_rank_seconds, seconds, strict=True)]
        print(
            f"\na trace that saves every layer, {len(prompts)} x {FETCHED_TOKENS} tokens: "
            f"{statistics.median(ratios):.2f} x the time on one rank, in the same round "
            f"({statistics.median(seconds) * 1e3:.1f} ms, {statistics.median(one_rank_seconds) * 1e3:.1f} ms)"
        )
        print_fetches(model, prompts[0])


def print_fetches(model: Any, prompt: list[int]) -> None:
    """How long the last stage waits for the values of the stages before it, which lie ready when it asks."""

    def fetched(m: Any, tracer: Any) -> Any:
        waits: dict[int, list[float]] = {os.getpid(): []}
        for _ in tracer.iter[:]:
            for i in range(m.num_layers // 2):
                hidden = m.layers_output[i]
                begun = time.perf_counter()
                len(hidden)
                waits[os.getpid()].append(time.perf_counter() - begun)
        return waits

    per_step, steps = model.num_layers // 2, 12
    first, later = [], []
    for _ in range(6):
        (waits,) = model.run(fetched, [prompt], max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
        longest = max(waits.values(), key=lambda each: statistics.median(each))  # where they are of another process
        first += longest[:per_step]
        later += longest[4 * per_step :]
    shape = f"[{len(prompt)}, {model.hidden_size}]"
    print(f"a fetch of {shape}: {statistics.median(first) * 1e3:.2f} ms at the median, {max(first) * 1e3:.2f} at most")
    print(
        f"of one token, from the same places in step after step: {statistics.median(later) * 1e3:.3f} ms at the median"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each stage")
    parser.add_argument("--plain", action="store_true", help="leave out the trace and the fetches")
    arguments = parser.parse_args()
    if arguments.cpu and arguments.pp > 1 and not arguments.compiled:  # assert self.intermediate_tensors is not None
        parser.error("stock vLLM's CPU build has pipeline stages only where it compiles: add --compiled")
    choose_runner(arguments)
    print(f"{arguments.pp} stages x {arguments.tp} ranks")
    plain_and_steered(arguments)
    if arguments.pp > 1 and not arguments.plain:
        traced(arguments)


if __name__ == "__main__":
    main()
