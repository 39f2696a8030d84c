"""Steps apart on a GPU: what `tests/engine/test_apart.py` has, with CUDA graphs and on either runner.

python tests/gpu/check_apart.py --runner v2
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))


class Checks:
    def __init__(self, model: Any, runner: asyncio.Runner) -> None:
        self.model, self.runner = model, runner

    def drive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 120))


def main() -> int:
    arguments = parsed(parser_of(__doc__))
    arguments.float32 = arguments.exact = True  # the tokens of a batch are those of each request alone
    import test_apart

    from midstream import VLLM, demo_model

    given = {**engine_arguments(arguments), **test_apart.ENGINE, "enforce_eager": arguments.eager}
    for name, test in vars(test_apart).items():
        if name.startswith("test_") and [*inspect.signature(test).parameters] == ["model", "drive"]:
            setattr(Checks, f"check_{name[5:]}", lambda self, test=test: test(self.model, self.drive))
    with asyncio.Runner() as runner, VLLM(demo_model(), **given, max_num_seqs=16) as model:
        return 1 if run_checks(Checks(model, runner), arguments.runner) else 0


if __name__ == "__main__":
    sys.exit(main())
