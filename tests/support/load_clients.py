"""The clients of `load.py`: what they ask for, and what the idle server answered to it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import numpy as np
import openai
import torch
from safetensors.torch import load, save
from servers import Server

HIDDEN, TOKENS, STRENGTH = 256, 12, 20
KEYS = ("ada", "bob", "cyd", "dan")  # of four owners
STATES = ("France", "Italy", "Germany", "Spain", "Japan", "Egypt")
PROMPTS = [f"The capital of {state} is" for state in STATES]
PROMPTS += [f"{city} is the capital of" for city in ("Rome", "Paris", "Berlin")]
PROMPTS += [f"The capital of {a} is known. The capital of {b} is" for a, b in itertools.pairwise(STATES[:4])]
VECTORS = {
    f"v{i}": torch.as_tensor(np.random.default_rng(i).normal(size=HIDDEN) * STRENGTH, dtype=torch.float32)
    for i in range(3)
}
RUN = {"prompt": "The capital of Norway is", "sites": ["resid_post"], "layers": [3]}
LONG = "The capital of France is Paris. " * 55  # 386 tokens
EDGE = 0.05  # in logits: how far the likeliest token has to be ahead, so that another batch cannot change it
PATH = "/v1/midstream"
CAPTURE_SECONDS = 10  # that a handle works on the server


class LoadError(AssertionError):
    """An answer that is not the one of the idle server, or not the documented one."""


class Question(NamedTuple):
    """A request for text, by the chat route or that of completions.

    Attributes:
        edit: the name of a vector that steers, "run" for a patch from a recorded run, or "" for a plain request.
    """

    prompt: str
    edit: str = ""
    is_chat: bool = False


class Captured(NamedTuple):
    """A plan that captures, and the prompt."""

    prompt: str
    site: str = "resid_post"
    layers: tuple[int, ...] = (2, 5)
    positions: str = "all"
    tokens: int = 4

    @property
    def plan(self) -> list[Any]:
        return [{"kind": "capture", "site": self.site, "layers": list(self.layers), "positions": self.positions}]


SMALL = [Captured(prompt) for prompt in PROMPTS] + [
    Captured(prompt, "attn_z", (0, 7), "last_prompt") for prompt in PROMPTS
]
LARGE = Captured(LONG, "mlp_act", (1,), "all_prompt", 1)  # 800 kB


def steer(vector: Any) -> dict[str, Any]:
    return {"kind": "steer", "site": "resid_post", "layers": [3], "vector": vector}


def patch(run: str) -> dict[str, Any]:
    return {
        "kind": "patch",
        "site": "resid_post",
        "layer": 3,
        "position": -2,
        "source": {"run": run},
        "source_position": -2,
    }


def packed(vector: torch.Tensor) -> dict[str, Any]:
    return {"data": base64.b64encode(vector.numpy().tobytes()).decode(), "dtype": "float32", "shape": [HIDDEN]}


class Clients:
    """The ways to ask: the openai client, and sockets. As a context, it closes its connections."""

    def __init__(self, server: Server, oracle: Oracle | None = None) -> None:
        self.oracle = oracle or Oracle()
        self.port = int(server.url.rpartition(":")[2])
        self.numbers = itertools.count()
        self.openai = {
            key: openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=100)
            for key in KEYS
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.openai.values():
            await each.close()

    def plan(self, question: Question, vector: Any = None, run: str = "held") -> list[Any]:
        if question.edit == "run":
            return [patch(run)]
        return [steer(packed(VECTORS[question.edit]) if vector is None else vector)] if question.edit else []

    async def create(self, prompt: Any, plan: list[Any], key: str = KEYS[0], is_chat: bool = False, **more: Any) -> Any:
        """The response, or the list of a stream's chunks."""
        body: dict[str, Any] = {"ignore_eos": True} | ({"midstream": {"plan": plan}} if plan else {})
        given: dict[str, Any] = {"model": "demo", "temperature": 0.0, "max_tokens": TOKENS, "extra_body": body, **more}
        client = self.openai[key]
        if is_chat:
            found: Any = await client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **given)
        else:
            found = await client.completions.create(prompt=prompt, **given)
        return [chunk async for chunk in found] if given.get("stream") else found

    async def text(self, question: Question, plan: list[Any], key: str = KEYS[0], stream: bool = False) -> str:
        found = await self.create(question.prompt, plan, key, question.is_chat, stream=stream)
        if stream:
            choices = [chunk.choices[0] for chunk in found if chunk.choices]
            return "".join((c.delta.content or "") if question.is_chat else c.text for c in choices)
        return str(found.choices[0].message.content if question.is_chat else found.choices[0].text)

    async def connect(self, request: bytes, receives: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request has been sent. `receives`: bytes that the system may hold for the client."""
        plug = socket.socket()
        plug.setblocking(False)
        if receives:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=plug, limit=receives or 1 << 16)
        writer.write(request)
        await writer.drain()
        return reader, writer

    async def http(
        self, method: str, path: str, body: Any = b"", key: str = KEYS[0], pause: float = 0.0
    ) -> tuple[int, bytes]:
        """Status and body. `pause`: seconds between two reads of 16 kB, for a slow client."""
        reader, writer = await self.connect(request(method, path, body, key), 8192 if pause else 0)
        data = bytearray()
        while part := await reader.read(1 << 14):
            data += part
            await asyncio.sleep(pause)
        writer.close()
        head, _, rest = bytes(data).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), rest

    async def expect(self, status: int, method: str, path: str, body: Any = b"", key: str = KEYS[0]) -> bytes:
        found, data = await self.http(method, path, body, key)
        if found != status:
            raise LoadError(f"{method} {path}: {found}, not {status}: {data[:300]!r}")
        return data

    async def rows(self, entries: Iterable[dict[str, Any]], key: str, pause: float = 0.0) -> list[torch.Tensor]:
        found = []
        for entry in entries:
            status, data = await self.http("GET", f"{PATH}/captures/{entry['handle']}", key=key, pause=pause)
            if status != 200:
                raise LoadError(f"a capture: {status}: {data[:300]!r}")
            found.append(load(data)["rows"])
        return found

    async def captured(self, what: Captured, key: str, stream: bool = False) -> list[dict[str, Any]]:
        """The response's entries."""
        found = await self.create(what.prompt, what.plan, key, stream=stream, max_tokens=what.tokens)
        return list((found[-1] if stream else found).midstream["captures"])


def request(method: str, path: str, body: Any = b"", key: str = KEYS[0], length: int | None = None) -> bytes:
    """`length`: that the body is said to have."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: demo\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    return (
        f"{head}Content-Length: {len(data) if length is None else length}\r\nConnection: close\r\n\r\n".encode() + data
    )


class Oracle:
    """The answers of the idle server."""

    def __init__(self) -> None:
        self.texts: dict[Question, str] = {}
        self.rows: dict[Captured, list[torch.Tensor]] = {}

    async def ask(self, clients: Clients) -> None:
        """Ask for everything once, one request at a time. Leaves the vectors and the run that the load needs on the server."""
        await clients.expect(200, "POST", f"{PATH}/vectors", save(VECTORS))
        await clients.expect(200, "POST", f"{PATH}/runs", {**RUN, "name": "held"})
        for prompt, edit in itertools.product(PROMPTS, ["", *VECTORS, "run"]):
            question = Question(prompt, edit)
            (choice,) = (await clients.create(prompt, clients.plan(question), logprobs=2)).choices
            if _is_clear(choice.logprobs.top_logprobs):
                self._keep(question, choice.text)
            given: dict[str, Any] = {"is_chat": True, "logprobs": True, "top_logprobs": 2}
            (choice,) = (await clients.create(prompt, clients.plan(question), **given)).choices
            if _is_clear(
                [{each.token: each.logprob for each in step.top_logprobs} for step in choice.logprobs.content]
            ):
                self._keep(question._replace(is_chat=True), choice.message.content)
        edits = Counter(question.edit for question in self.texts)
        assert min(edits[edit] for edit in ["", *VECTORS, "run"]) >= 3, edits
        for what in [*SMALL, LARGE]:
            entries = await clients.captured(what, KEYS[0])
            self.rows[what] = await clients.rows(entries, KEYS[0])
            for entry in entries:
                await clients.expect(200, "DELETE", f"{PATH}/captures/{entry['handle']}")

    def _keep(self, question: Question, text: str) -> None:
        """A question whose edit changes nothing could not tell whether it was made."""
        if not question.edit or text != self.texts.get(question._replace(edit="")):
            self.texts[question] = text

    def check_text(self, question: Question, text: str) -> None:
        if text != self.texts[question]:
            raise LoadError(f"{question}: {text!r}, not {self.texts[question]!r}")

    def check_rows(self, what: Captured, rows: list[torch.Tensor]) -> None:
        for got, want in zip(rows, self.rows[what], strict=True):
            if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item()):
                raise LoadError(f"{what}: rows differ")


def _is_clear(steps: list[dict[str, float]]) -> bool:
    """Whether the likeliest token is well ahead in every step. Where two are close, the sums of another batch may swap them."""
    pairs = [sorted(step.values()) for step in steps]
    return all(len(pair) > 1 and pair[-1] - pair[-2] > EDGE for pair in pairs)


@contextmanager
def while_handles_work() -> Iterator[None]:
    """On a busy machine a client may come too late for its captures. Before that they have to be there."""
    start = time.monotonic()
    try:
        yield
    except LoadError as error:
        if "it has expired" not in str(error) or time.monotonic() - start < CAPTURE_SECONDS:
            raise


# ------------------------------------------------------------------------------------------------ one kind of client each

Ask = Callable[[Clients, random.Random], Awaitable[None]]


class Kind(NamedTuple):
    ask: Ask
    weight: float


KINDS: dict[str, Kind] = {}


def kind(weight: float) -> Callable[[Ask], Ask]:
    """Enter a function into the table, under its name."""

    def enter(ask: Ask) -> Ask:
        KINDS[ask.__name__.replace("_", " ")] = Kind(ask, weight)
        return ask

    return enter


def choose_question(clients: Clients, choose: random.Random, *edits: str) -> Question:
    return choose.choice([question for question in clients.oracle.texts if question.edit in edits])


@kind(20)
async def plain(clients: Clients, choose: random.Random) -> None:
    question = choose_question(clients, choose, "")
    text = await clients.text(question, [], choose.choice(KEYS), stream=choose.random() < 0.5)
    clients.oracle.check_text(question, text)


@kind(3)
async def plain_prompts_together(clients: Clients, choose: random.Random) -> None:
    every = [question for question in clients.oracle.texts if not (question.edit or question.is_chat)]
    questions = choose.sample(every, 3)
    found = await clients.create([question.prompt for question in questions], [], choose.choice(KEYS))
    for question, choice in zip(questions, found.choices, strict=True):
        clients.oracle.check_text(question, choice.text)


@kind(15)
async def steered(clients: Clients, choose: random.Random) -> None:
    question = choose_question(clients, choose, *VECTORS)
    vector = VECTORS[question.edit]
    plan = clients.plan(question, choose.choice([vector.tolist(), packed(vector), question.edit]))
    text = await clients.text(question, plan, choose.choice(KEYS), stream=choose.random() < 0.5)
    clients.oracle.check_text(question, text)


@kind(5)
async def patched(clients: Clients, choose: random.Random) -> None:
    question = choose_question(clients, choose, "run")
    text = await clients.text(question, clients.plan(question), choose.choice(KEYS), stream=choose.random() < 0.5)
    clients.oracle.check_text(question, text)


@kind(8)
async def captured_and_downloaded(clients: Clients, choose: random.Random) -> None:
    what, key = choose.choice(SMALL), choose.choice(KEYS)
    with while_handles_work():
        entries = await clients.captured(what, key, stream=choose.random() < 0.5)
        clients.oracle.check_rows(what, await clients.rows(entries, key))
        handle = f"{PATH}/captures/{entries[0]['handle']}"
        await clients.expect(404, "GET", handle, key="a stranger")
        if choose.random() < 0.5:
            await clients.expect(200, "DELETE", handle, key=key)
            await clients.expect(404, "GET", handle, key=key)


@kind(3)
async def captured_and_left_there(clients: Clients, choose: random.Random) -> None:
    await clients.captured(choose.choice([*SMALL, LARGE]), choose.choice(KEYS))


@kind(1)
async def captured_and_downloaded_slowly(clients: Clients, choose: random.Random) -> None:
    """Over some 10 s, in which the handle expires."""
    key = choose.choice(KEYS)
    with while_handles_work():
        entries = await clients.captured(LARGE, key)
        clients.oracle.check_rows(LARGE, await clients.rows(entries, key, pause=0.1))


@kind(1)
async def captured_and_deleted_while_downloaded(clients: Clients, choose: random.Random) -> None:
    key = choose.choice(KEYS)
    with while_handles_work():
        (entry,) = await clients.captured(LARGE, key)
        path = f"{PATH}/captures/{entry['handle']}"
        download, _ = await asyncio.gather(
            clients.http("GET", path, key=key), clients.expect(200, "DELETE", path, key=key)
        )
        if download[0] == 200:
            clients.oracle.check_rows(LARGE, [load(download[1])["rows"]])
        elif download[0] != 404:
            raise LoadError(f"{download}")


@kind(3)
async def vector_uploaded_used_and_deleted(clients: Clients, choose: random.Random) -> None:
    question, key, name = (
        choose_question(clients, choose, *VECTORS),
        choose.choice(KEYS),
        f"own {next(clients.numbers)}",
    )
    path = f"{PATH}/vectors/{name.replace(' ', '%20')}"
    await clients.expect(200, "POST", f"{PATH}/vectors", save({name: VECTORS[question.edit]}), key)
    clients.oracle.check_text(question, await clients.text(question, [steer(name)], key))
    await clients.expect(403, "DELETE", path, key="a stranger")
    await clients.expect(200, "DELETE", path, key=key)


@kind(2)
async def run_recorded_used_and_deleted(clients: Clients, choose: random.Random) -> None:
    question, key, name = choose_question(clients, choose, "run"), choose.choice(KEYS), f"own-{next(clients.numbers)}"
    await clients.expect(200, "POST", f"{PATH}/runs", {**RUN, "name": name}, key)
    clients.oracle.check_text(question, await clients.text(question, [patch(name)], key))
    await clients.expect(200, "DELETE", f"{PATH}/runs/{name}", key=key)


@kind(2)
async def looking(clients: Clients, choose: random.Random) -> None:
    for path in (f"{PATH}/gauges", f"{PATH}/capabilities", f"{PATH}/vectors", f"{PATH}/runs", "/metrics"):
        await clients.expect(200, "GET", path)


BAD: list[tuple[Any, str | None]] = [  # the field, and the param of the error
    ({"plan": [steer([1.0])]}, "midstream.plan"),
    ({"plan": [steer("nobody's")]}, "midstream.plan"),
    ({"plan": [{**steer([1.0] * HIDDEN), "kind": "steeer"}]}, "midstream.plan[0].kind"),
    ({"plan": [{**steer([1.0] * HIDDEN), "layers": [99]}]}, "midstream.plan"),
    ({"plan": [steer({"data": "?", "dtype": "float32", "shape": [HIDDEN]})]}, "midstream.plan[0].vector.data"),
    ({"plan": [patch("nobody's")]}, "midstream.plan[0].source"),
    ({"plan": [steer([0.5] * HIDDEN)] * 1025}, "midstream.plan"),
    ({"plan": [{**steer([1e38] * HIDDEN), "scale": 1e38}]}, "midstream.plan"),
    ({"plan": [], "answers": ["Constantinople and Rome"]}, "midstream.answers"),
    ({"plans": []}, "midstream"),
    ("{", "midstream"),
]


@kind(5)
async def bad_plan(clients: Clients, choose: random.Random) -> None:
    given, param = choose.choice(BAD)
    body = {"model": "demo", "prompt": choose.choice(PROMPTS), "max_tokens": TOKENS, "midstream": given}
    error = json.loads(await clients.expect(400, "POST", "/v1/completions", body))["error"]
    if error["param"] != param:
        raise LoadError(f"{param}: {error}")


@kind(3)
async def bad_in_other_ways(clients: Clients, choose: random.Random) -> None:
    status, method, path, body = choose.choice(
        [
            (404, "GET", f"{PATH}/captures/{'x' * 43}", b""),
            (404, "DELETE", f"{PATH}/vectors/nobody's", b""),
            (403, "DELETE", f"{PATH}/runs/held", b""),
            (403, "PUT", f"{PATH}/plan", {"plan": []}),
            (400, "POST", f"{PATH}/vectors", b"nonsense" * 1000),
            (409, "POST", f"{PATH}/vectors", save(VECTORS)),
            (400, "POST", f"{PATH}/runs", {**RUN, "layers": [99]}),
            (409, "POST", f"{PATH}/runs", {**RUN, "name": "held"}),
            (400, "POST", "/v1/messages", {"model": "demo", "messages": [], "max_tokens": 1, "midstream": []}),
            (400, "POST", "/v1/completions", {"model": "demo", "prompt": "The", "midstraem": []}),
            (400, "POST", "/v1/completions", b'{"model": "demo", "prompt": "The", "midstream": '),
            (400, "POST", "/v1/completions", {"model": "demo", "prompt": LONG * 3, "midstream": {"plan": []}}),
        ]
    )
    error = json.loads(await clients.expect(status, method, path, body, "a stranger"))["error"]
    if not error["message"]:
        raise LoadError(f"{path}: {error}")


# ------------------------------------------------------------------------------------------------------ those that leave


def long_stream(clients: Clients, choose: random.Random) -> dict[str, Any]:
    """A body: plain, steered, captured or patched."""
    plan: list[Any] = choose.choice(
        [[], [steer(packed(VECTORS["v0"]))], SMALL[0].plan, [patch("held")], [patch("held"), *SMALL[0].plan]]
    )
    body = {"model": "demo", "prompt": choose.choice(PROMPTS), "max_tokens": 300, "ignore_eos": True, "stream": True}
    return body | ({"midstream": {"plan": plan}} if plan else {})


@kind(5)
async def leaves_in_the_middle(clients: Clients, choose: random.Random) -> None:
    reader, writer = await clients.connect(request("POST", "/v1/completions", long_stream(clients, choose)))
    for _ in range(choose.randrange(1, 20)):
        await reader.readline()
    writer.transport.abort()


@kind(5)
async def leaves_before_the_first_byte(clients: Clients, choose: random.Random) -> None:
    body = long_stream(clients, choose) | {"stream": choose.random() < 0.5}
    _, writer = await clients.connect(request("POST", "/v1/completions", body))
    await asyncio.sleep(choose.choice([0.0, 0.01, 0.1, 0.5]))
    writer.transport.abort()


@kind(3)
async def leaves_during_an_upload(clients: Clients, choose: random.Random) -> None:
    path, data = choose.choice(
        [
            (f"{PATH}/vectors", save({"half": VECTORS["v0"].repeat(1000)})),
            (f"{PATH}/runs", json.dumps({**RUN, "name": "half"}).encode()),
            (f"{PATH}/plan", b'{"plan": []}'),
            ("/v1/completions", json.dumps(long_stream(clients, choose)).encode()),
            ("/v1/messages", b'{"model": "demo"}'),
        ]
    )
    method = "PUT" if path.endswith("plan") else "POST"
    with suppress(ConnectionError):  # refused before all of it is sent
        _, writer = await clients.connect(request(method, path, data[: len(data) // 2], length=len(data)))
        await asyncio.sleep(choose.choice([0.0, 0.05]))
        writer.transport.abort()


@kind(2)
async def leaves_while_a_run_is_recorded(clients: Clients, choose: random.Random) -> None:
    """The run may be there afterwards; its owner deletes it."""
    name = f"left-{next(clients.numbers)}"
    _, writer = await clients.connect(request("POST", f"{PATH}/runs", {**RUN, "name": name}))
    await asyncio.sleep(choose.choice([0.0, 0.01, 0.05, 0.2]))
    writer.transport.abort()
    for _ in range(50):
        await asyncio.sleep(0.2)
        status, data = await clients.http("DELETE", f"{PATH}/runs/{name}")
        if status == 200:
            return
        if status != 404:
            raise LoadError(f"deleting the run of a client that has left: {status}: {data!r}")


@kind(2)
async def leaves_a_download(clients: Clients, choose: random.Random) -> None:
    (entry,) = await clients.captured(LARGE, KEYS[0])
    reader, writer = await clients.connect(request("GET", f"{PATH}/captures/{entry['handle']}"), 8192)
    await reader.read(1000)
    await asyncio.sleep(choose.choice([0.0, 0.5]))
    writer.transport.abort()


@kind(1)
async def never_reads(clients: Clients, choose: random.Random) -> None:
    """800 kB of events, of which the client's system takes some kB."""
    body = {**long_stream(clients, choose), "logprobs": 20}
    _, writer = await clients.connect(request("POST", "/v1/completions", body), 4096)
    await asyncio.sleep(10)
    writer.transport.abort()
