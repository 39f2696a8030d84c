"""Tensor code runs in the graphs at whatever spelling (row L3): `explain` says that no code runs in the engine, none does, and the tokens
and the values are those of plain transformers with hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plain_forward import PlainForward

from midstream import demo_model

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "The Eiffel Tower is in the city of", "One two three"]
WIDTH, LAYER, STEPS = 256, 3, 4
V = torch.linspace(-4, 4, WIDTH)
D = torch.nn.functional.normalize(torch.sin(torch.arange(WIDTH).float()), dim=0)
ENCODER = torch.sin(torch.arange(WIDTH * 512).float()).view(WIDTH, 512) / 16
FACTORS, MASK = torch.linspace(0.5, 1.5, 20), torch.arange(20) % 3 != 1
Write = Callable[[Any], None]


@pytest.fixture(scope="module")
def plain() -> PlainForward:
    return PlainForward(str(demo_model()))


@pytest.fixture(autouse=True)
def here(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--remote"):
        pytest.skip("tests/engine/test_serve_remote.py has those of a server")


def adds(m: Any) -> None:
    m.layers_output[LAYER] += V


def adds_in_its_dtype(m: Any) -> None:
    h = m.layers_output[LAYER]
    h += V.to(h)


def rebinds(m: Any) -> None:
    h = m.layers_output[LAYER]
    m.layers_output[LAYER] = h + 2 * V


def halves(m: Any) -> None:
    m.layers_output[LAYER] = m.layers_output[LAYER] * 0.5


def projects(m: Any) -> None:
    h = m.layers_output[LAYER]
    h[:] = h - (h @ D)[:, None] * D


def zeroes_a_column(m: Any) -> None:
    m.layers_output[LAYER][:, 17] = 0


def replaces_the_last_row(m: Any) -> None:
    m.layers_output[LAYER][-1] = V


def as_in_nnsight(m: Any) -> None:
    m.model.layers[LAYER].output[0][:] += V


def tanh_of_an_mlp(m: Any) -> None:
    m.model.layers[LAYER].mlp.output = torch.tanh(m.model.layers[LAYER].mlp.output) * 3


def gates(m: Any) -> None:
    h = m.layers_output[LAYER]
    features = torch.relu(h @ ENCODER - 0.5)
    m.layers_output[LAYER] = h + torch.where(features > 1, features, 0) @ ENCODER.T / 4


def adds_an_earlier_value(m: Any) -> None:
    early = m.layers_output[1]
    m.layers_output[LAYER] += 0.5 * early


def where_a_score_is_high(m: Any) -> None:
    h = m.layers_output[LAYER]
    m.layers_output[LAYER] = torch.where((h @ D > 0.3)[:, None], h - V, h)


def scales_each_position(m: Any) -> None:
    h = m.layers_output[LAYER]
    h *= FACTORS[: len(h), None]


def adds_at_a_mask_of_positions(m: Any) -> None:
    h = m.layers_output[LAYER]
    h[MASK[: len(h)]] += V


def chooses_by_a_mask_of_positions(m: Any) -> None:
    h = m.layers_output[LAYER]
    m.layers_output[LAYER] = torch.where(MASK[: len(h), None], h.tanh() * 4, h)


def changes_positions_by_turns(m: Any) -> None:
    h = m.layers_output[LAYER]
    h[::2] += V
    h[1::2] -= V
    h[-1] *= 1.5


def keeps_the_largest_features(m: Any) -> None:
    h = m.layers_output[LAYER]
    features = torch.relu(h @ ENCODER)
    best = features.topk(16, dim=-1)
    m.layers_output[LAYER] = h + torch.zeros_like(features).scatter_(-1, best.indices, best.values) @ ENCODER.T / 4


WRITES: list[Write] = [
    adds,
    adds_in_its_dtype,
    rebinds,
    halves,
    projects,
    zeroes_a_column,
    replaces_the_last_row,
    as_in_nnsight,
    tanh_of_an_mlp,
    gates,
    adds_an_earlier_value,
    where_a_score_is_high,
    scales_each_position,
    adds_at_a_mask_of_positions,
    chooses_by_a_mask_of_positions,
    changes_positions_by_turns,
    keeps_the_largest_features,
]
writes = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)


def body(write: Write, steps: str) -> Any:
    """A function for `run`, in the prompt's step, in all or in some."""

    def run(model: Any, tracer: Any) -> Any:
        last = []
        chosen = {"the prompt": tracer.iter[:1], "all steps": tracer.iter[:], "some": tracer.iter[1:3]}[steps]
        for _ in chosen:
            write(model)
            last.append(model.layers_output[LAYER + 2][-1])
        return last

    return run


def in_transformers(write: Write) -> Write:
    """Transformers has one stream in a layer's output, without a tuple around it."""
    return adds if write is as_in_nnsight else write


def check(plain: PlainForward, engine: VLLM, write: Write, steps: str) -> None:
    function = body(write, steps)
    before = engine.gauges()[0]["traced_steps"]
    found = engine.run(function, PROMPTS, max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        assert "no code runs in the engine" in engine.explain(function, prompt), engine.explain(function, prompt)
    assert engine.gauges()[0]["traced_steps"] == before
    for prompt, values in zip(PROMPTS, found, strict=True):
        ran = plain.run(body(in_transformers(write), steps), prompt, STEPS)
        assert ran.error is None and len(values) == len(ran.value)
        for mine, theirs in zip(values, ran.value, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-3)


def test_a_layers_value_is_kept_beside_a_write_to_one_of_its_streams(engine: VLLM, plain: PlainForward) -> None:
    """Before and after it, and the stream itself."""

    def kept(m: Any) -> Any:
        before = m.layers_output[LAYER].norm(dim=-1)
        m.model.layers[LAYER].output[0][:] += V
        return before, m.layers_output[LAYER].norm(dim=-1), m.layers_output[LAYER + 1][-1]

    def of_one_stream(m: Any) -> Any:
        m.model.layers[LAYER].output[0][:] += V
        return m.model.layers[LAYER].output[0].norm(dim=-1), m.layers_output[LAYER + 1][-1]

    def expected(m: Any) -> Any:
        before = m.layers_output[LAYER].norm(dim=-1)
        m.layers_output[LAYER] += V
        return before, m.layers_output[LAYER].norm(dim=-1), m.layers_output[LAYER + 1][-1]

    assert "The trace runs in the forward" in engine.explain(kept)
    assert "it reads one of a layer's two streams" in engine.explain(of_one_stream)
    for prompt in PROMPTS:
        wanted = plain.run(expected, prompt, 1).value
        for mine, theirs in zip(engine.run(kept, prompt, max_tokens=1), wanted, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-3)
        stream, later = engine.run(of_one_stream, prompt, max_tokens=1)
        torch.testing.assert_close(later.cpu(), wanted[2], rtol=1e-3, atol=1e-3)
        assert len(stream) == len(wanted[0]) and not torch.allclose(stream.cpu(), wanted[1])


@pytest.mark.parametrize("steps", ["the prompt", "all steps", "some"])
@writes
def test_a_write_is_a_plan_however_it_is_spelled(engine: VLLM, plain: PlainForward, write: Write, steps: str) -> None:
    check(plain, engine, write, steps)
