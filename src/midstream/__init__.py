"""Read, change and save a language model's activations in the middle of its forward pass, on stock vLLM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.bundled import demo_model
    from midstream.capture.directory import open_captures
    from midstream.engine.launch import engine_arguments
    from midstream.plan.selections import GeneratedTokens, Subsample
    from midstream.plan.values import (
        Apply,
        Capture,
        Clamp,
        Consumer,
        Knockout,
        Patch,
        Plan,
        Probe,
        RecordedRun,
        Span,
        Steer,
        When,
    )
    from midstream.remote.remote_model import Remote
    from midstream.sae import SAE
    from midstream.sweeps.results import SweepResult
    from midstream.trace.body import save
    from midstream.trace.tracer import backward
    from midstream.transformers.language_model import LanguageModel
    from midstream.vllm.vllm_model import VLLM

__version__ = "0.1.0"
__all__ = [
    "SAE",
    "VLLM",
    "Apply",
    "Capture",
    "Clamp",
    "Consumer",
    "GeneratedTokens",
    "Knockout",
    "LanguageModel",
    "Patch",
    "Plan",
    "Probe",
    "RecordedRun",
    "Remote",
    "Span",
    "Steer",
    "Subsample",
    "SweepResult",
    "When",
    "backward",
    "demo_model",
    "engine_arguments",
    "open_captures",
    "save",
]

_MODULES = {
    "bundled": "demo_model",
    "capture.directory": "open_captures",
    "engine.launch": "engine_arguments",
    "plan.selections": "GeneratedTokens Subsample",
    "plan.values": "Apply Capture Clamp Consumer Knockout Patch Plan Probe RecordedRun Span Steer When",
    "remote.remote_model": "Remote",
    "sae": "SAE",
    "sweeps.results": "SweepResult",
    "trace.tracer": "backward save",
    "transformers.language_model": "LanguageModel",
    "vllm.vllm_model": "VLLM",
}
_HOMES = {name: f"midstream.{module}" for module, names in _MODULES.items() for name in names.split()}

# Names of nnsight's that midstream does not have.
_OTHERS = {
    "NNsight": ": use LanguageModel(module, tokenizer=tokenizer), for a causal language model of transformers'.",
    "CONFIG": ": each call and each model has arguments of its own in its place.",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used, so that `import midstream` takes no time."""
    if name not in _HOMES:
        instead = _OTHERS.get(name, "")
        raise AttributeError(f"module 'midstream' has no attribute {name!r}{instead}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
