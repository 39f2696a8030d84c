"""Changes vLLM's processes: replaces functions of vLLM, and ends a process when its client has ended.

`apply_replacements` replaces functions for the whole process, by the process's role. `Replacement` replaces an attribute of one object,
or of a class for a while. Each replacement has a row in the table of `seams`. No other code of midstream assigns to a module, class or
method of vLLM; a test checks that.

`follow_parent` lets only the client handle Ctrl-C. A terminal or a notebook sends SIGINT to all processes of a group, and vLLM's engine
process would end in the middle of the request that the user interrupts. If the client is killed, vLLM's engine process would keep running,
and the client's sockets would stay. A worker ends by the SystemExit that a signal handler raises. If the handler runs during a trace's
body, this SystemExit is lost (seen on 0.32).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

from midstream.engine.seams import SEAMS, Does, Role, check_vllm_version

SOCKETS = "MIDSTREAM_SOCKETS"  # the environment variable that names the directory of the engine's sockets
PREFIX = "midstream-"  # of the directory's name
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_ABSENT = object()
_SWITCHED = {seam.target for seam in SEAMS if seam.does is Does.REPLACES and seam.role is None}


def register() -> None:
    """Check vLLM's version and prepare its front end. Engines that midstream did not start work as before.

    vLLM calls this in each of its processes (entry point group `vllm.general_plugins`).

    Raises:
        UnsupportedVersionError: this vLLM is not supported.
    """
    apply_replacements(Role.FRONT_END)


def apply_replacements(role: Role) -> None:
    """Make the replacements of a process role. Calling it again in the same process does nothing.

    It changes classes and modules, not objects. Methods set on the prefix cache's objects made the scheduler's part of a plain step 4 %
    longer, as measured with two methods that it calls for every token.

    Raises:
        UnsupportedVersionError: this vLLM is not supported.
    """
    check_vllm_version()
    for seam in SEAMS:
        if seam.role is role:
            path, _, name = seam.target.rpartition(".")
            owner = resolve_name(path)
            original = getattr(owner, name)
            if not hasattr(original, "midstream"):
                ours = functools.wraps(original)(resolve_name(seam.by)(original))
                ours.midstream = True  # type: ignore[attr-defined]
                setattr(owner, name, ours)


class Replacement:
    """An attribute of one object, or of a class, that is switched between vLLM's value and midstream's.

    As a context manager it uses midstream's value in the block.

    Args:
        target: the attribute by its path in vLLM.
        owner: the object or the class.
        ours: midstream's value.

    Raises:
        LookupError: the table has no row for the target.
    """

    def __init__(self, target: str, owner: Any, ours: Any) -> None:
        if target not in _SWITCHED:
            raise LookupError(f"{target} has no row in midstream.engine.seams that says it is replaced on an object.")
        self._owner, self._name, self._ours = owner, target.rpartition(".")[2], ours
        self._before = vars(owner)[self._name] if isinstance(owner, type) else vars(owner).get(self._name, _ABSENT)

    def switch(self, ours: bool) -> None:
        """Use midstream's value, or the one from before."""
        value = self._ours if ours else self._before
        if isinstance(self._owner, type):
            setattr(self._owner, self._name, value)
        elif value is _ABSENT:  # so that the class's is used again
            vars(self._owner).pop(self._name, None)
        else:
            vars(self._owner)[self._name] = value

    def __enter__(self) -> None:
        self.switch(True)

    def __exit__(self, *error: object) -> None:
        self.switch(False)


class ProcessEnd:
    """Flags of this process about its end.

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
        if callable(handler := signal.getsignal(signal.SIGTERM)):

            def note(number: int, frame: FrameType | None) -> None:
                ProcessEnd.requested = True
                handler(number, frame)

            signal.signal(signal.SIGTERM, note)
    threading.Thread(target=_watch, args=(os.getppid(),), name="midstream-parent", daemon=True).start()


def raise_if_ending() -> None:
    """Raise the SystemExit that a trace's body may have swallowed."""
    if ProcessEnd.requested:
        raise SystemExit


def _watch(parent: int) -> None:
    """Wait for the parent's end. Then remove the sockets, which the client would have removed, and end this process."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    directory = Path(os.environ.get(SOCKETS, ""))
    if directory.name.startswith(PREFIX) and directory.is_absolute():  # other processes may be removing it as well
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)  # lets vLLM free its shared memory
    time.sleep(_GRACE_SECONDS)
    os._exit(1)
