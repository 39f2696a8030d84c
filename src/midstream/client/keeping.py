"""Finds the traces that only keep rows of activations.

A plan captures the rows, and `trace/kept.py` runs the code in the caller's process after the request has ended.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from midstream.client.following import loop_steps
from midstream.client.known import MODEL, Known, is_fixed
from midstream.sites import LAYER_SITES, site_of
from midstream.trace.program import is_package
from midstream.trace.tracer import save

Rows = Literal["last", "whole"]  # of each value: its last row, or all its rows
_COPIES = ("save", "clone", "cpu")  # methods without arguments that copy
_COUNTED = ("range", "len", "enumerate", "reversed", "zip")
_MADE = ("list", "dict")


def rows_kept(statements: Sequence[ast.stmt], names: Mapping[str, Any]) -> Rows | None:
    """Which rows the code keeps of each value that it reads. None if it may do more than keep them, or keeps other rows.

    Only a few forms of code are accepted: reads of a whole value or of its last row, `save`, lists, dicts, and loops over steps and
    numbers. Such code gives the same values wherever it runs.

    Args:
        names: the outer names that the code uses, and what is known of each. Builtins are not among them.
    """
    keeping = _Keeping(names)
    is_new = True
    while is_new:  # go through the code again if more is known of its names: an earlier line of a loop may use them
        known = keeping.known
        if not all(map(keeping.statement, statements)):
            return None
        is_new = keeping.known > known
    if keeping.steps & keeping.others:  # a name that may be a whole value here and a row there
        return None
    return keeping.reads.pop() if len(keeping.reads) == 1 else None


class _Keeping:
    """Checks that code has only the forms that `rows_kept` accepts. Most methods say whether a node is such a form.

    Attributes:
        steps: local names that may be a whole value that was read.
        holding: other local names that may be rows, or a container of rows.
        containers: local names that have been set to a new list or dict.
        others: local names that have been set to something else.
        reads: the kinds of its reads.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.steps: set[str] = set()
        self.holding: set[str] = set()
        self.containers: set[str] = set()
        self.others: set[str] = set()
        self.reads: set[Rows] = set()

    @property
    def known(self) -> int:
        """How much is known of the names."""
        return sum(map(len, (self.steps, self.holding, self.containers, self.others)))

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Pass() | ast.Return(value=None):
                return True
            case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
                return self.value(value)
            case ast.Assign(targets=[ast.Name() as target], value=value) if self._is_read(value):
                return self._takes(target, self.steps)
            case ast.Assign(targets=[target], value=value):
                return self._sets(target, value) and self.value(value)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                return self._loops(target, over) and all(map(self.statement, body))
            case ast.With(items=[ast.withitem(context_expr=steps, optional_vars=target)], body=body):
                named = target is None or self._takes(target, self.others)
                return named and self._is_steps(steps) and all(map(self.statement, body))
        return False

    def _takes(self, target: ast.expr, group: set[str]) -> bool:
        """Whether the target is a local name, which goes into the group, an item of a local list or dict, or a tuple of these."""
        match target:
            case ast.Name(id=name):
                group.add(name)
                return name not in (*self.names, *_COUNTED, *_MADE)
            case ast.Subscript(value=owner, slice=index):
                return self._is_container(owner) and self.plain(index)
            case ast.Tuple(elts=parts):
                return all(self._takes(part, group) for part in parts)
        return False

    def _sets(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Tuple) and not self.plain(value):
            parts = value.elts if isinstance(value, ast.Tuple) else []  # a row would be split into its elements
            return len(parts) == len(target.elts) and all(map(self._sets, target.elts, parts))
        match target:
            case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if not self.plain(value):
                self.holding.add(name)
        is_made = isinstance(value, (ast.List, ast.Dict, ast.ListComp, ast.DictComp)) or self._is_made(value)
        return self._takes(target, self.containers if is_made else self.others)

    def _is_container(self, node: ast.expr) -> bool:
        """Whether it is the name of a list or dict that the code has made, and of nothing else."""
        return isinstance(node, ast.Name) and node.id in self.containers - self.others - self.steps

    def _is_made(self, node: ast.expr) -> bool:
        """`list()` or `dict()`, with `.save()` or without."""
        match node:
            case ast.Call(func=ast.Attribute(value=inner, attr="save"), args=[], keywords=[]):
                return isinstance(inner, (ast.List, ast.Dict)) or self._is_made(inner)
            case ast.Call(func=function, args=[], keywords=[]):
                return self._is_one_of(function, _MADE)
        return False

    def _loops(self, target: ast.expr, over: ast.expr) -> bool:
        named = self._takes(target, self.others)
        return named and (self._is_steps(over) or self.plain(over) or self._is_listed(over))

    def _is_listed(self, node: ast.expr) -> bool:
        """Whether it is the name of a list of fixed values."""
        found = self.names.get(node.id) if isinstance(node, ast.Name) else None
        return isinstance(found, Known) and type(found.value) is list and is_fixed(tuple(found.value))

    def _is_steps(self, node: ast.expr) -> bool:
        """Whether it is `tracer.all()`, or `tracer.iter[...]` with numbers."""
        chosen = node.slice if isinstance(node, ast.Subscript) else None
        return loop_steps(node, self.names) is not None and (chosen is None or self.plain(chosen))

    def value(self, node: ast.expr) -> bool:
        """Whether the expression is of these forms. It may hold rows."""
        match node:
            case ast.Subscript(value=owner, slice=index) if self._is_step(owner) and _is_last(index):
                self.reads.add("last")
                return True
            case ast.Subscript() | ast.Name() if self._is_step(node):
                self.reads.add("whole")
                return True
            case ast.Name(id=name) if name in self.holding:
                return True
            case ast.Constant() | ast.Name():
                return self.plain(node)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return all(map(self.value, parts))
            case ast.Dict(keys=keys, values=values):
                return all(each is not None and self.plain(each) for each in keys) and all(map(self.value, values))
            case ast.ListComp(elt=element, generators=loops):
                return self._in_loops(loops) and self.value(element)
            case ast.DictComp(key=key, value=element, generators=loops):
                return self._in_loops(loops) and self.plain(key) and self.value(element)
            case ast.Call(func=ast.Attribute(value=owner, attr=attribute), args=[], keywords=[]) if (
                attribute in _COPIES
            ):
                is_same = attribute == "cpu" and isinstance(owner, ast.Name)  # in this process, the named tensor itself
                return not is_same and self.value(owner)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name) as owner, attr="append"), args=[item], keywords=[]
            ):
                self.holding.add(name)
                return self._is_container(owner) and self.value(item)
            case ast.Call(func=function, args=[item], keywords=[]) if self._is_save(function):
                return self.value(item)
        return self._is_made(node)

    def plain(self, node: ast.expr) -> bool:
        """Whether the expression cannot hold rows: a number, a text, or numbers to loop over."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name) if name in self.names:
                found = self.names[name]
                return isinstance(found, Known) and is_fixed(found.value)
            case ast.Name(id=name):
                return name not in self.holding | self.steps
            case ast.Attribute(value=ast.Name(id=name), attr="num_layers"):
                return self.names.get(name) is MODEL
            case ast.UnaryOp(operand=operand):
                return self.plain(operand)
            case ast.BinOp(left=left, right=right):
                return self.plain(left) and self.plain(right)
            case ast.Slice(lower=lower, upper=upper, step=step):
                return all(each is None or self.plain(each) for each in (lower, upper, step))
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return all(map(self.plain, parts))
            case ast.Call(func=function, args=args, keywords=[]):
                return self._is_one_of(function, _COUNTED) and all(map(self.plain, args))
        return False

    def _in_loops(self, loops: Iterable[ast.comprehension]) -> bool:
        return all(not (each.ifs or each.is_async) and self._loops(each.target, each.iter) for each in loops)

    def _is_step(self, node: ast.expr) -> bool:
        """Whether it is a read, or a name that may be the value of one."""
        return self._is_read(node) or (isinstance(node, ast.Name) and node.id in self.steps)

    def _is_read(self, node: ast.expr) -> bool:
        """`model.layers_output[3]`"""
        match node:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr=attribute), slice=layer):
                is_site = self.names.get(name) is MODEL and site_of(attribute) in LAYER_SITES
                return is_site and not isinstance(layer, (ast.Slice, ast.Tuple, ast.List)) and self.plain(layer)
        return False

    def _is_save(self, function: ast.expr) -> bool:
        match function:
            case ast.Name(id=name):
                return getattr(self.names.get(name), "value", None) is save
            case ast.Attribute(value=ast.Name(id=name), attr="save"):
                return is_package(getattr(self.names.get(name), "value", None))
        return False

    def _is_one_of(self, function: ast.expr, known: Sequence[str]) -> bool:
        """Whether it is one of these builtins, and the name has no other meaning here."""
        return isinstance(function, ast.Name) and function.id in known and function.id not in self.names


def _is_last(index: ast.expr) -> bool:
    """`-1` or `-1:`"""
    match index:
        case ast.Slice(lower=ast.expr() as first, upper=None, step=None):
            return _is_last(first)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return type(value) is int and value == 1
    return False
