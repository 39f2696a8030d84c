"""Bodies whose control flow is hard to follow without running it: exceptions, managers, generators, loops, match statements."""

# ruff: noqa: B012, B015, SIM107

import contextlib
import itertools

import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)


class OwnError(Exception):
    pass


def check(x, message):
    if not x:
        raise OwnError(message)
    return x


def else_runs_without_an_error(model, tracer):
    try:
        scale = float("2")
    except ValueError:
        model.layers_output[2] += 5 * V
    else:
        model.layers_output[2] += scale * V
    finally:
        model.layers_output[3] -= V
    return model.layers_output[5]


def a_helpers_error_ends_the_block(model, tracer):
    done = []
    try:
        done.append("before")
        check(len(done) > 1, "too few")
        model.layers_output[2] += V
        done.append("after")
    except OwnError as error:
        done.append(str(error))
        model.layers_output[3] += V
    return done, model.layers_output[5]


def finally_replaces_the_return(model, tracer):
    def layer():
        try:
            return 2
        finally:
            return 4

    model.layers_output[layer()] += V
    return layer(), model.layers_output[5]


def an_error_in_the_middle_of_a_loop(model, tracer):
    written = []
    for layer in (1, 3, 4):
        try:
            scale = {1: 2.0, 4: -1.0}[layer]
            model.layers_output[layer] += scale * V
        except KeyError:
            continue
        finally:
            written.append(layer)
        written.append(scale)
    return written, model.layers_output[5]


def raised_from_another(model, tracer):
    def inner():
        try:
            [].pop()
        except IndexError as error:
            raise OwnError("empty") from error

    try:
        inner()
    except OwnError as error:
        cause = type(error.__cause__).__name__
        model.layers_output[3] += len(cause) * 0.1 * V
    return cause, model.layers_output[5]


def raised_again(model, tracer):
    seen = []
    try:
        try:
            raise KeyError("a")
        except KeyError:
            seen.append(1)
            raise
    except LookupError as error:
        seen.append(type(error).__name__)
        model.steer([2], V, 0.5)
    return seen, model.layers_output[4]


def exception_group(model, tracer):
    try:
        raise ExceptionGroup("several", [ValueError(2), TypeError("x"), ValueError(3)])
    except* ValueError as group:
        layers = [error.args[0] for error in group.exceptions]
    except* TypeError:
        pass
    for layer in layers:
        model.layers_output[layer] += V
    return model.layers_output[5]


def an_error_of_torchs_is_caught(model, tracer):
    h = model.layers_output[3]
    try:
        h += torch.ones(7)
    except RuntimeError:
        h -= V
    return model.layers_output[5]


def an_assertion_is_caught(model, tracer):
    try:
        assert model.num_layers == 3, "not three layers"
        model.layers_output[2] += V
    except AssertionError as error:
        model.layers_output[3] += len(str(error)) * 0.1 * W
    return model.layers_output[5]


def stop_iteration_is_caught(model, tracer):
    layers = iter((1, 3))
    while True:
        try:
            layer = next(layers)
        except StopIteration:
            break
        model.layers_output[layer] += V
    return model.layers_output[5]


def a_manager_changes_a_vector_around_its_block(model, tracer):
    v = V.clone()

    @contextlib.contextmanager
    def doubled(x):
        x *= 2
        yield x
        x /= 4

    with doubled(v) as big:
        model.layers_output[2] += big
    model.layers_output[3] += v
    return v, model.layers_output[5]


class Swallows:
    def __init__(self, kind, log):
        self.kind, self.log = kind, log

    def __enter__(self):
        self.log.append("in")
        return self.log

    def __exit__(self, kind, error, tb):
        self.log.append(kind.__name__ if kind else "out")
        return kind is self.kind


def an_own_manager_swallows(model, tracer):
    log = []
    with Swallows(ZeroDivisionError, log):
        log.append(1 / 0)
        model.layers_output[2] += V
    with Swallows(ZeroDivisionError, log) as same:
        model.layers_output[3] += len(same) * V
    return log, model.layers_output[5]


def an_own_manager_does_not_swallow_other_errors(model, tracer):
    log = []
    try:
        with Swallows(ZeroDivisionError, log):
            raise OwnError
    except OwnError:
        model.layers_output[3] += len(log) * V
    return log, model.layers_output[5]


def a_manager_swallows_what_the_model_raises(model, tracer):
    late = model.layers_output[4]
    with contextlib.suppress(Exception):
        model.layers_output[1] += 100 * V
        late += V
    return late, model.layers_output[5]


def exit_stack_runs_callbacks_backwards(model, tracer):
    v = V.clone()
    with contextlib.ExitStack() as stack:
        stack.callback(v.add_, 1)
        stack.callback(v.mul_, 3)
        model.layers_output[2] += v
    model.layers_output[3] += v
    return model.layers_output[5]


