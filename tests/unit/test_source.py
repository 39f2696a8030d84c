"""Traces in notebook cells with magics. The cells run in a real IPython shell."""

from __future__ import annotations

import pytest
from bare_trace import run_python

# What a model's trace does to its block, in an IPython shell. The cells of the cases run one after the other.
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
from bare_trace import Trace as Bare

class Trace(Bare):
    def save(self, value):
        return "saved", value

shell = InteractiveShell.instance(colors="nocolor")
shell.user_ns.update(Trace=Trace)
for name, cells in CASES.items():
    print(f"\\n=== {name}")
    shell.user_ns.pop("x", None)
    for cell in cells:
        shell.run_cell(cell, store_history=True)
"""

DEFINE = "def f(trace, value):\n    with trace():\n        x = value.save()\n    return x"
CALL = {  # each sets x to ("saved", 3)
    "a cell": "with Trace() as t:\n    x = (3).save()",
    "time": "%%time\nx = f(Trace, 3)",
    "timeit": "%%timeit -n 1 -r 2 number = 3\nglobal x\nx = f(Trace, number)",
    "capture": "%%capture\nx = f(Trace, 3)",
    "a line": "%time x = f(Trace, 3)",
}
REFUSED = {
    "refused in time": "%%time\nwith Trace() as t:\n    x = (3).save()",
    "refused in timeit": "%%timeit -n 1 -r 2\nwith Trace():\n    x = (3).save()",
    "refused in a line": "%time with Trace(): x = (3).save()",
    "refused in exec": "import os\nexec('with Trace():' + os.linesep + '    x = 1')",
}
CASES = {name: [DEFINE, cell, "print('x is', x)"] for name, cell in (CALL | REFUSED).items()}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the cells of each case print."""
    code = f"CASES = {CASES!r}\n{SHELL}"
    parts = [part.partition("\n") for part in run_python("-c", code).split("\n=== ")[1:]]
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("name", CALL)
def test_a_trace_of_a_cell_runs_and_under_a_magic_in_a_function(printed: dict[str, str], name: str) -> None:
    assert printed[name].splitlines()[-1].strip() == "x is ('saved', 3)", printed[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_trace_under_a_magic_says_what_to_write(printed: dict[str, str], name: str) -> None:
    assert "SourceUnavailableError: No source for '<" in printed[name] and "name 'x' is not defined" in printed[name]
    assert "call a function that has the with-block, defined in a cell without a magic" in printed[name]
