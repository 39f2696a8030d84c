"""The server on the bundled model, asked by the openai client and by plain HTTP. The oracle is transformers with plain hooks.

It is stock `vllm serve` with the flags that `midstream serve --flags` prints. The other files start `midstream serve`.
Rows F6, G2, G3, G4, G5, G6, G7, G8, G10, L7, P1, P2.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import torch
from body_checks import distances
from capture_tools import wait_until
from limits import least
from load_clients import request
from mutations import mutated
from plain_forward import PlainForward
from plain_run import Ran
from safetensors.torch import load, save
from servers import SCALE_OUT, Server, serving_as_printed
from transformers import AutoModelForCausalLM, AutoTokenizer
from written_programs import trusting_program

from midstream import Apply, GeneratedTokens, Knockout, Plan, Probe, Remote, Span, demo_model
from midstream import save as save_value
from midstream.errors import PlanError, TracesNotAllowedError

pytestmark = pytest.mark.engine

FRANCE, TOWER = "The capital of France is", "The Eiffel Tower is in the city of"
LAYER, HIDDEN, TOKENS = 3, 256, 6
VECTOR = np.random.default_rng(0).normal(size=HIDDEN) * 20
STEER = {"kind": "steer", "site": "resid_post", "layers": [LAYER], "vector": VECTOR.tolist()}
HEAD = {"kind": "steer", "site": "attn_z", "layers": [LAYER], "vector": VECTOR[:64].tolist(), "head": 2}
CAPTURE = {"kind": "capture", "site": "resid_post", "layers": [2, LAYER], "positions": "all_prompt"}
PROBE = {"kind": "probe", "site": "resid_post", "layer": LAYER, "weight": (VECTOR / 400).tolist(), "name": "p"}
MINE, THEIRS, ADMIN = "my-key", "their-key", "the-administrator"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, autoencoder = tmp_path_factory.mktemp("sae"), Autoencoder()
    (folder / "cfg.json").write_text(json.dumps(autoencoder.config()))
    (folder / "sae_weights.safetensors").write_bytes(save(autoencoder.weights))
    with serving_as_printed(
        tmp_path_factory.mktemp("serve"),
        *SCALE_OUT,
        *("--midstream-sae", f"operators={folder}"),
        MIDSTREAM_ADMIN_KEY=ADMIN,
        MIDSTREAM_CAPTURE_BYTES="2000000",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=MINE, max_retries=0, timeout=120)


Edit = Callable[[torch.Tensor], torch.Tensor]  # of one prompt's residual stream [tokens, hidden] behind the layer


def steered(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.as_tensor(VECTOR, dtype=torch.float32)


class Reference:
    """Greedy generation by transformers, with an edit behind one layer."""

    def __init__(self) -> None:
        path = str(demo_model())
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.streams: dict[int, torch.Tensor] = {}

    def ids(self, prompt: str) -> torch.Tensor:
        return self.tokenizer(prompt, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, edit: Edit | None = None) -> torch.Tensor:
        def hook(layer: int) -> Callable[..., Any]:
            def after(_: Any, __: Any, output: Any) -> Any:
                hidden = output if isinstance(output, torch.Tensor) else output[0]
                self.streams[layer] = hidden[0].clone()
                if edit is None or layer != LAYER:
                    return output
                hidden = edit(hidden[0]).unsqueeze(0)
                return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

            return after

        handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(self.model.model.layers)]
        try:
            return self.model(input_ids=ids).logits[0, -1]
        finally:
            for handle in handles:
                handle.remove()

    def text(self, prompt: str, edit: Edit | None = None, tokens: int = TOKENS) -> str:
        ids = self.ids(prompt)
        start = ids.shape[1]
        for _ in range(tokens):
            ids = torch.cat([ids, self.logits(ids, edit).argmax().reshape(1, 1)], 1)
        return self.tokenizer.decode(ids[0, start:], skip_special_tokens=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def field(*plan: Any, **more: Any) -> dict[str, Any]:
    return {"ignore_eos": True, "midstream": {"plan": list(plan), **more}}


def complete(client: openai.OpenAI, prompt: Any, body: dict[str, Any] | None = None, **more: Any) -> Any:
    given = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, **more}
    return client.completions.create(**given, extra_body=body or {"ignore_eos": True})


# ------------------------------------------------------------------------------------------------------- plans and text


def test_steered_text_is_that_of_transformers_on_every_route(client: openai.OpenAI, reference: Reference) -> None:
    changed, plain = reference.text(FRANCE, steered), reference.text(FRANCE)
    assert changed != plain
    assert complete(client, FRANCE).choices[0].text == plain
    body = field(STEER)
    assert complete(client, FRANCE, body).choices[0].text == changed
    assert "".join(c.choices[0].text for c in complete(client, FRANCE, body, stream=True) if c.choices) == changed
    messages: Any = [{"role": "user", "content": FRANCE}]
    chat: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": TOKENS, "temperature": 0.0}
    assert client.chat.completions.create(**chat, extra_body=body).choices[0].message.content == changed
    chunks = client.chat.completions.create(**chat, extra_body=body, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == changed
    answer: dict[str, Any] = {"model": "demo", "input": FRANCE, "max_output_tokens": TOKENS, "temperature": 0.0}
    assert client.responses.create(**answer, extra_body=body).output_text == changed
    events = client.responses.create(**answer, extra_body=body, stream=True)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == changed
    assert complete(client, FRANCE).choices[0].text == plain


@pytest.mark.parametrize("form", ["a string", "a plan", "vllm_xargs"])
def test_a_plan_may_be_written_in_other_ways(client: openai.OpenAI, reference: Reference, form: str) -> None:
    plan = {"version": 1, "interventions": [STEER]}
    bodies: dict[str, Any] = {
        "a string": {"midstream": json.dumps(plan)},
        "a plan": {"midstream": plan},
        "vllm_xargs": {"vllm_xargs": {"midstream": json.dumps({"plan": [STEER]})}},
    }
    assert complete(client, FRANCE, {"ignore_eos": True, **bodies[form]}).choices[0].text == reference.text(
        FRANCE, steered
    )


def test_several_prompts_and_choices(client: openai.OpenAI, reference: Reference) -> None:
    found = complete(client, [FRANCE, TOWER], field(STEER, CAPTURE))
    assert [choice.text for choice in found.choices] == [reference.text(p, steered) for p in (FRANCE, TOWER)]
    assert [each["choice"] for each in found.midstream["captures"]] == [0, 0, 1, 1]
    found = complete(client, [FRANCE, TOWER], field(CAPTURE), n=2, temperature=1.0, seed=1)
    assert len(found.choices) == 4
    assert [each["choice"] for each in found.midstream["captures"]] == [0, 0, 1, 1, 2, 2, 3, 3]


# ------------------------------------------------------------------------------------------------- captures and answers


def rows(server: Server, handle: str, key: str = MINE) -> torch.Tensor:
    status, body = server.ask("GET", f"/v1/midstream/captures/{handle}", key=key)
    assert status == 200, body
    return load(body)["rows"]


def check_rows(server: Server, reference: Reference, entries: list[dict[str, Any]]) -> None:
    reference.logits(reference.ids(FRANCE))
    count = reference.ids(FRANCE).shape[1]
    assert [each["layer"] for each in entries] == [2, LAYER]
    for each in entries:
        assert each["positions"] == list(range(count)) and each["shape"] == [count, HIDDEN]
        assert (each["dtype"], each["when"], each["site"]) == ("float32", "before", "resid_post")
        want = reference.streams[each["layer"]]
        torch.testing.assert_close(rows(server, each["handle"]), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_captured_rows_are_those_of_transformers(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    check_rows(server, reference, complete(client, FRANCE, field(CAPTURE)).midstream["captures"])
    messages: Any = [{"role": "user", "content": FRANCE}]
    chat: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 2, "temperature": 0.0}
    check_rows(
        server, reference, client.chat.completions.create(**chat, extra_body=field(CAPTURE)).midstream["captures"]
    )
    answer = client.responses.create(model="demo", input=FRANCE, max_output_tokens=2, extra_body=field(CAPTURE))
    check_rows(server, reference, answer.midstream["captures"])


def test_edges_are_knocked_out_by_json(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    """N2, against another attention mask; also by `Remote`."""
    ids = reference.ids(FRANCE)
    start, lowest = ids.shape[1], torch.finfo(torch.float32).min
    for _ in range(TOKENS):
        mask = torch.full((ids.shape[1], ids.shape[1]), lowest).triu(1)
        mask[start - 1, 3] = lowest
        mask[start + 1 : start + 4, start : start + 1] = lowest
        with torch.no_grad():
            logits = reference.model(input_ids=ids, attention_mask=mask[None, None]).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().reshape(1, 1)], 1)
    text = reference.tokenizer.decode(ids[0, start:], skip_special_tokens=True)
    prompts = {"kind": "knockout", "layers": "all", "queries": [-1], "keys": {"span": " France"}}
    first = {"selector": "generated", "options": {"numbers": [0]}}
    generated = {"kind": "knockout", "layers": "all", "queries": [1, 2, 3], "phase": "decode", "keys": first}
    assert complete(client, FRANCE, field(prompts, generated)).choices[0].text == text != reference.text(FRANCE)
    assert complete(client, FRANCE, field(prompts)).choices[0].text != text
    with Remote(server.url, MINE) as remote:
        plan = [
            Knockout(queries=-1, keys=Span(" France")),
            Knockout(queries=[1, 2, 3], phase="decode", keys=GeneratedTokens(0)),
        ]
        (output,) = remote.generate(FRANCE, plan=plan, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        assert output.outputs[0].text == text


def test_heads_are_steered_and_captured_by_json(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    """N4, against a hook on the input of `o_proj`."""
    seen: list[torch.Tensor] = []

    def steered_head(module: Any, args: Any) -> Any:
        z = args[0].clone()
        z[..., 128:192] += torch.as_tensor(VECTOR[:64], dtype=torch.float32)
        seen.append(z[0].unflatten(-1, (4, 64)))
        return (z, *args[1:])

    handle = reference.model.model.layers[LAYER].self_attn.o_proj.register_forward_pre_hook(steered_head)
    try:
        text = reference.text(FRANCE)
    finally:
        handle.remove()
    capture = {"kind": "capture", "site": "attn_z", "layers": [LAYER], "positions": "all_prompt", "when": "after"}
    found = complete(client, FRANCE, field(HEAD, {**capture, "head": [2, 0]}, {**capture, "head": 1, "when": "before"}))
    assert found.choices[0].text == text != reference.text(FRANCE)
    entries = {each["when"]: each for each in found.midstream["captures"]}
    count = reference.ids(FRANCE).shape[1]
    assert (entries["after"]["shape"], entries["before"]["shape"]) == ([count, 2, 64], [count, 64])
    for when, heads in (("after", [2, 0]), ("before", 1)):
        want = seen[0][:, heads]
        torch.testing.assert_close(rows(server, entries[when]["handle"]), want, rtol=1e-4, atol=1e-4)


def test_a_stream_has_its_handles_before_done(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    *_, last = complete(client, FRANCE, field(CAPTURE), stream=True)
    check_rows(server, reference, last.midstream["captures"])
    messages: Any = [{"role": "user", "content": FRANCE}]
    chat: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 2, "temperature": 0.0, "stream": True}
    *_, last = client.chat.completions.create(**chat, extra_body=field(CAPTURE))
    check_rows(server, reference, last.midstream["captures"])
    events = client.responses.create(
        model="demo", input=FRANCE, max_output_tokens=2, stream=True, extra_body=field(CAPTURE)
    )
    (done,) = [event for event in events if event.type == "response.completed"]
    check_rows(server, reference, done.response.midstream["captures"])


def expected_scores(reference: Reference, prompt: str, tokens: int = TOKENS) -> torch.Tensor:
    """The score of each token of the prompt, and of each generated one but the last."""
    ids = reference.tokenizer(prompt + reference.text(prompt, tokens=tokens), return_tensors="pt")["input_ids"]
    reference.logits(ids[:, : reference.ids(prompt).shape[1] + tokens - 1])
    return reference.streams[LAYER] @ torch.tensor(VECTOR / 400, dtype=torch.float32)


def check_scores(found: dict[str, Any], expected: torch.Tensor, positions: list[int]) -> None:
    assert found["positions"] == positions
    torch.testing.assert_close(torch.tensor(found["scores"])[:, 0], expected[positions], rtol=1e-3, atol=1e-3)


def test_responses_have_the_scores_of_their_probes(client: openai.OpenAI, reference: Reference) -> None:
    start, expected = reference.ids(FRANCE).shape[1], expected_scores(reference, FRANCE)
    generated = list(range(start, start + TOKENS - 1))
    answer = complete(client, FRANCE, field({**PROBE, "positions": "all"}, {**PROBE, "name": "q"}))
    assert answer.choices[0].text == reference.text(FRANCE)
    check_scores(answer.midstream["scores"]["p"], expected, [*range(start), *generated])
    check_scores(answer.midstream["scores"]["q"], expected, generated)
    several = complete(client, [FRANCE, TOWER], field(PROBE), n=2, temperature=0.01)
    others, other_start = expected_scores(reference, TOWER), reference.ids(TOWER).shape[1]
    for choice, found in enumerate(several.midstream["scores"]):
        wanted, first = (expected, start) if choice < 2 else (others, other_start)
        check_scores(found["p"], wanted, list(range(first, first + TOKENS - 1)))
    response = client.responses.create(
        model="demo", input=FRANCE, max_output_tokens=TOKENS, temperature=0.0, extra_body=field(PROBE)
    )
    assert len(response.midstream["scores"]["p"]["positions"]) == TOKENS - 1


def test_a_streamed_event_has_the_scores_that_came_with_its_token(client: openai.OpenAI, reference: Reference) -> None:
    start, expected = reference.ids(FRANCE).shape[1], expected_scores(reference, FRANCE)
    *events, last = complete(client, FRANCE, field({**PROBE, "positions": "all"}), stream=True)
    whole = last.midstream["scores"]["p"]
    check_scores(whole, expected, list(range(start + TOKENS - 1)))
    each = [event.midstream["scores"]["p"] for event in events if "midstream" in (event.model_extra or {})]
    assert [at for one in each for at in one["positions"]] == whole["positions"], "each once, and in order"
    assert [score for one in each for score in one["scores"]] == whole["scores"]
    assert len(each) > 1 and each[0]["positions"][:start] == list(range(start)), (
        "the prompt's come with the first token"
    )
    *events, last = complete(client, [FRANCE, TOWER], field(PROBE), stream=True, n=2, temperature=0.01)
    for choice in range(4):
        own = [event for event in events if event.choices and event.choices[0].index == choice]
        found = [event.midstream["scores"]["p"] for event in own if "midstream" in (event.model_extra or {})]
        assert [at for one in found for at in one["positions"]] == last.midstream["scores"][choice]["p"]["positions"]
    messages: Any = [{"role": "user", "content": FRANCE}]
    chat: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0.0, "stream": True}
    *events, last = client.chat.completions.create(**chat, extra_body=field(PROBE))
    found = [event.midstream["scores"]["p"] for event in events if "midstream" in (event.model_extra or {})]
    assert len(last.midstream["scores"]["p"]["positions"]) == 3 == sum(len(one["positions"]) for one in found)
    stream = client.responses.create(
        model="demo", input=FRANCE, max_output_tokens=4, stream=True, temperature=0.0, extra_body=field(PROBE)
    )
    deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert any("midstream" in (event.model_extra or {}) for event in deltas)


def test_a_probe_ends_a_request_on_every_route(client: openai.OpenAI, reference: Reference) -> None:
    """At the token with the highest score; the other choices go on."""
    start, expected = reference.ids(FRANCE).shape[1], expected_scores(reference, FRANCE)
    scores = expected[start:].tolist()
    at = max(range(len(scores)), key=scores.__getitem__)
    probe = {**PROBE, "stop_above": sorted(scores)[-2] / 2 + scores[at] / 2}
    answer = complete(client, FRANCE, field(probe))
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", "probe:p")
    assert answer.usage.completion_tokens == at + 1 and answer.choices[0].text == reference.text(FRANCE, tokens=at + 1)
    assert answer.midstream["stop_reason"] == "probe:p"
    check_scores(answer.midstream["scores"]["p"], expected, list(range(start, start + at + 1)))
    *events, last = complete(client, FRANCE, field(probe), stream=True)
    ends = [event.choices[0] for event in events if event.choices and event.choices[0].finish_reason]
    assert [(end.finish_reason, end.stop_reason) for end in ends] == [("stop", "probe:p")]
    assert "".join(event.choices[0].text for event in events if event.choices) == answer.choices[0].text
    assert last.midstream["scores"] == answer.midstream["scores"]
    always = {**PROBE, "stop_above": -1e9}
    messages: Any = [{"role": "user", "content": FRANCE}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=9, extra_body=field(always))
    assert chat.choices[0].stop_reason == "probe:p" and chat.usage.completion_tokens == 1
    response = client.responses.create(model="demo", input=FRANCE, max_output_tokens=9, extra_body=field(always))
    assert response.midstream["stop_reason"] == "probe:p" and response.usage.output_tokens == 1


def test_small_captures_come_inline_if_asked(server: Server, client: openai.OpenAI) -> None:
    for entry in complete(client, FRANCE, field(CAPTURE, inline=True)).midstream["captures"]:
        inline = torch.frombuffer(bytearray(base64.b64decode(entry["data"])), dtype=torch.float32)
        assert torch.equal(inline.reshape(entry["shape"]), rows(server, entry["handle"]))


def test_a_handle_is_its_owners(server: Server, client: openai.OpenAI) -> None:
    handle = complete(client, FRANCE, field(CAPTURE)).midstream["captures"][0]["handle"]
    path = f"/v1/midstream/captures/{handle}"
    assert len(base64.urlsafe_b64decode(handle + "=")) >= 16
    for method in ("GET", "DELETE"):
        status, body = server.ask(method, path, key=THEIRS)
        assert status == 404 and body["error"]["param"] == "handle"
    assert server.ask("GET", f"/v1/midstream/captures/{handle[:-1]}_", key=MINE)[0] == 404
    assert server.ask("DELETE", path, key=MINE) == (200, {"deleted": handle})
    assert server.ask("GET", path, key=MINE)[0] == 404


def test_what_the_server_cannot_keep_has_no_handle(server: Server, client: openai.OpenAI) -> None:
    plan = {**CAPTURE, "layers": "all"}  # 4 MB for this prompt
    entries = complete(client, [20] * 500, field(plan), max_tokens=1).midstream["captures"]
    kept = [each["handle"] for each in entries if each["handle"] is not None]
    assert 0 < len(kept) < len(entries) == 8
    assert all(rows(server, handle).shape == (500, HIDDEN) for handle in kept)


def test_answers_are_the_log_probabilities_of_transformers(client: openai.OpenAI, reference: Reference) -> None:
    want = torch.log_softmax(reference.logits(reference.ids(FRANCE), steered), -1)
    (token,) = reference.ids(" Rome")[0].tolist()
    for stream in (False, True):
        found = complete(client, FRANCE, field(STEER, answers=[" Rome", 7]), stream=stream)
        answers = (list(found)[-1] if stream else found).midstream["answers"]
        assert answers[" Rome"] == pytest.approx(want[token].item(), abs=1e-3)
        assert answers["7"] == pytest.approx(want[7].item(), abs=1e-3)
    assert len(complete(client, [FRANCE, TOWER], field(answers=[" Rome"])).midstream["answers"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_missing_space_is_warned_of_in_the_response(client: openai.OpenAI, stream: bool) -> None:
    def answered(prompt: Any, *answers: Any) -> dict[str, Any]:
        found = complete(client, prompt, field(answers=[*answers]), stream=stream)
        return (list(found)[-1] if stream else found).midstream

    found = answered(FRANCE, "Paris")
    (text,) = found["warnings"]
    assert text.startswith(
        "answers has 'Paris'. After the prompt the token ' Paris' is more than 1,000,000 times as likely"
    )
    assert list(found["answers"]) == ["Paris"]
    assert "After prompt 0 the token ' Paris' is" in answered([TOWER, FRANCE], "Paris")["warnings"][0]
    for right in ([" Paris"], ["Paris", " Paris"]):
        assert list(answered(FRANCE, *right)) == ["answers"]


# ------------------------------------------------------------------------------------------------- sparse autoencoders


FEATURES = 512


class Autoencoder:
    """A jump-ReLU SAE with random weights, by hand."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = {
            "W_enc": torch.randn(HIDDEN, FEATURES, generator=generator) / 16,
            "W_dec": torch.randn(FEATURES, HIDDEN, generator=generator),
            "b_enc": torch.zeros(FEATURES),
            "b_dec": torch.zeros(HIDDEN),
            "threshold": torch.rand(FEATURES, generator=generator),
        }

    def config(self) -> dict[str, Any]:
        hook = {"hook_name": f"blocks.{LAYER}.hook_resid_post"}
        return {"architecture": "jumprelu", "d_in": HIDDEN, "d_sae": FEATURES, "metadata": hook}

    def acts(self, hidden: torch.Tensor) -> torch.Tensor:
        pre = hidden @ self.weights["W_enc"]
        return pre * (pre > self.weights["threshold"])

    def ablated(self, hidden: torch.Tensor, feature: int) -> torch.Tensor:
        return hidden - self.acts(hidden)[:, feature, None] * self.weights["W_dec"][feature]


