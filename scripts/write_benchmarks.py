"""Writes the tables of figures in the README, docs/benchmarks.md and benchmarks/results from benchmarks/results/results.jsonl.

python scripts/write_benchmarks.py

A page has `<!-- figures: NAME -->` and `<!-- end -->` around what is written. NAME is a table or a single figure below, or `all` and
a subject, for all of its newest figures. The newest figure is the last line of the file that fits.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from figures import FILE, text  # noqa: E402

Fields = dict[str, str | tuple[str, ...]]  # a figure has each, or one of the tuple
SUBJECTS = ("plans", "traces", "captures", "serving", "sweeps")
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    *(FILE.with_name(f"{subject}.md") for subject in SUBJECTS),
]
BLOCK = re.compile(r"<!-- figures: (.+?) -->.*?<!-- end -->", re.DOTALL)
LAST = ("value", "low", "high", "rounds")  # what a figure found; the other fields say what was measured
RUN = ("shape", "runner", "load", "hardware", "system")  # figures that differ in these do not replace each other


class Table(NamedTuple):
    """A table that picks figures.

    Attributes:
        rows, columns: titles, with the fields of a row's or a column's figures.
        fields: of all figures.
    """

    first: str
    rows: dict[str, Fields]
    columns: dict[str, Fields]
    fields: Fields


def named(*rows: str) -> dict[str, Fields]:
    return {row: {"row": row} for row in rows}


H100, H200, TWO_H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "2 x NVIDIA H200"
OF_STOCK = {"measure": "throughput", "unit": "of stock"}
EQUAL, ARRIVING, MANY = "equal, sync, 64 requests", "mixed, async, 64 requests", "mixed, async, 256 requests"
EVERY_LAYER = "every layer of 64 x 512 tokens"
SMALL, LARGE = {"shape": "qwen3-0.6b"}, {"shape": "llama-3.1-8b"}
V1, V2 = {"runner": "v1"}, {"runner": "v2"}
FEW, ALL = {"share": "4 of 64"}, {"share": ("64 of 64", "")}  # requests with a trace; "no trace" has no share
ALL_LAYERS = "every request steered, all layers"
CHANGES = {
    "adds a vector, `h + v.to(h)`": {"row": "adds a converted vector"},
    "halves, `h * 0.5`": {"row": "halves"},
    "projects a direction out": {"row": "projects a direction out"},
    "`h[:, 17] = 0`": {"row": "zeroes a column"},
    "`.output[0][:] += v` at the layer's module": {"row": "adds at the module's output"},
    "adds an earlier layer's stream": {"row": "adds an earlier layer's stream"},
    "an SAE's gate, 16,384 features": {"row": "an SAE's gate, 16,384 features"},
    "an MLP's output by its `tanh`": {"row": "replaces an MLP's output by its tanh"},
    "keeps a probe's score": {"row": "keeps a probe's score"},
    "keeps the top 8 features": {"row": "keeps the top 8 features"},
}
PLANS = named(
    "no plan",
    "every request steered, one layer",
    ALL_LAYERS,
    "every request steered at an MLP's output",
    "a different plan in each request",
    "last prompt token captured, all layers",
    "every token captured, one layer",
)
PROBES = named(
    "a probe of its own in each request",
    "a gate and a steer of its own in each request",
    "the top 32 of 16,384 features of every generated token",
)
CAPTURED = named(
    *(f"every token captured, {what}" for what in ("one layer", "one layer, to disk", "four layers", "all layers"))
)
SERVED = {
    "no plan": {"row": "midstream, no plan"},
    "every request names a steering vector that the server holds": {"row": "every request steered by name"},
    "every request sends its own steering vector": {"row": "a vector of its own in each request"},
}
BESIDE = Table(
    "tokens a second",
    {
        "no trace": {"row": "no trace"},
        **{title: CHANGES[title] for title in list(CHANGES) if "module" in title or "tanh" in title or "gate" in title},
    },
    {
        "midstream": ALL,
        "nnsight 0.8.1 with taps": {"system": "nnsight, taps"},
    },
    {"subject": "traces", "measure": "throughput", "unit": "tok/s", "load": EQUAL, **LARGE, **V1},
)
TABLES = {
    "overview": Table(
        "",
        {
            "without an intervention": {"subject": "plans", "row": "no plan", "load": MANY},
            "a plan steers every request at all layers": {"subject": "plans", "row": ALL_LAYERS, "load": ARRIVING},
            "a trace adds a vector to every request, in every step": {
                "subject": "traces",
                "row": "adds a converted vector",
                **ALL,
                "load": ARRIVING,
            },
            "a trace applies an SAE with 16,384 features to every request, in every step": {
                "subject": "traces",
                "row": "an SAE's gate, 16,384 features",
                **ALL,
                "load": ARRIVING,
            },
            "over HTTP: every request sends its own steering vector": {
                "subject": "serving",
                "row": "a vector of its own in each request",
                "load": "mixed, 96 requests",
            },
        },
        {"speed relative to stock vLLM": {}},
        {"hardware": H100, **LARGE, **V2, **OF_STOCK},
    ),
    "beside nnsight": BESIDE,
    "plans": Table(
        "run",
        PLANS,
        {
            "equal, V1, H200": {**V1, "load": EQUAL, "hardware": H200},
            "equal, V2, H200": {**V2, "load": EQUAL, "hardware": H200},
            "64 mixed requests arrive, V2, H100": {**V2, "load": ARRIVING, "hardware": H100},
            "256 mixed requests arrive, V2, H100": {**V2, "load": MANY, "hardware": H100},
            "64 mixed requests arrive, V2, H200, vLLM 0.33": {**V2, "load": ARRIVING, "hardware": H200},
        },
        {"subject": "plans", **LARGE, **OF_STOCK},
    ),
    "traces": Table(
        "what the trace does",
        {"no trace": {"row": "no trace"}, **CHANGES},
        {
            "8B, 4 of 64 requests, H200, vLLM 0.33": {**LARGE, **FEW, "hardware": H200},
            "8B, all 64, H200, vLLM 0.33": {**LARGE, **ALL, "hardware": H200},
            "0.6B, 4 of 64, H100": {**SMALL, **FEW, "hardware": H100},
            "0.6B, all 64, H100": {**SMALL, **ALL, "hardware": H100},
        },
        {"subject": "traces", "load": ARRIVING, **V2, **OF_STOCK},
    ),
    "probes": Table(
        "run",
        PROBES,
        {
            '`VLLM(mode="async")`, of stock': {"subject": "plans", **OF_STOCK},
            "served, of stock": {"subject": "serving", **OF_STOCK},
            "served, extra TTFT, ms": {"subject": "serving", "measure": "extra TTFT", "unit": "ms"},
            "served, TPOT, of stock": {"subject": "serving", "measure": "TPOT", "unit": "of stock"},
        },
        {"hardware": H200, "load": (ARRIVING, "mixed, 64 requests"), **LARGE, **V2},
    ),
    "captured tokens": Table(
        "captured",
        CAPTURED,
        {
            "speed, of stock, with results in shared memory": {"commit": "216a56e"},
            "before (commit 83069cb)": {"commit": "83069cb"},
        },
        {"subject": "plans", "hardware": H200, "load": ARRIVING, **LARGE, **V2, **OF_STOCK},
    ),
    "captured prompts": Table(
        "captured",
        {
            **CAPTURED,
            "four layers, by vLLM's own `extract_hidden_states`, to disk": {
                "row": "every token written by vLLM's extract_hidden_states, 4 of 32 layers"
            },
        },
        {
            "256 prompts: speed, of stock": {**OF_STOCK, "load": "prompts, async, 256 requests"},
            "captured, GB/s": {"unit": "GB/s", "load": "prompts, async, 256 requests"},
            "1,024 prompts: speed, of stock": {**OF_STOCK, "load": "prompts, async, 1024 requests"},
        },
        {"subject": "plans", "hardware": H200, **LARGE, **V2},
    ),
    "captures": Table(
        "seconds",
        named("by a plan", "by a trace"),
        {
            "midstream, V2": V2,
            "nnsight 0.8.1, eager, V1": {**V1, "system": "nnsight, eager"},
            "nnsight 0.8.1 with taps, V1": {**V1, "system": "nnsight, taps"},
        },
        {"subject": "captures", "measure": "time", "unit": "s", "load": EVERY_LAYER, "hardware": H100, **SMALL},
    ),
    "server": Table(
        "run",
        SERVED,
        {
            "throughput, relative to stock": OF_STOCK,
            "extra TTFT, ms": {"measure": "extra TTFT", "unit": "ms"},
            "TPOT, relative to stock": {"measure": "TPOT", "unit": "of stock"},
        },
        {"subject": "serving", "load": "mixed, 96 requests", **LARGE, **V2},
    ),
    "ranks": Table(
        "run",
        named("no plan", ALL_LAYERS),
        {
            f"{ranks}, {runner.upper()}": {"load": f"{EQUAL}, {ranks}", "runner": runner}
            for ranks in ("PP=2", "TP=2")
            for runner in ("v1", "v2")
        },
        {"subject": "plans", "hardware": TWO_H200, **LARGE, **OF_STOCK},
    ),
    "cpu": Table("run", PLANS, {"relative to stock vLLM": {}}, {"subject": "plans", "shape": "bundled", **OF_STOCK}),
    "sweeps": Table(
        "cells a second",
        {
            "`sweep` on vLLM": {"row": "midstream"},
            "prefill limit: vLLM on the same number of prompts, without patches": {"row": "prefill limit"},
            "`sweep` on `LanguageModel` (transformers)": {"row": "LanguageModel, in batches"},
            "`LanguageModel`, one call of `generate` for each cell": {"row": "LanguageModel, one by one"},
            "TransformerLens 4.3.0, batches of 256 cells": {"row": "TransformerLens, 256 cells in a batch"},
            "TransformerLens 4.3.0, cell by cell": {"row": "TransformerLens, cell by cell"},
        },
        {
            "H100, Llama-3.1-8B shape, V2, vLLM 0.26": {**LARGE, "hardware": H100},
            "H200, the same, vLLM 0.33": {**LARGE, "hardware": H200},
            "two CPU cores, bundled model": {"shape": "bundled"},
        },
        {"subject": "sweeps", "measure": "speed", "unit": "cells/s"},
    ),
    "neighbours": Table(
        "a plan of 1,024 edits sent by an HTTP client",
        {
            "extra time that a neighbour waits, compared with a plan of one edit, median of eight, ms": {
                "measure": "a neighbour's extra wait"
            }
        },
        {"V1 runner": V1, "V2 runner": V2},
        {"subject": "serving", "hardware": H200},
    ),
}

SINGLE = {
    "stock beside nnsight": {**BESIDE.fields, "row": "stock vLLM"},
    "async without a plan": {"subject": "plans", "row": "no plan", "load": MANY, **LARGE, **V2, **OF_STOCK},
    "captures over HTTP": {"subject": "serving", "measure": "extra time", **LARGE},
    "download": {"subject": "serving", "measure": "download", **LARGE},
    "a trace over two stages": {"subject": "traces", "measure": "time", "unit": "of one rank"},
}


@functools.cache
def figures() -> list[dict[str, Any]]:
    """Every line of the file. Rows such as `4 of 64 traced: halves` are cut into `share` and `row`."""
    found = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        figure = json.loads(line, parse_float=Decimal)  # keeps the zeros at the end
        share, _, row = figure["row"].rpartition(" traced: ")
        found.append({**figure, "share": share, "row": row})
    return found


def newest(fields: Fields) -> str:
    """The newest figure with these fields, and of vLLM if they name no other system; empty if there is none."""
    wanted = {"system": "", **fields}
    for figure in reversed(figures()):
        if all(figure.get(k, "") in (v if isinstance(v, tuple) else (v,)) for k, v in wanted.items()):
            return text(figure)
    return ""


def markdown(rows: list[list[str]]) -> str:
    """The first row has the titles."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def picked(table: Table) -> str:
    """Rows without a figure are left out."""
    rows = [[table.first, *table.columns]]
    for title, row in table.rows.items():
        cells = [newest({**table.fields, **column, **row}) for column in table.columns.values()]
        if any(cells):
            rows.append([title, *cells])
    return markdown(rows)


