"""Row A2: vLLM's Transformers backend, whose activations are `[1, tokens, hidden]`, with several prompts in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from engines import start
from oracle import close, differs

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

PARIS = "The capital of France is"
EIFFEL = "The Eiffel Tower is in the city of"
MARY = "When Mary and John went to the store, John gave a drink to"
PROMPTS = [MARY, PARIS, EIFFEL]


@pytest.fixture(scope="module")
def backend() -> Iterator[VLLM]:
    """The bundled model, run by vLLM through transformers' own modules."""
    with start(enforce_eager=True, model_impl="transformers") as model:
        yield model


def test_reads_return_this_requests_tokens(backend, plain):
    """Seen failing with `FlatRows.start` always 0: all requests read the batch's first rows."""
    assert "[1, T, 256]" in repr(backend)

    def read(model):
        values = {"embed": model.token_embeddings}
        for i in (0, 3, 7):
            values["resid_pre", i] = model.layers_input[i]
            values["attn_in", i] = model.attentions_input[i]
            values["attn_z", i] = model.attn_z[i]
            values["attn_out", i] = model.attentions_output[i]
            values["resid_mid", i] = model.resid_mid[i]
            values["mlp_in", i] = model.mlps_input[i]
            values["mlp_act", i] = model.mlp_act[i]
            values["mlp_out", i] = model.mlps_output[i]
            values["resid_post", i] = model.layers_output[i]
        values["final_norm"] = model.final_norm
        return values, model.logits

    for prompt, (values, logits) in zip(PROMPTS, backend.run(read, PROMPTS, temperature=0.0), strict=True):
        expected = plain.run(prompt)
        for site, value in values.items():
            close(value, expected.sites[site])
        close(logits, expected.logits[-1:])


def test_writes_land_in_this_request_alone(backend, plain):
    with backend.trace(max_tokens=4, temperature=0.0) as tracer:
        with tracer.invoke(MARY):
            mary = backend.logits.save()
        with tracer.invoke(PARIS):
            for step in tracer.iter[:]:
                backend.mlps_output[3][:] = 0
                backend.layers_output[5] = backend.layers_output[5] * 0.5
                if step == 0:
                    paris = backend.logits.save()
        with tracer.invoke(EIFFEL):
            eiffel = backend.logits.save()
    edits = {("mlp_out", 3): torch.zeros_like, ("resid_post", 5): lambda h: h * 0.5}
    close(mary, plain.run(MARY).logits[-1:])
    close(paris, plain.run(PARIS, edits).logits[-1:])
    close(eiffel, plain.run(EIFFEL).logits[-1:])
    differs(paris, plain.run(PARIS).logits[-1:])
    given = [list(output.outputs[0].token_ids) for output in tracer.outputs]
    assert given == [plain.generate(MARY, 4), plain.generate(PARIS, 4, edits), plain.generate(EIFFEL, 4)]


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_in", "attn_z", "attn_out", "mlp_in", "mlp_act"])
def test_every_site_is_written_between_two_other_prompts(backend, plain, site):
    baseline = plain.run(PARIS).sites
    torch.manual_seed(0)
    value = baseline[site, 3] + torch.randn_like(baseline[site, 3])
    with backend.trace(temperature=0.0) as tracer:
        with tracer.invoke(MARY):
            mary = backend.logits.save()
        with tracer.invoke(PARIS):
            getattr(backend, site)[3] = value
            block = backend.layers_output[3].save()
            paris = backend.logits.save()
        with tracer.invoke(EIFFEL):
            eiffel = backend.logits.save()
    flat = value.flatten(1)
    if site == "resid_mid":
        edits = {("attn_out", 3): lambda h: flat - baseline["resid_pre", 3]}
    else:
        edits = {(site, 3): lambda h: flat}
    expected = plain.run(PARIS, edits)
    close(block, expected.sites["resid_post", 3])
    close(paris, expected.logits[-1:])
    close(mary, plain.run(MARY).logits[-1:])
    close(eiffel, plain.run(EIFFEL).logits[-1:])


def test_raw_modules_have_the_leading_axis_and_this_requests_tokens(backend, plain):
    """Seen failing with `FlatRows.axis` taking 0 for the only token axis: the request has the batch's 19 rows."""
    with backend.trace(temperature=0.0) as tracer:
        with tracer.invoke(MARY):
            pass
        with tracer.invoke(PARIS):
            out = backend.model.layers[3].mlp.output.save()
            backend.model.layers[4].mlp.output[:] = 0
            logits = backend.logits.save()
    assert out.shape == (1, 5, 256)
    close(out[0], plain.run(PARIS).sites["mlp_out", 3])
    close(logits, plain.run(PARIS, {("mlp_out", 4): torch.zeros_like}).logits[-1:])
