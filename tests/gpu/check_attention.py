"""Attention on a GPU: the tests of `tests/engine/test_attention_engine.py`, with CUDA graphs and on either runner, in float32.

python tests/gpu/check_attention.py --runner v2 --model gemma2
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

# Transformers, which runs first, leaves threads behind that a forked process does not have.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))


def cases(test: Any) -> list[dict[str, Any]]:
    """The arguments that pytest's `parametrize` would give to a test."""
    marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    return [
        dict(zip((name for name, _ in marks), values, strict=True))
        for values in itertools.product(*(each for _, each in marks))
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="llama", help="a name of tests/support/tiny_models.py")
    parser.set_defaults(float32=True)
    arguments = parsed(parser)
    import test_attention_engine as tests
    import tiny_models
    from attended import Attended

    from midstream import VLLM

    with tempfile.TemporaryDirectory() as directory:
        path = tiny_models.build(arguments.model, Path(directory))
        given = {**engine_arguments(arguments), **tests.SIZES, **tiny_models.ARCHITECTURES[arguments.model].engine}
        given.pop("kv_cache_memory_bytes", None)
        with VLLM(str(path), **given) as model:
            both = (model, Attended(path))
            checks = {
                "_".join(["check", name[5:], *map(str, case.values())]): lambda test=test, case=case: test(both, **case)
                for name, test in vars(tests).items()
                if name.startswith("test_") and next(iter(inspect.signature(test).parameters)) == "both"
                for case in cases(test)
            }
            return run_checks(SimpleNamespace(**checks), f"{arguments.runner} {arguments.model}")


if __name__ == "__main__":
    sys.exit(bool(main()))
