"""What all edits have in common, and the registry of their kinds.

One class in one file is everything about an edit: its fields, its arithmetic in PyTorch (`reference`) and in Triton (`kernel`), and when it
changes nothing. The wire form, the checks, the normal form, the keys of the prefix cache and the engine's tables are derived from that:

    @register
    @dataclass(frozen=True)
    class Scale(Edit):
        kind, order = "scale", 40

        site: str
        _: KW_ONLY
        layers: Any = "all"
        factor: float = 1.0
        phase: str = "both"
        positions: Any = None

        def __post_init__(self) -> None:
            self.settle(factor=fields.number("Scale.factor", self.factor))

        def changes_nothing(self) -> bool:
            return self.factor == 1

        def numbers(self) -> tuple[float, float, float]:
            return self.factor, 0.0, 0.0

        @staticmethod
        def reference(h_TH, v_H, w_H, a, b, c):
            return a * h_TH

        @staticmethod
        def kernel(h, v, w, a, b, c):
            return a * h

A package offers its edits to engines by an entry point in the group `midstream.ops` that names the class, so that every process finds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.fields import Span, as_positions, check_resolved, resolved_list
from midstream.plan.vectors import RecordedRun

if TYPE_CHECKING:
    import torch

PHASES = ("both", "prefill", "decode")
GROUP = "midstream.ops"
Shape = Callable[
    [np.ndarray, str], np.ndarray
]  # (numbers, what to call them in messages) -> the numbers that the arithmetic takes
E = TypeVar("E", bound="type[Edit]")


class Op(NamedTuple):
    """One thing to do to a row at a site, as tables and kernels have it.

    Attributes:
        kind: `Edit.kind`, or "capture".
        vector, mask: indices in a bank of vectors, of the edit's first and second operand; -1 for none.
        a, b, c: `Edit.numbers`.
        offset: of a capture, in elements, where the row's value goes in the captured row.
    """

    kind: str
    vector: int = -1
    mask: int = -1
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    offset: int = 0


class Edit:
    """Base of all edits: frozen dataclasses with a `site` and, unless they say otherwise, `layers`, `phase` and `positions`.

    Attributes:
        kind: its name on the wire.
        order: edits of a lower order come first at a site. `Patch` has 10, `Steer` 20, `Clamp` 30.
        adds: whether the arithmetic gives a summand rather than the new value. The summands of all such edits that follow each other are
            computed from the same h and added to it once, so their order does not matter.
        operands: the fields that hold a vector: the arithmetic's v and w. At most two.
        run_operands: those of them that may also hold a `RecordedRun` or zeros; `run_row` says which row.
        layer_field, position_field: the names of the fields for layers and positions.
        place_fields: the fields that say at which positions it acts, rather than what it does there. All others are part of the keys of KV
            blocks; a run's row is, too.
    """

    kind: ClassVar[str]
    order: ClassVar[int]
    adds: ClassVar[bool] = False
    operands: ClassVar[tuple[str, ...]] = ()
    run_operands: ClassVar[tuple[str, ...]] = ()
    layer_field: ClassVar[str] = "layers"
    position_field: ClassVar[str] = "positions"
    place_fields: ClassVar[frozenset[str]] = frozenset({"positions", "phase"})

    site: str
    layers: Any
    phase: str
    positions: Any

    # What each kind says of itself.

    def changes_nothing(self) -> bool:
        """Whether it leaves every value as it is, so that plans with and without it are the same plan."""
        raise NotImplementedError

    def numbers(self) -> tuple[float, float, float]:
        """The arithmetic's a, b and c, float32."""
        return 0.0, 0.0, 0.0

    def shape(self, field: str) -> Shape | None:
        """What the numbers of an operand have to be put through, if they come by name; None for nothing."""
        return None

    def run_row(self) -> tuple[str, int, int]:
        """The (site, layer, position) of a recorded run's row, for an edit in normal form whose `run_operands` hold a run."""
        raise NotImplementedError

    def check_run(self, field: str, run: RecordedRun, widths: Mapping[tuple[str, int], int]) -> None:
        """Raise PlanError if the edit cannot read what it asks for from `run`."""

    @staticmethod
    def reference(
        h_TH: torch.Tensor, v_H: torch.Tensor, w_H: torch.Tensor | None, a: float, b: float, c: float
    ) -> torch.Tensor:
        """The new value, or the summand, in plain PyTorch: the path on the CPU, and what the kernel is tested against.

        Args:
            h_TH: float32 `[T, H]`.
            v_H, w_H: the operands, float32 `[H]`; None if there is none.

        Returns:
            float32 `[T, H]`, or of a shape that broadcasts to it. A row must not depend on the rows beside it.
        """
        raise NotImplementedError

    # The same in Triton, for one row, `[H]`; `tl` is triton.language. w is 1 where there is no second operand. A static method without
    # annotations, which Triton does not allow. None: the edit runs on CPUs alone.
    kernel: ClassVar[Callable[..., Any] | None] = None

    # What follows from the fields.

    @property
    def at_layers(self) -> Any:
        """`"all"` or a tuple of layers."""
        return self.layers

    @property
    def place(self) -> Any:
        """A tuple of positions of the prompt, a `Span`, or None for every position of `phase`."""
        return self.positions

    def settle(self, **attributes: Any) -> None:
        """Put checked values into the frozen dataclass, those of the common fields among them."""
        name = type(self).__name__
        fields.settle(self, site=fields.site(f"{name}.site", self.site))
        if self.layer_field == "layers":
            fields.settle(self, layers=fields.layers(f"{name}.layers", self.layers))
            fields.one_of(f"{name}.phase", self.phase, PHASES)
            fields.settle(self, positions=self._checked_positions(f"{name}.positions"))
        fields.settle(self, **attributes)

    def _checked_positions(self, field: str) -> Any:
        if self.positions is None:
            return None
        if self.phase != "both":
            given = f"{fields.shown(self.positions)} beside phase={self.phase!r}"
            raise fields.refuse(field, given, "one of them: positions are of the prompt")
        return as_positions(field, self.positions)

    @property
    def reads_run(self) -> bool:
        """Whether an operand is a recorded run."""
        return any([isinstance(getattr(self, field), RecordedRun) for field in self.run_operands])

    def what(self) -> tuple[Any, ...]:
        """What it does, without where, as a key: runs by their ids, which hash quicker than runs."""
        values = vars(self)
        found = [values[name] for name in _what_fields(type(self))]  # type: ignore[arg-type]
        if self.reads_run:
            found = [value.id if isinstance(value, RecordedRun) else value for value in found]
        return (self.kind, *found)

    def values(self) -> Iterator[tuple[str, Any]]:
        """The operands that are given: (field, vector, name, run or zeros)."""
        for field in self.operands:
            value = getattr(self, field)
            if value is not None:
                yield field, value

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Self]:
        """One edit for each layer and position: the normal form of one edit.

        Args:
            num_layers: the model's; None leaves `layers="all"` as it is.
            prompt_length: in tokens; None leaves positions as they are.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
        """
        place, field = self.place, f"{type(self).__name__}.{self.position_field}"
        check_resolved(field, place, prompt_length)
        if place is None or isinstance(place, Span):
            yield from per_layer(self, num_layers)
            return
        if prompt_length is not None:
            place = resolved_list(field, place, prompt_length)
        for one in per_layer(self, num_layers):
            for position in place:
                yield changed(one, positions=(position,))


