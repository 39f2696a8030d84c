"""Keeps captured rows on the server until their owner downloads them."""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from midstream.capture.directory import safetensors_file
from midstream.capture.rows import Captured

MAX_INLINE_BYTES = 1 << 20  # of all captures in one response
PART_BYTES = 1 << 16  # of a download
MOST_HELD = 1 << 16  # tensors
_ENTRY_BYTES, _POSITION_BYTES = 2048, 40


@dataclass(frozen=True)
class StoredTensor:
    """One captured tensor `[positions, width]`, its owner, and its description in the response."""

    owner: bytes
    tensor: torch.Tensor
    about: dict[str, Any]
    expires: float

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, and an estimate of those of its description."""
        return self.tensor.nbytes + _ENTRY_BYTES + _POSITION_BYTES * len(self.about["positions"])

    def file(self) -> tuple[int, Iterator[bytes]]:
        """The size and the parts of a safetensors file with the tensor `rows`. The description is its metadata.

        The parts are made one by one: complete files for many slow clients would take many times the store's budget.
        """
        size, parts = safetensors_file(
            {"rows": [self.tensor]}, {name: str(value) for name, value in self.about.items()}
        )
        return size, (bytes(part[at : at + PART_BYTES]) for part in parts for at in range(0, len(part), PART_BYTES))


class CaptureStore:
    """Captured tensors by handle. A handle has 256 random bits, and works only for its owner, until it expires.

    If the store is full, an owner who holds at least half as much as the largest owner loses its oldest tensor. Owners are API keys, so on
    a server without keys one client may come as many owners. The time to store a tensor does not depend on the number of tensors.

    Args:
        budget: the limit in bytes for all tensors. Each counts with its description, and as at least `1 / MOST_HELD` of the budget.
        seconds: how long a handle works.
        clock: in seconds.
    """

    def __init__(self, budget: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.seconds = budget, seconds
        self._clock = clock
        self._held: dict[str, StoredTensor] = {}  # the oldest first
        self._of_owner: dict[bytes, dict[str, int]] = {}  # the charged bytes of each handle, the oldest first
        self._owner_bytes: Counter[bytes] = Counter()
        # The owners, by the bit length of the number of bytes that they hold.
        self._by_size: list[dict[bytes, None]] = [{} for _ in range(64)]
        self._total = self._bytes = 0
        self._lock = threading.Lock()

    @property
    def gauges(self) -> dict[str, int]:
        with self._lock:
            self._drop_expired()
            return {"captures": len(self._held), "capture_bytes": self._bytes}

    def put(self, owner: bytes, choice: int, captured: Captured, inline: int) -> list[dict[str, Any]]:
        """Keep the captures of one choice. Returns the response's entry for each tensor, with up to `inline` bytes of data in all."""
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
            handle = self._keep(StoredTensor(owner, tensor, about, self._clock() + self.seconds))
            entry = {"handle": handle, **about}
            if tensor.nbytes <= inline:
                inline -= tensor.nbytes
                entry["data"] = base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode()
            entries.append(entry)
        return entries

    def get(self, owner: bytes, handle: str) -> StoredTensor | None:
        """The tensor of a handle; None if the handle is unknown, or another owner's."""
        with self._lock:
            self._drop_expired()
            held = self._held.get(handle)
            return held if held is not None and secrets.compare_digest(held.owner, owner) else None

    def __contains__(self, handle: str) -> bool:
        return handle in self._held

    def drop(self, owner: bytes, handle: str) -> bool:
        """Forget a tensor. Returns whether `owner` had it."""
        if self.get(owner, handle) is None:
            return False
        with self._lock:
            self._remove(handle)
        return True

    def _keep(self, held: StoredTensor) -> str:
        handle, charged = secrets.token_urlsafe(32), max(held.nbytes, self.budget // MOST_HELD)
        with self._lock:
            self._drop_expired()
            self._held[handle] = held
            self._of_owner.setdefault(held.owner, {})[handle] = charged
            self._charge(held, charged)
            while self._total > self.budget:
                largest = next(owners for owners in reversed(self._by_size) if owners)
                self._remove(next(iter(self._of_owner[next(iter(largest))])))
        return handle

    def _drop_expired(self) -> None:
        """Drop expired tensors. All handles work equally long, so the oldest expire first."""
        now = self._clock()
        while self._held and (first := next(iter(self._held.items())))[1].expires <= now:
            self._remove(first[0])

    def _remove(self, handle: str) -> None:
        if (held := self._held.pop(handle, None)) is not None:
            mine = self._of_owner[held.owner]
            self._charge(held, -mine.pop(handle))
            if not mine:
                del self._of_owner[held.owner]

    def _charge(self, held: StoredTensor, charged: int) -> None:
        """Add a tensor's bytes to its owner's; with a negative number, subtract them."""
        owner, before = held.owner, self._owner_bytes[held.owner]
        self._by_size[before.bit_length()].pop(owner, None)
        self._total += charged
        self._bytes += held.nbytes if charged > 0 else -held.nbytes
        if now := before + charged:
            self._owner_bytes[owner] = now
            self._by_size[now.bit_length()][owner] = None
        else:
            del self._owner_bytes[owner]
