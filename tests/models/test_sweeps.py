"""Sweeps (rows H1 to H12) against plain transformers with hooks, on vLLM, on transformers and, with --remote, on a server."""

import math
import re
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch
from spaceless import spaceless, warned

from midstream import LanguageModel, Span
from midstream.errors import MidstreamError, ParameterError, PlanError, PromptError
from midstream.sweeps.cells import align
from midstream.sweeps.results import SweepResult

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
PAIR = (CLEAN, CORRUPT, " Paris", " Rome")
CLOSE = {"rtol": 1e-3, "atol": 2e-3}


class Oracle:
    """Patches one prompt from the run of another by hooks."""

    def __init__(self, plain, base, source, answers):
        self.plain, self.base = plain, plain.ids(base)
        self.sites = plain.run(source).sites if isinstance(source, str) else source
        self.answers = [plain.token(answer) for answer in answers]

    def grade(self, edits=None):
        logprobs = self.plain.run(self.base, edits).logits[-1].float().log_softmax(-1)
        return [float(logprobs[token]) for token in self.answers]

    def cell(self, site, layers, positions, sources=None, head=None):
        sources = positions if sources is None else sources
        edits = {}
        for layer in layers:
            rows = self.sites[site, layer]

            def write(h, rows=rows):
                for position, source in zip(positions, sources, strict=True):
                    if head is None:
                        h[position] = rows[source].reshape(-1)
                    else:
                        size = rows.shape[-1]
                        h[position, head * size : (head + 1) * size] = rows[source, head]
                return h

            edits[site, layer] = write
        return self.grade(edits)


def diff(logprobs):
    return logprobs[0] - logprobs[1]


