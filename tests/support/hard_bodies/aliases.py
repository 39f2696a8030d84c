"""Bodies that change a tensor through another name, view or container than the one by which they use it."""

# ruff: noqa: B006, B023, E731

import collections
import copy
import operator

import numpy as np
import torch


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)
BANK = normal(4, 3, 256)
TABLE = {"a": [V, W], "b": (W, 2)}
SHARED = V.numpy()
SCALES = np.array([1.0, 2.0, 3.0])


def a_list_in_a_dict(model, tracer):
    TABLE["a"][0].mul_(2)
    TABLE["b"][0][:64] = 0
    model.layers_output[2] += V
    model.layers_output[3] += W
    return TABLE, model.layers_output[5]


def a_global_array_shares_memory_with_a_tensor(model, tracer):
    SHARED[:] = 1
    model.layers_output[3] += V
    return model.layers_output[5]


def a_tensor_from_numpy(model, tracer):
    array = np.ones(256, dtype=np.float32)
    v = torch.from_numpy(array)
    array[100:] = -2
    model.layers_output[3] += v
    return model.layers_output[5]


def numpy_array_as_scale(model, tracer):
    SCALES[1] = 0.25
    for layer, scale in zip((1, 2, 3), SCALES, strict=True):
        model.layers_output[layer] += float(scale) * V
    return model.layers_output[5]


def a_bank_is_changed_by_row(model, tracer):
    row = BANK[1]
    row *= 3
    model.layers_output[2] += BANK.sum(0)
    return model.layers_output[5]


def unbound_rows_are_views(model, tracer):
    for row in BANK.unbind(0):
        row.div_(row.norm())
    model.layers_output[3] += BANK[0] + BANK[2]
    return model.layers_output[5]


def split_and_chunk_are_views(model, tracer):
    v = V.clone()
    left, right = v.chunk(2)
    left.zero_()
    for part in right.split(32):
        part[0] = 5
    model.layers_output[3] += v
    return model.layers_output[5]


def a_transposed_view(model, tracer):
    m = BANK.clone()
    m.t()[5] = 7
    m.T[6].fill_(-7)
    model.layers_output[3] += m[2]
    return m[:, :8], model.layers_output[5]


def an_expanded_vector_follows_its_source(model, tracer):
    v = V.clone()
    wide = v.expand(2, 256)
    v *= 3
    model.layers_output[3] += wide[1]
    return model.layers_output[5]


def a_clone_does_not_follow(model, tracer):
    v = V.clone()
    kept = v.clone()
    v *= 3
    same, deep = copy.copy([v]), copy.deepcopy([v])
    v += 1
    model.layers_output[2] += kept
    model.layers_output[3] += same[0] - deep[0]
    return model.layers_output[5]


def names_swap(model, tracer):
    a, b = V.clone(), W.clone()
    a, b = b, a
    a *= 2
    model.layers_output[3] += a - b
    return model.layers_output[5]


def augmented_assignment_rebinds_or_changes(model, tracer):
    v = V.clone()
    kept = v
    v = v + 1
    changed = v
    v += 1
    model.layers_output[3] += kept + changed
    return model.layers_output[5]


def a_helper_rebinds_its_own_name(model, tracer):
    def rebinds(v):
        v = v * 5
        return v

    def changes(v):
        v *= 5
        return v

    a, b = V.clone(), V.clone()
    rebinds(a), changes(b)
    model.layers_output[2] += a
    model.layers_output[3] += b
    return model.layers_output[5]


def iadd_of_operator(model, tracer):
    v, n = V.clone(), 1
    operator.iadd(v, W)
    operator.iadd(n, 5)
    model.layers_output[3] += n * v
    return model.layers_output[5]


def setitem_of_operator(model, tracer):
    v = V.clone()
    operator.setitem(v, slice(0, 10), 4.0)
    h = model.layers_output[3]
    operator.setitem(h, -1, v)
    return model.layers_output[5]


def a_value_under_two_names(model, tracer):
    h = model.layers_output[3]
    same = h
    same *= 0.5
    h += V
    return same, model.layers_output[4]


def a_value_in_a_list(model, tracer):
    values = [model.layers_output[3]]
    values[0] += V
    for value in values:
        value[:, 10:20] = 0
    return model.layers_output[4]


def a_value_passed_to_a_helper(model, tracer):
    def damp(h, by=0.5):
        h[..., ::2] *= by

    damp(model.layers_output[2])
    damp(by=-1, h=model.layers_output[3])
    return model.layers_output[4]


def a_row_of_a_value(model, tracer):
    row = model.layers_output[3][-1]
    row += V
    row[3] = 100
    return row, model.layers_output[4]


def a_reshaped_value(model, tracer):
    heads = model.layers_output[3].unflatten(-1, (4, 64))
    heads[:, 2] = 0
    heads[:, 0] += 1
    return model.layers_output[4]


def a_transposed_value(model, tracer):
    columns = model.layers_output[3].t()
    columns[17] = 3
    columns[:5].neg_()
    return model.layers_output[4]


