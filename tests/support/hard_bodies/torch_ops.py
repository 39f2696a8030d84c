"""Bodies whose writes and reads are spelled in many ways: row L3's spellings, indexing, views, dtypes and functions of torch."""

import math

import torch
import torch.nn.functional as F


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


V, W = normal(1, 256), normal(2, 256)
U = V / V.norm()
ENCODER, DECODER = normal(5, 256, 32) / 16, normal(6, 32, 256) / 6
LINEAR = torch.nn.Linear(256, 8)
with torch.no_grad():
    LINEAR.weight.copy_(normal(7, 8, 256) / 16)
    LINEAR.bias.fill_(0.1)


def added(model, tracer):
    model.layers_output[2] += V.to(model.layers_output[2])
    model.layers_output[3] = model.layers_output[3] + 2 * V
    model.layers_output[4] = V - model.layers_output[4]
    return model.layers_output[5]


def scaled(model, tracer):
    model.layers_output[3] = model.layers_output[3] * 0.5
    model.layers_output[4] /= 2
    return model.layers_output[5]


def projected_out(model, tracer):
    h = model.layers_output[3]
    model.layers_output[3] = h - (h @ U)[:, None] * U
    h = model.layers_output[4]
    h -= torch.outer(h @ V, V) / V.norm() ** 2
    return model.layers_output[5]


def projected_by_einsum(model, tracer):
    h = model.layers_output[3]
    h -= torch.einsum("th,h,k->tk", h, U, U)
    return model.layers_output[5]


def columns_are_set(model, tracer):
    model.layers_output[3][:, 17] = 0
    model.layers_output[3][:, [1, 2, 3]] = torch.tensor([1.0, 2.0, 3.0])
    model.layers_output[4][..., ::4] *= -1
    return model.layers_output[5]


def rows_are_set(model, tracer):
    model.layers_output[3][-1] = V
    model.layers_output[4][:1] = W
    return model.layers_output[5]


def rows_are_swapped(model, tracer):
    h = model.layers_output[3]
    h[[0, -1]] = h[[-1, 0]]
    return model.layers_output[5]


def ellipsis_and_none(model, tracer):
    model.layers_output[3][...] += V[None]
    model.layers_output[4][:] = model.layers_output[4].flip(-1)
    return model.layers_output[5]


def a_mask_of_rows(model, tracer):
    h = model.layers_output[3]
    mask = torch.arange(len(h)) % 2 == 0
    h[mask] += V
    return model.layers_output[5]


def a_mask_of_values(model, tracer):
    h = model.layers_output[3]
    h[h > 4] = 4
    return model.layers_output[5]


def gated_by_a_score(model, tracer):
    h = model.layers_output[3]
    score = h @ U
    model.layers_output[3] = torch.where((score > 0)[:, None], h - score[:, None] * U, h + V)
    return score, model.layers_output[5]


def sparse_autoencoder(model, tracer):
    h = model.layers_output[3]
    features = F.relu(h @ ENCODER - 0.5)
    features[:, 7] = 2
    model.layers_output[3] = h + (features @ DECODER - h) * 0.1
    return features, model.layers_output[5]


def top_features(model, tracer):
    features = (model.layers_output[3] @ ENCODER).abs()
    values, places = features.topk(4, dim=-1)
    return values, places, features.argmax(-1)


def mlp_of_tanh(model, tracer):
    model.mlps_output[3] = torch.tanh(model.mlps_output[3])
    return model.layers_output[5]


def attention_is_zeroed(model, tracer):
    model.attentions_output[3][:] = 0
    model.attentions_output[4].zero_()
    return model.layers_output[5]


def an_earlier_value_is_added_later(model, tracer):
    early = model.layers_output[1]
    model.layers_output[4] += 0.5 * early
    return model.layers_output[5]


def a_mean_over_tokens(model, tracer):
    h = model.layers_output[3]
    h -= h.mean(0, keepdim=True)
    return model.layers_output[5]


def in_place_functions(model, tracer):
    h = model.layers_output[3]
    h.clamp_(-6, 6).add_(V, alpha=0.5)
    h.index_fill_(1, torch.tensor([3, 4]), 1.5)
    h.copy_(h * 0.9)
    F.relu_(h)
    return model.layers_output[5]


def scatter_and_index_add(model, tracer):
    h = model.layers_output[3]
    h.index_add_(0, torch.tensor([0]), V[None])
    h.scatter_(1, torch.zeros(len(h), 1, dtype=torch.long), 5.0)
    return model.layers_output[5]


