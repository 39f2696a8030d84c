"""Calls of a model that show a progress bar, and what the bar has counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstream import Capture

PROMPTS = ["The capital of France is", "The capital of Italy is", "The Eiffel Tower is in the city of"]


def first_stream(model: Any) -> Any:
    return model.layers_output[0]


def trace(model: Any, _: Path, **progress: Any) -> Any:
    with model.trace(**progress) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                model.layers_output[0].save()
    return tracer.backend


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda model, _, **progress: model.generate(PROMPTS, max_tokens=2, **progress),
    "run": lambda model, _, **progress: model.run(first_stream, PROMPTS, **progress),
    "trace": trace,
    "collect": lambda model, to, **progress: model.collect(
        PROMPTS, plan=Capture("resid_post", layers=0), to=to, **progress
    ),
}


def counted(written: str) -> list[str]:
    """The last count of each bar in what was written to stderr, such as "3/3"."""
    return [re.findall(r"\d+/\d+", bar)[-1] for bar in written.split("\n") if re.search(r"\d+/\d+ \[", bar)]
