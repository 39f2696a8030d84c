"""Checks programs by running their operations on the meta device, which infers shapes and dtypes without numbers; and finds their forms.

Programs of one form can run together. They differ only in numbers and small vectors that a bank can hold: arguments of elementwise
operations, or of products with a vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from midstream.errors import PlanError
from midstream.plan.fields import FLOAT32_MAX
from midstream.plan.rowwise import (
    BY_LAYOUT,
    ELEMENTWISE,
    RULES,
    SIZED,
    SLOW,
    Mixes,
    OpCall,
    RuleResult,
    Shaped,
    on_device,
    overload,
)
from midstream.plan.steps import FLOATS, Const, Constant, DType, Ref, RowCount, Step, written
from midstream.plan.vectors import digest
from midstream.tree import objects_in

MAX_ROW = 1 << 18  # numbers of a row's part of one result
MAX_SHARED = 1 << 20  # numbers of a result that is the same for all rows
MAX_RESULTS = 1 << 10  # of one step
MAX_RANK = 6
_CHECKED_ROWS = (1009, 2)  # two numbers, so that a literal size cannot equal both
_TYPES = {
    "Tensor": (Shaped,), "number": (bool, int, float), "int": (int, RowCount), "float": (int, float), "bool": (bool,), "str": (str,),
    "ScalarType": (DType,),
}  # fmt: skip
_WITH_VECTOR = ELEMENTWISE - BY_LAYOUT  # operations for which each row may have a vector of its own
# Operations whose second argument may be a number of its own for each row.
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_WITH_NUMBER = frozenset("add sub mul div".split()) | _COMPARISONS
_MOST_KNOWN = 1024
_known: dict[str, Checked] = {}  # the facts about programs by their structure
_SLOWER = 16  # the work of an operation in `SLOW`, relative to others


class Checker:
    """Runs steps one after another on the meta device, and applies the rules of `plan.rowwise`.

    Args:
        rows: R.

    Attributes:
        inputs, constants, results: what steps refer to.
        work: as in `Checked`.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.work = 0.0
        self.inputs, self.constants = list[Shaped](), list[Shaped]()
        self.results: list[Shaped | tuple[Shaped, ...]] = []

    def add_input(self, width: int, dtype: str) -> Shaped:
        self.inputs.append(Shaped(torch.empty(self._rows, width, dtype=getattr(torch, dtype), device="meta"), 1))
        return self.inputs[-1]

    def add_constant(self, constant: Constant) -> None:
        meta = torch.empty(constant.shape, dtype=getattr(torch, constant.dtype), device="meta")
        bound = None
        if constant.data and constant.dtype.startswith(("int", "uint")):
            bound = int(constant.numbers.max()) + 1 if constant.numbers.min() >= 0 else None
        self.constants.append(Shaped(meta, 0, bound))

    def of(self, arg: Any, place: str = "the result") -> Any:
        """What a reference or a constant stands for. `place`: of the step that has it, for messages."""
        if isinstance(arg, Const):
            return self.constants[arg.place]
        found: Any = self.inputs[-1 - arg.step] if arg.step < 0 else self.results[arg.step]
        if isinstance(found, tuple) != (arg.out is not None) or (arg.out is not None and arg.out >= len(found)):
            raise PlanError(f"{place} refers to a result that step {arg.step} does not have.")
        return found[arg.out] if arg.out is not None else found

    def run(self, step: Step) -> None:
        """Add the result of a step.

        Raises:
            PlanError: the operation is not in the table, mixes rows, or does not take these arguments.
        """
        filled = step.mapped(lambda arg: self.of(arg, step.place))
        args, kwargs = filled.args, dict(filled.kwargs)
        try:
            func = overload(step.op)
        except LookupError:
            raise PlanError(f"{step.place} is not an operation that programs may have.") from None
        try:
            call = _bound(func, args, kwargs, step.op in ELEMENTWISE)
            _check_rows_marks(step.op, call)
            outcome = RULES[step.op](call)
            named = {name: self._plain(each) for name, each in kwargs.items()}
            found = func(*map(self._plain, args), **named, **on_device(step.op, "meta"))
        except Mixes as error:
            raise PlanError(f"{step.place}: {error}.") from None
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")[:200]
            raise PlanError(f"{step.place} does not take these arguments: {said}") from error
        several = isinstance(found, (tuple, list))
        if several and len(found) > MAX_RESULTS:
            raise PlanError(f"{step.place} gives {len(found)} results; allowed: up to {MAX_RESULTS}.")
        each = enumerate(found if several else (found,))
        results = tuple(self._result(step, meta, outcome, outcome.which == i) for i, meta in each)
        self.work += _multiplications(func, call)
        self.results.append(results if several else results[0])

    def _result(self, step: Step, meta: Any, outcome: RuleResult, has_bound: bool) -> Shaped:
        if not isinstance(meta, torch.Tensor) or meta.is_complex():
            raise PlanError(f"{step.place} gives no tensor of real numbers.")
        size = meta.numel() // self._rows if outcome.rows else meta.numel()
        if meta.ndim > MAX_RANK or size > (MAX_ROW if outcome.rows else MAX_SHARED):
            most = f"up to {MAX_ROW} numbers a row, {MAX_SHARED} for all rows and {MAX_RANK} axes"
            raise PlanError(f"{step.place} gives {list(meta.shape)}, which is too large; allowed: {most}.")
        if outcome.rows and (not meta.ndim or meta.shape[0] != outcome.rows * self._rows):
            raise PlanError(f"{step.place} gives {list(meta.shape)}, whose first axis is not that of the rows.")
        self.work += (size if outcome.rows else size / 64) * (_SLOWER if step.op in SLOW else 1)
        is_whole = not meta.dtype.is_floating_point and meta.dtype != torch.bool
        return Shaped(meta, outcome.rows, outcome.bound if is_whole and has_bound else None)

    def _plain(self, arg: Any) -> Any:
        return plain(arg, lambda each: each.meta if isinstance(each, Shaped) else each, self._rows)


