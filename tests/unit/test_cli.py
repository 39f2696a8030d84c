"""Row A6: what `pip install` gives: the extras, and the program `midstream` on PATH."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from limits import cpu_seconds_of_children

from midstream import __version__, cli

PROGRAM = Path(sysconfig.get_path("scripts")) / "midstream"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROGRAM), *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def installed() -> metadata.Distribution:
    try:
        return metadata.distribution("midstream")
    except metadata.PackageNotFoundError:
        pytest.skip("midstream is not installed here, only on the path")


def test_serving_extra_is_declared(installed: metadata.Distribution) -> None:
    needed = [line for line in installed.requires or [] if 'extra == "serve"' in line.replace("'", '"')]
    names = {line.split(";")[0].split("[")[0].split(">")[0].split("<")[0].strip() for line in needed}
    assert {"vllm", "fastapi", "uvicorn"} <= names
    assert {"serve", "vllm", "cpu", "plot", "dev"} <= set(installed.metadata.get_all("Provides-Extra") or ())


def test_program_is_declared(installed: metadata.Distribution) -> None:
    (script,) = [e for e in installed.entry_points if e.group == "console_scripts"]
    assert (script.name, script.load()) == ("midstream", cli.main)


def test_program_is_on_path_and_runs(installed: metadata.Distribution) -> None:
    result = run("version")
    assert (result.returncode, result.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["midstream"] == __version__
    assert lines["torch"] == metadata.version("torch")
    assert lines["transformers"] == metadata.version("transformers")
    assert "vLLM" in lines


def test_help_is_there_at_once() -> None:
    """Neither torch nor vLLM is imported for it."""
    code = """
import sys
from midstream.cli import main
try:
    main(["--help"])
except SystemExit:
    print({"torch", "vllm"} & set(sys.modules))
"""
    start = cpu_seconds_of_children()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"
    assert all(word in result.stdout for word in ("demo", "compare", "version"))
    assert cpu_seconds_of_children() - start < 5


def test_unknown_command_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["serv"])
    assert exit.value.code == 2
    assert "choose from" in (said := capsys.readouterr().err) and "demo" in said


def test_subcommands_have_help_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["demo", "--help"])
    assert exit.value.code == 0
    assert "--compile" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "words"), [("0.32.0", ", supported"), ("0.11.0", "not supported")])
def test_version_says_whether_vllm_is_supported(version: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_installed", {"vllm": version}.get)
    assert words in cli.versions()[-1]


def test_version_says_how_to_get_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_installed", {}.get)
    assert 'pip install "midstream[vllm]"' in cli.versions()[-1]


def test_errors_of_midstream_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from midstream.errors import MidstreamError

    def fails(arguments: list[str]) -> int:
        raise MidstreamError("no such model")

    monkeypatch.setattr("midstream.commands.demo.main", fails)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "midstream: no such model\n"
