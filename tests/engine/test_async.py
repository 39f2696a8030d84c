"""`mode="async"`: rows A3, A4 and F1, and design section 6 (every invoke is submitted; saves stream with the outputs).

One engine, and one event loop that all tests take turns on: an AsyncLLM belongs to the loop that it was first used in.
Rows D4, D5, E4, F7, F9, H1, H7, I1, K6.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engines import left as gauges_left
from engines import start
from oracle import Plain, close

from midstream import Capture, Steer, open_captures
from midstream.errors import EngineClosedError, InterventionError, InterventionErrorGroup, MidstreamError, TraceError
from midstream.vllm import stream as vllm_stream

if TYPE_CHECKING:
    from midstream import VLLM, LanguageModel

pytestmark = pytest.mark.engine

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
GREEDY = {"temperature": 0.0, "ignore_eos": True}

Drive = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(runner: asyncio.Runner) -> Iterator[VLLM]:
    model = start(mode="async", enforce_eager=True)
    yield model
    model.close()


@pytest.fixture
def drive(model: VLLM, runner: asyncio.Runner) -> Iterator[Drive]:
    """Runs a coroutine on the engine's loop, and looks afterwards that the workers hold nothing of it."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return runner.run(asyncio.wait_for(coroutine, 120))

    yield run
    if model.is_open:
        assert not run(left(model))


async def left(model: VLLM, seconds: float = 30.0) -> list[dict[str, int]]:
    """What is alive on the workers, once it has had time to end."""
    deadline = time.monotonic() + seconds
    while True:
        gauges = [gauges_left(worker) for worker in await model.gauges()]
        if not any(gauges) or time.monotonic() > deadline:
            return [g for g in gauges if g]
        await asyncio.sleep(0.02)


async def steps(model: VLLM) -> int:
    return (await model.gauges())[0]["traced_steps"]


def counting(model: VLLM, prompt: str, max_tokens: int) -> Any:
    """A trace that saves its steps' numbers as they come."""
    with model.trace(prompt, max_tokens=max_tokens, **GREEDY) as tracer:
        seen = list().save()
        for step in tracer.iter[:]:
            model.layers_output[3] += 0.0
            seen.append(step)
    return tracer.backend


async def a_clean_trace_runs(model: VLLM, plain: Plain) -> None:
    with model.trace(FRANCE, temperature=0.0) as tracer:
        hidden = model.layers_output[3].save()  # noqa: F841
    output = await tracer.backend
    close(output.saves["hidden"], plain.run(FRANCE).sites["resid_post", 3])


# Sweeps (rows H1 and H7).

PAIR = (FRANCE, "The capital of Italy is", " Paris", " Rome")


def test_a_sweep_has_the_cells_that_transformers_have(model: VLLM, drive: Drive, hf: LanguageModel) -> None:
    async def swept() -> Any:
        result = await model.sweep(*PAIR, sites=["resid_post", "mlp_out"])
        cells = [cell async for cell in model.sweep(*PAIR, stream=True)]
        return result, cells

    result, cells = drive(swept())
    for site, values in hf.sweep(*PAIR, sites=["resid_post", "mlp_out"]).values.items():
        np.testing.assert_allclose(result.values[site], values, rtol=1e-3, atol=2e-3)
    assert len(cells) == 40


def test_path_patching_has_the_values_that_transformers_have(model: VLLM, drive: Drive, hf: LanguageModel) -> None:
    """N8: to the logits, and by way of a head, of which each cell takes two requests."""

    async def patched(options: dict[str, Any]) -> Any:
        return await model.path_patching(*PAIR, **options)

    for options in ({}, {"receivers": (5, 3)}):
        result = drive(patched(options))
        expected = hf.path_patching(*PAIR, **options)
        np.testing.assert_allclose(result.values["attn_z"], expected.values["attn_z"], rtol=1e-3, atol=2e-3)
        assert not result.void


@pytest.mark.parametrize("call", ["sweep", "path_patching"])
def test_a_cancelled_sweep_lets_go_of_its_sources(model: VLLM, drive: Drive, call: str) -> None:
    """Seen failing without `SweepRun._delete_runs`."""
    options = {"receivers": (5, 3)} if call == "path_patching" else {}

    async def cancelled() -> Any:
        pairs = [[each] * 20 for each in PAIR[:2]]
        task = asyncio.ensure_future(getattr(model, call)(*pairs, " Paris", " Rome", **options))
        while not model.runs.handles:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left(model)
        return await model.runs.listing()

    assert not drive(cancelled())


