"""Row F7: a collection to a directory is listed request by request; killed at any moment, what is listed can be read; run again, it
goes on where it stopped.

Values are compared with plain transformers (`oracle`). Collections that are killed run in `collect_script.py`.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import collect_script
import pytest
import torch
from capture_tools import stored
from collect_script import GENERATED, PARAMS, plan, prompts
from forked import Program
from oracle import Plain, close
from plan_cases import GREEDY
from transformers import AddedToken

from midstream import Capture, LanguageModel, Span, Steer, Subsample, demo_model, open_captures
from midstream.capture import consumers, directory
from midstream.capture.consumers import CaptureInfo
from midstream.capture.directory import DirectorySink, Store, remove_orphans
from midstream.capture.sinks import Sinks
from midstream.client import collecting
from midstream.client.collecting import Estimate
from midstream.errors import CaptureError, NotCapturedError, ParameterError, PlanError, PromptError
from midstream.transformers import language_model as language_model
from midstream.transformers.batch import RunningPlan

if TYPE_CHECKING:
    from midstream import VLLM

IDS = [[1, 5, 17], [1, 33, 60, 91], [1, 120], [1, 44, 45, 46, 47]]
LAST = Capture("resid_post", layers=3)


def names(store: Store) -> list[list[int]]:
    """The prompts in a store, sorted."""
    return sorted(capture.prompt_token_ids for capture in store.values())


# ---------------------------------------------------------------------------------------------- what is run, what is not


def test_what_is_there_is_not_run_again(hf: LanguageModel, plain: Plain, tmp_path: Path, caplog: Any) -> None:
    store = hf.collect(IDS[:2], plan=LAST, to=tmp_path)
    assert names(store) == sorted(IDS[:2]) and "already" not in caplog.text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    store = hf.collect(iter(IDS), plan=[LAST], to=str(tmp_path))
    assert f"2 of 4 prompts are in {tmp_path} already; 2 to go" in caplog.text
    assert names(store) == sorted(IDS) and {path: path.stat().st_mtime_ns for path in before} == before
    for capture in store.values():
        close(capture["resid_post", 3], plain.run(capture.prompt_token_ids).sites["resid_post", 3][-1:])
    shards = len(list(tmp_path.glob("*.safetensors")))
    assert len(hf.collect(IDS, plan=LAST, to=tmp_path)) == 4 and "4 of 4" in caplog.text
    assert len(list(tmp_path.glob("*.safetensors"))) == shards


def test_ids_name_the_captures(hf: LanguageModel, plain: Plain, tmp_path: Path, caplog: Any) -> None:
    hf.collect(IDS[:2], plan=LAST, to=tmp_path, ids=["a", 7])
    store = hf.collect([IDS[2], IDS[1], IDS[0]], plan=LAST, to=tmp_path, ids=["b", 7, "a"])
    assert "2 of 3" in caplog.text and sorted(store) == ["7", "a", "b"]
    for name, ids in [("a", IDS[0]), (7, IDS[1]), ("b", IDS[2])]:
        assert store[name].prompt_token_ids == ids and store[name].id == str(name) and name in store
        close(store[name]["resid_post", 3], plain.run(ids).sites["resid_post", 3][-1:])
    assert store["a"].request_id != "a"
    with pytest.raises(CaptureError, match="has the id 'a' with another prompt"):
        hf.collect([IDS[3]], plan=LAST, to=tmp_path, ids=["a"])


def test_the_captures_come_in_the_order_of_the_prompts(hf: LanguageModel, tmp_path: Path) -> None:
    hf.collect([IDS[3], IDS[0]], plan=LAST, to=tmp_path)
    for given in (IDS, IDS[::-1], [IDS[2], IDS[0], IDS[2]]):
        store = hf.collect(given, plan=LAST, to=tmp_path)
        assert [capture.prompt_token_ids for capture in store.values()] == given
        assert len(store) == len(given) and all(name in store for name in store)
    assert len(open_captures(tmp_path)) == 5
    store = hf.collect(IDS[:1], plan=LAST, to=tmp_path)
    (other,) = (name for name, capture in open_captures(tmp_path).items() if capture.prompt_token_ids == IDS[3])
    with pytest.raises(NotCapturedError, match=f"{other}.*not among the prompts of this call.*open_captures"):
        store[other]


@pytest.mark.parametrize("first", [None, ["a", "b"]])
def test_ids_may_not_be_added_or_left_out_later(hf: LanguageModel, tmp_path: Path, first: Any) -> None:
    """Every prompt would be run again, and be there twice."""
    hf.collect(IDS[:2], plan=LAST, to=tmp_path, ids=first)
    now = ["a", "b"] if first is None else None
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        CaptureError, match=f"has prompt 1 already.*collected with{'out' if first is None else ''} ids="
    ) as raised:
        hf.collect([IDS[2], IDS[1]], plan=LAST, to=tmp_path, ids=now)
    assert ("'b'" in str(raised.value)) == (first is not None) and sorted(tmp_path.iterdir()) == before
    assert len(hf.collect([IDS[2]], plan=LAST, to=tmp_path, ids=now and ["c"])) == 1  # another prompt may have one


def test_of_equal_prompts_each_counts_once(hf: LanguageModel, tmp_path: Path, caplog: Any) -> None:
    one, other = IDS[:2]
    assert len(hf.collect([one, one, other], plan=LAST, to=tmp_path)) == 3
    store = hf.collect([other, one, one, one], plan=LAST, to=tmp_path)
    assert "3 of 4" in caplog.text and names(store) == sorted([one, one, one, other])
    assert len(hf.collect([one], plan=LAST, to=tmp_path)) == 1 and len(open_captures(tmp_path)) == 4


def test_a_text_and_its_tokens_are_one_prompt(hf: LanguageModel, tmp_path: Path, caplog: Any) -> None:
    text = "The capital of France is"
    spanned = Capture("resid_post", layers=3, positions=Span("France"))
    hf.collect(text, plan=spanned, to=tmp_path)
    (capture,) = hf.collect([hf.tokenizer(text)["input_ids"]], plan=spanned, to=tmp_path).values()
    assert "1 of 1" in caplog.text and capture.positions["resid_post", 3] == [3]


def test_prompts_are_submitted_in_parts(hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held for each prompt of a part goes before the next part: memory does not grow with the collection."""
    parts: list[int] = []
    really = LanguageModel._run
    monkeypatch.setattr(collecting, "PART", 3)
    monkeypatch.setattr(
        LanguageModel,
        "_run",
        lambda self, invokes, **given: parts.append(len(invokes)) or really(self, invokes, **given),
    )
    store = hf.collect([[1, i] for i in range(8)], plan=LAST, to=tmp_path)
    assert parts == [3, 3, 2] and len(store) == 8
    assert next(iter(store.values())).prompt_token_ids == [1, 0]
    assert hf.sinks.stats["requests"] == hf.sinks.stats["held_bytes"] == 0


