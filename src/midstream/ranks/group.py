"""vLLM's groups of ranks, as far as midstream uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed


def exchange_in(group: Any) -> Callable[[Any], list[Any]]:
    """What every rank of one of vLLM's groups passes, in the group's order; collective, for small things at the start."""

    def exchange(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, value, group=group.cpu_group)
        return gathered

    return exchange
