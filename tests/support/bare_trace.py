"""A trace without a model, and Python in a process of its own to try it in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from midstream.trace.block import capture, push, skip, skipped

_HERE = Path(__file__).resolve().parent
SRC = _HERE.parents[1] / "src"


class Trace:
    """What a caller of the module does: capture and skip on entry, run and push on exit."""

    def __init__(self, run: bool = True, **extra: Any) -> None:
        self.runs, self.extra = run, extra
        self.saved: list[Any] = []
        self.result: dict[str, Any] = {}

    def __enter__(self) -> Trace:
        frame = sys._getframe(1)
        self.block = capture(frame)
        skip(frame, self.block.target, self)
        return self

    def save(self, value: Any) -> Any:
        self.saved.append(value)
        return value

    def __exit__(self, kind: Any, exc: BaseException | None, tb: Any) -> bool:
        if exc is not None and not skipped(exc):
            return False
        if self.runs:
            target = {self.block.target: self} if self.block.target else {}
            self.result = self.block.function()({"__save__": self.save, **target, **self.extra})
            push(sys._getframe(1), self.result)
        return True


def run_python(*args: str, stdin: str | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SRC, _HERE)))}
    done = subprocess.run([sys.executable, *args], input=stdin, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
