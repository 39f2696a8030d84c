"""A value that was asked for of another rank."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from midstream.errors import MidstreamError, TraceError, UnsendableError
from midstream.sites import Ref
from midstream.transport.mailbox import Message


class Fetch:
    """Made by `link.Link.fetch`.

    Attributes:
        wanted: rank, body, number and part of the value.
        done: whether it is here, or will never be: `wait` returns at once.
    """

    def __init__(self, peer: int, body: str, number: int, ref: Ref, answered: threading.Condition) -> None:
        self.wanted = (peer, body, number, ref)
        self.done = False
        self._answered = answered
        self._message: Message | None = None
        self._value: Any = None
        self._error: Exception | None = None

    def wait(self) -> Any:
        """The value, its tensors on the CPU.

        Raises NeverReachedError if it will never exist, EngineClosedError if its owner has gone, TraceError if it cannot
        be sent, and LookupError or TypeError if it has no such part.
        """
        if not self.done:
            with self._answered:
                self._answered.wait_for(lambda: self.done)
        if self._message is not None:
            self._open(self._message)
            self._message = None
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, message: Message) -> None:
        """The owner's answer."""
        self._message = message
        self._finish()

    def fail(self, error: MidstreamError) -> None:
        self._error = copy.copy(error)  # others are told the same, and a raised error keeps its frames alive
        self._finish()

    def _finish(self) -> None:
        with self._answered:
            self.done = True
            self._answered.notify_all()

    def _open(self, message: Message) -> None:
        header, self._value = message.open()
        unsendable = _unsendable(self._value)
        if unsendable is not None:
            self._error = TraceError(
                f"a value of type {unsendable.type_name} lies on rank {self.wanted[0]} and cannot be brought here, where the "
                f"trace uses it ({unsendable.reason}); use what it holds, such as its tensors, instead."
            )
        elif header.get("failed"):
            self._error = self._value


def _unsendable(tree: Any) -> UnsendableError | None:
    """What stands in `tree` for something that could not be sent."""
    if isinstance(tree, UnsendableError):
        return tree
    inside: Iterable[Any] = ()
    if isinstance(tree, (tuple, list)):
        inside = tree
    elif isinstance(tree, Mapping):
        inside = tree.values()
    return next((found for item in inside if (found := _unsendable(item)) is not None), None)
