"""A trace's body as a coroutine on the forward's own thread.

When the forward reaches the point that a body waits for, it resumes the body. The body runs its Python until it asks for the next point,
and parks. Only one of the two runs at a time, so there are no locks and no timeouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from itertools import count
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from midstream.errors import NeverReachedError, OutOfOrderError, TraceError
from midstream.hooks import CURRENT, is_in_body
from midstream.sites import Key, point_name
from midstream.trace.batch_rows import private
from midstream.trace.forward import STEP_START, Forward
from midstream.trace.parallel import CALL, Origin, StageValue
from midstream.trace.saves import Saves, refuse
from midstream.trace.visit import Journal, Visit
from midstream.tree import leaves, memory_of

# The function that `save` calls in the code around invokes or traces, which runs in the caller's process.
SAVE_ABOVE: ContextVar[Callable[[Any], Any] | None] = ContextVar("midstream_save_above", default=None)
BARRIER: Key = ("", "barrier")
FETCH: Key = ("", "fetch")
ENDS = count(1)  # the numbers of `Body.order`


def current_body() -> Body:
    """The running trace. Raises TraceError outside of traces."""
    body: Body | None = CURRENT.get(None)
    if body is None:
        raise TraceError(
            "This works only inside a trace: `with model.trace(prompt) as tracer:` or `model.run(fn, prompt)`."
        )
    return body


def save(value: Any) -> Any:
    """Bring a value back from a trace. In a with-block `x.save()` means the same. Works on any object.

    A tensor comes back with its present content, on the CPU if an engine computed it. A container comes back with the content that it has
    when the trace ends.

    Returns:
        The value to keep. For an engine's tensor this is a copy, which later kernels do not change.
    """
    refuse(value)
    if not is_in_body() and (outer := SAVE_ABOVE.get()) is not None:
        return outer(value)
    return current_body().save(value)


def out_of_order(point: str, step: int, after: str, hint: str = "") -> OutOfOrderError:
    """The error for a point that the forward has already passed."""
    return OutOfOrderError(
        f"{point} of step {step} was asked for after {after}: the forward pass has gone past it. Ask for values in the order in "
        f"which the model computes them.{hint}"
    )


def never_reached(point: str, step: int) -> NeverReachedError:
    """The error for a point that was asked for after the request had ended."""
    return NeverReachedError(f"{point} of step {step} was never reached: the request ended before it.")


def step_is_over(step: int, now: int) -> OutOfOrderError:
    """The error for a step that is over."""
    return OutOfOrderError(f"step {step} was asked for in step {now}: it is over.")


class StopTrace(BaseException):
    """Unwinds a body after `tracer.stop()`. Not an Exception, so that a user's `except Exception` does not catch it."""


