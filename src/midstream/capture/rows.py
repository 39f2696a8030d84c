"""Which rows a plan captures, and captured rows put together: a request's `RowChunk`s become one `Captured`.

    selected = routes(plan.captures, prompt_length, range(num_layers)).output
    captures = gather(chunks, stop=prompt_length + generated - 1, selected=selected)
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

from midstream.errors import CaptureError
from midstream.plan.captures import Key, Layout, captured_positions
from midstream.plan.fields import nearest
from midstream.plan.values import Capture, Consumer

V = TypeVar("V")
NO_POSITIONS = np.empty(0, np.int64)


class NotCapturedError(CaptureError, KeyError):
    """The captures lack this request, site or layer. The message names the nearest ones."""

    __str__ = Exception.__str__  # a KeyError's would quote the message


class RowChunk(NamedTuple):
    """Some rows of one request, captured in one step or several.

    Attributes:
        request: the request's id.
        positions: int64 `[rows]`, absolute positions in the sequence.
        layout: the planes of each row.
        rows: CPU tensor `[rows, row_width]` that nobody writes to any more. With no rows it still tells widths and dtype.
    """

    request: str
    positions: np.ndarray
    layout: Layout
    rows: torch.Tensor


def empty_chunk(request: str, keys: Iterable[Key], width: Callable[[str, int], int], dtype: torch.dtype) -> RowChunk:
    """A chunk that only tells what is captured, so that a plane without rows is a tensor `[0, width]`."""
    layout = Layout.of(keys, width)
    return RowChunk(request, NO_POSITIONS, layout, torch.empty(0, layout.width, dtype=dtype))


def describe(key: Key) -> str:
    """`resid_post[14]`, and `resid_post[14] (after the edits)`."""
    site, layer, when = key
    return f"{site}[{layer}]" + ("" if when == "before" else f" ({when} the edits)")


def _listed(positions: np.ndarray, most: int = 6) -> str:
    text = ", ".join(str(position) for position in positions[:most].tolist())
    return f"position{'s' if positions.size > 1 else ''} {text}" + (", ..." if positions.size > most else "")


# Which rows are captured, and where they go.


class RowSelection(NamedTuple):
    """Selected rows of one plane: the `listed` positions (int64, ascending), and all from position `tail` on."""

    listed: np.ndarray
    tail: int | None = None

    def mask(self, positions: np.ndarray) -> np.ndarray:
        """Which of the positions are selected."""
        keep = np.zeros(positions.size, bool) if self.tail is None else positions >= self.tail
        if self.listed.size:
            place = np.searchsorted(self.listed, positions)
            keep |= self.listed[np.minimum(place, self.listed.size - 1)] == positions
        return keep

    def below(self, stop: int | None) -> np.ndarray:
        """All selected positions below `stop`; without a stop, only the listed ones are known."""
        if stop is None:
            return self.listed
        generated = np.arange(stop if self.tail is None else self.tail, stop, dtype=np.int64)
        return np.union1d(self.listed[self.listed < stop], generated)

    def __or__(self, other: RowSelection) -> RowSelection:
        tail = other.tail if self.tail is None else self.tail  # of one request, so both are its prompt's length
        return RowSelection(np.union1d(self.listed, other.listed), tail)


@dataclass
class Route:
    """One destination, and the rows that go there."""

    to: Any  # a directory, a callable or a plan's Consumer; None for the output
    selected: dict[Key, RowSelection] = field(default_factory=dict)


class Routes(NamedTuple):
    """Where the rows of one request go."""

    output: dict[Key, RowSelection]
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
        prompt, goes_on = captured_positions(capture.positions, prompt_length)
        rows = RowSelection(prompt, prompt_length if goes_on else None)
        given: Any = capture.layers
        chosen = there if given == "all" else [layer for layer in there if layer in given]
        for to in capture.sinks:
            route = output if to is None else sinks.setdefault(identity(to), Route(to))
            for layer in chosen:
                key = (capture.site, layer, capture.when)
                route.selected[key] = route.selected[key] | rows if key in route.selected else rows
    return Routes(output.selected, tuple(route for route in sinks.values() if route.selected))


def select_rows(positions: np.ndarray, stop: int | None, rows: RowSelection | None) -> slice | np.ndarray:
    """Which rows are selected and below `stop`; a slice if they are adjacent, so that taking them copies nothing."""
    keep = np.ones(positions.size, bool) if stop is None else positions < stop
    if rows is not None:
        keep &= rows.mask(positions)
    if keep.all():
        return slice(None)
    chosen = np.flatnonzero(keep)
    if not chosen.size:
        return slice(0, 0)
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    return slice(first, last) if last - first == chosen.size else chosen


# Finding the rows of each plane among chunks.


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


ChunkRows = tuple[np.ndarray, Layout]  # positions and layout of a chunk


def find_rows(
    request: str, chunks: Sequence[ChunkRows], stop: int | None, selected: Mapping[Key, RowSelection] | None
) -> dict[Key, _FoundRows]:
    """The rows of each plane among the chunks.

    Raises CaptureError for a row that occurs twice, and for a selected row below `stop` that is missing.
    """
    if selected is not None and len(chunks) == 1 and chunks[0][1].has_just(selected):
        return _find_in_one(request, chunks, stop, selected)
    by_layout: dict[Layout, list[int]] = {}
    for i, (_, layout) in enumerate(chunks):
        by_layout.setdefault(layout, []).append(i)
    holders: dict[Key, list[int]] = {}
    for number, layout in enumerate(by_layout):
        for key in layout.by_key:
            holders.setdefault(key, []).append(number)
    members, found, shared = list(by_layout.values()), {}, {}
    for key, numbers in holders.items():
        rows = selected.get(key) if selected is not None else None
        if rows is None and selected is not None:
            continue
        same = (tuple(numbers), id(rows))
        if same not in shared:
            candidates = [i for number in numbers for i in members[number]]
            shared[same] = _find(_capture_of(request, key), chunks, candidates, stop, rows)
        found[key] = shared[same]
    if selected is None:
        return found
    _check_complete(request, found, stop, selected)
    nothing = _FoundRows([], NO_POSITIONS, None)
    return {key: found.get(key, nothing) for key in selected}  # in the plan's order, whichever stage's rows came first


def _find_in_one(
    request: str, chunks: Sequence[ChunkRows], stop: int | None, selected: Mapping[Key, RowSelection]
) -> dict[Key, _FoundRows]:
    """`find_rows` for a request whose rows came at once, as those of a prompt do: planes with one selection are checked once."""
    first, rows = next(iter(selected.items()), (None, None))
    if first is not None and rows is not None and all(other is rows for other in selected.values()):
        return dict.fromkeys(selected, _find_plane_in_one(request, chunks, stop, first, rows))
    shared: dict[int, tuple[Key, RowSelection]] = {}
    for key, rows in selected.items():
        shared.setdefault(id(rows), (key, rows))
    found = {same: _find_plane_in_one(request, chunks, stop, key, rows) for same, (key, rows) in shared.items()}
    return {key: found[id(rows)] for key, rows in selected.items()}


def _find_plane_in_one(
    request: str, chunks: Sequence[ChunkRows], stop: int | None, key: Key, rows: RowSelection
) -> _FoundRows:
    positions = chunks[0][0]
    has_all = rows.tail is None and np.array_equal(positions, rows.listed)
    if has_all and (stop is None or not positions.size or int(positions[-1]) < stop):
        return _FoundRows([(0, slice(None))], positions, None)
    found = _find(_capture_of(request, key), chunks, [0], stop, rows)
    _check_complete(request, {key: found}, stop, {key: rows})
    return found


def _find(
    what: str, chunks: Sequence[ChunkRows], candidates: list[int], stop: int | None, rows: RowSelection | None
) -> _FoundRows:
    pieces = [(i, select_rows(chunks[i][0], stop, rows)) for i in candidates]
    arranged = arrange([chunks[i][0][chosen] for i, chosen in pieces], what)
    return _FoundRows([pieces[i] for i in arranged.pieces], arranged.positions, arranged.order)


def _check_complete(
    request: str, found: Mapping[Key, _FoundRows], stop: int | None, selected: Mapping[Key, RowSelection]
) -> None:
    """Raise CaptureError if a selected row is missing."""
    seen: set[tuple[int, int]] = set()  # planes that share their rows are checked once
    for key, rows in selected.items():
        positions = found[key].positions if key in found else NO_POSITIONS
        if (pair := (id(rows), id(positions))) in seen:
            continue
        seen.add(pair)
        missing = np.setdiff1d(rows.below(stop), positions, assume_unique=True)
        if missing.size:
            rows_are = "1 row" if missing.size == 1 else f"{missing.size} rows"
            raise CaptureError(f"{_capture_of(request, key)}: {rows_are} did not come ({_listed(missing)})")


def _capture_of(request: str, key: Key) -> str:
    return f"capture of {describe(key)} of request {request!r}"


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

    def __repr__(self) -> str:
        return f"<{self._what}: {', '.join(describe(key) for key in self._planes) or 'nothing'}>"

    def _resolve(self, key: Any) -> Key:
        with contextlib.suppress(TypeError):  # an unhashable object is no key
            if isinstance(key, tuple) and len(key) in (2, 3):
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
    """What a request captured: `captures["resid_post", 14]` is a CPU tensor `[positions, hidden]` in the model's dtype.

    Rows are in the order of their positions, which `positions` gives under the same keys. A tensor may be a view of
    all rows of one step: `.clone()` a tensor that you keep longer than the others.
    """

    def __init__(self, request: str, chunks: Sequence[RowChunk], found: Mapping[Key, _FoundRows]) -> None:
        super().__init__(f"capture of request {request!r}", found)
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

    def _value(self, key: Key) -> torch.Tensor:
        """Joined at the first access; once all planes are joined, the chunks are released."""
        if key not in self._tensors:
            self._tensors[key] = _join(self._what, key, self._chunks, self._found[key])
            if len(self._tensors) == len(self._found):
                self._chunks = ()
        return self._tensors[key]

    def __reduce__(self) -> Any:
        tensors = {key: self._value(key).contiguous() for key in self._planes}
        return _restore, (self._what, tensors, {key: found.positions for key, found in self._found.items()})


def _restore(what: str, tensors: dict[Key, torch.Tensor], positions: dict[Key, np.ndarray]) -> Captured:
    captured = Captured(what, (), {key: _FoundRows([], rows, None) for key, rows in positions.items()})
    captured._what, captured._tensors = what, tensors
    return captured


def _join(what: str, key: Key, chunks: Sequence[RowChunk], found: _FoundRows) -> torch.Tensor:
    pieces = [plane_of(chunks[number], key)[rows] for number, rows in found.pieces]
    if not pieces:  # no row of this plane; a chunk may still tell its width
        known = (plane_of(chunk, key)[:0].clone() for chunk in chunks if key in chunk.layout.by_key)
        return next(known, torch.empty(0, 0))
    if len({(piece.dtype, piece.shape[1]) for piece in pieces}) > 1:
        kinds = sorted({f"{piece.dtype} [{piece.shape[1]}]" for piece in pieces})
        raise CaptureError(f"{what}: the rows of {describe(key)} do not fit together: {', '.join(kinds)}")
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return joined if found.order is None else joined[torch.from_numpy(found.order)]


def plane_of(chunk: RowChunk, key: Key) -> torch.Tensor:
    """One plane of all the chunk's rows, `[rows, width]`, as a view."""
    plane = chunk.layout.by_key[key]
    return chunk.rows[:, plane.offset : plane.offset + plane.width]


