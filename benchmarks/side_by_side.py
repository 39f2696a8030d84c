"""What the benchmarks share: both engines alive in one run, measured in turns, printed as ratios."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
AWAKE_SECONDS = 1.2  # vLLM's workers look out for work for a second, and take a core for that
SHAPES = {"qwen3-0.6b": QWEN3_06B, "llama-3.1-8b": LLAMA_31_8B}
Runs = dict[str, list[Callable[[], Any]]]  # a run, on each engine that it is measured on
Seconds = dict[str, list[list[float]]]  # of each run, each engine and each round


class Measured(NamedTuple):
    """What the rounds took.

    Attributes:
        runs: from the call to its return.
        steps: the median of a run's steps. A host's hiccups, which move runs by several percent, do not move it; prompts are no part of it.
    """

    runs: Seconds
    steps: Seconds


def shape_dir(config: dict[str, Any]) -> str:
    """A model directory with a config alone, for dummy weights."""
    directory = Path(tempfile.mkdtemp(prefix="shape-"))
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="the bundled model on the CPU build")
    parser.add_argument("--compiled", action="store_true", help="with --cpu: compile, too")
    parser.add_argument("--eager", action="store_true", help="on a GPU: without compilation and CUDA graphs")
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1", help="which model runner (GPU)")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="dummy weights of this shape (GPU)"
    )
    parser.add_argument(
        "--engines",
        type=int,
        default=1,
        help="so many of each kind: one engine's all-reduces, say, are slower than another's of the same code",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after the first round, begin none later than this"
    )
    parser.add_argument("--json", type=Path, help="also write the seconds of each run and its median step to this file")


def choose_runner(arguments: argparse.Namespace) -> None:
    """To be called before vLLM is imported."""
    if not arguments.cpu:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"


def engine_arguments(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    if arguments.cpu:
        from midstream import demo_model

        common = {"dtype": "float32", "enforce_eager": not arguments.compiled, "gpu_memory_utilization": 0.2}
        return demo_model(), {**common, "max_model_len": 512, "max_num_seqs": 64}
    common = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "FLASH_ATTN",
    }
    sizes = {"max_model_len": 2048, "max_num_seqs": 128, "max_num_batched_tokens": 16384}
    graphs = {
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]
    }  # engines start sooner than with all sizes between
    own = {"gpu_memory_utilization": min(0.3, 0.4 / arguments.engines), "compilation_config": graphs}
    return shape_dir(SHAPES[arguments.shape]), {
        **common,
        **sizes,
        **own,
        "seed": 0,
        "enforce_eager": arguments.eager,
    }


def start_engines(arguments: argparse.Namespace, start: Callable[[bool], Any]) -> tuple[list[Any], list[Any]]:
    """Stock engines and midstream's, as many as asked for; neither kind always starts before the other.

    Args:
        start: makes a stock engine (True) or midstream's (False).
    """
    engines: tuple[list[Any], list[Any]] = ([], [])
    for number in range(arguments.engines):
        for stock in (True, False) if number % 2 == 0 else (False, True):
            began = time.perf_counter()
            with on_the_same_cores(arguments):
                engines[not stock].append(start(stock))
            print(f"{'stock' if stock else 'midstream'} engine started in {time.perf_counter() - began:.0f} s")
    return engines


@contextlib.contextmanager
def on_the_same_cores(arguments: argparse.Namespace) -> Iterator[None]:
    """Put the loops of the engine that starts in the block on cores of their own, the same ones in every block.

    A small model's steps take as long as these loops, and cores of one machine were seen to differ by a fifth. Engines take turns, so
    they can share. On the CPU build all cores have work: nothing is done.
    """
    if arguments.cpu:
        yield
        return
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    loops = [process.pid for process in started if "resource_tracker" not in " ".join(process.cmdline())]
    cores = sorted(os.sched_getaffinity(0))[2::2]  # of two hyperthreads one
    for loop, core in zip(sorted(loops), cores, strict=False):
        os.sched_setaffinity(loop, {core})  # on Linux of the main thread alone


def stock_runs(engines: Sequence[Any], prompts: Sequence[list[int]], params: dict[str, Any]) -> Runs:
    """Plain generation on stock engines, which all else is compared with."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]

    def plain(llm: Any) -> Callable[[], Any]:
        return lambda: llm.generate(given, SamplingParams(**params), use_tqdm=False)

    return {"stock vLLM": list(map(plain, engines))}


@functools.cache
def ends_of_steps() -> list[float]:
    """When the client had the outputs of each step of any engine, from the first call on."""
    from vllm.v1.engine.llm_engine import LLMEngine

    ends: list[float] = []
    step = LLMEngine.step

    def timed(engine: Any) -> Any:
        outputs = step(engine)
        ends.append(time.perf_counter())
        return outputs

    LLMEngine.step = timed
    return ends


