"""The user's names for modules: `rename={"transformer.h": "layers", "mlp": "ffn"}` also gives `model.layers[0].ffn`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from midstream.errors import ArchitectureError

Rename = Mapping[str, str | Sequence[str]]
_TAKEN = frozenset({"output", "input", "inputs", "source", "skip", "trace", "run", "generate", "edit"})


class Aliases:
    """Other names of modules.

    Args:
        rename: a key is the name of a module, which then has the other name wherever it is (`"mlp"`); or a path, whose module has the
            other name at the model itself (`"transformer.h"`). A value is the other name, or a list of them. A key that names nothing
            is skipped, so that one `rename` serves several architectures.
    """

    def __init__(self, rename: Rename | None = None) -> None:
        self.rename = {key: [value] if isinstance(value, str) else list(value) for key, value in (rename or {}).items()}

    def resolve(self, path: str, name: str, known: Collection[str]) -> str | None:
        """The path of the module that is called `name` at the module at `path`; None if there is no such alias."""
        for key, names in self.rename.items():
            if name not in names or key == name:
                continue
            is_path = "." in key.lstrip(".") and not key.startswith(".")
            if is_path and path:
                continue
            found = f"{path}.{key.lstrip('.')}" if path else key.lstrip(".")
            if found in known:
                return found
        return None

    def check(self, known: Collection[str], roles: Collection[str] = ()) -> None:
        """Raise ArchitectureError for an alias that is the name of a module beside its own, or of something that modules have.

        `roles` may be: they tell a module's part in the model, also if another module has that name.
        """
        parents = sorted({path.rpartition(".")[0] for path in known})
        for key, names in self.rename.items():
            for name in names:
                clash = [
                    parent
                    for parent in parents
                    if name not in roles
                    and self.resolve(parent, name, known)
                    and (f"{parent}.{name}" if parent else name) in known
                ]
                if clash or name in _TAKEN:
                    where = (
                        f"{clash[0] or 'the model'} has a {name} already"
                        if clash
                        else "a trace has that name for something else"
                    )
                    raise ArchitectureError(f"rename[{key!r}] is {name!r}: {where}. Choose another name.")
