"""Captures in a directory: row D5 (safetensors files). Nothing is lost or altered, whoever writes beside it and whenever it dies.

Files are checked with the safetensors library itself; what they should hold is kept beside, in plain dicts.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_tools import (
    BITS,
    KEYS,
    LAYERS,
    A,
    B,
    C,
    Segment,
    Sinks,
    begin,
    cut,
    cuts,
    everything,
    layout,
    random_rows,
    same_bits,
    segment,
    stored,
    wait_until,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import examples
from safetensors.torch import load_file

from midstream.capture import directory as directory_module
from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.directory import DirectorySink, open_captures, write_shard
from midstream.errors import CaptureError, NotCapturedError

# -------------------------------------------------------------------------------------------------- bit for bit


@given(data=st.data(), dtype=st.sampled_from(list(BITS)), count=st.integers(1, 12), shard_rows=st.integers(1, 30))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_is_what_was_captured(tmp_path_factory, data, dtype, count, shard_rows):
    """D5: bf16, fp16 and fp32 keep every bit, however requests are cut, mixed and spread over shards."""
    directory = tmp_path_factory.mktemp("store")
    wholes, pieces = {}, []
    for i, name in enumerate(["a", "b/ü 1", "c"]):
        lay = layout(A, B, C)
        wholes[name] = Segment(name, np.arange(count), lay, random_rows(count, 14, dtype, seed=i))
        pieces += cut(wholes[name], data.draw(cuts(count)))
    sink = DirectorySink(directory, shard_bytes=shard_rows * 100)
    for name in wholes:
        sink.begin(CaptureInfo(name, tuple(range(count))))
    for piece in data.draw(st.permutations(pieces)):
        for plane in piece.layout:
            rows = piece.rows[:, plane.offset : plane.offset + plane.width]
            sink.rows(piece.request, plane.site, plane.layer, piece.positions.tolist(), rows, plane.when)
    for name in wholes:
        sink.end(name, None)
        if data.draw(st.booleans()):
            sink.flush()
    sink.close()
    captures = open_captures(directory)
    assert set(captures) == set(wholes) and len(captures) == 3
    for name, whole in wholes.items():
        capture = captures[name]
        assert set(capture) == set(KEYS.values())
        for plane in whole.layout:
            key = KEYS[(plane.site, plane.layer, plane.when, plane.width)]
            assert same_bits(capture[key], whole.rows[:, plane.offset : plane.offset + plane.width])
            assert capture.positions[key] == list(range(count))
        assert capture.prompt_token_ids == list(range(count)) and capture.request_id == name
    assert list(directory.glob("*.tmp")) == []


def test_shards_are_plain_safetensors_of_bounded_size(tmp_path):
    """Every byte of a shard is a tensor that the safetensors library finds under its request's name."""
    wholes = {str(i): segment(str(i), range(40), A, C, seed=i) for i in range(12)}
    sink = DirectorySink(tmp_path, shard_bytes=8_000)
    for name, whole in wholes.items():
        sink.begin(CaptureInfo(name))
        for key, first, last in (("resid_post", 14), 0, 4), (("mlp_out", 2), 4, 10):
            sink.rows(name, *key, list(range(40)), whole.rows[:, first:last])
        sink.end(name, None)
    sink.close()
    shards = sorted(tmp_path.glob("*.safetensors"))
    found = {}
    for path in shards:
        for name, tensor in load_file(path).items():
            _, _, plain = name.partition(":")
            found[plain] = tensor
        assert path.stat().st_size < 10_000
    assert 3 <= len(shards) <= 5
    for name, whole in wholes.items():
        assert same_bits(found[f"{name}/resid_post/14/before"], whole.rows[:, :4])
        assert same_bits(found[f"{name}/mlp_out/2/before"], whole.rows[:, 4:])


