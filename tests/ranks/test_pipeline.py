"""Traces over two pipeline stages (requirements C1 to C11, C14). The first stage has layers 0 to 3 of the bundled model, the second 4 to 7.

What is expected comes from plain transformers with torch hooks, where there are no stages. Rows C13, L3.
"""

from __future__ import annotations

import collections
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from engines import alive
from forked import start_ranks
from limits import assert_flat, least
from oracle import Plain, close

from midstream import VLLM, Capture, Steer, save
from midstream.errors import (
    MidstreamError,
    NeverReachedError,
    OutOfOrderError,
    ShapeError,
    TraceError,
    UnknownModuleError,
)
from midstream.runtime.request import SMALL
from midstream.trace.body import current_body

pytestmark = pytest.mark.engine

EIFFEL = "The Eiffel Tower is in the city of"
PARIS = "The capital of France is"
EARLY, LATE = 1, 6  # a layer of each stage
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# What is run of midstream in a step without traces and plans.
PLAIN_STEP = {
    "Worker.execute_model",
    "is_ours",
    "create_forward_context",
    "Worker.sample_tokens",
    "sparing_generators.<locals>.sample_tokens",  # mends vLLM's CPU build
}
Pair = collections.namedtuple("Pair", ["early", "late"])


class LoadsOnTheFirstStageAlone:
    """A value of the user's that cannot be unpickled on the second stage."""

    def __init__(self) -> None:
        self.by = None

    def __setstate__(self, state: Any) -> None:
        from vllm.distributed import get_pp_group

        if not get_pp_group().is_first_rank:
            raise RuntimeError("not here")


@pytest.fixture(scope="module")
def pp2() -> Iterator[VLLM]:
    with start_ranks(pipeline_parallel_size=2, worker_extension_cls="seen_worker.SeenWorker") as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left_on_stages(pp2: VLLM) -> Iterator[None]:
    """C10: after every test both stages are clean, and what one has for the other is forgotten."""
    yield
    left = alive(pp2)
    assert not left, left


def test_every_site_of_every_layer_is_read(pp2: VLLM, plain: Plain) -> None:
    def read(model: Any) -> Any:
        sites = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        seen = {(site, i): getattr(model, site)[i] for i in range(model.num_layers) for site in sites}
        return seen, model.final_norm, model.logits

    seen, norm, logits = pp2.run(read, EIFFEL, **GREEDY)
    expected = plain.run(EIFFEL)
    assert len(seen) == 40
    for site, value in seen.items():
        close(value, expected.sites[site])
    close(norm, expected.sites["final_norm"])
    close(logits, expected.logits[-1:])
    assert all(torch.equal(seen["resid_post", i], seen["resid_pre", i + 1]) for i in range(7))


