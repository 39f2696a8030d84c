"""Captured rows as they come, and put together: a request's `Segment`s become one `Captured`.

    captures = gather(segments, stop=prompt_length + generated - 1, wanted=routes.output)
    captures["resid_post", 14]              # CPU tensor [positions, hidden]
    captures.positions["resid_post", 14]    # [0, 1, 2, ...]

Nothing is lost silently: a row that comes twice, or that was wanted and did not come, is a `CaptureError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from midstream.capture.selection import Wanted
from midstream.errors import CaptureError
from midstream.plan.fields import nearest
from midstream.plan.layout import Key, Layout

V = TypeVar("V")
NONE = np.empty(0, np.int64)


class NotCapturedError(CaptureError, KeyError):
    """No such request, site or layer among the captures. The message names the nearest ones."""

    __str__ = Exception.__str__  # a KeyError's would quote the message


class Segment(NamedTuple):
    """Some rows of one request, as one step or several captured them.

    Attributes:
        request: the request's id.
        positions: int64 `[rows]`, absolute positions in the sequence.
        layout: what each row holds, and where.
        rows: CPU tensor `[rows, row_width]` that nobody writes to any more. Without rows it still tells widths and dtype.
    """

    request: str
    positions: np.ndarray
    layout: Layout
    rows: torch.Tensor


def without_rows(request: str, keys: Iterable[Key], width: Callable[[str, int], int], dtype: torch.dtype) -> Segment:
    """A segment that only tells what is captured, for requests that may end without a row: `[0, width]` is their tensor."""
    layout = Layout.of(keys, width)
    return Segment(request, NONE, layout, torch.empty(0, layout.width, dtype=dtype))


def describe(key: Key) -> str:
    """`resid_post[14]`, with the moment if it is not the default one."""
    site, layer, when = key
    return f"{site}[{layer}]" + ("" if when == "before" else f" ({when} the edits)")


def listed(positions: np.ndarray, most: int = 6) -> str:
    text = ", ".join(str(position) for position in positions[:most].tolist())
    return f"position{'s' if positions.size > 1 else ''} {text}" + (", ..." if positions.size > most else "")


# ---------------------------------------------------------------------------------------------------- finding the rows


class Arranged(NamedTuple):
    """Pieces of rows brought into the order of their positions."""

    pieces: list[int]  # which piece comes first, second, ...
    positions: np.ndarray  # ascending
    order: np.ndarray | None  # rows of the pieces, one after another, in the order of positions; None: they are in it


def arrange(pieces: Sequence[np.ndarray], what: str | None) -> Arranged:
    """Raises CaptureError, saying of what, if a position is there twice (without `what` it stays twice)."""
    filled = sorted((i for i, piece in enumerate(pieces) if piece.size), key=lambda i: int(pieces[i][0]))
    positions = np.concatenate([pieces[i] for i in filled]) if filled else NONE
    order = None
    if not (np.diff(positions) > 0).all():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
        twice = positions[1:][np.diff(positions) == 0]
        if twice.size and what is not None:
            raise CaptureError(f"{what}: {listed(np.unique(twice))} came more than once")
    return Arranged(filled, positions, order)


class _Piece(NamedTuple):
    segment: int
    rows: slice | np.ndarray


class _Found(NamedTuple):
    """The rows of one plane, or of several that share all of them."""

    pieces: list[_Piece]
    positions: np.ndarray
    order: np.ndarray | None


Part = tuple[np.ndarray, Layout]


def find_rows(
    request: str, parts: Sequence[Part], stop: int | None, wanted: Mapping[Key, Wanted] | None
) -> dict[Key, _Found]:
    """Where the rows of each plane lie among the parts.

    Raises CaptureError for a row that is there twice, and for one below `stop` that was wanted and is not there.
    """
    if wanted is not None and len(parts) == 1 and parts[0][1].has_just(wanted):
        return _rows_of_one(request, parts, stop, wanted)
    by_layout: dict[Layout, list[int]] = {}
    for i, (_, layout) in enumerate(parts):
        by_layout.setdefault(layout, []).append(i)
    holders: dict[Key, list[int]] = {}
    for number, layout in enumerate(by_layout):
        for key in layout.by_key:
            holders.setdefault(key, []).append(number)
    members, found, shared = list(by_layout.values()), {}, {}
    for key, numbers in holders.items():
        rows = wanted.get(key) if wanted is not None else None
        if rows is None and wanted is not None:
            continue
        same = (tuple(numbers), id(rows))
        if same not in shared:
            segments = [i for number in numbers for i in members[number]]
            shared[same] = _select(f"capture of {describe(key)} of request {request!r}", parts, segments, stop, rows)
        found[key] = shared[same]
    if wanted is None:
        return found
    _complete(request, found, stop, wanted)
    return {
        key: found.get(key, _Found([], NONE, None)) for key in wanted
    }  # in this order, whichever stage's rows came first


def _rows_of_one(
    request: str, parts: Sequence[Part], stop: int | None, wanted: Mapping[Key, Wanted]
) -> dict[Key, _Found]:
    """The same where all rows came at once, as those of a prompt do: what planes share is looked at once."""
    first, rows = next(iter(wanted.items()), (None, None))
    if first is not None and rows is not None and all(other is rows for other in wanted.values()):
        return dict.fromkeys(wanted, _rows_of(request, parts, stop, first, rows))
    shared: dict[int, tuple[Key, Wanted]] = {}
    for key, rows in wanted.items():
        shared.setdefault(id(rows), (key, rows))
    found = {same: _rows_of(request, parts, stop, key, rows) for same, (key, rows) in shared.items()}
    return {key: found[id(rows)] for key, rows in wanted.items()}


def _rows_of(request: str, parts: Sequence[Part], stop: int | None, key: Key, rows: Wanted) -> _Found:
    if _are_wanted(parts[0][0], stop, rows):
        return _Found([_Piece(0, slice(None))], parts[0][0], None)
    found = _select(f"capture of {describe(key)} of request {request!r}", parts, [0], stop, rows)
    _complete(request, {key: found}, stop, {key: rows})
    return found


def _are_wanted(positions: np.ndarray, stop: int | None, rows: Wanted) -> bool:
    """Whether these are exactly the rows that were asked for."""
    return (
        rows.tail is None
        and np.array_equal(positions, rows.listed)
        and (stop is None or not positions.size or int(positions[-1]) < stop)
    )


def _complete(request: str, found: Mapping[Key, _Found], stop: int | None, wanted: Mapping[Key, Wanted]) -> None:
    seen: set[tuple[int, int]] = set()  # planes that share their rows are looked at once
    for key, rows in wanted.items():
        positions = found[key].positions if key in found else NONE
        if (pair := (id(rows), id(positions))) in seen:
            continue
        seen.add(pair)
        missing = np.setdiff1d(rows.below(stop), positions, assume_unique=True)
        if missing.size:
            what = f"capture of {describe(key)} of request {request!r}"
            rows_are = "1 row" if missing.size == 1 else f"{missing.size} rows"
            raise CaptureError(f"{what}: {rows_are} did not come ({listed(missing)})")


def _select(what: str, parts: Sequence[Part], segments: list[int], stop: int | None, rows: Wanted | None) -> _Found:
    pieces = [_Piece(i, selection(parts[i][0], stop, rows)) for i in segments]
    arranged = arrange([parts[piece.segment][0][piece.rows] for piece in pieces], what)
    return _Found([pieces[i] for i in arranged.pieces], arranged.positions, arranged.order)


def selection(positions: np.ndarray, stop: int | None, rows: Wanted | None) -> slice | np.ndarray:
    """Which of the rows are wanted and below `stop`; a slice if they lie together, so that taking them copies nothing."""
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


# ------------------------------------------------------------------------------------------------------ what users see


class ByPlane(Mapping[Any, V], Generic[V]):
    """Something for each captured plane, under `(site, layer)`.

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
        with contextlib.suppress(TypeError):  # what cannot be hashed is no key
            if isinstance(key, tuple) and len(key) in (2, 3):
                for when in ("before", "after"):
                    if (full := (key[0], key[1], when)) in self._planes and key in (full, full[:2]):
                        return full
        raise NotCapturedError(f"{self._what} has no {key!r}: {self._there(key)}")

    def _there(self, key: Any) -> str:
        """What there is instead, the nearest of it."""
        sites = list(dict.fromkeys(site for site, _, _ in self._planes))
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            return f"ask for (site, layer), of the sites {sites}"
        layers = sorted({layer for site, layer, _ in self._planes if site == key[0]})
        return f"{key[0]} is there at layers {layers}" if layers else nearest(str(key[0]), sites)


