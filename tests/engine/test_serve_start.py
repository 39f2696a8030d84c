"""A server that starts with vectors, an SAE and a final plan from files (T7), and what its clients see when it ends (G7, G12).

One server for all of it, which a test near the end stops.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from limits import until
from load_clients import request
from oracle import Plain
from plan_cases import FRANCE, ITALY, toward_rome
from safetensors.torch import save, save_file
from servers import SCALE_OUT, Server, serving

from midstream import SAE, Plan, Remote, Steer, demo_model
from midstream.cli import main
from midstream.errors import PlanError

pytestmark = pytest.mark.engine

ADMIN, KEY, TOKENS = "the-administrator", "key", 4
HIDDEN, FEATURES = 256, 1 << 12


@pytest.fixture(scope="module")
def rome(plain: Plain) -> torch.Tensor:
    return toward_rome(plain, 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, rome: torch.Tensor) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("files")
    save_file({"rome": rome / rome.norm(), "back": 3 * rome}, folder / "vectors.safetensors")
    save_file({"other": torch.ones(HIDDEN)}, folder / "others.safetensors")
    weights = {"W_enc": torch.randn(HIDDEN, 64), "W_dec": torch.randn(64, HIDDEN), "b_enc": torch.zeros(64)}
    config = {
        "architecture": "standard",
        "d_in": HIDDEN,
        "d_sae": 64,
        "metadata": {"hook_name": "blocks.2.hook_resid_post"},
    }
    (folder / "cfg.json").write_text(json.dumps(config))
    (folder / "sae_weights.safetensors").write_bytes(save({**weights, "b_dec": torch.zeros(HIDDEN)}))
    clamp = {"kind": "clamp", "site": "resid_post", "layers": [3, 4, 5], "direction": "rome", "low": 0.0, "high": 0.0}
    (folder / "plan.json").write_text(json.dumps({"final": "later", "interventions": [clamp]}))
    with serving(
        tmp_path_factory.mktemp("serve"),
        *("--midstream-vectors", str(folder / "vectors.safetensors")),
        *("--midstream-vectors", str(folder / "others.safetensors")),
        *("--midstream-sae", f"operators={folder}", "--midstream-plan", str(folder / "plan.json")),
        *("--shutdown-timeout", "1", "--api-key", KEY),
        *SCALE_OUT,
        stock=False,
        MIDSTREAM_ADMIN_KEY=ADMIN,
    ) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plug:
            plug.sendall(request("POST", "/v1/completions", b'{"prompt": "', KEY, length=1000))
            server.stalled = plug  # type: ignore[attr-defined]
            yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def complete(client: openai.OpenAI, plan: list[Any] | None = None, **more: Any) -> str:
    field = {} if plan is None else {"midstream": {"plan": plan}}
    given = {"model": "demo", "prompt": FRANCE, "max_tokens": TOKENS, "temperature": 0.0, **more}
    return client.completions.create(**given, extra_body={"ignore_eos": True, **field}).choices[0].text


@pytest.fixture(scope="module")
def text(plain: Plain, rome: torch.Tensor) -> Callable[..., str]:
    """What transformers generates with hooks that clamp at the plan's layers, after an edit of a client."""
    unit = rome / rome.norm()

    def clamped(h: torch.Tensor) -> torch.Tensor:
        return h - (h @ unit)[:, None] * unit

    def of(edits: dict[Any, Any] | None = None, is_clamped: bool = True) -> str:
        made = dict(edits or {})
        for layer in (3, 4, 5) if is_clamped else ():
            mine = made.get(("resid_post", layer), lambda h: h)
            made["resid_post", layer] = lambda h, mine=mine: clamped(mine(h))
        return plain.tokenizer.decode(plain.generate(FRANCE, TOKENS, made), skip_special_tokens=True)

    return of


def steer(layer: int, site: str = "resid_post") -> dict[str, Any]:
    return {"kind": "steer", "site": site, "layers": [layer], "vector": "back"}


