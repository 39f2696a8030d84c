"""What a sweep tells while it runs, as data: for the iterator, the file on disk and the server's stream alike.

    Outline, then for each pair of prompts Baselines, Cells and Noise in any order, then Summary

Log-probabilities are natural, of the answer and, if there is one, of the foil, in this order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LOWEST = -9999.0  # in place of minus infinity, which JSON lacks


class Column(msgspec.Struct, frozen=True):
    """Positions that are patched together.

    Attributes:
        label: its text in figures.
        positions: for each pair, the positions of the patched prompt; None if the other prompt has none that correspond.
        sources: for each pair, the positions of the other prompt.
    """

    label: str
    positions: list[list[int] | None]
    sources: list[list[int] | None]


class Grid(msgspec.Struct, frozen=True):
    """The cells of a sweep: each site at each row of layers, each head and each column.

    Attributes:
        layers: for each row, the layers that are patched together.
        heads: None if all heads are patched together.
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
        clean, corrupt: the text of each token. `corrupt` is None for an ablation without one.
        answer, foil: as they were given; `foil` may be None.
        skipped: positions of the patched prompt that correspond to none of the other.
    """

    clean: list[str]
    corrupt: list[str] | None
    answer: str | int
    foil: str | int | None
    skipped: list[int]


class Outline(msgspec.Struct, frozen=True, tag="start", tag_field="event"):
    """What will be run.

    Attributes:
        direction: "denoising" if the clean run is patched into the corrupt prompt, "noising" for the reverse.
        source: what replaces the activations: "run", "zeros" or "mean".
        grid: the cells of the result.
        coarse: the windows that are run first, if any; of `grid`, only the cells of the best windows are run.
        cells: how many cells there are to run; with `coarse` at most.
    """

    model: str
    metric: str
    direction: Literal["denoising", "noising"]
    source: Literal["run", "zeros", "mean"]
    pairs: list[Pair]
    grid: Grid
    coarse: Grid | None
    cells: int

    def grid_of(self, stage: str) -> Grid:
        """The grid of "coarse" or "fine" cells."""
        return self.coarse if stage == "coarse" and self.coarse is not None else self.grid


class Baselines(msgspec.Struct, frozen=True, tag="baselines", tag_field="event"):
    """The log-probabilities of a pair's two prompts without a patch, each run alone."""

    pair: int
    clean: list[float]
    corrupt: list[float] | None


class Cell(msgspec.Struct, frozen=True, tag="cell", tag_field="event"):
    """One cell of one pair.

    Attributes:
        stage: "coarse" for a window of a coarse-to-fine sweep, else "fine".
        index: `[layer row, column]`, or `[layer row, head, column]`, in the grid of its stage.
        layers, head, positions, token: what was patched; positions of the patched prompt, and their text.
        logprobs: after the patch; None if the cell is void.
        value: the metric; None if the cell is void.
        recovered: 0 as in the corrupt prompt, 1 as in the clean one; None if void or not defined.
        void: why the cell could not be patched, or None.
        top: the likeliest next tokens with their log-probabilities, if they were asked for.
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
    """The patched prompt, run again among the cells: without a patch, or patched with its own activations."""

    pair: int
    kind: Literal["baseline", "identity"]
    logprobs: list[float]
    top: list[tuple[str, float]] | None = None


class Summary(msgspec.Struct, frozen=True, tag="summary", tag_field="event"):
    """The end of a sweep.

    Attributes:
        noise_floor: in the metric's unit; cells that differ from the baseline by no more than it mean nothing. None if it is not known.
        void: how many cells could not be patched.
    """

    noise_floor: float | None
    cells: int
    void: int
    seconds: float


Event = Outline | Baselines | Cell | Noise | Summary
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Event)


def encoded(event: Event) -> bytes:
    """The event as JSON on one line."""
    return _encoder.encode(event)


def decoded(line: bytes | str) -> Event:
    """The event. Raises msgspec.MsgspecError."""
    return _decoder.decode(line)
