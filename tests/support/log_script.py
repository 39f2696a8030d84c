"""Run by test_log.py in a process of its own, without vLLM's environment variables about logs.

`fail`, `kill` and `here` are forked from a process that has imported vLLM.

python log_script.py close                     an engine that is closed
python log_script.py fail                      one that cannot start
python log_script.py kill sync|async|unseen    one whose process is killed, during its calls or between them
python log_script.py here                      one in this process
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
import warnings
from typing import Any

import psutil

LEVEL = os.environ.get("VLLM_LOGGING_LEVEL")
from engines import start_spawned  # noqa: E402  # sets a level if there is none

from midstream import VLLM  # noqa: E402
from midstream.errors import EngineClosedError  # noqa: E402

if LEVEL is None:
    os.environ.pop("VLLM_LOGGING_LEVEL", None)  # `engines` may have been imported before
PROMPT = "The capital of France is"


def start(**arguments: Any) -> VLLM:
    model = start_spawned(enforce_eager=True, **arguments)
    log = model.engine.midstream_log
    tell(log=log and log.path, there=log is not None and os.path.exists(log.path))
    return model


def tell(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def close() -> None:
    with start() as model, model.trace(PROMPT):
        print("printed in a trace")
        warnings.warn("warned in a trace", stacklevel=1)
        h = model.layers_output[0].save()  # noqa: F841
    print("printed by the script")


def fail() -> None:
    longest = 10**7
    start(max_model_len=longest, hf_overrides={"max_position_embeddings": longest})


def kill(mode: str) -> None:
    model = start(mode="async" if mode == "async" else "sync")

    async def run() -> None:
        for _ in range(1 if mode == "unseen" else 2):
            outputs = model.generate([PROMPT])
            if mode == "async":
                await outputs
            for process in psutil.Process().children():  # the engine, and Python's tracker of shared memory
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()

    for call in (lambda: asyncio.run(run()), lambda: model.engine):
        try:
            call()
        except EngineClosedError as error:
            tell(notes=error.__notes__)
    if mode == "unseen":
        time.sleep(2)  # vLLM looks after its processes
    model.close()


def here() -> None:
    with start():
        logging.getLogger("vllm.tests").warning("logged after the start")


if __name__ == "__main__":
    vllms = logging.getLogger("vllm")
    for each in (vllms, *vllms.handlers):  # of a forked process, whose parent has another level
        each.setLevel("INFO")
    globals()[sys.argv[1]](*sys.argv[2:])
