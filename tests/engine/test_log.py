"""Row F9: vLLM's log while an engine starts and runs: it is in a file, which errors name, and a terminal shows one line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import nbformat
import pytest
from forked import Program, run_script
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from midstream.errors import UnguardedScriptError

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
LOGS = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's: it is in the paths of sockets, which have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="log-") as directory:
        yield Path(directory)


@pytest.fixture
def command(tmp_path: Path) -> dict[str, Any]:
    """Arguments of `subprocess.run`: the environment of a user, with the logs in `tmp_path`."""
    kept = {name: value for name, value in os.environ.items() if name not in LOGS}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support")])
    return {"env": {**kept, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}, "cwd": tmp_path, "timeout": 300}


def script(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "support" / "log_script.py"), *arguments]


def run_forked(command: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process that has imported vLLM: for what the import has no part in."""
    argv, environment = script(*arguments)[1:], {**command["env"], **dict.fromkeys(LOGS)}
    run = partial(run_script, Path(argv[0]), command["cwd"])
    output, errors = (command["cwd"] / name for name in ("output", "errors"))
    code = Program(run, argv, output, environment, errors).run(300)
    return subprocess.CompletedProcess(argv, code, output.read_text(), errors.read_text())


def test_a_terminal_shows_one_line_that_is_cleared_and_what_traces_print(
    command: dict[str, Any], tmp_path: Path
) -> None:
    printed: list[str] = []

    def run(terminal: int) -> None:
        shell = {"stdin": terminal, "stdout": subprocess.PIPE, "stderr": terminal, "text": True}
        printed.extend(subprocess.run(script("close"), check=True, **shell, **command).stdout.splitlines())

    shown = in_terminal(run)
    line, _, rest = shown.partition("\n")
    *states, cleared, warned = line.split("\r")[1:-1]
    assert len(states) > 3 and all(re.match(r"Starting vLLM, \d+ s", state) for state in states)
    assert any(re.match(r"Starting vLLM, \d+ s: \w", state) for state in states)
    assert max(map(len, states)) < 80 and not cleared.strip()
    told, *lines = printed
    assert json.loads(told)["there"]
    assert sorted(lines) == ["printed by the script", "printed in a trace"]
    assert warned.endswith(": UserWarning: warned in a trace") and len(rest.splitlines()) == 1, shown
    assert not list(tmp_path.glob("vllm-*"))  # the engine was closed


