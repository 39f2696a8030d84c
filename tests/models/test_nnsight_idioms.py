"""What nnsight's documentation teaches, with the import changed: walkthrough, patching, logit lens, attribution (rows J1 to J8).

Written anew for the bundled model. Where both models have it, both run it; vLLM's layers return pairs, so blocks that read a layer's
output by its module are for transformers, and those with the accessors for both. Expected values come from `Plain`, and from torch.
"""

from __future__ import annotations

import pytest
import torch
from oracle import close, differs

import midstream as nnsight
from midstream import LanguageModel

FRANCE, ITALY = "The capital of France is", "The capital of Italy is"
LAYERS = range(8)


@pytest.fixture(scope="module")
def model(hf) -> LanguageModel:
    return hf


@pytest.fixture(params=["hf", pytest.param("engine", marks=pytest.mark.engine)])
def either(request):
    return request.getfixturevalue(request.param)


def test_hidden_states_and_the_output_of_the_model_are_saved(model, plain):
    with model.trace(FRANCE):
        hidden = model.model.layers[-1].output.save()
        token = model.lm_head.output.argmax(dim=-1).save()
        output = model.output.save()
    ran = plain.run(FRANCE)
    close(hidden[0], ran.sites["resid_post", 7])
    close(output.logits[0], ran.logits)
    assert model.tokenizer.decode(token[0][-1]) == plain.decode([int(ran.logits[-1].argmax())])


def test_operations_run_in_the_trace(model, plain):
    with model.trace(FRANCE):
        layer = model.model.layers[-1].output
        total = torch.sum(layer)
        value = (total + total).save()
    close(value, 2 * plain.run(FRANCE).sites["resid_post", 7].sum(), 1e-3)


def test_the_forward_is_changed_in_place_and_by_replacement(model, plain):
    with model.trace(FRANCE):
        before = model.model.layers[-1].output.clone().save()
        model.model.layers[-1].output[:] = 0
        after = model.model.layers[-1].output.save()
    assert before.any() and not after.any()
    with model.trace(FRANCE):
        hidden = model.model.layers[4].output
        noise = (0.001**0.5 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))).save()
        model.model.layers[4].output = hidden + noise
        logits = model.lm_head.output.save()
    close(logits[0], plain.run(FRANCE, {("resid_post", 4): lambda h: h + noise[0]}).logits)


def test_values_pass_from_one_invoke_to_the_next(either, plain):
    with either.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(FRANCE):
            embedded = either.token_embeddings
            barrier()
            first = either.logits.argmax(dim=-1).save()
        with tracer.invoke(ITALY):
            barrier()
            either.token_embeddings = embedded
            second = either.logits.argmax(dim=-1).save()
    assert first.item() == second.item() == plain.generate(FRANCE, 1)[0]


def test_logit_lens_over_all_layers(either, plain):
    with either.trace(FRANCE):
        tokens = [].save()
        for layer in LAYERS:
            logits = either.project_on_vocab(either.layers_output[layer])
            tokens.append(logits.softmax(dim=-1).max(dim=-1).indices)
    norm, head = plain.model.model.norm, plain.model.lm_head
    ran = plain.run(FRANCE)
    for layer, found in zip(LAYERS, tokens, strict=True):
        assert found.tolist() == head(norm(ran.sites["resid_post", layer])).argmax(-1).tolist()


def test_logit_lens_with_the_models_own_modules(model, plain):
    probabilities = []
    with model.trace() as tracer, tracer.invoke(FRANCE):
        for layer in model.model.layers:
            logits = model.lm_head(model.model.norm(layer.output))
            probabilities.append(torch.nn.functional.softmax(logits, dim=-1).save())
    close(probabilities[-1][0], plain.run(FRANCE).logits.softmax(-1))
    assert len(probabilities) == 8


def test_activation_patching_restores_the_answer(either, plain):
    paris, rome = plain.token(" Paris"), plain.token(" Rome")
    results = []
    with either.trace() as tracer:
        clean = [].save()
        with tracer.invoke(FRANCE):
            for layer in LAYERS:
                clean.append(either.layers_output[layer][3])
    with either.trace(ITALY):
        logits = either.logits
        corrupt = (logits[0, paris] - logits[0, rome]).save()
    for layer in LAYERS:
        with either.trace(ITALY):
            either.layers_output[layer][3] = clean[layer]
            logits = either.logits
            results.append((logits[0, paris] - logits[0, rome]).item().save())
    source = plain.run(FRANCE)
    for layer, result in zip(LAYERS, results, strict=True):

        def put(h, value=source.sites["resid_post", layer][3]):
            h[3] = value
            return h

        expected = plain.run(ITALY, {("resid_post", layer): put}).logits[-1]
        assert result == pytest.approx(float(expected[paris] - expected[rome]), abs=1e-2)
    assert max(results) > 0 > corrupt


