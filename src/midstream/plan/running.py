"""Runs programs in plain PyTorch, on any device, for rows of many requests at once.

Rows with programs of one form (`plan.checking`) run together: a bank has one entry for each program, with the numbers and vectors that
differ between programs, and each row gathers its own entry.

Legend: R rows, P programs.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from midstream.errors import PlanError
from midstream.plan.checking import PackedResult, plain
from midstream.plan.program import Program
from midstream.plan.rowwise import on_device, overload
from midstream.plan.steps import Const, Constant, Ref, Step

# Indexing operations -> the argument with the indices, and the argument that they index.
INDEXING = {
    **dict.fromkeys(("index.Tensor", "index_put.default"), ("indices", "self")),
    **dict.fromkeys(("gather.default", "index_select.default"), ("index", "self")),
    **dict.fromkeys(("scatter.src", "scatter.value", "scatter_add.default"), ("index", "self")),
    "embedding.default": ("indices", "weight"),
}
_MEMORY = 1 << 27  # the most numbers of all rows that are in memory at once
_MOST_TRIED = 1 << 14
_tried: set[tuple[str, torch.device]] = set()
_held: weakref.WeakValueDictionary[tuple[str, torch.device], torch.Tensor] = weakref.WeakValueDictionary()
_data: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()


def hold(digest: str, data: torch.Tensor) -> None:
    """Register the data, flat uint8, of constants that come without it. The caller keeps the tensor alive."""
    _data[digest] = data


def tensor_of(constant: Constant, device: torch.device) -> torch.Tensor:
    """A constant on a device; all users share one tensor. Raises PlanError if the engine should hold its data and does not."""
    key = constant.digest, device
    known = _held.get(key)
    if known is None:
        raw = _data.get(constant.held)
        if constant.data is None and (raw is None or raw.numel() != constant.nbytes):
            raise PlanError(f"The engine does not hold the program's constant {constant.digest}. Send the plan again.")
        with torch.inference_mode(False):
            if raw is None or constant.data is not None:
                data = bytearray(constant.data or b"")
                raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            known = raw.view(getattr(torch, constant.dtype)).view(constant.shape).to(device)
        _held[key] = known
    return known


def try_out(program: Program, device: torch.device) -> None:
    """Run a program once on zeros, since an operation may lack a kernel for a dtype. Raises PlanError."""
    key = program.form.key, device
    if key in _tried:
        return
    if len(_tried) > _MOST_TRIED:
        _tried.clear()
    try:
        zeros = partial(torch.zeros, dtype=getattr(torch, program.dtype), device=device)
        run(program, *(zeros(2, width) for width in (program.width, *program.inputs)))
    except PlanError:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")[:200]
        raise PlanError(f"The program {program!r} does not run on this engine: {said}") from error
    _tried.add(key)


def run(program: Program, x_RH: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
    """The program's result for rows, in their dtype; the rows are unchanged. `further`: as in `ProgramBank.run`."""
    return ProgramBank(program, 1, x_RH.device).run(x_RH, None, *further)


def _packed(results: Sequence[torch.Tensor], parts: Sequence[PackedResult], dtype: torch.dtype) -> torch.Tensor:
    """The bits of results `[R, ...]` as rows of a dtype, one result after the other.

    Args:
        parts: the shapes and dtypes to pack. A device may compute another dtype: on a CPU, the statistics of layer norms have the input's.
    """
    rows = len(results[0])
    flat = [
        _copied(result.reshape(rows, math.prod(part.shape)).to(part.dtype)).view(torch.int16)
        for result, part in zip(results, parts, strict=True)
    ]
    words = torch.cat(flat, 1) if len(flat) > 1 else flat[0]
    missing = -words.shape[1] % 8  # up to 16 bytes
    return (torch.nn.functional.pad(words, (0, missing)) if missing else words).view(dtype)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    """A copy whose bits can be viewed in another dtype. `contiguous` would keep the strides of a single row or column."""
    return rows.clone(memory_format=torch.contiguous_format)


