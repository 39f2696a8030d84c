"""Engines that are alive at the same time take turns on the same load, and a ratio compares two runs of one round."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SHAPES = {"qwen3-0.6b": QWEN3_06B, "llama-3.1-8b": LLAMA_31_8B}
STARTED = time.monotonic()
AWAKE_SECONDS = 1.2  # vLLM's workers poll for work for a second, and each takes a core for that time


class Run(NamedTuple):
    """The times of one run, in seconds.

    Attributes:
        seconds: the whole run.
        requests: from each request's arrival to its end.
        step: the median of a sync run's steps, which a short disturbance of the host does not move.
    """

    seconds: float
    requests: list[float]
    step: float | None = None


R = TypeVar("R")
Runs = dict[str, list[Callable[[], R]]]  # by name, a call for each engine
Measured = dict[str, list[list[R]]]  # by name, for each round, for each engine


# Engines.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="the bundled model on vLLM's CPU build")
    parser.add_argument(
        "--eager",
        action=argparse.BooleanOptionalAction,
        help="without compilation and CUDA graphs; the default with --cpu",
    )
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1", help="the model runner (GPU)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="the model's shape, dummy weights (GPU)")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync", help="LLM, or AsyncLLM")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each stage")
    parser.add_argument("--engines", type=int, default=1, help="engines of each kind: two with equal code differ, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=360, help="after the start of the program; no round begins later"
    )
    parser.add_argument("--json", type=Path, help="also append each figure to this file (see figures.py)")


def settle(arguments: argparse.Namespace) -> None:
    """Fill in defaults that depend on other arguments. Call it before vLLM is imported."""
    if arguments.eager is None:
        arguments.eager = arguments.cpu
    if not arguments.cpu:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"


def engine_arguments(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The model's directory, which has a tokenizer, and the arguments of every engine."""
    common = {
        "enforce_eager": arguments.eager,
        "pipeline_parallel_size": arguments.pp,
        "tensor_parallel_size": arguments.tp,
    }
    from midstream import demo_model

    if arguments.cpu:
        sizes = {"max_model_len": 512, "max_num_seqs": 64, "gpu_memory_utilization": 0.2}
        return demo_model(), {**common, **sizes, "dtype": "float32"}
    directory = tempfile.mkdtemp(prefix="shape-")
    (Path(directory) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
    write_tokenizer(Path(demo_model()), Path(directory))
    return directory, {
        **common,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "FLASH_ATTN",
        "max_model_len": 2048,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 16384,
        "gpu_memory_utilization": 0.4 / arguments.engines,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},  # few, for a quick start
        "seed": 0,
    }


def write_tokenizer(source: Path, target: Path) -> None:
    """The bundled model's tokenizer, with made-up tokens up to the size of the target's vocabulary."""
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update((f"<{number}>", number) for number in range(size) if number not in taken)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(source / "tokenizer_config.json", target)


def start_engine(arguments: argparse.Namespace, stack: ExitStack, *, stock: bool = False, **changed: Any) -> Any:
    """An engine that lives as long as `stack`."""
    path, given = engine_arguments(arguments)
    given |= changed
    began = time.perf_counter()
    with on_the_same_cores(arguments):
        engine = start_stock(path, arguments.mode, given, stack) if stock else start_midstream(path, arguments, given)
    if not stock:
        stack.enter_context(engine)
    print(f"{'stock' if stock else 'midstream'} engine started in {time.perf_counter() - began:.0f} s")
    return engine


def start_midstream(path: str, arguments: argparse.Namespace, given: dict[str, Any]) -> Any:
    from midstream import VLLM

    return VLLM(path, mode=arguments.mode, **given)


def start_stock(path: str, mode: str, given: dict[str, Any], stack: ExitStack) -> Any:
    if mode == "async":
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **given))
        stack.callback(engine.shutdown)
        return engine
    from vllm import LLM

    llm = LLM(path, **given)
    stack.callback(llm.llm_engine.engine_core.shutdown)
    return llm


