"""What ends the recording of a body, and what is said of it (rows L1, L2). A body whose recording ends runs in the forward.

`checked` runs bodies on plain numbers, too: see `support/recorded.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import decimal
import io
import json
import math
import os
import struct
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded import LENGTH, WIDTH, V, captured, checked, found, in_forward, lowered, plain, planned, said, steer

import midstream
from midstream.lowering.tiers import Tier
from midstream.trace import stand_in
from midstream.trace.code import RETURNED
from midstream.trace.stand_in import Ended

# Numbers that only the forward has.


def test_a_number_of_the_forward_that_is_used_ends_the_recording():
    def truth(model):
        if model.layers_output[1].norm() > 3:
            model.layers_output[2] += V

    def short_circuit(model):
        model.layers_output[1].norm() > 1e9 and model.steer(2, V)

    def asserted(model):
        assert (model.layers_output[1] < 1e9).all()
        model.layers_output[2] += V

    def as_float(model):
        model.layers_output[2] += float(model.layers_output[1].norm()) * V

    def as_int(model):
        k = int(model.layers_output[0].norm()) % 2 + 1
        model.layers_output[k] += V

    def as_complex(model):
        complex(model.layers_output[1].norm())

    def as_range(model):
        for _ in range(model.layers_output[1].argmax()):
            model.layers_output[2] += V

    def as_array(model):
        return np.linalg.norm(model.layers_output[1].numpy())

    def as_array_by_numpy(model):
        return np.asarray(model.layers_output[1]).sum(), np.float32(model.layers_output[1].norm())

    def printed(model):
        print(model.layers_output[1])

    def formatted(model):
        return f"{model.layers_output[1].norm():.2f}"

    def as_text(model):
        return str(model.layers_output[1][0, 0])

    def equal(model):
        return torch.equal(model.layers_output[1], torch.zeros(LENGTH, WIDTH))

    def close(model):
        return torch.allclose(model.layers_output[1], torch.zeros(LENGTH, WIDTH))

    def member(model):
        return 3.0 in model.layers_output[1]

    def as_index(model):
        h = model.layers_output[1]
        model.layers_output[2] += torch.eye(WIDTH)[h[0].argmax()]

    def places(model):
        h = model.layers_output[1]
        return h[h > 0]

    def nonzero(model):
        return (model.layers_output[1] > 0).nonzero()

    def unique(model):
        return model.layers_output[1].round().unique()

    def largest(model):
        return max(model.layers_output[1][0])

    def in_order(model):
        return sorted(range(LENGTH), key=lambda i: model.layers_output[1][i].norm())

    def in_a_tensor(model):
        return torch.tensor([model.layers_output[1].norm(), 1.0])

    def pickled(model):
        return len(json.dumps(model.layers_output[1].tolist()))

    def memory(model):
        return model.layers_output[1].data_ptr()

    def saved(model):
        torch.save(model.layers_output[1], io.BytesIO())

    def of_the_logits(model):
        if model.logits.argmax() == 3:
            model.logits[:, 0] = 0

    for body in [body for body in locals().values() if callable(body)]:
        given = found(body)
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__
        line = body.__code__.co_firstlineno
        assert any(given.reason.startswith(f"line {line + i}: ") for i in range(1, 4)), (body.__name__, given.reason)


def test_a_number_that_is_kept_does_not_end_the_recording():
    def kept(model, tracer):
        out = []
        for _ in tracer.iter[:]:
            model.layers_output[2] += V
            out.append(model.layers_output[2].norm().item())
        return out

    def token(model, tracer):
        return [model.samples.item() for _ in tracer.iter[:]]

    def listed(model):
        return model.layers_output[1].tolist()

    def summed(model, tracer):
        total = 0.0
        for _ in tracer.iter[:]:
            total += 2 * model.layers_output[1].norm().item() - 1
        return -total

    def not_used(model):
        n = model.layers_output[1].norm().item()
        model.layers_output[2] += V if n is not None and isinstance(n, float) else -V

    for body, edits in {
        kept: [steer(V, where="both")],
        token: [],
        listed: [],
        summed: [],
        not_used: [steer(V)],
    }.items():
        given = checked(body)
        assert given.tier in (Tier.BEHIND, Tier.PLAN) and said(given) == edits, body.__name__
    assert found(kept).tier is Tier.BEHIND


def test_a_kept_number_that_is_looked_at_ends_the_recording():
    looks = [
        lambda n: n > 3, lambda n: n == 3, lambda n: bool(n), lambda n: [V][n], lambda n: {n: 1}, lambda n: f"{n:.3f}",
        str, repr, int, float, round, math.sqrt, hash, print, divmod, lambda n: n**2, lambda n: n / 2, lambda n: 1 / n, lambda n: n // 2,
        lambda n: n % 2, lambda n: min(n, 0.0), lambda n: sorted([n, 1.0]), lambda n: n in (1.0, 2.0), lambda n: math.isnan(n),
        lambda n: n.is_integer(), lambda n: struct.pack("f", n), lambda n: copy.deepcopy(n), lambda n: n * V, lambda n: V + n,
    ]  # fmt: skip
    for look in looks:

        def body(model, look=look):
            n = model.layers_output[1].norm().item()
            look(*[n] * (2 if look is divmod else 1))
            model.layers_output[2] += V

        given = found(body)
        assert given.tier is Tier.FORWARD and not given.edits, body.__code__.co_firstlineno


@pytest.mark.parametrize(
    "ask",
    [
        lambda n, h: np.asarray(n).dtype.kind == "f",
        lambda n, h: np.array([n, 1.0]).dtype == object,
        lambda n, h: np.array(h[-1].tolist()).dtype == np.float64,
        lambda n, h: hasattr(n, "__dict__"),
        lambda n, h: n + 10**400,
    ],
    ids=["array", "array of a list", "array of numbers", "attributes", "too large"],
)
def test_code_cannot_tell_a_number_from_one_that_it_has(ask):
    def body(model):
        h = model.layers_output[1]
        try:
            yes = ask(h[-1].norm().item(), h)
        except OverflowError:
            yes = False
        model.layers_output[2] += V if yes else 2 * V

    checked(body)


USES = {
    "tensor": lambda n: torch.tensor([n] * WIDTH),
    "full": lambda n: torch.full((WIDTH,), n),
    "clamp": lambda n: V.clamp(max=n),
    "assigned": lambda n: V.clone().__setitem__(0, n),
    "array": lambda n: torch.from_numpy(np.array([n] * WIDTH)),
    "json": lambda n: json.dumps([n]),
    "decimal": lambda n: decimal.Decimal(n),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_a_kept_number_that_the_body_would_not_see_fail(use):
    use_it = USES[use]

    def body(model):
        n = model.layers_output[1].norm().item()
        try:
            use_it(n)
        except Exception:
            model.layers_output[2] += V

    checked(body)


def test_code_cannot_tell_by_a_type_that_it_is_recorded():
    class Meta(type):
        made = 0

        def __new__(cls, *given):
            cls.made += 1
            return type.__new__(cls, *given)

    def of_a_number(model):
        if type(model.layers_output[1].norm().item()) is float:
            model.layers_output[2] += V

    def of_a_token(model, tracer):
        if type(model.samples.item()) is not int:
            tracer.stop()

    def of_a_value(model):
        if type(model.layers_output[2]) is torch.Tensor:
            model.layers_output[2] += V

    def of_a_value_by_name(model):
        if {torch.Tensor: 1}[type(model.layers_output[2])] and type(model.layers_output[2]).__name__ == "Tensor":
            model.layers_output[2] += V

    def mapped(model):
        if [*map(type, [model.layers_output[2], 1])] == [torch.Tensor, int]:
            model.layers_output[2] += V

    def of_other_things(model):
        made = Meta("Made", (), {"v": V})
        other = type("Other", (made,), {})
        if isinstance(made, type) and type(made) is Meta and issubclass(other, made) and int is int and Meta.made:
            model.layers_output[2] += other().v

    for body in (of_a_number, of_a_value, of_a_value_by_name, mapped, of_other_things):
        assert said(planned(body)[0]) == [steer(V)], body.__name__
    assert not checked(of_a_token).recordings[0].outcome.stopped


@pytest.mark.parametrize("what", ["class", "None", "text"])
def test_code_cannot_tell_otherwise_that_it_is_recorded(what):
    def by_class_of_a_value(model):
        if model.layers_output[2].__class__ is torch.Tensor:
            model.layers_output[2] += V

    def by_an_error_with_none(model):
        total = None
        try:
            total += model.layers_output[1].norm().item()
        except TypeError:
            model.layers_output[2] += V

    def by_an_error_with_text(model):
        try:
            "norm: " + model.layers_output[1].norm().item()
        except TypeError:
            model.layers_output[2] += V

    checked({"class": by_class_of_a_value, "None": by_an_error_with_none, "text": by_an_error_with_text}[what])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_value_that_is_rounded_is_not_the_same(dtype):
    def body(model):
        h = model.layers_output[2]
        model.layers_output[2] = h.to(dtype).to(h.dtype)

    checked(body)


def test_a_tensor_that_is_changed_by_what_overlaps_with_it_stays_in_the_forward():
    """PyTorch raises an error, or does not say what comes out."""

    def neighbours(model):
        h = model.layers_output[1]
        h[1:] += h[:-1]

    def moved(model):
        model.layers_output[1][:-1] = model.layers_output[1][1:]

    def whole_rows(model):
        h = model.layers_output[1].clone()
        h.view(-1)[1:] += h.view(-1)[:-1]
        model.layers_output[1][:] = h

    def only_row(model, tracer):
        for _ in tracer.iter[:]:
            h = model.layers_output[1]
            h[:1] += h[-1]

    in_forward(neighbours, moved, whole_rows, only_row)


def test_what_only_the_cpu_refuses_in_a_late_step_is_noticed():
    """Seen wrong while eight steps were checked at most."""

    def body(model, tracer):
        for step in tracer.iter[:]:
            h = model.layers_output[1]
            if step == 20:
                try:
                    torch.nn.functional.conv1d(h[None], torch.ones(1, 1, 1), dilation=0)
                    h += V
                except RuntimeError:
                    h += 10 * V

    given = found(body, steps=40)
    assert given.tier is Tier.FORWARD and "of step 20 the tape gives" in given.reason


def test_a_tensor_that_is_changed_by_another_part_of_it_or_all_of_it():
    def rows(model):
        h = model.layers_output[1]
        h[0] += h[-1]

    def columns(model):
        h = model.layers_output[1]
        h[:, 3] = h[:, 5]
        h[:, :2] += h[:, 4:6]

    def whole(model):
        h = model.layers_output[1]
        h += h
        h[:-1].mul_(h[:-1])

    assert checked(columns).tier is checked(whole).tier is Tier.PLAN
    in_forward(rows, why="tokens")


def test_a_tensor_that_is_indexed_by_what_it_changes_ends_the_recording():
    """Elementwise operations may read all that they change, and others not."""
    places = torch.arange(WIDTH).flip(0)

    def permuted(model):
        h = model.layers_output[1]
        h[:, places] = h

    def scattered(model):
        h = model.layers_output[1]
        h.scatter_(1, places.expand(h.shape[0], WIDTH), h)

    in_forward(permuted, scattered)


def test_shapes_and_dtypes_of_views_and_of_tensors_that_change_their_shape():
    """Seen failing where shapes were remembered for views, and for operations in place."""
    narrow = torch.ones(WIDTH, 2)

    def viewed(model):
        h = model.layers_output[2]
        model.layers_output[2] = h + V * (2 if h.view(torch.int32).is_floating_point() else 1)

    def row_by_matrix(model):
        y = model.layers_output[2][-1] @ narrow
        model.layers_output[2] += y.ndim * V

    def squeezed(model):
        y = model.layers_output[2][-1:].clone().squeeze_(0)
        model.layers_output[2] += y.ndim * V

    for body in (viewed, row_by_matrix, squeezed):
        assert said(checked(body)) == [steer(V)], body.__name__


def test_an_error_that_depends_on_the_dtype_ends_the_recording():
    def softmax(model):
        model.layers_output[2].long().softmax(-1)
        model.layers_output[2] += V

    def subtracted(model):
        with contextlib.suppress(RuntimeError):
            1 - (model.layers_output[2] > 0)
            model.layers_output[2] += V

    in_forward(softmax, subtracted)


def test_numbers_that_differ_in_the_sign_of_zero_are_two():
    def divided(model, tracer):
        z = 0.0
        for _ in tracer.iter[:]:
            model.layers_output[2] = model.layers_output[2].abs() / z
            z = -z

    def signed(model, tracer):
        z = torch.zeros(())
        for _ in tracer.iter[:]:
            model.layers_output[2] = torch.copysign(model.layers_output[2], z)
            z = -z

    for body in (divided, signed):
        checked(body)


def test_whether_two_parts_overlap_may_depend_on_the_length():
    """Recorded for 5 and for many tokens, the two parts are the same, or have nothing in common; with 7 they overlap."""

    def ends(model):
        h = model.layers_output[1]
        h[:5] += h[-5:]

    for length in (100, 7, 5):
        assert checked(ends, length=length).tier is Tier.FORWARD


def test_an_index_that_the_forward_has_may_raise_so_writes_stay_in_the_forward():
    table, narrow = torch.eye(WIDTH), torch.eye(WIDTH - 1)

    def reads(model):
        return narrow.index_select(0, model.layers_output[1].argmax(-1))  # code may catch the error and write

    def writes(model):
        table.index_select(0, model.layers_output[1].argmax(-1) + 100)
        model.layers_output[2] += V

    def of_all_numbers(model):
        return table.index_select(0, model.layers_output[1].argmax()[None])

    def changed_in_place(model):
        places = model.layers_output[1].argmax(-1)
        places += 1
        return table.index_select(0, places)

    def scattered(model):
        h = model.layers_output[1]
        h.scatter_(1, h.long(), 0.0)

    def of_other_tokens(model):
        h = model.layers_output[1]
        return table[h.argmax(0)]  # right for up to eight tokens

    in_forward(reads, writes, of_all_numbers, changed_in_place, scattered, why="raises an error depends on the values")
    assert found(of_other_tokens, length=WIDTH).tier is Tier.BEHIND
    assert found(of_other_tokens, length=WIDTH + 1).tier is Tier.FORWARD


def test_places_of_the_largest_numbers_are_known_to_lie_in_the_tensor():
    table = torch.eye(WIDTH)

    def reads(model):
        return table.index_select(0, model.layers_output[1].argmax(-1))

    def kept(model):
        h = model.layers_output[1]
        return h.gather(-1, h.topk(3, -1).indices), h.gather(1, h.sort(dim=1, descending=True)[1][:, :2].flip(1))

    assert checked(reads).tier is not Tier.FORWARD
    assert checked(kept).tier is not Tier.FORWARD


def test_top_k_of_an_sae_is_a_plan():
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(WIDTH, 24, generator=generator), torch.randn(24, WIDTH, generator=generator)
    spread = [
        lambda f, best: torch.zeros_like(f).scatter_(-1, best.indices, best.values),
        lambda f, best: torch.zeros_like(f).scatter(-1, best.indices, best.values.relu()),
        lambda f, best: torch.scatter(f.new_zeros(f.shape), -1, best.indices, best.values),
        lambda f, best: torch.zeros_like(f).scatter_add_(-1, best.indices, best.values),
        lambda f, best: f * torch.zeros_like(f).scatter_(-1, best.indices, 1.0),
        lambda f, best: torch.where(torch.zeros_like(f, dtype=torch.bool).scatter_(-1, best.indices, True), f, 0),
    ]
    for scatter in spread:
        for activation in (torch.relu, lambda f: f):

            def body(model, tracer, scatter=scatter, activation=activation):
                for _ in tracer.iter[:]:
                    f = activation(model.layers_output[2] @ up)
                    model.layers_output[2] = scatter(f, f.topk(4, dim=-1)) @ down

            def last(model, scatter=scatter, activation=activation):
                f = activation(model.layers_output[2][-1] @ up)
                model.layers_output[2][-1] += scatter(f, f.topk(4, dim=-1)) @ down

            planned(body, last)


def test_numbers_for_the_prompts_positions_are_a_plan_and_raise_as_in_pytorch_for_another_length():
    factors, mask = torch.linspace(0.5, 2, LENGTH), torch.arange(LENGTH) % 2 == 0

    def scaled(model):
        h = model.layers_output[2]
        h *= factors[:, None]

    def masked(model):
        model.layers_output[2][mask] += V

    def chosen(model):
        h = model.layers_output[2]
        model.layers_output[2] = torch.where(mask[:, None], h.tanh(), h)

    def by_turns(model):
        h = model.layers_output[2]
        h[::2] += V
        h[1::2] -= V

    planned(scaled, masked, chosen, by_turns)
    for body in (scaled, masked, chosen):
        given = lowered([[body], [body]], [LENGTH, LENGTH + 2], [1, 1])
        assert [one.tier for one in given] == [Tier.PLAN, Tier.FORWARD]
        assert "Error" in given[1].reason  # PyTorch's
        _, _, error = plain(body, 1, LENGTH + 2)
        assert error is not None
    for length in (1, 2, 6, 40):
        assert checked(by_turns, length=length).tier is Tier.PLAN


def test_attention_without_dropout_draws_no_random_numbers():
    def attended(model):
        h = model.layers_output[1].view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True)

    def with_dropout(model):
        h = model.layers_output[1].view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)

    assert checked(attended).tier is Tier.BEHIND
    in_forward(with_dropout, why="it draws random numbers")


def test_an_error_that_depends_on_values_is_caught():
    table = torch.eye(WIDTH)

    def body(model):
        try:
            table.index_select(0, model.layers_output[1][0].argmax()[None] + 100)
        except IndexError:
            model.layers_output[2] += V

    checked(body)


# A swallowed end still counts.


def test_code_that_swallows_the_end_runs_in_the_forward(monkeypatch):
    def bare_except(model):
        try:
            is_large = bool(model.layers_output[1].norm() > 3)
        except:  # noqa: E722
            is_large = True
        if is_large:
            model.layers_output[2] += V

    def base_exception(model):
        try:
            model.layers_output[1].numpy()
        except BaseException:
            print("caught")
        model.layers_output[2] += V

    def returned_in_finally(model):
        try:
            float(model.layers_output[1].norm())
        finally:
            return model.layers_output[2]  # noqa: B012

    def suppressed(model):
        with contextlib.suppress(BaseException):
            print(model.layers_output[1])
        model.layers_output[2] += V

    def by_a_manager(model):
        class Swallows:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                return True

        with Swallows():
            open(os.devnull).close()
        return 1

    def in_a_generator(model):
        def values():
            try:
                yield model.layers_output[1].numpy()
            except BaseException:
                yield 3

        return list(values())

    def in_del(model):
        class Looks:
            def __del__(self):
                float(value.norm())

        value = model.layers_output[1]
        looks = Looks()
        del looks
        return 1

    def raised_as_another(model):
        try:
            float(model.layers_output[1].norm())
        except BaseException as error:
            raise ValueError from error

    bodies = [body for body in locals().values() if callable(body)]
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's reports the error in __del__
    for body in bodies:
        given = found(body)
        line = body.__code__.co_firstlineno
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__
        assert int(given.reason.split()[1].rstrip(":")) > line, given.reason


def test_what_a_body_does_after_a_swallowed_number_still_ends_before_it_acts(tmp_path):
    path = str(tmp_path / "made")

    def body(model):
        try:
            float(model.layers_output[1].norm())
        finally:
            open(path, "w").close()

    in_forward(body)
    assert not os.path.exists(path)


@pytest.mark.parametrize("how", ["except", "finally"])
def test_what_a_body_does_after_a_swallowed_call_still_ends_before_it_acts(tmp_path, how):
    path = str(tmp_path / "made")

    def caught(model):
        with contextlib.suppress(BaseException):
            time.sleep(0)
        open(path, "w").close()

    def at_last(model):
        try:
            time.time()
        finally:
            open(path, "w").close()

    assert found({"except": caught, "finally": at_last}[how]).tier is Tier.FORWARD
    assert not os.path.exists(path)


# Errors.


def test_a_body_that_raises_runs_in_the_forward_which_has_the_error():
    def own(model):
        model.layers_output[2] += V
        raise ValueError("own")

    def later(model, tracer):
        for step in tracer.iter[:]:
            if step == 2:
                raise ValueError("own")
            model.layers_output[2] += V

    def of_pytorch(model):
        model.layers_output[2] += torch.ones(3)

    def of_another_shape(model):
        model.layers_output[2] = torch.ones(1, 1, WIDTH)

    def of_no_tensor(model):
        model.layers_output[2] = "text"

    def a_layer_that_is_not_there(model):
        model.layers_output[9]

    def a_site_that_is_not_there(model):
        model.layers_outputs[2]

    def a_row_that_is_not_there(model):
        model.layers_output[2][LENGTH] += V

    def rows_that_are_not_there(model):
        model.layers_output[2][[0, LENGTH]] += V

    def a_nan(model):
        model.layers_output[2] += float("nan")

    def an_error_of_pytorchs_that_is_caught(model):
        try:
            model.layers_output[2] += torch.ones(3)
        except RuntimeError:
            model.layers_output[2] += V

    def a_step_after_the_last(model, tracer):
        tracer.next(9)

    bodies = [body for body in locals().values() if callable(body)]
    for body in bodies:
        given = found(body)
        line = body.__code__.co_firstlineno
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__
        assert line < int(given.reason.split()[1].rstrip(":")) < line + 6, (body.__name__, given.reason)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, BaseException])
def test_errors_that_are_no_exceptions_do_not_reach_the_caller(kind):
    def body(model):
        raise kind

    try:
        assert found(body).tier is Tier.FORWARD
    except BaseException as error:
        raise AssertionError("it reached the caller") from error


def test_a_body_that_computes_too_much_is_not_recorded_to_its_end(monkeypatch):
    def body(model):
        while True:
            model.layers_output[2] += V

    monkeypatch.setattr(stand_in, "_MOST_VALUES", 1000)
    given = found(body)
    assert given.tier is Tier.FORWARD and "too much" in given.reason


def test_recursion_that_is_too_deep_is_an_error_like_any_other():
    def caught(model):
        def deeper(n):
            return deeper(n + 1)

        try:
            deeper(0)
        except RecursionError:
            model.layers_output[2] += V

    assert said(planned(caught)[0]) == [steer(V)]


def test_a_value_that_is_used_after_the_recording_says_so():
    def body(model):
        return model.layers_output[2]

    with pytest.raises(Ended):
        found(body).recordings[0].outcome.values[RETURNED] + 1


# What is said of it.


def test_notes_say_what_becomes_of_each_line():
    def decides(model):
        if model.layers_output[1].norm() > 3:
            model.layers_output[2] += V

    def adds(model):
        h = model.layers_output[1] * 2
        model.layers_output[2] += V
        return h

    def looks_later(model):
        h = model.layers_output[1]
        if h.norm() > 3:
            return 1

    given, first = found(decides), decides.__code__.co_firstlineno
    assert [(note.line - first, note.kind) for note in given.notes] == [(1, "read"), (1, "forward")]
    assert given.reason.startswith(f"line {first + 1}: ")
    given, first = found(adds), adds.__code__.co_firstlineno
    assert [(note.line - first, note.kind) for note in given.notes] == [(1, "read"), (2, "edit")]
    assert "resid_post[2]" in given.notes[-1].text
    assert found(looks_later).reason.startswith(f"line {looks_later.__code__.co_firstlineno + 2}: ")


def test_sites_outside_of_the_graphs_stay_in_the_forward():
    from recorded import model as made

    def reads(model):
        return model.mlps_output[1]

    def caches(model, tracer):
        return tracer.cache(modules=[model.model.layers[1].mlp])

    for body in (reads, caches):
        assert found(body).reason is None
        assert (
            "mlp_out is not among the engine's graph_sites: resid_post"
            in found(body, known=made(sites=["resid_post"])).reason
        )


def test_values_after_the_forward_are_written_behind_the_step():
    def biased(model, tracer):
        for _ in tracer.iter[:]:
            model.logits[:, 3] = -1e9

    def forced(model):
        model.samples[:] = 3

    for body in (biased, forced):
        given = found(body)
        assert given.tier is Tier.BEHIND and not given.edits and not captured(given)


# The tracer and the model's modules.


def test_a_cache_of_sites_is_captured_in_every_step():
    def some(model, tracer):
        return tracer.cache(modules=[layer.mlp for layer in model.model.layers[:2]])

    def with_a_path(model, tracer):
        return tracer.cache([model.model.layers[0].mlp, "model.layers.1.self_attn"], dtype=torch.float64)

    def beside_writes(model, tracer):
        cache = tracer.cache(modules=[model.model.layers[1].mlp])
        model.layers_output[2] += V
        return cache

    expected = {
        some: {("mlp_out", 0): ["all"], ("mlp_out", 1): ["all"]},
        with_a_path: {("mlp_out", 0): ["all"], ("attn_out", 1): ["all"]},
        beside_writes: {("mlp_out", 1): ["all"], ("resid_post", 2): ["all_prompt"]},
    }
    for body, rows in expected.items():
        given = found(body)
        assert given.tier is Tier.BEHIND and captured(given) == rows, body.__name__


def test_a_cache_that_is_looked_at_and_what_is_not_a_sites_value_stay_in_the_forward():
    def all_modules(model, tracer):
        return tracer.cache()

    def layers(model, tracer):
        return tracer.cache(modules=[model.model.layers[1]])

    def its_length(model, tracer):
        cache = tracer.cache(modules=[model.model.layers[1].mlp])
        model.layers_output[2] += len(cache) * V

    def its_truth(model, tracer):
        cache = tracer.cache(modules=[model.model.layers[1].mlp])
        model.layers_output[2] += V if cache else -V

    def its_items(model, tracer):
        cache = tracer.cache(modules=[model.model.layers[1].mlp])
        model.layers_output[2] += V if {**cache} or [*cache] else -V

    def a_module(model):
        model.model.layers[2].mlp.down_proj.output += V

    def all_inputs(model):
        return model.model.layers[2].mlp.inputs

    def a_weight(model):
        return model.lm_head.weight

    def applied(model):
        return model.lm_head(model.layers_output[2])

    def skipped(model):
        model.model.layers[2].mlp.skip(V)

    def source(model):
        return model.model.layers[1].mlp.source

    def attached(model):
        model.model.layers[1].probe = torch.nn.Identity()

    def embeddings(model):
        return model.token_embeddings

    def another_invokes(model, tracer):
        tracer.barrier(2)

    for body in [body for body in locals().values() if callable(body)]:
        given = found(body)
        assert given.tier is Tier.FORWARD and not given.edits, body.__name__


def test_norms_and_the_unembedding_are_computed_behind_the_step():
    def body(model):
        h = model.layers_output[2]
        return model.model.norm(h).shape, model.project_on_vocab(h)

    given = found(body)
    assert given.tier is Tier.BEHIND and captured(given) == {("resid_post", 2): ["all_prompt"]}


def test_a_request_that_is_stopped_needs_its_code():
    def stops(model, tracer):
        for step in tracer.iter[:]:
            model.layers_output[2] += V
            if step == 1:
                tracer.stop()

    def at_once(model, tracer):
        model.layers_output[2] += V
        tracer.stop()

    def wants_the_result(model, tracer):
        model.layers_output[2] += V
        return tracer.result.outputs[0].text

    for body, where in {stops: "both", at_once: "prefill", wants_the_result: "prefill"}.items():
        given = found(body)
        assert given.tier is Tier.BEHIND and said(given) == [steer(V, where=where)], body.__name__


def test_save_may_be_used_by_the_packages_name_or_another():
    def by_name(model):
        return midstream.save(model.layers_output[2] * 2)

    def by_another_name(model):
        m, out = midstream, []
        for layer in range(2):
            out.append(m.save(model.layers_output[layer] * 2))
        return out

    assert set(checked(by_name).reads) == {("resid_post", 2)}
    assert set(checked(by_another_name).reads) == {("resid_post", 0), ("resid_post", 1)}


def test_a_function_whose_file_was_edited_or_that_has_no_source_is_run_as_it_is(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("def body(model):\n    model.layers_output[1] += 1\n")
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    path.write_text("def body(model):\n    model.layers_output[2] += 7\n")
    assert said(found(names["body"])) == [steer(torch.ones(WIDTH), 1)]
