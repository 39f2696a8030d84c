"""The parts of `midstream serve` that need no engine: its flags, and the captures that wait for download (G1, G4, G8, G11).

Rows G3, G6, G7, G12, L5, P2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
import sys
import time
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load
from starlette.requests import Request
from starlette.responses import Response

pytest.importorskip("vllm")

from midstream.capture.rows import Captured, Rows, gather_captures
from midstream.cli import main
from midstream.engine.admission import json_size
from midstream.errors import MidstreamError
from midstream.plan.captures import Planes
from midstream.plan.selections import Selection
from midstream.plan.values import RecordedRun
from midstream.requests.vectors_and_runs import Runs
from midstream.serve import capture_store, command, gate, requests
from midstream.serve.capture_store import CaptureStore, StoredTensor
from midstream.serve.command import allowed_plugins, server_flags, tensor_ranks
from midstream.serve.gate import Gate, RequestRefused
from midstream.serve.plugin import Plugin, RunToRecord
from midstream.serve.requests import check_quota
from midstream.serve.sweeps import PathsToPatch, SweepToRun
from midstream.settings import SCHEDULER, WORKER, Settings
from midstream.sweeps.sweep_run import SweepTurns

MINE, THEIRS = b"m" * 32, b"t" * 32
WIDTH = 8


def captured(rows: int, value: float = 1.0) -> Captured:
    """Rows `[rows, 8]` of one site, of which each takes 32 bytes."""
    key = ("resid_post", 0, "before")
    layout = Planes.of([key], lambda _: WIDTH)
    chunk = Rows(np.arange(rows), layout, torch.full((rows, WIDTH), value))
    return gather_captures("r", [chunk], rows, {key: Selection.of("all_prompt", rows)})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(store: CaptureStore, owner: bytes, rows: int, value: float = 1.0) -> str:
    (entry,) = store.put(owner, 0, captured(rows, value), inline=0)
    return str(entry["handle"])


def test_a_handle_gives_its_owner_the_rows_until_it_expires() -> None:
    clock = Clock()
    store = CaptureStore(1 << 20, 10.0, clock)
    handle = put(store, MINE, 3, 7.0)
    held = store.get(MINE, handle)
    assert held is not None and torch.equal(held.tensor, torch.full((3, WIDTH), 7.0))
    assert store.get(THEIRS, handle) is None and not store.drop(THEIRS, handle)
    clock.now = 9.9
    assert store.get(MINE, handle) is not None
    clock.now = 10.0
    assert store.get(MINE, handle) is None
    assert store.gauges == {"captures": 0, "capture_bytes": 0}


def test_handles_are_long_and_differ() -> None:
    store = CaptureStore(1 << 20, 10.0)
    handles = {put(store, MINE, 1) for _ in range(100)}
    assert len(handles) == 100 and min(map(len, handles)) >= 43  # 256 bits in base64


def room(rows: int) -> int:
    """Bytes that so many rows of `captured` count."""
    return StoredTensor(MINE, torch.zeros(rows, WIDTH), {"positions": list(range(rows))}, 0.0).nbytes


def test_who_holds_the_most_loses_the_oldest_when_the_store_is_full() -> None:
    store = CaptureStore(4 * room(2), 10.0)
    mine = put(store, MINE, 2)
    theirs = [put(store, THEIRS, 2) for _ in range(5)]
    assert store.get(MINE, mine) is not None
    assert [store.get(THEIRS, each) is not None for each in theirs] == [False, False, True, True, True]
    assert store.gauges == {"captures": 4, "capture_bytes": 4 * room(2)}


def test_what_is_larger_than_the_store_is_not_kept() -> None:
    store = CaptureStore(room(100), 10.0)
    mine = put(store, MINE, 3)
    assert store.get(THEIRS, put(store, THEIRS, 101)) is None
    assert store.get(MINE, mine) is not None


def test_tensors_without_rows_take_room_too() -> None:
    """What is said of them does. And there may be only so many, however large the store is."""
    store = CaptureStore(100 * room(0), 10.0)
    for _ in range(300):
        put(store, MINE, 0)
    assert store.gauges == {"captures": 100, "capture_bytes": 100 * room(0)}
    large = CaptureStore(1 << 40, 10.0)
    with mock.patch.object(capture_store, "MOST_HELD", 50):
        for _ in range(120):
            put(large, MINE, 0)
    assert large.gauges == {"captures": 50, "capture_bytes": 50 * room(0)}


@pytest.mark.parametrize("owners", [1, 200])
def test_storing_takes_the_same_time_however_much_is_held(owners: int) -> None:
    """In operations of Python's, not in seconds."""

    def steps(held: int) -> int:
        store = CaptureStore(held * room(1), 10.0)
        names = [str(i).encode() for i in range(owners)]
        for i in range(held):
            put(store, names[i % owners], 1)
        found = 0

        def count(*_: Any) -> Any:
            nonlocal found
            found += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            for i in range(50):
                put(store, names[i % owners], 1)
        finally:
            sys.settrace(before)
        assert store.gauges["captures"] == held
        return found

    assert steps(4000) < 1.1 * steps(400)


