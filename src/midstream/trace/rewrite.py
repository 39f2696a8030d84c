"""Compiles the body of a with statement to the code object of a function.

Every rewritten node keeps the line and column of the one that it replaces. The body's own names become free variables of the code. So
`block.py` can set their first values, read their last ones and share one with a sibling block, all by their cells.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from midstream.errors import SourceUnavailableError, TraceError

INJECTED = frozenset({"__save__", "__backward__", "__steps__", "__builtins__"})
_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)
_GLOBAL_OPS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}


@dataclass(frozen=True, eq=False)
class Site:
    """A with statement that a frame is entering.

    Attributes:
        target: what follows `as`.
        body: of the entered item. Later items of the same statement are a nested with statement in it.
        class_name: of the class around the statement, in which a name like `__x` means `_Class__x`.
        lines: of the statement.
    """

    filename: str
    node: ast.With
    target: ast.expr | None
    body: list[ast.stmt]
    class_name: str | None
    lines: tuple[str, ...]


# Statements that a body may not have.

_ESCAPES: dict[type[ast.AST], str] = {
    ast.Return: "return",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Await: "await",
    ast.AsyncFor: "async for",
    ast.AsyncWith: "async with",
}


class _Escapes(ast.NodeVisitor):
    """Raises TraceError for statements that would leave the block, which is run as a function."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.in_loop = False

    def refuse(self, node: ast.AST, word: str) -> None:
        line = getattr(node, "lineno", 0)
        raise TraceError(
            f"{self.filename}:{line}: `{word}` cannot leave or suspend a trace, whose block is run as a function"
        )

    def visit(self, node: ast.AST) -> None:
        if type(node) in _ESCAPES:
            self.refuse(node, _ESCAPES[type(node)])
        super().visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self.refuse(node.target, "async for")
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.names[0].name == "*":
            self.refuse(node, "import *")

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        if not self.in_loop:
            self.refuse(node, type(node).__name__.lower())

    def visit_For(self, node: ast.For | ast.While) -> None:
        outside, self.in_loop = self.in_loop, True
        for child in node.body:
            self.visit(child)
        self.in_loop = outside
        self.visit(node.iter if isinstance(node, ast.For) else node.test)
        for child in node.orelse:
            self.visit(child)

    def visit_With(self, node: ast.With) -> None:
        outside = self.in_loop
        if any(_is_steps(item.context_expr) for item in node.items):  # it becomes a loop, which `break` must not leave
            self.in_loop = False
        self.generic_visit(node)
        self.in_loop = outside

    def visit_Lambda(self, node: ast.AST) -> None:
        """A nested function or class. Nothing in it leaves the block."""

    visit_Continue, visit_While = visit_Break, visit_For
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda


# Rewriting.


