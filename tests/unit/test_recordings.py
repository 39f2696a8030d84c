"""Recordings that are used again: for other prompts, for fewer steps, and with large constants (issue 36: 1; L1, L2). Row L3."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from recorded import LENGTH, MODEL, WIDTH, V, checked, found

from midstream.lowering import recordings
from midstream.runtime.request import Tier
from midstream.trace import stand_in
from midstream.trace.graph import same_tensor
from midstream.tree import lazy_copy, unwritten


def model():
    """One that nothing has been recorded of, on an engine that holds large numbers."""
    return replace(MODEL, holds_weights=True, recorded=OrderedDict())


LARGE = torch.arange(float(WIDTH * (1 << 17))).reshape(WIDTH, -1) / 1e6  # 4 MB


@pytest.fixture
def runs(monkeypatch):
    """The number of steps of each recording that is made."""
    made = []
    record = recordings.record

    def counted(program, known, tokens, steps, *rest):
        made.append(steps)
        return record(program, known, tokens, steps, *rest)

    monkeypatch.setattr(recordings, "record", counted)
    return made


def adds(m, tracer):
    for _ in tracer.iter[:]:
        m.layers_output[2] = m.layers_output[2] + V.to(m.layers_output[2])


def keeps(m, tracer):
    return [m.layers_output[2][-1].norm() for _ in tracer.iter[:]]


def test_a_code_is_recorded_twice_for_all_prompts_and_once_more_for_fewer_steps(runs):
    known = model()
    first = found(adds, steps=40, length=60, known=known)
    assert runs == [64, 64, 40, 3] and first.tier is Tier.PLAN  # the last one is for the check of the tape
    for length, steps in ((60, 40), (61, 40), (5, 40), (600, 64)):
        assert found(adds, steps=steps, length=length, known=known).edits == first.edits
    assert runs == [64, 64, 40, 3]
    found(adds, steps=65, length=60, known=known)
    assert runs == [64, 64, 40, 3, 128, 128, 65]


def test_what_ends_a_recording_ends_longer_ones_at_the_same_step(runs):
    """And code that never waits for a later step is recorded once, however many there are."""

    def needs_a_number(m):
        if m.layers_output[2].norm() > 3:
            m.layers_output[2] *= 2

    def once(m):
        return m.layers_output[2][-1].norm()

    for body in (needs_a_number, once):
        known = model()
        before = len(runs)
        tiers = {found(body, steps=steps, length=9, known=known).tier for steps in (3, 300, 1)}
        assert len(tiers) == 1 and len(runs) == before + 2


def stops_after(count):
    def body(m, tracer):
        for _ in tracer.iter[:count]:
            m.layers_output[1] += V

    return body


def counts(m, tracer):
    total = [0]
    for _ in tracer.iter[:]:
        total.append(0)
        m.layers_output[1] *= 2 if len(total) > 3 else 0.5


def keeps_some(m, tracer):
    kept = []
    for step in tracer.iter[:]:
        h = m.layers_output[1][-1]
        kept.append(h * 2 if step % 2 else h.norm())
    return kept if len(kept) < 4 else kept[:3]


def keeps_another_at_the_end(m, tracer):
    for _ in tracer.iter[:]:
        h, g = m.layers_output[1][-1], m.layers_output[2][-1]
        last = h.norm()
        first = g.sum()
    return last if m is None else (first, last)


def keeps_by_count(m, tracer):
    kept = [m.layers_output[1][-1].norm() for _ in tracer.iter[:]]
    return {len(kept): kept[-1], "all": kept}


def writes_after_the_loop(m, tracer):
    for _ in tracer.iter[:2]:
        m.layers_output[1] += V
    m.layers_output[2] *= 3


def next_steps(m, tracer):
    m.layers_output[1] += V
    tracer.next()
    m.layers_output[1] -= V


BODIES = [
    adds, keeps, counts, keeps_some, keeps_another_at_the_end, keeps_by_count, writes_after_the_loop, next_steps,
    *map(stops_after, (1, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_fewer_steps_than_were_recorded(body):
    """What a longer recording says of a shorter request is what a plain run of that does."""
    known = model()
    found(body, steps=16, length=LENGTH, known=known)
    for steps in (1, 2, 3, 4, 5, 9, 16):
        checked(body, steps=steps, known=known)


def test_large_tensors_are_converted_and_read_once():
    converted = []

    class Kept(dict):
        def __setitem__(self, key, value):
            converted.append(key)
            super().__setitem__(key, value)

    def body(m, tracer):
        for _ in tracer.iter[:]:
            h = m.layers_output[2]
            large = LARGE.to(torch.float64)
            m.layers_output[2] = h + torch.relu(h.double() @ large)[:, :8].float()

    known = model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "_CONVERTED", Kept())
        given = checked(body, steps=6, known=known)
    assert given.tier is Tier.PLAN and len(converted) == 1
    first, later = given.edits[0].its_program.constants, found(body, steps=6, length=9, known=known).edits[0]
    assert any(constant.nbytes == 8 * LARGE.numel() for constant in first)
    assert all(a is b for a, b in zip(first, later.its_program.constants, strict=True))


def test_a_large_tensor_that_the_body_changes_is_not_taken_for_what_it_was():
    large = LARGE.clone()

    def copy_changed(m, tracer):
        for _ in tracer.iter[:]:
            h = m.layers_output[2]
            there = large.to(torch.float64)
            there *= 2
            again = large.to(torch.float64)
            m.layers_output[2] = h + (h.double() @ (there + again))[:, :8].float()

    def itself_changed(m, tracer):
        h = m.layers_output[2]
        first = (h.double() @ large.to(torch.float64))[:, :8]
        large[:, 1] = 5
        m.layers_output[2] = h + first.float() + (h.double() @ large.to(torch.float64))[:, :8].float()

    before = large.clone()
    for body in (copy_changed, itself_changed):
        assert checked(body, steps=4, known=model()).tier is Tier.PLAN
        large.copy_(before)


@pytest.mark.parametrize(
    "body", [keeps, keeps_by_count, keeps_some, adds, stops_after(3)], ids=lambda body: body.__name__
)
def test_recordings_that_are_forgotten_are_not_taken_for_others(body, monkeypatch):
    monkeypatch.setattr(recordings, "_MOST_LOWERED", 2)
    monkeypatch.setattr(recordings, "_MOST_AGAIN", 1)
    known = model()
    found(body, steps=16, length=LENGTH, known=known)
    for turn in range(3):
        for steps in (1, 5, 2, 9, 3, 16):
            checked(body, steps=steps, length=LENGTH + turn, known=known)


def test_a_large_tensor_that_an_array_changes_is_not_taken_for_what_it_was():
    large = LARGE.clone()
    array = large.numpy()

    def body(m):
        h = m.layers_output[2]
        first = (h @ large)[:, :8]
        array[:] = 0
        m.layers_output[2] = h + first + (h @ large)[:, :8]

    before = large.clone()
    given = checked(body, known=model())
    assert given.tier is Tier.PLAN and torch.equal(large, before * 0)  # by the plain run


def test_lazy_copies_that_are_read_with_another_sign_are_not_taken_for_each_other():
    whole = torch.complex(LARGE, LARGE + 1)

    def body(m):
        h = m.layers_output[2]
        plus, minus = whole.imag, whole.conj().imag
        m.layers_output[2] = h + (h @ plus)[:, :8] + 2 * (h @ minus)[:, :8]

    assert checked(body, known=model()).tier is Tier.PLAN
    plus, minus = lazy_copy(whole).imag, lazy_copy(whole).conj().imag
    assert unwritten(plus) != unwritten(minus) and not same_tensor(plus, minus)


CHANGES = {
    "in place": lambda big: big.mul_(2),
    "by an index": lambda big: big.__setitem__(slice(1, 3), 0.5),
    "through data": lambda big: big.data.mul_(2),
    "as data": lambda big: setattr(big, "data", big.data * 2),
    "without a gradient": lambda big: torch.nn.init.zeros_(big),
    "by a view": lambda big: big.view(-1)[:7].zero_(),
    "a part": lambda big: big[0].copy_(big[1]),
    "loaded": lambda big: torch.nn.ParameterList([torch.nn.Parameter(big)]).load_state_dict({"0": big * 3}),
    "as an array": lambda big: big.numpy().__imul__(2),
}


@pytest.mark.parametrize("is_captured", [False, True], ids=["its own", "the caller's"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_large_constant_that_changes_between_two_uses_counts_as_it_is_at_each(name, is_captured):
    big, change = torch.randn(WIDTH, 1 << 16, generator=torch.Generator().manual_seed(0)), CHANGES[name]
    kept = big.clone()

    def body(m):
        here = big if is_captured else big.clone()
        here.copy_(kept)
        first = (m.layers_output[1] @ here)[:, :WIDTH].save()
        change(here)
        m.layers_output[2] = (m.layers_output[2] @ here)[:, 8 : 8 + WIDTH] + first

    def each_step(m, tracer):
        here = big if is_captured else big.clone()
        here.copy_(kept)
        for _ in tracer.iter[:]:
            m.layers_output[2] += (m.layers_output[2] @ here)[:, :WIDTH]
            change(here)

    for one in (body, each_step):
        checked(one, known=model())
