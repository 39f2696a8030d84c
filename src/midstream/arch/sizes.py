"""What a model's configuration says of its sizes."""

from __future__ import annotations

from typing import Any


class Sizes:
    """How many heads and token ids there are, from a configuration of transformers."""

    @property
    def _text_config(self) -> Any:
        """The language model's own configuration, as transformers has it."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""
        return self._text_config.vocab_size

    @property
    def num_heads(self) -> int:
        """Attention heads of a layer, those of `attn_z`."""
        return self._text_config.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return getattr(self._text_config, "num_key_value_heads", None) or self.num_heads

    @property
    def head_dim(self) -> int:
        """Of the heads of `attn_z`."""
        given = getattr(self._text_config, "head_dim", None)
        return given or self._text_config.hidden_size // self.num_heads
