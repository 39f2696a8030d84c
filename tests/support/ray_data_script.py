"""Run by test_ray_data.py in a process of its own: a job of `midstream.ray` on two engines, one of which is killed; and refused jobs.

python ray_data_script.py DIRECTORY ENGINE     ENGINE has the arguments of the engines, as JSON

It captures to DIRECTORY/rows. DIRECTORY/came.json says what the jobs returned or raised, and which process was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNT, GENERATED = 160, 12
PARAMS = {"max_tokens": GENERATED, "temperature": 0.0, "ignore_eos": True}


def prompts() -> list[list[int]]:
    """Two lengths, each prompt another one."""
    return [[1, 200 + i, 30 + i % 7, *range(40, 40 + i % 2 * 9), 77] for i in range(COUNT)]


def plan() -> Any:
    """Rows of the prompt and of what was generated."""
    from midstream import Capture

    return [Capture("resid_post", layers=[2, 5], positions="all")]


def kill_an_actor(rows: Path, killed: list[int]) -> None:
    """Kill the process of an actor once both have written, and this one only a part of its first batch."""
    while True:
        lines = {path: path.read_bytes().count(b"\n") - 1 for path in rows.glob("index-*.jsonl")}
        if len(lines) > 1 and min(lines.values()) >= 5:
            first = min(lines, key=lambda path: lines[path])
            killed += [int(first.stem.split("-")[-2]), lines[first]]
            return os.kill(killed[0], signal.SIGKILL)
        time.sleep(0.01)


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(directory: Path, engine: dict[str, Any]) -> None:
    import ray

    import midstream.ray
    from midstream import Capture, demo_model

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    given: dict[str, Any] = {"model": demo_model(), "plan": plan(), "num_gpus": 0, "batch_size": 40, **PARAMS}
    rows, killed = directory / "rows", list[int]()
    threading.Thread(target=kill_an_actor, args=(rows, killed), daemon=True).start()
    first = midstream.ray.collect(prompts(), to=rows, engine=engine, **given).take_all()
    wrong = {**engine, "no_such_argument": 1}  # an engine would not start
    dataset = ray.data.from_items([{"text": prompt, "key": i} for i, prompt in enumerate(prompts())])
    again = {
        "list": midstream.ray.collect(prompts(), to=rows, engine=wrong, **given).count(),
        "dataset": midstream.ray.collect(dataset, id_column="key", to=rows, engine=wrong, **given).count(),
    }
    chat = [{"role": "system", "content": "a", "name": "b"}, {"role": "user", "content": "c"}]
    mixed = ray.data.from_items(
        [{"text": chat, "key": "x"}, {"text": chat[1:], "key": "y"}, {"text": chat, "key": "z"}]
    )
    asked = midstream.ray._missing(mixed, "text", "key", {"z": ""}).take_all()

    def refused(prompts: Any, to: str = "refused", **more: Any) -> str:
        return error_of(lambda: midstream.ray.collect(prompts, to=directory / to, engine=engine, **{**given, **more}))

    twice = ray.data.from_items([{"text": "a", "key": 1}, {"text": "b", "key": 1}])
    elsewhere = {"backend": "transformers", "engine": {"dtype": "float32"}, "plan": Capture("resid_post", layers=99)}
    errors = {
        "another plan": refused(prompts(), "rows", plan=Capture("resid_post", layers=3)),
        "no ids": refused(dataset),
        "no column": refused(dataset, id_column="name"),
        "an id twice": refused(twice, id_column="key"),
        "no capture": refused(prompts(), plan=[]),
        "in an actor": error_of(
            lambda: midstream.ray.collect(prompts()[:1], to=directory / "refused", **{**given, **elsewhere})
        ),
    }
    came = {"first": first, "again": again, "asked": asked, "chat": chat, "errors": errors, "killed": killed}
    (directory / "came.json").write_text(json.dumps(came))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
