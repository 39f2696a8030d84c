"""The kinds of edits, one file each: `Patch`, `Steer`, `Clamp`, `Apply`, `When`, `Knockout`. `edit` defines the interface of a kind."""

from midstream.plan.ops.apply import Apply
from midstream.plan.ops.clamp import Clamp
from midstream.plan.ops.edit import Edit, register
from midstream.plan.ops.knockout import Knockout
from midstream.plan.ops.patch import Patch
from midstream.plan.ops.steer import Steer
from midstream.plan.ops.when import When

__all__ = ["Apply", "Clamp", "Edit", "Knockout", "Patch", "Steer", "When", "register"]
