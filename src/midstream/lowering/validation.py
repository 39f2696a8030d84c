"""Checks each new tape against the code itself on real numbers, before the tape is used (translation validation).

    found = difference(programs, model, lowered, [5, 7], steps=3)   # None if the tape does what the code does

A fresh copy of the code runs in plain PyTorch on the CPU, with the classes that run bodies in an engine (`trace.body`, `trace.visit`,
`trace.interleaver`). Its forward computes nothing: the values at its points are random numbers. The tape gets the same numbers: the plan's
edits and programs run in their reference arithmetic, and the captured rows go through the same code as a request's. The check compares the
writes at every point of every step, the saved values with their containers, and the exceptions.

Nothing here comes from the recording of the code (`trace.record`), except the lines in messages.

Legend: T tokens of a step, W the site's width.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn

from midstream.errors import CaptureError
from midstream.plan.compile import compile_plan
from midstream.plan.ops.edit import edited
from midstream.plan.program import Program
from midstream.plan.running import run, tensor_of
from midstream.runtime.points import tree_of
from midstream.runtime.request import Tier
from midstream.sites import Binding, Key, Point, point_name
from midstream.trace.batch_rows import Event, FlatRows
from midstream.trace.body import Body
from midstream.trace.code import Failure, Outcome, TraceProgram, outcome
from midstream.trace.devices import showing
from midstream.trace.envoy import AbsentModel
from midstream.trace.graph import varied_steps
from midstream.trace.interleaver import BehindStep
from midstream.trace.parallel import AbsentStage, Peers
from midstream.trace.visit import Visit
from midstream.tree import as_bits, follow, map_tensors, replaced

if TYPE_CHECKING:
    from midstream.lowering.client_traces import ClientTrace
    from midstream.plan.values import Plan
    from midstream.trace.record import Model, Recording

# The programs of one request, in a new copy; the argument finds the model's own objects.
Programs = Callable[[Callable[[Any], Any]], Sequence[TraceProgram]]

_FEW_STEPS = 3  # the least steps that are checked
_MANY_STEPS = 8  # with more, the last one is left out
_MOST_BYTES = 1 << 28  # of the values that the code reads in the prompt's step
_MOST_CONSTANTS = 1 << 24  # bytes; with more, one length and two steps are checked
_POOL = 1 << 20  # the least random numbers of a pool
_ROUNDINGS = 4  # how many rounding errors may add up
_OF_SUMS = 16  # the same for sums over a row


class Tape(Protocol):
    """The parts of `tiers.Lowered` that are checked."""

    @property
    def tier(self) -> Tier: ...
    @property
    def reads(self) -> Mapping[Point, bool]: ...
    @property
    def recordings(self) -> Sequence[Recording]: ...
    @property
    def client_trace(self) -> ClientTrace: ...
    def plan_for(self, tier: Tier) -> Plan: ...


@dataclass(frozen=True)
class Difference:
    """Where a tape does something else than the code.

    Attributes:
        line: of the code, 0 if unknown.
        text: what is different.
    """

    line: int
    text: str


UNCHECKED = Difference(0, "for a prompt of another length it runs in the forward, so that its tape cannot be checked")


class _Unknown(BaseException):
    """The code uses a part of the model that exists only in an engine. Not an Exception, so that the code does not catch it."""


def steps_to_check(tape: Tape, steps: int) -> int:
    """How many steps of a request show all that its code does: up to the last one that differs from the one before."""
    recorded = [each.steps for each in tape.recordings]
    # The last of many recorded steps always differs, because the code returns in it. In a check, which has fewer steps, it returns earlier.
    return min(steps, max(_FEW_STEPS, *(varied_steps(own[: max(len(own) - 1, _MANY_STEPS)]) for own in recorded)))


def difference(
    programs: Programs, model: Model, lowered: Callable[[int], Tape], lengths: Sequence[int], steps: int
) -> Difference | None:
    """The first difference between a request's code and its tape; None if there is none, `UNCHECKED` if
    a prompt of one of the lengths has no tape.

    Args:
        lowered: returns the tape for a prompt of a length.
        lengths: of the prompts to check, one for each check.
        steps: how many to check.
    """
    for number, length in enumerate(lengths):
        tape = lowered(length)
        if tape.tier is Tier.FORWARD:
            return UNCHECKED
        is_large = _constant_bytes(tape) > _MOST_CONSTANTS
        if is_large and number:
            break
        width = sum(model.arch.widths[point] for point in tape.reads)
        if width * length * model.dtype.itemsize > _MOST_BYTES:
            return Difference(0, f"the values of {length} tokens are too many for a check of what it does")
        try:
            check = _Check(model, tape, length, _SPECIAL_ROWS[1 if is_large or number else 0])
            few = min(steps, 2 if is_large else _FEW_STEPS)
            # The rows of generated tokens are plain in all checks, so only the first check has late steps.
            found = check.run(programs, few if number or steps <= _FEW_STEPS else steps) or check.ending()
        except Exception as error:  # a tape that cannot be checked is not used
            found = Difference(0, f"the check of the tape fails: {type(error).__name__}: {error}")
        if found is not None:
            return found
    return None


def _constant_bytes(tape: Tape) -> int:
    plan = tape.plan_for(tape.tier)
    found = {getattr(each, "program", None) for each in plan.interventions}
    constants = {constant for program in found if isinstance(program, Program) for constant in program.constants}
    return sum(constant.nbytes for constant in constants)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Swallow the output of the block."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Check:
    """Runs a request's code and its tape on the same numbers.

    Args:
        special: the prompt's special rows.
    """

    def __init__(self, model: Model, tape: Tape, length: int, special: _SpecialRows) -> None:
        self._model, self._tape, self._length = model, tape, length
        self._numbers = _Numbers(model, special)
        self._forward = _Forward(model)
        self._edits = _Edits(tape, model, length)
        self._bodies: list[Body] = []
        self._ends: list[Outcome] = []
        self._taken, self._failed = 0, False  # steps, and whether the code has raised an error in one of them

    def run(self, programs: Programs, steps: int) -> Difference | None:
        """Run a request of so many steps. Returns the first difference between what the code and the tape do in it."""
        unembed = partial(_unembedded, self._model.vocab_size)
        envoy = self._model.absent(self._forward, unembed, _unknown)
        own = programs(envoy.resolve)
        # Engines run bodies in inference mode.
        with _quietly(), torch.inference_mode():
            try:
                for i, program in enumerate(own):
                    body = Body(str(i), partial(_run, program, envoy, self._model.device), in_engine=True)
                    body.journal = None  # no position is computed again
                    self._bodies.append(body)
                    self._forward.add(body)
                while self._taken < steps and all(body.failure is None for body in self._bodies):
                    found = self._step(self._taken)
                    if found is not None:
                        return found
                    self._taken += 1
                self._failed = any(body.error is not None for body in self._bodies)
                for body in self._bodies:
                    self._forward.finish(body.name)
                    if isinstance(body.failure, _Unknown):
                        return Difference(0, str(body.failure))
                self._ends = [outcome(body, program) for body, program in zip(self._bodies, own, strict=True)]
            finally:
                for body in self._bodies:
                    self._forward.discard(body.name)
        return self._reads()

    # Steps.

    def _step(self, step: int) -> Difference | None:
        """Run one step. Returns the first write that differs."""
        tokens = self._length if step == 0 else 1
        rows = FlatRows(0, tokens, tokens, 0 if step == 0 else self._length + step - 1)
        names = [body.name for body in self._bodies]
        self._forward.begin_step(dict.fromkeys(names, rows), (), dict.fromkeys(names, FlatRows(0, 1, 1)))
        self._edits.begin_step(step)
        for key, points in self._forward.points.items():
            expected = self._forward.expects(key)
            if not expected and self._edits.points.isdisjoint(points.values()):
                continue
            was = self._numbers.tree(key, points, step, tokens)
            taped = self._edits.made(points, was)
            now = self._forward.fire(key, map_tensors(was, lambda _, each: each.clone())) if expected else was
            if any(body.error is not None for body in self._bodies):
                break  # later edits do not matter: the request fails
            for binding, point in points.items():
                sizes = map_tensors(was, lambda _, each: each.abs())
                found = self._written(point, step, *(_value(binding, tree) for tree in (sizes, was, taped, now)))
                if found is not None:
                    return found
        for name in ("logits", "samples"):
            if self._forward.expects(("", name)):
                self._forward.fire(("", name), self._numbers.last(name, step))
        self._forward.end_step()
        return None

    def _written(
        self,
        point: Point,
        step: int,
        sizes_TW: torch.Tensor,
        was_TW: torch.Tensor,
        taped_TW: torch.Tensor,
        now_TW: torch.Tensor,
    ) -> Difference | None:
        far = _far_rows(sizes_TW, was_TW, taped_TW, now_TW)
        if far is None:
            return None
        row, place = far
        mine, theirs = (f"{float(each[row].flatten()[place]):.6g}" for each in (taped_TW, now_TW))
        where = f"{point[0]}[{point[1]}], token {row} of step {step}"
        return Difference(self._line_of(point), f"at {where} the tape gives {mine} where the code gives {theirs}")

    def _line_of(self, point: Point) -> int:
        graphs = [graph for each in self._tape.recordings for graph in each.steps]
        lines = [write.line for graph in graphs for write in graph.writes if write.point == point]
        lines += [graph.reads[point] for graph in graphs if point in graph.reads]
        return lines[0] if lines else 0

    # The end.

    def _reads(self) -> Difference | None:
        """The difference if the code reads a point that the tape does not capture."""
        if self._tape.tier is Tier.PLAN:
            return None
        in_steps: Mapping[Point, bool] = self._tape.reads
        for key, step in self._forward.visited:
            points = self._forward.points.get(key, {}).values()
            if points and not any(point in in_steps and (step == 0 or not in_steps[point]) for point in points):
                return Difference(0, f"the code reads {point_name(key)} in step {step}, and the tape does not")
        return None

    def ending(self) -> Difference | None:
        """The first difference between the outcomes. None if the engine runs the code, which then makes the outcome itself."""
        if self._tape.tier is Tier.BEHIND:
            return None
        *earlier, theirs = self._ends
        for each in earlier if not self._failed else self._ends:
            if each.failure is not None:
                return _raised(each.failure, "none")
        try:
            mine = self._tape.client_trace.outcome(self._edits.captured, self._taken)
        except CaptureError:  # the request would end with this error
            return None
        if _text_of(mine.failure) != _text_of(theirs.failure):
            if theirs.failure is not None:
                return _raised(theirs.failure, "an error" if mine.failure is not None else "none")
            assert mine.failure is not None
            return Difference(0, f"the tape raises {mine.failure.type_name} where the code does not")
        parts, others = (_taken_apart((o.values, o.stopped, o.mutated, o.unsaved, o.rebound)) for o in (mine, theirs))
        if parts[0] != others[0]:
            text = "the containers, texts and numbers that the tape saves are others than those of the code"
            return Difference(0, f"{text}, or of other types")
        for place, pair in enumerate(zip(parts[1], others[1], strict=True)):
            if (differing := _unequal(*pair)) is not None:
                recorded: Any = _taken_apart(self._tape.recordings[-1].outcome.values)[1][place]
                return Difference(recorded.memory.value.line, f"in a saved tensor, {differing}")
        return None


def _run(program: TraceProgram, envoy: AbsentModel, device: torch.device) -> Any:
    with showing(device):
        return program.run(envoy, {})


def _raised(failure: Failure, instead: str) -> Difference:
    line = failure.frames[-1][1] if failure.frames else 0
    return Difference(line, f"the code raises {failure.type_name} where the tape raises {instead}")


def _text_of(failure: Failure | None) -> Any:
    """The parts of an error that have to be equal. The texts of midstream's own errors name steps."""
    if failure is None:
        return None
    return failure.type_name, failure.message if failure.error is None else ""


