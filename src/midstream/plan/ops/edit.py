"""The common code of all edits: base classes, the registry of kinds, and the edits' application in PyTorch.

An edit is one class in one file: its fields, its arithmetic in PyTorch (`reference`) and in Triton (`kernel`), and the condition under
which it changes nothing. The wire form, the checks, the normal form, the keys of the prefix cache and the engine's tables follow from it:

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

A package offers its edits by an entry point in the group `midstream.ops` that names the class, so that every process of an engine finds it.

Legend: T tokens, H the site's width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.program import Program
from midstream.plan.vectors import Named, RecordedRun, Vector, at_heads
from midstream.sites import Point

if TYPE_CHECKING:
    import torch

PHASES = ("both", "prefill", "decode")
GROUP = "midstream.ops"
READINGS = ("capture", "probe")  # the kinds that keep something of a row and change nothing
MAX_GENERATED = 1 << 16  # generated tokens that an edit may name
FOREVER = 2**62  # after every position
Shape = Callable[[np.ndarray, str], np.ndarray]  # (numbers, name for messages) -> the numbers for the arithmetic
E = TypeVar("E", bound="type[Edit]")
Item = TypeVar("Item", bound="Intervention")


class Op(NamedTuple):
    """One operation on a row at a site, as tables and kernels read it.

    Attributes:
        kind: `Edit.kind`, or "capture" or "probe".
        vector, mask: indices of the first and the second operand in a bank of vectors; -1 for none.
        a, b, c: `Edit.numbers`.
        offset: for a capture or a probe, where its result starts in the captured row or the row of scores, in elements.
        after: for a capture or a probe, whether it reads the value after the edits, and not before them.
        program: an edit's function in place of arithmetic; a capture's or a probe's function of the value that it reads.
        inputs: the (site, layer) of the program's further inputs.
        is_final: whether it is the op of a final edit.
    """

    kind: str
    vector: int = -1
    mask: int = -1
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    offset: int = 0
    after: bool = False
    program: Program | None = None
    inputs: tuple[Point, ...] = ()
    is_final: bool = False

    @property
    def is_edit(self) -> bool:
        return self.kind not in READINGS


class RowChange(NamedTuple):
    """The change of a row h of a site by a trace: `scale * h + sum of (h . w) u + constant`.

    Attributes:
        outers: each `(u, w)`, float64 `[H]`.
        constant: float64 `[H]`; None for none.
        eps: the relative rounding error of its numbers.
    """

    scale: float
    outers: tuple[tuple[Any, Any], ...]
    constant: Any
    eps: float

    @property
    def is_nothing(self) -> bool:
        return self.scale == 1 and not self.outers and (self.constant is None or not bool(self.constant.any()))


class Intervention:
    """Base of edits, `Capture` and `Probe`: frozen dataclasses with a site, layers and positions.

    Attributes:
        kind: its name on the wire.
        layer_field, position_field: the names of the fields for layers and positions.
        function: the field that holds a `Program`; None if there is none.
        operands: the fields that hold a vector of the site's width, or the name of one. An edit has at most two: v and w.
        part_fields: the fields that hold interventions, one or a tuple.
        selector_fields: the fields that take the same values as `Capture.positions`.
        at_attention: whether it changes the attention of a layer, and not single rows of a site.
        run_operands: the operands that may also hold a `RecordedRun` or zeros; `Edit.run_row` says which row.
        head: the head to which it is limited, at a site with heads, or a tuple of several; None for the whole width.
        final: whether it is a final edit, and what other edits a plan with it may have: see `plan.ops.final`.
    """

    kind: ClassVar[str]
    layer_field: ClassVar[str] = "layers"
    position_field: ClassVar[str] = "positions"
    function: ClassVar[str | None] = None
    operands: ClassVar[tuple[str, ...]] = ()
    run_operands: ClassVar[tuple[str, ...]] = ()
    part_fields: ClassVar[tuple[str, ...]] = ()
    selector_fields: ClassVar[tuple[str, ...]] = ()
    at_attention: ClassVar[bool] = False
    final: ClassVar[str | None] = None

    head: Any = None
    site: str
    layer: int
    layers: Any
    positions: Any

    @property
    def its_program(self) -> Program | None:
        """The value of its `function` field."""
        return getattr(self, self.function) if self.function is not None else None

    @property
    def further(self) -> tuple[Point, ...]:
        """The (site, layer) of other values that it reads."""
        return ()

    @property
    def parts(self) -> tuple[Intervention, ...]:
        """The interventions that it consists of; empty if it is a single one."""
        return ()

    @property
    def alone(self) -> tuple[Intervention, ...]:
        """Interventions with one site each, which together do the same."""
        return (self,)

    @property
    def copies(self) -> int:
        """Edits per layer and position in its normal form."""
        return 1

    def with_parts(self, change: Callable[[Intervention], Intervention]) -> Intervention:
        """The same with its parts changed."""
        return self

    @property
    def runs_program(self) -> bool:
        """Whether it runs a program, which `program_for` returns."""
        return self.its_program is not None

    def program_for(
        self, dtype: str, width: Callable[[str, int], int], vector: Callable[[Named], Any]
    ) -> Program | None:
        """The program that it runs, for an intervention in normal form; None if it runs none.

        Args:
            dtype: of the rows, as in "bfloat16".
            width: of a site at a layer.
            vector: returns a named vector, `[width]`.
        """
        return self.its_program

    def values(self) -> Iterator[tuple[str, Any]]:
        """The given operands, without those of its parts: (field, `Vector`, `Named`, `RecordedRun` or `Zeros`)."""
        for field in self.operands:
            value = getattr(self, field)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    yield field, one

    @property
    def at_layers(self) -> Any:
        """`"all"` or a tuple of layers."""
        return (self.layer,) if self.layer_field == "layer" else self.layers

    @property
    def place(self) -> Any:
        """A tuple of positions of the prompt, or a `Span`. None for an edit at every position of its phase. A capture may have a word or a
        selector.
        """
        return getattr(self, self.position_field)

    @property
    def places(self) -> dict[str, Any]:
        """`place`, and the values of `selector_fields`, by their fields."""
        return {self.position_field: self.place} | {field: getattr(self, field) for field in self.selector_fields}

    def with_places(self, **found: tuple[int, ...]) -> Intervention:
        """The same with positions instead of its spans, by their fields. Raises PlanError if another field does not fit them."""
        return dataclasses.replace(self, **found)  # type: ignore[type-var]

    def label(self, field: str) -> str:
        """A field's name in messages."""
        return f"{type(self).__name__}.{field}"

    def settle(self, **attributes: Any) -> None:
        """Check site and layers, and put checked values into the frozen dataclass."""
        attributes["site"] = fields.site(self.label("site"), self.site)
        if self.layer_field == "layers":
            attributes["layers"] = fields.layers(self.label("layers"), self.layers)
        else:
            attributes["layer"] = fields.integer(self.label("layer"), self.layer)
        fields.settle(self, **attributes)

    def layers_in(self, num_layers: int) -> Sequence[int]:
        """Its layers in a model with `num_layers` layers (0: unknown). Raises PlanError for a layer outside the model."""
        if self.at_layers == "all":
            return range(num_layers)
        for layer in self.at_layers:
            if num_layers and not 0 <= layer < num_layers:
                allowed = f"0 to {num_layers - 1}, or from the end -1 to -{num_layers}"
                raise fields.refuse(self.label(self.layer_field), str(layer), allowed)
        return self.at_layers  # type: ignore[no-any-return]

    def at(self, layers: tuple[int, ...]) -> Self:
        """The same at these layers."""
        return changed(self, layers=layers)

    def named(self, change: Callable[[Named], Named]) -> Self:
        """The same with its named vectors changed."""
        found: dict[str, Any] = {}
        for field in self.operands:
            value = getattr(self, field)
            if isinstance(value, Named):
                found[field] = change(value)
            elif isinstance(value, tuple) and any(isinstance(one, Named) for one in value):
                found[field] = tuple(change(one) if isinstance(one, Named) else one for one in value)
        return changed(self, **found) if found else self

    def counted_from_0(self, num_layers: int) -> Self:
        """The intervention with layers counted from 0, except for those outside the model. Raises PlanError for a layer that
        occurs twice.
        """
        if self.at_layers == "all" or self.at_layers[0] >= 0:  # layers ascend, so no other one is negative
            return self
        if self.layer_field == "layer":
            return changed(self, layer=self.layer + num_layers) if self.layer >= -num_layers else self
        layers = sorted(layer + num_layers if -num_layers <= layer < 0 else layer for layer in self.at_layers)
        if len(set(layers)) < len(layers):
            given = f"{fields.shown(self.at_layers)}, which has a layer twice in a model of {num_layers}"
            raise fields.refuse(self.label(self.layer_field), given, "each once")
        return changed(self, layers=tuple(layers))

    @property
    def is_of_generated(self) -> bool:
        """Whether its positions are numbers of generated tokens, counted from 0."""
        return False

    def place_in(self, prompt_length: int | None) -> Any:
        """Its place, with listed positions counted from the start. Raises PlanError for a position outside, or a `Span`."""
        if prompt_length is None or self.is_of_generated or not isinstance(self.place, (tuple, fields.Span)):
            return self.place
        return fields.resolved(self.label(self.position_field), self.place, prompt_length)

    def per_layer(self, num_layers: int | None) -> Iterator[Self]:
        """One intervention for each of its `layers`; itself if they are "all" and the number of layers is unknown."""
        if self.layers == "all" and num_layers is None:
            yield self
            return
        for layer in self.layers_in(num_layers or 0):
            yield changed(self, layers=(layer,))


