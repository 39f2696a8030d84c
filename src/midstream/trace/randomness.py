"""Random numbers of a body's own: it has torch's default generators to itself while it runs in an engine.

So neither the engine's sampler nor another body notices what it draws or seeds, and it draws the same on every rank.
"""

from __future__ import annotations

import zlib

import torch


class Randomness:
    """The state of torch's default generators as one body left it, in force within `with`.

    Args:
        seed_text: what names the body on every rank.
        device: where the forward computes.
    """

    def __init__(self, seed_text: str, device: torch.device) -> None:
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        seed = zlib.crc32(seed_text.encode())
        self._generators = generators
        self._own = [torch.Generator(g.device).manual_seed(seed).get_state() for g in generators]
        self._others: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._others = [generator.get_state() for generator in self._generators]
        self._put(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = [generator.get_state() for generator in self._generators]
        self._put(self._others)

    def _put(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
