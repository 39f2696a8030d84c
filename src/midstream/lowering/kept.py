"""Traces that only keep what can be computed from the rows of one value at a time, beside writes of a plan: no code runs on the engine.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]
    scores = [model.layers_output[14] @ probe for _ in tracer.iter[:]]

A plan captures the rows, or what programs (`plan.program`) compute from them. The recording of the code (`trace.record`) shows what it
keeps: containers with stand-ins in them. Once a request has ended, its captured rows replace these, in the caller's process. Only a request
that ended early needs another recording, with as many steps as it had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.rows import Captured
from midstream.errors import CaptureError, PlanError
from midstream.lowering.passes import Rows as Choice
from midstream.lowering.passes import rows_of
from midstream.lowering.rowwise import NotRowwise, Reader
from midstream.plan.building import Builder, Result
from midstream.plan.program import MAX_RESULTS, Program
from midstream.plan.running import unpacked
from midstream.sites import Point
from midstream.trace.graph import Chain, Value, ancestors, repeats
from midstream.trace.program import Outcome
from midstream.trace.record import Recording
from midstream.trace.stand_in import StandIn
from midstream.tree import as_bits, map_objects, objects_in

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LENGTHS = (1, 2, 997)  # a choice of rows that is the last one in these is the last one in all


# What a request has captured, and how many steps it had -> the outcome of its trace.
Ending = Callable[[Captured, int], Outcome]


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


class _Read(NamedTuple):
    """A tensor that is computed from rows of one value.

    Attributes:
        result: of a program at the value's point; its input for the rows themselves.
        shape: of the tensor, without what `lead` tells of.
        rows: which of the value's rows.
        lead: as of `blocks.Block`: how many axes of size 1 it has in front of its rows; -1 if it is a single row without that axis.
    """

    point: Point
    step: int
    result: Result
    shape: tuple[int, ...]
    rows: Choice
    lead: int

    @property
    def is_of_last(self) -> bool:
        """Whether it is about the prompt's last row alone, however many there are, or about a later token."""
        if self.step:
            return True
        try:
            return all(rows_of(self.rows, tokens) == [tokens - 1] for tokens in _LENGTHS)
        except IndexError:
            return False


class _NotKept(Exception):
    """The code does more than to keep what programs can compute."""


