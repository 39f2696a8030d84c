"""Apply: replace a value by a row-wise function of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from midstream.plan import fields
from midstream.plan.ops.edit import Edit, register
from midstream.plan.program import Program


@register
@dataclass(frozen=True)
class Apply(Edit):
    """Replace each row by a function of it: `h = program(h)`, computed in the program's dtype.

    It acts after all other kinds of edits at its site. Several at one site are applied in their order.

    Args:
        site: one of `midstream.sites.LAYER_SITES`; at `attn_z` the program takes and returns all heads side by side.
        layers: `"all"`, a layer or a sequence of layers, counted from 0, or from the end: -1.
        program: a `midstream.plan.program.Program` of the site's width.
        phase, positions: as for `Steer`.

    Raises:
        PlanError: a field is not as above; positions with `phase="prefill"`. The program itself is checked when it is made.
    """

    kind, order, function = "apply", 40, "program"

    site: str
    _: KW_ONLY
    layers: Any = "all"
    program: Program
    phase: str = "both"
    positions: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.program, Program) or self.program.is_read:
            raise fields.refuse("Apply.program", fields.shown(self.program), "a Program with one result")
        self.settle()

    def changes_nothing(self) -> bool:
        return self.program.changes_nothing
