"""Knockout: cut edges of attention, from chosen queries to chosen keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from midstream.plan import fields
from midstream.plan.fields import Span
from midstream.plan.ops.edit import Edit, changed, register


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
        keys: the tokens that are not attended to: one or several positions of the prompt, or a `Span`; negative numbers count from its end.
        queries: the tokens that stop attending to `keys`: positions or a `Span`, as in `keys`. With `phase="decode"`, numbers of generated
            tokens from 0. None means all tokens of `phase`.
        head: only this query head or these, counted from 0. None means all.
        phase: with `queries=None`: all tokens (`"both"`), those of the prompt (`"prefill"`), or generated ones (`"decode"`). With
            `queries`, `"decode"` means that they count generated tokens.

    Raises:
        PlanError: the value of a field is not allowed.
    """

    kind, order, at_attention = "knockout", 0, True
    position_field, place_fields, span_fields = "queries", frozenset({"queries", "phase"}), ("keys",)
    site: ClassVar[str] = "attn_z"  # type: ignore[misc]

    _: KW_ONLY
    layers: Any = "all"
    keys: Any
    queries: Any = None
    head: Any = None
    phase: str = "both"

    def __post_init__(self) -> None:
        keys = fields.positions("Knockout.keys", self.keys)
        self.settle(keys=keys if isinstance(keys, Span) else tuple(sorted(keys)))

    def changes_nothing(self) -> bool:
        return False

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Knockout]:
        keys = self.keys
        if prompt_length is not None:
            keys = tuple(sorted(fields.resolved("Knockout.keys", keys, prompt_length)))
        for one in super().spread(num_layers, prompt_length):
            yield changed(one, keys=keys)


class _Edges(NamedTuple):
    """Edges from each query to each key, at one layer.

    Attributes:
        heads: int64; None for all.
        ranges: int64 `[ranges, 2]`, the first position of the queries, and the one after the last.
        keys: int64, positions.
    """

    heads: np.ndarray | None
    ranges: np.ndarray
    keys: np.ndarray


class Knockouts:
    """The edges that a plan cuts, for one prompt length.

    Args:
        edits: each `Knockout` in normal form, with the range of its queries: the first position, and the one after the last.

    Attributes:
        layers: those with edges to cut.
        end: the position after the last query.
    """

    def __init__(self, edits: Iterable[tuple[Knockout, tuple[int, int]]]) -> None:
        found: dict[Any, list[tuple[int, int]]] = {}
        for edit, queries in edits:
            found.setdefault((edit.layers[0], edit.head, edit.keys), []).append(queries)
        self._edges: dict[int, list[_Edges]] = {}
        for (layer, heads, keys), ranges in found.items():
            each = _Edges(None if heads is None else np.array(heads), np.array(ranges), np.array(keys))
            self._edges.setdefault(layer, []).append(each)
        self.end = max(stop for _, stop in chain.from_iterable(found.values()))

    @property
    def layers(self) -> Sequence[int]:
        return list(self._edges)

    def queries(self, layer: int, first: int, stop: int) -> np.ndarray:
        """int64, the positions from `first` to `stop` with edges to cut at this layer, in ascending order."""
        positions = np.arange(first, stop)
        each = (_within(positions, edges.ranges) for edges in self._edges.get(layer, ()))
        return positions[np.logical_or.reduce([np.zeros(len(positions), bool), *each])]

    def cut(self, layer: int, at_Q: np.ndarray, heads: range, keys: range) -> np.ndarray:
        """bool `[heads, queries, keys]`, True for edges to cut.

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
            there = edges.keys[(edges.keys >= keys.start) & (edges.keys < keys.stop)] - keys.start
            cut_NQS[np.ix_(own, np.flatnonzero(_within(at_Q, edges.ranges)), there)] = True
        return cut_NQS


def _within(positions: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """bool, which positions lie in one of the ranges."""
    return np.any((positions[:, None] >= ranges[:, 0]) & (positions[:, None] < ranges[:, 1]), 1)  # type: ignore[no-any-return]
