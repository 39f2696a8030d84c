"""Measures every tiny architecture with `midstream compare` and writes the tables into docs/supported.md.

    python scripts/supported_models.py                # all of them, on one rank and on several: a quarter of an hour
    python scripts/supported_models.py llama gpt2     # print the tables of these

The models are those of tests/support/tiny_models.py: random weights, four layers.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import tiny_models  # noqa: E402
from forked import forked  # noqa: E402
from ranks import SIZES  # noqa: E402

from midstream.commands import compare  # noqa: E402
from midstream.sites import LAYER_SITES, MODEL_SITES  # noqa: E402

PAGE = ROOT / "docs" / "supported.md"
ON_SEVERAL = {"TP=2": SIZES["tp2"], "PP=2": SIZES["pp2"]}
PROMPTS = ["The river runs from the mountains to the sea", "The capital of France is"]


Rows = list[compare.Comparison]


def measured(names: list[str], sizes: Mapping[str, int]) -> Rows:
    rows = []
    with tempfile.TemporaryDirectory() as cache, forked() if sizes else contextlib.nullcontext():
        for name in names:
            path = tiny_models.build(name, Path(cache))
            engine = {"max_model_len": 256, "max_num_seqs": 8, **sizes, **tiny_models.ARCHITECTURES[name].engine}
            rows.append(compare.compare(str(path), name=name, prompts=PROMPTS, **engine))
            tiny_models.restore_transformers()
            print(f"{name}: {rows[-1].largest()}", file=sys.stderr, flush=True)
    return rows


def summary(rows: Rows, on_several: dict[str, Rows]) -> str:
    sites = [site for site in (*LAYER_SITES, *MODEL_SITES) if site not in ("logits", "samples")]
    titles = ["model", "transformers class", "route in vLLM", "sites", "reads", "edits", *on_several]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row, *others in zip(rows, *on_several.values(), strict=True):
        own = [site for site in sites if site != "router" or site in row.sites]  # only a mixture of experts has routers
        lacking = [f"`{site}`" for site in own if site not in row.sites]
        have = f"all but {', '.join(lacking)}" if lacking else "all"
        reads, edits = row.largest(tuple(compare.READS)), row.largest(tuple(compare.EDITS))
        several = [other.largest() for other in others]
        cells = [row.name, f"`{row.architecture}`", row.route, have, reads, edits, *several]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def tables(rows: Rows, on_several: dict[str, Rows]) -> dict[str, str]:
    import vllm

    measured_on = f"Measured {datetime.date.today()} on vLLM {vllm.__version__.partition('+')[0]}, CPU, float32."
    unsupported = [f"| {name} | {said} |" for name, said in tiny_models.UNSUPPORTED_ON_CPU.items()]
    return {
        "summary": f"{measured_on}\n\n{summary(rows, on_several)}",
        "unsupported": "\n".join(["| model | what vLLM says |", "|---|---|", *unsupported]),
        "reads": compare.markdown_table(rows, tuple(compare.READS)),
        "edits": compare.markdown_table(rows, tuple(compare.EDITS)),
    }


def main() -> None:
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda fn: fn()  # vLLM looks at every model class in a process of its own: 10 s each
    names = sys.argv[1:] or [name for name in tiny_models.ARCHITECTURES if name not in tiny_models.UNSUPPORTED_ON_CPU]
    made = tables(measured(names, {}), {title: measured(names, sizes) for title, sizes in ON_SEVERAL.items()})
    if sys.argv[1:]:
        print(*made.values(), sep="\n\n")
        return
    page = PAGE.read_text(encoding="utf-8")
    for part, table in made.items():
        between = re.compile(rf"(<!-- {part} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = between.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
        assert count == 1, f"{PAGE} has {count} places for the table {part!r}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
