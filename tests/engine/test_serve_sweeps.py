"""Sweeps over HTTP: events, errors, limits and closed connections (row H10). Row G8."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from servers import KEYS, Server

if TYPE_CHECKING:
    from midstream import LanguageModel

pytestmark = pytest.mark.engine

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
ASKED = {"clean": CLEAN, "corrupt": CORRUPT, "answer": " Paris", "foil": " Rome"}
KEY = KEYS[0]


@pytest.fixture
def server(traces_server: Server) -> Server:
    return traces_server


def events_of(server: Server, asked: dict[str, Any], most: int = 1 << 30, key: str = KEY) -> list[tuple[str, Any]]:
    """The events of a sweep; the connection is closed after `most`."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/midstream/sweeps", json.dumps(asked).encode(), headers)
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
        ({"clean": "a " * 600, "corrupt": "b " * 600}, "clean", "takes 511"),
    ],
)
def test_errors_before_the_first_event_are_plain_400s(server: Server, changed: Any, field: str, text: str) -> None:
    status, body = server.ask("POST", "/v1/midstream/sweeps", json.dumps({**ASKED, **changed}).encode(), key=KEY)
    assert status == 400 and text in body["error"]["message"]
    assert body["error"]["param"] == field
    assert gauges(server)["sweeps"] == 0


def test_only_so_many_sweeps_run_at_a_time_and_a_closed_connection_ends_one(server: Server) -> None:
    """Seen failing without the lines that close the events when the client has gone."""
    long = {**ASKED, "clean": [CLEAN] * 60, "corrupt": [CORRUPT] * 60}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    opened = []
    for _ in range(4):
        request = urllib.request.Request(f"{server.url}/v1/midstream/sweeps", json.dumps(long).encode(), headers)
        opened.append(urllib.request.urlopen(request, timeout=60))
        opened[-1].readline()
    status, body = server.ask("POST", "/v1/midstream/sweeps", json.dumps(ASKED).encode(), key=KEY)
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
