"""Reads recorded tensors that are row-wise functions of a site's value: as linear changes of its rows, and as programs (`plan.program`).

    for rows, change in changes(write): ...                        # None if the write is not linear
    for rows, program, inputs in programs_of(write): ...           # raises NotRowwise, with the line and the reason
    tensor = RowwiseReader(read, line).row_tensor(value)           # the same for a value that is not written
    plan = with_programs(plan, facts)                              # the same for the functions in a plan's `Apply`s

The reader follows each tensor through the graph: it notes which rows of the site's value the tensor has, and on which axis
(`lowering.row_tensors`). The rules of `plan.rowwise` decide whether an operation keeps rows apart. A program that agrees with the recording
on its T tokens, and keeps rows apart, is right for any number of rows. So a recording of any length will do, even one of a single token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from midstream.errors import PlanError
from midstream.lowering.linear import LinearBuilder, LinearResult
from midstream.lowering.row_tensors import SAME, NoProgram, RowChoice, RowOperations, RowTensor
from midstream.plan.building import Builder
from midstream.plan.ops import Apply
from midstream.plan.ops.edit import Intervention, RowChange, changed
from midstream.plan.program import Program
from midstream.plan.rowwise import ELEMENTWISE
from midstream.plan.steps import DType
from midstream.plan.values import ModelFacts, Plan
from midstream.sites import LAYER_SITES, Point, comes_before
from midstream.trace.code import FunctionProgram
from midstream.trace.graph import Chain, Value, Write
from midstream.trace.record import fingerprint, record_function
from midstream.tree import objects_in

_AGAIN = "it uses rows again after it has replaced some of them"
# A function is recorded for each of these numbers of tokens, and has to do the same. The first is a prime: see `Notes.rows`.
_FUNCTION_ROWS = (1009, 2)
_IGNORED = frozenset("memory_format layout device pin_memory non_blocking implicit".split())


class NotRowwise(Exception):
    """Why a write is not a program, and on which line; 0 if unknown."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason


class Made(NamedTuple):
    """A program that makes a write.

    Attributes:
        rows: the rows that it changes.
        inputs: the points of its further inputs.
    """

    rows: RowChoice
    program: Program
    inputs: tuple[Point, ...] = ()


def changes(write: Write) -> list[tuple[RowChoice, RowChange]] | None:
    """The changes that a write makes, each with its rows. Later entries override earlier ones. None if the write is not linear."""
    was = write.was
    if len(was.shape) != 2:
        return None
    reader = RowwiseReader(was, write.line, LinearBuilder(was.shape[1], str(was.dtype).removeprefix("torch.")))
    try:
        parts = reader.parts(write.now)
    except NotRowwise:
        return None
    found = []
    for rows, tensor in parts:
        if not isinstance(tensor.result, LinearResult) or not isinstance(tensor.result.form, RowChange):
            return None
        found.append((rows, tensor.result.form))
    return found


def programs_of(write: Write, are_together: Callable[[Point, Point], bool] = lambda one, other: True) -> list[Made]:
    """The programs that make a write. A later one overrides earlier ones at its rows.

    Args:
        are_together: as in `trace.record.Model`.

    Raises:
        NotRowwise: the write is not row-wise, or uses an operation that programs do not have.
    """
    if write.was.part is not None:
        raise NotRowwise(write.line, "it is about one of a layer's two streams")
    reader = RowwiseReader(write.was, write.line)
    reader.may_use = lambda point: comes_before(point, write.point) and are_together(point, write.point)
    return reader.programs(write.now)