# The model, on numbers.


class _AppliedNorms(Peers):
    """Applies norms to values of the code, with weights of 1. No tape contains the result, so any function of the value will do."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def applied(self, path: str, module: Any) -> Any:
        if "Norm" not in self._modules.get(path, ""):
            raise _Unknown(f"{path}(...) is computed where the engine runs")
        return _normed


def _normed(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


def _unembedded(vocab_size: int, hidden: torch.Tensor) -> torch.Tensor:
    copies = -(-vocab_size // hidden.shape[-1])
    return _normed(hidden).repeat(*[1] * (hidden.ndim - 1), copies)[..., :vocab_size]


class _Forward(BehindStep):
    """A forward that has only the points of sites.

    Attributes:
        points: the sites at each point of the forward, in its order.
        visited: the points and steps at which the code has been.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(
            nn.Module(), model.arch.order, AbsentStage(model.modules), _AppliedNorms(model.modules), model.aliases
        )
        self.points = dict(sorted(model.at.items(), key=lambda item: model.arch.order[item[0][0], item[0][1]]))  # type: ignore[index]
        self.captured = self.points
        self.visited: set[tuple[Key, int]] = set()

    def _visit(self, body: Body, event: Event) -> Visit:
        self.visited.add((event.key, body.now))
        return super()._visit(body, event)

    def attribute(self, path: str, module: Any, name: str) -> NoReturn:
        raise _Unknown(f"{path or 'model'}.{name} is only where the engine runs")

    def override(self, body: str, key: Key, value: Any) -> NoReturn:
        raise _Unknown(f"it skips {point_name(key)}")


