"""All of midstream's errors. Each message says what was given, and how to correct it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def text_of(error: BaseException) -> str:
    """The error's message, even if its class cannot make one."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its message cannot be read: {type(failure).__name__})"


class MidstreamError(Exception):
    """Base of all midstream errors.

    Attributes:
        field: the wrong argument, or the wrong part of it: `layers`, `Steer.vector`, `interventions[0].vector`. From a server, the error's
            `param`.
    """

    field: str | None = None

    def __init__(self, *args: Any, field: str | None = None) -> None:
        super().__init__(*args)
        self.field = field or self.field


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Set the `field` of midstream's errors in the block. Errors about a plan's interventions keep their place in it."""
    try:
        yield
    except MidstreamError as error:
        own = error.field or ""
        error.field = f"{field}.{own}" if own.startswith("interventions") else field
        raise


class UnsupportedVersionError(MidstreamError):
    """The installed vLLM is outside the supported range."""


class UnguardedScriptError(MidstreamError, SystemExit):
    """The script starts an engine when it is imported, and each process of the engine imports it.

    If nothing catches it, Python prints the message without a traceback and ends with status 1.
    """

    def __init__(self) -> None:
        super().__init__(
            'Start the engine under `if __name__ == "__main__":`. Its processes import this script, and without that line each of them '
            "would start an engine."
        )
        self.code = str(self)


class ArchitectureError(MidstreamError):
    """midstream cannot find the model's sites, which it reports when the model is loaded; or it does not support a part of the model that
    a feature needs, such as `attention_probabilities`.
    """


class UnknownSiteError(MidstreamError, LookupError):
    """The site does not exist on this architecture, or the layer is out of range."""


class UnknownModuleError(MidstreamError, AttributeError):
    """No module has this path. The message names the nearest ones."""


class TraceError(MidstreamError):
    """A trace cannot run as it is written."""


class SourceUnavailableError(TraceError):
    """The source of a with-block cannot be found; `model.run(fn, prompt)` needs none."""


class UnsavedError(TraceError, NameError):
    """A value that the trace set but did not save is used after the trace."""


class OutOfOrderError(TraceError):
    """The trace asked for a value that the forward pass has already passed."""


class NeverReachedError(TraceError):
    """The request or the step ended before the forward pass reached the value that the trace waited for."""


class StageFailedError(NeverReachedError):
    """The trace failed on another pipeline stage, whose own error gives the reason."""


class StageMismatchWarning(UserWarning):
    """A saved value differs between pipeline stages, all of which run the trace's code."""


class ShapeError(TraceError, ValueError):
    """A value written to a site has another shape than the site."""


class DivergedError(TraceError):
    """A trace's body behaved differently on different tensor-parallel ranks."""


class BarrierError(TraceError):
    """Invokes wait for each other at a barrier that not all of them can reach."""


class PromptError(MidstreamError, ValueError):
    """A prompt that the model cannot take, such as an empty or too long one; or an answer that is not one token.

    Attributes:
        number, name: which of several prompts it is, counted from 0, and its id if it has one.
        reason: "empty", "too long", "out of the vocabulary" or "not a prompt".
    """

    field = "prompt"
    number: int | None = None
    name: str | None = None
    reason: str = "not a prompt"

    def __init__(self, *args: Any, field: str | None = None, reason: str | None = None) -> None:
        super().__init__(*args, field=field)
        self.reason = reason or self.reason

    def __str__(self) -> str:
        text = super().__str__()
        named = "" if self.name is None else f", with the id {self.name!r}"
        return text if self.number is None else f"prompts[{self.number}]{named}: {text}"


class ParameterError(MidstreamError, ValueError):
    """An argument or a sampling parameter that does not exist, or a value that it does not take."""


class PlanError(MidstreamError, ValueError):
    """A plan, or a field of one, that cannot be carried out. The message names the field, the given value and the allowed ones."""


NOT_FINITE = "Not finite: "  # every message of `NotFiniteError` begins with it, also where only the text arrives


class NotFiniteError(PlanError, TraceError):
    """A plan or a trace made a request's activations infinite or NaN. The message names site, layer and position."""


class CaptureError(MidstreamError):
    """Captured rows are incomplete, or a consumer of them failed."""


class NotCapturedError(CaptureError, KeyError):
    """The captures lack this request, site or layer. The message names the nearest ones."""

    __str__ = Exception.__str__  # a KeyError's would quote the message


class EngineClosedError(MidstreamError):
    """The engine was closed, or died."""


class RemoteError(MidstreamError):
    """A server cannot be reached, has refused a request, or was lost.

    Attributes:
        outputs: if the server was lost during requests, the outputs of those that had finished, and None for the others.
        saves: the values that each request had saved by then, by name.
    """

    outputs: list[Any] = []
    saves: list[Any] = []


class ChannelError(MidstreamError):
    """The results channel between the workers and the client failed."""


class ChannelClosedError(ChannelError):
    """Sending and receiving have ended: one end of the channel was closed, or died."""


class UnsendableError(ChannelError):
    """Stands in a result for a value that could not be sent or rebuilt. The channel does not raise it."""

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(type_name, reason)
        self.type_name = type_name
        self.reason = reason

    def __str__(self) -> str:
        return f"a value of type {self.type_name} could not be sent to the client ({self.reason}); save data instead"


class TracesNotAllowedError(MidstreamError):
    """The engine was started without traces allowed: it takes plans only."""


class InterventionError(MidstreamError):
    """The trace's own code raised.

    The error's class is a subclass of both this class and the exception's own builtin type, so `except ValueError` in the caller works. The
    text ends with the user's own traceback.
    """


class InterventionErrorGroup(InterventionError, ExceptionGroup):
    """Several invokes of one trace raised. `exceptions` holds each error once, and `failures` every invoke's, by its number."""


class RequestErrorGroup(MidstreamError, ExceptionGroup):
    """Several requests of one call failed. `exceptions` holds each error once, `failures` every request's, by its number, and `outputs` the
    outputs of all requests so far."""
