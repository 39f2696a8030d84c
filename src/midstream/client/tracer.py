"""The client's side of a trace: takes the with-block, has the backend run it, and brings its saved values back."""

from __future__ import annotations

import dis
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from midstream.capture.consumers import Collected
from midstream.client.answers import Answers
from midstream.client.prompts import Prompt
from midstream.errors import InterventionErrorGroup, MidstreamError, RequestErrorGroup, TraceError
from midstream.plan.values import Plan
from midstream.trace.block import Block, capture, link, push, skip, skipped
from midstream.trace.program import BlockProgram, Outcome, Program
from midstream.trace.saves import CONTAINERS, attributes_of, in_place_of, refuse
from midstream.trace.tracer import Barrier, BodyTracer, steps_of

if TYPE_CHECKING:
    from midstream.client.model import TraceModel

_LEFT_THERE = (
    "What this trace has put into {names} was not saved, so on VLLM it stays in the engine, which works on copies. Save what you put in, "
    "`x.save()`: a list or dict comes back with the saved values in it. Or save the whole, `{name}.save()` in the trace."
)
_COUNTED = (
    "A trace has variables of its own, so outside {names} stays as it was. To go on with what the trace has made of it, save it there: "
    "`{name}.save()` behind the last change."
)
_NOTHING_SAVED = (
    "Nothing that this trace saved has come back. A saved value comes back under a name, `h = model.layers_output[3].save()`, in a list or "
    "dict that the trace puts it into, or as an attribute of an object of yours; not in a module's variables."
)

_NO_PROMPT = "A trace needs a prompt, `model.trace(prompt)`, or invokes: `with tracer.invoke(prompt):` in its block."
_NOT_YET = (
    "{name} is set in an invoke, and invokes run once the trace's block is over. Use {name} in an invoke, or save it there and use it "
    "behind the trace."
)


@dataclass
class Invoke:
    """One prompt, with the code and the plan that go with it, and the answers to grade.

    Attributes:
        is_elsewhere: whether its block stands in another function than the trace, whose names are not the caller's.
        collected: what it is of a collection.
    """

    prompt: Prompt
    program: Program | None
    params: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    answers: Answers = field(default_factory=dict)
    is_elsewhere: bool = False
    collected: Collected | None = None

    @property
    def block(self) -> Block | None:
        return self.program.block if isinstance(self.program, BlockProgram) else None


@dataclass
class Ran:
    """What a backend gives for one invoke: its outcome (a list of them for n > 1), its final output, and what went wrong with its plan."""

    outcomes: list[Outcome]
    output: Any
    error: MidstreamError | None = None


