"""Which tokens of a request are captured, or are keys of a `Knockout`: selectors, which plans name, and the `Selection` that they make
for one request.

A selector from outside the package is one class:

    @dataclass(frozen=True)
    class Every(Selector):
        kind = "every"
        n: int

        def of_generated(self, numbers):
            return numbers % self.n == 0

    Capture("resid_post", layers=3, positions=Every(3))

A package offers it by an entry point in the group `midstream.selectors` that names the class, so that every process of an engine finds it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, NamedTuple

import numpy as np

from midstream.errors import CaptureError, MidstreamError, PlanError
from midstream.plan import fields

GROUP = "midstream.selectors"
NO_POSITIONS = np.empty(0, np.int64)
_kinds: dict[str, type[Selector]] = {}


class Selector:
    """Base of selectors: frozen dataclasses of strings, numbers, booleans, None and tuples of these.

    A selector must depend on positions only and always decide alike: the engine asks it in each step, and the client for the whole request.

    Attributes:
        kind: its unique name on the wire.
        selects_generated: whether it may select rows of generated tokens: true if its class defines `of_generated`. An instance may have
            its own.
    """

    kind: ClassVar[str] = ""
    selects_generated = False

    def __init_subclass__(cls) -> None:
        cls.selects_generated = cls.of_generated is not Selector.of_generated
        if (taken := _kinds.get(cls.kind, cls)).__qualname__ != cls.__qualname__:
            raise ValueError(f"The kind {cls.kind!r} is taken by {taken.__qualname__}.")
        if cls.kind:
            _kinds[cls.kind] = cls

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Which of the prompt's positions are selected: bool `[positions]`. `length`: of the prompt, in tokens."""
        return np.zeros(positions.size, bool)

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        """Which of the generated tokens with these numbers, counted from 0, are selected: bool `[numbers]`."""
        return np.zeros(numbers.size, bool)

    @property
    def options(self) -> dict[str, Any]:
        """Its fields in their wire form."""
        return fields.plain(type(self).__name__, dataclasses.asdict(self))  # type: ignore[call-overload, no-any-return]


@functools.cache
def _installed() -> None:
    """Load the selectors of installed packages; each registers itself."""
    for entry in entry_points(group=GROUP):
        entry.load()


def made(place: str, kind: Any, options: dict[str, Any]) -> Selector:
    """The selector of this kind. Raises PlanError if the kind is unknown, or if the selector refuses the options."""
    _installed()
    if not isinstance(kind, str) or kind not in _kinds:
        own = f"a selector of your own needs an entry point in the group {GROUP!r}, installed where the engine runs"
        allowed = f"the kind of a selector: {fields.nearest(str(kind), _kinds)} And {own}"
        raise fields.refuse(place, fields.shown(kind), allowed)
    try:
        return _kinds[kind](**{name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})
    except MidstreamError:
        raise
    except Exception as error:
        raise PlanError(f"{place}: {kind} with {fields.shown(options)}: {error}.") from error


class _LastPrompt(Selector):
    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return positions == length - 1  # type: ignore[no-any-return]


class _AllPrompt(Selector):
    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return np.ones(positions.size, bool)


class _AllGenerated(Selector):
    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return np.ones(numbers.size, bool)


class _All(_AllPrompt, _AllGenerated):
    pass


@dataclass(frozen=True)
class _Listed(Selector):
    positions: fields.Span | tuple[int, ...]

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return np.isin(positions, fields.resolved("Capture.positions", self.positions, length))


WORDS = {
    "last_prompt": _LastPrompt(),
    "all_prompt": _AllPrompt(),
    "all_generated": _AllGenerated(),
    "all": _All(),
}