def test_rows_for_a_directory_are_not_kept_in_memory(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen held: all rows of a call, until its end."""
    held: list[int] = []
    really = RunningPlan.result
    monkeypatch.setattr(
        RunningPlan, "result", lambda self, *given: held.append(len(self._capture._rows)) or really(self, *given)
    )
    hf.collect(IDS, plan=LAST, to=tmp_path)
    assert held == [0] * len(IDS)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_directory_is_for_one_plan(hf: LanguageModel, tmp_path: Path) -> None:
    hf.collect(IDS[:1], plan=[LAST, Capture("resid_post", layers=5)], to=tmp_path)
    hf.collect(
        IDS[:2], plan=Capture("resid_post", layers=[5, 3]), to=tmp_path, temperature=0.0
    )  # the same, otherwise said
    steer = Steer("resid_post", layers=1, vector=torch.ones(256))
    for other in (LAST, Capture("resid_post", layers=[3, 5], positions="all_prompt"), [steer, LAST]):
        with pytest.raises(CaptureError, match=r"captures of another plan.*another directory"):
            hf.collect(IDS, plan=other, to=tmp_path)
    hf.plan = steer
    try:
        with pytest.raises(CaptureError, match="captures of another plan"):
            hf.collect(IDS, plan=Capture("resid_post", layers=[3, 5]), to=tmp_path)
    finally:
        hf.plan = None
    assert len(open_captures(tmp_path)) == 2


def test_sampling_parameters_count_where_generated_rows_are_captured(hf: LanguageModel, tmp_path: Path) -> None:
    everything = Capture("resid_post", layers=3, positions="all")
    hf.collect(IDS[:1], plan=everything, to=tmp_path, max_tokens=3, temperature=0.0)
    with pytest.raises(CaptureError, match="other sampling parameters"):
        hf.collect(IDS[:1], plan=everything, to=tmp_path, max_tokens=4, temperature=0.0)
    with pytest.raises(ParameterError, match="max_tokens is 1, and the last generated token has no row"):
        hf.collect(IDS[:1], plan=everything, to=tmp_path)
    with pytest.raises(ParameterError, match="takes n=1"):
        hf.collect(IDS[:1], plan=LAST, to=tmp_path, n=2)


def test_a_directory_is_for_one_model(hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.collect(IDS[:1], plan=LAST, to=tmp_path)
    monkeypatch.chdir(Path(demo_model()).parent)
    monkeypatch.setattr(hf, "model_name", Path(demo_model()).name)  # the same, from here
    hf.collect(IDS[:1], plan=LAST, to=tmp_path)
    monkeypatch.setattr(hf, "model_name", "somebody/else")
    with pytest.raises(CaptureError, match=r"demo_model \(float32\), and this is somebody/else \(float32\)\. Give"):
        hf.collect(IDS, plan=LAST, to=tmp_path)


def test_a_directory_that_generate_writes_to_is_no_collections(hf: LanguageModel, tmp_path: Path) -> None:
    hf.generate(IDS[:1], plan=Capture("resid_post", to=tmp_path), max_tokens=1)
    with pytest.raises(CaptureError, match="that collect has not written"):
        hf.collect(IDS, plan=LAST, to=tmp_path)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"plan": Steer("resid_post", vector=torch.ones(256))}, PlanError, "plan has no Capture"),
        ({"plan": Capture("resid_post", to="elsewhere")}, PlanError, "Leave it out"),
        ({"ids": ["a"]}, PromptError, "ids has 1 for 2 prompts"),
        ({"ids": ["a", "a"]}, PromptError, "'a' more than once"),
        ({"plan": Capture("resid_post", positions=2)}, PlanError, "Capture.positions is 2"),
        ({"plan": Capture("resid_post", layers=99)}, PlanError, "layers"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    hf: LanguageModel, tmp_path: Path, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hf.collect([[1, 2, 3], [1, 2]], **{"plan": LAST, "to": tmp_path / "rows", **given})
    assert not (tmp_path / "rows").exists()


# ---------------------------------------------------------------------------------------------- what will be written


ALL = Capture("resid_post", layers=3, positions="all_prompt")
ROW = 256 * 4  # bytes of a row of the bundled model in float32


def sizes(store: Store) -> tuple[int, int]:
    """The rows and bytes in a store."""
    tensors = [capture[key] for capture in store.values() for key in capture]
    return sum(len(each) for each in tensors), sum(each.nbytes for each in tensors)


@pytest.mark.parametrize(
    ("plan", "params"),
    [
        (LAST, {}),
        ([ALL, Capture("mlp_out", positions=[0, -1], dtype="float16")], {}),
        (
            [Capture("attn_z", layers=2, positions="all"), Steer("resid_post", layers=1, vector=torch.ones(256))],
            {"max_tokens": 4},
        ),
        (Capture("resid_post", layers=[1, 2], positions=Subsample(0.5, of="all")), {"max_tokens": 5}),
        ([Capture("resid_post", layers=3, positions=0), ALL, Capture("resid_post", layers=3, when="after")], {}),
    ],
    ids=["last", "several", "generated", "subsample", "overlapping"],
)
def test_an_estimate_is_what_is_written(model: Any, tmp_path: Path, plan: Any, params: dict[str, Any]) -> None:
    params = {**params, "temperature": 0.0, "ignore_eos": True}
    estimate = model.estimate(iter(IDS), plan=plan, **params)
    assert not list(tmp_path.iterdir())
    store = model.collect(IDS, plan=plan, to=tmp_path, **params)
    assert (estimate.prompts, estimate.rows, estimate.nbytes) == (4, *sizes(store))
    assert model.estimate(IDS, plan=plan, to=tmp_path, **params) == Estimate(0, 0, 0)
    assert model.estimate([*IDS, [1, 2]], plan=plan, to=tmp_path, **params).prompts == 1


def test_an_estimate_reads_well_and_refuses_what_collect_does(hf: LanguageModel, tmp_path: Path) -> None:
    text = ["The capital of France is"] * 1000
    assert repr(hf.estimate(text, plan=ALL)) == "<1,000 prompts: 5,000 rows, 5.12 MB>"
    shown = {0: "0 B", 999: "999 B", 999_900: "1 MB", 12_345_678_901: "12.3 GB", 4 * 10**15: "4000 TB"}
    assert {nbytes: repr(Estimate(1, 1, nbytes)).split(", ")[1][:-1] for nbytes in shown} == shown
    assert hf.estimate(text[:2], plan=replace(ALL, positions=Span("of France"))).rows == 4
    with pytest.raises(PlanError, match=r"Capture.positions is 4"):
        hf.estimate(IDS, plan=replace(ALL, positions=4))
    with pytest.raises(ParameterError, match="max_tokens is 1"):
        hf.estimate(IDS, plan=replace(ALL, positions="all"))
    hf.collect(IDS, plan=LAST, to=tmp_path)
    with pytest.raises(CaptureError, match="captures of another plan"):
        hf.estimate(IDS, plan=ALL, to=tmp_path)


def test_an_estimate_of_many_prompts_takes_no_time(hf: LanguageModel) -> None:
    many = [[1, 2 + i % 2000, *[3] * (i % 300)] for i in range(20_000)]
    started = time.process_time()
    assert hf.estimate(many, plan=ALL).rows == sum(map(len, many))
    assert time.process_time() - started < 5  # 0.4 s, where nothing else runs


def test_what_will_be_written_is_logged_before(hf: LanguageModel, tmp_path: Path, caplog: Any) -> None:
    hf.collect(IDS[:2], plan=ALL, to=tmp_path)
    assert not caplog.text  # a small new collection says nothing
    caplog.set_level("INFO", "midstream")
    hf.collect(IDS, plan=ALL, to=tmp_path)
    assert re.search(r"2 of 4 prompts are in \S+ already; 2 to go: 7 rows, 7.17 kB; [\d.]+ [GT]B are free", caplog.text)
    caplog.clear()
    hf.collect(IDS, plan=replace(ALL, positions="all"), to=tmp_path / "other", max_tokens=3)
    assert "4 prompts to collect: up to 22 rows, 22.5 kB; " in caplog.text


def test_more_than_the_disk_has_room_for_is_refused(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = namedtuple("disk", "total used free")
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or disk(1 << 40, 0, 14 * ROW - 1))
    to = tmp_path / "not" / "there"
    with pytest.raises(
        CaptureError, match=r"4 prompts would write 14 rows, 14.3 kB, and .*there has 14.3 kB free.*limit_bytes="
    ):
        hf.collect(IDS, plan=ALL, to=to)
    assert asked == [tmp_path] and not list(tmp_path.iterdir())
    assert len(hf.collect(IDS, plan=ALL, to=to, limit_bytes=9 * ROW)) == 3
    assert len(hf.collect(IDS, plan=ALL, to=to)) == 4  # the rest fits
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk(0, 0, 0))  # a file system that does not tell
    assert len(hf.collect(IDS, plan=ALL, to=tmp_path / "other")) == 4


def test_a_call_writes_no_more_than_its_limit(hf: LanguageModel, tmp_path: Path, caplog: Any) -> None:
    store = hf.collect(IDS, plan=ALL, to=tmp_path, limit_bytes=8 * ROW)  # 3, 4, 2 and 5 rows
    assert [capture.prompt_token_ids for capture in store.values()] == IDS[:2]
    assert "4 prompts to collect: 7 rows, 7.17 kB;" in caplog.text
    assert "limit_bytes leaves 2 of them for another call" in caplog.text
    caplog.clear()
    assert len(hf.collect(IDS, plan=ALL, to=tmp_path, limit_bytes=7 * ROW)) == 4
    assert "2 to go: 7 rows" in caplog.text and "leaves" not in caplog.text
    for limit, message in [
        (3 * ROW - 1, "limit_bytes is 3,071; allowed: at least 3,072, the bytes of the prompt 'a'"),
        (0, "limit_bytes is 0; allowed is a number of bytes"),
    ]:
        with pytest.raises(ParameterError, match=message):
            hf.collect(IDS, plan=ALL, to=tmp_path / "other", ids="abcd", limit_bytes=limit)
    assert not (tmp_path / "other").exists()


# ------------------------------------------------------------------------------------------------------ special tokens


SPECIAL = [[0, 5, 17, 0], [0, 33, 60, 91], [120, 0], [44, 45, 46, 47], [0]]  # 0 is <|endoftext|>


@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        ("all_prompt", [[1, 2], [1, 2, 3], [0], [0, 1, 2, 3], []]),
        ("last_prompt", [[], [3], [], [3], []]),
        ("all", [[1, 2, 4, 5], [1, 2, 3, 4, 5], [0, 2, 3], [0, 1, 2, 3, 4, 5], [1, 2]]),
        ([0, -1], [[], [3], [0], [0, 3], []]),
        (Subsample(1.0, skip=2), [[2], [2, 3], [], [2, 3], []]),
    ],
    ids=str,
)
def test_special_tokens_are_left_out(
    model: Any, plain: Plain, tmp_path: Path, positions: Any, rows: list[list[int]]
) -> None:
    prompts = SPECIAL[: 4 if positions == [0, -1] else 5]  # the last one has only one position
    given = {"plan": replace(LAST, positions=positions), "skip_special_tokens": True, "max_tokens": 3, **GREEDY}
    store = model.collect(prompts, to=tmp_path, **given)
    assert [capture.positions["resid_post", 3] for capture in store.values()] == rows[: len(prompts)]
    assert model.estimate(prompts, **given).rows == sum(map(len, rows[: len(prompts)]))
    for capture in list(store.values())[:2]:
        prompt = capture.prompt_token_ids
        tokens = [*prompt, *plain.generate(prompt, 3)][:-1]
        if there := capture.positions["resid_post", 3]:
            close(capture["resid_post", 3], plain.run(tokens).sites["resid_post", 3][there])


def test_special_tokens_are_those_that_decode_leaves_out(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of them are in `all_special_ids`: Llama 3's headers are not. A directory keeps to the choice, and to the tokens."""
    text = "The capital of France is<|endoftext|>"
    for positions, rows in [("all_prompt", [0, 1, 2, 3, 4]), (Span("is<|endoftext|>"), [4])]:
        (capture,) = hf.collect(
            text, plan=replace(LAST, positions=positions), to=tmp_path / str(rows), skip_special_tokens=True
        ).values()
        assert len(capture.prompt_token_ids) == 6 and capture.positions["resid_post", 3] == rows
    tokenizer = copy.deepcopy(hf.tokenizer)
    header, other = tokenizer.convert_ids_to_tokens([33, 60])
    tokenizer.add_tokens([AddedToken(header, special=True), AddedToken(other)])
    monkeypatch.setattr(hf, "tokenizer", tokenizer)
    assert tokenizer.all_special_ids == [0]
    prompt = [5, 33, 17, 60, 0]
    (capture,) = hf.collect([prompt], plan=ALL, to=tmp_path / "added", skip_special_tokens=True).values()
    assert capture.positions["resid_post", 3] == [0, 2, 3]
    for skips in (False, True):
        hf.collect(IDS, plan=ALL, to=tmp_path / f"skips {skips}", skip_special_tokens=skips)
        with pytest.raises(CaptureError, match="captures of another plan"):
            hf.collect(IDS, plan=ALL, to=tmp_path / f"skips {skips}", skip_special_tokens=not skips)
    monkeypatch.undo()
    with pytest.raises(CaptureError, match="captures of another plan"):  # other tokens are special now
        hf.collect(IDS, plan=ALL, to=tmp_path / "skips True", skip_special_tokens=True)
    with pytest.raises(PlanError, match="skip_special_tokens is 'yes'; allowed: True or False"):
        hf.collect(IDS, plan=ALL, to=tmp_path / "no", skip_special_tokens="yes")


def test_prompts_share_their_plans_where_the_same_positions_are_left_out(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    really = LanguageModel._run
    monkeypatch.setattr(
        LanguageModel,
        "_run",
        lambda self, invokes, **given: plans.extend(each.plan for each in invokes) or really(self, invokes, **given),
    )
    hf.collect([[0, 1 + i, *[7] * (i % 5)] for i in range(40)], plan=ALL, to=tmp_path, skip_special_tokens=True)
    assert len(plans) == 40 and len(set(map(id, plans))) == 1


# --------------------------------------------------------------------------------- what writers leave when they are killed


@contextmanager
def left_by_the_dead(directory: Path) -> Iterator[dict[str, Path]]:
    """A directory with a dead writer's request, a shard of it that no line refers to, and one half written; and a live writer's."""
    code = f"""
import os, sys
import torch
from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.directory import DirectorySink
sink = DirectorySink({str(directory)!r})
for name in ("listed", "unlisted"):
    sink.begin(CaptureInfo(name, (1, 2)))
    sink.rows(name, "resid_post", 0, [0, 1], torch.ones(2, 4))
    sink.end(name, None)
    if name == "listed":
        sink.flush()
sink._write(sink._ended)
(sink._directory / f"{{sink.writer}}-00002.tmp").write_bytes(b"half")
os.write(sink._index, b'{{"request": "torn", "eng')
print(sink.writer, flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL
    dead = done.stdout.strip()
    with closing(DirectorySink(directory)) as live:
        live.begin(CaptureInfo("live", (1,)))
        live.rows("live", "resid_post", 0, [0], torch.ones(1, 4))
        live._write(live._open.values())
        (directory / f"{live.writer}-00001.tmp").write_bytes(b"being written")
        yield {
            "listed": directory / f"{dead}-00000.safetensors",
            "orphan": directory / f"{dead}-00001.safetensors",
            "half": directory / f"{dead}-00002.tmp",
            "live": directory / f"{live.writer}-00000.safetensors",
            "live half": directory / f"{live.writer}-00001.tmp",
        }
        live.end("live", None)


def test_orphans_of_the_dead_are_removed_and_nothing_of_the_living(tmp_path: Path) -> None:
    with left_by_the_dead(tmp_path) as files:
        assert all(path.exists() for path in files.values())
        assert list(open_captures(tmp_path)) == ["listed"]  # readers pass over the rest
        remove_orphans(tmp_path)
        assert [name for name, path in files.items() if path.exists()] == ["listed", "live", "live half"]
        assert open_captures(tmp_path)["listed"]["resid_post", 0].shape == (2, 4)
    assert set(open_captures(tmp_path)) == {"listed", "live"}
    remove_orphans(tmp_path)  # the live one has ended, with a file that it did not mean to leave
    assert [name for name, path in files.items() if path.exists()] == ["listed", "live"]
    assert open_captures(tmp_path)["live"]["resid_post", 0].shape == (1, 4)


def test_orphans_stay_where_the_dead_cannot_be_told_from_the_living(tmp_path: Path) -> None:
    """Of another host, and where a line cannot be read."""
    stored(tmp_path, "a")
    (index,) = tmp_path.glob("index-*")
    writer = index.stem.removeprefix("index-")
    orphan = tmp_path / f"{writer}-00007.safetensors"
    orphan.write_bytes(b"")
    text = index.read_bytes()
    index.write_bytes(text + b'{"reque\n')
    remove_orphans(tmp_path)
    assert orphan.exists()
    date, clock, _, *rest = writer.split("-")
    elsewhere = "-".join([date, clock, "elsewhere", *rest])
    index.write_bytes(text)
    index.rename(tmp_path / f"index-{elsewhere}.jsonl")
    orphan = orphan.rename(tmp_path / f"{elsewhere}-00007.safetensors")
    remove_orphans(tmp_path)
    assert orphan.exists()


def test_a_repeated_collection_removes_orphans(hf: LanguageModel, tmp_path: Path) -> None:
    hf.collect(IDS[:1], plan=LAST, to=tmp_path)
    with closing(DirectorySink(tmp_path)) as sink:
        orphan = tmp_path / f"{sink.writer}-00000.safetensors"
        orphan.write_bytes(b"")
    hf.collect(IDS[:2], plan=LAST, to=tmp_path)
    assert not orphan.exists() and len(open_captures(tmp_path)) == 2


def test_a_prompt_whose_shard_is_gone_is_run_again(hf: LanguageModel, tmp_path: Path, caplog: Any) -> None:
    hf.collect(IDS[:1], plan=LAST, to=tmp_path, ids=["a"])
    (gone,) = tmp_path.glob("*.safetensors")
    hf.collect(IDS[1:2], plan=LAST, to=tmp_path, ids=["b"])
    gone.unlink()
    store = hf.collect(IDS[:2], plan=LAST, to=tmp_path, ids=["a", "b"])
    assert "1 of 2" in caplog.text and sorted(store) == ["a", "b"]
    assert store["a"]["resid_post", 3].shape == store["b"]["resid_post", 3].shape


def test_a_prompt_that_failed_is_run_again(hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = DirectorySink.rows

    def rows(self: Any, request_id: str, *rest: Any, **named: Any) -> None:
        if self._open[request_id].info.prompt_token_ids == tuple(IDS[1]):
            raise OSError("no room")
        really(self, request_id, *rest, **named)

    monkeypatch.setattr(DirectorySink, "rows", rows)
    with pytest.raises(CaptureError, match="no room"):
        hf.collect(IDS, plan=LAST, to=tmp_path, ids=list("abcd"))
    there = open_captures(tmp_path)
    assert list(there) == ["a", "c", "d"] and list(there.failed) == ["b"]
    monkeypatch.setattr(DirectorySink, "rows", really)
    store = hf.collect(IDS, plan=LAST, to=tmp_path, ids=list("abcd"))
    assert sorted(store) == list("abcd") and store.failed == {}


def test_a_line_that_is_no_object_is_passed_over(tmp_path: Path, caplog: Any) -> None:
    stored(tmp_path, "a")
    (index,) = tmp_path.glob("index-*")
    index.write_bytes(index.read_bytes() + b"17\n[]\n")
    assert list(open_captures(tmp_path)) == ["a"] and caplog.text.count("is ignored") == 2


# ------------------------------------------------------------------------------------------------------ what is killed


LONG_AGO = 2.0  # seconds: more than ended requests wait for each other, and a flush takes


@contextmanager
def running(mode: str, directory: Path) -> Iterator[Program]:
    """A collection in a process of its own, of which 40 requests have ended long ago. The block's end kills all its processes."""
    process = Program(partial(collect_script.main, mode, directory), ["collect"], directory / "errors", {})
    try:
        deadline = time.monotonic() + 300
        while len(ended_before(directory, time.time() - LONG_AGO)) < 40:
            assert process.poll() is None and time.monotonic() < deadline, (directory / "errors").read_text()[-3000:]
            time.sleep(0.02)
        yield process
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def killed(mode: str, directory: Path) -> list[str]:
    """Run a collection, and kill it with all its processes; which of its requests had ended long before."""
    with running(mode, directory):
        killed_at = time.time()
    return ended_before(directory, killed_at - LONG_AGO)


def ended_before(directory: Path, when: float) -> list[str]:
    if not (directory / "ended").exists():
        return []
    lines = [line.split() for line in (directory / "ended").read_text().splitlines()]
    return [name for ended, name in lines if float(ended) < when]


def check_what_is_left(directory: Path, long_ended: list[str], plain: Plain) -> Store:
    """All that had ended long before is there, as transformers has it."""
    store = open_captures(directory / "rows")
    there = {capture.request_id for capture in store.values()}
    assert len(set(long_ended) - there) <= 2, (len(long_ended), len(there))
    check_values(list(store.values())[:: max(1, len(store) // 4)], plain)
    return store


def check_values(captures: Any, plain: Plain) -> None:
    for capture in captures:
        prompt = capture.prompt_token_ids
        tokens = [*prompt, *plain.generate(prompt, GENERATED)]
        sites = plain.run(tokens[:-1]).sites
        for layer in (2, 5):
            close(capture["resid_post", layer], sites["resid_post", layer])
            assert capture.positions["resid_post", layer] == list(range(len(prompt) + GENERATED - 1))


def check_the_rest(model: Any, directory: Path, there: int, plain: Plain, caplog: Any) -> None:
    """Run again, it says how many it skips, and then each prompt is there once."""
    assert there < collect_script.COUNT
    store = model.collect(prompts(), plan=plan(), to=directory / "rows", **PARAMS)
    assert f"{there} of {collect_script.COUNT} prompts" in caplog.text
    assert names(store) == sorted(prompts())
    assert not list((directory / "rows").glob("*.tmp"))
    check_values(list(store.values())[there::50], plain)


def test_a_collection_has_files_of_the_size_and_rows_of_the_dtype_asked_for(
    hf: LanguageModel, plain: Plain, tmp_path: Path
) -> None:
    half = replace(LAST, dtype="float16", positions="all_prompt")
    store = hf.collect(IDS, plan=half, to=tmp_path, shard_bytes=2000)  # 14 rows of 512 bytes
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for capture in store.values():
        rows, expected = capture["resid_post", 3], plain.run(capture.prompt_token_ids).sites["resid_post", 3]
        assert rows.dtype == torch.float16
        torch.testing.assert_close(rows.float(), expected, atol=2e-2, rtol=1e-2)
    assert len(hf.collect(IDS, plan=half, to=tmp_path)) == 4  # goes on, with files of any size
    with pytest.raises(CaptureError, match="another plan"):
        hf.collect(IDS, plan=LAST, to=tmp_path)
    with pytest.raises(ParameterError, match="shard_bytes is 0"):
        hf.collect(IDS, plan=LAST, to=tmp_path / "other", shard_bytes=0)


def test_a_collection_that_is_interrupted_before_it_runs_says_in_one_line_how_to_go_on(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    hf.collect(IDS[:1], plan=LAST, to=tmp_path)
    monkeypatch.setattr(hf, "_run", interrupted)
    message = f"^1 of 2 prompts are in '{tmp_path}'\\. The same call again collects the others\\.$"
    with pytest.raises(KeyboardInterrupt, match=message) as caught:
        hf.collect(IDS[:2], plan=LAST, to=tmp_path)
    assert caught.value.__suppress_context__ and len(caught.traceback) == 2
    monkeypatch.undo()
    assert len(hf.collect(IDS[:2], plan=LAST, to=tmp_path)) == 2


@contextmanager
def interrupted_after(
    count: int, monkeypatch: pytest.MonkeyPatch, at: threading.Event | None = None
) -> Iterator[list[str]]:
    """A block that Ctrl-C ends once the rows of so many requests have ended. Yields a list that gets the message. Sets `at` before.

    Ended requests wait an hour for the others that run.
    """
    monkeypatch.setattr(consumers, "COLLECT_LINGER", 3600.0)
    really, ends = DirectorySink.end, iter(range(1, 10**6))

    def end(self: Any, request_id: str, error: Exception | None) -> None:
        really(self, request_id, error)
        if next(ends) == count:
            (at or threading.Event()).set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DirectorySink, "end", end)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt) as caught:
        yield said
    said.append(str(caught.value))


def test_ctrl_c_tells_how_many_prompts_are_in_the_directory(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "at least 0": what had ended was written as the process ended."""
    monkeypatch.setattr(language_model, "BATCH_TOKENS", 64)  # many batches on transformers
    with interrupted_after(60, monkeypatch) as said:
        model.collect(prompts(), plan=plan(), to=tmp_path, **PARAMS)
    there = len(open_captures(tmp_path))
    text = f"{there} of {collect_script.COUNT} prompts are in '{tmp_path}'. The same call again collects the others."
    assert said == [text] and 60 <= there <= collect_script.COUNT
    model.sinks.flush(str(tmp_path))
    assert len(open_captures(tmp_path)) == there


def test_a_second_ctrl_c_tells_how_many_prompts_are_certain(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It interrupts the wait for a slow disk, which goes on to write."""
    really_flush, really_wait = DirectorySink.flush, Sinks.flush
    interrupted, waits, written = (threading.Event() for _ in range(3))

    def flush(self: Any) -> None:
        if interrupted.is_set() and not written.is_set():
            assert waits.wait(30)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            assert written.wait(30)
        really_flush(self)

    def wait(self: Any, to: Any) -> str | None:
        waits.set()
        return really_wait(self, to)

    hf.collect(prompts()[:7], plan=plan(), to=tmp_path, **PARAMS)
    monkeypatch.setattr(language_model, "BATCH_TOKENS", 64)
    monkeypatch.setattr(DirectorySink, "flush", flush)
    monkeypatch.setattr(Sinks, "flush", wait)
    with interrupted_after(60, monkeypatch, interrupted) as said:
        hf.collect(prompts(), plan=plan(), to=tmp_path, **PARAMS)
    there = len(open_captures(tmp_path))
    assert said[0].startswith(f"At least {there} of {collect_script.COUNT} prompts are in '{tmp_path}'.") and there >= 7
    written.set()
    assert hf.sinks.flush(str(tmp_path)) is None
    assert len(open_captures(tmp_path)) > there


def test_ctrl_c_on_a_disk_that_fails_tells_what_is_there_and_why(
    hf: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    hf.collect(prompts()[:7], plan=plan(), to=tmp_path, **PARAMS)
    monkeypatch.setattr(language_model, "BATCH_TOKENS", 64)
    with monkeypatch.context() as failing, interrupted_after(60, failing) as said:
        failing.setattr(directory, "write_shard", full)
        hf.collect(prompts(), plan=plan(), to=tmp_path, **PARAMS)
    assert said == [
        f"7 of {collect_script.COUNT} prompts are in '{tmp_path}'. Prompts that ended last could not be written: OSError: [Errno 28] No "
        "space left on device. The same call again collects the others."
    ]
    assert len(open_captures(tmp_path)) == 7
    assert len(hf.collect(prompts()[:9], plan=plan(), to=tmp_path, **PARAMS)) == 9


def test_the_bar_has_prompts_rows_bytes_and_the_time_left(hf: LanguageModel, tmp_path: Path, capfd: Any) -> None:
    hf.collect(IDS, plan=ALL, to=tmp_path / "prompt", progress=True)
    last = capfd.readouterr().err.split("\r")[-1]
    assert re.search(r"4/4 \[\d\d:\d\d<\d\d:\d\d, .*prompt/s, [\d.]+k? rows/s, [\d.]+[kM]?B/s\]", last), last
    hf.collect(IDS, plan=replace(ALL, positions="all"), to=tmp_path / "all", max_tokens=2, progress=True)
    assert "B/s at most]" in capfd.readouterr().err
    hf.collect(IDS, plan=ALL, to=tmp_path / "none")
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_an_interrupted_collection_on_transformers_ends_at_once_and_goes_on(
    hf: LanguageModel, plain: Plain, tmp_path: Path, caplog: Any
) -> None:
    with running("hf", tmp_path) as process:
        interrupted = time.time()
        process.send_signal(signal.SIGINT)
        process.wait(60)
        seconds = time.time() - interrupted
    last = (tmp_path / "errors").read_text().splitlines()[-1]
    assert seconds < 10, last  # one, where nothing else runs
    said = re.fullmatch(
        f"KeyboardInterrupt: (\\d+) of {collect_script.COUNT} prompts are in '{tmp_path / 'rows'}'\\. The same call again collects the "
        "others\\.",
        last,
    )
    assert said, last
    store = check_what_is_left(tmp_path, ended_before(tmp_path, interrupted - 0.5), plain)  # the last batch may be lost
    assert int(said[1]) == len(store)
    check_the_rest(hf, tmp_path, len(store), plain, caplog)


@pytest.mark.matrix  # tests/unit/test_cli.py kills one of two
@pytest.mark.slow
def test_a_killed_collection_on_transformers_goes_on(
    hf: LanguageModel, plain: Plain, tmp_path: Path, caplog: Any
) -> None:
    there = len(check_what_is_left(tmp_path, killed("hf", tmp_path), plain))
    check_the_rest(hf, tmp_path, there, plain, caplog)


@pytest.mark.engine
@pytest.mark.parametrize("mode", [pytest.param("async", marks=pytest.mark.matrix), "stock"])
def test_what_had_ended_is_left_of_other_engines(mode: str, plain: Plain, tmp_path: Path) -> None:
    """An async one, and one that writes itself."""
    check_what_is_left(tmp_path, killed(mode, tmp_path), plain)
    said = (
        f"5 of {collect_script.COUNT} prompts are in {tmp_path / 'rows'} already" in (tmp_path / "errors").read_text()
    )
    assert said == (mode == "async")  # which was called twice


@pytest.mark.engine
def test_a_killed_collection_on_vllm_goes_on(
    request: pytest.FixtureRequest, plain: Plain, tmp_path: Path, caplog: Any
) -> None:
    there = len(check_what_is_left(tmp_path, killed("collect", tmp_path), plain))
    check_the_rest(request.getfixturevalue("engine"), tmp_path, there, plain, caplog)


@pytest.mark.engine
def test_requests_end_with_the_tokens_that_the_client_has_seen(engine: VLLM, tmp_path: Path) -> None:
    """Stop strings, which the client finds, and samples that end at different tokens."""
    kept = Capture("resid_post", layers=2, positions="all", to=(None, tmp_path))
    random = {"temperature": 2.0, "seed": 2, "ignore_eos": True}
    given = ["The capital of France is", "The Eiffel Tower is in the city of"] * 4
    outputs = engine.generate(given, plan=kept, max_tokens=24, n=2, stop=["o", "u"], **random)
    counts = [len(sample.token_ids) for output in outputs for sample in output.outputs]
    store = open_captures(tmp_path)
    assert len(store) == 16 and len(set(counts)) > 1
    for output in outputs:
        for index, (sample, captured) in enumerate(zip(output.outputs, output.captures, strict=True)):
            positions = list(range(len(output.prompt_token_ids) + len(sample.token_ids) - 1))
            written = store[f"{index}_{output.request_id}"]
            assert written.positions["resid_post", 2] == captured.positions["resid_post", 2] == positions
            assert torch.equal(written["resid_post", 2], captured["resid_post", 2])


@pytest.mark.engine
def test_a_prompt_that_is_too_long_is_told_by_its_id(engine: VLLM, tmp_path: Path) -> None:
    with pytest.raises(
        PromptError, match=r"prompts\[1\], with the id 'b': The prompt has 600 tokens; .* up to 511 tokens"
    ):
        engine.collect([[1, 2], [1] * 600], plan=LAST, to=tmp_path / "rows", ids=["a", "b"])
    assert not (tmp_path / "rows").exists()
