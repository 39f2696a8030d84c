"""One stop of the forward pass at a point, and what one trace does to the value there.

An `Event` is the forward's side: the value of the whole batch, replaced where somebody wrote. A `Visit` is one request's
side of it: it hands out this request's part, and on leaving writes back what was edited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import ShapeError
from midstream.sites import Binding, Ref, follow, replaced
from midstream.trace.rows import FlatRows, Rows, private
from midstream.trace.shared import SharedSite, Span
from midstream.trace.tree import leaves, map_tensors, memory_of, shape_text

if TYPE_CHECKING:
    from midstream.trace.journal import Journal
    from midstream.trace.whole import Whole

Key = tuple[str, ...]  # (path, "input"), (path, "output"), ("", "logits"), (path, "source", call, "output")


def point_name(key: Key) -> str:
    """How a user would write the point: `model.layers.3.output`."""
    return ".".join(part for part in key if part)


class Event:
    """The forward pass at `key`. `tree` is the whole batch's value there: `(args, kwargs)` or what was returned.

    Under tensor parallelism a rank has only a part of some leaves: traces read and write the whole, which `whole` knows the way to.
    `laid_out_as`: the point whose value is laid out like this one.
    """

    def __init__(
        self, key: Key, tree: Any, direct: bool = False, whole: Whole | None = None, laid_out_as: Key | None = None
    ) -> None:
        self.key = key
        self.tree = tree
        self._whole = whole
        self._layouts = whole.of(laid_out_as or key) if whole is not None else {}
        self._joined: dict[tuple[Ref, Span], torch.Tensor] = {}
        self.direct = (
            direct  # whether writes land in the tree's own tensors: compiled code has no other way to see them
        )
        self._owned: set[Ref] = set()
        self._shared: dict[tuple[Binding, Span], SharedSite] = {}

    def shared(self, binding: Binding, span: Span, total: int, body: str) -> SharedSite:
        """The site's value for the traced requests of this event. `body` is the one that asks."""
        if (binding, span) not in self._shared:
            self._shared[binding, span] = SharedSite(self, binding, span, total, body)
        return self._shared[binding, span]

    def take_tokens(self, ref: Ref, rows: Rows, body: str) -> torch.Tensor:
        """These tokens of the leaf, `[t, ...]`; the engine's own memory unless the leaf is a part."""
        part = rows.take_tokens(self.leaf(ref))
        return self._join(ref, part, 1, body) if ref in self._layouts else part

    def take(self, ref: Ref, rows: Rows, span: Span | None, body: str) -> torch.Tensor:
        """One request's rows of the leaf, for a trace to hold. Parts are joined for all of `span` at once."""
        full = self.leaf(ref)
        if ref not in self._layouts or not isinstance(rows, FlatRows):
            return rows.take(full)
        first, last = span or (rows.start, rows.stop)
        axis = rows.axis(full)
        if axis is None:
            return private(self._join(ref, full, 0, body))
        if (ref, (first, last)) not in self._joined:
            part = full.narrow(axis, first, last - first)
            self._joined[ref, (first, last)] = self._join(ref, part, axis + 1, body)
        return private(self._joined[ref, (first, last)].narrow(axis, rows.start - first, rows.count))

    def _join(self, ref: Ref, part: torch.Tensor, lead: int, body: str) -> torch.Tensor:
        assert self._whole is not None
        self._whole.agreement.agree(body, point_name(self.key), *ref, tuple(part.shape))
        return self._whole.join(self._layouts[ref], part, lead)

    def note_write(self, body: str, where: Any) -> None:
        """`body` writes here, as it has to on every tensor-parallel rank."""
        if self._whole is not None:
            self._whole.agreement.note(body, "a write to", point_name(self.key), where)

    def write_back(self) -> None:
        """Have every edit in the tree, before anybody looks at it otherwise."""
        shared, self._shared = self._shared, {}
        for site in shared.values():
            site.write_back()

    @property
    def changed(self) -> bool:
        return bool(self._owned)

    def leaf(self, ref: Ref) -> Any:
        return follow(self.tree, ref)

    def write(self, ref: Ref, value: torch.Tensor, rows: Rows, tokens: bool, in_place: bool = False) -> None:
        """Put `value` into this request's part of the leaf.

        The engine's own tensor is left alone, for it may be seen from elsewhere; unless that is what is wanted (`in_place`).
        """
        full = self.leaf(ref)
        if ref in self._layouts:
            value = self._cut(ref, full, value, rows, tokens)
        if in_place or self.direct:
            rows.take_tokens(full).copy_(value)
            return
        if ref not in self._owned and not rows.aliases:
            full = full.clone()
        full = rows.put_tokens(full, value) if tokens else rows.put(full, value)
        self.tree = replaced(self.tree, ref, full)
        self._owned.add(ref)

    def _cut(self, ref: Ref, full: torch.Tensor, value: torch.Tensor, rows: Rows, tokens: bool) -> torch.Tensor:
        """This rank's part of `value`."""
        assert self._whole is not None and isinstance(rows, FlatRows)
        for key in [key for key in self._joined if key[0] == ref]:
            first, last = key[1]
            if first <= rows.start and rows.stop <= last:
                own = FlatRows(rows.start - first, rows.stop - first, last - first)
                (own.put_tokens if tokens else own.put)(self._joined[key], value)
            else:
                del self._joined[key]
        axis = rows.axis(full)
        return self._whole.cut(self._layouts[ref], value, 1 if tokens else 0 if axis is None else axis + 1)


