"""Row F9: the file with vLLM's log, without an engine."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.engine.log import EngineLog, _last_message, errors_in, new_log, print_to_client
from midstream.engine.plugin import SOCKETS
from midstream.errors import EngineClosedError, ParameterError

LOG = """\
(EngineCore pid=8) INFO 11-25 09:35:48 [core.py:133] Initializing a V1 LLM engine
Loading safetensors checkpoint shards:   0% Completed | 0/2\rLoading safetensors checkpoint shards:  50% Completed | 1/2
(EngineCore pid=8) \x1b[31mERROR\x1b[0m \x1b[90m11-25 09:35:49\x1b[0m \x1b[90m[core.py:1510]\x1b[0m EngineCore failed to start.
(EngineCore pid=8) ERROR 11-25 09:35:49 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-25 09:35:49 [core.py:1510]   File "core.py", line 1501, in run_engine_core
(EngineCore pid=8) ERROR 11-25 09:35:49 [core.py:1510] ValueError: too long
(EngineCore pid=8) INFO 11-25 09:35:49 [ompmultiprocessing.py:185] \treserved_cpus=[]
Process EngineCore:
Traceback (most recent call last):
ValueError: too long
"""


@contextlib.contextmanager
def vllms_logger(*handlers: logging.Handler) -> Iterator[logging.Logger]:
    """With these handlers only: pytest gives each logger that does not propagate its own, and an import of vLLM gives one too."""
    logger = logging.getLogger("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "handlers", [*handlers])
        patch.setattr(logger, "propagate", False)
        yield logger


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLog]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = EngineLog()
    yield made
    made.close()


def of(text: str, path: Path) -> str:
    path.write_text(text, newline="")
    return str(path)


def test_errors_are_told_without_their_stack(tmp_path: Path) -> None:
    assert errors_in(of(LOG, tmp_path / "log")) == ["EngineCore failed to start.", "ValueError: too long"]


def test_a_traceback_counts_if_nothing_was_logged(tmp_path: Path) -> None:
    text = "".join(line for line in LOG.splitlines(keepends=True) if "ERROR" not in line)
    assert errors_in(of(text, tmp_path / "log")) == ["Traceback (most recent call last):", "ValueError: too long"]
    assert errors_in(of(text.partition("Process")[0], tmp_path / "log")) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (0, ""),
        (1, "Initializing a V1 LLM engine"),
        (2, "Loading safetensors checkpoint shards:  50% Completed | 1/2"),
        (10, "ValueError: too long"),  # of the log, not of what was printed after it
    ],
)
def test_the_last_message_is_vllms_or_a_bars(tmp_path: Path, lines: int, message: str) -> None:
    text = "".join(re.findall(r".*\n", LOG)[:lines])
    assert _last_message(of(text, tmp_path / "log")) == message


def test_all_output_goes_to_the_file_during_the_start(log: EngineLog, capfd: pytest.CaptureFixture[str]) -> None:
    with log.during_start():
        print("printed")
        os.write(1, b"written\n")
        subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"], check=True)
    print("after")
    out, err = capfd.readouterr()
    assert sorted(Path(log.path).read_text().split("\n")) == ["", "a child", "printed", "written"]
    assert (out, err) == ("after\n", "")


def test_what_a_stream_has_buffered_goes_where_it_was_written_to() -> None:
    script = (
        "from midstream.engine.log import EngineLog\nlog = EngineLog()\nprint('before')\nwith log.during_start():\n    print('meanwhile')\n"
        "print('after')\nprint(open(log.path).read() == 'meanwhile\\n')\nlog.close()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["before", "after", "True"]


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_write_to_their_streams_after_the_start(log: EngineLog, fails: bool) -> None:
    """Those that vLLM's logger had before, and those that were made meanwhile."""
    stdout = io.StringIO()
    with vllms_logger(logging.StreamHandler(stdout)) as logger, contextlib.redirect_stdout(stdout):
        with contextlib.suppress(RuntimeError), log.during_start():
            logger.addHandler(logging.StreamHandler(sys.stdout))
            logger.error("meanwhile")
            if fails:
                raise RuntimeError
        logger.error("after")
    assert stdout.getvalue() == "after\n" * 2
    assert Path(log.path).read_text() == "meanwhile\n" * 2


def test_vllms_logger_is_the_files_while_the_engine_ends_and_another_engines_while_that_starts(log: EngineLog) -> None:
    stream, other = io.StringIO(), EngineLog()
    with contextlib.closing(other), vllms_logger(logging.StreamHandler(stream)) as logger:
        with log.during_end():
            logger.error("ending")
        with other.during_start():
            ending = log.during_end()
            ending.__enter__()
            logger.error("starting")
        logger.error("after")
        ending.__exit__(None, None, None)
        logger.error("after")
        found = Path(other.path).read_text()
    assert (Path(log.path).read_text(), found, stream.getvalue()) == ("ending\n", "starting\n", "after\n" * 2)


def test_starts_in_several_threads_have_a_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = [EngineLog() for _ in range(3)]

    def start(number: int) -> None:
        with logs[number].during_start():
            for _ in range(3):
                os.write(1, str(number).encode())
                time.sleep(0.01)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"after")
    assert [Path(log.path).read_text() for log in logs] == ["000", "111", "222"]
    assert capfd.readouterr().out == "after"


def test_the_file_is_there_until_the_engine_is_closed(log: EngineLog) -> None:
    with log.during_start():
        pass
    assert Path(log.path).exists()
    log.close()
    assert not Path(log.path).exists()


def test_an_error_of_vllms_names_the_file_once(log: EngineLog) -> None:
    with pytest.raises(RuntimeError) as caught, log.during_start():
        print(LOG)
        raise RuntimeError("Engine core initialization failed")
    log.keep(caught.value)
    (note,) = caught.value.__notes__
    assert note.startswith(f"vLLM's log is {log.path}.") and note.endswith("ValueError: too long")
    assert Path(log.path).read_text().startswith(LOG[:20])


@pytest.mark.parametrize("error", [ParameterError("no such argument"), KeyboardInterrupt()])
def test_other_errors_leave_no_file(log: EngineLog, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, log.during_start():
        raise error
    assert not Path(log.path).exists() and not hasattr(caught.value, "__notes__")


def test_the_file_of_an_engine_that_died_stays(log: EngineLog) -> None:
    error = EngineClosedError("The engine died")
    log.keep(error)
    log.close()
    assert Path(log.path).exists() and "no error" in error.__notes__[0]


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"])
def test_the_users_choice_is_left_alone(monkeypatch: pytest.MonkeyPatch, log: EngineLog, name: str) -> None:
    for each in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(each, raising=False)
    (made := new_log()).close()  # type: ignore[union-attr]
    assert isinstance(made, EngineLog)
    monkeypatch.setenv(name, "1")
    assert new_log() is None


def test_what_workers_print_comes_back_before_the_log_closes(
    log: EngineLog, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.return_prints(str(tmp_path))
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    worker = (
        "import os, sys, warnings\nfrom midstream.engine.log import print_to_client\nprint_to_client()\n"
        "print('é' * 100_000)\nwarnings.warn('warned')\nos.write(1, b'of vLLM')"
    )
    done = subprocess.run([sys.executable, "-c", worker], check=True, capture_output=True, text=True)
    log.close()
    out, err = capfd.readouterr()
    assert out == "é" * 100_000 + "\n" and "UserWarning: warned" in err
    assert (done.stdout, done.stderr) == ("of vLLM", "")


def test_closing_waits_until_what_was_printed_is_written(
    log: EngineLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.3)
            return super().write(text)

    slow = Slow()
    monkeypatch.setattr(sys, "stdout", slow)
    log.return_prints(str(tmp_path))
    with open(tmp_path / "stdout", "w") as pipe:
        pipe.write("printed")
    log.close()
    assert slow.getvalue() == "printed"


def test_a_worker_prints_as_before_if_nobody_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is in the user's process, its log is not in a file, or the client is on another host."""
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    before = sys.stdout, sys.stderr
    print_to_client()
    monkeypatch.delenv(SOCKETS)
    print_to_client()
    assert (sys.stdout, sys.stderr) == before
