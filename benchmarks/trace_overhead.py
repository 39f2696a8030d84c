"""What traces cost, against stock vLLM: both engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/trace_overhead.py --cpu                      # the bundled model, eager, 32 requests x 32 tokens
    python benchmarks/trace_overhead.py --runner v2                # a GPU: Qwen3-0.6B shape, dummy weights, 64 x 128

Rows: plain generation (stock = 1.00), plain generation on midstream's engine, a trace that saves one site, a trace that adds a
vector at one layer on every step, and on a GPU the capture of 64 prompts x 512 tokens x 28 layers to the client.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from side_by_side import (
    add_arguments,
    choose_runner,
    engine_arguments,
    in_turns,
    on_the_same_cores,
    print_table,
    stock_runs,
)


def build_runs(arguments: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], list[Callable[[], Any]]]:
    import torch
    from vllm import LLM

    from midstream import VLLM

    path, engine = engine_arguments(arguments)
    requests, tokens = (32, 32) if arguments.cpu else (64, 128)
    prompts = [[(7 * i + 3 * j) % 1000 + 1 for j in range(16)] for i in range(requests)]
    with on_the_same_cores(arguments):
        stock = LLM(path, **engine)
    with on_the_same_cores(arguments):
        model = VLLM(path, **engine)
    params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    vector = torch.full((model.hidden_size,), 0.01)
    middle = model.num_layers // 2

    def save_one(m: Any) -> Any:
        return m.layers_output[middle]

    def steer(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.layers_output[middle] += vector

    def steer_mlp(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.mlps_output[middle] += vector

    runs: dict[str, Callable[[], Any]] = {
        **stock_runs([stock], prompts, {**params, "detokenize": False}),
        "midstream, nothing traced": lambda: model.generate(prompts, **params, detokenize=False),
        "trace that saves one site": lambda: model.run(save_one, prompts, **params, detokenize=False),
        "trace that steers every step": lambda: model.run(steer, prompts, **params, detokenize=False),
        "the same at an MLP's output (uncompiled steps)": lambda: model.run(
            steer_mlp, prompts, **params, detokenize=False
        ),
    }
    return runs, [model.close, stock.llm_engine.engine_core.shutdown, lambda: capture(model, arguments)]


def capture(model: Any, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds and GB/s for every layer's residual stream of 64 prompts x 512 tokens, to the client."""
    count, length = (8, 64) if arguments.cpu else (64, 512)
    best, size = float("inf"), 0
    for attempt in range(3):
        prompts = [[(11 * i + 5 * j + attempt) % 1000 + 1 for j in range(length)] for i in range(count)]
        start = time.perf_counter()
        values = model.run(
            lambda m: [m.layers_output[i] for i in range(m.num_layers)], prompts, temperature=0.0, detokenize=False
        )
        best = min(best, time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for v in values for t in v)
    return best, size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    choose_runner(arguments)
    runs, (close, close_stock, run_capture) = build_runs(arguments)
    print_table(in_turns(runs, arguments), 32 * 32 if arguments.cpu else 64 * 128, arguments)
    best, rate = run_capture()
    print(f"capture of every layer, {'8 x 64' if arguments.cpu else '64 x 512'} tokens: {best:.2f} s, {rate:.2f} GB/s")
    close()
    close_stock()


if __name__ == "__main__":
    main()
