"""Writes docs/reference.md: every public name with its signature and docstring.

python scripts/write_reference.py
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """# Reference

Every public name, with its docstring. `scripts/write_reference.py` writes this page; the tests compare it with the code.
"""
MODEL = (
    "trace run generate collect estimate activations record sweep path_patching edge_attribution edit "
    "clear_edits plan num_layers hidden_size vocab_size num_heads num_kv_heads head_dim tokenizer close"
)
# Section -> (the class or function, what stands before its members, those that users call).
SECTIONS = {
    "Models": [
        ("midstream:VLLM", "model", f"{MODEL} explain engine start gauges"),
        ("midstream:LanguageModel", "model", "close"),
        ("midstream:Remote", "model", "record engine_plan gauges close"),
        ("midstream.remote.calls:RemoteOutput", "output", ""),
    ],
    "Plans": [
        *[
            (f"midstream:{name}", "", "")
            for name in ("Steer", "Patch", "Clamp", "Apply", "When", "Knockout", "Probe", "Capture")
        ],
        ("midstream.plan.probes:Scores", "output.scores", "positions indices aggregated"),
        ("midstream:SAE", "sae", "load of capture steer clamp ablate direction encode reconstruct written read nbytes"),
        *[(f"midstream:{name}", "", "") for name in ("Consumer", "Span", "GeneratedTokens", "Subsample")],
        ("midstream:Plan", "plan", "of normal hash"),
        ("midstream:RecordedRun", "run", ""),
        ("midstream.requests.vectors_and_runs:Vectors", "model.vectors", "load"),
        ("midstream.requests.vectors_and_runs:Runs", "model.runs", "listing delete"),
        ("midstream:engine_arguments", "", ""),
    ],
    "Sweeps": [
        (
            "midstream:SweepResult",
            "result",
            "values recovered by_pair standard_error interval baseline effects noise_floor is_noise count best path to_dataframe plot show "
            "save load",
        ),
        ("midstream.sweeps.results:BestCell", "best", ""),
        ("midstream.sweeps.edges:EdgeScores", "edges", "scores best to_dataframe plot"),
        ("midstream.sweeps.sweep_run:SweepStream", "stream", "close"),
        ("midstream.sweeps.events:Cell", "cell", ""),
    ],
    "Around a trace": [("midstream.client.tracing:Tracer", "tracer", "invoke barrier")],
    "Inside of a trace": [
        (
            "midstream.trace.envoy:ModelEnvoy",
            "model",
            "output input inputs source skip logits samples next_token_probs project_on_vocab steer skip_layers",
        ),
        ("midstream.trace.tracer:BodyTracer", "tracer", "all next stop cache"),
        ("midstream:save", "", ""),
        ("midstream:backward", "", ""),
    ],
    "Captures": [
        ("midstream.capture.rows:Captured", "output.captures", "positions"),
        ("midstream:open_captures", "", ""),
        ("midstream.capture.directory:Store", "store", "failed refresh loader to_arrow"),
        ("midstream.capture.loading:Loader", "loader", "state_dict load_state_dict"),
        ("midstream.capture.loading:Batch", "batch", ""),
        ("midstream.capture.loading:Activations", "activations", "close"),
        ("midstream.ray:collect", "", ""),
        ("midstream.features:max_activating", "", ""),
        ("midstream.features:FeatureExamples", "examples", "top_tokens to_dataframe"),
        ("midstream.features:Example", "example", ""),
    ],
    "Figures": [
        *[
            (f"midstream.plots:{name}", "", "")
            for name in ("plot_heatmap", "plot_lines", "plot_logit_lens", "logit_lens", "plot_token_scores")
        ],
        ("midstream.features:plot_examples", "", ""),
        ("midstream.plots:LogitLens", "lens", ""),
    ],
    "The bundled model": [
        (f"midstream.bundled:{name}", "", "") for name in ("demo_model", "demo_facts", "demo_heldout", "demo_contrast")
    ],
    "Evaluations": [
        ("midstream.inspect_ai:MidstreamAPI", "", ""),
        ("midstream.inspect_ai:read_captures", "", ""),
    ],
}


def signature(name: str, value: Any) -> str:
    """Without annotations, which the docstrings say in words."""
    given = inspect.signature(value)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values() if p.name not in ("self", "_")]
    return f"{name}{given.replace(parameters=bare, return_annotation=given.empty)}"


def entry(level: int, title: str, value: Any) -> str:
    return f"{'#' * level} `{title}`\n\n```\n{inspect.cleandoc(value.__doc__ or '')}\n```\n"


def section(title: str, entries: list[tuple[str, str, str]]) -> str:
    parts = [f"## {title}\n"]
    for place, before, members in entries:
        module, _, name = place.partition(":")
        value = getattr(importlib.import_module(module), name)
        parts.append(
            entry(3, before if before not in ("", "model") or name == "ModelEnvoy" else signature(name, value), value)
        )
        for member in members.split():
            each, shown = getattr(value, member), f"{before}.{member}"
            if each.__doc__:
                parts.append(entry(4, signature(shown, each) if callable(each) else shown, each))
    return "\n".join(parts)


def errors() -> str:
    module = importlib.import_module("midstream.errors")
    own = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    return "\n".join(["## Errors\n", *(entry(3, cls.__name__, cls) for cls in own)])


def page() -> str:
    return "\n".join([HEAD, *(section(title, entries) for title, entries in SECTIONS.items()), errors()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
