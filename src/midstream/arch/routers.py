"""Routers that choose experts by themselves, as in transformers: `split_routers` gives them a module that their logits pass through.

Such a router computes its logits by a matrix product, chooses by them, and returns both. The mixture uses the choice alone, so a change of
the returned logits would do nothing. So the router gets a child module that the logits pass through before it chooses. The output of that
module is the site `router`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from midstream import hooks
from midstream.arch.aliases import Aliases, Rename
from midstream.arch.blocks import ROUTER_LOGITS, RoleNames, is_moe


def split_routers(root: nn.Module, rename: Rename | None = None) -> None:
    """Give each router in `root` that chooses by itself a child `midstream_logits`. The model computes the same as before.

    Args:
        root: a model of transformers. A second call changes nothing.
        rename: the user's names, as for `detect`.
    """
    modules = dict(root.named_modules())
    names = RoleNames(Aliases(rename, modules))
    for path, module in modules.items():
        has_matrix = getattr(getattr(module, "weight", None), "ndim", 0) == 2
        is_split = hasattr(module, ROUTER_LOGITS) or type(module).forward is nn.Linear.forward
        if not has_matrix or is_split or names.rank(path, "router") is None:
            continue
        if is_moe(modules[path.rpartition(".")[0]]):
            module.add_module(ROUTER_LOGITS, nn.Identity())
            hooks.inside(module, _ThroughModule)


class _ThroughModule(TorchFunctionMode):
    """Passes the first matrix product of a router's forward, its logits, through the child module."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._router = router
        self._is_done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_done or func is not functional.linear or result.shape[-1] != len(self._router.weight):
            return result
        self._is_done = True
        return getattr(self._router, ROUTER_LOGITS)(result)  # PyTorch takes the mode off for this call
