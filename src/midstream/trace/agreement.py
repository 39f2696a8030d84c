"""Sees to it that a trace's body does the same on every tensor-parallel rank.

Each rank runs the body, and some of what it does is collective: a rank that came to a gather alone would wait for ever. So each
rank notes what its bodies do, reads and writes and the ends of bodies, and has the notes ready for the others before its
forward goes on. Before a collective the body's notes of the step are compared: a peer either has the next one, or comes to it
without needing anything of this rank. At the end of every step all ranks compare what every body did, so that all of them fail
the same bodies.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Protocol

from midstream.errors import DivergedError, MidstreamError

_OVER = "The step is over."


class Answer(Protocol):
    def wait(self) -> Any: ...


class Link(Protocol):
    """What is needed of `ranks.link.Link`."""

    rank: int
    size: int

    def publish(self, body: str, number: int, value: Any) -> None: ...

    def fetch(self, peer: int, body: str, number: int) -> Answer: ...

    def end(self, body: str, reason: str) -> None: ...

    def gauges(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Agreement:
    """What this rank's bodies did in the step, and what the peers' did.

    Every method is called for the same bodies in the same order on all ranks, as long as the bodies agree.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._peers = [peer for peer in range(link.size) if peer != link.rank]
        self._steps = 0
        self._diverged: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._open = False
        self._led = 0
        self._notes: defaultdict[str, list[str]] = defaultdict(list)
        self._compared: defaultdict[str, int] = defaultdict(int)
        self._unpublished: list[tuple[str, str]] = []
        self._published = 0
        self._received = dict.fromkeys(self._peers, 0)
        self._theirs: dict[int, defaultdict[str, deque[str]]] = {peer: defaultdict(deque) for peer in self._peers}

    @property
    def _name(self) -> str:
        return f"step {self._steps}"

    @property
    def _turns(self) -> str:
        return f"turns of step {self._steps}"

    def begin_step(self) -> None:
        """A traced step begins."""
        self.rest()
        self._steps += 1
        self._open = True

    def rest(self) -> None:
        """Nothing of the last step is needed any more."""
        if self._open:
            self._link.end(self._name, _OVER)
            self._link.end(self._turns, _OVER)
        self._begin()

    def note(self, body: str, *what: Any) -> None:
        """The body does something that it has to do on all ranks."""
        text = " ".join(map(str, what))
        self._notes[body].append(text)
        self._unpublished.append((body, text))

    def show(self) -> None:
        """The forward goes on: let the peers know what was noted."""
        if self._unpublished and self._open:
            self._link.publish(self._name, self._published, self._unpublished)
            self._published += 1
            self._unpublished = []

    def agree(self, body: str, *what: Any) -> None:
        """Before a collective.

        Raises:
            DivergedError: the body did something else on another rank, which does not come to this collective.
        """
        if body in self._diverged:
            raise self._error(body)
        self.note(body, *what)
        self.show()
        mine = self._notes[body]
        while self._compared[body] < len(mine):
            expected = mine[self._compared[body]]
            self._compared[body] += 1
            for peer in self._peers:
                did = self._next(peer, body)
                if did != expected:
                    self._blame(body, expected, peer, did)
                    raise self._error(body)

    def _next(self, peer: int, body: str) -> str | None:
        """What the body did next on `peer`, once it has; None if the step ends there without more."""
        notes = self._theirs[peer]
        while not notes[body]:
            wanted = range(self._received[peer], max(self._published, self._received[peer] + 1))
            for fetch in [self._link.fetch(peer, self._name, number) for number in wanted]:
                try:
                    shown = fetch.wait()
                except MidstreamError:
                    return None
                self._received[peer] += 1
                for name, text in shown:
                    notes[name].append(text)
                if notes[body]:
                    break
        return notes[body].popleft()

    @property
    def leads(self) -> bool:
        """Whether this rank decides what is a matter of time, and the others follow."""
        return self._link.rank == 0

    def lead(self, names: list[str]) -> None:
        """These bodies go on now, on every rank. To be called after all ranks agreed that some do."""
        self._link.publish(self._turns, self._led, names)
        self._led += 1

    def follow(self) -> list[str]:
        """The bodies that go on now, as the first rank decides."""
        self._led += 1
        return list(self._link.fetch(0, self._turns, self._led - 1).wait())

    def end_step(self, bodies: Iterable[str]) -> dict[str, DivergedError]:
        """The step's forward is over: what to tell those of `bodies` that did not do the same on all ranks in it."""
        self.show()
        names = list(bodies)
        digests = {name: hashlib.blake2b("\n".join(self._notes[name]).encode()).digest() for name in names}
        self._link.publish(self._turns, self._led, digests)
        for peer, fetch in [(peer, self._link.fetch(peer, self._turns, self._led)) for peer in self._peers]:
            theirs = fetch.wait()
            for name in names:
                if theirs.get(name) != digests[name] and name not in self._diverged:
                    last = self._notes[name][-1] if self._notes[name] else None
                    self._blame(name, last, peer, None)
        told = {name: self._error(name) for name in names if name in self._diverged}
        for name in told:
            del self._diverged[name]
        return told

    def gauges(self) -> dict[str, int]:
        """What is held; zero when no trace runs."""
        return {f"tensor_{name}": count for name, count in self._link.gauges().items()}

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._link.close()

    def _blame(self, body: str, here: str | None, peer: int, there: str | None) -> None:
        own = f"on tensor-parallel rank {self._link.rank} it came to {here or 'nothing'}"
        other = f"on rank {peer} to {there or 'something else'}"
        self._diverged[body] = f"{own}, {other}"

    def _error(self, body: str) -> DivergedError:
        """What the trace is told."""
        return DivergedError(
            f"The trace did not do the same on all tensor-parallel ranks: {self._diverged[body]}. Each rank runs the trace's code, so what "
            "it reads and writes must not depend on the process: on its id, the time, the order of a set, or unseeded numbers of "
            "`random` and NumPy. (torch's own random numbers are the same on all ranks.)"
        )
