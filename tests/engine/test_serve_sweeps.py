"""Sweeps and path patching over HTTP: events, errors, limits and closed connections (rows H10, N8). Row G8."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from servers import KEYS, Server

from midstream import Remote
from midstream.errors import MidstreamError

if TYPE_CHECKING:
    from midstream import LanguageModel

pytestmark = pytest.mark.engine

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
ASKED = {"clean": CLEAN, "corrupt": CORRUPT, "answer": " Paris", "foil": " Rome"}
KEY = KEYS[0]


@pytest.fixture
def server(traces_server: Server) -> Server:
    return traces_server


def events_of(
    server: Server, asked: dict[str, Any], most: int = 1 << 30, key: str = KEY, route: str = "sweeps"
) -> list[tuple[str, Any]]:
    """The events of a sweep; the connection is closed after `most`."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/midstream/{route}", json.dumps(asked).encode(), headers)
    found: list[tuple[str, Any]] = []
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.headers["content-type"] == "text/event-stream"
        name = ""
        for line in response:
            text = line.decode().rstrip("\n")
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text.startswith("data: "):
                found.append((name, json.loads(text.removeprefix("data: "))))
                if len(found) == most:
                    break
    return found


def gauges(server: Server) -> dict[str, int]:
    found = server.ask("GET", "/v1/midstream/gauges", key=KEY)[1]
    return {**found["server"], "leases": sum(worker["leases"] for worker in found["workers"])}


def let_go(server: Server) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = gauges(server)
        if not any(now[name] for name in ("sweeps", "running_prompts", "runs", "leases")):
            return True
        time.sleep(0.05)
    return False


def test_a_sweep_streams_its_start_cells_and_summary(server: Server, hf: LanguageModel) -> None:
    found = events_of(server, ASKED)
    names = [name for name, _ in found]
    assert names[:2] == ["start", "baselines"] and names[-1] == "summary" and names.count("cell") == 40
    assert {name == event["event"] for name, event in found} == {True}
    values = np.full((8, 5), np.nan)
    for name, event in found:
        if name == "cell":
            values[tuple(event["index"])] = event["value"]
    np.testing.assert_allclose(values, hf.sweep(**ASKED).values["resid_post"], rtol=1e-3, atol=2e-3)
    assert let_go(server)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [4, 5, 7]},
        {"layers": [4], "freeze_mlps": True, "positions": [1, -1]},
        {"layers": [0], "receivers": [(4, 1), (-3, 3)]},
    ],
)
def test_path_patching_on_a_server_equals_that_of_transformers(
    server: Server, hf: LanguageModel, options: dict[str, Any]
) -> None:
    expected = hf.path_patching(**ASKED, **options)
    model = Remote(server.url, api_key=KEY)
    result = model.path_patching(**ASKED, **options)
    np.testing.assert_allclose(result.values["attn_z"], expected.values["attn_z"], rtol=1e-3, atol=2e-3)
    assert result.outline.paths == expected.outline.paths and result.outline.direction == "noising"
    assert (
        result.outline.grid == expected.outline.grid
        and not result.void
        and len(result.noise) == len(expected.noise) > 0
    )
    assert let_go(server)


def test_path_patching_streams_cells_and_events(server: Server, hf: LanguageModel) -> None:
    expected = hf.path_patching(**ASKED).values["attn_z"]
    stream = Remote(server.url, api_key=KEY).path_patching(**ASKED, stream=True)
    for cell in itertools.islice(stream, 3):
        assert cell.value == pytest.approx(expected[tuple(cell.index)], abs=2e-3)
    stream.close()
    assert let_go(server)
    found = events_of(server, ASKED, route="path_patching")
    assert found[0][1]["paths"] == {"receivers": None, "frozen": ["attn_z"]} and found[-1][0] == "summary"
    cells = {tuple(event["index"]): event["value"] for name, event in found if name == "cell"}
    assert cells == pytest.approx({index: expected[index] for index in np.ndindex(8, 4, 1)}, rel=1e-3, abs=2e-3)

    async def on_an_event_loop() -> Any:
        model = Remote(server.url, api_key=KEY, mode="async")
        await model.start()
        return await model.path_patching(**ASKED, layers=[0], receivers=(5, 3))

    result = asyncio.run(on_an_event_loop())
    expected = hf.path_patching(**ASKED, layers=[0], receivers=(5, 3)).values["attn_z"]
    np.testing.assert_allclose(result.values["attn_z"], expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"receivers": (5, 3, "q")}, "receivers", "queries, keys and values cannot be receivers"),
        ({"receivers": (5, 4)}, "receivers", "receivers has head 4 of layer 5. Allowed: 0 to 3"),
        ({"receivers": (5, 1), "layers": [5]}, "layers", "Only heads of layers before 5"),
        ({"answer": " Paris Rome"}, "answer", "2 tokens"),
        ({"corrupt": None}, "corrupt", "corrupt is None"),
        (
            {"clean": "a " * 200, "corrupt": "b " * 200},
            "layers",
            r"freezes 7 values at each of \d+ tokens, .* allowed: 1,024 over HTTP",
        ),
        ({"clean": [CLEAN] * 65, "corrupt": [CORRUPT] * 65}, "clean", "allowed: 64"),
    ],
)
def test_path_patching_on_a_server_refuses_by_name(server: Server, changed: Any, field: str, text: str) -> None:
    with pytest.raises(MidstreamError, match=text) as caught:
        Remote(server.url, api_key=KEY).path_patching(**{**ASKED, **changed})
    assert caught.value.field == field
    assert gauges(server)["sweeps"] == 0
    if "receivers" not in changed:
        status, body = server.ask(
            "POST", "/v1/midstream/path_patching", json.dumps({**ASKED, **changed}).encode(), key=KEY
        )
        assert status == 400 and body["error"]["param"] == field


