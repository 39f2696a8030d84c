"""Runs tiny architectures on plain transformers, `LanguageModel` and vLLM, one engine after another in one process.

    python tests/support/compare_runs.py CACHE_DIRECTORY RESULTS.pt NAME [NAME ...]

`test_compare.py` starts it once for all the architectures that were asked for and judges the results. The engines run
in the process itself (VLLM_ENABLE_V1_MULTIPROCESSING=0): seconds each; in processes of its own each takes a minute.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_models
import torch
from engines import left
from transformers import AutoModelForCausalLM

from midstream import VLLM, Capture, LanguageModel, Steer
from midstream.client import described
from midstream.commands import compare
from midstream.sites import ACCESSORS, LAYER_SITES

PROMPTS = ["The river runs from the mountains to the sea", "The capital of France is"]
# Clean, corrupt, and the tokens of answer and foil.
SWEPT = ("from the mountains to the sea", "from the sea to the mountains", 11, 12)
AT = tiny_models.LAYERS // 2  # the layer that is edited; `compare.collect` edits it too
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.2,
}
NAMES = {site: name for name, site in ACCESSORS.items()}


class Plain:
    """The oracle: transformers, one prompt at a time without padding, edited by torch's own hooks on its layers."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == tiny_models.LAYERS]
        self.layers = lists[0]

    @torch.no_grad()
    def __call__(self, prompt: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The last token's logits `[1, vocab]`, and the stream that enters each layer, `[tokens, hidden]`."""
        ids = tiny_models.tokenizer()(prompt, return_tensors="pt")["input_ids"]
        entered: list[torch.Tensor] = []

        def see(_: Any, args: Any, kwargs: Any) -> None:
            entered.append((args[0] if args else kwargs["hidden_states"])[0].clone())

        handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in self.layers]
        logits = self.model(ids, use_cache=False).logits[:, -1]
        for handle in handles:
            handle.remove()
        return logits, entered

    @contextlib.contextmanager
    def edited(self, edit: Any, at: int = AT, *, entering: bool = False) -> Iterator[None]:
        """`edit` maps what leaves layer `at`, or enters it, `[1, tokens, hidden]`, to what goes on instead."""

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (edit(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": edit(kwargs["hidden_states"])}

        def after(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
            entered = args[0] if args else kwargs["hidden_states"]
            left = output[0] if isinstance(output, tuple) else output
            new = edit(left, entered)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        layer = self.layers[at]
        register = layer.register_forward_pre_hook if entering else layer.register_forward_hook
        handle = register(before if entering else after, with_kwargs=True)
        yield
        handle.remove()


def plain_sweep(plain: Plain) -> torch.Tensor:
    """`[layers, tokens]`, the logit difference of SWEPT with one layer's output patched at one token. The last layer is left out."""
    clean, corrupt, answer, foil = SWEPT
    _, entered = plain(clean)

    def cell(at: int, token: int) -> float:
        def patched(left: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            left = left.clone()
            left[:, token] = entered[at + 1][token]
            return left

        with plain.edited(patched, at):
            (logits,) = plain(corrupt)[0]
        return float(logits[answer] - logits[foil])

    return torch.tensor([[cell(at, token) for token in range(len(entered[0]))] for at in range(tiny_models.LAYERS - 1)])


def plain_values(path: Path) -> dict[str, Any]:
    """By the name of a reading or an edit: for each prompt, what plain transformers gives."""
    plain = Plain(path)
    clean = [plain(prompt) for prompt in PROMPTS]
    donor = clean[0][1][AT + 1][-1]  # the first prompt's last token behind layer AT

    def patched(left: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        left = left.clone()
        left[:, -1] = donor
        return left

    def steered(left: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        return left + donor.std() * torch.linspace(-1, 1, left.shape[-1]).roll(AT)

    values: dict[str, Any] = {"clean": clean, "sweep": plain_sweep(plain)}
    for name, edit in {
        "zero layers_output": lambda left, entered: torch.zeros_like(left),
        "skip_layers": lambda left, entered: entered,
        "steer": steered,
        "patch": patched,
    }.items():
        with plain.edited(edit):
            values[name] = [plain(prompt) for prompt in PROMPTS]
    with plain.edited(lambda entering: entering.flip(1), entering=True):
        values["replace layers_input"] = [plain(prompt) for prompt in PROMPTS]
    return values


def read_neighbours(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What leaves each layer, and what enters the next one."""
    pairs = []
    for i in range(model.num_layers - 1):
        left = model.layers_output[i]
        pairs.append((left, model.layers_input[i + 1]))
    return pairs


def written_value(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def set_and_read(model: VLLM, site: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each prompt: what another program reads of the site after one has written it, and what was written."""
    name, at = NAMES.get(site, site), AT

    def read(running: Any) -> torch.Tensor:
        return getattr(running, name)[at] if site in LAYER_SITES else getattr(running, name)

    values = [written_value(value.shape) for value in model.run(read, PROMPTS)]
    by_length = {len(value): value for value in values}
    with model.edit("write", inplace=True):
        if site in LAYER_SITES:
            accessor = getattr(model, name)
            accessor[at] = by_length[len(accessor[at])]
        else:
            setattr(model, name, by_length[len(getattr(model, name))])
    try:
        return list(zip(model.run(read, PROMPTS), values, strict=True))
    finally:
        model.clear_edits()


def sites_at(model: VLLM) -> list[str]:
    """The sites that layer AT has, and those that the model has once. A mixture may have layers without experts."""
    return [s for s in model.description["sites"] if s not in LAYER_SITES or (s, AT) in model.facts.widths]


def with_plans(model: Any, sites: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    """By site: for each prompt, what a plan captures of it, and the last layer's output where a plan steers it in one layer."""
    found = {}
    for site in (site for site in sites if site in LAYER_SITES):
        (row,) = model.generate(PROMPTS[:1], plan=[Capture(site, layers=[AT])], max_tokens=1)[0].captures.values()
        vector = written_value(row.shape[-1:]) * row.std().cpu()
        steered = [Steer(site, layers=[AT], vector=vector), Capture("resid_post", layers=[tiny_models.LAYERS - 1])]
        plans = ([Capture(site, positions="all_prompt")], steered)
        outputs = [o for plan in plans for o in model.generate(PROMPTS, plan=plan, max_tokens=1, temperature=0.0)]
        found[site] = [value.cpu() for output in outputs for _, value in sorted(output.captures.items())]
    return found


ONE_SIDED = ("attn_q", "attn_k", "attn_v", "attention_probabilities")  # some architectures have these on one side alone


def disagreements(path: Path, rtol: float, **engine: Any) -> dict[str, Any]:
    """Of an engine from transformers: what differs by more than `rtol` of the largest value, or cannot be had."""
    hf = LanguageModel(str(path), dtype=torch.float32, attn_implementation="eager")
    with VLLM(str(path), **engine) as model:
        sites, layers = sites_at(model), range(tiny_models.LAYERS)
        sites = [site for site in sites if site not in ONE_SIDED or (site, AT) in hf.facts.widths]
        with torch.no_grad():
            reference, planned = compare.collect(hf, PROMPTS, layers), with_plans(hf, sites)
        found, on_engine = compare.collect(model, PROMPTS, layers), with_plans(model, sites)
        written = {site: set_and_read(model, site) for site in sites}
    wrong: dict[str, Any] = {}
    for entry, difference in compare.differences(found, reference).items():
        if entry in ONE_SIDED and difference.note in ("vLLM only", "transformers only"):
            continue  # `engine/test_compare.py` says which architectures have them where
        if difference.note not in ("", "lacking") or (difference.value or 0) > rtol:
            wrong[entry] = (difference.value, difference.where, difference.note, difference.reason)
    for site, values in planned.items():
        apart = [compare.relative(ours, theirs) for ours, theirs in zip(on_engine[site], values, strict=True)]
        if not all(each <= rtol for each in apart):
            wrong[f"plans at {site}"] = apart
    for site, pairs in written.items():
        if not all(compare.relative(value, given) <= rtol for value, given in pairs):
            wrong[f"what was written to {site}"] = pairs
    return wrong


def write_middle(model: Any) -> tuple[torch.Tensor, ...]:
    value = written_value(model.resid_mid[AT].shape) * model.resid_mid[AT].std()
    model.resid_mid[AT] = value
    return value, model.mlps_output[AT], model.layers_output[AT]


def edit_first_only(model: VLLM) -> list[torch.Tensor]:
    """The second prompt's logits, alone in the batch in being left alone."""
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.layers_output[AT] = torch.zeros_like(model.layers_output[AT])
        with tracer.invoke(PROMPTS[1]):
            logits = model.logits.save()
    return logits


def by_modules(model: VLLM, directory: Path) -> dict[str, list[Any]]:
    """For each module input or output that is a site's value: what traces read there, without and with a write, and the logits.

    Twice, each with the number of steps that the traces stopped: as such traces run by themselves, and with all of them in the forward.
    """
    names = [f"{path}.{kind}" for (path, kind), (_, layer) in model._known.arch.values.items() if layer == AT]
    lines = []
    for number, name in enumerate(names):
        value = re.sub(r"\.(\d+)", r"[\1]", f"model.{name}")
        lines += [f"def read_{number}(model):", f"    return {value}.clone(), model.logits"]
        lines += [
            f"def write_{number}(model, v):",
            f"    h = {value}",
            "    h += v",
            "    return h.clone(), model.logits",
        ]
    path = Path(tempfile.mkdtemp(dir=directory)) / "by_modules.py"  # source is kept by the file's name
    path.write_text("\n".join(lines))
    functions: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), functions)
    found = {}
    for number, name in enumerate(names):
        read, write = functions[f"read_{number}"], functions[f"write_{number}"]
        runs = []
        for place in (contextlib.nullcontext(), mock.patch.object(described, "lower_trace", lambda *_: None)):
            before = model.gauges()[0]["forward_traced_steps"]
            with place:
                values = [model.run(read, PROMPTS)]
                write.__defaults__ = (0.1 * torch.linspace(-1, 1, values[0][0][0].shape[-1]),)
                values.append(model.run(write, PROMPTS))
            runs.append((values, model.gauges()[0]["forward_traced_steps"] - before))
        found[name] = runs
    return found


def settled_gauges(model: VLLM) -> dict[str, int]:
    """What is alive in the worker; a result counts as queued until a moment after the client has it."""
    for _ in range(100):
        gauges = left(model.gauges()[0])
        if not gauges:
            break
        time.sleep(0.05)
    return gauges


def on_vllm(model: VLLM, directory: Path) -> dict[str, Any]:
    """What only the engine can be asked."""
    before = model.gauges()[0]["traced_steps"]
    neighbours = model.run(read_neighbours, PROMPTS)
    steps = model.gauges()[0]["traced_steps"] - before
    sites = model.description["sites"]
    return {
        "root": model.description["modules"][""],
        "sites": sites,
        "steps": steps,
        "continuous": [torch.equal(a, b) for prompt in neighbours for a, b in prompt],
        "set": {site: set_and_read(model, site) for site in sites_at(model)},
        "middle": model.run(write_middle, PROMPTS) if "resid_mid" in sites else [],
        "bystander": edit_first_only(model),
        "modules": by_modules(model, directory),
        "sweep": torch.from_numpy(model.sweep(*SWEPT, layers=range(tiny_models.LAYERS - 1)).values["resid_post"]),
        "gauges": settled_gauges(model),
    }


def run(name: str, cache: Path) -> dict[str, Any]:
    """Everything about one architecture."""
    architecture = tiny_models.ARCHITECTURES[name]
    path = tiny_models.build(name, cache)
    plain = plain_values(path)
    hf = LanguageModel(str(path), dtype=torch.float32, attn_implementation="eager")
    layers = range(tiny_models.LAYERS)
    with torch.no_grad():
        reference = compare.collect(hf, PROMPTS, layers)
    del hf
    with VLLM(str(path), **{**ENGINE, **architecture.engine}) as model:
        found = compare.collect(model, PROMPTS, layers)
        own = on_vllm(model, cache)
    return {"plain": plain, "values": found.values, "differences": compare.differences(found, reference), **own}


def run_unsupported(name: str, cache: Path) -> dict[str, Any]:
    """What vLLM says to an architecture that it cannot run, natively and through transformers."""
    path = tiny_models.build(name, cache)
    said = []
    for impl in ("auto", "transformers"):
        try:
            VLLM(str(path), **ENGINE, model_impl=impl).close()
        except Exception as error:
            said.append(str(error))
    return {"said": said}


def run_command(path: Path) -> dict[str, Any]:
    """The command on one model."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = compare.main([str(path), "--layers", "1", "-1", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]])
    return {"code": code, "printed": printed.getvalue()}


def main() -> None:
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda fn: fn()  # vLLM looks at every model class in a process of its own: 10 s each
    cache, results = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    for name in sys.argv[3:]:
        start = time.time()
        job = partial(run_unsupported, name) if name in tiny_models.UNSUPPORTED_ON_CPU else partial(run, name)
        try:
            found[name] = run_command(tiny_models.build("llama", cache)) if name == "command" else job(cache)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        tiny_models.restore_transformers()
        gc.collect()
        print(f"{name}: {time.time() - start:.1f} s{' FAILED' if 'error' in found[name] else ''}", flush=True)
        torch.save(found, results)


if __name__ == "__main__":
    main()