@pytest.fixture(scope="module")
def autoencoder() -> Autoencoder:
    return Autoencoder()


def of_sae(do: str, sae: str = "emotions", **options: Any) -> dict[str, Any]:
    return {"kind": "sae", "sae": sae, "do": do, **options}


def test_an_sae_is_uploaded_used_listed_and_deleted(
    server: Server, client: openai.OpenAI, reference: Reference, autoencoder: Autoencoder
) -> None:
    """M4, M6. By JSON alone; its features are streamed, too."""
    from midstream import SAE

    sae = SAE(autoencoder.config(), autoencoder.weights)
    top = of_sae("capture", top_k=5, name="f", positions="all")
    with pytest.raises(openai.BadRequestError, match="the name of an SAE that the server has: there are 'operators'"):
        complete(client, FRANCE, field(top))
    path = "/v1/midstream/saes/emotions"
    status, made = server.ask("POST", path, sae.written(), key=MINE)
    try:
        assert status == 200 and made["saes"]["emotions"]["features"] == FEATURES, made
        assert server.ask("GET", "/v1/midstream/saes")[1]["saes"].keys() == {"operators", "emotions"}
        assert server.ask("DELETE", "/v1/midstream/saes/operators", key=MINE)[0] == 403
        assert server.ask("POST", "/v1/midstream/saes/operators?replace=true", sae.written(), key=MINE)[0] == 403
        assert SAE.read(server.ask("GET", path)[1]).written() == sae.written()
        found = complete(client, FRANCE, field(top)).midstream["scores"]["f"]
        assert complete(client, FRANCE, field({**top, "sae": "operators"})).midstream["scores"]["f"] == found
        text = reference.text(FRANCE)
        ids = reference.ids(FRANCE + text)[0]
        assert reference.tokenizer.decode(ids) == FRANCE + text
        reference.logits(ids[None, :-1])
        acts = autoencoder.acts(reference.streams[LAYER])
        assert found["positions"] == list(range(len(ids) - 1))
        torch.testing.assert_close(torch.tensor(found["scores"]), acts.topk(5).values, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            acts.gather(1, torch.tensor(found["indices"])), acts.topk(5).values, rtol=1e-3, atol=1e-3
        )
        streamed: dict[str, list[Any]] = {"positions": [], "scores": [], "indices": []}
        *events, last = complete(client, FRANCE, field({**top, "positions": "all_generated"}), stream=True)
        for chunk in events:
            for name, values in (getattr(chunk, "midstream", None) or {}).get("scores", {}).get("f", {}).items():
                streamed[name] += values
        first = len(reference.ids(FRANCE)[0])
        assert streamed["indices"] == found["indices"][first:] and streamed["positions"] == found["positions"][first:]
        assert last.midstream["scores"]["f"] == streamed
        feature = int(acts[-1].argmax())
        gate = {
            "kind": "when",
            "probe": of_sae("capture", features=feature),
            "above": 0,
            "then": [of_sae("ablate", feature=feature)],
        }
        for plan in (of_sae("ablate", feature=feature), of_sae("clamp", feature=[feature], high=0.0), gate):
            changed = reference.text(FRANCE, lambda hidden: autoencoder.ablated(hidden, feature))
            assert complete(client, FRANCE, field(plan)).choices[0].text == changed
        direction = autoencoder.weights["W_dec"][7]
        steer = of_sae("steer", feature=7, scale=20.0, phase="both")
        assert complete(client, FRANCE, field(steer)).choices[0].text == reference.text(
            FRANCE, lambda h: h + 20 * direction
        )
        assert server.ask("POST", path, sae.written(), key=THEIRS)[0] == 409
        assert server.ask("POST", f"{path}?replace=true", sae.written(), key=THEIRS)[0] == 403
        assert server.ask("POST", f"{path}?replace=true", sae.written(), key=MINE)[0] == 200
        assert server.ask("DELETE", path, key=THEIRS)[0] == 403
        for wrong, message in SAE_MISTAKES:
            with pytest.raises(openai.BadRequestError, match=message):
                complete(client, FRANCE, field(wrong))
    finally:
        assert server.ask("DELETE", path, key=MINE)[0] == 200
    assert server.ask("DELETE", path, key=MINE)[0] == 404 and server.ask("GET", path)[0] == 404


