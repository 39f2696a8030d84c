"""The bounded queue between producers and one consumer thread.

    queue: BoundedQueue[Job] = BoundedQueue(256 << 20)
    queue.start("midstream-send", run)     # a daemon thread; `run` calls `get` until it returns None
    queue.put(job, size)                   # from any thread; waits while the queue is full
    queue.close()                          # `put` returns False from now on; `run` still gets the queued items
    queue.join()

The bound is in bytes, because the items hold tensors, and their number says nothing about their memory. A full queue slows the producer
down, and `blocked_seconds` says by how much; no item is dropped.

`transport.sender` queues results for the client, `capture.consumers` rows for one consumer, and `runtime.sending` rows for the consumers in
the worker. `transport.receiver` uses a `ByteBudget` alone, for all mailboxes of a client together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteBudget:
    """Counts bytes in use and makes producers wait while there are too many.

    Attributes:
        limit: in bytes. A single larger item still passes when no other bytes are in use.
        used: bytes in use.
        blocked_seconds: how long producers have waited, in total.
        changed: a condition that guards all attributes, and is notified of every change. The owner may guard its own state with it.
        closed: producers no longer wait for room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.blocked_seconds = 0.0
        self.changed = threading.Condition()
        self.closed = False

    def add(self, size: int) -> None:
        """Change the bytes in use by `size`, which may be negative. Never waits."""
        with self.changed:
            self.used += size
            self.changed.notify_all()

    def has_room(self, size: int = 0) -> bool:
        """Whether `wait_for_room` would return at once."""
        return self.closed or not self.used or self.used + size <= self.limit

    def wait_for_room(self, size: int = 0, wait: Callable[[Callable[[], bool]], object] | None = None) -> None:
        """Wait until `size` bytes fit. `wait(condition)` replaces `changed.wait_for`, for example to stop waiting for other reasons."""
        with self.changed:
            if self.has_room(size):
                return
            start = time.monotonic()
            (wait or self.changed.wait_for)(lambda: self.has_room(size))
            self.blocked_seconds += time.monotonic() - start

    def close(self) -> None:
        """Wake all waiting producers. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class BoundedQueue(ByteBudget, Generic[T]):
    """See the module. The bytes of an item count until the consumer calls `task_done` for it.

    Attributes:
        error: the exception that the consumer raised, without its traceback. The queue is then closed and empty.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.error: BaseException | None = None
        self._items: deque[tuple[T, int]] = deque()
        self._taken: deque[int] = deque()  # sizes of the items that the consumer is working on, oldest first
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_idle(self) -> bool:
        """Whether the consumer has finished all items."""
        return not self._items and not self._taken

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run the consumer in a daemon thread. If `run` raises, the queued items are dropped and the queue is closed."""
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, size: int = 0) -> bool:
        """Queue an item of `size` bytes; an item with bytes waits for room. Returns False without queueing it if the queue is closed."""
        with self.changed:
            if size and not self.has_room(size):
                self.wait_for_room(size)
            if self.closed:
                return False
            self._items.append((item, size))
            self.used += size
            self.changed.notify_all()
            return True

    def get(self, timeout: float | None = None, unless: Callable[[], bool] = lambda: False) -> T | None:
        """The next item; waits up to `timeout` seconds for it.

        None if no item came in time, if the queue is empty and `unless()` is true, or if the queue is closed and empty.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._items or self.closed or unless(), timeout)
            if not self._items:
                return None
            item, size = self._items.popleft()
            self._taken.append(size)
            return item

    def task_done(self) -> None:
        """The consumer has finished the oldest of its items, if it has any."""
        with self.changed:
            if self._taken:
                self.add(-self._taken.popleft())

    def drop(self, instead: Iterable[T] = ()) -> None:
        """Drop the queued items and queue `instead`, which hold no bytes, even if the queue is closed."""
        with self.changed:
            self.add(-sum(size for _, size in self._items))
            self._items = deque((item, 0) for item in instead)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the consumer's thread to end. False if it runs for more than `timeout` seconds."""
        assert self._thread is not None
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            with self.changed:
                self.error = error.with_traceback(None)  # frames of the traceback may hold tensors
                self.drop()
                self._taken.clear()
                self.used = 0
                self.close()
