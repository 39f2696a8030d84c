"""Engines of several ranks whose processes are forked from this one: they start in seconds, where spawned ones import everything anew."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Within the block vLLM forks its processes."""
    import torch
    import vllm.utils.system_utils as system
    import vllm.v1.engine.utils as engines
    import vllm.v1.executor.multiproc_executor as executor

    _single_threaded_children(torch)
    places: list[Any] = [place for place in (system, engines, executor) if hasattr(place, "get_mp_context")]
    before = [place.get_mp_context for place in places]
    for place in places:
        place.get_mp_context = lambda: multiprocessing.get_context("fork")
    try:
        yield
    finally:
        for place, original in zip(places, before, strict=True):
            place.get_mp_context = original


_told: list[bool] = []


def _single_threaded_children(torch: Any) -> None:
    """A thread pool of OpenMP's does not survive a fork: the child would wait for threads that it does not have."""
    if not _told:
        _told.append(True)
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def start_ranks(**arguments: Any) -> Any:
    """A forked engine on the bundled model; `pipeline_parallel_size` and `tensor_parallel_size` as for vLLM."""
    from conftest import start

    with forked():
        return start(**{"enforce_eager": True, "gpu_memory_utilization": 0.1, **arguments})
