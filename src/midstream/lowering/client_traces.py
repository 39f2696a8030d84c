"""Traces whose saved values can be computed from single rows of sites. No code runs on the engine.

    hidden = [model.layers_output[14][-1] for _ in tracer.iter[:]]
    scores = [model.layers_output[14] @ probe for _ in tracer.iter[:]]

A plan makes the trace's writes and captures the rows, or the results of programs (`plan.program`) on them. The recording of the code
(`trace.record`) shows which values it saves. The process that recorded the code pickles these values as a worker does, with stand-ins in
place of rows (`Template`). Once a request has ended, the caller's process unpickles them with the request's captured rows. Only a request
that ended early needs another template, for its number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.rows import Captured
from midstream.errors import CaptureError, PlanError, UnsendableError
from midstream.lowering.row_programs import NotRowwise, RowwiseReader
from midstream.lowering.row_tensors import RowChoice, rows_of
from midstream.plan.building import Builder, StepResult
from midstream.plan.program import MAX_RESULTS, Program
from midstream.plan.running import unpacked
from midstream.sites import Point
from midstream.trace.code import Outcome
from midstream.trace.graph import Chain, Value, ancestors, repeats
from midstream.trace.record import Recording
from midstream.trace.stand_in import Ended, StandIn
from midstream.transport import messages
from midstream.tree import as_bits, objects_in

_LENGTHS = (1, 2, 997)  # a choice that selects the last row at these lengths selects it at every length


# The captured rows of a request, and the number of its steps -> the outcome of its trace.
Ending = Callable[[Captured, int], Outcome]


class _Read(NamedTuple):
    """A tensor that is computed from rows of one value.

    Attributes:
        result: the result of a program at the value's point; the program's input if the rows themselves are saved.
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


@dataclass(frozen=True)
class SavedRows:
    """The rows from which a trace's saved values are made.

    Attributes:
        programs: point -> the program whose results are captured there; None for the rows themselves.
        last: whether the last row of the prompt is enough.
    """

    programs: Mapping[Point, Program | None]
    last: bool

    def unpacked(self, planes: Mapping[Point, torch.Tensor]) -> dict[_Plane, torch.Tensor]:
        """`[rows, numbers]` of each plane."""
        found = {}
        for point, program in self.programs.items():
            plane = planes[point]
            for i, part in enumerate([plane] if program is None else unpacked(program, plane)):
                found[point, i] = part.reshape(len(part), -1)
        return found