def in_terminal(run: Callable[[int], object]) -> str:
    """What a terminal of 80 columns shows of what `run(terminal)` writes."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # no process has the terminal open
            while data := os.read(ours, 1 << 16):
                shown.append(data)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        run(terminal)
    finally:
        os.close(terminal)
        reading.join(30)
        os.close(ours)
    return b"".join(shown).decode()


def test_an_engine_that_cannot_start_says_why_and_where_its_log_is(command: dict[str, Any], tmp_path: Path) -> None:
    done = run_forked(command, "fail")
    assert done.returncode == 1 and not done.stdout and "Starting vLLM" not in done.stderr
    (log,) = tmp_path.glob("vllm-*.log")
    error, _, note = done.stderr.partition(f"\nvLLM's log is {log}. Its last errors are:\n")
    assert "Engine core initialization failed" in error.splitlines()[-1]
    assert "max seq len (10000000)" in note and "max seq len (10000000)" in log.read_text()
    assert "Traceback" not in note and len(note.splitlines()) < 6


START = "midstream.demo_model(), dtype='float32', max_model_len=512, enforce_eager=True, gpu_memory_utilization=0.2"
SCRIPTS = {
    "sync": f"midstream.VLLM({START})",
    "async": f"async def main():\n    midstream.VLLM({START}, mode='async')\n\nimport asyncio\nasyncio.run(main())",
    "stock": f"import vllm\nvllm.LLM({START}, **midstream.engine_arguments())",
    "spawned by the user": "from multiprocessing import get_context\nif __name__ == '__main__':\n"
    f"    child = get_context('spawn').Process()\n    child.start()\n    exit(child.join() or child.exitcode)\nmidstream.VLLM({START})",
}


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, id=name, marks=[] if name == "sync" else pytest.mark.matrix) for name, code in SCRIPTS.items()],
)
def test_a_script_that_its_processes_import_ends_with_one_line_that_says_what_to_do(
    command: dict[str, Any], tmp_path: Path, code: str
) -> None:
    command["env"] |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if "import vllm" in code:
        command["env"]["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    (tmp_path / "script.py").write_text(f"import midstream\n\n{code}\nprint('started')\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, **command)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Triton is installed")]
    assert lines == [str(UnguardedScriptError())] and 'under `if __name__ == "__main__":`' in lines[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("midstream-", "vllm-"))]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.matrix)])
def test_the_log_of_an_engine_that_died_stays_and_its_errors_name_it(
    command: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    done = run_forked(command, "kill", mode)
    assert done.returncode == 0, done.stderr
    read = json.JSONDecoder().raw_decode  # vLLM, which is ending, may write to the end of a line
    _, *errors = [read(line)[0] for line in done.stdout.splitlines() if line.startswith("{")]
    (log,) = tmp_path.glob("vllm-*.log")
    assert [error["notes"] for error in errors] == [
        [f"vLLM's log is {log}. It has no error, as when a process was killed."]
    ] * 2
    assert "Loading weights took" in log.read_text()


@pytest.mark.matrix
def test_the_log_of_an_engine_that_died_between_calls_stays(command: dict[str, Any], tmp_path: Path) -> None:
    assert run_forked(command, "kill", "unseen").returncode == 0
    assert list(tmp_path.glob("vllm-*.log"))


def test_an_engine_in_this_process_logs_as_vllm_does_once_it_has_started(
    command: dict[str, Any], tmp_path: Path
) -> None:
    command["env"]["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = run_forked(command, "here")
    assert done.returncode == 0, done.stderr
    told, logged = done.stdout.splitlines()
    assert json.loads(told)["there"] and logged.endswith("logged after the start")
    assert "Starting vLLM" not in done.stderr and "pid=" not in done.stderr
    assert not list(tmp_path.glob("vllm-*"))


CELLS = [
    "from midstream import VLLM, demo_model",
    "model = VLLM(demo_model(), dtype='float32', max_model_len=512, enforce_eager=True, gpu_memory_utilization=0.2)",
    "with model.trace('The capital of France is'):\n    print('printed in a trace')\n"
    "    h = model.layers_output[0].save()\nprint(list(h.shape))",
    "import logging\nlogging.getLogger('vllm.tests').warning('logged after the start')",
    "model.close()",
]


class WatchingClient(NotebookClient):
    """Notes each text that replaces another one."""

    replaced: ClassVar[list[str]] = []

    def process_message(self, msg: dict[str, Any], *args: Any) -> Any:
        if msg["msg_type"] == "update_display_data":
            self.replaced.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, *args)


def test_a_notebook_shows_one_line_and_what_traces_print(command: dict[str, Any], tmp_path: Path) -> None:
    command["env"]["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # starts sooner
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    manager = KernelManager()
    client = WatchingClient(notebook, km=manager, timeout=300)
    with client.setup_kernel(env=command["env"], cwd=str(tmp_path)):
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
    _, started, traced, logged, closed = (
        "".join(each["text"] if "text" in each else each["data"]["text/plain"] for each in cell.outputs)
        for cell in notebook.cells
    )
    assert re.fullmatch(r"Started vLLM in [1-9]\d* s", started), started  # of all the texts that were shown
    assert any(re.match(r"Starting vLLM, [1-9]\d* s: \w", text) for text in client.replaced)
    assert "printed in a trace" in traced and "[5, 256]" in traced
    assert "logged after the start" in logged
    assert not closed and not list(tmp_path.glob("vllm-*"))
