"""Which body is said by which edits (rows L1, L2). Each body runs on plain numbers, too: see `support/recorded.py`."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from recorded import (
    LENGTH,
    ROWS,
    UNIT,
    WIDTH,
    V,
    checked,
    clamp,
    found,
    in_forward,
    patch,
    planned,
    said,
    steer,
    without_simple_edits,
)

from midstream.lowering.tiers import Tier
from midstream.plan.ops import Apply


@pytest.fixture(autouse=True)
def _the_callers_tensors_stay_as_they_are():
    before = V.clone(), UNIT.clone(), ROWS.clone()
    yield
    assert all(torch.equal(a, b) for a, b in zip(before, (V, UNIT, ROWS), strict=True))


# What is added.


def test_a_vector_that_is_added_is_a_steer_however_it_is_written():
    def in_place(model):
        model.layers_output[2] += V

    def difference(model):
        model.layers_output[2] -= -V

    def assigned(model):
        h = model.layers_output[2]
        model.layers_output[2] = h + V

    def from_the_end(model):
        model.layers_output[-2] += V

    def with_an_axis(model):
        model.layers_output[2] += V[None]

    def cast(model):
        model.layers_output[2] += V.double().to(model.layers_output[2])

    def under_another_name(model):
        m = model
        m.layers_output[2] += V

    def steered(model):
        model.steer(layers=2, vector=V, factor=1.0)

    def method(model):
        model.layers_output[2].add_(V)

    def by_operator(model):
        operator.iadd(model.layers_output[2], V)

    def under_a_name(model):
        h = model.layers_output[2]
        h += V

    def sliced(model):
        model.layers_output[2][:] += V

    def sliced_and_assigned(model):
        h = model.layers_output[2]
        h[:] += V
        model.layers_output[2] = h

    def clone(model):
        h = model.layers_output[2].clone()
        other = h
        other += V
        model.layers_output[2] = h

    def in_a_list(model):
        hs = [model.layers_output[2]]
        hs[0] += V

    def in_a_dict(model):
        found = {}
        found[2] = model.layers_output[2]
        found[2] += V

    def its_data(model):
        data = model.layers_output[2].data
        data += V

    def bound_method(model):
        add = model.layers_output[2].add_
        add(V)

    def methods_in_a_list(model):
        adds = [model.layers_output[2].add_]
        adds[0](V)

    def mapped(model):
        list(map(model.layers_output[2].add_, [V]))

    def partial(model):
        functools.partial(operator.iadd, model.layers_output[2])(V)

    def nested(model):
        def change(h):
            h += V

        change(model.layers_output[2])

    def generated(model):
        def values():
            yield model.layers_output[2]

        for h in values():
            h += V

    def by_getattr(model):
        getattr(model, "layers_output")[2] += V  # noqa: B009

    def by_locals(model):
        locals()["model"].layers_output[2] += V

    def in_a_container(model):
        parts = {"model": model}
        parts["model"].layers_output[2] += V

    def caught(model):
        try:
            model.layers_output[2] += V
            raise ValueError
        except ValueError:
            pass

    def at_the_streams(model):
        model.model.layers[2].output[0][:] += V

    def at_the_pair(model):
        hidden, residual = model.model.layers[2].output
        model.model.layers[2].output = (hidden + V, residual)

    for given in planned(*locals().values()):
        total = sum(torch.tensor(edit.vector.data) * edit.scale for edit in given.edits)
        assert {(e.site, e.at_layers, e.phase, e.place) for e in given.edits} == {("resid_post", (2,), "prefill", None)}
        torch.testing.assert_close(total, V)


def test_what_is_added_in_several_steps_is_a_program_that_rounds_as_often():
    def of_parts(model):
        model.layers_output[2] = 2 * V + model.layers_output[2] - V

    def reduced(model):
        functools.reduce(operator.iadd, [V, V, -V], model.layers_output[2])

    def twice(model):
        model.layers_output[2] += 2 * V
        model.layers_output[2] -= V

    def while_loop(model):
        n = 0
        while n < 4:
            model.layers_output[2] += V / 4
            n += 1

    for given in planned(*locals().values()):
        (edit,) = given.edits
        assert isinstance(edit, Apply) and len(edit.program.steps) > 1


def test_a_number_is_added_to_all_elements():
    def number(model):
        model.layers_output[2] += 0.5

    def nothing(model):
        model.layers_output[2] += 0

    one, other = planned(number, nothing)
    assert said(one) == [steer(torch.full((WIDTH,), 0.5))] and not other.edits


def test_rows_that_differ_are_added_by_position():
    def body(model):
        model.layers_output[2] += ROWS

    assert said(planned(body)[0]) == [steer(ROWS[i], where=(i,)) for i in range(LENGTH)]


# What Python does with a vector before it is written.


# What is projected out.


def test_a_direction_that_is_projected_out_is_a_clamp_however_it_is_written():
    def in_place(model):
        model.layers_output[2] -= (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def by_name(model):
        h = model.layers_output[2]
        model.layers_output[2] = h - (h @ UNIT).unsqueeze(-1) * UNIT

    def by_outer(model):
        model.layers_output[2] = model.layers_output[2] - torch.outer(model.layers_output[2] @ UNIT, UNIT)

    def by_column(model):
        model.layers_output[2][:] -= UNIT * (model.layers_output[2] @ UNIT[:, None])

    def by_sum(model):
        model.layers_output[2] -= (model.layers_output[2] * UNIT).sum(-1, keepdim=True) * UNIT

    def by_sum_of_rows(model):
        model.layers_output[2] -= (model.layers_output[2] * UNIT).sum(dim=1).unsqueeze(1) * UNIT

    def divided(model):
        h = model.layers_output[2]
        model.layers_output[2] = h - (h @ V)[:, None] * V / V.norm() ** 2

    for given in planned(*(body for body in locals().values() if callable(body))):
        (edit,) = given.edits
        assert said(given) == [clamp()] and (edit.low, edit.high) == (0, 0)
        assert edit.strength == pytest.approx(1)


def test_a_projection_of_one_row_or_by_half_or_to_a_value():
    def last(model):
        model.layers_output[2][-1] -= (model.layers_output[2][-1] @ UNIT) * UNIT

    def half(model):
        model.layers_output[2] -= 0.5 * (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def to_three(model):
        h = model.layers_output[2]
        model.layers_output[2] = h - (h @ UNIT - 3)[:, None] * UNIT

    one, two, three = planned(last, half, to_three)
    assert said(one) == [clamp(where=(LENGTH - 1,))]
    assert two.edits[0].strength == pytest.approx(0.5)
    assert (three.edits[0].low, three.edits[0].high) == (pytest.approx(3), pytest.approx(3))


def test_what_is_like_a_projection_and_is_none():
    def on_a_longer_vector(model):
        model.layers_output[2] -= (model.layers_output[2] @ V)[:, None] * V

    def two_directions(model):
        model.layers_output[2] -= (model.layers_output[2] @ UNIT)[:, None] * UNIT.flip(0)

    def of_another_layer(model):
        h = model.layers_output[1]
        model.layers_output[2] -= (h @ UNIT)[:, None] * UNIT

    def added(model):
        model.layers_output[2] += (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def twice(model):
        model.layers_output[2] -= 2 * (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def over_all_tokens(model):
        model.layers_output[2] -= (model.layers_output[2] * UNIT).sum(0, keepdim=True) * UNIT

    def of_the_last_row(model):
        model.layers_output[2] -= (model.layers_output[2][-1] @ UNIT) * UNIT

    def of_other_rows(model):
        h = model.layers_output[2]
        h[1:] -= (h[:-1] @ UNIT)[:, None] * UNIT

    def of_earlier_values(model, tracer):
        h = model.layers_output[2]
        for _ in tracer.iter[1:]:
            model.layers_output[2] -= (h[-1:] @ UNIT)[:, None] * UNIT

    without_simple_edits(*(body for body in locals().values() if callable(body)))


def test_a_projection_of_tokens_as_many_as_the_width_is_told_from_one_of_features():
    def over_tokens(model):
        model.layers_output[2] -= (model.layers_output[2].T @ UNIT) * UNIT

    def column(model):
        model.layers_output[2][:, 0] = 0

    def row(model):
        model.layers_output[2][0] = 0

    for body in (over_tokens, column):
        given = checked(body, length=WIDTH)
        assert given.tier is Tier.FORWARD or all(isinstance(edit, Apply) for edit in given.edits)
    assert said(checked(row, length=WIDTH)) == [patch(torch.zeros(WIDTH))]


def test_a_projection_after_a_sum_is_one_of_the_sum():
    def by_name(model):
        h = model.layers_output[2]
        model.layers_output[2] += V
        model.layers_output[2] = h - (h @ UNIT)[:, None] * UNIT

    def read_again(model):
        model.layers_output[2] += V.flip(0)
        model.layers_output[2] -= (model.layers_output[2] @ UNIT)[:, None] * UNIT

    def of_the_value_before(model):
        h = model.layers_output[2].clone()
        model.layers_output[2] += V.flip(0)
        model.layers_output[2] -= (h @ UNIT)[:, None] * UNIT

    for body in (by_name, read_again, of_the_value_before):
        checked(body)


# Rows that are replaced.


def test_replaced_rows_are_patches():
    def last_is_zero(model):
        model.layers_output[2][-1] = 0

    def some(model):
        model.layers_output[2][1:3] = V

    def all_rows(model):
        model.layers_output[2] = ROWS

    def one_row_for_all(model):
        model.layers_output[2] = V

    def listed(model):
        model.layers_output[2][[0, 2]] = V

    def by_tensor(model):
        model.layers_output[2][torch.tensor([0, 2])] = ROWS[:2]

    def by_mask(model):
        mask = torch.tensor([True, False, True, False, False])
        model.layers_output[2][mask] = V

    def by_fill(model):
        model.layers_output[2][3].fill_(2)

    def by_zero(model):
        h = model.layers_output[2]
        h[-1].zero_()

    def by_copy(model):
        model.layers_output[2][0].copy_(V)

    def by_index_put(model):
        model.layers_output[2].index_put_((torch.tensor([1, 3]),), V)

    zeros, every = torch.zeros(WIDTH), range(LENGTH)
    expected = {
        last_is_zero: {4: zeros},
        some: {1: V, 2: V},
        all_rows: {i: ROWS[i] for i in every},
        one_row_for_all: {i: V for i in every},
        listed: {0: V, 2: V},
        by_tensor: {0: ROWS[0], 2: ROWS[1]},
        by_mask: {0: V, 2: V},
        by_fill: {3: torch.full((WIDTH,), 2.0)},
        by_zero: {4: zeros},
        by_copy: {0: V},
        by_index_put: {1: V, 3: V},
    }
    for rows, given in zip(expected.values(), planned(*expected), strict=True):
        found = {row: (kind, numbers) for kind, _, _, places, numbers in said(given) for row in places}
        assert found == {row: ("Patch", v.tolist()) for row, v in rows.items()}


def test_rows_that_are_added_to_name_their_positions():
    def some(model):
        h = model.layers_output[2].clone()
        h[[0, 2]] += V
        model.layers_output[2] = h

    def last(model):
        model.layers_output[2][-1] += V

    def every_other(model):
        model.layers_output[2][::2] += V

    def steered(model):
        model.steer(2, V, positions=[0, 3])

    expected = {some: (0, 2), last: (4,), every_other: (0, 2, 4), steered: (0, 3)}
    for places, given in zip(expected.values(), planned(*expected), strict=True):
        assert said(given) == [steer(V, where=places)]


def test_rows_twice_are_as_pytorch_has_them():
    def replaced(model):
        model.layers_output[2][[1, 1]] = 0

    def added(model):
        model.layers_output[2][[1, 1]] += V

    def accumulated(model):
        model.layers_output[2].index_put_((torch.tensor([1, 1]),), V, accumulate=True)

    def by_index_add(model):
        model.layers_output[2].index_add_(0, torch.tensor([1, 1]), torch.stack([V, V]))

    for body in (replaced, added, accumulated, by_index_add):
        checked(body)


def test_two_kinds_of_writes_to_one_site_keep_their_order():
    def added_then_replaced(model):
        model.layers_output[2] += V
        model.layers_output[2][-1] = 0

    def replaced_then_added(model):
        model.layers_output[2][-1] = 0
        model.layers_output[2] += V

    def overlapping(model):
        h = model.layers_output[2]
        h[:3] = V
        h[2:] += V
        h[1] = 0

    def within_a_slice(model):
        part = model.layers_output[2][1:4]
        part += V
        part[0] = 0
        part[-1] -= V

    def swapped(model):
        h = model.layers_output[2]
        h[0], h[1] = h[1].clone(), h[0].clone()

    def one_row_to_another(model):
        h = model.layers_output[2]
        h[0] = h[1]

    for body in (added_then_replaced, replaced_then_added, overlapping, within_a_slice, swapped, one_row_to_another):
        checked(body)


def test_columns_products_and_functions_are_no_edits_yet():
    def columns(model):
        model.layers_output[2][:, 2] = 0

    def some_columns(model):
        model.layers_output[2][..., 2:5] += 1

    def one_element(model):
        model.layers_output[2].reshape(-1)[0] = 1

    def scaled(model):
        model.layers_output[2] *= 0.5

    def scaled_and_added(model):
        model.layers_output[2] = 2 * model.layers_output[2] + V

    def function(model):
        torch.nn.functional.relu(model.layers_output[2], True)

    def of_its_mean(model):
        h = model.layers_output[2]
        h += h.mean(0)

    def of_another_layer(model):
        h = model.layers_output[1]
        model.layers_output[2] = h + V

    def row_of_another_layer(model):
        h = model.layers_output[1]
        model.layers_output[2] += h[-1]

    def transposed(model):
        x = model.layers_output[2].T
        x += torch.arange(5.0)

    def diagonal(model):
        model.layers_output[2].diagonal().zero_()

    def strided(model):
        model.layers_output[2].as_strided((3,), (WIDTH + 1,)).zero_()

    def flipped(model):
        h = model.layers_output[2]
        model.layers_output[2] = h.flip(0) + V

    def rolled(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.cat([h[1:], h[:1]])

    def where(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.where(h > 0, h, V)

    def masked(model):
        h = model.layers_output[2]
        h.masked_fill_(torch.eye(LENGTH, WIDTH).bool(), 0)

    without_simple_edits(*locals().values())


def test_what_is_not_recognised_as_an_edit_is_not_made_wrongly():
    """Some of these could be edits. Those that are must be right."""

    def by_out(model):
        h = model.layers_output[2]
        torch.add(h, V, out=h)

    def a_slice_of_a_slice(model):
        model.layers_output[2][1:][:2] += V

    def transposed_twice(model):
        x = model.layers_output[2].T.T
        x += V

    def later_counts(model):
        model.layers_output[2][1] = V
        model.layers_output[2][1:3] = 0

    def copied_one_by_one(model):
        h = model.layers_output[2]
        for i in range(LENGTH):
            h[i].copy_(i * V)

    def each_row(model):
        list(map(lambda row: row.zero_(), model.layers_output[2]))

    def unbound(model):
        for i, row in enumerate(model.layers_output[2].unbind(0)):
            row.copy_(i * V)

    def halves(model):
        first, second = model.layers_output[2].split([2, 3])
        first += V
        second[0] = 0

    def with_an_axis(model):
        model.layers_output[2][None][0] += V

    def by_new_zeros(model):
        h = model.layers_output[2]
        h += h.new_full((WIDTH,), 2)

    def cat(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.cat([h[:2], h[2:] + V])

    def by_columns_and_rows(model):
        model.layers_output[2][1:3, 2:4] = 0

    def half_way_to_a_vector(model):
        h = model.layers_output[2]
        model.layers_output[2] = h + torch.sub(V, h, alpha=0.5)

    def half_way_by_rsub(model):
        h = model.layers_output[2]
        model.layers_output[2] = h + torch.rsub(h, V, alpha=0.5)

    def doubled_by_differences(model):
        h = model.layers_output[2]
        model.layers_output[2] = V - torch.sub(V, h, alpha=2)

    def doubled_by_a_sum(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.add(V, h, alpha=2) - V

    def a_vector_twice(model):
        model.layers_output[2] = torch.sub(model.layers_output[2], V, alpha=-2)

    bodies = [*locals().values()]
    for body in bodies:
        checked(body)


@pytest.mark.parametrize("how", ["row after all", "all after row", "rows", "column", "replaced"])
def test_numbers_that_differ_between_rows_stay_with_their_rows(how):
    def row_after_all(model):
        h = model.layers_output[2]
        h += ROWS
        h[2] += V

    def all_after_row(model):
        h = model.layers_output[2]
        h[2] += V
        h += ROWS

    def rows(model):
        h = model.layers_output[2]
        h += ROWS
        h[::2] += V

    def column(model):
        h = model.layers_output[2]
        h[-1] = 0
        h += torch.arange(5.0)[:, None]

    def replaced(model):
        h = model.layers_output[2]
        h[:] = ROWS
        h[1:3] += V

    bodies = {
        "row after all": row_after_all,
        "all after row": all_after_row,
        "rows": rows,
        "column": column,
        "replaced": replaced,
    }
    checked(bodies[how])


def test_many_changes_of_one_value():
    def body(model):
        for _ in range(1000):
            model.layers_output[2] += V

    assert found(body).tier in (Tier.PLAN, Tier.FORWARD)


def test_one_row_by_two_numbers():
    def body(model):
        model.layers_output[2][[-1, LENGTH - 1]] = ROWS[:2]

    checked(body)


def test_a_projection_in_an_odd_spelling_does_not_break_the_recording():
    def transposed(model):
        h = model.layers_output[2]
        h -= torch.mv(h, UNIT)[None].T * UNIT

    def expanded(model):
        h = model.layers_output[2]
        h -= torch.mv(h, UNIT)[:, None].expand(LENGTH, WIDTH) * UNIT

    def squeezed(model):
        h = model.layers_output[2]
        h -= torch.mv(h, UNIT).reshape(LENGTH, 1).squeeze(1)[:, None] * UNIT

    for body in (transposed, expanded, squeezed):
        checked(body)


# Modules.


def test_a_modules_value_that_is_a_sites_is_written_by_a_plan():
    def added_to(model, tracer):
        for _ in tracer.iter[:]:
            model.model.layers[2].mlp.output += V

    def zeroed(model):
        model.model.layers[2].mlp.output[:] = 0

    def replaced(model):
        model.model.layers[2].mlp.output = ROWS.clone()

    def summed(model):
        part = model.model.layers[2].mlp
        part.output = part.output + V

    def of_input(model):
        h = model.model.layers[2].mlp.input
        h[-1] += V

    def in_a_loop(model):
        for layer in model.model.layers[1:3]:
            layer.mlp.output += V

    def kept_in_a_dict(model):
        parts = {"mlp": model.model.layers[2].mlp}
        parts["mlp"].output += V

    every = tuple(range(LENGTH))
    expected = {
        added_to: [steer(V, where="both", site="mlp_out")],
        zeroed: [patch(torch.zeros(WIDTH), where=every, site="mlp_out")],
        replaced: [patch(ROWS[i], where=(i,), site="mlp_out") for i in every],
        summed: [steer(V, site="mlp_out")],
        of_input: [steer(V, where=(4,), site="mlp_in")],
        in_a_loop: [steer(V, 1, site="mlp_out"), steer(V, 2, site="mlp_out")],
        kept_in_a_dict: [steer(V, site="mlp_out")],
    }
    for edits, given in zip(expected.values(), planned(*expected), strict=True):
        assert said(given) == edits


def test_a_module_takes_its_own_shape():
    def row(model):
        model.model.layers[2].mlp.output = V

    def other_dtype(model):
        model.model.layers[2].mlp.output = ROWS.double()

    in_forward(row, other_dtype, why="another structure, shape or dtype")


def test_a_stream_that_is_read_stays_in_the_forward():
    """Captures have the sum of the streams."""

    def body(model):
        return model.model.layers[2].output[0] * 2

    in_forward(body, why="two streams")


def test_streams_of_a_layer():
    def both(model):
        hidden, residual = model.model.layers[2].output
        hidden += V
        residual -= 3 * V

    def scaled(model):
        model.model.layers[2].output[0][:] *= 2

    def exchanged(model):
        hidden, residual = model.model.layers[2].output
        model.model.layers[2].output = (residual, hidden)

    def one_is_the_others(model):
        hidden, _ = model.model.layers[2].output
        model.model.layers[2].output = (hidden, hidden)

    def first_is_replaced(model):
        model.model.layers[2].output[0][:] = V

    def value_and_streams(model):
        model.layers_output[2] += V
        model.model.layers[2].output[0][:] += V

    for body in (both, scaled, exchanged, one_is_the_others, first_is_replaced, value_and_streams):
        checked(body)
