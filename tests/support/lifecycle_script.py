"""Run by test_lifecycle.py in a process of its own:

    python lifecycle_script.py interrupt|kill DIRECTORY    a client that is interrupted or killed in the middle of a trace
    python lifecycle_script.py drop DIRECTORY              a client that forgets its engine without closing it
    python lifecycle_script.py preempt DIRECTORY           traces on an engine whose KV cache is too small for them
    python lifecycle_script.py lose DIRECTORY RANKS sync|async running|waiting
                                                           a client one of whose workers is killed: while a trace runs, or when its
                                                           requests have ended and what came of them is waited for

RANKS, one of `ranks.SIZES`, is what the engine has; without it, one.

The body of a long trace touches a file of DIRECTORY when it has got under way. What the client finds is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import ranks
import torch
from engines import RANKS, left
from engines import start_spawned as start
from forked import forked

from midstream import Capture, Steer
from midstream.errors import EngineClosedError

PROMPTS = [
    "The capital of France is",
    "The Eiffel Tower is in the city of",
    "Madison Square Garden is located in the city of",
    "The capital of Italy is",
]
LONG = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}  # a cache that lacks an edit shows in the logprobs first


def long_trace(model: Any, mark: str) -> Any:
    with model.trace(PROMPTS[0], max_tokens=500, **LONG) as tracer:
        for step in tracer.iter[:]:
            model.layers_output[3] += 0.0
            time.sleep(0.05)
            if step == 3:
                Path(mark).touch()
    return tracer.backend


async def to_the_end(stream: Any) -> None:
    await stream


def kill(directory: Path) -> None:
    model = start(mode="async", enforce_eager=True)
    asyncio.run(to_the_end(long_trace(model, str(directory / "first"))))


def drop(directory: Path) -> None:
    """As in a notebook's cell, the engine is a variable of the frame that asked for it, and vLLM the first time loaded there."""
    sys.modules["torchcodec"] = None  # type: ignore[assignment]  # vLLM keeps the error of its import

    def begin() -> weakref.ref[Any]:
        model = start(enforce_eager=True)
        with model.trace(PROMPTS[0]):
            model.layers_output[3].save()
        return weakref.ref(model)

    model = begin()
    (directory / "begun").touch()
    gc.collect()
    print("freed" if model() is None else "kept", flush=True)
    (directory / "dropped").touch()
    time.sleep(600)


def interrupt(directory: Path) -> None:
    model = start(enforce_eager=True)
    try:
        long_trace(model, str(directory / "first"))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    with model.trace(PROMPTS[0], temperature=0.0):
        token = model.samples.item().save()
    print("clean" + model.tokenizer.decode(token), any(map(left, model.gauges())), flush=True)
    long_trace(model, str(directory / "second"))


# A worker that is killed.


def lose(directory: Path) -> None:
    mode, when = sys.argv[4:]
    model = start(mode=mode, enforce_eager=True)
    act = {"running": long_trace, "waiting": slow_endings}[when]
    try:
        if mode == "async":
            asyncio.run(to_the_end(act(model, str(directory / "first"))))
        else:
            act(model, str(directory / "first"))
    except EngineClosedError as error:
        print(f"closed: {error}", flush=True)
    if mode == "sync":
        ask_again(model)
    (directory / "told").touch()
    model.close()
    (directory / "closed").touch()
    time.sleep(600)


def ask_again(model: Any) -> None:
    """Whatever a dead engine is asked for, it says so in the same words."""
    for ask in (
        model.gauges,
        lambda: model.generate(PROMPTS[0], max_tokens=2),
        lambda: model.record(PROMPTS[0], "resid_post"),
    ):
        try:
            ask()
        except EngineClosedError as error:
            print(f"again closed: {error}", flush=True)


def slow_endings(model: Any, mark: str) -> Any:
    """Two requests that end with a text, which the workers know nothing of.

    When they hear of the end, a body keeps them: its saves, and the other request's last rows, do not come for a long time.
    """
    with model.trace(max_tokens=50, stop=[" Paris"], **LONG) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPTS[0], plan=[Capture("resid_post")]):
            barrier()
        with tracer.invoke(PROMPTS[0]):
            barrier()
            try:
                for _ in tracer.iter[:]:
                    model.layers_output[3] += 0.0
            finally:
                Path(mark).touch()
                time.sleep(600)
    return tracer.backend