def test_the_files_are_there_after_a_restart(
    server: Server, client: openai.OpenAI, text: Any, rome: torch.Tensor
) -> None:
    assert server.ask("GET", "/v1/midstream/vectors", key=KEY)[1]["vectors"].keys() == {"rome", "back", "other"}
    assert server.ask("GET", "/v1/midstream/saes", key=KEY)[1]["saes"].keys() == {"operators"}
    (shown,) = server.ask("GET", "/v1/midstream/plan", key=KEY)[1]["plan"]["interventions"]
    assert shown["kind"] == "clamp" and shown["final"] == "later"
    assert complete(client) == text() != text({("resid_post", 6): lambda h: h + 3 * rome})
    for name in ("rome", "back"):
        assert server.ask("DELETE", f"/v1/midstream/vectors/{name}", key=KEY)[0] == 403
    assert server.ask("DELETE", "/v1/midstream/vectors/rome", key=KEY, admin=ADMIN)[0] == 409  # the plan uses it


def test_clients_edits_at_the_plans_sites_come_before_it(client: openai.OpenAI, text: Any, rome: torch.Tensor) -> None:
    for layer, site in ((2, "resid_post"), (3, "resid_post"), (5, "resid_post"), (3, "mlp_out")):
        wanted = text({(site, layer): lambda h: h + 3 * rome})
        assert complete(client, [steer(layer, site)]) == wanted
    apply = Plan.of(Steer("resid_post", layers=4, vector=3 * rome)).to_json()
    assert complete(client, json.loads(apply)) == text({("resid_post", 4): lambda h: h + 3 * rome})  # type: ignore[arg-type]


def behind(route: str) -> tuple[str, dict[str, Any]]:
    """A route, and a body with an edit behind the final plan."""
    plan, prompt = [steer(6)], {"model": "demo", "prompt": FRANCE, "max_tokens": 2}
    chat = {"model": "demo", "messages": [{"role": "user", "content": FRANCE}], "max_tokens": 2}
    return {
        "completions": ("/v1/completions", {**prompt, "midstream": {"plan": plan}}),
        "streamed": ("/v1/completions", {**prompt, "stream": True, "midstream": {"plan": plan}}),
        "xargs": ("/v1/completions", {**prompt, "vllm_xargs": {"midstream": json.dumps({"plan": plan})}}),
        "chat": ("/v1/chat/completions", {**chat, "midstream": {"plan": plan}}),
        "responses": (
            "/v1/responses",
            {"model": "demo", "input": FRANCE, "max_output_tokens": 2, "midstream": {"plan": plan}},
        ),
        "tokens": (
            "/inference/v1/generate",
            {
                "model": "demo",
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 2, "extra_args": {"midstream": {"plan": plan}}},
            },
        ),
        "sweep": (
            "/v1/midstream/sweeps",
            {"clean": FRANCE, "corrupt": ITALY, "answer": " Paris", "foil": " Rome", "layers": [2, 6]},
        ),
    }[route]


@pytest.mark.parametrize("route", ["completions", "streamed", "xargs", "chat", "responses", "tokens", "sweep"])
def test_no_route_takes_an_edit_behind_the_plan(server: Server, route: str) -> None:
    status, answer = server.post(*behind(route), key=KEY)
    assert status == 400 and "could undo the final edits" in answer["error"]["message"], answer


def test_remote_is_refused_alike(server: Server, rome: torch.Tensor, text: Any) -> None:
    with Remote(server.url, api_key=KEY) as model:
        given = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        for plan in (Steer("resid_post", layers=6, vector="back"), Steer("mlp_out", layers=-1, vector=rome)):
            with pytest.raises(PlanError, match="could undo the final edits"):
                model.generate(FRANCE, plan=plan, **given)
        with pytest.raises(PlanError, match="an engine-wide plan alone"):
            model.generate(FRANCE, plan=Plan([Steer("resid_post", layers=1, vector=rome)], final="later"), **given)
        with pytest.raises(PlanError, match="could undo the final edits"), model.trace(FRANCE):
            model.resid_post[6][:] += rome
        (output,) = model.generate(FRANCE, plan=Steer("resid_post", layers=3, vector="back"), **given)
        assert output.outputs[0].text == text({("resid_post", 3): lambda h: h + 3 * rome})
        with model.trace(FRANCE):
            hidden = model.resid_post[6][-1].save()  # reads are allowed
        assert hidden.shape == (HIDDEN,)


