"""Bodies that only keep rows (row L1): which rows their plan captures, and what they give in the caller's process. Rows L2, L4."""

from __future__ import annotations

import collections
import importlib
import io

import pytest
import torch
from recorded import LENGTH, MODEL, V, captured, checked, found, lowered

import midstream
from midstream.capture.rows import Captured
from midstream.errors import CaptureError, NeverReachedError
from midstream.lowering.tiers import Tier
from midstream.plan.running import run
from midstream.trace.body import save
from midstream.trace.code import RETURNED, FunctionProgram, StandingEdit

LISTED, WIDTH = [0, 2], len(V)
LAST, EACH_LAST = ["last_prompt"], ["last_prompt", "all_generated"]


def steps(count, prompt=LENGTH, first=0):
    """Rows that tell their layer and position, counted from `first`."""
    places = range(first, first + prompt + count - 1)
    planes = {
        ("resid_post", layer): torch.tensor([[layer, place, *[0] * (WIDTH - 2)] for place in places], dtype=MODEL.dtype)
        for layer in range(4)
    }
    return planes, count


def outcome(fn, count=3, most=None):
    """What `fn` gives of `steps(count)`, in a request with at most `most` steps."""
    given = found(fn, steps=most or count)
    assert given.tier is Tier.CLIENT, given.reason
    prompt = 1 if given.saved_rows.last else LENGTH
    return given.client_trace.outcome(*steps(count, prompt, LENGTH - prompt))


def kept(fn, count=3, most=None):
    return outcome(fn, count, most).values[RETURNED]


def test_only_the_rows_that_are_kept_are_captured():
    """`checked` compares the values, too."""

    def last_of_prompt(model):
        return [save(model.layers_output[layer][-1]) for layer in range(model.num_layers)]

    def every_step(model, tracer):
        rows = []
        for _ in tracer.iter[:]:
            rows.append(model.mlps_output[-1].clone())
        return rows

    def by_step(model, tracer):
        seen = {}
        for step in tracer.iter[:]:
            seen[step] = [model.layers_output[layer] for layer in LISTED]
        return seen, 1

    def last_of_every_step(model, tracer):
        return {step: midstream.save(model.attentions_output[2][-1:].cpu()) for step in tracer.all()}

    def by_names(model, tracer):
        out = []
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            out.append(save(h[-1]))
        return out

    def first_and_others(model, tracer):
        first = model.layers_output[0][-1]
        return first, [[model.layers_output[layer][-1] for layer in LISTED] for _ in tracer.iter[1:3]]

    def by_a_helper(model, tracer):
        def last(layer):
            return model.layers_output[layer][-1]

        return [(step, *map(last, LISTED)) for step in tracer.iter[:]]

    def with_sizes(model):
        h = model.layers_output[1]
        return h[-1], tuple(h.shape), str(h.dtype), f"{h.ndim} axes"

    def generated(model, tracer):
        return [model.layers_output[1] for _ in tracer.iter[1:]]

    def in_a_later_step(model, tracer):
        h = model.layers_output[1]
        for _ in tracer.iter[1:]:
            pass
        return h[-1]

    def with_the_dtype_it_has(model, tracer):
        return [model.layers_output[1][-1].detach().float().contiguous() for _ in tracer.iter[:]]

    def none(model, tracer):
        return [model.layers_output[1][-1].clone() for _ in tracer.iter[:]], [None, "text", {"a": 2.5}]

    expected = {
        last_of_prompt: {("resid_post", layer): LAST for layer in range(4)},
        every_step: {("mlp_out", 3): ["all"]},
        by_step: {("resid_post", layer): ["all"] for layer in LISTED},
        last_of_every_step: {("attn_out", 2): EACH_LAST},
        by_names: {("resid_post", 1): EACH_LAST},
        first_and_others: {("resid_post", layer): EACH_LAST for layer in LISTED},
        by_a_helper: {("resid_post", layer): EACH_LAST for layer in LISTED},
        with_sizes: {("resid_post", 1): LAST},
        generated: {("resid_post", 1): EACH_LAST},
        in_a_later_step: {("resid_post", 1): LAST},
        with_the_dtype_it_has: {("resid_post", 1): EACH_LAST},
        none: {("resid_post", 1): EACH_LAST},
    }
    for body, rows in expected.items():
        given = checked(body)
        assert (given.tier, captured(given)) == (Tier.CLIENT, rows), body.__name__
        assert given.reason is None and not given.edits


