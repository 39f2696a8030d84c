"""The cost of plans over HTTP: `midstream serve` against stock `vllm serve`, with the client of `vllm bench serve`.

    python benchmarks/serving.py --cpu                                   # the bundled model, a small load
    python benchmarks/serving.py --runner v2 --shape llama-3.1-8b        # one GPU

Both servers are up and take turns. Requests arrive at random (`--burstiness 1`: Poisson) at two rates, both relative to what stock vLLM
finishes in a second: faster, for the throughput, and slower, for the time to the first token (TTFT) and the time for each token after it
(TPOT). `--request-rate` sets the slower one. Every run has new prompts of the same lengths, so none finds its prompts in the prefix cache.

`vllm bench serve` sends one body with all requests. For the run with a vector of its own in each request, its function that sends a
request is wrapped, and puts the next of the prepared bodies in.

A ratio is the median over the rounds with its 95 % bootstrap interval. It is above 1 if midstream is better in tok/s, and below 1 if it is
better in TTFT and TPOT. Captures are measured on midstream's idle server, with new prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from figures import Results, ratio
from overhead import LOADS, RATE, Load, long_prompts
from side_by_side import (
    Measured,
    Runs,
    add_arguments,
    engine_arguments,
    in_turns,
    mean,
    pin,
    settle,
)

NAME = "served"  # of the model
FIELD = "midstream"
CAPTURES = "captures"
VECTOR = "steer"  # the name of the uploaded vector
SLOWER = 0.7  # arrivals for each request that stock vLLM finishes, where TTFT and TPOT are measured
START_SECONDS = 600
KV_BYTES = 12 << 30
Result = dict[str, float]


class Row(NamedTuple):
    """One kind of run.

    Attributes:
        stock: on the stock server.
        bodies: the field `midstream` of each request, or of all requests if there is one; none: no field.
    """

    name: str
    stock: bool = False
    bodies: list[Any] = []


# Servers.


class Served:
    """A server that is up, on a connection that stays open."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        self._last = 0.0

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        if time.monotonic() > self._last + 2:  # the server closes connections that were idle for longer
            self._connection.close()
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
        except OSError:
            self._connection.close()
            raise
        found = response.read()
        self._last = time.monotonic()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {found[:1000].decode(errors='replace')}")
        return found


@contextlib.contextmanager
def served(arguments: argparse.Namespace, path: str, flags: list[str], port: int, *, stock: bool) -> Iterator[Served]:
    """A server in a process group of its own, without a log of requests."""
    program = ["vllm.entrypoints.openai.api_server", "--model"] if stock else ["midstream.cli", "serve"]
    command = [sys.executable, "-m", *program, path, "--host", "127.0.0.1", "--port", str(port), *flags]
    environment = (
        {**os.environ, "VLLM_PLUGINS": ""} if stock else {**os.environ, "MIDSTREAM_CAPTURE_BYTES": "8000000000"}
    )
    log = Path(tempfile.mkdtemp(prefix="served-")) / "log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        server = Served(port)
        try:
            while True:
                if process.poll() is not None or time.perf_counter() > began + START_SECONDS:
                    raise RuntimeError(f"The server did not start:\n{log.read_text()[-8000:]}")
                with contextlib.suppress(OSError, RuntimeError):
                    server.ask("GET", "/health")
                    break
                time.sleep(0.5)
            root = psutil.Process(process.pid)
            pin(arguments, [root, *root.children(recursive=True)])
        except BaseException:
            stop(process)
            raise
    print(
        f"{'stock' if stock else 'midstream'} server started in {time.perf_counter() - began:.0f} s, beside the other"
    )
    try:
        yield server
    finally:
        stop(process)


def free_ports() -> list[int]:
    """Two of them."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return [free.getsockname()[1] for free in (one, other)]


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def model_and_flags(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The model's directory, which has a tokenizer, and the flags of both servers."""
    path, given = engine_arguments(arguments)
    given.pop("skip_tokenizer_init", None)
    if not arguments.cpu:
        given["kv_cache_memory_bytes"] = KV_BYTES  # which vLLM else measures, and both start at the same time
    flags = ["--served-model-name", NAME, "--disable-uvicorn-access-log"]
    for name, value in given.items():
        if value is not False:
            flags.append(f"--{name.replace('_', '-')}")
            flags += [] if value is True else [value if isinstance(value, str) else json.dumps(value)]
    return path, flags


def single_tokens() -> list[str]:
    """Texts of one token each, also one after the other, for the bundled model's tokenizer."""
    from transformers import AutoTokenizer

    from midstream import demo_model

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    texts = (tokenizer.decode([number]) for number in range(len(tokenizer)))
    return [text for text in texts if text[:1] == " " and text[1:].isalpha()]


# Runs.