@dataclass(frozen=True)
class Subsample(Selector):
    """A random part of the tokens, the same in every run: `Capture("resid_post", layers=14, positions=Subsample(0.1, skip=1))`.

    A hash of the seed, the prompt's length and the position decides, so the share of tokens is close to `fraction`, not equal to it. A
    selector does not know the tokens, so prompts of the same length get the same positions. `Subsample(1.0, skip=1)` selects all tokens but
    the first.

    Args:
        fraction: the share of tokens, from 0 to 1.
        skip: how many positions to leave out at the beginning of the prompt. The first token often is an attention sink with a far larger
            norm than others (Xiao et al. 2023, arXiv:2309.17453).
        of: "all_prompt", "all_generated" or "all".
        seed: another seed selects other tokens.
    """

    kind: ClassVar[str] = "subsample"

    fraction: float
    skip: int = 0
    of: str = "all_prompt"
    seed: int = 0

    def __post_init__(self) -> None:
        fields.settle(
            self,
            fraction=fields.number("Subsample.fraction", self.fraction, 0.0, 1.0),
            skip=fields.integer("Subsample.skip", self.skip, 0),
            of=fields.one_of("Subsample.of", self.of, ("all_prompt", "all_generated", "all")),
            seed=fields.integer("Subsample.seed", self.seed, 0),
        )
        fields.settle(self, selects_generated=self.of != "all_prompt")

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        if self.of == "all_generated":
            return np.zeros(positions.size, bool)
        return (positions >= self.skip) & (_hashed(positions, self.seed, length) < self.fraction)

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        if not self.selects_generated:
            return np.zeros(numbers.size, bool)
        return _hashed(numbers, self.seed, 0) < self.fraction  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GeneratedTokens(Selector):
    """Generated tokens by their numbers: `Capture("resid_post", layers=14, positions=GeneratedTokens([0, 5]))`.

    After a prompt of P tokens, generated token n is at position P + n.

    Args:
        numbers: one or several, counted from 0.
    """

    kind: ClassVar[str] = "generated"

    numbers: Any

    def __post_init__(self) -> None:
        allowed = "a number or a sequence of numbers, counted from 0"
        fields.settle(self, numbers=tuple(sorted(fields.integers("GeneratedTokens.numbers", self.numbers, allowed, 0))))

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return np.isin(numbers, self.numbers)


