"""Pieces of a forward that are replayed from CUDA graphs: second graphs with the plans' edits, and stops where traces wait.

The stand-in for vLLM's wrapper has what matters of a CUDA graph: a replay reads where the recorded run read and writes where that wrote.
On a GPU, tests/gpu runs plans and traces through the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import LayerName

from midstream.engine import graphs as module
from midstream.engine.graphs import Pieces, SiteOp, _site

CONTEXT = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor="batch")


class Wrapper:
    runtime_mode = CUDAGraphMode.PIECEWISE

    def __init__(self, point: int) -> None:
        self.point = point
        self.concrete_cudagraph_entries: dict[str, Any] = {}

    def runnable(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        hidden = 2 * x
        _site(hidden, None, LayerName(str(self.point)))
        return hidden + 1, 7

    def __call__(self, x: torch.Tensor) -> Any:
        if CONTEXT.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(x)
        entry = self.concrete_cudagraph_entries.get(CONTEXT.batch_descriptor)
        if entry is None:
            entry = SimpleNamespace(read=x, edit=SiteOp.edit, output=self.runnable(x))
            self.concrete_cudagraph_entries[CONTEXT.batch_descriptor] = entry
            return entry.output
        hidden = 2 * entry.read
        if entry.edit is not None:
            entry.edit(self.point, hidden, None)
        entry.output[0].copy_(hidden + 1)
        return entry.output


class Model:
    """Three pieces. A value of x is 8 x + 7 behind them; 10 more at a point are 10, 20 or 40 more behind the last one."""

    def __init__(self) -> None:
        self.pieces = [Wrapper(point) for point in (0, 1, 2)]
        self.input = torch.zeros(1)
        self.fired: list[tuple[int, float]] = []

    def run(self, x: float = 0.0) -> float:
        self.fired.clear()
        value = self.input.fill_(x)
        for piece in self.pieces:
            value, seven = piece(value)
            assert seven == 7
        return value.item()

    def fire(self, point: int, hidden: torch.Tensor, residual: Any) -> None:
        self.fired.append((point, hidden.item()))
        hidden += 10


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(module, "CUDAGraphWrapper", Wrapper)
    monkeypatch.setattr(module, "get_forward_context", lambda: CONTEXT)
    yield Model()
    SiteOp.edit = SiteOp.fire = None


@pytest.fixture
def pieces(model: Model) -> Pieces:
    """Recorded twice, the second time with 100 more at point 1."""

    def edit(point: int, hidden: torch.Tensor, residual: Any) -> None:
        hidden += 100 * (point == 1)

    model.run()
    pieces = Pieces()
    with pieces.recording(edit):
        model.run()
    pieces.use_second_graphs(False)
    return pieces


def test_second_graphs_have_the_edits_and_the_first_ones_nothing(model: Model, pieces: Pieces) -> None:
    before = Wrapper.__call__
    assert model.run(1) == 15
    pieces.use_second_graphs(True)
    assert model.run(1) == 15 + 200
    pieces.use_second_graphs(False)
    assert model.run(2) == 23
    assert Wrapper.__call__ is before and SiteOp.edit is None


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("stops", [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()])
def test_a_trace_is_called_at_its_points_and_what_it_writes_goes_on(
    model: Model, pieces: Pieces, stops: tuple[int, ...], second: bool
) -> None:
    """Seen failing where the output of a piece that was run was not put where the graph of the next one reads."""
    pieces.use_second_graphs(second)
    SiteOp.fire = model.fire
    SiteOp.edit = model.pieces[1].concrete_cudagraph_entries["batch"].edit
    with pieces.stopping_at(lambda point: point in stops):
        found = model.run(3)
    SiteOp.edit = None
    at = {0: 6.0, 1: 14.0 + 100 * second + 20 * (0 in stops)}
    at[2] = 2 * (at[1] + 10 * (1 in stops)) + 2
    assert model.fired == [(point, at[point]) for point in stops]
    assert found == 31 + 200 * second + sum({0: 40, 1: 20, 2: 10}[point] for point in stops)
    SiteOp.fire = None
    assert model.run(3) == 31 + 200 * second  # and nothing of it stays


def test_a_batch_without_graphs_runs_as_it_is(model: Model, pieces: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONTEXT, "cudagraph_runtime_mode", CUDAGraphMode.NONE)
    SiteOp.fire = model.fire
    with pieces.stopping_at(lambda point: point == 1):
        assert model.run(0) == 7 + 40 + 20 + 10  # every piece calls the op, and the host would find nobody there
    assert [point for point, _ in model.fired] == [0, 1, 2]
