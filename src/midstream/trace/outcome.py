"""The outcome of a trace: its error, and its saved values, in which the request's output replaces `tracer.result`."""

from __future__ import annotations

import builtins
import linecache
import pickle
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from midstream.errors import InterventionError, MidstreamError, StageFailedError, text_of
from midstream.trace.body import Body, StopTrace
from midstream.trace.code import Found, TraceProgram
from midstream.trace.shipping import give_callers_classes
from midstream.trace.tracer import Result
from midstream.tree import map_objects

STOPPED = "trace:stop"  # the stop reason of a request that `tracer.stop()` has ended


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
    "LMHead's weights should be used in the sampler": " Write `model.project_on_vocab(h)`, which has the final norm, or "
    "`h @ model.lm_head.weight.T`.",
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
        order: counts the outcomes of an engine, so that the last of several is known.
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
    error = body.failure
    found = (body.result or Found()) if error is None else program.recover(error, body)
    failure = Failure.of(body.error) if body.error is not None else None
    give_callers_classes(found.values)
    return Outcome(
        **vars(found),
        failure=failure,
        stopped=isinstance(error, StopTrace),
        name=body.name,
        steps=body.now + 1,
        saved=bool(body.saves),
    )


def put_results(outcomes: Iterable[Outcome], output: Any) -> MidstreamError | None:
    """Replace `tracer.result` in saved values by the request's output. Returns the error for a part that the output lacks."""
    failed: list[MidstreamError] = []

    def found(result: Result) -> Any:
        try:
            return result.of(output)
        except MidstreamError as error:
            failed.append(error)
            return None

    for each in outcomes:
        each.values = map_objects(each.values, Result, found)
    return failed[0] if failed else None
