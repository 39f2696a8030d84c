"""Requests with LoRA adapters (row N5), against the model on transformers with the adapter merged into its weights."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import adapters
import pytest
import tiny_models
import torch
from adapters import LAYER
from engines import ENGINE, RANKS, alive, timed
from forked import forked
from safetensors.torch import load_file, save_file

from midstream import VLLM, Capture, Patch, Plan, Steer, open_captures
from midstream.commands import collect as collect_command
from midstream.engine import launch
from midstream.errors import CaptureError, ParameterError
from midstream.runtime.request import Tier

pytestmark = pytest.mark.engine

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
SITES = ("resid_pre", "attn_in", "attn_z", "attn_out", "resid_mid", "mlp_in", "mlp_act", "mlp_out", "resid_post")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def paths(base: Path) -> dict[str | None, Path | None]:
    """The adapters by name; None for the model without one."""
    red = adapters.write(base, base.parent / "red", 1)
    return {
        None: None,
        "red": red,
        "blue": adapters.write(base, base.parent / "blue", 2, (*adapters.TARGETS, "lm_head")),
    }


@pytest.fixture(scope="module")
def merged(base: Path, paths: dict[str | None, Path | None]) -> dict[str | None, adapters.Merged]:
    return {name: adapters.Merged(base, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def requests(paths: dict[str | None, Path | None]) -> dict[str | None, Any]:
    from vllm.lora.request import LoRARequest

    return {
        None: None,
        "red": LoRARequest("red", 1, str(paths["red"])),
        "blue": LoRARequest("blue", 2, str(paths["blue"])),
    }


SHARDED = {"tensor_parallel_size": 2, "fully_sharded_loras": True, "gpu_memory_utilization": 0.1}


@pytest.fixture(
    scope="module", params=[{}, pytest.param(SHARDED, marks=pytest.mark.matrix)], ids=["whole", "fully_sharded"]
)
def adapted(base: Path, request: pytest.FixtureRequest) -> Iterator[VLLM]:
    given = {
        **ENGINE,
        "max_model_len": 128,
        "enforce_eager": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
        "block_size": 32,
        **RANKS,
        **request.param,
    }
    with forked(), timed("adapters"):
        model = VLLM(str(base), **given)
    with model:
        yield model


EACH = [None, "red", "blue", None, "red"]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_batch_that_mixes_adapters_and_none_generates_as_the_merged_models(adapted, merged, requests):
    outputs = adapted.generate(
        [FRANCE] * 5, lora_request=[requests[name] for name in EACH], max_tokens=6, ignore_eos=True
    )
    for name, output in zip(EACH, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == merged[name].generate(FRANCE, 6), name
    outputs = adapted.generate([FRANCE, EIFFEL], lora_request=requests["red"], max_tokens=6, ignore_eos=True)
    for prompt, output in zip([FRANCE, EIFFEL], outputs, strict=True):
        assert list(output.outputs[0].token_ids) == merged["red"].generate(prompt, 6)


def test_captures_at_all_sites_are_those_of_the_merged_models(adapted, merged, requests):
    plan = [Capture(site, layers=LAYER, positions="all_prompt") for site in SITES]
    outputs = adapted.generate([EIFFEL] * 5, plan=plan, lora_request=[requests[name] for name in EACH], max_tokens=1)
    for name, output in zip(EACH, outputs, strict=True):
        expected = merged[name].run(EIFFEL)
        for site in SITES:
            close(output.captures[site, LAYER], expected[site].flatten(1))


def test_a_batch_of_adapters_plans_and_neither_is_as_the_merged_models_with_hooks(adapted, merged, requests):
    vector = torch.randn(adapted.hidden_size, generator=torch.Generator().manual_seed(3))
    steer = Steer("resid_post", layers=LAYER, vector=vector, scale=3.0)
    cases = [(name, plan) for name in (None, "red", "blue") for plan in (None, steer)]
    for _ in range(2):  # from the prefix cache, too
        outputs = adapted.generate(
            [EIFFEL] * 6,
            plan=[[plan] if plan else None for _, plan in cases],
            lora_request=[requests[name] for name, _ in cases],
            max_tokens=1,
            answers=[[5, 6]] * 6,
        )
        for (name, plan), output in zip(cases, outputs, strict=True):
            expected = merged[name].run(EIFFEL, (lambda h: h.add_(3.0 * vector)) if plan else None)["logits"][-1]
            expected = expected.log_softmax(-1)
            for token in (5, 6):
                assert output.answers[token] == pytest.approx(float(expected[token]), abs=1e-3), (name, plan)


def test_requests_without_an_adapter_stay_as_they_are_beside_others_on_the_cpu(adapted, merged, requests):
    """vLLM's CPU kernels give such rows the last adapter (0.32)."""
    outputs = adapted.generate([FRANCE, EIFFEL], lora_request=[requests["blue"], None], max_tokens=1, answers=[5])
    expected = merged[None].run(EIFFEL)["logits"][-1].log_softmax(-1)
    assert outputs[1].answers[5] == pytest.approx(float(expected[5]), abs=1e-3)