def test_stores_keep_count_of_owners_that_come_and_go() -> None:
    rng, clock = random.Random(3), Clock()
    store = CaptureStore(40 * room(3), 10.0, clock)
    there: dict[str, bytes] = {}
    for _ in range(3000):
        clock.now += rng.random() / 4
        owner = rng.choice([MINE, THEIRS, b"third"])
        if there and rng.random() < 0.3:
            handle = rng.choice(list(there))
            store.drop(there.pop(handle), handle)
        there[put(store, owner, rng.randrange(6))] = owner
        there = {handle: owner for handle, owner in there.items() if store.get(owner, handle) is not None}
        held = [store.get(owner, handle) for handle, owner in there.items()]
        assert store.gauges == {"captures": len(held), "capture_bytes": sum(each.nbytes for each in held)}
        assert store._total == store._owner_bytes.total() == store.gauges["capture_bytes"] <= store.budget
        assert sum(map(len, store._by_size)) == len(set(there.values()))


def test_a_key_holds_no_more_than_it_leaves_to_others() -> None:
    held: list[int] = []
    for _ in range(6):  # each takes all it may
        own = 0
        while True:
            try:
                check_quota("things", own + 1, sum(held) + own + 1, 64)
            except RequestRefused as error:
                assert error.args[0] == 413 and "leaves" in str(error)
                break
            own += 1
        held.append(own)
    assert held == [32, 16, 8, 4, 2, 1]


class Exchange:
    """One request to an ASGI application, and its response.

    Args:
        parts: the body as it comes; then it stalls, unless `is_whole`.
    """

    def __init__(
        self, path: str, parts: list[bytes], is_whole: bool = True, method: str = "POST", key: str = ""
    ) -> None:
        self._messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if is_whole:
            self._messages[-1]["more_body"] = False
        self._path, self._method = path, method
        self._headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        self.status, self.body, self.headers, self.has_ended = 0, b"", dict[bytes, bytes](), False

    async def run(self, app: Any, state: Any = None) -> Exchange:
        application = SimpleNamespace(state=state or SimpleNamespace())
        scope = {
            "type": "http",
            "method": self._method,
            "path": self._path,
            "query_string": b"",
            "headers": self._headers,
            "app": application,
        }
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> Any:
        await asyncio.sleep(0)
        return self._messages.pop(0) if self._messages else await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")
            self.has_ended = not message.get("more_body", False)

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


