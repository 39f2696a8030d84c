"""The fused site kernel: every edit and capture of one site, for every row of the batch, in one launch.

Each row of the batch has a *profile*: the number of a list of ops. Profile 0 has no ops, and the kernel's program for such a row ends at
once. For each (profile, point), the table has the number of ops and their address. The kernel reads everything but the table's own address
from memory. So a recorded CUDA graph serves every plan, and nothing is recaptured when plans come, go or grow.

In a decode step, the launch takes the time of loads that wait for each other. So a table entry contains its first op, and the kernel asks
the GPU to keep in its cache the data that all layers read. On NVIDIA's Hopper and later, a program may start before the previous kernel has
ended, and load its row's first op and vector meanwhile (programmatic dependent launch; `MIDSTREAM_EARLY_LAUNCH=0` turns it off). After an
all-reduce, which never lets the next kernel begin early, this was measured to cost 0.3 microseconds and gain nothing. After a matrix
product it gains 2 microseconds.

Legend: T rows of the batch, H hidden.

One op is `tables.OP_WORDS` int64 words: vector's address, mask's address (0 for none), kind, offset in the captured row (elements), and
three float32 `a, b, c` in the last two words. The `kernel` of an edit's class in `midstream.plan.ops` is a Triton function that uses these
numbers; `_make_edit` puts the kinds together. `midstream.plan.ops.edit.edited` is the same in plain PyTorch.
A table entry is `tables.ENTRY_WORDS` words: the number of ops, the address of all ops, and the first op.
"""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Hashable
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl

from midstream.plan.ops.edit import kernel_codes, kind_of

FEW_ROWS = 1024  # in batches of at most so many rows, a row is loaded before it is known whether it is needed


@triton.jit
def _op_at(op):  # type: ignore[no-untyped-def]
    """Addresses of the vector and the mask, kind, offset, a, b, c."""
    vector = tl.load(op, eviction_policy="evict_last")
    mask = tl.load(op + 1, eviction_policy="evict_last")
    kind = tl.load(op + 2, eviction_policy="evict_last")
    offset = tl.load(op + 3, eviction_policy="evict_last")
    scalars = (op + 4).to(tl.pointer_type(tl.float32))
    a = tl.load(scalars, eviction_policy="evict_last")
    b = tl.load(scalars + 1, eviction_policy="evict_last")
    c = tl.load(scalars + 2, eviction_policy="evict_last")
    return vector, mask, kind, offset, a, b, c


@triton.jit
def _vector_at(address, columns, hidden_size):  # type: ignore[no-untyped-def]
    """The vector, or zeros where there is none."""
    at = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + columns
    return tl.load(at, mask=columns < tl.where(address != 0, hidden_size, 0), other=0.0, eviction_policy="evict_last")


@triton.jit
def _streams_at(hidden_at, residual_at, inside, DUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of both streams; a single stream is returned twice."""
    hidden = tl.load(hidden_at, mask=inside, other=0.0)
    residual = hidden
    if DUAL:
        residual = tl.load(residual_at, mask=inside, other=0.0)
    return hidden, residual


def _make_edit() -> Any:
    """One function of Triton's that applies an edit of any kind to a row: `(kind, h, added, v, w, a, b, c) -> (h, added)`."""
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__}
    lines = ["def edit(kind, h, added, v, w, a, b, c):"]
    for kind, code in kernel_codes().items():
        if kind == "capture":
            continue
        cls = kind_of(kind)
        assert cls.kernel is not None
        own = FunctionType(cls.kernel.__code__, {**cls.kernel.__globals__, "tl": tl})
        scope[f"_{kind}"] = triton.jit(own)
        lines.append(f"    {'if' if len(lines) == 1 else 'elif'} kind == {code}:")
        if cls.adds:
            lines.append(f"        added += _{kind}(h, v, w, a, b, c)")
        else:
            lines.append("        h += added")
            lines.append("        added = tl.zeros_like(h)")
            lines.append(f"        h = _{kind}(h, v, w, a, b, c)")
    lines.append("    return h, added")
    name = "<edits of midstream>"
    source = [f"{line}\n" for line in lines]
    linecache.cache[name] = (sum(map(len, source)), None, source, name)  # where Triton looks for a function's source
    exec(compile("".join(source), name, "exec"), scope)
    return triton.jit(scope["edit"])


_edit = _make_edit()


