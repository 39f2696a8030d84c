"""Traces whose saved values can be computed from single rows of sites. No code runs on the engine.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]
    scores = [model.layers_output[14] @ probe for _ in tracer.iter[:]]

A plan makes the trace's writes and captures the rows, or the results of programs (`plan.program`) on them. The recording of the code
(`trace.record`) shows which values it saves: containers with stand-ins in them. Once a request has ended, its captured rows replace the
stand-ins in the caller's process. Only a request that ended early needs another recording, with the number of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.rows import Captured
from midstream.errors import CaptureError, PlanError
from midstream.lowering.row_tensors import RowChoice, rows_of
from midstream.lowering.rowwise import NotRowwise, RowwiseReader
from midstream.plan.building import Builder, StepResult
from midstream.plan.program import MAX_RESULTS, Program
from midstream.plan.running import unpacked
from midstream.sites import Point
from midstream.trace.code import Outcome
from midstream.trace.graph import Chain, Value, ancestors, repeats
from midstream.trace.record import Recording
from midstream.trace.stand_in import StandIn
from midstream.tree import as_bits, map_objects, objects_in

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LENGTHS = (1, 2, 997)  # a choice that selects the last row at these lengths selects it at every length


# The captured rows of a request, and the number of its steps -> the outcome of its trace.
Ending = Callable[[Captured, int], Outcome]


class _Read(NamedTuple):
    """A tensor that is computed from rows of one value.

    Attributes:
        result: of a program at the value's point; its input for the rows themselves.
        shape: of the tensor, without the axes that `lead` describes.
        rows: which of the value's rows.
        lead: as in `row_tensors.RowTensor`: how many axes of size 1 it has before its rows; -1 if it is a single row without that axis.
    """

    point: Point
    step: int
    result: StepResult
    shape: tuple[int, ...]
    rows: RowChoice
    lead: int

    @property
    def is_of_last(self) -> bool:
        """Whether it needs only the prompt's last row, for any prompt length, or a later token's row."""
        if self.step:
            return True
        try:
            return all(rows_of(self.rows, tokens) == [tokens - 1] for tokens in _LENGTHS)
        except IndexError:
            return False


class _NotFromRows(Exception):
    """The code does more than save values that programs can compute."""


class SavedRows:
    """The rows from which a trace's saved values are computed.

    Args:
        recording: of its code.
        dtype: of the model.

    Attributes:
        programs: point -> the program whose results are captured there; None for the rows themselves.
        last: whether the last row of the prompt is enough.
        traces: of requests with this recording, by the number of captured rows of the prompt.
    """

    def __init__(self, recording: Recording, dtype: torch.dtype) -> None:
        self.traces: dict[int, ClientTrace] = {}
        self._dtype = dtype
        self._builders: dict[Point, Builder] = {}
        self._parts: dict[Point, list[StepResult]] = {}
        self._reads = list(self.of(recording).values())
        for read in self._reads:
            parts = self._parts.setdefault(read.point, [])
            if read.result.ref not in [part.ref for part in parts]:
                parts.append(read.result)
        self.last = all(read.is_of_last for read in self._reads)
        self.programs = {point: self._program(point) for point in self._parts}

    @classmethod
    def found(cls, recording: Recording, dtype: torch.dtype) -> SavedRows | None:
        """The rows; None if the code does more than save values that can be computed from rows."""
        try:
            return cls(recording, dtype)
        except (_NotFromRows, PlanError):
            return None

    def fits(self, length: int) -> bool:
        """Whether a prompt of this length has the rows, and they are contiguous."""
        try:
            for read in self._reads if not self.last else ():
                _stretch(read, length)
        except _NotFromRows:
            return False
        return True

    def of(self, recording: Recording) -> dict[int, _Read]:
        """The saved values by the ids of their stand-ins. Raises _NotFromRows."""
        if not recording.only_saves or recording.makes_numbers or any(graph.last for graph in recording.steps):
            raise _NotFromRows
        known: dict[Any, _Read] = {}
        readers: dict[int, tuple[RowwiseReader, list[Any]]] = {}
        earlier: dict[int, Value] = {}  # id of a value -> the one in its place in an equal step before
        for number, graph in enumerate(recording.steps[2:], start=2):
            before = recording.steps[number - 1]
            if repeats(graph, before):
                earlier |= {id(new): old for new, old in zip(graph.values, before.values, strict=True)}

        def read(value: Value, chain: Chain, shape: tuple[int, ...], dtype: torch.dtype) -> _Read:
            key = id(value), str(chain)  # a chain without values contains only names and numbers
            if next(objects_in(chain, Value), None) is not None:
                return self._read(value, chain, shape, dtype, readers)
            if key not in known:
                alike = earlier.get(id(value))
                if alike is None:
                    known[key] = self._read(value, chain, shape, dtype, readers)
                else:
                    known[key] = read(alike, chain, shape, dtype)._replace(step=value.step)
            return known[key]

        saved = _stand_ins(recording.outcome.values)
        return {id(each): read(each.memory.value, each.chain, tuple(each.shape), each.dtype) for each in saved}

    def _read(
        self,
        value: Value,
        chain: Chain,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        readers: dict[int, tuple[RowwiseReader, list[Any]]],
    ) -> _Read:
        sources = [each for each in ancestors([value, *objects_in(chain, Value)]) if each.kind == "read"]
        if len(sources) != 1:
            raise _NotFromRows
        (source,) = sources
        if not isinstance(source.target, tuple) or source.part is not None or source.dtype != self._dtype:
            raise _NotFromRows
        if id(source) not in readers:
            assumed: list[Any] = []
            builder, ask = self._builders.get(source.target), partial(_assume, assumed)
            readers[id(source)] = RowwiseReader(source, value.line, builder, ask), assumed
            self._builders[source.target] = readers[id(source)][0].builder
        reader, assumed = readers[id(source)]
        try:
            tensor = reader.row_tensor(value, chain)
        except NotRowwise:
            raise _NotFromRows from None
        if any(rows != tensor.rows[: len(rows)] for rows in assumed):
            raise _NotFromRows
        result, count = tensor.result, len(rows_of(tensor.rows, source.shape[0]))
        as_tensor = result.shape if tensor.lead < 0 else (*[1] * tensor.lead, count, *result.shape)
        if result.shaped.rows != 1 or as_tensor != shape or result.dtype != dtype:
            raise _NotFromRows
        unshaped = reader.unshaped(result)
        return _Read(source.target, source.step, unshaped, result.shape, tensor.rows, tensor.lead)

    def _program(self, point: Point) -> Program | None:
        parts = self._parts[point]
        if all(part.ref == self._builders[point].input.ref for part in parts):
            return None
        if len(parts) > MAX_RESULTS:
            raise _NotFromRows
        return self._builders[point].program(*parts, keeps=True)

    def unpacked(self, planes: Mapping[Point, torch.Tensor]) -> dict[tuple[Point, int], torch.Tensor]:
        """(point, index of the result there) -> `[rows, numbers]`."""
        found = {}
        for point, program in self.programs.items():
            plane = planes[point]
            for i, part in enumerate([plane] if program is None else unpacked(program, plane)):
                found[point, i] = part.reshape(len(part), -1)
        return found

    def template(
        self, recording: Recording, prompt: int, planes: Mapping[tuple[Point, int], torch.Tensor]
    ) -> _Template:
        """The saved values of requests that end as this recording.

        Args:
            prompt: how many rows of each plane belong to the prompt.
            planes: of one such request, as `unpacked` returns them.

        Raises:
            CaptureError: the code saves values that were not foreseen when the request began.
        """
        try:
            found = self.of(recording) if recording.reason is None else {}
        except (_NotFromRows, PlanError):
            found = {}
        used: dict[tuple[Point, int], list[int]] = {}  # rows of each plane

        def saved(stand_in: StandIn) -> _RowRange:
            read = found.get(id(stand_in))
            known = [part.ref for part in self._parts.get(read.point, ())] if read is not None else []
            if read is None or read.result.ref not in known:
                raise CaptureError(
                    "The request ended early, and the trace saves other values with so few steps. Compute these from saved values after "
                    "the trace, or let the request continue with ignore_eos=True."
                )
            first, count = _stretch(read, prompt)
            first = prompt + read.step - 1 if read.step else first
            shape = read.shape if read.lead < 0 else (*[1] * read.lead, count, *read.shape)
            plane = read.point, known.index(read.result.ref)
            there = used.setdefault(plane, [])
            there.extend(range(first, first + count))
            return _RowRange(plane, len(there) - count, shape)

        values = map_objects(recording.outcome.values, StandIn, saved)
        # A plane whose rows are all used once and in order is not copied.
        whole = {key: rows == list(range(len(planes[key]))) for key, rows in used.items()}
        return _Template(values, {key: None if whole[key] else np.array(rows) for key, rows in used.items()})


def _assume(assumed: list[Any], rows: RowChoice, own: torch.Tensor | None) -> int:
    """As `row_tensors.Ask`: notes the assumption that the rows which are kept are among these."""
    if own is None:
        assumed.append(rows)
    elif bool((own != own[:1]).any()):
        assumed.append((None,))  # no rows are these
    return 0


def _stretch(read: _Read, prompt: int) -> tuple[int, int]:
    """Its first row, and the number of rows. Raises _NotFromRows for rows that are not contiguous, or that the prompt lacks."""
    try:
        rows = rows_of(read.rows, 1 if read.step else prompt)
    except IndexError:
        raise _NotFromRows from None
    if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
        raise _NotFromRows
    return rows[0], len(rows)


def _stand_ins(tree: Any, seen: set[int] | None = None) -> Iterator[StandIn]:
    """The stand-ins in lists, dicts and tuples. Raises _NotFromRows for other objects, except plain values."""
    seen = set() if seen is None else seen
    if id(tree) in seen and type(tree) in (list, dict):  # it may contain itself
        return
    seen.add(id(tree))
    if isinstance(tree, StandIn):
        if tree.memory.version:
            raise _NotFromRows
        yield tree
    elif type(tree) in (list, tuple):
        for each in tree:
            yield from _stand_ins(each, seen)
    elif type(tree) is dict:
        for name, each in tree.items():
            yield from _stand_ins(each, seen)
            if not isinstance(name, _PLAIN):
                raise _NotFromRows
    elif type(tree) not in _PLAIN:
        raise _NotFromRows


# Putting captured rows into the saved values.


class _RowRange(NamedTuple):
    """Adjacent rows among the used ones of a plane.

    Attributes:
        plane: a point, and the index of the result there.
        first: the index of the first row.
        shape: of the tensor.
    """

    plane: tuple[Point, int]
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Template:
    """The saved values, with a `_RowRange` in place of rows.

    Attributes:
        used: the rows of each plane that the values have; None for all of them.
    """

    values: Any
    used: Mapping[tuple[Point, int], np.ndarray | None]

    def filled(self, planes: Mapping[tuple[Point, int], torch.Tensor]) -> Any:
        """The values with a request's rows. Those of one plane lie in one block of memory, without overlaps."""
        blocks = {}
        for key, rows in self.used.items():
            block = as_bits(planes[key]).numpy()
            if rows is not None:
                block = block[rows]  # numpy copies in one thread: see `capture.rows.concatenate_rows`
            blocks[key] = block, planes[key].dtype, block.strides[0]

        def tensor(rows: _RowRange) -> torch.Tensor:
            block, dtype, size = blocks[rows.plane]
            # Each tensor gets its own storage, as in `transport.wire`, because `torch.save` writes the whole storage.
            count = math.prod(rows.shape)
            return torch.frombuffer(block, dtype=dtype, count=count, offset=rows.first * size).view(rows.shape)

        return map_objects(self.values, _RowRange, tensor)