def clear(model):
    """No run of a sweep is left. A server hears of a closed connection a moment later."""
    deadline = time.monotonic() + 10
    while left := [name for name in model.runs if name.startswith("sweep-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_every_cell_equals_transformers_with_hooks(model, plain, direction):
    base, source = (CORRUPT, CLEAN) if direction == "denoising" else (CLEAN, CORRUPT)
    oracle = Oracle(plain, base, source, PAIR[2:])
    sites = ["resid_post", "mlp_out", "attn_out"]
    result = model.sweep(*PAIR, sites=sites, layers=[0, 3, 4, 7], direction=direction)
    for site in sites:
        expected = [[diff(oracle.cell(site, [layer], [p])) for p in range(5)] for layer in (0, 3, 4, 7)]
        np.testing.assert_allclose(result.values[site], expected, **CLOSE)
    assert result.baseline == pytest.approx(diff(oracle.grade()), abs=1e-3)
    assert result.summary.void == 0 and result.summary.cells == 60
    clear(model)


def test_metrics_are_graded_by_token_id(model, plain):
    def probability(answer, foil):
        return math.exp(answer) - math.exp(foil)

    oracle = Oracle(plain, CORRUPT, CLEAN, PAIR[2:])
    clean, corrupt = diff(Oracle(plain, CLEAN, CLEAN, PAIR[2:]).grade()), diff(oracle.grade())
    cells = [oracle.cell("resid_post", [4], [p]) for p in range(5)]
    for metric, expected in (
        ("logprob", [cell[0] for cell in cells]),
        ("logit_diff", [diff(cell) for cell in cells]),
        ("recovered", [(diff(cell) - corrupt) / (clean - corrupt) for cell in cells]),
        (probability, [probability(*cell) for cell in cells]),
    ):
        result = model.sweep(*PAIR, layers=4, metric=metric)
        np.testing.assert_allclose(result.values["resid_post"][0], expected, **CLOSE)
    recovered = [(diff(cell) - corrupt) / (clean - corrupt) for cell in cells]
    np.testing.assert_allclose(model.sweep(*PAIR, layers=4).recovered["resid_post"][0], recovered, **CLOSE)
    result = model.sweep(CLEAN, CORRUPT, plain.token(" Paris"), layers=4, metric="logprob")
    np.testing.assert_allclose(result.values["resid_post"][0], [cell[0] for cell in cells], **CLOSE)


def test_prompts_of_other_lengths_are_aligned_by_both_ends_and_the_middle_is_skipped(model, plain):
    clean, corrupt = "The capital of France is", "The capital of the country Italy is"
    base, source = plain.ids(corrupt), plain.ids(clean)
    assert len(base) > len(source)
    result = model.sweep(clean, corrupt, " Paris", " Rome", layers=[2, 5])
    way = align(base, source)
    skipped = [i for i, p in enumerate(way) if p is None]
    assert result.outline.pairs[0].skipped == skipped and skipped
    oracle = Oracle(plain, corrupt, clean, PAIR[2:])
    for row, layer in enumerate((2, 5)):
        for position, there in enumerate(way):
            value = result.values["resid_post"][row, position]
            if there is None:
                assert math.isnan(value)
            else:
                expected = diff(oracle.cell("resid_post", [layer], [position], [there]))
                assert value == pytest.approx(expected, abs=2e-3)
    frame = result.to_dataframe()
    assert set(frame[frame.position.isna()].void) == {
        "the two prompts have different tokens here, and cannot be aligned"
    }
    assert list(frame.layer) == [2] * len(base) + [5] * len(base)
    assert list(frame.position.dropna()) == [i for i, p in enumerate(way) if p is not None] * 2
    assert f"2 x {len(base)}, {len(skipped)} of {len(base)} positions without a counterpart, 1 pair" in repr(result)
    assert result.summary.cells == 2 * (len(base) - len(skipped))


def test_alignment_of_token_ids():
    assert align([1, 2, 3], [4, 5, 6]) == [0, 1, 2]
    assert align([1, 2, 9, 3], [1, 2, 3]) == [0, 1, None, 2]
    assert align([1, 2, 3], [1, 2, 8, 9, 3]) == [0, 1, 4]
    assert align([1, 1], [1, 1, 1]) == [0, 1]
    assert align([5, 1], [6, 7, 1]) == [None, 2]


def test_positions_are_numbers_and_text_in_groups(model, plain):
    oracle = Oracle(plain, CORRUPT, CLEAN, PAIR[2:])
    result = model.sweep(*PAIR, layers=[1, 5], positions=[Span("capital of"), " France", -1])
    groups = [[1, 2], [3], [4]]  # France stands in the clean prompt, and Italy has its place
    expected = [[diff(oracle.cell("resid_post", [layer], group)) for group in groups] for layer in (1, 5)]
    np.testing.assert_allclose(result.values["resid_post"], expected, **CLOSE)
    together = model.sweep(*PAIR, layers=[1, 5], positions="together")
    assert together.values["resid_post"].shape == (2, 1)
    assert together.values["resid_post"][0, 0] == pytest.approx(
        diff(oracle.cell("resid_post", [1], [0, 1, 2, 3, 4])), abs=2e-3
    )
    named = model.sweep(*PAIR, layers=[1], positions={"subject": " Italy", "last": -1})
    assert [column.label for column in named.outline.grid.columns] == ["subject", "last"]


def test_heads_are_patched_one_by_one(model, plain):
    oracle = Oracle(plain, CORRUPT, CLEAN, PAIR[2:])
    result = model.sweep(*PAIR, sites="attn_z", heads="all", layers=[3, 4], positions=[-1])
    expected = [[[diff(oracle.cell("attn_z", [layer], [4], head=head))] for head in range(4)] for layer in (3, 4)]
    assert result.values["attn_z"].shape == (2, 4, 1)
    np.testing.assert_allclose(result.values["attn_z"], expected, **CLOSE)


def test_layers_with_different_numbers_of_heads_are_not_swept_together(hf, monkeypatch):
    """Seen failing: the heads that only some layers have were left out."""
    facts = hf.facts
    changed = replace(facts, head_dims={**facts.head_dims, ("attn_z", 4): facts.head_dims["attn_z", 4] // 2})
    monkeypatch.setattr(type(hf), "facts", property(lambda self: changed))
    with pytest.raises(ParameterError, match=r"different numbers of heads, \[4, 8\]"):
        hf.sweep(*PAIR, sites="attn_z", heads="all", layers=[3, 4], positions=[-1])
    assert hf.sweep(*PAIR, sites="attn_z", heads=[3], layers=[3], positions=[-1]).values["attn_z"].shape == (1, 1, 1)


def test_ablations_by_zeros_and_by_the_mean(model, plain):
    sites = plain.run(CLEAN).sites
    for source in ("zeros", "mean"):
        rows = {
            key: (torch.zeros_like(h) if source == "zeros" else h.mean(0).expand_as(h))
            for key, h in sites.items()
            if key[0] == "mlp_out"
        }
        oracle = Oracle(plain, CLEAN, rows, PAIR[2:])
        result = model.sweep(CLEAN, None, " Paris", " Rome", sites="mlp_out", layers=[0, 4], source=source)
        expected = [[diff(oracle.cell("mlp_out", [layer], [p])) for p in range(5)] for layer in (0, 4)]
        np.testing.assert_allclose(result.values["mlp_out"], expected, **CLOSE)
        assert np.isnan(result.recovered["mlp_out"]).all()


def test_several_pairs_have_a_mean_a_standard_error_and_an_interval(model):
    pairs = [
        ("The capital of France is", "The capital of Italy is", " Paris", " Rome"),
        ("The capital of Spain is", "The capital of Germany is", " Madrid", " Berlin"),
        ("The capital of Japan is", "The capital of China is", " Tokyo", " Beijing"),
    ]
    clean, corrupt, answers, foils = map(list, zip(*pairs, strict=True))
    result = model.sweep(clean, corrupt, answers, foils, layers=[2, 6], positions={"country": 3, "last": -1})
    alone = [model.sweep(*pair, layers=[2, 6], positions=[3, -1]).values["resid_post"] for pair in pairs]
    np.testing.assert_allclose(result.by_pair["resid_post"], alone, **CLOSE)
    np.testing.assert_allclose(result.values["resid_post"], np.mean(alone, 0), **CLOSE)
    np.testing.assert_allclose(result.standard_error["resid_post"], np.std(alone, 0, ddof=1) / 3**0.5, rtol=1e-2)
    low, high = result.interval()["resid_post"]
    assert (np.min(alone, 0) - 1e-2 <= low).all() and (low <= result.values["resid_post"]).all()
    assert (result.values["resid_post"] <= high).all() and (high <= np.max(alone, 0) + 1e-2).all()
    clear(model)


def test_the_noise_floor_is_that_of_the_baseline_and_of_identity_patches(model):
    result = model.sweep(*PAIR)
    kinds = [noise.kind for noise in result.noise]
    assert kinds.count("baseline") == 2 and kinds.count("identity") == 6
    assert result.noise_floor < 1e-3
    values, noise = result.values["resid_post"], result.is_noise["resid_post"]
    assert noise[7, :4].all(), "the last layer's other positions reach no logits of the last one"
    assert not noise[0, 3] and not noise[7, 4]
    assert (noise == (np.abs(values - result.baseline) <= result.noise_floor)).all()


def test_cells_come_one_by_one_and_leaving_the_loop_ends_the_sweep(model):
    stream = model.sweep(*PAIR, stream=True)
    seen = [cell for cell, _ in zip(stream, range(3), strict=False)]
    assert len(seen) == 3 and all(cell.value is not None for cell in seen)
    assert stream.result.summary is None and stream.result.count >= 3
    stream.close()
    assert list(stream) == []
    clear(model)


def test_a_figure_fills_while_cells_come(hf, monkeypatch):
    """IPython itself is not here: what it would show is counted."""
    pixels = []

    class Shown:
        def update(self, figure):
            figure.canvas.draw()
            grid = figure.axes[0].images[0].get_array()
            pixels.append(int((~np.ma.getmaskarray(np.ma.masked_invalid(grid))).sum()))

    shell = ModuleType("IPython")
    shell.version_info, shell.get_ipython = (8, 24), lambda: None  # matplotlib asks for them
    monkeypatch.setitem(sys.modules, "IPython", shell)
    display = ModuleType("IPython.display")
    display.display = lambda figure, display_id: Shown()
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    result = hf.sweep(*PAIR, stream=True).draw(seconds=0.0)
    assert result.summary.cells == 40
    assert pixels == sorted(pixels) and pixels[0] == 1 and pixels[-1] == 40


def test_coarse_windows_come_first_and_then_the_best_cells(model, plain):
    result = model.sweep(*PAIR, coarse=(4, 2), best=1)
    oracle = Oracle(plain, CORRUPT, CLEAN, PAIR[2:])
    windows = [[[0, 1], [2, 3], [4]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    expected = [[diff(oracle.cell("resid_post", layers, group)) for group in windows[0]] for layers in windows[1]]
    np.testing.assert_allclose(result.coarse.values["resid_post"], expected, **CLOSE)
    row, column = np.unravel_index(np.argmax(result.coarse.effects["resid_post"]), (2, 3))
    fine = result.values["resid_post"]
    inside = np.zeros_like(fine, bool)
    inside[4 * row : 4 * row + 4, windows[0][column]] = True
    assert (~np.isnan(fine) == inside).all()
    layer, position = np.argwhere(inside)[0]
    assert fine[layer, position] == pytest.approx(diff(oracle.cell("resid_post", [layer], [position])), abs=2e-3)


def test_results_are_saved_and_loaded_and_shown(model, tmp_path):
    result = model.sweep(*PAIR)
    result.save(tmp_path / "sweep.npz")
    loaded = SweepResult.load(tmp_path / "sweep.npz")
    np.testing.assert_array_equal(loaded.values["resid_post"], result.values["resid_post"])
    assert loaded.outline == result.outline and loaded.summary == result.summary and repr(loaded) == repr(result)
    frame = loaded.to_dataframe()
    assert len(frame) == 40
    cell = frame[(frame.layer == 2) & (frame.position == 3)].iloc[0]
    assert cell.value == result.values["resid_post"][2, 3] and cell.token == " Italy" and cell.void is None
    best = result.best(1)[0]
    assert best.token == " Italy" and best.positions == (3,) and best.recovered > 0.99
    assert [each.token for each in result.path()] == [" Italy"] * 4 + [best_of_layer_4(result)] + [" is"] * 3
    lines = result.show().splitlines()
    assert len(lines) == 9 and "' Italy'" in lines[0] and lines[-1].split()[0] == "0"
    assert "\x1b[" in result.show(colour=True)


def test_several_pairs_and_sites_are_shown(hf):
    prompts = ["The capital of France is", "The capital of Spain is"], ["The capital of Italy is"] * 2
    result = hf.sweep(*prompts, " Paris", " Rome", sites=["resid_post", "mlp_out"], layers=[2, 5])
    frame = result.to_dataframe()
    last = frame[(frame.site == "mlp_out") & (frame.layer == 5) & (frame.position == 3)]
    assert list(last.token) == [" Italy", " Italy"] and list(last.pair) == [0, 1]
    noising = hf.sweep(*prompts, " Paris", " Rome", layers=[2], positions=[3], direction="noising").to_dataframe()
    assert list(noising.token) == [" France", " Spain"] and len(set(noising["column"])) == 1
    text = result.show()
    assert text == f"resid_post\n{result.show('resid_post')}\n\nmlp_out\n{result.show('mlp_out')}"
    with pytest.raises(ParameterError, match="Give one of"):
        result.plot()


def test_columns_that_differ_by_pair_are_named_by_their_positions(hf):
    """They were named "3", like a token. A name, the same tokens in all pairs, and what the caller gave go before numbers."""

    def labels(*args, **options):
        return [
            column.label for column in hf.sweep(*args, " Paris", " Rome", layers=[2], **options).outline.grid.columns
        ]

    clean = ["The capital of France is", "The capital of Spain is"]
    corrupt = ["The capital of Italy is", "The capital of Germany is"]
    assert labels(clean, corrupt) == ["The", " capital", " of", "position 3", " is"]
    assert labels(clean, corrupt, positions=[3, -2, 4]) == ["position 3", "position 3", " is"]
    assert labels(clean, corrupt, positions={"country": 3}) == ["country"]
    longer = ["In 2019, the capital of Spain is", "The capital of France is"]
    assert labels(longer, longer, positions=[-2, -1]) == ["position -2", " is"]
    starts = ["The capital of France is", "France has a capital,"]
    assert labels(starts, starts, positions=["France", " capital"]) == ["France", " capital"]
    windows = hf.sweep(clean, corrupt, " Paris", " Rome", layers=[2, 3], coarse=(2, 2), best=1).coarse
    assert [column.label for column in windows.outline.grid.columns] == ["The capital", "positions 2 to 3", " is"]
    frame = windows.to_dataframe()
    assert list(frame[frame.pair == 1]["column"]) == ["The capital", "positions 2 to 3", " is"]
    assert windows.best(3)[0].token in ("positions 2 to 3", " is")
    ticks = [label.get_text() for label in windows.plot().get_xticklabels()]
    assert ticks == ["The capital", "positions 2 to 3", "␣is"]
    assert "'positions 2 to 3'" in windows.show()


def test_a_figure_of_heads_and_positions_shows_one_of_either(hf):
    """Each figure has the numbers that a sweep over that head or position alone has."""
    options = {"sites": "attn_z", "heads": [1, 3], "layers": [2, 5]}
    result = hf.sweep(*PAIR, **options, positions=[3, -1, " of"])
    values = result.values["attn_z"]

    def drawn(ax):
        return (
            ax.images[0].get_array().filled(np.nan),
            [label.get_text() for label in ax.get_xticklabels()],
            ax.get_xlabel(),
        )

    for position, column, label in (
        (3, 0, " Italy"),
        (" Italy", 0, " Italy"),
        (-1, 1, " is"),
        (4, 1, " is"),
        (" of", 2, " of"),
    ):
        numbers, ticks, xlabel = drawn(result.plot(position=position))
        np.testing.assert_allclose(numbers, values[:, :, column], rtol=1e-6)
        assert ticks == ["1", "3"] and xlabel == f"head, patched at {label.replace(' ', '␣')}"
    alone = hf.sweep(*PAIR, **{**options, "heads": [3]}, positions=[3, -1, " of"])
    for ax in (result.plot(head=3), alone.plot()):
        numbers, ticks, xlabel = drawn(ax)
        np.testing.assert_allclose(numbers, alone.values["attn_z"][:, 0], **CLOSE)
        assert ticks == ["␣Italy", "␣is", "␣of"] and xlabel == "patched at head 3"
    dots = result.plot(head=1).collections[0].get_offsets()
    assert len(dots) == result.is_noise["attn_z"][:, 0].sum()
    for text, given in (
        (r"2 heads and 3 columns.* head=, from 1, 3; or position=, from ' Italy', ' is', ' of'", {}),
        ("2 heads and 3 columns", {"head": 1, "position": 3}),
        ("head is 2. Heads of this sweep: 1, 3", {"head": 2}),
        ("position is 0. Columns of this sweep: ' Italy'", {"position": 0}),
        ("position is 'Italy'. Columns", {"position": "Italy"}),
    ):
        with pytest.raises(ParameterError, match=text):
            result.plot(**given)
    with pytest.raises(ParameterError, match="head is 1, and this sweep has no heads"):
        hf.sweep(*PAIR, layers=[2]).plot(head=1)
    twice = hf.sweep("A of of", "B of of", " Paris", " Rome", **options)
    with pytest.raises(ParameterError, match="2 columns of this sweep have this label: give its number"):
        twice.plot(position=" of")


def test_what_no_figure_can_show_is_refused_before_a_cell_runs(hf, monkeypatch):
    display = ModuleType("IPython.display")
    display.display = lambda figure, display_id: None
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    stream = hf.sweep(*PAIR, sites="attn_z", heads="all", stream=True)
    with pytest.raises(ParameterError, match="4 heads and 5 columns"):
        stream.draw()
    assert stream.result.count == 0 and list(stream) == []
    clear(hf)


def test_two_sweeps_are_subtracted_cell_by_cell(hf):
    prompts = ["The capital of France is", "The capital of Spain is"], ["The capital of Italy is"] * 2
    one = hf.sweep(*prompts, " Paris", " Rome")
    two = hf.sweep(*prompts, " Paris", " Rome", source="zeros", direction="denoising")
    less = one - two
    np.testing.assert_allclose(
        less.values["resid_post"], one.values["resid_post"] - two.values["resid_post"], atol=1e-9
    )
    np.testing.assert_allclose(
        less.recovered["resid_post"], one.recovered["resid_post"] - two.recovered["resid_post"], atol=1e-9
    )
    assert less.baseline == 0 and less.noise_floor == one.noise_floor + two.noise_floor
    assert (less.is_noise["resid_post"] == (np.abs(less.values["resid_post"]) <= less.noise_floor)).all()
    low, high = less.interval()["resid_post"]
    pairs = less.by_pair["resid_post"]
    np.testing.assert_allclose(
        low, pairs.min(0), atol=1e-12
    )  # of two pairs, a quarter of the draws has one of them alone
    np.testing.assert_allclose(high, pairs.max(0), atol=1e-12)
    assert "~" in (one - one).show() and not np.any((one - one).values["resid_post"])
    assert max(abs(cell.effect) for cell in less.best(1)) == np.nanmax(np.abs(less.effects["resid_post"]))
    with pytest.raises(ParameterError, match="same direction"):
        one - hf.sweep(*prompts, " Paris", " Rome", source="zeros")
    with pytest.raises(ParameterError, match="same grid"):
        one - hf.sweep(*prompts, " Paris", " Rome", layers=[1])
    with pytest.raises(MidstreamError, match="Save the two"):
        less.save("less.npz")


def test_the_interval_of_recovery_needs_no_second_sweep(hf):
    prompts = ["The capital of France is", "The capital of Spain is"], ["The capital of Italy is"] * 2
    result = hf.sweep(*prompts, " Paris", " Rome", layers=[3])
    again = SweepResult(result.outline, "recovered")
    again.logprobs, again.clean, again.corrupt = result.logprobs, result.clean, result.corrupt
    found = result.interval(recovered=True)["resid_post"]
    np.testing.assert_array_equal(found, again.interval()["resid_post"])
    assert (found != result.interval()["resid_post"]).any()


def check_layers_upwards(ax, values):
    """The first layer is at the bottom of the figure, and the cells at the height of a layer's label are those of the layer."""
    (image,), heights = ax.images, {}
    for tick, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True):
        points = [ax.transData.transform((column, tick)) for column in range(values.shape[1])]
        heights[int(label.get_text())] = points[0][1]  # in pixels, upwards
        cells = [image.get_cursor_data(SimpleNamespace(x=x, y=y)) for x, y in points]
        np.testing.assert_allclose(np.array(cells, float), values[int(label.get_text())], rtol=1e-5)
    assert sorted(heights) == sorted(heights, key=heights.get) == list(range(len(values)))


def test_the_figure_is_white_at_the_baseline_and_its_bar_ends_at_cells(hf):
    for metric, direction in (("logit_diff", "denoising"), ("recovered", "noising")):
        result = hf.sweep(*PAIR, metric=metric, direction=direction)
        ax, values = result.plot(), result.values["resid_post"]
        low, high = ax.images[0].get_clim()
        assert (low + high) / 2 == pytest.approx(result.baseline, abs=1e-5) and ax.images[0].get_cmap().name == "RdBu"
        (bar,) = [other for other in ax.figure.axes if other is not ax]
        assert bar.get_ylim() == pytest.approx((values.min(), values.max()), abs=1e-4)
        check_layers_upwards(ax, values)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2", "mixtral"])
def test_cells_of_random_models_equal_hooks_on_the_layers(name, tmp_path_factory):
    path = str(tiny_models.build(name, tmp_path_factory.getbasetemp()))
    model = LanguageModel(path, dtype=torch.float32)
    layers = model.module.transformer.h if name == "gpt2" else model.module.model.layers
    clean, corrupt, tokens = [5, 9, 30, 7], [5, 9, 31, 7], [11, 12]
    result = model.sweep(clean, corrupt, *tokens)

    def run(ids, layer=None, write=None):
        seen = {}

        def hook(i, output):
            h = output[0] if isinstance(output, tuple) else output
            seen[i] = h[0].clone()
            if i == layer:
                h[0, write[0]] = write[1]

        handles = [each.register_forward_hook(lambda *a, i=i: hook(i, a[2])) for i, each in enumerate(layers)]
        with torch.no_grad():
            logits = model.module(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        for handle in handles:
            handle.remove()
        return diff(logits.log_softmax(-1)[tokens].tolist()), seen

    rows = run(clean)[1]
    expected = [[run(corrupt, i, (p, rows[i][p]))[0] for p in range(4)] for i in range(len(layers))]
    np.testing.assert_allclose(result.values["resid_post"], expected, rtol=1e-4, atol=1e-4)
    assert result.noise_floor < 1e-4


def best_of_layer_4(result):
    column = int(np.argmax(result.recovered["resid_post"][4]))
    return result.outline.grid.columns[column].label


def test_an_answer_that_lacks_its_space_is_warned_of(model, plain):
    """If its token with the space is over 100 times as likely after its own prompt."""
    text, times = spaceless(plain, CLEAN, 300, 1e4)
    (message,) = warned(lambda: model.sweep(CLEAN, CORRUPT, text, " Rome", layers=[2], positions=[3]))
    said = re.fullmatch(
        rf"answer is '{text}'\. After the clean prompt the token ' {text}' is ([\d,]+) times as likely: .* give ' {text}'\.",
        message,
    )
    assert int(said[1].replace(",", "")) == pytest.approx(times, rel=0.05)
    text, _ = spaceless(plain, CORRUPT, 300, 1e4)
    pairs = [CLEAN] * 2, [CORRUPT] * 2, [" Paris"] * 2, [" Rome", plain.tokenizer(text)["input_ids"][0]]
    (message,) = warned(lambda: model.path_patching(*pairs, layers=[6], heads=[1]))
    assert re.match(rf"foil is \d+\. After the corrupt prompt of pair 1 the token ' {text}' is ", message)
    (message,) = warned(
        lambda: [*model.sweep(CLEAN, None, "Paris", metric="logprob", source="zeros", layers=[2], stream=True)]
    )
    assert "' Paris' is more than 1,000,000 times as likely" in message


def test_an_answer_that_may_stand_without_a_space_is_not_warned_of(model, plain):
    text, _ = spaceless(plain, CLEAN, 5, 70)
    assert not warned(lambda: model.sweep(CLEAN, CORRUPT, text, " Rome", layers=[2], positions=[3]))
    assert not warned(lambda: model.sweep(*PAIR, layers=[2], positions=[3]))


def test_what_is_wrong_is_said_before_anything_runs(model):
    for error, text, changed in (
        (PromptError, r"' Paris Rome' is 2 tokens", {"answer": " Paris Rome"}),
        (PromptError, "foil is ' Paris', the same token", {"foil": " Paris"}),
        (PromptError, "needs a foil", {"foil": None}),
        (PromptError, "corrupt has 2 prompts, and clean has 1", {"corrupt": [CORRUPT, CORRUPT]}),
        (PlanError, "resid_pots", {"sites": "resid_pots"}),
        (PlanError, "layers has 11", {"layers": [11]}),
        (PlanError, "positions has 7", {"positions": [7]}),
        (PlanError, "Norway", {"positions": ["Norway"]}),
        (ParameterError, "metric is 'logits'", {"metric": "logits"}),
        (ParameterError, "heads needs sites=", {"heads": "all"}),
        (ParameterError, "heads is", {"heads": [9], "sites": "attn_z"}),
        (ParameterError, 'coarse needs positions="all"', {"coarse": (2, 2), "positions": [1]}),
        (ParameterError, "positions of one length|one length", {"clean": [CLEAN, CLEAN], "corrupt": [CORRUPT, "Rome"]}),
    ):
        given = {"clean": CLEAN, "corrupt": CORRUPT, "answer": " Paris", "foil": " Rome", **changed}
        with pytest.raises(error, match=text) as caught:
            model.sweep(**given)
        assert caught.value.field in ({*changed} if "clean" not in changed else {"positions"}), caught.value
    clear(model)
