"""Compiles the body of a with statement to the code object of a function.

Every rewritten node keeps the line and column of the node that it replaces. The body's own names become free variables of the code. So
`block.py` can set their first values, read their last ones and share one with a sibling block, all through their cells.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

from midstream.errors import SourceUnavailableError, TraceError
from midstream.memory import without_collections

INJECTED = frozenset({"__save__", "__backward__", "__steps__", "__builtins__"})
# Instructions that use a variable of the module.
GLOBAL_OPS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}


@dataclass(frozen=True, eq=False)
class Compiled:
    """The code of a with statement's body. There is one object for each statement, however often it is entered.

    Attributes:
        target: the name after `as`, or the names of a tuple there.
        reads: names that the body reads and never binds.
        read_first: names that the body binds, but may read before that.
        statements: the body as it was written; it is not sent.
    """

    code: CodeType
    target: str | tuple[str, ...] | None
    reads: frozenset[str]
    read_first: frozenset[str]
    statements: tuple[ast.stmt, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, (self.code, self.target, self.reads, self.read_first)


def source_of(code: CodeType) -> ast.Module:
    """The syntax tree of the file or notebook cell that `code` is from. Callers must not change it.

    Raises SourceUnavailableError. The file may have been edited since it was loaded: the caller has to compare.
    """
    if lines := linecache.getlines(code.co_filename):
        return _parse(code.co_filename, "".join(lines))
    raise SourceUnavailableError(
        f"No source for {code.co_filename!r}, and a with-block is run from its source. In a notebook cell with a magic, such as `%%time`, "
        "call a function that has the with-block, defined in a cell without a magic. Else put the code in a file, or use "
        "`model.run(fn, prompt)`, which takes a function and needs no source."
    )


@functools.lru_cache(maxsize=64)
def _parse(filename: str, text: str) -> ast.Module:
    # Python has raised a SystemError about the depth of its stack here. The likely cause is a collection: it ends the suspended bodies
    # of dropped traces.
    with without_collections():
        try:
            return ast.parse(text, filename)
        except SyntaxError as error:
            raise SourceUnavailableError(f"The source of {filename!r} cannot be parsed: {error}") from error


def compile_body(node: ast.With, index: int, class_name: str | None, frame_code: CodeType) -> Compiled:
    """Compile the code that a frame runs after it has entered item `index` of the with statement `node`.

    Later items of the statement become a nested with statement in the body. `class_name` is the class around the statement, in which a name
    like `__x` means `_Class__x`. `frame_code` is the code of the frame.
    """
    filename = frame_code.co_filename
    target = _target(node.items[index].optional_vars, filename)
    rest = node.items[index + 1 :]
    statements: list[ast.stmt] = [ast.copy_location(ast.With(rest, node.body), node)] if rest else node.body
    for statement in statements:
        _refuse_escapes(statement, filename)
    rewriter = _Rewriter()
    body = [rewriter.visit(statement) for statement in copy.deepcopy(statements)]
    names = _BoundNames(body)
    bound = sorted(names.bound)
    function: Any = ast.copy_location(ast.parse("def __block__(): pass").body[0], node)
    # A statement has to come first, so that a leading string is no docstring.
    function.body = [ast.copy_location(ast.Nonlocal(bound) if bound else ast.Pass(), node), *body]
    try:
        code = compiled(function, bound, frame_code, class_name)
    except SyntaxError as error:
        raise TraceError(f"{filename}:{error.lineno}: {error.msg}") from error
    if not _marks(code) <= _marks(frame_code):
        raise SourceUnavailableError(
            f"{filename}:{node.lineno}: the file was edited after it was loaded; load it again."
        )
    instructions = chain.from_iterable(map(dis.get_instructions, codes_in(code)))
    reads = frozenset(each.argval for each in instructions if each.opname in GLOBAL_OPS)
    outer = INJECTED | ({target} if isinstance(target, str) else {*(target or ())})
    read_first = frozenset(code.co_freevars) - (names.bound - names.early)
    return Compiled(code, target, reads - outer, read_first - outer, tuple(statements))


@functools.lru_cache(maxsize=1024)
def compile_function(code: CodeType) -> CodeType | None:
    """The code of a function, with `x.save()` replaced by `__save__(x)`. `__save__` is one more free variable.

    None if it has no such call, if its definition is not found, or if the file was edited after it was loaded.
    """
    try:
        tree = source_of(code)
    except SourceUnavailableError:
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and code.co_firstlineno in (node.lineno, *(decorator.lineno for decorator in node.decorator_list[:1]))
    ]
    if len(found) != 1 or "__class__" in code.co_freevars:
        return None
    function = _SavesOnly().visit(copy.deepcopy(found[0]))
    function.decorator_list = []
    made = compiled(function, [*code.co_freevars, "__save__"], code)
    return made if "__save__" in made.co_freevars and _marks(made) <= _marks(code) else None


def made_again(function: FunctionType, code: CodeType, more: Mapping[str, Any]) -> FunctionType:
    """The function with other code, which may also use the free variables `more`."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in more.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, {**function.__dict__}
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def compiled(
    function: ast.FunctionDef, owned: Sequence[str], original: CodeType, class_name: str | None = None
) -> CodeType:
    """The code of `function`, which was rewritten from the lines of `original`.

    Args:
        owned: names that become free variables of the code, if it uses them.
        class_name: the name of the class around it, for private names.
    """
    function.name = "__block__"
    tree: Any = ast.parse(f"class {class_name or 'C'}:\n def __names__():\n  {' = '.join([*owned, 'None'])}")
    outer = tree.body[0].body[0]
    outer.body.append(function)
    flags = original.co_flags & __future__.annotations.compiler_flag
    with without_collections():
        module = compile(tree if class_name else ast.Module([outer], []), original.co_filename, "exec", flags, True)
    code = next(each for each in codes_in(module) if each.co_name == "__block__")
    return code.replace(co_name=original.co_name, co_qualname=original.co_qualname)


