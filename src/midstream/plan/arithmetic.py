"""What the edits of a site compute together, in plain PyTorch: the path on the CPU, and what the kernels are tested against.

`ops` has the arithmetic of each kind of edit.

Legend: T tokens, H the site's width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from midstream.plan.ops.edit import Op, kind_of


def apply(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of a site after the edits `ops`, which all of the rows get. `x_TH` is left as it is.

    In float32, in the order of the ops: an edit's `reference` gives the new value; the summands of edits that add and follow each other are
    computed from the same value and their sum is added once. Rounded to the dtype of `x_TH` at the end. A row's result does not depend on
    the rows beside it.

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
    added: torch.Tensor | None = None  # the sum of the latest edits that add
    for op in ops:
        if op.kind == "capture":
            continue
        edit = kind_of(op.kind)
        v_H, w_H = (bank[i].to(h_TH.device) if i >= 0 else None for i in (op.vector, op.mask))
        if edit.adds:
            summand = edit.reference(h_TH, v_H, w_H, op.a, op.b, op.c)  # type: ignore[arg-type]
            added = summand if added is None else added + summand
            continue
        if added is not None:
            h_TH, added = h_TH + added, None
        h_TH = edit.reference(h_TH, v_H, w_H, op.a, op.b, op.c)  # type: ignore[arg-type]
    return (h_TH if added is None else h_TH + added).to(x_TH.dtype)
