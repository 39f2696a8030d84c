"""Builds programs step by step, and infers the shape of each result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.plan.checking import Checker
from midstream.plan.program import Program, written_step
from midstream.plan.rowwise import Shaped
from midstream.plan.steps import INPUT, Const, Constant, Ref, Step
from midstream.tree import objects_in

_ROWS = 1009  # any number


@dataclass(frozen=True, eq=False)
class StepResult:
    """A step's result and its reference."""

    ref: Ref
    shaped: Shaped

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes without the first axis, which is that of the rows."""
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
        """The value that the program is about."""
        return self._inputs[0]

    def further(self, width: int) -> StepResult:
        """One more input, another site's value."""
        ref = Ref(-1 - len(self._inputs))
        self._inputs.append(StepResult(ref, self._checker.add_input(width, self.dtype)))
        return self._inputs[-1]

    def add(
        self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], line: int, out: int | None = None
    ) -> StepResult:
        """The result of an operation; result number `out` if it has several.

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
            keeps: whether it is for a capture, and may have several results.

        Raises:
            PlanError: it is too large, or has another shape.
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
        """The further inputs of `program(result)`, numbered in the order in which they were made."""
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