def _target(node: ast.expr | None, filename: str) -> str | tuple[str, ...] | None:
    match node:
        case None:
            return None
        case ast.Name(id=name):
            return name
        case ast.Tuple(elts=parts) if all(isinstance(part, ast.Name) for part in parts):
            return tuple(part.id for part in parts if isinstance(part, ast.Name))
    raise TraceError(f"{filename}:{node.lineno}: the target of a trace's `as` has to be a plain name")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code, and the code of every function and class in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _marks(code: CodeType) -> set[tuple[type, object]]:
    """The names and constants in a code object. A block's are a subset of those of the function around it."""
    marks: set[tuple[type, object]] = set()
    for part in codes_in(code):
        names = (*part.co_names, *part.co_varnames, *part.co_cellvars, *part.co_freevars)
        marks.update((str, name) for name in names if not name.startswith("__"))
        marks.update((type(value), value) for value in part.co_consts if not isinstance(value, CodeType | None))
    # Leave out the qualified names of classes, and nan, which does not equal itself.
    return {(kind, value) for kind, value in marks if "__block__." not in str(value) and value == value}


# Statements that a body may not have.

_ESCAPES: dict[type[ast.AST], str] = {
    ast.Return: "return",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Await: "await",
    ast.AsyncFor: "async for",
    ast.AsyncWith: "async with",
}


def _refuse_escapes(node: ast.AST, filename: str, in_loop: bool = False) -> None:
    """Raise TraceError for statements that would leave the block, which runs as a function. `in_loop`: whether `break` stays inside."""
    word = _ESCAPES.get(type(node))
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return  # statements in it stay in the block
        case ast.Break() | ast.Continue() if not in_loop:
            word = type(node).__name__.lower()
        case ast.comprehension(is_async=1):
            word, node = "async for", node.target
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            word = "import *"
        case ast.Call(func=ast.Name(id="locals" | "globals" | "vars" | "dir" as name), args=[], keywords=[]):
            raise TraceError(
                f"{filename}:{node.lineno}: `{name}()` in a trace would show the trace's variables without the caller's: call it "
                "before the trace, or name the variables that you need."
            )
    if word is not None:
        line = getattr(node, "lineno", 0)
        raise TraceError(
            f"{filename}:{line}: `{word}` cannot leave or suspend a trace, whose block is run as a function"
        )
    if isinstance(node, ast.With) and any(_is_steps(item.context_expr) for item in node.items):
        in_loop = False  # it becomes a loop, and `break` must not leave that loop
    loop = node.body if isinstance(node, ast.For | ast.While) else []
    for child in ast.iter_child_nodes(node):
        _refuse_escapes(child, filename, in_loop or child in loop)


# Rewriting.


