"""Prompts, vectors and oracles that tests of plans share."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Plain

from midstream import Capture

FRANCE = "The capital of France is"  # 5 tokens
ITALY = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"  # 8 tokens
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SHORT = {"max_tokens": 6, **GREEDY}
P, HIDDEN, LAYERS = 5, 256, 8
# `Plain` changes what leaves or enters a module; what a residual site before the MLP is moved by, attention's output is.
EDITABLE = ["resid_pre", "resid_post", "attn_in", "attn_out", "attn_z", "mlp_in", "mlp_act", "mlp_out"]


def vector(seed: int = 0, norm: float = 60.0, width: int = HIDDEN) -> torch.Tensor:
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v * norm / v.norm()


def toward_rome(plain: Plain, layer: int = 5) -> torch.Tensor:
    """What turns Paris into Rome where it is added at `layer`: the model is deaf to random directions."""
    return plain.run(ITALY).sites["resid_post", layer][-1] - plain.run(FRANCE).sites["resid_post", layer][-1]


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids if hasattr(output, "outputs") else output.token_ids)


def after_rows(rows: slice | list[int], change: Any) -> Any:
    """An edit of the whole sequence for the oracle that touches some rows."""

    def edit(h: torch.Tensor) -> torch.Tensor:
        h[rows] = change(h[rows])
        return h

    return edit


def generated_with(plain: Plain, edits: Any, count: int = 4, prompt: Any = FRANCE) -> tuple[list[int], Any]:
    """The tokens, and all sites of the sequence that was fed to the model, by the oracle."""
    ids = plain.generate(prompt, count, edits)
    return ids, plain.run(plain.ids(prompt) + ids[:-1], edits)


def everything(site: str = "resid_post", **options: Any) -> Capture:
    return Capture(site, layers="all", positions="all", **options)
