"""Edge attribution: an estimate of how much each edge of the model's graph matters, from one backward pass.

Syed et al. 2023 (arXiv:2310.10348). The nodes are the input, the attention heads, the MLPs and the logits. Each reads the sum of what all
earlier nodes have added to the residual stream. The score of an edge is a dot product: the change of what the sender adds, from the clean
to the corrupt prompt, and the gradient of the metric at the receiver's input in the clean run. The gradient is taken through the receiver
alone, and not through the residual stream that bypasses it.

Shapes: P pairs, S senders, R receivers, T tokens, H hidden, N heads, D head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.errors import ParameterError, PromptError, about
from midstream.plots import plot_heatmap
from midstream.sweeps.cells import SweepRequest, graded, one_of, spaces_missing
from midstream.sweeps.results import dataframe

_SITES = ("resid_pre", "attn_z", "resid_mid", "mlp_out", "resid_post")
EDGE_METRICS = ("logit_diff", "logprob")


class Edge(NamedTuple):
    """An edge with its score, as the mean over the pairs."""

    sender: str
    receiver: str
    score: float


@dataclass(frozen=True)
class EdgeScores:
    """The result of `edge_attribution`.

    Nodes are called `input`, `a3.h1` (head 1 of layer 3), `m3` (the MLP of layer 3) and `logits`.

    Attributes:
        senders, receivers: the nodes' names, S and R of them, in the order of the forward pass.
        by_pair: float64 `[pairs, senders, receivers]`, in nats. NaN where the sender does not come before the receiver.
        clean, corrupt: float64 `[pairs]`, the metric of the two prompts, in nats.
    """

    senders: list[str]
    receivers: list[str]
    by_pair: np.ndarray
    clean: np.ndarray
    corrupt: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """The mean over the pairs, float64 `[senders, receivers]`: how much the metric of the clean prompt would change, to first order,
        if the receiver saw what the sender adds in the corrupt run."""
        return self.by_pair.mean(0)  # type: ignore[no-any-return]

    def best(self, count: int = 10) -> list[Edge]:
        """The edges with the largest score in either direction, largest first."""
        scores = self.scores
        edges = [
            Edge(self.senders[s], self.receivers[r], float(scores[s, r])) for s, r in np.argwhere(~np.isnan(scores))
        ]
        return sorted(edges, key=lambda edge: -abs(edge.score))[:count]

    def to_dataframe(self) -> Any:
        """A table with one row for each edge: `sender`, `receiver`, `score`; the largest first. Needs pandas."""
        return dataframe(self.best(self.by_pair[0].size), columns=Edge._fields)

    def plot(self, title: str = "edge attribution", path: str | PathLike[str] | None = None, *, ax: Any = None) -> Any:
        """Draw a heatmap with the senders upwards and the receivers to the right: blue above 0, red below. Grey: no edge.

        Args:
            title, path, ax: as in `midstream.plots.plot_heatmap`.

        Returns:
            The Axes.

        Raises:
            MidstreamError: matplotlib is not installed.
        """
        scores = self.scores
        reach = float(np.nanmax(np.abs(scores), initial=1e-9))
        labels = {"xlabel": "receiver", "ylabel": "sender", "label": "score in nats"}
        limits = -reach, reach
        return plot_heatmap(
            scores, self.receivers, self.senders, title, path, cmap="RdBu", limits=limits, ax=ax, **labels
        )

    def __repr__(self) -> str:
        edges, pairs = int((~np.isnan(self.by_pair[0])).sum()), len(self.by_pair)
        return f"<EdgeScores: {len(self.senders)} senders, {len(self.receivers)} receivers, {edges} edges, {pairs} pair{'s' * (pairs > 1)}>"


def attribute_edges(model: Any, clean: Any, corrupt: Any, answer: Any, foil: Any, metric: Any) -> EdgeScores:
    """See `TraceModel.edge_attribution`."""
    one_of("metric", metric, EDGE_METRICS)
    _check_model(model)
    for name, given in (("clean", clean), ("corrupt", corrupt)):
        if given is None:
            raise PromptError(f"{name} is None. Give a prompt, or a list of prompts.", field=name)
    asked = SweepRequest(clean, corrupt, answer, foil, metric=metric)
    pairs = _pairs(model, asked)
    foils = asked.foil if metric == "logit_diff" else [None] * len(pairs)
    answers = [graded(model, *each) for each in zip(asked.answer, foils, strict=True)]
    nodes = [("", 0)]
    for layer in range(model.num_layers):
        heads = model.arch.widths["attn_z", layer] // model.arch.head_dims["attn_z", layer]
        nodes += [(f"a{layer}.h{head}", 2 * layer + 1) for head in range(heads)] + [(f"m{layer}", 2 * layer + 2)]
    senders, receivers = [("input", 0), *nodes[1:]], [*nodes[1:], ("logits", 2 * model.num_layers + 1)]
    comes_before = np.array([[sender < receiver for _, receiver in receivers] for _, sender in senders])
    by_pair, values = [], []
    for number, ((clean_ids, corrupt_ids), tokens) in enumerate(zip(pairs, answers, strict=True)):
        scores_SR, *both = _scores(model, clean_ids, corrupt_ids, [*tokens.values()])
        by_pair.append(np.where(comes_before, scores_SR, np.nan))
        values.append([float(_metric(logprobs_V, [*tokens.values()])) for logprobs_V in both])
        missing = [tokens.graded(logprobs_V.__getitem__)[1] for logprobs_V in both]
        for text in spaces_missing(tokens, missing, number if len(pairs) > 1 else None):
            warnings.warn(text, stacklevel=3)
    each = np.array(values)
    return EdgeScores([name for name, _ in senders], [name for name, _ in receivers], np.stack(by_pair), *each.T)


def _check_model(model: Any) -> None:
    """Raise an error for a model whose edges cannot be scored."""
    if model.has_engine:
        raise ParameterError(
            "edge_attribution needs gradients, and vLLM computes none. Call it on LanguageModel(name), or use path_patching here."
        )
    if model.plan or model.edits:
        raise ParameterError(
            "edge_attribution runs the model without a plan and edits. Call it on a LanguageModel that has none."
        )
    for layer in range(model.num_layers):
        for site in _SITES:
            if (site, layer) not in model.arch.widths:
                raise ParameterError(
                    f"edge_attribution needs the site {site}, and layer {layer} of this model has none: the graph is that of models whose "
                    "layers have heads, and an MLP after them. Use sweep here."
                )


def _pairs(model: Any, asked: SweepRequest) -> list[tuple[list[int], list[int]]]:
    """The token ids of each clean and corrupt prompt. Raises PromptError unless both have the same number of tokens."""
    found = []
    for name in ("clean", "corrupt"):
        with about(name):
            found.append(model.ids_of(getattr(asked, name)))
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        if len(one) != len(other):
            text = (
                f"corrupt has {len(other)} tokens in pair {number}, and clean has {len(one)}. Edges are compared position by position: "
                "give prompts of the same number of tokens."
            )
            raise PromptError(text, field="corrupt")
    return list(zip(*found, strict=True))


class _Values(NamedTuple):
    """The residual stream in the run of one prompt, and what the nodes add to it. Lists have one value for each layer.

    Attributes:
        pre_TH, mid_TH, post_TH: the residual stream before the attention, between it and the MLP, and after the layer.
        z_TND: the heads' outputs.
        mlp_TH: what the MLP adds.
        logprobs_V: of the next token after the prompt.
    """

    pre_TH: list[torch.Tensor]
    z_TND: list[torch.Tensor]
    mid_TH: list[torch.Tensor]
    mlp_TH: list[torch.Tensor]
    post_TH: list[torch.Tensor]
    logprobs_V: torch.Tensor


def _read(model: Any) -> _Values:
    """The values of a run without gradients, for the function of `model.run`."""
    pre, z, mid, mlp, post = [], [], [], [], []
    for layer in range(model.num_layers):
        pre.append(model.resid_pre[layer].clone())
        z.append(model.attn_z[layer].clone())
        mid.append(model.resid_mid[layer].clone())
        mlp.append(model.mlp_out[layer].clone())
        post.append(model.resid_post[layer].clone())
    return _Values(pre, z, mid, mlp, post, _logprobs(model.logits))


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits[-1].float().log_softmax(-1)


def _metric(logprobs_V: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The log-probability of the first token, minus that of the second if there is one."""
    return logprobs_V[tokens[0]] - logprobs_V[tokens[1]] if len(tokens) > 1 else logprobs_V[tokens[0]]


