"""How the next step runs: with CUDA graphs, compiled without them, or uncompiled."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform

from midstream.engine.replacements import Replacement


class StepMode:
    """How the step that is being prepared runs. The replaced functions of vLLM read it; all is False in steps without traces.

    Attributes:
        no_full_graph: no full CUDA graph is replayed; graphs of the pieces between attention calls may be.
        no_graphs: no CUDA graph is replayed.
        uncompiled: no compiled code runs.
    """

    no_full_graph = False
    no_graphs = False
    uncompiled = False

    @classmethod
    def set(cls, no_full_graph: bool = False, no_graphs: bool = False, uncompiled: bool = False) -> None:
        """Set the mode; without arguments, that of a plain step."""
        cls.no_full_graph, cls.no_graphs, cls.uncompiled = no_full_graph, no_graphs, uncompiled


def running_uncompiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `create_forward_context` that has vLLM skip compiled code in steps that run uncompiled."""

    def create_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if StepMode.uncompiled:
            context.skip_compiled = True
        return context

    return create_forward_context


class EagerKernels:
    """Switches a model's modules to vLLM's kernels and back. Does nothing except on CUDA and on the CPU.

    An engine that compiles leaves norms and activations to the compiler, and has their plain PyTorch code in the modules: many small
    kernels each, or one that `torch.compile` makes at its first call and again for other shapes. An uncompiled step uses vLLM's kernels
    instead, as an eager engine does.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._kernels: list[Replacement] = []
        self._priority: Any = None
        kernel = "forward_cuda" if current_platform.is_cuda() else "forward_cpu" if current_platform.is_cpu() else None
        if kernel is None or vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        for module in model.modules():
            if isinstance(module, CustomOp) and module._forward_method != getattr(module, kernel):
                method = "vllm.model_executor.custom_op.CustomOp._forward_method"
                self._kernels.append(Replacement(method, module, getattr(module, kernel)))
        if hasattr(current_platform, "get_default_ir_op_priority"):
            compilation = copy.copy(vllm_config.compilation_config)
            compilation.mode = CompilationMode.NONE
            eager = copy.copy(vllm_config)
            eager.compilation_config = compilation
            self._priority = current_platform.get_default_ir_op_priority(eager)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Use the kernels in the block."""
        for kernel in self._kernels:
            kernel.switch(True)
        try:
            with self._priority.set_priority() if self._priority is not None else contextlib.nullcontext():
                yield
        finally:
            for kernel in self._kernels:
                kernel.switch(False)