class Body:
    """One request's trace.

    Args:
        name: the same on all ranks.
        run: the trace's code.
        in_engine: whether an engine runs the forward. Saved tensors are then copied, because the engine reuses its buffers, and edits are
            journalled, because the engine computes positions again after a preemption.

    Attributes:
        step: the step of the body's next read; 0 is the prompt's forward.
        now: the forward's step; -1 before the first.
        parked: the point that the body waits for, with its step.
        forward, neighbours: the forward that it runs in, and the bodies alive there by name; set by `Interleaver.add`.
        reads: how many values it has read, including those of other pipeline stages.
        fetching: the fetch of another stage's value that it waits for.
        linked: an object shared by bodies that may use each other's variables, which run one after another at every point; or None.
        settled: whether it waits together with a body whose value had already arrived.
        random: a context manager around its code.
        saves: the values it has saved.
        wants_result: whether its code has used `tracer.result`.
        has_iterated: whether its code iterates over the steps with the tracer.
        asks_by_number: whether it has asked for a step by number, which is an error if the request ends before it.
        entry: the caller's values when its code began, as its program notes them.
        order: its number among the bodies of this process that have ended, in the order of their ends; 0 until it ends.
    """

    forward: Forward
    neighbours: Mapping[str, Body]

    def __init__(self, name: str, run: Callable[[], Any], in_engine: bool) -> None:
        self.name = name
        self.step = 0
        self.now = -1
        self.parked: tuple[Key, int] | None = None
        self.ended = False
        self.stopped = self.interrupted = False
        self.failure: BaseException | None = None
        self.result: Any = None
        self.entry: Any = None
        self.order = 0
        self.saves = Saves()
        self.has_iterated = self.asks_by_number = self.wants_result = False
        self.in_engine = in_engine
        self.journal = Journal() if in_engine else None
        self.visit: Visit | None = None
        self.reads = 0
        self._written: dict[Key, str] = {}  # the points that its code has asked for, as it wrote them
        self.fetching: Any = None
        self.linked: object | None = None
        self.settled = False
        self.random: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._asked: Key | None = None  # the last point that it asked for in its step
        self._reached = -1  # the moment of that point in the forward, on any stage
        self._fetched: set[int | None] = set()  # the memory of other stages' values that were fetched at that point
        self._copied: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # saved copies of these: copy, version, value
        self._run = run
        self._around = Modes.now()  # torch's modes where the forward last resumed the body
        self._greenlet = greenlet(lambda _=None: self._begin())
        self._resumer: greenlet | None = None  # the greenlet of the forward

    @property
    def done(self) -> bool:
        return self._greenlet.dead

    @property
    def started(self) -> bool:
        return bool(self._greenlet) or self._greenlet.dead

    @property
    def needs_value(self) -> bool:
        """Whether it waits for another stage's value that can arrive during this stage's forward."""
        return self.parked is not None and self.parked[0] == FETCH and (self.ended or self.parked[1] <= self.now)

    def frame_of(self, code: CodeType) -> FrameType | None:
        """The frame of the parked body that runs `code`."""
        frame = self._greenlet.gr_frame
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame

    def _begin(self) -> None:
        raised: list[BaseException] = []

        def caught() -> None:
            try:
                self._main()
            except BaseException as error:  # ctypes would print it and go on
                raised.append(error)

        _at_stack_end(caught)
        if raised:
            raise raised.pop()

    def _main(self) -> None:
        CURRENT.set(self)
        try:
            self.result = self._run()
        except GreenletExit:
            return
        except BaseException as failure:
            self.failure = failure
        self.order = next(ENDS)
        try:
            self._leave()
        except BaseException as failure:
            self.failure = self.failure or failure
        self.forward.peers.note(self.name, f"its end ({type(self.failure).__name__})" if self.failure else "its end")
        self._fall_silent()
        self.parked = None

    @property
    def error(self) -> BaseException | None:
        """The exception that its code raised, except by `tracer.stop()`."""
        return None if isinstance(self.failure, StopTrace) else self.failure

    def _fall_silent(self) -> None:
        self.forward.stage.silence(self.name, self.error)

    # The forward's side.

    def resume(self, visit: Visit | bool | None = None, error: BaseException | None = None) -> None:
        """Run the body until it parks again or ends. `error` is raised at the place where it is parked."""
        self.parked = None
        if isinstance(visit, Visit):
            self.visit = visit
        if error is not None and self.started:
            self._give_control(self._greenlet.throw, error)
        else:
            self._give_control(self._greenlet.switch, visit)
        if isinstance(self.failure, KeyboardInterrupt) and not self.interrupted:
            self.interrupted = True
            # Ctrl-C. Engine processes ignore that signal, so there the body has raised the exception itself.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise self.failure

    def _give_control(self, switch: Callable[[Any], Any], with_what: Any) -> None:
        modes = Modes.now()
        # The body is resumed outside of the forward in which it parked.
        if self.started and modes.inference != self._around.inference:
            with _in_modes(self._around):
                return self._give_control(switch, with_what)
        self._resumer, self._around = getcurrent(), modes
        with self.random:
            switch(with_what)
        modes.put()

    def fail(self, error: Exception) -> None:
        """End the body with `error`, even if its code catches it."""
        if not self.done:
            self.resume(error=error)
        self.discard()
        self.parked = None
        if not isinstance(self.failure, type(error)):  # the traceback leads to the body's variables
            own = self.failure
            self.failure = error if own is None else error.with_traceback(own.__traceback__)
        self._fall_silent()

    def discard(self) -> None:
        """Unwind the body of a request that is gone."""
        if self.started and not self.done:
            with contextlib.suppress(BaseException):
                self._give_control(self._greenlet.throw, GreenletExit)
        self.visit = None

    # The body's side.

    def _park(self, key: Key, step: int) -> Any:
        self._leave()
        return self._switch_away((key, step))

    def _switch_away(self, parked: tuple[Key, int]) -> Any:
        assert self._resumer is not None
        self.parked = parked
        self.forward.peers.note(self.name, f"{point_name(parked[0])} of step {parked[1]}")
        with _in_modes(self._around):
            return self._resumer.switch()

    def _leave(self) -> None:
        visit, self.visit = self.visit, None
        if visit is not None:
            visit.leave()
        for saved, version, value in self._copied:
            if saved._version != version:  # the edit takes effect on the value's stage, and the save stays as it was
                self.saves.put(value, value)
                self.saves.put(saved, value)
        self._copied.clear()
        self._fetched.clear()

    def read(self, key: Key, written: str, view: Callable[[Visit], Any], width: int | None = None) -> Any:
        """The result of `view` for the visit to `key`, or a StageValue if another stage owns that point.

        Args:
            written: the value as the user wrote it, such as `attn_z[5]`, for messages.
            width: the length of the tuple that the value is, if known.
        """
        self._written[key] = written
        return self._of_its_stage(key, lambda: view(self.at(key)), width)

    def write(self, key: Key, written: str, change: Callable[[Visit], None]) -> None:
        """Let `change` edit the value at `key`, on the stage that owns it. `written`: as for `read`."""
        self._written[key] = written
        if self.forward.stage.has(key):
            change(self.at(key))
        else:
            self._ask(key)

    def compute(self, path: str, written: str, value: Callable[[], Any]) -> Any:
        """`value()`, which uses the module at `path`, computed on the stage that owns the module. `written`: as for `read`."""
        self._written[path, CALL] = written
        return self._of_its_stage((path, CALL), value)

    def written(self, key: Key) -> str:
        """A point of the forward as the user's code wrote it."""
        return self._written.get(key) or point_name(key)

    def _of_its_stage(self, key: Key, value: Callable[[], Any], width: int | None = None) -> Any:
        stage = self.forward.stage
        if stage.size == 1:
            return value()
        owner = stage.of(key)
        number, self.reads = self.reads, self.reads + 1
        if owner == stage.index:
            return stage.publish(self.name, number, key, value)
        if key[-1] != CALL:
            self._ask(key)
        claim = stage.claim(owner, self.name, number)
        origin = Origin(self.name, number, owner, self.step, key, self.written(key), self.fetch, width, claim=claim)
        return StageValue(origin)

    def fetch(self, origin: Origin) -> Any:
        """Wait for another stage's value. The running body, which uses the value, may be another one than the body that read it."""
        body, stage = current_body(), self.forward.stage
        fetch = stage.fetch(origin)
        if not fetch.done or self.forward.peers.several:  # tensor-parallel ranks all wait, or none does
            comes = body.ended or origin.step < body.now or (origin.step == body.now and origin.stage < stage.index)
            if not comes and origin.key[-1] == CALL:
                body._asked, body._reached = origin.key, max(body._reached, stage.begin_of(origin.stage))
            body._wait_for(fetch, comes)
        found = stage.received(fetch)
        if origin.key == body._asked and not origin.ref and origin.step == body.step:
            body._fetched |= {memory_of(tensor) for _, tensor in leaves(found)}
        return found

    def wait_for_sibling(self) -> bool:
        """Wait together with a linked body that fetches another stage's value. False if no such wait could help."""
        linked = [body for body in self.neighbours.values() if body.linked is self.linked is not None]
        others = [body for body in linked if body is not self and body.fetching is not None and not body.settled]
        if not others:
            return False
        self.settled = others[0].fetching.done
        try:
            self._wait_for(others[0].fetching, others[0].needs_value)
        finally:
            self.settled = False
        return True

    def _wait_for(self, fetch: Any, comes: bool) -> None:
        """`comes`: whether the value arrives during this stage's forward, rather than only after it."""
        if not comes:
            self._leave()
        self.fetching = fetch
        try:
            self._switch_away((FETCH, self.now if comes else self.now + 1))
        finally:
            self.fetching = None

    def _ask(self, key: Key) -> None:
        """Move on to a point of another stage. Raises OutOfOrderError if it comes before the last point that the body asked for."""
        self._check_order(key)
        if key != self._asked:
            self._leave()
        self._note(key)

    def _check_order(self, key: Key) -> None:
        last = self.forward.ordinal(key)[1]
        if self._asked is not None and key != self._asked and len(key) != 4 and last <= self._reached:
            raise self._out_of_order(key, f"{self.written(self._asked)} of step {self.step}", self._asked[-1] == CALL)

    def _note(self, key: Key) -> None:
        self._asked, self._reached = key, max(self._reached, self.forward.ordinal(key)[0])

    def _out_of_order(self, key: Key, after: str, called: bool = False) -> OutOfOrderError:
        hint = (
            " A value that a module of a later pipeline stage computes can be saved at once. It can be used after the forward reaches that "
            "stage."
            if called
            else ""
        )
        return out_of_order(self.written(key), self.step, after, hint)

    def at(self, key: Key) -> Visit:
        """The visit to `key` in the body's step. Waits until the forward reaches it."""
        step = self.step
        if self.visit is not None and self.visit.key == key and self.visit.step == step:
            return self.visit
        if self.forward.stage.size > 1:
            self._check_order(key)
            self._note(key)
        if self.ended:
            raise never_reached(self.written(key), step)
        if step < self.now or (step == self.now and self.forward.has_passed(key)):
            reached = self.forward.reached
            after = "the start" if reached == STEP_START else self.written(reached)
            raise self._out_of_order(key, f"{after} of step {self.now}")
        self.forward.prepare(key)
        return self._park(key, step)  # type: ignore[no-any-return]

    def wait_for_step(self, step: int) -> bool:
        """Move on to `step`. False if the request ends before it."""
        # With several stages a body may be a step behind the forward, because it waited for a later stage's value.
        now = self.now if self.forward.stage.size == 1 else self.step
        if step < now:
            raise step_is_over(step, now)
        if step != self.step:
            self.step, self._asked, self._reached = step, None, -1
        return step <= self.now or (not self.ended and bool(self._park(STEP_START, step)))

    def wait_at_barrier(self, barrier: object) -> None:
        """Wait until enough other bodies are at the barrier."""
        self.forward.arrive(barrier, self.name)
        while self.forward.is_held(barrier, self.name):
            self._park(BARRIER, self.step)

    def save(self, value: Any) -> Any:
        """Mark `value` to be brought back. A tensor comes back with its present content."""
        if not isinstance(value, torch.Tensor):
            self.saves.put(value, value)
            return value
        saved = self._copy(value) if self.in_engine or self.forward.is_live(value) or _is_small_part(value) else value
        if value.requires_grad and not value.is_inference():
            # The trace reads the gradient at the tensor itself, not at a copy.
            if self.saves.put_with_gradient(value, saved):
                return value
        else:
            self.saves.put(value, saved)
        self.saves.put(saved, saved)
        return saved

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        if memory_of(value) in self._fetched:
            saved = private(value)
            self._copied.append((saved, saved._version, value))
            return saved
        if self.visit is None or value.requires_grad or not self.visit.holds(value):
            return value.clone()
        saved = private(value)

        def written() -> None:
            """The trace has edited the copy: edit the activation in the same way. The saved value keeps its content."""
            if self.saves.saved_for(saved) is saved:  # the first time
                was = value.clone()
                self.saves.put(value, was)
                self.saves.put(saved, was)
            value.copy_(saved)

        self.visit.follow(saved, written)
        return saved


