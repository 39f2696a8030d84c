"""Bodies with functions of functools, operator and itertools, decorators and evaluated code."""

import contextvars
import functools
import itertools
import operator

import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)


def partial_keeps_its_arguments(model, tracer):
    def write(m, v, layer, scale=1.0):
        m.layers_output[layer] += scale * v

    v = V.clone()
    write_v = functools.partial(write, model, v, scale=2.0)
    v.neg_()
    write_v(2)
    write_v(3, scale=0.5)
    return write_v.keywords, model.layers_output[5]


def reduce_over_layers(model, tracer):
    def write(total, layer):
        model.layers_output[layer] += total * V
        return total + layer

    return functools.reduce(write, (1, 2, 4), 0.5), model.layers_output[5]


def reduce_in_place(model, tracer):
    total = functools.reduce(operator.iadd, [V, W, V], torch.zeros(256))
    model.layers_output[3] += total
    return model.layers_output[5]


@functools.cache
def cached_scale(n):
    CALLS.append(n)
    return n if n < 2 else cached_scale(n - 1) + cached_scale(n - 2)


CALLS = []


def a_global_cache(model, tracer):
    model.layers_output[3] += cached_scale(5) * 0.1 * V
    return CALLS, cached_scale(6), model.layers_output[5]


def a_local_cache(model, tracer):
    @functools.cache
    def grown(layer):
        v = V.clone()
        v *= layer
        return v

    grown(2).neg_()
    model.layers_output[2] += grown(2)
    model.layers_output[3] += grown(3)
    return grown.cache_info().hits, model.layers_output[5]


@functools.singledispatch
def write(what, model):
    model.steer([1], V)


@write.register
def _(what: int, model):
    model.steer([what], V, 0.5)


@write.register(list)
def _(what, model):
    for each in what:
        write(each, model)


def single_dispatch(model, tracer):
    write("else", model)
    write([2, 3], model)
    return model.layers_output[5]


def doubled(fn):
    @functools.wraps(fn)
    def twice(*args, **kwargs):
        return fn(*args, **kwargs) * 2

    return twice


@doubled
def vector(k):
    return k * V


def a_decorator(model, tracer):
    model.layers_output[3] += vector(0.5) + vector.__wrapped__(1)
    return vector.__name__, model.layers_output[5]


def getters_of_operator(model, tracer):
    tasks = [{"layer": 3, "v": W}, {"layer": 1, "v": V}]
    for task in sorted(tasks, key=operator.itemgetter("layer")):
        model.layers_output[task["layer"]] += operator.itemgetter("v")(task)
    norm = operator.methodcaller("norm", dim=-1)
    return norm(model.layers_output[4]), operator.attrgetter("shape")(V)


def maps_and_filters_are_lazy(model, tracer):
    v, seen = V.clone(), []
    scaled = map(lambda k: seen.append(k) or v.mul_(k), (2, 3))
    kept = filter(lambda layer: layer % 2, range(1, 6))
    model.layers_output[next(kept)] += v
    next(scaled)
    model.layers_output[next(kept)] += v
    return seen, [*kept], model.layers_output[5]


def itertools_over_layers(model, tracer):
    scales = itertools.accumulate((0.1, 0.2, 0.4))
    for layer, scale in zip(itertools.islice(itertools.count(1), 3), scales, strict=False):
        model.layers_output[layer] += scale * V
    for a, b in itertools.pairwise((4, 5, 6)):
        model.layers_output[a] -= 0.1 * b * W
    groups = {k: [*g] for k, g in itertools.groupby((1, 1, 2), key=lambda x: x > 1)}
    return groups, model.layers_output[6]


def itertools_with_effects(model, tracer):
    layers = iter((1, 2, 3, 4))
    first = [*itertools.takewhile(lambda layer: layer < 2, layers)]
    a, b = itertools.tee(layers)
    for layer in itertools.chain(a, *[[5]]):
        model.layers_output[layer] += V
    vectors = itertools.cycle((V, W))
    next(vectors)
    model.layers_output[6] += next(vectors)
    return first, [*b], model.layers_output[7]


def a_context_variable(model, tracer):
    scale = contextvars.ContextVar("scale", default=1.0)
    token = scale.set(3.0)
    model.layers_output[2] += scale.get() * V
    scale.reset(token)
    model.layers_output[3] += scale.get() * V
    return model.layers_output[5]


def evaluated_text(model, tracer):
    names = {"model": model, "V": V}
    exec("model.layers_output[3] += 2 * V", names)
    scale = eval("1 + 1")
    getattr(model, "layers_" + "output")[4] -= scale * V
    return scale, model.layers_output[5]


def sorted_by_a_key_with_effects(model, tracer):
    calls = []
    order = sorted((3, 1, 2), key=lambda layer: calls.append(layer) or layer)
    for layer in order:
        model.layers_output[layer] += calls.index(layer) * V
    return calls, max(order, default=0), model.layers_output[5]
