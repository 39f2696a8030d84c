"""The process in which code of traces is recorded, so that the caller's process stays as it is (`lowering.taping` is the caller's side).

It imports PyTorch, and then does no more than to fork: each code is recorded in a fork of its own (`Fork`), which may change its settings,
crash or hang. The fork keeps its recordings for requests with other prompts until the caller's process closes their connection.

    caller -> taper     (Taper.fork, 3) and the connection; models, and tensors of 256 KiB and more, each once: the forks share their memory
    caller -> fork      (Fork.code, ...), then (Fork.requests, lengths, steps)
    fork -> caller      the answer, or an exception; before that Asks("tokenizer"), if the code uses the tokenizer

A message is a method and its arguments, pickled, with large bytes beside it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._compile

from midstream.arch import Architecture
from midstream.errors import MidstreamError, TraceError
from midstream.lowering.recordings import Place
from midstream.lowering.row_programs import NotRowwise, program_of
from midstream.lowering.tiers import TapedCode
from midstream.plan.checking import Checked, remember
from midstream.plan.program import Program
from midstream.plan.steps import Constant
from midstream.sites import Binding, Point
from midstream.trace.code import FunctionProgram
from midstream.trace.record import Model, before_act
from midstream.trace.shipping import ShippedCode, ship, unship

_LARGE = 1 << 16  # bytes that are sent beside a pickle
_HEAD = struct.Struct("<QI")  # bytes of the pickle, and how many large ones follow it
_SIZE = struct.Struct("<Q")


# Messages.


class Asks(NamedTuple):
    """Asks the caller for an attribute of its `Model`: the result of `tokenizer`, or `text_config`."""

    name: str


class _MessagePickler(pickle.Pickler):
    """Pickles a message. `large` gets the bytes that are sent beside it, and `known` those that the other side has, by their digests."""

    def __init__(self, file: io.BytesIO, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.large: list[bytes] = []
        self._known = known

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not bytes or len(obj) < _LARGE:
            return None
        for digest, held in self._known.items():
            if held.numel() == len(obj) and np.array_equal(held.numpy(), np.frombuffer(obj, np.uint8)):
                return digest
        self.large.append(obj)
        return len(self.large) - 1

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Constant, Program):
            return NotImplemented
        values = {each.name: getattr(obj, each.name) for each in fields(obj)}
        return _made, (type(obj), values, getattr(obj, "checked", None))


def _made(kind: type, values: Mapping[str, Any], facts: Checked | None) -> Any:
    """Rebuild a constant or a program, which was checked where it was made."""
    made: Any = object.__new__(kind)
    vars(made).update(values)
    if facts is not None:
        remember(made, facts)
    return made


class _MessageUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, large: Sequence[bytes], known: Mapping[str, bytes]) -> None:
        super().__init__(io.BytesIO(data))
        self._large, self._known = large, known

    def persistent_load(self, pid: Any) -> Any:
        return self._large[pid] if type(pid) is int else self._known[pid]


def send(sock: socket.socket, message: Any, known: Mapping[str, torch.Tensor] = {}, passed: Sequence[int] = ()) -> None:
    """Send a message.

    Args:
        known: tensors that the receiver has, too, by digest.
        passed: files that go with it.
    """
    pickler = _MessagePickler(buffer := io.BytesIO(), known)
    pickler.dump(message)
    head = _HEAD.pack(len(buffer.getbuffer()), len(pickler.large))
    sizes = b"".join(_SIZE.pack(len(each)) for each in pickler.large)
    if passed:
        socket.send_fds(sock, [head[:1]], passed)
        head = head[1:]
    sock.sendall(b"".join((head, sizes, buffer.getbuffer())))
    for each in pickler.large:
        sock.sendall(each)


def receive(sock: socket.socket, known: Mapping[str, bytes] = {}, first: bytes = b"") -> Any:
    """The next message. Raises EOFError at the end of the connection.

    Args:
        known: bytes that the sender has, too, by digest.
        first: the beginning of the message, if it is read already.
    """
    size, count = _HEAD.unpack(first + _received(sock, _HEAD.size - len(first)))
    sizes = [_SIZE.unpack(_received(sock, _SIZE.size))[0] for _ in range(count)]
    data = _received(sock, size)
    return _MessageUnpickler(data, [_received(sock, each) for each in sizes], known).load()


def _received(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) < size:  # a signal or a timeout has cut it
        parts = [data]
        while (size := size - len(parts[-1])) > 0:
            if not parts[-1]:
                raise EOFError
            parts.append(sock.recv(min(size, 1 << 20)))
        data = b"".join(parts)
    return data


# The process, which forks.


class Taper:
    """Does what the caller's messages ask for, and forks.

    Args:
        control: the connection with the caller.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._models: dict[int, Model] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._forks: dict[int, tuple[int, int]] = {}  # number -> process, and a file that is readable once it has ended
        self._poll = select.poll()

    def run(self) -> None:
        """Serve the caller until it is gone."""
        self._poll.register(self._control, select.POLLIN)
        while True:
            ready = [file for file, _ in self._poll.poll()]
            for number, (process, file) in list(self._forks.items()):
                if file in ready:
                    os.waitpid(process, 0)
                    self._poll.unregister(file)
                    os.close(file)
                    del self._forks[number]
            if self._control.fileno() not in ready:
                continue
            first, files, _, _ = socket.recv_fds(self._control, 1, 1)
            if not first:  # the caller has ended
                break
            method, *args = receive(self._control, first=first)
            method(self, *args, *files)
        for process, _ in self._forks.values():
            os.kill(process, signal.SIGKILL)

    def model(self, number: int, model: Model) -> None:
        """Keep a model for later forks."""
        _ = model.envoy, model.at, model.values  # computed once for all forks
        self._models[number] = model

    def weight(self, digest: str, size: int) -> None:
        """Keep a tensor of a trace for later forks. Its bytes follow the message."""
        self._weights[digest] = flat = torch.empty(size, dtype=torch.uint8)
        memory = flat.numpy().data
        while memory:
            if not (count := self._control.recv_into(memory, min(len(memory), 1 << 20))):
                raise EOFError
            memory = memory[count:]

    def drop_weight(self, digest: str) -> None:
        self._weights.pop(digest, None)

    def import_(self, names: Sequence[str], path: Sequence[str]) -> None:
        """Import installed modules that some code uses, for the forks of later codes."""
        sys.path[:] = path
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def fork(self, number: int, connection: int) -> None:
        """Make a fork that serves a connection."""
        own = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                _end_with_parent(own)
                self._control.close()
                for _, file in self._forks.values():
                    os.close(file)
                Fork(socket.socket(fileno=connection), self._models, self._weights).run()
            finally:
                os._exit(1)
        os.close(connection)
        file = os.pidfd_open(process)
        self._forks[number] = process, file
        self._poll.register(file, select.POLLIN)

    def end_fork(self, number: int) -> None:
        if number in self._forks:
            os.kill(self._forks[number][0], signal.SIGKILL)


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