@triton.jit(do_not_specialize=["point", "points"])
def _edit_rows(  # type: ignore[no-untyped-def]
    hidden_TH,
    residual_TH,
    profile_T,
    capture_T,
    overflow_T,
    table_address,
    point,
    points,
    hidden_size,
    hidden_stride,
    residual_stride,
    DUAL: tl.constexpr,
    FEW: tl.constexpr,  # there are few rows: each is loaded before it is known whether it is needed
    DEPENDENT: tl.constexpr,  # launched while the previous kernel may still run
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    hidden_at = hidden_TH + row * hidden_stride + columns
    residual_at = residual_TH + row * residual_stride + columns
    profile = tl.load(profile_T + row, eviction_policy="evict_last").to(tl.int64)
    table = tl.load(table_address, eviction_policy="evict_last").to(tl.pointer_type(tl.int64))
    if FEW and not DEPENDENT:
        hidden, residual = _streams_at(hidden_at, residual_at, inside, DUAL)
    entry = tl.multiple_of(table + (profile * points + point) * 8, 64)  # profile 0 has entries without ops
    count = tl.load(entry, eviction_policy="evict_last").to(tl.int32)
    others = tl.load(entry + 1, eviction_policy="evict_last").to(tl.pointer_type(tl.int64))
    vector, mask, kind, offset, a, b, c = _op_at(entry + 2)
    v = _vector_at(vector, columns, hidden_size)
    if DEPENDENT:
        # Everything loaded above was written before the previous kernel began: see `tables.DeviceTables`. Every program must wait here,
        # because the next kernel waits only for this kernel, not for the previous one.
        tl.extra.cuda.gdc_wait()
        if FEW:
            hidden, residual = _streams_at(hidden_at, residual_at, inside, DUAL)
    if count > 0:
        if not FEW:
            hidden, residual = _streams_at(hidden_at, residual_at, inside, DUAL)
        stored = hidden
        if DUAL:
            stored = (hidden.to(tl.float32) + residual.to(tl.float32)).to(hidden.dtype)
        h = stored.to(tl.float32)
        added = tl.zeros_like(h)  # the steers' sum, added once
        edits = 0
        for i in range(count):
            if i > 0:
                vector, mask, kind, offset, a, b, c = _op_at(others + i * 6)
                v = _vector_at(vector, columns, hidden_size)
            edits += (kind != 0).to(tl.int32)
            if kind == 0:  # capture
                h += added
                added = tl.zeros_like(h)
                base = tl.load(capture_T + row)
                if base != 0:
                    place = base.to(tl.pointer_type(hidden_TH.dtype.element_ty)) + offset + columns
                    tl.store(place, h.to(hidden_TH.dtype.element_ty), mask=inside)
            else:
                w = tl.full(h.shape, 1.0, tl.float32)
                if mask != 0:
                    w = _vector_at(mask, columns, hidden_size)
                h, added = _edit(kind, h, added, v, w, a, b, c)
        if edits > 0:
            edited = (h + added).to(stored.dtype)
            changed = edited != stored
            # Lanes without an infinity or a NaN store nothing. The earliest point has the largest number, so the maximum keeps it.
            size = tl.abs(edited.to(tl.float32))
            tl.atomic_max(
                overflow_T + row + columns * 0, points - point, mask=inside & ((size != size) | (size == float("inf")))
            )
            # Unchanged elements are written back too: stores of single elements take several times as long.
            tl.store(hidden_at, tl.where(changed, edited, hidden), mask=inside)
            if DUAL:  # v + 0 is v in every dtype
                tl.store(residual_at, tl.where(changed, tl.zeros_like(residual), residual), mask=inside)


@functools.cache
def _launches_dependent(device: torch.device) -> bool:
    """Whether the device supports dependent launches and they are not turned off."""
    wanted = os.environ.get("MIDSTREAM_EARLY_LAUNCH", "1") != "0" and not os.environ.get("TRITON_INTERPRET")
    able = device.type == "cuda" and torch.version.cuda is not None and hasattr(tl.extra.cuda, "gdc_wait")
    return wanted and able and torch.cuda.get_device_capability(device) >= (9, 0)


# Compiled kernels, by everything that Triton specialises them for. All their pointers are multiples of 16.
_compiled: dict[Hashable, Any] = {}


def edit_rows(
    hidden_TH: torch.Tensor,
    residual_TH: torch.Tensor | None,
    profile_T: torch.Tensor,
    capture_T: torch.Tensor,
    overflow_T: torch.Tensor,
    table_address: torch.Tensor,
    point: int,
    points: int,
    early: bool = True,
) -> None:
    """Apply each row's ops at `point` in place.

    Args:
        hidden_TH: `[T, H]`, float32, float16 or bfloat16; the last axis has to be dense.
        residual_TH: the second stream of a dual-stream model; the value is then their sum, rounded to the dtype.
        profile_T: int32, each row's profile.
        capture_T: int64, the address of each row's captured row; 0 for a row of which nothing is kept.
        overflow_T: int32, gets `points - point` for the first point whose edit makes the row infinite or NaN. `take_overflow` reads it.
        table_address: int64 `[1]`, where the table `[profiles, points, tables.ENTRY_WORDS]` lies.
        early: whether the kernel may start before the previous kernel has ended, on devices that support this.
    """
    rows, hidden_size = hidden_TH.shape
    second = residual_TH if residual_TH is not None else hidden_TH
    few, dependent = rows <= FEW_ROWS, early and _launches_dependent(hidden_TH.device)
    block = triton.next_power_of_2(hidden_size)
    tensors = (hidden_TH, second, profile_T, capture_T, overflow_T, table_address)
    shape = (hidden_size, hidden_TH.stride(0), second.stride(0), residual_TH is not None, few, dependent, block)
    low_bits = 0
    for tensor in tensors:
        low_bits |= tensor.data_ptr() % 16
    key = (
        (hidden_TH.device, hidden_TH.dtype, second.dtype, shape) if not low_bits and torch.version.hip is None else None
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[rows, 1, 1](*tensors, point, points, *shape)  # takes half the time of Triton's own launch
        return
    warps = min(max(block // (128 if few else 256), 1), 32 if dependent else 16)
    options = {"launch_pdl": True} if dependent else {}
    compiled = _edit_rows[(rows,)](*tensors, point, points, *shape, num_warps=warps, **options)
    if compiled is not None and key is not None:  # Triton's interpreter returns None
        _compiled[key] = compiled


@triton.jit
def _store_rows(words_RW, address_R, offset_R, width, stride, words_each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(address_R + row)
    offset = tl.load(offset_R + row).to(tl.int64)
    if (base != 0) & (offset >= 0):
        place = base.to(tl.pointer_type(words_RW.dtype.element_ty)) + offset * words_each
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            words = tl.load(words_RW + row * stride + columns, mask=columns < width)
            tl.store(place + columns, words, mask=columns < width)


def store_rows(values_RW: torch.Tensor, address_R: torch.Tensor, offset_R: torch.Tensor) -> None:
    """Write each row to its captured row.

    Args:
        values_RW: in the dtype of captured rows.
        address_R: int64, of the captured row; 0 for a row of which nothing is kept.
        offset_R: where in the captured row, in elements; -1 for nowhere.
    """
    words_RW = values_RW.contiguous().view(torch.int16)
    rows, width = words_RW.shape
    _store_rows[(rows,)](
        words_RW, address_R, offset_R, width, words_RW.stride(0), values_RW.element_size() // 2, BLOCK=1024
    )


@triton.jit
def _take_overflow(hidden_TH, overflow_T, codes_T, points, hidden_size, hidden_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    value = tl.load(hidden_TH + row * hidden_stride + columns, mask=columns < hidden_size, other=0.0)
    size = tl.abs(value.to(tl.float32))
    elsewhere = tl.max(((size != size) | (size == float("inf"))).to(tl.int32))
    seen = tl.load(overflow_T + row)
    tl.store(overflow_T + row, 0)
    tl.store(codes_T + row, tl.where(seen > 0, 1 + points - seen, -elsewhere))


def take_overflow(hidden_TH: torch.Tensor, overflow_T: torch.Tensor, points: int) -> torch.Tensor:
    """int32 `[T]`, the codes of `Tables.take_overflow`, from what `edit_rows` wrote to `overflow_T` and the rows at the end of the forward.

    Clears `overflow_T`.

    Args:
        hidden_TH: `[T, H]`, the last axis dense.
        overflow_T: int32, at least `T`.
        points: how many points there are.
    """
    rows, hidden_size = hidden_TH.shape
    codes_T = torch.empty(rows, dtype=torch.int32, device=hidden_TH.device)
    block = triton.next_power_of_2(hidden_size)
    _take_overflow[(rows,)](hidden_TH, overflow_T, codes_T, points, hidden_size, hidden_TH.stride(0), BLOCK=block)
    return codes_T
