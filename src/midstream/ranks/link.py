"""Sends values between the ranks of a group: the owner publishes a value, and the other ranks fetch it.

    link = Link(rank, exchange_in(group), "pipeline", host)    # on every rank, collectively
    link.publish("body-1", 3, value)                           # on the owner; returns at once
    fetch = link.fetch(0, "body-1", 3, ref=(0,))               # on another rank, before or after `publish`; returns at once
    tensor = fetch.wait()                                      # on the CPU
    link.waive(0, {"body-1": [3]})                             # on that rank: it will not fetch this value
    link.end("body-1", NeverReachedError("the request ended"))  # on every rank, or `drop`: all values of the body are forgotten

A value is identified by the body's name and a number that increases within the body. Each rank has a `Receiver`, and a `Sender` to every
other rank. Requests are answered on the receiving threads, because the forward's thread may be in a collective or wait for a fetch of its
own. A request for a value that does not exist yet is parked until the value is published or its owner's body ends. There is no timeout: the
wait ends when the owner dies.

A fetch takes 1 to 4 ms, mostly for switches between threads and processes. A trace that uses another stage's value in every step would
need this time for each value and step. So after a rank has fetched the value of a point, the owner sends it the point's next value ahead,
without a request. The owner continues as long as the rank uses the values that it sends ahead. Using such a value takes 0.1 ms
(`benchmarks/link_latency.py`).
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
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
from midstream.transport import messages
from midstream.transport.receiver import Message, Receiver
from midstream.transport.sender import Sender, mark_ready
from midstream.tree import Ref, follow, is_raw, leaves, map_tensors, objects_in

_HOST = torch.device("cpu")
_UNBOUNDED = 1 << 62  # bytes queued: published values are kept in memory anyway
_NAMES_KEPT = 4096  # of bodies that are over; far more than can run at once
_CLOSE_SECONDS = 5.0

Requester = tuple[int, Ref]  # a rank, and the part of a value that it fetches
PointName = str | tuple[str, ...]  # a point of the model


class _LinkHeader(msgspec.Struct, array_like=True, tag=True):
    """The header of a message between ranks. `rank` is the sender's."""

    rank: int


class _Request(_LinkHeader):
    """A request for a value, or for the part of it at `ref`."""

    body: str
    number: int
    ref: Ref


class _Value(_LinkHeader):
    """The message has a value; or, if it has `failed`, the error to raise. `ahead`: the value's point, if it was not requested."""

    body: str
    number: int
    ref: Ref
    failed: bool
    ahead: PointName | None


class _Used(_LinkHeader):
    """The rank has used values that came ahead. They are given by body, point and part; send the next ones ahead, too."""

    places: list[tuple[str, PointName, Ref]]


class _Waived(_LinkHeader):
    """The rank will not fetch the values of these numbers, by body."""

    numbers: dict[str, list[int]]


class _Over(_LinkHeader):
    """The bodies have failed with `failure`, if it is not None. If `ended`, they are over on the sender's rank."""

    bodies: list[str]
    failure: str | None
    ended: bool = True


_HEADERS = _Request | _Value | _Used | _Waived | _Over


class ReadyValue(NamedTuple):
    """A value, and the events after which its tensors are complete; or, if `failed`, the error that a fetch of it raises."""

    value: Any
    ready: Mapping[torch.device, torch.cuda.Event]
    failed: bool = False

    @classmethod
    def error(cls, error: Exception) -> ReadyValue:
        return cls(error, {}, failed=True)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Published:
    """A published value.

    Attributes:
        content: replaced, never changed, so that it can be sent while its tensors move to host memory.
        ranks: the ranks that may still fetch it. When none is left, the value is forgotten.
        once: whether each of them fetches it only once.
        place: the point of the model at which it was read. A rank that gets it is sent the point's next value without a request.
    """

    content: ReadyValue
    ranks: set[int]
    once: bool = False
    place: PointName | None = None