def test_tensors_are_mapped_not_loaded(tmp_path):
    rows = random_rows(3, 1 << 18)
    planes = ("resid_post", 0, "before", 1 << 18)
    with closing(Sinks()) as sinks:
        write(sinks, tmp_path, Segment("a", np.arange(3), layout(planes), rows), planes)
        sinks.result("a")
    tensor = open_captures(tmp_path)["a"]["resid_post", 0]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in maps]
    assert any(first <= tensor.data_ptr() < last for first, last in ranges)
    tensor.zero_()  # nobody else's numbers
    assert same_bits(open_captures(tmp_path)["a"]["resid_post", 0], rows)


@pytest.mark.parametrize("positions", [[0, 1, 2], [5], [1, 3, 4, 5, 9]])
def test_positions_are_kept(tmp_path, positions):
    whole = segment("a", positions, A)
    with closing(Sinks()) as sinks:
        begin(sinks, "a", *everything(tmp_path, A, positions=positions), prompt=[1] * 10, layers=LAYERS)
        sinks.put(whole)
        sinks.end("a", 10)
        sinks.result("a")
    capture = open_captures(tmp_path)["a"]
    assert capture.positions["resid_post", 14] == positions and same_bits(capture["resid_post", 14], whole.rows)


def test_a_site_without_rows_has_a_tensor_without_rows(tmp_path):
    with closing(Sinks()) as sinks:
        begin(sinks, "a", *everything(tmp_path, A, positions="all_generated"), prompt=[1, 2], layers=LAYERS)
        sinks.put(segment("a", [0, 1], A, C))
        sinks.end("a", 2)
        sinks.result("a")
    capture = open_captures(tmp_path)["a"]
    assert capture["resid_post", 14].shape == (0, 4) and capture.positions["resid_post", 14] == []


# ------------------------------------------------------------------------------------------- while it grows, and after


def test_a_collected_request_can_be_read_while_others_run(tmp_path):
    with closing(Sinks()) as sinks:
        begin(sinks, "open", *everything(tmp_path, A), prompt=[1, 2, 3], layers=LAYERS)
        sinks.put(segment("open", [0, 1], A))
        whole = segment("a", range(3), A)
        write(sinks, tmp_path, whole, A)
        sinks.result("a")
        captures = open_captures(tmp_path)
        assert list(captures) == ["a"] and same_bits(captures["a"]["resid_post", 14], whole.rows)
        later = segment("b", range(5), A)
        write(sinks, tmp_path, later, A)
        sinks.result("b")
        assert "b" not in captures and same_bits(captures["b"]["resid_post", 14], later.rows)  # it looks again
        assert set(captures) == {"a", "b"}
        sinks.put(segment("open", [2], A))
        sinks.end("open", 3)
        wait_until(lambda: "open" in (captures.refresh() or captures))  # also when nobody waits for it
        sinks.result("open")


def test_requests_that_end_together_share_a_shard_and_the_index_is_appended_to(tmp_path, monkeypatch):
    """Thousands of requests: a line each, and no byte of the index is written twice."""
    appended = []
    really = directory_module._append
    monkeypatch.setattr(directory_module, "_append", lambda fd, lines: appended.append(len(lines)) or really(fd, lines))
    rounds, many = 4, 500
    with closing(Sinks()) as sinks:
        for i in range(rounds):
            names = [f"{i}-{j}" for j in range(many)]
            for name in names:
                begin(sinks, name, *everything(tmp_path, A), prompt=[1, 2], layers=LAYERS)
            for name in names:
                sinks.put(segment(name, range(2), A))
                sinks.end(name, 2)
            for name in names:
                sinks.result(name)
    (index,) = tmp_path.glob("index-*.jsonl")
    assert sum(appended) == index.stat().st_size
    assert len(list(tmp_path.glob("*.safetensors"))) <= 40  # 4, and more where writing takes seconds
    start = time.thread_time()
    captures = open_captures(tmp_path)
    assert len(captures) == rounds * many and time.thread_time() - start < 10
    assert same_bits(captures["2-499"]["resid_post", 14], segment("", range(2), A).rows)


