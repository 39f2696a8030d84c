"""Which texts activate the features of a sparse autoencoder most, from a directory of captured rows.

examples = max_activating(open_captures("activations"), sae, top=10)
examples.density                                   # [features], the share of the tokens at which each is active
examples[1234][0].activation, examples[1234][0].token_ids
examples.to_dataframe(model.tokenizer)             # a row for each feature
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.capture.directory import Store
from midstream.errors import CaptureError, MidstreamError
from midstream.plan import fields
from midstream.sae import SAE

if TYPE_CHECKING:
    import pandas

_BATCH_NUMBERS = 1 << 26  # activations that are in memory at a time


class Example(NamedTuple):
    """A context in which a feature is active.

    Attributes:
        activation: the feature's highest activation in the request from which the context comes.
        request: its name in the directory.
        position: of the token with this activation.
        token_ids: of the context's tokens.
        activations: float32 `[tokens]`, the feature's activation at each token of the context.
        peak: which of the tokens has `activation`.
    """

    activation: float
    request: str
    position: int
    token_ids: list[int]
    activations: torch.Tensor
    peak: int


@dataclass(frozen=True)
class FeatureExamples(Mapping[int, list[Example]]):
    """The contexts with the highest activations of each feature, the highest first; one per request. Made by `max_activating`.

    Attributes:
        features: which features, in the order of the tensors.
        tokens: how many tokens were read.
        density: float32 `[features]`, the share of the tokens at which each is active.
        highest, mean: float32 `[features]`, the highest activation, and the mean of those above 0 (0 if there are none).
    """

    features: list[int]
    tokens: int
    density: torch.Tensor
    highest: torch.Tensor
    mean: torch.Tensor
    _examples: dict[int, list[Example]]

    def __getitem__(self, feature: int) -> list[Example]:
        return self._examples[feature]

    def __iter__(self) -> Iterator[int]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)

    def top_tokens(self, feature: int) -> list[tuple[int, int]]:
        """The tokens at which the feature's contexts have their highest activation: `(token id, number of contexts)`, the most frequent
        first.
        """
        return Counter(each.token_ids[each.peak] for each in self[feature]).most_common()

    def to_dataframe(self, tokenizer: Any) -> pandas.DataFrame:
        """A row for each feature: `feature`, `density`, `highest`, `mean`, `top_tokens` (texts), and `top_context`, in which the token with
        the highest activation stands between « and ».
        """
        import pandas

        def text(example: Example) -> str:
            at = example.peak
            parts = example.token_ids[:at], example.token_ids[at : at + 1], example.token_ids[at + 1 :]
            before, peak, behind = map(tokenizer.decode, parts)
            return f"{before}«{peak}»{behind}"

        return pandas.DataFrame({
            "feature": self.features,
            "density": self.density.tolist(),
            "highest": self.highest.tolist(),
            "mean": self.mean.tolist(),
            "top_tokens": [[tokenizer.decode([token]) for token, _ in self.top_tokens(each)] for each in self.features],
            "top_context": [text(self[each][0]) if self[each] else "" for each in self.features],
        })  # fmt: skip


class _Best:
    """The highest activations of each feature so far, one from each request.

    Attributes:
        values, requests, rows: `[kept, features]`: the activations, the numbers of the requests that have them, and their rows in these.
    """

    def __init__(self, count: int, top: int) -> None:
        self._top = top
        self.values = torch.zeros(0, count)
        self.requests = self.rows = torch.zeros(0, count, dtype=torch.int64)

    def add(self, request: int, acts_RF: torch.Tensor) -> None:
        """Take the activations of a request's rows."""
        highest_F, rows_F = acts_RF.max(0)
        values = torch.cat([self.values, highest_F[None]])
        self.values, kept = values.topk(min(self._top, len(values)), dim=0)
        new = torch.full_like(rows_F, request)
        self.requests = torch.cat([self.requests, new[None]]).gather(0, kept)
        self.rows = torch.cat([self.rows, rows_F[None]]).gather(0, kept)


