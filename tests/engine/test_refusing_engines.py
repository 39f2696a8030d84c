"""Engines that take no trace (row F3): one that was started without traces allowed, and one that is closed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engines import start

from midstream.errors import EngineClosedError, InterventionErrorGroup, TracesNotAllowedError

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

PARIS = "The capital of France is"
EIFFEL = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module")
def closed_to_traces() -> Iterator[VLLM]:
    """An engine that was started without traces allowed, as a server is by default."""
    from midstream.settings import Settings
    from midstream.vllm import vllm_model as vllm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "Settings", lambda **given: Settings(**{**given, "allow_traces": False}))
        model = start(enforce_eager=True)
    yield model
    model.close()


def test_an_engine_without_traces_allowed_refuses_them_and_serves_on(closed_to_traces, plain):
    model = closed_to_traces
    with pytest.raises(TracesNotAllowedError, match="traces allowed"):
        with model.trace(PARIS, temperature=0.0):
            logits = model.logits.save()  # noqa: F841
    with pytest.raises(InterventionErrorGroup):
        model.run(lambda m: m.logits, [PARIS, EIFFEL], max_tokens=3)
    outputs = model.generate([PARIS, EIFFEL], max_tokens=3, temperature=0.0)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [plain.generate(p, 3) for p in (PARIS, EIFFEL)]
    assert not any(n for gauges in model.gauges() for name, n in gauges.items() if name != "queued_bytes")


def test_a_closed_engine(closed_to_traces):
    model = closed_to_traces
    model.close()
    model.close()
    with pytest.raises(EngineClosedError, match="closed") as raised:
        with model.trace(PARIS):
            model.logits.save()
    assert "SkipBlock" not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(EngineClosedError) as raised:
        try:
            raise KeyError("the caller's own")
        except KeyError:
            with model.trace(PARIS):
                model.logits.save()
    printed = "".join(traceback.format_exception(raised.value))
    assert "SkipBlock" not in printed and "the caller's own" in printed
    with pytest.raises(EngineClosedError):
        model.run(lambda m: m.logits, PARIS)
    with pytest.raises(EngineClosedError):
        model.generate(PARIS)
    with pytest.raises(EngineClosedError):
        model.gauges()
    assert repr(model) == "<VLLM, closed>"