def _is_small_part(value: torch.Tensor) -> bool:
    """Whether the tensor is a view that would keep a much larger tensor in memory."""
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.requires_grad:
        return False
    return value.untyped_storage().nbytes() > 2 * value.nbytes + (1 << 16)


# A body runs on the forward's thread, but must not share torch's modes, random numbers and the C stack with it.

# Do not ask here whether the machine has CUDA: a process that has asked can no longer be forked, and vLLM forks its engine.
_KINDS = ("cpu", "cuda")
_NO_AUTOCAST = tuple((False, torch.get_autocast_dtype(kind)) for kind in _KINDS)


class Modes(NamedTuple):
    """Torch's modes: gradients, inference mode, the default dtype, autocast for each kind of device, and how many Python modes are on
    the stacks.
    """

    grad: bool
    inference: bool
    dtype: torch.dtype
    autocast: tuple[tuple[bool, torch.dtype], ...]
    functions: int
    dispatches: int

    @classmethod
    def now(cls) -> Modes:
        """The modes in force."""
        autocast = _NO_AUTOCAST  # nearly always
        if torch._C._is_any_autocast_enabled():
            autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            autocast,
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    def put(self) -> None:
        """Restore gradients, the default dtype and autocast."""
        torch.set_grad_enabled(self.grad)
        if self.dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self.dtype)
        if self.autocast is not _NO_AUTOCAST or torch._C._is_any_autocast_enabled():
            for kind, (on, dtype) in zip(_KINDS, self.autocast, strict=True):
                torch.set_autocast_enabled(kind, on)
                torch.set_autocast_dtype(kind, dtype)


