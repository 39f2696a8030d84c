"""Plain transformers with its eager attention function recorded or changed: the oracle of queries, keys, values and probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

SITES = ("attn_q", "attn_k", "attn_v")
# Takes a layer and its queries, keys and values, each `[1, heads, tokens, head_dim]`, and returns the three.
Change = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
Edge = tuple[int, int, int, int]  # (layer, head, query, key), to be cut


class Attended:
    """A model of plain transformers, and a recording or a change of what its attention function gets."""

    def __init__(self, path: Any) -> None:
        self.module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def run(
        self, ids: list[int], change: Change = lambda _, *qkv: qkv, cut: Iterable[Edge] = ()
    ) -> tuple[dict[Any, torch.Tensor], Any]:
        """(site, layer) -> `[tokens, heads, head_dim]`, and the model's output; one forward without a cache.

        The mask that the attention function gets leaves out the edges in `cut`.
        """
        home = sys.modules[type(self.module).__module__]
        attend, seen = home.eager_attention_forward, {}

        def recorded(module: Any, *qkv_and_mask: Any, **kwargs: Any) -> Any:
            qkv, mask = change(module.layer_idx, *qkv_and_mask[:3]), qkv_and_mask[3]
            for site, value in zip(SITES, qkv, strict=True):
                seen[site, module.layer_idx] = value[0].transpose(0, 1).clone()
            edges = [edge for edge in cut if edge[0] == module.layer_idx]
            if edges:
                mask = mask.expand(1, qkv[0].shape[1], -1, -1).clone()
                for _, head, query, key in edges:
                    mask[0, head, query, key] = torch.finfo(mask.dtype).min
            z, weights = attend(module, *qkv, mask, *qkv_and_mask[4:], **kwargs)
            for _, head, query, _ in edges:
                if (mask[0, head, query] < -1e30).all():
                    z[0, query, head] = 0
            seen["attn_z", module.layer_idx] = z[0].clone()
            return z, weights

        with mock.patch.object(home, "eager_attention_forward", recorded), torch.no_grad():
            output = self.module(torch.tensor([ids]), use_cache=False, output_attentions=True)
        return seen, output

    def generate(
        self, ids: list[int], steps: int, change: Change = lambda _, *qkv: qkv, cut: Iterable[Edge] = ()
    ) -> torch.Tensor:
        """The logits of greedy steps, each a forward of all tokens, `[steps, vocab]`. Edges of later queries may stand in `cut`."""
        ids, logits = list(ids), []
        for _ in range(steps):
            there = [edge for edge in cut if edge[2] < len(ids) and edge[3] <= edge[2]]
            logits.append(self.run(ids, change, there)[1].logits[0, -1])
            ids.append(int(logits[-1].argmax()))
        return torch.stack(logits)


def pushed(site: str, layer: int, positions: list[int], push_ND: torch.Tensor) -> Change:
    """Adds to the value of some tokens at a site."""

    def change(at: int, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [value.clone() for value in qkv]
        if at == layer:
            values[SITES.index(site)][0, :, positions] += push_ND[:, None]
        return tuple(values)

    return change
