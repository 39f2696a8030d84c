"""What users of nnsight write, on both backends where both have it (rows J1 to J8).

Expected values come from transformers with torch hooks (`Plain`), from torch autograd, or from a closed form.
"""

from __future__ import annotations

import pytest
import torch
from oracle import close, differs

from midstream.errors import ParameterError, PromptError, ShapeError

PARIS = "The capital of France is"
ROME = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"


# ------------------------------------------------------------------------------------------- greedy unless asked (J1)


def generated(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_j1_generation_is_greedy_unless_a_parameter_asks_for_sampling(model, plain):
    greedy = plain.generate(EIFFEL, 8)
    assert generated(model.generate(EIFFEL, max_new_tokens=8)[0]) == greedy
    assert generated(model.generate(EIFFEL, max_new_tokens=8, do_sample=False)[0]) == greedy
    assert generated(model.generate(EIFFEL, max_new_tokens=8, do_sample=False, temperature=5.0)[0]) == greedy
    with model.generate(EIFFEL, max_new_tokens=8) as tracer:
        logits = model.logits.save()
    assert generated(tracer.outputs[0]) == greedy
    assert model.run(lambda m, t: [m.samples.item() for _ in t.iter[:]], EIFFEL, max_tokens=8) == greedy
    close(logits[0], plain.run(EIFFEL).logits[-1])


@pytest.mark.parametrize("asks", [{"do_sample": True}, {"temperature": 2.0}, {"top_p": 1.0}, {"top_k": 50}])
def test_j1_sampling_parameters_ask_for_sampling(model, plain, asks):
    outputs = model.generate([EIFFEL] * 8, max_new_tokens=12, ignore_eos=True, **asks)
    assert {tuple(generated(output)) for output in outputs} != {tuple(plain.generate(EIFFEL, 12))}


def test_j1_each_invoke_may_ask_for_sampling(engine, plain):
    with engine.trace(max_tokens=12, ignore_eos=True) as tracer:
        with tracer.invoke(EIFFEL):
            pass
        for _ in range(8):
            with tracer.invoke(EIFFEL, do_sample=True):
                pass
        with tracer.invoke(EIFFEL, max_new_tokens=2):
            pass
    greedy = plain.generate(EIFFEL, 12)
    assert generated(tracer.outputs[0]) == greedy and generated(tracer.outputs[9]) == greedy[:2]
    assert {tuple(generated(output)) for output in tracer.outputs[1:9]} != {tuple(greedy)}


def test_j1_what_is_no_parameter_here_says_what_to_write(model):
    with pytest.raises(ParameterError, match=r"midstream\.Remote"):
        model.trace(PARIS, remote=True)
    with pytest.raises(ParameterError, match="do_sample is 1"):
        model.generate(PARIS, do_sample=1)
    with model.trace(PARIS, remote=False, scan=True, validate=True):
        seen = model.logits.save()
    assert seen.shape[0] == 1


# ------------------------------------------------------------------------------------------------------ gradients (J1)


def upstream(plain, change, low=1, high=3):
    """d loss / d layer `low` if the gradient that comes to layer `high` is `change`d, by torch alone, and the one of `high`."""
    held = {}

    def hook(layer):
        def keep(_, __, output):
            held[layer] = output[0] if isinstance(output, tuple) else output

        return plain.model.model.layers[layer].register_forward_hook(keep)

    handles = [hook(low), hook(high)]
    try:
        logits = plain.model(input_ids=torch.tensor([plain.ids(PARIS)]), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    (above,) = torch.autograd.grad(logits[0, -1, 7], held[high], retain_graph=True)
    (below,) = torch.autograd.grad(held[high], held[low], change(above.clone()), retain_graph=True)
    return below[0], above[0]


def doubled_at_the_end(grad):
    grad[:, -1] *= 2
    return grad


def test_j1_a_gradient_that_is_replaced_goes_on_upstream(hf, plain):
    with hf.trace(PARIS):
        low, high = hf.layers_output[1], hf.layers_output[3]
        loss = hf.logits[0, 7]
        with loss.backward():
            before = high.grad.save()
            high.grad = 0
            after = high.grad.save()
            below = low.grad.save()
    close(before, upstream(plain, lambda grad: grad)[1])
    assert not after.any() and not below.any()
    differs(before, after, 1e-4)


@pytest.mark.parametrize("how", ["item", "augmented item", "whole", "tensor", "augmented"])
def test_j1_a_gradient_that_is_changed_goes_on_upstream(hf, plain, how):
    scale = torch.ones(5, 1)
    scale[-1] = 2
    with hf.trace(PARIS):
        low, high = hf.layers_output[1], hf.layers_output[3]
        loss = hf.logits[0, 7]
        with loss.backward():
            if how == "item":
                high.grad[-1] = high.grad[-1] * 2
            elif how == "augmented item":
                high.grad[-1] *= 2
            elif how == "whole":
                high.grad[:] = high.grad * scale
            elif how == "tensor":
                high.grad = high.grad * scale
            else:
                high.grad *= scale
            below = low.grad.save()
    close(below, upstream(plain, doubled_at_the_end)[0])
    differs(below, upstream(plain, lambda grad: grad)[0], 1e-3)


def test_j1_a_replaced_gradient_reaches_parameters_and_no_later_backward(hf, plain):
    weight = hf.module.model.layers[1].mlp.down_proj.weight
    grads = []
    for replaced in (False, True, False):
        hf.module.zero_grad(set_to_none=True)
        with hf.trace(PARIS):
            high = hf.layers_output[3]
            loss = hf.logits[0, 7]
            with loss.backward():
                if replaced:
                    high.grad[:] = 0
        grads.append(weight.grad.clone())
    hf.module.zero_grad(set_to_none=True)
    assert grads[0].any() and not grads[1].any() and torch.equal(grads[0], grads[2])


def test_j1_two_gradients_of_one_graph_are_changed_apart(hf):
    with hf.trace(PARIS):
        low, high = hf.layers_output[1], hf.layers_output[3]
        loss = hf.logits[0, 7]
        with loss.backward(retain_graph=True):
            high.grad = 0
            first = low.grad.save()
        with loss.backward():
            second = low.grad.save()
    assert not first.any() and second.any()


def test_j1_a_gradient_of_another_shape_is_refused(hf):
    with pytest.raises(ShapeError, match=r"The gradient is \[5, 256\]; \[3, 256\] was written"), hf.trace(PARIS):
        high = hf.layers_output[3]
        loss = hf.logits[0, 7]
        with loss.backward():
            high.grad = torch.zeros(3, 256)


# -------------------------------------------------------------------------------------------------- attention masks (J1)


def padded(plain, prompt, side, to=9):
    ids = plain.ids(prompt)
    fill, mask = [0] * (to - len(ids)), [1] * len(ids)
    row, mask = (fill + ids, fill + mask) if side == "left" else (ids + fill, mask + fill)
    return {"input_ids": torch.tensor([row]), "attention_mask": torch.tensor([mask])}


@pytest.mark.parametrize("side", ["left", "right"])
def test_j1_masked_tokens_of_an_encoding_do_not_count(model, plain, side):
    """Seen failing without the mask: the hidden states are off by more than 1, and there are 9 of them."""
    with model.trace(padded(plain, PARIS, side)):
        hidden = model.layers_output[3].save()
        logits = model.logits.save()
    ran = plain.run(PARIS)
    close(hidden, ran.sites["resid_post", 3])
    close(logits[0], ran.logits[-1])
    (output,) = model.generate(padded(plain, PARIS, side), max_tokens=3)
    assert list(output.prompt_token_ids) == plain.ids(PARIS) and generated(output) == plain.generate(PARIS, 3)


def test_j1_a_mask_that_does_not_fit_is_refused(model, plain):
    given = padded(plain, PARIS, "left")
    with pytest.raises(PromptError, match="attention_mask has 4 entries; the prompt has 9 tokens"):
        model.generate({**given, "attention_mask": torch.ones(1, 4)}, max_tokens=1)
    with pytest.raises(PromptError, match="at least one token"):
        model.generate({**given, "attention_mask": torch.zeros(1, 9)}, max_tokens=1)
