"""What takes captured rows: the protocol of consumers, the consumers that come with midstream, and those of installed packages.

`Consumer("name", **options)` in a plan is made by a factory among the installed packages' entry points:

    [project.entry-points."midstream.consumers"]
    mine = "my_package.probes:MyConsumer"        # MyConsumer(**options) returns an object with the methods of RowConsumer

Each consumer has a thread of its own, which calls begin, rows and end of the requests one after the other. `sinks` says what
happens when a consumer raises or stalls.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import torch

from midstream.errors import CaptureError
from midstream.plan.captures import Key
from midstream.plan.fields import nearest

GROUP = "midstream.consumers"


@dataclass(frozen=True)
class Collected:
    """Identifies a request of `model.collect` in the index of its directory.

    Attributes:
        id: the prompt's id; a prompt whose id is listed is not run again.
        model: the model's name and dtype.
        plan: a digest of the plan, and of the sampling parameters if generated rows are captured.
    """

    id: str
    model: str
    plan: str


@dataclass(frozen=True)
class CaptureInfo:
    """What a consumer is told about a request before its rows.

    Attributes:
        request_id: the engine's id of the request.
        prompt_token_ids: the prompt.
        prompt_length: positions from here on were generated. The length of `prompt_token_ids` if not given; prompts of
            embeddings have no ids.
        engine: tells engines apart that write to one directory; the same on all ranks of an engine.
        stage: the pipeline stage whose layers these are, and the number of stages; (0, 1) if all layers come together.
        planes: (site, layer, when) of all rows that will come.
        collected: for a request of `model.collect`.
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


class RowConsumer(Protocol):
    """Takes captured rows. Deriving from this class is optional.

    An exception from begin, rows or end fails that request's capture only: the request's result is a CaptureError, no more of
    its rows come, and `end` is called with that error (unless begin raised it).
    """

    def begin(self, info: CaptureInfo) -> None:
        """A request starts; its rows follow, between those of other requests."""

    def rows(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        """Rows `[n, width]` of one site at these positions. A site's rows come in one call or in several.

        The tensor is on the CPU, in the model's dtype, and belongs to the consumer. A site without rows gets one call with an
        empty tensor. A consumer whose method has another parameter `when` ("before" or "after" the site's edits) can take both.
        """

    def end(self, request_id: str, error: Exception | None) -> None:
        """All rows of the request have come; with an error, no more will come."""

    def close(self) -> None:
        """The engine closes. Called after the last request."""


class LogConsumer:
    """Logs one line per request: `Capture(..., to=(directory, Consumer("log", level="info")))`.

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
    """A function as a consumer: `fn(request_id, site, layer, positions, tensor)`, with `when=` if it has that parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.rows = function

    def begin(self, info: CaptureInfo) -> None:
        pass

    def end(self, request_id: str, error: Exception | None) -> None:
        pass

    def close(self) -> None:
        pass


def takes_when(rows: Callable[..., Any]) -> bool:
    """Whether a consumer's `rows` has the parameter `when`."""
    try:
        parameters = inspect.signature(rows).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return any(parameter.name == "when" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


class Destination(NamedTuple):
    """A consumer that may not have been made yet. Equal keys mean the same consumer."""

    key: tuple[Any, ...]  # see `rows.identity`
    name: str
    make: Callable[[], RowConsumer]
    idle: float | None = None  # seconds without requests after which it is closed; None: it closes with the engine
    may_write: bool = True  # to the tensors that it is given


def find_consumer(name: str) -> Callable[..., RowConsumer]:
    """The factory that an installed package offers under this name, in the entry point group `midstream.consumers`.

    Raises CaptureError if there is none, or several.
    """
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
