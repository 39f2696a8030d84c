"""Looks for the program that takes most time for the work that it is charged (row F6): random ones, and then changes of the best.

A candidate is one operation of the table on a tensor that is made from the input, several times. Its time is that of the thread, on one
thread, or on a GPU the time until it has ended.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import PlanError
from midstream.plan.program import Program
from midstream.plan.rowwise import RULES, overload
from midstream.plan.running import ProgramBank
from midstream.plan.steps import FLOATS, INPUT, Const, Constant, DType, Ref, RowCount, Step
from midstream.plan.work import STEP_SECONDS

WIDTH = 64
DTYPES = [*FLOATS, "int64", "int32", "int8", "bool"]
NUMBERS = [0.5, -1.5, 0.0, 2, 1e-38, 1e30, float("inf")]
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda u: 4 * u - 2,
    "denormal": lambda u: 1e-40 * u,
    "huge": lambda u: (u - 0.5) * 6e38,
    "mixed": lambda u: torch.where(u > 0.5, u * 3e38, u * 1e-38),
    "large": lambda u: u * 1e5,
    "equal": torch.ones_like,
    "nan": lambda u: torch.full_like(u, float("nan")),
}


@dataclass(frozen=True)
class Candidate:
    """One operation, `times` times, on `[R, *shape]` of a dtype, for `rows` rows with numbers of a kind.

    Attributes:
        is_turned: whether the tensor's last two axes are swapped in memory.
        seed: of the arguments.
        width: of the site.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    times: int = 8
    rows: int = 4
    numbers: str = "plain"
    is_turned: bool = False
    seed: int = 0
    width: int = WIDTH

    def program(self) -> Program:
        """Raises PlanError for arguments that the table refuses."""
        rng, shape = random.Random(self.seed), list(self.shape)
        count = 1
        for size in shape:
            count *= size
        steps: list[Step] = []

        def step(op: str, *args: Any, **kwargs: Any) -> Ref:
            steps.append(Step(op, args, tuple(sorted(kwargs.items()))))
            return Ref(len(steps) - 1)

        row = step("slice.Tensor", INPUT, 1, 0, 1)
        whole = step("expand.default", row, (RowCount(1), count))
        if rng.random() < 0.8:  # numbers of its own, and not one that is read again and again
            pieces = step("cat.default", (INPUT,) * -(-count // self.width), 1) if count <= 4096 * self.width else whole
            whole = step("slice.Tensor", pieces, 1, 0, count)
        x = step("reshape.default", whole, (RowCount(1), *shape))
        if self.is_turned and len(shape) > 1:
            x = step("transpose.int", step("clone.default", step("transpose.int", x, -1, -2)), -1, -2)
        if self.dtype != "float32":
            x = step("_to_copy.default", x, dtype=DType(self.dtype))
        given = list(_arguments(self, rng, x, step))
        for _ in range(self.times):
            step(self.op, *given)
        constants = (Constant.of(torch.rand(shape[-1], shape[-1]).to(getattr(torch, self.dtype))),)
        uses = any(isinstance(arg, Const) for arg in given)
        return Program(self.width, "float32", tuple(steps), INPUT, constants if uses else ())

    def input(self, device: torch.device) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.seed)
        return INPUTS[self.numbers](torch.rand(self.rows, self.width, generator=made)).to(device)


def _arguments(self: Candidate, rng: random.Random, x: Ref, step: Callable[..., Ref]) -> Iterator[Any]:
    sizes = self.shape
    for place, argument in enumerate(overload(self.op)._schema.arguments):
        kind, name = str(argument.real_type), argument.name
        if argument.kwarg_only or (argument.has_default_value() and name != "dim" and rng.random() < 0.8):
            return
        if kind == "Tensor":
            if name in ("mat2", "vec") or (name == "weight" and place):
                yield x if self.op == "bmm.default" else Const(0)
            elif name in ("index", "indices"):
                yield step("argsort.default", x, -1)
            elif name in ("condition", "mask"):
                yield step("gt.Scalar", x, 0.5)
            else:
                yield x
        elif kind == "List[Tensor]":
            yield (x, x)
        elif kind.startswith("List") or (kind.startswith("Optional[List") and name == "dim"):
            of_axes = {"dims": tuple(range(len(sizes) + 1)) if self.op == "permute.default" else (len(sizes),)}
            of_axes |= {"dim": (len(sizes),), "normalized_shape": sizes[-1:], "shifts": (1,)}
            of_axes |= {"split_sizes": (1,) * sizes[-1], "size": (RowCount(1), *sizes), "shape": (RowCount(1), *sizes)}
            yield of_axes.get(name, (1,))
        elif name in ("dim", "dim0", "dim1"):
            yield len(sizes)
        elif name == "k":
            yield rng.choice([1, max(sizes[-1] // 2, 1)])
        elif kind in ("number", "float", "Optional[number]"):
            yield rng.choice(NUMBERS)
        elif kind == "int":
            yield 1
        elif kind == "bool":
            yield rng.random() < 0.5
        elif kind == "str":
            yield rng.choice(["trunc", "floor", "none", "tanh"])
        else:
            yield None


def drawn(rng: random.Random, width: int = WIDTH) -> Candidate:
    shape = tuple(rng.choice([0, 1, 3, 64, 512, 1024, 4096]) for _ in range(rng.choice([1, 1, 2, 3])))
    kinds = rng.choice(list(INPUTS)), rng.random() < 0.3, rng.randrange(1000)
    op, dtype = rng.choice(sorted(RULES)), rng.choice(DTYPES)
    return Candidate(op, shape, dtype, rng.choice([16, 64, 200]), rng.choice([1, 2, 16, 128]), *kinds, width)


def changed(given: Candidate, rng: random.Random) -> Candidate:
    other, name = drawn(rng, given.width), rng.choice([field.name for field in dataclasses.fields(Candidate)[:-1]])
    if name == "op" and rng.random() < 0.7:
        name = "shape"
    return dataclasses.replace(given, **{name: getattr(other, name)})


def seconds(program: Program, x: torch.Tensor, repeats: int = 3) -> float:
    """The least time of some runs. On a CPU, numbers too small to be normal are zero, as in an engine there."""
    torch.set_flush_denormal(x.device.type == "cpu")
    try:
        return _seconds(program, x, repeats)
    finally:
        torch.set_flush_denormal(False)


def _seconds(program: Program, x: torch.Tensor, repeats: int) -> float:
    bank, found = ProgramBank(program, 1, x.device), float("inf")
    clock = time.thread_time if x.device.type == "cpu" else time.perf_counter
    for _ in range(1 + repeats):
        began = clock()
        bank.run(x, None)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        found = min(found, clock() - began)
    return found


def charged(program: Program, rows: int, device: str) -> float:
    return program.work.fixed_seconds(device) + rows * program.work.row_seconds(device)


@dataclass(frozen=True)
class Found:
    """A candidate's time, and what it is charged, in seconds."""

    candidate: Candidate
    seconds: float
    charged: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.charged


def measured(candidate: Candidate, device: torch.device, most: float) -> Found | None:
    """None for one that is refused, whose run fails, or whose charge is over `most`: the scheduler would not run it with as many rows."""
    try:
        program = candidate.program()
        price = charged(program, candidate.rows, device.type)
        if price > most:
            return None
        return Found(candidate, seconds(program, candidate.input(device)), price)
    except PlanError:
        return None
    except Exception:  # a dtype without a kernel: engines try programs before they run them
        return None


def search(seed: int, allowed: float, device: torch.device, most: float = 0.02, width: int = WIDTH) -> dict[str, Found]:
    """The worst candidate of each operation at a site of this width, within `allowed` seconds."""
    rng, found, deadline = random.Random(seed), dict[str, Found](), time.monotonic() + allowed
    while time.monotonic() < deadline:
        best = [each.candidate for each in sorted(found.values(), key=lambda each: -each.ratio)[:8]]
        candidate = changed(rng.choice(best), rng) if best and rng.random() < 0.5 else drawn(rng, width)
        result = measured(candidate, device, most)
        if result is None or (candidate.op in found and found[candidate.op].ratio >= result.ratio):
            continue
        again = measured(candidate, device, most)  # other work on the machine may have slowed the first one
        if again is not None:
            result = min(result, again, key=lambda each: each.ratio)
            if candidate.op not in found or found[candidate.op].ratio < result.ratio:
                found[candidate.op] = result
    return found


def at_the_bound(found: Found, device: torch.device) -> Found:
    """The candidate's program as often as a step of a server takes it, for no more rows than fit into one."""
    candidate, program = found.candidate, found.candidate.program()
    fixed, row = program.work.fixed_seconds(device.type), program.work.row_seconds(device.type)
    rows = max(1, min(candidate.rows, int((STEP_SECONDS - fixed) / row) if row else candidate.rows))
    price = fixed + rows * row
    runs = max(1, int(STEP_SECONDS / price))
    candidate = dataclasses.replace(candidate, rows=rows)
    return Found(candidate, runs * seconds(program, candidate.input(device)), runs * price)
