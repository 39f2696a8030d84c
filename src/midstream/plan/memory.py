"""What is worth remembering about plans, within a number of bytes: requests come with the same plans again, and plans may be large."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from midstream.plan.values import Plan
from midstream.plan.vectors import Vector

V = TypeVar("V")
BYTES = 64 << 20
_ENTRY_BYTES = 512  # what an entry, or an intervention, costs beside its numbers
_POSITION_BYTES = 64


class Memory(Generic[V]):
    """Values by key, the ones used least recently forgotten first.

    Args:
        budget: bytes that keys and values may take together; what is larger is not kept at all.
    """

    def __init__(self, budget: int = BYTES) -> None:
        self._budget = budget
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, key: Hashable, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value of `key`, made if it is not known; `size` tells the bytes of both. Raises what `make` raises."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                return known[0]
        value = make()
        bytes_ = size(value) + _ENTRY_BYTES
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


def plan_bytes(plan: Plan) -> int:
    """About what a plan takes in memory."""
    total = 0
    for item in plan.interventions:
        listed = [each for each in (item.place, item.at_layers) if isinstance(each, tuple)]
        total += _ENTRY_BYTES + _POSITION_BYTES * sum(map(len, listed))
        total += sum(value.data.nbytes for value in vars(item).values() if isinstance(value, Vector))
    return total
