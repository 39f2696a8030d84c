"""What the parts of a decoder-only model are called, and how a module's kind is told from its class.

Names only nominate. What a nominated module is to the forward pass is settled by the probe (`probe.py`). A user's own
names come first: `rename={"my_blocks": "layers", "mixer": "attn"}`; a key may be a name or the end of a dotted path.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn

from midstream.errors import ArchitectureError

STANDARD: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "h", "blocks", "block", "layer", "decoder_layers", "transformer_blocks"),
    "attn": ("self_attn", "attn", "attention", "self_attention", "self_attn_block", "attn_block"),
    "mlp": ("mlp", "feed_forward", "feedforward", "ffn", "ff", "block_sparse_moe", "sparse_moe", "moe", "mlp_block"),
    "embed": ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embedding", "embeddings"),
    "final_norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f", "ln_out"),
    "lm_head": ("lm_head", "embed_out", "output", "output_projection"),
    "attn_proj": ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "out"),
    "mlp_proj": ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "proj"),
}
ROLES = tuple(STANDARD)

# Blocks that hold their MLP as two linear layers of their own, with no module around them (OPT, XGLM).
BARE_MLP = (("fc1", "fc2"), ("fc_in", "fc_out"), ("linear1", "linear2"))


class Names:
    """The standard names with the user's own before them."""

    def __init__(self, rename: Mapping[str, str] | None = None) -> None:
        self._own: dict[str, list[str]] = {}
        for name, role in (rename or {}).items():
            if role not in STANDARD:
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ArchitectureError(f"rename[{name!r}] is {role!r}, which is none of {', '.join(ROLES)}{hint}")
            self._own.setdefault(role, []).append(name)

    def own(self, role: str) -> list[str]:
        """What the user said this role is called."""
        return self._own.get(role, [])

    def rank(self, path: str, role: str) -> int | None:
        """How good a name `path` has for `role`: 0 is best, None that it is no such name at all."""
        candidates = [*self.own(role), *STANDARD[role]]
        for rank, name in enumerate(candidates):
            if path == name or path.endswith(f".{name}"):
                return rank
        return None

    def child(self, module: nn.Module, path: str, role: str) -> str | None:
        """The path of the direct child of `module` that has the best name for `role`."""
        ranked = [(self.rank(f"{path}.{name}", role), f"{path}.{name}") for name, _ in module.named_children()]
        named = [(rank, child) for rank, child in ranked if rank is not None]
        return min(named)[1] if named else None


def is_placeholder(module: nn.Module) -> bool:
    """Whether this stands for a module that another pipeline stage has (vLLM's PPMissingLayer is an Identity)."""
    return any(cls.__name__ == "PPMissingLayer" for cls in type(module).__mro__) or type(module) is nn.Identity


def is_linear(module: nn.Module) -> bool:
    """Whether this is a matrix multiplication, quantised ones included."""
    name = type(module).__name__
    if "Linear" in name or name == "Conv1D" or hasattr(module, "qweight"):
        return True
    weight = getattr(module, "weight", None)
    return getattr(weight, "ndim", 0) == 2 and "Embedding" not in name and not any(module.children())


def is_norm(module: nn.Module, path: str) -> bool:
    """Whether this is a normalisation, by its class or by its name."""
    leaf = path.rpartition(".")[2].lower()
    return "norm" in type(module).__name__.lower() or "norm" in leaf or leaf.startswith("ln")


def is_moe(module: nn.Module) -> bool:
    """Whether this MLP is a mixture of experts, which has no single down projection."""
    return any("experts" in name or "MoE" in type(child).__name__ for name, child in module.named_children())


def text_config(root: nn.Module) -> Any:
    """The configuration of the language model, or None."""
    config = getattr(root, "config", None)
    return getattr(config, "text_config", None) or config
