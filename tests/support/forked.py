"""Engines of several ranks whose processes are forked: they start in seconds, where spawned ones import everything anew.

The process of the tests has threads (OpenMP's, other engines'), and a fork of it may wait forever for one that the child does not have. So
its engines are forked from a server that has imported what they need and done nothing else; the workers, from the engine. A script of which
an engine is all can do without.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

IMPORTS = [
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "midstream.engine.worker",
]


class _Engine(context.ForkServerProcess):
    """A process with the environment of the one that starts it; the server has what it had when it began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        with _forking():
            super().run()


class _FromServer(context.ForkServerContext):
    Process = _Engine


class Program:
    """A program that is forked from the server, in a session of its own. It has what tests call of a `subprocess.Popen`.

    `run` is called without arguments, with `argv` as the program's arguments. `output` gets what it prints, and `errors`, if given, what
    it prints there. A variable of `environment` that is None is not set.
    """

    def __init__(
        self,
        run: Callable[[], object],
        argv: list[str],
        output: Path,
        environment: Mapping[str, str | None],
        errors: Path | None = None,
    ) -> None:
        given = (run, argv, output, output if errors is None else errors, dict(environment))
        self._process = _from_server().Process(target=_run_program, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self.returncode

    def run(self, timeout: float) -> int:
        """Wait for its end. After `timeout` seconds it and its processes are killed: tests would wait for it when they end."""
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            raise

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_script(file: Path, folder: Path | None = None) -> None:
    """Run a file as a program, in `folder` if it is given. What a `Program` runs."""
    if folder is not None:
        os.chdir(folder)
    runpy.run_path(str(file), None, "__main__")


def _run_program(
    run: Callable[[], object], argv: list[str], output: Path, errors: Path, environment: Mapping[str, str | None]
) -> None:
    os.setsid()
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
    resource_tracker._resource_tracker._fd = None  # the server has that of the tests, which ends with them
    resource_tracker.ensure_running()
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv, tempfile.tempdir = argv, None  # which TMPDIR names
    try:
        run()
    finally:
        atexit._run_exitfuncs()  # as at the end of a program; processes of multiprocessing leave them out


@contextlib.contextmanager
def _contexts(chosen: context.BaseContext) -> Iterator[None]:
    """Within the block vLLM makes its processes so, and none to look at a model's class, which takes ten seconds."""
    import vllm.model_executor.models.registry as registry
    import vllm.utils.system_utils as system
    import vllm.v1.engine.utils as engines
    import vllm.v1.executor.multiproc_executor as executor

    with contextlib.ExitStack() as stack:
        for place in (system, engines, executor):
            if hasattr(place, "get_mp_context"):
                stack.enter_context(mock.patch.object(place, "get_mp_context", lambda: chosen))
        stack.enter_context(mock.patch.object(registry, "_run_in_subprocess", lambda look: look()))
        yield


def _forking() -> contextlib.AbstractContextManager[None]:
    """Within the block vLLM forks its processes from this one. Each computes on one thread, since all ranks share the cores."""
    import torch

    torch.set_num_threads(1)
    return _contexts(multiprocessing.get_context("fork"))


_inside = False


@contextlib.contextmanager
def forked(server: bool = True) -> Iterator[None]:
    """Within the block vLLM forks its processes. `server`: not from this one, but from a server; the outermost block decides."""
    global _inside
    if _inside:
        yield
        return
    _inside = True
    try:
        with _contexts(_from_server()) if server else _forking():
            yield
    finally:
        _inside = False


def _from_server() -> context.BaseContext:
    forkserver.set_forkserver_preload(IMPORTS)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return _FromServer()


def start_ranks(**arguments: Any) -> Any:
    """A forked engine on the bundled model; `pipeline_parallel_size` and `tensor_parallel_size` as for vLLM."""
    from engines import start

    with forked():
        return start(**{"enforce_eager": True, "gpu_memory_utilization": 0.1, **arguments})
