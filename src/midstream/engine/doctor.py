"""`midstream doctor`: compares the table of seams with vLLM's sources. vLLM is neither imported nor started."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midstream.engine.seams import SEAMS, Does, Seam, is_supported, supported_range
from midstream.errors import MidstreamError

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 if a seam does not fit. Raises MidstreamError if there is no vLLM to look at."""
    parser = argparse.ArgumentParser(
        prog="midstream doctor",
        description="Compare every place where midstream touches vLLM with vLLM's sources, without importing or starting vLLM. The exit "
        "status is 1 if a place does not fit.",
    )
    parser.add_argument(
        "--vllm", metavar="PATH", type=Path, help="a folder with vLLM's sources; the default is the installed vLLM"
    )
    sources = PackageSources(find_vllm(parser.parse_args(argv).vllm))
    findings = [examine(seam, sources) for seam in SEAMS]
    print("\n".join(report(findings, sources)))
    return int(any(finding.problems for finding in findings))


def find_vllm(path: Path | None) -> Path:
    """The folder of the package `vllm`: in `path`, or installed. Raises MidstreamError if there is none."""
    if path is None:
        spec = importlib.util.find_spec("vllm")  # this does not import a top-level package
        if spec is None or not spec.submodule_search_locations:
            raise MidstreamError(
                "vLLM is not installed here. Name a folder with its sources: midstream doctor --vllm PATH."
            )
        return Path(spec.submodule_search_locations[0])
    for folder in (path, path / "vllm"):
        if (folder / "v1").is_dir() and (folder / "__init__.py").is_file():
            return folder
    raise MidstreamError(
        f"{path} does not hold vLLM's sources: neither it nor its folder vllm/ has __init__.py and v1/."
    )


class Finding(NamedTuple):
    """The result for a row of the table.

    Attributes:
        status: `fits`, `CHANGED`, `MISSING`, or `absent` for a target that vLLM need not have.
        problems: the differences, a sentence each.
    """

    seam: Seam
    status: str
    problems: list[str]


def examine(seam: Seam, sources: PackageSources) -> Finding:
    """Compare one row with vLLM's sources."""
    found = sources.find(seam.target)
    if found is None:
        if seam.optional:
            return Finding(seam, "absent", [])
        return Finding(seam, "MISSING", [f"vLLM has no {seam.target}."])
    problems = []
    if seam.signature:
        problems += _differences(seam.target.rpartition(".")[2], seam.signature, found, seam.does)
    for member in filter(None, seam.members.split("; ")):
        name, bracket, signature = member.partition("(")
        member_found = sources.find(f"{seam.target}.{name}")
        if member_found is None:
            problems.append(f"{name} is gone.")
        elif bracket:
            problems += _differences(name, bracket + signature, member_found, seam.does)
    if seam.does is Does.SUBCLASSES:
        listed = {member.partition("(")[0] for member in seam.members.split("; ")}
        problems += [
            f"{name} is an attribute of vLLM's class now, and midstream's class has one of that name."
            for name in sorted(_names_of(seam.by) - listed)
            if sources.find(f"{seam.target}.{name}") is not None
        ]
    return Finding(seam, "CHANGED" if problems else "fits", problems)


@functools.cache
def _names_of(path: str) -> frozenset[str]:
    """The methods of one of midstream's classes, and the attributes that they assign to `self`; special methods left out."""
    found = PackageSources(Path(__file__).parents[1], "midstream").find(path)
    if not isinstance(found, _Class):
        return frozenset()
    names = {name for statement in found.definition.body for name in _defined(statement)}
    names |= {
        node.attr for node in ast.walk(found.definition) if isinstance(node, ast.Attribute) and _is_set_on_self(node)
    }
    return frozenset(name for name in names if not name.startswith("__"))


def _is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def _differences(name: str, expected: str, found: object, does: Does) -> list[str]:
    """The differences between a function of vLLM and the expected signature, a sentence each."""
    if not isinstance(found, Function):
        return [f"{name} is no function any more."]
    want = ast.parse(f"def f{expected}: ...").body[0]
    assert isinstance(want, Function)
    args = found.args
    positional, keywords = [arg.arg for arg in (*args.posonlyargs, *args.args)], [arg.arg for arg in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [name for name, default in zip(keywords, args.kw_defaults, strict=True) if default is None]
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in found.decorator_list)
    if positional[:1] in (["self"], ["cls"]) and not is_static:
        required.remove(positional.pop(0))
    keywords = [*positional, *keywords]
    first, named = [arg.arg for arg in want.args.args], [arg.arg for arg in want.args.kwonlyargs]
    problems = []
    if positional[: len(first)] != first:
        problems.append(f"{name} begins with the parameters {_listed(first)}; here it has {_listed(positional)}.")
    problems += [f"{name} has no parameter {parameter} any more." for parameter in named if parameter not in keywords]
    if want.args.kwarg is None:
        needed = keywords if does in (Does.REPLACES, Does.SUBCLASSES) else required
        if more := [parameter for parameter in needed if parameter not in first + named]:
            problems.append(f"{name} has the new parameter {_listed(more)}.")
    if want.returns is not None and found.returns is not None and not _returns(want.returns, found.returns):
        problems.append(f"{name} returns {ast.unparse(found.returns)}, not {ast.unparse(want.returns)}.")
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _returns(expected: ast.expr, found: ast.expr) -> bool:
    """Whether an annotation is the expected one; `tuple[X, ...]` stands for any tuple that begins with an X."""
    want, have = (re.sub(r"['\"]", "", ast.unparse(each)) for each in (expected, found))
    return have.startswith(want.removesuffix("...]")) if want.endswith(", ...]") else have == want


