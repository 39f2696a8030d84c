"""What one rank has published, and who is in the habit of asking for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from midstream.errors import MidstreamError, StageFailedError
from midstream.sites import Ref
from midstream.trace.tree import is_raw, leaves, map_tensors
from midstream.transport.mailbox import Message
from midstream.transport.staging import mark_ready

HABIT = 2  # fetches in a row, after which a place is sent ahead
_HOST = torch.device("cpu")


class Held(NamedTuple):
    """A value where it lies now, and the events with which its tensors are complete there."""

    value: Any
    ready: Mapping[torch.device, torch.cuda.Event]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Published:
    """A published value. `held` is replaced as a whole, so that it can be sent while it is being moved."""

    held: Held
    readers: int | None  # answers that are still to be given; None: any number
    place: Hashable | None
    turn: int  # which publication of its place this is, in its body

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in leaves(self.held.value))


def hold(value: Any) -> Held:
    """`value`, whose tensors are complete with what the caller's current streams have been given."""
    return Held(value, mark_ready([tensor for _, tensor in leaves(value)]))


def move_to_host(all_published: Iterable[Published]) -> None:
    """Move what lies on this rank's CUDA device to pinned host memory, in a copy for each dtype that nobody waits for."""
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


@dataclass(slots=True)
class Habits:
    """Who fetches a place of a body, step after step: it is sent to them unasked.

    A reader is a rank and a part of the value. `turn` counts the publications of the place.
    """

    turn: int = 0
    ahead: set[tuple[int, Ref]] = field(default_factory=set)  # readers that are sent it unasked
    _rows: dict[tuple[int, Ref], tuple[int, int]] = field(default_factory=dict)  # reader -> last turn, fetches in a row

    def note(self, rank: int, ref: Ref, turn: int) -> None:
        """A fetch of what was published at `turn`."""
        last, row = self._rows.get((rank, ref), (-1, 0))
        if turn > last:
            row = row + 1 if turn == last + 1 else 1
            self._rows[rank, ref] = turn, row
            if row >= HABIT:
                self.ahead.add((rank, ref))

    def forget(self, rank: int, ref: Ref) -> None:
        """It is not wanted there any more."""
        self.ahead.discard((rank, ref))
        self._rows.pop((rank, ref), None)


class Request(NamedTuple):
    """A fetch of another rank's. `id` is the fetch's there; None for what is sent unasked."""

    rank: int
    ref: Ref
    id: int | None = None


@dataclass(slots=True)
class KnownBody:
    """What a rank knows of a body until every rank has ended it."""

    reason: MidstreamError | None = None  # why the body is over here; None while it is not
    silent: MidstreamError | None = None  # why nothing more is published, if that is known before
    failure: StageFailedError | None = None  # of another rank's
    ended: set[int] = field(default_factory=set)  # ranks, this one too
    values: dict[int, Published] = field(default_factory=dict)
    refused: dict[int, MidstreamError] = field(default_factory=dict)  # numbers that never have a value, and why
    used_up: int = -1  # the last number of a value that nobody was to fetch any more
    parked: defaultdict[int, list[Request]] = field(default_factory=lambda: defaultdict(list))
    habits: defaultdict[Hashable, Habits] = field(default_factory=lambda: defaultdict(Habits))
    # By number: the ranks that will not fetch it.
    waived: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    unasked: dict[tuple[int, int, Ref], tuple[Hashable, Message]] = field(
        default_factory=dict
    )  # sent ahead to this rank

    def add(self, number: int, held: Held, readers: int | None, place: Hashable | None) -> Published:
        turn = 0
        if place is not None:
            turn = self.habits[place].turn
            self.habits[place].turn += 1
        self.values[number] = Published(held, readers, place, turn)
        return self.values[number]

    def note_answer(self, number: int, request: Request) -> None:
        """`request` is given the value; it may have been the last."""
        published = self.values[number]
        if request.id is not None and published.place is not None:
            self.habits[published.place].note(request.rank, request.ref, published.turn)
        if published.readers is not None:
            published.readers -= 1
            if published.readers <= 0:
                del self.values[number]
                self.used_up = max(self.used_up, number)

    def drop_waived(self, number: int, peers: Iterable[int]) -> bool:
        """Forget a value, or why there is none, that none of `peers` will ask for; whether it is so."""
        there = number in self.values or number in self.refused
        if not there or not (self.ended | self.waived.get(number, set())).issuperset(peers):
            return False
        self.values.pop(number, None)
        self.refused.pop(number, None)
        self.waived.pop(number, None)
        self.used_up = max(self.used_up, number)
        return True

    def forget_ahead(self, peer: int, numbers: Collection[int]) -> set[tuple[Hashable, Ref]]:
        """What `peer` has sent ahead under these numbers is not wanted; the places and parts that were."""
        gone = set(numbers)
        unwanted = [key for key in self.unasked if key[0] == peer and key[1] in gone]
        return {(self.unasked.pop(key)[0], key[2]) for key in unwanted}

    def eager_readers(self, number: int, place: Hashable | None, asked: Iterable[Request]) -> list[Request]:
        """Who is to be sent a value of `place` besides those that have asked for it."""
        if place is None:
            return []
        have = {(request.rank, request.ref) for request in asked}
        without = self.ended | self.waived.get(number, set())
        return [Request(*reader) for reader in self.habits[place].ahead - have if reader[0] not in without]

    def take_parked(self) -> list[Request]:
        """The requests that wait for what is not published; they wait no longer."""
        taken = [request for requests in self.parked.values() for request in requests]
        self.parked.clear()
        return taken

    def forget_requests(self, rank: int) -> None:
        for number, requests in list(self.parked.items()):
            self.parked[number] = [request for request in requests if request.rank != rank]
            if not self.parked[number]:
                del self.parked[number]
