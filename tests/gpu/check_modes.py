"""vLLM's modes on a GPU: prints one line a check, and exits 1 on a failure. With `--json`, appends one line for each mode to a file.

python tests/gpu/check_modes.py --runner v2
python tests/gpu/check_modes.py --runner v2 --only awq gptq --json benchmarks/results/modes.jsonl
python tests/gpu/check_modes.py --cpu --eager

Tiny models with random weights. LoRA adapters and mixtures of experts are checked here against transformers with the adapter merged into
the weights, transformers with hooks on the routers, and vLLM's own report of the chosen experts (0.26 has none on V2). The other modes
are those of `tests/support/modes.py`, each in its own dtype. If an engine does not start, the
script prints the error, counts it as a failure and goes on with the next mode.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

# Transformers, which runs first, leaves threads behind that a forked process does not have.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

COUNT, ROUNDS = 12, 3  # requests at a time; in later rounds, steps replay graphs that were recorded in earlier ones
PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is"] * (COUNT // 2)
GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
LAYER = 1
CHOSEN = 2  # experts of a token


def close(actual: Any, expected: Any, limit: float = 1e-3) -> None:
    difference = float((actual.float().cpu() - expected).abs().max() / expected.abs().max())
    assert difference < limit, f"{difference:.2g}"


def run(model: Any, output: Any, hooks: list[Any]) -> None:
    """A forward of transformers on the tokens that the request has computed, with hooks: (module, function)."""
    import torch

    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def adapter_checks(directory: Path, engine: dict[str, Any]) -> tuple[Any, Any]:
    """Requests of two adapters and of none in one batch. vLLM's kernels for adapters take no float32 on a GPU."""
    import adapters
    import tiny_models
    import torch
    from vllm.lora.request import LoRARequest

    from midstream import VLLM, Capture, Steer

    base = tiny_models.build("llama", directory)
    paths = [adapters.write(base, directory / name, seed) for name, seed in (("red", 1), ("blue", 2))]
    merged = [adapters.merged(base, path) for path in (None, *paths)]
    requests = [None, *(LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1))]
    dtype, limit = ("float16", 5e-2) if torch.cuda.is_available() else ("float32", 1e-3)
    engine = {**engine, "dtype": dtype, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    model = VLLM(str(base), **engine)
    vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(0)) * 3
    capture = [Capture(site, layers=LAYER + 1, positions="all") for site in ("attn_z", "mlp_act", "resid_post")]
    steered = [Steer("resid_post", layers=LAYER, vector=vector), *capture]

    def compare(oracle: Any, output: Any, is_steered: bool) -> None:
        layer, found = oracle.model.layers[LAYER + 1], {}

        def steer(_: Any, args: Any, out: Any) -> Any:
            if is_steered:
                first(out).add_(vector)

        hooks = [
            (oracle.model.layers[LAYER], steer),
            (layer.self_attn.o_proj, lambda _, args, out: found.update(attn_z=args[0][0].clone())),
            (layer.mlp.down_proj, lambda _, args, out: found.update(mlp_act=args[0][0].clone())),
            (layer, lambda _, args, out: found.update(resid_post=first(out)[0].clone())),
        ]
        run(oracle, output, hooks)
        for site, expected in found.items():
            close(output.captures[site, LAYER + 1], expected, limit)

    def checked(plans: list[Any]) -> None:
        for _ in range(ROUNDS):
            outputs = model.generate(
                PROMPTS, plan=plans, lora_request=[requests[i % 3] for i in range(COUNT)], **GREEDY
            )
            for i, output in enumerate(outputs):
                if plans[i] is not None:
                    compare(merged[i % 3], output, plans[i] is steered)

    return model, SimpleNamespace(
        check_captures_of_mixed_adapters=lambda: checked([capture] * COUNT),
        check_plans_of_mixed_adapters=lambda: checked([[steered, capture, None][i // 3 % 3] for i in range(COUNT)]),
    )


def mixture_checks(directory: Path, engine: dict[str, Any], runner: str) -> tuple[Any, Any]:
    """A router's logits, and an expert that is taken away."""
    import tiny_models
    import torch
    import vllm
    from packaging.version import Version
    from transformers import AutoModelForCausalLM

    from midstream import VLLM, Capture, Steer

    path = tiny_models.build("mixtral", directory)
    oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    reports = runner == "v2" and torch.cuda.is_available() and Version(vllm.__version__) >= Version("0.32")
    model = VLLM(str(path), **engine, enable_return_routed_experts=reports)
    layers, off = range(model.num_layers), torch.tensor([0.0, -1e4, 0.0, 0.0])

    def compare(output: Any, is_steered: bool) -> None:
        logits: list[Any] = []

        def route(_: Any, args: Any, out: Any) -> Any:
            logits.append(out[0] + off if is_steered else out[0].clone())
            weights, experts = logits[-1].softmax(-1).topk(CHOSEN, dim=-1)
            return logits[-1], weights / weights.sum(-1, keepdim=True), experts

        run(oracle, output, [(layer.mlp.gate, route) for layer in oracle.model.layers])
        for i in layers:
            # Without the expert that is off: -1e4 would hide differences of the others.
            kept = [0, 2, 3] if is_steered else slice(None)
            found = output.captures["router", i, "after"].float()
            close(found[:, kept], logits[i][:, kept])
            if reports:
                chosen = found.topk(CHOSEN).indices.sort(-1).values
                report = torch.as_tensor(output.outputs[0].routed_experts)[: len(chosen), i].sort(-1).values.long()
                assert torch.equal(chosen[: len(report)], report) and len(report) > 0
                assert not (is_steered and (report == 1).any())

    def checked(plans: list[Any]) -> None:
        for _ in range(ROUNDS):
            outputs = model.generate(PROMPTS, plan=plans, **GREEDY)
            for plan, output in zip(plans, outputs, strict=True):
                if plan is not None:
                    compare(output, len(plan) > 1)

    capture = Capture("router", positions="all", when="after")
    return model, SimpleNamespace(
        check_routers=lambda: checked([[capture]] * COUNT),
        check_an_expert_taken_away=lambda: checked(
            [[[Steer("router", vector=off), capture], [capture], None][i % 3] for i in range(COUNT)]
        ),
    )


def table_checks(mode: Any, directory: Path, engine: dict[str, Any]) -> tuple[Any, Any]:
    """A mode of the table."""
    import mode_checks

    from midstream import VLLM

    options, oracle = mode_checks.build(mode, directory)
    model = VLLM(**{**engine, "dtype": mode.dtype, **options})
    return model, getattr(mode_checks, mode.checks)(mode, model, oracle)


def main() -> int:
    from modes import MODES

    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", metavar="PART", help="the modes with one of these parts in their names")
    parser.add_argument("--json", type=Path, help="the file to which results are appended")
    parser.set_defaults(float32=True)
    arguments = parsed(parser)
    engine = {**engine_arguments(arguments), "max_model_len": 256}
    makers: dict[str, Callable[..., tuple[Any, Any]]] = {
        "LoRA": adapter_checks,
        "mixtures of experts": partial(mixture_checks, runner=arguments.runner),
    }
    makers |= {mode.name: partial(table_checks, mode.here(arguments.cpu)) for mode in MODES if mode.checks}
    lacking = {mode.name for mode in MODES if mode.cpu == "no"}
    failed = 0
    for name, make in makers.items():
        if arguments.only and not any(part.lower() in name.lower() for part in arguments.only):
            continue
        if arguments.cpu and name in lacking:
            continue
        found = checked(name, make, engine, arguments)
        failed += found != "passed"
        if arguments.json is not None:
            note(arguments, name, found)
    return failed


def checked(name: str, make: Callable[..., tuple[Any, Any]], engine: dict[str, Any], arguments: Any) -> str:
    """Run the checks of a mode, and return "passed", or what failed."""
    from forked import forked

    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as directory, forked() if arguments.cpu else contextlib.nullcontext():
            model, checks = make(Path(directory), engine)
            with model:
                failed = run_checks(checks, f"{arguments.runner} {name}")
        return f"{failed} checks failed" if failed else "passed"
    except Exception as error:
        print(f"FAILED  {arguments.runner} {name}: no engine\n{traceback.format_exc()}", flush=True)
        return f"no engine: {str(error).strip().splitlines()[0][:200]}"
    finally:
        print(f"        {arguments.runner} {name}: {time.monotonic() - began:.0f} s", flush=True)


def note(arguments: Any, name: str, found: str) -> None:
    import torch
    import vllm

    device = "CPU" if arguments.cpu else torch.cuda.get_device_name()
    how = {"runner": arguments.runner, "graphs": not arguments.eager, "device": device, "vllm": vllm.__version__}
    line = {"date": datetime.date.today().isoformat(), "mode": name, **how, "result": found}
    with arguments.json.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(bool(main()))