# Every invoke is submitted (A4), and saves stream (F1).


def test_every_invoke_is_submitted_and_a_shared_list_is_merged(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(max_tokens=4, **GREEDY) as tracer:
            ids = list().save()
            with tracer.invoke(FRANCE):
                for step in tracer.iter[:]:
                    ids.append(("france", step, model.samples.item()))
            with tracer.invoke(EIFFEL):
                own = model.layers_output[3].save()  # noqa: F841
                for step in tracer.iter[:]:
                    ids.append(("eiffel", step, model.samples.item()))
        outputs = [output async for output in tracer.backend]
        finished = [output for output in outputs if output.finished]
        assert len(finished) == 2 and len({output.request_id for output in finished}) == 2
        expected = {"france": plain.generate(FRANCE, 4), "eiffel": plain.generate(EIFFEL, 4)}
        union = {(name, step, token) for name, tokens in expected.items() for step, token in enumerate(tokens)}
        assert set(finished[-1].saves["ids"]) == union and len(finished[-1].saves["ids"]) == 8
        assert [list(output.outputs[0].token_ids) for output in tracer.outputs] == [*expected.values()]
        close(tracer.outputs[1].saves["own"], plain.run(EIFFEL).sites["resid_post", 3])
        assert "own" not in tracer.outputs[0].saves

    drive(main())


def test_saves_stream_with_the_outputs(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(FRANCE, max_tokens=16, **GREEDY) as tracer:
            hidden = model.layers_output[3].save()  # noqa: F841
            ids = list().save()
            for _ in tracer.iter[:]:
                time.sleep(0.03)  # in the worker: the outputs come one by one
                ids.append(model.samples.item())
        outputs = [output async for output in tracer.backend]
        *streamed, last = outputs
        assert last.finished and last.saves["ids"] == list(last.outputs[0].token_ids) == plain.generate(FRANCE, 16)
        with_saves = [output for output in streamed if output.saves]
        lengths = [len(output.saves["ids"]) for output in with_saves]
        assert lengths == sorted(lengths) and len(set(lengths)) > 3 and lengths[-1] < 16, lengths
        expected = plain.run(FRANCE).sites["resid_post", 3]
        for output in with_saves:
            assert last.saves["ids"][: len(output.saves["ids"])] == output.saves["ids"]
            close(output.saves["hidden"], expected)
        sent = {output.saves["hidden"].data_ptr() for output in with_saves}
        assert len(sent) == 1  # an unchanged tensor travels once

    drive(main())


def test_what_changes_in_place_after_its_save_is_exact_in_the_end(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(FRANCE, max_tokens=6, **GREEDY) as tracer:
            total = torch.zeros(model.hidden_size).save()
            each = list().save()
            for _ in tracer.iter[:]:
                hidden = model.layers_output[3][-1]
                total += hidden
                each.append(hidden.clone())
        output = await tracer.backend
        ids = plain.ids(FRANCE)
        whole = plain.run(ids + plain.generate(FRANCE, 6)[:-1]).sites["resid_post", 3]
        close(output.saves["total"], whole[len(ids) - 1 :].sum(0))
        close(torch.stack(output.saves["each"]), whole[len(ids) - 1 :])

    drive(main())


def test_n_samples_stream_one_by_one_and_finish_together(model: VLLM, drive: Drive) -> None:
    async def main() -> None:
        with model.trace(FRANCE, max_tokens=5, n=3, seed=1, temperature=1.5, ignore_eos=True) as tracer:
            ids = list().save()
            for _ in tracer.iter[:]:
                ids.append(model.samples.item())
        outputs = [output async for output in tracer.backend]
        assert [output.finished for output in outputs].count(True) == 1
        samples = [list(sample.token_ids) for sample in outputs[-1].outputs]
        assert [saves["ids"] for saves in outputs[-1].saves] == samples and len(samples) == 3
        assert len(set(map(tuple, samples))) > 1

    drive(main())


def test_run_is_awaited_for_its_value(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        close(await model.run(lambda m: m.layers_output[3], FRANCE), plain.run(FRANCE).sites["resid_post", 3])
        both = await asyncio.gather(*(model.run(lambda m: m.layers_output[5], prompt) for prompt in (FRANCE, EIFFEL)))
        several = await model.run(lambda m: m.layers_output[5], [FRANCE, EIFFEL])
        for one, other, prompt in zip(both, several, (FRANCE, EIFFEL), strict=True):
            close(one, plain.run(prompt).sites["resid_post", 5])
            close(other, plain.run(prompt).sites["resid_post", 5])
        with pytest.raises(ZeroDivisionError):
            await model.run(lambda m: 1 / 0, FRANCE)

    drive(main())


def test_generate_is_awaited_or_iterated_over(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        before = await steps(model)
        outputs = await model.generate([FRANCE, EIFFEL], max_tokens=4, **GREEDY)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [plain.generate(p, 4) for p in (FRANCE, EIFFEL)]
        streamed = [output async for output in model.generate(FRANCE, max_tokens=4, **GREEDY)]
        assert [output.finished for output in streamed].count(True) == 1 and streamed[-1].finished
        assert await steps(model) == before

    drive(main())


def test_collect_is_awaited_and_runs_what_is_missing(
    model: VLLM, drive: Drive, plain: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, plan = [[1, 5, 17], [1, 33, 60, 91], [1, 120]], Capture("resid_post", layers=3)

    async def main() -> None:
        assert len(await model.collect(prompts[:1], plan=plan, to=tmp_path)) == 1
        store = await model.collect(prompts, plan=plan, to=tmp_path)
        assert sorted(capture.prompt_token_ids for capture in store.values()) == sorted(prompts)
        for capture in store.values():
            close(capture["resid_post", 3], plain.run(capture.prompt_token_ids).sites["resid_post", 3][-1:])

    drive(main())
    assert f"1 of 3 prompts are in {tmp_path} already" in caplog.text


# Errors (A3).


def test_an_error_comes_after_the_outputs_of_the_others(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(max_tokens=4, **GREEDY) as tracer:
            with tracer.invoke(FRANCE):
                kept = model.layers_output[2].save()  # noqa: F841
                raise ValueError("on purpose")
            with tracer.invoke(EIFFEL):
                other = model.layers_output[2].save()  # noqa: F841
        finished = []
        with pytest.raises(InterventionError, match="on purpose") as caught:
            async for output in tracer.backend:
                finished += [output] if output.finished else []
        assert isinstance(caught.value, ValueError)
        assert "test_async.py" in str(caught.value) and 'raise ValueError("on purpose")' in str(caught.value)
        close(caught.value.saves["kept"], plain.run(FRANCE).sites["resid_post", 2])
        (output,) = finished
        assert list(output.outputs[0].token_ids) == plain.generate(EIFFEL, 4)
        close(output.saves["other"], plain.run(EIFFEL).sites["resid_post", 2])
        await a_clean_trace_runs(model, plain)

    drive(main())


def test_several_errors_come_as_a_group(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(max_tokens=2, **GREEDY) as tracer:
            with tracer.invoke(FRANCE):
                1 / 0
            with tracer.invoke(EIFFEL):
                {}["no such key"]
        with pytest.raises(InterventionErrorGroup) as caught:
            await tracer.backend
        zero, key = sorted(caught.value.exceptions, key=lambda error: isinstance(error, KeyError))
        assert isinstance(zero, ZeroDivisionError) and isinstance(key, KeyError)
        await a_clean_trace_runs(model, plain)

    drive(main())


def test_outputs_come_by_once(model: VLLM, drive: Drive) -> None:
    async def main() -> None:
        stream = counting(model, FRANCE, 2)
        await stream
        with pytest.raises(TraceError, match="once"):
            await stream

    drive(main())


# What is left early is aborted.


async def unfinished(model: VLLM) -> int:
    return model.engine.output_processor.get_num_unfinished_requests()


def test_leaving_the_loop_early_aborts_the_rest(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(max_tokens=400, **GREEDY) as tracer:
            with tracer.invoke(FRANCE):
                for _ in tracer.iter[:]:
                    model.layers_output[3] *= 1 + 0 * model.layers_output[3].mean()  # in the forward
            with tracer.invoke(EIFFEL):
                for _ in tracer.iter[:]:
                    model.layers_output[3] *= 1 + 0 * model.layers_output[3].mean()  # in the forward
        before = await steps(model)
        async for output in tracer.backend:
            if len(output.outputs[0].token_ids) > 5:
                break
        assert not await left(model)
        assert await unfinished(model) == 0
        assert 5 < await steps(model) - before < 200
        await a_clean_trace_runs(model, plain)

    drive(main())


def test_cancelling_the_task_aborts_it(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        before = await steps(model)
        task = asyncio.create_task(whole(counting(model, FRANCE, 400)))
        while await steps(model) < before + 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await left(model)
        assert await unfinished(model) == 0
        assert await steps(model) - before < 300
        await a_clean_trace_runs(model, plain)

    async def whole(stream: Any) -> None:
        await stream

    drive(main())


def test_aborting_before_a_request_has_begun_leaves_nothing(model: VLLM, drive: Drive, plain: Plain) -> None:
    async def main() -> None:
        with model.trace(max_tokens=200, **GREEDY) as tracer:  # more than the engine takes at once: some still wait
            for _ in range(24):
                with tracer.invoke(FRANCE):
                    for _ in tracer.iter[:]:
                        model.layers_output[3] += 0.0
        async for _ in tracer.backend:
            break
        assert not await left(model)
        await a_clean_trace_runs(model, plain)

    drive(main())


# Others on the engine.


@pytest.mark.parametrize("kind", ["FINAL_ONLY", "CUMULATIVE", "DELTA"])
def test_answers_come_with_the_first_output(model: VLLM, drive: Drive, plain: Plain, kind: str) -> None:
    """With DELTA vLLM hands on each token's log-probabilities once."""
    from vllm.sampling_params import RequestOutputKind

    answers = [" Paris", 0, 900]

    async def main() -> list[Any]:
        stream = model.generate(FRANCE, answers=answers, max_tokens=4, output_kind=RequestOutputKind[kind], **GREEDY)
        return [output.answers async for output in stream]

    seen = drive(main())
    expected = plain.run(FRANCE).logits[-1].log_softmax(-1)[[plain.token(" Paris"), 0, 900]]
    assert len(seen) > (kind != "FINAL_ONLY") and all(each == seen[0] for each in seen)
    torch.testing.assert_close(torch.tensor(list(seen[0].values())), expected, rtol=1e-4, atol=1e-4)


def test_a_missing_space_is_warned_of_when_the_outputs_are_there(model: VLLM, drive: Drive) -> None:
    async def main(is_iterated: bool) -> None:
        stream = model.generate([EIFFEL, FRANCE], answers=[[" London"], ["Paris"]], max_tokens=2, **GREEDY)
        with pytest.warns(UserWarning, match="answers has 'Paris'. After prompt 1 the token ' Paris' is"):
            if is_iterated:
                assert [set(output.answers) async for output in stream if output.finished]
            else:
                await stream

    for is_iterated in (False, True):
        drive(main(is_iterated))


async def written(directory: Path, seconds: float = 60.0) -> None:
    """Until there are captures, which the workers write when they hear of the request's end."""
    deadline = time.monotonic() + seconds
    while not list(directory.glob("index-*.jsonl")) or not len(open_captures(directory)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_rows_of_streaming_input_come_over_its_re_adds(model: VLLM, drive: Drive, plain: Plain, tmp_path: Path) -> None:
    """vLLM keeps the generated tokens that it has computed, and goes on with the next part of the prompt behind them."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    first, second = plain.ids(FRANCE), plain.ids(EIFFEL)
    vector = torch.linspace(-1, 1, 256)
    plan = [
        Steer("resid_post", layers=2, vector=vector),
        Capture("resid_post", layers=[2, 6], positions="all", when="after", to=str(tmp_path)),
    ]
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA, extra_args={"midstream": plan}, **GREEDY)

    async def parts() -> AsyncIterator[Any]:
        for ids in (first, second):
            yield StreamingInput({"prompt_token_ids": list(ids)})  # vLLM adds to the list

    async def main() -> list[int]:
        stream = model.engine.generate(parts(), params, "session")
        return [token async for output in stream for token in output.outputs[0].token_ids]

    generated = drive(main())
    assert len(generated) == 6
    sequence = [*first, *generated[:2], *second, *generated[3:5]]  # the last token of each part is never fed back
    ran = plain.run(sequence, {("resid_post", 2): lambda h_TH: h_TH + vector})
    drive(written(tmp_path))
    (captured,) = [open_captures(tmp_path)[name] for name in open_captures(tmp_path)]
    for layer in (2, 6):
        assert captured.positions["resid_post", layer] == list(range(len(sequence)))
        close(captured["resid_post", layer], ran.sites["resid_post", layer])
    assert generated[3:] == ran.logits[len(sequence) - 3 :].argmax(-1).tolist()


# The end. The last tests: they leave the engine closed.


def test_a_slow_function_holds_up_no_other_requests_rows(
    model: VLLM, drive: Drive, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing with four threads for all sinks: the rows of the other had come, and were said to be missing."""
    monkeypatch.setattr(vllm_stream, "RESULT_SECONDS", 3.0)

    def slow(*_: Any) -> None:
        time.sleep(0.05)

    async def both() -> Any:
        behind = [
            asyncio.ensure_future(
                model.generate(FRANCE, plan=Capture("resid_post", to=slow), max_tokens=1)._to_the_end()
            )
            for _ in range(12)
        ]
        await asyncio.sleep(0.3)
        (output,) = await model.generate(EIFFEL, plan=Capture("resid_post", layers=3, to=tmp_path), max_tokens=1)
        waiting = sum(not each.done() for each in behind)
        await asyncio.gather(*behind)
        return output, waiting

    output, waiting = drive(both())
    assert waiting > 4
    close(open_captures(tmp_path)[output.request_id]["resid_post", 3], plain.run(EIFFEL).sites["resid_post", 3][-1:])


def test_awaited_functions_are_kept_and_streams_show_what_is_saved_so_far(model: VLLM, drive: Drive) -> None:
    """Saved values of a stream come with its outputs, so the engine runs the code. Seen failing with streams that are kept, too."""

    def every_step(model: Any, tracer: Any) -> Any:
        return [model.layers_output[5][-1] for _ in tracer.iter[:]]

    async def check() -> None:
        before = (await model.gauges())[0]["traced_steps"]
        alone = await model.run(every_step, FRANCE, max_tokens=4, **GREEDY)
        assert (await model.gauges())[0]["traced_steps"] == before
        with model.trace(FRANCE, max_tokens=4, **GREEDY) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(model.layers_output[5][-1].save())
        seen = [len(output.saves.get("rows", ())) async for output in tracer.backend]
        assert seen[-1] == 4 and any(0 < count < 4 for count in seen)
        assert torch.equal(torch.stack(tracer.outputs[0].saves["rows"]), torch.stack(alone))
        assert (await model.gauges())[0]["traced_steps"] > before

    drive(check())


def test_a_function_that_is_kept_sees_its_variables_as_they_were(model: VLLM, drive: Drive) -> None:
    """Its code runs when the request has ended. Seen failing where the caller's own function runs, and not a copy of it."""
    layer = 1

    def read(model: Any) -> Any:
        return model.layers_output[layer]

    async def check() -> None:
        nonlocal layer
        early = model.run(read, FRANCE)
        layer = 4
        late = await model.run(read, FRANCE)
        with model.trace(FRANCE) as tracer:
            expected = [model.layers_output[1].save(), model.layers_output[4].save()].save()  # noqa: F841
        (output,) = [output async for output in tracer.backend]
        for mine, theirs in zip((await early, late), output.saves["expected"], strict=True):
            torch.testing.assert_close(mine, theirs)

    drive(check())


def test_another_event_loop_is_refused(model: VLLM, drive: Drive) -> None:
    with pytest.raises(MidstreamError, match="event loop"):
        asyncio.run(model.start())


def test_closing_wakes_whoever_waits(model: VLLM, drive: Drive) -> None:
    async def main() -> None:
        task = asyncio.create_task(whole(counting(model, FRANCE, 400)))
        while not (await model.gauges())[0]["requests"]:
            await asyncio.sleep(0.01)
        model.close()
        model.close()
        with pytest.raises(EngineClosedError):
            await task
        with pytest.raises(EngineClosedError):
            await counting_again()

    async def whole(stream: Any) -> None:
        await stream

    async def counting_again() -> None:
        with model.trace(FRANCE) as tracer:
            pass
        await tracer.backend

    drive(main())