class Edit(Intervention):
    """Base of all edits. They have `layers`, `phase` and `positions`, unless `layer_field` and `position_field` say otherwise.

    Attributes:
        order: edits of a lower order act first at a site. `Patch` has 10, `Steer` 20, `Clamp` 30. Edits that run a program act
            after all others.
        adds: whether the arithmetic returns a summand rather than the new value. Consecutive edits that add are computed from the same h
            and added to it in one sum, so their order does not matter.
        place_fields: the fields that say where it acts. All others, and a run's row, are part of the keys of KV blocks.
        limited_by: the operand that is 0 in the dimensions that the edit leaves unchanged; if its field is None, it counts as ones. Only a
            kind that names such an operand may have a field `head`.
    """

    order: ClassVar[int]
    adds: ClassVar[bool] = False
    place_fields: ClassVar[frozenset[str]] = frozenset({"positions", "phase"})
    limited_by: ClassVar[str | None] = None

    phase: str

    # Each kind defines these.

    def changes_nothing(self) -> bool:
        """Whether it leaves every value unchanged, so that plans with and without it are equal."""
        raise NotImplementedError

    def numbers(self) -> tuple[float, float, float]:
        """The arithmetic's a, b and c, float32."""
        return 0.0, 0.0, 0.0

    @classmethod
    def saying(cls, change: RowChange, site: str, layer: int, where: Mapping[str, Any]) -> Sequence[Edit]:
        """The edits of this kind that change each row as `change` says; empty if there are none.

        Args:
            where: `{"phase": ...}`, or `{"positions": ...}` of the prompt.
        """
        return ()

    def shape(self, field: str) -> Shape | None:
        """The function that checks and changes a named vector in this operand; None to take the vector as it is."""
        return None

    def run_row(self) -> tuple[str, int, int]:
        """The (site, layer, position) of a recorded run's row, for an edit in normal form whose `run_operands` hold a run."""
        raise NotImplementedError

    def check_run(self, field: str, run: RecordedRun, widths: Mapping[tuple[str, int], int]) -> None:
        """Raise PlanError if the edit cannot read its row from `run`."""

    @staticmethod
    def reference(
        h_TH: torch.Tensor, v_H: torch.Tensor, w_H: torch.Tensor | None, a: float, b: float, c: float
    ) -> torch.Tensor:
        """The new value, or the summand, in plain PyTorch: used on the CPU, and the kernel is tested against it.

        Args:
            h_TH: float32 `[T, H]`.
            v_H, w_H: the operands, float32 `[H]`; None if there is none.

        Returns:
            float32 `[T, H]`, or of a shape that broadcasts to it. A row must not depend on other rows.
        """
        raise NotImplementedError

    # `reference` in Triton, for one row `[H]`. `tl` is triton.language; w is 1 if there is no second operand. Make it a static method
    # without annotations, since Triton does not allow them. An edit without a kernel runs on CPUs only.
    kernel: ClassVar[Callable[..., Any] | None] = None

    # These follow from the fields.

    def settle(self, **attributes: Any) -> None:
        """Check the common fields, and put checked values into the frozen dataclass."""
        super().settle(**attributes)
        if self.head is not None:
            heads = fields.heads(self.label("head"), self.head, self.site)
            fields.settle(self, head=(heads,) if isinstance(heads, int) else tuple(sorted(heads)))
        if "phase" not in field_names(type(self)):  # type: ignore[arg-type]
            return
        fields.one_of(self.label("phase"), self.phase, PHASES)
        if self.place is None:
            return
        field = self.label(self.position_field)
        positions = fields.positions(field, self.place)
        if self.phase == "prefill":
            given = f"{fields.shown(self.place)} with phase='prefill'"
            raise fields.refuse(
                field, given, 'positions of the prompt alone, or of generated tokens with phase="decode"'
            )
        if self.phase == "decode" and not (
            isinstance(positions, tuple) and all(0 <= p < MAX_GENERATED for p in positions)
        ):
            allowed = f'with phase="decode" numbers of generated tokens, from 0 to {MAX_GENERATED - 1}'
            raise fields.refuse(field, fields.shown(self.place), allowed)
        fields.settle(self, **{self.position_field: positions})

    @property
    def is_of_generated(self) -> bool:
        return self.phase == "decode" and isinstance(self.place, tuple)

    @property
    def counts_generated(self) -> bool:
        """Whether its effect on a position depends on where the prompt ends, for an edit in normal form."""
        return False

    @property
    def reads_run(self) -> bool:
        """Whether an operand is a recorded run."""
        return any([isinstance(getattr(self, field), RecordedRun) for field in self.run_operands])

    def effect(self) -> tuple[Any, ...]:
        """A key of the edit's effect, without its place. It has the ids of runs in place of the runs, since ids hash faster."""
        names = field_names(type(self))  # type: ignore[arg-type]
        values = [getattr(self, name) for name in names if name not in self.place_fields]
        return (self.kind, *(value.id if isinstance(value, RecordedRun) else value for value in values))

    def over_heads(self, head_dim: int | None, width: int, vector: Callable[[Named], Any]) -> dict[str, Vector]:
        """The operands of the same edit without `head`, `[width]`, by their fields. Recorded runs and zeros stay as they are.

        Args:
            head_dim: the width of a head; None if the site has no heads.
            vector: returns a named vector.

        Raises:
            PlanError: the site has no heads, or an operand has another width.
        """
        if head_dim is None:
            raise fields.refuse(self.label("head"), fields.shown(self.head), f"None at {self.site} in this model")
        found: dict[str, Vector] = {}
        for field, value in self.values():
            if isinstance(value, (Vector, Named)):
                numbers = vector(value) if isinstance(value, Named) else value.data
                found[field] = at_heads(numbers, self.head, head_dim, width, self.label(field))
        assert self.limited_by is not None
        if self.limited_by not in found:
            found[self.limited_by] = at_heads([1.0] * head_dim, self.head, head_dim, width, self.label("head"))
        return found

    def range_in(self, prompt_length: int) -> tuple[int, int]:
        """The positions `[start, stop)` at which it acts, for an edit in normal form."""
        if (position := position_of(self, prompt_length)) is not None:
            return position, position + 1
        return {"both": (0, FOREVER), "prefill": (0, prompt_length), "decode": (prompt_length, FOREVER)}[self.phase]

    def placeless(self) -> Self:
        """The edit without its place."""
        return changed(self, **dict.fromkeys(self.place_fields & vars(self).keys()))

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Self]:
        """The edit's normal form: one edit for each layer and position.

        Args:
            num_layers: the model's; None leaves `layers="all"` as it is.
            prompt_length: in tokens; None leaves positions as they are.

        Raises:
            PlanError: a layer lies outside the model, a position outside the prompt; with `prompt_length`, a span is not resolved yet.
        """
        place = self.place_in(prompt_length)
        for one in self.per_layer(num_layers):
            if place is None or isinstance(place, fields.Span):
                yield one
            else:
                yield from (changed(one, **{self.position_field: (position,)}) for position in place)


