"""Scripts that start an engine outside of `if __name__ == "__main__":`.

A spawned process of an engine imports the user's script, and this import starts an engine again. The importing process notices it, tells
the process that launched it by creating a file, and ends. The launching process then raises `UnguardedScriptError` and not vLLM's error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midstream.errors import UnguardedScriptError

_FILE = "MIDSTREAM_UNGUARDED"  # the environment variable that names the file


def refuse_in_import() -> None:
    """End this process if it was spawned and is importing the user's script.

    Raises:
        SystemExit: the launching process will raise the error.
        UnguardedScriptError: no launching process listens, as when the user's own code has spawned this process.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ[_FILE]).touch()
        raise SystemExit(1)
    raise UnguardedScriptError


def noticing_unguarded_scripts(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's context manager that launches an engine's processes. It raises UnguardedScriptError if one of them starts an engine by its
    import of the script."""

    @contextlib.contextmanager
    def launch_core_engines(*args: Any, **kwargs: Any) -> Iterator[Any]:
        refuse_in_import()
        with tempfile.TemporaryDirectory(prefix="midstream-") as directory:
            file = Path(directory, "unguarded")
            os.environ[_FILE] = str(file)
            try:
                with original(*args, **kwargs) as launched:
                    yield launched
            except Exception:
                if file.exists():
                    raise UnguardedScriptError from None
                raise
            finally:
                os.environ.pop(_FILE, None)

    return launch_core_engines
