"""Captured rows that wait on the server for their owner to download them."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from midstream.capture.directory import ALIGN, DTYPES
from midstream.capture.rows import Captured
from midstream.trace.tree import as_bytes

MAX_INLINE_BYTES = 1 << 20  # of all captures in one response
PART_BYTES = 1 << 16  # of a download


@dataclass(frozen=True)
class Held:
    """One captured tensor `[positions, width]`, and whose it is."""

    owner: bytes
    tensor: torch.Tensor
    about: dict[str, Any]
    expires: float

    def file(self) -> tuple[int, Iterator[bytes]]:
        """The size and the parts of a safetensors file with the tensor `rows`, and as metadata what the response says of it.

        The parts are made one by one: a whole file for each of many slow clients would take many times the store's budget.
        """
        data = as_bytes(self.tensor).numpy().data
        entry = {"dtype": DTYPES[self.tensor.dtype], "shape": self.about["shape"], "data_offsets": [0, len(data)]}
        header = {"__metadata__": {name: str(value) for name, value in self.about.items()}, "rows": entry}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        parts = (bytes(data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES))
        return 8 + len(text) + len(data), itertools.chain([struct.pack("<Q", len(text)) + text], parts)


class CaptureStore:
    """Captured tensors by handle. A handle has 256 random bits, and works for its owner alone until it expires.

    If the store is full, the owner who holds the most loses what is oldest. Owners are API keys, so on a server that asks for none
    anybody may come under many names.

    Args:
        budget: bytes that all tensors may take.
        seconds: how long a handle works.
        clock: in seconds.
    """

    def __init__(self, budget: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.seconds = budget, seconds
        self._clock = clock
        self._held: dict[str, Held] = {}  # the oldest first
        self._bytes: Counter[bytes] = Counter()  # by owner
        self._lock = threading.Lock()

    @property
    def gauges(self) -> dict[str, int]:
        with self._lock:
            self._drop_expired()
            return {"captures": len(self._held), "capture_bytes": self._bytes.total()}

    def put(self, owner: bytes, choice: int, captured: Captured, inline: int) -> list[dict[str, Any]]:
        """Keep the captures of one choice. Returns what the response says of each tensor, with up to `inline` bytes of data in all."""
        entries = []
        for key in captured:
            tensor = captured[key]
            if tensor.untyped_storage().nbytes() > tensor.nbytes:  # a view would keep rows of others in memory
                tensor = tensor.clone()
            tensor = tensor.contiguous()
            about = {
                "choice": choice,
                "site": key[0],
                "layer": key[1],
                "when": captured.when(key),
                "positions": captured.positions[key],
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            handle = self._keep(Held(owner, tensor, about, self._clock() + self.seconds))
            entry = {"handle": handle, **about}
            if tensor.nbytes <= inline:
                inline -= tensor.nbytes
                entry["data"] = base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode()
            entries.append(entry)
        return entries

    def get(self, owner: bytes, handle: str) -> Held | None:
        """What the handle stands for. None if it does not, or does for somebody else."""
        with self._lock:
            self._drop_expired()
            held = self._held.get(handle)
            return held if held is not None and secrets.compare_digest(held.owner, owner) else None

    def __contains__(self, handle: str) -> bool:
        return handle in self._held

    def drop(self, owner: bytes, handle: str) -> bool:
        """Forget a tensor. Returns whether it was there."""
        if self.get(owner, handle) is None:
            return False
        with self._lock:
            self._remove(handle)
        return True

    def _keep(self, held: Held) -> str:
        handle = secrets.token_urlsafe(32)
        with self._lock:
            self._drop_expired()
            self._held[handle] = held
            self._bytes[held.owner] += held.tensor.nbytes
            while self._bytes.total() > self.budget:
                largest = max(self._bytes, key=lambda owner: self._bytes[owner])
                self._remove(next(name for name, each in self._held.items() if each.owner == largest))
        return handle

    def _drop_expired(self) -> None:
        now = self._clock()
        for handle in [name for name, held in self._held.items() if held.expires <= now]:
            self._remove(handle)

    def _remove(self, handle: str) -> None:
        if (held := self._held.pop(handle, None)) is not None:
            self._bytes[held.owner] -= held.tensor.nbytes
            if not self._bytes[held.owner]:
                del self._bytes[held.owner]
