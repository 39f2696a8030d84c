"""Captured rows, put together and handed on: rows D4 (every selector, none twice, none lost) and D5 (consumers).

No engine runs here. What the rows should be is looked up position by position, in plain Python.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import tomllib
import weakref
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_tools import (
    Recorder,
    Segment,
    Sinks,
    begin,
    capture_threads,
    cut,
    cuts,
    gather,
    layout,
    random_rows,
    same_bits,
    segment,
    wait_until,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples

from midstream.capture.consumers import CaptureInfo
from midstream.capture.rows import cast_rows, routes
from midstream.errors import CaptureError, MidstreamError, NotCapturedError, PlanError
from midstream.memory import without_collections
from midstream.plan.values import Capture, Consumer, Span

A, B, C = ("resid_post", 1, "before", 3), ("resid_post", 1, "after", 3), ("mlp_out", 2, "before", 5)


@pytest.fixture(autouse=True)
def no_thread_left():
    before = len(capture_threads())
    yield
    wait_until(lambda: len(capture_threads()) <= before)


# ------------------------------------------------------------------------------------------------------------ gather


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
@settings(max_examples=examples(150), deadline=None)
def test_any_cut_in_any_order_gives_the_same_tensors(data, dtype):
    """D4: stages with layouts of their own, each cut at random, some rows beyond the stop."""
    positions = sorted(data.draw(st.sets(st.integers(0, 40), max_size=25)))
    stop = data.draw(st.integers(0, 45))
    segments, want = [], {}
    for stage, planes in enumerate(data.draw(st.permutations([[A, C], [("attn_out", 3, "before", 2), B]]))):
        lay = layout(*data.draw(st.permutations(planes)))
        rows = random_rows(len(positions), sum(plane.width for plane in lay), dtype, seed=stage)
        segments += cut(Segment("r", np.array(positions, np.int64), lay, rows), data.draw(cuts(len(positions))))
        for plane in lay:
            kept = [i for i, position in enumerate(positions) if position < stop]
            want[plane.site, plane.layer, plane.when] = rows[kept, plane.offset : plane.offset + plane.width]
    captured = gather(data.draw(st.permutations(segments)), stop)
    assert set(captured) == {("resid_post", 1), ("resid_post", 1, "after"), ("mlp_out", 2), ("attn_out", 3)}
    for key, tensor in want.items():
        assert same_bits(captured[key], tensor)
        assert captured.positions[key] == [position for position in positions if position < stop]


@pytest.mark.parametrize("planes", [[A], [A, C]])
@pytest.mark.parametrize("pieces", [[[0, 1, 2]], [[0], [1, 2]], [[1, 2], [0]]])
def test_taken_tensors_share_no_memory_with_the_rows(planes, pieces):
    """Seen failing where a plane that came in one piece stayed a view of the rows."""
    whole = segment("r", range(3), *planes)
    parts = [whole] if len(pieces) == 1 else cut(whole, pieces)
    before = [part.rows.clone() for part in parts]
    captured = gather(parts, 3)
    taken = captured.take()
    assert set(taken) == set(captured)
    for key, tensor in taken.items():
        assert same_bits(tensor, captured[key]) and tensor.is_contiguous()
        tensor.zero_()
    assert all(map(same_bits, (part.rows for part in parts), before))


@given(data=st.data(), count=st.integers(1, 20))
@settings(max_examples=examples(100), deadline=None)
def test_a_doubled_row_is_an_error_and_so_is_a_missing_one(data, count):
    """D4: no row lost, none twice, whatever the cut."""
    whole = segment("r", range(count), A, C)
    wanted = routes([Capture("resid_post", layers=1, positions="all")], 4, range(4))[0][1]
    odd = data.draw(st.integers(0, count - 1))
    again = cut(whole, [[odd]])
    pieces = cut(whole, data.draw(cuts(count)))
    with pytest.raises(CaptureError, match=rf"'r': position {odd} came more than once"):
        gather(data.draw(st.permutations(pieces + again)), count)
    assert gather(data.draw(st.permutations(pieces + again)), odd).positions["mlp_out", 2] == list(range(odd))
    kept = [i for i in range(count) if i != odd]
    lacking = cut(whole._replace(positions=whole.positions[kept], rows=whole.rows[kept]), data.draw(cuts(count - 1)))
    with pytest.raises(CaptureError, match=rf"resid_post\[1\] of request 'r': 1 row did not come \(position {odd}\)"):
        gather(lacking, count, wanted)
    assert gather(pieces, count, wanted).positions["resid_post", 1] == list(range(count))


def plainly_wanted(capture: Capture, prompt: int, stop: int) -> list[int]:
    """What the selectors mean, said a second time."""
    if isinstance(capture.positions, tuple):
        return sorted({p + prompt if p < 0 else p for p in capture.positions})
    return {
        "last_prompt": [prompt - 1],
        "all_prompt": list(range(prompt)),
        "all_generated": list(range(prompt, stop)),
        "all": list(range(stop)),
    }[capture.positions]


SELECTORS = st.one_of(
    st.sampled_from(["last_prompt", "all_prompt", "all_generated", "all"]),
    st.lists(st.integers(-5, 4), min_size=1, max_size=4, unique=True),
)


@given(
    data=st.data(),
    prompt=st.integers(5, 12),
    generated=st.integers(1, 6),
    chosen=st.lists(SELECTORS, min_size=1, max_size=3),
)
@settings(max_examples=examples(150), deadline=None)
def test_every_selector_takes_its_rows_and_no_others(data, prompt, generated, chosen):
    """D4: the union of several captures of one site; rows that other sinks asked for are left out."""
    captures = [Capture("resid_post", layers=[1], positions=positions) for positions in chosen]
    stop = prompt + generated - 1
    whole = segment("r", range(stop + 2), A, C)
    captured = gather(cut(whole, data.draw(cuts(stop + 2))), stop, routes(captures, prompt, range(4))[0][1])
    want = sorted(set().union(*(plainly_wanted(capture, prompt, stop) for capture in captures)))
    assert list(captured) == [("resid_post", 1)]
    assert captured.positions["resid_post", 1] == want
    assert same_bits(captured["resid_post", 1], whole.rows[want, :3])


def test_routes_send_each_capture_where_it_is_to_go():
    def first(*_):
        pass

    found = routes(
        [
            Capture("resid_post", layers="all", to=(None, "out", first)),
            Capture("mlp_out", layers=[0, 7], positions="all", to=f"{os.getcwd()}/out"),
            Capture("attn_out", layers=[0], to=Consumer("log", level="info")),
            Capture("attn_out", layers=[1], to=Consumer("log", level="info")),
            Capture("attn_out", layers=[1], to=Consumer("log", level="error")),
        ],
        6,
        range(2),
    )
    assert set(found[0][1]) == {("resid_post", 0, "before"), ("resid_post", 1, "before")}
    assert [set(selected) for _, selected in found[1:]] == [
        {("resid_post", 0, "before"), ("resid_post", 1, "before"), ("mlp_out", 0, "before")},
        {("resid_post", 0, "before"), ("resid_post", 1, "before")},
        {("attn_out", 0, "before"), ("attn_out", 1, "before")},
        {("attn_out", 1, "before")},
    ]
    recorder = Recorder()  # two looks at a method are two objects, and one place
    captures = [Capture("resid_post", layers=[layer], to=recorder.rows) for layer in (0, 1)]
    assert len(routes(captures, 6, range(2))) == 2
    captures += [Capture("resid_post", layers=[0], to=Recorder().rows)]
    assert len(routes(captures, 6, range(2))) == 3
    with pytest.raises(PlanError, match="Span"):
        routes([Capture("resid_post", positions=Span("Paris"))], 6, range(2))


def test_keys_tell_before_from_after_and_name_what_is_there():
    captured = gather([segment("r", [4, 5], A, B, C)], 9)
    assert list(captured) == [("resid_post", 1), ("resid_post", 1, "after"), ("mlp_out", 2)] and len(captured) == 3
    assert captured["resid_post", 1] is captured["resid_post", 1, "before"] is not captured["resid_post", 1, "after"]
    only_after = gather([segment("r", [4, 5], B)], 9)
    assert list(only_after) == [("resid_post", 1)] and only_after["resid_post", 1].shape == (2, 3)
    assert "resid_post" not in captured and ("mlp_out", 3) not in captured and captured.get(("x", 0)) is None
    for key, hint in [
        (("resid_pst", 1), "did you mean 'resid_post'?"),
        (("mlp_out", 3), r"mlp_out is there at layers \[2\]"),
        ("mlp_out", r"ask for \(site, layer\)"),
        (("zzz", 1), "there are 'mlp_out', 'resid_post'"),
        (("mlp_out", [2]), "has no"),
        (("mlp_out", 2, "after"), "has no"),
    ]:
        with pytest.raises(NotCapturedError, match=hint) as raised:
            captured.positions[key]
        assert isinstance(raised.value, MidstreamError) and isinstance(raised.value, KeyError)
        assert "capture of request 'r'" in str(raised.value)


def test_a_request_without_rows_has_tensors_without_rows():
    wanted = routes([Capture("resid_post", layers=1, positions="all_generated")], 4, range(4))[0][1]
    told = segment("r", [], A)
    told = told._replace(rows=told.rows.bfloat16())
    for captured in (gather([told], 4, wanted), gather([told, segment("r", [4], C)], 4, wanted)):
        assert captured["resid_post", 1].shape == (0, 3) and captured["resid_post", 1].dtype == torch.bfloat16
        assert captured.positions["resid_post", 1] == []
    assert gather([], 4, wanted)["resid_post", 1].shape[0] == 0
    assert len(gather([], 4)) == 0


def test_one_piece_is_not_copied_and_more_are_let_go():
    whole = segment("r", range(4), A, C)
    captured = gather([whole], 4)
    assert captured["mlp_out", 2].data_ptr() == whole.rows[:, 3:].data_ptr()
    captured = gather(cut(whole, [[0, 1], [2, 3]]), 4)
    assert len(captured._chunks) == 2
    assert [captured[key].shape for key in captured] == [(4, 3), (4, 5)]
    assert captured._chunks == ()


def test_dropped_captures_are_freed_at_once():
    whole = segment("r", range(4), A, C)
    captured = gather([whole], 4)
    captured["mlp_out", 2], captured.positions["mlp_out", 2]
    rows = weakref.ref(whole.rows)
    with without_collections():  # no cycle holds them until some later collection
        del whole, captured
        assert rows() is None


def test_captures_can_be_pickled():
    whole = segment("r", range(5), A, C)
    captured = pickle.loads(pickle.dumps(gather(cut(whole, [[3, 4], [0, 1, 2]]), 5)))
    assert same_bits(captured["mlp_out", 2], whole.rows[:, 3:]) and captured.positions["resid_post", 1] == [
        0,
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(NotCapturedError, match="request 'r'"):
        captured["mlp_out", 5]


def test_rows_of_two_dtypes_are_refused():
    one, other = cut(segment("r", range(4), A), [[0, 1], [2, 3]])
    captured = gather([one, other._replace(rows=other.rows.half())], 4)
    with pytest.raises(CaptureError, match=r"float16 \[3\], torch.float32 \[3\]"):
        captured["resid_post", 1]


# ------------------------------------------------------------------------------------------------- given is received


@given(data=st.data(), prompt=st.integers(1, 8), generated=st.integers(1, 8), overshoot=st.integers(0, 3))
@settings(max_examples=examples(80), deadline=None)
def test_what_is_given_is_received(data, prompt, generated, overshoot):
    """D5: several requests and consumers at once, rows cut and mixed at random; rows past the stop reach nobody."""
    one, two = Recorder(), Recorder()
    with closing(Sinks(queue_bytes=data.draw(st.sampled_from([1, 200, 1 << 20])))) as sinks:
        given_and_received(data, sinks, one, two, prompt, generated, overshoot)


def given_and_received(data, sinks, one, two, prompt, generated, overshoot):
    stop = prompt + generated - 1
    names, puts, wholes = ["a", "b"], [], {}
    for i, name in enumerate(names):
        wholes[name] = segment(name, range(stop + overshoot), A, B, C, seed=i)
        puts += cut(wholes[name], data.draw(cuts(stop + overshoot)))
    captures = [
        Capture("resid_post", layers=1, positions="all", to=(one.rows, two.rows)),
        Capture("resid_post", layers=1, positions="last_prompt", when="after", to=two.rows),
        Capture("mlp_out", layers=[2], positions="all_generated", to=one.rows),
    ]
    for name in names:
        begin(sinks, name, *captures, prompt_length=prompt)
    for piece in data.draw(st.permutations(puts)):
        if data.draw(st.booleans()):
            sinks.confirm(piece.request, data.draw(st.integers(0, stop)))
        sinks.put(piece)
    for name in names:
        sinks.end(name, stop)
    for name in names:
        sinks.result(name)
        rows = wholes[name].rows
        generated_rows = {p: rows[p, 6:] for p in range(prompt, stop)}
        for recorder, want in [
            (one, {A[:3]: {p: rows[p, :3] for p in range(stop)}, C[:3]: generated_rows}),
            (two, {A[:3]: {p: rows[p, :3] for p in range(stop)}, B[:3]: {prompt - 1: rows[prompt - 1, 3:6]}}),
        ]:
            got = recorder.of(name)
            assert {key: set(found) for key, found in got.items()} == {
                key: set(rows) for key, rows in want.items() if rows
            }
            assert all(same_bits(got[key][p], row) for key, rows in want.items() for p, row in rows.items())


def through(monkeypatch, **makers):
    """Consumers of these names, made by these factories."""
    monkeypatch.setattr("midstream.capture.sinks.find_consumer", lambda name: makers[name])


def test_the_calls_of_a_request_come_in_order(monkeypatch):
    recorder = Recorder()
    through(monkeypatch, it=lambda **options: recorder)
    sinks = Sinks()
    begin(
        sinks,
        "a",
        Capture("resid_post", layers=[1, 2], positions="all", to=Consumer("it")),
        prompt=[7, 8, 9],
        engine="e",
    )
    whole = segment("a", range(5), A)
    sinks.put(cut(whole, [[2, 0]])[0])
    sinks.put(cut(whole, [[1, 3, 4]])[0])
    assert sinks.stats["held_bytes"] == 2 * 3 * 4
    wait_until(lambda: len(recorder.calls) == 3)  # what is generated does not stand yet
    sinks.confirm("a", 4)
    wait_until(lambda: len(recorder.calls) == 4)
    with pytest.raises(
        CaptureError, match=r"resid_post\[2\] of request 'a': 4 rows did not come \(positions 0, 1, 2, 3\)"
    ):
        sinks.end("a", 4), sinks.result("a")
    sinks.close()
    kinds = [call[0] for call in recorder.calls]
    assert kinds == ["begin", "rows", "rows", "rows", "end", "close"]
    info = recorder.calls[0][2]
    assert info == CaptureInfo(
        "a", (7, 8, 9), 3, "e", (0, 1), (("resid_post", 1, "before"), ("resid_post", 2, "before"))
    )
    assert sorted(recorder.of("a")[A[:3]]) == [0, 1, 2, 3]
    assert isinstance(recorder.ended("a"), CaptureError)


def test_doubled_rows_fail_the_request_at_its_end():
    sinks, got = Sinks(), []
    begin(
        sinks,
        "a",
        Capture("resid_post", layers=1, positions="all_prompt", to=lambda *row: got.append(row)),
        prompt=[1, 2],
    )
    sinks.put(segment("a", [0, 1], A))
    sinks.put(segment("a", [1], A))
    sinks.end("a", 2)
    with pytest.raises(CaptureError, match="position 1 came more than once"):
        sinks.result("a")
    sinks.close()


def test_a_site_without_rows_is_told_once():
    recorder, sinks = Recorder(), Sinks()
    begin(sinks, "a", Capture("resid_post", layers=1, positions="all_generated", to=recorder.rows), prompt=[1, 2])
    sinks.put(segment("a", [0, 1], A, C))
    sinks.end("a", 2)
    sinks.result("a")
    ((_, _, key, positions, tensor),) = recorder.calls
    assert (key, positions, tensor.shape) == (A[:3], [], (0, 3))
    sinks.close()


def test_a_callable_without_when_cannot_have_both():
    """D8: refused, not mixed up."""
    sinks, got = Sinks(), []
    both = [Capture("resid_post", layers=1, when=when, to=lambda *row: got.append(row)) for when in ("before", "after")]
    both = [both[0], Capture("resid_post", layers=1, when="after", to=both[0].to)]
    begin(sinks, "a", *both, prompt=[1])
    sinks.put(segment("a", [0], A, B))
    sinks.end("a", 1)
    with pytest.raises(CaptureError, match="no parameter `when`"):
        sinks.result("a")
    begin(sinks, "b", both[1], prompt=[1])
    sinks.put(segment("b", [0], A, B))
    sinks.end("b", 1)
    sinks.result("b")
    assert [row[:4] for row in got] == [("b", "resid_post", 1, [0])]
    sinks.close()


def test_little_out_of_much_does_not_keep_the_rest():
    sinks, kept = Sinks(), []
    begin(
        sinks,
        "a",
        Capture("resid_post", layers=1, positions="last_prompt", to=lambda *row: kept.append(row[-1])),
        prompt=[1] * 64,
    )
    sinks.put(segment("a", range(64), A, ("mlp_out", 0, "before", 1000)))
    sinks.end("a", 64)
    sinks.result("a")
    assert kept[0].untyped_storage().nbytes() == 12
    sinks.close()


def test_a_request_can_be_given_up_and_its_id_used_again():
    sinks = Sinks()
    capture = Capture("resid_post", layers=1, to=lambda *_: None)
    begin(sinks, "a", capture, prompt=[1])
    sinks.put(segment("a", [0], A))
    sinks.end("a", 1)
    sinks.end("a", 1)
    sinks.result("a")
    begin(sinks, "a", capture, prompt=[1])
    sinks.discard("a")
    sinks.discard("a")
    assert sinks.stats["requests"] == 0
    sinks.close()
    sinks.close()
    with pytest.raises(CaptureError, match="closed"):
        begin(sinks, "b", capture)


# -------------------------------------------------------------------------------------- slow, failing, stalling


def test_a_slow_consumer_holds_the_producer_back_and_memory_is_bounded(caplog):
    """D5, back-pressure: the queue stays under its bound, the gauge grows, one warning says so, nothing is lost."""
    row, bound = 40_000, 200_000
    planes = ("resid_post", 1, "before", row // 4)
    got, held = [], []

    def slow(request, site, layer, positions, tensor):
        time.sleep(0.01)
        held.append(sinks.stats["queued_bytes"])
        got.extend(positions)

    sinks = Sinks(queue_bytes=bound)
    begin(sinks, "a", Capture("resid_post", layers=1, positions="all_prompt", to=slow), prompt=[0] * 60)
    rows = torch.zeros(1, row // 4)
    with caplog.at_level(logging.WARNING, "midstream"):
        for position in range(60):
            sinks.put(Segment("a", np.array([position]), layout(planes), rows))
            held.append(sinks.stats["queued_bytes"])
        early = sinks.stats["blocked_seconds"]
        sinks.end("a", 60)
        sinks.result("a")
    assert 0 < max(held) <= bound
    assert 0.1 < early <= sinks.stats["blocked_seconds"]
    assert got == list(range(60))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "more slowly than they come" in caplog.text and "slow" in caplog.text
    assert sinks.stats["queued_bytes"] == 0
    sinks.close()
    assert sinks.stats["blocked_seconds"] >= early


def test_a_full_queue_is_waited_for_last():
    go, other = threading.Event(), Recorder()
    sinks = Sinks(queue_bytes=1)
    to = (lambda *_: go.wait(60), other.rows)
    begin(sinks, "a", Capture("resid_post", layers=1, positions="all_prompt", to=to), prompt=[1, 2])
    sinks.put(segment("a", [0], A))
    wait_until(lambda: len(other.calls) == 1)
    thread = threading.Thread(target=sinks.put, args=[segment("a", [1], A)])
    thread.start()
    wait_until(lambda: len(other.calls) == 2)
    assert thread.is_alive()
    go.set()
    thread.join(60)
    sinks.end("a", 2)
    sinks.result("a")
    sinks.close()


@pytest.mark.parametrize(("limit", "calls"), [(16 << 20, 1), (10 * 8 * 4, 10), (1, 100)])
def test_rows_that_were_held_go_on_together(monkeypatch, limit, calls):
    monkeypatch.setattr("midstream.capture.sinks.JOINED_BYTES", limit)
    recorder, sinks = Recorder(), Sinks()
    begin(sinks, "a", Capture("mlp_out", layers=2, positions="all_generated", to=recorder.rows), prompt=[1])
    whole = segment("a", range(1, 101), A, C)
    for piece in cut(whole, [[i] for i in range(100)]):
        sinks.put(piece)
    sinks.end("a", 101)
    sinks.result("a")
    assert len(recorder.calls) == calls
    rows = recorder.of("a")[C[:3]]
    assert same_bits(torch.stack([rows[position] for position in range(1, 101)]), whole.rows[:, 3:])
    sinks.close()


def test_rows_larger_than_the_queue_still_pass():
    recorder, sinks = Recorder(), Sinks(queue_bytes=10)
    begin(sinks, "a", Capture("resid_post", layers=1, positions="all_prompt", to=recorder.rows), prompt=[0] * 9)
    for piece in cut(segment("a", range(9), A), [[0, 1, 2], [3, 4], [5, 6, 7, 8]]):
        sinks.put(piece)
    sinks.end("a", 9)
    sinks.result("a")
    assert len(recorder.of("a")[A[:3]]) == 9
    sinks.close()


class Upset(Exception):
    pass


@pytest.mark.parametrize("error", [Upset("no more"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["begin", "rows", "end"])
def test_a_consumer_that_raises_fails_its_own_request_alone(monkeypatch, where, error):
    """D5: named, chained, and nothing else: the request's other sinks and all other requests get everything."""

    def act(call, request, *_):
        if call == where and request == "bad":
            raise error

    failing, other = Recorder(act), Recorder()
    through(monkeypatch, failing=lambda: failing)
    sinks = Sinks()
    capture = Capture("resid_post", layers=1, positions="all_prompt", to=(Consumer("failing"), other.rows))
    names = ["good", "bad", "later"]
    for name in names:
        begin(sinks, name, capture, prompt=[1] * 6)
    for start in range(3):
        for name in names:
            sinks.put(segment(name, [start, start + 3], A))
    for name in names:
        sinks.end(name, 6)
    for name in ("good", "later"):
        sinks.result(name)
        assert len(failing.of(name)[A[:3]]) == 6 and failing.ended(name) is None
    with pytest.raises(
        CaptureError, match=rf"consumer 'failing' raised in {where}\(\).* of request 'bad': {type(error).__name__}"
    ) as raised:
        sinks.result("bad")
    assert raised.value.__cause__ is error
    assert not failing.of("bad") or where == "end"
    if where == "rows":
        assert failing.ended("bad") is raised.value  # no more rows come, and it is told
    assert all(len(other.of(name)[A[:3]]) == 6 for name in names)
    sinks.close()


