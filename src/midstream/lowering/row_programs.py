"""Reads recorded tensors that are row-wise functions of a site's value, as programs (`plan.program`).

    for rows, (program, inputs) in programs_of(write).at(length)   # raises NotRowwise, with the line and the reason
    tensor = RowwiseReader(read, line).row_tensor(value)           # the same for a value that is not written
    program_of(function, points, sizes, dtype)                     # the same for a function

The reader follows each tensor through the graph: it notes which rows of the site's value the tensor has, and on which axis
(`lowering.row_tensors`). The rules of `plan.rowwise` decide whether an operation keeps rows apart. A program that agrees with the recording
on its T tokens, and keeps rows apart, is right for any number of rows. So a recording of any length will do, even one of a single token.

Code may change only some rows, or use a tensor whose rows differ. So the reader asks whether the row that it reads is among the rows that
the code changes, and uses this row's numbers. `RowReadings` reads a write once for all rows with the same answers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from midstream.errors import PlanError
from midstream.lowering.row_tensors import OWN_ROWS, TWICE, Ask, NoProgram, RowChoice, RowOperations, RowTensor, rows_of
from midstream.plan.building import Builder
from midstream.plan.program import Program
from midstream.plan.steps import DType
from midstream.sites import LAYER_SITES, Point, comes_before
from midstream.trace.code import FunctionProgram
from midstream.trace.graph import Chain, Value, Write
from midstream.trace.record import fingerprint, record_function
from midstream.tree import objects_in

_MOST_READINGS = 1 << 10  # of one write whose rows differ
_FILLED = "it uses a tensor of its own that it has filled with values of the model: make it with torch.zeros_like(h) or h.new_zeros(...)"
# A function is recorded once for each of these numbers of tokens. Both programs have to be equal. The first is a prime: see `Notes.rows`.
_FUNCTION_ROWS = (1009, 2)
_IGNORED = frozenset("memory_format layout device pin_memory non_blocking implicit".split())


class NotRowwise(Exception):
    """The reason why a write is not a program, and its line; 0 if the line is unknown."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.line, self.reason = line, reason

    def __str__(self) -> str:
        return self.reason


class Made(NamedTuple):
    """A program that makes a write at some rows.

    Attributes:
        inputs: the other points whose values it takes.
    """

    program: Program
    inputs: tuple[Point, ...] = ()


