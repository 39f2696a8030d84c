"""Where results wait for their reader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from midstream.transport import codec as wire
from midstream.transport.codec import ChannelClosedError, UnsendableError

if TYPE_CHECKING:
    from midstream.transport.results import Receiver


@dataclass(slots=True)
class Message:
    header: dict[str, Any]
    body: bytes | bytearray
    tensors: list[torch.Tensor | None]  # None: it never arrived
    failure: str | None = None
    size: int = 0

    def open(self) -> tuple[dict[str, Any], Any]:
        if self.failure is None and any(tensor is None for tensor in self.tensors):
            self.failure = "a tensor sent earlier on its stream was dropped"
        if self.failure is not None:
            return self.header, UnsendableError("(unknown here)", self.failure)
        return self.header, wire.unpack(self.body, self.tensors)


@dataclass(slots=True)
class Part:
    """One of the messages of a frame, unpickled."""

    header: dict[str, Any]
    value: Any
    size: int

    def open(self) -> tuple[dict[str, Any], Any]:
        return self.header, self.value


def parts_of(message: Message, keys: Sequence[Hashable]) -> list[Part]:
    """The messages, one for each of `keys`, that were sent together; UnsendableErrors if they cannot be read."""
    _, values = message.open()
    if isinstance(values, UnsendableError):
        values = [({"key": key}, values) for key in keys]
    return [Part(header, value, message.size // len(keys)) for header, value in values]


class Pace:
    """Holds the workers up while more than `limit` bytes wait for readers that may be slower than they are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._changed = threading.Condition()
        self._over = False

    def add(self, size: int) -> None:
        with self._changed:
            self.bytes += size
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.bytes <= self.limit or self._over)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Mailbox:
    """The messages of a key, or of several, in the order in which each worker sent them. Made by `results.Receiver.expect`."""

    def __init__(
        self, receiver: Receiver, keys: Sequence[Hashable], senders: frozenset[str], pace: Pace | None = None
    ) -> None:
        self.keys = keys
        self.senders = senders
        self._receiver = receiver
        self._pace = pace
        self._held = 0  # bytes of the message that its reader is at
        self._messages: deque[Message | Part] = deque()
        self._error: ChannelClosedError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def _name(self) -> str:
        others = f" and {len(self.keys) - 1} others" if len(self.keys) > 1 else ""
        return f"{self.keys[0]!r}{others}"

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
        """`get` for asyncio, without a limit: `asyncio.wait_for` sets one, and loses no message when it fires."""
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
        """Forget the key: what is here and what comes later is dropped. Idempotent."""
        self._receiver._forget(self)
        self._fail(ChannelClosedError(f"the mailbox of {self._name} is closed"))
        with self._changed:
            self._closed = True
            self._let_go(sum(message.size for message in self._messages))
            self._messages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> Message | Part | None:
        self._let_go()
        if self._messages:
            message = self._messages.popleft()
            self._held = message.size
            return message
        if self._error:
            raise self._error
        return None

    def _let_go(self, more: int = 0) -> None:
        """The reader is through with what it has taken."""
        size, self._held = self._held + more, 0
        if self._pace is not None and size:
            self._pace.add(-size)

    def _put(self, message: Message | Part) -> None:
        with self._changed:
            if not self._closed:
                self._messages.append(message)
                if self._pace is not None:
                    self._pace.add(message.size)
                self._wake()

    def _fail(self, error: ChannelClosedError) -> None:
        with self._changed:
            self._error = self._error or error
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, future)


class Handler(Mailbox):
    """Keeps nothing: each message goes to `handle` on the thread that received it. Made by `results.Receiver.serve`."""

    def __init__(
        self,
        receiver: Receiver,
        key: Hashable,
        sender: str,
        handle: Callable[[Message], None],
        gone: Callable[[], None],
    ) -> None:
        super().__init__(receiver, [key], frozenset({sender}))
        self._handle = handle
        self._gone = gone

    def _put(self, message: Message | Part) -> None:
        assert isinstance(message, Message)  # who sends here does not send together
        self._handle(message)

    def _fail(self, error: ChannelClosedError) -> None:
        self._gone()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
