"""Run by test_ray_data.py in a process of its own: jobs of `midstream.ray` on two nodes, each with an engine; and refused jobs.

python ray_data_script.py DIRECTORY ENGINE     ENGINE has the arguments of the vLLM engines, as JSON

The jobs capture to DIRECTORY/killed, whose engines run on transformers and of which one is killed, and to DIRECTORY/rows, of whose nodes
one is removed. DIRECTORY/came.json says what the jobs returned or raised, and which processes were lost.
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


def lose(rows: Path, least: int, kill: Callable[[int], Any], lost: list[int]) -> None:
    """Call `kill` with the process of the first actor that has written `least` prompts: a part of its first batch."""
    while True:
        lines = {path: path.read_bytes().count(b"\n") - 1 for path in rows.glob("index-*.jsonl")}
        for index, there in lines.items():
            if there >= least:
                lost += [int(index.stem.split("-")[-2]), there]
                return kill(lost[0])
        time.sleep(0.01)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(directory: Path, engine: dict[str, Any]) -> None:
    import psutil
    import ray
    from ray.cluster_utils import Cluster
    from vllm.lora.request import LoRARequest

    import midstream.ray
    from midstream import Capture, demo_model

    cluster = Cluster(
        True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000}
    )
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100_000_000) for _ in range(2)]
    ray.init(cluster.address)

    def remove_node(process: int) -> None:
        """That of an actor's process. No other node has room for the actor."""
        of_actor = psutil.Process(process).ppid()
        (node,) = (node for node in nodes if node.all_processes["raylet"][0].process.pid == of_actor)
        cluster.remove_node(node, allow_graceful=False)

    given: dict[str, Any] = {"model": demo_model(), "plan": plan(), "num_gpus": 0, "batch_size": 40, **PARAMS}
    on_transformers = {"backend": "transformers", "engine": {"dtype": "float32"}}
    killed, removed = list[int](), list[int]()
    threading.Thread(target=lose, args=(directory / "killed", 0, kill, killed), daemon=True).start()
    of_killed = midstream.ray.collect(prompts(), to=directory / "killed", **given, **on_transformers).take_all()
    bad = [prompts()[0], None, [], prompts()[1]]
    some: dict[str, Any] = {**given, **on_transformers, "concurrency": 1, "on_bad": "skip"}
    left = midstream.ray.collect(bad, to=directory / "left", **some).take_all()
    rows = directory / "rows"
    threading.Thread(target=lose, args=(rows, 5, remove_node, removed), daemon=True).start()
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
    elsewhere = {**on_transformers, "plan": Capture("resid_post", layers=99)}
    errors = {
        "another plan": refused(prompts(), "rows", plan=Capture("resid_post", layers=3)),
        "another adapter": refused(prompts(), "rows", lora_request=LoRARequest("red", 1, "red")),
        "no ids": refused(dataset),
        "no column": refused(dataset, id_column="name"),
        "an id twice": refused(twice, id_column="key"),
        "no capture": refused(prompts(), plan=[]),
        "an adapter": refused(prompts(), lora_request="red", backend="transformers"),
        "in an actor": error_of(
            lambda: midstream.ray.collect(prompts()[:1], to=directory / "refused", **{**given, **elsewhere})
        ),
    }
    came = {"first": first, "again": again, "asked": asked, "chat": chat, "errors": errors}
    came |= {"of killed": of_killed, "left": left, "killed": killed, "removed": removed}
    (directory / "came.json").write_text(json.dumps(came))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