# A fork, which records one code.


class Fork:
    """Answers the caller's messages about one code."""

    def __init__(
        self, connection: socket.socket, models: Mapping[int, Model], weights: Mapping[str, torch.Tensor]
    ) -> None:
        self._connection, self._models, self._weights = connection, models, weights
        self._known: Mapping[str, torch.Tensor] = {}  # the weights of its code
        self._code: TapedCode | None = None
        self._found: tuple[Any, list[Any]] | None = None  # the last findings, and the requests that they are about

    def run(self) -> None:
        """Answer the caller until it closes the connection."""
        global _connection
        _connection = self._connection
        # Recording writes to memory that forks share, which copies it. Do this now, unless a message waits already.
        warm_up(lambda: not select.select([self._connection], [], [], 0)[0])
        torch.set_num_threads(_THREADS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The code must not write files. Most attempts end the recording (`trace.record`) before this makes them fail.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                method, *args = receive(self._connection)
                try:
                    answer = method(self, *args)
                except (MidstreamError, NotRowwise) as error:
                    answer = error
                except Exception as error:
                    answer = TraceError(f"{type(error).__name__}: {error}")
                send(self._connection, answer, self._known)

    def code(
        self,
        code: ShippedCode,
        places: Sequence[Sequence[Place]],
        standing: Sequence[Sequence[bool]],
        model: int,
        path: Sequence[str],
    ) -> list[str]:
        """Get the code of a call, without its weights' content. Returns the names of the modules that it imports.

        Args:
            places, standing: as of `TapedCode`.
            model: its number.
            path: the caller's `sys.path`.
        """
        self._begin(code, path)
        before = set(sys.modules)
        self._code = TapedCode(places, standing, code, self._models[model], self._known)
        with contextlib.suppress(Exception):  # the recording says why
            unship(code.programs, self._models[model].resolve, None, self._known)
        return [name for name in sys.modules if name not in before]

    def requests(self, lengths: Sequence[int], steps: Sequence[int]) -> list[Any]:
        """As `TapedCode.lowered`."""
        if self._found is None or self._found[0] != (lengths, steps):
            assert self._code is not None
            self._found = (lengths, steps), self._code.lowered(lengths, steps)
        return self._found[1]

    def template(self, lengths: Sequence[int], steps: Sequence[int], request: int, fewer: int) -> Any:
        """The outcome of one of these requests if it has fewer steps."""
        if (one := self.requests(lengths, steps)[request]).template is None:
            raise TraceError(f"The trace's values cannot be put together: {one.reason}.")
        return one.template(fewer)

    def function(
        self, code: ShippedCode, points: Sequence[Point], sizes: Sequence[int], dtype: str, path: Sequence[str]
    ) -> Any:
        """The program of a function (`row_programs.program_of`). Raises NotRowwise."""
        self._begin(code, path)
        try:
            ((program,),) = unship(code.programs, _no_model, None, self._known)
        except Exception as error:
            raise NotRowwise(0, f"it cannot be copied: {type(error).__name__}: {error}") from error
        assert isinstance(program, FunctionProgram)
        return program_of(program.fn, points, sizes, dtype)

    def _begin(self, code: ShippedCode, path: Sequence[str]) -> None:
        sys.path[:] = path
        self._known = {digest: self._weights[digest] for digest in code.weights}


@functools.cache
def asked(name: str) -> Any:
    """An attribute of the model of the caller, for the code of a fork."""
    assert _connection is not None
    send(_connection, Asks(name))
    data = receive(_connection)
    if isinstance(data, Exception):
        raise data
    return pickle.loads(data)


def described(model: Model) -> Model:
    """A model for forks, which ask for the tokenizer and the configuration."""
    ask = [partial(asked, name) for name in ("tokenizer", "text_config")]
    return replace(model, tokenizer=ask[0], text_config=ask[1], recorded=OrderedDict())


def _no_model(reference: Any) -> Any:
    raise TraceError(f"it uses the {reference[0]}")


# Its start.


def _watch_functions() -> None:
    """Wrap the functions for which Python raises no audit event, so that a call of them ends the recording."""

    def watched(function: Any, what: str) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before_act(what)
            return function(*args, **kwargs)

        return run

    for module, names in _UNSEEN.items():
        for name in filter(partial(hasattr, module), names.split()):
            setattr(module, name, watched(getattr(module, name), f"{module.__name__}.{name}"))
    output: Any = SimpleNamespace(write=watched(len, "sys.__stdout__.write"), flush=int)
    sys.__stdout__ = sys.__stderr__ = output  # type: ignore[misc]


def _without_compiler() -> None:
    """Keep PyTorch from importing its compiler, which takes 110 MB, at the first use of certain operations: PyTorch would only turn the
    compiler off for them.
    """
    code = torch._compile._disable_dynamo(_no_model).__code__  # of the wrapper of such operations
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__ is code:
            inner = inspect.getclosurevars(each).nonlocals["fn"]
            inner.__dynamo_disable = inner


def warm_up(goes_on: Callable[[], bool] = lambda: True) -> None:
    """Record some code, so that PyTorch imports and caches what it does at the first operations of a process."""
    bindings: Any = {("resid_post", layer): Binding(f"layers.{layer}", "output", (0,), (1,)) for layer in range(2)}
    modules = {"": "Model", "layers": "ModuleList", "layers.0": "Layer", "layers.1": "Layer"}
    order: Any = {(f"layers.{layer}", "output"): (layer, layer) for layer in range(2)}
    arch = Architecture(2, (0, 1), 8, bindings, order, {}, dict.fromkeys(bindings, 8))
    model = Model(arch, modules, ("resid_post",), torch.float32, torch.device("cpu"), 8)
    bodies: list[Any] = [_first, _second]
    for body in filter(lambda _: goes_on(), bodies):
        programs: Any = [[FunctionProgram(body)]]
        TapedCode.of(programs, ship(programs), model).lowered([7], [3])


def _first(model: Any) -> Any:
    model.layers_output[0][-1] += torch.ones(8)
    return torch.relu(model.layers_output[1] @ torch.ones(8, 2)).topk(1).values


def _second(model: Any, tracer: Any) -> Any:
    kept = []
    for _ in tracer.iter[:]:
        h = model.layers_output[0]
        model.layers_output[0] = torch.relu(h - h.mean(-1, keepdim=True)).clamp(max=3)
        kept.append(model.layers_output[1][-1])
    return kept


_THREADS = torch.get_num_threads()
_connection: socket.socket | None = None  # of this fork
_CLOCKS = "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns thread_time thread_time_ns "
_CLOCKS += "clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime"
_UNSEEN: dict[Any, str] = {
    os: "write getpid getppid urandom getrandom getloadavg times", random: "_urandom", time: f"sleep {_CLOCKS}",
    torch: "save load from_file",
    _thread: "start_new_thread", threading: "_start_new_thread _start_joinable_thread",
}  # fmt: skip


def main(control: int) -> None:
    """Serve the caller at the other end of a connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    torch.set_num_threads(1)  # threads do not survive in a fork
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # operations on the meta device import it
    _watch_functions()
    _without_compiler()
    warm_up()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to the memory that the forks share
    connection = socket.socket(fileno=control)
    connection.sendall(b"r")  # it is ready
    Taper(connection).run()
    os._exit(0)
