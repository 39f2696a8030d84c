"""Traces that only keep rows (row I1): which code is taken for one, and what such code gives when its request has ended."""

from __future__ import annotations

import importlib
import io
from unittest import mock

import pytest
import torch
from test_lowering import FACTS, LENGTH, MODEL, Holder, V, found

import midstream
from midstream.client import lowering
from midstream.client.keeping import rows_kept
from midstream.client.lowering import _code_of, lower
from midstream.client.model import StandingEdit
from midstream.errors import NeverReachedError, OutOfOrderError
from midstream.trace.kept import CapturedSteps, KeptPrograms
from midstream.trace.program import RETURNED, FunctionProgram
from midstream.trace.tracer import save

LISTED = [0, 2]
FOUND: list = []
TENSORS = [V]
rows = layer = step = "of a notebook's other cells"


def positions(fn):
    """The plan's captures, `{(site, layers): positions}`."""
    kept = found(fn).kept
    assert kept is not None
    taken: dict = {}
    for capture in kept.plan.captures:
        taken.setdefault((capture.site, capture.layers), []).append(capture.positions)
    return kept.rows, taken


def test_only_the_rows_that_are_kept_are_captured():
    def last_of_prompt(model):
        return [save(model.layers_output[layer][-1]) for layer in range(model.num_layers)]

    def every_step(model, tracer):
        rows = []
        for _ in tracer.iter[:]:
            rows.append(model.mlps_output[-1].clone())
        return rows

    def by_step(model, tracer):
        found = {}
        for step in tracer.iter[:]:
            found[step] = [model.layers_output[layer] for layer in LISTED]
        return found, 1

    def last_of_every_step(model, tracer):
        return {step: midstream.save(model.resid_mid[2][-1:].cpu()) for step in tracer.all()}

    def by_names(model, tracer):
        found = []
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            found.append(save(h[-1]))
        return found

    def first_and_others(model, tracer):
        first = model.layers_output[0][-1]
        return first, [[model.layers_output[layer][-1] for layer in LISTED] for _ in tracer.iter[1:3]]

    assert positions(last_of_prompt) == ("last", {("resid_post", (0, 1, 2, 3)): ["last_prompt"]})
    assert positions(every_step) == ("whole", {("mlp_out", (3,)): ["all"]})
    assert positions(by_names) == ("last", {("resid_post", (1,)): ["last_prompt", "all_generated"]})
    assert positions(by_step) == ("whole", {("resid_post", (0, 2)): ["all"]})
    assert positions(last_of_every_step) == ("last", {("resid_mid", (2,)): ["last_prompt", "all_generated"]})
    assert positions(first_and_others) == ("last", {("resid_post", (0, 2)): ["last_prompt", "all_generated"]})


def two_kinds(model):
    return model.layers_output[1], model.layers_output[2][-1]


def two_sites(model):
    return model.layers_input[1], model.layers_output[1]


def heads(model):
    return model.attn_z[1]


def writes_to_its_rows(model, tracer):
    h = model.layers_output[1]
    h[:] = 0
    return [model.layers_output[2] for _ in tracer.iter[:]]


def writes_to_the_last_row(model, tracer):
    h = model.layers_output[1]
    h[-1] = 0
    return [model.layers_output[2] for _ in tracer.iter[:]]


def writes_to_a_clone(model, tracer):
    h = model.layers_output[1].clone()
    for _ in tracer.iter[:]:
        h[0] = model.layers_output[2]
    return h


def calls_for_its_steps(model, tracer):
    return [model.layers_output[1] for _ in tracer.iter[print("here") or 0 :]]


def reuses_a_lists_name(model, tracer):
    rows = []
    rows = model.layers_output[1].clone()
    for _ in tracer.iter[:]:
        rows[0] = model.layers_output[2]
    return rows


def reads_the_layer_of_a_step(model, tracer):
    return [model.layers_output[step][-1] for step in tracer.iter[:]]


def goes_through_the_steps_of_a_letter(model, tracer):
    return [[model.layers_output[3][-1], [model.layers_output[1][-1] for _ in tracer.iter[x : x + 1]]] for x in b"12"]


def reads_the_prompt(model):
    return [model.layers_output[layer] for layer in LISTED]


def another_row(model):
    return model.layers_output[1][-2]


def first_row(model):
    return model.layers_output[1][0]


def some_rows(model):
    return model.layers_output[1][1:]


def two_kinds_of_a_name(model):
    h = model.layers_output[1]
    return h[-1], h


