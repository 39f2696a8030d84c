"""Measure nnsight with the load and the traces of `overhead.py traces` and `captures`.

    python benchmarks/beside_nnsight.py --shape qwen3-0.6b           # nnsight's eager engine
    python benchmarks/beside_nnsight.py --shape qwen3-0.6b --taps    # its engine with CUDA graphs and declared modules (taps)

Needs a GPU and nnsight 0.8.1, which requires the V1 runner. Each round has new prompts, and the first round does not count. The figures
are medians over the other rounds, with 95 % bootstrap intervals. Compare them with those of `overhead.py` on the same machine.
"""

from __future__ import annotations

import argparse
import time
import traceback
from typing import Any

import numpy as np
from overhead import PARAMS, long_prompts
from side_by_side import SHAPES, add_arguments, describe_machine, engine_arguments, median, settle

COUNT, PROMPT, TOKENS = 64, 16, 128
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
    runs = {
        "no trace": lambda prompts: plain(model, prompts),
        "reads one layer of its prompt": lambda prompts: reads(model, prompts, middle),
        "adds a vector in every step": lambda prompts: adds(model, prompts, middle, vector),
        "replaces an MLP's output by its tanh in every step": lambda prompts: squashes_mlp(model, prompts, middle),
        f"saves every layer of {LONG} tokens": lambda prompts: saves_layers(model, prompts, layers),
    }
    print(f"\n{describe_machine()}\n{arguments.shape} shape; {COUNT} requests, all traced\n")
    print("| run | s | tok/s |\n|---|---|---|")
    for name, run in runs.items():
        seconds: list[float] = []
        length = LONG if name.startswith("saves") else PROMPT
        try:
            for number in range(arguments.rounds + 1):
                prompts = long_prompts(COUNT, length, number)
                start = time.perf_counter()
                run(prompts)
                seconds += [time.perf_counter() - start] * bool(number)
        except Exception:
            traceback.print_exc()
            continue
        rate = "" if length == LONG else median(COUNT * TOKENS / np.array(seconds), 0)
        print(f"| {name} | {median(seconds, 2)} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
