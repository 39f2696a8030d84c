"""The user's names for modules: `rename={"transformer.h": "layers", "mlp": "ffn"}` also gives `model.layers[0].ffn`."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from midstream.errors import ArchitectureError

Rename = Mapping[Any, str | Sequence[str]]  # keys are names, paths, or classes of modules
_TAKEN = frozenset({"output", "input", "inputs", "source", "skip", "trace", "run", "generate", "edit"})


class Aliases:
    """Other names of modules.

    Args:
        rename: maps keys to other names. A key is a path, which may be a single name (`"mlp"`); the module there gets the other name at
            every module where the path begins: `"mlp"` at each layer, `"transformer.h"` at the model. A `*` in a path stands for any one
            name, and each matching module gets the other name at the module matched by the last `*`: `"layers.*.self_attn"` at each layer.
            If the path matches only one module, that module also has the name where the path begins. A key may be a class of modules, which
            then have the other name at their parent modules. A value is the other name, or a list of them. A key that matches no module is
            skipped, so that one `rename` serves several architectures; `warn` reports if no key matches.
        modules: path -> module, to find the modules of a class.
    """

    def __init__(self, rename: Rename | None = None, modules: Mapping[str, Any] | None = None) -> None:
        given = {key: [value] if isinstance(value, str) else list(value) for key, value in (rename or {}).items()}
        self.rename: dict[str, list[str]] = {
            key.lstrip("."): names for key, names in given.items() if isinstance(key, str)
        }
        self.classes = {key: names for key, names in given.items() if not isinstance(key, str)}
        self._modules = modules or {}
        self._table: tuple[Collection[str], int, dict[tuple[str, str], str]] = ((), 0, {})

    def resolve(self, path: str, name: str, known: Collection[str]) -> str | None:
        """The path of the module that the module at `path` calls by the alias `name`; None if there is no such alias."""
        return self.table(known).get((path, name)) if self.rename or self.classes else None

    def table(self, known: Collection[str]) -> Mapping[tuple[str, str], str]:
        """(path of a module, an alias that it has) -> path of the module that the alias stands for."""
        of, size, found = self._table
        if of is not known or size != len(known):  # the size differs if modules were attached
            found = {}
            for owner, name, path, _ in self._found(known):
                found.setdefault((owner, name), path)
            self._table = known, len(known), found
        return found

    def _found(self, known: Collection[str]) -> Iterator[tuple[str, str, str, str]]:
        """For each alias: the path of the module that has it, the alias, the path of the module that it stands for, and its key as text."""
        for key, names, places in self._places(known):
            for owner, path in places:
                yield from (
                    (owner, name, path, key) for name in names if (f"{owner}.{name}" if owner else name) != path
                )

    def _places(self, known: Collection[str]) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
        """Each key as text, its names, and pairs of paths (owner, module): the owner has the names as aliases of the module."""
        for key, names in self.rename.items():
            fitting: dict[str, list[str]] = {}  # by the module where the key begins
            for path in known:
                if path and ends_with(path, key):
                    fitting.setdefault(_above(path, key.count(".") + 1), []).append(path)
            levels = key.rpartition("*")[2].count(".")
            for owner, paths in fitting.items():
                places = [(owner, paths[0])] if len(paths) == 1 else []
                places += [(_above(path, levels), path) for path in paths if "*" in key and levels]
                yield repr(key), names, places
        for kind, names in self.classes.items():
            yield kind.__name__, names, [(_above(path, 1), path) for path in self._of_class(kind)]

    def _of_class(self, kind: type) -> list[str]:
        return [path for path, module in self._modules.items() if path and isinstance(module, kind)]

    def warn(self, known: Collection[str]) -> None:
        """Warn if none of the keys names a module."""
        if (self.rename or self.classes) and not any(places for _, _, places in self._places(known)):
            keys = ", ".join([*map(repr, self.rename), *(kind.__name__ for kind in self.classes)])
            there = ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in known if path))
            warnings.warn(
                f"rename: no module of this model is called {keys}. Its modules are {there[:1000]}.", stacklevel=4
            )

    def by_path(self) -> dict[str, list[str]]:
        """`rename`, with the paths of modules in place of their classes."""
        return {**self.rename, **{path: names for kind, names in self.classes.items() for path in self._of_class(kind)}}

    def check(self, known: Collection[str], roles: Collection[str] = ()) -> None:
        """Raise ArchitectureError if a module already has a child or attribute of an alias's name, or several children of an aliased class.

        Aliases in `roles` may also be names of children: they state a module's role in the model.
        """
        for kind, names in self.classes.items():
            for owner, count in Counter(_above(path, 1) for path in self._of_class(kind)).items():
                if count > 1:
                    reason = f"{owner or 'the model'} has {count} modules of that class"
                    raise _refused(kind.__name__, names[0], reason, "Give the name of the one that you mean.")
        for owner, name, _, key in self._found(known):
            if name in _TAKEN:
                raise _refused(key, name, "a trace has that name for something else", "Choose another name.")
            if name not in roles and (f"{owner}.{name}" if owner else name) in known:
                raise _refused(key, name, f"{owner or 'the model'} has a {name} already", "Choose another name.")


def _refused(key: str, name: str, reason: str, instead: str) -> ArchitectureError:
    return ArchitectureError(f"rename[{key}] is {name!r}: {reason}. {instead}")


def ends_with(path: str, key: str) -> bool:
    """Whether `path` ends with the names in `key`, in which `*` stands for any one name."""
    if "*" not in key:
        return path == key or path.endswith(f".{key}")
    names, wanted = path.split("."), key.split(".")
    return len(names) >= len(wanted) and all(
        theirs in ("*", ours) for ours, theirs in zip(names[-len(wanted) :], wanted, strict=True)
    )


def resolved(path: str, table: Mapping[tuple[str, str], str]) -> str:
    """The real path of the module that `path` names, perhaps by aliases. `table`: from `Aliases.table`."""
    at = ""
    for name in path.split("."):
        at = table.get((at, name)) or (f"{at}.{name}" if at else name)
    return at


def names_alone(rename: Rename | None) -> dict[Any, Any]:
    """`rename` for an engine. Raises ArchitectureError for a class, since vLLM has its own classes for the same modules."""
    for key in rename or {}:
        if not isinstance(key, str):
            raise ArchitectureError(
                f"rename has the class {getattr(key, '__name__', key)} as a key, and vLLM's modules are of other classes. Give the "
                "module's name, as print(model) shows it."
            )
    return dict(rename or {})


def _above(path: str, levels: int) -> str:
    return ".".join(path.split(".")[: -levels or None])
