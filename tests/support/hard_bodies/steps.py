"""Bodies that go through the steps of a generation, keep state from step to step, and read or change logits and tokens."""

# ruff: noqa: B007

import collections
import functools
import itertools

import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)


def every_step(model, tracer):
    found = []
    for step in tracer.iter[:]:
        model.layers_output[2] += V
        found.append(model.layers_output[4])
    return found


def all_steps(model, tracer):
    return [(step, model.layers_output[3][-1], model.samples.item()) for step in tracer.all()]


def the_vector_grows_with_the_step(model, tracer):
    v, found = V.clone(), []
    for step in tracer.iter[:]:
        model.layers_output[2] += step * v
        v *= 2
        found.append(model.layers_output[4][-1])
    return found, v


def a_counter_beside_the_steps(model, tracer):
    n, found = 0, []
    for _ in tracer.iter[:]:
        n += 1
        if n % 2 == 0:
            model.layers_output[3] -= n * V
        found.append(model.layers_output[5].sum(-1))
    return n, found


def enumerated_steps(model, tracer):
    found = {}
    for i, step in enumerate(tracer.iter[1:], start=10):
        model.layers_output[2] += 0.1 * i * V
        found[step, i] = model.layers_output[3]
    return found


def chosen_steps(model, tracer):
    found = []
    for step in tracer.iter[[0, 2]]:
        model.layers_output[2] *= 1 + step
        found.append(model.layers_output[3])
    return found


def one_step_by_number(model, tracer):
    for step in tracer.iter[1]:
        model.layers_output[2] += V
    return step, model.layers_output[3]


def steps_with_a_stride(model, tracer):
    found = []
    for step in tracer.iter[::2]:
        model.layers_output[2] += V
        found.append((step, model.layers_output[3][0]))
    return found


def a_loop_ends_early(model, tracer):
    for step in tracer.iter[:]:
        model.layers_output[2] += V
        if step == 1:
            break
    return step, model.layers_output[4]


def the_prompt_and_then_the_steps(model, tracer):
    first = model.layers_output[2].mean(0)
    found = []
    for step in tracer.iter[1:]:
        model.layers_output[3] += first
        found.append(model.layers_output[4])
    return first, found


def a_value_of_the_step_before(model, tracer):
    before, found = None, []
    for _ in tracer.iter[:]:
        h = model.layers_output[2]
        if before is not None:
            h += 0.5 * before
        before = h[-1].clone()
        found.append(model.layers_output[4][-1])
    return found


def a_running_mean(model, tracer):
    total, n = torch.zeros(256), 0
    for _ in tracer.iter[:]:
        h = model.layers_output[3]
        total += h.sum(0)
        n += len(h)
        h -= total / n
    return n, total


def next_step(model, tracer):
    first = model.layers_output[2]
    step = tracer.next()
    model.layers_output[2] += V
    return step, first, model.layers_output[2]


def steps_zipped_with_vectors(model, tracer):
    for v, step in zip((V, W, V + W), tracer.iter[:], strict=False):
        model.layers_output[2] += v
    return model.samples


def next_of_the_steps(model, tracer):
    steps = tracer.iter[:]
    next(steps)
    model.layers_output[2] += V
    next(steps)
    return model.layers_output[2]


def a_generator_over_steps(model, tracer):
    def rows():
        for step in tracer.iter[:]:
            yield model.layers_output[3][-1] * (step + 1)

    return [*rows()]


def a_schedule_is_used_up(model, tracer):
    schedule, found = [3.0, -1.0], []
    for _ in tracer.iter[:]:
        model.layers_output[2] += (schedule.pop(0) if schedule else 0.5) * V
        found.append(model.layers_output[3][-1])
    return schedule, found


def a_cycle_of_vectors(model, tracer):
    vectors, found = itertools.cycle((V, -W)), []
    for _ in tracer.iter[:]:
        model.layers_output[2] += next(vectors)
        found.append(model.logits.max())
    return found


def an_object_counts_steps(model, tracer):
    class Steering:
        def __init__(self):
            self.calls = 0

        def __call__(self):
            self.calls += 1
            return self.calls * V if self.calls > 1 else 0 * V

    steering, found = Steering(), []
    for _ in tracer.iter[:]:
        model.layers_output[3] += steering()
        found.append(model.layers_output[5][-1])
    return steering.calls, found