def two_kinds_under_two_names(model):
    h = model.layers_output[1]
    other = h
    return h[-1], other


def a_row_of_a_name(model):
    h = model.layers_output[1]
    return h[0]


def computes(model):
    return model.layers_output[1] * 1


def negates(model):
    h = model.layers_output[1]
    return -h


def loops_over_rows(model):
    h = model.layers_output[1]
    rows = []
    for row in h:
        rows.append(row)
    return h, rows


def loops_over_a_sum(model):
    h = model.layers_output[1]
    return [row.clone() for row in h + h]


def adds_up_in_a_later_round(model, tracer):
    x = 1
    found = {}
    for _ in tracer.iter[:]:
        found[x + x] = model.layers_output[1]
        x = model.layers_output[2]
    return found


def casts(model):
    return model.layers_output[1].float()


def copies_a_name_to_the_cpu(model):
    h = model.layers_output[1][-1]
    return h.cpu(), h


def moves(model):
    return model.layers_output[1].to("cpu")


def reads_logits(model):
    return model.layers_output[1][-1], model.logits


def reads_the_result(model, tracer):
    return model.layers_output[1], tracer.result


def stops(model, tracer):
    h = model.layers_output[1].clone()
    tracer.stop()
    return h


def goes_on(model, tracer):
    tracer.next()
    return model.layers_output[1]


def caches(model, tracer):
    return tracer.cache(modules=[model.model.layers[1].mlp])


def writes(model):
    h = model.layers_output[1].clone()
    model.layers_output[2] += V
    return h


def chooses(model):
    return model.layers_output[1] if len(LISTED) > 1 else None


def chooses_in_a_loop(model):
    return [model.layers_output[layer] for layer in LISTED if layer]


def keeps_in_the_callers_list(model):
    FOUND.append(model.layers_output[1].clone())
    return FOUND


def gives_the_callers_list(model):
    return model.layers_output[1], LISTED


def binds_the_callers_list(model):
    mine = LISTED
    mine.append(1)
    return [model.layers_output[layer] for layer in mine]


def loops_over_the_callers_tensors(model):
    return [model.layers_output[1] for row in TENSORS]


def calls_a_helper(model):
    return two_kinds(model)


def stacks(model):
    return torch.stack([model.layers_output[layer][-1] for layer in LISTED])


def prints(model):
    print("here")
    return model.layers_output[1]


def lengths(model):
    h = model.layers_output[1]
    return len(h)


def by_module(model):
    return model.model.layers[1].mlp.output


def sliced(model):
    return model.layers_output[1:3]


def generates(model):
    return list(model.layers_output[layer] for layer in LISTED)


def another_list(model):
    list = tuple
    return list(), model.layers_output[1]


def of_a_class(model):
    return Holder(), model.layers_output[1]


def last_element_of_a_row(model):
    h = model.layers_output[1]
    h = h[-1]
    return h[-1:]


def last_element_of_one_of_two(model):
    h = model.layers_output[1]
    (h, other) = (h[-1], 3)
    return h[-1:], other


def last_element_of_a_name_of_a_list(model):
    h = model.layers_output[1]
    rows = [h[-1]]
    h = []
    h.append(rows)
    return rows


def the_last_row_by_a_float(model):
    return model.layers_output[1][-1.0]


def splits_a_row(model):
    (first,) = model.layers_output[1][-1]
    return first


def splits_a_row_in_a_pair(model):
    (first, second), other = model.layers_output[1][-1], 3
    return first, second, other


OTHER_FORMS = [
    the_last_row_by_a_float,
    last_element_of_a_row, last_element_of_one_of_two, last_element_of_a_name_of_a_list, splits_a_row, splits_a_row_in_a_pair,
    calls_for_its_steps,
    copies_a_name_to_the_cpu,
    reuses_a_lists_name,
    writes_to_its_rows, writes_to_the_last_row, writes_to_a_clone, two_kinds, another_row, first_row, some_rows,
    two_kinds_of_a_name, two_kinds_under_two_names, a_row_of_a_name, computes, negates, loops_over_rows, loops_over_a_sum,
    adds_up_in_a_later_round, casts, moves, reads_logits, reads_the_result, stops, goes_on, caches, writes, chooses,
    chooses_in_a_loop, keeps_in_the_callers_list, gives_the_callers_list, binds_the_callers_list, loops_over_the_callers_tensors,
    calls_a_helper, stacks, prints, lengths, by_module, sliced, generates, another_list, of_a_class,
]  # fmt: skip


