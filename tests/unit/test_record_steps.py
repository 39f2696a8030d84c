"""In which steps a body writes, at which moment its values count, and what it reads (rows L1, L2).

Each body runs on plain numbers, too: see `support/recorded.py`. Row L3.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recorded import LAYERS, LENGTH, ROWS, WIDTH, V, captured, checked, found, in_forward, patch, said, steer

import midstream
from midstream.lowering import tiers as lowering
from midstream.lowering.tiers import Tier

# Steps.


def test_steps_say_the_phase():
    def every(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[2] += V

    def by_all(model, tracer):
        for _ in tracer.all():
            model.layers_output[2][:] += V

    def generated(model, tracer):
        for _ in tracer.iter[1:]:
            model.layers_output[2] += V

    def prompt_alone(model, tracer):
        for step in tracer.iter[:]:
            if step == 0:
                model.layers_output[2] += V

    def by_number(model, tracer):
        for _ in tracer.iter[0]:
            model.layers_output[2] += V

    def differing(model, tracer):
        for step in tracer.iter[:]:
            model.layers_output[2] += 2 * V if step == 0 else V

    def counted(model, tracer):
        for i, _ in enumerate(tracer.iter[:]):
            model.layers_output[min(i, 1)] += V

    def by_next(model, tracer):
        while True:
            model.layers_output[2] += V
            try:
                tracer.next()
            except Exception:
                break

    def last_row(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[2][-1] += V

    expected = {
        every: [steer(V, where="both")],
        by_all: [steer(V, where="both")],
        generated: [steer(V, where="decode")],
        prompt_alone: [steer(V)],
        by_number: [steer(V)],
        differing: [steer(V, where="decode"), steer(2 * V)],
        counted: [steer(V, 1, "decode"), steer(V, 0)],
        last_row: [steer(V, where="decode"), steer(V, where=(LENGTH - 1,))],
    }
    for body, edits in expected.items():
        assert said(checked(body)) == edits, body.__name__
    checked(by_next)


def test_writes_that_differ_between_generated_steps_name_their_tokens():
    def first_steps(model, tracer):
        for step in tracer.iter[:]:
            if step < 2:
                model.layers_output[2] += V

    def growing(model, tracer):
        for step in tracer.iter[:]:
            model.layers_output[2] += step * V

    def counted(model, tracer):
        v = V.clone()
        for _ in tracer.iter[:]:
            v *= 2
            model.layers_output[2] += v

    def every_other(model, tracer):
        for _ in tracer.iter[::2]:
            model.layers_output[2] += V

    def alternating(model, tracer):
        for step in tracer.iter[:]:
            if step % 2:
                model.layers_output[2] *= 0.5
            else:
                model.layers_output[1] += V

    every_step = [steer(step * V, where=("decode", (step - 1,))) for step in (1, 2, 3)]
    doubled = [steer(2 ** (step + 1) * V, where=("decode", (step - 1,))) for step in (1, 2, 3)]
    for body, edits in {
        first_steps: [steer(V, where=("decode", (0,))), steer(V)],
        growing: every_step,
        counted: [*doubled, steer(2 * V)],
        every_other: [steer(V, where=("decode", (1,))), steer(V)],
    }.items():
        given = checked(body)
        assert given.tier is Tier.PLAN and said(given) == edits, body.__name__
    assert checked(alternating, steps=9).tier is Tier.PLAN


def test_a_request_with_more_or_fewer_steps_has_writes_at_its_own():
    """The recording is the same, and its later steps repeat the third."""

    def late(model, tracer):
        for _ in tracer.iter[2:]:
            model.layers_output[2] += V

    for steps in (3, 4, 9, 5, 8):
        assert checked(late, steps=steps).tier is Tier.PLAN


def test_a_write_at_too_many_tokens_stays_in_the_forward(monkeypatch):
    monkeypatch.setattr(lowering, "_MOST_NAMED", 3)

    def late(model, tracer):
        for _ in tracer.iter[2:]:
            model.layers_output[2] += V

    assert checked(late, steps=4).tier is Tier.PLAN
    assert "in over 3 steps" in checked(late, steps=20).reason


@pytest.mark.parametrize("how", ["two", "slice", "break", "number", "next"])
def test_a_body_that_ends_before_the_request_writes_nothing_later(how):
    def two(model, tracer):
        for _ in tracer.iter[1:3]:
            model.layers_output[2] += V

    def broken_off(model, tracer):
        for step in tracer.iter[:]:
            model.layers_output[2] += V
            if step == 1:
                break

    def number(model, tracer):
        for _ in tracer.iter[1]:
            model.layers_output[2] += V

    def next_(model, tracer):
        tracer.next()
        model.layers_output[2] += V

    def until_the_fourth(model, tracer):
        for _ in tracer.iter[:3]:
            model.layers_output[2] += V

    chosen = {"two": two, "break": broken_off, "number": number, "next": next_, "slice": until_the_fourth}[how]
    checked(chosen)


def test_a_long_request_may_do_something_else_late():
    def late(model, tracer):
        for step in tracer.iter[:]:
            if step == 40:
                model.layers_output[2] += V
            model.layers_output[1] += V

    assert checked(late, steps=40).tier is Tier.PLAN
    assert checked(late, steps=42).tier is Tier.FORWARD


def test_a_patch_replaces_rows_of_the_prompt_alone():
    def body(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[2] = V.expand(model.layers_output[2].shape[0], WIDTH)

    kinds = {(kind, where == "decode") for kind, _, _, where, _ in said(checked(body))}
    assert ("Patch", True) not in kinds and ("Steer", True) not in kinds


def test_values_of_an_earlier_step_stay_in_the_forward():
    def added(model, tracer):
        h = model.layers_output[2]
        for _ in tracer.iter[1:]:
            model.layers_output[2] = h[-1:] + V

    def last_token(model, tracer):
        before = None
        for _ in tracer.iter[:]:
            h = model.layers_output[2]
            if before is not None:
                model.layers_output[2] = h + before
            before = h[-1:].clone()

    in_forward(added, last_token)


# Values around the moment of a write.


def test_a_value_is_what_it_is_when_the_forward_goes_on():
    def changed_after(model):
        h = model.layers_output[1] + V
        model.layers_output[1] = h
        h += V

    def changed_before(model):
        h = model.layers_output[1] + V
        h += V
        model.layers_output[1] = h

    def changed_after_the_next_site(model):
        h = model.layers_output[1] + V
        model.layers_output[1] = h
        model.layers_output[2]
        h += V

    def read_and_changed_too_late(model):
        h = model.layers_output[1]
        model.layers_output[2]
        h += V

    def rows_changed_after(model):
        rows = ROWS.clone()
        model.layers_output[1] = rows
        rows += 1

    def older_value(model):
        h = model.layers_output[1]
        model.layers_output[1] = h + V
        h += V

    def older_value_is_written(model):
        h = model.layers_output[1] + V
        model.layers_output[1] += 2 * V
        model.layers_output[1] = h

    def view_changed_after(model):
        h = model.layers_output[1] + V
        rows = h[1:]
        model.layers_output[1] = h
        rows += V

    def one_tensor_at_two_sites(model):
        h = ROWS.clone()
        model.layers_output[1] = h
        h += 1
        model.layers_output[2] = h
        h += 1

    expected = {
        changed_after: 2,
        changed_before: 2,
        changed_after_the_next_site: [steer(V, 1)],
        read_and_changed_too_late: [],
        rows_changed_after: [patch(ROWS[i] + 1, 1, (i,)) for i in range(LENGTH)],
        older_value: [steer(V, 1)],
        older_value_is_written: [steer(V, 1)],
        view_changed_after: None,
        one_tensor_at_two_sites: [patch(ROWS[i] + k, k, (i,)) for k in (1, 2) for i in range(LENGTH)],
    }
    for body, edits in expected.items():
        given = checked(body)
        if isinstance(edits, int):  # the steps of a program
            assert [len(edit.program.steps) for edit in given.edits] == [edits], body.__name__
        else:
            assert edits is None or (given.tier is Tier.PLAN and said(given) == edits), (body.__name__, given.reason)


def test_a_converted_value_that_is_changed_afterwards_stays_in_the_forward():
    def row(model):
        v = V.clone()
        model.layers_output[2] = v
        v += 1

    def other_dtype(model):
        h = ROWS.double()
        model.layers_output[2] = h
        h += 1

    in_forward(row, other_dtype, why="changed after it was written")


def test_saved_copies_are_of_their_moment():
    def before(model):
        kept = midstream.save(model.layers_output[2].clone())
        model.layers_output[2] += V
        return kept

    def after(model):
        model.layers_output[2] += V
        return midstream.save(model.layers_output[2])

    def changed(model):
        kept = midstream.save(model.layers_output[2])
        kept += V

    def changed_later(model):
        kept = midstream.save(model.layers_output[2])
        model.layers_output[3]
        kept += V

    def changed_in_a_view(model):
        kept = midstream.save(model.layers_output[2])
        kept[-1] = 0

    for body, edits in {
        before: [steer(V)],
        after: [steer(V)],
        changed: [steer(V)],
        changed_later: [],
        changed_in_a_view: [patch(torch.zeros(WIDTH), where=(4,))],
    }.items():
        given = checked(body)
        assert given.tier is not Tier.FORWARD and said(given) == edits, (body.__name__, given.reason)


# Tensors of the body's own that are filled with values of the forward.


def test_a_tensor_filled_with_values_of_the_forward_stands_for_them():
    def written(model):
        rows = torch.zeros(LENGTH, WIDTH)
        rows[-1] = model.layers_output[1][-1]
        model.layers_output[2] = rows

    def filled_with_its_own(model):
        h = model.layers_output[2]
        rows = torch.zeros(LENGTH, WIDTH)
        rows[:] = h
        rows += V
        model.layers_output[2] = rows

    def through_a_view(model):
        rows = torch.zeros(LENGTH, WIDTH)
        part = rows[2:]
        part[0] = model.layers_output[1][0]
        model.layers_output[2] += rows

    def copied(model):
        v = torch.zeros(WIDTH)
        v.copy_(model.layers_output[1][0])
        model.layers_output[2] += v

    def out(model):
        v = torch.zeros(WIDTH)
        torch.mul(model.layers_output[1][0], 2, out=v)
        model.layers_output[2] += v

    def added(model):
        v = V.clone()
        v += model.layers_output[1][0]
        model.layers_output[2] += v

    def flattened(model):
        v = torch.zeros(2, 4)
        v.view(-1)[:] = model.layers_output[1][0]
        model.layers_output[2] += v.flatten()

    def of_the_callers(model, kept=V.clone()):  # noqa: B008
        kept += model.layers_output[1][0]
        model.layers_output[2] += kept

    def overwritten_again(model):
        v = torch.zeros(WIDTH)
        v[:] = model.layers_output[1][0]
        v[:] = V
        model.layers_output[2] += v

    everything = [body for body in locals().values() if callable(body)]
    for body in everything:
        given = checked(body)
        assert given.tier in (Tier.FORWARD, Tier.PLAN), body.__name__
        if body not in (filled_with_its_own, overwritten_again):
            assert given.tier is Tier.FORWARD, body.__name__  # it needs values of another site


def test_a_filled_tensor_that_is_looked_at_ends_the_recording():
    def as_bool(model):
        buffer = torch.zeros(3)
        buffer[0] = model.layers_output[1].norm()
        if buffer[0] > 3:
            model.layers_output[2] += V

    def through_the_other_view(model):
        buffer = torch.zeros(3, 2)
        view = buffer[1]
        buffer[1, 0] = model.layers_output[1].norm()
        model.layers_output[2] += float(view.sum()) * V

    def as_list(model):
        buffer = torch.zeros(3)
        buffer[0] = model.layers_output[1].norm()
        model.layers_output[2] += sum(buffer.tolist()) * V

    def as_array(model):
        buffer = torch.zeros(WIDTH)
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += torch.from_numpy(buffer.numpy().copy())

    def as_an_array_made_before(model):
        buffer = torch.zeros(WIDTH)
        array = buffer.numpy()
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += float(array.sum()) * V

    def as_an_array_that_it_was_made_of(model):
        array = np.zeros(WIDTH, dtype=np.float32)
        buffer = torch.from_numpy(array)
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += float(array.sum()) * V

    def as_a_shared_array(model):
        array = np.zeros(WIDTH, dtype=np.float32)
        buffer = torch.as_tensor(array)
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += float(array.sum()) * V

    def as_the_callers_array(model):
        shared[:] = model.layers_output[1][0]
        model.layers_output[2] += float(array_of_shared.sum()) * V

    def as_text(model):
        buffer = torch.zeros(3)
        buffer[0] = model.layers_output[1].norm()
        model.layers_output[2] += len(str(buffer)) * V

    def as_an_index(model):
        places = torch.zeros(1, dtype=torch.long)
        places[0] = model.layers_output[1].norm().long()
        model.layers_output[2] += ROWS[places % LENGTH][0]

    def by_memory(model):
        buffer = torch.zeros(WIDTH)
        view = np.asarray(memoryview(buffer.numpy()))
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += float(view.sum()) * V

    def by_dlpack(model):
        buffer = torch.zeros(WIDTH)
        array = np.from_dlpack(buffer)
        buffer[:] = model.layers_output[1][0]
        model.layers_output[2] += float(array.sum()) * V

    shared = torch.zeros(WIDTH)
    array_of_shared = shared.numpy()
    for body in [body for body in locals().values() if callable(body)]:
        assert checked(body).tier is Tier.FORWARD, body.__name__


@pytest.mark.parametrize("how", ["another class", "statistics"])
def test_memory_that_pytorch_changes_unseen(how):
    def another_class(model):
        h = model.layers_output[2].as_subclass(torch.Tensor)
        h += V

    def statistics(model):
        norm = torch.nn.BatchNorm1d(WIDTH)
        norm.train()
        norm(model.layers_output[1])
        model.layers_output[2] += norm.running_mean

    checked({"another class": another_class, "statistics": statistics}[how])


# What a trace reads.


def test_what_is_read_is_captured():
    def one(model):
        return model.mlps_output[1:3], model.layers_output[3].norm(), model.logits.argmax()

    def every_step(model, tracer):
        return [model.resid_mid[1][-1] * 2 for _ in tracer.iter[:]]

    def in_some_steps(model, tracer):
        first = model.layers_output[1] * 2
        return first, [model.layers_output[2] * 2 for _ in tracer.iter[2:]]

    def writes_and_reads(model):
        h = model.layers_output[1] * 2
        model.layers_output[2] += V
        return h

    def all_layers(model):
        return torch.stack([*model.layers_output]).norm(), model.num_layers

    def first_of_a_loop(model, tracer):
        for _ in tracer.iter[:]:
            return model.layers_output[2] * 2

    def by_path(model):
        return model.model.layers[2].mlp.output * 2, model.model.layers[-1].mlp.input.norm()

    def by_alias(model):
        return [part.output * 2 for part in [model.model.layers[0].ffn, model.model.layers[1].mlp]]

    def a_generator_runs_later(model, tracer):
        rows, out = (model.layers_output[2] * 2 for _ in range(3)), []
        for _ in tracer.iter[1:]:
            out.append(next(rows))
        return out

    def projected(model):
        early = model.project_on_vocab(model.layers_output[1])
        model.logits[:, 0] = 0
        return early

    prompt, all_ = ["all_prompt"], ["all"]
    expected = {
        one: {("mlp_out", 1): prompt, ("mlp_out", 2): prompt, ("resid_post", 3): prompt},
        every_step: {("resid_mid", 1): all_},
        in_some_steps: {("resid_post", 1): prompt, ("resid_post", 2): all_},
        writes_and_reads: {("resid_post", 1): prompt, ("resid_post", 2): prompt},
        all_layers: {("resid_post", layer): prompt for layer in range(LAYERS)},
        first_of_a_loop: {("resid_post", 2): prompt},
        by_path: {("mlp_out", 2): prompt, ("mlp_in", 3): prompt},
        by_alias: {("mlp_out", 0): prompt, ("mlp_out", 1): prompt},
        a_generator_runs_later: {("resid_post", 2): all_},
        projected: {("resid_post", 1): prompt},
    }
    own = (every_step, projected, by_alias)  # beyond what the plain model has
    for body, points in expected.items():
        given = found(body) if body in own else checked(body)
        assert given.tier in (Tier.BEHIND, Tier.CLIENT), (body.__name__, given.reason)
        assert captured(given, Tier.BEHIND) == points, (body.__name__, captured(given, Tier.BEHIND))
