"""What the checks of tapes cannot see: lengths and numbers of steps that were not tried, and a process that the code has changed (row U3).

Each body is right at the lengths and steps of its check, and something else at others.
"""

from __future__ import annotations

import string
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from recorded import MODEL, V, assert_equal, checked, client_value, found, plain

from midstream.errors import CaptureError
from midstream.plan.building import Builder
from midstream.runtime.request import Tier


def model():
    """One that nothing has been recorded of."""
    return replace(MODEL, recorded=OrderedDict())


# Lengths.


def last_number_of_some_rows(m):
    x = m.layers_output[2][::10].view(-1)
    x[-1] = 50.0


def last_number_of_squeezed_rows(m):
    x = m.layers_output[2][::10].squeeze(0).view(-1)
    x[-1] = 50.0


def first_of_a_squeezed_tail(m):
    m.layers_output[2][5:].squeeze(0)[:1] = 0


def first_of_a_tail_without_axes_of_one(m):
    m.layers_output[2][7:].squeeze()[:2] += 5


def squeezed_in_place(m):
    h = m.layers_output[2][5:]
    h.squeeze_(0)
    h[:1] = 0


def a_tail_by_its_number_of_axes(m):
    h = m.layers_output[2][6:].squeeze()
    m.layers_output[2][6:] = h if h.ndim == 2 else h * 3


def kept_tail(m):
    return m.layers_output[2][5:].squeeze().norm(dim=-1, keepdim=True)


def one_row_by_two_indices(m):
    m.layers_output[2].index_put_((torch.tensor([4, -2]),), torch.stack([V, 2 * V]), accumulate=True)


def one_row_by_two_indices_of_two_tokens(m):
    m.layers_output[2].index_put_((torch.tensor([1, -2]),), torch.stack([V, 2 * V]), accumulate=True)


def a_size_without_a_number(m):
    h = m.layers_output[2]
    h += V if h.is_same_size(torch.empty(8, 8)) else 2 * V