def _unknown(reason: str) -> NoReturn:
    raise _Unknown(reason)


@dataclass(frozen=True)
class _SpecialRows:
    """Rows of a prompt with extreme numbers: every second one. The rows between them are plain, and so is a prompt of one token.

    Attributes:
        first: the first special row, 0 or 1.
        changes: the kinds of extreme numbers, which these rows get in turn.
    """

    first: int
    changes: Sequence[str]

    def put(self, value_TW: torch.Tensor) -> None:
        if len(value_TW) == 1:
            return
        tiny, huge = (1e-4, 1e3) if value_TW.dtype == torch.float16 else (1e-30, 1e4)
        for row, change in zip(value_TW[self.first :: 2], cycle(self.changes), strict=False):
            if change == "zeros":
                row[::2] = 0.0
                row[1::4] = -0.0
            elif change == "outliers":
                row[::7] *= huge
            else:
                row *= tiny if change == "tiny" else huge


# The special rows of the first check, and of later ones. The tolerance for saved sums over rows grows with the largest sum, so one check
# has no huge rows.
_SPECIAL_ROWS = _SpecialRows(1, ("tiny", "zeros")), _SpecialRows(0, ("huge", "tiny", "zeros", "outliers"))


class _Numbers:
    """The values at the points of the forward: parts of one pool of random numbers, which differ for each point and step."""

    def __init__(self, model: Model, special: _SpecialRows) -> None:
        self._model, self._special = model, special

    def tree(self, key: Key, points: Mapping[Binding, Point], step: int, tokens: int) -> Any:
        """What the module takes or returns at `key`."""
        arch = self._model.arch
        values = {point: self._value(f"{key} {point} {step}", tokens, arch.widths[point]) for point in points.values()}
        tree = tree_of(arch, values)
        for binding, point in points.items():
            if binding.residual is not None:
                second = self._value(f"{key} {point} {step} residual", tokens, arch.widths[point])
                tree = replaced(tree, binding.residual, second)
        return tree

    def last(self, name: str, step: int) -> torch.Tensor:
        """The value of the logits or the samples, after the forward."""
        vocab = self._model.vocab_size
        if name == "logits":
            return self._part(f"logits {step}", vocab)[None]
        return torch.tensor([zlib.crc32(b"%d" % step) % vocab])

    def _value(self, name: str, tokens: int, width: int) -> torch.Tensor:
        value_TW = self._part(name, tokens * width).view(tokens, width)
        self._special.put(value_TW)
        return value_TW

    def _part(self, name: str, count: int) -> torch.Tensor:
        size = max(_POOL, 1 << (2 * count).bit_length())
        first = zlib.crc32(name.encode()) % (size - count)
        return _pool(self._model.dtype, size)[first : first + count].clone()


