"""What traces cost, against stock vLLM: both engines alive in one run, measured in turns, printed as ratios.

    python benchmarks/trace_overhead.py --cpu                      # the bundled model, eager, 32 requests x 32 tokens
    python benchmarks/trace_overhead.py --runner v2                # a GPU: Qwen3-0.6B shape, dummy weights, 64 x 128

Rows: plain generation (stock = 1.00), plain generation on midstream's engine, a trace that saves one site, a trace that adds a
vector at one layer on every step, and on a GPU the capture of 64 prompts x 512 tokens x 28 layers to the client.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def shape_dir(config: dict[str, Any]) -> str:
    """A model directory with a config alone, for dummy weights."""
    directory = Path(tempfile.mkdtemp(prefix="shape-"))
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


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
    sizes = {"max_model_len": 2048, "max_num_seqs": 128, "max_num_batched_tokens": 16384, "gpu_memory_utilization": 0.3}
    return shape_dir(QWEN3_06B), {**common, **sizes, "seed": 0, "enforce_eager": arguments.eager}


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each run; every round has each of them once, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def build_runs(arguments: argparse.Namespace) -> tuple[dict[str, Callable[[], Any]], list[Callable[[], Any]]]:
    import torch
    from vllm import LLM, SamplingParams

    from midstream import VLLM

    path, engine = engine_arguments(arguments)
    requests, tokens = (32, 32) if arguments.cpu else (64, 128)
    prompts = [[(7 * i + 3 * j) % 1000 + 1 for j in range(16)] for i in range(requests)]
    stock = LLM(path, **engine)
    model = VLLM(path, **engine)
    params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    vector = torch.full((model.hidden_size,), 0.01)
    middle = model.num_layers // 2

    def save_one(m: Any) -> Any:
        return m.layers_output[middle]

    def steer(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.layers_output[middle] += vector

    def steer_mlp(m: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            m.mlps_output[middle] += vector

    runs: dict[str, Callable[[], Any]] = {
        "stock vLLM": lambda: stock.generate(
            [{"prompt_token_ids": p} for p in prompts], SamplingParams(**params, detokenize=False), use_tqdm=False
        ),
        "midstream, nothing traced": lambda: model.generate(prompts, **params, detokenize=False),
        "trace that saves one site": lambda: model.run(save_one, prompts, **params, detokenize=False),
        "trace that steers every step": lambda: model.run(steer, prompts, **params, detokenize=False),
        "the same at an MLP's output (uncompiled steps)": lambda: model.run(
            steer_mlp, prompts, **params, detokenize=False
        ),
    }
    return runs, [model.close, stock.llm_engine.engine_core.shutdown, lambda: capture(model, arguments)]


def capture(model: Any, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds and GB/s for every layer's residual stream of 64 prompts x 512 tokens, to the client."""
    count, length = (8, 64) if arguments.cpu else (64, 512)
    best, size = float("inf"), 0
    for attempt in range(3):
        prompts = [[(11 * i + 5 * j + attempt) % 1000 + 1 for j in range(length)] for i in range(count)]
        start = time.perf_counter()
        values = model.run(
            lambda m: [m.layers_output[i] for i in range(m.num_layers)], prompts, temperature=0.0, detokenize=False
        )
        best = min(best, time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for v in values for t in v)
    return best, size / best / 1e9


def describe_machine() -> str:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return f"{device}; vLLM {vllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}; {datetime.date.today()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the bundled model on the CPU build")
    parser.add_argument("--compiled", action="store_true", help="with --cpu: compile, too")
    parser.add_argument("--eager", action="store_true", help="on a GPU: without compilation and CUDA graphs")
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1", help="which model runner (GPU)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.cpu:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"
    runs, (close, close_stock, run_capture) = build_runs(arguments)
    seconds = in_turns(runs, arguments.rounds)
    requests, tokens = (32, 32) if arguments.cpu else (64, 128)
    print(f"\n{describe_machine()}")
    mode = (
        ("compiled" if arguments.compiled else "eager")
        if arguments.cpu
        else f"{arguments.runner}{', eager' if arguments.eager else ''}"
    )
    print(f"{requests} requests x {tokens} tokens, {mode}, median of {arguments.rounds} rounds")
    print("| run | tok/s | of stock | time / stock |\n|---|---|---|---|")
    for name, each in seconds.items():
        stock = seconds["stock vLLM"]
        print(f"| {name} | {requests * tokens / each:,.0f} | {stock / each:.3f} | {each / stock:.3f} |")
    best, rate = run_capture()
    print(f"capture of every layer, {'8 x 64' if arguments.cpu else '64 x 512'} tokens: {best:.2f} s, {rate:.2f} GB/s")
    close()
    close_stock()


if __name__ == "__main__":
    main()
