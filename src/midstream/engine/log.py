"""vLLM's log in a file, and one line that shows the progress of an engine's start.

Processes inherit file descriptors 1 and 2. While the engine starts, both descriptors point to the file. Afterwards this process restores
its own descriptors, and the engine's processes still write to the file. Prints of the user's code in the workers, as in a trace, come back
through pipes in the directory of the engine's sockets.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import re
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from midstream.engine.plugin import SOCKETS
from midstream.errors import MidstreamError
from midstream.progress import NotebookLine, in_notebook, is_watched

_CHOICES = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
_LINE = re.compile(r"\b(INFO|WARNING|ERROR|CRITICAL|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] (.*)")
_BAR = re.compile(r"\d+%")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_TRACEBACK = "Traceback (most recent call last)"
_TAIL_BYTES = 4096
_LAST_ERRORS, _LAST_LINES = 5, 15
_PERIOD_SECONDS = 1.0
_WIDTH = 100  # of the status line, if no terminal tells its width
_STREAMS = ("stdout", "stderr")

_redirecting = threading.Lock()  # file descriptors are the whole process's


def new_log() -> EngineLog | None:
    """A log for an engine that will start. None if the user has configured vLLM's log by an environment variable."""
    return None if any(name in os.environ for name in _CHOICES) else EngineLog()


class EngineLog:
    """A file for what vLLM writes to stdout and stderr.

    Attributes:
        path: of the file.
    """

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="vllm-", suffix=".log")
        os.close(handle)
        self._file = open(self.path, "a", buffering=1)  # noqa: SIM115
        self._is_kept = False
        self._prints: _Prints | None = None

    @contextlib.contextmanager
    def during_start(self) -> Iterator[None]:
        """Send all output of this process to the file in the block, and show the status line. Errors of vLLM name the file."""
        try:
            with _redirecting, ExitStack() as stack:
                stack.enter_context(_StatusLine(self.path))
                stack.enter_context(self._taking_descriptors())
                stack.enter_context(self._taking_streams())
                yield
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MidstreamError):
                self.keep(error)
            self.close()
            raise

    @contextlib.contextmanager
    def _taking_descriptors(self) -> Iterator[None]:
        saved = {}
        _flush()
        try:
            for fd in (1, 2):
                with contextlib.suppress(OSError):  # a daemon may have closed it
                    saved[fd] = os.dup(fd)
                    os.dup2(self._file.fileno(), fd)
            yield
        finally:
            _flush()
            for fd, own in saved.items():
                os.dup2(own, fd)
                os.close(own)

    @contextlib.contextmanager
    def _taking_streams(self) -> Iterator[None]:
        """Send streams that do not write to the descriptors to the file as well, as in a notebook."""
        with ExitStack() as stack:
            for stream, redirect in (
                (sys.stdout, contextlib.redirect_stdout),
                (sys.stderr, contextlib.redirect_stderr),
            ):
                if stream is not None and not _writes_to_descriptor(stream):
                    switch = _Switch(self._file, stream)
                    stack.callback(switch.restore)
                    stack.enter_context(redirect(switch))  # type: ignore[type-var]
            stack.enter_context(self._taking_vllms_logger())
            yield

    @contextlib.contextmanager
    def during_end(self) -> Iterator[None]:
        """Send this process's log of vLLM to the file in the block."""
        if not _redirecting.acquire(blocking=False):  # another engine starts and has this process's log
            yield
            return
        try:
            with self._taking_vllms_logger():
                yield
        finally:
            _redirecting.release()

    @contextlib.contextmanager
    def _taking_vllms_logger(self) -> Iterator[None]:
        handlers = [each for each in logging.getLogger("vllm").handlers if isinstance(each, logging.StreamHandler)]
        streams = [handler.setStream(self._file) for handler in handlers]
        try:
            yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                if stream is not None:
                    handler.setStream(stream)

    def keep(self, error: BaseException | None = None) -> None:
        """Keep the file after the engine has ended, and add a note to the error with the file's path and last errors, once."""
        self._is_kept = True
        if error is None or any(self.path in note for note in getattr(error, "__notes__", ())):
            return
        if errors := errors_in(self.path):
            error.add_note("\n    ".join([f"vLLM's log is {self.path}. Its last errors are:", *errors]))
        else:
            error.add_note(f"vLLM's log is {self.path}. It has no error, as when a process was killed.")

    def return_prints(self, directory: str) -> None:
        """From now on, write the prints of the workers' Python code to this process's stdout and stderr.

        Args:
            directory: of the engine's sockets.
        """
        self._prints = _Prints(Path(directory))
        self._prints.start()

    def close(self) -> None:
        """Close the log of an engine that has ended. Deletes the file unless `keep` was called."""
        if self._prints is not None:
            self._prints.close()
            self._prints = None
        self._file.close()
        if not self._is_kept:
            with contextlib.suppress(OSError):
                os.remove(self.path)