def plain(arg: Any, tensor: Callable[[Any], Any], rows: int) -> Any:
    """An argument as PyTorch takes it. `tensor` converts references and constants."""
    if isinstance(arg, tuple):
        return [plain(each, tensor, rows) for each in arg]
    if isinstance(arg, RowCount):
        return arg.times * rows
    return getattr(torch, arg.name) if isinstance(arg, DType) else tensor(arg)


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], takes_numbers: bool) -> OpCall:
    """The arguments by their names. Refuses types other than the schema's, with which PyTorch itself may crash.

    Args:
        takes_numbers: whether tensors other than the first one may be numbers.
    """
    named: dict[str, Any] = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            named[argument.name] = args[place]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
        else:
            raise Mixes(f"it needs {argument.name}")
        given, kind = named[argument.name], str(argument.real_type)
        is_number = takes_numbers and place > 0 and kind == "Tensor" and type(given) in (int, float)
        if not (is_number or _is_of(kind, given) or (argument.N == 1 and type(given) is int)):
            raise Mixes(f"its {argument.name} is not {kind}")
    if len(args) > len(func._schema.arguments) or kwargs.keys() - named.keys():
        raise Mixes("it has arguments that the operation does not know")
    if {"device", "layout", "pin_memory", "generator"} & kwargs.keys():
        raise Mixes("it says where its result lies")
    return OpCall(named)


def _is_of(kind: str, given: Any) -> bool:
    """Whether an argument has a type of PyTorch's schemas."""
    if kind.startswith("Optional["):
        return given is None or _is_of(kind[9:-1], given)
    if kind.startswith("List["):
        return isinstance(given, (tuple, list)) and all(_is_of(kind[5:-1], each) for each in given)
    types = _TYPES.get(kind, ())
    return type(given) in types


def _check_rows_marks(op: str, call: OpCall) -> None:
    """The number of rows may only be the first size: a result must not depend on it."""
    for name, value in call.named.items():
        inside = value[1:] if SIZED.get(op) == name and isinstance(value, tuple) and value else (value,)
        if any(objects_in(inside, RowCount)):
            raise Mixes("it uses the number of rows, where it is not a first size")


def _multiplications(func: Any, call: OpCall) -> float:
    """The work of a matrix product for one row, in units of `Checker.work`; little for a product that all rows share."""
    pair = [call[name] for name in ("self", "mat1", "mat2", "vec") if isinstance(call[name], Shaped)][-2:]
    if func._schema.name not in ("aten::mm", "aten::mv", "aten::addmm", "aten::bmm") or len(pair) < 2:
        return 0.0
    left, right = pair
    row = left.rows * math.prod(left.meta.shape[1:]) if left.rows else left.meta.numel()
    return row * (right.meta.shape[-1] if right.meta.ndim > 1 else 1) / 64


