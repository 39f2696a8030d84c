"""Programs: row-wise functions of a site's value as data, for the edit `Apply` and for `Capture`.

A program is a list of PyTorch operations from a fixed table (`plan.rowwise`), with constants. Row r of its result depends only on row r of
its inputs, for any number of rows. It contains no code, so untrusted clients may send programs:

    h = Ref(-1)  # the input, [rows, width]
    Program(256, "float32", (Step("mul.Tensor", (h, 0.5)), Step("add.Tensor", (Ref(0), Const(0)))), Ref(1), (Constant.of(vector),))

The wire form has each program and each constant once, by its digest. Constants are little-endian bytes:

    {"width": 256, "dtype": "float32", "result": {"step": 1}, "constants": [DIGEST],
     "steps": [["mul.Tensor", [{"input": true}, 0.5]], ["add.Tensor", [{"step": 0}, {"constant": 0}]]]}
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.steps import FLOATS, INPUT, SIZES, Const, Constant, DType, Ref, RowCount, Step, written
from midstream.plan.vectors import ByDigest, digest

if TYPE_CHECKING:
    from midstream.plan.checking import Checked, Form
    from midstream.plan.work import Work

MAX_STEPS = 256
MAX_CONSTANTS = 256
MAX_RESULTS = 64
MAX_INPUTS = 4  # besides the site's own value
HELD_BYTES = 1 << 18  # larger constants are sent apart from plans
MAX_ARGUMENTS = 4096  # of one step, with the numbers in its lists
MAX_WIDTH = 1 << 20
_MAX_DEPTH = 3  # of lists in arguments


# --------------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, eq=False, repr=False)
class Program(ByDigest):
    """A row-wise function of a site's value. Programs are equal if their operations and the bits of their constants are.

    For `Apply`, its result is the result of one step, which replaces the value. For `Capture`, its result is a tuple of results of any
    shapes; a captured row has the row's part of each of them, one after the other (see `running.unpacked`).

    Attributes:
        width: of the rows that it takes and returns; heads are side by side.
        dtype: of its input and its arithmetic.
        steps: in their order.
        result: the resulting step, `[rows, width]`; `INPUT` for a program that changes nothing. Or a tuple of several, for captures.
        constants: the constants that its steps use.
        inputs: the widths of further inputs: values of other sites, row by row.

    Raises:
        PlanError: an operation is not in the table, mixes rows or gets wrong arguments; the program is too large; its result has another
            shape. The message names the operation, and its line if that is known.
    """

    width: int
    dtype: str
    steps: tuple[Step, ...]
    result: Ref | tuple[Ref, ...]
    constants: tuple[Constant, ...] = ()
    inputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fields.integer("Program.width", self.width, 1, MAX_WIDTH)
        fields.one_of("Program.dtype", self.dtype, FLOATS)
        fields.settle(self, steps=tuple(self.steps), constants=tuple(self.constants), inputs=tuple(self.inputs))
        if len(self.inputs) > MAX_INPUTS:
            raise fields.refuse("Program.inputs", f"{len(self.inputs)} of them", f"up to {MAX_INPUTS}")
        for width in self.inputs:
            fields.integer("Program.inputs", width, 1, MAX_WIDTH)
        for name, found, most in (("steps", self.steps, MAX_STEPS), ("constants", self.constants, MAX_CONSTANTS)):
            if len(found) > most:
                raise fields.refuse(f"Program.{name}", f"{len(found)} of them", f"up to {most}")
        for number, step in enumerate(self.steps):
            count = [0]
            for arg in (*step.args, *(value for _, value in step.kwargs)):
                self._check_argument(step, number, arg, count)
        self._check_argument(Step("the result"), len(self.steps), self.result, [0])
        refs = self.results
        if not refs or len(refs) > MAX_RESULTS or not all(isinstance(ref, Ref) for ref in refs):
            given = fields.shown(self.result)
            raise fields.refuse("Program.result", given, f"a step's result, or a tuple of up to {MAX_RESULTS}")
        self.checked  # noqa: B018

    @property
    def results(self) -> tuple[Any, ...]:
        """The result, or the results, as references."""
        return self.result if isinstance(self.result, tuple) else (self.result,)

    @property
    def is_read(self) -> bool:
        """Whether it is for a capture, rather than for replacing the site's value."""
        return isinstance(self.result, tuple)

    def packed_width(self, itemsize: int) -> int:
        """The width of its packed results, in elements of `itemsize` bytes: a multiple of 16 bytes."""
        return -(-sum(part.nbytes for part in self.checked.parts) // 16) * 16 // itemsize

    @cached_property
    def checked(self) -> Checked:
        """The facts about its results. Raises PlanError as the class does."""
        from midstream.plan.checking import checked  # imports torch, unlike this module

        return checked(self)

    @cached_property
    def form(self) -> Form:
        """The common part of the programs that can run together with it."""
        from midstream.plan.checking import form_of

        return form_of(self, self.checked.results)

    @property
    def work(self) -> Work:
        """The work of one run."""
        return self.checked.work

    def _check_argument(self, step: Step, number: int, arg: Any, count: list[int], depth: int = 0) -> None:
        """Raise PlanError for an argument that `Step` does not list, or that is out of range."""
        count[0] += 1
        problem = ""
        if isinstance(arg, Ref) and not -1 - len(self.inputs) <= arg.step < number:
            is_input = arg.step < 0
            problem = f"input {-1 - arg.step}" if is_input else f"step {arg.step}"
            problem += f" of {len(self.inputs)} further ones" if is_input else ", which is not an earlier one"
        elif isinstance(arg, Const) and not 0 <= arg.place < len(self.constants):
            problem = f"constant {arg.place} of {len(self.constants)}"
        elif isinstance(arg, RowCount):
            fields.integer(f"{step.place}: a number of rows", arg.times, 1, MAX_WIDTH)
        elif isinstance(arg, DType):
            fields.one_of(f"{step.place}: a dtype", arg.name, list(SIZES))
        elif isinstance(arg, tuple):
            if depth == _MAX_DEPTH or count[0] + len(arg) > MAX_ARGUMENTS:
                problem = "lists that are too deep or too long"
            else:
                for each in arg:
                    self._check_argument(step, number, each, count, depth + 1)
        elif type(arg) is float and math.isnan(arg):
            problem = "NaN"
        elif type(arg) is int and not -(1 << 63) <= arg < 1 << 63:
            problem = "a number that is too large"
        elif not (arg is None or type(arg) in (bool, int, float, str) or isinstance(arg, (Ref, Const))):
            problem = fields.shown(arg)
        if problem:
            raise PlanError(
                f"{step.place} has {problem} as an argument; allowed: numbers, inputs, earlier results and constants."
            )

    @cached_property
    def digest(self) -> str:
        known = [[self.width, *self.inputs], self.dtype, written(self.result), [each.digest for each in self.constants]]
        return digest(json.dumps([known, [written_step(step)[:3] for step in self.steps]], sort_keys=True).encode())

    @property
    def changes_nothing(self) -> bool:
        return self.result == INPUT

    @property
    def nbytes(self) -> int:
        """The size of the constants that it contains."""
        return sum(constant.nbytes for constant in self.constants if constant.data is not None)

    @cached_property
    def held(self) -> tuple[Program, dict[str, bytes]]:
        """The program without the data of its floating constants of at least `HELD_BYTES`, for an engine that holds it; and that data,
        by `Constant.held`.
        """
        constants, data = list[Constant](), dict[str, bytes]()
        for constant in self.constants:
            if constant.data and constant.nbytes >= HELD_BYTES and constant.dtype in FLOATS:
                constants.append(constant.without_data)
                data[constants[-1].held] = constant.data
            else:
                constants.append(constant)
        return (dataclasses.replace(self, constants=tuple(constants)), data) if data else (self, {})

    def __repr__(self) -> str:
        return f"Program([{self.width}], {', '.join(step.op for step in self.steps[:8])}, {self.digest[:8]})"

    def __reduce__(self) -> Any:
        return Program, (self.width, self.dtype, self.steps, self.result, self.constants, self.inputs)


# ------------------------------------------------------------------------------------------------------------ on the wire


def written_step(step: Step) -> list[Any]:
    """Operation, arguments, named arguments, line."""
    return [step.op, [written(arg) for arg in step.args], {name: written(arg) for name, arg in step.kwargs}, step.line]


def written_program(program: Program) -> dict[str, Any]:
    """A program as plain data, without its constants' data (see the module's docstring)."""
    return {
        "width": program.width,
        "dtype": program.dtype,
        "steps": [written_step(step) for step in program.steps],
        "result": written(program.result),
        "constants": [constant.digest for constant in program.constants],
        **({"inputs": list(program.inputs)} if program.inputs else {}),
    }


def written_constant(constant: Constant) -> dict[str, Any]:
    known = {"dtype": constant.dtype, "shape": list(constant.shape)}
    return {**known, "held": constant.held} if constant.data is None else {**known, "data": constant.data}


def read_constants(
    place: str, table: Any, trusted: bool, most: int, known: Mapping[str, Constant]
) -> dict[str, Constant]:
    """The table of constants. Raises PlanError.

    Args:
        most: the limit in bytes for all of them.
        known: constants that an untrusted plan may have without data, by `Constant.held`.
    """
    read: dict[str, Constant] = {}
    size = 0
    for key, given in fields.mapping(place, table).items():
        at = f"{place}[{fields.shown(key)}]"
        with fields.errors_at(at):
            read[key] = _read_constant(key, given, trusted, known)
        size += len(given.get("data") or b"")
        if size > most:
            raise fields.refuse(place, f"over {most} bytes", f"up to {most}")
        if read[key].digest != key:  # the digest keys the prefix cache: a wrong one would share KV that differs
            raise fields.refuse(at, "not the digest of its content", f"{read[key].digest!r}")
    return read


def _read_constant(key: str, given: Any, trusted: bool, known: Mapping[str, Constant]) -> Constant:
    fields.mapping("it", given, ("dtype", "shape"), ("data", "held"))
    data, held = given.get("data"), given.get("held", "")
    if not trusted and data is None and isinstance(held, str) and held in known:
        return known[held]
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise fields.refuse("data", fields.shown(data), "bytes in base64") from error
    if not isinstance(data, bytes) and (data is not None or not trusted):
        raise fields.refuse(
            "data", fields.shown(data), "bytes, or base64; without it, a matrix of an SAE that the server has"
        )
    if not isinstance(held, str) or (held and data is not None):
        raise fields.refuse("held", fields.shown(held), "of a constant without data, the digest of its data")
    return Constant(given["dtype"], tuple(_sequence("shape", given["shape"])), data, key, held)


def read_programs(place: str, table: Mapping[str, Any], constants: Mapping[str, Constant]) -> dict[str, Program]:
    """The table of programs. Raises PlanError."""
    read: dict[str, Program] = {}
    for key, given in table.items():
        at = f"{place}[{fields.shown(key)}]"
        with fields.errors_at(at):
            read[key] = _read_program(given, constants)
        if read[key].digest != key:
            raise fields.refuse(at, "not the digest of its content", f"{read[key].digest!r}")
    return read


def _read_program(given: Any, constants: Mapping[str, Constant]) -> Program:
    fields.mapping("it", given, ("width", "dtype", "steps", "result", "constants"), ("inputs",))
    steps = tuple(_read_step(f"steps[{i}]", step) for i, step in enumerate(_sequence("steps", given["steps"])))
    named = _sequence("constants", given["constants"])
    for name in named:
        if not isinstance(name, str) or name not in constants:
            raise fields.refuse("constants", fields.shown(name), "keys of the plan's 'constants'")
    return Program(
        given["width"],
        given["dtype"],
        steps,
        _read("result", given["result"]),
        tuple(map(constants.__getitem__, named)),
        tuple(_sequence("inputs", given.get("inputs", ()))),
    )


def _read_step(place: str, given: Any) -> Step:
    parts = _sequence(place, given)
    if not 2 <= len(parts) <= 4 or not isinstance(parts[0], str):
        raise fields.refuse(place, fields.shown(given), "[operation, arguments, named arguments, line]")
    kwargs = fields.mapping(f"{place}[2]", parts[2]) if len(parts) > 2 else {}
    line = fields.integer(f"{place}[3]", parts[3], 0) if len(parts) > 3 else 0
    args = tuple(_read(f"{place}[1][{i}]", arg) for i, arg in enumerate(_sequence(f"{place}[1]", parts[1])))
    named = tuple(sorted((name, _read(f"{place}.{fields.shown(name)}", arg)) for name, arg in kwargs.items()))
    return Step(parts[0], args, named, line)


def _read(place: str, given: Any, depth: int = 0) -> Any:
    match given:
        case list() if depth <= _MAX_DEPTH:
            return tuple(_read(place, each, depth + 1) for each in _sequence(place, given))
        case {"input": True, **rest} if not rest:
            return INPUT
        case {"input": int(number), **rest} if not rest:
            return Ref(-1 - fields.integer(place, number, 1, MAX_INPUTS))
        case {"step": int(step), **rest} if rest.keys() <= {"out"}:
            out = rest.get("out")
            return Ref(fields.integer(place, step, 0), None if out is None else fields.integer(place, out, 0))
        case {"constant": int(number), **rest} if not rest:
            return Const(fields.integer(place, number, 0))
        case {"rows": int(times), **rest} if not rest:
            return RowCount(fields.integer(place, times, 1))
        case {"dtype": str(name), **rest} if not rest:
            return DType(name)
        case {"inf": 1 | -1 as sign, **rest} if not rest:
            return sign * math.inf
    if given is None or type(given) in (bool, int, float, str):
        return given
    raise fields.refuse(
        place,
        fields.shown(given),
        "a number, {'input': True}, {'input': n}, {'step': n}, {'constant': n}, {'rows': n} or a list",
    )


def _sequence(place: str, given: Any) -> list[Any]:
    if not isinstance(given, (list, tuple)) or len(given) > MAX_ARGUMENTS:
        raise fields.refuse(place, fields.shown(given), f"a list of up to {MAX_ARGUMENTS} items")
    return list(given)
