"""The arguments of a sweep, and the cells that they select: rows of layers, heads, and columns of corresponding positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.errors import ParameterError, PlanError, PromptError, about
from midstream.plan import fields
from midstream.plan.fields import Span, nearest, span_positions
from midstream.plan.values import ModelFacts
from midstream.requests.arguments import Answers, MissingSpace, prompts_of, with_space
from midstream.sites import LAYER_SITES, hook_hint, site_of
from midstream.sweeps.events import Column, Grid, Paths

METRICS = ("logit_diff", "logprob", "recovered")
SOURCES = ("run", "zeros", "mean")
DIRECTIONS = ("denoising", "noising")
Metric = str | Callable[..., float]


@dataclass(frozen=True)
class Tokens:
    """A prompt as tokens.

    Attributes:
        ids, texts: the id and the text of each token.
        offsets: returns the prompt's text, and the characters `[begin, end)` of each token in it. Raises PlanError.
    """

    ids: list[int]
    texts: list[str]
    offsets: Callable[[], tuple[str, list[tuple[int, int]]]] = field(compare=False)

    def find(self, span: Span) -> list[int]:
        """The positions of a span. Raises PlanError."""
        return list(span_positions(span, *self.offsets(), "positions"))


@dataclass
class SweepRequest:
    """The arguments of `sweep` and `path_patching`, after the checks that need no model.

    See `TraceModel.sweep` and `TraceModel.path_patching` for the arguments and the errors.

    Attributes:
        clean, corrupt: a list with a prompt for each pair. `corrupt` may be None.
        answer, foil: a list with one for each pair. Without foils, `foil` is a list of None.
        adapter: the adapter that all requests run with.
        paths: the paths of `path_patching`; None for a sweep.
    """

    clean: Any
    corrupt: Any
    answer: Any
    foil: Any
    sites: Any = "resid_post"
    layers: Any = "all"
    positions: Any = "all"
    heads: Any = None
    metric: Metric = "logit_diff"
    direction: Any = None
    source: Any = "run"
    coarse: Any = None
    best: int = 3
    top: int = 0
    adapter: Any = None
    paths: Paths | None = None

    def __post_init__(self) -> None:
        self._check_places()
        if not callable(self.metric):
            one_of("metric", self.metric, METRICS, " or a function of the answer's and the foil's log-probabilities")
        one_of("source", self.source, SOURCES)
        if self.direction is None:
            self.direction = "denoising" if self.source == "run" and self.paths is None else "noising"
        one_of("direction", self.direction, DIRECTIONS)
        for name, number, least in (("best", self.best, 1), ("top", self.top, 0)):
            if type(number) is not int or not least <= number <= 1000:
                raise _refused(name, number, f"a number from {least} to 1000")
        self._check_pairs()

    def _check_places(self) -> None:
        each = tuple(map(site_of, (self.sites,) if isinstance(self.sites, str) else tuple(self.sites)))
        if not each or len({*each}) != len(each):
            raise _refused("sites", self.sites, "one site, or a list of different sites")
        for site in each:
            if site not in LAYER_SITES:
                hint = hook_hint(str(site)) or nearest(str(site), LAYER_SITES)
                raise PlanError(f"sites has {site!r}: {hint}", field="sites")
        self.sites = each
        if self.heads is not None and each != ("attn_z",):
            text = 'heads needs sites="attn_z": only there does each dimension belong to a head.'
            raise ParameterError(text, field="heads")
        if self.coarse is not None:
            ok = isinstance(self.coarse, (tuple, list)) and len(self.coarse) == 2
            if not ok or any(type(size) is not int or size < 1 for size in self.coarse):
                raise _refused("coarse", self.coarse, "(layers, positions), the size of the windows that run first")
            if self.positions != "all":
                text = 'coarse needs positions="all": windows are made of all positions.'
                raise ParameterError(text, field="coarse")

    def _check_pairs(self) -> None:
        with about("clean"):
            self.clean = prompts_of(self.clean)[0]
        if self.corrupt is not None:
            with about("corrupt"):
                self.corrupt = prompts_of(self.corrupt)[0]
            if len(self.corrupt) != len(self.clean):
                text = f"corrupt has {len(self.corrupt)} prompts, and clean has {len(self.clean)}."
                raise PromptError(text, field="corrupt")
        elif self.source == "run":
            text = 'corrupt is None. Only ablations (source="zeros" or "mean") work without a corrupt prompt.'
            raise PromptError(text, field="corrupt")
        elif self.direction == "denoising" or self.metric == "recovered":
            text = 'corrupt is None. direction="denoising" and metric="recovered" need a corrupt prompt.'
            raise PromptError(text, field="corrupt")
        if self.foil is None and self.metric == "logit_diff":
            text = 'foil is None, and metric="logit_diff" needs a foil, the token to compare the answer with. Or use metric="logprob".'
            raise PromptError(text, field="foil")
        for name in ("answer", "foil"):
            given = getattr(self, name)
            each = list(given) if isinstance(given, (list, tuple)) else [given] * len(self.clean)
            if len(each) != len(self.clean):
                text = f"{name} has {len(each)} tokens for {len(self.clean)} pairs of prompts. Give one token, or one for each pair."
                raise PromptError(text, field=name)
            setattr(self, name, each)

    @property
    def metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")


def graded(model: Any, answer: Any, foil: Any) -> Answers:
    """The token ids of the answer and, unless it is None, of the foil. Raises PromptError."""
    asked = [answer] if foil is None else [answer, foil]
    with about("answer"):
        (found,) = model._answer_tokens([asked], 1)
    if len({*found.values()}) != len(asked):
        raise PromptError(f"foil is {foil!r}, the same token as the answer. Give another one.", field="foil")
    spaced = {each: with_space(each, token, model.tokenizer) for each, token in found.items()}
    return Answers(found, {each: text for each, text in spaced.items() if text is not None})


def spaces_missing(answers: Answers, missing: Sequence[Sequence[MissingSpace]], pair: int | None) -> list[str]:
    """Warnings about an answer or a foil that most likely lacks the space before it.

    Args:
        answers: the answer and, if there is one, the foil.
        missing: the answers that most likely lack a space after the clean prompt and, if there is one, after the corrupt prompt. The answer
            is looked up after the clean prompt; the foil after the corrupt prompt, if there is one.
        pair: the pair's number; None if there is only one.
    """
    found = list[str]()
    for number, (name, answer) in enumerate(zip(("answer", "foil"), answers, strict=False)):
        which = min(number, len(missing) - 1)
        after = f"the {('clean', 'corrupt')[which]} prompt{'' if pair is None else f' of pair {pair}'}"
        found += [each.warning(f"{name} is", after) for each in missing[which] if each.answer == answer]
    return found


def one_of(name: str, given: Any, allowed: Sequence[str], more: str = "") -> None:
    """Raise ParameterError unless `given` is one of `allowed`. `more`: what else is allowed, for the message."""
    if not isinstance(given, str) or given not in allowed:
        raise _refused(name, given, f"{', '.join(map(repr, allowed))}{more}")


def _refused(name: str, given: Any, allowed: str) -> ParameterError:
    return ParameterError(f"{name} is {given!r}. Allowed: {allowed}.", field=name)


# Paths.

HEADS, MLPS = "attn_z", "mlp_out"


def paths_of(receivers: Any, freeze_mlps: Any) -> Paths:
    """The paths that these arguments of `path_patching` select. Raises ParameterError."""
    if not isinstance(freeze_mlps, bool):
        raise _refused("freeze_mlps", freeze_mlps, "True, False")
    return Paths(_receivers_of(receivers), [HEADS, MLPS] if freeze_mlps else [HEADS])


def _receivers_of(given: Any) -> list[tuple[int, int]] | None:
    """The receivers as pairs of a layer and a head; None for the logits. Raises ParameterError."""
    if isinstance(given, str) and given == "logits":
        return None
    is_list = isinstance(given, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in given)
    heads = list(given) if is_list else [given]
    parts = [each for each in heads if isinstance(each, (list, tuple)) and len(each) == 3 and _is_head(each[:2])]
    if parts:
        raise ParameterError(
            f"receivers has {tuple(parts[0])!r}. A head's queries, keys and values cannot be receivers one by one. "
            f"Give {tuple(parts[0][:2])!r}: the head with all three.",
            field="receivers",
        )
    if not heads or not all(map(_is_head, heads)):
        raise _refused("receivers", given, '"logits", or heads as (layer, head): one, or a list of them')
    return [(layer, head) for layer, head in heads]


def _is_head(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) == 2 and all(type(each) is int for each in given)


# Positions.


def align(base: Sequence[int], other: Sequence[int]) -> list[int | None]:
    """For each token of `base`, the corresponding position in `other`. Tokens between the common prefix and suffix have None.

    Prompts of equal length correspond position by position.
    """
    if len(base) == len(other):
        return list(range(len(base)))
    shorter = min(len(base), len(other))
    prefix = next((i for i in range(shorter) if base[i] != other[i]), shorter)
    suffix = next((i for i in range(shorter - prefix) if base[-1 - i] != other[-1 - i]), shorter - prefix)
    middle = len(base) - prefix - suffix
    return [*range(prefix), *[None] * middle, *range(len(other) - suffix, len(other))]


def columns_of(asked: Any, bases: Sequence[Tokens], others: Sequence[Tokens | None]) -> list[Column]:
    """The columns of the grid.

    Args:
        asked: the argument `positions`.
        bases: the patched prompt of each pair.
        others: the other prompt of each pair; None for sources without another prompt.
    """
    alignments = [
        align(base.ids, base.ids if other is None else other.ids) for base, other in zip(bases, others, strict=True)
    ]
    return [_column(label, groups, alignments) for label, groups in _groups(asked, bases, others, alignments)]


def _groups(
    asked: Any, bases: Sequence[Tokens], others: Sequence[Tokens | None], alignments: Sequence[list[int | None]]
) -> Iterator[tuple[str, list[list[int]]]]:
    """The label of each column, and its positions in each pair's patched prompt."""
    if isinstance(asked, str) and asked == "all":
        lengths = sorted({len(base.ids) for base in bases})
        if len(lengths) > 1:
            raise ParameterError(
                f'positions="all" needs patched prompts of one length; they have {lengths[0]} to {lengths[-1]} tokens. Name the '
                "positions: [-1, Span(...)], or a dict with a list for each pair.",
                field="positions",
            )
        each_alone = ([[position]] * len(bases) for position in range(lengths[0]))
        yield from ((label_of(groups, bases), groups) for groups in each_alone)
        return
    if isinstance(asked, str) and asked == "together":
        yield "all positions", [[i for i, alignment in enumerate(each) if alignment is not None] for each in alignments]
        return
    named = isinstance(asked, Mapping)
    entries = list(asked.items()) if named else [("", entry) for entry in ([asked] if _is_one(asked) else asked)]
    if not entries:
        raise _refused("positions", asked, '"all", "together", positions, Span(text), or a dict of these')
    for label, entry in entries:
        each = entry if named and isinstance(entry, (list, tuple)) else [entry] * len(bases)
        if len(each) != len(bases):
            text = f"positions[{label!r}] has {len(each)} entries for {len(bases)} pairs."
            raise ParameterError(text, field="positions")
        groups = [_found(*pair) for pair in zip(each, bases, others, alignments, strict=True)]
        yield label if named else label_of(groups, bases, entry), groups