class Bench:
    """Runs of `vllm bench serve` on one load."""

    def __init__(self, arguments: argparse.Namespace, load: Load, path: str) -> None:
        self._load, self._path, self._arguments = load, path, arguments
        self._words = single_tokens()
        self._file = Path(tempfile.mkdtemp(prefix="prompts-")) / "prompts.jsonl"

    def run(self, server: Served, row: Row, rate: float) -> Result:
        """Seconds of the run, and the medians of TTFT and TPOT in seconds."""
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._write_prompts()
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        one = {FIELD: row.bodies[0]} if len(row.bodies) == 1 else {}
        given = [
            *("--base-url", server.url, "--model", NAME, "--tokenizer", self._path, "--backend", "openai"),
            *("--dataset-name", "custom", "--dataset-path", str(self._file), "--custom-output-len", "-1"),
            *("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--num-prompts", str(self._load.count), "--ready-check-timeout-sec", "0"),
            *("--request-rate", str(rate), "--burstiness", str(self._arguments.burstiness)),
            *("--extra-body", json.dumps(one)),
        ]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), each_with(serve, row.bodies):
            found = asyncio.run(serve.main_async(parser.parse_args(given)))
        if found["completed"] != self._load.count or found["total_output_tokens"] != self._load.tokens:
            raise RuntimeError(f"{row.name}: some requests failed: {found.get('errors')}")
        return {
            "seconds": found["duration"],
            "ttft": found["median_ttft_ms"] / 1e3,
            "tpot": found["median_tpot_ms"] / 1e3,
        }

    def _write_prompts(self) -> None:
        with self._file.open("w") as file:
            for tokens, params in zip(self._load.prompts(), self._load.params, strict=True):
                prompt = "".join(self._words[token % len(self._words)] for token in tokens)
                file.write(json.dumps({"prompt": prompt, "output_tokens": params["max_tokens"]}) + "\n")


@contextlib.contextmanager
def each_with(serve: Any, bodies: list[Any]) -> Iterator[None]:
    """Have each request carry the next body, if there are several."""
    send, left = serve.ASYNC_REQUEST_FUNCS["openai"], iter(bodies)

    async def with_body(request_func_input: Any, *args: Any, **kwargs: Any) -> Any:
        request_func_input.extra_body = {**(request_func_input.extra_body or {}), FIELD: next(left)}
        return await send(request_func_input, *args, **kwargs)

    serve.ASYNC_REQUEST_FUNCS["openai"] = with_body if len(bodies) > 1 else send
    try:
        yield
    finally:
        serve.ASYNC_REQUEST_FUNCS["openai"] = send


def captured(server: Served, length: int, prompts: Iterator[list[int]]) -> Result:
    """All layers of a prompt: what the request takes longer than one without captures, in seconds, and the download."""
    plan = [{"kind": "capture", "site": "resid_post", "positions": "all_prompt"}]
    plain, more, download, size = [], [], [], 0
    for _ in range(5):
        start = time.perf_counter()
        server.ask("POST", "/v1/completions", {"model": NAME, "prompt": next(prompts), "max_tokens": 1})
        plain.append(time.perf_counter() - start)
        body = {"model": NAME, "prompt": next(prompts), "max_tokens": 1, FIELD: {"plan": plan}}
        start = time.perf_counter()
        entries = json.loads(server.ask("POST", "/v1/completions", body))[FIELD]["captures"]
        more.append(time.perf_counter() - start)
        start = time.perf_counter()
        size = sum(len(server.ask("GET", f"/v1/midstream/captures/{entry['handle']}")) for entry in entries)
        download.append(time.perf_counter() - start)
        for entry in entries:
            server.ask("DELETE", f"/v1/midstream/captures/{entry['handle']}")
    before, after, took = map(statistics.median, (plain, more, download))
    return {"plain": before, "with": after, "more": after - before, "size": size, "rate": size / took}


# What the command prints.


def rows_of(server: Served, load: Load) -> list[Row]:
    """The rows, with what they need on midstream's server."""
    from safetensors.numpy import save

    found = json.loads(server.ask("GET", "/v1/midstream/capabilities"))
    middle, hidden = found["num_layers"] // 2, found["hidden_size"]
    vectors = np.random.default_rng(0).normal(scale=0.01, size=(load.count, hidden)).astype("<f4")
    server.ask("POST", "/v1/midstream/vectors", save({VECTOR: vectors[0]}))

    def steer(vector: Any) -> dict[str, Any]:
        return {"kind": "steer", "site": "resid_post", "vector": vector, "layers": [middle]}

    def probe(vector: Any) -> dict[str, Any]:
        return {"kind": "probe", "site": "resid_post", "layer": middle, "weight": [vector], "name": "p"}

    def gate(vector: Any) -> dict[str, Any]:
        return {"kind": "when", "probe": probe(vector), "above": 0.0, "then": [steer(vector)]}

    def packed(vector: np.ndarray) -> dict[str, Any]:
        return {"data": base64.b64encode(vector.tobytes()).decode(), "dtype": "float32", "shape": [hidden]}

    def each(make: Callable[[Any], dict[str, Any]]) -> list[Any]:
        return [{"plan": [make(packed(vector))]} for vector in vectors]

    return [
        Row("stock vLLM", stock=True),
        Row("midstream, no plan"),
        Row("every request steered by name", bodies=[{"plan": [steer(VECTOR)]}]),
        Row("a vector of its own in each request", bodies=each(steer)),
        Row("a probe of its own in each request", bodies=each(probe)),
        Row("a gate and a steer of its own in each request", bodies=each(gate)),
    ]