@contextlib.contextmanager
def _in_modes(modes: Modes) -> Iterator[None]:
    """Leave within the block all modes that were entered since `modes` were in force: a body that waits inside `with torch.autocast(...)`
    must not put the forward into that mode.
    """
    own = Modes.now()
    try:
        if own == modes:  # nearly always; this runs at every read
            yield
            return
        functions = [pop_function_mode() for _ in range(own.functions - modes.functions)]
        dispatches = [pop_dispatch_mode() for _ in range(own.dispatches - modes.dispatches)]
        try:
            with torch.inference_mode(modes.inference):
                modes.put()
                yield
        finally:
            for mode in reversed(dispatches):
                push_dispatch_mode(mode)
            for mode in reversed(functions):
                push_function_mode(mode)
    finally:
        own.put()


class Randomness:
    """A body's own state of torch's default generators, in force within `with`.

    A body that draws numbers or sets a seed affects neither the engine's sampler nor other bodies. It draws the same numbers on every rank.

    Args:
        seed_text: the body's name, the same on every rank.
        device: the forward's.
    """

    def __init__(self, seed_text: str, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        seed = zlib.crc32(seed_text.encode())
        self._own = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._generators]
        self._others: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._others = self._swapped(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = self._swapped(self._others)

    def _swapped(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        before = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return before


def _stack_end() -> Callable[[Callable[[], None]], None]:
    """f(run), which calls `run` from a function without an unwind table, where a C++ backtrace ends.

    A body's frames lie on the forward's C stack, below the frames that started it. When other code resumes the body, other frames have
    taken the place of these, so the return address of its outermost frame is garbage. The body never returns to it. But torch takes a
    backtrace whenever it makes a C++ exception, for example for an index out of range, and libgcc's unwinder reads the code at each return
    address that belongs to no known function. That has killed processes: by an `IndexError` after a read of the logits.

    No library has such a function, so this makes one.
    """
    if platform.machine() != "x86_64":
        return lambda run: run()
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # the system forbids making code
        return lambda run: run()
    # push rbp; mov rbp, rsp; mov rax, rdi; mov rdi, rsi; call rax; pop rbp; ret
    page.write(bytes.fromhex("55 4889e5 4889f8 4889f7 ffd0 5d c3"))
    prototype = ctypes.PYFUNCTYPE(None, ctypes.py_object)
    enter = prototype(lambda run: run())
    call = ctypes.PYFUNCTYPE(None, prototype, ctypes.py_object)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    call.page = page  # type: ignore[attr-defined]
    return lambda run: call(enter, run)


_at_stack_end = _stack_end()