class _SavesOnly(ast.NodeTransformer):
    """`x.save()` -> `__save__(x)`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "save" and not node.args and not node.keywords:
            return _call("__save__", [self.visit(node.func.value)], [], node)
        return self.generic_visit(node)


class _Rewriter(_SavesOnly):
    """Replaces the syntax that only traces have by plain Python.

    `x.save()` -> `__save__(x)`; `with loss.backward():` -> `with __backward__(loss) as grads:`, with `grads[h]` for `h.grad` in it; and
    `with tracer.iter[:] as step:` -> `for step in tracer.iter[:]:`.
    """

    def __init__(self) -> None:
        self.depth = 0  # of nested functions and classes
        self.backwards = self.loops = 0
        self.grads: list[str] = []

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "grad" and not isinstance(node.ctx, ast.Del) and self.grads:
            grads = ast.copy_location(ast.Name(self.grads[-1], ast.Load()), node)
            return ast.copy_location(ast.Subscript(grads, self.visit(node.value), node.ctx), node)
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

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        """All names belong to the block, so it needs no declarations. In a nested function they refer to the block's names."""
        return ast.copy_location(ast.Nonlocal(node.names) if self.depth else ast.Pass(), node)

    visit_Nonlocal = visit_Global

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation: a free variable cannot have one."""
        if self.depth or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        plain: ast.stmt = ast.Assign([node.target], self.visit(node.value)) if node.value else ast.Pass()
        return ast.copy_location(plain, node)


def _is_steps(node: ast.expr) -> bool:
    """Whether it is `tracer.iter[...]` or `tracer.all()`, whatever the tracer's name is."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="iter")):
            return True
        case ast.Call(func=ast.Attribute(attr="all"), args=[], keywords=[]):
            return True
    return False


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], at: ast.expr) -> ast.Call:
    func = ast.copy_location(ast.Name(name, ast.Load()), at)
    return ast.copy_location(ast.Call(func, args, keywords), at)


class _BoundNames:
    """The names that statements bind (`bound`), and the names that they may read before they bind them (`early`).

    The statements are walked in order. `sure` holds the names that are certainly bound so far.
    """

    def __init__(self, body: list[ast.stmt]) -> None:
        self.bound: set[str] = set()
        self.early: set[str] = set()
        self.sure: set[str] = set()
        self.run(body)

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def branch(self, body: list[ast.stmt], *targets: ast.AST | str | None) -> set[str]:
        """Walk statements that may be skipped at run time. Returns the names that are certainly bound at their end."""
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
            match target:
                case str(name) | ast.Name(id=name):
                    self.bound.add(name)
                    self.sure.add(name)
                case ast.Tuple(elts=parts) | ast.List(elts=parts):
                    self.bind(*parts)
                case ast.Starred(value=value):
                    self.bind(value)
                case _:
                    self.read(target)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self.read(value)
                self.bind(*targets)
            case ast.AugAssign(target=target, value=value):
                if isinstance(target, ast.Name) and target.id not in self.sure:
                    self.early.add(target.id)
                self.read(value)
                self.bind(target)
            case ast.Delete(targets=targets):
                self.read(node)
                self.bind(*targets)
            case ast.For(target=target, iter=value, body=body, orelse=orelse):
                self.read(value)
                self.branch(body, target)
                self.branch(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                self.read(test)
                self.branch(body)
                self.branch(orelse)
            case ast.If(test=test, body=body, orelse=orelse):
                self.read(test)
                self.sure = self.branch(body) & self.branch(orelse)
            case ast.With(items=items, body=body):
                for item in items:
                    self.read(item.context_expr)
                    self.bind(item.optional_vars)
                after = self.branch(body)
                if any(getattr(getattr(item.context_expr, "func", None), "attr", "") == "invoke" for item in items):
                    self.sure = (
                        after  # else the next invoke of a notebook cell that runs again would get the first run's value
                    )
            case ast.Try() | ast.TryStar():
                self.branch(node.body + node.orelse)
                for handler in node.handlers:
                    self.read(handler.type)
                    self.branch(handler.body, handler.name)
                self.run(node.finalbody)
            case ast.Match(subject=subject, cases=cases):
                self.read(subject)
                for case in cases:
                    parts = list(ast.walk(case.pattern))
                    names = [getattr(part, "name", None) or getattr(part, "rest", None) for part in parts]
                    self.read(case.pattern)
                    self.branch([ast.Expr(case.guard), *case.body] if case.guard else case.body, *filter(None, names))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.read(node)
                self.bind(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                self.bind(*(alias.asname or alias.name.split(".")[0] for alias in aliases))
            case _:
                self.read(node)
