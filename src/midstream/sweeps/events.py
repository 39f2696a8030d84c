"""The events of a running sweep, as data, for the iterator, the file on disk and the server's stream.

    Outline, then for each pair of prompts Baselines, and Cells and Noise in any order, then Summary

Each list of log-probabilities has the answer's first and then, if there is a foil, the foil's. They are in nats.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class Column(msgspec.Struct, frozen=True):
    """Positions that are patched together.

    Attributes:
        label: the text in figures.
        positions: for each pair, positions in the patched prompt; None if they have no counterpart in the other prompt.
        sources: for each pair, the corresponding positions in the other prompt.
    """

    label: str
    positions: list[list[int] | None]
    sources: list[list[int] | None]


class Grid(msgspec.Struct, frozen=True):
    """The cells of a sweep: each site at each row of layers, each head and each column.

    Attributes:
        layers: for each row, the layers that are patched together.
        heads: the heads that are patched one by one; None if all heads are patched together.
    """

    sites: list[str]
    layers: list[list[int]]
    heads: list[int] | None
    columns: list[Column]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[layers, positions]`, or `[layers, heads, positions]`."""
        heads = () if self.heads is None else (len(self.heads),)
        return (len(self.layers), *heads, len(self.columns))


class Pair(msgspec.Struct, frozen=True):
    """A clean and a corrupt prompt.

    Attributes:
        clean, corrupt: the text of each token. `corrupt` is None if an ablation has no corrupt prompt.
        answer, foil: as the caller gave them; `foil` may be None.
        skipped: positions of the patched prompt that have no counterpart in the other prompt.
    """

    clean: list[str]
    corrupt: list[str] | None
    answer: str | int
    foil: str | int | None
    skipped: list[int]


class Paths(msgspec.Struct, frozen=True):
    """Which paths the patches of `path_patching` take.

    Attributes:
        receivers: where they end, as pairs of a layer and a head; None for the logits.
        frozen: the sites that are frozen after the sender: they keep the values of the patched prompt's own run.
    """

    receivers: list[tuple[int, int]] | None
    frozen: list[str]


class Outline(msgspec.Struct, frozen=True, tag="start", tag_field="event", omit_defaults=True):
    """The sweep that will run.

    Attributes:
        direction: "denoising" if the clean run is patched into the corrupt prompt, "noising" for the reverse.
        source: what replaces the activations: "run", "zeros" or "mean".
        grid: the cells of the result.
        coarse: the windows that run first, or None. With windows, only the cells of `grid` in the best windows run.
        cells: the number of cells that will run; with `coarse`, the largest possible number.
        paths: the paths of `path_patching`; None for a sweep, whose patches act along all paths.
    """

    model: str
    metric: str
    direction: Literal["denoising", "noising"]
    source: Literal["run", "zeros", "mean"]
    pairs: list[Pair]
    grid: Grid
    coarse: Grid | None
    cells: int
    paths: Paths | None = None

    def grid_of(self, stage: str) -> Grid:
        """The grid of "coarse" or "fine" cells."""
        return self.coarse if stage == "coarse" and self.coarse is not None else self.grid


class Baselines(msgspec.Struct, frozen=True, tag="baselines", tag_field="event"):
    """The log-probabilities of a pair's two prompts without a patch. Each prompt runs alone.

    Attributes:
        warnings: texts that say that the answer or the foil most likely lacks the space before it.
    """

    pair: int
    clean: list[float]
    corrupt: list[float] | None
    warnings: list[str] = []


class Cell(msgspec.Struct, frozen=True, tag="cell", tag_field="event"):
    """One cell of one pair.

    Attributes:
        stage: "coarse" for a window of a coarse-to-fine sweep, else "fine".
        index: the place in the grid of its stage: `[row of layers, column]`, or `[row of layers, head, column]`.
        layers, head, positions: the patched place. The positions are in the patched prompt.
        token: the text at these positions.
        logprobs: the log-probabilities of answer and foil after the patch; None if the cell is void.
        value: the metric; None if the cell is void.
        recovered: 0 as in the corrupt prompt, 1 as in the clean one. None if the cell is void, or if the two prompts do not differ.
        void: why the cell could not be patched, or None.
        top: the likeliest next tokens with their log-probabilities, if the caller asked for them.
    """

    pair: int
    stage: Literal["coarse", "fine"]
    site: str
    index: list[int]
    layers: list[int]
    head: int | None
    positions: list[int]
    token: str
    logprobs: list[float] | None = None
    value: float | None = None
    recovered: float | None = None
    void: str | None = None
    top: list[tuple[str, float]] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the cell in its sweep."""
        return (self.stage, self.pair, self.site, *self.index)


class Noise(msgspec.Struct, frozen=True, tag="noise", tag_field="event"):
    """One more run of the patched prompt, among the cells.

    Attributes:
        kind: "baseline" without a patch, "identity" if it is patched with its own activations.
    """

    pair: int
    kind: Literal["baseline", "identity"]
    logprobs: list[float]
    top: list[tuple[str, float]] | None = None


class Summary(msgspec.Struct, frozen=True, tag="summary", tag_field="event"):
    """The end of a sweep.

    Attributes:
        noise_floor: in the metric's unit. Smaller differences from the baseline mean nothing. None if unknown.
        cells: the number of cells that ran.
        void: the number of cells that could not be patched.
        seconds: the duration of the sweep.
    """

    noise_floor: float | None
    cells: int
    void: int
    seconds: float


Event = Outline | Baselines | Cell | Noise | Summary
encode_event, decode_event = msgspec.json.Encoder().encode, msgspec.json.Decoder(Event).decode  # one line of JSON
