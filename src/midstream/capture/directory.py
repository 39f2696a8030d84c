"""Writes captures to a directory, and reads them, also while the directory grows.

    captures = open_captures("activations")
    len(captures); list(captures)                      # the complete requests
    captures["0"]["resid_post", 14]                    # tensor [positions, hidden], memory-mapped
    captures["0"].positions["resid_post", 14]
    captures["0"].prompt_token_ids, captures["0"].id
    captures.failed                                    # {request: error}

Files of several writers are merged: each pipeline stage writes its own layers of a request.

A writer is a process that captures. It writes the shards `<writer>-00000.safetensors`, `<writer>-00001.safetensors` and so on, and the
index `index-<writer>.jsonl`: one line per request, with its prompt, and the shard, tensor and positions of each of its planes. Writers
share no files, so any number of engines, and the stages of a pipeline, may write to one directory.

Rows wait in memory until there are `shard_bytes` of them, or until their request has ended and `flush` is called; requests
that end together share a shard. `flush` writes and fsyncs a shard under a temporary name, renames it, fsyncs the directory,
appends the requests' lines to the index and fsyncs that. A request that the index lists therefore survives a crash of
process and machine. A request that the index does not list leaves at most unreferenced rows, or an incomplete last line.
Readers ignore both, and `remove_orphans` removes such rows. A writer holds a lock on its index as long as it lives.

Shards are written here and not by the safetensors library, which takes each tensor in one chunk and all of them in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.listing import Listing, new_lines
from midstream.capture.rows import ByPlane, RowIndex, arrange_rows, plane_name
from midstream.errors import CaptureError, NotCapturedError
from midstream.plan import fields
from midstream.plan.captures import PlaneKey
from midstream.plan.fields import nearest
from midstream.tree import as_bytes

if TYPE_CHECKING:
    from midstream.capture.loading import Loader

_log = logging.getLogger(__name__)
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
_ALIGN = 64  # bytes; where a shard's data starts
_VECTOR = 256  # parts of a file that one call writes
SHARD_BYTES = 256 << 20
CHUNK_BYTES = 512  # overhead of a buffered chunk of rows


@dataclass
class _BufferedRequest:
    """One request: its rows in memory, and the contents of its index line."""

    info: CaptureInfo
    buffer: dict[PlaneKey, list[tuple[list[int], torch.Tensor]]] = field(default_factory=dict)
    size: int = 0
    kinds: dict[PlaneKey, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    positions: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)  # ranges -> their number
    error: Exception | None = None

    def line(self, writer: str) -> bytes:
        line = {
            "request": self.info.request_id,
            "engine": self.info.engine or writer,
            "run": self.info.run,
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
    """Writes to a directory, as the module's docstring describes. Makes the directory if it is missing.

    The consumer `directory`: `Capture(to="acts")` is `Capture(to=Consumer("directory", directory="acts"))`.

    Args:
        shard_bytes: about how many bytes of rows go to a file.
    """

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._shard_bytes = Path(directory), shard_bytes
        self.writer = _new_writer_name()
        self._open: dict[str, _BufferedRequest] = {}
        self._ended: list[_BufferedRequest] = []
        self._size = self._shards = 0
        self._index = self._new_index()

    @property
    def _path(self) -> Path:
        return self._directory / f"index-{self.writer}.jsonl"

    def _new_index(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        index = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks keeps its orphans
            fcntl.flock(index, fcntl.LOCK_EX)
        _append(index, json.dumps(FORMAT).encode() + b"\n")
        sync_directory(self._directory)
        return index

    @property
    def _is_removed(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._index))
        except FileNotFoundError:
            return True

    def begin(self, info: CaptureInfo) -> None:
        if not self._open and not self._ended and self._is_removed:  # for example by a notebook: start again
            self.writer = _new_writer_name()
            old, self._index = self._index, self._new_index()
            os.close(old)
        self._open[info.request_id] = _BufferedRequest(info)

    def rows(
        self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor, when: str = "before"
    ) -> None:
        entry, key = self._open[request_id], (site, layer, when)
        given = tensor.dtype, tensor.shape[1:]
        if given[0] not in DTYPES or entry.kinds.setdefault(key, given) != given:
            kinds = sorted({f"{dtype} {list(shape)}" for dtype, shape in (given, entry.kinds.get(key, given))})
            raise CaptureError(f"rows of {plane_name(key)} cannot be stored as one tensor: {', '.join(kinds)}")
        entry.buffer.setdefault(key, []).append((positions, tensor))
        entry.size += tensor.nbytes + CHUNK_BYTES
        self._size += tensor.nbytes + CHUNK_BYTES
        if self._size >= self._shard_bytes:
            self._write([*self._ended, *self._open.values()])

    def end(self, request_id: str, error: Exception | None) -> None:
        entry = self._open.pop(request_id)
        if error is not None:
            self._drop(entry)
            entry.error = error
        self._ended.append(entry)

    def flush(self) -> None:
        """Write and list all requests that have ended; they are on the disk when this returns."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        try:
            self._write(ended)
            _append(self._index, b"".join(entry.line(self.writer) for entry in ended))
        finally:
            for entry in ended:
                self._drop(entry)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self._index)

    def _drop(self, entry: _BufferedRequest) -> None:
        self._size -= entry.size
        entry.size, entry.buffer = 0, {}

    def _write(self, entries: Iterable[_BufferedRequest]) -> None:
        """Write the rows of these requests to a new shard. If that fails, the rows stay in memory."""
        if self._is_removed:
            raise CaptureError(
                f"{self._directory} was removed while requests were captured to it. Run these requests again."
            )
        named: dict[str, list[torch.Tensor]] = {}
        parts: list[tuple[_BufferedRequest, dict[str, Any]]] = []
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


