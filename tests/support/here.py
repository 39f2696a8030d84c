"""Engines in the process of the tests: they start in seconds, and a test can take a protection away to see what it is good for.

An engine in this process rests between calls: its workers hear of a request's end in the step after it, for which `settle` makes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import ENGINE, start, timed

from midstream import VLLM, demo_model
from midstream.engine.launch import engine_arguments


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads cost such a small model more than they give, and beside other processes much more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setitem(ENGINE, "gpu_memory_utilization", 0.1)
        yield
    from vllm import envs

    envs.disable_envs_cache()  # an engine in a process fixes its environment


@contextmanager
def start_here(**arguments: Any) -> Iterator[VLLM]:
    """`midstream.VLLM` on the bundled model."""
    with _one_thread():
        with _in_this_process():
            model = start(**arguments)
        yield model
        model.close()


@contextmanager
def start_stock(*, plugin: bool = True, plan: Any = None, **arguments: Any) -> Iterator[Any]:
    """`vllm.LLM` on the bundled model, as a user of vLLM starts it.

    Args:
        plugin: whether it is started with midstream's engine arguments.
        plan: for every request.
    """
    from vllm import LLM

    with _one_thread():
        with _in_this_process(), timed("vllm.LLM"):
            own = engine_arguments(plan=plan) if plugin else {}
            llm = LLM(demo_model(), **{**ENGINE, **arguments}, **own)
        yield llm
        llm.llm_engine.engine_core.shutdown()


def submit(llm: Any, prompts: list[Any], plans: list[Any], **params: Any) -> list[Any]:
    """The outputs of a `vllm.LLM`, each prompt with its own plan in `extra_args`."""
    from vllm import SamplingParams

    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, "logprobs": 5, **params}
    sampling = [SamplingParams(**given, **({"extra_args": {"midstream": p}} if p is not None else {})) for p in plans]
    inputs = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
    return llm.generate(inputs, sampling, use_tqdm=False)


def settle(llm: Any) -> None:
    """One more step."""
    submit(llm, ["."], [None], max_tokens=1)


def values(output: Any) -> list[tuple[int, dict[int, float]]]:
    """Tokens and log-probabilities, to the last bit."""
    completion = output.outputs[0]
    tables = [{token: entry.logprob for token, entry in table.items()} for table in completion.logprobs]
    return list(zip(completion.token_ids, tables, strict=True))
