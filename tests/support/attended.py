"""Plain transformers with its eager attention function recorded or changed: the oracle of queries, keys, values and probabilities."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from toy_selector import Every
from transformers import AutoModelForCausalLM

from midstream import GeneratedTokens, Knockout

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
        table_E4 = np.array([*cut], np.int64).reshape(-1, 4)
        home = sys.modules[type(self.module).__module__]
        attend, seen = home.eager_attention_forward, {}

        def recorded(module: Any, *qkv_and_mask: Any, **kwargs: Any) -> Any:
            qkv, mask = change(module.layer_idx, *qkv_and_mask[:3]), qkv_and_mask[3]
            for site, value in zip(SITES, qkv, strict=True):
                seen[site, module.layer_idx] = value[0].transpose(0, 1).clone()
            edges_E4 = table_E4[table_E4[:, 0] == module.layer_idx]
            if len(edges_E4):
                mask = mask.expand(1, qkv[0].shape[1], -1, -1).clone()
                mask[0][tuple(edges_E4[:, 1:].T)] = torch.finfo(mask.dtype).min
            z, weights = attend(module, *qkv, mask, *qkv_and_mask[4:], **kwargs)
            if len(edges_E4):
                z[0][(mask[0] < -1e30).all(-1).T] = 0
            seen["attn_z", module.layer_idx] = z[0].clone()
            return z, weights

        with mock.patch.object(home, "eager_attention_forward", recorded), torch.no_grad():
            output = self.module(torch.tensor([ids]), use_cache=False, output_attentions=True)
        return seen, output

    def generate(
        self,
        ids: list[int],
        steps: int,
        change: Change = lambda _, *qkv: qkv,
        cut: Iterable[Edge] = (),
        tokens: Sequence[int] = (),
    ) -> torch.Tensor:
        """The logits of steps, each a forward of all tokens, `[steps, vocab]`. Edges of later queries may stand in `cut`.

        The steps choose `tokens`, and the likeliest token after them.
        """
        ids, logits, table_E4 = list(ids), [], np.array([*cut], np.int64).reshape(-1, 4)
        for step in range(steps):
            there = (table_E4[:, 2] < len(ids)) & (table_E4[:, 3] <= table_E4[:, 2])
            logits.append(self.run(ids, change, table_E4[there])[1].logits[0, -1])
            ids.append(tokens[step] if step < len(tokens) else int(logits[-1].argmax()))
        return torch.stack(logits)


def edges(layers: Any, heads: Any, queries: Any, keys: Any) -> list[Edge]:
    """From each query to each key."""
    return list(itertools.product(layers, heads, queries, keys))


def knockouts_of_generated_keys(size: int, steps: int) -> list[tuple[Any, list[Edge]]]:
    """Plans for models of 4 layers and heads, and the edges that they cut, for a prompt of `size` tokens and `steps` generated ones."""
    all_4, every, answer = range(4), range(size + steps), range(size, size + steps)
    return [
        # The answer does not look at its first token, which looks at itself.
        (
            [Knockout(keys=GeneratedTokens(0), keep_self=True)],
            edges(all_4, all_4, range(size + 1, size + steps), [size]),
        ),
        # Each generated token is blind to all generated ones before it.
        (
            [Knockout(keys="all_generated", phase="decode", keep_self=True)],
            [edge for edge in edges(all_4, all_4, answer, answer) if edge[2] != edge[3]],
        ),
        # And to itself, in some heads; others lose edges to the prompt too.
        (
            [
                Knockout(layers=[0, 2], head=[1, 3], keys="all_generated"),
                Knockout(layers=2, head=2, keys="all", queries=[1, 3], phase="decode"),
                Knockout(layers=1, keys=[2], queries=-1),
            ],
            edges([0, 2], [1, 3], answer, answer)
            + edges([2], [2], [size + 1, size + 3], every)
            + edges([1], all_4, [size - 1], [2]),
        ),
    ]


def drawn_knockout(draw: random.Random, size: int, steps: int) -> tuple[Knockout, list[Edge]]:
    """The same for a random `Knockout`."""
    every, answer = range(size + steps), range(size, size + steps)
    layers, heads = draw.sample(range(4), draw.randint(1, 2)), draw.choice([None, [draw.randrange(4)], [0, 3]])
    some = sorted(draw.sample(range(size), 5))
    numbers = sorted(draw.sample(range(steps), min(steps, 4)))
    of_generated = [size + number for number in numbers]
    queries, phase, asking = draw.choice(
        [
            (None, "both", every),
            (None, "decode", answer),
            (None, "prefill", range(size)),
            (some, "both", some),
            (numbers, "decode", of_generated),
        ]
    )
    keys, answering = draw.choice(
        [
            ("all_generated", answer),
            (GeneratedTokens(numbers), of_generated),
            (Every(2), answer[::2]),
            (GeneratedTokens(range(steps // 2)), range(size, size + steps // 2)),
            ("all", every),
            ("all_prompt", range(size)),
            ("last_prompt", [size - 1]),
            (some, some),
        ]
    )
    keep_self = draw.random() < 0.5
    knockout = Knockout(layers=layers, head=heads, keys=keys, queries=queries, phase=phase, keep_self=keep_self)
    cut = edges(layers, range(4) if heads is None else heads, asking, answering)
    return knockout, [edge for edge in cut if edge[3] <= edge[2] and not (keep_self and edge[2] == edge[3])]


def pushed(site: str, layer: int, positions: list[int], push_ND: torch.Tensor) -> Change:
    """Adds to the value of some tokens at a site."""

    def change(at: int, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [value.clone() for value in qkv]
        if at == layer:
            values[SITES.index(site)][0, :, positions] += push_ND[:, None]
        return tuple(values)

    return change