def test_a_failed_request_is_listed_as_failed(tmp_path):
    with closing(Sinks()) as sinks:
        for name in ("a", "b"):
            begin(sinks, name, *everything(tmp_path, A), prompt=[1, 2], layers=LAYERS)
            sinks.put(segment(name, [0, 1], A))
        sinks.end("a", error=RuntimeError("was aborted"))
        sinks.end("b", 3)  # position 2 is missing
        with pytest.raises(RuntimeError, match="was aborted"):
            sinks.result("a")
        with pytest.raises(CaptureError, match="1 row did not come"):
            sinks.result("b")
    captures = open_captures(tmp_path)
    assert list(captures) == [] and set(captures.failed) == {"a", "b"}
    with pytest.raises(CaptureError, match="'a' failed: RuntimeError: was aborted"):
        captures["a"]
    assert "did not come" in captures.failed["b"]


# ------------------------------------------------------------------------------------------------- several writers


def test_stages_of_a_pipeline_are_merged(tmp_path):
    """Each rank writes its own layers of the same request; until all have, the request is not complete."""
    first, last = segment("r", range(4), C, seed=1), segment("r", range(4), A, B, seed=2)
    with closing(Sinks()) as upstream, closing(Sinks()) as downstream:
        write(upstream, tmp_path, first, C, prompt=[5, 6, 7], engine="e", stage=(0, 2))
        upstream.result("r")
        captures = open_captures(tmp_path)
        assert list(captures) == [] and len(captures) == 0
        with pytest.raises(CaptureError, match=r"not complete: of 2 pipeline stages, \[1\] have not"):
            captures["r"]
        write(downstream, tmp_path, last, A, B, prompt=[5, 6, 7], engine="e", stage=(1, 2))
        downstream.result("r")
    capture = captures["r"]
    assert list(capture) == [KEYS[C], KEYS[A], KEYS[B]] and capture.prompt_token_ids == [5, 6, 7]
    assert same_bits(capture[KEYS[C]], first.rows)
    assert same_bits(capture[KEYS[A]], last.rows[:, :4]) and same_bits(capture[KEYS[B]], last.rows[:, 4:])


def test_a_stage_whose_line_is_lost_is_not_joined_with_a_later_run_of_the_id(tmp_path):
    """Each run of an id is a request of its own, whichever stages have written it."""
    lost, first, last = segment("r", range(4), A, seed=1), segment("r", range(4), C, seed=2), segment("r", range(4), A)
    with closing(Sinks()) as upstream, closing(Sinks()) as downstream:
        for sinks, rows, plane, stage, run in [
            (downstream, lost, A, 1, "r-11111111"),  # whose upstream stage died before it wrote
            (upstream, first, C, 0, "r-22222222"),
            (downstream, last, A, 1, "r-22222222"),
        ]:
            write(sinks, tmp_path, rows, plane, prompt=[5, 6, 7], engine="e", stage=(stage, 2), run=run)
            sinks.result("r")
    captures = open_captures(tmp_path)
    ((name, capture),) = captures.items()
    assert same_bits(capture[KEYS[C]], first.rows) and same_bits(capture[KEYS[A]], last.rows)
    with pytest.raises(CaptureError, match=r"not complete: of 2 pipeline stages, \[0\] have not"):
        captures[({"r", "r#2"} - {name}).pop()]


def test_engines_with_the_same_request_ids_do_not_mix(tmp_path):
    one = stored(tmp_path, "0", 3, engine="x")
    assert same_bits(open_captures(tmp_path)["0"]["mlp_out", 2], one.rows[:, 4:])
    two = stored(tmp_path, "0", 5, engine="y")
    again = stored(tmp_path, "0", 7, engine="y")
    stored(tmp_path, "1", 2)
    captures = open_captures(tmp_path)
    assert sorted(captures) == ["0@x", "0@y", "0@y#2", "1"]
    with pytest.raises(NotCapturedError, match="several engines wrote one, so ask for '0@x' or '0@y'"):
        captures["0"]
    shapes = {name: captures[name]["resid_post", 14].shape[0] for name in captures}
    assert sorted(shapes.values()) == [2, 3, 5, 7] and shapes["0@x"] == 3
    found = [captures["0@y"]["mlp_out", 2], captures["0@y#2"]["mlp_out", 2]]
    found.sort(key=len)
    assert same_bits(found[0], two.rows[:, 4:]) and same_bits(found[1], again.rows[:, 4:])


