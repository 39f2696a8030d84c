"""What a worker tells the scheduler with a step's output."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """Requests that end with this step.

    Attributes:
        stops: those whose trace said so; the token of this step is their last.
        errors: those whose plan the worker cannot honour, with the reason.
    """

    stops: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