@dataclass
class _Handed:
    """A tensor that the trace holds, and how it looked when it was handed out."""

    value: torch.Tensor
    version: int
    write: Callable[[torch.Tensor], None]
    view: Binding | None  # the site that it is the value of, or None for the module's own


class Visit:
    """What one trace sees of an event."""

    def __init__(
        self,
        event: Event,
        rows: Rows,
        step: int,
        journal: Journal | None = None,
        span: Span | None = None,
        body: str = "",
    ) -> None:
        self._body = body
        self.event = event
        self.key = event.key
        self.rows = rows
        self.step = step
        self._journal = journal
        self._span = span
        self._handed: list[_Handed] = []
        self._followed: list[tuple[torch.Tensor, int, Callable[[], None]]] = []
        self._raw: Any = None
        self._has_raw = False
        self._sites: dict[Binding, torch.Tensor] = {}

    def _write(self, ref: Ref, value: torch.Tensor, tokens: bool, in_place: bool = False) -> None:
        self.event.note_write(self._body, ref)
        self.event.write(ref, value, self.rows, tokens, in_place)
        if self._journal is not None and isinstance(self.rows, FlatRows) and not tokens:
            axis = self.rows.axis(self.event.leaf(ref))
            if axis is not None:
                self._journal.add(self.key, ref, self.rows.first_position, value.detach().clone(), axis)

    def _hand_out(
        self,
        value: torch.Tensor,
        write: Callable[[torch.Tensor], None],
        lands_itself: bool,
        view: Binding | None = None,
    ) -> torch.Tensor:
        if lands_itself:
            return value
        if (
            value.requires_grad
        ):  # gradients are read at what the trace holds, so that must be what the model goes on with
            write(value)
        self._handed.append(_Handed(value, value._version, write, view))
        return value

    def holds(self, value: torch.Tensor) -> bool:
        """Whether an edit of `value` would be one of what this visit is about."""
        memory = memory_of(value)
        here = [handed.value for handed in self._handed] or [leaf for _, leaf in leaves(self.event.tree)]
        return memory is not None and any(memory_of(tensor) == memory for tensor in here)

    def follow(self, copy: torch.Tensor, written: Callable[[], None]) -> None:
        """Call `written` when `copy`, of something that this visit holds, has been edited, before the visit's own edits count."""
        self._followed.append((copy, copy._version, written))

    def _isolate(self, value: torch.Tensor) -> torch.Tensor:
        """A module's input is often its neighbour's too: an edit must reach this module alone."""
        return value.clone() if self.rows.aliases and "input" in self.key else value

    def raw(self) -> Any:
        """The value as the module has it, this request's rows only."""
        self._settle()
        if not self._has_raw:
            self.event.write_back()

            def take(ref: Ref, full: torch.Tensor) -> torch.Tensor:
                part = self._isolate(self.event.take(ref, self.rows, self._span, self._body))
                return self._hand_out(part, lambda v: self._write(ref, v, False), part is full)

            self._raw, self._has_raw = map_tensors(self.event.tree, take), True
        return self._raw

    def set_raw(self, value: Any) -> None:
        current = self.raw()
        if value is current:
            return
        expected = dict(leaves(current))
        given = dict(leaves(value))
        if set(expected) != set(given) or any(given[ref].shape != part.shape for ref, part in expected.items()):
            raise ShapeError(
                f"{point_name(self.key)} is {shape_text(current)} for this request; "
                f"{shape_text(value)} was written to it. Write a value of the same structure and shape."
            )
        self._settle()
        for ref, part in given.items():
            if part is not expected[ref]:
                self._write(ref, part, False)
        self._forget()

        def keep(ref: Ref, part: torch.Tensor) -> torch.Tensor:
            return self._hand_out(_tracked(part), lambda v: self._write(ref, v, False), False)

        self._raw, self._has_raw = map_tensors(value, keep), True

    def site(self, binding: Binding) -> torch.Tensor:
        """The site's value, `[tokens, hidden]` (`[tokens, heads, head_dim]` for `attn_z`)."""
        self._settle()
        if binding not in self._sites:
            if self._sites or self._handed:
                self.event.write_back()

            def leaf(ref: Ref) -> torch.Tensor | None:
                full = self.event.leaf(ref)
                return full if full is None or full.ndim == 1 else self.rows.take_tokens(full)

            if isinstance(self.rows, FlatRows):
                value = self._shared(binding).part(self.rows)
            else:
                value = self._isolate(binding.read(leaf))
            self._sites[binding] = self._hand_out(value, lambda v: self._write_site(binding, v), False, binding)
        return self._sites[binding]

    def _shared(self, binding: Binding) -> SharedSite:
        assert isinstance(self.rows, FlatRows)
        span = self._span or (self.rows.start, self.rows.stop)
        return self.event.shared(binding, span, self.rows.total, self._body)

    def _write_site(self, binding: Binding, value: torch.Tensor) -> None:
        if isinstance(self.rows, FlatRows):
            self.event.note_write(self._body, binding.hidden)
            self._shared(binding).edit(self.rows, value, self._journal)
            return
        for ref, part in binding.leaves(value, self.event.leaf):
            self._write(ref, part, True, binding.in_place)

    def set_site(self, binding: Binding, value: torch.Tensor, name: str) -> None:
        current = self.site(binding)
        if value is current:
            return
        if not isinstance(value, torch.Tensor):
            raise ShapeError(f"{name} is a tensor {list(current.shape)}; a {type(value).__name__} was written to it.")
        try:
            whole = value.to(current).expand_as(current)
        except RuntimeError:
            raise ShapeError(
                f"{name} is {list(current.shape)} for this request; {list(value.shape)} was written to it. "
                "Write a tensor of that shape, or one that broadcasts to it."
            ) from None
        self._settle()
        self._forget()
        self._write_site(binding, whole)
        kept = _tracked(whole if whole is value else whole.clone())
        self._sites = {binding: kept}
        self._hand_out(kept, lambda v: self._write_site(binding, v), False, binding)

    def _settle(self) -> None:
        """Write back what was edited in place since it was handed out. Other views of this point are then out of date."""
        for place, (copy, version, written) in enumerate(self._followed):
            if copy._version != version:
                written()
                self._followed[place] = copy, copy._version, written
        edited = [handed for handed in self._handed if handed.value._version != handed.version]
        for handed in edited:
            handed.write(handed.value)
            handed.version = handed.value._version
        views = {handed.view for handed in edited}
        if views:
            self._sites = {binding: value for binding, value in self._sites.items() if views == {binding}}
            self._has_raw = self._has_raw and views == {None}

    def _forget(self) -> None:
        """Older views of this point are out of date after a replacement."""
        self._followed.clear()
        self._handed.clear()
        self._sites.clear()
        self._has_raw = False

    def leave(self) -> None:
        """The trace goes on to another point: its edits here become final."""
        self._settle()
        self._handed.clear()
        self._followed.clear()


def _tracked(value: torch.Tensor) -> torch.Tensor:
    """`value`, such that edits in place can be told: what is computed in inference mode has no version counter."""
    return private(value) if value.is_inference() else value
