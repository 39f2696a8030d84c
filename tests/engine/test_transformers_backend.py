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


@pytest.fixture(scope="module")
def backend() -> Iterator[VLLM]:
    """The bundled model, run by vLLM through transformers' own modules."""
    with start(enforce_eager=True, model_impl="transformers") as model:
        yield model


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