def traced(model, requests, fn, **params):
    """What `fn` returns in a trace of each of `EACH`, all in one call."""
    return model.run(fn, [EIFFEL] * 5, lora_request=[requests[name] for name in EACH], **params)


# Code for each tier: a plan does everything; captured rows that the client puts together; rows that the engine's code reads behind the
# step; and code that changes values by a number, so it runs in the forward.


def in_a_plan(model):
    model.resid_post[LAYER] += 0.5
    return model.logits


def on_the_client(model):
    return model.resid_post[LAYER][-1]


def behind_the_step(model):
    return model.project_on_vocab(model.resid_post[LAYER])


def in_the_forward(model):
    hidden = model.resid_post[LAYER]
    if hidden.norm() > 0:
        model.resid_post[LAYER] = hidden + 0.5
    return model.logits


@contextmanager
def tiers_noted():
    """A list that gets the tier of each request."""
    seen, original = [], VLLM._lowered

    def lowered(self, invokes, *rest):
        work = original(self, invokes, *rest)
        seen.extend([Tier.FORWARD if work is None else work.tier] * len(invokes))
        return work

    with mock.patch.object(VLLM, "_lowered", lowered):
        yield seen


@pytest.mark.parametrize(
    ("fn", "tier"),
    [
        (in_a_plan, Tier.BEHIND),
        (on_the_client, Tier.CLIENT),
        (behind_the_step, Tier.BEHIND),
        (in_the_forward, Tier.FORWARD),
    ],
)
def test_traces_in_each_tier_see_the_values_of_their_adapter(adapted, merged, requests, fn, tier):
    with tiers_noted() as seen:
        values = traced(adapted, requests, fn)
    assert {*seen} == {tier}
    for name, value in zip(EACH, values, strict=True):
        model = merged[name]
        change = (lambda h: h.add_(0.5)) if fn in (in_a_plan, in_the_forward) else None
        found = model.run(EIFFEL, change)
        if fn is on_the_client:
            expected = found["resid_post"][-1]
        elif fn is behind_the_step:
            with torch.no_grad():
                expected = model.model.lm_head(model.model.model.norm(found["resid_post"]))
        else:
            expected = found["logits"][-1:]
        close(value, expected)


def test_a_trace_that_only_writes_is_a_plan(adapted, merged, requests):
    with tiers_noted() as seen, adapted.trace(max_tokens=3, ignore_eos=True) as tracer:
        for name in EACH:
            with tracer.invoke(EIFFEL, lora_request=requests[name]):
                adapted.resid_post[LAYER][:] += 0.5
    assert {*seen} == {Tier.PLAN}
    for name, output in zip(EACH, tracer.outputs, strict=True):
        expected = merged[name].run(EIFFEL, lambda h: h.add_(0.5))["logits"][-1]
        assert output.outputs[0].token_ids[0] == int(expected.argmax()), name


def test_layers_that_a_trace_calls_have_the_adapter_of_its_request(adapted, merged, requests):
    def fn(model):
        hidden = model.mlp_in[LAYER]
        return (
            model.model.layers[LAYER].mlp(hidden[1:3]),
            model.model.layers[LAYER].mlp.down_proj.base_layer(model.mlp_act[LAYER])[0],
            model.logits,
        )

    values = adapted.run(fn, [EIFFEL] * 5, lora_request=[requests[name] for name in EACH])
    for name, (own, base, logits) in zip(EACH, values, strict=True):
        found, layer = merged[name].run(EIFFEL), merged[name].model.model.layers[LAYER]
        with torch.no_grad():
            close(own, layer.mlp(found["mlp_in"][1:3]))
            close(base, merged[None].model.model.layers[LAYER].mlp.down_proj(found["mlp_act"]))
        close(logits, found["logits"][-1:])  # the rows of the step are vLLM's again


