"""Shards: safetensors files that appear whole or not at all, and are read without being loaded.

They are written here and not by the safetensors library because that takes each tensor in one piece, and all in memory.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from midstream.errors import CaptureError
from midstream.trace.tree import as_bytes

FORMAT = {"format": "midstream captures", "version": "1"}
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGN = 64  # bytes; where the data starts
OPEN_SHARDS = 32  # that a reader holds open; a tensor in use keeps its own shard mapped


def write_shard(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]]) -> int:
    """Write named tensors, each in pieces `[n, ...]` of one dtype (of DTYPES) that follow each other; returns the file's size.

    The file is complete and on the disk when it gets its name, and so is the name when this returns.
    """
    header: dict[str, Any] = {"__metadata__": FORMAT}
    offset = 0
    names = sorted(tensors, key=lambda name: -tensors[name][0].element_size())  # keeps every tensor aligned
    for name in names:
        header[name] = entry = _entry(tensors[name], offset)
        offset = entry["data_offsets"][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                for piece in tensors[name]:
                    file.write(as_bytes(piece).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return 8 + len(text) + offset


def _entry(pieces: Sequence[torch.Tensor], offset: int) -> dict[str, Any]:
    shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]
    size = sum(piece.nbytes for piece in pieces)
    return {"dtype": DTYPES[pieces[0].dtype], "shape": shape, "data_offsets": [offset, offset + size]}


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Shards:
    """Reads tensors of the shards in a directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def tensor(self, shard: str, name: str, size: int, rows: int) -> torch.Tensor:
        """Raises CaptureError if the shard is gone, has not the `size` it was written with, or lacks the tensor."""
        try:
            with self._lock:
                tensor = self._opened(shard, size).get_tensor(name)
        except SafetensorError as error:
            raise CaptureError(f"shard {self._directory / shard} is damaged: {error}") from error
        if tensor.shape[0] != rows:
            raise CaptureError(
                f"shard {self._directory / shard} is damaged: {name} has {tensor.shape[0]} of {rows} rows"
            )
        return tensor

    def _opened(self, shard: str, size: int) -> Any:
        if shard not in self._open:
            path = self._directory / shard
            try:
                there = path.stat().st_size
            except OSError as error:
                raise CaptureError(f"shard {path} cannot be read: {error}") from error
            if there != size:
                raise CaptureError(f"shard {path} is damaged: {there} bytes of {size} are there")
            self._open[shard] = safe_open(path, framework="pt")
        self._open.move_to_end(shard)
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[shard]