class _Rewriter(ast.NodeTransformer):
    """Replaces the syntax that only traces have by plain Python.

    `x.save()` -> `__save__(x)`; `with loss.backward():` -> `with __backward__(loss) as grads:`, with `grads(h)` for `h.grad` in it; and
    `with tracer.iter[:] as step:` -> `for step in tracer.iter[:]:`.
    """

    def __init__(self) -> None:
        self.depth = 0  # of nested functions
        self.backwards = self.loops = 0
        self.grads: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "save" and not node.args and not node.keywords:
            return _call("__save__", [self.visit(node.func.value)], [], node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "grad" and isinstance(node.ctx, ast.Load) and self.grads:
            return _call(self.grads[-1], [self.visit(node.value)], [], node)
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        for at, item in enumerate(node.items):
            if _is_steps(item.context_expr):
                rest = node.items[at + 1 :]
                body: list[ast.stmt] = [ast.copy_location(ast.With(rest, node.body), node)] if rest else node.body
                loop = ast.copy_location(self._loop(item, body), node)
                return self.visit(ast.copy_location(ast.With(node.items[:at], [loop]), node) if at else loop)
        return self._with(node)

    def _loop(self, item: ast.withitem, body: list[ast.stmt]) -> ast.For:
        target = item.optional_vars
        if target is None:
            target = ast.copy_location(ast.Name(f"__step_{self.loops}__", ast.Store()), item.context_expr)
            self.loops += 1
        return ast.For(target, _call("__steps__", [item.context_expr], [], item.context_expr), body, [])

    def _with(self, node: ast.With) -> ast.AST:
        outside = len(self.grads)
        for item in node.items:
            call = item.context_expr
            self.generic_visit(item)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                item.context_expr = _call("__backward__", [call.func.value, *call.args], call.keywords, call)
                if not isinstance(item.optional_vars, ast.Name):
                    name = ast.Name(f"__grads_{self.backwards}__", ast.Store())
                    item.optional_vars = ast.copy_location(name, call)
                self.grads.append(item.optional_vars.id)
                self.backwards += 1
        node.body = [self.visit(statement) for statement in node.body]
        del self.grads[outside:]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        """All names belong to the block, so it needs no declarations. In a nested function they refer to the block's names."""
        return ast.copy_location(ast.Nonlocal(node.names) if self.depth else ast.Pass(), node)

    visit_Nonlocal = visit_Global

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A free variable cannot have an annotation."""
        if self.depth or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        plain: ast.stmt = ast.Assign([node.target], self.visit(node.value)) if node.value else ast.Pass()
        return ast.copy_location(plain, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.depth += 1  # a class body may have annotations
        self.generic_visit(node)
        self.depth -= 1
        return node


def _is_steps(node: ast.expr) -> bool:
    """Whether it is `tracer.iter[...]` or `tracer.all()`, whatever the tracer is called."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="iter")):
            return True
        case ast.Call(func=ast.Attribute(attr="all"), args=[], keywords=[]):
            return True
    return False


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], at: ast.expr) -> ast.Call:
    func = ast.copy_location(ast.Name(name, ast.Load()), at)
    return ast.copy_location(ast.Call(func, args, keywords), at)


# The names that a body binds, and which of them it may read first.


