"""A worker whose process can be looked at from a test."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

from in_place_norms import InPlaceNorms


class SeenWorker(InPlaceNorms):
    """Named as `worker_extension_cls`."""

    def process(self) -> dict[str, int]:
        """Its process: id, resident memory in MiB without what the allocator can give back, threads."""
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"pid": os.getpid(), "memory": pages * 4096 >> 20, "threads": threading.active_count()}

    def plant(self, path: str) -> int:
        """Give a module, where there is one, an attribute `planted` that cannot be sent. Returns how many have it."""
        modules = dict(self.model_runner.get_model().named_modules())
        if path in modules:
            modules[path].planted = threading.Lock()
        return int(path in modules)

    def note_calls(self, on: bool) -> list[str]:
        """Note which functions of midstream's the thread of the forward runs, or no more. Returns those noted before."""
        noted, self.noted = sorted(getattr(self, "noted", ())), set[str]()

        def note(frame: Any, event: str, _: object) -> None:
            if event == "call" and frame.f_globals.get("__name__", "").startswith("midstream."):
                self.noted.add(frame.f_code.co_qualname)

        sys.setprofile(note if on else None)
        return noted
