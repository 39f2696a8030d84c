"""Queries, keys and values of attention: the sites `attn_q`, `attn_k` and `attn_v`, and the settings of the attention that uses them.

vLLM's attention is a module that takes the three. Attention in transformers is a function, which the modules look up by its name. So
`split_heads` gives each of these modules a child that the three pass through before the function gets them. The inputs of vLLM's module,
or of the child, are the sites. vLLM's Transformers backend has both modules. Its attention function calls the `forward` of vLLM's module
directly, so hooks on vLLM's module never run, and the child's inputs are the sites.

Keys and values of earlier tokens, which transformers' cache adds, do not pass through the child. A changed key or value is also written to
the cache, since later steps read it there.

Legend of shape suffixes: B batch, N heads, K key-value heads, T tokens of this step, S tokens of the cache and this step, Q some of the
queries, G heads that share keys and values, D and E head dims.
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

_UNQUANTISED = ("auto", "float16", "bfloat16", "float32")  # the dtypes of vLLM's KV cache that keep the model's numbers
_CUT = "midstream_is_cut"
_CACHE: ContextVar[Any] = ContextVar("midstream_cache", default=None)  # of the running forward
_LEFT_OUT: ContextVar[set[str] | None] = ContextVar("midstream_left_out", default=None)  # while `parts_left_out` runs


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
        scale: the factor of the products of queries and keys.
        soft_cap: the bound of the scaled products; None if they have none.
        window: how many tokens a query attends to, itself included; None for all earlier ones.
        sinks_N: for each head, a logit that takes a share of the probability and belongs to no key; None if there are none.
        mask: `[batch or 1, heads or 1, T, S]`: bool, True where a query attends to a key; or numbers to add to the scores. None if `window`
            alone decides which keys count.
        unsupported: the names of other numbers that the attention computes with.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    sinks_N: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    unsupported: tuple[str, ...] = ()

    def probabilities(self, q_TND: torch.Tensor, k_TKD: torch.Tensor, mask_TT: torch.Tensor | None) -> torch.Tensor:
        """`[heads, queries, keys]` for a prompt of T tokens, computed in float32. Row t sums to 1, less the share of the sink.

        Args:
            mask_TT: the prompt's part of `mask`, `[heads or 1, T, T]`.
        """
        at = torch.arange(len(q_TND), device=q_TND.device)
        scores_NTT, _ = self._scores(q_TND, k_TKD, at[:, None] - at, mask_TT)
        return self._softmax(scores_NTT).to(q_TND.dtype)

    def attended(
        self,
        q_QND: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKE: torch.Tensor,
        z_QNE: torch.Tensor,
        back_QS: torch.Tensor,
        cut_NQS: torch.Tensor,
        mask_NQS: torch.Tensor | None,
    ) -> torch.Tensor:
        """The outputs of the heads, computed in float32 without some edges. A query that loses all keys gets zeros.

        Args:
            z_QNE: the outputs with all edges; a head that loses no edge keeps its output.
            back_QS: how many tokens a key lies before a query.
            cut_NQS: bool, the edges to leave out.
            mask_NQS: a part of `mask`; None if `window` alone decides which keys count.
        """
        scores_NQS, attends_NQS = self._scores(q_QND, k_SKD, back_QS, mask_NQS)
        loses_NQ = (attends_NQS & cut_NQS).any(-1)
        left_NQS = attends_NQS & ~cut_NQS
        scores_NQS = scores_NQS.masked_fill(~left_NQS, float("-inf"))
        is_empty_NQ1 = ~left_NQS.any(-1, keepdim=True)
        weights_NQS = self._softmax(scores_NQS.masked_fill(is_empty_NQ1, 0.0)).masked_fill(is_empty_NQ1, 0.0)
        weights_KGQS = weights_NQS.unflatten(0, (v_SKE.shape[1], -1))
        new_QNE = torch.einsum("kgqs,ske->qkge", weights_KGQS, v_SKE.float()).flatten(1, 2)
        return torch.where(loses_NQ.T[..., None], new_QNE.to(z_QNE.dtype), z_QNE)

    def _scores(
        self, q_TND: torch.Tensor, k_SKD: torch.Tensor, back_TS: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The masked scores, float32 `[N, T, S]`, and where queries attend, bool `[N or 1, T, S]`."""
        q_TKGD = q_TND.unflatten(1, (k_SKD.shape[1], -1))
        scores_NTS = torch.einsum("qkgd,skd->kgqs", q_TKGD.float(), k_SKD.float()).flatten(0, 1) * self.scale
        if self.soft_cap is not None:
            scores_NTS = torch.tanh(scores_NTS / self.soft_cap) * self.soft_cap
        if mask is not None and mask.dtype != torch.bool:
            # transformers adds the lowest number of the dtype to scores that do not count
            return scores_NTS + mask, mask > torch.finfo(mask.dtype).min / 2
        attends = mask
        if attends is None:
            attends = (back_TS >= 0 if not self.window else (back_TS >= 0) & (back_TS < self.window))[None]
        return scores_NTS.masked_fill(~attends, float("-inf")), attends

    def _softmax(self, scores_NTS: torch.Tensor) -> torch.Tensor:
        if self.sinks_N is None:
            return scores_NTS.softmax(-1)
        sinks_NT1 = self.sinks_N.float()[:, None, None].expand(*scores_NTS.shape[:2], 1)
        return torch.cat([scores_NTS, sinks_NT1], -1).softmax(-1)[..., :-1]