def test_names_and_weights_in_traces_are_those_without_adapters(adapted, merged):
    def fn(model):
        layer = model.model.layers[0]
        shapes = [layer.self_attn.o_proj.output[0].shape, layer.mlp.down_proj.input.shape]
        return model.model.embed_tokens.weight, model.model.norm.weight, shapes

    embedding, norm, shapes = adapted.run(fn, EIFFEL)
    whole = merged[None].model.model.embed_tokens.weight  # with several ranks, this is the first one's part
    assert torch.equal(embedding, whole[: len(embedding)])
    assert torch.equal(norm, merged[None].model.model.norm.weight)
    tokens = merged[None].ids(EIFFEL).shape[1]
    assert [list(each) for each in shapes] == [[tokens, 128], [tokens, 192]]


def test_a_run_recorded_with_one_adapter_patches_a_request_with_another(adapted, merged, requests):
    run = adapted.record(EIFFEL, ["resid_post"], lora_request=requests["red"])
    plan = Patch("resid_post", layer=LAYER, position=-1, source=run, source_position=-1)
    try:
        outputs = adapted.generate(
            [EIFFEL] * 5, plan=plan, lora_request=[requests[name] for name in EACH], max_tokens=1, answers=[5]
        )
    finally:
        adapted.runs.delete(run.name)
    recorded = merged["red"].run(EIFFEL)["resid_post"][-1]
    for name, output in zip(EACH, outputs, strict=True):

        def put(hidden):
            hidden[-1] = recorded

        expected = merged[name].run(EIFFEL, put)["logits"][-1].log_softmax(-1)
        assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3), name


def test_cached_blocks_are_shared_neither_between_adapters_nor_between_plans(adapted, merged, requests):
    prompt = " ".join([EIFFEL] * 4)  # several blocks
    vector = torch.ones(adapted.hidden_size)
    cases = [(name, scale) for scale in (0.0, 2.0) for name in (None, "red", "blue")]
    adapted.engine.reset_prefix_cache()
    for round_ in range(2):
        for name, scale in cases:
            plan = Steer("resid_post", layers=LAYER, vector=vector, scale=scale) if scale else None
            (output,) = adapted.generate(prompt, plan=plan, lora_request=requests[name], max_tokens=1, answers=[5])
            assert (output.num_cached_tokens > 0) == (round_ == 1), (name, scale)
            change = (lambda h: h.add_(2.0)) if scale else None
            expected = merged[name].run(prompt, change)["logits"][-1].log_softmax(-1)
            assert output.answers[5] == pytest.approx(float(expected[5]), abs=2e-3), (name, scale)


def test_a_sweep_runs_with_one_adapter(adapted, merged, requests):
    other = "The capital of Italy is"
    result = adapted.sweep(FRANCE, other, 5, 6, layers=[LAYER], positions=[-1], lora_request=requests["red"])
    clean = merged["red"].run(FRANCE)["resid_post"][-1]

    def put(hidden):
        hidden[-1] = clean

    expected = merged["red"].run(other, put)["logits"][-1]
    assert float(result.values["resid_post"].item()) == pytest.approx(float(expected[5] - expected[6]), abs=1e-2)


def test_a_collection_is_of_one_adapter(adapted, merged, requests, tmp_path):
    plan = Capture("resid_post", layers=LAYER, positions="all_prompt")
    store = adapted.collect([EIFFEL, FRANCE], plan=plan, to=tmp_path / "red", lora_request=requests["red"])
    for captures, prompt in zip(store.values(), [EIFFEL, FRANCE], strict=True):
        close(captures["resid_post", LAYER], merged["red"].run(prompt)["resid_post"])
    with pytest.raises(CaptureError, match="another directory"):
        adapted.collect([EIFFEL], plan=plan, to=tmp_path / "red")
    with pytest.raises(CaptureError, match="another directory"):
        adapted.collect([EIFFEL], plan=plan, to=tmp_path / "red", lora_request=requests["blue"])
    with pytest.raises(ParameterError, match="one adapter"):
        adapted.collect([EIFFEL], plan=plan, to=tmp_path / "red", lora_request=[requests["blue"]])
    assert adapted.estimate([EIFFEL], plan=plan, lora_request=requests["red"]).rows == merged[None].ids(EIFFEL).shape[1]


