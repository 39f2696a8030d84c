"""Issue point 6: a compiling engine runs traced steps as compiled as the trace allows, and all other steps untouched.

Issue 3, row D3: and planned steps at the sites. Rows I1, L5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Plain, close, differs
from plan_cases import tokens as tokens_of

from midstream import VLLM, Capture, Patch
from midstream.settings import BUILDABLE

pytestmark = pytest.mark.engine

PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is"]


def counted(compiled, run):
    """What `run` gives, and how many steps it had: traced, and of those uncompiled."""
    before = compiled.gauges()[0]
    result = run()
    after = compiled.gauges()[0]
    return result, tuple(after[name] - before[name] for name in ("traced_steps", "uncompiled_steps"))


def zero_last(h: torch.Tensor) -> torch.Tensor:
    h[-1] = 0
    return h


def test_reads_in_the_compiled_forward(compiled, plain):
    def read(m):
        return [m.layers_output[i] for i in range(m.num_layers)], m.logits

    values, steps = counted(compiled, lambda: compiled.run(read, PROMPTS, temperature=0.0))
    assert steps[0] >= 1 and steps[1] == 0
    for prompt, (mine, logits) in zip(PROMPTS, values, strict=True):
        expected = plain.run(prompt)
        for layer, hidden in enumerate(mine):
            close(hidden, expected.sites["resid_post", layer])
        close(logits, expected.logits[-1:])


def test_edits_in_the_compiled_forward_reach_one_request_alone(compiled, plain):
    model = compiled

    def run():
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPTS[1]):
                neighbour = model.logits.save()
            with tracer.invoke(PROMPTS[0]):
                model.layers_output[3][-1] = 0
                edited = model.logits.save()
        return neighbour, edited

    (neighbour, edited), steps = counted(compiled, run)
    assert steps[0] >= 1 and steps[1] == 0
    close(edited, plain.run(PROMPTS[0], {("resid_post", 3): zero_last}).logits[-1:])
    close(neighbour, plain.run(PROMPTS[1]).logits[-1:])
    differs(edited, plain.run(PROMPTS[0]).logits[-1:])


def test_other_sites_take_uncompiled_steps(compiled, plain):
    value, steps = counted(compiled, lambda: compiled.run(lambda m: m.mlps_input[2], PROMPTS[0], temperature=0.0))
    assert steps == (1, 1)
    close(value, plain.run(PROMPTS[0]).sites["mlp_in", 2])


def test_a_compiled_trace_beside_an_uncompiled_one(compiled):
    def both():
        def site(m):
            return m.layers_output[2]

        alone = compiled.run(site, PROMPTS[0], temperature=0.0)
        with compiled.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPTS[0]):
                together = compiled.layers_output[2].save()
            with tracer.invoke(PROMPTS[1]):
                other = compiled.mlps_input[2].save()
        return alone, together, other

    (alone, together, other), steps = counted(compiled, both)
    assert steps[0] >= 2 and steps[1] == 1  # requests may come to the engine a step apart
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    assert other.shape[0] == 5


# --------------------------------------------------------------------------------------- all graph sites (rows D3, L5)


def off_graph(model: VLLM, run: Any) -> tuple[Any, int]:
    """What `run` gives, and how many steps of it left the compiled forward for a plan: on all ranks the same."""
    before, result, after = model.gauges(), run(), model.gauges()
    (left,) = {b["off_graph_steps"] - a["off_graph_steps"] for a, b in zip(before, after, strict=True)}
    return result, left


def test_a_patch_and_captures_at_all_graph_sites_share_a_compiled_step(compiled: VLLM, plain: Plain) -> None:
    run = compiled.record("The capital of Italy is", sites=BUILDABLE)
    assert set(run.sites) == set(BUILDABLE)
    patches = [Patch("mlp_out", layer=2, position=3, source=run), Patch("resid_post", layer=3, position=3, source=run)]
    plan = [*patches, *(Capture(site, positions="all_prompt", when="after") for site in BUILDABLE)]
    (output,), left = off_graph(
        compiled, lambda: compiled.generate(PROMPTS[1], plan=plan, max_tokens=1, temperature=0.0, ignore_eos=True)
    )
    assert left == 0 and tokens_of(output) == [plain.token(" Rome")]
    source = plain.run("The capital of Italy is").sites

    def put(site: str, layer: int) -> Any:
        def edit(h: torch.Tensor) -> torch.Tensor:
            h[3] = source[site, layer][3]
            return h

        return edit

    sites = plain.run(PROMPTS[1], {point: put(*point) for point in [("mlp_out", 2), ("resid_post", 3)]}).sites
    for site in BUILDABLE:
        for layer in range(8):
            close(output.captures[site, layer], sites[site, layer])
    compiled.runs.delete(run.name)


def test_modules_whose_values_are_graph_sites_stay_compiled(compiled: VLLM, plain: Plain) -> None:
    v = torch.randn(256, generator=torch.Generator().manual_seed(1)) / 2

    def body(m: Any, tracer: Any) -> Any:
        cache = tracer.cache(modules=[m.model.layers[6].mlp])
        layer = m.model.layers[2]
        layer.self_attn.output += v
        early = layer.mlp.output.clone()
        late = m.model.layers[6].mlp.output
        late[-1] = 0
        return early, cache, m.layers_output[7]

    before = compiled.gauges()[0]
    early, cache, stream = compiled.run(body, PROMPTS[0], temperature=0.0)
    after = compiled.gauges()[0]
    assert after["traced_steps"] == before["traced_steps"] + 1
    assert after["forward_traced_steps"] == before["forward_traced_steps"]
    expected = plain.run(PROMPTS[0], {("attn_out", 2): lambda h: h + v, ("mlp_out", 6): zero_last}).sites
    close(early, expected["mlp_out", 2])
    close(cache["model.layers.6.mlp"].output, expected["mlp_out", 6])
    close(stream, expected["resid_post", 7])
