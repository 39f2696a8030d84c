"""The tensor-parallel ranks that share each layer: full tensors from the ranks' parts, and agreement on what traces do.

Each rank runs the same bodies, and some of what bodies do is collective: a rank that got to a gather alone would wait forever. So each rank
notes what its bodies do (reads, writes, and their ends), and publishes the notes before its forward goes on. Before a collective operation
the body's notes of this step are compared: a peer either has the next note already, or gets there without needing anything of this rank. At
the end of every step all ranks compare the notes of all bodies, so that all of them fail the same bodies.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from midstream.errors import DivergedError, MidstreamError
from midstream.ranks.link import Link
from midstream.ranks.shards import Layout, Layouts
from midstream.sites import Key, Ref
from midstream.trace.remote import Peers, Shard
from midstream.trace.tree import map_tensors

_OVER = "The step is over."


class TensorParallel(Peers):
    """This rank among those that share each layer.

    All methods are called for the same bodies in the same order on all ranks, as long as the bodies agree.

    Args:
        layouts: of the tensors of which this rank has a part.
        gather: collective; from `[...]` on every rank to `[ranks, ...]`, in their order.
        link: to the other ranks.
    """

    several = True

    def __init__(self, layouts: Layouts, gather: Callable[[torch.Tensor], torch.Tensor], link: Link) -> None:
        self._layouts: dict[Key, dict[Ref, Layout]] = {(path, kind): each for (path, kind), each in layouts.items()}
        self._gather = gather
        self._link = link
        self._peers = [peer for peer in range(link.size) if peer != link.rank]
        self._shards = {
            key: {ref: self._shard(layout) for ref, layout in each.items()} for key, each in self._layouts.items()
        }
        self._steps = 0
        self._diverged: dict[str, str] = {}
        self._begin()

    # Full tensors.

    def _shard(self, layout: Layout) -> Shard:
        def join(part: torch.Tensor, lead: int) -> torch.Tensor:
            return layout.join(self._gather(part.contiguous()), lead)

        return Shard(join, lambda full, lead: layout.cut(full, self._link.rank, lead))

    def shards(self, key: Key) -> Mapping[Ref, Shard]:
        return self._shards.get(key, {})

    def applied(self, path: str, module: Callable[..., Any]) -> Callable[..., Any]:
        def convert(kind: str, ref: Ref, leaf: torch.Tensor) -> torch.Tensor:
            layout = self._layouts.get((path, kind), {}).get(ref)
            if layout is None:
                return leaf
            shard = self.shards((path, kind))[ref]
            if kind == "input":
                return shard.cut(leaf, _lead(leaf, layout.width))
            return shard.join(leaf, _lead(leaf, layout.part))

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors((args, kwargs), functools.partial(convert, "input"))
            return map_tensors(module(*args, **kwargs), functools.partial(convert, "output"))

        return call

    # Agreement.

    def _begin(self) -> None:
        self._open = False
        self._decisions = 0
        self._notes: defaultdict[str, list[str]] = defaultdict(list)
        self._compared: defaultdict[str, int] = defaultdict(int)
        self._unpublished: list[tuple[str, str]] = []
        self._published = 0
        self._received = dict.fromkeys(self._peers, 0)
        self._theirs: dict[int, defaultdict[str, deque[str]]] = {peer: defaultdict(deque) for peer in self._peers}

    @property
    def _name(self) -> str:
        """The name under which notes are published."""
        return f"step {self._steps}"

    @property
    def _turns(self) -> str:
        """The name under which decisions are published."""
        return f"turns of step {self._steps}"

    def begin_step(self) -> None:
        self.rest()
        self._steps += 1
        self._open = True

    def rest(self) -> None:
        if self._open:
            self._link.end(self._name, _OVER)
            self._link.end(self._turns, _OVER)
        self._begin()

    def note(self, body: str, *what: Any) -> None:
        text = " ".join(map(str, what))
        self._notes[body].append(text)
        self._unpublished.append((body, text))

    def show(self) -> None:
        if self._unpublished and self._open:
            self._link.publish(self._name, self._published, self._unpublished)
            self._published += 1
            self._unpublished = []

    def agree(self, body: str, *what: Any) -> None:
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
        """The body's next note on `peer`. Waits for it; None if the step ends there without another one."""
        notes = self._theirs[peer]
        while not notes[body]:
            missing = range(self._received[peer], max(self._published, self._received[peer] + 1))
            for fetch in [self._link.fetch(peer, self._name, number) for number in missing]:
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

    def decide(self, choose: Callable[[], list[str]]) -> list[str]:
        number, self._decisions = self._decisions, self._decisions + 1
        if self._link.rank != 0:
            return list(self._link.fetch(0, self._turns, number).wait())
        names = choose()
        self._link.publish(self._turns, number, names)
        return names

    def end_step(self, bodies: Iterable[str]) -> Mapping[str, MidstreamError]:
        self.show()
        names = list(bodies)
        digests = {name: hashlib.blake2b("\n".join(self._notes[name]).encode()).digest() for name in names}
        self._link.publish(self._turns, self._decisions, digests)
        for peer, fetch in [(peer, self._link.fetch(peer, self._turns, self._decisions)) for peer in self._peers]:
            theirs = fetch.wait()
            for name in names:
                if theirs.get(name) != digests[name] and name not in self._diverged:
                    last = self._notes[name][-1] if self._notes[name] else None
                    self._blame(name, last, peer, None)
        errors = {name: self._error(name) for name in names if name in self._diverged}
        for name in errors:
            del self._diverged[name]
        return errors

    def _blame(self, body: str, here: str | None, peer: int, there: str | None) -> None:
        own = f"on tensor-parallel rank {self._link.rank} it came to {here or 'nothing'}"
        other = f"on rank {peer} to {there or 'something else'}"
        self._diverged[body] = f"{own}, {other}"

    def _error(self, body: str) -> DivergedError:
        return DivergedError(
            f"The trace did not do the same on all tensor-parallel ranks: {self._diverged[body]}. Each rank runs the trace's code, so what "
            "it reads and writes must not depend on the process: on its id, the time, the order of a set, or unseeded numbers of "
            "`random` and NumPy. (torch's own random numbers are the same on all ranks.)"
        )

    def gauges(self) -> dict[str, int]:
        """What is held; zero when no trace runs."""
        return {f"tensor_{name}": count for name, count in self._link.gauges().items()}

    def close(self) -> None:
        """Disconnect from the other ranks."""
        self._link.close()


def _lead(leaf: torch.Tensor, width: int | None) -> int:
    """How many axes come before those that hold `width` elements."""
    axis, size = leaf.ndim, 1
    while axis and size != width:
        axis -= 1
        size *= leaf.shape[axis]
    return axis