@dataclass(frozen=True)
class Checked:
    """The facts about a program.

    Attributes:
        work: about how many numbers it computes for each row.
        peak: the most numbers of a row that are in memory at once.
        last_use: step -> the last step that uses it; without the unused steps.
        results: of each step, the first one for a number of rows.
        parts: the shape and dtype of one row of each result of the program.
    """

    work: int
    peak: int
    last_use: Mapping[int, int]
    results: tuple[Shaped, ...]
    parts: tuple[PackedResult, ...]


@dataclass(frozen=True)
class PackedResult:
    """A row of one result of a program.

    Attributes:
        shape: without the axis of the rows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def checked(program: Any) -> Checked:
    """Check a `Program`, whose module imports this one. Raises PlanError as the class does.

    Programs that differ only in floating numbers are checked once: requests often have programs of their own.
    """
    key = json.dumps([program.width, program.inputs, program.dtype, written(program.result)])
    key += json.dumps([[step.op, _shape_of(step.args), _shape_of(step.kwargs)] for step in program.steps])
    key += json.dumps([[c.dtype, c.shape, c.digest if c.dtype not in FLOATS else ""] for c in program.constants])
    if key not in _known:
        found = [_checked(program, rows) for rows in _CHECKED_ROWS]
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found[0]
    return _known[key]


def _shape_of(arg: Any) -> Any:
    """An argument as plain data, without the value of floating numbers, on which no shape depends."""
    if isinstance(arg, tuple):
        return list(map(_shape_of, arg))
    return {"float": True} if isinstance(arg, float) else written(arg)


def _checked(program: Any, rows: int) -> Checked:
    checker, widths, refs = Checker(rows), (program.width, *program.inputs), program.results
    for width in widths:
        checker.add_input(width, program.dtype)
    for constant in program.constants:
        checker.add_constant(constant)
    for step in program.steps:
        checker.run(step)
    last = [checker.of(ref) for ref in refs]
    for each in last:
        _check_result(each, rows, None if program.is_read else program.width)
    sizes_of_all = sum(each.meta.numel() // rows for each in last)
    if sizes_of_all > MAX_ROW:
        raise PlanError(f"The program gives {sizes_of_all} numbers a row; allowed: up to {MAX_ROW}.")
    each = [result if isinstance(result, tuple) else (result,) for result in checker.results]
    sizes = [sum(part.meta.numel() // rows for part in parts if part.rows) for parts in each]
    last_use = _last_use(program.steps, refs)
    results_of_rows = tuple(PackedResult(tuple(one.meta.shape[1:]), one.meta.dtype) for one in last)
    peak = _peak([*sizes, sizes_of_all], last_use, sum(widths))
    return Checked(int(checker.work), peak, last_use, tuple(parts[0] for parts in each), results_of_rows)


def _check_result(found: Any, rows: int, width: int | None) -> None:
    """Raise PlanError for an invalid result. `width`: of the value that it replaces; None for a capture's result."""
    if not isinstance(found, Shaped) or found.rows != 1 or (width and tuple(found.meta.shape) != (rows, width)):
        shape = list(found.meta.shape) if isinstance(found, Shaped) else "several tensors"
        allowed = [rows, width] if width else f"[{rows}, ...]"
        raise PlanError(f"The program gives {shape} for {rows} rows; allowed: {allowed}, computed from its input.")
    name = str(found.meta.dtype).removeprefix("torch.")
    if name not in (FLOATS if width else (*FLOATS, "int64", "int32", "int16")):
        raise PlanError(f"The program gives {name}; allowed: {'floating' if width else 'floating and whole'} numbers.")


def _last_use(steps: Sequence[Step], results: Sequence[Ref]) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, step in enumerate(steps):
        for ref in objects_in((step.args, step.kwargs), Ref):
            found[ref.step] = number
    return found | {result.step: len(steps) for result in results}


def _peak(sizes: Sequence[int], last_use: Mapping[int, int], width: int) -> int:
    """The most numbers of a row that are in memory at once, with the inputs. `width`: of all inputs together."""
    alive = most = 2 * width
    ends: dict[int, int] = {}
    for number, size in enumerate(sizes):
        alive += size
        most = max(most, alive)
        end = max(last_use.get(number, number), number)
        ends[end] = ends.get(end, 0) + size
        alive -= ends.pop(number, 0)
    return most


# Forms.


