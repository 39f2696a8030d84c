"""Figures for notebooks: a heatmap of layers and positions, curves, the logit lens, and a text coloured by its tokens' scores.

    grid = [[diff(layer, position) for position in range(5)] for layer in range(8)]
    plot_heatmap(grid, tokens, range(8), title="logit difference, patched", path="patching.png")

    plot_lines(scales, {"film": effects, "book": others}, xlabel="scale", ylabel="effect", path="steering.png")

    plot_logit_lens(model, "The capital of France is")       # runs one trace
    lens = logit_lens(model, "The capital of France is")     # the numbers alone
    plot_logit_lens(lens, path="lens.png")

    plot_token_scores(tokens, output.scores["truth"], label="score", path="scores.png")

The functions draw with pyplot: a notebook shows the figure once, and a script calls `pyplot.show()`. `path` is a file to write the figure
to. matplotlib is imported when a figure is drawn: `pip install "midstream[plot]"`.

Shapes: L layers, T tokens of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from midstream.errors import MidstreamError

_LONGEST_TICK, _LONGEST_CELL = 20, 12  # characters of a label at an axis, and of a text in a cell
_LONGEST_LEGEND = 16  # curves in a column of the legend
_WIDEST, _HIGHEST = 14.0, 20.0  # inches: a notebook scales larger figures down
_HIGHEST_TEXT = 400.0  # inches: a file at 150 dpi may have 65,536 lines of pixels
_CHARACTER = 9 * 0.602 / 72  # inches: the width of matplotlib's monospace font at 9 points
_LINE = 0.24  # inches: the height of a line of text in this font


@dataclass(frozen=True)
class LogitLens:
    """The logit lens of one prompt.

    Attributes:
        tokens: the prompt's tokens as text, T of them.
        top: the likeliest next token after each of the T tokens, for each of L layers.
        probs_LT: the probabilities of the tokens in `top`, float32 `[layers, tokens]`.
    """

    tokens: list[str]
    top: list[list[str]]
    probs_LT: torch.Tensor


def logit_lens(model: Any, prompt: str | Sequence[int]) -> LogitLens:
    """The likeliest next token after each token of `prompt`, from the residual stream after each layer.

    See nostalgebraist, 2020, "interpreting GPT: the logit lens". Runs one trace; only the likeliest tokens leave the engine.

    Args:
        model: a `VLLM` or a `LanguageModel`.
        prompt: text or token ids.
    """
    if getattr(model, "mode", "sync") == "async":
        raise MidstreamError('logit_lens needs a VLLM of mode="sync", or a LanguageModel.')
    token_ids = model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    probs_LT, top_LT = model.run(_best_tokens, token_ids)
    decode = model.tokenizer.decode
    return LogitLens(
        tokens=[decode([token]) for token in token_ids],
        top=[[decode([token]) for token in row] for row in top_LT.tolist()],
        probs_LT=probs_LT,
    )


def _best_tokens(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    probs, tokens = [], []
    for layer in range(model.num_layers):
        best = model.project_on_vocab(model.layers_output[layer]).float().softmax(-1).max(-1)
        probs.append(best.values.detach())
        tokens.append(best.indices)
    return torch.stack(probs), torch.stack(tokens)


def plot_heatmap(
    values: Any,
    xlabels: Iterable[Any],
    ylabels: Iterable[Any],
    title: str | None = None,
    path: str | PathLike[str] | None = None,
    *,
    xlabel: str = "",
    ylabel: str = "layer",
    label: str = "",
    cmap: str | None = None,
    limits: tuple[float, float] | None = None,
    ax: Any = None,
) -> Any:
    """Draw a grid of numbers as colours, the first row at the bottom, as in all figures of layers. NaN is grey.

    Args:
        values: `[rows, columns]`: a tensor, an array or nested lists.
        xlabels, ylabels: labels of the columns and the rows.
        title: the title above the figure.
        path: a PNG, PDF or SVG file to write to; the figure is then closed, and can still be used.
        xlabel, ylabel, label: labels of the two axes and of the colour bar.
        cmap: the name of a matplotlib colour map; if None, one that diverges around 0 if the values have both signs.
        limits: the values at the ends of the colour map; if None, the least and the largest value.
        ax: the matplotlib Axes to draw into; a new figure if None.

    Returns:
        The Axes; `.figure` is its figure.

    Raises:
        MidstreamError: matplotlib is not installed, or the labels do not fit the values.
    """
    grid, columns, rows = _grid(values), list(xlabels), list(ylabels)
    if grid.shape != (len(rows), len(columns)):
        raise MidstreamError(
            f"The values are {list(grid.shape)}, with {len(rows)} labels for rows and {len(columns)} for columns."
        )
    pyplot = _pyplot()
    if ax is None:
        size = (min(_WIDEST, 2.5 + 0.42 * len(columns)), min(_HIGHEST, 1.5 + 0.3 * len(rows)))
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    low, high = limits or _limits(grid)
    image = _draw(ax, grid, columns, rows, cmap or ("RdBu" if low < 0 < high else "viridis"), (low, high))
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title or "")
    bar = ax.figure.colorbar(image, ax=ax, label=label, pad=0.02, aspect=25)
    finite = grid[grid.isfinite()]
    if finite.numel() and finite.min() < finite.max():  # the bar ends at values that cells have
        bar.ax.set_ylim(max(low, finite.min().item()), min(high, finite.max().item()))
    write_figure(ax.figure, path)
    return ax


def plot_lines(
    x: Iterable[float],
    y: Any,
    title: str | None = None,
    path: str | PathLike[str] | None = None,
    *,
    xlabel: str = "layer",
    ylabel: str = "",
    ax: Any = None,
) -> Any:
    """Draw curves over the same points: an effect against a scale, a probe's accuracy against the layer. The legend is beside them.

    Args:
        x: the points.
        y: `[points]`: a tensor, an array or a list; or several curves by name. Curves whose names are numbers, or `"layer 3"`, have colours
            in the order of these numbers.
        title, path, ax: as in `plot_heatmap`.
        xlabel, ylabel: labels of the axes.

    Returns:
        The Axes; `.figure` is its figure.

    Raises:
        MidstreamError: matplotlib is not installed, or a curve has another number of points than `x`.
    """
    points = list(x)
    curves = {name: _curve(values) for name, values in (y if isinstance(y, Mapping) else {"": y}).items()}
    for name, values in curves.items():
        if len(values) != len(points):
            raise MidstreamError(f"The curve {name!r} has {len(values)} points, and x has {len(points)}.")
    pyplot = _pyplot()
    ax = ax if ax is not None else pyplot.subplots(figsize=(5.0, 3.2), layout="constrained")[1]
    for (name, values), colour in zip(curves.items(), _ordered_colours(list(curves)), strict=True):
        ax.plot(points, values, marker="o", markersize=4, label=name, color=colour)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title or "")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    if isinstance(y, Mapping):
        columns = -(-len(curves) // _LONGEST_LEGEND)
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)
    write_figure(ax.figure, path)
    return ax


def plot_logit_lens(
    model_or_lens: Any,
    prompt: str | Sequence[int] | None = None,
    *,
    title: str = "Logit lens",
    path: str | PathLike[str] | None = None,
    wrap: int = 12,
) -> list[Any]:
    """Draw the logit lens: tokens to the right, layers upwards, in each cell the likeliest next token.

    The colour is its probability. `␣` at the start of a token stands for a space. A long prompt takes several bands.

    Args:
        model_or_lens: a model, which runs one trace on `prompt`, or a result of `logit_lens`.
        prompt: text or token ids; None with a `LogitLens`.
        title, path: as in `plot_heatmap`.
        wrap: the number of tokens in a band.

    Returns:
        The Axes of the bands, from top to bottom; `.figure` of each is the figure.
    """
    if isinstance(model_or_lens, LogitLens):
        lens = model_or_lens
    elif prompt is None:
        raise MidstreamError("plot_logit_lens takes a model and a prompt, or the result of logit_lens(model, prompt).")
    else:
        lens = logit_lens(model_or_lens, prompt)
    pyplot = _pyplot()
    starts = range(0, len(lens.tokens), wrap)
    layers = range(len(lens.top))
    width, height = min(wrap, len(lens.tokens)), 0.55 + 0.3 * len(layers)
    size = (min(_WIDEST, 2.0 + 1.0 * width), 0.8 + height * len(starts))
    figure, bands = pyplot.subplots(len(starts), squeeze=False, figsize=size, layout="constrained")
    for start, ax in zip(starts, bands[:, 0], strict=True):
        columns = lens.tokens[start : start + width]
        probs = lens.probs_LT[:, start : start + width]
        image = _draw(ax, probs, columns, list(layers), "viridis", (0.0, 1.0))
        _write_cells(ax, image, probs, [lens.top[layer][start : start + width] for layer in layers])
        ax.set(ylabel="layer", xlim=(-0.5, width - 0.5))
    figure.suptitle(title)
    label = "probability of the likeliest token"
    figure.colorbar(image, ax=list(bands[:, 0]), label=label, pad=0.02, aspect=25, shrink=min(1, 2 / len(starts)))
    write_figure(figure, path)
    return list(bands[:, 0])


def plot_token_scores(
    tokens: Iterable[str],
    scores: Any,
    title: str | None = None,
    path: str | PathLike[str] | None = None,
    *,
    center: float = 0.0,
    reach: float | None = None,
    label: str = "score",
    cmap: str = "RdBu_r",
    wrap: int = 80,
    breaks: Collection[int] = (),
    ax: Any = None,
) -> Any:
    """Draw a text with each token on the colour of its score, as a `Probe` returns it: white at `center`, NaN in grey.

    Newlines and tabs are written as `\\n` and `\\t`, and a line ends after a newline.

    Args:
        tokens: the text of each token, T of them.
        scores: `[tokens]` or `[tokens, 1]`: a tensor, an array or a list. A token without a score, such as the last generated one, has NaN.
        title, path, ax: as in `plot_heatmap`.
        center: the score in the middle of the colour map, such as a threshold.
        reach: the distance from `center` at which the colour map ends; if None, that of the farthest score.
        label: the label of the colour bar.
        cmap: the name of a matplotlib colour map that diverges.
        wrap: the number of characters in a line.
        breaks: the numbers of tokens after which a line ends.

    Returns:
        The Axes; `.figure` is its figure.

    Raises:
        MidstreamError: matplotlib is not installed, or there are no tokens, or another number of scores than tokens.
    """
    texts, values = list(tokens), torch.as_tensor(scores).detach().float().cpu()
    if not texts or list(values.shape) not in ([len(texts)], [len(texts), 1]):
        raise MidstreamError(
            f"Token scores are [tokens] or [tokens, 1]; {list(values.shape)} was given, with {len(texts)} tokens. "
            "A token without a score takes NaN."
        )
    values = values.reshape(-1)
    finite = values[values.isfinite()]
    farthest = (finite - center).abs().max().item() if finite.numel() else 0.0
    reach = reach or farthest or 1.0
    pyplot = _pyplot()
    import matplotlib
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    placed = _wrapped(texts, wrap, breaks)
    lines, columns = placed[-1][1] + 1, max(column + len(text) for text, _, column in placed)
    if ax is None:
        size = (max(4.0, 0.3 + _CHARACTER * columns), min(_HIGHEST_TEXT, 0.8 + 0.2 * bool(title) + _LINE * lines))
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    ax.set_title(title or "")
    ax.axis("off")
    boxes = PatchCollection(
        [Rectangle((column, line), max(1, len(text)), 1) for text, line, column in placed],
        cmap=matplotlib.colormaps[cmap].with_extremes(bad="lightgrey"),
        norm=matplotlib.colors.Normalize(center - reach, center + reach),
        edgecolor="white",
    )
    boxes.set_array(values.numpy())
    ax.add_collection(boxes, autolim=False)
    clipped = "both" if farthest > reach else "neither"
    place = {"orientation": "horizontal", "shrink": 0.5, "aspect": 40, "pad": 0.02}
    bar = ax.figure.colorbar(boxes, ax=ax, label=label, extend=clipped, **place)
    if finite.numel() and finite.min() < finite.max() and farthest <= reach:  # the bar ends at scores that tokens have
        bar.ax.set_xlim(finite.min().item(), finite.max().item())
    ax.figure.canvas.figure.draw_without_rendering()  # the layout sets the size of the Axes, which sets the size of the font
    room = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    ax.set(xlim=(0, max(columns, room.width / _CHARACTER)), ylim=(max(lines, room.height / _LINE), 0))
    font = 9 * min(1.0, room.width / columns / _CHARACTER, room.height / lines / _LINE)
    for (text, line, column), colour in zip(placed, boxes.to_rgba(values.numpy()), strict=True):
        word = text.lstrip(" ")
        written = {"color": _ink(colour), "fontsize": font, "family": "monospace", "parse_math": False}
        ax.text(column + len(text) - len(word), line + 0.7, word, **written).set_in_layout(False)
    write_figure(ax.figure, path)
    return ax


def _wrapped(tokens: list[str], wrap: int, breaks: Collection[int]) -> list[tuple[str, int, int]]:
    """What to write for each token, with its line and its first column."""
    placed, line, column = [], 0, 0
    for number, token in enumerate(tokens):
        text = _escaped(token)
        if column and column + len(text) > wrap:
            line, column = line + 1, 0
        placed.append((text, line, column))
        column += max(1, len(text))
        if "\n" in token or number in breaks:
            line, column = line + 1, 0
    return placed


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise MidstreamError('Figures need matplotlib: pip install "midstream[plot]".') from error
    return pyplot


def _grid(values: Any) -> torch.Tensor:
    if isinstance(values, (list, tuple)) and values:
        values = torch.stack([torch.as_tensor(row) for row in values])
    grid = torch.as_tensor(values).detach().float().cpu()
    if grid.ndim != 2 or not grid.numel():
        raise MidstreamError(f"A heatmap is of values [rows, columns]; {list(grid.shape)} was given.")
    return grid


def _curve(values: Any) -> list[float]:
    curve = torch.as_tensor(values).detach().float().cpu()
    if curve.ndim != 1 or not curve.numel():
        raise MidstreamError(f"A curve is of values [points]; {list(curve.shape)} was given.")
    return curve.tolist()


def _ordered_colours(names: list[Any]) -> list[Any]:
    """A colour for each curve, from dark to light in the order of the numbers that are their names. None for matplotlib's own colours."""
    numbers = [float(found[1]) for name in names if (found := re.fullmatch(r"(?:layer )?(-?\d+(?:\.\d+)?)", str(name)))]
    if len(numbers) < max(2, len(names)):
        return [None] * len(names)
    import matplotlib

    low, high = min(numbers), max(numbers)
    colours = matplotlib.colormaps["viridis"]
    return [
        colours(0.86 * (number - low) / (high - low or 1.0)) for number in numbers
    ]  # the lightest are hard to see on white