def settings_of(module: Any) -> AttentionSettings:
    """The settings of the attention whose inputs are `attn_q`, `attn_k` and `attn_v`.

    Raises:
        ArchitectureError: this attention has a feature that is not supported.
    """
    if isinstance(module, Heads) and module.served_by is None:
        if module.settings.unsupported:
            raise ArchitectureError(
                f"attention_probabilities does not support {', '.join(module.settings.unsupported)}, which this model's attention "
                "computes with: compute them from attn_q and attn_k."
            )
        return module.settings
    module = _of_vllm(module)
    if (what := _unsupported(module)) is not None:
        raise ArchitectureError(
            f"attention_probabilities does not support {what}, which {module.layer_name} has: compute them from attn_q and attn_k."
        )
    impl = module.impl
    return AttentionSettings(
        float(impl.scale),
        getattr(impl, "logits_soft_cap", None) or None,
        module.sliding_window,
        getattr(impl, "sinks", None),
    )


def _of_vllm(module: Any) -> Any:
    """vLLM's attention module: `module` itself, or the one that computes the attention for the child `module`."""
    return module.served_by if isinstance(module, Heads) else module


def _unsupported(module: Any) -> str | None:
    """The feature of vLLM's attention that `settings_of` does not support."""
    impl = module.impl
    features = {
        "position biases (ALiBi)": getattr(impl, "alibi_slopes", None) is not None,
        "chunked attention": type(module).__name__ != "Attention" or getattr(impl, "chunk_lookback", -1) > -1,
        "attention in both directions": getattr(module, "use_mm_prefix", False),
    }
    return next((what for what, has in features.items() if has), None)


def is_cut(module: Any, rows: Any) -> bool:
    """Whether plans cut edges of `module`'s attention in these rows of the running step, by the test that `set_cut` has set."""
    test = getattr(module, _CUT, None)
    return test is not None and test(rows)


def set_cut(module: Any, test: Callable[[Any], bool] | None) -> None:
    """Set the test that `is_cut` calls for `module`; None removes it, and `is_cut` is False."""
    if test is not None:
        setattr(module, _CUT, test)
    elif hasattr(module, _CUT):
        delattr(module, _CUT)


def why_not_again(module: Any) -> str | None:
    """Why midstream cannot compute the outputs of vLLM's attention again; None if it can."""
    module = _of_vllm(module)
    what = _unsupported(module)
    if what is None and getattr(module, "attn_type", "decoder") != "decoder":
        what = "attention in both directions"
    if what is None and str(getattr(module, "kv_cache_dtype", "auto")) not in _UNQUANTISED:
        what = (
            f"a quantised KV cache ({module.kv_cache_dtype}), because it has the keys and values before their rounding"
        )
    return None if what is None else f"it does not support {what}"


