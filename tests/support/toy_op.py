"""An edit of somebody else's package, found by its entry point in `toy_op-1.0.dist-info`, which lies beside this file."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from midstream.plan import fields
from midstream.plan.ops import Edit, register
from midstream.plan.vectors import as_vector_or_name


@register
@dataclass(frozen=True)
class Scale(Edit):
    """Multiply the value: `h = factor * h`, or in each dimension by `(1 - m) + factor * m` with a vector m of shape `[hidden]`."""

    kind, order, operands = "scale", 25, ("mask",)  # between Steer and Clamp

    site: str
    _: KW_ONLY
    layers: Any = "all"
    factor: float
    mask: Any = None
    phase: str = "both"
    positions: Any = None

    def __post_init__(self) -> None:
        mask = None if self.mask is None else as_vector_or_name("Scale.mask", self.mask)
        self.settle(factor=fields.number("Scale.factor", self.factor), mask=mask)

    def changes_nothing(self) -> bool:
        return self.factor == 1

    def numbers(self) -> tuple[float, float, float]:
        return self.factor, float(self.mask is not None), 0.0

    @staticmethod
    def reference(h_TH: Any, v_H: Any, w_H: Any, a: float, b: float, c: float) -> Any:
        return h_TH * ((1 - v_H) + a * v_H) if b else a * h_TH

    @staticmethod
    def kernel(h, v, w, a, b, c):  # Triton allows no annotations
        factor = a + 0.0 * v
        if b != 0:
            factor = (1.0 - v) + a * v
        return h * factor