class RowwiseReader:
    """Follows the values computed from one value.

    Args:
        was: the value.
        builder: of earlier programs at its site.

    Attributes:
        line: of the value that was read last.
        may_use: which other points of the same step its programs may read; none at first.
    """

    def __init__(self, was: Value, line: int, builder: Builder | None = None) -> None:
        self.builder = builder or Builder(math.prod(was.shape[1:]), str(was.dtype).removeprefix("torch."))
        self._rows = was.shape[0]
        self._operations = RowOperations(self.builder, self._rows)
        self.unshaped = self._operations.unshaped
        self.line = self._first_line = line
        self.may_use: Callable[[Point], bool] = lambda point: False
        self._step = was.step
        self._was = self._operations.reshaped(RowTensor(self.builder.input), was.shape[1:])
        self._known: dict[int, Any] = {id(was): self._was}
        self._further: dict[Point, Any] = {}  # the further inputs, in the order in which the builder has made them

    def programs(self, now: Value) -> list[Made]:
        """The programs that make a value of the site, as `programs_of` returns them. Raises NotRowwise."""
        parts = self.parts(now)
        with self._saying_why():
            return [self._made(rows, tensor) for rows, tensor in parts]

    def parts(self, now: Value) -> list[tuple[RowChoice, RowTensor]]:
        """A value of the site, and later replacements of some of its rows. Raises NotRowwise."""
        with self._saying_why():
            whole = self.of(now)
            if isinstance(whole, torch.Tensor):
                whole = self._operations.as_row_tensor(whole, self._was)
            is_row = self._operations.count(whole) == 1  # axes of size 1 before a single row are ambiguous
            if whole.rows or (whole.lead and not is_row):
                raise NoProgram("it is not a value for each token")
            return [((), whole), *whole.parts]

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
        except (NoProgram, PlanError) as error:
            raise NotRowwise(self.line, str(error)) from None
        except RecursionError:
            raise NotRowwise(self._first_line, "it computes too much") from None
        except Exception as error:  # the code may do anything to its tensors; an unforeseen case is not a program
            raise NotRowwise(self.line, f"it is not known to be row-wise ({type(error).__name__}: {error})") from error

    def _made(self, rows: RowChoice, tensor: RowTensor) -> Made:
        flat = self._operations.reshaped(tensor, (self.builder.width,))
        result = self._operations.cast(flat, getattr(torch, self.builder.dtype)).result
        points = list(self._further)
        return Made(rows, self.builder.program(result), tuple(points[i] for i in self.builder.inputs_of(result)))

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
        args = tuple(map(self.of, value.args))
        kwargs = {name: self.of(each) for name, each in value.kwargs.items() if name not in _IGNORED}
        self.line = self._operations.line = value.line or self.line
        if value.kind == "put":
            return self._put(args[0], args[1], value.target)
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
            raise NoProgram("it uses a tensor of its own that it has filled with values of the model")
        if any(tensor.parts for tensor in tensors):
            return self._again(packet, which, args, kwargs)
        found = self._operations.result_of(packet, which, args, kwargs, None if changes else value.out)  # type: ignore[arg-type]
        return self._operations.cast(found, args[0].result.dtype) if changes and isinstance(found, RowTensor) else found

    def _again(self, packet: str, which: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowTensor:
        """The result of an operation on a value some of whose rows have been replaced."""
        tensor, others = args[0], list(objects_in((args[1:], tuple(kwargs.values())), RowTensor))
        if packet == "copy" and others:
            copied = self._operations.op_copy(tensor, replace(others[0], parts=()))
            if copied.result is others[0].result:
                return replace(copied, parts=others[0].parts)
        if not isinstance(tensor, RowTensor) or any(other.parts for other in others):
            raise NoProgram(_AGAIN)
        if packet in SAME:
            return tensor

        def result(of: RowTensor) -> Any:
            return self._operations.result_of(packet, which, (of, *args[1:]), kwargs, None)

        found = result(replace(tensor, parts=()))
        if packet in ("copy", "fill", "zero"):  # all rows get other numbers
            return found  # type: ignore[no-any-return]
        if packet in ("select", "slice"):
            return self._some_again(tensor, found)
        if packet == "index_put" and found.result is tensor.result:
            return replace(found, parts=(*tensor.parts, *found.parts))
        if f"{packet}.{which}" not in ELEMENTWISE or others:
            raise NoProgram(_AGAIN)
        parts = ((rows, replace(result(replace(part, lead=0)), lead=part.lead)) for rows, part in tensor.parts)
        return replace(found, parts=tuple(parts))

    def _some_again(self, tensor: RowTensor, found: RowTensor) -> RowTensor:
        """The rows that `found` has of `tensor`, if none or all of them were replaced."""
        if found.result is tensor.result and found.rows == tensor.rows:
            return tensor
        for rows, part in reversed(tensor.parts):
            if rows == found.rows:
                return part
            if not _are_apart(rows, found.rows):
                raise NoProgram(_AGAIN)
        return found

    def _put(self, whole: Any, new: Any, chain: Sequence[Any]) -> RowTensor:
        """A tensor with other numbers in a view of it."""
        if not isinstance(whole, RowTensor) or not isinstance(new, RowTensor):
            raise NoProgram("it uses a tensor of its own that it has filled with values of the model")
        base = replace(whole, parts=())
        views = self._views(base, chain)
        rows = views[-1].rows
        if new.rows == rows == base.rows and views[-1].result is base.result:  # all of it
            return replace(new, lead=base.lead)
        if new.parts or (whole.parts and (rows == base.rows or any(a.rows == b.rows for a, b in pairwise(views)))):
            raise NoProgram("it changes a part of rows after it has replaced some of them")
        for (op, args, _, _), view, seen in reversed(list(zip(chain, views, views[1:], strict=False))):
            if new.rows != rows:
                raise NoProgram("it writes numbers of other tokens")
            if seen.rows == view.rows:
                new = replace(self._operations.back(str(op), args, view, new), rows=rows)
        if rows == base.rows:
            return replace(new, lead=base.lead)
        new = replace(new, lead=-1 if isinstance(rows[-1], int) else 0)
        return replace(whole, parts=(*(part for part in whole.parts if part[0] != rows), (rows, new)))

    def _views(self, base: Any, chain: Sequence[Any]) -> list[Any]:
        views = [base]
        for op, args, kwargs, out in chain:
            packet, _, which = str(op).removeprefix("aten.").partition(".")
            views.append(self._operations.result_of(packet, which, (views[-1], *map(self.of, args)), dict(kwargs), out))
        return views


def _name_of(point: Any) -> str:
    return f"{point[0]} of layer {point[1]}" if isinstance(point, tuple) else str(point)


def _are_apart(one: RowChoice, other: RowChoice) -> bool:
    """Whether these are different rows for every prompt length."""
    first, second = _listed(one), _listed(other)
    if first is None or second is None:
        return False
    return len({place < 0 for place in first | second}) == 1 and not first & second


def _listed(rows: RowChoice) -> set[int] | None:
    """The rows that a choice names; None if they depend on the prompt's length."""
    if len(rows) != 1:
        return None
    match rows[0]:
        case int(place):
            return {place}
        case tuple(places):
            return set(places)
        case slice(start=first, stop=int(last), step=step) if (first or 0) >= 0 and 0 <= last < 1 << 20:
            return set(range(first or 0, last, step or 1))
    return None


# Functions in a plan.


def with_programs(plan: Plan, facts: ModelFacts) -> Plan:
    """The plan with programs in place of functions.

    Raises:
        PlanError: a function is not row-wise, depends on more than the value, or uses an operation that programs do not have. The message
            has its line and the reason.
    """
    return Plan(tuple(one for item in plan.interventions for one in _with_recorded(item, facts)))


def _with_recorded(item: Intervention, facts: ModelFacts) -> Sequence[Intervention]:
    if item.parts:
        edit, *_ = item.parts
        return [item.with_parts(partial(_in_place_of, edit, one)) for one in _with_recorded(edit, facts)]
    if not isinstance(item, Apply) or not item.is_function:
        return [item]
    item = item.counted_from_0(facts.num_layers)
    by_width: dict[int, list[int]] = {}
    for layer in item.layers_in(facts.num_layers):
        if (width := facts.widths.get((item.site, layer))) is not None:
            by_width.setdefault(width, []).append(layer)
    if not by_width:
        there = ", ".join(dict.fromkeys(site for site, _ in facts.widths))
        raise PlanError(f"The model has no site {item.site!r} (Apply.site); it has {there}.", field="Apply.site")
    found = []
    for width, layers in by_width.items():
        made = _program_of(item, width, layers[0], facts)
        program, inputs = made.program, made.inputs
        found.append(changed(item, layers=tuple(layers), program=program, inputs=inputs))
    return found


def _in_place_of(old: Intervention, new: Intervention, part: Intervention) -> Intervention:
    return new if part is old else part


def _program_of(item: Apply, width: int, layer: int, facts: ModelFacts) -> Made:
    """The program of the function at the site of one layer."""
    points = [(item.site, layer), *item.inputs]
    if missing := [point for point in item.inputs if point not in facts.widths]:
        raise PlanError(
            f"Apply.inputs: the model has no {missing[0][0]!r} at layer {missing[0][1]}.", field="Apply.inputs"
        )
    sizes = [width, *(facts.widths[point] for point in item.inputs)]
    function: Any = item.program
    before = fingerprint([[FunctionProgram(function)]])
    first, second = (_of_rows(function, points, sizes, facts.dtype, rows) for rows in _FUNCTION_ROWS)
    same_variables = fingerprint([[FunctionProgram(function)]]) == before
    if first.program != second.program or first.inputs != second.inputs or not same_variables:
        raise _refused("it does something else each time it is called, or for another number of tokens", 0)
    return first


def _of_rows(
    function: Callable[..., Any], points: Sequence[Point], sizes: Sequence[int], dtype: str, rows: int
) -> Made:
    kind = getattr(torch, dtype)
    values = [Value("read", point, shape=(rows, size), dtype=kind) for point, size in zip(points, sizes, strict=True)]
    found, reason, line = record_function(
        function, values, torch.device("cpu"), rows if rows == _FUNCTION_ROWS[0] else None
    )
    if reason is not None or found is None:
        raise _refused(reason or "it returns no tensor", line)
    if found.shape != values[0].shape:
        raise _refused(f"it returns a tensor of shape {list(found.shape)} for {list(values[0].shape)}", line)
    reader = RowwiseReader(values[0], line)
    reader.may_use = lambda point: point in points[1:]
    try:
        made = reader.programs(found)
    except NotRowwise as error:
        raise _refused(error.reason, error.line) from None
    if len(made) > 1 or made[0].rows:
        raise _refused("it changes some tokens alone, which is what Apply.positions is for", line)
    return made[0]


def _refused(reason: str, line: int) -> PlanError:
    where, reason = f"line {line} of " if line else "", reason.rstrip(".")
    return PlanError(
        f"Apply.program: {where}the function cannot be a program: {reason}. Write a function of each token's value alone, with tensor "
        "operations, such as torch.where in place of if; or a trace, which may do anything.",
        field="Apply.program",
    )
