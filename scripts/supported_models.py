"""Measures tiny models of vLLM's decoders with `midstream compare` and writes the tables into docs/supported.md.

    python scripts/supported_models.py                # the models without a result, then the tables: seconds for each
    python scripts/supported_models.py llama gpt2     # measure these again
    python scripts/supported_models.py --ranks tp2    # on two tensor-parallel ranks; also pp2

The models are those of tests/support/tiny_models.py and registry_models.py: random weights, four layers. Each runs in a process of
its own, with a limit on its time. `benchmarks/results/models.jsonl` has a line for each model and size: the differences, or the reason why
there are none. So a run that stops goes on with the models that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import registry_models  # noqa: E402
import tiny_models  # noqa: E402
from forked import IMPORTS, forked  # noqa: E402
from ranks import SIZES  # noqa: E402

from midstream.commands import compare  # noqa: E402
from midstream.commands.compare import Comparison, Difference  # noqa: E402
from midstream.sites import LAYER_SITES, MODEL_SITES  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "supported.md", ROOT / "benchmarks" / "results" / "models.jsonl"
PROMPTS = ["The river runs from the mountains to the sea", "The capital of France is"]
ONE = "one"  # the size with a single rank
LIMIT_S = 240  # for one model
QKV = ("attn_q", "attn_k", "attn_v")

Results = dict[tuple[str, str], dict[str, Any]]  # by model and size


# Measuring.


def compared(name: str, size: str) -> dict[str, Any]:
    """The fields of a result. Runs in a process of its own."""
    architecture = registry_models.ALL[name]
    ranks = SIZES[size] if size != ONE else {}
    with tempfile.TemporaryDirectory() as directory, forked(server=False):
        path = tiny_models.build(name, Path(directory), architecture)
        engine = {
            "max_model_len": 256,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.1,
            **ranks,
            **architecture.engine,
        }
        return asdict(compare.compare(str(path), name=name, prompts=PROMPTS, dtype=architecture.dtype, **engine))


def _send_compared(name: str, size: str, log: Path, to: Connection) -> None:
    os.setsid()  # so that the limit ends the engine's processes as well
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        to.send(compared(name, size))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        to.send({"error": f"{type(error).__name__}: {error}"})


def measured(name: str, size: str, logs: Path) -> dict[str, Any]:
    """One line of the results."""
    log = logs / f"{name}-{size}.log"
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send_compared, args=(name, size, log, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LIMIT_S) else {"error": f"no result after {LIMIT_S} s"}
    except EOFError:
        process.join(10)
        found = {"error": f"the process died with exit code {process.exitcode}"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    import vllm

    date, version = str(datetime.date.today()), vllm.__version__.partition("+")[0]
    return {"name": name, "ranks": size, "date": date, "vllm": version, **found}


def read_results() -> Results:
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {(line["name"], line["ranks"]): line for line in map(json.loads, lines)}


def write_results(results: Results) -> None:
    """One line each, in the order of the models."""
    order = list(registry_models.ALL)
    lines = sorted(results.values(), key=lambda line: (order.index(line["name"]), line["ranks"]))
    RESULTS.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def measure(names: list[str], size: str) -> None:
    import importlib

    import vllm.model_executor.models.registry as registry

    for module in IMPORTS:  # once, for all the processes
        importlib.import_module(module)
    registry._run_in_subprocess = lambda fn: fn()  # vLLM looks at every model class in a process of its own: 10 s each
    logs = Path(tempfile.mkdtemp(prefix="supported_models-"))
    for name in names:
        line = measured(name, size, logs)
        write_results({**read_results(), (name, size): line})
        said = line.get("error") or str(comparison(line).largest())
        print(f"{name}: {said[:300]}", file=sys.stderr, flush=True)
    print(f"The output of each model is in {logs}.", file=sys.stderr)


# The tables.


def comparison(line: dict[str, Any]) -> Comparison:
    """The comparison in a result without an error."""
    found = {entry: Difference(**difference) for entry, difference in line["differences"].items()}
    return Comparison(line["name"], line["architecture"], line["route"], tuple(line["sites"]), found)


def largest(line: dict[str, Any] | None) -> str:
    """The largest difference of a size; an empty text if it was not measured."""
    if line is None:
        return ""
    return f"{line['largest']:.1e}" if "largest" in line else str(comparison(line).largest())


def together(row: Comparison, entries: tuple[str, ...]) -> str:
    """The largest of several differences; why there is none, if one is missing."""
    notes = [row.differences[entry].note for entry in entries if row.differences[entry].value is None]
    return notes[0] if notes else str(row.largest(entries))


def summary(results: Results, names: list[str]) -> str:
    sites = [site for site in (*LAYER_SITES, *MODEL_SITES) if site not in ("logits", "samples")]
    reads = tuple(entry for entry in compare.READS if entry not in (*QKV, compare.PROBABILITIES, "router"))
    titles = [
        "model",
        "transformers class",
        "route in vLLM",
        "sites",
        "reads",
        "edits",
        "q, k, v",
        "probabilities",
        "router",
        "TP=2",
        "PP=2",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in names:
        row = comparison(results[name, ONE])
        own = [site for site in sites if site != "router" or site in row.sites]  # only a mixture of experts has routers
        lacking = [site for site in own if site not in row.sites]
        many = len(lacking) > len(own) // 2
        have = ", ".join(f"`{site}`" for site in (row.sites if many else lacking))
        have = f"only {have}" if many else f"all but {have}" if have else "all"
        cells = [
            name,
            f"`{row.architecture}`",
            row.route,
            have,
            str(row.largest(reads)),
            str(row.largest(tuple(compare.EDITS))),
        ]
        cells += [together(row, entries) for entries in (QKV, (compare.PROBABILITIES,), ("router",))]
        cells += [largest(results.get((name, size))) for size in ("tp2", "pp2")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def class_of(name: str) -> str:
    """The model's class in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    return CLASSES[registry_models.ALL[name].model_type]


