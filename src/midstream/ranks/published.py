"""What a rank knows of values that cross between ranks: those that it has published, and its fetches of others'."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from midstream.errors import MidstreamError, StageFailedError, TraceError, UnsendableError
from midstream.sites import Ref
from midstream.trace.tree import is_raw, leaves, map_tensors
from midstream.transport.mailbox import Message
from midstream.transport.staging import mark_ready

_HOST = torch.device("cpu")


class Held(NamedTuple):
    """A value, and the events after which its tensors are complete."""

    value: Any
    ready: Mapping[torch.device, torch.cuda.Event]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Published:
    """A published value. `held` is replaced, never changed, so that it can be sent while it is being moved.

    Attributes:
        readers: how many more ranks may fetch it before it is forgotten; None: any number.
        place: the point of the model that it was read at, for what is sent ahead.
    """

    held: Held
    readers: int | None
    place: Hashable | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in leaves(self.held.value))


def hold(value: Any) -> Held:
    """`value`, whose tensors are complete once the caller's current streams have done what they have been given."""
    return Held(value, mark_ready([tensor for _, tensor in leaves(value)]))


def move_to_host(all_published: Iterable[Published]) -> None:
    """Move tensors on this rank's CUDA device to pinned host memory, in one copy for each dtype, without waiting for it."""
    moving = [published for published in all_published if published.held.ready]
    by_dtype: defaultdict[torch.dtype, dict[int, torch.Tensor]] = defaultdict(dict)
    for published in moving:
        for _, tensor in leaves(published.held.value):
            if tensor.is_cuda and is_raw(tensor):
                by_dtype[tensor.dtype][id(tensor)] = tensor
    moved: dict[int, torch.Tensor] = {}
    for dtype, tensors in by_dtype.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat, non_blocking=True)
        parts = host.split([tensor.numel() for tensor in tensors.values()])
        moved |= {key: part.view(tensors[key].shape) for key, part in zip(tensors, parts, strict=True)}
    if moved:
        copied = torch.cuda.current_stream(flat.device).record_event()
        for published in moving:
            value = map_tensors(published.held.value, lambda _, tensor: moved.get(id(tensor), tensor))
            published.held = Held(value, {**published.held.ready, _HOST: copied})


class Request(NamedTuple):
    """Another rank's fetch of a value, or of the part of it at `ref`. `id` tells it from that rank's other fetches."""

    rank: int
    ref: Ref
    id: int


@dataclass(slots=True)
class SharedBody:
    """What this rank knows of a body until every rank has ended it.

    Attributes:
        reason: why the body is over here; None while it is not.
        silent: why nothing more is published here, if that is known before the body is over.
        failure: what the body failed with on another rank.
        ended: the ranks that have ended it, this one included.
        values: published here, by number.
        refused: numbers that never get a value, and why.
        waived: number -> the ranks that will not fetch it.
        used_up: the largest number of a value that was forgotten because no rank would fetch it any more.
        parked: requests for values that are not published yet, by number.
        subscribers: place -> (rank, part) that the next value of the place is sent to without a request.
        ahead: (rank, number, part) -> place and message of values that other ranks sent without a request and that were not fetched yet.
    """

    reason: MidstreamError | None = None
    silent: MidstreamError | None = None
    failure: StageFailedError | None = None
    ended: set[int] = field(default_factory=set)
    values: dict[int, Published] = field(default_factory=dict)
    refused: dict[int, MidstreamError] = field(default_factory=dict)
    waived: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    used_up: int = -1
    parked: defaultdict[int, list[Request]] = field(default_factory=lambda: defaultdict(list))
    subscribers: defaultdict[Hashable, set[tuple[int, Ref]]] = field(default_factory=lambda: defaultdict(set))
    ahead: dict[tuple[int, int, Ref], tuple[Hashable, Message]] = field(default_factory=dict)

    def note_answer(self, number: int, rank: int, ref: Ref, subscribe: bool = True) -> None:
        """A rank is given the value, or the part of it at `ref`: it gets the place's next value too, and was maybe the last reader."""
        published = self.values[number]
        if published.place is not None and subscribe:
            self.subscribers[published.place].add((rank, ref))
        if published.readers is not None:
            published.readers -= 1
            if published.readers <= 0:
                del self.values[number]
                self.used_up = max(self.used_up, number)

    def take_subscribers(self, number: int, place: Hashable | None, asked: Iterable[Request]) -> list[tuple[int, Ref]]:
        """The (rank, part) that value `number` is sent to without a request: subscribers of `place` that may want it."""
        if place is None:
            return []
        without = self.ended | self.waived.get(number, set())
        asking = {(request.rank, request.ref) for request in asked}
        return [reader for reader in self.subscribers.pop(place, set()) - asking if reader[0] not in without]

    def drop_if_waived(self, number: int, peers: Iterable[int]) -> bool:
        """Forget a value, or why there is none, if none of `peers` will fetch it. Whether it was forgotten."""
        there = number in self.values or number in self.refused
        if not there or not (self.ended | self.waived.get(number, set())).issuperset(peers):
            return False
        self.values.pop(number, None)
        self.refused.pop(number, None)
        self.waived.pop(number, None)
        self.used_up = max(self.used_up, number)
        return True

    def keep_ahead(self, peer: int, number: int, ref: Ref, place: Hashable, message: Message) -> None:
        """Keep a value that `peer` has sent without a request, instead of an older one of the same place."""
        for key in [key for key, (its, _) in self.ahead.items() if its == place and (key[0], key[2]) == (peer, ref)]:
            del self.ahead[key]
        self.ahead[peer, number, ref] = place, message

    def drop_ahead(self, peer: int, numbers: Collection[int]) -> None:
        """Forget the values that `peer` sent under these numbers."""
        gone = set(numbers)
        for key in [key for key in self.ahead if key[0] == peer and key[1] in gone]:
            del self.ahead[key]

    def take_parked(self) -> list[Request]:
        """All parked requests, to be answered with an error."""
        taken = [request for requests in self.parked.values() for request in requests]
        self.parked.clear()
        return taken

    def forget_requests(self, rank: int) -> None:
        """A rank does not wait for anything any more."""
        for number, requests in list(self.parked.items()):
            self.parked[number] = [request for request in requests if request.rank != rank]
            if not self.parked[number]:
                del self.parked[number]


class Fetch:
    """A value that was requested from another rank. Made by `Link.fetch`.

    Attributes:
        address: rank, body, number and part of the value.
        done: whether `wait` returns at once: the value is here, or an error.
    """

    def __init__(self, peer: int, body: str, number: int, ref: Ref, answered: threading.Condition) -> None:
        self.address = (peer, body, number, ref)
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
        """The owner has answered."""
        self._message = message
        self._finish()

    def fail(self, error: MidstreamError) -> None:
        """There will be no answer."""
        self._error = copy.copy(error)  # other fetches get the same error, and a raised error keeps its frames alive
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
                f"a value of type {unsendable.type_name} lies on rank {self.address[0]} and cannot be brought here, where the "
                f"trace uses it ({unsendable.reason}); use what it holds, such as its tensors, instead."
            )
        elif header.get("failed"):
            self._error = self._value


def _unsendable(tree: Any) -> UnsendableError | None:
    """The first `UnsendableError` that stands in `tree` in place of a value."""
    if isinstance(tree, UnsendableError):
        return tree
    inside: Iterable[Any] = ()
    if isinstance(tree, (tuple, list)):
        inside = tree
    elif isinstance(tree, Mapping):
        inside = tree.values()
    return next((found for item in inside if (found := _unsendable(item)) is not None), None)
