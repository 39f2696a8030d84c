"""The edits of a site on rows, as an engine on a CPU makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import Op
from midstream.runtime.tables import RowProfiles
from midstream.runtime.torch_tables import TorchTables

POINT = ("resid_post", 0)


def apply(x_TH: torch.Tensor, ops: Sequence[Op], bank: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value after the edits, each at all rows; `x_TH` itself if there are none."""
    tables = TorchTables([POINT], torch.device("cpu"), x_TH.dtype)
    profiles = [Profile({}), Profile({POINT: tuple(ops)})]
    slots = tables.load(CompiledPlan(list(bank), profiles, np.ones(1, np.int32), 1, np.ones(1, bool)))
    tables.begin_step(RowProfiles(np.full(len(x_TH), slots.ids[1], np.int32)), None)
    return tables.edited(0, x_TH, None)[0]