def nullcontext_gives_its_value(model, tracer):
    with contextlib.nullcontext(V.clone()) as v, contextlib.nullcontext(2) as k:
        v *= k
        model.layers_output[k] += v
    return model.layers_output[5]


def a_generator_is_sent_scales(model, tracer):
    def scales():
        total = 0.0
        while True:
            given = yield total * V
            total += given

    running = scales()
    next(running)
    for layer, given in ((1, 0.5), (3, 2.0), (4, -1.0)):
        model.layers_output[layer] += running.send(given)
    return model.layers_output[5]


def a_generator_yields_from_others_and_returns(model, tracer):
    def some(layers):
        yield from layers
        return sum(layers)

    def every():
        total = yield from some((1, 2))
        yield total + 1

    for layer in every():
        model.layers_output[layer] += V
    return [*every()], model.layers_output[5]


def a_generator_that_is_not_run_does_nothing(model, tracer):
    unused = (model.steer([2], V) for _ in range(3))
    used = (model.steer([3], V) for _ in range(3))
    next(used)
    del unused
    return model.layers_output[5]


def a_generator_is_closed(model, tracer):
    log = []

    def layers():
        try:
            yield 2
            yield 3
        finally:
            log.append("closed")

    running = layers()
    model.layers_output[next(running)] += V
    running.close()
    model.layers_output[4] += len(log) * W
    return log, model.layers_output[5]


def an_error_is_thrown_into_a_generator(model, tracer):
    def layers():
        try:
            yield 2
        except OwnError:
            yield 4

    running = layers()
    next(running)
    model.layers_output[running.throw(OwnError())] += V
    return model.layers_output[5]


def a_generator_reads_the_model(model, tracer):
    def rows(layers):
        for layer in layers:
            h = model.layers_output[layer]
            h *= 0.9
            yield h[-1]

    return [*rows((1, 3, 5))], model.layers_output[6]


def loops_with_else(model, tracer):
    n = 0
    while n < 3:
        n += 1
        if n == 5:
            break
    else:
        model.layers_output[2] += n * V
    for layer in range(8):
        if layer == 3:
            break
    else:
        model.layers_output[3] += 9 * V
    model.layers_output[layer + 1] += W
    return model.layers_output[5]


def break_and_continue(model, tracer):
    for layer in itertools.count(1):
        if layer % 2:
            continue
        if layer > 4:
            break
        model.layers_output[layer] += V
    return layer, model.layers_output[5]


def match_on_shapes_of_data(model, tracer):
    for task in (("add", 1, V), {"kind": "scale", "layer": 2, "by": 0.5}, ["set", 3], 4, "rest"):
        match task:
            case ("add", layer, v):
                model.layers_output[layer] += v
            case {"kind": "scale", "layer": layer, **rest}:
                model.layers_output[layer] *= rest["by"]
            case ["set", layer]:
                model.layers_output[layer][-1] = W
            case int(layer) if layer > 3:
                model.layers_output[layer] -= V
            case _:
                last = task
    return last, model.layers_output[5]


def walrus_in_a_condition(model, tracer):
    layers = [1, 2, 3]
    while (layer := layers.pop(0)) < 3 and (double := layer * 2):
        model.layers_output[layer] += double * V
    return layer, double, layers, model.layers_output[5]


def a_value_decides(model, tracer):
    h = model.layers_output[2]
    if h[-1].max() > h[0].max():
        model.layers_output[3] += V
    else:
        model.layers_output[3] -= V
    return model.layers_output[5]


def a_value_ends_a_loop(model, tracer):
    for layer in range(1, 7):
        h = model.layers_output[layer]
        if h.norm() > 60 and layer > 2:
            break
        h *= 2
    return layer, model.layers_output[7]


def a_values_number_is_the_layer(model, tracer):
    layer = 4 + int(model.layers_output[2].abs().argmax()) % 2
    model.layers_output[layer] += V
    return layer, model.layers_output[6]


def recursion(model, tracer):
    def down(layer, v):
        if layer > 5:
            return 0
        model.layers_output[layer] += v
        return 1 + down(layer + 2, v * 0.5)

    return down(1, 2 * V), model.layers_output[6]


def comparisons_stop_at_the_first_false(model, tracer):
    seen = []

    def number(x):
        seen.append(x)
        return x

    number(1) < number(3) < number(2) < number(4)
    model.layers_output[len(seen)] += V
    return seen, model.layers_output[5]


def arguments_are_evaluated_in_order(model, tracer):
    v = V.clone()

    def first(a, b, *, c):
        return a + b + c

    total = first(v * 1, v.mul_(2), c=v.add_(1))
    model.layers_output[3] += 0.1 * total
    return model.layers_output[5]


def own_error_at_the_end(model, tracer):
    model.layers_output[3] += V
    check(False, "own: not today")


def out_of_order(model, tracer):
    late = model.layers_output[4]
    return late, model.layers_output[1]


def read_after_the_end(model, tracer):
    for _ in tracer.iter[:]:
        model.layers_output[2] += V
    return model.layers_output[3]
