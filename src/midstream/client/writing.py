"""Which changes of a site's value a trace's code makes: at once, under a name, or on a copy that is written later."""

from __future__ import annotations

import ast
import contextlib
from dataclasses import replace
from typing import Any

import torch

from midstream.client.findings import Record
from midstream.client.known import MODEL, Change, Draft, Known, Module, Site, Stays, is_the_model
from midstream.plan.values import Clamp, Edit, Patch, Steer
from midstream.sites import LAYER_SITES, Point, site_of


class Writes:
    """The writes of one function or block. `Reader` is the rest of it, which knows the values of expressions.

    Attributes:
        names: what is known of them.
    """

    record: Record
    names: dict[str, Any]

    def _value(self, node: ast.expr, quiet: bool = False) -> Any:
        raise NotImplementedError

    def _written_point(self, target: ast.expr) -> ast.expr | None:
        """`model.SITE[layer]` or `module.output` in a target: itself, or what an index of rows is applied to."""
        for each in (target, target.value if isinstance(target, ast.Subscript) else None):
            match each:
                case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                    if self.names.get(name) is MODEL and site_of(attribute) in LAYER_SITES:
                        return each
                case ast.Attribute(value=owner, attr="output" | "input"):
                    if self._is_of_the_model(owner) and isinstance(self._value(owner), Module):
                        return each
        return None

    def _is_of_the_model(self, node: ast.expr) -> bool:
        """Whether it is written as a module: `model.model.layers[3]`, or with a name for some of it."""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and is_the_model(self.names.get(node.id))

    def _point(self, place: ast.expr) -> Point:
        found = self._value(place, quiet=True)
        if not isinstance(found, Site):
            raise Stays(place, "the layer of a write is not known before the step")
        if found.point[0] not in self.record.sites:
            raise Stays(place, f"{found.point[0]} is not among the engine's graph_sites")
        return found.point

    def _writes_by(self, node: ast.AugAssign, target: ast.expr, op: ast.operator, value: ast.expr) -> bool:
        """Follow `target += value`, where the target is a site's value. False if it is none."""
        if (place := self._written_point(target)) is not None:
            point, rows = self._point(place), self._rows(target, place)
            self._make(node, point, replace(self._by(op, value, point), rows=rows))
            return True
        held = self._value(_whole(target))
        return isinstance(held, Site) and self._is_changed(target, held, self._by(op, value, held.point))

    def _changes_draft(self, target: ast.expr, op: ast.operator, found: Any) -> bool:
        """Follow `target += found`, where the target is the trace's own copy of a site's value. False if it is not known to be one."""
        held = self._value(_whole(target))
        if not (isinstance(held, Draft) and isinstance(found, Known) and isinstance(op, (ast.Add, ast.Sub))):
            return False
        return self._is_changed(target, held, _sum(op, found.value))

    def _by(self, op: ast.operator, value: ast.expr, point: Point) -> Change:
        """What `h += value` does to the site's value. Raises Stays if a plan cannot do it."""
        if not isinstance(op, (ast.Add, ast.Sub)):
            raise Stays(value, "a plan adds, subtracts, replaces and projects out; this write does something else")
        if isinstance(op, ast.Sub) and (along := self._projection(value, point)) is not None:
            return Change("project", along)
        return _sum(op, self._known(value))

    def _is_changed(self, target: ast.expr, held: Any, change: Change) -> bool:
        """Follow a change in place of `held`, which `target` is, or is rows of.

        Returns False if `held` is no site's value and no copy of one, or if what a copy becomes cannot be followed. Raises Stays if
        `held` is a site's value and a plan cannot make the change.
        """
        if isinstance(held, Site):
            if held != self.record.now(held.point) or self.record.at != held.point:
                raise Stays(target, f"an older value of {held.point[0]}[{held.point[1]}] is changed in place")
            self._make(target, held.point, replace(change, rows=self._rows(target, _whole(target))))
            self._renew(held, self.record.now(held.point))
            return True
        if isinstance(held, Draft):
            try:
                rows = self._rows(target, _whole(target))
            except Stays:
                return False
            if self.record.is_lent:
                return False
            self._renew(held, Draft(held.of, (*held.changes, replace(change, rows=rows))))
            return True
        return False

    def _renew(self, old: Site | Draft, new: Site | Draft) -> None:
        """A tensor was changed in place: all of its names have the new value."""
        self.names.update({name: new for name, value in self.names.items() if value == old})

    def _set(self, node: ast.stmt, target: ast.expr, place: ast.expr, value: ast.expr) -> None:
        """Follow `target = value`. `place`: the site's value in the target."""
        point, rows = self._point(place), self._rows(target, place)
        if rows is None and (changes := self._made_from(value, point)) is not None:
            for change in changes:
                self._make(node, point, change)
            self.record.is_lent = isinstance(value, ast.Name) and isinstance(self.names.get(value.id), Draft)
            return
        new = self._known(value)
        whole = self.record.length, self.record.facts.widths[point]
        if target is place and isinstance(place, ast.Attribute) and getattr(new, "shape", None) != whole:
            raise Stays(node, f"{ast.unparse(place)} takes a tensor of its own shape")
        self._make(node, point, Change("set", new, rows=rows))
        self.record.is_lent = self.record.is_lent or (target is place and isinstance(new, torch.Tensor))

    def _made_from(self, node: ast.expr, point: Point) -> list[Change] | None:
        """The changes, if the expression is the site's own value with changes that a plan can make."""
        match node:
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                if (inner := self._made_from(left, point)) is not None:
                    if isinstance(op, ast.Sub) and not inner and (along := self._projection(right, point)) is not None:
                        return [Change("project", along)]
                    return [*inner, _sum(op, self._known(right))]
                if isinstance(op, ast.Add) and (inner := self._made_from(right, point)) is not None:
                    return [*inner, _sum(op, self._known(left))]
            case ast.Call(func=ast.Attribute(value=inner, attr="clone"), args=[], keywords=[]):
                return self._made_from(inner, point)
            case ast.Name(id=name) if isinstance(draft := self.names.get(name), Draft):
                return list(draft.changes) if draft.of == self.record.now(point) else None
            case _ if self._is_own(node, point):
                return []
        return None

    def _drafted(self, node: ast.BinOp, left: Any, right: Any) -> Draft | None:
        """The sum or difference of a site's value and a value known before the step; None for other operations."""
        if isinstance(node.op, ast.Add) and isinstance(left, Known):
            left, right = right, left
        if not isinstance(left, (Site, Draft)) or not isinstance(node.op, (ast.Add, ast.Sub)):
            return None
        draft = Draft(left) if isinstance(left, Site) else left
        change = _sum(node.op, right.value) if isinstance(right, Known) else None
        if change is None and isinstance(node.op, ast.Sub) and not draft.changes:
            with contextlib.suppress(Stays):
                along = self._projection(node.right, draft.of.point)
                change = Change("project", along) if along is not None else None
        return Draft(draft.of, (*draft.changes, change)) if change is not None else None

    def _make(self, node: ast.AST, point: Point, change: Change) -> None:
        """Have a plan make the change."""
        if change.kind == "add":
            self._add(node, point, change.value, change.scale, change.rows)
        elif change.kind == "set":
            self._replace(node, point, change.value, change.rows)
        elif change.rows is None:
            self._project_out(node, point, change.value)
        else:
            raise Stays(node, "a direction is projected out of all rows")

    def _replace(self, node: ast.AST, point: Point, new: Any, rows: tuple[int, ...] | None) -> None:
        width, length = self.record.facts.widths[point], self.record.length
        row = _row(new, point, width)
        parts: list[torch.Tensor | None] = []
        if row is None:
            count = length if rows is None else len(rows)
            if not (isinstance(new, torch.Tensor) and tuple(new.shape) == (count, width) and not new.is_complex()):
                raise Stays(node, "the new value is no row, and not one row for each position")
            parts = [_row(part, point, width) for part in new]

        def make(place: dict[str, Any]) -> list[Edit]:
            positions = place["positions"]
            if row is not None:
                return [Patch(point[0], layer=point[1], position=positions, source=row)]
            return [
                Patch(point[0], layer=point[1], position=position, source=part)
                for position, part in zip(positions, parts, strict=True)
            ]

        self.record.write(node, point, "set", make, rows)

    def _is_own(self, node: ast.expr, point: Point) -> bool:
        """Whether the expression is the site's own value, as it is now."""
        if not isinstance(node, (ast.Name, ast.Subscript, ast.Attribute)):
            return False
        return self._value(node, quiet=True) == self.record.now(point)  # type: ignore[no-any-return]

    def _projection(self, node: ast.expr, point: Point) -> torch.Tensor | None:
        """d, if the expression is `(h @ d)[:, None] * d` or an equal form, where h is the site's value; else None.

        Raises Stays if d is not a unit vector.
        """
        match node:
            case ast.BinOp(left=along, op=ast.Mult(), right=by):
                if (vector := self._along(along, point, column=True)) is None:
                    along, by = by, along
                    vector = self._along(along, point, column=True)
                if vector is None:
                    return None
            case ast.Call(func=function, args=[along, by], keywords=[]) if (
                vector := self._along(along, point, column=False)
            ) is not None:
                called = self._value(function)
                if not (isinstance(called, Known) and called.value in (torch.outer, torch.ger)):
                    return None
            case _:
                return None
        width = self.record.facts.widths[point]
        direction, again = _row(vector, point, width), _row(self._known(by), point, width)
        if direction is None or again is None or not torch.equal(direction, again):
            raise Stays(node, "the two vectors of this projection differ, have another shape, or require a gradient")
        norm = float(direction.double().norm())
        if abs(norm - 1) > (1e-5 if self.record.facts.dtype == "float32" else 1e-3):
            raise Stays(node, f"the direction that is projected out has the norm {norm:g}, and not 1")
        return direction

    def _along(self, node: ast.expr, point: Point, column: bool) -> torch.Tensor | None:
        """d, if the expression is `h @ d`, where h is the site's value: `[tokens]`, or `[tokens, 1]` as a `column`; else None."""
        found: Any = None
        match node:
            case ast.BinOp(left=left, op=ast.MatMult(), right=right) if self._is_own(left, point):
                found = getattr(self._value(right), "value", None)
                facts = self.record.facts
                wanted = (facts.widths[point], *([1] if column else []))
                if not isinstance(found, torch.Tensor) or tuple(found.shape) != wanted:
                    return None
                if str(found.dtype) != f"torch.{facts.dtype}":  # the product is an error
                    return None
                found = found.reshape(-1)
            case ast.Subscript(
                value=inner, slice=ast.Tuple(elts=[ast.Slice(None, None, None), ast.Constant(None)])
            ) if column:
                return self._along(inner, point, column=False)
            case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze"), args=[axis], keywords=[]) if column:
                return self._along(inner, point, column=False) if self._known(axis) in (1, -1) else None
            case ast.Call(
                func=ast.Attribute(value=ast.BinOp(left=left, op=ast.Mult(), right=right), attr="sum"),
                args=args,
                keywords=named,
            ):
                given = {each.arg: self._known(each.value) for each in named}
                given |= dict(zip(("dim", "keepdim"), map(self._known, args), strict=False))
                if not (self._is_own(left, point) and given.pop("dim", None) in (1, -1)):
                    return None
                if given.pop("keepdim", False) is not column or given:
                    return None
                found = getattr(self._value(right), "value", None)
        return found if isinstance(found, torch.Tensor) and found.dtype.is_floating_point else None

    def _project_out(self, node: ast.AST, point: Point, direction: torch.Tensor) -> None:
        self.record.write(
            node, point, "project", lambda place: [Clamp(point[0], layers=point[1], direction=direction, **place)], None
        )

    def _add(self, node: ast.AST, point: Point, added: Any, scale: float, rows: tuple[int, ...] | None) -> None:
        vector = _row(added, point, self.record.facts.widths[point])
        if vector is None:
            raise Stays(node, "what is added is not one vector for all rows")
        self.record.write(
            node,
            point,
            "add",
            lambda place: [Steer(point[0], layers=point[1], vector=vector, scale=scale, **place)],
            rows,
        )

    def _rows(self, target: ast.expr, place: ast.expr) -> tuple[int, ...] | None:
        """The positions of the prompt that a write is about; None for all rows."""
        if target is place:
            return None
        assert isinstance(target, ast.Subscript)
        index = self._known(target.slice)
        if isinstance(index, tuple) and len(index) == 2 and index[1] in (slice(None), Ellipsis):
            index = index[0]
        try:
            if index == slice(None):
                return None
            length = self.record.length
            if isinstance(index, slice):
                return tuple(range(length)[index])
            listed = index if isinstance(index, (list, tuple, range)) else [index]
            if isinstance(index, tuple) or not all(type(each) is int for each in listed):
                raise TypeError
            found = tuple(range(length)[each] for each in listed)
        except (TypeError, IndexError, ValueError) as error:
            raise Stays(target, "the rows of a write are not known before the step") from error
        if not found or len(set(found)) < len(found):
            raise Stays(target, "the rows of a write are none, or one of them is named twice")
        return found

    def _known(self, node: ast.expr) -> Any:
        found = self._value(node)
        if not isinstance(found, Known):
            raise Stays(node, f"`{ast.unparse(node)}` is not known before the step")
        return found.value


def _whole(target: ast.expr) -> ast.expr:
    """`h` of `h[rows]`; the target itself if it names no rows."""
    return target.value if isinstance(target, ast.Subscript) else target


def _sum(op: ast.operator, value: Any) -> Change:
    """The change `+ value` or `- value`."""
    return Change("add", value, -1.0 if isinstance(op, ast.Sub) else 1.0)


def _row(value: Any, point: Point, width: int) -> torch.Tensor | None:
    """The value as one row for all positions, float32 `[width]`; None if it is none."""
    if type(value) in (int, float):
        return torch.full((width,), float(value))
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.dtype is torch.bool or value.requires_grad:
        return None
    if value.numel() == 1 and value.ndim <= 2:
        return torch.full((width,), float(value))
    flat = value[0] if value.ndim == 2 and value.shape[0] == 1 else value
    if tuple(flat.shape) != (width,) or point[0] == "attn_z":  # whose rows have two axes
        return None
    return flat.detach().to("cpu", torch.float32).contiguous()
