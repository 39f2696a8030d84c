"""LoRA adapters over HTTP (row N5): `model=` on `Remote`, and in plain requests. The oracle is transformers with the merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import adapters
import pytest
import tiny_models
import torch
from adapters import LAYER
from servers import Server, serving

from midstream import Capture, Patch, Remote, Steer
from midstream.errors import ParameterError, RemoteError

pytestmark = pytest.mark.engine

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
EACH = [None, "red", "blue", "demo"]  # the last is the model's own name
SIZE = ("--max-model-len", "128", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def paths(base: Path) -> dict[str, Path]:
    return {name: adapters.write(base, base.parent / name, seed) for name, seed in (("red", 1), ("blue", 2))}


@pytest.fixture(scope="module")
def merged(base: Path, paths: dict[str, Path]) -> dict[str | None, adapters.Merged]:
    own = adapters.Merged(base, None)
    return {None: own, "demo": own} | {name: adapters.Merged(base, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def server(base: Path, paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    modules = [f"{name}={path}" for name, path in paths.items()]
    flags = ("--midstream-allow-traces", "--api-key", "key", *SIZE, "--lora-modules", *modules)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with serving(tmp_path_factory.mktemp("server"), *flags, stock=False, model=base, **environment) as server:
        yield server


@pytest.fixture(scope="module")
def model(server: Server) -> Iterator[Remote]:
    with Remote(server.url, api_key="key") as model:
        yield model


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_call_that_mixes_adapters_captures_and_steers_as_the_merged_models(model, merged):
    vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3))
    plan = [Steer("resid_post", layers=LAYER, vector=vector), Capture("mlp_act", layers=LAYER, positions="all_prompt")]
    outputs = model.generate([EIFFEL] * 4, plan=plan, model=EACH, max_tokens=1, answers=[5])
    for name, output in zip(EACH, outputs, strict=True):
        expected = merged[name].run(EIFFEL, lambda h: h.add_(vector))
        close(output.captures["mlp_act", LAYER], expected["mlp_act"])
        logprobs = expected["logits"][-1].log_softmax(-1)
        assert output.answers[5] == pytest.approx(float(logprobs[5]), abs=1e-3), name


def test_plain_requests_with_a_plan_have_the_adapter_of_their_model(server, merged):
    field = {
        "plan": [{"kind": "capture", "site": "attn_z", "layers": [LAYER], "positions": "all_prompt"}],
        "inline": True,
    }
    for name in ("demo", "red", "blue"):
        asked = {"model": name, "prompt": EIFFEL, "max_tokens": 1, "temperature": 0, "midstream": field}
        status, answer = server.post("/v1/completions", asked, key="key")
        assert status == 200, answer
        (handle,) = {each["handle"] for each in answer["midstream"]["captures"]}
        status, data = server.ask("GET", f"/v1/midstream/captures/{handle}", key="key")
        assert status == 200
        from safetensors.torch import load

        (rows,) = load(data).values()
        close(rows, merged[name].run(EIFFEL)["attn_z"])


def test_traces_in_each_tier_have_the_adapter_of_their_request(model, merged):
    def on_the_client(model):
        return model.resid_post[LAYER][-1]

    def behind_the_step(model):
        return model.project_on_vocab(model.resid_post[LAYER])[-1]

    def in_the_forward(model):
        hidden = model.resid_post[LAYER]
        if hidden.norm() > 0:
            return model.logits[0], model.model.layers[LAYER].mlp(hidden)

    found = [model.run(fn, [EIFFEL] * 4, model=EACH) for fn in (on_the_client, behind_the_step, in_the_forward)]
    for name, client, behind, (logits, called) in zip(EACH, *found, strict=True):
        own = merged[name].run(EIFFEL)
        close(client, own["resid_post"][-1])
        with torch.no_grad():
            whole = merged[name].model
            close(behind, whole.lm_head(whole.model.norm(own["resid_post"]))[-1])
            close(called, whole.model.layers[LAYER].mlp(own["resid_post"]))
        close(logits, own["logits"][-1])


def test_a_with_block_has_an_adapter_for_each_invoke(model, merged):
    with model.trace(model="red") as tracer:
        with tracer.invoke(EIFFEL):
            own = model.logits[0].save()
        with tracer.invoke(EIFFEL, model="blue"):
            other = model.logits[0].save()
        with tracer.invoke(EIFFEL, model=None):
            plain = model.logits[0].save()
    for name, value in (("red", own), ("blue", other), (None, plain)):
        close(value, merged[name].run(EIFFEL)["logits"][-1])


def test_runs_and_sweeps_have_their_adapter(model, merged):
    other = "The capital of Italy is"
    run = model.record(FRANCE, ["resid_post"], model="red")
    recorded = merged["red"].run(FRANCE)["resid_post"][-1]

    def put(hidden):
        hidden[-1] = recorded

    patch = Patch("resid_post", layer=LAYER, position=-1, source=run, source_position=-1)
    (output,) = model.generate([other], plan=patch, model="blue", max_tokens=1, answers=[5])
    expected = merged["blue"].run(other, put)["logits"][-1].log_softmax(-1)
    assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3)
    result = model.sweep(FRANCE, other, 5, 6, layers=[LAYER], positions=[-1], model="red")
    expected = merged["red"].run(other, put)["logits"][-1]
    assert float(result.values["resid_post"].item()) == pytest.approx(float(expected[5] - expected[6]), abs=1e-2)
    assert "red" in result.outline.model


def test_an_adapter_that_fits_no_module_is_refused_when_the_server_loads_it(server, base):
    """By vLLM's route; `--lora-modules` goes the same way at the start."""
    for name, named in (("compiled", lambda module: f"_orig_mod.{module}"), ("right", lambda module: module)):
        path = adapters.write(base, base.parent / name, 4, named=named)
        given = {"lora_name": name, "lora_path": str(path)}
        status, answer = server.post("/v1/load_lora_adapter", given, key="key")
        if name == "right":
            assert status == 200, answer
        else:
            assert status >= 400
            assert "fits none of the model's modules" in answer["error"]["message"], answer
            assert "'_orig_mod.model.layers.0.mlp.down_proj'" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", {"model": name, "prompt": EIFFEL, "max_tokens": 1}, key="key")
        assert status == (200 if name == "right" else 404), answer
    with Remote(server.url, api_key="key") as model:
        (output,) = model.generate(EIFFEL, model="right", max_tokens=1, answers=[5])
    expected = adapters.Merged(base, base.parent / "right").run(EIFFEL)["logits"][-1].log_softmax(-1)
    assert output.answers[5] == pytest.approx(float(expected[5]), abs=1e-3)


