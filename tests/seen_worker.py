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

import torch
from in_place_norms import InPlaceNorms

_PAGE = os.sysconf("SC_PAGESIZE")


def _resident(tensor: torch.Tensor) -> int:
    """How many of its pages are in memory."""
    storage = tensor.untyped_storage()
    first, last = storage.data_ptr() // _PAGE, (storage.data_ptr() + storage.nbytes() - 1) // _PAGE
    seen = ctypes.create_string_buffer(last - first + 1)
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(first * _PAGE), ctypes.c_size_t(len(seen) * _PAGE), seen)
    assert not failed
    return sum(byte & 1 for byte in seen.raw)


class SeenWorker(InPlaceNorms):
    """Named as `worker_extension_cls`."""

    def process(self) -> dict[str, int]:
        """Its process: id, resident memory in MiB, threads.

        Without what the allocator can give back, and without the KV cache, which comes into memory as its blocks are first written.
        """
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)
        caches = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.model_runner.kv_caches}
        pages = int(Path("/proc/self/statm").read_text().split()[1]) - sum(map(_resident, caches.values()))
        return {"pid": os.getpid(), "memory": pages * _PAGE >> 20, "threads": threading.active_count()}

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