def reasons(results: Results, names: list[str]) -> str:
    """The other decoders of vLLM's registry, and why there are no numbers."""
    import transformers
    import vllm.model_executor.models.registry as registry

    further = registry._TRANSFORMERS_SUPPORTED_MODELS.items()
    decoders = {
        **registry._TEXT_GENERATION_MODELS,
        **{name: place for name, place in further if "MultiModal" not in place[1]},
    }
    covered = {class_of(name): name for name in reversed(names)}  # the first name of each class
    code = {
        decoders[cls]: name for cls, name in covered.items() if cls in decoders and decoders[cls][0] != "transformers"
    }
    code[decoders["PhiMoEForCausalLM"]] = "phimoe"
    lines = ["| class | reason |", "|---|---|"]
    failed = {class_of(name): name for name in registry_models.ALL if (name, ONE) in results and name not in names}
    for cls, name in failed.items():
        reason = registry_models.REASONS.get(name) or results[name, ONE].get("error") or "it differs from transformers"
        lines.append(f"| `{cls}` | {' '.join(reason.split())} |")
    for cls, place in decoders.items():
        if cls in covered or cls in failed:
            continue
        said = f"transformers {transformers.__version__} has no class for it to compare with"
        lines.append(
            f"| `{cls}` | {f'vLLM runs it with the code of {code[place]}, in the table above' if place in code else said} |"
        )
    return "\n".join(lines)


def tables(results: Results) -> dict[str, str]:
    """The tables by their marks in the page. A model whose values differ has a reason, and is in no table of numbers."""
    names = [
        name
        for name in registry_models.ALL
        if "differences" in results.get((name, ONE), {}) and name not in registry_models.REASONS
    ]
    rows = [comparison(results[name, ONE]) for name in names]
    lines = [results[name, ONE] for name in names]
    dates, versions = sorted({line["date"] for line in lines}), sorted({line["vllm"] for line in lines})
    ranks = sorted({line["date"] for (_, size), line in results.items() if size != ONE})
    measured_on = (
        f"Measured {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} on vLLM {', '.join(versions)}, CPU, float32; on two ranks "
        f"{' to '.join(dict.fromkeys([ranks[0], ranks[-1]]))}."
    )
    said: dict[str, list[str]] = {}
    for name, note in registry_models.NOTES.items():
        said.setdefault(note, []).extend([name] if name in names else [])
    notes = [f"- {', '.join(those)}: {note}" for note, those in said.items() if those]
    return {
        "summary": "\n".join([measured_on, "", summary(results, names), "", *notes]),
        "unsupported": reasons(results, names),
        "reads": compare.markdown_table(rows, tuple(compare.READS)),
        "edits": compare.markdown_table(rows, tuple(compare.EDITS)),
    }


def write_tables(results: Results) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for part, table in tables(results).items():
        between = re.compile(rf"(<!-- {part} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = between.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
        assert count == 1, f"{PAGE} has {count} places for the table {part!r}"
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="models to measure again; those without a result if none is given"
    )
    parser.add_argument("--ranks", default=ONE, choices=[ONE, "tp2", "pp2"], help="the engine's ranks")
    parser.add_argument("--tables", action="store_true", help="write the tables and measure nothing")
    arguments = parser.parse_args()
    known = read_results()
    without = [name for name in registry_models.ALL if (name, arguments.ranks) not in known]
    if not arguments.tables:
        measure(arguments.names or without, arguments.ranks)
    write_tables(read_results())


if __name__ == "__main__":
    main()
