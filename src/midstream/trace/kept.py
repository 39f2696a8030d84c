"""Runs the code of traces that only keep rows of activations, in the caller's process, after their requests have ended.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]

A plan has captured the rows. The recording of the code (`trace.record`) shows what it keeps: containers with stand-ins in them. Captured
rows replace these. Only a request that ended early needs another recording, with as many steps as it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from midstream.sites import Point
from midstream.trace.graph import Value
from midstream.trace.program import Outcome
from midstream.trace.record import Recording
from midstream.trace.stand_in import StandIn
from midstream.trace.tree import as_bits, map_objects

Kept = Literal["last", "whole"]  # of each value: its last row, or all its rows
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class CapturedSteps:
    """The rows that one request has captured for its trace.

    Attributes:
        planes: the captured rows of each point, `[rows, width]`, in the order of their positions. They are contiguous, and nothing
            else refers to their memory, so the returned values may be views of it.
        prompt: how many rows of each plane belong to the prompt: 1 if only its last row was captured.
        count: how many steps the request had.
    """

    planes: Mapping[Point, torch.Tensor]
    prompt: int
    count: int


@dataclass(frozen=True)
class KeptRows:
    """Rows that lie together in a plane.

    Attributes:
        point: of the plane.
        first: the index of the first row.
        shape: of the tensor, without the width: `(count,)`, or `()` for a single row.
    """

    point: Point
    first: int
    shape: tuple[int, ...]


def rows_kept(recording: Recording) -> Kept | None:
    """Which rows of each value the code keeps; None if it does more than to keep rows."""
    values = list(_values(recording.outcome.values))
    if not (recording.saved and recording.only_saves) or recording.makes_numbers or None in values:
        return None
    kept = [value for value in values if value is not None]
    found = [_kept(value) for value in kept]
    if None in found or any(saved.memory.version or saved.chain for saved in recording.saved):
        return None
    computed = any(value.kind != "read" and _kept(value) is None for graph in recording.steps for value in graph.values)
    if computed or any(graph.last for graph in recording.steps):
        return None
    in_prompt = {how for each in found if each is not None and each[1] == 0 for how in (each[2],)}
    return "whole" if "whole" in in_prompt else "last"


def _values(tree: Any, seen: set[int] | None = None) -> Iterator[Value | None]:
    """The values of the stand-ins in lists, dicts and tuples; None for anything that is neither these nor plain."""
    seen = set() if seen is None else seen
    if id(tree) in seen and type(tree) in (list, dict):  # it may contain itself
        return
    seen.add(id(tree))
    if isinstance(tree, StandIn):
        yield tree.memory.value if not tree.chain else None
    elif type(tree) in (list, tuple):
        for each in tree:
            yield from _values(each, seen)
    elif type(tree) is dict:
        for name, each in tree.items():
            yield from _values(each, seen)
            if not isinstance(name, _PLAIN):
                yield None
    elif type(tree) not in _PLAIN:
        yield None


def _kept(value: Value) -> tuple[Point, int, str] | None:
    """The point, the step, and which rows of it a value is: "whole", "row" for the last row, "rows" for `[-1:]`. None for another value."""
    if value.kind == "read":
        return (value.what, value.step, "whole") if isinstance(value.what, tuple) and value.part is None else None
    if value.kind != "call" or not isinstance(value.args[0], Value):
        return None
    name, given = value.what._schema.name.removeprefix("aten::"), value.args[0]
    found = _kept(given)
    if found is None or value.kwargs:
        return None
    if name in ("clone", "detach", "alias"):
        return found
    if found[2] == "whole" and name == "select" and value.args[1:] == (0, -1):
        return *found[:2], "row"
    if found[2] == "whole" and name == "slice" and value.args[1:3] == (0, -1) and _is_open(value.args[3:]):
        return *found[:2], "rows"
    return None


def _is_open(rest: tuple[Any, ...]) -> bool:
    return (not rest or rest[0] is None or rest[0] >= 1 << 62) and (len(rest) < 2 or rest[1] == 1)


def _placed(values: Any, prompt: int) -> Any:
    """The values with `KeptRows` in place of stand-ins. `prompt`: how many rows of each plane belong to the prompt."""

    def placed(stand_in: StandIn) -> KeptRows:
        found = _kept(stand_in.memory.value)
        assert found is not None
        point, step, how = found
        rows = prompt if step == 0 else 1
        last = prompt + step - 1
        return KeptRows(
            point, last if how != "whole" else last - rows + 1, () if how == "row" else (1 if how == "rows" else rows,)
        )

    return map_objects(values, StandIn, placed)


class _Filling:
    """The values that code has kept, with `KeptRows` that count only the kept rows of their plane.

    Args:
        values: with `KeptRows` in place of rows.
        captured: of the request that the code ran for.
    """

    def __init__(self, values: Any, captured: CapturedSteps) -> None:
        used: dict[Point, list[int]] = {}  # rows of each plane

        def noted(rows: KeptRows) -> KeptRows:
            there = used.setdefault(rows.point, [])
            found = KeptRows(rows.point, len(there), rows.shape)
            there.extend(range(rows.first, rows.first + math.prod(rows.shape)))
            return found

        self._values = map_objects(values, KeptRows, noted)
        # A plane whose rows are all used once and in order is not copied.
        self._used = {
            point: None if rows == list(range(len(captured.planes[point]))) else np.array(rows)
            for point, rows in used.items()
        }

    def filled(self, captured: CapturedSteps) -> Any:
        """The values with a request's rows. Those of one plane lie in one block of memory, and none overlap."""
        blocks = {}
        for point, rows in self._used.items():
            plane = captured.planes[point]
            block = as_bits(plane).numpy()
            if rows is not None:
                block = block[rows]  # numpy copies in one thread: see `capture.rows.concatenated`
            blocks[point] = block, plane.dtype, plane.shape[1], block.strides[0]

        def tensor(rows: KeptRows) -> torch.Tensor:
            block, dtype, width, size = blocks[rows.point]
            # Each tensor gets its own storage, as in `transport.wire`, because `torch.save` writes the whole storage.
            count = math.prod(rows.shape) * width
            found = torch.frombuffer(block, dtype=dtype, count=count, offset=rows.first * size)
            return found.view(*rows.shape, width) if rows.shape else found

        return map_objects(self._values, KeptRows, tensor)


class KeptTrace:
    """The trace of a request, whose code only keeps rows.

    Args:
        recording: of its code, with as many steps as the request may have.
        again: records it with another number of steps.
        prompt: how many rows of the prompt are captured.
    """

    def __init__(self, recording: Recording, again: Callable[[int], Recording], prompt: int) -> None:
        self._recordings = {len(recording.steps): recording}
        self._most = len(recording.steps)
        self.prompt, self._again = prompt, again
        self._kept: dict[int, tuple[Outcome, _Filling]] = {}

    def outcome(self, captured: CapturedSteps) -> Outcome:
        """The outcome of a request that has ended."""
        count = captured.count if captured.count < self._most else self._most
        if count not in self._kept:
            if count not in self._recordings:
                self._recordings[count] = self._again(count)
            found = self._recordings[count].outcome
            self._kept[count] = found, _Filling(_placed(found.values, self.prompt), captured)
        found, kept = self._kept[count]
        return replace(found, values=kept.filled(captured), name="kept", order=captured.count, steps=captured.count)
