"""Checks programs by running their operations on the meta device, which infers shapes and dtypes without numbers; and finds their forms.

Programs of one form can run together. They differ only in numbers and small vectors that a bank can hold: arguments of elementwise
operations, or of products with a vector.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from midstream.errors import PlanError
from midstream.memory import ENTRY_BYTES, ITEM_BYTES, Memory, items_in
from midstream.plan.fields import FLOAT32_MAX
from midstream.plan.rowwise import (
    BY_LAYOUT,
    ELEMENTWISE,
    RULES,
    SIZED,
    Mixes,
    OpCall,
    RuleResult,
    Shaped,
    on_device,
    overload,
)
from midstream.plan.steps import FLOATS, Const, Constant, DType, Ref, RowCount, Step, written
from midstream.plan.vectors import digest
from midstream.plan.work import Work, product_of, work_of
from midstream.tree import objects_in

MAX_ROW = 1 << 18  # numbers of a row's part of one result
MAX_SHARED = 1 << 20  # numbers of a result that is the same for all rows
MAX_RESULTS = 1 << 10  # of one step
MAX_ALL_RESULTS = 1 << 12  # of all steps of a program
MAX_RANK = 6
_CHECKED_ROWS = (1009, 2)  # two numbers, so that a literal size cannot equal both
_TYPES = {
    "Tensor": (Shaped,), "number": (bool, int, float), "int": (int, RowCount), "float": (int, float), "bool": (bool,), "str": (str,),
    "ScalarType": (DType,),
}  # fmt: skip
_WITH_VECTOR = ELEMENTWISE - BY_LAYOUT  # operations for which each row may have a vector of its own
# Operations whose second argument may be a number that differs between rows.
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_WITH_NUMBER = frozenset("add sub mul div".split()) | _COMPARISONS
_STEP_BYTES = 2 * ENTRY_BYTES  # the memory that a step takes in `_known`, or a result in `_found`
_known: Memory[Checked] = Memory()  # the facts about programs by their structure
_FEW = 4
_found: Memory[Any] = Memory()  # results without numbers, by the operation and the shapes and dtypes of its arguments
_PRODUCTS = frozenset(f"{name}.default" for name in ("mm", "mv", "addmm", "bmm"))
# How much slower matrix products of a dtype are than those of float32.
_SLOWER = {torch.float32: 1.0, torch.bfloat16: 4.0, torch.float64: 2.0}
_SLOWEST = 24.0  # the same for float16 and whole numbers, on a CPU


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
        self._count = 0  # of results
        self.work = Work()
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
        """The input, result or constant that an argument refers to. `place`: names the step in messages."""
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
            self._check_count(step, call)  # before PyTorch makes the results
            found = self._without_numbers(func, step.op, args, kwargs)
        except PlanError:
            raise
        except Mixes as error:
            raise PlanError(f"{step.place}: {error}.") from None
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")[:200]
            raise PlanError(f"{step.place} does not take these arguments: {said}") from error
        several = isinstance(found, (tuple, list))
        each = enumerate(found if several else (found,))
        results = tuple(self._result(step, meta, outcome, outcome.which == i) for i, meta in each)
        self.work = self.work.plus(self._work(step.op, call, results))
        self.results.append(results if several else results[0])

    def _without_numbers(self, func: Any, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation's result on the meta device. Cached: PyTorch finds the results of many operations in slow Python code."""
        key = self._rows, op, _spec(tuple(args)), tuple((name, _spec(kwargs[name])) for name in sorted(kwargs))

        def find() -> Any:
            named = {name: self._plain(each) for name, each in kwargs.items()}
            return func(*map(self._plain, args), **named, **on_device(op, "meta"))

        def size(found: Any) -> int:
            results = len(found) if isinstance(found, (tuple, list)) else 1
            return results * _STEP_BYTES + ITEM_BYTES * items_in(key) if results <= _FEW else sys.maxsize

        return _found.get(key, find, size)

    def _check_count(self, step: Step, call: OpCall) -> None:
        """Raise PlanError for too many results. Each costs time to make, also if it is empty."""
        count = _result_count(step.op, call)
        self._count += count
        if count > MAX_RESULTS:
            raise PlanError(f"{step.place} gives {count} results; allowed: up to {MAX_RESULTS}.")
        if self._count > MAX_ALL_RESULTS:
            raise PlanError(
                f"The program's operations give over {MAX_ALL_RESULTS} results up to {step.place}; allowed: up to {MAX_ALL_RESULTS}. "
                "Use operations on whole tensors in place of unbind and split."
            )

    def _work(self, op: str, call: OpCall, results: Sequence[Shaped]) -> Work:
        tensors = [*call.tensors, *results]
        row, shared = self._sizes(tensors)
        if op in _PRODUCTS:
            left, right = [call[name] for name in ("self", "mat1", "mat2", "vec") if isinstance(call[name], Shaped)][
                -2:
            ]
            products = left.meta.numel() * (right.meta.shape[-1] if right.meta.ndim > 1 else 1)
            slower = _SLOWER.get(left.meta.dtype, _SLOWEST)
            of_row, of_all = (products / self._rows, 0.0) if left.rows else (0.0, products)
            return product_of(row, shared, of_row, of_all, slower)
        x, dim = call["self"], call["dim"]
        dim = dim[0] if isinstance(dim, (tuple, list)) and dim else dim
        is_axis = isinstance(x, Shaped) and isinstance(dim, int) and -x.meta.ndim <= dim < x.meta.ndim
        return work_of(op, row, shared, len(tensors), x.meta.shape[dim] if is_axis else 0)

    def _sizes(self, tensors: Sequence[Shaped]) -> tuple[float, float]:
        """How many numbers the tensors have: those with rows, counted for one row; and all others."""
        row = sum(each.meta.numel() for each in tensors if each.rows) / self._rows
        return row, sum(each.meta.numel() for each in tensors if not each.rows)

    def _result(self, step: Step, meta: Any, outcome: RuleResult, has_bound: bool) -> Shaped:
        if not isinstance(meta, torch.Tensor) or meta.is_complex():
            raise PlanError(f"{step.place} gives no tensor of real numbers.")
        size = meta.numel() // self._rows if outcome.rows else meta.numel()
        if meta.ndim > MAX_RANK or size > (MAX_ROW if outcome.rows else MAX_SHARED):
            most = f"up to {MAX_ROW} numbers a row, {MAX_SHARED} for all rows and {MAX_RANK} axes"
            raise PlanError(f"{step.place} gives {list(meta.shape)}, which is too large; allowed: {most}.")
        if outcome.rows and (not meta.ndim or meta.shape[0] != outcome.rows * self._rows):
            raise PlanError(f"{step.place} gives {list(meta.shape)}, whose first axis is not that of the rows.")
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
    """The arguments by their names. Refuses types that the schema does not allow: PyTorch may crash on them.

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
    """Refuse the number of rows anywhere but as a first size: no number in a result may depend on it."""
    for name, value in call.named.items():
        inside = value[1:] if SIZED.get(op) == name and isinstance(value, tuple) and value else (value,)
        if any(objects_in(inside, RowCount)):
            raise Mixes("it uses the number of rows, where it is not a first size")


def _spec(arg: Any) -> Any:
    """An argument as a part of a key: tensors by their shape and dtype."""
    if isinstance(arg, Shaped):
        return arg.meta.dtype, arg.meta.shape
    return tuple(map(_spec, arg)) if isinstance(arg, tuple) else (type(arg), arg)


def _result_count(op: str, call: OpCall) -> int:
    """How many results an operation gives, before it runs."""
    x, dim = call["self"], call["dim"] or 0
    if op not in ("unbind.int", "split.Tensor", "split_with_sizes.default") or not isinstance(x, Shaped):
        return 1
    if op == "split_with_sizes.default":
        return len(call["split_sizes"])
    if not -x.meta.ndim <= dim < x.meta.ndim:
        return 1  # PyTorch refuses it
    size = x.meta.shape[dim]
    return size if op == "unbind.int" else -(-size // max(call["split_size"], 1))


@dataclass(frozen=True)
class Checked:
    """The facts about a program.

    Attributes:
        work: of one run.
        peak: the most numbers of a row that are in memory at once.
        last_use: step -> the last step that uses it; without the unused steps.
        results: the first result of each step, when the program runs on some number of rows.
        parts: the shape and dtype of one row of each result of the program.
    """

    work: Work
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

    def check() -> Checked:
        found, *_ = [_checked(program, rows) for rows in _CHECKED_ROWS]
        return found

    return _remembered(program, check)


def remember(program: Any, facts: Checked) -> None:
    """Note the facts about a program that was checked in another process."""
    _remembered(program, lambda: facts)


def _remembered(program: Any, check: Callable[[], Checked]) -> Checked:
    key = _structure(program)
    return _known.get(key, check, lambda _: len(key) + _STEP_BYTES * len(program.steps))


def _structure(program: Any) -> str:
    key = json.dumps([program.width, program.inputs, program.dtype, written(program.result)])
    key += json.dumps([[step.op, _shape_of(step.args), _shape_of(step.kwargs)] for step in program.steps])
    return key + json.dumps([[c.dtype, c.shape, c.digest if c.dtype not in FLOATS else ""] for c in program.constants])


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
    return Checked(checker.work, peak, last_use, tuple(parts[0] for parts in each), results_of_rows)


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
        rounded: on a CPU, the dtype to which PyTorch first rounds the number.
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
    argument's dtype. Other arithmetic on half precision is in float32; on a CPU, PyTorch first rounds a number that it adds or subtracts
    to half precision.
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