def echo(read: Any) -> Any:
    """An application whose response is the size of what `read` makes of a request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        data = await read(Request(scope, receive))
        await Response(str(len(data)))(scope, receive, send)

    return app


def test_uploads_that_stop_leave_others_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may have no more on its way than it leaves; a body that does not go on is given up, and its room is there again."""
    monkeypatch.setattr(gate, "_STALLED_SECONDS", 0.3)
    server = SimpleNamespace(receiving=Counter(), is_draining=False)
    state = SimpleNamespace(midstream=server)
    app = Gate(echo(lambda request: requests.receive_body(request, 64 << 20, "{}")))

    async def upload(key: str, stalls: bool) -> Exchange:
        return await Exchange("/v1/midstream/vectors", [b"x" * (1 << 20)] * 60, not stalls, key=key).run(app, state)

    async def main() -> None:
        stalled = [asyncio.create_task(upload("one", True)) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert server.receiving.total() <= 128 << 20
        assert (await upload("two", False)).body == str(60 << 20).encode()  # beside them
        assert {each.status for each in await asyncio.gather(*stalled)} == {
            408,
            503,
        }  # the refused make room for the others
        assert not server.receiving
        assert (await upload("one", False)).body == str(60 << 20).encode()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/v1/midstream/runs"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_body_that_stalls_is_answered_on_every_route(monkeypatch: pytest.MonkeyPatch, path: str, method: str) -> None:
    """Also after some of it has come. A body that comes slowly is read, and the wait for a client to leave has no limit."""
    monkeypatch.setattr(gate, "_STALLED_SECONDS", 0.05)
    server = SimpleNamespace(receiving=Counter(), is_draining=False)
    app = Gate(echo(lambda request: requests.receive_body(request, 64 << 20, "{}")))

    async def main() -> None:
        state = SimpleNamespace(midstream=server)
        stalled = await asyncio.wait_for(Exchange(path, [b"{"], False, method).run(app, state), 10)
        assert stalled.status == 408 and stalled.error["type"] == "RequestTimeoutError"
        whole = Exchange(path, [b"{", b"}"], True, method)
        assert (await whole.run(app, state)).body == b"2"
        slow = asyncio.create_task(Exchange(path, [b"{}"], True, method).run(Gate(leaves), state))
        await asyncio.sleep(0.2)
        assert not slow.done()
        slow.cancel()

    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    asyncio.run(main())


def test_what_fails_beside_the_routes_ends_as_an_error_in_openais_form() -> None:
    """A response that has not begun becomes an error as JSON, a stream of events gets an event `error`, and any other response is cut."""

    def app(kind: str | None, raised: BaseException) -> Any:
        async def run(scope: Any, receive: Any, send: Any) -> None:
            if kind is not None:
                headers = [(b"content-type", kind.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            raise raised

        return run

    async def ended(kind: str | None, raised: BaseException) -> Exchange:
        exchange = Exchange("/v1/completions", [b"{}"])
        with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError):
            await exchange.run(Gate(app(kind, raised)))
        return exchange

    async def main() -> None:
        gone = await ended(None, asyncio.CancelledError())
        assert gone.status == 503 and gone.error["type"] == "ServiceUnavailableError" and b"retry-after" in gone.headers
        nested = await ended(None, RecursionError())
        assert nested.status == 400 and "nested" in nested.error["message"]
        for raised, code in ((asyncio.CancelledError(), 503), (ZeroDivisionError(), 500)):
            events = await ended("text/event-stream; charset=utf-8", raised)
            first, last, rest = events.body.decode().split("\n\n")
            assert first == "data: 1" and rest == "" and events.has_ended
            name, data = last.split("\n")
            assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["code"] == code
            binary = await ended("application/x-midstream", raised)
            assert binary.body == b"data: 1\n\n" and not binary.has_ended

    asyncio.run(main())


def test_nested_json_is_a_mistake_of_the_client() -> None:
    """As vLLM's routes read it."""

    async def main() -> None:
        app = Gate(echo(lambda request: request.json()))
        for body in (b"[" * 3000, b'{"a":' * 3000, b'{"prompt":' + b"[" * 3000 + b"]" * 3000 + b"}"):
            answer = await Exchange("/invocations", [body]).run(app)
            assert answer.status == 400 and answer.error["type"] == "BadRequestError"

    asyncio.run(main())


async def wait(iterations: int) -> None:
    """Wait for iterations of the event loop."""
    for _ in range(iterations):
        await asyncio.sleep(0)


def test_a_group_sends_its_requests_before_the_groups_after_the_next_are_prepared() -> None:
    """Preparing takes the event loop's time. Prepared all at once, 16 groups kept the engine waiting for 0.8 s (8B shape, H100)."""
    events: list[str] = []

    async def main() -> None:
        turns = SweepTurns(1000)

        async def group(number: int) -> None:
            async with turns.taken("sweep", 10):
                events.append(f"prepared {number}")
                await wait(2)  # for the tasks of its requests, and for the call that submits them
                events.append(f"sent {number}")

        await asyncio.gather(*map(group, range(16)))

    asyncio.run(main())
    assert all(events.index(f"sent {n}") < events.index(f"prepared {n + 3}") for n in range(13))


def test_sweeps_start_their_groups_in_turns() -> None:
    """Of a sweep that comes second, too. A group that is given up while it waits takes no turn."""
    order: list[str] = []

    async def main() -> None:
        turns = SweepTurns(100)  # four of these batches at a time

        async def group(sweep: str) -> None:
            async with turns.taken(sweep, 200):
                order.append(sweep)
                await wait(8)

        tasks = [asyncio.create_task(group("first")) for _ in range(8)]
        await wait(4)
        given_up = asyncio.create_task(group("third"))
        tasks += [asyncio.create_task(group("second")) for _ in range(4)]
        await wait(1)
        given_up.cancel()
        await asyncio.gather(*tasks)
        assert not turns._used and not turns._waiting

    asyncio.run(main())
    assert order[:2] == ["first"] * 2 and sorted(order) == ["first"] * 8 + ["second"] * 4
    seconds = [i for i, each in enumerate(order) if each == "second"]
    assert seconds[0] < 6 and seconds == list(range(seconds[0], seconds[0] + 8, 2))


def test_groups_of_sweeps_fill_a_few_batches_at_most() -> None:
    running = [0]
    most = []

    async def main(each: int, count: int) -> None:
        turns = SweepTurns(100)

        async def group(sweep: int) -> None:
            async with turns.taken(sweep, each):
                running[0] += 1
                most.append(running[0])
                await wait(20)
                running[0] -= 1

        await asyncio.gather(*(group(i % 3) for i in range(count)))

    for each, expected in ((100, 4), (150, 2), (30, 13), (400, 1), (1000, 1)):
        most.clear()
        asyncio.run(main(each, 40))
        assert len(most) == 40 and max(most) == expected, each
    assert [SweepTurns(2048).jobs(tokens) for tokens in (8, 75, 500, 2048, 9000)] == [32, 27, 4, 1, 1]


def test_rows_do_not_keep_the_step_that_they_came_from_in_memory() -> None:
    store = CaptureStore(1 << 20, 10.0)
    key = ("resid_post", 0, "before")
    layout = Planes.of([key], lambda _: WIDTH)
    step = torch.ones(1000, WIDTH)
    one = gather_captures("r", [Rows(np.arange(1), layout, step[:1])], 1, {key: Selection.of("all_prompt", 1)})
    (entry,) = store.put(MINE, 0, one, inline=0)
    held = store.get(MINE, entry["handle"])
    assert held is not None and held.tensor.untyped_storage().nbytes() == WIDTH * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_download_is_a_safetensors_file_in_small_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = torch.randn(1000, 300).to(dtype)
    about = {"choice": 0, "positions": list(range(1000)), "shape": [1000, 300], "site": "é"}
    size, parts = StoredTensor(MINE, rows, about, 0.0).file()
    given = list(parts)
    assert max(map(len, given)) <= max(1 << 16, len(given[0])) and sum(map(len, given)) == size
    (tmp_path / "rows").write_bytes(b"".join(given))
    with safe_open(tmp_path / "rows", "pt") as file:
        assert torch.equal(file.get_tensor("rows"), rows)
        assert file.metadata() == {name: str(value) for name, value in about.items()}
    empty = StoredTensor(MINE, rows[:0], {"shape": [0, 300]}, 0.0).file()
    assert load(b"".join(empty[1]))["rows"].shape == (0, 300)


def test_a_run_that_is_recorded_while_runs_are_listed_stays() -> None:
    def run(name: str) -> RecordedRun:
        return RecordedRun(name, f"id-{name}", (1,), ("resid_post",), (0,), (0,))

    async def ask(what: str, *_: Any) -> list[Any]:
        await runs.add(run("new"))
        return [[]]  # from before: the workers have dropped the old one

    runs = Runs(ask, None)
    asyncio.run(runs.add(run("old")))
    assert asyncio.run(runs.listing()) == []
    assert [each.name for each in runs.handles] == ["new"]


# --------------------------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize("given", [{"plan": [{"vector": [0.5] * 1024, "site": "resid_post"}] * 5}, "x" * 9000, None])
def test_the_size_of_a_plan_is_about_that_of_its_json(given: Any) -> None:
    assert json_size(given) == pytest.approx(len(json.dumps(given)), rel=1.0, abs=10)


def test_the_size_of_a_large_plan_is_told_at_once() -> None:
    deep: Any = [0.5] * 1000
    for _ in range(20):
        deep = [deep, deep]  # a million lists
    begin = time.monotonic()
    assert all(json_size(each) > 1 << 16 for each in (deep, [[]] * 10_000_000, {"plan": "x" * 100_000}))
    assert time.monotonic() - begin < 1.0


def test_the_flags_are_those_of_a_stock_server(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "serve",
        "--flags",
        "some/model",
        "--midstream-graph-sites",
        "resid_pre,mlp_out",
        "--tensor-parallel-size",
        "2",
        "--midstream-graph-bytes",
        "4096",
        "--max-model-len",
        "512",
    ]
    assert main(command) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0].startswith("VLLM_PLUGINS=") and "midstream" in words[0].partition("=")[2].split(",")
    assert words[1:8] == [
        "vllm", "serve", "some/model", "--tensor-parallel-size", "2", "--max-model-len", "512",
    ]  # fmt: skip
    assert words[words.index("--worker-cls") + 1] == WORKER and words[words.index("--scheduler-cls") + 1] == SCHEDULER
    settings = json.loads(words[words.index("--additional-config") + 1])["midstream"]
    assert settings["graph_sites"] == ["resid_pre", "mlp_out"] and settings["graph_bytes"] == 4096
    assert settings["allow_traces"] is False


@pytest.mark.parametrize(
    ("given", "ranks"),
    [([], 1), (["-tp", "4"], 4), (["--tensor_parallel_size=2"], 2), (["--tensor-parallel-size", "1"], 1),
     (["--config", "serve.yaml"], None)],
)  # fmt: skip
def test_the_flags_say_how_many_tensor_parallel_ranks_there_are(given: list[str], ranks: int | None) -> None:
    assert tensor_ranks(["some/model", *given]) == ranks


@pytest.mark.parametrize("given", [["--additional-config", '{"a": 1}'], ['--additional-config={"a": 1}']])
def test_the_users_additional_config_stays(given: list[str]) -> None:
    flags = server_flags(Settings(), ["m", *given, "--port", "1"])
    assert flags.count("--additional-config") == 1 and not any("=" in flag for flag in flags[:4])
    config = json.loads(flags[flags.index("--additional-config") + 1])
    assert config["a"] == 1 and "midstream" in config
    assert flags[:3] == ["m", "--port", "1"]


@pytest.mark.parametrize("flag", ["--worker-cls", "--worker-cls=x", "--scheduler_cls"])
def test_what_midstream_sets_may_not_be_given(flag: str) -> None:
    with pytest.raises(MidstreamError, match="leave it out"):
        server_flags(Settings(), ["m", flag, "x"])


def test_other_plugins_stay_loaded() -> None:
    assert allowed_plugins({"VLLM_PLUGINS": "mine"}) == "mine,midstream"
    assert allowed_plugins({"VLLM_PLUGINS": ""}) == "midstream"
    assert "midstream" in allowed_plugins({}).split(",")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"api_server_count": 2}, "--api-server-count 2 is not supported"),
        ({"data_parallel_size": 4}, "--data-parallel-size 4 is not supported"),
    ],
)
def test_several_front_ends_or_engines_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MidstreamError, match=message):
        start_up(Settings(), **arguments)


