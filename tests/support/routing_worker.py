"""A worker that notes which experts vLLM's routers choose."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch


class RoutingWorker:
    """Named as `worker_extension_cls`. The routers report as they do with vLLM's `enable_return_routed_experts`, which needs a GPU."""

    model_runner: Any

    def chosen_experts(self: Any) -> list[list[list[int]]]:
        """Those chosen since the last call, by layer and row. The first call begins to note them."""
        noted, self.noted = getattr(self, "noted", {}), defaultdict(list)
        routers = [
            module.router
            for _, module in self.model_runner.get_model().named_modules()
            if hasattr(getattr(module, "router", None), "set_capture_fn")
        ]

        def note(layer: int, experts: torch.Tensor) -> None:
            self.noted[layer] += experts.sort(-1).values.tolist()

        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(note, layer))
        return [noted[layer] for layer in sorted(noted)]