class Positions(ByPlane[list[int]]):
    """The positions of each tensor's rows."""

    def __init__(self, what: str, planes: Iterable[Key], positions: Callable[[Key], np.ndarray]) -> None:
        super().__init__(what, planes)
        self._positions = positions

    def _value(self, key: Key) -> list[int]:
        return self._positions(key).tolist()


class Captured(ByPlane[torch.Tensor]):
    """What a request captured: `captures["resid_post", 14]` is a CPU tensor `[positions, hidden]` in the model's dtype.

    Rows are in the order of their positions, which `positions` gives under the same keys. A tensor may be a view of
    everything that was captured in one step: `.clone()` what is to be kept when the rest is not.
    """

    def __init__(self, request: str, segments: Sequence[Segment], found: Mapping[Key, _Found]) -> None:
        super().__init__(f"capture of request {request!r}", found)
        self._segments: Sequence[Segment] = segments
        self._found = found
        self._tensors: dict[Key, torch.Tensor] = {}

    @property
    def positions(self) -> Positions:
        """The positions of each tensor's rows, under the same keys."""
        return Positions(self._what, self._planes, lambda key: self._found[key].positions)

    def _value(self, key: Key) -> torch.Tensor:
        """Put together when it is first asked for; with the last one, what came from the engine is let go."""
        if key not in self._tensors:
            self._tensors[key] = _join(self._what, key, self._segments, self._found[key])
            if len(self._tensors) == len(self._found):
                self._segments = ()
        return self._tensors[key]

    def __reduce__(self) -> Any:
        tensors = {key: self._value(key).contiguous() for key in self._planes}
        return _restore, (self._what, tensors, {key: found.positions for key, found in self._found.items()})


