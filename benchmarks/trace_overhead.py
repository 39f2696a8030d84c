"""What traces cost, against stock vLLM: both engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/trace_overhead.py --cpu                      # the bundled model, eager, 32 requests x 32 tokens
    python benchmarks/trace_overhead.py --runner v2                # a GPU: Qwen3-0.6B shape, dummy weights, 64 x 128

Rows: plain generation (stock = 1.00), plain generation on midstream's engine, a trace that saves one site, a trace that adds a
vector at one layer on every step, and on a GPU the capture of 64 prompts x 512 tokens x 28 layers to the client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side import Runs, compare


def runs_of(models: list[Any], prompts: list[list[int]], params: dict[str, Any]) -> Runs:
    import torch

    vector = torch.full((models[0].hidden_size,), 0.01)
    middle = models[0].num_layers // 2

    def save_one(m: Any) -> Any:
        return m.layers_output[middle]

    def steer(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.layers_output[middle] += vector

    def steer_mlp(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.mlps_output[middle] += vector

    def on_each(trace: Callable[..., Any]) -> list[Callable[[], Any]]:
        return [functools.partial(model.run, trace, prompts, **params) for model in models]

    return {
        "midstream, nothing traced": [functools.partial(model.generate, prompts, **params) for model in models],
        "trace that saves one site": on_each(save_one),
        "trace that steers every step": on_each(steer),
        "the same at an MLP's output (uncompiled steps)": on_each(steer_mlp),
    }


def captured(model: Any, prompts: list[list[int]]) -> Iterator[Any]:
    def every_layer(m: Any) -> Any:
        return [m.layers_output[i] for i in range(m.num_layers)]

    for layers in model.run(every_layer, prompts, temperature=0.0, detokenize=False):
        yield from layers


if __name__ == "__main__":
    compare(__doc__, runs_of, captured)