def other_dtypes(model, tracer):
    h = model.layers_output[3]
    h += V.double().float() + W.half().to(h)
    model.layers_output[4] = model.layers_output[4].double() * 0.5
    return h.to(torch.float64).sum(-1), model.layers_output[5].bfloat16().dtype is torch.bfloat16


def heads_by_views(model, tracer):
    h = model.layers_output[3]
    h.view(-1, 4, 64)[:, 1].mul_(0)
    h.unflatten(1, (4, 64)).transpose(0, 1)[2] += 1
    return model.layers_output[5]


def norms_and_similarities(model, tracer):
    a, b = model.layers_output[2], model.layers_output[3]
    same = F.cosine_similarity(a, b, dim=-1)
    model.layers_output[4] *= same[:, None]
    return same, F.normalize(b, dim=-1), (a - b).pow(2).sum(-1).sqrt(), model.layers_output[5]


def layer_norm_and_softmax(model, tracer):
    h = model.layers_output[3]
    model.layers_output[3] = F.layer_norm(h, (256,)) * 3
    return h.softmax(-1).amax(-1), h.std(-1), model.layers_output[5]


def a_linear_layer_of_the_callers(model, tracer):
    scores = LINEAR(model.layers_output[3])
    model.layers_output[4] += scores.sigmoid() @ LINEAR.weight
    return scores.detach(), model.layers_output[5].detach()


def stacked_and_concatenated(model, tracer):
    hs = [model.layers_output[layer] for layer in (1, 2, 3)]
    stack = torch.stack(hs)
    model.layers_output[4] = stack.mean(0)
    return torch.cat(hs, dim=-1).shape, stack.var(0), model.layers_output[5]


def like_the_value(model, tracer):
    h = model.layers_output[3]
    model.layers_output[3] = torch.zeros_like(h) + h.new_full((256,), 0.5)
    model.layers_output[4] = torch.full_like(h, 2.0).fill_diagonal_(-1)
    return torch.empty_like(h).shape, model.layers_output[5]


def one_row_is_written_to_all(model, tracer):
    model.layers_output[3] = model.layers_output[3][-1]
    model.layers_output[4] = W[None]
    return model.layers_output[5]


def lerp_and_addcmul(model, tracer):
    h = model.layers_output[3]
    torch.lerp(h, V.expand_as(h), 0.3, out=h)
    h.addcmul_(V, W, value=0.1)
    return model.layers_output[5]


def cumulative_and_rolled(model, tracer):
    h = model.layers_output[3]
    model.layers_output[3] = h.cumsum(0) / torch.arange(1, len(h) + 1)[:, None]
    model.layers_output[4] = model.layers_output[4].roll(1, dims=-1)
    return model.layers_output[5]


def norm_is_kept(model, tracer):
    h = model.layers_output[3]
    before = h.norm(dim=-1, keepdim=True)
    h += 3 * V
    h *= before / h.norm(dim=-1, keepdim=True)
    return model.layers_output[5]


def sorted_and_quantiles(model, tracer):
    h = model.layers_output[3]
    values, _ = h.sort(-1, descending=True)
    return values[:, :5], h.median(-1).values, h.kthvalue(3, dim=-1).values


def a_number_of_the_value(model, tracer):
    h = model.layers_output[3]
    scale = math.sqrt(h.pow(2).mean().item())
    model.layers_output[4] += V / scale
    return scale, float(h[0, 0]), h[-1, :3].tolist(), f"{scale:.3f}", model.layers_output[5]


def a_value_as_numpy(model, tracer):
    array = model.layers_output[3].numpy()
    array[-1, :8] = 1
    return array.mean(), model.layers_output[5]


def shapes_are_known(model, tracer):
    h = model.layers_output[3]
    tokens, width = h.shape
    h += V * (width / 256) / tokens
    return tokens, h.numel(), h.dim(), h.size(-1), str(h.dtype), model.layers_output[5]


def a_norm_of_the_models(model, tracer):
    normed = model.model.norm(model.layers_output[3])
    model.layers_output[4] += normed
    return normed, model.layers_output[5]


def no_grad_and_inference_mode(model, tracer):
    with torch.no_grad():
        model.layers_output[2] += V
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        model.layers_output[3] += W
    return model.layers_output[5]


def vmap_and_apply(model, tracer):
    h = model.layers_output[3]
    scores = torch.func.vmap(lambda row: row @ U)(h)
    return scores, h.clone().apply_(lambda x: round(x) * 0.5) if len(h) == 1 else h


def not_broadcastable(model, tracer):
    model.layers_output[3] = torch.zeros(3, 4, 5)
    return model.layers_output[5]
