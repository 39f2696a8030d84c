"""The result of a sweep: arrays by site, tables, figures and files.

    result.recovered["resid_post"]          # [layers, positions]: 0 as in the corrupt prompt, 1 as in the clean one
    result.best(5)                          # the cells with the largest effect
    result.plot(path="sweep.png")
    result.save("sweep.npz"); SweepResult.load("sweep.npz")

Shapes: P pairs, L rows of layers, N heads (only in a sweep over heads), C columns of positions, A answers (the answer, then the foil if
there is one).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from midstream.errors import MidstreamError, ParameterError
from midstream.plan import fields
from midstream.plots import plot_heatmap, show, write_figure
from midstream.sweeps.cells import METRICS, Metric, cells_in_order
from midstream.sweeps.events import Baselines, Cell, Column, Event, Grid, Noise, Outline, Summary

RESAMPLES = 2000
_HELD = ("clean", "corrupt")


@dataclass(frozen=True)
class BestCell:
    """A cell with its effect, averaged over the pairs.

    Attributes:
        value, recovered: as in `SweepResult`. `recovered` is NaN if the two prompts do not differ, or if there is no corrupt prompt.
        effect: as in `SweepResult.effects`.
        positions: in the patched prompt; with several pairs, in that of the first pair that has the cell.
        token: the label of the cell's column.
    """

    site: str
    layers: tuple[int, ...]
    head: int | None
    positions: tuple[int, ...]
    token: str
    value: float
    recovered: float
    effect: float


class SweepResult:
    """The cells of a sweep. While the sweep runs, cells that have not come yet are NaN.

    Attributes:
        outline: the sweep's prompts as tokens, its grid, direction and source.
        metric: the metric's name, or the user's function.
        logprobs: by site, float64 `[pairs, layers, (heads,) positions, answers]`, in nats.
        clean, corrupt: the log-probabilities of the prompts without a patch, `[pairs, answers]`.
        noise: the runs of the patched prompt among the cells, as `Noise` events.
        void: the cells that could not be patched, with their reasons.
        coarse: the result of the windows of a coarse-to-fine sweep, or None.
        summary: None until the sweep has ended.
    """

    def __init__(self, outline: Outline, metric: Metric | None = None) -> None:
        self.outline, self.metric = outline, outline.metric if metric is None else metric
        if isinstance(self.metric, str) and self.metric not in METRICS:
            raise ParameterError(
                f"This sweep was graded by the function {self.metric!r}. Pass it again: metric=the function."
            )
        pairs, answers = len(outline.pairs), 1 if outline.pairs[0].foil is None else 2
        shape = (pairs, *outline.grid.shape, answers)
        self.logprobs = {site: np.full(shape, np.nan) for site in outline.grid.sites}
        self.clean, self.corrupt = np.full((pairs, answers), np.nan), np.full((pairs, answers), np.nan)
        self.noise: list[Noise] = []
        self.void: list[Cell] = []
        self.summary: Summary | None = None
        self.coarse: SweepResult | None = None
        if outline.coarse is not None:
            self.coarse = SweepResult(msgspec.structs.replace(outline, grid=outline.coarse, coarse=None), metric)

    # Events.

    def take(self, event: Event) -> Event:
        """Add an event of the sweep. Returns the event; a cell gets its `value` and `recovered`."""
        if isinstance(event, Cell) and event.stage == "coarse" and self.coarse is not None:
            return self.coarse.take(msgspec.structs.replace(event, stage="fine")) and self._valued(event)
        match event:
            case Baselines():
                for result in filter(None, (self, self.coarse)):
                    result.clean[event.pair] = event.clean
                    result.corrupt[event.pair] = np.nan if event.corrupt is None else event.corrupt
            case Cell(logprobs=None):
                self.void.append(event)
            case Cell():
                self.logprobs[event.site][(event.pair, *event.index)] = event.logprobs
                return self._valued(event)
            case Noise():
                self.noise.append(event)
            case Summary():
                self.summary = event
        return event

    @property
    def count(self) -> int:
        """How many cells have been graded, including the coarse windows."""
        each = [*self.logprobs.values(), *(self.coarse.logprobs.values() if self.coarse is not None else ())]
        return sum(int((~np.isnan(logprobs[..., 0])).sum()) for logprobs in each)

    def _valued(self, cell: Cell) -> Cell:
        if cell.logprobs is None:
            return cell
        raw = self._graded(np.array(cell.logprobs))
        recovered = float(self._recovered(raw, cell.pair))
        value = recovered if self.metric == "recovered" else float(raw)
        return msgspec.structs.replace(cell, value=_finite(value), recovered=_finite(recovered))

    # Grading.

    def _graded(self, logprobs_A: np.ndarray) -> np.ndarray:
        """The metric before normalisation, `[...]`, from log-probabilities `[..., answers]`."""
        if callable(self.metric):
            flat = logprobs_A.reshape(-1, logprobs_A.shape[-1])
            values = [float("nan") if np.isnan(row).any() else float(self.metric(*row.tolist())) for row in flat]
            return np.array(values).reshape(logprobs_A.shape[:-1])
        answer = logprobs_A[..., 0]
        has_foil = logprobs_A.shape[-1] > 1 and self.metric != "logprob"
        return answer - logprobs_A[..., 1] if has_foil else answer

    def _recovered(self, raw: np.ndarray, pair: int | slice) -> np.ndarray:
        """`(raw - corrupt) / (clean - corrupt)`, NaN where the prompts do not differ."""
        clean, corrupt = self._graded(self.clean[pair]), self._graded(self.corrupt[pair])
        spread = np.asarray(clean - corrupt)
        spread = np.where(spread == 0, np.nan, spread)
        if isinstance(pair, slice):
            corrupt, spread = (each.reshape(-1, *[1] * (raw.ndim - 1)) for each in (corrupt, spread))
        return (raw - corrupt) / spread

    def _measured(self, logprobs: np.ndarray, pair: int | slice, recovered: bool) -> np.ndarray:
        raw = self._graded(logprobs)
        return self._recovered(raw, pair) if recovered else raw

    def _each(self, recovered: bool) -> dict[str, np.ndarray]:
        """The metric by site before normalisation, or `recovered`: `[pairs, layers, (heads,) positions]`."""
        return {site: self._measured(logprobs, slice(None), recovered) for site, logprobs in self.logprobs.items()}

    @property
    def by_pair(self) -> dict[str, np.ndarray]:
        """The metric by site, `[pairs, layers, (heads,) positions]`."""
        return self._each(self.metric == "recovered")

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The metric by site, as the mean over the pairs: `[layers, (heads,) positions]`. NaN for cells that are void or have not run."""
        return {site: _mean(values) for site, values in self.by_pair.items()}

    @property
    def recovered(self) -> dict[str, np.ndarray]:
        """`(cell - corrupt) / (clean - corrupt)` by site, as the mean over the pairs. Needs a corrupt prompt."""
        return {site: _mean(values) for site, values in self._each(True).items()}

    @property
    def standard_error(self) -> dict[str, np.ndarray]:
        """The standard error of `values` over the pairs, by site. NaN for a single pair."""
        found = {}
        for site, values in self.by_pair.items():
            count = (~np.isnan(values)).sum(0)
            with np.errstate(invalid="ignore", divide="ignore"):
                spread = np.sqrt(np.nansum((values - _mean(values)) ** 2, 0) / (count - 1))
                found[site] = np.where(count > 1, spread / np.sqrt(count), np.nan)
        return found

    def interval(self, level: float = 0.95, *, recovered: bool = False) -> dict[str, np.ndarray]:
        """The bootstrap interval over the pairs, by site: `[2, layers, (heads,) positions]`, low and high.

        `recovered=True` gives the interval of `recovered`, for any metric. Otherwise it is the interval of `values`.
        """
        found = {}
        for site, values in (self._each(True) if recovered else self.by_pair).items():
            draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
            means = np.stack([_mean(values[draw]) for draw in draws])
            with np.errstate(invalid="ignore"):
                found[site] = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return found

    @property
    def baseline(self) -> float:
        """The metric of the patched prompt without a patch, as the mean over the pairs."""
        return self._baseline(self.metric == "recovered")

    def _baseline(self, recovered: bool) -> float:
        return float(_mean(self._measured(self._base, slice(None), recovered)))

    @property
    def _metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else self.outline.metric

    @property
    def _base(self) -> np.ndarray:
        return self.corrupt if self.outline.direction == "denoising" else self.clean

    @property
    def noise_floor(self) -> float:
        """The largest difference between runs of the patched prompt that should be equal, in the metric's unit.

        The prompt runs again among the cells, without a patch and patched with its own activations. NaN before the first such run.
        """
        recovered = self.metric == "recovered"
        base = self._measured(self._base, slice(None), recovered)
        runs = ((self._measured(np.array(run.logprobs), run.pair, recovered), base[run.pair]) for run in self.noise)
        return max((abs(float(value) - float(own)) for value, own in runs), default=math.nan)

    @property
    def is_noise(self) -> dict[str, np.ndarray]:
        """Which cells differ from the baseline by no more than the noise floor, by site."""
        floor, base = self.noise_floor, self.baseline
        return {site: np.abs(values - base) <= floor for site, values in self.values.items()}

    @property
    def effects(self) -> dict[str, np.ndarray]:
        """How far each patch moved the metric from the baseline, by site.

        With a corrupt prompt, this is a share of the distance between the two prompts.
        """
        if not self._has_corrupt:
            return {site: values - self.baseline for site, values in self.values.items()}
        recovered = self.recovered
        return (
            recovered if self.outline.direction == "denoising" else {site: 1 - each for site, each in recovered.items()}
        )

    @property
    def _has_corrupt(self) -> bool:
        """Whether there is a corrupt prompt, so that effects are shares."""
        return not np.isnan(self.corrupt).all()

    def __sub__(self, other: SweepResult) -> SweepDifference:
        """The differences of two sweeps with the same pairs, grid and metric, cell by cell."""
        return SweepDifference(self, other)

    # The best cells.

    def best(self, count: int = 10) -> list[BestCell]:
        """The cells with the largest effect in either direction, largest first."""
        return sorted((cell for _, cell in self._cells()), key=lambda cell: -abs(cell.effect))[:count]

    def path(self, site: str | None = None) -> list[BestCell]:
        """The cell with the largest effect in each layer, from the first layer to the last. They show where the answer's information is."""
        site = self._site(site)
        rows: dict[int, BestCell] = {}
        for row, cell in self._cells():
            if cell.site == site and (row not in rows or abs(cell.effect) > abs(rows[row].effect)):
                rows[row] = cell
        return [rows[row] for row in sorted(rows)]

    def _cells(self) -> Iterator[tuple[int, BestCell]]:
        """The row of each cell that has run, and the cell."""
        grid, arrays = self.outline.grid, (self.values, self.recovered, self.effects)
        for site, index in cells_in_order(grid):
            value, recovered, effect = (float(array[site][index]) for array in arrays)
            if not math.isnan(effect):
                head = None if grid.heads is None else grid.heads[index[1]]
                column = grid.columns[index[-1]]
                positions = next(tuple(each) for each in column.positions if each is not None)
                place = (site, tuple(grid.layers[index[0]]), head, positions, column.label)
                yield index[0], BestCell(*place, value, recovered, effect)

    def _site(self, site: str | None) -> str:
        sites = self.outline.grid.sites
        if site is None and len(sites) == 1:
            return sites[0]
        if site not in sites:
            raise ParameterError(f"site is {site!r}. Give one of this sweep's sites: {', '.join(map(repr, sites))}.")
        return site

    # Tables and figures.

    def to_dataframe(self) -> Any:
        """A table with one row for each pair and each cell that has run or is void. Needs pandas.

        `token` is the text that is patched in this pair's prompt, and `column` the label in figures.
        """
        grid, values, recovered = self.outline.grid, self.by_pair, self._each(True)
        reasons = {cell.key: cell.void for cell in self.void}
        rows = []
        for pair, prompts in enumerate(self.outline.pairs):
            is_corrupt = self.outline.direction == "denoising" and prompts.corrupt is not None
            tokens: Any = prompts.corrupt if is_corrupt else prompts.clean
            for site, index in itertools.product(grid.sites, np.ndindex(*grid.shape)):
                logprobs, column = self.logprobs[site][(pair, *index)], grid.columns[index[-1]]
                positions = column.positions[pair]
                void = reasons.get(("fine", pair, site, *index))
                if positions is None:
                    void = void or NOT_ALIGNED
                if np.isnan(logprobs[0]) and void is None:
                    continue
                layers = grid.layers[index[0]]
                rows.append(
                    {
                        "pair": pair,
                        "site": site,
                        "layer": layers[0] if len(layers) == 1 else tuple(layers),
                        **({} if grid.heads is None else {"head": grid.heads[index[1]]}),
                        "position": _one_or_several(positions),
                        "token": "".join(tokens[at] for at in positions or ()),
                        "column": column.label,
                        "logprob": logprobs[0],
                        **({"foil_logprob": logprobs[1]} if len(logprobs) > 1 else {}),
                        "value": values[site][(pair, *index)],
                        "recovered": recovered[site][(pair, *index)],
                        "void": void,
                    }
                )
        return dataframe(rows)

    def plot(
        self,
        site: str | None = None,
        *,
        head: int | None = None,
        position: int | str | None = None,
        recovered: bool = False,
        effects: bool = False,
        title: str | None = None,
        path: str | PathLike[str] | None = None,
        ax: Any = None,
    ) -> Any:
        """Draw a heatmap with layers upwards and tokens or heads to the right. Needs matplotlib.

        Cells are white where the patch changes nothing, blue above that, red below. Dots mark cells within the noise floor.

        Args:
            site: needed only if the sweep has several.
            head, position: for a sweep over several heads and several positions, the one to draw. `head` is a head of the sweep; the
                positions are then to the right. `position` is the label of a column, or a position of the patched prompt, where negative
                numbers count from the end; the heads are then to the right.
            recovered: draw `recovered` instead of the metric.
            effects: draw `effects` instead. The label of the colours says what is drawn.
            title, path, ax: as in `midstream.plots.plot_heatmap`.

        Returns:
            The Axes.

        Raises:
            ParameterError: the sweep has several sites, or several heads and positions, and the call does not choose one; or the sweep
                lacks the one that it chooses.
        """
        if recovered and effects:
            raise ParameterError("plot(recovered=True, effects=True): a figure has one of them. Draw two figures.")
        grid, site = self.outline.grid, self._site(site)
        plane, labels, xlabel = self._drawn(head, position)
        values_LC = (self.effects if effects else self.recovered if recovered else self.values)[site][plane]
        noise_LC = self.is_noise[site][plane]
        name = "effect" if effects else "recovered" if recovered else self._metric_name
        is_share = name == "recovered" or (effects and self._has_corrupt)
        centre = 0.0 if effects else self._baseline(is_share)
        reach = np.nanmax(np.abs(values_LC - centre), initial=1.0 if is_share else 1e-6)
        layers = [str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in grid.layers]
        ax = plot_heatmap(
            values_LC,
            labels,
            layers,
            title=self._title(site) if title is None else title,
            xlabel=xlabel,
            label=self._label(name),
            cmap="RdBu",
            limits=(centre - reach, centre + reach),
            ax=ax,
        )
        rows, columns = np.nonzero(noise_LC)
        ax.scatter(columns, rows, s=3, color="grey", linewidths=0)
        write_figure(ax.figure, path)
        return ax

    def _drawn(self, head: Any, position: Any) -> tuple[Any, list[str], str]:
        """What a figure shows: an index that takes `[layers, columns]` from an array of cells, the columns' labels and the axis' label."""
        grid, columns = self.outline.grid, [column.label for column in self.outline.grid.columns]
        if grid.heads is None:
            for name, given in (("head", head), ("position", position)):
                if given is not None:
                    raise ParameterError(
                        f'{name} is {given!r}, and this sweep has no heads of its own. Leave it out, or sweep with heads="all".',
                        field=name,
                    )
            return np.s_[:, :], columns, ""
        is_open = head is None and position is None
        if is_open and len(columns) > 1 == len(grid.heads):
            head = grid.heads[0]
        elif (head is not None and position is not None) or (is_open and len(columns) > 1):
            raise ParameterError(
                f"This sweep has {len(grid.heads)} heads and {len(columns)} columns of positions, and a figure shows one of the two. Give "
                f"plot one of these: head=, from {fields.ranges(grid.heads)}; or position=, from {', '.join(map(repr, columns))}, or its "
                "number. result.values has all cells.",
                field="head",
            )
        if head is not None:
            if head not in grid.heads:
                text = f"head is {head!r}. Heads of this sweep: {fields.ranges(grid.heads)}."
                raise ParameterError(text, field="head")
            return np.s_[:, grid.heads.index(head)], columns, f"patched at head {head}"
        column = 0 if position is None else self._column(position)
        return np.s_[:, :, column], [str(each) for each in grid.heads], f"head, patched at {show(columns[column], 40)}"

    def _column(self, position: int | str) -> int:
        """The number of the column with this label, or with this position of the patched prompts."""
        is_corrupt = self.outline.direction == "denoising"
        lengths = [len((is_corrupt and pair.corrupt) or pair.clean) for pair in self.outline.pairs]
        columns = self.outline.grid.columns

        def fits(column: Column) -> bool:
            if not isinstance(position, int):
                return column.label == position
            each = [(at, length) for at, length in zip(column.positions, lengths, strict=True) if at is not None]
            return bool(each) and all(at == [position + length * (position < 0)] for at, length in each)

        found = [number for number, column in enumerate(columns) if fits(column)]
        if len(found) != 1:
            labels = ", ".join(repr(column.label) for column in columns)
            of = (
                f"{len(found)} columns of this sweep have this label: give its number"
                if found
                else "Columns of this sweep"
            )
            raise ParameterError(f"position is {position!r}. {of}: {labels}.", field="position")
        return found[0]

    def _label(self, name: str) -> str:
        """The label of a figure's colour bar."""
        metric = _METRIC_LABELS.get(self._metric_name, self._metric_name.replace("_", " "))
        if name == "recovered":
            return "recovered (0: corrupt, 1: clean)"
        if name != "effect":
            return f"{metric} after the patch"
        if not self._has_corrupt:
            return f"effect: change of the {metric}"
        ends = ("corrupt", "clean") if self.outline.direction == "denoising" else ("clean", "corrupt")
        return f"effect: share of the way from {ends[0]} to {ends[1]}"

    def _title(self, site: str) -> str:
        paths = self.outline.paths
        if paths is None:
            return site
        ends = (
            "the logits" if paths.receivers is None else ", ".join(f"{layer}.{head}" for layer, head in paths.receivers)
        )
        return f"direct paths to {ends}"

    def show(self, site: str | None = None, *, colour: bool | None = None) -> str:
        """The heatmap as text, with layers upwards. `~` marks cells within the noise floor. `colour=True` uses a terminal's colours.

        `site`: if None, all sites of the sweep, one below the other.
        """
        grid = self.outline.grid
        if site is None and len(grid.sites) > 1:
            return "\n\n".join(f"{each}\n{self.show(each, colour=colour)}" for each in grid.sites)
        site = self._site(site)
        values_LC, noise_LC = self.values[site], self.is_noise[site]
        labels = [column.label for column in grid.columns]
        if grid.heads is not None:
            values_LC, noise_LC = (array.reshape(len(grid.layers), -1) for array in (values_LC, noise_LC))
            labels = [f"{head}{label if len(grid.columns) > 1 else ''}" for head in grid.heads for label in labels]
        widths = [max(7, len(repr(label))) for label in labels]
        lines = [f"{'layer':>7} " + "".join(f"{label!r:>{w + 1}}" for label, w in zip(labels, widths, strict=True))]
        most = np.nanmax(np.abs(values_LC - self.baseline), initial=1e-12)
        for row in reversed(range(len(grid.layers))):
            cells = []
            for column, width in enumerate(widths):
                value = values_LC[row, column]
                text = f"{'' if np.isnan(value) else f'{value:.2f}'}{'~' if noise_LC[row, column] else ''}"
                text = f"{text:>{width + 1}}"
                share = 0.0 if np.isnan(value) else (value - self.baseline) / most
                cells.append(_shaded(text, share) if colour else text)
            layers = grid.layers[row]
            lines.append(f"{layers[0] if len(layers) == 1 else f'{layers[0]}-{layers[-1]}':>7} {''.join(cells)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        grid, pairs = self.outline.grid, len(self.outline.pairs)
        shape = " x ".join(map(str, grid.shape))
        state = "" if self.summary is not None else ", running"
        apart = sum(all(each is None for each in column.positions) for column in grid.columns)
        skipped = f", {apart} of {len(grid.columns)} positions without a counterpart" if apart else ""
        return (
            f"<SweepResult: {', '.join(grid.sites)}, {shape}{skipped}, {pairs} pair{'s' * (pairs > 1)}, {self.count} cells, "
            f"{len(self.void)} void, noise floor {self.noise_floor:.2g}{state}>"
        )

    # Files.

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.npz` file of arrays and JSON. It holds no code."""
        arrays = {f"logprobs/{site}": values for site, values in self.logprobs.items()}
        arrays |= {name: getattr(self, name) for name in _HELD}
        if self.coarse is not None:
            arrays |= {f"coarse/{site}": values for site, values in self.coarse.logprobs.items()}
        coarse_void = self.coarse.void if self.coarse is not None else []
        rest = _Rest(self.outline, self.noise, self.void, coarse_void, self.summary)
        text = np.frombuffer(msgspec.json.encode(rest), np.uint8)
        with Path(path).open("wb") as file:
            np.savez_compressed(file, json=text, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | PathLike[str], metric: Metric | None = None) -> SweepResult:
        """Read a file of `save`. If a function graded the sweep, pass it as `metric`. You can also pass another metric."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            rest = msgspec.json.decode(arrays.pop("json").tobytes(), type=_Rest)
        except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
            raise MidstreamError(f"{path} holds no sweep: {error}.") from error
        result = cls(rest.outline, metric)
        result.clean, result.corrupt = (arrays[name] for name in _HELD)
        result.noise, result.void, result.summary = rest.noise, rest.void, rest.summary
        result.logprobs = {site: arrays[f"logprobs/{site}"] for site in rest.outline.grid.sites}
        if result.coarse is not None:
            result.coarse.clean, result.coarse.corrupt = result.clean, result.corrupt
            result.coarse.void = rest.coarse_void
            result.coarse.logprobs = {site: arrays[f"coarse/{site}"] for site in rest.outline.grid.sites}
        return result


class SweepDifference(SweepResult):
    """The difference of two sweeps: `values`, `by_pair`, `recovered`, `effects` and `interval` are the first minus the second.

    Intervals are of paired differences. The baseline is 0, and the noise floors add up. `logprobs` are the first sweep's.

    Raises:
        ParameterError: the sweeps differ in their pairs of prompts, direction, grid or metric.
    """

    def __init__(self, result: SweepResult, other: SweepResult) -> None:
        for what in ("pairs", "direction", "grid"):
            one, two = (getattr(each.outline, what) for each in (result, other))
            if one != two and not (what == "grid" and _are_alike(one, two)):
                raise ParameterError(
                    f"These two sweeps do not have the same {what}, so their cells cannot be compared."
                )
        if result.metric != other.metric:
            raise ParameterError(f"These two sweeps have the metrics {result._metric_name} and {other._metric_name}.")
        super().__init__(msgspec.structs.replace(result.outline, coarse=None), result.metric)
        self._both = result, other
        self.logprobs, self.clean, self.corrupt = result.logprobs, result.clean, result.corrupt
        self.void, self.summary = [*result.void, *other.void], result.summary and other.summary

    def _each(self, recovered: bool) -> dict[str, np.ndarray]:
        one, two = (each._each(recovered) for each in self._both)
        return {site: one[site] - two[site] for site in one}

    def _baseline(self, recovered: bool) -> float:
        return 0.0

    def _label(self, name: str) -> str:
        return f"{super()._label(name)}, first sweep - second"

    @property
    def noise_floor(self) -> float:
        return sum(each.noise_floor for each in self._both)

    @property
    def effects(self) -> dict[str, np.ndarray]:
        one, two = (each.effects for each in self._both)
        return {site: one[site] - two[site] for site in one}

    def save(self, path: str | PathLike[str]) -> None:
        """Raises MidstreamError: save the two sweeps instead."""
        raise MidstreamError("Save the two sweeps; a difference has no file of its own.")


def _are_alike(one: Grid, two: Grid) -> bool:
    """Whether the cells of both grids are at the same places. If one grid has no positions for a column and pair, any positions match."""
    places: Any = [
        (grid.sites, grid.layers, grid.heads, [column.label for column in grid.columns]) for grid in (one, two)
    ]
    each = [list(itertools.chain.from_iterable(column.positions for column in grid.columns)) for grid in (one, two)]
    return places[0] == places[1] and all(a == b or None in (a, b) for a, b in zip(*each, strict=True))


class _Rest(msgspec.Struct):
    outline: Outline
    noise: list[Noise]
    void: list[Cell]
    coarse_void: list[Cell]
    summary: Summary | None


_METRIC_LABELS = {"logit_diff": "logit difference", "logprob": "log-probability"}
NOT_ALIGNED = "the two prompts have different tokens here, and cannot be aligned"


def dataframe(rows: Any, columns: Any = None) -> Any:
    """A pandas DataFrame. Raises MidstreamError without pandas."""
    try:
        import pandas
    except ImportError as error:
        raise MidstreamError("to_dataframe needs pandas: pip install pandas.") from error
    return pandas.DataFrame(rows, columns=columns)


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis, leaving NaN out."""
    count = (~np.isnan(values)).sum(0)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _one_or_several(positions: list[int] | None) -> Any:
    return None if positions is None else positions[0] if len(positions) == 1 else tuple(positions)


def _shaded(text: str, share: float) -> str:
    """Red below the baseline, blue above it."""
    strength = int(min(abs(share), 1.0) * 5)
    if not strength:
        return text
    code = (
        16 + 36 * (5 - strength) + 6 * (5 - strength) + 5
        if share > 0
        else 16 + 36 * 5 + 6 * (5 - strength) + 5 - strength
    )
    return f"\x1b[48;5;{code}m\x1b[38;5;{16 if strength < 4 else 231}m{text}\x1b[0m"
