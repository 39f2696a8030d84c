"""Checks of an engine in one of the modes, on the CPU and on a GPU, against an oracle on plain transformers with torch's hooks.

The oracle runs on the tokens that the engine has generated, and each of these must be the oracle's likeliest. So a check also sees edits
that reach no row or the rows of a draft token, and a cache that other requests have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import quantised
import torch
from modes import Mode

COUNT, ROUNDS = 12, 3  # requests at a time; in later rounds, steps replay graphs that were recorded in earlier ones
PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is"]
MANY = PROMPTS * (COUNT // 2)
LAYER, READ = 1, 2  # where plans write, and where they read
SITES = ("attn_z", "mlp_act", "resid_post")
Edit = Callable[[torch.Tensor], torch.Tensor]  # of the residual stream after LAYER, [tokens, hidden]


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


@torch.no_grad()
def oracle_run(oracle: Any, ids: list[int], edit: Edit | None = None) -> dict[str, torch.Tensor]:
    """The values `SITES` at READ, the residual stream after LAYER before the edit, and the logits: `[tokens, ...]`."""
    layer, found = oracle.model.layers[READ], {}

    def change(module: Any, args: Any, output: Any) -> Any:
        stream = first(output)
        found["stream"] = stream[0].clone()
        if edit is not None:
            stream[0] = edit(stream[0].clone())

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: found.update({name: args[0][0].clone()})

    handles = [
        oracle.model.layers[LAYER].register_forward_hook(change),
        # Before the hook that rounds the input.
        layer.self_attn.o_proj.register_forward_pre_hook(keep("attn_z"), prepend=True),
        layer.mlp.down_proj.register_forward_pre_hook(keep("mlp_act"), prepend=True),
        layer.register_forward_hook(lambda _, args, output: found.update(resid_post=first(output)[0].clone())),
    ]
    found["logits"] = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return found


@contextmanager
def refused(kind: type[Exception], part: str) -> Iterator[None]:
    """The block raises such an error, with this part in its message."""
    try:
        yield
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"not refused: {part}")


class Checks:
    """The checks of a running engine.

    Args:
        mode: as it is checked here.
        model: the engine, in the mode.
        oracle: the model on transformers.
        rounds: how often each batch runs.
    """

    def __init__(self, mode: Mode, model: Any, oracle: Any, rounds: int = ROUNDS) -> None:
        from midstream import Capture, Steer

        self.mode, self.model, self.oracle, self.rounds = mode, model, oracle, rounds
        self.vector = torch.randn(quantised.HIDDEN, generator=torch.Generator().manual_seed(0)) * 3
        self.greedy = {"max_tokens": mode.tokens, "temperature": 0.0, "ignore_eos": True}
        self.capture = [Capture(site, layers=READ, positions=mode.positions) for site in SITES]
        self.steer = Steer("resid_post", layers=LAYER, vector=self.vector)
        self.late = Steer("resid_post", layers=LAYER, vector=self.vector, phase="decode")

    def close(self, actual: Any, expected: torch.Tensor) -> None:
        actual, expected = actual.float().cpu(), expected.float()
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        difference = float((actual - expected).abs().max() / expected.abs().max())
        assert difference < self.mode.tolerance, f"{difference:.2g}"

    def compare(self, output: Any, edit: Edit | None) -> None:
        """The captured rows and the tokens of a request."""
        prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert len(generated) == self.mode.tokens
        expected = oracle_run(self.oracle, [*prompt, *generated[:-1]], edit)
        for site in SITES if output.captures else ():
            rows = expected[site] if self.mode.positions == "all" else expected[site][: len(prompt)]
            self.close(output.captures[site, READ], rows)
        logits = expected["logits"][len(prompt) - 1 :]
        behind = logits.amax(-1) - logits[torch.arange(len(generated)), generated]
        assert float(behind.max() / logits.abs().max()) < self.mode.tolerance, (behind, generated)

    def added(self, prompt: Any, late: bool) -> Edit:
        def edit(stream_TH: torch.Tensor) -> torch.Tensor:
            stream_TH[len(prompt) if late else 0 :] += self.vector
            return stream_TH

        return edit

    def checked(self, plans: list[Any], edits: Callable[[int, Any], Edit | None]) -> None:
        for _ in range(self.rounds):
            outputs = self.model.generate(MANY, plan=plans, **self.greedy)
            for number, output in enumerate(outputs):
                self.compare(output, edits(number, output.prompt_token_ids))

    def check_captures(self) -> None:
        self.checked([self.capture] * COUNT, lambda number, prompt: None)

    def check_plans_of_a_mixed_batch(self) -> None:
        """Steered everywhere, steered from the first generated token on, captured, and neither."""
        kinds = [[self.steer, *self.capture], [self.late, *self.capture], self.capture, None]

        def edit(number: int, prompt: Any) -> Edit | None:
            kind = number // 2 % 4
            return self.added(prompt, kind == 1) if kind < 2 else None

        self.checked([kinds[i // 2 % 4] for i in range(COUNT)], edit)

    def check_a_patch_from_a_recorded_run(self) -> None:
        from midstream import Patch

        run = self.model.record(PROMPTS[0], sites=["resid_post"])
        ids = list(self.model.tokenizer(PROMPTS[0])["input_ids"])
        there = oracle_run(self.oracle, ids)["stream"][3]
        self.mode.disturb(self.model)
        patch = Patch("resid_post", layer=LAYER, position=2, source=run, source_position=3)
        (output,) = self.model.generate(PROMPTS[1], plan=[patch, *self.capture], **self.greedy)

        def edit(stream_TH: torch.Tensor) -> torch.Tensor:
            stream_TH[2] = there
            return stream_TH

        self.compare(output, edit)

    def check_traces(self) -> None:
        """One that runs as a plan, and one whose code decides by a value, and so runs in the forward."""
        vector = self.vector

        def tensor_code(m: Any) -> Any:
            m.layers_output[LAYER] = m.layers_output[LAYER] + vector.to(m.layers_output[LAYER].dtype)
            return m.layers_output[READ], m.logits

        def deciding_code(m: Any) -> Any:
            h = m.layers_output[LAYER]
            if float(h.float().abs().max()) > 0:
                m.layers_output[LAYER] = h + vector.to(h.dtype)
            return m.layers_output[READ], m.logits

        for body in (tensor_code, deciding_code):
            for prompt, (stream, logits) in zip(PROMPTS, self.model.run(body, PROMPTS), strict=True):
                ids = list(self.model.tokenizer(prompt)["input_ids"])
                expected = oracle_run(self.oracle, ids, self.added(ids, False))
                self.close(stream, expected["resid_post"])
                self.close(logits[-1], expected["logits"][-1])

    def after_each(self) -> None:
        self.mode.disturb(self.model)


class SpeculativeChecks(Checks):
    """Of an engine that drafts tokens: plans on prompts and edits; the rest is refused by name."""

    def check_traces(self) -> None:
        from midstream.errors import TraceError

        def read(m: Any) -> Any:
            h = m.layers_output[LAYER]
            return h if float(h.float().sum()) else None

        with refused(TraceError, "not supported with speculative decoding"):
            self.model.run(read, PROMPTS[0])

    def check_rows_of_generated_tokens_are_refused(self) -> None:
        from midstream import Capture, Probe
        from midstream.errors import PlanError

        for item in (
            Capture("resid_post", layers=READ, positions="all"),
            Probe("resid_post", layer=READ, weight=self.vector, name="p", positions="all_generated"),
        ):
            with refused(PlanError, "speculative decoding"):
                self.model.generate(PROMPTS[0], plan=item, **self.greedy)

    def check_tokens_were_drafted_and_rejected(self) -> None:
        """Else the other checks would show nothing."""
        self.model.generate(MANY, plan=self.late, **self.greedy)
        counts = {metric.name: metric.value for metric in self.model.engine.get_metrics() if hasattr(metric, "value")}
        drafted = counts["vllm:spec_decode_num_draft_tokens"]
        assert drafted > counts["vllm:spec_decode_num_accepted_tokens"], counts
        print(f"        drafted {drafted}, accepted {counts['vllm:spec_decode_num_accepted_tokens']}", flush=True)


class AsynchronousSpeculativeChecks:
    """Of an engine that drafts tokens while it schedules the next step: it takes no plan, and generates as before."""

    def __init__(self, mode: Mode, model: Any, oracle: Any, rounds: int = ROUNDS) -> None:
        self.inner = SpeculativeChecks(mode, model, oracle, rounds)

    def check_plans_and_traces_are_refused(self) -> None:
        from midstream.errors import PlanError

        with refused(PlanError, "async_scheduling=False"):
            self.inner.model.generate(PROMPTS[0], plan=self.inner.steer, **self.inner.greedy)
        self.inner.check_traces()

    def check_plain_requests_run(self) -> None:
        self.inner.checked([None] * COUNT, lambda number, prompt: None)


def build(mode: Mode, directory: Path) -> tuple[dict[str, Any], Any]:
    """The engine's arguments, with the model; and the oracle."""
    path, oracle = quantised.build(mode.weights, directory / "model")
    options = dict(mode.options)
    if (speculative := options.get("speculative_config")) is not None and speculative["method"] == "eagle":
        head = quantised.eagle_head(directory / "eagle")
        options["speculative_config"] = {**speculative, "model": str(head)}
    return {"model": str(path), **options}, oracle