def test_what_can_be_computed_from_rows_is_captured():
    """`checked` compares the values: the plan's programs compute them from the rows of a plain run."""

    def two_sites(model):
        return model.layers_input[1][-1], model.layers_output[1][-1]

    def first_row_of_each_step(model, tracer):
        return [model.layers_output[1][0] for _ in tracer.iter[:]]

    def columns(model, tracer):
        return [model.layers_output[1][:, -1] for _ in tracer.iter[:]]

    def an_element(model):
        return model.layers_output[1][-1][-1]

    def last_of_the_last_rows(model):
        return model.layers_output[1][-1:][-1:]

    def rows_from_the_last(model):
        return model.layers_output[1][-1::2]

    def computes(model, tracer):
        return [-model.layers_output[1][-1] for _ in tracer.iter[:]]

    def casts(model, tracer):
        return [model.layers_output[1][-1].double() for _ in tracer.iter[:]]

    def changes_a_clone(model):
        h = model.layers_output[1].clone()
        row = h[-1]
        h.zero_()
        return row

    def changes_what_it_keeps(model):
        h = save(model.layers_output[1][-1].clone())
        h[0] = 0
        return h

    def in_a_saved_list(model, tracer):
        kept = save([])
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            kept.append((h[-1], h[:, 2:4], h[-1].norm()))
        return kept

    def writes_elsewhere(model):
        h = model.layers_output[1][-1].clone()
        model.layers_output[2] += V
        return h

    def writes_and_reads_again(model, tracer):
        kept = []
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            model.layers_output[1] = h * 0.5 + V
            kept.append((h[-1].sum(), model.layers_output[1][-1], model.layers_output[2][-1].norm()))
        return kept

    def of_an_alias_that_changes(model, tracer):
        kept = save([])
        for _ in tracer.iter[:]:
            h = model.layers_output[1].clone()
            row, alias = h[-1], h
            alias[:, 3] = 7
            kept.append((row, h.sum(-1)[-1]))
        return kept

    def with_a_vector_that_changes(model, tracer):
        kept, w = [], V.clone()
        for step in tracer.iter[:]:
            kept.append(((model.layers_output[1] @ w)[-1], model.layers_output[1][-1] * step))
            w *= 2
        return kept

    def decided_by_the_number_of_tokens(model, tracer):
        kept = []
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            kept.append((h @ V)[0] if len(h) > 1 else h[-1].norm())
        return kept

    def of_several_rows(model):
        h = model.layers_output[1]
        return h[0].norm(), h[::1].mean(-1), [row.sum() for row in (h[0], h[-1])]

    def norms(model, tracer):
        return [model.layers_output[1][-1].norm() for _ in tracer.iter[:]]

    def probe_of_all_tokens(model):
        return model.layers_output[1] @ V, torch.sigmoid(model.layers_output[1].float() @ V)[-1]

    def top_features(model, tracer):
        kept = []
        for _ in tracer.iter[:]:
            top = torch.relu(model.layers_output[1] @ torch.outer(V, V)).topk(3, dim=-1)
            kept.append((top.values[-1], top.indices[-1]))
        return kept

    def other_values_in_the_prompt(model, tracer):
        first = model.layers_output[1][-1:].mean(-1, keepdim=True)
        return first, [model.layers_output[1][-1].amax() for _ in tracer.iter[1:]]

    def two_layers_with_rows(model, tracer):
        return [(model.layers_output[1][-1], model.layers_output[2][-1].std()) for _ in tracer.iter[:]]

    def in_half_precision(model):
        h = model.layers_output[2][-1].half()
        return h.sum(), h.argmax(), h

    for body in [body for body in locals().values() if callable(body)]:
        given = checked(body)
        assert given.tier is Tier.CLIENT, (body.__name__, given.tier, given.reason)


def test_results_at_one_value_are_one_program():
    def body(model, tracer):
        rows = []
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            rows.append((h[-1].norm(), (h @ V)[-1], h[-1]))
        return rows

    given = checked(body)
    (capture, _) = given.plan_for(given.tier).captures
    assert len(capture.program.results) == 3 and captured(given) == {("resid_post", 1): EACH_LAST}


def test_a_request_that_ends_early_has_its_own_results():
    def body(model, tracer):
        return [model.layers_output[1][-1].sum() for _ in tracer.iter[:]]

    given = found(body, steps=6)
    program = given.saved_rows.programs["resid_post", 1]
    rows = steps(3, 1, LENGTH - 1)[0]["resid_post", 1]
    outcome_ = given.client_trace.outcome({("resid_post", 1): run(program, rows)}, 3)
    assert [value.item() for value in outcome_.values[RETURNED]] == [1 + LENGTH - 1 + i for i in range(3)]