class Heads(nn.Module):
    """The child of an attention module of transformers that queries, keys and values pass through: `[B, T, heads * head_dim]` each.

    Attributes:
        head_dims: of queries, keys and values.
        shares_kv: whether the attention takes keys and values of another layer.
        served_by: on vLLM, its attention module, which does the computation; None on transformers.
        settings: on transformers, those of the last call. On vLLM they come from `served_by`.
        cut: a function `(settings, queries, keys, values, outputs) -> new outputs`. Queries, keys and values are
            `[B, heads, tokens, head_dim]`; outputs are `[B, T, N, E]` on transformers and `[T, N * E]` on vLLM. None keeps the outputs.
    """

    served_by: Any

    def __init__(self, shares_kv: bool = False, served_by: Any = None) -> None:
        super().__init__()
        self.shares_kv = shares_kv
        object.__setattr__(self, "served_by", served_by)  # not as a child module: the attention has it as one already
        self.head_dims = (0, 0, 0)
        self.settings = AttentionSettings(1.0)
        self.cut: Callable[..., torch.Tensor] | None = None

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
    """The keys or values of all tokens, with the new ones as the last. The cache shares the memory, so it has the new ones, too."""
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
    """Make the attention functions of transformers pass queries, keys and values through the child `midstream_heads` of their modules.

    Returns False if this version of transformers has no common place where modules look up the function.
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
        if heads is None:
            return function(module, query, key, value, *args, **kwargs)
        if heads._forward_pre_hooks or heads._forward_hooks or heads.cut is not None:
            heads.settings = AttentionSettings(
                kwargs.get("scaling") or query.shape[-1] ** -0.5,
                kwargs.get("softcap"),
                kwargs.get("sliding_window"),
                kwargs.get("s_aux"),
                args[0] if args else kwargs.get("attention_mask"),
                tuple(name for name in _numbers_in(kwargs) if name not in ("softcap", "s_aux")),
            )
            if heads.cut is not None and heads.settings.unsupported:
                raise ArchitectureError(
                    f"Knockout does not support {', '.join(heads.settings.unsupported)}, which this model's attention computes with."
                )
            query, key, value = heads.through(getattr(module, "layer_idx", None), query, key, value)
        found = function(module, query, key, value, *args, **kwargs)
        return found if heads.cut is None else (heads.cut(heads.settings, query, key, value, found[0]), *found[1:])

    return midstream_attention


# Parts of a model that an attention function leaves out: transformers' `sdpa` ignores soft caps, for example.


def parts_left_out(root: nn.Module, probe: Callable[[], Any]) -> list[str]:
    """The names of the numbers that `root` passes to its attention functions, but that these ignore.

    A model's own function, "eager", defines what the model computes, and is not checked.

    Args:
        root: a model of transformers.
        probe: runs the model.
    """
    from transformers import AttentionInterface

    chosen = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in root.modules()}
    functions = {name: AttentionInterface()[name] for name in chosen & AttentionInterface().keys()}
    token = _LEFT_OUT.set(found := set[str]())
    try:
        for name, function in functions.items():
            AttentionInterface.register(name, _noting(function))
        probe()
    finally:
        for name, function in functions.items():
            AttentionInterface.register(name, function)
        _LEFT_OUT.reset(token)
    return sorted(found)


@functools.cache
def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `function` that notes, while `parts_left_out` runs, which arguments the function ignores."""

    @functools.wraps(function)
    def midstream_noting(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := _LEFT_OUT.get()) is not None:
            found.update(
                name
                for name in _numbers_in(kwargs)
                if _ignores(function, name, module, query, key, value, *args, **kwargs)
            )
        return function(module, query, key, value, *args, **kwargs)

    return midstream_noting


def _numbers_in(kwargs: dict[str, Any]) -> list[str]:
    """The names of an attention function's arguments that are numbers of the model: soft caps, sinks and biases."""
    of_call = ("scaling", "dropout", "attention_mask")
    given = {name: value for name, value in kwargs.items() if name not in of_call and value is not None}
    return [
        name
        for name, value in given.items()
        if name == "softcap" or (value.is_floating_point() if torch.is_tensor(value) else isinstance(value, float))
    ]


def _ignores(function: Callable[..., Any], name: str, module: Any, *qkv_and_args: Any, **kwargs: Any) -> bool:
    """Whether another value of the argument `name` changes nothing, with small and with large queries.

    A function that has a parameter of this name computes with it, except flash attention: not every kernel of it does.
    """
    if name in inspect.signature(function).parameters and "flash" not in function.__name__:
        return False
    draws = torch.Generator().manual_seed(0)

    def drawn(like: torch.Tensor, size: float) -> torch.Tensor:
        return (torch.randn(like.shape, generator=draws) * size).to(like)

    query, key, value, *args = qkv_and_args
    given = kwargs[name]
    other = given / 2 + drawn(given, 1.0) if torch.is_tensor(given) else given / 2
    for size in (0.1, 8.0):
        qkv = drawn(query, size), drawn(key, 1.0), drawn(value, 1.0)
        found = [function(module, *qkv, *args, **{**kwargs, name: each})[0] for each in (given, other)]
        if not torch.equal(*found):
            return False
    return True