@pytest.mark.parametrize(
    "body",
    [
        a_size_without_a_number,
        last_number_of_some_rows, last_number_of_squeezed_rows, first_of_a_squeezed_tail, first_of_a_tail_without_axes_of_one,
        squeezed_in_place, a_tail_by_its_number_of_axes, kept_tail, one_row_by_two_indices, one_row_by_two_indices_of_two_tokens,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_a_length_between_those_of_the_recordings(body):
    for first in (7, 2, 12):
        known = model()
        found(body, length=first, known=known)
        for length in (first, 3, 4, 5, 6, 8, 11, 13):
            checked(body, length=length, known=known)


def test_bodies_that_ask_for_no_size_are_recorded_for_all_lengths():
    """Also if they put axes of one element in front or at the end, and remove them."""

    def in_front(m):
        m.layers_output[2] = (m.layers_output[2][None] + V).squeeze(0) * 2

    def at_the_end(m):
        h = m.layers_output[2]
        h *= torch.sigmoid((h @ V[:, None]).squeeze())[:, None]

    def last(m):
        m.layers_output[2][-1:].squeeze(0).mul_(2)

    def tail(m):
        m.layers_output[2][4:] += V

    for body in (in_front, at_the_end, last, tail):
        known = model()
        for length in (7, 9, 30):
            assert checked(body, length=length, known=known).tier is not Tier.FORWARD, body.__name__
        (code,) = known.recorded.values()
        assert len(code._recorder._recorded) == 1, body.__name__


# Requests that end before `max_tokens`.


def first_row_of_the_last_step(m, tracer):
    for _ in tracer.iter[:]:
        kept = m.layers_output[2][0]
    return kept


def all_rows_of_the_last_step(m, tracer):
    for _ in tracer.iter[:]:
        kept = m.layers_output[2]
    return kept


def norms_of_the_last_step(m, tracer):
    for _ in tracer.iter[:]:
        kept = m.layers_output[2].norm(dim=-1)
    return kept


def another_row_of_short_requests(m, tracer):
    kept = [m.layers_output[2][1 if step == 0 else -1] for step in tracer.iter[:]]
    return kept[-1]


@pytest.mark.parametrize(
    "body",
    [first_row_of_the_last_step, all_rows_of_the_last_step, norms_of_the_last_step, another_row_of_short_requests],
    ids=lambda body: body.__name__,
)
def test_a_request_that_ends_early_gets_no_rows_of_other_tokens(body):
    given = found(body, steps=4, known=model())
    assert given.tier is Tier.CLIENT
    for steps in (4, 3, 2, 1):
        request, returned, _ = plain(body, steps)
        try:
            value = client_value(given, request)
        except CaptureError as error:
            assert steps == 1 and "ignore_eos" in str(error)
            continue
        assert_equal(value, returned, 2e-5)


# The process.


def test_code_that_changes_its_process_once_runs_in_the_forward(monkeypatch):
    """Also if it is recorded for each length by itself."""

    def at_first(m):
        import string as module

        is_first = not hasattr(module, "seen_by_the_test")
        module.seen_by_the_test = True
        m.layers_output[2] += V if is_first else 5 * V

    def at_first_by_length(m):
        import string as module

        is_first = not hasattr(module, "seen_by_the_test")
        module.seen_by_the_test = True
        h = m.layers_output[2]
        h += (V if is_first else 5 * V) * len(h)

    for body in (at_first, at_first_by_length):
        for lengths in ([1, 1, 2], [7, 8, 7]):
            monkeypatch.delattr(string, "seen_by_the_test", raising=False)
            known = model()
            for length in lengths:
                given = found(body, length=length, known=known)
                assert given.tier is Tier.FORWARD and "each time it runs" in given.reason, (body.__name__, length)


# Steps.


def test_a_late_step_that_does_something_else_is_checked(monkeypatch):
    def late(m, tracer):
        for step in tracer.iter[:]:
            h = m.layers_output[2]
            h += step * V
            if step == 20:
                h[:, 1:3] = h[:, 3:5] - h[:, 5:7]

    def faulty(*args, **kwargs):
        if args[1] == "sub.Tensor":
            args = (args[0], "rsub.Tensor", *args[2:])
        return made(*args, **kwargs)

    made = Builder.add
    assert found(late, steps=40, known=model()).tier is Tier.PLAN
    monkeypatch.setattr(Builder, "add", faulty)
    given = found(late, steps=40, known=model())
    assert given.tier is Tier.FORWARD and "step 20" in given.reason


# Numbers.


RAISES = {
    "cholesky": lambda x: torch.linalg.cholesky((5 - x)[None, None]),
    "eigh": lambda x: torch.linalg.eigh(torch.eye(3) * (5 - x).log()),
    "svd": lambda x: torch.linalg.svdvals(torch.eye(3) * (5 - x).log()),
    "cross entropy": lambda x: torch.nn.functional.binary_cross_entropy(x / 5, torch.zeros(())),
    "histogram": lambda x: torch.histc(1 / torch.relu(5 - x)[None]),
    "quantile": lambda x: torch.quantile(V, x / 5),
    "masked_scatter": lambda x: torch.zeros(2).masked_scatter(x.expand(2) > 5, torch.ones(1)),
    "one_hot": lambda x: torch.nn.functional.one_hot((x / 5).long(), 1),
}


@pytest.mark.parametrize("name", RAISES)
def test_an_error_that_the_numbers_of_a_check_do_not_raise(name):
    def body(m):
        h = m.layers_output[2]
        try:
            RAISES[name](h[-1].abs().mean())
            k = 1
        except RuntimeError:
            k = 10
        h += k * V

    given = found(body, length=7, known=model())
    assert given.tier is Tier.FORWARD and "raises an error" in given.reason


def test_integers_that_are_divided_by_those_of_the_forward_stay_in_the_forward():
    """By other integers they raise no error that depends on numbers."""

    def by_own(m):
        m.layers_output[1].argmax(-1) % 3
        m.layers_output[2] += V

    def by_values(m):
        x = m.layers_output[1].argmax(-1)
        torch.tensor(7) % (x + 1)
        m.layers_output[2] += V

    assert "raises an error" in found(by_values, known=model()).reason
    assert found(by_own, known=model()).tier is Tier.PLAN


def test_places_of_the_largest_numbers_are_classes():
    def body(m):
        h = m.layers_output[2]
        h += torch.nn.functional.one_hot(h.argmax(-1), h.shape[-1])

    assert checked(body).tier is Tier.PLAN