@contextlib.contextmanager
def on_the_same_cores(arguments: argparse.Namespace) -> Iterator[None]:
    """Pin the loops of the engine that starts in the block to cores: the same ones for every engine.

    A small model's step takes as long as these loops, and cores of one machine differ by up to a fifth. Engines take turns, so they can
    share cores. The CPU build uses all cores, and nothing is pinned.
    """
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    pin(arguments, [process for process in psutil.Process().children(recursive=True) if process.pid not in before])


def pin(arguments: argparse.Namespace, started: Sequence[psutil.Process]) -> None:
    """As `on_the_same_cores`, for one engine's processes."""
    if arguments.cpu:
        return
    loops = [process.pid for process in started if "resource_tracker" not in " ".join(process.cmdline())]
    cores = sorted(os.sched_getaffinity(0))[2::2]  # one of two hyperthreads
    for loop, core in zip(sorted(loops), cores, strict=False):
        os.sched_setaffinity(loop, {core})  # on Linux this pins the main thread only


# Runs.


@functools.cache
def steps_seen() -> tuple[list[float], dict[str, float]]:
    """When the client received each step of any sync engine, and the end of each request by its id. The first call begins it."""
    from vllm.v1.engine.llm_engine import LLMEngine

    steps: list[float] = []
    ends: dict[str, float] = {}
    step = LLMEngine.step

    def timed(engine: Any) -> Any:
        outputs = step(engine)
        steps.append(time.perf_counter())
        ends.update((output.request_id, steps[-1]) for output in outputs if output.finished)
        return outputs

    LLMEngine.step = timed
    return steps, ends


def run_sync(call: Callable[[], Any]) -> Run:
    """Time `call`, which runs all requests of a sync engine: they arrive together."""
    steps, ends = steps_seen()
    steps.clear()
    ends.clear()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    requests = [ends[name] - start for name in sorted(ends, key=int)]
    return Run(seconds, requests, statistics.median(b - a for a, b in itertools.pairwise([start, *steps])))


async def run_async(submit: Callable[[int], Awaitable[Any]], arrivals: Sequence[float]) -> Run:
    """Time requests of an async engine. `submit(i)` runs request i to its end; `arrivals` has the seconds until each arrives."""
    start = time.perf_counter()

    async def one(number: int) -> float:
        arrival = start + arrivals[number]
        await asyncio.sleep(arrival - time.perf_counter())
        await submit(number)
        return time.perf_counter() - arrival

    requests = await asyncio.gather(*map(one, range(len(arrivals))))
    return Run(time.perf_counter() - start, requests)


def in_turns(runs: Runs[R], arguments: argparse.Namespace) -> Measured[R]:
    """Measure every run on each of its engines once a round, after one round that does not count.

    Each round begins with another run, so that none always has the same place. Engines with worker processes get time to fall asleep
    before a run.
    """
    has_workers = arguments.cpu or arguments.pp * arguments.tp > 1
    places = [(name, engine) for name in runs for engine in range(len(runs[name]))]
    measured: Measured[R] = {name: [] for name in runs}
    for number in range(arguments.rounds + 1):
        if number > 1 and time.monotonic() > STARTED + arguments.seconds:
            break
        first = number % len(places)
        found: dict[str, dict[int, R]] = {name: {} for name in runs}
        for name, engine in places[first:] + places[:first]:
            time.sleep(AWAKE_SECONDS if has_workers else 0)
            found[name][engine] = runs[name][engine]()
        if number:
            for name, each in found.items():
                measured[name].append([each[engine] for engine in sorted(each)])
    return measured


def mean(rounds: Sequence[Sequence[R]], of: Callable[[R], float]) -> list[float]:
    """`of` each round, as the mean over its engines."""
    return [statistics.mean(map(of, engines)) for engines in rounds]
