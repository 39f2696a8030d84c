"""Issue point 6: a compiling engine runs traced steps as compiled as the trace allows, and all other steps untouched."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine

PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is"]


def counted(compiled, run):
    """What `run` gives, and how many steps it had: traced, and of those uncompiled."""
    before = compiled.gauges()[0]
    result = run()
    after = compiled.gauges()[0]
    return result, tuple(after[name] - before[name] for name in ("traced_steps", "uncompiled_steps"))


def tokens(compiled):
    outputs = compiled.generate(PROMPTS * 2, max_tokens=8, temperature=0.0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in outputs]


def streams(hf, prompt, edit=None):
    """The oracle: residual streams and last logits of plain transformers, by forward hooks."""
    found = []

    def after(module, args, output):
        hidden = output if edit is None else edit(len(found), output)
        found.append(hidden[0].clone())
        return hidden

    handles = [layer.register_forward_hook(after) for layer in hf.module.model.layers]
    with torch.no_grad():
        logits = hf.module(input_ids=torch.tensor([hf.tokenizer(prompt)["input_ids"]])).logits[0, -1:]
    for handle in handles:
        handle.remove()
    return found, logits


def test_reads_in_the_compiled_forward(compiled, hf):
    def read(m):
        return [m.layers_output[i] for i in range(m.num_layers)], m.logits

    values, steps = counted(compiled, lambda: compiled.run(read, PROMPTS, temperature=0.0))
    assert steps[0] >= 1 and steps[1] == 0
    for prompt, (mine, logits) in zip(PROMPTS, values, strict=True):
        theirs, expected = streams(hf, prompt)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_edits_in_the_compiled_forward_reach_one_request_alone(compiled, hf):
    model = compiled

    def zero_last(index, hidden):
        if index != 3:
            return hidden
        hidden = hidden.clone()
        hidden[0, -1] = 0
        return hidden

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
    torch.testing.assert_close(edited, streams(hf, PROMPTS[0], zero_last)[1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(neighbour, streams(hf, PROMPTS[1])[1], rtol=1e-4, atol=1e-3)
    assert (edited - streams(hf, PROMPTS[0])[1]).abs().max() > 0.1


def test_other_sites_take_uncompiled_steps(compiled, hf):
    found = []
    handle = hf.module.model.layers[2].mlp.register_forward_hook(lambda m, a, o: found.append(o[0].clone()))
    streams(hf, PROMPTS[0])
    handle.remove()
    value, steps = counted(compiled, lambda: compiled.run(lambda m: m.mlps_output[2], PROMPTS[0], temperature=0.0))
    assert steps == (1, 1)
    torch.testing.assert_close(value, found[0], rtol=1e-4, atol=1e-4)


def test_a_compiled_trace_beside_an_uncompiled_one(compiled):
    def both():
        def site(m):
            return m.layers_output[2]

        alone = compiled.run(site, PROMPTS[0], temperature=0.0)
        with compiled.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPTS[0]):
                together = compiled.layers_output[2].save()
            with tracer.invoke(PROMPTS[1]):
                other = compiled.mlps_output[2].save()
        return alone, together, other

    (alone, together, other), steps = counted(compiled, both)
    assert steps[0] >= 2 and steps[1] == 1  # requests may come to the engine a step apart
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    assert other.shape[0] == 5


def test_plain_outputs_are_exactly_as_before(compiled):
    before, none = counted(compiled, lambda: tokens(compiled))
    assert none == (0, 0)

    def steer(m, tracer):
        for _ in tracer.iter[:]:
            m.layers_output[3] += 1.0

    compiled.run(steer, PROMPTS, max_tokens=6, temperature=0.0, ignore_eos=True)
    assert tokens(compiled) == before