WRITER = """
import sys, numpy as np, torch
from capture_tools import A, C, Sinks, everything, segment, write
from pathlib import Path
sinks, directory = Sinks(), Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    name = f"{{sys.argv[2]}}-{{i}}"
    write(sinks, directory, segment(name, range(50), A, C, seed=i), A, C, prompt=range(50))
    sinks.result(name)
    print(name, flush=True)
sinks.close()
"""


def writer(directory: Path, name: str, count: int) -> subprocess.Popen:
    code = textwrap.dedent(WRITER.format())
    command = [sys.executable, "-c", code, str(directory), name, str(count)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_processes_write_at_once_and_one_is_killed(tmp_path):
    """What a process was told to be done with is there and whole, though it was killed in the middle of more."""
    steady, doomed = writer(tmp_path, "steady", 40), writer(tmp_path, "doomed", 1_000_000)
    try:
        for process in (steady, doomed):
            assert process.stdout.readline() == "ready\n"
        for process in (steady, doomed):
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [doomed.stdout.readline().strip() for _ in range(25)]
        doomed.send_signal(signal.SIGKILL)
        told += doomed.stdout.read().split()
        assert len(steady.stdout.read().split()) == 40 and steady.wait(60) == 0
    finally:
        doomed.kill(), doomed.wait(60), steady.kill(), steady.wait(60)
    captures = open_captures(tmp_path)
    assert {f"steady-{i}" for i in range(40)} | set(told) <= set(captures)
    assert len(captures) <= 40 + len(told) + 1
    for name in captures:
        want = segment(name, range(50), A, C, seed=int(name.split("-")[1])).rows
        assert same_bits(captures[name]["resid_post", 14], want[:, :4])
        assert same_bits(captures[name]["mlp_out", 2], want[:, 4:])


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_an_index_cut_off_anywhere_gives_the_requests_before_the_cut(tmp_path):
    written = tmp_path / "written"
    wholes = {}
    with closing(Sinks()) as sinks:
        for name in ("a", "b"):
            wholes[name] = segment(name, range(2), A)
            write(sinks, written, wholes[name], A)
            sinks.result(name)
    (index,) = written.glob("index-*.jsonl")
    text = index.read_bytes()
    ends = [i + 1 for i, byte in enumerate(text) if byte == 10]
    for size in range(1, len(text)):
        index.write_bytes(text[:size])
        there = sum(end <= size for end in ends) - 1  # the first line says the format
        assert list(open_captures(written)) == ["a", "b"][: max(there, 0)]
    captures = open_captures(written)
    assert list(captures) == ["a"]
    index.write_bytes(text)  # the writer finished its line
    assert same_bits(captures["b"]["resid_post", 14], wholes["b"].rows) and list(captures) == ["a", "b"]


def test_a_line_that_cannot_be_read_costs_no_other(tmp_path, caplog):
    stored(tmp_path, "a")
    (index,) = tmp_path.glob("index-*.jsonl")
    first, second = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(first + b'{"request": "lo\n' + second)
    assert list(open_captures(tmp_path)) == ["a"] and "is ignored" in caplog.text


def test_unknown_requests_and_sites_name_the_near_ones(tmp_path):
    stored(tmp_path, "run-17"), stored(tmp_path, "other")
    captures = open_captures(tmp_path)
    for ask, hint in [
        (lambda: captures["run-18"], r"no request 'run-18': did you mean 'run-17'\?"),
        (lambda: captures["zzz"], "there are 'other', 'run-17'"),
        (lambda: captures["run-17"]["resid_pots", 14], r"'run-17' has no .*did you mean 'resid_post'\?"),
        (lambda: captures["run-17"]["resid_post", 15], r"resid_post is there at layers \[14\]"),
        (lambda: captures["run-17"].positions["attn", 14], "there are 'mlp_out', 'resid_post'"),
    ]:
        with pytest.raises(NotCapturedError, match=hint):
            ask()
    assert captures.get("zzz") is None and "zzz" not in captures


def test_a_damaged_shard_is_an_error_that_says_so(tmp_path):
    stored(tmp_path, "a"), stored(tmp_path, "b")
    whole = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    names = {
        json.loads(line)["request"]: json.loads(line)
        for path in tmp_path.glob("index*")
        for line in path.open()
        if b"request" in line.encode()
    }
    path = tmp_path / names["a"]["parts"][0]["shard"]

    def fails(reason):
        captures = open_captures(tmp_path)
        with pytest.raises(CaptureError, match=reason) as raised:
            captures["a"]["resid_post", 14]
        assert path.name in str(raised.value)
        assert captures["b"]["resid_post", 14].shape == (3, 4)  # its own shard is whole

    path.write_bytes(whole[path][:-5])
    fails(f"damaged: {len(whole[path]) - 5} bytes of {len(whole[path])}")
    path.write_bytes(b"\xff" * len(whole[path]))
    fails("damaged")
    path.unlink()
    fails("cannot be read")


def test_what_is_no_store_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CaptureError, match="holds no captures"):
            open_captures(path)
    stored(tmp_path, "a")
    (index,) = tmp_path.glob("index-*.jsonl")
    index.write_bytes(index.read_bytes().replace(b'"version": "1"', b'"version": "2"'))
    with pytest.raises(CaptureError, match="another version"):
        open_captures(tmp_path)