def in_turns(runs: Runs, arguments: argparse.Namespace) -> Measured:
    """Seconds of each run and of its steps, round by round.

    Every round has each of them once on each of its engines, after one round that does not count. It begins one run further than the
    round before, so that none of them always has the same place in it. Before each, engines with worker processes get time to rest.
    """
    has_workers = arguments.cpu or getattr(arguments, "pp", 1) * getattr(arguments, "tp", 1) > 1
    pause, deadline = (AWAKE_SECONDS if has_workers else 0.0), time.monotonic() + arguments.seconds
    places = [(name, engine) for name in runs for engine in range(len(runs[name]))]
    seconds: Seconds = {name: [[] for _ in each] for name, each in runs.items()}
    steps: Seconds = {name: [[] for _ in each] for name, each in runs.items()}
    ends = ends_of_steps()
    for round_number in range(arguments.rounds + 1):
        if round_number > 1 and time.monotonic() > deadline:
            break
        first = round_number % len(places)
        for name, engine in places[first:] + places[:first]:
            time.sleep(pause)
            ends.clear()
            start = time.perf_counter()
            runs[name][engine]()
            if round_number:
                seconds[name][engine].append(time.perf_counter() - start)
                steps[name][engine].append(statistics.median(b - a for a, b in itertools.pairwise([start, *ends])))
    return Measured(seconds, steps)


def print_table(measured: Measured, tokens: int, arguments: argparse.Namespace) -> None:
    """Tokens a second, and the ratio to the first row, which is stock vLLM, in the same round: what slows all of a round drops out.

    Where there are several engines of a kind, a round has their mean, and the last column the ratio of each one's median. The fastest
    tenth of the runs, of all engines together, is what neighbours on the host disturbed least.
    """
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured._asdict()))
    runs, steps = _means(measured.runs), _means(measured.steps)
    stock = next(iter(runs))
    mode = "compiled" if arguments.compiled else "eager"
    if not arguments.cpu:
        mode = f"{arguments.shape} shape, {arguments.runner}{', eager' if arguments.eager else ''}"
    count = f", {arguments.engines} engines of each kind" if arguments.engines > 1 else ""
    print(f"\n{describe_machine()}\n{tokens} tokens a run, {mode}{count}, medians of {len(runs[stock])} rounds")
    print(
        "| run | tok/s | of stock in the same round | fastest tenth | a step | of stock's in the same round | engine by engine |"
        "\n|---|---|---|---|---|---|---|"
    )
    for name, engines in measured.runs.items():
        own = ", ".join(f"{statistics.median(runs[stock]) / statistics.median(engine):.3f}" for engine in engines)
        fastest = _fastest(measured.runs[stock]) / _fastest(engines)
        print(
            f"| {name} | {tokens / statistics.median(runs[name]):,.0f} | {_ratios(runs[stock], runs[name])} | {fastest:.3f} "
            f"| {statistics.median(steps[name]) * 1e3:.3f} ms | {_ratios(steps[stock], steps[name])} | {own} |"
        )


def _means(seconds: Seconds) -> dict[str, list[float]]:
    """Of each run and round, over the engines."""
    return {name: [statistics.mean(each) for each in zip(*engines, strict=True)] for name, engines in seconds.items()}


def _fastest(engines: list[list[float]]) -> float:
    """The mean seconds of the fastest tenth of a kind's runs."""
    seconds = sorted(itertools.chain.from_iterable(engines))
    return statistics.mean(seconds[: -(-len(seconds) // 10)])


def _ratios(stock: list[float], run: list[float]) -> str:
    """The median over the rounds, and the quartiles."""
    low, middle, high = quartiles([before / after for before, after in zip(stock, run, strict=True)])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def compare(
    doc: str | None,
    runs_of: Callable[[list[Any], list[list[int]], dict[str, Any]], Runs],
    captured: Callable[[Any, list[list[int]]], Iterable[Any]],
) -> None:
    """A benchmark of one rank, from its command line to what it prints.

    Args:
        doc: what it is, for `--help`.
        runs_of: the rows below stock vLLM's, of midstream's engines, prompts and sampling parameters.
        captured: every layer of these prompts, at all positions, at the client; tensors.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    choose_runner(arguments)
    from vllm import LLM

    from midstream import VLLM

    path, engine = engine_arguments(arguments)
    prompts, params = load_of(arguments)
    stock, models = start_engines(arguments, lambda plain: LLM(path, **engine) if plain else VLLM(path, **engine))
    runs = {**stock_runs(stock, prompts, params), **runs_of(models, prompts, params)}
    print_table(in_turns(runs, arguments), len(prompts) * params["max_tokens"], arguments)
    print_captured(models[0], captured, 8 if arguments.cpu else 64, 64 if arguments.cpu else 512)
    for model in models:
        model.close()
    for llm in stock:
        llm.llm_engine.engine_core.shutdown()


def load_of(arguments: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts and sampling parameters of one run."""
    requests, tokens = (32, 32) if arguments.cpu else (64, 128)
    return prompts_of(requests, 16), {
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Token ids, different from prompt to prompt."""
    return [[(7 * i + 3 * j + seed) % 1000 + 1 for j in range(length)] for i in range(count)]


def print_captured(
    model: Any, captured: Callable[[Any, list[list[int]]], Iterable[Any]], count: int, length: int
) -> None:
    """Seconds and GB/s for every layer's residual stream of `count` prompts x `length` tokens, the best of four times."""
    best, size = float("inf"), 0
    for attempt in range(4):
        prompts = prompts_of(count, length, attempt)
        start = time.perf_counter()
        tensors = list(captured(model, prompts))
        best = min(best, time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for t in tensors)
        assert sum(t.numel() for t in tensors) == count * length * model.num_layers * model.hidden_size
    print(f"capture of every layer, {count} x {length} tokens: {best:.2f} s, {size / best / 1e9:.2f} GB/s")


def quartiles(values: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def describe_machine() -> str:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return f"{device}; vLLM {vllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}; {datetime.date.today()}"