def _limits(grid: torch.Tensor) -> tuple[float, float]:
    finite = grid[grid.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    widest = max(-low, high)
    return (-widest, widest) if low < 0 < high else (low, high)


def _draw(
    ax: Any, grid: torch.Tensor, columns: list[Any], rows: list[Any], cmap: str, limits: tuple[float, float]
) -> Any:
    import matplotlib

    colours = matplotlib.colormaps[cmap].with_extremes(bad="lightgrey")
    low, high = limits
    options = {"cmap": colours, "vmin": low, "vmax": high, "aspect": "auto", "interpolation": "nearest"}
    image = ax.imshow(grid.numpy(), origin="lower", **options)
    ax.spines[:].set_visible(False)
    width, height = ax.figure.get_size_inches()
    place = ax.get_position()  # a share of the figure
    _label(ax.xaxis, columns, width * place.width, turned=True)
    _label(ax.yaxis, rows, height * place.height, turned=False)
    return image


def _label(axis: Any, labels: list[Any], room: float, turned: bool) -> None:
    """Set tick labels: slanted if they would touch, and only every second, third, ... one if there is still too little room."""
    every = -(-len(labels) * 0.14 // room) or 1  # inches for a line of text
    shown = [(at, show(text, _LONGEST_TICK)) for at, text in enumerate(labels) if at % every == 0]
    flat = not turned or sum(len(text) for _, text in shown) * 0.085 + 0.1 * len(shown) < room
    slant = {} if flat else {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axis.set_ticks([at for at, _ in shown], [text for _, text in shown], fontsize=8, **slant)


def _write_cells(ax: Any, image: Any, grid: torch.Tensor, text: Sequence[Sequence[str]]) -> None:
    for row, cells in enumerate(text):
        for column, cell in enumerate(cells):
            ink = _ink(image.cmap(image.norm(grid[row, column].item())))
            ax.text(column, row, show(cell), ha="center", va="center", fontsize=8, color=ink)


def _ink(colour: Any) -> str:
    """The colour of letters on a colour: white on a dark one."""
    red, green, blue, _ = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


def write_figure(figure: Any, path: str | PathLike[str] | None) -> None:
    """Write a figure to a file and close it, if there is a path."""
    if path is not None:
        figure.savefig(path, dpi=150, bbox_inches="tight")
        _pyplot().close(figure)


def _escaped(label: Any) -> str:
    return str(label).replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def show(label: Any, longest: int = _LONGEST_CELL) -> str:
    """A readable label: `␣` for a leading space, escapes for newlines and tabs, and at most `longest` characters."""
    text = _escaped(label)
    text = "␣" + text[1:] if text.startswith(" ") else text
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return text.replace("$", r"\$")  # two of them would make a formula
