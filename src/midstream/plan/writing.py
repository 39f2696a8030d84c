"""Writes programs step by step: those of probes and gated edits, and the arithmetic of edits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.errors import PlanError
from midstream.plan.ops.edit import kind_of
from midstream.plan.program import Program
from midstream.plan.rowwise import RULES
from midstream.plan.steps import INPUT, Const, Constant, DType, Ref, Step

_IGNORED = frozenset("memory_format layout device pin_memory non_blocking".split())
_SAME = frozenset("detach.default alias.default lift_fresh.default".split())
_ROWS = 1009  # any number


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
        """The result of an operation."""
        self._steps.append(Step(op, args, tuple(sorted(kwargs.items()))))
        return Ref(len(self._steps) - 1)

    def constant(self, given: torch.Tensor | Constant) -> Const:
        self._constants.append(given if isinstance(given, Constant) else Constant.of(given))
        return Const(len(self._constants) - 1)

    def product(self, h: Ref, columns: torch.Tensor) -> Ref:
        """The product `[rows, C]` of rows and constant columns `[width, C]`."""
        if columns.shape[1] > 1:
            return self.step("mm.default", h, self.constant(columns.contiguous()))
        # Not a product of matrices, whose rounding may depend on the number of rows.
        each = self.step("mul.Tensor", h, self.constant(columns[:, 0]))
        return self.step("sum.dim_IntList", each, (1,), True)

    def cast(self, value: Ref, dtype: str) -> Ref:
        """An input in another dtype."""
        return value if self.dtype == dtype else self.step("_to_copy.default", value, dtype=DType(dtype))

    def inlined(self, program: Program, *inputs: Any) -> tuple[Ref, ...]:
        """The results of a program of these inputs, which have its dtype."""
        given = [self.constant(constant) for constant in program.constants]
        return self._moved(program.steps, program.results, inputs, given)

    def arithmetic(
        self, kind: str, numbers: tuple[float, float, float], h: Ref, operands: Sequence[torch.Tensor | None]
    ) -> Ref:
        """The value that an edit of this kind makes of h, which is float32.

        Args:
            numbers: `Edit.numbers`.
            operands: v and w, float32 `[width]`.

        Raises:
            PlanError: the edit's `reference` uses an operation that programs do not have.
        """
        steps, result = _recorded(kind, numbers, self._width, operands[1] is not None)
        given = [None if operand is None else self.constant(operand) for operand in operands]
        (new,) = self._moved(steps, [result], [h], given)
        return self.step("add.Tensor", h, new) if kind_of(kind).adds else new

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
            keeps: whether it is for a capture, and may have several results.
        """
        result = results if keeps else results[0]
        return Program(self._width, self.dtype, tuple(self._steps), result, tuple(self._constants), self._inputs)


@functools.lru_cache(1024)
def _recorded(kind: str, numbers: tuple[float, float, float], width: int, has_w: bool) -> tuple[tuple[Step, ...], Any]:
    """The steps of an edit's `reference`, and its result. Its operands are constants 0 and 1."""
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
        self._kind, self._alive = kind, [tensor for tensor, _ in known]  # their ids stay theirs
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
                f"An edit of the kind {self._kind!r} cannot be gated: its reference uses {name}, which programs do not have."
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