@pytest.mark.parametrize("fn", OTHER_FORMS, ids=lambda fn: fn.__name__)
def test_code_that_does_anything_else_is_not_taken(fn):
    """Seen failing for each part of the check that was taken away."""
    assert rows_kept(*_code_of(FunctionProgram(fn))) is None


@pytest.mark.parametrize(
    "fn",
    [two_sites, heads, reads_the_prompt, reads_the_layer_of_a_step, goes_through_the_steps_of_a_letter],
    ids=lambda fn: fn.__name__,
)
def test_code_of_these_forms_may_be_left_to_the_engine(fn):
    """Other sites and steps than it may seem, heads, layers that are known only in the run; and whole prompts, which it sends faster."""
    assert rows_kept(*_code_of(FunctionProgram(fn))) is not None and found(fn).kept is None


def test_a_trace_that_writes_is_not_taken_whatever_its_form():
    """Its plan would lack the edits."""
    with mock.patch.object(lowering, "rows_kept", lambda *_: "last"):
        assert found(writes).edits and found(writes).kept is None


def test_a_standing_edit_is_not_taken():
    """It runs in every step. Seen failing where its program was taken for a request's own."""

    def reads(model):
        return model.layers_output[1][-1]

    assert lower(FunctionProgram(reads), MODEL, LENGTH).kept is not None
    assert lower(StandingEdit(FunctionProgram(reads), has_name=True), MODEL, LENGTH).kept is None


NAMES = {("resid_post", layer): f"model.layers.{layer}.output" for layer in range(FACTS.num_layers)}


def steps(count, prompt=LENGTH, first=0):
    """Rows that tell their layer and position, counted from `first`."""
    positions = range(first, first + prompt + count - 1)
    planes = {point: torch.tensor([[point[1], position] for position in positions]) for point in NAMES}
    return CapturedSteps(planes, prompt, count)


def kept(fn, count=3, prompt=LENGTH):
    """What `fn` gives of `steps`."""
    outcome = KeptPrograms([FunctionProgram(fn)], FACTS.num_layers, NAMES).outcome(0, steps(count, prompt))
    return outcome.values.get(RETURNED), outcome


def test_each_step_has_its_rows():
    def body(model, tracer):
        return [(step, model.layers_output[1], model.layers_output[-1]) for step in tracer.iter[:]]

    steps, outcome = kept(body)
    assert [step for step, *_ in steps] == [0, 1, 2] and outcome.steps == 3 and outcome.saved
    assert [rows[:, 1].tolist() for _, rows, _ in steps] == [[0, 1, 2, 3, 4], [5], [6]]
    assert all(early[:, 0].eq(1).all() and late[:, 0].eq(3).all() for _, early, late in steps)


def test_a_read_in_the_wrong_order_is_an_error():
    def layers(model):
        return model.layers_output[2], model.layers_output[1]

    def steps(model, tracer):
        return [model.layers_output[2] for step in tracer.iter[[2, 1]]]

    def beyond(model, tracer):
        return [model.layers_output[2] for step in tracer.iter[[0, 3]]]

    def again(model, tracer):
        return [model.layers_output[2] for _ in tracer.iter[:]], [model.layers_output[2] for step in tracer.iter[[2]]]

    wrong = {layers: OutOfOrderError, steps: OutOfOrderError, beyond: NeverReachedError, again: NeverReachedError}
    for fn, error in wrong.items():
        assert isinstance(kept(fn)[1].failure.error, error)


def test_a_method_that_only_a_block_has_is_the_error_of_a_tensor():
    """Seen failing: the error named a class that users do not know."""

    def body(model):
        return model.layers_output[1][-1].save()

    def plain(model):
        return torch.zeros(1).save()

    with pytest.raises(AttributeError) as tensors:
        plain(None)
    message = kept(body)[1].failure.message
    assert message.startswith(str(tensors.value)) and "midstream.save(value)" in message


def test_what_is_saved_twice_is_two_tensors():
    def body(model):
        h = model.layers_output[1]
        return h, h, model.layers_output[1]

    first, *others = kept(body)[0]
    first.zero_()
    assert all(each[:, 0].eq(1).all() for each in others)
    assert len({each.data_ptr() for each in (first, *others)}) == 3


def test_rows_in_a_list_are_tensors_of_their_own():
    def body(model):
        save([model.layers_output[1][-1] for _ in range(2)])
        kept = [model.layers_output[1][-1] for _ in range(2)]
        save(kept)
        raise ValueError

    first, second = kept(body)[1].values["kept"]
    first.zero_()
    assert second.tolist() == [1, LENGTH - 1]


