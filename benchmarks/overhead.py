"""The cost of plans and traces against stock vLLM. Both engines are alive in one run and take turns.

    python benchmarks/overhead.py plans --cpu                                    # the bundled model, a small load
    python benchmarks/overhead.py plans --runner v2 --shape llama-3.1-8b --load mixed
    python benchmarks/overhead.py traces --runner v2 --load mixed --mode async   # requests arrive while others run
    python benchmarks/overhead.py plans --pp 2                                   # two GPUs; also --tp 2
    python benchmarks/overhead.py plans --load prompts --only "every token" --vllm-layers 4   # and vLLM's own extraction of four layers
    python benchmarks/overhead.py captures                                       # every layer of long prompts, to the client
    python benchmarks/overhead.py stages --pp 2                                  # a trace over stages, against one rank
    python benchmarks/overhead.py starts --rounds 3                              # engine starts with filled caches

Loads: `equal` has requests of equal length, `short` has short prompts and outputs of 16 to 256 tokens, `mixed` also has prompts of 32 to
1,024 tokens, and `prompts` has prompts of 512 tokens and generates one (all shorter with --cpu). Several loads run one after the other
on the same engines. Every run has new prompts, so no run finds its prompts in the prefix cache.

With `--mode async` the requests of each run arrive at the same random times (Poisson), faster than stock vLLM finishes them. A share of
the requests is traced only there, because a sync engine runs one call at a time.

A ratio is the median over the rounds with its 95 % bootstrap interval; below 1 means slower than stock vLLM. "The others" are the
requests without an intervention: their times from arrival to end are compared with those of the same requests in stock vLLM.

`--vllm-layers` adds stock vLLM with its speculative method `extract_hidden_states`, an engine for each number of layers. It writes a
file for each request to the directory for temporary files, and a run ends when all files are complete. If such an engine fails, its
row is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import functools
import itertools
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from figures import Results, ratio
from side_by_side import (
    Measured,
    Run,
    Runs,
    add_arguments,
    in_turns,
    mean,
    run_async,
    run_sync,
    settle,
    start_engine,
)

if TYPE_CHECKING:
    from midstream import VLLM

# Requests, and the fewest and most tokens of a prompt and of an output.
LOADS = {
    "equal": (64, (16, 16), (128, 128)),
    "short": (256, (16, 16), (16, 256)),
    "mixed": (256, (32, 1024), (16, 256)),
    "prompts": (256, (512, 512), (1, 1)),
}
CPU_LOADS = {
    "equal": (32, (16, 16), (32, 32)),
    "short": (32, (16, 16), (4, 32)),
    "mixed": (32, (8, 128), (4, 32)),
    "prompts": (32, (64, 64), (1, 1)),
}
PARAMS = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
FEATURES = 16_384  # of an SAE
RATE = 1.25  # arrivals for each request that stock vLLM finishes
ONE_IN = (20, 1)  # which requests are traced: every 20th, all
BESIDE_VLLM = 0.22  # of the GPU's memory for each other engine if vLLM's own extraction runs
VLLM_EXTRACTION = 0.46  # of it for all engines that extract: their rows take most of the KV cache


class Load:
    """The requests of a run: the same lengths and arrivals in every run, and new prompts.

    Attributes:
        params: the sampling parameters of each request; requests with equal ones share a dict.
        arrivals: seconds from the start to each request. All are zero until `spread`.
    """

    def __init__(self, arguments: argparse.Namespace, name: str) -> None:
        count, prompt, output = (CPU_LOADS if arguments.cpu else LOADS)[name]
        self.name = name
        self.count = arguments.requests or count
        self._numbers = itertools.count(1)
        random = np.random.default_rng(0)
        self._prompts = random.integers(*prompt, self.count, endpoint=True)
        outputs = random.integers(*output, self.count, endpoint=True).tolist()
        shared = {tokens: {"max_tokens": tokens, **PARAMS} for tokens in outputs}
        self.params = [shared[tokens] for tokens in outputs]
        self.tokens = sum(outputs)
        self.rows = int(self._prompts.sum()) + self.tokens - self.count  # the last generated token has no row
        self.arrivals = [0.0] * self.count

    def prompts(self) -> list[list[int]]:
        random = np.random.default_rng(next(self._numbers))
        return [random.integers(1, 1000, tokens).tolist() for tokens in self._prompts]

    def spread(self, seconds: float) -> None:
        """Have the requests arrive at random over about this time."""
        gaps = np.random.default_rng(0).exponential(seconds / self.count, self.count)
        self.arrivals = (gaps.cumsum() - gaps[0]).tolist()


@dataclass(frozen=True)
class Row:
    """One kind of run on midstream's engine.

    Attributes:
        plan: as of `model.generate`.
        trace: a function, as of `model.run`.
        one_in: how many requests have the trace; 1 means all.
        layers: how many layers are captured at every token.
    """

    name: str
    plan: Any = None
    trace: Callable[..., Any] | None = None
    one_in: int = 1
    layers: int = 0

    def is_traced(self, number: int) -> bool:
        return self.trace is not None and number % self.one_in == 0

    def others(self, load: Load) -> list[int]:
        """The requests without an intervention."""
        return [i for i in range(load.count) if self.plan is None and not self.layers and not self.is_traced(i)]


def plan_rows(model: Any, load: Load) -> list[Row]:
    import torch

    from midstream import SAE, Capture, Probe, Steer, When

    vector = torch.full((model.hidden_size,), 0.01)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(model.hidden_size, generator=random) for _ in range(load.count)]
    middle = model.num_layers // 2
    four = [model.num_layers * k // 4 for k in range(4)]
    encoder, decoder = sae(model.hidden_size)
    biases = {"b_enc": torch.zeros(FEATURES), "b_dec": torch.zeros(model.hidden_size)}
    config = {"architecture": "standard", "d_in": model.hidden_size, "d_sae": FEATURES}
    features = SAE(config, {"W_enc": encoder, "W_dec": decoder, **biases}, site="resid_post", layer=middle)
    return [
        Row("no plan"),
        Row("every request steered, one layer", [Steer("resid_post", layers=[middle], vector=vector)]),
        Row("every request steered, all layers", [Steer("resid_post", vector=vector)]),
        Row("every request steered at an MLP's output", [Steer("mlp_out", layers=[middle], vector=vector)]),
        Row("a different plan in each request", different_plans(model.hidden_size, model.num_layers, load.count)),
        Row("last prompt token captured, all layers", [Capture("resid_post")]),
        Row("every token captured, one layer", [Capture("resid_post", layers=[middle], positions="all")], layers=1),
        Row(
            "every token captured, one layer, to disk",
            [Capture("resid_post", layers=[middle], positions="all", to=tempfile.mkdtemp(prefix="captured-"))],
            layers=1,
        ),
        Row("every token captured, four layers", [Capture("resid_post", layers=four, positions="all")], layers=4),
        Row("every token captured, all layers", [Capture("resid_post", positions="all")], layers=model.num_layers),
        Row(
            "a probe of its own in each request",
            [[Probe("resid_post", layer=middle, weight=w, name="p")] for w in weights],
        ),
        Row(
            "a gate and a steer of its own in each request",
            [
                [
                    When(
                        Probe("resid_post", layer=middle, weight=w, name="p"),
                        above=0.0,
                        then=Steer("resid_post", layers=middle, vector=w),
                    )
                ]
                for w in weights
            ],
        ),
        Row(f"the top 32 of {FEATURES:,} features of every generated token", [features.capture(top_k=32)]),
    ]


def different_plans(hidden_size: int, num_layers: int, requests: int) -> list[Any]:
    """A plan for each request: steers at three layers, a patch, a clamp, all with vectors of their own."""
    import torch

    from midstream import Clamp, Patch, Steer

    generator = torch.Generator().manual_seed(0)

    def vector() -> Any:
        return torch.randn(hidden_size, generator=generator) * 0.01

    return [
        [
            *[Steer("resid_post", layers=[(i + k) % num_layers], vector=vector()) for k in (0, 5, 11)],
            Patch("resid_post", layer=(i + 2) % num_layers, position=3, source=vector(), alpha=0.5),
            Clamp("resid_post", layers=[(i + 7) % num_layers], direction=vector()),
        ]
        for i in range(requests)
    ]


def trace_rows(model: Any, load: Load) -> list[Row]:
    rows = [Row("no trace")]
    for one_in in ONE_IN if model.mode == "async" else (1,):
        traced = f"{-(-load.count // one_in)} of {load.count} traced"
        rows += [Row(f"{traced}: {name}", None, trace, one_in) for name, trace in traces(model).items()]
    return rows


def traces(model: Any) -> dict[str, Callable[..., Any]]:
    """Functions of traces, by what they do. All but the first do it in every step."""
    import torch

    width, middle = model.hidden_size, model.num_layers // 2
    made = torch.Generator().manual_seed(0)
    vector = torch.full((width,), 0.01)
    probe = torch.randn(width, generator=made) / width**0.5
    unit = probe / probe.norm()
    encoder, decoder = sae(width)

    def read(m: Any) -> Any:
        return m.layers_output[middle]

    def changing(change: Callable[[Any], Any]) -> Callable[..., None]:
        def body(m: Any, tracer: Any) -> None:
            for _ in tracer.iter[:]:
                m.layers_output[middle] = change(m.layers_output[middle])

        return body

    def add_earlier(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            early = m.layers_output[middle // 2]
            m.layers_output[middle] += 0.01 * early

    def zero_column(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.layers_output[middle][:, 17] = 0

    def add_at_module(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.model.layers[middle].output[0][:] += vector

    def squash_mlp(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.model.layers[middle].mlp.output = torch.tanh(m.model.layers[middle].mlp.output)

    def keeping(compute: Callable[[Any], Any]) -> Callable[..., list[Any]]:
        def body(m: Any, tracer: Any) -> list[Any]:
            return [compute(m.layers_output[middle][-1]) for _ in tracer.iter[:]]

        return body

    return {
        "reads one layer of its prompt": read,
        "reads one layer's last row": keeping(lambda h: h),
        "adds a converted vector": changing(lambda h: h + vector.to(h)),
        "halves": changing(lambda h: h * 0.5),
        "projects a direction out": changing(lambda h: h - (h @ unit.to(h))[:, None] * unit.to(h)),
        "zeroes a column": zero_column,
        "adds at the module's output": add_at_module,
        "adds an earlier layer's stream": add_earlier,
        f"an SAE's gate, {FEATURES:,} features": changing(
            lambda h: h + torch.relu(h @ encoder.to(h)) @ decoder.to(h) * 0.01
        ),
        "replaces an MLP's output by its tanh": squash_mlp,
        "keeps a probe's score": keeping(lambda h: h @ probe.to(h)),
        "keeps the top 8 features": keeping(lambda h: torch.relu(h @ encoder.to(h)).topk(8).values),
    }


@functools.cache
def sae(width: int, device: str = "cpu") -> tuple[Any, Any]:
    """The encoder `[width, FEATURES]` and decoder of a random SAE, in bfloat16."""
    import torch

    made = torch.Generator().manual_seed(1)
    encoder = torch.randn(width, FEATURES, generator=made) / width**0.5
    decoder = torch.randn(FEATURES, width, generator=made) / FEATURES**0.5
    return encoder.bfloat16().to(device), decoder.bfloat16().to(device)


# One run of a load.


def run_stock(
    engine: Any,
    load: Load,
    loop: asyncio.Runner,
    ended: Callable[[Any], None] = lambda output: None,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """`ended` gets each request's output, within the time that is measured. `also`: sampling parameters beside the load's."""
    from vllm import SamplingParams

    prompts: Any = [{"prompt_token_ids": prompt} for prompt in load.prompts()]

    def generate() -> None:
        shared = {id(params): SamplingParams(**params, **also) for params in {id(p): p for p in load.params}.values()}
        for output in engine.generate(prompts, [shared[id(params)] for params in load.params], use_tqdm=False):
            ended(output)

    async def submit(number: int) -> None:
        params = SamplingParams(**load.params[number], **also)
        async for output in engine.generate(prompts[number], params, f"{number}"):
            if output.finished:
                await asyncio.to_thread(ended, output)

    is_async = not hasattr(engine, "llm_engine")
    return loop.run(run_async(submit, load.arrivals)) if is_async else run_sync(generate)


def run_midstream(model: VLLM, row: Row, load: Load, loop: asyncio.Runner) -> Run:
    from midstream.requests.arguments import plans_of
    from midstream.requests.invokes import Invoke
    from midstream.trace.code import FunctionProgram

    prompts = load.prompts()

    def generate() -> None:
        """As `model.generate` and `model.run` do, but with each request's own number of tokens."""
        program = FunctionProgram(row.trace) if row.trace is not None else None
        plans = plans_of(row.plan, load.count)
        running = model._run([Invoke(*each) for each in zip(prompts, repeat(program), load.params, plans)])
        model._finish(model._results(running))

    if model.mode == "sync":
        return run_sync(generate)
    plans = plans_of(row.plan, load.count)

    async def submit(number: int) -> None:
        if row.trace is not None and row.is_traced(number):
            await model.run(row.trace, prompts[number], **load.params[number])
        else:
            await model.generate(prompts[number], plan=plans[number], **load.params[number])

    return loop.run(run_async(submit, load.arrivals))