def _is_one(entry: Any) -> bool:
    return isinstance(entry, (int, Span, str)) and not isinstance(entry, bool)


def _found(entry: Any, base: Tokens, other: Tokens | None, alignment: list[int | None]) -> list[int]:
    """The positions of one entry: a number, or text of the patched prompt, or else text of the other prompt."""
    if isinstance(entry, (str, Span)):
        span = entry if isinstance(entry, Span) else Span(entry)
        try:
            return base.find(span)
        except PlanError:
            if other is None:
                raise
            in_other = set(other.find(span))
            return [i for i, position in enumerate(alignment) if position in in_other]
    if type(entry) is not int or not -len(base.ids) <= entry < len(base.ids):
        allowed = f"from {-len(base.ids)} to {len(base.ids) - 1} in this prompt, or text in it"
        raise PlanError(f"positions has {fields.shown(entry)}. Allowed: {allowed}.", field="positions")
    return [entry % len(base.ids)]


def label_of(groups: Sequence[list[int]], bases: Sequence[Tokens], entry: Any = None) -> str:
    """The label of a column without a name: its tokens if they are the same in all pairs, or else its positions.

    Args:
        groups: the column's positions in each pair's patched prompt.
        entry: what the caller gave for the column. It is the label if the positions differ between pairs, too.
    """
    texts = {"".join(base.texts[i] for i in group) for base, group in zip(bases, groups, strict=True)}
    if len(texts) == 1:
        return texts.pop()
    if any(group != groups[0] for group in groups):
        return f"position {entry}" if isinstance(entry, int) else getattr(entry, "text", entry)  # type: ignore[no-any-return]
    return f"position{'s' * (len(groups[0]) > 1)} {fields.ranges(groups[0])}"


