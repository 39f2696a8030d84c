"""What the edits compute, in plain PyTorch: the path on the CPU, and what the kernels are tested against.

Legend: T tokens, H the site's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from midstream.plan.compile import Op


def apply(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of a site after the edits `ops`, which all of the rows get. `x_TH` is left as it is.

    In float32: patches in their order, `h = (1 - w) * h + w * source` with `w = alpha * mask`, exactly `source` where w is 1 and
    exactly h where it is 0; then the sum of all steers, `scale * v` each, or `scale * ||h|| * v` with h as the patches left it, added
    once; then clamps in their order, with `s = h . d`: `h += strength * (clip(s, low, high) - s) * d`. Rounded to the dtype of
    `x_TH` at the end. A row's result does not depend on the rows beside it.

    Args:
        x_TH: `[T, H]`, float32, float16 or bfloat16.
        ops: in the order of `compile.Profile.ops`; captures are skipped.
        bank: float32 `[H]` each, what `Op.vector` and `Op.mask` are indices of.

    Returns:
        `[T, H]` in the dtype of `x_TH`, equal to it bit for bit wherever nothing changed.
    """
    if all(op.kind == "capture" for op in ops):
        return x_TH
    new_TH = edited(x_TH, ops, bank)
    return torch.where(new_TH == x_TH, x_TH, new_TH)  # 0 and -0 are equal: the old one stays


def edited(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """`apply` for callers that write only what is not equal to the old value, and so leave a 0 its sign themselves."""
    h_TH = x_TH.float()
    for op in ops:
        if op.kind == "patch":
            h_TH = _patched(h_TH, op, bank)
    steers = [op for op in ops if op.kind in ("steer", "norm_steer")]
    if steers:
        h_TH = h_TH + _steering(h_TH, steers, bank)
    for op in ops:
        if op.kind == "clamp":
            d_H = bank[op.vector].to(h_TH.device)
            along_T1 = (h_TH * d_H).sum(-1, keepdim=True)  # not a product of matrices, which may depend on T
            h_TH = h_TH + op.c * (along_T1.clamp(op.a, op.b) - along_T1) * d_H
    return h_TH.to(x_TH.dtype)


def _patched(h_TH: torch.Tensor, op: Op, bank: Sequence[torch.Tensor]) -> torch.Tensor:
    source_H = bank[op.vector].to(h_TH.device)
    weight_H = torch.full_like(source_H, op.a)
    if op.mask >= 0:
        weight_H = weight_H * bank[op.mask].to(h_TH.device)
    mixed_TH = (1 - weight_H) * h_TH + weight_H * source_H
    # A recorded half-precision row may hold an infinity, and 0 times that is NaN.
    return torch.where(weight_H == 1, source_H, torch.where(weight_H == 0, h_TH, mixed_TH))


def _steering(h_TH: torch.Tensor, steers: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the steers, at least one, `[T, H]` or `[H]`."""
    added = []
    for op in steers:
        vector_H = bank[op.vector].to(h_TH.device)
        if op.a != 1:
            vector_H = op.a * vector_H
        added.append(h_TH.norm(dim=-1, keepdim=True) * vector_H if op.kind == "norm_steer" else vector_H)
    return reduce(torch.add, added)