@functools.lru_cache(4)
def _pool(dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(20), dtype=torch.float32).to(dtype)


def _value(binding: Binding, tree: Any) -> torch.Tensor:
    """The site's value, `[tokens, ...]`."""
    return binding.read(partial(follow, tree))


# The tape, on numbers.


class _Edits:
    """The edits and captures of a tape's plan, on one request.

    Attributes:
        points: where the plan acts.
        captured: the rows of each captured point so far.
    """

    def __init__(self, tape: Tape, model: Model, length: int) -> None:
        arch = model.arch
        self._compiled = compile_plan(
            tape.plan_for(tape.tier),
            length,
            arch.num_layers,
            width=lambda site, layer: arch.widths[site, layer],
            dtype=str(model.dtype).removeprefix("torch."),
            vector=_nothing,
            run=_nothing,
            head_dims=arch.head_dims,
        )
        profiles = self._compiled.profiles
        self.points = frozenset[Point]().union(*(profile.points for profile in profiles))
        ops = [op for profile in profiles for own in profile.ops.values() for op in own if op.program is not None]
        self._held = [tensor_of(each, torch.device("cpu")) for op in ops if op.program for each in op.program.constants]
        self._further = frozenset[Point]().union(*(profile.further for profile in profiles))
        self._length = length
        self.captured: dict[Point, torch.Tensor] = {}

    def begin_step(self, step: int) -> None:
        first, count = (0, self._length) if step == 0 else (self._length + step - 1, 1)
        prompt, after = self._compiled.prompt, self._compiled.generated
        self._profile_T = np.array(
            [prompt[position] if position < len(prompt) else after for position in range(first, first + count)]
        )
        self._values: dict[Point, torch.Tensor] = {}

    def made(self, points: Mapping[Binding, Point], tree: Any) -> Any:
        """`tree` with the edits at these points. Notes the captured rows."""
        for binding, point in points.items():
            if point not in self.points:
                continue
            value = _value(binding, tree)
            new = self._new(point, value.reshape(len(value), -1)).view(value.shape)
            for ref, leaf in binding.leaves(new, partial(follow, tree)) if new is not value else ():
                tree = replaced(tree, ref, leaf)
        return tree

    def _new(self, point: Point, value_TW: torch.Tensor) -> torch.Tensor:
        if point in self._further:
            self._values[point] = value_TW
        new_TW, kept = value_TW.clone(), list[tuple[int, torch.Tensor]]()
        for number in np.unique(self._profile_T).tolist():
            ops = self._compiled.profiles[number].ops.get(point, ())
            rows = torch.from_numpy(np.flatnonzero(self._profile_T == number))
            old_RW = value_TW[rows]
            for op in ops:
                if op.kind == "capture":
                    kept_RP = old_RW if op.program is None else run(op.program, old_RW)
                    kept += zip(rows.tolist(), kept_RP, strict=True)
            if any(op.is_edit for op in ops):
                further = {at: self._values[at][rows] for op in ops for at in op.inputs}
                made_RW = edited(old_RW, ops, self._compiled.bank, further)
                new_TW[rows] = torch.where(made_RW == old_RW, old_RW, made_RW)
        if kept:
            rows_RP = torch.stack([row for _, row in sorted(kept, key=lambda each: each[0])])
            before = [self.captured[point]] if point in self.captured else []
            self.captured[point] = torch.cat([*before, rows_RP])
        return new_TW


