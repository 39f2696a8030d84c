"""Traces on transformers record gradients only if their code asks for one, and keep nothing else in memory (row F2).

Gradients are compared with plain autograd. Whether a forward was recorded is read from the module that computes the logits, by a hook.
"""

from __future__ import annotations

import functools
import gc
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from midstream import LanguageModel, Steer, demo_model
from midstream.errors import InterventionError
from midstream.trace.tracer import backward

PROMPT = list(range(40, 60))
LAYER, TOKEN = 3, 7


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(demo_model(), dtype=torch.float32)


@pytest.fixture
def recorded(model: LanguageModel) -> Iterator[list[bool]]:
    """Of each forward since: whether its logits were part of a graph."""
    seen: list[bool] = []
    handle = model.module.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.requires_grad))
    yield seen
    handle.remove()
    assert all(parameter.grad is None for parameter in model.module.parameters())


@pytest.fixture(scope="module")
def expected(model: LanguageModel) -> torch.Tensor:
    """The gradient of a logit at the layer's output, by plain autograd, `[tokens, hidden]`."""
    held: list[Any] = []
    handle = model.module.model.layers[LAYER].register_forward_hook(lambda _, __, out: held.append(out))
    with torch.enable_grad():
        logits = model.module(torch.tensor([PROMPT]), use_cache=False).logits
        (found,) = torch.autograd.grad(logits[0, -1, TOKEN], held)
    handle.remove()
    return found[0]


# Forms of asking for a gradient; each returns the one above.


def by_autograd(m: Any) -> torch.Tensor:
    h = m.layers_output[LAYER]
    return torch.autograd.grad(m.logits[0, TOKEN], h)[0]


def by_backward(m: Any) -> torch.Tensor:
    h = m.layers_output[LAYER]
    h.retain_grad()
    m.logits[0, TOKEN].backward()
    return h.grad.clone()


def by_the_context(m: Any) -> torch.Tensor:
    h = m.layers_output[LAYER]
    with backward(m.logits[0, TOKEN]) as grads:
        return grads[h]


def of_a_leaf(m: Any) -> torch.Tensor:
    h = m.layers_output[LAYER].detach().requires_grad_()
    m.layers_output[LAYER] = h
    m.logits[0, TOKEN].backward()
    return h.grad.clone()


def nested(m: Any) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return by_autograd(m)

    return inner()


def with_more(number: int, m: Any) -> torch.Tensor:
    return by_autograd(m)


class Saliency:
    """Asks in methods that its call reaches."""

    def __init__(self) -> None:
        self.how = types.SimpleNamespace(own=self)

    def __call__(self, m: Any) -> torch.Tensor:
        return self.how.own.gradient(m)

    def gradient(self, m: Any) -> torch.Tensor:
        return self._by(m)

    @staticmethod
    def _by(m: Any) -> torch.Tensor:
        return helpers.by_autograd(m)


helpers = types.ModuleType("helpers")
helpers.by_autograd = by_autograd  # type: ignore[attr-defined]


def by_a_module(m: Any) -> torch.Tensor:
    return helpers.by_autograd(m)


FORMS: list[Callable[[Any], torch.Tensor]] = [
    by_autograd, by_backward, by_the_context, of_a_leaf, nested, by_a_module, functools.partial(with_more, 1), Saliency(),
    Saliency().gradient, lambda m: Saliency()(m),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: getattr(form, "__name__", type(form).__name__))
def test_code_that_asks_for_a_gradient_gets_it(
    model: LanguageModel, recorded: list[bool], expected: torch.Tensor, form: Callable[[Any], torch.Tensor]
) -> None:
    found = model.run(form, PROMPT)
    torch.testing.assert_close(found, expected)
    assert recorded == [True]


def test_blocks_that_ask_for_a_gradient_get_it(
    model: LanguageModel, recorded: list[bool], expected: torch.Tensor
) -> None:
    saliency = Saliency()
    with model.trace(PROMPT):
        h = model.layers_output[LAYER]
        with model.logits[0, TOKEN].backward():
            first = h.grad.save()
    with model.trace(PROMPT):
        second = saliency(model).save()
    with model.trace() as tracer:
        with tracer.invoke(PROMPT):
            plain = model.layers_output[LAYER].save()
        with tracer.invoke(PROMPT):
            third = by_a_module(model).save()
    for found in (first, second, third):
        torch.testing.assert_close(found, expected)
    assert recorded == [True] * 3 and plain.shape == expected.shape


