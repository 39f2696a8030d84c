"""Traces on a GPU, on one model runner: run as a script (see tests/gpu/test_gpu.py), prints one line a check and exits 1 on a failure.

The oracle is transformers with plain forward hooks on the same weights, in float32 on the same GPU.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

PROMPT, OTHER = "The Eiffel Tower is in the city of", "The capital of France is"


def hooked(
    module: Any, tokenizer: Any, prompt: str, edit: Callable[[int, Any], Any] | None = None
) -> tuple[list[Any], Any]:
    """Residual streams leaving each layer, and the last logits, by forward hooks on transformers."""
    import torch

    streams: list[Any] = []

    def after(index: int) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            hidden = hidden if edit is None else edit(index, hidden)
            streams.append(hidden[0].clone())
            return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

        return hook

    handles = [layer.register_forward_hook(after(i)) for i, layer in enumerate(module.model.layers)]
    with torch.no_grad():
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=module.device)
        logits = module(input_ids=ids).logits[0, -1:]
    for handle in handles:
        handle.remove()
    return streams, logits


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = a.float().cpu(), b.float().cpu()
    difference = ((a - b).abs().max() / b.abs().max()).item()
    assert difference <= tolerance, f"relative difference {difference:.2e} over {tolerance:.0e}"


class Checks:
    """The checks, each a method `check_*` on one engine."""

    def __init__(self, model: Any, module: Any, tokenizer: Any, tolerance: float) -> None:
        self.model, self.module, self.tokenizer, self.tolerance = model, module, tokenizer, tolerance
        self.plain = self.tokens()

    def tokens(self) -> list[list[int]]:
        outputs = self.model.generate([PROMPT, OTHER] * 4, max_tokens=12, temperature=0.0)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def check_reads(self) -> None:
        streams, logits = hooked(self.module, self.tokenizer, PROMPT)
        values = self.model.run(
            lambda m: ([m.layers_output[i] for i in range(m.num_layers)], m.logits),
            [PROMPT, OTHER, PROMPT],
            temperature=0.0,
        )
        for read, read_logits in (values[0], values[2]):
            for mine, theirs in zip(read, streams, strict=True):
                close(mine, theirs, self.tolerance)
            close(read_logits, logits, self.tolerance)

    def check_one_row_edited(self) -> None:
        def zero(index: int, hidden: Any) -> Any:
            if index == 3:
                hidden = hidden.clone()
                hidden[0, -1] = 0
            return hidden

        _, edited = hooked(self.module, self.tokenizer, PROMPT, zero)
        _, plain = hooked(self.module, self.tokenizer, OTHER)
        model = self.model
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(OTHER):
                other = model.logits.save()
            with tracer.invoke(PROMPT):
                model.layers_output[3][-1] = 0
                mine = model.logits.save()
        close(mine, edited, self.tolerance)
        close(other, plain, self.tolerance)

    def check_invariant(self) -> None:
        def both(m: Any) -> Any:
            out = []
            for i in range(m.num_layers):
                out.append((m.layers_input[i], m.layers_output[i]))
            return out

        pairs = self.model.run(both, PROMPT, temperature=0.0)
        for (_, out), (following, _) in itertools.pairwise(pairs):
            assert (out == following).all()

    def check_generation(self) -> None:
        model = self.model
        with model.trace(OTHER, max_tokens=12, temperature=0.0) as tracer:
            ids = list().save()
            for _ in tracer.iter[:]:
                ids.append(model.samples.item())
        assert ids == list(tracer.result.outputs[0].token_ids) == self.plain[1], (ids, self.plain[1])

    def check_written_sample(self) -> None:
        model = self.model
        with model.trace(OTHER, max_tokens=2, temperature=0.0) as tracer:
            model.samples[:] = 42
        assert next(iter(tracer.result.outputs[0].token_ids)) == 42

    def check_stop(self) -> None:
        model = self.model
        with model.trace(OTHER, max_tokens=50, temperature=0.0, ignore_eos=True) as tracer:
            steps = list().save()
            for step in tracer.iter[:]:
                steps.append(step)
                model.samples.item()
                if step == 2:
                    tracer.stop()
        assert steps == [0, 1, 2] and len(tracer.result.outputs[0].token_ids) == 3

    def check_error_then_clean(self) -> None:
        model = self.model
        try:
            with model.trace(PROMPT, temperature=0.0):
                model.layers_output[2].save()
                raise ValueError("mine")
        except ValueError as error:
            assert "mine" in str(error)
        else:
            raise AssertionError("the body's error did not surface")
        self.check_reads()

    def check_baseline_restored(self) -> None:
        assert self.tokens() == self.plain

    def check_large_tensors(self) -> None:
        """They go to the worker once, and a body changes its own copies of them."""
        import torch

        model = self.model
        W, total = torch.randn(model.hidden_size, 4096), torch.zeros(64, 4096)
        there, own = W.cpu(), W.cuda() if torch.cuda.is_available() else W.clone()
        before, found = model.connection.weights.sent_bytes, []
        for _ in range(3):
            with model.trace(PROMPT):
                h = model.layers_output[3]
                total[: len(h)] += h.float() @ W
                W.zero_()
                own.mul_(2)
                summed = total[: len(h)].save()
                product = (h.float() @ own).save()
                read = h.save()
            found.append((read.float() @ there, summed, product))
        for wanted, summed, product in found:
            close(summed, wanted, 1e-2)
            close(product, 2 * wanted, 1e-2)
        assert model.connection.weights.sent_bytes - before <= W.nbytes + total.nbytes + own.nbytes
        assert not total.any() and torch.equal(own.cpu(), there)

    def check_mixed_with_plain(self) -> None:
        """Traced and plain requests share steps of one batch; the steps after are graph steps again."""
        before = self.model.gauges()[0]["traced_steps"]
        self.check_generation()
        traced = self.model.gauges()[0]["traced_steps"]
        assert traced - before == 12, (before, traced)
        assert self.tokens() == self.plain
        assert self.model.gauges()[0]["traced_steps"] == traced

    def check_gauges(self) -> None:
        for _ in range(500):  # the client has its results a moment before the sender counts them as gone
            alive = {
                name: n
                for gauges in self.model.gauges()
                for name, n in gauges.items()
                if n and not name.endswith(("_steps", "weight_bytes")) and not name.startswith("graph")
            }
            if set(alive) != {"queued_bytes"}:
                break
            time.sleep(0.01)
        assert not alive, alive


def main() -> int:
    arguments = parsed(parser_of(__doc__))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from midstream import VLLM, demo_model

    model = VLLM(demo_model(), **engine_arguments(arguments), max_num_seqs=16)
    device = "cpu" if arguments.cpu else "cuda"
    module = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).to(device).eval()
    checks = Checks(model, module, AutoTokenizer.from_pretrained(demo_model()), 1e-4 if arguments.exact else 6e-2)
    with model:
        return 1 if run_checks(checks, arguments.runner) else 0


if __name__ == "__main__":
    sys.exit(main())