SAE_MISTAKES = [
    (of_sae("capture", "moods", top_k=5), "did you mean|there are"),
    (of_sae("train"), "do is 'train'; allowed: ablate, capture|do is 'train'"),
    (of_sae("capture", features=[FEATURES]), f"feature is {FEATURES}; allowed: 0 to {FEATURES - 1}"),
    (of_sae("capture", top_k=500), "top_k is 500; allowed: 1 to 32"),
    (of_sae("capture", topk=5), "SAE.capture|Probe"),
    (of_sae("capture", features=1, program={"program": "x"}), "SAE.capture"),
    (of_sae("clamp", feature=1, high="many"), "SAE.clamp: high"),
    (of_sae("clamp", feature=1, high=1.0, site="mlp_out"), "SAE.clamp"),
    (of_sae("steer", feature=1), "SAE.steer"),
    (of_sae("steer", feature=1, scale=2.0, positions=[900]), "positions"),
]


def test_a_plan_of_remote_needs_not_carry_the_matrices_of_a_named_sae(
    server: Server, reference: Reference, autoencoder: Autoencoder
) -> None:
    """They take more than a plan may."""
    from midstream import SAE

    wide = {
        name: torch.cat([each] * 8, -1 if name != "W_dec" else 0)
        for name, each in autoencoder.weights.items()
        if name != "b_dec"
    }
    sae = SAE({**autoencoder.config(), "d_sae": 8 * FEATURES}, {**wide, "b_dec": torch.zeros(HIDDEN)})
    model = Remote(server.url, MINE)
    plan = sae.capture(top_k=8, positions="all_prompt")
    with pytest.raises(PlanError, match="over 4 MiB"):
        model.generate(FRANCE, plan=plan, max_tokens=1)
    model.saes["wide"] = sae
    assert sorted(model.saes) == ["operators", "wide"] and model.saes["wide"].written() == sae.written()
    output = model.generate(FRANCE, plan=[plan, sae.clamp(3, 0.0, 0.5, error_term=False)], max_tokens=1)[0]
    del model.saes["wide"]
    reference.logits(reference.ids(FRANCE))
    acts = autoencoder.acts(reference.streams[LAYER])
    wanted = torch.cat([acts] * 8, 1).topk(8).values
    torch.testing.assert_close(output.scores["sae"], wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(PlanError, match="over 4 MiB"):
        model.generate(FRANCE, plan=plan, max_tokens=1)


def test_an_uploaded_sae_of_normalized_inputs_acts_in_the_units_of_its_encoder(
    server: Server, client: openai.OpenAI, reference: Reference, autoencoder: Autoencoder
) -> None:
    """M4, M6. The decoder's part is multiplied by the standard deviation of the value, from which the encoder's input is made."""
    from midstream import SAE

    weights = autoencoder.weights
    path = "/v1/midstream/saes/emotions"
    sae = SAE({**autoencoder.config(), "normalize_activations": "layer_norm"}, weights)

    def steered(h: torch.Tensor) -> torch.Tensor:
        return h + 20 * h.std(dim=1, keepdim=True) * weights["W_dec"][7]

    def clamped(h: torch.Tensor) -> torch.Tensor:
        std = h.std(dim=1, keepdim=True)
        act = autoencoder.acts((h - h.mean(1, keepdim=True)) / (std + 1e-5))[:, 7, None]
        return h + (act.clamp(min=8.0) - act) * std * weights["W_dec"][7]

    status, made = server.ask("POST", path, sae.written(), key=MINE)
    try:
        assert status == 200, made
        for plan, edit in (
            (of_sae("steer", feature=7, scale=20.0), steered),
            (of_sae("clamp", feature=7, low=8.0), clamped),
        ):
            text = complete(client, FRANCE, field(plan)).choices[0].text
            assert text == reference.text(FRANCE, edit) != reference.text(FRANCE)
        with pytest.raises(openai.BadRequestError, match=r"clamp: low is 500; allowed: up to .* layer_norm normalizes"):
            complete(client, FRANCE, field(of_sae("clamp", feature=7, low=500)))
    finally:
        assert server.ask("DELETE", path, key=MINE)[0] == 200


def test_seeded_prompts_that_fill_several_steps_draw_what_they_draw_alone(server: Server, reference: Reference) -> None:
    """The prompts of one request are over what a step takes, so vLLM splits some. On its CPU build that ended the server."""
    ids = reference.ids("The capital of France is Paris. The capital of Italy is Rome. ")[0].tolist()
    prompts = [(ids[i % len(ids) :] + ids * 50)[: 480 + i] for i in range(16)]
    assert sum(map(len, prompts)) > 2 * 2048
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 6}
    status, found = server.complete(prompts, **seeded)
    assert status == 200, found
    together = [choice["text"] for choice in found["choices"]]
    assert server.is_healthy()
    for i in (0, 4, 9, 15):
        status, found = server.complete(prompts[i], **seeded)
        assert status == 200 and found["choices"][0]["text"] == together[i]
    assert len(set(together)) > 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"nonsense", "is no SAE"),
        (save({"a": torch.ones(2, 3)}), "is no SAE"),
        (save({"a": torch.ones(2)}, {"midstream-sae": "[3, 4, 5]"}), "SAE.config is 3"),
        (
            save({"a": torch.ones(2)}, {"midstream-sae": '[{"architecture": "dense"}, "resid_post", 1]'}),
            "SAE.architecture",
        ),
        *(
            (
                save(
                    {"a": torch.ones(2)},
                    {
                        "midstream-sae": json.dumps(
                            [{**Autoencoder().config(), "normalize_activations": norm}, None, None]
                        )
                    },
                ),
                f"SAE.normalize_activations is '{norm}'; allowed: 'none' or 'constant_norm_rescale' or 'layer_norm', since",
            )
            for norm in ("expected_average_only_in", "covariance_whitening")
        ),
    ],
)
def test_what_is_no_sae_is_refused(server: Server, body: bytes, message: str) -> None:
    status, found = server.ask("POST", "/v1/midstream/saes/a", body, key=MINE)
    assert status == 400 and message in found["error"]["message"], found
    assert list(server.ask("GET", "/v1/midstream/saes")[1]["saes"]) == ["operators"]


