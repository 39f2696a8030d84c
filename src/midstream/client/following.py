"""Follows a trace's code, statement by statement, to find what it does with the model.

Values known before the step are computed, so that a loop over layers is followed layer by layer. Whatever is not recognised ends it with
`Stays`: the trace then runs in the forward.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from midstream.client.findings import Record
from midstream.client.known import (
    COMPUTABLE,
    COMPUTED,
    COMPUTED_METHODS,
    CONTAINER_METHODS,
    FILLED,
    FUNCTION,
    IN_PLACE,
    MODEL,
    NEW,
    NEW_METHODS,
    OPERATORS,
    PLAIN_ATTRIBUTES,
    REFUSED,
    SHARED,
    TRACER,
    Accessor,
    Change,
    Draft,
    Items,
    Known,
    Method,
    Module,
    Site,
    Stays,
    abstract,
    changes_nothing,
    is_asked_in_place,
    is_fixed,
    is_followed,
    is_plain_module,
    is_the_model,
    joined,
    may_change,
    may_hold,
    may_share,
)
from midstream.client.writing import Writes
from midstream.sites import LAYER_SITES, site_of
from midstream.trace.program import is_package, reaches_no_model
from midstream.trace.rewrite import function_tree
from midstream.trace.saves import variables_of
from midstream.trace.tracer import save

_CONSUMERS = (list, tuple, set, dict, sorted, sum, min, max, any, all)
_UNROLLED = 4096  # rounds of loops over known values
_DEPTH = 8  # of calls of the user's functions
_PASSES = 3  # over a loop's body until what is known of its names stays the same


def source_of(fn: FunctionType, node: ast.AST | None) -> tuple[ast.FunctionDef, dict[str, Any]]:
    found = function_tree(fn.__code__)
    if found is None or inspect.unwrap(fn) is not fn or not _is_simple(found):
        raise Stays(node, f"{fn.__name__} has no source that can be read, or takes its arguments in another way")
    used = {each.id for each in ast.walk(found) if isinstance(each, ast.Name)} & _outer_names(fn.__code__)
    around = {name: fn.__globals__[name] for name in used if name in fn.__globals__}
    own = [name for name, _ in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)]
    closed = {name: value for name, value in variables_of(fn) if name in own}
    return found, {name: abstract(value) for name, value in {**around, **closed}.items()}


def _outer_names(code: CodeType) -> set[str]:
    """The global and builtin names that the code and its inner functions use. Names of attributes are among them."""
    return {*code.co_names}.union(*(_outer_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _is_simple(function: ast.FunctionDef) -> bool:
    """Whether it is a plain function with a fixed number of arguments."""
    given = function.args
    if function.decorator_list or given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        return False
    return not any(isinstance(each, (ast.Yield, ast.YieldFrom, ast.Await)) for each in ast.walk(function))


class _Returned(Exception):
    """The function returned, for certain."""


class Reader(Writes):
    """Follows the statements of one function or block.

    Args:
        names: what is known of its names at the beginning.
        depth: of calls.
    """

    def __init__(self, record: Record, names: dict[str, Any], depth: int = 0) -> None:
        self.record, self.names, self.depth = record, names, depth
        self.returned: list[Any] = []

    def run(self, statements: Sequence[ast.stmt]) -> None:
        with contextlib.suppress(_Returned):
            self._all(statements)

    def goes_through_steps(self, node: ast.AST) -> bool:
        """Whether the code has a loop over steps in it."""
        return any(isinstance(each, ast.expr) and self._steps(each) is not None for each in ast.walk(node))

    # Statements.

    def _all(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._statement(statement)
            except Stays as stays:
                stays.line = stays.line or statement.lineno
                raise

    def _statement(self, node: ast.stmt) -> None:
        self.record.rounds += 1
        if self.record.rounds > _UNROLLED * 8:
            raise Stays(node, "there is too much code to follow")
        match node:
            case ast.Expr(value=value):
                self._value(value)
            case ast.Assign(targets=[target], value=value) if (place := self._written_point(target)) is not None:
                self._set(node, target, place, value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=parts)) if len(names) == len(
                parts
            ) and not any(isinstance(each, ast.Starred) for each in (*names, *parts)):
                for name, found in zip(names, [self._value(each) for each in parts], strict=True):
                    self._bind(name, found)
            case ast.Assign(targets=targets, value=value):
                found = self._value(value)
                for target in targets:
                    self._bind(target, found)
            case ast.AnnAssign(target=target, value=value, simple=1) if value is not None:
                self._bind(target, self._value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._change(node, target, op, value)
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                self._loop(node, target, iterable, body)
            case ast.While(test=test, body=body, orelse=[]):
                self._value(test)
                self._repeated(node, lambda: self._all([*body, ast.copy_location(ast.Expr(test), node)]), body)
            case ast.If(test=test, body=body, orelse=orelse):
                found = self._value(test)
                if isinstance(found, Known) and isinstance(
                    found.value, (bool, int, float, str, type(None), tuple, list)
                ):
                    self._all(body if found.value else orelse)
                else:
                    self._either(lambda: self._all(body), lambda: self._all(orelse))
            case ast.With(items=[ast.withitem(context_expr=chosen, optional_vars=target)], body=body) if (
                steps := self._steps(chosen)
            ):
                self._step_loop(chosen, target, steps, body, lambda: self._all(body))
            case ast.With(items=items, body=body):
                self.record.needs_body = True
                for item in items:
                    self._refuse_model(item.context_expr, self._value(item.context_expr))
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, SHARED)
                self._all(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self.record.needs_body = True
                for handler in handlers:
                    if handler.name is not None:
                        self.names[handler.name] = NEW
                self._either(
                    lambda: self._all([*body, *orelse]), *[functools.partial(self._all, each.body) for each in handlers]
                )
                self._either(lambda: self._all(final), lambda: None)
            case ast.Return(value=value):
                returned = self._value(value) if value is not None else Known(None)
                self.returned.append(returned)
                if not (isinstance(returned, Known) and returned.value is None):
                    self.record.needs_body = True
                if self.record.is_certain:
                    raise _Returned
                self.record.is_certain = False
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for each in names:
                    self.names[(each.asname or each.name).partition(".")[0]] = _imported(node, each)
            case ast.FunctionDef(name=name):
                self._refuse_uses(node)
                self.names[name] = FUNCTION
            case ast.Assert(test=test, msg=message):
                self._value(test)
                self.record.needs_body = True
                if message is not None:
                    self._value(message)
            case ast.Raise(exc=error, cause=None):
                self.record.needs_body = True
                if error is not None:
                    self._value(error)
            case ast.Delete(targets=targets) if all(isinstance(each, ast.Name) for each in targets):
                pass
            case ast.Break() | ast.Continue() | ast.Pass():
                pass
            case _:
                raise Stays(node, f"{type(node).__name__} is not followed")

    def _change(self, node: ast.AugAssign, target: ast.expr, op: ast.operator, value: ast.expr) -> None:
        if self._writes_by(node, target, op, value):
            return None
        found = self._value(value)
        if self._changes_draft(target, op, found):
            return None
        match target:
            case ast.Name(id=name):
                before = self._value(target)
                if may_share(before):
                    raise Stays(node, f"{name}: {IN_PLACE}")
                if isinstance(before, Known) and isinstance(found, Known) and is_fixed(before.value):
                    result = self._computed(lambda: OPERATORS[type(op)](before.value, found.value))
                    self.record.needs_body = self.record.needs_body or result is NEW
                    return self._bind(target, result)
                self._refuse_model(node, before)
                self._refuse_model(node, found)
                self.record.needs_body = True
                self._forget_what_can_change(before)
                self._bind(target, SHARED if may_hold(before) else NEW)
            case ast.Attribute(value=owner, attr=attribute) if self._value(owner) is MODEL and attribute in (
                "logits",
                "samples",
            ):
                self.record.needs_body = True
                self.record.leave()
            case ast.Subscript() | ast.Attribute():
                if may_share(self._value(target)) or may_share(self._value(target.value)):
                    raise Stays(node, IN_PLACE)
                self._fill(target.value, self._value(target.value), found)
            case _:
                raise Stays(node, f"{type(target).__name__} is not followed")
        return None

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                if not self.record.is_certain and name in self.names:
                    value = joined([self.names[name], value])
                self.names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                each = self._parts(target, value, len(parts))
                for part, of_part in zip(parts, each, strict=True):
                    self._bind(part, of_part)
            case ast.Starred(value=inner):
                self._bind(inner, SHARED if may_hold(value) else NEW)
            case ast.Attribute(value=owner, attr=attribute):
                of = self._value(owner)
                if isinstance(of, (Module, Items)) or (of is MODEL and attribute not in ("logits", "samples")):
                    raise Stays(target, f"{ast.unparse(target)} is written")
                self.record.needs_body = True
                if of is MODEL:
                    self.record.leave()
                self._refuse_model(target, value)
                if of is not MODEL:
                    self._fill(owner, of, value)
            case ast.Subscript(value=container, slice=index):
                self._value(index)
                of = self._value(container)
                if isinstance(value, Known) and self._is_changed(target, of, Change("set", value.value)):
                    return
                if may_share(of) and of is not FILLED:
                    raise Stays(target, IN_PLACE)
                self._refuse_model(target, of)
                self._refuse_model(target, value)
                self._fill(container, of, value)
            case _:
                raise Stays(target, f"{type(target).__name__} is not followed")

    def _parts(self, target: ast.expr, value: Any, count: int) -> list[Any]:
        if isinstance(value, Items) and len(value.items) == count:
            return list(value.items)
        self._refuse_model(target, value)
        if isinstance(value, Known) and isinstance(value.value, (list, tuple)) and len(value.value) == count:
            return [abstract(each) for each in value.value]
        return [SHARED if may_hold(value) else NEW] * count

    def _fill(self, container: ast.expr, of: Any, value: Any, is_list: bool = False) -> None:
        """A container or an object of the trace's or the caller's gets another value. `is_list`: it is no tensor."""
        self.record.needs_body = True
        root = container
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        before = self.names.get(root.id) if isinstance(root, ast.Name) else None
        self._forget_what_can_change(of, is_list)
        if isinstance(root, ast.Name) and before is not None and not is_the_model(before):
            is_own = before in (NEW, FILLED) or isinstance(
                getattr(before, "value", None), (torch.Tensor, list, dict, set)
            )
            holds = may_hold(value) or may_hold(before)
            self.names[root.id] = NEW if not holds else FILLED if is_own else SHARED
            if FUNCTION in (value, before):
                if holds:
                    raise Stays(container, "a container has both functions and activations")
                self.names[root.id] = FUNCTION

    def _forget_what_can_change(self, changed: Any, is_list: bool = False) -> None:
        """A value was changed: other names may hold it, or what holds it."""
        if not (is_list or isinstance(getattr(changed, "value", None), (list, dict, set))):
            if self.record.is_lent:
                raise Stays(None, "a tensor may be changed that was written to a site: clone it first")
            self._forget_drafts()
        if isinstance(changed, Known) and id(changed.value) in self.record.captured:
            self.record.changes_captured = True
        kinds = (
            (torch.Tensor, list, dict, set)
            if not isinstance(getattr(changed, "value", None), (list, dict, set))
            else (list, dict, set)
        )
        for name, value in self.names.items() if isinstance(changed, Known) else ():
            if isinstance(value, Known) and isinstance(value.value, kinds):
                self.names[name] = SHARED if id(value.value) in self.record.captured else FILLED

    def _forget_drafts(self) -> None:
        """Of the tensors that the trace made it is no longer known what they are."""
        self.names.update({name: NEW for name, value in self.names.items() if isinstance(value, Draft)})

    def _either(self, *branches: Callable[[], None]) -> None:
        """One of the branches runs."""
        before, certain, at, ends = dict(self.names), self.record.is_certain, self.record.at, []
        is_lent = False
        for branch in branches:
            self.names, self.record.is_certain = dict(before), False
            branch()
            ends.append(self.names)
            at = at if self.record.at == at else None
            is_lent = is_lent or self.record.is_lent
        self.record.at, self.record.is_lent = at, is_lent
        self.names = {
            name: joined([each[name] for each in ends if name in each])
            for name in dict.fromkeys(n for each in ends for n in each)
        }
        self.record.is_certain = certain and not self.returned

    def _repeated(
        self, node: ast.AST, body: Callable[[], None], code: Sequence[ast.AST], certain: bool = False
    ) -> None:
        """The body runs any number of times; `certain`: once in each of the steps that `record.step` names."""
        was, dry, is_lent = self.record.is_certain, self.record.is_dry, self.record.is_lent
        self.record.is_certain, self.record.at = was and certain, None
        for name in _names_bound(code):
            if isinstance(before := self.names.get(name), Known):
                self.names[name] = NEW if is_fixed(before.value) else SHARED

        def once() -> None:
            before = dict(self.names)
            with contextlib.suppress(_Returned):
                body()
            each = (before, self.names)
            names = dict.fromkeys([*before, *self.names])
            self.names = {name: joined([one[name] for one in each if name in one]) for name in names}

        try:
            self.record.is_dry = True
            for _ in range(_PASSES):
                once()
            self.record.is_dry = dry
            before = dict(self.names)
            once()
            if any(may_share(self.names[name]) and not may_share(value) for name, value in before.items()):
                raise Stays(node, "what its names hold cannot be followed")
        finally:
            self.record.is_certain, self.record.is_dry = was and not self.returned, dry
            self.record.at, self.record.is_lent = None, self.record.is_lent or is_lent

    def _loop(self, node: ast.stmt, target: ast.expr, iterable: ast.expr, body: Sequence[ast.stmt]) -> None:
        if (steps := self._steps(iterable)) is not None:
            return self._step_loop(iterable, target, steps, body, lambda: self._all(body))
        over = self._listed(self._value(iterable))
        items = _items(over)
        jumps = any(isinstance(each, (ast.Break, ast.Continue)) for statement in body for each in ast.walk(statement))
        if items is not None and not jumps:
            for item in items:
                self._bind(target, item)
                self._all(body)
            return
        each = over if over is FUNCTION else SHARED if may_hold(over) else NEW

        def once() -> None:
            self._bind(target, each)
            self._all(body)

        self._repeated(node, once, [*body, target])

    def _steps(self, node: ast.expr) -> str | None:
        return loop_steps(node, self.names)

    def _step_loop(
        self,
        chosen: ast.expr,
        target: ast.expr | None,
        steps: str,
        code: Sequence[ast.AST],
        body: Callable[[], None],
    ) -> None:
        """A loop over steps. `code`: what is repeated. `body`: follows it once."""
        record = self.record
        if isinstance(chosen, ast.Subscript):
            self._value(chosen.slice)
        inner = steps if record.step == "prompt" and steps != "some" else None
        if any(isinstance(each, (ast.Break, ast.Continue, ast.Return)) for part in code for each in ast.walk(part)):
            inner = None

        targets = [target] if target is not None else []

        def once() -> None:
            for name, value in self.names.items():
                if isinstance(value, Site):  # read in an earlier step
                    self.names[name] = SHARED
            self._forget_drafts()
            record.begin_step()
            for each in targets:
                self._bind(each, NEW)
            body()

        record.step = inner
        self._repeated(chosen, once, [*code, *targets], certain=True)
        record.step = None  # the steps are over, or the code goes on in the last of them
        record.leave()

    # Expressions.

    def _value(self, node: ast.expr, quiet: bool = False) -> Any:
        """What is known of an expression's value. `quiet`: a site's value is not read, but written."""
        found = self._evaluated(node, quiet)
        if found in (NEW, FUNCTION, SHARED) or isinstance(found, Draft):
            self.record.needs_body = True  # it may raise, or have an effect
        return found

    def _evaluated(self, node: ast.expr, quiet: bool) -> Any:
        match node:
            case ast.Constant(value=value):
                return Known(value)
            case ast.Name(id=name):
                return self._named(node, name)
            case ast.Attribute(value=owner, attr=attribute):
                found = self._attribute(node, self._value(owner), attribute, quiet)
                return self._taken(node, found) if isinstance(found, Method) else found
            case ast.Subscript(value=owner, slice=index):
                return self._indexed(node, self._value(owner), self._value(index), quiet)
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = [self._value(each) if each is not None else Known(None) for each in (lower, upper, step)]
                return Known(slice(*(each.value for each in parts))) if _all_known(parts) else NEW
            case ast.BinOp(left=left, op=op, right=right):
                both = [self._plain(left), self._plain(right)]
                if _all_known(both):
                    return self._computed(lambda: OPERATORS[type(op)](*(each.value for each in both)))
                return self._drafted(node, *both) or NEW
            case ast.UnaryOp(op=op, operand=operand):
                found = self._plain(operand)
                return self._computed(lambda: OPERATORS[type(op)](found.value)) if _all_known([found]) else NEW
            case ast.Compare(left=left, ops=ops, comparators=others):
                each = [self._plain(left), *map(self._plain, others)]
                if not _all_known(each):
                    return NEW
                values = [one.value for one in each]
                pairs = zip(ops, values, values[1:], strict=False)
                return self._computed(lambda: all(OPERATORS[type(op)](a, b) for op, a, b in pairs))
            case ast.BoolOp(values=values):
                found = [self._plain(each) for each in values]
                return NEW if not any(map(may_hold, found)) else SHARED
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._plain(test)
                return joined([self._plain(body), self._plain(orelse)])
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                found = [self._item(each) for each in parts]
                if _all_known(found) and not any(isinstance(each, ast.Starred) for each in parts):
                    kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
                    return self._computed(lambda: kind(each.value for each in found))
                if any(map(is_the_model, found)):
                    return Items(tuple(found))
                return self._holding(node, found)
            case ast.Dict(keys=keys, values=values):
                return self._holding(node, [self._plain(each) for each in [*keys, *values] if each is not None])
            case ast.Starred(value=value):
                return self._plain(value)
            case ast.JoinedStr(values=values):
                for part in values:
                    self._plain(part)
                return NEW
            case ast.FormattedValue(value=value):
                self._plain(value)
                return NEW
            case ast.NamedExpr(target=target, value=value):
                found = self._plain(value)
                self._bind(target, found)
                return found
            case ast.ListComp(elt=element, generators=generators) | ast.SetComp(elt=element, generators=generators):
                return self._comprehended(node, [element], generators)
            case ast.DictComp(key=key, value=value, generators=generators):
                return self._comprehended(node, [key, value], generators)
            case ast.Lambda():
                self._refuse_uses(node)
                return FUNCTION
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._called(node, function, args, keywords)
        raise Stays(node, f"{type(node).__name__} is not followed")

    def _item(self, node: ast.expr) -> Any:
        """The same, for a value that may be a module, but not the model."""
        found = self._value(node)
        return found if isinstance(found, (Module, Items)) else self._not_the_model(node, found)

    def _listed(self, value: Any) -> Any:
        """A module with numbered ones in it, as a list of these."""
        if not isinstance(value, Module):
            return value
        return Items(tuple(map(Module, self.record.model.children(value.path))))

    def _plain(self, node: ast.expr) -> Any:
        """The same, for a value that may not be the model."""
        return self._not_the_model(node, self._value(node))

    def _holding(self, node: ast.expr, parts: Sequence[Any]) -> Any:
        """A new container of these values."""
        if not any(part is FUNCTION for part in parts):
            return SHARED if any(map(may_hold, parts)) else NEW
        if any(map(may_share, parts)):
            raise Stays(node, "a container has both functions and activations")
        return FUNCTION

    def _not_the_model(self, node: ast.expr, found: Any) -> Any:
        self._refuse_model(node, found)
        if isinstance(found, Known) and isinstance(found.value, FunctionType) and not changes_nothing(found.value):
            raise Stays(node, f"the function {found.value.__name__} gets another name")
        if isinstance(found, Accessor):
            self.record.read(node, found.site, range(self.record.facts.num_layers))
            return SHARED
        return found

    def _refuse_model(self, node: ast.AST, value: Any) -> None:
        if is_the_model(value):
            raise Stays(node, "the model, a module or the tracer gets another name")

    def _named(self, node: ast.Name, name: str) -> Any:
        if name in self.names:
            found = self.names[name]
            if isinstance(found, Known) and not (is_followed(found.value) or is_package(found.value)):
                raise Stays(node, f"{name}, a {type(found.value).__name__}, may reach the model by another way")
            return found
        if name in REFUSED:
            raise Stays(node, f"{name} may reach the model by another way")
        if hasattr(builtins, name):
            return Known(getattr(builtins, name))
        return SHARED  # a sibling's, or not bound

    def _attribute(self, node: ast.Attribute, owner: Any, attribute: str, quiet: bool) -> Any:
        record = self.record
        if isinstance(owner, Module):
            return self._of_module(node, owner.path, attribute, quiet)
        if isinstance(owner, Items):
            raise Stays(node, f".{attribute} of a list of modules")
        if owner is MODEL:
            site = site_of(attribute)
            if site in LAYER_SITES:
                return Accessor(site)
            if attribute in ("logits", "samples", "next_token_probs"):
                record.needs_body = True
                record.leave()
                record.note(node, "read", f"{attribute}: read when the forward is over")
                return NEW  # what is changed in place is written when the forward is over
            if attribute in ("num_layers", "hidden_size"):
                return Known(record.facts.num_layers) if attribute == "num_layers" else NEW
            if attribute == "tokenizer":
                return NEW
            if attribute in ("steer", "project_on_vocab"):
                return Method(MODEL, attribute)
            if (child := record.model.child("", attribute)) is not None:
                return Module(child)
            raise Stays(node, f"model.{attribute} is not a site that a plan knows")
        if owner is TRACER:
            if attribute == "result":
                record.needs_body = True
                record.leave()
                return NEW
            if attribute in ("stop", "next", "cache"):
                return Method(TRACER, attribute)
            raise Stays(node, f"tracer.{attribute} is not followed here")
        if isinstance(owner, Known):
            if is_package(owner.value) and attribute != "save":
                raise Stays(node, f"midstream.{attribute} is not followed here")
            if isinstance(owner.value, ModuleType) or (
                isinstance(owner.value, torch.Tensor) and attribute in (*PLAIN_ATTRIBUTES, "T", "mT")
            ):
                return self._computed(lambda: getattr(owner.value, attribute), everything=True)
            return Method(owner, attribute)
        if may_share(owner):
            return NEW if attribute in PLAIN_ATTRIBUTES else Method(owner, attribute)
        return Method(owner, attribute) if owner in (NEW, FUNCTION) or isinstance(owner, Draft) else NEW

    def _of_module(self, node: ast.Attribute, path: str, attribute: str, quiet: bool) -> Any:
        record = self.record
        if attribute not in ("output", "input"):
            if (child := record.model.child(path, attribute)) is not None:
                return Module(child)
            raise Stays(node, f"model.{path}.{attribute} is not followed")
        point = record.model.values.get(f"{path}.{attribute}")
        if point is None:
            raise Stays(node, f"model.{path}.{attribute} is no site's value; a layer's is model.layers_output[i]")
        if not quiet:
            record.needs_body = True
            record.read(node, point[0], [point[1]])
        return record.now(point)

    def _indexed(self, node: ast.Subscript, owner: Any, index: Any, quiet: bool) -> Any:
        record = self.record
        if isinstance(owner := self._listed(owner), Items):
            return self._of_items(node, owner, index)
        self._refuse_model(node, owner)
        if isinstance(owner, Accessor):
            layers = range(record.facts.num_layers)
            if isinstance(index, Known):
                try:
                    chosen = layers[index.value]
                except (IndexError, TypeError, ValueError) as error:
                    raise Stays(node, f"layer {index.value!r} is not one of the model's") from error
                if isinstance(chosen, int):
                    if not quiet:
                        record.needs_body = True
                        record.read(node, owner.site, [chosen])
                    point = (owner.site, chosen)
                    return record.now(point)
                layers = chosen
            record.needs_body, record.knows_layers = True, False
            if len(layers):
                record.read(node, owner.site, list(layers))
            return SHARED
        if isinstance(owner, Known) and isinstance(index, Known) and isinstance(owner.value, COMPUTABLE):
            return self._computed(lambda: owner.value[index.value])
        return owner if owner is FUNCTION else SHARED if may_hold(owner) else NEW

    def _of_items(self, node: ast.AST, owner: Items, index: Any) -> Any:
        try:
            chosen = owner.items[index.value]
        except (AttributeError, IndexError, TypeError) as error:
            raise Stays(node, "which module it is, is not known before the step") from error
        return Items(chosen) if isinstance(index.value, slice) else chosen

    def _taken(self, node: ast.expr, method: Method) -> Any:
        """An attribute that is not called: a method of the model's, or what may be a value or a method of another object's."""
        owner, changes = method.owner, method.name.endswith("_") and not method.name.endswith("__")
        if is_the_model(method):
            return method
        if changes and (may_share(owner) or isinstance(owner, Draft)):
            raise Stays(node, f".{method.name} {IN_PLACE}")
        return FUNCTION if changes else SHARED if may_hold(owner) else NEW

    def _computed(self, compute: Callable[[], Any], everything: bool = False) -> Any:
        """A value that is computed now from values known now."""
        try:
            found = compute()
        except Exception:  # the trace will raise it, at its own line
            return NEW
        if everything or isinstance(found, (*COMPUTABLE, bool, slice, set, torch.dtype, torch.device)):
            return abstract(found)
        return Known(found) if isinstance(found, (zip, enumerate, reversed)) else NEW

    def _applied(self, function: Callable[..., Any], given: Sequence[Known], named: Mapping[Any, Known]) -> Any:
        """What a function returns for known arguments."""
        kwargs = {str(name): each.value for name, each in named.items()}
        return self._computed(lambda: function(*(each.value for each in given), **kwargs))

    def _comprehended(
        self, node: ast.expr, elements: Sequence[ast.expr], generators: Sequence[ast.comprehension]
    ) -> Any:
        names, found = dict(self.names), list[Any]()
        is_known = isinstance(node, (ast.ListComp, ast.GeneratorExp))

        def inner(rest: Sequence[ast.comprehension]) -> None:
            if not rest:
                found.extend(self._item(element) for element in elements)
                return
            generator = rest[0]
            nonlocal is_known
            if (steps := self._steps(generator.iter)) is not None:
                is_known = False
                code = [*elements, *generator.ifs, *rest[1:]]
                self._step_loop(generator.iter, generator.target, steps, code, lambda: chosen(generator, rest[1:]))
                return
            over = self._listed(self._value(generator.iter))
            if not isinstance(over, Items):
                self._refuse_model(node, over)
            items, step = _items(over), self.record.step
            is_known = is_known and items is not None and not generator.ifs
            if isinstance(over, Accessor):
                over = self._plain(generator.iter)
            for item in items if items is not None else [SHARED if may_hold(over) else NEW]:
                for name in _names_bound([generator.target]):
                    self.names.pop(name, None)
                self._bind(generator.target, item)
                chosen(generator, rest[1:])
            if items is None and self.record.step != step:
                raise Stays(node, "in which steps its rounds are is not known")

        def chosen(generator: ast.comprehension, rest: Sequence[ast.comprehension]) -> None:
            for test in generator.ifs:
                self._plain(test)
            inner(rest)

        certain, self.record.is_certain = self.record.is_certain, False
        try:
            inner(generators)
        finally:
            self.record.is_certain = certain
        self.names = names
        if any(map(is_the_model, found)):
            if not is_known:
                raise Stays(node, "which modules these are, is not known before the step")
            return Items(tuple(found))
        return SHARED if any(map(may_hold, found)) else NEW

    def _refuse_uses(self, node: ast.FunctionDef | ast.Lambda) -> None:
        """Raise Stays if a nested function uses more than its own names, fixed values, and what is new."""
        if _declares_names(node):
            raise Stays(node, "a function in the trace binds names of the code around it")
        if self.record.is_lent:
            raise Stays(node, "a function in the trace may change a tensor that was written to a site")
        self._forget_drafts()
        own = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)} | _names_bound([node])
        for name in {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - own:
            found = self.names.get(name)
            is_free = found in (NEW, FUNCTION) or (found is None and hasattr(builtins, name) and name not in REFUSED)
            if isinstance(found, Known) and is_fixed(found.value):
                is_free = is_followed(found.value) and (
                    not isinstance(found.value, FunctionType) or changes_nothing(found.value)
                )
            if not is_free:
                raise Stays(node, f"a function in the trace uses {name}")

    # Calls.

    def _called(
        self, node: ast.Call, function: ast.expr, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Any:
        called: Any
        if isinstance(function, ast.Attribute):
            called = self._attribute(function, self._value(function.value), function.attr, quiet=False)
        else:
            called = self._value(function)
        if may_share(called):
            raise Stays(node, f"`{ast.unparse(function)}` is not known to change nothing")
        if isinstance(called, Method) and is_the_model(called):
            return self._of_model(node, called, args, keywords)
        if (
            isinstance(called, Known)
            and isinstance(called.value, FunctionType)
            and not changes_nothing(called.value)
            and called.value is not save
        ):
            return self._followed(node, called.value, args, keywords)
        given = [self._given(each, called) for each in args]
        named = {each.arg: self._plain(each.value) for each in keywords}
        if any(isinstance(each, (Module, Items)) for each in (called, *given)):
            return self._of_modules(node, called, list(map(self._listed, given)), named)
        every = [*given, *named.values()]
        shares, has_functions = any(map(may_hold, every)), any(map(may_change, every))
        if has_functions and any(map(may_share, every)):
            raise Stays(node, "a function that may change an activation gets it by way of another function")
        if any(isinstance(each, Draft) for each in every) and (has_functions or not isinstance(called, Known)):
            self._forget_drafts()
        found = self._result(node, function, called, given, named, shares)
        return FUNCTION if has_functions and found is NEW else found

    def _given(self, node: ast.expr, called: Any) -> Any:
        """What is known of an argument. A generator's code runs when its items are taken, so the function has to take them at once."""
        fills = isinstance(called, Method) and called.name in ("extend", "update")
        takes_at_once = fills or any(getattr(called, "value", None) is each for each in _CONSUMERS)
        if takes_at_once and isinstance(node, ast.GeneratorExp):
            return self._comprehended(node, [node.elt], node.generators)
        return self._item(node)

    def _result(
        self,
        node: ast.Call,
        function: ast.expr,
        called: Any,
        given: Sequence[Any],
        named: Mapping[Any, Any],
        shares: bool,
    ) -> Any:
        """What is known of a call's value."""
        if "out" in named or (isinstance(called, Known) and is_asked_in_place(called.value, given, named)):
            raise Stays(node, f"out= {IN_PLACE}")
        if isinstance(called, Method):
            return self._of_value(node, called, given, named, shares, function)
        if isinstance(called, Known) and called.value is save:
            self.record.needs_body = True
            return given[0] if given else NEW
        if isinstance(called, Known) and _hashable(called.value) and called.value in COMPUTED:
            if _all_known([*given, *named.values()]) and None not in named:
                return self._applied(called.value, given, named)
            return SHARED if shares else NEW
        self.record.needs_body = True
        function_of = called.value if isinstance(called, Known) else None
        if is_plain_module(function_of):
            return SHARED if shares else NEW
        is_known = callable(function_of) and changes_nothing(function_of)
        if is_known and not (
            isinstance(function_of, type) and function_of.__module__ not in ("builtins", "collections")
        ):
            return SHARED if shares else NEW
        if shares or (function_of is not None and not is_known):
            raise Stays(node, f"`{ast.unparse(function)}` is not known to change nothing")
        return NEW

    def _of_modules(self, node: ast.Call, called: Any, given: Sequence[Any], named: Mapping[Any, Any]) -> Any:
        """A function of modules."""
        function, lists = getattr(called, "value", None), [_items(each) for each in given]
        if function in (len, list, tuple, reversed, enumerate, zip) and set(named) <= {"strict"} and None not in lists:
            found: Any = function(*lists)
            if function is len:
                return Known(found)
            if function is enumerate:
                found = [(Known(number), each) for number, each in found]
            return Items(tuple(Items(each) if type(each) is tuple else each for each in found))
        raise Stays(node, f"`{ast.unparse(node.func)}` is called with a module, or is one")

    def _of_value(
        self,
        node: ast.Call,
        method: Method,
        given: Sequence[Any],
        named: Mapping[Any, Any],
        shares: bool,
        function: ast.expr,
    ) -> Any:
        """A method of a value."""
        owner, name = method.owner, method.name
        if isinstance(owner, (Site, Draft)) and name == "clone" and not (given or named):
            self.record.needs_body = True
            return Draft(owner) if isinstance(owner, Site) else Draft(owner.of, owner.changes)
        if isinstance(owner, Draft) and name == "save":
            self.record.needs_body = True
            return owner
        if may_share(owner):
            self.record.needs_body = True
            if name.endswith("_") and not name.startswith("_"):
                raise Stays(node, f".{name}() {IN_PLACE}")
            if isinstance(owner, Accessor):
                raise Stays(node, "an accessor has no such method")
            return NEW if name in NEW_METHODS else owner if name == "save" else SHARED
        if isinstance(owner, Known):
            every = [*given, *named.values()]
            if (
                isinstance(owner.value, COMPUTABLE)
                and name in COMPUTED_METHODS
                and _all_known(every)
                and None not in named
            ):
                return self._applied(lambda *args, **kwargs: getattr(owner.value, name)(*args, **kwargs), given, named)
            if name == "save":
                self.record.needs_body = True
                return owner
            plain = isinstance(owner.value, (*COMPUTABLE, set)) or is_plain_module(owner.value)
            if not plain:
                raise Stays(node, f"`{ast.unparse(function)}` is not known to change nothing")
        self.record.needs_body = True
        root = function.value if isinstance(function, ast.Attribute) else function
        is_new = name in NEW_METHODS and not isinstance(getattr(owner, "value", None), (list, dict, set))
        if not is_new:
            self._fill(root, owner, SHARED if shares else NEW, is_list=name in CONTAINER_METHODS)
        return NEW if is_new or not (shares or may_hold(owner)) else SHARED

    def _of_model(
        self, node: ast.Call, method: Method, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Any:
        record = self.record
        if method.name == "steer":
            names = ("layers", "vector", "factor", "positions")
            if len(args) > len(names) or any(each.arg not in names for each in keywords):
                raise Stays(node, "steer takes layers, vector, factor and positions")
            given = dict(zip(names, args, strict=False)) | {each.arg or "": each.value for each in keywords}
            known = {name: self._known(each) for name, each in given.items()}
            layers, vector, factor = known.get("layers"), known.get("vector"), known.get("factor", 1.0)
            if (
                known.get("positions") is not None
                or type(factor) not in (int, float)
                or not isinstance(vector, torch.Tensor)
            ):
                raise Stays(node, "this steer is left to the forward")
            chosen = (
                [layers] if type(layers) is int else list(layers) if isinstance(layers, (list, tuple, range)) else []
            )
            count = record.facts.num_layers
            if not chosen or not all(type(each) is int and -count <= each < count for each in chosen):
                raise Stays(node, "the layers of steer are not among the model's")
            if "resid_post" not in record.sites:
                raise Stays(node, "resid_post is not among the engine's graph_sites")
            for layer in sorted(each % count for each in chosen):
                self._add(node, ("resid_post", layer), vector, float(factor), None)
            return Known(None)
        if method.name == "cache":
            return self._cached(node, args, keywords)
        for each in (*args, *(keyword.value for keyword in keywords)):
            self._plain(each)
        record.needs_body = True
        record.leave()
        if method.name == "stop":
            record.has_stopped = True
        elif method.name == "next":
            record.step = None
        return NEW

    def _cached(self, node: ast.Call, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> Any:
        """`tracer.cache(modules=[...])`: the values of these modules' outputs, in this step and all later ones."""
        given = dict(zip(("modules", "include_output", "include_inputs"), args, strict=False))
        given |= {each.arg or "": each.value for each in keywords}
        modules = self._listed(self._item(given.pop("modules"))) if "modules" in given else None
        options = {name: self._plain(each) for name, each in given.items()}
        wanted = [
            getattr(options.get(name), "value", name == "include_output")
            for name in ("include_output", "include_inputs")
        ]
        if len(args) > 3 or "" in given or wanted != [True, False]:
            raise Stays(node, "a cache of inputs is left to the forward")
        paths = [
            each.path if isinstance(each, Module) else getattr(each, "value", None)
            for each in _items(modules) or [None]
        ]
        for path in paths:
            point = self.record.model.values.get(f"{path}.output")
            if point is None:
                raise Stays(node, f"the cache takes what is no site's value: {path or 'all modules'}")
            self.record.watch(node, point)
        return NEW

    def _followed(
        self, node: ast.Call, fn: FunctionType, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Any:
        """A function of the user's: follow its code."""
        if self.depth >= _DEPTH:
            raise Stays(node, f"{fn.__name__} is called too deep")
        function, names = source_of(fn, node)
        self.record.note_captured(names.values())
        parameters = [each.arg for each in function.args.args]
        if any(isinstance(each, ast.Starred) for each in args) or any(each.arg is None for each in keywords):
            raise Stays(node, f"the arguments of {fn.__name__} are not followed")
        given = dict(zip(parameters, map(self._value, args), strict=False))
        given |= {each.arg: self._value(each.value) for each in keywords if each.arg is not None}
        defaults = dict(
            zip(
                parameters[len(parameters) - len(fn.__defaults__ or ()) :],
                map(abstract, fn.__defaults__ or ()),
                strict=True,
            )
        )
        if len(args) > len(parameters) or set(given) - set(parameters) or set(parameters) - set(given) - set(defaults):
            raise Stays(node, f"the arguments of {fn.__name__} are not its own")
        if _declares_names(function):
            raise Stays(node, f"{fn.__name__} binds names of the code around it")
        inner = Reader(self.record, {**names, **defaults, **given}, self.depth + 1)
        certain = self.record.is_certain
        inner.run(function.body)
        self.record.is_certain = certain
        self._forget_drafts()  # the function may have changed what it was given
        if any(may_share(value) for value in inner.names.values()):
            for name, value in self.names.items():  # what the function was given, it may have filled
                if (
                    isinstance(value, Known)
                    and not is_fixed(value.value)
                    and isinstance(value.value, (list, dict, set))
                ):
                    self.names[name] = SHARED
        if not inner.returned:
            return Known(None)
        return joined([*inner.returned, *([] if len(inner.returned) == 1 and _ends(function) else [Known(None)])])


def loop_steps(node: ast.AST, names: Mapping[str, Any]) -> str | None:
    """In which steps `for step in node:` runs its body: "all", "prompt", "decode", or "some"; None for other loops."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="all"), args=[], keywords=[]):
            return "all" if names.get(name) is TRACER else None
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="iter"), slice=index):
            if names.get(name) is not TRACER:
                return None
            match index:
                case ast.Slice(lower=None | ast.Constant(value=0), upper=None, step=None | ast.Constant(value=1)):
                    return "all"
                case ast.Slice(lower=ast.Constant(value=1), upper=None, step=None | ast.Constant(value=1)):
                    return "decode"
                case (
                    ast.Constant(value=0)
                    | ast.Slice(lower=None | ast.Constant(value=0), upper=ast.Constant(value=1), step=None)
                ):
                    return "prompt"
            return "some"
    return None


def _ends(function: ast.FunctionDef) -> bool:
    """Whether the function ends with its only return."""
    return isinstance(function.body[-1], ast.Return)


def _declares_names(function: ast.AST) -> bool:
    """Whether it has a `global` or `nonlocal` statement."""
    return any(isinstance(each, (ast.Global, ast.Nonlocal)) for each in ast.walk(function))


def _names_bound(code: Sequence[ast.AST]) -> set[str]:
    return {
        each.id
        for part in code
        for each in ast.walk(part)
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del))
    }


def _imported(node: ast.stmt, name: ast.alias) -> Any:
    """The module or function that an import statement binds, if it is one of PyTorch's or Python's own."""
    module = node.module if isinstance(node, ast.ImportFrom) else name.name
    is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
    if not module or is_relative or not reaches_no_model(module):
        raise Stays(node, f"{module} is imported in the trace")
    found = (
        __import__(module, fromlist=["_"]) if isinstance(node, ast.ImportFrom) or name.asname else __import__(module)
    )
    return Known(getattr(found, name.name) if isinstance(node, ast.ImportFrom) else found)


def _all_known(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Known) and not isinstance(value.value, nn.Module) for value in values)


def _hashable(value: Any) -> bool:
    return isinstance(value, (type, FunctionType, BuiltinFunctionType))


def _items(over: Any) -> list[Any] | None:
    """The items of a value that is iterated over, if they are known and few."""
    if isinstance(over, Items):
        return list(over.items)
    if not isinstance(over, Known) or not isinstance(
        over.value, (range, list, tuple, dict, zip, enumerate, reversed, str)
    ):
        return None
    if isinstance(over.value, (range, list, tuple, dict, str)) and len(over.value) > _UNROLLED:
        return None
    items = list(over.value)
    return [abstract(each) for each in items] if len(items) <= _UNROLLED else None
