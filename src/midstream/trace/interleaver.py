"""Runs the bodies of the traces in a batch, interleaved with one forward pass.

`begin_step` says which requests the next forward contains, hooks call `fire` at each point that a body waits for, and `end_step` closes the
step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from midstream.errors import BarrierError, DivergedError, MidstreamError, NeverReachedError, TraceError
from midstream.hooks import is_in_body
from midstream.sites import Key, module_name, point_name
from midstream.trace.batch_rows import Event, FlatRows, RequestRows, RowSpan
from midstream.trace.body import BARRIER, FETCH, Body
from midstream.trace.forward import LAST_POINTS, STEP_START, Forward
from midstream.trace.visit import Journal, Visit, move_to_host


class Interleaver(Forward):
    """A model's forward pass with the traces that are alive on it. Arguments are those of `Forward`.

    Attributes:
        bodies: by name, in the order in which they were added.
        rows: the rows of each body of the step, by name.
        last_rows: the rows of logits and samples of the step's bodies.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.bodies: dict[str, Body] = {}
        self.rows: dict[str, RequestRows] = {}
        self.last_rows: dict[str, RequestRows] = {}
        self._waiting: dict[Key, list[Body]] = {}
        self._replays: dict[Key, list[tuple[Journal, FlatRows]]] = {}
        self._span: RowSpan | None = None

    # Requests.

    def add(self, body: Body) -> None:
        """Let a body take part in the coming steps."""
        body.forward, body.neighbours = self, self.bodies
        if not self.bodies:
            self._watch_containers()
        self.bodies[body.name] = body

    def finish(self, name: str, error: MidstreamError | None = None) -> Body | None:
        """The request has ended: run its body to its end. A body that still waits gets `error`, or NeverReachedError."""
        body = self.bodies.pop(name, None)
        if body is None:
            return None
        body.ended = True
        of = "".join(f" of {barrier.parties}" for barrier, waiting in self.at_barrier.items() if name in waiting)
        self._forget(body)
        while not body.done and body.failure is None:
            key, step = body.parked or (STEP_START, 0)
            if key == FETCH:
                self._complete([body])
            elif key == STEP_START:
                body.resume(False)
            elif key == BARRIER:
                text = (
                    f"The request ended while this invoke waited at a barrier{of}: that many invokes have to reach it."
                )
                body.resume(error=BarrierError(text))
            else:
                text = f"{body.written(key)} of step {step} was never reached: the request ended after step {body.now}."
                body.resume(error=error or NeverReachedError(text))
        self.peers.show()
        self._clean_up()
        return body

    def discard(self, name: str) -> None:
        """Drop the body of a request that is gone."""
        body = self.bodies.pop(name, None)
        if body is not None:
            self._forget(body)
            body.discard()
            self._clean_up()

    def _forget(self, body: Body) -> None:
        for waiting in self._waiting.values():
            if body in waiting:
                waiting.remove(body)
        for names in (*self.at_barrier.values(), self.freed):
            if body.name in names:
                names.remove(body.name)
        for key, watchers in list(self.watchers.items()):
            self.watchers[key] = [watcher for watcher in watchers if watcher[0] != body.name]
            if not self.watchers[key]:
                del self.watchers[key]
        for key, overrides in list(self.overrides.items()):
            self.overrides[key] = [override for override in overrides if override[0] != body.name]
        for rows in (self.rows, self.last_rows):
            rows.pop(body.name, None)

    def _clean_up(self) -> None:
        if not self.bodies:
            self.peers.rest()
            self._remove_hooks()
            self.at_barrier.clear()

    def is_watched_by(self, body: Body) -> bool:
        """Whether the body is filling a cache. Its request is then followed to its end, even if the body's code is done."""
        return body.failure is None and any(
            name == body.name for watchers in self.watchers.values() for name, _ in watchers
        )

    # Steps.

    def begin_step(
        self,
        rows: Mapping[str, RequestRows],
        replays: Sequence[tuple[Journal, FlatRows]] = (),
        last_rows: Mapping[str, RequestRows] | None = None,
    ) -> None:
        """A forward pass with these requests' tokens begins.

        Args:
            rows: the rows of each body's request in the batch.
            replays: the edits of preempted requests, and the rows of the positions that are computed again.
            last_rows: the rows of each body's logits and sample, if these have one row for each request; else as `rows`.
        """
        self._position, self._point, self._stepping = -1, STEP_START, True
        for table in (self._waiting, self._replays, self.overrides):
            table.clear()
        self.rows = dict(rows)
        self.last_rows = dict(last_rows or rows)
        self._span = _dense_span(list(rows.values()))
        self._expect_replays(replays)
        self.peers.begin_step()
        bodies = [self.bodies[name] for name in rows]
        for body in bodies:
            body.now += 1
        self._complete(bodies)
        for body in bodies:
            if not body.started:
                body.resume()
            elif body.parked is not None and body.parked == (STEP_START, body.now):
                body.resume(True)
            self._complete([body] if body.linked is not None else ())
        self._complete(bodies)
        for body in bodies:
            self._file(body)
        self._release_barriers()
        self.peers.show()

    def _expect_replays(self, replays: Sequence[tuple[Journal, FlatRows]]) -> None:
        if replays and not self.hook_count:
            self._watch_containers()
        for journal, part in replays:
            for key in journal:
                self.prepare(key)
                self._replays.setdefault(key, []).append((journal, part))

    def end_step(self) -> None:
        """The forward is over and tokens are sampled: no further point of this step will be reached."""
        self._replays.clear()
        self.overrides.clear()
        for body in list(self.bodies.values()):
            if body.name in self.rows:
                self._close(body)
        # The last body to arrive may have waited for another stage until now.
        while released := self._release_barriers():
            for body in released:
                if body.name in self.rows:
                    self._close(body)
        for name, error in self.peers.end_step(self.rows).items():
            self.bodies[name].fail(error)
        move_to_host(body.journal for body in self.bodies.values() if body.journal is not None)
        self._waiting.clear()
        self.live_storages.clear()
        self._stepping = False
        self._clean_up()

    def _close(self, body: Body) -> None:
        """Run a body to the end of the step. This stage's output is on its way, so values of later stages can arrive now."""
        while not body.done and body.parked is not None:
            key, step = body.parked
            if key == FETCH:
                body.parked = (FETCH, body.now)
                self._complete([body])
            elif key in (STEP_START, BARRIER) or step != body.now:
                return
            else:
                body.resume(error=NeverReachedError(self._why_never(body.written(key), key, step)))

    def _why_never(self, written: str, key: Key, step: int) -> str:
        text = f"{written} of step {step} was never reached: the forward pass ended without it."
        if len(key) == 4:
            inner = self.source.calls_in(key[0], key[2].rpartition(".")[0])
            if inner and key[2].rpartition(".")[2] not in inner:
                return f"{text} The function there has the calls {', '.join(inner)}."
            return (
                text
                + " The call lies on a branch that was not taken, or its module was running already when it was asked for."
            )
        if key[:2] not in self.order and key not in LAST_POINTS:
            is_head = key[1] == "output" and key[0].endswith(("lm_head", "embed_out"))
            instead = "use model.logits" if is_head else "print(model) lists the modules"
            return text + f" `{module_name(key[0])}` is not called in this model's forward; {instead}."
        return text

    def _file(self, body: Body) -> None:
        """List a parked body under the point that it waits for."""
        if body.done or body.parked is None or body.parked[0] in (BARRIER, FETCH):
            return
        if body.parked[1] == body.now and body.name in self.rows:
            self._waiting.setdefault(body.parked[0], []).append(body)

    def expects(self, key: Key) -> bool:
        """Whether a body, a replay, a watcher or an override waits for `key`."""
        return any(table.get(key) for table in (self._waiting, self._replays, self.watchers, self.overrides))

    def fire(self, key: Key, tree: Any, direct: bool = False) -> Any:
        """The forward is at `key` with value `tree`. Runs the bodies that wait for it, and returns the value to continue with.

        `direct`: edits have to change the tensors of `tree` themselves.
        """
        if self.muted or not self._stepping or not self.expects(key) or is_in_body():
            return tree
        waiting = self._waiting.pop(key, None)
        self._position = max(self._position, self.ordinal(key)[0])
        self._point = self._firing = key
        event = Event(key, tree, direct, self.peers, self.source.module_point(key))
        for journal, rows in self._replays.get(key, ()):
            journal.replay(event, rows)
        for name, value in self.overrides.pop(key, ()):
            with self._fails(self.bodies[name]):
                visit = self._visit(self.bodies[name], event)
                visit.set_raw(value)
                visit.leave()
        if waiting and self.overrides:
            waiting = [body for body in waiting if not self._refused(body, key)]
        while waiting:
            ordered = self._in_order(waiting) if len(waiting) > 1 else waiting
            for body in ordered:
                body.resume(self._visit(body, event))
                self._complete([body] if body.linked is not None else ())
            self._complete(ordered)
            for body in ordered:
                self._file(body)
            self._release_barriers()
            waiting = self._waiting.pop(key, None)
        event.write_back()
        for name, watch in self.watchers.get(key, ()):
            if name in self.rows and self.bodies[name].failure is None and not self._skipper(name, key):
                with self._fails(self.bodies[name]):
                    watch(self._visit(self.bodies[name], event))
        self.peers.show()
        self._firing = None
        return event.tree

    def _refused(self, body: Body, key: Key) -> bool:
        """Raise NeverReachedError in a body that waits for a point inside a module that its request skips in this step."""
        if (path := self._skipper(body.name, key)) is None:
            return False
        text = f"{body.written(key)} of step {body.now} was never reached: {module_name(path)} is skipped."
        while body.parked == (key, body.now):  # again, if its code catches the error and asks again
            body.resume(error=NeverReachedError(text))
        self._file(body)
        return True

    def _skipper(self, name: str, key: Key) -> str | None:
        """The path of the skipped module that contains `key`, for the request of this body; None if there is none."""
        if not self.overrides:
            return None
        request = name.partition("#")[0]
        for skipped, overrides in self.overrides.items():
            path = skipped[0]
            if len(skipped) == 4:  # a call in a forward, with the calls in its function
                path, inside = ".".join(skipped[:3]), key[:2] == skipped[:2] and key[2].startswith(f"{skipped[2]}.")
            else:
                inside = key[0].startswith(f"{path}.") or (key[0] == path and len(key) == 4)
            if inside and any(body.partition("#")[0] == request for body, _ in overrides):
                return path
        return None

    def _in_order(self, bodies: list[Body]) -> list[Body]:
        """Sorted by the rows of their requests. Bodies of one request keep the order in which they were added, so edits come
        before traces.
        """
        added = {name: number for number, name in enumerate(self.bodies)}
        return sorted(bodies, key=lambda body: (getattr(self.rows[body.name], "start", 0), added[body.name]))

    def _visit(self, body: Body, event: Event) -> Visit:
        if event.key in LAST_POINTS:  # an engine never computes these again, so the journal does not need them
            rows, journal, span = self.last_rows[body.name], None, None
        else:
            rows, journal, span = self.rows[body.name], body.journal, self._span
        return Visit(event, rows, body.now, journal, span, body.name, self.live_storages)

    @staticmethod
    @contextlib.contextmanager
    def _fails(body: Body) -> Iterator[None]:
        """Attribute an error in the block to this body alone, although the body's code is not running."""
        try:
            yield
        except DivergedError:  # the end of the step reports it
            pass
        except Exception as error:
            body.fail(error)

    # Pipeline stages.

    def _complete(self, bodies: Collection[Body]) -> None:
        """Fetch the values of other stages that these bodies wait for, except those that come only after this forward.

        The value that arrives first is used first, even if it is for a body not among `bodies`: if each stage waited for one particular
        value, two stages could wait for each other.
        """
        if self.stage.size == 1:
            return
        agreed: list[Any] = []
        while needing := [body for body in bodies if body.needs_value]:
            for body in needing:
                if body.fetching not in agreed:
                    agreed.append(body.fetching)
                    self._agree_to_wait(body)
            waiting = [body for body in dict.fromkeys((*self.bodies.values(), *bodies)) if body.fetching is not None]
            for body in self._first_answered(waiting) if any(body.needs_value for body in needing) else ():
                body.resume()
                if body not in bodies:
                    self._file(body)

    def _agree_to_wait(self, body: Body) -> None:
        try:
            self.peers.agree(body.name, "a wait for another stage")
        except DivergedError as error:
            body.fail(error)

    def _first_answered(self, waiting: Collection[Body]) -> list[Body]:
        """The bodies of `waiting` whose values have arrived, at least one.

        The first tensor-parallel rank decides: ranks that continued bodies in different orders would reach their gathers in different
        orders.
        """
        fetches = {body.name: body.fetching for body in waiting if body.fetching is not None}

        def answered() -> list[str]:
            self.stage.wait_any(fetches.values())
            return [name for name, fetch in fetches.items() if fetch.done]

        names = [name for name in self.peers.decide(answered) if name in fetches]
        for name in names:
            self.stage.wait_any([fetches[name]])
        return [body for body in waiting if body.name in names]

    # Barriers.

    def _release_barriers(self) -> list[Body]:
        """Resume the bodies that a barrier has released. A preempted body resumes when its request is back."""
        released = [self.bodies[name] for name in self.freed if name in self.rows]
        self.freed = [name for name in self.freed if name not in self.rows]
        for body in released:
            body.resume()
            self._complete([body])
            self._file(body)
        return released


def _dense_span(rows: list[RequestRows]) -> RowSpan | None:
    """The rows from the first traced one to the last, if at least half of them are traced, so that it is worth reading them together."""
    flat = [part for part in rows if isinstance(part, FlatRows)]
    if len(flat) < 2:
        return None
    first, last = min(part.start for part in flat), max(part.stop for part in flat)
    return (first, last) if last - first <= 2 * sum(part.count for part in flat) else None


class BehindStep(Interleaver):
    """Runs bodies after the forward, in the same order and by the same rules: `fire` is called with captured values.

    Attributes:
        captured: the points that have values in this step.
    """

    captured: Collection[Key] = ()

    def prepare(self, key: Key) -> None:
        if key not in LAST_POINTS and key not in self.captured:
            raise TraceError(
                f"{point_name(key)} was not captured for this trace, which was taken for one that does not read it. This is a fault in "
                "midstream; please report the trace."
            )

    def _watch_containers(self) -> None:
        pass
