"""Checks of single fields. Every message names the field, the given value and the allowed ones."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from midstream.errors import PlanError
from midstream.sites import HEAD_SITES, LAYER_SITES, MODEL_SITES, hook_hint, site_of

# No layer, position or token is larger, and the engine's int32 tables hold no larger number.
MAX_INDEX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
T = TypeVar("T")
LONGEST_NAME = 256  # of a vector or a run
_MOST_COMPARED = 1 << 17  # pairs of letters in a search for similar names, which takes about 20 ms


def refuse(field: str, given: str, allowed: str) -> PlanError:
    """The error for a field whose value is not allowed."""
    return PlanError(f"{field} is {given}; allowed: {allowed}{'' if allowed.endswith('?') else '.'}", field=field)


def mapping(
    place: str, value: Any, required: Sequence[str] = (), optional: Sequence[str] = (), kind: str = ""
) -> dict[str, Any]:
    """A dict with string keys. It has all `required` keys, and no others than the `optional` ones, if either is given.

    `kind`: what the dict stands for, for messages.
    """
    named = f"{place} ({kind})" if kind else place
    if not isinstance(value, dict):
        raise refuse(place, shown(value), "a dict")
    for key in required:
        if key not in value:
            raise PlanError(f"{named} has no {key!r}; it has {shown(list(value))}.", field=place)
    known = [*required, *optional]
    for key in value:
        if not isinstance(key, str):
            raise PlanError(f"a key of {place} is {shown(key)}; allowed: a string.", field=place)
        if known and key not in known:
            raise PlanError(f"{named} has an unknown key {shown(key)}: {nearest(key, known)}", field=place)
    return value


@contextlib.contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Add the value's place in the plan to errors."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}", field=place) from error


def shown(value: Any) -> str:
    """Any value as short text."""
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {list(shape)} and dtype {value.dtype}"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} items"
    try:
        text = repr(value[:100] if isinstance(value, (str, bytes)) else value)
    except Exception:  # a user's object may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, names: Iterable[str]) -> str:
    """The names most similar to `name`, else all of them, as the end of a message."""
    there = sorted(set(names))
    few = len(name) * sum(map(len, there)) <= _MOST_COMPARED  # a server's clients choose the names
    near = difflib.get_close_matches(name, there, 3, 0.5) if few else []
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    listed = f"{', '.join(map(repr, there[:20]))}{', ...' if len(there) > 20 else ''}"
    return f"there are {listed or 'none'}"


def explained(cls: type[T]) -> type[T]:
    """Make a dataclass raise PlanError, with the name of the field, if a field is missing or unknown."""
    init = cls.__init__

    @functools.wraps(init)
    def explaining(self: T, *given: Any, **named: Any) -> None:
        try:
            init(self, *given, **named)
        except TypeError:
            if problem := _mismatch(cls, given, named):
                raise PlanError(problem) from None
            raise

    cls.__init__ = explaining  # type: ignore[assignment, method-assign]
    return cls


def _mismatch(cls: Any, given: Sequence[Any], named: Collection[str]) -> str | None:
    there = {field.name: field for field in dataclasses.fields(cls)}
    placed = [name for name, field in there.items() if not field.kw_only]
    if len(given) > len(placed):
        return f"{cls.__name__} takes {', '.join(placed)} by position, and by name: {', '.join(n for n in there if n not in placed)}."
    for name in named:
        if name not in there:
            return f"{cls.__name__} has no {name}: {nearest(name, there)}"
        if name in placed[: len(given)]:
            return f"{cls.__name__}.{name} was given twice, by position and by name."
    needed = [name for name, field in there.items() if field.default is dataclasses.MISSING]
    missing = [name for name in needed[len(given) :] if name not in named]
    return f"{cls.__name__} needs {', '.join(missing)}." if missing else None


def settle(value: Any, **attributes: Any) -> None:
    """Put checked values into a frozen dataclass."""
    for name, attribute in attributes.items():
        object.__setattr__(value, name, attribute)


def number(field: str, value: Any, low: float = -math.inf, high: float = math.inf, *, unbounded: bool = False) -> float:
    """A real number in `[low, high]`; finite unless `unbounded`, and never NaN."""
    allowed = f"a number from {low:g} to {high:g}" if math.isfinite(low) else "a finite number that float32 can hold"
    allowed = "a number, or infinity for no bound" if unbounded else allowed
    if hasattr(value, "detach") and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise refuse(field, shown(value), allowed)
    try:
        found = float(value)
    except OverflowError as error:
        raise refuse(field, "too large", allowed) from error
    fits = abs(found) <= FLOAT32_MAX or (unbounded and math.isinf(found))
    if not (fits and low <= found <= high):  # NaN fails this test
        raise refuse(field, shown(value), allowed)
    return found


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise refuse(field, shown(value), "True or False")
    return bool(value)


def one_of(field: str, value: Any, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise refuse(field, shown(value), " or ".join(map(repr, choices)))
    return value


def text(field: str, value: Any) -> str:
    """A string that is not empty and can be encoded in UTF-8."""
    if not isinstance(value, str) or not value:
        raise refuse(field, shown(value), "a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refuse(field, shown(value), "a string that UTF-8 can hold") from error
    return value


def name(field: str, value: Any) -> str:
    """A name that can stand in a list, a message and a URL."""
    found = text(field, value)
    if not found.isprintable() or len(found) > LONGEST_NAME or {".", ".."} & set(found.split("/")):
        allowed = (
            f"up to {LONGEST_NAME} printable characters in one line, none of its parts between slashes '.' or '..'"
        )
        raise refuse(field, shown(value), allowed)
    return found


def integer(field: str, value: Any, low: int = -MAX_INDEX, high: int = MAX_INDEX) -> int:
    """An integer in `[low, high]`, also numpy's."""
    if type(value) is int and low <= value <= high:  # the quick case: a plan may have thousands
        return value
    allowed = "a whole number, 0 or more" if low == 0 else "a whole number"
    if isinstance(value, (bool, np.bool_)) or (
        isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
    ):
        raise refuse(field, shown(value), allowed)
    try:
        found = operator.index(value)
    except Exception as error:  # a tensor's own errors among them
        raise refuse(field, shown(value), allowed) from error
    if not low <= found <= high:
        raise refuse(field, shown(found), allowed)
    return found


