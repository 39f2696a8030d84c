"""What plans cost, against stock vLLM: both engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/plan_overhead.py --cpu                                  # the bundled model, eager, 32 requests x 32 tokens
    python benchmarks/plan_overhead.py --runner v2 --shape llama-3.1-8b       # a GPU: dummy weights, 64 requests x 128 tokens

Rows: stock vLLM (= 1.00), the engine without a plan, every request steered at one layer and at all, a different plan with steers, a patch
and a clamp on each request, the last prompt token of every layer captured of every request; then the capture of 64 prompts x 512 tokens x
every layer to the client. `--engines 2` tells what two engines of the same code differ by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side import Runs, compare


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


def runs_of(models: list[Any], prompts: list[list[int]], params: dict[str, Any]) -> Runs:
    import torch

    from midstream import Capture, Steer

    hidden_size, num_layers = models[0].hidden_size, models[0].num_layers
    vector = torch.full((hidden_size,), 0.01)

    def on_each(plan: Any) -> list[Callable[[], Any]]:
        return [functools.partial(model.generate, prompts, plan=plan, **params) for model in models]

    return {
        "midstream, no plan": on_each(None),
        "every request steered, one layer": on_each([Steer("resid_post", layers=[num_layers // 2], vector=vector)]),
        "every request steered, all layers": on_each([Steer("resid_post", vector=vector)]),
        f"{len(prompts)} different plans": on_each(different_plans(hidden_size, num_layers, len(prompts))),
        "last prompt token captured, all layers": on_each([Capture("resid_post")]),
    }


def captured(model: Any, prompts: list[list[int]]) -> Iterator[Any]:
    from midstream import Capture

    plan = [Capture("resid_post", positions="all_prompt")]
    for output in model.generate(prompts, plan=plan, max_tokens=1, temperature=0.0, detokenize=False):
        yield from output.captures.values()


if __name__ == "__main__":
    compare(__doc__, runs_of, captured)
