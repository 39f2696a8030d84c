"""One trace's access to the value at a point: a `Visit` returns the rows of its request, and writes edits back.

A `Journal` keeps a request's edits. If the engine preempts the request and computes positions again, the journal replays them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import ShapeError, TraceError
from midstream.sites import Binding, Key, point_name
from midstream.trace.batch_rows import Event, FlatRows, RequestRows, RowSpan, SharedSite, private
from midstream.tree import Ref, as_bits, leaves, map_tensors, memory_of, shape_text


@dataclass
class _JournalEntry:
    """The value written to a site or a leaf, along `axis` from `first_position` on."""

    where: Binding | Ref
    axis: int
    first_position: int
    value: torch.Tensor


class Journal:
    """One request's edits, by point. A later edit of the same positions replaces the earlier one."""

    def __init__(self) -> None:
        self._edits: defaultdict[Key, dict[tuple[Binding | Ref, int], _JournalEntry]] = defaultdict(dict)
        self.fresh: list[_JournalEntry] = []  # edits whose values are still on the GPU

    def __iter__(self) -> Iterator[Key]:
        return iter(self._edits)

    def __bool__(self) -> bool:
        return bool(self._edits)

    def add(self, key: Key, where: Binding | Ref, first_position: int, value: torch.Tensor, axis: int = 0) -> None:
        """Note an edit. The journal keeps `value` itself."""
        edit = _JournalEntry(where, axis, first_position, value)
        self._edits[key][where, first_position] = edit
        if value.is_cuda:
            self.fresh.append(edit)

    def first_not_finite(self) -> tuple[Key, Binding | Ref, int] | None:
        """The first write of an infinity or a NaN: its point, its site or leaf, and its position."""
        for key, edits in self._edits.items():
            for edit in edits.values():
                rows = torch.isfinite(edit.value).movedim(edit.axis, 0)
                bad = ~rows.reshape(len(rows), -1).all(-1)
                if bad.any():
                    return key, edit.where, edit.first_position + int(bad.nonzero()[0])
        return None

    def replay(self, event: Event, rows: FlatRows) -> None:
        """Repeat the edits at the positions of `rows`."""
        for edit in self._edits.get(event.key, {}).values():
            begin = max(edit.first_position, rows.first_position)
            end = min(edit.first_position + edit.value.shape[edit.axis], rows.end)
            if begin < end:
                part = edit.value.narrow(edit.axis, begin - edit.first_position, end - begin)
                _make_again(event, edit.where, part, rows.at(begin, end))


def _make_again(event: Event, where: Binding | Ref, value: torch.Tensor, rows: FlatRows) -> None:
    if isinstance(where, Binding):
        full = event.leaf(where.hidden)
        for ref, part in where.leaves(value.to(full.device), event.leaf):
            event.write(ref, part, rows, tokens=True, in_place=where.in_place)
    else:
        event.write(where, value.to(event.leaf(where).device), rows, tokens=False)


def move_to_host(journals: Iterable[Journal]) -> None:
    """Copy a step's edits to host memory without waiting for the GPU, so that a long generation does not fill its memory."""
    by_dtype: defaultdict[torch.dtype, list[_JournalEntry]] = defaultdict(list)
    for journal in journals:
        for edit in journal.fresh:
            by_dtype[edit.value.dtype].append(edit)
        journal.fresh = []
    for dtype, edits in by_dtype.items():
        flat = torch.cat([edit.value.reshape(-1) for edit in edits])
        host = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat, non_blocking=True)
        for edit, part in zip(edits, host.split([edit.value.numel() for edit in edits]), strict=True):
            edit.value = part.view(edit.value.shape)


@dataclass(eq=False)
class _Handed:
    """A tensor that the trace holds: one that it has read, or one that it has written. The forward gets its changes in place.

    Attributes:
        write: writes it to the forward.
        view: the site whose value it is; None for a leaf of the module's own value.
        version: its version when it was read or written last; None if it has to be written.
        seen: its content at that time, where versions may miss a change: on a CPU, because numpy and `.data` change tensors silently; and
            elsewhere for a tensor without versions, if the point has other views. Else a tensor without versions is always written.
    """

    value: torch.Tensor
    write: Callable[[torch.Tensor], None]
    view: Binding | None
    version: int | None = None
    seen: torch.Tensor | None = None

    @property
    def is_edited(self) -> bool:
        if self.seen is not None:
            return not torch.equal(as_bits(self.seen), as_bits(self.value))
        return self.value.is_inference() or self.version != self.value._version

    def note(self, has_others: bool) -> None:
        """Remember the present content as the one read or written. `has_others`: whether the point has other views."""
        if not self.value.is_inference():
            self.version = self.value._version
        if self.value.is_cpu or (has_others and self.value.is_inference()):
            self.seen = self.value.detach().clone()