def test_an_administrator_may_refuse_all_edits_and_a_client_makes_none_final(
    server: Server, client: openai.OpenAI, text: Any, rome: torch.Tensor
) -> None:
    for plan in ({"final": "later", "interventions": [steer(1)]}, [{**steer(1), "final": "all"}]):
        with pytest.raises(openai.BadRequestError, match="an engine-wide plan alone"):
            complete(client, plan)  # type: ignore[arg-type]
    before = server.ask("GET", "/v1/midstream/plan", key=KEY)[1]
    with Remote(server.url, api_key=KEY, admin_key=ADMIN) as admin:
        admin.engine_plan = Plan(admin.engine_plan.interventions, final="all")
        try:
            assert complete(client) == text()
            with pytest.raises(openai.BadRequestError, match="allows no edits of requests"):
                complete(client, [steer(1)])
            assert complete(client, [{"kind": "capture", "site": "resid_post", "layers": [7]}]) == text()
        finally:
            status, after = server.ask("PUT", "/v1/midstream/plan", json.dumps(before).encode(), key=KEY, admin=ADMIN)
    assert status == 200 and after == before


def test_a_deleted_sae_leaves_nothing(server: Server, client: openai.OpenAI) -> None:
    """Neither does a replaced one: the workers hold no weights of them."""

    def held() -> int:
        return sum(each["weight_bytes"] for each in server.ask("GET", "/v1/midstream/gauges", key=KEY)[1]["workers"])

    torch.manual_seed(0)
    weights = {"W_enc": torch.randn(HIDDEN, FEATURES), "W_dec": torch.randn(FEATURES, HIDDEN)}
    weights |= {"b_enc": torch.zeros(FEATURES), "b_dec": torch.zeros(HIDDEN)}
    config = {"architecture": "standard", "d_in": HIDDEN, "d_sae": FEATURES}
    top = {"kind": "sae", "sae": "mine", "do": "capture", "top_k": 3, "name": "f"}
    ablate = {"kind": "sae", "sae": "mine", "do": "clamp", "feature": 5, "high": 0.0, "error_term": False}
    path, before, matrix = "/v1/midstream/saes/mine", held(), HIDDEN * FEATURES * 4
    for cycle in range(2):
        for shift, wanted in ((0, 2 * matrix), (1, matrix)):  # the second has the first one's decoder
            changed = {**weights, "W_enc": weights["W_enc"] + cycle + shift / 2}
            data = SAE(config, changed, site="resid_post", layer=2).written()
            assert server.ask("POST", f"{path}?replace=true", data, key=KEY)[0] == 200
            assert held() == before + wanted - 2 * matrix * (not shift)
            assert complete(client, [top, ablate])
            assert held() == before + 2 * matrix
        assert server.ask("DELETE", path, key=KEY)[0] == 200
        assert held() == before


def test_nested_json_is_a_mistake_on_every_route(server: Server) -> None:
    nested = b"[" * 3000 + b"]" * 3000
    bodies = [
        nested,
        *(b'{"model": "demo", "prompt": "a", "max_tokens": 1, "%b": %b}' % (name, nested) for name in NESTED),
    ]
    paths = server.ask("GET", "/openapi.json")[1]["paths"]
    routes = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method, about in methods.items()
        if "application/json" in about.get("requestBody", {}).get("content", {})
    }
    routes |= {("POST", "/invocations"), ("PUT", "/v1/midstream/plan"), ("POST", "/v1/midstream/sweeps")}
    assert routes >= {
        ("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/midstream/runs")
    }
    for method, path in sorted(routes):
        if any(part in path for part in ADMINISTRATION):
            continue
        for body in bodies:
            status, answer = server.ask(method, path, body, key=KEY, admin=ADMIN, timeout=60)
            assert status < 500 and (status >= 400 or body is not nested), (path, status, body[:60], answer)


# vLLM's routes for development, which need no body.
ADMINISTRATION = (
    "scale",
    "sleep",
    "wake",
    "pause",
    "resume",
    "memory",
    "weight",
    "profile",
    "reset",
    "abort",
    "collective",
)
NESTED = (b"prompt", b"messages", b"input", b"midstream", b"vllm_xargs", b"structured_outputs", b"tools", b"stop")


