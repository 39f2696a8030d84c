"""The texts that activate a feature most (row O6), against a direct computation over all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain
from plan_cases import HIDDEN

from midstream import SAE, Capture, open_captures
from midstream.bundled import demo_contrast, demo_facts
from midstream.capture.consumers import CaptureInfo
from midstream.capture.directory import DirectorySink
from midstream.errors import CaptureError, MidstreamError, PlanError
from midstream.features import max_activating, plot_examples

PROMPTS = [fact["prompt"] for fact in demo_facts()[::20]] + [pair["negative"] for pair in demo_contrast()[::6]]
FEATURES, TOP = 40, 3


def numbers_of_sae() -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder and the encoder's bias. Feature 7 is dead."""
    decoder = torch.nn.functional.normalize(
        torch.randn(FEATURES, HIDDEN, generator=torch.Generator().manual_seed(0)), dim=1
    )
    bias = torch.full((FEATURES,), -20.0)
    bias[7] = -1e6
    return decoder, bias


@pytest.fixture(scope="module")
def sae() -> SAE:
    decoder, bias = numbers_of_sae()
    weights = {"W_enc": decoder.T, "b_enc": bias, "W_dec": decoder, "b_dec": torch.zeros(HIDDEN)}
    return SAE({"architecture": "standard", "d_in": HIDDEN, "d_sae": FEATURES}, weights, site="resid_post", layer=5)


@pytest.fixture
def store(model: Any, tmp_path: Path) -> Any:
    return model.collect(PROMPTS, plan=Capture("resid_post", layers=5, positions="all_prompt"), to=tmp_path / "rows")


@pytest.mark.parametrize("numbers", [1 << 26, 200])
def test_the_contexts_are_those_with_the_highest_activations(
    store: Any, sae: SAE, plain: Plain, monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    monkeypatch.setattr("midstream.features._BATCH_NUMBERS", numbers)
    examples = max_activating(store, sae, top=TOP, before=2, after=1)
    ids = [plain.ids(prompt) for prompt in PROMPTS]
    decoder, bias = numbers_of_sae()
    acts = [torch.relu(plain.run(each).sites["resid_post", 5] @ decoder.T + bias) for each in ids]
    every = torch.cat(acts)
    assert examples.tokens == len(every) and list(examples) == list(range(FEATURES))
    assert torch.allclose(examples.density, (every > 0).float().mean(0), atol=2e-2)
    assert torch.allclose(examples.highest, every.max(0).values, atol=1e-2)
    for feature in range(FEATURES):
        each = sorted(((float(a[:, feature].max()), i) for i, a in enumerate(acts)), reverse=True)[:TOP]
        expected = [value for value, _ in each if value > 0]
        found = examples[feature]
        assert torch.allclose(torch.tensor([one.activation for one in found]), torch.tensor(expected), atol=1e-2)
        assert len({one.request for one in found}) == len(found)
        for one in found:
            capture = store[one.request]
            prompt = capture.prompt_token_ids
            number = ids.index(prompt)
            at = int(acts[number][:, feature].argmax())
            first = max(at - 2, 0)
            assert (one.position, one.peak) == (at, at - first) and one.token_ids == prompt[first : at + 2]
            assert torch.allclose(one.activations, acts[number][first : at + 2, feature], atol=1e-2)
    assert not examples[7] and examples.density[7] == 0 and examples.mean[7] == 0


def test_the_columns_and_the_figure(store: Any, sae: SAE, model: Any, tmp_path: Path) -> None:
    examples = max_activating(store, sae, features=[3, 7, 11], top=5)
    frame = examples.to_dataframe(model.tokenizer)
    assert list(frame.columns) == ["feature", "density", "highest", "mean", "top_tokens", "top_context"]
    assert frame["feature"].tolist() == [3, 7, 11] and frame["top_context"][1] == ""
    one = examples[3][0]
    assert (
        frame["top_context"][0].count("«") == 1
        and f"«{model.tokenizer.decode([one.token_ids[one.peak]])}»" in frame["top_context"][0]
    )
    assert sum(count for _, count in examples.top_tokens(3)) == 5
    plot_examples(examples, 3, model.tokenizer, path=tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000
    with pytest.raises(MidstreamError, match="active in no context"):
        plot_examples(examples, 7, model.tokenizer)


def test_what_cannot_be_found_is_an_error(store: Any, sae: SAE, model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="features is"):
        max_activating(store, sae, features=[FEATURES])
    with pytest.raises(PlanError, match="3 twice"):
        max_activating(store, sae, features=[3, 3])
    other = model.collect(PROMPTS[:2], plan=Capture("mlp_out", layers=5), to=tmp_path / "other")
    with pytest.raises(CaptureError, match="no rows of resid_post"):
        max_activating(other, sae)
    plan = Capture("resid_post", layers=5, positions="all_generated")
    generated = model.collect(PROMPTS[:2], plan=plan, to=tmp_path / "generated", max_tokens=4, ignore_eos=True)
    with pytest.raises(CaptureError, match="generated tokens"):
        max_activating(generated, sae)


def test_nan_hides_no_example(sae: SAE, tmp_path: Path) -> None:
    """Seen failing: requests with a row of NaN took the places of all others."""
    sink = DirectorySink(tmp_path)
    for i in range(20):
        rows = 40 * torch.nn.functional.normalize(
            torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(i)), dim=1
        )
        rows[0] = numbers_of_sae()[0][i % 3] * (30.0 + i)
        rows[1] = float("nan") if i % 2 else rows[1]
        sink.begin(CaptureInfo(str(i), (1, 2, 3, 4)))
        sink.rows(str(i), "resid_post", 5, [0, 1, 2, 3], rows)
        sink.end(str(i), None)
    sink.close()
    examples = max_activating(open_captures(tmp_path), sae, features=[0, 1, 2], top=10)
    assert [one.request for one in examples[0]] == ["18", "15", "12", "9", "6", "3", "0"]
    assert examples.highest.isfinite().all()
