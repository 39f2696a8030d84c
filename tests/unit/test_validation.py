"""Each new tape is checked against the code on real numbers (rows U2 and U3; section 20 of the design).

The first part breaks the lowering on purpose. With the check, the body runs in the forward; without it, the tape is wrong. The second part
has bodies of the kinds that recordings have got wrong: each is right, or runs in the forward. The third part has bodies that must not lose
their tier.

The oracle is the plain run of `support/recorded.py`, which shares no code with midstream.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bare_trace import Trace
from recorded import LENGTH, MODEL, UNIT, WIDTH, V, check_numbers, client_value, found, plain

from midstream.lowering import client_traces, linear, tiers, validation
from midstream.lowering.tiers import TapedCode
from midstream.plan.building import Builder
from midstream.plan.ops.edit import changed
from midstream.runtime.request import Tier
from midstream.trace.code import RETURNED, BlockProgram

MATRIX = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
OTHER = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))


def fresh():
    """A model of which nothing is recorded."""
    return replace(MODEL, recorded=OrderedDict())


# The plain run.


def described(value: Any, known: dict[int, int] | None = None) -> Any:
    """A value with types, keys in order, and the objects that occur twice; numbers are rounded."""
    known = {} if known is None else known
    name = type(value).__name__
    if isinstance(value, (list, dict, set, deque, torch.Tensor)):
        if id(value) in known:
            return name, "again", known[id(value)]
        known[id(value)] = len(known)
    if isinstance(value, torch.Tensor):
        numbers = value.double() if value.is_floating_point() else value
        return name, str(value.dtype), tuple(value.shape), [f"{x:.3g}" for x in (numbers + 0.0).flatten().tolist()]
    if isinstance(value, dict):
        return name, [(key, described(each, known)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return name, [described(each, known) for each in value]
    return name, repr(value)


def why_wrong(given: Any, body: Callable[..., Any], steps: int, length: int) -> str | None:
    """What a tape does wrong; None if nothing. Code that runs behind the step only has its writes on the tape."""
    if given.tier is Tier.FORWARD:
        return None
    request, returned, error = plain(body, steps, length)
    if given.tier is not Tier.BEHIND and error is not None:
        return f"raises {type(error).__name__}"
    if given.tier is Tier.BEHIND and error is not None:
        return None  # the code itself raises
    try:
        check_numbers(given, request)
    except AssertionError as different:
        return str(different)
    if given.tier is Tier.BEHIND:
        return None
    if given.tier is Tier.PLAN:
        mine = given.client_trace.outcome({}, request.step + 1 if request.stopped else steps)
        if mine.stopped != request.stopped:
            return "does not stop"
        value = mine.values.get(RETURNED)
    else:
        value = client_value(given, request)
    if described(value) != described(returned):
        return f"gives {described(value)}, not {described(returned)}"
    return None


def right_or_forward(*bodies: Callable[..., Any], steps: int = 3, length: int = LENGTH) -> None:
    for body in bodies:
        for tokens in (length, 1):
            given = found(body, steps=steps, length=tokens, known=fresh())
            wrong = why_wrong(given, body, steps, tokens)
            assert wrong is None, f"{body.__name__}, {tokens} tokens: {wrong}"


# Broken lowerings.


@dataclass
class Broken:
    """A fault, and a body that shows it.

    Attributes:
        name: of the fault.
        body: for which the tape is then wrong.
        breaks: makes the fault.
    """

    name: str
    body: Callable[..., Any]
    breaks: Callable[[pytest.MonkeyPatch], None]


def edits_by(change: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the edits."""
    made = tiers._edits

    def breaks(monkeypatch):
        monkeypatch.setattr(tiers, "_edits", lambda *given: iter(change(list(made(*given)))))

    return breaks


