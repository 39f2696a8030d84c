"""Where captured rows go, and captured rows put together: a request's `RowChunk`s become one `Captured`.

    selected = routes(plan.captures, prompt_length, range(num_layers)).output
    captures = gather(request_id, chunks, prompt_length + generated - 1, selected)
    captures["resid_post", 14]              # CPU tensor [positions, hidden]
    captures.positions["resid_post", 14]    # [0, 1, 2, ...]

Nothing is lost silently: a row that arrives twice, or that is selected and does not arrive, is a `CaptureError`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from midstream.errors import CaptureError, NotCapturedError
from midstream.plan.captures import Key, Layout, Plane
from midstream.plan.fields import nearest
from midstream.plan.selections import Selection
from midstream.plan.values import Capture, Consumer
from midstream.sites import site_of
from midstream.trace.tree import as_bits

V = TypeVar("V")
NO_POSITIONS = np.empty(0, np.int64)


class RowChunk(NamedTuple):
    """Some rows of one request, captured in one step or several.

    Attributes:
        positions: int64 `[rows]`, absolute positions in the sequence.
        layout: the planes of each row.
        rows: CPU tensor `[rows, row_width]` that nobody writes to any more. With no rows it still tells widths and dtype.
    """

    positions: np.ndarray
    layout: Layout
    rows: torch.Tensor

    def take(self, rows: slice | np.ndarray) -> RowChunk:
        """The chunk with only the rows at these indices."""
        return RowChunk(self.positions[rows], self.layout, self.rows[rows])

    def plane(self, key: Key) -> torch.Tensor:
        """One plane of all rows, `[rows, width]`, as a view."""
        plane = self.layout.by_key[key]
        return self.rows[:, plane.offset : plane.offset + plane.width]


class Piece(NamedTuple):
    """Rows of one request as a worker captures them: at `number` positions from `position` on.

    They start at row `first` of a `block` `[rows, row_width]`, which may also hold rows of other requests or of later steps.
    """

    position: int
    layout: Layout
    block: torch.Tensor
    first: int
    number: int

    @property
    def rows(self) -> torch.Tensor:
        """`[number, row_width]`, a view."""
        return self.block[self.first : self.first + self.number]

    @property
    def chunk(self) -> RowChunk:
        return RowChunk(np.arange(self.position, self.position + self.number), self.layout, self.rows)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.number * self.block.shape[1] * self.block.element_size()


def empty_chunk(keys: Iterable[Key], width: Callable[[Key], int], dtype: torch.dtype) -> RowChunk:
    """A chunk that only tells what is captured, so that a plane without rows is a tensor `[0, width]`."""
    layout = Layout.of(keys, width)
    return RowChunk(NO_POSITIONS, layout, torch.empty(0, layout.width, dtype=dtype))


def describe(key: Key) -> str:
    """`resid_post[14]`, and `resid_post[14] (after the edits)`."""
    site, layer, when = key
    return f"{site}[{layer}]" + ("" if when == "before" else f" ({when} the edits)")


def _listed(positions: np.ndarray, most: int = 6) -> str:
    text = ", ".join(str(position) for position in positions[:most].tolist())
    return f"position{'s' if positions.size > 1 else ''} {text}" + (", ..." if positions.size > most else "")


# Where captured rows go.


@dataclass
class Route:
    """One destination, and the rows that go there."""

    to: Any  # a directory, a callable or a plan's Consumer; None for the output
    selected: dict[Key, Selection] = field(default_factory=dict)


class Routes(NamedTuple):
    """Where the rows of one request go."""

    output: dict[Key, Selection]
    sinks: tuple[Route, ...]


def identity(to: Any) -> tuple[Any, ...]:
    """Equal for two ways to write one destination, and for no others."""
    if isinstance(to, (str, Path)):
        return ("directory", str(Path(to).expanduser().absolute()))
    if isinstance(to, Consumer):
        return ("consumer", to.name, json.dumps(to.options, sort_keys=True))
    owner = getattr(to, "__self__", None)  # every access to a bound method makes a new object
    return ("callable", id(to)) if owner is None else ("method", id(owner), getattr(to, "__qualname__", ""))


def routes(captures: Iterable[Capture], prompt_length: int, layers: Iterable[int]) -> Routes:
    """Which rows go where. `layers` are the model's, or those of one pipeline stage where that stage does the routing.

    Raises PlanError for a span that has not been resolved to positions.
    """
    there = list(layers)
    output, sinks = Route(None), dict[tuple[Any, ...], Route]()
    for capture in captures:
        rows = Selection.of(capture.positions, prompt_length, capture.dtype)
        given: Any = capture.layers
        chosen = there if given == "all" else [layer for layer in there if layer in given]
        for to in capture.sinks:
            route = output if to is None else sinks.setdefault(identity(to), Route(to))
            for layer in chosen:
                key = (capture.site, layer, capture.when)
                route.selected[key] = route.selected[key] | rows if key in route.selected else rows
    return Routes(output.selected, tuple(route for route in sinks.values() if route.selected))


# Finding the rows of each plane among chunks.


def rows_where(keep: np.ndarray) -> slice | np.ndarray:
    """The index of the rows to keep; a slice if they are adjacent, so that taking them copies nothing."""
    chosen = np.flatnonzero(keep)
    if not chosen.size:
        return slice(0, 0)
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    return slice(first, last) if last - first == chosen.size else chosen


class Arranged(NamedTuple):
    """Pieces of rows in the order of their positions."""

    pieces: list[int]  # which piece comes first, second, ...
    positions: np.ndarray  # ascending
    order: np.ndarray | None  # sorts the rows of the concatenated pieces; None if they are in order


def arrange(pieces: Sequence[np.ndarray], what: str | None) -> Arranged:
    """Raises CaptureError, which names `what`, if a position occurs twice; with None, duplicates are kept."""
    filled = sorted((i for i, piece in enumerate(pieces) if piece.size), key=lambda i: int(pieces[i][0]))
    positions = np.concatenate([pieces[i] for i in filled]) if filled else NO_POSITIONS
    order = None
    if not (np.diff(positions) > 0).all():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
        twice = positions[1:][np.diff(positions) == 0]
        if twice.size and what is not None:
            raise CaptureError(f"{what}: {_listed(np.unique(twice))} came more than once")
    return Arranged(filled, positions, order)


class _FoundRows(NamedTuple):
    """The rows of one plane, or of several planes with the same rows."""

    pieces: list[tuple[int, slice | np.ndarray]]  # number of a chunk, rows of it
    positions: np.ndarray
    order: np.ndarray | None
    dtype: str | None = None  # as of a Selection


ChunkRows = tuple[np.ndarray, Layout]  # positions and layout of a chunk


def find_rows(
    request: str, chunks: Sequence[ChunkRows], stop: int | None, selected: Mapping[Key, Selection]
) -> dict[Key, _FoundRows]:
    """The selected rows of each plane among the chunks, below position `stop`.

    Raises CaptureError for a row that occurs twice, and for a selected row that is missing.
    """
    by_layout: dict[Layout, list[int]] = {}
    for i, (_, layout) in enumerate(chunks):
        by_layout.setdefault(layout, []).append(i)
    everywhere = tuple(by_layout) if all(selected.keys() <= layout.by_key.keys() for layout in by_layout) else None
    found: dict[Key, _FoundRows] = {}
    shared: dict[Any, _FoundRows] = {}
    for key, rows in selected.items():
        holders = everywhere or tuple(layout for layout in by_layout if key in layout.by_key)
        if (same := (holders, id(rows))) not in shared:  # most planes have one selection, and come together
            numbers = [i for layout in holders for i in by_layout[layout]]
            shared[same] = _find(f"capture of {describe(key)} of request {request!r}", chunks, numbers, stop, rows)
        found[key] = shared[same]
    return found


def _find(what: str, chunks: Sequence[ChunkRows], numbers: list[int], stop: int | None, rows: Selection) -> _FoundRows:
    wanted = rows.below(stop)
    there = np.concatenate([chunks[i][0] for i in numbers]) if numbers else NO_POSITIONS
    if np.array_equal(there, wanted):  # the usual case: all rows came, in order
        return _FoundRows([(i, slice(None)) for i in numbers if chunks[i][0].size], wanted, None, rows.dtype)
    pieces = []
    for i in numbers:
        keep = rows.mask(chunks[i][0])
        pieces.append((i, rows_where(keep if stop is None else keep & (chunks[i][0] < stop))))
    arranged = arrange([chunks[i][0][chosen] for i, chosen in pieces], what)
    missing = np.setdiff1d(wanted, arranged.positions, assume_unique=True)
    if missing.size:
        rows_are = "1 row" if missing.size == 1 else f"{missing.size} rows"
        raise CaptureError(f"{what}: {rows_are} did not come ({_listed(missing)})")
    return _FoundRows([pieces[i] for i in arranged.pieces], arranged.positions, arranged.order, rows.dtype)


# What users see.


class ByPlane(Mapping[Any, V], Generic[V]):
    """A value for each captured plane, under `(site, layer)`.

    Where a site was captured both before and after its edits, `(site, layer)` is before and `(site, layer, "after")` after.
    """

    def __init__(self, what: str, planes: Iterable[Key]) -> None:
        self._what, self._planes = what, dict.fromkeys(planes)

    def _value(self, key: Key) -> V:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> V:
        return self._value(self._resolve(key))

    def __iter__(self) -> Iterator[Any]:
        for site, layer, when in self._planes:
            both = when == "after" and (site, layer, "before") in self._planes
            yield (site, layer, when) if both else (site, layer)

    def __len__(self) -> int:
        return len(self._planes)

    def when(self, key: Any) -> str:
        """Whether a plane holds values from before the edits of its site, or from after them."""
        return self._resolve(key)[2]

    def __repr__(self) -> str:
        return f"<{self._what}: {', '.join(describe(key) for key in self._planes) or 'nothing'}>"

    def _resolve(self, key: Any) -> Key:
        with contextlib.suppress(TypeError):  # an unhashable object is no key
            if isinstance(key, tuple) and len(key) in (2, 3):
                key = (site_of(key[0]), *key[1:])
                for when in ("before", "after"):
                    if (full := (key[0], key[1], when)) in self._planes and key in (full, full[:2]):
                        return full
        raise NotCapturedError(f"{self._what} has no {key!r}: {self._nearest(key)}")

    def _nearest(self, key: Any) -> str:
        sites = list(dict.fromkeys(site for site, _, _ in self._planes))
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            return f"ask for (site, layer), of the sites {sites}"
        layers = sorted({layer for site, layer, _ in self._planes if site == key[0]})
        return f"{key[0]} is there at layers {layers}" if layers else nearest(str(key[0]), sites)


class CapturedPositions(ByPlane[list[int]]):
    """The positions of each tensor's rows."""

    def __init__(self, what: str, planes: Iterable[Key], positions: Callable[[Key], np.ndarray]) -> None:
        super().__init__(what, planes)
        self._positions = positions

    def _value(self, key: Key) -> list[int]:
        return self._positions(key).tolist()


