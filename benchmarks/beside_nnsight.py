"""Measure nnsight with the load and the traces of `overhead.py traces` and `captures`.

    python benchmarks/beside_nnsight.py --shape qwen3-0.6b           # nnsight's eager engine
    python benchmarks/beside_nnsight.py --shape qwen3-0.6b --taps    # its engine with CUDA graphs and declared modules (taps)

Needs a GPU and nnsight 0.8.1, which requires the V1 runner. Each round has new prompts, and the first round does not count. The figures
are medians over the other rounds, with 95 % bootstrap intervals. Compare them with those of `overhead.py` on the same machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from figures import Results
from overhead import FEATURES, LOADS, PARAMS, long_prompts, sae
from side_by_side import SHAPES, add_arguments, engine_arguments, in_turns, mean, settle

COUNT, (PROMPT, _), (TOKENS, _) = LOADS["equal"]
LONG = 512  # prompt tokens where every layer is saved
SAMPLING: dict[str, Any] = {**PARAMS, "max_tokens": TOKENS}


def plain(model: Any, prompts: list[list[int]]) -> None:
    model.generate([{"prompt_token_ids": prompt} for prompt in prompts], **SAMPLING)


def reads(model: Any, prompts: list[list[int]], layer: int) -> None:
    with model.trace(**SAMPLING) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = model.model.layers[layer].output[0].clone().save()  # noqa: F841


def adds(model: Any, prompts: list[list[int]], layer: int, vector: Any) -> None:
    with model.trace(**SAMPLING) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:TOKENS]:
                    model.model.layers[layer].output[0][:] += vector.cuda()


def squashes_mlp(model: Any, prompts: list[list[int]], layer: int) -> None:
    with model.trace(**SAMPLING) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:TOKENS]:
                    model.model.layers[layer].mlp.output[:] = model.model.layers[layer].mlp.output.tanh()


def gates(model: Any, prompts: list[list[int]], layer: int, width: int) -> None:
    with model.trace(**SAMPLING) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                encoder, decoder = sae(width, "cuda")  # made once in the engine's process
                for _ in tracer.iter[:TOKENS]:
                    hidden = model.model.layers[layer].output[0] + model.model.layers[layer].output[1]
                    model.model.layers[layer].output[0][:] += (hidden @ encoder).relu() @ decoder * 0.01


def saves_layers(model: Any, prompts: list[list[int]], layers: int) -> None:
    with model.trace(**{**SAMPLING, "max_tokens": 1}) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                hidden = [  # noqa: F841
                    (model.model.layers[i].output[0] + model.model.layers[i].output[1]).save() for i in range(layers)
                ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--taps", action="store_true", help="CUDA graphs, with the outputs of all layers and of the middle MLP declared"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="as of overhead.py")
    add_arguments(parser)
    arguments = parser.parse_args()
    settle(arguments)
    import torch
    from nnsight.modeling.vllm import VLLM  # type: ignore[import-not-found]

    path, given = engine_arguments(arguments)
    for name in ("enforce_eager", "skip_tokenizer_init"):
        given.pop(name, None)
    shape: dict[str, Any] = SHAPES[arguments.shape]
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    middle = layers // 2
    taps = ["model.layers.*.output", f"model.layers.{middle}.mlp.output"] if arguments.taps else []
    began = time.perf_counter()
    model = VLLM(path, dispatch=True, taps=taps, **given)
    print(f"nnsight's engine started in {time.perf_counter() - began:.0f} s", flush=True)
    vector = torch.full((hidden,), 0.01, dtype=torch.bfloat16)
    seeds = itertools.count()

    def seconds_of(run: Callable[[Any, list[list[int]]], None], length: int) -> float:
        prompts = long_prompts(COUNT, length, next(seeds))
        start = time.perf_counter()
        run(model, prompts)
        return time.perf_counter() - start

    rows: dict[str, tuple[Callable[[Any, list[list[int]]], None], int]] = {
        "no trace": (plain, PROMPT),
        "reads one layer of its prompt": (functools.partial(reads, layer=middle), PROMPT),
        "adds at the module's output": (functools.partial(adds, layer=middle, vector=vector), PROMPT),
        "replaces an MLP's output by its tanh": (functools.partial(squashes_mlp, layer=middle), PROMPT),
        f"an SAE's gate, {FEATURES:,} features": (
            functools.partial(gates, layer=middle, width=hidden),
            PROMPT,
        ),
        f"saves every layer of {LONG} tokens": (functools.partial(saves_layers, layers=layers), LONG),
    }
    rows = {name: row for name, row in rows.items() if any(text in name for text in arguments.only)}
    measured = in_turns({name: [functools.partial(seconds_of, *row)] for name, row in rows.items()}, arguments)
    system: dict[str, Any] = {"packages": ["nnsight"], "system": f"nnsight, {'taps' if arguments.taps else 'eager'}"}
    traces = Results(arguments, "traces", f"equal, sync, {COUNT} requests", **system)
    captures = Results(arguments, "captures", f"every layer of {COUNT} x {LONG} tokens", **system)
    print(f"\n{traces.machine}\n{arguments.shape} shape; {COUNT} requests, traced except in the first run\n")
    print("| run | s | tok/s |\n|---|---|---|")
    for name, rounds in measured.items():
        seconds = mean(rounds, float)
        if rows[name][1] == LONG:
            print(f"| {name} | {captures.add('by a trace', 'time', 's', seconds)} | |")
        else:
            rate = traces.add(name, "throughput", "tok/s", COUNT * TOKENS / np.array(seconds))
            print(f"| {name} | {traces.add(name, 'time', 's', seconds)} | {rate} |")


if __name__ == "__main__":
    main()