def test_a_directory_that_cannot_be_made_fails_the_request(tmp_path):
    (tmp_path / "file").write_text("")
    with closing(Sinks()) as sinks:
        write(sinks, tmp_path / "file" / "below", segment("a", [0], A), A)
        with pytest.raises(CaptureError, match=r"directory .*file/below raised .*'a'") as raised:
            sinks.result("a")
        assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("broken", ["shard", "index"])
def test_a_full_disk_fails_what_it_hits_and_later_requests_are_written(tmp_path, monkeypatch, broken):
    full = [False]

    def failing(really):
        def call(*arguments):
            if full[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return really(*arguments)

        return call

    if broken == "shard":  # its data, not its name or the index
        monkeypatch.setattr(directory_module.os, "fsync", failing(os.fsync))
    else:
        monkeypatch.setattr(directory_module, "_append", _half_a_line(full))
    with closing(Sinks()) as sinks:
        for name in ("before", "hit", "after"):
            full[0] = name == "hit"
            write(sinks, tmp_path, segment(name, range(3), A), A)
            if name == "hit":
                with pytest.raises(CaptureError, match=r"raised in flush\(\) of request 'hit'.*No space left"):
                    sinks.result(name)
            else:
                sinks.result(name)
        full[0] = False
    captures = open_captures(tmp_path)
    assert set(captures) == {"before", "after"}
    assert all(captures[name]["resid_post", 14].shape == (3, 4) for name in captures)
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_batch_that_was_not_listed_whole_is_not_listed(tmp_path, monkeypatch):
    """What is reported as failed is not there for readers, and not in memory any more."""
    really = os.writev

    def one_line(descriptor, buffers):
        first, _, rest = b"".join(buffers).partition(b"\n")
        if descriptor == sink._index and not rest:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(descriptor, [first + b"\n"] if descriptor == sink._index else buffers)

    sink = DirectorySink(tmp_path)
    for name in ("a", "b"):
        sink.begin(CaptureInfo(name))
        sink.rows(name, "resid_post", 0, [0], torch.ones(1, 4))
        sink.end(name, None)
    monkeypatch.setattr(os, "writev", one_line)
    with pytest.raises(OSError, match="No space left"):
        sink.flush()
    monkeypatch.setattr(os, "writev", really)
    assert len(open_captures(tmp_path)) == 0
    sink.begin(CaptureInfo("c"))
    sink.rows("c", "resid_post", 0, [0], torch.ones(1, 4))
    monkeypatch.setattr(directory_module, "write_shard", lambda *_: 1 / 0)
    sink.end("c", None)
    with pytest.raises(ZeroDivisionError):
        sink.flush()
    assert sink._size == 0
    sink.close()
    assert len(open_captures(tmp_path)) == 0


def _half_a_line(full):
    """An append during which the disk fills up after a few bytes."""
    append = directory_module._append

    def call(index, lines):
        really = os.writev

        def write_little(descriptor, buffers):
            data = b"".join(buffers)
            if len(data) < len(lines):
                raise OSError(errno.ENOSPC, "No space left on device")
            return really(descriptor, [data[:7]])

        if full[0]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "writev", write_little)
                return append(index, lines)
        return append(index, lines)

    return call


