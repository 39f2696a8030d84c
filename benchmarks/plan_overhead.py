"""What plans cost, against stock vLLM: both engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/plan_overhead.py --cpu                                  # the bundled model, eager, 32 requests x 32 tokens
    python benchmarks/plan_overhead.py --runner v2 --shape llama-3.1-8b       # a GPU: dummy weights, 64 requests x 128 tokens

Rows: stock vLLM (= 1.00), a second stock engine where there is room for one (so much is noise), the engine without a plan, every request
steered at one layer and at all, a different plan with steers, a patch and a clamp on each request, the last prompt token of every layer
captured of every request, and on a GPU the capture of 64 prompts x 512 tokens x every layer to the client.
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
    has_room,
    in_turns,
    on_the_same_cores,
    print_table,
    stock_runs,
)


def different_plans(hidden_size: int, num_layers: int, requests: int) -> list[Any]:
    """A plan for each request: steers at three layers, a patch, a clamp, all with vectors of their own."""
    import torch

    from midstream import Clamp, Patch, Steer

    generator = torch.Generator().manual_seed(0)

    def vector() -> Any:
        return torch.randn(hidden_size, generator=generator) * 0.01

    return [
        [
            *[Steer("resid_post", layers=[(i + k) % num_layers], vector=vector()) for k in (0, 5, 11)],
            Patch("resid_post", layer=(i + 2) % num_layers, position=3, source=vector(), alpha=0.5),
            Clamp("resid_post", layers=[(i + 7) % num_layers], direction=vector()),
        ]
        for i in range(requests)
    ]


def build_runs(
    arguments: argparse.Namespace,
) -> tuple[dict[str, Callable[[], Any]], list[Callable[[], Any]], Callable[[], tuple[float, float]]]:
    """What is measured in turns, what ends the engines, and the capture of whole prompts."""
    import torch
    from vllm import LLM

    from midstream import VLLM, Capture, Steer

    path, engine = engine_arguments(arguments)
    requests, tokens = (32, 32) if arguments.cpu else (64, 128)
    prompts = [[(7 * i + 3 * j) % 1000 + 1 for j in range(16)] for i in range(requests)]
    with on_the_same_cores(arguments):
        stock = [LLM(path, **engine)]
    with on_the_same_cores(arguments):
        model = VLLM(path, **engine)
    if not arguments.one_stock and has_room(arguments, engine):
        with on_the_same_cores(arguments):
            stock.append(LLM(path, **engine))
    params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    vector = torch.full((model.hidden_size,), 0.01)
    different = different_plans(model.hidden_size, model.num_layers, requests)

    def planned(plan: Any) -> Callable[[], Any]:
        return lambda: model.generate(prompts, plan=plan, **params)

    runs: dict[str, Callable[[], Any]] = {
        **stock_runs(stock, prompts, params),
        "midstream, no plan": lambda: model.generate(prompts, **params),
        "every request steered, one layer": planned(
            [Steer("resid_post", layers=[model.num_layers // 2], vector=vector)]
        ),
        "every request steered, all layers": planned([Steer("resid_post", vector=vector)]),
        f"{requests} different plans": planned(different),
        "last prompt token captured, all layers": planned([Capture("resid_post")]),
    }
    close = [model.close, *(llm.llm_engine.engine_core.shutdown for llm in stock)]
    return runs, close, lambda: capture(model, arguments)


def capture(model: Any, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds and GB/s for every layer's residual stream of 64 prompts x 512 tokens, to the client."""
    from midstream import Capture

    count, length = (8, 64) if arguments.cpu else (64, 512)
    best, size = float("inf"), 0
    for attempt in range(4):
        prompts = [[(11 * i + 5 * j + attempt) % 1000 + 1 for j in range(length)] for i in range(count)]
        start = time.perf_counter()
        outputs = model.generate(
            prompts,
            plan=[Capture("resid_post", positions="all_prompt")],
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
        )
        best = min(best, time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for output in outputs for t in output.captures.values())
        assert size == count * length * model.num_layers * model.hidden_size * (4 if arguments.cpu else 2)
    return best, size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--one-stock", action="store_true", help="leave out the second stock engine")
    arguments = parser.parse_args()
    choose_runner(arguments)
    runs, close, run_capture = build_runs(arguments)
    print_table(in_turns(runs, arguments), 32 * 32 if arguments.cpu else 64 * 128, arguments)
    best, rate = run_capture()
    print(f"capture of every layer, {'8 x 64' if arguments.cpu else '64 x 512'} tokens: {best:.2f} s, {rate:.2f} GB/s")
    for end in close:
        end()


if __name__ == "__main__":
    main()
