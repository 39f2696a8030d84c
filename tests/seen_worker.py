"""A worker whose process can be looked at from a test."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from in_place_norms import InPlaceNorms


class SeenWorker(InPlaceNorms):
    """Named as `worker_extension_cls`."""

    def process(self) -> dict[str, int]:
        """Its process: id, resident memory in MiB, threads."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"pid": os.getpid(), "memory": pages * 4096 >> 20, "threads": threading.active_count()}
