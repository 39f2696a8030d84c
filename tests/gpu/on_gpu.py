"""What the scripts of this folder share: their options, the engine that they ask, and a line for each check.

To be imported before vLLM, whose environment it sets.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Else Triton multiplies float32 as TF32, and experts are chosen by that.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def parser_of(doc: str | None, *, ranks: bool = False) -> argparse.ArgumentParser:
    """The options that all have; with `ranks`, how many of them the engine has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--cpu", action="store_true", help="the same on the CPU build, to try the script out")
    parser.add_argument("--eager", action="store_true", help="without compilation and CUDA graphs")
    parser.add_argument(
        "--float32", action="store_true", help="with Triton's attention; as on the CPU, tolerances are small"
    )
    if ranks:
        parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
        parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each stage")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, and the runner chosen. `exact` says whether everything is computed in float32."""
    arguments = parsed_runner(parser)
    arguments.exact = arguments.cpu or arguments.float32
    return arguments


def parsed_runner(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a script of its own, and the runner chosen."""
    arguments = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"
    return arguments


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of an engine that others may run beside, on the same GPUs."""
    engine: dict[str, Any] = {"enforce_eager": arguments.eager, "max_model_len": 512, "gpu_memory_utilization": 0.1}
    if arguments.cpu:
        return {**engine, "dtype": "float32"}
    engine["kv_cache_memory_bytes"] = 1 << 30
    if arguments.float32:
        return {**engine, "dtype": "float32", "attention_backend": "TRITON_ATTN"}
    return {**engine, "dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}  # which takes no float32


def run_checks(checks: Any, label: str) -> int:
    """Run the methods `check_*` in the order of their names, a line each; how many failed.

    `after_each`, if there is one, is part of every check. `after_failure` returns what to print, and puts right what the next check needs.
    """
    failed = 0
    after_each, after_failure = getattr(checks, "after_each", lambda: None), getattr(checks, "after_failure", str)
    names = [name for name in dir(checks) if name.startswith("check_")]
    assert names, f"{label}: there is no check"
    for name in names:
        try:
            getattr(checks, name)()
            after_each()
            print(f"ok      {label} {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {label} {name}\n{traceback.format_exc()}{after_failure()}", flush=True)
    print(f"{label}: {failed} failed", flush=True)
    return failed