def check(chunk: RowChunk) -> RowChunk:
    """The chunk, with its positions as an int64 array. Raises CaptureError if its fields do not fit together."""
    positions = np.asarray(chunk.positions, np.int64)
    width = chunk.layout.width
    if positions.ndim != 1 or chunk.rows.ndim != 2 or len(positions) != len(chunk.rows) or width > chunk.rows.shape[1]:
        given = f"{list(positions.shape)} positions, rows {list(chunk.rows.shape)}, a layout {width} wide"
        raise CaptureError(f"capture of request {chunk.request!r}: a chunk of rows does not fit together: {given}")
    if chunk.rows.device.type != "cpu":
        raise CaptureError(f"capture of request {chunk.request!r}: rows on {chunk.rows.device}, not on the CPU")
    return chunk if positions is chunk.positions else chunk._replace(positions=positions)


def gather(chunks: Iterable[RowChunk], stop: int, selected: Mapping[Key, RowSelection] | None = None) -> Captured:
    """All rows of one request below position `stop`, in the order of their positions.

    `stop` is prompt length plus generated tokens minus one: the last token is never fed back, and rows that asynchronous
    scheduling computed past the end are not the user's. Rows outside of `selected` (from `routes`) are left out. Without
    it all rows are taken, and missing ones go unnoticed.

    Raises CaptureError if a position came twice, or is selected and did not come.
    """
    checked = [check(chunk) for chunk in chunks]
    request = checked[0].request if checked else "?"
    if any(chunk.request != request for chunk in checked):
        others = {chunk.request for chunk in checked} - {request}
        raise CaptureError(f"rows of several requests: {request!r} and {sorted(others)}")
    found = find_rows(request, [(chunk.positions, chunk.layout) for chunk in checked], stop, selected)
    return Captured(request, checked, found)