@pytest.mark.parametrize(("early", "late"), [(1, 3), (4, 6), (EARLY, LATE)], ids=["first", "second", "both stages"])
def test_an_earlier_value_of_the_same_stage_is_a_plan(pp2: VLLM, plain: Plain, early: int, late: int) -> None:
    """Of another stage it stays in the forward."""
    seen: dict[str, torch.Tensor] = {}

    def body(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            value = model.layers_output[early]
            model.layers_output[late] += 3 * value

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        seen["early"] = hidden
        return hidden

    text = pp2.explain(body)
    assert ("no code runs in the engine" in text) == (late - early == 2), text
    with pp2.trace(EIFFEL, max_tokens=4, **GREEDY) as tracer:
        body(pp2, tracer)
    edits: dict[Any, Any] = {("resid_post", early): keep, ("resid_post", late): lambda h: h + 3 * seen["early"]}
    (output,) = tracer.outputs
    assert list(output.outputs[0].token_ids) == plain.generate(EIFFEL, 4, edits)


def test_a_late_value_moves_an_early_layer_a_step_later(pp2: VLLM, plain: Plain) -> None:
    """Every step of a generation, with the sampled tokens read as numbers on both stages."""
    with pp2.trace(EIFFEL, max_tokens=5, **GREEDY) as tracer:
        ids, moved, late = list().save(), list().save(), None
        for _ in tracer.iter[:]:
            if late is not None:
                pp2.layers_output[EARLY] += 0.3 * late[-1]
            moved.append(pp2.layers_output[EARLY][-1])
            late = pp2.layers_output[LATE]
            ids.append(pp2.samples.item())
    prompt = plain.ids(EIFFEL)
    assert ids == list(tracer.result.outputs[0].token_ids)
    shifts: list[torch.Tensor] = []

    def shift(hidden: torch.Tensor) -> torch.Tensor:
        for step, value in enumerate(shifts):
            hidden[len(prompt) + step] += 0.3 * value
        return hidden

    for step in range(5):
        ran = plain.run([*prompt, *ids[:step]], {("resid_post", EARLY): shift})
        close(moved[step], ran.sites["resid_post", EARLY][-1])
        assert ids[step] == int(ran.logits[-1].argmax())
        shifts.append(ran.sites["resid_post", LATE][-1])


def test_a_lens_over_all_layers_uses_values_of_both_stages(pp2: VLLM, plain: Plain) -> None:
    """Numbers of every layer are used on both stages; the final norm and the unembedding are on the last one alone."""

    def lens(model: Any) -> Any:
        hidden = [model.layers_output[i] for i in range(model.num_layers)]
        tops = [model.project_on_vocab(each[-1:]).argmax(-1).item() for each in hidden]
        return [each.norm().item() for each in hidden], tops

    norms, tops = pp2.run(lens, EIFFEL, **GREEDY)
    sites = plain.run(EIFFEL).sites
    expected = [sites["resid_post", i] for i in range(8)]
    assert norms == pytest.approx([float(hidden.norm()) for hidden in expected], rel=1e-4)
    with torch.no_grad():
        logits = [plain.model.lm_head(plain.model.model.norm(hidden[-1:])) for hidden in expected]
    assert tops == [int(each.argmax()) for each in logits]

    def too_soon(model: Any) -> Any:
        top = model.project_on_vocab(model.layers_output[0][-1:]).argmax(-1).item()
        return top, model.layers_output[EARLY]

    with pytest.raises(OutOfOrderError, match="can be used after the forward reaches that stage"):
        pp2.run(too_soon, EIFFEL, **GREEDY)


def test_every_real_use_of_a_value_of_another_stage(pp2: VLLM, plain: Plain) -> None:
    """What the last stage, which fetches, makes of an early layer is what the first one makes of its own and transformers of theirs."""

    def use(model: Any) -> Any:
        layer = model.model.layers[EARLY]
        hidden, residual = layer.output
        whole = model.layers_output[EARLY]
        stage = "first" if isinstance(whole, torch.Tensor) else "last"
        model.layers_output[LATE]
        used = {
            "comparison": (whole > 0.5).sum().item(),
            "if": "positive" if whole.sum() > 0 else "not",
            "bool": [bool(layer.mlp.gate_up_proj.skip_bias_add), bool(layer.mlp.down_proj.input_is_parallel)],
            "len": len(whole),
            "iteration": [row.norm().item() for row in whole],
            "unpacking": (hidden + residual).norm().item(),
            "tuple": [row.norm().item() for row in tuple(whole[1:])],
            "method": whole.mean(0).tolist(),
            "item": whole[2, 3].item(),
        }
        return {stage: used}

    value = plain.run(EIFFEL).sites["resid_post", EARLY]
    expected = {
        "comparison": int((value > 0.5).sum()),
        "if": "positive" if float(value.sum()) > 0 else "not",
        "bool": [False, True],
        "len": len(plain.ids(EIFFEL)),
        "iteration": value.norm(dim=-1).tolist(),
        "unpacking": float(value.norm()),
        "tuple": value[1:].norm(dim=-1).tolist(),
        "method": value.mean(0).tolist(),
        "item": float(value[2, 3]),
    }
    found = pp2.run(use, EIFFEL, **GREEDY)
    assert set(found) == {"first", "last"}
    for used in found.values():
        assert {name: used[name] for name in ("comparison", "if", "bool", "len")} == {
            name: expected[name] for name in ("comparison", "if", "bool", "len")
        }
        for name in ("iteration", "unpacking", "tuple", "method", "item"):
            assert used[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def test_a_value_of_another_stage_is_a_key_by_identity(pp2: VLLM) -> None:
    """It is not fetched for that: the value here is one that cannot be."""
    assert sorted(pp2.engine.collective_rpc("plant", args=(f"model.layers.{EARLY}.mlp",))) == [0, 1]

    def hold(model: Any) -> Any:
        one, other = model.model.layers[EARLY].mlp.planted, model.model.layers[EARLY].mlp.planted
        names = {one: "one"}
        is_here = type(one).__name__ == "lock"
        return {"first" if is_here else "last": [names[one], is_here or hash(one) == id(one), other in names]}

    assert pp2.run(hold, EIFFEL, **GREEDY) == {"first": ["one", True, True], "last": ["one", True, False]}


def test_a_tensors_method_on_a_tuple_says_to_index_first(pp2: VLLM, plain: Plain) -> None:
    for layer, stage in ((EARLY, 1), (LATE, 0)):
        worker = pp2.engine.collective_rpc("process")[stage]["pid"]

        def mean(model: Any, layer: int = layer, worker: int = worker) -> Any:
            output = model.model.layers[layer].output
            return output.mean(0) if os.getpid() == worker else output[0]

        with pytest.raises(
            TraceError, match=rf"tuple of 2, .*index first, as in `model.model.layers\[{layer}\].output\[0\].mean`"
        ):
            pp2.run(mean, EIFFEL, **GREEDY)
    logits = pp2.run(lambda model: model.logits, EIFFEL, **GREEDY)
    close(logits, plain.run(EIFFEL).logits[-1:])


def test_order_is_that_of_the_whole_model(pp2: VLLM) -> None:
    """Within a second, the best of three, with both points named; the next trace works."""

    def late_before_early(model: Any) -> Any:
        hidden = model.layers_output[LATE]
        model.layers_output[EARLY] = hidden
        return hidden

    def early_twice(model: Any) -> Any:
        model.layers_output[3].sum().item()
        return model.layers_output[EARLY]

    def late_twice(model: Any) -> Any:
        model.layers_output[7].sum().item()
        return model.layers_output[4]

    def after_logits(model: Any) -> Any:
        model.logits.sum().item()
        return model.layers_output[LATE]

    def seconds(wrong: Callable[[Any], Any], named: str) -> float:
        start = time.perf_counter()
        with pytest.raises(OutOfOrderError, match=named):
            pp2.run(wrong, EIFFEL, **GREEDY)
        return time.perf_counter() - start

    pp2.run(lambda model: model.logits, EIFFEL, **GREEDY)
    wrongs = {
        r"layers_output\[1\].*layers_output\[6\]": late_before_early,
        r"layers_output\[1\].*layers_output\[3\]": early_twice,
        r"layers_output\[4\].*layers_output\[7\]": late_twice,
        r"layers_output\[6\].*model\.logits": after_logits,
    }
    for named, wrong in wrongs.items():
        assert min(seconds(wrong, named) for _ in range(3)) < 1.0
    assert pp2.run(lambda model: model.logits, EIFFEL, **GREEDY).shape[0] == 1


def test_each_stage_tells_what_is_out_of_order(pp2: VLLM, plain: Plain) -> None:
    """By itself, in the prompt's step and in a later one: the body goes on and reads what is still to come."""
    workers = [process["pid"] for process in pp2.engine.collective_rpc("process")]
    wrongs = ((3, 0), (LATE, EARLY), (7, 4), (LATE, 4))

    def ask(model: Any, tracer: Any, first: int, then: int) -> Any:
        told: dict[Any, Any] = {}
        for step in tracer.iter[:]:
            if step in (0, 2):
                model.layers_output[first]
                try:
                    model.layers_output[then]
                except OutOfOrderError as error:
                    told[workers.index(os.getpid()), step] = f"layers_output[{then}] of" in str(error)
            told["logits", step] = model.logits
        return told

    for first, then in wrongs:
        told = pp2.run(lambda m, t, a=first, b=then: ask(m, t, a, b), EIFFEL, max_tokens=3, **GREEDY)
        assert [told.get((stage, step)) for stage in (0, 1) for step in (0, 2)] == [True] * 4, (first, then)
        close(told["logits", 0], plain.run(EIFFEL).logits[-1:])


def test_using_every_layer_has_no_stall(pp2: VLLM) -> None:
    """Every value is fetched by the stage that lacks it, when it is there: a poll every 100 ms would show, and 0.2 s for each trace."""

    def use_all(model: Any) -> Any:
        return torch.stack([model.layers_output[i].mean(0) for i in range(model.num_layers)])

    def save_all(model: Any) -> Any:
        return [model.layers_output[i] for i in range(model.num_layers)]

    def quickest(run: Callable[[], Any]) -> float:
        def seconds() -> float:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

        return min(seconds() for _ in range(10))

    def traced(function: Callable[[Any], Any]) -> float:
        return quickest(lambda: pp2.run(function, EIFFEL, **GREEDY))

    def stall() -> float:
        plainly = quickest(lambda: pp2.generate([EIFFEL], max_tokens=1, **GREEDY))
        saved, used = traced(save_all), traced(use_all)
        return max(saved - plainly, used - saved)

    traced(use_all)
    assert least(stall, 0.1) < 0.1


def test_what_is_fetched_has_its_type_and_shape(pp2: VLLM, plain: Plain) -> None:
    def look(model: Any) -> Any:
        ids = model.model.embed_tokens.input
        pair = model.model.layers[EARLY].output
        late = model.model.layers[LATE].mlp.gate_up_proj.output[0]
        return {
            "dtype": str(ids.dtype),
            "shape": tuple(ids.shape),
            "sum": int(ids.sum()),
            "pair": [tuple(part.shape) for part in pair],
            "late": (str(late.dtype), tuple(late.shape)),
            "token": (str(model.samples.dtype).removeprefix("torch."), model.samples.tolist()),
        }

    found = pp2.run(look, EIFFEL, **GREEDY)
    ids = plain.ids(EIFFEL)
    width = 2 * plain.model.config.intermediate_size
    assert (
        found["dtype"] in ("torch.int64", "torch.int32") and found["shape"] == (len(ids),) and found["sum"] == sum(ids)
    )
    assert found["pair"] == [(len(ids), 256)] * 2 and found["late"] == ("torch.float32", (len(ids), width))
    assert found["token"][0] in ("int64", "int32") and found["token"][1] == plain.generate(EIFFEL, 1)


def test_what_never_comes_is_an_error_where_it_is_used(pp2: VLLM) -> None:
    def never(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[[0, 7]]:
            last = model.layers_output[LATE].sum().item()
        return last

    with pytest.raises(NeverReachedError, match="step 7"):
        pp2.run(never, EIFFEL, max_tokens=3, **GREEDY)


def test_what_cannot_be_sent_is_an_error_where_it_is_used(pp2: VLLM, plain: Plain) -> None:
    """Where it lies it is used as anything; the trace may go on, and the engine does."""
    workers = [process["pid"] for process in pp2.engine.collective_rpc("process")]

    def use(model: Any, layer: int) -> Any:
        lock = model.model.layers[layer].mlp.planted
        return lock.locked()

    def go_on(model: Any, layer: int) -> Any:
        try:
            found = use(model, layer)
        except TraceError as error:
            found = str(error)
        return {workers.index(os.getpid()): found}

    for stage, layer in enumerate((EARLY, LATE)):
        pp2.engine.collective_rpc("plant", args=(f"model.layers.{layer}.mlp",))
        told = pp2.run(lambda m, layer=layer: go_on(m, layer), EIFFEL, max_tokens=3, **GREEDY)
        assert told[stage] is False and f"type lock lies on rank {stage} and cannot be brought here" in told[1 - stage]
        with pytest.raises(TraceError, match=r"type lock .* cannot be brought here"):
            pp2.run(lambda m, layer=layer: use(m, layer), EIFFEL, max_tokens=3, **GREEDY)
        logits = pp2.run(lambda model: model.logits, EIFFEL, **GREEDY)
        close(logits, plain.run(EIFFEL).logits[-1:])


def test_modules_of_another_stage_have_names_weights_and_calls(pp2: VLLM, plain: Plain) -> None:
    def look(model: Any) -> Any:
        rows = model.model.embed_tokens(torch.tensor([3, 5]))
        weight = model.model.norm.weight
        attention = model.model.layers[5].self_attn.o_proj.output[0]
        return len(model.model.layers), rows + 0, weight + 0, attention, repr(model.model.layers[5].self_attn)

    count, rows, weight, attention, text = pp2.run(look, EIFFEL, **GREEDY)
    assert count == 8 and "model.layers.5.self_attn: LlamaAttention" in text
    assert torch.equal(rows, plain.model.model.embed_tokens.weight[[3, 5]].detach())
    assert torch.equal(weight, plain.model.model.norm.weight.detach())
    close(attention, plain.run(EIFFEL).sites["attn_out", 5])
    assert "PPMissingLayer" not in repr(pp2) and "norm: RMSNorm" in repr(pp2)


def test_stages_have_the_layers_that_they_built(plain: Plain) -> None:
    """An uneven split: layers 2 and 3 are on the second stage."""
    with mock.patch.dict(os.environ, VLLM_PP_LAYER_PARTITION="2,6"), start_ranks(pipeline_parallel_size=2) as model:
        assert [each["stages"] for each in model.engine.collective_rpc("midstream_describe")] == [[0, 2]] * 2

        def change(model: Any) -> Any:
            for i in range(model.num_layers):
                model.layers_output[i] *= 1 + i / 10
            return model.logits

        def use(model: Any) -> Any:
            whole = [model.layers_output[i] for i in range(model.num_layers)]
            model.layers_output[7] += whole[0].mean(0) + whole[1] + whole[2] - whole[3]
            return whole, [hidden.norm().item() for hidden in whole], model.logits

        changed = model.run(change, EIFFEL, **GREEDY)
        whole, norms, used = model.run(use, EIFFEL, **GREEDY)
        with pytest.raises(OutOfOrderError, match=r"layers_output\[1\].*layers_output\[2\]"):
            model.run(lambda m: (m.layers_output[2], m.layers_output[1]), EIFFEL, **GREEDY)
        left = alive(model)
    assert not left, left
    edits = {("resid_post", i): lambda hidden, i=i: hidden * (1 + i / 10) for i in range(8)}
    close(changed, plain.run(EIFFEL, edits).logits[-1:])
    expected = plain.run(EIFFEL)
    h = [expected.sites["resid_post", i] for i in range(8)]
    for hidden, each in zip(whole[:7], h, strict=False):
        close(hidden, each)
    assert norms[:7] == pytest.approx([float(each.norm()) for each in h[:7]], rel=1e-4)
    late = {("resid_post", 7): lambda hidden: hidden + h[0].mean(0) + h[1] + h[2] - h[3]}
    close(used, plain.run(EIFFEL, late).logits[-1:])


def test_saves_of_both_stages_are_one(pp2: VLLM, plain: Plain) -> None:
    with pp2.trace(EIFFEL, max_tokens=3, **GREEDY) as tracer:
        kept, named = list().save(), dict().save()
        for step in tracer.iter[:]:
            pair = Pair(pp2.layers_output[EARLY][-1], pp2.layers_output[LATE][-1])
            kept.append(pair)
            named[step] = {"late": pair.late, "both": [pair.early, pair.late], "step": step}
        cache = pp2.layers_output  # noqa: F841 (a name that is not saved)
    assert len(kept) == 3 and list(named) == [0, 1, 2]
    sites = plain.run([*plain.ids(EIFFEL), *tracer.result.outputs[0].token_ids[:2]]).sites
    for step, pair in enumerate(kept):
        row = len(plain.ids(EIFFEL)) - 1 + step
        assert type(pair).__name__ == "Pair"
        close(pair.early, sites["resid_post", EARLY][row])
        close(pair.late, sites["resid_post", LATE][row])
        close(named[step]["both"][1], sites["resid_post", LATE][row])
        assert named[step]["step"] == step


def test_a_value_that_differs_between_stages_is_told_by_its_name(pp2: VLLM) -> None:
    with pytest.warns(UserWarning, match="whose"), pp2.trace(EIFFEL, **GREEDY):
        whose = save(os.getpid())
        hidden = pp2.layers_output[LATE].save()
    assert isinstance(whose, int) and hidden.shape[-1] == 256
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pp2.trace(EIFFEL, **GREEDY):
            noise = torch.randn(3).save()  # torch's numbers are the same on both
            total = (pp2.layers_output[LATE] * 1.7).sum().save()
    assert noise.shape == (3,) and total.ndim == 0


def test_a_stop_token_ends_the_trace_on_both_stages_in_the_same_step(pp2: VLLM, plain: Plain) -> None:
    """The scheduler runs ahead of the tokens: the first stage is asked for a step past the stop."""
    tokens = plain.generate(EIFFEL, 8)
    stop = tokens[3]
    first = tokens.index(stop)
    with pp2.trace(EIFFEL, max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[stop]) as tracer:
        early, late = list().save(), list().save()
        for _ in tracer.iter[:]:
            early.append(pp2.layers_output[EARLY][-1])
            late.append(pp2.layers_output[LATE][-1])
    assert list(tracer.result.outputs[0].token_ids) == tokens[: first + 1]
    assert len(early) == len(late) == first + 1


def test_an_error_on_one_stage_ends_the_request_on_all(pp2: VLLM, plain: Plain) -> None:
    """A body that fails on the first stage alone, and one that fails on the last alone; what was saved before is kept."""
    workers = [process["pid"] for process in pp2.engine.collective_rpc("process")]
    for which, other in ((0, LATE), (1, EARLY)):
        culprit = workers[which]

        def fail(model: Any, tracer: Any, culprit: int = culprit) -> Any:
            for step in tracer.iter[:]:
                hidden = model.layers_output[LATE if step % 2 else EARLY]  # noqa: F841
                if step == 2 and os.getpid() == culprit:
                    raise ValueError("only here")

        with pytest.raises(ValueError, match="only here") as raised:
            pp2.run(fail, EIFFEL, max_tokens=400, **GREEDY)
        (output,) = raised.value.outputs  # type: ignore[attr-defined]
        assert 3 <= len(output.outputs[0].token_ids) < 200, "the engine has gone on"
        assert pp2.run(lambda model, other=other: model.layers_output[other], EIFFEL, **GREEDY).shape[-1] == 256


def test_a_trace_that_one_stage_cannot_load_ends_on_all(pp2: VLLM, plain: Plain) -> None:
    """And nothing of it stays on any, nor of the standing edits that it would have had."""
    value = LoadsOnTheFirstStageAlone()
    with pp2.edit("shift", inplace=True):
        pp2.layers_output[EARLY][:] += 1
    try:
        with pytest.raises(MidstreamError, match="not here"):
            pp2.run(lambda model: (model.layers_output[LATE], value.by), EIFFEL, **GREEDY)
        large = torch.zeros(SMALL)  # is sent once for all requests
        with pytest.raises(ExceptionGroup) as raised:
            pp2.run(lambda model: (model.layers_output[LATE], large, value.by), [EIFFEL, PARIS, EIFFEL], **GREEDY)
        failures = raised.value.failures  # type: ignore[attr-defined]
        assert ["not here" in str(error) for error in failures.values()] == [True] * 3, failures
    finally:
        pp2.clear_edits()
    close(pp2.run(lambda model: model.logits, EIFFEL, **GREEDY), plain.run(EIFFEL).logits[-1:])


def test_nothing_grows(pp2: VLLM) -> None:
    """C10: hundreds of requests, and long generations, that read layers of both stages."""

    def read(model: Any, tracer: Any) -> Any:
        total = 0.0
        for _ in tracer.iter[:]:
            for i in (0, EARLY, 3, 4, LATE):
                total += model.layers_output[i][-1].sum().item()
        return total

    prompts = [EIFFEL * 6, PARIS * 8] * 8

    def window() -> list[dict[str, int]]:
        for _ in range(6):
            pp2.run(read, prompts, max_tokens=3, **GREEDY)
        pp2.run(read, [EIFFEL], max_tokens=75, **GREEDY)
        return pp2.engine.collective_rpc("process")

    window()  # what the allocators keep
    threads = threading.active_count()
    assert_flat(window, megabytes=5)  # the values of a window are 9 MB
    assert threading.active_count() <= threads + 1


def test_a_long_generation_keeps_nothing_of_its_steps(pp2: VLLM) -> None:
    """What the stages have for each other, looked at by the body as it goes: values that are used, and values that are not."""

    def read(model: Any, tracer: Any) -> Any:
        stages, total, seen = current_body().forward.stage, 0.0, {}
        for step in tracer.iter[:]:
            for i in range(model.num_layers):
                hidden = model.layers_output[i]
                total += hidden.sum().item() if i % 2 else 0.0
            if step in (20, 100):
                seen[stages.index, step] = stages.link.gauges()
        return seen, total

    seen, _ = pp2.run(read, EIFFEL, max_tokens=110, **GREEDY)
    for stage in (0, 1):
        then, now = seen[stage, 20], seen[stage, 100]
        assert all(now[gauge] < then[gauge] + 32 for gauge in ("published", "sent_ahead", "open_fetches")), (then, now)
        assert now["published_bytes"] < then["published_bytes"] + 32 * 1024, (then, now)  # 80 steps have 320 KB


def test_a_plain_step_is_vllms_own_once_the_traces_and_plans_are_over(pp2: VLLM, plain: Plain) -> None:
    """The functions of midstream that either worker's thread runs in it, all told: nothing stands in the runner, no hook, no message."""

    def read(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[:]:
            early = model.layers_output[EARLY]
            model.layers_output[LATE] += 0 * early.mean(0)

    pp2.run(read, EIFFEL, max_tokens=3, **GREEDY)
    pp2.generate(EIFFEL, plan=[Steer("resid_post", vector=torch.ones(256)), Capture("resid_post")], max_tokens=3)
    pp2.generate([PARIS], max_tokens=2, **GREEDY)  # in which the ends of those are told
    pp2.engine.collective_rpc("note_calls", args=(True,))
    outputs = pp2.generate([EIFFEL, PARIS], max_tokens=6, **GREEDY)
    noted = pp2.engine.collective_rpc("note_calls", args=(False,))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [plain.generate(p, 6) for p in (EIFFEL, PARIS)]
    for calls in noted:
        own = {name.removeprefix("running_uncompiled.<locals>.") for name in calls}
        assert "Worker.execute_model" in own and not own - PLAIN_STEP, own - PLAIN_STEP


def test_what_its_stage_cannot_read_is_an_error_where_another_uses_it(pp2: VLLM, plain: Plain) -> None:
    """The body goes on where it was read. Seen hanging: the last stage waited for the value, and the first for the last one's token."""

    def look(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[:]:
            gain = getattr(model.model.layers[EARLY].mlp, "gain", None)
            hidden = model.layers_output[LATE]
            if gain is not None:
                hidden += gain

    with pytest.raises(NeverReachedError, match=r"cannot be read on pipeline stage 0.*gain"):
        pp2.run(look, EIFFEL, max_tokens=3, **GREEDY)
    close(pp2.run(lambda model: model.logits, EIFFEL, **GREEDY), plain.run(EIFFEL).logits[-1:])


def test_an_error_is_known_on_all_stages_before_any_waits_for_another_trace(pp2: VLLM, plain: Plain) -> None:
    """The last stage wants something of the first, which has failed and waits for the token of the request beside."""
    with pytest.raises(UnknownModuleError):
        with pp2.trace(**GREEDY) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(EIFFEL):
                barrier()
                pp2.model.layers[EARLY].mlp.down_projection.output.save()
            with tracer.invoke(PARIS):
                barrier()
                token = int(pp2.samples) + 0
                save(token)
    assert token == plain.generate(PARIS, 1)[0]


def test_a_variable_of_another_invoke_is_waited_for_and_no_longer_than_it_may_come(pp2: VLLM, plain: Plain) -> None:
    """On the first stage the one who binds it waits for the last stage, in every step."""
    with pp2.trace(max_tokens=2, **GREEDY) as tracer:
        with tracer.invoke(EIFFEL):
            for _ in tracer.iter[:]:
                late = pp2.layers_output[LATE][-1] * 2
        with tracer.invoke(PARIS):
            pp2.layers_output[LATE + 1]  # behind the point where it is bound
            twice = (late + 0).save()
    close(twice, plain.run(EIFFEL).sites["resid_post", LATE][-1] * 2)
    with pytest.raises(NameError, match="'never' is bound by another invoke"):
        with pp2.trace(max_tokens=2, **GREEDY) as tracer:
            with tracer.invoke(EIFFEL):
                for _ in tracer.iter[:]:
                    if pp2.layers_output[LATE].sum().item() == 0.0:
                        never = 1
            with tracer.invoke(PARIS):
                pp2.layers_output[LATE + 1][:] += never


def test_a_remote_value_that_another_invoke_has_read(pp2: VLLM, plain: Plain) -> None:
    """The code that read it has ended on both stages when the other invoke comes to use it."""
    with pp2.trace(**GREEDY) as tracer:
        with tracer.invoke(EIFFEL):
            early = pp2.layers_output[EARLY]
        with tracer.invoke(PARIS):
            pp2.layers_output[LATE][:] += early.mean(0)
            logits = pp2.logits.save()
    mean = plain.run(EIFFEL).sites["resid_post", EARLY].mean(0)
    close(logits, plain.run(PARIS, {("resid_post", LATE): lambda h: h + mean}).logits[-1:])


def test_variables_that_wait_for_each_other_are_an_error(pp2: VLLM) -> None:
    with pytest.raises(MidstreamError) as caught:
        with pp2.trace(max_tokens=2, **GREEDY) as tracer:
            with tracer.invoke(EIFFEL):
                total = pp2.logits.sum().item()
                there = total + back  # noqa: F821
            with tracer.invoke(PARIS):
                back = there + 1  # noqa: F841
    assert len(caught.value.exceptions) == 2 and all(isinstance(error, NameError) for error in caught.value.exceptions)


def test_a_barrier_that_opens_when_a_stage_has_computed(pp2: VLLM, plain: Plain) -> None:
    """The first stage comes to it with the token that the last one samples; the last one then wants something of the first."""
    with pp2.trace(**GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(EIFFEL):
            barrier()
            row = (pp2.model.embed_tokens(torch.tensor([3])) + 0).save()
        with tracer.invoke(PARIS):
            token = int(pp2.samples)
            save(token)
            barrier()
    assert token == plain.generate(PARIS, 1)[0]
    assert torch.equal(row, plain.model.model.embed_tokens.weight[[3]].detach())


def test_an_error_ends_a_request_whose_code_had_ended_on_the_last_stage(pp2: VLLM) -> None:
    def failing() -> float:
        begun = time.monotonic()
        with pytest.raises(ShapeError):
            with pp2.trace(EIFFEL, max_tokens=480, **GREEDY):
                pp2.layers_output[EARLY] = torch.zeros(3)
        return time.monotonic() - begun

    ended = min(failing() for _ in range(3))  # other tests may keep the machine busy for a while
    begun = time.monotonic()
    pp2.generate([EIFFEL], max_tokens=480, **GREEDY)
    assert ended < (time.monotonic() - begun) / 2