# vLLM's own extraction.


class Extraction:
    """An engine of stock vLLM that writes the output of some layers at every token, as `extract_hidden_states` has it.

    Attributes:
        row: its name, and how many layers it writes.
        error: what ended it.
    """

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack, num_layers: int, layers: int) -> None:
        from vllm.config import KVTransferConfig

        self.row = Row(
            f"every token written by vLLM's extract_hidden_states, {layers} of {num_layers} layers", layers=layers
        )
        self.error: Exception | None = None
        self._directory = tempfile.mkdtemp(prefix="extracted-")
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        entered = [num_layers * k // layers + 1 for k in range(layers)]  # vLLM numbers the inputs of layers
        memory = {} if arguments.cpu else {"gpu_memory_utilization": VLLM_EXTRACTION / len(arguments.vllm_layers)}
        self._engine = start_engine(
            arguments,
            stack,
            stock=True,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": entered}},
            },
            kv_transfer_config=KVTransferConfig(
                kv_connector="ExampleHiddenStatesConnector",
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": self._directory},
            ),
            **memory,
        )
        self._checked = False

    def run(self, load: Load, loop: asyncio.Runner) -> Run:
        """Raises nothing: after an error it runs no more, and its times are NaN."""
        if self.error is None:
            try:
                return self._run(load, loop)
            except Exception as error:
                self.error = error
                traceback.print_exc()
        return Run(float("nan"), [float("nan")] * load.count, float("nan"))

    def _run(self, load: Load, loop: asyncio.Runner) -> Run:
        paths: list[str] = []

        def written(output: Any) -> None:
            """Wait for a request's file. vLLM locks it until it is complete."""
            paths.append(output.kv_transfer_params["hidden_states_path"])
            with open(f"{paths[-1]}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)

        also = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
        run = run_stock(self._engine, load, loop, written, also)
        if not self._checked:
            self._check(load, paths)
        for path in paths:
            Path(path).unlink()
            Path(f"{path}.lock").unlink()
        return run

    def _check(self, load: Load, paths: list[str]) -> None:
        from safetensors import safe_open

        rows = 0
        for path in paths:
            with safe_open(path, "pt") as file:
                shape = file.get_slice("hidden_states").get_shape()
            assert shape[1] == self.row.layers, shape
            rows += shape[0]
        assert rows == load.rows, (rows, load.rows)
        self._checked = True


def extractions(arguments: argparse.Namespace, stack: ExitStack, num_layers: int) -> list[Extraction]:
    """Those that start."""
    started = []
    for layers in arguments.vllm_layers:
        try:
            started.append(Extraction(arguments, stack, num_layers, layers))
        except Exception:
            traceback.print_exc()
    return started


# What the command prints.


def compare(arguments: argparse.Namespace, rows_of: Callable[[Any, Load], list[Row]]) -> None:
    """Stock vLLM and the rows, on each load."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        engines: tuple[list[Any], list[Any]] = ([], [])
        beside = arguments.vllm_layers and not arguments.cpu
        memory = {"gpu_memory_utilization": BESIDE_VLLM / arguments.engines} if beside else {}
        for number in range(arguments.engines):
            for stock in (True, False) if number % 2 == 0 else (False, True):  # neither kind always starts first
                engines[not stock].append(start_engine(arguments, stack, stock=stock, **memory))
        stocks, models = engines
        if arguments.mode == "async":
            for model in models:
                loop.run(model.start())
        extracting = extractions(arguments, stack, models[0].num_layers)
        for name in arguments.load:
            compare_on(Load(arguments, name), stocks, models, extracting, loop, arguments, rows_of)
        for model in models:
            print_graphs(loop.run(model.gauges()) if model.mode == "async" else model.gauges())


def compare_on(
    load: Load,
    stocks: list[Any],
    models: list[Any],
    extracting: list[Extraction],
    loop: asyncio.Runner,
    arguments: argparse.Namespace,
    rows_of: Callable[[Any, Load], list[Row]],
) -> None:
    import torch

    if arguments.mode == "async":
        alone = [run_stock(stocks[0], load, loop).seconds for _ in range(3)][-1]
        load.spread(alone / RATE)
        print(f"stock vLLM takes {alone:.2f} s for all requests at once; they arrive over {load.arrivals[-1]:.2f} s")
    wanted = [row for row in rows_of(models[0], load) if any(text in row.name for text in arguments.only)]
    rows = [Row("stock vLLM"), *wanted]
    runs: Runs[Run] = {rows[0].name: [functools.partial(run_stock, engine, load, loop) for engine in stocks]}
    for row in rows[1:]:
        runs[row.name] = [functools.partial(run_midstream, model, row, load, loop) for model in models]
    runs |= {each.row.name: [functools.partial(each.run, load, loop)] for each in extracting if each.error is None}
    measured = in_turns(runs, arguments)
    if any("to disk" in name for name in runs):
        print(f"the disk alone takes {disk_speed():.2f} GB/s with fsync")
    rows += [each.row for each in extracting if each.error is None]
    row_bytes = models[0].hidden_size * getattr(torch, models[0].facts.dtype).itemsize
    print_table(measured, rows, load, row_bytes, arguments)


def disk_speed(pieces: int = 128) -> float:
    """The GB/s at which pieces of 4 MiB are written to a file in the directory for temporary files, until the disk has them."""
    piece = os.urandom(4 << 20)
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(pieces):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return pieces * len(piece) / (time.perf_counter() - began) / 1e9


def print_table(
    measured: Measured[Run], rows: list[Row], load: Load, row_bytes: int, arguments: argparse.Namespace
) -> None:
    stock = measured[rows[0].name]
    results = Results(arguments, arguments.what, f"{load.name}, {arguments.mode}, {load.count} requests")
    model = "bundled model" if arguments.cpu else f"{arguments.shape} shape, {arguments.runner}"
    print(
        f"\n{results.machine}\n{model}{', eager' if arguments.eager else ''}, {arguments.pp} stages x {arguments.tp} ranks, "
        f"{arguments.engines} engines of each kind; load {load.name}, {arguments.mode}: {load.count} requests, "
        f"{load.tokens:,} generated tokens; {len(stock)} rounds\n"
    )
    is_sync = arguments.mode == "sync"
    print(
        f"| run | tok/s | of stock | captured, GB/s | the others, of stock |{' a step, µs | of stock |' if is_sync else ''}"
    )
    print("|---" * (7 if is_sync else 5) + "|")
    for row in rows:
        rounds, others = measured[row.name], row.others(load)

        def of_stock(measure: str, seconds: Callable[[Run], float], name: str = row.name) -> str:
            """Empty for stock vLLM itself."""
            its = measured[name]
            relative = ratio(mean(stock, seconds), mean(its, seconds))
            return "" if its is stock else results.add(name, measure, "of stock", relative)

        def waited(run: Run, others: list[int] = others) -> float:
            return sum(run.requests[i] for i in others)

        rate = load.tokens / np.array(mean(rounds, lambda run: run.seconds))
        cells = [row.name, results.add(row.name, "throughput", "tok/s", rate)]
        cells.append(of_stock("throughput", lambda run: run.seconds))
        captured = load.rows * row.layers * row_bytes / np.array(mean(rounds, lambda run: run.seconds)) / 1e9
        cells.append(results.add(row.name, "captured", "GB/s", captured) if row.layers else "")
        cells.append(of_stock("the others", waited) if others else "")
        if is_sync:
            steps = 1e6 * np.array(mean(rounds, lambda run: run.step or 0))
            cells.append(results.add(row.name, "step", "µs", steps))
            cells.append(of_stock("step", lambda run: run.step or 0))
        print(f"| {' | '.join(cells)} |")


def print_graphs(workers: list[dict[str, int]]) -> None:
    """The CUDA graphs in which plans act, of each worker: rows that need more than there is room for make each other slow."""
    for gauges in workers:
        held, size, recorded = (gauges[name] for name in ("graphs", "graph_bytes", "graph_recordings"))
        print(f"\n{held} graphs of {size >> 20} MiB are held; {recorded} were recorded")


def long_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(1, 1000, (count, length)).tolist()


def every_layer(model: Any) -> Any:
    return [model.layers_output[i] for i in range(model.num_layers)]


def captures(arguments: argparse.Namespace) -> None:
    """How long it takes to copy every layer's residual stream, at all positions of long prompts, to the client."""
    from midstream import Capture

    count, length = (8, 64) if arguments.cpu else (64, 512)

    def by_plan(prompts: list[list[int]]) -> Iterator[Any]:
        plan = [Capture("resid_post", positions="all_prompt")]
        for output in model.generate(prompts, plan=plan, max_tokens=1, **PARAMS):
            yield from output.captures.values()

    def by_trace(prompts: list[list[int]]) -> Iterable[Any]:
        return itertools.chain.from_iterable(model.run(every_layer, prompts, **PARAMS))

    seeds = itertools.count()
    sizes: set[int] = set()

    def seconds_of(captured: Callable[[list[list[int]]], Iterable[Any]]) -> float:
        prompts = long_prompts(count, length, next(seeds))
        start = time.perf_counter()
        tensors = list(captured(prompts))
        seconds = time.perf_counter() - start
        sizes.add(sum(tensor.nbytes for tensor in tensors))
        assert sum(tensor.numel() for tensor in tensors) == count * length * model.num_layers * model.hidden_size
        return seconds

    with ExitStack() as stack:
        model = start_engine(arguments, stack)
        runs: Runs[float] = {
            "by a plan": [lambda: seconds_of(by_plan)],
            "by a trace": [lambda: seconds_of(by_trace)],
        }
        measured = in_turns(runs, arguments)
    (size,) = sizes
    results = Results(arguments, "captures", f"every layer of {count} x {length} tokens")
    print(f"\n{results.machine}\nevery layer of {count} x {length} tokens, {size / 1e9:.2f} GB")
    for name, rounds in measured.items():
        seconds = mean(rounds, float)
        rate = results.add(name, "rate", "GB/s", size / np.array(seconds) / 1e9)
        print(f"captured {name}: {results.add(name, 'time', 's', seconds)} s, {rate} GB/s")


def stages(arguments: argparse.Namespace) -> None:
    """A trace that saves every layer over several stages, against one rank."""
    prompts = long_prompts(8, 32, 0)
    arguments.eager = True
    with ExitStack() as stack:
        alone = start_engine(arguments, stack, pipeline_parallel_size=1, tensor_parallel_size=1)
        model = start_engine(arguments, stack)

        def traced(engine: Any) -> Run:
            return run_sync(lambda: engine.run(every_layer, prompts, **PARAMS))

        runs: Runs[Run] = {"one rank": [lambda: traced(alone)], "several": [lambda: traced(model)]}
        measured = in_turns(runs, arguments)
        before, after = (mean(measured[name], lambda run: run.seconds) for name in runs)
        results = Results(arguments, "traces", "every layer of 8 x 32 tokens saved")
        print(
            f"\n{results.machine}\na trace that saves every layer of 8 x 32 tokens: "
            f"{results.add('several', 'time', 'of one rank', ratio(after, before))} x the time on one rank "
            f"({results.add('several', 'time', 'ms', 1e3 * np.array(after))} ms, "
            f"{results.add('one rank', 'time', 'ms', 1e3 * np.array(before))} ms)"
        )


def starts(arguments: argparse.Namespace) -> None:
    """How long engines of stock vLLM and of midstream take to start, in turns. The first round fills the caches of compiled code."""

    def seconds_of(stock: bool) -> float:
        with ExitStack() as stack:
            start = time.perf_counter()
            start_engine(arguments, stack, stock=stock)
            return time.perf_counter() - start

    runs = {"stock vLLM": [lambda: seconds_of(True)], "midstream": [lambda: seconds_of(False)]}
    before, after = (mean(rounds, float) for rounds in in_turns(runs, arguments).values())
    results = Results(arguments, "serving", "engine starts, caches filled")
    print(
        f"\n{results.machine}\nwith caches filled: stock vLLM {results.add('stock vLLM', 'start', 's', before)} s, "
        f"midstream {results.add('midstream', 'start', 's', after)} s, "
        f"{results.add('midstream', 'start', 'of stock', ratio(after, before))} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plans", "traces", "captures", "stages", "starts"])
    parser.add_argument("--load", choices=LOADS, nargs="+", default=["equal"], help="for plans and traces")
    parser.add_argument(
        "--vllm-layers",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="with plans: an engine of stock vLLM that extracts N layers, for each N",
    )
    parser.add_argument("--requests", type=int, help="how many, in place of the load's number")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="run only rows whose name contains one of these texts, and stock vLLM",
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    settle(arguments)
    if arguments.cpu and arguments.pp > 1 and (arguments.eager or arguments.what == "stages"):
        parser.error(
            "stock vLLM's CPU build has pipeline stages only if it compiles: add --no-eager, with plans or traces"
        )
    if arguments.vllm_layers and arguments.what != "plans":
        parser.error(f"--vllm-layers: {arguments.what} has no such row; allowed with plans")
    if arguments.what in ("plans", "traces"):
        return compare(arguments, plan_rows if arguments.what == "plans" else trace_rows)
    if arguments.mode == "async":
        parser.error(f"{arguments.what} has no async mode")
    {"captures": captures, "stages": stages, "starts": starts}[arguments.what](arguments)


if __name__ == "__main__":
    main()