def report(findings: Sequence[Finding], sources: PackageSources) -> Iterator[str]:
    """The lines of the report: the table, then the problems."""
    version = sources.version
    yield f"vLLM {version or '(version unknown)'} in {sources.package}"
    if version is not None and not is_supported(version):
        yield f"midstream supports vLLM {supported_range()} and refuses to start on this one."
    yield ""
    width = max(len(seam.target) for seam in SEAMS)
    yield f"{'STATUS':<8}  {'MIDSTREAM':<10}  {'PART OF VLLM':<{width}}  IN midstream.engine"
    for seam, status, _ in findings:
        yield f"{status:<8}  {seam.does.value:<10}  {seam.target:<{width}}  {seam.by.removeprefix('midstream.engine.')}"
    for seam, status, problems in findings:
        if problems:
            yield from ("", f"{status}  {seam.target}", *(f"    {problem}" for problem in problems))
            yield f"    midstream {seam.does.value} it in {seam.by}, seen on vLLM {seam.seen}: {seam.reason}"
        elif status == "absent":
            yield from ("", f"{status}  {seam.target}", f"    Not needed: {seam.optional}")
    counts = Counter(status for _, status, _ in findings)
    yield ""
    yield ", ".join(
        f"{counts[status]} {status}" for status in ("fits", "absent", "CHANGED", "MISSING") if counts[status]
    )
    broken = counts["CHANGED"] + counts["MISSING"]
    yield f"midstream does not fit this vLLM in {broken} places." if broken else "midstream fits this vLLM."


class _Module(NamedTuple):
    names: dict[str, ast.stmt | str]  # a statement that defines the name, or the dotted path that it is imported from
    stars: list[str]  # modules from which all names are imported


class PackageSources:
    """The sources of a package. Each file is parsed when it is first needed.

    Args:
        package: the folder of the package.
        name: of the package.
    """

    def __init__(self, package: Path, name: str = "vllm") -> None:
        self.package = package
        self._name = name
        self._modules: dict[str, _Module | None] = {}

    @property
    def version(self) -> str | None:
        """The version in the sources; None if they have none."""
        file = self.package / "_version.py"
        found = re.search(r"__version__\s*=[^'\"\n]*['\"]([^'\"]+)", file.read_text()) if file.is_file() else None
        return found[1] if found else None

    def find(self, path: str) -> object | None:
        """The definition that a dotted path leads to: a function's or class's, or another object for anything else. None if not found."""
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            if (module := self._module(".".join(parts[:cut]))) is not None:
                return functools.reduce(self._member, parts[cut:], module)
        return None

    def _member(self, owner: Any, name: str) -> Any:
        if isinstance(owner, _Module):
            return self._of_module(owner, name)
        if isinstance(owner, _Class):
            return self._of_class(owner, name)
        return None

    def _of_module(self, module: _Module, name: str) -> object | None:
        found = module.names.get(name)
        if isinstance(found, str):
            return self.find(found)
        if isinstance(found, ast.ClassDef):
            return _Class(found, module)
        if found is not None:
            return found
        starred = (self.find(f"{star}.{name}") for star in module.stars)
        return next((there for there in starred if there is not None), None)

    def _of_class(self, owner: _Class, name: str) -> object | None:
        for statement in _statements(owner.definition.body):
            if name in _defined(statement):
                return statement
        for node in ast.walk(owner.definition):  # self.name = ...
            if isinstance(node, ast.Attribute) and node.attr == name and _is_set_on_self(node):
                return node
        for base in owner.definition.bases:
            path = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            base_class = functools.reduce(self._member, path.split("."), owner.module)
            if isinstance(base_class, _Class) and (found := self._of_class(base_class, name)) is not None:
                return found
        return None

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        place = self.package.joinpath(*name.split(".")[1:])
        files = (place / "__init__.py", place.with_suffix(".py"))
        file = next((file for file in files if file.is_file()), None)
        if file is None or name.partition(".")[0] != self._name:
            return None
        module, package = _Module({}, []), name if file.name == "__init__.py" else name.rpartition(".")[0]
        for statement in _statements(ast.parse(file.read_text()).body):
            if isinstance(statement, ast.ImportFrom):
                source = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
                for alias in statement.names:
                    if alias.name == "*":
                        module.stars.append(source)
                    else:
                        module.names.setdefault(alias.asname or alias.name, f"{source}.{alias.name}")
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    module.names.setdefault(alias.asname or alias.name.partition(".")[0], alias.name)
            else:
                module.names.update(dict.fromkeys(_defined(statement), statement))
        return module


class _Class(NamedTuple):
    definition: ast.ClassDef
    module: _Module


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, with those in the branches of `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
