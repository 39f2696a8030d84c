"""The names that models give to their parts, and how to tell a module's kind from its class.

A name only makes a module a candidate: the probe (`probe.py`) shows what the module does in the forward pass. The user's names come before
the standard ones: `rename={"my_blocks": "layers", "mixer": "attn"}`, where a key is a name or the end of a dotted path.
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
    "attn_proj": ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj", "out"),
    "mlp_proj": ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "proj"),
}
ROLES = tuple(STANDARD)

# Blocks that have the two linear layers of the MLP as direct children, with no MLP module around them (OPT, XGLM).
BARE_MLP = (("fc1", "fc2"), ("fc_in", "fc_out"), ("linear1", "linear2"))


class Names:
    """The user's names followed by the standard ones."""

    def __init__(self, rename: Mapping[str, str] | None = None) -> None:
        self._own: dict[str, list[str]] = {}
        for name, role in (rename or {}).items():
            if role not in STANDARD:
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ArchitectureError(f"rename[{name!r}] is {role!r}, which is none of {', '.join(ROLES)}{hint}")
            self._own.setdefault(role, []).append(name)

    def own(self, role: str) -> list[str]:
        """The user's names for this role."""
        return self._own.get(role, [])

    def rank(self, path: str, role: str) -> int | None:
        """How well the name of `path` fits `role`: 0 is best, None means that it does not."""
        candidates = [*self.own(role), *STANDARD[role]]
        for rank, name in enumerate(candidates):
            if path == name or path.endswith(f".{name}"):
                return rank
        return None

    def child(self, module: nn.Module, path: str, role: str) -> str | None:
        """The path of the direct child of `module` whose name fits `role` best."""
        ranked = [(self.rank(f"{path}.{name}", role), f"{path}.{name}") for name, _ in module.named_children()]
        named = [(rank, child) for rank, child in ranked if rank is not None]
        return min(named)[1] if named else None


def is_placeholder(module: nn.Module) -> bool:
    """Whether this stands for a module of another pipeline stage. Transformers models in vLLM have a plain Identity there."""
    return is_a(module, "PPMissingLayer") or type(module) is nn.Identity


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether one of these is the name of the module's class or of a base class."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer, quantised ones included."""
    name = type(module).__name__
    if "Linear" in name or name == "Conv1D" or hasattr(module, "qweight"):
        return True
    weight = getattr(module, "weight", None)
    return getattr(weight, "ndim", 0) == 2 and "Embedding" not in name and not any(module.children())


def is_norm(module: nn.Module, path: str) -> bool:
    """Whether this is a norm, by its class or by its name."""
    leaf = path.rpartition(".")[2].lower()
    return "norm" in type(module).__name__.lower() or "norm" in leaf or leaf.startswith("ln")


def is_moe(module: nn.Module) -> bool:
    """Whether this MLP is a mixture of experts, which has no single down projection."""
    return any("experts" in name or "MoE" in type(child).__name__ for name, child in module.named_children())


def text_config(root: nn.Module) -> Any:
    """The configuration of the language model, or None."""
    config = getattr(root, "config", None)
    return getattr(config, "text_config", None) or config


class Sizes:
    """How many heads and token ids the model has, read from its transformers configuration."""

    @property
    def _text_config(self) -> Any:
        """The transformers configuration of the language model."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._text_config.vocab_size

    @property
    def num_heads(self) -> int:
        """Attention heads of a layer, as in `attn_z`."""
        return self._text_config.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return getattr(self._text_config, "num_key_value_heads", None) or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of a head of `attn_z`."""
        given = getattr(self._text_config, "head_dim", None)
        return given or self._text_config.hidden_size // self.num_heads
