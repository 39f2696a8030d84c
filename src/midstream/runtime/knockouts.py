"""Cuts edges of attention (`plan.ops.knockout`): where queries lose keys, computes the outputs of heads again, and overwrites the
attention's own outputs. Edits and captures of `attn_q`, `attn_k` and `attn_v` come before it, those of `attn_z` after it.

On an engine, a request's keys and values are kept here from its first token to its last query, since other steps may have computed them:
a prompt may be split, and queries may be generated tokens.

Legend of shape suffixes: t tokens of one request in this step, S keys, Q queries with edges to cut, N heads, K key-value heads, D and E
head dims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from midstream import hooks
from midstream.arch import Architecture
from midstream.arch.heads import AttentionSettings, Heads, set_cut, settings_of
from midstream.errors import MidstreamError
from midstream.plan.ops.knockout import Knockouts
from midstream.sites import Binding
from midstream.trace.batch_rows import BatchLayout
from midstream.tree import follow

_MOST_SCORES = 1 << 25  # how many attention scores are in memory at once


def attend_again(
    settings: AttentionSettings,
    knockouts: Knockouts,
    layer: int,
    q_tND: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKE: torch.Tensor,
    z_tNE: torch.Tensor,
    *,
    first: int,
    first_key: int = 0,
    first_head: int = 0,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The outputs of attention for the queries of this step that lose keys: their rows, int64 `[Q]`, and the values, `[Q, N, E]`.
    None if no query does.

    A head that loses no key keeps the bits of its output.

    Args:
        z_tNE: the outputs as the model has computed them.
        first, first_key, first_head: the positions of the first query and key, and the number of the first head in the whole model.
        mask: `[heads or 1, t, S]`, as in `AttentionSettings`; None if `window` is enough.
    """
    at_Q = knockouts.queries(layer, first, first + len(q_tND))
    if not len(at_Q):
        return None
    heads, keys = range(first_head, first_head + q_tND.shape[1]), range(first_key, first_key + len(k_SKD))
    rows_Q = torch.from_numpy(at_Q - first).to(q_tND.device)
    found = []
    most = max(_MOST_SCORES // (len(heads) * len(keys)), 1)
    for start in range(0, len(at_Q), most):
        part_Q = rows_Q[start : start + most]
        cut_NQS = torch.from_numpy(knockouts.cut(layer, at_Q[start : start + most], heads, keys)).to(q_tND.device)
        mask_NQS = mask[:, part_Q] if mask is not None else None
        back_QS = (part_Q + first)[:, None] - torch.arange(keys.start, keys.stop, device=q_tND.device)
        found.append(settings.attended(q_tND[part_Q], k_SKD, v_SKE, z_tNE[part_Q], back_QS, cut_NQS, mask_NQS))
    return rows_Q, torch.cat(found)


class _Rows(NamedTuple):
    """A request's rows `[start, stop)` of the step's batch, and the position of the first."""

    request: _CutRequest
    start: int
    stop: int
    first: int


@dataclass(eq=False)
class _CutRequest:
    """A request with knockouts.

    Attributes:
        keys_values: layer -> keys and values of all positions so far, `[positions, K, D]` and `[positions, K, E]`, and room for more.
        known: how many positions have been computed.
    """

    knockouts: Knockouts
    keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    known: int = 0

    def all_keys_values(
        self, layer: int, first: int, k_tKD: torch.Tensor, v_tKE: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The keys and values of all positions up to this step's last. Stores them if later steps need them."""
        stop = first + len(k_tKD)
        if not first and stop >= self.knockouts.end:
            return k_tKD, v_tKE
        kept = self.keys_values.get(layer)
        if kept is None or len(kept[0]) < stop:
            wide = [new.new_empty(max(2 * first, stop), *new.shape[1:]) for new in (k_tKD, v_tKE)]
            for room, old in zip(wide, kept or (), strict=False):
                room[:first] = old[:first]
            kept = self.keys_values[layer] = (wide[0], wide[1])
        for room, new in zip(kept, (k_tKD, v_tKE), strict=True):
            room[first:stop] = new
        return kept[0][:stop], kept[1][:stop]


class AttentionCuts:
    """Cuts edges in the attention of one worker's layers. Layers have hooks while a request needs them.

    Args:
        rank: this worker's tensor-parallel rank. All ranks have equally many heads.
    """

    def __init__(self, model: nn.Module, arch: Architecture, rank: int) -> None:
        self._model, self._rank = model, rank
        self._bindings: dict[int, list[Binding]] = {
            layer: [arch.bindings[site, layer] for site in ("attn_q", "attn_k", "attn_v")]
            for layer in arch.layers
            if ("attn_k", layer) in arch.bindings and ("attn_q", layer) in arch.bindings
        }
        self._requests: dict[str, _CutRequest] = {}
        self._needed = Counter[int]()
        self._undo: dict[int, Callable[[], None]] = {}  # layer -> a function that removes its hook
        self._step: list[_Rows] = []

    def begin(self, name: str, knockouts: Knockouts) -> None:
        """A request begins."""
        self._requests[name] = _CutRequest(knockouts)
        for layer in knockouts.layers:
            if layer in self._bindings:  # the others are on other stages
                self._needed[layer] += 1
                if layer not in self._undo:
                    module = self._model.get_submodule(self._bindings[layer][0].path)
                    self._undo[layer] = self._watch(layer, module)
                    set_cut(module, partial(self._is_cut, layer))

    def end(self, name: str) -> None:
        """A request has ended. A second call changes nothing."""
        request = self._requests.pop(name, None)
        for layer in request.knockouts.layers if request is not None else ():
            self._needed[layer] -= 1
            if self._needed[layer] <= 0 and layer in self._undo:
                self._undo.pop(layer)()
                set_cut(self._model.get_submodule(self._bindings[layer][0].path), None)

    def begin_step(self, layout: BatchLayout) -> None:
        """The batch is laid out; the forward comes next."""
        self._step = []
        for name, rows in layout.each:
            request = self._requests.get(name)
            if request is None or rows.first_position >= request.knockouts.end:
                continue
            if rows.first_position > request.known:
                raise MidstreamError(
                    f"Request {name} has a Knockout, and the keys of its positions {request.known} to {rows.first_position - 1} were "
                    "not computed."
                )
            request.known = rows.end
            self._step.append(_Rows(request, rows.start, rows.stop, rows.first_position))

    def end_step(self) -> None:
        """The forward is queued."""
        for request, *_ in self._step:
            if request.known >= request.knockouts.end:
                request.keys_values.clear()
                request.known = 0
        self._step = []

    def _watch(self, layer: int, module: Any) -> Callable[[], None]:
        """Hook a layer's attention. Returns a function that removes the hook."""
        if isinstance(module, Heads):
            module.cut = partial(self._cut_in_transformers, layer, module)
            return partial(setattr, module, "cut", None)
        return hooks.after_call(module, partial(self._cut_in_vllm, layer, module)).remove

    def _is_cut(self, layer: int, rows: Any) -> bool:
        return any(rows.start == each.start and layer in each.request.knockouts.layers for each in self._step)

    def _cut_in_vllm(self, layer: int, module: Any, args: Any, kwargs: Any, z: torch.Tensor) -> torch.Tensor | None:
        if not self._step or hooks.is_in_body():
            return None
        q, k, v = (follow((args, kwargs), binding.hidden) for binding in self._bindings[layer])
        heads, of_qk = module.num_heads, module.head_size
        q_TND, z_TNE = q.reshape(-1, heads, of_qk), z.view(-1, heads, z.shape[-1] // heads)
        k_TKD, v_TKE = k.reshape(len(q_TND), -1, of_qk), v.reshape(len(q_TND), -1, z_TNE.shape[-1])
        self._cut(layer, module, q_TND, k_TKD, v_TKE, z_TNE)
        return z

    def _cut_in_transformers(
        self, layer: int, module: Heads, _: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor
    ) -> torch.Tensor:
        if self._step and not hooks.is_in_body():
            q_TND, k_TKD, v_TKE = (value[0].transpose(0, 1) for value in (q, k, v))
            self._cut(layer, module, q_TND, k_TKD, v_TKE, z.view(len(q_TND), q_TND.shape[1], -1))
        return z

    def _cut(
        self,
        layer: int,
        module: Any,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor,
        z_TNE: torch.Tensor,
    ) -> None:
        """Overwrite `z_TNE` where plans cut edges: with the outputs of the layer's attention without these edges."""
        settings, heads = settings_of(module), q_TND.shape[1]
        for request, start, stop, first in self._step:
            if layer not in request.knockouts.layers:
                continue
            k_SKD, v_SKE = request.all_keys_values(layer, first, k_TKD[start:stop], v_TKE[start:stop])
            own_tNE = z_TNE[start:stop]
            again = attend_again(
                settings,
                request.knockouts,
                layer,
                q_TND[start:stop],
                k_SKD,
                v_SKE,
                own_tNE,
                first=first,
                first_head=self._rank * heads,
            )
            if again is not None:
                own_tNE[again[0]] = again[1]

    def __len__(self) -> int:
        return len(self._requests)