def test_a_consumer_that_cannot_be_made_fails_the_request_and_is_tried_again(monkeypatch):
    tries = []

    def make(**options):
        tries.append(options)
        if len(tries) == 1:
            raise ConnectionError("no server there")
        return Recorder()

    through(monkeypatch, it=make)
    sinks = Sinks()
    for name in ("a", "b"):
        begin(sinks, name, Capture("resid_post", layers=1, to=Consumer("it", port=1)), prompt=[1])
        sinks.put(segment(name, [0], A))
        sinks.end(name, 1)
        if name == "a":
            with pytest.raises(CaptureError, match=r"its construction.*'a'.*no server there"):
                sinks.result(name)
        else:
            sinks.result(name)
    assert tries == [{"port": 1}, {"port": 1}]
    sinks.close()


def test_two_failures_are_both_told():
    def one(*_):
        raise Upset("the first")

    def two(*_):
        raise Upset("the second")

    sinks = Sinks()
    begin(sinks, "a", Capture("resid_post", layers=1, to=(one, two)), prompt=[1])
    sinks.put(segment("a", [0], A))
    sinks.end("a", 1)
    with pytest.raises(CaptureError, match="the first") as raised:
        sinks.result("a")
    assert "the second" in raised.value.__notes__[0]
    sinks.close()