def test_an_unknown_adapter_is_not_found(server, model):
    asked = {"version": "", "clean": FRANCE, "corrupt": EIFFEL, "answer": 5, "foil": 6, "model": "green"}
    for path, body in (
        ("completions", {"prompt": FRANCE, "max_tokens": 1}),
        ("midstream/runs", {"prompt": FRANCE, "sites": ["resid_post"]}),
        ("midstream/sweeps", {name: each for name, each in asked.items() if name != "version"}),
    ):
        status, answer = server.post(f"/v1/{path}", {"model": "green", **body}, key="key")
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (404, "NotFoundError", "model"), answer
        assert "The model `green` does not exist" in answer["error"]["message"]
    for call in (
        lambda: model.generate([FRANCE, EIFFEL], model=[None, "green"], max_tokens=1),
        lambda: model.record(FRANCE, ["resid_post"], model="green"),
        lambda: model.sweep(FRANCE, FRANCE, 5, 6, model="green"),
        lambda: model.run(lambda m: m.logits, FRANCE, model="green"),
    ):
        with pytest.raises(RemoteError, match="404: The model `green` does not exist") as raised:
            call()
        assert raised.value.field == "model"


def test_values_that_are_no_names_are_refused(model):
    for given, match in ((3, "model is 3"), ("", "model is ''"), (["red"] * 3, "3 were given for 1")):
        with pytest.raises(ParameterError, match=match):
            model.generate(FRANCE, model=given)
    with pytest.raises(ParameterError, match="model=NAME"):
        model.generate(FRANCE, lora_request="red")
