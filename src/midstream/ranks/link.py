"""How ranks of a group give each other values: the owner publishes, the others fetch.

    link = Link(rank, exchange_in(group), "pipeline", host)    # on every rank, collectively
    link.publish("body-1", 3, value)                           # on the owner; returns at once
    fetch = link.fetch(0, "body-1", 3, ref=(0,))               # on another rank, before or after; returns at once
    tensor = fetch.wait()                                      # on the CPU
    link.waive(0, {"body-1": [3]})                             # there: it will not fetch that value any more
    link.end("body-1", "the request ended before it")          # on every rank, or `drop`: then all of it is forgotten

A value is known by the body's name and a number that grows within the body. Each rank has a `Receiver`, and a `Sender` to every other
rank, so bytes move as results do. Requests are answered on the receiving threads, because the forward's thread may be in a collective or
wait for a fetch of its own. A request for a value that does not exist yet is parked until the value is published or its owner's body is
over. There is no timeout: the wait ends when the owner dies.

A fetch takes 1 to 4 ms, mostly switches between threads and processes. A trace that uses another stage's value in every step would pay
that for each value and step. So a rank that fetches a value of a place is sent the next value of that place ahead, without a request,
and so on as long as it uses those (`benchmarks/link_latency.py`: 0.1 ms).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed

from midstream.errors import (
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NeverReachedError,
    StageFailedError,
    TraceError,
    UnsendableError,
)
from midstream.sites import Ref, follow
from midstream.trace.tree import is_raw, leaves, map_tensors
from midstream.transport import wire
from midstream.transport.receiver import Message, Receiver
from midstream.transport.sender import Sender
from midstream.transport.staging import mark_ready

_HOST = torch.device("cpu")
_UNBOUNDED = 1 << 62  # bytes queued: those of published values, which are kept anyway
_NAMES_KEPT = 4096  # of bodies that are over; far more than can run at once
_CLOSE_SECONDS = 5.0


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


def exchange_in(group: Any) -> Callable[[Any], list[Any]]:
    """A collective for one of vLLM's groups: returns what every rank passed, in the group's order. For small values at the start."""

    def exchange(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, value, group=group.cpu_group)
        return gathered

    return exchange


class Link:
    """One rank's channels to the other ranks of a group.

    `publish`, `refuse`, `fetch`, `waive`, `wait_any`, `silence`, `end`, `drop` and `end_step` belong to one thread.
    Every rank that takes part in a body ends or drops it.

    Args:
        exchange: collective: `exchange(x)` returns what every rank of the group passed, in the group's order.
        name: which group it is.
        host: an address of this machine that the other ranks can reach; used if they run on several machines.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], name: str, host: str) -> None:
        self.rank = rank
        self.name = name
        machines = exchange(wire.machine())
        self.size = len(machines)
        self._lock = threading.Lock()
        self._answered = threading.Condition()  # notified when any fetch is done
        self._bodies: dict[str, SharedBody] = {}
        self._over: dict[str, MidstreamError] = {}  # recent bodies that are over, and why
        self._open: dict[int, Fetch] = {}
        self._ids = itertools.count()
        self._gone: set[int] = set()
        self._closed = False
        self._on_device: weakref.WeakSet[Published] = weakref.WeakSet()
        # Values sent ahead to this rank that it has used in this step: owner -> body -> (place, part).
        self._used: defaultdict[int, defaultdict[str, set[tuple[Hashable, Ref]]]]
        self._used = defaultdict(lambda: defaultdict(set))
        self._receiver = Receiver(None if len(set(machines)) == 1 else host)
        self._senders: dict[int, Sender] = {}
        self._peers = [peer for peer in range(self.size) if peer != rank]
        for peer in self._peers:
            self._serve(peer)
        addresses = exchange(self._receiver.address)
        for peer in self._peers:
            self._senders[peer] = Sender(addresses[peer], self._sender_name(rank), queue_bytes=_UNBOUNDED)
        exchange(None)  # from here on every rank can answer

    def publish(
        self, body: str, number: int, value: Any, readers: int | None = None, place: Hashable | None = None
    ) -> None:
        """Make `value` available to the other ranks, and answer those that wait for it. Returns at once.

        Args:
            value: a tree of tensors, which nobody writes to afterwards, and of values that can be pickled. It is kept until every
                rank has ended the body or waived the value.
            readers: keep it only until this many ranks have fetched it, once each.
            place: the same for values of one point of the model. A rank that fetches one is sent the next one without asking.
        """
        if not self._peers:
            return
        held = hold(value)
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            published = known.values[number] = Published(held, readers, place)
            asked = known.parked.pop(number, [])
            if not asked and known.drop_if_waived(number, self._peers):
                return
            if held.ready:
                self._on_device.add(published)
            ahead = known.take_subscribers(number, place, asked)
            for request in asked:
                known.note_answer(number, request.rank, request.ref)
            for rank, ref in ahead:  # `end_step` there renews the subscription
                known.note_answer(number, rank, ref, subscribe=False)
        for request in asked:
            self._answer(request, held)
        for rank, ref in ahead:
            with contextlib.suppress(
                LookupError, TypeError
            ):  # without such a part this time: an error if it is fetched
                header = {"kind": "ahead", "body": body, "number": number, "place": place, "ref": ref}
                self._post(rank, header, follow(held.value, ref), held)

    def refuse(self, body: str, number: int, error: MidstreamError) -> None:
        """There never will be a value under this number: fetches of it raise `error`."""
        if not self._peers:
            return
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            known.refused[number] = error
            asked = known.parked.pop(number, [])
            known.drop_if_waived(number, self._peers)
        for request in asked:
            self._answer(request, error)

    def fetch(self, peer: int, body: str, number: int, ref: Ref = ()) -> Fetch:
        """Request what `peer` publishes under `number`, or only the part of it at `ref`. Returns at once."""
        fetch = Fetch(peer, body, number, ref, self._answered)
        with self._lock:
            known = self._known(body)
            reason = self._over[body] if known is None else known.reason
            if reason is not None:
                fetch.fail(reason)
            elif self._closed or peer in self._gone:
                fetch.fail(self._gone_error(peer))
            elif known is not None and (here := known.ahead.pop((peer, number, ref), None)) is not None:
                place, message = here
                self._used[peer][body].add((place, ref))
                fetch.settle(message)
            else:
                identity = next(self._ids)
                self._open[identity] = fetch
        if not fetch.done:
            self._post(peer, {"kind": "fetch", "id": identity, "body": body, "number": number, "ref": ref})
        return fetch

    def waive(self, peer: int, numbers: Mapping[str, Collection[int]]) -> None:
        """This rank will not fetch, from `peer`, the values under these numbers of bodies, whether published yet or not."""
        with self._lock:
            under_way = {body: known for body in numbers if (known := self._under_way(body)) is not None}
            for body, known in under_way.items():
                known.drop_ahead(peer, numbers[body])
        if under_way:
            self._post(peer, {"kind": "waived", "numbers": {body: list(numbers[body]) for body in under_way}})

    def wait_any(self, fetches: Collection[Fetch]) -> None:
        """Wait until one of `fetches` is done."""
        with self._answered:
            self._answered.wait_for(lambda: any(fetch.done for fetch in fetches))

    def silence(self, body: str, reason: str, failed: bool = False) -> None:
        """This rank publishes nothing more for the body, but may still fetch, and be fetched from. Arguments as for `end`."""
        error = _no_more(reason, failed)
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            known.silent = error
            refused = known.take_parked()
        for request in refused:
            self._answer(request, error)
        for peer in self._peers if failed else ():
            self._post(peer, {"kind": "failed", "body": body, "failure": error})

    def end(self, body: str, reason: str, failed: bool = False) -> None:
        """The body is over on this rank. Fetches of what it has not published raise `reason`.

        `failed`: it is over because of an error of its own, which other ranks also learn by `failure_of`.
        """
        self._finish([body], _no_more(reason, failed), at_once=False)

    def failure_of(self, body: str) -> StageFailedError | None:
        """What the body failed with on another rank, if this rank has heard of it."""
        known = self._bodies.get(body)
        return known.failure if known is not None else None

    def drop(self, bodies: Collection[str]) -> None:
        """These bodies were aborted: forget them at once."""
        self._finish(bodies, NeverReachedError("the request was aborted."), at_once=True)

    def end_step(self) -> None:
        """Call it after each step: ask for the next values of the places whose values were used, and free device memory.

        What was published since the last call, and is still kept, moves to host memory.
        """
        used, self._used = self._used, defaultdict(lambda: defaultdict(set))
        for peer, places in used.items():
            self._post(peer, {"kind": "used", "places": {body: list(each) for body, each in places.items()}})
        with self._lock:
            published = list(self._on_device)
            self._on_device.clear()
        move_to_host(published)

    def gauges(self) -> dict[str, int]:
        """What is held for running bodies: zero when there are none."""
        with self._lock:
            published = [published for known in self._bodies.values() for published in known.values.values()]
            return {
                "published": len(published),
                "published_bytes": sum(one.nbytes for one in published),
                "parked_requests": sum(len(some) for known in self._bodies.values() for some in known.parked.values()),
                "open_fetches": len(self._open),
                "sent_ahead": sum(len(known.ahead) for known in self._bodies.values()),
                "bodies": len(self._bodies),
            }

    def close(self) -> None:
        """Disconnect; open fetches, and later ones, raise EngineClosedError. Idempotent."""
        with self._lock:
            self._closed = True
            fetches = list(self._open.values())
            self._open.clear()
            self._bodies.clear()
        for fetch in fetches:
            fetch.fail(EngineClosedError(f"the engine was closed before rank {fetch.address[0]} had sent a value."))
        for sender in self._senders.values():
            sender.close(timeout=_CLOSE_SECONDS)
        self._receiver.close()

    # Called on the receiving threads.

    def _serve(self, peer: int) -> None:
        def handle(message: Message) -> None:
            getattr(self, f"_on_{message.header['kind']}")(peer, message.header, message)

        self._receiver.serve(peer, self._sender_name(peer), handle, lambda: self._lose(peer))

    def _on_fetch(self, peer: int, header: dict[str, Any], _: Message) -> None:
        request, body, number = Request(peer, header["ref"], header["id"]), header["body"], header["number"]
        with self._lock:
            known = self._known(body)
            if known is None:
                outcome: Held | MidstreamError = self._over[body]
            elif number in known.values:
                outcome = known.values[number].held
                known.note_answer(number, peer, request.ref)
            elif (why := known.refused.get(number) or known.reason or known.silent) is not None:
                outcome = why
            elif number <= known.used_up:
                outcome = TraceError(f"value {number} of {body!r} was forgotten: no rank was to fetch it again.")
            else:
                return known.parked[number].append(request)
        self._answer(request, outcome)

    def _on_answer(self, peer: int, header: dict[str, Any], message: Message) -> None:
        with self._lock:
            fetch = self._open.pop(header["id"], None)
        if fetch is not None:
            fetch.settle(message)

    def _on_ahead(self, peer: int, header: dict[str, Any], message: Message) -> None:
        body, number, ref, place = (header[key] for key in ("body", "number", "ref", "place"))
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            waiting = [id for id, fetch in self._open.items() if fetch.address == (peer, body, number, ref)]
            fetches = [self._open.pop(id) for id in waiting]
            if not fetches:
                known.keep_ahead(peer, number, ref, place, message)
        for fetch in fetches:
            fetch.settle(message)

    def _on_used(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            for body, places in header["places"].items():
                if (known := self._under_way(body)) is not None:
                    for place, ref in places:
                        known.subscribers[place].add((peer, ref))

    def _on_waived(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            for body, numbers in header["numbers"].items():
                if (known := self._under_way(body)) is not None:
                    for number in numbers:
                        known.waived[number].add(peer)
                        known.drop_if_waived(number, self._peers)

    def _on_failed(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            if (known := self._known(header["body"])) is not None:
                known.failure = known.failure or header["failure"]

    def _on_end(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            for body in header["bodies"]:
                if (known := self._known(body)) is not None:
                    known.ended.add(peer)
                    known.failure = known.failure or header.get("failure")
                    known.forget_requests(peer)
                    for number in [*known.values, *known.refused]:
                        known.drop_if_waived(number, self._peers)
                    self._forget_if_over(body, known)

    def _lose(self, peer: int) -> None:
        """The peer is gone."""
        with self._lock:
            self._gone.add(peer)
            lost = [id for id, fetch in self._open.items() if fetch.address[0] == peer]
            fetches = [self._open.pop(id) for id in lost]
            for body, known in list(self._bodies.items()):
                known.forget_requests(peer)
                self._forget_if_over(body, known)
        for fetch in fetches:
            fetch.fail(self._gone_error(peer))
        if peer in self._senders:
            self._senders[peer].close(flush=False)  # if it is alive after all, it sees that we have given it up

    # Called with the lock held.

    def _known(self, body: str) -> SharedBody | None:
        """The body's record, made if need be; None if the body is over on every rank."""
        return None if body in self._over else self._bodies.setdefault(body, SharedBody())

    def _under_way(self, body: str) -> SharedBody | None:
        """The body's record; None if the body is over on this rank."""
        known = self._known(body)
        return known if known is not None and known.reason is None else None

    def _forget_if_over(self, body: str, known: SharedBody) -> None:
        if known.reason is not None and len(known.ended | self._gone) == self.size:
            self._forget(body, known.reason)

    def _forget(self, body: str, reason: MidstreamError) -> None:
        self._bodies.pop(body, None)
        self._over[body] = reason
        if len(self._over) > _NAMES_KEPT:
            del self._over[next(iter(self._over))]

    # Called without the lock.

    def _finish(self, bodies: Collection[str], reason: MidstreamError, at_once: bool) -> None:
        refused: list[Request] = []
        with self._lock:
            bodies = [body for body in bodies if body not in self._over]
            if not bodies or not self._peers:
                return
            for body in bodies:
                known = self._bodies.setdefault(body, SharedBody())
                known.reason = reason
                known.ended.add(self.rank)
                refused += known.take_parked()
                known.ahead.clear()
                known.subscribers.clear()
                if at_once:
                    self._forget(body, reason)
                else:
                    self._forget_if_over(body, known)
            mine = [id for id, fetch in self._open.items() if fetch.address[1] in bodies]
            fetches = [self._open.pop(id) for id in mine]
        for fetch in fetches:
            fetch.fail(reason)
        for request in refused:
            self._answer(request, reason)
        failure = reason if isinstance(reason, StageFailedError) else None
        for peer in self._peers:
            self._post(peer, {"kind": "end", "bodies": bodies, "failure": failure})

    def _answer(self, request: Request, outcome: Held | Exception) -> None:
        if isinstance(outcome, Held):
            try:
                value = follow(outcome.value, request.ref)
                return self._post(request.rank, {"kind": "answer", "id": request.id}, value, outcome)
            except (LookupError, TypeError) as error:
                outcome = error
        self._post(request.rank, {"kind": "answer", "id": request.id, "failed": True}, outcome)

    def _post(self, peer: int, header: Mapping[str, Any], value: Any = None, held: Held | None = None) -> None:
        try:
            self._senders[peer].send({"key": self.rank, **header}, value, ready=held.ready if held else {})
        except ChannelClosedError:
            self._lose(peer)

    def _sender_name(self, rank: int) -> str:
        return f"{self.name} rank {rank}"

    def _gone_error(self, peer: int) -> EngineClosedError:
        return EngineClosedError(f"{self.name} rank {peer} has gone, and the values with it that other ranks wait for.")


def _no_more(reason: str, failed: bool) -> MidstreamError:
    """What a fetch raises for a value that its owner's body has not published and will not."""
    return StageFailedError(reason) if failed else NeverReachedError(reason)