def print_table(measured: Measured[Result], rows: list[Row], load: Load, arguments: argparse.Namespace) -> None:
    def of(name: str, key: str) -> list[float]:
        return mean(measured[name], lambda result: result[key])

    def ms(row: str, measure: str, seconds: Any) -> str:
        return results.add(row, measure, "ms", 1e3 * np.array(seconds))

    model = "bundled model" if arguments.cpu else f"{arguments.shape} shape, {arguments.runner}"
    stock = rows[0].name
    results = Results(arguments, "serving", f"{arguments.load}, {load.count} requests")
    print(
        f"\n{results.machine}\n{model}{', eager' if arguments.eager else ''}; load {arguments.load}: {load.count} requests, "
        f"{load.tokens:,} generated tokens; burstiness {arguments.burstiness}; {len(measured[stock])} rounds\n\n"
        "| run | tok/s | of stock | TTFT, ms | of stock | more, ms | TPOT, ms | of stock |\n" + "|---" * 8 + "|"
    )
    for row in rows:
        name, own = row.name, row.name == stock
        seconds, (ttft, tpot) = of(name, "seconds"), (of(slow(name), key) for key in ("ttft", "tpot"))
        stock_ttft, stock_tpot = (of(slow(stock), key) for key in ("ttft", "tpot"))
        cells = [name, results.add(name, "throughput", "tok/s", load.tokens / np.array(seconds))]
        cells.append("" if own else results.add(name, "throughput", "of stock", ratio(of(stock, "seconds"), seconds)))
        cells.append(ms(name, "TTFT", ttft))
        cells.append("" if own else results.add(name, "TTFT", "of stock", ratio(ttft, stock_ttft)))
        cells.append("" if own else ms(name, "extra TTFT", np.array(ttft) - np.array(stock_ttft)))
        cells.append(ms(name, "TPOT", tpot))
        cells.append("" if own else results.add(name, "TPOT", "of stock", ratio(tpot, stock_tpot)))
        print(f"| {' | '.join(cells)} |")
    tokens, size = captured_tokens(arguments), measured[CAPTURES][0][0]["size"]
    plain, with_captures = f"a prompt of {tokens} tokens", f"all layers of {tokens} tokens captured"
    print(
        f"\n{with_captures}, {size / 1e6:.0f} MB: the request takes {ms(with_captures, 'extra time', of(CAPTURES, 'more'))} ms "
        f"longer than without ({ms(with_captures, 'time', of(CAPTURES, 'with'))} ms, "
        f"{ms(plain, 'time', of(CAPTURES, 'plain'))} ms); download "
        f"{results.add(with_captures, 'download', 'GB/s', np.array(of(CAPTURES, 'rate')) / 1e9)} GB/s"
    )


def slow(name: str) -> str:
    return f"{name}, slower arrivals"


def captured_tokens(arguments: argparse.Namespace) -> int:
    return 500 if arguments.cpu else 512  # the bundled model's server takes 512 with the answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="mixed")
    parser.add_argument("--requests", type=int, help="in place of those of the load")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="as of overhead.py")
    parser.add_argument("--request-rate", type=float, help="requests a second where TTFT and TPOT are measured")
    parser.add_argument("--burstiness", type=float, default=1.0, help="as of `vllm bench serve`")
    add_arguments(parser)
    arguments = parser.parse_args()
    settle(arguments)
    load = Load(arguments, arguments.load)
    path, flags = model_and_flags(arguments)
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            starts = {
                stock: pool.submit(stack.enter_context, served(arguments, path, flags, port, stock=stock))
                for stock, port in zip((True, False), free_ports(), strict=True)
            }
        servers = {stock: start.result() for stock, start in starts.items()}
        rows = [
            row
            for row in rows_of(servers[False], load)
            if row.stock or any(text in row.name for text in arguments.only)
        ]
        bench = Bench(arguments, load, path)
        alone = [bench.run(servers[True], rows[0], float("inf"))["seconds"] for _ in range(3)][-1]
        fast, slower = RATE * load.count / alone, arguments.request_rate or SLOWER * load.count / alone
        print(f"stock vLLM takes {alone:.2f} s for all requests at once; {fast:.1f} and {slower:.1f} arrive a second")
        length = captured_tokens(arguments)
        prompts = (prompt for seed in range(1 << 30) for prompt in long_prompts(16, length, 1000 + seed))
        runs: Runs[Result] = {}
        for row in rows:
            for name, rate in ((row.name, fast), (slow(row.name), slower)):
                runs[name] = [functools.partial(bench.run, servers[row.stock], row, rate)]
        runs[CAPTURES] = [functools.partial(captured, servers[False], length, prompts)]
        print_table(in_turns(runs, arguments), rows, load, arguments)


if __name__ == "__main__":
    main()
