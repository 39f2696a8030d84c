"""The consumer that writes captures to a directory, which `store.open_captures` reads, also while it grows.

In the directory lie, for each writer (a process that captures; its name says which), `<writer>-00000.safetensors` and on,
and `index-<writer>.jsonl`: one line per request, with its prompt, and the shard, tensor and positions of each of its planes.
Writers share nothing, so any number of engines, and the stages of a pipeline, may write to one directory.

Rows wait in memory until there are `shard_bytes` of them, or until their request has ended and `flush` asks for it; requests
that end together share a shard. `flush` writes and fsyncs a shard under another name, renames it, fsyncs the directory, then
appends the requests' lines to the index and fsyncs that. So a request that the index lists survives a crash of process and
machine; one that it does not list yet leaves at most rows that nothing refers to, or a last line without its end, and
readers pass over both. `remove_orphans` removes such rows. A writer holds a lock on its index for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream.capture.consumers import CaptureInfo
from midstream.capture.segment import arrange, describe
from midstream.capture.shards import DTYPES, FORMAT, sync_directory, write_shard
from midstream.errors import CaptureError
from midstream.plan.layout import Key

SHARD_BYTES = 256 << 20
PIECE_BYTES = 512  # what a piece of rows costs beside its numbers


@dataclass
class _Entry:
    """One request: what is still in memory of it, and what its line will say."""

    info: CaptureInfo
    buffer: dict[Key, list[tuple[list[int], torch.Tensor]]] = field(default_factory=dict)
    size: int = 0
    kinds: dict[Key, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    positions: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)  # runs of positions, numbered
    error: Exception | None = None
    lost: bool = False  # with the directory that its rows were in, and nobody has been told

    def line(self, writer: str) -> bytes:
        line = {
            "request": self.info.request_id,
            "engine": self.info.engine or writer,
            "stage": self.info.stage,
            "prompt_token_ids": self.info.prompt_token_ids,
            "prompt_length": self.info.prompt_length,
            "collected": None if self.info.collected is None else asdict(self.info.collected),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "positions": list(self.positions),
            "parts": [] if self.error else self.parts,
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


class DirectorySink:
    """See the module. Makes the directory if it is not there."""

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._shard_bytes = Path(directory), shard_bytes
        self.writer = _new_name()
        self._open: dict[str, _Entry] = {}
        self._ended: list[_Entry] = []
        self._size = self._shards = 0
        self._index = self._new_index()

    @property
    def _path(self) -> Path:
        return self._directory / f"index-{self.writer}.jsonl"

    def _new_index(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        index = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # not every file system has locks; orphans stay there
            fcntl.flock(index, fcntl.LOCK_EX)
        _append(index, json.dumps(FORMAT).encode() + b"\n")
        sync_directory(self._directory)
        return index

    def _find_directory(self, ended: Iterable[_Entry]) -> None:
        """Begin anew if the directory was removed. Of requests, open or `ended`, of which rows were in it, nothing is kept."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._index)):
                return
        except FileNotFoundError:
            pass
        self.writer = _new_name()
        old, self._index = self._index, self._new_index()
        os.close(old)
        for entry in [*ended, *self._open.values()]:
            if entry.parts:
                self._drop(entry)
                entry.parts, entry.lost = [], True
                entry.error = CaptureError(f"{self._directory} was removed, with rows that were in it already")

    def begin(self, info: CaptureInfo) -> None:
        self._open[info.request_id] = _Entry(info)

    def rows(
        self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor, when: str = "before"
    ) -> None:
        entry, key = self._open[request_id], (site, layer, when)
        given = tensor.dtype, tensor.shape[1:]
        if given[0] not in DTYPES or entry.kinds.setdefault(key, given) != given:
            kinds = sorted({f"{dtype} {list(shape)}" for dtype, shape in (given, entry.kinds.get(key, given))})
            raise CaptureError(f"rows of {describe(key)} cannot be stored as one tensor: {', '.join(kinds)}")
        entry.buffer.setdefault(key, []).append((positions, tensor))
        entry.size += tensor.nbytes + PIECE_BYTES
        self._size += tensor.nbytes + PIECE_BYTES
        if self._size >= self._shard_bytes:
            self._find_directory(self._ended)
            self._write([*self._ended, *self._open.values()])

    def end(self, request_id: str, error: Exception | None) -> None:
        entry = self._open.pop(request_id)
        if error is not None:
            self._drop(entry)
            entry.error = error
        self._ended.append(entry)
        lost, entry.lost = entry.lost, False
        if lost and error is None and entry.error is not None:
            raise entry.error

    def flush(self) -> None:
        """Everything that has ended is on the disk, and listed, when this returns."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        try:
            self._find_directory(ended)
            self._write(ended)
            _append(self._index, b"".join(entry.line(self.writer) for entry in ended))
            for entry in ended:
                if entry.lost and entry.error is not None:
                    raise entry.error
        finally:
            for entry in ended:
                self._drop(entry)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self._index)

    def _drop(self, entry: _Entry) -> None:
        self._size -= entry.size
        entry.size, entry.buffer = 0, {}

    def _write(self, entries: Iterable[_Entry]) -> None:
        """Write what these requests have in memory to a shard of its own. If that fails, memory is as it was."""
        named: dict[str, list[torch.Tensor]] = {}
        parts: list[tuple[_Entry, dict[str, Any]]] = []
        for entry in entries:
            if entry.buffer:
                prefix = f"{len(parts)}:{entry.info.request_id}"  # a request id may occur twice
                planes = [
                    _place(entry, key, named, f"{prefix}/{'/'.join(map(str, key))}") for key in sorted(entry.buffer)
                ]
                parts.append((entry, {"prefix": prefix, "planes": planes}))
        if not parts:
            return
        shard = f"{self.writer}-{self._shards:05d}.safetensors"
        size = write_shard(self._directory / shard, named)
        self._shards += 1
        for entry, part in parts:
            entry.parts.append({"shard": shard, "bytes": size, **part})
            self._drop(entry)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", socket.gethostname())


def _new_name() -> str:
    """For one that writes to a directory, beside others."""
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())  # so that names sort by time
    return f"{started}-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove_orphans(directory: Path) -> None:
    """Remove the shards of dead writers that no line refers to, and those that are half written.

    Writers of other hosts are left alone: not every shared file system has locks that hold across hosts.
    """
    for path in directory.glob(f"index-*-{_host()}-*.jsonl"):
        with contextlib.suppress(OSError):  # its writer lives, or it is somebody else's
            index = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_unlisted(path)
            finally:
                os.close(index)


def _remove_unlisted(path: Path) -> None:
    writer = path.stem.removeprefix("index-")
    whole = path.read_bytes().rpartition(b"\n")[0]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        listed = {part["shard"] for line in lines for part in line.get("parts", ())}
    except (ValueError, AttributeError, TypeError, KeyError):  # what cannot be read may refer to any of them
        return
    for shard in path.parent.glob(f"{writer}-*"):
        if shard.suffix == ".tmp" or (shard.suffix == ".safetensors" and shard.name not in listed):
            shard.unlink(missing_ok=True)


def _append(index: int, lines: bytes) -> None:
    """Append to a file, whole lines or nothing."""
    before = os.fstat(index).st_size
    try:
        view = memoryview(lines)
        while view:
            view = view[os.write(index, view) :]
        os.fsync(index)
    except BaseException:
        os.ftruncate(index, before)
        raise


def _place(entry: _Entry, key: Key, named: dict[str, list[torch.Tensor]], name: str) -> list[Any]:
    """Enter one plane's rows as a tensor of the shard, in the order of their positions; returns its row of the index."""
    pieces = entry.buffer[key]
    arranged = arrange([np.asarray(positions, np.int64) for positions, _ in pieces], None)
    tensors = [pieces[i][1] for i in arranged.pieces] or [pieces[0][1]]
    named[name] = tensors if arranged.order is None else [torch.cat(tensors)[torch.from_numpy(arranged.order)]]
    return [*key, entry.positions.setdefault(_runs(arranged.positions), len(entry.positions))]


def _runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open ranges."""
    if not positions.size:
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    firsts, lasts = positions[np.r_[0, cuts]], positions[np.r_[cuts - 1, positions.size - 1]]
    return tuple(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))