class RowReadings:
    """The readings of a write: one program for each group of rows that get the same answers to the reader's questions (`row_tensors.Ask`).

    Args:
        read: reads the write for one row; its argument answers the questions about this row.
        line: the line of the write.
    """

    def __init__(self, read: Callable[[Ask], Made], line: int) -> None:
        self._read, self._line = read, line
        self._known: dict[
            tuple[int, ...], dict[tuple[int, ...], Made]
        ] = {}  # numbers of questions -> answers -> the reading
        self._count = 0
        self._numbers: dict[tuple[str, Any], int] = {}  # a question -> its number
        self._questions: list[tuple[RowChoice, tuple[int, ...] | None]] = []
        self._labels: dict[Any, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._length = 0
        self._answers: dict[int, list[int]] = {}  # of all rows of a prompt of this length

    def at(self, length: int) -> list[tuple[list[int], Made]]:
        """The rows of a prompt, grouped by their readings. Raises NotRowwise, also for a row that a prompt of this length lacks."""
        found: dict[int, tuple[list[int], Made]] = {}
        for row in range(length):
            reading = self.of(row, length)
            found.setdefault(id(reading), ([], reading))[0].append(row)
        return list(found.values())

    def of(self, row: int, length: int) -> Made:
        """The reading of a row of a prompt. Raises NotRowwise as `at` does."""
        if length != self._length:
            self._length, self._answers = length, {}
        for questions, readings in self._known.items():
            answers = tuple(self._answer(each)[row] for each in questions)
            if answers in readings:
                return readings[answers]
        asked: dict[int, int] = {}

        def ask(rows: RowChoice, own: torch.Tensor | None) -> int:
            labels = self._labels_of(own)
            if labels is not None and (different := len(set(labels))) > _MOST_READINGS:
                raise NotRowwise(
                    self._line, f"it has other numbers for each of {different} tokens; a plan: up to {_MOST_READINGS}"
                )
            if labels is not None and not any(labels):  # equal at all rows
                return 0
            number = self._numbers.setdefault((repr(rows), labels), len(self._questions))
            if number == len(self._questions):
                self._questions.append((rows, labels))
            asked[number] = self._answer(number)[row]
            return asked[number]

        self._count += 1
        if self._count > _MOST_READINGS:
            raise NotRowwise(
                self._line, f"it does something else at each of more than {_MOST_READINGS} groups of tokens"
            )
        reading = self._read(ask)
        self._known.setdefault(tuple(asked), {})[tuple(asked.values())] = reading
        return reading

    def _labels_of(self, own: torch.Tensor | None) -> tuple[int, ...] | None:
        """For each row of a tensor, the number of the first row with the same bits; None without a tensor."""
        if own is None:
            return None
        place = own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride(), own.dtype
        if place not in self._labels:
            first: dict[bytes, int] = {}
            each = (
                row.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                for row in own.detach().clone(memory_format=torch.contiguous_format)
            )
            self._labels[place] = own, tuple([first.setdefault(row, i) for i, row in enumerate(each)])
        return self._labels[place][1]

    def _answer(self, number: int) -> list[int]:
        """The answers of all rows of the prompt to a question."""
        if number not in self._answers:
            chosen, labels = self._questions[number]
            try:
                rows = rows_of(chosen, self._length)
            except IndexError:
                raise NotRowwise(self._line, "it is about a row that the prompt does not have") from None
            if len(set(rows)) < len(rows):
                raise NotRowwise(self._line, TWICE)
            if labels is not None and len(labels) != len(rows):
                raise NotRowwise(self._line, OWN_ROWS)
            answers = [-1] * self._length
            for place, row in enumerate(rows):
                answers[row] = 0 if labels is None else labels[place]
            self._answers[number] = answers
        return self._answers[number]


def programs_of(write: Write, are_together: Callable[[Point, Point], bool] = lambda one, other: True) -> RowReadings:
    """The programs that make a write. `at` raises NotRowwise if it is not row-wise, or uses an operation that programs do not have.

    Args:
        are_together: whether one pipeline stage owns both points.
    """

    def read(ask: Ask) -> Made:
        reader = RowwiseReader(write.was, write.line, ask=ask)
        reader.may_use = lambda point: comes_before(point, write.point) and are_together(point, write.point)
        return reader.program(write.now)

    return RowReadings(read, write.line)


def _ask_nothing(rows: RowChoice, own: torch.Tensor | None) -> int:
    """An `Ask` for code that has to do the same at all rows. Raises NoProgram if it does not."""
    if own is None:
        raise NoProgram("it changes some tokens alone, which is what positions are for")
    if bool((own != own[:1]).any()):
        raise NoProgram(OWN_ROWS)
    return 0


class RowwiseReader:
    """Follows the values computed from one value.

    Args:
        was: the value.
        builder: has the steps of earlier programs at the same site, and gets those of this one.
        ask: answers questions about the row that is read.

    Attributes:
        line: the line of the value that was read last.
        may_use: which other points of the same step its programs may read; none at first.
    """

    def __init__(self, was: Value, line: int, builder: Builder | None = None, ask: Ask = _ask_nothing) -> None:
        self.builder = builder or Builder(math.prod(was.shape[1:]), str(was.dtype).removeprefix("torch."))
        self._rows = was.shape[0]
        self._operations = RowOperations(self.builder, self._rows, ask)
        self.unshaped = self._operations.unshaped
        self.line = self._first_line = line
        self.may_use: Callable[[Point], bool] = lambda point: False
        self._step = was.step
        self._was = self._operations.reshaped(RowTensor(self.builder.input), was.shape[1:])
        self._known: dict[int, Any] = {id(was): self._was}
        self._further: dict[Point, Any] = {}  # the further inputs, in the order in which the builder has made them

    def program(self, now: Value) -> Made:
        """The program that makes a value of the site at the row that is read. Raises NotRowwise."""
        tensor = self.whole(now)
        with self._saying_why():
            flat = self._operations.reshaped(tensor, (self.builder.width,))
            result = self._operations.cast(flat, getattr(torch, self.builder.dtype)).result
            points = list(self._further)
            return Made(self.builder.program(result), tuple(points[i] for i in self.builder.inputs_of(result)))

    def whole(self, now: Value) -> RowTensor:
        """A value that replaces the site's, as a row tensor. Raises NotRowwise."""
        with self._saying_why():
            whole = self.of(now)
            if isinstance(whole, torch.Tensor):
                whole = self._operations.as_row_tensor(whole, self._was)
            is_row = self._operations.count(whole) == 1  # axes of size 1 before a single row are ambiguous
            if whole.rows or (whole.lead and not is_row):
                raise NoProgram("it is not a value for each token")
            return whole  # type: ignore[no-any-return]

    def row_tensor(self, value: Value, chain: Chain = ()) -> RowTensor:
        """A value, or a view of it, as a row tensor. Raises NotRowwise."""
        with self._saying_why():
            found = self._views(self.of(value), chain)[-1]
            if not isinstance(found, RowTensor):
                raise NoProgram("it is not computed from the model's values")
            return found

    @contextlib.contextmanager
    def _saying_why(self) -> Iterator[None]:
        try:
            yield
        except NotRowwise:
            raise
        except (NoProgram, PlanError) as error:
            raise NotRowwise(self.line, str(error)) from None
        except RecursionError:
            raise NotRowwise(self._first_line, "it computes too much") from None
        except Exception as error:  # the code may do anything to its tensors; an unforeseen case is not a program
            raise NotRowwise(self.line, f"it is not known to be row-wise ({type(error).__name__}: {error})") from error

    # Values.

    def of(self, given: Any) -> Any:
        """A `RowTensor`, one of the code's own tensors, or a plain argument. Raises NoProgram."""
        if isinstance(given, (tuple, list)):
            return tuple(map(self.of, given))
        if isinstance(given, torch.dtype):
            return DType(str(given).removeprefix("torch."))
        if not isinstance(given, Value):
            return given
        if id(given) not in self._known:
            self._known[id(given)] = self._read(given)
        return self._known[id(given)]

    def _read(self, value: Value) -> Any:
        if value.kind == "const":
            return value.target
        if value.kind == "read" and self._may_use(value):
            if value.target not in self._further:
                self._further[value.target] = self.builder.further(math.prod(value.shape[1:]))
            return self._operations.reshaped(RowTensor(self._further[value.target]), value.shape[1:])
        if value.kind in ("read", "module"):
            self.line = value.line or self.line
            used = f"calls {value.target}" if value.kind == "module" else f"uses {_name_of(value.target)}, too"
            raise NoProgram(f"it {used}")
        if value.kind == "put":
            return self._put(value)
        args = tuple(map(self.of, value.args))
        kwargs = {name: self.of(each) for name, each in value.kwargs.items() if name not in _IGNORED}
        self.line = self._operations.line = value.line or self.line
        return self._call(value, args, kwargs)

    def _may_use(self, read: Value) -> bool:
        """Whether another site's value can be an input: it has a value for each token of the same step."""
        is_site = isinstance(read.target, tuple) and read.target[0] in LAYER_SITES and read.part is None
        fits = (
            read.step == self._step
            and read.shape[:1] == (self._rows,)
            and str(read.dtype) == f"torch.{self.builder.dtype}"
        )
        return is_site and fits and self.may_use(read.target)

    def _call(self, value: Value, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet, _, which = str(value.target).removeprefix("aten.").partition(".")
        changes = any(
            each.alias_info is not None and each.alias_info.is_write for each in value.target._schema.arguments
        )
        if changes and value.out != 0:
            raise NoProgram(f"{packet} writes to out=")
        packet = packet.removesuffix("_") if changes else packet
        tensors = list(objects_in((args, tuple(kwargs.values())), RowTensor))
        if not tensors or (changes and not isinstance(args[0], RowTensor)):
            raise NoProgram(_FILLED)
        found = self._operations.result_of(packet, which, args, kwargs, None if changes else value.out)  # type: ignore[arg-type]
        return self._operations.cast(found, args[0].result.dtype) if changes and isinstance(found, RowTensor) else found

    def _put(self, value: Value) -> RowTensor:
        """A tensor after a write to a view of it."""
        whole = self.of(value.args[0])
        self.line = self._operations.line = value.line or self.line
        views = self._views(whole, value.target) if isinstance(whole, RowTensor) else [None]
        if isinstance(views[-1], RowTensor) and views[-1].rows != whole.rows and not self._operations.has(views[-1]):
            return whole  # type: ignore[no-any-return]  # the row that is read is not in the view
        new = self.of(value.args[1])
        self.line = self._operations.line = value.line or self.line
        if not isinstance(views[-1], RowTensor) or not isinstance(new, RowTensor):
            raise NoProgram(_FILLED)
        if new.rows != views[-1].rows:
            raise NoProgram("it writes numbers of other tokens")
        if new.rows == whole.rows and views[-1].result is whole.result:  # all of it
            return replace(new, lead=whole.lead)
        for (op, args, _, _), view, seen in reversed(list(zip(value.target, views, views[1:], strict=False))):
            if seen.rows == view.rows:
                new = self._operations.back(str(op), args, view, new)
            new = replace(new, rows=view.rows, lead=new.lead if seen.rows == view.rows else view.lead)
        return replace(new, lead=whole.lead)

    def _views(self, base: Any, chain: Sequence[Any]) -> list[Any]:
        views = [base]
        for op, args, kwargs, out in chain:
            packet, _, which = str(op).removeprefix("aten.").partition(".")
            views.append(self._operations.result_of(packet, which, (views[-1], *map(self.of, args)), dict(kwargs), out))
        return views


def _name_of(point: Any) -> str:
    return f"{point[0]} of layer {point[1]}" if isinstance(point, tuple) else str(point)


# Functions in a plan.


def program_of(function: Callable[..., Any], points: Sequence[Point], sizes: Sequence[int], dtype: str) -> Made:
    """The program of a function, which is called in this process. Raises NotRowwise.

    Args:
        points, sizes: the sites whose values it takes, and their widths.
    """
    before = fingerprint([[FunctionProgram(function)]])
    first, second = (_of_rows(function, points, sizes, dtype, rows) for rows in _FUNCTION_ROWS)
    same_variables = fingerprint([[FunctionProgram(function)]]) == before
    if first.program != second.program or first.inputs != second.inputs or not same_variables:
        raise NotRowwise(0, "it does something else each time it is called, or for another number of tokens")
    return first


def _of_rows(
    function: Callable[..., Any], points: Sequence[Point], sizes: Sequence[int], dtype: str, rows: int
) -> Made:
    kind = getattr(torch, dtype)
    values = [Value("read", point, shape=(rows, size), dtype=kind) for point, size in zip(points, sizes, strict=True)]
    found, reason, line = record_function(function, values, rows if rows == _FUNCTION_ROWS[0] else None)
    if reason is not None or found is None:
        raise NotRowwise(line, reason or "it returns no tensor")
    if found.shape != values[0].shape:
        raise NotRowwise(line, f"it returns a tensor of shape {list(found.shape)} for {list(values[0].shape)}")
    reader = RowwiseReader(values[0], line)
    reader.may_use = lambda point: point in points[1:]
    return reader.program(found)