class Fetch:
    """A value that was requested from another rank. Made by `Link.fetch`.

    Attributes:
        owner: the rank that has it.
        answer: the message that brings it, or the reason why none comes.
    """

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.answer: Future[Message] = Future()
        self._opened: tuple[_Value, Any] | None = None  # the answer's header and value

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self.answer.done()

    def fail(self, error: MidstreamError) -> None:
        """Make `wait` raise the error, since no answer will come."""
        self.answer.set_exception(copy.copy(error))  # a raised error keeps its frames alive

    def wait(self) -> Any:
        """The value, its tensors on the CPU.

        Raises NeverReachedError if it will never exist, EngineClosedError if its owner has gone, TraceError if it cannot
        be sent, and LookupError or TypeError if it lacks the requested part.
        """
        if self._opened is None:
            self._opened = self.answer.result().open()
        header, value = self._opened
        if (unsendable := next(objects_in(value, UnsendableError), None)) is not None:
            raise TraceError(
                f"a value of type {unsendable.type_name} lies on rank {self.owner} and cannot be brought here, where the "
                f"trace uses it ({unsendable.reason}); use what it holds, such as its tensors, instead."
            )
        if header.failed:
            raise value
        return value


@dataclass(slots=True)
class SharedBody:
    """The state of a body on this rank, until every rank has ended it.

    Attributes:
        reason: why the body is over here; None while it is not.
        silent: why this rank publishes no more values, if that is known before the body is over.
        failure: the body's error on another rank.
        ended: the ranks that have ended it, this one included.
        values: published here, by number.
        forgotten: the largest number of a value that was forgotten because no rank would fetch it any more.
        waived: number -> the ranks that will not fetch it, before it is published.
        parked: number -> the readers that have requested it, before it is published.
        subscribers: point -> the readers to whom the point's next value is sent without a request.
        ahead: (rank, point, part) -> number and message of the newest value that was sent without a request and not fetched yet.
    """

    reason: MidstreamError | None = None
    silent: MidstreamError | None = None
    failure: StageFailedError | None = None
    ended: set[int] = field(default_factory=set)
    values: dict[int, Published] = field(default_factory=dict)
    forgotten: int = -1
    waived: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    parked: defaultdict[int, set[Requester]] = field(default_factory=lambda: defaultdict(set))
    subscribers: defaultdict[PointName, set[Requester]] = field(default_factory=lambda: defaultdict(set))
    ahead: dict[tuple[int, PointName, Ref], tuple[int, Message]] = field(default_factory=dict)

    def note_answer(self, number: int, reader: Requester) -> None:
        """Note that a reader gets a value: subscribe it to the point's next value. A value with `once` is not kept for this rank."""
        published = self.values[number]
        if published.place is not None:
            self.subscribers[published.place].add(reader)
        if published.once:
            self.without(reader[0], [number])

    def without(self, rank: int, numbers: Iterable[int]) -> None:
        """A rank will not fetch these values. Those that no rank will fetch are forgotten."""
        for number in numbers:
            if (published := self.values.get(number)) is not None:
                published.ranks.discard(rank)
                if not published.ranks:
                    del self.values[number]
                    self.forgotten = max(self.forgotten, number)
            elif number > self.forgotten:
                self.waived[number].add(rank)

    def leave(self, rank: int) -> None:
        """A rank will not fetch anything of the body any more."""
        for readers in self.parked.values():
            readers -= {reader for reader in readers if reader[0] == rank}
        self.without(rank, list(self.values))

    def take_ahead(self, rank: int, number: int, ref: Ref) -> tuple[PointName, Message] | None:
        """Remove and return the point and message of a value that has come without a request; None if it has not come."""
        for key, (its, message) in self.ahead.items():
            if its == number and (key[0], key[2]) == (rank, ref):
                del self.ahead[key]
                return key[1], message
        return None


