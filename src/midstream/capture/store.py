"""Reads the captures in a directory.

    captures = open_captures("activations")
    len(captures); list(captures)                      # the complete requests
    captures["0"]["resid_post", 14]                    # tensor [positions, hidden], memory-mapped
    captures["0"].positions["resid_post", 14]
    captures["0"].prompt_token_ids, captures["0"].id
    captures.failed                                    # {request: error}

Files of several writers are merged: each pipeline stage writes its own layers of a request. `directory` describes the files.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from midstream.capture.consumers import Collected
from midstream.capture.directory import FORMAT
from midstream.capture.rows import Arranged, ByPlane, CapturedPositions, NotCapturedError, arrange, describe
from midstream.errors import CaptureError
from midstream.plan.captures import Key
from midstream.plan.fields import nearest

_log = logging.getLogger(__name__)
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
class _StoredPiece:
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

    def tensor(self, shard: str, name: str, size: int, rows: int) -> torch.Tensor:
        """Raises CaptureError if the shard is gone, is not of the `size` it was written with, or lacks the tensor."""
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


class StoredCapture(ByPlane[torch.Tensor]):
    """One request's captures: `capture["resid_post", 14]` is a tensor `[positions, hidden]`, rows in order of position.

    A tensor is mapped from the file, so it takes memory only as it is read; writing to it does not change the file.

    Attributes:
        request_id, engine: the request's id, and the engine that ran it.
        id: the prompt's id if `model.collect` ran it, else None.
        prompt_token_ids, prompt_length: the prompt.
    """

    def __init__(self, name: str, record: _StoredRequest, shards: ShardReader) -> None:
        pieces: dict[Key, list[_StoredPiece]] = {}
        for line in record.lines.values():
            _collect(line, pieces)
        super().__init__(f"stored capture of request {name!r}", sorted(pieces, key=_in_order))
        self._pieces, self._shards = pieces, shards
        self._arranged: dict[Key, Arranged] = {}
        line = next(iter(record.lines.values()))
        self.request_id, self.engine = record.request, record.engine
        self.id = record.collected.id if record.collected is not None else None
        self.prompt_token_ids: list[int] = line["prompt_token_ids"]
        self.prompt_length: int = line["prompt_length"]

    @property
    def positions(self) -> CapturedPositions:
        """The positions of each tensor's rows, under the same keys."""
        return CapturedPositions(self._what, self._planes, lambda key: self._arrange(key).positions)

    def _arrange(self, key: Key) -> Arranged:
        if key not in self._arranged:
            positions = [piece.positions for piece in self._pieces[key]]
            self._arranged[key] = arrange(positions, f"{self._what}, {describe(key)}")
        return self._arranged[key]

    def _value(self, key: Key) -> torch.Tensor:
        pieces, arranged = self._pieces[key], self._arrange(key)
        chosen = [pieces[i] for i in arranged.pieces] or pieces[:1]
        tensors = [self._shards.tensor(piece.shard, piece.name, piece.size, piece.positions.size) for piece in chosen]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return tensor if arranged.order is None else tensor[torch.from_numpy(arranged.order)]


def _in_order(key: Key) -> tuple[str, int, str]:
    return key[0], key[1], {"before": "0"}.get(key[2], key[2])


def _collect(line: Mapping[str, Any], pieces: dict[Key, list[_StoredPiece]]) -> None:
    positions = [
        np.concatenate([np.empty(0, np.int64), *(np.arange(*run) for run in runs)]) for runs in line["positions"]
    ]
    for part in line["parts"]:
        for site, layer, when, number in part["planes"]:
            name = f"{part['prefix']}/{site}/{layer}/{when}"
            piece = _StoredPiece(part["shard"], name, part["bytes"], positions[number])
            pieces.setdefault((site, layer, when), []).append(piece)


class Store(Mapping[str, StoredCapture]):
    """The complete requests in a directory of captures, by request id.

    It lists the requests that were complete when it was opened, or at the last `refresh`; asking for another request refreshes it.
    Requests of `model.collect` are listed by the prompt's id. If several engines used one request id, the requests are named
    `id@engine`; if one engine used it again, `id#2`.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory).expanduser()
        self._shards = ShardReader(self._directory)
        self._read: dict[str, int] = {}  # how many bytes of each index have been read
        self._counts: dict[tuple[str, str, int], int] = {}  # lines by engine, request and stage
        self._records: dict[tuple[str, str, int], _StoredRequest] = {}
        self._names: dict[str, _StoredRequest] = {}
        self.refresh()
        if not self._read:
            raise CaptureError(f"{self._directory} holds no captures: there is no index-*.jsonl in it")

    @property
    def failed(self) -> dict[str, str]:
        """The error of each request whose capture failed."""
        return {name: record.error for name, record in self._names.items() if record.error}

    def entries(self) -> list[tuple[Collected | None, list[int]]]:
        """`(collected, prompt)` of each complete request whose shards are on the disk."""
        there = {path.name: path.stat().st_size for path in self._directory.glob("*.safetensors")}
        found = []
        for record in filter(_readable, self._records.values()):
            parts = [part for line in record.lines.values() for part in line["parts"]]
            if all(there.get(part["shard"]) == part["bytes"] for part in parts):
                found.append((record.collected, next(iter(record.lines.values()))["prompt_token_ids"]))
        return found

    def refresh(self) -> None:
        """Read what was written since the directory was opened, or since the last `refresh`."""
        for path in sorted(self._directory.glob("index-*.jsonl")):
            known = self._read.get(path.name, 0)
            with open(path, "rb") as file:
                file.seek(known)
                new = file.read()
            complete = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
            for line in complete.split(b"\n")[:-1]:
                self._add(path, line)
            self._read[path.name] = known + len(complete)
        self._name()

    def __getitem__(self, request_id: str | int) -> StoredCapture:
        request_id = str(request_id)
        record = self._names.get(request_id)
        if record is None or not _readable(record):
            self.refresh()
            record = self._names.get(request_id)
        if record is None:
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
        engine, request, (stage, _) = line["engine"], line["request"], line["stage"]
        number = self._counts.get((engine, request, stage), 0)
        self._counts[engine, request, stage] = number + 1
        record = self._records.setdefault((engine, request, number), _StoredRequest(request, engine, number))
        record.lines[stage] = line
        return None

    def _name(self) -> None:
        self._names = {}
        others: list[_StoredRequest] = []
        for record in self._records.values():
            if (collected := record.collected) is None:
                others.append(record)
            elif _readable(record) or not _readable(self._names.get(collected.id)):  # it was run again
                self._names[collected.id] = record
        engines: dict[str, set[str]] = {}
        for record in others:
            engines.setdefault(record.request, set()).add(record.engine)
        for record in others:
            name = record.request if len(engines[record.request]) == 1 else f"{record.request}@{record.engine}"
            name = name if record.number == 0 else f"{name}#{record.number + 1}"
            while name in self._names:  # a user's own id looks like this
                name += "'"
            self._names[name] = record

    def _near(self, request_id: str) -> str:
        several = sorted(
            name for name, record in self._names.items() if record.request == request_id and not record.collected
        )
        if several:
            return f"several engines wrote one, so ask for {' or '.join(map(repr, several))}"
        return nearest(str(request_id), islice(self._names, 20_000))  # the comparison is slow


def _readable(record: _StoredRequest | None) -> bool:
    return record is not None and not record.error and not record.missing