def _column(label: str, groups: list[list[int]], alignments: Sequence[list[int | None]]) -> Column:
    positions: list[list[int] | None] = []
    sources: list[list[int] | None] = []
    for group, alignment in zip(groups, alignments, strict=True):
        counterparts = [source for position in group if (source := alignment[position]) is not None]
        is_aligned = bool(group) and len(counterparts) == len(group)
        positions.append(list(group) if is_aligned else None)
        sources.append(counterparts if is_aligned else None)
    return Column(label, positions, sources)


def windows_of(grid: Grid, size: tuple[int, int], bases: Sequence[Tokens]) -> Grid:
    """The grid, divided into windows of `size`, which is (layers, positions). Positions without a counterpart belong to no window.

    Args:
        grid: with a column for each position.
        bases: the patched prompt of each pair.
    """
    layers, step = size
    rows = [[layer for row in grid.layers[i : i + layers] for layer in row] for i in range(0, len(grid.layers), layers)]
    pairs = range(len(grid.columns[0].positions))
    found = []
    for start in range(0, len(grid.columns), step):
        part = grid.columns[start : start + step]
        positions, sources = (
            [[i for column in part for i in getattr(column, name)[pair] or ()] or None for pair in pairs]
            for name in ("positions", "sources")
        )
        group = list(range(start, start + len(part)))
        found.append(Column(label_of([group] * len(bases), bases), positions, sources))
    return Grid(grid.sites, rows, grid.heads, found)


