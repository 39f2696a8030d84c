"""What a notebook shows. Those of `examples/` run from top to bottom, each without the names of the others, and show each figure once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


def test_there_are_six() -> None:
    assert len(NOTEBOOKS) == 6


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel, which imports vLLM once."""
    manager = KernelManager()
    # An engine in the kernel's process starts in seconds.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    manager.start_kernel(env=environment, cwd=str(tmp_path_factory.mktemp("notebooks")))
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.engine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, kernel: KernelManager) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # they are kept without outputs
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # of the names of other notebooks
    NotebookClient(notebook, km=kernel, timeout=300).execute()
    for cell in notebook.cells:
        shown = [output for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
        assert len(shown) == len(re.findall(r"plot\w*\(", cell.source)), cell.source


CELLS = [
    "from midstream import LanguageModel, demo_model\nmodel = LanguageModel(demo_model())\n"
    "asked = ('The capital of France is', 'The capital of Italy is', ' Paris', ' Rome')",
    "%%time\nh = model.run(lambda model: model.layers_output[3], asked[0])\nprint(list(h.shape))",
    "result = model.sweep(*asked, layers=[2, 5], positions=[3], progress=True)",
    "from midstream import progress\nprogress._LONG_SECONDS = 0.0\noutputs = model.generate([asked[0]] * 5, max_tokens=20)",
    "drawn = model.sweep(*asked, layers=[2, 5], positions=[3], stream=True).draw()",
]


@pytest.mark.slow
def test_a_kernel_shows_times_bars_and_figures(kernel: KernelManager) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, km=kernel, timeout=300).execute()
    _, timed, swept, generated, drawn = (cell.outputs for cell in notebook.cells)
    said = "".join(output.get("text", "") for output in timed)
    assert "[5, 256]" in said and "Wall time" in said
    bars = [[output["data"]["text/plain"] for output in each] for each in (swept, generated)]
    assert ["2/2" in bars[0][0], "5/5" in bars[1][0]] == [True, True] and [len(each) for each in bars] == [1, 1], bars
    assert sum("image/png" in output.get("data", {}) for output in drawn) == 1
