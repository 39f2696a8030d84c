"""The pieces of a compiled forward, between its attention calls, that vLLM replays from CUDA graphs of their own in mixed batches.

The sites lie inside the pieces: a split at each of them would cost every mixed batch, also without plans and traces, a tenth of a
millisecond a layer. So plans get a second graph of each piece, recorded with the site kernel in it, and a piece with a site at which a
trace waits is run from its compiled code.

Seen on vLLM 0.26 (V1, V2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from midstream.engine.graph_sites import Fire, SiteOp

Call = Callable[..., Any]


class TwoSets:
    """An object's dict of recorded graphs, and a second one that can take its place."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._sets: tuple[dict[Any, Any], dict[Any, Any]] = (getattr(owner, name), {})

    def use(self, second: bool) -> None:
        setattr(self._owner, self._name, self._sets[second])


class Pieces:
    """The pieces of one model. They are known once their second graphs are recorded."""

    def __init__(self) -> None:
        self._points: dict[CUDAGraphWrapper, set[int]] = {}  # the sites in each
        self._graphs: dict[CUDAGraphWrapper, TwoSets] = {}
        self._running: CUDAGraphWrapper | None = None

    @contextlib.contextmanager
    def recording(self, edit: Fire) -> Iterator[None]:
        """What is recorded in the block, while second graphs are in use, has `edit` at the sites."""

        def note_and_edit(point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            if self._running is not None:
                self._points[self._running].add(point)
            edit(point, hidden, residual)

        with _called_by(self._record), SiteOp.editing(note_and_edit):
            yield

    def _record(self, vllms: Call, piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
        if piece not in self._graphs:
            self._points[piece] = set()
            self._graphs[piece] = TwoSets(piece, "concrete_cudagraph_entries")
            self._graphs[piece].use(True)
        self._running = piece
        try:
            return vllms(piece, *args, **kwargs)
        finally:
            self._running = None

    def use_second_graphs(self, second: bool) -> None:
        """Which graphs the pieces replay."""
        for graphs in self._graphs.values():
            graphs.use(second)

    @contextlib.contextmanager
    def stopping_at(self, expects: Callable[[int], bool]) -> Iterator[None]:
        """Run a piece from its compiled code, which calls the site op, if something is expected at one of its points."""

        def call(vllms: Call, piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
            stops = any(map(expects, self._points.get(piece, ())))
            return _run(piece, *args, **kwargs) if stops else vllms(piece, *args, **kwargs)

        with _called_by(call):
            yield


def _run(piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
    """Run the piece's compiled code, and put what it returns where its graph would: the next piece's graph reads it there."""
    output, context = piece.runnable(*args, **kwargs), get_forward_context()
    if context.cudagraph_runtime_mode != piece.runtime_mode:
        return output
    expected = piece.concrete_cudagraph_entries[context.batch_descriptor].output
    for to, value in zip(_tensors(expected), _tensors(output), strict=True):
        to.copy_(value)
    return expected


def _tensors(output: Any) -> list[torch.Tensor]:
    return [value for value in (output if isinstance(output, (tuple, list)) else [output]) if torch.is_tensor(value)]


@contextlib.contextmanager
def _called_by(call: Call) -> Iterator[None]:
    """Have `call(vLLM's own, piece, *args, **kwargs)` stand in for the calls of pieces."""
    vllms = CUDAGraphWrapper.__call__

    def called(wrapper: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
        if wrapper.runtime_mode != CUDAGraphMode.PIECEWISE:
            return vllms(wrapper, *args, **kwargs)
        return call(vllms, wrapper, *args, **kwargs)

    CUDAGraphWrapper.__call__ = called
    try:
        yield
    finally:
        CUDAGraphWrapper.__call__ = vllms
