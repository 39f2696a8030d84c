"""Captured rows: their destinations, and how the `Rows` of a request's steps become one `Captured`.

    (_, selected), *others = routes(plan.captures, prompt_length, range(num_layers))
    captures = gather_captures(request_id, rows, prompt_length + generated - 1, selected)
    captures["resid_post", 14]              # CPU tensor [positions, hidden]
    captures.positions["resid_post", 14]    # [0, 1, 2, ...]

No row is lost silently: a row that arrives twice, or a selected row that does not arrive, raises `CaptureError`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from midstream.errors import CaptureError, NotCapturedError
from midstream.plan.captures import Plane, PlaneKey, Planes
from midstream.plan.fields import nearest
from midstream.plan.selections import NO_POSITIONS, SelectedHeads, Selection
from midstream.plan.values import Capture, Consumer
from midstream.sites import Point, site_of
from midstream.tree import as_bits

V = TypeVar("V")


class Rows(NamedTuple):
    """Captured rows of one request, of one step or several.

    Attributes:
        positions: int64 `[rows]`, absolute positions in the sequence.
        planes: of each row.
        block: `[at least first + rows, width]`, which holds these rows and maybe others. These rows do not change any more. Without rows,
            the block still has the width and dtype.
        first: the index of the first row in the block.
    """

    positions: np.ndarray
    planes: Planes
    block: torch.Tensor
    first: int = 0

    @property
    def values(self) -> torch.Tensor:
        """`[rows, width]`, a view."""
        return self.block[self.first : self.first + len(self.positions)]

    @property
    def nbytes(self) -> int:
        return len(self.positions) * self.block.shape[1:].numel() * self.block.element_size()

    def take(self, rows: slice | np.ndarray) -> Rows:
        """Only the rows at these indices."""
        return Rows(self.positions[rows], self.planes, self.values[rows])

    def plane(self, key: PlaneKey) -> torch.Tensor:
        """One plane of all rows, `[rows, width]`, as a view."""
        plane = self.planes.by_key[key]
        return self.values[:, plane.offset : plane.offset + plane.width]

    @classmethod
    def of_plane(cls, key: PlaneKey, positions: np.ndarray, values: torch.Tensor) -> Rows:
        """Rows of one plane, `[rows, width]`, or `[rows, heads, head_dim]`."""
        return cls(positions, Planes((Plane(*key, 0, values.shape[1]),)), values)

    @classmethod
    def joined(cls, each: Sequence[Rows], concatenate: Callable[[list[torch.Tensor]], torch.Tensor]) -> Rows:
        """Rows with the same planes in one block."""
        positions = np.concatenate([rows.positions for rows in each])
        return cls(positions, each[0].planes, concatenate([rows.values for rows in each]))


def join_in_order(values: Sequence[torch.Tensor], each: Sequence[Rows]) -> torch.Tensor:
    """Join values of several `Rows`, `[rows, width]` each, in the order of their positions. The positions within each `Rows` ascend."""
    if len(values) == 1:
        return values[0]
    joined = torch.cat(list(values))
    positions = np.concatenate([rows.positions for rows in each])
    if (np.diff(positions) > 0).all():
        return joined
    return joined[torch.from_numpy(np.argsort(positions)).to(joined.device)]


def plane_name(key: PlaneKey) -> str:
    """`resid_post[14]`, and `resid_post[14] (after the edits)`."""
    site, layer, when = key
    return f"{site}[{layer}]" + ("" if when == "before" else f" ({when} the edits)")


def _listed(positions: np.ndarray, most: int = 6) -> str:
    text = ", ".join(str(position) for position in positions[:most].tolist())
    return f"position{'s' if positions.size > 1 else ''} {text}" + (", ..." if positions.size > most else "")


# Destinations.


Selected = dict[PlaneKey, Selection]
# The destinations of a request's rows, each with its rows. First comes None for the output, then directories, functions and a plan's
# Consumers.
Routes = tuple[tuple[Any, Selected], ...]
NO_ROUTES: Routes = ((None, {}),)


def destination_key(to: Any) -> tuple[Any, ...]:
    """A key that is equal for all spellings of one destination, and different for different destinations."""
    if isinstance(to, (str, Path)):
        return ("directory", str(Path(to).expanduser().absolute()))
    if isinstance(to, Consumer):
        return ("consumer", to.name, json.dumps(to.options, sort_keys=True))
    owner = getattr(to, "__self__", None)  # every access to a bound method makes a new object
    return ("callable", id(to)) if owner is None else ("method", id(owner), getattr(to, "__qualname__", ""))


def routes(
    captures: Iterable[Capture],
    prompt_length: int,
    layers: Iterable[int],
    head_dims: Mapping[Point, int] = MappingProxyType({}),
) -> Routes:
    """The destinations of a request's rows.

    Args:
        layers: the model's, or a pipeline stage's if the stage delivers its own rows.
        head_dims: as in `ModelFacts`.

    Raises:
        PlanError: a span has not been resolved to positions, or two captures want different heads or dtypes of the same rows.
    """
    model_layers = list(layers)
    found: dict[tuple[Any, ...], tuple[Any, Selected]] = {(): (None, {})}
    for capture in captures:
        rows = Selection.of(capture.positions, prompt_length, capture.dtype)
        of_heads = functools.cache(
            lambda head_dim, head=capture.head, rows=rows: rows._replace(heads=SelectedHeads(head, head_dim))
        )
        given: Any = capture.layers
        for to in capture.sinks:
            _, selected = found.setdefault(() if to is None else destination_key(to), (to, {}))
            for layer in model_layers if given == "all" else [layer for layer in model_layers if layer in given]:
                key = (capture.site, layer, capture.when)
                own = rows if capture.head is None else of_heads(head_dims[capture.site, layer])
                selected[key] = selected[key] | own if key in selected else own
    return tuple(route for name, route in found.items() if route[1] or not name)


# Finding the rows of each plane among chunks.


def rows_where(keep: np.ndarray) -> slice | np.ndarray:
    """The index of the rows to keep; a slice if they are adjacent, so that taking them copies nothing."""
    chosen = np.flatnonzero(keep)
    if not chosen.size:
        return slice(0, 0)
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    return slice(first, last) if last - first == chosen.size else chosen


class RowIndex(NamedTuple):
    """Finds the rows of a plane in chunks, in the order of their positions. A plane is joined only when it is read.

    Attributes:
        parts: the number of a chunk, and the index of its rows.
        positions: of all rows, ascending.
        order: sorts the rows of the concatenated parts; None if they are in order.
    """

    parts: list[tuple[int, slice | np.ndarray]]
    positions: np.ndarray
    order: np.ndarray | None = None


def arrange_rows(
    chunks: Mapping[int, np.ndarray], what: str | None, selection: Selection | None = None, stop: int | None = None
) -> RowIndex:
    """Index the rows of chunks, which are given by their positions.

    Args:
        what: names the rows in errors. With None, a position may occur twice.
        selection: leaves out the other rows; None for all.
        stop: leaves out the rows from this position on.

    Raises CaptureError if a position occurs twice, or if a selected row does not occur.
    """
    expected = selection.below(stop) if selection is not None else None
    arrived = np.concatenate([NO_POSITIONS, *chunks.values()])
    if expected is not None and np.array_equal(arrived, expected):  # the usual case: all rows came, in order
        return RowIndex([(i, slice(None)) for i, chunk in chunks.items() if chunk.size], expected)
    chosen: list[tuple[int, slice | np.ndarray]] = []
    for i, chunk in chunks.items():
        keep = selection.mask(chunk) if selection is not None else np.ones(chunk.size, bool)
        chosen.append((i, rows_where(keep if stop is None else keep & (chunk < stop))))
    parts = [part for part in chosen if chunks[part[0]][part[1]].size]
    parts.sort(key=lambda part: int(chunks[part[0]][part[1]][0]))
    positions = np.concatenate([NO_POSITIONS, *(chunks[i][rows] for i, rows in parts)])
    order = None
    if not (np.diff(positions) > 0).all():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
        twice = positions[1:][np.diff(positions) == 0]
        if twice.size and what is not None:
            raise CaptureError(f"{what}: {_listed(np.unique(twice))} came more than once")
    missing = np.setdiff1d(expected, positions, assume_unique=True) if expected is not None else NO_POSITIONS
    if missing.size:
        rows_are = "1 row" if missing.size == 1 else f"{missing.size} rows"
        raise CaptureError(f"{what}: {rows_are} did not come ({_listed(missing)})")
    return RowIndex(parts, positions, order)


def find_rows(
    request: str, chunks: Sequence[tuple[np.ndarray, Planes]], stop: int | None, selected: Mapping[PlaneKey, Selection]
) -> dict[PlaneKey, RowIndex]:
    """The selected rows of each plane below position `stop`, among chunks with these positions and planes.

    Raises CaptureError for a row that occurs twice, and for a selected row that is missing.
    """
    by_planes: dict[Planes, list[int]] = {}
    for i, (_, planes) in enumerate(chunks):
        by_planes.setdefault(planes, []).append(i)
    everywhere = tuple(by_planes) if all(selected.keys() <= planes.by_key.keys() for planes in by_planes) else None
    found: dict[PlaneKey, RowIndex] = {}
    shared: dict[Any, RowIndex] = {}
    for key, rows in selected.items():
        holders = everywhere or tuple(planes for planes in by_planes if key in planes.by_key)
        if (same := (holders, id(rows))) not in shared:  # most planes have the same selection, and come together
            those = {i: chunks[i][0] for planes in holders for i in by_planes[planes]}
            shared[same] = arrange_rows(those, f"capture of {plane_name(key)} of request {request!r}", rows, stop)
        found[key] = shared[same]
    return found


# Captures as users get them.


class ByPlane(Mapping[Any, V], Generic[V]):
    """A value for each captured plane, under `(site, layer)`.

    Where a site was captured both before and after its edits, `(site, layer)` is before and `(site, layer, "after")` after.
    """

    def __init__(self, what: str, planes: Iterable[PlaneKey], value: Callable[[PlaneKey], V] | None = None) -> None:
        self._what, self._planes, self._given = what, dict.fromkeys(planes), value

    def _value(self, key: PlaneKey) -> V:
        assert self._given is not None  # a subclass has a method instead
        return self._given(key)

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
        return f"<{self._what}: {', '.join(plane_name(key) for key in self._planes) or 'nothing'}>"

    def _resolve(self, key: Any) -> PlaneKey:
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


class Captured(ByPlane[torch.Tensor]):
    """A request's captures: `captures["resid_post", 14]` is a CPU tensor `[positions, hidden]` in the model's dtype, or in
    that of the `Capture`. With a `Capture.head` it is `[positions, head_dim]`, with several `[positions, heads, head_dim]`.

    Rows are in the order of their positions, which `positions` gives under the same keys. A tensor may be a view of
    all rows of one step: `.clone()` a tensor that you keep longer than the others.
    """

    def __init__(
        self, request: str, chunks: Sequence[Rows] = (), found: Mapping[PlaneKey, RowIndex] = MappingProxyType({})
    ) -> None:
        super().__init__(f"capture of request {request!r}", found)
        self._request = request
        self._chunks: Sequence[Rows] = chunks
        self._found = found
        self._tensors: dict[PlaneKey, torch.Tensor] = {}

    @property
    def positions(self) -> ByPlane[list[int]]:
        """The positions of each tensor's rows, under the same keys."""
        return ByPlane(self._what, self._planes, lambda key: self._found[key].positions.tolist())

    def rows(self) -> Iterator[Rows]:
        """The rows of each plane."""
        return (Rows.of_plane(key, self._found[key].positions, self._value(key)) for key in self._planes)

    def take(self) -> dict[Any, torch.Tensor]:
        """All tensors, contiguous. Each has its own memory, which it shares with nothing but these captures."""
        taken = {}
        for name in self:
            key = self._resolve(name)
            joined, found = self._value(key), self._found[key]
            is_new = len(found.parts) > 1 or found.order is not None
            taken[name] = joined if is_new else joined.clone(memory_format=torch.contiguous_format)
        return taken

    def _value(self, key: PlaneKey) -> torch.Tensor:
        """Joined at the first access; once all planes are joined, the chunks are released."""
        if key not in self._tensors:
            self._tensors[key] = _join(self._what, key, self._chunks, self._found[key])
            if len(self._tensors) == len(self._found):
                self._chunks = ()
        return self._tensors[key]

    @classmethod
    def of(
        cls,
        request: str,
        tensors: Mapping[PlaneKey, torch.Tensor],
        positions: Mapping[PlaneKey, Sequence[int] | np.ndarray],
    ) -> Captured:
        """Captures whose planes are already joined, as another process sends them."""
        captured = cls(request, (), {key: RowIndex([], np.asarray(rows, np.int64)) for key, rows in positions.items()})
        captured._tensors = dict(tensors)
        return captured

    def __reduce__(self) -> Any:
        tensors = {key: self._value(key).contiguous() for key in self._planes}
        return Captured.of, (self._request, tensors, {key: found.positions for key, found in self._found.items()})


