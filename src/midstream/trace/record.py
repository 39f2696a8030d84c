"""Records a trace: its code runs once on stand-ins to find out how it uses the model. `lowering.taper` is the process for that.

    (programs,) = unship(data, model.resolve)           # a copy of the code and its variables
    recording = record(programs[0], model, tokens=7, steps=3)
    recording.steps[0].writes                           # or recording.reason, why the code has to run in the forward

The code gets the same objects as in the forward, `ModelEnvoy` and `BodyTracer`, on a `RecordedBody`. An action that affects the outside
world, or depends on it, ends the recording before it happens.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS

from midstream.arch import Architecture
from midstream.arch.aliases import Aliases
from midstream.errors import TraceError
from midstream.hooks import CURRENT
from midstream.sites import Binding, Key, Point, point_name
from midstream.trace.body import Body, StopTrace, current_body, never_reached, step_is_over
from midstream.trace.code import BlockProgram, FunctionProgram, Outcome, TraceProgram, code_of, outcome
from midstream.trace.devices import showing
from midstream.trace.envoy import AbsentModel, Envoy
from midstream.trace.forward import LAST_POINTS
from midstream.trace.graph import StepGraph, Value, Write, varied_steps
from midstream.trace.parallel import AbsentStage, Peers
from midstream.trace.saves import is_installed, variables_of
from midstream.trace.shipping import CodePickler
from midstream.trace.stand_in import Ended, Notes, SeeingFunctions, SeeingOperations, StandIn, is_plain, kind_of
from midstream.trace.tracer import BodyTracer, Cache
from midstream.trace.weights import Weights
from midstream.tree import map_objects


def _always(one: Point, other: Point) -> bool:
    return True


@dataclass(frozen=True)
class Model:
    """The facts about the model that are known before a trace runs.

    Attributes:
        arch: the places of its sites, and the order in which the forward reaches them.
        modules: path -> class name.
        sites: those that a plan can use inside compiled code.
        dtype, device: of its activations.
        vocab_size: the width of the logits.
        tokenizer, text_config: return the model's tokenizer and its transformers configuration.
        holds_weights: whether its engine can hold large constants, so that requests need not carry them.
        are_together: whether one pipeline stage owns both points.
        recorded: the latest recorded codes, the oldest first (`lowering.taping`).
    """

    arch: Architecture
    modules: Mapping[str, str]
    sites: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    aliases: Aliases = field(default_factory=Aliases)
    tokenizer: Callable[[], Any] = lambda: None
    text_config: Callable[[], Any] = lambda: None
    holds_weights: bool = False
    are_together: Callable[[Point, Point], bool] = _always
    recorded: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)

    @cached_property
    def at(self) -> dict[Key, dict[Binding, Point]]:
        """The sites at each point of the forward."""
        found: dict[Key, dict[Binding, Point]] = {}
        for (site, layer), binding in self.arch.bindings.items():
            if layer is not None:
                found.setdefault((binding.path, binding.kind), {})[binding] = (site, layer)
        return found

    @cached_property
    def values(self) -> dict[Key, Point]:
        """The points of the forward where a module's output or first input is a site's value."""
        return {(path, kind): point for (path, kind), point in self.arch.values.items()}

    @cached_property
    def envoy(self) -> AbsentModel:
        """The model as recorded code sees it."""
        return self.absent(_RecordedForward(self), _unembed, _end)

    def absent(
        self, forward: Any, unembed: Callable[[torch.Tensor], Any], refuse: Callable[[str], NoReturn]
    ) -> AbsentModel:
        """The model for bodies that `forward` runs. The other arguments are those of `AbsentModel`."""
        return AbsentModel(self.arch, forward, unembed, self.tokenizer, self.text_config, refuse)

    def resolve(self, reference: tuple[Any, ...]) -> Any:
        """The object for a reference in a shipped trace."""
        return self.envoy.resolve(reference)


@dataclass
class Recording:
    """The recorded actions of a program.

    Attributes:
        steps: its graphs.
        reason: why it cannot be recorded, with `line`; None if it can.
        outcome: its saved values, with stand-ins in place of tensors; or its error.
        needs_body: whether it does more than write to the model.
        only_saves: whether saving is all that it does apart from reads and writes.
        sizes: every size of a value of the forward that it looks at.
        may_raise: the line of an operation whose errors depend on numbers of the forward.
        watched: the points whose values a cache keeps in all later steps, with the line.
        changes_process: whether it changes the process that runs it. A later recording in the same process may not notice the change.
    """

    steps: list[StepGraph]
    reason: str | None = None
    line: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    needs_body: bool = True
    only_saves: bool = False
    sizes: list[Any] = field(default_factory=list)
    may_raise: int | None = None
    watched: dict[Point, int] = field(default_factory=dict)
    changes_process: bool = False

    @cached_property
    def varied(self) -> int:
        """The number of steps after which every step repeats the step before it (`graph.varied_steps`)."""
        return varied_steps(self.steps)


def record(program: TraceProgram, model: Model, tokens: int, steps: int, has_arrays: bool = False) -> Recording:
    """Run a program's code on stand-ins.

    Args:
        program: a copy, which the run may change.
        tokens: the length of the prompt.
        steps: the number of the request's steps.
        has_arrays: whether the program has numpy arrays.
    """
    notes = Notes(_file_of(program), has_arrays)
    body = RecordedBody(model, notes, tokens, steps)
    modules, codes = _give_kinds(program)
    loaded, settings = len(sys.modules), _settings()
    variables = {name: dict(vars(own)) for name, own in modules.items()}
    printed = _PrintedOutput()
    token = CURRENT.set(body)
    try:
        with _seeing(notes, printed), showing(model.device):
            if (asking := next(filter(_asks_for_time, codes), None)) is not None:
                notes.reason, notes.line = "it asks for the time", asking.co_firstlineno
                raise Ended(notes.reason)
            try:
                body.result = program.run(model.envoy, {})
            except StopTrace as stop:
                body.failure = stop
            body.leave()
    except Ended:
        pass
    except BaseException as error:
        body.failure = error
        notes.reason = notes.reason or f"its code raises {type(error).__name__}"
        notes.line = notes.line or _line_of(error, notes.file)
    finally:
        CURRENT.reset(token)
    changed = next((name for name, value in _settings().items() if value != settings[name]), None)
    if len(sys.modules) == loaded:  # imports may change variables of other modules
        changed = changed or _changed(variables, modules)
    if changed is not None:
        notes.reason = notes.reason or f"it changes {changed}"
    found = outcome(body, program)
    found.order = 0  # a template has no order: its requests have not ended
    kept: list[StandIn] = []

    def noted(each: StandIn) -> StandIn:
        kept.append(each)
        return each

    found.values = map_objects(found.values, StandIn, noted)  # a copy: later recordings fill the same containers
    own = {id(value) for graph in notes.steps for value in graph.values}
    has_others = any(id(each.memory.value) not in own for each in kept)  # values of another body, in a shared container
    returns = not is_plain(found.values)
    if body.has_iterated:  # the request may end earlier
        returns = returns or any(value is not None for value in found.values.values())
    writes_last = any(step.last for step in notes.steps)
    does_more = any((found.stopped, printed.used, body.wants_result, body.watched, writes_last))
    return Recording(
        notes.steps,
        notes.reason,
        notes.line,
        found,
        does_more or returns or bool(body.saves) or body.asks_by_number or notes.may_raise is not None,
        not (does_more or has_others),
        notes.sizes,
        notes.may_raise,
        body.watched,
        changed is not None,
    )


def record_function(
    function: Callable[..., Any], values: Sequence[Value], rows: int | None
) -> tuple[Value | None, str | None, int]:
    """Run a function of tensors on stand-ins.

    Args:
        values: of the stand-ins that it gets. A function that returns None has changed the first of them.
        rows: as of `Notes`.

    Returns:
        what it returns, None if that is no tensor; why it cannot be recorded, None if it can; and the line of its last operation.
    """
    notes = Notes(_file_of(FunctionProgram(function)), True)
    notes.rows = rows
    notes.steps.append(StepGraph(values[0].shape[0]))
    given, printed = [notes.new(value) for value in values], _PrintedOutput()
    found: Any = None
    try:
        with _seeing(notes, printed):
            found = function(*given)
        found = given[0] if found is None else found
        found = notes.value_of(found) if _is_tensor(found) else None
    except Ended:
        pass
    except Exception as error:
        notes.reason = notes.reason or f"it raises {type(error).__name__}: {error}"
        notes.line = notes.line or _line_of(error, notes.file)
    if printed.used:
        notes.reason = notes.reason or "it prints"
    lines = [value.line for value in notes.steps[-1].values if value.line]
    return found, notes.reason, notes.line or (lines[-1] if lines else 0)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (StandIn, torch.Tensor))


@contextlib.contextmanager
def _seeing(notes: Notes, printed: _PrintedOutput) -> Iterator[None]:
    """Record what the code in the block does. Before it acts on the outside world, the recording ends."""
    _watch_events()
    is_installed("")  # reads folders now and caches the result: reading them during the recording would end it
    token = _WATCHED.set(notes)
    try:
        with (
            torch.no_grad(),
            SeeingFunctions(notes),
            SeeingOperations(notes),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            yield
    finally:
        _WATCHED.reset(token)


class _Fingerprint(CodePickler):
    """Pickles code in which the model's objects are those that `Model.resolve` returns."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is str:  # whether two equal texts are one object depends on what else the process has
            return obj.encode(errors="surrogatepass")
        if isinstance(obj, (Envoy, BodyTracer)):
            return type(obj).__name__, getattr(obj, "_path", "")
        return super().persistent_id(obj)