@pytest.mark.parametrize("made_again", [True, False])
def test_a_directory_that_was_removed_is_made_again(tmp_path, made_again):
    """As a notebook clears its outputs. Seen lost: the rows were written, and listed in the index that was not there any more."""
    directory = tmp_path / "rows"
    with closing(Sinks()) as sinks:
        for name in ("before", "after", "later"):
            if name == "after":
                shutil.rmtree(directory)
                if made_again:
                    directory.mkdir()
            write(sinks, directory, segment(name, range(3), A), A)
            sinks.result(name)
    captures = open_captures(directory)
    assert set(captures) == {"after", "later"} and captures["after"]["resid_post", 14].shape == (3, 4)


def test_a_directory_that_was_put_in_the_place_of_another_is_written_to(tmp_path):
    """Such as a copy of it, with the same names."""
    directory = tmp_path / "rows"
    with closing(Sinks()) as sinks:
        write(sinks, directory, segment("before", range(3), A), A)
        sinks.result("before")
        shutil.copytree(directory, tmp_path / "copy")
        shutil.rmtree(directory)
        (tmp_path / "copy").rename(directory)
        write(sinks, directory, segment("after", range(3), A), A)
        sinks.result("after")
    assert set(open_captures(directory)) == {"before", "after"}


def test_closing_makes_no_directory_again(tmp_path):
    sink = DirectorySink(tmp_path / "rows")
    shutil.rmtree(tmp_path / "rows")
    sink.close()
    assert not (tmp_path / "rows").exists()


def test_rows_that_were_in_a_removed_directory_fail_their_request(tmp_path):
    """All requests that were open, or not listed yet, fail; those that begin afterwards are written."""
    directory = tmp_path / "rows"
    sink = DirectorySink(directory, shard_bytes=1)  # each piece is written as it comes
    for name in ("open", "ended", "begun"):
        sink.begin(CaptureInfo(name))
    for name in ("open", "ended"):
        sink.rows(name, "resid_post", 0, [0], torch.ones(1, 4))
    sink.end("ended", None)
    shutil.rmtree(directory)
    with pytest.raises(CaptureError, match="was removed while requests were captured to it"):
        sink.rows("begun", "resid_post", 0, [0], torch.ones(1, 4))
    for name in ("open", "begun"):
        sink.end(name, None)
    with pytest.raises(CaptureError, match="was removed while requests were captured to it"):
        sink.flush()
    sink.begin(CaptureInfo("later"))
    sink.rows("later", "resid_post", 0, [0], torch.ones(1, 4))
    sink.end("later", None)
    sink.close()
    captures = open_captures(directory)
    assert set(captures) == {"later"} and not captures.failed