def _nothing(*_: Any) -> NoReturn:
    raise AssertionError("a tape's plan has no named vectors and no recorded runs")


# Comparing.


def _far_rows(
    sizes_TW: torch.Tensor, was_TW: torch.Tensor, mine_TW: torch.Tensor, theirs_TW: torch.Tensor
) -> tuple[int, int] | None:
    """The first row and element where a tape's value is too far from the code's; None if there is none.

    The tolerance grows with an element before and after the edit, and with the largest change in its row. To allow for sums over a row,
    which are computed in float32, it also grows with the row's largest element. A row that the code leaves alone has to stay as it is,
    unless a change of one of its two streams may have been lost to rounding.

    Args:
        sizes_TW: the sum of the absolute values of the streams whose sum the value is.
    """
    if _same_bits(mine_TW, theirs_TW).all():
        return None
    sizes, was, mine, theirs = (each.reshape(len(each), -1).double() for each in (sizes_TW, was_TW, mine_TW, theirs_TW))
    eps, of_sums = torch.finfo(was_TW.dtype).eps * _ROUNDINGS, torch.finfo(torch.float32).eps * _OF_SUMS
    change = (theirs - was).abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    slack = eps * (sizes + theirs.abs() + change) + of_sums * sizes.amax(-1, keepdim=True)
    is_equal = (mine == theirs) | (mine.isnan() & theirs.isnan())
    far = ~(((mine - theirs).abs() <= slack.where(theirs.isfinite(), 0.0)) | is_equal)
    is_alone = (_same_bits(was_TW, theirs_TW).reshape(len(was), -1) & (sizes == was.abs())).all(-1, keepdim=True)
    far |= is_alone & ~is_equal
    return tuple(far.nonzero()[0].tolist()) if bool(far.any()) else None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return as_bits(one.contiguous()) == as_bits(other.contiguous())


