"""A trace's code, a with-block or a function, and its outcome: the values that it brings back, or its error."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import linecache
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch

from midstream.errors import InterventionError, MidstreamError, StageFailedError, TraceError, text_of
from midstream.trace.block import Block, locals_at
from midstream.trace.body import ENDS, Body, StopTrace, current_body, save
from midstream.trace.containers import Callers, Changes, all_is_saved, attributes_of, contents
from midstream.trace.saves import ORIGINALS, Saves, variables_of
from midstream.trace.tracer import BodyTracer, backward, steps_of
from midstream.tree import map_tensors

RETURNED = "return"  # the name of a function's return value among the saved values
STOPPED = "trace:stop"  # the stop reason of a request that `tracer.stop()` has ended
# The name, among the saved values, of the new contents of the caller's containers: see `Changes.left`.
LEFT = "trace:left"


@dataclass
class Found:
    """The values that a trace brings back, and the names of those that it does not.

    Attributes:
        values: the saved values by name.
        mutated: names of the caller's containers and tensors that the trace has changed and not saved.
        unsaved: names that it has set and not saved.
        rebound: names of the caller's numbers and texts that it has set to other values and not saved.
    """

    values: dict[str, Any] = field(default_factory=dict)
    mutated: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    rebound: list[str] = field(default_factory=list)


class TraceProgram:
    """One invoke's code.

    Attributes:
        is_standing: whether it runs in every step of a request.
    """

    is_standing = False

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        """Run in the current body."""
        raise NotImplementedError

    def recover(self, error: BaseException, body: Body) -> Found:
        """The values saved before `run` raised."""
        raise NotImplementedError

    def snapshot(self, body: Body) -> dict[str, Any]:
        """The values saved so far, while `run` is parked."""
        return {}


@dataclass
class FunctionProgram(TraceProgram):
    """`fn(model)` or `fn(model, tracer)`. Its return value comes back."""

    fn: Callable[..., Any]

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        body, callers = current_body(), Callers(self.outside)
        entry = callers.states()
        arguments = (model, BodyTracer()) if self._takes_tracer else (model,)
        returned = self.fn(*arguments)
        values = map_tensors(returned, lambda _, t: body.save(t))
        back = {id(value) for value in contents([returned])}
        return Found({RETURNED: values}, Changes(callers, entry, Saves(), back).mutated)

    @property
    def outside(self) -> dict[str, Any]:
        """The variables from outside that the function uses, by name."""
        fn, used = self.fn, dict[str, Any]()
        while isinstance(fn, functools.partial):
            used |= inspect.signature(fn.func).bind_partial(*fn.args, **fn.keywords).arguments
            fn = fn.func
        fn = inspect.unwrap(fn)
        used |= attributes_of(getattr(fn, "__self__", fn)) or {}
        fn = getattr(fn, "__func__", fn)
        if type(fn) is FunctionType:
            given = inspect.signature(fn).parameters.values()
            used = {p.name: p.default for p in given if p.default is not p.empty} | dict(variables_of(fn)) | used
        return used

    @functools.cached_property
    def _takes_tracer(self) -> bool:
        parameters = inspect.signature(self.fn).parameters.values()
        required = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(required) not in (1, 2):
            raise TraceError(f"{self.fn!r} must take (model) or (model, tracer).")
        return len(required) == 2

    def recover(self, error: BaseException, body: Body) -> Found:
        return Found(body.saves.pick(locals_at(error, code_of(self.fn))))


def code_of(fn: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    fn = inspect.unwrap(plain_function(fn))
    code: CodeType | None = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return code


@dataclass
class BlockProgram(TraceProgram):
    """A with-block. Its saved variables come back.

    Attributes:
        injected: the names whose values differ where the block runs, with these values: the tracer.
        saved: captured names whose object was saved above the block.
    """

    block: Block
    injected: dict[str, Any]
    saved: list[str] = field(default_factory=list)

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        body = current_body()
        body.entry = self.block.callers.states()
        for name in self.saved:
            body.save(self.block.captured[name])
        injected = {**self.injected, "__save__": save, "__backward__": backward, "__steps__": steps_of}
        names = self.block.function()(injected, shared, body.wait_for_sibling)
        saved, changes = self._saved(body, names)
        mutated = [name for name in changes.mutated if name not in saved]
        rebound = [name for name, v in names.items() if name not in saved and self._is_rebound(name, v)]
        return Found(_with_left(saved, changes), mutated, self._unsaved(names, saved), rebound)

    def _is_rebound(self, name: str, value: Any) -> bool:
        """Whether the block has read a number or text of the caller's and set its name to another value."""
        before = self.block.captured.get(name)
        return isinstance(before, (int, float, complex, str)) and value is not before

    def _unsaved(self, names: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        return [name for name in names if name not in saved and name not in self.block.captured]

    def recover(self, error: BaseException, body: Body) -> Found:
        names = locals_at(error, self.block.code)
        saved, changes = self._saved(body, names)
        return Found(_with_left(saved, changes), unsaved=self._unsaved(names, saved))

    def snapshot(self, body: Body) -> dict[str, Any]:
        frame = body.frame_of(self.block.code)
        return self._saved(body, frame.f_locals if frame is not None else {})[0]

    def _saved(self, body: Body, names: Mapping[str, Any]) -> tuple[dict[str, Any], Changes]:
        """The saved values among the block's names, the values from outside, and the attributes that it has set on objects from outside.

        A container from outside comes back if the block has changed it and it contains a saved value. A container that the block made comes
        back if all tensors in it were saved. Also returns all changes of the caller's objects.
        """
        outside = {name: value for name, value in self.block.outside.items() if name not in self.injected}
        changes = Changes(self.block.callers, body.entry or self.block.callers.states(), body.saves)
        if not body.saves:
            return {}, changes
        made = {n: v for n, v in names.items() if v is not outside.get(n) and all_is_saved(v, body.saves)}
        return {**made, **changes.filled, **changes.bound, **body.saves.pick({**outside, **names})}, changes


def _with_left(saved: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The saved values, and what the code has left in its copies of the caller's objects."""
    left = changes.left(saved)
    return saved if left is None else {**saved, LEFT: left}


def plain_function(fn: Any) -> Any:
    """The function inside a partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


class StandingEdit(TraceProgram):
    """A program that runs in every step of every request, or once for each request if it iterates over the steps itself.

    Attributes:
        has_name: whether requests can exclude it by its name.
    """

    is_standing = True

    def __init__(self, program: TraceProgram, has_name: bool) -> None:
        self.program, self.has_name = program, has_name

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        """The values that it saved. A name that was saved in several steps has a list with a value for each."""
        saved: dict[str, list[Any]] = {}
        body, step = current_body(), 0
        while not body.has_iterated and body.wait_for_step(step):
            for name, value in without_left(self.program.run(model, {}).values).items():
                saved.setdefault(name, []).append(value)
            step += 1
        return Found({name: values if len(values) > 1 else values[0] for name, values in saved.items()})

    def recover(self, error: BaseException, body: Any) -> Found:
        return Found()


# Outcomes.


def without_left(values: Mapping[str, Any]) -> dict[str, Any]:
    """The saved values alone."""
    return {name: value for name, value in values.items() if name != LEFT}


@dataclass
class Failure:
    """An exception of a body, in a form that can be sent.

    Attributes:
        error: the exception itself if it is midstream's and can be pickled.
        bases: the names of its builtin base classes, nearest first.
        frames: (file, line, function, text) of the user's own frames.
        secondary: whether it only reports that another pipeline stage failed.
    """

    error: BaseException | None
    type_name: str
    bases: list[str]
    message: str
    frames: list[tuple[str, int, str, str]]
    secondary: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        own = isinstance(error, MidstreamError)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _internal(f.filename)]
        builtin = [b.__name__ for b in type(error).__mro__ if b.__module__ == "builtins" and b is not object]
        return cls(
            error=error if own and _picklable(error) else None,
            type_name=type(error).__name__,
            bases=builtin,
            message=text_of(error) + _hint(error),
            frames=[(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames],
            secondary=isinstance(error, StageFailedError),
        )

    def text(self) -> str:
        """A traceback with the user's own lines only."""
        lines = ["Traceback (most recent call last), in the trace:"]
        for filename, number, name, line in self.frames:
            lines.append(f'  File "{filename}", line {number}, in {name}')
            if shown := line or linecache.getline(filename, number).strip():
                lines.append(f"    {shown}")
        return "\n".join([*lines, f"{self.type_name}: {self.message}"])

    def exception(self) -> MidstreamError:
        """The exception to raise at the client: midstream's own error, or an InterventionError for any other."""
        if isinstance(self.error, MidstreamError):
            self.error.add_note(self.text())
            return self.error
        return _mixed_with(self.bases, f"{self.type_name}: {self.message}\n\n{self.text()}")


# Builtin exceptions that mean something to the interpreter, generators or event loops.
_SPECIAL = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit")


def _mixed_with(bases: list[str], text: str) -> InterventionError:
    for name in bases:
        base = getattr(builtins, name, None)
        if name in ("BaseException", "Exception", *_SPECIAL) or base is None:
            break
        try:
            mixed: Any = type(
                f"Intervention{name}", (InterventionError, base), {"__module__": InterventionError.__module__}
            )
            return mixed(text)  # type: ignore[no-any-return]
        except TypeError:  # the builtin's memory layout excludes other bases, or its constructor takes more than a text
            continue
    return InterventionError(text)


# Part of an error's text -> the hint to add.
_HINTS = {
    "'tuple' object has no attribute": " A module's output may be a tuple: on vLLM a layer returns its hidden states and the "
    "residual stream. `model.layers_output[3]` is one tensor on every model.",
    "does not require grad and does not have a grad_fn": " A trace on LanguageModel records gradients if its code, or a function that it "
    "calls by name, asks for one. To ask for them, write `with torch.enable_grad():` around this line. Engines compute none.",
    "LMHead's weights should be used in the sampler": " Write `model.project_on_vocab(h)`, which has the final norm, or "
    "`h @ model.lm_head.weight.T`.",
    "backward through the graph a second time": " The invokes of a trace are one batch with one graph, which the first backward frees. "
    "Add the losses and call backward once, or call backward(retain_graph=True) in each invoke but the last.",
}


def _hint(error: BaseException) -> str:
    if isinstance(error, AttributeError) and error.name == "save":
        return ". `.save()` works only in a with-block: write `midstream.save(value)` in a function."
    text = text_of(error)
    return next((hint for said, hint in _HINTS.items() if said in text), "")


def _internal(filename: str) -> bool:
    return f"{__name__.split('.')[0]}/trace/" in filename.replace("\\", "/") or "/site-packages/" in filename


def _picklable(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


@dataclass
class Outcome(Found):
    """The result of one request's trace.

    Attributes:
        stopped: whether the body called `tracer.stop()`.
        order: numbers the outcomes. The one with the largest number has the last contents of the caller's objects.
        name: of the body.
        steps: in how many steps the body took part.
        saved: whether the body has saved any value, even one that has no name to come back under.
    """

    failure: Failure | None = None
    stopped: bool = False
    order: int = 0
    name: str = ""
    steps: int = 0
    saved: bool = False


def outcome(body: Body, program: TraceProgram) -> Outcome:
    """The result of a body that is done."""
    error, order = body.failure, body.order
    if error is None:
        found = body.result or Found()
    else:  # its variables as they are now
        found, order = program.recover(error, body), next(ENDS)
    failure = Failure.of(body.error) if body.error is not None else None
    _give_callers_classes(found.values)
    return Outcome(
        **vars(found),
        failure=failure,
        stopped=isinstance(error, StopTrace),
        name=body.name,
        steps=body.now + 1,
        saved=bool(body.saves),
        order=order,
    )


def _give_callers_classes(values: Any) -> None:
    """Turn objects of copied classes into objects of the original classes, at any depth. Code that runs on copies makes objects of copied
    classes.
    """
    if not ORIGINALS:
        return
    seen, rest = set[int](), [values]
    while rest:
        value = rest.pop()
        kind = type(value)
        if (original := ORIGINALS.get(kind)) is not None:
            with contextlib.suppress(TypeError):  # the class has a memory layout of its own
                object.__setattr__(value, "__class__", original)
        if id(value) in seen or issubclass(kind, (str, bytes, int, float, torch.Tensor)):
            continue
        seen.add(id(value))
        if issubclass(kind, dict):
            rest += [*dict.keys(value), *dict.values(value)]
        elif issubclass(kind, (list, tuple, set, frozenset, deque)):
            rest += kind.__iter__(value)
        rest += (attributes_of(value) or {}).values()
        if original is not None:
            slots = getattr(original, "__slots__", ())
            rest += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