def test_rows_of_two_kinds_fail_their_own_request(tmp_path):
    with closing(Sinks()) as sinks:
        for name in ("odd", "even"):
            begin(sinks, name, *everything(tmp_path, A), prompt=[1, 2], layers=LAYERS)
            one, two = cut(segment(name, range(2), A), [[0], [1]])
            sinks.put(one)
            sinks.put(two._replace(rows=two.rows.half()) if name == "odd" else two)
            sinks.end(name, 2)
        sinks.result("even")
        with pytest.raises(CaptureError, match=r"float16 \[4\], torch.float32 \[4\]"):
            sinks.result("odd")
    captures = open_captures(tmp_path)
    assert list(captures) == ["even"] and list(captures.failed) == ["odd"]


def test_a_moved_directory_still_reads(tmp_path):
    whole = stored(tmp_path / "here", "a")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert same_bits(open_captures(str(tmp_path / "there"))["a"]["resid_post", 14], whole.rows[:, :4])


def test_memory_stays_within_the_shard_size(tmp_path):
    """A long request does not wait in memory for its end."""
    sink = DirectorySink(tmp_path, shard_bytes=100_000)
    sink.begin(CaptureInfo("a"))
    rows, most = torch.ones(10, 200), 0
    for i in range(200):
        sink.rows("a", "resid_post", 0, list(range(10 * i, 10 * i + 10)), rows)
        most = max(most, sink._size)
    assert most < 100_000 and len(list(tmp_path.glob("*.safetensors"))) >= 15
    assert len(open_captures(tmp_path)) == 0
    sink.end("a", None)
    sink.close()
    assert open_captures(tmp_path)["a"]["resid_post", 0].shape == (2000, 200)


def test_the_last_open_request_waits_for_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.capture.consumers.LINGER", 1000.0)
    with closing(Sinks()) as sinks:
        for name in "ab":
            begin(sinks, name, *everything(tmp_path, A), prompt=range(3), layers=LAYERS)
            sinks.put(segment(name, range(3), A))
        sinks.end("a", 3)
        time.sleep(0.3)
        assert len(open_captures(tmp_path)) == 0
        sinks.end("b", 3)
        wait_until(lambda: len(open_captures(tmp_path)) == 2)


def test_a_shard_that_the_system_writes_in_small_pieces_is_whole(tmp_path, monkeypatch):
    writev, calls = os.writev, []

    def short(descriptor, buffers):
        calls.append(len(buffers))
        whole = b"".join(buffers)
        return writev(descriptor, [whole[: min(len(whole), 1 + 997 * len(calls))]])

    chunks = [torch.arange(7.0 * n).reshape(n, 7) for n in [*range(300), 0, 50]]
    monkeypatch.setattr("os.writev", short)
    size = write_shard(tmp_path / "x.safetensors", {"x": chunks})
    assert (tmp_path / "x.safetensors").stat().st_size == size and len(calls) > 2
    torch.testing.assert_close(load_file(tmp_path / "x.safetensors")["x"], torch.cat(chunks), rtol=0, atol=0)


def test_requests_of_collect_share_a_file_while_others_run(tmp_path, monkeypatch):
    """They wait for each other, up to `COLLECT_LINGER` seconds. The last one waits for nothing."""
    monkeypatch.setattr("midstream.capture.consumers.COLLECT_LINGER", 1000.0)
    with closing(Sinks()) as sinks:
        for name in "ab":
            collected = Collected(name, "model", "plan")
            begin(sinks, name, *everything(tmp_path, A), prompt=range(3), layers=LAYERS, collected=collected)
            sinks.put(segment(name, range(3), A))
        sinks.end("a", 3)
        time.sleep(1.0)
        assert not list(tmp_path.glob("*.safetensors"))
        sinks.end("b", 3)
        wait_until(lambda: len(list(tmp_path.glob("*.safetensors"))) == 1)
        wait_until(lambda: len(open_captures(tmp_path)) == 2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