def test_other_values_with_fewer_steps_are_an_error():
    """The code of a request of three steps keeps what no program of the one of six computes. Which it would be is not known before."""

    def body(model, tracer):
        rows = []
        for _ in tracer.iter[:]:
            rows.append(model.layers_output[1][-1])
        h = rows[-1] if len(rows) > 3 else rows[-1] * 2
        return h

    given = found(body, steps=6)
    assert given.tier is Tier.CLIENT
    with pytest.raises(CaptureError, match="ended early"):
        given.client_trace.outcome(*steps(3, 1, LENGTH - 1))


def test_a_body_that_does_more_than_to_keep_rows_runs_behind_the_step():
    def two_kinds(model):
        return model.layers_output[1], model.layers_output[2][-1]

    def prompts(model):
        return [model.layers_output[layer] for layer in LISTED]

    def another_row(model):
        return model.layers_output[1][-2]

    def first_row(model):
        return model.layers_output[1][0]

    def some_rows(model):
        return model.layers_output[1][1:]

    def loops_over_rows(model):
        return [row for row in model.layers_output[1]]

    def stacks(model):
        return torch.stack([model.layers_output[layer][-1] for layer in LISTED])

    def reads_logits(model):
        return model.layers_output[1][-1], model.logits

    def reads_the_token(model):
        return model.layers_output[1][-1], model.samples.item()

    def numbers(model, tracer):
        return [model.layers_output[1][-1].norm().item() for _ in tracer.iter[:]]

    def reads_the_result(model, tracer):
        return model.layers_output[1][-1], tracer.result

    def caches(model, tracer):
        tracer.cache(modules=[model.model.layers[1].mlp])
        return model.layers_output[1][-1]

    def own_tensors(model):
        return V * 2, model.layers_output[1][-1]

    own = (reads_the_result, caches)  # the plain model has none of these
    for body in [body for body in locals().values() if callable(body)]:
        given = found(body) if body in own else checked(body)
        assert given.tier is Tier.BEHIND, (body.__name__, given.tier, given.reason)


@pytest.mark.parametrize("how", ["prints", "stops"])
def test_a_body_that_prints_or_stops_is_not_left_to_the_caller(how):
    def prints(model):
        print("here")
        return model.layers_output[1][-1]

    def stops(model, tracer):
        kept = save([])
        for step in tracer.iter[:]:
            kept.append(save(model.layers_output[1][-1]))
            if step == 1:
                tracer.stop()

    assert found({"prints": prints, "stops": stops}[how]).tier is Tier.BEHIND


def test_each_step_has_its_rows():
    def body(model, tracer):
        return [(step, model.layers_output[1], model.layers_output[-1]) for step in tracer.iter[:]]

    result = outcome(body)
    rows = result.values[RETURNED]
    assert [step for step, *_ in rows] == [0, 1, 2] and result.steps == 3 and result.saved
    assert [early[:, 1].tolist() for _, early, _ in rows] == [[0, 1, 2, 3, 4], [5], [6]]
    assert all(early[:, 0].eq(1).all() and late[:, 0].eq(3).all() for _, early, late in rows)


def test_a_request_that_ends_early_gives_what_its_code_gives_for_as_many_steps():
    def body(model, tracer):
        rows = [model.layers_output[1][-1] for _ in tracer.iter[:]]
        return len(rows), rows

    count, rows = kept(body, count=2, most=6)
    assert count == 2 and [row[:2].tolist() for row in rows] == [[1, 4], [1, 5]]


def test_a_request_that_ends_before_a_step_that_its_code_asks_for_is_an_error():
    def body(model, tracer):
        return [model.layers_output[1][-1] for _ in tracer.iter[[0, 3]]]

    failure = outcome(body, count=2, most=4).failure
    assert isinstance(failure.error, NeverReachedError)
    assert kept(body, count=4)[1][:2].tolist() == [1, LENGTH + 2]


def test_a_value_that_counts_steps_is_that_of_the_steps_which_the_request_had():
    def body(model, tracer):
        count = 0
        for _ in tracer.iter[:]:
            model.layers_output[1] += V
            count += 1
        return count

    given = found(body, steps=6)
    end, nothing = given.ending(given.tier), Captured("")
    assert given.reads_nothing and [end(nothing, steps).values["return"] for steps in (6, 3, 1)] == [6, 3, 1]


