"""Compares vLLM with transformers, site by site and edit by edit, and prints the largest relative differences.

    midstream compare                              # the bundled model
    midstream compare MODEL MODEL --layers 0 10 20
    midstream compare MODEL --model-impl transformers --markdown

A difference is `max|vllm - transformers| / max|transformers|`, the largest of all layers and prompts. Every accessor is
read in a trace of its own, with all prompts in one batch. Every edit is compared by its effect on the logits, and on the
residual stream downstream of it. The table says which sites a side lacks, and marks edits that have no effect.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from midstream.arch.aliases import Rename
from midstream.bundled import demo_model
from midstream.client.trace_model import TraceModel
from midstream.errors import ArchitectureError, InterventionErrorGroup, MidstreamError, UnknownSiteError
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.body import save

PROMPTS = (
    "The Eiffel Tower is in the city of",
    "The capital of France is",
    "When Mary and John went to the store, John gave a drink to",
)
NO_EFFECT = 1e-3  # an edit whose relative change of the logits is smaller has no effect
COLUMNS = 5  # how many models a printed table has side by side

PER_LAYER = (
    "layers_input",
    "layers_output",
    "attentions_input",
    "attentions_output",
    "mlps_input",
    "mlps_output",
) + tuple(site for site in LAYER_SITES if site not in ACCESSORS.values())
PROBABILITIES = "attention_probabilities"
ONCE = ("token_embeddings", "final_norm", "logits", "next_token_probs")
LENS = "project_on_vocab"
Values = dict[str, torch.Tensor]  # by where it was read: `layers_output[3]`


# The reads. These functions run in the body of a trace.


def read_layers(name: str, layers: Sequence[int], model: Any) -> Values:
    """The accessor's value at each of `layers` that has the site."""
    values = {}
    for layer in layers:
        try:
            values[f"{name}[{layer}]"] = save(getattr(model, name)[layer])
        except (UnknownSiteError, ArchitectureError) as error:
            lacking = error
    if not values:
        raise lacking
    return values


def read_once(name: str, layers: Sequence[int], model: Any) -> Values:
    return {name: save(getattr(model, name))}


def read_lens(layers: Sequence[int], model: Any) -> Values:
    """The logit lens: the next-token logits of the last token at each layer."""
    return {f"{LENS}[{i}]": model.project_on_vocab(model.layers_output[i][-1:]) for i in layers}


READS: dict[str, Callable[[Sequence[int], Any], Values]] = {
    **{name: partial(read_layers, name) for name in (*PER_LAYER, PROBABILITIES)},
    **{name: partial(read_once, name) for name in ONCE},
    LENS: read_lens,
}


# The edits. `donor` is the first prompt's residual stream after the layer, at its last token.


def _steer(model: Any, layer: int, donor: torch.Tensor) -> None:
    size = float(donor.float().std())
    direction = torch.linspace(-1, 1, model.hidden_size).roll(layer)
    model.steer(layer, direction, factor=size)


def _skip(model: Any, layer: int, donor: torch.Tensor) -> None:
    model.skip_layers(layer)


def _patch(model: Any, layer: int, donor: torch.Tensor) -> None:
    model.layers_output[layer][-1] = donor


def _ablate_head(model: Any, layer: int, donor: torch.Tensor) -> None:
    model.attn_z[layer][:, 0] = 0


def _ablate_neurons(model: Any, layer: int, donor: torch.Tensor) -> None:
    model.mlp_act[layer][:, ::2] = 0


def _ablate_experts(model: Any, layer: int, donor: torch.Tensor) -> None:
    model.router[layer][:, ::2] = -1e4


def _zero(accessor: str, model: Any, layer: int, donor: torch.Tensor) -> None:
    site = getattr(model, accessor)
    site[layer] = torch.zeros_like(site[layer])


def _replace(accessor: str, model: Any, layer: int, donor: torch.Tensor) -> None:
    """Reverse the order of the rows. A row at a wrong position then shows as a difference."""
    site = getattr(model, accessor)
    site[layer] = site[layer].flip(0)


def _replace_once(accessor: str, model: Any, layer: int, donor: torch.Tensor) -> None:
    setattr(model, accessor, getattr(model, accessor).flip(0))


@dataclass(frozen=True)
class ComparedEdit:
    """An edit at one layer. `stream`: whether the residual stream can be read downstream of it."""

    apply: Callable[[Any, int, torch.Tensor], None]
    per_layer: bool = True
    stream: bool = True


EDITS = {
    "steer": ComparedEdit(_steer),
    "skip_layers": ComparedEdit(_skip),
    "patch": ComparedEdit(_patch),
    "ablate head": ComparedEdit(_ablate_head),
    "ablate neurons": ComparedEdit(_ablate_neurons),
    "ablate experts": ComparedEdit(_ablate_experts),
    "zero layers_output": ComparedEdit(partial(_zero, "layers_output")),
    "zero attentions_output": ComparedEdit(partial(_zero, "attentions_output")),
    "zero mlps_output": ComparedEdit(partial(_zero, "mlps_output")),
    "replace layers_input": ComparedEdit(partial(_replace, "layers_input")),
    "replace attentions_input": ComparedEdit(partial(_replace, "attentions_input")),
    "replace mlps_input": ComparedEdit(partial(_replace, "mlps_input")),
    "replace resid_mid": ComparedEdit(partial(_replace, "resid_mid")),
    "replace token_embeddings": ComparedEdit(partial(_replace_once, "token_embeddings"), per_layer=False),
    "replace final_norm": ComparedEdit(partial(_replace_once, "final_norm"), per_layer=False, stream=False),
}