class Captured(ByPlane[torch.Tensor]):
    """What a request captured: `captures["resid_post", 14]` is a CPU tensor `[positions, hidden]` in the model's dtype, or in
    that of the `Capture`.

    Rows are in the order of their positions, which `positions` gives under the same keys. A tensor may be a view of
    all rows of one step: `.clone()` a tensor that you keep longer than the others.
    """

    def __init__(self, request: str, chunks: Sequence[RowChunk], found: Mapping[Key, _FoundRows]) -> None:
        super().__init__(f"capture of request {request!r}", found)
        self._request = request
        self._chunks: Sequence[RowChunk] = chunks
        self._found = found
        self._tensors: dict[Key, torch.Tensor] = {}

    @classmethod
    def nothing(cls, request: str) -> Captured:
        """The captures of a request that captures nothing."""
        return cls(request, (), {})

    @property
    def positions(self) -> CapturedPositions:
        """The positions of each tensor's rows, under the same keys."""
        return CapturedPositions(self._what, self._planes, lambda key: self._found[key].positions)

    def chunks(self) -> Iterator[RowChunk]:
        """The rows of each plane as a chunk."""
        for key in self._planes:
            rows = self._value(key)
            plane = Plane(*key, 0, rows.shape[1])
            yield RowChunk(self._found[key].positions, Layout((plane,)), rows)

    def take(self) -> dict[Any, torch.Tensor]:
        """All tensors, contiguous. Each has its own memory. Only these captures share it, until they are dropped."""
        taken = {}
        for name in self:
            key = self._resolve(name)
            joined, found = self._value(key), self._found[key]
            is_new = len(found.pieces) > 1 or found.order is not None
            taken[name] = joined if is_new else joined.clone(memory_format=torch.contiguous_format)
        return taken

    def _value(self, key: Key) -> torch.Tensor:
        """Joined at the first access; once all planes are joined, the chunks are released."""
        if key not in self._tensors:
            joined = _join(self._what, key, self._chunks, self._found[key])
            self._tensors[key] = converted(joined, self._found[key].dtype, f"{self._what}, {describe(key)}")
            if len(self._tensors) == len(self._found):
                self._chunks = ()
        return self._tensors[key]

    @classmethod
    def of(
        cls, request: str, tensors: Mapping[Key, torch.Tensor], positions: Mapping[Key, Sequence[int] | np.ndarray]
    ) -> Captured:
        """Captures whose planes have been joined, as another process has them."""
        found = {key: _FoundRows([], np.asarray(rows, np.int64), None) for key, rows in positions.items()}
        captured = cls(request, (), found)
        captured._tensors = dict(tensors)
        return captured

    def __reduce__(self) -> Any:
        tensors = {key: self._value(key).contiguous() for key in self._planes}
        return Captured.of, (self._request, tensors, {key: found.positions for key, found in self._found.items()})