def scores_in_metrics(server: Server, name: str) -> tuple[dict[str, float], float]:
    """The number of scores at or below each bound, and the number of stops."""
    lines = [line for line in server.ask("GET", "/metrics")[1].splitlines() if f'probe="{name}"' in line]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    counts = {re.findall(r'le="(.*?)"', key)[0]: value for key, value in values.items() if "_bucket" in key}
    return counts, next(value for key, value in values.items() if "stops_total" in key)


def test_a_monitor_scores_every_request_and_may_end_it(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    """M6. Its scores are in the metrics and in nobody's response."""
    start, expected = reference.ids(FRANCE).shape[1], expected_scores(reference, FRANCE)
    scores = expected[start:].tolist()
    monitor = {**PROBE, "name": "monitor"}
    body = json.dumps({"plan": [monitor]}).encode()
    assert server.ask("PUT", "/v1/midstream/plan", body, key=MINE)[0] == 403
    assert server.ask("PUT", "/v1/midstream/plan", body, admin=ADMIN)[0] == 200
    remote = Remote(server.url, THEIRS)
    try:
        answer = complete(client, FRANCE)
        assert answer.choices[0].text == reference.text(FRANCE) and "midstream" not in (answer.model_extra or {})
        counts, stops = scores_in_metrics(server, "monitor")
        assert counts["+Inf"] == TOKENS - 1 and stops == 0
        wanted = {bound: sum(score <= float(bound) for score in scores) for bound in counts}
        assert counts == wanted and len(set(counts.values())) > 2
        own = complete(client, FRANCE, field({**PROBE, "name": "mine"}), n=2, temperature=1.0, seed=1).midstream[
            "scores"
        ]
        assert [list(each) for each in own] == [["mine"], ["mine"]]
        output = remote.generate(FRANCE, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)[0]
        assert not output.scores and not output.outputs[0].scores
        assert "".join(e.choices[0].text for e in complete(client, FRANCE, stream=True)) == reference.text(FRANCE)
        assert scores_in_metrics(server, "monitor")[0]["+Inf"] == 5 * (TOKENS - 1)
        with pytest.raises(openai.BadRequestError, match=r"Probe\.name is 'monitor', as a probe of the server's"):
            complete(client, FRANCE, field(monitor))
        with pytest.raises(PlanError, match=r"Probe\.name is 'monitor', as a probe of the server's"):
            remote.generate(FRANCE, plan=Probe("resid_post", layer=2, weight=VECTOR, name="monitor"), max_tokens=1)
        at = max(range(len(scores)), key=scores.__getitem__)
        stopping = {**monitor, "stop_above": sorted(scores)[-2] / 2 + scores[at] / 2}
        assert server.ask("PUT", "/v1/midstream/plan", json.dumps({"plan": [stopping]}).encode(), admin=ADMIN)[0] == 200
        for stopped in (
            complete(client, FRANCE).choices[0],
            complete(client, FRANCE, field(STEER | {"scale": 0.0})).choices[0],
        ):
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "probe:monitor")
            assert stopped.text == reference.text(FRANCE, tokens=at + 1)
        early = {**monitor, "positions": "last_prompt", "stop_above": -1e6}
        assert server.ask("PUT", "/v1/midstream/plan", json.dumps({"plan": [early]}).encode(), admin=ADMIN)[0] == 200
        for stream in (
            complete(client, FRANCE, stream=True),
            complete(client, FRANCE, field({**STEER, "scale": 0.0}), stream=True),
        ):
            (end,) = [choice for event in stream for choice in event.choices if choice.finish_reason]
            assert (end.text, end.finish_reason, end.stop_reason) == ("", "stop", "probe:monitor")
        messages: Any = [{"role": "user", "content": FRANCE}]
        chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=2, stream=True)
        (end,) = [choice for event in chat for choice in event.choices if choice.finish_reason]
        assert (end.delta.content, end.finish_reason, end.stop_reason) == (None, "stop", "probe:monitor")
        response = client.responses.create(model="demo", input=FRANCE, max_output_tokens=2)
        assert response.midstream["stop_reason"] == "probe:monitor" and not response.output_text
        assert server.ask("PUT", "/v1/midstream/plan", json.dumps({"plan": [stopping]}).encode(), admin=ADMIN)[0] == 200
        ended = remote.generate(FRANCE, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)[0].outputs[0]
        assert ended.stop_reason == "probe:monitor" and len(ended.token_ids) == at + 1
        assert complete(client, TOWER).choices[0].finish_reason in ("stop", "length")
        assert scores_in_metrics(server, "monitor")[1] >= 3
        for wrong in ([{**PROBE, "weight": [[1.0, 2.0]] * HIDDEN}], [CAPTURE]):
            assert server.ask("PUT", "/v1/midstream/plan", json.dumps({"plan": wrong}).encode(), admin=ADMIN)[0] == 400
    finally:
        assert server.ask("DELETE", "/v1/midstream/plan", admin=ADMIN)[0] == 200
        remote.close()
    seen = scores_in_metrics(server, "monitor")
    assert complete(client, FRANCE).choices[0].text == reference.text(FRANCE)
    assert scores_in_metrics(server, "monitor") == seen


