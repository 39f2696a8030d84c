"""Row F9: `progress=` of calls and of models, on vLLM and on transformers.

`test_async.py` and `test_serve_remote.py` test it on an async engine and on a server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bars import CALLS, counted

from midstream import LanguageModel, progress

pytestmark = pytest.mark.engine


@pytest.fixture(params=["engine", "hf"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("call", CALLS)
def test_a_bar_counts_the_requests_of_a_call(
    model: Any, call: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    CALLS[call](model, tmp_path, progress=True)
    assert counted(capfd.readouterr().err) == ["3/3"]


@pytest.mark.parametrize("call", CALLS)
def test_no_bar_is_shown_where_nobody_watches(
    model: Any, call: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.0)
    CALLS[call](model, tmp_path)
    assert counted(capfd.readouterr().err) == []


@pytest.mark.parametrize("call", CALLS)
def test_the_models_choice_holds_for_calls_that_make_none(
    model: Any, call: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "progress", True)
    CALLS[call](model, tmp_path / "shown")
    assert counted(capfd.readouterr().err) == ["3/3"]
    CALLS[call](model, tmp_path / "hidden", progress=False)
    assert counted(capfd.readouterr().err) == []


def test_the_constructor_takes_the_choice(hf: LanguageModel) -> None:
    assert LanguageModel(hf.module, hf.tokenizer, progress=True).progress is True
    assert hf.progress is None


def test_a_collection_of_several_parts_has_one_bar(
    model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.collecting.PART", 2)
    CALLS["collect"](model, tmp_path, progress=True)
    assert counted(capfd.readouterr().err) == ["3/3"]


def test_requests_are_counted_as_they_end(model: Any) -> None:
    from midstream import Steer
    from midstream.plan.values import Plan
    from midstream.requests.arguments import sampling
    from midstream.requests.invokes import Invoke

    plan = Plan.of(Steer("resid_post", layers=0, vector=[0.0] * model.hidden_size))
    ended: list[int] = []
    invokes = [Invoke([1, 2, 3], None, sampling({}, 2 * n), plan) for n in (1, 2, 3)]
    running = model._run(invokes)
    running.ended = ended.append
    model._finish(running.gathered())
    assert ended == [1, 1, 1]