def test_attribution_patching_by_one_backward_pass(model, plain):
    paris, rome = plain.token(" Paris"), plain.token(" Rome")
    clean, corrupt, grads = [], [], []
    with model.trace() as tracer:
        with tracer.invoke(FRANCE):
            for layer in model.model.layers:
                clean.append(layer.self_attn.o_proj.input.save())
        with tracer.invoke(ITALY):
            inputs = []
            for layer in model.model.layers:
                value = layer.self_attn.o_proj.input
                inputs.append(value)
                corrupt.append(value.save())
            logits = model.lm_head.output
            metric = logits[0, -1, paris] - logits[0, -1, rome]
            with metric.backward():
                for value in reversed(inputs):
                    grads.insert(0, value.grad.save())
    held = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: held.append(args[0]))
        for layer in plain.model.model.layers
    ]
    logits = plain.model(input_ids=torch.tensor([plain.ids(ITALY)]), use_cache=False).logits
    for handle in handles:
        handle.remove()
    expected = torch.autograd.grad(logits[0, -1, paris] - logits[0, -1, rome], held)
    for layer in LAYERS:
        close(grads[layer], expected[layer])
        close(corrupt[layer], held[layer])
        effect = (grads[layer] * (clean[layer] - corrupt[layer])).sum()
        assert effect.isfinite()


def test_steering_goes_through_all_steps_of_a_generation(either, plain):
    vector = 30 * torch.randn(256, generator=torch.Generator().manual_seed(3))
    with either.generate(FRANCE, max_new_tokens=4) as tracer:
        states = nnsight.save(list())
        with tracer.all():
            either.layers_output[4] += vector
            states.append(either.layers_output[4][-1])
    expected = plain.generate(FRANCE, 4, {("resid_post", 4): lambda h: h + vector})
    assert list(tracer.outputs[0].outputs[0].token_ids) == expected and len(states) == 4


def test_some_steps_of_a_generation_are_chosen(either, plain):
    with either.generate(FRANCE, max_new_tokens=5) as tracer:
        chosen = list().save()
        for step in tracer.iter[1:4]:
            chosen.append((step, either.samples.item()))
    tokens = plain.generate(FRANCE, 5)
    assert chosen == [(step, tokens[step]) for step in (1, 2, 3)]


def test_conditions_are_pythons(either, plain):
    with either.trace(FRANCE):
        hidden = either.layers_output[3]
        if hidden[-1].norm() > 0:
            either.layers_output[3] = torch.zeros_like(hidden)
        logits = either.logits.save()
    close(logits[0], plain.run(FRANCE, {("resid_post", 3): torch.zeros_like}).logits[-1])


def test_heads_are_ablated_by_a_view(model, plain):
    heads = plain.heads
    with model.trace(FRANCE):
        z = model.model.layers[2].self_attn.o_proj.input
        z.view(*z.shape[:2], heads, -1)[:, :, 1] = 0
        logits = model.lm_head.output.save()

    def off(z):
        z.unflatten(-1, (heads, -1))[:, 1] = 0
        return z

    close(logits[0], plain.run(FRANCE, {("attn_z", 2): off}).logits)


def test_an_edit_is_left_on_a_copy_and_cleared(either, plain):
    with either.edit() as edited:
        edited.mlps_output[3][:] = 0
    with either.trace(FRANCE):
        first = either.logits.save()
    with edited.trace(FRANCE):
        second = edited.logits.save()
    differs(first, second)
    close(second[0], plain.run(FRANCE, {("mlp_out", 3): torch.zeros_like}).logits[-1])


def test_a_tuple_of_inputs_is_read(model, plain):
    with model.trace(FRANCE):
        args, _ = model.model.layers[3].mlp.inputs
        value = args[0].save()
        same = model.model.layers[3].mlp.input.save()
    close(value[0], plain.run(FRANCE).sites["mlp_in", 3])
    close(value, same)


def test_a_trace_is_stopped_early(either):
    with either.trace(FRANCE) as tracer:
        hidden = either.layers_output[1].save()
        tracer.stop()
    assert hidden.shape == (5, 256)
