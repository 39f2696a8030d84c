"""Traces whose writes and saves are programs, on a GPU and on one model runner: prints one line a check and exits 1 on a failure.

python tests/gpu/check_programs.py --runner v2 --float32
python tests/gpu/check_programs.py --pp 2   # two GPUs; also --tp 2

The same functions run on transformers (`LanguageModel`), which gives the expected values and tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is", "One two three"]
STEPS = 6
LAYER, LATER = 3, 6


def bodies(width: int) -> dict[str, Any]:
    """Spellings of a write in every step, by name: each changes one site and returns a later one."""
    import torch

    made = torch.Generator().manual_seed(0)
    v = torch.randn(width, generator=made)
    d = v / v.norm()
    enc, dec = (torch.randn(*shape, generator=made) / 8 for shape in ((width, 128), (128, width)))

    def replaced(change: Any) -> Any:
        def body(model: Any, tracer: Any) -> Any:
            found = []
            for _ in tracer.iter[:]:
                h = model.layers_output[LAYER]
                model.layers_output[LAYER] = change(h)
                found.append(model.layers_output[LATER][-1])
            return found

        return body

    def column(model: Any, tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.layers_output[LAYER][:, 17] = 0
            found.append(model.layers_output[LATER][-1])
        return found

    def mlp(model: Any, tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            part = model.model.layers[LAYER].mlp
            part.output = torch.tanh(part.output)
            found.append(model.layers_output[LATER][-1])
        return found

    def earlier(model: Any, tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            first, second = model.layers_output[1], model.mlps_output[2]
            model.layers_output[LAYER] += first - torch.tanh(second)
            found.append(model.layers_output[LATER][-1])
        return found

    def last_row(model: Any, tracer: Any) -> Any:
        model.layers_output[LAYER][-1] = torch.sigmoid(model.layers_output[LAYER][-1])
        return model.layers_output[LATER][-1]

    factors, mask = torch.linspace(0.5, 1.5, 64), torch.arange(64) % 3 == 0

    # Few features are larger than all others, so what rounding in bfloat16 chooses instead makes no difference.
    sizes = torch.where(torch.arange(128) % 8 == 0, 1.0, 2.0**-10)

    def top_k_by_scatter(h: Any) -> Any:
        features = torch.relu(h @ enc.to(h)) * sizes.to(h)
        best = features.topk(16, dim=-1)
        return h + torch.zeros_like(features).scatter_(-1, best.indices, best.values) @ dec.to(h)

    def rows_of_a_decoder(h: Any) -> Any:
        best = (h @ enc.to(h)).topk(8, dim=-1)
        return h + (best.values[..., None] * dec.to(h)[best.indices]).sum(-2)

    changes = {
        "adds_a_converted_vector": lambda h: h + v.to(h),
        "adds_twice": lambda h: h + 2 * v.to(h),
        "halves": lambda h: h * 0.5,
        "projects_out": lambda h: h - (h @ d.to(h))[:, None] * d.to(h),
        "sae_gate": lambda h: torch.relu(h @ enc.to(h)) @ dec.to(h),
        "where_a_score_is_high": lambda h: torch.where((h @ d.to(h))[:, None] > 0, h + v.to(h), h),
        "unit_norm": lambda h: torch.nn.functional.normalize(h, dim=-1) * 8,
        "layer_norm": lambda h: torch.nn.functional.layer_norm(h, h.shape[-1:]),
        "top_k": lambda h: h * (h >= h.topk(32, dim=-1).values[:, -1:]),
        "top_k_by_scatter": top_k_by_scatter,
        "rows_of_a_decoder": rows_of_a_decoder,
        "a_factor_for_each_position": lambda h: h * factors[: len(h), None].to(h),
        "a_mask_of_positions": lambda h: torch.where(mask[: len(h), None].to(h.device), h.tanh() * 4, h - v.to(h)),
    }
    found = {name: replaced(change) for name, change in changes.items()}
    return {**found, "column": column, "mlp": mlp, "earlier": earlier, "last_row": last_row}


def reads(width: int) -> dict[str, Any]:
    """What is kept of every step without code on the engine, by name."""
    import torch

    made = torch.Generator().manual_seed(1)
    d = torch.randn(width, generator=made) / width**0.5
    enc = torch.randn(width, 128, generator=made) / 8

    def kept(compute: Any) -> Any:
        def body(model: Any, tracer: Any) -> Any:
            return [compute(model.layers_output[LAYER]) for _ in tracer.iter[:]]

        return body

    def written_and_read(model: Any, tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.layers_output[LAYER] = torch.tanh(model.layers_output[LAYER])
            written, later = model.layers_output[LAYER], model.layers_output[LATER]
            found.append((written[-1].norm(), (later @ d.to(later))[-1]))
        return found

    return {
        "norm": kept(lambda h: h[-1].norm()),
        "probe": kept(lambda h: torch.sigmoid(h.float() @ d.to(h.device))),
        "features": kept(lambda h: torch.relu(h @ enc.to(h)).topk(8, dim=-1).values),
        "several": kept(lambda h: (h[-1], h[-1].amax(), h.float().mean(-1))),
        "written_and_read": written_and_read,
    }


def tensors(found: Any) -> Iterator[Any]:
    """Those in lists and tuples."""
    if isinstance(found, (list, tuple)):
        for each in found:
            yield from tensors(each)
    else:
        yield found


def main() -> int:
    arguments = parsed(parser_of(__doc__, ranks=True))

    from midstream import VLLM, LanguageModel, demo_model
    from midstream.settings import BUILDABLE

    ranks: dict[str, Any] = {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp}
    if arguments.tp > 1:
        ranks["graph_sites"] = BUILDABLE  # as without tensor parallelism
    engine = VLLM(demo_model(), **ranks, **engine_arguments(arguments))
    plain = LanguageModel(demo_model(), dtype=engine._known.dtype, device="cpu" if arguments.cpu else "cuda")
    is_exact = arguments.float32 or arguments.cpu
    tolerance = 1e-3 if is_exact else 0.1
    compared = (
        slice(None) if is_exact else slice(1)
    )  # in bfloat16 the two may generate other tokens from the second step on
    greedy = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}

    has_graphs = not (arguments.cpu or arguments.eager)
    expected: dict[Any, Any] = {}

    def check(fn: Any, gauge: str) -> Any:
        """Three calls: in the later ones the steps of generated tokens come from graphs that the first one had recorded."""

        def run() -> None:
            before = engine.gauges()
            for _ in range(3):
                for prompt, mine in zip(PROMPTS * 4, engine.run(fn, PROMPTS * 4, **greedy), strict=True):
                    if (fn, prompt) not in expected:
                        expected[fn, prompt] = plain.run(fn, prompt, **greedy)
                    theirs = expected[fn, prompt]
                    for a, b in zip(tensors(mine[compared]), tensors(theirs[compared]), strict=True):
                        far = (a.cpu().float() - b.cpu().float()).norm() / b.cpu().float().norm()
                        assert a.shape == b.shape and far < tolerance, f"{float(far):.2e} away for {prompt!r}"
            for older, newer in zip(before, engine.gauges(), strict=True):
                assert newer[gauge] == older[gauge], f"{gauge} grew: code ran in the engine"
                assert not has_graphs or newer["graphs"], "no graph was recorded"
                assert not newer["recording_failures"], "a graph could not be recorded"

        return run

    width = engine.hidden_size
    writes = {f"check_{name}": check(fn, "forward_traced_steps") for name, fn in bodies(width).items()}
    saves = {f"check_saves_{name}": check(fn, "traced_steps") for name, fn in reads(width).items()}
    checks = SimpleNamespace(**writes, **saves)
    with engine:
        return 1 if run_checks(checks, arguments.runner) else 0


if __name__ == "__main__":
    sys.exit(main())