ENTRIES = (*READS, *EDITS)


def run_edit(edit: ComparedEdit, at: int, layers: Sequence[int], donor: torch.Tensor, model: Any) -> Values:
    """The residual stream downstream of the edit, and the logits."""
    edit.apply(model, at, donor)
    downstream = [i for i in layers if i >= at] if edit.stream else []
    return {**{f"layers_output[{i}]": save(model.layers_output[i]) for i in downstream}, "logits": save(model.logits)}


def read_state(layer: int, model: Any) -> torch.Tensor:
    return model.layers_output[layer][-1]


# Both sides.


@dataclass
class Side:
    """One backend's results by accessor or edit: the values of each prompt, or why there are none."""

    values: dict[str, list[Values]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, fn: Callable[[], list[Values]]) -> None:
        try:
            self.values[name] = fn()
        except MidstreamError as error:
            first = _first_of(error)
            reasons = self.missing if isinstance(first, (UnknownSiteError, ArchitectureError)) else self.failed
            reasons[name] = str(first).splitlines()[0]


def _first_of(error: BaseException) -> BaseException:
    return error.exceptions[0] if isinstance(error, InterventionErrorGroup) else error


def collect(model: TraceModel, prompts: Sequence[str], layers: Sequence[int], names: Sequence[str] = ENTRIES) -> Side:
    """Run accessors and edits on one backend.

    Args:
        layers: the layers to read. Edits are made at the first and the middle one.
        names: the accessors and edits.
    """
    side, texts = Side(), list(prompts)
    spots = sorted({layers[0], layers[len(layers) // 2]})
    donors: dict[int, torch.Tensor] = {}
    for name in names:
        if name in EDITS:
            edit = EDITS[name]
            donors = donors or {at: model.run(partial(read_state, at), texts[0]) for at in spots}
            at = spots if edit.per_layer else [layers[0]]
            side.take(name, partial(_run_edits, model, edit, at, layers, donors, texts))
        else:
            side.take(name, partial(model.run, partial(READS[name], layers), texts))
    return side


def _run_edits(
    model: TraceModel,
    edit: ComparedEdit,
    spots: Sequence[int],
    layers: Sequence[int],
    donors: dict[int, torch.Tensor],
    texts: list[str],
) -> list[Values]:
    """Each prompt's values under the edit at each of `spots` whose layer has the site. Raises UnknownSiteError if no layer has it."""
    found: list[Values] = [{} for _ in texts]
    lacking: MidstreamError | None = None
    for at in spots:
        try:
            edited = model.run(partial(run_edit, edit, at, layers, donors[at]), texts)
        except MidstreamError as error:
            if not isinstance(_first_of(error), UnknownSiteError):
                raise
            lacking = error
            continue
        for values, more in zip(found, edited, strict=True):
            values |= {f"{name} with the edit at {at}": value for name, value in more.items()}
    if lacking is not None and not any(found):
        raise lacking
    return found


@dataclass(frozen=True)
class RelativeDifference:
    """The difference between the two sides.

    Attributes:
        value: the largest relative difference; None if there is nothing to compare.
        where: the value and the prompt that have it.
        note: why there is no value, in a few words: "lacking", "vLLM only", "failed" ...
        reason: the full reason.
        effect: for an edit, the largest relative change of a prompt's logits on transformers.
    """

    value: float | None
    where: str = ""
    note: str = ""
    reason: str = ""
    effect: float | None = None

    def __str__(self) -> str:
        return self.note if self.value is None else f"{self.value:.1e}{self.note and f' ({self.note})'}"


@dataclass(frozen=True)
class Comparison:
    """One model on both backends."""

    name: str
    architecture: str
    route: str
    sites: tuple[str, ...]
    differences: dict[str, RelativeDifference]

    def largest(self, names: Sequence[str] = ENTRIES) -> RelativeDifference:
        """The largest of the differences at `names`."""
        found = [d for n, d in self.differences.items() if n in names and d.value is not None]
        return max(found, key=lambda d: d.value if d.value is not None else 0.0)


def differences(vllm: Side, reference: Side) -> dict[str, RelativeDifference]:
    """Each accessor's and edit's difference."""
    return {name: difference(name, vllm, reference) for name in ENTRIES}


def difference(name: str, vllm: Side, reference: Side) -> RelativeDifference:
    """The difference of one accessor or edit."""
    for side, label in ((vllm, "vLLM"), (reference, "transformers")):
        if name in side.failed:
            return RelativeDifference(None, note=f"failed on {label}", reason=side.failed[name])
    if name in vllm.missing or name in reference.missing:
        both = name in vllm.missing and name in reference.missing
        note = "lacking" if both else "transformers only" if name in vllm.missing else "vLLM only"
        return RelativeDifference(None, note=note, reason=vllm.missing.get(name) or reference.missing[name])
    pairs = list(zip(vllm.values[name], reference.values[name], strict=True))
    if any(a.keys() != b.keys() for a, b in pairs):
        return RelativeDifference(
            None, note="other layers", reason=f"vLLM: {list(pairs[0][0])}, transformers: {list(pairs[0][1])}"
        )
    each = {f"{key}, prompt {n}": relative(a[key], b[key]) for n, (a, b) in enumerate(pairs) for key in b}
    where = max(each, key=lambda key: each[key])
    if name not in EDITS:
        return RelativeDifference(each[where], where)
    plain = [values["logits"] for values in reference.values["logits"]]
    effects = [
        relative(b[key], p) for p, (_, b) in zip(plain, pairs, strict=True) for key in b if key.startswith("logits")
    ]
    effect = max(effects)
    return RelativeDifference(each[where], where, "no effect" if effect < NO_EFFECT else "", effect=effect)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """`max|a - b| / max|b|`; infinite if shapes differ or a value is NaN."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    value = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
    return value if value == value else float("inf")


def compare(
    model: str,
    *,
    name: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    rename: Rename | None = None,
    **engine: Any,
) -> Comparison:
    """Run `model` on transformers, then on vLLM, and compare.

    Args:
        model: a path or name that both can load.
        name: the model's name in the result; the last part of `model` if None.
        layers: the layers to read; all if None.
        engine: arguments of the vLLM engine.
    """
    from midstream.transformers.language_model import LanguageModel
    from midstream.vllm.vllm_model import VLLM

    device = "cuda" if torch.cuda.is_available() else None
    hf = LanguageModel(model, rename=rename, device=device, dtype=getattr(torch, dtype))
    chosen = sorted(layer % hf.num_layers for layer in layers) if layers else list(range(hf.num_layers))
    architecture = type(hf.module).__name__
    with torch.no_grad():
        reference = collect(hf, prompts, chosen)
    del hf
    gc.collect()
    torch.cuda.empty_cache()
    with VLLM(
        model, rename=rename, dtype=dtype, **{"enforce_eager": True, "gpu_memory_utilization": 0.2, **engine}
    ) as served:
        found = collect(served, prompts, chosen)
        described = served.description
    route = "Transformers backend" if described["modules"][""].startswith("Transformers") else "native"
    called = name or os.path.basename(os.path.normpath(model))
    return Comparison(called, architecture, route, tuple(described["sites"]), differences(found, reference))


# Printing.


def text_table(rows: Sequence[Comparison]) -> str:
    """Tables with a row for each accessor and edit, and a column for each of up to `COLUMNS` models."""
    first = max(map(len, ENTRIES))
    parts = []
    for start in range(0, len(rows), COLUMNS):
        some = rows[start : start + COLUMNS]
        width = max(18, *(len(row.name) for row in some))
        lines = [" " * first + "".join(f"  {row.name:>{width}}" for row in some)]
        lines.append(" " * first + "".join(f"  {row.route:>{width}}" for row in some))
        for entry in ENTRIES:
            lines.append(f"{entry:<{first}}" + "".join(f"  {row.differences[entry]!s:>{width}}" for row in some))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def markdown_table(rows: Sequence[Comparison], entries: Sequence[str]) -> str:
    """A table with a row for each model, and a column for each of `entries`."""
    lines = ["| model | " + " | ".join(entries) + " |", "|---" * (len(entries) + 1) + "|"]
    lines += [f"| {row.name} | " + " | ".join(str(row.differences[e]) for e in entries) + " |" for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a difference is above `--tolerance`, or if something failed."""
    parser = argparse.ArgumentParser(prog="midstream compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="paths or names; the bundled model if none is given")
    parser.add_argument("--layers", nargs="+", type=int, help="layers to read and edit; all if not given")
    parser.add_argument("--prompt", action="append", dest="prompts", help="a prompt; may be given several times")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--model-impl", default="auto", help="vLLM's own model, or its Transformers backend: auto, vllm, transformers"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an engine in this process starts in seconds
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    passed = ["model_impl", "gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size"]
    engine = {**{name: getattr(args, name) for name in passed}, "max_num_seqs": 16}
    rows = []
    for model in args.models or [demo_model()]:
        print(f"comparing {model} ...", file=sys.stderr)
        rows.append(compare(model, prompts=args.prompts or PROMPTS, layers=args.layers, dtype=args.dtype, **engine))
    if args.markdown:
        print(markdown_table(rows, tuple(READS)), markdown_table(rows, tuple(EDITS)), sep="\n\n")
    else:
        print("Largest difference, relative to the largest value, of vLLM from transformers", f"({args.dtype}):\n")
        print(text_table(rows))
    found = [each for row in rows for each in row.differences.values()]
    return int(any(d.note.startswith("failed") or (d.value or 0) > args.tolerance for d in found))