class Visit:
    """One trace's view of an event.

    Args:
        rows: of its request.
        journal: records its edits.
        span: the rows of all traced requests, if they are worth reading together.
        body: the trace's name.
        live: collects the memory of activations that the trace holds without a copy.
    """

    def __init__(
        self,
        event: Event,
        rows: RequestRows,
        step: int,
        journal: Journal | None = None,
        span: RowSpan | None = None,
        body: str = "",
        live: set[int | None] | None = None,
    ) -> None:
        self._body = body
        self._live = live if live is not None else set()
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
        # For a site that was set to a tensor of another shape, dtype or device: this tensor, and one that has the site's.
        self._sources: dict[Binding, tuple[_Handed, torch.Tensor]] = {}

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
        view: Binding | None = None,
    ) -> torch.Tensor:
        if value.requires_grad:  # the trace reads gradients at this tensor, so the model has to use it
            write(value)
        handed = _Handed(value, write, view)
        for other in self._handed:
            if other.value.is_inference() and other.seen is None and _differ(other, handed):
                other.note(has_others=True)
        self._handed.append(handed)
        self._note(handed)
        return value

    def _note(self, handed: _Handed) -> None:
        handed.note(any(_differ(other, handed) for other in self._handed))

    def holds(self, value: torch.Tensor) -> bool:
        """Whether `value` shares memory with a tensor of this visit."""
        memory = memory_of(value)
        here = [handed.value for handed in self._handed] or [leaf for _, leaf in leaves(self.event.tree)]
        return memory is not None and any(memory_of(tensor) == memory for tensor in here)

    def follow(self, copy: torch.Tensor, written: Callable[[], None]) -> None:
        """Call `written` once the trace has edited `copy`, a copy of a tensor of this visit; before the visit writes its own edits."""
        self._followed.append((copy, copy._version, written))

    def _isolate(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that the trace may change in place, although other modules may use the memory of the forward's tensor. The visit passes
        the changes on to the forward.
        """
        if not self.rows.aliases:
            return value
        own = value.clone()
        self._live.add(memory_of(own))
        return own

    def raw(self) -> Any:
        """This request's rows of the value, with the module's structure."""
        self._settle()
        if not self._has_raw:
            self.event.write_back()

            def take(ref: Ref, full: torch.Tensor) -> torch.Tensor:
                part = self._isolate(self.event.take(ref, self.rows, self._span, self._body))
                return self._hand_out(part, lambda v: self._write(ref, v, False))

            self._raw, self._has_raw = map_tensors(self.event.tree, take), True
        return self._raw

    def set_raw(self, value: Any) -> None:
        """Replace the value. Raises ShapeError unless `value` has the same structure and shapes."""
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
        self._forget()

        def keep(ref: Ref, part: torch.Tensor) -> torch.Tensor:
            def write(v: torch.Tensor) -> None:
                self._write(ref, v, False)

            if part is expected[ref]:
                return self._hand_out(part, write)
            self._handed.append(_Handed(part, write, None))
            return part

        self._raw, self._has_raw = map_tensors(value, keep), True

    def first(self) -> Any:
        """The first argument of a module's input."""
        return first_argument(self.raw())

    def set_first(self, value: Any) -> None:
        """Replace the first argument. Errors are those of `set_raw`."""
        args, kwargs = self.raw()
        if args:
            self.set_raw(((value, *args[1:]), kwargs))
        else:
            self.set_raw((args, {**kwargs, next(iter(kwargs)): value}))

    def site(self, binding: Binding) -> torch.Tensor:
        """The site's value, `[tokens, hidden]` (`[tokens, heads, head_dim]` for `attn_z`)."""
        self._settle()
        if binding not in self._sites:
            value = self._read_site(binding)
            self._sites[binding] = self._hand_out(value, lambda v: self._write_site(binding, v), binding)
        return self._sites[binding]

    def _read_site(self, binding: Binding) -> torch.Tensor:
        if binding in self._sources:
            source, like = self._sources[binding]
            return private(_fitted(source.value, like))
        if self._sites or self._handed:
            self.event.write_back()
        if isinstance(self.rows, FlatRows):
            return self._shared(binding, self.rows).part(self.rows)

        def leaf(ref: Ref) -> torch.Tensor | None:
            full = self.event.leaf(ref)
            return full if full is None or full.ndim == 1 else self.rows.view(full, True)

        return self._isolate(binding.read(leaf))

    def _shared(self, binding: Binding, rows: FlatRows) -> SharedSite:
        return self.event.shared(binding, self._span or (rows.start, rows.stop), rows.total, self._body)

    def _write_site(self, binding: Binding, value: torch.Tensor) -> None:
        if isinstance(self.rows, FlatRows):
            self.event.note_write(self._body, binding.hidden)
            written = self._journal.add if self._journal is not None else None
            self._shared(binding, self.rows).edit(self.rows, value, written)
            return
        for ref, part in binding.leaves(value, self.event.leaf):
            self._write(ref, part, True, binding.in_place)

    def set_site(self, binding: Binding, value: torch.Tensor, name: str) -> None:
        """Replace the site's value by the given tensor itself, so that its later changes in place count, too.

        Raises ShapeError, which calls the site `name`, unless `value` broadcasts to its shape.
        """
        current = self.site(binding)
        if value is current:
            return
        if not isinstance(value, torch.Tensor):
            raise ShapeError(f"{name} is a tensor {list(current.shape)}; a {type(value).__name__} was written to it.")
        try:
            fitted = _fitted(value, current)
        except RuntimeError:
            raise ShapeError(
                f"{name} is {list(current.shape)} for this request; {list(value.shape)} was written to it. "
                "Write a tensor of that shape, or one that broadcasts to it."
            ) from None
        self._settle()
        self._forget()
        put = _Handed(value, lambda v: self._write_site(binding, _fitted(v, current)), binding)
        self._handed.append(put)
        if fitted.shape == value.shape and fitted.dtype == value.dtype and fitted.device == value.device:
            self._sites[binding] = value
        else:
            self._sources[binding] = put, current

    def _settle(self) -> None:
        """Write the values that the trace has put here, and its edits in place. The other views of this point are then out of date."""
        for place, (copy, version, written) in enumerate(self._followed):
            if copy._version != version:
                written()
                self._followed[place] = copy, copy._version, written
        edited = self._without_sources([handed for handed in self._handed if handed.is_edited])
        for handed in edited:
            handed.write(handed.value)
            self._note(handed)
        views = {handed.view for handed in edited}
        if views:
            self._sites = {binding: value for binding, value in self._sites.items() if views == {binding}}
            self._sources = {binding: source for binding, source in self._sources.items() if views == {binding}}
            self._has_raw = self._has_raw and views == {None}

    def _without_sources(self, edited: list[_Handed]) -> list[_Handed]:
        """The tensors to write. If the trace put a tensor at a site and read the site back in another shape, the tensor that was read
        stands for both, after an update.

        Raises TraceError if both were edited.
        """
        for binding, (source, like) in self._sources.items():
            read = next((each for each in self._handed if each.value is self._sites.get(binding)), None)
            if read is None or source not in edited:
                continue
            if read in edited:
                raise TraceError(
                    f"{point_name(self.key)} was set to a tensor {list(source.value.shape)} of {source.value.dtype} and read again as "
                    f"{list(like.shape)} of {like.dtype}. These are two tensors, and the trace has changed both: change one of them."
                )
            read.value.copy_(_fitted(source.value, like))
            self._note(source)
            edited = [read if each is source else each for each in edited]
        return edited

    def _forget(self) -> None:
        """Drop the older views of this point, which a replacement has made out of date."""
        self._followed.clear()
        self._handed.clear()
        self._sites.clear()
        self._sources.clear()
        self._has_raw = False

    def leave(self) -> None:
        """The trace goes on to another point, so its edits here are final."""
        self._settle()
        self._handed.clear()
        self._followed.clear()


def first_argument(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The first of a call's arguments `(args, kwargs)`."""
    args, kwargs = inputs
    return args[0] if args else next(iter(kwargs.values()))


def _fitted(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with the shape, dtype and device of `like`; raises RuntimeError if it does not broadcast."""
    return value.to(like).expand_as(like)


def _differ(one: _Handed, other: _Handed) -> bool:
    """Whether a write of one tensor changes the other. Two leaves of one value are independent."""
    return one is not other and (one.view is not None or other.view is not None)