_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class _Apart(pickle.Pickler):
    """Pickles saved values for a comparison.

    Attributes:
        tensors: the tensors, in the order in which the pickle refers to them.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            if id(obj) not in self._places:
                self._places[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return kind.__qualname__, self._places[id(obj)]
        if issubclass(kind, type) or kind in _FUNCTIONS:  # each copy of the code has its own
            return f"{obj.__module__}.{obj.__qualname__}"
        if kind is str:  # whether two equal texts are one object makes no difference
            return obj.encode(errors="surrogatepass")
        return (kind.__qualname__, sorted(map(repr, obj))) if kind in (set, frozenset) else None


def _taken_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Bytes, and the tensors. The bytes of two values are equal if their types, containers and numbers are equal, and the same places
    share one object.
    """
    pickler = _Apart(buffer := io.BytesIO())
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def _unequal(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """How saved tensors differ; None if they do not."""
    forms = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (mine, theirs)]
    if forms[0] != forms[1]:
        return f"the tape gives {forms[0]} where the code gives {forms[1]}"
    if _same_bits(mine, theirs).all():
        return None
    if not theirs.is_floating_point():
        is_equal = mine == theirs
    else:
        one, other = mine.double(), theirs.double()
        finite = other.abs().nan_to_num(0.0, 0.0, 0.0)
        largest = finite.amax(-1, keepdim=True) if finite.ndim else finite
        slack = torch.finfo(theirs.dtype).eps * _ROUNDINGS * (finite + largest)
        is_equal = ((one - other).abs() <= slack.where(other.isfinite(), 0.0)) | (one == other)
        is_equal |= one.isnan() & other.isnan()
    if bool(is_equal.all()):
        return None
    place = tuple((~is_equal).nonzero()[0].tolist())
    return f"the tape gives {mine[place].item()} at {list(place)} where the code gives {theirs[place].item()}"