def test_a_stalled_body_was_answered(server: Server) -> None:
    plug: socket.socket = server.stalled  # type: ignore[attr-defined]
    plug.settimeout(60)
    assert plug.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_what_outlives_the_time_for_running_requests_ends_as_an_error(server: Server) -> None:
    """The status or the last event says so."""
    body = {"model": "demo", "prompt": "The", "max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
    more = {**body, "n": 16, "temperature": 1.0}
    sweep = {
        "clean": [FRANCE] * 64,
        "corrupt": [ITALY] * 64,
        "answer": [" Paris"] * 64,
        "foil": [" Rome"] * 64,
        "layers": [0, 1, 2],
    }
    calls = {
        **{f"plain {i}": ("/v1/completions", more) for i in range(4)},
        "planned": ("/v1/completions", {**more, "midstream": {"plan": [steer(1)]}}),
        "stream": ("/v1/completions", {**more, "stream": True}),
        "sweep": ("/v1/midstream/sweeps", {**sweep, "sites": ["resid_post", "mlp_out", "attn_out"]}),
    }
    found: dict[str, tuple[int, str, str]] = {}
    started = set[str]()

    def ask(name: str) -> None:
        path, given = calls[name]
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", server.url + path, json=given, headers=headers, timeout=120) as answer:
            parts = []
            for part in answer.iter_text():
                started.add(name)
                parts.append(part)
            found[name] = answer.status_code, answer.headers["content-type"], "".join(parts)

    threads = []
    for name in ("sweep", "stream", "planned", *(f"plain {i}" for i in range(4))):
        threads.append(threading.Thread(target=ask, args=(name,), daemon=True))
        threads[-1].start()
        until(lambda name=name: name in started or name not in ("sweep", "stream"))
    time.sleep(0.3)  # for the last of them to arrive
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    assert found.keys() == calls.keys()
    answers = [found.pop(name) for name in list(found) if name not in ("stream", "sweep")]
    assert {kind for _, kind, _ in answers} == {"application/json"}, answers
    refused = [(status, json.loads(answer)["error"]) for status, _, answer in answers if status != 200]
    assert len(refused) > 1 and all(status >= 500 and error["message"] for status, error in refused)
    for name in ("stream", "sweep"):
        status, _, answer = found[name]
        last = [line for line in answer.splitlines() if line.startswith("data: {")][-1]
        assert status == 200 and "error" in json.loads(last.removeprefix("data: ")), answer[-300:]
    server.process.wait(60)


def test_mistakes_in_files_are_found_before_the_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"wide": torch.ones(3, 4)}, tmp_path / "matrix.safetensors")
    save_file({"a": torch.ones(4)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(4)}, tmp_path / "two.safetensors")
    (tmp_path / "none.safetensors").write_bytes(b"{}")
    (tmp_path / "text.json").write_text("[")
    (tmp_path / "kind.json").write_text('[{"kind": "steeer"}]')
    (tmp_path / "final.json").write_text('{"final": "soon", "interventions": []}')
    for options, message in (
        (["--midstream-vectors", "missing.safetensors"], "missing.safetensors"),
        (["--midstream-vectors", "matrix.safetensors"], "wide"),
        (["--midstream-vectors", "none.safetensors"], "cannot be read as a safetensors file"),
        (
            ["--midstream-vectors", "one.safetensors", "--midstream-vectors", "two.safetensors"],
            "'a' is taken by a vector of",
        ),
        (["--midstream-sae", "x=nowhere"], "has no SAE of SAELens's"),
        (["--midstream-plan", "missing.json"], "No such file"),
        (["--midstream-plan", "text.json"], "Expecting value"),
        (["--midstream-plan", "kind.json"], "interventions[0].kind is 'steeer'"),
        (["--midstream-plan", "final.json"], "final is 'soon'; allowed: 'later' or 'all'"),
    ):
        paths = [str(tmp_path / each) if each.endswith(("safetensors", "json")) else each for each in options]
        assert main(["serve", str(demo_model()), *paths]) == 1
        error = capsys.readouterr().err
        assert (
            error.startswith(f"midstream: {options[-2]} ")
            and options[-1].partition("=")[2] in error
            and message in error
        ), error