def max_activating(
    store: Store,
    sae: SAE,
    *,
    features: Sequence[int] | None = None,
    top: int = 10,
    before: int = 20,
    after: int = 5,
    device: Any = "cpu",
) -> FeatureExamples:
    """Find the contexts with the highest activations of each feature. Reads each captured row once.
    An activation of NaN counts as 0.

    Args:
        store: has rows of the SAE's site and layer, of prompts: `model.collect(prompts, plan=Capture(..., positions="all_prompt"))`.
        features: which ones; None for all.
        top: how many contexts to find for each feature, each from another request. A feature that is active in fewer requests has fewer.
        before, after: captured tokens of a context around the one with the highest activation.
        device: where to compute.

    Raises:
        CaptureError: the directory has no such rows, or rows of generated tokens, whose ids it does not have.
        PlanError: an argument is not allowed, or the SAE does not have the feature.
    """
    count, before, after = (
        fields.integer(name, value, low)
        for name, value, low in (("top", top, 1), ("before", before, 0), ("after", after, 0))
    )
    allowed = f"from 0 to {sae.features - 1}, each once"
    chosen = list(range(sae.features)) if features is None else list(fields.integers("features", features, allowed, 0))
    if max(chosen) >= sae.features:
        raise fields.refuse("features", fields.shown(chosen), allowed)
    key = sae.site, sae.layer, "before"
    names = [name for name in store if store.count(name, [key])]
    if not names:
        raise CaptureError(f"{store!r} has no rows of {sae.site}[{sae.layer}].")
    best, tokens = _Best(len(chosen), count), 0
    active, total = torch.zeros(len(chosen)), torch.zeros(len(chosen), dtype=torch.float64)
    for number, acts_RF in _activations(store, names, sae, chosen, device):
        best.add(number, acts_RF)
        active += (acts_RF > 0).sum(0)
        total += acts_RF.clamp(min=0).sum(0, dtype=torch.float64)
        tokens += len(acts_RF)
    examples = _contexts(store, names, sae, chosen, best, before, after, device)
    mean = torch.where(active > 0, total / active.clamp(min=1), 0.0).float()
    return FeatureExamples(chosen, tokens, active / tokens, best.values[0], mean, examples)


def _activations(
    store: Store, names: Sequence[str], sae: SAE, chosen: Sequence[int], device: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of each request, and the activations `[rows, chosen]` of its rows."""
    key, most = (sae.site, sae.layer), max(1, _BATCH_NUMBERS // sae.features)
    together: list[tuple[int, torch.Tensor]] = []
    count = 0
    for number, name in enumerate(names):
        capture = store[name]
        if capture.positions[key][-1] >= len(capture.prompt_token_ids):
            raise CaptureError(f"{capture!r} has rows of generated tokens, whose ids the directory does not have.")
        together.append((number, capture[key].flatten(1)))
        count += len(together[-1][1])
        if count >= most or number == len(names) - 1:
            acts = sae.encode(torch.cat([rows for _, rows in together]).to(device))[:, chosen].cpu().nan_to_num(nan=0.0)
            for (each, rows), own in zip(together, acts.split([len(rows) for _, rows in together]), strict=True):
                if len(rows):
                    yield each, own
            together, count = [], 0


def _contexts(
    store: Store,
    names: Sequence[str],
    sae: SAE,
    chosen: Sequence[int],
    best: _Best,
    before: int,
    after: int,
    device: Any,
) -> dict[int, list[Example]]:
    """The contexts around the tokens that were found, by feature."""
    found: dict[int, list[Example]] = {feature: [] for feature in chosen}
    wanted: dict[int, list[tuple[int, int, int]]] = {}  # request -> (rank, place of the feature, row)
    for rank, place in (best.values > 0).nonzero().tolist():
        wanted.setdefault(int(best.requests[rank, place]), []).append((rank, place, int(best.rows[rank, place])))
    ranked: dict[tuple[int, int], Example] = {}
    for number, each in sorted(wanted.items()):
        capture = store[names[number]]
        positions = capture.positions[sae.site, sae.layer]
        rows = capture[sae.site, sae.layer]
        for rank, place, row in each:
            first, stop = max(row - before, 0), row + after + 1
            own = sae.encode(rows[first:stop].to(device))[:, chosen[place]].cpu()
            ids = [capture.prompt_token_ids[position] for position in positions[first:stop]]
            value = float(best.values[rank, place])
            ranked[place, rank] = Example(value, names[number], positions[row], ids, own, row - first)
    for (place, _), example in sorted(ranked.items(), key=lambda item: item[0]):
        found[chosen[place]].append(example)
    return found


def plot_examples(examples: FeatureExamples, feature: int, tokenizer: Any, *, count: int = 5, path: Any = None) -> Any:
    """Draw the contexts with the highest activations of a feature, each token on the colour of its activation.

    Args:
        count: contexts at most.
        path: a file to write the figure to.

    Returns:
        The figure.

    Raises:
        MidstreamError: matplotlib is not installed, or the feature is active in no context.
    """
    from midstream.plots import plot_token_scores

    if not (shown := examples[feature][:count]):
        raise MidstreamError(f"The feature {feature} is active in no context of the directory.")
    texts, scores, breaks = list[str](), list[float](), set[int]()
    for example in shown:
        texts += [tokenizer.decode([token]) for token in example.token_ids]
        scores += example.activations.tolist()
        breaks.add(len(texts) - 1)
    place = examples.features.index(feature)
    title = f"feature {feature}, active at {examples.density[place]:.2%} of the tokens"
    return plot_token_scores(texts, scores, title, path, label="activation", breaks=breaks).figure
