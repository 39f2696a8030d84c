"""Collections that test_collect.py runs in processes of their own and kills: `main`.

A mode is `hf`, which is on transformers, or `collect`, `async` or `stock`, on vLLM; `stock` is an engine that writes itself. Rows go to
`rows` in the directory. The file `ended` gets a line "seconds request" for each request as vLLM, or transformers, ends it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

COUNT = 240
GENERATED = 6
SLOW = {"enforce_eager": True, "max_num_seqs": 4}
PACE = 0.02  # seconds that each end of a request takes at least, so that there is something left to kill
PARAMS = {"max_tokens": GENERATED, "temperature": 0.0, "ignore_eos": True}


def prompts() -> list[list[int]]:
    """Two lengths, each prompt another one."""
    return [[1, 200 + i, 30 + i % 7, *range(40, 40 + i % 2 * 9), 77] for i in range(COUNT)]


def plan(**to: Any) -> Any:
    """Rows of the prompt and of what was generated."""
    from midstream import Capture

    return [Capture("resid_post", layers=[2, 5], positions="all", **to)]


def note_ends(log: Any) -> None:
    """Write down when vLLM's client has the end of a request."""
    from vllm.v1.engine.output_processor import OutputProcessor

    really = OutputProcessor.process_outputs

    def process_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(self.request_states)
        processed = really(self, *args, **kwargs)
        for name in before.keys() - self.request_states.keys():
            print(time.time(), before[name].external_req_id, file=log, flush=True)
            time.sleep(PACE)
        return processed

    OutputProcessor.process_outputs = process_outputs


def main(mode: str, directory: Path) -> None:
    from midstream.capture import consumers

    consumers.COLLECT_LINGER = consumers.LINGER  # as other requests wait for each other, so that the test is short
    rows, log = directory / "rows", (directory / "ended").open("w")
    if mode == "hf":
        return on_transformers(rows, log)
    note_ends(log)
    on_vllm(mode, rows)


def on_vllm(mode: str, rows: Path) -> None:
    from engines import start_spawned as start

    if mode == "stock":
        import vllm
        from engines import ENGINE

        from midstream import demo_model, engine_arguments

        llm = vllm.LLM(demo_model(), **{**ENGINE, **SLOW}, **engine_arguments(plan=plan(to=str(rows))))
        llm.generate([{"prompt_token_ids": ids} for ids in prompts()], vllm.SamplingParams(**PARAMS), use_tqdm=False)
    elif mode == "async":
        asyncio.run(collected_async(start(mode="async", **SLOW), rows))
    else:
        start(**SLOW).collect(prompts(), plan=plan(), to=rows, **PARAMS)


async def collected_async(model: Any, rows: Path) -> None:
    store = await model.collect(prompts()[:5], plan=plan(), to=rows, **PARAMS)
    assert len(store) == 5
    await model.collect(prompts(), plan=plan(), to=rows, **PARAMS)


def on_transformers(rows: Path, log: Any) -> None:
    import torch

    from midstream import LanguageModel, demo_model
    from midstream.transformers import language_model as language_model
    from midstream.transformers.batch import PaddedBatch

    language_model.BATCH_TOKENS = 64  # a few prompts
    really = PaddedBatch.run

    def run(self: Any) -> Any:
        done = really(self)
        for request in self.requests:
            print(time.time(), request.name, file=log, flush=True)
        time.sleep(PACE)
        return done

    PaddedBatch.run = run
    torch.set_num_threads(1)  # the test's own process has the other core
    LanguageModel(demo_model(), dtype=torch.float32).collect(prompts(), plan=plan(), to=rows, **PARAMS)