def errors_in(path: str) -> list[str]:
    """The last errors in vLLM's log, without stack traces. Without any, the end of the last traceback that a process printed."""
    lines = [line for line in _COLOUR.sub("", Path(path).read_text(errors="replace")).splitlines() if line.strip()]
    logged = [match[2] for line in lines if (match := _LINE.search(line)) and match[1] in ("ERROR", "CRITICAL")]
    if told := [text for text in logged if text and not text.startswith((" ", _TRACEBACK))]:
        return list(dict.fromkeys(told))[-_LAST_ERRORS:]
    printed = [line for line in lines if not _LINE.search(line)]
    begin = max((i for i, line in enumerate(printed) if line.startswith((_TRACEBACK, "Fatal "))), default=len(printed))
    return printed[begin:][-_LAST_LINES:]


def print_to_client() -> None:
    """In a worker: from now on send prints of Python code to the client, if it has pipes for them. vLLM's logger keeps its stream."""
    for name, redirect in zip(_STREAMS, (contextlib.redirect_stdout, contextlib.redirect_stderr), strict=True):
        with contextlib.suppress(OSError):  # there is no pipe if the log is not in a file, or on another host
            pipe = os.open(Path(os.environ.get(SOCKETS, ""), name), os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)
            redirect(os.fdopen(pipe, "w", buffering=1)).__enter__()


class _Prints(threading.Thread):
    """Reads the pipes that workers print to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(name="midstream-prints", daemon=True)
        self._end, self._ended = os.pipe()
        self._pipes: dict[int, tuple[str, Any]] = {}
        for name in _STREAMS:
            os.mkfifo(directory / name, 0o600)
            pipe = os.open(directory / name, os.O_RDWR)  # also as a writer, or the pipe ends when no worker has it open
            self._pipes[pipe] = name, codecs.getincrementaldecoder("utf-8")("replace")

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pipe in (self._end, *self._pipes):
                selector.register(pipe, selectors.EVENT_READ)
            while pipes := {key.fd for key, _ in selector.select()} & self._pipes.keys():
                for pipe in pipes:
                    name, decoder = self._pipes[pipe]
                    text = decoder.decode(os.read(pipe, 1 << 16))
                    with contextlib.suppress(Exception):  # the user may have closed the stream
                        stream = getattr(sys, name)
                        stream.write(text)
                        stream.flush()
        for pipe in (self._end, *self._pipes):
            os.close(pipe)

    def close(self) -> None:
        """Write everything that has come, and end."""
        os.close(self._ended)
        if threading.current_thread() is not self:  # the garbage collector may close an engine in any thread
            self.join()


class _Switch:
    """A stream that writes to a log, and after `restore` to another stream. Code that runs during the start may keep it."""

    def __init__(self, log: Any, other: Any) -> None:
        self._now, self._other = log, other

    def restore(self) -> None:
        self._now = self._other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


def _writes_to_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() in (1, 2)
    except (OSError, ValueError, AttributeError):
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


# The status line.


class _StatusLine(threading.Thread):
    """Rewrites one line every second: on a terminal, where the end of the with-block clears it, or in a notebook, where the time stays."""

    def __init__(self, path: str) -> None:
        super().__init__(name="midstream-status", daemon=True)
        self._path, self._over, self._failed = path, threading.Event(), False
        self._stream, self._before = sys.stderr, 0  # the stderr from before it goes to the log
        # Written to without Python's locks: a process may be forked meanwhile.
        self._terminal: int | None = None
        self._notebook: NotebookLine | None = None

    def __enter__(self) -> None:
        if is_watched():
            if in_notebook():
                self._notebook = NotebookLine()
            else:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may have no descriptor
                    self._terminal = os.dup(self._stream.fileno())
            self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        self._over.set()
        if self.ident is not None:
            self.join()
        if self._terminal is not None:
            os.close(self._terminal)

    def run(self) -> None:
        began = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the terminal may go
            while not self._over.is_set():
                seconds, message = time.monotonic() - began, _last_message(self._path)
                self._write(f"Starting vLLM, {seconds:.0f} s" + (f": {message}" if message else ""))
                self._over.wait(_PERIOD_SECONDS)
            if self._notebook is None:
                self._write("")
            elif not self._failed:
                self._write(f"Started vLLM in {time.monotonic() - began:.0f} s")

    def _write(self, text: str) -> None:
        """Replace the line's text. "" leaves an empty line with the cursor at its beginning."""
        if self._notebook is not None:
            return self._notebook.write(text[:_WIDTH])
        columns = os.get_terminal_size(self._terminal).columns if self._terminal is not None else 0
        text = text[: columns - 1 if columns else _WIDTH]
        data = "\r" + text.ljust(self._before) + ("" if text else "\r")
        self._before = len(text)
        if self._terminal is not None:
            os.write(self._terminal, data.encode())
        else:
            self._stream.write(data)
            self._stream.flush()


def _last_message(path: str) -> str:
    """The last message of vLLM or of a progress bar in a log; "" if there is none."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = _COLOUR.sub("", file.read().decode(errors="replace"))
    for line in reversed(text.splitlines()):  # also at each carriage return
        if (match := _LINE.search(line)) and match[2] and not match[2][0].isspace():
            return match[2]
        if _BAR.search(line):
            return line.strip()
    return ""