def test_one_keys_hostile_plans_do_not_hold_up_another_keys_steer(server: Server) -> None:
    """F6. Seen before: 27 KiB made another key's request with one steer wait for 37 s."""
    over, refused = threading.Event(), list[int]()

    def unbinds(number: int) -> dict[str, Any]:
        steps: list[Any] = [["full.default", [[{"rows": 1}, 1000 - number % 200, 0], 0.0]]]
        steps += [["unbind.int", [{"step": 0}, 1]]] * 250
        given = {"width": HIDDEN, "dtype": "float32", "result": {"input": True}, "constants": [], "steps": steps}
        edit = {"kind": "apply", "site": "resid_post", "layers": [0], "program": {"program": "x"}}
        return {"interventions": [edit], "programs": {"x": given}}

    def attack(numbers: Iterator[int]) -> None:
        while not over.is_set():
            more = {"midstream": {"plan": unbinds(next(numbers))}}
            status, body = server.post("/v1/completions", {"model": "demo", "prompt": "The", **more}, key=THEIRS)
            assert status == 400 and "results" in json.dumps(body), body
            refused.append(status)

    with ThreadPoolExecutor(6) as pool:
        attackers = [pool.submit(attack, itertools.count(50 * i)) for i in range(6)]
        try:

            def wait() -> float:
                began = time.monotonic()
                body = {"model": "demo", "prompt": "The", "max_tokens": 1, "midstream": {"plan": [STEER]}}
                assert server.post("/v1/completions", body, key=MINE)[0] == 200
                return time.monotonic() - began

            assert least(wait, 1.0, attempts=10) < 1.0
        finally:
            over.set()
        for attacker in attackers:
            attacker.result(60)
    assert refused


def test_mutated_bodies_with_probes_gates_and_saes_leave_neighbours_equal(server: Server) -> None:
    """M7. A plain prompt that runs beside them all the time has the same answer. `MIDSTREAM_FUZZ=10000` sends more of them."""
    probe = {**PROBE, "positions": "all", "stop_above": 30.0, "aggregate": "mean"}
    edits = [STEER, {"kind": "clamp", "site": "mlp_out", "layers": [5], "direction": VECTOR.tolist(), "high": 1.0}]
    feature = of_sae("capture", "operators", features=[3, 9], name="f")
    good = [
        [probe, {**PROBE, "name": "q", "layer": 6, "bias": 0.5, "activation": "sigmoid"}],
        [{"kind": "when", "probe": {**PROBE, "layer": 2}, "above": -1.0, "below": 5.0, "then": edits}, probe],
        [
            feature,
            of_sae("capture", "operators", top_k=8, name="t"),
            of_sae("steer", "operators", feature=2, scale=3.0),
        ],
        [of_sae("clamp", "operators", feature=[3, 4], low=0.0, high=1.0, error_term=False), PROBE],
        [
            {
                "kind": "when",
                "probe": {**feature, "features": 3},
                "above": 0,
                "then": of_sae("ablate", "operators", feature=9),
            }
        ],
    ]
    count, over = int(os.environ.get("MIDSTREAM_FUZZ", "300")), threading.Event()
    plain = {"model": "demo", "prompt": TOWER, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    def neighbour() -> set[str]:
        answers = set()
        while not over.is_set():
            status, found = server.post("/v1/completions", plain, key=MINE)
            answers.add(found["choices"][0]["text"] if status == 200 else str(found))
        return answers

    def send_one(seed: int) -> int:
        rng = random.Random(seed)
        body = {**plain, "prompt": FRANCE, "max_tokens": rng.randint(1, 6), "stream": rng.random() < 0.3}
        body["midstream"] = {"plan": mutated(rng, rng.choice(good)) if rng.random() < 0.9 else rng.choice(good)}
        return server.post("/v1/completions", json.dumps(body, allow_nan=True).encode(errors="replace"), key=THEIRS)[0]

    before = server.post("/v1/completions", plain, key=MINE)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(9) as pool:
        answers = pool.submit(neighbour)
        try:
            statuses = list(pool.map(send_one, range(count)))
        finally:
            over.set()
        assert answers.result() == {before}
    assert set(statuses) <= {200, 400, 413, 422} and statuses.count(200) > count // 10, {
        s: statuses.count(s) for s in set(statuses)
    }
    gauges = server.ask("GET", "/v1/midstream/gauges", key=MINE)[1]
    assert gauges["server"]["running_prompts"] == 0 and not any(worker["requests"] for worker in gauges["workers"]), (
        gauges
    )
    print({status: statuses.count(status) for status in set(statuses)})


# -------------------------------------------------------------------------------------------------------------- vectors


def test_named_vectors_are_uploaded_used_listed_and_deleted(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    by_name = {**STEER, "vector": "calm"}
    with pytest.raises(openai.BadRequestError, match="no vector 'calm'"):
        complete(client, FRANCE, field(by_name))
    file = save({"calm": torch.as_tensor(VECTOR, dtype=torch.float32)})
    status, made = server.ask("POST", "/v1/midstream/vectors", file, key=MINE)
    try:
        assert status == 200 and made["vectors"]["calm"]["width"] == HIDDEN
        assert server.ask("GET", "/v1/midstream/vectors")[1] == made
        held = server.ask("GET", "/v1/midstream/vectors/calm")[1]
        assert np.allclose(load(held)["calm"].numpy(), VECTOR)
        assert complete(client, FRANCE, field(by_name)).choices[0].text == reference.text(FRANCE, steered)
        status, body = server.ask("POST", "/v1/midstream/vectors", file, key=THEIRS)
        assert status == 409 and "is there already" in body["error"]["message"]
        assert server.ask("DELETE", "/v1/midstream/vectors/calm", key=THEIRS)[0] == 403
        body = json.dumps({"plan": [by_name]}).encode()
        assert server.ask("PUT", "/v1/midstream/plan", body, admin=ADMIN)[0] == 200
        assert server.ask("DELETE", "/v1/midstream/vectors/calm", key=MINE)[0] == 409
        assert server.ask("DELETE", "/v1/midstream/plan", admin=ADMIN)[0] == 200
    finally:
        assert server.ask("DELETE", "/v1/midstream/vectors/calm", key=MINE)[0] == 200
    assert server.ask("DELETE", "/v1/midstream/vectors/calm", key=MINE)[0] == 404
    with pytest.raises(openai.BadRequestError, match="no vector 'calm'"):
        complete(client, FRANCE, field(by_name))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"nonsense", "not a safetensors file"),
        (save({"a": torch.ones(2, 3)}), "allowed"),
        (save({"a": torch.ones(3, dtype=torch.int32)}), "floating dtype"),
        (save({"a": torch.full((3,), float("nan"))}), "finite"),
        (b"", "not a safetensors file"),
    ],
)
def test_what_is_no_file_of_vectors_is_refused(server: Server, body: bytes, message: str) -> None:
    status, found = server.ask("POST", "/v1/midstream/vectors", body, key=MINE)
    assert status == 400 and message in found["error"]["message"], found
    assert server.ask("GET", "/v1/midstream/vectors")[1] == {"vectors": {}}


NO_NAMES = ["a\nb", "a\x00b", "a\u2028b", "\u202eb", "../b", "a/./b", "x" * 257]


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_names_have_one_printable_line(server: Server, name: str) -> None:
    """Others could not be listed in a line, or deleted: clients and proxies resolve `..` in a URL."""
    status, found = server.ask("POST", "/v1/midstream/vectors", save({name: torch.ones(HIDDEN)}), key=MINE)
    assert status == 400 and ("printable" in found["error"]["message"] or "characters" in found["error"]["message"])
    record = {"prompt": FRANCE, "sites": ["resid_post"], "name": name}
    status, found = server.post("/v1/midstream/runs", record, key=MINE)
    assert status == 400 and found["error"]["param"] == "name", found
    assert server.ask("GET", "/v1/midstream/vectors")[1] == {"vectors": {}}
    assert server.ask("GET", "/v1/midstream/runs")[1] == {"runs": {}}


@pytest.mark.parametrize("name", ["a b", "é/ü", "%2e%2e", "?x=1#y", "'\"<&>", "a//b", "...", "日本"])
def test_whatever_is_stored_can_be_read_and_deleted(server: Server, name: str) -> None:
    assert server.ask("POST", "/v1/midstream/vectors", save({name: torch.ones(HIDDEN)}), key=MINE)[0] == 200
    at = f"/v1/midstream/vectors/{urllib.parse.quote(name, safe='')}"
    assert list(load(server.ask("GET", at)[1])) == [name]
    assert server.ask("DELETE", at, key=MINE)[0] == 200
    record = {"prompt": FRANCE, "sites": ["resid_post"], "layers": [1], "name": name}
    assert server.post("/v1/midstream/runs", record, key=MINE)[0] == 200
    at = f"/v1/midstream/runs/{urllib.parse.quote(name, safe='')}"
    assert server.ask("DELETE", at, key=MINE)[0] == 200


