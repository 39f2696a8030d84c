"""Bodies of several requests: variables that they share, and prompts of several lengths (rows L1, L2)."""

from __future__ import annotations

import itertools

import pytest
import torch
from recorded import LENGTH, UNIT, WIDTH, V, captured, checked, found, lowered, patch, planned, said, steer

from midstream.lowering.tiers import Tier
from midstream.trace.code import FunctionProgram
from midstream.trace.record import fingerprint

# Variables that change.


def test_code_that_does_something_else_in_its_second_run_is_not_taken_at_its_first():
    """In one request it runs once; in several requests it runs as often, on the same variables."""
    count, todo, scales = [0], [V, 2 * V, 3 * V], itertools.count(1)
    once = [True]

    def counts(model):
        count[0] += 1
        model.layers_output[2] += count[0] * V

    def pops(model):
        model.layers_output[2] += todo.pop(0)

    def advances(model):
        model.layers_output[2] += next(scales) * V

    def only_the_first(model):
        if once:
            once.clear()
            model.layers_output[2] += V

    def by_default(model, seen=[]):  # noqa: B006
        seen.append(1)
        model.layers_output[2] += len(seen) * V

    for body in (counts, pops, advances, only_the_first, by_default):
        for lengths in ([LENGTH] * 3, [LENGTH, LENGTH + 1]):
            several = lowered([[body]] * len(lengths), lengths, [2] * len(lengths))
            assert Tier.FORWARD in {each.tier for each in several}, body.__name__
        assert said(planned(body)[0]) == [steer(V)], body.__name__


@pytest.mark.parametrize("how", ["pops", "counts"])
def test_code_that_does_something_else_in_its_third_run_is_not_taken_at_its_first(how):
    scales, count = [1, 1, 2, 2], [0]

    def pops(model):
        model.layers_output[2] += scales.pop(0) * V

    def counts(model):
        count[0] += 1
        if count[0] > 2:
            model.layers_output[2] += V

    several = lowered([[{"pops": pops, "counts": counts}[how]]] * 4, [LENGTH] * 4, [2] * 4)
    assert Tier.FORWARD in {each.tier for each in several}


@pytest.mark.parametrize("how", ["plan", "client"])
def test_values_that_differ_between_requests_are_not_those_of_the_first(how):
    count = [0]

    def writes(model):
        count[0] += 1
        model.layers_output[2] += V
        return count[0]

    def keeps(model):
        count[0] += 1
        return count[0], model.layers_output[2][-1]

    several = lowered([[{"plan": writes, "client": keeps}[how]]] * 2, [LENGTH] * 2, [2] * 2)
    assert {each.tier for each in several} <= {Tier.BEHIND, Tier.FORWARD}


def test_a_body_that_changes_what_another_one_writes():
    v = V.clone()

    def writes(model):
        model.layers_output[1] += v

    def grows(model):
        v.mul_(2)

    def normalises(model):
        v.div_(v.norm())

    for changes in (grows, normalises):
        several = lowered([[writes], [changes]], [LENGTH] * 2, [2] * 2)
        assert Tier.FORWARD in {each.tier for each in several}
    assert torch.equal(v, V)