def _hashed(numbers: np.ndarray, *keys: int) -> np.ndarray:
    """A number in [0, 1) for each of `numbers`: splitmix64 (Steele et al. 2014), once for each key and once for the number."""
    state = np.zeros(1, np.uint64)
    for each in (*keys, numbers):
        state = (state + np.asarray(each, np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) * 2.0**-53  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Without(Selector):
    """Another selection without some positions of the prompt: what `collect(skip_special_tokens=True)` captures of a prompt.

    Args:
        positions: a `Capture.positions` that is not a `Span`.
        left_out: positions, counted from the start.
    """

    kind: ClassVar[str] = "without"

    positions: Any
    left_out: tuple[int, ...]

    def __post_init__(self) -> None:
        positions = self.positions
        if isinstance(positions, dict):  # from the wire
            positions = made("Without.positions", positions.get("selector"), positions.get("options", {}))
        elif not isinstance(positions, Selector):
            positions = fields.positions("Without.positions", positions, tuple(WORDS))
        left_out = tuple(fields.integer("Without.left_out", position, 0) for position in self.left_out)
        fields.settle(self, positions=positions, left_out=left_out)
        fields.settle(self, selects_generated=selector_of(positions).selects_generated)

    @property
    def options(self) -> dict[str, Any]:
        base: Any = self.positions
        if isinstance(base, Selector):
            base = {"selector": base.kind, "options": base.options}
        return fields.plain("Without", {"positions": base, "left_out": self.left_out})  # type: ignore[no-any-return]

    def of_prompt(self, positions: np.ndarray, length: int) -> np.ndarray:
        return selector_of(self.positions).of_prompt(positions, length) & ~np.isin(positions, self.left_out)

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return selector_of(self.positions).of_generated(numbers)


def checked(field: str, given: Any) -> Any:
    """The value of a field that takes positions, a `Span`, one of `WORDS` or a selector. Raises PlanError for anything else."""
    if not isinstance(given, Selector):
        return fields.positions(field, given, tuple(WORDS))
    allowed = "a frozen dataclass of plain data, with a kind"
    try:
        hash(given), given.options
    except TypeError as error:
        raise fields.refuse(field, f"{given!r} ({error})", allowed) from error
    if not given.kind:
        raise fields.refuse(field, repr(given), allowed)
    return given


def selector_of(positions: Any) -> Selector:
    """The selector for a value that `checked` returns, other than a `Span`."""
    if isinstance(positions, Selector):
        return positions
    return WORDS[positions] if isinstance(positions, str) else _Listed(positions)


class SelectedHeads(NamedTuple):
    """Heads of a site.

    Attributes:
        head: a head, or several in the order in which they are wanted.
        head_dim: the width of each.
    """

    head: int | tuple[int, ...]
    head_dim: int

    @property
    def width(self) -> int:
        """The width of all these heads together."""
        return self.head_dim * (1 if isinstance(self.head, int) else len(self.head))

    def of(self, rows: Any) -> Any:
        """These heads of rows `[rows, width]`: `[rows, head_dim]` of one, `[rows, heads, head_dim]` of several."""
        heads = [self.head] if isinstance(self.head, int) else list(self.head)
        if not len(rows):  # their width may be unknown
            found = rows.new_empty(0, len(heads), self.head_dim)
        else:
            found = rows.unflatten(1, (-1, self.head_dim))[:, heads]  # a copy, so the other heads can be freed
        return found[:, 0] if isinstance(self.head, int) else found


class Selection(NamedTuple):
    """Which rows of one request are captured, and in which dtype and with which heads they are returned.

    Attributes:
        prompt: int64, the selected positions of the prompt, ascending.
        length: of the prompt.
        generated: selectors of the generated tokens' rows.
        dtype: of the returned rows; None for the model's.
        heads: the heads of each row to return; None for the whole row.
    """

    prompt: np.ndarray
    length: int
    generated: tuple[Selector, ...] = ()
    dtype: str | None = None
    heads: SelectedHeads | None = None

    @classmethod
    def of(cls, positions: Any, length: int, dtype: str | None = None) -> Selection:
        """The rows that a `Capture` with these positions selects for a prompt of `length` tokens.

        Raises PlanError for a position outside of the prompt, for an unresolved span, and for a selector that does not return a bool for
        each position.
        """
        selector = selector_of(positions)
        if selector.selects_generated:
            _chosen(PlanError, selector, selector.of_generated, np.arange(1))
        generated = (selector,) if selector.selects_generated else ()
        selected = _chosen(PlanError, selector, selector.of_prompt, np.arange(length), length)
        return cls(np.flatnonzero(selected), length, generated, dtype)

    def mask(self, positions: np.ndarray) -> np.ndarray:
        """Which of the positions are selected. Raises CaptureError for a selector that does not return a bool for each."""
        keep = np.zeros(positions.size, bool)
        if self.prompt.size:
            place = np.searchsorted(self.prompt, positions)
            keep = self.prompt[np.minimum(place, self.prompt.size - 1)] == positions
        late = np.flatnonzero(positions >= self.length) if self.generated else ()
        for selector in self.generated if len(late) else ():
            keep[late] |= _chosen(CaptureError, selector, selector.of_generated, positions[late] - self.length)
        return keep

    def below(self, stop: int | None) -> np.ndarray:
        """All selected positions below `stop`. If it is None, those of the prompt, since the number of generated tokens is unknown."""
        if stop is None:
            return self.prompt
        generated = np.arange(self.length, stop)
        return np.concatenate([self.prompt[self.prompt < stop], generated[self.mask(generated)]])

    def __or__(self, other: Selection) -> Selection:
        """The rows of both, for the same request. Raises PlanError if their dtypes or their heads differ."""
        if self.dtype != other.dtype:
            raise PlanError(
                f"Two captures of one site and layer that go to the same place have the dtypes {self.dtype} and {other.dtype}. Give them "
                "one dtype, or two places."
            )
        if self.heads != other.heads:
            given = [None if heads is None else heads.head for heads in (self.heads, other.heads)]
            raise PlanError(
                f"Two captures of one site and layer that go to the same place have the heads {given[0]} and {given[1]} (Capture.head). "
                "Give them one head=, or two places.",
                field="Capture.head",
            )
        generated = tuple(dict.fromkeys(self.generated + other.generated))
        return Selection(np.union1d(self.prompt, other.prompt), self.length, generated, self.dtype, self.heads)


def _chosen(
    error: type[MidstreamError],
    selector: Selector,
    choose: Callable[..., np.ndarray],
    positions: np.ndarray,
    *more: int,
) -> np.ndarray:
    """The return value of a selector's method. Raises `error` unless it is a bool for each position."""
    try:
        found = np.asarray(choose(positions, *more))
    except MidstreamError:
        raise
    except Exception as raised:
        raise error(f"{selector!r}: {choose.__name__} raised {type(raised).__name__}: {raised}") from raised
    if found.dtype != bool or found.shape != positions.shape:
        given = fields.shown(found)
        raise error(f"{selector!r}: {choose.__name__} returned {given}; allowed: bool {list(positions.shape)}.")
    return found


class MaskAhead:
    """The mask of a selection from position 0 on. It asks the selectors about more positions than needed, so that few steps ask."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._mask = np.zeros(0, bool)

    def below(self, stop: int) -> np.ndarray:
        """bool `[stop]`. Raises CaptureError for a selector that fails."""
        if stop > len(self._mask):
            try:
                self._mask = self._selection.mask(np.arange(max(2 * stop, 256)))
            except CaptureError:  # a selector may refuse positions so far ahead
                self._mask = self._selection.mask(np.arange(stop))
        return self._mask[:stop]
