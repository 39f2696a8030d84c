"""When: edits for the rows whose score lies within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.plan import fields
from midstream.plan.ops.edit import Edit, Intervention, changed, point_of, register
from midstream.plan.steps import INPUT, Ref
from midstream.plan.vectors import Named, Zeros
from midstream.sites import Point

if TYPE_CHECKING:
    import torch

    from midstream.plan.probes import Probe
    from midstream.plan.program import Program


@register
@dataclass(frozen=True)
class When(Edit):
    """Make edits only at the tokens whose score by a probe lies within bounds.

    Each token's own score decides: `h = edit(h)` where `above < score < below`, and h is unchanged elsewhere. The score is computed in
    float32 from the value at the probe's site before the plan's edits there. Gated edits act after all other edits of their site, one after
    the other, in their order in the plan. Conditional activation steering: Lee et al. 2024 (arXiv:2409.05907).

    Args:
        probe: a `Probe` with one score a token, `when="before"` and `aggregate="last"`. It decides at every token where the edits would
            act; its `name`, `positions` and stops do not matter here. Give it to the plan, too, to get the scores.
        above, below: the bounds, at least one of them.
        then: an edit or several: `Steer`, `Patch`, `Clamp`, `Apply`, or an installed kind. Their sites come after the probe's in the
            forward pass, or are the same. A patch has no recorded run as its source.

    Raises:
        PlanError: the value of a field is not allowed. With the model known: an edit's site comes before the probe's, or lies on another
            pipeline stage.
    """

    kind, order, part_fields = "when", 50, ("probe", "then")

    probe: Probe
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    then: Any

    def __post_init__(self) -> None:
        from midstream.plan.probes import Probe  # whose module needs the edits' base

        probe = self.probe
        if not isinstance(probe, Probe):
            raise fields.refuse("When.probe", fields.shown(probe), "a Probe")
        if probe.classes > 1 or probe.when != "before":
            given = f"one with {probe.classes} scores a token" if probe.classes > 1 else "one with when='after'"
            raise fields.refuse("When.probe", given, "a Probe with one score a token and when='before'")
        if probe.aggregate != "last":
            allowed = "one with aggregate='last', since each token is decided by its own score"
            raise fields.refuse("When.probe", f"one with aggregate={probe.aggregate!r}", allowed)
        bounds = {
            name: fields.number(f"When.{name}", bound)
            for name in ("above", "below")
            if (bound := getattr(self, name)) is not None
        }
        if not bounds:
            raise fields.refuse("When.above", "None, as When.below", "a number for at least one of them")
        if len(bounds) == 2 and bounds["above"] >= bounds["below"]:
            raise fields.refuse("When.above", f"{bounds['above']:g}", f"a number under When.below, {bounds['below']:g}")
        edits = tuple(self.then) if isinstance(self.then, (tuple, list)) else (self.then,)
        for i, edit in enumerate(edits):
            if not isinstance(edit, Edit) or isinstance(edit, When):
                raise fields.refuse(f"When.then[{i}]", fields.shown(edit), "an edit, such as Steer")
            if edit.at_attention:
                allowed = "an edit of the rows of a site, since a gate decides row by row"
                raise fields.refuse(f"When.then[{i}]", f"a {type(edit).__name__}", allowed)
            if edit.reads_run:
                raise fields.refuse(f"When.then[{i}]", "a patch from a recorded run", "one from a vector, or a name")
        if not edits:
            raise fields.refuse("When.then", "empty", "an edit or several")
        condition = Probe(
            probe.site,
            layer=probe.layer,
            weight=probe.weight,
            program=probe.program,
            bias=probe.bias,
            activation=probe.activation,
            name="condition",
            positions="all",
        )
        fields.settle(self, probe=condition, then=edits, **bounds)

    # A `Plan` splits a `When` with several edits, so what follows is about a `When` with one edit.

    @property
    def alone(self) -> tuple[When, ...]:
        """One `When` for each edit."""
        return (self,) if len(self.then) == 1 else tuple(changed(self, then=(edit,)) for edit in self.then)

    @property
    def edit(self) -> Edit:
        """The edit, or the first of several."""
        return self.then[0]  # type: ignore[no-any-return]

    site = property(lambda self: self.edit.site)  # type: ignore[assignment]
    layer = property(lambda self: self.edit.layer)  # type: ignore[assignment]
    layers = property(lambda self: self.edit.layers)  # type: ignore[assignment]
    phase = property(lambda self: self.edit.phase)  # type: ignore[assignment]
    positions = property(lambda self: self.edit.positions)  # type: ignore[assignment]
    layer_field = property(lambda self: self.edit.layer_field)  # type: ignore[assignment]
    position_field = property(lambda self: self.edit.position_field)  # type: ignore[assignment]

    @property
    def place(self) -> Any:
        return self.edit.place

    @property
    def parts(self) -> tuple[Intervention, ...]:
        return (*self.then, self.probe)

    def with_parts(self, change: Callable[[Intervention], Intervention]) -> When:
        return changed(self, then=tuple(map(change, self.then)), probe=change(self.probe))

    @property
    def further(self) -> tuple[Point, ...]:
        return *self.edit.further, point_of(self.probe)

    @property
    def copies(self) -> int:
        return self.edit.copies

    @property
    def runs_program(self) -> bool:
        return True

    def at(self, layers: Any) -> When:
        return changed(self, then=(self.edit.at(layers),))

    def counted_from_0(self, num_layers: int) -> When:
        return self.with_parts(lambda part: part.counted_from_0(num_layers))

    def changes_nothing(self) -> bool:
        return self.edit.changes_nothing()

    def effect(self) -> tuple[Any, ...]:
        return self.kind, self.probe, self.above, self.below, self.edit.effect()

    def named(self, change: Callable[[Named], Named]) -> When:
        return self.with_parts(lambda part: part.named(change))

    def placeless(self) -> When:
        return changed(self, then=(self.edit.placeless(),))

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[When]:
        self.probe.layers_in(num_layers or 0)
        for edit in self.edit.spread(num_layers, prompt_length):
            yield changed(self, then=(edit,))

    def program_for(self, dtype: str, width: Callable[[str, int], int], vector: Callable[[Named], Any]) -> Program:
        from midstream.plan.building import StepWriter  # imports torch, unlike this module

        edit, own = self.edit, self.edit.its_program
        size = width(*point_of(edit))
        inputs = own.inputs if own is not None else ()
        writer = StepWriter(size, own.dtype if own is not None else dtype, (*inputs, width(*point_of(self.probe))))
        if own is not None:
            old = INPUT
            (new,) = writer.inlined(own, *(Ref(-1 - i) for i in range(1 + len(inputs))))
        else:
            old = writer.cast(INPUT, "float32")
            new = writer.arithmetic(edit.kind, edit.numbers(), old, _operands(edit, size, vector))
        score = self.probe.written(writer, Ref(-2 - len(inputs)), vector)
        conditions = [
            writer.step(op, score, bound)
            for op, bound in (("gt.Scalar", self.above), ("lt.Scalar", self.below))
            if bound is not None
        ]
        holds = conditions[0] if len(conditions) == 1 else writer.step("logical_and.default", *conditions)
        return writer.program(writer.step("where.self", holds, new, old))


def _operands(edit: Edit, width: int, vector: Callable[[Named], Any]) -> list[torch.Tensor | None]:
    """The arithmetic's v and w, float32 `[width]`; None for none."""
    import torch

    given = dict(edit.values())
    found: list[torch.Tensor | None] = []
    for field in (*edit.operands, "", "")[:2]:
        value, shape = given.get(field), edit.shape(field)
        if value is None:
            found.append(None)
            continue
        if isinstance(value, Zeros):
            found.append(torch.zeros(width))
            continue
        data = np.array(vector(value) if isinstance(value, Named) else value.data, np.float32)
        found.append(torch.from_numpy(np.array(shape(data, edit.label(field)) if shape is not None else data)))
    return found
