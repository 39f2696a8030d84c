"""Bodies of issue 36: each group, the part of a name before `__`, is a row of its table, and each body a spelling.

`test_recorded_bodies.py` runs each as a function and as a with-block, so each ends with its only `return`.
"""

# ruff: noqa: B006, B015, E731

import contextlib
import operator

import numpy as np
import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


D, W = normal(1, 256), normal(2, 256)
GLOBAL = normal(3, 256)


def add(m, layer=3, v=D):
    m.layers_output[layer] += v


def unit_(v):
    v /= v.norm()


def bound_(v):
    v.clamp_(-0.5, 0.5)


def halve_(v):
    v[:128] = 0


def unit_global():
    global GLOBAL
    GLOBAL /= GLOBAL.norm()


def grow_global():
    GLOBAL[:] *= 5


def replace_global():
    global GLOBAL
    GLOBAL = -GLOBAL


# A write that Python does not come to is not made.


def not_reached__and(model, tracer):
    flag = False
    flag and model.steer([3], D)
    return model.layers_output[5]


def not_reached__or(model, tracer):
    x = "something"
    x or add(model)
    return model.layers_output[5]


def not_reached__conditional_expression(model, tracer):
    flag = False
    model.steer([3], D) if flag else None
    return model.layers_output[5]


def not_reached__conditional_expression_on_a_value(model, tracer):
    model.steer([3], D) if model.layers_output[2][-1].norm() > 1e9 else None
    return model.layers_output[5]


def not_reached__chained_comparison(model, tracer):
    3 < 2 < (add(model) or 5)
    return model.layers_output[5]


def not_reached__assert_message(model, tracer):
    ok = True
    assert ok, model.steer([3], D)
    return model.layers_output[5]


def not_reached__all(model, tracer):
    all(layer > 1 and (add(model, layer), True)[1] for layer in (0, 3))
    return model.layers_output[5]


def not_reached__dict_get(model, tracer):
    {"a": lambda: add(model)}.get("b", lambda: None)()
    return model.layers_output[5]


def not_reached__empty_loop(model, tracer):
    for layer in range(3, 3):
        add(model, layer)
    return model.layers_output[5]


def reached__and(model, tracer):
    flag = True
    flag and model.steer([3], D)
    return model.layers_output[5]


def reached__or(model, tracer):
    x = ""
    x or add(model)
    return model.layers_output[5]


def reached__chained_comparison(model, tracer):
    1 < 2 < (add(model) or 5)
    return model.layers_output[5]


def reached__conditional_expression_on_a_value(model, tracer):
    model.steer([3], D) if model.layers_output[2][-1].norm() > 1e-9 else None
    return model.layers_output[5]


# A vector that was changed in place is written as it is then.


def changed_in_place__helper(model, tracer):
    d = D.clone()
    unit_(d)
    model.layers_output[3] += d
    return d, model.layers_output[5]


def changed_in_place__callers_vector(model, tracer):
    unit_(D)
    model.layers_output[3] += D
    return D, model.layers_output[5]


def changed_in_place__clamp(model, tracer):
    bound_(D)
    model.layers_output[3] += D
    return model.layers_output[5]


def changed_in_place__slice(model, tracer):
    d = D.clone()
    halve_(d)
    model.layers_output[3] += d
    return model.layers_output[5]


def changed_in_place__without_a_helper(model, tracer):
    d = D.clone()
    d[:128] = 0
    d.clamp_(-0.5, 0.5)
    model.layers_output[3] += d
    return model.layers_output[5]


def changed_in_place__view(model, tracer):
    d = D.clone()
    d.view(2, 128)[1].mul_(3)
    model.layers_output[3] += d
    return model.layers_output[5]


def changed_in_place__numpy_view(model, tracer):
    d = D.clone()
    d.numpy()[::2] = 0
    model.layers_output[3] += d
    return model.layers_output[5]


def changed_in_place__out(model, tracer):
    d = D.clone()
    torch.mul(d, -2, out=d)
    model.layers_output[3] += d
    return model.layers_output[5]


def changed_in_place__global(model, tracer):
    unit_global()
    model.layers_output[3] += 9 * GLOBAL
    return GLOBAL, model.layers_output[5]


def changed_in_place__global_by_slice(model, tracer):
    grow_global()
    model.layers_output[3] += GLOBAL
    return model.layers_output[5]


def changed_in_place__replaced_global(model, tracer):
    replace_global()
    model.layers_output[3] += GLOBAL
    return GLOBAL, model.layers_output[5]


# Vectors in tuples are the same vectors.


def changed_in_tuples__pairs(model, tracer):
    d = D.clone()
    places = ((2, d), (4, -d))
    for _, v in places:
        v *= 10
    for layer, v in places:
        model.layers_output[layer] += v
    return model.layers_output[5]


def changed_in_tuples__zip(model, tracer):
    places = tuple(zip((2, 4), (D.clone(), W.clone()), strict=True))
    for _, v in places:
        v *= 10
    for layer, v in places:
        model.layers_output[layer] += v
    return model.layers_output[5]


