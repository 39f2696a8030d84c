"""Random programs from the whole table of operations, with hostile numbers, and a plain interpreter that gives their results.

    attack(random.Random(seed), torch.device("cpu"))  # one program and others of its form: alone, together, with other rows

A program is drawn operation by operation. Arguments come from earlier results, so that results of one operation are often the indices of
another. What the check refuses is drawn again.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from midstream.errors import PlanError
from midstream.plan.building import Builder, StepResult
from midstream.plan.checking import Checker
from midstream.plan.program import Program
from midstream.plan.rowwise import RULES, overload
from midstream.plan.running import INDEXING, ProgramBank, run, try_out, unpacked
from midstream.plan.steps import INPUT, Const, Constant, DType, Ref, RowCount, Step

W = 6
ROWS = 7
INTEGERS = [0, 1, -1, 2, 3, 5, -7, 127, 255, 1 << 15, (1 << 24) + 1, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63)]
FLOATS = [0.0, -0.0, 0.1, 0.5, -1.5, 3.7, 1e-45, 5e-324, 1e-8, 65504.0, 1e5, 1e38, -3e38, 1e300, math.inf, -math.inf]
FLOATING = ["float32", "bfloat16", "float16", "float64"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
# Products of matrices add up in another order when each row has its own matrix.
PRODUCTS = {"mm.default", "mv.default"}
# On a GPU the order of these is left to chance: of sums, of equal places, or among equal numbers.
UNORDERED = set("scatter_add.default scatter.src index_put.default kthvalue.default median.dim topk.default".split())
_INDEX_NAMES = ("index", "indices")
# Half of the operations in a chain are these, so that computed numbers become indices.
_OFTEN = [
    *INDEXING,
    "topk.default",
    "argsort.default",
    "max.dim",
    "cat.default",
    "stack.default",
    "where.self",
    "reshape.default",
]


def numbers(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of mild and of hostile finite numbers."""
    count, share = math.prod(shape), rng.choice([0.0, 0.2, 1.0])
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=dtype).view(shape)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        extreme = [info.min, info.max, *(n for n in INTEGERS if info.min <= n <= info.max)]
        each = [rng.choice(extreme) if rng.random() < share else rng.randint(0, 4) for _ in range(count)]
        return torch.tensor(each, dtype=dtype).view(shape)
    top = torch.finfo(dtype).max
    mild = [rng.gauss(0, 1) for _ in range(count)]
    each = [rng.choice([n for n in FLOATS if abs(n) <= top]) if rng.random() < share else n for n in mild]
    return torch.tensor(each, dtype=torch.float64).to(dtype).view(shape)