# Preemption.


def steer_every_step(model: Any, prompts: list[str]) -> Any:
    with model.trace(max_tokens=60, **LONG) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden, ids = list().save(), list().save()
                for step in tracer.iter[:]:
                    model.layers_output[3] += 0.05 * (step % 7)
                    hidden.append(model.layers_output[5][-1].clone())
                    ids.append(model.samples.item())
    return tracer.outputs


def steer_the_prompt(model: Any, prompts: list[str]) -> Any:
    """Its code is done with the prompt, and what it wrote lives on in the KV cache alone."""
    with model.trace(max_tokens=60, **LONG) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                model.layers_output[3] += torch.linspace(-10, 10, model.hidden_size)
    return tracer.outputs


def choose_tokens(model: Any, prompts: list[str]) -> Any:
    """Edits of logits and samples, which a recomputation has no use for."""
    with model.trace(max_tokens=60, **LONG) as tracer:
        for prompt in prompts:
            first = 300 + 80 * PROMPTS.index(prompt)
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    if step % 3 == 0:
                        model.logits[0, first + step] += 1000.0
    return tracer.outputs


def steered_by_two(model: Any, prompts: list[str]) -> Any:
    """An edit left on the model and a trace write at the same place."""
    with model.edit("double", inplace=True):
        model.layers_output[3] = model.layers_output[3] * 1.1
    try:
        return steer_every_step(model, prompts)
    finally:
        model.clear_edits()


def planned(model: Any, prompts: list[str]) -> Any:
    plan = [
        Steer("resid_post", layers=3, vector=torch.linspace(-10, 10, model.hidden_size)),
        Capture("resid_post", layers=5, positions="all", when="after"),
    ]
    return model.generate(prompts, plan=plan, max_tokens=60, **LONG)


def hidden_of(output: Any) -> list[torch.Tensor]:
    """What was read at layer 5, step by step."""
    return output.saves.get("hidden", []) or list(output.captures.values())


def compared(model: Any, steered: Any, prompts: list[str]) -> dict[str, Any]:
    """The runs of all prompts together, against each alone."""
    before = preemptions(model)
    alone = [steered(model, [prompt])[0] for prompt in prompts]
    without, together = preemptions(model), steered(model, prompts)
    pairs = list(zip(alone, together, strict=True))
    return {
        "preempted alone": without - before,
        "preempted together": preemptions(model) - without,
        "same tokens": [list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids) for a, b in pairs],
        "ids are the tokens": [b.saves.get("ids") in (None, list(b.outputs[0].token_ids)) for b in together],
        "largest difference": max(difference(hidden_of(a), hidden_of(b)) for a, b in pairs),
        "logprobs": max(difference(logprobs(a), logprobs(b)) for a, b in pairs),
    }


def logprobs(output: Any) -> list[torch.Tensor]:
    (sample,) = output.outputs
    return [torch.tensor(step[token].logprob) for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(((a - b).abs().max().item() for a, b in zip(one, other, strict=True)), default=0.0)


def preemptions(model: Any) -> int:
    return sum(metric.value for metric in model.engine.get_metrics() if metric.name == "vllm:num_preemptions")


def preempt(directory: Path) -> None:
    if not RANKS:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # starts fast, and the scheduler is the same
    model = start(
        enforce_eager=True, max_model_len=128, block_size=32, num_gpu_blocks_override=8, disable_log_stats=False
    )
    kinds = (
        [steer_the_prompt, planned] if RANKS else [steer_every_step, steer_the_prompt, choose_tokens, steered_by_two]
    )
    prompts = PROMPTS[:3] if RANKS else PROMPTS  # each takes three of the eight blocks
    result = {kind.__name__: compared(model, kind, prompts) for kind in kinds}
    print(json.dumps({**result, "gauges": model.gauges()}))
    model.close()


if __name__ == "__main__":
    RANKS.update(ranks.SIZES[sys.argv[3]] if len(sys.argv) > 3 else {})
    with forked(server=False) if RANKS else contextlib.nullcontext():
        {"kill": kill, "drop": drop, "interrupt": interrupt, "preempt": preempt, "lose": lose}[sys.argv[1]](
            Path(sys.argv[2])
        )