def _gradients(model: Any, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The gradient of the metric at the input of each receiver, through this receiver alone, `[tokens, hidden]` each.

    Each value is replaced by a copy, so that the gradient can be taken in two parts: from the metric to the copy of what a receiver adds,
    and from the original of this copy to the copy of what the receiver reads.
    """
    layers = range(model.num_layers)
    pre, z, z_copy, mid, mlp, mlp_copy = [], [], [], [], [], []
    for layer in layers:
        pre.append(model.resid_pre[layer].clone().requires_grad_())
        model.resid_pre[layer] = pre[layer]
        z.append(model.attn_z[layer])
        z_copy.append(z[layer].clone())
        model.attn_z[layer] = z_copy[layer]
        mid.append(model.resid_mid[layer].clone())
        model.resid_mid[layer] = mid[layer]
        mlp.append(model.mlp_out[layer])
        mlp_copy.append(mlp[layer].clone())
        model.mlp_out[layer] = mlp_copy[layer]
    last = model.resid_post[layers[-1]].clone()
    model.resid_post[layers[-1]] = last
    metric = _metric(_logprobs(model.logits), tokens)
    into = torch.autograd.grad(metric, [*z_copy, *mlp_copy, last], retain_graph=True)
    found = []
    for layer in layers:
        for head in range(z[layer].shape[1]):
            through_TND = torch.zeros_like(into[layer])
            through_TND[:, head] = into[layer][:, head]
            found += torch.autograd.grad(z[layer], pre[layer], through_TND, retain_graph=True)
        found += torch.autograd.grad(mlp[layer], mid[layer], into[len(layers) + layer], retain_graph=True)
    return [*found, into[-1]]


def _scores(
    model: Any, clean: list[int], corrupt: list[int], tokens: Sequence[int]
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The scores `[senders, receivers]` of all pairs of nodes, and the log-probabilities `[vocabulary]` after both prompts."""
    with torch.no_grad():
        at_clean, at_corrupt = (model.run(_read, ids) for ids in (clean, corrupt))
        changes = [at_corrupt.pre_TH[0] - at_clean.pre_TH[0]]
        for layer in range(model.num_layers):
            adds = _adds(model, layer)
            _check_layer(layer, at_clean, adds)
            changes += [*_by_head(adds, at_corrupt.z_TND[layer] - at_clean.z_TND[layer])]
            changes.append(at_corrupt.mlp_TH[layer] - at_clean.mlp_TH[layer])
    with torch.inference_mode(False), torch.enable_grad():
        gradients = model.run(partial(_gradients, tokens=tokens), clean)
    changes_SX, gradients_RX = (
        torch.stack([each.detach().float().flatten() for each in values]) for values in (changes, gradients)
    )
    return (changes_SX @ gradients_RX.T).double().numpy(), at_clean.logprobs_V, at_corrupt.logprobs_V


def _adds(model: Any, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The output projection of a layer's attention, from `[..., heads, head_dim]` to `[..., hidden]`."""
    module = model.module.get_submodule(model.arch.binding("attn_z", layer).path)
    return lambda z: module(z.flatten(-2).to(model.module.device)).cpu()


def _by_head(adds: Callable[[torch.Tensor], torch.Tensor], change_TND: torch.Tensor) -> torch.Tensor:
    """The change of what each head adds to the stream, `[heads, tokens, hidden]`. Subtracts the projection's bias."""
    eye_NN = torch.eye(change_TND.shape[1], dtype=change_TND.dtype)
    alone_NTND = change_TND[None] * eye_NN[:, None, :, None]
    return adds(alone_NTND) - adds(torch.zeros_like(change_TND[:1]))


def _check_layer(layer: int, values: _Values, adds: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise ParameterError unless the layer adds the outputs of its attention and its MLP to the residual stream without changing them."""
    parts = (
        ("attention", values.pre_TH[layer] + adds(values.z_TND[layer]), values.mid_TH[layer]),
        ("MLP", values.mid_TH[layer] + values.mlp_TH[layer], values.post_TH[layer]),
    )
    for name, expected_TH, found_TH in parts:
        error = (expected_TH - found_TH).float().norm() / found_TH.float().norm()
        if not error <= torch.finfo(found_TH.dtype).eps ** 0.5:
            raise ParameterError(
                f"edge_attribution: layer {layer} of this model changes the output of its {name} before it adds it to the residual stream, "
                "for example by a norm or a factor, so what a node adds is not known. Use sweep here."
            )
