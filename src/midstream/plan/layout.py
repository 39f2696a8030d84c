"""What a captured row holds, and where in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Self

Key = tuple[str, int, str]  # site, layer, when


class Plane(NamedTuple):
    """One site's value in a captured row: `row[offset : offset + width]`."""

    site: str
    layer: int
    when: str
    offset: int
    width: int


class Layout(tuple[Plane, ...]):
    """The planes of a row. The rows of many requests have the same one, which therefore keeps what can be told of it."""

    _keys: Mapping[Key, Any] | None = None  # what `has_just` last said yes to

    @classmethod
    def of(cls, keys: Iterable[Key], width: Callable[[str, int], int]) -> Self:
        """These planes one after another, each as wide as its site at its layer."""
        planes, offset = [], 0
        for site, layer, when in keys:
            planes.append(Plane(site, layer, when, offset, width(site, layer)))
            offset += planes[-1].width
        return cls(planes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def by_key(self) -> dict[Key, Plane]:
        return {(plane.site, plane.layer, plane.when): plane for plane in self}

    def has_just(self, keys: Mapping[Key, Any]) -> bool:
        """Whether it has a plane for each of the keys and no other.

        Quick where the last yes was for the same mapping, which must not change.
        """
        if self._keys is not keys:
            if self.by_key.keys() != keys.keys():
                return False
            self._keys = keys
        return True

    @cached_property
    def width(self) -> int:
        """Up to the end of the last plane, in elements."""
        return max((plane.offset + plane.width for plane in self), default=0)

    def __reduce__(self) -> Any:
        return Layout, (tuple(self),)


EMPTY = Layout()
