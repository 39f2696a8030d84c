"""How functions of vLLM's are replaced, and those that concern the steps. All are inert in steps without traces.

Seen on vLLM 0.26 (V1, V2) and 0.32 (V1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class StepMode:
    """How the step that is being prepared runs.

    Attributes:
        no_full_graph: without replay of a full CUDA graph; graphs of the pieces between splitting ops are fine.
        no_graphs: without replay of any.
        uncompiled: without compiled code.
    """

    no_full_graph = False
    no_graphs = False
    uncompiled = False

    @classmethod
    def set(cls, no_full_graph: bool = False, no_graphs: bool = False, uncompiled: bool = False) -> None:
        """Set the mode; without arguments, that of a plain step."""
        cls.no_full_graph, cls.no_graphs, cls.uncompiled = no_full_graph, no_graphs, uncompiled


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of a function of a module or a class of vLLM's, once a process."""
    original = getattr(owner, name)
    if hasattr(original, "midstream"):
        return
    ours = functools.wraps(original)(make(original))
    ours.midstream = True  # type: ignore[attr-defined]
    setattr(owner, name, ours)


def apply() -> None:
    """Apply the patches, once a process."""
    _patch_forward_context()
    _patch_v2_dispatch()
    _patch_rest()


def _patch_forward_context() -> None:
    """`skip_compiled` is what vLLM itself runs a step uncompiled by; its runners set it for encoders only."""
    import vllm.forward_context as module

    def make(original: Any) -> Any:
        def create_forward_context(*args: Any, **kwargs: Any) -> Any:
            context = original(*args, **kwargs)
            if StepMode.uncompiled:
                context.skip_compiled = True
            return context

        return create_forward_context

    replace(module, "create_forward_context", make)


def _patch_v2_dispatch() -> None:
    """The V2 runner replays full CUDA graphs past the model's call, so it must be told not to for an eager step."""
    try:
        import vllm.v1.worker.gpu.model_runner as module
    except ImportError:  # the CPU build lacks what V2 needs
        return
    if not hasattr(module, "dispatch_cg_and_sync_dp"):
        return

    def make(original: Any) -> Any:
        def dispatch_cg_and_sync_dp(
            manager: Any, requests: int, tokens: int, uniform: int | None, *args: Any, **kwargs: Any
        ) -> Any:
            kwargs["need_eager"] = kwargs.get("need_eager", False) or StepMode.no_graphs
            # Full graphs are kept for uniform decode batches, so a batch that is not called one gets the pieces' graphs.
            asked = None if StepMode.no_full_graph else uniform
            dispatched = original(manager, requests, tokens, asked, *args, **kwargs)
            if StepMode.no_full_graph and dispatched[0].cg_mode.name == "FULL":
                return original(manager, requests, tokens, None, *args, **{**kwargs, "need_eager": True})
            return dispatched

        return dispatch_cg_and_sync_dp

    replace(module, "dispatch_cg_and_sync_dp", make)


def _patch_rest() -> None:
    """An engine in its client's process rests behind its last output, where one in a process of its own makes another step, in which the
    workers hear that the request is over: consumers of its captures would wait for the next request."""
    from vllm.v1.engine.core_client import InprocClient

    for name in ("get_output", "abort_requests"):
        replace(InprocClient, name, _telling_ends)


def _telling_ends(original: Any) -> Any:
    def call(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        scheduler = self.engine_core.scheduler
        if getattr(scheduler, "has_ends_to_tell", False) and not scheduler.has_unfinished_requests():
            self.engine_core.step_fn()
        return result

    return call
