"""Which prompts `collect` has written to a directory: their ids and a digest of their tokens, without their rows.

Reads only the lines that are new since the last call, so that a program may collect many times to one directory. The place of each
prompt's line is kept, so that a store of some prompts reads their lines alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np

from midstream.capture.consumers import Collected
from midstream.plan.vectors import digest


class _Part(msgspec.Struct):
    shard: str
    bytes: int


class _Line(msgspec.Struct):
    """A request's line in an index. `stage`: its pipeline stage and the number of stages; (0, 0) in a file's first line, the format."""

    stage: tuple[int, int] = (0, 0)
    prompt_token_ids: list[int] = []
    collected: Collected | None = None
    error: str | None = None
    parts: list[_Part] = []


class Listing:
    """The prompts in a directory, read as the directory grows.

    Attributes:
        digests: of the tokens of each prompt (`digest_of`), by id.
        ids: the id of each prompt, by this digest; one of them if several prompts have the same tokens.
        kinds: the models and plans of the prompts; None for captures that `collect` has not written.
        read: how many bytes of each index have been read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.digests: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.kinds: set[tuple[str, str] | None] = set()
        self.read: dict[Path, int] = {}
        # The index and offset of each prompt's line, or of the line with its error if every run of it failed.
        self._places: dict[str, tuple[Path, int]] = {}
        self._used: dict[str, int] = {}  # the bytes of each shard of a listed prompt

    def refresh(self) -> None:
        """Read the new lines of each index. Reads all of them again if an index or a shard is gone."""
        with self._lock:
            self._refresh()

    def lines(self, ids: Iterable[str]) -> Iterator[tuple[Path, bytes]]:
        """The index and the line of each of these prompts that has one, in the order of the files."""
        places = sorted({self._places[name] for name in ids if name in self._places})
        for path, each in groupby(places, key=itemgetter(0)):
            with path.open("rb") as file:
                for _, start in each:
                    file.seek(start)
                    yield path, file.readline()[:-1]

    def _refresh(self) -> None:
        sizes = {path.name: path.stat().st_size for path in self._directory.glob("*.safetensors")}
        indexes = {path: path.stat().st_size for path in sorted(self._directory.glob("index-*.jsonl"))}
        if (
            any(indexes.get(path, -1) < read for path, read in self.read.items())
            or not self._used.items() <= sizes.items()
        ):
            self._clear()
        for path in indexes:
            for text in new_lines(path, self.read.setdefault(path, 0)):
                self._add(text, sizes, (path, self.read[path]))
                self.read[path] += len(text)

    def _add(self, text: bytes, sizes: Mapping[str, int], place: tuple[Path, int]) -> None:
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError:
            return
        used = {part.shard: part.bytes for part in line.parts}
        if line.collected is not None and line.error and line.collected.id not in self.digests:
            self._places[line.collected.id] = place
        if not line.stage[1] or line.error or not used.items() <= sizes.items():
            return
        if line.collected is None:
            self.kinds.add(None)
            return
        self.kinds.add((line.collected.model, line.collected.plan))
        tokens = self.digests[line.collected.id] = digest_of(line.prompt_token_ids)
        self.ids[tokens] = line.collected.id
        self._places[line.collected.id] = place
        self._used |= used


def new_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines of an index from a byte on. Its last line may still be being written."""
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if text.endswith(b"\n"):
                yield text


def digest_of(token_ids: Sequence[int]) -> str:
    """The digest of a prompt's tokens."""
    return digest(np.array(token_ids, np.int64).tobytes())