def test_no_key_fills_all_places_for_vectors(server: Server) -> None:
    """Each finds at least as much room as any other holds."""

    def uploaded(key: str, count: int) -> int:
        file = save({f"{key}/{i}": torch.ones(HIDDEN) for i in range(count)})
        return int(server.ask("POST", "/v1/midstream/vectors", file, key=key)[0])

    most = server.ask("GET", "/v1/midstream/capabilities")[1]["limits"]["vectors"]
    held: dict[str, int] = {}
    try:
        for key, count in ((MINE, most // 2), (THEIRS, most // 4), ("third", most // 8)):
            held[key] = count
            assert uploaded(key, count) == 200
            status, found = server.ask("POST", "/v1/midstream/vectors", save({"more": torch.ones(HIDDEN)}), key=key)
            assert status == 413 and "no more than it leaves" in found["error"]["message"], found
    finally:
        with ThreadPoolExecutor(8) as pool:
            for key, count in held.items():
                paths = [f"/v1/midstream/vectors/{key}%2F{i}" for i in range(count)]
                assert set(pool.map(lambda path: server.ask("DELETE", path, admin=ADMIN)[0], paths)) == {200}


def test_two_keys_that_fill_all_they_can_leave_a_third_served(server: Server) -> None:
    """With captures, sweeps, and uploads that stop on their way: what the third asks for is answered, and soon."""
    capture = {"plan": [{**CAPTURE, "positions": "all"}]}
    long = {
        "clean": [TOWER + " and" * 60] * 8,
        "corrupt": [FRANCE + " and" * 60] * 8,
        "answer": " Paris",
        "foil": " Rome",
    }
    sweep = {**long, "positions": "together", "sites": ["resid_post", "mlp_out", "attn_out"], "layers": "all"}
    over, opened, sweeps = threading.Event(), [], []

    def fill(key: str) -> None:
        while not over.is_set():
            body = {"model": "demo", "prompt": TOWER, "max_tokens": 64, "midstream": capture}
            server.post("/v1/completions", body, key=key)

    def drain(response: Any) -> None:
        with response, contextlib.suppress(OSError, http.client.HTTPException):
            while not over.is_set() and response.readline():
                pass

    threads = [threading.Thread(target=fill, args=(key,)) for key in (MINE, THEIRS) for _ in range(2)]
    try:
        for key in (MINE, THEIRS):
            head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            for _ in range(4):
                given = urllib.request.Request(f"{server.url}/v1/midstream/sweeps", json.dumps(sweep).encode(), head)
                sweeps.append(urllib.request.urlopen(given, timeout=60))
            assert server.post("/v1/midstream/sweeps", sweep, key=key)[0] == 503
            for _ in range(3):
                stalled = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
                stalled.putrequest("POST", "/v1/midstream/vectors")
                for name, value in {**head, "Content-Length": str(60 << 20)}.items():
                    stalled.putheader(name, value)
                stalled.endheaders()
                with contextlib.suppress(OSError):  # refused on the way
                    stalled.send(b"x" * (50 << 20))
                opened.append(stalled)
        threads += [threading.Thread(target=drain, args=(each,)) for each in sweeps]
        for thread in threads:
            thread.start()
        time.sleep(2)
        assert server.ask("GET", "/v1/midstream/gauges", key=MINE)[1]["server"]["sweeps"] == 8
        third, began = "the-third", time.monotonic()
        assert (
            server.ask("POST", "/v1/midstream/vectors", save({"of the third": torch.ones(HIDDEN)}), key=third)[0] == 200
        )
        record = {"prompt": FRANCE, "sites": ["resid_post"], "layers": [1], "name": "of the third"}
        assert server.post("/v1/midstream/runs", record, key=third)[0] == 200
        body = {"model": "demo", "prompt": FRANCE, "max_tokens": 1, "midstream": capture}
        status, found = server.post("/v1/completions", body, key=third)
        assert status == 200
        for entry in found["midstream"]["captures"]:
            assert server.ask("GET", f"/v1/midstream/captures/{entry['handle']}", key=third)[0] == 200
        small = {
            "clean": FRANCE,
            "corrupt": "The capital of Italy is",
            "answer": " Paris",
            "foil": " Rome",
            "layers": [3],
        }
        status, text = server.post("/v1/midstream/sweeps", small, key=third)
        assert status == 200 and "summary" in text
        assert time.monotonic() - began < 60
    finally:
        over.set()
        for each in opened:
            each.close()
        for thread in threads:
            thread.join(60)
        for each in sweeps:  # also those that no thread came to read
            each.close()
        for what in ("vectors", "runs"):
            server.ask("DELETE", f"/v1/midstream/{what}/of%20the%20third", admin=ADMIN)
        # The server sees a little later that the sweeps' clients have gone, and then removes their runs.
        wait_until(lambda: not server.ask("GET", "/v1/midstream/runs")[1]["runs"], 60)


# ------------------------------------------------------------------------------------------- runs, the engine-wide plan


def test_a_recorded_run_is_the_source_of_patches_by_its_name(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    country, target = 3, "The capital of Italy is"
    reference.logits(reference.ids(FRANCE))
    source = reference.streams[LAYER][country]

    def patched(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:country], source[None], hidden[country + 1 :]])

    patch = {"kind": "patch", "site": "resid_post", "layer": LAYER, "position": country}
    patch |= {"source": {"run": "clean"}, "source_position": country}
    record = {"prompt": FRANCE, "sites": ["resid_post"], "name": "clean"}
    assert reference.text(target, patched) != reference.text(target)
    with pytest.raises(openai.BadRequestError, match="'clean'"):
        complete(client, target, field(patch))
    status, found = server.post("/v1/midstream/runs", record, key=MINE)
    assert status == 200 and found["runs"]["clean"]["sites"] == ["resid_post"], found
    assert set(server.ask("GET", "/v1/midstream/runs")[1]["runs"]) == {"clean"}
    assert complete(client, target, field(patch)).choices[0].text == reference.text(target, patched)
    with pytest.raises(
        openai.BadRequestError, match=r"source_position is one position, and .* is 2 tokens, at \[1, 2\]"
    ):
        complete(client, target, field(patch | {"position": {"span": "capital of"}}))
    status, found = server.post("/v1/midstream/runs", record, key=THEIRS)
    assert status == 409 and "is there already" in found["error"]["message"]
    assert server.ask("DELETE", "/v1/midstream/runs/clean", key=THEIRS)[0] == 403
    assert server.ask("DELETE", "/v1/midstream/runs/clean", key=THEIRS, admin=ADMIN)[0] == 200
    assert server.ask("GET", "/v1/midstream/runs")[1] == {"runs": {}}
    with pytest.raises(openai.BadRequestError, match="'clean'"):
        complete(client, target, field(patch))


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"sites": ["resid"]}, "sites", "resid_post"),
        ({"sites": []}, "sites", "sites is empty"),
        ({"layers": [99]}, "layers", "99"),
        ({"layers": 5}, "body.layers", "valid"),
        ({"positions": [77]}, "positions", "77"),
        ({"positions": {"span": "Italy"}}, "positions", "Italy"),
        ({"prompt": ""}, "prompt", "token"),
        ({"prompt": [10**9]}, "prompt", ""),
        ({"prompt": [20] * 600}, "prompt", "up to 511 tokens"),
        ({"prompt": "a b " * 100_000}, "prompt", "has at most"),
        ({"path": "/tmp/x"}, "body.path", "path"),
        ({"name": "a" * 300}, "name", "256"),
    ],
)
def test_a_run_that_cannot_be_recorded_is_refused(server: Server, change: Any, param: str, message: str) -> None:
    record = {"prompt": FRANCE, "sites": ["resid_post"], "name": "clean", **change}
    status, found = server.post("/v1/midstream/runs", record, key=MINE)
    assert status == 400 and found["error"]["param"] == param and message in json.dumps(found), found
    assert server.ask("GET", "/v1/midstream/runs")[1] == {"runs": {}}


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [
        ("POST", "runs", 8 << 20),
        ("PUT", "plan", 8 << 20),
        ("POST", "vectors", 64 << 20),
        ("POST", "saes/a", 128 << 20),
        ("POST", "generate", 64 << 20),
    ],
)
def test_a_body_that_is_too_large_is_refused(server: Server, method: str, path: str, limit: int) -> None:
    status, found = server.ask(method, f"/v1/midstream/{path}", bytes(limit + 1), key=MINE, admin=ADMIN)
    assert status == 413 and f"over {limit >> 20} MiB" in found["error"]["message"], found