class _Context:
    """A with-statement whose body is taken, not run in place."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._block: Block | None = None

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        self._block = capture(frame)
        self._frame = frame
        skip(frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if error is not None and not skipped(error):
            return False
        assert self._block is not None and self._frame is not None
        frame, self._frame = self._frame, None
        self._taken(self._block, frame)
        return True

    def _taken(self, block: Block, frame: FrameType) -> None:
        raise NotImplementedError


class InvokeContext(_Context):
    """`with tracer.invoke(prompt):`, one request of the trace."""

    def __init__(self, tracer: Tracer, invoke: Invoke) -> None:
        super().__init__()
        self._tracer = tracer
        self._invoke = invoke

    def _taken(self, block: Block, frame: FrameType) -> None:
        self._invoke.program = self._tracer.program_of(block)
        self._invoke.is_elsewhere = not self._tracer.is_run_by(frame)
        self._tracer.invokes.append(self._invoke)


class Tracer(_Context):
    """`with model.trace(...) as tracer:`.

    Attributes:
        outputs: the final output of every invoke, in order, once the trace is over.
        result: the only invoke's output.
        backend: with `mode="async"`, what to iterate over: `async for output in tracer.backend`.
    """

    def __init__(self, model: TraceModel, prompt: Prompt | None, params: dict[str, Any], plan: Any = None) -> None:
        super().__init__()
        self._model = model
        self._prompt = prompt
        self._params = params
        self._plan = Plan.of(plan)
        self._saved: dict[int, Any] = {}
        self._collecting = False
        self._has_barrier = False
        self._outer: frozenset[str] = frozenset()  # the names that the block around the invokes has bound
        self.invokes: list[Invoke] = []
        self.outputs: list[Any] = []
        self.backend: Any = None

    def __midstream_reference__(self) -> Any:
        return ("tracer",)

    @property
    def result(self) -> Any:
        if not self.outputs:
            raise TraceError("tracer.result is there once the trace is over.")
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def invoke(self, prompt: Prompt, *, plan: Any = None, **params: Any) -> InvokeContext:
        """One request of this trace.

        Args:
            prompt: text, token ids, or a tokenizer's output for one prompt.
            plan: of this request, in the place of the trace's.
            params: sampling parameters of this request; those of the trace are the default.
        """
        if not self._collecting:
            raise TraceError("Give model.trace() no prompt to have invokes in it: `with model.trace() as tracer:`.")
        own = self._plan if plan is None else Plan.of(plan)
        return InvokeContext(self, Invoke(prompt, None, {**self._params, **params}, own))

    def barrier(self, parties: int) -> Barrier:
        """A point where `parties` invokes wait for each other; call it in each of them."""
        self._has_barrier = True
        return Barrier(parties)

    def save(self, value: Any) -> Any:
        refuse(value)
        self._saved[id(value)] = value
        return value

    def is_run_by(self, frame: FrameType) -> bool:
        """Whether the frame runs the trace's own block."""
        return self._block is not None and frame.f_code is self._block.code

    def program_of(self, block: Block) -> BlockProgram:
        """The program of a block, with the tracer in it replaced by the one that bodies use."""
        injected = {name: BodyTracer() for name, value in block.captured.items() if value is self}
        if self._prompt is not None and block.target is not None:
            injected[block.target] = BodyTracer()
        saved = [name for name, value in block.captured.items() if id(value) in self._saved]
        return BlockProgram(block, injected, saved)

    def _taken(self, block: Block, frame: FrameType) -> None:
        outer: dict[str, Any] = {}
        if self._prompt is not None:
            self.invokes.append(Invoke(self._prompt, self.program_of(block), self._params, self._plan))
        else:
            outer = self._collect(block)
            self._outer = frozenset(outer)
        together = link(self._blocks())
        if together and any(invoke.params.get("n", 1) > 1 for invoke in self.invokes):
            raise TraceError(
                "Invokes that use each other's variables are one request each, so n > 1 is not possible with them: add an invoke for each "
                "sample."
            )
        self.backend = self._model._start(self.invokes, together or self._has_barrier)
        place = frame.f_code.co_filename, frame.f_lineno
        if self._model._deferred:
            self.outputs = self.backend.outputs
            self.backend.when_over = lambda ran: _warn(place, self._left(ran))
            return
        ran = self.backend.wait()
        self.outputs = [r.output for r in ran]
        mine = [request for invoke, request in zip(self.invokes, ran, strict=True) if not invoke.is_elsewhere]
        values = merged(outer, self._saved, self.invokes, ran)
        unsaved = [*block.set_of(outer, values), *_each(mine, "unsaved")]
        push(frame, {**in_place_of(unsaved, values, frame), **values})
        raise_failures(ran)
        _warn(place, self._to_tell(ran, bool(values)))

    def _to_tell(self, ran: list[Ran], came: bool) -> Iterator[str]:
        """Of what has stayed in the trace. `came`: whether anything has come back to the caller's own variables."""
        if counted := sorted({*_each(ran, "counted")}):
            yield _COUNTED.format(names=", ".join(counted), name=counted[0])
        yield from self._left(ran)
        if not self._model._ships:
            return
        outcomes = [outcome for request in ran for outcome in request.outcomes]
        if not (came or any(outcome.values for outcome in outcomes)) and any(outcome.saved for outcome in outcomes):
            yield _NOTHING_SAVED

    def _left(self, ran: list[Ran]) -> Iterator[str]:
        """Where the trace runs in this process, an array or a tensor that it wrote to is the caller's own. What the block around the
        invokes made is for these to share."""
        left = set()
        for invoke, request in zip(self.invokes, ran, strict=True):
            outside = invoke.block.outside if invoke.block is not None else {}
            for name in _each([request], "left"):
                is_filled = issubclass(type(outside.get(name)), (*CONTAINERS, set))
                if (self._model._ships or is_filled) and name.partition(".")[0] not in self._outer:
                    left.add(name.rpartition(".")[2])
        if left:
            yield _LEFT_THERE.format(names=", ".join(sorted(left)), name=min(left))

    def _blocks(self) -> list[Block]:
        return [invoke.block for invoke in self.invokes if invoke.block is not None]

    def _collect(self, block: Block) -> dict[str, Any]:
        """Run the block around the invokes here; each invoke in it takes its own block."""
        self._collecting = True
        extra = {"__save__": self.save, "__steps__": steps_of, **({block.target: self} if block.target else {})}
        try:
            names = block.function()(extra, {})
        except NameError as error:
            if any(error.name in each.assigned for each in self._blocks()):
                error.add_note(_NOT_YET.format(name=error.name))
            raise
        except TraceError as error:
            if not self.invokes:
                raise TraceError(_NO_PROMPT) from error
            raise
        finally:
            self._collecting = False
        if not self.invokes:
            raise TraceError(_NO_PROMPT)
        return names


def _warn(place: tuple[str, int], texts: Iterable[str]) -> None:
    for text in texts:
        warnings.warn_explicit(text, UserWarning, *place)