def test_a_value_that_the_trace_asks_a_gradient_of_keeps_its_graph(
    model: LanguageModel, recorded: list[bool], expected: torch.Tensor
) -> None:
    with model.trace(PROMPT):
        h = model.layers_output[LAYER].save()
        h.retain_grad()
        logit = model.logits[0, TOKEN].save()
    assert model.module.lm_head.weight.grad is None
    torch.testing.assert_close(torch.autograd.grad(logit, h)[0], expected)
    assert recorded == [True]


@pytest.mark.parametrize("place", ["variable", "list", "object", "edit", "computed"])
def test_a_tensor_to_train_asks_for_its_gradient(model: LanguageModel, recorded: list[bool], place: str) -> None:
    vector = torch.zeros(model.hidden_size, requires_grad=True)
    doubled, held, owner = vector * 2, [vector], types.SimpleNamespace(vector=vector)

    def logits(m: Any) -> torch.Tensor:
        used = {"variable": lambda: vector, "list": lambda: held[0], "object": lambda: owner.vector}
        m.layers_output[LAYER] = m.layers_output[LAYER] + used.get(place, lambda: doubled / 2)()
        return m.logits

    if place == "edit":
        with model.edit() as edited:
            edited.layers_output[LAYER] = edited.layers_output[LAYER] + vector
        found = edited.run(lambda m: m.logits, PROMPT)
    else:
        found = model.run(logits, PROMPT)
    (gradient,) = torch.autograd.grad(found[0, TOKEN], vector)
    assert gradient.abs().sum() > 0 and recorded == [True]


# Code that does not.


def test_without_a_request_no_graph_is_built(model: LanguageModel, recorded: list[bool]) -> None:
    packed: list[int] = []
    weight = model.module.lm_head.weight
    direction = weight[TOKEN] - weight[TOKEN + 1]  # was computed with gradients, from the model's parameters alone
    assert direction.requires_grad

    def read(m: Any) -> Any:
        mlp = m.model.layers[LAYER].mlp.output
        lens = m.project_on_vocab(m.layers_output[LAYER])
        m.layers_output[LAYER] = m.layers_output[LAYER] + 0.1 * direction
        return lens, mlp, m.logits @ weight[: m.logits.shape[-1], :1], m.logits

    hook = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.nbytes) or t, lambda t: t)
    with hook:
        values = [*model.run(read, PROMPT)]
        with model.trace(PROMPT) as tracer:
            cache = tracer.cache(modules=[model.model.layers[LAYER].mlp])
            raw = model.model.layers[LAYER].mlp.output.save()
            values.append(model.layers_output[LAYER].save())
            result = tracer.result.save()
        values += [raw, cache[f"model.layers.{LAYER}.mlp"].output, result.logits]
        model.generate(PROMPT, plan=Steer("resid_post", layers=LAYER, vector=[0.1] * model.hidden_size), max_tokens=2)
        values.append(model(PROMPT).logits)
    assert not packed and not any(recorded) and len(recorded) == 6  # the lens is one
    assert not any(value.requires_grad for value in values)


def test_the_caller_may_turn_gradients_off(model: LanguageModel, recorded: list[bool]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        model.run(by_autograd, PROMPT)
    assert recorded == [False]


def test_a_request_that_no_name_shows_is_an_error_that_says_how(model: LanguageModel, recorded: list[bool]) -> None:
    def ask(m: Any) -> torch.Tensor:
        h = m.layers_output[LAYER]
        return getattr(getattr(torch, "autograd"), "grad")(m.logits[0, TOKEN], h)[0]  # noqa: B009

    with pytest.raises(InterventionError, match=r"write `with torch\.enable_grad\(\):`"):
        model.run(ask, PROMPT)
    assert recorded == [False]


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("way", ["run", "trace", "module", "part"])
def test_saved_rows_hold_their_own_bytes(model: LanguageModel, way: str) -> None:
    """Seen: 40 rows of 1 KB held 980 MB, since each kept the graph of its forward; or the whole tensor of which it is a row."""
    prompt, rows = [5 + i % 300 for i in range(200)], list[torch.Tensor]()
    model.run(lambda m: m.logits, prompt)
    before = resident()
    for _ in range(40):
        if way == "run":
            rows.append(model.run(lambda m: m.layers_output[LAYER][-1], prompt))
        elif way == "part":
            rows.append(model.run(lambda m: (m.layers_output[LAYER].repeat(1, 8) * 2)[-1, :256], prompt))
        else:
            with model.trace(prompt):
                if way == "module":
                    row = model.model.layers[LAYER].mlp.output[0, -1].save()
                else:
                    row = model.layers_output[LAYER][-1].save()
            rows.append(row)
    assert all(row.untyped_storage().nbytes() == 1024 for row in rows)
    assert resident() - before < 30e6  # and not 40 graphs, or 40 tensors of 1.6 MB