def _new_writer_name() -> str:
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    # Names sort by time: of a prompt that was run again, the later run counts.
    return f"{started}{nanoseconds // 1000:06}-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove_orphans(directory: Path) -> None:
    """Remove shards of dead writers that no line refers to, and half-written shards.

    Writers of other hosts are left alone: not every shared file system has locks that hold across hosts.
    """
    for path in directory.glob(f"index-*-{_host()}-*.jsonl"):
        with contextlib.suppress(OSError):  # its writer is alive, or the file is not ours
            index = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_unlisted(path)
            finally:
                os.close(index)


def _remove_unlisted(path: Path) -> None:
    writer = path.stem.removeprefix("index-")
    try:
        lines = [json.loads(line) for line in new_lines(path)]
        listed = {part["shard"] for line in lines for part in line.get("parts", ())}
    except (ValueError, AttributeError, TypeError, KeyError):  # an unreadable line may refer to any shard
        return
    for shard in path.parent.glob(f"{writer}-*"):
        if shard.suffix == ".tmp" or (shard.suffix == ".safetensors" and shard.name not in listed):
            shard.unlink(missing_ok=True)


def _append(index: int, lines: bytes) -> None:
    """Append all lines to a file, or none."""
    before = os.fstat(index).st_size
    try:
        _write(index, [lines])
        os.fsync(index)
    except BaseException:
        os.ftruncate(index, before)
        raise