@functools.cache
def field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def changed(item: Item, **attributes: Any) -> Item:
    """The intervention with other attributes, which the caller has checked. Faster than `dataclasses.replace`: a plan may need
    thousands.
    """
    made = object.__new__(type(item))
    made.__dict__.update(item.__dict__, **attributes)
    return made


def point_of(item: Intervention) -> tuple[str, int]:
    """The (site, layer) of an intervention in normal form."""
    return item.site, item.at_layers[0]


def position_of(edit: Edit, prompt_length: int) -> int | None:
    """The position of an edit in normal form, which has at most one; None if it acts at all positions of its phase."""
    place = edit.place
    if place is None:
        return None
    return place[0] + (prompt_length if edit.is_of_generated else 0)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------ the registry

_registered: dict[str, type[Edit]] = {}


def register(cls: E) -> E:
    """Make an edit known by its kind, in this process. Raises ValueError if the kind is taken or is not a name."""
    kind, is_edit = getattr(cls, "kind", None), dataclasses.is_dataclass(cls) and issubclass(cls, Edit)
    if not is_edit or not isinstance(kind, str) or not kind.isidentifier() or not isinstance(cls.order, int):
        raise ValueError(f"{cls.__name__} must be a frozen dataclass, a subclass of Edit, with a kind and an order.")
    if kind in READINGS or _registered.get(kind, cls).__qualname__ != cls.__qualname__:
        taken = _registered[kind].__name__ if kind in _registered else kind.title()
        raise ValueError(f"The kind {kind!r} is taken by {taken}.")
    if len(cls.operands) > 2 or not set(cls.operands) <= set(field_names(cls)):  # type: ignore[arg-type]
        raise ValueError(f"{cls.__name__}.operands names up to two of its fields.")
    if "head" in field_names(cls) and not cls.at_attention and cls.limited_by not in cls.operands:  # type: ignore[arg-type]
        raise ValueError(f"{cls.__name__} has a field head, so limited_by names one of its operands.")
    _registered[kind] = fields.explained(cls)
    kinds.cache_clear()
    return cls


