"""Selectors of somebody else's package, found by their entry points in `toy_op-1.0.dist-info`, which lies beside this file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midstream.plan.selections import Selector


@dataclass(frozen=True)
class Every(Selector):
    """Every n-th generated token, without the first `skipped` ones."""

    kind = "every"
    n: int
    skipped: int = 0

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers >= self.skipped) & ((numbers - self.skipped) % self.n == 0)


@dataclass(frozen=True)
class Around(Selector):
    """The prompt's tokens of these remainders by 3 and its last two, and the generated tokens of these numbers."""

    kind = "around"
    remainders: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return np.isin(positions % 3, self.remainders) | (positions >= length - 2)

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return np.isin(numbers, self.numbers)


@dataclass(frozen=True)
class LastTwo(Selector):
    """The last two tokens of the prompt."""

    kind = "last_two"

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return positions >= length - 2
