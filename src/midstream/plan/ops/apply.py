"""Apply: replace a value by a row-wise function of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from midstream.plan import fields
from midstream.plan.ops.edit import Edit, changed, register
from midstream.plan.program import Program
from midstream.sites import Point


@register
@dataclass(frozen=True)
class Apply(Edit):
    """Replace each row by a function of it: `h = program(h)`, computed in the program's dtype.

    It acts after all other kinds of edits at its site. Several at one site are applied in their order. With `inputs`, it is also a function
    of other values of the same token, which the model computes earlier in the same step: `h = program(h, early)`.

    Args:
        site: one of `midstream.sites.LAYER_SITES`; at `attn_z` the program takes and returns all heads side by side.
        layers: `"all"`, a layer or a sequence of layers, counted from 0, or from the end: -1.
        program: a function of the value, `[tokens, width]`, that returns the new value, or changes it in place:
            `lambda h: h - (h @ d)[:, None] * d`. It may use any PyTorch operation on each token's value, but may not look at numbers. When
            you pass the plan to a model, midstream runs the function twice on stand-ins for tensors, and sends its operations as data. You
            can also give such data: a `midstream.plan.program.Program` of the site's width.
        inputs: (site, layer) of each further input of the program or the function, `[("resid_post", 2)]`. The program gets
            the values from before the plan's own edits there. The site itself may be one of them.
        phase, positions: as in `Steer`.

    Raises:
        PlanError: a field is not as above; positions with `phase="prefill"`. The program itself is checked when it is made. With the model
            known: an input that the model may compute later than the value, or on another pipeline stage.
    """

    kind, order, function = "apply", 40, "program"

    site: str
    _: KW_ONLY
    layers: Any = "all"
    program: Program | Callable[..., Any]
    inputs: Any = ()
    phase: str = "both"
    positions: Any = None

    def __post_init__(self) -> None:
        if not callable(self.program) and (not isinstance(self.program, Program) or self.program.is_read):
            raise fields.refuse("Apply.program", fields.shown(self.program), "a function, or a Program with one result")
        self.settle(inputs=self._points())

    def _points(self) -> tuple[Point, ...]:
        given, allowed = self.inputs, "a list of points"
        is_right = isinstance(given, (tuple, list))
        if isinstance(self.program, Program):
            count = len(self.program.inputs)
            allowed = f"a list of {count}, as the program has further inputs"
            is_right = is_right and len(given) == count
        if not is_right:
            raise fields.refuse("Apply.inputs", fields.shown(given), allowed)
        found: list[Point] = []
        for i, each in enumerate(given):
            place = f"Apply.inputs[{i}]"
            if not isinstance(each, (tuple, list)) or len(each) != 2:
                raise fields.refuse(place, fields.shown(each), "(site, layer)")
            found.append((fields.site(place, each[0]), fields.integer(place, each[1])))
        return tuple(found)

    @property
    def is_function(self) -> bool:
        """Whether `program` is still a function. `lowering.row_programs` records it when the plan is given to a model."""
        return not isinstance(self.program, Program)

    @property
    def its_program(self) -> Program | None:
        return self.program if isinstance(self.program, Program) else None

    @property
    def further(self) -> tuple[Point, ...]:
        return self.inputs  # type: ignore[no-any-return]

    def counted_from_0(self, num_layers: int) -> Apply:
        found = super().counted_from_0(num_layers)
        if all(layer >= 0 for _, layer in self.inputs):
            return found
        inputs = tuple((site, layer + num_layers if layer < 0 else layer) for site, layer in self.inputs)
        return changed(found, inputs=inputs)

    def changes_nothing(self) -> bool:
        return isinstance(self.program, Program) and self.program.changes_nothing
