"""Whether attackers delay a neighbour: `midstream serve` on the bundled model, a client that streams plain requests all the time, and three
other API keys that send the costliest plans that the server accepts, and everything else that it should stand.

python tests/gpu/check_neighbours.py --runner v2 --seconds 600 --seed 1
python tests/gpu/check_neighbours.py --cpu

It prints a line for each kind of attack: how much longer the neighbour's longest wait is than beside equal requests without plans, for a
token and for the first token, as the median and the most of some repetitions; with all attackers at once, and one after the other. It
exits 1 if a median breaks the promise, if an answer of the neighbour changes, at an answer 500, and if the server is not as it was before.

On a GPU the time on the clock counts. With `--cpu` other programs may have the processors, so the processor time counts that the engine's
process takes between two tokens. The time on the clock is printed, too, and only seconds of it count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import on_gpu

PROMISE = 0.1  # seconds that a neighbour waits longer for a step
BUSY = 5.0  # seconds on the clock that count with `--cpu`, where other programs may have the processors
STEPS_TO_FIRST = 3  # before a first token: the step that runs, one that is scheduled already, and the request's own
LAYERS, HIDDEN, HEAD = 8, 256, 64
NEIGHBOUR, ATTACKERS = "the-neighbour", ("ada", "bob", "cyd")
MOST_TOKENS = 300  # of an attacker's prompt
PART = 1.5  # seconds in which attackers begin requests
LEAST = 3  # repetitions
LEAVES = 0.15  # the share of requests that are cancelled
POOL = 20  # plans of each attack, more than the scheduler remembers
SITES = ["resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out"]
PATH = "/v1/midstream"
ENVIRONMENT = {"MIDSTREAM_CAPTURE_SECONDS": "10"}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--cpu", action="store_true", help="on the CPU build")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attacks, and of the search before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", help="these attacks: steers edits long forms costly readings hostile uploads"
    )
    return on_gpu.parsed_runner(parser)


# --------------------------------------------------------------------------------------------------------------- attacks


@dataclass
class Attack:
    """Requests of one kind.

    Attributes:
        values: the requests' field `midstream`, as JSON, perhaps of no sense.
        shortest: tokens that a prompt needs.
        before: what an attacker does before each request: uploads and deletions.
    """

    name: str
    values: list[bytes] = field(default_factory=list)
    shortest: int = 1
    before: Callable[[Client, random.Random], bytes] | None = None


class Makers:
    """Makes the attacks. The plans are as costly as the check of strangers' plans allows on this kind of device."""

    def __init__(self, seed: int, device: str) -> None:
        import numpy

        self.rng, self.device = random.Random(seed), device
        self._normal = numpy.random.default_rng(seed).standard_normal

    def vector(self, *shape: int) -> Any:
        return self._normal(shape or (HIDDEN,)).astype("float32")

    def is_accepted(self, items: Sequence[Any]) -> bool:
        from midstream import Plan
        from midstream.errors import PlanError
        from midstream.plan.strangers import check_strangers

        try:
            check_strangers(Plan.of(items), LAYERS, self.device)
            return True
        except PlanError:
            return False

    def at_bound(self, items: Sequence[Any]) -> bytes:
        """The longest start of `items` that is accepted."""
        low, high = 0, len(items)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.is_accepted(items[:middle]) else (low, middle - 1)
        return written(items[:low])

    def steers(self) -> Attack:
        from midstream import Steer

        def one() -> bytes:
            items = [Steer("resid_post", layers=[i % LAYERS], vector=self.vector()) for i in range(1024)]
            assert self.is_accepted(items), "1,024 steers are promised"
            return written(items)

        return Attack("1,024 steers", [one() for _ in range(POOL)])

    def edits(self) -> Attack:
        from midstream import Clamp, Patch, Probe, Steer, When

        rng, vector = self.rng, self.vector
        probe = Probe("resid_pre", layer=0, weight=vector() / 16, name="p")

        def at(i: int) -> dict[str, Any]:
            return {"layer": i % LAYERS, "position": i // LAYERS}

        def some(i: int) -> Any:
            site, layers = rng.choice(SITES), [rng.randrange(LAYERS)]
            kinds = [
                lambda: Patch(site, **at(i), source=vector(), alpha=rng.random()),
                lambda: Steer(site, layers=layers, vector=vector(), norm_match=rng.random() < 0.5, scale=0.1),
                lambda: Clamp(site, layers=layers, direction=vector(), high=rng.random()),
                lambda: Steer("attn_z", layers=layers, vector=vector(HEAD), head=rng.randrange(4)),
                lambda: Steer(site, layers=layers, vector=vector(), positions=rng.sample(range(128), 3)),
                lambda: When(probe, above=rng.random(), then=Clamp("resid_post", layers=layers, direction=vector())),
            ]
            return rng.choice(kinds)()

        numbers, clamp = range(1024), partial(Clamp, "resid_post", high=0.5)
        families: list[Callable[[], list[Any]]] = [
            lambda: [Patch("resid_post", **at(i), source="zeros", alpha=rng.random()) for i in numbers],
            lambda: [Patch("mlp_out", **at(i), source=vector(), mask=abs(vector()).clip(0, 1)) for i in numbers],
            lambda: [clamp(layers=[i % LAYERS], direction=vector()) for i in numbers],
            lambda: [Steer("attn_out", layers=[i % LAYERS], vector=vector(), norm_match=True) for i in numbers],
            lambda: [Steer("resid_mid", layers=[i % 8], vector=vector(), positions=[i // 8, -1]) for i in numbers],
            lambda: [Clamp("attn_z", layers=[i % LAYERS], direction=vector(HEAD), head=[0, 2]) for i in numbers],
            lambda: [When(probe, above=i / 999, then=clamp(layers=[i % 8], direction=vector())) for i in numbers],
            lambda: [some(i) for i in numbers],
        ]
        values = [self.at_bound(family()) for family in itertools.islice(itertools.cycle(families), POOL)]
        return Attack("edits at the bound", values, shortest=140)

    def chain(self, length: int, ops: Sequence[str]) -> Any:
        from written_programs import program

        from midstream.plan.steps import INPUT, Ref

        steps: list[Any] = []
        for i in range(length):
            op, x = self.rng.choice(ops), Ref(i - 1) if i else INPUT
            steps.append((op, (x, 0.5 + self.rng.random())) if op.endswith("Tensor") else (op, (x,)))
        return program(*steps, width=HIDDEN)

    def long_programs(self, name: str, ops: Sequence[str]) -> Attack:
        """The longest program that is accepted at every layer."""
        from midstream.plan.program import MAX_STEPS
        from midstream.plan.values import Apply

        def one() -> bytes:
            for length in range(MAX_STEPS, 0, -8):
                plan = [Apply(self.rng.choice(SITES), program=self.chain(length, ops))]
                if self.is_accepted(plan):
                    return written(plan)
            raise AssertionError("no program is accepted at every layer")

        return Attack(name, [one() for _ in range(POOL)])

    def costly(self, seed: int, seconds: float) -> Attack:
        """The programs that a search finds to cost most for their charge."""
        import costly_plans
        import torch

        from midstream.plan.steps import INPUT, Ref, Step
        from midstream.plan.values import Apply

        torch.set_num_threads(1)
        found = costly_plans.search(seed, seconds, torch.device(self.device), width=HIDDEN)
        worst = sorted((each for each in found.values() if each.seconds > 1e-4), key=lambda each: -each.ratio)[:POOL]
        print(f"a search among {len(found)} operations; the worst:", flush=True)
        for each in worst[:5]:
            print(f"  {each.ratio:.2f} of its charge, {each.seconds * 1e3:.2f} ms: {each.candidate}", flush=True)
        values = []
        for each in worst:
            made = each.candidate.program()
            steps = (*made.steps, Step("mul.Tensor", (INPUT, 0.5)))  # a program that returns its input is left out
            program = dataclasses.replace(made, steps=steps, result=Ref(len(steps) - 1))
            items = [Apply(self.rng.choice(SITES), layers=[i % LAYERS], program=program) for i in range(256)]
            values.append(self.at_bound(items))
        return Attack("the costliest programs", values)

    def readings(self) -> Attack:
        from midstream import Capture, Probe
        from midstream.plan.program import MAX_STEPS
        from midstream.plan.steps import Ref

        def kept(length: int) -> Any:
            made = self.chain(length, ["mul.Tensor", "neg.default"])
            return dataclasses.replace(made, result=(Ref(length - 1), Ref(0)))

        def captures(positions: Any) -> list[Any]:
            return [
                Capture(site, layers=[layer], positions=positions, when=when)
                for layer in range(LAYERS)
                for site in SITES
                for when in ("before", "after")
            ]

        def with_programs() -> list[Any]:
            length = self.rng.choice([1, 16, MAX_STEPS])
            sites = itertools.product(SITES, range(LAYERS))
            return [Capture(site, layers=[k], positions="all", program=kept(length)) for site, k in sites]

        def probes() -> list[Any]:
            weight = self.vector(HIDDEN, 64)
            every = range(64)
            return [Probe(SITES[i % 7], layer=i % LAYERS, weight=weight, name=f"p{i}", positions="all") for i in every]

        families = [
            lambda: captures("all"),
            lambda: captures(self.rng.sample(range(140), 30)),
            with_programs,
            probes,
            lambda: [*probes()[:8], *captures("all")],
        ]
        values = [self.at_bound(family()) for family in itertools.islice(itertools.cycle(families), POOL)]
        return Attack("captures and probes", values, shortest=140)

    def hostile(self) -> Attack:
        """Random programs from the whole table with hostile numbers."""
        import drawn_programs

        from midstream import Capture, Steer
        from midstream.errors import PlanError
        from midstream.plan.values import Apply

        values = list[bytes]()
        numbers = itertools.count()
        while len(values) < 4 * POOL:
            program = drawn_programs.drawn(random.Random(f"{self.rng.random()} {next(numbers)}"))
            with contextlib.suppress(PlanError):
                if program is not None:
                    wide = drawn_programs.widened(program, HIDDEN)
                    layers = [self.rng.randrange(LAYERS)]
                    edit = {"layers": layers, "program": wide}
                    reads = Capture("resid_post", positions="all", **edit) if wide.is_read else None
                    huge = Steer("resid_pre", layers=layers, vector=[self.rng.choice([1e38, 1e-40, 3e4])] * HIDDEN)
                    items = [reads or Apply("resid_post", **edit), *([huge] if self.rng.random() < 0.3 else [])]
                    if self.is_accepted(items):
                        values.append(written(items))
        return Attack("hostile programs", values)

    def mutated(self, of: Iterable[Attack]) -> Attack:
        """Plans of other attacks with random mistakes, and bodies that are no plans."""
        from mutations import mutated

        rng, values = self.rng, list[bytes]()
        small = [json.loads(json.loads(value)) for each in of for value in each.values if len(value) < 100_000]
        for _ in range(4 * POOL):
            plan = mutated(rng, rng.choice(small))
            text = json.dumps(plan)
            if rng.random() < 0.2:
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice('{}[]",:\\x0') + text[at + rng.randint(0, 3) :]
            choices = [json.dumps(text), json.dumps({"plan": plan}), text, "[" * 20_000, '"' + "[" * 200_000 + '"']
            values.append(rng.choices(choices, [8, 4, 4, 1, 1])[0].encode(errors="surrogatepass"))
        return Attack("mutated bodies", values, shortest=4)

    def uploads(self) -> Attack:
        """Vectors, SAEs and runs that are uploaded, used and deleted."""
        import torch
        from safetensors.torch import save

        from midstream.sae import SAE

        def autoencoder(features: int) -> bytes:
            config = {"architecture": "standard", "d_in": HIDDEN, "d_sae": features}
            shapes = {
                "W_enc": (HIDDEN, features),
                "W_dec": (features, HIDDEN),
                "b_dec": (HIDDEN,),
                "b_enc": (features,),
            }
            weights = {name: torch.from_numpy(self.vector(*shape)) * 0.05 for name, shape in shapes.items()}
            return SAE(config, weights, site="resid_post", layer=3).written()

        saes = [autoencoder(features) for features in (64, 512, 4096)]
        vectors = torch.from_numpy(self.vector(1000, HIDDEN))
        numbers = itertools.count()

        def before(client: Client, rng: random.Random) -> bytes:
            name = f"own-{next(numbers)}"
            match rng.choice(["sae", "vectors", "run"]):
                case "sae":
                    client.ask("POST", f"{PATH}/saes/{name}", rng.choice(saes))
                    sae: dict[str, Any] = {"kind": "sae", "sae": name}
                    does = [{"do": "capture", "top_k": 5, "positions": "all"}, {"do": "ablate", "feature": 5}]
                    client.later("DELETE", f"{PATH}/saes/{name}")
                    return json.dumps({"plan": [sae | rng.choice(does)]}).encode()
                case "vectors":
                    names = [f"{client.key} {i}" for i in range(rng.choice([1, 100, 1000]))]
                    file = save({name: vectors[i].clone() for i, name in enumerate(names)})
                    client.ask("POST", f"{PATH}/vectors?replace=true", file)
                    for name in rng.sample(names, min(len(names), 10)):
                        client.later("DELETE", vector_path(name))
                    steer = {"kind": "steer", "site": "resid_post", "layers": [3], "vector": names[0]}
                    return json.dumps({"plan": [steer]}).encode()
            run = {"prompt": "The capital of Norway is", "sites": SITES, "name": name}
            client.ask("POST", f"{PATH}/runs", json.dumps(run).encode())
            client.later("DELETE", f"{PATH}/runs/{name}")
            patch = {"kind": "patch", "site": "resid_post", "layer": 3, "position": 2, "source": {"run": name}}
            return json.dumps({"plan": [patch | {"source_position": 2}]}).encode()

        return Attack("uploads and deletions", shortest=4, before=before)


def vector_path(name: str) -> str:
    return f"{PATH}/vectors/{urllib.parse.quote(name)}"


def written(items: Any) -> bytes:
    """A plan as the value of the field `midstream`: a text that is JSON."""
    from midstream import Plan

    return json.dumps(Plan.of(items).to_json()).encode()


# ------------------------------------------------------------------------------------------------------------- attackers


class Client:
    """An attacker with one API key.

    Attributes:
        statuses: how often each status came; 0 for requests that it cancelled.
        messages: of errors, and the bodies that caused them.
    """

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key
        self.statuses: Counter[int] = Counter()
        self.messages: dict[str, bytes] = {}
        self._later: list[tuple[str, str]] = []

    def later(self, method: str, path: str) -> None:
        """A request without a body, to be sent after the next one for text."""
        self._later.append((method, path))

    def ask(self, method: str, path: str, body: bytes = b"", lines: int | None = None) -> None:
        """Send a request, and read the response to its end; or leave after so many lines."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        try:
            connection.request(method, path, body, headers)
            if lines == 0:
                self.statuses[0] += 1
                return
            response = connection.getresponse()
            if lines is not None and response.status == 200:
                for _ in range(lines):
                    response.readline()
                self.statuses[0] += 1
                return
            found = response.read()
            self.statuses[response.status] += 1
            if response.status != 200 or b'"error"' in found[:200]:
                self.messages.setdefault(f"{response.status} {method} {path}: {found[:600]!r}", body)
        finally:
            connection.close()

    def complete(self, attack: Attack | None, value: bytes | None, rng: random.Random) -> None:
        """One request for text; its prompt, length and end are the same with and without an attack."""
        shortest = attack.shortest if attack is not None else 1
        ids = [1 + rng.randrange(300) for _ in range(max(shortest, rng.choice([1, 5, 40, 150, MOST_TOKENS])))]
        tokens, leaves = rng.choice([1, 2, 8]), rng.random() < LEAVES
        lines = rng.choice([0, 0, 2, 6]) if leaves else None
        given = {"model": "demo", "prompt": ids, "max_tokens": tokens, "temperature": 0.0, "stream": leaves}
        body = json.dumps(given | {"ignore_eos": True}).encode()
        if value is not None:
            body = body[:-1] + b', "midstream": ' + value + b"}"
        self.ask("POST", "/v1/completions", body, lines)

    def attack(self, attack: Attack, is_plain: bool, seconds: float, seed: str) -> None:
        """Send one request after another. `is_plain`: the same ones without plans and uploads."""
        rng, ends = random.Random(seed), time.monotonic() + seconds
        values = itertools.cycle(rng.sample(attack.values, len(attack.values)))
        plain = Attack("plain", shortest=attack.shortest)
        for number in itertools.count():
            if time.monotonic() > ends:
                return
            of_request = random.Random(f"{seed} {number}")
            if is_plain:
                self.complete(plain, None, of_request)
                continue
            value = attack.before(self, of_request) if attack.before is not None else next(values)
            self.complete(attack, value, of_request)
            while self._later:
                self.ask(*self._later.pop())


@dataclass
class Extra:
    """How much longer the neighbour's longest waits are beside an attack than beside plain requests, in seconds, by repetition."""

    token: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    token_worked: list[float] = field(default_factory=list)
    first_worked: list[float] = field(default_factory=list)

    def add(self, attacked: Sequence[Any], plain: Sequence[Any]) -> None:
        from neighbour import longest

        for name, is_first in (("token", False), ("first", True)):
            for suffix, of in (("", lambda wait: wait.seconds), ("_worked", lambda wait: wait.worked)):
                more = longest(attacked, is_first, of) - longest(plain, is_first, of)
                getattr(self, name + suffix).append(more)

    def is_kept(self, by_processor: bool) -> bool:
        token, first = (self.token_worked, self.first_worked) if by_processor else (self.token, self.first)
        if by_processor and max(map(statistics.median, (self.token, self.first))) > BUSY:
            return False  # the server's front end held up its streams
        return statistics.median(token) < PROMISE and statistics.median(first) < STEPS_TO_FIRST * PROMISE

    def __str__(self) -> str:
        def shown(each: list[float]) -> str:
            return f"{1e3 * statistics.median(each):+.0f} (most {1e3 * max(each):+.0f})"

        processor = f"the engine's processor time {shown(self.token_worked)}, {shown(self.first_worked)}"
        return f"token {shown(self.token)}, first token {shown(self.first)} ms; {processor}"


class Siege:
    """The attacks on one server."""

    def __init__(self, server: Any, neighbour: Any, arguments: argparse.Namespace) -> None:
        self.server, self.neighbour, self.arguments = server, neighbour, arguments
        self.port = int(server.url.rpartition(":")[2])
        self.clients = [Client(self.port, key) for key in ATTACKERS]
        self.failed = 0

    def say(self, is_ok: bool, text: str) -> None:
        self.failed += not is_ok
        print(f"{'ok    ' if is_ok else 'FAILED'}  {text}", flush=True)

    def _waits(self, attack: Attack, is_plain: bool, together: bool, seconds: float, seed: str) -> list[Any]:
        """The neighbour's waits while attackers are at work: all at once, or one after the other."""
        began = time.monotonic()
        parts = [self.clients] if together else [[client] for client in self.clients]
        for part in parts:
            given = (attack, is_plain, seconds / len(parts))
            threads = [threading.Thread(target=client.attack, args=(*given, f"{seed} {client.key}")) for client in part]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        found = self.neighbour.waits(began, time.monotonic())
        time.sleep(0.3)  # for the requests that were cancelled
        return found

    def run(self, attack: Attack, seconds: float) -> None:
        """Attack for about so long. Some repetitions are always made; a plain part lasts as long as the attack before it."""
        before, recordings, began = Counter(self._statuses()), self._recordings(), time.monotonic()
        extras = {"together": Extra(), "in turn": Extra()}
        for number in itertools.count():
            if number >= LEAST and time.monotonic() - began > seconds * number / (number + 1):
                break
            for how, extra in extras.items():
                seed = f"{self.arguments.seed} {attack.name} {how} {number}"
                started = time.monotonic()
                attacked = self._waits(attack, False, how == "together", PART, seed)
                plain = self._waits(attack, True, how == "together", time.monotonic() - started, seed)
                extra.add(attacked, plain)
        statuses = self._statuses() - before
        is_kept = all(extra.is_kept(self.arguments.cpu) for extra in extras.values())
        broken = sum(count for status, count in statuses.items() if status >= 500 and status != 503)
        shown = "; ".join(f"{how}: {extra}" for how, extra in extras.items())
        counts = ", ".join(f"{count} of {status or 'cancelled'}" for status, count in sorted(statuses.items()))
        recorded = f"{self._recordings() - recordings:.0f} graphs recorded"
        self.say(is_kept and not broken and self.is_same(), f"{attack.name}: {shown}; {recorded}; answers {counts}")

    def is_same(self) -> bool:
        """Whether each question of the neighbour has had one answer."""
        return len(self.neighbour.answers) == len({question for question, _ in self.neighbour.answers})

    def _recordings(self) -> float:
        """How many CUDA graphs the engine has recorded for plans, while all requests waited."""
        return next((value for name, value in metrics(self.server) if "graph_recordings" in name), 0.0)

    def _statuses(self) -> Counter[int]:
        return sum((client.statuses for client in self.clients), Counter[int]())


# ---------------------------------------------------------------------------------------------------------------- server


@contextlib.contextmanager
def served(arguments: argparse.Namespace, directory: Path) -> Iterator[Any]:
    """A server as users have it: on a GPU in bfloat16 with CUDA graphs."""
    from servers import serving

    flags = ["--api-key", NEIGHBOUR, *ATTACKERS]
    if not arguments.cpu:
        flags += ["--no-enforce-eager", "--dtype", "bfloat16", "--max-num-seqs", "256"]
        flags += ["--kv-cache-memory-bytes", str(1 << 30)]
    with serving(directory, *flags, stock=False, is_forked=arguments.cpu, **ENVIRONMENT) as server:
        yield server


def engine_of(server: Any) -> int:
    """The id of the process that computes: the largest one."""
    from servers import memory, processes

    return max(processes(server), key=memory)


def questions(server: Any, edge: float) -> list[Any]:
    """Prompts, and how many tokens of their answers are so likely that another batch cannot change them."""
    from neighbour import Question

    states = ["France", "Italy", "Germany", "Spain", "Japan", "Egypt", "Norway", "Greece", "Poland", "Austria"]
    prompts = [f"The capital of {state} is" for state in states]
    prompts += [f"The capital of {a} is known. The capital of {b} is" for a, b in itertools.pairwise(states)]
    found = []
    for prompt in prompts:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 20, "temperature": 0.0, "logprobs": 2}
        status, answer = server.post("/v1/completions", body | {"ignore_eos": True}, key=NEIGHBOUR)
        assert status == 200, answer
        likely = [sorted(each.values()) for each in answer["choices"][0]["logprobs"]["top_logprobs"]]
        clear = itertools.takewhile(lambda each: len(each) > 1 and each[-1] - each[-2] > edge, likely)
        found.append(Question(prompt, sum(1 for _ in clear)))
    found = sorted(found, key=lambda each: -each.tokens)[:6]
    assert found[-1].tokens >= 3, found
    return found


def metrics(server: Any) -> list[tuple[str, float]]:
    """midstream's metrics, and how many requests vLLM has."""
    server.ask("GET", "/metrics")  # the workers' values are those of the scrape before
    time.sleep(0.2)
    lines = server.ask("GET", "/metrics")[1].splitlines()
    ours = ("midstream_", "vllm:num_requests_running", "vllm:num_requests_waiting{")
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith(ours)]
    return [(name, float(value)) for name, value in pairs]


def gauges(server: Any) -> dict[str, float]:
    """What the server and its workers hold, as the metrics have it. Counts since the start, and graphs, are left out."""
    counts = (
        "planned_prompts",
        "_steps",
        "_growths",
        "_failures",
        "_created",
        "_total",
        "_recordings",
        "_graphs",
        "_graph_bytes",
    )
    return {name: value for name, value in metrics(server) if not name.partition("{")[0].endswith(counts)}


def main() -> int:
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    device = "cpu" if arguments.cpu else "cuda"
    print(f"seed {arguments.seed}, {device}, {arguments.runner}", flush=True)
    makers = Makers(arguments.seed, device)
    search = arguments.seconds / 6
    makes: dict[str, Callable[[], Attack]] = {
        "steers": makers.steers,
        "edits": makers.edits,
        "long": lambda: makers.long_programs("the longest program at every layer", ["mul.Tensor"]),
        "forms": lambda: makers.long_programs(
            "the longest programs of new forms", ["neg.default", "mul.Tensor", "abs.default"]
        ),
        "costly": lambda: makers.costly(arguments.seed, search),
        "readings": makers.readings,
        "hostile": makers.hostile,
        "uploads": makers.uploads,
    }
    attacks = [make() for name, make in makes.items() if name in (arguments.only or makes)]
    if not arguments.only:
        attacks.append(makers.mutated([each for each in attacks if each.values]))
    with tempfile.TemporaryDirectory() as directory, served(arguments, Path(directory)) as server:
        return attacked(server, attacks, arguments, (arguments.seconds - search) / len(attacks))


def attacked(server: Any, attacks: list[Attack], arguments: argparse.Namespace, seconds: float) -> int:
    """How many checks failed. `seconds`: for each attack."""
    from neighbour import Neighbour
    from servers import processes

    asked = questions(server, 0.05 if arguments.cpu else 0.5)
    names = processes(server)
    with Neighbour(int(server.url.rpartition(":")[2]), NEIGHBOUR, asked, engine_of(server)) as neighbour:
        siege = Siege(server, neighbour, arguments)
        siege._waits(attacks[0], True, True, PART, "plain requests alone")
        before = gauges(server)
        for attack in attacks:
            if server.process.poll() is None:
                siege.run(attack, seconds)
        for client in siege.clients if server.process.poll() is None else ():
            held = server.ask("GET", f"{PATH}/vectors", key=client.key)[1]["vectors"]
            for name in (name for name in held if name.startswith(client.key)):
                client.ask("DELETE", vector_path(name))
        began = time.monotonic()
        while server.process.poll() is None and len(neighbour.waits(began, time.monotonic())) < 20:
            time.sleep(0.1)
    counts = [f"{question.prompt!r} {text!r}: {n}" for (question, text), n in neighbour.answers.items()]
    equal = f"{neighbour.answers.total()} answers of the neighbour are equal"
    siege.say(siege.is_same(), equal if siege.is_same() else "\n".join(["the neighbour's answers differ", *counts]))
    siege.say(server.is_healthy(30) and processes(server) == names, "the server is healthy, with the same processes")
    deadline = time.monotonic() + 60
    while (after := gauges(server)) != before and time.monotonic() < deadline:
        time.sleep(1)
    both = {name: (before.get(name), after.get(name)) for name in before | after}
    differ = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    siege.say(not differ, f"{len(before)} gauges are as before" if not differ else f"gauges before and after: {differ}")
    for message in sorted({message for client in siege.clients for message in client.messages}):
        print(f"        {message}"[:400])
    if siege.failed:
        print(server.log.read_text()[-6000:])
    print(f"neighbours: {siege.failed} failed")
    return siege.failed


if __name__ == "__main__":
    sys.exit(bool(main()))
