"""Rows to capture, made up, and what should become of them: shared by the tests of captures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from midstream.capture import rows as capture_rows
from midstream.capture import sinks as capture_sinks
from midstream.capture.consumers import CaptureInfo
from midstream.capture.rows import NO_ROUTES, Captured, Rows, routes
from midstream.plan.captures import PlaneKey, Planes
from midstream.plan.selections import Selection
from midstream.plan.values import Capture

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def layout(*planes: tuple[str, int, str, int]) -> Planes:
    """Planes (site, layer, when, width) one after another."""
    widths = {(site, layer): width for site, layer, _, width in planes}
    return Planes.of((plane[:3] for plane in planes), lambda key: widths[key[:2]])


def random_rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.iinfo(BITS[dtype])
    return torch.randint(bits.min, bits.max, (count, width), dtype=BITS[dtype], generator=generator).view(dtype)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    kind = BITS[want.dtype]
    return got.dtype == want.dtype and torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


class Segment(NamedTuple):
    """A `Rows`, and the request that it is of."""

    request: str
    positions: np.ndarray
    layout: Planes
    rows: torch.Tensor

    @property
    def chunk(self) -> Rows:
        return Rows(*self[1:])


def gather(segments: Sequence[Segment], stop: int, selected: dict[PlaneKey, Selection] | None = None) -> Captured:
    """The captures of the segments' request; without `selected`, of all positions that are there."""
    if selected is None:
        there: dict[PlaneKey, set[int]] = {}
        for each in segments:
            for key in each.layout.by_key:
                there.setdefault(key, set()).update(each.positions.tolist())
        selected = {
            key: Selection(np.array(sorted(found), np.int64), max(found, default=-1) + 1)
            for key, found in there.items()
        }
    name = segments[0].request if segments else "?"
    return capture_rows.gather_captures(name, [each.chunk for each in segments], stop, selected)


class Sinks(capture_sinks.Sinks):
    """The sinks of an engine, and what its requests capture, by their ids."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.captures: dict[str, capture_sinks.RequestCapture] = {}

    def put(self, segment: Segment) -> None:
        self.captures[segment.request].add([segment.chunk])

    def confirm(self, request: str, stop: int) -> None:
        self.captures[request].add([], stop)

    def end(self, request: str, stop: int | None = None, error: Exception | None = None) -> None:
        self.captures[request].end(stop, error)

    def result(self, request: str) -> Captured:
        return self.captures[request].result(0)

    def discard(self, request: str, error: Exception | None = None) -> None:
        self.captures[request].discard(error)


def segment(request: str, positions: Sequence[int], *planes: tuple[str, int, str, int], seed: int = 0) -> Segment:
    """Random rows of these planes."""
    lay = layout(*planes)
    return Segment(
        request, np.array(positions, np.int64), lay, random_rows(len(positions), sum(p.width for p in lay), seed=seed)
    )


def cut(whole: Segment, pieces: Sequence[Sequence[int]]) -> list[Segment]:
    """The segment's rows by their indices, piece by piece."""
    return [
        whole._replace(positions=whole.positions[list(piece)], rows=whole.rows[list(piece)].clone()) for piece in pieces
    ]


@st.composite
def cuts(draw: st.DrawFn, count: int) -> list[list[int]]:
    """Row indices 0..count-1, shuffled, or in order, and cut anywhere."""
    order = draw(st.one_of(st.just(list(range(count))), st.permutations(range(count))))
    at = sorted(draw(st.lists(st.integers(0, count), max_size=6)))
    pieces = [order[a:b] for a, b in zip([0, *at], [*at, count], strict=True)]
    return draw(st.permutations(pieces)) if draw(st.booleans()) else pieces


class Recorder:
    """A consumer that keeps everything, and may be told what to do on each call."""

    def __init__(self, act: Callable[..., None] = lambda *_: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.act = act

    def _take(self, *call: Any) -> None:
        self.act(*call)
        self.calls.append(call)

    def begin(self, info: CaptureInfo) -> None:
        self._take("begin", info.request_id, info)

    def rows(
        self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor, when: str = "before"
    ) -> None:
        self._take("rows", request_id, (site, layer, when), positions, tensor.clone())

    def end(self, request_id: str, error: Exception | None) -> None:
        self._take("end", request_id, error)

    def close(self) -> None:
        self._take("close", None)

    def of(self, request_id: str) -> dict[Any, dict[int, torch.Tensor]]:
        """Rows by plane and position; a position that came twice fails here."""
        found: dict[Any, dict[int, torch.Tensor]] = {}
        for kind, request, *rest in self.calls:
            if kind == "rows" and request == request_id:
                key, positions, tensor = rest
                assert len(positions) == len(tensor)
                for position, row in zip(positions, tensor, strict=True):
                    assert position not in found.setdefault(key, {}), f"{key} {position} came twice"
                    found[key][position] = row
        return found

    def ended(self, request_id: str) -> Exception | None:
        (found,) = [call[2] for call in self.calls if call[:2] == ("end", request_id)]
        return found


def begin(
    sinks: Sinks, request: str, *captures: Capture, prompt: Sequence[int] = (), layers: int = 4, **info: Any
) -> None:
    told = CaptureInfo(request, tuple(prompt), **info)
    found = routes(captures, told.prompt_length, range(layers))
    sinks.captures[request] = capture_sinks.RequestCapture(told, (*NO_ROUTES, *found[1:]), sinks)


def wait_until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def capture_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("midstream-capture")}


A, B, C = ("resid_post", 14, "before", 4), ("resid_post", 14, "after", 4), ("mlp_out", 2, "before", 6)
KEYS = {A: ("resid_post", 14), B: ("resid_post", 14, "after"), C: ("mlp_out", 2)}
LAYERS = 20


def everything(directory: Path, *planes, positions="all") -> list[Capture]:
    return [
        Capture(site, layers=layer, when=when, positions=positions, to=str(directory))
        for site, layer, when, _ in planes
    ]


def write(sinks: Sinks, directory: Path, whole: Segment, *planes, pieces=None, prompt=(), **info) -> None:
    """One request, to its end."""
    begin(sinks, whole.request, *everything(directory, *planes), prompt=prompt, layers=LAYERS, **info)
    for piece in cut(whole, pieces) if pieces else [whole]:
        sinks.put(piece)
    sinks.end(whole.request, len(whole.positions))


def stored(directory: Path, request: str, count: int = 3, **info) -> Segment:
    """One request of `count` rows, written and collected by an engine of its own."""
    whole = segment(request, range(count), A, C, seed=count)
    with closing(Sinks()) as sinks:
        write(sinks, directory, whole, A, C, prompt=range(count), **info)
        sinks.result(request)
    return whole