def all_of(subject: str) -> str:
    """The newest figures of a subject: a table for each run, the newest first."""
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    for figure in figures():
        if figure["subject"] == subject:
            what = (*RUN, "share", "row", "measure", "unit")
            kept[tuple(figure.get(name, "") for name in what)] = figure
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for figure in kept.values():
        run = ("date", *RUN, "versions", "commit", "command", "rounds")
        runs.setdefault(tuple(figure.get(name, "") for name in run), []).append(figure)
    newest_first = sorted(runs.values(), key=lambda run: run[0]["date"], reverse=True)
    return "\n\n".join(map(run_of, newest_first))


def run_of(run: list[dict[str, Any]]) -> str:
    """One run: what it was, its command and a table."""
    first = run[0]
    where = [first["shape"], first["runner"].upper(), first["load"], first.get("system", "")]
    facts = [first["date"], first["hardware"], first["versions"]]
    if "commit" in first:
        facts.append(f"commit {first['commit']}")
    if "rounds" in first:
        facts.append(f"{first['rounds']} round{'s' if first['rounds'] > 1 else ''}")
    columns = list(dict.fromkeys((figure["measure"], figure["unit"]) for figure in run))
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for figure in run:
        row = f"{figure['share']} traced: {figure['row']}" if figure["share"] else figure["row"]
        cells.setdefault(row, {})[figure["measure"], figure["unit"]] = text(figure)
    rows = [["", *(f"{measure}, {unit}" for measure, unit in columns)]]
    rows += [[row, *(found.get(column, "") for column in columns)] for row, found in cells.items()]
    head = f"### {', '.join(filter(None, where))}\n\n{'; '.join(facts)}"
    return f"{head}\n\n    {first['command']}\n\n{markdown(rows)}"


def written(page: Path) -> str:
    """The page's text, with what the file has in its blocks."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name in SINGLE:
            body = newest(SINGLE[name])
        elif name in TABLES:
            body = f"\n{picked(TABLES[name])}\n"
        else:
            body = f"\n{all_of(name.removeprefix('all '))}\n"
        return f"<!-- figures: {name} -->{body}<!-- end -->"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
