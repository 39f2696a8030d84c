"""What a trace costs that uses a 33 MB SAE of the caller's, on the bundled model.

    python benchmarks/weights.py

Prints milliseconds a trace: with an SAE of a few features, with the large one in the closure but hardly used, and with its features read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from midstream import VLLM, demo_model, save

TRACES = 20
FEATURES = 16_384
PROMPT = "The capital of France is"


class SAE(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(width, features) / width**0.5)
        self.W_dec = nn.Parameter(torch.randn(features, width) / width**0.5)

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden @ self.W_enc)


def milliseconds(run: Callable[[], Any]) -> str:
    """The median and the range of a few runs, after the first."""
    each = []
    for _ in range(TRACES + 1):
        began = time.perf_counter()
        run()
        each.append(1000 * (time.perf_counter() - began))
    first, *rest = each
    return f"{statistics.median(rest):6.1f} ({min(rest):.1f} to {max(rest):.1f}), the first {first:.0f}"


if __name__ == "__main__":
    model = VLLM(demo_model(), dtype="float32", enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2)

    def held(sae: SAE) -> Callable[[Any], Any]:
        return lambda model: save(model.layers_output[3].sum() + sae.W_enc[0, 0])

    def encoded(sae: SAE) -> Callable[[Any], Any]:
        return lambda model: save(sae.encode(model.layers_output[3]).argmax(-1))

    large, small = SAE(model.hidden_size, FEATURES), SAE(model.hidden_size, 16)
    size = sum(each.nbytes for each in large.parameters()) / 1e6
    print(f"{size:.1f} MB of weights, {TRACES} traces in sequence, milliseconds a trace")
    for name, fn in (("small", held(small)), ("held", held(large)), ("encoded", encoded(large))):
        print(f"{name:8}", milliseconds(lambda fn=fn: model.run(fn, PROMPT)))  # type: ignore[misc]
    model.close()