# Layers and heads.


def rows_of(layers: Any, sites: Sequence[str], facts: ModelFacts) -> list[list[int]]:
    """One row for each layer. Raises PlanError for a layer that the model does not have, or that lacks one of the sites."""
    have = [layer for layer in range(facts.num_layers) if all((site, layer) in facts.widths for site in sites)]
    if isinstance(layers, str) and layers == "all":
        if not have:
            text = f"sites has {', '.join(sites)}, and no layer of this model has all of them."
            raise PlanError(text, field="sites")
        return [[layer] for layer in have]
    given = [layers] if isinstance(layers, int) else list(layers) if not isinstance(layers, str) else layers
    if not given or isinstance(given, str) or any(type(layer) is not int for layer in given):
        raise _refused("layers", layers, '"all", a layer, or a list of layers')
    given = [layer + facts.num_layers if -facts.num_layers <= layer < 0 else layer for layer in given]
    for layer in given:
        if layer not in have:
            text = f"layers has {layer}. Layers of this model with {', '.join(sites)}: {fields.ranges(have)}."
            raise PlanError(text, field="layers")
    return [[layer] for layer in given]


def heads_of(heads: Any, count: int) -> list[int] | None:
    """The heads to patch one by one. Raises ParameterError."""
    if heads is None:
        return None
    given = list(range(count)) if isinstance(heads, str) and heads == "all" else heads
    given = [given] if type(given) is int else given
    if (
        not isinstance(given, (list, tuple, range))
        or not given
        or any(type(head) is not int or not 0 <= head < count for head in given)
    ):
        raise _refused("heads", heads, f'"all", or heads from 0 to {count - 1}')
    return list(given)


def cells_in_order(grid: Grid) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The site and index of every cell. The order begins with a coarse grid and goes to finer ones, so figures take shape early."""
    indexes: list[tuple[int, ...]] = [()]
    for size in grid.shape:
        indexes = [(*index, i) for index in indexes for i in range(size)]
    indexes.sort(key=lambda index: -min(_twos(index[0]), _twos(index[-1])))
    return ((site, index) for index in indexes for site in grid.sites)


def _twos(number: int) -> int:
    """How many times 2 divides the number, but at most 3."""
    return next((i for i in range(3) if number >> i & 1), 3)