@pytest.mark.parametrize("how", ["requests", "steps", "one request"])
def test_a_body_that_changes_what_a_later_one_has_written_by_then(how):
    """The first body changes `v` after the second one has used it."""
    v = V.clone()

    def late(model):
        model.layers_output[3]
        v.zero_()

    def writes(model):
        model.layers_output[1] += v

    def in_the_second_step(model, tracer):
        for step in tracer.iter[:]:
            if step == 1:
                v.zero_()

    def writes_each(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[1] += v

    pairs = {
        "requests": [[late], [writes]],
        "steps": [[in_the_second_step], [writes_each]],
        "one request": [[late, writes]],
    }
    several = lowered(pairs[how], [LENGTH] * len(pairs[how]), [3] * len(pairs[how]))
    written = [said(each) for each in several if each.edits]
    assert Tier.FORWARD in {each.tier for each in several} or written == [[steer(V, 1)]]


# Several bodies, requests and lengths.


def test_bodies_of_one_request_are_made_by_one_plan():
    def one(model):
        model.layers_output[1] += V

    def other(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[2] -= V

    def reads(model):
        return model.layers_output[3] * 2

    def same(model):
        model.layers_output[1][-1] = 0

    def decides(model):
        return model.layers_output[1].norm() > 3 or None

    both = found(one, other)
    assert both.tier is Tier.PLAN and said(both) == [steer(V, 1), steer(-V, where="both")]
    three = found(one, reads)
    assert three.tier is Tier.BEHIND and said(three) == [steer(V, 1)]
    assert captured(three) == {("resid_post", 1): ["all_prompt"], ("resid_post", 3): ["all_prompt"]}
    clash = found(one, same)
    assert clash.tier is Tier.FORWARD and "two of its bodies write to one site" in clash.reason
    assert found(one, decides).tier is Tier.FORWARD


def test_each_request_has_its_own_edits():
    def of(factor, layer):
        def body(model):
            model.layers_output[layer] += factor * V

        return body

    bodies = [of(1, 1), of(2, 1), of(1, 2)]
    every = lowered([[each] for each in (*bodies, bodies[0])], [5, 6, 7, 8], [1, 2, 3, 4])
    assert [said(each) for each in every] == [[steer(V, 1)], [steer(2 * V, 1)], [steer(V, 2)], [steer(V, 1)]]


def test_code_that_looks_at_the_length_is_recorded_for_each():
    looks = {
        "len": lambda h: len(h), "shape": lambda h: h.shape[0], "size": lambda h: h.size(0), "numel": lambda h: h.numel() // WIDTH,
        "loop": lambda h: sum(1 for _ in h), "unbind": lambda h: len(h.unbind(0)), "split": lambda h: len(h.split(1)),
        "list": lambda h: len(h.tolist()), "like": lambda h: int(torch.ones(h.shape[:1]).sum()), "of another": lambda h: (h * 2).shape[0],
        "strides": lambda h: h.T.stride(0) * h.nbytes // WIDTH // 4, "new": lambda h: h.new_zeros(h.shape).shape[0],
    }  # fmt: skip
    lengths = [4, 6, 9]
    for name, look in looks.items():

        def body(model, look=look):
            model.layers_output[2] += look(model.layers_output[2]) * V

        every = lowered([[body]] * 3, lengths, [2] * 3)
        assert [said(each) for each in every] == [[steer(n * V)] for n in lengths], name


def test_a_length_for_which_code_does_something_of_its_own():
    def body(model):
        if len(model.layers_output[2]) == 6:
            model.layers_output[2] += V

    every = lowered([[body]] * 3, [4, 6, 9], [2] * 3)
    assert [said(each) for each in every] == [[], [steer(V)], []]


def test_rows_are_counted_in_each_prompt():
    def last(model):
        model.layers_output[2][-1] += V

    def third_from_the_end(model):
        model.layers_output[2][-3] = 0

    def from_the_fourth(model):
        model.layers_output[2][4:] += V

    def all_but_the_first(model):
        model.layers_output[2][1:] += V

    def last_five_but_one(model):
        model.layers_output[2][-5:-1] += V

    def second_half(model):
        h = model.layers_output[2]
        h[h.shape[0] // 2 :] += V

    lengths = [3, 5, 8]
    expected = {
        last: [2, 4, 7], third_from_the_end: [0, 2, 5], from_the_fourth: [None, (4,), (4, 5, 6, 7)],
        all_but_the_first: [(1, 2), (1, 2, 3, 4), tuple(range(1, 8))], last_five_but_one: [(0, 1), (0, 1, 2, 3), (3, 4, 5, 6)],
        second_half: [(1, 2), (2, 3, 4), (4, 5, 6, 7)],
    }  # fmt: skip
    for body, places in expected.items():
        every = lowered([[body]] * 3, lengths, [2] * 3)
        for given, where in zip(every, places, strict=True):
            rows = where if isinstance(where, tuple) else (where,)
            write = patch(torch.zeros(WIDTH), where=rows) if body is third_from_the_end else steer(V, where=rows)
            assert given.tier is Tier.PLAN and said(given) == ([] if where is None else [write]), body.__name__


def test_a_row_that_a_short_prompt_lacks_is_an_error_of_that_prompt():
    def row(model):
        model.layers_output[2][5] += V

    def listed(model):
        model.layers_output[2][[0, 5]] += V

    def rows(model):
        model.layers_output[2] += torch.ones(6, WIDTH)

    for body in (row, listed, rows):
        short, exact = lowered([[body]] * 2, [5, 6], [2] * 2)
        assert short.tier is Tier.FORWARD and exact.tier is Tier.PLAN, body.__name__
        assert exact.edits


def test_prompts_of_one_token():
    def body(model):
        model.layers_output[2][-1] += V

    def projected(model):
        model.layers_output[2] -= (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def zeroed(model):
        model.layers_output[2][0] = 0

    for each in (body, projected, zeroed):
        assert checked(each, length=1).tier is Tier.PLAN


def test_copies_of_variables_are_compared_wherever_they_lie_in_memory():
    """Seen failing where memory was numbered by its address."""

    def program(first, second):
        return [[FunctionProgram(lambda model: (first, second))]]

    memory = torch.zeros(40)
    low, high = memory[:10], memory[20:30]
    high += 1
    other = torch.zeros(40)
    other[:10] += 1
    given = fingerprint(program(low, high))
    assert given is not None and given == fingerprint(program(other[20:30], other[:10]))
    assert given != fingerprint(program(other[:10], other[20:30]))


def test_copies_of_a_class_are_one_class_to_those_who_compare():
    """A class that is sent whole gets an id in each copy. Seen failing: requests that shared such an object ran in the forward."""

    class Probe:
        def __init__(self):
            self.direction = V * 2

    probe = Probe()

    def body(model):
        model.layers_output[1] += probe.direction

    assert {each.tier for each in lowered([[body]] * 2, [LENGTH] * 2, [3] * 2)} == {Tier.PLAN}