def fingerprint(programs: list[list[TraceProgram]]) -> tuple[bytes, Any] | None:
    """Equal for copies of programs whose variables are equal; None if they cannot be compared."""
    buffer, weights = io.BytesIO(), Weights()
    for program in (each for own in programs for each in own):
        _give_kinds(program)
        if isinstance(program, FunctionProgram):
            with contextlib.suppress(TraceError):
                _ = program._takes_tracer  # cached on the program
    try:
        _Fingerprint(buffer, weights).dump(programs)
        return _without_class_ids(buffer.getvalue()), weights.contents()
    except (Exception, Ended):  # a number of the forward in a variable
        return None


def _without_class_ids(data: bytes) -> bytes:
    """The data with numbers in place of the ids that cloudpickle gives to classes sent by value, since each copy has its own."""
    known = {str(each).encode() for each in _DYNAMIC_CLASS_TRACKER_BY_CLASS.values()}
    numbers: dict[bytes, bytes] = {}

    def numbered(match: re.Match[bytes]) -> bytes:
        return numbers.setdefault(match[0], b"%032d" % len(numbers)) if match[0] in known else match[0]

    return re.sub(rb"[0-9a-f]{32}", numbered, data)


def _settings() -> dict[str, Any]:
    """The settings of the process that code may change, apart from variables."""
    arrays: Any = np.random.get_state()
    return {
        "the random numbers of Python": random.getstate(),
        "the random numbers of numpy": (arrays[1].tobytes(), *arrays[2:]),
        "the random numbers of torch": torch.get_rng_state().numpy().tobytes(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "sys.path": list(sys.path),
        "its tracing": (sys.gettrace(), sys.getprofile()),
    }


def _changed(before: Mapping[str, Mapping[str, Any]], modules: Mapping[str, ModuleType]) -> str | None:
    """The name of the first variable of these modules with another object than before; None if there is none."""
    for module, was in before.items():
        now = vars(modules[module])
        for name in {**was, **now}:
            if name not in was and isinstance(now[name], (ModuleType, FunctionType, type)):
                continue  # imports add modules, and packages that load their parts late add functions and classes
            if name not in was or name not in now or was[name] is not now[name]:
                return f"{module}.{name}"
    return None


def _give_kinds(program: TraceProgram) -> tuple[dict[str, ModuleType], list[CodeType]]:
    """Replace `type` by `kind_of` in a program's functions. Returns the modules among the variables that they use, and their code."""
    modules: dict[str, ModuleType] = {}
    codes: list[CodeType] = []
    program = getattr(program, "program", program)
    seen, rest = set[int](), list[Any]([program.fn] if isinstance(program, FunctionProgram) else [])
    if isinstance(program, BlockProgram):
        program.injected.setdefault("type", kind_of)
        codes.append(program.block.code)
        rest += program.block.captured.values()
    while rest:
        found = rest.pop()
        kind = type(found)  # isinstance might run the object's own code
        if kind is ModuleType:
            modules[found.__name__] = found
        function = found.__func__ if kind is MethodType else found.func if kind is partial else found
        if type(function) is not FunctionType or id(function) in seen:
            continue
        seen.add(id(function))
        codes.append(function.__code__)
        names = function.__globals__
        if vars(sys.modules.get(names.get("__name__", ""), object)) is not names:  # a copy
            names.setdefault("type", kind_of)
        rest += [value for _, value in variables_of(function)]
    return modules, codes


def _asks_for_time(code: CodeType) -> bool:
    """Whether code names a method of `datetime` that reads the clock. Such a call cannot be noticed while the code runs, and the next one
    may give something else.
    """
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return not _OF_TIME.isdisjoint(code.co_names) or any(map(_asks_for_time, inner))


_OF_TIME = frozenset({"now", "today", "utcnow"})


def _file_of(program: TraceProgram) -> str:
    program = getattr(program, "program", program)  # of a standing edit
    code = program.block.code if isinstance(program, BlockProgram) else code_of(program.fn)  # type: ignore[union-attr]
    return code.co_filename if code is not None else ""


def _line_of(error: BaseException, file: str) -> int:
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


# The body, and its access to values.


class RecordedBody(Body):
    """A body whose forward computes nothing. It never waits.

    Attributes:
        watched: as in `Recording`.
    """

    def __init__(self, model: Model, notes: Notes, tokens: int, steps: int) -> None:
        super().__init__("recorded", lambda: None, in_engine=True)
        self.forward, self.neighbours = model.envoy._forward, {}
        self.now, self.ended = 0, steps == 0
        self.notes = notes
        self.watched: dict[Point, int] = {}
        self._model, self._tokens, self._count = model, tokens, steps
        self._visit: _RecordedVisit | None = None
        self._position = -1
        notes.steps.append(StepGraph(tokens))

    @property
    def tokens(self) -> int:
        """The number of tokens in the present step."""
        return self._tokens if self.now == 0 else 1

    def wait_for_step(self, step: int) -> bool:
        if step < self.now:
            raise step_is_over(step, self.now)
        self.step = step
        while self.now < min(step, self._count - 1):
            self.leave()
            self.now, self._position = self.now + 1, -1
            self.notes.steps.append(StepGraph(1))
        self.ended = self.ended or step > self.now
        if self.ended:
            self.leave()
        return not self.ended

    def leave(self) -> None:
        """The code moves on to another point, so its writes at the last one are final."""
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.close()

    def at(self, key: Key) -> Any:
        if self._visit is not None and self._visit.key == key and not self.ended:
            return self._visit
        if self.ended:
            raise never_reached(self.written(key), self.step)
        if key in LAST_POINTS:
            first = last = LAST_POINTS[key]
        elif key in self._model.at:
            first, last = self._model.arch.order[key[0], key[1]]
        else:
            self.notes.end(f"{self.written(key)} is not the value of a site")
        if last <= self._position:
            self.notes.end(f"{self.written(key)} is asked for out of the forward's order")
        self.leave()
        self._position = max(self._position, first)
        self._visit = _RecordedVisit(self, key, self._model)
        return self._visit

    def wait_for_sibling(self) -> NoReturn:
        self.notes.end("it uses a variable of another invoke")

    def wait_at_barrier(self, barrier: object) -> NoReturn:
        self.notes.end("it waits for other invokes")

    def save(self, value: Any) -> Any:
        if isinstance(value, Cache):
            value.__class__ = _RecordedCache
        if not isinstance(value, torch.Tensor):
            self.saves.put(value, value)
            return value
        saved: Any = value.clone()
        if self._visit is not None:
            self._visit.follow(value, saved)
        self.saves.put(value, saved)
        self.saves.put(saved, saved)
        return saved

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def compute_by(self, path: str, given: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The output of a module of the model, or of the unembedding, for a value of the trace."""
        value = Value("module", path, (self.notes.value_of(given),), shape=tuple(shape), dtype=self._model.dtype)
        value.line = self.notes.at()
        return self.notes.new(value)

    def watch(self, key: Key) -> None:
        """Note that a cache gets the values at this point from now on."""
        point = self._model.values.get(key)
        if point is None:
            self.notes.end(f"a cache of {point_name(key)}, which is not the value of a site")
        self.watched[point] = self.notes.at()


def _end(reason: str) -> NoReturn:
    body = current_body()
    assert isinstance(body, RecordedBody)
    body.notes.end(reason)


class _RecordedCache(Cache):
    """A cache that is filled only in the engine."""

    def _unknown(self, *_: Any) -> NoReturn:
        _end("it uses a cache before the request has ended")

    __getitem__ = __contains__ = __len__ = __iter__ = __getattr__ = __eq__ = __bool__ = _unknown  # type: ignore[assignment]
    get = keys = values = items = _unknown  # type: ignore[assignment]


class _RecordedVisit:
    """The values at one point of the forward: the stand-ins that the code has read, and their replacements."""

    def __init__(self, body: RecordedBody, key: Key, model: Model) -> None:
        self.key = key
        self._body, self._notes, self._model = body, body.notes, model
        self._was: dict[Any, Value] = {}  # the values read: of a site, a stream, the logits or the samples
        self._now: dict[Any, torch.Tensor] = {}  # the tensors in their place now
        self._lines: dict[Any, int] = {}  # of assignments
        # Values assigned as copies, with their states at that time.
        self._converted: list[tuple[torch.Tensor, Any]] = []
        self._followed: list[tuple[StandIn, StandIn, int]] = []  # a value, its saved copy, the copy's version
        self._streams: tuple[torch.Tensor, ...] | None = None

    def _read(self, slot: Any, point: Point | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if slot not in self._now:
            value = Value("read", point, shape=shape, dtype=dtype, line=self._notes.at())
            value.part = slot if isinstance(slot, int) else None
            self._now[slot], self._was[slot] = self._notes.new(value), value
            if isinstance(point, tuple):
                self._notes.steps[-1].reads.setdefault(point, value.line)
        return self._now[slot]

    def site(self, binding: Binding) -> torch.Tensor:
        self._settle()
        if self._now and binding not in self._now:
            self._notes.end("it uses the same point in two ways")
        site, layer = point = self._model.at[self.key][binding]
        shape = binding.heads if binding.heads is not None else (self._model.arch.widths[site, layer],)
        return self._read(binding, point, (self._body.tokens, *shape), self._model.dtype)

    def _plain_binding(self) -> Binding | None:
        """The site whose value is the module's output or first input; None if there is none."""
        point = self._model.values.get(self.key)
        return self._model.arch.bindings[point] if point is not None else None

    def raw(self) -> Any:
        """The module's output. Of its inputs only `first` is known."""
        self._settle()
        if self.key == ("", "logits"):
            return self._read("logits", "logits", (1, self._model.vocab_size), self._model.dtype)
        if self.key == ("", "samples"):
            return self._read("samples", "samples", (1,), torch.int64)
        if self.key[1] == "output":
            binding = self._plain_binding()
            return self.site(binding) if binding is not None else self._both_streams()
        self._unknown()

    def _unknown(self) -> NoReturn:
        self._notes.end(f"{point_name(self.key)} is not the value of a site")

    def _both_streams(self) -> tuple[torch.Tensor, ...]:
        """The output of a layer that returns two streams, whose sum is the site's value."""
        for binding, point in self._model.at[self.key].items():
            width = self._model.arch.widths[point]
            is_pair = {binding.hidden, binding.residual} == {(0,), (1,)}
            if not is_pair or self._model.arch.shapes.get(binding.path) != f"([T, {width}], [T, {width}])":
                continue
            if self._streams is None:
                if self._now:
                    self._notes.end("it uses the same point in two ways")
                shape = self._body.tokens, width
                self._streams = tuple(self._read(part, point, shape, self._model.dtype) for part in (0, 1))
            return self._streams
        self._unknown()

    def set_raw(self, value: Any) -> None:
        current = self.raw()
        if isinstance(current, tuple) and isinstance(value, tuple) and len(value) == len(current):
            for part, each in enumerate(value):
                self._replace(part, each)
            self._streams = value
        else:
            self._replace(next(iter(self._now)), value)

    def first(self) -> Any:
        """The module's first argument."""
        binding = self._plain_binding() if self.key[1] == "input" else None
        if binding is None:
            self._unknown()
        return self.site(binding)

    def set_first(self, value: Any) -> None:
        self.first()
        self._replace(next(iter(self._now)), value)

    def _replace(self, slot: Any, value: Any) -> None:
        current = self._now[slot]
        if value is current:
            return
        if not isinstance(value, torch.Tensor) or _shape(value) != _shape(current) or value.dtype != current.dtype:
            self._notes.end(f"a value of another structure, shape or dtype is written to {point_name(self.key)}")
        self._put(slot, value)

    def set_site(self, binding: Binding, value: Any, name: str) -> None:
        current = self.site(binding)
        if value is current:
            return
        if not isinstance(value, torch.Tensor):
            self._notes.end(f"a {type(value).__name__} is written to {name}")
        mine, theirs = _shape(value), _shape(current)
        if mine != theirs or value.dtype != current.dtype:
            self._converted.append((value, self._state(value)))
            if value.dtype != current.dtype:
                value = value.to(current.dtype)
            if len(mine) > len(theirs) or any(n not in (1, m) for n, m in zip(mine[::-1], theirs[::-1], strict=False)):
                self._notes.end(f"a value of another shape is written to {name}")
            value = value.clone() if mine == theirs else value.clone().expand(theirs)
        self._put(binding, value)

    def _put(self, slot: Any, value: torch.Tensor) -> None:
        self._followed.clear()
        self._now[slot], self._lines[slot] = value, self._notes.at()

    def _state(self, value: torch.Tensor) -> Any:
        return value.memory.version if isinstance(value, StandIn) else self._notes.value_of(value)

    def follow(self, value: torch.Tensor, saved: torch.Tensor) -> None:
        """`saved` is a saved copy of `value`. In the forward, a change of the copy changes the activation, too."""
        here = [each.memory for each in self._now.values() if isinstance(each, StandIn)]
        if isinstance(value, StandIn) and isinstance(saved, StandIn) and value.memory in here:
            self._followed.append((value, saved, saved.memory.version))

    def _settle(self) -> None:
        for place, (value, saved, version) in enumerate(self._followed):
            if saved.memory.version != version:
                value.copy_(saved)
                self._followed[place] = value, saved, saved.memory.version

    def close(self) -> None:
        """Note the code's writes."""
        self._settle()
        notes = self._notes
        if any(self._state(value) is not state and self._state(value) != state for value, state in self._converted):
            notes.end(f"a value is changed after it was written to {point_name(self.key)} in another shape or dtype")
        for slot, was in self._was.items():
            held = self._now[slot]
            now = notes.value_of(held)
            if now is was:
                continue
            changed = held.memory.line if isinstance(held, StandIn) else 0
            if isinstance(was.target, str):
                notes.steps[-1].last.append(was.target)
            else:
                notes.steps[-1].writes.append(Write(was.target, was, now, changed or self._lines.get(slot, was.line)))


# The model.


class _RecordedModules(Peers):
    """Applies the model's modules to values of the trace. Only the output's shape is known, and only for norms."""

    def applied(self, path: str, module: Any) -> Any:
        return partial(_apply, path)


def _shape(tensor: torch.Tensor) -> torch.Size:
    """The tensor's sizes, without noting that the code has looked at them."""
    return tensor.meta.shape if isinstance(tensor, StandIn) else tensor.shape


def _apply(path: str, *args: Any, **kwargs: Any) -> Any:
    body: Any = current_body()
    if "Norm" not in body.forward.stage.modules.get(path, "") or len(args) != 1 or kwargs:
        _end(f"{path}(...) is computed where the engine runs")
    return body.compute_by(path, args[0], _shape(args[0]))


def _unembed(hidden: torch.Tensor) -> Any:
    body: Any = current_body()
    return body.compute_by("project_on_vocab", hidden, (*_shape(hidden)[:-1], body.vocab_size))


class _RecordedForward:
    """The parts of `trace.forward.Forward` that exist without a model in this process."""

    stepping = True

    def __init__(self, model: Model) -> None:
        self.stage, self.peers, self.aliases = AbsentStage(model.modules), _RecordedModules(), model.aliases
        self.modules: dict[str, Any] = {}

    def apart(self, body: str, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def watch(self, body: str, key: Key, watcher: Any) -> None:
        current_body().watch(key)  # type: ignore[attr-defined]

    def attribute(self, path: str, module: Any, name: str) -> NoReturn:
        _end(f"{path or 'model'}.{name} is only where the engine runs")

    def __getattr__(self, name: str) -> NoReturn:
        _end("it does more with a module than to read and write its values")


# The outside world.


class _PrintedOutput(io.StringIO):
    """Swallows the code's output: the code prints it when it runs for its request."""

    used = False

    def write(self, text: str) -> int:
        self.used = True
        return len(text)


_WATCHED: ContextVar[Notes | None] = ContextVar("midstream_watched", default=None)
# The beginnings of the names of Python's audit events for acts on the outside world.
_EVENTS = tuple(
    "open os. socket. subprocess. shutil. tempfile. ctypes. urllib. sqlite3. _thread. signal. sys.settrace sys.setprofile".split()
)


@functools.cache
def _watch_events() -> None:
    """Install one audit hook for all recordings, since Python cannot remove it."""

    def watch(event: str, _: Any, act: Any = before_act) -> None:  # a default argument, since globals are gone at exit
        if event.startswith(_EVENTS):
            act(event)

    sys.addaudithook(watch)


def before_act(what: str, watched: Any = _WATCHED) -> None:
    """End the recording, if one is under way, before its code acts on the outside world. An import does not end it."""
    if (notes := watched.get()) is None:
        return
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is None:
        notes.end(f"it acts on the world outside, or depends on it: {what}")