def test_values_read_twice_in_a_saved_list_are_tensors_of_their_own():
    def body(model):
        kept = [model.layers_output[1] for _ in range(2)]
        save(kept)
        raise ValueError

    first, second = kept(body)[1].values["kept"]
    first.zero_()
    assert second[:, 0].eq(1).all()


def test_a_tensor_that_is_kept_twice_stays_one_and_is_saved_without_other_rows():
    """Seen failing when each occurrence took the next rows, and when the tensors were views of all rows."""

    def body(model, tracer):
        first = model.layers_output[1][-1]
        kept = [first, first, model.layers_output[2], *[model.layers_output[1][-1] for _ in tracer.iter[1:]]]
        save(kept)
        raise ValueError

    first, same, prompt, *later = kept(body, 500)[1].values["kept"]
    assert first is same and first.tolist() == [1, LENGTH - 1]
    assert prompt.tolist() == [[2, position] for position in range(LENGTH)]
    assert [row.tolist() for row in later] == [[1, LENGTH + i] for i in range(499)]
    torch.save(later[-1], file := io.BytesIO())
    assert len(file.getvalue()) < 500 * 2 * 8


def test_requests_with_as_many_steps_share_a_run():
    """Each has its own rows, and its own tensors. Seen failing with the rows of the first request."""
    runs = []

    def last(model, tracer):
        return [model.layers_output[2][-1] for _ in tracer.iter[:]]

    def prompt(model):
        return model.layers_output[1]

    def wrong(model):
        return model.layers_output[2], model.layers_output[1]

    given = [FunctionProgram(last)] * 2 + [FunctionProgram(prompt), FunctionProgram(wrong)]
    programs = KeptPrograms(given, FACTS.num_layers, NAMES)
    run = programs._run
    programs._run = lambda *given: (runs.append(1), run(*given))[1]
    asked = [(0, 3, 5, 0), (1, 3, 5, 100), (0, 4, 5, 200), (1, 4, 4, 300), (1, 4, 4, 400), (2, 4, 4, 500)]
    for number, count, length, first in asked:
        found = programs.outcome(number, steps(count, length, first)).values[RETURNED]
        if number == 2:
            assert found[:, 1].tolist() == list(range(first, first + length))
            continue
        assert [row.tolist() for row in found] == [[2, first + length - 1 + i] for i in range(count)]
        for row in found:
            row.zero_()
    assert len(runs) == 4
    first, second = (programs.outcome(3, steps(3)).failure for _ in range(2))
    assert len(runs) == 6 and first.error is not second.error
    assert isinstance(first.error, OutOfOrderError) and isinstance(second.error, OutOfOrderError)


def test_what_stands_twice_in_the_result_stands_there_twice():
    """Lists, and a list in itself. Seen failing where each is copied by itself."""

    def body(model):
        rows = [model.layers_output[1][-1]]
        same = rows
        rows.append(rows)
        save(rows)
        save(same)
        raise ValueError

    values = kept(body)[1].values
    assert values["same"] is values["rows"] and values["rows"][1] is values["rows"]


def test_what_a_program_sees_is_as_it_was(tmp_path, monkeypatch):
    """Also a function that could be imported. Seen failing where it was sent by its name."""
    (tmp_path / "module_of_a_probe.py").write_text(
        "LAYER = 1\n\n\ndef probe(model):\n    return model.layers_output[LAYER][-1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("module_of_a_probe")
    programs = KeptPrograms([FunctionProgram(module.probe)], FACTS.num_layers, NAMES)
    module.LAYER = 2
    assert programs.outcome(0, steps(3)).values[RETURNED].tolist() == [1, LENGTH - 1]
    assert kept(module.probe)[0].tolist() == [2, LENGTH - 1]


def test_the_body_that_ends_last_is_known_and_a_request_without_a_step_has_none():
    def every_step(model, tracer):
        return [model.layers_output[1] for _ in tracer.iter[:]]

    def prompt(model):
        return model.layers_output[1][-1]

    assert [kept(every_step, 3)[1].order, kept(every_step, 2)[1].order, kept(prompt, 3)[1].order] == [3, 2, 1]
    assert isinstance(kept(prompt, 0)[1].failure.error, NeverReachedError)


def test_the_models_own_error_is_the_traces():
    def body(model):
        return model.layers_output[4]

    assert "IndexError" in kept(body)[1].failure.text()
    assert found(body).kept is None  # the engine's error names the layers that there are