def integers(field: str, value: Any, allowed: str, low: int = -MAX_INDEX, *, distinct: bool = True) -> tuple[int, ...]:
    """One integer or several as a tuple in the given order; they must differ if `distinct`."""
    if isinstance(value, (str, bytes)) or not (_is_many(value) or hasattr(value, "__index__")):
        raise refuse(field, shown(value), allowed)
    if not _is_many(value):
        return (integer(field, value, low),)
    found = tuple(integer(f"{field}[{i}]", item, low) for i, item in enumerate(value))
    if not found:
        raise refuse(field, "empty", allowed)
    if distinct and len(set(found)) < len(found):
        twice, _ = Counter(found).most_common(1)[0]
        raise refuse(field, f"{shown(value)}, which has {twice} twice", "each once")
    return found


def _is_many(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0 or isinstance(value, (Sequence, range))


def layers(field: str, value: Any) -> str | tuple[int, ...]:
    """`"all"`, or layers in ascending order."""
    if isinstance(value, str) and value == "all":
        return "all"
    allowed = "'all', a layer or a sequence of layers, counted from 0"
    return tuple(sorted(integers(field, value, allowed)))


def heads(field: str, value: Any, site: str) -> int | tuple[int, ...]:
    """A head of a site, or several in the given order."""
    if site not in HEAD_SITES:
        raise refuse(field, f"{shown(value)} at {site}", f"None, since only {', '.join(HEAD_SITES)} has heads")
    found = integers(field, value, "a head or a sequence of heads, counted from 0", 0)
    return found if _is_many(value) else found[0]


def site(field: str, value: Any) -> str:
    """A site that plans may name, also by the name of its standard accessor: `layers_output` is `resid_post`."""
    value = site_of(value)
    if not isinstance(value, str) or value not in LAYER_SITES:
        of_model = isinstance(value, str) and value in MODEL_SITES
        given = f"{value!r}, which a trace can reach but a plan cannot" if of_model else shown(value)
        hint = hook_hint(value) if isinstance(value, str) else ""
        raise refuse(field, given, f"{', '.join(LAYER_SITES)}{f'; {hint}' if hint else ''}")
    return value


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges, for messages: "0 to 3, 7"."""
    ordered = sorted(set(numbers))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    found = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(found[:20]) + (", ..." if len(found) > 20 else "") if found else "none"


def plain(field: str, value: Any, depth: int = 8) -> Any:
    """A deep copy of plain data: strings, numbers, booleans, None, and lists and dicts of them."""
    allowed = "strings, finite numbers, booleans, None, and lists and dicts of them, nested up to 8 deep"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(field, value) if value else value
    if (isinstance(value, int) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)) and depth:
        return [plain(f"{field}[{i}]", item, depth - 1) for i, item in enumerate(value)]
    if isinstance(value, dict) and depth:
        return {
            text(f"a key of {field}", key): plain(f"{field}[{key!r}]", item, depth - 1) for key, item in value.items()
        }
    raise refuse(field, shown(value), allowed)


# ------------------------------------------------------------------------------------------------------------ positions


@dataclass(frozen=True)
class Span:
    """The tokens of the prompt that overlap `text`: `Span("Paris")`, or `Span("Paris", 1)` for its second occurrence.

    `resolve_spans` turns it into positions on the client, which has the tokenizer.
    """

    text: str
    occurrence: int = 0

    def __post_init__(self) -> None:
        text("Span.text", self.text)
        settle(self, occurrence=integer("Span.occurrence", self.occurrence, 0))


def positions(field: str, value: object, words: tuple[str, ...] = ()) -> str | tuple[int, ...] | Span:
    """Positions as users give them: one or several, a `Span`, or one of `words`. Raises PlanError."""
    if isinstance(value, Span) or (isinstance(value, str) and value in words):
        return value
    listed = f"{', '.join(map(repr, words))}, " if words else ""
    return integers(field, value, f"{listed}a position, a sequence of positions, or Span(text)")


def span_positions(
    span: Span, text: str, offsets: Sequence[tuple[int, int]], field: str = "the span"
) -> tuple[int, ...]:
    """The positions of the tokens that overlap the span's text. Raises PlanError as `resolve_spans`."""
    begin = -len(span.text)
    for _ in range(span.occurrence + 1):  # counted as `str.count` does, without overlaps
        begin = text.find(span.text, begin + len(span.text))
        if begin < 0:
            found = text.count(span.text)
            there = f"stands there {found} time{'s' if found != 1 else ''}" if found else "does not stand there"
            given = f"{span} in the prompt {shown(text)}, which {there}"
            raise refuse(field, given, "a text that the prompt has; occurrence from 0")
    end = begin + len(span.text)
    positions = tuple(i for i, (first, last) in enumerate(offsets) if first < end and begin < last and first < last)
    if not positions:
        text = f"{field} is {span}, at characters {begin} to {end} of the prompt, which no token stands for."
        raise PlanError(text, field=field)
    return positions


def resolved(field: str, positions: Span | Sequence[int], length: int, of: str = "the prompt") -> list[int]:
    """Positions counted from the start, in the given order. Raises PlanError for one outside, or for a `Span`, which needs the text."""
    if isinstance(positions, Span):
        given = f"{positions}, which needs the prompt's text"
        raise refuse(field, given, "positions where the prompt was given as token ids or embeddings")
    if len(positions) == 1 and -length <= positions[0] < length:  # quick: a plan may have thousands of these
        return [positions[0] % length]
    given_P = np.fromiter(positions, np.int64)
    outside = (given_P < -length) | (given_P >= length)
    if outside.any():
        allowed = f"from {-length} to {length - 1}, since {of} has {length} tokens"
        raise refuse(field, str(given_P[outside][0]), allowed)
    return np.where(given_P < 0, given_P + length, given_P).tolist()  # type: ignore[no-any-return]