def steps_by(op: str, change: Callable[[list[Any], dict[str, Any]], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the steps of programs: `change` gets the arguments of the operation, and returns new ones, or a result."""
    add = Builder.add

    def broken(self, name, args, kwargs, line, out=None):
        if type(self) is Builder and name.partition(".")[0] == op:
            args, kwargs = list(args), dict(kwargs)
            instead = change(args, kwargs)
            if instead is not None:
                return instead
        return add(self, name, args, kwargs, line, out)

    return lambda monkeypatch: monkeypatch.setattr(Builder, "add", broken)


def swap(args, kwargs):
    args[0], args[1] = args[1], args[0]


def set_arg(place, value):
    return lambda args, kwargs: args.__setitem__(place, value)


def first(args, kwargs):
    return args[0]


def constant(change):
    """A change of the constants among the arguments."""

    def apply(args, kwargs):
        args[:] = [change(each) if isinstance(each, torch.Tensor) else each for each in args]

    return apply


def rule(op: str, form: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in a rule of linear functions."""
    return lambda monkeypatch: monkeypatch.setitem(linear._RULES, op, form)


def values_by(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the saved values of captured rows."""
    return outcomes_by(
        lambda found: replace(found, values={name: change(value) for name, value in found.values.items()})
    )


def outcomes_by(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the outcomes that are made of templates."""
    filled = client_traces.Template.filled
    return lambda monkeypatch: monkeypatch.setattr(
        client_traces.Template, "filled", lambda self, planes: change(filled(self, planes))
    )


def adds(model):
    model.layers_output[2] += V


def adds_twice(model):
    model.layers_output[1] += V
    model.layers_output[2] += OTHER


def adds_at_a_position(model):
    model.layers_output[2][1] += V


def adds_at_the_last(model):
    model.layers_output[2][-1] += V


def adds_in_each_step(model, tracer):
    for _ in tracer.iter[:]:
        model.layers_output[2] += V


def adds_in_the_second_step(model, tracer):
    for step in tracer.iter[:]:
        if step == 1:
            model.layers_output[2] += V


def subtracts(model):
    model.layers_output[2] -= V


def subtracts_some(model):
    h = model.layers_output[2]
    model.layers_output[2] = torch.sub(h, V, alpha=3)


def projects_out(model):
    h = model.layers_output[2]
    model.layers_output[2] = h - (h @ UNIT)[:, None] * UNIT


def multiplies(model):
    model.layers_output[2] = torch.tanh(model.layers_output[2] @ MATRIX)


def divides(model):
    h = model.layers_output[2]
    model.layers_output[2] = torch.exp(h) / (1 + h.abs())


def normalizes(model):
    h = model.layers_output[2]
    model.layers_output[2] = h / h.norm(dim=-1, keepdim=True)


def softmaxes(model):
    h = model.layers_output[2]
    model.layers_output[2] = h.view(-1, 2, 4).softmax(-1).view(-1, 8)


def casts(model):
    h = model.layers_output[2]
    model.layers_output[2] = (h * 100).to(torch.int32).to(h.dtype)


def clamps(model):
    model.layers_output[2] = model.layers_output[2].clamp(min=0.1, max=0.5)


def sorts(model):
    model.layers_output[2] = model.layers_output[2].sort(-1, descending=True).values


def keeps_two(model, tracer):
    return [[model.layers_output[1][-1], model.layers_output[2][-1]] for _ in tracer.iter[:]]


def keeps_by_name(model, tracer):
    found = {"b": [], "a": []}
    for _ in tracer.iter[:]:
        found["b"].append(model.layers_output[1][-1])
        found["a"].append(model.layers_output[2][-1])
    return found


def keeps_a_tuple(model, tracer):
    return tuple([model.layers_output[1][-1] for _ in tracer.iter[:]])


def keeps_scores(model, tracer):
    return [model.layers_output[1][-1].float() @ V for _ in tracer.iter[:]]


def keeps_whole(model, tracer):
    return [model.layers_output[1] for _ in tracer.iter[:]]


def gives_a_number(model):
    model.layers_output[1] += V
    return {"a": 1, "b": [2, 3]}


def raises(model):
    h = model.layers_output[1]
    torch.index_add(torch.zeros(4), 0, h.argmax(-1) + 1000, torch.ones(len(h)))
    model.layers_output[2] += V


def never_raises(monkeypatch):
    monkeypatch.setattr("midstream.trace.stand_in.Notes._fit", lambda *given: True)
    monkeypatch.setattr(tiers, "_never_raises", lambda *given: True)


def no_reads(monkeypatch):
    """The tape does not capture one of the points that the code needs."""
    made = tiers._lowered

    def broken(*given):
        lowered = made(*given)
        lowered.reads.pop(("resid_post", 1), None)
        return lowered

    monkeypatch.setattr(tiers, "_lowered", broken)


def reads_behind(model):
    print("x")
    return model.layers_output[0], model.layers_output[1]


BROKEN = [
    Broken("a lost write", adds, edits_by(lambda edits: edits[1:])),
    Broken("one of two writes is lost", adds_twice, edits_by(lambda edits: edits[1:])),
    Broken("an extra write", adds, edits_by(lambda edits: [*edits, changed(edits[0], layers=(3,))])),
    Broken("a write twice", adds, edits_by(lambda edits: [*edits, *edits])),
    Broken("a write at another layer", adds, edits_by(lambda edits: [changed(edits[0], layers=(3,))])),
    Broken("a write at another site", adds, edits_by(lambda edits: [changed(edits[0], site="mlp_out")])),
    Broken("a write at another position", adds_at_a_position, edits_by(lambda e: [changed(e[0], positions=(2,))])),
    Broken("the first row for the last", adds_at_the_last, edits_by(lambda e: [changed(e[0], positions=(0,))])),
    Broken("all rows for one", adds_at_a_position, edits_by(lambda e: [changed(e[0], positions=None, phase="prefill")])),
    Broken("in generated tokens, too", adds, edits_by(lambda edits: [changed(edits[0], phase="both")])),
    Broken("in the prompt alone", adds_in_each_step, edits_by(lambda e: [changed(e[0], phase="prefill")])),
    Broken("in another step", adds_in_the_second_step, edits_by(lambda e: [changed(e[0], positions=(1,))])),
    Broken("another factor", adds, edits_by(lambda edits: [changed(edits[0], scale=-edits[0].scale)])),
    Broken("a small factor", adds, edits_by(lambda edits: [changed(edits[0], scale=edits[0].scale * 1.001)])),
    Broken("the sign of a difference", subtracts, rule("sub.Tensor", linear._add)),
    Broken("alpha left out", subtracts_some, rule("sub.Tensor", lambda x, y, alpha=1.0: linear._sub(x, y))),
    Broken("half of a projection", projects_out, rule("sub.Tensor", lambda x, y, alpha=1.0: linear._sub(x, y, 0.5))),
    Broken("swapped operands", divides, steps_by("div", swap)),
    Broken("a lost operation", multiplies, steps_by("tanh", first)),
    Broken("a transposed matrix", multiplies, steps_by("mm", constant(lambda each: each.T.contiguous()))),
    Broken("an old constant", multiplies, steps_by("mm", constant(lambda each: each * 0.5))),
    Broken("a dropped norm", normalizes, steps_by("div", first)),
    Broken("another axis", softmaxes, steps_by("_softmax", set_arg(1, 1))),
    Broken("a lost cast", casts, steps_by("_to_copy", first)),
    Broken("a bound left out", clamps, steps_by("clamp", set_arg(2, None))),
    Broken("another order", sorts, steps_by("sort", set_arg(2, False))),
    Broken("the order of a list", keeps_two, values_by(lambda value: [each[::-1] for each in value])),
    Broken("a list's length", keeps_two, values_by(lambda value: value[:-1])),
    Broken("a step's value for another's", keeps_two, values_by(lambda value: [value[0], *value[:-1]])),
    Broken("the order of keys", keeps_by_name, values_by(lambda value: dict(sorted(value.items())))),
    Broken("a lost key", keeps_by_name, values_by(lambda value: {"b": value["b"]})),
    Broken("values under other keys", keeps_by_name, values_by(lambda v: {"b": v["a"], "a": v["b"]})),
    Broken("a list for a tuple", keeps_a_tuple, values_by(list)),
    Broken("another dtype", keeps_scores, values_by(lambda value: [each.double() for each in value])),
    Broken("another shape", keeps_scores, values_by(lambda value: [each[None] for each in value])),
    Broken("other numbers", keeps_scores, values_by(lambda value: [each * 1.01 for each in value])),
    Broken("rows left out", keeps_whole, values_by(lambda value: [each[-1:] for each in value])),
    Broken("a number", gives_a_number, outcomes_by(lambda outcome: replace(outcome, values={RETURNED: {"a": 2, "b": [2, 3]}}))),
    Broken("a bool for a number", gives_a_number, outcomes_by(lambda o: replace(o, values={RETURNED: {"a": True, "b": [2, 3]}}))),
    Broken("no value", gives_a_number, outcomes_by(lambda outcome: replace(outcome, values={}))),
    Broken("a swallowed exception", raises, never_raises),
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_lowering_is_caught(broken, monkeypatch):
    whole = found(broken.body, steps=3, known=fresh())
    assert broken.body is raises or (
        whole.tier is not Tier.FORWARD and why_wrong(whole, broken.body, 3, LENGTH) is None
    )
    broken.breaks(monkeypatch)
    given = found(broken.body, steps=3, known=fresh())
    assert given.tier is Tier.FORWARD and not given.edits
    note = given.notes[-1]
    assert note.kind == "forward" and given.reason == f"line {note.line}: {note.text}"
    monkeypatch.setattr(tiers, "difference", lambda *given: None)
    given = found(broken.body, steps=3, known=fresh())
    assert given.tier is not Tier.FORWARD and why_wrong(given, broken.body, 3, LENGTH) is not None


def test_a_point_that_the_tape_does_not_capture_is_noticed(monkeypatch):
    assert found(reads_behind, known=fresh()).tier is Tier.BEHIND
    no_reads(monkeypatch)
    given = found(reads_behind, known=fresh())
    assert given.tier is Tier.FORWARD and "the tape does not" in given.reason


def adds_by_position(model):
    """The body depends on the prompt's length."""
    h = model.layers_output[2]
    h += V * torch.arange(1.0, len(h) + 1)[:, None]


def doubles_by_position(model):
    h = model.layers_output[2]
    model.layers_output[2] = h * torch.arange(1.0, len(h) + 1)[:, None] + 2 * h


def only_at(lengths, monkeypatch):
    """A fault in the tapes of prompts with these lengths: their edits are missing."""
    made = tiers._edits

    def edits(graphs, *given):
        found = list(made(graphs, *given))
        return iter([] if given[2] in lengths else found)

    monkeypatch.setattr(tiers, "_edits", edits)


def test_a_fault_for_one_token_alone_is_caught(monkeypatch):
    only_at([1], monkeypatch)
    for body in (adds, adds_by_position):
        assert found(body, length=1, known=fresh()).tier is Tier.FORWARD
        assert found(body, length=2, known=fresh()).tier is Tier.PLAN


@pytest.mark.parametrize("body", [clamps, adds_by_position, doubles_by_position], ids=lambda body: body.__name__)
@pytest.mark.parametrize("length", [2, 3, LENGTH, 9])
def test_a_fault_for_extreme_rows_alone_is_caught(body, length, monkeypatch):
    whole = found(body, length=length, known=fresh())
    assert whole.tier is Tier.PLAN
    real = validation.edited

    def fault(is_wrong):
        def edited(old_RW, *given):
            made_RW = real(old_RW, *given)
            return torch.where(is_wrong(old_RW.abs().amax(-1, keepdim=True)), made_RW + made_RW.abs() / 2, made_RW)

        monkeypatch.setattr(validation, "edited", edited)
        return found(body, length=length, known=fresh()).tier

    assert fault(lambda largest: largest > 1e3) is Tier.FORWARD
    assert fault(lambda largest: largest < 1e-20) is Tier.FORWARD
    assert fault(lambda largest: largest < 0) is Tier.PLAN


def test_each_row_is_plain_in_one_check_and_special_in_another():
    for tokens in (2, 5, 10):
        changed = []
        for special in validation._SPECIAL_ROWS:
            rows = torch.ones(tokens, WIDTH)
            special.put(rows)
            changed.append((rows != 1).any(-1))
        assert torch.equal(changed[0], ~changed[1])


def test_large_saved_numbers_do_not_hide_a_fault_in_others(monkeypatch):
    def norms(model):
        return model.layers_output[2].norm(dim=-1)

    def norms_and_a_factor(model):
        found = model.layers_output[1].norm(dim=-1)
        adds_by_position(model)
        return found

    for body in (norms, norms_and_a_factor):
        assert found(body, known=fresh()).tier is Tier.CLIENT
    values_by(lambda value: torch.where(value < 100, value * 1.0002, value))(monkeypatch)
    for body in (norms, norms_and_a_factor):
        assert found(body, known=fresh()).tier is Tier.FORWARD


@pytest.mark.parametrize("without", [(LENGTH,), (LENGTH + 5,), (LENGTH, LENGTH + 5)])
def test_the_requests_own_length_is_checked_where_others_have_no_tape(without, monkeypatch):
    made = TapedCode._made

    def lowered(self, recorded, request, length, steps):
        whole = made(self, recorded, request, length, steps)
        return replace(whole, tier=Tier.FORWARD, edits=()) if length in without else whole

    monkeypatch.setattr(TapedCode, "_made", lowered)
    assert found(adds, length=40, known=fresh()).tier is Tier.PLAN
    known = fresh()
    only_at([40], monkeypatch)
    assert found(adds, length=30, known=known).tier is Tier.PLAN  # the result is that of its own length
    assert found(adds, length=40, known=known).tier is Tier.FORWARD
    monkeypatch.setattr(tiers, "difference", lambda *given: validation.UNCHECKED)
    given = found(adds, length=40, known=fresh())
    assert given.tier is Tier.FORWARD and "cannot be checked" in given.reason


def test_explain_names_the_line_and_both_numbers(monkeypatch):
    edits_by(lambda edits: edits[1:])(monkeypatch)
    given = found(adds, known=fresh())
    line = adds.__code__.co_firstlineno + 1
    assert given.reason.startswith(f"line {line}: at resid_post[2], token 0 of step 0 the tape gives ")
    assert " where the code gives " in given.reason


class InBlock:
    """Stands for the model in a with-block."""

    def __midstream_reference__(self):
        return ("model",)


def test_a_container_in_two_places_is_one_object(monkeypatch):
    model: Any = InBlock()

    def block():
        with Trace(run=False) as trace:
            one = []
            one.append(model.layers_output[1][-1].save())
            other = one
            one.save()
            other.save()
        return BlockProgram(trace.block, {})

    given = found(block(), known=fresh())
    assert given.tier is Tier.CLIENT
    values_by(list)(monkeypatch)
    given = found(block(), known=fresh())
    assert given.tier is Tier.FORWARD and "the containers, texts and numbers that the tape saves" in given.reason


# The kinds that recordings have got wrong.


def test_an_axis_is_not_taken_for_another():
    def last_token(model):
        x = model.layers_output[2] + V[None, None]
        x[:, -1] *= 2
        model.layers_output[2] = x.view(-1, WIDTH)

    def first_token(model):
        x = model.layers_output[2][None] + V
        x[:, 0] = 0
        model.layers_output[2] = x[0]

    def mean(model):
        x = model.layers_output[2] + V[None, None]
        model.layers_output[2] = (x - x.mean(1, keepdim=True)).view(-1, WIDTH)

    def cumsum(model):
        x = model.layers_output[2] + V[None, None]
        model.layers_output[2] = x.cumsum(1).view(-1, WIDTH)

    def softmax(model):
        model.layers_output[2] = model.layers_output[2][None].softmax(1)[0]

    def flip(model):
        model.layers_output[2] = model.layers_output[2].unsqueeze(0).flip(1).squeeze(0)

    def topk(model):
        x = model.layers_output[2] * torch.ones(1, 1, WIDTH)
        model.layers_output[2] = (
            x - x.topk(1, dim=1).values.expand_as(x) if False else (x - x.amax(1, True)).view(-1, WIDTH)
        )

    def norm(model):
        x = model.layers_output[2][None, None]
        model.layers_output[2] = (x / x.norm(dim=2, keepdim=True))[0, 0]

    def transposed(model):
        x = model.layers_output[2].T.contiguous()
        x[-1] = 0
        model.layers_output[2] = x.T

    def kept_means(model):
        return (model.layers_output[2] + V[None, None]).mean(1)

    def kept_last(model, tracer):
        return [(model.layers_output[2] + V[None, None])[:, -1] for _ in tracer.iter[:]]

    right_or_forward(
        last_token, first_token, mean, cumsum, softmax, flip, topk, norm, transposed, kept_means, kept_last
    )


def test_steps_round_as_in_pytorch():
    def to_integers(model):
        model.layers_output[2] = (model.layers_output[2] + 12582912.0) - 12582912.0

    def in_place(model):
        h = model.layers_output[2]
        h += 1e8
        h -= 1e8

    def to_nothing(model):
        model.layers_output[2] = model.layers_output[2] * 1e-30 * 1e-30 * 1e30 * 1e30

    def to_infinity(model):
        model.layers_output[2] = model.layers_output[2] * 1e30 * 1e30 / 1e30 / 1e30

    def by_vectors(model):
        model.layers_output[2] = (model.layers_output[2] + 1e7 * V) - 1e7 * V

    def by_a_half(model):
        h = model.layers_output[2]
        model.layers_output[2] = h.half().to(h.dtype)

    def kept(model, tracer):
        return [(model.layers_output[2][-1] + 1e8) - 1e8 for _ in tracer.iter[:]]

    right_or_forward(to_integers, in_place, to_nothing, to_infinity, by_vectors, by_a_half, kept)


def large(rows: int = WIDTH) -> torch.Tensor:
    return torch.arange(float(rows << 15)).reshape(rows, -1) / 1e6  # 1 MiB


def test_a_large_constant_that_changes_has_its_new_numbers():
    def between_two_uses(model):
        big = BIG["a"].clone()
        x = model.layers_output[1] @ big
        big.mul_(2)
        model.layers_output[2] += (model.layers_output[2] @ big)[:, :WIDTH] + x[:, :WIDTH]

    def in_each_step(model, tracer):
        big = BIG["b"].clone()
        for _ in tracer.iter[:]:
            model.layers_output[2] += (model.layers_output[2] @ big)[:, :WIDTH]
            big *= 0.5

    def its_data(model):
        layer = torch.nn.Linear(1, 1)
        layer.weight.data = BIG["c"].T.clone()
        x = F.linear(model.layers_output[1], layer.weight)[:, :WIDTH]
        layer.weight.data.add_(1.0)
        model.layers_output[2] += F.linear(model.layers_output[2], layer.weight)[:, :WIDTH] + x

    def a_state_dict(model):
        layer = torch.nn.Linear(WIDTH, 1 << 15, bias=False)
        layer.load_state_dict({"weight": BIG["c"].T.clone()})
        x = layer(model.layers_output[1])[:, :WIDTH]
        layer.load_state_dict({"weight": BIG["c"].T * 3})
        model.layers_output[2] += layer(model.layers_output[2])[:, :WIDTH] + x

    def by_an_array(model):
        big = BIG["a"].clone()
        x = model.layers_output[1] @ big
        big.numpy()[:] = 1.0
        model.layers_output[2] += (model.layers_output[2] @ big)[:, :WIDTH] + x[:, :WIDTH]

    right_or_forward(between_two_uses, in_each_step, its_data, a_state_dict, by_an_array)


BIG = {name: large() for name in "abc"}

# Operations that raise an error on some numbers: h is [tokens, hidden], i are places that no tensor has, and x are integers.
RAISES = {
    "index_add": lambda h, i, x: torch.index_add(torch.zeros(4), 0, i, torch.ones(len(i))),
    "index_copy": lambda h, i, x: torch.index_copy(torch.zeros(4), 0, i, torch.ones(len(i))),
    "index_fill": lambda h, i, x: torch.zeros(4).index_fill(0, i, 1.0),
    "index_select": lambda h, i, x: torch.index_select(V, 0, i),
    "index_reduce": lambda h, i, x: torch.zeros(4).index_reduce(0, i, torch.ones(len(i)), "mean"),
    "gather": lambda h, i, x: torch.gather(V, 0, i),
    "take": lambda h, i, x: torch.take(V, i),
    "put": lambda h, i, x: torch.zeros(4).put(i, torch.ones(len(i))),
    "scatter": lambda h, i, x: torch.scatter(torch.zeros(4), 0, i, 1.0),
    "scatter_add": lambda h, i, x: torch.scatter_add(torch.zeros(4), 0, i, torch.ones(len(i))),
    "scatter_reduce": lambda h, i, x: torch.scatter_reduce(torch.zeros(4), 0, i, torch.ones(len(i)), "sum"),
    "advanced indexing": lambda h, i, x: V[i],
    "embedding": lambda h, i, x: F.embedding(i, MATRIX),
    "embedding_bag": lambda h, i, x: F.embedding_bag(i[None], MATRIX),
    "one_hot": lambda h, i, x: F.one_hot(i, 4),
    "cross_entropy": lambda h, i, x: F.cross_entropy(h, i),
    "nll_loss": lambda h, i, x: F.nll_loss(h, i),
    "multi_margin_loss": lambda h, i, x: F.multi_margin_loss(h, i),
    "binary_cross_entropy": lambda h, i, x: F.binary_cross_entropy(h.abs() + 2, torch.zeros_like(h)),
    "cholesky": lambda h, i, x: torch.linalg.cholesky(-(h.T @ h) - torch.eye(WIDTH)),
    "inv": lambda h, i, x: torch.linalg.inv(h.T @ h * 0),
    "solve": lambda h, i, x: torch.linalg.solve(h.T @ h * 0, V),
    "eigh of nan": lambda h, i, x: torch.linalg.eigh(h.T @ h * float("nan")),
    "svd of nan": lambda h, i, x: torch.linalg.svd(h * float("nan")),
    "division": lambda h, i, x: torch.div(x, x * 0, rounding_mode="floor"),
    "remainder": lambda h, i, x: torch.remainder(x, x * 0),
    "fmod": lambda h, i, x: torch.fmod(x, x * 0),
    "bincount": lambda h, i, x: torch.bincount(-i),
    "repeat_interleave": lambda h, i, x: torch.repeat_interleave(V[: len(i)], -i),
    "histc": lambda h, i, x: torch.histc(h * float("inf")),
    "assert": lambda h, i, x: torch._assert_async((h > 1e9).all()),
    "ldexp and item": lambda h, i, x: [1, 2][int(i[0])],
}


def caught(raises):
    def body(model):
        h = model.layers_output[2]
        i = h.argmax(-1) + 1000
        try:
            raises(h, i, i.int())
            k = 1
        except (IndexError, RuntimeError, ArithmeticError, ValueError):
            k = 10
        model.layers_output[2] = h + k * V

    return body


def uncaught(raises):
    def body(model):
        h = model.layers_output[2]
        i = h.argmax(-1) + 1000
        raises(h, i, i.int())
        model.layers_output[2] = h + V

    return body


def named_only(raises):
    """The code uses the result in nothing that is kept."""

    def body(model):
        h = model.layers_output[1]
        raises(h, h.argmax(-1) + 1000, h.int())
        return model.layers_output[2][-1]

    return body


@pytest.mark.parametrize("name", RAISES)
def test_what_raises_on_numbers_only_raises(name):
    for make in (caught, uncaught, named_only):
        body = make(RAISES[name])
        given = found(body, steps=3, known=fresh())
        _, _, error = plain(body, 3, LENGTH)
        if error is not None:  # the code itself has to run
            assert given.tier in (Tier.FORWARD, Tier.BEHIND), (name, make.__name__)
        right_or_forward(body)


def test_what_raises_on_the_cpu_and_not_on_shapes_alone():
    def tried(change):
        def body(model):
            h = model.layers_output[2]
            try:
                change(h)
                k = 1
            except Exception:
                k = 10
            model.layers_output[2] = h + k * V

        return body

    tries = [
        lambda h: torch.linalg.qr(h.half()),
        lambda h: torch.linalg.svd(h.bfloat16()),
        lambda h: torch.slice_scatter(h, torch.zeros(len(h), 3), 1, 0, 4),
        lambda h: torch.select_scatter(h, torch.zeros(len(h) + 1), 1, 0),
        lambda h: F.conv1d(h[None], torch.ones(1, len(h), 1), dilation=0),
        lambda h: F.conv1d(h[None], torch.ones(1, len(h), 1), stride=0),
        lambda h: F.max_pool1d(h[None], 2, dilation=0),
        lambda h: torch.fft.fft(h.bfloat16()),
        lambda h: torch.cumprod(h.bool(), 0),
        lambda h: torch.bitwise_and(h, h),
        lambda h: torch.lerp(h, h.double(), 0.5),
        lambda h: torch.tensor([h[0, 0], h[0, 1]]),
        lambda h: h.map_(V.expand_as(h).contiguous(), lambda a, b: a),
        lambda h: h.tensor_split(torch.tensor([2, 4]), 1),
        lambda h: torch.tensor_split(h, torch.tensor(2), 1)[0].shape[1] == 4 or 1 / 0,
        lambda h: h.new_tensor(h[0]),
        lambda h: torch.as_tensor(h[0, 0]),
        lambda h: torch.scalar_tensor(h[0, 0]),
        lambda h: torch.zeros(3).set_(h),
        lambda h: h.resize_(2, 2),
        lambda h: h.numpy(),
        lambda h: h.requires_grad_(),
        lambda h: torch.utils.dlpack.to_dlpack(h),
    ]
    right_or_forward(*map(tried, tries))


class Knows:
    def __init__(self) -> None:
        self.v = V

    def __call__(self, model):
        h = model.layers_output[2]
        model.layers_output[2] = h + (1 if type(h) is type(self.v) else 10) * V

    __name__ = "Knows"


def test_what_a_code_sees_of_a_value_is_what_it_sees_of_a_tensor():
    def seen(look):
        def body(model):
            h = model.layers_output[2]
            try:
                k = 10 if look(h) else 1
            except (TypeError, AttributeError, RuntimeError):
                k = 5
            model.layers_output[2] = h + k * V

        return body

    looks = [
        lambda h: hasattr(h, "meta"),
        lambda h: hasattr(h, "memory"),
        lambda h: hasattr(h, "chain"),
        lambda h: hasattr(h, "is_on_cpu"),
        lambda h: vars(h),
        lambda h: len(h.__dict__) > 0,
        lambda h: type(h) is type(V),
        lambda h: type(h).__mro__[1] is torch.Tensor,
        lambda h: h.__class__ is torch.Tensor,
        lambda h: object.__getattribute__(h, "__class__") is torch.Tensor,
        lambda h: isinstance(h, torch.nn.Parameter),
        lambda h: h.is_same_size(V),
        lambda h: h.is_same_size(torch.zeros(LENGTH, WIDTH)),
        lambda h: h.is_contiguous(),
        lambda h: h.is_leaf,
        lambda h: h.requires_grad,
        lambda h: h.is_inference(),
        lambda h: h.is_meta,
        lambda h: h.layout is torch.strided,
        lambda h: h._is_view(),
        lambda h: h._base is None,
        lambda h: h.dim() == 2,
        lambda h: h.is_signed(),
        lambda h: h.names,
        lambda h: torch.is_tensor(h),
        lambda h: torch.overrides.is_tensor_like(h),
        lambda h: torch.overrides.has_torch_function((h,)),
        lambda h: torch.overrides.is_tensor_method_or_property(type(h).add),
        lambda h: "meta" in dir(h),
        lambda h: getattr(h, "value", None),
        lambda h: torch.equal(torch.from_dlpack(h), torch.from_dlpack(h)),
        lambda h: torch.utils._python_dispatch.is_traceable_wrapper_subclass(h),
        lambda h: torch._C._dispatch_keys(h).has(torch._C.DispatchKey.Python),
        lambda h: torch._C._functorch.is_functorch_wrapped_tensor(h),
        lambda h: torch._C._len_torch_dispatch_stack() > 0,
        lambda h: torch._C._len_torch_function_stack() > 0,
        lambda h: torch.is_grad_enabled(),
        lambda h: h.untyped_storage().device.type == "meta",
        lambda h: torch.result_type(h, 1.0) == torch.float32,
        lambda h: h.element_size() == 4,
        lambda h: id(h) == id(h.detach()),
    ]
    right_or_forward(Knows(), *map(seen, looks))


def test_the_sign_of_zero_counts():
    def signs(model):
        h = model.layers_output[2]
        zero = (h - h) * -1
        model.layers_output[2] = h + torch.copysign(V, zero)

    def of_a_constant(model):
        model.layers_output[2] += torch.copysign(V, torch.tensor(-0.0))

    def divided(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.where(1 / (h * -0.0) < 0, h, 2 * h)

    def minus_zero(model):
        h = model.layers_output[2]
        x = h * 0 - 0.0
        model.layers_output[2] = h + torch.atan2(x, -torch.ones_like(h))

    right_or_forward(signs, of_a_constant, divided, minus_zero)


Pair = namedtuple("Pair", "a b")


def test_containers_come_back_as_the_code_has_left_them():
    def counter(model, tracer):
        kept = Counter()
        for step in tracer.iter[:]:
            kept[step] += 1
        return kept

    def counter_of_rows(model):
        return Counter({"a": model.layers_output[2][-1]})

    def deleted(model, tracer):
        kept = {}
        for step in tracer.iter[:]:
            kept[step] = model.layers_output[2][-1]
            kept.pop(step - 1, None)
        return kept

    def cleared(model, tracer):
        kept = {}
        for step in tracer.iter[:]:
            kept.clear()
            kept["b"], kept["a"] = model.layers_output[2][-1], step
        return kept

    def reordered(model, tracer):
        kept = {"a": None, "b": None}
        for _ in tracer.iter[:]:
            kept["a"] = kept.pop("a")
            kept["a"] = model.layers_output[2][-1]
        return kept

    def popped(model, tracer):
        kept = [0, 1]
        for _ in tracer.iter[:]:
            kept.insert(0, model.layers_output[2][-1])
            kept.pop()
        return kept

    def in_tuples(model, tracer):
        kept = ([], [])
        for _ in tracer.iter[:]:
            kept[0].append(model.layers_output[2][-1])
            kept[1].append(len(kept[0]))
        return kept

    def user_dict(model):
        return UserDict(a=model.layers_output[2][-1])

    def default_dict(model, tracer):
        kept = defaultdict(list)
        for _ in tracer.iter[:]:
            kept["x"].append(model.layers_output[2][-1])
        return kept

    def a_deque(model, tracer):
        kept = deque(maxlen=2)
        for _ in tracer.iter[:]:
            kept.append(model.layers_output[2][-1])
        return kept

    def a_pair(model):
        return Pair(model.layers_output[1][-1], 2)

    def a_bound_method(model, tracer):
        kept = []
        keep = kept.append
        for _ in tracer.iter[:]:
            keep(model.layers_output[2][-1])
        return kept

    def generator(model, tracer):
        return list(model.layers_output[2][-1] for _ in tracer.iter[:])

    def a_set(model):
        model.layers_output[2] += V
        return {3, 1, 2}, frozenset("ab"), range(3), b"x", 1j, float("nan"), -0.0

    right_or_forward(
        counter, counter_of_rows, deleted, cleared, reordered, popped, in_tuples, user_dict, default_dict, a_deque, a_pair,
        a_bound_method, generator, a_set,
    )  # fmt: skip


# Typical bodies.


def test_typical_bodies_keep_their_tier():
    def save_one(model):
        return model.layers_output[2][-1]

    def sae(model, tracer):
        for _ in tracer.iter[:]:
            h = model.layers_output[2]
            z = torch.relu(h @ MATRIX - OTHER)
            model.layers_output[2] = h + z @ MATRIX.T

    def reads_all(model):
        return [model.layers_output[i] for i in range(4)]

    def looks_at_logits(model):
        model.layers_output[2] += V
        return model.logits.argmax(-1)

    def half(model, tracer):
        for _ in tracer.iter[:]:
            model.layers_output[2][:] = 0.5 * model.layers_output[2]

    tiers_of = {
        Tier.PLAN: [adds, adds_twice, adds_at_a_position, adds_at_the_last, adds_in_each_step, adds_in_the_second_step,
                    projects_out, multiplies, normalizes, softmaxes, clamps, sae, half, gives_a_number],
        Tier.CLIENT: [save_one, keeps_two, keeps_by_name, keeps_a_tuple, keeps_scores, keeps_whole],
        Tier.BEHIND: [reads_all, looks_at_logits, reads_behind],
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        known = replace(fresh(), dtype=dtype)
        for tier, bodies in tiers_of.items():
            for body in bodies:
                if dtype is torch.float32 or body in (adds_in_each_step, save_one, keeps_two, reads_all, clamps, half):
                    given = found(body, steps=64, length=40, known=known)
                    assert given.tier is tier, (body.__name__, dtype, given.tier, given.reason)


def test_a_gpus_code_sees_a_gpu():
    def on_the_gpu(model):
        h = model.layers_output[2]
        mine = h.cpu().device.type == "cpu" and not h.cpu().is_cuda and h.cpu().to("cuda").is_cuda
        h += (1 if h.is_cuda and h.device.index == 0 and (h * 2).is_cuda and mine else 10) * V.to(h.device)

    def steers(model):
        h = model.layers_output[2]
        h += (1 if h.is_cuda and h.device.index == 0 and h.cpu().device.type == "cpu" else 10) * V.to(h.device)

    def a_tensor_of_its_own(model):
        h = model.layers_output[2]
        mine = (
            torch.zeros(1, device=h.device).is_cuda and not torch.zeros(1).is_cuda and not torch.zeros(1).to(h).is_cpu
        )
        h += (1 if mine else 10) * V.to(h.device)

    known = replace(fresh(), device=torch.device("cuda:0"))
    for body in (on_the_gpu, steers, a_tensor_of_its_own):
        given = found(body, known=known)
        assert given.tier is Tier.FORWARD or torch.equal(torch.tensor(given.edits[0].vector.data), V)
    assert found(steers, known=known).tier is Tier.PLAN


def test_the_caller_sees_nothing_of_the_check(capsys):
    def prints(model):
        print("once")
        return model.layers_output[1] + torch.rand(1) if False else model.layers_output[1]

    state, numbers = torch.get_rng_state(), random.getstate()
    assert found(prints, known=fresh()).tier is Tier.BEHIND
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == numbers