def unpacked(program: Program, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of captured rows `[R, packed_width]`: each `[R, *shape]` in its dtype, contiguous."""
    words = rows.contiguous().view(torch.int16)
    found, at = [], 0
    for part in program.checked.parts:
        here = _copied(words[:, at : at + part.nbytes // 2])
        found.append(here.view(-1).view(part.dtype).view(len(rows), *part.shape))
        at += part.nbytes // 2
    return tuple(found)


@functools.cache
def _places(name: str) -> dict[str, int]:
    """The arguments of an operation, in their order."""
    return {argument.name: place for place, argument in enumerate(overload(name)._schema.arguments)}


def _clamp_indices(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Clamp the indices among an operation's arguments to the valid ones, in place.

    The rules have proved that all indices lie inside. If a rule is wrong, clamping keeps its mistake from ending the engine.
    """
    which, of = INDEXING[name]
    places = _places(name)

    def given(argument: str) -> Any:
        return args[places[argument]] if places[argument] < len(args) else kwargs[argument]

    x, indices = given(of), given(which)
    if isinstance(indices, list):
        inside: Any = [each if each is None else each.clamp(0, x.shape[i] - 1) for i, each in enumerate(indices)]
    else:
        inside = indices.clamp(0, x.shape[given("dim") if of == "self" else 0] - 1)
    if places[which] < len(args):
        args[places[which]] = inside
    else:
        kwargs[which] = inside


class ProgramBank:
    """Programs of one form, ready to run on rows: their common part, and tensors `[P, ...]` of the parts that differ.

    The tensors keep their addresses, so a CUDA graph may read them.

    Args:
        program: one of the form.
        capacity: the number of places, P. With one place there are no tensors: all rows run `program`.
        device: of the rows.
    """

    def __init__(self, program: Program, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._program, self._device = program, device
        self._checked = program.checked
        self._constants = [tensor_of(constant, device) for constant in program.constants]
        self._banks: dict[tuple[int, int], torch.Tensor] = {}  # [P] numbers, or [P, ...] of constants
        for slot, value in program.form.slots.items() if capacity > 1 else ():
            if isinstance(value, Const):
                like = self._constants[value.place]
                self._banks[slot] = like.new_zeros(capacity, *like.shape)
            else:
                self._banks[slot] = torch.zeros(capacity, dtype=value.dtype, device=device)

    @property
    def launches(self) -> float:
        """The launches of one run: see `plan.work.Work`."""
        return self._program.work.launches

    def put(self, place: int, program: Program) -> None:
        """Make the rows with this place use `program`."""
        for slot, value in program.form.slots.items() if self.capacity > 1 else ():
            one = (
                tensor_of(program.constants[value.place], self._device)
                if isinstance(value, Const)
                else value.tensor(self._device)
            )
            self._banks[slot][place].copy_(one)

    def alone(self, place: int, program: Program) -> ProgramBank:
        """A bank with the program of one place, for rows that all have that place. It uses the same tensors of numbers, so its results have
        the same bits, except that a matrix product of many rows rounds in another way than products of each row.
        """
        found = ProgramBank(program, 1, self._device)
        found._banks = {slot: bank[place : place + 1] for slot, bank in self._banks.items() if bank.ndim == 1}
        return found

    def run(self, x_RH: torch.Tensor, which_R: torch.Tensor | None, *further: torch.Tensor) -> torch.Tensor:
        """The rows' results in their dtype, `[R, width]`; the packed results of a capture's or a probe's
        program.

        Args:
            which_R: `[R]`, the place of each row's program; ignored if there is one place.
            further: `[R, width]`, the rows of each further input.
        """
        which_R = which_R if self.capacity > 1 else None
        most = max(_MEMORY // self._checked.peak, 1)
        if len(x_RH) <= most:
            return self._run(which_R, x_RH, *further)
        parts = (
            (which_R.split(most) if which_R is not None else repeat(None)),
            *(x.split(most) for x in (x_RH, *further)),
        )
        return torch.cat([self._run(*part) for part in zip(*parts, strict=False)])

    def width(self, itemsize: int) -> int:
        """The width of its results, in elements of `itemsize` bytes."""
        return self._program.packed_width(itemsize) if self._program.is_read else self._program.width

    def _run(self, which_R: torch.Tensor | None, x_RH: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        rows, last_use = len(x_RH), self._checked.last_use
        dtype = getattr(torch, self._program.dtype)
        results: dict[int, Any] = {-1 - i: x.to(dtype) for i, x in enumerate((x_RH, *further))}

        def tensor(arg: Any) -> Any:
            if isinstance(arg, Const):
                return self._constants[arg.place]
            if isinstance(arg, Ref):
                found = results[arg.step]
                return found if arg.out is None else found[arg.out]
            return arg

        for number, step in enumerate(self._program.steps):
            args = [plain(arg, tensor, rows) for arg in step.args]
            kwargs = {name: plain(arg, tensor, rows) for name, arg in step.kwargs}
            kwargs |= on_device(step.op, x_RH.device)
            if step.op in INDEXING:
                _clamp_indices(step.op, args, kwargs)
            own = {place: bank for (at, place), bank in self._banks.items() if at == number}
            results[number] = (
                self._with_own(step, args, kwargs, own, which_R, number) if own else overload(step.op)(*args, **kwargs)
            )
            for done in [at for at in results if last_use.get(at, -1) <= number]:
                del results[done]
        found = list(map(tensor, self._program.results))
        if self._program.is_read:
            return _packed(found, self._checked.parts, x_RH.dtype)
        return found[0].to(x_RH.dtype)  # type: ignore[no-any-return]

    def _with_own(
        self,
        step: Step,
        args: list[Any],
        kwargs: Any,
        own: dict[int, torch.Tensor],
        which_R: torch.Tensor | None,
        number: int,
    ) -> torch.Tensor:
        """The result of a step in which each row has its own numbers."""
        meta = self._checked.results[number].meta
        each = {place: bank if which_R is None else bank[which_R] for place, bank in own.items()}
        if step.op in ("mv.default", "mm.default"):
            right_RHK = each[1].reshape(len(args[0]), args[0].shape[1], -1)
            return torch.bmm(args[0][:, None, :], right_RHK).reshape(-1, *meta.shape[1:])
        if all(bank.ndim == 1 for bank in own.values()):
            # With as many axes as the other tensor, it takes part in no type promotion.
            number_R = each[1].reshape(-1, *[1] * (meta.ndim - 1))
            function = getattr(torch.ops.aten, step.op.partition(".")[0]).Tensor
            return function(args[0].to(number_R.dtype), number_R).to(meta.dtype)  # type: ignore[no-any-return]
        for place, each_R in each.items():
            # A first axis of 1 stands for the rows.
            axes = each_R.shape[1:] if each_R.ndim <= meta.ndim else each_R.shape[2:]
            args[place] = each_R.reshape(-1, *[1] * (meta.ndim - 1 - len(axes)), *axes)
        return overload(step.op)(*args, **kwargs)  # type: ignore[no-any-return]