def an_error_in_a_later_step_is_caught(model, tracer):
    found, scales = [], {0: 1.0, 2: 2.0}
    for step in tracer.iter[:]:
        try:
            model.layers_output[2] += scales[step] * V
        except KeyError:
            model.layers_output[3] -= V
        found.append(model.layers_output[4][-1])
    return found


def own_error_in_a_later_step(model, tracer):
    for step in tracer.iter[:]:
        model.layers_output[2] += V
        if step == 1:
            raise LookupError("own: second step")


def stopped_in_the_second_step(model, tracer):
    for step in tracer.iter[:]:
        model.layers_output[2] += V
        if step == 1:
            tracer.stop()


def layers_within_steps(model, tracer):
    found = collections.defaultdict(list)
    for step in tracer.iter[:]:
        for layer in (1, 4):
            model.layers_output[layer] += V / (1 + layer + step)
            found[layer].append(model.layers_output[layer][-1])
    return found


def steps_within_a_helper(model, tracer):
    def steer(m, t, v, until=2):
        for step in t.iter[:until]:
            m.layers_output[3] += v
        return step

    return steer(model, tracer, V), model.samples


def several_accessors(model, tracer):
    found = []
    for _ in tracer.iter[:]:
        model.layers_input[2] += V
        model.attentions_output[2] *= 0.5
        model.mlps_output[2][:, 5] = 3
        found.append(model.layers_output[2])
    return found


def slices_and_negative_layers(model, tracer):
    early = [h.norm(dim=-1) for h in model.layers_output[1:4]]
    model.layers_output[-2] += V
    return early, model.layers_output[-1], len(model.layers_output)


def every_layer(model, tracer):
    norms = []
    for h in model.layers_output:
        h *= 1.01
        norms.append(h.norm(dim=-1))
    return norms


def logits_are_changed(model, tracer):
    tokens = []
    for step in tracer.iter[:]:
        model.logits[:, 100 + step] += 1000
        tokens.append(model.samples.item())
    return tokens


def logits_are_replaced(model, tracer):
    model.logits = torch.where(model.logits > 5, model.logits, -100.0)
    return model.logits, model.samples.tolist()


def probabilities(model, tracer):
    p = model.next_token_probs
    model.logits *= 0.5
    return p, model.next_token_probs.max()


def the_token_is_changed(model, tracer):
    model.samples[:] = 42
    tokens = [model.samples.item()]
    for _ in tracer.iter[1:]:
        tokens.append(model.samples.item())
    return tokens


def the_token_decides_the_next_step(model, tracer):
    scale, found = 0.0, []
    for _ in tracer.iter[:]:
        model.layers_output[3] += scale * V
        found.append(model.logits)
        scale = (model.samples.item() % 7) * 0.3
    return scale, found


def greedy_by_hand(model, tracer):
    tokens = []
    for _ in tracer.iter[:]:
        second = model.logits.topk(2).indices[0, 1]
        model.samples[:] = second
        tokens.append(int(model.samples))
    return tokens


def logit_lens(model, tracer):
    return [model.project_on_vocab(model.layers_output[layer][-1:]).argmax(-1) for layer in (2, 4, 6)]


def steering_of_layers(model, tracer):
    tokens = []
    for _ in tracer.iter[:]:
        model.steer([4, 2], V, factor=-0.5)
        tokens.append(model.samples)
    return tokens


def steering_of_a_position(model, tracer):
    model.steer(2, V, factor=3, positions=-1)
    model.steer(3, W, positions=slice(0, 2))
    return model.layers_output[4]


def a_partial_over_steps(model, tracer):
    def write(v, step, layer):
        model.layers_output[layer] += (step + 1) * v

    found = []
    for step in tracer.iter[:]:
        here = functools.partial(write, V, step)
        [*map(here, (1, 3))]
        found.append(model.logits)
    return found


def modules_own_values(model, tracer):
    mlp, found = model.model.layers[3].mlp, []
    for _ in tracer.iter[:]:
        mlp.input *= 0.5
        mlp.output = torch.tanh(mlp.output)
        model.model.layers[4].output[0][:] += V
        found.append(model.layers_output[5])
    return found