def _join(what: str, key: Key, chunks: Sequence[RowChunk], found: _FoundRows) -> torch.Tensor:
    pieces = [chunks[number].plane(key)[rows] for number, rows in found.pieces]
    if not pieces:  # no row of this plane; a chunk may still tell its width
        known = (chunk.plane(key)[:0].clone() for chunk in chunks if key in chunk.layout.by_key)
        return next(known, torch.empty(0, 0))
    if len({(piece.dtype, piece.shape[1]) for piece in pieces}) > 1:
        kinds = sorted({f"{piece.dtype} [{piece.shape[1]}]" for piece in pieces})
        raise CaptureError(f"{what}: the rows of {describe(key)} do not fit together: {', '.join(kinds)}")
    joined = pieces[0] if len(pieces) == 1 else concatenated(pieces)
    return joined if found.order is None else joined[torch.from_numpy(found.order)]


def converted(rows: torch.Tensor, dtype: str | None, what: str) -> torch.Tensor:
    """The rows in a dtype; as they are for None. Raises CaptureError, which names `what`, if a number is too large for it."""
    if dtype is None or rows.dtype == getattr(torch, dtype):
        return rows
    new = rows.to(getattr(torch, dtype))
    if (lost := new.isinf() & rows.isfinite()).any():
        raise CaptureError(
            f"{what}: {float(rows[lost].abs().max()):.3g} is too large for {dtype}. Capture in a dtype with a wider range."
        )
    return new


def concatenated(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """CPU tensors, joined along their rows.

    numpy joins them in one thread. torch would use one for each core, and these stay busy for a while afterwards.
    """
    bits = np.concatenate([as_bits(piece).numpy() for piece in pieces])
    return torch.from_numpy(bits).view(pieces[0].dtype)


def gather(request: str, chunks: Sequence[RowChunk], stop: int, selected: Mapping[Key, Selection]) -> Captured:
    """The selected rows of a request below position `stop`, in the order of their positions.

    `stop` is prompt length plus generated tokens minus one: the last token is never fed back, and rows that asynchronous
    scheduling computed past the end are not the user's.

    Raises CaptureError if a position came twice, or is selected and did not come, or if a number is too large for the dtype asked for.
    """
    found = find_rows(request, [(each.positions, each.layout) for each in chunks], stop, selected)
    captured = Captured(request, chunks, found)
    for key in (key for key, rows in found.items() if rows.dtype is not None):
        captured._value(key)  # a number that is too large is an error now
    return captured
