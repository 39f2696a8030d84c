"""Builds programs step by step.

`Builder` infers the shape of each result, for code that is read from a recording. `StepWriter` writes the programs of probes and gated
edits, and the arithmetic of edits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.errors import PlanError
from midstream.plan.checking import Checker
from midstream.plan.ops.edit import Op, kind_of
from midstream.plan.program import Program, written_step
from midstream.plan.rowwise import RULES, Shaped
from midstream.plan.steps import INPUT, Const, Constant, DType, Ref, Step
from midstream.tree import objects_in

_IGNORED = frozenset("memory_format layout device pin_memory non_blocking".split())
_SAME = frozenset("detach.default alias.default lift_fresh.default".split())
_ROWS = 1009  # any number


@dataclass(frozen=True, eq=False)
class StepResult:
    """A step's result and its reference."""

    ref: Ref
    shaped: Shaped

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all axes but the first, the axis of the rows."""
        return tuple(self.shaped.meta.shape[1:])

    @property
    def rank(self) -> int:
        return self.shaped.meta.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.shaped.meta.dtype


class Builder:
    """The steps so far. Equal steps are added once.

    Args:
        width, dtype: as in `Program`.
    """

    def __init__(self, width: int, dtype: str) -> None:
        self.width, self.dtype = width, dtype
        self._checker = Checker(_ROWS)
        self._steps: list[Step] = []
        self._known: dict[str, int] = {}
        self._constants: dict[Constant, int] = {}
        self._inputs = [StepResult(INPUT, self._checker.add_input(width, dtype))]

    @property
    def input(self) -> StepResult:
        """The program's own input: the value of its site."""
        return self._inputs[0]

    def further(self, width: int) -> StepResult:
        """Add a further input, the value of another site, and return it."""
        ref = Ref(-1 - len(self._inputs))
        self._inputs.append(StepResult(ref, self._checker.add_input(width, self.dtype)))
        return self._inputs[-1]

    def add(
        self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], line: int, out: int | None = None
    ) -> StepResult:
        """Add an operation and return its result, or result number `out` if it has several.

        Args:
            args, kwargs: as in a step, with results in place of references, and tensors in place of constants.

        Raises:
            PlanError: the operation is not in the table, mixes rows, or does not take these arguments.
        """
        named = {name: kwargs[name] for name in sorted(kwargs)}
        step = Step(
            op, self._argument(tuple(args)), tuple((name, self._argument(each)) for name, each in named.items()), line
        )
        key = json.dumps(written_step(step)[:3])
        if key not in self._known:
            self._checker.run(step)
            self._known[key] = len(self._steps)
            self._steps.append(step)
        number = self._known[key]
        found = self._checker.results[number]
        if isinstance(found, tuple):
            return StepResult(Ref(number, out or 0), found[out or 0])
        return StepResult(Ref(number), found)

    def _argument(self, given: Any) -> Any:
        if isinstance(given, StepResult):
            return given.ref
        if isinstance(given, torch.Tensor):
            constant = Constant.of(given)
            if constant not in self._constants:
                self._constants[constant] = len(self._constants)
                self._checker.add_constant(constant)
            return Const(self._constants[constant])
        return tuple(map(self._argument, given)) if isinstance(given, (tuple, list)) else given

    def program(self, *results: StepResult, keeps: bool = False) -> Program:
        """The program with this result, and the steps and further inputs that it needs.

        Args:
            keeps: whether the program's result is a tuple, as captures and probes need it.

        Raises:
            PlanError: the program is too large, or its result has a wrong shape.
        """
        needed, inputs = self._needed(results)
        numbers = {old: new for new, old in enumerate(sorted(needed))}
        numbers |= {old: -2 - new for new, old in enumerate(inputs)} | {-1: -1}
        constants: dict[int, int] = {}

        def moved(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return Ref(numbers[arg.step], arg.out)
            return Const(constants.setdefault(arg.place, len(constants)))

        steps = tuple(self._steps[number].mapped(moved) for number in sorted(needed))
        own = list(self._constants)
        moved_results = tuple(moved(result.ref) for result in results)
        result = moved_results if keeps else moved_results[0]
        held, widths = tuple(own[place] for place in constants), tuple(self._inputs[-1 - at].shape[0] for at in inputs)
        return Program(self.width, self.dtype, steps, result, held, widths)

    def inputs_of(self, result: StepResult) -> list[int]:
        """The numbers of the further inputs that `program(result)` needs; 0 is the first that `further` made."""
        return [-2 - at for at in self._needed([result])[1]]

    def _needed(self, results: Sequence[StepResult]) -> tuple[set[int], list[int]]:
        """The steps that the results depend on, and the further inputs, numbered as in `Ref.step`."""
        needed: set[int] = set()
        rest = [result.ref for result in results]
        while rest:
            ref = rest.pop()
            if ref.step not in needed:
                needed.add(ref.step)
                if ref.step >= 0:
                    rest += objects_in((self._steps[ref.step].args, self._steps[ref.step].kwargs), Ref)
        return {at for at in needed if at >= 0}, sorted((at for at in needed if at < -1), reverse=True)


class StepWriter:
    """The steps of a program so far.

    Args:
        width, dtype: as in `Program`.
        inputs: the widths of further inputs.
    """

    def __init__(self, width: int, dtype: str, inputs: Sequence[int] = ()) -> None:
        self.dtype = dtype
        self._width, self._inputs = width, tuple(inputs)
        self._steps: list[Step] = []
        self._constants: list[Constant] = []

    def step(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Add an operation and return its result."""
        self._steps.append(Step(op, args, tuple(sorted(kwargs.items()))))
        return Ref(len(self._steps) - 1)

    def constant(self, given: torch.Tensor | Constant) -> Const:
        self._constants.append(given if isinstance(given, Constant) else Constant.of(given))
        return Const(len(self._constants) - 1)

    def product(self, h: Ref, columns: torch.Tensor) -> Ref:
        """The product `[rows, C]` of rows and constant columns `[width, C]`."""
        if columns.shape[1] > 1:
            return self.step("mm.default", h, self.constant(columns.contiguous()))
        # A matrix product may round differently for different numbers of rows.
        each = self.step("mul.Tensor", h, self.constant(columns[:, 0]))
        return self.step("sum.dim_IntList", each, (1,), True)

    def cast(self, value: Ref, dtype: str) -> Ref:
        """`value`, which has the program's dtype, in another dtype."""
        return value if self.dtype == dtype else self.step("_to_copy.default", value, dtype=DType(dtype))

    def inlined(self, program: Program, *inputs: Any) -> tuple[Ref, ...]:
        """Add the steps of `program`, applied to these inputs, and return its results. The inputs need its dtype."""
        given = [self.constant(constant) for constant in program.constants]
        return self._moved(program.steps, program.results, inputs, given)

    def arithmetic(
        self, kind: str, numbers: tuple[float, float, float], h: Ref, operands: Sequence[torch.Tensor | None]
    ) -> Ref:
        """The value of h, float32, after the arithmetic of an edit of this kind. Arguments and errors as for `_referred`."""
        new = self._referred(kind, numbers, h, operands)
        return self.step("add.Tensor", h, new) if kind_of(kind).adds else new

    def _referred(
        self, kind: str, numbers: tuple[float, float, float], h: Ref, operands: Sequence[torch.Tensor | None]
    ) -> Ref:
        """Add the steps of the kind's `Edit.reference` and return its result. `h` is float32.

        Args:
            numbers: `Edit.numbers`.
            operands: v and w, float32 `[width]`.

        Raises:
            PlanError: the reference uses an operation that programs do not have.
        """
        steps, result = _recorded(kind, numbers, self._width, operands[1] is not None)
        given = [None if operand is None else self.constant(operand) for operand in operands]
        (new,) = self._moved(steps, [result], [h], given)
        return new  # type: ignore[no-any-return]

    def edited(self, ops: Sequence[Op], operands: Sequence[Sequence[torch.Tensor | None]]) -> Program:
        """The program that does the arithmetic of `edit.edited`. `ops`: edits without programs; `operands`: each one's v and w."""
        h, added = self.cast(INPUT, "float32"), None
        for op, given in zip(ops, operands, strict=True):
            adds = kind_of(op.kind).adds
            if added is not None and not adds:
                h, added = self.step("add.Tensor", h, added), None
            new = self._referred(op.kind, (op.a, op.b, op.c), h, given)
            if not adds:
                h = new
            else:
                added = new if added is None else self.step("add.Tensor", added, new)
        return self.program(h if added is None else self.step("add.Tensor", h, added))

    def _moved(self, steps: Sequence[Step], results: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any]) -> Any:
        """Add steps with these inputs and constants. Returns their results."""
        first = len(self._steps)

        def moved(arg: Any) -> Any:
            if isinstance(arg, Const):
                return given[arg.place]
            return inputs[-1 - arg.step] if arg.step < 0 else Ref(arg.step + first, arg.out)

        self._steps += [step.mapped(moved) for step in steps]
        return tuple(map(moved, results))

    def program(self, *results: Ref, keeps: bool = False) -> Program:
        """The program with this result. Raises PlanError if it is too large.

        Args:
            keeps: whether the program's result is a tuple, as captures and probes need it.
        """
        result = results if keeps else results[0]
        return Program(self._width, self.dtype, tuple(self._steps), result, tuple(self._constants), self._inputs)


@functools.lru_cache(1024)
def _recorded(kind: str, numbers: tuple[float, float, float], width: int, has_w: bool) -> tuple[tuple[Step, ...], Any]:
    """The steps of an edit's `reference`, and its result. They refer to v and w as constants 0 and 1."""
    h_TH = torch.empty(_ROWS, width, device="meta")
    v_H, w_H = (torch.empty(width, device="meta") for _ in range(2))
    recorder = _Recorder(kind, [(h_TH, INPUT), (v_H, Const(0)), (w_H, Const(1))])
    with torch.no_grad(), recorder:
        found = kind_of(kind).reference(h_TH, v_H, w_H if has_w else None, *numbers)
    return tuple(recorder.steps), recorder.of(found)


class _Recorder(TorchDispatchMode):
    """Notes the operations on meta tensors.

    Args:
        known: tensors, and how steps refer to them.
    """

    def __init__(self, kind: str, known: Sequence[tuple[torch.Tensor, Any]]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        # The tensors are kept alive, so that no others get their ids.
        self._kind, self._alive = kind, [tensor for tensor, _ in known]
        self._known = {id(tensor): ref for tensor, ref in known}

    def of(self, arg: Any) -> Any:
        """A step's argument."""
        if isinstance(arg, torch.Tensor):
            return self._known[id(arg)]
        if isinstance(arg, torch.dtype):
            return DType(str(arg).removeprefix("torch."))
        return tuple(map(self.of, arg)) if isinstance(arg, (tuple, list)) else arg

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func.overloadpacket.__name__}.{func._overloadname}"
        if name in _SAME:
            found = func(*args, **(kwargs or {}))
            self._note(found, self.of(args[0]))
            return found
        if name not in RULES:
            raise PlanError(
                f"An edit of the kind {self._kind!r} cannot be gated, nor be final beside other edits: its reference uses {name}, which "
                "programs do not have."
            )
        kwargs = kwargs or {}
        named = tuple(sorted((key, self.of(value)) for key, value in kwargs.items() if key not in _IGNORED))
        self.steps.append(Step(name, self.of(tuple(args)), named))
        found = func(*args, **kwargs)
        for out, tensor in enumerate(found) if isinstance(found, (tuple, list)) else ((None, found),):
            self._note(tensor, Ref(len(self.steps) - 1, out))
        return found

    def _note(self, tensor: torch.Tensor, ref: Any) -> None:
        self._alive.append(tensor)
        self._known[id(tensor)] = ref
