"""Clamp: keep the part along a direction within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.ops.edit import Edit, RowChange, Shape, changed, register
from midstream.plan.vectors import Named, Vector, as_unit, as_vector_or_name

if TYPE_CHECKING:
    import torch
    import triton.language as tl


@register
@dataclass(frozen=True)
class Clamp(Edit):
    """Keep the part of h along a direction within bounds. The rest of h is unchanged.

    With `s = h . d`: `h += strength * (clip(s, low, high) - s) * d`. `low = high = 0` ablates the direction: Arditi et al. 2024
    (arXiv:2406.11717). Several clamps at one site are applied in their order.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        direction: `[hidden]`, which is scaled to a unit vector; or the name of a vector that the engine holds.
        low, high: bounds of s, in the units of the activation; None or infinite for no bound.
        strength: from 0 (no effect) to 1 (full effect).
        phase, positions: as in `Steer`.
        head: at sites of heads (`attn_z`), clamp only in this head, counted from 0, or in each of these heads by itself. `direction` is
            `[head_dim]`; or `[heads * head_dim]`, of which each head's part is a direction of its own.

    Raises:
        PlanError: the value of a field is not allowed; the direction is zero; low is above high; positions with `phase="prefill"`.
    """

    kind, order, operands, limited_by = "clamp", 30, ("direction",), "direction"

    site: str
    _: KW_ONLY
    layers: Any = "all"
    direction: Any
    low: float = 0.0
    high: float = 0.0
    strength: float = 1.0
    phase: str = "both"
    positions: Any = None
    head: Any = None

    def __post_init__(self) -> None:
        low = -math.inf if self.low is None else fields.number("Clamp.low", self.low, unbounded=True)
        high = math.inf if self.high is None else fields.number("Clamp.high", self.high, unbounded=True)
        if low > high or low == math.inf or high == -math.inf:
            text = (
                f"Clamp.low is {low:g} and Clamp.high is {high:g}; allowed: low <= high, not both beyond all numbers."
            )
            raise PlanError(text, field="Clamp.low")
        direction = as_vector_or_name("Clamp.direction", self.direction)
        if not isinstance(direction, Named):
            unit = as_unit(direction.data, "Clamp.direction")
            direction = direction if unit is direction.data else Vector(unit, "Clamp.direction")
        strength = fields.number("Clamp.strength", self.strength, 0.0, 1.0)
        self.settle(direction=direction, low=low, high=high, strength=strength)

    @property
    def copies(self) -> int:
        return 1 if self.head is None else len(self.head)

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Clamp]:
        """One edit for each layer, position and head: each head has a part of its own along the direction."""
        for one in super().spread(num_layers, prompt_length):
            yield from (one,) if self.head is None else (changed(one, head=(head,)) for head in self.head)

    def changes_nothing(self) -> bool:
        return self.strength == 0 or (self.low == -math.inf and self.high == math.inf)

    def numbers(self) -> tuple[float, float, float]:
        return self.low, self.high, self.strength

    def shape(self, field: str) -> Shape | None:
        return as_unit

    @classmethod
    def saying(cls, change: RowChange, site: str, layer: int, where: Mapping[str, Any]) -> Sequence[Edit]:
        if change.scale != 1 or len(change.outers) != 1:
            return ()
        ((u, w),) = change.outers
        length = float(w.norm())
        if not 0 < length < math.inf:
            return ()
        direction = w / length
        strength, tolerance = -float(u @ direction) * length, max(1e-5, change.eps)
        is_along = float((u * length + strength * direction).norm()) <= tolerance
        if not is_along or not 0 < strength <= 1 + tolerance:
            return ()
        strength = 1.0 if abs(strength - 1) <= tolerance else strength
        bound = 0.0
        if change.constant is not None:
            along = float(change.constant @ direction)
            if not float((change.constant - along * direction).norm()) <= tolerance * abs(along):
                return ()
            bound = along / strength
        direction = direction.float()
        return (cls(site, layers=layer, direction=direction, low=bound, high=bound, strength=strength, **where),)

    @staticmethod
    def reference(h_TH: torch.Tensor, v_H: Any, w_H: Any, a: float, b: float, c: float) -> torch.Tensor:
        along_T1 = (h_TH * v_H).sum(-1, keepdim=True)  # not a matrix product, whose rounding may depend on T
        return h_TH + c * (along_T1.clamp(a, b) - along_T1) * v_H

    @staticmethod
    def kernel(h, v, w, a, b, c):  # type: ignore[no-untyped-def]
        along = tl.sum(h * v)
        return h + c * (tl.minimum(tl.maximum(along, a), b) - along) * v
