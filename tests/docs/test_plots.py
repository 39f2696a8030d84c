"""Issue 2, point 10: figures for notebooks.

What is drawn is read back off the Axes; the logit lens is checked against plain transformers.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.errors import MidstreamError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

from midstream.plots import (  # noqa: E402
    LogitLens,
    logit_lens,
    plot_heatmap,
    plot_lines,
    plot_logit_lens,
    plot_token_scores,
    show,
)

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(autouse=True)
def _close_figures() -> Any:
    yield
    pyplot.close("all")


def drawn_values(ax: Any) -> torch.Tensor:
    return torch.as_tensor(ax.images[0].get_array().filled(float("nan")))


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_heatmap_draws_the_values() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    ax = plot_heatmap(values, ["The", " city", " of"], [0, 1], title="t", xlabel="token", label="logit")
    assert torch.equal(drawn_values(ax).float(), values)
    assert (ticks(ax.xaxis), ticks(ax.yaxis)) == (["The", "␣city", "␣of"], ["0", "1"])
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("t", "token", "layer")
    assert not ax.yaxis_inverted()  # the first row at the bottom


@pytest.mark.parametrize(
    "values", [[[1, 2]], ((1.0, 2.0),), torch.tensor([[1.0, 2.0]]).numpy(), torch.ones(1, 2).bfloat16()]
)
def test_heatmap_takes_lists_arrays_and_tensors(values: Any) -> None:
    assert plot_heatmap(values, "ab", "c").images


def test_lines_draw_the_curves(tmp_path: Path) -> None:
    """Issue 3, point 10: a steering vector's effect against its scale."""
    ax = plot_lines(
        [-1, 0, 2], {"film": torch.tensor([0.1, 0.5, 1.0]), "book": [0, 1, 2]}, "t", xlabel="scale", ylabel="p"
    )
    assert [list(line.get_xdata()) for line in ax.lines] == [[-1, 0, 2], [-1, 0, 2]]
    assert [list(line.get_ydata()) for line in ax.lines] == [pytest.approx([0.1, 0.5, 1.0]), [0, 1, 2]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["film", "book"]
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("t", "scale", "p")
    assert plot_lines(range(2), [3, 4], path=tmp_path / "lines.png").get_legend() is None
    assert (tmp_path / "lines.png").stat().st_size > 1000


def luminance(line: Any) -> float:
    return float(torch.tensor(matplotlib.colors.to_rgb(line.get_color())) @ torch.tensor([0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("names", [[6, 0, 3], ["layer 6", "layer 0", "layer 3"]])
def test_lines_of_layers_have_colours_in_the_layers_order(names: list[Any]) -> None:
    last, first, middle = plot_lines(range(2), {name: [0, 1] for name in names}).lines
    assert luminance(first) < luminance(middle) < luminance(last) < 0.8  # visible on white


def test_lines_of_other_things_have_colours_without_an_order() -> None:
    lines = plot_lines(range(2), {"film": [0, 1], "layer 3": [1, 2]}).lines
    colours = [matplotlib.colors.to_hex(line.get_color()) for line in lines]
    assert colours == [matplotlib.colors.to_hex(each) for each in ("C0", "C1")]


@pytest.mark.parametrize("count", [1, 3, 32])
def test_the_legend_is_beside_the_lines(tmp_path: Path, count: int) -> None:
    ax = plot_lines(range(3), {f"layer {each}": [1, 0, 1] for each in range(count)})
    ax.figure.canvas.draw()
    legend, plot, figure = (each.get_window_extent() for each in (ax.get_legend(), ax, ax.figure))
    assert legend.x0 >= plot.x1 and legend.x1 <= figure.x1 + 1 and legend.y1 - legend.y0 <= figure.y1
    assert plot.width > figure.width / 3


def test_the_mark_of_a_space_is_a_letter_of_the_font() -> None:
    font = matplotlib.font_manager.get_font(matplotlib.font_manager.findfont("DejaVu Sans"))
    assert font.get_char_index(ord(show(" of")[0]))


@pytest.mark.parametrize("y", [[1.0, 2.0], {"a": [1.0, 2.0, 3.0, 4.0]}, [[1.0, 2.0, 3.0]], []])
def test_lines_say_what_does_not_fit(y: Any) -> None:
    with pytest.raises(MidstreamError, match=r"points"):
        plot_lines(range(3), y)


def test_heatmap_is_diverging_about_zero_where_signs_differ() -> None:
    low, high = plot_heatmap([[-1.0, 3.0]], "ab", "c").images[0].get_clim()
    assert (low, high) == (-3.0, 3.0)
    assert plot_heatmap([[1.0, 3.0]], "ab", "c").images[0].get_clim() == (1.0, 3.0)


def test_heatmap_leaves_void_cells_grey() -> None:
    ax = plot_heatmap([[float("nan"), 1.0]], "ab", "c")
    image = ax.images[0]
    assert image.cmap(image.norm(image.get_array()))[0, 0].tolist()[:3] == pytest.approx([211 / 255] * 3)


def test_heatmap_with_many_tokens_has_labels_that_do_not_touch(tmp_path: Path) -> None:
    ax = plot_heatmap(torch.rand(32, 300), [f" token{i}" for i in range(300)], range(32), path=tmp_path / "a.png")
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    line = boxes[0].height / 8  # slanted: what matters is the distance of the lines
    assert len(boxes) > 50
    assert all(b.x1 - a.x1 > line for a, b in pairwise(boxes))
    assert ax.figure.get_size_inches()[0] <= 14


def test_heatmap_writes_a_file_and_closes_the_figure(tmp_path: Path) -> None:
    plot_heatmap([[1.0]], "a", "b", path=tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not pyplot.get_fignums()


def test_heatmap_draws_into_given_axes() -> None:
    _, (left, right) = pyplot.subplots(1, 2)
    assert plot_heatmap([[1.0]], "a", "b", ax=right) is right
    assert not left.images


@pytest.mark.parametrize(
    ("values", "words"), [([[1.0, 2.0]], "1 for columns"), ([1.0, 2.0], r"\[2\] was given"), ([], r"\[0\]")]
)
def test_heatmap_says_what_does_not_fit(values: Any, words: str) -> None:
    with pytest.raises(MidstreamError, match=words):
        plot_heatmap(values, ["a"], ["b"])


def test_sweep_draws_layers_upwards_and_closes_a_figure_that_it_writes(hf: Any, tmp_path: Path) -> None:
    """Row H9."""
    pair = ("The capital of France is", "The capital of Italy is", " Paris", " Rome")
    result = hf.sweep(*pair, layers=[0, 5, 7], positions=[" Italy", -1], progress=False)
    ax = result.plot(recovered=True, path=tmp_path / "sweep.png")
    assert not pyplot.get_fignums() and (tmp_path / "sweep.png").stat().st_size > 1000
    assert (ticks(ax.xaxis), ticks(ax.yaxis)) == (["␣Italy", "␣is"], ["0", "5", "7"]) and not ax.yaxis_inverted()
    recovered = torch.tensor(result.recovered["resid_post"]).float()
    assert torch.equal(drawn_values(ax).float(), recovered)
    low, high = ax.images[0].get_clim()
    assert -low == high == pytest.approx(1.0, abs=1e-3)  # the same colours in every figure of recovered


def test_sweep_draws_the_metric_or_its_effects_and_says_which(hf: Any) -> None:
    pair = ("The capital of France is", "The capital of Italy is", " Paris", " Rome")
    options = {"layers": [5, 6], "heads": [0, 3], "progress": False}
    direct = hf.path_patching(*pair, **options)
    drawn = {name: direct.plot(**{name: True} if name else {}) for name in ("", "effects", "recovered")}
    labels = {name: ax.figure.axes[1].get_ylabel() for name, ax in drawn.items()}
    assert labels == {
        "": "logit difference after the patch",
        "effects": "effect: share of the way from clean to corrupt",
        "recovered": "recovered (0: corrupt, 1: clean)",
    }
    expected = {"": direct.values, "effects": direct.effects, "recovered": direct.recovered}
    for name, ax in drawn.items():
        torch.testing.assert_close(drawn_values(ax), torch.tensor(expected[name]["attn_z"][..., 0]), check_dtype=False)
    at_is = hf.path_patching(*pair, positions=[-1], **options).plot(ax=pyplot.subplots()[1])
    assert at_is.get_xlabel() == "head, patched at ␣is"
    assert drawn[""].get_xlabel() == "head, patched at all positions"
    low, high = drawn["effects"].images[0].get_clim()
    assert -low == high == pytest.approx(1.0, abs=1e-3)
    zeros = hf.sweep(pair[0], None, *pair[2:], source="zeros", layers=[5], positions=[-1], progress=False)
    assert zeros.plot(effects=True).figure.axes[1].get_ylabel() == "effect: change of the logit difference"
    with pytest.raises(MidstreamError, match="has one of them"):
        direct.plot(effects=True, recovered=True)


def lens_of(tokens: int, layers: int = 2) -> LogitLens:
    return LogitLens(
        [f" t{i}" for i in range(tokens)],
        [[f"{layer}.{i}" for i in range(tokens)] for layer in range(layers)],
        torch.rand(layers, tokens),
    )


def test_lens_has_layers_upwards_and_tokens_in_the_cells() -> None:
    lens = lens_of(3)
    (ax,) = plot_logit_lens(lens)
    assert ticks(ax.yaxis) == ["0", "1"] and not ax.yaxis_inverted()
    assert torch.equal(drawn_values(ax).float(), lens.probs_LT)
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written[0, 1] == "1.0"
    assert written[2, 0] == "0.2"


def test_lens_of_a_long_prompt_takes_several_rows() -> None:
    lens = lens_of(30)
    bands = plot_logit_lens(lens, wrap=12)
    assert [ax.get_xlabel() or len(ax.texts) for ax in bands] == [24, 24, 12]
    assert [tick for ax in bands for tick in ticks(ax.xaxis)] == [f"␣t{i}" for i in range(30)]
    assert len({ax.get_xlim() for ax in bands}) == 1  # cells of one width


def plain_lens(prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By transformers alone: hidden states, the final norm, the unembedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from midstream import demo_model

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    streams: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: streams.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(torch.tensor([AutoTokenizer.from_pretrained(demo_model())(prompt)["input_ids"]]))
        best = model.lm_head(model.model.norm(torch.stack(streams)[:, 0])).softmax(-1).max(-1)
    return best.values, best.indices


def check_lens(model: Any) -> None:
    lens = logit_lens(model, PROMPT)
    probs_LT, tokens_LT = plain_lens(PROMPT)
    torch.testing.assert_close(lens.probs_LT, probs_LT, atol=1e-4, rtol=1e-3)
    assert lens.top == [[model.tokenizer.decode([t]) for t in row] for row in tokens_LT.tolist()]
    assert "".join(lens.tokens) == PROMPT
    assert len(plot_logit_lens(model, PROMPT)) == 1


def test_lens_of_language_model(hf: Any) -> None:
    check_lens(hf)


@pytest.mark.engine
def test_lens_of_vllm(engine: Any) -> None:
    check_lens(engine)


def test_lens_without_prompt_says_so(hf: Any) -> None:
    with pytest.raises(MidstreamError, match="takes a model and a prompt"):
        plot_logit_lens(hf)


def written(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("scores", [[0.5, -2.0, 1.0], torch.tensor([[0.5], [-2.0], [1.0]]).bfloat16()])
def test_token_scores_colour_each_token_by_its_score(scores: Any) -> None:
    ax = plot_token_scores(["The", " capital", "."], scores, "t", center=0.5, label="truth")
    (boxes,) = ax.collections
    assert boxes.get_array().tolist() == [0.5, -2.0, 1.0]
    assert boxes.get_clim() == (-2.0, 3.0)  # the centre of the map is 0.5
    red, green, blue, _ = boxes.to_rgba(0.5)
    assert red == pytest.approx(green, abs=0.01) == pytest.approx(blue, abs=0.01)
    assert (written(ax), ax.get_title()) == (["The", "capital", "."], "t")
    assert [axes.get_xlabel() for axes in ax.figure.axes] == ["", "truth"]


def test_token_scores_are_legible_and_leave_tokens_without_a_score_grey() -> None:
    ax = plot_token_scores("abc", [-9.0, 0.0, float("nan")])
    assert [text.get_color() for text in ax.texts] == ["white", "black", "black"]
    ax.figure.canvas.draw()
    assert ax.collections[0].get_facecolors()[2].tolist()[:3] == pytest.approx([211 / 255] * 3)


def test_token_scores_show_newlines_tabs_and_dollars() -> None:
    ax = plot_token_scores([" $5", "\n", "\t$6", "  ", "", "\\n", "x"], range(7))
    assert written(ax) == ["$5", "\\n", "\\t$6", "", "", "\\n", "x"]
    corners = [path.vertices[0].tolist() for path in ax.collections[0].get_paths()]
    assert corners == [[0, 0], [3, 0], [0, 1], [4, 1], [6, 1], [7, 1], [9, 1]]


@pytest.mark.parametrize("count", [1, 7, 200])
def test_token_scores_wrap_lines_and_fit_into_the_figure(count: int) -> None:
    ax = plot_token_scores([" token", "isation"] * count, torch.randn(2 * count), wrap=40)
    boxes = [path.get_extents() for path in ax.collections[0].get_paths()]
    assert max(box.x1 for box in boxes) <= 40 <= ax.get_xlim()[1]
    assert len({box.y0 for box in boxes}) == -(-count // 3)
    for text, box in list(zip(ax.texts, boxes, strict=True))[:: max(1, count // 5)]:
        drawn = text.get_window_extent().transformed(ax.transData.inverted())
        assert box.x0 - 0.5 < drawn.x0 and drawn.x1 < box.x1 + 0.5


def test_token_scores_write_a_file_and_draw_into_given_axes(tmp_path: Path) -> None:
    plot_token_scores(["a"], [1.0], path=tmp_path / "a.png")
    assert not pyplot.get_fignums() and (tmp_path / "a.png").stat().st_size > 1000
    _, (left, right) = pyplot.subplots(2, figsize=(3, 3), layout="constrained")
    assert plot_token_scores(["word"] * 30, torch.zeros(30), ax=right, reach=2.0) is right
    assert not left.collections and right.collections[0].get_clim() == (-2.0, 2.0)
    assert right.texts[0].get_fontsize() < 9


@pytest.mark.parametrize(("tokens", "scores"), [("ab", [1.0]), ("ab", [[1.0, 2.0]]), ("", [])])
def test_token_scores_say_what_does_not_fit(tokens: str, scores: Any) -> None:
    with pytest.raises(MidstreamError, match=rf"was given, with {len(tokens)} tokens.*NaN"):
        plot_token_scores(tokens, scores)


def test_matplotlib_is_loaded_when_a_figure_is_drawn_and_named_when_it_is_missing() -> None:
    code = """
import sys
import midstream.plots
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    midstream.plots.plot_heatmap([[1.0]], "a", "b")
except midstream.plots.MidstreamError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "midstream[plot]" in result.stdout