def test_the_engine_wide_plan_is_the_administrators_and_comes_before_each_requests_own(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    path, body = "/v1/midstream/plan", json.dumps({"plan": [STEER]}).encode()
    for admin in ("", "guessed"):
        assert server.ask("PUT", path, body, key=MINE, admin=admin)[0] == 403
        assert server.ask("DELETE", path, key=MINE, admin=admin)[0] == 403
    assert server.ask("PUT", path, json.dumps({"plan": [CAPTURE]}).encode(), admin=ADMIN)[0] == 400
    assert server.ask("PUT", path, b"{}{", admin=ADMIN)[0] == 400
    assert server.ask("PUT", path, body, admin=ADMIN)[0] == 200
    try:
        assert len(server.ask("GET", path)[1]["plan"]["interventions"]) == 1
        changed = reference.text(FRANCE, steered)
        assert complete(client, FRANCE).choices[0].text == changed
        assert "".join(c.choices[0].text for c in complete(client, FRANCE, stream=True)) == changed
        twice = complete(client, FRANCE, field(STEER))
        assert twice.choices[0].text == reference.text(FRANCE, lambda hidden: steered(steered(hidden)))
    finally:
        assert server.ask("DELETE", path, admin=ADMIN)[0] == 200
    assert complete(client, FRANCE).choices[0].text == reference.text(FRANCE)


# --------------------------------------------------------------------------------------------------------------- errors

MISTAKES: dict[
    str, tuple[dict[str, Any], str, str]
] = {  # the body beside model and prompt; param; a part of the message
    "an unknown site": (field({**STEER, "site": "resid"}), "midstream.plan[0]", "resid_post"),
    "an unknown kind": (field({**STEER, "kind": "steeer"}), "midstream.plan[0].kind", "steer"),
    "an unknown key": (field({**STEER, "scales": 2}), "midstream.plan[0]", "scale"),
    "a layer that is not there": (field({**STEER, "layers": [99]}), "midstream.plan", "7"),
    "a head that is not there": (field({**HEAD, "head": 4}), "midstream.plan", "Steer.head is 4; allowed: 0 to 3"),
    "a head that is no number": (field({**HEAD, "head": "3"}), "midstream.plan[0]", "Steer.head is '3'"),
    "a head of a site without heads": (
        field({**STEER, "head": 3}),
        "midstream.plan[0]",
        "Steer.head is 3 at resid_post",
    ),
    "captures of two heads": (
        field(*({"kind": "capture", "site": "attn_z", "head": head} for head in (1, 2))),
        "midstream.plan",
        "the heads 1 and 2",
    ),
    "a vector of another width": (field({**STEER, "vector": [1.0]}), "midstream.plan", "256"),
    "a vector that is not there": (field({**STEER, "vector": "calm"}), "midstream.plan", "there are none"),
    "a position beyond the prompt": (
        field({"kind": "patch", "site": "resid_post", "layer": 1, "position": 99, "source": {"zeros": True}}),
        "midstream.plan",
        "the prompt has 5 tokens",
    ),
    "a probe of another width": (field({**PROBE, "weight": [1.0]}), "midstream.plan", "of width 1; allowed: 256"),
    "a probe without a name": (field({k: v for k, v in PROBE.items() if k != "name"}), "midstream.plan[0]", "name"),
    "a threshold that is no number": (
        field({**PROBE, "stop_above": "high"}),
        "midstream.plan[0]",
        "a finite number",
    ),
    "probes of one name": (field(PROBE, PROBE), "midstream.plan", "'p' of two probes"),
    "65 probes": (field(*({**PROBE, "name": f"p{i}"} for i in range(65))), "midstream.plan", "up to 64"),
    "too many scores": (
        field(*({**PROBE, "name": f"p{i}", "weight": np.ones((HIDDEN, 64)).tolist()} for i in range(5)))
        | {"max_tokens": 400},
        "midstream.plan",
        "scores; allowed: up to 65536",
    ),
    "too many scores of all choices": (
        field({**PROBE, "weight": np.ones((HIDDEN, 64)).tolist()}) | {"max_tokens": 100, "n": 16, "temperature": 1.0},
        "midstream.plan",
        "102400 scores; allowed: up to 65536",
    ),
    "a path": (field({**CAPTURE, "to": "/tmp/x"}), "midstream.plan[0].to", "may not name where the engine writes"),
    "a consumer": (field({**CAPTURE, "to": {"consumer": "log"}}), "midstream.plan[0].to", "may not name where"),
    "a digest": (
        field({**STEER, "vector": {"named": "calm", "digest": "0" * 32}}),
        "midstream.plan[0].vector.digest",
        "may not say what the engine has",
    ),
    "a field of midstream's own clients": (
        {"midstream": {"plan": [], "record": ["id", "name"]}},
        "midstream",
        "record",
    ),
    "code": ({"midstream": {"trace": {"programs": "gASV"}}}, "midstream", "trace"),
    "a packed vector of another shape": (
        field({**STEER, "vector": {"data": "AAAAAA==", "dtype": "float32", "shape": [2]}}),
        "midstream.plan[0].vector.shape",
        "[1]",
    ),
    "no base64": (
        field({**STEER, "vector": {"data": "?", "dtype": "float32", "shape": [2]}}),
        "midstream.plan[0].vector.data",
        "base64",
    ),
    "an answer of several tokens": (field(answers=["Constantinople and Rome"]), "midstream.answers", "tokens"),
    "an answer of many tokens": (field(answers=["a b " * 100_000]), "midstream.answers", "of up to 256 characters"),
    "answers that are no list": (field(answers=" Paris"), "midstream.answers", "a list"),
    "answers beside logprobs": (
        {**field(answers=[" Paris"]), "logprobs": 2},
        "midstream.answers",
        "leave logprobs out",
    ),
    "an unknown field": ({"midstream": {"plans": []}}, "midstream", "did you mean 'plan'"),
    "a misspelt field": ({"midstraem": {"plan": []}}, "midstraem", "did you mean 'midstream'"),
    "no JSON": ({"midstream": "{"}, "midstream", "not JSON"),
    "a plan given twice": ({**field(STEER), "vllm_xargs": {"midstream": "{}"}}, "midstream", "given twice"),
    "beam search": ({**field(STEER), "use_beam_search": True, "n": 2}, "midstream", "use_beam_search"),
    "too many edits": (field(*[STEER | {"vector": [0.5] * HIDDEN}] * 1025), "midstream.plan", "up to 1024"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_every_mistake_is_a_400_that_names_its_field(server: Server, stream: bool) -> None:
    before = server.complete(FRANCE, logprobs=3)
    for name, (body, param, message) in MISTAKES.items():
        if stream and name == "beam search":
            continue
        status, found = server.complete(FRANCE, **body, stream=stream)
        assert status == 400, (name, found)
        error = found["error"]
        assert error["param"] == param and message in error["message"], (name, error)
        assert "parameter=" not in error["message"]
    after = server.complete(FRANCE, logprobs=3)
    assert after[0] == 200 and after[1]["choices"] == before[1]["choices"]


@pytest.mark.parametrize("path", ["/v1/midstream/vectors", "/v1/midstream/runs", "/v1/messages"])
def test_a_client_that_leaves_during_an_upload_is_no_error_of_the_server(server: Server, path: str) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plug:
        plug.sendall(request("POST", path, b'{"prompt": "', length=1000))
        time.sleep(0.5)
    time.sleep(0.5)
    assert server.is_healthy() and "ClientDisconnect" not in server.log.read_text()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions/batch", "/tokenize", "/inference/v1/generate"])
def test_a_route_that_takes_no_plan_says_so(server: Server, path: str) -> None:
    messages: list[Any] = [{"role": "user", "content": FRANCE}]
    messages = [messages] if path.endswith("/batch") else messages
    body = {"model": "demo", "prompt": FRANCE, "messages": messages, "max_tokens": 2, "token_ids": [20, 30]}
    given = json.dumps({**body, "midstream": {"plan": [STEER]}})
    elsewhere = json.dumps({**body, "sampling_params": {"midstream": [STEER]}})
    for data in (
        given.encode(),
        given.replace("midstream", "mid\\u0073tream").encode(),
        given.encode("utf-16"),
        elsewhere.encode(),
    ):
        status, found = server.ask("POST", path, data)
        assert status == 400 and found["error"]["param"] == "midstream" and path in found["error"]["message"], data
    if "messages" in path:
        xargs = {"midstream": json.dumps([STEER])}
        assert server.post(path, {**body, "vllm_xargs": xargs})[0] == 400


def test_routes_that_no_api_key_guards_take_no_plan(server: Server) -> None:
    body = {"model": "demo", "prompt": FRANCE, "max_tokens": 2}
    assert server.post("/invocations", body)[0] == 200
    for more in ({"midstream": {"plan": [STEER]}}, {"vllm_xargs": {"midstream": json.dumps([STEER])}}):
        status, found = server.post("/invocations", {**body, **more})
        assert status == 400 and "no plan" in found["error"]["message"], found


def test_of_two_recordings_of_one_name_one_is_refused(server: Server) -> None:
    record = {"prompt": FRANCE, "sites": ["resid_post"], "name": "twice"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda key: server.post("/v1/midstream/runs", record, key=key)[0], "abcd"))
    owner = "abcd"[answers.index(200)]
    assert sorted(answers) == [200, 409, 409, 409]
    assert server.ask("DELETE", "/v1/midstream/runs/twice", key=owner)[0] == 200


def test_sampling_parameters_as_they_are_carry_edits_and_nothing_else(server: Server) -> None:
    """`/inference/v1/generate` takes SamplingParams whole, `extra_args` included."""

    def tokens(plan: Any) -> tuple[int, Any]:
        return server.generate([20, 30, 40], extra_args={"midstream": plan})

    plain = server.generate([20, 30, 40])[1]["choices"][0]["token_ids"]
    status, found = tokens({"plan": [STEER]})
    assert status == 200 and found["choices"][0]["token_ids"] != plain
    for plan, message in (
        ([CAPTURE], "returns no captures"),
        ({"plan": [STEER], "answers": [7]}, "no answers"),
        ([{**CAPTURE, "to": "/tmp/x"}], "may not name where the engine writes"),
        ({"plan": [], "capture": ["id", 0]}, "capture"),
        ({"plan": [], "checked": True}, "checked"),
        ({"trace": {"programs": "gASV"}}, "trace"),
    ):
        status, found = tokens(plan)
        assert status == 400 and message in json.dumps(found), (plan, found)
    assert server.generate([20, 30, 40])[1]["choices"][0]["token_ids"] == plain


def test_an_overflow_ends_its_own_request_alone(server: Server, client: openai.OpenAI, reference: Reference) -> None:
    huge = {**STEER, "vector": [1e38] * HIDDEN, "scale": 1e38}
    with pytest.raises(openai.BadRequestError, match="resid_post of layer 3"):
        complete(client, FRANCE, field(huge))
    with pytest.raises(openai.APIError, match="resid_post of layer 3"):
        list(complete(client, FRANCE, field(huge, CAPTURE), stream=True))
    assert complete(client, FRANCE).choices[0].text == reference.text(FRANCE)


def test_a_program_with_indices_that_nothing_bounds_is_refused(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    """On every way in. Seen ending the engine while the rule for gather served scatter_add, too."""
    edit = Apply("resid_post", layers=LAYER, program=trusting_program(HIDDEN))
    plan = json.loads(Plan.of(edit).to_json())
    for body in ({"midstream": plan}, {"vllm_xargs": {"midstream": json.dumps(plan)}}):
        with pytest.raises(openai.BadRequestError, match=r"gather\.default: its indices may lie outside"):
            complete(client, FRANCE, body)
    status, found = server.generate([20, 30, 40], extra_args={"midstream": plan})
    assert status == 400 and "its indices may lie outside" in json.dumps(found), found
    assert complete(client, FRANCE).choices[0].text == reference.text(FRANCE)


# ------------------------------------------------------------------------------------------------------------------ load


def test_an_answer_that_cannot_come_is_null(client: openai.OpenAI) -> None:
    body = {**field(answers=[5]), "structured_outputs": {"choice": [" Paris", " Rome"]}}
    assert complete(client, FRANCE, body).midstream["answers"] == {"5": None}
    assert list(complete(client, FRANCE, body, stream=True))[-1].midstream["answers"] == {"5": None}


def test_capabilities_name_the_model_its_sites_and_the_limits(server: Server) -> None:
    status, found = server.ask("GET", "/v1/midstream/capabilities")
    assert status == 200 and found["num_layers"] == 8 and found["hidden_size"] == HIDDEN
    assert found["sites"]["resid_post"] == {"width": HIDDEN, "layers": list(range(8))}
    assert {"steer", "patch", "clamp", "capture"} <= set(found["kinds"])
    assert found["limits"]["plan_edits"] == 1024


def test_a_server_without_the_switch_takes_no_code(server: Server, tmp_path: Path) -> None:
    """It does not even unpickle it. On a server with the switch the same call runs: tests/engine/test_serve_remote.py."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    programs = bytes(sys.version_info[:2]) + pickle.dumps([[Bomb()]])
    call = {
        "version": metadata.version("midstream"),
        "asked": [{"prompt": FRANCE, "params": {"max_tokens": 1}}],
        **{"programs": programs, "bodies": [1], "keeps_to_graphs": [True]},
    }
    status, answer = server.post("/v1/midstream/generate", msgspec.msgpack.encode(call))
    assert (status, answer["error"]["type"]) == (400, "TracesNotAllowedError"), answer
    with Remote(server.url) as model:
        with pytest.raises(TracesNotAllowedError, match="--midstream-allow-traces"):
            model.run(lambda m: m.logits, FRANCE)
        assert model.generate([FRANCE], max_tokens=1)[0].outputs[0].token_ids
    assert not (tmp_path / "run").exists()


def programs() -> dict[str, Callable[..., Any]]:
    """By what they do, functions of (model, tracer)."""
    made = torch.Generator().manual_seed(0)
    v, gate = torch.randn(HIDDEN, generator=made), torch.randn(HIDDEN, 64, generator=made) / 8

    def adds_an_earlier_value(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            early = model.layers_output[1]
            model.layers_output[3] += early * 0.5

    def scores(model: Any, tracer: Any) -> Any:
        return [torch.sigmoid(model.layers_output[3] @ v) for _ in tracer.iter[:]]

    def written_and_kept(model: Any, tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.layers_output[3] = torch.where((model.layers_output[3] @ v)[:, None] > 0, v, model.layers_output[3])
            h = model.layers_output[5]
            found.append({"norm": h[-1].norm(), "top": (h @ gate).relu().topk(4).values, "row": h[-1]})
        return found, "kept"

    return {each.__name__: each for each in (adds_an_earlier_value, scores, written_and_kept)}


@pytest.mark.parametrize("name", list(programs()))
def test_anybody_may_send_a_trace_that_is_a_program(server: Server, name: str) -> None:
    """The server takes no code. The oracle is the same function in the forward of transformers."""
    body, prompts = programs()[name], [FRANCE, "The"]
    with Remote(server.url) as model:
        assert "no code runs in the engine" in model.explain(body)
        values = model.run(body, prompts, max_tokens=4, temperature=0.0, ignore_eos=True)
        with model.trace(max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    value = save_value([body(model, tracer)])  # noqa: F841
        for prompt, found, output in zip(prompts, values, tracer.outputs, strict=True):
            expected = PlainForward(demo_model()).run(body, prompt, 4)
            assert list(output.outputs[0].token_ids) == expected.tokens
            for mine in (found, output.saves["value"][0]):
                assert not [far for far in distances(expected, Ran(mine)).values() if far > 1e-4], name


@pytest.mark.parametrize(("layer", "stands"), [(1, False), (3, False), (5, True)])
def test_a_trace_that_is_a_program_stands_beside_the_engine_wide_plan_or_is_refused(
    server: Server, layer: int, stands: bool
) -> None:
    """It acts after that plan's edits, and one plan would read a value before them."""
    body = programs()["adds_an_earlier_value"]  # of layer 1 to layer 3
    by = {"kind": "steer", "site": "resid_post", "layers": [layer], "vector": [3.0] * HIDDEN}

    def both(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            early = model.layers_output[1]
            model.layers_output[3] += early * 0.5
            model.layers_output[5] += 3.0

    assert server.ask("PUT", "/v1/midstream/plan", json.dumps({"plan": [by]}).encode(), admin=ADMIN)[0] == 200
    try:
        with Remote(server.url) as model:
            if not stands:
                with pytest.raises(
                    PlanError, match="engine-wide plan edits a site and layer that this trace reads or writes"
                ):
                    model.run(body, FRANCE, max_tokens=4)
                return
            with model.trace(FRANCE, max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
                body(model, tracer)
            (output,) = tracer.outputs
    finally:
        assert server.ask("DELETE", "/v1/midstream/plan", admin=ADMIN)[0] == 200
    assert list(output.outputs[0].token_ids) == PlainForward(demo_model()).run(both, FRANCE, 4).tokens


def test_metrics_have_the_gauges_in_prometheus_form(server: Server, client: openai.OpenAI) -> None:
    complete(client, FRANCE, field(STEER))
    server.ask("GET", "/metrics")  # the workers' are those of the scrape before
    time.sleep(0.5)
    lines = server.ask("GET", "/metrics")[1].splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("midstream_"))
    assert float(values["midstream_planned_prompts"]) >= 1
    assert float(values['midstream_worker_planned_steps{worker="0"}']) >= 1
    assert float(values['midstream_worker_requests{worker="0"}']) == 0


def test_the_openapi_page_has_the_routes(server: Server) -> None:
    page = server.ask("GET", "/openapi.json")[1]
    paths = page["paths"]
    assert set(paths["/v1/midstream/vectors"]) == {"get", "post"}
    assert set(paths["/v1/midstream/captures/{handle}"]) == {"get", "delete"}
    for route, needed in (("runs", ["prompt", "sites"]), ("sweeps", ["clean", "answer"])):
        body = paths[f"/v1/midstream/{route}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] == needed
        (place,) = {place for place in re.findall(r'"\$ref": "#/(.*?)"', json.dumps(body)) if "SpanOfText" in place}
        span = page
        for part in place.split("/"):
            span = span[part.replace("~1", "/")]
        assert span["required"] == ["span"]