def exchange_in(group: Any) -> Callable[[Any], list[Any]]:
    """A collective for one of vLLM's groups: it returns the values that all ranks passed, in the group's order. For small values."""

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
        exchange: collective: `exchange(x)` returns the values that all ranks of the group passed, in the group's order.
        name: of the group.
        host: an address of this machine that the other ranks can reach; used if they run on several machines.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], name: str, host: str) -> None:
        self.rank = rank
        self.name = name
        machines = exchange(messages.machine_name())
        self.size = len(machines)
        self._lock = threading.Lock()
        self._bodies: dict[str, SharedBody] = {}
        self._over: dict[str, MidstreamError] = {}  # recent bodies that are over, and why
        self._open: dict[tuple[int, str, int, Ref], list[Fetch]] = {}  # (rank, body, number, part)
        self._gone: set[int] = set()
        self._closed = False
        self._on_device: weakref.WeakSet[Published] = weakref.WeakSet()
        # Values sent ahead to this rank that it has used in this step: owner -> (body, place, part).
        self._used: defaultdict[int, set[tuple[str, PointName, Ref]]] = defaultdict(set)
        self._peers = [peer for peer in range(self.size) if peer != rank]
        names = {self._sender_name(peer): peer for peer in self._peers}
        self._receiver = Receiver(None if len(set(machines)) == 1 else host, headers=_HEADERS, handle=self._handle)
        self._receiver.when_gone = lambda name: self._lose(names[name])
        self._senders: dict[int, Sender] = {}
        addresses = exchange(self._receiver.address)
        for peer in self._peers:
            self._senders[peer] = Sender(addresses[peer], self._sender_name(rank), queue_bytes=_UNBOUNDED)
        exchange(None)  # from here on every rank can answer

    def publish(
        self,
        body: str,
        number: int,
        value: Any,
        readers: Collection[int] | None = None,
        place: PointName | None = None,
    ) -> None:
        """Make `value` available to the other ranks, and answer the ranks that wait for it. Returns at once.

        Args:
            value: a tree of tensors, which must not be changed afterwards, and of values that can be pickled. It is kept until
                every rank has ended the body or waived the value.
            readers: the only ranks that fetch it, once each. Default: any rank, any number of times.
            place: the point of the model. A rank that fetches a value of a point is sent the point's next value without a request.
        """
        held = ReadyValue(value, mark_ready([tensor for _, tensor in leaves(value)]))
        ranks = set(self._peers if readers is None else readers)
        self._offer(body, number, Published(held, ranks, readers is not None, place))

    def refuse(self, body: str, number: int, error: MidstreamError) -> None:
        """Fetches of this number raise `error`, now and later."""
        self._offer(body, number, Published(ReadyValue.error(error), set(self._peers)))

    def _offer(self, body: str, number: int, published: Published) -> None:
        with self._lock:
            if not self._peers or (known := self._running_body(body)) is None:
                return
            held, place = published.content, published.place
            published.ranks -= known.ended | known.waived.pop(number, set()) | self._gone
            asked = known.parked.pop(number, set())
            waiting = known.subscribers.pop(place, set()) - asked if place is not None else set()
            ahead = [reader for reader in waiting if reader[0] in published.ranks]
            known.values[number] = published
            for reader in asked:
                known.note_answer(number, reader)
            known.without(self.rank, [number])
            if held.ready and number in known.values:
                self._on_device.add(published)
        for reader in asked:
            self._answer(reader, body, number, held)
        for reader in ahead:  # the reader's `end_step` renews the subscription if it has used the value
            self._answer(reader, body, number, held, place)

    def fetch(self, peer: int, body: str, number: int, ref: Ref = ()) -> Fetch:
        """Request the value that `peer` publishes under `number`, or only the part of it at `ref`. Returns at once."""
        fetch = Fetch(peer)
        with self._lock:
            known = self._known(body)
            reason = self._over[body] if known is None else known.reason
            if reason is None and (self._closed or peer in self._gone):
                reason = self._gone_error(peer)
            if reason is not None:
                fetch.fail(reason)
            elif known is not None and (here := known.take_ahead(peer, number, ref)) is not None:
                place, message = here
                self._used[peer].add((body, place, ref))
                fetch.answer.set_result(message)
            else:
                self._open.setdefault((peer, body, number, ref), []).append(fetch)
        if not fetch.done:
            self._post(peer, _Request(self.rank, body, number, ref))
        return fetch

    def waive(self, peer: int, numbers: Mapping[str, Collection[int]]) -> None:
        """Promise not to fetch these values from `peer`, whether they are published yet or not: body -> numbers."""
        with self._lock:
            running = {body: known for body in numbers if (known := self._running_body(body)) is not None}
            for body, known in running.items():
                useless = [
                    key for key, (number, _) in known.ahead.items() if key[0] == peer and number in numbers[body]
                ]
                for key in useless:
                    del known.ahead[key]
        if running:
            self._post(peer, _Waived(self.rank, {body: list(numbers[body]) for body in running}))

    def wait_any(self, fetches: Collection[Fetch]) -> None:
        """Wait until one of `fetches` is done."""
        wait([fetch.answer for fetch in fetches], return_when=FIRST_COMPLETED)

    def silence(self, body: str, reason: MidstreamError) -> None:
        """This rank publishes no more values of the body. It may still fetch, and its values may be fetched. Arguments as for `end`."""
        with self._lock:
            known = self._running_body(body)
            if known is None:
                return
            known.silent = reason
            parked, known.parked = known.parked, defaultdict(set)
        self._refuse_parked(body, parked, reason)
        for peer in self._peers if isinstance(reason, StageFailedError) else ():
            self._post(peer, _Over(self.rank, [body], str(reason), ended=False))

    def end(self, body: str, reason: MidstreamError) -> None:
        """The body is over on this rank. Fetches of values that it has not published raise `reason`.

        If `reason` is a StageFailedError, `failure_of` returns it on the other ranks.
        """
        self._finish([body], reason)

    def failure_of(self, body: str) -> StageFailedError | None:
        """The body's error on another rank, if this rank has heard of one."""
        known = self._bodies.get(body)
        return known.failure if known is not None else None

    def drop(self, bodies: Collection[str]) -> None:
        """These bodies were aborted: forget them at once."""
        self._finish(bodies, NeverReachedError("the request was aborted."), at_once=True)

    def _finish(self, bodies: Collection[str], reason: MidstreamError, at_once: bool = False) -> None:
        parked: dict[str, dict[int, set[Requester]]] = {}
        with self._lock:
            bodies = [body for body in bodies if body not in self._over]
            if not bodies or not self._peers:
                return
            for body in bodies:
                known = self._bodies.setdefault(body, SharedBody())
                known.reason = reason
                known.ended.add(self.rank)
                parked[body], known.parked = known.parked, defaultdict(set)
                known.ahead.clear()
                known.subscribers.clear()
                self._forget_if_over(body, known, at_once)
            fetches = self._take_open(lambda peer, body: body in bodies)
        for fetch in fetches:
            fetch.fail(reason)
        for body in bodies:
            self._refuse_parked(body, parked[body], reason)
        failure = str(reason) if isinstance(reason, StageFailedError) else None
        for peer in self._peers:
            self._post(peer, _Over(self.rank, bodies, failure))

    def end_step(self) -> None:
        """Call it after each step: ask for the next values of the points whose values were used, and free device memory.

        Values that were published since the last call, and are still kept, move to host memory.
        """
        used, self._used = self._used, defaultdict(set)
        for peer, places in used.items():
            self._post(peer, _Used(self.rank, list(places)))
        with self._lock:
            published = list(self._on_device)
            self._on_device.clear()
        _move_to_host(published)

    def gauges(self) -> dict[str, int]:
        """Counts of the objects that are held for running bodies: zeros when no body runs."""
        with self._lock:
            bodies = list(self._bodies.values())
            published = [published for known in bodies for published in known.values.values()]
            return {
                "published": len(published),
                "published_bytes": sum(tensor.nbytes for one in published for _, tensor in leaves(one.content.value)),
                "parked_requests": sum(len(readers) for known in bodies for readers in known.parked.values()),
                "open_fetches": sum(map(len, self._open.values())),
                "sent_ahead": sum(len(known.ahead) for known in bodies),
                "bodies": len(bodies),
            }

    def close(self) -> None:
        """Disconnect; open fetches, and later ones, raise EngineClosedError. Idempotent."""
        with self._lock:
            self._closed = True
            fetches = self._take_open(lambda peer, body: True)
            self._bodies.clear()
        for fetch in fetches:
            fetch.fail(EngineClosedError(f"the engine was closed before rank {fetch.owner} had sent a value."))
        for sender in self._senders.values():
            sender.close(timeout=_CLOSE_SECONDS)
        self._receiver.close()

    # Called on the receiving threads.

    def _handle(self, message: Message) -> None:
        match message.header:
            case _Request() as wanted:
                self._give(wanted)
            case _Value() as value:
                self._take(value, message)
            case _Used(peer, places):
                with self._lock:
                    for body, place, ref in places:
                        if (known := self._running_body(body)) is not None:
                            known.subscribers[place].add((peer, ref))
            case _Waived(peer, numbers):
                with self._lock:
                    for body, waived in numbers.items():
                        if (known := self._running_body(body)) is not None:
                            known.without(peer, waived)
            case _Over(peer, bodies, failure, ended):
                with self._lock:
                    for body in bodies:
                        if (known := self._known(body)) is not None:
                            known.failure = known.failure or (
                                StageFailedError(failure) if failure is not None else None
                            )
                            if ended:
                                known.ended.add(peer)
                                known.leave(peer)
                                self._forget_if_over(body, known)

    def _give(self, wanted: _Request) -> None:
        body, number, reader = wanted.body, wanted.number, (wanted.rank, wanted.ref)
        with self._lock:
            known = self._known(body)
            if known is None:
                held = ReadyValue.error(self._over[body])
            elif number in known.values:
                held = known.values[number].content
                known.note_answer(number, reader)
            elif (why := known.reason or known.silent) is not None:
                held = ReadyValue.error(why)
            elif number <= known.forgotten:
                text = f"value {number} of {body!r} was forgotten: no rank was to fetch it again."
                held = ReadyValue.error(TraceError(text))
            else:
                return known.parked[number].add(reader)
        self._answer(reader, body, number, held)

    def _take(self, value: _Value, message: Message) -> None:
        key = (value.rank, value.body, value.number, value.ref)
        with self._lock:
            fetches = self._open.pop(key, [])
            if not fetches and value.ahead is not None and (known := self._running_body(value.body)) is not None:
                known.ahead[value.rank, value.ahead, value.ref] = value.number, message
        for fetch in fetches:
            fetch.answer.set_result(message)

    def _lose(self, peer: int) -> None:
        """Note that the peer has gone, and fail the fetches from it."""
        with self._lock:
            self._gone.add(peer)
            fetches = self._take_open(lambda owner, body: owner == peer)
            for body, known in list(self._bodies.items()):
                known.leave(peer)
                self._forget_if_over(body, known)
        for fetch in fetches:
            fetch.fail(self._gone_error(peer))
        if peer in self._senders:
            self._senders[peer].close(flush=False)  # if it is alive after all, it sees the closed connection

    # Called with the lock held.

    def _known(self, body: str) -> SharedBody | None:
        """The body's record, made if need be; None if the body is over on every rank."""
        return None if body in self._over else self._bodies.setdefault(body, SharedBody())

    def _running_body(self, body: str) -> SharedBody | None:
        """The body's record; None if the body is over on this rank."""
        known = self._known(body)
        return known if known is not None and known.reason is None else None

    def _forget_if_over(self, body: str, known: SharedBody, at_once: bool = False) -> None:
        if known.reason is None or not (at_once or len(known.ended | self._gone) == self.size):
            return
        self._bodies.pop(body, None)
        self._over[body] = known.reason
        if len(self._over) > _NAMES_KEPT:
            del self._over[next(iter(self._over))]

    def _take_open(self, matches: Callable[[int, str], bool]) -> list[Fetch]:
        """Remove and return the open fetches whose rank and body `matches` accepts. The caller fails them."""
        keys = [key for key in self._open if matches(key[0], key[1])]
        return [fetch for key in keys for fetch in self._open.pop(key)]

    # Called without the lock.

    def _answer(
        self, reader: Requester, body: str, number: int, held: ReadyValue, ahead: PointName | None = None
    ) -> None:
        """Send a value, or the reader's part of it. `ahead`: the value's point, if it was not requested."""
        rank, ref = reader
        value, ready, failed = held
        if not failed:
            try:
                value = follow(value, ref)
            except (LookupError, TypeError) as error:
                if ahead is not None:
                    return  # this value has no such part; a fetch of it will get the error
                value, ready, failed = ReadyValue.error(error)
        self._post(rank, _Value(self.rank, body, number, ref, failed, ahead), value, ready)

    def _refuse_parked(self, body: str, parked: Mapping[int, set[Requester]], error: MidstreamError) -> None:
        for number, readers in parked.items():
            for reader in readers:
                self._answer(reader, body, number, ReadyValue.error(error))

    def _post(
        self,
        peer: int,
        header: _LinkHeader,
        value: Any = None,
        ready: Mapping[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        try:
            self._senders[peer].send(header, value, ready=ready or {})
        except ChannelClosedError:
            self._lose(peer)

    def _sender_name(self, rank: int) -> str:
        return f"{self.name} rank {rank}"

    def _gone_error(self, peer: int) -> EngineClosedError:
        return EngineClosedError(f"{self.name} rank {peer} has gone, and the values with it that other ranks wait for.")


def _move_to_host(moving: Collection[Published]) -> None:
    """Move tensors on this rank's CUDA device to pinned host memory, in one copy for each dtype, without waiting for it."""
    by_dtype: defaultdict[torch.dtype, dict[int, torch.Tensor]] = defaultdict(dict)
    for published in moving:
        for _, tensor in leaves(published.content.value):
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
            value = map_tensors(published.content.value, lambda _, tensor: moved.get(id(tensor), tensor))
            published.content = ReadyValue(value, {**published.content.ready, _HOST: copied})
