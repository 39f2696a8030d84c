"""Nothing that a request writes harms another one, also beyond the finite range (F5).

The oracle of every neighbour is the same batch on the same engine before anybody overflowed, to the last bit of its log-probabilities. Each
test of KV was seen failing with `EditedBlocks.take` giving nothing: on the CPU stale rows of a block are multiplied by zero, and zero times
infinity is NaN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from here import values
from plan_cases import tokens

from midstream import Clamp, Patch, Steer, save
from midstream.errors import MidstreamError, NotFiniteError, PlanError, TraceError

if TYPE_CHECKING:
    from midstream import VLLM, LanguageModel

pytestmark = pytest.mark.engine

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
PLAIN = [FRANCE, EIFFEL, "The capital of Italy is", "The"] * 3
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
HUGE = torch.full((256,), 1e38)


def answers(model: VLLM) -> list[Any]:
    """What plain requests get, several batches of them: each takes blocks from the others."""
    return [[values(o) for o in model.generate(PLAIN, max_tokens=6, logprobs=5, **GREEDY)] for _ in range(3)]


def failure(call: Callable[[], Any]) -> MidstreamError:
    """The one error of a call, or the first of several."""
    with pytest.raises(MidstreamError) as raised:
        call()
    return getattr(raised.value, "exceptions", [raised.value])[0]


PLANS = [
    (Steer("resid_post", layers=2, vector=HUGE, scale=1e38), "resid_post of layer 2, position 0"),
    (Steer("resid_post", layers=[5, 3], vector=HUGE, scale=1e38, phase="decode"), "resid_post of layer 3, position 5"),
    (Steer("attn_in", layers=3, vector=HUGE, scale=-1e38, positions=[2]), "attn_in of layer 3, position 2"),
    (Steer("resid_post", layers=7, vector=HUGE, scale=1e38, positions=1), "resid_post of layer 7, position 1"),
    # Finite where it is written, and no longer behind that: attention's keys, another layer's sum.
    (Steer("attn_in", layers=3, vector=HUGE / 3), r"position 0, by the end of the forward pass: its plan edits attn_in of layer 3"),
    ([Patch("resid_post", layer=1, position=3, source=HUGE * 3), Steer("mlp_out", layers=2, vector=HUGE * 3)], "position"),
    (Clamp("mlp_in", layers=4, direction=[1.0] + [0.0] * 255, low=3e38, high=3.2e38), "its plan edits mlp_in of layer 4"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "where"), PLANS)
def test_a_plan_that_overflows_ends_its_request_and_harms_nobody(engine: VLLM, plan: Any, where: str) -> None:
    before = answers(engine)
    error = failure(lambda: engine.generate([FRANCE] * 4, plan=plan, max_tokens=4, **GREEDY))
    assert type(error) is NotFiniteError and isinstance(error, PlanError)
    assert where in str(error) and "smaller vectors or scales" in str(error)
    assert answers(engine) == before


def test_neighbours_in_the_same_batch_go_on(engine: VLLM) -> None:
    """The others of the call keep their outputs, which the error brings along."""
    broken, steered = ([Steer("resid_post", layers=2, vector=HUGE, scale=scale)] for scale in (1e38, 1e-36))
    call = {"max_tokens": 6, **GREEDY}
    expected = engine.generate([FRANCE] * 4, plan=[None, None, steered, None], **call)
    with pytest.raises(NotFiniteError) as raised:
        engine.generate([FRANCE] * 4, plan=[broken, None, steered, None], **call)
    assert [tokens(o) for o in raised.value.outputs[1:]] == [tokens(o) for o in expected[1:]]  # type: ignore[attr-defined]


def test_nothing_of_an_overflowed_run_is_kept(engine: VLLM) -> None:
    """A recording under a plan that overflows leaves no run, on no worker."""
    before = answers(engine)
    engine.plan = [Steer("resid_post", layers=2, vector=HUGE, scale=1e38)]
    try:
        error = failure(lambda: engine.record(FRANCE, sites=["resid_post"]))
    finally:
        engine.plan = None
    assert type(error) is NotFiniteError
    assert engine.engine.collective_rpc("midstream_runs", args=("list",)) == [[]]
    assert answers(engine) == before


def infinite_hidden(model: Any) -> None:
    model.layers_output[2][:] = float("inf")


def one_nan_in_a_module(model: Any) -> None:
    model.model.layers[3].mlp.output[1, 7] = float("nan")


def overflow_by_doubling(model: Any) -> None:
    for _ in range(2):
        model.mlps_output[4] *= 1e38 + 0 * model.mlps_output[4].mean()  # in the forward


TRACES = [
    (infinite_hidden, "resid_post of layer 2 (model.layers_output[2]), position 0"),
    (one_nan_in_a_module, "to model.model.layers[3].mlp.output, position 1"),
    (overflow_by_doubling, "mlp_out of layer 4 (model.mlps_output[4]), position 0"),
]


@pytest.mark.parametrize(("body", "where"), TRACES)
def test_a_trace_that_overflows_ends_its_request_and_harms_nobody(
    engine: VLLM, body: Callable[[Any], None], where: str
) -> None:
    before = answers(engine)
    error = failure(lambda: engine.run(body, FRANCE, max_tokens=3, **GREEDY))
    assert type(error) is NotFiniteError and isinstance(error, TraceError)
    assert where in str(error)
    assert answers(engine) == before


def test_a_trace_in_later_steps_keeps_what_it_saved(engine: VLLM) -> None:
    before = answers(engine)
    with pytest.raises(NotFiniteError, match=r"resid_post of layer 2.* position 6"):
        with engine.trace(FRANCE, max_tokens=6, **GREEDY) as tracer:
            seen = [].save()
            for step in tracer.iter[:]:
                if step == 2:
                    engine.layers_output[2][:] = float("inf")
                seen.append(engine.logits.argmax())
    assert 2 <= len(seen) <= 3
    assert answers(engine) == before


def test_a_trace_that_also_writes_positions_ends_by_itself(engine: VLLM) -> None:
    """They have one axis alone. The engine goes on."""

    def body(model: Any) -> None:
        model.model.layers[1].input[:] += 0
        model.layers_output[2][:] = float("inf")

    before = answers(engine)
    assert isinstance(failure(lambda: engine.run(body, FRANCE, max_tokens=2, **GREEDY)), NotFiniteError)
    assert answers(engine) == before


def test_a_request_whose_trace_is_done_is_still_looked_at(engine: VLLM) -> None:
    """A trace poisons keys alone, so that the prompt's rows stay finite, and is over. What is generated from them is not."""

    def body(model: Any) -> None:
        model.attentions_input[3][:2] = float("inf")
        after = model.layers_output[3]
        after[:] = torch.zeros_like(after)

    before = answers(engine)
    assert isinstance(failure(lambda: engine.run(body, EIFFEL, max_tokens=4, **GREEDY)), NotFiniteError)
    assert answers(engine) == before


