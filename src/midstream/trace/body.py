"""A trace's body as a coroutine: it runs on the forward's own thread, in strict turns with it.

The forward resumes a body when it comes to the point that the body waits for; the body runs its Python until it wants the
next point, and parks. Nothing is locked and nothing times out, because only one of the two ever runs.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from midstream.errors import NeverReachedError, OutOfOrderError, TraceError
from midstream.trace.journal import Journal
from midstream.trace.modes import Away, Modes
from midstream.trace.reached import contents
from midstream.trace.remote import Claim, Place, RemoteValue
from midstream.trace.rows import private
from midstream.trace.stack_end import at_stack_end
from midstream.trace.tree import leaves, memory_of
from midstream.trace.visit import Key, Visit, point_name

if TYPE_CHECKING:
    from midstream.trace.interleaver import Interleaver
    from midstream.trace.stages import Fetch

CURRENT: ContextVar[Body] = ContextVar("midstream_body")
STEP_START: Key = ("", "step")
BARRIER: Key = ("", "barrier")
FETCH: Key = ("", "fetch")
CALL = "call"
_SHARED = (bool, int, str, bytes, type(None))


def current_body() -> Body:
    """The trace that is running here."""
    body = CURRENT.get(None)
    if body is None:
        raise TraceError(
            "This works only inside a trace: `with model.trace(prompt) as tracer:` or `model.run(fn, prompt)`."
        )
    return body


def is_in_body() -> bool:
    """Whether a trace's code runs here, and not the forward's."""
    return CURRENT.get(None) is not None


def _may_be_interrupted() -> bool:
    """Whether a KeyboardInterrupt is Ctrl-C, and not the body's own: engine processes ignore that."""
    return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


class StopTrace(BaseException):
    """Unwinds a body after `tracer.stop()`; not an Exception, so that a user's `except Exception` lets it through."""