def test_the_command_collects_with_an_adapter(adapted, base, merged, paths, requests, tmp_path, monkeypatch):
    """On an engine that knows the adapters by numbers of its own."""
    started = []
    adapter = launch.adapter_at(str(paths["blue"]))
    assert (adapter.lora_name, adapter.lora_path) == ("blue", str(paths["blue"].resolve()))
    monkeypatch.setattr(launch, "adapter_at", lambda path: requests[Path(path).name])
    monkeypatch.setattr(collect_command, "start_model", lambda *given: started.append(given) or nullcontext(adapted))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(EIFFEL))
    given = [str(base), "--prompts", str(tmp_path / "prompts.jsonl"), "--to", str(tmp_path / "rows")]
    given += ["--site", "resid_post", "--positions", "all_prompt"]
    assert collect_command.main([*given, "--adapter", str(paths["blue"]), "--max-lora-rank", "8"]) == 0
    assert started == [(str(base), "vllm", {"enable_lora": True, "max_lora_rank": 8})]
    close(open_captures(tmp_path / "rows")["1"]["resid_post", LAYER], merged["blue"].run(EIFFEL)["resid_post"])
    with pytest.raises(CaptureError, match="with the adapter blue"):
        collect_command.main([*given, "--adapter", str(paths["red"])])


def test_an_actor_of_ray_collects_with_an_adapter(adapted, merged, requests, tmp_path):
    actor = pytest.importorskip("midstream.ray")
    plan = Plan.of(Capture("resid_post", layers=LAYER, positions="all_prompt")).to_json()
    engine = actor.Engine(lambda: adapted, {"plan": plan, "to": str(tmp_path), "lora_request": requests["red"]})
    table = actor.pa.table({"id": ["a"], "prompt": [json.dumps(EIFFEL)]}, actor.ASKED)
    rows = merged[None].ids(EIFFEL).shape[1]
    size = {"rows": rows, "bytes": rows * adapted.hidden_size * 4, "error": None}
    assert engine(table).to_pylist() == [{"id": "a", **size}]
    close(open_captures(tmp_path)["a"]["resid_post", LAYER], merged["red"].run(EIFFEL)["resid_post"])


def test_activations_are_those_of_the_adapter(adapted, merged, requests):
    rows = torch.cat([
        batch
        for batch in adapted.activations([EIFFEL], "resid_post", LAYER, shuffle=False, lora_request=requests["blue"])
    ])  # fmt: skip
    close(rows, merged["blue"].run(EIFFEL)["resid_post"])


def test_wrong_adapters_are_refused_before_anything_runs(adapted, requests, paths, tmp_path):
    from vllm.lora.request import LoRARequest

    def refused(match, given, prompts=FRANCE, **more):
        with pytest.raises(ParameterError, match=match) as raised:
            adapted.generate(prompts, lora_request=given, max_tokens=1, **more)
        assert raised.value.field == "lora_request"

    adapted.generate(FRANCE, lora_request=requests["red"], max_tokens=1)
    refused("is 'red'", "red")
    refused("2 were given for 3", [None, requests["red"]], [FRANCE] * 3)
    refused("number 1", LoRARequest("green", 1, str(paths["blue"])))
    refused("number 1", LoRARequest("red", 1, str(paths["blue"])))
    refused("has the number 7", LoRARequest("red", 7, str(paths["red"])))
    refused("load_inplace", LoRARequest("green", 7, str(paths["red"]), load_inplace=True))
    refused("cannot load the adapter 'green'", LoRARequest("green", 7, str(tmp_path)))
    refused(
        "cannot load the adapter 'green'",
        LoRARequest("green", 7, str(tmp_path)),
        [FRANCE, EIFFEL],
        plan=Capture("resid_post"),
    )
    with pytest.raises(ParameterError, match="lora_request=LoRARequest"):
        adapted.generate(FRANCE, model="red")
    with pytest.raises(TypeError, match="max_tokens"):
        adapted.record(FRANCE, ["resid_post"], max_tokens=1)
    assert adapted.generate(FRANCE, max_tokens=1)
    assert not alive(adapted)


