"""Architectures on several GPUs against transformers: a script that prints one line for each and exits 1 on a failure (see test_gpu.py).

    python tests/gpu/check_architectures.py --runner v2 --tp 2 --eager mixtral falcon
    python tests/gpu/check_architectures.py --cpu --tp 2 --eager mixtral

Every accessor, edit and site that plans have (`compare_runs.disagreements`), float32, tiny models with random weights.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of

# Transformers, which runs first, may have asked for GPUs.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def main() -> int:
    parser = parser_of(__doc__, ranks=True)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of tests/support/tiny_models.py")
    parser.set_defaults(float32=True)
    arguments = parsed(parser)
    import tiny_models
    from compare_runs import disagreements
    from forked import forked

    sizes = {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp, "max_model_len": 256}
    engine = {**engine_arguments(arguments), "max_num_seqs": 8, **sizes}
    failed = 0
    for name in arguments.names:
        architecture = tiny_models.ARCHITECTURES[name]
        with tempfile.TemporaryDirectory() as directory, forked() if arguments.cpu else contextlib.nullcontext():
            try:
                wrong: Any = disagreements(
                    tiny_models.build(name, Path(directory)), architecture.rtol, **{**engine, **architecture.engine}
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
