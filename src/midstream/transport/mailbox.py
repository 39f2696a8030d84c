"""Where messages wait for their reader, on the client. `receiver.Receiver` makes mailboxes and fills them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from midstream.errors import ChannelClosedError
from midstream.queues import ByteBudget


@dataclass(slots=True)
class Message:
    """A message as it arrived. `load` unpickles the value; the reader calls it, because it may take long."""

    header: dict[str, Any]
    size: int  # bytes of the payload
    load: Callable[[], Any]

    def open(self) -> tuple[dict[str, Any], Any]:
        return self.header, self.load()


class Mailbox:
    """The messages for one key or several, in the order in which each worker sent them.

    Args:
        keys: of the messages.
        senders: workers without which the mailbox ends.
        forget: tells the receiver that the mailbox is closed.
        budget: counts the bytes that wait here, up to and including the message that the reader works on.
    """

    def __init__(
        self,
        keys: Sequence[Hashable],
        senders: frozenset[str],
        forget: Callable[[Mailbox], None],
        budget: ByteBudget | None = None,
    ) -> None:
        self.keys = keys
        self.senders = senders
        self._forget = forget
        self._budget = budget
        self._taken = 0  # bytes of the message that the reader works on
        self._messages: deque[Message] = deque()
        self._error: ChannelClosedError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    # For the reader.

    def get(self, timeout: float | None = None) -> tuple[dict[str, Any], Any]:
        """The next (header, value), waiting for it up to `timeout` seconds.

        Raises TimeoutError; and ChannelClosedError once nothing is left and nothing more can come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._messages or self._error, timeout):
                raise TimeoutError(f"no result for {self._name} within {timeout} s")
            message = self._take()
        assert message is not None
        return message.open()

    def get_nowait(self) -> tuple[dict[str, Any], Any] | None:
        """The next (header, value) if it is here, else None. Raises ChannelClosedError as `get` does."""
        with self._changed:
            message = self._take()
        return message.open() if message else None

    async def aget(self) -> tuple[dict[str, Any], Any]:
        """`get` for asyncio, without a timeout: `asyncio.wait_for` adds one, and loses no message when it fires."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                message = self._take()
                if message is None:
                    waiter = (loop, loop.create_future())
                    self._waiters.append(waiter)
            if message is not None:
                return message.open()
            try:
                await waiter[1]
            finally:
                with self._changed:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def close(self) -> None:
        """Drop what is here and what comes later. Idempotent."""
        self._forget(self)
        self.fail(ChannelClosedError(f"the mailbox of {self._name} is closed"))
        with self._changed:
            self._closed = True
            self._release(sum(message.size for message in self._messages))
            self._messages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the receiver.

    def deliver(self, message: Message) -> None:
        """A message has come."""
        with self._changed:
            if not self._closed:
                self._messages.append(message)
                if self._budget is not None:
                    self._budget.add(message.size)
                self._wake()

    def fail(self, error: ChannelClosedError) -> None:
        """Nothing more comes: readers get what is here, then this error."""
        with self._changed:
            self._error = self._error or error
            self._wake()

    @property
    def _name(self) -> str:
        others = f" and {len(self.keys) - 1} others" if len(self.keys) > 1 else ""
        return f"{self.keys[0]!r}{others}"

    def _take(self) -> Message | None:
        self._release()
        if self._messages:
            message = self._messages.popleft()
            self._taken = message.size
            return message
        if self._error:
            raise self._error
        return None

    def _release(self, more: int = 0) -> None:
        """The reader has finished the message that it took."""
        size, self._taken = self._taken + more, 0
        if self._budget is not None and size:
            self._budget.add(-size)

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, future)


class Handler(Mailbox):
    """Keeps no messages: `handle` is called with each one on the thread that received it, and `gone` when the sender has gone."""

    def __init__(self, key: Hashable, sender: str, handle: Callable[[Message], None], gone: Callable[[], None]) -> None:
        super().__init__([key], frozenset({sender}), lambda _: None)
        self._handle = handle
        self._gone = gone

    def deliver(self, message: Message) -> None:
        self._handle(message)

    def fail(self, error: ChannelClosedError) -> None:
        self._gone()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