class Body:
    """One request's trace.

    Attributes:
        step: the step that the body's next read is about; 0 is the prompt's forward.
        now: the step that the forward is in, -1 before the first.
        parked: the point that it waits for, with its step.
        reads: how many values it has asked for, those of other pipeline stages counted.
        left: names of the user's own containers and tensors that it has changed, and not saved.
        unsaved: names that it has set, and not saved.
        states, attributes: of what it has from outside, as they were at first.
        counted: names of numbers and texts of the user's that it has gone on from, and not saved.
        fetching: the value of another stage that it waits for.
        linked: the trace whose bodies may use each other's variables, and so run one after another at every point; None without such.
        settled: whether it waits with another body for a value that was there already, so that nobody need wait for it.
    """

    def __init__(self, name: str, run: Callable[[], Any], snapshots: bool, journals: bool) -> None:
        self.name = name
        self.step = 0
        self.now = -1
        self.parked: tuple[Key, int] | None = None
        self.ended = False
        self.stopped = self.interrupted = False
        self.failure: BaseException | None = None
        self.result: Any = None
        self.left: list[str] = []
        self.unsaved: list[str] = []
        self.counted: list[str] = []
        self.states: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.saved: dict[int, tuple[Any, Any, int | None]] = {}  # by id: the value, what is kept, its version
        self.snapshots = snapshots
        self.journal = Journal() if journals else None
        self.visit: Visit | None = None
        self.interleaver: Interleaver
        self.reads = 0
        self.fetching: Fetch | None = None
        self.linked: object | None = None
        self.settled = False
        # Around what it runs; in an engine a Randomness.
        self.random: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._asked: Key | None = None  # the last point of its step
        self._reached = -1  # and how far in the forward that is, whichever stage has it
        self._fetched: set[int | None] = (
            set()
        )  # where the values of other stages lie that came from the point that it is at
        # Saved copies of those, with their versions and the values.
        self._copied: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._run = run
        self._around = Modes.now()  # torch's, where the forward gave control
        self._greenlet = greenlet(lambda _=None: at_stack_end(self._main))
        self._forward: greenlet | None = None

    @property
    def done(self) -> bool:
        return self._greenlet.dead

    @property
    def started(self) -> bool:
        return bool(self._greenlet) or self._greenlet.dead

    @property
    def needs_value(self) -> bool:
        """Whether it waits for another stage's value that has nothing to wait for."""
        return self.parked is not None and self.parked[0] == FETCH and (self.ended or self.parked[1] <= self.now)

    def frame_of(self, code: CodeType) -> FrameType | None:
        """The frame that runs `code`, while the body is parked somewhere below it."""
        frame = self._greenlet.gr_frame
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame

    def _main(self) -> None:
        CURRENT.set(self)
        try:
            self.result = self._run()
        except GreenletExit:
            return
        except BaseException as failure:
            self.failure = failure
        try:
            self._leave()
        except BaseException as failure:
            self.failure = self.failure or failure
        self.interleaver.note(self, f"its end ({type(self.failure).__name__})" if self.failure else "its end")
        self._fall_silent()
        self.parked = None

    def _fall_silent(self) -> None:
        if self.interleaver.stages is not None:
            self.interleaver.stages.silence(self)

    # The forward's side.

    def resume(self, visit: Visit | bool | None = None, error: BaseException | None = None) -> None:
        """Let the body run until it parks again or ends. `error` is raised at the point where it is parked."""
        self.parked = None
        if isinstance(visit, Visit):
            self.visit = visit
        if error is not None and self.started:
            self._give_control(self._greenlet.throw, error)
        else:
            self._give_control(self._greenlet.switch, visit)
        if isinstance(self.failure, KeyboardInterrupt) and not self.interrupted and _may_be_interrupted():
            self.interrupted = True
            raise self.failure

    def _give_control(self, switch: Callable[[Any], Any], with_what: Any) -> None:
        modes = Modes.now()
        if self.started and modes.inference != self._around.inference:  # outside of the forward that it was parked in
            with self._around.again():
                return self._give_control(switch, with_what)
        self._forward, self._around = getcurrent(), modes
        with self.random:
            switch(with_what)
        modes.put_back()

    def fail(self, error: Exception) -> None:
        """Be over with `error`, whatever the body makes of it."""
        if not self.done:
            self.resume(error=error)
        self.discard()
        self.parked = None
        if not isinstance(self.failure, type(error)):  # what it had saved is found by the traceback
            own = self.failure
            self.failure = error if own is None else error.with_traceback(own.__traceback__)
        self._fall_silent()

    def discard(self) -> None:
        """Drop a body whose request is gone, unwinding it without a trace."""
        if self.started and not self.done:
            with contextlib.suppress(BaseException):
                self._give_control(self._greenlet.throw, GreenletExit)
        self.visit = None

    # The body's side.

    def _park(self, key: Key, step: int) -> Any:
        self._leave()
        return self._switch_away((key, step))

    def _switch_away(self, parked: tuple[Key, int]) -> Any:
        assert self._forward is not None
        self.parked = parked
        self.interleaver.note(self, f"{point_name(parked[0])} of step {parked[1]}")
        away = Away(self._around)
        try:
            return self._forward.switch()
        finally:
            away.back()

    def _leave(self) -> None:
        visit, self.visit = self.visit, None
        if visit is not None:
            visit.leave()
        for kept, version, value in self._copied:
            if kept._version != version:  # a write, which lands on the stage that has the point; the save is as it was
                self.saved |= {id(each): (each, value, None) for each in (value, kept)}
        self._copied.clear()
        self._fetched.clear()

    def read(self, key: Key, view: Callable[[Visit], Any], width: int | None = None) -> Any:
        """What `view` makes of the visit to `key`; on another stage than the one that has it, a RemoteValue.

        `width`: of the tuple that it is, if it is known to be one.
        """
        return self._of_its_stage(key, lambda: view(self.at(key)), width)

    def write(self, key: Key, change: Callable[[Visit], None]) -> None:
        """Have `change` edit what is at `key`, on the stage that has it."""
        if self.interleaver.has(key):
            change(self.at(key))
        else:
            self._ask(key)

    def compute(self, path: str, value: Callable[[], Any]) -> Any:
        """What a module gives for a value of the trace's own, computed on the stage that has the module."""
        return self._of_its_stage((path, CALL), value)

    def _of_its_stage(self, key: Key, value: Callable[[], Any], width: int | None = None) -> Any:
        """A value that one stage has and the others may ask for."""
        stages = self.interleaver.stages
        if stages is None:
            return value()
        stage = stages.of(key)
        number, self.reads = self.reads, self.reads + 1
        if stage == stages.index:
            try:
                found = value()
            except Exception as error:
                stages.refuse(self, number, error)
                raise
            stages.publish(self, number, key, found)
            return found
        called = key[-1] == CALL
        if not called:
            self._ask(key)
        claim = Claim(functools.partial(stages.waive, stage, self.name, number))
        return RemoteValue(Place(self, number, stage, self.step, called, point_name(key), width, claim=claim))

    def fetch(self, place: Place) -> Any:
        """The value at `place`, waiting for it; called when a body of this engine uses it."""
        body, stages = current_body(), self.interleaver.stages
        assert stages is not None
        fetch = stages.fetch(place)
        if not fetch.done or self.interleaver.whole is not None:  # tensor-parallel ranks all wait, or none
            comes = body.ended or place.step < body.now or (place.step == body.now and place.stage < stages.index)
            if not comes and place.called:
                body._asked, body._reached = (place.name,), max(body._reached, stages.begin_of(place.stage))
            body._wait_for(fetch, comes)
        found = stages.received(fetch)
        if body._asked is not None and place.name == point_name(body._asked) and place.step == body.step:
            body._fetched |= {memory_of(tensor) for _, tensor in leaves(found)}
        return found

    def wait_for_sibling(self) -> bool:
        """Wait with another body of the trace for a value of another stage; False if none waits for one that would take it further."""
        other = self.interleaver.sibling_that_fetches(self)
        if other is None or other.fetching is None:
            return False
        self.settled = other.fetching.done
        try:
            self._wait_for(other.fetching, other.needs_value)
        finally:
            self.settled = False
        return True

    def _wait_for(self, fetch: Fetch, comes: bool) -> None:
        """`comes`: within this stage's forward, not only after it."""
        if not comes:
            self._leave()
        self.fetching = fetch
        try:
            self._switch_away((FETCH, self.now if comes else self.now + 1))
        finally:
            self.fetching = None

    def _ask(self, key: Key) -> None:
        """Go on to a point, wherever it is. Raises OutOfOrderError if the forward has gone past it by the time of the last one."""
        self._check_order(key)
        if key != self._asked:
            self._leave()
        self._note(key)

    def _check_order(self, key: Key) -> None:
        last = self.interleaver.ordinal(key)[1]
        if self._asked is not None and key != self._asked and len(key) != 4 and last <= self._reached:
            raise self._out_of_order(
                key, f"{point_name(self._asked)} of step {self.step}", self._asked[-1].endswith(f".{CALL}")
            )

    def _note(self, key: Key) -> None:
        self._asked, self._reached = key, max(self._reached, self.interleaver.ordinal(key)[0])

    def _out_of_order(self, key: Key, after: str, called: bool = False) -> OutOfOrderError:
        hint = (
            " What a module of a later pipeline stage gives can be saved at once, but used only when the forward has come to that stage."
            if called
            else ""
        )
        return OutOfOrderError(
            f"{point_name(key)} of step {self.step} was asked for after {after}: the forward pass "
            f"has gone past it. Ask for values in the order in which the model computes them.{hint}"
        )

    def at(self, key: Key) -> Visit:
        """The visit to `key` in the body's step, waiting for the forward to get there."""
        step = self.step
        if self.visit is not None and self.visit.key == key and self.visit.step == step:
            return self.visit
        if self.interleaver.stages is not None:
            self._check_order(key)
            self._note(key)
        if self.ended:
            raise NeverReachedError(f"{point_name(key)} of step {step} was never reached: the request ended before it.")
        if step < self.now or (step == self.now and self.interleaver.has_passed(key)):
            raise self._out_of_order(key, self.interleaver.where(self.now))
        self.interleaver.prepare(key)
        visit = self._park(key, step)
        return visit

    def wait_for_step(self, step: int) -> bool:
        """Move on to `step`; False if the request ends before it."""
        # With pipeline stages a body may be a step behind the forward, for it waited for a later stage's value.
        now = self.now if self.interleaver.stages is None else self.step
        if step < now:
            raise OutOfOrderError(f"step {step} was asked for in step {now}: it is over.")
        if step != self.step:
            self.step, self._asked, self._reached = step, None, -1
        return step <= self.now or (not self.ended and bool(self._park(STEP_START, step)))

    def wait_at_barrier(self, barrier: object) -> None:
        self.interleaver.arrive(barrier, self)
        while self.interleaver.is_held(barrier, self):
            self._park(BARRIER, self.step)

    def save(self, value: Any) -> Any:
        """Mark `value` as one to bring back. A tensor comes back as it is now, whatever happens to it later."""
        if not isinstance(value, torch.Tensor):
            self.saved[id(value)] = (value, value, None)
            return value
        kept = self._copy(value) if self._needs_copy(value) else value
        if value.requires_grad:  # its gradient is read at itself, not at a copy
            _, _, version = self.saved.setdefault(id(value), (value, kept, value._version))
            if version == value._version:
                return value
        else:
            self.saved[id(value)] = (value, kept, None)
        self.saved[id(kept)] = (kept, kept, None)
        return kept

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        if memory_of(value) in self._fetched:
            kept = private(value)
            self._copied.append((kept, kept._version, value))
            return kept
        if self.visit is None or value.requires_grad or not self.visit.holds(value):
            return value.clone()
        kept = private(value)

        def written() -> None:
            """Into the copy, which stands for the value here; what comes back is as it was at the save."""
            if self.saved[id(kept)][1] is kept:  # the first time
                was = value.clone()
                self.saved |= {id(each): (each, was, None) for each in (value, kept)}
            value.copy_(kept)

        self.visit.follow(kept, written)
        return kept

    def _needs_copy(self, value: torch.Tensor) -> bool:
        return self.snapshots or self.interleaver.is_live(value)

    def has_saved_in(self, value: Any, is_changed: bool) -> bool:
        """Whether it is a container with something in it, at any depth, that was saved.

        Small numbers and texts are the same objects wherever they are, so they count if the container `is_changed`.
        """
        kinds = () if is_changed else _SHARED
        return bool(self.saved) and any(id(each) in self.saved and type(each) not in kinds for each in contents(value))

    def is_saved_throughout(self, value: Any) -> bool:
        """Whether it is a container with something in it that was saved, and no tensor that was not."""
        every = [each for each in contents(value) if type(each) not in _SHARED] if self.saved else []
        tensors = [each for each in every if isinstance(each, torch.Tensor)]
        saved = [each for each in every if id(each) in self.saved and _as_saved(*self.saved[id(each)]) is each]
        return bool(saved) and len(tensors) == sum(isinstance(each, torch.Tensor) for each in saved)

    def pick_saved(self, names: dict[str, Any]) -> dict[str, Any]:
        """Of a body's variables, those that were saved."""
        return {name: _as_saved(*self.saved[id(v)]) for name, v in names.items() if id(v) in self.saved}


def _as_saved(value: Any, kept: Any, version: int | None) -> Any:
    """The tensor itself if it can have a gradient and has not changed since, else the copy."""
    return value if version is not None and value._version == version else kept


def steps(body: Body, wanted: slice | int | list[int]) -> Iterator[int]:
    """The steps of a generation: each is yielded when the forward begins it.

    A slice ends quietly with the request; a step asked for by number must come.
    """
    if isinstance(wanted, slice):
        index, stride = wanted.start or 0, wanted.step or 1
        if index < 0 or stride < 0 or (wanted.stop is not None and wanted.stop < 0):
            raise TraceError("Steps count from 0 upwards: how many there will be is not known in advance.")
        while (wanted.stop is None or index < wanted.stop) and body.wait_for_step(index):
            yield index
            index += stride
        return
    for index in [wanted] if isinstance(wanted, int) else wanted:
        if not body.wait_for_step(index):
            raise NeverReachedError(f"step {index} was never reached: the request ended after step {body.now}.")
        yield index