def _join(what: str, key: PlaneKey, chunks: Sequence[Rows], found: RowIndex) -> torch.Tensor:
    parts = [chunks[number].plane(key)[rows] for number, rows in found.parts]
    if not parts:  # no row of this plane; a chunk without rows may still tell its width
        known = (chunk.plane(key)[:0].clone() for chunk in chunks if key in chunk.planes.by_key)
        return next(known, torch.empty(0, 0))
    if len({(part.dtype, part.shape[1]) for part in parts}) > 1:
        kinds = sorted({f"{part.dtype} [{part.shape[1]}]" for part in parts})
        raise CaptureError(f"{what}: the rows of {plane_name(key)} do not fit together: {', '.join(kinds)}")
    joined = parts[0] if len(parts) == 1 else concatenate_rows(parts)
    return joined if found.order is None else joined[torch.from_numpy(found.order)]


def cast_rows(rows: torch.Tensor, dtype: str | None, what: str) -> torch.Tensor:
    """The rows in a dtype; unchanged for None. Raises CaptureError, which names `what`, if a number is too large for the dtype."""
    if dtype is None or rows.dtype == getattr(torch, dtype):
        return rows
    new = rows.to(getattr(torch, dtype))
    if (lost := new.isinf() & rows.isfinite()).any():
        raise CaptureError(
            f"{what}: {float(rows[lost].abs().max()):.3g} is too large for {dtype}. Capture in a dtype with a wider range."
        )
    return new


