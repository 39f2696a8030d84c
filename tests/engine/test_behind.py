"""Traces that run behind the step (rows I1, I2, I4): the same tokens, values and errors as in the forward, and steps that nobody stops.

Rows F1, F5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from engines import alive

from midstream import Capture, Steer
from midstream.client import described
from midstream.errors import MidstreamError

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "The Eiffel Tower is in the city of", "One two three"]
STEPS = 4


@contextmanager
def in_the_forward() -> Iterator[None]:
    """Without the mechanism: every trace stays in the forward."""
    with mock.patch.object(described, "lower_trace", lambda *_: None):
        yield


def run(model: Any, fn: Any) -> tuple[Any, list[Any]]:
    """What the body returns for each prompt, and the tokens."""
    with model.trace(max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                value = fn(model, tracer).save()
    return value, [list(each.outputs[0].token_ids) for each in tracer.outputs]


def test_errors_are_those_of_the_forward(engine: VLLM) -> None:
    def out_of_order(model: Any) -> Any:
        late = model.layers_output[4]
        return late, model.layers_output[1]

    def own_error(model: Any) -> Any:
        raise ValueError(f"at {model.layers_output[2].shape[0]} tokens")

    def never(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[3:5]:
            model.layers_output[2].norm()
        return model.layers_output[3]

    for fn in (out_of_order, own_error, never):
        errors = []
        for place in (in_the_forward, nullcontext):
            with place(), pytest.raises(MidstreamError) as caught:
                engine.run(fn, PROMPTS[0], max_tokens=4, temperature=0.0, ignore_eos=True)
            errors.append((type(caught.value).__name__, str(caught.value)))
        assert errors[0] == errors[1]
    assert not any(alive(engine))


def test_rows_come_in_the_order_of_their_positions(engine: VLLM) -> None:
    """A plan captures rows with the same edits together. Seen failing without their order."""

    def body(model: Any) -> Any:
        early = model.layers_output[1].clone()
        model.layers_output[2][[0, 2]] = torch.ones(256)
        return early

    before = engine.gauges()[0]["forward_traced_steps"]
    found = engine.run(body, PROMPTS, max_tokens=1)
    assert engine.gauges()[0]["forward_traced_steps"] == before
    with in_the_forward():
        for mine, theirs in zip(found, engine.run(body, PROMPTS, max_tokens=1), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_cache_of_modules_is_filled_behind_the_step(engine: VLLM) -> None:
    """Its values are those after the trace's edits, in every step. Seen failing with captures of the prompt alone."""

    def caches(model: Any, tracer: Any) -> Any:
        cache = tracer.cache(modules=[layer.mlp for layer in model.model.layers[2:5]])
        for _ in tracer.iter[:]:
            model.model.layers[3].mlp.output += torch.ones(256)
        return cache

    found = []
    for place in (in_the_forward, nullcontext):
        before = engine.gauges()[0]["forward_traced_steps"]
        with place():
            cache = engine.run(caches, PROMPTS[0], max_tokens=3, temperature=0.0, ignore_eos=True)
        assert (engine.gauges()[0]["forward_traced_steps"] > before) is (place is in_the_forward)
        assert list(cache) == [f"model.layers.{layer}.mlp" for layer in (2, 3, 4)]
        found.append([step for path in cache for step in cache[path].output])
    assert len(found[0]) == len(found[1]) == 9
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not any(alive(engine))


def test_a_reading_trace_does_not_stop_the_forward(engine: VLLM) -> None:
    before = engine.gauges()[0]
    with engine.trace(PROMPTS[0], max_tokens=3, temperature=0.0):
        h = engine.layers_output[2].save()
        engine.layers_output[5] += torch.ones(256)
    after = engine.gauges()[0]
    assert h.shape[-1] == 256
    assert after["forward_traced_steps"] == before["forward_traced_steps"]
    assert after["traced_steps"] > before["traced_steps"] and after["planned_steps"] > before["planned_steps"]


def test_a_trace_that_a_plan_does_is_no_trace(engine: VLLM) -> None:
    """Its prompt may come from the prefix cache, and its steps repeat like those of a plan."""
    before = engine.gauges()[0]
    with engine.trace(PROMPTS[0], max_tokens=3, temperature=0.0) as tracer:
        for layer in (2, 3):
            engine.layers_output[layer] += torch.ones(256)
    after = engine.gauges()[0]
    assert after["traced_steps"] == before["traced_steps"] and after["planned_steps"] > before["planned_steps"]
    with in_the_forward(), engine.trace(PROMPTS[0], max_tokens=3, temperature=0.0) as other:
        for layer in (2, 3):
            engine.layers_output[layer] += torch.ones(256)
    assert tracer.outputs[0].outputs[0].token_ids == other.outputs[0].outputs[0].token_ids
    with pytest.raises(MidstreamError, match="layer was set in a trace and not saved"):
        layer + 1