@dataclass(frozen=True)
class Form:
    """The common part of programs that can run together.

    Attributes:
        key: equal for such programs.
        slots: (step, argument) -> a number or a constant of the program that may differ between them.
    """

    key: str
    slots: dict[tuple[int, int], Number | Const]


class Number(NamedTuple):
    """A number that may differ between programs of one form. A tensor in its place gives the same bits.

    Attributes:
        dtype: of that tensor, and of the arithmetic.
        rounded: the dtype to which PyTorch rounds the number before, on a CPU.
    """

    value: float
    dtype: torch.dtype
    rounded: torch.dtype

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The number, `[]`, for rows on a device. Outside the dtype's range it is infinite, as in PyTorch's arithmetic."""
        exact = torch.tensor(self.value, dtype=torch.float64 if isinstance(self.value, float) else torch.int64)
        return (exact.to(self.rounded) if device.type == "cpu" else exact).to(self.dtype)


def form_of(program: Any, results: Sequence[Shaped]) -> Form:
    """The form of a `Program`, whose module imports this one. `results`: of its steps."""
    single = [bool(result.rows == 1) for result in results]
    uses: dict[int, list[tuple[int, int] | None]] = {}
    slots: dict[tuple[int, int], Number | Const] = {}
    for number, step in enumerate(program.steps):
        for place, arg in enumerate((*step.args, *(value for _, value in step.kwargs))):
            is_direct = place < len(step.args) and single[number]
            if isinstance(arg, Const):
                may_differ = is_direct and (
                    step.op in _WITH_VECTOR or (step.op in ("mv.default", "mm.default") and place == 1)
                )
                uses.setdefault(arg.place, []).append((number, place) if may_differ else None)
            elif is_direct and place == 1 and (own := _number(program, step, results)) is not None:
                slots[number, place] = own
            for other in objects_in(arg, Const) if isinstance(arg, tuple) else ():
                uses.setdefault(other.place, []).append(None)
    for place, where in uses.items():
        constant = program.constants[place]
        is_small = (
            constant.shape
            and 0 < math.prod(constant.shape) <= program.width
            and constant.dtype in ("float32", "float16", "bfloat16")
        )
        if is_small and None not in where:
            slots |= {each: Const(place) for each in where if each is not None}
    return Form(_form_key(program, slots), slots)


def _number(program: Any, step: Step, results: Sequence[Shaped]) -> Number | None:
    """The number that is a step's second argument, if it may differ between programs of a form.

    The first argument must be floating: then a number changes no dtype, whether it is whole or not. PyTorch compares in the first
    argument's dtype. Of half precision, it computes in float32. On a CPU it rounds the numbers of sums to half precision before.
    """
    name, first = step.op.partition(".")[0], step.args[0]
    is_alone = len(step.args) == 2 and not step.kwargs
    if name not in _WITH_NUMBER or not is_alone or not isinstance(first, Ref) or first.out is not None:
        return None
    value = step.args[1]
    if type(value) not in (int, float) or not (math.isinf(value) or abs(value) <= FLOAT32_MAX):
        return None
    if first.step >= 0 and results[first.step].rows != 1:
        return None
    own: torch.dtype = results[first.step].meta.dtype if first.step >= 0 else getattr(torch, program.dtype)
    if not own.is_floating_point:
        return None
    dtype = own if own == torch.float64 or name in _COMPARISONS else torch.float32
    return Number(value, dtype, own if name in ("add", "sub") else dtype)


def _form_key(program: Any, slots: dict[tuple[int, int], Any]) -> str:
    def said(number: int, place: int, arg: Any) -> Any:
        slot = slots.get((number, place))
        if isinstance(slot, Const):
            constant = program.constants[slot.place]
            return ["slot", constant.dtype, constant.shape, slot.place]
        return ["slot"] if slot is not None else told(arg)

    def told(arg: Any) -> Any:
        if isinstance(arg, Const):
            return ["constant", program.constants[arg.place].digest]
        return [told(each) for each in arg] if isinstance(arg, tuple) else written(arg)

    steps = [
        [
            step.op,
            [said(number, place, arg) for place, arg in enumerate(step.args)],
            [[name, told(arg)] for name, arg in step.kwargs],
        ]
        for number, step in enumerate(program.steps)
    ]
    return digest(
        json.dumps([[program.width, *program.inputs], program.dtype, steps, written(program.result)]).encode()
    )