@functools.cache
def kinds() -> dict[str, type[Edit]]:
    """All kinds of edits, including those of installed packages, in the order in which they act at a site."""
    for entry in entry_points(group=GROUP):
        cls = entry.load()
        if _registered.get(cls.kind) is not cls:
            register(cls)
    return dict(sorted(_registered.items(), key=lambda item: (item[1].order, item[0])))


def kind_of(name: str) -> type[Edit]:
    """The class of this kind. Raises PlanError if the kind is unknown."""
    if name not in kinds():
        own = f"an edit of your own needs an entry point in the group {GROUP!r}, installed where the engine runs"
        raise PlanError(
            f"There is no edit of the kind {fields.shown(name)}; {fields.nearest(name, kinds())} And {own}."
        )
    return kinds()[name]


@functools.cache
def kernel_codes() -> dict[str, int]:
    """The kernel's number of each kind that has Triton code. The kernel lacks kinds that are registered later."""
    return {kind: 1 + i for i, (kind, cls) in enumerate(kinds().items()) if cls.kernel is not None} | {"capture": 0}


# ------------------------------------------------------------------------------------------------------------ in PyTorch


def edited(
    x_TH: torch.Tensor,
    ops: Sequence[Op],
    bank: Sequence[torch.Tensor],
    values: Mapping[Point, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """The value of a site after the edits among `ops`, each at all rows. `x_TH` is unchanged.

    Computes in float32, in the order of the ops, and rounds to the dtype of `x_TH` at the end. Then programs run, also in the order of the
    ops. A row's result does not depend on other rows, except as PyTorch's matrix products do.

    Args:
        x_TH: `[T, H]`, float32, float16 or bfloat16.
        ops: in the order of `compile.Profile.ops`.
        bank: float32 `[H]` each, indexed by `Op.vector` and `Op.mask`.
        values: (site, layer) -> `[T, width]`, for `Op.inputs`.

    Returns:
        `[T, H]` in the dtype of `x_TH`. Where the edits change nothing it equals `x_TH`, except that a zero may have the other sign: keep
        the old value there.
    """
    h_TH = _by_arithmetic(x_TH, ops, bank)
    for op in with_programs(ops):
        from midstream.plan.running import run

        assert op.program is not None
        h_TH = run(op.program, h_TH, *map(values.__getitem__, op.inputs))
    return h_TH


def with_programs(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The edits among the ops that run a program. They act after the others."""
    return tuple(op for op in ops if op.program is not None and op.is_edit)


def _by_arithmetic(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value after the edits without a program."""
    h_TH = x_TH.float()
    added: torch.Tensor | None = None  # the sum of the latest edits that add
    for op in ops:
        if not op.is_edit or op.program is not None:
            continue
        edit = kind_of(op.kind)
        v_H, w_H = (bank[i].to(h_TH.device) if i >= 0 else None for i in (op.vector, op.mask))
        if not edit.adds and added is not None:
            h_TH, added = h_TH + added, None
        new = edit.reference(h_TH, v_H, w_H, op.a, op.b, op.c)  # type: ignore[arg-type]
        if edit.adds:
            added = new if added is None else added + new
        else:
            h_TH = new
    return (h_TH if added is None else h_TH + added).to(x_TH.dtype)
