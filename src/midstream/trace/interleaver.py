"""Runs the bodies of the traces in a batch in turns with one forward pass.

`begin_step` says which requests the coming forward holds, `fire` is called by the hooks at each point that somebody waits
for, `end_step` closes the step. Hooks are there only while a trace is alive, and only where one waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from midstream.errors import BarrierError, DivergedError, MidstreamError, NeverReachedError, TraceError
from midstream.trace.body import BARRIER, FETCH, STEP_START, Body, current_body, is_in_body
from midstream.trace.hooks import Hooks
from midstream.trace.journal import Journal, spill
from midstream.trace.rows import FlatRows, Rows
from midstream.trace.shared import Span
from midstream.trace.source import SourceHooks
from midstream.trace.tree import leaves, memory_of
from midstream.trace.visit import Event, Key, Visit, point_name

if TYPE_CHECKING:
    from midstream.trace.stages import Fetch, Stages
    from midstream.trace.whole import Whole

Order = Mapping[tuple[str, str], tuple[int, int]]
Watcher = Callable[[Visit], None]
LAST_POINTS: dict[Key, int] = {("", "logits"): 1 << 60, ("", "samples"): (1 << 60) + 1}
_NEVER_PASSED = 1 << 61


class Interleaver:
    """The traces that are alive on one model, and where its forward pass is.

    Args:
        root: the model whose modules are traced.
        order: from `Architecture.order`: when in a forward pass each module's input and output come by.
        stages: the pipeline that the model is one stage of.
        whole: the tensor-parallel ranks that share each layer with this one.
    """

    def __init__(self, root: nn.Module, order: Order, stages: Stages | None = None, whole: Whole | None = None) -> None:
        self.order = order
        self.stages = stages
        self.whole = whole
        self.modules = dict(root.named_modules())
        self.bodies: dict[str, Body] = {}
        self.rows: dict[str, Rows] = {}
        self.last_rows: dict[str, Rows] = {}
        self.muted = False
        self.source = SourceHooks(self.modules, self.fire)
        self._waiting: dict[Key, list[Body]] = {}
        self._watchers: dict[Key, list[tuple[Body, Watcher]]] = {}
        self._replays: dict[Key, list[tuple[Journal, FlatRows]]] = {}
        self._overrides: dict[Key, list[tuple[Body, Any]]] = {}
        self._span: Span | None = None
        self._position = -1
        self._point: Key = STEP_START
        self._firing: Key | None = None
        self._hooks = Hooks(self.modules, self.fire)
        self._stepping = False
        self.reachable: frozenset[Key] | None = None  # the points that the step's forward passes; None for all
        self._at_barrier: dict[Any, list[Body]] = {}  # those who wait for others to come
        self._freed: list[Body] = []  # those who need not wait any longer, in the order of their barriers
        self._live_storages: set[int | None] = set()

    # Requests.

    def add(self, body: Body) -> None:
        body.interleaver = self
        if not self.bodies:
            self._hooks.watch_containers()
        self.bodies[body.name] = body

    def finish(self, name: str, error: MidstreamError | None = None) -> Body | None:
        """The request has ended: let its body run to its end, with nothing more to be reached, by reason of `error`."""
        body = self.bodies.pop(name, None)
        if body is None:
            return None
        body.ended = True
        of = "".join(f" of {barrier.parties}" for barrier, waiting in self._at_barrier.items() if body in waiting)
        self._forget(body)
        while not body.done and body.failure is None:
            parked = body.parked
            if parked is not None and parked[0] == FETCH:
                self._complete([body])
            elif parked is None or parked[0] == STEP_START:
                body.resume(False)
            elif parked[0] == BARRIER:
                body.resume(
                    error=BarrierError(
                        f"The request ended while this invoke waited at a barrier{of}: that many invokes have to come to it."
                    )
                )
            else:
                body.resume(
                    error=error
                    or NeverReachedError(
                        f"{point_name(parked[0])} of step {parked[1]} was never reached: the request ended after step {body.now}."
                    )
                )
        self._show_notes()
        self._clean_up()
        return body

    def discard(self, name: str) -> None:
        """The request is gone and nobody wants its results."""
        body = self.bodies.pop(name, None)
        if body is not None:
            self._forget(body)
            body.discard()
            self._clean_up()

    def _forget(self, body: Body) -> None:
        for waiting in (*self._waiting.values(), *self._at_barrier.values(), self._freed):
            if body in waiting:
                waiting.remove(body)
        for key, watchers in list(self._watchers.items()):
            self._watchers[key] = [w for w in watchers if w[0] is not body]
            if not self._watchers[key]:
                del self._watchers[key]
        for key, overrides in list(self._overrides.items()):
            self._overrides[key] = [o for o in overrides if o[0] is not body]
        for rows in (self.rows, self.last_rows):
            rows.pop(body.name, None)

    def _clean_up(self) -> None:
        if self.bodies:
            return
        if self.whole is not None:
            self.whole.agreement.rest()
        self._hooks.remove()
        self.source.remove()
        self._at_barrier.clear()

    # Steps.

    def begin_step(
        self,
        rows: Mapping[str, Rows],
        replays: Sequence[tuple[Journal, FlatRows]] = (),
        last_rows: Mapping[str, Rows] | None = None,
    ) -> None:
        """A forward pass begins that holds these requests' tokens.

        Args:
            rows: for each body with new tokens, where they are in the batch.
            replays: what preempted requests had written, and where the positions are that they compute again.
            last_rows: where a body's logits and sample are, if there is one row a request there; else as `rows`.
        """
        self._position, self._point, self._stepping = -1, STEP_START, True
        for table in (self._waiting, self._replays, self._overrides):
            table.clear()
        self.rows = dict(rows)
        self.last_rows = dict(last_rows or rows)
        self._span = _dense_span(list(rows.values()))
        self._expect_replays(replays)
        if self.whole is not None:
            self.whole.agreement.begin_step()
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
        self._show_notes()

    def _expect_replays(self, replays: Sequence[tuple[Journal, FlatRows]]) -> None:
        if replays and not self._hooks:
            self._hooks.watch_containers()
        for journal, part in replays:
            for key in journal:
                self.prepare(key)
                self._replays.setdefault(key, []).append((journal, part))

    def end_step(self) -> None:
        """The forward is over, tokens are sampled: nothing more of this step will come by."""
        self._replays.clear()
        self._overrides.clear()
        for body in list(self.bodies.values()):
            if body.name in self.rows:
                self._close(body)
        while released := self._release_barriers():  # the last to come may have waited for another stage until now
            for body in released:
                if body.name in self.rows:
                    self._close(body)
        if self.whole is not None:
            for name, error in self.whole.agreement.end_step(self.rows).items():
                self.bodies[name].fail(error)
        spill(body.journal for body in self.bodies.values() if body.journal is not None)
        self._waiting.clear()
        self._live_storages.clear()
        self._stepping = False
        self._clean_up()

    def _close(self, body: Body) -> None:
        """Let a body come to the end of the step. This stage's output is on its way, so later stages' values come now."""
        while not body.done and body.parked is not None:
            key, step = body.parked
            if key == FETCH:
                body.parked = (FETCH, body.now)
                self._complete([body])
            elif key in (STEP_START, BARRIER) or step != body.now:
                return
            else:
                body.resume(error=NeverReachedError(self._why_never(key, step)))

    def _why_never(self, key: Key, step: int) -> str:
        text = f"{point_name(key)} of step {step} was never reached: the forward pass ended without it."
        if len(key) == 4:
            return (
                text
                + " The call lies on a branch that was not taken, or its module was running already when it was asked for."
            )
        if key[:2] not in self.order and key not in LAST_POINTS:
            return text + f" `{key[0]}` is not called by name in this model's forward; print(model) shows what is."
        return text

    def _file(self, body: Body) -> None:
        if body.done or body.parked is None or body.parked[0] in (BARRIER, FETCH):
            return
        if body.parked[1] == body.now and body.name in self.rows:
            self._waiting.setdefault(body.parked[0], []).append(body)

    def fire(self, key: Key, tree: Any, direct: bool = False) -> Any:
        """The forward is at `key` with value `tree`: what it is to go on with. `direct`: writes land in `tree` itself."""
        if self.muted or not self._stepping or not self.expects(key) or is_in_body():
            return tree
        waiting = self._waiting.pop(key, None)
        self._position = max(self._position, self.ordinal(key)[0])
        self._point = self._firing = key
        event = Event(key, tree, direct, self.whole, self.source.module_point(key))
        for journal, rows in self._replays.get(key, ()):
            journal.replay(event, rows)
        for body, value in self._overrides.pop(key, ()):
            with self._fails(body):
                visit = self._visit(body, event)
                visit.set_raw(value)
                visit.leave()
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
        for body, watch in self._watchers.get(key, ()):
            if body.name in self.rows and body.failure is None:
                with self._fails(body):
                    watch(self._visit(body, event))
        self._show_notes()
        self._firing = None
        return event.tree

    def expects(self, key: Key) -> bool:
        """Whether something is to be done when the forward comes to `key`."""
        return any(table.get(key) for table in (self._waiting, self._replays, self._watchers, self._overrides))

    def _in_order(self, bodies: list[Body]) -> list[Body]:
        """By the batch; a request's own in the order in which they were added, so that an edit comes before its trace."""
        added = {name: number for number, name in enumerate(self.bodies)}
        return sorted(bodies, key=lambda body: (getattr(self.rows[body.name], "start", 0), added[body.name]))

    def _visit(self, body: Body, event: Event) -> Visit:
        rows = (self.last_rows if event.key in LAST_POINTS else self.rows)[body.name]
        if rows.aliases:
            self._live_storages.update(memory_of(t) for _, t in leaves(event.tree))
        journal = body.journal if event.key not in LAST_POINTS else None  # behind these, nothing is computed again
        return Visit(event, rows, body.now, journal, self._span if event.key not in LAST_POINTS else None, body.name)

    # Tensor-parallel ranks.

    def note(self, body: Body, what: str) -> None:
        """A body does something that it has to do on all ranks."""
        if self.whole is not None:
            self.whole.agreement.note(body.name, what)

    def agree(self, body: Body, *what: Any) -> None:
        """Before something collective. Raises DivergedError if the body does something else on another rank."""
        if self.whole is not None:
            self.whole.agreement.agree(body.name, *what)

    def _show_notes(self) -> None:
        if self.whole is not None:
            self.whole.agreement.show()

    @staticmethod
    @contextlib.contextmanager
    def _fails(body: Body) -> Iterator[None]:
        """What is done for a body while its code does not run: an error there is the body's, and nobody else's."""
        try:
            yield
        except DivergedError:  # the end of the step tells it
            pass
        except Exception as error:
            body.fail(error)

    def _complete(self, bodies: Collection[Body]) -> None:
        """Let these bodies have the values of other stages that they wait for, all but those that come after this forward.

        Whichever value is there first goes first, other bodies' too: a stage that waited for one body alone could hold up the very
        stage that it waits for.
        """
        if self.stages is None:
            return
        agreed: set[Fetch | None] = set()
        while needing := [body for body in bodies if body.needs_value]:
            for body in needing:
                if body.fetching not in agreed:
                    agreed.add(body.fetching)
                    self._agree_to_wait(body)
            waiting = [body for body in dict.fromkeys((*self.bodies.values(), *bodies)) if body.fetching is not None]
            for body in self._first_answered(waiting) if any(body.needs_value for body in needing) else ():
                body.resume()
                if body not in bodies:
                    self._file(body)

    def _agree_to_wait(self, body: Body) -> None:
        try:
            self.agree(body, "a wait for another stage")
        except DivergedError as error:
            body.fail(error)

    def _first_answered(self, waiting: Collection[Body]) -> list[Body]:
        """Those of `waiting` that can go on, at least one. Tensor-parallel ranks follow the first one in whom that is: bodies that go
        on in another order would come to their gathers in another order.
        """
        assert self.stages is not None
        fetches = {body.name: body.fetching for body in waiting if body.fetching is not None}
        agreement = self.whole.agreement if self.whole is not None else None
        if agreement is None or agreement.leads:
            self.stages.wait_any(fetches.values())
            names = [name for name, fetch in fetches.items() if fetch.done]
            if agreement is not None:
                agreement.lead(names)
        else:
            names = [name for name in agreement.follow() if name in fetches]
            for name in names:
                self.stages.wait_any([fetches[name]])
        return [body for body in waiting if body.name in names]

    # What bodies ask for.

    def sibling_that_fetches(self, body: Body) -> Body | None:
        """Another body of the trace that waits for another stage's value and gets further when that is there."""
        others = [b for b in self.bodies.values() if b is not body and b.linked is body.linked is not None]
        return next((other for other in others if other.fetching is not None and not other.settled), None)

    def ordinal(self, key: Key) -> tuple[int, int]:
        """When in a forward `key` comes by, first and last."""
        if key in LAST_POINTS:
            return LAST_POINTS[key], LAST_POINTS[key]
        return self.order.get(key[:2] if len(key) == 2 else (key[0], "input"), (-1, _NEVER_PASSED))

    def has_passed(self, key: Key) -> bool:
        """Whether the forward can no longer come to `key` in this step."""
        if not self._stepping:
            return True
        return key != self._firing and len(key) != 4 and self.ordinal(key)[1] <= self._position

    def where(self, step: int) -> str:
        return f"{point_name(self._point)} of step {step}" if self._point != STEP_START else f"the start of step {step}"

    def watch(self, body: Body, key: Key, watcher: Watcher) -> None:
        """Have `watcher` called with every later visit of the body's request to `key`, after all edits there."""
        self.note(body, f"a cache of {point_name(key)}")
        self.prepare(key)
        self._watchers.setdefault(key, []).append((body, watcher))

    def is_watched_by(self, body: Body) -> bool:
        """Whether the body's request is to be followed to its end, though its code may be done: a cache is being filled."""
        return body.failure is None and any(
            other is body for watchers in self._watchers.values() for other, _ in watchers
        )

    def override(self, body: Body, key: Key, value: Any) -> None:
        """Have the request's part of `key` be `value` when the forward comes to it in this step."""
        self.note(body, f"a skip to {point_name(key)}")
        self.prepare(key)
        self._overrides.setdefault(key, []).append((body, value))

    def is_live(self, value: torch.Tensor) -> bool:
        """Whether `value` shares memory with an activation of this step."""
        return memory_of(value) in self._live_storages

    def has(self, key: Key) -> bool:
        """Whether this process has the point; another pipeline stage may."""
        return self.stages is None or self.stages.has(key)

    def apart(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module on a value that is not the forward's: no point is passed by it. It may be collective."""
        if self.whole is not None:
            self.agree(current_body(), "a call apart from the forward")
        self.muted = True
        try:
            return function(*args, **kwargs)
        finally:
            self.muted = False

    # Barriers.

    def arrive(self, barrier: Any, body: Body) -> None:
        """The last to come frees the others; after that the barrier is as before, for the next time."""
        waiting = self._at_barrier.setdefault(barrier, [])
        if len(waiting) + 1 < barrier.parties:
            waiting.append(body)
        else:
            self._freed += self._at_barrier.pop(barrier)

    def is_held(self, barrier: object, body: Body) -> bool:
        return body in self._at_barrier.get(barrier, ())

    def _release_barriers(self) -> list[Body]:
        """Let those go on who need not wait any longer; who is preempted, when its request is back."""
        released = [body for body in self._freed if body.name in self.rows]
        self._freed = [body for body in self._freed if body not in released]
        for body in released:
            body.resume()
            self._complete([body])
            self._file(body)
        return released

    # Hooks.

    @property
    def hook_count(self) -> int:
        """How many hooks are on the model."""
        return len(self._hooks)

    def prepare(self, key: Key) -> None:
        """See to it that `fire` is called when the forward comes to `key`."""
        if not key[0] and key[1] not in ("input", "output"):
            return
        if self.reachable is not None and key not in self.reachable:
            raise TraceError(
                f"{point_name(key)} is not built into the compiled forward, and this trace was taken for one that needs no other "
                "sites. This is a fault in midstream; please report the trace."
            )
        if len(key) == 4:
            self.source.install(key[0])
        else:
            self._hooks.put(key)


def _dense_span(rows: list[Rows]) -> Span | None:
    """The rows from the first traced one to the last, if they are traced ones mostly: then they are worth reading together."""
    if len(rows) < 2 or not all(isinstance(part, FlatRows) for part in rows):
        return None
    flat = [part for part in rows if isinstance(part, FlatRows)]
    first, last = min(part.start for part in flat), max(part.stop for part in flat)
    return (first, last) if last - first <= 2 * sum(part.count for part in flat) else None
