"""Tiny decoder blocks, one for each way in which models carry the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

T, H, HEADS = 5, 8, 2


class Norm(nn.Module):
    """Fused like vLLM's: with a residual it overwrites both buffers and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H) + 0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return nn.functional.rms_norm(x, (H,), self.weight)
        residual.add_(x)
        x.copy_(nn.functional.rms_norm(residual, (H,), self.weight))
        return x, residual


class Attention(nn.Module):
    """Zeros, as in an engine's dummy run. `hidden_states` may come by position or by keyword."""

    head_dim = H // HEADS

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(H, H)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        return self.o_proj(torch.zeros_like(hidden_states)) * 0


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(H, 3 * H), nn.Linear(3 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).relu())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), MLP()


class Single(Block):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class CopyBeforeMLP(Block):
    """As GraniteMoeShared in vLLM: the mixture of experts writes into its input, so it gets a copy."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states).clone())


class Tupled(Single):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states), torch.zeros(1, HEADS, T, T)


class Keyword(Single):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states)


class Dual(Block):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DualByHand(Single):
    """Adds its two streams itself, with no fused norm."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        stream = hidden_states if residual is None else hidden_states + residual
        stream = stream + self.self_attn(self.input_layernorm(stream))
        return self.mlp(self.post_attention_layernorm(stream)), stream


class FakeDual(Single):
    """Returns and takes a second tensor that is no part of the stream (Command-R)."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return super().forward(hidden_states), hidden_states


class Mismatched(Dual):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden_states, _ = super().forward(positions, hidden_states, residual)
        return hidden_states, hidden_states[:1].clone()


class Parallel(Block):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


class InPlace(Block):
    """The stream after attention lies in the buffer that entered the block (Falcon on vLLM): not a parallel block."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = hidden_states
        residual += self.self_attn(self.input_layernorm(hidden_states))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class PostNorm(Block):
    """Norms what attention and MLP return, before the add (OLMo 2)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.post_attention_layernorm(self.self_attn(hidden_states))
        return hidden_states + self.input_layernorm(self.mlp(hidden_states))


class SumThenNorm(Block):
    """The norm reads the sum, which lies in attention's own output buffer: it is no post-norm."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states))
        attended += hidden_states
        return attended + self.mlp(self.post_attention_layernorm(attended))


class Paired(nn.Module):
    """Returns its bias beside its output, for the caller to add."""

    head_dim = H // HEADS

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.bias = nn.Linear(H, H, bias=False), nn.Parameter(torch.rand(H))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dense(hidden_states), self.bias


class WithBias(Block):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Paired()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        attended, bias = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + (attended + bias)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class BareMLP(Block):
    """The two linear layers of the MLP are the block's own (OPT)."""

    def __init__(self) -> None:
        super().__init__()
        del self.mlp
        self.fc1, self.fc2 = nn.Linear(H, 3 * H), nn.Linear(3 * H, H)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.fc2(self.fc1(self.post_attention_layernorm(hidden_states)).relu())


def by_position(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(h), None


def first_of_tuple(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(h)[0], None


def by_keyword(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(positions=positions, hidden_states=h), None


def positions_first(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(positions, h), None


def two_streams(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(positions, h, r)


def two_by_keyword(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
    return layer(positions, hidden_states=h, residual=r)


Call = Callable[[nn.Module, torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, Any]]


class Model(nn.Module):
    def __init__(self, block: type[nn.Module], call: Call, *, num_layers: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.norm = nn.Embedding(11, H), Norm()
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.call, self.scale = call, scale
        self.stream: list[torch.Tensor] = []  # the oracle: the value at every layer boundary

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        h, r = self.embed_tokens(input_ids) * self.scale, None
        self.stream = [h.clone()]
        for layer in self.layers:
            h, r = self.call(layer, torch.arange(T), h, r)
            self.stream.append(h.clone() if r is None or isinstance(layer, FakeDual) else h + r)
        return self.norm(h, r)[0] if r is not None else self.norm(h)
