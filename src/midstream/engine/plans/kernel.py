"""The fused site kernel: every edit and capture of one site, for every row of the batch, in one launch.

A row of the batch has a *profile*, the number of what is to be done to it; 0 is nothing, and the row's program ends at once.
The table says for (profile, point) how many ops there are and where they lie. Everything but the table's own address is found
through memory, so that a recorded CUDA graph serves every plan: nothing is recaptured when plans come, go or grow.

In a decode step the launch is all latency: loads that wait for each other. So a table entry holds its first op itself, rows are
loaded before it is known whether they are needed (unless there are many), and what all layers read is asked to stay in the cache.

Legend: T rows of the batch, H hidden.

One op is `tables.OP_WORDS` int64 words: vector's address, mask's address (0 for none), kind, offset in the captured row (elements), and
three float32 `a, b, c` in the last two words. Their meaning is that of `midstream.plan.arithmetic`, the plain PyTorch twin.
A table entry is `tables.ENTRY_WORDS`: the number of ops, the address of all of them, and the first one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FEW_ROWS = 1024


@triton.jit(do_not_specialize=["point", "points"])
def _edit_rows(  # type: ignore[no-untyped-def]
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
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    hidden_at = hidden_TH + row * hidden_stride + columns
    residual_at = residual_TH + row * residual_stride + columns
    profile = tl.load(profile_T + row, eviction_policy="evict_last").to(tl.int64)
    table = tl.load(table_address, eviction_policy="evict_last").to(tl.pointer_type(tl.int64))
    if EARLY:
        stored = tl.load(hidden_at, mask=inside, other=0.0)
        if DUAL:
            second = tl.load(residual_at, mask=inside, other=0.0)
    if profile != 0:
        entry = tl.multiple_of(table + (profile * points + point) * 8, 64)
        count = tl.load(entry, eviction_policy="evict_last").to(tl.int32)
        others = tl.load(entry + 1, eviction_policy="evict_last").to(tl.pointer_type(tl.int64))
        if count > 0:
            if not EARLY:
                stored = tl.load(hidden_at, mask=inside, other=0.0)
                if DUAL:
                    second = tl.load(residual_at, mask=inside, other=0.0)
            if DUAL:
                stored = (stored.to(tl.float32) + second.to(tl.float32)).to(stored.dtype)
            h = stored.to(tl.float32)
            added = tl.zeros_like(h)  # the steers' sum, added once
            for i in range(count):
                op = tl.where(i == 0, entry + 2, others + i * 6)
                kind = tl.load(op + 2, eviction_policy="evict_last")
                vector_at = tl.multiple_of(
                    tl.load(op, eviction_policy="evict_last").to(tl.pointer_type(tl.float32)), 16
                )
                scalars = (op + 4).to(tl.pointer_type(tl.float32))
                a = tl.load(scalars, eviction_policy="evict_last")
                if kind == 0:  # capture
                    h += added
                    added = tl.zeros_like(h)
                    base = tl.load(capture_T + row)
                    if base != 0:
                        place = base.to(tl.pointer_type(hidden_TH.dtype.element_ty)) + tl.load(op + 3) + columns
                        tl.store(place, h.to(hidden_TH.dtype.element_ty), mask=inside)
                else:
                    v = tl.load(vector_at + columns, mask=inside, other=0.0, eviction_policy="evict_last")
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
        table_address: int64 `[1]`, where the table `[profiles, points, tables.ENTRY_WORDS]` lies.
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
        EARLY=rows <= _FEW_ROWS,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