def test_a_close_that_raises_is_told(monkeypatch):
    def act(call, *_):
        if call == "close":
            raise Upset("the last word")

    through(monkeypatch, it=lambda: Recorder(act))
    sinks = Sinks()
    begin(sinks, "a", Capture("resid_post", layers=1, to=Consumer("it")), prompt=[1])
    sinks.discard("a")
    with pytest.raises(CaptureError, match=r"consumer 'it' raised Upset.*close\(\)"):
        sinks.close()


@pytest.mark.parametrize("where", ["begin", "rows", "end"])
def test_a_stalled_consumer_fails_its_requests_and_holds_up_nobody(monkeypatch, where):
    """D5: it blocks for ever; others get all, what is queued stays bounded, new requests fail at once, close returns."""
    go = threading.Event()

    def act(call, request, *_):
        if call == where and request == "first":
            go.wait(60)

    stuck, other = Recorder(act), Recorder()
    through(monkeypatch, stuck=lambda: stuck, other=lambda: other)
    sinks = Sinks(queue_bytes=100, timeout=1.0)
    both = Capture("resid_post", layers=1, positions="all_prompt", to=(Consumer("stuck"), Consumer("other")))
    alone = Capture("resid_post", layers=1, positions="all_prompt", to=Consumer("other"))
    captures = {"first": both, "second": both, "beside": alone}
    start = time.monotonic()
    for name, capture in captures.items():
        begin(sinks, name, capture, prompt=[1] * 8)
    for position in range(8):
        for name in captures:
            sinks.put(segment(name, [position], A))
    for name in captures:
        sinks.end(name, 8)
    sinks.result("beside")
    for name in ("first", "second"):
        reason = rf"consumer 'stuck'.* request '{name}'.*not returned from {where}\(\).*'first'.*allowed: 1 s"
        with pytest.raises(CaptureError, match=reason):
            sinks.result(name)
    assert time.monotonic() - start < 20
    assert all(len(other.of(name)[A[:3]]) == 8 and other.ended(name) is None for name in captures)
    assert sinks.stats["queued_bytes"] <= 100
    begin(sinks, "new", both, prompt=[1])
    sinks.put(segment("new", [0], A))
    sinks.end("new", 1)
    start = time.monotonic()
    with pytest.raises(CaptureError, match=r"'stuck'.*'new'.*not returned"):
        sinks.result("new")
    sinks.close()
    assert time.monotonic() - start < 20
    assert other.calls[-1][0] == "close" and len(other.of("new")[A[:3]]) == 1
    go.set()
    wait_until(
        lambda: stuck.calls[-1:] == [("close", None)]
    )  # it came back after all, and is told what became of its requests
    assert isinstance(stuck.ended("first"), CaptureError) or where == "end"


