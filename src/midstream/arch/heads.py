"""Queries, keys and values of attention: the sites `attn_q`, `attn_k` and `attn_v`, and the settings of the attention that uses them.

vLLM's attention is a module that takes the three. Attention in transformers is a function, which the modules look up by its name. So
`split_heads` gives each of these modules a child that the three pass through before the function gets them. The inputs of vLLM's module,
or of that child, are the sites. vLLM's Transformers backend has both: the function calls vLLM's module, but not as a module, so no hook of
it runs. There the child is the site.

Keys and values of earlier tokens, which transformers' cache adds, do not pass through the child. A changed key or value is also written to
the cache, since later steps read it there.

Legend of shape suffixes: B batch, N heads, K key-value heads, T tokens of this step, S tokens with those of the cache, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from midstream import hooks
from midstream.arch.blocks import HEADS, head_dims_of
from midstream.errors import ArchitectureError, ParameterError

_CACHE: ContextVar[Any] = ContextVar("midstream_cache", default=None)  # of the running forward


@contextlib.contextmanager
def caches_known(root: nn.Module) -> Iterator[None]:
    """Let the attention of `root`, a model of transformers, know the cache of each forward in the block."""

    def note(_: Any, kwargs: Any) -> None:
        _CACHE.set(kwargs.get("past_key_values"))

    before, handle = _CACHE.get(), hooks.before(root, note)
    try:
        yield
    finally:
        handle.remove()
        _CACHE.set(before)


@dataclass(frozen=True)
class AttentionSettings:
    """How attention computes its probabilities from queries and keys.

    Attributes:
        scale: of the products of queries and keys.
        soft_cap: the bound of the scaled products; None if they have none.
        window: how many tokens a query attends to, itself included; None for all earlier ones.
        sinks_N: a logit for each head that takes a share of the probability and attends to nothing; None if there are none.
        mask: `[batch or 1, heads or 1, T, S]`: True where a query attends, or numbers that are added; None if `window` says all.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    sinks_N: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def probabilities(self, q_TND: torch.Tensor, k_TKD: torch.Tensor, mask_TT: torch.Tensor | None) -> torch.Tensor:
        """`[heads, queries, keys]` for a prompt of T tokens, computed in float32. Row t sums to 1, less the share of the sink.

        Args:
            mask_TT: the prompt's part of `mask`, for all heads or for each.
        """
        k_TND = k_TKD.repeat_interleave(q_TND.shape[1] // k_TKD.shape[1], dim=1)
        scores_NTT = torch.einsum("qnd,knd->nqk", q_TND.float(), k_TND.float()) * self.scale
        if self.soft_cap is not None:
            scores_NTT = torch.tanh(scores_NTT / self.soft_cap) * self.soft_cap
        if mask_TT is None:
            at = torch.arange(len(q_TND), device=q_TND.device)
            back_TT = at[:, None] - at
            mask_TT = (back_TT >= 0) & (back_TT < (self.window or len(at)))
        if mask_TT.dtype == torch.bool:
            scores_NTT = scores_NTT.masked_fill(~mask_TT, float("-inf"))
        else:
            scores_NTT = scores_NTT + mask_TT
        if self.sinks_N is None:
            return scores_NTT.softmax(-1).to(q_TND.dtype)
        sinks_NT1 = self.sinks_N.float()[:, None, None].expand(*scores_NTT.shape[:2], 1)
        return torch.cat([scores_NTT, sinks_NT1], -1).softmax(-1)[..., :-1].to(q_TND.dtype)


def settings_of(module: Any) -> AttentionSettings:
    """The settings of the attention whose inputs are `attn_q`, `attn_k` and `attn_v`.

    Raises:
        ArchitectureError: this attention has a feature that is not supported.
    """
    if isinstance(module, Heads):
        if module.served_by is None:
            return module.settings
        module = module.served_by
    impl = module.impl
    unsupported = {
        "position biases (ALiBi)": getattr(impl, "alibi_slopes", None) is not None,
        "chunked attention": type(module).__name__ != "Attention" or getattr(impl, "chunk_lookback", -1) > -1,
        "attention in both directions": getattr(module, "use_mm_prefix", False),
    }
    for what, has in unsupported.items():
        if has:
            raise ArchitectureError(
                f"attention_probabilities does not support {what}, which {module.layer_name} has: compute them from attn_q and attn_k."
            )
    return AttentionSettings(
        float(impl.scale),
        getattr(impl, "logits_soft_cap", None) or None,
        module.sliding_window,
        getattr(impl, "sinks", None),
    )


class Heads(nn.Module):
    """The child of an attention module of transformers that queries, keys and values pass through: `[B, T, heads * head_dim]` each.

    Attributes:
        head_dims: of queries, keys and values.
        shares_kv: whether the attention takes keys and values of another layer.
        served_by: vLLM's attention module, which the attention function calls on vLLM.
        settings: those of the last call, if there is no such module.
    """

    served_by: Any

    def __init__(self, shares_kv: bool = False, served_by: Any = None) -> None:
        super().__init__()
        self.shares_kv = shares_kv
        object.__setattr__(self, "served_by", served_by)  # not a child: it is one of the attention already
        self.head_dims = (0, 0, 0)
        self.settings = AttentionSettings(1.0)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return query, key, value

    def through(self, layer: Any, q_BNTD: Any, k_BKSD: Any, v_BKSD: Any) -> tuple[torch.Tensor, ...]:
        """The three tensors of an attention function, after the hooks of this module have seen this step's tokens."""
        tokens, given = q_BNTD.shape[-2], (q_BNTD, k_BKSD, v_BKSD)
        cache = None if self.shares_kv else _cache_of(layer)
        if not self.shares_kv and cache is None and k_BKSD.shape[-2] != tokens:
            raise _other_cache("a cache that midstream does not know")
        self.head_dims = (given[0].shape[-1], given[1].shape[-1], given[2].shape[-1])
        now = [full[..., -tokens:, :].transpose(1, 2).flatten(2) for full in given]
        q, k, v = (
            seen.unflatten(-1, (-1, size)).transpose(1, 2)
            for seen, size in zip(self(*now), self.head_dims, strict=True)
        )
        if self.shares_kv:
            return q, k_BKSD, v_BKSD
        if cache is None:
            return q, k, v
        return q, _cached(k_BKSD, k, cache.keys), _cached(v_BKSD, v, cache.values)


def _cache_of(layer: Any) -> Any:
    """The cache of this layer in the running forward, if it has one. Raises ParameterError if its last rows are not the newest tokens."""
    cache = _CACHE.get()
    if cache is None:
        return None
    layers = getattr(cache, "layers", ())
    found = layers[layer] if isinstance(layer, int) and layer < len(layers) else None
    if found is None or hasattr(found, "max_cache_len"):
        raise _other_cache(type(cache if found is None else found).__name__)
    return found


def _cached(full_BKSD: torch.Tensor, new_BKTD: torch.Tensor, kept_BKSD: torch.Tensor) -> torch.Tensor:
    """The keys or values of all tokens, with the new ones in the cache, which keeps this tensor or a part of it."""
    now = full_BKSD[..., -new_BKTD.shape[-2] :, :]
    if torch.equal(now, new_BKTD):
        return full_BKSD
    if kept_BKSD.untyped_storage().data_ptr() != full_BKSD.untyped_storage().data_ptr():
        raise _other_cache("one that keeps copies of the keys and values")
    now.copy_(new_BKTD)
    return full_BKSD


def _other_cache(kind: str) -> ParameterError:
    return ParameterError(
        f"The sites attn_q, attn_k and attn_v need transformers' dynamic cache; this model generates with {kind}: set "
        "model.module.generation_config.cache_implementation to None."
    )


def split_heads(root: nn.Module, *, on_vllm: bool = False) -> None:
    """Give each attention in `root` that calls transformers' attention functions a child `midstream_heads`. The model computes the same.

    Args:
        root: a model with modules of transformers. A second call changes nothing. A model of transformers 4 stays as it is.
        on_vllm: only attention whose function calls a module of vLLM that takes queries, keys and values (not multi-head latent attention).
    """
    for module in list(root.modules()):
        served_by = next((child for child in module.children() if head_dims_of(child) is not None), None)
        if on_vllm and served_by is None:
            continue
        if HEADS not in module._modules and _calls_attention(module) and _watch_functions():
            module.add_module(HEADS, Heads(bool(getattr(module, "is_kv_shared_layer", False)), served_by))


def _calls_attention(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@functools.cache
def _watch_functions() -> bool:
    """Let the attention functions of transformers pass their tensors through the child of modules that have one.

    Returns whether this transformers has one place where modules look up the function.
    """
    from transformers.modeling_utils import AttentionInterface

    look_up = getattr(AttentionInterface, "get_interface", None)
    if look_up is None:
        return False

    @functools.wraps(look_up)
    def midstream_get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _through_heads(look_up(self, *args, **kwargs))

    AttentionInterface.get_interface = midstream_get_interface
    return True


@functools.cache
def _through_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def midstream_attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        heads = getattr(module, "_modules", {}).get(HEADS)
        if heads is not None and (heads._forward_pre_hooks or heads._forward_hooks):
            heads.settings = AttentionSettings(
                kwargs.get("scaling") or query.shape[-1] ** -0.5,
                kwargs.get("softcap"),
                kwargs.get("sliding_window"),
                kwargs.get("s_aux"),
                args[0] if args else kwargs.get("attention_mask"),
            )
            query, key, value = heads.through(getattr(module, "layer_idx", None), query, key, value)
        return function(module, query, key, value, *args, **kwargs)

    return midstream_attention
