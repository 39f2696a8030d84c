"""The way of values between the ranks of a group: one publishes what it has computed, the others fetch it.

    link = Link(rank, all_gather_object, "pipeline")       # on every rank, collectively
    link.publish("body-1", 3, value)                       # on the owner; returns at once
    fetch = link.fetch(0, "body-1", 3, ref=(0,))           # on another rank, before or after; returns at once
    tensor = fetch.wait()                                  # on the CPU
    link.waive(0, {"body-1": [3]})                         # there: it will not ask for it any more
    link.end("body-1", "the request ended before it")      # on every rank, or `drop`: then all of it is forgotten

Values are known by the body's name and a number that grows within the body. Each rank has a `Receiver` and a `Sender` to
every other one, so that bytes move as results do (`engine/results`). Requests are answered on the threads that receive
them: the forward's thread may be in a collective, or waiting for a fetch of its own. A request for what is not there yet
waits, parked, until it is published or until its owner's body is over; nothing else bounds the wait but the owner's life.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from midstream.errors import (
    ChannelClosedError,
    EngineClosedError,
    MidstreamError,
    NeverReachedError,
    StageFailedError,
    TraceError,
)
from midstream.ranks.fetch import Fetch
from midstream.ranks.published import Held, KnownBody, Published, Request, hold, move_to_host
from midstream.sites import Ref, follow
from midstream.transport import wire
from midstream.transport.mailbox import Message
from midstream.transport.receiver import Receiver
from midstream.transport.sender import Sender

__all__ = ["Fetch", "Link"]

_UNBOUNDED = 1 << 62  # bytes queued: they are those of published values, which are kept anyway
_NAMES_KEPT = 4096  # of bodies that are over; far more than can be under way at once
_UNWANTED = 8  # values of one place sent ahead and not fetched that are kept; with one more, its owner is told to stop
_CLOSE_SECONDS = 5.0


class Link:
    """One rank's channels to the other ranks of a group.

    `exchange(x)` is collective: what every rank of the group passed, in the group's order. `name` says which group it is.
    `host`: an address of this machine that the other ranks can reach; used if they run on several machines.

    `publish`, `refuse`, `fetch`, `waive`, `wait_any`, `silence`, `end`, `drop` and `spill` belong to one thread.
    Every rank that takes part in a body ends or drops it.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], name: str, host: str) -> None:
        self.rank = rank
        self.name = name
        machines = exchange(wire.machine())
        self.size = len(machines)
        self._lock = threading.Lock()
        self._answered = threading.Condition()  # some fetch was
        self._bodies: dict[str, KnownBody] = {}
        self._over: dict[str, MidstreamError] = {}  # bodies of late, and why nothing more comes of them
        self._open: dict[int, Fetch] = {}
        self._ids = itertools.count()
        self._gone: set[int] = set()
        self._closed = False
        self._sends_ahead = True
        self._on_device: weakref.WeakSet[Published] = weakref.WeakSet()
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
        """Have `value` ready for the other ranks, and answer those that wait for it. Returns at once.

        `value` is a tree of tensors, which nobody writes to afterwards, and of things that can be pickled. It is kept
        until every rank has ended the body or waived it, or until `readers` ranks have fetched it, once each. `place` is the same
        for values of the same point of the model: ranks that keep fetching it are sent it without being asked.
        """
        if not self._peers:
            return
        held = hold(value)
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            published = known.add(number, held, readers, place)
            asked = known.parked.pop(number, [])
            if not asked and known.drop_waived(number, self._peers):
                return
            if held.ready:
                self._on_device.add(published)
            ahead = known.eager_readers(number, place, asked) if self._sends_ahead else []
            for request in [*asked, *ahead]:
                known.note_answer(number, request)
        for request in asked:
            self._answer(request, held)
        for reader in ahead:
            self._send_ahead(reader, body, number, place, held)

    def refuse(self, body: str, number: int, error: MidstreamError) -> None:
        """There is no value under this number, and never will be: who asks for it is told why."""
        if not self._peers:
            return
        with self._lock:
            known = self._under_way(body)
            if known is None:
                return
            known.refused[number] = error
            asked = known.parked.pop(number, [])
            known.drop_waived(number, self._peers)
        for request in asked:
            self._answer(request, error)

    def fetch(self, peer: int, body: str, number: int, ref: Ref = ()) -> Fetch:
        """Ask `peer` for what it publishes under `number`, or only for the part of it at `ref`. Returns at once."""
        fetch = Fetch(peer, body, number, ref, self._answered)
        with self._lock:
            known = self._known(body)
            reason = self._over[body] if known is None else known.reason
            if reason is not None:
                fetch.fail(reason)
            elif self._closed or peer in self._gone:
                fetch.fail(self._gone_error(peer))
            elif known is not None and (here := known.unasked.pop((peer, number, ref), None)) is not None:
                fetch.settle(here[1])
            else:
                identity = next(self._ids)
                self._open[identity] = fetch
        if not fetch.done:
            self._post(peer, {"kind": "want", "id": identity, "body": body, "number": number, "ref": ref})
        return fetch

    def waive(self, peer: int, numbers: Mapping[str, Collection[int]]) -> None:
        """This rank fetches no more what `peer` has published, or will, under these numbers of bodies."""
        with self._lock:
            under_way = {body: known for body in numbers if (known := self._under_way(body)) is not None}
            unwanted = {body: known.forget_ahead(peer, numbers[body]) for body, known in under_way.items()}
        if under_way:
            self._post(peer, {"kind": "waived", "numbers": {body: list(numbers[body]) for body in under_way}})
        for body, places in unwanted.items():
            for place, ref in places:
                self._say_enough(peer, body, place, ref)

    def wait_any(self, fetches: Collection[Fetch]) -> None:
        """Wait until one of `fetches` is done."""
        with self._answered:
            self._answered.wait_for(lambda: any(fetch.done for fetch in fetches))

    def silence(self, body: str, reason: str, failed: bool = False) -> None:
        """This rank's body publishes nothing more, and is not over: it may fetch, and others what it has published. As for `end`."""
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
        """This rank's body is over: `reason` is what those are told who ask for what it has not published.

        `failed`: by an error of its own, which the other ranks learn of by `failure_of` too.
        """
        self._finish([body], _no_more(reason, failed), at_once=False)

    def failure_of(self, body: str) -> StageFailedError | None:
        """What another rank's body failed with, if this one has heard of it."""
        known = self._bodies.get(body)
        return known.failure if known is not None else None

    def drop(self, bodies: Collection[str]) -> None:
        """These bodies were aborted: forget them at once."""
        self._finish(bodies, NeverReachedError("the request was aborted."), at_once=True)

    def spill(self) -> None:
        """Move what was published since the last time, and is still wanted, from the device to host memory."""
        with self._lock:
            published = list(self._on_device)
            self._on_device.clear()
        move_to_host(published)

    def gauges(self) -> dict[str, int]:
        """What is held for bodies under way: zero when there are none."""
        with self._lock:
            published = [published for known in self._bodies.values() for published in known.values.values()]
            return {
                "published": len(published),
                "published_bytes": sum(one.nbytes for one in published),
                "parked_requests": sum(len(some) for known in self._bodies.values() for some in known.parked.values()),
                "open_fetches": len(self._open),
                "sent_ahead": sum(len(known.unasked) for known in self._bodies.values()),
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
            fetch.fail(EngineClosedError(f"the engine was closed before rank {fetch.wanted[0]} had sent a value."))
        for sender in self._senders.values():
            sender.close(timeout=_CLOSE_SECONDS)
        self._receiver.close()

    # --------------------------------------------------------------------------------- on the threads that receive

    def _serve(self, peer: int) -> None:
        def handle(message: Message) -> None:
            getattr(self, f"_on_{message.header['kind']}")(peer, message.header, message)

        self._receiver.serve(peer, self._sender_name(peer), handle, lambda: self._lose(peer))

    def _on_want(self, peer: int, header: dict[str, Any], _: Message) -> None:
        request, body, number = Request(peer, header["ref"], header["id"]), header["body"], header["number"]
        with self._lock:
            known = self._known(body)
            if known is None:
                outcome: Held | MidstreamError = self._over[body]
            elif number in known.values:
                outcome = known.values[number].held
                known.note_answer(number, request)
            elif (why := known.refused.get(number) or known.reason or known.silent) is not None:
                outcome = why
            elif number <= known.used_up:
                outcome = TraceError(
                    f"value {number} of {body!r} is not there any more: nobody was to ask for it again."
                )
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
            waiting = [id for id, fetch in self._open.items() if fetch.wanted == (peer, body, number, ref)]
            fetches = [self._open.pop(id) for id in waiting]
            if not fetches:
                known.unasked[peer, number, ref] = place, message
            unwanted = [key for key, its in known.unasked.items() if (key[0], key[2], its[0]) == (peer, ref, place)]
            if len(unwanted) > _UNWANTED:
                del known.unasked[unwanted[0]]
        for fetch in fetches:
            fetch.settle(message)
        if len(unwanted) > _UNWANTED:
            self._say_enough(peer, body, place, ref)

    def _on_waived(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            for body, numbers in header["numbers"].items():
                if (known := self._under_way(body)) is not None:
                    for number in numbers:
                        known.waived[number].add(peer)
                        known.drop_waived(number, self._peers)

    def _on_enough(self, peer: int, header: dict[str, Any], _: Message) -> None:
        with self._lock:
            known = self._known(header["body"])
            if known is not None:
                known.habits[header["place"]].forget(peer, header["ref"])

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
                        known.drop_waived(number, self._peers)
                    self._forget_if_over(body, known)

    def _lose(self, peer: int) -> None:
        """The peer is gone."""
        with self._lock:
            self._gone.add(peer)
            lost = [id for id, fetch in self._open.items() if fetch.wanted[0] == peer]
            fetches = [self._open.pop(id) for id in lost]
            for body, known in list(self._bodies.items()):
                known.forget_requests(peer)
                self._forget_if_over(body, known)
        for fetch in fetches:
            fetch.fail(self._gone_error(peer))
        if peer in self._senders:
            self._senders[peer].close(flush=False)  # if it is not gone after all, it learns that it is for us

    # ---------------------------------------------------------------------------------------- with the lock held

    def _known(self, body: str) -> KnownBody | None:
        """The body's record, made if need be; None if it is over."""
        return None if body in self._over else self._bodies.setdefault(body, KnownBody())

    def _under_way(self, body: str) -> KnownBody | None:
        """The same, unless the body is over on this rank."""
        known = self._known(body)
        return known if known is not None and known.reason is None else None

    def _forget_if_over(self, body: str, known: KnownBody) -> None:
        if known.reason is not None and len(known.ended | self._gone) == self.size:
            self._forget(body, known.reason)

    def _forget(self, body: str, reason: MidstreamError) -> None:
        self._bodies.pop(body, None)
        self._over[body] = reason
        if len(self._over) > _NAMES_KEPT:
            del self._over[next(iter(self._over))]

    # ----------------------------------------------------------------------------------------------- without it

    def _finish(self, bodies: Collection[str], reason: MidstreamError, at_once: bool) -> None:
        refused: list[Request] = []
        with self._lock:
            bodies = [body for body in bodies if body not in self._over]
            if not bodies or not self._peers:
                return
            for body in bodies:
                known = self._bodies.setdefault(body, KnownBody())
                known.reason = reason
                known.ended.add(self.rank)
                refused += known.take_parked()
                known.unasked.clear()
                known.habits.clear()
                if at_once:
                    self._forget(body, reason)
                else:
                    self._forget_if_over(body, known)
            mine = [id for id, fetch in self._open.items() if fetch.wanted[1] in bodies]
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

    def _send_ahead(self, reader: Request, body: str, number: int, place: Hashable, held: Held) -> None:
        with contextlib.suppress(LookupError, TypeError):  # it has no such part this time: an error if it is asked for
            value = follow(held.value, reader.ref)
            header = {"kind": "ahead", "body": body, "number": number, "place": place, "ref": reader.ref}
            self._post(reader.rank, header, value, held)

    def _say_enough(self, peer: int, body: str, place: Hashable | None, ref: Ref) -> None:
        """What is at `place` need not be sent ahead any more."""
        self._post(peer, {"kind": "enough", "body": body, "place": place, "ref": ref})

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
    """What those are told who ask for what a body has not published and will not."""
    return StageFailedError(reason) if failed else NeverReachedError(reason)