def rows_as_asked(rows: torch.Tensor, selection: Selection, what: str) -> torch.Tensor:
    """Rows `[rows, width]` with the heads and in the dtype that their capture asks for. Raises CaptureError as `cast_rows`."""
    return cast_rows(rows if selection.heads is None else selection.heads.of(rows), selection.dtype, what)


def concatenate_rows(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join CPU tensors along their rows.

    numpy joins them in one thread. torch would use a thread for each core, and these stay busy for a while afterwards.
    """
    bits = np.concatenate([as_bits(chunk).numpy() for chunk in chunks])
    return torch.from_numpy(bits).view(chunks[0].dtype)


def gather_captures(
    request: str, chunks: Sequence[Rows], stop: int, selected: Mapping[PlaneKey, Selection]
) -> Captured:
    """The selected rows of a request below position `stop`, in the order of their positions.

    `stop` is prompt length plus generated tokens minus one: the last token is never fed back into the model, and rows that asynchronous
    scheduling computed past the end are dropped.

    Raises CaptureError if a position came twice, if a selected position did not come, or if a number is too large for the chosen dtype.
    """
    captured = Captured(request, chunks, find_rows(request, [each[:2] for each in chunks], stop, selected))
    for key, rows in selected.items():
        # Convert now, so that a number that is too large raises here.
        if rows.dtype is not None or rows.heads is not None:
            captured._tensors[key] = rows_as_asked(captured._value(key), rows, f"{captured._what}, {plane_name(key)}")
    return captured
