"""Knockout: cut edges of attention, from chosen queries to chosen keys."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from midstream.plan import fields
from midstream.plan.fields import Span
from midstream.plan.ops.edit import Edit, changed, register
from midstream.plan.selections import MaskAhead, Selection, checked, selector_of


@register
@dataclass(frozen=True)
class Knockout(Edit):
    """Cut edges of attention: the queries do not attend to the keys, whose scores are minus infinity before the softmax.

    The probabilities of a query's other keys are normalised again. A head whose query loses all its keys outputs zeros. Scale, soft cap,
    sliding window and sinks are the model's. Attention knockout: Geva et al. 2023 (arXiv:2304.14767).

    The edges of several knockouts at one layer are cut together. An edge that the model does not have, such as one to a later token or out
    of the sliding window, changes nothing.

    Args:
        layers: `"all"`, a layer or a sequence of layers, counted from 0.
        keys: the tokens that are not attended to: positions of the prompt (one or several; negatives count from its end), a `Span`,
            `"last_prompt"`, `"all_prompt"`, `"all_generated"`, `"all"`, or a `Selector`, such as `GeneratedTokens(0)` for the first
            generated token.
        queries: the tokens that stop attending to `keys`: positions of the prompt or a `Span`. With `phase="decode"`, numbers of generated
            tokens from 0. None means all tokens of `phase`.
        head: only this query head or these, counted from 0. None means all.
        phase: with `queries=None`: all tokens (`"both"`), those of the prompt (`"prefill"`), or generated ones (`"decode"`). With
            `queries`, `"decode"` means that they count generated tokens.
        keep_self: if true, a token that is both a query and a key still attends to itself.

    Raises:
        PlanError: the value of a field is not allowed.
    """

    kind, order, at_attention = "knockout", 0, True
    position_field, place_fields, selector_fields = "queries", frozenset({"queries", "phase"}), ("keys",)
    site: ClassVar[str] = "attn_z"  # type: ignore[misc]

    _: KW_ONLY
    layers: Any = "all"
    keys: Any
    queries: Any = None
    head: Any = None
    phase: str = "both"
    keep_self: bool = False

    def __post_init__(self) -> None:
        keys = checked("Knockout.keys", self.keys)
        self.settle(
            keys=tuple(sorted(keys)) if isinstance(keys, tuple) else keys,
            keep_self=fields.flag("Knockout.keep_self", self.keep_self),
        )

    def changes_nothing(self) -> bool:
        return False

    @property
    def counts_generated(self) -> bool:
        return selector_of(self.keys).selects_generated

    def range_in(self, prompt_length: int) -> tuple[int, int]:
        """The range of its queries, without those before the first position that can be a key. For an edit in normal form."""
        start, stop = super().range_in(prompt_length)
        first = self.keys[0] if isinstance(self.keys, tuple) else _first_key(self.keys, prompt_length)
        return max(start, first), stop

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Knockout]:
        if prompt_length is None:
            yield from super().spread(num_layers, prompt_length)
            return
        keys = self.keys
        if isinstance(keys, (tuple, Span)):
            keys = tuple(sorted(fields.resolved("Knockout.keys", keys, prompt_length)))
        elif not self.counts_generated:
            keys = tuple(Selection.of(keys, prompt_length).prompt.tolist())
        for one in super().spread(num_layers, prompt_length) if keys != () else ():
            cut = changed(one, keys=keys)
            start, stop = cut.range_in(prompt_length)
            if start < stop:  # else all keys come after the query
                yield cut


@functools.lru_cache(256)
def _first_key(keys: Any, prompt_length: int) -> int:
    """The first position that can be a key."""
    in_prompt = Selection.of(keys, prompt_length).prompt
    return int(in_prompt[0]) if in_prompt.size else prompt_length


@dataclass(frozen=True)
class _Edges:
    """Edges from each query to each key, at one layer.

    Attributes:
        heads: int64; None for all.
        ranges: int64 `[ranges, 2]`, the first position of the queries, and the one after the last.
        keep_self: see `Knockout`.
    """

    heads: np.ndarray | None
    ranges: np.ndarray
    keys: MaskAhead
    keep_self: bool


class Knockouts:
    """The edges that a plan cuts, for one prompt length.

    Args:
        edits: in normal form.

    Attributes:
        layers: those with edges to cut.
        end: the position after the last query.
    """

    def __init__(self, edits: Iterable[Knockout], prompt_length: int) -> None:
        found: dict[Any, list[tuple[int, int]]] = {}
        for edit in edits:
            group = edit.layers[0], edit.head, edit.keys, edit.keep_self
            found.setdefault(group, []).append(edit.range_in(prompt_length))
        self._keys = {keys: MaskAhead(Selection.of(keys, prompt_length)) for _, _, keys, _ in found}
        self._edges: dict[int, list[_Edges]] = {}
        for (layer, heads, keys, keep_self), ranges in found.items():
            of = None if heads is None else np.array(heads)
            self._edges.setdefault(layer, []).append(_Edges(of, np.array(ranges), self._keys[keys], keep_self))
        self.end = max(stop for _, stop in chain.from_iterable(found.values()))

    @property
    def layers(self) -> Sequence[int]:
        return list(self._edges)

    def select(self, stop: int) -> None:
        """Find the keys below `stop`, so that `cut` cannot fail. Raises CaptureError for a selector that fails."""
        for keys in self._keys.values():
            keys.below(stop)

    def queries(self, layer: int, first: int, stop: int) -> np.ndarray:
        """int64, the positions from `first` to `stop` with edges to cut at this layer, in ascending order."""
        positions = np.arange(first, stop)
        each = (_within(positions, edges.ranges) for edges in self._edges.get(layer, ()))
        return positions[np.logical_or.reduce([np.zeros(len(positions), bool), *each])]

    def cut(self, layer: int, at_Q: np.ndarray, heads: range, keys: range) -> np.ndarray:
        """bool `[heads, queries, keys]`, True for edges to cut. Raises CaptureError for a selector that fails.

        Args:
            at_Q: the queries' positions.
            heads: the heads, counted in the whole model.
            keys: the keys' positions.
        """
        cut_NQS = np.zeros((len(heads), len(at_Q), len(keys)), bool)
        for edges in self._edges.get(layer, ()):
            own = (
                np.arange(len(heads)) if edges.heads is None else edges.heads[np.isin(edges.heads, heads)] - heads.start
            )
            cut_QS = _within(at_Q, edges.ranges)[:, None] & edges.keys.below(keys.stop)[keys.start :]
            if edges.keep_self:
                cut_QS &= at_Q[:, None] != np.arange(keys.start, keys.stop)
            cut_NQS[own] |= cut_QS
        return cut_NQS


def _within(positions: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """bool, which positions lie in one of the ranges."""
    return np.any((positions[:, None] >= ranges[:, 0]) & (positions[:, None] < ranges[:, 1]), 1)  # type: ignore[no-any-return]