class SavedRowsFinder:
    """Finds the rows from which a trace's saved values are computed.

    Args:
        recording: of its code.
        dtype: of the model.
    """

    def __init__(self, recording: Recording, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._builders: dict[Point, Builder] = {}
        self._parts: dict[Point, list[StepResult]] = {}
        self._reads = list(self.of(recording).values())
        for read in self._reads:
            parts = self._parts.setdefault(read.point, [])
            if read.result.ref not in [part.ref for part in parts]:
                parts.append(read.result)
        last = all(read.is_of_last for read in self._reads)
        self.rows = SavedRows({point: self._program(point) for point in self._parts}, last)

    @classmethod
    def found(cls, recording: Recording, dtype: torch.dtype) -> SavedRowsFinder | None:
        """The finder for a recording; None if the code does more than save values that can be computed from rows."""
        try:
            return cls(recording, dtype)
        except (_NotFromRows, PlanError):
            return None

    def fits(self, length: int) -> bool:
        """Whether a prompt of this length has the rows, and they are contiguous."""
        try:
            for read in self._reads if not self.rows.last else ():
                _stretch(read, length)
        except _NotFromRows:
            return False
        return True

    def of(self, recording: Recording) -> dict[int, _Read]:
        """The rows of saved tensors, by the ids of their stand-ins. Raises _NotFromRows, also for a tensor that is not of the forward."""
        if not recording.only_saves:
            raise _NotFromRows
        known: dict[Any, _Read] = {}
        readers: dict[int, tuple[RowwiseReader, list[Any]]] = {}
        earlier: dict[int, Value] = {}  # id of a value -> the value in its place in the step before, which is equal
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

        rows = {}
        for each in _pickled(recording)[1]:
            if not isinstance(each, StandIn) or each.memory.version:
                raise _NotFromRows
            rows[id(each)] = read(each.memory.value, each.chain, tuple(each.shape), each.dtype)
        return rows

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

    def template(self, recording: Recording, length: int) -> Template:
        """The template for requests that end as this recording does.

        Args:
            length: of the prompt.

        Raises:
            CaptureError: the code saves values that were not foreseen when the request began.
        """
        try:
            found = self.of(recording) if recording.reason is None else {}
        except (_NotFromRows, PlanError):
            found = {}
        prompt = 1 if self.rows.last else length

        def saved(stand_in: torch.Tensor) -> RowRange:
            read = found[id(stand_in)]
            if self.rows.last and not read.is_of_last:  # only the last row of the prompt is captured
                raise _NotFromRows
            known = [part.ref for part in self._parts[read.point]]
            first, count = _stretch(read, prompt)
            first = prompt + read.step - 1 if read.step else first
            shape = read.shape if read.lead < 0 else (*[1] * read.lead, count, *read.shape)
            return RowRange((read.point, known.index(read.result.ref)), first, count, shape)

        try:
            body, tensors = _pickled(recording)
            return Template(body, [saved(each) for each in tensors])
        except (_NotFromRows, KeyError, ValueError):
            raise CaptureError(
                "The request ended early, and the trace saves other values with so few steps. Compute these from saved values after the "
                "trace, or let the request continue with ignore_eos=True."
            ) from None


def _assume(assumed: list[Any], rows: RowChoice, own: torch.Tensor | None) -> int:
    """A `row_tensors.Ask` that notes an assumption: all rows that are kept are among these rows."""
    if own is None:
        assumed.append(rows)
    elif bool((own != own[:1]).any()):
        assumed.append((None,))  # equals no choice of rows
    return 0


def _stretch(read: _Read, prompt: int) -> tuple[int, int]:
    """The first row of `read`, and its number of rows. Raises _NotFromRows for rows that are not contiguous, or that the prompt lacks."""
    try:
        rows = rows_of(read.rows, 1 if read.step else prompt)
    except IndexError:
        raise _NotFromRows from None
    if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
        raise _NotFromRows
    return rows[0], len(rows)


def _pickled(recording: Recording) -> tuple[bytes, list[torch.Tensor]]:
    """The outcome as a worker sends it, and its tensors. Raises _NotFromRows if a part cannot be pickled."""
    try:
        body, tensors, failed = messages.pickled(recording.outcome, lambda value: type(value) is StandIn)
    except Ended:  # a number of the forward
        failed = True
    if failed:
        raise _NotFromRows
    return body, tensors


# Putting captured rows into the saved values.

_Plane = tuple[Point, int]  # a point, and the index of the result there


class RowRange(NamedTuple):
    """Adjacent rows of a plane.

    Attributes:
        first: the index of the first row.
        shape: of the tensor.
    """

    plane: _Plane
    first: int
    rows: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """The outcome of a trace, pickled as workers do it, with the rows that take the places of its tensors."""

    body: bytes
    rows: Sequence[RowRange]

    @classmethod
    def plain(cls, recording: Recording) -> Template:
        """The outcome of a recording that saves no tensors of the forward."""
        body, tensors = _pickled(recording)
        assert not tensors
        return cls(body, [])

    @cached_property
    def _used(self) -> Mapping[_Plane, list[int]]:
        """The rows of each plane that the values have, in the order of the values."""
        used: dict[_Plane, list[int]] = {}
        for each in self.rows:
            used.setdefault(each.plane, []).extend(range(each.first, each.first + each.rows))
        return used

    def filled(self, planes: Mapping[_Plane, torch.Tensor]) -> Outcome:
        """The outcome with a request's rows as its tensors. The tensors of one plane lie in one block of memory, without overlaps."""
        blocks, ends = {}, dict.fromkeys(self._used, 0)
        for key, rows in self._used.items():
            block = as_bits(planes[key]).numpy()
            if rows != list(range(len(block))):  # a plane whose rows are all used once and in order is not copied
                block = block[np.array(rows)]  # numpy copies in one thread: see `capture.rows.concatenate_rows`
            blocks[key] = block, planes[key].dtype, block.strides[0]
        tensors: list[torch.Tensor | None] = []
        for each in self.rows:
            block, dtype, size = blocks[each.plane]
            # Each tensor gets its own storage, as in `transport.messages`, because `torch.save` writes the whole storage.
            numbers, offset = math.prod(each.shape), ends[each.plane] * size
            tensors.append(torch.frombuffer(block, dtype=dtype, count=numbers, offset=offset).view(each.shape))
            ends[each.plane] += each.rows
        found = messages.unpack(self.body, tensors)
        if isinstance(found, UnsendableError):
            raise found
        return found  # type: ignore[no-any-return]


class ClientTrace:
    """The trace of a request whose outcome is made in the caller's process.

    Args:
        first: the template of requests with as many steps as the recording of its code.
        most: the number of these steps.
        template: makes the template of another number of steps.
        rows: the rows from which its saved values are made; None if it needs no rows.
    """

    def __init__(self, first: Template, most: int, template: Callable[[int], Template], rows: SavedRows | None) -> None:
        self._templates, self._most, self._template, self._rows = {most: first}, most, template, rows

    def ending(self, captured: Captured, steps: int) -> Outcome:
        """The outcome of a request, from its captured rows and the number of its steps."""
        return self.outcome(captured.take() if self._rows is not None else {}, steps)

    def outcome(self, captured: Mapping[Point, torch.Tensor], steps: int) -> Outcome:
        """The outcome of a request that has ended.

        Args:
            captured: the rows of each point, `[rows, width]`, in the order of their positions. They are contiguous and share no memory with
                other objects, so the returned values may be views of them.
            steps: how many the request had.

        Raises:
            CaptureError: as `SavedRowsFinder.template`.
        """
        count = min(steps, self._most)
        if count not in self._templates:
            self._templates[count] = self._template(count)
        planes = self._rows.unpacked(captured) if self._rows is not None else {}
        return replace(self._templates[count].filled(planes), name="saved", order=steps, steps=steps)