Item = TypeVar("Item")


@functools.cache
def _what_fields(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields_of(cls) if field.init and field.name not in cls.place_fields)


def fields_of(intervention: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of an intervention or its class."""
    return dataclasses.fields(intervention)


def changed(item: Item, **attributes: Any) -> Item:
    """The intervention with other attributes that are known to be good. Quicker than `dataclasses.replace`: a plan may need thousands."""
    made = object.__new__(type(item))
    made.__dict__.update(item.__dict__, **attributes)
    return made


def per_layer(item: Any, num_layers: int | None) -> Iterator[Any]:
    """An intervention with `layers`, once for each of them."""
    if item.layers == "all" and num_layers is None:
        yield item
        return
    for layer in range(num_layers or 0) if item.layers == "all" else item.layers:
        check_layer(f"{type(item).__name__}.layers", layer, num_layers)
        yield changed(item, layers=(layer,))


def check_layer(field: str, layer: int, num_layers: int | None) -> None:
    if num_layers is not None and layer >= num_layers:
        raise fields.refuse(field, str(layer), f"0 to {num_layers - 1}, since the model has {num_layers} layers")


def point_of(item: Any) -> tuple[str, int]:
    """The (site, layer) of an intervention in normal form."""
    return item.site, item.at_layers[0]


def position_of(edit: Edit) -> int | None:
    """The position of an edit in normal form, which has at most one; None if it acts wherever its phase says."""
    place = edit.place
    return None if place is None else place[0]


# ------------------------------------------------------------------------------------------------------------ the registry

_registered: dict[str, type[Edit]] = {}


def register(cls: E) -> E:
    """Make an edit known by its kind, in this process. Raises ValueError if the kind is taken or is none of a name's form."""
    kind, there = getattr(cls, "kind", None), dataclasses.is_dataclass(cls) and issubclass(cls, Edit)
    if not there or not isinstance(kind, str) or not kind.isidentifier() or not isinstance(cls.order, int):
        raise ValueError(f"{cls.__name__} has to be a frozen dataclass, a subclass of Edit, with a kind and an order.")
    if kind == "capture" or _registered.get(kind, cls).__qualname__ != cls.__qualname__:
        taken = _registered[kind].__name__ if kind in _registered else "Capture"
        raise ValueError(f"The kind {kind!r} is taken by {taken}.")
    if len(cls.operands) > 2 or any(field not in {f.name for f in fields_of(cls)} for field in cls.operands):
        raise ValueError(f"{cls.__name__}.operands names up to two of its fields.")
    _registered[kind] = fields.explained(cls)
    kinds.cache_clear()
    return cls


@functools.cache
def kinds() -> dict[str, type[Edit]]:
    """All kinds of edits, in the order in which they act at a site; those that installed packages offer included."""
    for entry in entry_points(group=GROUP):
        cls = entry.load()
        if _registered.get(cls.kind) is not cls:
            register(cls)
    return dict(sorted(_registered.items(), key=lambda item: (item[1].order, item[0])))


def kind_of(name: str) -> type[Edit]:
    """The edit of this kind. Raises PlanError if there is none."""
    if name not in kinds():
        own = f"an edit of your own needs an entry point in the group {GROUP!r}, installed where the engine runs"
        raise PlanError(
            f"There is no edit of the kind {fields.shown(name)}; {fields.nearest(name, kinds())} And {own}."
        )
    return kinds()[name]


@functools.cache
def kernel_codes() -> dict[str, int]:
    """The numbers of the kinds that have a kernel, in the tables that it reads. Kinds that are registered later are not in the kernel."""
    return {kind: 1 + i for i, (kind, cls) in enumerate(kinds().items()) if cls.kernel is not None} | {"capture": 0}


def apply(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of a site after the edits `ops`, which all of the rows get. `x_TH` is left as it is.

    In float32, in the order of the ops: an edit's `reference` gives the new value; the summands of edits that add and follow each other are
    computed from the same value and their sum is added once. Rounded to the dtype of `x_TH` at the end. A row's result does not depend on
    the rows beside it.

    Args:
        x_TH: `[T, H]`, float32, float16 or bfloat16.
        ops: in the order of `compile.Profile.ops`; captures are skipped.
        bank: float32 `[H]` each, what `Op.vector` and `Op.mask` are indices of.

    Returns:
        `[T, H]` in the dtype of `x_TH`, equal to it bit for bit wherever nothing changed.
    """
    if all(op.kind == "capture" for op in ops):
        return x_TH
    new_TH = edited(x_TH, ops, bank)
    return x_TH.where(new_TH == x_TH, new_TH)  # 0 and -0 are equal: the old one stays


def edited(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """`apply` for callers that write only what is not equal to the old value, and so leave a 0 its sign themselves."""
    h_TH = x_TH.float()
    added: torch.Tensor | None = None  # the sum of the latest edits that add
    for op in ops:
        if op.kind == "capture":
            continue
        edit = kind_of(op.kind)
        v_H, w_H = (bank[i].to(h_TH.device) if i >= 0 else None for i in (op.vector, op.mask))
        if edit.adds:
            summand = edit.reference(h_TH, v_H, w_H, op.a, op.b, op.c)  # type: ignore[arg-type]
            added = summand if added is None else added + summand
            continue
        if added is not None:
            h_TH, added = h_TH + added, None
        h_TH = edit.reference(h_TH, v_H, w_H, op.a, op.b, op.c)  # type: ignore[arg-type]
    return (h_TH if added is None else h_TH + added).to(x_TH.dtype)