def test_a_server_has_no_gradients(server: Server) -> None:
    with pytest.raises(
        MidstreamError, match=r"vLLM computes none\. Call it on LanguageModel.*or use path_patching here"
    ):
        Remote(server.url, api_key=KEY).edge_attribution(*ASKED.values())


def test_the_event_of_the_baselines_warns_of_an_answer_without_its_space(server: Server) -> None:
    with pytest.warns(
        UserWarning, match=r"answer is 'Paris'\. After the clean prompt the token ' Paris' is more than"
    ) as caught:
        Remote(server.url, api_key=KEY).sweep(**{**ASKED, "answer": "Paris"}, layers=[2], positions=[3])
    for route in ("sweeps", "path_patching"):
        found = dict(events_of(server, {**ASKED, "answer": "Paris", "layers": [2]}, most=2, route=route))
        # Garbage of an earlier test, as a client's open connection, warns in this block too.
        told = [str(each.message) for each in caught if each.category is UserWarning]
        assert found["baselines"]["warnings"] == told
    assert dict(events_of(server, {**ASKED, "layers": [2]}, most=2))["baselines"]["warnings"] == []
    assert let_go(server)


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"answer": " Paris Rome"}, "answer", "2 tokens"),
        ({"foil": None}, "foil", "needs a foil"),
        ({"sites": ["resid"]}, "sites", "resid_p"),
        ({"layers": [99]}, "layers", "layers has 99"),
        ({"positions": ["Norway"]}, "positions", "Norway"),
        ({"metric": "x"}, "metric", "logit_diff"),
        ({"to": "/tmp/x"}, "to", "not permitted"),
        ({"clean": 3}, "clean", "clean"),
        ({"clean": [CLEAN] * 65, "corrupt": [CORRUPT] * 65}, "clean", "allowed: 64"),
        ({"clean": [{"role": "user"}]}, "clean", "clean"),
        ({"clean": [{"role": "user", "content": "a " * 100_000}]}, "clean", "has at most"),
        ({"clean": "a " * 600, "corrupt": "b " * 600}, "clean", "up to 511 tokens"),
    ],
)
def test_errors_before_the_first_event_are_plain_400s(server: Server, changed: Any, field: str, text: str) -> None:
    status, body = server.ask("POST", "/v1/midstream/sweeps", json.dumps({**ASKED, **changed}).encode(), key=KEY)
    assert status == 400 and text in body["error"]["message"]
    assert body["error"]["param"] == field
    assert gauges(server)["sweeps"] == 0


def test_only_so_many_sweeps_run_at_a_time_and_a_closed_connection_ends_one(server: Server) -> None:
    """Path patching counts as a sweep. Seen failing without the lines that close the events when the client has gone."""
    long = {**ASKED, "clean": [CLEAN] * 60, "corrupt": [CORRUPT] * 60}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    opened = []
    for route in ("sweeps", "path_patching") * 2:
        request = urllib.request.Request(f"{server.url}/v1/midstream/{route}", json.dumps(long).encode(), headers)
        opened.append(urllib.request.urlopen(request, timeout=60))
        opened[-1].readline()
    status, body = server.ask("POST", "/v1/midstream/path_patching", json.dumps(ASKED).encode(), key=KEY)
    assert status == 503 and "This API key runs 4 sweeps already" in body["error"]["message"]
    assert gauges(server)["sweeps"] == 4
    assert events_of(server, ASKED, key=KEYS[1])[-1][0] == "summary"
    for response in opened:
        response.close()
    assert let_go(server)
    assert events_of(server, ASKED)[-1][0] == "summary"


def test_a_sweep_with_a_long_prompt_or_many_positions_holds_nobody_up(server: Server) -> None:
    asked = [
        ({"clean": "a " * 1_900_000}, "bytes"),
        ({"clean": [CLEAN] * 64, "corrupt": [CORRUPT] * 64, "positions": ["Norway"] * 200_000}, "1024"),
    ]
    for changed, text in asked:
        body = json.dumps({**ASKED, **changed}).encode()
        for _ in range(3):  # other tests may keep the machine busy for a moment
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(server.ask, "POST", "/v1/midstream/sweeps", body, key=KEY)
                waits = []
                while not answer.done():
                    begin = time.monotonic()
                    assert server.is_healthy()
                    waits.append(time.monotonic() - begin)
                status, found = answer.result()
            assert status == 400 and text in found["error"]["message"]
            if (longest := max(waits, default=0.0)) < 0.5:
                break
        assert longest < 0.5


def test_the_route_wants_the_api_key(server: Server) -> None:
    assert server.ask("POST", "/v1/midstream/sweeps", json.dumps(ASKED).encode())[0] == 401
    assert server.ask("POST", "/v1/midstream/sweeps", b'"' * 100, key=KEY)[0] == 400
    assert server.ask("POST", "/v1/midstream/sweeps", b" " * ((4 << 20) + 1), key=KEY)[0] == 413