def test_infinite_logits_are_a_traces_own_business(engine: VLLM) -> None:
    """Masking a token is what they are written for."""

    def mask(model: Any) -> Any:
        best = model.logits.argmax()
        model.logits[:, best] = -float("inf")
        return save(best), save(model.samples)

    best, sample = engine.run(mask, FRANCE, max_tokens=1, **GREEDY)
    assert best.item() != sample.item()


def test_an_edit_left_on_the_model_ends_what_it_overflows(engine: VLLM) -> None:
    before = answers(engine)
    with engine.edit("broken", inplace=True):
        engine.layers_output[2][:] = float("nan")
    try:
        with pytest.raises(MidstreamError):
            engine.generate(FRANCE, max_tokens=3, **GREEDY)
    finally:
        engine.clear_edits()
    assert answers(engine) == before


def test_large_is_not_infinite(model: VLLM | LanguageModel) -> None:
    """Both backends run what stays finite, and say the same of what does not."""
    (output,) = model.generate(FRANCE, plan=Steer("resid_post", layers=2, vector=HUGE / 1e20), max_tokens=2, **GREEDY)
    assert output.outputs[0].token_ids
    error = failure(
        lambda: model.generate(
            FRANCE, plan=Steer("resid_post", layers=2, vector=HUGE, scale=1e38), max_tokens=2, **GREEDY
        )
    )
    assert type(error) is NotFiniteError and "resid_post of layer 2, position 0" in str(error)


# ------------------------------------------------------------------------------------- aborted, preempted, half precision


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_aborted_and_preempted_requests_leave_nothing(dtype: str) -> None:
    """Float16 overflows at 65,504. The cache has room for three requests: others are preempted, and blocks change hands at once."""
    asyncio.run(_abort_and_preempt(dtype))


async def _abort_and_preempt(dtype: str) -> None:
    from engines import start
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    scale = 1e5 if dtype == "float16" else 1e38
    plan = Steer("resid_post", layers=2, vector=HUGE / 1e38 if dtype == "float16" else HUGE, scale=scale)
    model = start(
        mode="async",
        dtype=dtype,
        enforce_eager=True,
        max_num_batched_tokens=32,
        block_size=32,
        max_model_len=256,
        num_gpu_blocks_override=10,
        max_num_seqs=8,
    )
    params = SamplingParams(
        max_tokens=40, output_kind=RequestOutputKind.FINAL_ONLY, temperature=0.0, ignore_eos=True, logprobs=3
    )
    async with model:

        async def plain(prompt: str, name: str) -> Any:
            async for output in model.engine.generate(prompt, params, name):
                last = output
            return values(last)

        async def overflowing(number: int, abort: bool) -> None:
            stream = model.generate(EIFFEL * 3, plan=plan, max_tokens=20, **GREEDY)
            task = asyncio.ensure_future(_finish(stream))
            if abort:
                await asyncio.sleep(0.002 * number)
                task.cancel()
            with pytest.raises((NotFiniteError, asyncio.CancelledError)):
                await task

        alone = [await plain(prompt, f"alone {i}") for i, prompt in enumerate(PLAIN[:4])]
        for round_number in range(4):
            attackers = [overflowing(n, abort=n % 2 == 1) for n in range(6)]
            neighbours = [plain(prompt, f"{round_number} {i}") for i, prompt in enumerate(PLAIN[:4])]
            results = await asyncio.gather(*attackers, *neighbours)
            assert results[6:] == alone, round_number
        assert [await plain(prompt, f"after {i}") for i, prompt in enumerate(PLAIN[:4])] == alone


async def _finish(stream: Any) -> Any:
    return await stream
