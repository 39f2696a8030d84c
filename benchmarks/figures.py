"""Figures of benchmarks: as text, and as lines of `results/results.jsonl`.

A line is one figure, a JSON object. Its fields:

    date, commit        of the measurement; the commit of midstream
    subject             plans, traces, captures, serving or sweeps: the page in `results` that shows it
    command             as run from the root of the checkout
    hardware, versions  as text
    runner              v1 or v2: vLLM's model runner
    shape               of the model: qwen3-0.6b, llama-3.1-8b or bundled
    load                requests, how they arrive, and the ranks if there are several
    system              only if the row ran on another system than vLLM, such as nnsight
    row, measure, unit  what ran, what was measured, and its unit; `of X` is relative to X in the same round
    value, low, high    the median over the rounds, and its 95 % bootstrap interval
    rounds              that count

Fields that are not known are left out, and so is the interval of a single round.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "results" / "results.jsonl"
DIGITS = {"tok/s": 0, "cells/s": 0, "µs": 0, "MB": 0, "ms": 1, "s": 2, "GB/s": 2}  # of other units: 3
RESAMPLES = 2000


class Results:
    """The figures of one run of a script. With `--json`, each is also appended to that file.

    Attributes:
        machine: hardware, versions and date, for the head of the printed table.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        subject: str,
        load: str,
        *,
        packages: Sequence[str] = (),
        **fields: str,
    ) -> None:
        import torch
        import vllm

        ranks = arguments.pp * arguments.tp
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        hardware = f"{f'{ranks} x ' if ranks > 1 else ''}{gpu}" if gpu else f"CPU, {os.cpu_count()} cores"
        versions = [f"vLLM {vllm.__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
        versions += [f"{package} {importlib.metadata.version(package)}" for package in packages]
        several = "".join(f", {name}={n}" for name, n in (("PP", arguments.pp), ("TP", arguments.tp)) if n > 1)
        self._file: Path | None = arguments.json
        self._common = {
            "date": str(datetime.date.today()),
            **_commit(),
            "subject": subject,
            "command": _command(),
            "hardware": hardware,
            "versions": ", ".join(versions),
            "runner": arguments.runner,
            "shape": "bundled" if arguments.cpu else arguments.shape,
            "load": load + several,
            **fields,
        }
        self.machine = f"{hardware}; {self._common['versions']}; {self._common['date']}"

    def add(self, row: str, measure: str, unit: str, rounds: Sequence[float] | np.ndarray) -> str:
        """The median over the rounds, with the interval that drawing the rounds again gives, as text."""
        digits = DIGITS.get(unit, 3)
        figure: dict[str, Any] = {"row": row, "measure": measure, "unit": unit, "value": float(np.median(rounds))}
        if len(rounds) > 1:
            draws = np.random.default_rng(0).choice(rounds, (RESAMPLES, len(rounds)))
            figure["low"], figure["high"] = np.percentile(np.median(draws, axis=1), [2.5, 97.5]).tolist()
        figure = {
            name: round(each, digits or None) if isinstance(each, float) else each for name, each in figure.items()
        }
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self._common, **figure, "rounds": len(rounds)}, ensure_ascii=False) + "\n")
        return text(figure)


def ratio(before: Sequence[float], after: Sequence[float]) -> np.ndarray:
    """`before / after` of each round."""
    return np.array(before) / np.array(after)


def text(figure: Mapping[str, Any]) -> str:
    """The value without its unit, and its interval in parentheses: with the digits that the file has."""
    found = [figure[name] for name in ("value", "low", "high") if name in figure]
    digits = max(len(str(each).partition(".")[2]) for each in found)
    value, *interval = (f"{each:,.{digits}f}" for each in found)
    return f"{value} ({interval[0]} to {interval[1]})" if interval else value


def _command() -> str:
    """As it was run, without `--json`."""
    given = sys.argv[1:]
    if "--json" in given:
        where = given.index("--json")
        del given[where : where + 2]
    return shlex.join([os.path.relpath(sys.argv[0], ROOT), *given])


def _commit() -> dict[str, str]:
    """Nothing if this is a copy without git's files."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"commit": found.stdout.strip()} if found.returncode == 0 else {}