def _restore(what: str, tensors: dict[Key, torch.Tensor], positions: dict[Key, np.ndarray]) -> Captured:
    captured = Captured(what, (), {key: _Found([], rows, None) for key, rows in positions.items()})
    captured._what, captured._tensors = what, tensors
    return captured


def _join(what: str, key: Key, segments: Sequence[Segment], found: _Found) -> torch.Tensor:
    parts = [column(segments[piece.segment], key)[piece.rows] for piece in found.pieces]
    if not parts:  # nothing was to be captured here; a segment may still tell the width
        known = (column(segment, key)[:0].clone() for segment in segments if key in segment.layout.by_key)
        return next(known, torch.empty(0, 0))
    if len({(part.dtype, part.shape[1]) for part in parts}) > 1:
        kinds = sorted({f"{part.dtype} [{part.shape[1]}]" for part in parts})
        raise CaptureError(f"{what}: the rows of {describe(key)} do not fit together: {', '.join(kinds)}")
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if found.order is None else joined[torch.from_numpy(found.order)]


def column(segment: Segment, key: Key) -> torch.Tensor:
    """One plane of all the segment's rows, a view."""
    plane = segment.layout.by_key[key]
    return segment.rows[:, plane.offset : plane.offset + plane.width]


def check(segment: Segment) -> Segment:
    """The segment, with its positions as an int64 array. Raises CaptureError if its parts do not fit together."""
    positions = np.asarray(segment.positions, np.int64)
    wide = segment.layout.width
    if (
        positions.ndim != 1
        or segment.rows.ndim != 2
        or len(positions) != len(segment.rows)
        or wide > segment.rows.shape[1]
    ):
        given = f"{list(positions.shape)} positions, rows {list(segment.rows.shape)}, a layout {wide} wide"
        raise CaptureError(f"capture of request {segment.request!r}: a segment does not fit together: {given}")
    if segment.rows.device.type != "cpu":
        raise CaptureError(f"capture of request {segment.request!r}: rows on {segment.rows.device}, not on the CPU")
    return segment if positions is segment.positions else segment._replace(positions=positions)


def gather(segments: Iterable[Segment], stop: int, wanted: Mapping[Key, Wanted] | None = None) -> Captured:
    """All rows of one request that lie below position `stop`, in the order of their positions.

    `stop` is prompt length plus generated tokens minus one: the last token is never fed back, and what asynchronous
    scheduling ran past the end is not the user's. `wanted` (from `wanted.routes`) says which rows were asked for: others
    are left out. Without it whatever came is taken, so only a doubled row can be told.

    Raises CaptureError if a position came twice, or is wanted and did not come.
    """
    checked = [check(segment) for segment in segments]
    request = checked[0].request if checked else "?"
    if any(segment.request != request for segment in checked):
        others = {segment.request for segment in checked} - {request}
        raise CaptureError(f"segments of several requests: {request!r} and {sorted(others)}")
    found = find_rows(request, [(segment.positions, segment.layout) for segment in checked], stop, wanted)
    return Captured(request, checked, found)
