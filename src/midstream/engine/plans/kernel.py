"""The fused site kernel: every edit and capture of one site, for every row of the batch, in one launch.

A row of the batch has a *profile*, the number of what is to be done to it; 0 is nothing, and the row's program ends at once.
The table says for (profile, point) where its ops lie and how many there are. Everything but the table's own address is found
through memory, so that a recorded CUDA graph serves every plan: nothing is recaptured when plans come, go or grow.

Legend: T rows of the batch, H hidden, O ops of a profile at a point.

One op is `OP_WORDS` int64 words: vector's address, mask's address (0 for none), kind, offset in the captured row (elements), and
three float32 `a, b, c` in the last two words. Their meaning is that of `midstream.plan.arithmetic`, the plain PyTorch twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OP_WORDS = 6
CAPTURE, PATCH, STEER, NORM_STEER, CLAMP = range(5)
KINDS = {"capture": CAPTURE, "patch": PATCH, "steer": STEER, "norm_steer": NORM_STEER, "clamp": CLAMP}


@triton.jit
def _edit_rows(
    hidden_TH,
    residual_TH,
    profile_T,
    capture_T,
    table_address,
    point,
    points,
    hidden_size,
    hidden_stride,
    residual_stride,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    profile = tl.load(profile_T + row).to(tl.int64)
    if profile != 0:
        table = tl.load(table_address).to(tl.pointer_type(tl.int64))
        entry = table + (profile * points + point) * 2
        ops = tl.load(entry).to(tl.pointer_type(tl.int64))
        count = tl.load(entry + 1).to(tl.int32)
        if count > 0:
            columns = tl.arange(0, BLOCK)
            inside = columns < hidden_size
            hidden_at = hidden_TH + row * hidden_stride + columns
            stored = tl.load(hidden_at, mask=inside, other=0.0)
            residual_at = residual_TH + row * residual_stride + columns
            if DUAL:
                second = tl.load(residual_at, mask=inside, other=0.0)
                stored = (stored.to(tl.float32) + second.to(tl.float32)).to(stored.dtype)
            h = stored.to(tl.float32)
            added = tl.zeros_like(h)  # the steers' sum, added once
            for i in range(count):
                op = ops + i * 6
                kind = tl.load(op + 2)
                vector_at = tl.load(op).to(tl.pointer_type(tl.float32)) + columns
                scalars = (op + 4).to(tl.pointer_type(tl.float32))
                a = tl.load(scalars)
                if kind == 0:  # capture
                    h += added
                    added = tl.zeros_like(h)
                    base = tl.load(capture_T + row)
                    if base != 0:
                        place = base.to(tl.pointer_type(hidden_TH.dtype.element_ty)) + tl.load(op + 3) + columns
                        tl.store(place, h.to(hidden_TH.dtype.element_ty), mask=inside)
                else:
                    v = tl.load(vector_at, mask=inside, other=0.0)
                    if kind == 1:  # patch
                        weight = tl.zeros_like(h) + a
                        mask_address = tl.load(op + 1)
                        if mask_address != 0:
                            mask_at = mask_address.to(tl.pointer_type(tl.float32)) + columns
                            weight = a * tl.load(mask_at, mask=inside, other=0.0)
                        mixed = (1.0 - weight) * h + weight * v
                        h = tl.where(weight == 1.0, v, tl.where(weight == 0.0, h, mixed))
                    elif kind == 2:  # steer
                        added += a * v
                    elif kind == 3:  # steer, matched to the row's norm
                        added += a * tl.sqrt(tl.sum(h * h)) * v
                    else:  # clamp
                        h += added
                        added = tl.zeros_like(h)
                        along = tl.sum(h * v)
                        wanted = tl.minimum(tl.maximum(along, a), tl.load(scalars + 1))
                        h += tl.load(scalars + 2) * (wanted - along) * v
            edited = (h + added).to(stored.dtype)
            changed = inside & (edited != stored)
            tl.store(hidden_at, edited, mask=changed)
            if DUAL:  # v + 0 is v in every dtype
                tl.store(residual_at, tl.zeros_like(edited), mask=changed)


def edit_rows(
    hidden_TH: torch.Tensor,
    residual_TH: torch.Tensor | None,
    profile_T: torch.Tensor,
    capture_T: torch.Tensor,
    table_address: torch.Tensor,
    point: int,
    points: int,
) -> None:
    """Apply each row's ops at `point` in place.

    Args:
        hidden_TH: `[T, H]`, float32, float16 or bfloat16; the last axis has to be dense.
        residual_TH: the second stream of a dual-stream model; the value is then their sum, rounded to the dtype.
        profile_T: int32, each row's profile.
        capture_T: int64, the address of each row's captured row; 0 for a row of which nothing is kept.
        table_address: int64 `[1]`, where the table `[profiles, points, 2]` lies (address of the ops, their number).
    """
    rows, hidden_size = hidden_TH.shape
    block = triton.next_power_of_2(hidden_size)
    dual = residual_TH is not None
    second = residual_TH if residual_TH is not None else hidden_TH
    _edit_rows[(rows,)](
        hidden_TH,
        second,
        profile_T,
        capture_T,
        table_address,
        point,
        points,
        hidden_size,
        hidden_TH.stride(0),
        second.stride(0),
        DUAL=dual,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
