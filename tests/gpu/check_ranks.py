"""Traces and plans on engines of several ranks: a script that prints one line a check and exits 1 on a failure (see test_gpu.py).

    python tests/gpu/check_ranks.py --runner v2 --pp 2 --tp 2
    python tests/gpu/check_ranks.py --cpu --pp 2 --eager

Oracles: transformers with plain torch hooks on the same weights (tests/support/oracle.py, float32 on the CPU), and an engine of one rank.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

PROMPT, OTHER = "The Eiffel Tower is in the city of", "The capital of France is"
ROME = "The Colosseum is in the city of"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
TOKENS = 12


def close(found: Any, expected: Any, tolerance: float) -> None:
    found, expected = found.detach().float().cpu(), expected.detach().float().cpu()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    assert difference <= tolerance, f"relative difference {difference:.2e} over {tolerance:.0e}"


def tokens(model: Any, prompts: list[str], plan: Any = None, count: int = TOKENS) -> list[list[int]]:
    outputs = model.generate(prompts, plan=plan, max_tokens=count, **GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Checks:
    """The checks, each a method `check_*` on one engine.

    Args:
        one_rank: tokens of `PROMPT` and `OTHER` from an engine of one rank.
        same_sums: whether several ranks add up in one rank's order, so that tokens have to be the same in any dtype.
    """

    def __init__(
        self, model: Any, oracle: Any, one_rank: list[list[int]], tolerance: float, same_sums: bool, graphs: bool
    ) -> None:
        import torch

        self.model, self.oracle, self.one_rank = model, oracle, one_rank
        self.tolerance, self.same_sums, self.graphs = tolerance, same_sums, graphs
        self.first, self.last = 1, model.num_layers - 2  # layers of the first and of the last stage
        vector = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(1))
        self.vector = vector * (40 / vector.norm())
        self.plain = tokens(model, [PROMPT, OTHER] * 4)

    def same_tokens(self, found: list[int], expected: list[int], exact: bool = False) -> None:
        """All of them, or in bfloat16 at least the beginning: close calls may go either way."""
        needed = len(expected) if exact or self.tolerance < 1e-2 else min(4, len(expected))
        assert found[:needed] == expected[:needed], (found, expected)

    def check_a_generation_is_that_of_one_rank(self) -> None:
        for i, each in enumerate(self.plain):
            self.same_tokens(each, self.one_rank[i % 2], self.same_sums)

    # Plans.

    def check_steer_and_capture_every_layer(self) -> None:
        """D7, E12: on every stage, in the graphs, beside requests without a plan."""
        from midstream import Capture, Steer

        before = [gauges["off_graph_steps"] for gauges in self.model.gauges()]
        plan = [Steer("resid_post", vector=self.vector), Capture("resid_post", positions="all", when="after")]
        outputs = self.model.generate([OTHER, PROMPT], plan=[None, plan], max_tokens=TOKENS, **GREEDY)
        edits = {("resid_post", layer): lambda h: h + self.vector for layer in range(self.model.num_layers)}
        found = list(outputs[1].outputs[0].token_ids)
        if self.tolerance < 1e-2:
            self.same_tokens(found, self.oracle.generate(PROMPT, TOKENS, edits))
        self.same_tokens(list(outputs[0].outputs[0].token_ids), self.one_rank[1], self.same_sums)
        rows = self.oracle.run([*self.oracle.ids(PROMPT), *found[:-1]], edits).sites
        assert len(outputs[1].captures) == self.model.num_layers
        for layer in range(self.model.num_layers):
            close(outputs[1].captures["resid_post", layer], rows["resid_post", layer], self.tolerance)
        if self.graphs:
            assert [gauges["off_graph_steps"] for gauges in self.model.gauges()] == before

    def check_patch_at_both_stages(self) -> None:
        from midstream import Capture, Patch

        for layer in (self.first, self.last):

            def patched(hidden: Any) -> Any:
                hidden[3] = self.vector
                return hidden

            plan = [
                Patch("resid_post", layer=layer, position=3, source=self.vector),
                Capture("resid_post", positions="all_prompt", when="after"),
            ]
            (output,) = self.model.generate([PROMPT], plan=plan, max_tokens=1, **GREEDY)
            rows = self.oracle.run(PROMPT, {("resid_post", layer): patched}).sites
            for i in range(self.model.num_layers):
                close(output.captures["resid_post", i], rows["resid_post", i], self.tolerance)

    def check_recorded_runs(self) -> None:
        """E5, E9, E10: the source of a patch lies on the stage that recorded it."""
        from midstream import Patch

        own, other = self.model.record(PROMPT, sites=["resid_post"]), self.model.record(ROME, sites=["resid_post"])
        for layer in (self.first, self.last):
            plan = [Patch("resid_post", layer=layer, position=-1, source=own)]
            assert tokens(self.model, [PROMPT], [plan]) == [self.plain[0]]
        plan = [Patch("resid_post", layer=self.model.num_layers - 1, position=-1, source=other)]
        assert tokens(self.model, [PROMPT], [plan], 1) == tokens(self.model, [ROME], None, 1)

    # Traces.

    def check_trace_reads_every_layer(self) -> None:
        """C1: in a batch, with the logits."""
        values = self.model.run(
            lambda m: ([m.layers_output[i] for i in range(m.num_layers)], m.logits),
            [PROMPT, OTHER, PROMPT],
            temperature=0.0,
        )
        for prompt, (layers, logits) in zip((PROMPT, OTHER, PROMPT), values, strict=True):
            ran = self.oracle.run(prompt)
            for i, hidden in enumerate(layers):
                close(hidden, ran.sites["resid_post", i], self.tolerance)
            close(logits, ran.logits[-1:], self.tolerance)

    def check_trace_writes_on_both_stages(self) -> None:
        model = self.model
        for layer in (self.first, self.last):
            with model.trace(temperature=0.0) as tracer:
                with tracer.invoke(OTHER):
                    other = model.logits.save()
                with tracer.invoke(PROMPT):
                    model.layers_output[layer][-1] = 0
                    mine = model.logits.save()

            def without_last(hidden: Any) -> Any:
                hidden[-1] = 0
                return hidden

            edited = self.oracle.run(PROMPT, {("resid_post", layer): without_last})
            close(mine, edited.logits[-1:], self.tolerance)
            close(other, self.oracle.run(OTHER).logits[-1:], self.tolerance)

    def check_trace_carries_a_value_to_a_later_stage(self) -> None:
        """C2, C3: read early, used late."""
        model = self.model
        with model.trace(PROMPT, temperature=0.0):
            early = model.layers_output[self.first]
            model.layers_output[self.last] = model.layers_output[self.last] + early
            logits = model.logits.save()
        seen: dict[str, Any] = {}

        def keep(hidden: Any) -> Any:
            seen["early"] = hidden
            return hidden

        edits = {("resid_post", self.first): keep, ("resid_post", self.last): lambda h: h + seen["early"]}
        close(logits, self.oracle.run(PROMPT, edits).logits[-1:], self.tolerance)

    def check_trace_of_a_generation(self) -> None:
        """C3: in every step the early layer is moved by what the late one was in the step before."""
        model, n = self.model, 6
        with model.trace(PROMPT, max_tokens=n, **GREEDY) as tracer:
            ids, moved, late = list().save(), list().save(), None
            for _ in tracer.iter[:]:
                if late is not None:
                    model.layers_output[self.first][-1] += 0.1 * late
                moved.append(model.layers_output[self.first][-1].clone())
                late = model.layers_output[self.last][-1].clone()
                ids.append(model.samples.item())
        assert ids == list(tracer.result.outputs[0].token_ids) and len(moved) == n
        prompt = self.oracle.ids(PROMPT)
        shifts: list[Any] = []

        def shift(hidden: Any) -> Any:
            for step, value in enumerate(shifts):
                hidden[len(prompt) + step] += 0.1 * value
            return hidden

        for step in range(n):
            ran = self.oracle.run([*prompt, *ids[:step]], {("resid_post", self.first): shift})
            close(moved[step], ran.sites["resid_post", self.first][-1], self.tolerance)
            if self.tolerance < 1e-2:
                assert ids[step] == int(ran.logits[-1].argmax()), step
            shifts.append(ran.sites["resid_post", self.last][-1])

    def check_trace_sees_whole_values(self) -> None:
        """Section 7: what tensor parallelism cuts is whole in a trace, and a head that is set to zero is that head."""
        model = self.model
        sites = {"attn_z": lambda m, i: m.attn_z[i], "mlp_act": lambda m, i: m.mlp_act[i]}
        ran = self.oracle.run(PROMPT)
        for name, read in sites.items():
            values = model.run(lambda m, read=read: [read(m, self.first), read(m, self.last)], PROMPT, temperature=0.0)
            for layer, value in zip((self.first, self.last), values, strict=True):
                close(value, ran.sites[name, layer], self.tolerance)

        def without(z: Any) -> Any:
            z = z.unflatten(-1, (self.oracle.heads, -1))
            z[:, -1] = 0
            return z.flatten(-2)

        with model.trace(PROMPT, temperature=0.0):
            model.attn_z[self.first][:, -1] = 0
            logits = model.logits.save()
        edited = self.oracle.run(PROMPT, {("attn_z", self.first): without})
        close(logits, edited.logits[-1:], self.tolerance)

    def check_wrong_order_is_an_error_within_a_second(self) -> None:
        """C4."""
        from midstream.errors import OutOfOrderError

        begun = time.monotonic()
        try:
            with self.model.trace(PROMPT, temperature=0.0):
                late = self.model.layers_output[self.last]
                self.model.layers_output[self.first] += late
        except OutOfOrderError:
            assert time.monotonic() - begun < 5
        else:
            raise AssertionError("a value of a later layer was used in an earlier one")

    def check_user_error(self) -> None:
        """C14."""
        for layer in (self.first, self.last):
            try:
                with self.model.trace(PROMPT, temperature=0.0):
                    self.model.layers_output[layer].mean().item()
                    raise ValueError("mine")
            except ValueError as error:
                assert "mine" in str(error)
            else:
                raise AssertionError("the body's error did not surface")

    def check_zzz_all_ranks_are_clean(self) -> None:
        """C10, D3: the same tokens as at the start, and nothing of all this is left on any rank."""
        assert tokens(self.model, [PROMPT, OTHER] * 4) == self.plain
        deadline = time.monotonic() + 10
        while True:
            left = [
                {
                    name: n
                    for name, n in gauges.items()
                    if n and not name.endswith(("_steps", "_growths", "weight_bytes")) and not name.startswith("graph")
                }
                for gauges in self.model.gauges()
            ]
            if not any(left) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert not any(left), left


def main() -> int:
    arguments = parsed(parser_of(__doc__, ranks=True))
    from forked import forked
    from oracle import Plain

    from midstream import VLLM, demo_model

    engine = {**engine_arguments(arguments), "max_num_seqs": 16}
    sizes = {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp}
    with forked() if arguments.cpu else contextlib.nullcontext():  # CUDA does not survive a fork
        with VLLM(demo_model(), **engine) as alone:
            one_rank = tokens(alone, [PROMPT, OTHER])
        model = VLLM(demo_model(), **engine, **sizes)
    exact = arguments.exact
    tolerance = 2e-4 if exact else 6e-2
    checks = Checks(model, Plain(demo_model()), one_rank, tolerance, arguments.tp == 1 or exact, not arguments.eager)
    with model:
        return 1 if run_checks(checks, f"{arguments.runner} pp={arguments.pp} tp={arguments.tp}") else 0


if __name__ == "__main__":
    sys.exit(main())
