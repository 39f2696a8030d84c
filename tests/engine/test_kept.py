"""Traces that only keep rows (rows I1, I2, I4): a plan captures the rows, and the code runs in the caller's process, to the same end.

Rows L2, L3, L4.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from engines import alive

import midstream
from midstream import Capture, Steer
from midstream.client import described
from midstream.errors import MidstreamError

if TYPE_CHECKING:
    from oracle import Plain

    from midstream import VLLM

pytestmark = pytest.mark.engine

PROMPTS = ["The capital of France is", "The Eiffel Tower is in the city of", "One two three"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
STEPS = 5


@pytest.fixture(autouse=True)
def here(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--remote"):
        pytest.skip("a server's engine runs the code")


def in_the_forward() -> Any:
    """Without the mechanism: every trace stays in the forward."""
    return mock.patch.object(described, "lower_trace", lambda *_: None)


def traced_steps(engine: VLLM) -> int:
    return engine.gauges()[0]["traced_steps"]


def same(mine: Any, theirs: Any) -> bool:
    """Bit for bit."""
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return list(mine) == list(theirs) and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


def test_rows_are_those_of_the_model(engine: VLLM, plain: Plain) -> None:
    def every_step(model: Any, tracer: Any) -> Any:
        return [model.layers_output[6][-1] for _ in tracer.iter[:]]

    for prompt in PROMPTS:
        found = engine.run(every_step, prompt, max_tokens=STEPS, **GREEDY)
        ids = plain.ids(prompt)
        ran = plain.run([*ids, *plain.generate(prompt, STEPS)[:-1]])
        expected = ran.sites["resid_post", 6][len(ids) - 1 :]
        torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)


def test_what_is_computed_from_rows_is_that_of_the_model(engine: VLLM, plain: Plain) -> None:
    """Scores, norms and features of every step, of two layers, for many requests at once and with a probe of its own in each."""
    torch.manual_seed(4)
    encoder = torch.randn(256, 700)
    probes = torch.randn(len(PROMPTS), 256)

    def computed(rows: torch.Tensor, others: torch.Tensor, probe: torch.Tensor) -> Any:
        top = torch.relu(rows @ encoder).topk(8, dim=-1)
        return rows.norm(dim=-1), top.values, top.indices, torch.sigmoid(others.float() @ probe)

    before = traced_steps(engine)
    with engine.trace(max_tokens=STEPS, **GREEDY) as tracer:
        for prompt, probe in zip(PROMPTS, probes, strict=True):
            with tracer.invoke(prompt):
                found = [].save()
                for _ in tracer.iter[:]:
                    first, later = engine.layers_output[3], engine.layers_output[6]
                    top = torch.relu(first @ encoder).topk(8, dim=-1)
                    found.append((first.norm(dim=-1), top.values, top.indices, torch.sigmoid(later.float() @ probe)))
    assert traced_steps(engine) == before
    for prompt, probe, mine in zip(PROMPTS, probes, found, strict=True):
        ids = plain.ids(prompt)
        ran = plain.run([*ids, *plain.generate(prompt, STEPS)[:-1]])
        expected = computed(ran.sites["resid_post", 3], ran.sites["resid_post", 6], probe)
        assert [len(each[0]) for each in mine] == [len(ids), *[1] * (STEPS - 1)]
        for theirs, *ours in zip(expected, *mine, strict=True):
            got = torch.cat(ours)
            assert got.dtype == theirs.dtype
            if got.dtype == torch.int64:
                assert (got == theirs).float().mean() > 0.98  # of two features that are close, either may come first
            else:
                torch.testing.assert_close(got, theirs, rtol=1e-3, atol=1e-3)
    assert not any(alive(engine))


def test_a_request_that_stops_early_has_as_many_results_as_steps(engine: VLLM) -> None:
    def norms(model: Any, tracer: Any) -> Any:
        return [model.layers_output[5][-1].norm() for _ in tracer.iter[:]]

    text = engine.generate(PROMPTS[0], max_tokens=6, **GREEDY)[0].outputs[0].text
    before = traced_steps(engine)
    with engine.trace(PROMPTS[0], max_tokens=6, stop=text[-4:], **GREEDY) as tracer:
        found = [engine.layers_output[5][-1].norm().save() for _ in tracer.iter[:]]
    assert traced_steps(engine) == before
    whole = engine.run(norms, PROMPTS[0], max_tokens=6, **GREEDY)
    assert 1 < len(found) == len(tracer.outputs[0].outputs[0].token_ids) < 6 or len(found) == 6
    torch.testing.assert_close(torch.stack(found), torch.stack(whole)[: len(found)])


def test_a_block_binds_what_it_kept(engine: VLLM) -> None:
    before = traced_steps(engine)
    with engine.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt in PROMPTS[:2]:
            with tracer.invoke(prompt):
                rows = [].save()
                first = engine.layers_output[2].save()
                unsaved = engine.layers_output[3]
                for _ in tracer.iter[1:]:
                    rows.append(engine.layers_output[4].save())
    assert traced_steps(engine) == before
    assert [len(each) for each in rows] == [2, 2] and {each.shape for each in rows[0]} == {(1, 256)}
    assert [len(each) for each in first] == [len(output.prompt_token_ids) for output in tracer.outputs]
    assert all(output.saves["first"].shape == each.shape for output, each in zip(tracer.outputs, first, strict=True))
    assert not any(output.captures for output in tracer.outputs)
    with pytest.raises(MidstreamError, match="unsaved was set in a trace and not saved"):
        unsaved + 1


def test_errors_of_code_that_keeps_rows_are_those_of_the_forward(engine: VLLM) -> None:
    """Seen failing without the check of the order, and where a step beyond the last one gave an empty tensor."""

    def late(model: Any) -> Any:
        return midstream.save(model.layers_output[4][-1]), model.layers_output[1][-1]

    def late_in_a_step(model: Any, tracer: Any) -> Any:
        return [(model.layers_output[4], model.layers_output[4], model.layers_output[3]) for _ in tracer.iter[1:]]

    def earlier_step(model: Any, tracer: Any) -> Any:
        found = [model.layers_output[2] for _ in tracer.iter[2:4]]
        return found, [model.layers_output[2] for _ in tracer.iter[1:]]

    def after_the_end(model: Any, tracer: Any) -> Any:
        found = [model.layers_output[2] for _ in tracer.iter[:]]
        return found, model.layers_output[3]

    def again(model: Any, tracer: Any) -> Any:
        found = [model.layers_output[2] for _ in tracer.iter[:]]
        return found, [model.layers_output[2] for _ in tracer.iter[[3]]]

    def beyond(model: Any, tracer: Any) -> Any:
        return [model.layers_output[2] for _ in tracer.iter[[0, 3, 4]]]

    def none_such(model: Any) -> Any:
        return [model.layers_output[layer][-1] for layer in range(6, 9)]

    for fn in (late, late_in_a_step, earlier_step, after_the_end, again, beyond, none_such):
        errors = []
        for place in (in_the_forward, nullcontext):
            with place(), pytest.raises(MidstreamError) as caught:
                engine.run(fn, PROMPTS[0], max_tokens=4, **GREEDY)
            errors.append((type(caught.value).__name__, str(caught.value)))
        assert errors[0] == errors[1]
    assert not any(alive(engine))


def test_what_is_kept_beside_a_plan_is_as_the_plan_leaves_it(engine: VLLM) -> None:
    def every_step(model: Any, tracer: Any) -> Any:
        return [model.layers_output[5][-1] for _ in tracer.iter[:]]

    def run(plan: Any) -> tuple[Any, int]:
        before = traced_steps(engine)
        return engine.run(every_step, PROMPTS[0], plan=plan, max_tokens=3, **GREEDY), traced_steps(engine) - before

    for layer, is_kept in ((2, True), (5, False)):  # a trace acts after a plan's edits at the same site
        steer = Steer("resid_post", layers=layer, vector=torch.ones(256))
        with in_the_forward():
            expected, _ = run(steer)
        found, steps = run(steer)
        assert (steps == 0) is is_kept and same(found, expected) and not same(found, run(None)[0])


def test_several_samples_of_a_request_are_traced_in_the_engine(engine: VLLM) -> None:

    def every_step(model: Any, tracer: Any) -> Any:
        return [model.layers_output[5][-1] for _ in tracer.iter[:]]

    before = traced_steps(engine)
    several = engine.run(every_step, PROMPTS[0], max_tokens=3, n=2, temperature=1.0, seed=1, ignore_eos=True)
    assert [len(each) for each in several] == [3, 3] and traced_steps(engine) > before


def test_a_large_default_that_the_code_does_not_use_is_no_hindrance(engine: VLLM) -> None:
    """It would be sent apart from the code. Seen failing where such code is kept."""

    def last_row(model: Any, weight: torch.Tensor = torch.zeros(1 << 17)) -> Any:  # noqa: B008
        return model.layers_output[1][-1]

    assert engine.run(last_row, PROMPTS[0], **GREEDY).shape == (256,)


def saves_rows(engine: VLLM) -> Any:
    with engine.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        a = engine.layers_output[1][-1]
        a.save()
        b = engine.layers_output[1][-1]
        b.save()
        later = [engine.layers_output[2][-1] for _ in tracer.iter[1:]].save()  # noqa: F841
    return tracer


def saves_one_of_a_list(engine: VLLM) -> Any:
    with engine.trace(PROMPTS[0], **GREEDY) as tracer:
        h = engine.layers_output[1][-1]
        rows = [h]  # noqa: F841
        h.save()
    return tracer


def saves_some_in_a_list(engine: VLLM) -> Any:
    with engine.trace(PROMPTS[0], **GREEDY) as tracer:
        rows = [engine.layers_output[1][-1].save(), engine.layers_output[1][-1]]  # noqa: F841
        both = [engine.layers_output[2][-1].save(), engine.layers_output[2][-1].save()]  # noqa: F841
    return tracer


def saves_a_list_and_a_row(engine: VLLM) -> Any:
    with engine.trace(PROMPTS[0], **GREEDY) as tracer:
        rows, n = dict().save(), 3  # noqa: F841
        rows[1] = engine.layers_output[1][-1].save()
        again = engine.layers_output[1][-1].cpu().save()  # noqa: F841
        copied = rows[1]  # noqa: F841
    return tracer


@pytest.mark.parametrize("block", [saves_rows, saves_one_of_a_list, saves_some_in_a_list, saves_a_list_and_a_row])
def test_a_block_brings_back_the_same_names(engine: VLLM, block: Any) -> None:
    """Seen failing where a second save of a row left its name unsaved."""
    with in_the_forward():
        expected = block(engine).outputs[0].saves
    found = block(engine).outputs[0].saves
    assert same({name: found[name] for name in expected}, expected) and found.keys() == expected.keys()
    tensors = [each for value in found.values() for each in flat(value)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == len({id(each) for each in tensors})
    assert all(each.is_contiguous() for each in tensors)


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, dict)):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_a_users_own_captures_leave_the_trace_in_the_engine(engine: VLLM) -> None:
    before = traced_steps(engine)
    with engine.trace(PROMPTS[0], plan=Capture("resid_post", layers=1), **GREEDY) as tracer:
        h = engine.layers_output[2].save()
    assert h.shape == (len(tracer.outputs[0].prompt_token_ids), 256) and traced_steps(engine) > before
    assert tracer.outputs[0].captures["resid_post", 1].shape == (1, 256)


@pytest.mark.parametrize("early", ["by its tokens", "by a stop token"])
def test_a_request_that_ends_before_its_trace_ends_as_in_the_forward(engine: VLLM, early: str) -> None:
    """A plan makes all of its writes, and yet the code does not get to its last one."""
    v = torch.linspace(-1, 1, engine.hidden_size)

    def body(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:STEPS]:
            model.layers_output[2] += v
        _ = model.layers_output[3]

    params: dict[str, Any] = {**GREEDY, "max_tokens": 1}
    if early == "by a stop token":
        (first,) = engine.generate([PROMPTS[0]], **params)
        params |= {"max_tokens": STEPS, "stop_token_ids": list(first.outputs[0].token_ids)}
    said = []
    for context in (nullcontext(), in_the_forward()):
        before = traced_steps(engine)
        with context, pytest.raises(MidstreamError) as raised:
            engine.run(body, PROMPTS[0], **params)
        said.append((type(raised.value).__name__, str(raised.value).splitlines()[0], traced_steps(engine) == before))
    assert said[0][:2] == said[1][:2] and not said[1][2]
    assert said[0][2] == (early == "by a stop token")  # with too few tokens it is known before, and the code runs
    engine.run(body, PROMPTS[0], **GREEDY, max_tokens=STEPS)