def rows_of(rng: random.Random, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, W]`, the values of a site, NaN and infinities among them."""
    found = numbers(rng, (rows, W), dtype)
    for _ in range(rng.choice([0, 0, 2, rows * W])):
        found[rng.randrange(rows) if rows else 0, rng.randrange(W)] = rng.choice([math.nan, math.inf, -math.inf, 1e4])
    return found


class Drawer:
    """Draws the steps of one program.

    Attributes:
        pool: the results that arguments may be.
    """

    def __init__(self, rng: random.Random, dtype: str) -> None:
        self.rng, self.hostile = rng, rng.choice([0.0, 0.3, 0.8])
        self.first: StepResult | None = None  # what operations are about, if it is fixed
        self.first_name = ""
        self.builder = Builder(W, dtype)
        self.pool = [self.builder.input]
        self.constants: list[torch.Tensor] = []
        self.op = ""  # of the step that is being drawn
        self.is_about_indices = False  # whether it makes indices of indices
        self._prepare()

    def _prepare(self) -> None:
        """Results of many dtypes and shapes, and indices. A program has only those that it uses."""
        rng, h = self.rng, self.builder.input

        def add(op: str, *args: Any, out: int | None = None, **kwargs: Any) -> StepResult:
            self.pool.append(self.builder.add(op, args, kwargs, 0, out))
            return self.pool[-1]

        for name in DTYPES:
            add("_to_copy.default", h, dtype=DType(name))
        add("reshape.default", h, (RowCount(1), 2, 3))
        add("reshape.default", h, (RowCount(1), 3, 2))
        add("reshape.default", h, (RowCount(2), 3))
        add("unsqueeze.default", h, 1)
        add("select.int", h, 1, rng.randrange(W))
        add("slice.Tensor", h, 1, 0, rng.randint(0, W))
        add("argsort.default", h, 1)
        add("topk.default", h, rng.randint(0, W), 1, out=1)
        add("argmax.default", h, 1, True)
        add("gt.Scalar", h, 0)
        shapes = [(W,), (W, W), (), (1, W), (W, 2), (W, 1), (1,), (2, 3), (0,), (1, 1)]
        for name in ("float32", rng.choice(DTYPES), "int64", "bool"):
            self.constants += [numbers(rng, shape, getattr(torch, name)) for shape in rng.sample(shapes, 4)]
        self.constants += [numbers(rng, shape, getattr(torch, self.builder.dtype)) for shape in shapes[:5]]
        self.constants += [torch.tensor([0, 3, W - 1]), torch.tensor([1]), torch.tensor([[0, 1]]), torch.tensor(2)]

    def number(self, kind: str = "number") -> Any:
        rng = self.rng
        if kind == "bool":
            return rng.random() < 0.5
        if kind == "int":
            return rng.choice(INTEGERS) if rng.random() < self.hostile else rng.choice([-2, -1, 0, 1, 1, 2, 3, 6])
        if rng.random() < 0.3:
            return rng.choice(INTEGERS) if rng.random() < self.hostile else rng.choice([-1, 0, 1, 2, 3])
        return rng.choice(FLOATS) if rng.random() < self.hostile else rng.choice([0.5, -1.5, 0.1, 2.0])

    def tensor(self, name: str) -> Any:
        """An argument that is a tensor: one of the last results, or any, or a constant, or a number."""
        rng, pool = self.rng, self.pool
        if self.first is not None and name == self.first_name:
            return self.first
        if self.op == "bmm.default":
            return rng.choice([each for each in pool if each.rank == 3 and each.dtype == pool[0].dtype])
        if name in ("mat1", "mat2", "vec", "weight", "values", "batch") and rng.random() < 0.8:
            like = self.first.dtype if self.first is not None else self.builder.input.dtype
            return rng.choice([each for each in (*self.constants, *pool) if each.dtype == like])
        if name in _INDEX_NAMES or self.is_about_indices:
            whole = [each for each in (*self.constants, *pool) if each.dtype == torch.int64]
            return rng.choice([rng.choice(whole), rng.choice(whole[-3:]), whole[-1]])
        if name in ("condition", "mask") and rng.random() < 0.8:
            return rng.choice([each for each in (*pool, *self.constants) if each.dtype == torch.bool])
        return rng.choice(
            [pool[-1], pool[0], rng.choice(pool), rng.choice(pool), rng.choice(self.constants), self.number()]
        )

    def argument(self, name: str, kind: str) -> Any:
        rng = self.rng
        optional = kind.startswith("Optional[")
        if optional and rng.random() < 0.4:
            return None
        kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
        if kind == "Tensor":
            return self.tensor(name)
        if kind.startswith("List["):
            if "Tensor" in kind and name in _INDEX_NAMES:
                return rng.choice([(None, self.tensor(name)), (None, None, self.tensor(name)), (self.tensor(name),)])
            if "Tensor" in kind:
                one = self.tensor(name)
                return tuple(one if rng.random() < 0.6 else self.tensor(name) for _ in range(rng.randint(1, 3)))
            if name in ("size", "shape"):
                sizes = rng.choice([(W,), (2, 3), (3, 2), (1, W), (W, 1), (1,), (), (0,), (2, W), (-1,), (W, W)])
                return (RowCount(rng.choice([1, 1, 1, 2, 3])), *sizes) if rng.random() < 0.8 else sizes
            if name == "normalized_shape":
                return rng.choice([(W,), (3,), (2, 3), (1, W), ()])
            if name == "split_sizes":
                return rng.choice([(W,), (2, 4), (1, 5), (6, 0), (3, 3)])
            if "float" in kind or "number" in kind:
                return tuple(self.number() for _ in range(rng.randint(1, 2)))
            return rng.choice([(1,), (1,), (-1,), (1, 2), (2,), (-1, 1), (0, 2, 1), (0, 1), ()])
        if name.startswith("dim") and kind == "int" and rng.random() < 0.9:
            return rng.choice([1, 1, 1, -1, -1, 2])
        if name in ("k", "step", "index", "split_size", "start", "end") and rng.random() < 0.9:
            return rng.choice([0, 1, 1, 2, 3, W - 1, W, W + 1, -1])
        if kind == "str":
            return rng.choice(["none", "tanh", "floor", "trunc"])
        if kind == "ScalarType":
            return DType(rng.choice(DTYPES))
        return self.number(kind)

    def add(self, op: str, tries: int = 12) -> StepResult | None:
        """A new result of this operation; None if the check has refused all arguments that were drawn."""
        schema = overload(op)._schema.arguments
        for _ in range(tries):
            self.op, self.is_about_indices = op, op in INDEXING and self.rng.random() < 0.5
            taken = [each for each in schema if not each.has_default_value() or self.rng.random() < 0.4]
            given = {each.name: self.argument(each.name, str(each.real_type)) for each in taken}
            positional = [each.name for each in schema if not each.kwarg_only]
            cut = next((i for i, name in enumerate(positional) if name not in given), len(positional))
            cut = self.rng.choice([cut, cut, cut, self.rng.randint(0, cut)])
            args = [given.pop(name) for name in positional[:cut]]
            try:
                found = self.builder.add(op, args, given, 0, self.rng.randint(0, 1))
            except (PlanError, IndexError):
                continue
            self.pool.append(found)
            return found
        return None

    def program(self, result: StepResult) -> Program:
        """A program with this result: for a capture, or for an edit. Raises PlanError."""
        builder = self.builder
        if not result.shaped.rows:
            raise PlanError("it is the same for all rows")
        count = math.prod(result.shape) * result.shaped.rows
        flat = builder.add("reshape.default", (result, (RowCount(1), count)), {}, 0)
        if self.rng.random() < 0.5:
            if flat.dtype in (torch.bool, torch.int8, torch.uint8):
                flat = builder.add("_to_copy.default", (flat,), {"dtype": DType("int16")}, 0)
            return builder.program(flat, keeps=True)
        flat = builder.add("index.Tensor", (flat, (None, torch.arange(W) % max(count, 1))), {}, 0)
        if not flat.dtype.is_floating_point:
            flat = builder.add("_to_copy.default", (flat,), {"dtype": DType("float32")}, 0)
        return builder.program(flat)


def drawn(rng: random.Random, op: str | None = None) -> Program | None:
    """A program of several operations, one of which is `op`; None if the check refuses it."""
    drawer = Drawer(rng, rng.choice(["float32", *FLOATING]))

    def some() -> list[str]:
        return [rng.choice(rng.choice([_OFTEN, sorted(RULES)])) for _ in range(rng.choice([0, 0, 1, 3, 6]))]

    for each in [*some(), op or rng.choice(sorted(RULES))]:
        made = drawer.add(each)
    for each in some() if made is not None else ():
        made = drawer.add(each) or made
    try:
        return drawer.program(made) if made is not None else None
    except PlanError:
        return None


def drawn_alone(rng: random.Random, op: str, dtype: str) -> Program | None:
    """A program of one operation on a value that is converted to a dtype; None if the check refuses all that were drawn."""
    drawer = Drawer(rng, dtype if dtype in FLOATING and rng.random() < 0.5 else rng.choice(FLOATING))
    first = drawer.first = next(each for each in drawer.pool[1:] if str(each.dtype) == f"torch.{dtype}")
    names = [a.name for a in overload(op)._schema.arguments if str(a.real_type) == "Tensor" and a.name != "condition"]
    drawer.first_name = next((name for name in ("mat1", *names) if name in names), "")
    for shape in ((W,), (W, W), (W, 1), (1, W), ()):
        drawer.constants += [numbers(rng, shape, first.dtype)] * 4
    drawer.pool.append(drawer.builder.add("select.int", (first, 1, 0), {}, 0))
    made = drawer.add(op, 60)
    try:
        return drawer.program(made) if made is not None else None
    except PlanError:
        return None


def other_of_form(rng: random.Random, program: Program) -> Program:
    """The program with other numbers and vectors, where programs of its form may differ. It may be refused, with a PlanError."""
    steps, constants = list(program.steps), list(program.constants)
    for (at, place), slot in program.form.slots.items():
        if isinstance(slot, Const):
            old = program.constants[slot.place]
            constants[slot.place] = Constant.of(numbers(rng, old.shape, getattr(torch, old.dtype)))
        else:
            args = list(steps[at].args)
            args[place] = rng.choice(
                [*INTEGERS, *(n for n in FLOATS if math.isinf(n) or abs(n) < 3.4e38), 0.1, 7, 1e-3]
            )
            steps[at] = steps[at]._replace(args=tuple(args))
    return replace(program, steps=tuple(steps), constants=tuple(constants))


def widened(program: Program, width: int) -> Program:
    """The program at a site of this width: it computes with the first numbers of a row, and an edit leaves the others as they are.

    Raises PlanError.
    """

    def moved(arg: Any) -> Any:
        return Ref(arg.step + 1, arg.out) if isinstance(arg, Ref) else arg

    steps = [Step("slice.Tensor", (INPUT, 1, 0, program.width)), *(step.mapped(moved) for step in program.steps)]
    if program.is_read:
        return replace(program, width=width, steps=tuple(steps), result=tuple(map(moved, program.results)))
    last = len(steps)
    steps += [
        Step("_to_copy.default", (moved(program.result),), (("dtype", DType(program.dtype)),)),
        Step("slice.Tensor", (INPUT, 1, program.width, width)),
        Step("cat.default", ((Ref(last), Ref(last + 1)), 1)),
    ]
    return replace(program, width=width, steps=tuple(steps), result=Ref(last + 2))


def constant_of(constant: Constant, device: torch.device) -> torch.Tensor:
    data = bytearray(constant.data or b"") or bytearray(8)
    flat = torch.frombuffer(data, dtype=getattr(torch, constant.dtype))[: math.prod(constant.shape)]
    return flat.view(constant.shape).to(device)


def plain_result(program: Program, x: torch.Tensor, results: list[Any] | None = None) -> tuple[torch.Tensor, ...]:
    """A program's results: its operations, called one after the other with the arguments as they are written.

    Args:
        results: gets the result of each step.
    """
    h, results = x.to(getattr(torch, program.dtype)), results if results is not None else []
    whole = [constant_of(constant, x.device) for constant in program.constants]

    def of(arg: Any) -> Any:
        match arg:
            case Ref(step=step, out=out):
                found = h if step < 0 else results[step]
                return found if out is None else found[out]
            case Const(place=place):
                return whole[place]
            case RowCount(times=times):
                return times * len(x)
            case DType(name=name):
                return getattr(torch, name)
            case tuple():
                return list(map(of, arg))
        return arg

    for step in program.steps:
        packet, _, which = step.op.partition(".")
        kwargs = {name: of(value) for name, value in step.kwargs}
        if packet == "full":
            kwargs["device"] = x.device
        results.append(getattr(getattr(torch.ops.aten, packet), which)(*map(of, step.args), **kwargs))
    found = tuple(map(of, program.results))
    return found if program.is_read else (found[0].to(x.dtype),)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all numbers are equal, and NaN in the same places."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def results_of(program: Program, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return unpacked(program, rows) if program.is_read else (rows,)


def assert_same(program: Program, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    for a, b in zip(results_of(program, found), results_of(program, wanted), strict=True):
        assert same(a, b), f"{what}: {list(a)} is not {list(b)}; {described(program)}"


def described(program: Program) -> str:
    return f"{program.dtype} {[step[:3] for step in program.steps]} {program.results} {[list(c.numbers) for c in program.constants]}"


def form_of(rng: random.Random, program: Program, device: torch.device) -> list[Program]:
    """The program and others of its form; none if the engine would refuse one."""
    form = [program]
    for _ in range(3 if program.form.slots else 0):
        with contextlib.suppress(PlanError):
            form.append(other_of_form(rng, program))
    try:
        for each in form:
            assert each.form.key == program.form.key, described(program)
            try_out(each, device)
    except PlanError:
        return []
    return form


def bank_of(form: Sequence[Program], device: torch.device) -> ProgramBank:
    bank = ProgramBank(form[0], 4, device)
    for place, each in enumerate(form):
        bank.put(place, each)
    return bank


def attack(rng: random.Random, device: torch.device, op: str | None = None) -> Program | None:
    """Run a program, and others of its form, alone and together. Returns it, or None if the check or the engine has refused it.

    Raises:
        AssertionError: a row depends on another one, or an index on numbers that its bound does not allow.
        Exception: a program raises that was accepted. On a GPU also a failed assertion of the device.
    """
    program = drawn(rng, op)
    form = form_of(rng, program, device) if program is not None else []
    if not form:
        return None
    try:
        _run_all(rng, form, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        error.add_note(described(form[0]))
        raise
    return program


def _run_all(rng: random.Random, form: list[Program], device: torch.device) -> None:
    program = form[0]
    dtype = getattr(torch, program.dtype)
    x_RH = rows_of(rng, ROWS, dtype).to(device)
    if device.type == "cpu":  # a GPU's process would end at an index outside
        _check_bounds(program, x_RH)
    for rows in (1, 2, ROWS):
        run(program, x_RH[:rows])
    bank = bank_of(form, device)
    which_R = torch.tensor([rng.randrange(len(form)) for _ in range(ROWS)], device=device)
    together = bank.run(x_RH, which_R)
    kept = rng.randrange(ROWS)
    other_RH = rows_of(rng, ROWS, dtype).to(device)
    other_RH[kept] = x_RH[kept]
    other = bank.run(other_RH, which_R)
    if device.type != "cpu" and any(step.op in UNORDERED for step in program.steps):
        return
    assert_same(program, other[[kept]], together[[kept]], "a row in a bank depends on other rows")
    mine = form[int(which_R[kept])]
    assert_same(program, run(mine, other_RH)[[kept]], run(mine, x_RH)[[kept]], "a row depends on other rows")


def _check_bounds(program: Program, x: torch.Tensor) -> None:
    """The numbers of each result lie within the bound that the check infers."""
    checker = Checker(len(x))
    checker.add_input(program.width, program.dtype)
    for constant in program.constants:
        checker.add_constant(constant)
    results = list[Any]()
    plain_result(program, x, results=results)
    for step, found in zip(program.steps, results, strict=True):
        checker.run(step)
        known = checker.results[-1]
        each = zip(known, found, strict=True) if isinstance(known, tuple) else [(known, found)]
        for shaped, numbers_of in each:
            if shaped.bound is not None and numbers_of.numel():
                low, high = int(numbers_of.min()), int(numbers_of.max())
                assert 0 <= low <= high < shaped.bound, f"{step.op} has {low} to {high}, not below {shaped.bound}"


def compare_bank(rng: random.Random, program: Program, device: torch.device) -> bool:
    """Compare a bank with each of its programs, and these on a CPU with `plain_result`. Returns False if the engine refuses the program.

    All numbers are equal. Only products with a matrix of each row's own are equal up to rounding: PyTorch adds them up in another order.
    So are sums with a factor on a CPU.
    """
    form = form_of(rng, program, device)
    if not form:
        return False
    x = rows_of(rng, ROWS, getattr(torch, program.dtype)).to(device)
    which = [rng.randrange(len(form)) for _ in range(ROWS)]
    bank = bank_of(form, device)
    together = results_of(program, bank.run(x, torch.tensor(which, device=device)))
    if device.type != "cpu" and any(step.op in UNORDERED for step in program.steps):
        return True
    rounds = any(program.steps[at].op in PRODUCTS for at, _ in program.form.slots)
    # With float16, kernels of some CPUs round `x + alpha * y` once in whole vectors, and twice in the rest of the numbers.
    rounds |= device.type == "cpu" and any(name == "alpha" for step in program.steps for name, _ in step.kwargs)
    for place, each in enumerate(form):
        mine = [row for row in range(ROWS) if which[row] == place]
        alone = results_of(each, bank.alone(place, each).run(x, None))
        for a, b in zip(alone, together, strict=True):
            equal = same(a[mine], b[mine]) or (rounds and is_close(a[mine], b[mine], each, x))
            assert equal, f"{b[mine]} in a bank, {a[mine]} alone: {described(each)}"
        if device.type == "cpu":
            plain = [one.reshape(a.shape).to(a.dtype) for a, one in zip(alone, plain_result(each, x), strict=True)]
            for a, b, one in zip(results_of(each, run(each, x)), together, plain, strict=True):
                assert same(a, one), f"{a} alone, {one} by PyTorch: {described(each)}"
                equal = same(b[mine], one[mine]) or (rounds and is_close(b[mine], one[mine], each, x))
                assert equal, f"{b[mine]} in a bank, {one[mine]} by PyTorch: {described(each)}"
    return True


def is_close(a: torch.Tensor, b: torch.Tensor, program: Program, x: torch.Tensor) -> bool:
    """Whether results are equal up to the rounding of a sum of W products: of the largest numbers, since the sum itself may be small, and
    of the sum itself, since a factor converted to uint8 may be larger than before.

    Numbers that overflow in one order of the sum, and not in another, are left out.
    """
    factors = [x, *(constant_of(each, x.device) for each in program.constants if each.dtype in FLOATING)]
    eps = max(torch.finfo(each.dtype).eps for each in (a, *factors) if each.is_floating_point())
    scale = math.prod(float(each.double().nan_to_num(0, 0, 0).abs().max()) for each in factors)
    both = (a.double(), b.double())
    finite = torch.isfinite(both[0]) & torch.isfinite(both[1])
    return bool(
        ((both[0] - both[1]).abs()[finite] <= 2 * W * eps * both[0].abs()[finite].clamp(min=max(scale, 1.0))).all()
    )