def changed_in_tuples__enumerate(model, tracer):
    vectors = (D.clone(), W.clone())
    for i, v in enumerate(vectors):
        v *= 5 - 3 * i
    for i, v in enumerate(vectors):
        model.layers_output[2 + 2 * i] += v
    return model.layers_output[5]


def changed_in_tuples__one_vector_twice(model, tracer):
    v = D.clone()
    same = (v, v)
    same[0].neg_()
    model.layers_output[2] += same[1]
    return model.layers_output[5], same


def changed_in_tuples__dict_items(model, tracer):
    vectors = {2: D.clone(), 4: W.clone()}
    for layer, v in vectors.items():
        v[layer:] = 0.5
    for layer in vectors:
        model.layers_output[layer] -= vectors[layer]
    return model.layers_output[5]


# What a comprehension or a generator does stays done.


def effects_of_comprehensions__walrus(model, tracer):
    s = 0.1
    schedule = [s := s * 3 for _ in range(3)]
    model.layers_output[3] += s * D
    return schedule, s, model.layers_output[5]


def effects_of_comprehensions__pop(model, tracer):
    todo = [D, W, D + W]
    taken = [todo.pop() for _ in range(2)]
    model.layers_output[3] += todo[-1] + len(todo)
    return len(taken), model.layers_output[5]


def effects_of_comprehensions__append(model, tracer):
    ws = [D]
    [ws.append(x) for x in (W, -2 * D)]
    for layer, w in zip(range(2, 8), ws, strict=False):
        model.layers_output[layer] += w
    return len(ws), model.layers_output[5]


def effects_of_comprehensions__any_with_walrus(model, tracer):
    best = 0
    any((best := layer) > 3 for layer in (1, 4, 6))
    model.layers_output[best] += D
    return best, model.layers_output[6]


def effects_of_comprehensions__any_with_walrus_as_scale(model, tracer):
    best = 0
    any((best := k) > 3 for k in (1, 4, 6))
    scale = best
    model.layers_output[3] += scale * D
    return model.layers_output[5]


def effects_of_comprehensions__in_place(model, tracer):
    h = model.layers_output[3]
    [h[i].mul_(0) for i in range(2)]
    return model.layers_output[5]


def effects_of_comprehensions__next(model, tracer):
    numbers = iter(range(1, 9))
    any(n == 3 for n in numbers)
    model.layers_output[3] += next(numbers) * D
    return model.layers_output[5]


# Changes through defaults and bound methods.


def defaults_and_bound_methods__default(model, tracer):
    v = D.clone()

    def grow(v=v):
        v *= 4

    grow()
    model.layers_output[3] += v
    return model.layers_output[5]


def defaults_and_bound_methods__lambda_with_default(model, tracer):
    v = D.clone()
    scale = lambda x, v=v: v.mul_(x)
    scale(-3)
    model.layers_output[3] += v
    return model.layers_output[5]


def defaults_and_bound_methods__bound_method(model, tracer):
    v = D.clone()
    grow = v.mul_
    grow(4)
    model.layers_output[3] += v
    return model.layers_output[5]


def defaults_and_bound_methods__methodcaller(model, tracer):
    h = model.layers_output[3]
    list(map(operator.methodcaller("mul_", 0.1), [h]))
    return model.layers_output[5]


def defaults_and_bound_methods__list_default(model, tracer):
    def count(seen=[]):
        seen.append(1)
        return len(seen)

    count(), count()
    model.layers_output[3] += count() * D
    return count(), model.layers_output[5]


# A manager may swallow the exception that ends its block.


def swallowed__assert_raises(model, tracer):
    with np.testing.assert_raises(ValueError):
        raise ValueError
        model.steer([3], D)
    return model.layers_output[5]


def swallowed__suppress(model, tracer):
    with contextlib.suppress(KeyError):
        {}["missing"]
        model.steer([3], D)
    return model.layers_output[5]


def swallowed__try(model, tracer):
    try:
        [][0]
        model.steer([3], D)
    except IndexError:
        pass
    return model.layers_output[5]


# A tensor that replaces a value is the value.


def replaced_and_changed__assigned(model, tracer):
    h = model.layers_output[3] * 1
    model.layers_output[3] = h
    h += D
    return model.layers_output[5]


def replaced_and_changed__constant(model, tracer):
    h = torch.zeros_like(model.layers_output[3])
    model.layers_output[3] = h
    h += D
    h[-1] *= 2
    return model.layers_output[5]


def replaced_and_changed__earlier_value(model, tracer):
    h = model.layers_output[2]
    model.layers_output[3] = h
    h += D
    return model.layers_output[5]


def replaced_and_changed__view(model, tracer):
    h = model.layers_output[3] + 0
    model.layers_output[3] = h[:]
    h.mul_(0.5)
    return model.layers_output[5]


def replaced_and_changed__module(model, tracer):
    mlp = model.model.layers[3].mlp
    h = mlp.output * 0.5
    mlp.output = h
    h -= D
    return model.layers_output[5]


def replaced_and_changed__read_again(model, tracer):
    h = model.layers_output[3] * 1
    model.layers_output[3] = h
    h += D
    return model.layers_output[3], model.layers_output[5]
