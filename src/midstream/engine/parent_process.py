"""Ends an engine's processes when their client is gone, and leaves Ctrl-C to the client.

vLLM's engine process ends on the SIGINT that a terminal or a notebook sends to all processes of a group, in the middle of the request that
was to be interrupted. After a client that was killed it keeps running, and the client's sockets stay. A worker ends by the SystemExit that
a signal handler raises, which is lost if it is raised in a trace's body. Seen on vLLM 0.32.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType

SOCKETS = "MIDSTREAM_SOCKETS"  # the environment variable that names the directory of the engine's sockets
PREFIX = "midstream-"  # of the directory's name
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class ProcessEnd:
    """What this process knows of its own end.

    Attributes:
        follows_parent: `follow_parent` has run.
        requested: the process has received SIGTERM.
    """

    follows_parent = False
    requested = False


def follow_parent() -> None:
    """Ignore SIGINT, and end this process once its parent is gone. Does nothing in a process that multiprocessing did not start."""
    if multiprocessing.parent_process() is None or ProcessEnd.follows_parent:
        return
    ProcessEnd.follows_parent = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _note_termination()
    threading.Thread(target=_watch, args=(os.getppid(),), name="midstream-parent", daemon=True).start()


def raise_if_ending() -> None:
    """Raise the SystemExit that a trace's body may have swallowed."""
    if ProcessEnd.requested:
        raise SystemExit


def _note_termination() -> None:
    handler = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        ProcessEnd.requested = True
        if callable(handler):
            handler(number, frame)

    if callable(handler):
        signal.signal(signal.SIGTERM, note)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    _remove_sockets()
    os.kill(os.getpid(), signal.SIGTERM)  # lets vLLM free its shared memory
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _remove_sockets() -> None:
    """Remove the directory that the client would have removed. Several processes may do so at once; missing files are ignored."""
    directory = Path(os.environ.get(SOCKETS, ""))
    if directory.name.startswith(PREFIX) and directory.is_absolute():
        shutil.rmtree(directory, ignore_errors=True)
