"""Traces in notebook cells with magics. The cells run in a real IPython shell."""

from __future__ import annotations

import pytest
from bare_trace import run_python

# What a model's trace does to its block, in an IPython shell. The cells of the cases run one after the other.
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
from bare_trace import Trace as Bare
from midstream.trace.rewrite import function_tree

class Trace(Bare):
    def save(self, value):
        return "saved", value

shell = InteractiveShell.instance(colors="nocolor")
shell.user_ns.update(Trace=Trace, function_tree=function_tree)
for name, cells in CASES.items():
    print(f"\\n=== {name}")
    shell.user_ns.pop("x", None)
    for cell in cells:
        shell.run_cell(cell, store_history=True)
"""

RUN = {  # each sets x to ("saved", 3)
    "time": "%%time\nwith Trace() as t:\n    x = (3).save()",
    "time, an expression at the end": "%%time\nwith Trace() as t:\n    x = (3).save()\nx",
    "time, more lines": "%%time\n\n# a comment\nnumber = 3\nwith Trace() as t:\n    x = number.save()\nlen(x)",
    "time in capture": "%%capture\n%%time\nwith Trace():\n    x = (3).save()",
    "capture in time": "%%time\n%%capture\nwith Trace():\n    x = (3).save()",
    "time, with a magic in it": "%%time\n%matplotlib --list\nwith Trace():\n    x = (3).save()",
    "time, in a function": "%%time\ndef f(trace):\n    with trace():\n        x = (3).save()\n    return x\nx = f(Trace)",
    "time, one line": "%time with Trace(): x = (3).save()",
    "prun": "%%prun -q\nwith Trace():\n    x = (3).save()",
    "timeit": "%%timeit -n 1 -r 2 number = 3\nglobal x\nwith Trace():\n    x = number.save()",
    "timeit, one line": "found = []\n%timeit -n 1 -r 2 with Trace(): found.append((3).save())\nx = found[-1]",
}
DEFINE = "%%time\ndef {0}(trace):\n    with trace():\n        x = '{0}'.save()\n    return x"
CASES = {
    **{name: [cell, "print('x is', x)"] for name, cell in RUN.items()},
    "the same line": [f"%%time\nwith Trace():\n    x = ({n}).save()\nprint(x)" for n in (1, 2, 1)],
    "called later": [
        DEFINE.format("f"),
        DEFINE.format("g"),
        "print(f(Trace), function_tree(g.__code__).name, g(Trace))",
    ],
    "an error": ["%%time\n# a comment\nwith Trace():\n    x = 1 / 0"],
    "no source": ["import os\nexec('with Trace():' + os.linesep + '    x = 1')"],
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the cells of each case print."""
    code = f"CASES = {CASES!r}\n{SHELL}"
    parts = [part.partition("\n") for part in run_python("-c", code).split("\n=== ")[1:]]
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("name", RUN)
def test_a_trace_under_a_magic_runs(printed: dict[str, str], name: str) -> None:
    assert printed[name].splitlines()[-1].strip() == "x is ('saved', 3)", printed[name]


def test_cells_with_the_same_lines_are_kept_apart(printed: dict[str, str]) -> None:
    shown = [line for line in printed["the same line"].splitlines() if "saved" in line]
    assert shown == ["('saved', 1)", "('saved', 2)", "('saved', 1)"]


def test_a_function_of_a_timed_cell_is_called_in_another_cell(printed: dict[str, str]) -> None:
    assert printed["called later"].splitlines()[-1] == "('saved', 'f') g ('saved', 'g')"


def test_an_error_shows_the_line_of_a_timed_cell(printed: dict[str, str]) -> None:
    assert "----> 3     x = 1 / 0" in printed["an error"] and "ZeroDivisionError" in printed["an error"]


def test_an_error_says_what_to_do_in_a_notebook(printed: dict[str, str]) -> None:
    assert "function in a cell of its own" in printed["no source"] and "notebook cell, or" not in printed["no source"]