def a_diagonal_of_a_value(model, tracer):
    model.layers_output[3].diagonal().fill_(2)
    return model.layers_output[4]


def fancy_indexing_copies(model, tracer):
    h = model.layers_output[3]
    some = h[[0]]
    some += 100
    h[[-1]] += V
    h[:, [1, 2]] *= 3
    return some, model.layers_output[4]


def out_is_a_value(model, tracer):
    h = model.layers_output[3]
    torch.add(h, V, alpha=2, out=h)
    torch.clamp(h, -20, 20, out=h)
    return model.layers_output[4]


def the_value_of_an_earlier_layer_stays(model, tracer):
    early = model.layers_output[1]
    kept = early.clone()
    late = model.layers_output[4]
    early += 100
    late += kept
    return early, kept, model.layers_output[5]


def a_change_after_the_forward_went_on_stays_outside(model, tracer):
    h = model.layers_output[3]
    attention = model.attentions_output[4]
    h += 100
    return attention, h, model.layers_output[5]


def a_value_before_and_after_the_write(model, tracer):
    h = model.layers_output[3]
    before = h.clone()
    model.layers_output[3] = h + V
    after = model.layers_output[3]
    h += 50
    return before, after, h, model.layers_output[4]


def saved_values_are_copies(model, tracer):
    h = model.layers_output[3]
    kept = [save(h)]  # noqa: F821
    h += V
    kept.append(save(h))  # noqa: F821
    h *= 2
    return kept, model.layers_output[4]


def saved_inputs_are_copies(model, tracer):
    h = model.layers_input[3]
    kept = [save(h)]  # noqa: F821
    h += V
    rows = model.model.layers[3].mlp.input
    kept.append(save(rows))  # noqa: F821
    rows *= 2
    return kept, model.layers_output[4]


def changes_to_a_saved_value_reach_the_model(model, tracer):
    h = save(model.layers_output[3])  # noqa: F821
    h += V
    row = save(model.layers_output[4][-1])  # noqa: F821
    row *= 2
    return h, row, model.layers_output[5]


def a_defaultdict_of_vectors(model, tracer):
    sums = collections.defaultdict(lambda: torch.zeros(256))
    for key, v in (("x", V), ("y", W), ("x", W)):
        sums[key] += v
    model.layers_output[2] += sums["x"]
    model.layers_output[3] += sums["z"] + sums["y"]
    return sorted(sums), model.layers_output[5]


def a_deque_turns(model, tracer):
    vectors = collections.deque([V.clone(), W.clone()], maxlen=2)
    vectors.append(V - W)
    vectors.rotate(1)
    vectors[0].mul_(2)
    model.layers_output[3] += vectors.popleft()
    return len(vectors), model.layers_output[5]


def a_default_is_made_once(model, tracer):
    def counted(layer, seen=[], total=BANK[0]):
        seen.append(layer)
        total += V
        return len(seen) * total

    for layer in (1, 2, 3):
        model.layers_output[layer] += 0.1 * counted(layer)
    return counted(9), model.layers_output[5]


def closures_see_later_values(model, tracer):
    scale = 1.0
    scaled = lambda: scale * V
    scale = 3.0
    model.layers_output[2] += scaled()
    late = [lambda: layer for layer in (2, 3)]
    model.layers_output[late[0]()] += V
    return model.layers_output[5]


def nonlocal_counter(model, tracer):
    count = 0

    def bump(by=1):
        nonlocal count
        count += by
        return count

    for layer in (1, 3, 4):
        model.layers_output[layer] += bump(layer) * 0.1 * V
    return count, model.layers_output[5]


COUNT = 0


def global_counter(model, tracer):
    global COUNT
    for layer in (2, 3):
        COUNT += layer
        model.layers_output[layer] += COUNT * 0.1 * V
    return COUNT, model.layers_output[5]


def deleted_and_starred(model, tracer):
    first, *rest, last = [1, 2, 3, 4]
    names = {"a": V, "b": W}
    del names["a"], rest[0]
    for v in names.values():
        model.layers_output[rest[0]] += v * (first + last)
    return rest, [*names], model.layers_output[5]


def a_value_changed_through_its_data(model, tracer):
    h = model.layers_output[3]
    h.data[:, :9] = 4
    return model.layers_output[5]


def a_value_changed_through_detach(model, tracer):
    h = model.layers_output[3]
    h.detach().mul_(0.5)
    return model.layers_output[5]


def a_value_changed_through_numpy(model, tracer):
    rows = model.layers_output[3].numpy()
    rows[-1] *= 0.5
    np.add(rows, 1.0, out=rows)
    return model.layers_output[5]


def set_by_data_attribute(model, tracer):
    v = V.clone()
    v.data = W.clone()
    v.data[:5] = 9
    model.layers_output[3] += v
    return model.layers_output[5]


def masked_in_place(model, tracer):
    v = V.clone()
    v[v < 0] = 0
    v.masked_fill_(W > 0, 0.5)
    model.layers_output[3] += v
    h = model.layers_output[4]
    h.masked_fill_(h.abs() > 8, 0)
    return model.layers_output[5]