def test_a_consumer_that_comes_back_serves_later_requests(monkeypatch):
    go = threading.Event()
    recorder = Recorder(lambda call, request, *_: go.wait(60) if (call, request) == ("rows", "a") else None)
    through(monkeypatch, it=lambda: recorder)
    sinks = Sinks(timeout=1.0)
    capture = Capture("resid_post", layers=1, to=Consumer("it"))
    for name in ("a", "b"):
        begin(sinks, name, capture, prompt=[1])
        sinks.put(segment(name, [0], A))
    sinks.end("a", 1)
    with pytest.raises(CaptureError, match="not returned"):
        sinks.result("a")
    go.set()
    wait_until(lambda: ("end", "a") in {call[:2] for call in recorder.calls})
    sinks.end("b", 1)  # failed as well: it was open
    with pytest.raises(CaptureError, match="not returned"):
        sinks.result("b")
    begin(sinks, "c", capture, prompt=[1])
    sinks.put(segment("c", [0], A))
    sinks.end("c", 1)
    sinks.result("c")
    assert recorder.ended("c") is None and isinstance(recorder.ended("a"), CaptureError)
    sinks.close()


def test_closing_waits_for_a_slow_consumer_and_ends_what_is_open():
    def slowly(call, *_):
        time.sleep(0.02)

    recorder, sinks = Recorder(slowly), Sinks(timeout=1.0)
    capture = Capture("resid_post", layers=1, positions="all_prompt", to=recorder.rows)
    begin(sinks, "a", capture, prompt=[1] * 60)
    begin(sinks, "open", capture, prompt=[1])
    for piece in cut(segment("a", range(60), A), [[i] for i in range(60)]):
        sinks.put(piece)
    sinks.end("a", 60)
    sinks.close()  # longer than the timeout, which is for one call
    assert len(recorder.of("a")[A[:3]]) == 60
    sinks.result("a")
    with pytest.raises(CaptureError, match="closed before request 'open' ended"):
        sinks.result("open")