def test_traces_without_an_api_key_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(MidstreamError, match="needs an API key"):
        start_up(Settings(allow_traces=True), api_key=None)


def start_up(settings: Settings, **arguments: Any) -> None:
    parallel = SimpleNamespace(worker_cls=WORKER)
    config = SimpleNamespace(parallel_config=parallel, additional_config=settings.to_config())
    asyncio.run(
        Plugin().init_state(SimpleNamespace(vllm_config=config), SimpleNamespace(), SimpleNamespace(**arguments))
    )


def test_a_server_without_midstreams_worker_does_not_start() -> None:
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="auto")))
    with pytest.raises(MidstreamError, match="midstream serve"):
        asyncio.run(Plugin().init_state(engine, SimpleNamespace(), SimpleNamespace()))


def test_a_server_does_not_start_without_midstreams_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs that an endpoint plugin cannot be imported, and serves without it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    broken = EntryPoint("midstream", "midstream.nowhere:Plugin", "vllm.endpoint_plugins")
    monkeypatch.setattr(command, "entry_points", lambda group: [broken])
    monkeypatch.setattr(ServeSubcommand, "cmd", lambda *_: pytest.fail("the server was started"))
    for name in ("VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD"):  # which the command sets
        monkeypatch.setenv(name, "spawn" if name.endswith("METHOD") else "")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        main(["serve", "a-model"])


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (SweepToRun, {"clean": [0] * 100_000 + [None], "answer": 1}),
        (SweepToRun, {"clean": [[None]] * 100_000, "answer": 1}),
        (SweepToRun, {"clean": "a", "answer": [None] * 100_000}),
        (SweepToRun, {"clean": "a", "answer": 1, "positions": {"a": [None] * 100_000}}),
        (PathsToPatch, {"clean": "a", "answer": 1, "receivers": [[None, None]] * 1000}),
        (RunToRecord, {"prompt": [None] * 100_000, "sites": [None] * 100_000, "layers": [None] * 100_000}),
    ],
)
def test_a_body_of_wrong_items_has_few_errors(model: Any, body: dict[str, Any]) -> None:
    """An error for each item of a body of 4 MiB takes gigabytes, and holds everybody up meanwhile."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate_json(json.dumps(body))
    assert raised.value.error_count() < 30