class Reads:
    """What the code of a trace keeps.

    Args:
        recording: of its code.
        dtype: of the model.

    Attributes:
        programs: point -> what computes what is captured there; None for the rows themselves.
        last: whether the last row of the prompt is enough.
    """

    def __init__(self, recording: Recording, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._builders: dict[Point, Builder] = {}
        self._parts: dict[Point, list[Result]] = {}
        self._reads = list(self.of(recording).values())
        for read in self._reads:
            parts = self._parts.setdefault(read.point, [])
            if read.result.ref not in [part.ref for part in parts]:
                parts.append(read.result)
        self.last = all(read.is_of_last for read in self._reads)
        self.programs = {point: self._program(point) for point in self._parts}

    @classmethod
    def found(cls, recording: Recording, dtype: torch.dtype) -> Reads | None:
        """The same; None if the code does more than to keep what can be computed from rows."""
        try:
            return cls(recording, dtype)
        except (_NotKept, PlanError):
            return None

    def fits(self, length: int) -> bool:
        """Whether a prompt of this length has the rows, and they lie together."""
        try:
            for read in self._reads if not self.last else ():
                _stretch(read, length)
        except _NotKept:
            return False
        return True

    def of(self, recording: Recording) -> dict[int, _Read]:
        """By the ids of stand-ins, the values that code keeps. Raises _NotKept."""
        if not recording.only_saves or recording.makes_numbers or any(graph.last for graph in recording.steps):
            raise _NotKept
        known: dict[Any, _Read] = {}
        readers: dict[int, Reader] = {}
        earlier: dict[int, Value] = {}  # id of a value -> the one in its place in an equal step before
        for number, graph in enumerate(recording.steps[2:], start=2):
            before = recording.steps[number - 1]
            if repeats(graph, before):
                earlier |= {id(new): old for new, old in zip(graph.values, before.values, strict=True)}

        def read(value: Value, chain: Chain, shape: tuple[int, ...], dtype: torch.dtype) -> _Read:
            key = id(value), str(chain)  # all that a chain without values has are names and numbers
            if next(objects_in(chain, Value), None) is not None:
                return self._read(value, chain, shape, dtype, readers)
            if key not in known:
                alike = earlier.get(id(value))
                if alike is None:
                    known[key] = self._read(value, chain, shape, dtype, readers)
                else:
                    known[key] = read(alike, chain, shape, dtype)._replace(step=value.step)
            return known[key]

        kept = _stand_ins(recording.outcome.values)
        return {id(each): read(each.memory.value, each.chain, tuple(each.shape), each.dtype) for each in kept}

    def _read(
        self, value: Value, chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, readers: dict[int, Reader]
    ) -> _Read:
        sources = [each for each in ancestors([value, *objects_in(chain, Value)]) if each.kind == "read"]
        if len(sources) != 1:
            raise _NotKept
        (source,) = sources
        if not isinstance(source.what, tuple) or source.part is not None or source.dtype != self._dtype:
            raise _NotKept
        if id(source) not in readers:
            builder = self._builders.get(source.what)
            readers[id(source)] = reader = Reader(source, value.line, builder)
            self._builders[source.what] = reader.builder
        try:
            block = readers[id(source)].block(value, chain)
        except NotRowwise:
            raise _NotKept from None
        result, count = block.result, len(rows_of(block.rows, source.shape[0]))
        as_block = result.shape if block.lead < 0 else (*[1] * block.lead, count, *result.shape)
        if block.parts or result.shaped.rows != 1 or as_block != shape or result.dtype != dtype:
            raise _NotKept
        unshaped = readers[id(source)].unshaped(result)
        return _Read(source.what, source.step, unshaped, result.shape, block.rows, block.lead)

    def _program(self, point: Point) -> Program | None:
        parts = self._parts[point]
        if all(part.ref == self._builders[point].input.ref for part in parts):
            return None
        if len(parts) > MAX_RESULTS:
            raise _NotKept
        return self._builders[point].program(*parts, keeps=True)

    def unpacked(self, planes: Mapping[Point, torch.Tensor]) -> dict[tuple[Point, int], torch.Tensor]:
        """(point, which of the results there) -> `[rows, numbers]`."""
        found = {}
        for point, program in self.programs.items():
            plane = planes[point]
            for i, part in enumerate([plane] if program is None else unpacked(program, plane)):
                found[point, i] = part.reshape(len(part), -1)
        return found

    def placed(self, recording: Recording, prompt: int) -> Any:
        """The values that code has kept, with `KeptRows` in place of stand-ins.

        Args:
            prompt: how many rows of each plane belong to the prompt.

        Raises:
            CaptureError: what it keeps was not known when the request began.
        """
        try:
            found = self.of(recording) if recording.reason is None else {}
        except (_NotKept, PlanError):
            found = {}

        def kept(stand_in: StandIn) -> KeptRows:
            read = found.get(id(stand_in))
            known = [part.ref for part in self._parts.get(read.point, ())] if read is not None else []
            if read is None or read.result.ref not in known:
                raise CaptureError(
                    "The request ended early, and the trace keeps other values with so few steps. Compute these from saved values when the "
                    "trace is over, or let the request go on with ignore_eos=True."
                )
            first, count = _stretch(read, prompt)
            first = prompt + read.step - 1 if read.step else first
            shape = read.shape if read.lead < 0 else (*[1] * read.lead, count, *read.shape)
            return KeptRows(read.point, known.index(read.result.ref), first, count, shape)

        return map_objects(recording.outcome.values, StandIn, kept)


def _stretch(read: _Read, prompt: int) -> tuple[int, int]:
    """Its first row, and how many. Raises _NotKept for rows that do not lie together, or that the prompt does not have."""
    try:
        rows = rows_of(read.rows, 1 if read.step else prompt)
    except IndexError:
        raise _NotKept from None
    if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
        raise _NotKept
    return rows[0], len(rows)


def _stand_ins(tree: Any, seen: set[int] | None = None) -> Iterator[StandIn]:
    """The stand-ins in lists, dicts and tuples. Raises _NotKept for anything that is neither these nor plain."""
    seen = set() if seen is None else seen
    if id(tree) in seen and type(tree) in (list, dict):  # it may contain itself
        return
    seen.add(id(tree))
    if isinstance(tree, StandIn):
        if tree.memory.version:
            raise _NotKept
        yield tree
    elif type(tree) in (list, tuple):
        for each in tree:
            yield from _stand_ins(each, seen)
    elif type(tree) is dict:
        for name, each in tree.items():
            yield from _stand_ins(each, seen)
            if not isinstance(name, _PLAIN):
                raise _NotKept
    elif type(tree) not in _PLAIN:
        raise _NotKept


# Putting captured rows into what was kept.


@dataclass(frozen=True)
class KeptRows:
    """Rows that lie together in a plane.

    Attributes:
        point: of the plane.
        part: which of the results there.
        first, count: the index of the first row, and how many.
        shape: of the tensor.
    """

    point: Point
    part: int
    first: int
    count: int
    shape: tuple[int, ...]


class _Filling:
    """The values that code has kept, with `KeptRows` that count only the kept rows of their plane.

    Args:
        values: with `KeptRows` in place of rows.
        planes: of the request that the code ran for.
    """

    def __init__(self, values: Any, planes: Mapping[tuple[Point, int], torch.Tensor]) -> None:
        used: dict[tuple[Point, int], list[int]] = {}  # rows of each plane

        def noted(rows: KeptRows) -> KeptRows:
            there = used.setdefault((rows.point, rows.part), [])
            found = replace(rows, first=len(there))
            there.extend(range(rows.first, rows.first + rows.count))
            return found

        self._values = map_objects(values, KeptRows, noted)
        # A plane whose rows are all used once and in order is not copied.
        self._used = {
            key: None if rows == list(range(len(planes[key]))) else np.array(rows) for key, rows in used.items()
        }

    def filled(self, planes: Mapping[tuple[Point, int], torch.Tensor]) -> Any:
        """The values with a request's rows. Those of one plane lie in one block of memory, and none overlap."""
        blocks = {}
        for key, rows in self._used.items():
            block = as_bits(planes[key]).numpy()
            if rows is not None:
                block = block[rows]  # numpy copies in one thread: see `capture.rows.concatenate_rows`
            blocks[key] = block, planes[key].dtype, block.strides[0]

        def tensor(rows: KeptRows) -> torch.Tensor:
            block, dtype, size = blocks[rows.point, rows.part]
            # Each tensor gets its own storage, as in `transport.wire`, because `torch.save` writes the whole storage.
            count = math.prod(rows.shape)
            return torch.frombuffer(block, dtype=dtype, count=count, offset=rows.first * size).view(rows.shape)

        return map_objects(self._values, KeptRows, tensor)


class KeptTrace:
    """The trace of a request whose code runs nowhere.

    Args:
        recording: of its code, with as many steps as the request may have.
        again: records it with another number of steps.
        reads: what the code keeps.
        prompt: how many rows of the prompt are captured.
    """

    def __init__(self, recording: Recording, again: Callable[[int], Recording], reads: Reads, prompt: int) -> None:
        self._recording, self._most = recording, len(recording.steps)
        self.prompt, self._again, self._reads = prompt, again, reads
        self._kept: dict[int, tuple[Outcome, _Filling]] = {}

    def ending(self, captured: Captured, steps: int) -> Outcome:
        """As `Ending`."""
        return self.outcome(CapturedSteps(captured.take(), self.prompt, steps))

    def outcome(self, captured: CapturedSteps) -> Outcome:
        """The outcome of a request that has ended. Raises CaptureError as `Reads.placed`."""
        count = min(captured.count, self._most)
        planes = self._reads.unpacked(captured.planes)
        if count not in self._kept:
            recording = self._recording if count == self._most else self._again(count)
            self._kept[count] = recording.outcome, _Filling(self._reads.placed(recording, self.prompt), planes)
        found, kept = self._kept[count]
        return replace(found, values=kept.filled(planes), name="kept", order=captured.count, steps=captured.count)