def _write(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write all parts, many with each call: after a call the thread may wait for Python's lock, which an event loop often holds."""
    parts = iter(parts)
    while views := [memoryview(part) for part in islice(parts, _VECTOR)]:
        while views:
            written = os.writev(descriptor, views)
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if written:
                views[0] = views[0][written:]


def _place(entry: _BufferedRequest, key: PlaneKey, named: dict[str, list[torch.Tensor]], name: str) -> list[Any]:
    """Add one plane's rows to the tensors of a shard, in the order of their positions. Returns the plane's entry in the index."""
    chunks = entry.buffer[key]
    arranged = arrange_rows({i: np.asarray(positions, np.int64) for i, (positions, _) in enumerate(chunks)}, None)
    tensors = [chunks[i][1] for i, _ in arranged.parts] or [chunks[0][1]]
    named[name] = tensors if arranged.order is None else [torch.cat(tensors)[torch.from_numpy(arranged.order)]]
    return [*key, entry.positions.setdefault(_runs(arranged.positions), len(entry.positions))]


def _runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open ranges."""
    if not positions.size:
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    firsts, lasts = positions[np.r_[0, cuts]], positions[np.r_[cuts - 1, positions.size - 1]]
    return tuple(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def write_shard(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]]) -> int:
    """Write named tensors, each given as consecutive chunks `[n, ...]` of one dtype of DTYPES. Returns the file's size in bytes.

    The file gets its name when it is complete and fsynced. Then the directory is fsynced.
    """
    size, parts = safetensors_file(tensors, FORMAT)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            _write(file.fileno(), parts)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return size


def safetensors_file(
    tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size in bytes and the parts of a safetensors file. Tensors as for `write_shard`. The parts are made one by one."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    names = sorted(tensors, key=lambda name: -tensors[name][0].element_size())  # keeps every tensor aligned
    for name in names:
        chunks = tensors[name]
        shape = [sum(chunk.shape[0] for chunk in chunks), *chunks[0].shape[1:]]
        begin, end = end, end + sum(chunk.nbytes for chunk in chunks)
        header[name] = {"dtype": DTYPES[chunks[0].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    data = (as_bytes(chunk).numpy().data for name in names for chunk in tensors[name])
    return 8 + len(text) + end, chain([struct.pack("<Q", len(text)) + text], data)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


OPEN_SHARDS = 32  # kept open by a reader; a tensor in use keeps its own shard mapped


def open_captures(directory: str | Path) -> Store:
    """The captures in a directory, including those of engines that are still writing.

    Raises CaptureError if nothing has captured to this directory.
    """
    return Store(directory)


@dataclass
class _StoredRequest:
    """One request: one index line for each stage that has written it."""

    request: str
    engine: str
    run: str
    number: int  # from 0, among requests of the same id
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by stage

    @property
    def collected(self) -> Collected | None:
        """For a request of `model.collect`."""
        given = next(iter(self.lines.values())).get("collected")
        return None if given is None else Collected(**given)

    @property
    def error(self) -> str | None:
        return next((line["error"] for line in self.lines.values() if line["error"]), None)

    @property
    def missing(self) -> list[int]:
        """Stages that have not written yet."""
        stages = next(iter(self.lines.values()))["stage"][1]
        return [stage for stage in range(stages) if stage not in self.lines]


@dataclass(frozen=True)
class _StoredChunk:
    shard: str
    name: str
    size: int  # bytes of the shard
    positions: np.ndarray


class ShardReader:
    """Reads memory-mapped tensors of the shards in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:  # for the workers of a DataLoader
        return ShardReader, (self._directory,)

    def tensor(self, shard: str, name: str, size: int, rows: int) -> torch.Tensor:
        """One tensor. Raises CaptureError if the shard is missing, has another `size` in bytes, or lacks the tensor."""
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
                actual = path.stat().st_size
            except OSError as error:
                raise CaptureError(f"shard {path} cannot be read: {error}") from error
            if actual != size:
                raise CaptureError(f"shard {path} is damaged: {actual} bytes of {size} are there")
            self._open[shard] = safe_open(path, framework="pt")
        self._open.move_to_end(shard)
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[shard]


class StoredCapture(ByPlane[torch.Tensor]):
    """One request's captures: `capture["resid_post", 14]` is a tensor `[positions, hidden]`, rows in order of position.

    A tensor is mapped from the file, so it takes memory only as it is read; writing to it does not change the file.

    Attributes:
        request_id, engine: the request's id, and the engine that ran it.
        id: the prompt's id if `model.collect` ran it, else None.
        prompt_token_ids, prompt_length: the prompt.
    """

    def __init__(self, name: str, record: _StoredRequest, shards: ShardReader) -> None:
        chunks: dict[PlaneKey, list[_StoredChunk]] = {}
        for line in record.lines.values():
            _collect(line, chunks)
        super().__init__(
            f"stored capture of request {name!r}", sorted(chunks, key=lambda key: (key[0], key[1], key[2] != "before"))
        )
        self._chunks, self._shards = chunks, shards
        self._arranged: dict[PlaneKey, RowIndex] = {}
        line = next(iter(record.lines.values()))
        self.request_id, self.engine = record.request, record.engine
        self.id = record.collected.id if record.collected is not None else None
        self.prompt_token_ids: list[int] = line["prompt_token_ids"].tolist()
        self.prompt_length: int = line["prompt_length"]

    @property
    def positions(self) -> ByPlane[list[int]]:
        """The positions of each tensor's rows, under the same keys."""
        return ByPlane(self._what, self._planes, lambda key: self._arrange(key).positions.tolist())

    def _arrange(self, key: PlaneKey) -> RowIndex:
        if key not in self._arranged:
            positions = {i: chunk.positions for i, chunk in enumerate(self._chunks[key])}
            self._arranged[key] = arrange_rows(positions, f"{self._what}, {plane_name(key)}")
        return self._arranged[key]

    def _value(self, key: PlaneKey) -> torch.Tensor:
        chunks, arranged = self._chunks[key], self._arrange(key)
        chosen = [chunks[i] for i, _ in arranged.parts] or chunks[:1]
        tensors = [self._shards.tensor(chunk.shard, chunk.name, chunk.size, chunk.positions.size) for chunk in chosen]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return tensor if arranged.order is None else tensor[torch.from_numpy(arranged.order)]


def _collect(line: Mapping[str, Any], chunks: dict[PlaneKey, list[_StoredChunk]]) -> None:
    positions = [
        np.concatenate([np.empty(0, np.int64), *(np.arange(*run) for run in runs)]) for runs in line["positions"]
    ]
    for part in line["parts"]:
        for site, layer, when, number in part["planes"]:
            name = f"{part['prefix']}/{site}/{layer}/{when}"
            chunk = _StoredChunk(part["shard"], name, part["bytes"], positions[number])
            chunks.setdefault((site, layer, when), []).append(chunk)


class Store(Mapping[str, StoredCapture]):
    """The complete requests in a directory of captures, by request id.

    It lists the requests that were complete at the last `refresh`, or when it was opened. Asking for another request refreshes it.
    Requests of `model.collect` are listed by the prompt's id. If several engines used one request id, the requests are named
    `id@engine`; if one engine used it again, `id#2`.

    Args:
        only: the names to list, in this order; None for all, in the order in which each writer wrote them.
        listing: a refreshed `Listing` of the directory. Given with `only`, the store reads only the index lines of those names.

    Attributes:
        bad: in a store from `collect`, the reason for each prompt that was left out or cut, by the number of the prompt.
    """

    bad: Mapping[int, str] = MappingProxyType({})

    def __init__(
        self, directory: str | Path, only: Sequence[str] | None = None, listing: Listing | None = None
    ) -> None:
        self._directory, self._only = Path(directory).expanduser(), only
        self._shards = ShardReader(self._directory)
        self._lock = threading.Lock()
        self._read: dict[str, int] = {}  # how many bytes of each index have been read
        self._counts: Counter[tuple[str, str, str, int]] = Counter()  # lines by engine, request, run and stage
        self._numbers: Counter[tuple[str, str]] = Counter()  # requests by engine and id
        self._records: dict[tuple[str, str, str, int], _StoredRequest] = {}
        self._names: dict[str, _StoredRequest] = {}
        self._is_fixed = False
        if listing is not None and only is not None:
            self._read = {path.name: size for path, size in listing.read.items()}
            for path, line in listing.lines(only):
                self._add(path, line)
            self._name()
        else:
            self.refresh()
        if not self._read:
            raise CaptureError(f"{self._directory} holds no captures: there is no index-*.jsonl in it")

    @property
    def failed(self) -> dict[str, str]:
        """The error of each request whose capture failed."""
        return {name: record.error for name, record in self._names.items() if record.error}

    def fixed(self) -> Store:
        """A copy that keeps listing the present requests, whatever is written later."""
        store = copy(self)
        store._names = {name: record for name, record in self._names.items() if _readable(record)}
        store._records, store._counts, store._numbers, store._is_fixed = {}, Counter(), Counter(), True
        return store

    def places(self, name: str) -> list[str]:
        """Where the rows of a request are. Two runs of the same name have different places."""
        lines = sorted(self._names[name].lines.items())
        return [f"{part['shard']} {part['prefix']}" for _, line in lines for part in line["parts"]]

    def count(self, name: str, planes: Sequence[PlaneKey]) -> int:
        """How many rows a request has of each of these planes; 0 if it has none of them. Raises CaptureError if their positions differ."""
        found: dict[PlaneKey, list[list[int]]] = {}
        for line in self._names[name].lines.values():
            for part in line["parts"]:
                for *key, number in part["planes"]:
                    found.setdefault(tuple(key), []).extend(line["positions"][number])  # type: ignore[arg-type]
        each = [sorted(found.get(key, ())) for key in planes]
        if any(runs != each[0] for runs in each):
            capture = self[name]
            positions = [capture.positions[key] if key in capture else None for key in planes]
            if any(one != positions[0] for one in positions):
                wanted = ", ".join(map(plane_name, planes))
                raise CaptureError(f"The capture of request {name!r} has rows at other positions for each of {wanted}.")
        return sum(stop - start for start, stop in each[0])

    def loader(
        self,
        site: str | Sequence[str],
        layer: int | Sequence[int] | None = None,
        *,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        workers: int = 0,
        with_context: bool = False,
        when: str = "before",
        dtype: torch.dtype | None = None,
        buffer_rows: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Loader:
        """Batches of rows for training, mixed over requests: `next(loader)`, or a loop.

        Args:
            site, layer: of the rows. With a list of either, a batch is a dict by (site, layer) of rows of the same tokens. A site may be a
                hook of TransformerLens with its layer: `"blocks.14.hook_resid_post"`.
            batch_size: rows of a batch.
            shuffle: whether rows come in random order: requests in random order, and rows mixed within buffers of `buffer_rows`.
            seed: another seed gives another order. Each epoch has another order, too.
            epochs: passes over all rows, each with a shorter batch at its end if need be. None: endless.
            workers: how many threads read ahead; the batches stay the same. With 0, a batch is read when you ask for it.
            with_context: whether batches are `Batch`: rows, token ids, positions and numbers of requests.
            when: "before" or "after" the edits of the plan that captured.
            dtype: the dtype of the batches; None keeps that of the rows.
            buffer_rows: rows in memory that are mixed with each other: 16 batches if None. Twice as many with `workers`.
            rank, world_size: for training on several processes: each gets other requests.

        Returns:
            a `Loader`, whose `state_dict()` and `load_state_dict(state)` resume it. It gives the rows that this store lists now: if a
            prompt is run again meanwhile, only later loaders have its new rows.

        Raises:
            CaptureError: no request has such rows, or one has them at different positions for each site.
            PlanError: an argument is not allowed.
        """
        from midstream.capture.loading import Asked, Loader

        asked = Asked.of(site, layer, when, batch_size, buffer_rows, shuffle, seed, with_context)
        size = fields.integer("world_size", world_size, 1)
        if fields.integer("rank", rank, 0) >= size:
            raise fields.refuse("rank", str(rank), f"from 0 to {size - 1}")
        epochs = None if epochs is None else fields.integer("epochs", epochs, 1)
        return Loader(self, asked, epochs, fields.integer("workers", workers, 0), dtype, (rank, size))

    def to_arrow(
        self,
        path: str | Path,
        site: str | Sequence[str],
        layer: int | Sequence[int] | None = None,
        *,
        context_size: int,
        when: str = "before",
    ) -> int:
        """Write rows as SAELens caches activations, for its `ActivationsStore(cached_activations_path=path)`: a Hugging Face dataset.

        Each of its rows is a context: `context_size` rows of one request under the hook's name (`blocks.14.hook_resid_post`), and their
        `token_ids`. Rows of a request that do not fill a context are left out. bfloat16 becomes float32.

        Args:
            path: a directory that is new or empty.
            site, layer, when: as in `loader`.

        Returns:
            the number of contexts.

        Raises:
            CaptureError: `path` has files, no request has a context, or a context has generated tokens, whose ids are unknown.
            PlanError: an argument is not allowed.
            MidstreamError: the package `datasets` is missing.
        """
        from midstream.capture.loading import Asked
        from midstream.capture.saelens import write_arrow

        asked = Asked.of(site, layer, when, 1, None, False, 0, False)
        return write_arrow(self, Path(path).expanduser(), asked, context_size)

    def refresh(self) -> None:
        """Read the new lines of each index. Any thread may call."""
        with self._lock:
            self._refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _refresh(self) -> None:
        if self._is_fixed:
            return
        for path in sorted(self._directory.glob("index-*.jsonl")):
            for line in new_lines(path, self._read.setdefault(path.name, 0)):
                self._add(path, line[:-1])
                self._read[path.name] += len(line)
        self._name()

    def __getitem__(self, request_id: str | int) -> StoredCapture:
        request_id = str(request_id)
        record = self._names.get(request_id)
        if record is None or not _readable(record):
            self.refresh()
            record = self._names.get(request_id)
        if record is None:
            if self._only is not None and request_id in Store(self._directory):
                raise NotCapturedError(
                    f"{request_id!r} is not among the prompts of this call of collect. Use open_captures({str(self._directory)!r})."
                )
            raise NotCapturedError(f"{self._directory} has no request {request_id!r}: {self._near(request_id)}")
        if record.error:
            raise CaptureError(f"the capture of request {request_id!r} failed: {record.error}")
        if record.missing:
            stages = next(iter(record.lines.values()))["stage"][1]
            text = f"of {stages} pipeline stages, {record.missing} have not written it (numbers from 0)"
            raise CaptureError(f"the capture of request {request_id!r} is not complete: {text}")
        return StoredCapture(request_id, record, self._shards)

    def __contains__(self, request_id: object) -> bool:
        record = self._names.get(str(request_id))
        return record is not None and _readable(record)

    def __iter__(self) -> Iterator[str]:
        return (name for name, record in self._names.items() if _readable(record))

    def __len__(self) -> int:
        return sum(map(_readable, self._names.values()))

    def __repr__(self) -> str:
        return f"<captures of {len(self)} requests in {self._directory}>"

    def _add(self, path: Path, text: bytes) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            return _log.warning("%s: an unreadable line is ignored: %r", path, text[:80])
        if "format" in line:
            if line != FORMAT:
                raise CaptureError(f"{path} was written by another version of midstream: {line}, not {FORMAT}")
            return None
        engine, request, run, (stage, _) = line["engine"], line["request"], line.get("run", ""), line["stage"]
        key = engine, request, run, self._counts[engine, request, run, stage]
        self._counts[engine, request, run, stage] += 1
        if (record := self._records.get(key)) is None:
            record = self._records[key] = _StoredRequest(request, engine, run, self._numbers[engine, request])
            self._numbers[engine, request] += 1
        line["prompt_token_ids"] = np.array(line["prompt_token_ids"], np.int32)  # an eighth of a list's memory
        record.lines[stage] = line
        return None

    def _name(self) -> None:
        names: dict[str, _StoredRequest] = {}
        others: list[_StoredRequest] = []
        for record in self._records.values():
            if (collected := record.collected) is None:
                others.append(record)
            elif _readable(record) or not _readable(names.get(collected.id)):  # it was run again
                names[collected.id] = record
        engines: dict[str, set[str]] = {}
        for record in others:
            engines.setdefault(record.request, set()).add(record.engine)
        for record in others:
            name = record.request if len(engines[record.request]) == 1 else f"{record.request}@{record.engine}"
            name = name if record.number == 0 else f"{name}#{record.number + 1}"
            while name in names:  # a user's own id looks like this
                name += "'"
            names[name] = record
        if self._only is not None:
            names = {name: names[name] for name in self._only if name in names}
        self._names = names

    def _near(self, request_id: str) -> str:
        several = sorted(
            name for name, record in self._names.items() if record.request == request_id and not record.collected
        )
        if several:
            return f"several engines wrote one, so ask for {' or '.join(map(repr, several))}"
        return nearest(str(request_id), islice(self._names, 20_000))  # the comparison is slow


def _readable(record: _StoredRequest | None) -> bool:
    return record is not None and not record.error and not record.missing