def _each(ran: list[Ran], names: str) -> list[str]:
    """Names that the requests' bodies tell of: `left`, `unsaved` or `counted`."""
    return [name for request in ran for outcome in request.outcomes[:1] for name in getattr(outcome, names)]


def merged(outer: dict[str, Any], saved: Mapping[int, Any], invokes: list[Invoke], ran: list[Ran]) -> dict[str, Any]:
    """The values to bind in the caller's frame. A name that several invokes saved is the last one's.

    Lists and dicts of the caller's, those that invokes use by name and those `saved` above them, stay the objects that they are, and get
    what invokes have put into them; in the engine, too, these share them.
    """
    values = {name: value for name, value in outer.items() if id(value) in saved}
    above = dict(values)
    order = sorted(
        zip(invokes, ran, strict=True), key=lambda pair: pair[1].outcomes[-1].order if pair[1].outcomes else 0
    )
    for invoke, request in order:
        for name in request.outcomes[0].values if request.outcomes else ():
            samples = [
                o for o in request.outcomes if o.failure is None or name in o.values
            ]  # an edit may have failed beside them
            each = [outcome.values.get(name) for outcome in samples]
            there = _used_by(invoke, name, above)
            if isinstance(there, CONTAINERS):  # which the samples share
                value = max(samples, key=lambda outcome: outcome.order).values.get(name)
            else:
                value = each[0] if len(each) == 1 else each
            if _fill(there, value):
                value = there
            elif "." in name:
                _set_attribute(invoke, name, value)
            if not invoke.is_elsewhere and name.isidentifier():
                values[name] = value
    return values


def _fill(there: Any, value: Any) -> bool:
    """Have a container of the caller's hold what its copy in the engine does; whether it is one."""
    if isinstance(there, list) and isinstance(value, list):
        there[:] = value
    elif isinstance(there, dict) and isinstance(value, dict):
        there.update(value)
    elif isinstance(there, deque) and isinstance(value, deque):
        items = list(value)
        there.clear()
        there.extend(items)
    else:
        return False
    return True


def _set_attribute(invoke: Invoke, name: str, value: Any) -> None:
    """Set `owner.name` of an object of the caller's."""
    owner, _, attribute = name.rpartition(".")
    held = None if invoke.block is None else invoke.block.outside.get(owner)
    if (own := attributes_of(held)) is not None:
        own[attribute] = value


def _used_by(invoke: Invoke, name: str, above: Mapping[str, Any]) -> Any:
    """What the caller has under a name that an invoke uses, and does not bind; or what was saved under it above the invokes."""
    block = invoke.block
    if block is not None and name not in block.assigned and name in (outside := block.outside):
        return outside[name]
    return above.get(name) if not invoke.is_elsewhere else None


def raise_failures(ran: list[Ran]) -> None:
    """Raise what the bodies raised, and what went wrong with plans: the error itself, or a group; `outputs` has what there is."""
    errors = [error for request in ran for error in _errors(request)]
    if not errors:
        return
    several = RequestErrorGroup if any(request.error is not None for request in ran) else InterventionErrorGroup
    error = errors[0] if len(errors) == 1 else _grouped(several, errors)
    error.outputs = [request.output for request in ran]  # type: ignore[attr-defined]
    raise error from error.__cause__


def _grouped(several: Any, errors: list[MidstreamError]) -> MidstreamError:
    """All of them; also an instance of the class that they have in common, so that the `except` for one catches several."""
    text = f"{len(errors)} requests failed, the first: {errors[0]}"
    nothing_new = (*several.__mro__, Exception)
    for shared in type(errors[0]).__mro__:
        if shared not in nothing_new and all(isinstance(error, shared) for error in errors):
            try:
                mixed: Any = type(f"{shared.__name__}Group", (several, shared), {"__module__": several.__module__})
                return mixed(text, errors)  # type: ignore[no-any-return]
            except TypeError:  # a builtin with a layout of its own
                continue
    return several(text, errors)  # type: ignore[no-any-return]


def _errors(request: Ran) -> Iterator[MidstreamError]:
    for outcome in request.outcomes:
        if outcome.failure is not None:
            error = outcome.failure.exception()
            error.saves = outcome.values  # type: ignore[attr-defined]
            yield error
    if request.error is not None:
        yield request.error


def in_with_header(frame: FrameType) -> bool:
    """Whether the call that `frame` is making right now is what a with-statement enters."""
    opcodes = frame.f_code.co_code[frame.f_lasti + 2 :: 2]
    after = list(islice((dis.opname[opcode] for opcode in opcodes if opcode != dis.opmap["CACHE"]), 2))
    return after[:1] in (["BEFORE_WITH"], ["LOAD_SPECIAL"]) or after == ["COPY", "LOAD_SPECIAL"]
