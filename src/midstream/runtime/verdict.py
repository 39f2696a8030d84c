"""What a worker tells the scheduler with a step's output, and the scheduler the workers of a request's end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Verdict:
    """Requests that end with this step.

    Attributes:
        stops: those whose trace said so; the token of this step is their last.
        errors: those whose plan the worker cannot honour, or whose activations are no longer finite, with the reason.
    """

    stops: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class End(NamedTuple):
    """The end of a request.

    Attributes:
        tokens: how many it had, prompt included.
        error: why the engine ended it, if it did.
    """

    tokens: int
    error: str | None = None
