"""Row A6: what `pip install` gives: the extras, and the program `midstream` on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from limits import cpu_seconds_of_children
from oracle import Plain, close

from midstream import Capture, Plan, __version__, cli, demo_model, open_captures
from midstream.capture.directory import DirectorySink
from midstream.commands.collect import engine_arguments, read_prompts
from midstream.errors import ParameterError, PromptError
from midstream.transformers import language_model as language_model

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
    assert {"serve", "vllm", "cpu", "plot", "ray", "dev"} <= set(installed.metadata.get_all("Provides-Extra") or ())


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


# ------------------------------------------------------------------------------------------------------------- collect

LINES = ["The capital of France is", {"text": "The capital of Italy is"}, {"token_ids": [1, 5, 17]}, [1, 33]]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if line == "" else json.dumps(line)) + "\n" for line in lines))
    return path


def collect(prompts: Path, to: Path, *more: str) -> list[str]:
    """The arguments of `midstream collect`, on transformers."""
    model = [demo_model(), "--backend", "transformers", "--dtype", "float32"]
    return ["collect", *model, "--prompts", str(prompts), "--to", str(to), *more]


CAPTURE = ["--site", "resid_post", "--layers", "3,5"]


def test_collect_captures_the_prompts_of_a_file(
    tmp_path: Path, plain: Plain, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "prompts.jsonl", ["", *LINES])
    assert cli.main(collect(file, tmp_path / "rows", *CAPTURE, "--positions", "all_prompt")) == 0
    said = capsys.readouterr().out
    store = open_captures(tmp_path / "rows")
    nbytes = sum(path.stat().st_size for path in (tmp_path / "rows").glob("*.safetensors"))
    assert said == f"4 of 4 prompts are in {tmp_path / 'rows'}, whose files have {nbytes:,} bytes.\n"
    prompts = [line if not isinstance(line, dict) else next(iter(line.values())) for line in LINES]
    assert {name: store[name].prompt_token_ids for name in store} == {
        str(number): plain.ids(prompt) for number, prompt in enumerate(prompts, 2)
    }
    for layer in (3, 5):
        close(store["4"]["resid_post", layer], plain.run([1, 5, 17]).sites["resid_post", layer])
    assert cli.main(collect(file, tmp_path / "rows", *CAPTURE, "--positions", "all_prompt", "--shard", "1/2")) == 0
    assert capsys.readouterr().out.startswith("2 of 2 prompts of shard 1/2 are in ")


def test_ctrl_c_in_collect_tells_how_many_prompts_are_there(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, ends = DirectorySink.end, iter(range(1, 10**6))

    def end(self: Any, request_id: str, error: Exception | None) -> None:
        really(self, request_id, error)
        if next(ends) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DirectorySink, "end", end)
    monkeypatch.setattr(language_model, "BATCH_TOKENS", 64)  # many batches
    file, rows = written(tmp_path / "prompts.jsonl", [[1, 200 + i, 30] for i in range(300)]), tmp_path / "rows"
    assert cli.main(collect(file, rows, *CAPTURE)) == 130
    there = len(open_captures(rows))
    last = f"midstream: {there} of 300 prompts are in '{rows}'. The same call again collects the others."
    assert capsys.readouterr().err.splitlines()[-1] == last and 20 <= there < 300


def test_collect_refuses_another_plan_and_takes_plans_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = written(tmp_path / "prompts.jsonl", LINES), tmp_path / "rows"
    (tmp_path / "plan.json").write_text(Plan.of(Capture("resid_post", layers=[3, 5], positions="all")).to_json())
    given = ["--plan", str(tmp_path / "plan.json"), "--params", '{"max_tokens": 3, "temperature": 0.0}']
    assert cli.main(collect(file, rows, *given, "--shard", "1/2", "--shard-bytes", "1000")) == 0
    assert open_captures(rows)["3"].positions["resid_post", 3] == [0, 1, 2, 3, 4]
    assert cli.main(collect(file, rows, *CAPTURE)) == 1
    assert "holds captures of another plan" in capsys.readouterr().err
    assert cli.main(collect(file, tmp_path / "few", *CAPTURE, "--limit-bytes", "4096")) == 0
    assert capsys.readouterr().out.startswith("2 of 4 prompts are in ")


def test_collect_fails_if_captures_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from midstream.capture.directory import DirectorySink

    def rows(*args: Any, **named: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(DirectorySink, "rows", rows)
    assert cli.main(collect(written(tmp_path / "prompts.jsonl", LINES), tmp_path / "rows", *CAPTURE)) == 1
    assert "no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ({"words": "a"}, [], ":5: the columns are words; allowed: one of text, prompt, messages, token_ids; --column"),
        ({"text": "a", "prompt": "b"}, [], ":5: the columns are text, prompt; allowed: one of"),
        ({"text": "a"}, ["--column", "words"], ":2: the columns are text; allowed: words."),
        ({"text": ""}, [], ":5: the prompt is ''; allowed: a text, token ids or chat messages, not empty."),
        ([1, -1], [], ":5: the prompt is '[1, -1]'; allowed"),
        ({"text": "a"}, ["--id-column", "id"], ":1: the column id has no id"),
        (float("nan"), [], ":5: the line is not JSON"),
    ],
)
def test_collect_names_the_line_that_is_no_prompt(
    line: Any, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No matter which shard has it, nothing runs."""
    file = written(tmp_path / "prompts.jsonl", [*LINES, line])
    assert cli.main(collect(file, tmp_path / "rows", *CAPTURE, "--shard", "0/2", *more)) == 1
    assert f"midstream: {file}{message}" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--shard", "2/2"], 2, "'2/2'; allowed: I/N with I from 0 to N-1"),
        (["--shard", "1"], 2, "'1'; allowed: I/N"),
        (["--plan", "plan.json"], 2, "not allowed with argument --site"),
        (["word"], 1, "'word' is not an option"),
        (["--no-such-argument"], 1, "such_argument"),
    ],
)
def test_collect_refuses_arguments(
    more: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = collect(written(tmp_path / "prompts.jsonl", LINES), tmp_path / "rows", *CAPTURE, *more)
    if code == 2:
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        assert exit.value.code == 2
    else:
        assert cli.main(arguments) == code
    assert message in capsys.readouterr().err


def test_prompts_have_the_ids_of_a_column(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    lines = [{"id": "a", "messages": chat}, {"id": 7, "prompt": "b"}, {"id": "c", "prompt": "c"}]
    file = written(tmp_path / "prompts.jsonl", lines)
    assert read_prompts(file, id_column="id") == ([chat, "b", "c"], ["a", "7", "c"])
    assert read_prompts(file, id_column="id", shard=(1, 2)) == ([chat, "c"], ["a", "c"])
    with pytest.raises(PromptError, match=r"prompts.jsonl:4: the id '7' is also that of 2\."):
        read_prompts(written(file, [*lines, {"id": "7", "prompt": "d"}]), id_column="id", shard=(1, 2))
    with pytest.raises(PromptError, match=r"There is no file .*none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


def test_prompts_come_from_a_column_of_parquet(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"text": ["a", "b", "c"], "ids": [[1], [2, 3], [4]], "key": ["x", "y", "z"]}
    parquet.write_table(pa.table(columns), tmp_path / "prompts.parquet")
    assert read_prompts(tmp_path / "prompts.parquet") == (["a", "b", "c"], ["0", "1", "2"])
    assert read_prompts(tmp_path / "prompts.parquet", "ids", "key", (0, 2)) == ([[1], [4]], ["x", "z"])
    with pytest.raises(PromptError, match=r"prompts.parquet:0: the columns are key; allowed: words\."):
        read_prompts(tmp_path / "prompts.parquet", "words", "key")


def test_other_options_are_the_engines() -> None:
    given = (
        '--max-model-len 4096 --enforce-eager --dtype=float32 --no-async-scheduling --hf-overrides {"a":1} --seed -1'
    )
    assert engine_arguments(given.split()) == {
        "max_model_len": 4096,
        "enforce_eager": True,
        "dtype": "float32",
        "async_scheduling": False,
        "hf_overrides": {"a": 1},
        "seed": -1,
    }
    with pytest.raises(ParameterError, match="'4096' is not an option"):
        engine_arguments(["--enforce-eager", "true", "4096"])


@pytest.mark.slow
def test_processes_share_a_directory_and_go_on_after_a_kill(installed: Any, tmp_path: Path, plain: Plain) -> None:
    count, to = 600, tmp_path / "rows"
    prompts = [[1, 200 + i, *range(30, 330 + i % 5)] for i in range(count)]
    file = written(tmp_path / "prompts.jsonl", prompts)

    def start(shard: int) -> subprocess.Popen[str]:
        arguments = collect(file, to, *CAPTURE, "--positions", "all_prompt", "--shard", f"{shard}/2")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([str(PROGRAM), *arguments], text=True, **pipes)  # type: ignore[no-any-return, call-overload]

    def listed(process: subprocess.Popen[str]) -> int:
        return sum(path.read_bytes().count(b"\n") - 1 for path in to.glob(f"index-*-{process.pid}-*.jsonl"))

    other, killed = start(0), start(1)
    deadline = time.monotonic() + 120
    while listed(killed) < 10:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    there = listed(killed)
    said, errors = other.communicate(timeout=120)
    assert other.returncode == 0 and said.startswith("300 of 300 prompts of shard 0/2 are in "), errors
    again = start(1)
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0 and said.startswith("300 of 300 prompts of shard 1/2 are in "), errors
    assert 10 <= there < 300 and f"{there} of 300 prompts are in {to} already" in errors
    lines = [json.loads(line) for index in to.glob("index-*.jsonl") for line in index.read_text().splitlines()[1:]]
    assert Counter(line["collected"]["id"] for line in lines) == Counter(str(i + 1) for i in range(count))
    store = open_captures(to)
    for number in (1, 2, 300, 301, count):
        rows = plain.run(prompts[number - 1]).sites["resid_post", 5]
        assert store[str(number)].prompt_token_ids == prompts[number - 1]
        close(store[str(number)]["resid_post", 5], rows)
