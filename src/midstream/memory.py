"""A cache with a budget in bytes, and blocks in which Python collects no garbage.

Clients choose the cache's keys and values, so a limit on their number would not limit the memory.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

BYTES = 64 << 20
ENTRY_BYTES = 512  # what an entry, or an object with several attributes, takes beside its numbers
ITEM_BYTES = 64  # what an item of a tuple takes
V = TypeVar("V")


class Memory(Generic[V]):
    """Values by key, within a number of bytes; the least recently used are dropped first. Saves work because requests repeat plans.

    Args:
        budget: bytes that keys and values may take together. An entry that is larger is not kept.
    """

    def __init__(self, budget: int = BYTES) -> None:
        self._budget = budget
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, key: Hashable, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value of `key`, from `make` if it is not known; `size` gives the bytes of key and value. Raises what `make` raises."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                return known[0]
        value = make()
        bytes_ = size(value) + ENTRY_BYTES
        with self._lock:
            if key not in self._entries and bytes_ <= self._budget:
                self._entries[key] = value, bytes_
                self.size += bytes_
            while self.size > self._budget:
                self.size -= self._entries.popitem(last=False)[1][1]
        return value

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def items_in(value: Any) -> int:
    """How many items a tuple and all tuples inside it contain; 0 for other values."""
    return len(value) + sum(map(items_in, value)) if isinstance(value, tuple) else 0


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