def test_callables_leave_no_thread_behind():
    sinks, before = Sinks(), capture_threads()  # those of other tests may end meanwhile
    for i in range(20):
        begin(sinks, str(i), Capture("resid_post", layers=1, to=lambda *_: None), prompt=[1])
        sinks.put(segment(str(i), [0], A))
        sinks.end(str(i), 1)
        sinks.result(str(i))
    wait_until(lambda: not capture_threads() - before)
    assert sinks.stats["consumers"] == 0
    sinks.close()


# --------------------------------------------------------------------------------------------------- entry points


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with consumers, and midstream's own entry points, installed where Python looks for them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    packages = {
        "their-probes": {
            "totals": "their_probes:Totals",
            "broken": "their_probes:Missing",
            "twice": "their_probes:Totals",
        },
        "other-probes": {"twice": "other_probes:Totals"},
        "midstream-here": project["entry-points"]["midstream.consumers"],
    }
    for name, entries in packages.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[midstream.consumers]", *lines]) + "\n")
    (tmp_path / "their_probes.py").write_text(
        "made = []\n"
        "class Totals:\n"
        "    def __init__(self, scale=1.0):\n"
        "        self.scale, self.sums, self.closed = scale, {}, False\n"
        "        made.append(self)\n"
        "    def begin(self, info): self.sums[info.request_id] = 0.0\n"
        "    def rows(self, request_id, site, layer, positions, tensor):\n"
        "        self.sums[request_id] += self.scale * float(tensor.sum())\n"
        "    def end(self, request_id, error): pass\n"
        "    def close(self): self.closed = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_several_consumers_at_once_by_entry_point(installed, caplog):
    """D5: an installed package's consumer, the bundled log and a callable get the same rows."""
    import their_probes

    sinks, rows = Sinks(), torch.arange(12.0).reshape(4, 3)
    called = []
    to = (Consumer("totals", scale=2.0), Consumer("log", level="info"), lambda *row: called.append(row[-1]))
    with caplog.at_level(logging.INFO, "midstream"):
        for name in ("a", "b"):
            begin(sinks, name, Capture("resid_post", layers=1, positions="all_prompt", to=to), prompt=[1] * 4)
            sinks.put(Segment(name, np.arange(4), layout(A), rows))
            sinks.end(name, 4)
            sinks.result(name)
        begin(sinks, "c", Capture("resid_post", layers=1, to=to), prompt=[1] * 4)
        sinks.discard("c", RuntimeError("was aborted"))
    sinks.close()
    (totals,) = their_probes.made
    assert totals.sums == {"a": 132.0, "b": 132.0, "c": 0.0} and totals.closed
    assert sum(float(tensor.sum()) for tensor in called) == 132.0
    assert "request a: captured 4 rows of resid_post (0.0 MB)" in caplog.text
    assert "request c: capture failed: was aborted" in caplog.text


@pytest.mark.parametrize(
    ("consumer", "reason"),
    [
        (Consumer("total"), "no installed package offers the consumer 'total'.*did you mean 'totals'?"),
        (Consumer("zzzzz"), "there are 'broken', 'directory', 'log', 'totals', 'twice'"),
        (Consumer("broken"), "'broken'.*cannot be loaded.*Missing"),
        (Consumer("twice"), r"offered by several packages: \['other_probes:Totals', 'their_probes:Totals'\]"),
    ],
)
def test_an_unknown_consumer_fails_at_admission(installed, consumer, reason):
    sinks = Sinks()
    with pytest.raises(CaptureError, match=reason):
        begin(sinks, "a", Capture("resid_post", layers=1, to=(lambda *_: None, consumer)), prompt=[1])
    assert sinks.stats["requests"] == sinks.stats["consumers"] == 0
    sinks.close()


@pytest.mark.parametrize("options", [{"level": "loud"}, {"colour": "colour"}])
def test_wrong_options_fail_the_request(installed, options):
    sinks = Sinks()
    begin(sinks, "a", Capture("resid_post", layers=1, to=Consumer("log", **options)), prompt=[1])
    sinks.put(segment("a", [0], A))
    sinks.end("a", 1)
    with pytest.raises(CaptureError, match=options[next(iter(options))]):
        sinks.result("a")
    sinks.close()


def test_an_infinite_number_does_not_hide_another_that_is_too_large() -> None:
    infinite = torch.tensor([[float("inf"), 1.0]])
    assert torch.equal(cast_rows(infinite, "float16", "it"), infinite.half())
    with pytest.raises(CaptureError, match=r"it: 1e\+06 is too large for float16"):
        cast_rows(torch.tensor([[float("inf"), 1e6]]), "float16", "it")