class _Names:
    """Walks statements in order. `sure` holds the names that are certainly bound by now, `early` those read before they are."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.bound: set[str] = set()
        self.early: set[str] = set()
        self.sure: set[str] = set()
        self.run(body)

    def run(self, body: list[ast.stmt]) -> None:
        for node in body:
            getattr(self, type(node).__name__, self.read)(node)

    def branch(self, body: list[ast.stmt], *targets: ast.AST | str | None) -> set[str]:
        """Walk statements that may be skipped at run time. Returns the names that are bound for sure at their end."""
        before, self.sure = self.sure, set(self.sure)
        self.bind(*targets)
        self.run(body)
        after, self.sure = self.sure, before
        return after

    def read(self, *nodes: ast.AST | None) -> None:
        for node in (inner for outer in nodes if outer for inner in ast.walk(outer)):
            if isinstance(node, ast.Name) and node.id not in self.sure:
                if not isinstance(node.ctx, ast.Store):
                    self.early.add(node.id)
            elif isinstance(node, ast.NamedExpr):
                self.bound.add(node.target.id)
            elif isinstance(node, ast.Nonlocal):
                self.bound.update(node.names)
                self.early.update(node.names)

    def bind(self, *targets: ast.AST | str | None) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                target = target.id
            if isinstance(target, str):
                self.bound.add(target)
                self.sure.add(target)
            elif isinstance(target, ast.Tuple | ast.List):
                self.bind(*target.elts)
            elif isinstance(target, ast.Starred):
                self.bind(target.value)
            else:
                self.read(target)

    def Assign(self, node: ast.Assign) -> None:
        self.read(node.value)
        self.bind(*node.targets)

    def AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self.sure:
            self.early.add(node.target.id)
        self.read(node.value)
        self.bind(node.target)

    def Delete(self, node: ast.Delete) -> None:
        self.read(node)
        self.bind(*node.targets)
        self.sure -= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def For(self, node: ast.For) -> None:
        self.read(node.iter)
        self.branch(node.body, node.target)
        self.branch(node.orelse)

    def While(self, node: ast.While) -> None:
        self.read(node.test)
        self.branch(node.body)
        self.branch(node.orelse)

    def If(self, node: ast.If) -> None:
        self.read(node.test)
        self.sure = self.branch(node.body) & self.branch(node.orelse)

    def With(self, node: ast.With) -> None:
        for item in node.items:
            self.read(item.context_expr)
            self.bind(item.optional_vars)
        after = self.branch(node.body)
        if any(_is_invoke(item.context_expr) for item in node.items):
            self.sure = after  # or a notebook cell, run again, would give the first run's value to the next invoke

    def Try(self, node: ast.Try) -> None:
        self.branch(node.body + node.orelse)
        for handler in node.handlers:
            self.read(handler.type)
            self.branch(handler.body, handler.name)
        self.run(node.finalbody)

    TryStar = Try

    def Match(self, node: ast.Match) -> None:
        self.read(node.subject)
        for case in node.cases:
            names = [getattr(part, "name", None) or getattr(part, "rest", None) for part in ast.walk(case.pattern)]
            self.read(case.pattern)
            self.branch([ast.Expr(case.guard), *case.body] if case.guard else case.body, *filter(None, names))

    def FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.read(node)
        self.bind(node.name)

    AsyncFunctionDef = ClassDef = FunctionDef

    def Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bind(*(alias.asname or alias.name.split(".")[0] for alias in node.names))

    ImportFrom = Import

    def TypeAlias(self, node: ast.AST) -> None:
        self.read(node)
        self.bind(getattr(node, "name", None))


def _is_invoke(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "invoke"


# The code object.


def compile_site(site: Site, frame_code: CodeType) -> tuple[CodeType, frozenset[str], frozenset[str]]:
    """(code, the outside names that it reads, the names that it binds before it reads them)."""
    for statement in site.body:
        _Escapes(site.filename).visit(statement)
    rewriter = _Rewriter()
    body = [rewriter.visit(statement) for statement in copy.deepcopy(site.body)]
    names = _Names(body)
    tree = _function_tree(site, body, sorted(names.bound))
    try:
        module = compile(tree, site.filename, "exec", flags=frame_code.co_flags & _FUTURES, dont_inherit=True)
    except SyntaxError as error:
        raise TraceError(f"{site.filename}:{error.lineno}: {error.msg}") from error
    (code,) = (code for code in _codes(module) if code.co_name == "__block__")
    if not _marks(code) <= _marks(frame_code):
        raise SourceUnavailableError(
            f"{site.filename}:{site.node.lineno}: the file was edited after it was loaded; load it again."
        )
    code = code.replace(co_name=frame_code.co_name, co_qualname=frame_code.co_qualname)
    return code, frozenset(_globals(code)) - INJECTED, frozenset(names.bound - names.early)


def _function_tree(site: Site, body: list[ast.stmt], bound: list[str]) -> ast.Module:
    """The body as a function inside a function that owns its names, inside a class like the one around the block."""
    tree = ast.parse("def __names__():\n def __block__(): pass")
    outer = tree.body[0]
    assert isinstance(outer, ast.FunctionDef) and isinstance(outer.body[0], ast.FunctionDef)
    inner = outer.body[0]
    if bound:
        outer.body.insert(0, ast.Assign([ast.Name(name, ast.Store()) for name in bound], ast.Constant(None)))
        inner.body = [ast.Nonlocal(bound)]  # a statement has to come first, so that a leading string is no docstring
    if site.class_name:
        tree.body = ast.parse(f"class {site.class_name}: pass").body
        tree.body[0].body = [outer]  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        ast.copy_location(node, site.node)
    inner.body += body
    return ast.fix_missing_locations(tree)


def _marks(code: CodeType) -> set[tuple[type, object]]:
    """The names and constants in a code object. Those of a block are among those of the function around it."""
    marks: set[tuple[type, object]] = set()
    for part in _codes(code):
        names = (*part.co_names, *part.co_varnames, *part.co_cellvars, *part.co_freevars)
        marks.update((str, name) for name in names if not name.startswith("__"))
        marks.update((type(value), value) for value in part.co_consts if not isinstance(value, CodeType | None))
    # Leave out the qualified names of classes, and nan, which does not equal itself.
    return {(kind, value) for kind, value in marks if "__block__." not in str(value) and value == value}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        yield from (i.argval for i in dis.get_instructions(part) if i.opname in _GLOBAL_OPS)
