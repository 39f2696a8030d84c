"""`model.vectors`: the named vectors of a model.

model.vectors["truth"] = tensor                         # [hidden]
model.vectors.load("directions.safetensors")
model.generate(prompts, plan=Steer("resid_post", layers=14, vector="truth", scale=2.0))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from midstream.plan.fields import nearest
from midstream.plan.vectors import Named, Vector, as_vector, load_vectors

Changes = tuple[dict[str, Vector], list[str]]


class Vectors(MutableMapping[str, Vector]):
    """Name to vector. A plan that names one gets what has that name when the request is submitted.

    Args:
        changed: called after each change; it may `take_changes` to where they are needed.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._vectors: dict[str, Vector] = {}
        self._changed = changed
        self._set: dict[str, Vector] = {}
        self._deleted: list[str] = []

    def __getitem__(self, name: str) -> Vector:
        if name not in self._vectors:
            raise KeyError(f"no vector {name!r}: {nearest(str(name), self._vectors)}")
        return self._vectors[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._put({name: as_vector(f"vectors[{name!r}]", value)})

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._vectors[name]
        self._set.pop(name, None)
        self._deleted.append(name)
        self._changed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __repr__(self) -> str:
        return f"<vectors: {', '.join(f'{name} [{vector.width}]' for name, vector in self.items()) or 'none'}>"

    def load(self, path: str | os.PathLike[str]) -> list[str]:
        """Register every vector of a safetensors file under its name there; the names.

        Raises PlanError for a file that is none, or that holds anything but vectors `[hidden]` of finite numbers.
        """
        loaded = load_vectors(path)
        self._put(loaded)
        return list(loaded)

    @property
    def widths(self) -> dict[str, int]:
        return {name: vector.width for name, vector in self._vectors.items()}

    @property
    def digests(self) -> dict[str, str]:
        return {name: vector.digest for name, vector in self._vectors.items()}

    def take_changes(self) -> Changes:
        """What was set and what was deleted since the last call; deletions come first."""
        changes = self._set, self._deleted
        self._set, self._deleted = {}, []
        return changes

    def put_back(self, changes: Changes) -> None:
        """Changes that did not get where they were taken to."""
        self._set = {**changes[0], **self._set}
        self._deleted = changes[1] + self._deleted

    def _put(self, vectors: dict[str, Vector]) -> None:
        for name in vectors:
            Named(name)  # refuses what cannot be a name
        self._vectors |= vectors
        self._set |= vectors
        self._changed()
