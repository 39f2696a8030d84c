"""Architectures on several GPUs against transformers: a script that prints one line for each and exits 1 on a failure (see test_gpu.py).

    python tests/gpu/check_architectures.py --runner v2 --tp 2 mixtral falcon
    python tests/gpu/check_architectures.py --cpu --tp 2 mixtral

Every accessor, edit and site that plans have (`compare_runs.disagreements`), float32, tiny models with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault(
    "VLLM_WORKER_MULTIPROC_METHOD", "spawn"
)  # transformers, which runs first, may have asked for GPUs
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", metavar="NAME", help="of tests/tiny_models.py")
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each stage")
    parser.add_argument("--cpu", action="store_true", help="the same on the CPU build, to try the script out")
    parser.add_argument("--graphs", action="store_true", help="compiled, with CUDA graphs")
    arguments = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"
    import tiny_models
    from compare_runs import ENGINE, disagreements
    from forked import forked

    sizes = {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp}
    engine = {**ENGINE, **sizes, "gpu_memory_utilization": 0.1, "enforce_eager": not arguments.graphs}
    if not arguments.cpu:
        engine |= {
            "attention_backend": "TRITON_ATTN",
            "kv_cache_memory_bytes": 1 << 30,
        }  # float32; several beside each other
    failed = 0
    for name in arguments.names:
        architecture = tiny_models.ARCHITECTURES[name]
        rtol = (
            architecture.rtol if arguments.cpu else 3e-2
        )  # Triton's attention rounds float32 to TF32, which edits enlarge
        with tempfile.TemporaryDirectory() as directory, forked() if arguments.cpu else contextlib.nullcontext():
            try:
                wrong: Any = disagreements(
                    tiny_models.build(name, Path(directory)), rtol, **{**engine, **architecture.engine}
                )
            except Exception:
                wrong = traceback.format_exc()
        tiny_models.restore_transformers()
        failed += bool(wrong)
        label = f"{arguments.runner} pp={arguments.pp} tp={arguments.tp} {name}"
        print(f"FAILED  {label} {wrong}" if wrong else f"ok      {label}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
