"""Steer: add a vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from midstream.plan import fields
from midstream.plan.ops.edit import Edit, RowChange, Shape, register
from midstream.plan.vectors import as_unit, as_vector_or_name, is_zero

if TYPE_CHECKING:
    import torch
    import triton.language as tl


@register
@dataclass(frozen=True)
class Steer(Edit):
    """Add a vector: `h += scale * vector`. Several steers at one site add up.

    Activation addition: Turner et al. 2023 (arXiv:2308.10248). The mean difference of contrastive prompts makes a good vector: Rimsky et
    al. 2023 (arXiv:2312.06681).

    Args:
        site: one of `midstream.sites.LAYER_SITES`, such as `"resid_post"`, or of the accessors, such as `"layers_output"`.
        layers: `"all"`, a layer or a sequence of layers, counted from 0, or from the end: -1.
        vector: `[hidden]`, or the name of a vector that the engine holds.
        scale: the factor; 0 has no effect.
        phase: the tokens to change: `"prefill"` is the prompt's, `"decode"` every generated one, `"both"` all. The phase depends only
            on the position, however the engine batches tokens.
        positions: steer only at these positions of the prompt: one, several (negative numbers count from its end) or a `Span`. With
            `phase="decode"`, steer only at these generated tokens, counted from 0. None means all tokens of `phase`.
        norm_match: make the added vector `scale` times as long as h at that token, after the patches of the site: `h += scale * ||h|| *
            vector / ||vector||`.
        head: at sites of heads (`attn_z`), steer only this head or these heads, counted from 0. `vector` is then `[head_dim]`, added to
            each of them; or `[heads * head_dim]`, and each of them gets its own part.

    Raises:
        PlanError: the value of a field is not allowed; the vector has NaN or infinity; it is zero and norm_match is set; positions with
            `phase="prefill"`; norm_match with a head.
    """

    kind, order, adds, operands, limited_by = "steer", 20, True, ("vector",), "vector"

    site: str
    _: KW_ONLY
    layers: Any = "all"
    vector: Any
    scale: float = 1.0
    phase: str = "both"
    positions: Any = None
    norm_match: bool = False
    head: Any = None

    def __post_init__(self) -> None:
        vector = as_vector_or_name("Steer.vector", self.vector)
        norm_match = fields.flag("Steer.norm_match", self.norm_match)
        if norm_match and is_zero(vector):
            raise fields.refuse("Steer.vector", "zero", "a vector with a direction, since norm_match is set")
        if norm_match and self.head is not None:
            given = f"{fields.shown(self.head)} with norm_match"
            raise fields.refuse("Steer.head", given, "None, since norm_match measures all heads together")
        self.settle(vector=vector, scale=fields.number("Steer.scale", self.scale), norm_match=norm_match)

    def changes_nothing(self) -> bool:
        return self.scale == 0 or is_zero(self.vector)

    def numbers(self) -> tuple[float, float, float]:
        return self.scale, float(self.norm_match), 0.0

    def shape(self, field: str) -> Shape | None:
        return as_unit if self.norm_match else None

    @classmethod
    def saying(cls, change: RowChange, site: str, layer: int, where: Mapping[str, Any]) -> Sequence[Edit]:
        if change.scale != 1 or change.outers or change.constant is None:
            return ()
        return (cls(site, layers=layer, vector=change.constant.float(), **where),)

    @staticmethod
    def reference(h_TH: torch.Tensor, v_H: Any, w_H: Any, a: float, b: float, c: float) -> torch.Tensor:
        added_H = v_H if a == 1 else a * v_H
        return h_TH.norm(dim=-1, keepdim=True) * added_H if b else added_H

    @staticmethod
    def kernel(h, v, w, a, b, c):  # type: ignore[no-untyped-def]
        added = a * v
        if b != 0:
            added = a * tl.sqrt(tl.sum(h * h)) * v
        return added
