"""Who takes captured rows: the protocol, and how a `Capture(to=...)` becomes something that follows it.

A directory becomes a `store.DirectorySink`, a callable is called with every piece of rows, and `Consumer("name", **options)`
finds a factory among the installed packages' entry points:

    [project.entry-points."midstream.consumers"]
    mine = "my_package.probes:MyConsumer"        # MyConsumer(**options) gives an object with the methods below

Each runs in a thread of its own, which calls begin, rows and end of the requests in turn, never two at a time. See `sinks`
for what happens when it raises or does not come back.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from midstream.capture.selection import identity
from midstream.errors import CaptureError
from midstream.plan import values
from midstream.plan.fields import nearest
from midstream.plan.layout import Key

GROUP = "midstream.consumers"


@dataclass(frozen=True)
class Collected:
    """What a request of `model.collect` belongs to, as the index of its directory has it.

    Attributes:
        id: the prompt's, by which it is not run again.
        model: its name and dtype.
        plan: a digest of the plan, and of the sampling parameters where generated rows are captured.
    """

    id: str
    model: str
    plan: str


@dataclass(frozen=True)
class CaptureInfo:
    """What a consumer learns about a request before its rows.

    Attributes:
        request_id: the engine's id of the request.
        prompt_token_ids: its prompt.
        prompt_length: positions from here on were generated; the prompt's length unless given (prompts of embeddings).
        engine: tells engines apart that write to one place; the same on all ranks of one.
        stage: which pipeline stage's layers these are, of how many; (0, 1) when one place has them all.
        planes: (site, layer, when) of all rows that will come.
        collected: of a request of `model.collect`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    prompt_length: int = -1
    engine: str = ""
    stage: tuple[int, int] = (0, 1)
    planes: tuple[Key, ...] = ()
    collected: Collected | None = None

    def __post_init__(self) -> None:
        if self.prompt_length < 0:
            object.__setattr__(self, "prompt_length", len(self.prompt_token_ids))


class Consumer(Protocol):
    """What takes captured rows. Derive from it or not; only the methods count.

    An exception from begin, rows or end fails that request's capture, and only that: whoever collects the request's
    result gets a CaptureError, no more of its rows come, and `end` is called with that error (unless begin raised it).
    """

    def begin(self, info: CaptureInfo) -> None:
        """A request starts; its rows follow, between those of other requests."""

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        """Rows `[n, width]` of one site, at these positions; a site's rows come in one piece or in many.

        The tensor is on the CPU, in the model's dtype, and the consumer's own. A site that had no row to give gets one call with
        none. With a further parameter `when` ("before" or "after" the site's edits) a consumer can be given both.
        """

    def end(self, request_id: str, error: Exception | None) -> None:
        """All rows of the request have come; or, with an error, no more will."""

    def close(self) -> None:
        """The engine closes, after the last request."""


class LogConsumer:
    """Logs what is captured, one line per request: `Capture(..., to=(directory, Consumer("log", level="info")))`.

    Options: `level` (default "info"), `logger` (default "midstream.capture").
    """

    def __init__(self, level: str = "info", logger: str = "midstream.capture") -> None:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise CaptureError(
                f"Consumer('log', level={level!r}): the levels are debug, info, warning, error, critical"
            )
        self._level, self._log = number, logging.getLogger(logger)
        self._seen: dict[str, dict[str, tuple[int, int]]] = {}

    def begin(self, info: CaptureInfo) -> None:
        self._seen[info.request_id] = {}

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        seen = self._seen[request_id]
        rows, size = seen.get(site, (0, 0))
        seen[site] = rows + len(positions), size + tensor.nbytes

    def end(self, request_id: str, error: Exception | None) -> None:
        seen = self._seen.pop(request_id, {})
        text = ", ".join(f"{rows} rows of {site} ({size / 1e6:.1f} MB)" for site, (rows, size) in seen.items())
        if error is not None:
            self._log.log(max(self._level, logging.WARNING), "request %s: capture failed: %s", request_id, error)
        else:
            self._log.log(self._level, "request %s: captured %s", request_id, text or "nothing")

    def close(self) -> None:
        pass


class CallableSink:
    """A function as a consumer: `fn(request_id, site, layer, positions, tensor)`, and `when=` if it takes that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.rows = function

    def begin(self, info: CaptureInfo) -> None:
        pass

    def end(self, request_id: str, error: Exception | None) -> None:
        pass

    def close(self) -> None:
        pass


def takes_when(rows: Callable[..., Any]) -> bool:
    """Whether a consumer's `rows` can tell before from after."""
    try:
        parameters = inspect.signature(rows).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return any(parameter.name == "when" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


class Destination(NamedTuple):
    """A consumer before it is made. Equal keys mean the same one."""

    key: tuple[Any, ...]  # of `wanted.identity`
    name: str
    make: Callable[[], Consumer]
    idle: float | None = None  # seconds without requests after which it is closed; None: with the engine
    may_write: bool = True  # to the tensors that it is given


def destination(to: str | Path | values.Consumer | Callable[..., Any]) -> Destination:
    """Where a `Capture(to=...)` goes. Raises CaptureError for a consumer that no installed package has."""
    key = identity(to)
    if isinstance(to, (str, Path)):
        from midstream.capture.directory import DirectorySink  # which is a consumer itself

        path = Path(key[1])
        return Destination(key, f"directory {path}", lambda: DirectorySink(path), idle=60.0, may_write=False)
    if isinstance(to, values.Consumer):
        factory, options = find_consumer(to.name), dict(to.options)
        return Destination(key, f"consumer {to.name!r}", lambda: factory(**options))
    name = getattr(to, "__qualname__", None) or type(to).__qualname__
    return Destination(key, f"callable {name}", lambda: CallableSink(to), idle=1.0)


def find_consumer(name: str) -> Callable[..., Consumer]:
    """The factory that an installed package offers under this name, in the entry point group `midstream.consumers`."""
    offered = metadata.entry_points(group=GROUP)
    found = {entry.value: entry for entry in offered if entry.name == name}
    if len(found) == 1:
        try:
            return next(iter(found.values())).load()
        except Exception as error:
            raise CaptureError(f"consumer {name!r} ({next(iter(found))}) cannot be loaded: {error!r}") from error
    if found:
        raise CaptureError(f"consumer {name!r} is offered by several packages: {sorted(found)}")
    hint = nearest(name, (entry.name for entry in offered))
    raise CaptureError(f"no installed package offers the consumer {name!r} (entry points {GROUP!r}): {hint}")
