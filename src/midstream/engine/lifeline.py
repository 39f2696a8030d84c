"""An engine's processes live as long as their client, and Ctrl-C is the client's to answer.

vLLM's engine process ends itself on the SIGINT that a terminal or a notebook sends to all processes of a group, in the
middle of the request that was to be interrupted; and it goes on for ever after a client that was killed, whose sockets stay.
A worker's way out, SystemExit from a signal handler, is lost if it is raised in a trace's body. Seen on vLLM 0.32.
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

SOCKETS = "MIDSTREAM_SOCKETS"  # the environment variable with the directory of the engine's sockets
PREFIX = "midstream-"  # of its name
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class Lifeline:
    """What ties this process to the one that started it."""

    tied = False
    ending = False  # whether this process has been told to end


def tie_to_parent() -> None:
    """Leave SIGINT to the client, and end once the process that started this one is gone. Not in an in-process one."""
    if multiprocessing.parent_process() is None or Lifeline.tied:
        return
    Lifeline.tied = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _note_termination()
    threading.Thread(target=_watch, args=(os.getppid(),), name="midstream-lifeline", daemon=True).start()


def raise_if_ending() -> None:
    """Raise the SystemExit that a trace's body may have swallowed."""
    if Lifeline.ending:
        raise SystemExit


def _note_termination() -> None:
    handler = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        Lifeline.ending = True
        if callable(handler):
            handler(number, frame)

    if callable(handler):
        signal.signal(signal.SIGTERM, note)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    _remove_sockets()
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way out, which frees its shared memory
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _remove_sockets() -> None:
    """What the client would have removed. Several processes may run this at once; missing files are ignored."""
    directory = Path(os.environ.get(SOCKETS, ""))
    if directory.name.startswith(PREFIX) and directory.is_absolute():
        shutil.rmtree(directory, ignore_errors=True)
