"""Records the code of traces in a separate process, so that no part of the code runs in the caller's process.

    start()                                                     # ahead of the first trace, while the engine loads
    prepare(model)                                              # once the engine is there
    lowering = lower_trace(programs, code, model, lengths, steps)
    made = program_of(function, points, sizes, dtype)           # of a function in a plan's `Apply`

Each caller's process has one `taper`, which ends with the caller. The taper has a fork for each of the latest codes. Code that ends or
blocks its fork runs in the engine's forward instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

from midstream.errors import MidstreamError, TraceError
from midstream.lowering import taper
from midstream.lowering.client_traces import Template
from midstream.lowering.recordings import places_of
from midstream.lowering.row_programs import Made, NotRowwise
from midstream.lowering.tiers import Lowered, Lowering, Note, standing_of
from midstream.memory import Memory
from midstream.runtime.request import Tier
from midstream.sites import Point
from midstream.trace.code import FunctionProgram, TraceProgram
from midstream.trace.record import Model
from midstream.trace.saves import is_installed
from midstream.trace.shipping import ShippedCode, ship
from midstream.trace.weights import Weight

_START_SECONDS = 120.0  # until the process is ready
_SECONDS = 30.0  # for one answer
_EXPLAINED = (512, 8)  # the prompt's length and the number of steps for `explained`
_KEPT_CODES, _MOST_KEPT = 32, 1 << 22  # how many codes are cached, and the most bytes of one
_MOST_FOUND = 512  # requests of one code whose plans are remembered
_FORKS = 6  # codes whose recordings are kept
_WEIGHT_BYTES = 1 << 32  # of tensors that the process keeps
_UNAVAILABLE_SECONDS = 60.0  # how long no process is started after two have failed in a row
_RUN = (
    "import json, sys; sys.path[:] = json.load(sys.stdin); "
    "from midstream.lowering.taper import main; main(int(sys.argv.pop()))"
)


class _EndedError(Exception):
    """The process, or a fork of it, has ended or does not answer. The text says why.

    Attributes:
        by_code: whether the taped code is the cause.
        is_of_fork: whether only a fork has ended.
    """

    def __init__(self, reason: str, by_code: bool = False, is_of_fork: bool = False) -> None:
        super().__init__(reason)
        self.by_code, self.is_of_fork = by_code, is_of_fork


class _Process:
    """The process that forks. Its methods may be called by several threads."""

    def __init__(self) -> None:
        """Raises OSError."""
        if not hasattr(os, "pidfd_open") or not sys.executable:
            raise OSError("it needs Linux, and a Python that knows its own program")
        self._control, other = socket.socketpair()
        self._control.settimeout(_START_SECONDS)
        self._errors: Any = None
        with contextlib.suppress(OSError):  # there may be no folder for temporary files
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(other.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors or subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,  # Ctrl-C is for the caller
            )
        assert self._process.stdin is not None
        with self._process.stdin as path:
            path.write(json.dumps([str(each) for each in sys.path]).encode())
        self._lock = threading.RLock()
        self._is_ready = False
        self._numbers = count()
        self._models: dict[int, tuple[weakref.ref[Model], int]] = {}  # id -> the model, its number
        self._weights: OrderedDict[str, int] = OrderedDict()  # digest -> bytes
        self._spare: _Session | None = None  # a fork that is ready and has all of these, since forking takes time

    def fork(self, code: ShippedCode, model: Model | None) -> tuple[_Session, int]:
        """A fork that has the code's weights and the model, and the model's number. Raises _EndedError."""
        with self._talking():
            self._wait_until_ready()
            number = self._send_model(model) if model is not None else 0
            self._send_weights(code)
            fork, self._spare = self._spare or self._new_fork(), None
        return fork, number

    def prepare(self, model: Model | None) -> None:
        """Make a fork that knows the model ahead of its use, if the process is ready. Raises _EndedError."""
        with self._talking():
            if not self._is_ready and not select.select([self._control], [], [], 0)[0]:
                return
            self._wait_until_ready()
            if model is not None:
                self._send_model(model)
            self._spare = self._spare or self._new_fork()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Let the block send messages. If the block raises, end the process, since a message may be incomplete. Raises _EndedError for
        errors in the block, but not for interrupts.
        """
        with self._lock:
            try:
                yield
            except BaseException as error:
                self._process.kill()
                self.wait(_SECONDS)
                if not isinstance(error, Exception):
                    raise
                raise _EndedError(f"the process that tapes bodies has ended: {self._last_error or error}") from error

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            if not self._control.recv(1):
                raise EOFError
            self._is_ready = True

    @property
    def _last_error(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _new_fork(self) -> _Session:
        own, other = socket.socketpair()
        number = next(self._numbers)
        with other:
            taper.send(self._control, (taper.Taper.fork, number), passed=[other.fileno()])
        return _Session(self, own, number)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _send_model(self, model: Model) -> int:
        """Send the model, if it is new. Returns its number."""
        known, number = self._models.get(id(model), (None, 0))
        if known is None or known() is not model:
            self._drop_spare()
            number = next(self._numbers)
            taper.send(self._control, (taper.Taper.model, number, taper.described(model)))
            self._models[id(model)] = weakref.ref(model), number
        return number

    def _send_weights(self, code: ShippedCode) -> None:
        """Send the code's weights that the process lacks."""
        for digest, weight in code.weights.items():
            if digest not in self._weights:
                self._drop_spare()
                taper.send(self._control, (taper.Taper.weight, digest, len(weight.data)))
                self._control.sendall(weight.data)
                self._weights[digest] = len(weight.data)
            self._weights.move_to_end(digest)
        while sum(self._weights.values()) > _WEIGHT_BYTES:
            digest = next(iter(self._weights))
            if digest in code.weights:
                break
            del self._weights[digest]
            taper.send(self._control, (taper.Taper.drop_weight, digest))

    def import_(self, names: Sequence[str]) -> None:
        with contextlib.suppress(_EndedError), self._talking():
            taper.send(self._control, (taper.Taper.import_, names, sys.path))

    def end_fork(self, number: int) -> None:
        """End a fork that may not read its connection."""
        with contextlib.suppress(_EndedError), self._talking():
            taper.send(self._control, (taper.Taper.end_fork, number))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Wait for its end, if it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def drop(self) -> None:
        """Leave the process to the parent of this forked process."""
        self._control.close()
        self._process.returncode = 0  # nobody waits for it here


class _Session:
    """The connection with a fork that records one code."""

    def __init__(self, owner: _Process, sock: socket.socket, number: int) -> None:
        self._process, self._sock, self._number = owner, sock, number
        _forks.add(self)

    def import_(self, names: Sequence[str]) -> None:
        """Have the process import those of these modules that are installed packages, so that later forks begin with them."""
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
        if installed := [name for name, file in files.items() if file and is_installed(file)]:
            self._process.import_(installed)

    def ask(self, message: Any, code: ShippedCode, model: Model | None = None, seconds: float | None = None) -> Any:
        """The answer. Raises _EndedError if none comes, and errors that the fork has sent."""
        known = {digest: weight.data for digest, weight in code.weights.items()}
        seconds = _SECONDS if seconds is None else seconds
        limit = time.monotonic() + seconds
        try:
            while True:
                self._sock.settimeout(max(0.1, limit - time.monotonic()))
                taper.send(self._sock, message)
                answer = taper.receive(self._sock, known)
                if not isinstance(answer, taper.Asks):
                    break
                message = _attribute(model, answer.name)
        except TimeoutError:
            self.end()
            raise _EndedError(f"taping it takes more than {seconds:.0f} seconds", by_code=True) from None
        except (OSError, EOFError):
            self.end()
            self._process.wait(0.2)  # if the process ends, too, `is_running` shows it after this
            raise _EndedError("it ends the process in which it is taped", is_of_fork=self._process.is_running) from None
        except BaseException:  # Ctrl-C
            self.end()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.close()
        self._process.end_fork(self._number)

    def close(self) -> None:
        """Close the connection. The fork ends as soon as it is idle."""
        self._sock.close()

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0


def _attribute(model: Model | None, name: str) -> Any:
    """The pickled attribute of the model that a fork asks for."""
    try:
        return pickle.dumps(getattr(model, name)())
    except Exception as error:
        return TraceError(f"{name} cannot be sent to the process that tapes bodies: {error}")


# The process.

_lock = threading.RLock()
_forks: WeakSet[_Session] = WeakSet()
_codes: WeakSet[_Code] = WeakSet()
_Requests = tuple[tuple[int, ...], tuple[int, ...]]  # their lengths and steps
_running: _Process | None = None


def start() -> None:
    """Start the process, if it does not run. Its imports take some seconds, in which this process may do other things."""
    with contextlib.suppress(_EndedError):
        _process()


def prepare(model: Model | None) -> None:
    """Have a fork ready for code of this model, if the process has started already."""
    with contextlib.suppress(_EndedError):
        _process().prepare(model)


def _process() -> _Process:
    global _running
    with _lock:
        if _running is None or not _running.is_running:
            try:
                _running = _Process()
            except OSError as error:
                raise _EndedError(f"the process that tapes bodies cannot be started: {error}") from error
        return _running


def _forget() -> None:
    """Leave the process to the parent of this forked process."""
    global _running, _lock
    _lock = threading.RLock()
    for fork in list(_forks):
        fork.close()
    for code in list(_codes):
        code.lock = threading.RLock()
    if _running is not None:
        _running.drop()
        _running = None


os.register_at_fork(after_in_child=_forget)


_unavailable: tuple[float, str] = (0.0, "")  # until when no process is started, and why


def _twice(ask: Callable[[], Any]) -> Any:
    """The answer. Asks again if the fork or the process ends, because something other than the code may have ended it."""
    global _unavailable
    until, reason = _unavailable
    if time.monotonic() < until:
        raise _EndedError(reason)
    try:
        return ask()
    except _EndedError as error:
        if error.by_code:
            raise
    try:
        return ask()
    except _EndedError as error:
        error.by_code = error.by_code or error.is_of_fork
        if not error.by_code:
            _unavailable = time.monotonic() + _UNAVAILABLE_SECONDS, str(error)
        raise


# The caller's questions to the process.


class _Code:
    """The code of calls, with the findings about it."""

    def __init__(self, programs: Sequence[Sequence[TraceProgram]], code: ShippedCode, model: Model) -> None:
        self._places, self._standing = places_of(programs), standing_of(programs)
        self._code, self._model = code, model
        self._found: OrderedDict[_Requests, list[Lowered]] = OrderedDict()
        self._failure: str | None = None  # why it cannot be taped
        self.fork: _Session | None = None
        self.lock = threading.RLock()
        _codes.add(self)

    def lowered(self, requests: _Requests) -> list[Lowered]:
        """The findings about requests."""
        with self.lock:
            if requests in self._found:
                return self._found[requests]
            if self._failure is not None:
                return [_in_forward(self._failure) for _ in requests[0]]
            try:
                found = _twice(partial(self._ask, taper.Fork.requests, *requests))
            except _EndedError as error:
                if error.by_code:
                    self._failure = str(error)
                else:
                    warnings.warn(f"Traces run in the forward, which is slow: {error}.", RuntimeWarning, stacklevel=2)
                return [_in_forward(str(error)) for _ in requests[0]]
            except MidstreamError as error:
                found = [_in_forward(str(error)) for _ in requests[0]]
            for i, one in enumerate(found):
                one.template = partial(self._template, requests, i)
            self._found[requests] = found
            while len(self._found) > 1 and sum(map(len, self._found.values())) > _MOST_FOUND:
                self._found.popitem(last=False)
            return found

    def forget(self) -> None:
        """Drop the findings, whose templates refer to this object."""
        with self.lock:
            self._found.clear()

    def _template(self, requests: _Requests, request: int, steps: int) -> Template:
        """The outcome of a request with fewer steps than foreseen."""
        with self.lock:
            try:
                return _twice(partial(self._ask, taper.Fork.template, *requests, request, steps))
            except _EndedError as error:
                raise TraceError(f"The trace's values cannot be put together: {error}.") from error

    def _ask(self, *message: Any) -> Any:
        if self.fork is None or not self.fork.is_open:
            self.fork, number = _process().fork(self._code, self._model)
            asked = taper.Fork.code, _without_content(self._code), self._places, self._standing, number, sys.path
            try:
                self.fork.import_(self.fork.ask(asked, self._code, seconds=_START_SECONDS))
            except MidstreamError:
                self.fork.close()
                raise
        _keep_latest(self)
        try:
            return self.fork.ask(message, self._code, self._model)
        finally:
            prepare(self._model)  # for the next code


def _without_content(code: ShippedCode) -> ShippedCode:
    return replace(code, weights={digest: Weight(b"", digest) for digest in code.weights})


_latest: OrderedDict[int, weakref.ref[_Code]] = OrderedDict()


def _keep_latest(code: _Code) -> None:
    """End the forks of all codes but the latest."""
    with _lock:
        _latest[id(code)] = weakref.ref(code)
        _latest.move_to_end(id(code))
        while len(_latest) > _FORKS:
            _, oldest = _latest.popitem(last=False)
            if (old := oldest()) is not None and old.fork is not None and old.lock.acquire(blocking=False):
                old.fork.close()
                old.lock.release()


def lowered_requests(
    programs: Sequence[Sequence[TraceProgram]],
    code: ShippedCode,
    model: Model,
    lengths: Sequence[int],
    steps: Sequence[int],
) -> list[Lowered]:
    """The findings about the code of each request. Code that was recorded with equal variables is not recorded again.

    Args:
        programs: the programs of each request. `code` contains them in the form to send.
        lengths: of the requests' prompts, in tokens.
        steps: the most steps of each request.
    """
    key = code.programs, tuple(code.weights), tuple(code.bodies)
    with _lock:
        dropped: list[Any] = []
        found = model.recorded.pop(key, None) or _Code(programs, code, model)
        if len(code.programs) <= _MOST_KEPT:
            model.recorded[key] = found
            dropped = [model.recorded.popitem(last=False)[1] for _ in range(len(model.recorded) - _KEPT_CODES)]
    for each in dropped:
        if isinstance(each, _Code):
            each.forget()
    return found.lowered((tuple(lengths), tuple(steps)))


def lower_trace(
    programs: Sequence[Sequence[TraceProgram]],
    code: ShippedCode,
    model: Model,
    lengths: Sequence[int],
    steps: Sequence[int],
) -> Lowering:
    """How the requests of a call run. Arguments as of `lowered_requests`."""
    return Lowering.of_call(lowered_requests(programs, code, model, lengths, steps))


def explained(program: TraceProgram, model: Model, length: int | None = None, is_streamed: bool = False) -> str:
    """The fate of a program line by line, as text. It assumes eight steps.

    Args:
        length: of the prompt, in tokens; None for 512.
        is_streamed: whether the caller reads values while the request runs.
    """
    assumed, steps = _EXPLAINED
    programs = [[program]]
    (found,) = lowered_requests(programs, ship(programs), model, [length or assumed], [steps])
    lines = [f"{f'line {note.line}':>10}  {note.kind:<8} {note.text}" for note in found.notes]
    tier = Tier.PLAN if found.reads_nothing else found.tier
    if is_streamed and found.tier is Tier.CLIENT:
        tier = Tier.BEHIND
    ends = {
        Tier.PLAN: "A plan does all of it: no code runs in the engine.",
        Tier.CLIENT: "A plan does all of it, and captures what the trace keeps: no code runs in the engine.",
        Tier.BEHIND: "The trace runs behind the step: a plan makes its writes, and its code gets captured rows. The forward is not "
        "stopped.",
        Tier.FORWARD: "The trace runs in the forward: its steps are slower, for all requests in them.",
    }
    return "\n".join([*lines, ends[tier]])


def _in_forward(reason: str) -> Lowered:
    return Lowered(notes=[Note(0, "forward", reason)], reason=f"line 0: {reason}")


_programs: Memory[Made] = Memory()


def program_of(function: Callable[..., Any], points: Sequence[Point], sizes: Sequence[int], dtype: str) -> Made:
    """As `row_programs.program_of`. A function that was recorded with equal variables is not recorded again."""
    try:
        code = ship([[FunctionProgram(function)]])
    except TraceError as error:
        raise NotRowwise(0, str(error)) from error
    if code.by_name is not None:  # the process would import its module anew
        raise NotRowwise(0, code.by_name)
    about = tuple(points), tuple(sizes), dtype

    def ask() -> Any:
        fork, _ = _process().fork(code, None)
        try:
            return fork.ask((taper.Fork.function, _without_content(code), *about, sys.path), code)
        finally:
            fork.close()
            prepare(None)

    def make() -> Made:
        try:
            return _twice(ask)  # type: ignore[no-any-return]
        except (_EndedError, MidstreamError) as error:
            raise NotRowwise(0, str(error)) from error

    return _programs.get((code.programs, tuple(code.weights), *about), make, lambda _: 2 * len(code.programs))