def test_a_lowered_write_that_is_not_finite_ends_its_request_alone(engine: VLLM) -> None:
    plain = engine.generate(PROMPTS[1], max_tokens=3, temperature=0.0)[0].outputs[0].token_ids
    with pytest.raises(MidstreamError, match="resid_post of layer 2"), engine.trace(PROMPTS[0], max_tokens=3):
        engine.layers_output[2] += 3e38
        engine.layers_output[2] *= 3e38
    assert engine.generate(PROMPTS[1], max_tokens=3, temperature=0.0)[0].outputs[0].token_ids == plain
    assert not any(alive(engine))


def test_a_write_in_the_forward_that_is_not_finite_ends_its_request_whichever_stage_it_is_on(engine: VLLM) -> None:
    for layer in (2, 6):
        with in_the_forward(), pytest.raises(MidstreamError, match="Not finite: "):
            engine.run(lambda m, layer=layer: m.steer(layer, torch.full((256,), 3e38), 3), PROMPTS[0])
    assert not any(alive(engine))


def test_a_standing_edit_runs_behind_the_step(engine: VLLM) -> None:
    with engine.edit() as edited:
        engine.layers_output[3] += torch.ones(256)
    before = engine.gauges()[0]
    found = edited.generate(PROMPTS[0], max_tokens=4, temperature=0.0)[0].outputs[0].token_ids
    after = engine.gauges()[0]
    with in_the_forward():
        assert edited.generate(PROMPTS[0], max_tokens=4, temperature=0.0)[0].outputs[0].token_ids == found
    assert after["traced_steps"] == before["traced_steps"]


def test_a_plan_beside_a_trace_joins_its_plan_if_they_do_not_meet(engine: VLLM) -> None:
    """Seen failing without the plan's edits, and with `meets` always false."""
    steer, v = Steer("resid_post", layers=[2, -4], vector=torch.full((256,), 3.0)), torch.ones(256)

    def read(model: Any, tracer: Any, at: int) -> list[Any]:
        found = []
        for _ in tracer.iter[:]:
            model.layers_output[3] += v
            found.append(model.layers_output[at].clone())
        return found

    for at, plan, joins in ((6, steer, True), (4, steer, False), (6, [steer, Capture("resid_post", layers=1)], False)):

        def traced(at: int = at, plan: Any = plan) -> Any:
            with engine.trace(PROMPTS[0], plan=plan, max_tokens=3, temperature=0.0) as tracer:
                values = read(engine, tracer, at).save()
            return values, list(tracer.result.outputs[0].token_ids)

        with in_the_forward():
            expected, tokens = traced()
        before = engine.gauges()[0]["forward_traced_steps"]
        values, found = traced()
        assert (engine.gauges()[0]["forward_traced_steps"] == before) is joins and found == tokens
        for mine, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        with in_the_forward():
            assert not torch.allclose(traced(plan=None)[0][0], expected[0], atol=0.1)  # the plan changes something
    assert not any(alive(engine))


def test_a_trace_reads_a_site_after_the_edits_of_a_plan_beside_it(engine: VLLM) -> None:
    """One plan cannot say that, so it stays in the forward."""
    steer = Steer("resid_post", layers=2, vector=torch.ones(256))
    before = engine.gauges()[0]["forward_traced_steps"]
    with engine.trace(PROMPTS[0], plan=steer, temperature=0.0):
        h = engine.layers_output[2].save()
    with engine.trace(PROMPTS[0], temperature=0.0):
        plain = engine.layers_output[2].save()
    torch.testing.assert_close(h, plain + 1)
    assert engine.gauges()[0]["forward_traced_steps"] > before


def test_explain_says_what_becomes_of_a_trace(engine: VLLM, capsys: pytest.CaptureFixture[str]) -> None:
    def steers(model: Any) -> None:
        model.layers_output[2] += torch.ones(256)

    def scales(model: Any) -> Any:
        h = model.layers_output[1]
        model.layers_output[2] -= model.layers_output[2].mean(0)
        return h

    line = scales.__code__.co_firstlineno
    assert engine.explain(steers).endswith("A plan does all of it: no code runs in the engine.")
    text = engine.explain(scales)
    assert f"line {line + 1}  read     resid_post[1] is captured" in text
    assert f"line {line + 2}  forward  mean.dim" in text and "axis of the rows" in text
    assert not capsys.readouterr().out, "print(engine.explain(fn)) shows it once"
    assert repr(engine.explain(scales)) == f"{text}" == str(engine.explain(scales))
    with engine.explain():
        mean = engine.layers_output[3].mean(0).save()  # noqa: F841
    assert "The trace runs behind the step" in capsys.readouterr().out