class ClientTrace:
    """The trace of a request whose values are made in the client.

    Args:
        recording: of its code, with as many steps as the request may have.
        again: records it with another number of steps.
        reads: the rows that its saved values need.
        prompt: how many rows of the prompt are captured.
    """

    def __init__(self, recording: Recording, again: Callable[[int], Recording], reads: SavedRows, prompt: int) -> None:
        self._recording, self._most = recording, len(recording.steps)
        self.prompt, self._again, self._reads = prompt, again, reads
        self._templates: dict[int, tuple[Outcome, _Template]] = {}

    def ending(self, captured: Captured, steps: int) -> Outcome:
        """As `Ending`."""
        return self.outcome(captured.take(), steps)

    def outcome(self, captured: Mapping[Point, torch.Tensor], steps: int) -> Outcome:
        """The outcome of a request that has ended.

        Args:
            captured: the rows of each point, `[rows, width]`, in the order of their positions. They are contiguous and share no memory with
                other objects, so the returned values may be views of them.
            steps: how many the request had.

        Raises:
            CaptureError: as `SavedRows.template`.
        """
        count = min(steps, self._most)
        planes = self._reads.unpacked(captured)
        if count not in self._templates:
            recording = self._recording if count == self._most else self._again(count)
            self._templates[count] = recording.outcome, self._reads.template(recording, self.prompt, planes)
        found, saved = self._templates[count]
        return replace(found, values=saved.filled(planes), name="saved", order=steps, steps=steps)