def test_containers_and_objects_of_any_kind_are_kept():
    class Row:
        __slots__ = ("layer", "row")

        def __init__(self, row):
            self.layer, self.row = 1, row

    def body(model, tracer):
        h = model.layers_output[1]
        shared = [h[-1]]
        named = collections.namedtuple("Row", "layer row")(1, h[-1])
        counts = collections.Counter({"a": 2, "b": 1})
        found = {"x": shared, "y": (shared, [named]), 3: collections.UserDict(row=h[-1]), "rows": Row(h[-1])}
        found["x"] = found.pop("x")  # the last one now
        return found, counts, collections.deque([h[-1]], maxlen=4), {h[-1]: 1}, frozenset("a"), None

    assert found(body).tier is Tier.CLIENT
    given, counts, queue, by_tensor, letters, nothing = kept(body)
    row = [1, LENGTH - 1]
    assert list(given) == ["y", 3, "rows", "x"]
    assert type(given["y"]) is tuple and given["y"][1][0]._fields == ("layer", "row")
    rows = [given["x"][0], given["y"][1][0].row, given[3]["row"], given["rows"].row, queue[0], *by_tensor]
    assert [each[:2].tolist() for each in rows] == [row] * 6
    assert type(given["rows"]) is Row and type(given[3]) is collections.UserDict and queue.maxlen == 4
    assert counts == {"a": 2, "b": 1} and type(counts) is collections.Counter
    assert (letters, nothing) == (frozenset("a"), None)


def test_what_is_saved_twice_is_two_tensors():
    def body(model):
        h = model.layers_output[1][-1]
        return h, h, model.layers_output[1][-1]

    first, *others = kept(body)
    first.zero_()
    assert all(each[:2].tolist() == [1, LENGTH - 1] for each in others)
    assert len({each.data_ptr() for each in (first, *others)}) == 3


def test_a_saved_tensor_that_is_kept_twice_stays_one():
    def body(model):
        row = save(model.layers_output[1][-1])
        rows = save([row, row])
        return [rows, rows]

    given = found(body)
    assert given.tier is Tier.CLIENT
    first, second = kept(body)
    first[0].zero_()
    assert second[1].eq(0).all() == (first[0] is second[1])


def test_rows_are_saved_without_those_beside_them():
    def body(model, tracer):
        return [model.layers_output[1][-1] for _ in tracer.iter[:]]

    rows = kept(body, 300)
    assert [row[:2].tolist() for row in rows] == [[1, LENGTH - 1 + i] for i in range(300)]
    torch.save(rows[-1], file := io.BytesIO())
    alone = torch.save(rows[-1].clone(), other := io.BytesIO())
    assert alone is None and len(file.getvalue()) == len(other.getvalue())


def test_each_request_has_tensors_of_its_own():
    def body(model, tracer):
        return [model.layers_output[2][-1] for _ in tracer.iter[:]]

    first, second = lowered([[body]] * 2, [LENGTH] * 2, [3] * 2)
    traces = [first.client_trace, second.client_trace]
    for trace, begin in zip((*traces, traces[0]), (0, 100, 200), strict=True):
        rows = trace.outcome(*steps(3, 1, begin)).values[RETURNED]
        assert [row[:2].tolist() for row in rows] == [[2, begin + i] for i in range(3)]
        for row in rows:
            row.zero_()


def test_a_read_in_the_wrong_order_runs_in_the_forward_which_has_the_error():
    def layers(model):
        return model.layers_output[2][-1], model.layers_output[1][-1]

    def steps_(model, tracer):
        return [model.layers_output[2][-1] for _ in tracer.iter[[2, 1]]]

    def again(model, tracer):
        first = [model.layers_output[2][-1] for _ in tracer.iter[:]]
        return first, [model.layers_output[2][-1] for _ in tracer.iter[[2]]]

    def absent(model):
        return model.layers_output[4][-1]

    def methods_of_blocks(model):
        return model.layers_output[1][-1].save()

    for body in (layers, steps_, again, absent, methods_of_blocks):
        assert found(body).tier is Tier.FORWARD, body.__name__


def test_a_function_of_a_module_is_as_it_was_when_it_was_packed(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_kept_row.py").write_text(
        "LAYER = 1\n\n\ndef probe(model):\n    return model.layers_output[LAYER][-1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("module_of_a_kept_row")
    given = found(module.probe)
    module.LAYER = 2
    assert given.client_trace.outcome(*steps(1, 1, 4)).values[RETURNED][:2].tolist() == [1, LENGTH - 1]


def test_a_standing_edit_is_not_left_to_the_caller():
    def reads(model):
        return model.layers_output[1][-1]

    program = StandingEdit(FunctionProgram(reads), has_name=True)
    assert found(program).tier is Tier.BEHIND and found(reads, known=MODEL).tier is Tier.CLIENT
