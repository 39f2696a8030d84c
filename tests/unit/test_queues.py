"""The bounded queue (K4): its bound in bytes, its order, closing it, and consumers that raise."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from midstream.queues import BoundedQueue, ByteBudget

WAIT = 30.0


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Consumed:
    """A queue whose consumer notes each item and waits for `go` before it is done with it."""

    def __init__(self, limit: int) -> None:
        self.queue: BoundedQueue[int] = BoundedQueue(limit)
        self.go = threading.Semaphore(0)
        self.seen: list[int] = []
        self.queue.start("consumer", self._run)

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            self.seen.append(item)
            assert self.go.acquire(timeout=WAIT)
            self.queue.task_done()


@contextmanager
def in_thread(function: Callable[..., object], *arguments: object) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_items_come_in_order_and_all_of_them_after_close() -> None:
    consumed = Consumed(1000)
    for item in range(5):
        assert consumed.queue.put(item, 10)
    consumed.queue.close()
    assert not consumed.queue.put(5, 10)
    consumed.go.release(5)
    assert consumed.queue.join(WAIT)
    assert consumed.seen == [0, 1, 2, 3, 4]
    assert consumed.queue.used == 0 and consumed.queue.get() is None


def test_put_waits_for_room_and_the_time_is_measured() -> None:
    """An item counts while the consumer works on it, so the third one has to wait for the first to be done."""
    consumed = Consumed(20)
    consumed.queue.put(0, 10)
    consumed.queue.put(1, 10)
    assert consumed.queue.blocked_seconds == 0
    with in_thread(consumed.queue.put, 2, 10) as thread:
        wait_until(lambda: consumed.seen == [0])
        thread.join(0.2)
        assert thread.is_alive() and consumed.queue.used == 20
        consumed.go.release()
    assert 0.15 < consumed.queue.blocked_seconds < WAIT
    consumed.go.release(2)
    consumed.queue.close()
    assert consumed.queue.join(WAIT) and consumed.seen == [0, 1, 2]


def test_an_item_larger_than_the_bound_passes_an_empty_queue_alone() -> None:
    consumed = Consumed(20)
    assert consumed.queue.put(0, 1000)
    with in_thread(consumed.queue.put, 1, 1) as thread:
        thread.join(0.05)
        assert thread.is_alive()
        consumed.go.release()
    consumed.go.release()
    consumed.queue.close()
    assert consumed.queue.join(WAIT) and consumed.seen == [0, 1]


def test_closing_wakes_a_producer_that_waits() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    queue.put(0, 1)
    told: list[bool] = []
    with in_thread(lambda: told.append(queue.put(1, 1))):
        time.sleep(0.05)
        queue.close()
    assert told == [False] and len(queue) == 1


def test_get_gives_up_in_time_or_when_told() -> None:
    queue: BoundedQueue[int] = BoundedQueue(1)
    start = time.monotonic()
    assert queue.get(0.05) is None and queue.get(0) is None and queue.get(-1) is None
    assert 0.04 < time.monotonic() - start < WAIT
    assert queue.get(unless=lambda: True) is None
    queue.put(7)
    assert queue.get(unless=lambda: True) == 7


def test_several_items_may_be_taken_before_the_first_is_done() -> None:
    """The sender copies the tensors of one message while it writes the one before."""
    queue: BoundedQueue[int] = BoundedQueue(100)
    queue.put(0, 60)
    queue.put(1, 5)
    assert [queue.get(), queue.get()] == [0, 1] and queue.used == 65
    queue.task_done()
    assert queue.used == 5
    queue.task_done()
    queue.task_done()
    assert queue.used == 0


def test_dropping_makes_room_and_queues_the_replacements() -> None:
    queue: BoundedQueue[int] = BoundedQueue(10)
    queue.put(0, 10)
    assert queue.get() == 0
    queue.drop()
    assert queue.used == 10  # the consumer still works on it
    queue.task_done()
    queue.put(1, 10)
    queue.close()
    queue.drop(instead=[2, 3])
    assert queue.used == 0 and [queue.get(), queue.get(), queue.get()] == [2, 3, None]


def test_a_consumer_that_raises_closes_the_queue_and_holds_nothing() -> None:
    class Large:
        pass

    queue: BoundedQueue[Large] = BoundedQueue(100)
    go = threading.Event()

    def run() -> None:
        item = queue.get()
        assert item is not None and go.wait(WAIT)
        raise ZeroDivisionError("no more")

    items = [Large(), Large()]
    kept = [weakref.ref(item) for item in items]
    for item in items:
        queue.put(item, 40)
    del item, items
    queue.start("consumer", run)
    told: list[bool] = []
    with in_thread(lambda: told.append(queue.put(Large(), 90))):
        time.sleep(0.05)
        go.set()
    assert queue.join(WAIT) and told == [False]
    assert isinstance(queue.error, ZeroDivisionError) and queue.closed and queue.used == 0
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


@pytest.mark.parametrize("close", [False, True])
def test_a_budget_makes_threads_wait_for_room(close: bool) -> None:
    """The client's receiving threads wait after each message. Adding never waits."""
    budget = ByteBudget(10)
    budget.add(15)
    with in_thread(budget.wait_for_room) as thread:
        thread.join(0.05)
        assert thread.is_alive()
        if close:
            budget.close()
        else:
            budget.add(-5)
    assert budget.used == (15 if close else 10) and budget.blocked_seconds > 0.04
