"""`./demo`: what midstream does, in a minute, on the bundled model and a real vLLM engine.

It shows reads, a logit lens, an ablation, a steering vector and an activation patch as traces, and a probe, a steering
vector, an ablation and a sweep of patches as plans, each with its code. Then it compares values from vLLM and transformers, and fails
if they differ by more than float32 rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from midstream import VLLM, LanguageModel

EIFFEL = "The Eiffel Tower is in the city of"
FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
PROMPTS = (EIFFEL, FRANCE, "When Mary and John went to the store, John gave a drink to")
LARGEST_DIFFERENCE = 1e-4  # relative, float32
COMPARED = (
    "token_embeddings", "layers_input", "attentions_input", "attn_z", "attentions_output", "mlps_input", "mlps_output",
    "layers_output", "logits",
)  # fmt: skip

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process starts in seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "GLOO_LOG_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


# Printing.


def colour(code: int, text: str) -> str:
    """`text` in an ANSI colour, if stdout is a terminal."""
    return f"\033[{code}m{text}\033[0m" if is_coloured() else text


def is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def heading(number: int, title: str, *lines: str) -> None:
    print(f"\n{colour(1, f'{number}. {title}')}")
    code(*lines)


def code(*lines: str) -> None:
    for line in lines:
        print(colour(36, f"     {line}"))


def good(text: str) -> str:
    return colour(32, text)


def bad(text: str) -> str:
    return colour(31, text)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show progress: a line at the start, and one with the time at the end."""
    start = time.monotonic()
    print(f"  {text} ...", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"  {text}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


# Traces. The functions passed to `model.run` run inside the forward pass.


def read(model: VLLM) -> None:
    heading(
        1,
        f"Read: {EIFFEL!r}",
        "with model.trace(prompt):",
        "    h = model.layers_output[3].save()",
    )
    from midstream import save

    with model.trace(EIFFEL):
        embedded = model.token_embeddings.save()
        streams, attentions, mlps = save([]), save([]), save([])
        for layer in range(model.num_layers):
            attentions.append(model.attentions_output[layer].clone())
            mlps.append(model.mlps_output[layer].clone())
            streams.append(model.layers_output[layer].clone())
        logits = model.logits.save()
    print(f"   token_embeddings {list(embedded.shape)}, logits {list(logits.shape)}; norms at the last token:")
    print("   layer   layers_output        attentions_output    mlps_output")
    for layer in (0, 3, 5, 7):
        row = [f"{list(v.shape)!s:<9} {v[-1].norm():8.2f}" for v in (streams[layer], attentions[layer], mlps[layer])]
        print(f"   {layer:<7} {'   '.join(row)}")


def last_token_lens(model: Any) -> list[torch.Tensor]:
    """The next-token probabilities at each layer, `[vocab]`."""
    return [model.project_on_vocab(model.layers_output[layer][-1:])[0].softmax(-1) for layer in range(model.num_layers)]


def logit_lens(model: VLLM, paris: int) -> None:
    heading(2, "Logit lens: where ' Paris' appears", "model.project_on_vocab(model.layers_output[i])")
    decode = model.tokenizer.decode
    for layer, probs in enumerate(model.run(last_token_lens, EIFFEL)):
        top, p = repr(decode(probs.argmax())), probs[paris].item()
        line = f"   layer {layer}   top {top:<12} P(' Paris') {p:6.3f}  {'#' * round(p * 30)}".rstrip()
        print(good(line) if probs.argmax() == paris else line)


def without(accessor: str, layer: int, part: Any) -> Callable[[Any], torch.Tensor]:
    """A trace that sets `part` of a value to zero. Returns the next-token probabilities."""

    def run(model: Any) -> torch.Tensor:
        getattr(model, accessor)[layer][part] = 0
        return model.next_token_probs[0]

    return run


def ablate(model: VLLM, paris: int) -> None:
    heading(3, "Ablate: one part set to zero", "model.mlps_output[i][:] = 0", "model.attn_z[i][:, head] = 0")
    decode = model.tokenizer.decode
    cases = {
        "nothing": lambda model: model.next_token_probs[0],
        **{f"MLP of layer {layer}": without("mlps_output", layer, slice(None)) for layer in (0, 3, 7)},
        **{f"head {head} of layer 0": without("attn_z", 0, (slice(None), head)) for head in (0, 1)},
    }
    for name, case in cases.items():
        probs = model.run(case, EIFFEL)
        says = f"{decode(probs.argmax())!r}"
        says = good(f"{says:<10}") if probs.argmax() == paris else bad(f"{says:<10}")
        print(f"   {name:<18} ->  {says} P(' Paris') {probs[paris]:.3f}")


def steer(model: VLLM) -> None:
    heading(
        4,
        "Steer: the direction from France to Italy, added at layer 5 while it generates",
        "for step in tracer.iter[:]:",
        "    model.layers_output[5] += direction",
    )
    france, italy = model.run(lambda model: model.layers_output[5][-1], [FRANCE, ITALY])
    direction = italy - france
    for prompt in (FRANCE, EIFFEL):
        with model.trace(max_tokens=3, temperature=0.0) as tracer:
            with tracer.invoke(prompt):
                pass
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    model.layers_output[5] += direction
        plain, steered = [output.outputs[0].text for output in tracer.outputs]
        print(f"   {prompt + ' ...':<40} {good(f'{plain!r:<15}')}  steered: {bad(f'{steered!r}')}")


def patch(model: VLLM, paris: int, rome: int) -> None:
    heading(
        5,
        "Patch: France's activations into runs on Italy, one layer and token in each; all the runs are one batch",
        "with tracer.invoke(italy):",
        "    model.layers_output[layer][position] = clean[layer][position]",
    )
    clean = model.run(lambda model: [model.layers_output[layer] for layer in range(model.num_layers)], FRANCE)
    tokens = [model.tokenizer.decode(token) for token in model.tokenizer(ITALY)["input_ids"]]
    with model.trace() as tracer:
        for layer in range(model.num_layers):
            for position in range(len(tokens)):
                with tracer.invoke(ITALY):
                    model.layers_output[layer][position] = clean[layer][position]
                    difference = (model.logits[0, paris] - model.logits[0, rome]).save()  # noqa: F841 (comes back on the output)
    found = iter(output.saves["difference"].item() for output in tracer.outputs)
    print("   logit(' Paris') - logit(' Rome'); above zero the answer has become ' Paris'")
    print(f"   layer   {''.join(f'{token!r:>12}' for token in tokens)}")
    for layer in range(model.num_layers):
        row = [next(found) for _ in tokens]
        print(f"   {layer:<7} {''.join((good if x > 0 else str)(f'{x:12.1f}') for x in row)}")


# The same as plans.


def plans(model: VLLM) -> None:
    heading(6, "Plans: interventions as data. They run inside the compiled forward and its CUDA graphs")
    print(
        "   (this engine is eager, to start in seconds, unless the demo runs with --compile; the answers are the same)"
    )
    kindness = probe(model)
    from midstream import Clamp, Steer

    code("plan=Steer('resid_post', layers=5, vector=kindness, scale=-0.5)")
    show_changes(model, ["I think this film is"], Steer("resid_post", layers=5, vector=kindness, scale=-0.5), "steered")
    code("plan=Clamp('resid_post', direction=kindness)     # ablated: nothing of it is left, at any layer")
    show_changes(model, ["I dislike this hotel, it was", FRANCE], Clamp("resid_post", direction=kindness), "ablated")
    sweep(model)


def show_changes(model: VLLM, prompts: list[str], plan: Any, label: str) -> None:
    """Print the continuation of each prompt without and with the plan, run as one batch."""
    twice = [prompt for prompt in prompts for _ in range(2)]
    outputs = model.generate(twice, plan=[None, [plan]] * len(prompts), max_tokens=1, temperature=0.0)
    texts = [repr(output.outputs[0].text) for output in outputs]
    for prompt, before, after in zip(prompts, texts[::2], texts[1::2], strict=True):
        print(f"   {prompt + ' ...':<40} {good(f'{before:<15}')}  {label}: {(good if after == before else bad)(after)}")


def probe(model: VLLM) -> torch.Tensor:
    """Fit a probe for kind opinions at each layer. Prints how often it is right; returns the direction at layer 5."""
    import torch

    from midstream import Capture
    from midstream.bundled import demo_contrast

    code("plan=Capture('resid_post', positions='last_prompt')")
    pairs = sorted(demo_contrast(), key=lambda pair: " like " in pair["positive"])  # love and hate, like and dislike
    prompts = [pair[side] for side in ("positive", "negative") for pair in pairs]
    outputs = model.generate(prompts, plan=Capture("resid_post"), max_tokens=1)
    half, fitted = len(pairs), len(pairs) // 2
    right, directions = [], []
    for layer in range(model.num_layers):
        rows = torch.stack([output.captures["resid_post", layer][0] for output in outputs])
        kind, unkind = rows.split(half)
        direction = kind[:fitted].mean(0) - unkind[:fitted].mean(0)
        middle = direction @ (kind[:fitted].mean(0) + unkind[:fitted].mean(0)) / 2
        correct = (kind[fitted:] @ direction > middle).sum() + (unkind[fitted:] @ direction < middle).sum()
        right.append(correct.item() / (2 * (half - fitted)))
        directions.append(direction)
    print(
        "   a probe for kind opinions, fitted on 'love' and 'hate', asked about 'like' and 'dislike': how often right"
    )
    print(f"   layer   {''.join(f'{layer:>6}' for layer in range(model.num_layers))}")
    print(f"           {''.join((good if share > 0.9 else str)(f'{share:6.0%}') for share in right)}")
    return directions[5]


def sweep(model: VLLM) -> None:
    code(
        "result = model.sweep(france, italy, ' Paris', ' Rome')     # every layer and position; each patch is a request"
    )
    code("result.show()")
    result = model.sweep(FRANCE, ITALY, " Paris", " Rome", progress=False)
    print("   logit(' Paris') - logit(' Rome') with France's activation in the run on Italy")
    for line in result.show(colour=is_coloured()).splitlines():
        print(f"   {line}")
    best, floor = result.best(1)[0], f"{result.noise_floor:.1g}"
    cell = f"layer {best.layers[0]} at {best.token!r}"
    print(f"   noise floor {floor}, ~ marks changes within it; {cell} recovers {best.recovered:.0%}")


def planned_captures(model: Any) -> list[dict[str, torch.Tensor]]:
    """The residual stream of each prompt after the edits of a plan with every kind of intervention."""
    from midstream import Capture, Clamp, Patch, Steer

    run = model.record(ITALY, sites=["resid_post"], name="demo")
    (output,) = model.generate(FRANCE, plan=Capture("resid_post", layers=2), max_tokens=1)
    plan = [
        Patch("resid_post", layer=3, position=-2, source=run, alpha=0.5),
        Steer("resid_post", layers=[1, 5], vector=output.captures["resid_post", 2][0], scale=0.5),
        Clamp("resid_post", layers=[4], direction=output.captures["resid_post", 2][0], low=-10.0, high=10.0),
        Capture("resid_post", positions="all_prompt", when="after"),
    ]
    outputs = model.generate(list(PROMPTS), plan=plan, max_tokens=1)
    del model.runs["demo"]
    return [{f"layer {layer}": rows for (_, layer), rows in output.captures.items()} for output in outputs]


def differences(model: VLLM, hf: LanguageModel) -> float:
    """Print the largest relative difference of each accessor, and of a plan's captures. Returns the largest."""
    import torch

    from midstream.commands import compare

    heading(7, f"vLLM against transformers: {len(PROMPTS)} prompts in a batch, every layer, float32")
    layers, sides = range(model.num_layers), []
    with torch.no_grad():
        for each in (model, hf):
            side = compare.collect(each, PROMPTS, layers, COMPARED)
            side.take("planned_captures", partial(planned_captures, each))
            sides.append(side)
    print("   accessor            largest relative difference")
    found = []
    for name in (*COMPARED, "planned_captures"):
        difference = compare.difference(name, *sides)
        largest = math.inf if difference.value is None else difference.value
        print(f"   {name:<19} {(good if largest <= LARGEST_DIFFERENCE else bad)(str(difference))}")
        found.append(largest)
    return max(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 1 if vLLM and transformers differ."""
    parser = argparse.ArgumentParser(prog="midstream demo", description="What midstream does, on the bundled model.")
    parser.add_argument(
        "--compile", action="store_true", help="start vLLM with torch.compile and CUDA graphs, as it is served"
    )
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module=r"vllm|torch|transformers")
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    print(colour(1, "midstream: reads and changes a model's activations in the middle of vLLM's forward pass"))
    model, hf = start(eager=not arguments.compile)
    with model:
        (paris,), (rome,) = model.tokenizer([" Paris", " Rome"], add_special_tokens=False)["input_ids"]
        read(model)
        logit_lens(model, paris)
        ablate(model, paris)
        steer(model)
        patch(model, paris, rome)
        plans(model)
        largest = differences(model, hf)
    if largest > LARGEST_DIFFERENCE:
        print(bad(f"\nThey differ by {largest:.1e}, where float32 rounding explains {LARGEST_DIFFERENCE:.0e}."))
        return 1
    print(f"\n{colour(1, 'Next:')} README.md, docs/quickstart.md, docs/plans.md, docs/recipes/")
    return 0


def start(eager: bool) -> tuple[VLLM, LanguageModel]:
    """The bundled model on vLLM and on transformers."""
    with waiting("loading PyTorch and vLLM"):
        import torch

        from midstream import VLLM, LanguageModel, demo_model
        from midstream.engine.seams import check_vllm_version

        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that a CPU has no Triton
        check_vllm_version()
    with waiting(f"starting vLLM {'eager' if eager else 'and compiling'}"):
        model = VLLM(
            demo_model(),
            dtype="float32",
            enforce_eager=eager,
            max_model_len=256,
            max_num_seqs=64,
            gpu_memory_utilization=0.2,
        )
    with waiting("loading the same model in transformers"):
        hf = LanguageModel(demo_model(), dtype=torch.float32)
    return model, hf
