"""How many cells of a sweep run in a second: midstream on vLLM, `LanguageModel` and TransformerLens.

    python benchmarks/sweeps.py --cpu                                    # the bundled model
    python benchmarks/sweeps.py --runner v2 --shape llama-3.1-8b --transformer-lens

A sweep has a clean and a corrupt prompt of `--tokens` tokens, and patches every layer and position of two sites. Each round sweeps new
prompts, so that no prompt is in the prefix cache. On a GPU the systems run one after the other, since each takes most of its memory; on the
CPU they take turns. TransformerLens runs cell by cell with its `generic_activation_patch`, and in batches of cells, by hooks on every layer
that write one row each: the largest batch that fits into the memory. Its activations are graded by the logits of the last token, as
midstream's are. `LanguageModel` runs cells one by one, a call of `generate` with a `Patch` for each, and in batches, as its `sweep` does.

"The prefill limit" is the rate at which vLLM computes prompts of that length and one token each, without a plan and without the prefix
cache: as many requests as the sweep has cells.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from figures import Results, ratio
from side_by_side import STARTED, add_arguments, engine_arguments, settle, start_engine

SITES = ["resid_post", "resid_mid"]
HOOKS = {"resid_post": "blocks.{}.hook_resid_post", "resid_mid": "blocks.{}.hook_resid_mid"}
ANSWER, FOIL = 11, 12


def pairs(tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts that differ in one token in the middle."""
    for seed in itertools.count():
        ids = np.random.default_rng(seed).integers(20, 1000, tokens).tolist()
        yield ids, [*ids[: tokens // 2], (ids[tokens // 2] + 1), *ids[tokens // 2 + 1 :]]


def swept(model: Any, clean: list[int], corrupt: list[int], layers: Any = "all") -> tuple[float, float]:
    """Cells a second, and the seconds until the first."""
    began = time.perf_counter()
    first, cells = 0.0, 0
    for cell in model.sweep(clean, corrupt, ANSWER, FOIL, sites=SITES, layers=layers, stream=True):
        assert cell.value is not None
        first = first or time.perf_counter() - began
        cells += 1
    return cells / (time.perf_counter() - began), first


def one_by_one(model: Any, clean: list[int], corrupt: list[int], layers: list[int]) -> float:
    """Cells a second, each in a call of its own."""
    from midstream import Patch

    run = model.record(clean, sites=SITES)
    cells = list(itertools.product(SITES, layers, range(len(clean))))
    began = time.perf_counter()
    for site, layer, position in cells:
        patch = Patch(site, layer=layer, position=position, source=run)
        model.generate(corrupt, plan=patch, answers=[ANSWER, FOIL], max_tokens=1)
    seconds = time.perf_counter() - began
    del model.runs[run.name]
    return len(cells) / seconds


def prefilled(model: Any, corrupt: list[int], cells: int) -> float:
    """Requests a second, each with another first token, so that they share no KV block."""
    prompts = [[20 + i % 2000, 20 + i // 2000, *corrupt[2:]] for i in range(cells)]
    began = time.perf_counter()
    model.generate(prompts, max_tokens=1, temperature=0.0)
    return cells / (time.perf_counter() - began)


# TransformerLens.


def lens(path: str, arguments: argparse.Namespace) -> Any:
    import torch
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_grad_enabled(False)
    if arguments.cpu:
        return TransformerBridge.boot_transformers(path, device="cpu", dtype=torch.float32)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        torch.set_default_dtype(torch.float32)
    return TransformerBridge.boot_transformers(path, hf_model=model.eval(), device="cuda", dtype=torch.bfloat16)


def graded(logits: Any) -> Any:
    return logits[:, -1, ANSWER] - logits[:, -1, FOIL]


def lens_one_by_one(model: Any, clean: list[int], corrupt: list[int], layers: int) -> float:
    """Cells a second of `generic_activation_patch`, at the first `layers` layers of one site."""
    import pandas
    import torch
    from transformer_lens import patching  # type: ignore[import-not-found]

    device = model.cfg.device
    cache = model.run_with_cache(torch.tensor([clean], device=device))[1]
    rows = pandas.DataFrame(list(itertools.product(range(layers), range(len(clean)))), columns=["layer", "pos"])
    began = time.perf_counter()
    patching.generic_activation_patch(
        model, torch.tensor([corrupt], device=device), cache, lambda logits: graded(logits)[0],
        patching.layer_pos_patch_setter, "resid_post", index_df=rows,
    )  # fmt: skip
    return len(rows) / (time.perf_counter() - began)


def lens_batched(model: Any, clean: list[int], corrupt: list[int], size: int, batches: int) -> float:
    """Cells a second in batches of `size` cells."""
    import torch

    device = model.cfg.device
    cache = model.run_with_cache(torch.tensor([clean], device=device))[1]
    cells = list(itertools.product(SITES, range(model.cfg.n_layers), range(len(clean))))
    tokens = torch.tensor([corrupt], device=device)
    done, began = 0, time.perf_counter()
    for start in range(0, size * batches, size):
        batch = [cells[i % len(cells)] for i in range(start, start + size)]
        hooks = []
        for site, layer in {cell[:2] for cell in batch}:
            where = torch.tensor(
                [(i, p) for i, (s, at, p) in enumerate(batch) if (s, at) == (site, layer)], device=device
            )
            name = HOOKS[site].format(layer)

            def write(value: Any, hook: Any, where: Any = where, name: str = name) -> Any:
                value = value.clone()
                value[where[:, 0], where[:, 1]] = cache[name][0, where[:, 1]]
                return value

            hooks.append((name, write))
        graded(model.run_with_hooks(tokens.expand(len(batch), -1), fwd_hooks=hooks)).float().cpu()
        done += len(batch)
    return done / (time.perf_counter() - began)


def largest_batch(model: Any, clean: list[int], corrupt: list[int], most: int) -> int:
    """The largest power of two that fits, up to `most`."""
    import torch

    size = most
    while True:
        try:
            lens_batched(model, clean, corrupt, size, 1)
            return size
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            size //= 2


# What the command prints.


def rounds_of(arguments: argparse.Namespace, runs: dict[str, Callable[[], Any]], found: dict[str, list[Any]]) -> None:
    """Run everything once without counting it, then in turns until the time is over."""
    limit = STARTED + arguments.seconds
    for number in range(arguments.rounds + 1):
        if number > 1 and time.monotonic() > limit:
            break
        for name, run in runs.items():
            result = run()
            if number:
                found.setdefault(name, []).append(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20, help="of each prompt")
    parser.add_argument(
        "--transformer-lens", action="store_true", help="also TransformerLens, which has to be installed"
    )
    parser.add_argument("--batch", type=int, default=256, help="the most cells in a batch of TransformerLens")
    add_arguments(parser)
    arguments = parser.parse_args()
    settle(arguments)
    prompts, found = pairs(arguments.tokens), dict[str, list[Any]]()
    path, _ = engine_arguments(arguments)
    with ExitStack() as stack:
        sizes: dict[str, Any] = {} if arguments.cpu else {"max_num_seqs": 1024}  # vLLM's default on such GPUs
        model = start_engine(arguments, stack, enable_prefix_caching=True, **sizes)
        cells = len(SITES) * model.num_layers * arguments.tokens
        runs: dict[str, Callable[[], Any]] = {
            "midstream": lambda: swept(model, *next(prompts)),
            "prefill limit": lambda: prefilled(model, next(prompts)[1], cells),
        }
        if arguments.cpu:
            import torch

            from midstream import LanguageModel

            hf = LanguageModel(path, dtype=torch.float32)
            some = [0, model.num_layers // 2]
            runs["LanguageModel, one by one"] = lambda: one_by_one(hf, *next(prompts), some)
            runs["LanguageModel, in batches"] = lambda: swept(hf, *next(prompts), layers=some)[0]
        runs_of_lens: dict[str, Callable[[], Any]] = {}
        if arguments.transformer_lens and arguments.cpu:
            runs |= lens_runs(path, arguments, prompts)
        elif arguments.transformer_lens:
            runs_of_lens = {"": lambda: None}
        rounds_of(arguments, runs, found)
    if runs_of_lens:
        gc.collect()
        rounds_of(arguments, lens_runs(path, arguments, prompts), found)
    model_name = "bundled model" if arguments.cpu else f"{arguments.shape} shape, {arguments.runner}"
    rates = {name: [each[0] if isinstance(each, tuple) else each for each in rounds] for name, rounds in found.items()}
    ours = rates["midstream"]
    packages = ["transformer_lens"] if arguments.transformer_lens else []
    results = Results(arguments, "sweeps", f"{arguments.tokens} tokens, {cells} cells", packages=packages)
    print(
        f"\n{results.machine}\n{model_name}; {arguments.tokens} tokens, {cells} cells in a sweep, {len(ours)} rounds\n\n"
        "| run | cells a second | midstream relative to it |\n|---|---|---|"
    )
    for name, rates_here in rates.items():
        pairs_of = min(len(ours), len(rates_here))
        relative = ratio(ours[:pairs_of], rates_here[:pairs_of])
        cells = [name, results.add(name, "speed", "cells/s", rates_here)]
        cells.append("" if name == "midstream" else results.add("midstream", "speed", f"of {name}", relative))
        print(f"| {' | '.join(cells)} |")
    firsts = [first for _, first in found["midstream"]]
    print(f"\nThe first cell came after {results.add('midstream', 'first cell', 'ms', 1e3 * np.array(firsts))} ms.")


def lens_runs(path: str, arguments: argparse.Namespace, prompts: Iterator[tuple[list[int], list[int]]]) -> Any:
    bridge = lens(path, arguments)
    size = largest_batch(bridge, *next(prompts), most=arguments.batch)
    return {
        "TransformerLens, cell by cell": lambda: lens_one_by_one(bridge, *next(prompts), layers=2),
        f"TransformerLens, {size} cells in a batch": lambda: lens_batched(bridge, *next(prompts), size, 4),
    }


if __name__ == "__main__":
    main()