def moved(module: str) -> str:
    """A module's name in a layer that the model does not have."""
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{40 + int(found[1])}", module)


OTHER_NAMES: dict[str, Callable[[str], str]] = {
    "compiled": lambda module: f"_orig_mod.{module}",
    "wrapped": lambda module: f"model.{module}",
    "multimodal": lambda module: module.replace("model.", "language_model.model."),
    "larger": moved,
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_an_adapter_that_fits_no_module_is_refused_with_its_names(adapted, base, kind):
    """vLLM runs the base model in its place. Every call is refused, and the next one with a right adapter runs."""
    from vllm.lora.request import LoRARequest

    named = OTHER_NAMES[kind]
    path = adapters.write(base, base.parent / kind, 5, named=named)
    asked = LoRARequest(kind, 20 + [*OTHER_NAMES].index(kind), str(path))
    name = re.escape(repr(named("model.layers.0.mlp.down_proj")))
    message = rf"'{kind}' fits none of the model's modules.*The model has no {name}, .* and \d+ more; it has '.*', for"
    for call in (
        lambda: adapted.generate(FRANCE, lora_request=asked, max_tokens=1),
        lambda: adapted.generate(FRANCE, plan=Capture("resid_post"), lora_request=asked, max_tokens=1),
        lambda: adapted.run(in_the_forward, FRANCE, lora_request=asked),
        lambda: adapted.record(FRANCE, ["resid_post"], lora_request=asked),
    ):
        with pytest.raises(ParameterError, match=message) as raised:
            call()
        assert raised.value.field == "lora_request"
    assert not alive(adapted)


@pytest.mark.parametrize(
    ("module", "which", "message"),
    [
        ("mlp.down_proj", "A", "'model.layers.1.mlp.down_proj' has 191 inputs, and the model's has 192"),
        ("self_attn.k_proj", "B", r"'model.layers.1.self_attn.k_proj' has \d+ outputs"),
        ("mlp.up_proj", "B", r"'model.layers.1.mlp.up_proj' has 191 outputs, and the model's has 192"),
    ],
)
def test_an_adapter_of_a_smaller_model_is_refused(adapted, base, paths, tmp_path, module, which, message):
    """vLLM copies its matrices into a corner of those of the layer."""
    from vllm.lora.request import LoRARequest

    path = tmp_path / "small"
    shutil.copytree(paths["red"], path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = f"base_model.model.model.layers.1.{module}.lora_{which}.weight"
    tensors[name] = (tensors[name][:, :-1] if which == "A" else tensors[name][:-1]).contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ParameterError, match=f"'small' is for a model of another size: its {message}"):
        adapted.generate(FRANCE, lora_request=LoRARequest("small", 40, str(path)), max_tokens=1)


def test_a_stock_engine_refuses_an_adapter_that_fits_no_module_and_runs_the_next(
    adapted, base, merged, requests, tmp_path
):
    """`vllm.LLM` loads an adapter in the step of its first request, where an error would end the engine."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    wrong = adapters.write(base, base.parent / "stock", 5, named=moved)
    for path, message in ((wrong, "fits none of the model's modules"), (tmp_path, "cannot load the adapter")):
        asked = LoRARequest("stock", 40, str(path))
        for given in (asked, [requests["red"], asked]):
            prompts = [FRANCE] * len(given) if isinstance(given, list) else FRANCE
            with pytest.raises(ParameterError, match=message) as raised:
                adapted.engine.generate(prompts, params, lora_request=given, use_tqdm=False)
            assert raised.value.field == "lora_request"
    (output,) = adapted.engine.generate(FRANCE, params, lora_request=requests["red"], use_tqdm=False)
    assert list(output.outputs[0].token_ids) == merged["red"].generate(FRANCE, 6)
    assert not alive(adapted)


def test_an_adapter_that_fits_in_part_warns_with_the_names_and_the_rest_acts(adapted, base, merged):
    from vllm.lora.request import LoRARequest

    def named(module: str, other: Callable[[str], str | None]) -> str | None:
        return other(module) if ".layers.0.self_attn." in module else module

    path = adapters.write(base, base.parent / "part", 6, named=lambda module: named(module, moved))
    rest = adapters.write(base, base.parent / "rest", 6, named=lambda module: named(module, lambda _: None))
    modules = merged[None].model.config.num_hidden_layers * len(adapters.TARGETS)
    message = rf"Of the adapter 'part', 4 of {modules} modules are not applied.*'model.layers.40.self_attn.k_proj', "
    asked = LoRARequest("part", 30, str(path))
    with pytest.warns(UserWarning, match=message):
        (output,) = adapted.generate(EIFFEL, lora_request=asked, max_tokens=1, answers=[5])
    expected = adapters.Merged(base, rest).run(EIFFEL)["logits"][-1].log_softmax(-1)
    assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3)


def test_the_modules_that_an_engine_leaves_out_are_counted(base, paths):
    from vllm.lora.request import LoRARequest

    only_down = adapters.write(base, base.parent / "down", 7, ("down_proj",))
    given = {
        **ENGINE, **RANKS, "max_model_len": 128, "enforce_eager": True, "enable_lora": True, "max_lora_rank": 8,
        "lora_target_modules": ["q_proj", "down_proj"],
    }  # fmt: skip
    with forked(), timed("adapters of two kinds of modules"):
        model = VLLM(str(base), **given)
    with model:
        up = adapters.write(base, base.parent / "up", 8, ("up_proj", "gate_proj"))
        message = r"'up' fits none.*lora_target_modules=\['\w+', '\w+'\] leaves out 'model.layers.0.mlp.gate_proj', "
        with pytest.raises(ParameterError, match=message):
            model.generate(FRANCE, lora_request=LoRARequest("up", 1, str(up)), max_tokens=1)
        with pytest.warns(UserWarning, match=r"'red'.*leaves out 'model.layers.0.mlp.gate_proj'"):
            model.generate(FRANCE, lora_request=LoRARequest("red", 2, str(paths["red"])), max_tokens=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asked = LoRARequest("down", 3, str(only_down))
            (output,) = model.generate(EIFFEL, lora_request=asked, max_tokens=1, answers=[5])
    expected = adapters.Merged(base, only_down).run(EIFFEL)["logits"][-1].log_softmax(-1)
    assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3)


def test_invokes_that_wait_for_each_other_have_no_more_adapters_than_a_step_takes(adapted, base, requests):
    from vllm.lora.request import LoRARequest

    third = LoRARequest("third", 3, str(adapters.write(base, base.parent / "third", 3)))
    with pytest.raises(ParameterError, match="larger max_loras"):
        with adapted.trace(max_tokens=1) as tracer:
            barrier = tracer.barrier(3)
            for each in (requests["red"], requests["blue"], third):
                with tracer.invoke(FRANCE, lora_request=each):
                    barrier()
                    adapted.logits.save()
    outputs = adapted.generate([FRANCE] * 3, lora_request=[requests["red"], requests["blue"], third], max_tokens=1)
    assert len(outputs) == 3  # vLLM takes them in turns


@pytest.mark.matrix
def test_an_async_engine_that_compiles_runs_adapters(base, merged, requests):
    given = {
        **{**ENGINE, **RANKS},
        "max_model_len": 128,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
        "mode": "async",
    }

    async def run() -> None:
        with forked(), timed("async adapters"):
            model = VLLM(str(base), **given)
        with model:
            await model.start()
            vector = torch.ones(model.hidden_size)
            plan = [Steer("resid_post", layers=LAYER, vector=vector), Capture("resid_post", layers=LAYER)]
            outputs = await model.generate(
                [EIFFEL] * 5, plan=plan, lora_request=[requests[name] for name in EACH], max_tokens=1, answers=[5]
            )
            values = await model.run(
                in_the_forward, [EIFFEL] * 5, lora_request=[requests[name] for name in EACH], max_tokens=1
            )
            for name, output, value in zip(EACH, outputs, values, strict=True):
                expected = merged[name].run(EIFFEL, lambda h: h.add_(1.0))["logits"][-1].log_softmax(-1)
                assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3), name
                close(output.captures["resid_post", LAYER][0], merged[name].run(EIFFEL)["resid_post"][-1])
                close(value, merged[name].run(EIFFEL, lambda h: h.add_(0.5))["logits"][-1:])

    asyncio.run(run())
